"""Which kernels a call would run on a GPU, and what is against each of the others. Needs no GPU, launches nothing."""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import groupby

import torch

from sage_aot import _cuda
from sage_aot._driver import CUDA_OF_DRIVER, cuda_of, default_driver
from sage_aot._loader import default_library
from sage_aot._manifest import Manifest
from sage_aot._ops import emulated_arch
from sage_aot._problem import Problem, check, check_out
from sage_aot._select import (
    ArchChoice,
    Candidate,
    Gpu,
    Kernels,
    all_archs,
    candidates,
    choose_arch,
    kernels_of,
    nearest_arch,
)
from sage_aot.errors import ArgumentError, UnsupportedError

_SHOWN = ("headdim", "is_causal", "qk_bits", "smooth_q", "smooth_v", "pv_accum")
"""What of a problem decides about its kernels."""


@dataclass(frozen=True)
class Explanation:
    """A choice and its reasons; str() is a table."""

    gpu: Gpu | None  # None for CPU tensors, which are emulated
    problem: Problem
    candidates: tuple[Candidate, ...]  # every attention kernel, with its reason: first those of the chosen arch
    kernels: Kernels | None  # that the call runs; None where it raises
    error: str | None  # what it raises then

    def __str__(self) -> str:
        where = f"GPU     {self.gpu}" if self.gpu else "CPU     tensors are emulated"
        call = ", ".join(f"{name}={getattr(self.problem, name)!r}" for name in _SHOWN)
        taken = f"refused {self.error}"
        if self.kernels:
            names = [getattr(self.kernels, field.name) for field in fields(self.kernels)]
            taken = "\n".join(f"{'runs' if i == 0 else '':8}{record.spec.name}"
                              for i, record in enumerate(filter(None, names)))
        return "\n".join([where, f"call    {call}", taken, "", *self._table()])

    def _table(self) -> list[str]:
        """A line per kernel that differs from the call in one thing at most; the others of an arch share theirs."""
        rows = []
        for (arch, reason), group in groupby(self.candidates, lambda c: (c.record.spec.arch, _summary(c))):
            of_group = list(group)
            name = of_group[0].record.spec.name
            if len(of_group) > 1:
                name = f"sage_attn_{arch}_* ({len(of_group)} kernels)"
            rows.append(("taken" if of_group[0].taken else "", name, reason))
        width = max((len(name) for _, name, _ in rows), default=0)
        return [f"{mark:8}{name:{width}}  {reason}" for mark, name, reason in rows]


def _summary(candidate: Candidate) -> str:
    return candidate.reason if len(candidate.differing) < 2 else "differ from the call in several of these"


