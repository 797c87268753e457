"""The work of a selection of blocks, apart from its tensors: pooling one tensor, and choosing blocks of keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sage_aot._kernels.axes import least_headdim
from sage_aot._problem.tensors import MASK_BLOCK

By = Literal["keep", "mass", "tau"]
CHOOSE_BY: tuple[By, ...] = ("keep", "mass", "tau")
"""Measures that blocks of keys are chosen by, in the order of ChooseBy in templates/include/sage/select/params.cuh."""


@dataclass(frozen=True)
class Pooling:
    """The pooling of one tensor: a mean of each block of its rows."""

    batch: int
    heads: int
    seqlen: int
    headdim: int
    dtype: str  # "f16", "bf16" or "f32"
    block_rows: int
    centre: bool  # the mean of a sample of the head's rows is subtracted

    @property
    def blocks(self) -> int:
        """Blocks of a head."""
        return -(-self.seqlen // self.block_rows)

    @property
    def channels(self) -> int:
        """Channels of a mean: those of the kernel."""
        return least_headdim(self.headdim)

    def sizes(self) -> dict[str, int]:
        """Bytes of what is pooled, by the fields of PoolParams."""
        blocks = self.batch * self.heads * self.blocks
        return {"x_hat": blocks * self.channels, "x_scale": 4 * blocks, "x_alike": 4 * blocks}


@dataclass(frozen=True)
class Choice:
    """Parameters that a selection chooses by. Lengths are in queries or keys, but for those that count blocks."""

    by: By
    amount: float
    is_causal: bool
    scale: float  # on q·kᵀ
    first: int  # blocks of keys that every query sees
    near: int  # blocks of keys less than so many blocks away from a query's own are kept; 0: none
    least_alike: float  # blocks whose rows are less alike are kept; 0: none
    dense_keys: tuple[int, int]  # so many first and last keys that every query sees
    dense_queries: tuple[int, int]  # so many first and last queries that see every key


@dataclass(frozen=True)
class Choosing:
    """The choice of blocks of keys for blocks of queries."""

    q: Pooling
    k: Pooling
    choice: Choice
    per_head: bool  # each q head has an amount of its own

    @property
    def mask_shape(self) -> tuple[int, int, int, int]:
        """The shape of the mask: blocks of 64 queries by 64 keys."""
        return (self.q.batch, self.q.heads, self.q.blocks * (self.q.block_rows // MASK_BLOCK),
                self.k.blocks * (self.k.block_rows // MASK_BLOCK))
