"""The softmax of the wgmma family in torch, as attn/wgmma/softmax.cuh and attn/wgmma/mainloop.cuh have it."""

from __future__ import annotations

import torch

from sage_aot._backends.emulation.arithmetic import tensor_core_sum, to_pv
from sage_aot._backends.emulation.online import RowReferences, exponents, largest_of
from sage_aot._kernels.manifest import AttnRecord
from sage_aot._problem.mask import VisibleKeys


class Softmax(RowReferences):
    """References follow every tile up and down; at the second tile of a pair they only rise. Scores have no bias.

    R takes a pair of tiles where all rows_of_range rows that go over the same tiles see both whole, in kernels with
    pairs. O is divided by the product of P and V's channel of ones; the log-sum-exp takes the sum of P before rounding.
    """

    def __init__(self, record: AttnRecord, visible: VisibleKeys, zeros: torch.Tensor) -> None:
        super().__init__(record, zeros)
        tile = record.tile
        self.lse_sum = self._in_r = zeros
        self._highest = self.row_ref
        self._pv, self._block_n = record.spec.pv, tile.block_n
        self._behind = 0 if self.facts["open_end"] else tile.block_n  # full keys that the second of two needs behind it
        rows = record.fact("rows_of_range")
        first_row = torch.arange(zeros.shape[2], device=zeros.device) // rows * rows
        self._full_keys = visible.end[first_row] // tile.block_n * tile.block_n * bool(self.facts["pairs"])
        self._first_tile = visible.begin[first_row] // tile.block_n

    def score_scale(self, scale: torch.Tensor) -> torch.Tensor:
        """As it is."""
        return scale.clamp(min=self.facts["smallest_scale"])

    def step(self, first: int, scores: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """R takes the tile alone, or as the first or the second of two."""
        second = (first // self._block_n - self._first_tile) % 2 == 1
        second = second & (first + self._block_n + self._behind <= self._full_keys)
        largest = largest_of(scores, scale)
        restarted = self.needed(largest, self.facts["room"]).maximum(self._highest - self.facts["most_fall"])
        row_ref = torch.where(second, self.needed(largest).maximum(self.row_ref), restarted)
        self._highest = self._highest.maximum(row_ref)
        p, alpha = torch.exp2(exponents(scores, scale, row_ref)), self.move_to(row_ref)
        rounded = to_pv(p, self._pv)
        self.lse_sum = self.lse_sum * alpha + p.sum(-1)
        begun = torch.where(second, self._in_r * alpha, 0.0)
        self._in_r = tensor_core_sum(rounded, begun)
        self.row_sum = self.row_sum * alpha + (self._in_r - begun)
        return rounded, alpha
