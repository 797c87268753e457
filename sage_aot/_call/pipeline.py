"""The one place where a call is put together: arguments → problem → kernels → plan → a backend's prepared call.

Everything that does not depend on values and addresses is done once per kind of call. :func:`prepared` keeps the last
kinds; their key is the shapes, strides, dtypes and devices of the tensors, the options, and the environment. torch's
operators, ``sage-aot verify``, the tests' simulator and the bench programs all use the pipeline, each with a backend of
its own.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from sage_aot._problem.check import (
    check,
    check_kv,
    check_out,
    check_stored,
    check_train,
    heads_first,
)
from sage_aot._problem.derivatives import check_no_grad
from sage_aot._problem.options import OPTIONS, Options
from sage_aot.errors import ArgumentError

if TYPE_CHECKING:
    from sage_aot._backends.base import Backend, BackwardCall, BackwardTensors, Call, TrainingCall
    from sage_aot._backends.loader import Library
    from sage_aot._launch.choose import Kernels
    from sage_aot._launch.plan import Plan
    from sage_aot._problem.check import Problem, Sequences, Stored

MOST_KEPT = 256
"""Most kinds of calls of which something is kept. The oldest is dropped first; to drop the least recently used instead
would take a lock on every call. A prepared call takes some 12 KB, and as much again for each further group of heads
whose delta_s the workspace holds at once."""
_T = TypeVar("_T")


class ByKind(dict[tuple[Any, ...], _T]):
    """What is kept of the last kinds of calls, by :func:`kind_of_call`. Reads take no lock."""

    def keep(self, key: tuple[Any, ...], value: _T) -> None:
        with _lock:
            while len(self) >= MOST_KEPT:
                del self[next(iter(self))]
            self[key] = value

    def forget(self, backend: Backend) -> None:
        """Drop what was kept for a handed backend, which each key keeps alive."""
        with _lock:
            for key in [key for key in self if backend in key]:
                del self[key]


class Prepared:
    """A call that is ready to be made: a problem, and what a backend runs for it."""

    __slots__ = ("_lse_shape", "kv_bytes", "problem", "run")

    def __init__(self, problem: Problem, run: Call, kv_bytes: int = 0) -> None:
        """`kv_bytes`: of what the call keeps of its quantized tensors, where it does."""
        self.problem, self.run, self.kv_bytes = problem, run, kv_bytes
        self._lse_shape = lse_shape(problem)

    def empty_lse(self, q: torch.Tensor) -> torch.Tensor:
        return q.new_empty(self._lse_shape, dtype=torch.float32)


class PreparedTraining(NamedTuple):
    """The forward pass of a trained call that is ready to be made."""

    problem: Problem
    run: TrainingCall
    saved_bytes: int  # of what it saves


_prepared: ByKind[Prepared] = ByKind()
_training: ByKind[PreparedTraining] = ByKind()
_backward: ByKind[PreparedBackward] = ByKind()
answers: ByKind[str | None] = ByKind()
"""What :func:`sage_aot._call.refusal.refusal` said; its keys begin with autocast's dtype."""
_lock = threading.Lock()  # held while any of them changes
_handed: Backend | None = None


def prepared(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, key_mask: torch.Tensor | None,
             out: torch.Tensor | None, options: tuple[Any, ...], sequences: Sequences | None = None) -> Prepared:
    """The prepared call for an operator's arguments: kept from an earlier call of the kind, or prepared now.

    Raises as :func:`sage_aot.attn` does. Options from an operator have their schema's types, so equal keys mean equal
    calls.
    """
    if q.requires_grad or k.requires_grad or v.requires_grad or out is not None and out.requires_grad:
        check_no_grad(q=q, k=k, v=v, out=out)  # on every call: grad mode changes
    handed, variables = _handed, environment()
    key = kind_of_call(q, k, v, key_mask, out, options, variables, handed, sequences)
    return _prepared.get(key) or _kept(_prepared, key, handed, variables, lambda: prepare(
        handed or backend_of(q), q, k, v, Options.from_schema(*options), out, key_mask, sequences))


def _kept(among: ByKind[_T], key: tuple[Any, ...], handed: Backend | None, variables: tuple[Any, ...],
          prepare_it: Callable[[], _T]) -> _T:
    """A call that is prepared now, kept for others of its kind."""
    call = prepare_it()
    if (handed, variables) == (_handed, environment()):  # else another thread changed them, and the key is wrong
        among.keep(key, call)
    return call


