"""The kernels that a call would run on a GPU, and the reasons against all others. Needs no GPU, launches nothing."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, cast

import torch

from sage_aot._backends.cuda.device import gpu_here, sm_count
from sage_aot._backends.drivers import default_driver
from sage_aot._backends.emulation.backend import emulated_arch
from sage_aot._call.backends import default_library
from sage_aot._call.forms import (
    call_of_attn,
    call_of_attn_varlen,
    given_to,
    groups_share_rows,
    has_one_query,
    with_shared_rows,
)
from sage_aot._call.kv import QuantizedKV
from sage_aot._call.pipeline import check_quantizer
from sage_aot._call.sparse import Sparse, no_choice_of_sequences, with_stand_in
from sage_aot._kernels.axes import MAX_HEADDIM
from sage_aot._kernels.drivers import CUDA_OF_DRIVER, cuda_of
from sage_aot._kernels.manifest import Manifest
from sage_aot._launch.choose import (
    ArchChoice,
    Candidate,
    Gpu,
    Kernels,
    candidates,
    choose_arch,
    kernels_of,
    nearest_arch,
    wanted_values,
)
from sage_aot._launch.plan import plan, splits_of
from sage_aot._problem.arguments import check_out, check_return_lse
from sage_aot._problem.check import check
from sage_aot._problem.given import Given, Stored
from sage_aot._problem.options import OPTIONS, Asked, Options, integer_of
from sage_aot._problem.problem import Problem
from sage_aot._problem.tensors import TENSORS
from sage_aot.errors import ArgumentError, UnsupportedError


@dataclass(frozen=True)
class Explanation:
    """The choice of kernels for a call, and its reasons; str() is a table."""

    gpu: Gpu | None  # None for CPU tensors, which are emulated
    problem: Problem
    candidates: tuple[Candidate, ...]  # every attention kernel, with its reason: first those of the chosen arch
    kernels: Kernels | None  # the kernels that the call runs; None where it raises
    error: str | None  # message of the error where the call raises
    splits: int | None  # blocks that share the keys of a query tile; None where that is not known
    run_on: str | None  # the GPU that the chosen arch's files ran on as they are; None: none

    def __str__(self) -> str:
        where = f"GPU     {self.gpu}" if self.gpu else "CPU     tensors are emulated"
        decisive = {name: getattr(self.problem.options, name) for name, option in OPTIONS.items() if option.axis}
        call = ", ".join(f"{name}={value!r}" for name, value in {"headdim": self.problem.headdim, **decisive}.items())
        if self.problem.tokens:
            call += f", {self.problem.batch} sequences in {self.problem.tokens[0]} tokens of q and " \
                    f"{self.problem.tokens[1]} of k and v"
        taken = f"refused {self.error}"
        if self.kernels:
            taken = "\n".join(f"{'' if i else 'runs':8}{record.name}" for i, record in enumerate(self.kernels.records))
            if self.gpu and self.run_on is None:
                arch = self.kernels.attn.spec.arch
                taken += f"\nnote    the kernels of {arch} were not run on hardware, but simulated or rebuilt"
            if self.splits is None:
                taken += "\nkeys    are split, and sage_merge_* runs, where the query tiles do not fill the GPU"
            elif self.splits > 1:
                taken += f"\nkeys    are split over {self.splits} blocks a query tile"
        return "\n".join([where, f"call    {call}", taken, "", *self._table()])

    def _table(self) -> list[str]:
        """A line per kernel that differs from the call in at most one option; an arch's other kernels share a line."""
        rows = []
        for (arch, reason), group in groupby(self.candidates, lambda c: (c.record.spec.arch, _summary(c))):
            of_group = list(group)
            name = of_group[0].record.name
            if len(of_group) > 1:
                name = f"sage_attn_{arch}_* ({len(of_group)} kernels)"
            rows.append(("taken" if of_group[0].taken else "", name, reason))
        width = max((len(name) for _, name, _ in rows), default=0)
        return [f"{mark:8}{name:{width}}  {reason}" for mark, name, reason in rows]


def _summary(candidate: Candidate) -> str:
    return candidate.reason if len(candidate.differing) < 2 else "differ from the call in several of these"


