"""Figures in pages: how a page quotes a claim, and which figures it gives without one.

A figure of a claim has a comment directly behind it, ``1.50<!-- claim: NAME -->``; a cell of a claim's table has
``1.50<!-- claim: NAME[ROW, COLUMN] -->``. A whole table stands between ``<!-- table: claim NAME -->`` and
``<!-- end of table -->``. A number with the unit of a measurement that is none has ``<!-- no claim -->`` behind it,
and a table without measurements has that on the line above it.
Any other figure has its numbers in a run of bench/results that its section links, where a section is the text under
one heading.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from decimal import Decimal
from functools import cache
from itertools import pairwise
from pathlib import Path

_NUMBER = r"[+−-]?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?"
NUMBER = re.compile(_NUMBER)
FIGURE = re.compile(rf"{_NUMBER}(?: to {_NUMBER})?")
"""A figure as a page prints it."""

_MARK = re.compile(r"<!--\s+claim:\s+(.*?)\s+-->", re.DOTALL)
_TABLE = re.compile(r"(<!-- table: claim (\S+) -->\n)(.*?)(<!-- end of table -->)", re.DOTALL)
_UNIT = (r"(?:\s?%|\s(?:times|TOPS|TFLOPS|GB/s|TB/s|[µmn]?s|seconds|clocks|[MG]Hz|W|bits per byte)\b"
         r"|\s×(?!\s?\d))")
_VERSION = (r"(?:torch|Python|CUDA|cuDNN|NVRTC|nvcc|cupy|driver|transformers|diffusers|ComfyUI|frontend|version|"
            r"capability|≥|>=)\s+(?:from\s+)?\d[\d.]*(?: to \d[\d.]*)?|from\s+\d[\d.]*(?=\s+on\b)|arXiv:\d[\d.]*")
_MEASURED = re.compile(rf"(?P<unit>{FIGURE.pattern}{_UNIT})"
                       rf"|(?P<factor>×\s?\d+\.\d+)"
                       rf"|(?P<cell>(?<=\|)[ *_]*{FIGURE.pattern}[ *_]*(?=\|))"
                       rf"|(?P<ratio>(?<![\w.,])\d+\.\d\d+(?![\w.]))")
_NOT_MEASURED = re.compile(
    rf"```.*?^```$|~~~.*?^~~~$|`[^`\n]*`|\]\([^)]*\)|https?://\S+"  # code and addresses
    rf"|<!-- (table|sweep)\b.*?<!-- end of \1 -->|^<!-- no claim -->\n(?:\|.*?\n)+"
    rf"|{FIGURE.pattern}{_UNIT}?<!--\s+(?:claim:.*?|no claim)\s+-->"
    rf"|<!--.*?-->|{_VERSION}", re.DOTALL | re.MULTILINE)

_NUMBER_OF_A_LOG = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?:[eE][+-]?\d+)?")
_LOGS = {".json", ".log", ".md", ".tsv", ".txt"}
_RUN = re.compile(r"\]\((?:\.\./)*bench/results/([\w.-]+)")
_CONTINUED = re.compile(r"\[continu\w*\]\(\.\./([\w.-]+)")
_FIGURES = re.compile(r"^ *- Figure\b.*?(?=^ *- |^$|\Z)", re.DOTALL | re.MULTILINE)
_DECIMAL = re.compile(r"(?<![\w.,])\d+\.\d+(?![\w.])")
_CODE = re.compile(r"^(```|~~~).*?^\1$", re.DOTALL | re.MULTILINE)
_HEADING = re.compile(r"#+(?= )")


def documents(root: Path) -> list[Path]:
    """The pages that quote figures."""
    return [root / "README.md", *sorted((root / "docs").glob("*.md"))]


def decimal(figure: str) -> Decimal:
    """A number as a page prints it."""
    return Decimal(figure.replace(",", "").replace("−", "-"))


def quoted(text: str) -> set[str]:
    """The claims that a page quotes, by name."""
    return {name.partition("[")[0] for name in _MARK.findall(text)} | {name for _, name, _, _ in _TABLE.findall(text)}


def requoted(text: str, figures: dict[str, str], tables: dict[str, str]) -> tuple[str, list[str]]:
    """The page with figures and tables as the claims have them, and what is wrong with its quotes, as sentences."""
    wrong = [f"expected the name of a claim with a table, got {name!r}" for _, name, _, _ in _TABLE.findall(text)
             if name not in tables]
    text = _TABLE.sub(lambda match: f"{match[1]}{tables.get(match[2], match[3])}{match[4]}", text)
    parts, end = [], 0
    for mark in _MARK.finditer(text):
        figure = figures.get(mark[1])
        if figure is None:
            wrong.append(f"expected the name of a claim's figure, got {mark[1]!r}")
            continue
        before = text[end:mark.start()]
        old = re.search(rf"{_NUMBER}{f' to {_NUMBER}' if ' to ' in figure else ''}\Z", before)
        if old is None:
            wrong.append(f"expected a figure such as {figure} directly before <!-- claim: {mark[1]} -->, got "
                         f"{before[-20:]!r}")
            continue
        parts += [before[:old.start()], figure, mark[0]]
        end = mark.end()
    return "".join([*parts, text[end:]]), wrong


def unclaimed(text: str) -> list[tuple[int, str]]:
    """The lines and figures of a page that look measured and quote no claim.

    Looks for numbers with a unit of speed or error, factors, numbers with two decimals or more, and cells of tables
    that are a number. Code, addresses and versions do not count.
    """
    return [(number, found[0].strip()) for number, line in enumerate(_bare(text).splitlines(), 1)
            for found in _MEASURED.finditer(line)]


def _bare(text: str) -> str:
    """A page without what is no figure of a measurement; lines keep their numbers."""
    return _NOT_MEASURED.sub(lambda match: "\n" * match[0].count("\n") or " ", text)


def logged(text: str) -> list[Decimal]:
    """The numbers of a log, without signs."""
    return [Decimal(number.replace(",", "")) for number in _NUMBER_OF_A_LOG.findall(text)]


def unlogged(text: str, results: Path) -> list[tuple[int, str]]:
    """The figures of unclaimed() that no run has which their section links, with their lines.

    ``results`` is the folder of all runs. A section ends at the next heading; what the text right below a heading links
    counts for the headings below it too. A run has the numbers of its folder, and of runs that its log.md links as
    ``[continued](../RUN/log.md)``.
    """
    runs = _runs_of_lines(text)
    return [(line, figure) for line, figure in unclaimed(text)
            if not {abs(decimal(number)) for number in NUMBER.findall(figure)} <= _numbers(results, runs[line - 1])]


def unlinked(text: str) -> list[tuple[int, str]]:
    """The figures of unclaimed() whose own section links no run, with their lines; a link above it does not count.

    In an item ``- Figure: ...``, whose unit may stand further above, every number with a decimal counts too.
    """
    bare = _bare(text)
    found = unclaimed(text)
    for item in _FIGURES.finditer(bare):
        first = bare.count("\n", 0, item.start()) + 1
        found += [(number, decimal[0]) for number, line in enumerate(item[0].splitlines(), first)
                  for decimal in _DECIMAL.finditer(line)]
    linked = {line for first, end, _, runs in _sections(text) if runs for line in range(first, end)}
    return sorted({(line, figure) for line, figure in found if line - 1 not in linked})


def _runs_of_lines(text: str) -> list[set[str]]:
    """The runs that the section of each line links, or the text right below one of the headings above it."""
    runs: list[set[str]] = []
    above: list[tuple[int, set[str]]] = []
    for first, end, depth, own in _sections(text):
        above = [*((higher, linked) for higher, linked in above if higher < depth), (depth, own)]
        runs += [set().union(*(linked for _, linked in above))] * (end - first)
    return runs


def _sections(text: str) -> list[tuple[int, int, int, set[str]]]:
    """The first line of each section, the line behind it, the depth of its heading, and the runs that it links."""
    lines = _CODE.sub(lambda match: "\n" * match[0].count("\n"), text).splitlines()
    headings = [(number, len(found[0])) for number, line in enumerate(lines) if (found := _HEADING.match(line))]
    return [(first, end, depth, set(_RUN.findall("\n".join(lines[first:end]))))
            for (first, depth), (end, _) in pairwise([(0, 0), *headings, (len(lines), 0)])]


def _numbers(results: Path, runs: Iterable[str]) -> set[Decimal]:
    """The numbers of runs, and of those that they are continued in."""
    return set().union(*(_numbers_of_folder(results / name) for run in runs for name in (run, *_later(results / run))))


def _later(run: Path) -> list[str]:
    """The runs that a run's log links as its continuation."""
    log = run / "log.md"
    return _CONTINUED.findall(log.read_text("utf-8")) if log.is_file() else []


@cache
def _numbers_of_folder(run: Path) -> frozenset[Decimal]:
    """The numbers of the text files of one run."""
    texts = (path.read_text("utf-8") for path in run.rglob("*") if path.suffix in _LOGS)
    return frozenset(number for text in texts for number in logged(text))
