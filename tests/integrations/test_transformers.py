"""Models of transformers with random weights: sage_aot in the place of sdpa changes no result with exact attention
instead of the kernels, and little with the kernels' arithmetic."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from exact import served_calls

transformers = pytest.importorskip("transformers", minversion="5.0")

from tiny import config_of_class, small_config, small_model, types  # noqa: E402
from transformers import masking_utils  # noqa: E402
from transformers.masking_utils import causal_mask_function  # noqa: E402

from sage_aot.errors import ArgumentError, UnsupportedError  # noqa: E402
from sage_aot.integrations import Policy, _serve, report, reset_report, use  # noqa: E402
from sage_aot.integrations import transformers as integration  # noqa: E402
from sage_aot.integrations._report import SLOWER  # noqa: E402
from sage_aot.integrations.torch import replace_sdpa  # noqa: E402

SMALL = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = {**SMALL, "num_key_value_heads": 2, "max_position_embeddings": 256}
VISION = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
          "image_size": 32, "patch_size": 8}


def model(name, **config):
    torch.manual_seed(0)
    made = getattr(transformers, name)(getattr(transformers, config.pop("config"))(**config))
    return made.eval()


MODELS = {
    "llama": lambda: model("LlamaForCausalLM", config="LlamaConfig", **LLAMA),
    "qwen3": lambda: model("Qwen3ForCausalLM", config="Qwen3Config", head_dim=128, **LLAMA),
    "mistral, window 8": lambda: model("MistralForCausalLM", config="MistralConfig", sliding_window=8, **LLAMA),
    "mistral, window 100": lambda: model("MistralForCausalLM", config="MistralConfig", sliding_window=100, **LLAMA),
    "gemma": lambda: model("GemmaForCausalLM", config="GemmaConfig", head_dim=256, **LLAMA),
    "bert": lambda: model("BertModel", config="BertConfig", **SMALL),
    "modernbert": lambda: model("ModernBertModel", config="ModernBertConfig", local_attention=8, pad_token_id=0,
                                cls_token_id=1, sep_token_id=2, bos_token_id=1, eos_token_id=2, **SMALL),
}
MASKS = {"no mask": None, "ones": [0, 0], "left": [5, 0], "right": [-4, 0]}


def mask_of(kind, length=24):
    if MASKS[kind] is None:
        return None
    mask = torch.ones(2, length, dtype=torch.long)
    for row, cut in zip(mask, MASKS[kind]):
        row[:cut] = 0 if cut > 0 else row[:cut]
        if cut < 0:
            row[cut:] = 0
    return mask


def outputs(of, mask, implementation, **more):
    """The last hidden states of tokens that are there."""
    of.set_attn_implementation(implementation)
    ids = torch.randint(0, 64, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        out = of(input_ids=ids, attention_mask=mask, **more)
    hidden = out.logits if hasattr(out, "logits") else out.last_hidden_state
    return hidden if mask is None else hidden[mask.bool()]


@pytest.fixture(autouse=True)
def registered():
    integration.register()


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", MODELS)
def test_a_forward_is_that_of_sdpa(exact, name, mask):
    made, given = MODELS[name](), mask_of(mask)
    expected = outputs(made, given, "sdpa")
    reset_report()
    torch.testing.assert_close(outputs(made, given, "sage_aot"), expected, rtol=0, atol=1e-5)
    assert report() == {"sage_aot": 2}


@pytest.mark.parametrize("name", MODELS)
def test_the_kernels_arithmetic_is_close(name):
    made, given = MODELS[name]().bfloat16(), mask_of("left")
    expected = outputs(made.float(), given, "sdpa").float()
    found = outputs(made.bfloat16(), given, "sage_aot").float()
    assert 0 < (found - expected).norm() / expected.norm() < 0.05


def test_encoders_and_decoders_and_images(exact):
    config = {"vocab_size": 64, "d_model": 64, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
              "decoder_attention_heads": 4, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    bart, mask = model("BartModel", config="BartConfig", max_position_embeddings=64, **config), mask_of("right")
    torch.testing.assert_close(outputs(bart, mask, "sage_aot", decoder_input_ids=torch.ones(2, 24, dtype=torch.long)),
                               outputs(bart, mask, "sdpa", decoder_input_ids=torch.ones(2, 24, dtype=torch.long)),
                               rtol=0, atol=1e-5)
    assert served_calls() == 3, "the encoder, the decoder, the decoder's attention to the encoder"
    for made in (model("ViTModel", config="ViTConfig", **VISION),
                 model("SiglipVisionModel", config="SiglipVisionConfig", **{**VISION, "hidden_size": 144,
                                                                            "num_attention_heads": 2})):
        made.set_attn_implementation("sdpa")
        pixels = torch.randn(1, 3, 32, 32)
        with torch.no_grad():
            expected = made(pixels).last_hidden_state
            reset_report()
            made.set_attn_implementation("sage_aot")
            torch.testing.assert_close(made(pixels).last_hidden_state, expected, rtol=0, atol=1e-5)
        assert served_calls() == 2


@pytest.mark.parametrize("options", [
    {}, {"cache_implementation": "static"}, {"prefill_chunk_size": 7}, {"num_beams": 3}, {"use_cache": False}], ids=str)
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "left-padded"])
@pytest.mark.parametrize("name", ["llama", "mistral, window 8"])
def test_generated_tokens_are_those_of_sdpa(exact, name, padded, options):
    made = MODELS[name]()
    ids = torch.randint(0, 64, (2, 24), generator=torch.Generator().manual_seed(1))
    options = {**options, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "disable_compile": True,
               "attention_mask": mask_of("left" if padded else "ones"), "return_dict_in_generate": True,
               "output_logits": True}
    found = {}
    for implementation in ("sdpa", "sage_aot"):
        reset_report()
        made.set_attn_implementation(implementation)
        found[implementation] = made.generate(ids, **options)
    assert torch.equal(found["sdpa"].sequences, found["sage_aot"].sequences)
    for expected, logits in zip(found["sdpa"].logits, found["sage_aot"].logits):
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
    assert served_calls() >= 6 and len(report()) == 1


def test_a_model_is_loaded_with_it(tmp_path, exact):
    made = MODELS["llama"]()
    made.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sage_aot").eval()
    torch.testing.assert_close(outputs(loaded, None, "sage_aot"), outputs(made, None, "sdpa"), rtol=0, atol=1e-5)


def test_a_loaded_model_is_switched_and_switched_back(exact):
    made = MODELS["llama"]()
    made.set_attn_implementation("eager")
    assert integration.enable(made) == "eager" and made.config._attn_implementation == "sage_aot"
    outputs(made, None, "sage_aot")
    assert served_calls() == 2
    made.set_attn_implementation("eager")
    outputs(made, None, "eager")
    assert served_calls() == 2


def test_a_model_that_needs_eager_attention_is_refused():
    made = model("Gemma2ForCausalLM", config="Gemma2Config", head_dim=32, **LLAMA)
    with pytest.raises(UnsupportedError, match="got Gemma2.*does not run with sdpa attention; leave it with its own"):
        integration.enable(made)
    assert made.config._attn_implementation != "sage_aot"


def tiny(name, **more):
    """A type's smallest configuration, and its class."""
    config = small_config(name, **more)
    kind = getattr(transformers, next(made for of, made in types() if of == name))
    return kind, config_of_class(kind, config)


