"""The choice of the kernels of a problem on a GPU, and the reasons against all others. Pure: manifests in, records and
reasons out.

:func:`choose_arch` first chooses the arch, by the GPU and its driver. :func:`kernels_of` then chooses the kernel of
that arch which the call asks for. :func:`candidates` makes the same choice for :func:`sage_aot.explain`, with a reason
per kernel, from the same functions, so that a call and its explanation agree.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

from sage_aot._kernels.axes import AXES, least_headdim
from sage_aot._kernels.drivers import cuda_text, too_old
from sage_aot._kernels.manifest import AttnRecord, KernelRecord, Manifest, arch_rank
from sage_aot._kernels.spec import KINDS, capability_of, is_ptx
from sage_aot._problem.options import OPTION_OF_AXIS, OPTIONS, Options, spelt
from sage_aot._problem.problem import Problem
from sage_aot._problem.tensors import LISTED, TENSORS
from sage_aot.errors import CubinError, UnsupportedError

_FIXED = {"headdim", *(option.axis or name for name, option in OPTIONS.items() if option.fixed)}
"""Axes, and options that no axis decides about, whose values the problem fixes: another value would give another
result, so no message advises one."""

_DEFAULTS = {name: getattr(Options().resolved, name) for name, option in OPTIONS.items() if option.kinds}
"""The options that kernels take at run time, with the values that a kernel without such a field computes."""

_FOLDER = "This folder holds what was built; `python -m codegen list` in a source tree says what can be and what not"

Wanted = tuple[tuple[str, Any], ...]
"""Axes with the values that a problem asks for, then the same of run-time options; an axis that the problem leaves
open, and an option at its default, are missing."""


class Gpu(NamedTuple):
    """A GPU as far as the choice of kernels depends on it; str() describes it."""

    capability: tuple[int, int]
    cuda: int | None = None  # CUDA version of its driver: 12090 is 12.9; None where no driver is known
    name: str = ""

    def __str__(self) -> str:
        parts = [self.name, "compute capability {}.{}".format(*self.capability)]
        parts += [f"driver for CUDA {cuda_text(self.cuda)}"] if self.cuda is not None else []
        return ", ".join(filter(None, parts))


class ArchChoice(NamedTuple):
    """The arch that was chosen, or None, and per arch the reason why it was chosen or was not."""

    arch: str | None
    reasons: dict[str, str]


class Candidate(NamedTuple):
    """An attention kernel, and whether and why a call takes it."""

    record: AttnRecord
    taken: bool
    reason: str  # why it was taken, or why not
    differing: tuple[str, ...] = ()  # options of the call that the kernel does not compute, or "headdim"


@dataclass(frozen=True)
class Kernels:
    """The kernels of a call: the attention kernel, and its companions by kind."""

    attn: AttnRecord
    companions: dict[str, KernelRecord]

    def __getitem__(self, kind: str) -> KernelRecord:
        return self.companions[kind]

    @property
    def records(self) -> tuple[KernelRecord, ...]:
        """All kernels of the call, in the order in which they run."""
        by_kind: dict[str, KernelRecord] = {**self.companions, "attn": self.attn}
        return tuple(by_kind[kind] for kind in KINDS if kind in by_kind)

    def without(self, kind: str) -> Kernels:
        return replace(self, companions={name: record for name, record in self.companions.items() if name != kind})


def candidates(choice: ArchChoice, problem: Problem, manifest: Manifest) -> tuple[Candidate, ...]:
    """Every attention kernel with its reason: the chosen arch's kernels, nearest to the call first, then all others."""
    found = []
    if choice.arch:
        wanted = wanted_values(problem)
        ordered = _ordered(choice.arch, wanted, manifest)
        for record in ordered:
            reason = _reason(wanted, record, ordered[0], manifest)
            differing = tuple(OPTION_OF_AXIS.get(axis, axis) for axis in _differing(wanted, record, manifest))
            found.append(Candidate(record, reason is None, reason or choice.reasons[choice.arch], differing))
    for arch, reason in choice.reasons.items():
        if arch != choice.arch:
            found += [Candidate(record, False, reason) for record in manifest.attention(arch)]
    return tuple(found)


