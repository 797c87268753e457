"""Runs ComfyUI's own code with the override of sage_aot, and prints what came of it as JSON.

    export PYTHONPATH=.:tests/integrations:$COMFYUI_PATH
    python tests/integrations/comfyui_host.py --cpu --use-pytorch-cross-attention

A process of its own, because ComfyUI reads the command line when it is imported. test_comfyui.py says what is right.
With the second option ComfyUI attends as on a GPU: its attention for CPUs adds the values of a bool mask to the scores.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys

import comfy.options

comfy.options.enable_args_parsing()

import comfy.ldm.modules.attention as host  # noqa: E402
import comfy.ops  # noqa: E402
import comfy.sample  # noqa: E402
import comfy.supported_models  # noqa: E402
import comfyui_version  # noqa: E402
import exact  # noqa: E402
import torch  # noqa: E402
from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel  # noqa: E402
from comfy.model_patcher import ModelPatcher  # noqa: E402

from sage_aot.integrations import Policy, _serve, report, reset_report  # noqa: E402
from sage_aot.integrations.comfyui import KEY, NODE_CLASS_MAPPINGS, override, patch  # noqa: E402

POSSIBLE = Policy("possible")


@contextlib.contextmanager
def exact_attention():
    kernels, _serve.attn = _serve.attn, exact.attention
    try:
        yield
    finally:
        _serve.attn = kernels


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def difference(found, expected):
    assert found.shape == expected.shape, (found.shape, expected.shape)
    return ((found - expected).abs().max() / expected.abs().max()).item()


def attention(skip_reshape, skip_output_reshape, mask=None):
    """ComfyUI's attention function with the override against itself without it."""
    shape = (2, 4, 33, 32) if skip_reshape else (2, 33, 128)
    q, k, v = (random(*shape, seed=seed) for seed in range(3))
    call = {"mask": mask, "skip_reshape": skip_reshape, "skip_output_reshape": skip_output_reshape}
    expected = host.optimized_attention(q, k, v, 4, **call)
    reset_report()
    options = {KEY: override(policy=POSSIBLE)}
    with exact_attention():
        found = host.optimized_attention(q, k, v, 4, transformer_options=options, **call)
    quantized = host.optimized_attention(q, k, v, 4, transformer_options=options, **call)
    return {"exact": difference(found, expected), "quantized": difference(quantized, expected), "report": report()}


def attentions():
    cases = {f"skip_reshape={a}, skip_output_reshape={b}": attention(a, b) for a in (False, True)
             for b in (False, True)}
    padding = torch.arange(33) < torch.tensor([20, 33])[:, None, None, None]
    return {**cases, "mask of keys": attention(True, False, padding),
            "mask of numbers": attention(True, False, random(33, 33))}


def wan():
    """A ModelPatcher of ComfyUI's Wan model with two layers and random weights."""
    config = comfy.supported_models.WAN21_T2V({
        "image_model": "wan2.1", "model_type": "t2v", "dim": 128, "ffn_dim": 256, "num_heads": 2, "num_layers": 2,
        "in_dim": 16, "out_dim": 16, "freq_dim": 32, "text_dim": 32})
    config.set_inference_dtype(torch.float32, None)
    model = config.get_model({})
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1, generator=generator)
    return ModelPatcher(model, torch.device("cpu"), torch.device("cpu"))


def sampled(model, steps=4):
    """The latent that ComfyUI's sampler makes, and what the report counts meanwhile."""
    reset_report()
    condition = [[random(1, 7, 32, seed=5), {}]], [[random(1, 7, 32, seed=6), {}]]
    latent = torch.zeros(1, 16, 2, 8, 8)
    out = comfy.sample.sample(model, random(*latent.shape), steps, 3.0, "euler", "simple", *condition, latent, seed=0,
                              disable_pbar=True)
    return out, report()


def say_block(index, args, extra):
    args["transformer_options"]["block_index"] = index
    return extra["original_block"](args)


def wan_model():
    model = wan()
    expected, _ = sampled(model)
    node = NODE_CLASS_MAPPINGS["SageAOTAttention"]()
    whole, = node.patch(model, "possible", "raise", 0.0, 1.0, "")
    quantized, served = sampled(whole)
    found = {"quantized": difference(quantized, expected), "quantized report": served}
    with exact_attention():
        out, served = sampled(whole)
        found |= {"exact": difference(out, expected), "exact report": served}
        half = patch(model, policy=POSSIBLE, end_percent=0.5)
        _, found["half of the schedule"] = sampled(half)
        _, found["half, then the other"] = sampled(patch(half, policy=POSSIBLE, start_percent=0.5))
        dense = patch(model, policy=POSSIBLE, dense_blocks="0")
        _, found["dense block"] = sampled(dense)
        for index in range(2):  # as newer versions of the model do by themselves
            dense.set_model_patch_replace(functools.partial(say_block, index), "dit", "double_block", index)
        out, found["dense block, known"] = sampled(dense)
        found["exact, dense block"] = difference(out, expected)
    again, found["report of the model itself"] = sampled(model)
    return found | {"of the model itself": difference(again, expected),
                    "the model is as before": KEY not in model.model_options["transformer_options"]}


def unet():
    """ComfyUI's UNet, whose blocks have names, with one of them dense."""
    model = UNetModel(
        image_size=8, in_channels=4, model_channels=32, out_channels=4, num_res_blocks=[1, 1], channel_mult=(1, 2),
        num_heads=2, use_spatial_transformer=True, transformer_depth=[1, 1], transformer_depth_middle=1,
        transformer_depth_output=[1, 1, 1, 1], context_dim=16, dtype=torch.float32, operations=comfy.ops.manual_cast)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1, generator=generator)
    inputs = random(1, 4, 8, 8), torch.tensor([500.0]), random(1, 7, 16, seed=1)

    def run(options):
        reset_report()
        with torch.no_grad(), exact_attention():
            return model(*inputs, transformer_options=options), report()

    expected, _ = run({})
    found = {}
    for dense in ("", "input:1", "1", "middle:0, output:0-9"):
        out, served = run({KEY: override(policy=POSSIBLE, dense_blocks=dense)})
        found[dense] = {"exact": difference(out, expected), "report": served}
    return found


if __name__ == "__main__":
    print(json.dumps({"ComfyUI": comfyui_version.__version__, "attention": attentions(), "wan": wan_model(),
                      "unet": unet()}, indent=1), file=sys.stdout)
