"""Words of the repository's texts that a reader has to guess the meaning of: docs/naming.md, section Style, rule 11."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = (".github", "bench", "ci", "codegen", "docs", "examples", "sage_aot", "templates", "tests")  # or some of them
SUFFIXES = {".py", ".jinja", ".cuh", ".cu", ".cpp", ".h", ".c", ".md", ".sh", ".yml", ".yaml",
            ".toml"}

AS_THEY_ARE = ("bench/results/", "bench/claims.yaml", "CHANGELOG.md", "docs/naming.md", "tests/unit/test_words.py")
"""Logs, and the commits that their heads repeat; the list of changes; the rule itself, and its test."""

_BETWEEN = r"""[\s#/*|"'f]+"""  # words of a sentence: in code also marks of comments and of strings
UNCLEAR = re.compile(rf"beside|\bin{_BETWEEN}place{_BETWEEN}of\b", re.IGNORECASE)


def texts() -> Iterator[tuple[str, str]]:
    """Name and text of each file that the rule holds for."""
    in_folders = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*"))
    for path in sorted((*ROOT.glob("*"), *in_folders)):
        name = path.relative_to(ROOT).as_posix()
        if path.suffix in SUFFIXES and path.is_file() and not name.startswith(AS_THEY_ARE):
            yield name, path.read_text(encoding="utf-8")


def unclear_lines(text: str) -> list[int]:
    """Numbers of the lines on which such words begin."""
    return [text.count("\n", 0, found.start()) + 1 for found in UNCLEAR.finditer(text)]


@pytest.mark.parametrize(("text", "lines"), [
    ("A file beside the log.", [1]), ("Logs.\nBesides, a file.", [2]), ("self._beside = 1", [1]),
    ("This in place of that.", [1]), ("# This in place\n# of that, beside it.", [1, 2]),
    ('"this in "\nf"place of that"', [1]), ("In the place of a driver.", []), ("Heads side by side.", []),
    ("Rows are read in place. Of these", []), ("This instead of that, next to it.", [])])
def test_unclear_words_are_told(text, lines):
    assert unclear_lines(text) == lines


def test_no_text_has_words_that_mean_three_things():
    checked = dict(texts())
    assert Path(__file__).with_name("test_docstrings.py").relative_to(ROOT).as_posix() in checked
    found = [f"{name}:{number}: {text.splitlines()[number - 1].strip()}" for name, text in checked.items()
             for number in unclear_lines(text)]
    assert not found, "expected \"instead of\", \"next to\", \"with\" or \"in addition to\" (docs/naming.md, Style, 11)"