REFUSED = {
    **dict.fromkeys(("bloom", "mpt", "xglm", "gpt_neo", "gpt_neox_japanese", "big_bird", "bigbird_pegasus",
                     "led", "mvp", "trocr", "longformer", "roformer", "rembert", "nystromformer", "squeezebert",
                     "ibert", "convbert", "megatron-bert", "tapas", "git", "gemma2", "hy_v4", "deepseek_v4"),
                    "does not run with sdpa attention"),
    "falcon": "does not call the implementation that is registered for a name",
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa", "axk2", "minimax_m3_vl_text"), "another path for sdpa attention"),
}
"""Types of models whose attention is not, or not always, that of the name; and how the refusal ends."""


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_keep_their_own_attention_are_refused(name):
    """Loading by the name, enabling, and switching by transformers' own way refuse such models."""
    integration.register("mine")
    kind, config = tiny(name)
    with torch.device("meta"):
        made = kind(config).eval()
    before = made.config._attn_implementation
    says = pytest.raises(UnsupportedError, match=f"got {kind.__name__[:6]}.*{REFUSED[name]}.*leave it with its own.*lo")
    with says:
        integration.enable(made)
    for own in ("sage_aot", "mine"):
        if kind._can_set_attn_implementation():
            with says:
                made.set_attn_implementation(own)
        named = copy.deepcopy(config)
        named._attn_implementation = own
        with says, torch.device("meta"):
            kind(named)
    assert made.config._attn_implementation == before


