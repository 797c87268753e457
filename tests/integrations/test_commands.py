"""``sage-aot bench`` and ``sage-aot audit``: shapes, tables, errors, and an audit of a model of transformers."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from test_transformers import MODELS

import sage_aot
from sage_aot._cli import audit as auditing
from sage_aot._cli import bench, demo
from sage_aot._cli import main as cli
from sage_aot._cli.bench import USES, Row, Shape, Times, Way
from sage_aot._tools import reference
from sage_aot.errors import ArgumentError
from sage_aot.integrations import _report, _serve, audit
from sage_aot.integrations.torch import sdpa


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["sage-aot", *arguments])
    return cli.main()


# --- bench ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "shape"), [
    ("2,24,4608,128", (2, 24, 24, 4608, 4608, 128, "full")), ("1,32/8,512/8192,64", (1, 32, 8, 512, 8192, 64, "full")),
    ("1,32/8,512,128,causal", (1, 32, 8, 512, 512, 128, "causal")), ("8,4,9/7,1,padded", (8, 4, 4, 9, 7, 1, "padded")),
    ("8,4,9/7,1,masked", (8, 4, 4, 9, 7, 1, "masked")), ("1,4,7/9,1,window", (1, 4, 4, 7, 9, 1, "window"))])
def test_shapes_are_read_and_written(text, shape):
    assert Shape.of(text) == (text, *shape) and str(Shape.of(text)) == text


@pytest.mark.parametrize(("text", "message"), [
    *[(text, "expected batch,heads.*got") for text in (
        "", "1,2,3", "1,2,3,4,5", "0,2,3,4", "1,2,3,4,windowed", "a,2,3,4", "1,2/0,3,4", " 1,2,3,4", "1,2,3,4\n")],
    ("1,6/4,3,4", "expected heads that are a multiple of kv heads"),
    ("1,2,3/4,5,causal", "expected as many keys as queries of a causal call")])
def test_texts_that_are_no_shapes(text, message):
    with pytest.raises(ArgumentError, match=f"--shape: {message}"):
        Shape.of(text)


def test_the_shapes_of_use():
    assert len({shape.name for shape in USES}) == len(USES)
    for shape in USES:
        assert Shape.of(str(shape))._replace(name=shape.name) == shape
    assert {shape.name.split(":")[0] for shape in USES} == {
        "image", "video", "prompt", "chunk", "decode", "cross", "encoder"}
    assert {128, 512} <= {shape.keys for shape in USES if shape.name.startswith("encoder")}


ROW = Row(Shape("a name", 1, 2, 2, 3, 3, 64), True, {
    "sdpa": Times(11, 13), "cudnn": Times(12, 10), "flash": Times(20, 25), "attn": Times(5, 8), "policy": Times(20, 8)})


def test_a_row_compares_with_the_fastest_of_torchs_backends():
    assert ROW.best() == (11, 10) and ROW.ratio("attn") == (2.2, 1.25) and ROW.ratio("policy") == (0.55, 1.25)
    assert ROW.cells() == ["a name", "1,2,3,64", "11.0", "cudnn", "5.0", "2.20", "sage_aot", "0.55", "1.25"]
    assert json.loads(json.dumps(ROW.to_json()))["ways"]["attn"] == {"gpu": 5, "wall": 8}


def test_ways_are_timed_in_turns_and_by_their_shortest_rounds(monkeypatch):
    order, taken = [], {"A": iter(range(20, 0, -1)), "B": iter(range(1, 20))}
    monkeypatch.setattr(bench, "_Timer", lambda way, effort: SimpleNamespace(
        measure=lambda: order.append(way) or Times(next(taken[way]), 5)))
    assert bench.timed({"a": "A", "b": "B"}) == {"a": (21 - bench.THOROUGH.rounds, 5), "b": (1, 5)}
    rounds = [order[first:first + 2] for first in range(0, len(order), 2)]
    assert len(rounds) == bench.THOROUGH.rounds and ["A", "B"] in rounds and ["B", "A"] in rounds
    assert all(sorted(turns) == ["A", "B"] for turns in rounds)


def test_a_backend_that_refuses_is_left_out():
    def work():
        raise RuntimeError("No available kernel")

    assert not bench._takes_it(Way(work)) and bench._takes_it(Way(lambda: None))


@pytest.fixture
def a_gpu(monkeypatch):
    """The bench command finds a GPU; what it measures there, a test says."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)
    monkeypatch.setattr(bench, "check_gpu", lambda: None)


