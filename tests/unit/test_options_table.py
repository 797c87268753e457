"""The table of options against other descriptions of the options: the docs, the call's signatures and its docstring."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import get_args

import pytest
import torch

import sage_aot
from sage_aot._call import api
from sage_aot._problem import tensors
from sage_aot._problem.given import Given
from sage_aot._problem.options import OPTIONS, Asked, Options, markdown_table
from sage_aot._problem.tensors import TENSORS

ROOT = Path(__file__).parents[2]
BEFORE, BEHIND = (*TENSORS, "sparse"), ("return_lse", "out")
NO_OPTIONS = (*BEFORE, *BEHIND)
"""Keyword arguments of the call that are not options: they are tensors, make one, or change no kernel."""


def keywords() -> dict[str, inspect.Parameter]:
    return {name: parameter for name, parameter in inspect.signature(api.attn).parameters.items()
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY}


def test_the_docs_hold_the_table():
    text = (ROOT / "docs/options.md").read_text("utf-8")
    table = re.findall(r"<!-- table: [^\n]* -->\n(.*?)<!-- end of table -->", text, re.DOTALL)
    assert table == [markdown_table(), tensors.markdown_table()]


def test_the_table_has_a_row_for_every_option_with_as_many_cells():
    header, rule, *rows = markdown_table().splitlines()
    assert [row.split("|")[1].strip() for row in rows] == [f"`{name}`" for name in OPTIONS]
    assert {row.count("|") for row in (header, rule, *rows)} == {5}


def test_a_call_is_given_the_tensors_of_the_table():
    assert Given._fields == ("kind", *tensors.OPERANDS, "details")


@pytest.mark.parametrize("name", TENSORS)
def test_what_an_optional_tensor_says_of_every_call(name):
    """Each call takes the tensor, or says what to do about it."""
    argument = TENSORS[name]
    assert {*argument.calls, *argument.refused} == set(get_args(tensors.Kind))
    assert not {*argument.calls} & {*argument.refused}
    assert "dense" in argument.calls, "attn takes every optional tensor"
    assert set(argument.shape) <= set(tensors.SIZES)
    assert hasattr(torch, argument.dtype)


@pytest.mark.parametrize(("call", "kind"), [(sage_aot.attn, "dense"), (sage_aot.attn_varlen, "varlen"),
                                            (sage_aot.quantize_kv, "kv"), (sage_aot.train_attn, "train"),
                                            (sage_aot.train_attn_varlen, "train_varlen")])
def test_public_calls_take_the_tensors_that_the_table_says(call, kind):
    parameters = inspect.signature(call).parameters
    assert tuple(name for name in TENSORS if name in parameters) == tensors.taken_by(kind)
    assert all(parameters[name].default is None for name in tensors.taken_by(kind))


def test_the_call_takes_the_options_of_the_table():
    """The call has the options' names, in the table's order, with its defaults."""
    found = keywords()
    assert tuple(found) == (*BEFORE, *OPTIONS, *BEHIND)
    for name, option in OPTIONS.items():
        default = found[name].default
        assert (type(default), default) == (type(option.default), option.default), name


def test_options_that_are_not_checked_yet_stand_in_the_same_order():
    assert Asked._fields == tuple(OPTIONS)
    assert Asked() == tuple(option.default for option in OPTIONS.values())


def test_the_call_and_the_table_annotate_alike():
    annotations = {name: str(field.type) for name, field in Options.__dataclass_fields__.items()}
    assert {name: found.annotation for name, found in keywords().items() if name not in NO_OPTIONS} == annotations


def test_every_overload_takes_the_same():
    definitions = [node for node in ast.parse(Path(api.__file__).read_text("utf-8")).body
                   if isinstance(node, ast.FunctionDef) and node.name == "attn"]
    assert len(definitions) == 3
    expected = (*BEFORE, *OPTIONS, *BEHIND)
    assert {tuple(keyword.arg for keyword in node.args.kwonlyargs) for node in definitions} == {expected}


@pytest.mark.parametrize("name", [*OPTIONS, *NO_OPTIONS])
def test_the_docstring_tells_of_every_option(name):
    assert len(re.findall(rf"^ {{4}}{name}: \S", inspect.getdoc(api.attn), re.MULTILINE)) == 1


def test_the_docstring_tells_of_nothing_else():
    arguments = inspect.getdoc(api.attn).split("Args:\n")[1].split("\n\n")[0]
    named = [name.strip() for names in re.findall(r"^ {4}(\w[\w, ]*): ", arguments, re.MULTILINE)
             for name in names.split(",")]
    assert named == ["q", "k", "v", *BEFORE, *OPTIONS, *BEHIND]
