"""Every check of a call's arguments: what was expected, what came."""

from __future__ import annotations

import math

import pytest
import torch

import sage_aot
from sage_aot._problem import check, check_out
from sage_aot.errors import ArgumentError

OPTIONS = {"is_causal": False, "scale": None, "layout": "HND", "smooth_k": True}


def tensors(**changes):
    shapes = {"q": (2, 4, 10, 64), "k": (2, 2, 12, 64), "v": (2, 2, 12, 64)}
    return [changes.get(name, torch.zeros(shape, dtype=torch.bfloat16)) for name, shape in shapes.items()]


def bf16(*shape):
    return torch.zeros(shape, dtype=torch.bfloat16)


def test_a_valid_call_becomes_a_problem():
    problem = check(*tensors(), **OPTIONS)
    assert (problem.batch, problem.num_q_heads, problem.num_kv_heads) == (2, 4, 2)
    assert (problem.seqlen_q, problem.seqlen_kv, problem.headdim, problem.dtype) == (10, 12, 64, "bf16")
    assert problem.softmax_scale == 1 / math.sqrt(64)


def test_smooth_q_is_on_for_4_bits_unless_set():
    assert not check(*tensors(), **OPTIONS).smooth_q
    assert check(*tensors(), **OPTIONS, qk_bits=4).smooth_q
    assert not check(*tensors(), **OPTIONS, qk_bits=4, smooth_q=False).smooth_q
    assert check(*tensors(), **OPTIONS, smooth_q=True).smooth_q


@pytest.mark.parametrize("pv_accum", ["auto", "f32", "two_level_f32", "two_level_f16"])
def test_pv_accum_stays_as_it_was_asked_for(pv_accum):
    assert check(*tensors(), **OPTIONS, pv_accum=pv_accum).pv_accum == pv_accum
    assert check(*tensors(), **OPTIONS).pv_accum == "auto"


def test_layout_says_which_dimension_is_which():
    q, k, v = (t.transpose(1, 2) for t in tensors())
    problem = check(q, k, v, **{**OPTIONS, "layout": "NHD"})
    assert (problem.num_q_heads, problem.num_kv_heads, problem.seqlen_q, problem.seqlen_kv) == (4, 2, 10, 12)


@pytest.mark.parametrize(("changes", "message"), [
    ({"q": [1]}, "q: expected a torch.Tensor, got list; make one with torch.as_tensor"),
    ({"k": bf16(2, 12, 64)},
     r"k: expected four dimensions \[batch, heads, seq, headdim\], got shape \(2, 12, 64\); add .*k.unsqueeze"),
    ({"v": bf16(2, 2, 12, 64).float()}, r"v: expected torch.float16 or torch.bfloat16, got torch.float32; .*v.to\("),
    ({"q": bf16(2, 4, 10, 160)}, "q: expected a head dim from 1 to 128, got 160; .*scaled_dot_product"),
    ({"q": bf16(2, 4, 10, 0)}, "q: expected a head dim from 1 to 128, got 0"),
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
     "must be a multiple of those of k and v, got 3 and 2 in layout 'HND'; .*pass layout='NHD'"),
    ({"k": bf16(2, 0, 12, 64), "v": bf16(2, 0, 12, 64)}, "must be a multiple of those of k and v, got 4 and 0"),
    ({"q": bf16(2, 4, 10, 64).requires_grad_()}, "q requires grad, and attn has no backward pass"),
])
def test_bad_tensors(changes, message):
    with pytest.raises(ArgumentError, match=message):
        check(*tensors(**changes), **OPTIONS)


@pytest.mark.parametrize(("options", "message"), [
    ({"layout": "hnd"}, r"layout: expected 'HND' \[batch, heads, seq, headdim\] or 'NHD' .*, got 'hnd'"),
    ({"is_causal": 1}, "is_causal: expected True or False, got 1"),
    ({"smooth_k": None}, "smooth_k: expected True or False, got None"),
    ({"scale": "1"}, "scale: expected a finite Python number of at most"),
    ({"scale": float("nan")}, "scale: expected a finite Python number"),
    ({"scale": 1e39}, "scale: expected a finite Python number"),
    ({"scale": True}, "scale: expected a finite Python number"),
    ({"layout": ["HND"]}, "layout: expected 'HND'"),
    ({"qk_bits": 16}, "qk_bits: expected 'auto', 8 or 4, got 16"),
    ({"qk_bits": [8]}, "qk_bits: expected 'auto', 8 or 4, got .8."),
    ({"smooth_q": 1}, "smooth_q: expected 'auto', True or False, got 1"),
    ({"smooth_v": "yes"}, "smooth_v: expected True or False, got 'yes'"),
    ({"pv_accum": "f16"},
     r"pv_accum: expected 'auto' or one of \('f32', 'two_level_f32', 'two_level_f16'\), got 'f16'"),
    ({"pv_accum": None}, "pv_accum: expected 'auto' or one of .*, got None"),
    ({"pv_accum": ["f32"]}, "pv_accum: expected 'auto' or one of .*, got .'f32'."),
])
def test_bad_options(options, message):
    with pytest.raises(ArgumentError, match=message):
        check(*tensors(), **{**OPTIONS, **options})


def test_grad_is_fine_where_it_is_off():
    with torch.no_grad():
        check(*tensors(q=bf16(2, 4, 10, 64).requires_grad_()), **OPTIONS)


@pytest.mark.parametrize(("out", "message"), [
    (3, r"out: expected a tensor like q, got int; make one with torch.empty_like\(q\)"),
    (bf16(2, 4, 11, 64),
     r"out: expected shape, dtype and device of q, \(2, 4, 10, 64\) torch.bfloat16 on cpu, got \(2, 4, 11"),
    (bf16(2, 4, 10, 64).half(), "got .* torch.float16 on cpu"),
    (bf16(2, 4, 64, 10).transpose(2, 3), "out: expected a contiguous last dimension"),
    (bf16(1, 4, 10, 64).expand(2, -1, -1, -1), "out: its elements must not share memory"),
])
def test_bad_out(out, message):
    with pytest.raises(ArgumentError, match=message):
        check_out(out, bf16(2, 4, 10, 64))


def test_unknown_keywords_raise():
    with pytest.raises(TypeError, match="attn_mask"):
        sage_aot.attn(*tensors(), attn_mask=None)


def test_return_lse_is_a_flag():
    with pytest.raises(ArgumentError, match="return_lse: expected True or False"):
        sage_aot.attn(*tensors(), return_lse="yes")
