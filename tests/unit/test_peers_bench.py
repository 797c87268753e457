"""bench/peers.py: missing libraries are named, a wrong output has no row, a graph that computes nothing has no time."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import common
import peers
import speed
from peers import CUDNN, Contestant, Library, Prepared, Sweep
from speed import Captured, Shape, Timing

FULL, CAUSAL = (Shape(64, mask, 128, 1, 2, 2) for mask in ("full", "causal"))
COLUMN = {name: i for i, name in reversed(list(enumerate(peers.COLUMNS)))}  # the first of each name


def sdpa(qkv, is_causal):
    return F.scaled_dot_product_attention(*qkv, is_causal=is_causal)


def prepare(qkv, is_causal):
    out = torch.empty_like(qkv[0])
    return Prepared(lambda: out.copy_(sdpa(qkv, is_causal)))


def prepare_wrong(qkv, is_causal):
    return Prepared(lambda: sdpa(qkv, not is_causal))


def prepare_raising(qkv, is_causal):
    raise ImportError("no such symbol\nand more")


def prepare_transposed(qkv, is_causal):
    out = torch.empty_like(qkv[0].transpose(1, 2))
    return Prepared(lambda: out.copy_(sdpa(qkv, is_causal).transpose(1, 2)), lambda out: out.transpose(1, 2))


def timed(works):
    """10 µs for the first row, 20 for the second and so on."""
    for work in works.values():
        work()
    return {row: Timing(10.0 * i, 9.0 * i, 11.0 * i) for i, row in enumerate(works, 1)}


def capture(work):
    return Captured(work, 2, work())  # two calls in a graph


def cells(output):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in output.splitlines()[2:]]


def test_rows_have_both_times_as_multiples_of_cudnn(capsys):
    sweep = Sweep([Contestant(CUDNN, None, 0.01, prepare), Contestant("other", None, 0.01, prepare_transposed)], timed,
                  graphs=True, capture=capture)
    rows = peers.table(sweep, [FULL], device="cpu")
    printed = cells(capsys.readouterr().out)
    assert [row[:5] for row in printed] == [[row, "1×2", "64", "full", "128"] for row in (CUDNN, "other")]
    assert [row[COLUMN["queued, µs"]] for row in printed] == ["10.0", "20.0"]
    assert [row[COLUMN["GPU, µs"]] for row in printed] == ["5.0", "10.0"]
    assert [row[COLUMN["× cuDNN"]] for row in printed] == ["1.00", "0.50"]
    assert rows[1]["graph"]["ratio_to_cudnn"] == rows[1]["queued"]["ratio_to_cudnn"] == 0.5
    assert rows[0]["queued"]["tops"] == pytest.approx(FULL.operations / 10e-6 * 1e-12)
    assert all(row["relative_l1"] < 0.01 for row in rows)
    json.dumps(rows)
    assert not sweep.wrong and not sweep.not_captured


def test_without_graphs_the_gpu_has_no_time(capsys):
    peers.table(Sweep([Contestant(CUDNN, None, 0.01, prepare)], timed), [FULL], device="cpu")
    assert cells(capsys.readouterr().out)[0][COLUMN["GPU, µs"]] == "–"


def test_what_fails_or_is_wrong_is_named_and_others_have_rows(capsys):
    sweep = Sweep([Contestant(CUDNN, None, 0.01, prepare), Contestant("wrong", None, 0.1, prepare_wrong),
                   Contestant("raising", None, 0.1, prepare_raising)], timed)
    rows = peers.table(sweep, [FULL, CAUSAL], device="cpu")
    assert [(row["row"], row["mask"]) for row in rows] == [(CUDNN, "full"), (CUDNN, "causal")]
    assert sweep.wrong["raising, head dim 64, full, 128"] == "ImportError: no such symbol"
    assert sweep.wrong["wrong, head dim 64, causal, 128"].startswith(
        "ValueError: wrong output: expected a relative L1 of at most 0.1, got ")
    assert len(sweep.wrong) == 4


def test_output_that_nothing_writes_is_wrong():
    sweep = Sweep([Contestant("idle", None, 0.1, lambda qkv, is_causal: Prepared(lambda: common.poisoned(qkv[0])))],
                  timed)
    peers.table(sweep, [FULL], device="cpu")
    assert "got nan" in sweep.wrong["idle, head dim 64, full, 128"]


def test_row_is_of_its_masks():
    rows = peers.table(Sweep([Contestant("full alone", None, 0.1, prepare, masks=("full",))], timed), [FULL, CAUSAL],
                       device="cpu")
    assert [row["mask"] for row in rows] == ["full"]


def test_replay_that_computes_nothing_is_not_captured():
    captured = []

    def capture(work):
        captured.append(work)
        return Captured(lambda: None, 2, work())

    sweep = Sweep([Contestant(CUDNN, None, 0.01, prepare)], timed, graphs=True, capture=capture)
    rows = peers.table(sweep, [FULL, CAUSAL], device="cpu")
    assert [row["graph"] for row in rows] == [None, None] and len(captured) == 1  # it is not tried again
    assert list(sweep.not_captured) == [CUDNN] and "wrong output" in sweep.not_captured[CUDNN]


def test_missing_library_is_named_and_has_no_row():
    absent = Library("Absent", "absent-distribution", "absent_package.part")
    assert absent.version == "not installed"
    found = peers.installed([Contestant("theirs", absent, 0.1, prepare), Contestant("ours", None, 0.1, prepare)])
    assert [contestant.row for contestant in found] == ["ours"]


def test_version_is_that_of_the_distribution(tmp_path, monkeypatch):
    (tmp_path / "a_rival").mkdir()
    (tmp_path / "a_rival/__init__.py").write_text("raise ImportError('nothing is imported to know the version')\n")
    monkeypatch.syspath_prepend(tmp_path)
    library = Library("A rival", "a-rival", "a_rival._C")
    assert library.version == "not installed"  # another package of that name
    (tmp_path / "a_rival/_C.py").touch()
    assert library.version == "of unknown version"
    (tmp_path / "a_rival-1.2+abc.dist-info").mkdir()
    (tmp_path / "a_rival-1.2+abc.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: a-rival\nVersion: 1.2\n")
    assert library.version == "1.2"


def test_rows_say_what_they_time():
    rows = [contestant.row for contestant in peers.contestants(None, "sm90")]
    assert len(set(rows)) == len(rows) == 10 and {"sm90 kernel", "sm90 call", CUDNN} < set(rows)


def test_header_names_every_library():
    assert set(peers.versions()) == {"FlashAttention-3", "SageAttention2", "cudnn-frontend", "comfy-kitchen", "cuDNN"}


def test_arguments():
    arguments = peers.parse([])
    assert len(peers.shapes(arguments)) == 12 and not arguments.graph
    arguments = peers.parse(["--headdim", "128", "--mask", "causal", "--seqlen", "4096", "--graph", "--rounds", "3"])
    assert peers.shapes(arguments) == [Shape(128, "causal", 4096, 4, 32, 32)] and arguments.graph


@pytest.mark.parametrize("wrong, complaint", [
    (["--seqlen", "1000"], "--seqlen: expected multiples of 128, got [1000]"),
    (["--headdim", "64,96"], "--headdim: expected 64, 128 or both, which all libraries take, got [64, 96]"),
])
def test_sizes_that_not_all_libraries_take_are_refused(wrong, complaint, capsys):
    with pytest.raises(SystemExit):
        peers.parse(wrong)
    assert complaint in capsys.readouterr().err


def test_e4m3_reaches_its_largest_number():
    x = torch.randn(2, 3, 5, 7, generator=torch.Generator().manual_seed(0)).bfloat16()
    codes, descale = peers.to_e4m3(x, (0, 2, 3))
    assert descale.shape == (1, 3, 1, 1)
    assert codes.float().abs().amax((0, 2, 3)).tolist() == [peers.E4M3_MAX] * 3
    assert torch.allclose(codes.float() * descale, x.float(), rtol=2**-4, atol=float(descale.max()) * 2**-9)


def test_every_other_round_goes_backwards(monkeypatch):
    order = []
    monkeypatch.setattr(speed, "time_between", lambda work, repeats: order.append(work()) or 1.0)
    speed.time_interleaved({name: lambda name=name: name for name in "abc"}, rounds=3, repeats=2)
    assert "".join(order) == "abccbaabc"
