"""Models of diffusers with random weights: sage_aot in the place of native attention changes no result with exact
attention instead of the kernels, and little with the kernels' arithmetic."""

from __future__ import annotations

import copy
import dataclasses
import gc
import inspect
import pickle
import weakref
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from blocks import chosen_by, clear
from exact import attention, id_of, served_calls

diffusers = pytest.importorskip("diffusers", minversion="0.36")

from diffusers.models import attention_dispatch  # noqa: E402
from diffusers.models.attention import AttentionModuleMixin  # noqa: E402

import sage_aot  # noqa: E402
from sage_aot import Sparse  # noqa: E402
from sage_aot.errors import ArgumentError, UnsupportedError  # noqa: E402
from sage_aot.integrations import Policy, _routes, _serve, report, reset_report, use  # noqa: E402
from sage_aot.integrations import diffusers as integration  # noqa: E402
from sage_aot.integrations._report import SLOWER  # noqa: E402
from sage_aot.integrations._sparse import Sparsely  # noqa: E402
from sage_aot.integrations.torch import replace_sdpa  # noqa: E402


def model(name, **config):
    torch.manual_seed(0)
    return getattr(diffusers, name)(**config).eval()


def draw(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


WAN = {"patch_size": (1, 2, 2), "num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4,
       "text_dim": 16, "freq_dim": 256, "ffn_dim": 32, "num_layers": 2, "cross_attn_norm": True,
       "qk_norm": "rms_norm_across_heads", "rope_max_seq_len": 32}
TIME = torch.tensor([3.0])


def wan():
    return model("WanTransformer3DModel", **WAN), {"hidden_states": draw(1, 4, 2, 16, 16), "timestep": TIME,
                                                   "encoder_hidden_states": draw(1, 12, 16)}


def flux():
    made = model("FluxTransformer2DModel", patch_size=1, in_channels=4, num_layers=1, num_single_layers=1,
                 attention_head_dim=16, num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=32,
                 axes_dims_rope=[4, 4, 8])
    return made, {"hidden_states": draw(1, 16, 4), "encoder_hidden_states": draw(1, 48, 32),
                  "pooled_projections": draw(1, 32), "timestep": TIME, "img_ids": torch.zeros(16, 3),
                  "txt_ids": torch.zeros(48, 3)}


def qwen_image(lengths=(7, 4)):
    made = model("QwenImageTransformer2DModel", patch_size=2, in_channels=16, out_channels=4, num_layers=2,
                 attention_head_dim=16, num_attention_heads=3, joint_attention_dim=16, axes_dims_rope=(8, 4, 4))
    mask = torch.arange(7) < torch.tensor(lengths)[:, None]
    return made, {"hidden_states": draw(2, 16, 16), "encoder_hidden_states": draw(2, 7, 16),
                  "encoder_hidden_states_mask": mask, "timestep": TIME.expand(2), "img_shapes": [(1, 4, 4)] * 2}


def hunyuan_video():
    made = model("HunyuanVideoTransformer3DModel", in_channels=4, out_channels=4, num_attention_heads=2,
                 attention_head_dim=10, num_layers=1, num_single_layers=1, num_refiner_layers=1, patch_size=1,
                 patch_size_t=1, guidance_embeds=True, text_embed_dim=16, pooled_projection_dim=8,
                 rope_axes_dim=(2, 4, 4))
    return made, {"hidden_states": draw(1, 4, 1, 4, 4), "timestep": TIME.long(), "guidance": TIME * 1000,
                  "encoder_hidden_states": draw(1, 12, 16), "pooled_projections": draw(1, 8),
                  "encoder_attention_mask": (torch.arange(12) < 9).long()[None]}


def sd3():
    made = model("SD3Transformer2DModel", sample_size=32, patch_size=1, in_channels=4, num_layers=2,
                 attention_head_dim=8, num_attention_heads=4, caption_projection_dim=32, joint_attention_dim=32,
                 pooled_projection_dim=64, out_channels=4)
    return made, {"hidden_states": draw(1, 4, 8, 8), "encoder_hidden_states": draw(1, 10, 32),
                  "pooled_projections": draw(1, 64), "timestep": TIME}


def cogvideox():
    made = model("CogVideoXTransformer3DModel", num_attention_heads=2, attention_head_dim=8, in_channels=4,
                 out_channels=4, time_embed_dim=2, text_embed_dim=8, num_layers=2, sample_width=8, sample_height=8,
                 sample_frames=8, patch_size=2, temporal_compression_ratio=4, max_text_seq_length=8)
    return made, {"hidden_states": draw(1, 1, 4, 8, 8), "encoder_hidden_states": draw(1, 8, 8), "timestep": TIME}


def unet():
    made = model("UNet2DConditionModel", block_out_channels=(4, 8), norm_num_groups=4, cross_attention_dim=8,
                 down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), attention_head_dim=2, layers_per_block=1,
                 up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), sample_size=16)
    return made, {"sample": draw(1, 4, 16, 16), "timestep": TIME, "encoder_hidden_states": draw(1, 4, 8)}