def explain(q: torch.Tensor | None = None, k: torch.Tensor | None = None, v: torch.Tensor | None = None, *,
            capability: tuple[int, int] | None = None, headdim: int | None = None, driver: int | None = None,
            is_causal: bool = False, scale: float | None = None, layout: str = "HND", qk_bits: int | str = "auto",
            smooth_q: bool | str = "auto", smooth_k: bool = True, smooth_v: bool = False, pv_accum: str = "auto",
            return_lse: bool = False, out: torch.Tensor | None = None) -> Explanation:
    """Which kernels :func:`sage_aot.attn` would run for these arguments, and why none of the others.

    Nothing is loaded or launched, and no GPU is needed: ``explain(capability=(8, 9), headdim=128)`` tells what an L4
    would run. The choice is the call's own: first the arch (the GPU's; else the nearest lower minor of its major
    version, but code for a chip with the suffix ``a``, or of Tegra, only on that chip; else PTX, which the driver
    compiles), then its kernel with the options of the call.

    Args:
        q, k, v: as for the call; in place of them `headdim`.
        capability: compute capability, ``(major, minor)``, of the GPU to explain for; None for that of q's device, and
            without q for the current device.
        headdim: channels of a head, 1 to 128, where there are no tensors.
        driver: branch of that GPU's driver, such as 535; None for that of this machine where `capability` is None too,
            else the driver is left out of account.
        is_causal, scale, layout, qk_bits, smooth_q, smooth_k, smooth_v, pv_accum, return_lse, out: those of the call.

    Returns:
        An :class:`Explanation`: ``print`` shows it as a table; ``candidates`` has every attention kernel with its
        reason, ``kernels`` the manifest's records of those that run, None where the call would raise `error`.

    Raises:
        ArgumentError: an argument is not as described.
        CubinError: the kernel folder is missing or damaged.

    >>> import sage_aot
    >>> sage_aot.explain(capability=(8, 9), headdim=128).kernels.attn.spec.arch
    'sm89'
    """
    if q is None and k is None and v is None:
        q = k = v = _stand_in(headdim)
        device = -1 if capability else _current_device()
    elif headdim is not None:
        raise ArgumentError(f"headdim: that of q holds, got {headdim!r} beside tensors; pass one or the other")
    else:
        device = q.get_device() if isinstance(q, torch.Tensor) else -1
    problem = check(q, k, v, is_causal=is_causal, scale=scale, layout=layout, qk_bits=qk_bits, smooth_q=smooth_q,
                    smooth_k=smooth_k, smooth_v=smooth_v, pv_accum=pv_accum)
    if not isinstance(return_lse, bool):
        raise ArgumentError(f"return_lse: expected True or False, got {return_lse!r}")
    if out is not None:
        check_out(out, q)
    manifest = default_library().manifest
    gpu = _gpu(device, capability, driver)
    return _explained(gpu, -1 if capability else device, problem, manifest)


def _explained(gpu: Gpu | None, device: int, problem: Problem, manifest: Manifest) -> Explanation:
    """For a GPU, or for the emulation; `device` is that GPU's number where it is this machine's, else −1."""
    emulated = None if gpu else emulated_arch(manifest)
    choice = choose_arch(gpu, manifest) if gpu else ArchChoice(emulated, {
        arch: f"{emulated} is what CPU tensors emulate; SAGE_AOT_EMULATE names another"
        for arch in sorted(all_archs(manifest), key=lambda arch: arch != emulated)})
    kernels = error = None
    try:
        if gpu and device >= 0:
            default_driver()  # that something can load kernels; of another machine's GPU nobody knows
        kernels = kernels_of(nearest_arch(gpu, manifest) if gpu else emulated, problem, manifest)
    except UnsupportedError as refused:
        error = str(refused)
    return Explanation(gpu, problem, candidates(choice, problem, manifest), kernels, error)


def _gpu(device: int, capability: tuple[int, int] | None, driver: int | None) -> Gpu | None:
    """The GPU to explain for; None where that is the emulation."""
    if driver is not None and (not isinstance(driver, int) or driver < min(CUDA_OF_DRIVER)):
        raise ArgumentError(f"driver: expected the branch of a driver, {min(CUDA_OF_DRIVER)} or later, got {driver!r}")
    cuda = None if driver is None else cuda_of(driver)
    if capability is not None:
        if not (isinstance(capability, tuple) and [type(part) for part in capability] == [int, int]):
            raise ArgumentError(f"capability: expected two integers such as (8, 9), got {capability!r}")
        return Gpu(capability, cuda)
    if device < 0:
        return None
    here = _cuda.gpu_here(device)
    return here if cuda is None else here._replace(cuda=cuda)


def _current_device() -> int:
    if not torch.cuda.is_available():
        raise ArgumentError("expected q, k and v, or capability=(major, minor) of a GPU: there is none here to take "
                            "it from")
    return torch.cuda.current_device()


def _stand_in(headdim: int | None) -> torch.Tensor:
    """A tensor for the checks, where only the head dim is known."""
    if not isinstance(headdim, int) or isinstance(headdim, bool) or headdim < 1:
        raise ArgumentError(f"headdim: expected an integer from 1 to 128 where no tensors are given, got {headdim!r}")
    return torch.empty(1, 1, 1, headdim, dtype=torch.bfloat16)
