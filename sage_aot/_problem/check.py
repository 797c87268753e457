"""Checks of a call's tensors, and the :class:`Problem` that follows from tensors and options. Nothing here touches a
device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from sage_aot._kernels.axes import MAX_HEADDIM
from sage_aot._kernels.spec import MOST_TRAINED
from sage_aot._problem.arguments import TOKENS, check_last_stride, check_tensors_are, describe
from sage_aot._problem.given import Given, MaxSeqlens, Stored
from sage_aot._problem.options import LAYOUTS, Options
from sage_aot._problem.problem import DTYPES, Problem, differ, heads_first, is_known
from sage_aot._problem.tensors import FUNCTIONS, LISTED, SIZES, TENSORS, Kind, check_taken
from sage_aot.errors import ArgumentError

_NUMBERS = {3: "three", 4: "four"}


def check(given: Given, options: Options) -> Problem:
    """Check the tensors of a call (shapes, dtypes, devices, strides) and return its problem; ArgumentError says what is
    wrong."""
    problem = _CHECKS[given.kind](given, options)
    for name in given.optional:
        _check_optional(name, given, problem)
    listed = [name for name in given.optional if name in LISTED]
    if listed and isinstance(given.details, Stored) and given.details.has_key_mask:
        raise ArgumentError(f"{listed[0]}: expected None with a QuantizedKV that has a key mask, got a tensor; "
                            f"quantize k and v without the key mask, and pass attn_mask=key_mask[:, None, None] "
                            f"with it")
    masks = _masks(given, problem) if listed else problem.masks
    return replace(problem, optional=(*problem.optional, *given.optional), masks=masks)


def _masks(given: Given, problem: Problem) -> tuple[int, int]:
    """Numbers of batch entries and of q heads that have masks of their own."""
    def differs(dimension: str) -> bool:
        found = [(tensor, TENSORS[name].shape.index(dimension)) for name, tensor in given.named.items()
                 if name in (*LISTED, "key_mask") and dimension in TENSORS[name].shape]
        return not all(is_known(tensor.stride(at) == 0) or is_known(tensor.shape[at] == 1) for tensor, at in found)

    return (problem.batch if differs("batch") else 1), (problem.num_q_heads if differs("q heads") else 1)


def _check_dense(given: Given, options: Options) -> Problem:
    q, k, v = _tensors_of(given)
    dimensions = LAYOUTS[options.layout]
    remedy = f"for tensors {_other_layout(options.layout)}, else repeat heads of k and v"
    return _check_qkv(q, k, v, options, dimensions, remedy)


def _check_varlen(given: Given, options: Options) -> Problem:
    """Check a call with sequences: tensors [tokens, heads, headdim]."""
    q, k, v = _tensors_of(given)
    problem = _check_qkv(q, k, v, options, TOKENS, "repeat heads of k and v")
    rows = problem.seqlen_q, problem.seqlen_kv
    sequences, longest = _check_sequences(given, q.device)
    sym_min: Callable[[int, int], int] = torch.sym_min  # min() would compare a tracer's numbers
    return replace(problem, batch=sequences, seqlen_q=sym_min(rows[0], longest.q),
                   seqlen_kv=sym_min(rows[1], longest.k), tokens=rows)


def _check_kv(given: Given, options: Options) -> Problem:
    """Check a call of :func:`sage_aot.quantize_kv`, with one query a head for the queries that are not known."""
    k, v = given.k, given.v
    assert k is not None and v is not None
    for name, tensor in (("k", k), ("v", v)):
        _check_tensor(name, tensor, LAYOUTS[options.layout])
    if v.dtype != k.dtype or v.device != k.device:
        raise ArgumentError(f"k and v must have one dtype and one device, got {describe(k)} and {describe(v)}; pass "
                            f"v.to(k)")
    _check_one_shape(k, v)
    batch, heads, keys, headdim = _sizes(k, options.layout)
    return Problem(batch, heads, heads, 1, keys, headdim, DTYPES[k.dtype], _scale(options, headdim), options.resolved,
                   part="kv")


def _check_stored(given: Given, options: Options) -> Problem:
    """Check a call with k and v that were quantized before."""
    q, stored, kept = given.q, given.details, given.kept
    assert q is not None and isinstance(stored, Stored) and kept is not None
    dimensions, (kv_batch, num_kv_heads, keys, kv_headdim) = LAYOUTS[options.layout], stored.shape
    _check_tensor("q", q, dimensions)
    _check_returned(kept, given.k, stored, options)
    if q.dtype != stored.dtype or q.device != kept.device:
        raise ArgumentError(f"q must have the dtype and the device that k and v had, {stored.dtype} on {kept.device}, "
                            f"got {q.dtype} on {q.device}; convert q, or quantize k and v again")
    batch, num_q_heads, queries, headdim = _sizes(q, options.layout)
    if differ((batch, headdim), (kv_batch, kv_headdim)):
        raise ArgumentError(f"q must have the batch size and the head dim of the quantized k and v, {kv_batch} and "
                            f"{kv_headdim}, got {batch} and {headdim} in {dimensions}; quantize k and v that fit q")
    _check_heads(num_q_heads, num_kv_heads, dimensions, "quantize k and v whose heads divide those of q")
    return Problem(batch, num_q_heads, num_kv_heads, queries, keys, headdim, DTYPES[q.dtype], _scale(options, headdim),
                   options.resolved, ("key_mask",) if stored.has_key_mask else (), part="q")


def _check_train(given: Given, options: Options) -> Problem:
    return _trained(_check_dense(given, options), given, options)


def _check_train_varlen(given: Given, options: Options) -> Problem:
    return _trained(_check_varlen(given, options), given, options)


def _trained(problem: Problem, given: Given, options: Options) -> Problem:
    """The problem of a call that is trained, if it can be."""
    if options.window:
        raise ArgumentError(f"window: expected None to train with, got {options.window}; there is no backward pass "
                            f"with windows: call torch.nn.functional.scaled_dot_product_attention with a mask")
    if problem.dtype == "f32":
        raise ArgumentError(f"q, k and v: expected torch.float16 or torch.bfloat16 to train with, got "
                            f"{given.like.dtype}; call it under torch.autocast, or pass q.to(torch.bfloat16)")
    if problem.headdim > MOST_TRAINED:
        raise ArgumentError(f"expected a head dim from 1 to {MOST_TRAINED} to train with, got {problem.headdim}; for "
                            f"others call torch.nn.functional.scaled_dot_product_attention")
    # The backward pass reads the log-sum-exp, of exponentials alone.
    return replace(problem, part="train", options=replace(problem.options, p="exp2"))


_CHECKS: Mapping[Kind, Callable[[Given, Options], Problem]] = {
    "dense": _check_dense, "varlen": _check_varlen, "kv": _check_kv, "stored": _check_stored, "train": _check_train,
    "train_varlen": _check_train_varlen}


def check_backward(given: Given, grad_out: torch.Tensor, lse: torch.Tensor, saved: torch.Tensor,
                   options: Options) -> Problem:
    """Check the tensors of a backward pass, and return the problem of its forward pass. `given`: what that was given,
    with its output instead of q, and v instead of k. How long `saved` is, the kernels say."""
    problem, out = check(given, options), given.like
    if (grad_out.shape, grad_out.dtype, grad_out.device) != (out.shape, out.dtype, out.device):
        raise ArgumentError(f"the gradient of the output: expected {describe(out)}, got {describe(grad_out)}; pass "
                            f"one of the output's shape, dtype and device")
    of_lse, function = problem.lse_shape, FUNCTIONS[given.kind]
    if tuple(lse.shape) != of_lse or lse.dtype != torch.float32 or not lse.is_contiguous() or lse.device != out.device:
        raise ArgumentError(f"lse: expected what the forward pass returned, {of_lse} torch.float32 on {out.device}, "
                            f"got {describe(lse)}; call sage_aot.{function}")
    if saved.dtype != torch.uint8 or saved.dim() != 1 or not saved.is_contiguous() or saved.device != out.device:
        raise ArgumentError(f"saved: expected what the forward pass returned, bytes on {out.device}, got "
                            f"{describe(saved)}; call sage_aot.{function}")
    return problem


# --- q, k and v -------------------------------------------------------------------------------------------------------


def _tensors_of(given: Given) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = given.q, given.k, given.v
    check_tensors_are(q=q, k=k, v=v)
    assert q is not None and k is not None and v is not None
    return q, k, v


def _check_qkv(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options, dimensions: str,
               remedy_of_heads: str) -> Problem:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        _check_tensor(name, tensor, dimensions)
    _check_alike(q, k, v)
    batch, num_q_heads, q_rows, headdim = _sizes(q, options.layout)
    kv_batch, num_kv_heads, kv_rows, _ = _sizes(k, options.layout)
    _check_one_shape(k, v)
    if is_known(kv_batch != batch):
        raise ArgumentError(f"q, k and v must have one batch size, got {batch} for q and {kv_batch} for k and v; "
                            f"expand a batch of one, which copies nothing")
    if is_known(k.shape[-1] != headdim):
        raise ArgumentError(f"q, k and v must have one head dim, got {headdim} for q and {k.shape[-1]} for k and v; "
                            f"pad the smaller with zeros and pass the scale, which depends on it")
    _check_heads(num_q_heads, num_kv_heads, dimensions, remedy_of_heads)
    return Problem(batch, num_q_heads, num_kv_heads, q_rows, kv_rows, headdim, DTYPES[q.dtype],
                   _scale(options, headdim), options.resolved)


def _check_tensor(name: str, tensor: torch.Tensor, dimensions: str) -> None:
    shape, expected = tensor.shape, dimensions.count(",") + 1
    if len(shape) != expected:
        remedy = f"of {TOKENS} call attn_varlen"
        if dimensions == TOKENS:
            remedy = f"of [batch, seq, heads, headdim] pass {name}.flatten(0, 1)"
        raise ArgumentError(f"{name}: expected {_NUMBERS[expected]} dimensions {dimensions}, got shape {tuple(shape)}; "
                            f"add those of size one with {name}.unsqueeze(dim), split a fused one with "
                            f"{name}.unflatten; {remedy}")
    if tensor.dtype not in DTYPES:
        raise ArgumentError(f"{name}: expected torch.float16, torch.bfloat16 or torch.float32, got {tensor.dtype}; "
                            f"convert it with {name}.to(torch.bfloat16)")
    if is_known(shape[-1] < 1) or is_known(shape[-1] > MAX_HEADDIM):
        raise ArgumentError(f"{name}: expected a head dim from 1 to {MAX_HEADDIM}, got {shape[-1]}; for others "
                            f"call torch.nn.functional.scaled_dot_product_attention")
    check_last_stride(name, tensor)


def _check_alike(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dtype != q.dtype:
            raise ArgumentError(f"q, k and v must have one dtype, got {q.dtype} for q and {tensor.dtype} for {name}; "
                                f"pass {name}.to(q.dtype)")
        if tensor.device != q.device:
            raise ArgumentError(f"q, k and v must be on one device, got {q.device} for q and {tensor.device} for "
                                f"{name}; pass {name}.to(q.device)")


def _check_one_shape(k: torch.Tensor, v: torch.Tensor) -> None:
    if differ(k.shape, v.shape):
        raise ArgumentError(f"k and v must have one shape, got {tuple(k.shape)} and {tuple(v.shape)}; each key has one "
                            f"value, and where head dims differ, pad the smaller with zeros")


def _check_heads(num_q_heads: int, num_kv_heads: int, dimensions: str, remedy: str) -> None:
    if is_known(num_q_heads != 0) and (is_known(num_kv_heads == 0) or is_known(num_q_heads % num_kv_heads != 0)):
        raise ArgumentError(f"the heads of q must be a multiple of those of k and v, got {num_q_heads} and "
                            f"{num_kv_heads} in {dimensions}; {remedy}")


def _other_layout(layout: str) -> str:
    """The other layout's dimensions, and how to pass it."""
    other = next(name for name in LAYOUTS if name != layout)
    return f"{LAYOUTS[other]} pass layout={other!r}"


