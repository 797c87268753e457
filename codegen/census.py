"""Counts of a kernel's machine code: its tensor-core instructions, and the other instructions of its main loop.

The main loop of an attention kernel is the loop over the full tiles. Among the innermost loops with every kind of
matrix instruction that the kernel holds, it has the fewest other instructions a matrix instruction, since masking only
adds instructions.

Each instruction on the straight path of the loop counts once, executed or predicated off. The straight path leads from
the head of the loop forward to its back edge, through every matrix instruction and every asynchronous copy, and
otherwise the shortest way. It includes the next tile's load. Instructions off the path (rescaling O, scales too large
to fold into the softmax's FMA) are counted apart, as rare.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from codegen.nvdisasm import Code
from sage_aot._kernels.manifest import MainLoop

MATRIX = frozenset(("HMMA", "IMMA", "QMMA", "OMMA", "HGMMA", "IGMMA", "QGMMA"))
"""Names of the tensor cores' instructions: H for f16, I for integers, Q for FP8, O for FP4; G: of a warpgroup."""

_ARRIVAL, _WAIT_FOR_PRODUCTS = "BAR.ARV", "WARPGROUP.DEPBAR"
_EXPONENTIAL, _MULTIPLY_ADD, _EXCHANGE = "MUFU.EX2", "FFMA", "SHFL"

_COPIES = frozenset(("LDGSTS", "UBLKCP", "UTMALDG"))  # asynchronous, from global to shared memory

_PTX_MATRIX = re.compile(r"^\s*(?:@!?%p\d+ )?(w?mma\.[\w.:]+)", re.MULTILINE)

_Weight = Callable[[Code], tuple[int, ...]]
"""Weights of the code of a block, whose sums along a path are compared in turn."""


@dataclass(frozen=True)
class _Loop:
    """A natural loop: from each of its blocks the head can be reached again, and the loop is entered at its head alone.
    """

    head: int
    blocks: dict[int, _Block]

    @property
    def kinds(self) -> set[str]:
        return {name for block in self.blocks.values() for name in _matrix(block.code)}


@dataclass(frozen=True)
class _Block:
    """A basic block."""

    code: Code
    successors: tuple[int, ...]  # addresses of the blocks that may follow


def tensor_opcodes(functions: Iterable[Code]) -> dict[str, int]:
    """The number of each tensor-core instruction in a kernel's SASS, by opcode with its modifiers."""
    found = Counter(instruction.opcode for code in functions for instruction in code if instruction.name in MATRIX)
    return dict(sorted(found.items()))


def ptx_opcodes(text: str) -> dict[str, int]:
    """The number of each tensor-core instruction in PTX, by names such as
    ``"mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32"``."""
    return dict(sorted(Counter(_PTX_MATRIX.findall(text)).items()))


def main_loop(functions: Iterable[Code]) -> MainLoop | None:
    """The counts of the main loop; None for a kernel without a loop that holds all its kinds of matrix instructions."""
    found = _main_loop(functions)
    return _counts(found) if found else None


def main_loop_paths(functions: Iterable[Code]) -> tuple[Code, Code] | None:
    """The straight path of the main loop, and the path that moves references: the straightest of those on which lanes
    exchange most. Both are the same where each tile exchanges its maxima. None without a main loop."""
    loop = _main_loop(functions)
    return (_path(loop, _straight), _path(loop, _exchanging)) if loop else None


def promotion_under_products(functions: Iterable[Code]) -> int:
    """The multiply-adds of a Hopper consumer's main loop between its last two waits for products, the first for P·V,
    the second for Q·K. Promotion must stand there: behind the second wait the tensor cores idle."""
    loop = _main_loop(functions)
    blocks = sorted(loop.blocks.items()) if loop else []
    found = counted = 0
    for instruction in (instruction for _, block in blocks for instruction in block.code):
        if instruction.opcode.startswith(_WAIT_FOR_PRODUCTS):
            found, counted = 0, found
        elif instruction.name == _MULTIPLY_ADD:
            found += 1
    return counted


