"""Attention that chooses its blocks of keys: :class:`Sparse`, and the call that it makes of attn's."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from sage_aot._call.forms import Result, attend, call_of_attn, check_qkv, copied_to, options_of
from sage_aot._call.kv import QuantizedKV, asked_with
from sage_aot._call.masks import BlockMask, masks_of_call, shown_alone
from sage_aot._call.pooling import DEFAULT_BLOCK, PooledBlocks, pooled_of, rows_of_caller
from sage_aot._call.selection import amounts_of, check_numbers, ends_of, pooled_keys, select_blocks
from sage_aot._problem.arguments import block_sizes_of, check_tensors_are
from sage_aot._problem.derivatives import check_no_derivative, is_transformed
from sage_aot._problem.options import Asked, for_schema, for_tracer, scalar_of
from sage_aot._problem.problem import heads_first, holds
from sage_aot._problem.selection import CHOOSE_BY
from sage_aot._problem.tensors import MASK_BLOCK, taken_by
from sage_aot.errors import ArgumentError


@dataclass(frozen=True)
class Sparse:
    """Choice of the blocks of keys that a call computes: ``attn(q, k, v, sparse=Sparse(keep=0.25))``.

    Args:
        keep, mass, tau, block_size, first, near, least_alike, dense_keys, dense_queries: as
            :func:`sage_aot.sparse.select_blocks`. Of `keep`, `mass` and `tau` one, a number, or one for each q head.
        tail: blocks that are not chosen have a part in the output, too: the mean of their keys with the weight of all
            of them, and the mean of their values. Such a call takes exponentials where others have linear P, and a
            second, small attention: docs/sparse.md says when that pays. In means a value of v that is not
            finite counts as zero, one of k as the mean of its channel over a sample of 64 keys (zero where that is not
            finite). A mean of values is zero where their sum over the block is beyond float32.

    The choice takes no mask into account but `is_causal`. Keys that a window or a mask that differs by query hides are
    part of the means. In a call of attn a key that a `key_mask` hides counts as a copy of the last visible key before
    it, or of the first visible key. Blocks of hidden keys count towards `keep`.

    >>> import torch, sage_aot
    >>> q, k, v = torch.randn(3, 1, 2, 512, 64)
    >>> sage_aot.attn(q, k, v, sparse=sage_aot.Sparse(keep=0.5)).shape
    torch.Size([1, 2, 512, 64])
    """

    keep: float | tuple[float, ...] | None = None
    mass: float | tuple[float, ...] | None = None
    tau: float | tuple[float, ...] | None = None
    block_size: int | tuple[int, int] = DEFAULT_BLOCK
    first: int = 1
    near: int = 1
    least_alike: float = 0.0
    dense_keys: int | tuple[int, int] = 0
    dense_queries: int | tuple[int, int] = 0
    tail: bool = False

    def __post_init__(self) -> None:
        given = [name for name in CHOOSE_BY if getattr(self, name) is not None]
        if len(given) != 1:
            raise ArgumentError(f"Sparse: expected one of keep, mass and tau, got {', '.join(given) or 'none'}")
        by, = given
        for name in (by, "block_size", "first", "near", "least_alike", "dense_keys", "dense_queries", "tail"):
            object.__setattr__(self, name, _plain(getattr(self, name)))
        block_sizes_of(self.block_size)
        check_numbers(by, getattr(self, by), self.first, self.near, self.least_alike, self.dense_keys,
                      self.dense_queries)
        if not isinstance(self.tail, bool):
            raise ArgumentError(f"tail: expected True or False, got {self.tail!r}")

    def select(self, q: torch.Tensor, k: torch.Tensor | PooledBlocks | QuantizedKV, *, is_causal: bool = False,
               scale: float | None = None, layout: str = "HND") -> BlockMask:
        """The blocks that this chooses: :func:`sage_aot.sparse.select_blocks` with its arguments. A choice may serve
        later steps or layers as ``attn(..., block_mask=...)``. With `tail` a last block that has fewer keys than the
        others is chosen in any case, since its mean would have another weight."""
        dense_keys = ends_of("dense_keys", self.dense_keys)
        if self.tail and not holds(_keys_of(k, layout) % block_sizes_of(self.block_size)[1] == 0):
            dense_keys = dense_keys[0], max(dense_keys[1], 1)
        return select_blocks(q, k, keep=self.keep, mass=self.mass, tau=self.tau, block_size=self.block_size,
                             first=self.first, near=self.near, least_alike=self.least_alike, dense_keys=dense_keys,
                             dense_queries=self.dense_queries, is_causal=is_causal, scale=scale, layout=layout)


def _plain(value: Any) -> Any:
    """The value as a setting keeps it: scalars of NumPy and torch as Python's, a list, which has no hash, as a tuple.
    Not scalar_of() of all: it puts a guard on a tracer's symbols, and code would be compiled anew for each number."""
    if isinstance(value, (list, tuple)):
        return tuple([_plain(each) for each in value])
    return scalar_of(value) if hasattr(value, "item") else value


