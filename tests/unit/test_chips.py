"""bench/chips.py: registers of instructions, clocks by arithmetic, pipes that bind, references that move."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import chip_constants
import chips
import issue
from codegen.errors import BuildError
from codegen.nvdisasm import Instruction
from sage_aot.errors import ArgumentError

ADA = chip_constants.CHIPS["RTX 4090"]
KERNEL = chips.Kernel("of a test", b"", "sm_89", headdim=64, is_causal=False, block_m=128, block_n=64, warp_m=32,
                      blocks=2, room=0.0)
UR, P, UP = 256, 320, 336  # numbers of the first registers


def instruction(text: str, predicate: str = "", address: int = 0) -> Instruction:
    """``"FADD R1,R2,R3"``."""
    opcode, _, operands = text.partition(" ")
    return Instruction(address, opcode, operands=tuple(operands.split(",")), predicate=predicate)


def path_of(*texts: str, stalls: dict[int, int] | None = None, chip: chip_constants.Chip = ADA) -> list[issue.Issue]:
    code = tuple(instruction(text, address=16 * i) for i, text in enumerate(texts))
    return issue.issues_of(code, stalls or {}, chip)


def clocks(path: list[issue.Issue], *, blocks: int = 1, warps: int = 4, moving=None, probability: float = 0.0) -> float:
    """Clocks in which every resident warp runs a path once; of four warps each has a scheduler of its own."""
    return issue.Sm(path, moving or path, blocks, warps, probability).clocks()


# --- registers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text, written, read", [
    ("IMMA.16832.S8.S8 R76,R60.reuse.ROW,R48.COL,R88", range(76, 80), (*range(60, 64), 48, 49, *range(88, 92))),
    ("IMMA.16864.S4.S4 R8,R0.ROW,R4.COL,RZ", range(8, 12), (*range(4), 4, 5)),
    ("HMMA.16816.F16 R112,R48,R54,RZ", (112, 113), (*range(48, 52), 54, 55)),
    ("HMMA.16816.F32.BF16 R40,R12.reuse,R28,R40", range(40, 44), (*range(12, 16), 28, 29, *range(40, 44))),
    ("QMMA.16832.F16.E4M3.E4M3 R72,R24.ROW,R36.reuse.COL,RZ", (72, 73), (*range(24, 28), 36, 37)),
    ("QMMA.SF.16832.F32.E4M3.E4M3.E8 R96,R104,R112,R4,R136,R137,URZ", range(96, 100),
     (*range(104, 108), 112, 113, *range(4, 8), 136, 137)),
    ("LDSM.16.M88.4 R80,[R88+0x2c00]", range(80, 84), (88,)),
    ("LDS.64 R204,[R204+UR4+0x4000]", (204, 205), (204, UR + 4)),
    ("LDG.E.128 R8,[R20.64]", range(8, 12), (20, 21)),
    ("LDGSTS.E.BYPASS.128 [R27+0x2000],desc[UR10][R18.64]", (), (27, UR + 10, 18, 19)),
    ("STS.64 [R0],R6", (), (0, 6, 7)),
    ("IMAD.WIDE R2,R7,R6,R10", (2, 3), (7, 6, 10, 11)),
    ("CS2R R118,SRZ", (118, 119), ()),
    ("IADD.64 R18,R18,R20", (18, 19), (18, 19, 20, 21)),
    ("IADD3 R22,P1,R18.reuse,0x2000,RZ", (22, P + 1), (18,)),
    ("IMAD.X R21,RZ,RZ,R19,P0", (21,), (19, P)),
    ("ISETP.GE.AND P5,PT,R8,c[0x0][0x21c],P4", (P + 5,), (8, P + 4)),
    ("PLOP3.LUT P0,PT,PT,PT,UP0,0x80,0x0", (P,), (UP,)),
    ("SHFL.BFLY PT,R20,R5,0x1,0x1f", (20,), (5,)),
    ("VOTE.ANY P0,P1", (P,), (P + 1,)),
    ("FMNMX R86,-R86,|R4|,!PT", (86,), (86, 4)),
    ("BAR.SYNC.DEFER_BLOCKING 0x0", (), ()),
])
def test_registers_that_an_instruction_reads_and_writes(text, written, read):
    found = issue.registers_of(instruction(text))
    assert (found.written, found.read) == (tuple(written), tuple(read))


def test_a_guard_is_read():
    assert issue.registers_of(instruction("FADD R1,R2,R3", "@!P2")).read == (P + 2, 2, 3)


# --- clocks -----------------------------------------------------------------------------------------------------------


FMA_LATENCY = chip_constants.PIPES["fma"].latency


def test_a_chain_takes_the_latency_of_each_instruction_and_other_warps_hide_in_it():
    chain = path_of(*["FADD R1,R1,R2"] * 10)
    assert clocks(chain) == clocks(chain, blocks=2) == 10 * FMA_LATENCY


def test_a_scheduler_issues_one_instruction_a_clock():
    free = path_of(*[f"FADD R{i},R100,R101" for i in range(10)])
    assert clocks(free) == 10
    of_three_pipes = path_of(*(text for i in range(5) for text in (
        f"FADD R{i},R100,R101", f"IMAD R{10 + i},R100,R101,R102", f"FADD R{20 + i},R100,R101",
        f"LOP3.LUT R{30 + i},R100,R101,RZ,0x3c,!PT")))
    assert clocks(of_three_pipes, blocks=3) == pytest.approx(3 * 20, abs=1)


def test_stall_counts_hold_a_warp_and_not_its_scheduler():
    stalled = path_of(*[f"FADD R{i},R100,R101" for i in range(10)], stalls={16 * i: 5 for i in range(10)})
    assert clocks(stalled) == clocks(stalled, blocks=2) == 50


@pytest.mark.parametrize("text, of_each", [("MUFU.EX2 R{},R100", 8), ("LOP3.LUT R{},R100,R101,RZ,0x3c,!PT", 2),
                                           ("IMMA.16832.S8.S8 R{0},R100,R104,RZ", 16), ("F2FP.F16 R{},R100,R101", 4),
                                           ("QMMA.16832.F32.E4M3.E4M3 R{},R100,R104,RZ", 32),
                                           ("LDSM.16.M88.4 R{},[R100]", 16)])
def test_a_pipe_binds(text, of_each):
    path = path_of(*[text.format(4 * i) for i in range(12)])
    assert clocks(path, blocks=2) == pytest.approx(2 * 12 * of_each, rel=0.02)
    (pipe,) = {step.pipe for step in path}
    assert issue.clocks_by_pipe(path)[pipe] == 12 * of_each


def test_a_product_waits_for_the_sums_that_it_adds_to():
    chain = path_of(*["IMMA.16832.S8.S8 R0,R100,R104,R0"] * 4)
    assert clocks(chain) == 4 * (16 + 16 / 2)


def test_a_barrier_waits_for_all_warps_of_a_block():
    path = path_of("BAR.SYNC.DEFER_BLOCKING 0x0", *[f"FADD R{i},R100,R101" for i in range(10)])
    assert clocks(path) == chip_constants.BARRIER_LATENCY + 10
    # The second warp of a scheduler leaves the barrier with the first, and ends ten clocks behind it.
    assert clocks(path, warps=8) == pytest.approx(chip_constants.BARRIER_LATENCY + 20, abs=1)
    assert clocks(path, blocks=2) < chip_constants.BARRIER_LATENCY + 20


def test_a_wait_for_copies_leaves_out_as_many_groups_as_it_says():
    all_of_them, but_one = (path_of("LDGDEPBAR ", f"DEPBAR.LE SB0,{pending}", "FADD R1,R2,R3")
                            for pending in ("0x0", "0x1"))
    assert clocks(all_of_them) == pytest.approx(chip_constants.COPY_LATENCY, abs=3)
    assert clocks(but_one) == pytest.approx(chip_constants.COPY_LATENCY / 2, rel=0.2)


def test_warps_take_the_path_that_moves_references_in_the_share_of_tiles_asked_for():
    straight, moving = (path_of(*["FADD R1,R1,R2"] * count) for count in (10, 30))
    at = {probability: clocks(straight, moving=moving, probability=probability) for probability in (0.0, 0.5, 1.0)}
    assert at[0.0] == 10 * FMA_LATENCY and at[1.0] == 30 * FMA_LATENCY
    assert at[0.5] == pytest.approx(20 * FMA_LATENCY, rel=0.1)


# --- references -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seqlen", [1024, 4096, 16384])
def test_without_room_a_new_maximum_of_one_of_the_rows_moves_references(seqlen):
    tiles = seqlen // 64
    exact = sum(1 - (1 - 1 / tile)**32 for tile in range(1, tiles + 1)) / tiles  # of exchangeable scores
    assert chips.moving_share(KERNEL, seqlen) == pytest.approx(exact, abs=0.015)


def test_room_makes_moves_rare_and_a_large_one_leaves_the_first_tile():
    without, octave, wide = (chips.moving_share(replace(KERNEL, room=room), 1024) for room in (0.0, 1.0, 8.0))
    assert 1 / 16 < octave < 0.6 * without
    assert wide == pytest.approx(1 / 16, abs=0.002)


def test_room_is_in_octaves_of_p(monkeypatch):
    monkeypatch.setattr(chips, "WARPS_DRAWN", 20000)
    _, second = chips.moves(rows=1, keys=1, room=1.0, tiles=2)
    outgrown = NormalDist(sigma=math.sqrt(2)).cdf(-math.log(2))  # of the difference of two N(0, 1) scores
    assert float(second) == pytest.approx(outgrown, abs=0.015)


def test_a_causal_walk_ends_at_the_diagonal():
    causal = replace(KERNEL, is_causal=True)
    assert chips.walks(causal, 512) == [2, 4, 6, 8]
    assert chips.walks(KERNEL, 512) == [8] * 4
    assert chips.moving_share(causal, 1024) > chips.moving_share(KERNEL, 1024)


# --- predictions ------------------------------------------------------------------------------------------------------


def test_tops_follow_from_waves_of_tiles_of_queries():
    chip = replace(ADA, sms=64, mhz=1000)
    seconds = 8 * (1000 * 16 + chips.OUTSIDE) / 1e9 / chips.EFFICIENCY  # 1024 tiles of queries in 64 x 2 slots
    assert chips.tops(KERNEL, chip, 1024, 1000) == pytest.approx(4 * 128 * 1024**2 * 64 / seconds / 1e12)
    last_wave = replace(chip, sms=63)
    assert chips.tops(KERNEL, last_wave, 1024, 1000) == pytest.approx(chips.tops(KERNEL, chip, 1024, 1000) * 8 / 9)


def predicted(monkeypatch, *texts: str) -> chips.Prediction:
    """Prediction of a loop whose iteration has a KV tile's products and these instructions, on an RTX 4090."""
    products = ["IMMA.16832.S8.S8 R0,R100,R104,RZ"] * 32 + ["QMMA.16832.F16.E4M3.E4M3 R8,R100,R104,RZ"] * 32
    lines = [instruction(text, address=16 * i) for i, text in enumerate([*products, *texts])]
    loop = (*lines, Instruction(16 * len(lines), "BRA", 0), Instruction(16 * len(lines) + 16, "EXIT", None, False))
    monkeypatch.setattr(chips, "disassemble", lambda cubins, target: [(loop,)])
    monkeypatch.setattr(chips, "stalls_of", lambda cubin: {})
    return chips.predict(KERNEL, "RTX 4090")


