"""Figures in pages come from bench/claims.yaml, and those from logs in bench/results; or a log has their numbers."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import claims
import quotes

ROOT = Path(__file__).parents[2]
COVERED = ("README.md", "docs/performance.md")
"""Pages that give no measured figure without a claim."""
LOGGED = tuple(sorted({page.relative_to(ROOT).as_posix() for page in quotes.documents(ROOT)} - {*COVERED}))
"""All others: their measured figures without a claim stand in a log that their own section links."""
WITH_LOGS = pytest.mark.skipif(not (ROOT / "bench/results").is_dir(), reason="an sdist has no logs")


# --- this tree --------------------------------------------------------------------------------------------------------


@WITH_LOGS
def test_quotes_heads_of_logs_and_the_index_are_those_of_the_claims(capsys):
    assert (claims.main([]), capsys.readouterr().err) == (0, "")


@pytest.mark.parametrize("page", COVERED)
def test_a_page_gives_no_measured_figure_without_a_claim(page):
    assert quotes.unclaimed((ROOT / page).read_text("utf-8")) == []


@WITH_LOGS
@pytest.mark.parametrize("page", LOGGED)
def test_a_page_gives_no_measured_figure_without_a_log(page):
    found = quotes.unlogged((ROOT / page).read_text("utf-8"), ROOT / "bench/results")
    assert [f"{page}:{line}: {figure}" for line, figure in found] == []


@pytest.mark.parametrize("page", LOGGED)
def test_each_section_with_a_measured_figure_links_a_log(page):
    found = quotes.unlinked((ROOT / page).read_text("utf-8"))
    assert [f"{page}:{line}: {figure}" for line, figure in found] == []


def git(*argv: str) -> str:
    """Output of a command of git in this tree."""
    return subprocess.run(["git", "-C", str(ROOT), *argv], capture_output=True, text=True, check=False).stdout


def test_git_has_the_files_that_logs_say_it_shows():
    if not (ROOT / ".git").exists() or git("rev-parse", "--is-shallow-repository") != "false\n":
        pytest.skip("no whole history here")
    pages = [*ROOT.glob("docs/*.md"), *ROOT.glob("bench/results/*/log.md")]
    shown = {name for page in pages
             for name in re.findall(r"git show ([0-9a-f]{7,40}:bench/\S+)", page.read_text("utf-8"))}
    assert sorted(name for name in shown if git("cat-file", "-t", name) != "blob\n") == []


def links(page: Path) -> list[Path]:
    """The files that a page links to."""
    text = re.sub(r"```.*?^```$", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    return [(page.parent / target).resolve() for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text)
            if "://" not in target]


@WITH_LOGS
def test_pages_and_logs_link_to_files_that_exist():
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("bench/results/**/*.md")]
    assert [f"{page.relative_to(ROOT)}: {target.name}" for page in pages for target in links(page)
            if not target.exists()] == []


@WITH_LOGS
def test_what_no_page_names_is_not_kept():
    """A raw file stays while its log, a page or a test names it; JSON stays with its log."""
    named = {target for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("bench/results/*/log.md")]
             for target in links(page)}
    kept = {path.resolve() for path in ROOT.glob("bench/results/*/*") if path.suffix != ".json"}
    logs = {path for path in kept if path.name == "log.md"}
    assert sorted(str(path.relative_to(ROOT)) for path in kept - logs - named) == []


@WITH_LOGS
def test_logs_hold_no_dots_of_pytest():
    dotted = [path for path in ROOT.glob("bench/results/*/*.log")
              if re.search(r"^[.sxF]{8,}", path.read_text(encoding="utf-8"), re.MULTILINE)]
    assert [str(path.relative_to(ROOT)) for path in dotted] == []


# --- a small tree -----------------------------------------------------------------------------------------------------

RUN = "h200-2026-01-02-turtles"
CLAIMS = f"""\
runs:
  {RUN}:
    gpu: NVIDIA H200
    commit: 0123abc
    command: python bench/turtles.py
