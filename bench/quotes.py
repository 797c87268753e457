"""Figures in pages: how a page quotes a claim, and which figures it gives without one.

A figure of a claim has a comment directly behind it, ``1.50<!-- claim: NAME -->``; a cell of a claim's table has
``1.50<!-- claim: NAME[ROW, COLUMN] -->``. A whole table stands between ``<!-- table: claim NAME -->`` and
``<!-- end of table -->``. A number with the unit of a measurement that is none has ``<!-- no claim -->`` behind it.
"""

from __future__ import annotations

import re
from decimal import Decimal
from pathlib import Path

_NUMBER = r"[+−-]?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?"
NUMBER = re.compile(_NUMBER)
FIGURE = re.compile(rf"{_NUMBER}(?: to {_NUMBER})?")
"""A figure as a page prints it."""

_MARK = re.compile(r"<!--\s+claim:\s+(.*?)\s+-->", re.DOTALL)
_TABLE = re.compile(r"(<!-- table: claim (\S+) -->\n)(.*?)(<!-- end of table -->)", re.DOTALL)
_UNIT = r"(?:\s?%|\s(?:times|TOPS|TFLOPS|GB/s|TB/s|[µm]s|bits per byte)\b|\s×(?!\s?\d))"
_VERSION = (r"(?:torch|Python|CUDA|cuDNN|NVRTC|nvcc|cupy|driver|transformers|diffusers|ComfyUI|frontend|version|"
            r"capability|≥|>=|from)\s+")
_MEASURED = re.compile(rf"(?P<unit>{FIGURE.pattern}{_UNIT})"
                       rf"|(?P<factor>×\s?\d+\.\d+)"
                       rf"|(?P<cell>(?<=\|)[ *_]*{FIGURE.pattern}[ *_]*(?=\|))"
                       rf"|(?P<ratio>(?<![\w.,])\d+\.\d\d+(?![\w.]))")
_NOT_MEASURED = re.compile(
    rf"```.*?^```$|~~~.*?^~~~$|`[^`\n]*`|\]\([^)]*\)|https?://\S+"  # code and addresses
    rf"|<!-- table: .*?<!-- end of table -->|{FIGURE.pattern}{_UNIT}?<!--\s+(?:claim:.*?|no claim)\s+-->"
    rf"|<!--.*?-->|{_VERSION}\d[\d.]*", re.DOTALL | re.MULTILINE)


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
    bare = _NOT_MEASURED.sub(lambda match: "\n" * match[0].count("\n") or " ", text)
    return [(number, found[0].strip()) for number, line in enumerate(bare.splitlines(), 1)
            for found in _MEASURED.finditer(line)]
