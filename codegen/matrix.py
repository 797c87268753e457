"""build_matrix.yaml → the kernels to build, and for every combination of the axes without one, the reason.

Each combination is excluded or covered by exactly one row of tiles, and each attention kernel brings the kernels of
the other kinds that feed it. Whatever is wrong comes in one :class:`~codegen.errors.MatrixError`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from pathlib import Path

from codegen._shared import IN_FLIGHT, VECTOR, Arch, KernelSpec, Tile, capability_of
from codegen.errors import MatrixError, UsageError
from codegen.rows import AXIS_NAMES, RowReader, Rows, Selector, TileRow
from codegen.yaml_reader import YamlReader


@dataclass(frozen=True)
class PlannedKernel:
    """One kernel to build."""

    spec: KernelSpec
    family: str
    template: str  # file name in templates/
    tile: Tile | None  # None for the kinds that know no tiles
    threads: int  # of a block
    min_blocks: int  # an SM, for which its registers must do
    suffix: str  # of the target
    allowed_spill_bytes: int
    row: str  # selector of the tile row it follows from; that of its first attention kernel for the other kinds

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return self.tile.shared_bytes(self.spec) if self.spec.kind == "attn" else 0


@dataclass(frozen=True)
class Matrix:
    """What build_matrix.yaml says."""

    archs: dict[str, Arch]
    kernels: tuple[PlannedKernel, ...]  # by name
    missing: tuple[tuple[str, str], ...]  # name of the attention kernel, why there is none


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
    """Rows → kernels: every combination excluded or covered once, nothing superfluous."""

    def __init__(self, reader: YamlReader, rows: Rows) -> None:
        self.reader = reader
        self.rows = rows
        self.used: list[Selector] = []  # of the rows that decided about a combination

    def plan(self) -> Matrix | None:
        """The kernels of all kinds, and the combinations without one; None after a complaint."""
        covered, missing = self._decide()
        self._complain_about_unused()
        if self.reader.problems:  # then a row may lack what a kernel is made of
            return None
        self._complain_about_sizes(covered)
        attention = [(self._kernel(spec, row), row) for spec, row in covered]
        kernels = [kernel for kernel, _ in attention] + self._companions(attention)
        archs = {name: Arch(capability_of(name), row.least_driver, row.run_on) for name, row in self.rows.archs.items()}
        by_name = tuple(sorted(kernels, key=lambda kernel: kernel.spec.name))
        return Matrix(archs, by_name, tuple(sorted(missing)))

    def _decide(self) -> tuple[list[tuple[KernelSpec, TileRow]], list[tuple[str, str]]]:
        """Every combination that is built, with its row, and every other with the reason."""
        covered, missing = [], []
        for values in product(*(self.rows.axes[axis] for axis in AXIS_NAMES)):
            spec = KernelSpec("attn", **dict(zip(AXIS_NAMES, values)))
            why = self._excluded(spec)
            row = None if why else self._covering_row(spec)
            if why:
                missing.append((spec.name, why))
            elif row:
                covered.append((spec, row))
        return covered, missing

    def _excluded(self, spec: KernelSpec) -> str | None:
        for exclusion in self.rows.exclude:
            if exclusion.selector.matches(spec):
                self.used.append(exclusion.selector)
                return exclusion.why
        return None

    def _covering_row(self, spec: KernelSpec) -> TileRow | None:
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

    def _complain_about_sizes(self, covered: list[tuple[KernelSpec, TileRow]]) -> None:
        """Tiles that are right by themselves may not fit an arch, a head dim or a family."""
        for spec, row in covered:
            limit = self.rows.archs[spec.arch].shared_bytes
            found = row.tile.shared_bytes(spec)
            if found > limit:
                self.reader.complain(row.selector.line, f"expected at most the {limit} bytes of shared memory that a "
                                                        f"block has on {spec.arch} for {spec.name}, got {found}")
        for row in self.rows.tiles:
            for headdim in sorted({spec.headdim for spec, covering in covered if covering is row}):
                self._complain_about_quantizer(row, headdim)

    def _complain_about_quantizer(self, row: TileRow, headdim: int) -> None:
        """All threads quantize as many vectors of a KV tile, at most IN_FLIGHT, and as many scale groups of Q."""
        vectors, in_groups = row.tile.block_n * headdim // VECTOR, row.tile.block_m * headdim // row.tile.warp_m
        threads = self.rows.families[row.family]["quant"].threads
        for wanted, right in (
                (f"divide block_n * headdim / {VECTOR} = {vectors}", vectors % threads == 0),
                (f"are at least block_n * headdim / {VECTOR * IN_FLIGHT} = {vectors // IN_FLIGHT}",
                 threads * IN_FLIGHT >= vectors),
                (f"divide block_m * headdim / warp_m = {in_groups}", in_groups % threads == 0)):
            if not right:
                self.reader.complain(row.selector.line, f"expected threads of the family {row.family!r}'s quantizer "
                                                        f"that {wanted}, got {threads}")

    def _kernel(self, spec: KernelSpec, row: TileRow) -> PlannedKernel:
        """The kernel of any kind that follows from a row; only attention kernels may spill or set their threads."""
        how = self.rows.families[row.family][spec.kind]
        return PlannedKernel(
            spec=spec,
            family=row.family,
            template=how.template,
            tile=row.tile if spec.kind in ("attn", "quant") else None,
            threads=row.tile.threads if spec.kind == "attn" else how.threads,
            min_blocks=row.tile.min_blocks if spec.kind == "attn" else how.min_blocks or 1,
            suffix=how.suffix,
            allowed_spill_bytes=row.allowed_spill_bytes if spec.kind == "attn" else 0,
            row=row.selector.text(row.family, spec.arch),
        )

    def _companions(self, attention: list[tuple[PlannedKernel, TileRow]]) -> list[PlannedKernel]:
        """The kernels that feed the attention kernels; those that share one must ask for the same."""
        found: dict[KernelSpec, tuple[PlannedKernel, TileRow]] = {}
        for kernel, row in attention:
            for companion in kernel.spec.companions:
                wanted = self._kernel(companion, row)
                first, first_row = found.setdefault(wanted.spec, (wanted, row))
                if _layout(wanted) != _layout(first):
                    self.reader.complain(
                        row.selector.line, f"expected the tiles and family of line {first_row.selector.line} for "
                                           f"{kernel.spec.name}, got others: both rows share {wanted.spec.name}")
        return [kernel for kernel, _ in found.values()]


def _layout(kernel: PlannedKernel) -> tuple:
    """What attention kernels that share a companion must agree on."""
    return kernel.template, kernel.threads, kernel.tile and kernel.tile.quantized
