"""The rules: which calls of a host sage_aot does not compute, and which torch is expected to compute faster.

An adapter describes a call of its host as a :class:`HostCall`. Reasons follow from shapes, dtypes and options, never
from the values of a tensor: they synchronize nothing, and tracers follow them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from sage_aot._call.masks import BlockMask
from sage_aot._call.refusal import is_plain
from sage_aot._call.sparse import Sparse
from sage_aot._kernels.axes import MAX_HEADDIM
from sage_aot._problem.arguments import block_sizes_of
from sage_aot._problem.derivatives import is_transformed
from sage_aot._problem.options import OPTIONS, scalar_of
from sage_aot._problem.problem import DTYPES
from sage_aot._tools.explain import explain
from sage_aot.errors import ArgumentError, UnsupportedError
from sage_aot.integrations._calibration import threshold_of
from sage_aot.integrations._gain import Mask, Work, is_faster, kernel_headdim, kind_of
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
    bottom_right: bool = False  # where the causal mask and the window are aligned; else top-left
    window: tuple[int, int] | None = None
    """Numbers of keys that a query sees in front of its own and behind it, -1 for all; right is 0 with is_causal."""
    sinks: torch.Tensor | None = None
    """A logit for each q head, which joins the softmax of its rows without a value."""
    beyond: str | None = None
    """Another thing that the host asks for, and that sage_aot does not compute."""
    blocks: Sparse | BlockMask | None = None
    """Choice of the call's blocks of keys, where :func:`blocks_of` lets it; or the blocks that the call sees."""

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
    batch, q_heads, kv_heads, queries, _ = call.sizes()
    _, keys, window = sight_of(call)
    headdim = q.size(3)
    threshold = threshold_of(q.get_device(), kind_of(call.is_causal, _mask_of(call, window)), kernel_headdim(headdim))
    work = Work.of(batch, q_heads, kv_heads, queries, keys, headdim, call.is_causal, window)
    return None if is_faster(threshold, work) else SLOWER


def sight_of(call: HostCall) -> tuple[int, int, tuple[int, int] | None]:
    """The first key that a query of a call sees by its causal mask and its window, how many keys it is to the last one,
    and the window, where that hides some of these; None where it hides none."""
    queries, keys = call.sizes()[3:]
    if call.is_causal and not call.bottom_right:
        keys = min(keys, queries)
    if call.window is None:
        return 0, keys, None
    left, right = call.window
    first = max(0, keys - queries - left) if left >= 0 else 0
    hides = 0 <= left < keys - first - 1 or not call.is_causal and 0 <= right < queries - 1
    return first, keys - first, call.window if hides else None


def _mask_of(call: HostCall, window: tuple[int, int] | None) -> Mask | None:
    """Mask of a call in addition to a causal mask, as :func:`kind_of` takes it. torch has no sinks: hosts compute them
    by matrix products and a softmax, which take longer than its attention with a mask."""
    if window is not None:
        return "window"
    if call.mask is not None and key_mask_of(call) is not None:
        return "padded"
    return "masked" if call.mask is not None or call.sinks is not None else None


def why_not_computed(call: HostCall, no_rows: bool = False, options: Mapping[str, Any] | None = None) -> str | None:
    """The reason why sage_aot does not compute a call; None where it does.

    Args:
        no_rows: the call may have no queries, or no keys.
        options: of sage_aot.attn, with which the call would be made.
    """
    q, k, v = call.q, call.k, call.v
    if call.beyond is not None:
        return call.beyond
    if not all(x is None or is_plain(x) for x in (q, k, v, call.mask, call.sinks)):
        return "tensors that are nested, sparse or of a subclass"
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        return "tensors of other than 4 dimensions"
    if call.dropout != 0:
        return "dropout"
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, call.sinks)):
        return "gradients"
    if is_transformed():
        return "forward gradients, or a transformation of torch.func"
    if call.scale is not None and not _takes_scale(call.scale):
        return "a scale that sage_aot does not take"
    return (_why_not_by_types(call) or _why_not_by_shapes(call, no_rows) or _why_not_by_masks(call)
            or _why_not_by_options(call, options))


def _takes_scale(scale: object) -> bool:
    """True for a scale that attn takes. One in a tensor on a GPU is the host's: to read it would synchronize."""
    valid, is_here = OPTIONS["scale"].valid, not isinstance(scale, torch.Tensor) or scale.is_cpu
    return valid(scale) or is_here and valid(scalar_of(scale))


def _why_not_by_types(call: HostCall) -> str | None:
    q, k, v = call.q, call.k, call.v
    if q.device.type not in ("cuda", "cpu", "meta"):
        return f"tensors on {q.device.type}"
    if any(x is not None and x.device != q.device for x in (k, v, call.mask, call.sinks)):
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
    _, heads, _, queries, keys = call.sizes()
    if call.is_causal and not call.bottom_right:
        if call.mask is not None:
            return "a mask with is_causal"
        if queries > keys:
            return "is_causal with more queries than keys"
    if call.window is not None and not call.bottom_right and queries != keys:
        return "a window that is aligned top-left"
    if call.sinks is not None and (call.sinks.shape != (heads,) or not call.sinks.is_floating_point()):
        return "sinks that are not a number for each head"
    if call.mask is None:
        return None
    if call.mask.dtype != torch.bool:
        return "a mask of numbers"
    return None if _broadcasts(call) else "a mask of another shape"


