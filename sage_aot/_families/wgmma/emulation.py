"""The softmax of the wgmma family in torch, as attn/wgmma/softmax.cuh and attn/wgmma/mainloop.cuh have it."""

from __future__ import annotations

import torch

from sage_aot._backends.emulation.arithmetic import to_pv
from sage_aot._backends.emulation.online import RowReferences, exponents
from sage_aot._kernels.manifest import AttnRecord
from sage_aot._problem.mask import VisibleKeys


class Softmax(RowReferences):
    """References follow every tile up and down; at the second tile of a pair they only rise. Scores have no bias.

    R takes a pair of tiles where all rows_of_range rows that go over the same tiles see both whole, in kernels with
    pairs. The log-sum-exp takes the sum of P before rounding.
    """

    def __init__(self, record: AttnRecord, visible: VisibleKeys, zeros: torch.Tensor) -> None:
        super().__init__(record, zeros)
        tile = record.tile
        self.lse_sum = zeros
        self._highest = self.row_ref
        self._pv, self._block_n = record.spec.pv, tile.block_n
        self._behind = 0 if self.facts["open_end"] else tile.block_n  # full keys that the second of two needs behind it
        rows = record.fact("rows_of_range")
        first_row = torch.arange(zeros.shape[2], device=zeros.device) // rows * rows
        self._full_keys = visible.end[first_row] // tile.block_n * tile.block_n * bool(self.facts["pairs"])
        self._first_tile = visible.begin[first_row] // tile.block_n

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
        self.lse_sum = self.lse_sum * alpha + p.sum(-1)
        self.add_rounded(rounded, alpha)
        return rounded, alpha
