"""The common part of all families' softmaxes: the reference of a row, and the exponents of P."""

from __future__ import annotations

import math

import torch

from sage_aot._backends.emulation.arithmetic import fma_down, pv_tile
from sage_aot._kernels.manifest import AttnRecord


class RowReferences:
    """The reference of each row, to which P is relative, in log2 units, as attn/row_references.cuh keeps it."""

    def __init__(self, record: AttnRecord, zeros: torch.Tensor) -> None:
        self.facts, self._pv_accum = record.facts, record.spec.pv_accum
        self.row_ref, self.row_sum = torch.full_like(zeros, self.facts["no_reference"]), zeros

    def add_rounded(self, rounded: torch.Tensor, alpha: torch.Tensor) -> None:
        """Adds P of a tile, rounded, to the sum by which O is divided: a product with a constant channel of V."""
        units = rounded.new_full((rounded.shape[-1], 1), self.facts["sum_unit"])
        self.row_sum = self.row_sum * alpha + pv_tile(rounded, units, self._pv_accum)[..., 0]

    def needed(self, scores: torch.Tensor, scale: torch.Tensor, room: float = 0.0) -> torch.Tensor:
        """The references that bring the largest P of each row to its type's top, less a room in log2 units."""
        largest, scale = scores_of_threads(scores).amax((-3, -1)), scores_of_threads(scale)[..., 0, :, 0]
        minus_top = torch.full_like(largest, room - self.facts["p_top"])
        needed = fma_down(largest, scale, minus_top).nan_to_num(-math.inf, math.inf, -math.inf).amax(-1)
        return needed.ceil() if self.facts["whole_reference"] else needed

    def outgrown(self, needed: torch.Tensor) -> torch.Tensor:
        """The rows whose P would exceed the range of its type."""
        return needed > self.row_ref + self.facts["lazy_rise"]

    def move_to(self, row_ref: torch.Tensor) -> torch.Tensor:
        """Takes new references; the factor for all that was summed relative to the old ones."""
        alpha = torch.exp2(self.row_ref - row_ref)
        self.row_ref = row_ref
        return alpha


def scores_of_threads(of_keys: torch.Tensor) -> torch.Tensor:
    """[..., keys] as [..., keys / 8, 4, 2]: the four threads of a row have two of every eight keys, of one scale."""
    return torch.unflatten(of_keys, -1, (-1, 4, 2))


def exponents(scores: torch.Tensor, scale: torch.Tensor, row_ref: torch.Tensor) -> torch.Tensor:
    """The exponents of P, by one FMA."""
    return (scores.double() * scale.double() - row_ref.double()[..., None]).float()
