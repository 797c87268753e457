"""The structs that kernels take by value: the runtime's classes against what the kernels' compiler laid out."""

from __future__ import annotations

import ctypes
import dataclasses
import struct

import pytest
from records import STRUCTS

from codegen.kernel_info import of_elf, of_ptx
from codegen.project import ROOT, Project
from sage_aot._kernels.manifest import Manifest, Struct
from sage_aot._launch.structs import (
    NULL,
    PARAMS,
    SOURCES,
    Address,
    AttnParams,
    Packed,
    Tensor,
    expected_fields,
    layout_problems,
    pack,
)

FOLDER = Project(ROOT, ROOT / "build").package
KINDS = {"stats": "StatsParams", "quant": "QuantParams", "delta": "DeltaParams", "attn": "AttnParams"}


@pytest.fixture(scope="module")
def manifest() -> Manifest:
    return Manifest.read(FOLDER)


class Strided(ctypes.Structure):
    """A tensor, in C."""

    _fields_ = [("data", ctypes.c_uint64), ("batch", ctypes.c_int64), ("head", ctypes.c_int64), ("row", ctypes.c_int64)]


C_TYPES = {"Q": ctypes.c_uint64, "T": Strided, "i": ctypes.c_int32, "f": ctypes.c_float}


def values_of(params: type) -> object:
    """A struct in which every field has another value, and every address another place."""
    values = {}
    for i, (name, code) in enumerate(expected_fields(params).items(), 1):
        address = Address(SOURCES[i % len(SOURCES)], 16 * i)
        values[name] = {"Q": address, "T": Tensor(address, 1000 + i, 2000 + i, 3000 + i), "i": i, "f": i + 0.5}[code]
    return params(**values)


def read(data: bytes, layout: Struct) -> dict[str, object]:
    """The fields of a struct, as a kernel reads them."""
    return {name: struct.unpack_from({"Q": "<Q", "T": "<Qqqq", "i": "<i", "f": "<f"}[code], data, offset)
            for name, (code, offset) in layout.fields.items()}


def expected(params: object, addresses: dict[str, int]) -> dict[str, object]:
    def word(address: Address) -> int:
        return addresses[address.source] + address.offset

    def field(value: object) -> tuple:
        if isinstance(value, Tensor):
            return (word(value.data), *value[1:])
        return (word(value),) if isinstance(value, Address) else (value,)

    return {item.name: field(getattr(params, item.name)) for item in dataclasses.fields(params)}


@pytest.mark.parametrize("kind", KINDS)
def test_every_cubin_lays_its_struct_out_as_the_manifest_says(manifest, kind):
    """One cubin of each arch; PTX is text."""
    archs = set()
    for record in manifest.kernels.values():
        if record.spec.kind == kind and record.spec.arch not in archs:
            archs.add(record.spec.arch)
            data = (FOLDER / record.file).read_bytes()
            info = of_ptx(data.decode()) if record.is_ptx else of_elf(data)
            assert (record.params, info.params, info.facts) == (KINDS[kind], KINDS[kind], record.facts)
            assert info.layout == manifest.structs[record.params]
    assert archs == set(manifest.archs)


def test_the_runtime_has_a_class_for_every_struct_of_the_kernels(manifest):
    assert layout_problems(manifest.structs) == []
    assert manifest.structs.keys() == PARAMS.keys()


@pytest.mark.parametrize("name", PARAMS)
def test_fields_lie_where_a_c_compiler_puts_them(manifest, name):
    layout = manifest.structs[name]
    by_offset = sorted(layout.fields.items(), key=lambda field: field[1][1])
    in_c = type(name, (ctypes.Structure,), {"_fields_": [(field, C_TYPES[code]) for field, (code, _) in by_offset]})
    assert {field: getattr(in_c, field).offset for field in layout.fields} == {
        field: offset for field, (_, offset) in layout.fields.items()}
    assert ctypes.sizeof(in_c) == layout.size


