"""The torch operators on CUDA tensors: the checks of tests/unit/test_ops.py, and CUDA graphs."""

from __future__ import annotations

import math

import pytest
import torch

import sage_aot
from sage_aot._call import ops
from sage_aot._problem.options import Options, for_schema
from sage_aot._problem.sequences import Sequences
from sage_aot._problem.tensors import TENSORS
from sage_aot._tools import reference

# Compiling warns of torch's own deprecations and advice, which are not this package's.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

CALLS = [{}, {"is_causal": True, "scale": 0.1, "smooth_k": False}, {"window": (100, 20)}]


def padded(lengths, keys=300):
    """A key mask of right-padded keys."""
    return torch.arange(keys, device="cuda") < torch.tensor(lengths, device="cuda")[:, None]


def draw(seed=0, dtype=torch.bfloat16, queries=200, keys=300):
    """q of shape [2, 4, queries, 64], k and v of [2, 2, keys, 64]."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return reference.inputs("normal", (2, 4, queries, 64), (2, 2, keys, 64), dtype, generator)


def options(**changes):
    """Values of an operator's options, in order, as the public call passes them."""
    return for_schema(*vars(Options(**changes)).values())


@pytest.fixture(params=[pytest.param(mode, marks=pytest.mark.inductor) for mode in ("default", "reduce-overhead")])
def compiled(request):
    """torch.compile in each mode, without graph breaks."""
    torch.compiler.reset()
    yield lambda work, **more: torch.compile(work, mode=request.param, fullgraph=True, **more)
    torch.compiler.reset()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("changes", [{}, {"layout": "NHD"}, CALLS[1]], ids=str)
@pytest.mark.parametrize("op", [ops.attn.plain, ops.attn.lse, ops.attn.out, ops.attn.lse_out], ids=str)
def test_opcheck(op, changes, masked):
    q, k, v = draw()
    key_mask = torch.arange(k.shape[2], device="cuda").expand(2, -1) % 3 > 0 if masked else None
    if changes.get("layout") == "NHD":
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    written = (torch.empty_like(q),) if "out" in str(op) else ()
    others = [None] * (len(TENSORS) - 1)
    torch.library.opcheck(op, (q, k, v, key_mask, *others, *written, *options(**changes)))


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_compiled_equals_eager(compiled, call):
    work = compiled(lambda q, k, v: sage_aot.attn(q, k, v, return_lse=True, **call))
    for seed in range(6):  # with reduce-overhead: warm-up, recording, replays; each with new addresses
        q, k, v = draw(seed)
        out, lse = (t.clone() for t in work(q, k, v))
        expected = sage_aot.attn(q, k, v, return_lse=True, **call)
        assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


def test_compiled_between_other_operators(compiled):
    def work(q, k, v):
        return sage_aot.attn(q * 2, k.transpose(1, 2).contiguous().transpose(1, 2), v + 1).transpose(1, 2).flatten(2)

    fast = compiled(work)
    for seed in range(6):
        tensors = draw(seed)
        assert torch.equal(fast(*tensors).clone(), work(*tensors))


@pytest.mark.inductor
def test_compiled_with_dynamic_shapes():
    torch.compiler.reset()
    work = torch.compile(lambda *qkv: sage_aot.attn(*qkv), fullgraph=True, dynamic=True)
    for queries, keys in ((200, 300), (77, 300), (5, 1029)):
        tensors = draw(queries, queries=queries, keys=keys)
        assert torch.equal(work(*tensors), sage_aot.attn(*tensors))


def test_out_inside_compiled_code_is_written(compiled):
    work = compiled(lambda q, k, v, out: sage_aot.attn(q, k, v, out=out, return_lse=True)[1])
    for seed in range(6):
        q, k, v = draw(seed)
        out = torch.full_like(q, math.nan)
        lse = work(q, k, v, out).clone()
        expected = sage_aot.attn(q, k, v, return_lse=True)
        assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


