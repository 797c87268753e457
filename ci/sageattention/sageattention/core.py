"""The functions of SageAttention 2.2 (thu-ml/SageAttention at d1a57a5), with its signatures, by :func:`sage_aot.attn`.

SageAttention's functions drop keyword arguments that they do not have, among them masks, scales and causal masks that
hosts pass under the names of other libraries. Here every function takes these keyword arguments in addition to those of
its signature, and raises TypeError for any other:

    attn_mask                    bool, True = attend, or numbers to add to the scores; broadcasts to
                                 [batch, q heads, queries, keys]
    softmax_scale, scale         sm_scale, as FlashAttention and torch name it
    causal                       is_causal, as FlashAttention names it, and aligned bottom-right as there
    window_size                  (left, right): the window of FlashAttention, aligned bottom-right as there
    enable_gqa                   of torch; changes nothing: k and v may always have fewer heads
    dropout_p                    0
    softcap, alibi_slopes, return_softmax      of FlashAttention: the values that change nothing
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from sage_aot._call.varlen import attn_varlen
from sage_aot._problem.arguments import check_tensors_are
from sage_aot._problem.options import LAYOUTS, OPTIONS
from sage_aot._tools.explain import explain
from sage_aot.errors import ArgumentError
from sage_aot.integrations._policy import current
from sage_aot.integrations._report import SERVED, count, refused
from sage_aot.integrations._rules import (
    NEUTRAL,
    NO_WINDOW,
    HostCall,
    check_neutral,
    why_not_computed,
    window_of,
)
from sage_aot.integrations._serve import attend, serve_anyway
from sage_aot.integrations.torch import torchs

_OTHERWISE = "let another attention of the host compute it"

_ALSO: Mapping[str, Any] = {"attn_mask": None, "softmax_scale": None, "scale": None, "causal": None, "enable_gqa": True,
                            "dropout_p": 0.0, "window_size": NO_WINDOW, **NEUTRAL}
"""The keyword arguments that all functions take in addition to their signatures, and what they are where not given."""

_GRANULARITIES = "per_warp", "per_thread"
_F16_SUMS = "fp32", "fp16", "fp16+fp32"
_F8_SUMS = "fp32+fp16", "fp32", "fp32+fp32"


# --- the functions ----------------------------------------------------------------------------------------------------


def sageattn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tensor_layout: str = "HND", is_causal: bool = False,
             sm_scale: float | None = None, return_lse: bool = False,
             **kwargs: Any) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention by the kernels that sage_aot has for the GPU, with the options of the process's policy
    (:class:`sage_aot.integrations.Policy`). CPU tensors are emulated.

    Args:
        q: ``[batch, q heads, queries, headdim]`` for tensor_layout ``"HND"``, ``[batch, queries, q heads, headdim]``
            for ``"NHD"``; float16, bfloat16 or float32; headdim from 1 to 256.
        k, v: likewise with ``kv heads`` and ``keys``. q heads must be a multiple of kv heads.
        is_causal: query i sees the keys up to i, aligned top-left; not with more queries than keys. SageAttention
            documents it for as many queries as keys.
        sm_scale: factor on q·kᵀ; None means ``1 / sqrt(headdim)``.
        return_lse: also return the log-sum-exp of each row of q·kᵀ·sm_scale, float32, natural log,
            ``[batch, q heads, queries]``.
        kwargs: those that this module's docstring lists. ``smooth_k`` is taken and ignored, as in SageAttention:
            ComfyUI passes ``smooth_k=False``, and SageAttention smooths k all the same.

    The kernels take an `attn_mask` that is bool. A call with a mask of numbers goes to torch's attention where no
    log-sum-exp is asked for, and :func:`sage_aot.integrations.report` counts it; with ``Policy(otherwise="raise")`` it
    raises. `attn_mask` is not in the signature, as in SageAttention: ComfyUI looks for it there, and computes masked
    calls itself where it finds none.

    Raises:
        TypeError: an unknown keyword argument.
        ArgumentError: an argument is not as described.
        UnsupportedError: sage_aot does not compute the call (gradients, dropout, dtypes that differ, ...), or has no
            kernel for the GPU.
    """
    return _attend("sageattn", q, k, v, tensor_layout, is_causal, sm_scale, return_lse,
                   {name: value for name, value in kwargs.items() if name != "smooth_k"})


