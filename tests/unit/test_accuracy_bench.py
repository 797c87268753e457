"""The emulator of bench/, from which the accuracy tables come. For the kernels' own methods it must equal their
emulation."""

from __future__ import annotations

import itertools
import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import accuracy
import accuracy_tables
import emulator
from emulator import GROUPS, ROUNDING, Method, Sizes
from sage_aot._backends.emulation.backend import EmulationBackend
from sage_aot._call import pipeline
from sage_aot._call.backends import default_library
from sage_aot._cli import demo_inputs
from sage_aot._kernels.manifest import KernelRecord
from sage_aot._problem.given import Given
from sage_aot._tools import reference
from sage_aot._tools.reference import Accuracy
from sage_aot.errors import ArgumentError, UnsupportedError

pytestmark = pytest.mark.kernels("sm80", "sm89", "sm90", "sm120")
SIZES = Sizes(block_m=128, block_n=64, warp_m=32, row_groups=32, key_groups=4)
F16 = {"pv": "f16", "accumulator": "f32"}


def quantizer() -> KernelRecord:
    return default_library().manifest.kernels["sage_quant_sm89_d64_qkint8_pve4m3"]


def draw(kind="outlier", q_shape=(1, 4, 300, 64), kv_shape=(1, 2, 390, 64)):
    return reference.inputs(kind, q_shape, kv_shape, torch.bfloat16, torch.Generator().manual_seed(1))


def error(method, qkv, **flags):
    return reference.measure(emulator.attention(method, default_library(), *qkv, **flags),
                              reference.attention(*qkv, **flags)[0]).relative_l1


# --- the kernels' own methods -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("arch", "method"), [
    ("sm89", Method(statistics="sample")),
    ("sm89", Method(smoothing="", statistics="sample")),
    ("sm89", replace(accuracy_tables.OURS[4], smooth_v=True, statistics="sample")),
    ("sm80", replace(accuracy_tables.OURS[4], statistics="sample", **F16)),
    ("sm80", replace(accuracy_tables.OURS[4], smoothing="k", rotate=False, statistics="sample", **F16)),
    ("sm89", replace(accuracy_tables.OURS[8], rotate=True, statistics="sample")),
    ("sm80", Method(smooth_v=True, statistics="sample", **F16)),
], ids=str)
@pytest.mark.parametrize("headdim", [32, 128])
def test_equals_the_kernels_emulation(arch, method, headdim, is_causal):
    q, k, v = draw(q_shape=(1, 4, 300, headdim), kv_shape=(1, 2, 390, headdim))
    backend, options = EmulationBackend(default_library().manifest, arch), method.options(is_causal=is_causal)
    expected = torch.full(q.shape, torch.nan)
    given = Given("dense", q, k, v)
    pipeline.prepare(backend, given, options).run(given, expected, None)  # f32, before it is rounded
    assert torch.equal(emulator.attention(method, default_library(), q, k, v, is_causal=is_causal), expected)


def facts_of(kind, **axes):
    """The facts of the package's kernels with these values on their axes."""
    records = default_library().manifest.kernels.values()
    found = [record.facts for record in records
             if record.spec.kind == kind and axes.items() <= record.spec.values.items()]
    assert found
    return found


@pytest.mark.parametrize(("pv", "pv_accum", "ranges"), [
    ("f16", "f32", emulator.RANGES["f16"]), ("e4m3", "two_level_f32", emulator.RANGES["e4m3"]),
    ("e4m3", "f32", emulator.RANGES["e4m3"]), ("e4m3", "two_level_f16", emulator.RANGE_F16_ACCUMULATOR)])
def test_ranges_are_those_of_the_kernels(pv, pv_accum, ranges):
    for facts in facts_of("attn", pv=pv, pv_accum=pv_accum):
        assert 2.0 ** facts["p_top"] == pytest.approx(ranges.p)
        assert ranges.v in (None, facts["v_limit"])  # in f16 the published method has no range


@pytest.mark.parametrize("method", [
    Method(bits=4, smoothing="qk", smooth_v=True, transform="hadamard", clip=0.8),
    Method(transform="smooth_attn", granularity="tensor", pv="int8", accumulator="f32"),
    Method(granularity="token", accumulator="single"),
    Method(granularity="block", accumulator="two_level_f16"),
], ids=str)
def test_everything_is_made_where_the_inputs_are(method):
    case = accuracy_tables.Case("s", "c", True, [draw()])
    expected = emulator.attention(method, default_library(), *case.draws[0], is_causal=True)
    with torch.device("meta"):  # where tensors go that are made without a word about it: operations with them fail
        assert torch.equal(emulator.attention(method, default_library(), *case.draws[0], is_causal=True), expected)
        assert accuracy_tables.traits(case, default_library(), torch.device("cpu")).per_token < 1


