"""ComfyUI: a node that serves the attention of one model.

    from sage_aot.integrations.comfyui import patch

    model = patch(model)        # a ModelPatcher; returns a clone, as nodes do

The node is "sage_aot attention"; ``examples/comfyui`` is the node pack. ComfyUI itself is not imported: a node gets its
model, and an override its host's attention function, as arguments.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from sage_aot._call.sparse import Sparse
from sage_aot.errors import ArgumentError
from sage_aot.integrations._policy import Policy
from sage_aot.integrations._report import count
from sage_aot.integrations._rules import HostCall, check_gpu
from sage_aot.integrations._serve import attend, by_host
from sage_aot.integrations._sparse import Ends, Sparsely

KEY = "optimized_attention_override"
"""The key of an override in the ``transformer_options`` of a model."""

BLOCK_KINDS = ("double", "single", "input", "middle", "output")
"""ComfyUI's names of the blocks of transformers (the first two) and of UNets."""

Override = Callable[..., torch.Tensor]
"""``override(func, q, k, v, heads, ...)``; `func`: the attention function that ComfyUI would call without it."""


# --- one model --------------------------------------------------------------------------------------------------------


def patch(model: Any, *, policy: Policy | None = None, start_percent: float = 0.0, end_percent: float = 1.0,
          dense_blocks: str = "", sparse: Sparse | None = None, text_tokens: Ends = 0) -> Any:
    """A clone of a ModelPatcher whose attention sage_aot serves. The model that is given stays as it is.

    An override that the model has already gets the calls that sage_aot does not serve; without one, ComfyUI's own
    attention gets them.

    Args:
        model: a ``comfy.model_patcher.ModelPatcher``, which is what nodes pass as MODEL.
        policy: None means that of the process (:func:`sage_aot.integrations.use`).
        start_percent, end_percent: the part of the sampling schedule that is served, 0 to 1, both ends included; the
            model's sampling says what noise level (sigma) that is. A part needs the value of a tensor, which is read
            once a step: it waits for the GPU, and under torch.compile it breaks the graph. The whole schedule reads
            nothing.
        dense_blocks: blocks of the model that stay with the host: indices and ranges of them, from 0, such as
            ``"0, 1, 36-39"``. An index alone means the block of this index of every kind, ``"single:0"`` that of one of
            BLOCK_KINDS. Where a model does not tell its attention in which block it is, all calls stay with the host.
        sparse: long calls of tokens to themselves choose their blocks of keys by this. A call is long from 16 blocks of
            keys on. What the three arguments above leave out then is not left to the host: sage_aot computes it
            densely.
        text_tokens: so many first tokens, or (first, last), are text, which stays dense as keys and as queries. In
            ComfyUI, Flux and SD3 have their text first, HunyuanVideo last, and Wan has none in the same sequence. How
            many they are depends on the text encoder, and may on the prompt. Their blocks count in `keep`.

    Returns:
        The clone.

    Raises:
        ArgumentError: an argument is not of this form.
        UnsupportedError: sage_aot has no kernel for the GPU at hand.
    """
    if missing := [name for name in ("clone", "model_options", "get_model_object") if not hasattr(model, name)]:
        raise ArgumentError(f"model: expected a ModelPatcher of ComfyUI, got {type(model).__name__} without "
                            f"{', '.join(missing)}; pass what a node gets as MODEL")
    sigmas = _sigmas(model, start_percent, end_percent)
    check_gpu()
    before = model.model_options.get("transformer_options", {}).get(KEY)
    serving = override(before, policy=policy, sigmas=sigmas, dense_blocks=dense_blocks, sparse=sparse,
                       text_tokens=text_tokens)
    patched = model.clone()
    patched.model_options = {  # new dicts, for a clone may share those of its model
        **patched.model_options,
        "transformer_options": {**patched.model_options.get("transformer_options", {}), KEY: serving}}
    return patched


