"""Checks of single arguments: the public functions make them in front of the operators, whose schemas would refuse such
arguments with torch's own errors."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from sage_aot._problem.given import MaxSeqlens
from sage_aot._problem.options import OPTIONS, integer_of, scalar_of, stays_a_tensor
from sage_aot._problem.problem import differ, is_known
from sage_aot._problem.tensors import MASK_BLOCK
from sage_aot.errors import ArgumentError

TOKENS = "[tokens, heads, headdim]"
"""Dimensions of tensors that hold sequences."""

MOST_OF_BLOCK = 2**20
"""The most queries or keys of a block. A mask has an element for each 64 of them, whether or not a call has as many."""


def check_tensors_are(**tensors: object) -> None:
    """Raise ArgumentError for an argument that is not a tensor."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise ArgumentError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}; make one with "
                                f"torch.as_tensor({name})")


def check_optional_are(**tensors: object) -> None:
    """Raise ArgumentError for an optional argument that is neither a tensor nor None."""
    for name, tensor in tensors.items():
        if tensor is not None and not isinstance(tensor, torch.Tensor):
            raise ArgumentError(f"{name}: expected a torch.Tensor or None, got {type(tensor).__name__}; make one with "
                                f"torch.as_tensor({name})")


def check_no_layout(layout: object) -> None:
    """Raise ArgumentError for a layout that is given with sequences."""
    if layout != OPTIONS["layout"].default:
        raise ArgumentError(f"layout: sequences have {TOKENS}, got {layout!r}; leave the layout out")


def max_seqlens_of(max_seqlen_q: object, max_seqlen_k: object) -> MaxSeqlens:
    """The lengths of the longest sequences as the operators take them."""
    return MaxSeqlens(length_of("max_seqlen_q", max_seqlen_q), length_of("max_seqlen_k", max_seqlen_k))


def length_of(name: str, length: object) -> int:
    """A length as the operators take it; a tensor is read, which synchronizes with its GPU. ArgumentError for what is
    no integer."""
    if type(length) is int or isinstance(length, torch.SymInt):
        return cast(int, length)
    if isinstance(length, torch.Tensor):
        if length.numel() != 1 or length.dtype == torch.bool or length.is_floating_point() or length.is_complex():
            raise ArgumentError(f"{name}: expected the length of the longest sequence, an integer, got a tensor of "
                                f"shape {tuple(length.shape)} and {length.dtype}; pass {name}.max().int()")
        if stays_a_tensor(length):
            raise ArgumentError(f"{name}: expected the length of the longest sequence, an integer, got a tensor that "
                                "holds no number, or several: of the device meta, or one that torch.vmap maps over; "
                                "pass an int")
        return cast(int, length.item())
    found = integer_of(length)
    if found is None:
        raise ArgumentError(f"{name}: expected the length of the longest sequence, an integer, got {length!r}; pass "
                            f"int({name})")
    return found


def block_rows_of(rows: Any, name: str) -> int:
    """Rows of a block; ArgumentError for what is no multiple of 64."""
    found = integer_of(rows)
    if found is None or not 0 < found <= MOST_OF_BLOCK or found % MASK_BLOCK:
        raise ArgumentError(f"{name}: expected the rows or keys of one block, a multiple of {MASK_BLOCK} and at most "
                            f"{MOST_OF_BLOCK}, got {rows!r}")
    return found


def block_sizes_of(block_size: Any) -> tuple[int, int]:
    """Queries and keys of a block; ArgumentError for sizes that are no multiples of 64."""
    given = tuple(block_size) if isinstance(block_size, (tuple, list)) else (block_size, block_size)
    sizes = tuple(map(integer_of, given))
    if len(sizes) != 2 or any(size is None or size <= 0 or size % MASK_BLOCK for size in sizes):
        raise ArgumentError(f"block_size: expected multiples of {MASK_BLOCK}, one or (queries, keys), got "
                            f"{block_size!r}; of smaller blocks pass their elements as attn_mask")
    if any(size > MOST_OF_BLOCK for size in sizes):  # type: ignore[operator]
        raise ArgumentError(f"block_size: expected at most {MOST_OF_BLOCK} queries and keys in a block, got "
                            f"{block_size!r}; of one block for all of them leave the blocks out")
    return sizes  # type: ignore[return-value]


