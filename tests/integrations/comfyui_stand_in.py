"""Parts of ComfyUI that a node meets: attention functions that an override may replace, a model with its options."""

from __future__ import annotations

import copy
import functools
from types import SimpleNamespace

import torch
import torch.nn.functional as F

KEY = "optimized_attention_override"


class Container:
    """Container that newer versions hand q, k and v over in."""

    def __init__(self, tensor):
        self.tensor = tensor

    def take(self):
        tensor, self.tensor = self.tensor, None
        return tensor


def wrapped(function):
    """Attention functions as ComfyUI offers them: an override in the options of the model takes the call."""
    @functools.wraps(function)
    def call(*args, **kwargs):
        if isinstance(args[0], Container):
            args = (*(container.take() for container in args[:3]), *args[3:])
        chosen = (kwargs.get("transformer_options") or {}).get(KEY)
        if chosen is None or "_inside_attn_wrapper" in kwargs:
            return function(*args, **kwargs)
        return chosen(function, *args, **kwargs, _inside_attn_wrapper=True)

    return call


@wrapped
def host_attention(q, k, v, heads, mask=None, attn_precision=None, skip_reshape=False, skip_output_reshape=False,
                   **kwargs):
    if not skip_reshape:
        headdim = q.shape[2] // heads
        q, k, v = (x.reshape(*x.shape[:2], -1, headdim).transpose(1, 2) for x in (q, k, v))
    if mask is not None and mask.ndim < 4:
        mask = mask[None, None] if mask.ndim == 2 else mask[:, None]
    out = F.scaled_dot_product_attention(q, k, v, mask, scale=kwargs.get("scale"),
                                         enable_gqa=kwargs.get("enable_gqa", False))
    return out if skip_output_reshape else out.transpose(1, 2).flatten(2)


class ModelPatcher:
    """Part of ComfyUI's class that a node uses. `copying`: how a clone gets its options, by the version."""

    def __init__(self, copying=copy.deepcopy, **options):
        self.copying, self.model_options = copying, {"transformer_options": options, "other": [1]}

    def clone(self):
        made = ModelPatcher(self.copying)
        made.model_options = self.copying(self.model_options)
        return made

    def get_model_object(self, name):
        assert name == "model_sampling"
        return SimpleNamespace(percent_to_sigma=lambda percent: torch.tensor(10 * (1 - percent)))

    def attend(self, *args, options=None, **kwargs):
        """A call from inside of the model, and what the sampler and the model say of it."""
        options = {**self.model_options["transformer_options"], **(options or {})}
        return host_attention(*args, transformer_options=options, **kwargs)
