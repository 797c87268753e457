"""build_matrix.yaml → rows, each checked by itself; :mod:`codegen.matrix` checks them together.

Reading goes on after a problem, so that all problems are reported at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from codegen.yaml_reader import YamlReader, line_of
from sage_aot._families import FAMILIES
from sage_aot._kernels.axes import AXES
from sage_aot._kernels.manifest import SUFFIXES
from sage_aot._kernels.spec import IN_EVERY_FAMILY, KINDS, OF_BACKWARD, AttnSpec, capability_of
from sage_aot._kernels.tile import Tile

AXIS_NAMES = AttnSpec.axes()
"""Attention kernels depend on every axis."""

OTHER_AXES = AXIS_NAMES[1:]
"""Axes whose values stand under 'axes' in the matrix. Archs stand under 'archs', with their figures."""

Values = tuple[Any, ...]
"""Values of an axis, as YAML has them."""

_MAX_THREADS = 1024  # of a block, on every GPU

_SIZES = tuple(size for size in Tile._fields if size not in Tile._field_defaults)
"""The sizes that every row of 'tiles' has."""


@dataclass(frozen=True)
class ArchRow:
    """An entry of 'archs'. Numbers are None only where the reader has complained."""

    line: int
    shared_bytes: int | None  # shared memory that a block can have
    least_driver: int | None  # first branch of the driver that loads the arch's kernels
    run_on: str | None  # GPU on which the arch's files ran as they are; None where no GPU ran them


@dataclass(frozen=True)
class Selector:
    """The combinations that a row selects: by values per axis. An axis without values selects all of its values."""

    line: int
    values: dict[str, Values]

    def matches(self, spec: AttnSpec) -> bool:
        return all(getattr(spec, axis) in values for axis, values in self.values.items())

    def text(self, family: str, arch: str) -> str:
        """One canonical line of YAML, which generated sources quote. It names the kernel's own arch alone, so that
        sources stay the same when the row lists one more arch."""
        parts = [f"family: {family}"]
        for axis in AXIS_NAMES:
            values = [str(value) for value in self.values.get(axis, ()) if axis != "arch" or value == arch]
            if values:
                parts.append(f"{axis}: {values[0] if len(values) == 1 else '[' + ', '.join(values) + ']'}")
        return "{" + ", ".join(parts) + "}"


@dataclass(frozen=True)
class Exclusion:
    """Combinations that are not built."""

    selector: Selector
    why: str


@dataclass(frozen=True)
class TileRow:
    """Combinations that are built, and how."""

    selector: Selector
    family: str
    tile: Tile | None  # None only where the reader has complained
    allowed_spill_bytes: int
    suffix: str  # of the attention kernels' target: "a", "f", or "" for instructions that later chips have too


@dataclass(frozen=True)
class FamilyKind:
    """The template and the threads by which a family makes a kind of kernel."""

    template: str
    threads: int | None  # of a block; those of attention kernels follow from their tiles
    min_blocks: tuple[tuple[int, int], ...]  # (head dim, resident blocks an SM) of quantizers; others have their tiles'
    allowed_spill_bytes: int = 0  # of quantizers and backward kernels; attention kernels have their rows'
    suffix: str = ""  # of the target of backward kernels, likewise


@dataclass(frozen=True)
class Rows:
    """All rows of a matrix."""

    archs: dict[str, ArchRow]
    axes: dict[str, Values]  # every axis, the arch included
    families: dict[str, dict[str, FamilyKind]]  # by family and kind
    tiles: tuple[TileRow, ...]
    exclude: tuple[Exclusion, ...]
    tiles_line: int


class RowReader:
    """Reads one matrix. ``selectors_sound``: whether no problem was found in any row's selector."""

    def __init__(self, reader: YamlReader, templates: Path) -> None:
        self.reader = reader
        self.templates = templates
        self.selectors_sound = True
        self.archs: dict[str, ArchRow] = {}
        self.axes: dict[str, Values] = {}
        self.families: dict[str, dict[str, FamilyKind]] = {}

    def read(self, text: str) -> Rows | None:
        """The rows, or None where a selector is wrong: each combination would report that problem again."""
        root = self.reader.document(text)
        if root is None:
            if not self.reader.problems:
                self.reader.complain(1, "expected a build matrix, got nothing")
            return None
        top = self.reader.mapping(root, "the matrix", ("archs", "axes", "families", "tiles", "exclude"))
        self.archs = self._archs(top["archs"]) if "archs" in top else {}
        self.axes = {"arch": tuple(self.archs), **(self._axes(top["axes"]) if "axes" in top else {})}
        self.selectors_sound = not self.reader.problems
        self.families = self._families(top["families"]) if "families" in top else {}
        tiles = [self._tile_row(node) for node in self._rows(top, "tiles")]
        exclude = [self._exclusion(node) for node in self._rows(top, "exclude")]
        if not self.selectors_sound:
            return None
        return Rows(self.archs, self.axes, self.families, tuple(tiles), tuple(exclude), line_of(top["tiles"]))

    def _rows(self, top: dict[str, yaml.Node], key: str) -> list[yaml.Node]:
        return self.reader.items(top[key], f"{key!r}") if key in top else []

    def _archs(self, node: yaml.Node) -> dict[str, ArchRow]:
        return {name: self._arch(name, entry) for name, entry in self.reader.named_mappings(node, "'archs'").items()}

    def _arch(self, name: str, node: yaml.Node) -> ArchRow:
        try:
            capability_of(name)
        except ValueError as error:
            self.reader.complain(line_of(node), str(error))
        entries = self.reader.mapping(node, f"the arch {name!r}", ("shared_bytes", "least_driver"), ("run_on",))
        return ArchRow(line_of(node), self._integer(entries, "shared_bytes"), self._integer(entries, "least_driver"),
                       self.reader.sentence(entries["run_on"], "'run_on'") if "run_on" in entries else None)

    def _integer(self, entries: dict[str, yaml.Node], key: str, expected: str = "a positive number",
                 valid: Callable[[int], bool] = lambda value: value > 0) -> int | None:
        """The integer of a key; None where the key is missing, and after a complaint."""
        value = self.reader.scalar(entries[key]) if key in entries else None
        if value is None or (isinstance(value, int) and not isinstance(value, bool) and valid(value)):
            return value
        self.reader.complain(line_of(entries[key]), f"expected {key} as {expected}, got {value!r}")
        return None

    def _axes(self, node: yaml.Node) -> dict[str, Values]:
        entries = self.reader.mapping(node, "'axes'", OTHER_AXES)
        return {axis: self._known_values(axis, values) for axis, values in entries.items()}

    def _known_values(self, axis: str, node: yaml.Node) -> Values:
        """The values of an axis; wrong ones stay, so that rows which use them are not complained about again."""
        found = self.reader.scalars(node)
        for line, value in found:
            problem = _unknown_value(axis, value)
            if problem:
                self.reader.complain(line, problem)
        return tuple(value for _, value in found)

    def _families(self, node: yaml.Node) -> dict[str, dict[str, FamilyKind]]:
        """Each family with its kinds of kernels. A family must have every kind in IN_EVERY_FAMILY."""
        entries = self.reader.mapping(node, "'families'", (), tuple(FAMILIES))
        others = tuple(kind for kind in KINDS if kind not in IN_EVERY_FAMILY)
        return {name: {kind: self._family_kind(name, kind, values) for kind, values in self.reader.mapping(
                           kinds, f"the family {name!r}", IN_EVERY_FAMILY, others).items()}
                for name, kinds in entries.items()}

    def _family_kind(self, family: str, kind: str, node: yaml.Node) -> FamilyKind:
        keys = {"quant": ("template", "threads", "min_blocks"),
                # their headers say how many threads
                **dict.fromkeys(("attn", "bwdkv", "bwdq", "bwdqkv", "bwdsum"), ("template",))}
        entries = self.reader.mapping(
            node, f"{kind!r} of the family {family!r}", keys.get(kind, ("template", "threads")),
            (*(("allow_spills", "why") if kind in (*OF_BACKWARD, "quant") else ()),
             *(("suffix",) if kind in OF_BACKWARD else ())))
        template = self.reader.scalar(entries["template"]) if "template" in entries else None
        if template is not None and not (self.templates / str(template)).is_file():
            self.reader.complain(line_of(entries["template"]), f"expected a file in templates/, got {template!r}")
        threads = self._integer(entries, "threads", f"a multiple of 32, at most {_MAX_THREADS}",
                                lambda value: value % 32 == 0 and 0 < value <= _MAX_THREADS)
        return FamilyKind(str(template), threads, self._min_blocks(entries),
                          self._allowed_spills(line_of(node), entries), self._suffix(entries))

    def _min_blocks(self, entries: dict[str, yaml.Node]) -> tuple[tuple[int, int], ...]:
        """The head dims, each with its number of blocks; one number is that of every head dim."""
        headdims, expected = self.axes.get("headdim", ()), "a positive integer"
        if isinstance(entries.get("min_blocks"), yaml.MappingNode):
            own = self.reader.mapping(entries["min_blocks"], "'min_blocks'", tuple(map(str, headdims)))
            found = [self._integer(own, str(headdim), expected) for headdim in headdims]
        else:
            found = [self._integer(entries, "min_blocks", expected)] * len(headdims)
        return tuple((int(headdim), blocks) for headdim, blocks in zip(headdims, found) if blocks)

    def _row(self, node: yaml.Node, what: str, required: tuple[str, ...],
             optional: tuple[str, ...] = ()) -> tuple[dict[str, yaml.Node], Selector]:
        """The entries of a row, and the combinations that they select."""
        before = len(self.reader.problems)
        entries = self.reader.mapping(node, what, required, AXIS_NAMES + optional)
        values = {axis: self._listed_values(axis, entries[axis]) for axis in AXIS_NAMES if axis in entries}
        self.selectors_sound &= len(self.reader.problems) == before
        return entries, Selector(line_of(node), values)

    def _listed_values(self, axis: str, node: yaml.Node) -> Values:
        listed = self.axes.get(axis)
        found = self.reader.scalars(node)
        for line, value in found:
            if listed and not _among(value, listed):
                self.reader.complain(line, f"expected a value of the axis {axis!r} {_choices(listed)}, got {value!r}")
        return tuple(value for _, value in found)

    def _tile_row(self, node: yaml.Node) -> TileRow:
        entries, selector = self._row(node, "a row of 'tiles'", ("family", *_SIZES),
                                      (*Tile._field_defaults, "allow_spills", "why", "suffix"))
        family = self.reader.scalar(entries["family"]) if "family" in entries else None
        if family is not None and family not in self.families:
            self.reader.complain(line_of(entries["family"]), f"expected a family {_choices(self.families)}, "
                                                             f"got {family!r}")
        return TileRow(selector, str(family), self._tile(selector.line, str(family), entries),
                       self._allowed_spills(selector.line, entries), self._suffix(entries))

    def _tile(self, line: int, family: str, entries: dict[str, yaml.Node]) -> Tile | None:
        sizes: dict[str, Any] = {size: self.reader.scalar(entries[size]) for size in Tile._fields if size in entries}
        if not sizes.keys() >= set(_SIZES) or None in sizes.values():
            return None
        tile = Tile(**sizes)
        for problem in FAMILIES[family].broken_rules(tile) if family in FAMILIES else ():
            self.reader.complain(line, problem)
        return tile

    def _allowed_spills(self, line: int, entries: dict[str, yaml.Node]) -> int:
        if "why" in entries:
            self.reader.sentence(entries["why"], "'why'")
        if ("allow_spills" in entries) != ("why" in entries):
            got = "allow_spills" if "allow_spills" in entries else "why"
            self.reader.complain(line, f"expected 'allow_spills' and 'why' together, got only {got!r}")
        return self._integer(entries, "allow_spills", "a positive number of bytes") or 0

    def _suffix(self, entries: dict[str, yaml.Node]) -> str:
        suffix = self.reader.scalar(entries["suffix"]) if "suffix" in entries else ""
        if suffix not in ("", *SUFFIXES):
            self.reader.complain(line_of(entries["suffix"]), f"expected a suffix of the target "
                                                             f"{_choices(SUFFIXES)}, got {suffix!r}")
        return str(suffix)

    def _exclusion(self, node: yaml.Node) -> Exclusion:
        entries, selector = self._row(node, "a row of 'exclude'", ("why",))
        why = self.reader.sentence(entries["why"], "'why'") if "why" in entries else None
        return Exclusion(selector, str(why))


def _unknown_value(axis: str, value: object) -> str | None:
    """The problem with a value of an axis, as a sentence; None where it is one."""
    return None if _among(value, AXES[axis]) else (
        f"expected a value of the axis {axis!r} {_choices(AXES[axis])}, got {value!r}")


def _among(value: object, values: Iterable[object]) -> bool:
    """Membership by type and value: 8 is not 8.0, 1 is not true."""
    return any(type(value) is type(other) and value == other for other in values)


def _choices(values: Iterable[object]) -> str:
    return "(" + ", ".join(str(value) for value in values) + ")"
