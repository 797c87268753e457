"""Quantized attention with every choice of the method open: the kernels' own choices and their alternatives.

sage_aot._backends.emulation computes what the kernels compute. This module also computes the alternatives in the
paper's tables: other granularities of the scales, other ways to smooth, other types of P and V, other accumulators. It
calls the emulation's functions for the steps that both have, so that the kernels' own method gives the emulation's
bits. All arithmetic is f32 unless a cast says otherwise; tensors are [batch, heads, seq, headdim] on any device.
Source: SageAttention2, sections 3.1 to 3.4 and appendix A.6; SageAttention2++ for the accumulators in f16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

import common
from sage_aot._backends.emulation import quantize as kernel_steps
from sage_aot._backends.emulation.arithmetic import E4M3_LIMIT, keep_13_bits, to_pv
from sage_aot._backends.emulation.attention import finished_scores, visible_keys
from sage_aot._backends.loader import Library
from sage_aot._families.mma.emulation import Softmax as MmaSoftmax
from sage_aot._kernels.manifest import AttnRecord, KernelRecord
from sage_aot._launch.choose import Kernels
from sage_aot._launch.plan import LOG2_E
from sage_aot._problem.check import check
from sage_aot._problem.given import Given
from sage_aot._problem.mask import VisibleKeys
from sage_aot._problem.options import Options
from sage_aot._problem.problem import Problem
from sage_aot.errors import ArgumentError

ARCH = "sm89"
"""The arch whose tiles and orders of summation this emulator follows; its P and V are FP8."""

F16_ARCH = "sm80"
"""The arch whose softmax this emulator follows where P is f16."""

PRODUCT_KEYS = 32
"""Keys of one FP8 or INT8 matrix product; the accumulator is rounded after each."""

E5M2_LIMIT = 57344.0
HADAMARD_SEED = 0


@dataclass(frozen=True)
class Method:
    """One way to quantize attention; the default is the published method at 8 bits, with the sm89 kernels' softmax."""

    bits: int = 8  # of Q and K
    granularity: str = "thread"  # which rows of Q and K share a scale: a key of GROUPS
    transform: str = "none"  # what comes before smoothing: a key of TRANSFORMS
    smoothing: str = "k"  # "", "k", "q" or "qk": the tensors whose mean is subtracted
    pv: str = "e4m3"  # type of P and V: a key of ROUNDING
    accumulator: str = "two_level"  # of P·V: a key of ACCUMULATORS
    smooth_v: bool = False
    clip: float | None = 1.0  # share of a group's largest magnitude that the largest integer stands for; None: searched
    rotate: bool = False  # after smoothing, as the kernels do
    statistics: str = "sequence"  # keys for means and for V's scales: all, as published, or the kernels' "sample"

    def __post_init__(self) -> None:
        if self.statistics not in ("sequence", "sample"):
            raise ArgumentError(f"statistics: expected 'sequence' or 'sample', got {self.statistics!r}")
        if self.statistics == "sample" and self.pv not in ("e4m3", "f16"):
            raise ArgumentError(f"pv: no kernel takes samples of a V in {self.pv!r}; expected 'e4m3' or 'f16'")
        if self.pv in ("int8", "f16") and self.accumulator != "f32":
            raise ArgumentError(f"accumulator: P·V in {self.pv} is exact up to f32, got {self.accumulator!r}")

    @property
    def largest_integer(self) -> float:
        """Largest integer of the quantized Q and K."""
        return 2.0 ** (self.bits - 1) - 1

    def options(self, *, is_causal: bool) -> Options:
        """Options of the call that comes nearest to the method, whose P is an exponential."""
        return Options(is_causal=is_causal, qk=f"int{self.bits}", smooth_q="q" in self.smoothing,
                       smooth_k="k" in self.smoothing, smooth_v=self.smooth_v, rotate=self.rotate, p="exp2")


@dataclass(frozen=True)
class Range:
    """Largest values to which P and V are scaled before they are rounded."""

    p: float  # of the largest P of a row
    v: float | None  # of the largest V of a channel; None: a power of two that fits f16


RANGES = {"int8": Range(127.0, 127.0), "e5m2": Range(E5M2_LIMIT, E5M2_LIMIT),
          "e4m3": Range(E4M3_LIMIT, E4M3_LIMIT), "f16": Range(128.0, None)}
