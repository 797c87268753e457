"""The census: which instructions of a disassembly are counted, and the rules that a kernel must keep to be shipped."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
from records import STRUCTS

from codegen import nvdisasm
from codegen.budget import judge, register_budget
from codegen.census import (
    exponentials_before_arrival,
    main_loop,
    main_loop_paths,
    promotion_under_products,
    tensor_opcodes,
)
from codegen.compilation import Compilation
from codegen.compiler import Report
from codegen.errors import BuildError
from codegen.kernel_info import KernelInfo
from codegen.matrix import read_matrix
from codegen.nvdisasm import Instruction
from codegen.project import ROOT, Project
from sage_aot._call.backends import default_library
from sage_aot._kernels.manifest import MachineCode, MainLoop, Struct

# Addresses count from 0 in steps of 0x10. The first loop has a guarded load, a branch for large scales, a rare one
# inside and one out of line, and leaves by a far jump; the second masks, so it has more of the same.
TWO_LOOPS = """
    MOV R0,R1
    BRA 0x20
0x20: LDSM R2,[R3]
    @P0 BRA 0x60
    LDGSTS [R4],[R5]
    IADD3 R4,R4,0x10
0x60: IMMA.16832.S8.S8 R8,R2,R3,R8
    HFMA2.MMA R1,R1,R1
    @P1 BRA 0xb0
    FFMA R1,R1,R2,R3
    BRA 0xe0
0xb0: FADD R1,R1,R2
    FFMA R1,R1,R2,R3
    FFMA R1,R1,R2,R3
0xe0: BRA.DIV ~URZ,0x290
    @!P2 BRA 0x110
    FMUL R1,R1,R2
0x110: CALL.REL.NOINC 0x2b0
    HMMA.16816.F32 R8,R2,R3,R8
    @P3 CALL.REL.NOINC 0x150
    BRA 0x20
0x150: LDSM R2,[R3]
    IMMA.16832.S8.S8 R8,R2,R3,R8
    FSEL R1,R1,R2,P0
    FSEL R1,R1,R2,P0
    FSEL R1,R1,R2,P0
    FSEL R1,R1,R2,P0
    FSEL R1,R1,R2,P0
    FSEL R1,R1,R2,P0
    FSEL R1,R1,R2,P0
    FSEL R1,R1,R2,P0
    FSEL R1,R1,R2,P0
    FSEL R1,R1,R2,P0
    FSEL R1,R1,R2,P0
    FSEL R1,R1,R2,P0
    FSEL R1,R1,R2,P0
    FSEL R1,R1,R2,P0
    HMMA.16816.F32 R8,R2,R3,R8
    @P3 BRA P4,0x150
    STG [R1],R2
    EXIT
0x290: SHFL.BFLY R1,R2
    BRA 0xf0
0x2b0: RET.REL.NODEC R2,0x0
"""
SUBROUTINES = frozenset([0x2b0])  # where a listing has one
_LINE = re.compile(r" *(?:(0x\w+): )?(?:(@\S+) )?(\S+) ?(.*)")
LOOP = MainLoop(matrix=2, other=13, rare=6)


def functions_of(listing: str):
    """The functions of a listing as above, through the form in which nvdisasm gives them."""
    instructions = values_of(listing)
    return nvdisasm.read_json(json_of(instructions), [section_of(instructions)])


def values_of(listing: str) -> list[dict[str, str]]:
    found = []
    for i, line in enumerate(listing.strip().splitlines()):
        label, predicate, opcode, operands = _LINE.fullmatch(line).groups()
        assert label is None or int(label, 16) == 16 * i, line
        values = {"predicate": predicate, "opcode": opcode, "operands": operands}
        found.append({key: value for key, value in values.items() if value})
    return found


def json_of(instructions: list[dict[str, str]]) -> str:
    return json.dumps([{"Producer": "a test"}, [{"start": 0, "sass-instructions": instructions}]])


def section_of(instructions: list[dict[str, str]]) -> nvdisasm.Section:
    return nvdisasm.Section(bytes(16 * len(instructions)), SUBROUTINES)


def test_the_loop_over_full_tiles_is_counted_along_its_straight_path():
    assert main_loop(functions_of(TWO_LOOPS)) == LOOP


def test_tensor_core_instructions_are_counted_in_the_whole_kernel():
    assert tensor_opcodes(functions_of(TWO_LOOPS)) == {"HMMA.16816.F32": 2, "IMMA.16832.S8.S8": 2}


def test_a_copy_is_on_the_straight_path_and_another_guarded_block_is_not():
    moved = TWO_LOOPS.replace("LDGSTS", "LDG")
    assert main_loop(functions_of(moved)) == MainLoop(LOOP.matrix, LOOP.other - 2, LOOP.rare + 2)


def test_the_path_that_moves_references_leads_through_the_exchange_of_lanes():
    listing = """
