"""Sparse attention: which blocks of keys a block of queries sees, chosen by the data, or by the tokens' places.

    blocks = sage_aot.sparse.select_blocks(q, k, keep=0.25)
    out = sage_aot.attn(q, k, v, block_mask=blocks)             # this layer and step, or later ones too
    out = sage_aot.attn(q, k, v, sparse=sage_aot.Sparse(keep=0.25))     # both at once

docs/sparse.md has the methods, and how to judge one's own model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, overload

import torch

from sage_aot._call.patterns import near_and_first, radial_bands, sliding_tiles, tile_order
from sage_aot._call.pooling import PooledBlocks, pool_blocks
from sage_aot._call.selection import select_blocks
from sage_aot._call.sparse import Sparse
from sage_aot._tools.tune import KEEPS, Tuned, TunedLayer, TunedModel, load_tuned, save_tuned, tune_tensors
from sage_aot.errors import ArgumentError

__all__ = ["PooledBlocks", "Sparse", "Tuned", "TunedLayer", "TunedModel", "load_tuned", "near_and_first", "pool_blocks",
           "radial_bands", "save_tuned", "select_blocks", "sliding_tiles", "tile_order", "tune"]

_ALL = Sparse(keep=1.0)


@overload
def tune(target: tuple[torch.Tensor, ...] | Sequence[tuple[torch.Tensor, ...]], *, run: None = ..., error: float = ...,
         sparse: Sparse = ..., keeps: Sequence[float] = ..., **call: Any) -> Tuned: ...


@overload
def tune(target: torch.nn.Module, *, run: Callable[[Any], object], error: float = ..., sparse: Sparse = ...,
         keeps: Sequence[float] = ...) -> TunedModel: ...


def tune(target: Any, *, run: Callable[[Any], object] | None = None, error: float = 0.05, sparse: Sparse = _ALL,
         keeps: Sequence[float] = KEEPS, **call: Any) -> Tuned | TunedModel:
    """Find for each head the least share of blocks of keys at which its output stays close to that of all blocks.

    Args:
        target: ``(q, k, v)``; or a list of these, one for each prompt or step: a head's error is the worst of them. Or
            a model whose attention sage_aot serves, and not sparsely yet (docs/integrations.md); then pass `run`.
        run: runs the model, as in ``lambda model: model(**inputs)``. It is called twice, without gradients. Tuned are
            the calls that may be sparse: of tokens to themselves, from 16 blocks of keys on.
        error: bound of a head's relative L1, Σ |sparse − dense| / Σ |dense|; both are quantized alike.
        sparse: what the choice is made by, but for its `keep`: block_size, tail, dense_keys and so on.
        keeps: shares that are tried, and 1. A head that no share below 1 serves gets 1.
        call: further arguments of :func:`sage_aot.attn` with q, k and v, such as is_causal, scale and layout.

    Returns:
        Of tensors a :class:`Tuned`: a :class:`Sparse` whose `keep` has a share for each q head, and the density and the
        error of each. Of a model a :class:`TunedModel`: a :class:`Tuned` for each layer, by the name of its module.

    Raises:
        ArgumentError: an argument is not as described, or sage_aot served no call of the model.
        UnsupportedError, CubinError, LaunchError: as :func:`sage_aot.attn`.

    >>> import torch, sage_aot
    >>> q, k, v = torch.randn(3, 1, 2, 512, 64)
    >>> tuned = sage_aot.sparse.tune((q, k, v), error=0.1, sparse=sage_aot.Sparse(keep=1.0, block_size=64))
    >>> sage_aot.attn(q, k, v, sparse=tuned.sparse).shape, len(tuned.density), max(tuned.error) <= 0.1
    (torch.Size([1, 2, 512, 64]), 2, True)
    """
    if run is None:
        return tune_tensors(target, error=error, sparse=sparse, keeps=keeps, **call)
    if call:
        raise ArgumentError(f"{min(call)}: expected none with run, whose calls have their own, got one; leave it out")
    from sage_aot.integrations._tune import tune_model  # which needs more of the package than attention does

    return tune_model(target, run=run, error=error, sparse=sparse, keeps=keeps)