def sageattn_qk_int8_pv_fp16_triton(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tensor_layout: str = "HND",
                                    quantization_backend: str = "triton", is_causal: bool = False,
                                    attn_mask: torch.Tensor | None = None, sm_scale: float | None = None,
                                    smooth_k: bool = True, return_lse: bool = False,
                                    **kwargs: Any) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute :func:`sageattn`, which chooses the types of P and V by the GPU, whatever the function's name.

    Args:
        quantization_backend: ``"triton"`` or ``"cuda"``; changes nothing.
        smooth_k: subtract a mean from k before quantizing.
        q, k, v, tensor_layout, is_causal, attn_mask, sm_scale, return_lse, kwargs: as there.
    """
    _check_choice("quantization_backend", quantization_backend, ("triton", "cuda"))
    return _attend("sageattn_qk_int8_pv_fp16_triton", q, k, v, tensor_layout, is_causal, sm_scale, return_lse,
                   {**kwargs, "attn_mask": attn_mask}, smooth_k=smooth_k)


def sageattn_qk_int8_pv_fp16_cuda(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tensor_layout: str = "HND",
                                  is_causal: bool = False, qk_quant_gran: str = "per_thread",
                                  sm_scale: float | None = None, pv_accum_dtype: str = "fp32", smooth_k: bool = True,
                                  smooth_v: bool = False, return_lse: bool = False,
                                  **kwargs: Any) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute :func:`sageattn`, which chooses the types of P and V by the GPU, whatever the function's name.

    Args:
        qk_quant_gran: ``"per_warp"`` or ``"per_thread"``; changes nothing: the scales of q and k are per thread.
        pv_accum_dtype: ``"fp32"``, ``"fp16"`` or ``"fp16+fp32"``; changes nothing: sums are in f32, those of FP8
            products before sm120 in two levels.
        smooth_k, smooth_v: subtract a mean from k, or v, before quantizing.
        q, k, v, tensor_layout, is_causal, sm_scale, return_lse, kwargs: as there.
    """
    _check_choice("qk_quant_gran", qk_quant_gran, _GRANULARITIES)
    _check_choice("pv_accum_dtype", pv_accum_dtype, _F16_SUMS)
    return _attend("sageattn_qk_int8_pv_fp16_cuda", q, k, v, tensor_layout, is_causal, sm_scale, return_lse, kwargs,
                   smooth_k=smooth_k, smooth_v=smooth_v)


def sageattn_qk_int8_pv_fp8_cuda(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tensor_layout: str = "HND",
                                 is_causal: bool = False, qk_quant_gran: str = "per_thread",
                                 sm_scale: float | None = None, pv_accum_dtype: str = "fp32+fp16",
                                 smooth_k: bool = True, smooth_v: bool = False, return_lse: bool = False,
                                 **kwargs: Any) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute :func:`sageattn_qk_int8_pv_fp16_cuda`, with `pv_accum_dtype` ``"fp32"``, ``"fp32+fp32"`` or
    ``"fp32+fp16"``."""
    _check_choice("qk_quant_gran", qk_quant_gran, _GRANULARITIES)
    _check_choice("pv_accum_dtype", pv_accum_dtype, _F8_SUMS)
    return _attend("sageattn_qk_int8_pv_fp8_cuda", q, k, v, tensor_layout, is_causal, sm_scale, return_lse, kwargs,
                   smooth_k=smooth_k, smooth_v=smooth_v)


def sageattn_qk_int8_pv_fp8_cuda_sm90(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tensor_layout: str = "HND",
                                      is_causal: bool = False, qk_quant_gran: str = "per_thread",
                                      sm_scale: float | None = None, pv_accum_dtype: str = "fp32+fp32",
                                      smooth_k: bool = True, return_lse: bool = False,
                                      **kwargs: Any) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute :func:`sageattn_qk_int8_pv_fp8_cuda`, on any GPU, without `smooth_v`."""
    _check_choice("qk_quant_gran", qk_quant_gran, _GRANULARITIES)
    _check_choice("pv_accum_dtype", pv_accum_dtype, _F8_SUMS)
    return _attend("sageattn_qk_int8_pv_fp8_cuda_sm90", q, k, v, tensor_layout, is_causal, sm_scale, return_lse, kwargs,
                   smooth_k=smooth_k)


