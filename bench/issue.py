"""A model of one SM that issues the instructions of a loop. bench/chips.py says what it is for.

An SM has four schedulers, each with its resident warps and pipes. A warp issues in order: once the registers that an
instruction reads are written, its pipe is free, and the stall count of the instruction before has passed, which the
compiler wrote into the machine code. A scheduler issues one instruction a clock, of the warp that it issued last where
it can. The schedulers share the pipe of shared memory. A barrier waits for all warps of a block.
"""

from __future__ import annotations

import heapq
import io
import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from elftools.elf.elffile import ELFFile

from chip_constants import BARRIER_LATENCY, CONTROL, COPY_LATENCY, PIPES, SCHEDULERS, SHARED, Chip
from codegen.census import MATRIX, Code
from codegen.nvdisasm import Instruction
from sage_aot.errors import ArgumentError

_REGISTER = re.compile(r"(?<![A-Z])(UR|UP|R|P)(\d+)(\.64)?")
_FILES = {"R": 0, "UR": 256, "P": 320, "UP": 336}  # numbers of the first register of each kind
_REGISTERS = 352
_PREDICATE = re.compile(r"U?P(?:\d|T)")
_STORES = frozenset(("STG", "STS", "STL", "LDGSTS"))
_OF_PREDICATES = frozenset(("PLOP3", "UPLOP3", "FCHK"))
_PAIRS = frozenset(("FFMA2", "FADD2", "FMUL2"))  # packed f32
_BITS = {"HMMA": 16, "QMMA": 8, "OMMA": 4, "IMMA": 8}  # of a factor
_WARMUP, _MEASURED = 5, 24  # KV tiles of a warp: until the warps' phases are as they stay, and behind that
_SEED = 0


# --- operands ---------------------------------------------------------------------------------------------------------


class Registers(NamedTuple):
    """Registers by number, of all kinds."""

    read: tuple[int, ...]
    written: tuple[int, ...]


def registers_of(instruction: Instruction) -> Registers:
    """The registers that an instruction reads and writes. Predicates count as registers, guards as read."""
    operands = [operand for operand in instruction.operands if operand]
    outputs = _outputs(instruction, operands)
    widths = _widths(instruction, len(operands), outputs)
    numbers = [_numbers(operand, width) for operand, width in zip(operands, widths)]
    read = [*_numbers(instruction.predicate, 1), *(number for found in numbers[outputs:] for number in found)]
    return Registers(tuple(dict.fromkeys(read)), tuple(number for found in numbers[:outputs] for number in found))


def _outputs(instruction: Instruction, operands: Sequence[str]) -> int:
    """Number of operands, the first ones, that are written."""
    name = instruction.name
    if name in CONTROL or name in _STORES:
        return 0
    leading = next((i for i, operand in enumerate(operands) if not _PREDICATE.fullmatch(operand)), len(operands))
    if name.endswith("SETP") or name in _OF_PREDICATES:
        return min(leading, 2)
    if leading:
        return 1 if name.startswith("VOTE") else leading + 1
    carries = 1
    while carries < len(operands) and _PREDICATE.fullmatch(operands[carries]) and name not in MATRIX:
        carries += 1
    return carries if carries < len(operands) else 1