def explain(q: torch.Tensor | None = None, k: torch.Tensor | QuantizedKV | None = None,
            v: torch.Tensor | None = None, *, capability: tuple[int, int] | None = None, headdim: int | None = None,
            driver: int | None = None, sparse: Sparse | None = None, return_lse: bool = False,
            out: torch.Tensor | None = None,
            cu_seqlens_q: torch.Tensor | None = None, cu_seqlens_k: torch.Tensor | None = None,
            max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, **arguments: Any) -> Explanation:
    """Explain which kernels :func:`sage_aot.attn` would run for these arguments, and why none of the others; with
    `cu_seqlens_q` and the three arguments behind it, which :func:`sage_aot.attn_varlen` would run.

    Nothing is loaded or launched, and no GPU is needed: ``explain(capability=(8, 9), headdim=128)`` tells what an L4
    would run. The call makes the same choice. The arch comes first: the GPU's own; else the nearest lower minor of its
    major version; else PTX, which the driver compiles. Machine code for a target with the suffix ``a``, or for Tegra,
    runs on that chip alone. Then comes the arch's kernel with the options of the call.

    Args:
        q, k, v: as for the call, k a QuantizedKV too; or leave them out and give `headdim`.
        capability: compute capability, ``(major, minor)``, of the GPU to explain for. None: that of q's device; without
            tensors, that of the current device.
        headdim: channels of a head where there are no tensors.
        driver: branch of that GPU's driver, such as 535. None: the driver of this machine, or any driver where
            `capability` is given.
        sparse, return_lse, out, cu_seqlens_q, ..., arguments: those of the call, its options and optional tensors. Of a
            sparse call the attention to the blocks that it chooses is explained.

    Returns:
        An :class:`Explanation`, which ``print`` shows as a table. ``candidates`` has every attention kernel with its
        reason. ``kernels.records`` are the manifest's of the kernels that run; ``kernels`` is None where the call would
        raise, with the message in ``error``. ``run_on`` names the GPU that the kernels' files ran on, or is None.
        ``splits`` says how many blocks share the keys of a query tile. Without tensors, and for a GPU that is not
        here, it is None, and ``kernels`` has the kernel that merges splits, which some calls do not run.

    Raises:
        ArgumentError: an argument is not as described.
        TypeError: the call has no option of this name.
        CubinError: the kernel folder is missing or damaged.

    >>> import sage_aot
    >>> sage_aot.explain(capability=(8, 9), headdim=128).kernels.attn.spec.arch
    'sm89'
    """
    optional = {name: arguments.pop(name, None) for name in TENSORS}
    asked = _asked(arguments)
    check_return_lse(return_lse)
    sequences = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    manifest = default_library().manifest
    if q is None and k is None and v is None:
        _check_no_tensors(**optional, sparse=sparse, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
        stand_in, device = _stand_in(headdim), -1 if capability else _current_device()
        problem = check(Given("dense", stand_in, stand_in, stand_in), Options(*asked))
        if out is not None:
            check_out(out, stand_in)
        return _explained(_gpu(device, capability, driver), -1 if capability else device, problem, None, manifest)
    if headdim is not None:
        raise ArgumentError(f"headdim: that of q holds, got {headdim!r} with tensors; pass one or the other")
    if all(value is None for value in sequences):
        if sparse is not None:
            optional = with_stand_in(q, k, asked, sparse, optional)
        call = call_of_attn(q, k, v, asked, **optional)
    elif sparse is not None:
        raise no_choice_of_sequences()
    else:
        call = call_of_attn_varlen(q, k, v, *sequences, asked, **optional)
    given, (_, _, asked) = given_to(call), call
    problem, device = check(given, Options(*asked)), given.like.get_device()
    if out is not None:
        check_out(out, given.like)
    shares = has_one_query(given.like, asked.layout) and groups_share_rows(given, asked, out)
    run_as = with_shared_rows(problem) if shares else problem
    found = _explained(_gpu(device, capability, driver), -1 if capability else device, problem, run_as, manifest)
    return _checked_for(given, found)


def _asked(options: dict[str, Any]) -> Asked:
    """The options of the call, checked."""
    unknown = [name for name in options if name not in OPTIONS]
    if unknown:
        raise TypeError(f"explain() got an unexpected keyword argument {unknown[0]!r}; the options of the call are "
                        f"{', '.join(OPTIONS)}, its optional tensors {', '.join(TENSORS)}")
    return Asked(*vars(Options(**options)).values())


def _check_no_tensors(**tensors: object) -> None:
    for name, given in tensors.items():
        if given is not None:
            raise ArgumentError(f"{name}: expected None without q, k and v, got {type(given).__name__}; pass the "
                                f"tensors too")


def _checked_for(given: Given, found: Explanation) -> Explanation:
    """The explanation of a call; an error where another kernel quantized its k and v."""
    if isinstance(given.details, Stored) and found.kernels is not None:
        try:
            check_quantizer(found.kernels, given.details)
        except ArgumentError as refused:
            return replace(found, kernels=None, error=str(refused))
    return found


def _explained(gpu: Gpu | None, device: int, problem: Problem, run_as: Problem | None,
               manifest: Manifest) -> Explanation:
    """The explanation for a GPU, or for the emulation where `gpu` is None. `device`: the GPU's number on this machine,
    −1 for a GPU that is not here. `run_as`: the problem that the kernels get, which differs where q heads share rows;
    None where its shape is not known."""
    choice = choose_arch(gpu, manifest) if gpu else _choice_of_emulation(manifest)
    kernels = error = splits = None
    try:
        if gpu and device >= 0:
            default_driver()  # raises where nothing here loads kernels; unknown for a GPU that is not here
        arch = nearest_arch(gpu, manifest) if gpu else emulated_arch(manifest)
        kernels = kernels_of(arch, wanted_values(problem), manifest, problem.optional)
        splits = _splits(gpu, device, run_as, kernels)
        if run_as is not None and splits is not None:
            kernels = plan(run_as, kernels, splits).kernels
    except UnsupportedError as refused:
        error = str(refused)
    run_on = manifest.archs[kernels.attn.spec.arch].run_on if kernels else None
    return Explanation(gpu, problem, candidates(choice, problem, manifest), kernels, error, splits, run_on)


def _splits(gpu: Gpu | None, device: int, problem: Problem | None, kernels: Kernels) -> int | None:
    """The splits of a call; None where they depend on a shape or a number of SMs that is not known."""
    if gpu is None or problem is not None and problem.is_listed:
        return 1
    return splits_of(problem, kernels, sm_count(device)) if problem is not None and device >= 0 else None


def _choice_of_emulation(manifest: Manifest) -> ArchChoice:
    emulated = emulated_arch(manifest)
    why = f"{emulated} is what CPU tensors emulate; SAGE_AOT_EMULATE names another"
    return ArchChoice(emulated, dict.fromkeys(sorted(manifest.attention_archs, key=lambda arch: arch != emulated), why))


def _gpu(device: int, capability: tuple[int, int] | None, driver: int | None) -> Gpu | None:
    """The GPU to explain for; None for the emulation."""
    branch = None if driver is None else integer_of(driver)
    if driver is not None and (branch is None or branch < min(CUDA_OF_DRIVER)):
        raise ArgumentError(f"driver: expected the branch of a driver, {min(CUDA_OF_DRIVER)} or later, got {driver!r}")
    cuda = None if branch is None else cuda_of(branch)
    if capability is not None:
        parts = [*map(integer_of, capability)] if isinstance(capability, tuple) else []
        if len(parts) != 2 or None in parts:
            raise ArgumentError(f"capability: expected two integers such as (8, 9), got {capability!r}")
        return Gpu(cast(tuple[int, int], tuple(parts)), cuda)
    if device < 0:
        return None
    here = gpu_here(device)
    return here if cuda is None else here._replace(cuda=cuda)


def _current_device() -> int:
    if not torch.cuda.is_available():
        raise ArgumentError("expected q, k and v, or capability=(major, minor) of a GPU: there is none here to take "
                            "it from")
    return torch.cuda.current_device()


def _stand_in(headdim: int | None) -> torch.Tensor:
    """A tensor for the checks, where only the head dim is known."""
    channels = integer_of(headdim)
    if channels is None or channels < 1:
        raise ArgumentError(f"headdim: expected an integer from 1 to {MAX_HEADDIM} where no tensors are given, got "
                            f"{headdim!r}")
    return torch.empty(1, 1, 1, channels, dtype=torch.bfloat16)


def _signature() -> inspect.Signature:
    """The signature of :func:`explain` with the options and the optional tensors of the call by name."""
    plain = inspect.signature(explain)
    own = [parameter for parameter in plain.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD]
    defaults = {**dict.fromkeys(TENSORS), **{name: option.default for name, option in OPTIONS.items()}}
    arguments = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
                 for name, default in defaults.items()]
    return plain.replace(parameters=[*own, *arguments])


explain.__signature__ = _signature()  # type: ignore[attr-defined]  # what help() and editors show
