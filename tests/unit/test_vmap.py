"""torch.vmap and functionalize: what a loop over the entries computes, without torch's warning of a missing rule."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import sage_aot
from sage_aot._call import batching
from sage_aot.errors import ArgumentError

pytestmark = pytest.mark.filterwarnings("error", "ignore::DeprecationWarning", "ignore::FutureWarning")

@pytest.fixture(autouse=True)
def no_fallback():
    """Calls without a rule raise; torch warns of them once in a process."""
    functorch: Any = torch._C._functorch
    functorch._set_vmap_fallback_enabled(False)
    yield
    functorch._set_vmap_fallback_enabled(True)


ENTRIES = 3
X, Y, Z = torch.randn(3, ENTRIES, 2, 2, 40, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
MASKS = torch.arange(ENTRIES * 2 * 40).view(ENTRIES, 2, 40) % 7 > 1
BEGINS = torch.tensor([[0, 30, 40], [0, 10, 40], [0, 0, 40]], dtype=torch.int32)


def packed(x):
    return x[0].transpose(0, 1)


def attn_varlen(q, k, v, begins=BEGINS[0], **more):
    return sage_aot.attn_varlen(packed(q), packed(k), packed(v), begins, begins, 40, 40, **more)


def lse(call):
    return lambda *args, **options: call(*args, return_lse=True, **options)


CALLS = {
    "attn": sage_aot.attn,
    "attn, causal": lambda q, k, v: sage_aot.attn(q, k, v, is_causal=True),
    "attn, NHD": lambda q, k, v: sage_aot.attn(*(x.transpose(1, 2) for x in (q, k, v)), layout="NHD"),
    "attn, grouped": lambda q, k, v: sage_aot.attn(q, k[:, :1], v[:, :1]),
    "attn, one query": lambda q, k, v: sage_aot.attn(q[:, :, :1], k[:, :1], v[:, :1]),
    "attn, with the log-sum-exp": lse(sage_aot.attn),
    "attn, smooth q": lambda q, k, v: sage_aot.attn(q, k, v, smooth_q=True),
    "attn_varlen": attn_varlen,
    "attn_varlen, with the log-sum-exp": lse(attn_varlen),
    "kv": lambda q, k, v: sage_aot.attn(q, sage_aot.quantize_kv(k, v)),
    "kv, smooth q": lambda q, k, v: sage_aot.attn(q, sage_aot.quantize_kv(k, v, smooth_q=True)),
    "kv, with the log-sum-exp": lambda q, k, v: sage_aot.attn(q, sage_aot.quantize_kv(k, v), return_lse=True),
    "train_attn": sage_aot.train_attn,
}


def listed(found):
    return found if isinstance(found, tuple) else (found,)


def looped(call, *args, dims):
    entries = [listed(call(*(x if dim is None else x.select(dim, i) for x, dim in zip(args, dims))))
               for i in range(ENTRIES)]
    return [torch.stack(parts) for parts in zip(*entries)]


@pytest.mark.parametrize("dims", [(0, 0, 0), (0, None, None), (None, 0, 0), (None, None, 0), (1, 0, 2)], ids=str)
@pytest.mark.parametrize("call", CALLS)
def test_is_the_loop(call, dims):
    args = [x[0] if dim is None else x.movedim(0, dim) for x, dim in zip((X, Y, Z), dims)]
    found = torch.vmap(CALLS[call], dims)(*args)
    for one, right in zip(listed(found), looped(CALLS[call], *args, dims=dims), strict=True):
        assert torch.equal(one, right)


@pytest.mark.parametrize("dims", [(0, 0, 0), (0, None, None), (None, 2, 2)], ids=str)
@pytest.mark.parametrize("call", CALLS)
def test_no_entries(call, dims):
    mapped = torch.vmap(CALLS[call], dims)
    some, none = ([x[0] if dim is None else x[:entries].movedim(0, dim) for x, dim in zip((X, Y, Z), dims)]
                  for entries in (1, 0))
    for found, like in zip(listed(mapped(*none)), listed(mapped(*some)), strict=True):
        assert found.shape == (0, *like.shape[1:]) and found.dtype == like.dtype


def test_nested():
    args = [x[None].expand(2, *x.shape) * torch.tensor([1, 2]).view(2, 1, 1, 1, 1, 1).bfloat16() for x in (X, Y, Z)]
    found = torch.vmap(torch.vmap(sage_aot.attn))(*args)
    assert torch.equal(found, torch.stack([torch.stack([sage_aot.attn(*e) for e in zip(*x)]) for x in zip(*args)]))


def test_key_masks_and_sequences_are_mapped_too():
    def masked(q, k, v, mask):
        return sage_aot.attn(q, k, v, key_mask=mask)

    assert torch.equal(torch.vmap(masked)(X, Y, Z, MASKS), looped(masked, X, Y, Z, MASKS, dims=(0,) * 4)[0])
    assert torch.equal(torch.vmap(masked, (0, 0, 0, None))(X, Y, Z, MASKS[0]),
                       looped(masked, X, Y, Z, MASKS[0], dims=(0, 0, 0, None))[0])
    for dims in ((0, 0, 0, 0), (None, None, None, 0)):
        args = [x if dim == 0 else x[0] for x, dim in zip((X, Y, Z), dims)]
        assert torch.equal(torch.vmap(attn_varlen, dims)(*args, BEGINS),
                           looped(attn_varlen, *args, BEGINS, dims=dims)[0])


def test_the_batch_takes_the_mapped_dimension():
    """One call, and not one an entry."""
    calls = []
    with Counting(calls):
        torch.vmap(sage_aot.attn)(X, Y, Z)
        torch.vmap(sage_aot.train_attn)(X, Y, Z)
    assert calls == ["sage_aot.attn.default", "sage_aot.train_attn.default"]


class Counting(TorchDispatchMode):
    def __init__(self, calls):
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if str(function).startswith("sage_aot"):
            self.calls.append(str(function))
        return function(*args, **kwargs or {})


# --- training ---------------------------------------------------------------------------------------------------------


def gradients(call, *given):
    leaves = [x.detach().clone().requires_grad_() for x in given]
    return torch.autograd.grad(call(*leaves).float().square().sum(), leaves)


def test_gradients_around_it():
    found = gradients(torch.vmap(sage_aot.train_attn), X, Y, Z)
    expected = gradients(lambda *x: looped(sage_aot.train_attn, *x, dims=(0, 0, 0))[0], X, Y, Z)
    assert all(map(torch.equal, found, expected))
    found = gradients(torch.vmap(sage_aot.train_attn, (0, None, None)), X, Y[0], Z[0])
    expected = gradients(lambda *x: looped(sage_aot.train_attn, *x, dims=(0, None, None))[0], X, Y[0], Z[0])
    for one, right in zip(found, expected):
        torch.testing.assert_close(one, right, rtol=0.02, atol=0.02)  # gradients of k and v are summed in 16 bits


def test_gradients_of_no_entries():
    leaves = [x[:0].clone().requires_grad_() for x in (X, Y, Z)]
    found = torch.autograd.grad(torch.vmap(sage_aot.train_attn)(*leaves).sum(), leaves)
    assert [x.shape for x in found] == [x.shape for x in leaves]


def test_gradients_that_are_batched():
    leaves = [x[0].clone().requires_grad_() for x in (X, Y, Z)]
    out = sage_aot.train_attn(*leaves)
    found = torch.autograd.grad(out, leaves, X, is_grads_batched=True, retain_graph=True)
    for i in range(ENTRIES):
        expected = torch.autograd.grad(out, leaves, X[i], retain_graph=True)
        assert all(torch.equal(one[i], right) for one, right in zip(found, expected))


@pytest.mark.parametrize("asked", [{}, {"of_q": False}, {"of_kv": False}], ids=str)
def test_the_operators_themselves(asked):
    """Forward and backward pass within one map."""
    def both(q, k, v):
        out, lse, saved = torch.ops.sage_aot.train_attn(q, k, v, None)
        return torch.ops.sage_aot.train_attn_backward(q, v, out, lse, saved, None, **asked)

    for one, right in zip(torch.vmap(both)(X, Y, Z), looped(both, X, Y, Z, dims=(0, 0, 0))):
        assert torch.equal(one, right)


def test_optional_tensors_are_folded_by_the_table(monkeypatch):
    """A tensor of the table that train_attn does not take yet: with a batch it is folded, without one it is not."""
    monkeypatch.setattr(batching, "taken_by", lambda kind: ("key_mask", "sinks", "attn_mask"))
    masks, sinks, elements = MASKS, torch.zeros(2), torch.zeros(ENTRIES, 2, 2, 40, 40, dtype=torch.bool)
    lse, saved = torch.zeros(ENTRIES, 2, 2, 40), torch.zeros(7, dtype=torch.uint8)
    seen = []

    def forward(*args):
        seen.append(args)
        return args[0], lse.flatten(0, 1), saved

    def backward(*args):
        seen.append(args)
        return args[:3]

    _, dims = batching._forward(forward, ENTRIES, (0, 0, 0, 0, None, 0, None), (X, Y, Z, masks, sinks, elements, True))
    assert dims == (0, 0, None)
    batching._backward(backward, ENTRIES, (0, 0, 0, 0, None, 0, None, 0, None),
                       (X, Y, Z, lse, saved, masks, sinks, elements, True))
    for first, args in zip((3, 5), seen, strict=True):
        of_keys, of_heads, of_elements, option = args[first:]
        assert of_keys.shape == (ENTRIES * 2, 40) and of_elements.shape == (ENTRIES * 2, 2, 40, 40)
        assert of_heads is sinks and option is True
    assert seen[1][4] is saved


def test_derivatives_are_refused_still():
    with pytest.raises(ArgumentError, match="q is differentiated by forward AD or torch.func"):
        torch.func.grad(lambda q: torch.vmap(sage_aot.attn)(q, Y.float(), Z.float()).sum())(X.float())
    with pytest.raises(ArgumentError, match="q requires grad"):
        torch.vmap(sage_aot.attn)(X.clone().requires_grad_(), Y, Z)


@pytest.mark.parametrize("name", ["scale", "is_causal", "smooth_v", "return_lse"])
def test_options_that_are_mapped_are_refused(name):
    of_entries = torch.arange(ENTRIES) * 0.1 if name == "scale" else torch.arange(ENTRIES) > 0
    with pytest.raises(ArgumentError, match=f"^{name}: expected "):
        torch.vmap(lambda value: sage_aot.attn(X[0], Y[0], Z[0], **{name: value}))(of_entries)


# --- out --------------------------------------------------------------------------------------------------------------


WRITING = {"attn": (partial(sage_aot.attn, p="exp2"), lambda x: x),
           "attn_varlen": (partial(attn_varlen, p="exp2"), packed),
           "kv": (lambda q, k, v, **more: sage_aot.attn(q, sage_aot.quantize_kv(k, v, p="exp2"), **more), lambda x: x)}
"""Calls whose P is an exponential, with a log-sum-exp or without."""


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("call", WRITING)
def test_out_under_vmap(call, return_lse):
    work, like = WRITING[call]
    expected = looped(lambda *args: work(*args, return_lse=True), X, Y, Z, dims=(0, 0, 0))
    out = torch.full_like(torch.stack([*map(like, X)]), torch.nan)
    found = listed(torch.vmap(lambda q, k, v, out: work(q, k, v, out=out, return_lse=return_lse))(X, Y, Z, out))
    assert torch.equal(out, expected[0])
    assert all(map(torch.equal, found, expected)) and len(found) == 1 + return_lse


@pytest.mark.parametrize("call", WRITING)
def test_out_that_is_not_mapped_is_refused(call):
    work, like = WRITING[call]
    out = torch.zeros_like(like(X[0]))
    with pytest.raises(ArgumentError, match="out: expected a tensor that vmap maps"):
        torch.vmap(lambda q, k, v: work(q, k, v, out=out))(X, Y, Z)
    with pytest.raises(ArgumentError, match="out: expected shape, dtype and device of q"):
        torch.vmap(lambda q, k, v, out: work(q, k, v, out=out))(X, Y, Z, X.float())
    assert not out.any()


@pytest.mark.parametrize("call", WRITING)
def test_out_under_functionalize(call):
    work, like = WRITING[call]
    args = X[0], Y[0], Z[0]
    out = torch.full_like(like(X[0]), torch.nan)
    found, lse = torch.func.functionalize(lambda *x: work(*x[:3], out=x[3], return_lse=True))(*args, out)
    expected = work(*args, return_lse=True)
    assert torch.equal(found, expected[0]) and torch.equal(lse, expected[1]) and torch.equal(out, expected[0])
    assert torch.equal(torch.func.functionalize(work)(*args), expected[0])


def test_compiled():
    torch.compiler.reset()
    for call in ("attn", "attn_varlen"):
        mapped = torch.vmap(CALLS[call])
        assert torch.equal(torch.compile(mapped, backend="aot_eager", fullgraph=True)(X, Y, Z), mapped(X, Y, Z))
