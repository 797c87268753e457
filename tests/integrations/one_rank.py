"""A process of test_context_parallel.py: one rank of a model whose tokens or heads two processes share.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python tests/integrations/one_rank.py [cuda]

With "cuda" the sparse calls alone, by the kernels of two GPUs, over NCCL. Prints, from rank 0, a line of JSON for each
way to share: the largest difference from one process with exact attention, how far the kernels' arithmetic is from it,
and the report. Of sparse calls the largest difference is that from exact attention to the blocks that are chosen apart
from the product.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from blocks import chosen_by, clear, with_dense_blocks
from diffusers import ContextParallelConfig
from diffusers.models.attention_dispatch import dispatch_attention_fn
from exact import attention
from test_diffusers import draw, long, model, wan
from torch.distributed.tensor.experimental import _attention
from yunchang.kernels import AttnType
from yunchang.ring.ring_flash_attn import ring_flash_attn_forward

from sage_aot import Sparse
from sage_aot.integrations import Policy, _serve, report, reset_report, use
from sage_aot.integrations import diffusers as integration
from sage_aot.integrations.distributed import ring_blocks, ring_forward, ring_op

WAYS = {
    "ring": {"ring_degree": 2},
    "ulysses": {"ulysses_degree": 2},
    "ring, any length": {"ring_degree": 2, "ring_anything": True},
    "ulysses, any length": {"ulysses_degree": 2, "ulysses_anything": True},
}


def main() -> None:
    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ["RANK"]))
        dist.init_process_group("cpu:gloo,cuda:nccl")
        for name, config in WAYS.items():
            for text in (None, text_for(name)):
                sparse_calls(name, sharing(wan()[0], config)._parallel_config, text)
        end()
    dist.init_process_group("gloo")
    for name, config in WAYS.items():
        alone, inputs = wan()
        inputs["hidden_states"] = draw(1, 4, 2, 16, 10 if "any" in name else 16)  # 80 tokens, 40 for a rank
        with torch.no_grad():
            expected = alone(**inputs).sample
        shared = sharing(wan()[0], config)
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
        sparse_calls(name, shared._parallel_config)
        sparse_calls(name, shared._parallel_config, text_for(name))
        for of_text in ("flux", "qwen image"):
            text_of_model(name, of_text, config)
    rings()
    masks_of_shares()
    end()


def sharing(made: Any, config: dict[str, Any]) -> Any:
    """The model, whose tokens or heads the processes share."""
    integration.register()
    # diffusers divides by the number of devices, which is none on a CPU
    with mock.patch.object(torch.accelerator, "device_count", return_value=1):
        made.enable_parallelism(config=ContextParallelConfig(**config))
    return made


def text_for(way: str) -> tuple[int, int]:
    """(first, last) text tokens of a call of :func:`sparse_calls`; an odd number where shares may be uneven."""
    return 257 if "any" in way else 258, 2


def end() -> None:
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # the threads of gloo's groups, of which diffusers makes more, now and then abort a process that ends


SPARSE = Sparse(keep=(0.25, 0.5))
DEVICE = "cuda" if sys.argv[1:] == ["cuda"] else "cpu"


def sparse_calls(name: str, config: Any, text: tuple[int, int] | None = None) -> None:
    """A call of 16 blocks of which each process has half of the tokens, or of 15 and one row, unevenly. With text, each
    has a part of what is first, a part of the rest and a part of what is last: 15 blocks and 127 rows, unevenly."""
    q, k, v = clear(layout="NHD", last=128 if "any" not in name else 1 if text is None else 127)
    cut = [8 * 128, q.shape[1] - 8 * 128]
    own = [x.split(cut, 1)[dist.get_rank()].to(DEVICE) for x in (q, k, v)]
    mask = chosen_by(SPARSE, *(x.transpose(1, 2) for x in (q, k)))
    backend = integration._sparse_backend(SPARSE)
    if text is not None:
        backend = integration._sparse_backend(SPARSE, text, is_split=True)
        counts = text[0], q.shape[1] - sum(text), text[1]
        labels = [torch.full((count,), is_text) for count, is_text in zip(counts, (True, False, True))]
        mask = with_dense_blocks(mask, torch.cat([part.tensor_split(2)[rank] for rank in range(2) for part in labels]))
    expected = attention(q, k, v, attn_mask=mask, layout="NHD").split(cut, 1)[dist.get_rank()]
    with use(Policy("possible")), torch.no_grad():
        reset_report()
        found = dispatch_attention_fn(*own, backend=backend, parallel_config=config).cpu()
        counts, difference = report(), torch.zeros(1)
        if DEVICE == "cpu":
            with mock.patch.object(_serve, "attn", attention):
                difference = (dispatch_attention_fn(*own, backend=backend, parallel_config=config) - expected).abs()
    worst = torch.stack([difference.max(), (found - expected).norm() / expected.norm()])
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        print(json.dumps({"sparse": name if text is None else f"{name}, text", "report": counts,
                          "exact": worst[0].item(), "kernels": worst[1].item(),
                          "seen": mask.float().mean().item()}), flush=True)


def text_of_model(way: str, name: str, config: dict[str, Any]) -> None:
    """Check that the queries that see all blocks are the text's, which in the first layer are those that change with
    the text. "exact" counts the blocks of which that is not so."""
    made, inputs, _ = long(name)
    if name == "qwen image":
        made = model("QwenImageTransformer2DModel", **{**dict(made.config), "num_attention_heads": 2})
        del inputs["encoder_hidden_states_mask"]  # with which a ring is dense
    batch, _, channels = inputs["encoder_hidden_states"].shape
    tokens = 151 if "any" in way else 152
    inputs["encoder_hidden_states"] = draw(batch, tokens, channels)
    if name == "flux":
        inputs["txt_ids"] = torch.zeros(tokens, 3)
    integration.enable(sharing(made, config), sparse=Sparse(keep=0.1, block_size=64, first=0), text_tokens=tokens)
    calls: list[tuple[torch.Tensor, torch.Tensor]] = []

    def attn(q: Any, k: Any, v: Any, sparse: Any = None, block_mask: Any = None, **more: Any) -> Any:
        if sparse is not None:
            block_mask = sparse.select(q, k, layout="NHD")
        if block_mask is not None:
            calls.append((q, block_mask.blocks))
        return attention(q, k, v, **more)

    with use(Policy("possible")), torch.no_grad(), mock.patch.object(_serve, "attn", attn):
        made(**inputs, return_dict=False)
        (q, blocks), *_, each = calls[0], len(calls)
        made(**{**inputs, "encoder_hidden_states": inputs["encoder_hidden_states"] + 1}, return_dict=False)
    differs = (q != calls[each][0]).any(3).any(2)[0]
    of_text = torch.stack([part.any() for part in differs.split(64)])
    wrong = torch.tensor(float((blocks.all(3).all(1)[0] != of_text).sum()))
    dist.all_reduce(wrong)
    if dist.get_rank() == 0:
        print(json.dumps({"text of": name, "shared by": way, "exact": wrong.item(),
                          "tokens": differs.sum().item()}), flush=True)


def masks_of_shares() -> None:
    """The masks of a ring whose shares end within a block, with text in front and behind."""
    lengths, rank = [1000, 1048], dist.get_rank()
    sparse = Sparse(keep=0.25, near=2, dense_keys=(130, 10), dense_queries=(0, 30))
    q, k = (torch.cat([x[:, :, :1000], x[:, :, 1024:], x[:, :, 1000:1024]], 2) for x in clear()[:2])
    own_q, own_k = (x.split(lengths, 2)[rank] for x in (q, k))
    masks = ring_blocks(own_q, own_k, sparse, lengths=lengths)
    # as if both shares were filled up to whole blocks: the mask of the same means
    found = torch.cat([mask.blocks[:, :, ::2, ::2] for mask in masks], 3)
    filled = [torch.cat([x, x[:, :, x.shape[2] // 128 * 128:].mean(2, keepdim=True).expand(
        -1, -1, -x.shape[2] % 128, -1)], 2) for each in (q, k) for x in each.split(lengths, 2)]
    whole_q, whole_k = torch.cat(filled[:2], 2), torch.cat(filled[2:], 2)
    behind = -lengths[1] % 128
    placed = Sparse(keep=0.25, near=2, dense_keys=(130, 10 + behind), dense_queries=(0, 30 + behind))
    expected = chosen_by(placed, whole_q, whole_k)[:, :, ::128, ::128]
    wrong = (found != expected.split([8, 9], 2)[rank]).sum().float()
    dist.all_reduce(wrong)
    if rank == 0:
        print(json.dumps({"masks": "of uneven shares", "exact": wrong.item(), "kept": found.float().mean().item()}),
              flush=True)


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
    """Run yunchang's ring, with `attn_type` by the package that yunchang imports for it."""
    out, _ = ring_flash_attn_forward(dist.group.WORLD, *(x.transpose(1, 2).contiguous() for x in (q, k, v)),
                                     softmax_scale=0.2, causal=is_causal, attn_type=attn_type,
                                     attn_processor=ring_forward if attn_type is None else None)
    made: torch.Tensor = out.transpose(1, 2)
    return made


if __name__ == "__main__":
    main()
