"""diffusers: models and pipelines whose attention sage_aot serves.

    from sage_aot.integrations import diffusers as sage_diffusers

    sage_diffusers.enable(pipeline)             # or a model
    sage_diffusers.enable(pipeline, sparse=sage_aot.Sparse(keep=0.3), dense_layers=1, dense_steps=2)
    sage_diffusers.disable(pipeline)

    sage_diffusers.register()                   # or: diffusers' own ways to choose a backend
    model.set_attention_backend("sage_aot")

Calls that sage_aot does not serve go to diffusers' ``native`` backend.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any

import torch

from sage_aot._call.masks import BlockMask
from sage_aot._call.selection import ends_of
from sage_aot._call.sparse import Sparse
from sage_aot._problem.selection import CHOOSE_BY
from sage_aot.errors import ArgumentError, UnsupportedError
from sage_aot.integrations._routes import is_small
from sage_aot.integrations._rules import HostCall, blocks_of, check_gpu
from sage_aot.integrations._serve import attend, by_host, serve_with_lse
from sage_aot.integrations._sparse import (
    Ends,
    SharedSparse,
    Sparsely,
    Steps,
    spans_of_text,
    text_of_shares,
    with_dense,
)
from sage_aot.integrations.distributed import ring_blocks
from sage_aot.integrations.torch import is_torchs_sdpa, replace_sdpa, sparse_sdpa

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
    member = _member(NAME, attention)
    names._member_names_.append(member._name_)
    names._member_map_[member._name_] = names._value2member_map_[NAME] = member
    return member


def _member(name: str, function: Callable[..., Any]) -> dispatch.AttentionBackendName:
    """A member for processors, and another, which equals it, for diffusers' table of backends: an object that compiled
    code has met in a table gets no guard where it meets it in a processor, too."""
    member, key = (str.__new__(dispatch.AttentionBackendName, name) for _ in range(2))
    for each in (member, key):
        each._name_, each._value_ = name.upper(), name
    dispatch._AttentionBackendRegistry.register(key, supports_context_parallel=True)(function)
    return member


@cache
def _sparse_backend(sparse: Sparse, text: tuple[int, int] = (0, 0),
                    is_split: bool = False) -> dispatch.AttentionBackendName:
    """A backend whose long calls of tokens to themselves are sparse. diffusers finds it by the member, and does not
    list it. A layer's setting is a backend because compiled code keeps a guard on that, and none on its numbers, which
    would become symbols where layers differ in them. `is_split`: processes that share a sequence split its text apart
    from the other tokens."""
    def sparse_attention(*args: Any, **kwargs: Any) -> Any:
        return attention(*args, **{**kwargs, "backend": member})

    sparse_attention.__signature__ = inspect.signature(attention)  # type: ignore[attr-defined]
    member = _member(f"{NAME}, {sparse}, {text}, {is_split}", sparse_attention)
    with_text = Sparsely(sparse, text_tokens=text).with_text(sparse)
    member.sparse = tuple(getattr(with_text, each.name) for each in fields(Sparse))
    member.shared = (sparse, text) if is_split else (with_text, None)
    member.__reduce_ex__ = lambda protocol: (_sparse_backend, (sparse, text, is_split))
    return member


def _sparse_of(backend: Any) -> Sparse | None:
    """Choice of a backend's blocks; None for one of ours that is dense."""
    return None if backend is None else Sparse(*backend.sparse)


_STATE = "_sage_aot_before"
_BACKEND = "_sage_aot_backend"
"""Attribute of an attention module that calls torch itself: its sparse backend, or None."""


@dataclass
class _Before:
    """Changes by :func:`enable` in a model; an attribute of the model, so that both end, and are copied, together."""

    backends: list[tuple[Any, Any]] = field(default_factory=list)  # processors, and their backends of before
    kind: Any = None  # the model's class, where it got another
    by_sdpa: bool = False  # some of its attention calls torch itself
    modules: list[tuple[Any, Any]] = field(default_factory=list)  # attention modules, and their classes of before
    chosen: list[tuple[Any, str, Any, Any]] = field(default_factory=list)
    """Owners of attributes, their names, and what these are in sparse and in dense steps."""
    steps: Steps | None = None  # of a sampler, where some are dense
    is_dense: bool = True  # the step that runs


