"""NVFP4 in torch, as numerics/nvfp4.cuh and attn/mma/nvfp4.cuh have it: e2m1 in groups of 16 with a scale in e4m3."""

from __future__ import annotations

import torch

from sage_aot._backends.emulation.arithmetic import E4M3_LIMIT, cut_to_f32, fma, to_f32

GROUP = 16
E2M1_LIMIT = 6.0
LIMIT = E2M1_LIMIT * E4M3_LIMIT
SCALED_LIMIT = 4.0 * E4M3_LIMIT
"""Limit of what is quantized by :func:`to_nvfp4`."""

_SIXTH = to_f32(1.0 / E2M1_LIMIT)
_LOG2_E2M1 = to_f32(2.5849625)
_LEAST_LOG2_SCALE = -9.0  # of a scale that is not zero
_MOST_LOG2_IN_GROUP = to_f32(2.678072)  # of P in units of its group's scale

_CHANNELS = 64
"""Channels of one product."""


def to_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Rounded to e2m1 and back: nearest, ties to even, saturating."""
    magnitude = x.abs().clamp(max=E2M1_LIMIT)
    unit = torch.where(magnitude < 2.0, 0.5, torch.where(magnitude < 4.0, 1.0, 2.0))
    return torch.copysign((magnitude / unit).round() * unit, x)


def to_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Rounded to e4m3 and back: nearest even, saturating."""
    return x.clamp(max=E4M3_LIMIT).to(torch.float8_e4m3fn).float()


def to_nvfp4(x: torch.Tensor, lanes: int = 2) -> torch.Tensor:
    """Rounded to NVFP4 and back; the elements of a group are neighbours in the last dimension, of which `lanes` lanes
    have the same number each. Of the scales that take a group's largest magnitude to 6 and to 4 it takes the better."""
    groups = torch.unflatten(x, -1, (-1, GROUP))
    amax = groups.abs().amax(-1, keepdim=True)
    (to_six, error_of_six), (to_four, error_of_four) = (
        _with_scale(groups, to_e4m3(amax * factor), lanes) for factor in (_SIXTH, 0.25))
    return torch.where((error_of_four < error_of_six)[..., None], to_four, to_six).flatten(-2)


def _with_scale(groups: torch.Tensor, scale: torch.Tensor, lanes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Groups rounded with a scale each, and their squared errors: a lane's elements in order, then pairs of lanes."""
    rounded = to_e2m1(groups * torch.where(scale > 0, 1.0 / scale, 0.0)) * scale  # exact
    lost = torch.unflatten(rounded - groups, -1, (lanes, -1))
    error = torch.zeros_like(lost[..., 0])
    for of_element in lost.unbind(-1):
        error = fma(of_element, of_element, error)
    while error.shape[-1] > 1:
        lower, upper = error.chunk(2, -1)
        error = lower + upper
    return rounded, error[..., 0]


def columns_of_keys(keys: int) -> torch.Tensor:
    """Per column of the P operand the key whose P stands there: tile/layout.cuh, key_of_column()."""
    column = torch.arange(keys)
    t, e = column // 8 % 4, column % 8
    return column // 32 * 32 + 8 * (e // 2) + 2 * t + e % 2


def v_to_nvfp4(v: torch.Tensor) -> torch.Tensor:
    """V of a KV tile, [..., keys, channels], rounded and back: groups of columns of the P operand, a channel each."""
    order = columns_of_keys(v.shape[-2]).to(v.device)
    rounded = torch.empty_like(v)
    rounded[..., order, :] = to_nvfp4(v[..., order, :].transpose(-1, -2), lanes=4).transpose(-1, -2)
    return rounded


def scores(q: torch.Tensor, k: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """start + q · kᵀ in accumulators that a product of 64 channels leaves cut off to f32."""
    total = start
    for q_part, k_part in zip(torch.split(q, _CHANNELS, -1), torch.split(k, _CHANNELS, -1)):
        total = cut_to_f32(total.double() + q_part.double() @ k_part.double().transpose(-1, -2))
    return total


def p_of(scores: torch.Tensor, scale: torch.Tensor, row_ref: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """P relative to the rows' references, 2^(scores · scale - row_ref), and P rounded to NVFP4. Both are zero where the
    scale of a group is."""
    order = columns_of_keys(scores.shape[-1]).to(scores.device)
    offset = -row_ref[..., None]
    x, factor = (torch.unflatten(x[..., order].double(), -1, (-1, GROUP)) for x in (scores, scale))

    def exponents(of_groups: torch.Tensor) -> torch.Tensor:
        """One FMA for each element."""
        return (x * factor + of_groups.double()[..., None]).float()

    group_scale = to_e4m3(torch.exp2(exponents((offset - _LOG2_E2M1).expand(x.shape[:-1])).amax(-1)))
    # P in units of its group's scale.
    logs = exponents(offset - group_scale.log2().clamp(min=_LEAST_LOG2_SCALE))
    in_group = torch.exp2(logs.clamp(max=_MOST_LOG2_IN_GROUP))
    p, rounded = torch.empty_like(scores), torch.empty_like(scores)
    p[..., order] = (in_group * group_scale[..., None]).flatten(-2)
    rounded[..., order] = (to_e2m1(in_group) * group_scale[..., None]).flatten(-2)
    return p, rounded