def attend_sparse(q: Any, k: Any, v: Any, asked: Asked, sparse: Any, optional: dict[str, Any],
                  out: torch.Tensor | None, return_lse: bool) -> Result:
    """Make a call of attn whose blocks of keys are chosen. `optional`: the optional tensors of attn by name."""
    _check(k, asked, sparse, optional)
    if optional["attn_mask"] is not None:
        key_mask, attn_mask, _ = masks_of_call(q, k, asked.layout, optional["key_mask"], optional["attn_mask"], None)
        optional = optional | {"key_mask": key_mask, "attn_mask": attn_mask}
    if optional["key_mask"] is not None:
        k, v = shown_alone(k, v, optional["key_mask"], asked.layout)
    if sparse.tail and isinstance(k, QuantizedKV):
        check_tensors_are(q=q)
        asked = asked_with(k, v, asked)
    elif sparse.tail:
        check_qkv(q, k, v)
    if sparse.tail and not holds(q.numel() == 0) and not holds(_is_empty(k)):
        return _with_tail(q, k, v, asked, sparse, optional, out, return_lse)
    blocks = sparse.select(q, k, is_causal=asked.is_causal, scale=asked.scale, layout=asked.layout)
    return _attend(q, k, v, asked, optional | {"block_mask": blocks}, out, return_lse)