@cache
def _served_kind(kind: Any, by_sdpa: bool, by_steps: bool) -> Any:
    """A class of models under the name of theirs, whose calls run in
    :class:`sage_aot.integrations.torch.replace_sdpa`, or tell of a sampler's steps, or both.

    A class, and no attribute of a model: other libraries hook `forward` before and after, and copies of a model, whole
    or for several GPUs, are of its class.
    """
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if by_steps:
            _begin_step(self, args, kwargs)
        with replace_sdpa() if by_sdpa else nullcontext():
            return kind.__call__(self, *args, **kwargs)

    return _subclass(kind, call, _new_served_kind, by_sdpa, by_steps)


def _new_served_kind(*of_kind: Any) -> Any:
    made = _served_kind(*of_kind)
    return made.__new__(made)


@cache
def _sparse_kind(kind: Any) -> Any:
    """A class of attention modules likewise, which call torch's attention, and have a sparse backend in some steps."""
    of_kind = kind.__call__  # which dynamo does not look up in a class

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        backend = getattr(self, _BACKEND)
        with nullcontext() if backend is None else _SparseSdpa(backend):
            return of_kind(self, *args, **kwargs)

    return _subclass(kind, call, _new_sparse_kind)


def _new_sparse_kind(kind: Any) -> Any:
    made = _sparse_kind(kind)
    return made.__new__(made)


def _subclass(kind: Any, call: Callable[..., Any], new: Callable[..., Any], *arguments: Any) -> Any:
    """A subclass under the same name with another `__call__`, whose copies are made by new(kind, *arguments)."""
    def reduce(self: Any, protocol: Any) -> Any:
        _, _, *state = kind.__reduce_ex__(self, protocol)
        return new, (kind, *arguments), *state

    names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(kind.__name__, (kind,), {**names, "__call__": call, "__reduce_ex__": reduce})


class _SparseSdpa(replace_sdpa):
    """The calls of torch's attention in the block are those of a sparse backend."""

    def __init__(self, backend: Any) -> None:
        super().__init__()
        self.backend = backend

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        return sparse_sdpa(_sparse_of(self.backend), *args, **kwargs or {}) if is_torchs_sdpa(func) else func(
            *args, **kwargs or {})


def enable(target: ModelMixin | DiffusionPipeline, *, sparse: Sparse | Mapping[str, Sparse] | None = None,
           dense_layers: Ends = 0, dense_steps: Ends = 0, steps: int | None = None, text_tokens: Ends = 0) -> int:
    """Serve the attention of a model, or of all models of a pipeline; returns the number of their attention modules.
    Again, after a model got other attention processors, it serves those too; what it says of sparse layers takes the
    place of what was said before.

    Modules that choose a backend get sage_aot's. Where a model has others, whose attention calls torch directly, as in
    SD3, SDXL and CogVideoX, its calls run in :class:`sage_aot.integrations.torch.replace_sdpa`. Other models of the
    process stay as they are.

    Modules whose processor needs a backend of its own, such as ``flex`` for its block masks, keep it, and do not count.

    Args:
        sparse: the long calls of tokens to themselves choose their blocks of keys by this, in all models that get a
            noise level. A call is long from 16 blocks of keys on; attention to another text or image, and calls with a
            mask that differs by query, stay dense, as do refiners of text. A mapping has a :class:`sage_aot.Sparse` for
            each name of an attention module (``"blocks.3.attn1"``, as ``model.named_modules()`` has them), and leaves
            other modules dense.
        dense_layers: so many first layers, or (first, last), stay dense. Layers are the model's blocks in their order:
            modules whose names are equal up to the last number.
        dense_steps: so many first steps, or (first, last), stay dense. They are counted by the noise level that the
            model is called with: its value is read in each call, which waits for the GPU, and breaks the graph of a
            model that is compiled as a whole (``compile_repeated_blocks`` stays whole).
        steps: num_inference_steps, by which the last steps are known.
        text_tokens: so many first tokens, or (first, last), are text, which stays dense as keys and as queries. Flux,
            Qwen-Image and CogVideoX have their text first, HunyuanVideo and SD3 last; Wan and LTX have none in the same
            sequence. Where processes share a sequence, each has a part of the text, which is found by this number. With
            a `cp_plan` of your own call this after ``model.enable_parallelism``.

    Raises:
        ArgumentError: `target` is neither, it has no attention modules, or an argument is not of this form.
        UnsupportedError: all attention modules need a backend of their own, or sage_aot has no kernel for the GPU at
            hand.
    """
    backend = register()
    if sparse is None and (dense_layers, dense_steps, steps, text_tokens) != (0, 0, None, 0):
        raise ArgumentError("dense_layers, dense_steps, steps, text_tokens: expected none without sparse, got some; "
                            "pass sparse=sage_aot.Sparse(...)")
    sparsely = None if sparse is None else Sparsely(sparse, dense_layers, text_tokens)
    counted = Steps(dense_steps, steps) if dense_steps != 0 or steps is not None else None
    free = {model: _free_modules(model) for model in _models_of(target)}
    _check_free(target, free)
    layers = _sparse_layers(sparsely, free)
    text = (0, 0) if sparsely is None else ends_of("text_tokens", sparsely.text_tokens)
    for model, modules in free.items():
        if modules:
            _serve_model(model, [module.processor for module in modules.values()], backend)
            is_split = bool(layers[model]) and _splits_text(model)
            chosen = {modules[name]: _sparse_backend(one, text, is_split) for name, one in layers[model].items()}
            _choose_blocks(model, chosen, backend, counted)
    return sum(map(len, free.values()))


