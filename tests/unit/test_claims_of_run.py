"""The figures of the one run: claims.yaml has those that the run's logs have."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import claims_of_run
from claims_of_run import CLAIMS, Run, Source, block_with, ratio, spread, table_of

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench/results"
TEXT = (ROOT / "bench/claims.yaml").read_text("utf-8")
FOLDER = re.findall(r"log: (.+-performance)/graph.log", TEXT)[0]


@pytest.mark.skipif(not RESULTS.is_dir(), reason="an sdist has no logs")
def test_claims_of_the_run_are_what_its_logs_say():
    assert claims_of_run.filled(TEXT, Run(RESULTS / FOLDER)).splitlines() == TEXT.splitlines()


def test_every_claim_of_the_runs_folder_is_computed_or_read_from_its_log_page():
    by_hand, name = [], ""
    for line in TEXT.splitlines():
        if line.startswith("  ") and not line.startswith("   ") and line.endswith(":"):
            name = line.strip(" :")
        if line.startswith(f"    log: {FOLDER}/") and not line.endswith("/log.md") and name not in CLAIMS:
            by_hand.append(name)
    assert by_hand == ["first-call-ms", "import-ms"]


BLOCK = """\
  speed:
    what: turtles
    log: before/old.log
    columns: [1K, "4K, causal"]
    rows:
      on a slope: [1, "1,000"]
      "on a slope, at night": [2, 3]
  other:
"""


def test_rows_take_new_figures_and_keep_their_labels():
    source = Source("new", lambda run: [["4", "1,234"], ["", "5 to 6"]])
    assert block_with(BLOCK, source, Run(Path("after"))) == (
        BLOCK.replace("before/old.log", "after/new.log").replace('[1, "1,000"]', '[4, "1,234"]')
        .replace("[2, 3]", '["", 5 to 6]'))


@pytest.mark.parametrize("rows", [[["1"]], [["1"], ["2"], ["3"]]], ids=["too few", "too many"])
def test_another_number_of_rows_is_refused(rows):
    with pytest.raises(SystemExit, match="expected . rows"):
        block_with(BLOCK, Source("new", lambda run: rows), Run(Path("after")))


def test_tables_of_logs():
    text = "- GPU: turtle\n\n| row | µs | × | µs |\n|---|---:|---:|---:|\n| a | 1 | 2 | 3 |\n| b | 4 | – | 5 |\n"
    assert table_of(text) == [{"row": "a", "µs": "1", "×": "2", "µs 2": "3"},
                              {"row": "b", "µs": "4", "×": "–", "µs 2": "5"}]


def test_one_row_is_asked_for(tmp_path):
    (tmp_path / "part.log").write_text("| row | N |\n|---|---|\n| a | 1 |\n| a | 2 |\n", encoding="utf-8")
    run = Run(tmp_path)
    assert run.row("part", N="2") == {"row": "a", "N": "2"}
    with pytest.raises(SystemExit, match="expected one row"):
        run.row("part", row="a")


def test_figures_in_words():
    assert spread(["3.0", "0.5", "1200.4"]) == "0.5 to 1,200"
    assert spread(["2", "2"]) == "2"
    assert ratio("10", "4") == "2.50"