# --- before quantization ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transform", ["smooth_attn", "hadamard"])
def test_transforms_keep_the_scores(transform):
    q, k, _ = (x.double().float() for x in draw(kv_shape=(1, 4, 390, 64)))
    new_q, new_k = emulator.TRANSFORMS[transform](q, k)
    scores = q.double() @ k.double().transpose(2, 3)
    assert (new_q.double() @ new_k.double().transpose(2, 3) - scores).abs().max() < 2e-6 * scores.abs().max()
    assert (new_q - q).abs().max() > 1.0


def test_hadamard_is_orthogonal_with_equal_entries():
    for size in (32, 64, 128):
        matrix = emulator.random_hadamard(size).double()
        assert (matrix.abs() - size**-0.5).abs().max() < 1e-7
        assert (matrix @ matrix.T - torch.eye(size)).abs().max() < 1e-6
    with pytest.raises(ArgumentError, match="96"):
        emulator.random_hadamard(96)


def test_rotation_spreads_a_channel_that_stands_out():
    q = torch.zeros(1, 1, 4, 64)
    q[..., 9] = 8.0
    rotated, _ = emulator.rotate(q, q)
    assert (rotated.abs() - 1.0).abs().max() < 1e-6


def test_smooth_attn_splits_each_channels_range_evenly():
    q, k, _ = (x.float() for x in draw())  # two heads of q to each of k
    k[..., 11] = 0.0
    new_q, new_k = emulator.smooth_attn(q, k)
    q_range = new_q.view(1, 2, 2, 300, 64).abs().amax((2, 3))
    assert torch.equal(new_q[..., 11], q[..., 11])
    others = [channel for channel in range(64) if channel != 11]
    torch.testing.assert_close(q_range[..., others], new_k.abs().amax(2)[..., others])


# --- quantization -----------------------------------------------------------------------------------------------------


def quantized(x, side, granularity, bits=4):
    groups = GROUPS[granularity][side](x.shape[2], SIZES)
    return *emulator.quantize_rows(x, groups, Method(bits=bits), quantizer()), groups


def test_groups_of_each_granularity():
    counts = {name: tuple(len(groups(256, SIZES).unique()) for groups in GROUPS[name]) for name in GROUPS}
    assert counts == {"token": (256, 256), "kernel": (256, 16), "thread": (64, 16), "block": (2, 4), "tensor": (1, 1)}
    q_groups, k_groups = (groups(256, SIZES) for groups in GROUPS["thread"])
    assert (q_groups == q_groups[41]).nonzero().flatten().tolist() == [33, 41, 49, 57]
    assert (k_groups == k_groups[66]).nonzero().flatten().tolist() == sorted([*range(66, 128, 8), *range(67, 128, 8)])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("granularity", GROUPS)
def test_every_group_fills_its_range_and_rounds_to_nearest(granularity, bits):
    q, k, _ = (x.float() for x in draw(q_shape=(1, 2, 256, 64), kv_shape=(1, 2, 256, 64)))
    for side, x in enumerate((q, k)):
        integers, scale, groups = quantized(x, side, granularity, bits)
        largest = torch.zeros(1, 2, int(groups.max()) + 1).scatter_reduce_(
            2, groups.expand(1, 2, -1), integers.abs().amax(-1), "amax")
        assert (largest == 2 ** (bits - 1) - 1).all()
        assert torch.equal(integers, integers.round())
        assert ((integers * scale[..., None] - x).abs() <= 0.5001 * scale[..., None]).all()


def test_clipping_narrows_the_range_of_each_group():
    x = torch.tensor([[7.0, -5.0, 2.9], [14.0, 3.0, -14.0]])[None, None]
    method = Method(bits=4, clip=0.5)
    integers, scale = emulator.quantize_rows(x, torch.arange(2), method, quantizer())
    assert scale.flatten().tolist() == [0.5, 1.0]
    assert integers[0, 0].tolist() == [[7.0, -8.0, 6.0], [7.0, 3.0, -8.0]]