# --- the arch ---------------------------------------------------------------------------------------------------------


def nearest_arch(gpu: Gpu, manifest: Manifest) -> str:
    """The arch whose kernels a GPU runs. UnsupportedError where there is none; the message says what to do."""
    choice = choose_arch(gpu, manifest)
    if choice.arch is None:
        error = UnsupportedError(unsupported(gpu, manifest))
        error.reasons = choice.reasons
        raise error
    return choice.arch


def unsupported(gpu: Gpu, manifest: Manifest) -> str:
    """The message for a GPU that runs no arch's kernels: the GPU, why each arch does not fit, and what to do."""
    reasons = "; ".join(f"{arch}: {reason}" for arch, reason in choose_arch(gpu, manifest).reasons.items())
    return f"no kernels for this GPU ({gpu}). There are {reasons}. {_remedy(gpu, manifest)}"


def choose_arch(gpu: Gpu, manifest: Manifest) -> ArchChoice:
    """The GPU's own arch; else the nearest lower minor of its major version; else PTX, which the driver compiles."""
    unfit = {arch: _unfit(gpu, arch, manifest) for arch in manifest.attention_archs}
    able = sorted((arch for arch, reason in unfit.items() if reason is None), key=arch_rank)
    refused = {arch: reason for arch, reason in unfit.items() if reason}
    if not able:
        return ArchChoice(None, refused)
    *others, chosen = able
    reasons = {chosen: _why(gpu, chosen)}
    reasons |= {arch: f"{chosen} is {'nearer' if not is_ptx(arch) or is_ptx(chosen) else 'machine code for this GPU'}"
                for arch in reversed(others)}
    return ArchChoice(chosen, reasons | refused)


def built_archs(manifest: Manifest) -> list[str]:
    """Every arch that has attention kernels in machine code, oldest first."""
    return [arch for arch in manifest.attention_archs if not is_ptx(arch)]


def _unfit(gpu: Gpu, arch: str, manifest: Manifest) -> str | None:
    """The reason why a GPU cannot run an arch's kernels, or None."""
    record = manifest.any_attention(arch)
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
    floors = [record.least_driver for record in manifest.every_attention() if record.serves(gpu.capability)]
    if floors:
        return f"Update the driver, at least to {min(floors)}"
    instead = "call torch.nn.functional.scaled_dot_product_attention"
    if gpu.capability < (8, 0):
        return f"On GPUs before 8.0 {instead}"
    return f"Look for a newer sage-aot, and until then {instead}. {_FOLDER}"


# --- the kernel -------------------------------------------------------------------------------------------------------


def wanted_values(problem: Problem) -> Wanted:
    """The values that a problem asks for."""
    at_run_time = [(name, getattr(problem.options, name)) for name in _DEFAULTS]
    any_mask = problem.part == "kv"  # k and v are quantized alike for each
    axes = {axis: value for axis, value in problem.options.axes.items() if not (any_mask and axis == "mask")}
    for name in problem.optional:
        axes |= TENSORS[name].axes
    return (("headdim", least_headdim(problem.headdim)), *axes.items(),
            *((name, value) for name, value in at_run_time if value != _DEFAULTS[name]))


@lru_cache(maxsize=256)
def kernels_of(arch: str, wanted: Wanted, manifest: Manifest, optional: tuple[str, ...] = ()) -> Kernels:
    """The kernels of this arch, whatever the GPU, that compute the wanted values and take the optional tensors of these
    names.

    Raises UnsupportedError where the manifest has no such kernels, CubinError where it has an attention kernel without
    its companions.
    """
    nearest = _ordered(arch, wanted, manifest)[0]
    if instead := _differing(wanted, nearest, manifest):
        raise UnsupportedError(_missing(arch, wanted, instead))
    kernels = with_companions(nearest, manifest, optional)
    for name in optional:
        if not any(name in manifest.structs[record.params].fields for record in kernels.records):
            raise UnsupportedError(f"no kernel for {arch} takes {name}; leave it out. {_FOLDER}")
    return kernels


