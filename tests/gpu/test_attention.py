"""Every attention kernel against float64, over everything that a caller may vary."""

from __future__ import annotations

import dataclasses
import math
import threading
import time

import pytest
import torch
from variants import (
    LEAST_COSINE,
    LSE_ERROR,
    SPECS,
    backend_of,
    each_padded,
    each_variant,
    library_of,
    own_specs,
    run,
)

import sage_aot
from sage_aot._backends.emulation.attention import attend
from sage_aot._backends.emulation.quantize import quantize
from sage_aot._call.backends import default_library, handing
from sage_aot._call.pipeline import prepare
from sage_aot._launch import plan as launch_plan
from sage_aot._problem.given import Given
from sage_aot._problem.mask import Mask
from sage_aot._problem.options import Options
from sage_aot._problem.sequences import Sequences
from sage_aot._tools.reference import INPUT_CLASSES, attention, inputs, measure

pytestmark = pytest.mark.gpu

CAUSAL = [spec for spec in SPECS if spec.mask == "causal"]
EDGES = [1, 17, 63, 64, 65, 127, 128, 129, 500, 1024, 4097]
LENGTHS = [(length, length) for length in EDGES]
LENGTHS += [(1, 300), (17, 63), (63, 64), (64, 65), (65, 17), (127, 128), (128, 129), (129, 127), (500, 1024),
            (1024, 500), (300, 1), (17, 4097), (4097, 63)]


def draw(spec, q_shape, kv_shape, kind="normal", dtype=torch.bfloat16, seed=0, headdim=None):
    """Inputs of a variant; shapes are (batch, heads, seq)."""
    headdim = headdim or spec.headdim
    return inputs(kind, (*q_shape, headdim), (*kv_shape, headdim), dtype,
                             torch.Generator("cuda").manual_seed(seed))


def expect(spec, q, k, v, **options):
    return attention(q, k, v, is_causal=spec.mask == "causal", **options)


