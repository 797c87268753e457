"""Keys that several blocks share, in the emulation: the same attention, whatever the number of splits."""

from __future__ import annotations

import math

import pytest
import torch

import sage_aot
from sage_aot._backends.emulation.attention import _splits
from sage_aot._backends.emulation.backend import EmulationBackend
from sage_aot._call.backends import backend_of, default_library, handing
from sage_aot._call.pipeline import plan_of
from sage_aot._kernels.tile import Tile
from sage_aot._problem.check import check
from sage_aot._problem.given import Given
from sage_aot._problem.mask import VisibleKeys
from sage_aot._problem.options import Options

SPLITS = (2, 3, 40)  # the last: more than there are KV tiles


def draw(q_shape, kv_shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).bfloat16() for shape in (q_shape, kv_shape, kv_shape)]


def attn(arch, splits, *tensors, return_lse=True, **options):
    with handing(EmulationBackend(default_library().manifest, arch, splits)):
        return sage_aot.attn(*tensors, return_lse=return_lse, **options)


def float64(q, k, v, is_causal=False):
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = q.double() @ k.transpose(2, 3) / q.shape[-1] ** 0.5
    if is_causal:
        seen = torch.ones(scores.shape[-2:]).tril(scores.shape[-1] - scores.shape[-2]).bool()
        scores = scores.masked_fill(~seen, -torch.inf)
    return scores.softmax(-1).nan_to_num(0.0) @ v, scores.logsumexp(-1)


@pytest.mark.parametrize("splits", SPLITS)
@pytest.mark.parametrize("options", [
    {}, {"is_causal": True}, {"smooth_q": True, "smooth_v": True, "is_causal": True}], ids=str)
@pytest.mark.parametrize("arch", ["sm80", "sm89", "sm90"])
def test_splits_change_the_rounding_alone(arch, options, splits):
    tensors = [x.float() for x in draw((1, 4, 150, 64), (1, 2, 700, 64), seed=splits)]  # f32 shows each rounding
    out, lse = attn(arch, splits, *tensors, **options)
    whole, whole_lse = attn(arch, 1, *tensors, **options)
    reference, reference_lse = float64(*tensors, options.get("is_causal", False))
    error, error_of_whole = ((x.double() - reference).norm() / reference.norm() for x in (out, whole))
    assert error < 1.1 * error_of_whole + 1e-4
    assert not torch.equal(out, whole)
    torch.testing.assert_close(lse, whole_lse, rtol=0, atol=2e-5)
    assert (lse - reference_lse).abs().max() < 0.05


@pytest.mark.parametrize("splits", SPLITS)
@pytest.mark.parametrize("arch", ["sm89", "sm90"])
def test_a_linear_p_stays_so_where_keys_are_split(arch, splits):
    """Every other key has a score 0.3 octaves below the others', where a line and an exponential round differently."""
    q, k, v = torch.zeros(1, 1, 150, 64), torch.zeros(1, 1, 700, 64), torch.zeros(1, 1, 700, 64)
    q[..., 0], k[..., ::2, 0], k[..., 1::2, 0], v[..., ::2, :] = 1.0, 0.5, -0.5, 1.0
    call = {"scale": 0.3 * math.log(2.0), "return_lse": False}
    split, whole = (attn(arch, n, q, k, v, **call) for n in (splits, 1))
    exact = attn(arch, splits, q, k, v, p="exp2", **call)
    assert (split - whole).abs().max() < 1e-4
    assert (whole - 448 / (448 + 384)).abs().max() < 0.01  # V is rounded, too
    assert (exact - 448 / (448 + 352)).abs().max() < 0.01


@pytest.mark.parametrize("splits", SPLITS)
def test_rows_without_keys_and_values_that_are_not_finite_are_those_of_a_whole_call(splits):
    q, k, v = draw((1, 2, 300, 64), (1, 2, 200, 64))  # causal: the first 100 queries see no key
    q[0, 0, 50], q[0, 0, 150], k[0, 1, 180], v[0, 0, 20, 7] = torch.nan, torch.inf, torch.nan, torch.inf
    out, lse = attn("sm90", splits, q, k, v, is_causal=True)
    whole, whole_lse = attn("sm90", 1, q, k, v, is_causal=True)
    assert torch.equal(out.isnan(), whole.isnan()) and torch.equal(lse.isnan(), whole_lse.isnan())
    assert not out[:, :, :100].any() and (lse[:, :, :100] == -torch.inf).all()


def test_masked_keys_and_sequences_are_split_too():
    q, k, v = draw((2, 2, 40, 64), (2, 2, 500, 64))
    mask = torch.rand(2, 500, generator=torch.Generator().manual_seed(1)) < 0.4
    masked, _ = attn("sm90", 3, q, k, v, key_mask=mask)
    for b in range(2):
        alone, _ = attn("sm90", 3, q[b:b + 1], k[b:b + 1, :, mask[b]], v[b:b + 1, :, mask[b]])
        assert torch.equal(masked[b:b + 1], alone)
    begins = torch.tensor([0, 30, 40], dtype=torch.int32), torch.tensor([0, 100, 500], dtype=torch.int32)
    of_sequences = [x[0].transpose(0, 1) for x in (q, k, v)]
    with handing(EmulationBackend(default_library().manifest, "sm90", 3)):
        out, _ = sage_aot.attn_varlen(*of_sequences, *begins, 30, 400, return_lse=True)
    for rows, keys in ((slice(0, 30), slice(0, 100)), (slice(30, 40), slice(100, 500))):
        alone, _ = attn("sm90", 3, q[:1, :, rows], k[:1, :, keys], v[:1, :, keys])
        assert torch.equal(out[rows], alone[0].transpose(0, 1))


def test_each_query_tile_shares_its_own_keys_in_whole_tiles():
    """Two query tiles of four rows, of which the second sees one more KV tile of ten keys; three splits."""
    visible = VisibleKeys(torch.zeros(8, dtype=torch.int64), torch.tensor([20, 21, 22, 23, 41, 42, 43, 44]))
    of_splits = [[(int(b), int(e)) for b, e in zip(*own.visible)] for own in _splits(visible, Tile(4, 10, 4, 2, 1), 3)]
    assert [own[0] for own in of_splits] == [(0, 10), (10, 20), (20, 20)]
    assert [own[3] for own in of_splits] == [(0, 10), (10, 20), (20, 23)]
    assert [own[7] for own in of_splits] == [(0, 20), (20, 40), (40, 44)]


def test_cpu_tensors_split_nothing():
    q, k, v = draw((1, 1, 1, 64), (1, 1, 4000, 64))
    backend = backend_of(q)
    problem = check(Given("dense", q, k, v), Options())
    assert plan_of(backend, problem, -1).splits == 1