def sageattn_varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor,
                    cu_seqlens_k: torch.Tensor, max_seqlen_q: int, max_seqlen_k: int, is_causal: bool = False,
                    sm_scale: float | None = None, smooth_k: bool = True, **kwargs: Any) -> torch.Tensor:
    """:func:`sage_aot.attn_varlen`: sequences of several lengths in one tensor.

    Args:
        q: ``[tokens, q heads, headdim]``.
        k, v: likewise with ``kv heads``, and their own number of tokens.
        cu_seqlens_q, cu_seqlens_k: int32 or int64 ``[sequences + 1]``: where sequences begin, and where the last ends.
        max_seqlen_q, max_seqlen_k: at least the length of the longest sequence.
        is_causal: for sequences with as many queries as keys. Their lengths stand on the device, where nothing checks
            them; tokens or longest lengths that differ are refused. ``causal``, as FlashAttention names it, takes all
            lengths, and is aligned bottom-right.
        sm_scale, smooth_k, kwargs: as the functions above; no `attn_mask`.

    Returns:
        ``[tokens, q heads, headdim]``.

    Raises:
        TypeError, ArgumentError, UnsupportedError: as :func:`sageattn`.
    """
    given = _given("sageattn_varlen", is_causal, sm_scale, kwargs)
    check_tensors_are(q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    if given.mask is not None:
        raise refused("attn_mask of packed sequences", f"attn_mask: expected None for packed sequences, got a tensor "
                                                       f"of shape {tuple(given.mask.shape)}; {_OTHERWISE}")
    if given.dropout != 0:
        raise refused("dropout_p of packed sequences", f"dropout_p: expected 0 for packed sequences, got "
                                                       f"{given.dropout!r}; {_OTHERWISE}")
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        raise refused("gradients", f"expected tensors that require no gradients, got some that do; {_OTHERWISE}")
    if given.is_causal and not given.bottom_right and (q.shape[:1], max_seqlen_q) != (k.shape[:1], max_seqlen_k):
        raise refused("is_causal of unequal sequences",
                      f"is_causal: expected sequences with as many queries as keys, got {q.shape[:1].numel()} and "
                      f"{k.shape[:1].numel()} tokens, the longest of {max_seqlen_q} and {max_seqlen_k}; for a mask "
                      f"that is aligned bottom-right pass causal=True")
    cu_seqlens_q, cu_seqlens_k = (x.int() if x.dtype == torch.int64 else x for x in (cu_seqlens_q, cu_seqlens_k))
    options = {**current().options, **_changed(smooth_k=smooth_k)}
    out: torch.Tensor = attn_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                                    is_causal=given.is_causal, window=given.window, scale=given.scale, **options)
    count(SERVED)
    return out


# --- what they share --------------------------------------------------------------------------------------------------


class _Given(NamedTuple):
    """Arguments of a call, whatever their names."""

    mask: torch.Tensor | None
    scale: float | None
    dropout: float
    is_causal: bool
    bottom_right: bool
    window: tuple[int, int] | None


def _given(function: str, is_causal: bool, sm_scale: float | None, kwargs: Mapping[str, Any]) -> _Given:
    for name in kwargs:
        if name not in _ALSO:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}; in addition to its signature "
                            f"it takes {', '.join(_ALSO)}")
    also = {**_ALSO, **kwargs}
    check_neutral(also, _OTHERWISE)
    if also["attn_mask"] is not None:
        check_tensors_are(attn_mask=also["attn_mask"])
    causal = also["causal"]
    if is_causal and causal is not None and not causal:
        raise ArgumentError(f"is_causal: expected one value, got {is_causal!r} and causal={causal!r}; pass is_causal")
    scale = _one_of(sm_scale=sm_scale, softmax_scale=also["softmax_scale"], scale=also["scale"])
    is_bottom_right = bool(causal) or not is_causal  # as FlashAttention's window is
    return _Given(also["attn_mask"], scale, also["dropout_p"], is_causal if causal is None else causal, is_bottom_right,
                  window_of(also["window_size"]))


