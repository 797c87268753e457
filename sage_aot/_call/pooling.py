"""Means of the blocks of rows of a tensor: :func:`pool_blocks`, and its operator `sage_aot::pool_blocks`, one kernel
whose results have fixed sizes, so that nothing synchronizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sage_aot._call.backends import backend_of, surroundings
from sage_aot._call.ops import LIBRARY, TAGS, implement
from sage_aot._call.pipeline import ByKind
from sage_aot._problem.arguments import (
    block_rows_of,
    check_dense,
    check_device,
    check_last_stride,
    check_tensors_are,
)
from sage_aot._problem.derivatives import is_differentiated, is_transformed
from sage_aot._problem.options import LAYOUTS
from sage_aot._problem.problem import DTYPES, heads_first
from sage_aot._problem.selection import Pooling
from sage_aot.errors import ArgumentError

DEFAULT_BLOCK = 128
"""Queries and keys of a block: those of the tiles of most kernels."""


@dataclass(frozen=True, eq=False, repr=False)
class PooledBlocks:
    """The means of the blocks of rows of a tensor, made by :func:`pool_blocks`. Frozen; bound to its device."""

    shape: tuple[int, int, int, int]
    """Batch, heads, rows and head dim of the tensor."""
    block_rows: int
    dtype: torch.dtype
    """Dtype of the tensor."""
    means: torch.Tensor | None
    """float32 ``[batch, heads, blocks, headdim]``, of the rows as they came; None where they were not asked for."""
    _data: torch.Tensor

    @property
    def device(self) -> torch.device:
        return self._data.device

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors of this object."""
        return (self._data,) if self.means is None else (self._data, self.means)

    def __repr__(self) -> str:
        return f"PooledBlocks({list(self.shape)} {self.dtype} on {self.device}, blocks of {self.block_rows})"


def pool_blocks(x: torch.Tensor, block_rows: int = DEFAULT_BLOCK, *, centre: bool = False, means: bool = False,
                layout: str = "HND") -> PooledBlocks:
    """Take the mean of each block of rows of q or k, for any number of selections.

    Args:
        x: ``[batch, heads, seq, headdim]`` for layout ``"HND"``; float16, bfloat16 or float32, headdim up to 256.
        block_rows: rows of a block, a multiple of 64; the last block may have fewer.
        centre: subtract the mean over a sample of 64 rows first, as a k should have it: the choice does not change, and
            the means, which are rounded to 8 bits, keep more of what differs. Values that are not finite count as zero.
        means: keep the means of the rows as they came, too. They have no derivative: an x that is differentiated is
            refused.
        layout: ``"HND"`` or ``"NHD"``.

    Raises:
        ArgumentError, UnsupportedError, CubinError, LaunchError: as :func:`sage_aot.attn`.
    """
    check_tensors_are(x=x)
    if means and (x.requires_grad and torch.is_grad_enabled() or is_transformed() and is_differentiated(x)):
        raise ArgumentError("x: expected a tensor that is not differentiated, since the means of blocks have no "
                            "derivative, got one that is; pass x.detach()")
    return pooled_of("x", x, block_rows, centre, means, layout)


def pooled_of(name: str, x: Any, block_rows: Any, centre: bool, means: bool, layout: str,
              name_of_rows: str = "block_rows") -> PooledBlocks:
    """:func:`pool_blocks` of an argument that has another name, as errors call it."""
    rows = rows_of_caller(name, x, layout)
    block_rows = block_rows_of(block_rows, name_of_rows)
    data, found = _pool(rows, block_rows, centre, means)
    batch, heads, seq, headdim = rows.shape
    return PooledBlocks((batch, heads, seq, headdim), block_rows, x.dtype, found if means else None, data)


def rows_of_caller(name: str, x: Any, layout: Any) -> torch.Tensor:
    """A tensor of the caller's, heads first and without a history of gradients, of which a selection has none."""
    check_tensors_are(**{name: x})
    check_dense(**{name: x})
    check_device(**{name: x})
    if layout not in LAYOUTS:
        raise ArgumentError(f"layout: expected one of {', '.join(map(repr, LAYOUTS))}, got {layout!r}")
    if x.dim() != 4 or x.dtype not in DTYPES or not 1 <= x.shape[3] <= 256:
        raise ArgumentError(f"{name}: expected [batch, heads, seq, headdim] with 1 to 256 channels of float16, "
                            f"bfloat16 or float32, got {tuple(x.shape)} {x.dtype}")
    check_last_stride(name, x)
    return heads_first(x.detach(), layout)


# --- the operator -----------------------------------------------------------------------------------------------------

_prepared: ByKind[Any] = ByKind()


def _pooling(x: torch.Tensor, block_rows: int, centre: bool) -> Pooling:
    batch, heads, seqlen, headdim = x.shape
    return Pooling(batch, heads, seqlen, headdim, DTYPES[x.dtype], block_rows, centre)


def _run_pool(x: torch.Tensor, block_rows: int, centre: bool, means: bool) -> tuple[torch.Tensor, torch.Tensor]:
    pooling = _pooling(x, block_rows, centre)
    data, found = _fake_pool(x, block_rows, centre, means)
    if x.numel() > 0:
        around = handed, _ = surroundings()
        key = (*around, "pool", pooling, x.stride(), x.device, means)
        call = _prepared.remembered(key, around, lambda: (handed or backend_of(x)).bind_pool(pooling, x, means))
        call(x, data, found if means else None)
    return data, found


def _fake_pool(x: torch.Tensor, block_rows: int, centre: bool, means: bool) -> tuple[torch.Tensor, torch.Tensor]:
    from sage_aot._launch.selection import pooled_offsets

    pooling = _pooling(x, block_rows, centre)
    _, size = pooled_offsets(pooling)
    shape = (pooling.batch, pooling.heads, pooling.blocks, pooling.headdim) if means else (0,)
    return x.new_empty(size, dtype=torch.uint8), x.new_empty(shape, dtype=torch.float32)


LIBRARY.define("pool_blocks(Tensor x, int block_rows, bool centre, bool means) -> (Tensor, Tensor)", tags=TAGS)
_pool = implement("pool_blocks", _run_pool, _fake_pool)