0x0: IMMA.16832.S8.S8 R8,R2,R3,R8
    @P0 BRA 0x60
    SHFL.BFLY PT,R1,R2,0x1,0x1f
    @P1 BRA 0x60
    FADD R1,R1,R2
    FADD R1,R1,R2
0x60: HMMA.16816.F32 R8,R2,R3,R8
    @P3 BRA 0x0
    EXIT
"""
    straight, moving = ([instruction.address // 16 for instruction in path]
                        for path in main_loop_paths(functions_of(listing)))
    assert straight == [0, 1, 6, 7]
    assert moving == [0, 1, 2, 3, 6, 7]
    assert main_loop_paths(functions_of("EXIT")) is None


def test_without_a_branch_that_moves_references_both_paths_are_the_same():
    straight, moving = main_loop_paths(functions_of(TWO_LOOPS))
    assert straight == moving and len(straight) == LOOP.matrix + LOOP.other


def test_the_masked_loop_may_come_first():
    masked_first = """
0x0: IMMA.16832.S8.S8 R8,R2,R3,R8
    FSEL R1,R1,R2,P0
    FSEL R1,R1,R2,P0
    @P0 BRA 0x0
    IMMA.16832.S8.S8 R8,R2,R3,R8
    FADD R1,R1,R2
    @P0 BRA 0x40
    EXIT
"""
    assert main_loop(functions_of(masked_first)) == MainLoop(matrix=1, other=2, rare=0)


def test_an_inner_loop_with_one_product_is_no_main_loop():
    nested = """
    MOV R0,R1
0x10: IADD3 R4,R4,0x10
0x20: IMMA.16832.S8.S8 R8,R2,R3,R8
    @P0 BRA 0x20
    HMMA.16816.F32 R8,R2,R3,R8
    @P1 BRA 0x10
    EXIT
"""
    assert main_loop(functions_of(nested)) == MainLoop(matrix=2, other=3, rare=0)


def test_a_loop_over_blocks_of_work_is_no_main_loop():
    persistent = """
0x0: IMMA.16832.S8.S8 R8,R2,R3,R8
0x10: IMMA.16832.S8.S8 R8,R2,R3,R8
    FADD R1,R1,R2
    FADD R1,R1,R2
    HMMA.16816.F32 R8,R2,R3,R8
    @P0 BRA 0x10
    @P1 BRA 0x0
    EXIT
