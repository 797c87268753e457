"""Speed of a training step's attention, forward and backward pass, compared with torch's flash and cuDNN in bf16.

    python bench/backward.py --json backward.json
    python bench/backward.py --headdim 64 --seqlen 2048,8192 --mask causal

Rows: `train_attn`, the public call and its backward pass, quantization included; `sdpa_...`, torch's by a backend;
`kernel ...`, one backward launch alone (of `bwdqkv` a difference of two times). A step is what torch.autograd runs:
forward, then the gradients of q, k and v.
TFLOPS count the products of an exact step, 4·B·H·N²·D operations forward and 10 backward, half of them when causal.
Inputs are N(0, 1). Gradients are held against those of torch's math backend in float32 before anything is timed; the
error is the largest of the three, relative, by L2 norms.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from statistics import median

import torch

import common
import sage_aot
from sage_aot._backends.base import BackwardTensors
from sage_aot._backends.cuda.training import CudaBackward
from sage_aot._call import pipeline
from sage_aot._call.backends import backend_of
from sage_aot._launch.plan import Launch
from sage_aot._problem.given import Given
from sage_aot._problem.options import Options
from sage_aot._tools.reference import relative_l2

COLUMNS = ("row", "headdim", "mask", "N", "ms", "TFLOPS", "× flash", "error")
MOST_ERROR = 0.06
"""Largest error of gradients on N(0, 1); wrong ones have an error near one."""

Step = Callable[[], tuple[torch.Tensor, ...]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common.add_shape_arguments(parser, seqlen="2048,4096,8192,16384", batch=4, heads=32)
    args = parser.parse_args()
    common.require_cuda()
    library = common.use_kernels(args.kernels)
    lines = common.header(library)
    common.print_header(lines)
    print(common.table_head(COLUMNS), flush=True)
    rows = []
    for headdim, mask, seqlen in itertools.product(args.headdim, args.mask, args.seqlen):
        for row in rows_of(headdim, mask == "causal", seqlen, args.batch, args.heads):
            rows.append(row)
            print(common.table_row(row), flush=True)
    common.write_json(args.json, {"header": lines, "columns": COLUMNS, "rows": rows})
    return 0


def rows_of(headdim: int, is_causal: bool, seqlen: int, batch: int, heads: int) -> Iterator[tuple[object, ...]]:
    """The rows of one shape. The flash backend comes first, which the others are compared with."""
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(batch, heads, seqlen, headdim, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    leaves = tuple(x.requires_grad_() for x in (q, k, v))
    expected = exact_of_few_heads(leaves, grad, is_causal)
    operations = 14.0 * batch * heads * seqlen**2 * headdim * (0.5 if is_causal else 1.0)
    mask, flash_ms = "causal" if is_causal else "full", None
    steps = {row: step_of(lambda row=row: common.sdpa(row, *leaves, is_causal), leaves, grad) for row in common.SDPA}
    steps["train_attn"] = step_of(lambda: sage_aot.train_attn(*leaves, is_causal=is_causal), leaves, grad)
    for row, step in steps.items():
        wrong = max(relative_l2(got[:1, :2], wanted) for got, wanted in zip(step(), expected))
        if not wrong < MOST_ERROR:
            raise SystemExit(f"{row}: wrong gradients, error {wrong}; nothing was timed with it")
        ms = time_of(step)
        flash_ms = flash_ms or ms
        yield (row, headdim, mask, seqlen, f"{ms:.3f}", round(operations / ms * 1e-9), f"{flash_ms / ms:.2f}",
               f"{wrong:.4f}")
    for name, ms in kernel_times(leaves, grad, is_causal):
        yield f"kernel {name}", headdim, mask, seqlen, f"{ms:.3f}", None, None, None


def step_of(forward: Callable[[], torch.Tensor], leaves: tuple[torch.Tensor, ...], grad: torch.Tensor) -> Step:
    return lambda: torch.autograd.grad(forward(), leaves, grad)


def exact_of_few_heads(leaves: tuple[torch.Tensor, ...], grad: torch.Tensor,
                       is_causal: bool) -> tuple[torch.Tensor, ...]:
    """Gradients of the first two heads, one after another: scores of long sequences take memory."""
    found = []
    for head in range(2):
        own = tuple(x.detach()[:1, head: head + 1].float().requires_grad_() for x in leaves)
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            out = torch.nn.functional.scaled_dot_product_attention(*own, is_causal=is_causal)
        found.append(torch.autograd.grad(out, own, grad[:1, head: head + 1].float()))
    return tuple(torch.cat(of_heads, 1) for of_heads in zip(*found))


def kernel_times(leaves: tuple[torch.Tensor, ...], grad: torch.Tensor, is_causal: bool) -> Iterator[tuple[str, float]]:
    """Each launch of the backward pass alone. bwdqkv, whose blocks count, follows the launch that clears the counts,
    and the time of that launch is taken off."""
    q, k, v = (x.detach() for x in leaves)
    out, lse, saved = torch.ops.sage_aot.train_attn(q, k, v, None, is_causal)
    tensors = BackwardTensors(grad, Given("train", out, v, v), *(torch.empty_like(x) for x in (q, k, v)))
    call = pipeline.prepare_backward(backend_of(q), tensors, Options(is_causal=is_causal)).run
    assert isinstance(call, CudaBackward)
    workspace = saved.new_empty(call.plan.workspace_bytes)
    call.run(tensors, lse, saved, workspace)
    stream = torch.cuda.current_stream().cuda_stream
    first, *others = call.launches(tensors)

    def time(*launches: Launch) -> float:
        queue = call.queue_of(launches)
        return time_of(lambda: queue(stream, *call.addresses(tensors, lse, saved, workspace)))

    of_first = time(first)
    yield first.record.spec.kind, of_first
    for launch in others:
        counts = bool(launch.record.facts.get("in_order"))
        yield launch.record.spec.kind, time(first, launch) - of_first if counts else time(launch)


def time_of(work: Callable[[], object], seconds: float = 0.25) -> float:
    """Milliseconds of one call: the median of calls between two events each, queued without waits."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    work()
    begin.record(), work(), end.record(), torch.cuda.synchronize()
    count = max(4, min(100, int(1000 * seconds / max(begin.elapsed_time(end), 1e-3))))
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    marks[0].record()
    for mark in marks[1:]:
        work()
        mark.record()
    torch.cuda.synchronize()
    return median(before.elapsed_time(after) for before, after in itertools.pairwise(marks))


if __name__ == "__main__":
    common.run(main)
