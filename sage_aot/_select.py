"""Which kernels answer a problem on a GPU, and why the others do not. Pure: manifests in, records and reasons out.

First the arch is chosen, by the GPU and its driver (:func:`choose_arch`), then among its kernels the one that the call
asks for (:func:`kernels_of`). :func:`candidates` tells the same choice with every reason; a call and
:func:`sage_aot.explain` cannot differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from sage_aot._driver import cuda_text, too_old
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


class Gpu(NamedTuple):
    """A GPU as far as the choice of kernels depends on it; str() describes it."""

    capability: tuple[int, int]
    cuda: int | None = None  # that its driver is for: 12090 is 12.9; None where no driver is known
    name: str = ""

    def __str__(self) -> str:
        parts = [self.name, "compute capability {}.{}".format(*self.capability)]
        parts += [f"driver for CUDA {cuda_text(self.cuda)}"] if self.cuda is not None else []
        return ", ".join(filter(None, parts))


class ArchChoice(NamedTuple):
    """The arch that was chosen, None where there is none, and about every arch why or why not."""

    arch: str | None
    reasons: dict[str, str]


@dataclass(frozen=True)
class Candidate:
    """An attention kernel and what became of it."""

    record: KernelRecord
    taken: bool
    reason: str  # why it was taken, or why not
    differing: tuple[str, ...] = ()  # what of the call it does not compute: options, or "headdim"


@dataclass(frozen=True)
class Kernels:
    """The kernels of a call, in the order in which they run."""

    stats: KernelRecord
    quant: KernelRecord
    delta: KernelRecord | None  # where Q is smoothed
    attn: KernelRecord


def select(gpu: Gpu, problem: Problem, manifest: Manifest) -> Kernels:
    """The kernels for a problem on a GPU: those of the nearest arch, the least head dim that holds the problem's.

    Raises UnsupportedError where the manifest has no such kernel, CubinError where it has an attention kernel without
    its companions.
    """
    return kernels_of(nearest_arch(gpu, manifest), problem, manifest)


def candidates(choice: ArchChoice, problem: Problem, manifest: Manifest) -> tuple[Candidate, ...]:
    """Every attention kernel with its reason: first those of the chosen arch, nearest to the call first."""
    found = []
    if choice.arch:
        wanted = _wanted(problem)
        ordered = _ordered(choice.arch, wanted, manifest)
        for record in ordered:
            reason = _reason(wanted, record.spec, ordered[0].spec)
            differing = tuple(_OPTIONS.get(axis, axis) for axis in _differing(wanted, record.spec))
            found.append(Candidate(record, reason is None, reason or choice.reasons[choice.arch], differing))
    for arch, reason in choice.reasons.items():
        if arch != choice.arch:
            found += [Candidate(record, False, reason) for record in _attention(arch, manifest)]
    return tuple(found)


# --- the arch ---------------------------------------------------------------------------------------------------------


def nearest_arch(gpu: Gpu, manifest: Manifest) -> str:
    """The arch whose kernels a GPU runs; UnsupportedError, with the GPU, what there is and what to do, where none."""
    chosen = choose_arch(gpu, manifest).arch
    if chosen is None:
        raise UnsupportedError(unsupported(gpu, manifest))
    return chosen


def unsupported(gpu: Gpu, manifest: Manifest) -> str:
    """What is said of a GPU for which there is no arch."""
    reasons = "; ".join(f"{arch}: {reason}" for arch, reason in choose_arch(gpu, manifest).reasons.items())
    return f"no kernels for this GPU ({gpu}). There are {reasons}. {_remedy(gpu, manifest)}"


def choose_arch(gpu: Gpu, manifest: Manifest) -> ArchChoice:
    """The GPU's own arch; else the nearest lower minor of its major version; else PTX, which the driver compiles."""
    unfit = {arch: _unfit(gpu, arch, manifest) for arch in all_archs(manifest)}
    able = sorted((arch for arch, reason in unfit.items() if reason is None), key=_rank)
    if not able:
        return ArchChoice(None, unfit)
    *others, chosen = able
    reasons = {chosen: _why(gpu, chosen)}
    reasons |= {arch: f"{chosen} is {'nearer' if not is_ptx(arch) or is_ptx(chosen) else 'machine code for this GPU'}"
                for arch in reversed(others)}
    return ArchChoice(chosen, reasons | {arch: reason for arch, reason in unfit.items() if reason})


def built_archs(manifest: Manifest) -> list[str]:
    """Every arch that has attention kernels in machine code, oldest first."""
    return [arch for arch in all_archs(manifest) if not is_ptx(arch)]


def all_archs(manifest: Manifest) -> list[str]:
    """Every arch that has attention kernels: PTX, then machine code, each oldest first."""
    return sorted({record.spec.arch for record in manifest.kernels.values() if record.spec.kind == "attn"}, key=_rank)


def _rank(arch: str) -> tuple[bool, tuple[int, int]]:
    """Of those that run on a GPU the last is the best."""
    return not is_ptx(arch), capability_of(arch)


def _unfit(gpu: Gpu, arch: str, manifest: Manifest) -> str | None:
    """Why a GPU cannot run an arch's kernels, or None."""
    record = _attention(arch, manifest)[0]
    if not record.serves(gpu.capability):
        return f"{'PTX' if record.is_ptx else 'machine code'} for compute capability {record.served}"
    return None if gpu.cuda is None else too_old(gpu.cuda, record.least_driver)


