"""Serving a host's call: by sage_aot where the policy says so, else by the host's own attention.

An adapter hands :func:`attend` a :class:`HostCall` and a function that makes the host's own call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from sage_aot._call.api import attn
from sage_aot._call.sparse import Sparse
from sage_aot._problem.problem import holds
from sage_aot.errors import UnsupportedError
from sage_aot.integrations._policy import Policy, current
from sage_aot.integrations._report import EXACT, SERVED, SPARSE, count, refused
from sage_aot.integrations._rules import (
    HostCall,
    blocks_of,
    key_mask_of,
    sight_of,
    why_not_computed,
    why_slower,
)


def attend(call: HostCall, host: Callable[[], Any], return_lse: bool = False, policy: Policy | None = None,
           form: Callable[[Any], Any] | None = None) -> Any:
    """The call's output, by sage_aot or by the host's own attention.

    Args:
        host: makes the host's own call.
        return_lse: sage_aot's result is a pair of the output and the log-sum-exp.
        policy: None means that of the process.
        form: makes of sage_aot's result one like the host's.

    Raises UnsupportedError where the policy says so, and what :func:`sage_aot.attn` raises.
    """
    policy = current() if policy is None else policy
    if not _fused_attention_is_allowed():
        count(EXACT)
        return by_host(host)
    if policy.when == "faster" and (reason := why_slower(call)):
        count(reason)
        return by_host(host)
    if reason := why_not_computed(call, options=policy.options):
        count(reason)
        if policy.otherwise == "raise":
            raise UnsupportedError(f"expected a call that sage_aot computes, got: {reason}; let the host compute it "
                                   f"with sage_aot.integrations.Policy(otherwise='host')")
        return by_host(host)
    result = serve(call, return_lse, policy.options)
    _count_served(call)
    if observer is not None and not torch.compiler.is_compiling():
        observer(call, result, lambda: by_host(host))
    return result if form is None else form(result)


def _count_served(call: HostCall) -> None:
    count(SERVED)
    if blocks_of(call) is not None:
        count(SPARSE)


def _fused_attention_is_allowed() -> bool:
    """True where ``torch.nn.attention.sdpa_kernel`` allows a backend whose arithmetic is not that of SDPBackend.MATH.
    Compiled code keeps the answer that its trace found, as torch's own attention does in compiled code."""
    allowed = torch._C
    return bool(allowed._get_flash_sdp_enabled() or allowed._get_mem_efficient_sdp_enabled()
                or allowed._get_cudnn_sdp_enabled())


_fused_attention_is_allowed._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as for_schema's

observer: Callable[[HostCall, Any, Callable[[], Any]], None] | None = None
"""Told of every call that :func:`attend` served: the call, sage_aot's result, and the host's own attention."""


_is_dynamo_compiling = torch.compiler.is_dynamo_compiling


class _Hosts(threading.local):
    """A thread's mark that it runs a host's own attention, whose calls of scaled_dot_product_attention are torch's."""

    busy = False


_hosts = _Hosts()


def by_host(host: Callable[..., Any], *given: Any) -> Any:
    """The host's own attention. Where torch's function is replaced too, it must not get the call a second time. In
    compiled code it may: a trace cannot follow what belongs to a thread. Adapters hand on what the host is `given` for
    calls that have a route: a closure would make a cell of each argument, of other calls too."""
    if _is_dynamo_compiling():
        return host(*given)
    before, _hosts.busy = _hosts.busy, True
    try:
        return host(*given)
    finally:
        _hosts.busy = before


def is_hosts_own() -> bool:
    """True where a call of torch's attention comes from within :func:`by_host`."""
    return not _is_dynamo_compiling() and _hosts.busy


