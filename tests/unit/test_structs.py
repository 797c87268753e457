"""The structs that kernels take by value: the bytes that the runtime fills in, against the kernels' compiler's
layout."""

from __future__ import annotations

import ctypes
import random
import struct

import pytest
from records import STRUCTS

from codegen.kernel_info import of_elf, of_ptx
from codegen.project import ROOT, Project
from sage_aot._kernels.manifest import Manifest, Struct
from sage_aot._launch import structs
from sage_aot._launch.structs import (
    FILLED,
    NO_SOURCE,
    NULL,
    SOURCES,
    WORD,
    Address,
    FastDivmod,
    Packed,
    Packer,
    Tensor,
    layout_problems,
    vocabulary,
)
from sage_aot._problem.options import OPTIONS

FOLDER = Project(ROOT, ROOT / "build").package
KINDS = {"pack": "PackParams", "lists": "ListsParams", "quant": "QuantParams", "delta": "DeltaParams",
         "attn": "AttnParams", "merge": "MergeParams", "pool": "PoolParams", "choose": "ChooseParams",
         "bwdprep": "BwdParams", "bwdkv": "BwdParams",
         "bwdq": "BwdParams"}


@pytest.fixture(scope="module")
def manifest() -> Manifest:
    return Manifest.read(FOLDER)


class Strided(ctypes.Structure):
    """A tensor, in C."""

    _fields_ = [("data", ctypes.c_uint64), ("batch", ctypes.c_int64), ("head", ctypes.c_int64), ("row", ctypes.c_int64)]


class Divided(ctypes.Structure):
    """A divisor, in C."""

    _fields_ = [("divisor", ctypes.c_int32), ("multiplier", ctypes.c_uint32), ("shift", ctypes.c_int32)]


C_TYPES = {"Q": ctypes.c_uint64, "T": Strided, "D": Divided, "i": ctypes.c_int32, "f": ctypes.c_float}
FORMATS = {"Q": "<Q", "T": "<Qqqq", "D": "<iIi", "i": "<i", "f": "<f"}


def every_value() -> dict[str, object]:
    """A value for every field that a struct may have. All values and addresses differ."""
    values = {}
    for i, (name, code) in enumerate(FILLED.items(), 1):
        address = SOURCES[i % len(SOURCES)], 16 * i
        values[name] = {"Q": address, "T": Tensor(address, 1000 + i, 2000 + i, 3000 + i), "i": i, "f": i + 0.5,
                        "D": FastDivmod(4000 + i, 2**32 - i, i)}[code]
    return values


def read(data: bytes, layout: Struct) -> dict[str, object]:
    """The fields of a struct, as a kernel reads them."""
    return {name: struct.unpack_from(FORMATS[code], data, offset)
            for name, (code, offset) in layout.fields.items()}


def expected(layout: Struct, addresses: dict[str, int]) -> dict[str, object]:
    def word(address: Address) -> int:
        source, offset = address
        return addresses[source] + offset

    def field(value: object) -> tuple:
        if isinstance(value, Tensor):
            return (word(value.data), *value[1:])
        if isinstance(value, FastDivmod):
            return tuple(value)
        return (word(value),) if isinstance(value, tuple) else (value,)

    return {name: field(value) for name, value in every_value().items() if name in layout.fields}


ADDRESSES = {source: 2**40 + 4096 * i for i, source in enumerate(SOURCES)}


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


def test_the_runtime_fills_in_every_struct_of_the_kernels(manifest):
    assert layout_problems(manifest.structs) == []
    assert manifest.structs.keys() == set(KINDS.values())


def test_nothing_is_known_that_no_struct_takes():
    """Options are an exception: FILLED has them whether a kernel takes them or not."""
    taken = {field for layout in STRUCTS.values() for field in layout.fields}
    assert FILLED.keys() - taken <= {"unused", *OPTIONS}


def test_options_at_run_time_name_the_kinds_whose_structs_have_them():
    at_run_time = {name: option.kinds for name, option in OPTIONS.items() if name in FILLED and not option.axis}
    assert all(at_run_time.values())
    assert at_run_time == {name: option.kinds for name, option in OPTIONS.items() if option.kinds}
    assert all(name in STRUCTS[f"{kind.capitalize()}Params"].fields for name, kinds in at_run_time.items()
               for kind in kinds)


@pytest.mark.parametrize("name", STRUCTS)
def test_fields_lie_where_a_c_compiler_puts_them(manifest, name):
    layout = manifest.structs[name]
    by_offset = sorted(layout.fields.items(), key=lambda field: field[1][1])
    in_c = type(name, (ctypes.Structure,), {"_fields_": [(field, C_TYPES[code]) for field, (code, _) in by_offset]})
    assert {field: getattr(in_c, field).offset for field in layout.fields} == {
        field: offset for field, (_, offset) in layout.fields.items()}
    assert ctypes.sizeof(in_c) == layout.size


