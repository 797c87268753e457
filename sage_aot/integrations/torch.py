"""torch's scaled_dot_product_attention, served by sage_aot where its policy says so.

    from sage_aot.integrations.torch import replace_sdpa, sdpa

    out = sdpa(q, k, v, is_causal=True)      # SDPA's signature

    with replace_sdpa():                      # calls of scaled_dot_product_attention in this block and thread
        out = model(x)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from sage_aot.integrations._policy import Call, attend, check_gpu

_P = ParamSpec("_P")
_T = TypeVar("_T")

_TORCHS: Callable[..., torch.Tensor] = torch._C._nn.scaled_dot_product_attention


def sdpa(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
         dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
         enable_gqa: bool = False) -> torch.Tensor:
    """``torch.nn.functional.scaled_dot_product_attention``, by sage_aot or by torch, as the policy decides
    (:class:`sage_aot.integrations.Policy`).

    Args, returns: those of torch's function. The causal mask is aligned top-left, as there. A bool mask that is the
    same for all heads and queries, ``[batch, 1, 1, keys]`` for instance, is served as a key mask.

    Raises:
        UnsupportedError: the policy says so of calls that sage_aot does not compute, or no kernel runs on this GPU.

    >>> import torch
    >>> from sage_aot.integrations.torch import sdpa
    >>> q, k, v = torch.randn(3, 1, 2, 100, 64)
    >>> sdpa(q, k, v, is_causal=True).shape
    torch.Size([1, 2, 100, 64])
    """
    call = Call(query, key, value, attn_mask, is_causal, scale, dropout_p, grouped=enable_gqa)
    out: torch.Tensor = attend(call, lambda: _TORCHS(query, key, value, attn_mask, dropout_p, is_causal, scale=scale,
                                                     enable_gqa=enable_gqa))
    return out


class replace_sdpa(TorchFunctionMode):  # noqa: N801  # a context manager, as torch.no_grad is
    """:func:`sdpa` in the place of scaled_dot_product_attention, as a context manager or a decorator.

    In this thread alone, and also through references to torch's function that were taken before. Not inside functions
    of torch that call it, such as that of ``torch.nn.MultiheadAttention``; :meth:`globally` reaches them. Every torch
    call in the block takes some microseconds of Python more, which neither :meth:`globally` nor compiled code does.

    Raises:
        UnsupportedError: on entering, where sage_aot has no kernel for the GPU at hand.
    """

    def __enter__(self) -> replace_sdpa:
        check_gpu()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        return (sdpa if func is _TORCHS else func)(*args, **kwargs or {})

    def __call__(self, work: Callable[_P, _T]) -> Callable[_P, _T]:
        @functools.wraps(work)
        def with_it(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            with type(self)():
                return work(*args, **kwargs)

        return with_it

    @staticmethod
    @contextmanager
    def globally() -> Iterator[None]:
        """The attribute ``torch.nn.functional.scaled_dot_product_attention`` is :func:`sdpa` while the context is
        entered, for all threads. References that were taken before, with ``from torch.nn.functional import``, stay
        torch's."""
        check_gpu()
        before = F.scaled_dot_product_attention
        F.scaled_dot_product_attention = sdpa
        try:
            yield
        finally:
            F.scaled_dot_product_attention = before
