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
"""Tables of classes in transformers, by what a type of models does."""

_SIZES = (  # of a configuration's integers, by their names: the first that matches
    (r"mamba_d_head|mamba_head_?dim|mamba_headdim", 2 * HIDDEN // HEADS),
    (r"mamba_d_ssm", 2 * HIDDEN),
    (r"conv_kernel_size", 7),
    (r"num_queries$", 8),
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
    (r"upsample_groups", HIDDEN),
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
    "mistral4": {"head_dim": 2 * HIDDEN // HEADS},
    "hunyuan_vl_text": {"head_dim": HIDDEN // HEADS},
    "unlimited_ocr_text": {"num_key_value_heads": HEADS},
    "ernie4_5_vl_moe_text": {
        "moe_intermediate_size": [HIDDEN, HIDDEN], "rope_parameters": {"mrope_section": [3, 3, 2]}},
    "xmod": {"default_language": "en_XX"},
    **dict.fromkeys(("blip-2", "instructblip", "instructblipvideo"), {
        "image_token_index": 100, "video_token_index": 100}),
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": HIDDEN},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"], "num_key_value_heads": HEADS},
    "granite4_vision": {"deepstack_layer_map": [[-2, 0]], "spatial_target_layers": [1], "downsample_rate": "1/2"},
    "molmo2_adapter": {"vision_feature_layer": [1, 0]},
    **dict.fromkeys(("musicgen_decoder", "musicgen_melody_decoder"), {"num_codebooks": 1}),
    "glm5_next_text": {"index_kpool": 2},
    "dia_decoder": {"num_channels": 1},
    "dia": {"delay_pattern": [0]},
    "pix2struct_vision_model": {"patch_embed_hidden_size": 3 * 8 ** 2, "d_kv": HIDDEN // HEADS},
    "moonshine_streaming": {"num_key_value_heads": HEADS},
    **dict.fromkeys(("deepseek_ocr2_sam_vision_model", "unlimited_ocr_sam_vision_model"), {
        "downsample_channels": [HIDDEN, HIDDEN], "output_channels": HIDDEN, "global_attn_indexes": [1]}),
    **dict.fromkeys(("siglip_text_model", "siglip2_text_model"), {"projection_size": HIDDEN}),
    "pix2struct_text_model": {"d_kv": HIDDEN // HEADS},
    "emu3_vqgan": {"base_channels": 32, "channel_multiplier": [1, 1]},
    **dict.fromkeys(("sam_vision_model", "sam_hq_vision_model"), {
        "output_channels": HIDDEN, "num_pos_feats": HIDDEN // 2}),
    "sam2_hiera_det_model": {
        "hidden_size": 32, "embed_dim_per_stage": [32, 64, 128, 256], "blocks_per_stage": [1, 2, 2, 1],
        "global_attention_blocks": [4], "image_size": [128, 128]},
    "sam2_vision_model": {
        "backbone_channel_list": [256, 128, 64, 32], "backbone_feature_sizes": [[32, 32], [16, 16], [8, 8]]},
    "sam2_prompt_encoder": {"image_size": 128, "patch_size": 16},
    "qwen4_exp_text": {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": HIDDEN // HEADS,
                       "indexer_budget": 8, "indexer_compress_ratio": 2},
    "moonshine": {"encoder_num_key_value_heads": HEADS, "decoder_num_key_value_heads": HEADS},
    **dict.fromkeys(("emu3", "chameleon"), {
        "vocabulary_map": {"<image>": 100, **{f"IMGIMGA{letter}Z": 101 + n for n, letter in enumerate("ABCD")}}}),
    "nemotron": {"head_dim": HIDDEN // HEADS, "num_key_value_heads": 2},
    **dict.fromkeys(("gemma4_text", "gemma4_unified_text"), {"num_kv_shared_layers": 2}),
    "reformer": {"is_decoder": True},
    "zamba": {"hidden_size": HIDDEN, "attention_hidden_size": 2 * HIDDEN, "attention_head_dim": 32,
              "num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2, "n_mamba_heads": 2,
              "mamba_dt_rank": 4},
    "zamba2": {"attention_hidden_size": 2 * HIDDEN, "attention_head_dim": 2 * HIDDEN // HEADS,
               "hybrid_layer_ids": [1, 3], "num_key_value_heads": HEADS, "num_query_groups": HEADS},
    **dict.fromkeys(("time_series_transformer", "informer", "autoformer"), {"prediction_length": 4}),
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4, "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
            "full_attention": None}},
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
    return kind(**{**shrunk, **more})


def _shrink(config: dict[str, Any], sizes: bool) -> dict[str, Any]:
    layers = next((config[key] for key in _LAYERS if isinstance(config.get(key), int)), None)
    kept, ids = _kept_layers(config, layers or 2), iter(range(100, VOCABULARY))
    made = {}
    for key, value in config.items():
        if key in _DERIVED:
            continue
        if isinstance(value, dict) and key.startswith("rope"):
            value = {**value, **_sections(config, value)}
        elif isinstance(value, dict) and {"depths", "out_features"} <= value.keys():
            pass  # a backbone of stages, whose widths go together
        elif isinstance(value, dict) and all(isinstance(part, str) for part in value):
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
    return _merged(made, _BY_TYPE.get(config.get("model_type", ""), {}))


def _merged(values: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    """All values of both; where both have one, that of the others."""
    return values | {key: _merged(values[key], value) if isinstance(values.get(key), dict) and isinstance(value, dict)
                     else value for key, value in others.items()}


def _sections(config: dict[str, Any], rope: dict[str, Any]) -> dict[str, list[int]]:
    """Channels of a rotary embedding for time, height and width: parts of the half of the channels that it rotates."""
    if not _HAS_SECTIONS.search(config.get("model_type", "")):
        return {}
    half = int(HIDDEN // HEADS // 2 * rope.get("partial_rotary_factor", 1))
    time, height = half // 4, (half - half // 4) // 2
    return {"mrope_section": [time, height, half - time - height]}


_HAS_SECTIONS = re.compile("_vl|glm4|glm_|omni|cosmos3_edge")
"""Types whose rotary embedding has sections for time, height and width, which share the head dim."""

_DERIVED = ("qk_head_dim", "image_embedding_size", "id2label", "label2id", "out_features", "out_indices", "stage_names",
            "per_layer_config")
"""Values that a configuration makes of its other values, and checks."""

_LAYERS = "num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "depth"


def _kept_layers(config: dict[str, Any], layers: int) -> list[int]:
    """Two layers of each of the first three types, or two."""
    kinds = next((config[key] for key in ("layer_types", "layers_block_type", "block_types") if config.get(key)), None)
    if not isinstance(kinds, list) or len(set(kinds)) == 1:
        return list(range(min(2, layers)))
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
    """The part of a configuration that a class takes: its text's, where the class is a language model's. A type may
    have the class of another type, which then takes that type's configuration."""
    wanted = getattr(kind_of_model, "config_class", None) or type(config)
    parts = (config, *(getattr(config, part, None) for part in config.sub_configs))
    return next((part for part in parts if isinstance(part, wanted)), None) or small_config(wanted.model_type)


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
            if not parameter.is_floating_point() or not parameter.numel():
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