def test_grad_is_refused_in_compiled_code(compiled):
    q, k, v = draw()
    v.requires_grad_()
    work = compiled(lambda *qkv: sage_aot.attn(*qkv))
    with pytest.raises(Exception, match="v requires grad, and attn has no backward pass"):
        work(q, k, v)
    with torch.no_grad():
        assert torch.equal(work(q, k, v), sage_aot.attn(q, k, v))


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_capture_and_replay(call):
    q, k, v = draw()
    sage_aot.attn(q, k, v, **call)  # loads the kernels, which a capture cannot
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = sage_aot.attn(q, k, v, return_lse=True, **call)
    for seed in range(1, 4):
        fresh = draw(seed)
        for tensor, new in zip((q, k, v), fresh):
            tensor.copy_(new)
        out.fill_(math.nan)
        graph.replay()
        expected = sage_aot.attn(*fresh, return_lse=True, **call)
        assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_mask_in_a_graph_is_read_at_each_replay_and_never_on_the_host(is_causal):
    q, k, v = draw()
    mask = padded([300, 300])
    sage_aot.attn(q, k, v, key_mask=mask, is_causal=is_causal)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        sage_aot.attn(q, k, v, key_mask=mask, is_causal=is_causal)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = sage_aot.attn(q, k, v, key_mask=mask, is_causal=is_causal)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for lengths in ([120, 7], [0, 299], [64, 300]):
        mask.copy_(padded(lengths))
        graph.replay()
        assert torch.equal(out, sage_aot.attn(q, k, v, key_mask=padded(lengths), is_causal=is_causal))


def sequences_of(queries, keys, seed=0, heads=4):
    """q, k and v [tokens, heads, 64] and the other arguments of attn_varlen."""
    qkv = reference.inputs("normal", (1, heads, sum(queries), 64), (1, heads, sum(keys), 64), torch.bfloat16,
                           torch.Generator("cuda").manual_seed(seed))
    return [x[0].transpose(0, 1).contiguous() for x in qkv] + list(Sequences.of_lengths(queries, keys).to("cuda"))


@pytest.mark.parametrize("op", [*ops.attn_varlen], ids=str)
def test_opcheck_of_sequences(op):
    given = sequences_of((40, 0, 160), (100, 20, 180))
    written = (torch.empty_like(given[0]),) if "out" in str(op) else ()
    torch.library.opcheck(op, (*given, None, *written, *options(layout="NHD")))


@pytest.mark.parametrize("is_causal", [False, True])
def test_lengths_in_a_graph_are_read_at_each_replay_and_never_on_the_host(is_causal):
    q, k, v, begins_q, begins_k, *_ = sequences_of((100, 100, 100), (200, 200, 200))
    sage_aot.attn_varlen(q, k, v, begins_q, begins_k, 300, 600, is_causal=is_causal)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        sage_aot.attn_varlen(q, k, v, begins_q, begins_k, 300, 600, is_causal=is_causal)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = sage_aot.attn_varlen(q, k, v, begins_q, begins_k, 300, 600, is_causal=is_causal)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for queries, keys in (((300, 0, 0), (0, 600, 0)), ((1, 298, 1), (5, 500, 95)), ((0, 150, 150), (1, 1, 598))):
        own = Sequences.of_lengths(queries, keys).to("cuda")
        begins_q.copy_(own.cu_seqlens_q), begins_k.copy_(own.cu_seqlens_k)
        graph.replay()
        assert torch.equal(out, sage_aot.attn_varlen(q, k, v, *own, is_causal=is_causal))


def test_sequences_in_compiled_code(compiled):
    work = compiled(lambda *given: sage_aot.attn_varlen(*given, 200, 300, is_causal=True, return_lse=True))
    for seed in range(5):
        given = sequences_of((50, 150 - seed, seed), (100, 100, 100), seed)[:5]
        found = [x.clone() for x in work(*given)]
        expected = sage_aot.attn_varlen(*given, 200, 300, is_causal=True, return_lse=True)
        assert all(map(torch.equal, found, expected))


