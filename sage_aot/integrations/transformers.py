"""transformers: models with ``attn_implementation="sage_aot"``.

    from sage_aot.integrations import transformers as sage_transformers

    sage_transformers.register()
    model = AutoModel.from_pretrained(name, attn_implementation="sage_aot")

    sage_transformers.enable(model)     # or: a model that is loaded already

Calls that sage_aot does not serve go to transformers' own ``sdpa`` attention, those with attention sinks, which it does
not have, to the model's eager attention.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from sage_aot._problem.problem import is_static
from sage_aot.errors import ArgumentError, UnsupportedError
from sage_aot.integrations._report import count
from sage_aot.integrations._routes import is_small
from sage_aot.integrations._rules import HostCall, check_gpu
from sage_aot.integrations._serve import attend, by_host

try:
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, masking_utils
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask
    if "q_length" not in inspect.signature(sdpa_mask).parameters:
        raise ImportError("masks are made of cache_position")
except ImportError as error:
    raise UnsupportedError(f"sage_aot.integrations.transformers: expected transformers 5.4 or later, got: {error}; "
                           f"pip install 'transformers>=5.4'") from error

NAME = "sage_aot"

UNKNOWN_TO_SDPA = ("softcap", "sinks", "indices", "block_indices")
"""Arguments that change the result, and that neither sage_aot nor transformers' sdpa attention computes. ``s_aux``, the
sinks of a layer, sdpa drops too; sage_aot computes them."""


# --- switching it on --------------------------------------------------------------------------------------------------


_names: set[str] = set()
"""Names under which :func:`register` made sage_aot known."""


def register(name: str = NAME) -> None:
    """Make an attention implementation of this name known to transformers: its attention and its mask function. May be
    called again. From then on a model that is loaded with the name, or switched to it, raises UnsupportedError where
    its class does not leave all of its attention to the name's function: ``PreTrainedModel``'s own check of the name
    asks sage_aot first.

    Raises:
        ArgumentError: transformers would take another path for a model with this name.
        UnsupportedError: sage_aot has no kernel for the GPU at hand.
    """
    if any(part in name for part in ("flash", "sdpa", "/", "|")):
        raise ArgumentError(f"name: expected none with flash, sdpa, / or |, into which transformers reads more, got "
                            f"{name!r}; pass another name")
    check_gpu()
    _check_models_of_names()
    _names.add(name)
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, attention_mask)


def enable(model: PreTrainedModel) -> str | dict[str, str]:
    """Switch a loaded model to sage_aot. Returns its attention implementation of before, a name or one for each part,
    which ``model.set_attn_implementation`` takes to switch back. (Parts of parts get that of their part.)

    Raises:
        ArgumentError: `model` is no model of transformers.
        UnsupportedError: the model or a part of it does not leave all of its attention to the implementation that is
            chosen, or has attention that cannot be switched, or arguments that only its eager implementation computes,
            or sage_aot has no kernel for the GPU at hand. The model stays as it was.
    """
    if not callable(getattr(model, "set_attn_implementation", None)):  # torch.compile's wrapper hands it on
        raise ArgumentError(f"expected a model of transformers, got {type(model).__name__}; run others in "
                            f"sage_aot.integrations.torch.replace_sdpa")
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            _check_model(type(part), is_made=True)
    register()
    before = _implementation(model.config)
    model.set_attn_implementation(NAME)
    return before


@functools.cache  # once a process
def _check_models_of_names() -> None:
    """Have :func:`_check_model` asked wherever transformers checks the implementation of a model: when the model is
    made, before its first layer, and when it is switched. transformers offers no such hook for names that are
    registered, and takes them for every class of models."""
    transformers_check = PreTrainedModel.get_correct_attn_implementation

    @functools.wraps(transformers_check)
    def get_correct_attn_implementation(self: PreTrainedModel, requested_attention: str | None,
                                        is_init_check: bool = False) -> str:
        if requested_attention in _names:
            _check_model(type(self), is_made=not is_init_check)
            if not is_init_check:
                _check_configs(self, requested_attention)
        checked: str = transformers_check(self, requested_attention, is_init_check)
        return checked

    setattr(PreTrainedModel, "get_correct_attn_implementation",  # noqa: B010  # mypy allows no assignment
            get_correct_attn_implementation)


def _check_model(kind: type[PreTrainedModel], is_made: bool) -> None:
    """UnsupportedError for models of a class that does not leave all of its attention to the implementation that is
    chosen by name: it would compute its own on masks that are not made for it. `is_made`: the model has its layers."""
    if not kind._supports_sdpa and not all(map(_has_sinks_alone, _code_of(kind))):
        reason = "which transformers does not run with sdpa attention"
    elif not kind._can_set_attn_implementation():
        reason = "whose attention does not call the implementation that is registered for a name"
    elif not is_made and any(_OWN_TABLE.search(code) for code in _code_of(kind)):
        reason = ("which looks for its attention among classes of its own; sage_aot.integrations.transformers.enable "
                  "serves the rest of its attention")
    elif any(_COMPARED.search(code) and "num_kv_shared_layers" not in code for code in _code_of(kind)):
        reason = "which takes another path for sdpa attention than for other implementations"
    else:
        return
    raise UnsupportedError(f"expected a model whose attention is the implementation that is chosen, got "
                           f"{kind.__name__}, {reason}; leave it with its own implementation, and load it without "
                           f"attn_implementation. Of a model with parts, those that sage_aot serves can be named: "
                           f"attn_implementation={{'text_config': 'sage_aot'}}")


def _check_configs(model: PreTrainedModel, name: str) -> None:
    """UnsupportedError for a model with attention that would keep another implementation, on masks that are made for
    the chosen one. It reads the implementation from a configuration that no part has which is a model, and
    ``set_attn_implementation`` reaches no others. The layers of two models that ``EncoderDecoderModel(encoder=...,
    decoder=...)`` put together do: it gives these models new configurations."""
    models = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    reached = {id(config) for part in models for config in _with_parts(part.config)}
    for layer in model.modules():
        config = getattr(layer, "config", None)
        kept = getattr(config, "_attn_implementation", name)
        if kept != name and id(config) not in reached and _reads_implementation(type(layer)):
            raise UnsupportedError(
                f"expected a model whose attention shares its configurations, got {type(model).__name__} with a "
                f"{type(layer).__name__} that keeps {kept!r} whatever is chosen; leave it with its own implementation, "
                f"or load it with attn_implementation={name!r} (a model that was put together of two: after "
                f"save_pretrained)")


def _with_parts(config: Any) -> Iterator[Any]:
    yield config
    for part in config.sub_configs:
        if getattr(config, part, None) is not None:
            yield from _with_parts(getattr(config, part))


_COMPARED = re.compile(r"""_attn_implementation\s*(?:==|!=|in\b|not in\b)[^:\n]*["']sdpa["']""")
"""Code that compares the name of the implementation with "sdpa", as sparse indexers do: for eager and sdpa attention
they make a mask, to others they hand indices. Models whose layers share keys and values do so too; what those ask for,
:func:`attention_mask` answers."""

_OWN_TABLE = re.compile(r"(?<!ALL_ATTENTION_FUNCTIONS)(?<!ALL_MASK_ATTENTION_FUNCTIONS)\[[\w.]*_attn_implementation\]")
"""Code that looks the name up in a table of its own, which has eager and sdpa attention: a KeyError for other names,
when the layer is made."""


def _has_sinks_alone(code: str) -> bool:
    """True where a model that transformers does not run with sdpa attention has, by its source, sinks as the reason,
    which sage_aot computes. It hands them to the implementation that is chosen, has eager attention for the calls that
    sage_aot leaves, and does not add to the masks, as models with indexers or compressed keys do, which know no masks
    of bools."""
    return ("s_aux=self.sinks" in code and "def eager_attention_forward(" in code
            and not re.search(r"\battention_mask = (?!create_)", code))


def _code_of(kind: type[PreTrainedModel]) -> tuple[str, ...]:
    """The source of the modules that define a class of models, which transformers too reads to know whether an
    implementation can be chosen."""
    modules = {base.__module__ for base in kind.__mro__ if issubclass(base, PreTrainedModel)}
    return tuple(_source_of(module) for module in sorted(modules - {PreTrainedModel.__module__}))


@functools.cache
def _source_of(module: str) -> str:
    """The source of a module that is loaded; nothing where it has none, as a notebook."""
    try:
        return inspect.getsource(sys.modules[module])
    except (KeyError, OSError, TypeError):
        return ""


def _reads_implementation(kind: type) -> bool:
    """True where a class of layers looks the implementation up; taken for granted where the class has no source."""
    try:
        return "_attn_implementation" in inspect.getsource(kind)
    except (OSError, TypeError):
        return True


def _shares_keys(config: Any) -> bool:
    """True where the last layers of a model take the keys and values of layers before.

    Gemma 4 drops the queries of logits that nobody keeps before these layers, and the rows of their masks. Where a mask
    is None it keeps the queries, but for sdpa attention alone: under another name the last queries would be taken for
    the first."""
    return bool(getattr(config.get_text_config(), "num_kv_shared_layers", 0))


def _is_bidirectional(config: Any) -> bool:
    """True where a model's attention is not causal without a mask. PaliGemma, whose text model is so, may ask for a
    causal mask: transformers' sdpa attention, which leaves the mask out, sees the future then."""
    return getattr(config.get_text_config(), "use_bidirectional_attention", None) in (True, "all")


def _is_causal_by_masks_alone(kind: type) -> bool:
    """True where a model's attention is not causal without a mask, and no option says so: the text model of AIMv2. Read
    from the source, which makes causal masks and says of all attention that it is not causal."""
    if kind not in _causal_by_masks:
        code = _source_of(kind.__module__.replace("configuration_", "modeling_"))
        said = set(re.findall(r"\bis_causal\s*=\s*(\w+)", code)) - {"self"}
        _causal_by_masks[kind] = "create_causal_mask(" in code and said == {"False"}
    return _causal_by_masks[kind]


_causal_by_masks: dict[type, bool] = {}
# What torch.compiler.assume_constant_result does, without importing the compiler.
_is_causal_by_masks_alone._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _implementation(config: Any) -> str | dict[str, str]:
    parts = {part: getattr(config, part)._attn_implementation for part in config.sub_configs
             if getattr(config, part, None) is not None}
    own: str = config._attn_implementation
    return own if all(name == own for name in parts.values()) else {"": own, **parts}


# --- masks ------------------------------------------------------------------------------------------------------------


class Meaning(NamedTuple):
    """The meaning of a whole mask: it shows a window, aligned bottom-right, less the keys that `key_mask` hides."""

    window: tuple[int, int]  # keys in front of a query's own and behind it, -1 for all: (-1, 0) is causal
    key_mask: torch.Tensor | None  # [batch, keys]
    version: int | None  # of the mask, which a model may change in place; None for inference tensors, which have none

    @classmethod
    def of(cls, mask: torch.Tensor | None, queries: int, keys: int) -> Meaning | None:
        """The meaning of a mask for so many queries and keys which :func:`attention_mask` made and nobody changed; None
        for all others."""
        meaning: Meaning | None = getattr(mask, "sage_aot_meaning", None)
        if mask is None or meaning is None or meaning.version != _version(mask):
            return None
        return meaning if mask.shape[-2:] == (queries, keys) else None


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _window_of(mask_function: Any) -> tuple[int, int] | None:
    """The window that a mask function of transformers shows, causal or not; None for all others, and for those that
    add something, as packed sequences do. The code of a function tells which one it is, its closure of which size."""
    if mask_function is causal_mask_function:
        return -1, 0
    if getattr(mask_function, "__code__", None) is not _JOINED:
        return None
    (parts,) = (cell.cell_contents for cell in mask_function.__closure__)
    if len(parts) != 2 or parts[1] not in (causal_mask_function, bidirectional_mask_function):
        return None
    code, size = getattr(parts[0], "__code__", None), [cell.cell_contents for cell in parts[0].__closure__ or ()]
    if code is _SLIDING and parts[1] is causal_mask_function:
        return size[0] - 1, 0  # `size` keys, the query's own among them
    return (size[0], size[0]) if code is _SLIDING_BOTH_WAYS and parts[1] is bidirectional_mask_function else None


_JOINED = masking_utils.and_masks(causal_mask_function).__code__
_SLIDING = masking_utils.sliding_window_overlay(1).__code__
_SLIDING_BOTH_WAYS = masking_utils.sliding_window_bidirectional_overlay(1).__code__


def attention_mask(batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: Any = 0,
                   mask_function: Any = causal_mask_function, attention_mask: torch.Tensor | None = None,
                   local_size: int | None = None, allow_is_causal_skip: bool = True,
                   allow_is_bidirectional_skip: bool = False, config: Any = None,
                   **options: Any) -> torch.Tensor | None:
    """transformers' mask for one kind of layer: what ``sdpa_mask`` makes of these arguments, or a mask of that
    shape that says the same with less memory.

    None where no mask is needed, also under torch.compile, for which ``sdpa_mask`` never returns None. A padding mask
    alone is a view of ``[batch, 1, 1, keys]``. A causal mask and a sliding window remember their :class:`Meaning`.
    """
    known = isinstance(q_offset, int) and isinstance(kv_offset, int)
    offsets = known and kv_offset == 0
    # no window or chunk that hides keys; to ask for a tracer's length would put a guard on it
    whole = local_size is None or is_static(kv_length < local_size)
    # of windows and chunks transformers allows the skip where nothing is added to the causal mask
    causal = whole and (mask_function is causal_mask_function or local_size is not None and allow_is_causal_skip)
    at_end = known and kv_offset + kv_length == q_offset + q_length
    # one query without a mask sees every slot of a cache, those behind it too
    may_be_none = allow_is_causal_skip and (at_end and offsets if q_length == 1 else config is None or not (
        _shares_keys(config) or _is_bidirectional(config) or _is_causal_by_masks_alone(type(config))))
    if causal and may_be_none and attention_mask is None and offsets and (q_length == 1 or q_offset == 0):
        return None
    padding = attention_mask if attention_mask is not None and attention_mask.shape == (batch_size, kv_length) else None
    if (mask_function is bidirectional_mask_function and padding is not None and whole
            and (torch.compiler.is_compiling() or not allow_is_bidirectional_skip)):
        return padding.bool()[:, None, None, :].expand(-1, -1, q_length, -1)
    mask: torch.Tensor | None = sdpa_mask(
        batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
        mask_function=mask_function, attention_mask=attention_mask, local_size=local_size,
        allow_is_causal_skip=may_be_none, allow_is_bidirectional_skip=allow_is_bidirectional_skip, config=config,
        **options)
    if mask is None or torch.compiler.is_compiling():
        return mask
    if mask_function is bidirectional_mask_function and padding is not None and whole:
        return padding.bool()[:, None, None, :].expand(-1, -1, q_length, -1)
    window = (-1, 0) if causal else _window_of(mask_function)
    of_all = known and attention_mask is not None and attention_mask.shape == (batch_size, kv_offset + kv_length)
    if window is not None and at_end and (attention_mask is None or of_all) and (
            allow_is_causal_skip or allow_is_bidirectional_skip or not mask.is_inference()):
        # else a model adds to it, in place for all we know
        mask.sage_aot_meaning = Meaning(  # type: ignore[attr-defined]
            window, None if attention_mask is None else attention_mask[:, kv_offset:].bool(), _version(mask))
    return mask


# --- attention --------------------------------------------------------------------------------------------------------


def attention_forward(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                      attention_mask: torch.Tensor | None, dropout: float = 0.0, scaling: float | None = None,
                      is_causal: bool | None = None, position_bias: torch.Tensor | None = None, cache: Any = None,
                      **more: Any) -> Any:
    """transformers' attention function: q, k and v ``[batch, heads, seq, headdim]``; returns the output ``[batch, seq,
    heads, headdim]`` and None for the weights. ``s_aux``, among `more`, are the sinks of the layer: calls with these
    that sage_aot does not serve go to the eager attention of the model. ``sliding_window`` changes nothing, as in sdpa
    attention: the mask says what a query sees.

    Raises:
        NotImplementedError: an argument of UNKNOWN_TO_SDPA, which neither sage_aot nor transformers' sdpa computes, or
            sinks with an argument under which no attention of the model computes them.
    """
    for name in UNKNOWN_TO_SDPA:
        if more.get(name) is not None:
            raise _refused(name, module)
    sinks = more.get("s_aux")
    if sinks is not None:
        _check_sinks(module, sinks, position_bias, cache)

    given = module, query, key, value, attention_mask, dropout, scaling, is_causal, position_bias, cache, more
    if position_bias is not None or cache is not None or more.get("output_attentions"):
        count("position_bias" if position_bias is not None else "a paged cache" if cache is not None else
              "output_attentions")
        return by_host(_own_attention, *given)
    if is_small(query, key, attention_mask is not None or sinks is not None, True):
        return by_host(_own_attention, *given)
    queries = query.size(2)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    meaning = Meaning.of(attention_mask, queries, key.size(2))
    mask, causal, window = attention_mask, queries > 1 and attention_mask is None and causal, None
    if meaning is not None:
        mask = None if meaning.key_mask is None else meaning.key_mask[:, None, None, :]
        causal, window = queries > 1 and meaning.window[1] == 0, meaning.window
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))  # so that the output is as transformers wants it
    call = HostCall(q, k, v, mask, causal, scaling, dropout, "NHD", grouped=True, bottom_right=meaning is not None,
                    window=window, sinks=sinks)
    return attend(call, lambda: _own_attention(*given), form=lambda out: (out, None))


