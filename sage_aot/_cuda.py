"""Attention of CUDA tensors: which kernels a device runs, workspace from torch's allocator, launches on torch's current
stream."""

from __future__ import annotations

import os
import warnings
from functools import lru_cache

import torch

from sage_aot._driver import default_driver
from sage_aot._loader import Library
from sage_aot._plan import Plan, TensorArgument, launches
from sage_aot._select import Gpu, nearest_arch
from sage_aot._spec import is_ptx
from sage_aot.errors import PtxWarning, UnsupportedError


@lru_cache(maxsize=None)
def arch_of(library: Library, device: int) -> str:
    """The arch whose kernels a CUDA device runs. Raises UnsupportedError where none does, or nothing can load them.

    Warns once where the kernels are PTX; asking torch and the driver each time would cost microseconds.
    """
    default_driver()  # or say what is missing
    gpu = gpu_here(device)
    arch = nearest_arch(gpu, library.manifest)
    if is_ptx(arch) and os.environ.get("SAGE_AOT_PTX_WARNING") != "0":
        warnings.warn(f"this sage-aot has no machine code for this GPU ({gpu}): the driver compiles the PTX of {arch}, "
                      f"which takes seconds at the first call of each kernel and does not use what is new in this GPU. "
                      f"Look for a newer sage-aot; SAGE_AOT_PTX_WARNING=0 silences this", PtxWarning, stacklevel=2)
    return arch


def gpu_here(device: int) -> Gpu:
    """A CUDA device; nothing is known of its driver where no loader can ask it."""
    try:
        cuda = default_driver().cuda
    except UnsupportedError:
        cuda = None
    return Gpu(torch.cuda.get_device_capability(device), cuda, torch.cuda.get_device_name(device))


@lru_cache(maxsize=None)
def multiprocessors(device: int) -> int:
    """Of a CUDA device."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def attention(plan: Plan, library: Library, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
              lse: torch.Tensor | None, workspace: torch.Tensor | None = None) -> torch.Tensor:
    """Queue the attention of [batch, heads, seq, headdim] views into `out`, and into `lse` where one is given.

    Returns the workspace: the quantized tensors, laid out as the plan says; a given one must hold
    ``plan.workspace_bytes``. torch's allocator keeps freed memory in stream order, so dropping it right away is safe.
    """
    device = q.get_device()
    if device == torch.cuda.current_device():
        return _queue(plan, library, device, q, k, v, out, lse, workspace)
    with torch.cuda.device(device):
        return _queue(plan, library, device, q, k, v, out, lse, workspace)


def _queue(plan: Plan, library: Library, device: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
           out: torch.Tensor, lse: torch.Tensor | None, workspace: torch.Tensor | None) -> torch.Tensor:
    if workspace is None:
        workspace = torch.empty(plan.workspace_bytes, dtype=torch.uint8, device=q.device)
    run(plan, library, device, torch._C._cuda_getCurrentRawStream(device), multiprocessors(device), q, k, v, out, lse,
        workspace)
    return workspace


def run(plan: Plan, library: Library, device: int, stream: int, multiprocessors: int, q: torch.Tensor, k: torch.Tensor,
        v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None, workspace: torch.Tensor) -> None:
    """Hand a plan's launches to a library, in order; all that is asked of the tensors is where they lie."""
    for launch in launches(plan, workspace.data_ptr(), *map(argument, (q, k, v, out)),
                           0 if lse is None else lse.data_ptr(), multiprocessors):
        library.launch(launch, device, stream)


def argument(tensor: torch.Tensor) -> TensorArgument:
    """A [batch, heads, seq, headdim] tensor as the kernels take it."""
    batch, head, row, _ = tensor.stride()
    return TensorArgument(tensor.data_ptr(), batch, head, row)
