"""Accuracy of the kernels against attention in float64, beside torch's flash attention in bf16.

    python bench/accuracy.py --arch sm80,sm89 --kernels build/retarget_sm_90 --json accuracy.json

On a GPU it runs the kernels, with --emulate their emulation, too; with --device cpu the emulation alone. Inputs are
seeded. The exit code is 1 where an output is so far off that its kernel must be broken.
"""

from __future__ import annotations

import argparse
import itertools
from dataclasses import asdict, dataclass

import torch

import common
from sage_aot import _cuda, _emulate, _reference
from sage_aot._loader import Library
from sage_aot._plan import plan
from sage_aot._problem import check
from sage_aot._reference import Accuracy

FLASH = "sdpa_flash_bf16"
COLUMNS = ("row", "inputs", "headdim", "mask", "N", "cosine", "relative L1", "RMSE")


@dataclass(frozen=True)
class Case:
    """One set of inputs."""

    inputs: str  # class of _reference.inputs
    headdim: int
    mask: str
    seqlen: int


@dataclass(frozen=True)
class Row:
    """What one implementation made of a case."""

    row: str
    case: Case
    accuracy: Accuracy

    def cells(self) -> list[object]:
        values = self.accuracy
        return [self.row, *asdict(self.case).values(), f"{values.cosine:.6f}", f"{values.relative_l1:.4f}",
                f"{values.rmse:.2e}"]

    def to_json(self) -> dict[str, object]:
        return {"row": self.row, **asdict(self.case), **asdict(self.accuracy)}


def main() -> int:
    arguments = parse()
    if arguments.device == "cuda":
        common.require_cuda()
    library = common.use_kernels(arguments.kernels)
    archs = arguments.arch or common.default_archs(library)
    header = common.header(library) | {
        "inputs": f"batch {arguments.batch}, {arguments.heads} heads, bf16, seed {arguments.seed}, {arguments.device}"}
    common.print_header(header)
    print(common.table_head(COLUMNS))
    rows = []
    for case in cases(arguments):
        for row in measure(case, archs, library, arguments):
            print(common.table_row(row.cells()), flush=True)
            rows.append(row)
    common.write_json(arguments.json, {"header": header, "rows": [row.to_json() for row in rows]})
    return 0 if all(row.accuracy.cosine >= common.MIN_COSINE for row in rows) else 1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common.add_shape_arguments(parser, seqlen="4096", batch=2, heads=8)
    parser.add_argument("--arch", type=common.words,
                        help="whose kernels (default: every arch of the folder that can run here)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="(default: %(default)s)")
    parser.add_argument("--emulate", action="store_true", help="on cuda: also emulate on the CPU, which is slow")
    parser.add_argument("--seed", type=int, default=0, help="of the inputs (default: %(default)s)")
    return parser.parse_args()


def cases(arguments: argparse.Namespace) -> list[Case]:
    return [Case(*values) for values in itertools.product(_reference.INPUT_CLASSES, arguments.headdim, arguments.mask,
                                                          arguments.seqlen)]


def measure(case: Case, archs: list[str], library: Library, arguments: argparse.Namespace) -> list[Row]:
    """Every implementation on one case: torch's flash attention first, then each arch."""
    generator = torch.Generator().manual_seed(arguments.seed)  # on the CPU, so that both devices see the same numbers
    shape = (arguments.batch, arguments.heads, case.seqlen, case.headdim)
    host = _reference.inputs(case.inputs, shape, shape, torch.bfloat16, generator)
    qkv = [tensor.to(arguments.device) for tensor in host]
    is_causal = case.mask == "causal"
    exact, _ = _reference.attention(*qkv, is_causal=is_causal)
    outputs = {FLASH: common.sdpa(FLASH, *qkv, is_causal)}
    for arch in archs:
        if arguments.device == "cuda":
            outputs[f"{arch} kernel"] = attention(arch, library, qkv, is_causal)
        if arguments.device == "cpu" or arguments.emulate:
            outputs[f"{arch} emulation"] = attention(arch, library, host, is_causal)
    return [Row(row, case, _reference.measure(out.to(exact.device), exact)) for row, out in outputs.items()]


def attention(arch: str, library: Library, qkv: list[torch.Tensor], is_causal: bool) -> torch.Tensor:
    """``[batch, heads, seq, headdim]`` from the kernels of one arch, or from their emulation for CPU tensors."""
    problem = check(*qkv, is_causal=is_causal, scale=None, layout="HND", smooth_k=True)
    kernels = common.kernels_of(arch, problem, library)
    out = common.poisoned(qkv[0])
    if out.device.type == "cuda":
        _cuda.attention(plan(problem, kernels), library, *qkv, out, None)
    else:
        _emulate.attention(problem, kernels, *qkv, out, None)
    return out


if __name__ == "__main__":
    common.run(main)