def _why(gpu: Gpu, chosen: str) -> str:
    if is_ptx(chosen):
        return "no machine code is for this GPU, and the driver compiles PTX for it"
    if capability_of(chosen) == gpu.capability:
        return f"{chosen} is this GPU's own"
    return f"{chosen} is the nearest that this GPU runs"


def _remedy(gpu: Gpu, manifest: Manifest) -> str:
    floors = [r.least_driver for r in manifest.kernels.values() if r.spec.kind == "attn" and r.serves(gpu.capability)]
    if floors:
        return f"Update the driver, at least to {min(floors)}"
    instead = "call torch.nn.functional.scaled_dot_product_attention"
    if gpu.capability < (8, 0):
        return f"On GPUs before 8.0 {instead}"
    return f"Look for a newer sage-aot, and until then {instead}. {_FOLDER}"


# --- the kernel -------------------------------------------------------------------------------------------------------


def kernels_of(arch: str, problem: Problem, manifest: Manifest) -> Kernels:
    """The kernels of just this arch for a problem, whatever GPU there is. Raises as :func:`select` does."""
    wanted = _wanted(problem)
    nearest = _ordered(arch, wanted, manifest)[0]
    if _reason(wanted, nearest.spec, nearest.spec):
        raise UnsupportedError(_missing(arch, wanted, nearest.spec))
    return companions_of(nearest, manifest)


def companions_of(attn: KernelRecord, manifest: Manifest) -> Kernels:
    """An attention kernel with those that it needs; CubinError where one of them is missing."""
    found = {kind: _companion(attn.spec, kind, manifest) for kind in ("stats", "quant")}
    delta = _companion(attn.spec, "delta", manifest) if attn.spec.q == "qsmooth" else None
    return Kernels(**found, delta=delta, attn=attn)


def _attention(arch: str, manifest: Manifest) -> list[KernelRecord]:
    return [r for _, r in sorted(manifest.kernels.items()) if r.spec.kind == "attn" and r.spec.arch == arch]


def _wanted(problem: Problem) -> dict[str, object]:
    """The values that a problem asks for; an axis that it leaves open is missing."""
    return {
        "headdim": min(d for d in AXES["headdim"] if d >= problem.headdim),
        "qk": problem.qk_bits,
        "mask": "causal" if problem.is_causal else "full",
        "v": "vsmooth" if problem.smooth_v else "vraw",
        "q": "qsmooth" if problem.smooth_q else "qraw",
        **({} if problem.pv_accum == "auto" else {"pv_accum": problem.pv_accum}),
    }


def _ordered(arch: str, wanted: dict[str, object], manifest: Manifest) -> list[KernelRecord]:
    """An arch's attention kernels, nearest to the call first: of axes that it leaves open, the first value in AXES."""
    return sorted(_attention(arch, manifest), key=lambda record: (
        _distance(wanted, record.spec), [values.index(getattr(record.spec, axis)) for axis, values in AXES.items()]))


def _reason(wanted: dict[str, object], spec: KernelSpec, first: KernelSpec) -> str | None:
    """Why a kernel is not the one for a call, in the words of the call; `first` is the nearest of its arch."""
    differing = _differing(wanted, spec)
    if differing:
        return "for " + ", ".join(_option(axis, getattr(spec, axis)) for axis in differing)
    if spec != first:
        return (f"for {_option('pv_accum', spec.pv_accum)}, on request: 'auto' takes "
                f"{_option('pv_accum', first.pv_accum)}")
    return None


def _differing(wanted: dict[str, object], spec: KernelSpec) -> list[str]:
    return [axis for axis, value in wanted.items() if getattr(spec, axis) != value]


def _distance(wanted: dict[str, object], spec: KernelSpec) -> tuple[int, int]:
    differing = _differing(wanted, spec)
    return len(_GIVEN.intersection(differing)), len(differing)


def _missing(arch: str, wanted: dict[str, object], nearest: KernelSpec) -> str:
    """What the call could ask for instead, in its own words."""
    asked = ", ".join(_option(axis, value) for axis, value in wanted.items() if axis in _OPTIONS)
    head = f"no kernel for {arch}, head dim {wanted['headdim']}, {asked}"
    differing = _differing(wanted, nearest)
    if _GIVEN.intersection(differing):
        return f"{head}, nor with any other options. {_FOLDER}"
    instead = ", ".join(_option(axis, getattr(nearest, axis)) for axis in differing)
    return f"{head}; use {instead}. {_FOLDER}"


def _option(axis: str, value: object) -> str:
    """An axis's value as the call takes it."""
    return f"{_OPTIONS.get(axis, axis)}={_FLAGS.get(value, value)!r}"


def _companion(spec: KernelSpec, kind: str, manifest: Manifest) -> KernelRecord:
    name = spec.companion(kind).name
    if name not in manifest.kernels:
        raise CubinError(f"the kernel folder has {spec.name} but not {name}, which it needs; rebuild it with "
                         f"`python -m codegen build`, or reinstall sage-aot")
    return manifest.kernels[name]
