"""The steps of rings: what they compute, and what they refuse. test_context_parallel.py runs whole rings."""

from __future__ import annotations

import inspect

import pytest
import torch
from exact import served_calls

from sage_aot import Sparse
from sage_aot.errors import ArgumentError, UnsupportedError
from sage_aot.integrations import Policy, report, use
from sage_aot.integrations.distributed import ring_blocks, ring_forward, ring_op


def tensors(queries, keys, heads=4):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, own, rows, 64, generator=generator)
            for own, rows in ((heads, queries), (2, keys), (2, keys))]


def expected_of(q, k, v, offset=None, scale=0.125):
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * scale
    if offset is not None:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:]).tril(offset).bool(), -torch.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


@pytest.mark.parametrize("when", ["possible", "faster"])
@pytest.mark.parametrize(("queries", "keys"), [(30, 40), (40, 40)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_step_of_yunchangs_ring(exact, queries, keys, is_causal, when):
    q, k, v = tensors(queries, keys)
    with use(Policy(when)):
        out, lse = ring_forward(*(x.transpose(1, 2) for x in (q, k, v)), softmax_scale=0.3, causal=is_causal)
    expected, expected_lse = expected_of(q, k, v, keys - queries if is_causal else None, 0.3)
    torch.testing.assert_close(out.transpose(1, 2), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-5)
    assert served_calls() == 1


@pytest.mark.parametrize(("queries", "keys"), [(30, 40), (40, 40)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_step_of_torchs_ring(exact, queries, keys, is_causal):
    q, k, v = tensors(queries, keys)
    out, lse = ring_op(q, k, v, is_causal=is_causal)
    expected, expected_lse = expected_of(q, k, v, 0 if is_causal else None)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-5)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(30, 0), (0, 40), (0, 0)])
def test_a_share_without_tokens(queries, keys, is_causal):
    """A query sees none of no keys: zeros, and minus infinity, which another share's log-sum-exp outweighs."""
    q, k, v = tensors(queries, keys)
    for out, lse in (ring_op(q, k, v, is_causal=is_causal),
                     ring_forward(*(x.transpose(1, 2) for x in (q, k, v)), causal=is_causal)):
        assert out.numel() == q.numel() and not out.any()
        assert lse.shape == (2, 4, queries) and lse.dtype == torch.float32 and (lse == -torch.inf).all()
    assert out.shape == (2, queries, 4, 64) and report() == {"sage_aot": 2}


def test_a_share_without_heads_is_an_error():
    q, k, v = tensors(30, 40)
    with pytest.raises(UnsupportedError, match="got: empty tensors; choose the library's own"):
        ring_op(q, k[:, :0], v[:, :0])


@pytest.mark.parametrize(("name", "given"), [("window_size", (128, 0)), ("softcap", 30.0),
                                             ("alibi_slopes", torch.ones(4)), ("return_softmax", True)])
def test_arguments_that_would_change_the_result_are_refused(name, given):
    q = torch.randn(1, 8, 2, 64)
    with pytest.raises(UnsupportedError, match=f"{name}: expected .*, got .*; choose the library's own attention"):
        ring_forward(q, q, q, **{name: given})
    assert list(inspect.signature(ring_forward).parameters)[3:] == [
        "dropout_p", "softmax_scale", "causal", "window_size", "softcap", "alibi_slopes", "return_softmax"]


def test_what_sage_aot_does_not_compute_is_an_error():
    q = torch.randn(1, 8, 2, 64)
    for step in (ring_forward, ring_op):
        with pytest.raises(UnsupportedError, match="got: dropout; choose the library's own attention for the ring"):
            step(q, q, q, dropout_p=0.1)
    assert report() == {"dropout": 2}
    with pytest.raises(TypeError, match="unexpected keyword argument 'softcap'"):
        ring_op(q, q, q, softcap=1.0)


@pytest.mark.parametrize(("wrong", "message"), [
    ({"sparse": 0.3}, "sparse: expected a sage_aot.Sparse, got float"),
    ({"scale": "x"}, "scale: expected None or a finite number, got 'x'"),
    ({"scale": float("nan")}, "scale: expected None or a finite number, got nan"),
    ({"lengths": 1000}, "lengths: expected None or the tokens of each rank, got 1000")])
def test_wrong_arguments_of_a_sparse_ring(wrong, message):
    q, k, _ = tensors(256, 256)
    with pytest.raises(ArgumentError, match=message):  # before anything asks for the processes
        ring_blocks(q, k, **{"sparse": Sparse(keep=0.5), **wrong})