@pytest.mark.parametrize("name", PARAMS)
def test_a_kernel_reads_what_was_filled_in(name):
    params, addresses = values_of(PARAMS[name]), {source: 2**40 + 4096 * i for i, source in enumerate(SOURCES)}
    data = pack(params, STRUCTS[name]).at(addresses)
    assert len(data) == STRUCTS[name].size
    assert read(data, STRUCTS[name]) == expected(params, addresses)


@pytest.mark.parametrize("name", PARAMS)
def test_a_struct_whose_fields_were_moved_is_still_filled_in_right(name):
    """Fields go by their names: the order of the class is not that of the header."""
    fields, end = {}, 0
    widths = {"Q": 8, "T": 32, "i": 4, "f": 4}
    for field, code in sorted(expected_fields(PARAMS[name]).items(), key=lambda item: (-widths[item[1]], item[0])):
        fields[field] = (code, end)
        end += widths[code]
    moved = Struct(end, fields)
    assert [offset for _, offset in moved.fields.values()] == sorted(offset for _, offset in moved.fields.values())
    assert list(moved.fields) != list(STRUCTS[name].fields)
    assert layout_problems({name: moved}) == []
    params, addresses = values_of(PARAMS[name]), {source: 2**40 + 4096 * i for i, source in enumerate(SOURCES)}
    assert read(pack(params, moved).at(addresses), moved) == expected(params, addresses)


def test_a_struct_is_packed_once_for_all_addresses():
    """Of which the offset takes all 8 bytes, as a workspace may be larger than 4 GiB."""
    packed = Packed((2**33 + 24).to_bytes(8, "little") + (7).to_bytes(8, "little") + bytes(8), {0: "q", 16: "out"})
    for q, out in ((4096, 8192), (2**47, 2**47 + 256)):
        assert struct.unpack("<QQQ", packed.at({"q": q, "out": out, "k": 1})) == (2**33 + q + 24, 7, out)
    assert struct.unpack("<QQQ", packed.data) == (2**33 + 24, 7, 0)


def test_an_address_that_is_not_wanted_stays_zero():
    params = dataclasses.replace(values_of(AttnParams), delta_s=NULL)
    layout = STRUCTS["AttnParams"]
    packed = pack(params, layout)
    assert layout.fields["delta_s"][1] not in packed.sources
    data = packed.at(dict.fromkeys(SOURCES, 2 ** 40))
    assert read(data, layout)["delta_s"] == (0,)


def changed(**fields: tuple[str, int] | None) -> dict[str, Struct]:
    layout = STRUCTS["StatsParams"]
    both = {**layout.fields, **fields}
    return {"StatsParams": layout._replace(fields={name: entry for name, entry in both.items() if entry})}


@pytest.mark.parametrize(("structs", "problems"), [
    (changed(), []),
    (changed(merge=None), ["expected the fields of sage_aot._launch.structs.StatsParams, got others: merge"]),
    (changed(more=("i", 168)), ["expected the fields of sage_aot._launch.structs.StatsParams, got others: more"]),
    (changed(merge=("f", 164)), ["expected the fields of sage_aot._launch.structs.StatsParams, got others: merge"]),
    (changed(merge=None, more=("i", 164), k=("Q", 0)),
     ["expected the fields of sage_aot._launch.structs.StatsParams, got others: k, merge, more"]),
    ({"MeanParams": Struct(0, {})}, ["expected a struct of StatsParams, QuantParams, DeltaParams, AttnParams, got "
                                     "MeanParams"]),
    ({**changed(merge=None), "MeanParams": Struct(0, {}), "AttnParams": STRUCTS["AttnParams"]}, 2),
])
def test_what_the_runtime_cannot_fill_in_is_a_sentence(structs, problems):
    found = layout_problems(structs)
    assert (len(found) if isinstance(problems, int) else found) == problems
