"""The facts and fields of a kernel: reading the tables of a cubin and of PTX, and errors where they are incomplete."""

from __future__ import annotations

import dataclasses
import re
import struct

import pytest
from records import STRUCTS, backward_of, facts_of, selection_of

from codegen import nvrtc
from codegen.errors import BuildError
from codegen.kernel_info import KernelInfo, of_elf, of_ptx
from codegen.matrix import read_matrix
from codegen.project import ROOT, Project
from codegen.render import Renderer
from sage_aot._kernels.manifest import AttnRecord, Manifest, Struct

INCLUDE = ROOT / "templates/include"
SOURCE = """
#include "sage/params.cuh"
namespace sage {
struct SmallParams {
  Tensor t;
  const float* x;
  Dtype dtype;
  float scale;
  i32 a, b;
};
constexpr auto fields_of(const SmallParams*) {
  using Params = SmallParams;
  return fields(SAGE_STRUCT(SmallParams), FIELDS);
}
}  // namespace sage
struct Kernel {
  static constexpr auto facts() {
    return sage::facts(sage::Fact{"threads", 128}, sage::Fact{"top", 8.75f}, sage::Fact{"most", 2147483647},
                       sage::Fact{"least", -1e30f}, sage::Fact{"whole", true}, sage::Fact{"none", 0});
  }
};
extern "C" __global__ void k(const __grid_constant__ sage::SmallParams params) {
  const_cast<float*>(params.x)[0] = params.scale;
}
TABLES
"""
FIELDS = ("t", "x", "dtype", "scale", "a", "b")
TABLES = "SAGE_KERNEL_INFO(Kernel, SmallParams);"
INFO = KernelInfo(
    {"threads": 128.0, "top": 8.75, "most": 2147483647.0, "least": struct.unpack("<f", struct.pack("<f", -1e30))[0],
     "whole": 1.0, "none": 0.0},
    "SmallParams",
    Struct(56, {"t": ("T", 0), "x": ("Q", 32), "dtype": ("i", 40), "scale": ("f", 44), "a": ("i", 48), "b": ("i", 52)}))


@pytest.fixture
def compiled(tmp_path):
    """The code of the kernel above."""

    def compile_it(target: str = "sm_80", fields: tuple[str, ...] = FIELDS, tables: str = TABLES) -> bytes:
        path = tmp_path / "k.cu"
        rows = ", ".join(f"SAGE_FIELD({field})" for field in fields)
        path.write_text(SOURCE.replace("FIELDS", rows).replace("TABLES", tables))
        return nvrtc.compile_kernel(path, target, INCLUDE).code

    return compile_it


@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "sm_120"])
def test_a_cubin_tells_facts_and_fields(compiled, target):
    assert of_elf(compiled(target)) == INFO


def test_ptx_tells_the_same(compiled):
    assert of_ptx(compiled("compute_80").decode()) == INFO


def test_ptx_leaves_out_zeros_at_the_end_of_a_table(compiled):
    """The last fact is zero, so PTX does not write its value."""
    text = compiled("compute_80").decode()
    size, values = re.search(r"\.b8 sage_facts\[(\d+)\] = \{([\d, ]*)\}", text).groups()
    assert len(values.split(",")) < int(size) == 32 * len(INFO.facts)
    assert of_ptx(text).facts["none"] == 0.0


@pytest.mark.parametrize(("tables", "missing"), [
    ("", "sage_facts and sage_fields"),
    ('extern "C" __device__ constexpr auto sage_facts = Kernel::facts();', "sage_fields"),
    ('extern "C" __device__ constexpr auto sage_fields = '
     "sage::fields_of(static_cast<const sage::SmallParams*>(nullptr));", "sage_facts"),
])
def test_a_kernel_without_its_tables_is_told_how_to_have_them(compiled, tables, missing):
    message = f"got a kernel without {missing}: end its template with SAGE_KERNEL_INFO$"
    with pytest.raises(BuildError, match=message):
        of_elf(compiled(tables=tables))
    with pytest.raises(BuildError, match=message):
        of_ptx(compiled("compute_80", tables=tables).decode())


@pytest.mark.parametrize(("fields", "message"), [
    (("t", "x", "dtype", "scale", "a"), "the fields of SmallParams to fill its 56 bytes, got 52"),
    (("t", "x", "dtype", "scale"), "the fields of SmallParams to fill its 56 bytes, got 48"),
    (("x", "dtype", "scale", "a", "b"), "x of SmallParams at byte 0, right behind the field before it, got 32"),
    (("t", "x", "scale", "a", "b"), "scale of SmallParams at byte 40, right behind .*, got 44"),
    (("t", "x", "scale", "dtype", "a", "b"), "scale of SmallParams at byte 40, right behind .*, got 44"),
])
def test_a_field_that_is_left_out_is_found(compiled, fields, message):
    """The host would send such a field as zeros."""
    with pytest.raises(BuildError, match=f"expected {message}: fields_of.. must name all"):
        of_elf(compiled(fields=fields))


@pytest.mark.parametrize("image", [b"", b"not an ELF file", b"\x7fELF"])
def test_what_is_no_elf_file_is_one_sentence(image):
    with pytest.raises(BuildError, match="expected an ELF file, got another"):
        of_elf(image)


def test_a_cubin_without_symbols_has_no_tables(compiled):
    image = bytearray(compiled())
    table_of_sections = struct.unpack_from("<Q", image, 40)[0]
    size, count = struct.unpack_from("<HH", image, 58)
    for i in range(count):
        at = table_of_sections + i * size + 4
        if struct.unpack_from("<I", image, at)[0] == 2:  # SHT_SYMTAB
            struct.pack_into("<I", image, at, 0)
            struct.pack_into("<I", image, at - 4, 0)  # its name
    with pytest.raises(BuildError, match="got a kernel without sage_facts and sage_fields"):
        of_elf(bytes(image))


# --- the real kernels -------------------------------------------------------------------------------------------------


def test_the_records_of_tests_say_what_the_real_kernels_say():
    """records.py repeats facts of the device code, so that tests of the runtime run on real sizes: compare them."""
    manifest = Manifest.read(Project(ROOT, ROOT / "build").package)
    tiles = {companion: record.tile for record in manifest.every_attention()
             for companion in (*record.companions, *backward_of(record.spec), *selection_of(record.spec))}
    for name, record in manifest.kernels.items():
        tile = record.tile if isinstance(record, AttnRecord) else tiles[name]
        assert facts_of(record.spec, tile, record.family) == record.facts, name
    assert manifest.structs == STRUCTS


@pytest.mark.parametrize(("threads", "message"), [
    (384, "every thread takes equally many groups"), (1024, "every thread takes equally many keys"),
    (192, "a block takes whole KV tiles"), (64, "kMostTiles / kTiles"),
])
def test_a_quantizer_whose_threads_do_not_fit_its_tile_does_not_compile(tmp_path, threads, message):
    matrix = read_matrix(ROOT / "build_matrix.yaml", ROOT / "templates")
    kernel = next(kernel for kernel in matrix.kernels if kernel.spec.name == "sage_quant_sm80_d64_qkint8_pvf16")
    path = tmp_path / f"{kernel.spec.name}.cu"
    path.write_text(Renderer(ROOT / "templates").render(
        dataclasses.replace(kernel, how=dataclasses.replace(kernel.how, threads=threads))))
    with pytest.raises(BuildError, match=message):
        nvrtc.compile_kernel(path, "sm_80", INCLUDE)