RANGE_F16_ACCUMULATOR = Range(224.0, 4.5)
"""A tile's sum stays within f16: 224 · 4.5 · 64 keys = 64512 < 65504. Source: SageAttention2++."""

SUM_UNIT_F16_ACCUMULATOR = 0.375
"""Unit in which f16 accumulators sum P: a constant channel of V."""


@dataclass(frozen=True)
class Inputs:
    """Q, K and V just before quantization, padded to whole tiles, and the terms that smoothing took off."""

    q: torch.Tensor  # [batch, heads, rows, headdim]
    k: torch.Tensor  # [batch, kv heads, keys, headdim]
    v: torch.Tensor  # likewise; not yet smoothed where statistics is "sample": the emulation's own step does that
    v_mean: torch.Tensor  # [batch, kv heads, headdim]; zero where V is not smoothed
    delta_s: torch.Tensor | None  # [batch, heads, query tiles, keys], log2 units: mean of Q · K; None: Q not smoothed


@dataclass(frozen=True)
class Quantized:
    """Inputs in the types of the matrix products, as f32, with a scale per row, key and channel of V; heads as of Q."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    q_scale: torch.Tensor  # [batch, heads, rows], softmax scale · log2 e included
    k_scale: torch.Tensor  # [batch, heads, keys]
    v_scale: torch.Tensor  # [batch, heads, headdim]
    v_mean: torch.Tensor  # likewise
    v_factor: torch.Tensor  # [batch, heads, kv tiles], factor on P·V of a tile


def attention(method: Method, library: Library, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *,
              is_causal: bool = False) -> torch.Tensor:
    """Attention by a method: f16 or bf16 tensors, all finite, to [batch, heads, seq, headdim] f32."""
    problem, kernels, inputs = prepare(method, library, q, k, v, is_causal=is_causal)
    softmax = common.kernels_of(F16_ARCH, problem, library).attn if method.pv == "f16" else kernels.attn
    kernels = replace(kernels, attn=replace(softmax, tile=kernels.attn.tile))
    with q.device:
        out = attend(method, problem, kernels.attn, inputs, quantize(method, problem, kernels, inputs))
    return out[:, :, : problem.seqlen_q, : problem.headdim]


def score_step(method: Method, library: Library, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> float:
    """One unit of the integer scores in log2 units: the geometric mean of q_scale over rows times that of k_scale over
    keys."""
    problem, kernels, inputs = prepare(method, library, q, k, v)
    with q.device:
        quantized = quantize(method, problem, kernels, inputs)
    q_scale, k_scale = quantized.q_scale[:, :, : problem.seqlen_q], quantized.k_scale[:, :, : problem.seqlen_kv]
    return (q_scale.log().mean() + k_scale.log().mean()).exp().item()


def prepare(method: Method, library: Library, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *,
            is_causal: bool = False) -> tuple[Problem, Kernels, Inputs]:
    """The problem, its kernels, and the inputs just before quantization."""
    problem = check(Given("dense", q, k, v), method.options(is_causal=is_causal))
    kernels = common.kernels_of(ARCH, problem, library)
    with q.device:  # the package's functions make tensors on the default device
        inputs = smooth(method, problem, kernels, *TRANSFORMS[method.transform](q.float(), k.float()), v.float())
    return problem, kernels, inputs


# --- before quantization ----------------------------------------------------------------------------------------------


def smooth_attn(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """SmoothQuant between Q and K: each channel's range is split evenly between Q and K (smoothing factor 0.5).

    q / s and k · s with s = √(max |q| / max |k|) per head and channel, so that q·k stays. Source: Xiao et al., 2023.
    """
    batch, kv_heads, _, headdim = k.shape
    q_max = q.abs().amax(2).view(batch, kv_heads, -1, headdim).amax(2)
    k_max = k.abs().amax(2)
    factor = torch.where((q_max > 0) & (k_max > 0), (q_max / k_max).sqrt(), 1.0)[:, :, None]
    return q / factor.repeat_interleave(q.shape[1] // kv_heads, 1), k * factor


def rotate(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Q and K times one random Hadamard matrix, orthogonal, so that q·k stays. Source: QuaRot, 2024."""
    matrix = random_hadamard(q.shape[-1]).to(q.device)
    return q @ matrix, k @ matrix


