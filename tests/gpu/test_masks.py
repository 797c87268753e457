"""Windows, sinks and lists of KV tiles on a GPU: what the fuzzer's short calls do not have."""

from __future__ import annotations

import math

import pytest
import torch
from variants import SPARSE, backend_of

import sage_aot
from sage_aot._call.backends import handing
from sage_aot._problem.options import Options
from sage_aot._tools import reference

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]


def draw(tokens=4096, heads=4, headdim=128, seed=0):
    return torch.randn(3, 1, heads, tokens, headdim, device="cuda",
                       generator=torch.Generator("cuda").manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("headdim", [64, 128, 256])
@pytest.mark.parametrize("options", [{}, {"smooth_q": True}, {"p": "exp2"}, {"smooth_v": True}], ids=str)
def test_a_list_of_all_blocks_has_the_bits_of_the_dense_call(headdim, options):
    q, k, v = draw(headdim=headdim)
    every = sage_aot.block_mask(torch.ones(32, 32, dtype=torch.bool, device="cuda"))
    dense = sage_aot.attn(q, k, v, return_lse=True, **options)
    listed = sage_aot.attn(q, k, v, block_mask=every, return_lse=True, **options)
    assert torch.equal(listed[0], dense[0]) and torch.equal(listed[1], dense[1])


@pytest.mark.parametrize("headdim", [64, 128, 256])
@pytest.mark.parametrize("window", [(1000, 0), (64, 64), (0, 3000)], ids=str)
def test_windows_of_long_calls(headdim, window):
    q, k, v = draw(headdim=headdim)
    out, lse = sage_aot.attn(q, k, v, window=window, return_lse=True)
    expected, expected_lse = reference.attention(q, k, v, window=window)
    assert reference.measure(out, expected).relative_l1 < 0.05
    assert (lse - expected_lse).abs().max() < 0.05


@pytest.mark.parametrize("size", [64, 128])
def test_lists_are_deterministic_and_right(size):
    q, k, v = draw(8192, heads=2)
    count = 8192 // size
    blocks = torch.rand(1, 2, count, count, device="cuda", generator=torch.Generator("cuda").manual_seed(1)) < 0.2
    mask = sage_aot.block_mask(blocks, size)
    first = sage_aot.attn(q, k, v, block_mask=mask)
    assert all(torch.equal(sage_aot.attn(q, k, v, block_mask=mask), first) for _ in range(5))
    seen = blocks.repeat_interleave(size, 2).repeat_interleave(size, 3)
    expected = torch.nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float(), attn_mask=seen)
    assert reference.measure(first, expected.nan_to_num()).relative_l1 < 0.05


def test_masks_in_a_graph_are_read_at_each_replay_and_never_on_the_host():
    q, k, v = draw(1024)
    mask = torch.ones(1, 1, 1024, 1024, dtype=torch.bool, device="cuda")
    sinks = torch.zeros(4, device="cuda")
    call = {"attn_mask": mask, "sinks": sinks, "window": (500, 100)}
    sage_aot.attn(q, k, v, **call)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = sage_aot.attn(q, k, v, **call)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for seed in range(3):
        generator = torch.Generator("cuda").manual_seed(seed)
        mask.copy_(torch.rand(mask.shape, device="cuda", generator=generator) < 0.1 * (seed + 1))
        sinks.copy_(torch.randn(4, device="cuda", generator=generator))
        out.fill_(math.nan)
        graph.replay()
        assert torch.equal(out, sage_aot.attn(q, k, v, **call))


def test_more_kv_tiles_than_a_round_of_the_list_kernel():
    q, k, v = draw(256, heads=1, headdim=64)
    k, v = (x.repeat(1, 1, 600, 1) for x in (k, v))  # 153,600 keys, 1,200 KV tiles of 128
    blocks = torch.rand(2, 1200, device="cuda", generator=torch.Generator("cuda").manual_seed(2)) < 0.1
    out = sage_aot.attn(q, k, v, block_mask=sage_aot.block_mask(blocks))
    seen = blocks.repeat_interleave(128, 0).repeat_interleave(128, 1)[None, None]
    expected = torch.nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float(), attn_mask=seen)
    assert reference.measure(out, expected).relative_l1 < 0.06


MASKS = {
    "window": {"window": (100, 30)},
    "sinks": {"is_causal": True, "sinks": True},
    "elements": {"elements": 0.3, "sinks": True, "window": (300, -1)},
    "blocks": {"blocks": 64},
    "documents": {"documents": 120},
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("spec", SPARSE, ids=[spec.name for spec in SPARSE])
def test_every_kernel_with_a_sparse_mask_is_right(spec, mask):
    generator = torch.Generator("cuda").manual_seed(3)
    shapes = (2, 4, 333, spec.headdim), (2, 2, 417, spec.headdim)
    q, k, v = reference.inputs("normal", *shapes, torch.bfloat16, generator)
    asked = dict(MASKS[mask])
    i, j = torch.arange(333, device="cuda")[:, None] + 417 - 333, torch.arange(417, device="cuda")
    seen = torch.ones(1, 1, 333, 417, dtype=torch.bool, device="cuda")
    call = {name: asked[name] for name in ("window", "is_causal") if name in asked}
    if share := asked.get("elements"):
        seen = call["attn_mask"] = torch.rand(2, 4, 333, 417, device="cuda", generator=generator) < share
    if size := asked.get("documents"):
        seen = call["attn_mask"] = (i // size == j // size)[None, None]
    if size := asked.get("blocks"):
        blocks = torch.rand(1, 4, -(-333 // size), -(-417 // size), device="cuda", generator=generator) < 0.4
        call["block_mask"] = sage_aot.block_mask(blocks, size)
        seen = blocks.repeat_interleave(size, 2).repeat_interleave(size, 3)[:, :, :333, :417]
    left, right = asked.get("window", (-1, -1))
    seen = seen & (j >= i - left if left >= 0 else j >= 0) & (j <= i + right if right >= 0 else j >= 0)
    seen = seen & (j <= i) if asked.get("is_causal") else seen
    sinks = torch.randn(4, device="cuda", generator=generator) if asked.get("sinks") else None
    options = Options.of_axes(spec.values)
    kept = {name: getattr(options, name) for name in ("qk", "smooth_q", "smooth_v", "pv_accum", "p")}
    with handing(backend_of(spec.arch)):
        out, lse = sage_aot.attn(q, k, v, sinks=sinks, return_lse=True, **call, **kept)
        alone = sage_aot.attn(q, k, v, sinks=sinks, **call, **kept)
    scores = q.double() @ k.double().repeat_interleave(2, 1).mT / spec.headdim**0.5
    scores = scores.masked_fill(~seen, -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(2, 4, 333, 1)], -1)
    expected = scores.softmax(-1).nan_to_num()[..., :417] @ v.double().repeat_interleave(2, 1)
    for found in (out, alone):
        assert (found - expected).abs().sum() < 0.06 * expected.abs().sum()
        assert (found[expected.abs().sum(-1) == 0] == 0).all()
    assert torch.allclose(lse.double(), scores.logsumexp(-1), atol=0.06)
