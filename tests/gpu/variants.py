"""The attention kernels under test: each variant of the package, on whatever GPU there is.

A kernel whose arch this GPU does not run is taken from a folder that `python -m codegen build --retarget` made for this
GPU from the same generated source. Its arithmetic is the same; its speed means nothing. Where sage_aot is installed
from a wheel, without a source tree, those kernels are left out, and the report's head names their archs
(conftest.py)."""

from __future__ import annotations

import functools
import importlib.util
import subprocess
import sys
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from layout import Result

from sage_aot._backends.cuda.backend import CudaBackend
from sage_aot._backends.cuda.device import arch_of, gpu_here
from sage_aot._backends.loader import Library
from sage_aot._call.backends import default_library
from sage_aot._call.pipeline import prepare
from sage_aot._kernels.axes import least_headdim
from sage_aot._kernels.manifest import FILE_NAME, Manifest, read_target
from sage_aot._kernels.spec import AttnSpec
from sage_aot._problem.given import Given
from sage_aot._problem.options import Options
from sage_aot._problem.sequences import Sequences
from sage_aot._tools.verify import takes

ROOT = Path(__file__).parents[2]


def native_archs(manifest: Manifest) -> set[str]:
    """The archs whose kernels run on this GPU as they are. All archs where there is no GPU: the tests are then skipped.
    """
    if not torch.cuda.is_available():
        return set(manifest.archs)
    return {record.spec.arch for record in takes(gpu_here(torch.cuda.current_device()), manifest)}


def variants_of(manifest: Manifest, archs: Container[str], native: Container[str]) -> tuple[AttnSpec, ...]:
    """The attention kernels of some archs, by name, but those that are for other chips and cannot be retargeted: the
    suffix of their target says that they have instructions of their own."""
    return tuple(record.spec for record in manifest.every_attention()
                 if record.spec.arch in archs and (record.spec.arch in native or not read_target(record.target)[2]))


_PACKAGE = default_library().manifest
_NATIVE = native_archs(_PACKAGE)
_TESTED = set(_PACKAGE.archs) if importlib.util.find_spec("codegen") else _NATIVE  # codegen retargets the other archs

_EVERY = variants_of(_PACKAGE, _TESTED, _NATIVE)

SPECS = tuple(spec for spec in _EVERY if spec.mask != "sparse")

SPARSE = tuple(spec for spec in _EVERY if spec.mask == "sparse")
"""Specs with a sparse mask, of which test_masks.py asks what :data:`SPECS` are asked elsewhere."""

LEFT_OUT = sorted({record.spec.arch for record in _PACKAGE.every_attention() if record.spec not in _EVERY})
"""The archs of which kernels are not tested."""

each_variant = pytest.mark.parametrize("spec", SPECS, ids=[spec.name for spec in SPECS])


QUANTIZERS = [spec for spec in SPECS if spec.mask == "full"]
"""Each quantizer, by an attention kernel that it feeds."""


def each_padded_quantizer(*headdims: int) -> pytest.MarkDecorator:
    """Each quantizer, with those of these head dims for which it is chosen."""
    return _padded(QUANTIZERS, headdims)


def each_padded(*headdims: int) -> pytest.MarkDecorator:
    """Every variant, with those of these head dims for which it is chosen: it has the least head dim that holds
    them."""
    return _padded(SPECS, headdims)


def _padded(specs: Sequence[AttnSpec], headdims: tuple[int, ...]) -> pytest.MarkDecorator:
    cases = [(spec, headdim) for spec in specs for headdim in headdims
             if spec.headdim == least_headdim(headdim)]
    ids = [f"{spec.name}-{headdim}" for spec, headdim in cases]
    return pytest.mark.parametrize(("spec", "headdim"), cases, ids=ids)


LEAST_COSINE = {
    ("int8", "f16", "normal"): 0.9999, ("int8", "f16", "outlier"): 0.9999,
    ("int8", "e4m3", "normal"): 0.9992, ("int8", "e4m3", "outlier"): 0.9998,
    ("int4", "f16", "normal"): 0.985, ("int4", "f16", "outlier"): 0.99,
    ("int4", "e4m3", "normal"): 0.985, ("int4", "e4m3", "outlier"): 0.99,
    ("nvfp4", "nvfp4", "normal"): 0.98, ("nvfp4", "nvfp4", "outlier"): 0.99,
}
"""Per type of Q and K, type of P and V, and input class: least cosine with float64, K smoothed, at the sizes of the
accuracy tests."""

LSE_ERROR = {("int8", "normal"): 0.05, ("int8", "outlier"): 0.8, ("int4", "normal"): 1.0, ("int4", "outlier"): 8.0,
             ("nvfp4", "normal"): 1.0, ("nvfp4", "outlier"): 8.0}
"""Largest error of the log-sum-exp, by type of Q and K and input class. It is the error of the scores, which come from
steps of amax / 127, or at 4 bits of at most amax / 7, and from what a clip cuts off."""


@functools.cache
def library_of(arch: str) -> Library:
    """The folder with kernels of this arch that run here: the package's own, else the retargeted one."""
    if arch in _NATIVE:
        return default_library()
    target = "sm_{}{}".format(*torch.cuda.get_device_capability())
    folder = ROOT / "build" / f"retarget_{target}"
    if not (folder / FILE_NAME).exists():
        subprocess.run([sys.executable, "-m", "codegen", "build", "--retarget", target], cwd=ROOT, check=True)
    return Library(folder)


@functools.cache
def backend_of(arch: str, splits: int | None = None, side_by_side: int | None = None) -> CudaBackend:
    """The backend that runs an arch's kernels here, with the keys split as it chooses or into `splits`, and all
    gradients found as it chooses or by `side_by_side`."""
    return CudaBackend(library_of(arch), arch, splits, side_by_side)


def native_specs() -> list[AttnSpec]:
    """The variants whose kernels run here as they are."""
    return [spec for spec in SPECS if spec.arch in _NATIVE]


def own_specs() -> list[AttnSpec]:
    """The variants that the public call runs here; none where there is no GPU for them."""
    try:
        arch = arch_of(default_library(), torch.cuda.current_device())
    except (RuntimeError, AssertionError):  # UnsupportedError, or torch's own where there is no CUDA
        return []
    return [spec for spec in SPECS if spec.arch == arch]


def run(spec: AttnSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, layout: str = "HND",
        out: torch.Tensor | None = None, scale: float | None = None, smooth_k: bool = True,
        rotate: bool | str = "auto", clip: bool = True, key_mask: torch.Tensor | None = None,
        sequences: Sequences | None = None, poison: bool = True, splits: int | None = None) -> Result:
    """One call of one variant. `poison`: fill outputs and workspace with NaN before."""
    options = Options.of_axes(spec.values, scale=scale, layout=layout, smooth_k=smooth_k, rotate=rotate,
                              clip=clip)
    out = torch.empty_like(q) if out is None else out
    given = Given("dense", q, k, v, key_mask) if sequences is None else sequences.given(q, k, v)
    call = prepare(backend_of(spec.arch, splits), given, options, out)
    lse = call.empty_lse(q)
    bound: Any = call.run
    workspace = torch.empty(bound.plan.workspace_bytes, dtype=torch.uint8, device=q.device)
    if poison:
        out.fill_(torch.nan), lse.fill_(torch.nan), workspace.fill_(0xFF)  # NaNs too
    bound.run(given, out, lse, workspace)
    return Result(out, lse, workspace, bound.plan)
