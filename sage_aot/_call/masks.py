"""Masks that differ by query: :func:`block_mask`, and how a call's masks reach the operators.

The operators take masks of the shapes in the table TENSORS. A dimension that a mask has not, or of size one, is
expanded: it has stride zero, and the kernels then make one list for all of its entries.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sage_aot._call.kv import QuantizedKV
from sage_aot._problem.arguments import block_sizes_of, check_optional_are, check_tensors_are
from sage_aot._problem.derivatives import is_transformed
from sage_aot._problem.options import LAYOUTS
from sage_aot._problem.problem import heads_first, holds
from sage_aot._problem.tensors import MASK_BLOCK
from sage_aot.errors import ArgumentError

_SCORES = "[batch, q heads, queries, keys]"


@dataclass(frozen=True, eq=False, repr=False)
class BlockMask:
    """A mask of blocks for any number of calls, made by :func:`block_mask`. Frozen; bound to its device."""

    block_size: tuple[int, int]
    """Queries and keys of a block as it was given."""
    blocks: torch.Tensor
    """bool ``[batch or 1, heads or 1, query blocks, key blocks]``, of 64 queries by 64 keys."""
    elements: torch.Tensor | None
    """bool ``[batch or 1, heads or 1, queries, keys]``: what blocks that are seen in part show; None: all of each."""

    @property
    def device(self) -> torch.device:
        return self.blocks.device

    def to(self, device: torch.device | str | int) -> BlockMask:
        """Return the mask on another device."""
        elements = None if self.elements is None else self.elements.to(device)
        return BlockMask(self.block_size, self.blocks.to(device), elements)

    def __repr__(self) -> str:
        return (f"BlockMask({list(self.blocks.shape)} blocks of {MASK_BLOCK} x {MASK_BLOCK} on {self.device}"
                f"{', some in part' if self.elements is not None else ''})")


def block_mask(mask: Any, block_size: int | tuple[int, int] | None = None) -> BlockMask:
    """Make a mask of blocks: which blocks of keys a block of queries sees. Tiles that are not seen are not read.

    Args:
        mask: bool ``[batch or 1, q heads or 1, query blocks, key blocks]``, or without its first one or two dimensions:
            True where the queries of a block see the keys of a block. The last blocks may be cut off by the lengths of
            a call. Or the ``BlockMask`` of ``torch.nn.attention.flex_attention``: its full blocks are seen whole, and
            its ``mask_mod`` says, element by element, what its other blocks show.
        block_size: queries and keys of a block, multiples of 64, or one number for both. None: 128, or that of a torch
            BlockMask.

    Returns:
        A :class:`BlockMask` for calls ``attn(..., block_mask=...)`` on its device. The memory that it holds is a byte
        for each 64 x 64 of its queries and keys; of a torch BlockMask with blocks that are seen in part, one for each
        query and key.

    Raises:
        ArgumentError: `mask` is not as described, or the size of a block is no multiple of 64.

    Source: the conventions of FlexAttention and of block-sparse video models.

    >>> import torch, sage_aot
    >>> q, k, v = torch.randn(3, 1, 2, 256, 64)
    >>> blocks = sage_aot.block_mask(torch.tensor([[True, False], [True, True]]), 128)
    >>> sage_aot.attn(q, k, v, block_mask=blocks).shape
    torch.Size([1, 2, 256, 64])
    """
    if isinstance(mask, BlockMask):
        raise ArgumentError("mask: expected a bool tensor of blocks or a torch BlockMask, got a sage_aot.BlockMask; "
                            "pass it to attn as it is")
    if isinstance(mask, torch.Tensor):
        return _of_blocks(mask, block_sizes_of(128 if block_size is None else block_size), None)
    if not (hasattr(mask, "mask_mod") and hasattr(mask, "to_dense")):
        raise ArgumentError(f"mask: expected a bool tensor of blocks or a torch BlockMask, got {type(mask).__name__}; "
                            f"make one with torch.as_tensor(mask)")
    sizes = block_sizes_of(mask.BLOCK_SIZE)
    if block_size is not None and block_sizes_of(block_size) != sizes:
        raise ArgumentError(f"block_size: expected that of the BlockMask, {sizes}, got {block_size}; leave it out")
    return _of_blocks(mask.to_dense().bool(), sizes, _elements(mask))


def _of_blocks(mask: torch.Tensor, sizes: tuple[int, int], elements: torch.Tensor | None) -> BlockMask:
    if mask.dtype != torch.bool:
        raise ArgumentError(f"mask: expected torch.bool, True where blocks are seen, got {mask.dtype}; pass "
                            f"mask.bool()")
    if not 2 <= mask.dim() <= 4:
        raise ArgumentError(f"mask: expected [batch, q heads, query blocks, key blocks], or the last two or three of "
                            f"these, got shape {tuple(mask.shape)}; of one key block pass mask.unsqueeze(-1)")
    blocks = mask[(None,) * (4 - mask.dim())]
    rows, columns = (size // MASK_BLOCK for size in sizes)
    return BlockMask(sizes, blocks.repeat_interleave(rows, -2).repeat_interleave(columns, -1).contiguous(), elements)


def _elements(mask: Any) -> torch.Tensor | None:
    """Elements that the mask_mod of a torch BlockMask shows, and full blocks; None where no block is seen in part."""
    from torch.nn.attention.flex_attention import create_mask

    if not bool(mask.kv_num_blocks.any()):
        return None
    batch, heads = mask.kv_num_blocks.shape[:2]
    queries, keys = mask.seq_lengths
    made: torch.Tensor = create_mask(mask.mask_mod, batch, heads, queries, keys, device=str(mask.kv_indices.device))
    if mask.full_kv_num_blocks is None:
        return made
    rows, columns = mask.BLOCK_SIZE
    full = _dense(mask.full_kv_num_blocks, mask.full_kv_indices)
    return made | full.repeat_interleave(rows, -2).repeat_interleave(columns, -1)[..., :queries, :keys]


def _dense(counts: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """The blocks of a torch BlockMask's lists: bool, of the shape of `indices`, of whose rows the first count."""
    listed = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    return torch.zeros_like(indices).scatter_add_(-1, indices.long(), listed.to(indices.dtype)) > 0


