"""bench/train.py: pairs of one seed start and read alike, a run writes what the summary reads, and the verdict."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import sage_aot
import train

TINY = replace(train.DEFAULTS["pretrain", True], steps=4, warmup=1, log_every=3, eval_every=2, eval_windows=4)


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    """torch's attention for ours: these tests are of the program."""
    def train_attn(q, k, v, *, is_causal=False, scale=None, layout="HND"):
        assert (q.dtype, k.dtype, v.dtype) == (torch.bfloat16,) * 3
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale)

    monkeypatch.setattr(sage_aot, "train_attn", train_attn, raising=False)


@pytest.fixture(autouse=True)
def short_text(monkeypatch):
    parts = {"pretrain": b"def a(): pass\n" * 99, "finetune": b"class B: ...\n" * 99, "held out": b"x = 1\n" * 99}
    monkeypatch.setattr(train, "split_text", lambda text: parts)


def test_split_is_of_whole_files_without_overlap(monkeypatch, tmp_path):
    for i in range(100):
        (tmp_path / f"{i}.py").write_text(f"{i:02d}" * 50)
    monkeypatch.undo()
    monkeypatch.setattr(train.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    parts = train.split_text("stdlib")
    assert {name: len(part) for name, part in parts.items()} == {"pretrain": 4800, "finetune": 4900, "held out": 300}
    assert len({b"".join(parts.values())[i: i + 100] for i in range(0, 10000, 100)}) == 100


def test_text_of_packages_has_each_content_once(monkeypatch, tmp_path):
    pure, plain = tmp_path / "pure", tmp_path / "platform"
    for folder in (pure / "docs", plain):
        folder.mkdir(parents=True)
    (pure / "a.py").write_text("a" * 100)
    (pure / "docs" / "b.rst").write_text("b" * 100)
    (plain / "copy.py").write_text("a" * 100)
    (plain / "c.py").write_text("c" * 100)
    (plain / "no.txt").write_text("d" * 100)
    (plain / "folder.py").mkdir()
    monkeypatch.undo()
    monkeypatch.setattr(train.sysconfig, "get_paths", lambda: {"purelib": str(pure), "platlib": str(plain)})
    monkeypatch.setattr(train.site, "getsitepackages", lambda: [str(pure)])
    assert sorted(b"".join(train.split_text("packages").values())) == sorted(b"a" * 100 + b"b" * 100 + b"c" * 100)


def test_a_seed_decides_weights_and_batches():
    sage = replace(TINY, attention="sage")
    for ours, theirs in zip(train.initial_model(sage).parameters(), train.initial_model(TINY).parameters()):
        assert torch.equal(ours, theirs)
    starts = [train.draw_starts(config, 1000, torch.device("cpu")) for config in (sage, TINY, replace(TINY, seed=1))]
    assert torch.equal(starts[0], starts[1])
    assert not torch.equal(starts[0], starts[2])


def test_full_model_has_the_shape_of_the_docstring():
    with torch.device("meta"):
        model = train.Model(train.Config())
    assert round(sum(weight.numel() for weight in model.parameters()) / 1e6) == 19
    assert [layer.headdim for layer in model.layers] == [64, 128] * 3


@pytest.mark.parametrize("qk_norm", [False, True])
def test_model_sees_no_later_byte_but_positions(qk_norm):
    model = train.initial_model(replace(TINY, qk_norm=qk_norm))
    tokens = torch.arange(128)[None] % 7
    changed = tokens.clone()
    changed[0, 100:] = 9
    attend = train.attention_of("bf16")
    outs = [model(x, attend) for x in (tokens, changed, tokens.roll(1, 1))]
    torch.testing.assert_close(outs[0][:, :100], outs[1][:, :100])
    assert not torch.allclose(outs[0][:, 100:], outs[1][:, 100:])


def test_scores_depend_on_distance_alone():
    layer = train.Layer(0, TINY)
    row = torch.randn(64, generator=torch.Generator().manual_seed(0))
    rotated = layer.rotate(row.expand(128, 64))
    torch.testing.assert_close((rotated[:-5] * rotated[5:]).sum(-1), (rotated[0] @ rotated[5]).expand(123))


def test_runs_make_a_summary(tmp_path):
    weights = tmp_path / "weights.pt"
    for mode in train.MODES:
        for attention in train.ATTENTIONS:
            config = replace(TINY, mode=mode, attention=attention)
            saves = mode == "finetune" or attention == "bf16"
            result: Any = train.train(config, weights if saves else None)
            assert [point["step"] for point in result["curve"]] == [3, 4]
            assert [entry["step"] for entry in result["evals"]] == [0, 2, 4] + [4] * (attention == "sage")
            (tmp_path / f"{config.name}.json").write_text(json.dumps(result))
    runs = train.load_runs(tmp_path)
    by_name = {train.Config(**run["config"]).name: train.final_bits(run) for run in runs}
    assert by_name["pretrain-sage-seed0"] == pytest.approx(by_name["pretrain-bf16-seed0"])
    lines = train.summary(runs).splitlines()
    assert sum(line.startswith(("| pretrain", "| finetune")) for line in lines) == 12
    assert sum(line.startswith("- ") for line in lines) == 6


def test_finetune_refuses_weights_of_another_model(tmp_path):
    train.train(TINY, tmp_path / "weights.pt")
    config = replace(TINY, mode="finetune", qk_norm=True)
    with pytest.raises(SystemExit, match="expected weights of a bf16 run"):
        train.train(config, tmp_path / "weights.pt")


def test_all_starts_with_the_run_that_finetune_needs(tmp_path):
    args = train.parser().parse_args(["all", "--out", str(tmp_path), "--tiny", "--seeds", "3,4", "--attentions",
                                      "sage", "--finetune-steps", "7", "--qk-norm"])
    configs = [train.config_of(train.parser().parse_args(command)) for command in train.commands_of(args)]
    assert [config.name for config in configs] == [
        "pretrain-bf16-seed3", "pretrain-sage-seed3", "pretrain-sage-seed4", "finetune-sage-seed3",
        "finetune-sage-seed4"]
    assert [config.steps for config in configs] == [40, 40, 40, 7, 7]
    assert all(config.qk_norm for config in configs)


def test_verdict():
    bf16 = {0: 1.0, 1: 1.2, 2: 1.1}
    assert "within" in train.verdict({0: 1.0, 1: 1.25}, bf16)
    assert "+0.0000, +0.0500, mean +0.0250" in train.verdict({0: 1.0, 1: 1.25}, bf16)
    assert "NOT within" in train.verdict({0: 1.3}, bf16)
    assert "NOT within" in train.verdict({0: math.nan}, bf16)
    assert "below" in train.verdict({0: 0.9}, bf16)