MODELS = {"wan": wan, "flux": flux, "qwen image": qwen_image, "hunyuan video": hunyuan_video, "sd3": sd3,
          "cogvideox": cogvideox, "unet": unet}
PATCHED = {"hunyuan video", "sd3", "cogvideox", "unet"}
"""Models whose attention calls torch itself, at least some of it."""


def attention_of(made):
    return [module for module in made.modules() if isinstance(module, AttentionModuleMixin)]


def sample(made, inputs):
    with torch.no_grad():
        return made(**inputs).sample


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_served_and_left_as_it_was(exact, name):
    made, inputs = MODELS[name]()
    kind = type(made)
    processors = made.attn_processors if hasattr(made, "attn_processors") else {}
    before = {key: getattr(p, "_attention_backend", None) for key, p in processors.items()}
    expected = sample(made, inputs)
    assert integration.enable(made) == integration.enable(made) > 0
    assert (type(made) is not kind) == (name in PATCHED)
    torch.testing.assert_close(sample(made, inputs), expected, rtol=0, atol=1e-5)
    assert served_calls() > 0 and set(report()) == {"sage_aot"}
    integration.disable(made)
    integration.disable(made)
    reset_report()
    assert torch.equal(sample(made, inputs), expected) and report() == {} and type(made) is kind
    assert before == {key: getattr(p, "_attention_backend", None) for key, p in processors.items()}


@pytest.mark.parametrize("name", MODELS)
def test_the_kernels_arithmetic_is_close(name):
    made, inputs = MODELS[name]()
    expected = sample(made, inputs)
    integration.enable(made)
    found = sample(made, inputs)
    assert 0 < (found - expected).norm() / expected.norm() < 0.05


@pytest.mark.parametrize("chosen", ["flex", attention_dispatch.AttentionBackendName.FLEX], ids=repr)
def test_processors_keep_a_backend_that_they_need(chosen):
    """Processors whose class names a backend raise where they have another."""
    made = model("AnyFlowFARTransformer3DModel", patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12,
                 in_channels=4, out_channels=4, text_dim=16, freq_dim=256, ffn_dim=32, num_layers=2)
    processors = [module.processor for module in attention_of(made)]
    needing = [processor for processor in processors if type(processor)._attention_backend == "flex"]
    free = [processor for processor in processors if processor not in needing]
    assert len(needing) == len(free) == 2
    for processor in needing:
        processor._attention_backend = chosen
    assert integration.enable(made) == integration.enable(made) == 2
    assert {processor._attention_backend for processor in free} == {integration.register()}
    assert all(processor._attention_backend is chosen for processor in needing)
    integration.disable(made)
    assert {processor._attention_backend for processor in free} == {None}


def test_a_model_of_which_nothing_can_be_served_is_refused():
    made, _ = wan()
    for processor in made.attn_processors.values():
        processor._attention_backend = "flex"
    with pytest.raises(UnsupportedError, match="got WanTransformer3DModel, whose processors need the backend flex; le"):
        integration.enable(made)
    assert "_sage_aot_before" not in vars(made)


def test_other_models_keep_their_backend(exact):
    made, inputs = wan()
    other, _ = wan()
    active = attention_dispatch._AttentionBackendRegistry._active_backend
    integration.enable(made)
    sample(other, inputs)
    assert report() == {} and attention_dispatch._AttentionBackendRegistry._active_backend is active


def test_diffusers_own_ways_to_choose_it(exact):
    integration.register()
    made, inputs = wan()
    with diffusers.attention_backend("sage_aot"):
        in_context = sample(made, inputs)
    assert served_calls() == 4
    try:
        made.set_attention_backend("sage_aot")
        assert torch.equal(sample(made, inputs), in_context) and served_calls() == 8
    finally:
        attention_dispatch._AttentionBackendRegistry.set_active_backend(attention_dispatch.AttentionBackendName.NATIVE)
    assert attention_dispatch.AttentionBackendName("sage_aot") is integration.register()
    assert attention_dispatch._AttentionBackendRegistry._is_context_parallel_available(integration.register())
    assert [str(x.value) for x in attention_dispatch.AttentionBackendName].count("sage_aot") == 1


