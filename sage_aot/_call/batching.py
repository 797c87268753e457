"""Rules of torch.vmap for the operators that write to no tensor.

Where all tensors begin with the batch, the mapped dimension becomes a part of it, and one call serves all entries.
Packed sequences, and k and v that are quantized before, have no batch to take it: they are one call an entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from sage_aot._call.ops import OPERATORS
from sage_aot._package import PACKAGE
from sage_aot._problem.tensors import TENSORS, Kind, taken_by

Dims = Sequence[Any]
"""Per argument the dimension that is mapped, None where it is the same for all entries; of a list, a list."""


class Rule(Protocol):
    def __call__(self, operator: Any, size: int, dims: Dims, args: Sequence[Any], /) -> tuple[Any, Any]:
        """Return the operator's results for `size` entries, and the mapped dimension of each tensor."""
        ...


def register_rules(library: Any) -> None:
    """Give each operator its rule; to be called once, when all are defined."""
    if not hasattr(torch.library, "register_vmap"):  # before torch 2.5, whose own rule is one call an entry
        return
    rules: dict[str, Rule] = {"attn": in_the_batch, "attn_lse": in_the_batch, "train_attn": _forward,
                              "train_attn_backward": _backward}
    rules |= dict.fromkeys(("attn_varlen", "attn_varlen_lse", "quantize_kv", "attn_kv", "attn_kv_lse", "pool_blocks",
                            "choose_blocks", "train_attn_varlen", "train_attn_varlen_backward"), one_by_one)
    for name, rule in rules.items():
        torch.library.register_vmap(f"{PACKAGE}::{name}", _as_torch_calls_it(name, rule), lib=library)


def _as_torch_calls_it(name: str, rule: Rule) -> Any:
    operator = getattr(OPERATORS, name).default

    def mapped(info: Any, dims: Dims, *args: Any) -> tuple[Any, Any]:
        return rule(operator, info.batch_size, dims, args)

    return mapped


def in_the_batch(operator: Any, size: int, dims: Dims, args: Sequence[Any], /) -> tuple[Any, Any]:
    """One call, whose batch is that of all entries. A call an entry where a tensor without a batch is mapped."""
    apart = _without_batch("dense", 3)
    if any(dims[index] is not None for index in apart):
        return one_by_one(operator, size, dims, args)
    found, batch = operator(*_folded(size, dims, args, apart)), _batch(dims, args)
    split = [_unfolded(tensor, size, batch) for tensor in _listed(found)]
    return _like(found, split), _like(found, [0] * len(split))


def one_by_one(operator: Any, size: int, dims: Dims, args: Sequence[Any], /) -> tuple[Any, Any]:
    """A call an entry; where there is none, one of zeros, which tells the shapes of what is returned."""
    found = [operator(*(_entry(value, dim, entry) for value, dim in zip(args, dims))) for entry in range(max(size, 1))]
    stacked = [torch.stack(entries)[:size] for entries in zip(*map(_listed, found))]
    return _like(found[0], stacked), _like(found[0], [0] * len(stacked))


def _entry(value: Any, dim: Any, entry: int) -> Any:
    if not isinstance(value, torch.Tensor) or dim is None:
        return value
    if value.shape[dim] == 0:
        return value.new_zeros([*value.shape[:dim], *value.shape[dim + 1:]])
    return value.select(dim, entry)


def _forward(operator: Any, size: int, dims: Dims, args: Sequence[Any], /) -> tuple[Any, Any]:
    """One call. What it saves is that of all entries, in no order that could be split: it counts as unmapped. A call an
    entry where a tensor without a batch is mapped."""
    apart = _without_batch("train", 3)
    if any(dims[index] is not None for index in apart):
        return one_by_one(operator, size, dims, args)
    out, lse, saved = operator(*_folded(size, dims, args, apart))
    batch = _batch(dims, args)
    return (_unfolded(out, size, batch), _unfolded(lse, size, batch), saved), (0, 0, None)


def _backward(operator: Any, size: int, dims: Dims, args: Sequence[Any], /) -> tuple[Any, Any]:
    """One call for what :func:`_forward` saved; a call an entry where the gradient alone is mapped."""
    _, _, of_out, of_lse, of_saved = dims[:5]
    is_folded = of_saved is None and of_out is not None and of_lse is not None
    if not is_folded:
        return one_by_one(operator, size, dims, args)
    apart = [4, *_without_batch("train", 5)]  # 4: what was saved is that of all entries
    gradients, batch = operator(*_folded(size, dims, args, apart)), _batch(dims, args)
    asked = [gradient.dim() == 4 for gradient in gradients]  # one that is not asked for is empty, of one dimension
    return (tuple(_unfolded(gradient, size, batch) if of_it else gradient for gradient, of_it in zip(gradients, asked)),
            tuple(0 if of_it else None for of_it in asked))


def _without_batch(kind: Kind, first: int) -> list[int]:
    """Indices of the optional tensors that have no batch, among a kind's arguments; `first`: that of the first one."""
    return [index for index, name in enumerate(taken_by(kind), first) if TENSORS[name].shape[0] != "batch"]


def _folded(size: int, dims: Dims, args: Sequence[Any], apart: Sequence[int]) -> list[Any]:
    """The arguments, the mapped dimension of each tensor within its first. Those at the indices `apart` as they are."""
    return [(value.expand(size, *value.shape) if dim is None else value.movedim(dim, 0)).flatten(0, 1)
            if isinstance(value, torch.Tensor) and index not in apart else value
            for index, (value, dim) in enumerate(zip(args, dims))]


def _batch(dims: Dims, args: Sequence[Any]) -> int:
    """Batch of one mapped entry, in which all tensors have as much: the first dimension that is not mapped."""
    batch: int = args[0].shape[1 if dims[0] == 0 else 0]
    return batch


def _unfolded(tensor: torch.Tensor, size: int, batch: int) -> torch.Tensor:
    return tensor.view(size, batch, *tensor.shape[1:])  # operators return contiguous tensors


def _listed(found: Any) -> list[torch.Tensor]:
    return [found] if isinstance(found, torch.Tensor) else list(found)


def _like(found: Any, values: list[Any]) -> Any:
    """Values for what an operator returned: one, or a tuple."""
    return values[0] if isinstance(found, torch.Tensor) else tuple(values)
