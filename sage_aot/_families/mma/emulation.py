"""The softmax of the mma family in torch, as attn/mma/softmax.cuh has it."""

from __future__ import annotations

import math

import torch

from sage_aot._backends.emulation import nvfp4
from sage_aot._backends.emulation.arithmetic import fma, to_pv
from sage_aot._backends.emulation.online import RowReferences, exponents, scores_of_threads
from sage_aot._kernels.manifest import AttnRecord
from sage_aot._problem.mask import VisibleKeys


class Softmax(RowReferences):
    """A warp whose scores fit uses the FMA into which the bias of the scores is folded. Any other warp moves
    references, and folds nothing where P is an exponential. O is divided by the sum of P after rounding, but of NVFP4
    before; the log-sum-exp takes the sum of P before rounding, but of f16 after."""

    def __init__(self, record: AttnRecord, visible: VisibleKeys, zeros: torch.Tensor, is_linear: bool = False,
                 bound: torch.Tensor | None = None) -> None:
        super().__init__(record, zeros)
        self.lse_sum, self._is_linear = zeros + math.inf if is_linear else zeros, is_linear
        self._qk, self._pv, self._warp_m = record.spec.qk, record.spec.pv, record.tile.warp_m

    def score_scale(self, scale: torch.Tensor) -> torch.Tensor:
        """Cut to 22 bits of mantissa, so that the bias may fold; for f16 P subtracting the reference stays exact."""
        bounded = scale.clamp(self.facts["smallest_scale"], self.facts["largest_scale"])
        return (bounded.view(torch.int32) & ~3).view(torch.float32)

    def step(self, first: int, scores: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Every key tile alike, whatever its first key."""
        if self._is_linear:
            rounded, alpha = self._line(scores, scale)
            self.add_rounded(rounded, alpha)
            return rounded, alpha
        if self._pv == "nvfp4":
            row_ref, _, _ = self._references(scores, scale)
            p, rounded = nvfp4.p_of(scores, scale, row_ref)
            alpha = self.move_to(row_ref)
        else:
            p, alpha = self.exponentiate(scores, scale)
            rounded = to_pv(p, self._pv)
        before_rounding = self.lse_sum * alpha + p.sum(-1)
        if self.facts["sums_rounded"]:
            self.add_rounded(rounded, alpha)
        else:
            self.row_sum = before_rounding
        self.lse_sum = before_rounding if self.facts["sums_in_threads"] else self.row_sum
        return rounded, alpha

    def exponentiate(self, scores: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """P, not rounded, and alpha."""
        row_ref, folded, folds = self._references(scores, scale)
        p = torch.exp2(torch.where(folds[..., None], folded, exponents(scores, scale, row_ref)))
        return p, self.move_to(row_ref)

    def _line(self, scores: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """P by a line, and alpha. A warp subtracts the bias and cuts bytes off where the FMA does not do even with the
        references that it moved to: its bias does not fold, or a byte outgrows P's range."""
        serves, folded = self._serves(scores, scale, self.row_ref)
        stays = _whole_warps(serves & ~self._any_far(folded, self.facts["line_far"], self.facts["line_farthest"]),
                             self._warp_m)
        row_ref = torch.where(stays, self.row_ref, self._moved(scores, scale, self.facts["line_room"]))
        byte, moves = folded, ~stays
        serves[moves], byte[moves] = self._serves(scores[moves], scale[moves], row_ref[moves])
        cut = ~_whole_warps(serves, self._warp_m)
        byte[cut] = self._bytes(scores[cut], scale[cut], row_ref[cut], 0.0).clamp(max=self.facts["line_most"])
        byte = byte.nan_to_num_(0.0).round_().clamp_(min=0.0)
        return byte.to(torch.uint8).view(torch.float8_e4m3fn).float(), self.move_to(row_ref)

    def _serves(self, scores: torch.Tensor, scale: torch.Tensor,
                row_ref: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Per row, whether the FMA into which the bias is folded makes its bytes, and what it makes."""
        folded = self._bytes(scores, scale, row_ref, self.facts["score_bias"])
        fits = self._foldable(scale) & ~(folded > self.facts["line_most"])
        return fits.all(-1), folded

    def _bytes(self, scores: torch.Tensor, scale: torch.Tensor, row_ref: torch.Tensor, bias: float) -> torch.Tensor:
        """Bytes of P before they are rounded; NaN for masked scores of rows without a reference."""
        factor = 8.0 * scale
        offset = fma(row_ref, row_ref.new_full((), -8.0), row_ref.new_full((), self.facts["line_zero"]))[..., None]
        if bias:
            offset = fma(-factor, factor.new_full((), bias), offset)
        return fma(scores + bias, factor, offset)

    def _foldable(self, scale: torch.Tensor) -> torch.Tensor:
        if not self.facts["score_bias"]:
            return torch.ones_like(scale, dtype=torch.bool)
        return scale < self.facts["largest_folded"]

    def _references(self, scores: torch.Tensor,
                    scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The references of the tile's P, its exponents with the bias folded in, and the rows that take these."""
        bias, largest_p = self.facts["score_bias"], self.facts["p_top"] + self.facts["lazy_rise"]
        folded = _folded(scores, scale, bias, self.row_ref)
        fits = (self._foldable(scale) & (folded <= largest_p)).all(-1)
        folds = _whole_warps(fits & ~self._far_below(folded), self._warp_m)
        return torch.where(folds, self.row_ref, self._moved(scores, scale)), folded, folds

    def _far_below(self, folded: torch.Tensor) -> torch.Tensor:
        """Per row, whether one of its four threads has scores that all lie far below the reference."""
        if not self.facts["may_fall"]:
            return torch.zeros_like(folded[..., 0], dtype=torch.bool)
        top = self.facts["p_top"]
        return self._any_far(folded, top - self.facts["lazy_fall"], top - self.facts["most_fall"])

    def _any_far(self, folded: torch.Tensor, far: float, farthest: float) -> torch.Tensor:
        """Per row, whether the largest value of one of its four threads lies between the two."""
        largest = scores_of_threads(folded.nan_to_num(-math.inf, math.inf, -math.inf)).amax((-3, -1))
        return ((largest < far) & (largest > farthest)).any(-1)

    def _moved(self, scores: torch.Tensor, scale: torch.Tensor, room: float = 0.0) -> torch.Tensor:
        """References where a warp moves them: up to what they need to be, down where that is far below."""
        needed = self.needed(scores, scale, room)
        moves = self.outgrown(needed)
        if self.facts["may_fall"]:
            fall = self.row_ref - needed
            finite = self.row_sum * torch.exp2(fall) < self.facts["largest_sum"]
            moves |= (fall > self.facts["lazy_fall"]) & (fall < self.facts["most_fall"]) & finite
        return torch.where(moves, needed, self.row_ref)


def _folded(scores: torch.Tensor, scale: torch.Tensor, bias: float, row_ref: torch.Tensor) -> torch.Tensor:
    """The exponents of P by the FMA that the bias is folded into; its constant rounds for e4m3 only."""
    offset = (-scale.double() * bias - row_ref.double()[..., None]).float()
    return ((scores.double() + bias) * scale.double() + offset.double()).float()


def _whole_warps(rows: torch.Tensor, warp_m: int) -> torch.Tensor:
    """Per row, whether something holds for all rows of its warp."""
    return torch.unflatten(rows, 2, (-1, warp_m)).all(-1).repeat_interleave(warp_m, 2)