def test_finer_granularity_is_never_worse_on_outliers():
    q, k, _ = (x.float() for x in draw(q_shape=(1, 2, 512, 64), kv_shape=(1, 2, 512, 64)))
    for side, x in enumerate((q, k)):
        for bits in (4, 8):
            results = [quantized(x, side, name, bits) for name in ("token", "thread", "block", "tensor")]
            for (fine, fine_scale, _), (coarse, coarse_scale, _) in itertools.pairwise(results):
                assert (fine_scale <= coarse_scale).all() and (fine_scale < coarse_scale).any()
                finer, coarser = ((integers * scale[..., None] - x).square().mean()
                                  for integers, scale in ((fine, fine_scale), (coarse, coarse_scale)))
                assert finer <= coarser


def test_granularity_reaches_the_output():
    qkv = draw(q_shape=(1, 2, 512, 64), kv_shape=(1, 2, 512, 64))
    errors = [error(Method(bits=4, smoothing="qk", granularity=name, **F16), qkv) for name in GROUPS]
    assert all(finer < coarser for finer, coarser in itertools.pairwise(errors))


@pytest.mark.parametrize(("pv", "values"), [
    ("int8", {0.5: 0.0, 1.5: 2.0, -2.5: -2.0, 126.6: 127.0, 300.0: 127.0, -300.0: -127.0}),
    ("e5m2", {1.125: 1.0, 1.375: 1.5, 60000.0: 57344.0, -1e9: -57344.0, 2.0**-17: 0.0, 2.0**-16: 2.0**-16}),
    ("e4m3", {1.0625: 1.0, 1.1875: 1.25, 500.0: 448.0, -1e9: -448.0, 2.0**-10: 0.0, 2.0**-9: 2.0**-9}),
    ("f16", {1.0 + 2.0**-11: 1.0, 1.0 + 3 * 2.0**-11: 1.0 + 2.0**-9, 2.0**-24: 2.0**-24}),
])
def test_types_round_to_nearest_even_and_saturate(pv, values):
    assert ROUNDING[pv](torch.tensor(list(values))).tolist() == list(values.values())


@pytest.mark.parametrize(("method", "limit"), [
    (Method(pv="int8", accumulator="f32"), 127.0),
    (Method(pv="e5m2"), 57344.0),
    (Method(), 448.0),
    (Method(accumulator="two_level_f16"), 4.5),
], ids=str)
def test_v_fills_its_range_per_channel(method, limit):
    v = draw(kv_shape=(1, 2, 390, 64))[2].float()
    v[..., 3] = 0.0
    stored, scale = emulator.quantize_v(v, method, quantizer())
    largest = stored.abs().amax(2)
    assert (largest[..., 3] == 0).all() and (scale[..., 3] == 1).all()
    assert (torch.cat([largest[..., :3], largest[..., 4:]], -1) == limit).all()
    assert (stored * scale[:, :, None] - v).abs().max() < 0.13 * v.abs().max()


# --- accumulators -----------------------------------------------------------------------------------------------------


def accumulated(accumulator, start, *products):
    """start + Σ products, one per matrix product of 32 keys."""
    p = torch.zeros(1, 1, 1, 32 * len(products))
    p[..., ::32] = torch.tensor(products)
    return emulator.accumulate(torch.full((1, 1, 1, 1), start), p, torch.ones(1, 1, p.shape[-1], 1), accumulator).item()


def test_what_accumulators_keep():
    small = 2.0**-14
    assert accumulated("f32", 1.0, small, small) == 1.0 + 2 * small
    assert accumulated("two_level", 1.0, small, small) == 1.0 + 2 * small  # in f32, fresh per tile
    assert accumulated("two_level", 0.0, 1.0, small) == 1.0
    assert accumulated("single", 1.0, small, small) == 1.0
    assert accumulated("single", 1.0 + small, small) == 1.0  # cut when read, not only when written
    assert accumulated("single", -1.0, -small) == -1.0  # towards zero
    assert accumulated("two_level_f16", 1.0, 2048.0, 1.0) == 2049.0
    assert accumulated("two_level_f16", 1.0, 2048.0, 2.0) == 2051.0


def test_f16_accumulators_hold_the_largest_tile():
    q = torch.zeros(1, 1, 64, 64, dtype=torch.bfloat16)
    v = torch.full((1, 1, 128, 64), 3.0, dtype=torch.bfloat16)
    out = emulator.attention(Method(accumulator="two_level_f16", smoothing=""), default_library(), q, v, v)
    assert (out - 3.0).abs().max() < 2e-3
    assert emulator.RANGE_F16_ACCUMULATOR.p * emulator.RANGE_F16_ACCUMULATOR.v * SIZES.block_n < 65504