def random_hadamard(size: int) -> torch.Tensor:
    """[size, size]: random signs, then the normalized Hadamard matrix of a power of two."""
    if size & (size - 1):
        raise ArgumentError(f"head dim: a Hadamard matrix needs a power of two, got {size}")
    matrix = torch.ones(1, 1, device="cpu")
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    generator = torch.Generator().manual_seed(HADAMARD_SEED)
    signs = torch.randint(0, 2, (size, 1), generator=generator, device="cpu") * 2.0 - 1.0
    return signs * matrix / size**0.5


TRANSFORMS: dict[str, Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]] = {
    "none": lambda q, k: (q, k), "smooth_attn": smooth_attn, "hadamard": rotate}


def smooth(method: Method, problem: Problem, kernels: Kernels, q: torch.Tensor, k: torch.Tensor,
           v: torch.Tensor) -> Inputs:
    """The inputs, padded, less their means. The row bias is left out: it changes no softmax."""
    tile, headdim = kernels.attn.tile, kernels.attn.spec.headdim
    q = kernel_steps.pad(q, tile.block_m, headdim)
    k, v = (kernel_steps.pad(x, tile.block_n, headdim) for x in (k, v))
    v_mean = torch.zeros_like(v[:, :, 0])
    delta_s = None
    if problem.options.smooth_k:
        k = k - _mean_over_keys(method, problem, kernels, k)[:, :, None]
    if problem.options.smooth_v and method.statistics == "sequence":
        v_mean = _mean_over_keys(method, problem, kernels, v)
        v = v - v_mean[:, :, None]
    if problem.options.smooth_q:
        q_mean = kernel_steps._mean_over_rows(q, problem, kernels)
        q = q - q_mean.repeat_interleave(tile.block_m, 2)
        delta_s = kernel_steps._delta_s(q_mean * _softmax_scale(problem), _per_q_head(problem, k))
    return Inputs(q, k, v, v_mean, delta_s)


def _mean_over_keys(method: Method, problem: Problem, kernels: Kernels, x: torch.Tensor) -> torch.Tensor:
    if method.statistics == "sequence":
        return x[:, :, : problem.seqlen_kv].mean(2)
    sampled = kernel_steps.sampled_rows(problem.seqlen_kv, kernels["quant"])
    return kernel_steps.average(x[:, :, sampled], kernels["quant"])


def _softmax_scale(problem: Problem) -> torch.Tensor:
    """softmax_scale · log2 e, as f32."""
    return torch.tensor(problem.softmax_scale * LOG2_E, dtype=torch.float32)


