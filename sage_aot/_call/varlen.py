"""The public call on sequences of several lengths in one tensor: :func:`attn_varlen`."""

from __future__ import annotations

from typing import Literal, overload

import torch

from sage_aot._call.forms import attend, call_of_attn_varlen
from sage_aot._problem.options import Asked


@overload
def attn_varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor,
                cu_seqlens_k: torch.Tensor, max_seqlen_q: int, max_seqlen_k: int, *,
                sinks: torch.Tensor | None = ..., is_causal: bool = ..., scale: float | None = ..., qk: str = ...,
                smooth_q: bool | str = ..., smooth_k: bool = ..., smooth_v: bool = ..., rotate: bool | str = ...,
                clip: bool = ..., pv_accum: str = ..., p: str = ..., window: tuple[int, int] | None = ...,
                return_lse: Literal[False] = ..., out: torch.Tensor | None = ...) -> torch.Tensor: ...


@overload
def attn_varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor,
                cu_seqlens_k: torch.Tensor, max_seqlen_q: int, max_seqlen_k: int, *,
                sinks: torch.Tensor | None = ..., is_causal: bool = ..., scale: float | None = ..., qk: str = ...,
                smooth_q: bool | str = ..., smooth_k: bool = ..., smooth_v: bool = ..., rotate: bool | str = ...,
                clip: bool = ..., pv_accum: str = ..., p: str = ..., window: tuple[int, int] | None = ...,
                return_lse: Literal[True], out: torch.Tensor | None = ...) -> tuple[torch.Tensor, torch.Tensor]: ...


def attn_varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor,
                cu_seqlens_k: torch.Tensor, max_seqlen_q: int, max_seqlen_k: int, *,
                sinks: torch.Tensor | None = None, is_causal: bool = False, scale: float | None = None,
                qk: str = "auto", smooth_q: bool | str = "auto", smooth_k: bool = True, smooth_v: bool = False,
                rotate: bool | str = "auto", clip: bool = True, pv_accum: str = "auto", p: str = "auto",
                window: tuple[int, int] | None = None, return_lse: bool = False,
                out: torch.Tensor | None = None) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """:func:`sage_aot.attn` on sequences of several lengths in one tensor, without padding.

    Sequence b of q is the rows from ``cu_seqlens_q[b]`` to ``cu_seqlens_q[b + 1] - 1``, and sees sequence b of k and v
    alone. Bits equal those of :func:`sage_aot.attn` on each sequence, except where attn splits keys or packs the heads
    of a single query otherwise. Calls with equal numbers of tokens and sequences, and equal longest
    lengths, are prepared once; the first of such a kind takes a few hundred microseconds more, so round these numbers
    up where they change from call to call.

    Args:
        q: ``[tokens, q heads, headdim]``, float16, bfloat16 or float32. Any strides with a contiguous last dimension;
            headdim from 1 to 256.
        k, v: likewise with ``kv heads`` and their own number of tokens; same dtype and device as q.
        cu_seqlens_q, cu_seqlens_k: int32 ``[sequences + 1]`` on the device of q: where sequences begin, and where the
            last ends. They are read on the device, so nothing checks their values: the first must be 0, no value may be
            less than the one before it, and none more than the number of tokens. A sequence may have no queries, or no
            keys: its output is then zeros. Rows behind the last sequence are not written.
        max_seqlen_q, max_seqlen_k: at least the length of the longest sequence, integers of Python or NumPy; or a
            tensor of one integer, which the call reads, and waits for where it is on a GPU. A longer sequence is cut:
            the call sees that many of its first queries and keys, causal masks count these alone, and rows of other
            queries are not written. Where either is 0, or there is no sequence or no key at all, all of the output is
            zeros.
        is_causal: query i of a sequence sees the keys ``j <= i + keys - queries`` of it, aligned bottom-right.
        window: ``(left, right)``, of each sequence, as :func:`sage_aot.attn` has it.
        sinks: float32 ``[q heads]``, likewise.
        scale, qk, smooth_q, smooth_k, smooth_v, rotate, clip, pv_accum, p: as :func:`sage_aot.attn`.
        return_lse: also return the log-sum-exp, float32 ``[q heads, tokens]``.
        out: tensor like q to write to.

    Returns:
        Attention ``[tokens, q heads, headdim]``, contiguous, in the dtype of q; with `return_lse` the log-sum-exp too.

    Raises:
        ArgumentError, UnsupportedError, CubinError, LaunchError: as :func:`sage_aot.attn`.

    Source: the conventions of FlashAttention's ``flash_attn_varlen_func``.

    >>> import torch, sage_aot
    >>> q, k, v = torch.randn(3, 100, 2, 64, dtype=torch.bfloat16)
    >>> begins = torch.tensor([0, 70, 100], dtype=torch.int32)
    >>> sage_aot.attn_varlen(q, k, v, begins, begins, 70, 70, is_causal=True).shape
    torch.Size([100, 2, 64])
    """
    asked = Asked(is_causal, scale, "HND", qk, smooth_q, smooth_k, smooth_v, rotate, clip, pv_accum, p, window)
    call = call_of_attn_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, asked, sinks=sinks)
    return attend(call, out, return_lse)
