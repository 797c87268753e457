"""torch's scaled_dot_product_attention, served by sage_aot where its policy says so.

    from sage_aot.integrations.torch import replace_sdpa, sdpa

    out = sdpa(q, k, v, is_causal=True)      # SDPA's signature

    with replace_sdpa():                      # calls of scaled_dot_product_attention in this block and thread
        out = model(x)

    register_flash()                          # calls that torch sends to its flash backend, C++ callers' too
    torch.nn.attention.activate_flash_attention_impl("sage_aot")
"""

from __future__ import annotations

import functools
import inspect
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.nn.attention.bias import CausalBias
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function

from sage_aot._call.sparse import Sparse
from sage_aot.errors import ArgumentError, UnsupportedError
from sage_aot.integrations import _policy
from sage_aot.integrations._report import count
from sage_aot.integrations._routes import FLASH, NOT_ASKED, is_small, route
from sage_aot.integrations._rules import HostCall, check_gpu
from sage_aot.integrations._serve import attend, by_host, is_hosts_own

_P = ParamSpec("_P")
_T = TypeVar("_T")

_TORCHS: Callable[..., torch.Tensor] = torch._C._nn.scaled_dot_product_attention

_is_dynamo_compiling = torch.compiler.is_dynamo_compiling
_peek: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack

