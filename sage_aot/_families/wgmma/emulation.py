"""The softmax of the wgmma family in torch, as attn/wgmma/softmax.cuh and attn/wgmma/mainloop.cuh have it."""

from __future__ import annotations

import math

import torch

from sage_aot._backends.emulation.arithmetic import finite_or_zero, fma, to_pv
from sage_aot._backends.emulation.online import RowReferences, exponents
from sage_aot._kernels.manifest import AttnRecord
from sage_aot._problem.mask import VisibleKeys

WARPGROUP_ROWS = 64
"""Query rows of a consumer: kWarpgroupRows of attn/wgmma/traits.cuh."""

LARGEST_BYTE = 126.0
"""The byte of 448 in e4m3: kLargestByte of attn/linear_p.cuh."""


class Softmax(RowReferences):
    """References follow every tile up and down; at the second tile of a pair they only rise. Scores have no bias.

    R takes a pair of tiles where all rows_of_range rows that go over the same tiles see both whole, in kernels with
    pairs. The log-sum-exp takes the sum of P before rounding. P is linear where the call says so and no score of a
    consumer's rows may be out of range.
    """

    def __init__(self, record: AttnRecord, visible: VisibleKeys, zeros: torch.Tensor, is_linear: bool = False,
                 bound: torch.Tensor | None = None) -> None:
        super().__init__(record, zeros)
        tile = record.tile
        self.lse_sum, self._is_linear = zeros + math.inf if is_linear else zeros, is_linear
        self._highest = self.row_ref
        self._pv, self._block_n = record.spec.pv, tile.block_n
        self._behind = 0 if self.facts["open_end"] else tile.block_n  # full keys that the second of two needs behind it
        rows = record.fact("rows_of_range")
        first_row = torch.arange(zeros.shape[2], device=zeros.device) // rows * rows
        self._full_keys = visible.end[..., first_row] // tile.block_n * tile.block_n * bool(self.facts["pairs"])
        self._first_tile = visible.begin[..., first_row] // tile.block_n
        self._linear = torch.full_like(zeros, is_linear, dtype=torch.bool)
        if bound is not None:
            of_consumers = torch.unflatten(bound > self.facts["largest_score"], -1, (-1, WARPGROUP_ROWS)).any(-1)
            self._linear &= ~of_consumers.repeat_interleave(WARPGROUP_ROWS, -1)

    def score_scale(self, scale: torch.Tensor) -> torch.Tensor:
        """The scale within its bounds."""
        return scale.clamp(self.facts["smallest_scale"], self.facts["largest_scale"])

    def step(self, first: int, scores: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """R takes the tile alone, or as the first or the second of two."""
        second = (first // self._block_n - self._first_tile) % 2 == 1
        second = second & (first + self._block_n + self._behind <= self._full_keys)
        restarted = self.needed(scores, scale, self.facts["room"]).maximum(self._highest - self.facts["most_fall"])
        row_ref = torch.where(second, self.needed(scores, scale).maximum(self.row_ref), restarted)
        self._highest = self._highest.maximum(row_ref)
        p, alpha = torch.exp2(exponents(scores, scale, row_ref)), self.move_to(row_ref)
        rounded = to_pv(p, self._pv)
        if self._linear.any():
            rounded = torch.where(self._linear[..., None], self._line(scores, scale, row_ref), rounded)
        if not self._is_linear:  # of the call, whatever this row has
            self.lse_sum = self.lse_sum * alpha + p.sum(-1)
        self.add_rounded(rounded, alpha)
        return rounded, alpha

    def _line(self, scores: torch.Tensor, scale: torch.Tensor, row_ref: torch.Tensor) -> torch.Tensor:
        """A linear P, as attn/linear_p.cuh has it: by the bits of an f32, or where Q is smoothed by an f32."""
        if not self.facts["bounds_scores"]:
            return self._float_line(scores, scale, row_ref)
        return self._bits_line(scores, scale, row_ref).where(scores > -math.inf, 0.0)

    def _bits_line(self, scores: torch.Tensor, scale: torch.Tensor, row_ref: torch.Tensor) -> torch.Tensor:
        factor = (scale.double() * 2.0**23).round().long()  # round() takes the even one of two, as the kernel's sum
        reference = ((row_ref + 384.0) * 2.0**15).long() - 384 * 2**15
        at_zero = int((torch.tensor(1016.0, dtype=torch.float32) - self.facts["line_shift"]) * 2.0**20)
        bits = finite_or_zero(scores).long() * factor + (at_zero - reference * 256)[..., None]
        return to_pv(bits.int().view(torch.float32), self._pv)

    def _float_line(self, scores: torch.Tensor, scale: torch.Tensor, row_ref: torch.Tensor) -> torch.Tensor:
        at_zero = torch.full_like(row_ref, 56.0) - self.facts["line_shift"]
        offset = fma(row_ref, torch.full_like(row_ref, -8.0), at_zero)
        byte = fma(scores, 8.0 * scale, offset[..., None].expand_as(scores))
        byte = byte.round().nan_to_num(0.0).clamp(0.0, LARGEST_BYTE)
        return byte.to(torch.uint8).view(torch.float8_e4m3fn).float()