def exponentials_before_arrival(functions: Iterable[Code]) -> int:
    """The most exponentials between a wait for products and the ping-pong arrival for the other consumer, on Hopper.
    The compiler may move the arrival behind the exponentials of a whole tile; then both consumers run
    their softmax at once, and the tensor cores idle."""
    most = 0
    for code in functions:
        found = 0
        for instruction in code:
            if instruction.opcode.startswith(_WAIT_FOR_PRODUCTS):
                found = 0
            elif instruction.opcode.startswith(_EXPONENTIAL):
                found += 1
            elif instruction.opcode.startswith(_ARRIVAL):
                most = max(most, found)
    return most


def _main_loop(functions: Iterable[Code]) -> _Loop | None:
    loops = [loop for code in functions for loop in _loops(_blocks(code))]
    kinds = set().union(*(loop.kinds for loop in loops))
    complete = [loop for loop in loops if kinds and loop.kinds == kinds]
    innermost = [loop for loop in complete if not any(other.blocks.keys() < loop.blocks.keys() for other in complete)]
    return min(innermost, key=_others_a_product, default=None)


def _others_a_product(loop: _Loop) -> float:
    counts = _counts(loop)
    return counts.other / counts.matrix


def _counts(loop: _Loop) -> MainLoop:
    path = _path(loop, _straight)
    matrix = len(_matrix(path))
    return MainLoop(matrix, len(path) - matrix, sum(len(block.code) for block in loop.blocks.values()) - len(path))


def _straight(code: Code) -> tuple[int, ...]:
    """Weight of the straight path: matrix instructions, then copies, then as few instructions as can be."""
    return len(_matrix(code)), sum(instruction.name in _COPIES for instruction in code), -len(code)


def _exchanging(code: Code) -> tuple[int, ...]:
    """Weight of the path that moves references: of all paths with every matrix instruction, most exchanges of lanes."""
    matrix, *others = _straight(code)
    return matrix, sum(instruction.name == _EXCHANGE for instruction in code), *others


def _path(loop: _Loop, weight_of: _Weight) -> Code:
    """The path with the greatest weight from the head forward to a back edge.

    A path has forward branches only. Code out of line returns by a jump to a lower address, and is therefore rare.
    """
    best = {loop.head: (weight_of(loop.blocks[loop.head].code), loop.blocks[loop.head].code)}
    for address in sorted(loop.blocks):
        for successor in loop.blocks[address].successors:
            if address in best and successor in loop.blocks and successor > address:
                weight, path = best[address]
                code = loop.blocks[successor].code
                longer = tuple(map(sum, zip(weight, weight_of(code)))), path + code
                best[successor] = max(best.get(successor, longer), longer, key=_weight_of_path)
    ends = (found for address, found in best.items() if loop.head in loop.blocks[address].successors)
    return max(ends, key=_weight_of_path)[1]


def _weight_of_path(found: tuple[tuple[int, ...], Code]) -> tuple[int, ...]:
    return found[0]


def _loops(blocks: dict[int, _Block]) -> list[_Loop]:
    """Every natural loop; loops with the same head count as one."""
    entry = min(blocks, default=0)
    heads = sorted({successor for address, block in blocks.items() for successor in block.successors
                    if successor <= address})
    bodies = {head: _body(head, blocks) for head in heads}
    return [_Loop(head, {address: blocks[address] for address in body})
            for head, body in bodies.items() if head == entry or entry not in body]


def _body(head: int, blocks: dict[int, _Block]) -> set[int]:
    """A head, and the blocks from which a back edge of the head is reached without passing the head."""
    before: dict[int, list[int]] = {}
    for address, block in blocks.items():
        for successor in block.successors:
            before.setdefault(successor, []).append(address)
    found = {head}
    pending = [address for address in before[head] if address >= head]
    while pending:
        address = pending.pop()
        if address not in found:
            found.add(address)
            pending += before.get(address, ())
    return found


def _blocks(code: Code) -> dict[int, _Block]:
    """Basic blocks by address."""
    targets = {instruction.target for instruction in code}
    blocks, start = {}, 0
    for i, instruction in enumerate(code, 1):
        last = i == len(code)
        if last or instruction.target is not None or not instruction.falls_through or code[i].address in targets:
            behind = () if last or not instruction.falls_through else (code[i].address,)
            jump = () if instruction.target is None else (instruction.target,)
            blocks[code[start].address] = _Block(code[start:i], (*behind, *jump))
            start = i
    return blocks


def _matrix(code: Code) -> list[str]:
    return [instruction.name for instruction in code if instruction.name in MATRIX]