def sdpa(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
         dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
         enable_gqa: bool = False) -> torch.Tensor:
    """``torch.nn.functional.scaled_dot_product_attention``, by sage_aot or by torch, as the policy decides
    (:class:`sage_aot.integrations.Policy`).

    Args, returns: those of torch's function. The causal mask is aligned top-left, as there. Bool masks are served, of
    any shape that broadcasts to the scores; one that is the same for all heads and queries, ``[batch, 1, 1, keys]`` for
    instance, saves the most. A row that sees no key gives zeros; torch gives zeros or NaN, as its backends do.

    Raises:
        UnsupportedError: the policy says so of calls that sage_aot does not compute, or no kernel runs on this GPU.

    >>> import torch
    >>> from sage_aot.integrations.torch import sdpa
    >>> q, k, v = torch.randn(3, 1, 2, 100, 64)
    >>> sdpa(q, k, v, is_causal=True).shape
    torch.Size([1, 2, 100, 64])
    """
    if attn_mask is not None and type(attn_mask) is not torch.Tensor and has_torch_function((attn_mask,)):
        count("a mask of a subclass")
        return torchs(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    known = NOT_ASKED
    if not _is_dynamo_compiling():
        try:  # what `route` does, in place: each 0.1 µs of the host counts
            known = _policy.routes.get((query.shape, key.shape, attn_mask is not None, is_causal, -2), NOT_ASKED)
        except (RuntimeError, TypeError):
            known = NOT_ASKED
    if known is NOT_ASKED:
        known = route(query, key, attn_mask is not None, is_causal)
    if known is None:
        return _attend(None, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    known.counted()
    if known.by and dropout_p == 0 and (known.by == FLASH or enable_gqa):
        flashed = by_flash(query, key, value, scale)
        if flashed is not None:
            return flashed
    if scale is None and attn_mask is None and is_causal is False and dropout_p == 0:  # to parse these takes 0.2 µs
        return _TORCHS(query, key, value, enable_gqa=True) if enable_gqa else _TORCHS(query, key, value)
    if enable_gqa:
        return _TORCHS(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=True)
    if scale is None:
        return _TORCHS(query, key, value, attn_mask, dropout_p, is_causal)
    return _TORCHS(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)


def _attend(sparse: Sparse | None, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
            attn_mask: torch.Tensor | None, dropout_p: float, is_causal: bool, scale: float | None,
            enable_gqa: bool) -> torch.Tensor:
    """A call of which more than its shape decides. Apart from :func:`sdpa`, where the closure would make a cell of
    each argument, also for calls that have a route."""
    call = HostCall(query, key, value, attn_mask, is_causal, scale, dropout_p, grouped=enable_gqa, blocks=sparse)
    out: torch.Tensor = attend(call, lambda: torchs(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa))
    return out


def sparse_sdpa(sparse: Sparse | None, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
                scale: float | None = None, enable_gqa: bool = False) -> torch.Tensor:
    """:func:`sdpa`, whose long calls of tokens to themselves choose their blocks of keys."""
    if is_small(query, key, attn_mask is not None, is_causal):
        out: torch.Tensor = by_host(torchs, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        return out
    return _attend(sparse, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def is_torchs_sdpa(function: object) -> bool:
    """True for torch's own scaled_dot_product_attention."""
    return function is _TORCHS


def torchs(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
           dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
           enable_gqa: bool = False) -> torch.Tensor:
    """torch's own function, whatever has replaced its attribute."""
    grouped = {"enable_gqa": True} if enable_gqa else {}
    if attn_mask is not None and type(attn_mask) is not torch.Tensor and has_torch_function((attn_mask,)):
        # such as torch.nn.attention.bias, which computes the call itself, and knows the function by the attribute
        made: torch.Tensor = handle_torch_function(F.scaled_dot_product_attention, (attn_mask,), query, key, value,
                                                   attn_mask, dropout_p, is_causal, scale=scale, **grouped)
        return made
    return _TORCHS(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, **grouped)


def by_flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None) -> torch.Tensor | None:
    """The call by torch's FlashAttention; None where the caller has chosen another backend, where torch does more than
    to call it, and where it does not take the tensors. It checks them itself, so torch's choice is not asked, which
    takes as long as all of this."""
    if (v.dtype not in _FLASH_TYPES or not torch._C._get_flash_sdp_enabled()
            or torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
            or torch.is_autocast_enabled()
            or _peek() is not None or forward_ad._current_level >= 0):  # is_transformed, in place
        return None
    try:
        out: torch.Tensor = torch._scaled_dot_product_flash_attention(q, k, v, scale=scale)[0]
    except RuntimeError:  # torch's own choice computes the call, or says what is wrong with it
        return None
    return out


_FLASH_TYPES = torch.float16, torch.bfloat16


@functools.wraps(_TORCHS, ("__doc__", "__name__"), ())
def _from_python(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
                 dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
                 enable_gqa: bool = False) -> torch.Tensor:
    """The function in the place of torch's: :func:`sdpa`, but for the calls of a host's own attention."""
    function = torchs if is_hosts_own() else sdpa  # named arguments: to pack and unpack others takes 0.1 µs
    return function(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


class replace_sdpa(TorchFunctionMode):  # noqa: N801  # a context manager, as torch.no_grad is
    """:func:`sdpa` in the place of scaled_dot_product_attention, as a context manager or a decorator.

    In this thread alone, and also through references to torch's function that were taken before. Not inside functions
    of torch that call it, such as that of ``torch.nn.MultiheadAttention``; :meth:`globally` reaches them. Every torch
    call in the block takes some microseconds of Python more, which neither :meth:`globally` nor compiled code does.

    Raises:
        UnsupportedError: on entering, where sage_aot has no kernel for the GPU at hand.
    """

    def __init__(self, *function: Any) -> None:
        if function:
            raise ArgumentError(f"replace_sdpa: expected no argument, got {function[0]!r}; as a decorator write "
                                f"@replace_sdpa()")
        super().__init__()

    def __enter__(self) -> replace_sdpa:
        check_gpu()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        return (_from_python if func is _TORCHS else func)(*args, **kwargs or {})

    def __call__(self, work: Callable[_P, _T]) -> Callable[_P, _T]:
        if inspect.isgeneratorfunction(work) or inspect.iscoroutinefunction(work) or inspect.isasyncgenfunction(work):
            raise ArgumentError(f"replace_sdpa: expected a function that has run when it returns, got "
                                f"{work!r}, which runs later; enter replace_sdpa() inside it")

        @functools.wraps(work)
        def with_it(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            with type(self)():
                return work(*args, **kwargs)

        return with_it

    @staticmethod
    @contextmanager
    def globally() -> Iterator[None]:
        """The attribute ``torch.nn.functional.scaled_dot_product_attention`` does what :func:`sdpa` does while the
        context is entered, for all threads; contexts may be left in any order. References that were taken before, with
        ``from torch.nn.functional import``, stay torch's. ``torch.nn.MultiheadAttention`` calls the function with
        ``need_weights=False``, and not on torch's fast path of inference (``torch.backends.mha``)."""
        check_gpu()
        of_bias = _Replacement(CausalBias, "__torch_function__")

        def by_attribute(kind: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            """A bias knows the function by the attribute; references of before hand it torch's."""
            asked = F.scaled_dot_product_attention if func is _TORCHS else func
            return of_bias.before.__get__(None, kind)(asked, types, args, kwargs)

        with _Replacement(F, "scaled_dot_product_attention").by(_from_python), of_bias.by(classmethod(by_attribute)):
            yield


class _Replacement:
    """Something in the place of an attribute. Contexts of one attribute may be left in any order: what the last one
    entered has put holds, and behind all of them what was there before."""

    _entered: ClassVar[list[_Replacement]] = []
    _lock = threading.Lock()

    def __init__(self, owner: Any, name: str) -> None:
        self._attribute = owner, name
        self._put: Any = None
        self.before: Any = None  # what the attribute has without this

    @contextmanager
    def by(self, put: Any) -> Iterator[None]:
        owner, name = self._attribute
        with self._lock:
            self._put, self.before = put, vars(owner)[name]
            setattr(owner, name, put)
            self._entered.append(self)
        try:
            yield
        finally:
            with self._lock:
                self._leave()

    def _leave(self) -> None:
        owner, name = self._attribute
        at = self._entered.index(self)
        later = next((other for other in self._entered[at + 1:] if other._attribute == self._attribute), None)
        del self._entered[at]
        if later is None:
            setattr(owner, name, self.before)
        elif later.before is self._put:  # and not what another library put there meanwhile
            later.before = self.before


# --- torch's flash attention ------------------------------------------------------------------------------------------


def register_flash(name: str = "sage_aot") -> None:
    """Offer sage_aot to torch as an implementation of its flash attention. May be called again.

    ``torch.nn.attention.activate_flash_attention_impl(name)`` then serves the calls that torch sends to its flash
    backend, those of C++ and of ``torch.distributed.tensor.experimental.context_parallel`` among them;
    ``restore_flash_attention_impl()`` ends it. On Hopper torch prefers cuDNN: choose flash with
    ``torch.nn.attention.sdpa_kernel(SDPBackend.FLASH_ATTENTION)``. Calls that sage_aot does not serve run torch's own
    kernel. Calls under ``torch.no_grad`` are among them, for compiled code runs the forward of its training so; call
    models under ``torch.inference_mode``.

    Raises:
        UnsupportedError: this torch has no such registration, or no CUDA. Activating raises it where sage_aot has no
            kernel for the GPU at hand.
    """
    if torch.version.cuda is None:
        raise UnsupportedError(f"register_flash: expected a CUDA build of torch, got {torch.__version__}")
    if not (hasattr(torch.nn.attention, "register_flash_attention_impl") and hasattr(torch.library, "get_kernel")):
        raise UnsupportedError(f"register_flash: expected torch.nn.attention.register_flash_attention_impl and "
                               f"torch.library.get_kernel, got torch {torch.__version__} without; use replace_sdpa")
    torch.nn.attention.register_flash_attention_impl(name, register_fn=_Flash)


class _Flash:
    """sage_aot in the place of an operator of torch's flash attention, from its making to :meth:`remove`."""

    OPERATOR, KEY = "_scaled_dot_product_flash_attention", "CUDA"

    def __init__(self) -> None:
        check_gpu()
        self._torchs = torch.library.get_kernel(f"aten::{self.OPERATOR}", self.KEY)
        self._library: torch.library.Library | None = torch.library.Library(  # type: ignore[no-untyped-call]
            "aten", "IMPL")
        with warnings.catch_warnings():  # that a kernel is overridden, which is the point
            warnings.simplefilter("ignore")
            self._library.impl(  # type: ignore[no-untyped-call]
                self.OPERATOR, self._attention, self.KEY, with_keyset=True)

    def remove(self) -> None:
        self._library = None  # its end takes the kernel away

    def _attention(self, keys: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                   dropout_p: float = 0.0, is_causal: bool = False, return_debug_mask: bool = False, *,
                   scale: float | None = None) -> Any:
        call = HostCall(query, key, value, None, is_causal, scale, dropout_p, grouped=True, bottom_right=True,
                        beyond="a debug mask" if return_debug_mask else _training())
        return self._attend(call, lambda: self._torchs.call_boxed(
            keys, query, key, value, dropout_p, is_causal, return_debug_mask, scale=scale))

    def _attend(self, call: HostCall, torchs: Callable[[], Any]) -> Any:
        return attend(call, torchs, return_lse=True, form=lambda made: self._outputs(call, *made))

    def _outputs(self, call: HostCall, out: torch.Tensor, lse: torch.Tensor) -> tuple[Any, ...]:
        """All outputs of the operator. What only its backward and its dropout read is left undefined: neither runs
        after a call that sage_aot serves."""
        q, k = call.q, call.k
        seed = torch.empty(2, dtype=torch.uint64, device=q.device)
        offset = torch.empty((), dtype=torch.uint64, device=q.device)
        debug_mask = torch.empty(0, dtype=q.dtype, device=q.device)
        return _like(q, out), lse, None, None, q.size(2), k.size(2), seed, offset, debug_mask


def _training() -> str | None:
    """Compiled code runs the forward of its training with gradients switched off, as inference may, and its tensors
    require none there. torch.inference_mode is no training, nor is a call with gradients on and none required."""
    if torch.is_inference_mode_enabled() or torch.is_grad_enabled():
        return None
    return "torch.no_grad, in which compiled training runs too"


def _like(q: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """The output in the strides that torch's compiled code relies on."""
    made = torch.empty_like(q)
    return out if made.stride() == out.stride() else made.copy_(out)
