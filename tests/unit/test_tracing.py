"""Values that tracers know less about: sizes and flags that are symbols, sizes that depend on values, meta tensors."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch._dynamo.testing
from torch._dynamo.testing import CompileCounterWithBackend

import sage_aot
from sage_aot.errors import ArgumentError

pytestmark = pytest.mark.filterwarnings("error", "ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(autouse=True)
def fresh():
    """No compiled code of another test."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def draw(length=40, headdim=32, heads=2, batch=1):
    generator = torch.Generator().manual_seed(length)
    return torch.randn(3, batch, heads, length, headdim, generator=generator).bfloat16()


def packed(x):
    """The first entry."""
    return x[0].transpose(0, 1)


def attn_varlen(q, k, v, **options):
    """Two sequences, the first of which is empty."""
    ends = torch.full((1,), q.size(2), dtype=torch.int32, device=q.device)
    cu_seqlens = torch.cat([torch.zeros(2, dtype=torch.int32, device=q.device), ends])
    return sage_aot.attn_varlen(*map(packed, (q, k, v)), cu_seqlens, cu_seqlens, q.size(2), q.size(2), **options)


CALLS = {
    "attn": sage_aot.attn,
    "attn, grouped": lambda q, k, v, **options: sage_aot.attn(q, k[:, :1], v[:, :1], **options),
    "attn, with the log-sum-exp": lambda q, k, v, **options: sage_aot.attn(q, k, v, return_lse=True, **options)[1],
    "attn, out": lambda q, k, v, **options: sage_aot.attn(q, k, v, out=q.new_empty(q.shape), **options),
    "attn, key mask": lambda q, k, v, **options: sage_aot.attn(
        q, k, v, key_mask=torch.ones_like(k[:, 0, :, 0], dtype=torch.bool), **options),
    "attn, kv": lambda q, k, v, **options: sage_aot.attn(q, sage_aot.quantize_kv(k, v), **options),
    "attn, kv with k": lambda q, k, v, **options: sage_aot.attn(q, sage_aot.quantize_kv(k, v, smooth_q=True),
                                                                **options),
    "attn_varlen": attn_varlen,
    "train_attn": sage_aot.train_attn,
}
SHAPES = [(70, 64, 2, 4), (33, 40, 3, 2), (129, 96, 4, 5), (20, 128, 5, 3)]
"""Length, head dim, heads and batch, none equal by chance."""


# --- symbols ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", CALLS)
def test_dynamic_shapes(call):
    """The head dim is dynamic, too; no graph break, no warning, and one graph for head dims that share kernels."""
    backend = CompileCounterWithBackend("aot_eager")
    work = CALLS[call]
    compiled = torch.compile(work, dynamic=True, fullgraph=True, backend=backend)
    for shape in SHAPES:
        q, k, v = draw(*shape)
        assert torch.equal(compiled(q, k, v), work(q, k, v))
    assert backend.frame_count <= (2 if "kv" in call or call == "train_attn" else 1), "head dims to 64, and to 128"


def test_a_marked_head_dim_stays_dynamic():
    q, k, v = draw(batch=3)
    for tensor in (q, k, v):
        for dim in range(4):
            torch._dynamo.mark_dynamic(tensor, dim)  # raises where a check pins the size
    found = torch.compile(lambda *qkv: sage_aot.attn(*qkv), backend="aot_eager", fullgraph=True)
    assert torch.equal(found(q, k, v), sage_aot.attn(q, k, v))


@pytest.mark.parametrize("call", CALLS)
def test_a_flag_that_follows_from_sizes(call):
    def work(q, k, v):
        return CALLS[call](q, k, v, is_causal=q.size(2) > 20)

    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(work, fullgraph=True, backend=backend)
    for length in (40, 50, 60, 19, 70, 12):
        assert torch.equal(compiled(*draw(length)), work(*draw(length)))
    assert backend.frame_count == 3, "one length, more than 20, and less"


