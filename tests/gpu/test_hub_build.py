"""The kernel of the Hugging Face hub on a GPU: the bits of the package, through the driver's library alone. The module
is imported as `kernels` imports it, which need not be installed where a GPU is."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
import torch
from hub_build import ROOT, build, loaded

import sage_aot
from sage_aot._backends.cuda.device import arch_of
from sage_aot._call.backends import default_library

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not (ROOT / "ci" / "sageattention").is_dir(),
                                                  reason="the kernel is built from a source tree")]


@pytest.fixture(scope="session")  # a process registers its operators once, and may get the file in several parts
def kernel(tmp_path_factory) -> Iterator[Any]:
    """The variant for CUDA, with the kernels that this GPU runs."""
    arch = arch_of(default_library(), torch.cuda.current_device())
    built = build(tmp_path_factory.mktemp("hub"), lambda name: f"_{arch}_" in f"{name}_")
    module = loaded(built / "build" / "torch-cuda")
    yield module
    for name in [name for name in sys.modules if name.split(".")[0] == module.__name__]:
        del sys.modules[name]


def draw(*shape: int, requires_grad: bool = False) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator).requires_grad_(requires_grad)
            for _ in range(3)]


def test_kernels_are_launched_through_the_library(kernel):
    assert import_module(f"{kernel.__name__}._backends.drivers").default_driver().name == "ctypes"


@pytest.mark.parametrize("headdim", [64, 128])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"smooth_q": True}, {"smooth_v": True}], ids=str)
def test_a_call_gives_the_packages_bits(kernel, headdim, options):
    q, k, v = draw(2, 4, 700, headdim)
    for _ in range(2):  # the first call prepares, the second is a look-up
        found, lse = kernel.attn(q, k, v, return_lse=True, **options)
        expected, expected_lse = sage_aot.attn(q, k, v, return_lse=True, **options)
        assert torch.equal(found, expected) and torch.equal(lse, expected_lse)
        q = q.clone()  # at another address


def test_sequences_kept_keys_and_gradients_are_the_packages(kernel):
    q, k, v = draw(2, 4, 300, 64)
    assert torch.equal(kernel.attn(q, kernel.quantize_kv(k, v)), sage_aot.attn(q, k, v))
    begins = torch.tensor([0, 250, 600], dtype=torch.int32, device="cuda")
    packed = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
    assert torch.equal(kernel.flash_attn_varlen_func(*packed, begins, begins, 350, 350, causal=True),
                       sage_aot.attn_varlen(*packed, begins, begins, 350, 350, is_causal=True))
    gradients = []
    for module in (kernel, sage_aot):
        leaves = draw(2, 4, 300, 64, requires_grad=True)
        module.train_attn(*leaves, is_causal=True).square().sum().backward()
        gradients.append([leaf.grad for leaf in leaves])
    assert all(map(torch.equal, *gradients))


def test_a_graph_and_compiled_code_replay_a_call(kernel):
    q, k, v = draw(1, 4, 500, 64)
    expected = sage_aot.attn(q, k, v)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    kernel.attn(q, k, v)  # loads the kernels, which a capture does not allow
    with torch.cuda.graph(graph):
        out = kernel.attn(q, k, v)
    out.zero_()
    graph.replay()
    assert torch.equal(out, expected)
    compiled = torch.compile(kernel.attn, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(q, k, v), expected)
