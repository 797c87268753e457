"""Sparse layers of hosts on CUDA tensors, with the kernels of this GPU: diffusers, ComfyUI, and what processes share.

The blocks that a call is to see are computed apart from the product (tests/integrations/blocks.py).
"""

from __future__ import annotations

import copy
import json

import programs
import pytest
import torch
import torch.nn.functional as F
from blocks import chosen_by, clear
from comfyui_stand_in import ModelPatcher

from sage_aot import Sparse
from sage_aot.integrations import Policy, comfyui, report, reset_report, use
from sage_aot.integrations.torch import sparse_sdpa

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

SPARSE = Sparse(keep=(0.25, 0.5), dense_keys=(130, 10), dense_queries=(0, 200))


@pytest.fixture(autouse=True)
def served():
    reset_report()
    with use(Policy("possible")), torch.no_grad():
        yield


def relative(found, expected):
    return ((found.cpu().float() - expected.cpu().float()).norm() / expected.cpu().float().norm()).item()


def check(attend, sparse=SPARSE):
    """`attend` computes attention to the blocks that `sparse` chooses: [batch, heads, tokens, headdim]."""
    q, k, v = clear()
    expected = F.scaled_dot_product_attention(q, k, v, chosen_by(sparse, q, k))
    dense = F.scaled_dot_product_attention(q, k, v)
    assert relative(attend(*(x.cuda() for x in (q, k, v))), expected) < 0.06 < 0.3 < relative(dense, expected)
    assert report() == {"sage_aot": 1, "sage_aot, sparse": 1}


def test_torchs_attention():
    check(lambda q, k, v: sparse_sdpa(SPARSE, q, k, v))


def test_comfyuis_attention():
    model = comfyui.patch(ModelPatcher(), policy=Policy("possible"), sparse=Sparse(keep=0.25), text_tokens=(0, 300))
    check(lambda q, k, v: model.attend(q, k, v, 2, skip_reshape=True, skip_output_reshape=True),
          Sparse(keep=0.25, dense_keys=(0, 300), dense_queries=(0, 300)))


def test_diffusers_attention():
    pytest.importorskip("diffusers", minversion="0.36")
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    from sage_aot.integrations import diffusers as integration

    backend = integration._sparse_backend(SPARSE)
    check(lambda *qkv: dispatch_attention_fn(*(x.transpose(1, 2) for x in qkv), backend=backend).transpose(1, 2))


@pytest.mark.inductor
@pytest.mark.parametrize("name", ["wan", "flux"])
@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled blocks"])
def test_a_model_is_that_of_the_emulation(name, is_compiled):
    """Both make the first of two layers and the first of two steps dense."""
    pytest.importorskip("diffusers", minversion="0.36")
    from test_diffusers import long, wan_of

    from sage_aot.integrations import diffusers as integration

    made, inputs, text = (*wan_of(2), 0) if name == "wan" else long(name)
    settings = {"sparse": Sparse(keep=0.25, block_size=64), "dense_layers": 1, "dense_steps": 1, "text_tokens": text}
    on_gpu = copy.deepcopy(made).cuda()
    integration.enable(made, **settings)
    integration.enable(on_gpu, **settings)
    if is_compiled:
        torch.compiler.reset()
        on_gpu.compile_repeated_blocks(fullgraph=True)
    for level, is_sparse in ((9.0, False), (7.0, True)):
        reset_report()
        given = {**inputs, "timestep": torch.tensor([level])}
        expected = made(**given).sample
        counts = report()
        reset_report()
        found = on_gpu(**{key: x.cuda() if isinstance(x, torch.Tensor) else x for key, x in given.items()}).sample
        assert relative(found, expected) < 0.02
        assert counts.get("sage_aot, sparse", 0) == is_sparse
        assert is_compiled or report() == counts


if torch.cuda.device_count() > 1:
    def test_what_two_processes_share():
        pytest.importorskip("diffusers", minversion="0.36")
        pytest.importorskip("yunchang")
        results = [json.loads(line) for line in programs.run_two("one_rank.py", "cuda").splitlines()]
        assert {result["sparse"]: result["report"].get("sage_aot, sparse") for result in results} == {
            f"{way}{text}": calls for text in ("", ", text") for way, calls in (
                ("ring", 2), ("ring, any length", 2), ("ulysses", 1), ("ulysses, any length", 1))}
        assert all(0 < result["kernels"] < 0.06 and result["seen"] < 0.8 for result in results), results
