"""The package sageattention: its signatures, and every argument against torch's attention, with exact attention in the
place of the kernels. tests/unit/test_packaging.py builds its wheel."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import sageattention
import torch
import torch.nn.functional as F
from exact import attention, served_calls
from sageattention import core

import sage_aot
from sage_aot.errors import ArgumentError, UnsupportedError
from sage_aot.integrations import Policy, _serve, report, use

BY_GPU = sageattention.sageattn
TRITON = sageattention.sageattn_qk_int8_pv_fp16_triton
F16 = sageattention.sageattn_qk_int8_pv_fp16_cuda
F8 = sageattention.sageattn_qk_int8_pv_fp8_cuda
SM90 = sageattention.sageattn_qk_int8_pv_fp8_cuda_sm90
VARLEN = sageattention.sageattn_varlen
DENSE = [BY_GPU, TRITON, F16, F8, SM90]

QKV = dict.fromkeys(("q", "k", "v"), inspect.Parameter.empty)
LSE = {"return_lse": False}
SIGNATURES = {  # of thu-ml/SageAttention at d1a57a5
    "sageattn": {**QKV, "tensor_layout": "HND", "is_causal": False, "sm_scale": None, **LSE},
    "sageattn_varlen": {
        **QKV, **dict.fromkeys(["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"],
                               inspect.Parameter.empty), "is_causal": False, "sm_scale": None, "smooth_k": True},
    "sageattn_qk_int8_pv_fp16_triton": {
        **QKV, "tensor_layout": "HND", "quantization_backend": "triton", "is_causal": False, "attn_mask": None,
        "sm_scale": None, "smooth_k": True, **LSE},
    "sageattn_qk_int8_pv_fp16_cuda": {
        **QKV, "tensor_layout": "HND", "is_causal": False, "qk_quant_gran": "per_thread", "sm_scale": None,
        "pv_accum_dtype": "fp32", "smooth_k": True, "smooth_v": False, **LSE},
    "sageattn_qk_int8_pv_fp8_cuda": {
        **QKV, "tensor_layout": "HND", "is_causal": False, "qk_quant_gran": "per_thread", "sm_scale": None,
        "pv_accum_dtype": "fp32+fp16", "smooth_k": True, "smooth_v": False, **LSE},
    "sageattn_qk_int8_pv_fp8_cuda_sm90": {
        **QKV, "tensor_layout": "HND", "is_causal": False, "qk_quant_gran": "per_thread", "sm_scale": None,
        "pv_accum_dtype": "fp32+fp32", "smooth_k": True, **LSE},
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_those_of_sageattention(name):
    *parameters, last = inspect.signature(getattr(sageattention, name)).parameters.values()
    assert list({x.name: x.default for x in parameters}.items()) == list(SIGNATURES[name].items())
    assert all(x.kind is x.POSITIONAL_OR_KEYWORD for x in parameters)
    assert (last.name, last.kind) == ("kwargs", inspect.Parameter.VAR_KEYWORD)
    assert getattr(core, name) is getattr(sageattention, name) and name in sageattention.__all__


def test_comfyui_finds_no_mask_in_the_signature():
    assert "attn_mask" not in inspect.signature(BY_GPU).parameters


@pytest.fixture(autouse=True)
def no_policy(served):
    """The functions run sage_aot's kernels whatever is faster, on CPU tensors too."""
    with use(Policy()):
        yield


def tensors(queries=30, keys=30, heads=4, kv_heads=4, dtype=torch.float32, headdim=64):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, own, rows, headdim, generator=generator).to(dtype)
            for own, rows in ((heads, queries), (kv_heads, keys), (kv_heads, keys))]


def nhd(*hnd):
    return [x.transpose(1, 2) for x in hnd]


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def lse_of(q, k, scale, seen=None):
    scores = q @ k.repeat_interleave(q.size(1) // k.size(1), 1).transpose(2, 3) * scale
    return (scores if seen is None else scores.masked_fill(~seen, -torch.inf)).logsumexp(-1)


# --- arguments of the signatures --------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", DENSE)
@pytest.mark.parametrize("is_causal", [False, True])
def test_layouts_scales_causal_masks_grouped_heads_and_log_sum_exps(exact, function, is_causal):
    q, k, v = tensors(kv_heads=2)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=0.3, enable_gqa=True)
    seen = torch.ones(30, 30).tril().bool() if is_causal else None
    close(function(q, k, v, is_causal=is_causal, sm_scale=0.3), expected)
    out, lse = function(*nhd(q, k, v), tensor_layout="NHD", is_causal=is_causal, sm_scale=0.3, return_lse=True)
    close(out, expected.transpose(1, 2))
    close(lse, lse_of(q, k, 0.3, seen))
    assert lse.dtype == torch.float32 and report() == {"sage_aot": 2}


