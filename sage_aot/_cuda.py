"""Attention of CUDA tensors: workspace from torch's allocator, launches on torch's current stream."""

from __future__ import annotations

from functools import lru_cache

import torch

from sage_aot._loader import Library
from sage_aot._plan import TensorArgument, launches, plan
from sage_aot._problem import Problem
from sage_aot._select import Kernels


@lru_cache(maxsize=None)
def capability(device: int) -> tuple[int, int]:
    """Compute capability of a CUDA device; asking torch costs 2 µs a time."""
    return torch.cuda.get_device_capability(device)


def attention(problem: Problem, kernels: Kernels, library: Library, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
              out: torch.Tensor, lse: torch.Tensor | None) -> torch.Tensor:
    """Queue the attention of [batch, heads, seq, headdim] views into `out`, and into `lse` where one is given.

    Returns the workspace: the quantized tensors, laid out as ``plan(problem, kernels)`` says. torch's allocator keeps
    freed memory in stream order, so dropping it right away is safe.
    """
    layout = plan(problem, kernels)
    device = q.device.index
    with torch.cuda.device(device):
        workspace = torch.empty(layout.workspace_bytes, dtype=torch.uint8, device=q.device)
        stream = torch._C._cuda_getCurrentRawStream(device)
        for launch in launches(layout, workspace.data_ptr(), _argument(q), _argument(k), _argument(v), _argument(out),
                               0 if lse is None else lse.data_ptr()):
            library.launch(launch, device, stream)
    return workspace


def _argument(tensor: torch.Tensor) -> TensorArgument:
    batch, head, row, _ = tensor.stride()
    return TensorArgument(tensor.data_ptr(), batch, head, row)
