"""The arguments of a call as one thing, but for its options and the tensors that it writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from sage_aot._problem.tensors import OPERANDS, TENSORS, Kind


class MaxSeqlens(NamedTuple):
    """The longest sequences of a call: the most queries, and the most keys, of a sequence."""

    q: int
    k: int


class Stored(NamedTuple):
    """Facts of a K and a V that an earlier call quantized."""

    shape: Sequence[int]  # of k and v: batch, heads, keys, head dim
    dtype: torch.dtype  # of k and v
    has_key_mask: bool
    quantizer: str  # pipeline.quantizer_of(): the kernel that quantized them


class Given(NamedTuple):
    """The arguments of a call but for its options and the tensors that it writes; None for what its kind does not
    take."""

    kind: Kind
    q: torch.Tensor | None = None
    k: torch.Tensor | None = None  # of "stored" heads first, and only where q is smoothed: delta_s needs it
    v: torch.Tensor | None = None
    key_mask: torch.Tensor | None = None  # this one and the next three: the tensors of TENSORS, in its order
    sinks: torch.Tensor | None = None
    attn_mask: torch.Tensor | None = None
    block_mask: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None  # [sequences + 1] int32: sequence b is the rows from cu_seqlens_q[b] on,
    cu_seqlens_k: torch.Tensor | None = None  # before cu_seqlens_q[b + 1]; likewise of k and v
    kept: torch.Tensor | None = None  # uint8: where the call keeps its quantized tensors, or an earlier call kept them
    details: MaxSeqlens | Stored | None = None

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """All tensors, in the order of OPERANDS."""
        return self[1:-1]

    @property
    def named(self) -> dict[str, torch.Tensor]:
        """The tensors that there are, by name."""
        return {name: tensor for name, tensor in zip(OPERANDS, self.tensors) if tensor is not None}

    def having(self, **tensors: Any) -> Given:
        """Replace tensors, by name."""
        return self._replace(**tensors)

    @property
    def is_trained(self) -> bool:
        """True where the call has a backward pass."""
        return self.kind in ("train", "train_varlen")

    @property
    def optional(self) -> tuple[str, ...]:
        """The names of the optional tensors that there are."""
        return tuple(name for name in TENSORS if getattr(self, name) is not None)

    @property
    def like(self) -> torch.Tensor:
        """A tensor of the call's device and dtype."""
        found = self.k if self.q is None else self.q
        assert found is not None
        return found

    @property
    def differs_by_head(self) -> bool:
        """True where an optional tensor says other things of each q head, so that heads cannot be rows of one head."""
        return any("q heads" in TENSORS[name].shape for name in self.optional)


def strides_of_optional(name: str, tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides of an optional tensor as kernels take them: of batch entries, heads and rows; 0 where it has no such
    dimension. Of four dimensions the last is contiguous."""
    strides = [0, 0, 0]
    for dimension, stride in zip(TENSORS[name].shape[:3], tensor.stride()):
        strides[_STRIDES[dimension]] = stride
    return tuple(strides)


_STRIDES = {"batch": 0, "q heads": 1, "queries": 2, "keys": 2, "query blocks": 2}
"""Per dimension of an optional tensor, which of a kernel's strides is its own: batch, head, row."""