def _sigmas(model: Any, start_percent: float, end_percent: float) -> tuple[float, float] | None:
    """The noise levels at which a part of the schedule starts and ends; None for the whole schedule."""
    if not 0 <= start_percent <= end_percent <= 1:
        raise ArgumentError(f"start_percent, end_percent: expected 0 <= start_percent <= end_percent <= 1, got "
                            f"{start_percent} and {end_percent}")
    if (start_percent, end_percent) == (0, 1):
        return None
    to_sigma = model.get_model_object("model_sampling").percent_to_sigma
    return float(to_sigma(start_percent)), float(to_sigma(end_percent))


class SageAOTAttention:
    """The node: :func:`patch` with a policy of its own for each model."""

    CATEGORY = "model_patches/attention"
    DESCRIPTION = "Quantized attention (SageAttention2) by sage_aot for one model. Other calls keep their attention."
    RETURN_TYPES = ("MODEL",)
    FUNCTION = "patch"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802  # ComfyUI's name
        percent = {"min": 0.0, "max": 1.0, "step": 0.001}
        return {"required": {
            "model": ("MODEL",),
            "when": (["faster", "possible"], {
                "tooltip": "faster: the calls that are expected to be at least as fast as torch's attention. "
                           "possible: every call that sage_aot computes."}),
            "otherwise": (["host", "raise"], {
                "tooltip": "What becomes of a call that sage_aot does not compute, such as one with a mask of numbers. "
                           "host: the attention that the model has without this node. raise: an error."}),
            "start_percent": ("FLOAT", {"default": 0.0, **percent, "tooltip": "Where in the schedule it starts."}),
            "end_percent": ("FLOAT", {"default": 1.0, **percent, "tooltip": "Where in the schedule it ends."}),
            "dense_blocks": ("STRING", {
                "default": "", "tooltip": "Blocks that keep their attention, such as: 0, 1, 36-39, single:0. Below a "
                                          "keep of 1: those that stay dense."}),
        }, "optional": {  # inputs that came later, so that workflows of before stay valid
            "keep": ("FLOAT", {
                "default": 1.0, "min": 0.01, "max": 1.0, "step": 0.01,
                "tooltip": "Sparse attention: the share of the blocks of keys that a block of queries sees in long "
                           "self-attention. Dense blocks and the rest of the schedule see all. 1: it is off."}),
            "first_text_tokens": ("INT", {
                "default": 0, "min": 0, "max": 65536,
                "tooltip": "Text tokens in front of the image's or video's, as in Flux and SD3, which stay dense. "
                           "Their blocks count in keep."}),
            "last_text_tokens": ("INT", {
                "default": 0, "min": 0, "max": 65536,
                "tooltip": "Text tokens behind the image's or video's, as in HunyuanVideo, likewise."}),
        }}

    def patch(self, model: Any, when: str, otherwise: str, start_percent: float, end_percent: float, dense_blocks: str,
              keep: float = 1.0, first_text_tokens: int = 0, last_text_tokens: int = 0) -> tuple[Any]:
        sparse = Sparse(keep=keep) if keep < 1 else None
        return (patch(model, policy=Policy(when, otherwise), start_percent=start_percent, end_percent=end_percent,
                      dense_blocks=dense_blocks, sparse=sparse,
                      text_tokens=(first_text_tokens, last_text_tokens) if keep < 1 else 0),)


NODE_CLASS_MAPPINGS = {"SageAOTAttention": SageAOTAttention}
NODE_DISPLAY_NAME_MAPPINGS = {"SageAOTAttention": "sage_aot attention"}


# --- the override -----------------------------------------------------------------------------------------------------


