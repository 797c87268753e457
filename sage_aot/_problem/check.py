"""From a caller's tensors and options to a :class:`Problem`: every check of tensors. Nothing here touches a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, cast

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from sage_aot._kernels.axes import MAX_HEADDIM
from sage_aot._kernels.spec import MOST_TRAINED
from sage_aot._problem.options import LAYOUTS, OPTIONS, Options, integer_of, scalar_of
from sage_aot.errors import ArgumentError

TOKENS = "[tokens, heads, headdim]"
"""Dimensions of tensors that hold sequences."""

DTYPES = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32"}

_NUMBERS = {3: "three", 4: "four"}
_MOST_RANKS = 2**31  # what key_rank_index() in problem/seqlen.cuh can count


class Sequences(NamedTuple):
    """The sequences of a call, in tensors [tokens, heads, headdim]: sequence b is the rows from cu_seqlens[b] to
    cu_seqlens[b + 1] - 1."""

    cu_seqlens_q: torch.Tensor  # [sequences + 1] int32, on the device of q, the first zero
    cu_seqlens_k: torch.Tensor
    max_seqlen_q: int  # the most queries of a sequence
    max_seqlen_k: int

    @classmethod
    def of_lengths(cls, queries: Sequence[int], keys: Sequence[int]) -> Sequences:
        """Sequences of these lengths, on the CPU."""
        cu_seqlens_q, cu_seqlens_k = (
            torch.nn.functional.pad(torch.tensor(lengths).cumsum(0, dtype=torch.int32), (1, 0))
            for lengths in (queries, keys))
        return cls(cu_seqlens_q, cu_seqlens_k, max(queries), max(keys))

    def to(self, device: str | torch.device) -> Sequences:
        return self._replace(cu_seqlens_q=self.cu_seqlens_q.to(device), cu_seqlens_k=self.cu_seqlens_k.to(device))


class Stored(NamedTuple):
    """K and V that an earlier call quantized."""

    data: torch.Tensor  # uint8: what the backend keeps of them
    k: torch.Tensor | None  # where q is smoothed, whose term of the scores needs k as it came: a copy, heads first
    shape: Sequence[int]  # of k and v: batch, heads, keys, head dim
    dtype: torch.dtype  # of k and v
    has_key_mask: bool
    quantizer: str  # pipeline.quantizer_of(): the kernel that wrote `data`


Part = Literal["all", "kv", "q", "train"]
"""What a call computes: all; the quantized k and v alone; the attention of q to k and v quantized before; or all, of
which it keeps the quantized tensors for a backward pass."""


@dataclass(frozen=True)
class Problem:
    """What one call computes, apart from the tensors themselves."""

    batch: int  # batch entries, or sequences
    num_q_heads: int
    num_kv_heads: int
    seqlen_q: int  # of sequences the most
    seqlen_kv: int  # likewise
    headdim: int  # of the tensors; kernels pad it to one of theirs
    dtype: str  # "f16", "bf16" or "f32", of q, k, v and the output
    softmax_scale: float
    options: Options  # resolved: "auto" is left only where the chosen kernels decide
    has_key_mask: bool = False
    tokens: tuple[int, int] | None = None  # of q, and of k and v: rows of all sequences; None: batch entries
    part: Part = "all"

    @property
    def runs(self) -> int:
        """Runs of tiles for each head: one of each batch entry, or one of all sequences."""
        return 1 if self.tokens else self.batch

    @property
    def q_rows(self) -> int:
        """Rows of q in a batch entry; of sequences all tokens."""
        return self.tokens[0] if self.tokens else self.seqlen_q

    @property
    def kv_rows(self) -> int:
        return self.tokens[1] if self.tokens else self.seqlen_kv

    @property
    def is_empty(self) -> bool:
        """Whether there are no queries, or no keys for them to see."""
        return any(is_known(size == 0) for size in (self.batch, self.num_q_heads, self.num_kv_heads, self.q_rows,
                                                    self.kv_rows, self.seqlen_q, self.seqlen_kv))


def check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options,
          key_mask: torch.Tensor | None = None, sequences: Sequences | None = None) -> Problem:
    """Check a call's tensors (shapes, dtypes, devices, strides) and return its problem; ArgumentError says what is
    wrong. With `sequences` the tensors are [tokens, heads, headdim]."""
    dimensions = TOKENS if sequences else LAYOUTS[options.layout]
    check_tensors_are(q=q, k=k, v=v)
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
    _check_heads(num_q_heads, num_kv_heads, dimensions, _remedy_of_heads(options.layout, sequences))
    if key_mask is not None:
        if sequences is not None:
            raise ArgumentError("key_mask: expected None with sequences, got a mask; leave the keys that it masks out "
                                "of k and v, and out of cu_seqlens_k")
        _check_key_mask(key_mask, batch, kv_rows, q.device)
    seqlens, tokens = (q_rows, kv_rows), None
    if sequences is not None:
        _check_sequences(sequences, q.device)
        batch, tokens = sequences.cu_seqlens_q.shape[0] - 1, seqlens
        sym_min: Callable[[int, int], int] = torch.sym_min  # min() would compare a tracer's numbers
        seqlens = sym_min(q_rows, sequences.max_seqlen_q), sym_min(kv_rows, sequences.max_seqlen_k)
    return Problem(batch, num_q_heads, num_kv_heads, *seqlens, headdim, DTYPES[q.dtype], _scale(options, headdim),
                   options.resolved, key_mask is not None, tokens)


def check_kv(k: torch.Tensor, v: torch.Tensor, options: Options, key_mask: torch.Tensor | None = None) -> Problem:
    """Check the tensors of :func:`sage_aot.quantize_kv` and return its problem, with one query a head in place of
    queries that are not known."""
    for name, tensor in (("k", k), ("v", v)):
        _check_tensor(name, tensor, LAYOUTS[options.layout])
    if v.dtype != k.dtype or v.device != k.device:
        raise ArgumentError(f"k and v must have one dtype and one device, got {_describe(k)} and {_describe(v)}; pass "
                            f"v.to(k)")
    _check_one_shape(k, v)
    batch, heads, keys, headdim = _sizes(k, options.layout)
    if key_mask is not None:
        _check_key_mask(key_mask, batch, keys, k.device, of="k")
    return Problem(batch, heads, heads, 1, keys, headdim, DTYPES[k.dtype], _scale(options, headdim), options.resolved,
                   key_mask is not None, part="kv")


def check_train(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options) -> Problem:
    """Check the tensors of :func:`sage_aot.train_attn` and return its problem."""
    problem = check(q, k, v, options)
    if problem.dtype == "f32":
        raise ArgumentError(f"q, k and v: expected torch.float16 or torch.bfloat16 to train with, got {q.dtype}; call "
                            f"it under torch.autocast, or pass q.to(torch.bfloat16)")
    if problem.headdim > MOST_TRAINED:
        raise ArgumentError(f"expected a head dim from 1 to {MOST_TRAINED} to train with, got {problem.headdim}; for "
                            f"others call torch.nn.functional.scaled_dot_product_attention")
    return replace(problem, part="train")


def check_backward(grad_out: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
                   saved: torch.Tensor, options: Options) -> Problem:
    """Check the tensors of a backward pass, and return the problem of its forward pass. How long `saved` is, the
    kernels say."""
    problem = check_train(out, v, v, options)
    if (grad_out.shape, grad_out.dtype, grad_out.device) != (out.shape, out.dtype, out.device):
        raise ArgumentError(f"the gradient of the output: expected {_describe(out)}, got {_describe(grad_out)}; pass "
                            f"one of the output's shape, dtype and device")
    of_lse = (problem.batch, problem.num_q_heads, problem.q_rows)
    if tuple(lse.shape) != of_lse or lse.dtype != torch.float32 or not lse.is_contiguous() or lse.device != out.device:
        raise ArgumentError(f"lse: expected what the forward pass returned, {of_lse} torch.float32 on {out.device}, "
                            f"got {_describe(lse)}; call sage_aot.train_attn")
    if saved.dtype != torch.uint8 or saved.dim() != 1 or not saved.is_contiguous() or saved.device != out.device:
        raise ArgumentError(f"saved: expected what the forward pass returned, bytes on {out.device}, got "
                            f"{_describe(saved)}; call sage_aot.train_attn")
    return problem


def check_stored(q: torch.Tensor, stored: Stored, options: Options) -> Problem:
    """Check a call with k and v that were quantized before, and return its problem."""
    dimensions, (kv_batch, num_kv_heads, keys, kv_headdim) = LAYOUTS[options.layout], stored.shape
    _check_tensor("q", q, dimensions)
    _check_returned(stored, options)
    if q.dtype != stored.dtype or q.device != stored.data.device:
        raise ArgumentError(f"q must have the dtype and the device that k and v had, {stored.dtype} on "
                            f"{stored.data.device}, got {q.dtype} on {q.device}; convert q, or quantize k and v again")
    batch, num_q_heads, queries, headdim = _sizes(q, options.layout)
    if _differ((batch, headdim), (kv_batch, kv_headdim)):
        raise ArgumentError(f"q must have the batch size and the head dim of the quantized k and v, {kv_batch} and "
                            f"{kv_headdim}, got {batch} and {headdim} in {dimensions}; quantize k and v that fit q")
    _check_heads(num_q_heads, num_kv_heads, dimensions, "quantize k and v whose heads divide those of q")
    return Problem(batch, num_q_heads, num_kv_heads, queries, keys, headdim, DTYPES[q.dtype], _scale(options, headdim),
                   options.resolved, stored.has_key_mask, part="q")


def _check_returned(stored: Stored, options: Options) -> None:
    """ArgumentError for tensors that quantize_kv did not return, on which the kernels would read what is not there."""
    data, k = stored.data, stored.k
    as_returned = data.dtype == torch.uint8 and data.is_contiguous() and (k is not None) == options.resolved.smooth_q
    if as_returned and k is not None:
        as_returned = (k.is_contiguous() and not _differ(k.shape, stored.shape)
                       and (k.dtype, k.device) == (stored.dtype, data.device))
    if not as_returned:
        raise ArgumentError("the operators attn_kv take what quantize_kv returned, with its options, got something "
                            "else; call sage_aot.attn with a QuantizedKV")


def _check_one_shape(k: torch.Tensor, v: torch.Tensor) -> None:
    if _differ(k.shape, v.shape):
        raise ArgumentError(f"k and v must have one shape, got {tuple(k.shape)} and {tuple(v.shape)}; each key has one "
                            f"value, and where head dims differ, pad the smaller with zeros")


def _scale(options: Options, headdim: int) -> float:
    return 1.0 / torch.sym_sqrt(headdim) if options.scale is None else float(options.scale)


def _check_heads(num_q_heads: int, num_kv_heads: int, dimensions: str, remedy: str) -> None:
    if is_known(num_q_heads != 0) and (is_known(num_kv_heads == 0) or is_known(num_q_heads % num_kv_heads != 0)):
        raise ArgumentError(f"the heads of q must be a multiple of those of k and v, got {num_q_heads} and "
                            f"{num_kv_heads} in {dimensions}; {remedy}")


def _sizes(tensor: torch.Tensor, layout: str) -> tuple[int, ...]:
    """Batch, heads, rows and head dim; the batch of [tokens, heads, headdim] is one."""
    if tensor.dim() == 3:
        tokens, heads, headdim = tensor.shape
        return 1, heads, tokens, headdim
    return heads_first(tensor, layout).shape


def _remedy_of_heads(layout: str, sequences: Sequences | None) -> str:
    if sequences:
        return "repeat heads of k and v"
    other = next(name for name in LAYOUTS if name != layout)
    return f"for tensors {LAYOUTS[other]} pass layout={other!r}, else repeat heads of k and v"


def check_out(out: object, q: torch.Tensor) -> None:
    """ArgumentError unless `out` can hold the attention of `q`."""
    if not isinstance(out, torch.Tensor):
        raise ArgumentError(f"out: expected a tensor like q, got {type(out).__name__}; make one with "
                            f"torch.empty_like(q)")
    if _differ(out.shape, q.shape) or (out.dtype, out.device) != (q.dtype, q.device):
        raise ArgumentError(f"out: expected shape, dtype and device of q, {_describe(q)}, got {_describe(out)}; make "
                            f"one with torch.empty_like(q)")
    _check_last_stride("out", out)
    if any(is_known(stride == 0) and is_known(size > 1) for size, stride in zip(out.shape, out.stride())):
        raise ArgumentError(f"out: its elements must not share memory, got strides {out.stride()}; pass a tensor that "
                            f"was not expanded")


def check_device(**tensors: torch.Tensor) -> None:
    """ArgumentError unless kernels or their emulation run where a tensor is, or it is a meta tensor, which has a shape
    alone."""
    for name, tensor in tensors.items():
        if not (tensor.is_cuda or tensor.is_cpu or tensor.is_meta):
            raise ArgumentError(f"q, k and v must be CUDA or CPU tensors, got device {tensor.device}; move them with "
                                f"{name}.to('cuda') or {name}.to('cpu')")


def check_dense(**tensors: torch.Tensor | None) -> None:
    """ArgumentError for a tensor without strides, or with a Python dispatch of its own that has no rule for attn."""
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


def check_key_mask_is_tensor(key_mask: object) -> None:
    """ArgumentError unless `key_mask` is a tensor or None."""
    if key_mask is not None and not isinstance(key_mask, torch.Tensor):
        raise ArgumentError(f"key_mask: expected a torch.Tensor or None, got {type(key_mask).__name__}; make one with "
                            f"torch.as_tensor(key_mask)")


def sequences_of(cu_seqlens_q: object, cu_seqlens_k: object, max_seqlen_q: object, max_seqlen_k: object,
                 layout: object) -> Sequences | None:
    """The arguments of attn_varlen as a whole, or None where all are None. ArgumentError for what the operators'
    schemas would refuse with torch's own errors."""
    if cu_seqlens_q is cu_seqlens_k is max_seqlen_q is max_seqlen_k is None:
        return None
    check_tensors_are(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    lengths = length_of("max_seqlen_q", max_seqlen_q), length_of("max_seqlen_k", max_seqlen_k)
    if layout != OPTIONS["layout"].default:
        raise ArgumentError(f"layout: sequences have {TOKENS}, got {layout!r}; leave the layout out")
    return Sequences(cast(torch.Tensor, cu_seqlens_q), cast(torch.Tensor, cu_seqlens_k), *lengths)


def length_of(name: str, length: object) -> int:
    """A length as the operators take it; a tensor is read, which synchronizes with its GPU. ArgumentError for what is
    no integer."""
    if type(length) is int or isinstance(length, torch.SymInt):
        return cast(int, length)
    if isinstance(length, torch.Tensor):
        if length.numel() == 1 and not (length.dtype == torch.bool or length.is_floating_point()
                                        or length.is_complex()):
            return cast(int, length.item())
        raise ArgumentError(f"{name}: expected the length of the longest sequence, an integer, got a tensor of shape "
                            f"{tuple(length.shape)} and {length.dtype}; pass {name}.max().int()")
    found = integer_of(length)
    if found is None:
        raise ArgumentError(f"{name}: expected the length of the longest sequence, an integer, got {length!r}; pass "
                            f"int({name})")
    return found


def check_return_lse(return_lse: object) -> None:
    if not isinstance(scalar_of(return_lse), bool):
        raise ArgumentError(f"return_lse: expected True or False, got {return_lse!r}")


def check_tensors_are(**tensors: object) -> None:
    """ArgumentError for an argument that is not a tensor."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise ArgumentError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}; make one with "
                                f"torch.as_tensor({name})")


def heads_first(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """The same memory as [batch, heads, seq, headdim]."""
    return tensor if layout == "HND" else tensor.transpose(1, 2)


def is_known(condition: Any) -> bool:
    """Whether a condition on sizes holds; a tracer puts a guard on it. False where a tracer cannot know it, because the
    sizes depend on values of tensors: the check is then that of the operator when it runs. Not for code that dynamo
    traces, to which a condition is a bool."""
    if type(condition) is bool:
        return condition
    from torch.fx.experimental import symbolic_shapes  # takes a quarter of a second, and tracers have it already

    before_2_7 = "definitely_true"
    ask = getattr(symbolic_shapes, "guard_or_false", None) or getattr(symbolic_shapes, before_2_7)
    known: bool = ask(condition)
    return known


def is_static(condition: Any) -> bool:
    """Whether a condition on sizes holds, to a tracer for all sizes that its graph is for: it puts no guard."""
    if type(condition) is bool and not torch.compiler.is_dynamo_compiling():
        return condition
    if isinstance(condition, torch.Tensor):  # sizes are tensors within torch.jit.trace, whose graph is for these sizes
        return bool(condition)
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)


def _differ(one: Sequence[int], other: Sequence[int]) -> bool:
    return len(one) != len(other) or any(is_known(a != b) for a, b in zip(one, other))


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
    _check_last_stride(name, tensor)


def _check_key_mask(key_mask: torch.Tensor, batch: int, seqlen_kv: int, device: torch.device, of: str = "q") -> None:
    if key_mask.dtype != torch.bool:
        raise ArgumentError(f"key_mask: expected torch.bool, True where a key may be seen, got {key_mask.dtype}; pass "
                            f"key_mask.bool() for ones and zeros, key_mask == 0 for zeros and −inf")
    if _differ(key_mask.shape, (batch, seqlen_kv)):
        raise ArgumentError(f"key_mask: expected shape [batch, keys], {(batch, seqlen_kv)}, got "
                            f"{tuple(key_mask.shape)}; of a mask that all entries share pass "
                            f"key_mask.expand(batch, -1), of one [batch, 1, 1, keys] pass key_mask[:, 0, 0]; a mask "
                            f"that differs by query or head has no kernel")
    if key_mask.device != device:
        raise ArgumentError(f"key_mask: expected the device of {of}, {device}, got {key_mask.device}; pass "
                            f"key_mask.to({of}.device)")
    if is_known(batch * (seqlen_kv + 1) >= _MOST_RANKS):
        remedy = "split the batch" if batch > 1 else "pass k and v of the keys that it leaves, and no mask"
        raise ArgumentError(f"key_mask: expected batch · (keys + 1) below {_MOST_RANKS}, got {batch} · "
                            f"{seqlen_kv + 1}; {remedy}")


def _check_sequences(sequences: Sequences, device: torch.device) -> None:
    cu_seqlens_q, cu_seqlens_k, *longest = sequences
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


def _check_last_stride(name: str, tensor: torch.Tensor) -> None:
    if is_known(tensor.shape[-1] > 1) and is_known(tensor.stride(-1) != 1):
        raise ArgumentError(f"{name}: expected a contiguous last dimension, got strides {tensor.stride()}; pass "
                            f"{name}.contiguous()")


def _check_alike(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dtype != q.dtype:
            raise ArgumentError(f"q, k and v must have one dtype, got {q.dtype} for q and {tensor.dtype} for {name}; "
                                f"pass {name}.to(q.dtype)")
        if tensor.device != q.device:
            raise ArgumentError(f"q, k and v must be on one device, got {q.device} for q and {tensor.device} for "
                                f"{name}; pass {name}.to(q.device)")


def _describe(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"
