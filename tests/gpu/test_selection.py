"""Selections of blocks on a GPU: every case of the simulator, and long calls, which it does not have."""

from __future__ import annotations

import pytest
import torch
from selection_checks import CASES, Selection, check, drawn, failures, of_headdim
from variants import SPECS, backend_of

import sage_aot
from sage_aot._backends.cuda.device import arch_of
from sage_aot._backends.emulation.backend import EmulationBackend
from sage_aot._backends.emulation.selection import views_of
from sage_aot._call.backends import default_library, handing
from sage_aot._problem.selection import Pooling
from sage_aot._tools import reference
from sage_aot.sparse import Sparse, pool_blocks, select_blocks

pytestmark = pytest.mark.gpu

LONG = {"keep": Selection(queries=20_000, keys=20_000, headdim=128, block_size=128, choose=("keep", 0.25)),
        "mass": Selection(queries=9_000, keys=30_000, headdim=128, choose=("mass", 0.8), batch=2),
        "tau": Selection(queries=30_000, keys=30_000, block_size=128, choose=("tau", 1.0), is_causal=True),
        "rows of scores that fill the shared memory": Selection(
            queries=640, keys=8_192 * 64, kv_heads=1, choose=("keep", 0.01))}


def emulated(made):
    """Result of `made` by the emulation of this GPU's kernels, on the CPU."""
    library = default_library()
    arch = arch_of(library, torch.cuda.current_device())
    with handing(EmulationBackend(library.manifest, arch)):
        return made()


@pytest.mark.parametrize("headdim", [64, 128, 256])
@pytest.mark.parametrize("name", CASES)
def test_a_selection_keeps_its_promises_and_is_the_emulations(name, headdim):
    case = of_headdim(CASES[name], headdim)
    blocks, wrong = check(case, "cuda")
    assert wrong == []
    expected = emulated(lambda: select_blocks(*case.tensors(), **case.arguments)).blocks
    differing = (blocks.blocks.cpu() != expected).sum().item()
    assert differing == 0 if case.choose[0] == "keep" else differing <= 4 * blocks.blocks.numel() // 100


@pytest.mark.parametrize("first", range(0, 2000, 100))
def test_drawn_selections_keep_their_promises(first):
    wrong = {seed: check(drawn(seed, longest=3000), "cuda")[1] for seed in range(first, first + 100)}
    assert {seed: found for seed, found in wrong.items() if found} == {}


@pytest.mark.parametrize("headdim", [64, 128, 256])
@pytest.mark.parametrize("centre", [False, True])
def test_means_are_the_emulations_bit_for_bit(headdim, centre):
    q, k = Selection(headdim=headdim, keys=5000, batch=2).tensors("cuda")
    for x in (q, k, k.float(), k.transpose(1, 2).contiguous().transpose(1, 2), k[..., :headdim - 3]):
        found = pool_blocks(x, 128, centre=centre, means=True)
        expected = emulated(lambda x=x: pool_blocks(x.cpu(), 128, centre=centre, means=True))
        assert torch.equal(found.means.cpu(), expected.means)
        one, other = (views_of(Pooling(*found.shape, "f32", 128, centre), data.cpu())
                      for data in (found._data, expected._data))
        assert torch.equal(one.x_hat, other.x_hat) and torch.equal(one.x_scale, other.x_scale)
        assert (one.x_alike - other.x_alike).abs().max() < 1e-5


@pytest.mark.parametrize("name", LONG)
def test_long_selections_keep_their_promises(name):
    case = LONG[name]
    q, k = case.tensors("cuda")
    masks = [select_blocks(q, k, **case.arguments).blocks for _ in range(3)]
    assert torch.equal(masks[0], masks[1]) and torch.equal(masks[0], masks[2])
    assert failures(case, q, k, masks[0]) == []


@pytest.mark.parametrize("is_stored", [False, True], ids=["tensors", "quantized keys"])
@pytest.mark.parametrize("sparse", [
    Sparse(keep=(0.25, 0.5, 0.125, 1.0)), Sparse(mass=0.4), Sparse(tau=(1.0, 0.5, 2.0, 0.0), least_alike=0.1),
    Sparse(keep=0.25, dense_keys=(77, 20), dense_queries=(0, 30)), Sparse(keep=0.25, tail=True),
    Sparse(mass=0.4, tail=True)], ids=str)
def test_a_captured_selection_follows_the_tensors(sparse, is_stored):
    q, k, v = torch.randn(3, 1, 4, 2000, 128, device="cuda").bfloat16()

    def call():
        keys = (sage_aot.quantize_kv(k, v, pool=128, tail=sparse.tail),) if is_stored else (k, v)
        return sage_aot.attn(q, *keys, sparse=sparse)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for seed in range(2):
        torch.manual_seed(seed)
        for x in (q, k, v):
            x.normal_()
        graph.replay()
        assert torch.equal(out, call())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("headdim", [64, 128])
def test_the_tail_is_exact_where_blocks_are_constant(headdim, is_causal):
    q = torch.randn(1, 4, 3000, headdim, device="cuda").bfloat16()
    k, v = (torch.randn(1, 2, 24, headdim, device="cuda").bfloat16().repeat_interleave(128, 2)[:, :, :3000]
            for _ in range(2))
    out, lse = sage_aot.attn(q, k, v, is_causal=is_causal, sparse=Sparse(keep=0.2, tail=True), return_lse=True)
    expected, expected_lse = reference.attention(q, k, v, is_causal=is_causal)
    assert reference.measure(out, expected).relative_l1 < 0.05
    assert (lse - expected_lse).abs().max() < 0.06
    without = sage_aot.attn(q, k, v, is_causal=is_causal, sparse=Sparse(keep=0.2))
    assert reference.measure(without, expected).relative_l1 > 0.3


def test_a_call_that_chooses_is_the_call_with_the_blocks_that_it_chose():
    q, k, v = torch.randn(3, 2, 4, 4096, 64, device="cuda").bfloat16()
    sparse = Sparse(mass=0.5, block_size=64, near=2)
    blocks = sparse.select(q, k, is_causal=True)
    assert torch.equal(sage_aot.attn(q, k, v, is_causal=True, sparse=sparse),
                       sage_aot.attn(q, k, v, is_causal=True, block_mask=blocks))
    kv = sage_aot.quantize_kv(k, v, pool=64, tail=True)
    for choice in (sparse, Sparse(mass=0.5, block_size=64, tail=True)):
        assert torch.equal(sage_aot.attn(q, kv, is_causal=True, sparse=choice),
                           sage_aot.attn(q, k, v, is_causal=True, sparse=choice))


def test_other_archs_kernels_choose_alike():
    """Kernels of other archs are rebuilt for this GPU."""
    q, k = CASES["keep"].tensors("cuda")
    expected = select_blocks(q, k, keep=0.4, block_size=64).blocks
    for arch in sorted({spec.arch for spec in SPECS}):
        with handing(backend_of(arch)):
            assert torch.equal(select_blocks(q, k, keep=0.4, block_size=64).blocks, expected), arch
