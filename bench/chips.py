"""Predictions of the speed of mma attention kernels on chips that were not measured, from the kernels' machine code.

    python -m codegen build --arch sm89 --out build/sm89
    python bench/chips.py --kernels build/sm89                          # on every chip that runs such machine code
    python bench/chips.py --kernels build/retarget_sm_90 --measured measured.json  # compared with what an H200 does
    python bench/chips.py --cubin other.cubin --target sm_89 --headdim 64 --block 128,64,32 --blocks 2

A model, no measurement. bench/issue.py issues the instructions of the main loop on one SM, with as many blocks as the
kernel's tile demands. A warp takes the path that moves references with the probability that N(0, 1) scores give it.
Both paths are those of codegen/census.py. Left out: instruction caches, bank conflicts, global memory, the power limit,
and of masks all but a constant. bench/chip_constants.py has every constant, and says which of them are fitted.

TOPS count 4·B·H·N²·D operations, half of them when causal, as bench/speed.py counts them. `bound` is the resource that
is busy for most of the clocks at the longest N, and their share. Clocks by pipe are a scheduler's, for a KV tile of one
warp on the straight path; `clocks` is how many a scheduler takes for it. `moving` is the share of tiles in which a warp
moves references. --measured takes a JSON object of TOPS at each N, by kernel.
"""

from __future__ import annotations

import argparse
import fnmatch
import functools
import heapq
import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import common
from chip_constants import CHIPS, EFFICIENCY, MASKED, OUTSIDE, SCHEDULERS, Chip
from codegen.census import MATRIX, Code, main_loop_paths
from codegen.errors import BuildError
from codegen.nvdisasm import disassemble
from issue import Sm, clocks_by_pipe, issues_of, macs_of, stalls_of
from sage_aot._kernels.manifest import AttnRecord, Manifest, read_target
from sage_aot.errors import ArgumentError

SEQLENS = (1024, 4096, 16384)
BATCH, HEADS = 4, 32
WARPS_DRAWN, SEED = 64, 0
"""Warps whose references are followed over random scores, and the seed."""

PIPES_SHOWN = ("tensor", "issue", "MUFU", "alu", "fma", "imad", "convert", "shared")
COLUMNS = ("kernel", "chip", "TOPS at 1K", "4K", "16K", "bound", "clocks", *PIPES_SHOWN, "moving at 1K", "4K", "16K")


# --- kernels ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kernel:
    """A kernel as the model sees it."""

    name: str
    cubin: bytes
    target: str  # "sm_89", without a suffix
    headdim: int
    is_causal: bool
    block_m: int
    block_n: int
    warp_m: int
    blocks: int  # resident, an SM
    room: float  # octaves by which P may outgrow its reference

    @property
    def warps(self) -> int:
        """Warps of a block."""
        return self.block_m // self.warp_m


def kernels_in(folder: str, only: str) -> list[Kernel]:
    """The mma kernels of a folder whose names fit a pattern; ArgumentError where none does."""
    records = [record for record in _manifest_in(Path(folder)).every_attention() if record.family == "mma"
               and record.machine is not None and record.spec.mask != "sparse" and fnmatch.fnmatch(record.name, only)]
    if not records:
        raise ArgumentError(f"--only: expected a pattern of mma kernels with a full or causal mask in {folder}, got "
                            f"{only!r}")
    return [_kernel_of(record, Path(folder)) for record in records]


def _manifest_in(folder: Path) -> Manifest:
    """Read the manifest of a folder, of this version of sage_aot or another: nothing is launched."""
    try:
        return Manifest.read(folder)
    except (OSError, ValueError) as error:
        raise ArgumentError(f"--kernels: expected a folder of `python -m codegen build`, got {folder}: "
                            f"{error}") from error


def _kernel_of(record: AttnRecord, folder: Path) -> Kernel:
    spec, tile = record.spec, record.tile
    room = record.facts["line_room" if spec.p == "linear" else "lazy_rise"]
    return Kernel(record.name, (folder / record.file).read_bytes(), _chip_of(record.target), spec.headdim,
                  spec.mask == "causal", tile.block_m, tile.block_n, tile.warp_m, tile.min_blocks, room)


def _chip_of(target: str) -> str:
    _, (major, minor), _ = read_target(target)
    return f"sm_{major}{minor}"


# --- references -------------------------------------------------------------------------------------------------------