def _one_of(**scales: float | None) -> float | None:
    """The scale that is given, under any of its names."""
    given = {name: scale for name, scale in scales.items() if scale is not None}
    first = next(iter(given.values()), None)
    if any(scale != first for scale in given.values()):
        raise ArgumentError(f"sm_scale: expected one value, got {given}; pass sm_scale alone")
    return first


def _check_choice(name: str, given: object, choices: Collection[str]) -> None:
    if given not in choices:
        raise ArgumentError(f"{name}: expected {' or '.join(map(repr, choices))}, got {given!r}")


def _changed(**options: bool) -> dict[str, bool]:
    """The options that are not sage_aot's defaults; for the others the policy's hold."""
    return {name: value for name, value in options.items() if value is not OPTIONS[name].default}


def _attend(function: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tensor_layout: str, is_causal: bool,
            sm_scale: float | None, return_lse: bool, kwargs: Mapping[str, Any],
            **options: bool) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """A call by sage_aot whatever is faster, since the host asks for SageAttention; or by torch for its mask alone."""
    given = _given(function, is_causal, sm_scale, kwargs)
    check_tensors_are(q=q, k=k, v=v)
    _check_choice("tensor_layout", tensor_layout, LAYOUTS)
    call = HostCall(q, k, v, given.mask, given.is_causal, given.scale, given.dropout, tensor_layout, grouped=True,
                    bottom_right=given.bottom_right, window=given.window)
    changed = _changed(**options)
    if _torch_serves_the_mask(call, return_lse):
        policy = replace(current(), when="possible", options={**current().options, **changed})
        result = attend(call, lambda: _by_torch(call), policy=policy)
    else:
        result = serve_anyway(call, _OTHERWISE, return_lse, **changed)
    made: torch.Tensor | tuple[torch.Tensor, torch.Tensor] = result
    return made


def _torch_serves_the_mask(call: HostCall, return_lse: bool) -> bool:
    """True where torch computes the call if sage_aot refuses it for its mask: torch takes no causal mask or window
    with another, and returns no log-sum-exp."""
    if call.mask is None or call.is_causal or call.window is not None or return_lse:
        return False
    return why_not_computed(call._replace(mask=None)) is None


def _by_torch(call: HostCall) -> torch.Tensor:
    q, k, v = call[:3] if call.layout == "HND" else (x.transpose(1, 2) for x in call[:3])
    # not by the attribute of torch.nn.functional, in whose place some programs put sageattn
    out = torchs(q, k, v, call.mask, scale=call.scale, enable_gqa=q.size(1) != k.size(1))
    return out if call.layout == "HND" else out.transpose(1, 2).contiguous()


# --- what hosts ask about GPUs ----------------------------------------------------------------------------------------


def get_cuda_arch_versions() -> list[str]:
    """The compute capability of each GPU, such as ``["sm90"]``. KJNodes and scripts of installation ask."""
    return ["sm{}{}".format(*torch.cuda.get_device_capability(index)) for index in range(torch.cuda.device_count())]


_CAPABILITIES = {"SM80_ENABLED": (8, 0), "SM89_ENABLED": (8, 9), "SM90_ENABLED": (9, 0)}


def __getattr__(name: str) -> bool:
    """``SM80_ENABLED``, ``SM89_ENABLED``, ``SM90_ENABLED``: whether the installed kernels run on such a GPU. Scripts of
    installation and hosts that choose a function by the GPU ask. Read on first use: the manifest takes milliseconds."""
    if name not in _CAPABILITIES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = explain(capability=_CAPABILITIES[name], headdim=128).error is None
    return found