def test_one_accumulator_for_all_keys_loses_with_their_number():
    qkv = draw("normal", (1, 1, 32, 64), (1, 1, 8192, 64))
    qkv = (*qkv[:2], qkv[2] + 8)
    errors = {name: error(Method(accumulator=name), qkv) for name in ("f32", "two_level", "single")}
    assert errors["two_level"] < 1.1 * errors["f32"]
    assert errors["single"] > 2 * errors["two_level"]


def test_integer_and_f16_products_have_no_short_accumulator():
    for pv in ("int8", "f16"):
        with pytest.raises(ArgumentError, match=pv):
            Method(pv=pv)


# --- the claims of the method -----------------------------------------------------------------------------------------


def test_smoothing_at_4_bits():
    def cosine(kind, smoothing):
        qkv = draw(kind, (1, 2, 512, 128), (1, 2, 512, 128))
        out = emulator.attention(Method(bits=4, smoothing=smoothing), default_library(), *qkv)
        return reference.measure(out, reference.attention(*qkv)[0]).cosine

    assert cosine("normal", "qk") >= 0.97  # docs/accuracy.md says why it is not more
    assert cosine("outlier", "qk") >= 0.99
    assert cosine("outlier", "") < 0.98


def test_smoothing_v_takes_a_third_off_the_error_of_a_biased_v():
    q, k, v = draw("normal", (1, 2, 256, 64), (1, 2, 512, 64))
    for bits, smoothing in ((8, "k"), (4, "qk")):
        raw, smooth = (error(Method(bits=bits, smoothing=smoothing, smooth_v=on), (q, k, v + 8))
                       for on in (False, True))
        assert smooth < 0.67 * raw


# --- what the inputs are like -----------------------------------------------------------------------------------------


def test_traits_of_offsets_and_of_one_sharp_channel():
    q, k, v = draw("normal", (1, 2, 256, 64), (1, 2, 256, 64))
    q[..., 5] += 30.0  # of 1 a channel: 900 / (900 + 64)
    k *= 3.0
    k[..., 9] *= 20.0  # large but without a mean: rotation spreads it, smoothing does not see it
    case = accuracy_tables.Case("s", "c", False, [(q, k, v)])
    sharp = accuracy_tables.traits(case, default_library(), torch.device("cpu"))
    assert sharp.q_offset == pytest.approx(900 / 964, abs=0.01) and abs(sharp.k_offset) < 0.02
    assert sharp.smooth_q < 0.2 and sharp.smooth_qk < 0.2 and 0.95 < sharp.smooth_k < 1.05
    assert sharp.hadamard < 0.4 and sharp.rotated < 0.6
    assert sharp.per_token < 0.9


def test_score_step_is_the_product_of_the_scales():
    q = torch.full((1, 1, 70, 64), 0.0, dtype=torch.bfloat16)
    q[..., 0], q[..., 1] = 14.0, 7.0
    step = emulator.score_step(Method(bits=4, smoothing="", granularity="token"), default_library(), q, q, q)
    assert step == pytest.approx((14 / 7) ** 2 / 8 * 1.4426950408889634)


def test_share_of_p_that_int8_loses():
    q = torch.zeros(1, 1, 2, 64, dtype=torch.bfloat16)
    k = torch.zeros(1, 1, 50, 64, dtype=torch.bfloat16)
    q[..., 0], k[..., 0, 0], k[..., 1, 0] = 8.0, 6.0, 1.0  # P: one key at 1, one at e^-5, the rest at e^-6 < 1/254,
    k[..., 49, 0] = 6.0  # and the last, which only the last query sees, at 1
    case = accuracy_tables.Case("s", "c", True, [(q, k, k)])
    p = torch.tensor([1.0, math.exp(-5.0), *[math.exp(-6.0)] * 47, 1.0], dtype=torch.float64)
    kept = torch.tensor([1 + 1 / 127, 2 + 1 / 127]) / torch.stack([p[:49].sum(), p.sum()])
    loss = accuracy_tables.int8_loss(case, default_library(), q, k, k)
    assert loss == pytest.approx(1 - kept.mean().item(), rel=0.02)


# --- the program ------------------------------------------------------------------------------------------------------


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["accuracy.py", *map(str, arguments)])
    return accuracy.main()