def test_a_pipeline_is_served_as_a_whole(exact):
    transformer, _ = wan()
    vae = diffusers.AutoencoderKLWan(base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1,
                                     temperal_downsample=[False, True, True])
    torch.manual_seed(0)
    transformer = diffusers.WanTransformer3DModel(**{**WAN, "in_channels": 16, "out_channels": 16}).eval()
    pipeline = diffusers.WanPipeline(tokenizer=None, text_encoder=None, transformer=transformer, vae=vae,
                                     scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0))
    pipeline.set_progress_bar_config(disable=True)

    def video():
        return pipeline(prompt_embeds=draw(1, 12, 16), negative_prompt_embeds=torch.zeros(1, 12, 16), height=16,
                        width=16, num_frames=9, num_inference_steps=2, generator=torch.Generator().manual_seed(0),
                        output_type="pt").frames

    expected = video()
    assert integration.enable(pipeline) == 4
    torch.testing.assert_close(video(), expected, rtol=0, atol=1e-4)
    assert served_calls() == 16
    integration.disable(pipeline)
    assert torch.equal(video(), expected) and served_calls() == 16


@pytest.mark.parametrize("name", ["wan", "sd3"])
def test_compiled(exact, name):
    made, inputs = MODELS[name]()
    expected = sample(made, inputs)
    integration.enable(made)
    compiled = torch.compile(made, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(**inputs).sample, expected, rtol=0, atol=1e-5)


def test_compiled_blocks_are_whole_graphs_and_stay(exact):
    made, inputs = wan()
    expected = sample(made, inputs)
    integration.enable(made)
    made.compile_repeated_blocks(fullgraph=True, backend="eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        torch.testing.assert_close(sample(made, inputs), expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(sample(made, inputs), expected, rtol=0, atol=1e-5)


def test_hooks_of_others_may_come_and_go(exact):
    """Libraries that offload models replace their forward before each call, and put it back afterwards."""
    made, inputs = sd3()
    called, kind = [], type(made)

    def hook():
        own = made.forward
        made.forward = lambda **inputs: called.append(1) or own(**inputs)

    hook()
    integration.enable(made)
    number = 0
    for change in (lambda: None, lambda: delattr(made, "forward"), hook):
        change()
        sample(made, inputs)
        assert served_calls() > number
        number = served_calls()
    assert called == [1, 1]
    hooked = made.forward
    integration.disable(made)
    sample(made, inputs)
    assert served_calls() == number and made.forward is hooked and type(made) is kind
    assert "_sage_aot_before" not in vars(made)


@pytest.mark.parametrize("build", [wan, sd3])
def test_an_enabled_model_is_of_its_class(build):
    made, inputs = build()
    integration.enable(made)
    assert isinstance(made, type(build()[0])) and type(made).__name__ == type(build()[0]).__name__
    assert inspect.signature(made.forward) == inspect.signature(build()[0].forward)
    assert dict(made.config) == dict(build()[0].config)
    torch.export.export(made, (), kwargs=inputs)


@pytest.mark.parametrize("build", [wan, sd3])
def test_replicas_for_several_gpus_have_their_own_weights(exact, build):
    made, inputs = build()
    integration.enable(made)
    replica = copy.copy(made)
    replica._modules = {name: copy.deepcopy(module) for name, module in made._modules.items()}
    for parameter in replica.parameters():
        torch.nn.init.zeros_(parameter)
    assert sample(replica, inputs).eq(0).all() and sample(made, inputs).ne(0).any()


def test_compiled_models_are_enabled(exact):
    made, inputs = sd3()
    compiled = torch.compile(made, backend="eager")
    number = integration.enable(compiled)
    assert number == integration.enable(made) > 0
    with mock.patch.object(_serve, "serve", side_effect=ZeroDivisionError), pytest.raises(ZeroDivisionError):
        sample(made, inputs)


@pytest.mark.parametrize("build", [wan, sd3])
def test_a_model_ends_when_nobody_has_it(build):
    made, _ = build()
    integration.enable(made)
    gone = weakref.ref(made)
    del made
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("build", [wan, sd3])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda made: pickle.loads(pickle.dumps(made))],
                         ids=["copy", "pickle"])
def test_copies_of_a_model_are_served_with_their_own_weights(exact, build, copied):
    made, inputs = build()
    expected = sample(made, inputs)
    integration.enable(made)
    other = copied(made)
    for parameter in other.parameters():
        torch.nn.init.zeros_(parameter)
    assert sample(other, inputs).eq(0).all() and served_calls() > 0
    served = served_calls()
    integration.disable(other)
    sample(other, inputs)
    assert served_calls() == served
    torch.testing.assert_close(sample(made, inputs), expected, rtol=0, atol=1e-5)
    assert served_calls() > served


