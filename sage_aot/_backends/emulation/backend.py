"""Calls of CPU tensors, which run the kernels' arithmetic in torch."""

from __future__ import annotations

import os

import torch

from sage_aot._backends.base import Call, Tensors
from sage_aot._backends.emulation.attention import attend
from sage_aot._backends.emulation.quantize import quantize
from sage_aot._kernels.manifest import Manifest
from sage_aot._launch.plan import Plan
from sage_aot._problem.check import heads_first
from sage_aot.errors import UnsupportedError


class EmulationBackend:
    """The emulation of a folder's kernels."""

    def __init__(self, manifest: Manifest, arch: str | None = None) -> None:
        """`arch`: whose kernels are emulated; None for those that the environment names, or the default."""
        self._manifest, self._arch = manifest, arch

    @property
    def manifest(self) -> Manifest:
        return self._manifest

    def arch(self, device: int) -> str:
        """The same whatever the device."""
        return self._arch or emulated_arch(self._manifest)

    def bind(self, plan: Plan, tensors: Tensors) -> Call:
        problem, kernels, layout = plan.problem, plan.kernels, plan.problem.options.layout

        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
                 lse: torch.Tensor | None) -> None:
            q, k, v, out = (heads_first(tensor, layout) for tensor in (q, k, v, out))
            result, result_lse = attend(problem, kernels, quantize(problem, kernels, q, k, v))
            out.copy_(result[:, :, : problem.seqlen_q, : problem.headdim])
            if lse is not None:
                lse.copy_(result_lse[:, :, : problem.seqlen_q])

        return call


def emulated_arch(manifest: Manifest) -> str:
    """The arch whose kernels CPU tensors emulate: ``SAGE_AOT_EMULATE`` where set, else sm89, else the newest built."""
    archs = manifest.attention_archs
    asked = os.environ.get("SAGE_AOT_EMULATE")
    if asked is not None and asked not in archs:
        raise UnsupportedError(f"SAGE_AOT_EMULATE: expected one of the archs that are built, {', '.join(archs)}; got "
                               f"{asked!r}")
    return asked or ("sm89" if "sm89" in archs else archs[-1])