def check_return_lse(return_lse: object) -> None:
    if not isinstance(scalar_of(return_lse), bool):
        raise ArgumentError(f"return_lse: expected True or False, got {return_lse!r}")


def check_out(out: object, q: torch.Tensor) -> None:
    """Raise ArgumentError unless `out` can hold the attention of `q`."""
    if not isinstance(out, torch.Tensor):
        raise ArgumentError(f"out: expected a tensor like q, got {type(out).__name__}; make one with "
                            f"torch.empty_like(q)")
    if differ(out.shape, q.shape) or (out.dtype, out.device) != (q.dtype, q.device):
        raise ArgumentError(f"out: expected shape, dtype and device of q, {describe(q)}, got {describe(out)}; make "
                            f"one with torch.empty_like(q)")
    check_last_stride("out", out)
    if _shares_memory(out):
        raise ArgumentError(f"out: its elements must not share memory, got shape {tuple(out.shape)} with strides "
                            f"{out.stride()}; pass a tensor that was not expanded, and whose dimensions do not overlap")


def check_resolved(out: torch.Tensor) -> None:
    """Raise ArgumentError for a view that torch negates when it reads it, such as the imaginary part of a conjugate:
    torch writes to none for an operator of Python."""
    if out.is_neg():
        raise ArgumentError("out: expected a tensor that holds its own values, got a view that torch negates when it "
                            "reads it; make one with torch.empty_like(q)")


def _shares_memory(out: torch.Tensor) -> bool:
    """True where two elements are known to share memory: a dimension's stride ends within what the dimensions of
    smaller strides span. (Some tensors of which no elements meet do so as well; none that a view of one makes without
    as_strided.) Dimensions whose size or stride a tracer does not know are left out."""
    if any(is_known(size == 0) for size in out.shape):
        return False
    known = sorted((stride, size) for size, stride in zip(out.shape, out.stride())
                   if type(size) is type(stride) is int and size > 1)
    last = 0  # element of those that the dimensions so far span
    for stride, size in known:
        if stride <= last:
            return True
        last += stride * (size - 1)
    return any(is_known(stride == 0) and is_known(size > 1) for size, stride in zip(out.shape, out.stride()))


def check_device(**tensors: torch.Tensor) -> None:
    """Raise ArgumentError unless kernels or their emulation run where a tensor is, or it is a meta tensor, which has a
    shape alone."""
    for name, tensor in tensors.items():
        if not (tensor.is_cuda or tensor.is_cpu or tensor.is_meta):
            raise ArgumentError(f"q, k and v must be CUDA or CPU tensors, got device {tensor.device}; move them with "
                                f"{name}.to('cuda') or {name}.to('cpu')")


def check_dense(**tensors: torch.Tensor | None) -> None:
    """Raise ArgumentError for a tensor without strides, or of a subclass whose Python dispatch has no rule for attn."""
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if tensor.is_nested:
            raise ArgumentError(f"{name}: expected a dense tensor, got a nested one; pad it with "
                                f"{name}.to_padded_tensor(0.0), or call attn for each of {name}.unbind()")
        if tensor.layout is not torch.strided:
            raise ArgumentError(f"{name}: expected a dense tensor, got layout {tensor.layout}; pass {name}.to_dense()")
        if is_traceable_wrapper_subclass(tensor):
            raise ArgumentError(f"{name}: expected a plain tensor, got a {type(tensor).__name__}, which wraps others; "
                                f"pass the tensor within (of a DTensor: {name}.to_local())")


def check_last_stride(name: str, tensor: torch.Tensor) -> None:
    if is_known(tensor.shape[-1] > 1) and is_known(tensor.stride(-1) != 1):
        raise ArgumentError(f"{name}: expected a contiguous last dimension, got strides {tensor.stride()}; pass "
                            f"{name}.contiguous()")


def describe(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"
