"""The arguments of attn_varlen that say where sequences lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from sage_aot._problem.given import Given, MaxSeqlens


class Sequences(NamedTuple):
    """The sequences of a call, in tensors [tokens, heads, headdim]: sequence b is the rows from cu_seqlens[b] to
    cu_seqlens[b + 1] - 1."""

    cu_seqlens_q: torch.Tensor  # [sequences + 1] int32, on the device of q, the first zero
    cu_seqlens_k: torch.Tensor
    max_seqlen_q: int  # the most queries of a sequence
    max_seqlen_k: int

    @classmethod
    def of_lengths(cls, queries: Sequence[int], keys: Sequence[int]) -> Sequences:
        """Sequences of these lengths, on the CPU."""
        cu_seqlens_q, cu_seqlens_k = (
            torch.nn.functional.pad(torch.tensor(lengths).cumsum(0, dtype=torch.int32), (1, 0))
            for lengths in (queries, keys))
        return cls(cu_seqlens_q, cu_seqlens_k, max(queries), max(keys))

    def to(self, device: str | torch.device) -> Sequences:
        """Return the sequences on a device."""
        return self._replace(cu_seqlens_q=self.cu_seqlens_q.to(device), cu_seqlens_k=self.cu_seqlens_k.to(device))

    def given(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Given:
        """The arguments of a call of attn_varlen with these sequences."""
        return Given("varlen", q, k, v, cu_seqlens_q=self.cu_seqlens_q, cu_seqlens_k=self.cu_seqlens_k,
                     details=MaxSeqlens(self.max_seqlen_q, self.max_seqlen_k))