"""
    assert main_loop(functions_of(persistent)) == MainLoop(matrix=2, other=3, rare=0)


@pytest.mark.parametrize("listing", ["MOV R0,R1\nEXIT", "HMMA.16816.F32 R1,R2\nEXIT", "FADD R1,R2\n@P0 BRA 0x0\nEXIT"])
def test_without_matrix_instructions_in_a_loop_there_is_no_main_loop(listing):
    assert main_loop(functions_of(listing)) is None


def test_an_absent_nvdisasm_says_what_to_install(monkeypatch):
    def absent(name):
        raise nvdisasm.PackageNotFoundError

    monkeypatch.setattr(nvdisasm, "distribution", absent)
    with pytest.raises(BuildError, match=r"expected nvdisasm 13, got none: install .*pip install -e '\.\[codegen\]'"):
        nvdisasm.disassemble([], "sm_80")


def test_another_nvdisasm_is_refused(monkeypatch):
    class Other:
        version = "14.0.1"

    monkeypatch.setattr(nvdisasm, "distribution", lambda name: Other)
    with pytest.raises(BuildError, match="expected nvdisasm 13, got 14.0.1"):
        nvdisasm.version()


def test_a_package_without_the_program_is_named(monkeypatch):
    class Empty:
        version = "13.5.37"
        files = None

    monkeypatch.setattr(nvdisasm, "distribution", lambda name: Empty)
    with pytest.raises(BuildError, match="expected nvidia-cuda-nvdisasm to hold one of nvdisasm, nvdisasm.exe"):
        nvdisasm.disassemble([], "sm_80")


def test_what_is_no_cubin_is_refused():
    with pytest.raises(BuildError, match="expected a cubin, got another file"):
        nvdisasm.disassemble([b"not a cubin"], "sm_80")


def test_code_of_no_chip_is_refused():
    with pytest.raises(BuildError, match="expected code of sm_10 that nvdisasm reads, got exit status"):
        nvdisasm.disassemble([], "sm_10")


@pytest.mark.parametrize("text", ["", "[]", "[{}, [{}]]", '[{}, [{"sass-instructions": [{"op": "MOV"}]}]]',
                                  '[{}, [{"sass-instructions": [{"opcode": "BRA", "operands": "L"}]}]]',
                                  '[{}, [{"sass-instructions": []}]]',
                                  '[{}, [{"sass-instructions": [{"opcode": "NOP"}, {"opcode": "NOP"}]}]]'])
def test_another_form_of_output_is_refused(text):
    with pytest.raises(BuildError, match="expected the JSON of nvdisasm 13, got another form"):
        nvdisasm.read_json(text, [nvdisasm.Section(bytes(16))])


def test_functions_that_are_read_as_one_have_their_own_addresses():
    """Jumps of the second listing go to bytes of the whole."""
    first, second = values_of("MOV R0,R1\nEXIT"), values_of(TWO_LOOPS)
    for values in second:
        if values["opcode"].split(".")[0] in ("BRA", "CALL", "RET"):
            *conditions, target = values["operands"].split(",")
            values["operands"] = ",".join([*conditions, hex(int(target, 16) + 16 * len(first))])
    read = nvdisasm.read_json(json_of([*first, *second]), [section_of(first), section_of(second)])
    assert read == [*functions_of("MOV R0,R1\nEXIT"), *functions_of(TWO_LOOPS)]


def test_a_call_of_a_subroutine_comes_back():
    code, = functions_of(TWO_LOOPS)
    call, far = (instruction for instruction in code if instruction.name == "CALL")
    assert (call.target, call.falls_through) == (None, True)
    assert (far.target, far.falls_through) == (0x150, True)


@pytest.mark.kernels("sm80", "sm89")
@pytest.mark.parametrize("arch", ["sm80", "sm89"])
def test_cubins_say_where_their_functions_lie(arch):
    """Kernels with several entry points, and with a subroutine, give the same functions alone as together."""
    records = [record for record in default_library().manifest.kernels.values()
               if record.spec.arch == arch and record.spec.kind in ("quant", "delta")]
    cubins = [default_library().read(record) for record in records]
    together = nvdisasm.disassemble(cubins, records[0].target)
    assert [len(functions) for functions in together] == [len(record.spec.entries) for record in records]
    assert together == [nvdisasm.disassemble([cubin], records[0].target)[0] for cubin in cubins]
    calls = [instruction for functions in together for code in functions for instruction in code
             if instruction.name == "CALL"]
    assert any(call.target is None for call in calls)
    for code in (code for functions in together for code in functions):
        assert {instruction.target for instruction in code} <= {None, *(instruction.address for instruction in code)}


def before_arrival(*opcodes: str) -> int:
    return exponentials_before_arrival([tuple(Instruction(16 * i, opcode) for i, opcode in enumerate(opcodes))])


def test_exponentials_count_from_the_last_wait_for_products_to_the_arrival():
    wait, exp, end = "WARPGROUP.DEPBAR.LE", "MUFU.EX2", "BAR.ARV"
    assert before_arrival(end, wait, wait, "FMNMX", end, exp, exp) == 0
    assert before_arrival(exp, wait, exp, "MUFU.RCP", exp, end, exp) == 2
    assert before_arrival(wait, exp, end, wait, exp, exp, exp, end, wait, exp) == 3
    assert before_arrival(exp, exp, "BAR.SYNC.DEFER_BLOCKING") == 0


def test_promotion_counts_between_the_last_two_waits_of_the_main_loop():
    listing = """
    FFMA R1,R1,R2,R3
0x10: FFMA R1,R1,R2,R3
    QGMMA.64x136x32.F32.E4M3.E4M3 R8,R2
    FFMA R1,R1,R2,R3
    IGMMA.64x128x32.S8.S8 R8,R2
    WARPGROUP.DEPBAR.LE gsb0,0x1
    FFMA R1,R1,R2,R3
    FFMA R1,R1,R2,R3
    FADD R1,R1,R2
    WARPGROUP.DEPBAR.LE gsb0,0x0
    FFMA R1,R1,R2,R3
    @P0 BRA 0x10
    EXIT
