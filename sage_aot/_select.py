"""Which kernels answer a problem on a GPU of a given capability. Pure: manifests in, records out."""

from __future__ import annotations

from dataclasses import dataclass

from sage_aot._manifest import KernelRecord, Manifest
from sage_aot._problem import Problem
from sage_aot._spec import AXES, KernelSpec, capability_of, is_ptx
from sage_aot.errors import CubinError, UnsupportedError

_OPTIONS = {"qk": "qk_bits", "pv_accum": "pv_accum", "mask": "is_causal", "v": "smooth_v", "q": "smooth_q"}
"""Axes that an option of the call decides about, with its name."""

_FLAGS = {"full": False, "causal": True, "vraw": False, "vsmooth": True, "qraw": False, "qsmooth": True}

_GIVEN = {"headdim", "mask"}
"""Axes that are not the caller's to choose: another value would be another problem."""

_FOLDER = "This folder holds what was built; `python -m codegen list` in a source tree says what can be and what not"


@dataclass(frozen=True)
class Kernels:
    """The kernels of a call, in the order in which they run."""

    stats: KernelRecord
    quant: KernelRecord
    delta: KernelRecord | None  # where Q is smoothed
    attn: KernelRecord


def select(capability: tuple[int, int], problem: Problem, manifest: Manifest) -> Kernels:
    """The kernels for a problem: those of the nearest arch, the least head dim that holds the problem's.

    Raises UnsupportedError where the manifest has no such kernel, CubinError where it has an attention kernel without
    its companions.
    """
    wanted = {
        "arch": nearest_arch(capability, manifest),
        "headdim": min(d for d in AXES["headdim"] if d >= problem.headdim),
        "qk": problem.qk_bits,
        "mask": "causal" if problem.is_causal else "full",
        "v": "vsmooth" if problem.smooth_v else "vraw",
        "q": "qsmooth" if problem.smooth_q else "qraw",
        **({} if problem.pv_accum == "auto" else {"pv_accum": problem.pv_accum}),
    }
    attn = _find(wanted, manifest)
    companions = {kind: _companion(attn.spec, kind, manifest) for kind in ("stats", "quant")}
    delta = _companion(attn.spec, "delta", manifest) if problem.smooth_q else None
    return Kernels(**companions, delta=delta, attn=attn)


def nearest_arch(capability: tuple[int, int], manifest: Manifest) -> str:
    """The arch whose cubins a GPU can run: its own, else the nearest lower minor of its major version."""
    archs = built_archs(manifest)
    able = [arch for arch in archs if _runs_on(capability_of(arch), capability)]
    if not able:
        raise UnsupportedError(f"this GPU has compute capability {capability[0]}.{capability[1]}; kernels are built "
                               f"for {', '.join(archs) or 'nothing'}. On this GPU use "
                               f"torch.nn.functional.scaled_dot_product_attention. {_FOLDER}")
    return max(able, key=capability_of)


def built_archs(manifest: Manifest) -> list[str]:
    """Every arch that has attention kernels in machine code, oldest first."""
    archs = {record.spec.arch for record in manifest.kernels.values()
             if record.spec.kind == "attn" and not is_ptx(record.spec.arch)}
    return sorted(archs, key=capability_of)


def _runs_on(built: tuple[int, int], capability: tuple[int, int]) -> bool:
    return built[0] == capability[0] and built[1] <= capability[1]


def _find(wanted: dict[str, object], manifest: Manifest) -> KernelRecord:
    """The attention kernel with these values; the axes not named take what is built, of several the first in AXES."""
    on_arch = sorted((r for r in manifest.kernels.values() if r.spec.kind == "attn" and r.spec.arch == wanted["arch"]),
                     key=lambda record: [values.index(getattr(record.spec, axis)) for axis, values in AXES.items()])
    nearest = min(on_arch, key=lambda record: _distance(wanted, record.spec))
    if _differing(wanted, nearest.spec):
        raise UnsupportedError(_missing(wanted, nearest.spec))
    return nearest


def _differing(wanted: dict[str, object], spec: KernelSpec) -> list[str]:
    return [axis for axis, value in wanted.items() if getattr(spec, axis) != value]


def _distance(wanted: dict[str, object], spec: KernelSpec) -> tuple[int, int]:
    differing = _differing(wanted, spec)
    return len(_GIVEN.intersection(differing)), len(differing)


def _missing(wanted: dict[str, object], nearest: KernelSpec) -> str:
    """What the call could ask for instead, in its own words."""
    asked = ", ".join(_option(axis, value) for axis, value in wanted.items() if axis in _OPTIONS)
    head = f"no kernel for {wanted['arch']}, head dim {wanted['headdim']}, {asked}"
    differing = _differing(wanted, nearest)
    if _GIVEN.intersection(differing):
        return f"{head}, nor with any other options. {_FOLDER}"
    instead = ", ".join(_option(axis, getattr(nearest, axis)) for axis in differing)
    return f"{head}; use {instead}. {_FOLDER}"


def _option(axis: str, value: object) -> str:
    """An axis's value as the call takes it."""
    return f"{_OPTIONS[axis]}={_FLAGS.get(value, value)!r}"


def _companion(spec: KernelSpec, kind: str, manifest: Manifest) -> KernelRecord:
    name = spec.companion(kind).name
    if name not in manifest.kernels:
        raise CubinError(f"the kernel folder has {spec.name} but not {name}, which it needs; rebuild it with "
                         f"`python -m codegen build`, or reinstall sage-aot")
    return manifest.kernels[name]