def _per_q_head(problem: Problem, x: torch.Tensor) -> torch.Tensor:
    return x.repeat_interleave(problem.num_q_heads // problem.num_kv_heads, 1)


# --- quantization -----------------------------------------------------------------------------------------------------

class Sizes(NamedTuple):
    """Sizes on which the kernels' scale groups depend."""

    block_m: int
    block_n: int
    warp_m: int
    row_groups: int  # of a warp's rows
    key_groups: int  # of a tile's keys

    @classmethod
    def of(cls, kernels: Kernels) -> Sizes:
        quant = kernels["quant"]
        return cls(*kernels.attn.tile.quantized, quant.fact("row_groups"), quant.fact("key_groups"))


THREAD_ROW_GROUPS, THREAD_KEY_GROUPS = 8, 4
"""Scale groups of a warp's rows and of a tile's keys, as published: the rows and keys of a thread of an m16n8
product."""

GROUPS: dict[str, tuple[Callable[[int, Sizes], torch.Tensor], Callable[[int, Sizes], torch.Tensor]]] = {
    "token": (lambda rows, sizes: torch.arange(rows), lambda keys, sizes: torch.arange(keys)),
    "kernel": (lambda rows, sizes: kernel_steps._row_groups(rows, sizes.warp_m, sizes.row_groups),
               lambda keys, sizes: kernel_steps._key_groups(keys, sizes.block_n, sizes.key_groups)),
    "thread": (lambda rows, sizes: kernel_steps._row_groups(rows, sizes.warp_m, THREAD_ROW_GROUPS),
               lambda keys, sizes: kernel_steps._key_groups(keys, sizes.block_n, THREAD_KEY_GROUPS)),
    "block": (lambda rows, sizes: torch.arange(rows) // sizes.block_m,
              lambda keys, sizes: torch.arange(keys) // sizes.block_n),
    "tensor": (lambda rows, sizes: torch.zeros(rows, dtype=torch.int64),
               lambda keys, sizes: torch.zeros(keys, dtype=torch.int64)),
}
"""Scale groups by granularity: of each row of Q, and of each key. ``"thread"``: as published; ``"kernel"``: as our
kernels have it, at 4 bits each row of Q by itself; ``"tensor"``: a head's whole Q or K."""

ROUNDING: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "int8": lambda x: x.round().clamp(-127.0, 127.0),
    "e5m2": lambda x: x.clamp(-E5M2_LIMIT, E5M2_LIMIT).to(torch.float8_e5m2).float(),
    "e4m3": lambda x: to_pv(x, "e4m3"),
    "f16": lambda x: to_pv(x, "f16"),
}
"""f32 values of P or V rounded to the type and back: nearest even, saturating."""


def range_of(method: Method) -> Range:
    return RANGE_F16_ACCUMULATOR if method.accumulator == "two_level_f16" else RANGES[method.pv]


def quantize(method: Method, problem: Problem, kernels: Kernels, inputs: Inputs) -> Quantized:
    """Q, K and V quantized by the method."""
    quant, sizes = kernels["quant"], Sizes.of(kernels)
    q_groups, k_groups = GROUPS[method.granularity]
    q, k = (kernel_steps._rotate(x) if method.rotate else x for x in (inputs.q, inputs.k))
    q, q_scale = quantize_rows(q, q_groups(q.shape[2], sizes), method, quant)
    q_scale = q_scale * _softmax_scale(problem) * (q.shape[-1] if method.rotate else 1)
    k_and_scale = quantize_rows(k, k_groups(k.shape[2], sizes), method, quant, problem.seqlen_kv)
    if method.statistics == "sample":
        sampled = kernel_steps.sampled_rows(problem.seqlen_kv, quant)
        *of_v, _ = kernel_steps._quantize_v(inputs.v, sampled, problem, kernels)
    else:
        of_v = [*quantize_v(inputs.v, method, quant), inputs.v_mean,
                torch.ones(*inputs.v.shape[:2], inputs.v.shape[2] // sizes.block_n)]
    k, k_scale, v, v_scale, v_mean, v_factor = (_per_q_head(problem, x) for x in (*k_and_scale, *of_v))
    return Quantized(q, k, v, q_scale, k_scale, v_scale, v_mean, v_factor)


def quantize_rows(x: torch.Tensor, groups: torch.Tensor, method: Method, quant: KernelRecord,
                  counted: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Q or K as integers, and a scale per row, equal within a group. `counted`: number of leading rows whose errors
    count where a clip is searched; None: all."""
    if method.clip is None:
        return kernel_steps._quantize_rows(x, groups, quant, True, x.shape[2] if counted is None else counted)
    limit, largest = method.largest_integer, kernel_steps._over_groups(x.abs().amax(-1), groups, "amax")
    of_groups = kernel_steps.scale_to(limit, largest * method.clip, quant)
    scale, inv_scale = (values[:, :, groups] for values in of_groups)
    return kernel_steps.rounded(x, inv_scale, limit), scale


def quantize_v(v: torch.Tensor, method: Method, quant: KernelRecord) -> tuple[torch.Tensor, torch.Tensor]:
    """V in its type, and a scale per channel [batch, kv heads, headdim]."""
    amax, limit = v.abs().amax(2), range_of(method).v
    scale, inv_scale = (kernel_steps._power_of_two_scale(amax, quant) if limit is None
                        else kernel_steps.scale_to(limit, amax, quant))
    return ROUNDING[method.pv](v * inv_scale[:, :, None]), scale


# --- attention --------------------------------------------------------------------------------------------------------

ACCUMULATORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "f32": lambda x: x,
    "single": keep_13_bits,
    "two_level": keep_13_bits,
    "two_level_f16": lambda x: x.half().float(),
}
"""Rounding after each product, by accumulator of P·V. "f32": none. 13 mantissa bits: in one accumulator for all keys
("single"), or in a fresh one per tile ("two_level"). f16: in a fresh one per tile."""


class Softmax(MmaSoftmax):
    """The online softmax of the mma family with P in the method's type and range."""

    def __init__(self, method: Method, record: AttnRecord, visible: VisibleKeys, zeros: torch.Tensor) -> None:
        super().__init__(record, visible, zeros)
        own = RANGES["f16" if method.pv == "f16" else "e4m3"].p
        self.factor = range_of(method).p / own  # from the family's largest P to the method's
        self._round, self._accumulator = ROUNDING[method.pv], method.accumulator
        # As the kernels; of other types, and where one accumulator takes all keys, as published: before rounding.
        self._sums_rounded = method.pv in ("e4m3", "f16") and method.accumulator != "single"
        self.unit = 1.0
        if self._sums_rounded:
            half = method.accumulator == "two_level_f16"
            self.unit = SUM_UNIT_F16_ACCUMULATOR if half else self.facts["sum_unit"]

    def step(self, first: int, scores: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Step as the family does, but round P to the method's type. Sums of P are in units of `unit`."""
        p, alpha = self.exponentiate(scores, scale)
        rounded = self._round(p * self.factor)
        if self._sums_rounded:
            units = rounded.new_full((rounded.shape[-1], 1), self.unit)
            self.row_sum = accumulate((self.row_sum * alpha)[..., None], rounded, units, self._accumulator)[..., 0]
        else:
            self.row_sum = self.row_sum * alpha + (p * self.factor).sum(-1)
        return rounded, alpha


def attend(method: Method, problem: Problem, attn: AttnRecord, inputs: Inputs, quantized: Quantized) -> torch.Tensor:
    """Attention tile by tile, as in the kernels' emulation. Output: [batch, heads, rows, headdim] f32, rows padded."""
    q, k, v, tile = quantized.q, quantized.k, quantized.v, attn.tile
    rows = q.shape[2]
    visible = visible_keys(problem, rows)
    acc_o = torch.zeros_like(q)
    softmax = Softmax(method, attn, visible, torch.zeros_like(quantized.q_scale))

    for first in range(int(visible.begin.min()) // tile.block_n * tile.block_n, int(visible.end.max()), tile.block_n):
        part = slice(first, first + tile.block_n)
        scores = q @ k[:, :, part].transpose(2, 3)  # exact: integers below 2^24
        scale = softmax.score_scale(quantized.q_scale[..., None] * quantized.k_scale[:, :, None, part])
        if inputs.delta_s is not None:
            delta = inputs.delta_s[..., part].repeat_interleave(tile.block_m, 2)
            scores, scale = finished_scores(scores, scale, delta), torch.ones_like(scale)
        scores = scores.masked_fill(~visible.contains(first + torch.arange(tile.block_n)), -torch.inf)
        p, alpha = softmax.step(first, scores, scale)
        factor = quantized.v_factor[:, :, first // tile.block_n, None, None]
        acc_o = accumulate(acc_o * alpha[..., None] / factor, p, v[:, :, part], method.accumulator) * factor

    row_sum = softmax.row_sum
    factor = torch.where(row_sum > 0, torch.full_like(row_sum, softmax.unit) / row_sum, 0.0)
    mean = torch.where(row_sum[..., None] > 0, quantized.v_mean[:, :, None], 0.0)
    return acc_o * factor[..., None] * quantized.v_scale[:, :, None] + mean


def accumulate(acc_o: torch.Tensor, p: torch.Tensor, v: torch.Tensor, accumulator: str) -> torch.Tensor:
    """acc_o, already rescaled, plus P·V of one tile."""
    keep = ACCUMULATORS[accumulator]
    if accumulator == "f32":
        return acc_o + p @ v
    if accumulator == "single":
        return _add_products(keep(acc_o), p, v, keep)  # the product cuts the accumulator that it reads as well
    return acc_o + _add_products(torch.zeros_like(acc_o), p, v, keep)


def _add_products(total: torch.Tensor, p: torch.Tensor, v: torch.Tensor,
                  keep: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """total + P·V in one accumulator, product by product."""
    for first in range(0, p.shape[-1], PRODUCT_KEYS):
        part = slice(first, first + PRODUCT_KEYS)
        total = keep(total + p[..., part] @ v[..., part, :])
    return total