SMALL = ("--seqlen", 130, "--heads", 1, "--batch", 1, "--headdim", 64)


def test_tables_print_and_write_the_same(monkeypatch, capsys, tmp_path):
    markdown, values = tmp_path / "tables.md", tmp_path / "tables.json"
    assert run(monkeypatch, "tables", *SMALL, "--long-seqlen", 192, "--no-demo", "--markdown", markdown, "--json",
               values) == 0
    printed = capsys.readouterr().out
    assert markdown.read_text() == printed.removesuffix("\n")
    tables, traits = (json.loads(values.read_text())[name] for name in ("tables", "traits"))
    assert [(row["source"], row["case"]) for row in traits] == [
        (kind, "head dim 64, full, N = 130") for kind in ("normal", "outlier")]
    assert [table["name"] for table in tables] == [table.name for table in accuracy_tables.tables()]
    for table in tables:
        assert table["title"] in printed
        long = "accumulator" in table["name"]
        assert {row["source"] for row in table["rows"]} == ({"normal, 192 keys", "outlier, 192 keys"} if long
                                                            else {"normal", "outlier"})
        assert all(0.2 < row["cosine"] <= 1.0 for row in table["rows"])


def test_tables_take_activations_of_other_models(monkeypatch, capsys, tmp_path):
    (tmp_path / "model.py").write_text("import torch\ndef activations():\n"
                                       "    for headdim in (64, 128):\n"
                                       "        yield [torch.randn(1, 1, 70, headdim).bfloat16() for _ in range(3)]\n")
    assert run(monkeypatch, "tables", *SMALL, "--no-demo", "--only", "bits", "--activations",
               f"my model={tmp_path / 'model.py'}") == 0
    printed = capsys.readouterr()
    assert "| my model | 4 bits, E4M3 |" in printed.out and str(tmp_path) not in printed.out
    assert "my model: layer 1, head dim 128" in printed.err
    (tmp_path / "empty.py").write_text("")
    for file, message in (("empty.py", "activations()"), ("none.py", "expected a Python file")):
        with pytest.raises(ArgumentError, match=message.replace("(", r"\(").replace(")", r"\)")):
            accuracy_tables.load_model("my model", tmp_path / file)


def test_tables_let_other_models_read(monkeypatch, capsys, tmp_path):
    (tmp_path / "model.py").write_text(
        "import torch\nqkv = torch.randn(3, 1, 1, 70, 64, generator=torch.Generator().manual_seed(0)).bfloat16()\n"
        "def activations():\n    yield qkv\n"
        "def bits_per_byte(attend, windows, device):\n    return windows + attend(*qkv)[0, 0, 69, 0].double().item()\n")
    qkv = accuracy_tables.load_model("m", tmp_path / "model.py").qkv
    exact = reference.attention(*qkv, is_causal=True)[0].bfloat16()[0, 0, 69, 0].item()
    ours = emulator.attention(Method(bits=4, smoothing="qk"), default_library(), *qkv, is_causal=True).bfloat16()
    assert run(monkeypatch, "tables", *SMALL, "--no-demo", "--only", "bits", "--windows", 3, "--activations",
               f"m={tmp_path / 'model.py'}") == 0
    printed = capsys.readouterr().out
    assert f"| m | exact | {3 + exact:.4f} |" in printed
    assert f"| m | 4 bits, E4M3 | {ours[0, 0, 69, 0].item() - exact:+.4f} |" in printed


def test_tables_use_the_demo_model_where_it_is_installed(monkeypatch, capsys):
    qkv = draw(q_shape=(1, 1, 20, 32), kv_shape=(1, 1, 20, 32))
    workload = demo_inputs.Workload("", "layer", {"0": [qkv, qkv], "1": [qkv]}, [])
    monkeypatch.setattr(demo_inputs, "transformer_workload", lambda device: workload)
    assert run(monkeypatch, "tables", *SMALL, "--only", "bits") == 0
    printed = capsys.readouterr()
    assert "| demo model | 8 bits, f16 |" in printed.out and "demo model: layer 1" in printed.err

    def missing(device):
        raise UnsupportedError("no packages")

    monkeypatch.setattr(demo_inputs, "transformer_workload", missing)
    assert run(monkeypatch, "tables", *SMALL, "--only", "bits") == 0
    printed = capsys.readouterr()
    assert "demo model" not in printed.out and "without the demo model: no packages" in printed.err


