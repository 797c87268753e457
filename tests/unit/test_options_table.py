"""The table of options against other descriptions of the options: the docs, the call's signatures and its docstring."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

from sage_aot._call import api
from sage_aot._problem.options import OPTIONS, Options, markdown_table

ROOT = Path(__file__).parents[2]
BEFORE, BEHIND = ("key_mask",), ("return_lse", "out")
BESIDE = (*BEFORE, *BEHIND)
"""Keyword arguments of the call that are not options: they are tensors, or change no kernel."""


def keywords() -> dict[str, inspect.Parameter]:
    return {name: parameter for name, parameter in inspect.signature(api.attn).parameters.items()
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY}


def test_the_docs_hold_the_table():
    text = (ROOT / "docs/options.md").read_text("utf-8")
    table = re.findall(r"<!-- table: [^\n]* -->\n(.*?)<!-- end of table -->", text, re.DOTALL)
    assert table == [markdown_table()]


def test_the_table_has_a_row_for_every_option_with_as_many_cells():
    header, rule, *rows = markdown_table().splitlines()
    assert [row.split("|")[1].strip() for row in rows] == [f"`{name}`" for name in OPTIONS]
    assert {row.count("|") for row in (header, rule, *rows)} == {5}


def test_the_call_takes_the_options_of_the_table():
    """Their names, in its order, with its defaults."""
    found = keywords()
    assert tuple(found) == (*BEFORE, *OPTIONS, *BEHIND)
    for name, option in OPTIONS.items():
        default = found[name].default
        assert (type(default), default) == (type(option.default), option.default), name


def test_the_call_and_the_table_annotate_alike():
    annotations = {name: str(field.type) for name, field in Options.__dataclass_fields__.items()}
    assert {name: found.annotation for name, found in keywords().items() if name not in BESIDE} == annotations


def test_every_overload_takes_the_same():
    definitions = [node for node in ast.parse(Path(api.__file__).read_text("utf-8")).body
                   if isinstance(node, ast.FunctionDef) and node.name == "attn"]
    assert len(definitions) == 3
    expected = (*BEFORE, *OPTIONS, *BEHIND)
    assert {tuple(keyword.arg for keyword in node.args.kwonlyargs) for node in definitions} == {expected}


@pytest.mark.parametrize("name", [*OPTIONS, *BESIDE])
def test_the_docstring_tells_of_every_option(name):
    assert len(re.findall(rf"^ {{4}}{name}: \S", inspect.getdoc(api.attn), re.MULTILINE)) == 1


def test_the_docstring_tells_of_nothing_else():
    arguments = inspect.getdoc(api.attn).split("Args:\n")[1].split("\n\n")[0]
    named = [name.strip() for names in re.findall(r"^ {4}(\w[\w, ]*): ", arguments, re.MULTILINE)
             for name in names.split(",")]
    assert named == ["q", "k", "v", *BEFORE, *OPTIONS, *BEHIND]
