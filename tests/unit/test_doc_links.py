"""The documents: links lead to files and headings that exist, and the README stays one screen that names every page."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(path for pattern in ("*.md", "docs/**/*.md", "tests/**/*.md", "bench/results/*/*.md")
                   for path in ROOT.glob(pattern))
LINK = re.compile(r"\]\(([^)\s]+)\)")
BLOCK = re.compile(r"^ *```.*?^ *```$", re.DOTALL | re.MULTILINE)


def links(path: Path) -> Iterator[str]:
    """Targets within the repository: a path, a heading behind a hash, or both."""
    text = re.sub(r"`[^`\n]*`", "", BLOCK.sub("", path.read_text("utf-8")))  # code has brackets, too
    return (target for target in LINK.findall(text) if "://" not in target)


def anchors(path: Path) -> set[str]:
    """Anchors that GitHub makes of headings: lower case, without punctuation, blanks as hyphens, repeats numbered."""
    found: dict[str, int] = {}
    for heading in re.findall(r"^#+ (.*)$", BLOCK.sub("", path.read_text("utf-8")), re.MULTILINE):
        words = re.sub(r"\]\([^)]*\)", "", heading)
        anchor = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
        found[anchor] = found.get(anchor, -1) + 1
        if found[anchor]:
            found[f"{anchor}-{found[anchor]}"] = 0
    return set(found)


@pytest.mark.skipif(not (ROOT / "bench/results").is_dir(), reason="an sdist has no logs")
@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(path: Path):
    for target in links(path):
        name, _, anchor = target.partition("#")
        file = path.parent / name if name else path
        assert file.exists(), f"{target}: expected a file of the repository, got none"
        if anchor:
            assert anchor in anchors(file), f"{target}: expected a heading of {file.name}"


def test_the_readme_is_one_screen():
    """Two set-up commands included; figures belong to docs/performance.md."""
    assert len((ROOT / "README.md").read_text("utf-8").split()) <= 900


def test_the_readme_names_every_page():
    named = {(ROOT / target.partition("#")[0]).resolve() for target in links(ROOT / "README.md")}
    assert set(ROOT.glob("docs/*.md")) <= named


def test_the_readme_has_the_command_that_ci_runs():
    """ci/test.sh takes the first line that ends so, and runs lint and checks in front of its last part."""
    line, = re.findall(r"^.*-m pytest$", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE)
    assert len(line.split(" && ")) == 3
