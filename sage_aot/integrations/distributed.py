"""Attention of one step of a ring, for libraries that share the tokens of a sequence among processes.

    yunchang    LongContextAttention(ring_impl_type="basic", attn_type=None, attn_processor=ring_forward)
    torch       _templated_ring_attention(group, 2, ring_op, q, k, v, is_causal=True)

A step is served also where sage_aot is slower: the steps are merged by their log-sum-exps, and a ring has one
implementation for all. What sage_aot does not compute raises UnsupportedError. diffusers has context parallelism of its
own (:mod:`sage_aot.integrations.diffusers`).
"""

from __future__ import annotations

import torch

from sage_aot.integrations._report import refused
from sage_aot.integrations._rules import NO_WINDOW, HostCall, check_neutral, window_of
from sage_aot.integrations._serve import serve_with_lse

_OTHERWISE = "choose the library's own attention for the ring"


def ring_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float = 0.0,
                 softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
                 softcap: float = 0.0, alibi_slopes: torch.Tensor | None = None,
                 return_softmax: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """A forward with the arguments of FlashAttention, as yunchang calls it.

    Args:
        q, k, v: ``[batch, seq, heads, headdim]``; k and v may have fewer heads.
        dropout_p, window_size, softcap, alibi_slopes, return_softmax: their defaults, which change nothing. A window
            counts from places in the whole sequence, which a step of a ring is not told.
        softmax_scale: None means ``1 / sqrt(headdim)``.
        causal: aligned bottom-right.

    Returns:
        The output, like q, and the log-sum-exp, float32, natural log, ``[batch, heads, seq]``.

    Raises:
        UnsupportedError: another value of an argument that has to be its default, or tensors that sage_aot does not
            take.
    """
    check_neutral({"softcap": softcap, "alibi_slopes": alibi_slopes, "return_softmax": return_softmax}, _OTHERWISE)
    if window_of(window_size) is not None:
        raise refused("the argument window_size", f"window_size: expected {NO_WINDOW}, got {window_size!r}, which "
                                                  f"counts from places in the whole sequence; {_OTHERWISE}")
    call = HostCall(q, k, v, None, causal, softmax_scale, dropout_p, "NHD", grouped=True, bottom_right=True)
    return serve_with_lse(call, _OTHERWISE)


def ring_op(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, is_causal: bool = False,
            dropout_p: float = 0.0, scale: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The `op` of torch's ring template.

    Args:
        query, key, value: ``[batch, heads, seq, headdim]``; key and value may have fewer heads.
        is_causal: aligned top-left.
        dropout_p: 0.
        scale: None means ``1 / sqrt(headdim)``.

    Returns:
        The output, like query, and the log-sum-exp, float32, natural log, ``[batch, heads, seq]``.

    Raises:
        UnsupportedError: tensors that sage_aot does not take.
    """
    call = HostCall(query, key, value, None, is_causal, scale, dropout_p, grouped=True)
    return serve_with_lse(call, _OTHERWISE)
