"""diffusers: models and pipelines whose attention sage_aot serves.

    from sage_aot.integrations import diffusers as sage_diffusers

    sage_diffusers.enable(pipeline)             # or a model
    sage_diffusers.disable(pipeline)

    sage_diffusers.register()                   # or: diffusers' own ways to choose a backend
    model.set_attention_backend("sage_aot")

Calls that sage_aot does not serve go to diffusers' ``native`` backend.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from sage_aot.errors import ArgumentError, UnsupportedError
from sage_aot.integrations._routes import is_small
from sage_aot.integrations._rules import HostCall, check_gpu
from sage_aot.integrations._serve import attend, by_host, serve_with_lse
from sage_aot.integrations.torch import replace_sdpa

try:
    from diffusers import DiffusionPipeline, ModelMixin
    from diffusers.models import attention_dispatch as dispatch
    from diffusers.models.attention import AttentionModuleMixin
    from diffusers.models.attention_processor import Attention, MochiAttention
except ImportError as error:
    raise UnsupportedError(f"sage_aot.integrations.diffusers: expected diffusers 0.36 or later, got: {error}; "
                           f"pip install 'diffusers>=0.36'") from error

NAME = "sage_aot"


# --- switching it on --------------------------------------------------------------------------------------------------


@cache
def register() -> dispatch.AttentionBackendName:
    """Make the attention backend ``"sage_aot"`` known to diffusers; returns its member of diffusers' enumeration.
    Called again, it changes nothing.

    Raises:
        UnsupportedError: sage_aot has no kernel for the GPU at hand.
    """
    check_gpu()
    # diffusers offers no way to add a backend: its dispatcher finds backends by the members of this enumeration.
    names = dispatch.AttentionBackendName
    member = str.__new__(names, NAME)
    member._name_, member._value_ = NAME.upper(), NAME
    names._member_names_.append(member._name_)
    names._member_map_[member._name_] = names._value2member_map_[NAME] = member
    dispatch._AttentionBackendRegistry.register(member, supports_context_parallel=True)(attention)
    return member


_STATE = "_sage_aot_before"


@dataclass
class _Before:
    """Changes by :func:`enable` in a model; an attribute of the model, so that both end, and are copied, together."""

    backends: list[tuple[Any, Any]] = field(default_factory=list)  # processors, and their backends of before
    kind: Any = None  # the model's class, where it got another


@cache
def _in_replace_sdpa(kind: Any) -> Any:
    """A class of models whose calls run in :class:`sage_aot.integrations.torch.replace_sdpa`, under the name of theirs.

    A class, and no attribute of a model: other libraries hook `forward` before and after, and copies of a model, whole
    or for several GPUs, are of its class.
    """
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with replace_sdpa():
            return kind.__call__(self, *args, **kwargs)

    def reduce(self: Any, protocol: Any) -> Any:
        _, _, *state = kind.__reduce_ex__(self, protocol)
        return _new_in_replace_sdpa, (kind,), *state

    names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(kind.__name__, (kind,), {**names, "__call__": call, "__reduce_ex__": reduce})


def _new_in_replace_sdpa(kind: Any) -> Any:
    made = _in_replace_sdpa(kind)
    return made.__new__(made)


def enable(target: ModelMixin | DiffusionPipeline) -> int:
    """Serve the attention of a model, or of all models of a pipeline; returns the number of their attention modules.
    Again, after a model got other attention processors, it serves those too.

    Modules that choose a backend get sage_aot's. Where a model has others, whose attention calls torch directly, as in
    SD3, SDXL and CogVideoX, its calls run in :class:`sage_aot.integrations.torch.replace_sdpa`. Other models of the
    process stay as they are.

    Modules whose processor needs a backend of its own, such as ``flex`` for its block masks, keep it, and do not count.

    Raises:
        ArgumentError: `target` is neither, or it has no attention modules.
        UnsupportedError: all attention modules need a backend of their own, or sage_aot has no kernel for the GPU at
            hand.
    """
    backend = register()
    served, needed = 0, set[str]()
    for model in _models_of(target):
        processors = [module.processor for module in model.modules()
                      if isinstance(module, (Attention, MochiAttention, AttentionModuleMixin))]
        free = [processor for processor in processors if _own_backend(processor) is None]
        needed |= {own for processor in processors if (own := _own_backend(processor)) is not None}
        if free:
            _serve_model(model, free, backend)
        served += len(free)
    if needed and not served:
        raise UnsupportedError(f"expected attention modules whose backend can be chosen, got {type(target).__name__}, "
                               f"whose processors need the backend {', '.join(sorted(needed))}; leave it as it is")
    if not served:
        raise ArgumentError(f"expected a model with attention modules of diffusers, got {type(target).__name__} with "
                            f"none; run it in sage_aot.integrations.torch.replace_sdpa")
    return served


def _own_backend(processor: Any) -> str | None:
    """The backend that a processor needs: its class names one, or it has one of flex attention, whose block masks no
    other backend takes. None where the backend may be chosen."""
    of_class, chosen = (getattr(owner, "_attention_backend", None) for owner in (type(processor), processor))
    name = str(getattr(chosen, "value", chosen))
    return name if of_class is not None or "flex" in name else None


def _serve_model(model: ModelMixin, processors: list[Any], backend: Any) -> None:
    before: _Before = vars(model).setdefault(_STATE, _Before())
    for processor in processors:
        if not hasattr(processor, "_attention_backend"):
            if before.kind is None:
                before.kind = type(model)
                model.__class__ = _in_replace_sdpa(before.kind)
        elif processor._attention_backend is not backend:
            before.backends.append((processor, processor._attention_backend))
            processor._attention_backend = backend


def disable(target: ModelMixin | DiffusionPipeline) -> None:
    """Undo :func:`enable`; nothing happens to models that it did not change."""
    for model in _models_of(target):
        before: _Before | None = vars(model).pop(_STATE, None)
        if before is None:
            continue
        if before.kind is not None:
            model.__class__ = before.kind
        for processor, backend in before.backends:
            processor._attention_backend = backend


def _models_of(target: Any) -> Iterator[ModelMixin]:
    parts = target.components.values() if isinstance(target, DiffusionPipeline) else [target]
    parts = [getattr(part, "_orig_mod", part) for part in parts]  # of torch.compile
    models = [part for part in parts if isinstance(part, ModelMixin)]
    if not models:
        raise ArgumentError(f"expected a model or a pipeline of diffusers, got {type(target).__name__}")
    yield from models


# --- the backend ------------------------------------------------------------------------------------------------------


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
              dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
              return_lse: bool = False, _parallel_config: Any = None) -> Any:
    """A backend of diffusers' dispatcher: tensors ``[batch, seq, heads, headdim]``, a mask ``[batch, keys]`` or one
    that broadcasts to ``[batch, heads, queries, keys]``; the log-sum-exp is ``[batch, seq, heads]``."""
    if _parallel_config is not None:
        return dispatch._templated_context_parallel_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, return_lse, forward_op=_forward,
            backward_op=dispatch._native_attention_backward_op, _parallel_config=_parallel_config)
    def native() -> Any:
        return dispatch._native_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)

    if not return_lse and is_small(query, key, attn_mask is not None, is_causal, rows=1):
        return by_host(native)
    mask = attn_mask[:, None, None, :] if attn_mask is not None and attn_mask.dim() == 2 and attn_mask.shape == (
        query.size(0), key.size(1)) else attn_mask
    call = HostCall(query, key, value, mask, is_causal, scale, dropout_p, "NHD", grouped=enable_gqa)
    return _with_lse(call) if return_lse else attend(call, native)


def _forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
             attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
             scale: float | None = None, enable_gqa: bool = False, return_lse: bool = False, _save_ctx: bool = True,
             _parallel_config: Any = None) -> Any:
    """The attention of one rank's share: a step of the ring, with `return_lse`, or the heads of Ulysses."""
    trains = any(ctx.needs_input_grad[:3])  # gradients are off in here
    call = HostCall(query, key, value, attn_mask, is_causal, scale, dropout_p, "NHD", grouped=enable_gqa,
                    beyond="gradients" if trains else None)
    return _with_lse(call) if return_lse else attend(call, lambda: dispatch._native_attention_forward_op(
        ctx, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, return_lse, _save_ctx,
        _parallel_config))


def _with_lse(call: HostCall) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = serve_with_lse(call, "diffusers' native backend returns no log-sum-exp, so choose another backend, or "
                                    "Ulysses in place of the ring")
    return out, lse.permute(0, 2, 1)