def check(spec, result, reference, kind="normal", slack=1.0, lse_slack=1.0):
    """Assert that a result is close to `reference`. `slack`: factor on 1 - cosine, for problems too small to average.
    `lse_slack`: factor on the allowed error of the log-sum-exp."""
    out, lse = reference
    bound = 1 - slack * (1 - LEAST_COSINE[spec.qk, spec.pv, kind])
    assert result.out.isfinite().all()
    assert measure(result.out, out).cosine > bound
    seen = lse.isfinite()
    assert torch.equal(result.lse.isfinite(), seen) and (result.lse[~seen] == -math.inf).all()
    assert (result.lse - lse)[seen].abs().max() < lse_slack * LSE_ERROR[spec.qk, kind]
    rows_without_keys = result.out.masked_select(~seen[..., None])
    assert (rows_without_keys == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", INPUT_CLASSES)
@each_variant
def test_accuracy_against_float64(spec, kind, dtype):
    q, k, v = draw(spec, (2, 4, 2048), (2, 4, 2048), kind, dtype)
    check(spec, run(spec, q, k, v), expect(spec, q, k, v), kind)


@each_variant
def test_error_is_that_of_the_emulation(spec):
    q, k, v = draw(spec, (1, 4, 700), (1, 2, 900), "outlier", seed=4)
    result = run(spec, q, k, v)
    problem, kernels = result.plan.problem, result.plan.kernels
    quantized = quantize(problem, kernels, q.cpu(), k.cpu(), v.cpu())
    emulated, emulated_lse = attend(result.plan, quantized)
    reference, _ = expect(spec, q, k, v)
    kernel_error = measure(result.out, reference).relative_l1
    emulation_error = measure(emulated[:, :, :700].bfloat16().cuda(), reference).relative_l1
    assert kernel_error <= 1.05 * emulation_error + 1e-4
    assert measure(result.out, emulated[:, :, :700].cuda()).relative_l1 < 0.5 * emulation_error + 1e-3
    # The scores are the same. f16 P is summed after rounding, and by ex2.approx it may round the other way.
    bound = 5e-4 if spec.pv == "f16" else 1e-4
    assert (result.lse.cpu() - emulated_lse[:, :, :700]).abs().max() < bound


@pytest.mark.parametrize(("queries", "keys"), LENGTHS)
@each_variant
def test_lengths(spec, queries, keys):
    q, k, v = draw(spec, (2, 4, queries), (2, 2, keys), seed=queries + keys)
    check(spec, run(spec, q, k, v), expect(spec, q, k, v), slack=4.0)


@pytest.mark.parametrize("group", [1, 4, 8])
@each_variant
def test_grouped_heads(spec, group):
    q, k, v = draw(spec, (2, 8, 200), (2, 8 // group, 333), seed=group)
    check(spec, run(spec, q, k, v), expect(spec, q, k, v), slack=2.0)


# Of 9,000 keys, the mask's kernel takes several rounds.
@pytest.mark.parametrize(("keys", "splits"), [(60, 1), (700, 3), (9000, 1)])
@each_variant
def test_a_key_mask_is_the_call_on_the_keys_that_are_left(spec, keys, splits):
    q, k, v = draw(spec, (4, 4, 200), (4, 2, keys), "outlier", seed=keys)
    generator = torch.Generator("cuda").manual_seed(keys)
    mask = torch.rand(4, keys, generator=generator, device="cuda") < 0.5
    mask[1], mask[2], mask[2, keys // 2] = True, False, True
    mask[3, : keys // 3] = False
    found = run(spec, q, k, v, key_mask=mask, splits=splits)
    for b in range(4):
        own = [x[b:b + 1] for x in (q, k[:, :, mask[b]], v[:, :, mask[b]])]
        out, lse = found.out[b:b + 1], found.lse[b:b + 1]
        if spec.mask == "full":
            alone = run(spec, *own, splits=splits)
            assert torch.equal(out, alone.out) and torch.equal(lse, alone.lse)
            continue
        ranks = torch.nn.functional.pad(mask[b].cumsum(0), (1, 0))
        visible = Mask(is_causal=True).visible_keys(torch.arange(200, device="cuda"), 200, keys).packed(ranks)
        of_entry = dataclasses.replace(found, out=out, lse=lse)
        check(spec, of_entry, attention(*own, visible=visible), "outlier", slack=4.0)


@pytest.mark.parametrize("fewer", [0, 5])
@each_variant
def test_a_mask_of_the_first_keys_is_the_call_on_these(spec, fewer):
    """Causal calls are compared with a call that has as many fewer queries too. Only query tiles that are whole in both
    have the same bits."""
    q, k, v = draw(spec, (2, 4, 400), (2, 2, 700), seed=fewer)
    mask = torch.arange(700, device="cuda").expand(2, -1) < 700 - fewer
    found = run(spec, q, k, v, key_mask=mask, splits=1)
    rows, block_m = 400, found.plan.kernels.attn.tile.block_m
    if spec.mask == "causal" and fewer:
        q, rows = q[:, :, :-fewer], (400 - fewer) // block_m * block_m
    alone = run(spec, q, k[:, :, : 700 - fewer], v[:, :, : 700 - fewer], splits=1)
    assert rows and torch.equal(found.out[:, :, :rows], alone.out[:, :, :rows])
    assert torch.equal(found.lse[:, :, :rows], alone.lse[:, :, :rows])


@each_variant
def test_a_mask_without_keys_and_junk_behind_a_mask(spec):
    q, k, v = draw(spec, (2, 2, 300), (2, 2, 300), seed=1)
    mask = torch.zeros(2, 300, dtype=torch.bool, device="cuda")
    mask[1, 50:170] = True
    found = run(spec, q, k, v, key_mask=mask)
    assert not found.out[0].any() and (found.lse[0] == -math.inf).all()
    gone = ~mask[:, None, :, None]
    junk = run(spec, q, k.masked_fill(gone, math.nan), v.masked_fill(gone, math.inf), key_mask=mask)
    assert torch.equal(junk.out, found.out) and torch.equal(junk.lse, found.lse) and junk.out.isfinite().all()


QUERIES, KEYS = (200, 0, 1, 500, 64, 130, 0, 3), (130, 40, 0, 433, 700, 1, 0, 64)
"""Lengths of sequences. Some are shorter than a tile, some have no queries or no keys."""


@pytest.mark.parametrize(("group", "splits"), [(1, 1), (2, 3)])
@each_variant
def test_a_sequence_is_the_call_on_it_alone(spec, group, splits):
    qkv = draw(spec, (1, 4, sum(QUERIES)), (1, 4 // group, sum(KEYS)), "outlier", seed=group)
    q, k, v = (x[0].transpose(0, 1) for x in qkv)  # of strides that are not those of whole rows
    found = run(spec, q, k, v, sequences=Sequences.of_lengths(QUERIES, KEYS).to("cuda"), splits=splits)
    for out, lse, *own in zip(found.out.split(QUERIES), found.lse.split(QUERIES, 1), q.split(QUERIES), k.split(KEYS),
                              v.split(KEYS)):
        if not len(own[1]):
            assert not out.any() and (lse == -math.inf).all()
        elif len(out):
            alone = run(spec, *(x[None] for x in own), layout="NHD", splits=splits)
            assert torch.equal(out, alone.out[0]) and torch.equal(lse, alone.lse[0])


@each_variant
def test_sequences_are_cut_at_the_longest_said(spec):
    q, k, v = (x[0].transpose(0, 1) for x in draw(spec, (1, 2, 500), (1, 2, 700)))
    sequences = Sequences.of_lengths((300, 200), (400, 300)).to("cuda")
    found = run(spec, q, k, v, splits=1, sequences=sequences._replace(max_seqlen_q=250, max_seqlen_k=350))
    for first_q, first_k, queries, keys in ((0, 0, 250, 350), (300, 400, 200, 300)):
        own = q[first_q: first_q + queries], k[first_k: first_k + keys], v[first_k: first_k + keys]
        alone = run(spec, *(x[None] for x in own), layout="NHD", splits=1)
        assert torch.equal(found.out[first_q: first_q + queries], alone.out[0])
    assert found.out[250:300].isnan().all() and found.lse[:, 250:300].isnan().all()


@each_variant
def test_a_mask_that_batch_entries_share(spec):
    q, k, v = draw(spec, (3, 2, 200), (3, 2, 300), seed=3)
    mask = torch.rand(1, 300, device="cuda", generator=torch.Generator("cuda").manual_seed(3)) < 0.5
    shared, copied = (run(spec, q, k, v, key_mask=x) for x in (mask.expand(3, -1), mask.repeat(3, 1)))
    assert torch.equal(shared.out, copied.out) and torch.equal(shared.lse, copied.lse)


@each_padded(1, 32, 33, 40, 63, 65, 80, 96, 127, 129, 160, 192, 255)
def test_head_dims_are_padded(spec, headdim):
    q, k, v = draw(spec, (1, 2, 150), (1, 2, 150), seed=headdim, headdim=headdim)
    # At 4 bits a clip cuts off the largest channel, which is the whole row where there is one channel.
    slack, lse_slack = (18.0, 3.0) if spec.qk == "int4" and headdim == 1 else (6.0 if spec.qk == "int4" else 4.0, 1.0)
    check(spec, run(spec, q, k, v), expect(spec, q, k, v), slack=slack, lse_slack=lse_slack)


@pytest.mark.parametrize("headdim", ["whole", "odd"])
@each_variant
def test_f32_of_bf16_values_gives_the_same(spec, headdim):
    headdim = spec.headdim - (3 if headdim == "odd" else 0)
    q, k, v = draw(spec, (2, 4, 150), (2, 2, 333), "outlier", seed=7, headdim=headdim)
    expected, found = run(spec, q, k, v), run(spec, q.float(), k.float(), v.float())
    assert found.out.dtype == torch.float32 and torch.equal(found.out.bfloat16(), expected.out)
    assert not torch.equal(found.out, expected.out.float())
    assert torch.equal(found.lse, expected.lse)


@each_variant
def test_layouts_and_strides_agree_bit_for_bit(spec):
    q, k, v = draw(spec, (2, 4, 130), (2, 4, 130), seed=5)
    expected = run(spec, q, k, v)
    nhd = [t.transpose(1, 2).contiguous() for t in (q, k, v)]
    assert torch.equal(run(spec, *nhd, layout="NHD").out.transpose(1, 2), expected.out)
    fused = torch.stack([t.transpose(1, 2) for t in (q, k, v)], 2)  # [batch, seq, 3, heads, headdim]
    assert torch.equal(run(spec, *fused.unbind(2), layout="NHD").out.transpose(1, 2), expected.out)
    shifted = [torch.nn.functional.pad(t, (1, 2))[..., 1:-2] for t in (q, k, v)]  # rows at odd addresses
    assert all(t.data_ptr() % 16 for t in shifted)
    assert torch.equal(run(spec, *shifted).out, expected.out)
    wide = torch.full((2, 4, 130, spec.headdim + 3), torch.nan, dtype=q.dtype, device="cuda")
    run(spec, q, k, v, out=wide[..., 1:-2])
    assert torch.equal(wide[..., 1:-2], expected.out)
    assert wide[..., :1].isnan().all() and wide[..., -2:].isnan().all()


@each_variant
def test_scale_and_smoothing(spec):
    q, k, v = draw(spec, (1, 2, 200), (1, 2, 200), "outlier", seed=6)
    for scale in (0.0, 0.01, -0.02):
        check(spec, run(spec, q, k, v, scale=scale), expect(spec, q, k, v, scale=scale), "outlier", slack=2.0)
    reference, _ = expect(spec, q, k, v)
    smooth, raw = (measure(run(spec, q, k, v, smooth_k=flag).out, reference).relative_l1
                   for flag in (True, False))
    assert smooth < (0.8 if spec.q == "qraw" else 1.0) * raw  # smoothing Q alone has most of the gain


@each_variant
def test_rotation_takes_off_what_a_large_channel_costs(spec):
    q, k, v = draw(spec, (1, 2, 200), (1, 2, 700), seed=8)
    q[..., 3] *= 12.0
    k[..., 3] *= 12.0
    reference, _ = expect(spec, q, k, v)
    rotated, plain = (measure(run(spec, q, k, v, rotate=rotate).out, reference).relative_l1 for rotate in (True, False))
    assert rotated < 0.85 * plain


@each_variant
def test_v_of_zeros_constants_and_any_size(spec):
    q, k, v = draw(spec, (1, 2, 100), (1, 2, 300), seed=7)
    v[..., 0], v[..., 1] = 0.0, 3.0
    v[..., 2] *= 1e6
    v[..., 3] *= 1e-12
    result, (reference, _) = run(spec, q, k, v), expect(spec, q, k, v)
    assert result.out.isfinite().all() and (result.out[..., 0] == 0).all()
    least = 0.996 if spec.qk == "int8" else 0.95
    for channel in range(1, 5):
        assert measure(result.out[..., channel], reference[..., channel]).cosine > least


@each_variant
def test_a_constant_v_comes_back(spec):
    """Sums of P that divide O are cut off as O is: of few keys, of equal scores and of peaked ones."""
    for keys in (1, 3, 70, 500):
        for size in (0.0, 1.0, 30.0):
            q, k, v = draw(spec, (1, 2, keys), (1, 2, keys), dtype=torch.float32, seed=keys)
            out = run(spec, q * size, k, torch.full_like(v, -0.37)).out
            assert (out / -0.37 - 1.0).abs().max() <= (0.2 if spec.qk == "nvfp4" and spec.v == "vraw" else 1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@each_variant
def test_finite_inputs_give_finite_outputs(spec, dtype):
    """Elements near the largest that a dtype holds, of either sign, in q, in k, in v and in all."""
    generator = torch.Generator("cuda").manual_seed(3)
    for which in ("q", "k", "v", "qkv"):
        tensors = {}
        for name, x in zip("qkv", draw(spec, (1, 2, 150), (1, 2, 300), dtype=dtype)):
            share = torch.rand(x.shape, generator=generator, device="cuda") - 0.5
            largest = (share + share.sign() * 0.5) * torch.finfo(dtype).max
            tensors[name] = largest.to(dtype) if name in which else x
        result = run(spec, **tensors)
        seen = result.lse != -math.inf
        assert result.out.isfinite().all() and result.lse[seen].isfinite().all(), which


@each_variant
def test_values_whose_sum_is_beyond_f32(spec):
    q, k, v = draw(spec, (1, 2, 100), (1, 2, 300), seed=21)
    v[..., 2] = 1e38
    result, (reference, _) = run(spec, q, k, v), expect(spec, q, k, v)
    assert result.out.isfinite().all() and ((result.out[..., 2] / reference[..., 2] - 1).abs() < 0.1).all()
    assert measure(result.out[..., 3:], reference[..., 3:]).cosine > (0.996 if spec.qk == "int8" else 0.95)


@each_variant
def test_equal_keys_leave_the_log_sum_exp_exact(spec):
    """Smoothing leaves zeros of K: a score is then row_bias alone, the query times K's mean, in f32."""
    q, k, v = draw(spec, (2, 4, 300), (2, 2, 300), seed=22)
    k = (5 * k[:, :, :1]).expand_as(k).contiguous()
    result, (_, lse) = run(spec, q, k, v), expect(spec, q, k, v)
    folding = 0.0 if spec.pv == "f16" else 2.0**-7 * math.log(2.0)  # attn/mma/softmax.cuh: the rounding of P's constant
    assert ((result.lse - lse).abs() <= 2e-5 + 1e-5 * lse.abs() + folding).all()
    assert (run(spec, q, k, v, smooth_k=False).lse - lse).abs().max() > 1e-2


@pytest.mark.parametrize("value", [math.nan, math.inf])
@each_variant
def test_a_query_that_is_not_finite_spoils_its_own_row_only(spec, value):
    q, k, v = draw(spec, (1, 1, 200), (1, 1, 200), seed=8)
    q[0, 0, 139, 5] = value
    result = run(spec, q, k, v)
    spoilt = torch.arange(200, device="cuda") == 139
    assert torch.equal(result.out[0, 0].isnan(), spoilt[:, None].expand(200, spec.headdim))
    assert torch.equal(result.lse[0, 0].isnan(), spoilt) and result.lse[0, 0, ~spoilt].isfinite().all()


@pytest.mark.parametrize("spec", CAUSAL, ids=[spec.name for spec in CAUSAL])
def test_a_query_that_is_not_finite_and_sees_no_key_is_as_any_other(spec):
    q, k, v = draw(spec, (1, 1, 100), (1, 1, 70), seed=20)
    q[0, 0, 7, 5] = math.nan
    result = run(spec, q, k, v)
    assert (result.out[0, 0, :30] == 0).all() and (result.lse[0, 0, :30] == -math.inf).all()
    assert result.out.isfinite().all() and result.lse[0, 0, 30:].isfinite().all()


@pytest.mark.parametrize("size", [40.0, 150.0, 300.0, 3e4, 3e8, 1e15])
@each_variant
def test_logits_of_any_size(spec, size):
    """Queries that equal their keys, far apart: each row picks one value, at its full size.

    Scores reach a million, where f32 has steps of a sixteenth, and from there on any size up to 1e31.
    """
    q, _, v = draw(spec, (1, 2, 200), (1, 2, 200), seed=16)
    q = (q.float() * size).bfloat16()
    result, (reference, _) = run(spec, q, q, v), expect(spec, q, q, v)
    ratio = result.out.double().norm(dim=-1) / reference.norm(dim=-1)
    assert result.out.isfinite().all()
    assert measure(result.out, reference).cosine > 0.999
    assert 0.9 < ratio.min() and ratio.max() < 1.1


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("smooth_k", [True, False])
@each_variant
def test_a_key_that_is_not_finite_spoils_the_rows_that_see_it(spec, smooth_k, value):
    q, k, v = draw(spec, (1, 1, 200), (1, 1, 200), seed=17)
    k[0, 0, 187, 5] = value  # not among the first that a lane reads of its tile
    result = run(spec, q, k, v, smooth_k=smooth_k)
    first_row = 187 if spec.mask == "causal" else 0
    assert result.out[0, 0, first_row:].isnan().all() and result.out[0, 0, :first_row].isfinite().all()
    assert torch.equal(result.lse[0, 0].isnan(), torch.arange(200, device="cuda") >= first_row)


@pytest.mark.parametrize("value", [math.nan, -math.inf])
@each_variant
def test_a_value_that_is_not_finite_spoils_its_channel_of_the_rows_that_see_it(spec, value):
    q, k, v = draw(spec, (1, 2, 200), (1, 2, 200), seed=19)
    reference, _ = expect(spec, q, k, v)
    v[0, 1, 131, 5] = v[0, 1, 170, 5] = value
    result = run(spec, q, k, v)
    spoilt = torch.zeros_like(result.out, dtype=torch.bool)
    spoilt[0, 1, 131 if spec.mask == "causal" else 0:, 5] = True
    assert torch.equal(result.out.isnan(), spoilt) and result.lse.isfinite().all()
    assert measure(result.out[~spoilt], reference[~spoilt]).cosine > (0.99 if spec.qk == "int8" else 0.95)


@pytest.mark.parametrize("splits", [2, 7])
@each_variant
def test_blocks_share_the_keys_of_a_query_tile(spec, splits):
    q, k, v = draw(spec, (2, 4, 300), (2, 2, 1100), "outlier", seed=splits)
    found, expected = run(spec, q, k, v, splits=splits), expect(spec, q, k, v)
    assert found.plan.splits == splits
    check(spec, found, expected, "outlier", slack=2.0)

    def without_lse(splits):
        out, given = torch.full_like(q, torch.nan), Given("dense", q, k, v)
        prepare(backend_of(spec.arch, splits), given, found.plan.problem.options, out).run(given, out, None)
        return out

    if spec.p == "linear":  # by exponentials with a log-sum-exp alone
        split, whole = (measure(without_lse(n), expected[0]).relative_l1 for n in (splits, 1))
        assert split < 1.02 * whole and not torch.equal(without_lse(splits), found.out)
    else:
        assert torch.equal(without_lse(splits), found.out)


@pytest.mark.parametrize("queries", [1, 100])
@each_variant
def test_the_keys_of_few_queries_are_split(spec, queries):
    """The number of splits is this GPU's; the error is held against that of a call that splits nothing."""
    q, k, v = draw(spec, (1, 4, queries), (1, 2, 9000))
    found, reference = run(spec, q, k, v), expect(spec, q, k, v)
    assert found.plan.splits > 4
    whole = measure(run(spec, q, k, v, splits=1).out, reference[0]).relative_l1
    assert measure(found.out, reference[0]).relative_l1 < 1.1 * whole


@pytest.mark.parametrize("splits", [1, 5])
@each_variant
def test_runs_are_equal_bit_for_bit_and_inputs_unchanged(spec, splits):
    tensors = draw(spec, (2, 4, 777), (2, 2, 1333), "outlier", seed=9)
    before = [t.clone() for t in tensors]
    first = run(spec, *tensors, splits=splits)
    for _ in range(5):
        again = run(spec, *tensors, splits=splits)
        assert torch.equal(again.out, first.out) and torch.equal(again.lse, first.lse)
    assert all(torch.equal(t, b) for t, b in zip(tensors, before))


BIASED = [spec for spec in SPECS if (spec.v, spec.pv, spec.qk) == ("vsmooth", "e4m3", "int8")]
"""f16 V̂ holds a biased V as it is, and at 4 bits Q and K err more: there is less to gain."""

FOUR_BITS = [spec for spec in SPECS if (spec.qk, spec.q) == ("int4", "qsmooth")]


@pytest.mark.parametrize("spec", BIASED, ids=[spec.name for spec in BIASED])
def test_smoothing_v_halves_the_error_of_a_biased_v(spec):
    q, k, v = draw(spec, (1, 4, 1000), (1, 4, 1000), dtype=torch.float16, seed=23)
    v += 8.0
    reference, _ = expect(spec, q, k, v)
    smooth, raw = (measure(run(variant, q, k, v).out, reference).relative_l1
                   for variant in (spec, dataclasses.replace(spec, v="vraw")))
    assert smooth < 0.5 * raw


@pytest.mark.parametrize("spec", FOUR_BITS, ids=[spec.name for spec in FOUR_BITS])
def test_4_bits_need_smoothing(spec):
    q, k, v = draw(spec, (1, 4, 1000), (1, 4, 1000), "outlier", seed=24)
    reference, _ = expect(spec, q, k, v)
    smooth = measure(run(spec, q, k, v).out, reference)
    raw = measure(run(dataclasses.replace(spec, q="qraw"), q, k, v, smooth_k=False).out, reference)
    assert smooth.cosine > LEAST_COSINE["int4", spec.pv, "outlier"] and smooth.relative_l1 < 0.5 * raw.relative_l1


SMOOTH_Q = [spec for spec in SPECS if spec.q == "qsmooth"]


@pytest.mark.parametrize("spec", SMOOTH_Q, ids=[spec.name for spec in SMOOTH_Q])
def test_heads_that_take_turns_for_delta_s_come_out_the_same(spec, monkeypatch):
    q, k, v = draw(spec, (2, 4, 300), (2, 2, 400), seed=25)
    expected = run(spec, q, k, v)
    tile = expected.plan.kernels.attn.tile
    head_bytes = 4 * expected.plan.q_tiles * expected.plan.kv_tiles * tile.block_n
    monkeypatch.setattr(launch_plan, "DELTA_BYTES", 3 * head_bytes)
    result = run(spec, q, k, v)
    assert expected.plan.heads_at_once == 8 and result.plan.heads_at_once == 3
    assert torch.equal(result.out, expected.out) and torch.equal(result.lse, expected.lse)


@pytest.mark.parametrize("splits", [1, 3])
@each_variant
def test_graph_capture_and_replay(spec, splits):
    q, k, v = draw(spec, (1, 2, 200), (1, 2, 300), seed=10)
    expected = run(spec, q, k, v, splits=splits)
    out = torch.full_like(q, torch.nan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(spec, q, k, v, out=out, splits=splits)
    assert out.isnan().all()  # captured, not run
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected.out)


@pytest.mark.parametrize("splits", [1, 3])
@each_variant
def test_a_side_stream_is_honoured(spec, splits):
    q, k, v = draw(spec, (2, 8, 1000), (2, 8, 1000), seed=12)
    expected = run(spec, q, k, v, splits=splits).out
    stream = torch.cuda.Stream()
    late = torch.zeros_like(q)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(30_000_000)  # anything on another stream would read `late` before it is written
        late.copy_(q)
        out = run(spec, late, k, v, splits=splits).out
        assert torch.cuda.current_stream() == stream
    stream.synchronize()
    assert torch.equal(out, expected)


@pytest.mark.parametrize("splits", [1, 3])
@each_variant
def test_other_threads_get_the_same(spec, splits):
    """Threads call at the same time, each on its own stream."""
    q, k, v = draw(spec, (1, 4, 500), (1, 4, 500), seed=13)
    expected = run(spec, q, k, v, splits=splits).out
    found: list[torch.Tensor] = []
    torch.cuda.synchronize()

    def work() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            found.append(run(spec, q, k, v, splits=splits).out)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert len(found) == 4 and all(torch.equal(out, expected) for out in found)


# --- the public call, with this GPU's own kernels ---------------------------------------------------------------------

OWN = own_specs()
each_own = pytest.mark.parametrize("spec", OWN, ids=[spec.name for spec in OWN])


def options(spec):
    """Arguments with which the call runs a variant."""
    return vars(Options.of_axes(spec.values))


@each_own
def test_attn_runs_the_kernels_of_this_gpu(spec):
    q, k, v = draw(spec, (2, 4, 300), (2, 2, 400), seed=11)
    expected = run(spec, q, k, v)
    out, lse = sage_aot.attn(q, k, v, **options(spec), return_lse=True)
    assert torch.equal(out, expected.out) and torch.equal(lse, expected.lse)
    assert library_of(spec.arch) is default_library()


def test_nothing_synchronizes_and_the_device_stays():
    q, k, v = draw(OWN[0], (1, 4, 500), (1, 4, 500))
    sage_aot.attn(q, k, v)
    torch.cuda.synchronize()
    device = torch.cuda.current_device()
    torch.cuda._sleep(1_000_000_000)  # half a second of work ahead of the call
    began = time.perf_counter()
    sage_aot.attn(q, k, v, return_lse=True)
    assert time.perf_counter() - began < 0.1
    assert torch.cuda.current_device() == device


def test_offsets_beyond_32_bits():
    """Heads that lie 2^31 and 2^32 elements apart."""
    headdim, seqlen = 64, 100
    storage = torch.empty(2**32 + 2**20, dtype=torch.bfloat16, device="cuda")
    far = torch.as_strided(storage, (1, 3, seqlen, headdim), (0, 2**31, headdim, 1))
    q, k, v = draw(OWN[0], (1, 3, seqlen), (1, 3, seqlen), seed=14, headdim=headdim)
    far.copy_(q)
    expected = sage_aot.attn(q, k, v)
    assert torch.equal(sage_aot.attn(far, k, v), expected)
    far.copy_(k)
    assert torch.equal(sage_aot.attn(q, far, v), expected)
    far.copy_(v)
    assert torch.equal(sage_aot.attn(q, k, far), expected)
    assert torch.equal(sage_aot.attn(q, k, v, out=far), expected)


def test_quantized_tensors_beyond_32_bits():
    """q_hat alone has more than 2^31 bytes, and so have K and V. The last heads must come out as in a call of their
    own."""
    heads, last = 2**14 + 24, slice(2**14 - 8, None)
    q, k, v = (torch.empty(1, heads, 1024, 128, dtype=torch.bfloat16, device="cuda").normal_(
        generator=torch.Generator("cuda").manual_seed(seed)) for seed in range(3))
    out, lse = sage_aot.attn(q, k, v, return_lse=True)
    with handing(backend_of(OWN[0].arch, splits=1)):  # as the call with all heads has it
        expected, expected_lse = sage_aot.attn(q[:, last], k[:, last], v[:, last], return_lse=True)
    assert torch.equal(out[:, last], expected) and torch.equal(lse[:, last], expected_lse)


def test_delta_s_beyond_32_bits():
    """One head whose delta_s has more than 2^31 elements. The last query tiles must come out as in a call of their own.
    """
    seqlen, last = 2**19 + 2048, slice(-2048, None)
    q, k, v = draw(OWN[0], (1, 1, seqlen), (1, 1, seqlen), seed=26, headdim=128)
    out, lse = sage_aot.attn(q, k, v, smooth_q=True, return_lse=True)
    with handing(backend_of(OWN[0].arch, splits=1)):  # as the call with all queries has it
        expected, expected_lse = sage_aot.attn(q[:, :, last], k, v, smooth_q=True, return_lse=True)
    assert torch.equal(out[:, :, last], expected) and torch.equal(lse[:, :, last], expected_lse)


def test_more_heads_than_a_grid_dimension_holds():
    q, k, v = draw(OWN[0], (2, 40000, 3), (2, 40000, 5), seed=15, headdim=64)
    out = sage_aot.attn(q, k, v)
    expected, _ = attention(q, k, v)
    assert measure(out, expected).cosine > 0.999


if torch.cuda.device_count() > 1:
    @pytest.mark.parametrize("other", range(1, torch.cuda.device_count()))
    @each_own
    def test_tensors_of_another_device_than_the_current_one(spec, other):
        q, k, v = draw(spec, (1, 4, 300), (1, 4, 300), seed=18)
        expected = run(spec, q, k, v).out
        there = [tensor.to(f"cuda:{other}") for tensor in (q, k, v)]
        assert torch.cuda.current_device() == 0
        out, _ = sage_aot.attn(*there, **options(spec), return_lse=True)  # as run() does: no P is linear
        assert torch.cuda.current_device() == 0
        assert torch.equal(out.cpu(), expected.cpu())
