"""K and V that are quantized once, on a GPU; the fuzzer holds its calls against direct ones on every arch."""

from __future__ import annotations

import pytest
import torch

import sage_aot
from sage_aot._call.backends import default_library

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]


def draw(queries=130, keys=300, headdim=128, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    qkv = [torch.randn(2, heads, rows, headdim, device="cuda", dtype=dtype, generator=generator)
           for heads, rows in ((4, queries), (2, keys), (2, keys))]
    assert keys < 9000 or sage_aot.explain(*qkv).splits > 1, "what tests of so many keys are for"
    return qkv


@pytest.mark.parametrize("options", [{}, {"smooth_q": True, "smooth_v": True}, {"rotate": True, "smooth_k": False}],
                         ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("headdim", [64, 100, 128, 256])
@pytest.mark.parametrize("queries", [1, 130])
def test_bits_of_the_direct_call(queries, headdim, dtype, options):
    q, k, v = draw(queries, headdim=headdim, dtype=dtype)
    key_mask = torch.rand(2, 300, device="cuda") > 0.5
    for mask in (None, key_mask):
        kv = sage_aot.quantize_kv(k, v, key_mask=mask, **options)
        for is_causal in (False, True):
            out, lse = sage_aot.attn(q, k, v, key_mask=mask, is_causal=is_causal, return_lse=True, **options)
            found, found_lse = sage_aot.attn(q, kv, is_causal=is_causal, return_lse=True)
            assert torch.equal(found, out) and torch.equal(found_lse, lse)


def test_bytes_that_it_holds():
    _, k, v = draw(keys=1024)
    kv = sage_aot.quantize_kv(k, v)
    quantizer = default_library().manifest.kernels[kv.quantizer.split()[0]]
    keys = quantizer.fact("kv_tile_bytes") // (2 * 128)  # of a tile, with FP8 P·V
    assert kv.device.type == "cuda"
    units = 256  # 4 bytes a head, aligned
    assert kv.nbytes == 2 * 2 * (1024 // keys * quantizer.fact("kv_tile_bytes") + 4 * 128 * 4) + units


@pytest.mark.parametrize("keys", [300, 9000])  # of 9,000, several blocks share the keys of a query tile
def test_nothing_waits_for_the_device(keys):
    q, k, v = draw(keys=keys)
    sage_aot.attn(q, sage_aot.quantize_kv(k, v))
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        sage_aot.attn(q, sage_aot.quantize_kv(k, v))
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("smooth_q", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(1, 300), (130, 300), (1, 9000), (130, 9000)])
def test_calls_in_a_graph(queries, keys, smooth_q):
    """A graph of both calls follows k and v; a graph of attention alone keeps what was quantized."""
    q, k, v = draw(queries, keys)
    kv = sage_aot.quantize_kv(k, v, smooth_q=smooth_q)
    before = sage_aot.attn(q, kv)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        sage_aot.attn(q, sage_aot.quantize_kv(k, v, smooth_q=smooth_q))
    torch.cuda.current_stream().wait_stream(side)
    both, alone = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(both):
        of_both = sage_aot.attn(q, sage_aot.quantize_kv(k, v, smooth_q=smooth_q))
    with torch.cuda.graph(alone):
        of_alone = sage_aot.attn(q, kv)
    for tensor, other in zip((k, v), draw(queries, keys, seed=1)[1:]):
        tensor.copy_(other)
    both.replay(), alone.replay()
    assert torch.equal(of_alone, before)
    assert torch.equal(of_both, sage_aot.attn(q, k, v, smooth_q=smooth_q)) and not torch.equal(of_both, before)


@pytest.mark.parametrize("keys", [300, 9000])
def test_compiled(keys):
    q, k, v = draw(keys=keys)
    kv = sage_aot.quantize_kv(k, v)
    compiled = torch.compile(lambda q, kv: sage_aot.attn(q, kv), fullgraph=True)
    assert torch.equal(compiled(q, kv), sage_aot.attn(q, k, v))


def test_kernels_of_another_device_do_not_read_it():
    q, k, v = draw()
    with pytest.raises(sage_aot.ArgumentError, match="q must have the dtype and the device"):
        sage_aot.attn(q.cpu(), sage_aot.quantize_kv(k, v))