def test_processors_of_later_are_served_by_enabling_again(exact):
    made, inputs = wan()
    number = integration.enable(made)
    fresh = [type(module.processor)() for module in attention_of(made)]
    for module, processor in zip(attention_of(made), fresh):
        module.set_processor(processor)
    sample(made, inputs)
    assert report() == {}
    assert integration.enable(made) == number
    sample(made, inputs)
    assert served_calls() == number
    integration.disable(made)
    assert all(processor._attention_backend is None for processor in fresh)


def test_training_with_context_parallelism_is_the_hosts():
    """diffusers calls its forward with gradients switched off; its own context says that some are wanted."""
    ctx = SimpleNamespace(needs_input_grad=(True, False, False), save_for_backward=lambda *saved: None)
    x = K.clone().requires_grad_()
    with torch.no_grad():
        found = integration._forward(ctx, x, K, K)
        assert report() == {"gradients": 1}
        assert torch.equal(found, attention_dispatch._native_attention(x, K, K))
        with pytest.raises(UnsupportedError, match="got: gradients; .* no log-sum-exp"):
            integration._forward(ctx, x, K, K, return_lse=True)
        ctx.needs_input_grad = (False,) * 3
        integration._forward(ctx, K, K, K)
    assert served_calls() == 1


@pytest.mark.parametrize("wrong", [torch.nn.Linear(1, 1), None, "model"])
def test_what_is_no_model_is_refused(wrong):
    with pytest.raises(ArgumentError, match="expected a model or a pipeline of diffusers, got (Linear|NoneType|str)"):
        integration.enable(wrong)


def test_a_model_without_attention_is_refused():
    made = diffusers.AutoencoderTiny(encoder_block_out_channels=(4, 4), decoder_block_out_channels=(4, 4),
                                     num_encoder_blocks=(1, 1), num_decoder_blocks=(1, 1))
    with pytest.raises(ArgumentError, match="got AutoencoderTiny with none; run it in .*replace_sdpa"):
        integration.enable(made)


Q, K = draw(2, 30, 4, 64), draw(2, 40, 4, 64)
MASK = torch.arange(40) < torch.tensor([[25], [40]])
BOOLS = draw(2, 4, 30, 40) > 0


@pytest.mark.parametrize("options", [
    {}, {"scale": 0.3}, {"attn_mask": MASK}, {"attn_mask": MASK[:, None, None]}, {"attn_mask": torch.randn(30, 40)},
    {"attn_mask": BOOLS}, {"attn_mask": BOOLS[0, 0]}, {"attn_mask": BOOLS[:, :1]},
    {"attn_mask": torch.where(MASK, 0.0, -10000.0)}, {"is_causal": True}, {"dropout_p": 0.0}], ids=id_of)
def test_the_backend_is_native_attention(exact, options):
    expected = attention_dispatch._native_attention(Q, K, K, **options)
    torch.testing.assert_close(integration.attention(Q, K, K, **options), expected, rtol=0, atol=1e-5)
    mask = options.get("attn_mask")
    assert served_calls() == (mask is None or mask.dtype == torch.bool)


def test_grouped_heads(exact):
    k = K[:, :, :2]
    torch.testing.assert_close(integration.attention(Q, k, k, enable_gqa=True),
                               attention_dispatch._native_attention(Q, k, k, enable_gqa=True), rtol=0, atol=1e-5)


@pytest.mark.parametrize("when", ["possible", "faster"])
def test_the_log_sum_exp(exact, when):
    with use(Policy(when)):  # only sage_aot has it, also where it is slower
        out, lse = integration.attention(Q, K, K, return_lse=True)
    expected = (torch.einsum("bqhd,bkhd->bqhk", Q, K) / 8).logsumexp(-1)
    torch.testing.assert_close(lse, expected, rtol=0, atol=1e-5)
    assert served_calls() == 1 and out.shape == Q.shape
    with pytest.raises(UnsupportedError, match="got: a mask of numbers; .* no log-sum-exp"):
        integration.attention(Q, K, K, torch.zeros(30, 40), return_lse=True)


@pytest.mark.parametrize("mask", [None, MASK])
@pytest.mark.parametrize("is_causal", [False, True])
def test_what_small_means_depends_on_the_mask(monkeypatch, mask, is_causal):
    asked = []
    monkeypatch.setattr(integration, "is_small", lambda q, k, *mask, rows: asked.append((*mask, rows)))
    if mask is None or not is_causal:
        integration.attention(Q, K, K, mask, is_causal=is_causal)
        assert asked == [(mask is not None, is_causal, 1)]


def test_small_calls_and_refused_ones_are_decided_about_once(monkeypatch):
    """Calls are decided about once also where torch's function is replaced, which the native backend calls."""
    with replace_sdpa.globally():
        integration.attention(Q, K, K, torch.zeros(30, 40))
        assert report() == {"a mask of numbers": 1}
        reset_report()
        monkeypatch.setattr(torch.Tensor, "is_cuda", True)
        with use(Policy()):
            integration.attention(Q, K, K)
    assert report() == {SLOWER: 1}