def _broadcasts(call: HostCall) -> bool:
    """True where the mask has the shape of the scores, or one that broadcasts to it."""
    batch, heads, _, queries, keys = call.sizes()
    mask: Any = call.mask
    return mask.dim() <= 4 and all(have in (1, want) for have, want in zip(reversed(mask.shape),
                                                                           (keys, queries, heads, batch)))


def key_mask_of(call: HostCall) -> torch.Tensor | None:
    """The mask as [batch, keys], a view; None where its rows or heads may differ, or it does not broadcast."""
    if call.mask is None or not _broadcasts(call):
        return None
    batch, heads, _, queries, keys = call.sizes()
    whole = call.mask.expand(batch, heads, queries, keys)
    if any(whole.size(dim) > 1 and whole.stride(dim) != 0 for dim in (1, 2)):
        return None
    return whole[:, 0, 0]


LEAST_BLOCKS = 16
"""Calls of fewer blocks of keys stay dense: the blocks that are seen in any case would be too large a part of them."""


def blocks_of(call: HostCall) -> Sparse | BlockMask | None:
    """Choice of a call's blocks of keys, or the mask of blocks that it came with; None where it stays dense. Only long
    self-attention is sparse: as many keys as queries, no window, and no mask but a key mask, which a choice with a
    tail does not take either."""
    blocks = call.blocks
    if not isinstance(blocks, Sparse):
        return blocks
    queries, keys = call.sizes()[3:]
    hides = call.mask is not None and (blocks.tail or key_mask_of(call) is None) or sight_of(call)[2] is not None
    is_long = keys > (LEAST_BLOCKS - 1) * block_sizes_of(blocks.block_size)[1]
    return blocks if queries == keys and is_long and not hides else None


def _why_not_by_options(call: HostCall, options: Mapping[str, Any] | None) -> str | None:
    """The kernels of 4 bits have no windows, sinks and masks of queries or blocks; those of a GPU may lack other
    options."""
    if not options:
        return None
    asked = {"a window": sight_of(call)[2], "sinks": call.sinks,
             "a mask that differs by query or head": call.mask if key_mask_of(call) is None else None,
             "a choice of blocks": blocks_of(call)}
    found = [name for name, given in asked.items() if given is not None]
    headdim = max(call.q.size(3), call.v.size(3))
    if not found or _has_sparse_kernels(call.q.get_device(), headdim, tuple(sorted(options.items()))):
        return None
    return f"{found[0]}, for which there is no kernel with the policy's options"


def _has_sparse_kernels(device: int, headdim: int, options: tuple[tuple[str, Any], ...]) -> bool:
    return _explained_sparse(torch.cuda.get_device_capability(device) if device >= 0 else None, headdim, options)


_has_sparse_kernels._dynamo_marked_constant = True  # type: ignore[attr-defined]  # it follows from no tensor


@functools.cache
def _explained_sparse(capability: tuple[int, int] | None, headdim: int, options: tuple[tuple[str, Any], ...]) -> bool:
    """True where a call with a window has a kernel, on a GPU of this capability or, for None, in the emulation. Sinks
    and masks of queries have the same one."""
    asked = {**dict(options), "window": (0, 0)}
    if capability is not None:
        return explain(capability=capability, headdim=headdim, **asked).error is None
    q = torch.empty(1, 1, 2, headdim, dtype=torch.float32)
    return explain(q, q, q, **asked).error is None


NEUTRAL: Mapping[str, Any] = {"softcap": 0.0, "alibi_slopes": None, "return_softmax": False}
"""Arguments of FlashAttention that sage_aot does not have, each with the value that changes nothing."""


def check_neutral(given: Mapping[str, Any], otherwise: str) -> None:
    """UnsupportedError where an argument of NEUTRAL has another value; `otherwise`: what to do then."""
    for name, neutral in NEUTRAL.items():
        value = given[name]
        if isinstance(value, torch.Tensor) or value != neutral:
            got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
            raise refused(f"the argument {name}", f"{name}: expected {neutral}, got {got}; {otherwise}")


NO_WINDOW = -1, -1
"""FlashAttention's `window_size` of calls without a window."""


def window_of(window_size: Any) -> tuple[int, int] | None:
    """FlashAttention's `window_size` as a :class:`HostCall` has a window; None of NO_WINDOW. ArgumentError where it is
    none."""
    option, window = OPTIONS["window"], scalar_of(window_size)
    if window is None or not option.valid(window):
        raise ArgumentError(f"window_size: expected {option.expected.removeprefix('None, or ')}, got {window_size!r}")
    return None if window == NO_WINDOW else window


def check_gpu() -> None:
    """UnsupportedError where this machine has a GPU whose calls sage_aot cannot run. Adapters ask when they are
    switched on, so that no call finds out. Compiled code does not ask."""
    if not torch.compiler.is_compiling() and torch.cuda.is_available() and (error := explain(headdim=128).error):
        raise UnsupportedError(error)
