"""A call of each way by which hosts reach sage_aot, as a host makes it: the package sageattention, the node of the
ComfyUI pack, a model of diffusers and a model of transformers. Inputs and weights are the same on every device."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from comfyui_stand_in import ModelPatcher

from sage_aot.integrations import Policy, report, reset_report, use
from sage_aot.integrations.comfyui import NODE_CLASS_MAPPINGS

HEADS, HEADDIM = 4, 64


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.bfloat16)


def _rows() -> list[torch.Tensor]:
    """q, k and v, ``[batch, seq, heads, headdim]``."""
    return list(draw(3, 2, 150, HEADS, HEADDIM).unbind())


def _by_sageattention(device: str) -> torch.Tensor:
    from sageattention import sageattn

    out: torch.Tensor = sageattn(*(x.to(device) for x in _rows()), tensor_layout="NHD", is_causal=True, sm_scale=0.1)
    return out


def _by_the_comfyui_node(device: str) -> torch.Tensor:
    node = NODE_CLASS_MAPPINGS["SageAOTAttention"]()
    model, = getattr(node, node.FUNCTION)(ModelPatcher(), "possible", "raise", 0.0, 1.0, "")
    out: torch.Tensor = model.attend(*(x.flatten(2).to(device) for x in _rows()), HEADS)
    return out


def _by_diffusers(device: str) -> torch.Tensor:
    import diffusers

    from sage_aot.integrations import diffusers as integration

    torch.manual_seed(0)
    made: Any = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=64, in_channels=4, out_channels=4, text_dim=16,
        freq_dim=256, ffn_dim=32, num_layers=2, cross_attn_norm=True, qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32)
    model = made.eval().to(device, torch.bfloat16)
    integration.enable(model)
    try:
        out: torch.Tensor = model(hidden_states=draw(1, 4, 2, 16, 16).to(device),
                                  encoder_hidden_states=draw(1, 12, 16).to(device),
                                  timestep=torch.tensor([3.0], device=device), return_dict=False)[0]
    finally:
        integration.disable(model)
    return out


def _by_transformers(device: str) -> torch.Tensor:
    import transformers

    from sage_aot.integrations import transformers as integration

    torch.manual_seed(0)
    made: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=64, hidden_size=256, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2))
    model = made.eval().to(device, torch.bfloat16)
    integration.register()
    model.set_attn_implementation("sage_aot")
    ids = torch.randint(0, 64, (2, 100), generator=torch.Generator().manual_seed(0))
    out: torch.Tensor = model(input_ids=ids.to(device)).logits
    return out


ENTRIES: dict[str, tuple[Callable[[str], torch.Tensor], int]] = {
    "sageattention": (_by_sageattention, 1), "comfyui": (_by_the_comfyui_node, 1), "diffusers": (_by_diffusers, 4),
    "transformers": (_by_transformers, 2)}
"""Calls by name: a call on a device, and how many attention calls it makes."""


def served(entry: str, device: str) -> torch.Tensor:
    """The output of an entry, on the CPU, all of whose attention calls sage_aot served: an AssertionError tells the
    report where it did not."""
    call, calls = ENTRIES[entry]
    reset_report()
    with use(Policy("possible", "raise")), torch.no_grad():
        out = call(device).cpu()
    assert report() == {"sage_aot": calls}, report()
    return out


def bits(tensor: torch.Tensor) -> str:
    """A digest of a tensor's bytes."""
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