def test_the_busiest_resource_bounds(monkeypatch):
    tensor = predicted(monkeypatch)
    assert (tensor.bound, round(tensor.busy, 2)) == ("tensor", 1)
    assert tensor.clocks == pytest.approx([64 * 16] * 3, rel=0.02)
    assert predicted(monkeypatch, *["MUFU.EX2 R20,R21"] * 256).bound == "MUFU"
    assert predicted(monkeypatch, *["FADD R20,R21,R22"] * 2000).bound == "issue"


def test_a_row_says_how_far_the_prediction_was_off(monkeypatch):
    prediction = predicted(monkeypatch)
    row = chips.cells(prediction, {KERNEL.name: [value / 1.1 for value in prediction.tops]})
    assert len(row) == len(chips.COLUMNS) + 2 and row[-1] == "+10% / +10% / +10%"
    assert chips.cells(prediction, {"another": [1, 1, 1]})[-1] == "-"


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text, chip, message", [
    ("TCGEN R1,R2", ADA, "expected an instruction of the tables of bench/chip_constants.py, got TCGEN"),
    ("QMMA.16832.F32.E4M3.E4M3 R0,R4,R8,RZ", chip_constants.CHIPS["RTX 3090"],
     "expected a product that sm_86 has, IMMA, "),
    ("HMMA.884.F32 R0,R4,R8,RZ", ADA, "expected a matrix instruction of 16 x 8 sums"),
])
def test_instructions_that_the_model_lacks_are_named(text, chip, message):
    with pytest.raises(ArgumentError, match=message):
        path_of(text, chip=chip)


