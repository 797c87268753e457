"""Templates → CUDA sources, one per kernel. Defines the names that a template may use and how C++ spells their
values."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jinja2
from jinja2.meta import find_referenced_templates, find_undeclared_variables

from codegen.errors import BuildError
from codegen.files import write_if_changed
from codegen.matrix import Matrix, PlannedKernel
from codegen.project import Project
from sage_aot._families import FAMILIES
from sage_aot._kernels.spec import capability_of, statistics_entry

CONTEXT = {
    "attn": ("name", "template", "row", "headdim", "qk", "pv", "pv_accum", "p", "mask", "smooth_v",
             "smooth_q", "block_m", "block_n", "warp_m", "stages", "v_stages", "min_blocks"),
    "quant": ("name", "template", "row", "entries", "statistics_entries", "headdim", "qk", "pv", "block_m",
              "other_block_m", "block_n", "warp_m", "key_norms", "threads", "min_blocks", "programmatic"),
    "pack": ("name", "template", "row", "threads"),
    "lists": ("name", "template", "row", "threads"),
    "pool": ("name", "template", "row", "entries", "headdim", "threads"),
    "choose": ("name", "template", "row", "headdim", "threads"),
    "merge": ("name", "template", "row", "threads", "programmatic"),
    "bwdprep": ("name", "template", "row", "entries_by_packed", "headdim", "halves", "qk", "pv", "block_m", "block_n",
                "warp_m", "threads"),
    **dict.fromkeys(("bwdkv", "bwdqkv"), ("name", "template", "row", "family", "entries_by_packed", "headdim", "halves",
                                          "sums_q", "shared_bytes")),
    "bwdq": ("name", "template", "row", "family", "entries_by_packed", "headdim", "halves", "shared_bytes"),
    "bwdsum": ("name", "template", "row", "entries_by_packed", "headdim", "halves"),
    "delta": ("name", "template", "row", "entries", "headdim", "threads"),
}
"""The names that the templates of each kind are given. A template uses all of them and no others."""

PROGRAMMATIC = 9, 0
"""The first compute capability with programmatic dependent launch."""

_ENUMS = {"qk": "Qk", "pv": "Pv", "pv_accum": "PvAccum", "p": "P", "mask": "Mask"}
"""Enum of an axis's values, by axis."""

_CPP_NAME = re.compile(r"[A-Za-z_]\w*(::[A-Za-z_]\w*)*", re.ASCII)


def cpp(value: object) -> str:
    """Spell a truth value, an integer or the name of an enumerator for C++; TypeError for everything else."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, jinja2.Undefined):
        return str(value)  # StrictUndefined raises here, and names the variable
    if isinstance(value, str) and _CPP_NAME.fullmatch(value):
        return value
    raise TypeError(f"expected a bool, an int or a C++ name, got {value!r}")


def enumerator(enum: str, value: str) -> str:
    """The enumerator of a value: ``"two_level_f32"`` of PvAccum → ``"PvAccum::kTwoLevelF32"``."""
    return f"{enum}::k{''.join(word.capitalize() for word in value.split('_'))}"


def context(kernel: PlannedKernel) -> dict[str, object]:
    """The values that a kernel's template is given."""
    spec, axes = kernel.spec, dict[str, Any](kernel.spec.values)
    values = {
        "name": spec.name,
        "template": kernel.how.template,
        "row": kernel.row,
        "family": kernel.family,
        "entries": [(spec.entry(rows), enumerator("SourceRows", rows)) for rows in spec.rows],
        "statistics_entries": [(statistics_entry(spec.entry(rows)), enumerator("SourceRows", rows))
                               for rows in spec.rows],
        "entries_by_packed": [(spec.entry(rows, packed), enumerator("SourceRows", rows), packed)
                              for packed in spec.packed for rows in spec.rows],
        "headdim": axes.get("headdim"),
        **{axis: enumerator(enum, axes[axis]) for axis, enum in _ENUMS.items() if axis in axes},
        "smooth_v": axes.get("v") == "vsmooth",
        "smooth_q": axes.get("q") == "qsmooth",
        "key_norms": FAMILIES[kernel.family].reads_key_norms,
        "sums_q": spec.kind == "bwdqkv",
        "halves": FAMILIES[kernel.family].trains_in_halves,
        "threads": kernel.how.threads,
        "shared_bytes": kernel.shared_bytes,
        "programmatic": capability_of(spec.arch) >= PROGRAMMATIC,
        **kernel.tile._asdict(),
        "v_stages": kernel.tile.v_stages or kernel.tile.stages,
        "other_block_m": kernel.other_block_m,
        "min_blocks": kernel.min_blocks,  # replaces the tile's, which holds for the attention kernel
    }
    return {name: values[name] for name in CONTEXT[spec.kind]}


class Renderer:
    """The one Jinja environment."""

    def __init__(self, templates: Path) -> None:
        # By default a misspelt name renders as nothing and a misspelt flag as false; StrictUndefined raises on both.
        self.loader = jinja2.FileSystemLoader(templates)
        self.environment = jinja2.Environment(
            loader=self.loader, undefined=jinja2.StrictUndefined, autoescape=False,
            trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
        self.environment.filters["cpp"] = cpp

    def render(self, kernel: PlannedKernel) -> str:
        """The source of a kernel; BuildError where its template does not render."""
        try:
            return self.environment.get_template(kernel.how.template).render(context(kernel))
        except (jinja2.TemplateError, TypeError) as error:
            raise BuildError(f"templates/{kernel.how.template}: {error} (rendering {kernel.spec.name})") from error

    def variable_problems(self, kind: str, template: str) -> list[str]:
        """Differences between the names that a template uses and those of its kind, as sentences."""
        try:
            used = self._names_in(template)
        except jinja2.TemplateError as error:
            return [f"templates/{template}: {error}"]
        declared = set(CONTEXT[kind])
        return ([f"templates/{template}: expected a name given to {kind} templates, got {name!r}"
                 for name in sorted(used - declared)]
                + [f"templates/{template}: expected {name!r} to be used, as {kind} templates are given it"
                   for name in sorted(declared - used)])

    def _names_in(self, template: str) -> set[str]:
        """The names that a template and those that it includes use."""
        parsed = self.environment.parse(self.loader.get_source(self.environment, template)[0])
        included = filter(None, find_referenced_templates(parsed))
        return find_undeclared_variables(parsed).union(*map(self._names_in, included))


def render_all(kernels: Iterable[PlannedKernel], matrix: Matrix, project: Project) -> None:
    """Write the sources of these kernels, where they changed, and remove those of kernels that left the matrix."""
    renderer = Renderer(project.templates)
    for kernel in kernels:
        write_if_changed(source_path(kernel, project), renderer.render(kernel).encode())
    known = {kernel.spec.name for kernel in matrix.kernels}
    for path in project.sources.glob("*.cu"):
        if path.stem not in known:
            path.unlink()


def source_path(kernel: PlannedKernel, project: Project) -> Path:
    """Path of a kernel's rendered source."""
    return project.sources / f"{kernel.spec.name}.cu"