def test_tables_of_accumulators_alone(monkeypatch, capsys):
    assert run(monkeypatch, "tables", *SMALL, "--long-seqlen", 192, "--no-demo", "--only", "accumulator-biased") == 0
    assert "| outlier, 192 keys | two-level, f16 in a tile |" in capsys.readouterr().out


def test_a_case_is_measured_over_all_its_draws():
    (q, k, v), method = draw(), Method()
    case = accuracy_tables.Case("s", "c", True, [(q, k, v), (q, k, v * 3)])
    values = accuracy_tables.measure_case(case, 8.0, [method], default_library(), torch.device("cpu"))
    ours, exact = [], []
    for biased in (v + 8, v * 3 + 8):
        ours.append(emulator.attention(method, default_library(), q, k, biased, is_causal=True))
        exact.append(reference.attention(q, k, biased, is_causal=True)[0])
    assert values[method] == reference.measure(torch.cat(ours), torch.cat(exact))


def test_cases_are_seeded():
    def draws(seed):
        cases = [*accuracy_tables.class_cases(["normal"], [64], ["full"], [20], 1, 1, seed),
                 *accuracy_tables.long_cases(["normal"], [64], [20], 1, seed)]
        return torch.cat([x.flatten() for case in cases for x in case.draws[0]])

    assert torch.equal(draws(3), draws(3)) and not torch.equal(draws(3), draws(4))


def test_kernels_are_emulated_on_the_cpu(monkeypatch, capsys):
    assert run(monkeypatch, "kernels", *SMALL, "--device", "cpu", "--arch", "sm89", "--mask", "causal") == 0
    assert "| sm89 emulation | outlier | 64 | causal | 130 |" in capsys.readouterr().out


def test_unknown_tables_are_refused(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        run(monkeypatch, "tables", "--only", "speed")
    assert "granularity-4" in capsys.readouterr().err


def test_summaries_take_the_average_and_the_worst_of_each_measure():
    results = [accuracy_tables.Result("s", name, "m", values) for name, values in (
        ("a", Accuracy(0.9, 0.1, 3.0)), ("b", Accuracy(0.7, 0.3, 1.0)))]
    results.append(accuracy_tables.Result("t", "a", "m", Accuracy(0.5, 0.5, 0.5)))
    first, second = accuracy_tables.summaries(results)
    assert (first.source, first.method) == ("s", "m")
    assert first.average == Accuracy(pytest.approx(0.8), pytest.approx(0.2), pytest.approx(2.0))
    assert first.worst == Accuracy(0.7, 0.3, 3.0)
    assert second.average == second.worst == Accuracy(0.5, 0.5, 0.5)
    assert accuracy_tables.Result.from_json(results[0].to_json()) == results[0]


def test_overview_is_in_percent_and_marks_what_the_kernels_do():
    (table,) = [table for table in accuracy_tables.tables() if table.name == "bits"]
    errors = {"8 bits, f16": 0.00004, "4 bits, E4M3": 0.2, "4 bits, E4M3, ours": 0.0125}
    results = [accuracy_tables.Result(source, "c", words, Accuracy(1.0, errors.get(words, 0.001) * factor, 0.0))
               for words in table.methods for source, factor in (("s", 1), ("t", 1), ("t", 3))]
    lines = accuracy_tables.overview(table, accuracy_tables.summaries(results)).splitlines()
    assert lines[0] == "| relative L1, % | s | t |" and len(lines) == 2 + len(table.methods)
    assert "| **8 bits, f16** | 0.004 (0.004) | 0.008 (0.012) |" in lines
    assert "| **8 bits, E4M3** | 0.100 (0.100) | 0.200 (0.300) |" in lines
    assert "| 4 bits, E4M3 | 20.0 (20.0) | 40.0 (60.0) |" in lines
    assert "| **4 bits, E4M3, ours** | 1.25 (1.25) | 2.50 (3.75) |" in lines


# --- input classes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "factor"), [("peaked", 2.0), ("diffuse", 0.3)])
def test_classes_of_other_sizes_of_q(kind, factor):
    (q, *kv), (normal, *others) = draw(kind), draw("normal")
    torch.testing.assert_close(q.float(), factor * normal.float(), rtol=2**-7, atol=0)  # both are rounded
    assert all(map(torch.equal, kv, others))


def test_a_class_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="expected one of normal, outlier, .*, got 'peeked'"):
        draw("peeked")