# --- the masks of a call ----------------------------------------------------------------------------------------------


def masks_of_call(q: Any, k: Any, layout: Any, key_mask: Any, attn_mask: Any,
                  blocks: Any) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """The key mask, the mask of elements and that of blocks as the operators take them. ArgumentError for masks that
    do not fit q and k. An `attn_mask` that differs by batch entry alone is a key mask, which saves more, but in calls
    with a QuantizedKV, which have none."""
    check_optional_are(key_mask=key_mask, attn_mask=attn_mask)
    check_tensors_are(q=q)
    if not isinstance(k, QuantizedKV):
        check_tensors_are(k=k)
    if layout not in LAYOUTS or q.dim() != 4 or not isinstance(k, QuantizedKV) and k.dim() != 4:
        return key_mask, attn_mask, getattr(blocks, "blocks", None)  # whose shapes the operators refuse
    batch, heads, queries, _ = heads_first(q, layout).shape
    keys = k.shape[2] if isinstance(k, QuantizedKV) else heads_first(k, layout).shape[2]
    shape = batch, heads, queries, keys
    of_blocks, elements = (None, None) if blocks is None else _blocks_of_call(blocks, shape)
    if attn_mask is not None and attn_mask.dtype != torch.bool and blocks is not None:
        return key_mask, attn_mask, of_blocks  # refused by the operators
    if attn_mask is not None and not isinstance(k, QuantizedKV) and _is_of_keys(attn_mask):
        of_keys = _expanded("attn_mask", attn_mask, (batch, 1, 1, keys), _SCORES)[:, 0, 0]
        key_mask, attn_mask = of_keys if key_mask is None else _joined(of_keys, key_mask), None
    if attn_mask is not None:
        attn_mask = _expanded("attn_mask", attn_mask, shape, _SCORES)
    if elements is not None:
        attn_mask = elements if attn_mask is None else elements & attn_mask
    return key_mask, attn_mask, of_blocks


def _joined(of_keys: torch.Tensor, key_mask: torch.Tensor) -> torch.Tensor:
    """The keys that both masks show; the second mask alone where the operators refuse it."""
    is_none = key_mask.dtype != torch.bool or _differ(key_mask.shape, of_keys.shape)
    return key_mask if is_none else of_keys & key_mask


def keys_of_choice(q: torch.Tensor, k: torch.Tensor, layout: str, key_mask: torch.Tensor | None,
                   attn_mask: torch.Tensor | None) -> torch.Tensor:
    """The keys by which a call with these masks chooses its blocks."""
    if attn_mask is not None:
        key_mask, _, _ = masks_of_call(q, k, layout, key_mask, attn_mask, None)
    return k if key_mask is None else shown_alone(k, k, key_mask, layout)[0]


def shown_alone(k: Any, v: Any, key_mask: Any, layout: Any) -> tuple[Any, Any]:
    """k and v with, for each key that a key mask hides, a copy of the key before it that it shows, or of the first such
    key; of the first key where it shows none. For calls that drop no keys: all of them have a part in means and scales.
    The same k and v where the operators refuse one of the arguments."""
    tensors = k, v, key_mask
    if layout not in LAYOUTS or not all(isinstance(x, torch.Tensor) and x.device == k.device for x in tensors):
        return k, v
    shape = k.shape[::2] if layout == "HND" else k.shape[:2]
    if key_mask.dtype != torch.bool or not k.dim() == v.dim() == 4:
        return k, v
    if _differ(key_mask.shape, shape) or _differ(k.shape, v.shape):
        return k, v
    taken = _shown_in_place(key_mask)
    return _keys_taken(k, taken, layout), _keys_taken(v, taken, layout)