def with_stand_in(q: Any, k: Any, asked: Asked, sparse: Any, optional: dict[str, Any]) -> dict[str, Any]:
    """The optional tensors of such a call, with a mask of the shape of that which it would choose, whose values nobody
    reads. Raises as :func:`attend_sparse` does."""
    _check(k, asked, sparse, optional)
    rows = rows_of_caller("q", q, asked.layout)
    amounts_of(rows, sparse.keep, sparse.mass, sparse.tau)
    if isinstance(k, QuantizedKV):
        pooled_keys(k, block_sizes_of(sparse.block_size)[1], asked.layout)
    shapes = [rows.shape, k.shape if isinstance(k, QuantizedKV) else rows_of_caller("k", k, asked.layout).shape]
    sizes = block_sizes_of(sparse.block_size)
    blocks = [-(-shape[2] // size) * (size // MASK_BLOCK) for shape, size in zip(shapes, sizes)]
    mask = torch.empty(1, 1, 1, 1, dtype=torch.bool, device=q.device).expand(*shapes[0][:2], *blocks)
    return optional | {"block_mask": BlockMask(sizes, mask, None)}


def no_choice_of_sequences() -> ArgumentError:
    """Error of a choice of blocks in a call of attn_varlen."""
    return ArgumentError("sparse: expected None in a call of attn_varlen, got one; call attn for each sequence")


def _check(k: Any, asked: Asked, sparse: Any, optional: dict[str, Any]) -> None:
    """Raise ArgumentError for a wrong option, with the message of any other call of attn, and for arguments that do not
    go with a choice of blocks."""
    for_tracer(*asked) if torch.compiler.is_dynamo_compiling() else for_schema(*asked)
    if not isinstance(sparse, Sparse):
        raise ArgumentError(f"sparse: expected a sage_aot.Sparse or None, got {type(sparse).__name__}")
    if optional["block_mask"] is not None:
        raise ArgumentError("block_mask: expected None with sparse, which chooses blocks itself, got a BlockMask; "
                            "leave one out")
    if sparse.tail:
        _check_tail(k, asked, optional, sparse)


def _attend(q: Any, k: Any, v: Any, asked: Asked, optional: dict[str, Any], out: torch.Tensor | None,
            return_lse: bool) -> Result:
    return attend(call_of_attn(q, k, v, asked, **optional), out, return_lse)


# --- the tail ---------------------------------------------------------------------------------------------------------
# A block of n keys that a query does not see counts as n keys at the mean of its keys, with the mean of its values: its
# mass is n · exp(q · k̄ · scale), and its part of the output is v̄. A second attention, over means, has the log-sum-exp
# of these parts but for log n, and the two outputs are merged by their log-sum-exps. Exact where a block's keys are
# equal.
# Source: Sol-Attn (arXiv:2607.24027).


def _check_tail(k: Any, asked: Asked, optional: dict[str, Any], sparse: Sparse) -> None:
    hidden = [name for name in ("key_mask", "attn_mask") if optional[name] is not None]
    hidden += ["window"] if asked.window is not None and tuple(asked.window) != (-1, -1) else []
    if hidden:
        raise ArgumentError(f"{hidden[0]}: expected None where the tail of blocks counts, whose means have a part of "
                            f"each key, got one; pass Sparse(..., tail=False)")
    if isinstance(k, QuantizedKV) and k.pooled_v is None:
        raise ArgumentError("k: expected a QuantizedKV with the means of its blocks of keys and values where the tail "
                            "of blocks counts, got one without; make it by quantize_kv(k, v, pool=..., tail=True)")
    if asked.is_causal and sparse.near < 1:
        raise ArgumentError("near: expected 1 or more where the tail of blocks counts in a causal call, so that no "
                            "mean has keys behind a query, got 0")


def _with_tail(q: Any, k: Any, v: Any, asked: Asked, sparse: Sparse, optional: dict[str, Any],
               out: torch.Tensor | None, return_lse: bool) -> Result:
    options_of(q, asked, out, return_lse)  # may raise
    if is_transformed():
        check_no_derivative(out=out)  # of other tensors the calls below ask
    block_q, block_k = block_sizes_of(sparse.block_size)
    pooled, of_values = _pooled_pair(k, v, block_k, asked.layout)
    blocks = sparse.select(q, pooled, is_causal=asked.is_causal, scale=asked.scale, layout=asked.layout)
    seen, lse = _attend(q, k, v, asked, optional | {"block_mask": blocks}, None, True)  # not to `out`, which may be q
    assert pooled.means is not None and of_values.means is not None
    means = pooled.means.to(q.dtype), of_values.means.to(q.dtype)
    tail, of_tail = _over_means(heads_first(q, asked.layout), means, _tail_of(blocks, q, k, asked), block_q,
                                _of_means(asked), seen.dtype)
    of_tail = of_tail + math.log(block_k)
    share = torch.sigmoid(of_tail - lse).nan_to_num(0.0)[..., None].to(seen.dtype)  # nan: the row sees no key
    merged = heads_first(torch.lerp(heads_first(seen, asked.layout), tail, share), asked.layout)
    made = (merged, torch.logaddexp(lse, of_tail)) if return_lse else merged
    return made if out is None else copied_to(out, seen, made)


def _pooled_pair(k: Any, v: Any, block: int, layout: str) -> tuple[PooledBlocks, PooledBlocks]:
    """The means of the blocks of k and of v, those of a QuantizedKV where k is one."""
    if not isinstance(k, QuantizedKV):
        return pooled_of("k", k, block, True, True, layout), pooled_of("v", v, block, False, True, layout)
    assert k.pooled_v is not None
    return pooled_keys(k, block, layout), k.pooled_v


def _keys_of(k: torch.Tensor | PooledBlocks | QuantizedKV, layout: str) -> int:
    return heads_first(k, layout).shape[2] if isinstance(k, torch.Tensor) else k.shape[2]


def _is_empty(k: torch.Tensor | QuantizedKV) -> bool:
    return k.numel() == 0 if isinstance(k, torch.Tensor) else 0 in k.shape


def _of_means(asked: Asked) -> Asked:
    """The options of the attention over means, which no mask of the call concerns."""
    return asked.heads_first()._replace(is_causal=False)


def _tail_of(blocks: BlockMask, q: torch.Tensor, k: torch.Tensor | QuantizedKV, asked: Asked) -> torch.Tensor:
    """The blocks that the tail has: bool [batch, q heads, query blocks, key blocks]."""
    block_q, block_k = blocks.block_size
    rows, columns = block_q // MASK_BLOCK, block_k // MASK_BLOCK
    unseen = ~blocks.blocks[:, :, ::rows, ::columns]
    if not asked.is_causal:
        return unseen
    queries, keys = (_keys_of(x, asked.layout) for x in (q, k))
    first_query = torch.arange(unseen.shape[2], device=q.device) * block_q
    last_key = torch.arange(1, unseen.shape[3] + 1, device=q.device) * block_k - 1
    return unseen & (last_key <= first_query[:, None] + keys - queries)


def _over_means(q: torch.Tensor, means: tuple[torch.Tensor, torch.Tensor], tail: torch.Tensor, block_q: int,
                asked: Asked, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over means, where the queries of a block see what `tail` says: the output, heads first, of that dtype,
    and its log-sum-exp. A head is a batch entry, and a block of queries is a head of it: so a mask has one row for
    them, and q stays where it is."""
    batch, heads, queries, headdim = q.shape
    k, v = (x.repeat_interleave(heads // x.shape[1], 1).flatten(0, 1).unsqueeze(1) for x in means)
    whole = queries // block_q * block_q
    parts = []
    for begin, end, rows in ((0, whole, block_q), (whole, queries, queries - whole)):
        if begin < end:
            seen = _in_whole_vectors(tail[:, :, begin // block_q: -(-end // block_q)].flatten(0, 1).unsqueeze(2))
            blocks = torch.unflatten(q[:, :, begin:end].flatten(0, 1), 1, (-1, rows))
            found, of_rows = _attend(blocks, k, v, asked, _NO_TENSORS | {"attn_mask": seen}, None, True)
            parts.append((found.reshape(batch, heads, -1, headdim).to(dtype), of_rows.reshape(batch, heads, -1)))
    if len(parts) == 1:
        return parts[0]
    out, lse = (torch.cat(part, 2) for part in zip(*parts))
    return out, lse


def _in_whole_vectors(mask: torch.Tensor) -> torch.Tensor:
    """Lay out a mask so that its rows begin at multiples of 16 bytes: 16 of its elements are read at once."""
    keys = mask.shape[-1]
    return torch.nn.functional.pad(mask, (0, -keys % 16))[..., :keys]


_NO_TENSORS: dict[str, Any] = dict.fromkeys(taken_by("dense"))