def override(previous: Override | None = None, *, policy: Policy | None = None,
             sigmas: tuple[float, float] | None = None, dense_blocks: str = "", sparse: Sparse | None = None,
             text_tokens: Ends = 0) -> Override:
    """An override for ``transformer_options["optimized_attention_override"]``.

    Args:
        previous: the override that gets the calls which this one does not serve; None: ComfyUI's function gets them.
        policy: None means that of the process.
        sigmas: the highest and the lowest noise level that is served, or, with `sparse`, sparse, both included; None:
            all.
        dense_blocks, sparse, text_tokens: as :func:`patch` has them.

    Raises:
        ArgumentError: an argument is not of this form.

    A call that says ``low_precision_attention=False`` is not served, nor is one with an argument that is not known
    here. ``attn_precision`` changes nothing: sage_aot's scores are never in half precision. A mask has 2 dimensions,
    [queries, keys], 3, with the batch in front, or 4, [batch, heads, queries, keys].
    """
    if not (policy is None or isinstance(policy, Policy)):
        raise ArgumentError(f"policy: expected a Policy or None, got {policy!r}")
    if previous is not None and not callable(previous):
        raise ArgumentError(f"previous: expected a function or None, got {type(previous).__name__}")
    dense, chosen = _parsed(dense_blocks), _chosen(sparse, text_tokens)
    # not compiled: the value of a tensor would be a part of the graph, or break it with a warning
    in_range = None if sigmas is None else torch.compiler.disable(  # type: ignore[no-untyped-call]
        _SigmaRange(*sigmas).holds)

    # a plain function and no object: ComfyUI copies the options of a model deeply for each clone
    def attention(func: Override, *args: Any, **kwargs: Any) -> torch.Tensor:
        def host() -> torch.Tensor:
            return func(*args, **kwargs) if previous is None else previous(func, *args, **kwargs)

        harmed = kwargs.get("low_precision_attention") is False
        reason = "low_precision_attention=False" if harmed else _left_out(kwargs, dense, in_range)
        if reason and (harmed or chosen is None):
            count(reason)
            made: torch.Tensor = by_host(host)
            return made
        call, keeps_heads = _described(*args, **kwargs)
        call = call._replace(blocks=None if reason else chosen)
        out: torch.Tensor = attend(call, host, policy=policy)
        return out if keeps_heads else out.flatten(2)  # which the host's output is already

    return attention


def _chosen(sparse: Sparse | None, text_tokens: Ends) -> Sparse | None:
    """Choice of the blocks of sparse calls with text."""
    if sparse is None and text_tokens not in (0, (0, 0)):
        raise ArgumentError(f"text_tokens: expected 0 without sparse, got {text_tokens!r}; pass "
                            f"sparse=sage_aot.Sparse(...)")
    if isinstance(sparse, Mapping):
        raise ArgumentError(f"sparse: expected a sage_aot.Sparse or None, got {sparse!r}; ComfyUI does not name its "
                            f"attention, so pass one for all, and dense_blocks")
    return None if sparse is None else Sparsely(sparse, text_tokens=text_tokens).with_text(sparse)


def _left_out(kwargs: dict[str, Any], dense: tuple[tuple[str | None, int], ...],
              in_range: Callable[[torch.Tensor], bool] | None) -> str | None:
    """The reason why a call is not one of those that the user wants served, or sparse; None where it is."""
    options = kwargs.get("transformer_options") or {}
    if dense:
        block = _block(options)
        if block is None:
            return "dense blocks are set, and the model does not say which block calls"
        if any(index == block[1] and (kind is None or block[0] is None or kind == block[0]) for kind, index in dense):
            return "a dense block"
    if in_range is not None:
        if (sigmas := options.get("sigmas")) is None:
            return "a part of the schedule is set, and the call has no sigma"
        if not in_range(sigmas):
            return "a sigma outside of the part of the schedule that is served"
    return None


def _block(options: dict[str, Any]) -> tuple[str | None, int] | None:
    """Kind and index of the block that calls; the kind is None where a transformer has but one."""
    if (of_unet := options.get("block")) is not None:  # with which "block_index" counts inside of the block
        return of_unet[0], of_unet[1]
    index = options.get("block_index")
    return None if index is None else (options.get("block_type"), index)