def test_small_calls_go_to_the_native_backend(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    with use(Policy()):
        assert torch.equal(integration.attention(Q, K, K, scale=0.3),
                           attention_dispatch._native_attention(Q, K, K, scale=0.3))
    assert report() == {SLOWER: 1}


@pytest.mark.parametrize(("fewer", "reason"), [(0, "the full path"), (1, SLOWER)])
def test_small_is_a_matter_of_queries_and_keys(monkeypatch, fewer, reason):
    """Heads do not count, which stand where other layouts have the keys."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(_routes, "threshold_of", lambda *kind: (0, 4 * Q.numel() * 40 + fewer))
    monkeypatch.setattr(_serve, "why_slower", lambda call: "the full path")
    with use(Policy()):
        integration.attention(Q, K, K)
    assert report() == {reason: 1}


# --- sparse layers ----------------------------------------------------------------------------------------------------

SPARSE = Sparse(keep=0.25, block_size=64)
LATENTS = draw(1, 4, 2, 44, 48)  # 1,056 tokens, 17 blocks


def wan_of(layers=3, **inputs):
    made = model("WanTransformer3DModel", **{**WAN, "num_layers": layers, "rope_max_seq_len": 64})
    return made, {"hidden_states": LATENTS, "timestep": TIME, "encoder_hidden_states": draw(1, 12, 16), **inputs}


def long(name):
    """A model, its inputs of 16 blocks or more, and how many text tokens are (first, last)."""
    made, inputs = MODELS[name]()
    if name == "flux":
        inputs |= {"hidden_states": draw(1, 1024, 4), "img_ids": torch.zeros(1024, 3)}
    if name == "sd3":
        made = model("SD3Transformer2DModel", **{**dict(made.config), "sample_size": 32})
        inputs |= {"hidden_states": draw(1, 4, 32, 32)}
    if name == "cogvideox":
        made = model("CogVideoXTransformer3DModel", **{**dict(made.config), "sample_width": 64, "sample_height": 64,
                                                       "sample_frames": 1})
        inputs |= {"hidden_states": draw(1, 1, 4, 64, 64)}
    if name == "qwen image":
        inputs |= {"hidden_states": draw(2, 1024, 16), "img_shapes": [(1, 32, 32)] * 2}
    if name == "hunyuan video":
        inputs |= {"hidden_states": draw(1, 4, 1, 32, 32)}
    text = inputs["encoder_hidden_states"].shape[1]
    return made, inputs, (0, text) if name in ("sd3", "hunyuan video") else (text, 0)


@pytest.fixture
def asked(monkeypatch):
    """Calls of sage_aot.attn, one by one; it computes exactly, and all blocks."""
    calls = []

    def attn(q, k, v, sparse=None, **more):
        calls.append(SimpleNamespace(q=q, sparse=sparse, layout=more["layout"]))
        return attention(q, k, v, **more)

    monkeypatch.setattr(_serve, "attn", attn)
    return calls


def test_a_sparse_backend_is_native_attention_on_the_blocks_that_it_chooses():
    q, k, v = clear(layout="NHD")
    sparse = Sparse(keep=(0.25, 0.5), dense_keys=(130, 0), dense_queries=(130, 0))
    mask = chosen_by(sparse, q.transpose(1, 2), k.transpose(1, 2))
    expected, dense = (attention_dispatch._native_attention(q, k, v, each) for each in (mask, None))
    found = attention_dispatch.dispatch_attention_fn(q, k, v, backend=integration._sparse_backend(sparse))
    assert (found - expected).norm() / expected.norm() < 0.06 < 0.3 < (dense - expected).norm() / expected.norm()
    assert report() == {"sage_aot": 1, "sage_aot, sparse": 1}


def test_attention_to_itself_is_sparse_and_that_to_text_dense(asked):
    made, inputs = wan_of()
    number = integration.enable(made)
    assert integration.enable(made, sparse=SPARSE, dense_layers=(1, 0)) == number == 6
    sample(made, inputs)
    assert [call.sparse for call in asked] == [None, None, SPARSE, None, SPARSE, None]
    assert report() == {"sage_aot": 6, "sage_aot, sparse": 2}


def test_attention_to_as_long_a_text_is_dense(asked):
    made, inputs = wan_of(1, encoder_hidden_states=draw(1, 1056, 16))
    integration.enable(made, sparse=SPARSE)
    sample(made, inputs)
    assert [call.sparse for call in asked] == [SPARSE, None]


def test_what_refines_a_text_is_no_layer(asked):
    made, inputs, _ = long("hunyuan video")
    integration.enable(made, sparse=SPARSE, dense_layers=1)
    sample(made, inputs)
    assert [call.sparse for call in asked] == [None, None, SPARSE]


@pytest.mark.parametrize("name", ["flux", "sd3", "cogvideox", "qwen image", "hunyuan video"])
def test_where_a_model_has_its_text(asked, name):
    """Tokens of the text alone differ, in the first layer, for another text. The model's result is that of dense
    attention, which stands here in the place of sparse attention."""
    made, inputs, (first, last) = long(name)
    expected = sample(made, inputs)
    integration.enable(made, sparse=SPARSE, text_tokens=(first, last))
    torch.testing.assert_close(sample(made, inputs), expected, rtol=0, atol=1e-4)
    sparse = [call for call in asked if call.sparse is not None]
    sample(made, {**inputs, "encoder_hidden_states": inputs["encoder_hidden_states"] + draw(1)})
    other = [call for call in asked if call.sparse is not None][len(sparse)]
    differs = (sparse[0].q != other.q).any(-1).any(2 if sparse[0].layout == "NHD" else 1)[0]
    tokens = torch.arange(len(differs))
    assert len(differs) > 1024 and torch.equal(differs, (tokens < first) | (tokens >= len(tokens) - last))
    expected = dataclasses.replace(SPARSE, dense_keys=(first, last), dense_queries=(first, last))
    assert [call.sparse for call in sparse] == [expected] * 2


@pytest.mark.parametrize("build", [lambda: wan_of(2), lambda: long("sd3")[:2]], ids=["wan", "sd3"])
def test_what_is_said_last_of_layers_holds(asked, build):
    made, inputs = build()
    kinds = [type(module) for module in made.modules()]

    def sparse_calls():
        asked.clear()
        sample(made, inputs)
        return [call.sparse for call in asked if call.sparse is not None]

    for sparse in (SPARSE, Sparse(tau=1.0, block_size=64)):
        integration.enable(made, sparse=sparse)
        assert sparse_calls() == [sparse] * 2
    integration.enable(made)
    assert sparse_calls() == [] and len(asked) > 0
    integration.enable(made, sparse=SPARSE, dense_layers=1)
    assert sparse_calls() == [SPARSE]
    integration.disable(made)
    sample(made, inputs)
    assert sparse_calls() == asked == [] and [type(module) for module in made.modules()] == kinds
    assert not any(hasattr(module, integration._BACKEND) for module in made.modules())


@pytest.mark.parametrize("build", [lambda: wan_of(2), lambda: long("sd3")[:2]], ids=["wan", "sd3"])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda made: pickle.loads(pickle.dumps(made))],
                         ids=["copy", "pickle"])
def test_copies_of_a_sparse_model_are_sparse(asked, build, copied):
    made, inputs = build()
    integration.enable(made, sparse=SPARSE, dense_steps=1)
    other = copied(made)
    sample(other, {**inputs, "timestep": TIME})
    sample(other, {**inputs, "timestep": TIME - 1})
    assert [call.sparse for call in asked if call.sparse is not None] == [SPARSE] * 2
    asked.clear()
    integration.disable(other)
    sample(made, {**inputs, "timestep": TIME})
    assert len(asked) > 0 and all(call.sparse is None for call in asked), "the first step of the model itself"


@pytest.mark.parametrize("name", ["wan", "sd3"])
@pytest.mark.parametrize("by_position", [False, True])
def test_steps_of_a_sampler(asked, name, by_position):
    made, inputs = wan_of(1) if name == "wan" else long("sd3")[:2]
    layers = 1 if name == "wan" else 2
    integration.enable(made, sparse=SPARSE, dense_steps=(1, 1), steps=4)
    found = []
    for level in (900.0, 900.0, 500.0, 500.0, 200.0, 100.0, 900.0, 500.0):
        asked.clear()
        given = {**inputs, "timestep": torch.tensor([level])}
        if by_position:
            names = [*inspect.signature(made.forward).parameters]
            with torch.no_grad():
                made(*[given.pop(each) for each in names[: names.index("timestep") + 1]], **given)
        else:
            sample(made, given)
        found.append(sum(call.sparse is not None for call in asked) / layers)
    assert found == [0, 0, 1, 1, 1, 0, 0, 1]


def test_the_models_of_a_pipeline_share_its_steps(asked):
    """Models such as Wan 2.2's for high and for low noise share steps; an autoencoder has none, and stays dense."""
    (high, inputs), (low, _) = wan_of(1), wan_of(1)
    vae = diffusers.AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, down_block_types=("DownEncoderBlock2D",),
                                  up_block_types=("UpDecoderBlock2D",))
    pipeline = SimpleNamespace(components={"transformer": high, "transformer_2": low, "vae": vae})

    def enable(**settings):
        with mock.patch.object(integration, "DiffusionPipeline", SimpleNamespace):
            integration.enable(pipeline, sparse=SPARSE, **settings)

    enable(dense_steps=(1, 1), steps=4)
    found = []
    for made, level in ((high, 900.0), (high, 700.0), (low, 500.0), (low, 300.0)):
        sample(made, {**inputs, "timestep": torch.tensor([level])})
        found.append(any(call.sparse is not None for call in asked))
        asked.clear()
    enable()
    with torch.no_grad():
        vae(draw(1, 3, 48, 48))
    assert found == [False, True, True, False]
    assert len(asked) > 0 and all(call.sparse is None for call in asked)