def test_a_cubin_that_is_none_is_named(monkeypatch):
    def refused(cubins, target):
        raise BuildError("expected a cubin that nvdisasm reads")

    monkeypatch.setattr(chips, "disassemble", refused)
    with pytest.raises(ArgumentError, match="of a test: expected a cubin that nvdisasm reads"):
        chips.predict(KERNEL, "RTX 4090")


def test_a_kernel_without_a_loop_of_products_is_named(monkeypatch):
    monkeypatch.setattr(chips, "disassemble", lambda cubins, target: [((Instruction(0, "EXIT", None, False),),)])
    with pytest.raises(ArgumentError, match="expected a loop with every kind of matrix instruction, got none"):
        chips.predict(KERNEL, "RTX 4090")


def test_a_tile_beyond_the_products_of_an_iteration_is_named():
    code = (instruction("IMMA.16832.S8.S8 R0,R100,R104,RZ"),)
    with pytest.raises(ArgumentError, match="expected the products of 32 rows, 64 keys and 64 channels"):
        chips.tiles_of(code, KERNEL)


def test_two_functions_have_no_stall_counts(monkeypatch):
    sections = [SimpleNamespace(name=name) for name in (".text.a", ".text.b", ".data")]
    monkeypatch.setattr(issue, "ELFFile", lambda file: SimpleNamespace(iter_sections=lambda: sections))
    with pytest.raises(ArgumentError, match="expected a cubin of one kernel, got 2"):
        issue.stalls_of(b"")