claims:
  speed:
    what: turtles
    unit: × hares
    log: {RUN}/log.md
    value: 1.50
  range:
    what: turtles on a slope
    unit: times as fast
    log: {RUN}/log.md
    value: 0.96 to 1.18
  error:
    what: turtles that lose the way
    unit: "% of all"
    log: {RUN}/turtles.json
    value: 3.7
  quotient:
    what: hares asleep
    unit: times as long
    log: {RUN}/log.md
    value: 0.58
    quotient: [577.8, 999.1]
  lengths:
    what: turtles by length
    unit: × hares
    log: {RUN}/log.md
    columns: [1K, "4K, causal"]
    rows:
      old: [0.89, ""]
      young: [1.32, 1.56]
  share:
    what: turtles that are old
    unit: "% of the young"
    log: {RUN}/log.md
    value: 57
    quotient: [0.89, 1.56]
"""
LOG = "# Turtles\n\nThey have 1.4987, 0.962 and 1.18; 577.8 and 999.1; 0.89, 1.32 and 1.56.\n"
PAGE = """\
# Race

Turtles are 9<!-- claim: speed --> times as fast, on a slope 1 to 2<!-- claim: range -->, old ones
0<!-- claim: lengths[old, 1K] --> and young ones 1<!-- claim: lengths[young, 4K, causal] -->.

