"""References for quantized attention: attention in float64, input classes, and three measures of the difference.

The demo, the tests and the bench programs use this module; `attn` does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sage_aot._problem.mask import Mask, VisibleKeys

INPUT_CLASSES = ("normal", "outlier")
"""Input classes of most tests and tables."""

MIN_COSINE = 0.998
"""Least cosine of an output that is not broken: FP8 attention reaches 0.999 on normal inputs, and bf16 rounding costs
less than the difference."""

_SINK_NATS = {"sink13": 13.0, "sink15": 15.0}
_SIZE_OF_Q = {"peaked": 2.0, "diffuse": 0.3}  # factors of q
_HEAVY = {"heavy1": (12.0, 12.0, 1), "heavy4": (1.0, 30.0, 4)}  # factors of q and k, channels

HARD_CLASSES = (*_SINK_NATS, *_HEAVY, "ones")
"""Input classes that break 8-bit attention most."""

ALL_CLASSES = (*INPUT_CLASSES, *HARD_CLASSES, *_SIZE_OF_Q)
"""Every class that inputs() makes."""

_SCORES_AT_ONCE = 2**27  # elements of a float64 score matrix: 1 GB


@dataclass(frozen=True)
class Accuracy:
    """The distance of an output from its reference, over all elements at once. Source: SageAttention2, appendix A.7."""

    cosine: float  # Σ o·r / (√Σo² √Σr²)
    relative_l1: float  # Σ |o − r| / Σ |r|
    rmse: float  # √mean (o − r)²


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None = None,
              visible: VisibleKeys | None = None, **mask: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of [batch, heads, seq, headdim] tensors in float64: output and log-sum-exp.

    Grouped heads as :func:`sage_aot.attn`; a row that sees no key gives zeros and −inf. `mask`: the fields of
    :class:`sage_aot._problem.mask.Mask`, for example ``is_causal=True``; `visible`: the keys that rows see, instead of
    what these fields say.
    """
    if visible is None:
        visible = Mask(**mask).visible_keys(torch.arange(q.shape[2], device=q.device), q.shape[2], k.shape[2])
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    rows = max(1, _SCORES_AT_ONCE // max(1, q.shape[0] * q.shape[1] * k.shape[2]))
    parts = [_rows(q[:, :, first: first + rows], k, v, visible.of_rows(slice(first, first + rows)), scale)
             for first in range(0, q.shape[2], rows)]
    return torch.cat([out for out, _ in parts], 2), torch.cat([lse for _, lse in parts], 2)


def gradients(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad_out: torch.Tensor,
              **call: Any) -> tuple[torch.Tensor, ...]:
    """The output of :func:`attention`, and its gradients with respect to q, k and v, in float64. `call`: of it."""
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out, _ = attention(*leaves, **call)
    return out.detach(), *torch.autograd.grad(out, leaves, grad_out.double())


def measure(out: torch.Tensor, reference: torch.Tensor) -> Accuracy:
    """The difference between an output and its reference; NaN anywhere in the output gives NaN."""
    o, r = out.double().flatten(), reference.double().flatten()
    difference = o - r
    return Accuracy((o @ r / (o.norm() * r.norm())).item(), (difference.abs().sum() / r.abs().sum()).item(),
                    difference.square().mean().sqrt().item())


def relative_l2(out: torch.Tensor, reference: torch.Tensor) -> float:
    """√Σ (o − r)² / √Σ r², as the figures of other kernels on attention sinks are given."""
    difference: torch.Tensor = out.double() - reference.double()
    return float(difference.norm() / reference.double().norm())


def inputs(kind: str, q_shape: tuple[int, ...], kv_shape: tuple[int, ...], dtype: torch.dtype,
           generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v of one class, [batch, heads, seq, headdim], on the generator's device.

    ``"normal"`` is N(0, 1). ``"outlier"`` adds to every head and channel an offset, as drawings of real models show
    them: 3·N(0, 1) to q, 6·N(0, 1) to k, 2·N(0, 1) to v, and in one channel each 12, −15 and 8 more.
    ``"sink13"`` and ``"sink15"`` have an attention sink: one key, the first, whose score lies 13 or 15 above the mean
    of the others in every row, and whose value is small. V has a mean in every channel, N(0, 1).
    ``"heavy1"`` multiplies one channel of q and of k by 12, ``"heavy4"`` four of k by 30; ``"peaked"`` multiplies q by
    2, ``"diffuse"`` by 0.3. ``"ones"`` is N(0, 1) with a v of ones: every output is one. ValueError: no such class.
    """
    if kind not in ALL_CLASSES:
        raise ValueError(f"expected one of {', '.join(ALL_CLASSES)}, got {kind!r}")

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=generator.device, dtype=torch.float32)

    tensors = [normal(*shape) for shape in (q_shape, kv_shape, kv_shape)]
    if kind == "outlier":
        peaks = ((3, 3.0, 12.0), (7, 6.0, -15.0), (5, 2.0, 8.0))  # channel, size of the offsets, offset of the channel
        for tensor, (channel, size, offset) in zip(tensors, peaks):
            tensor += size * normal(1, tensor.shape[1], 1, tensor.shape[3])
            tensor[..., channel % tensor.shape[3]] += offset
    elif kind in _SINK_NATS:
        make_sink(_SINK_NATS[kind], normal, *tensors)
    elif kind in _HEAVY:
        of_q, of_k, count = _HEAVY[kind]
        tensors[0][..., 3:3 + count] *= of_q
        tensors[1][..., 3:3 + count] *= of_k
    elif kind in _SIZE_OF_Q:
        tensors[0] *= _SIZE_OF_Q[kind]
    elif kind == "ones":
        tensors[2].fill_(1.0)
    q, k, v = (tensor.to(dtype) for tensor in tensors)
    return q, k, v


def make_sink(nats: float, normal: Callable[..., torch.Tensor], q: torch.Tensor, k: torch.Tensor,
               v: torch.Tensor) -> None:
    """Changes N(0, 1): the first key's score lies `nats` above the mean of the others' in every row. Queries share a
    direction, that only the first key has a part in; scores are divided by √headdim."""
    headdim = q.shape[-1]
    direction = normal(headdim).sign()
    q += direction
    k -= (k @ direction / headdim)[..., None] * direction
    k[:, :, 0] = nats / math.sqrt(headdim) * direction
    v += normal(1, v.shape[1], 1, headdim)
    v[:, :, 0] *= 0.05


def _rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: VisibleKeys,
          scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    scores = q.double() @ k.transpose(2, 3) * scale
    scores.masked_fill_(~visible.contains(torch.arange(k.shape[2], device=q.device)), -math.inf)
    lse = scores.logsumexp(-1)
    return (scores - lse.clamp(min=-1e300)[..., None]).exp() @ v, lse
