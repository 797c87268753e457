"""The attention kernels under test: each variant of the package, on whatever GPU there is.

A kernel whose arch this GPU does not run is taken from a folder that `python -m codegen build --retarget` made for this
GPU from the same generated source: its arithmetic is the same, only its speed means nothing.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from sage_aot import _cuda
from sage_aot._loader import Library, default_library
from sage_aot._plan import Plan, plan
from sage_aot._problem import check, heads_first
from sage_aot._select import nearest_arch, select
from sage_aot._spec import AXES, KernelSpec, capability_of
from sage_aot.errors import CubinError

ROOT = Path(__file__).parents[2]

SPECS = tuple(record.spec for _, record in sorted(default_library().manifest.kernels.items())
              if record.spec.kind == "attn")

each_variant = pytest.mark.parametrize("spec", SPECS, ids=[spec.name for spec in SPECS])


def each_padded(*headdims: int) -> pytest.MarkDecorator:
    """Every variant with those of these head dims that it is chosen for: the least kernel that holds them."""
    cases = [(spec, headdim) for spec in SPECS for headdim in headdims
             if spec.headdim == min(d for d in AXES["headdim"] if d >= headdim)]
    return pytest.mark.parametrize(("spec", "headdim"), cases, ids=[f"{spec.name}-{headdim}" for spec, headdim in cases])


LEAST_COSINE = {("f16", "normal"): 0.9999, ("f16", "outlier"): 0.9999,
                ("e4m3", "normal"): 0.9992, ("e4m3", "outlier"): 0.9998}
"""Per PV type and input class, at the sizes of the accuracy tests."""


@dataclass(frozen=True)
class Result:
    out: torch.Tensor  # layout of q
    lse: torch.Tensor  # [batch, q heads, queries]
    workspace: torch.Tensor
    plan: Plan


@functools.lru_cache(maxsize=None)
def library_of(arch: str) -> Library:
    """The folder whose kernels of this arch run here."""
    package = default_library()
    capability = torch.cuda.get_device_capability()
    if nearest_arch(capability, package.manifest) == arch:
        return package
    target = f"sm_{capability[0]}{capability[1]}"
    library = Library(ROOT / "build" / f"retarget_{target}")
    if library.manifest.retarget != target:
        raise CubinError(f"run `python -m codegen build --retarget {target}` first: it makes the kernels of other archs "
                         f"for this GPU")
    return library


def run(spec: KernelSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, layout: str = "HND",
        out: torch.Tensor | None = None, scale: float | None = None, smooth_k: bool = True) -> Result:
    """One call of one variant, with its outputs poisoned before."""
    library = library_of(spec.arch)
    problem = check(q, k, v, is_causal=spec.mask == "causal", scale=scale, layout=layout, smooth_k=smooth_k)
    prepared = plan(problem, select(capability_of(spec.arch), problem, spec.qk, library.manifest))
    out = torch.full_like(q, torch.nan) if out is None else out
    lse = torch.full((problem.batch, problem.num_q_heads, problem.seqlen_q), torch.nan, device=q.device)
    views = [heads_first(tensor, layout) for tensor in (q, k, v, out)]
    return Result(out, lse, _cuda.attention(prepared, library, *views, lse), prepared)


def poison_free_memory(num_bytes: int = 2**28) -> None:
    """Fill what torch's allocator will hand out next with NaN patterns: nothing may rely on fresh memory."""
    torch.cuda.synchronize()
    torch.full((num_bytes,), 0xFF, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