@functools.cache
def moves(rows: int, keys: int, room: float, tiles: int) -> torch.Tensor:
    """The share of warps that move references in each KV tile of a row's walk over them, first tile first: one of their
    rows has a score that outgrows its reference by more than `room` octaves. A row whose warp moves takes its largest
    score so far. Scores are N(0, 1) before the exponential."""
    draws = torch.rand(tiles, WARPS_DRAWN, rows, generator=torch.Generator().manual_seed(SEED), dtype=torch.float64)
    largest = torch.special.ndtri(draws**(1 / keys))  # of a row's scores in a tile
    references = torch.full((WARPS_DRAWN, rows), -math.inf, dtype=torch.float64)
    shares = []
    for tile in largest:
        moving = (tile > references + room * math.log(2)).any(1, keepdim=True)
        references = torch.where(moving, torch.maximum(references, tile), references)
        shares.append(moving.double().mean())
    return torch.stack(shares)


def walks(kernel: Kernel, seqlen: int) -> list[int]:
    """The KV tiles of each tile of queries."""
    count = math.ceil(seqlen / kernel.block_n)
    if not kernel.is_causal:
        return [count] * math.ceil(seqlen / kernel.block_m)
    ends = range(kernel.block_m, seqlen + kernel.block_m, kernel.block_m)
    return [min(count, math.ceil(end / kernel.block_n)) for end in ends]


def moving_share(kernel: Kernel, seqlen: int) -> float:
    """The share of all tiles in which a warp moves references."""
    lengths = walks(kernel, seqlen)
    summed = moves(kernel.warp_m, kernel.block_n, kernel.room, max(lengths)).cumsum(0)
    return float(sum(summed[length - 1] for length in lengths)) / sum(lengths)


# --- predictions ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prediction:
    """A kernel on a chip, at each of SEQLENS."""

    kernel: str
    chip: str
    tops: list[float]
    moving: list[float]
    clocks: list[float]  # of a scheduler, for a KV tile of one warp
    pipes: dict[str, float]  # of these, those for which each pipe is busy, on the straight path
    bound: str
    busy: float  # share of the clocks for which it is, at the longest N


def predict(kernel: Kernel, name: str) -> Prediction:
    """ArgumentError for machine code that the model does not read."""
    chip = CHIPS[name]
    straight, moving = paths_of(kernel)
    stalls = stalls_of(kernel.cubin)
    paths = issues_of(straight, stalls, chip), issues_of(moving, stalls, chip)
    tiles = tiles_of(straight, kernel)
    shares = [moving_share(kernel, seqlen) for seqlen in SEQLENS]
    clocks = [Sm(*paths, kernel.blocks, kernel.warps, share).clocks() / tiles for share in shares]
    warps = kernel.blocks * kernel.warps / SCHEDULERS
    pipes = [_scaled(clocks_by_pipe(path), 1 / tiles) for path in paths]
    busy = _scaled(pipes[0], 1 - shares[-1]) + _scaled(pipes[1], shares[-1])
    bound = max(busy, key=busy.__getitem__)
    return Prediction(kernel.name, name, [tops(kernel, chip, *at) for at in zip(SEQLENS, clocks)], shares,
                      [of_all / warps for of_all in clocks], dict(pipes[0]), bound, busy[bound] * warps / clocks[-1])


def paths_of(kernel: Kernel) -> tuple[Code, Code]:
    """The paths of the main loop; ArgumentError without one."""
    try:
        paths = main_loop_paths(disassemble([kernel.cubin], kernel.target)[0])
    except BuildError as error:
        raise ArgumentError(f"{kernel.name}: {error}") from error
    if paths is None:
        raise ArgumentError(f"{kernel.name}: expected a loop with every kind of matrix instruction, got none")
    return paths


def tiles_of(path: Code, kernel: Kernel) -> int:
    """KV tiles of an iteration, by its multiply-adds; those of row sums are fewer than an eighth of a tile's."""
    done = sum(macs_of(instruction) for instruction in path if instruction.name in MATRIX)
    tiles = round(done / (2 * kernel.warp_m * kernel.block_n * kernel.headdim))
    if tiles == 0:
        raise ArgumentError(f"{kernel.name}: expected the products of {kernel.warp_m} rows, {kernel.block_n} keys and "
                            f"{kernel.headdim} channels in an iteration, got {done} multiply-adds")
    return tiles


def tops(kernel: Kernel, chip: Chip, seqlen: int, clocks: float) -> float:
    """`clocks`: in which every resident warp does one KV tile."""
    outside = OUTSIDE + (MASKED if kernel.is_causal else 0.0)
    tiles = [clocks * length + outside for length in walks(kernel, seqlen)] * (BATCH * HEADS)
    taken = _last_end(tiles, chip.sms * kernel.blocks) / (chip.mhz * 1e6) / EFFICIENCY
    operations = 4 * BATCH * HEADS * seqlen**2 * kernel.headdim / (2 if kernel.is_causal else 1)
    return operations / taken / 1e12