def prepared_kv(k: torch.Tensor, v: torch.Tensor, key_mask: torch.Tensor | None,
                options: tuple[Any, ...]) -> Prepared:
    """As :func:`prepared`, of a call that quantizes k and v alone."""
    check_no_grad(k=k, v=v)
    handed, variables = _handed, environment()
    key = "kv", *kind_of_call(k, k, v, key_mask, None, options, variables, handed)
    return _prepared.get(key) or _kept(_prepared, key, handed, variables, lambda: prepare_kv(
        handed or backend_of(k), k, v, Options.from_schema(*options), key_mask))


def prepared_train(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: tuple[Any, ...]) -> PreparedTraining:
    """As :func:`prepared`, of the forward pass of a call that is trained."""
    handed, variables = _handed, environment()
    key = kind_of_call(q, k, v, None, None, options, variables, handed)
    return _training.get(key) or _kept(_training, key, handed, variables, lambda: prepare_train(
        handed or backend_of(q), q, k, v, Options.from_schema(*options)))


def prepare_train(backend: Backend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                  options: Options) -> PreparedTraining:
    """Check a call of :func:`sage_aot.train_attn` and prepare its forward pass on a backend."""
    problem = check_train(q, k, v, options)
    plan = plan_of(backend, problem, q.get_device())
    if problem.is_empty:
        return PreparedTraining(problem, _nothing_to_see, 0)
    from sage_aot._backends.base import Tensors

    out = q if q.is_contiguous() else torch.empty_like(q, memory_format=torch.contiguous_format)
    return PreparedTraining(problem, backend.bind_training(plan, Tensors(q, k, v, out)), backend.saved_bytes(plan))


class PreparedBackward(NamedTuple):
    """A backward pass that is ready to be made."""

    run: BackwardCall
    saved_bytes: int  # of what its forward pass saved


def prepared_backward(tensors: BackwardTensors, options: tuple[Any, ...]) -> PreparedBackward:
    """The backward pass of a call, kept from an earlier one of the kind, or prepared now."""
    handed, variables = _handed, environment()
    like = tensors.grad_q, tensors.grad_k, tensors.grad_v, None, tensors.out
    key = tensors.grad_out.stride(), tensors.v.stride(), *kind_of_call(*like, options, variables, handed)
    return _backward.get(key) or _kept(_backward, key, handed, variables, lambda: prepare_backward(
        handed or backend_of(tensors.v), tensors, Options.from_schema(*options)))


def prepare_backward(backend: Backend, tensors: BackwardTensors, options: Options) -> PreparedBackward:
    """Prepare a backward pass on a backend; the gradients have the shapes of q, k and v."""
    problem = check_train(tensors.grad_q, tensors.grad_k, tensors.grad_v, options)
    plan = plan_of(backend, problem, tensors.v.get_device())
    return PreparedBackward(backend.bind_backward(plan, tensors), backend.saved_bytes(plan))


def prepare_kv(backend: Backend, k: torch.Tensor, v: torch.Tensor, options: Options,
               key_mask: torch.Tensor | None = None) -> Prepared:
    """Check a call of :func:`sage_aot.quantize_kv` and prepare it on a backend."""
    problem = check_kv(k, v, options, key_mask)
    plan = plan_of(backend, problem, k.get_device())
    if problem.is_empty:
        return Prepared(problem, _nothing_to_keep)
    from sage_aot._backends.base import Tensors

    return Prepared(problem, backend.bind(plan, Tensors(None, k, v, None, key_mask)), backend.kv_bytes(plan))


def prepared_stored(q: torch.Tensor, stored: Stored, out: torch.Tensor | None, options: tuple[Any, ...]) -> Prepared:
    """As :func:`prepared`, of a call with k and v that were quantized before."""
    check_no_grad(q=q, out=out)
    handed, variables = _handed, environment()
    key = kind_of_stored(q, stored, out, options, variables, handed)
    return _prepared.get(key) or _kept(_prepared, key, handed, variables, lambda: prepare_stored(
        handed or backend_of(q), q, stored, Options.from_schema(*options), out))