def with_companions(attn: AttnRecord, manifest: Manifest, optional: tuple[str, ...] = ()) -> Kernels:
    """An attention kernel with the companions of a call with these optional tensors; CubinError where one is missing.
    """
    missing = [name for name in attn.companions if name not in manifest.kernels]
    if missing:
        raise CubinError(f"the kernel folder has {attn.name} but not {missing[0]}, which it needs; rebuild it with "
                         f"`python -m codegen build`, or reinstall sage-aot")
    kernels = Kernels(attn, {record.spec.kind: record for record in map(manifest.kernels.__getitem__, attn.companions)})
    is_listed = any(name in optional for name in LISTED)
    unused = [*(() if is_listed else ("lists",)), *(() if "key_mask" in optional and not is_listed else ("pack",))]
    for kind in unused:
        kernels = kernels.without(kind)
    return kernels


def _ordered(arch: str, wanted: Wanted, manifest: Manifest) -> list[AttnRecord]:
    """An arch's attention kernels, nearest to the call first; on axes that the call leaves open, in the order of
    AXES."""
    return sorted(manifest.attention(arch), key=lambda record: (
        _distance(wanted, record, manifest), [values.index(record.spec.values[axis]) for axis, values in AXES.items()]))


def _reason(wanted: Wanted, record: AttnRecord, first: AttnRecord, manifest: Manifest) -> str | None:
    """The reason why a call does not take a kernel, in terms of the call's options, or None. `first`: the arch's
    nearest kernel."""
    if differing := _differing(wanted, record, manifest):
        return "for " + _spelt(differing)
    own, taken = record.spec.values, first.spec.values
    if left_open := [axis for axis in AXES if own[axis] != taken[axis]]:
        return "for {}, on request: 'auto' takes {}".format(
            *(_spelt({axis: values[axis] for axis in left_open}) for values in (own, taken)))
    return None


def _differing(wanted: Wanted, record: AttnRecord, manifest: Manifest) -> dict[str, Any]:
    """The values that a kernel and its companions compute, where they are not the wanted ones."""
    own = {name: getattr(record.spec, name) if name in AXES else value if _takes(record, name, manifest)
           else _DEFAULTS[name] for name, value in wanted}
    return {name: own[name] for name, value in wanted if own[name] != value}


def _takes(record: AttnRecord, name: str, manifest: Manifest) -> bool:
    """True where a kernel and its companions take an option at run time: the structs of its kinds have a field for
    it."""
    companions = [manifest.kernels[companion] for companion in record.companions if companion in manifest.kernels]
    return all(name in manifest.structs[kernel.params].fields for kernel in (record, *companions)
               if kernel.spec.kind in OPTIONS[name].kinds)


def _distance(wanted: Wanted, record: AttnRecord, manifest: Manifest) -> tuple[int, int]:
    differing = _differing(wanted, record, manifest)
    return len(_FIXED.intersection(differing)), len(differing)


def _missing(arch: str, wanted: Wanted, instead: dict[str, Any]) -> str:
    """The message for a call without a kernel: what it asked for, and options that have one. `instead`: what the
    nearest kernel computes instead of wanted values."""
    asked = {name: value for name, value in wanted if name in OPTION_OF_AXIS or name in _DEFAULTS and name in instead}
    head = f"no kernel for {arch}, head dim {dict(wanted)['headdim']}, {_spelt(asked)}"
    if _FIXED.intersection(instead):
        return f"{head}, nor with any other options. {_FOLDER}"
    return f"{head}; use {_spelt(instead)}. {_FOLDER}"


def _spelt(values: dict[str, Any]) -> str:
    """The values as the call takes them: ``qk='int8', smooth_v=True``."""
    return ", ".join(spelt(name, value) for name, value in values.items())
