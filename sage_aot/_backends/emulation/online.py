"""What the softmaxes of all families share: the reference of a row, and the exponents of P."""

from __future__ import annotations

import math

import torch

from sage_aot._kernels.manifest import AttnRecord


class RowReferences:
    """What P of each row is relative to, log2 units, as attn/softmax.cuh keeps it."""

    def __init__(self, record: AttnRecord, zeros: torch.Tensor) -> None:
        self.facts = record.facts
        self.row_ref, self.row_sum = torch.full_like(zeros, self.facts["no_reference"]), zeros

    def needed(self, largest: torch.Tensor, room: float = 0.0) -> torch.Tensor:
        """The references that bring P of these scores to its type's top, less a room in log2 units."""
        needed = largest - (self.facts["p_top"] - room)
        return needed.ceil() if self.facts["whole_reference"] else needed

    def outgrown(self, needed: torch.Tensor) -> torch.Tensor:
        """Where P would exceed what its type has room for."""
        return needed > self.row_ref + self.facts["lazy_rise"]

    def move_to(self, row_ref: torch.Tensor) -> torch.Tensor:
        """Takes new references; the factor for all that was summed relative to the old ones."""
        alpha = torch.exp2(self.row_ref - row_ref)
        self.row_ref = row_ref
        return alpha


def largest_of(scores: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The largest score of each row, in log2 units."""
    return (scores * scale).nan_to_num(-math.inf, math.inf, -math.inf).amax(-1)


def exponents(scores: torch.Tensor, scale: torch.Tensor, row_ref: torch.Tensor) -> torch.Tensor:
    """Of P, by one FMA."""
    return (scores.double() * scale.double() - row_ref.double()[..., None]).float()
