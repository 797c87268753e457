"""What the softmaxes of all families share: the reference of a row, and the exponents of P."""

from __future__ import annotations

import math

import torch

from sage_aot._kernels.manifest import AttnRecord


class RowReferences:
    """What P of each row is relative to, log2 units, as attn/softmax.cuh keeps it."""

    def __init__(self, record: AttnRecord, zeros: torch.Tensor) -> None:
        self.facts = record.facts
        self.row_ref = torch.full_like(zeros, self.facts["no_reference"])

    def raised(self, scores: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """The references that hold for these scores too: they rise where P would exceed what its type has room for."""
        largest = (scores * scale).nan_to_num(-math.inf, math.inf, -math.inf).amax(-1)
        needed = largest - self.facts["p_top"]
        if self.facts["whole_reference"]:
            needed = needed.ceil()
        return torch.where(needed > self.row_ref + self.facts["lazy_rise"], needed, self.row_ref)


def exponents(scores: torch.Tensor, scale: torch.Tensor, row_ref: torch.Tensor) -> torch.Tensor:
    """Of P, by one FMA."""
    return (scores.double() * scale.double() - row_ref.double()[..., None]).float()