def test_arguments_stand_in_the_order_of_sageattention(exact):
    q, k, v = tensors()
    out, lse = BY_GPU(*nhd(q, k, v), "NHD", True, 0.3, True)
    close(out.transpose(1, 2), F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3))
    close(lse, lse_of(q, k, 0.3, torch.ones(30, 30).tril().bool()))


@pytest.mark.parametrize("function", DENSE)
def test_causal_masks_are_aligned_top_left(exact, function):
    q, k, v = tensors(queries=20)
    close(function(q, k, v, is_causal=True), F.scaled_dot_product_attention(q, k, v, is_causal=True))
    with pytest.raises(UnsupportedError, match="got: is_causal with more queries than keys; let another attention"):
        function(k, q, q, is_causal=True)


def options_of(function, *args, **kwargs):
    """The options with which a call reaches sage_aot.attn."""
    with mock.patch.object(_serve, "attn", side_effect=lambda *args, **options: options) as attn:
        function(*args, **kwargs)
    keywords = dict(attn.call_args.kwargs)
    for name in ("key_mask", "attn_mask", "sinks", "window", "is_causal", "scale", "layout", "return_lse"):
        keywords.pop(name)
    return keywords


def test_smoothing():
    qkv = tensors()
    for function in (TRITON, F16, F8, SM90):
        assert options_of(function, *qkv) == {}
        assert options_of(function, *qkv, smooth_k=False) == {"smooth_k": False}
    for function in (F16, F8):
        assert options_of(function, *qkv, smooth_k=False, smooth_v=True) == {"smooth_k": False, "smooth_v": True}
        assert options_of(function, *qkv, smooth_v=True, pv_accum_dtype="fp32") == {"smooth_v": True}
    for smooth_k in (False, True):  # as ComfyUI passes it
        assert options_of(BY_GPU, *qkv, smooth_k=smooth_k) == {}
    with use(Policy(options={"rotate": True, "smooth_v": True})):
        assert options_of(BY_GPU, *qkv) == {"rotate": True, "smooth_v": True}
        for masked in ({}, {"attn_mask": mask(2, 1, 1, 30)}):
            found = options_of(F8, *qkv, smooth_k=False, **masked)
            assert found == {"rotate": True, "smooth_v": True, "smooth_k": False}


def test_smoothing_reaches_the_kernels():
    q, k, v = tensors(dtype=torch.bfloat16)
    k = k + 20
    expected = sage_aot.attn(q, k, v, smooth_k=False, smooth_v=True)
    assert torch.equal(F8(q, k, v, smooth_k=False, smooth_v=True), expected)
    assert not torch.equal(F8(q, k, v), expected)
    assert torch.equal(BY_GPU(q, k, v, smooth_k=False), sage_aot.attn(q, k, v))


@pytest.mark.parametrize(("function", "name", "known"), [
    (TRITON, "quantization_backend", ("triton", "cuda")), (F16, "qk_quant_gran", ("per_warp", "per_thread")),
    (F8, "qk_quant_gran", ("per_warp", "per_thread")), (SM90, "qk_quant_gran", ("per_warp", "per_thread")),
    (F16, "pv_accum_dtype", ("fp32", "fp16", "fp16+fp32")), (F8, "pv_accum_dtype", ("fp32", "fp32+fp32", "fp32+fp16")),
    (SM90, "pv_accum_dtype", ("fp32", "fp32+fp32", "fp32+fp16"))])
def test_names_of_granularities_backends_and_sums(function, name, known):
    qkv = tensors()
    for value in known:
        assert options_of(function, *qkv, **{name: value}) == {}
    for value in ("per_channel", "bf16", None):
        with pytest.raises(ArgumentError, match=f"{name}: expected '.*' or '.*', got {value!r}"):
            function(*qkv, **{name: value})