def test_models_with_a_table_of_their_own_are_enabled_alone(exact):
    """SAM's vision encoder has a class for each implementation that it knows; its decoder has the name's."""
    kind, config = tiny("sam")
    made = small_model(kind, config)
    integration.enable(made)
    assert made.config._attn_implementation == "sage_aot"
    config._attn_implementation = "sage_aot"
    with pytest.raises(UnsupportedError, match="got Sam.*among classes of its own; .*enable serves the rest"):
        kind(config)


def test_a_part_that_is_refused_keeps_the_model_as_it_was(exact):
    kind, config = tiny("llava")
    made = small_model(kind, config)
    made.model.vision_tower._supports_sdpa = False
    type(made.model.vision_tower)._supports_sdpa = False
    try:
        with pytest.raises(UnsupportedError, match=r"got CLIPVision.*attn_implementation=.*'text_config': 'sage_aot'"):
            integration.enable(made)
        assert integration._implementation(made.config) == "eager"
        config._attn_implementation = {"text_config": "sage_aot"}
        named = kind(config).eval()
    finally:
        type(made.model.vision_tower)._supports_sdpa = True
    assert named.config.text_config._attn_implementation == "sage_aot"
    assert named.config.vision_config._attn_implementation != "sage_aot"
    with torch.no_grad():
        named(input_ids=torch.ones(1, 8, dtype=torch.long))
    assert served_calls() == 2


def test_layers_with_a_configuration_of_their_own_are_refused(exact, tmp_path):
    """EncoderDecoderModel gives models that it is made of new configurations, and their layers keep the old ones. A
    model that is saved and loaded has one for all."""
    def half(class_name, **more):
        kind = getattr(transformers, class_name)
        return small_model(kind, small_config("bert", **more))

    made = transformers.EncoderDecoderModel(
        encoder=half("BertModel"), decoder=half("BertLMHeadModel", is_decoder=True, add_cross_attention=True))
    before = integration._implementation(made.config)
    for switch in integration.enable, lambda model: model.set_attn_implementation("sage_aot"):
        with pytest.raises(UnsupportedError, match="got EncoderDecoder.* with a BertSelfAtt.*keeps 'eager'.*save_pre"):
            switch(made)
    assert integration._implementation(made.config) == before

    made.save_pretrained(tmp_path)
    inputs = {"input_ids": torch.arange(2, 26)[None], "attention_mask": torch.arange(24)[None] >= 5,
              "decoder_input_ids": torch.arange(9)[None]}
    logits = {}
    for name in "eager", "sage_aot":
        loaded = transformers.EncoderDecoderModel.from_pretrained(tmp_path, attn_implementation=name).eval()
        with torch.no_grad():
            logits[name] = loaded(**inputs).logits
    torch.testing.assert_close(logits["sage_aot"], logits["eager"], rtol=1e-4, atol=1e-5)
    assert served_calls() == 6  # two layers of the encoder, two of the decoder that attend twice