def test_a_shape_without_memory_is_left_out(a_gpu, monkeypatch, capsys, tmp_path):
    def work():
        raise torch.cuda.OutOfMemoryError

    with pytest.raises(torch.cuda.OutOfMemoryError):
        bench._takes_it(Way(work))
    monkeypatch.setattr(bench, "measured", lambda shape: ROW if shape.batch == 1 else work())
    file = tmp_path / "bench.json"
    shapes = "--shape", "2,1,1,1", "--shape", "1,1,1,1"
    assert run(monkeypatch, "bench", *shapes, "--png", str(tmp_path / "bench.png"), "--json", str(file)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "| 2,1,1,1 | 2,1,1,1 | more memory than this GPU has |" in lines
    assert f"| {' | '.join(ROW.cells())} |" in lines
    assert [row["name"] for row in json.loads(file.read_text())["rows"]] == ["a name"]


@pytest.mark.parametrize("encoding", ["cp1252", "cp1251", "cp932", "ascii"])
def test_tables_are_printed_where_the_code_page_lacks_their_signs(a_gpu, monkeypatch, tmp_path, encoding):
    monkeypatch.setattr(bench, "find_spec", lambda name: None)
    monkeypatch.setattr(bench, "draw", lambda *arguments: None)
    monkeypatch.setattr(bench, "measured", lambda shape: dataclasses.replace(ROW, shape=shape))
    printed = io.TextIOWrapper(io.BytesIO(), encoding)
    monkeypatch.setattr(sys, "stdout", printed)
    file = tmp_path / "bench.json"
    assert run(monkeypatch, "bench", "--png", str(tmp_path / "bench.png"), "--json", str(file)) == 0
    printed.seek(0)
    wanted = "| image: SDXL 1024\u00b2 |".encode(encoding, "replace").decode(encoding)
    assert wanted in printed.read()
    assert "image: SDXL 1024\u00b2" in [row["name"] for row in json.loads(file.read_text("utf-8"))["rows"]]


def test_a_wrong_output_is_not_timed():
    right = torch.randn(2, 3, 5, 8)
    bench.check_output("attn", right, right)
    one_head = right.clone()
    one_head[-1, -1] *= -1
    for wrong in (right.roll(1, 2), one_head, right * torch.nan):
        with pytest.raises(sage_aot.UnsupportedError, match="attn: expected a cosine of at least 0.998 with torch's"):
            bench.check_output("attn", wrong, right)


def test_the_picture(tmp_path, capsys, monkeypatch):
    bench.draw(str(tmp_path / "bench.png"), [ROW], "a GPU")
    said = capsys.readouterr().out
    if "no picture" not in said:
        assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    bench.draw(str(tmp_path / "none.png"), [ROW], "a GPU")
    assert "no picture" in capsys.readouterr().out and not (tmp_path / "none.png").exists()


def test_a_missing_matplotlib_is_said_before_the_work(a_gpu, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(bench, "find_spec", lambda name: None)
    monkeypatch.setattr(bench, "measured", lambda shape: ROW)
    assert run(monkeypatch, "bench", "--shape", "1,1,1,1", "--png", str(tmp_path / "bench.png")) == 0
    assert capsys.readouterr().out.startswith("no picture will be written: pip install matplotlib")


def test_files_are_looked_at_before_the_work(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(bench, "check_gpu", lambda: None)
    for option in ("--png", "--json"):
        assert run(monkeypatch, "bench", option, str(tmp_path / "missing" / "file")) == 1
        assert "bench: expected a file in a folder that exists, got" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "message"), [
    ("missing/x.png", "demo: expected a file in a folder that exists, got .*x.png"),
    (".", "demo: expected a file in a folder that exists"),
    ("x.foo", r"demo: expected a picture of a format that matplotlib writes, got .*x\.foo; name it .*x\.png"),
])
def test_the_picture_of_the_demo_is_looked_at_before_the_work(monkeypatch, capsys, tmp_path, name, message):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(demo, "workload_on", lambda device: pytest.fail("the work was begun"))
    assert run(monkeypatch, "demo", "--png", str(tmp_path / name)) == 1
    assert re.match(f"sage_aot: {message}", capsys.readouterr().err)


def test_the_bench_needs_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run(monkeypatch, "bench", "--shape", "1,2,64,64") == 1
    assert "bench: expected a CUDA GPU, torch" in capsys.readouterr().err


# --- audit ------------------------------------------------------------------------------------------------------------


def test_an_audit_compares_what_is_served_with_the_host():
    q, k, v = torch.randn(3, 2, 4, 40, 64, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, 1, 1, 40, dtype=torch.bool)
    with audit() as calls:
        out = sdpa(q, k, v, is_causal=True)
        sdpa(q, k, v, mask)
        sdpa(q, k, v, dropout_p=0.5)  # torch's
    sdpa(q, k, v)
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    shapes = q.shape, k.shape, "HND"
    assert [call[:5] for call in calls] == [(*shapes, True, False), (*shapes, False, True)]
    assert calls[0].accuracy == reference.measure(out, exact) and 0.99 < calls[0].accuracy.cosine < 1


def test_compiled_calls_are_not_audited():
    q, k, v = torch.randn(3, 1, 2, 20, 64)
    with audit() as calls:
        torch.compile(lambda q, k, v: sdpa(q, k, v), backend="eager", fullgraph=True)(q, k, v)
    assert calls == []


def test_audits_nest():
    q, k, v = torch.randn(3, 1, 2, 20, 64)
    with audit() as outer:
        with pytest.raises(KeyError), audit() as inner:
            sdpa(q, k, v)
            raise KeyError
        sdpa(q, k, v)
    assert (len(inner), len(outer)) == (1, 1)


@pytest.fixture
def saved(tmp_path):
    """A Llama of two layers, and a text."""
    MODELS["llama"]().save_pretrained(tmp_path / "llama")
    return tmp_path


@pytest.mark.kernels("sm89")
def test_a_model_is_audited(monkeypatch, capsys, saved):
    _report.count("of before")
    assert run(monkeypatch, "audit", str(saved / "llama"), "--tokens", "50") == 0
    lines = capsys.readouterr().out.splitlines()
    assert "50 tokens, bf16, CPU: emulation of the sm89 kernels" in lines[0]
    rows = [line.split(" | ") for line in lines if line.startswith("| ") and line[2].isdigit()]
    assert [row[0] for row in rows] == ["| 0", "| 1"] and all(row[3] == "causal" for row in rows)
    assert all(0.99 < float(row[4]) < 1 and 0 < float(row[5]) < 10 for row in rows)
    assert lines[-2].startswith("last hidden states: cosine 0.99")
    assert lines[-1] == "calls: {'sage_aot': 2}"


@pytest.mark.parametrize(("kind", "config"), [
    ("T5", {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 32}),
    ("CLIP", {"text_config": {"num_hidden_layers": 1}, "vision_config": {"num_hidden_layers": 1}}),
    ("ViT", {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 16})])
def test_a_model_that_reads_no_text_alone_is_refused(monkeypatch, capsys, tmp_path, kind, config):
    import transformers

    getattr(transformers, f"{kind}Model")(getattr(transformers, f"{kind}Config")(**config)).save_pretrained(tmp_path)
    assert run(monkeypatch, "audit", str(tmp_path)) == 1
    assert f"sage_aot: audit: expected a model that reads one text, got {kind}Model" in capsys.readouterr().err


def test_a_model_without_sdpa_is_refused(monkeypatch, capsys, tmp_path):
    import transformers

    config = transformers.Gemma2Config(hidden_size=16, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
                                       num_hidden_layers=1, intermediate_size=16, vocab_size=32)
    transformers.Gemma2Model(config).save_pretrained(tmp_path)
    assert run(monkeypatch, "audit", str(tmp_path)) == 1
    assert "sage_aot: audit: expected a model that transformers runs with sdpa, got" in capsys.readouterr().err


def test_no_more_tokens_than_a_model_has_positions(monkeypatch, capsys, saved):
    made = MODELS["bert"]()
    made.save_pretrained(saved / "bert")
    assert run(monkeypatch, "audit", str(saved / "bert")) == 0
    assert f" {made.config.max_position_embeddings} tokens" in capsys.readouterr().out


def test_positions_of_roberta_begin_behind_the_padding(monkeypatch, capsys, tmp_path):
    import transformers

    config = transformers.RobertaConfig(hidden_size=16, num_attention_heads=2, num_hidden_layers=1, vocab_size=32,
                                        intermediate_size=16, max_position_embeddings=34)
    transformers.RobertaModel(config).save_pretrained(tmp_path)
    assert run(monkeypatch, "audit", str(tmp_path)) == 0
    assert " 32 tokens" in capsys.readouterr().out


def test_an_audit_without_served_calls_says_so(monkeypatch, capsys, saved):
    monkeypatch.setattr(_serve, "why_not_computed", lambda call, options: "a reason")
    assert run(monkeypatch, "audit", str(saved / "llama"), "--tokens", "50") == 1
    assert capsys.readouterr().out.splitlines()[-1] == "calls: {'a reason': 2}"


def test_a_text_is_read(monkeypatch, capsys, saved):
    tokenizers = pytest.importorskip("tokenizers")
    import transformers

    words = {word: index for index, word in enumerate(["<unk>", "one", "two", "three"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(saved / "llama")
    text = saved / "text"
    text.write_text("one two three " * 20)
    seen = []
    monkeypatch.setattr(auditing, "table", lambda calls: seen.extend(calls) or "")
    assert run(monkeypatch, "audit", str(saved / "llama"), "--text", str(text), "--tokens", "40") == 0
    assert "40 tokens" in capsys.readouterr().out and all(call.q[1] == 40 for call in seen) and len(seen) == 2
    assert auditing._tokens(str(saved / "llama"), str(text), 4).tolist() == [[1, 2, 3, 1]]
    text.write_text("")
    assert run(monkeypatch, "audit", str(saved / "llama"), "--text", str(text)) == 1
    assert "--text: expected a file with text" in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "message"), [
    (["--tokens", "0"], "--tokens: expected at least 1, got 0"),
    (["--text", "missing.txt"], "sage_aot: audit: expected a text and a tokenizer .* read, got .*missing.txt")])
def test_what_an_audit_cannot_read(monkeypatch, capsys, saved, arguments, message):
    assert run(monkeypatch, "audit", str(saved / "llama"), *arguments) == 1
    assert re.search(message, capsys.readouterr().err)
    assert run(monkeypatch, "audit", str(saved / "missing")) == 1
    assert "sage_aot: audit: expected a model that can be read, got" in capsys.readouterr().err


# --- audit --sparse ---------------------------------------------------------------------------------------------------


@pytest.fixture
def long(tmp_path):
    """A Llama of two layers that reads long texts."""
    import transformers

    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024)).save_pretrained(tmp_path / "llama")
    return tmp_path