def _widths(instruction: Instruction, operands: int, outputs: int) -> list[int]:
    """Registers of each operand."""
    name, parts = instruction.name, instruction.opcode.split(".")
    if name in MATRIX:
        a = 16 * _depth(instruction) * _bits(instruction) // (32 * 32)
        c = 2 if _sums(instruction) == "F16" else 4
        return [c, a, a // 2, c, *[1] * (operands - 4)]
    if name == "LDSM":
        return [int(parts[-1]) if parts[-1].isdigit() else 1, *[1] * (operands - 1)]
    if "WIDE" in parts:
        return [*[2] * outputs, 1, 1, *[2] * (operands - outputs - 2)]
    if name == "CS2R":
        return [1 if "32" in parts else 2, *[1] * (operands - 1)]
    return [_width(instruction)] * operands


def _width(instruction: Instruction) -> int:
    parts = instruction.opcode.split(".")
    return 4 if "128" in parts else 2 if {"64", "S64", "U64"} & {*parts} or instruction.name in _PAIRS else 1


def _numbers(operand: str, width: int) -> list[int]:
    """Numbers of an operand's registers: `width` from a register on, of an address as many as it says."""
    is_address = "[" in operand
    found = []
    for kind, number, pair in _REGISTER.findall(operand):
        first = _FILES[kind] + int(number)
        count = 1 if kind.endswith("P") else 2 if pair else 1 if is_address else width
        found += range(first, first + count)
    return found


# --- matrix instructions ----------------------------------------------------------------------------------------------


def macs_of(instruction: Instruction) -> int:
    """The multiply-adds of a matrix instruction of a warp."""
    return 16 * 8 * _depth(instruction)


def _depth(instruction: Instruction) -> int:
    """K of a shape that is spelt M, N, K in one word: "16832"."""
    shape = next((part for part in instruction.opcode.split(".") if part.isdigit() and part.startswith("168")), None)
    if shape is None:
        raise ArgumentError(f"expected a matrix instruction of 16 x 8 sums, such as IMMA.16832, got "
                            f"{instruction.opcode}: the model is of mma.sync")
    return int(shape[3:])


def _bits(instruction: Instruction) -> int:
    return 4 if {"S4", "U4"} & {*instruction.opcode.split(".")} else _BITS[instruction.name]


def _sums(instruction: Instruction) -> str:
    """Type of the sums of a product of floats; of integers, nothing."""
    return next((part for part in instruction.opcode.split(".") if part in ("F16", "F32")), "")


def _product(instruction: Instruction) -> str:
    """The key of a matrix instruction in a chip's table."""
    scaled = ".SF" if "SF" in instruction.opcode.split(".") else ""
    kind = f"{instruction.name}{scaled}"
    return f"{kind}.{_sums(instruction)}" if _sums(instruction) else kind


# --- a chip's view of an instruction ----------------------------------------------------------------------------------


class Issue(NamedTuple):
    """An instruction as a scheduler sees it."""

    pipe: str | None  # None: it takes an issue slot alone
    clocks: float  # for which it holds the pipe
    latency: float  # until the registers that it writes can be read
    stall: int  # clocks until the warp may issue its next instruction
    registers: Registers
    instruction: Instruction


def issues_of(path: Code, stalls: Mapping[int, int], chip: Chip) -> list[Issue]:
    """The instructions of a path, with stall counts by address; ArgumentError for one that the tables lack."""
    return [Issue(*_timing(instruction, chip), max(1, stalls.get(instruction.address, 1)), registers_of(instruction),
                  instruction) for instruction in path]


def stalls_of(cubin: bytes) -> dict[int, int]:
    """The stall count of each instruction, by address; ArgumentError for a cubin of several functions.

    Source of its place: Jia et al., "Dissecting the NVIDIA Volta GPU Architecture via Microbenchmarking", arXiv
    1804.06826: control information is in the 23 bits above bit 104 of 128, its lowest four bits are the stall count.
    """
    sections = [section for section in ELFFile(io.BytesIO(cubin)).iter_sections() if section.name.startswith(".text.")]
    if len(sections) != 1:
        raise ArgumentError(f"expected a cubin of one kernel, got {len(sections)} sections of code")
    code = sections[0].data()
    return {address: int.from_bytes(code[address:address + 16], "little") >> 105 & 15
            for address in range(0, len(code), 16)}


def _timing(instruction: Instruction, chip: Chip) -> tuple[str | None, float, float]:
    """Pipe, clocks and latency."""
    name = instruction.name
    if name in CONTROL:
        return None, 0.0, 0.0
    if name in MATRIX:
        clocks = _tensor_clocks(instruction, chip)
        return "tensor", clocks, chip.tensor_latency + clocks / 2
    if name in SHARED:
        return "shared", _shared_clocks(instruction), SHARED[name]
    for pipe, values in PIPES.items():
        if name in values.names or (pipe == "uniform" and name.startswith("U")):
            return pipe, values.clocks, values.latency
    raise ArgumentError(f"expected an instruction of the tables of bench/chip_constants.py, got {instruction.opcode}: "
                        f"add it to the pipe that takes it")


def _tensor_clocks(instruction: Instruction, chip: Chip) -> float:
    product = _product(instruction)
    if product not in chip.macs:
        raise ArgumentError(f"expected a product that {chip.target} has, {', '.join(chip.macs)}, got "
                            f"{instruction.opcode}")
    return macs_of(instruction) / (chip.macs[product] / SCHEDULERS)


def _shared_clocks(instruction: Instruction) -> float:
    """Clocks of shared memory, at 128 bytes a clock, where an instruction moves registers of 32 threads."""
    if instruction.name == "LDSM":
        return len(registers_of(instruction).written)
    return _width(instruction)


def clocks_by_pipe(path: Sequence[Issue]) -> Counter[str]:
    """The clocks of a scheduler for which each pipe is busy with the instructions of one warp; "issue", its slots. All
    schedulers share the pipe of shared memory, of which one has a quarter."""
    clocks = Counter(issue=float(len(path)))
    for issue in path:
        if issue.pipe is not None:
            clocks[issue.pipe] += issue.clocks * (SCHEDULERS if issue.pipe == "shared" else 1)
    return clocks


# --- an SM ------------------------------------------------------------------------------------------------------------


class _Warp:
    """A warp: where it is in its path, and when its registers can be read."""

    def __init__(self, number: int, block: int, moves: list[bool]) -> None:
        self.block, self.scheduler = block, number % SCHEDULERS
        self.moves = moves  # of each tile to come, whether the warp takes the path that moves references
        self.path: Sequence[Issue] = ()
        self.position = self.tiles = 0
        self.ready = [0.0] * _REGISTERS
        self.copies: list[float] = []  # when each group of asynchronous copies has arrived


class Sm:
    """One SM with its resident warps, which run the loop until they are stopped."""

    def __init__(self, straight: Sequence[Issue], moving: Sequence[Issue], blocks: int, warps: int,
                 probability: float) -> None:
        self.paths = straight, moving
        self.warps_of_block = warps
        draws = random.Random(_SEED)
        self.warps = [_Warp(number, number // warps, _draw(probability, draws)) for number in range(blocks * warps)]
        self.pipes = [dict.fromkeys(("issue", *PIPES, "tensor"), 0.0) for _ in range(SCHEDULERS)]  # when each is free
        self.shared = {"shared": 0.0}
        self.waiting: dict[int, list[int]] = {block: [] for block in range(blocks)}  # warps at each block's barrier
        self.last = [-1] * SCHEDULERS  # the warp that each scheduler issued last
        self.queue: list[tuple[float, bool, int]] = []  # when a warp can go on, whether another goes first, which
        self.tiles = 0
        for number, warp in enumerate(self.warps):
            self._start(number, warp.block * len(straight) / blocks)

    def clocks(self) -> float:
        """Clocks in which every resident warp does one KV tile."""
        begin = self._run_until(_WARMUP * len(self.warps))
        return (self._run_until((_WARMUP + _MEASURED) * len(self.warps)) - begin) / _MEASURED

    def _run_until(self, tiles: int) -> float:
        while True:
            clock, _, negative = heapq.heappop(self.queue)
            number = -negative
            warp = self.warps[number]
            issue = warp.path[warp.position]
            free = self._free(warp, issue)
            if free > clock:
                self._push(free, number)
                continue
            self._issue(clock, warp, issue)
            self.last[warp.scheduler] = number
            self._go_on(clock, number, issue)
            if self.tiles >= tiles:
                return clock

    def _free(self, warp: _Warp, issue: Issue) -> float:
        """Clock when the scheduler and the pipe that an instruction takes are free."""
        pipes = self.pipes[warp.scheduler]
        if issue.pipe is None:
            return pipes["issue"]
        return max(pipes["issue"], self.shared["shared"] if issue.pipe == "shared" else pipes[issue.pipe])

    def _issue(self, clock: float, warp: _Warp, issue: Issue) -> None:
        pipes = self.pipes[warp.scheduler]
        pipes["issue"] = clock + 1
        if issue.pipe is not None:
            (self.shared if issue.pipe == "shared" else pipes)[issue.pipe] = clock + issue.clocks
        for register in issue.registers.written:
            warp.ready[register] = clock + issue.latency
        if issue.instruction.name == "LDGDEPBAR":
            warp.copies.append(clock + COPY_LATENCY)

    def _go_on(self, clock: float, number: int, issue: Issue) -> None:
        """Leads a warp to its next instruction, unless it waits at a barrier for others of its block."""
        warp = self.warps[number]
        warp.position += 1
        if warp.position == len(warp.path):
            self.tiles += 1
            warp.tiles += 1
            self._start(number, clock + issue.stall)
        elif issue.instruction.opcode.startswith("BAR.SYNC"):
            self._arrive(clock, number)
        else:
            self._push(self._ready(warp, clock + issue.stall), number)

    def _start(self, number: int, clock: float) -> None:
        warp = self.warps[number]
        warp.path, warp.position = self.paths[warp.moves[warp.tiles % _MEASURED]], 0
        self._push(self._ready(warp, clock), number)

    def _arrive(self, clock: float, number: int) -> None:
        arrived = self.waiting[self.warps[number].block]
        arrived.append(number)
        if len(arrived) == self.warps_of_block:
            for other in arrived:
                self._push(self._ready(self.warps[other], clock + BARRIER_LATENCY), other)
            arrived.clear()

    def _ready(self, warp: _Warp, clock: float) -> float:
        """Clock when the registers of a warp's next instruction are ready, or the copies for which the warp waits."""
        issue = warp.path[warp.position]
        ready = warp.ready
        for register in issue.registers.read:
            clock = max(clock, ready[register])
        for register in issue.registers.written:
            clock = max(clock, ready[register] - issue.latency + 1)
        if issue.instruction.opcode.startswith("DEPBAR.LE"):
            pending = int(issue.instruction.operands[1], 16)
            clock = max([clock, *warp.copies[:len(warp.copies) - pending][-1:]])
        return clock

    def _push(self, clock: float, number: int) -> None:
        """A scheduler prefers the warp that it issued last, then the youngest. Source: Huerta et al., "Analyzing Modern
        NVIDIA GPU cores", arXiv 2503.20481."""
        heapq.heappush(self.queue, (clock, self.last[self.warps[number].scheduler] != number, -number))


def _draw(probability: float, draws: random.Random) -> list[bool]:
    """Draw for each tile of a warp whether it moves references: the expected number of tiles do, in random order."""
    count = int(probability * _MEASURED + draws.random())
    moves = [True] * count + [False] * (_MEASURED - count)
    draws.shuffle(moves)
    return moves
