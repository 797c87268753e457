"""build_matrix.yaml → the kernels to build, and per combination of the axes without a kernel, the reason.

Each combination is excluded, or covered by exactly one row of tiles. Each attention kernel brings its companions. One
:class:`~codegen.errors.MatrixError` reports everything that is wrong.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from codegen.errors import MatrixError, UsageError
from codegen.rows import AXIS_NAMES, FamilyKind, RowReader, Rows, Selector, TileRow
from codegen.yaml_reader import YamlReader
from sage_aot._kernels.manifest import Arch
from sage_aot._kernels.spec import (
    KINDS,
    OF_BACKWARD,
    SELECTION,
    AttnSpec,
    BwdPrepSpec,
    KernelSpec,
    QuantSpec,
    capability_of,
    spec_of,
)
from sage_aot._kernels.tile import Tile


@dataclass(frozen=True)
class PlannedKernel:
    """One kernel to build."""

    spec: KernelSpec
    family: str
    how: FamilyKind  # template, threads, ...
    tile: Tile  # of the attention kernel; for a companion, of the first that names it
    shared_bytes: int  # shared memory that a block can have on the arch
    allowed_spill_bytes: int
    suffix: str  # of the target
    row: str  # selector of that attention kernel's tile row
    companions: tuple[str, ...]  # names of an attention kernel's companions, in the order in which they run
    other_block_m: int  # of a quantizer whose attention kernels have query tiles of two heights; else the tile's

    @property
    def min_blocks(self) -> int:
        """Resident blocks an SM that the registers must allow."""
        if isinstance(self.spec, AttnSpec):
            return self.tile.min_blocks
        return dict(self.how.min_blocks)[self.spec.headdim] if isinstance(self.spec, QuantSpec) else 1


@dataclass(frozen=True)
class Matrix:
    """The contents of build_matrix.yaml."""

    archs: dict[str, Arch]
    shared_bytes: dict[str, int]  # by arch: shared memory that a block can have
    kernels: tuple[PlannedKernel, ...]  # by name
    missing: tuple[tuple[str, str], ...]  # per combination without a kernel, the name it would have and the reason


def read_matrix(path: Path, templates: Path) -> Matrix:
    """Read a build matrix; MatrixError, with every problem, where it is not one."""
    reader = YamlReader(path.name)
    rows = RowReader(reader, templates).read(_text(path))
    matrix = _Planning(reader, rows).plan() if rows else None
    if matrix is None or reader.problems:
        raise MatrixError(reader.problems)
    return matrix


def _text(path: Path) -> str:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"expected a build matrix in {path}, got: {error.strerror}") from error
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise MatrixError([f"{path.name}:{line}: expected UTF-8, got the byte 0x{data[error.start]:02x}"]) from error


class _Planning:
    """Rows → kernels. Complains unless every combination is excluded or covered once, and every row matches one."""

    def __init__(self, reader: YamlReader, rows: Rows) -> None:
        self.reader = reader
        self.rows = rows
        self.used: list[Selector] = []  # of the rows that decided about a combination

    def plan(self) -> Matrix | None:
        """The kernels of all kinds, and the combinations without one; None after a complaint."""
        covered, missing = self._decide()
        self._complain_about_unused()
        if self.reader.problems:  # a row may lack what its kernels need
            return None
        attention = [(self._attention(spec, row), row) for spec, row in covered]
        kernels = [kernel for kernel, _ in attention] + self._followers(attention)
        archs = {name: Arch(capability_of(name), row.least_driver or 0, row.run_on)
                 for name, row in self.rows.archs.items()}
        shared_bytes = {name: row.shared_bytes or 0 for name, row in self.rows.archs.items()}
        by_name = tuple(sorted(kernels, key=lambda kernel: kernel.spec.name))
        return Matrix(archs, shared_bytes, by_name, tuple(sorted(missing)))

    def _decide(self) -> tuple[list[tuple[AttnSpec, TileRow]], list[tuple[str, str]]]:
        """Every combination that is built, with its row; and the name of every other combination, with the reason."""
        covered, missing = [], []
        for values in product(*(self.rows.axes[axis] for axis in AXIS_NAMES)):
            spec = AttnSpec(**dict(zip(AXIS_NAMES, values)))
            why = self._excluded(spec)
            row = None if why else self._covering_row(spec)
            if why:
                missing.append((spec.name, why))
            elif row:
                covered.append((spec, row))
        return covered, missing

    def _excluded(self, spec: AttnSpec) -> str | None:
        for exclusion in self.rows.exclude:
            if exclusion.selector.matches(spec):
                self.used.append(exclusion.selector)
                return exclusion.why
        return None

    def _covering_row(self, spec: AttnSpec) -> TileRow | None:
        rows = [row for row in self.rows.tiles if row.selector.matches(spec)]
        self.used += [row.selector for row in rows]
        if not rows:
            self.reader.complain(self.rows.tiles_line, f"expected one row of 'tiles' or an exclusion for {spec.name}, "
                                                         "got none")
            return None
        if len(rows) > 1:
            lines = " and ".join(str(row.selector.line) for row in rows)
            self.reader.complain(rows[1].selector.line, f"expected one row of 'tiles' for {spec.name}, got those of "
                                                        f"lines {lines}")
        impossible = spec.impossible()
        if impossible:
            self.reader.complain(rows[0].selector.line, f"expected an exclusion of {spec.name}, got tiles: "
                                                        f"{impossible}")
        return rows[0]

    def _complain_about_unused(self) -> None:
        for rows, what in ((self.rows.tiles, "that is not excluded"), (self.rows.exclude, "left by those above")):
            for row in rows:
                if row.selector not in self.used:
                    self.reader.complain(row.selector.line, f"expected a row that matches a combination {what}, "
                                                            "got one that matches nothing")

    def _attention(self, spec: AttnSpec, row: TileRow) -> PlannedKernel:
        """The attention kernel that a row builds for a combination."""
        kinds = self.rows.families[row.family]
        needs = {"delta": _needs_delta(spec), "lists": spec.mask == "sparse"}
        idle = {spec.kind, *OF_BACKWARD, *SELECTION, *(kind for kind, is_needed in needs.items() if not is_needed)}
        wanted = [kind for kind in KINDS if kind in kinds and kind not in idle]
        for kind, is_needed in needs.items():
            if is_needed and kind not in kinds:
                self.reader.complain(row.selector.line, f"expected the kind {kind} in the family {row.family!r}, which "
                                                        f"{spec.name} needs, got none")
        companions = tuple(spec.companion(kind).name for kind in wanted)
        return self._kernel(spec, row, row.allowed_spill_bytes, row.suffix, companions)

    def _kernel(self, spec: KernelSpec, row: TileRow, allowed_spill_bytes: int = 0, suffix: str = "",
                companions: tuple[str, ...] = ()) -> PlannedKernel:
        """The kernel of any kind that follows from a row."""
        if row.tile is None:
            raise ValueError(f"line {row.selector.line}: expected sizes")  # not reached: plan() stops after complaints
        return PlannedKernel(spec, row.family, self.rows.families[row.family][spec.kind], row.tile,
                             self.rows.archs[spec.arch].shared_bytes or 0, allowed_spill_bytes, suffix,
                             row.selector.text(row.family, spec.arch), companions, row.tile.block_m)

    def _followers(self, attention: list[tuple[PlannedKernel, TileRow]]) -> list[PlannedKernel]:
        """The companions and backward kernels of the attention kernels, which agree on the template of a shared one.
        """
        found: dict[str, tuple[PlannedKernel, TileRow]] = {}
        for kernel, row in attention:
            for spec in self._specs_after(kernel.spec, kernel.companions, row):
                how = self.rows.families[row.family][spec.kind]
                wanted = self._kernel(spec, row, how.allowed_spill_bytes, how.suffix)
                first, first_row = found.setdefault(spec.name, (wanted, row))
                if shared := _shared(first, wanted):
                    found[spec.name] = shared, first_row
                else:
                    self.reader.complain(
                        row.selector.line, f"expected the tiles and family of line {first_row.selector.line} for "
                                           f"{kernel.spec.name}, got others: both rows share {spec.name}")
        return [kernel for kernel, _ in found.values()]

    def _specs_after(self, spec: KernelSpec, companions: tuple[str, ...], row: TileRow) -> list[KernelSpec]:
        """The companions of an attention kernel, its backward kernels if it has a backward pass, and those that choose
        blocks for it if it takes masks of blocks."""
        assert isinstance(spec, AttnSpec)
        apart = [*(OF_BACKWARD if spec.trains else ()), *(SELECTION if spec.mask == "sparse" else ())]
        built = [kind for kind in apart if kind in self.rows.families[row.family]]
        return [*map(spec_of, companions), *map(spec.companion, built)]


def _needs_delta(spec: AttnSpec) -> bool:
    return spec.q == "qsmooth"


def _shared(first: PlannedKernel, second: PlannedKernel) -> PlannedKernel | None:
    """The one kernel in the place of two, which follow from two attention kernels; None where the template is given
    other values for one than for the other. A quantizer makes query tiles of two heights at most."""
    sizes = {BwdPrepSpec: slice(None), QuantSpec: slice(1, None)}.get(type(first.spec), slice(0))
    if first.how != second.how or first.tile.quantized[sizes] != second.tile.quantized[sizes]:
        return None
    heights = {first.tile.block_m, first.other_block_m, second.tile.block_m}
    if not isinstance(first.spec, QuantSpec) or len(heights) == 1:
        return first
    return replace(first, other_block_m=max(heights - {first.tile.block_m})) if len(heights) == 2 else None
