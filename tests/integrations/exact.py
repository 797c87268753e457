"""Exact attention to put in the place of sage_aot.attn, what the report counts, and names of tests of calls."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from blocks import chosen_by, with_dense_blocks

from sage_aot.integrations import report


def attention(q, k, v, *, key_mask=None, sinks=None, attn_mask=None, is_causal=False, window=None, scale=None,
              layout="HND", return_lse=False, sparse=None, block_mask=None):
    """Compute sage_aot.attn exactly: causal mask and window are aligned bottom-right; rows that see no key are zero."""
    assert window is None or window != (-1, -1) and all(side >= -1 for side in window)
    assert sinks is None or sinks.dtype == torch.float32 and sinks.shape == (q.shape[1 if layout == "HND" else 2],)
    assert attn_mask is None or attn_mask.dtype == torch.bool
    if layout == "NHD":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = q.double() @ k.transpose(2, 3) * (q.shape[-1] ** -0.5 if scale is None else scale)
    seen, ahead = torch.ones(scores.shape[-2:], dtype=torch.bool), k.shape[2] - q.shape[2]
    left, right = window or (-1, -1)
    if is_causal or right >= 0:
        seen = seen.tril(ahead + (0 if is_causal else right))
    if left >= 0:
        seen = seen.triu(ahead - left)
    if key_mask is not None:
        seen = seen & key_mask[:, None, None, :]
    if attn_mask is not None:
        seen = seen & attn_mask
    if sparse is not None:
        chosen = chosen_by(sparse, q, k)
        is_text = torch.zeros(k.shape[2], dtype=torch.bool)
        for begin, end in getattr(sparse, "text", ()):  # of the adapter of diffusers
            is_text[begin:end] = True
        seen = seen & with_dense_blocks(chosen, is_text)
    if block_mask is not None:
        seen = seen & block_mask.blocks.repeat_interleave(64, 2).repeat_interleave(64, 3)[
            :, :, :q.shape[2], :k.shape[2]]
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:  # a column more, which has no value
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(*scores.shape[:-1], 1)], -1)
    out = (scores.softmax(-1).nan_to_num(0.0)[..., :k.shape[2]] @ v).to(q.dtype)
    out = out.transpose(1, 2).contiguous() if layout == "NHD" else out
    return (out, scores.logsumexp(-1).float()) if return_lse else out


def served_calls() -> int:
    return report().get("sage_aot", 0)


def id_of(options: Mapping[str, object]) -> str:
    """Name of a test of these keyword arguments. Tensors are named by their shape: processes that share tests must
    name them alike."""
    return ", ".join(f"{name}={list(value.shape) if isinstance(value, torch.Tensor) else value}"
                     for name, value in options.items()) or "defaults"