@pytest.mark.parametrize("name", integration.UNKNOWN_TO_SDPA)
def test_arguments_that_sdpa_would_drop_are_refused(name):
    q = torch.randn(1, 2, 8, 64)
    with pytest.raises(NotImplementedError, match=f"expected no {name}, .* got one from Linear; .*='eager'"):
        integration.attention_forward(torch.nn.Linear(1, 1), q, q, q, None, **{name: 1.0})


@pytest.mark.parametrize(("more", "reason"), [
    ({"position_bias": torch.zeros(1, 2, 8, 8)}, "position_bias"), ({"output_attentions": True}, "output_attentions"),
    ({"dropout": 0.5}, "dropout")])
def test_what_sdpa_computes_and_sage_aot_does_not(more, reason):
    q = torch.randn(1, 2, 8, 64)
    out, weights = integration.attention_forward(torch.nn.Linear(1, 1), q, q, q, None, **more)
    assert out.shape == (1, 8, 2, 64) and weights is None and report() == {reason: 1}


@pytest.mark.parametrize("name", ["my_flash", "sdpa2", "org/kernel", "paged|x"])
def test_names_that_transformers_reads_something_into_are_refused(name):
    with pytest.raises(ArgumentError, match="name: expected none with flash, sdpa"):
        integration.register(name)


@pytest.mark.parametrize(("q_length", "kv_length", "q_offset", "expected"), [
    (24, 24, 0, True), (24, 30, 6, True),  # a chunk at the end of the keys
    (24, 30, 0, False), (24, 30, 2, False), (24, 30, torch.tensor(6), False)])  # a static cache, with keys behind
def test_what_a_mask_is_known_to_mean(q_length, kv_length, q_offset, expected):
    padding = torch.ones(2, kv_length, dtype=torch.bool)
    padding[0, :5] = False
    mask = integration.attention_mask(2, q_length, kv_length, q_offset, attention_mask=padding)
    assert (integration.Meaning.of(mask, q_length, kv_length) is not None) == expected
    assert mask.shape == (2, 1, q_length, kv_length)


def test_a_mask_of_another_shape_means_nothing():
    mask = integration.attention_mask(2, 24, 24, attention_mask=mask_of("left").bool())
    assert integration.Meaning.of(mask, 24, 24) is not None
    assert integration.Meaning.of(mask, 8, 24) is None and integration.Meaning.of(mask, 24, 30) is None


@pytest.mark.parametrize(("kv_length", "is_none"), [(1, True), (30, False)])
def test_one_query_sees_no_empty_slots(kv_length, is_none):
    """The first token in a cache of 30 slots; without a mask it would see all of them."""
    mask = integration.attention_mask(2, 1, kv_length)
    assert (mask is None) == is_none
    assert is_none or mask.sum(-1).eq(1).all()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_mask_that_a_model_changes_means_no_longer_what_it_meant(exact, mode):
    q, module = torch.randn(2, 4, 24, 64), torch.nn.Linear(1, 1)
    with mode():
        mask = integration.attention_mask(2, 24, 24, attention_mask=mask_of("left").bool())
        assert mask.shape == (2, 1, 24, 24)
        integration.attention_forward(module, q, q, q, mask)
        assert report() == {"sage_aot": 1}
        again = integration.attention_mask(2, 24, 24, attention_mask=mask_of("left").bool(), allow_is_causal_skip=False)
        again[:, :, :, 7] = False
        expected = integration.sdpa_attention_forward(module, q, q, q, again)[0]
        found, _ = integration.attention_forward(module, q, q, q, again)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert report() == {"sage_aot": 2}


def test_training_is_sdpas():
    made = MODELS["llama"]()
    made.set_attn_implementation("sage_aot")
    made(input_ids=torch.ones(1, 8, dtype=torch.long)).logits.sum().backward()
    assert report() == {"gradients": 2}


# --- windows ----------------------------------------------------------------------------------------------------------