@pytest.mark.parametrize("name", STRUCTS)
def test_a_kernel_reads_what_was_filled_in(name):
    layout = STRUCTS[name]
    data = Packer(layout).pack(every_value()).at(ADDRESSES)
    assert len(data) == layout.size
    assert read(data, layout) == expected(layout, ADDRESSES)


@pytest.mark.parametrize("name", STRUCTS)
def test_a_struct_whose_fields_were_moved_is_still_filled_in_right(name):
    """Fields go by their names."""
    fields, end = {}, 0
    for field, (code, _) in reversed(STRUCTS[name].fields.items()):
        fields[field], end = (code, end), end + struct.calcsize(FORMATS[code])
    moved = Struct(end, fields)
    assert layout_problems({name: moved}) == []
    data = Packer(moved).pack(every_value()).at(ADDRESSES)
    assert len(data) == moved.size
    assert read(data, moved) == expected(moved, ADDRESSES)


@pytest.mark.parametrize("divisor", [1, 2, 3, 5, 7, 8, 24, 86, 641, 2**16 - 1, 2**16 + 1, 2**30, 2**31 - 1])
def test_the_multiplier_of_a_divisor_gives_every_quotient(divisor):
    by = FastDivmod.of(divisor)
    assert by.divisor == divisor and 0 <= by.multiplier < 2**32
    rng = random.Random(divisor)
    numbers = {0, 1, 2**31 - 1, *(rng.randrange(2**31) for _ in range(2000))}
    numbers |= {n + d for n in (rng.randrange(2**31 // divisor) * divisor for _ in range(1000)) for d in (-1, 0)}
    for n in numbers - {-1}:
        assert (n * by.multiplier >> 31) % 2**32 >> by.shift == n // divisor, n


def test_a_struct_is_packed_once_for_all_addresses():
    """An offset may take all 8 bytes of an address: a workspace may be larger than 4 GiB."""
    packed = Packed((2**33 + 24).to_bytes(8, "little") + (7).to_bytes(8, "little") + bytes(8),
                    bytes([SOURCES.index("q"), NO_SOURCE, SOURCES.index("out")]))
    for q, out in ((4096, 8192), (2**47, 2**47 + 256)):
        addresses = {**dict.fromkeys(SOURCES, 1), "q": q, "out": out}
        assert struct.unpack("<QQQ", packed.at(addresses)) == (2**33 + q + 24, 7, out)
    assert struct.unpack("<QQQ", packed.data) == (2**33 + 24, 7, 0)


def test_an_address_that_is_not_wanted_stays_zero():
    layout = STRUCTS["AttnParams"]
    packed = Packer(layout).pack({**every_value(), "delta_s": NULL})
    assert packed.sources[layout.fields["delta_s"][1] // WORD] == NO_SOURCE
    assert read(packed.at(dict.fromkeys(SOURCES, 2**40)), layout)["delta_s"] == (0,)


def changed(**fields: tuple[str, int] | None) -> dict[str, Struct]:
    layout = STRUCTS["QuantParams"]
    both = {**layout.fields, **fields}
    return {"QuantParams": layout._replace(fields={name: entry for name, entry in both.items() if entry})}


def refused(field: str, code: str) -> str:
    return f"expected fields of QuantParams that sage_aot fills in, got {field} of type {code!r}"


@pytest.mark.parametrize(("structs", "problems"), [
    (changed(), []),
    (changed(more=("i", 248)), [refused("more", "i")]),
    (changed(rounds=("f", 244)), [refused("rounds", "f")]),
    (changed(more=("i", 248), k=("Q", 32)), [refused("k", "Q"), refused("more", "i")]),
    (changed(layout=("i", 248)), [refused("layout", "i")]),  # an option, but no number
    (changed(is_causal=("i", 248)), []),
])
def test_what_the_runtime_cannot_fill_in_is_a_sentence(structs, problems):
    assert layout_problems(structs) == problems


def test_the_vocabulary_follows_what_is_filled_in(monkeypatch):
    """A folder that was built before a field was added lacks the field."""
    before = vocabulary()
    assert len(before) == 16 and vocabulary() == before
    monkeypatch.setitem(structs.FILLED, "gate", "i")
    assert vocabulary() != before


def test_no_option_takes_the_name_of_what_is_known_of_a_launch_otherwise():
    others = {*structs._TENSORS, *structs._ADDRESSES, *structs._INTEGERS, *structs._FLOATS, *structs._DIVISORS}
    assert not others & OPTIONS.keys()


def test_every_option_reaches_a_kernel_or_is_the_hosts():
    """An option that does neither would be accepted and ignored."""
    fields = {field for layout in STRUCTS.values() for field in layout.fields}
    hosts = {"scale", "layout"}  # softmax_scale_log2, and the strides
    assert {name for name, option in OPTIONS.items() if not option.axis and name not in fields} == hosts