@pytest.mark.parametrize("function", DENSE)
def test_layouts_that_are_none(function):
    with pytest.raises(ArgumentError, match="tensor_layout: expected 'HND' or 'NHD', got 'BHSD'"):
        function(*tensors(), tensor_layout="BHSD")


# --- keyword arguments in addition to the signatures ------------------------------------------------------------------


@pytest.mark.parametrize("function", [*DENSE, VARLEN])
@pytest.mark.parametrize("unknown", ["mask", "smooth_q", "return_lses"])
def test_unknown_keyword_arguments_are_refused(function, unknown):
    args = tensors() if function is not VARLEN else packed([9, 21])
    with pytest.raises(TypeError, match=rf"^{function.__name__}\(\) got an unexpected keyword argument '{unknown}'; "
                                        "in addition to its signature it takes attn_mask, softmax_scale, "):
        function(*args, **{unknown: None})


@pytest.mark.parametrize("function", DENSE)
@pytest.mark.parametrize("name", ["softmax_scale", "scale"])
def test_scales_of_other_libraries(exact, function, name):
    q, k, v = tensors()
    close(function(q, k, v, **{name: 0.3}), F.scaled_dot_product_attention(q, k, v, scale=0.3))
    close(function(q, k, v, **{name: None}), F.scaled_dot_product_attention(q, k, v))
    close(function(q, k, v, sm_scale=0.3, **{name: 0.3}), F.scaled_dot_product_attention(q, k, v, scale=0.3))
    with pytest.raises(ArgumentError, match=r"sm_scale: expected one value, got \{'sm_scale': 0.3, '\w+': 0.4\}"):
        function(q, k, v, sm_scale=0.3, **{name: 0.4})


@pytest.mark.parametrize("function", DENSE)
@pytest.mark.parametrize("number", [np.float32, torch.tensor])
def test_scalars_of_arrays(exact, function, number):
    q, k, v = tensors()
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.25)
    close(function(q, k, v, sm_scale=number(0.25), is_causal=np.True_), expected)


@pytest.mark.parametrize("function", DENSE)
def test_the_causal_mask_of_flash_attention(exact, function):
    q, k, v = tensors(queries=20)
    seen = torch.ones(20, 30).tril(10).bool()
    close(function(q, k, v, causal=True), F.scaled_dot_product_attention(q, k, v, seen))
    close(function(q, k, v, causal=False), F.scaled_dot_product_attention(q, k, v))
    close(function(q, k, v, causal=True, is_causal=True), F.scaled_dot_product_attention(q, k, v, seen))
    out, lse = function(k, q, q, causal=True, return_lse=True)  # the first ten queries see nothing
    assert not out[:, :, :10].any() and lse[:, :, :10].eq(-torch.inf).all() and out[:, :, 10:].all()
    with pytest.raises(ArgumentError, match="is_causal: expected one value, got True and causal=False"):
        function(q, k, v, causal=False, is_causal=True)


@pytest.mark.parametrize("function", DENSE)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("window", [(4, 0), (3, 2), (-1, 5), [6, -1]], ids=str)
def test_a_window_is_flash_attentions(exact, function, is_causal, window):
    """Aligned bottom-right, with a mask or without."""
    q, k, v = tensors(queries=20)
    left, right = window
    behind = torch.arange(30) - torch.arange(20)[:, None] - 10
    seen = (behind >= (-left if left >= 0 else -30)) & (behind <= (0 if is_causal else right if right >= 0 else 30))
    close(function(q, k, v, causal=is_causal, window_size=window), F.scaled_dot_product_attention(q, k, v, seen))
    mask = torch.arange(30) % 3 > 0
    close(function(q, k, v, causal=is_causal, window_size=window, attn_mask=mask),
          F.scaled_dot_product_attention(q, k, v, seen & mask))


def test_a_window_of_packed_sequences():
    args = packed([9, 21], keys=[12, 30])
    out = VARLEN(*args, causal=True, window_size=(5, 0))
    expected = sage_aot.attn_varlen(*args, is_causal=True, window=(5, 0))
    assert torch.equal(out, expected) and not torch.equal(out, VARLEN(*args, causal=True))