def calls_of(folder, tokens):
    """The calls of the saved model on the random tokens of an audit, each with sage_aot's output of all blocks."""
    import transformers

    made = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16,
                                                             attn_implementation="sage_aot")
    calls = []
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(_serve, "observer", lambda call, out, host: calls.append((call, out)))
        made(input_ids=torch.randint(made.config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(0)))
    return calls


def test_the_least_density_of_a_model(monkeypatch, capsys, long):
    file = long / "tuned.json"
    arguments = "audit", str(long / "llama"), "--sparse", "--tokens", "1000", "--error", "0.45", "--save", str(file)
    assert run(monkeypatch, *arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("LlamaForCausalLM") and "1000 tokens, bf16" in lines[0]
    assert lines[2] == "blocks of 64 by 64, relative L1 of a head at most 45 %"
    tuned, calls = sage_aot.sparse.load_tuned(file), calls_of(long / "llama", 1000)
    assert list(tuned) == ["model.layers.0.self_attn", "model.layers.1.self_attn"] and len(calls) == 2
    densities, errors = [], []
    for (name, sparse), (call, dense), line in zip(tuned.items(), calls, lines[6:8]):
        assert sparse == sage_aot.Sparse(keep=sparse.keep, block_size=64) and len(sparse.keep) == 4
        out = sage_aot.attn(call.q, call.k, call.v, layout=call.layout, scale=call.scale, is_causal=True, sparse=sparse)
        error = (out.double() - dense.double()).abs().sum((0, 1, 3)) / dense.double().abs().sum((0, 1, 3))
        chosen = sparse.select(call.q, call.k, is_causal=True, scale=call.scale, layout=call.layout).blocks
        densities.append(chosen[0].tril().sum().item() / (4 * 136))  # of 4 heads, each of 16 by 16 blocks
        errors.append(error.max().item())
        assert line == f"| {name} | 4 | {100 * densities[-1]:.1f} | {100 * errors[-1]:.2f} |" and errors[-1] <= 0.45
    assert min(densities) < 1 and lines[9] == (
        f"all layers: density {50 * sum(densities):.1f} %, relative L1 of a head at most {100 * max(errors):.2f} %")
    assert lines[10] == f"wrote {file}, which sage_aot.sparse.load_tuned reads"


def test_the_bound_is_5_percent_by_default_and_nothing_is_written(monkeypatch, capsys, long):
    before = sorted(long.rglob("*"))
    assert run(monkeypatch, "audit", str(long / "llama"), "--sparse", "--tokens", "1000") == 0
    lines = capsys.readouterr().out.splitlines()
    assert "relative L1 of a head at most 5 %" in lines[2] and "wrote" not in lines[-1]
    error = re.fullmatch(r"all layers: density [0-9.]+ %, relative L1 of a head at most ([0-9.]+) %", lines[-1])
    assert float(error[1]) <= 5
    assert sorted(long.rglob("*")) == before


def test_a_model_of_which_nothing_is_served_is_not_tuned(monkeypatch, capsys, saved):
    monkeypatch.setattr(_serve, "why_not_computed", lambda call, options: "a reason")
    assert run(monkeypatch, "audit", str(saved / "llama"), "--sparse", "--tokens", "50") == 1
    assert re.search("tune: expected a model with calls that .* got LlamaForCausalLM and these calls: .'a reason': 2}",
                     capsys.readouterr().err)


@pytest.mark.parametrize(("arguments", "message"), [
    (["--error", "0.1"], "--error: expected it only with --sparse, got 0.1; add --sparse"),
    (["--save", "tuned.json"], "--save: expected it only with --sparse, got tuned.json; add --sparse"),
    (["--sparse", "--error", "0"], "error: expected a number above 0"),
    (["--sparse", "--tokens", "0"], "--tokens: expected at least 1, got 0"),
    (["--sparse", "--save", "missing/tuned.json"], "audit: expected a file in a folder that exists, got missing/")])
def test_what_an_audit_of_densities_does_not_take(monkeypatch, capsys, saved, arguments, message):
    assert run(monkeypatch, "audit", str(saved / "llama"), *arguments) == 1
    assert message in capsys.readouterr().err


def test_the_table_of_an_audit():
    calls = [SimpleNamespace(q=(1, 2, 3, 4), k=(1, 2, 5, 4), is_causal=causal, has_mask=mask,
                             accuracy=reference.Accuracy(0.5, 0.25, 0.125)) for causal in (0, 1) for mask in (0, 1)]
    rows = auditing.table(calls).splitlines()[2:]
    assert rows[3] == "| 3 | 1×2×3×4 | 1×2×5×4 | causal and keys | 0.500000 | 25.00 | 1.25e-01 |"
    assert [row.split(" | ")[3] for row in rows] == ["full", "keys", "causal", "causal and keys"]
