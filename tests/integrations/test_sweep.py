"""A model of each kind of transformers in every mode of sweep.py, enabled and made by the name. The whole sweep runs on
request: CONTRIBUTING.md."""

from __future__ import annotations

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.0")

import sweep  # noqa: E402
from tiny import types  # noqa: E402

CAUSAL = set(sweep.OF_TEXT) - {"padded decoder"}

SLIDING: dict[str, object] = {
    "use_sliding_window": True, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
RUN: dict[str, tuple[str, set[str], dict[str, object]]] = {
    "causal": ("llama", CAUSAL, {}),
    "causal, a window that hides keys": ("mistral", CAUSAL, {"sliding_window": 8}),
    "layers with a window among others": ("gemma3_text", CAUSAL, {"sliding_window": 8}),
    "layers with a window, in one that may have none": ("qwen2", CAUSAL, SLIDING),
    "layers with a window, and normed queries": ("qwen3", CAUSAL, SLIDING),
    "fused projections and a window": ("phi3", CAUSAL, {"sliding_window": 8}),
    "sinks": ("gpt_oss", CAUSAL, {"sliding_window": 8}),
    "sinks in layers with a window alone": ("mimo_v2_flash", CAUSAL, {"sliding_window": 8}),
    "sinks and a window to both sides": ("openai_privacy_filter", {"plain", "padded left", "padded right"}, {
        "sliding_window": 4}),
    "chunks": ("llama4_text", CAUSAL, {"attention_chunk_size": 8}),
    "layers that share keys and values": ("gemma4_text", CAUSAL, {"num_kv_shared_layers": 2}),
    "a causal encoder with one of images": ("aimv2", {"images and text"}, {}),
    "bidirectional layers with causal masks": ("paligemma", CAUSAL, {}),
    "masked": ("bert", {"plain", "a mask of ones", "padded left", "padded right"}, {}),
    "an encoder and a decoder": ("bart", {"plain", "padded left", "padded right", "padded decoder", "generate"}, {}),
    "position biases": ("t5", {"plain", "padded left", "padded right", "padded decoder", "generate"}, {}),
    "masks that the model joins": ("t5gemma2", {"plain", "a mask of ones", "padded left", "padded decoder"}, {}),
    "images": ("siglip_vision_model", {"images"}, {}),
    "patches of images in a row": ("qwen2_5_vl_vision", {"images in patches"}, {}),
    "patches of images with padding": ("siglip2_vision_model", {"images in patches"}, {}),
    "patches of images in a text": ("glm4v_moe", {"padded left", "images and text"}, {}),
    "sounds, and a text about them": ("moonshine", {"sounds"}, {}),
    "latent attention": ("deepseek_v3", {"plain", "padded left", "chunks and steps"}, {}),
    "latent attention with other widths of values": ("mistral4", {"plain", "padded left", "chunks and steps"}, {
        "v_head_dim": 24}),
    "recurrent and attention layers": ("jamba", {"plain", "chunks and steps"}, {}),
}
"""Types of models to run, one of each kind, with its modes, and values of its configuration."""


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # more only wait for each other
    yield
    torch.set_num_threads(before)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", RUN)
def test_a_kind_of_models_has_the_values_of_eager_attention(kind, one_thread):
    name, modes, config = RUN[kind]
    class_name = [made for of, made in types() if of == name][-1 if kind == "an encoder and a decoder" else 0]
    transformers.logging.set_verbosity_error()
    with sweep.exact_attention():
        results = sweep.sweep(name, class_name, [mode for mode in sweep.MODES if mode in modes], **config)
    assert {(result.way, result.mode): result.verdict for result in results} == {
        (way, mode): "right" for way in ("by name", "enabled") for mode in modes}, results
    assert any(result.served for result in results) == (kind != "position biases")
