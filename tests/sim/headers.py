"""The kernels' headers as trees of C++: functions and constants by their names, and the code in them by its words.

Code is compared by its words: where a line is broken and what comments say make no difference.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import tree_sitter_cpp
from tree_sitter import Language, Node, Parser

STATEMENTS = ("expression_statement", "return_statement", "if_statement", "for_statement", "while_statement",
              "do_statement", "break_statement")

_PARSER = Parser(Language(tree_sitter_cpp.language()))
_CUDA = re.compile(rb"__(?:device|host|global|shared|forceinline|grid_constant)__\b"
                   rb"|__launch_bounds__\((?:[^()]|\([^()]*\))*\)|__align__\(\d+\)")
_COMMENTS = re.compile(r"//[^\n]*|^#[^\n]*", re.MULTILINE)  # and directives to the compiler
_NAMED = {"function_definition": "declarator", "struct_specifier": "name", "class_specifier": "name",
          "declaration": "declarator", "field_declaration": "declarator"}
_CLASSES = ("struct_specifier", "class_specifier")
_NAMES = ("identifier", "field_identifier", "type_identifier", "qualified_identifier", "operator_name",
          "operator_cast", "destructor_name")


@dataclass(frozen=True)
class Place:
    """A function, or a constant of a class or of a namespace."""

    name: str  # with its classes: "Mainloop::step"
    node: Node

    @property
    def is_constant(self) -> bool:
        """True where compilers may evaluate the function or constant."""
        return self.node.type != "function_definition" or any(
            child.type == "type_qualifier" and child.text == b"constexpr" for child in self.node.children)


@cache
def tree_of(path: Path) -> Node:
    """CUDA's keywords, which the grammar does not know, are blanked out."""
    return _PARSER.parse(_CUDA.sub(lambda found: b" " * len(found[0]), path.read_bytes())).root_node


@cache
def places_in(path: Path) -> tuple[Place, ...]:
    """Every function of a header, and every constant that is not a function's own."""
    return tuple(Place(name, node) for name, node in _named(tree_of(path), ()))


@cache
def code_in(path: Path, name: str) -> dict[str, list[tuple[Place, Node]]]:
    """All code in a header's places of this name, by its words."""
    return by_words(place for place in places_in(path) if place.name == name)


def _named(node: Node, classes: tuple[str, ...]) -> Iterator[tuple[str, Node]]:
    for child in node.children:
        inner = classes
        if child.type in _NAMED and (name := _name(child)):
            inner = (*classes, name)
            if child.type not in _CLASSES:
                yield "::".join(inner), child
        if child.type != "function_definition":
            yield from _named(child, inner if child.type in _CLASSES else classes)


def _name(node: Node) -> str:
    found = node.child_by_field_name(_NAMED[node.type])
    while found is not None and found.type not in _NAMES:
        found = found.child_by_field_name("declarator") or next(iter(found.named_children), None)
    return found.text.decode() if found else ""


def inside(node: Node) -> Iterator[Node]:
    """A node's descendants and itself, outer ones first."""
    yield node
    for child in node.named_children:
        yield from inside(child)


def by_words(places: Iterable[Place]) -> dict[str, list[tuple[Place, Node]]]:
    """All code in these places, by its words; of nodes that hold the same code the outermost."""
    found = {(node.start_byte, node.end_byte): (place, node)
             for place in places for node in reversed(list(inside(place.node)))}
    result: dict[str, list[tuple[Place, Node]]] = {}
    for _, (place, node) in sorted(found.items(), key=lambda item: item[0]):
        result.setdefault(words(node.text.decode()), []).append((place, node))
    return result


def field(node: Node, name: str) -> Node:
    """A part of a node that the grammar says it has."""
    found = node.child_by_field_name(name)
    assert found is not None, f"{node.type} without {name}"
    return found


@cache
def words(code: str) -> str:
    """Code as it is compared: on one line, without spaces but between words."""
    return re.sub(r"(?<!\w) | (?!\w)", "", on_one_line(code))


def code_of(node: Node) -> str:
    """A node's code on one line."""
    return on_one_line(node.text.decode())


@cache
def on_one_line(code: str) -> str:
    """Code without comments, directives to the compiler, and line breaks behind a bracket."""
    code = _COMMENTS.sub("", code)
    return re.sub(r"(?<=[(\[]) ", "", re.sub(r"\s+", " ", code)).strip()