def _attention_of(model: ModelMixin) -> dict[str, Any]:
    """A model's attention modules by their names."""
    return {name: module for name, module in model.named_modules()
            if isinstance(module, (Attention, MochiAttention, AttentionModuleMixin))}


def _free_modules(model: ModelMixin) -> dict[str, Any]:
    """Modules whose backend may be chosen."""
    return {name: module for name, module in _attention_of(model).items() if _own_backend(module.processor) is None}


def _check_free(target: Any, free: dict[ModelMixin, dict[str, Any]]) -> None:
    if any(free.values()):
        return
    needed = {_own_backend(module.processor) for model in free for module in _attention_of(model).values()}
    if needed:
        raise UnsupportedError(f"expected attention modules whose backend can be chosen, got {type(target).__name__}, "
                               f"whose processors need the backend {', '.join(sorted(map(str, needed)))}; leave it as "
                               f"it is")
    raise ArgumentError(f"expected a model with attention modules of diffusers, got {type(target).__name__} with "
                        f"none; run it in sage_aot.integrations.torch.replace_sdpa")


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
            before.by_sdpa = True
        elif not _is_ours(processor._attention_backend):
            before.backends.append((processor, processor._attention_backend))
            processor._attention_backend = backend
    _set_kind(model, before)


def _is_ours(backend: Any) -> bool:
    return isinstance(backend, dispatch.AttentionBackendName) and (backend is register() or hasattr(backend, "sparse"))


def _set_kind(model: ModelMixin, before: _Before) -> None:
    """Give a model the class that its changes need."""
    own: Any = type(model) if before.kind is None else before.kind
    wanted = before.by_sdpa, before.steps is not None
    before.kind = own if any(wanted) else None
    model.__class__ = _served_kind(own, *wanted) if any(wanted) else own


def disable(target: ModelMixin | DiffusionPipeline) -> None:
    """Undo :func:`enable`; nothing happens to models that it did not change."""
    for model in _models_of(target):
        before: _Before | None = vars(model).pop(_STATE, None)
        if before is None:
            continue
        _forget_blocks(before)
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


# --- sparse layers and steps ------------------------------------------------------------------------------------------

_LEVELS = "timestep", "timesteps", "t"
"""Names under which models of diffusers get their noise level."""

_OF_TEXT = re.compile(r"token_refiner|context_refiner|connector|text_transformer_blocks|txt_mode_blocks|text_fusion")
"""Parts of the names of modules that only text goes through. They stay dense."""


@cache
def _level_at(kind: Any) -> int | None:
    """Index of the noise level among the arguments of a class of models; None where none is."""
    names = [*inspect.signature(kind.forward).parameters][1:]
    return next((names.index(name) for name in _LEVELS if name in names), None)


def _has_levels(model: Any) -> bool:
    kind: Any = type(model)
    return _level_at(kind) is not None


def _sparse_layers(sparsely: Sparsely | None, models: dict[ModelMixin, dict[str, Any]]
                   ) -> dict[ModelMixin, dict[str, Sparse]]:
    """Choices of each model's attention modules that are not dense."""
    if sparsely is None:
        return {model: {} for model in models}
    sparsely.check_names(name for modules in models.values() for name in modules)
    layers = {model: sparsely.of_layers(_may_be_sparse(modules)) if _has_levels(model) else {}
              for model, modules in models.items()}
    if not any(layers.values()):
        raise ArgumentError(f"sparse: expected layers that are not dense, got none in "
                            f"{', '.join(type(model).__name__ for model in models)}; leave sparse out, or pass fewer "
                            f"dense_layers")
    return layers


def _may_be_sparse(modules: dict[str, Any]) -> list[str]:
    return [name for name, module in modules.items()
            if not getattr(module, "is_cross_attention", False) and not _OF_TEXT.search(name)]


