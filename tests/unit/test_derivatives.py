"""A derivative that does not exist is refused by name, in front of the operators, eager and compiled: never zeros."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad

import sage_aot
from sage_aot._problem.derivatives import check_no_grad
from sage_aot.errors import ArgumentError

pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.jit.script.*` is deprecated",  # torch.func.jvp imports it, dynamo of torch 2.11 its methods
    "ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo reads it

Q, K, V, T = torch.randn(4, 1, 2, 40, 32, generator=torch.Generator().manual_seed(0))
BEGINS = torch.tensor([0, 40], dtype=torch.int32)


def packed(x: torch.Tensor) -> torch.Tensor:
    return x.squeeze(0).transpose(0, 1)


CALLS = {
    "attn": lambda x: sage_aot.attn(x, K, V),
    "attn, of k": lambda x: sage_aot.attn(Q, x, V),
    "attn, of v": lambda x: sage_aot.attn(Q, K, x),
    "attn, NHD": lambda x: sage_aot.attn(*(y.transpose(1, 2) for y in (x, K, V)), layout="NHD"),
    "attn, one query": lambda x: sage_aot.attn(x[:, :, :1], K, V),
    "attn, with the log-sum-exp": lambda x: sage_aot.attn(x, K, V, return_lse=True)[0],
    "attn, kv": lambda x: sage_aot.attn(x, sage_aot.quantize_kv(K, V)),
    "quantize_kv": lambda x: sage_aot.attn(Q, sage_aot.quantize_kv(x, V)),
    "attn_varlen": lambda x: sage_aot.attn_varlen(packed(x), packed(K), packed(V), BEGINS, BEGINS, 40, 40),
}
TRAINED = {"train_attn": lambda x: sage_aot.train_attn(x.bfloat16(), K.bfloat16(), V.bfloat16())}


def dual(call, x: torch.Tensor, tangent: torch.Tensor) -> torch.Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(call(forward_ad.make_dual(x, tangent))).tangent


def weighted(call):
    """The call times a weight, of which it is no derivative."""
    return lambda x: torch.func.grad(lambda w: (call(x) * w).sum())(torch.tensor(2.0))


DERIVATIVES = {
    "grad": lambda call: torch.func.grad(lambda x: call(x).square().sum())(Q),
    "vjp": lambda call: torch.func.vjp(call, Q)[1](T),
    "jacrev": lambda call: torch.func.jacrev(lambda x: call(x).sum())(Q),
    "jvp": lambda call: torch.func.jvp(call, (Q,), (T,)),
    "jacfwd": lambda call: torch.func.jacfwd(lambda x: call(x).sum())(Q),
    "linearize": lambda call: torch.func.linearize(call, Q),
    "forward AD": lambda call: dual(call, Q, T),
    "grad of vmap": lambda call: torch.func.grad(lambda x: torch.vmap(call)(x).sum())(Q[None]),
    "vmap of grad": lambda call: torch.vmap(torch.func.grad(lambda x: call(x).sum()))(Q[None]),
    "grad of what comes before": lambda call: torch.func.grad(lambda w: call(Q * w).sum())(torch.tensor(2.0)),
    "jvp around grad": lambda call: torch.func.jvp(weighted(call), (Q,), (T,)),
    "forward AD around grad": lambda call: dual(weighted(call), Q, T),
}
COMPILED = ("grad", "vjp", "jacrev", "jvp", "forward AD", "grad of vmap", "grad of what comes before",
            "jvp around grad")


@pytest.mark.parametrize("call", [*CALLS, *TRAINED])
@pytest.mark.parametrize("derivative", DERIVATIVES)
def test_is_refused(derivative, call):
    with pytest.raises(ArgumentError, match="is differentiated by forward AD or torch.func, and "):
        DERIVATIVES[derivative]({**CALLS, **TRAINED}[call])


VIEWS_FAIL = ("jvp", "forward AD", "jvp around grad")
"""Derivatives in which dynamo of torch 2.13 fails at a view of what is differentiated, before the call."""


@pytest.mark.parametrize(("derivative", "call"), [
    (derivative, call) for derivative in COMPILED for call in ("attn", "attn, kv", "attn_varlen", "train_attn")
    if call != "attn_varlen" or derivative not in VIEWS_FAIL])
def test_is_refused_in_compiled_code(derivative, call):
    torch._dynamo.reset()
    function = {**CALLS, **TRAINED}[call]
    compiled = torch.compile(lambda: DERIVATIVES[derivative](function), backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="is differentiated by forward AD or torch.func"):
        compiled()


def test_is_refused_after_a_call_that_was_not_differentiated():
    """Both calls stand in one trace."""
    torch._dynamo.reset()
    call = CALLS["attn"]
    compiled = torch.compile(lambda: (call(Q), dual(call, Q, T)), backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="is differentiated by forward AD or torch.func"):
        compiled()


def test_a_gradient_that_is_differentiated_is_refused():
    q, k, v = (x.bfloat16().requires_grad_() for x in (Q, K, V))
    out = sage_aot.train_attn(q, k, v)
    with forward_ad.dual_level(), pytest.raises(ArgumentError, match="grad_out is differentiated by forward AD"):
        torch.autograd.grad(out, q, forward_ad.make_dual(T.bfloat16(), T.bfloat16()))


@pytest.mark.parametrize("call", CALLS)
def test_what_is_not_differentiated_is_computed(call):
    """Calls stand within a transformation, and without one."""
    function, expected = CALLS[call], CALLS[call](Q)
    found = torch.func.grad(lambda w: (function(Q) * w).sum())(torch.tensor(2.0))
    assert found.allclose(expected.sum())
    _, tangent = torch.func.jvp(lambda w: function(Q) * w, (torch.tensor(2.0),), (torch.tensor(1.0),))
    assert tangent.equal(expected)
    with forward_ad.dual_level():
        forward_ad.make_dual(K, T)
        assert function(Q).equal(expected)
    with torch.no_grad():
        assert function(Q.clone().requires_grad_()).equal(expected)

    def without_grad(x):
        with torch.no_grad():
            constant = function(x)
        return (constant * x.sum()).sum()

    for f in (lambda x: (function(x.detach()) * x.sum()).sum(), without_grad):
        assert torch.func.grad(f)(Q).allclose(expected.sum())


SCALED = {
    "attn": lambda scale: sage_aot.attn(Q, K, V, scale=scale),
    "attn, one query": lambda scale: sage_aot.attn(Q[:, :, :1], K, V, scale=scale),
    "attn, kv": lambda scale: sage_aot.attn(Q, sage_aot.quantize_kv(K, V), scale=scale),
    "attn_varlen": lambda scale: sage_aot.attn_varlen(packed(Q), packed(K), packed(V), BEGINS, BEGINS, 40, 40,
                                                      scale=scale),
    "train_attn": lambda scale: sage_aot.train_attn(Q.bfloat16(), K.bfloat16(), V.bfloat16(), scale=scale),
}


@pytest.mark.parametrize("call", SCALED)
@pytest.mark.parametrize("derivative", [
    lambda call, x: torch.func.grad(lambda x: call(x).sum())(x), lambda call, x: torch.func.jvp(call, (x,), (x,)),
    lambda call, x: torch.func.jacfwd(call)(x), lambda call, x: dual(call, x, x),
    lambda call, x: call(x.clone().requires_grad_())], ids=["grad", "jvp", "jacfwd", "forward AD", "autograd"])
def test_a_scale_that_is_differentiated_is_refused(derivative, call):
    """A tensor without dimensions is taken for the number within it, which has no derivative."""
    with pytest.raises(ArgumentError, match="scale: .*of a tensor that is differentiated pass scale.item.., got"):
        derivative(SCALED[call], torch.tensor(0.3))


def test_a_scale_that_is_not_differentiated_is_a_number_within_derivatives():
    scale, expected = torch.tensor(0.3), SCALED["attn"](0.3)
    _, tangent = torch.func.jvp(lambda w: SCALED["attn"](scale) * w, (torch.tensor(2.0),), (torch.tensor(1.0),))
    assert tangent.equal(expected)
    found = torch.func.grad(lambda w: (SCALED["attn"](scale) * w).sum())(torch.tensor(2.0))
    assert found.allclose(expected.sum())


def test_trained_calls_are_differentiated_by_autograd():
    q, k, v = (x.bfloat16().requires_grad_() for x in (Q, K, V))
    gradients = torch.autograd.grad(sage_aot.train_attn(q, k, v).float().square().sum(), (q, k, v))
    assert all(gradient.abs().max() > 0 for gradient in gradients)


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_a_tensor_that_autograd_would_follow_is_refused_by_name(name):
    given = {**dict.fromkeys(("q", "k", "v"), Q), "out": None, name: Q.clone().requires_grad_()}
    with pytest.raises(ArgumentError, match=f"{name} requires grad, and attn has no backward pass"):
        check_no_grad(**given)
    with torch.no_grad():
        check_no_grad(**given)


@pytest.mark.parametrize("derivative", ["grad", "jvp", "forward AD", "grad of what comes before"])
def test_means_of_blocks_are_not_differentiated(derivative):
    """Nor are the masks that come of them, which have no derivative and stay as they are."""
    with pytest.raises(ArgumentError, match="the means of blocks have no derivative"):
        DERIVATIVES[derivative](lambda x: sage_aot.sparse.pool_blocks(x, means=True).means)
    expected = sage_aot.sparse.select_blocks(Q, K, keep=0.5).blocks
    DERIVATIVES[derivative](lambda x: x * sage_aot.sparse.select_blocks(x, K, keep=0.5).blocks.equal(expected))


def test_means_of_a_tensor_that_requires_grad_are_refused():
    x = Q.clone().requires_grad_()
    with pytest.raises(ArgumentError, match="the means of blocks have no derivative"):
        sage_aot.sparse.pool_blocks(x, means=True)
    sage_aot.sparse.pool_blocks(x)
    with torch.no_grad():
        sage_aot.sparse.pool_blocks(x, means=True)


def test_supports_says_so():
    said = []
    torch.func.jvp(lambda x: (said.append(sage_aot.supports(x, K, V)), x)[1], (Q,), (T,))
    assert "q is differentiated by forward AD or torch.func" in said[0]
    assert "q requires grad" in sage_aot.supports(Q.clone().requires_grad_(), K, V)
    assert sage_aot.supports(Q, K, V) is None