def kind_of_stored(q: torch.Tensor, stored: Stored, out: torch.Tensor | None, options: tuple[Any, ...],
                   variables: tuple[Any, ...], handed: Backend | None) -> tuple[Any, ...]:
    """Equal for calls with quantized k and v that one preparation serves."""
    return ("stored", q.shape, q.stride(), q.dtype, q.device, options, variables, handed, tuple(stored.shape),
            stored.data.shape, stored.data.stride(), stored.data.dtype, stored.data.device, stored.dtype,
            stored.has_key_mask, stored.quantizer,
            None if stored.k is None else (stored.k.shape, stored.k.stride(), stored.k.dtype, stored.k.device),
            None if out is None else (out.shape, out.stride(), out.dtype, out.device))


def prepare_stored(backend: Backend, q: torch.Tensor, stored: Stored, options: Options,
                   out: torch.Tensor | None = None) -> Prepared:
    """Check a call with quantized k and v and prepare it on a backend."""
    problem = check_stored(q, stored, options)
    if out is not None:
        check_out(out, q)
    plan = plan_of_stored(backend, problem, stored)
    if problem.is_empty:
        return Prepared(problem, _nothing_to_see)
    from sage_aot._backends.base import Tensors

    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    k = None if stored.k is None else heads_first(stored.k, options.layout)  # from heads first to the call's layout
    return Prepared(problem, backend.bind(plan, Tensors(q, k, None, out)))


def plan_of_stored(backend: Backend, problem: Problem, stored: Stored) -> Plan:
    """The plan of a call with quantized k and v; ArgumentError where another kernel quantized them."""
    plan = plan_of(backend, problem, stored.data.get_device())
    check_quantizer(plan.kernels, stored)
    if not problem.is_empty and stored.data.numel() != backend.kv_bytes(plan):
        raise ArgumentError(f"the operators attn_kv take what quantize_kv returned, {backend.kv_bytes(plan)} bytes for "
                            f"these shapes, got {stored.data.numel()}; call sage_aot.attn with a QuantizedKV")
    return plan


def check_quantizer(kernels: Kernels, stored: Stored) -> None:
    """ArgumentError where other kernels than these quantized k and v."""
    expected = quantizer_of(kernels)
    if stored.quantizer != expected:
        raise ArgumentError(f"k and v must be quantized by the kernel in use, {expected}, got {stored.quantizer}; "
                            f"quantize k and v again")


def quantizer_of(kernels: Kernels) -> str:
    """The quantizer of some kernels, in words that no other kernel has."""
    return f"{kernels['quant'].name} ({kernels['quant'].sha256[:12]})"


def kind_of_call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, key_mask: torch.Tensor | None,
                 out: torch.Tensor | None, options: tuple[Any, ...], variables: tuple[Any, ...],
                 handed: Backend | None, sequences: Sequences | None = None) -> tuple[Any, ...]:
    """Equal for calls that one preparation serves."""
    return (q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype, q.device,
            k.device, v.device, options, variables, handed,
            None if key_mask is None else (key_mask.shape, key_mask.stride(), key_mask.dtype, key_mask.device),
            None if out is None else (out.shape, out.stride(), out.dtype, out.device),
            None if sequences is None else (
                *((x.shape, x.stride(), x.dtype, x.device) for x in sequences[:2]), *sequences[2:]))


def prepare(backend: Backend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options,
            out: torch.Tensor | None = None, key_mask: torch.Tensor | None = None,
            sequences: Sequences | None = None) -> Prepared:
    """Check a call and prepare it on a backend; raises as :func:`sage_aot.attn` does."""
    problem = check(q, k, v, options, key_mask, sequences)
    if out is not None:
        check_out(out, q)
    plan = plan_of(backend, problem, q.get_device())
    if problem.is_empty:
        return Prepared(problem, _nothing_to_see)
    from sage_aot._backends.base import Tensors

    if out is None:  # the output will be contiguous: bind() needs a tensor with its strides
        out = q if q.is_contiguous() else torch.empty_like(q, memory_format=torch.contiguous_format)
    return Prepared(problem, backend.bind(plan, Tensors(q, k, v, out, key_mask)))


def plan_of(backend: Backend, problem: Problem, device: int) -> Plan:
    """The kernels that a backend has for a problem, with the sizes that follow."""
    from sage_aot._launch.plan import plan

    kernels = kernels_on(backend, problem, device)
    return plan(problem, kernels, backend.splits(problem, kernels, device))


def kernels_on(backend: Backend, problem: Problem, device: int) -> Kernels:
    """The kernels that a backend has for a problem; UnsupportedError where it has none."""
    from sage_aot._launch.choose import kernels_of, wanted_values

    return kernels_of(backend.arch(device), wanted_values(problem), backend.manifest, problem.has_key_mask)


