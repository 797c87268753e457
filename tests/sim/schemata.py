"""Bugs planted many at once: headers in which a number that the engine holds says which of the bugs is there.

A changed statement S becomes `if (sim::planted(7)) { S' } else { S }`, a changed value v `(sim::planted(7) ? v' : v)`.
So one compilation serves all bugs that a kernel shows. Constants, constexpr functions and initializers of members have
no switch: a bug there gets a copy of the headers of its own.

Source: Untch, Offutt & Harrold, "Mutation Analysis Using Mutant Schemata", ISSTA 1993.
"""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from headers import STATEMENTS, Place, code_in, on_one_line, words
from operations import Behind, Edit, Operation
from simbuild import PROJECT, ROOT, Project
from tree_sitter import Node

from codegen.files import write_if_changed


@dataclass(frozen=True)
class Bug:
    """A place in a header, and what goes wrong there."""

    header: str  # below templates/include/sage
    place: str  # the function or the constant: "Mainloop::step"
    operation: Operation

    def __str__(self) -> str:
        return f"{self.place}: {self.operation}"

    @property
    def path(self) -> Path:
        return PROJECT.include / "sage" / self.header

    def edits(self) -> list[tuple[Place, Edit]]:
        """Edits, and their places; ValueError where the code that the operation names is not there."""
        place, node = self._find(self.operation.what, self.operation.which)
        code = self.operation.code_for(node)
        if code is None:
            raise ValueError(f"{self}: does not apply to {node.type}")
        edits = [(place, Edit(node, code))]
        if isinstance(self.operation, Behind):
            place, later = self._find(self.operation.later)
            if later.start_byte < node.end_byte:
                raise ValueError(f"{self}: {self.operation.later!r} does not stand behind it")
            edits.append((place, Edit(later, self.operation.code_behind(later, node))))
        return edits

    @cached_property
    def can_be_switched(self) -> bool:
        """True where the bug can be planted with others."""
        return all(can_be_switched(place, edit.node) for place, edit in self.edits())

    def _find(self, what: str, which: int = 0) -> tuple[Place, Node]:
        found = code_in(self.path, self.place).get(words(what), [])
        if which > len(found) or (not which and len(found) != 1):
            raise ValueError(f"{self}: found {len(found)} times in {self.header}: {what!r}")
        return found[max(which - 1, 0)]


def can_be_switched(place: Place, node: Node) -> bool:
    """True where other code can stand next to a node, behind a switch."""
    return _switch(place, node) is not None


def plant(bug: Bug, folder: Path) -> Project:
    """A copy of the sources with one bug in it."""
    text = bug.path.read_bytes()
    for _, edit in sorted(bug.edits(), key=lambda found: -found[1].node.start_byte):
        text = text[:edit.node.start_byte] + edit.code.encode() + text[edit.node.end_byte:]
    return _copy({bug.path: text}, folder)


def plant_switched(bugs: Sequence[Bug], folder: Path) -> Project:
    """A copy of the sources with all of these bugs. The engine's number says which is there: from 1 on; 0 is none."""
    switches: dict[Path, dict[_Switch, list[tuple[int, Edit]]]] = defaultdict(lambda: defaultdict(list))
    for number, bug in enumerate(bugs, 1):
        for place, edit in bug.edits():
            switches[bug.path][_switch(place, edit.node)].append((number, edit))
    return _copy({path: _with_switches(path.read_bytes(), found) for path, found in switches.items()}, folder)


def _copy(changed: dict[Path, bytes], folder: Path) -> Project:
    """The sources with some of them changed. Files that are as in an earlier copy keep their times, for ninja."""
    project = Project(folder, folder / "build")
    shutil.copytree(ROOT / "templates", project.templates, dirs_exist_ok=True, ignore=lambda parent, names: [
        name for name in names if Path(parent, name) in changed])
    shutil.copy2(PROJECT.matrix, folder)
    for path, text in changed.items():
        write_if_changed(project.include / path.relative_to(PROJECT.include), text)
    return project


# --- switches ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Switch:
    """The code around an edit that is written once more for it."""

    first: int  # byte
    end: int
    kind: str  # "statement", "value", or "update" of a loop, whose value nobody takes

    @classmethod
    def at(cls, node: Node, kind: str) -> _Switch:
        return cls(node.start_byte, node.end_byte, kind)

    def chain(self, cases: Iterable[tuple[int, str]], default: str) -> str:
        """Each code with the number that asks for it, and the code where none does."""
        if self.kind == "statement":
            branches = [f"if (sim::planted({number})) {{ {code} }} else " for number, code in cases]
            return f"{{ {''.join(branches)}{{ {default} }} }}"
        form = "static_cast<void>({})" if self.kind == "update" else "({})"
        return "(" + "".join(f"sim::planted({number}) ? {form.format(code)} : " for number, code in cases) + (
            form.format(default) + ")")


def _switch(place: Place, node: Node) -> _Switch | None:
    """The smallest around a node; None where none can stand."""
    if place.is_constant:
        return None
    if node.type in STATEMENTS:
        return _Switch.at(node, "statement")
    element = node  # of the list that initializes a variable
    while node.id != place.node.id:
        parent = node.parent
        if parent.type == "compound_statement":
            return None  # a declaration without a value
        element = node if parent.type in ("argument_list", "initializer_list") else element
        if parent.type in ("expression_statement", "return_statement"):
            return _Switch.at(parent, "statement")
        if parent.type == "condition_clause":
            statement = parent.parent
            if any(child.type == "constexpr" for child in statement.children):
                return _Switch.at(statement, "statement")
            return _Switch.at(node, "value") if node.type != "declaration" else None
        if parent.type == "for_statement" and node.type != "declaration":
            return _Switch.at(node, "update" if parent.child_by_field_name("update") == node else "value")
        if parent.type == "init_declarator":
            constant = any(child.text == b"constexpr" for child in parent.parent.children)
            in_list = node.type in ("argument_list", "initializer_list")
            return None if constant else _Switch.at(element if in_list else node, "value")
        node = parent
    return None


def _with_switches(text: bytes, switches: dict[_Switch, list[tuple[int, Edit]]]) -> bytes:
    outer_first = sorted(switches, key=lambda switch: (switch.first, -switch.end))

    def changed(switch: _Switch, edit: Edit) -> str:
        code = text[switch.first:edit.node.start_byte] + edit.code.encode() + text[edit.node.end_byte:switch.end]
        return on_one_line(code.decode())

    def written(first: int, end: int, within: list[_Switch]) -> str:
        code, at = "", first
        for i, switch in enumerate(within):
            if switch.first < at:
                continue  # part of one that is written already
            inner = [other for other in within[i + 1:] if other.end <= switch.end]
            default = written(switch.first, switch.end, inner)
            cases = [(number, changed(switch, edit)) for number, edit in switches[switch]]
            code += text[at:switch.first].decode() + switch.chain(cases, default)
            at = switch.end
        return code + text[at:end].decode()

    return written(0, len(text), outer_first).encode()