"""
    assert promotion_under_products(functions_of(listing)) == 2
    late = listing.replace("gsb0,0x1\n    FFMA R1,R1,R2,R3\n    FFMA R1,R1,R2,R3\n", "gsb0,0x1\n")
    assert promotion_under_products(functions_of(late)) == 0
    assert promotion_under_products(functions_of(TWO_LOOPS)) == 0


ATTN = "sage_attn_sm80_d64_qkint8_pvf16_accf32_full_vraw_qraw"


def report_of(threads: int = 128, **changes) -> Report:
    """The compiler's report on a kernel that keeps all rules, with some changes."""
    machine = MachineCode(**{"registers": 168, "spill_bytes": 0, "elf_abi": 7,
                             **{name: changes.pop(name) for name in MachineCode._fields if name in changes}})
    params = changes.pop("params", "AttnParams")
    layout = changes.pop("layout", STRUCTS.get(params))
    facts = {"threads": threads, "shared_bytes": changes.pop("shared_bytes", 0), "slices": changes.pop("slices", 1)}
    info = KernelInfo(facts, params, layout)
    good = Report("c", machine, 525, {"HMMA.16816.F32": 2, "IMMA.16832.S8.S8": 2}, LOOP, 0, 64, info)
    return dataclasses.replace(good, **changes)


@pytest.fixture
def problems(project, matrix):
    """The broken rules of a kernel that keeps all of them, with some changes."""
    kernels = {kernel.spec.name: kernel for kernel in matrix.kernels}

    def found(name: str = ATTN, **changes) -> list[str]:
        spec = {axis: changes.pop(axis) for axis in ("qk", "pv", "pv_accum") if axis in changes}
        kernel = kernels[name]
        kernel = dataclasses.replace(kernel, spec=dataclasses.replace(kernel.spec, **spec))
        report = report_of(128 if kernel.spec.kind == "attn" else kernel.how.threads, **changes)
        verdict = judge({kernel: report}, matrix, Compilation(project))
        assert verdict.remarks == []
        return verdict.failures

    return found


def test_a_kernel_as_its_row_asks_for_it_has_no_problem(problems):
    assert problems() == []
    assert problems("sage_delta_sm80_d64", registers=255, opcodes={}, main_loop=None) == []


def test_a_quantizers_registers_must_do_for_the_blocks_of_its_family(problems):
    assert problems("sage_quant_sm80_d64_qkint8_pvf16", registers=128, opcodes={}, main_loop=None) == []
    found, = problems("sage_quant_sm80_d64_qkint8_pvf16", registers=136, opcodes={}, main_loop=None)
    assert "expected at most 128 registers a thread, got 136" in found


@pytest.mark.parametrize("changes, message", [
    ({"opcodes": {"HMMA.16816.F32": 2}}, r"for qkint8, IMMA\.\*S8\.S8 or IGMMA\.\*S8\.S8, got .*: 2 HMMA\.16816\.F32;"),
    ({"opcodes": {"IMMA.16832.S8.S8": 2}}, r"for pvf16, HMMA\.\* or HGMMA\.\*, got"),
    ({"pv": "e4m3", "pv_accum": "two_level_f32"}, r"for pve4m3, QMMA\.\*E4M3\.E4M3 or QGMMA\.\*E4M3\.E4M3, got"),
    ({"pv": "e4m3", "pv_accum": "f32", "opcodes": {"IMMA.16832.S8.S8": 2, "QMMA.16832.F32.E4M3.E4M3": 2}},
     r"for pve4m3_accf32, QMMA\.\*SF\.16832\.F32\.E4M3\.E4M3, got .*, 2 QMMA\.16832\.F32\.E4M3\.E4M3;"),
    ({"qk": "int4"}, r"for qkint4, IMMA\.\*S4\.S4, got"),
    ({"main_loop": None}, "expected a loop with the instructions of both products, got"),
    ({"registers": 169}, "expected at most 168 registers a thread, got 169: "),
    ({"spill_bytes": 4}, "expected at most 0 bytes of spilt registers, got 4: "),
    ({"elf_abi": 8, "first_driver": 570}, "expected a file for drivers from 525 on, got one that 570 is the first to "
                                          "read: raise least_driver of sm80"),
    ({"exponentials_before_arrival": 5}, "expected a consumer's ping-pong arrival in front of its exponentials, got 5 "
                                   "of them in front of it: "),
    ({"shared_bytes": 166913}, "expected at most the 166912 bytes of shared memory that a block has on sm80, got "
                               "166913: fewer stages, or a smaller tile"),
])
def test_what_a_kernel_lacks_is_one_sentence(problems, changes, message):
    found = problems(**changes)
    assert len(found) == 1
    assert re.search(message, found[0])
    assert found[0].endswith("(row {family: mma, headdim: 64, q: qraw})")


