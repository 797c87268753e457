"""Models of every type of transformers, with random weights and small enough for a test."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Iterator
from typing import Any

import torch
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto as auto

VOCABULARY, LENGTH, HIDDEN, HEADS, WINDOW = 128, 24, 64, 4, 8
MOST_PARAMETERS = 120e6

KINDS = {"causal": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
         "seq2seq": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
         "multimodal": auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
         "speech": auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
         "masked": auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
         "base": auto.MODEL_MAPPING_NAMES}
"""By what a type of models does, transformers' table of its classes."""

_SIZES = (  # of a configuration's integers, by their names: the first that matches
    (r"mamba_d_head|mamba_head_?dim|mamba_headdim", 2 * HIDDEN // HEADS),
    (r"mamba_d_ssm", 2 * HIDDEN),
    (r"mamba_(d_state|d_conv|expand|n_groups|ngroups)|conv_kernel|ssm_state_size", 8),
    (r"(key_value|kv)_heads$|num_kv_heads|n_head_kv|num_query_groups|multi_query_group_num", HEADS // 2),
    (r"(_heads|n_head|num_head)$", HEADS),
    (r"experts_per_tok|num_selected|moe_topk|top_?k_experts|moe_k$|^moe_top_?k$", 2),
    (r"shared_experts?$", 1),
    (r"(num_|n_).*experts$|moe_num_experts|num_experts$", 4),
    (r"^(n_group|topk_group|num_expert_group|num_limited_groups)", 1),
    (r"index_topk|index_block", 4),
    (r"rope_head_dim|nope_head_dim|rotary_dim", HIDDEN // HEADS),
    (r"head_dim|v_head_dim|head_size|attention_channels$|index_.*dim", HIDDEN // HEADS),
    (r"lora_rank|_rank$", 16),
    (r"vocab_size|vocab_dim", VOCABULARY),
    (r"num_kv_shared_layers", 2),
    (r"image_size|input_size", 32),
    (r"patch_size", 8),
    (r"max_.*position|n_positions|n_ctx|max_seq|max_source|max_target", 128),
    (r"(hidden|intermediate|embed|embedding|ffn|inner|d_ff|n_inner|mlp|model|conv).*(size|dim|dims)$|^(d_model|n_embd|"
     r"dim|d_ff|d_kv|projection_dim|width|hidden_channels|embed_dim|ffn_hidden_size|n_inner|hidden_dim|embd)$|"
     r"_ffn_dim$|out_hidden_size|lm_hidden|d_inner|_width$|feedforward_dim|_dim_out$", HIDDEN),
)


_BY_TYPE: dict[str, dict[str, Any]] = {
    "dbrx": {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 128, "vocab_size": VOCABULARY,
             "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4},
             "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2}},
    "bamba": {"mamba_n_heads": 4, "mamba_d_head": 32, "num_hidden_layers": 4, "attn_layer_indices": [1, 3]},
    "granitemoehybrid": {
        "mamba_n_heads": 4, "mamba_d_head": 32, "layer_types": ["mamba", "attention"] * 2, "num_hidden_layers": 4},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_hidden_layers": 4, "mamba_dt_rank": 4},
    "falcon_h1": {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_ssm": 128},
    "deepseek_v2": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "topk_method": "greedy"},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "esm": {"vocab_size": VOCABULARY, "mask_token_id": 3, "pad_token_id": 0},
    "esmc": {"num_key_value_heads": HEADS},
    **dict.fromkeys(("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral"), {"head_dim": HIDDEN // HEADS}),
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4, "num_dense_layers": 1},
    "longcat_flash": {"head_dim": HIDDEN // HEADS, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "num_layers": 2},
    "nemotron": {"head_dim": HIDDEN // HEADS, "num_key_value_heads": 2},
    **dict.fromkeys(("gemma4_text", "gemma4_unified_text"), {"num_kv_shared_layers": 2}),
    "reformer": {"is_decoder": True},
    "zamba": {"hidden_size": HIDDEN, "attention_hidden_size": 2 * HIDDEN, "attention_head_dim": 32,
              "num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2, "n_mamba_heads": 2,
              "mamba_dt_rank": 4},
    **dict.fromkeys(("time_series_transformer", "informer", "autoformer"), {"prediction_length": 4}),
    "cohere_compass_text": {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4},
}
"""Values that go together, for types whose other values do not follow from the names of theirs."""


def types() -> Iterator[tuple[str, str]]:
    """Each type of models, and the names of its classes: of all kinds but the base, whose class is inside the others.
    """
    for name in CONFIG_MAPPING:
        of_kinds = {kind: table[name] for kind, table in KINDS.items() if name in table}
        if len(of_kinds) > 1:
            of_kinds.pop("base", None)
        for classes in dict.fromkeys(made if isinstance(made, str) else made[0] for made in of_kinds.values()):
            yield name, classes


def small_config(name: str, sizes: bool = True, **more: Any) -> Any:
    """The default configuration of a type, made small: its layers, vocabulary and experts always, with `sizes` the
    widths too, which not every type has consistently named."""
    kind = CONFIG_MAPPING[name]
    shrunk = _shrink(kind().to_dict(), sizes)
    shrunk.pop("transformers_version", None)
    return kind(**{**shrunk, **_BY_TYPE.get(name, {}), **more})


def _shrink(config: dict[str, Any], sizes: bool) -> dict[str, Any]:
    kept, ids = _kept_layers(config), iter(range(100, VOCABULARY))
    layers = next((config[key] for key in _LAYERS if isinstance(config.get(key), int)), None)
    made = {}
    for key, value in config.items():
        if key in _DERIVED:
            continue
        if isinstance(value, dict) and key.startswith("rope"):
            sections = {"mrope_section": [2, 3, 3]} if _HAS_SECTIONS.search(config.get("model_type", "")) else {}
            value = {**value, **sections}
        elif isinstance(value, dict):
            value = _shrink(value, sizes)
        elif isinstance(value, list) and len(value) == layers and kept and not key.endswith("_token_id"):
            value = [value[index] for index in kept]
        elif re.search(r"(^|_)token_(id|index)$", key) and value is not None:
            value = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}.get(
                key, next(ids) if isinstance(value, int) else value)
        elif isinstance(value, int) and not isinstance(value, bool) and value > 0:
            value = _small(key, value, len(kept), sizes)
            if "kv_lora_rank" in config and key == "num_key_value_heads":
                value = HEADS  # of latent attention
        made[key] = value
    return made


_HAS_SECTIONS = re.compile("_vl|glm4|glm_|omni|cosmos3_edge")
"""Types whose rotary embedding has sections for time, height and width, which share the head dim."""

_DERIVED = "id2label", "label2id", "out_features", "out_indices", "stage_names", "per_layer_config"
"""What a configuration makes of its other values, and checks."""

_LAYERS = "num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "depth"


def _kept_layers(config: dict[str, Any]) -> list[int]:
    """Two layers of each of the first two types, or two."""
    kinds = next((config[key] for key in ("layer_types", "layers_block_type", "block_types") if config.get(key)), None)
    if not isinstance(kinds, list) or len(set(kinds)) == 1:
        return [0, 1]
    first = list(dict.fromkeys(kinds))[:3]
    by_kind = [[index for index, kind in enumerate(kinds) if kind == wanted][:2] for wanted in first]
    rounds = [[found[turn] for found in by_kind if turn < len(found)] for turn in (0, 1)]
    return [index for turn in rounds for index in turn]


def _small(key: str, value: int, layers: int, sizes: bool) -> int:
    if re.search(r"(num|n)_.*layers$|^(n_layers?|num_layers|depth)$|^(encoder|decoder)_layers$", key) and (
            not re.search("shared|feat_extract", key)):
        return min(value, layers)
    for pattern, size in _SIZES:
        if re.search(pattern, key):
            always = re.search(r"vocab|expert|shared_layers|position|n_positions|topk", pattern)
            return min(value, size) if sizes or always else value
    return value


def config_of_class(kind_of_model: type, config: Any) -> Any:
    """The part of a configuration that a class takes: its text's, where the class is a language model's."""
    wanted = getattr(kind_of_model, "config_class", None) or type(config)
    return config if isinstance(config, wanted) else config.get_text_config()


def small_model(kind_of_model: type, config: Any, implementation: str = "eager") -> torch.nn.Module:
    """A model with weights that let attention matter: scores of about one, no gate that is closed."""
    config = copy.deepcopy(config)
    config._attn_implementation = implementation
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in kind_of_model(copy.deepcopy(config)).parameters())
    if count > MOST_PARAMETERS:
        raise MemoryError(f"{count / 1e6:.0f} million parameters")
    model = kind_of_model(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.is_floating_point():
                continue
            if parameter.dim() >= 2 and not re.search(r"A_log|dt_|norm|\bD$", name):
                fan_in = 1 if "embed" in name and parameter.dim() == 2 else parameter[0].numel()
                if "experts" in name:
                    fan_in = parameter.size(-1)
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * fan_in ** -0.5)
            elif not parameter.any():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0
        model.generation_config.decoder_start_token_id = 1
        with contextlib.suppress(AttributeError):
            model.generation_config.forced_eos_token_id = model.generation_config.forced_bos_token_id = None
    return model
