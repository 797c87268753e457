"""Every check of a call's tensors. test_options.py has the checks of options."""

from __future__ import annotations

import math

import pytest
import torch

import sage_aot
from sage_aot._problem.arguments import check_out
from sage_aot._problem.check import check
from sage_aot._problem.given import Given
from sage_aot._problem.options import Options
from sage_aot.errors import ArgumentError


def tensors(**changes):
    shapes = {"q": (2, 4, 10, 64), "k": (2, 2, 12, 64), "v": (2, 2, 12, 64)}
    return [changes.get(name, torch.zeros(shape, dtype=torch.bfloat16)) for name, shape in shapes.items()]


def bf16(*shape):
    return torch.zeros(shape, dtype=torch.bfloat16)


def test_a_valid_call_becomes_a_problem():
    problem = check(Given("dense", *tensors()), Options())
    assert (problem.batch, problem.num_q_heads, problem.num_kv_heads) == (2, 4, 2)
    assert (problem.seqlen_q, problem.seqlen_kv, problem.headdim, problem.dtype) == (10, 12, 64, "bf16")
    assert problem.softmax_scale == 1 / math.sqrt(64)


@pytest.mark.parametrize(("scale", "expected"), [(None, 0.125), (0, 0.0), (-2, -2.0), (0.7, 0.7)])
def test_the_scale_is_a_float_whatever_was_given(scale, expected):
    found = check(Given("dense", *tensors()), Options(scale=scale)).softmax_scale
    assert (found, type(found)) == (expected, float)


def test_a_problem_holds_resolved_options():
    problem = check(Given("dense", *tensors()), Options(qk="int4"))
    assert problem.options == Options(qk="int4", smooth_q=True, rotate=True)


@pytest.mark.parametrize(("changes", "empty"), [
    ({}, False), ({"q": bf16(2, 4, 0, 64)}, True), ({"k": bf16(2, 2, 0, 64), "v": bf16(2, 2, 0, 64)}, True),
    ({"q": bf16(2, 0, 10, 64)}, True)])
def test_a_problem_without_queries_or_keys_is_empty(changes, empty):
    assert check(Given("dense", *tensors(**changes)), Options()).is_empty is empty


def test_layout_says_which_dimension_is_which():
    q, k, v = (t.transpose(1, 2) for t in tensors())
    problem = check(Given("dense", q, k, v), Options(layout="NHD"))
    assert (problem.num_q_heads, problem.num_kv_heads, problem.seqlen_q, problem.seqlen_kv) == (4, 2, 10, 12)


@pytest.mark.parametrize(("changes", "message"), [
    ({"q": [1]}, "q: expected a torch.Tensor, got list; make one with torch.as_tensor"),
    ({"k": bf16(2, 12, 64)},
     r"k: expected four dimensions \[batch, heads, seq, headdim\], got shape \(2, 12, 64\); add .*k.unsqueeze"),
    ({"v": bf16(2, 2, 12, 64).double()},
     r"v: expected torch.float16, torch.bfloat16 or torch.float32, got torch.float64; .*v.to\("),
    ({"v": bf16(2, 2, 12, 64).float()}, r"one dtype, got torch.bfloat16 for q and torch.float32 for v; pass v.to\(q"),
    ({"q": bf16(2, 4, 10, 260)}, "q: expected a head dim from 1 to 256, got 260; .*scaled_dot_product"),
    ({"q": bf16(2, 4, 10, 0)}, "q: expected a head dim from 1 to 256, got 0"),
    ({"q": bf16(2, 4, 64, 10).transpose(2, 3)}, r"q: expected a contiguous last dimension, got strides .*q.contiguous"),
    ({"k": bf16(2, 2, 12, 64).half()},
     r"one dtype, got torch.bfloat16 for q and torch.float16 for k; pass k.to\(q.dtype"),
    ({"v": torch.zeros(2, 2, 12, 64, dtype=torch.bfloat16, device="meta")},
     r"one device, got cpu for q and meta for v; pass v.to\(q.device\)"),
    ({"v": bf16(2, 2, 13, 64)},
     r"k and v must have one shape, got \(2, 2, 12, 64\) and \(2, 2, 13, 64\); .* pad the smaller"),
    ({"q": bf16(3, 4, 10, 64)}, "one batch size, got 3 for q and 2 for k and v; expand"),
    ({"q": bf16(2, 4, 10, 32)}, "one head dim, got 32 for q and 64 for k and v; pad the smaller"),
    ({"q": bf16(2, 3, 10, 64)},
     r"must be a multiple of those of k and v, got 3 and 2 in \[batch, heads, seq, headdim\]; .*pass layout='NHD'"),
    ({"k": bf16(2, 0, 12, 64), "v": bf16(2, 0, 12, 64)}, "must be a multiple of those of k and v, got 4 and 0"),
])
def test_bad_tensors(changes, message):
    with pytest.raises(ArgumentError, match=message):
        check(Given("dense", *tensors(**changes)), Options())


@pytest.mark.parametrize(("out", "message"), [
    (3, r"out: expected a tensor like q, got int; make one with torch.empty_like\(q\)"),
    (bf16(2, 4, 11, 64),
     r"out: expected shape, dtype and device of q, \(2, 4, 10, 64\) torch.bfloat16 on cpu, got \(2, 4, 11"),
    (bf16(2, 4, 10, 64).half(), "got .* torch.float16 on cpu"),
    (bf16(2, 4, 64, 10).transpose(2, 3), "out: expected a contiguous last dimension"),
    (bf16(1, 4, 10, 64).expand(2, -1, -1, -1), "out: its elements must not share memory"),
    (bf16(6000).as_strided((2, 4, 10, 64), (2600, 640, 63, 1)), r"share memory, got .* strides \(2600, 640, 63, 1\)"),
    (bf16(6000).as_strided((2, 4, 10, 64), (64, 64, 256, 1)), "out: its elements must not share memory"),
    (bf16(6000).as_strided((2, 4, 10, 64), (2559, 64, 256, 1)), "out: its elements must not share memory"),
])
def test_bad_out(out, message):
    with pytest.raises(ArgumentError, match=message):
        check_out(out, bf16(2, 4, 10, 64))


@pytest.mark.parametrize("strides", [(2560, 640, 64, 1), (2560, 64, 256, 1), (64, 128, 512, 1), (5000, 1000, 64, 1),
                                     (715, 1430, 70, 1)])
def test_an_out_of_any_order_and_with_gaps(strides):
    check_out(bf16(12000).as_strided((2, 4, 10, 64), strides), bf16(2, 4, 10, 64))


def test_strides_of_dimensions_of_one_element_do_not_matter():
    check_out(bf16(6000).as_strided((1, 4, 10, 1), (0, 10, 1, 1)), bf16(1, 4, 10, 1))
    check_out(bf16(6000).as_strided((0, 4, 10, 64), (0, 0, 0, 1)), bf16(0, 4, 10, 64))


@pytest.mark.parametrize("view", [torch._neg_view, lambda x: torch.complex(x, x).conj().imag])
def test_an_out_that_torch_negates_is_refused(view):
    q, k, v = (x.float() for x in tensors())
    with pytest.raises(ArgumentError, match="out: expected a tensor that holds its own values"):
        sage_aot.attn(q, k, v, out=view(torch.empty_like(q)))


def test_unknown_keywords_raise():
    with pytest.raises(TypeError, match="dropout_p"):
        sage_aot.attn(*tensors(), dropout_p=0.0)


def test_return_lse_is_a_flag():
    with pytest.raises(ArgumentError, match="return_lse: expected True or False"):
        sage_aot.attn(*tensors(), return_lse="yes")