@pytest.mark.parametrize(("headdim", "least"), [(64, 32), (128, 64), (256, 32)])
def test_hopper_promotes_while_products_run(headdim, least):
    project = Project(ROOT, ROOT / "build")
    matrix = read_matrix(project.matrix, project.templates)
    name = f"sage_attn_sm90_d{headdim}_qkint8_pve4m3_acc2f32_full_vraw_qraw"
    kernel, = (kernel for kernel in matrix.kernels if kernel.spec.name == name)

    def problems(promotion: int) -> list[str]:
        report = report_of(384, promotion_under_products=promotion, slices=4 if headdim == 256 else 1,
                           opcodes={"IGMMA.64x128x32.S8.S8": 1, "QGMMA.64x136x32.F32.E4M3.E4M3": 1})
        return judge({kernel: report}, matrix, Compilation(project)).failures

    assert problems(least) == []
    found, = problems(least - 1)
    assert f"the wait for the scores, {least} multiply-adds, got {least - 1} there: keep them in" in found


def test_without_tensor_cores_both_products_are_missed(problems):
    assert len(problems(opcodes={}, main_loop=None)) == 2


BACKWARD_PRODUCTS = ("IMMA.16832.S8.S8", "HMMA.16816.F32.BF16", "HMMA.16816.F32")
HOPPER_PRODUCTS = ("IGMMA.64x64x32.S8.S8", "HGMMA.64x64x16.F32.BF16", "HGMMA.64x64x16.F32")


@pytest.fixture
def backward_problems(project):
    """The broken rules of a backward kernel of the package's matrix that spills what its family allows, and more."""
    matrix = read_matrix(ROOT / "build_matrix.yaml", ROOT / "templates")

    def found(kind: str, products: tuple[str, ...], arch: str = "sm80", more_spills: int = 0, **changes) -> list[str]:
        kernel, = (kernel for kernel in matrix.kernels if kernel.spec.name == f"sage_{kind}_{arch}_d64")
        report = report_of(registers=128, spill_bytes=kernel.allowed_spill_bytes + more_spills,
                           opcodes=dict.fromkeys(products, 1), main_loop=None, **changes)
        return judge({kernel: report}, matrix, Compilation(project)).failures

    return found


@pytest.mark.parametrize("arch, kind, products", [
    ("sm80", "bwdkv", (*BACKWARD_PRODUCTS, "IMMA.16832.U8.S8")),
    ("sm80", "bwdq", BACKWARD_PRODUCTS),
    ("sm90", "bwdkv", HOPPER_PRODUCTS),
    ("sm90", "bwdq", HOPPER_PRODUCTS),
])
def test_a_backward_kernel_takes_the_instructions_of_each_of_its_products(backward_problems, arch, kind, products):
    assert backward_problems(kind, products, arch) == []
    for product in products:
        found, = backward_problems(kind, tuple(other for other in products if other != product), arch)
        assert f"expected {product}, got tensor-core instructions" in found


def test_a_backward_kernel_spills_no_more_than_its_family_allows(backward_problems):
    found, = backward_problems("bwdq", BACKWARD_PRODUCTS, more_spills=1)
    assert re.search(r"at most [1-9]\d* bytes of spilt registers", found)


def test_consumers_of_a_backward_kernel_need_not_ping_pong(backward_problems):
    assert backward_problems("bwdq", HOPPER_PRODUCTS, "sm90", exponentials_before_arrival=5) == []