def serve_anyway(call: HostCall, otherwise: str, return_lse: bool = False, **options: Any) -> Any:
    """The call's output by sage_aot, whatever is faster; with `return_lse` what sage_aot.attn returns then. `options`:
    in addition to those of the process's policy. UnsupportedError where sage_aot does not compute the call;
    `otherwise`: what to do then."""
    call = call._replace(q=_received(call.q), k=_received(call.k), v=_received(call.v))
    no_rows = call.q.dim() == call.k.dim() == 4 and 0 in call.sizes()[3:]
    if no_rows:  # a share of a ring without keys, of which any mask hides as much: zeros and -inf
        call = call._replace(is_causal=False, mask=None, window=None, blocks=None)
    options = {**current().options, **options}
    if reason := why_not_computed(call, no_rows, options):
        raise refused(reason, f"expected a call that sage_aot computes, got: {reason}; {otherwise}")
    result = serve(call, return_lse, options)
    _count_served(call)
    return result


def serve_with_lse(call: HostCall, otherwise: str) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`serve_anyway` with the log-sum-exp, for hosts whose own attention returns none."""
    out, lse = serve_anyway(call, otherwise, return_lse=True)
    return out, lse


def _received(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, where a ring holds torch's AsyncCollectiveTensor, which stands for one that another process
    sends. Known by its method: builds of torch without torch.distributed do not have the class."""
    wait = getattr(tensor, "trigger_wait", None)
    return wait() if wait is not None else tensor


def serve(call: HostCall, return_lse: bool, options: Mapping[str, Any]) -> Any:
    """The output of a call that :func:`why_not_computed` allows, by sage_aot with these options of sage_aot.attn. The
    rows of the output hold all heads where those of q do. A mask of keys is handed on as one, which saves more than one
    of all pairs. Rows that see no key are zeros, whatever the host makes of them."""
    turned = call.layout == "HND" and call.q.stride(1) < call.q.stride(2)  # rows of all heads, as a projection makes q
    if turned:
        call = call._replace(q=call.q.transpose(1, 2), k=call.k.transpose(1, 2), v=call.v.transpose(1, 2), layout="NHD")
    channels = call.v.size(3)
    call = _with_equal_channels(_without_unseen_keys(call))
    key_mask = key_mask_of(call)
    # one query sees all keys; without a mask, heads share reads of k and v
    is_causal = call.is_causal and not holds(call.sizes()[3] == 1)
    result = attn(call.q, call.k, call.v, key_mask=key_mask, attn_mask=call.mask if key_mask is None else None,
                  sinks=None if call.sinks is None else call.sinks.float(), is_causal=is_causal, window=call.window,
                  scale=call.scale, layout=call.layout, **{**_chosen(call), **options, "return_lse": return_lse})
    out, lse = result if return_lse else (result, None)
    if channels != call.q.size(3):
        out = out[..., :channels].contiguous()
    if turned:
        out = out.transpose(1, 2)
    return (out, lse) if return_lse else out


def _chosen(call: HostCall) -> dict[str, Any]:
    """The argument of sage_aot.attn for the blocks of a call; none where it is dense."""
    blocks = blocks_of(call)
    return {} if blocks is None else {"sparse" if isinstance(blocks, Sparse) else "block_mask": blocks}


def _without_unseen_keys(call: HostCall) -> HostCall:
    """The call less the keys that a window hides from all queries, or a causal mask that is aligned top-left; and less
    a window that hides no others."""
    keys = call.sizes()[4]
    first, seen, window = sight_of(call)
    if seen == keys:
        return call if window is call.window else call._replace(window=window)
    rows, mask = 2 if call.layout == "HND" else 1, call.mask
    if mask is not None and mask.dim() > 0 and mask.size(-1) == keys:
        mask = mask.narrow(-1, first, seen)
    return call._replace(k=call.k.narrow(rows, first, seen), v=call.v.narrow(rows, first, seen), mask=mask,
                         window=window)


def _with_equal_channels(call: HostCall) -> HostCall:
    """The call with zeros behind the channels of q and k, or of v, so that all have as many. Zeros change neither
    scores nor the channels that are there."""
    headdim, channels = call.q.size(3), call.v.size(3)
    if headdim == channels:
        return call
    q, k, v = (F.pad(x, (0, max(headdim, channels) - x.size(3))) for x in call[:3])
    return call._replace(q=q, k=k, v=v, scale=headdim ** -0.5 if call.scale is None else call.scale)