def lse_shape(problem: Problem) -> tuple[int, ...]:
    """Of the log-sum-exp: [batch, q heads, queries], or [q heads, tokens]."""
    heads_and_rows = problem.num_q_heads, problem.q_rows
    return heads_and_rows if problem.tokens else (problem.batch, *heads_and_rows)


def _nothing_to_keep(q: torch.Tensor | None, k: torch.Tensor | None, v: torch.Tensor | None, out: torch.Tensor | None,
                     lse: torch.Tensor | None, key_mask: torch.Tensor | None = None,
                     sequences: Sequences | None = None, kv: torch.Tensor | None = None) -> None:
    """The call that quantizes k and v where there are none."""


def _nothing_to_see(q: torch.Tensor | None, k: torch.Tensor | None, v: torch.Tensor | None, out: torch.Tensor | None,
                    lse: torch.Tensor | None, key_mask: torch.Tensor | None = None, sequences: Sequences | None = None,
                    kv: torch.Tensor | None = None) -> None:
    """The call where there are no queries or no keys."""
    assert out is not None
    out.zero_()
    if lse is not None:
        lse.fill_(float("-inf"))


# --- which backend ----------------------------------------------------------------------------------------------------


def backend_of(tensor: torch.Tensor) -> Backend:
    """The backend for a tensor's device: the kernels of :func:`default_library` on CUDA, their emulation on the CPU."""
    if _handed is not None:
        return _handed
    library = default_library()
    return _cuda_backend(library) if tensor.is_cuda else _emulation_backend(library)


def kernels_for_kv(device: torch.device, headdim: int, *options: Any) -> tuple[Any, ...]:
    """Of the kernels that quantize k and v on a device now, given an operator's options: the arch, quantizer_of(), and
    the values of all options with "auto" resolved."""
    asked = Options.from_schema(*options)
    like = torch.empty(1, 1, 1, headdim, device=device, dtype=torch.float16)
    backend = backend_of(like)
    kernels = plan_of(backend, check_kv(like, like, asked), like.get_device()).kernels
    resolved = replace(asked.resolved, pv_accum=str(kernels.attn.spec.pv_accum))
    return kernels.attn.spec.arch, quantizer_of(kernels), *(getattr(resolved, name) for name in OPTIONS)


# A tracer takes the answer for a constant, as the fake implementations take the kernels for given.
kernels_for_kv._dynamo_marked_constant = True  # type: ignore[attr-defined]


def handed_backend() -> Backend | None:
    """The backend of :func:`handing`, where one is handed."""
    return _handed


@contextmanager
def handing(backend: Backend) -> Iterator[None]:
    """Run all calls of the process, other threads' too, on this backend: for tests, and for benches of the kernels of
    another arch."""
    global _handed
    before, _handed = _handed, backend
    try:
        yield
    finally:
        _handed = before
        for kept in (_prepared, _training, _backward, answers):
            kept.forget(backend)


def default_library() -> Library:
    """The kernels that the package ships, or those of the folder that SAGE_AOT_KERNELS names."""
    from sage_aot._backends.loader import library_in, shipped_library

    named = os.environ.get("SAGE_AOT_KERNELS")
    return library_in(named) if named else shipped_library()


@cache
def _cuda_backend(library: Library) -> Backend:
    from sage_aot._backends.cuda import CudaBackend

    return CudaBackend(library)


@cache
def _emulation_backend(library: Library) -> Backend:
    from sage_aot._backends.emulation.backend import EmulationBackend

    return EmulationBackend(library.manifest)


# --- the environment --------------------------------------------------------------------------------------------------

_VARIABLES = ("SAGE_AOT_KERNELS", "SAGE_AOT_EMULATE")


def _reader() -> Any:
    """A function that reads _VARIABLES from the dictionary behind os.environ. os.environ.get() raises and catches an
    exception where a variable is missing, which takes longer than the rest of a look-up. Where Python has no such
    dictionary, the function reads os.environ."""
    data, encode = getattr(os.environ, "_data", None), getattr(os.environ, "encodekey", None)
    if not isinstance(data, dict) or encode is None:
        return lambda: tuple(map(os.environ.get, _VARIABLES))
    kernels, emulate = map(encode, _VARIABLES)
    get = data.get
    return lambda: (get(kernels), get(emulate))


environment = _reader()
"""The current values of _VARIABLES, on which the preparation of a call depends."""
