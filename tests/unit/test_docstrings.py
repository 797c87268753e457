"""Docstrings of the repository: each begins with a noun or a verb."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = "sage_aot", "codegen", "bench", "ci", "examples", "tests"  # tests of a wheel lie next to some of them alone
OPENERS = {
    "after", "also", "among", "and", "apart", "as", "at", "because", "between", "but", "by", "for", "from",
    "here", "how", "if", "in", "it", "its", "likewise", "of", "on", "or", "over", "such", "that", "their", "then",
    "there", "these", "they", "this", "those", "through", "to", "under", "what", "whatever", "when", "where", "whether",
    "which", "while", "whose", "why", "with", "within", "without"}
"""First words of a docstring that leaves its object unnamed; so does "The same"."""
SHOWN = {
    "bench/crossover.py": "Where torch's attention is faster",
    "bench/inputs.py": "What a call costs",
    "tests/integrations/test_torch.py": "What it says.",
    "tests/sim/operations.py": ("Of an operator's two operands", "Of a conditional expression's two values"),
}
"""Beginnings of docstrings that are text, by file: help of a program, rows of docs/simulator.md, a test's string."""


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring: of the module, classes, functions, and what they assign."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            for part in node.body:
                match part:
                    case ast.Expr(ast.Constant(str(text))):
                        yield part.lineno, text.strip()


def names_no_object(text: str) -> bool:
    """True where the first word, or "The same", leaves the docstring's object unnamed."""
    first, *others = [word.strip(".,:;").lower() for word in text.split()[:2]] or [""]
    return first in OPENERS or [first, *others] == ["the", "same"]


@pytest.mark.parametrize(("text", "found"), [
    ("Whether a call splits keys.", True), ("Likewise: of V.", True), ("The same on a device.", True),
    ("True where a call splits keys.", False), ("The keys of a call.", False), ("", False)])
def test_openers_are_told(text, found):
    assert names_no_object(text) == found


def test_docstrings_begin_with_a_noun_or_a_verb():
    names = [path.relative_to(ROOT).as_posix() for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    assert Path(__file__).relative_to(ROOT).as_posix() in names
    found = [f"{name}:{line}: {text.splitlines()[0]}" for name in names
             for line, text in docstrings(ast.parse((ROOT / name).read_bytes()))
             if names_no_object(text) and not text.startswith(SHOWN.get(name, ()))]
    assert not found, "expected docstrings that begin with a noun or a verb, such as \"True where\" for \"Whether\""