def test_settings_of_layers_by_their_names(asked):
    made, inputs = wan_of()
    half = dataclasses.replace(SPARSE, keep=0.5)
    by_name = {"blocks.0.attn1": SPARSE, "blocks.2.attn1": half, "blocks.1.attn2": SPARSE}
    integration.enable(made, sparse=by_name)
    sample(made, inputs)
    assert [call.sparse for call in asked] == [SPARSE, None, None, None, half, None]
    with pytest.raises(ArgumentError, match=r"sparse: expected names of attention modules .*, got 'blocks\.3\.attn1'"):
        integration.enable(made, sparse={**by_name, "blocks.3.attn1": SPARSE})


@pytest.mark.parametrize("build", [lambda: wan_of(4), lambda: long("sd3")[:2]], ids=["wan", "sd3"])
def test_sparse_layers_in_compiled_blocks(build):
    """A block is compiled once for each setting of layers and steps, whole."""
    made, inputs = build()
    blocks = made.blocks if hasattr(made, "blocks") else made.transformer_blocks
    names = [name.removesuffix(".processor") for name in made.attn_processors if "attn2" not in name]
    by_name = {name: dataclasses.replace(SPARSE, keep=0.25 + index % 2 / 4)
               for index, name in enumerate(names) if index != 3}
    integration.enable(made, sparse=by_name, dense_steps=1)
    levels = [{**inputs, "timestep": torch.tensor([level])} for level in (9.0, 7.0, 9.0, 7.0)]
    expected = [sample(made, each) for each in levels]
    assert not torch.equal(expected[0], sample(made, {**inputs, "timestep": torch.tensor([9.0 - 2])}))
    graphs = []
    for block in blocks:
        block.compile(fullgraph=True, backend=lambda graph, _: graphs.append(graph) or graph)
    for each, result in zip(levels, expected):
        torch.testing.assert_close(sample(made, each), result, rtol=0, atol=1e-5)
    of_last = len(blocks) == 2  # the last block of SD3 is of another kind
    assert len(graphs) == 4 if of_last else 3, "dense, and two settings"