def test_a_mask_in_compiled_code(compiled):
    work = compiled(lambda q, k, v, mask: sage_aot.attn(q, k, v, key_mask=mask))
    for seed in range(5):
        q, k, v = draw(seed)
        mask = padded([50 * seed, 300 - seed])
        assert torch.equal(work(q, k, v, mask).clone(), sage_aot.attn(q, k, v, key_mask=mask))


def test_calls_at_old_addresses_see_new_strides_and_options():
    """One memory, read with several strides and options, in any order: nothing may be kept by address."""
    storage = torch.randn(3, 2, 128, 2, 64, device="cuda").bfloat16()
    expected = {}
    for _ in range(3):
        for layout in ("HND", "NHD"):
            for is_causal in (False, True):
                for scale in (None, 0.1):
                    q, k, v = storage.transpose(2, 3) if layout == "HND" else storage
                    found = sage_aot.attn(q, k, v, layout=layout, is_causal=is_causal, scale=scale)
                    found = found if layout == "HND" else found.transpose(1, 2)
                    first = expected.setdefault((is_causal, scale), found.clone())
                    assert torch.equal(found, first)
    halves = [sage_aot.attn(*(t[:, :rows] for t in storage), layout="NHD") for rows in (128, 64)]
    assert torch.equal(halves[1], sage_aot.attn(*(t[:, :64].clone() for t in storage), layout="NHD"))
    assert len({tuple(t[0, 0, 64].tolist()) for t in expected.values()}) == 4


@pytest.mark.parametrize("target", [torch.float16, torch.bfloat16], ids=str)
def test_autocast(target):
    tensors = draw(dtype=torch.float32)
    expected = sage_aot.attn(*(t.to(target) for t in tensors), return_lse=True)
    with torch.autocast("cuda", dtype=target):
        found = sage_aot.attn(*tensors, return_lse=True)
    assert all(torch.equal(one, other) for one, other in zip(found, expected))
    whole = sage_aot.attn(*tensors)
    with torch.autocast("cpu", dtype=target):
        other = sage_aot.attn(*tensors)
    assert other.dtype == torch.float32 and torch.equal(other, whole)


def test_autocast_in_compiled_code(compiled):
    tensors = draw(dtype=torch.float32)
    expected = sage_aot.attn(*(t.bfloat16() for t in tensors))
    work = compiled(lambda *qkv: sage_aot.attn(*qkv))
    with torch.autocast("cuda", dtype=torch.bfloat16):
        for _ in range(4):
            assert torch.equal(work(*tensors).clone(), expected)


def test_inference_mode(compiled):
    q, k, v = draw()
    expected = sage_aot.attn(q, k, v)
    work = compiled(lambda *qkv: sage_aot.attn(*qkv))
    with torch.inference_mode():
        out = torch.empty_like(q)
        assert torch.equal(sage_aot.attn(q, k, v, out=out), expected)
        for _ in range(4):
            assert torch.equal(work(q, k, v).clone(), expected)


@pytest.mark.parametrize("return_lse", [False, True])
def test_writing_out_is_noticed_by_autograd(return_lse):
    q, k, v = draw()
    out = torch.ones_like(q)
    product = torch.ones_like(q, requires_grad=True) * out
    sage_aot.attn(q, k, v, out=out, return_lse=return_lse)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_supports_answers_for_this_gpu():
    q, k, v = draw()
    full, double = ([tensor.to(dtype) for tensor in (q, k, v)] for dtype in (torch.float32, torch.float64))
    elsewhere = k.cpu()
    allocated = []
    for _ in range(3):  # what an earlier test left may allocate once, in another thread
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        assert sage_aot.supports(q, k, v) is None
        assert "on one device" in sage_aot.supports(q, elsewhere, v)
        assert "one dtype" in sage_aot.supports(full[0], k, v)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            assert sage_aot.supports(full[0], k, v) is None
        wrong = sage_aot.supports(*double)
        allocated.append(torch.cuda.memory_stats()["allocation.all.allocated"] - before)
    assert min(allocated) == 0, "it allocates nothing"
    with pytest.raises(sage_aot.ArgumentError) as raised:
        sage_aot.attn(*double)
    assert wrong == str(raised.value)