def _splits_text(model: ModelMixin) -> bool:
    """True where diffusers' context parallelism gives each process a part of a model's text next to its part of the
    image, as with Flux and Qwen-Image: where the plan splits `encoder_hidden_states`, and these join the image's
    sequence. (LTX's are split too, but cross-attention alone reads them.) Reads the plan in the model's hooks if there
    is one, else the plan of its class."""
    hooks = (hook for module in model.modules()
             for hook in getattr(getattr(module, "_diffusers_hook", None), "hooks", {}).values())
    plans = [hook.metadata for hook in hooks if isinstance(getattr(hook, "metadata", None), dict)]
    plans = plans or [*(getattr(model, "_cp_plan", None) or {}).values()]
    is_split = any("encoder_hidden_states" in plan for plan in plans if isinstance(plan, dict))
    modules = _attention_of(model)
    is_joined = any(getattr(module, "add_k_proj", None) is not None for module in modules.values())
    return is_split and (is_joined or not any(name.endswith("attn2") for name in modules))  # cross-attention


def _choose_blocks(model: ModelMixin, backends: dict[Any, Any], backend: Any, steps: Steps | None) -> None:
    """Give these attention modules of a model their sparse backends, and its others the dense one."""
    before: _Before = vars(model)[_STATE]
    _forget_blocks(before)
    for module, own in backends.items():
        if hasattr(module.processor, "_attention_backend"):
            before.chosen.append((module.processor, "_attention_backend", own, backend))
        else:
            kind: Any = type(module)
            before.modules.append((module, kind))
            module.__class__ = _sparse_kind(kind)
            before.chosen.append((module, _BACKEND, own, None))
    before.steps = steps if backends else None
    _set_blocks(before, is_dense=False)
    _set_kind(model, before)


def _forget_blocks(before: _Before) -> None:
    _set_blocks(before, is_dense=True)
    for module, kind in before.modules:
        module.__class__ = kind
        delattr(module, _BACKEND)
    before.modules, before.chosen, before.steps = [], [], None


def _set_blocks(before: _Before, is_dense: bool) -> None:
    for owner, name, sparse, dense in before.chosen:
        setattr(owner, name, dense if is_dense else sparse)
    before.is_dense = is_dense