<!-- table: claim lengths -->
<!-- end of table -->
"""
TABLE = """\
| × hares | 1K | 4K, causal |
| --- | ---: | ---: |
| old | 0.89 ||
| young | 1.32 | 1.56 |
"""


@pytest.fixture
def tree(tmp_path):
    """A tree with one run, its claims, and a page that quotes them."""
    for folder in ("docs", "sage_aot", "tests", f"bench/results/{RUN}"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "README.md").write_text("# Animals\n")
    (tmp_path / "docs/race.md").write_text(PAGE)
    (tmp_path / "sage_aot/_gain.py").write_text(f'"""Of bench/results/{RUN}."""\n')
    (tmp_path / "bench/claims.yaml").write_text(CLAIMS)
    (tmp_path / f"bench/results/{RUN}/log.md").write_text(LOG)
    (tmp_path / f"bench/results/{RUN}/turtles.json").write_text('{"lost": 0.0373}')
    return tmp_path


@pytest.fixture
def said(tree, capsys):
    """Function that runs the command: what it prints where it fails."""

    def run(*argv: str) -> str:
        status = claims.main(list(argv), tree)
        err = capsys.readouterr().err
        assert status == bool(err)
        return err

    return run


def test_quotes_get_the_values_of_their_claims(tree, said):
    assert "docs/race.md is out of date: run python bench/claims.py --write\n" in said()
    assert said("--write") == said() == ""
    text = (tree / "docs/race.md").read_text()
    assert "are 1.50<!-- claim: speed --> times as fast, on a slope 0.96 to 1.18<!-- claim: range -->, old" in text
    assert "\n0.89<!-- claim: lengths[old, 1K] --> and young ones 1.56<!-- claim: lengths[young, 4K, causal]" in text
    assert f"<!-- table: claim lengths -->\n{TABLE}<!-- end of table -->\n" in text


def test_a_quote_may_have_a_line_break():
    assert quotes.requoted("9<!-- claim:\nspeed -->", {"speed": "1.50"}, {}) == ("1.50<!-- claim:\nspeed -->", [])


def test_a_log_gets_a_head_and_the_index_a_row(tree, said):
    said("--write")
    log = (tree / f"bench/results/{RUN}/log.md").read_text()
    assert log == ("# Turtles\n\n<!-- run -->\n- GPU: NVIDIA H200\n- commit: 0123abc\n- command: `python "
                   "bench/turtles.py`\n<!-- end of run -->\n\n" + LOG.partition("\n\n")[2])
    index = (tree / "bench/results/README.md").read_text()
    assert "3 of its 6 claims are quoted" in index
    assert index.endswith(f"| 2026-01-02 | [Turtles]({RUN}/log.md) | NVIDIA H200 | 0123abc | "
                          f"[race](../../docs/race.md), [_gain.py](../../sage_aot/_gain.py) |  |\n")


def test_a_run_is_not_cited_by_the_name_of_another(tree, said):
    short = RUN.removesuffix("-turtles")
    (tree / "bench/claims.yaml").write_text(CLAIMS.replace(
        "claims:\n", f"  {short}: {{gpu: none, commit: unknown, command: none}}\nclaims:\n"))
    (tree / "bench/results" / short).mkdir()
    (tree / "bench/results" / short / "log.md").write_text("# Hares\n\nAsleep.\n")
    said("--write")
    assert f"[Hares]({short}/log.md) | none | unknown |  |  |\n" in (tree / "bench/results/README.md").read_text()


@pytest.mark.parametrize(("old", "new", "message"), [
    ("value: 1.50", "value: 1.51", "the figure 1.51 of the claim speed in"),
    ("value: 3.7", "value: 3.8", f"the figure 3.8 of the claim error in bench/results/{RUN}/turtles.json, got none"),
    ("0.96 to 1.18", "0.96 to 1.19", "the figure 0.96 to 1.19 of the claim range"),
    ("value: 0.58", "value: 0.59", "expected 577.8 / 999.1 as the claim quotient, got 0.59"),
    ("value: 57", "value: 0.57", "expected 0.89 / 1.56 as the claim share, got 0.57"),
    ("[577.8, 999.1]", "[577.9, 999.1]", "the figure 577.9 of the claim quotient"),
    ("[1.32, 1.56]", "[1.33, 1.56]", "the figure 1.33 of the claim lengths"),
    ("[1.32, 1.56]", "[1.32]", "bench/claims.yaml:34: expected 2 figures in the row young of lengths, got 1"),
    (f"{RUN}/turtles.json", f"{RUN}/hares.json", f"the claim error, got no file bench/results/{RUN}/hares.json"),
    (f"{RUN}/turtles.json", "turtles.json", "bench/claims.yaml:20: expected a file of a run, as RUN/log.md, got"),
    ("commit: 0123abc", "commit: today", "bench/claims.yaml:4: expected the hash of a commit in 7 digits, or a text"),
    ("    commit: 0123abc\n", "", f"expected the key 'commit' in the run {RUN}, got none"),
    ("    command:", "    superseded_by: hares\n    command:", "expected the name of a run, got 'hares'"),
    ("value: 1.50", "value: fast", "bench/claims.yaml:11: expected a figure such as 1.50, or 1.24 to 1.28, got 'fast'"),
    ("    value: 1.50\n", "", "expected a value, or columns and rows, in the claim speed, got what, unit, log"),
    ("  range:", "  speed:", "expected the key 'speed' once in claims, got it twice"),
])
def test_a_claim_that_its_log_does_not_bear_is_refused(tree, said, old, new, message):
    assert CLAIMS.count(old) == 1
    (tree / "bench/claims.yaml").write_text(CLAIMS.replace(old, new))
    assert message in said("--write")
    assert (tree / "docs/race.md").read_text() == PAGE


@pytest.mark.parametrize(("old", "new", "message"), [
    ("claim: speed", "claim: sped", "docs/race.md: expected the name of a claim's figure, got 'sped'"),
    ("claim: speed", "claim: lengths", "docs/race.md: expected the name of a claim's figure, got 'lengths'"),
    ("9<!--", "Nine <!--", "docs/race.md: expected a figure such as 1.50 directly before <!-- claim: speed -->, got"),
    ("table: claim lengths", "table: claim speed", "expected the name of a claim with a table, got 'speed'"),
])
def test_a_quote_of_no_claim_is_refused(tree, said, old, new, message):
    (tree / "docs/race.md").write_text(PAGE.replace(old, new, 1))
    assert message in said("--write")


def test_a_folder_without_a_run_and_a_run_without_a_log_are_refused(tree, said):
    (tree / "bench/results/h200-2026-01-03-hares").mkdir()
    (tree / f"bench/results/{RUN}/log.md").unlink()
    told = said()
    assert "expected a run for each folder of bench/results, got none for h200-2026-01-03-hares" in told
    assert f"bench/results/{RUN}/log.md: expected the log of the run {RUN}, got none" in told


def test_a_log_without_a_title_is_refused(tree, said):
    (tree / f"bench/results/{RUN}/log.md").write_text(LOG.removeprefix("# "))
    assert "log.md: expected a title, '# ...', and an empty line, got 'Turtles" in said("--write")


# --- figures without a claim ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "found"), [
    ("It is 1.5 times as fast.", ["1.5 times"]),
    ("It has 930 TOPS, 18 % error, 28 to 49 µs.", ["930 TOPS", "18 %", "28 to 49 µs"]),
    ("The ratio is 0.94, a speed-up of × 1.3.", ["0.94", "× 1.3"]),
    ("| attn | 930 | **1.50** | 4K |", ["930", "**1.50**"]),
    ("2 × 24 heads of 128 channels over 4,096 keys, torch 2.11, Python ≥ 3.10, 0.1.0 and sm90", []),
    ("Python 3.10 to 3.14, torch from 2.11, wheels from 5.25 on, and from 3.15 to 3.16", ["3.15", "3.16"]),
    ("arXiv:2411.10958 and 2411.10958", ["2411.10958"]),
    ("`scale=0.25` and [1.25](a/1.25.md) https://a.b/2411.10958", ["1.25"]),
    ("1.50<!-- claim: a --> and 50 %<!-- no claim --> of the keys", []),
    ("```sh\npip install a==1.25\n```\n", []),
    ("<!-- table: claim a -->\n| a | 1.25 |\n<!-- end of table -->\n", []),
    ("<!-- sweep -->\n| a | 1.25 |\n<!-- end of sweep -->\n", []),
    ("<!-- no claim -->\n| a | 1.25 |\n| b | 1.26 |\n\n1.27\n| c | 1.28 |\n", ["1.27", "1.28"]),
])
def test_figures_that_look_measured(text, found):
    assert [figure for _, figure in quotes.unclaimed(text)] == found


def test_figures_that_look_measured_have_their_line():
    assert quotes.unclaimed("```\n1.25\n```\n<!-- a\nb -->\n1.50\n") == [(6, "1.50")]


# --- figures without a log --------------------------------------------------------------------------------------------

LINK = f"[log](../bench/results/{RUN}/log.md)"
OTHER = "h200-2026-01-03-hares"
PARTS = """\
# Race

