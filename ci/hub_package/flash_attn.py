"""Two functions of FlashAttention-2, as transformers calls them, by those of SageAttention.

transformers hands an argument over where the signature has it, and drops most others without a word. `s_aux` is
therefore in the signatures, and refused.
"""

from __future__ import annotations

import torch
from sageattention.core import sageattn, sageattn_varlen

from sage_aot.integrations._report import refused


def flash_attn_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float = 0.0,
                    softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
                    softcap: float = 0.0, alibi_slopes: torch.Tensor | None = None, deterministic: bool = False,
                    return_attn_probs: bool = False, *, s_aux: torch.Tensor | None = None
                    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, None]:
    """Attention of ``[batch, seq, heads, headdim]``; k and v may have fewer heads. CPU tensors are emulated.

    Args:
        q, k, v: float16, bfloat16 or float32; headdim from 1 to 256.
        dropout_p, softcap, alibi_slopes, s_aux: their defaults, which change nothing.
        softmax_scale: None means ``1 / sqrt(headdim)``.
        causal: aligned bottom-right.
        window_size: how many keys a query sees in front of its own and behind it, −1 for all; aligned bottom-right.
        deterministic: changes nothing: equal calls on one GPU give equal bits.
        return_attn_probs: also return the log-sum-exp, float32, natural log, ``[batch, heads, seq]``, and None in the
            place of the probabilities.

    Raises:
        ArgumentError: an argument is not as described.
        UnsupportedError: another value of an argument that has to be its default; tensors that require gradients; or no
            kernel for the GPU.
    """
    _check_no_sinks(s_aux)
    made = sageattn(q, k, v, "NHD", causal=causal, softmax_scale=softmax_scale, dropout_p=dropout_p,
                    window_size=window_size, softcap=softcap, alibi_slopes=alibi_slopes, return_lse=return_attn_probs)
    return made if isinstance(made, torch.Tensor) else (*made, None)


def flash_attn_varlen_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor,
                           cu_seqlens_k: torch.Tensor, max_seqlen_q: int, max_seqlen_k: int, dropout_p: float = 0.0,
                           softmax_scale: float | None = None, causal: bool = False,
                           window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
                           alibi_slopes: torch.Tensor | None = None, deterministic: bool = False, *,
                           s_aux: torch.Tensor | None = None) -> torch.Tensor:
    """Compute :func:`flash_attn_func` of sequences of several lengths in one tensor ``[tokens, heads, headdim]``.

    Args:
        cu_seqlens_q, cu_seqlens_k: int32 or int64 ``[sequences + 1]``: where sequences begin, and where the last ends.
        max_seqlen_q, max_seqlen_k: at least the length of the longest sequence.
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, s_aux: as there.

    Raises:
        ArgumentError, UnsupportedError: as :func:`flash_attn_func`.
    """
    _check_no_sinks(s_aux)
    return sageattn_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=causal,
                           softmax_scale=softmax_scale, dropout_p=dropout_p, window_size=window_size, softcap=softcap,
                           alibi_slopes=alibi_slopes)


def _check_no_sinks(s_aux: torch.Tensor | None) -> None:
    if s_aux is not None:
        raise refused("attention sinks", f"s_aux: expected None, got a tensor of shape {tuple(s_aux.shape)}; let "
                                         f"another attention of the host compute it")