def test_a_window_with_is_causal_of_unequal_lengths_is_refused():
    with pytest.raises(UnsupportedError, match="got: a window that is aligned top-left; let another attention"):
        BY_GPU(*tensors(queries=20), is_causal=True, window_size=(5, 0))


@pytest.mark.parametrize("window", [None, 5, (5,), (-2, 0), torch.ones(2)], ids=str)
def test_windows_that_are_none_of_flash_attentions(window):
    with pytest.raises(ArgumentError, match=r"window_size: expected \(left, right\): two integers"):
        BY_GPU(*tensors(), window_size=window)


NEUTRAL = {"window_size": (-1, -1), "softcap": 0.0, "alibi_slopes": None, "return_softmax": False, "dropout_p": 0.0}


@pytest.mark.parametrize("function", [*DENSE, VARLEN])
def test_values_that_change_nothing_are_taken(function):
    args = tensors() if function is not VARLEN else packed([9, 21])
    assert torch.equal(function(*args, **NEUTRAL), function(*args))
    assert torch.equal(function(*args, window_size=[-1, -1], dropout_p=0, softcap=0, enable_gqa=True), function(*args))


@pytest.mark.parametrize("function", [*DENSE, VARLEN])
@pytest.mark.parametrize(("name", "given", "message"), [
    ("softcap", 30.0, "softcap: expected 0.0, got 30.0"),
    ("softcap", torch.zeros(4), r"softcap: expected 0.0, got a tensor of shape \(4,\)"),
    ("alibi_slopes", torch.ones(4), r"alibi_slopes: expected None, got a tensor of shape \(4,\)"),
    ("return_softmax", True, "return_softmax: expected False, got True"), ("dropout_p", 0.1, "dropout")])
def test_values_that_would_change_the_result_are_refused(function, name, given, message):
    args = tensors() if function is not VARLEN else packed([9, 21])
    with pytest.raises(UnsupportedError, match=f"{message}.*; let another attention of the host"):
        function(*args, **{name: given})
    assert served_calls() == 0


# --- masks ------------------------------------------------------------------------------------------------------------