def test_stall_counts_are_read_from_bit_105(monkeypatch):
    code = b"".join(((stall << 105) | (1 << 109) | ((1 << 105) - 1)).to_bytes(16, "little") for stall in (1, 11))
    section = SimpleNamespace(name=".text.a", data=lambda: code)
    monkeypatch.setattr(issue, "ELFFile", lambda file: SimpleNamespace(iter_sections=lambda: [section]))
    assert issue.stalls_of(b"") == {0: 1, 16: 11}


@pytest.mark.parametrize("words, message", [
    (["--chips", "RTX 4091"], "--chips: expected some of RTX 3090, .* got RTX 4091"),
    (["--target", "sm_80"], "expected machine code of .*sm_89.*, got sm_80"),
    (["--block", "128,64"], "--block: expected rows of a block, keys of a tile and rows of a warp"),
    (["--block", "128,64,48"], "--block: expected"),
    (["--blocks", "0"], "--block: expected"),
    (["--cubin", "absent.cubin"], "--cubin: expected a file, got absent.cubin"),
])
def test_options_that_fit_no_kernel_are_named(monkeypatch, tmp_path, words, message):
    (tmp_path / "other.cubin").write_bytes(b"")
    monkeypatch.setattr(sys, "argv", ["chips.py", "--cubin", str(tmp_path / "other.cubin"), *words])
    with pytest.raises(ArgumentError, match=message):
        chips.main()


def test_a_folder_without_kernels_is_named(tmp_path):
    with pytest.raises(ArgumentError, match="--kernels: expected a folder of `python -m codegen build`"):
        chips.kernels_in(str(tmp_path), "*")
