"""Attention of CUDA tensors: workspace from torch's allocator, launches on torch's current stream."""

from __future__ import annotations

from functools import lru_cache

import torch

from sage_aot._loader import Library
from sage_aot._plan import Launch, Plan, TensorArgument, launches


@lru_cache(maxsize=None)
def capability(device: int) -> tuple[int, int]:
    """Compute capability of a CUDA device; asking torch costs 2 µs a time."""
    return torch.cuda.get_device_capability(device)


def attention(plan: Plan, library: Library, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
              lse: torch.Tensor | None) -> torch.Tensor:
    """Queue the attention of [batch, heads, seq, headdim] views into `out`, and into `lse` where one is given.

    Returns the workspace: the quantized tensors, laid out as the plan says. torch's allocator keeps freed memory in
    stream order, so dropping it right away is safe.
    """
    device = q.get_device()
    if device == torch.cuda.current_device():
        return _queue(plan, library, device, q, k, v, out, lse)
    with torch.cuda.device(device):
        return _queue(plan, library, device, q, k, v, out, lse)


def _queue(plan: Plan, library: Library, device: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
           out: torch.Tensor, lse: torch.Tensor | None) -> torch.Tensor:
    workspace = torch.empty(plan.workspace_bytes, dtype=torch.uint8, device=q.device)
    stream = torch._C._cuda_getCurrentRawStream(device)
    for launch in _packed(plan, workspace, q, k, v, out, lse):
        library.launch(launch, device, stream)
    return workspace


_launches: dict[tuple, tuple[Plan, list[Launch]]] = {}
_MAX_LAUNCHES = 1024


def _packed(plan: Plan, workspace: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
            lse: torch.Tensor | None) -> list[Launch]:
    """The launches of a call, remembered by plan, addresses and strides.

    They are nothing but functions of these, and torch's allocator hands out the same addresses again and again;
    packing them anew takes 10 us.
    """
    key = (id(plan), workspace.data_ptr(), 0 if lse is None else lse.data_ptr(), q.data_ptr(), k.data_ptr(),
           v.data_ptr(), out.data_ptr(), q.stride(), k.stride(), v.stride(), out.stride())
    known = _launches.get(key)
    if known is not None:
        return known[1]
    made = launches(plan, workspace.data_ptr(), *map(argument, (q, k, v, out)), 0 if lse is None else lse.data_ptr())
    if len(_launches) >= _MAX_LAUNCHES:
        _launches.clear()
    _launches[key] = plan, made  # the plan is kept, so that no other one gets its id
    return made


def argument(tensor: torch.Tensor) -> TensorArgument:
    """A [batch, heads, seq, headdim] tensor as the kernels take it."""
    batch, head, row, _ = tensor.stride()
    return TensorArgument(tensor.data_ptr(), batch, head, row)