def mask(*shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.5


@pytest.mark.parametrize("function", DENSE)
@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_masks_of_keys_are_served(exact, function, layout):
    q, k, v = tensors(kv_heads=2)
    given = mask(2, 1, 1, 30)
    args = (q, k, v) if layout == "HND" else nhd(q, k, v)
    out, lse = function(*args, tensor_layout=layout, attn_mask=given, return_lse=True)
    expected = F.scaled_dot_product_attention(q, k, v, given, enable_gqa=True)
    close(out if layout == "HND" else out.transpose(1, 2), expected)
    close(lse, lse_of(q, k, 0.125, given))
    close(function(*args, tensor_layout=layout, attn_mask=given), out)
    assert report() == {"sage_aot": 2}


@pytest.mark.parametrize("function", DENSE)
@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("shape", [(30, 30), (2, 1, 30, 30), (1, 4, 30, 30)])
def test_masks_of_queries_are_served(exact, function, layout, shape):
    q, k, v = tensors(queries=30, kv_heads=2)
    given = mask(*shape) | torch.eye(30, dtype=torch.bool)
    args = (q, k, v) if layout == "HND" else nhd(q, k, v)
    out, lse = function(*args, tensor_layout=layout, attn_mask=given, return_lse=True)
    close(out if layout == "HND" else out.transpose(1, 2),
          F.scaled_dot_product_attention(q, k, v, given, enable_gqa=True))
    close(lse, lse_of(q, k, 0.125, given))
    close(function(*args, tensor_layout=layout, attn_mask=given), out)
    assert report() == {"sage_aot": 2}


OTHER_MASKS = {
    "a mask of numbers": torch.zeros(2, 1, 1, 30).masked_fill(~mask(2, 1, 1, 30), -torch.inf),
}


@pytest.mark.parametrize("function", DENSE)
@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize("reason", OTHER_MASKS)
def test_other_masks_are_torchs_and_counted(exact, function, layout, kv_heads, reason):
    q, k, v = tensors(queries=30, kv_heads=kv_heads)
    given = OTHER_MASKS[reason]
    args = (q, k, v) if layout == "HND" else nhd(q, k, v)
    out = function(*args, tensor_layout=layout, attn_mask=given, sm_scale=0.3)
    expected = F.scaled_dot_product_attention(q, k, v, given, scale=0.3, enable_gqa=True)
    close(out, expected if layout == "HND" else expected.transpose(1, 2))
    assert out.is_contiguous() and report() == {reason: 1}
    with pytest.raises(UnsupportedError, match=f"got: {reason}; let another attention"):
        function(*args, tensor_layout=layout, attn_mask=given, return_lse=True)
    with use(Policy(otherwise="raise")), pytest.raises(UnsupportedError, match=f"got: {reason}; let the host"):
        function(*args, tensor_layout=layout, attn_mask=given)


def test_masks_with_causal_masks(exact):
    q, k, v = tensors()
    given = mask(2, 1, 1, 30)
    with pytest.raises(UnsupportedError, match="got: a mask with is_causal; let another attention"):
        BY_GPU(q, k, v, attn_mask=given, is_causal=True)
    expected = attention(q, k, v, key_mask=given[:, 0, 0], is_causal=True)
    close(BY_GPU(q, k, v, attn_mask=given, causal=True), expected)
    of_queries = mask(2, 1, q.size(2), 30)
    expected = attention(q, k, v, attn_mask=of_queries, is_causal=True)
    close(BY_GPU(q, k, v, attn_mask=of_queries, causal=True), expected)


def test_torch_serves_masks_alone():
    q, k, v = tensors()
    given = OTHER_MASKS["a mask of numbers"]
    with pytest.raises(UnsupportedError, match="got: gradients"):
        BY_GPU(q.requires_grad_(), k, v, attn_mask=given)
    with pytest.raises(UnsupportedError, match="got: dropout"):
        BY_GPU(q.detach(), k, v, attn_mask=given, dropout_p=0.5)
    with pytest.raises(ArgumentError, match="attn_mask: expected a torch.Tensor, got list"):
        BY_GPU(q.detach(), k, v, attn_mask=[True])


def test_in_the_place_of_torchs_attention(exact, monkeypatch):
    """Replace torch's attention as SageAttention's README tells: masked calls must not end in a circle."""
    q, k, v = tensors(kv_heads=2)
    torchs, given = F.scaled_dot_product_attention, OTHER_MASKS["a mask of numbers"]
    expected = torchs(q, k, v, given, scale=0.3, enable_gqa=True), torchs(q, k, v, is_causal=True, enable_gqa=True)
    monkeypatch.setattr(F, "scaled_dot_product_attention", BY_GPU)
    close(F.scaled_dot_product_attention(q, k, v, attn_mask=given, dropout_p=0.0, scale=0.3, enable_gqa=True),
          expected[0])
    close(F.scaled_dot_product_attention(q, k, v, attn_mask=None, is_causal=True, enable_gqa=True), expected[1])


# --- what is refused, and dtypes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", DENSE)
def test_what_sage_aot_does_not_compute_is_an_error(function):
    q, k, v = tensors(headdim=257)
    with pytest.raises(UnsupportedError, match="expected a call that sage_aot computes, got: head dims above 256; let"):
        function(q, k, v)
    q, k, v = tensors()
    with pytest.raises(UnsupportedError, match="got: dtypes that differ"):
        function(q, k.half(), v)
    with pytest.raises(UnsupportedError, match="got: gradients"):
        function(q.requires_grad_(), k, v)
    with pytest.raises(ArgumentError, match="k: expected a torch.Tensor, got list"):
        function(q, [k], v)
    assert report() == {"head dims above 256": 1, "dtypes that differ": 1, "gradients": 1}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_kernels_arithmetic_is_that_of_attn(dtype):
    q, k, v = tensors(dtype=dtype)
    for function in DENSE:
        assert torch.equal(function(q, k, v, is_causal=True), sage_aot.attn(q, k, v, is_causal=True))


def test_autocast_casts_q_and_k():
    q, k, v = tensors(dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        for function in DENSE:
            assert torch.equal(function(q.float(), k.float(), v), function(q, k, v))


def test_tensors_that_a_ring_receives(exact):
    """Tensors are as torch's ring template, which xDiT uses, passes them."""
    class Coming(torch.Tensor):
        def trigger_wait(self):
            return self.as_subclass(torch.Tensor)

    q, k, v = tensors()
    close(BY_GPU(q, k.as_subclass(Coming), v.as_subclass(Coming)), F.scaled_dot_product_attention(q, k, v))


# --- packed sequences -------------------------------------------------------------------------------------------------


def packed(lengths, keys=None, heads=4, kv_heads=2):
    """q, k, v, where their sequences begin, and the longest lengths."""
    keys = lengths if keys is None else keys
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(sum(of), own, 64, generator=generator)
               for of, own in ((lengths, heads), (keys, kv_heads), (keys, kv_heads)))
    begins = [torch.tensor([0, *of]).cumsum(0).int() for of in (lengths, keys)]
    return q, k, v, *begins, max(lengths), max(keys)


def by_sequence(args, is_causal=False, scale=None, of=attention):
    q, k, v, cu_q, cu_k = args[:5]
    parts = [of(q[None, a:b], k[None, c:d], v[None, c:d], is_causal=is_causal, scale=scale, layout="NHD")[0]
             for (a, b), (c, d) in zip(zip(cu_q, cu_q[1:]), zip(cu_k, cu_k[1:]))]
    return torch.cat(parts)


def exact_varlen(q, k, v, cu_q, cu_k, max_q, max_k, *, is_causal, window, scale):
    assert cu_q.dtype == cu_k.dtype == torch.int32 and window is None
    return by_sequence((q, k, v, cu_q, cu_k), is_causal, scale)


@pytest.fixture
def exact_sequences(monkeypatch):
    monkeypatch.setattr(core, "attn_varlen", exact_varlen)


@pytest.mark.parametrize("of_begins", [torch.int32, torch.int64])
@pytest.mark.parametrize("scale", [{}, {"sm_scale": 0.3}, {"softmax_scale": 0.3}], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_packed_sequences(exact_sequences, is_causal, scale, of_begins):
    q, k, v, cu_q, cu_k, *longest = packed([9, 1, 20])
    found = VARLEN(q, k, v, cu_q.to(of_begins), cu_k.to(of_begins), *longest, is_causal=is_causal, **scale)
    parts = []
    for begin, end in zip(cu_q, cu_q[1:]):
        one = (x[None, begin:end].transpose(1, 2) for x in (q, k, v))
        parts.append(F.scaled_dot_product_attention(*one, is_causal=is_causal, scale=0.3 if scale else None,
                                                    enable_gqa=True)[0].transpose(0, 1))
    close(found, torch.cat(parts))
    assert report() == {"sage_aot": 1}


def test_packed_sequences_with_other_numbers_of_keys(exact_sequences):
    args = packed([9, 1], keys=[12, 8])
    close(VARLEN(*args), by_sequence(args))
    close(VARLEN(*args, causal=True), by_sequence(args, is_causal=True))
    with pytest.raises(UnsupportedError, match="is_causal: expected sequences with as many queries as keys, got 10 and "
                                               "20 tokens, the longest of 9 and 12; for a mask .* pass causal=True"):
        VARLEN(*args, is_causal=True)
    with pytest.raises(UnsupportedError, match="got 10 and 10 tokens, the longest of 9 and 8"):
        VARLEN(*packed([9, 1], keys=[8, 2]), is_causal=True)


def test_packed_sequences_by_the_kernels():
    args = packed([9, 21])
    args = args[0], args[1] + 20, *args[2:]
    for smooth_k in (True, False):
        expected = sage_aot.attn_varlen(*args, is_causal=True, smooth_k=smooth_k)
        assert torch.equal(VARLEN(*args, is_causal=True, smooth_k=smooth_k), expected)
    for of in (np.int64, torch.tensor):
        assert torch.equal(VARLEN(*args[:5], *map(of, args[5:]), is_causal=True, smooth_k=smooth_k), expected)
    with use(Policy(options={"rotate": True})):
        assert torch.equal(VARLEN(*args), sage_aot.attn_varlen(*args, rotate=True))


def test_what_packed_sequences_have_not():
    args = packed([9, 21])
    for more, message in (({"attn_mask": mask(30)}, "attn_mask: expected None for packed sequences, got a tensor of"),
                          ({"dropout_p": 0.1}, "dropout_p: expected 0 for packed sequences, got 0.1")):
        with pytest.raises(UnsupportedError, match=message):
            VARLEN(*args, **more)
    with pytest.raises(ArgumentError, match="cu_seqlens_q: expected a torch.Tensor, got list"):
        VARLEN(*args[:3], [0, 30], *args[4:])
    with pytest.raises(ArgumentError, match="int32"):
        VARLEN(*args[:3], args[3].float(), *args[4:])


# --- hosts ------------------------------------------------------------------------------------------------------------


def test_refusals_are_counted():
    """Hosts may hide the errors."""
    qkv, args = tensors(), packed([9, 21])
    q = args[0].clone().requires_grad_()
    for refused in (lambda: BY_GPU(*qkv, alibi_slopes=qkv[0]), lambda: VARLEN(*args, dropout_p=0.5),
                    lambda: VARLEN(q, *args[1:]), lambda: VARLEN(*packed([9, 1], keys=[8, 2]), is_causal=True),
                    lambda: VARLEN(*args, softcap=3.0)):
        with pytest.raises(UnsupportedError):
            refused()
    assert report() == {"the argument alibi_slopes": 1, "dropout_p of packed sequences": 1, "gradients": 1,
                        "is_causal of unequal sequences": 1, "the argument softcap": 1}


OF_RINGS = {"dropout_p": 0.0, "softmax_scale": 0.3, "causal": True, "window_size": (-1, -1), "softcap": 0.0,
            "alibi_slopes": None, "return_softmax": False, "return_lse": True}
CALLS: dict[str, tuple[Any, str, dict[str, Any]]] = {  # docs/hosts; test_hosts.py runs the hosts themselves
    "xDiT": (BY_GPU, "HND", {"is_causal": False, "return_lse": True}),
    "vLLM-Omni": (BY_GPU, "NHD", {"is_causal": True, "sm_scale": 0.3}),
    "vLLM-Omni, a ring": (F8, "NHD", {"pv_accum_dtype": "fp32+fp32", **OF_RINGS}),
    "LightX2V": (BY_GPU, "NHD", {}),
    "LightX2V on 8.9 and 12.0": (TRITON, "NHD", {}),
    "LightX2V, a ring": (TRITON, "NHD", {"is_causal": False, "sm_scale": 0.3, "return_lse": True}),
    "SGLang": (BY_GPU, "NHD", {"is_causal": True, "sm_scale": 0.3, "return_lse": False}),
    "SGLang on 10.x": (F8, "NHD", {"is_causal": False, "sm_scale": 0.3, "return_lse": True,
                                   "pv_accum_dtype": "fp32+fp16"})}
"""Calls by host: the function, the layout, and the arguments that the host passes."""


@pytest.mark.parametrize("host", CALLS)
def test_calls_of_hosts(exact, host):
    function, layout, options = CALLS[host]
    qkv = tensors(kv_heads=2)
    scale = options.get("sm_scale", options.get("softmax_scale"))
    is_causal = bool(options.get("is_causal", options.get("causal", False)))
    # xDiT does not name the layout: it is SageAttention's default
    found = function(*qkv, **options) if layout == "HND" else function(*nhd(*qkv), tensor_layout=layout, **options)
    out = found[0] if options.get("return_lse") else found
    assert out.is_contiguous(), "LightX2V takes a view of it"
    close(out if layout == "HND" else out.transpose(1, 2),
          F.scaled_dot_product_attention(*qkv, is_causal=is_causal, scale=scale, enable_gqa=True))
    if options.get("return_lse"):
        close(found[1], lse_of(*qkv[:2], scale or 0.125, torch.ones(30, 30).tril().bool() if is_causal else None))
    assert report() == {"sage_aot": 1}


@pytest.mark.parametrize("kind", ["SAGE_AUTO", "SAGE_FP16", "SAGE_FP16_TRITON", "SAGE_FP8", "SAGE_FP8_SM90"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_yunchangs_own_functions_have_scale_and_causality(exact, kind, is_causal):
    """A step of its ring, with the arguments that the ring passes; test_context_parallel.py runs a ring."""
    kernels = pytest.importorskip("yunchang").kernels
    q, k, v = tensors(kv_heads=2)
    step = kernels.select_flash_attn_impl(kernels.AttnType[kind], stage="fwd-only")
    out, lse = step(*nhd(q, k, v), dropout_p=0, softmax_scale=0.3, causal=is_causal, window_size=(-1, -1), softcap=0.0,
                    alibi_slopes=None, return_softmax=False)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=0.3, enable_gqa=True)
    close(out.transpose(1, 2), expected)
    close(lse, lse_of(q, k, 0.3, torch.ones(30, 30).tril().bool() if is_causal else None))
    assert served_calls() == 1


@pytest.mark.parametrize("function", DENSE)
@pytest.mark.parametrize("more", [
    {"is_causal": True, "sm_scale": 0.3}, {"attn_mask": mask(2, 1, 1, 30)}, {"attn_mask": mask(2, 1, 30, 30)},
    {"causal": True, "softmax_scale": 0.3, **NEUTRAL}, {"return_lse": True}], ids=lambda more: "-".join(more))
def test_compiled(function, more):
    qkv = tensors()
    expected = function(*qkv, **more)
    before = report()
    found = torch.compile(lambda *qkv: function(*qkv, **more), backend="eager", fullgraph=True)(*qkv)
    for one, other in zip(*(x if isinstance(x, tuple) else (x,) for x in (found, expected))):
        assert torch.equal(one, other)
    assert report() == before, "compiled code counts nothing"


def test_compiled_with_options_and_packed_sequences():
    qkv, args = tensors(), packed([9, 21])

    def both(q, k, v, args):
        return F8(q, k, v, smooth_k=False, smooth_v=True), VARLEN(*args, is_causal=True, smooth_k=False)

    with use(Policy(options={"rotate": True})):
        expected = both(*qkv, args)
        found = torch.compile(both, backend="eager", fullgraph=True)(*qkv, args)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


@pytest.mark.kernels("sm80", "sm89", "sm90")
def test_names_that_hosts_look_for(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: [(8, 9), (9, 0)][index])
    assert core.get_cuda_arch_versions() == ["sm89", "sm90"]
    assert (core.SM80_ENABLED, core.SM89_ENABLED, core.SM90_ENABLED) == (True, True, True)
    with pytest.raises(AttributeError, match="module 'sageattention.core' has no attribute 'per_block_int8_triton'"):
        core.per_block_int8_triton
    probe = importlib.import_module("sageattention.sm90_compile")
    with pytest.raises(UnsupportedError, match="expected a call of sageattention.sageattn"):
        probe.qk_int8_sv_f8_accum_f32_fuse_v_scale_attn_inst_buf_fake_impl()


def test_a_build_without_kernels_for_hopper_says_so(monkeypatch):
    asked = []

    def explained(capability, headdim):
        asked.append(capability)
        return mock.Mock(error=None if capability == (8, 9) else "no kernels for this GPU")

    monkeypatch.setattr(core, "explain", explained)
    for name in ("SM89_ENABLED", "SM90_ENABLED"):
        monkeypatch.delitem(vars(core), name, raising=False)
    monkeypatch.delitem(sys.modules, "sageattention.sm90_compile", raising=False)
    with pytest.raises(ImportError, match="expected kernels for sm90, got none in the installed sage_aot"):
        importlib.import_module("sageattention.sm90_compile")
    assert core.SM89_ENABLED is True and asked == [(9, 0), (8, 9)]
    for name in ("SM89_ENABLED", "SM90_ENABLED"):
        monkeypatch.delitem(vars(core), name, raising=False)


def test_an_installed_sageattention_is_not_shadowed(tmp_path):
    metadata = tmp_path / "sageattention-2.2.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: sageattention\nVersion: 2.2.0\n")
    path = [str(tmp_path), str(Path(sageattention.__file__).parents[1]), str(Path(sage_aot.__file__).parents[1])]
    program = f"import sys; sys.path[:0] = {path}\nimport sageattention"
    done = subprocess.run([sys.executable, "-c", program], text=True, capture_output=True, check=False)
    assert done.returncode == 1 and "ImportError: expected one distribution with the package sageattention, got two: " \
        "sageattention 2.2.0 and sage-aot-sageattention" in done.stderr
    assert "pip uninstall sageattention sage-aot-sageattention" in done.stderr
    metadata.write_text("Metadata-Version: 2.1\nName: sageattn\nVersion: 2.2.0\n")
    metadata.parent.rename(tmp_path / "sageattn-2.2.0.dist-info")
    subprocess.run([sys.executable, "-c", program], check=True)