def _last_end(tiles: list[float], slots: int) -> float:
    """End of the last tile of queries, where tiles run longest first, each in the slot that is free first."""
    ends = [0.0] * slots
    for clocks in sorted(tiles, reverse=True):
        heapq.heapreplace(ends, ends[0] + clocks)
    return max(ends)


def _scaled(clocks: Counter[str] | dict[str, float], factor: float) -> Counter[str]:
    return Counter({pipe: value * factor for pipe, value in clocks.items()})


# --- command line -----------------------------------------------------------------------------------------------------


def main() -> int:
    arguments = parse()
    kernels = [_given_kernel(arguments)] if arguments.cubin else kernels_in(arguments.kernels, arguments.only)
    measured = json.loads(arguments.measured.read_text()) if arguments.measured else {}
    print("Predictions of a model, which nobody measured.\n")
    print(common.table_head(COLUMNS + (("measured", "error") if measured else ()), texts=2))
    predictions = []
    for kernel, chip in _pairs(kernels, arguments.chips):
        predictions.append(predict(kernel, chip))
        print(common.table_row(cells(predictions[-1], measured)), flush=True)
    common.write_json(arguments.json, {"predictions": [asdict(prediction) for prediction in predictions]})
    return 0


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--kernels", metavar="FOLDER", help="of `python -m codegen build`")
    source.add_argument("--cubin", type=Path, metavar="FILE", help="one kernel of any project, with the options below")
    parser.add_argument("--chips", type=common.words, default=list(CHIPS), help="(default: all that run the kernel)")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="names of kernels (default: %(default)s)")
    parser.add_argument("--measured", type=Path, metavar="FILE", help="print these TOPS and the predictions' errors")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything here")
    parser.add_argument("--target", default="sm_89", help="of the cubin (default: %(default)s)")
    parser.add_argument("--headdim", type=int, default=64, help="of the cubin (default: %(default)s)")
    parser.add_argument("--block", type=common.integers, default="128,64,32", metavar="M,N,W",
                        help="rows of a block, keys of a KV tile, rows of a warp (default: %(default)s)")
    parser.add_argument("--blocks", type=int, default=2, help="resident, an SM (default: %(default)s)")
    parser.add_argument("--mask", choices=("full", "causal"), default="full",
                        help="of the cubin (default: %(default)s)")
    parser.add_argument("--room", type=float, default=0.0, help="octaves by which P may outgrow its reference before "
                        "the cubin takes a branch that moves it, if it has one (default: %(default)s)")
    return parser.parse_args(words)


def _given_kernel(arguments: argparse.Namespace) -> Kernel:
    block = arguments.block
    if len(block) != 3 or min(*block, arguments.blocks, arguments.headdim) < 1 or block[0] % block[2]:
        raise ArgumentError(f"--block: expected rows of a block, keys of a tile and rows of a warp, such as 128,64,32, "
                            f"got {','.join(map(str, block))}")
    try:
        cubin = arguments.cubin.read_bytes()
    except OSError as error:
        raise ArgumentError(f"--cubin: expected a file, got {arguments.cubin}: {error}") from error
    return Kernel(arguments.cubin.stem, cubin, arguments.target, arguments.headdim, arguments.mask == "causal", *block,
                  arguments.blocks, arguments.room)


def _pairs(kernels: Sequence[Kernel], names: Sequence[str]) -> Iterator[tuple[Kernel, str]]:
    """Each kernel with the chips that run it; ArgumentError for an unknown chip, and where no chip runs any kernel."""
    unknown = [name for name in names if name not in CHIPS]
    if unknown:
        raise ArgumentError(f"--chips: expected some of {', '.join(CHIPS)}, got {', '.join(unknown)}")
    pairs = [(kernel, name) for kernel in kernels for name in names if CHIPS[name].target == kernel.target]
    if not pairs:
        raise ArgumentError(f"expected machine code of {', '.join(sorted({CHIPS[name].target for name in names}))}, "
                            f"got {', '.join(sorted({kernel.target for kernel in kernels}))}")
    yield from pairs


def cells(prediction: Prediction, measured: dict[str, list[float]]) -> list[object]:
    """A row of the table."""
    row = [prediction.kernel, prediction.chip, *(f"{value:.0f}" for value in prediction.tops),
           f"{prediction.bound} {prediction.busy:.0%}", f"{prediction.clocks[-1]:.0f}",
           *(f"{prediction.pipes.get(pipe, 0):.0f}" for pipe in PIPES_SHOWN),
           *(f"{share:.2f}" for share in prediction.moving)]
    found = measured.get(prediction.kernel)
    if found:
        row += [" / ".join(f"{value:.0f}" for value in found),
                " / ".join(f"{ours / value - 1:+.0%}" for ours, value in zip(prediction.tops, found))]
    return [*row, *["-"] * (2 if measured and not found else 0)]


if __name__ == "__main__":
    common.run(main)
