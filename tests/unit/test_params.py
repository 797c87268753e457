"""The host's structs are the header's: same fields, same offsets, same sizes."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest

from sage_aot._params import FIELDS, layout_digest, offsets, pack

HEADER = (Path(__file__).parents[2] / "templates/include/sage/params.cuh").read_text()
SCALAR_CODES = {"i32": "i", "Dtype": "i", "float": "f"}


def header_fields(name: str) -> list[tuple[str, str]]:
    """The struct's fields as the header declares them, with the codes that their types need."""
    body = re.search(rf"struct {name} {{\n(.*?)\n}};", HEADER, re.DOTALL)[1]
    fields = []
    for line in body.splitlines():
        declaration = line.split("//")[0].strip().rstrip(";")
        if not declaration:
            continue
        kind, names = re.fullmatch(r"((?:const )?\w+\*?) (.+)", declaration).groups()
        code = "Qqqq" if kind == "Tensor" else "Q" if kind.endswith("*") else SCALAR_CODES[kind]
        fields += [(field.strip(), code) for field in names.split(",")]
    return fields


@pytest.mark.parametrize("name", FIELDS)
def test_fields_match_the_header(name):
    assert list(FIELDS[name]) == header_fields(name)


@pytest.mark.parametrize("name", FIELDS)
def test_offsets_match_the_header_assertions(name):
    found = offsets(name)
    assert int(re.search(rf"sizeof\({name}\) == (\d+)", HEADER)[1]) == found["sizeof"]
    asserted = re.findall(rf"SAGE_OFFSET\({name}, (\w+)\) == (\d+)", HEADER)
    assert len(asserted) >= 3
    assert all(found[field] == int(offset) for field, offset in asserted)


@pytest.mark.parametrize("name", FIELDS)
def test_fields_are_aligned_as_a_compiler_aligns_them(name):
    for field, code in FIELDS[name]:
        assert offsets(name)[field] % struct.calcsize("<" + code[0]) == 0
    assert offsets(name)["sizeof"] % 8 == 0


def test_pack_writes_each_value_at_its_offset():
    values = range(1, 27)
    data = pack("StatsParams", *values)
    assert len(data) == offsets("StatsParams")["sizeof"]
    assert struct.unpack_from("<i", data, offsets("StatsParams")["chunk_rows"]) == (20,)


def test_the_digest_follows_the_structs(monkeypatch):
    before = layout_digest()
    assert re.fullmatch("[0-9a-f]{16}", before)
    assert layout_digest() == before
    monkeypatch.setitem(FIELDS, "StatsParams", FIELDS["StatsParams"][::-1])
    assert layout_digest() != before
