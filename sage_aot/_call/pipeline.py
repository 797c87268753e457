"""The one place where a call is put together: arguments → problem → kernels → plan → a backend's prepared call.

Everything that does not depend on values and addresses is done once per kind of call. :func:`prepared` keeps the last
kinds; their key is the shapes, strides, dtypes and devices of the tensors, the options, and the environment. torch's
operators, ``sage-aot verify``, the tests' simulator and the bench programs all use the pipeline, each with a backend of
its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from sage_aot._call.backends import Surroundings, backend_of, surroundings, when_taken_back
from sage_aot._problem.arguments import check_out
from sage_aot._problem.check import check
from sage_aot._problem.derivatives import check_no_grad
from sage_aot._problem.given import Given, Stored
from sage_aot._problem.options import Options
from sage_aot._problem.problem import Problem, heads_first
from sage_aot.errors import ArgumentError, UnsupportedError

if TYPE_CHECKING:
    from sage_aot._backends.base import Backend, BackwardCall, BackwardTensors, Call
    from sage_aot._launch.choose import Kernels
    from sage_aot._launch.plan import Plan

MOST_KEPT = 256
"""Most kinds of calls of which something is kept. The oldest is dropped first; to drop the least recently used instead
would take a lock on every call. A prepared call takes some 12 KB, and as much again for each further group of heads
whose delta_s the workspace holds at once."""
_MISSING: Any = object()
_T = TypeVar("_T")
_Run = TypeVar("_Run")


class ByKind(dict[tuple[Any, ...], _T]):
    """Values of the last kinds of calls, by a key of all that the preparation of a call depends on. Reads take no
    lock."""

    def __init__(self) -> None:
        super().__init__()
        when_taken_back.append(self.forget)

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

    def remembered(self, key: tuple[Any, ...], around: Surroundings, make: Callable[[], _T]) -> _T:
        """The value of a key, or what `make` says now, which is kept. `around`: the surroundings in the key."""
        try:
            found: _T = self.get(key, _MISSING)
        except TypeError:  # a size that a tracer does not know yet cannot be hashed
            return make()
        if found is _MISSING:
            found = make()
            if around == surroundings():  # else another thread changed them, and the key is wrong
                self.keep(key, found)
        return found


class Prepared(Generic[_Run]):
    """A call that is ready to be made: a problem, and what a backend runs for it."""

    __slots__ = ("_lse_shape", "kept_bytes", "problem", "run")

    def __init__(self, problem: Problem, run: _Run, kept_bytes: int = 0) -> None:
        """`kept_bytes`: of what the call keeps of its quantized tensors, or an earlier call kept for it."""
        self.problem, self.run, self.kept_bytes = problem, run, kept_bytes
        self._lse_shape = problem.lse_shape

    def empty_lse(self, q: torch.Tensor) -> torch.Tensor:
        return q.new_empty(self._lse_shape, dtype=torch.float32)


_lock = threading.Lock()  # held while what is kept changes
_prepared: ByKind[Prepared[Any]] = ByKind()


def prepared(given: Given, out: torch.Tensor | None, options: tuple[Any, ...]) -> Prepared[Call]:
    """The prepared call for an operator's arguments: kept from an earlier call of the kind, or prepared now.

    Raises as :func:`sage_aot.attn` does. Options from an operator have their schema's types, so equal keys mean equal
    calls.
    """
    around = handed, _ = surroundings()
    key = kind_of_call(given, out, options, around)
    found = _prepared.get(key)
    if found:
        return found
    if not given.is_trained:
        check_no_grad(**given.named, out=out)  # so that a kind with a tensor that autograd would track is never kept
    return _prepared.remembered(key, around, lambda: prepare(
        handed or backend_of(given.like), given, Options.from_schema(*options), out))


def kind_of_call(given: Given, out: torch.Tensor | None, options: tuple[Any, ...],
                 around: Surroundings) -> tuple[Any, ...]:
    """A key that is equal for calls that one preparation serves."""
    tracks = torch.is_grad_enabled() and not given.is_trained
    return (*around, options, given.kind, given.details,
            *[None if x is None else (x.shape, x.stride(), x.dtype, x.device, tracks and x.requires_grad)
              for x in (*given[1:-1], out)])


def prepare(backend: Backend, given: Given, options: Options, out: torch.Tensor | None = None) -> Prepared[Call]:
    """Check a call and prepare it on a backend; raises as :func:`sage_aot.attn` does."""
    problem = check(given, options)
    if out is not None:
        check_out(out, given.like)
    plan = plan_of_call(backend, problem, given)
    if problem.is_empty:
        return Prepared(problem, _nothing_to_see)
    if given.kind == "stored" and given.k is not None:  # from heads first to the call's layout
        given = given._replace(k=heads_first(given.k, options.layout))
    if out is None and given.q is not None:  # the output will be contiguous: bind() needs a tensor with its strides
        out = given.q if given.q.is_contiguous() else torch.empty_like(given.q, memory_format=torch.contiguous_format)
    return Prepared(problem, backend.bind(plan, given, out), backend.kept_bytes(plan))


def prepared_backward(tensors: BackwardTensors, options: tuple[Any, ...]) -> Prepared[BackwardCall]:
    """The backward pass of a call, kept from an earlier one of the kind, or prepared now."""
    around = handed, _ = surroundings()
    grad = tensors.grad_out
    key = (*kind_of_call(tensors.given, None, options, around), "backward", tensors.wants_all, grad.shape,
           grad.stride(), grad.dtype, grad.device)
    return _prepared.remembered(key, around, lambda: prepare_backward(
        handed or backend_of(tensors.v), tensors, Options.from_schema(*options)))


def prepare_backward(backend: Backend, tensors: BackwardTensors, options: Options) -> Prepared[BackwardCall]:
    """Prepare a backward pass on a backend; the output and v have the shapes of q, k and v."""
    problem = check(tensors.given, options)
    plan = plan_of(backend, problem, tensors.v.get_device())
    return Prepared(problem, backend.bind_backward(plan, tensors), backend.kept_bytes(plan))


def plan_of_call(backend: Backend, problem: Problem, given: Given) -> Plan:
    """The plan of a call; ArgumentError where another kernel quantized its k and v."""
    device = given.like.get_device()
    try:
        plan = plan_of(backend, problem, device)
    except UnsupportedError as error:  # which says what other options to use: those of k and v are settled
        if isinstance(given.details, Stored) and f"_{backend.arch(device)}_" not in given.details.quantizer:
            raise ArgumentError(f"k and v must be quantized by a kernel of {backend.arch(device)}, got "
                                f"{given.details.quantizer}; quantize k and v again") from error
        raise
    if isinstance(given.details, Stored):
        check_quantizer(plan.kernels, given.details)
        kept = 0 if given.kept is None else given.kept.numel()
        if not problem.is_empty and kept != backend.kept_bytes(plan):
            raise ArgumentError(f"the operators attn_kv take what quantize_kv returned, {backend.kept_bytes(plan)} "
                                f"bytes for these shapes, got {kept}; call sage_aot.attn with a QuantizedKV")
    return plan


def check_quantizer(kernels: Kernels, stored: Stored) -> None:
    """Raise ArgumentError where other kernels than these quantized k and v."""
    expected = quantizer_of(kernels)
    if stored.quantizer != expected:
        raise ArgumentError(f"k and v must be quantized by the kernel in use, {expected}, got {stored.quantizer}; "
                            f"quantize k and v again")


def quantizer_of(kernels: Kernels) -> str:
    """The quantizer of some kernels, in words that no other kernel has."""
    return f"{kernels['quant'].name} ({kernels['quant'].sha256[:12]})"


def plan_of(backend: Backend, problem: Problem, device: int) -> Plan:
    """The kernels that a backend has for a problem, with the sizes that follow."""
    from sage_aot._launch.plan import plan

    kernels = kernels_on(backend, problem, device)
    return plan(problem, kernels, 1 if problem.is_listed else backend.splits(problem, kernels, device))


def kernels_on(backend: Backend, problem: Problem, device: int) -> Kernels:
    """The kernels that a backend has for a problem; UnsupportedError where it has none."""
    from sage_aot._launch.choose import kernels_of, wanted_values

    return kernels_of(backend.arch(device), wanted_values(problem), backend.manifest, problem.optional)


def _nothing_to_see(given: Given, out: torch.Tensor | None, lse: torch.Tensor | None) -> None:
    """The call where there are no queries or no keys; of "kv" it keeps nothing."""
    if out is not None:
        out.zero_()
    if lse is not None:
        lse.fill_(float("-inf"))
        if given.sinks is not None:
            lse.copy_(given.sinks[:, None].expand_as(lse))
