"""The rules: which calls of a host sage_aot does not compute, and which torch is expected to compute faster.

An adapter describes a call of its host as a :class:`HostCall`. Reasons follow from shapes, dtypes and options, never
from the values of a tensor: they synchronize nothing, and tracers follow them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from sage_aot._call.refusal import is_plain
from sage_aot._kernels.axes import MAX_HEADDIM
from sage_aot._problem.derivatives import is_transformed
from sage_aot._problem.options import OPTIONS, scalar_of
from sage_aot._problem.problem import DTYPES
from sage_aot._tools.explain import explain
from sage_aot.errors import UnsupportedError
from sage_aot.integrations._calibration import threshold_of
from sage_aot.integrations._gain import Work, is_faster, kernel_headdim, kind_of
from sage_aot.integrations._report import SLOWER, refused


class HostCall(NamedTuple):
    """An attention call of a host."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None = None
    """Broadcasts to [batch, heads, queries, keys]: bool, True = attend, or numbers to add to the scores."""
    is_causal: bool = False
    scale: float | None = None
    dropout: float = 0.0
    layout: str = "HND"  # of q, k, v and the output, as sage_aot.attn has it
    grouped: bool = False  # whether k and v may have fewer heads than q
    bottom_right: bool = False  # where the causal mask is aligned; else top-left
    beyond: str | None = None
    """Another thing that the host asks for, and that sage_aot does not compute."""

    def sizes(self) -> tuple[int, int, int, int, int]:
        """Batch, q heads, kv heads, queries, keys."""
        heads, rows = (1, 2) if self.layout == "HND" else (2, 1)
        return self.q.size(0), self.q.size(heads), self.k.size(heads), self.q.size(rows), self.k.size(rows)


def why_slower(call: HostCall) -> str | None:
    """The reason why a policy of faster calls leaves one to the host, whether or not sage_aot computes it; None where
    it does not."""
    q, k = call.q, call.k
    if not q.is_cuda:
        return "tensors on the CPU" if q.is_cpu else f"tensors on {q.device.type}"
    if not (is_plain(q) and is_plain(k) and q.dim() == k.dim() == 4):
        return None  # refused
    batch, q_heads, kv_heads, queries, keys = call.sizes()
    if call.is_causal and not call.bottom_right:
        keys = min(keys, queries)  # no query sees the others
    headdim = q.size(3)
    threshold = threshold_of(q.get_device(), kind_of(call.is_causal, call.mask is not None), kernel_headdim(headdim))
    work = Work.of(batch, q_heads, kv_heads, queries, keys, headdim, call.is_causal)
    return None if is_faster(threshold, work) else SLOWER


def why_not_computed(call: HostCall, no_rows: bool = False) -> str | None:
    """The reason why sage_aot does not compute a call; None where it does.

    Args:
        no_rows: the call may have no queries, or no keys.
    """
    q, k, v = call.q, call.k, call.v
    if call.beyond is not None:
        return call.beyond
    if not (is_plain(q) and is_plain(k) and is_plain(v)):
        return "tensors that are nested, sparse or of a subclass"
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        return "tensors of other than 4 dimensions"
    if call.dropout != 0:
        return "dropout"
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return "gradients"
    if is_transformed():
        return "forward gradients, or a transformation of torch.func"
    if call.scale is not None and not _takes_scale(call.scale):
        return "a scale that sage_aot does not take"
    return _why_not_by_types(call) or _why_not_by_shapes(call, no_rows) or _why_not_by_masks(call)


def _takes_scale(scale: object) -> bool:
    """True for a scale that attn takes. One in a tensor on a GPU is the host's: to read it would synchronize."""
    valid, is_here = OPTIONS["scale"].valid, not isinstance(scale, torch.Tensor) or scale.is_cpu
    return valid(scale) or is_here and valid(scalar_of(scale))


def _why_not_by_types(call: HostCall) -> str | None:
    q, k, v = call.q, call.k, call.v
    if q.device.type not in ("cuda", "cpu", "meta"):
        return f"tensors on {q.device.type}"
    if not q.device == k.device == v.device:
        return "devices that differ"
    of_kernels = q.dtype in DTYPES and k.dtype in DTYPES and v.dtype in DTYPES
    if of_kernels and q.device.type != "meta" and torch.is_autocast_enabled(q.device.type):
        return None  # the operator casts all three
    if not q.dtype == k.dtype == v.dtype:
        return "dtypes that differ"
    return None if q.dtype in DTYPES else f"dtype {q.dtype}".replace("torch.", "")


def _why_not_by_shapes(call: HostCall, no_rows: bool) -> str | None:
    q, k, v = call.q, call.k, call.v
    batch, q_heads, kv_heads, queries, keys = call.sizes()
    if 0 in (batch, q_heads, kv_heads, q.size(3), v.size(3)) or 0 in (queries, keys) and not no_rows:
        return "empty tensors"
    if q.size(0) != k.size(0) or k.shape[:3] != v.shape[:3] or q.size(3) != k.size(3):
        return "shapes that are broadcast"
    if q_heads != kv_heads and not (call.grouped and q_heads % kv_heads == 0):
        return "heads that are broadcast"
    if q.size(3) > MAX_HEADDIM or v.size(3) > MAX_HEADDIM:
        return f"head dims above {MAX_HEADDIM}"
    if q.stride(3) != 1 or k.stride(3) != 1 or v.stride(3) != 1:
        return "channels that are not contiguous"
    return None


def _why_not_by_masks(call: HostCall) -> str | None:
    batch, heads, _, queries, keys = call.sizes()
    if call.is_causal:
        if call.mask is not None and not call.bottom_right:
            return "a mask beside is_causal"
        if queries > keys and not call.bottom_right:
            return "is_causal with more queries than keys"
    if call.mask is None:
        return None
    if call.mask.dtype != torch.bool:
        return "a mask of numbers"
    if key_mask_of(call.mask, batch, heads, queries, keys) is None:
        return "a mask that differs by query or head"
    return None


def key_mask_of(mask: torch.Tensor, batch: int, heads: int, queries: int, keys: int) -> torch.Tensor | None:
    """The mask as [batch, keys], a view; None where its rows or heads may differ, or it does not broadcast."""
    if mask.dim() > 4 or any(have not in (1, want) for have, want in zip(reversed(mask.shape),
                                                                         (keys, queries, heads, batch))):
        return None
    whole = mask.expand(batch, heads, queries, keys)
    if any(whole.size(dim) > 1 and whole.stride(dim) != 0 for dim in (1, 2)):
        return None
    return whole[:, 0, 0]


NEUTRAL: Mapping[str, Any] = {"window_size": (-1, -1), "softcap": 0.0, "alibi_slopes": None, "return_softmax": False}
"""Arguments of FlashAttention that sage_aot does not have, each with the value that changes nothing."""


def check_neutral(given: Mapping[str, Any], otherwise: str) -> None:
    """UnsupportedError where an argument of NEUTRAL has another value; `otherwise`: what to do then."""
    for name, neutral in NEUTRAL.items():
        value = given[name]
        if isinstance(value, torch.Tensor) or (tuple(value) if isinstance(value, list) else value) != neutral:
            got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
            raise refused(f"the argument {name}", f"{name}: expected {neutral}, got {got}; {otherwise}")


def check_gpu() -> None:
    """UnsupportedError where this machine has a GPU whose calls sage_aot cannot run. Adapters ask when they are
    switched on, so that no call finds out. Compiled code does not ask."""
    if not torch.compiler.is_compiling() and torch.cuda.is_available() and (error := explain(headdim=128).error):
        raise UnsupportedError(error)