def meanings(monkeypatch):
    """Window, and whether there are masks, of the calls that sage_aot.attn gets."""
    asked, exact = [], _serve.attn

    def attn(*qkv, **options):
        asked.append((options["window"], options["key_mask"] is not None, options["attn_mask"] is not None))
        return exact(*qkv, **options)

    monkeypatch.setattr(_serve, "attn", attn)
    return asked


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("name", "windows"), [("mistral, window 8", [(7, 0)] * 2), ("modernbert", [None, (4, 4)])])
def test_sliding_layers_are_windows(exact, monkeypatch, name, windows, mask):
    """Windows need no masks of all pairs, nor does padding. Of a full layer transformers reads whether there is any."""
    asked = meanings(monkeypatch)
    outputs(MODELS[name](), mask_of(mask), "sage_aot")
    assert sorted(asked, key=str) == sorted(
        ((window, mask in ("left", "right") or mask == "ones" and window is not None, False) for window in windows),
        key=str)


@pytest.mark.parametrize("padded", [False, True])
def test_chunks_and_steps_on_sliding_layers_are_windows(exact, monkeypatch, padded):
    made, asked = MODELS["mistral, window 8"](), meanings(monkeypatch)
    made.set_attn_implementation("sage_aot")
    mask = mask_of("left")
    tokens = torch.randint(0, 64, (2, 24), generator=torch.Generator().manual_seed(1))
    cache = transformers.DynamicCache(config=made.config)
    with torch.no_grad():
        for begin, end in ((0, 10), (10, 19), (19, 20), (20, 24)):
            made(input_ids=tokens[:, begin:end], past_key_values=cache,
                 attention_mask=mask[:, :end] if padded else None)
    # of the cache's last seven keys and the query's own, one query sees all
    assert asked == [(window, padded, False) for window in ((7, 0), (7, 0), None, (7, 0)) for _ in range(2)]


def shown(mask_function, queries=24, keys=24, **options):
    """Meaning that sage_aot finds in a mask that transformers makes, and the mask."""
    mask = integration.attention_mask(2, queries, keys, keys - queries, mask_function=mask_function,
                                      allow_is_causal_skip=False, **options)
    return integration.Meaning.of(mask, queries, keys), mask