@pytest.mark.parametrize("name, registers", [
    ("sage_attn_sm80_d64_qkint8_pvf16_accf32_full_vraw_qraw", 168),  # 65536 / (3 blocks · 128 threads) = 170, in eights
    ("sage_attn_sm80_d128_qkint8_pvf16_accf32_full_vraw_qraw", 255),  # two blocks: 256, one more than one can name
    ("sage_quant_sm80_d64_qkint8_pvf16", 128),  # the family's two blocks, not the row's three
    ("sage_delta_sm80_d64", 255),  # promises none
])
def test_the_register_budget_lets_the_rows_blocks_fit_an_sm(matrix, name, registers):
    kernels = {kernel.spec.name: kernel for kernel in matrix.kernels}
    kernel = kernels[name]
    assert register_budget(kernel, kernel.how.threads or 128) == registers


def test_the_register_budget_follows_the_blocks_of_the_family(matrix):
    quant = next(kernel for kernel in matrix.kernels if kernel.spec.name == "sage_quant_sm80_d64_qkint8_pvf16")
    three = dataclasses.replace(quant, how=dataclasses.replace(quant.how, min_blocks=((64, 3),)))
    assert register_budget(three, 256) == 80  # three of 256 threads: 85, in eights


def test_a_block_may_have_all_shared_memory_of_its_chip(problems):
    assert problems(shared_bytes=166912) == []


def test_registers_are_judged_by_the_threads_that_the_kernel_has(project, matrix):
    """The kernel's facts have its threads; the matrix does not know the threads of an attention kernel."""
    kernel = next(kernel for kernel in matrix.kernels if kernel.spec.name == ATTN)
    found, = judge({kernel: report_of(256, registers=81)}, matrix, Compilation(project)).failures
    assert "expected at most 80 registers a thread, got 81" in found


def test_shared_memory_of_ptx_is_judged_too(project, matrix):
    kernel = next(kernel for kernel in matrix.kernels if kernel.spec.name == ATTN)
    report = report_of(shared_bytes=166913, machine=None)  # it has no registers yet
    found, = judge({kernel: report}, matrix, Compilation(project)).failures
    assert "of shared memory" in found


def two_kernels(matrix, other: Struct) -> dict:
    """Reports of two attention kernels, of which the second has another struct."""
    first, second = [kernel for kernel in matrix.kernels if kernel.spec.kind == "attn"
                     and kernel.spec.arch == "sm80" and kernel.spec.headdim == 64][:2]
    return {first: report_of(), second: report_of(layout=other)}


@pytest.mark.parametrize("how", [{}, {"retarget": "sm_90"}, {"toolchain": "nvcc"}])
def test_kernels_that_share_a_struct_agree_on_it_wherever_they_are_for(project, matrix, how):
    """The runtime could fill in either layout, but it has one layout of a struct for all kernels."""
    layout = STRUCTS["AttnParams"]
    fields = {**layout.fields, "lse": layout.fields["tile_counter"], "tile_counter": layout.fields["lse"]}
    swapped = layout._replace(fields=fields)
    failure, = judge(two_kernels(matrix, swapped), matrix, Compilation(project, **how)).failures
    assert failure.endswith(": expected AttnParams as other kernels have it, got another layout")
    assert judge(two_kernels(matrix, STRUCTS["AttnParams"]), matrix, Compilation(project, **how)).failures == []


@pytest.mark.parametrize("how", [{}, {"retarget": "sm_90"}, {"toolchain": "nvcc"}])
def test_the_runtime_fills_in_the_struct_that_a_kernel_reads(project, matrix, how):
    fields = STRUCTS["AttnParams"].fields
    layout = STRUCTS["AttnParams"]._replace(fields={**fields, "row_lse": fields["lse"]})
    kernel = next(kernel for kernel in matrix.kernels if kernel.spec.name == ATTN)
    failures = judge({kernel: report_of(layout=layout)}, matrix, Compilation(project, **how)).failures
    assert failures == ["expected fields of AttnParams that sage_aot fills in, got row_lse of type 'Q'"]


@pytest.mark.parametrize(("how", "failures", "remarks"), [
    ({}, 1, 0), ({"retarget": "sm_90"}, 0, 0), ({"toolchain": "nvcc"}, 0, 1),
    ({"toolchain": "nvcc", "retarget": "sm_90"}, 0, 0)])
def test_rules_of_a_kernels_own_chip_hold_where_it_is_built_for_it(project, matrix, how, failures, remarks):
    kernel = next(kernel for kernel in matrix.kernels if kernel.spec.name == ATTN)
    verdict = judge({kernel: report_of(spill_bytes=4)}, matrix, Compilation(project, **how))
    assert (len(verdict.failures), len(verdict.remarks)) == (failures, remarks)
