"""A process of test_context_parallel.py: one rank of a model whose tokens or heads two processes share.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python tests/integrations/one_rank.py

Prints, from rank 0, a line of JSON for each way to share: the largest difference from one process with exact attention,
for models how far the kernels' arithmetic is from it, and the report.
"""

from __future__ import annotations

import json
from functools import partial
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from diffusers import ContextParallelConfig
from exact import attention
from test_diffusers import draw, wan
from torch.distributed.tensor.experimental import _attention
from yunchang.kernels import AttnType
from yunchang.ring.ring_flash_attn import ring_flash_attn_forward

from sage_aot.integrations import Policy, _serve, report, reset_report, use
from sage_aot.integrations import diffusers as integration
from sage_aot.integrations.distributed import ring_forward, ring_op

WAYS = {
    "ring": {"ring_degree": 2},
    "ulysses": {"ulysses_degree": 2},
    "ring, any length": {"ring_degree": 2, "ring_anything": True},
    "ulysses, any length": {"ulysses_degree": 2, "ulysses_anything": True},
}


def main() -> None:
    dist.init_process_group("gloo")
    for name, config in WAYS.items():
        alone, inputs = wan()
        inputs["hidden_states"] = draw(1, 4, 2, 16, 10 if "any" in name else 16)  # 80 tokens, 40 for a rank
        with torch.no_grad():
            expected = alone(**inputs).sample
        shared, _ = wan()
        integration.register()
        # diffusers divides by the number of devices, which is none here
        with mock.patch.object(torch.accelerator, "device_count", return_value=1):
            shared.enable_parallelism(config=ContextParallelConfig(**config))
        integration.enable(shared)
        with use(Policy("possible")), torch.no_grad():
            with mock.patch.object(_serve, "attn", attention):
                reset_report()
                exact, = shared(**inputs, return_dict=False)
                counts = report()
            found, = shared(**inputs, return_dict=False)
        if dist.get_rank() == 0:
            print(json.dumps({"way": name, "exact": (exact - expected).abs().max().item(), "report": counts,
                              "kernels": ((found - expected).norm() / expected.norm()).item()}), flush=True)
    rings()
    dist.destroy_process_group()


def rings() -> None:
    """The rings of torch and yunchang: each rank has half of the tokens."""
    q, k, v = (torch.randn(2, 4, 64, 64, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    rank = dist.get_rank()
    for is_causal in (False, True):
        expected = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=0.2)
        own = [x.chunk(2, dim=2)[rank] for x in (q, k, v)]
        for name, ring in (("torch", torchs_ring), ("yunchang", yunchangs_ring),
                           ("yunchang by sageattention", partial(yunchangs_ring, attn_type=AttnType.SAGE_AUTO))):
            with mock.patch.object(_serve, "attn", attention):
                reset_report()
                out = ring(*own, is_causal)
            difference = (out - expected.chunk(2, dim=2)[rank]).abs().max()
            dist.all_reduce(difference, dist.ReduceOp.MAX)
            if rank == 0:
                print(json.dumps({"ring": name, "is_causal": is_causal, "exact": difference.item(),
                                  "report": report()}), flush=True)


def torchs_ring(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool) -> torch.Tensor:
    _attention._cp_options.enable_load_balance = False  # which takes tokens from both ends of the sequence
    out: torch.Tensor = _attention._templated_ring_attention(dist.group.WORLD, 2, ring_op, q, k, v,
                                                             is_causal=is_causal, scale=0.2)[0]
    return out


def yunchangs_ring(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool,
                   attn_type: AttnType | None = None) -> torch.Tensor:
    """With `attn_type` by the package that yunchang imports for it."""
    out, _ = ring_flash_attn_forward(dist.group.WORLD, *(x.transpose(1, 2).contiguous() for x in (q, k, v)),
                                     softmax_scale=0.2, causal=is_causal, attn_type=attn_type,
                                     attn_processor=ring_forward if attn_type is None else None)
    made: torch.Tensor = out.transpose(1, 2)
    return made


if __name__ == "__main__":
    main()