def _own_attention(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                   attention_mask: torch.Tensor | None, dropout: float, scaling: float | None, is_causal: bool | None,
                   position_bias: torch.Tensor | None, cache: Any, more: dict[str, Any]) -> Any:
    """transformers' own attention for a call of :func:`attention_forward`."""
    if more.get("s_aux") is not None:
        return _eager_attention(module, query, key, value, attention_mask, dropout, scaling, is_causal, more)
    return sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling,
                                  is_causal=is_causal, position_bias=position_bias, cache=cache, **more)


# --- sinks, which no attention of torch has ---------------------------------------------------------------------------


def _refused(name: str, module: torch.nn.Module) -> NotImplementedError:
    return NotImplementedError(f"sage_aot: expected no {name}, which changes the result, got one from "
                               f"{type(module).__name__}; load the model with attn_implementation='eager'")


def _check_sinks(module: torch.nn.Module, sinks: torch.Tensor, position_bias: Any, cache: Any) -> None:
    """NotImplementedError for sinks that the eager attention of the model would not find, or not compute."""
    if not _has_eager(type(module).__module__) or getattr(module, "sinks", None) is not sinks:
        raise _refused("s_aux of a layer that has no sinks and eager attention of its own", module)
    for name, given in (("position_bias", position_bias), ("cache", cache)):
        if given is not None:
            raise _refused(f"{name} with sinks", module)


def _has_eager(model: str) -> bool:
    """True where the module of a model, by its name, has eager attention."""
    return hasattr(sys.modules[model], "eager_attention_forward")


# To look into sys.modules itself, dynamo goes through all of it, which fails where a lazy module imports another.
_has_eager._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _eager_of(module: torch.nn.Module) -> Any:
    """The eager attention of the model that a layer is of."""
    return getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)


def _eager_attention(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                     attention_mask: torch.Tensor | None, dropout: float, scaling: float | None,
                     is_causal: bool | None, more: dict[str, Any]) -> Any:
    """The eager attention of the model, which takes a mask of numbers to add, and knows of no causal one without."""
    queries, keys = query.size(2), key.size(2)
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    if attention_mask is None and is_causal and queries > 1:  # top-left, as in sdpa attention
        attention_mask = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril()
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        attention_mask = torch.zeros_like(attention_mask, dtype=query.dtype).masked_fill(
            ~attention_mask, torch.finfo(query.dtype).min)
    scaling = query.size(3) ** -0.5 if scaling is None else scaling
    return _eager_of(module)(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **more)
