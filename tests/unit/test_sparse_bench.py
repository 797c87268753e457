"""bench/selections.py: published methods against their formulas, and the densities that knobs are set for;
bench/sparse_calls.py: what it times."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import sage_aot
import selections
import sparse_calls
from selections import BLOCK, METHODS, View

TOKENS = 13 * BLOCK + 30  # the last block has fewer


@pytest.fixture(scope="module")
def view():
    """Keys with a common offset, which no softmax over keys knows of."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, 2, TOKENS, 64, generator=generator).cumsum(2) / 8 for _ in range(2))
    return View(q, k + 5.0)


def means(x, rows):
    """float64 [batch, heads, blocks, headdim]."""
    return torch.stack([block.mean(2) for block in x.double().split(rows, 2)], 2)


def products(view, rows, columns=BLOCK):
    return means(view.q, rows) @ means(view.k, columns).mT / view.q.shape[3] ** 0.5


def shown(name, view, knob):
    """The blocks that a method picks, in blocks of its own."""
    rows, columns = METHODS[name].block
    return METHODS[name].select(view, knob).blocks[:, :, ::rows // BLOCK, ::columns // BLOCK]


def best(scores, count):
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, scores.topk(count).indices, True)


@pytest.mark.parametrize("name, rows", [("SLA", 64), ("VSA", 64), ("SpargeAttn, top-k", 128)])
@pytest.mark.parametrize("count", [1, 5, 14])
def test_the_best_share_of_each_rows_softmax_of_mean_products(view, name, rows, count):
    expected = best(products(view, rows).softmax(-1), count)
    assert torch.equal(shown(name, view, count / 14), expected)


def test_sparge_attns_mass_is_that_of_the_fewest_blocks(view):
    masses = products(view, 128).softmax(-1)
    seen = shown("SpargeAttn, cdf, none kept", view, 0.8)
    assert ((masses * seen).sum(-1) >= 0.8 - 1e-5).all()
    fewer = torch.stack([best(row, count - 1) if count > 1 else torch.zeros_like(row, dtype=torch.bool)
                         for row, count in zip(masses.flatten(0, 2), seen.sum(-1).flatten().tolist())])
    assert ((masses.flatten(0, 2) * fewer).sum(-1) < 0.8 + 1e-5).all()


def test_sparge_attn_keeps_blocks_of_unlike_rows_and_lets_them_see_all():
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 1, 8, 1, 64, generator=generator).expand(-1, -1, -1, 128, -1).flatten(2, 3).clone()
            for _ in range(2))  # of blocks of equal rows
    q[:, :, 256:384], k[:, :, 640:704] = (torch.randn(1, 1, rows, 64, generator=generator) for rows in (128, 64))
    seen = shown("SpargeAttn, cdf", View(q, k), 1e-4)
    assert seen[..., 2, :].all() and seen[..., :, 10].all()
    assert (seen.sum(-1)[..., [0, 1, 3, 4, 5, 6, 7]] <= 3).all()


def test_sol_attns_blocks_lie_above_the_mean_by_tau_deviations(view):
    scores = products(view, BLOCK)
    above = scores > scores.mean(-1, keepdim=True) + 0.5 * scores.std(-1, keepdim=True, correction=0)
    assert torch.equal(shown("Sol-Attn", view, -0.5), above)


@pytest.mark.parametrize("tokens", [264, 320])
def test_a_tail_is_exact_where_blocks_are_constant(tokens):
    """A last block of fewer keys is seen, whose mean would have another weight."""
    method = selections.METHODS["Sol-Attn"]
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 2, tokens, 64, generator=generator)
    k, v = (torch.randn(1, 2, 5, 64, generator=generator).repeat_interleave(64, 2)[:, :, :tokens] for _ in range(2))
    blocks = method.select(View(q, k), sum(method.knobs) / 2)
    assert blocks.blocks.float().mean() < 0.9
    found = method.attend(q, k, v, blocks)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    assert (found - expected).abs().sum() < 0.05 * expected.abs().sum()


def test_sub_blocks_score_is_the_log_sum_exp_of_the_products_of_quarters(view):
    parts = products(view, BLOCK // 4, BLOCK // 4)
    ragged = torch.nn.functional.pad(parts, [0, -parts.shape[3] % 4, 0, -parts.shape[2] % 4], value=-torch.inf)
    scores = ragged.unflatten(3, (-1, 4)).unflatten(2, (-1, 4)).exp().sum((3, 5))
    assert torch.equal(shown("SubBlock", view, 5 / 14), best(scores, 5))


@pytest.mark.parametrize("name", [name for name, method in METHODS.items()
                                  if method.group == "published" and method.causal])
def test_causal_calls_see_their_own_block_and_none_behind_it(view, name):
    causal = View(view.q, view.k, is_causal=True)
    rows, columns = METHODS[name].block
    seen, visible = shown(name, causal, METHODS[name].knobs[0]), causal.visible((rows, columns))
    assert seen[..., causal.diagonal((rows, columns))].all()
    assert not seen[..., ~visible].any()


@pytest.mark.parametrize("name", ["SLA", "SpargeAttn, top-k", "SpargeAttn, cdf, none kept", "Sol-Attn", "SubBlock"])
def test_a_knob_is_that_of_the_wanted_density(view, name):
    knob, found = selections.calibrate(METHODS[name], [view], 0.25)
    assert found == selections.density(METHODS[name].select(view, knob), view) == pytest.approx(0.25, abs=0.05)


# --- sparse_calls.py --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [64, 256, 256 + 30])
def test_means_in_torch_are_those_of_blocks_of_which_the_last_may_have_fewer_rows(tokens):
    x = torch.randn(2, 3, tokens, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    found = sparse_calls.means_in_torch(x)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), means(x, sparse_calls.BLOCK), rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("density", [0.5, 0.125, 0.01])
def test_the_choice_in_torch_is_of_the_blocks_with_the_best_scores(view, density):
    q, k = view.q.bfloat16(), selections.centred(view.k).bfloat16()
    scores = sparse_calls.means_in_torch(q) @ sparse_calls.means_in_torch(k).mT
    assert scores.shape[-2:] == (7, 7)
    seen = sparse_calls.in_torch(q, k, density)
    assert (seen.sum(-1) == max(1, int(7 * density))).all()
    assert (scores.masked_fill(~seen, torch.inf).amin(-1) >= scores.masked_fill(seen, -torch.inf).amax(-1)).all()


@pytest.mark.kernels("sm90")
def test_the_call_that_chooses_all_blocks_has_the_bits_of_the_dense_one(monkeypatch):
    monkeypatch.setenv("SAGE_AOT_EMULATE", "sm90")
    q, k, v = torch.randn(3, 1, 2, 256 + 30, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    ways = sparse_calls.calls(q, k, v, [0.5])
    assert list(ways) == ["dense", "cuDNN", "keep 1", "keep 0.5", "keep 0.5, tail"]
    assert torch.equal(ways["keep 1"](), ways["dense"]())
    assert torch.equal(ways["keep 0.5"](), sage_aot.attn(q, k, v, sparse=sage_aot.Sparse(keep=0.5)))
    assert not torch.equal(ways["keep 0.5"](), ways["dense"]())