def _scale(options: Options, headdim: int) -> float:
    return 1.0 / torch.sym_sqrt(headdim) if options.scale is None else float(options.scale)


def _sizes(tensor: torch.Tensor, layout: str) -> tuple[int, ...]:
    """Batch, heads, rows and head dim; the batch of [tokens, heads, headdim] is one."""
    if tensor.dim() == 3:
        tokens, heads, headdim = tensor.shape
        return 1, heads, tokens, headdim
    return heads_first(tensor, layout).shape


# --- other tensors ----------------------------------------------------------------------------------------------------


def _check_optional(name: str, given: Given, problem: Problem) -> None:
    """Check a tensor of the table TENSORS."""
    argument, tensor, of = TENSORS[name], getattr(given, name), "k" if given.q is None else "q"
    check_taken(given.kind, **{name: tensor})
    if tensor.dtype != getattr(torch, argument.dtype):
        raise ArgumentError(f"{name}: expected torch.{argument.dtype}, {argument.meaning}, got {tensor.dtype}; "
                            f"{argument.other_dtype}")
    shape = tuple(SIZES[dimension](problem) for dimension in argument.shape)
    if differ(tensor.shape, shape):
        raise ArgumentError(f"{name}: expected shape [{', '.join(argument.shape)}], {shape}, got "
                            f"{tuple(tensor.shape)}; {argument.other_shape}")
    if len(shape) == 4:
        check_last_stride(name, tensor)
    if tensor.device != given.like.device:
        raise ArgumentError(f"{name}: expected the device of {of}, {given.like.device}, got {tensor.device}; pass "
                            f"{name}.to({of}.device)")
    is_beyond, limit = argument.limit(problem)
    if is_known(is_beyond):
        raise ArgumentError(f"{name}: {limit}")


