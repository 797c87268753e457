"""Attention alone with a linear P, compared with exponentials and cuDNN's bf16, interleaved in one process.

    python bench/linear_p.py --headdim 64,128 --seqlen 1024,4096,16384 --rounds 7
    python bench/linear_p.py --arch sm89 --pv-accum two_level_f32,two_level_f16 --kernels build/retarget_sm_90

Each round times every way once, between events around so many launches that they take some milliseconds; a row has the
medians over the rounds. `quantize` is the launches in front of attention. Inputs are N(0, 1); the keys of `far` are 40
times as large, so that no P of theirs is linear on sm90. Kernels of another arch are rebuilt for the GPU. Every output
is checked against cuDNN's before it is timed, those of `far` for being finite.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable
from typing import cast

import torch

import common
from sage_aot._backends.cuda.backend import CudaBackend
from sage_aot._backends.cuda.call import CudaCall
from sage_aot._call import pipeline
from sage_aot._problem.given import Given
from sage_aot._problem.options import Options
from speed import Pieces, time_interleaved

COLUMNS = ("inputs", "P·V", "headdim", "mask", "N", "exp2, µs", "TOPS", "linear ×", "TOPS", "× cuDNN", "quantize, µs")
FAR = 40.0
CUDNN = "sdpa_cudnn_bf16"


def main() -> int:
    arguments = parse()
    common.require_cuda()
    library = common.use_kernels(arguments.kernels)
    common.print_header(common.header(library) | {"inputs": f"bf16; medians of {arguments.rounds} rounds"})
    print(common.table_head(COLUMNS))
    backend = CudaBackend(library, arguments.arch)
    for headdim, kind, pv_accum, seqlen, is_causal in itertools.product(
            arguments.headdim, arguments.inputs, arguments.pv_accum, arguments.seqlen, (False, True)):
        print(common.table_row(row(arguments, backend, kind, pv_accum, headdim, seqlen, is_causal)), flush=True)
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common.add_size_arguments(parser, headdim="64,128", seqlen="1024,4096,16384", batch=4, heads=32)
    parser.add_argument("--rounds", type=int, default=7, help="of each row (default: %(default)s)")
    parser.add_argument("--arch", default="sm90", help="whose kernels (default: %(default)s)")
    parser.add_argument("--pv-accum", type=common.words, default=["auto"], metavar="NAMES",
                        help="how P·V adds up, as attn takes it (default: auto)")
    parser.add_argument("--inputs", type=common.words, default=["normal", "far"], help="normal, far (default: both)")
    return parser.parse_args()


def row(arguments: argparse.Namespace, backend: CudaBackend, kind: str, pv_accum: str, headdim: int, seqlen: int,
        is_causal: bool) -> list[object]:
    batch = arguments.batch if seqlen < 16384 else max(1, arguments.batch // 2)
    shape = (3, batch, arguments.heads, seqlen, headdim)
    q, k, v = torch.randn(shape, device="cuda", generator=torch.Generator("cuda").manual_seed(0)).bfloat16()
    if kind == "far":
        k = k * FAR
    given = Given("dense", q, k, v)
    calls = {p: pipeline.prepare(backend, given, Options(is_causal=is_causal, pv_accum=pv_accum, p=p))
             for p in ("exp2", "linear")}
    pieces = {p: Pieces(cast(CudaCall, call.run), given) for p, call in calls.items()}
    expected = common.sdpa(CUDNN, q, k, v, is_causal)
    for p, piece in pieces.items():
        if kind == "normal":
            common.check_output(p, piece.checked_output(), expected)
        elif not piece.checked_output().isfinite().all():
            sys.exit(f"{p}: expected finite values, got others; nothing was timed with it")
    ways = {p: piece.attend for p, piece in pieces.items()}
    ways |= {"quantize": pieces["linear"].quantize, "cudnn": lambda: common.sdpa(CUDNN, q, k, v, is_causal)}
    operations = 4 * batch * arguments.heads * seqlen * seqlen * headdim * (0.5 if is_causal else 1.0)
    times = measure(ways, arguments.rounds, max(2, int(4e12 / operations)))
    exp2, linear = times["exp2"], times["linear"]
    return [kind, pv_accum, headdim, "causal" if is_causal else "full", seqlen, f"{exp2:.1f}",
            f"{operations / exp2 / 1e6:.0f}", f"{exp2 / linear:.3f}", f"{operations / linear / 1e6:.0f}",
            f"{times['cudnn'] / linear:.2f}", f"{times['quantize']:.1f}"]


def measure(ways: dict[str, Callable[[], object]], rounds: int, launches: int) -> dict[str, float]:
    """Median µs of each way, the ways one after another in each round."""
    return {name: timing.median_us for name, timing in time_interleaved(ways, rounds, launches).items()}


if __name__ == "__main__":
    common.run(main)
