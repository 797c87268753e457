"""Choosing the blocks of keys that blocks of queries see: :func:`select_blocks`, and its operator
`sage_aot::choose_blocks`, which chooses by the products of means."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch

from sage_aot._call.backends import backend_of, surroundings
from sage_aot._call.kv import QuantizedKV
from sage_aot._call.masks import BlockMask
from sage_aot._call.ops import LIBRARY, TAGS, implement
from sage_aot._call.pipeline import ByKind
from sage_aot._call.pooling import DEFAULT_BLOCK, PooledBlocks, pooled_of, rows_of_caller
from sage_aot._problem.arguments import block_sizes_of
from sage_aot._problem.options import integer_of, scalar_of
from sage_aot._problem.selection import CHOOSE_BY, By, Choice, Choosing, Pooling
from sage_aot.errors import ArgumentError


def select_blocks(q: torch.Tensor, k: torch.Tensor | PooledBlocks | QuantizedKV, *,
                  keep: float | Sequence[float] | torch.Tensor | None = None,
                  mass: float | Sequence[float] | torch.Tensor | None = None,
                  tau: float | Sequence[float] | torch.Tensor | None = None,
                  block_size: int | tuple[int, int] = DEFAULT_BLOCK, first: int = 1, near: int = 1,
                  least_alike: float = 0.0, dense_keys: int | tuple[int, int] = 0,
                  dense_queries: int | tuple[int, int] = 0, is_causal: bool = False, scale: float | None = None,
                  layout: str = "HND") -> BlockMask:
    """Choose the blocks of keys that each block of queries sees, by the products of the means of blocks.

    The score of a block of keys is the product of the mean of its keys and that of the queries, times the scale. Pass
    one of `keep`, `mass` and `tau`, each a number, or one for each q head. Nothing synchronizes, and equal calls give
    equal masks. The selection can be captured in a CUDA graph, and its result serves any number of calls, of later
    layers or steps.

    Args:
        q, k: as :func:`sage_aot.attn` takes them. k may be what :func:`pool_blocks` made of it, with ``centre=True``,
            or a QuantizedKV that ``quantize_kv(..., pool=...)`` made.
        keep: the share of the blocks that a block of queries sees, those with the best scores; above 0, at most 1. The
            values of a tensor are not read on the host, and so not checked.
        mass: as many blocks as have this share of the mass exp(score) of all (SpargeAttention); likewise.
        tau: the blocks whose scores lie above the mean of all by `tau` standard deviations (Sol-Attn), and the best
            block.
        block_size: queries and keys of a block, multiples of 64, or one number for both.
        first: so many first blocks of keys are seen in any case.
        near: blocks of keys less than so many blocks away from the queries' own position are seen in any case: with 1
            the block at that position, with 2 its neighbours too. 0: none. (The last query is at the last key.)
        least_alike: blocks whose rows are less alike are seen, and see, in any case: the part of the rows' mean square
            that their mean has, 0 to 1, is below this. 0: none.
        dense_keys: so many first keys, or (first, last), are seen in any case: a prompt's tokens.
        dense_queries: so many first queries, or (first, last), see every key.
        is_causal: no query sees a block whose keys all lie behind it. Pass is_causal to attn too. The choice
            takes no other mask into account: keys that a key mask or a window hides are part of the means, and blocks
            of such keys count towards `keep`. (attn replaces keys that its key_mask hides before it chooses.)
        scale, layout: as :func:`sage_aot.attn`.

    Returns:
        A :class:`sage_aot.BlockMask` for ``attn(..., block_mask=...)``. Each block of queries sees one block at least,
        if it sees any key by `is_causal`.

    Raises:
        ArgumentError: an argument is not as described.
        UnsupportedError: there are more blocks of keys than the kernel scores (8,192), or no kernel fits this GPU.
        CubinError, LaunchError: as :func:`sage_aot.attn`.

    Sources: SpargeAttention (arXiv:2502.18137), Sol-Attn (arXiv:2607.24027).

    >>> import torch, sage_aot
    >>> q, k, v = torch.randn(3, 1, 2, 512, 64)
    >>> blocks = sage_aot.sparse.select_blocks(q, k, keep=0.5)
    >>> sage_aot.attn(q, k, v, block_mask=blocks).shape
    torch.Size([1, 2, 512, 64])
    """
    rows = rows_of_caller("q", q, layout)
    sizes = block_sizes_of(block_size)
    amounts = amounts_of(rows, keep, mass, tau)
    choice = Choice(amounts.by, amounts.one, _flag("is_causal", is_causal), _scale(scale, rows.shape[3]),
                    _count("first", first), _count("near", near), _share("least_alike", least_alike),
                    ends_of("dense_keys", dense_keys), ends_of("dense_queries", dense_queries))
    pooled_q = pooled_of("q", q, sizes[0], False, False, layout)
    return choose_among(pooled_q, pooled_keys(k, sizes[1], layout), choice, amounts)


def choose_among(q: PooledBlocks, k: PooledBlocks, choice: Choice, amounts: Amounts) -> BlockMask:
    """The blocks that a choice takes, of what is pooled."""
    (batch, heads, _, headdim), (k_batch, kv_heads, _, k_headdim) = q.shape, k.shape
    alike = batch == k_batch and headdim == k_headdim and q.device == k.device
    if not alike or (heads % kv_heads if kv_heads else heads):
        raise ArgumentError(f"k: expected the batch, head dim and device of q, and heads of which those of q are a "
                            f"multiple, got {list(k.shape)} on {k.device} with q {list(q.shape)} on {q.device}")
    mask = _choose(q._data, k._data, amounts.tensor, list(amounts.each), list(q.shape), list(k.shape), q.block_rows,
                   k.block_rows, choice.by, choice.amount, choice.is_causal, choice.scale, choice.first, choice.near,
                   choice.least_alike, list(choice.dense_keys), list(choice.dense_queries))
    return BlockMask((q.block_rows, k.block_rows), mask, None)


# --- arguments --------------------------------------------------------------------------------------------------------


def pooled_keys(k: Any, block_rows: int, layout: str) -> PooledBlocks:
    """The means of blocks of keys: of a k, or those that it has been pooled to."""
    if isinstance(k, QuantizedKV):
        if k.pooled is None:
            raise ArgumentError("k: expected a QuantizedKV with the means of its blocks of keys, got one without; make "
                                "it by quantize_kv(k, v, pool=...)")
        k = k.pooled
    if not isinstance(k, PooledBlocks):
        return pooled_of("k", k, block_rows, True, False, layout)
    if k.block_rows != block_rows:
        raise ArgumentError(f"block_size: expected the {k.block_rows} keys of a block that k was pooled with, got "
                            f"{block_rows}")
    return k


class Amounts(NamedTuple):
    """Amounts of a choice, and what it goes by. An amount is one number; one for each q head; or a tensor of these."""

    by: By
    one: float
    each: tuple[float, ...]
    tensor: torch.Tensor | None


def amounts_of(q: torch.Tensor, keep: Any, mass: Any, tau: Any) -> Amounts:
    """The amounts of a selection for q, heads first; ArgumentError where they are not of its heads."""
    given = {name: value for name, value in zip(CHOOSE_BY, (keep, mass, tau)) if value is not None}
    if len(given) != 1:
        raise ArgumentError(f"keep, mass, tau: expected one of them, got {', '.join(given) or 'none'}")
    (by, value), = given.items()
    if isinstance(value, torch.Tensor) and value.dim() > 0:
        _check_amounts(by, value, q.shape[1], q.device)
        return Amounts(by, 0.0, (), value.contiguous())
    if not isinstance(value, Sequence):
        return Amounts(by, _checked_amount(by, value), (), None)
    if len(value) != q.shape[1]:
        raise ArgumentError(f"{by}: expected a number or one for each of {q.shape[1]} q heads, got {len(value)}")
    return Amounts(by, 0.0, tuple(_checked_amount(by, number) for number in value), None)


def _check_amounts(name: str, amounts: torch.Tensor, heads: int, device: torch.device) -> None:
    """Kernels read them by their address."""
    if amounts.dtype != torch.float32 or amounts.shape != (heads,) or amounts.device != device:
        raise ArgumentError(f"{name}: expected float32 [{heads}] on {device}, got {tuple(amounts.shape)} "
                            f"{amounts.dtype} on {amounts.device}")


@lru_cache(maxsize=1024)
def _as_tensor(numbers: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """Kept, since the copy to a GPU waits for it, and cannot be captured. Called within the operator alone, where
    devices are real."""
    return torch.tensor(numbers, dtype=torch.float32, device=device)


def _checked_amount(by: str, value: Any) -> float:
    is_right = is_finite(value) and (by == "tau" or 0 < value <= 1)
    if not is_right:
        raise ArgumentError(f"{by}: expected {'a finite number' if by == 'tau' else 'a share, above 0 and at most 1'}, "
                            f"got {value!r}")
    return float(value)


def is_finite(value: Any) -> bool:
    """True for a finite number, to a tracer too, which may not know the number."""
    number = value if isinstance(value, (int, float)) else scalar_of(value)
    return isinstance(number, (int, float)) and not isinstance(number, bool) and -math.inf < number < math.inf


def _scale(scale: Any, headdim: int) -> float:
    if scale is None:
        return float(headdim ** -0.5)
    if not is_finite(scale):
        raise ArgumentError(f"scale: expected None or a finite number, got {scale!r}")
    return float(scale)


def _share(name: str, value: Any) -> float:
    if not is_finite(value) or not 0 <= value <= 1:
        raise ArgumentError(f"{name}: expected a number from 0 to 1, got {value!r}")
    return float(value)


def _count(name: str, value: Any) -> int:
    found = integer_of(value)
    if found is None or not 0 <= found < 2**30:
        raise ArgumentError(f"{name}: expected a number of blocks, 0 or more, got {value!r}")
    return found


def ends_of(name: str, value: Any) -> tuple[int, int]:
    """Read how many first ones, and how many last ones, from a number or a pair."""
    given = tuple(value) if isinstance(value, (tuple, list)) else (value, 0)
    ends = tuple(map(integer_of, given))
    if len(ends) != 2 or any(end is None or not 0 <= end < 2**30 for end in ends):
        raise ArgumentError(f"{name}: expected how many first ones, or (first, last), got {value!r}")
    return ends  # type: ignore[return-value]


def _flag(name: str, value: Any) -> bool:
    found = value if isinstance(value, bool) else scalar_of(value)  # of which dynamo of torch 2.11 cannot ask the type
    if not isinstance(found, bool):
        raise ArgumentError(f"{name}: expected True or False, got {value!r}")
    return found


def check_numbers(by: str, amount: Any, first: Any, near: Any, least_alike: Any, dense_keys: Any,
                  dense_queries: Any) -> None:
    """Raise ArgumentError for numbers that :func:`select_blocks` would refuse for any q and k."""
    numbers = amount if isinstance(amount, Sequence) and not isinstance(amount, str) else (amount,)
    if not numbers:
        raise ArgumentError(f"{by}: expected a number, or one for each q head, got {amount!r}")
    for number in numbers:
        if isinstance(number, torch.Tensor) and number.dim() > 0:
            raise ArgumentError(f"{by}: expected a number, or one for each q head, got a tensor; pass its tolist()")
        _checked_amount(by, number)
    _count("first", first)
    _count("near", near)
    _share("least_alike", least_alike)
    ends_of("dense_keys", dense_keys)
    ends_of("dense_queries", dense_queries)


# --- the operators ----------------------------------------------------------------------------------------------------

_prepared: ByKind[Any] = ByKind()


def _choosing(q_shape: Sequence[int], k_shape: Sequence[int], per_head: bool, block_q: int, block_k: int,
              *choice: Any) -> Choosing:
    values = (tuple(value) if isinstance(value, list) else value for value in choice)  # of which torch makes lists
    made = cast("Callable[..., Choice]", Choice)(*values)
    return Choosing(_blocks_of(q_shape, block_q), _blocks_of(k_shape, block_k), made, per_head)


def _blocks_of(shape: Sequence[int], block_rows: int) -> Pooling:
    """The pooling of a tensor as far as a choice depends on it."""
    batch, heads, seqlen, headdim = shape
    return Pooling(batch, heads, seqlen, headdim, "f32", block_rows, centre=False)


def _run_choose(q_pooled: torch.Tensor, k_pooled: torch.Tensor, amounts: torch.Tensor | None, each: Sequence[float],
                q_shape: Sequence[int], k_shape: Sequence[int], *others: Any) -> torch.Tensor:
    if each:
        amounts = _as_tensor(tuple(each), q_pooled.device)
    if amounts is not None:
        _check_amounts("amounts", amounts, q_shape[1], q_pooled.device)
    choosing = _choosing(q_shape, k_shape, amounts is not None, *others)
    selected = q_pooled.new_empty(choosing.mask_shape, dtype=torch.bool)
    if selected.numel() > 0:
        around = handed, _ = surroundings()
        key = (*around, "choose", choosing, q_pooled.device)
        call = _prepared.remembered(key, around, lambda: (handed or backend_of(q_pooled)).bind_choice(
            choosing, q_pooled.get_device()))
        call(q_pooled, k_pooled, amounts, selected)
    return selected


def _fake_choose(q_pooled: torch.Tensor, k_pooled: torch.Tensor, amounts: torch.Tensor | None, each: Sequence[float],
                 q_shape: Sequence[int], k_shape: Sequence[int], *others: Any) -> torch.Tensor:
    choosing = _choosing(q_shape, k_shape, amounts is not None or bool(each), *others)
    return q_pooled.new_empty(choosing.mask_shape, dtype=torch.bool)


LIBRARY.define("choose_blocks(Tensor q_pooled, Tensor k_pooled, Tensor? amounts, float[] each, SymInt[] q_shape, "
               "SymInt[] k_shape, int block_q, int block_k, str choose_by, float amount, bool is_causal, float scale, "
               "int first, int near, float least_alike, int[] dense_keys, int[] dense_queries) -> Tensor", tags=TAGS)
_choose = implement("choose_blocks", _run_choose, _fake_choose)