WINDOWS = {
    "causal": (causal_mask_function, (-1, 0)),
    "a sliding window": (masking_utils.sliding_window_causal_mask_function(5), (4, 0)),
    "a sliding window to both sides": (masking_utils.sliding_window_bidirectional_mask_function(5), (5, 5)),
    "chunks": (masking_utils.chunked_causal_mask_function(5, torch.zeros(2, dtype=torch.long)), None),
    "packed sequences": (masking_utils.packed_sequence_compatibility_function(
        masking_utils.sliding_window_causal_mask_function(5), torch.arange(24).expand(2, -1) % 12,
        torch.arange(24).expand(2, -1) // 12), None),
    "a window or more": (masking_utils.or_masks(masking_utils.sliding_window_causal_mask_function(5),
                                                masking_utils.sliding_window_overlay(2)), None),
    "a window and less": (masking_utils.and_masks(masking_utils.sliding_window_overlay(5), causal_mask_function,
                                                  lambda batch, head, query, key: key % 2 == 0), None),
    "a window without a causal mask": (masking_utils.and_masks(
        masking_utils.sliding_window_overlay(5), masking_utils.bidirectional_mask_function), None),
    "one that a user wrote": (lambda batch, head, query, key: key <= query, None),
}


@pytest.mark.parametrize("queries", [24, 7])
@pytest.mark.parametrize("name", WINDOWS)
def test_windows_are_known_by_the_functions_that_make_them(name, queries):
    function, window = WINDOWS[name]
    meaning, mask = shown(function, queries)
    assert (meaning and meaning.window) == window
    if window is not None:
        behind = torch.arange(24) - torch.arange(24 - queries, 24)[:, None]
        left, right = (side if side >= 0 else 99 for side in window)
        assert torch.equal(mask, ((-left <= behind) & (behind <= right)).expand_as(mask))


def test_a_window_of_a_cache_that_has_dropped_keys(exact):
    """Keys of the cache begin at position 9; the padding counts from the first token on."""
    padding = torch.ones(2, 24, dtype=torch.bool)
    padding[0, :12] = False
    mask = integration.attention_mask(2, 8, 15, 16, 9, masking_utils.sliding_window_causal_mask_function(8), padding,
                                      local_size=8)
    meaning = integration.Meaning.of(mask, 8, 15)
    assert meaning.window == (7, 0) and torch.equal(meaning.key_mask, padding[:, 9:])
    q, k = torch.randn(2, 4, 8, 16), torch.randn(2, 4, 15, 16)
    module = torch.nn.Linear(1, 1)
    torch.testing.assert_close(integration.attention_forward(module, q, k, k, mask)[0],
                               integration.sdpa_attention_forward(module, q, k, k, mask)[0], rtol=0, atol=1e-5)
    assert report() == {"sage_aot": 1}


# --- sinks ------------------------------------------------------------------------------------------------------------


def gpt_oss(**config):
    kind, made = tiny("gpt_oss", sliding_window=8, **config)
    return small_model(kind, made)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("policy", "reason"), [
    (Policy("possible"), "sage_aot"), (Policy(), "tensors on the CPU"),
    (Policy("possible", options={"qk": "int4"}), "for which there is no kernel with the policy's options")])
def test_layers_with_sinks_are_those_of_eager_attention(exact, mask, policy, reason):
    """sage_aot runs them, and the host where the policy says so: transformers' sdpa attention would drop the sinks."""
    made, given = gpt_oss(), mask_of(mask)
    expected = outputs(made, given, "eager")
    integration.enable(made)
    with use(policy):
        torch.testing.assert_close(outputs(made, given, "sage_aot"), expected, rtol=0, atol=1e-4)
    assert sum(report().values()) == made.config.num_hidden_layers and all(reason in line for line in report())
    with torch.no_grad():
        for layer in made.model.layers:
            layer.self_attn.sinks.fill_(-100)
    assert (outputs(made, given, "sage_aot") - expected).abs().max() > 1e-2, "they matter"


def test_training_with_sinks_is_that_of_eager_attention():
    made, grads = gpt_oss(), {}
    ids = torch.arange(24)[None] % 60 + 3
    for name in "eager", "sage_aot":
        made.set_attn_implementation(name)
        made.zero_grad()
        made(input_ids=ids).logits.square().sum().backward()
        grads[name] = [layer.self_attn.sinks.grad.clone() for layer in made.model.layers]
    assert grads["eager"][0].any()
    for ours, eagers in zip(grads["sage_aot"], grads["eager"]):
        torch.testing.assert_close(ours, eagers, rtol=1e-3, atol=1e-4)
    assert report() == {"gradients": made.config.num_hidden_layers}


def test_weights_of_attention_with_sinks_are_the_models_own():
    layer, q = gpt_oss().model.layers[0].self_attn, torch.randn(1, 4, 6, 16)
    k = torch.randn(1, 2, 6, 16)
    with torch.no_grad():
        out, weights = integration.attention_forward(layer, q, k, k, None, scaling=0.25, s_aux=layer.sinks,
                                                     output_attentions=True)
    assert out.shape == (1, 6, 4, 16) and weights.shape == (1, 4, 6, 6) and weights.triu(1).eq(0).all()


@pytest.mark.parametrize(("more", "named"), [
    ({"cache": object()}, "cache with sinks"), ({"position_bias": torch.zeros(1)}, "position_bias with sinks"),
    ({"s_aux": torch.zeros(4)}, "s_aux of a layer that has no sinks and eager attention of its own")])
def test_sinks_that_the_model_itself_would_not_compute_are_refused(more, named):
    layer, q = gpt_oss().model.layers[0].self_attn, torch.randn(1, 4, 6, 16)
    with pytest.raises(NotImplementedError, match=f"expected no {named}, .* got one from GptOssAttention"):
        integration.attention_forward(layer, q, q, q, None, **{"s_aux": layer.sinks, **more})


def test_a_compiled_model_with_sinks(exact):
    made = gpt_oss()
    expected = outputs(made, mask_of("left"), "eager")
    made.set_attn_implementation("sage_aot")
    torch.testing.assert_close(outputs(torch.compile(made, backend="eager"), mask_of("left"), "sage_aot"), expected,
                               rtol=0, atol=1e-4)


@pytest.mark.parametrize("mask", ["no mask", "right"])
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_compiled(exact, name, mask):
    made, given = MODELS[name](), mask_of(mask)
    expected = outputs(made, given, "sdpa")
    made.set_attn_implementation("sage_aot")
    graphs = []

    def kept(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(made, backend=kept, fullgraph=True)
    ids = torch.randint(0, 64, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found = compiled(input_ids=ids, attention_mask=given)
    hidden = found.logits if name == "llama" else found.last_hidden_state
    torch.testing.assert_close(hidden if given is None else hidden[given.bool()], expected, rtol=0, atol=1e-5)
    assert len(graphs) == 1


def test_compiled_code_runs_the_operator():
    made = MODELS["llama"]()
    made.set_attn_implementation("sage_aot")
    names = []

    def seen(graph, inputs):
        names.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    ids = torch.randint(0, 64, (2, 24))
    with torch.no_grad():
        torch.compile(made, backend=seen, fullgraph=True)(input_ids=ids, past_key_values=transformers.DynamicCache())
    assert sum("sage_aot" in name for name in names) == 2, "one of each layer"


class Hidden(torch.nn.Module):
    """The last hidden states of a model, as a function of tensors alone."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        model.config.use_cache = False  # a cache of a sliding window is cut to it, which bounds the length

    def forward(self, ids, mask=None):
        return self.model.base_model(input_ids=ids, attention_mask=mask)[0]


def tokens_of(length, mask):
    ids = torch.randint(1, 64, (2, length), generator=torch.Generator().manual_seed(length))
    return (ids,) if mask == "no mask" else (ids, mask_of(mask, length))


def exported(work, given):
    length = torch.export.Dim("length", min=2, max=64)
    program = torch.export.export(work, given, strict=False, dynamic_shapes=({1: length},) * len(given))
    return program.module()


def compiled(work, given):
    for tensor in given:
        torch._dynamo.mark_dynamic(tensor, 1, min=2, max=64)  # raises where a check pins the length, or bounds it
    made = torch.compile(work, backend="aot_eager", fullgraph=True)
    made(*given)
    return made


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # torch's own
@pytest.mark.parametrize("when", ["faster", "possible"])
@pytest.mark.parametrize("mask", ["no mask", "right"])
@pytest.mark.parametrize(("name", "trace"), [("mistral, window 8", exported), ("mistral, window 8", compiled),
                                             ("modernbert", exported)])
def test_windows_of_a_length_that_a_tracer_does_not_know(exact, name, trace, mask, when):
    """A tracer's graph is for lengths shorter than the window and longer ones, as with sdpa."""
    torch.compiler.reset()
    work = Hidden(MODELS[name]())
    lengths = 5, 7, 8, 9, 24, 64
    with torch.no_grad():
        expected = [work(*tokens_of(length, mask)) for length in lengths]
        integration.enable(work.model)
        with use(Policy(when=when)):
            found = trace(work, tokens_of(24, mask))
            for length, right in zip(lengths, expected):
                rows = torch.ones(2, length, dtype=torch.bool) if mask == "no mask" else mask_of(mask, length).bool()
                torch.testing.assert_close(found(*tokens_of(length, mask))[rows], right[rows], rtol=0, atol=1e-4)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own
@pytest.mark.skipif(not hasattr(torch.Tag, "needs_exact_strides"), reason="torch before 2.8")
@pytest.mark.parametrize(("name", "mask"), [("llama", "right"), ("mistral, window 8", "no mask")])
def test_compiled_code_of_torch_reads_a_mask_that_it_computes(name, mask):
    """Inductor computes the mask of a padded batch, or of a window, and chooses its strides, but for what the operator
    asks."""
    made, given = MODELS[name](), mask_of(mask)
    integration.enable(made)
    ids = torch.randint(0, 64, (2, 24), generator=torch.Generator().manual_seed(1))
    rows = torch.ones_like(ids, dtype=torch.bool) if given is None else given.bool()
    with torch.no_grad(), torch._inductor.config.patch(fx_graph_cache=False):  # code on disk may be of other tags
        expected = made(input_ids=ids, attention_mask=given, use_cache=False).logits
        found = torch.compile(made)(input_ids=ids, attention_mask=given, use_cache=False).logits
    torch.testing.assert_close(found[rows], expected[rows], rtol=0, atol=0.05)


@pytest.mark.parametrize(("is_cuda", "reason"), [(False, "tensors on the CPU"), (True, SLOWER)])
def test_other_policies_leave_the_host_alone(monkeypatch, is_cuda, reason):
    made = MODELS["llama"]()
    expected = outputs(made, None, "sdpa")
    monkeypatch.setattr(torch.Tensor, "is_cuda", is_cuda)
    with use(Policy()):
        assert torch.equal(outputs(made, None, "sage_aot"), expected)
    assert report() == {reason: 2}


def test_a_compiled_model_is_enabled():
    made = MODELS["llama"]()
    assert integration.enable(torch.compile(made, backend="eager")) == "sdpa"
    assert made.config._attn_implementation == "sage_aot"


@pytest.mark.parametrize("wrong", [torch.nn.Linear(1, 1), 3])
def test_what_is_no_model_of_transformers_is_refused(wrong):
    with pytest.raises(ArgumentError, match="expected a model of transformers, got (Linear|int); run others in"):
        integration.enable(wrong)


def test_parts_of_a_model_get_their_own_implementation_back():
    config = transformers.CLIPConfig(
        text_config={"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 16,
                     "vocab_size": 32, "max_position_embeddings": 8},
        vision_config={"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 16,
                       "image_size": 8, "patch_size": 4})
    made = transformers.CLIPModel(config)
    for implementations in ({"text_config": "eager", "vision_config": "sdpa"}, "sdpa"):
        made.set_attn_implementation(implementations)
        parts = made.config, made.config.text_config, made.config.vision_config
        names = [part._attn_implementation for part in parts]
        before = integration.enable(made)
        assert [part._attn_implementation for part in parts] == ["sage_aot"] * 3
        made.set_attn_implementation(before)
        assert [part._attn_implementation for part in parts] == names
    assert before == "sdpa"


def test_small_calls_and_refused_ones_are_decided_about_once(monkeypatch):
    """Calls are decided about once also where torch's function is replaced, which transformers' sdpa calls."""
    made = MODELS["llama"]()
    with replace_sdpa.globally():
        for options in ({"position_bias": torch.zeros(1)}, {"dropout": 0.5}):
            q = torch.randn(1, 2, 5, 16)
            with contextlib.suppress(RuntimeError):  # transformers has no use for this bias
                integration.attention_forward(made.model.layers[0].self_attn, q, q[:, :1], q[:, :1], None, **options)
        assert report() == {"position_bias": 1, "dropout": 1}
        reset_report()
        monkeypatch.setattr(torch.Tensor, "is_cuda", True)
        with use(Policy()):
            outputs(made, None, "sage_aot")
    assert report() == {SLOWER: 2}


@pytest.mark.parametrize("mask", [None, torch.ones(1, 1, 5, 5, dtype=torch.bool)])
def test_what_small_means_depends_on_the_mask(monkeypatch, mask):
    asked, q = [], torch.randn(1, 2, 5, 16)
    monkeypatch.setattr(integration, "is_small", lambda q, k, *mask: asked.append(mask))
    integration.attention_forward(MODELS["llama"]().model.layers[0].self_attn, q, q[:, :1], q[:, :1], mask)
    assert asked == [(mask is not None, True)]  # without a mask transformers may mean a causal one
