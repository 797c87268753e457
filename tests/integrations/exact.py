"""Exact attention to put in the place of sage_aot.attn, and what the report counts."""

from __future__ import annotations

import torch

from sage_aot.integrations import report


def attention(q, k, v, *, key_mask=None, is_causal=False, scale=None, layout="HND", return_lse=False):
    """As sage_aot.attn: the causal mask is aligned bottom-right; rows that see no key are zero."""
    if layout == "NHD":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = q.double() @ k.transpose(2, 3) * (q.shape[-1] ** -0.5 if scale is None else scale)
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool)
    if is_causal:
        seen = seen.tril(k.shape[2] - q.shape[2])
    if key_mask is not None:
        seen = seen & key_mask[:, None, None, :]
    scores = scores.masked_fill(~seen, -torch.inf)
    out = (scores.softmax(-1).nan_to_num(0.0) @ v).to(q.dtype)
    out = out.transpose(1, 2).contiguous() if layout == "NHD" else out
    return (out, scores.logsumexp(-1).float()) if return_lse else out


def served_calls() -> int:
    return report().get("sage_aot", 0)