@pytest.mark.parametrize("build", [lambda: wan_of(3), lambda: long("sd3")[:2]], ids=["wan", "sd3"])
@pytest.mark.parametrize("dense_steps", [0, 1])
def test_sparse_layers_in_a_compiled_model(build, dense_steps):
    """Layers compile to one graph, but where the steps are told apart by a tensor's value."""
    made, inputs = build()
    integration.enable(made, sparse=SPARSE, dense_layers=1, dense_steps=dense_steps)
    levels = [{**inputs, "timestep": torch.tensor([level])} for level in (9.0, 7.0, 9.0)]
    expected = [sample(made, each) for each in levels]
    compiled = torch.compile(made, backend="eager", fullgraph=dense_steps == 0)
    for each, result in zip(levels, expected):
        torch.testing.assert_close(sample(compiled, each), result, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("wrong", "message"), [
    ({"dense_layers": 1}, "expected none without sparse, got some; pass sparse="),
    ({"sparse": SPARSE, "dense_steps": (0, 1)}, "steps: expected the number of steps of a run"),
    ({"sparse": SPARSE, "dense_layers": 2}, "sparse: expected layers that are not dense, got none in WanTransf"),
    ({"sparse": 0.25}, "sparse: expected a sage_aot.Sparse, or a mapping")])
def test_wrong_settings_change_nothing(wrong, message):
    made, _ = wan()
    with pytest.raises(ArgumentError, match=message):
        integration.enable(made, **wrong)
    assert "_sage_aot_before" not in vars(made)