def test_flags_of_quantization_that_follow_from_sizes():
    def work(q, k, v):
        kv = sage_aot.quantize_kv(k, v, smooth_k=k.size(2) > 50, smooth_q=k.size(2) > 45)
        return sage_aot.attn(q, kv) + sage_aot.attn(q, k, v, smooth_v=k.size(2) < 45, rotate=k.size(2) > 45)

    compiled = torch.compile(work, fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (40, 48, 60):
        assert torch.equal(compiled(*draw(length)), work(*draw(length)))


def repeated(x):
    """One head, computed and then broadcast."""
    return (x[:, :1] * 2).expand_as(x)


def lower(q):
    return torch.ones(q.size(2), q.size(2), dtype=torch.bool, device=q.device).tril()


BROADCAST = {
    "attn, a mask": lambda q, k, v: sage_aot.attn(q, k, v, attn_mask=lower(q)),
    "attn, a computed mask": lambda q, k, v: sage_aot.attn(q, k, v, attn_mask=q[0, 0, :, :1] > k[0, 0, :, 0]),
    "attn, a key mask": lambda q, k, v: sage_aot.attn(q, k, v, key_mask=(k[:1, 0, :, 0] > -1).expand(k.size(0), -1)),
    "attn, repeated heads": lambda q, k, v: sage_aot.attn(q, repeated(k), repeated(v)),
    "attn, repeated batches": lambda q, k, v: sage_aot.attn(q, *((x[:1] * 2).expand_as(x) for x in (k, v))),
    "attn, chosen blocks": lambda q, k, v: sage_aot.attn(q, repeated(k), repeated(v), sparse=sage_aot.Sparse(keep=0.5)),
    "attn, kv and a mask": lambda q, k, v: sage_aot.attn(q, sage_aot.quantize_kv(repeated(k), v), attn_mask=lower(q)),
    "attn_varlen": lambda q, k, v: attn_varlen(q, repeated(k), repeated(v)),
    "train_attn": lambda q, k, v: sage_aot.train_attn(q, repeated(k), repeated(v)),
}


exact_strides = pytest.mark.skipif(not hasattr(torch.Tag, "needs_exact_strides"), reason="torch before 2.8")


@exact_strides
@pytest.mark.parametrize("call", BROADCAST)
def test_computed_and_broadcast_operands_of_code_that_torch_generates(call):
    """Inductor chooses the strides of what it computes, but for what operators ask."""
    work, qkv = BROADCAST[call], draw(70, batch=2)
    with torch._inductor.config.patch(fx_graph_cache=False):  # code on disk may be of other tags
        assert torch.equal(torch.compile(work, fullgraph=True)(*qkv), work(*qkv))


@exact_strides
def test_gradients_of_computed_and_broadcast_operands():
    def work(q, k, v):
        return sage_aot.train_attn(q, repeated(k), repeated(v), is_causal=True)

    leaves = [x.requires_grad_() for x in draw(70, batch=2)]
    expected = torch.autograd.grad(work(*leaves).sum(), leaves)  # of a sum: the output's gradient is broadcast
    with torch._inductor.config.patch(fx_graph_cache=False):
        found = torch.autograd.grad(torch.compile(work, fullgraph=True)(*leaves).sum(), leaves)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("strict", [False, True])
def test_export_with_dynamic_lengths(strict):
    class Module(torch.nn.Module):
        def forward(self, q, k, v):
            kv = sage_aot.quantize_kv(k, v)
            return sage_aot.attn(q, k, v, is_causal=q.size(2) > 1) + sage_aot.attn(q, kv)

    length = torch.export.Dim("length", min=2, max=1000)
    program = torch.export.export(Module(), tuple(draw()), dynamic_shapes=({2: length},) * 3, strict=strict)
    for n in (40, 70):
        assert torch.equal(program.module()(*draw(n)), Module()(*draw(n)))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("call", [name for name in CALLS if "kv" not in name and name != "attn_varlen"])
def test_torchscript_traces_take_other_lengths(call, is_causal):
    def work(q, k, v):
        return CALLS[call](q, k, v, is_causal=is_causal)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch.jit, and of sizes that become constants
        traced = torch.jit.trace(work, tuple(draw()))
    for length in (40, 33, 70):
        torch.testing.assert_close(traced(*draw(length)), work(*draw(length)), rtol=0, atol=0)


# --- sizes that depend on values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("call", CALLS)
@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_lengths_that_depend_on_values(call, is_causal):
    def work(q, k, v, length):
        n = length.item()
        return CALLS[call](q[:, :, :n], k[:, :, :n], v[:, :, :n], is_causal=is_causal)

    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(work, fullgraph=True, backend=backend)
    q, k, v = draw()
    for n in (40, 33, 2, 1, 0):
        found, expected = compiled(q, k, v, torch.tensor(n)), work(q, k, v, torch.tensor(n))
        if n == 1 and not is_causal and call == "attn, grouped":  # where heads share rows if the length is static
            torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
        else:
            assert torch.equal(found, expected)
        assert n < 2 or backend.frame_count == 1


_SEEN = torch.rand(140, 140, generator=torch.Generator().manual_seed(0)) < 0.5
MASKED = {
    "queries and keys": lambda rows, columns: {"attn_mask": _SEEN[rows][:, columns]},
    "queries and keys, and a key mask": lambda rows, columns: {"attn_mask": _SEEN[rows][:, columns],
                                                               "key_mask": _SEEN[:1, columns]},
    "keys that lie apart": lambda rows, columns: {"attn_mask": _SEEN.mT[columns].mT[rows]},
    "keys": lambda rows, columns: {"attn_mask": _SEEN[:1, columns]},
    "keys, and a key mask": lambda rows, columns: {"attn_mask": _SEEN[:1, columns], "key_mask": _SEEN[1:2, columns]},
    "queries": lambda rows, columns: {"attn_mask": _SEEN[rows, :1]},
    "blocks": lambda rows, columns: {"block_mask": sage_aot.block_mask(_SEEN[:3, :3], 64)},
    "blocks and elements": lambda rows, columns: {"block_mask": sage_aot.block_mask(_SEEN[:3, :3], 64),
                                                  "attn_mask": _SEEN[rows][:, columns]},
    "blocks that the call chooses": lambda rows, columns: {"sparse": sage_aot.Sparse(keep=0.5, block_size=64)},
}


@pytest.mark.parametrize("of", ["queries", "keys"])
@pytest.mark.parametrize("mask", MASKED)
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_masks_of_lengths_that_depend_on_values(mask, of):
    """One graph for all lengths that have as many blocks as the mask."""
    every = torch.arange(140)

    def work(q, k, v, taken):
        found = taken.nonzero()[:, 0]
        rows, columns = (found, every) if of == "queries" else (every, found)
        return sage_aot.attn(q[:, :, rows], k[:, :, columns], v[:, :, columns], **MASKED[mask](rows, columns))

    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(work, fullgraph=True, backend=backend)
    q, k, v = draw(140)
    for n in (140, 139, 130) if "block_mask" in MASKED[mask](every, every) else (140, 139, 70, 2, 0):
        assert torch.equal(compiled(q, k, v, every < n), work(q, k, v, every < n))
    assert backend.frame_count == 1


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_tails_of_keys_whose_number_depends_on_values():
    def work(q, k, v, taken):
        found = taken.nonzero()[:, 0]
        return sage_aot.attn(q, k[:, :, found], v[:, :, found], sparse=sparse)

    sparse = sage_aot.Sparse(keep=0.4, block_size=64, tail=True)
    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(work, fullgraph=True, backend=backend)
    q, k, v = draw(300)
    for n in (300, 299, 70, 2):
        taken = torch.arange(300) < n
        assert torch.equal(compiled(q, k, v, taken), work(q, k, v, taken))
    assert backend.frame_count == 1


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_blocks_of_another_length_that_depends_on_values_are_refused():
    def work(q, k, v, taken):
        return sage_aot.attn(q[:, :, taken.nonzero()[:, 0]], k, v, block_mask=blocks)

    blocks, (q, k, v) = sage_aot.block_mask(_SEEN[:3, :3], 64), draw(140)
    compiled = torch.compile(work, fullgraph=True, backend="aot_eager")
    assert compiled(q, k, v, torch.arange(140) < 130).shape[2] == 130
    with pytest.raises(RuntimeError, match="Runtime assertion failed"):
        compiled(q, k, v, torch.arange(140) < 70)


@pytest.mark.parametrize("mask", ["queries and keys, and a key mask", "keys, and a key mask", "blocks and elements"])
def test_torchscript_traces_take_masks(mask):
    every = torch.arange(140)

    def work(q, k, v):
        return sage_aot.attn(q, k, v, **MASKED[mask](every, every))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch.jit, and of sizes that become constants
        traced = torch.jit.trace(work, tuple(draw(140)))
    assert torch.equal(traced(*draw(140)), work(*draw(140)))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("call", [name for name in CALLS if name != "attn_varlen"])
def test_lengths_that_are_marked_unbacked(call, is_causal):
    """Lengths of q, k and v are marked, each a symbol of its own, which the operator compares when it runs."""
    q, k, v = draw()
    for tensor in (q, k, v):
        torch._dynamo.decorators.mark_unbacked(tensor, 2)
    compiled = torch.compile(lambda q, k, v: CALLS[call](q, k, v, is_causal=is_causal), fullgraph=True,
                             backend="aot_eager")
    assert torch.equal(compiled(q, k, v), CALLS[call](*draw(), is_causal=is_causal))
    with pytest.raises(Exception, match="k and v must have one shape, got"):
        compiled(q, k, v[:, :, 1:])


@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_longest_lengths_that_depend_on_values():
    def work(q, k, v, cu_seqlens):
        longest = cu_seqlens.diff().max()
        return sage_aot.attn_varlen(q, k, v, cu_seqlens, cu_seqlens, longest, longest.item())

    q, k, v = (packed(x).contiguous() for x in draw())
    compiled = torch.compile(work, fullgraph=True, backend="aot_eager")
    for lengths in ([0, 30, 40], [0, 5, 40]):
        cu_seqlens = torch.tensor(lengths, dtype=torch.int32)
        assert torch.equal(compiled(q, k, v, cu_seqlens), work(q, k, v, cu_seqlens))


# --- meta tensors -----------------------------------------------------------------------------------------------------


def described(tensor):
    return tensor.shape, tensor.dtype, tensor.stride()


LAYOUTS = {
    "contiguous": lambda x: x,
    "rows of all heads": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "a slice": lambda x: torch.cat([x, x], 2)[:, :, ::2],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("call", CALLS)
def test_meta_tensors(call, layout):
    real, meta = ([LAYOUTS[layout](x) for x in draw().to(device)] for device in ("cpu", "meta"))
    assert [x.stride() for x in meta] == [x.stride() for x in real]
    found = CALLS[call](*meta)
    assert found.is_meta and described(found) == described(CALLS[call](*real))


def test_other_outputs_on_meta():
    q, k, v = draw().to("meta")
    out = torch.empty_like(q)
    result, lse = sage_aot.attn(q, k, v, out=out, return_lse=True)
    assert result is out and lse.is_meta and described(lse) == ((1, 2, 40), torch.float32, (80, 40, 1))
    kv = sage_aot.quantize_kv(k, v)
    assert kv.device.type == "meta" and kv.nbytes == sage_aot.quantize_kv(*draw()[1:]).nbytes
    assert sage_aot.supports(q, k, v) is None


def test_meta_tensors_are_trained():
    q, k, v = (x.to("meta").requires_grad_() for x in draw())
    sage_aot.train_attn(q, k, v).sum().backward()
    assert all(x.grad.is_meta and described(x.grad) == described(x) for x in (q, k, v))


def test_meta_tensors_with_others_are_refused():
    q, k, v = draw()
    with pytest.raises(ArgumentError, match="must be on one device, got meta for q and cpu for k"):
        sage_aot.attn(q.to("meta"), k, v)
    with pytest.raises(ArgumentError, match="q, k and v must have one head dim"):
        sage_aot.attn(q[..., :16].to("meta"), *draw()[1:].to("meta"))


def test_a_model_on_the_meta_device():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = torch.nn.Linear(64, 192)

        def forward(self, x):
            q, k, v = self.qkv(x).unflatten(-1, (3, 2, 32)).unbind(2)
            return sage_aot.attn(q, k, v, layout="NHD", is_causal=True).flatten(2)

    with torch.device("meta"), torch.no_grad():
        out = Model()(torch.empty(2, 40, 64))
    assert out.is_meta and out.shape == (2, 40, 64)
