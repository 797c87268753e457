"""Attention of a video model that several GPUs of one host share, with torch's attention and with sage_aot.

    torchrun --nproc-per-node 2 bench/context_parallel.py

`diffusers` rows run a Wan 14B of one layer at 720p, 75,600 tokens, whose tokens (ring) or heads (ulysses) the GPUs
share. `yunchang` rows run its LongContextAttention alone, 40 heads of 128 channels, 75,600 tokens. `one GPU` rows run
the same on each GPU alone. bf16; the time is that of the slowest GPU. `×` is the speed against torch's attention in the
same row group. `difference` is ‖a − b‖ / ‖b‖ from the same attention on one GPU, `from torch` from torch's attention on
one GPU.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median

import diffusers
import torch
import torch.distributed as dist
import torch.nn.functional as F
import yunchang
from diffusers import ContextParallelConfig

import common
import hosts
import sage_aot
from sage_aot._tools.reference import relative_l2
from sage_aot.integrations import diffusers as sage_diffusers
from sage_aot.integrations import report, reset_report
from sage_aot.integrations.distributed import ring_forward

COLUMNS = ("host", "GPUs share", "attention", "ms", "×", "difference", "from torch")
TORCHS = "_native_cudnn"
"""diffusers' backend of torch's attention that returns the log-sum-exp; on Hopper it is also torch's own choice."""

HEADS, HEADDIM = 40, 128


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    common.require_cuda()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    if dist.get_rank() == 0:
        versions = {"GPUs": str(dist.get_world_size()), "diffusers": diffusers.__version__,
                    "yunchang": yunchang.__version__}
        common.print_header(common.header(common.use_kernels(None)) | versions)
        print(common.table_head(COLUMNS, 3), flush=True)
    with torch.inference_mode():
        of_diffusers()
        of_yunchang()
    dist.destroy_process_group()
    return 0


# --- diffusers --------------------------------------------------------------------------------------------------------


def of_diffusers() -> None:
    alone = diffusers_rows("one GPU", None, {})
    for way in ("ring", "ulysses"):
        diffusers_rows(way, ContextParallelConfig(**{f"{way}_degree": dist.get_world_size()}), alone)


def diffusers_rows(way: str, config: ContextParallelConfig | None,
                   alone: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The rows of one way to share; returns the output by each attention. `alone`: those of one GPU, or none yet."""
    torch.cuda.empty_cache()
    model, inputs = hosts.wan(hosts.WAN_720P)
    if config is not None:
        model.enable_parallelism(config=config)

    def work() -> torch.Tensor:
        return model(**inputs, return_dict=False)[0]

    outs: dict[str, torch.Tensor] = {}
    torchs = None
    for attention in ("torch", "sage_aot"):
        with switched(model, attention):
            outs[attention] = work()
            references = alone or outs
            torchs = show("diffusers", way, attention, work, torchs, references[attention], references["torch"])
    return outs


@contextmanager
def switched(model: torch.nn.Module, attention: str) -> Iterator[None]:
    if attention == "torch":
        model.set_attention_backend(TORCHS)
        yield
        return
    sage_diffusers.enable(model)
    reset_report()
    try:
        yield
    finally:
        sage_diffusers.disable(model)
    if dist.get_rank() == 0:
        print(f"<!-- report: {report()} -->")


# --- yunchang ---------------------------------------------------------------------------------------------------------


def of_yunchang() -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    tokens = 75600 // world * world
    generator = torch.Generator("cuda").manual_seed(7)
    whole = [torch.randn(1, tokens, HEADS, HEADDIM, device="cuda", dtype=torch.bfloat16, generator=generator)
             for _ in range(3)]

    def sdpa() -> torch.Tensor:
        return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in whole)).transpose(1, 2)

    def ours() -> torch.Tensor:
        return sage_aot.attn(*whole, layout="NHD")

    alone = {"torch": sdpa(), "sage_aot": ours()}
    torchs = show("yunchang", "one GPU", "torch", sdpa, None, alone["torch"], alone["torch"])
    show("yunchang", "one GPU", "sage_aot", ours, torchs, alone["sage_aot"], alone["torch"])
    parts = [x.chunk(world, 1)[rank].contiguous() for x in whole]
    shares = {name: out.chunk(world, 1)[rank] for name, out in alone.items()}
    for way, degrees in (("ring", (1, world)), ("ulysses", (world, 1))):
        yunchang.set_seq_parallel_pg(*degrees, rank, world)
        torchs = None
        for attention, options in (("torch", {"attn_type": yunchang.kernels.AttnType.TORCH_CUDNN}),
                                   ("sage_aot", {"attn_type": None, "attn_processor": ring_forward})):
            layer = yunchang.LongContextAttention(ring_impl_type="basic", **options)
            torchs = show("yunchang", way, attention, lambda: layer(*parts),  # noqa: B023  # called here
                          torchs, shares[attention], shares["torch"])


# --- a row ------------------------------------------------------------------------------------------------------------


def show(host: str, way: str, attention: str, work: Callable[[], torch.Tensor], torchs: float | None,
         alone: torch.Tensor, torchs_alone: torch.Tensor) -> float:
    """Print a row, from rank 0; returns torch's time."""
    out = work()
    errors = [largest(relative_l2(out, other)) for other in (alone, torchs_alone)]
    ms = largest(milliseconds(work))
    torchs = ms if torchs is None else torchs
    if dist.get_rank() == 0:
        print(common.table_row([host, way, attention, f"{ms:.2f}", f"{torchs / ms:.2f}",
                                *(f"{error:.1e}" for error in errors)]), flush=True)
    return torchs


def largest(value: float) -> float:
    """Largest of a value over all GPUs."""
    everywhere = torch.tensor(value, device="cuda", dtype=torch.float64)
    dist.all_reduce(everywhere, dist.ReduceOp.MAX)
    return everywhere.item()


def milliseconds(work: Callable[[], object], rounds: int = 5) -> float:
    """Median time from when all GPUs are ready to the end of this GPU's work."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(rounds):
        dist.barrier()
        torch.cuda.synchronize()
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return median(times)


if __name__ == "__main__":
    common.run(main)