@torch.compiler.disable  # type: ignore[untyped-decorator]  # the value of a tensor would be a part of the graph
def _begin_step(model: ModelMixin, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Make a model's layers sparse or dense for a call with these arguments. To read the noise level waits for the GPU.
    A tensor may have one for each token, of which those of a given image have none."""
    before: _Before = vars(model)[_STATE]
    levels = [kwargs[name] for name in _LEVELS if name in kwargs] or args[_level_at(before.kind) or 0:]
    if before.steps is None or len(levels) == 0:
        return
    level = levels[0].max() if isinstance(levels[0], torch.Tensor) else levels[0]
    is_dense = before.steps.is_dense(float(level))
    if is_dense != before.is_dense:
        _set_blocks(before, is_dense)


# --- the backend ------------------------------------------------------------------------------------------------------


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
              dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
              return_lse: bool = False, _parallel_config: Any = None, backend: Any = None) -> Any:
    """A backend of diffusers' dispatcher: tensors ``[batch, seq, heads, headdim]``, a mask ``[batch, keys]`` or one
    that broadcasts to ``[batch, heads, queries, keys]``; the log-sum-exp is ``[batch, seq, heads]``. `backend`: a
    sparse one that is called in the place of this."""
    sparse = _sparse_of(backend)
    if _parallel_config is not None:
        forward = _forward if sparse is None else _SharedForward(backend.shared,
                                                                 _parallel_config.context_parallel_config)
        return dispatch._templated_context_parallel_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, return_lse, forward_op=forward,
            backward_op=dispatch._native_attention_backward_op, _parallel_config=_parallel_config)

    given = query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
    if not return_lse and is_small(query, key, attn_mask is not None, is_causal, rows=1):
        return by_host(dispatch._native_attention, *given)
    mask = attn_mask[:, None, None, :] if attn_mask is not None and attn_mask.dim() == 2 and attn_mask.shape == (
        query.size(0), key.size(1)) else attn_mask
    call = HostCall(query, key, value, mask, is_causal, scale, dropout_p, "NHD", grouped=enable_gqa,
                    blocks=sparse)
    return _with_lse(call) if return_lse else attend(call, lambda: dispatch._native_attention(*given))


def _forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
             attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
             scale: float | None = None, enable_gqa: bool = False, return_lse: bool = False, _save_ctx: bool = True,
             _parallel_config: Any = None, blocks: Sparse | BlockMask | None = None) -> Any:
    """The attention of one rank's share: a step of the ring, with `return_lse`, or the heads of Ulysses."""
    trains = any(ctx.needs_input_grad[:3])  # gradients are off in here
    call = HostCall(query, key, value, attn_mask, is_causal, scale, dropout_p, "NHD", grouped=enable_gqa,
                    beyond="gradients" if trains else None, blocks=blocks)
    return _with_lse(call) if return_lse else attend(call, lambda: dispatch._native_attention_forward_op(
        ctx, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, return_lse, _save_ctx,
        _parallel_config))


class _SharedForward:
    """:func:`_forward` of one sparse call that processes share. Of Ulysses each has whole sequences of some heads; in a
    ring the blocks of all keys are chosen in the first step, and each step gets those of its share. `chosen`: the
    choice, and (first, last) text tokens of which each process holds a part; None where the processes' parts in a row
    are the model's sequence, so that dense_keys and dense_queries already say where its text is."""

    def __init__(self, chosen: tuple[Sparse, tuple[int, int] | None], shared: Any) -> None:
        sparse, text = chosen
        ends = sparse.dense_keys, sparse.dense_queries
        if text is not None and any(end not in (0, (0, 0)) for end in ends):
            raise UnsupportedError(f"dense_keys, dense_queries: expected none where processes share a sequence, whose "
                                   f"text and image are split apart, got {ends[0]} and {ends[1]}; pass what is text as "
                                   f"text_tokens")
        self.sparse, self.text, self.shared = sparse, text, shared
        self.of_steps: Iterator[BlockMask | None] | None = None

    def __call__(self, ctx: Any, query: torch.Tensor, key: torch.Tensor, *others: Any, **named: Any) -> Any:
        sparse = self._of_rank()
        if self.shared.ring_degree == 1:
            if self.text is not None:
                text = spans_of_text(text_of_shares(self.text, key.size(1), self.shared.ulysses_degree))
                sparse = SharedSparse.of(sparse, text)
            return _forward(ctx, query, key, *others, **{**named, "blocks": sparse})
        if self.of_steps is None:
            self.of_steps = iter(self._of_ring(sparse, query, key, *others))
        return _forward(ctx, query, key, *others, **{**named, "blocks": next(self.of_steps)})

    def _of_rank(self) -> Sparse:
        """Choice with this rank's part of amounts for each head. Where the degree does not divide the heads, diffusers
        gives each rank as many, rounded up, and the last rank the rest."""
        degree = self.shared.ulysses_degree
        rank = self.shared._ulysses_local_rank if degree > 1 else 0

        def part(amounts: tuple[float, ...]) -> tuple[float, ...]:
            heads = -(-len(amounts) // degree)
            return amounts[rank * heads:][:heads]

        of_heads: dict[str, Any] = {name: part(amounts) for name in CHOOSE_BY
                                    if isinstance(amounts := getattr(self.sparse, name), tuple)}
        return replace(self.sparse, **of_heads)

    def _of_ring(self, sparse: Sparse, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                 attn_mask: torch.Tensor | None, dropout_p: float, is_causal: bool, scale: float | None,
                 *_: Any) -> list[BlockMask | None]:
        """The blocks of each step, which has the share of the next rank: this rank's own first."""
        degree, rank, group = self.shared.ring_degree, self.shared._ring_local_rank, self.shared._ring_mesh.get_group()
        lengths = [key.size(1)] * degree
        if getattr(self.shared, "ring_anything", False):
            lengths = dispatch.gather_size_by_comm(key.size(1), group)
        whole = key[:, :1].expand(-1, sum(lengths), -1, -1)
        call = HostCall(whole, whole, whole, attn_mask, is_causal, layout="NHD", blocks=sparse)
        if query.size(1) != key.size(1) or attn_mask is not None or blocks_of(call) is None:
            return [None] * degree
        masks = ring_blocks(query, key, sparse, group, lengths=lengths, scale=scale, layout="NHD")
        if self.text is not None:
            each = self.shared.ulysses_degree
            shares = text_of_shares(self.text, sum(lengths), degree * each)
            text = [spans_of_text(shares[begin: begin + each]) for begin in range(0, len(shares), each)]
            masks = [with_dense(mask, text[rank], of_keys) for mask, of_keys in zip(masks, text)]
        return [masks[(rank + step) % degree] for step in range(degree)]


def _with_lse(call: HostCall) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = serve_with_lse(call, "diffusers' native backend returns no log-sum-exp, so choose another backend, or "
                                    "Ulysses instead of the ring")
    return out, lse.permute(0, 2, 1)