@pytest.mark.parametrize("ends", [{"dense_keys": (12, 0)}, {"dense_queries": 12}])
def test_ends_of_a_sequence_in_which_text_is_split_are_refused(ends):
    shared, sparse = SimpleNamespace(ring_degree=1, ulysses_degree=2), Sparse(keep=0.25, **ends)
    with pytest.raises(UnsupportedError, match="dense_keys, dense_queries: expected none .*; pass what is text as"):
        integration._SharedForward(integration._sparse_backend(sparse, (7, 0), is_split=True).shared, shared)
    forward = integration._SharedForward(integration._sparse_backend(sparse, (7, 0)).shared, shared)
    assert forward.sparse == Sparsely(sparse, text_tokens=7).with_text(sparse)


def test_which_models_split_their_text():
    found = {name: integration._splits_text(MODELS[name]()[0]) for name in ("flux", "qwen image", "wan", "sd3")}
    assert found == {"flux": True, "qwen image": True, "wan": False, "sd3": False}
    for name in ("Flux2Transformer2DModel", "LTX2VideoTransformer3DModel"):
        assert any("encoder_hidden_states" in plan for plan in getattr(diffusers, name)._cp_plan.values()
                   if isinstance(plan, dict)), "as it was when _splits_text was written"
    ltx = model("LTXVideoTransformer3DModel", in_channels=8, out_channels=8, num_attention_heads=2, num_layers=1,
                attention_head_dim=8, cross_attention_dim=16, caption_channels=16)
    assert "encoder_hidden_states" in ltx._cp_plan[""] and not integration._splits_text(ltx), "another sequence"


@pytest.mark.parametrize("rank", [0, 1])
def test_the_text_of_a_ring_whose_steps_have_the_shares_of_several_processes(rank, monkeypatch):
    """Ring 2 x Ulysses 2, unevenly: each step has the parts of two of the four processes."""
    counts = (258, 1280, 2)
    parts = [torch.cat([part.tensor_split(4)[process] for part in (
        torch.full((count,), of_text) for count, of_text in zip(counts, (True, False, True)))]) for process in range(4)]
    shares = [torch.cat(parts[:2]), torch.cat(parts[2:])]
    text = [torch.stack([block.any() for block in share.split(64)]) for share in shares]
    masks = [sage_aot.block_mask(torch.zeros(1, 1, len(text[rank]), len(of), dtype=torch.bool), 64) for of in text]
    monkeypatch.setattr(integration, "ring_blocks", lambda *_, **named: masks)
    monkeypatch.setattr(integration.dispatch, "gather_size_by_comm", lambda *_: [len(share) for share in shares])
    shared = SimpleNamespace(ring_degree=2, ulysses_degree=2, _ulysses_local_rank=0, _ring_local_rank=rank,
                             ring_anything=True, _ring_mesh=SimpleNamespace(get_group=lambda: None))
    forward = integration._SharedForward((Sparse(keep=0.5, block_size=64), (counts[0], counts[2])), shared)
    x = torch.zeros(1, len(shares[rank]), 1, 64)
    for step, found in enumerate(forward._of_ring(forward.sparse, x, x, x, None, 0.0, False, None)):
        assert torch.equal(found.blocks[0, 0], text[rank][:, None] | text[(rank + step) % 2])


def test_a_plan_of_ones_own_says_where_the_text_is():
    made, _ = cogvideox()
    part = made.transformer_blocks[0]
    part._diffusers_hook = SimpleNamespace(hooks={"cp": SimpleNamespace(metadata={"hidden_states": None})})
    assert not integration._splits_text(made)
    part._diffusers_hook.hooks["cp"].metadata["encoder_hidden_states"] = None
    assert integration._splits_text(made)


@pytest.mark.parametrize(("total", "degree"), [(3, 2), (30, 4), (4, 2), (5, 1)])
def test_amounts_of_the_heads_that_a_process_has(total, degree):
    """diffusers fills the heads up to a multiple of the degree, and drops what is too much."""
    shares = tuple((1 + head) / total for head in range(total))
    each, found = -(-total // degree), []
    for rank in range(degree):
        shared = SimpleNamespace(ulysses_degree=degree, ring_degree=1, _ulysses_local_rank=rank)
        of_rank = integration._SharedForward((Sparse(keep=shares), None), shared)._of_rank().keep
        assert len(of_rank) == min(each, total - rank * each)
        found += of_rank
    assert tuple(found) == shares


def test_layers_that_only_text_goes_through_are_none():
    modules = {name: SimpleNamespace() for name in (
        "text_transformer_blocks.0.self_attention", "context_embedder.token_refiner.refiner_blocks.0.attn",
        "txt_mode_blocks.1.attn", "text_fusion.layerwise_blocks.0.attn", "visual_transformer_blocks.0.self_attention",
        "noise_refiner.0.attention")}
    assert integration._may_be_sparse(modules) == ["visual_transformer_blocks.0.self_attention",
                                                   "noise_refiner.0.attention"]
