"""Operations of planted bugs on a piece of code: operators of mutation testing, each for one form of code.

Source: Jia & Harman, "An Analysis and Survey of the Development of Mutation Testing", IEEE TSE 37 (5), 2011.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from headers import STATEMENTS, code_of, field, words
from tree_sitter import Node


@dataclass(frozen=True)
class Edit:
    """Other code in a node's place."""

    node: Node
    code: str


@dataclass(frozen=True)
class Operation(ABC):
    """A change of the piece of code that reads `what`: the only one in its place, or the `which`-th, from 1 on."""

    what: str
    which: int = 0

    def __str__(self) -> str:
        return f"{type(self).__name__} {self.what}" + (f", number {self.which}" if self.which else "")

    @abstractmethod
    def code_for(self, node: Node) -> str | None:
        """Code that takes a node's place; None where the operation does not apply."""


class Drop(Operation):
    """Leave a statement out."""

    def code_for(self, node: Node) -> str | None:
        return ";" if node.type in STATEMENTS else None


class Always(Operation):
    """Execute a statement whatever its condition."""

    def code_for(self, node: Node) -> str | None:
        if node.type != "if_statement" or node.child_by_field_name("alternative"):
            return None
        return code_of(field(node, "consequence"))


class _Part(Operation):
    """A part of an expression in the place of the whole."""

    of: ClassVar[str]
    part: ClassVar[str]

    def code_for(self, node: Node) -> str | None:
        return code_of(field(node, self.part)) if node.type == self.of else None


class Left(_Part):
    """Keep the first of an operator's two operands."""

    of, part = "binary_expression", "left"


class Right(_Part):
    """Keep the second of an operator's two operands."""

    of, part = "binary_expression", "right"


class First(_Part):
    """Take the first of a conditional expression's two values."""

    of, part = "conditional_expression", "consequence"


class Second(_Part):
    """Take the second of a conditional expression's two values."""

    of, part = "conditional_expression", "alternative"


class _Exchange(Operation):
    """Another operator."""

    operators: ClassVar[dict[str, str]]

    def code_for(self, node: Node) -> str | None:
        if node.type not in ("binary_expression", "assignment_expression"):
            return None
        operator = field(node, "operator")
        other = self.operators.get(operator.text.decode())
        return other and _with(node, (operator, other))


class OffByOne(_Exchange):
    """Compare with the end included, or no longer."""

    operators = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="}


class Opposite(_Exchange):
    """Compare the other way round."""

    operators = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}


class Sign(_Exchange):
    """Subtract instead of adding, or the other way round."""

    operators = {"+": "-", "-": "+", "+=": "-=", "-=": "+="}


class Remainder(_Exchange):
    """Take the remainder instead of the quotient, or the other way round."""

    operators = {"/": "%", "%": "/"}


class Swap(Operation):
    """Swap the last two arguments of a call, elements of a list or values of a conditional expression."""

    def code_for(self, node: Node) -> str | None:
        return _swapped(node, *_last_two(node))


class Indices(Operation):
    """Swap the last two indices of an array's element."""

    def code_for(self, node: Node) -> str | None:
        inner = node.named_children[0] if node.type == "subscript_expression" else node
        if inner.type != "subscript_expression":
            return None
        return _swapped(node, field(inner, "indices"), field(node, "indices"))


class Phase(Operation):
    """Wait for the other phase of a barrier."""

    def code_for(self, node: Node) -> str | None:
        if node.type == "binary_expression" and words(node.text.decode()).endswith("phase^1"):
            return code_of(field(node, "left"))
        return None


@dataclass(frozen=True)
class Put(Operation):
    """Put other code in its place."""

    instead: str = ""

    def code_for(self, node: Node) -> str | None:
        return self.instead


@dataclass(frozen=True)
class Before(Operation):
    """Execute one more statement in front of a statement."""

    more: str = ""

    def code_for(self, node: Node) -> str | None:
        return f"{{ {self.more} {code_of(node)} }}" if node.type in STATEMENTS else None


@dataclass(frozen=True)
class Behind(Drop):
    """Execute a statement behind a later one."""

    later: str = ""

    def code_behind(self, later: Node, node: Node) -> str:
        """Code that takes the later statement's place."""
        return f"{{ {code_of(later)} {code_of(node)} }}"


def _last_two(node: Node) -> list[Node]:
    """Arguments, elements or values; fewer where a node has no two."""
    if node.type == "conditional_expression":
        return [field(node, "consequence"), field(node, "alternative")]
    if node.type == "call_expression":
        node = field(node, "arguments")
    return node.named_children[-2:] if node.type in ("argument_list", "initializer_list") else []


def _swapped(node: Node, *pair: Node) -> str | None:
    """A node's code with two of its parts in each other's place; None without two that differ."""
    if len({words(part.text.decode()) for part in pair}) < 2:
        return None
    first, second = pair
    return _with(node, (first, code_of(second)), (second, code_of(first)))


def _with(node: Node, *changes: tuple[Node, str]) -> str:
    """A node's code with other code in the place of some of its parts, named in their order."""
    code = node.text
    for part, instead in reversed(changes):
        first, end = part.start_byte - node.start_byte, part.end_byte - node.start_byte
        code = code[:first] + instead.encode() + code[end:]
    return code.decode()