def _check_sequences(given: Given, device: torch.device) -> tuple[int, MaxSeqlens]:
    """Check what a call with sequences takes in addition to q, k and v; return the number of sequences and the longest
    lengths."""
    cu_seqlens_q, cu_seqlens_k, longest = given.cu_seqlens_q, given.cu_seqlens_k, given.details
    assert cu_seqlens_q is not None and cu_seqlens_k is not None and isinstance(longest, MaxSeqlens)
    for name, tensor in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if tensor.dtype != torch.int32 or tensor.dim() != 1 or not tensor.is_contiguous():
            raise ArgumentError(f"{name}: expected a contiguous torch.int32 tensor [sequences + 1], got "
                                f"{tuple(tensor.shape)} {tensor.dtype} with strides {tensor.stride()}; pass "
                                f"{name}.to(torch.int32).contiguous(), or make it of the lengths of sequences with "
                                f"torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))")
        if tensor.device != device:
            raise ArgumentError(f"{name}: expected the device of q, {device}, got {tensor.device}; pass "
                                f"{name}.to(q.device)")
    sizes = cu_seqlens_q.shape[0], cu_seqlens_k.shape[0]  # len() would have a tracer take them for constants
    if is_known(sizes[0] != sizes[1]) or is_known(sizes[0] == 0):
        raise ArgumentError(f"cu_seqlens_q and cu_seqlens_k must have one length, sequences + 1, got {sizes[0]} and "
                            f"{sizes[1]}; a sequence without keys has its beginning as its end")
    for name, length in zip(("max_seqlen_q", "max_seqlen_k"), longest):
        if type(length) is int and not 0 <= length < 2**31:  # a tracer's number may be unknown yet
            raise ArgumentError(f"{name}: expected the length of the longest sequence, from 0 to 2^31 - 1, got "
                                f"{length}; pass at most the number of tokens")
    return sizes[0] - 1, longest


def _check_returned(kept: torch.Tensor, k: torch.Tensor | None, stored: Stored, options: Options) -> None:
    """Raise ArgumentError for tensors that quantize_kv did not return, on which the kernels would read what is not
    there."""
    as_returned = kept.dtype == torch.uint8 and kept.is_contiguous() and (k is not None) == options.resolved.smooth_q
    if as_returned and k is not None:
        as_returned = (k.is_contiguous() and not differ(k.shape, stored.shape)
                       and (k.dtype, k.device) == (stored.dtype, kept.device))
    if not as_returned:
        raise ArgumentError("the operators attn_kv take what quantize_kv returned, with its options, got something "
                            "else; call sage_aot.attn with a QuantizedKV")