All took 1,250 µs.

## Hares

Theirs are {hares}

### At night

By night {night}

## Turtles

Theirs are {turtles}
"""


@pytest.fixture
def unlogged(tree):
    """Function that finds the figures of a text that no log of the tree has."""
    (tree / f"bench/results/{RUN}/log.md").write_text(f"{LOG}They take 1250 µs, by night -2.50, sm90 99.\n")
    (tree / "bench/results" / OTHER).mkdir()
    (tree / f"bench/results/{OTHER}/log.md").write_text("# Hares\n\n7.25 times\n")
    return lambda text: quotes.unlogged(text, tree / "bench/results")


@pytest.mark.parametrize(("text", "found"), [
    (f"0.962 times {LINK}", []),
    (f"0.96 times {LINK}", ["0.96 times"]),
    (f"0.0373 of a file next to the log, {LINK}", []),
    (f"[log](../bench/results/{RUN}) 0.962", []),
    (f"[log](bench/results/{RUN}/turtles.json) of the README 0.962", []),
    ("0.962 times, without a link", ["0.962 times"]),
    (f"0.962 times, of bench/results/{RUN}/log.md", ["0.962 times"]),
    (f"[log](../bench/results/{RUN}-2/log.md) 0.962", ["0.962"]),
    (f"0.89 to 1.32 times {LINK}", []),
    (f"0.89 to 1.33 times {LINK}", ["0.89 to 1.33 times"]),
    (f"0.88 to 1.32 times {LINK}", ["0.88 to 1.32 times"]),
    (f"1,250 µs, −2.5 %, 1.320 {LINK}", []),
    (f"99 %, 90 % and 99<!-- no claim --> % {LINK}", ["90 %"]),
    (f"7.25 {LINK}", ["7.25"]),
    (f"7.25 and 0.962 {LINK} [log](../bench/results/{OTHER}/log.md)", []),
])
def test_figures_that_their_log_does_not_have(unlogged, text, found):
    assert [figure for _, figure in unlogged(f"# Race\n\n{text}\n")] == found


@pytest.mark.parametrize(("parts", "found"), [
    ({"hares": "0.962"}, [3, 7]),
    ({"hares": f"0.962 {LINK}"}, [3]),
    ({"hares": f"0.962\n```\n# {LINK}\n```\n"}, [3, 7]),
    ({"hares": f"{LINK}\n```sh\n# turtles\n```\n0.962"}, [3]),
    ({"hares": f"these: {LINK}", "night": "0.962"}, [3]),
    ({"night": f"0.962 {LINK}"}, [3]),
    ({"hares": "0.962", "night": LINK}, [3, 7]),
    ({"hares": LINK, "turtles": "0.962"}, [3, 15]),
    ({"night": LINK, "turtles": "0.962"}, [3, 15]),
    ({"turtles": f"0.962 {LINK}"}, [3]),
])
def test_a_log_is_of_its_section_and_of_those_below(unlogged, parts, found):
    text = PARTS.format(**{"hares": "many", "night": "few", "turtles": "slow", **parts})
    assert [line for line, _ in unlogged(text)] == found
    assert unlogged(text.replace("# Race\n", f"# Race, {LINK}\n", 1)) == []


@pytest.mark.parametrize("figure", [
    "1.5 times", "18 %", "930 TOPS", "35.1 µs", "4 s", "600 clocks", "700 W", "1.83 GHz", "1.50", "0.7 to 1.2 ms",
    "113 → 65 µs", "× 1.3", "\n\n| attn | 930 |\n", "\n\n- Figure: 14 in place\n  of 9.4", "\n\n- Figure: 1.5",
])
def test_a_section_with_a_figure_links_a_log_itself(figure):
    text = PARTS.format(hares=f"fast ({LINK}).", night=f"{figure} and less.", turtles=f"slow ({LINK}).")
    text = text.replace("1,250 µs", f"1,250 µs ({LINK})")
    assert [line for line, _ in quotes.unlinked(text)] != []
    assert quotes.unlinked(text.replace("By night", f"By night ({LINK})")) == []


def test_a_figure_without_a_log_has_its_line():
    text = PARTS.format(hares="1.50", night="- Figure: 7.5 or\n  8.5", turtles=f"4 s ({LINK})")
    assert quotes.unlinked(text) == [(3, "1,250 µs"), (7, "1.50")]
    assert quotes.unlinked(text.replace("By night ", "")) == [(3, "1,250 µs"), (7, "1.50"), (11, "7.5"), (12, "8.5")]


@pytest.mark.parametrize("text", [
    "18<!-- no claim --> %", "- Figure: 1.5<!-- no claim --> MB", "1.50<!-- claim: a -->", "14 instructions", "35 KB",
    "- Figure: 811 instead of 829", "torch 2.11", "```\n18 %\n```", "- Rejected: 1.5·2²³",
    "<!-- no claim -->\n| a | 1 |\n",
])
def test_what_needs_no_log(text):
    assert quotes.unlinked(f"# Race\n\n{text}\n") == []


def test_a_heading_belongs_to_its_section(unlogged):
    assert unlogged(f"```\na\n\n```\n# Hares 0.962\n{LINK}\n# Turtles 0.962\n") == [(7, "0.962")]


@pytest.mark.parametrize(("link", "found"), [
    (f"[continued](../{OTHER}/log.md)", []),
    (f"superseded by: [{OTHER}](../{OTHER}/log.md)", [(1, "7.25 times")]),
])
def test_a_log_may_be_continued_in_another(tree, unlogged, link, found):
    with (tree / f"bench/results/{RUN}/log.md").open("a") as log:
        log.write(link)
    assert unlogged(f"7.25 times {LINK}") == found


def test_pictures_are_no_logs(tree, unlogged):
    (tree / f"bench/results/{RUN}/turtles.svg").write_text("7.25")
    assert unlogged(f"7.25 times {LINK}") == [(1, "7.25 times")]