def _shown_in_place(key_mask: torch.Tensor) -> torch.Tensor:
    """The key that stands in for each key, as above: int64 [batch, keys]."""
    rank = key_mask.cumsum(1) - 1  # of the last shown key up to each key, among those shown
    keys = key_mask.shape[1]
    places = torch.arange(keys, device=key_mask.device).expand(key_mask.shape)
    shown = places.new_zeros(key_mask.shape[0], keys + 1).scatter(1, torch.where(key_mask, rank, keys), places)
    return shown.gather(1, rank.clamp(min=0))


def _keys_taken(x: torch.Tensor, taken: torch.Tensor, layout: str) -> torch.Tensor:
    """k or v with, for each key, the one that `taken` names."""
    rows, index = (2, taken[:, None, :, None]) if layout == "HND" else (1, taken[:, :, None, None])
    words = _in_words(x)
    found = words.gather(rows, index.expand_as(words))
    return found if words is x else found.view(x.dtype)


def _in_words(x: torch.Tensor) -> torch.Tensor:
    """Memory of x in elements of up to 16 bytes, since gather reads an index for each element. To a tracer, and where a
    gradient is asked for, which the operators refuse, x itself."""
    is_traced = torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None or is_transformed()
    if is_traced or x.requires_grad or type(x) is not torch.Tensor:
        return x
    for dtype in (torch.complex128, torch.complex64):
        count = dtype.itemsize // x.element_size()
        sizes = *x.stride()[:-1], x.shape[-1], x.storage_offset()
        if x.stride(-1) == 1 and not any(size % count for size in sizes) and x.data_ptr() % dtype.itemsize == 0:
            return x.view(dtype)
    return x


def _is_of_keys(attn_mask: torch.Tensor) -> bool:
    return (attn_mask.dtype == torch.bool and 0 < attn_mask.dim() <= 4
            and all(holds(size == 1) for size in attn_mask.shape[-3:-1]))


def _differ(one: Sequence[int], other: Sequence[int]) -> bool:
    """True where two shapes differ; False where a tracer cannot know it."""
    return len(one) != len(other) or any(holds(a != b) for a, b in zip(one, other))


def _blocks_of_call(blocks: Any, shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor | None]:
    if not isinstance(blocks, BlockMask):
        raise ArgumentError(f"block_mask: expected a sage_aot.BlockMask, got {type(blocks).__name__}; make one with "
                            f"sage_aot.block_mask")
    batch, heads, queries, keys = shape
    needed = [-(-length // size) * (size // MASK_BLOCK) for length, size in zip((queries, keys), blocks.block_size)]
    if _differ(blocks.blocks.shape[2:], needed):
        rows, columns = (size // (of // MASK_BLOCK) for size, of in zip(blocks.blocks.shape[2:], blocks.block_size))
        raise ArgumentError(f"block_mask: expected blocks of {blocks.block_size} for {queries} queries and {keys} "
                            f"keys, got {rows} x {columns} of them; make the mask of this call's lengths")
    if torch.compiler.is_compiling():
        for found, of_call in zip(blocks.blocks.shape[2:], needed):
            # when the code runs, where a tracer cannot know it
            torch._check(found == of_call)  # type: ignore[no-untyped-call]
    fitting = blocks.blocks[:, :, : -(-queries // MASK_BLOCK), : -(-keys // MASK_BLOCK)]
    expanded = _expanded("block_mask", fitting, (batch, heads, *fitting.shape[2:]), "[batch, q heads, ...]")
    elements = blocks.elements
    if elements is not None and _differ(elements.shape[2:], (queries, keys)):
        raise ArgumentError(f"block_mask: expected one of {queries} queries and {keys} keys, got one of "
                            f"{elements.shape[2]} and {elements.shape[3]}; make the mask of this call's lengths")
    return expanded, None if elements is None else _expanded("block_mask", elements, shape, _SCORES)


def _expanded(name: str, mask: torch.Tensor, shape: tuple[int, ...], dimensions: str) -> torch.Tensor:
    """The mask in that shape, of the same memory but where its last dimension is not contiguous."""
    if mask.dim() == 0:
        mask = mask[None]
    if not (holds(mask.shape[-1] == shape[-1]) and holds(mask.stride(-1) == 1)):
        with contextlib.suppress(RuntimeError):  # for which the next expand() raises too
            mask = mask.expand(*mask.shape[:-1], shape[-1]).contiguous()
    try:
        expanded = mask.expand(shape)
        return mask.new_empty(shape) if holds(expanded.numel() == 0) else expanded  # whose strides nobody can have
    except RuntimeError as error:
        raise ArgumentError(f"{name}: expected a shape that broadcasts to {dimensions}, {shape}, got "
                            f"{tuple(mask.shape)}; each dimension must have that size or size one") from error