def _parsed(dense_blocks: str) -> tuple[tuple[str | None, int], ...]:
    """Kind, or None for all, and index of each block that a text names."""
    if not isinstance(dense_blocks, str):
        raise ArgumentError(f"dense_blocks: expected a text such as '0, 1, 36-39', got {dense_blocks!r}")
    blocks: list[tuple[str | None, int]] = []
    for part in dense_blocks.replace(",", " ").split():
        found = re.fullmatch(rf"(?:({'|'.join(BLOCK_KINDS)}):)?(\d+)(?:-(\d+))?", part)
        first, last = (int(found[2]), int(found[3] or found[2])) if found else (1, 0)
        if found is None or first > last:
            raise ArgumentError(f"dense_blocks: expected indices and ranges such as '0, 1, 36-39, single:0', with a "
                                f"kind of {', '.join(BLOCK_KINDS)} or none, got {part!r}")
        blocks += ((found[1], index) for index in range(first, last + 1))
    return tuple(blocks)


class _SigmaRange:
    """The part of the schedule that is served. A step's noise level is read once for each tensor of sigmas."""

    def __init__(self, start: float, end: float) -> None:
        self.start, self.end = start, end
        self._last: tuple[weakref.ref[torch.Tensor], bool] | None = None

    def holds(self, sigmas: torch.Tensor) -> bool:
        """True where the first sample of a batch is in the part, as ComfyUI decides for its own ranges. A sampler makes
        one tensor a step, which all calls of the step share; reading it waits for the GPU."""
        last = self._last
        if last is None or last[0]() is not sigmas:
            self._last = last = weakref.ref(sigmas), self.end <= sigmas.flatten()[0].item() <= self.start
        return last[1]


def _described(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, mask: torch.Tensor | None = None,
               attn_precision: torch.dtype | None = None, skip_reshape: bool = False, skip_output_reshape: bool = False,
               *, scale: float | None = None, enable_gqa: bool = False, low_precision_attention: bool | None = None,
               transformer_options: dict[str, Any] | None = None, _inside_attn_wrapper: bool = True,
               **unknown: Any) -> tuple[HostCall, bool]:
    """A call of ComfyUI's, and whether its output keeps the heads apart.

    With `skip_reshape` q, k and v are [batch, heads, seq, headdim], else [batch, seq, heads * headdim]; the output
    likewise with `skip_output_reshape`. The layout of the call is that of the output, so that this is a view of it.
    """
    if not all(isinstance(x, torch.Tensor) for x in (q, k, v)):
        raise ArgumentError(f"q, k, v: expected tensors, got {type(q).__name__}, {type(k).__name__}, "
                            f"{type(v).__name__}; pass what their containers hold, as ComfyUI does for overrides")
    beyond = next((f"the argument {name}" for name in sorted(unknown) if unknown[name] is not None), None)
    given = (q, k, v) if skip_reshape else _with_heads(q, k, v, heads)
    if given is None or any(x.dim() != 4 for x in given) or given[0].size(1 if skip_reshape else 2) != heads:
        beyond = "shapes that do not fit heads and skip_reshape"
    else:
        q, k, v = (x.transpose(1, 2) for x in given) if skip_reshape != skip_output_reshape else given
    if mask is not None and mask.dim() == 3:
        mask = mask.unsqueeze(1)
    return HostCall(q, k, v, mask, False, scale, 0.0, "HND" if skip_output_reshape else "NHD", grouped=enable_gqa,
                    beyond=beyond), skip_output_reshape


def _with_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int) -> tuple[torch.Tensor, ...] | None:
    """Views [batch, seq, heads, headdim] of tensors [batch, seq, heads * headdim]; None where the shapes do not fit."""
    if not q.dim() == k.dim() == v.dim() == 3:
        return None
    headdim = q.size(2) // heads
    if headdim == 0 or any(x.size(2) % headdim for x in (q, k, v)):
        return None
    return tuple(x.view(*x.shape[:2], x.size(2) // headdim, headdim) for x in (q, k, v))
