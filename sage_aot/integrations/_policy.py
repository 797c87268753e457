"""Which attention calls of a host sage_aot serves, and what becomes of the others.

An adapter describes a call of its host as a :class:`Call`, and hands it to :func:`attend` with a function that makes
the host's own call. Decisions follow from shapes, dtypes and options, never from the values of a tensor: they
synchronize nothing, and tracers follow them.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from sage_aot._call.api import attn
from sage_aot._call.refusal import is_plain
from sage_aot._kernels.axes import MAX_HEADDIM
from sage_aot._problem.derivatives import is_transformed
from sage_aot._problem.options import OPTIONS, Options, scalar_of
from sage_aot._tools.explain import explain
from sage_aot.errors import ArgumentError, UnsupportedError
from sage_aot.integrations._calibration import chosen, threshold_of
from sage_aot.integrations._gain import Work, is_faster, kernel_headdim, kind_of, prefers_flash

SERVED = "sage_aot"
"""The line of the report that counts the calls that sage_aot served."""

SLOWER = "torch's attention is expected to be faster"
"""The line of those that the policy leaves to the host by their shape."""

EXACT = "torch.nn.attention.sdpa_kernel without a fused backend"
"""The line of those around which the caller asks torch for its exact attention, SDPBackend.MATH."""

DTYPES = torch.float16, torch.bfloat16, torch.float32

_log = logging.getLogger("sage_aot.integrations")


# --- the policy -------------------------------------------------------------------------------------------------------


class _Frozen(dict[str, Any]):
    """Options of a policy: a mapping that keeps its items, hashable by them."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (dict(self),)

    def _refuse(self, *args: Any, **items: Any) -> Any:
        raise TypeError("the options of a Policy stay as they are; make another with dataclasses.replace")

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse


@dataclass(frozen=True)
class Policy:
    """What hosts hand to sage_aot, and what becomes of other calls. Hashable; equal policies have equal hashes.

    Args:
        when: ``"faster"``: the calls that are expected to be at least as fast as torch's attention, on CUDA tensors.
            ``"possible"``: every call that sage_aot computes, CPU tensors by the emulation too.
        otherwise: what becomes of a call that `when` would hand to sage_aot, and that sage_aot does not compute (a mask
            of other shape, dropout, training). ``"host"``: the host's own attention. ``"raise"``: UnsupportedError.
        options: options of :func:`sage_aot.attn` that decide about accuracy and speed, such as ``{"smooth_v": True}``.

    Raises:
        ArgumentError: a value is not one of these.
    """

    when: str = "faster"
    otherwise: str = "host"
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.options, Mapping):
            raise ArgumentError(f"options: expected a mapping, got {type(self.options).__name__}")
        for name, choices in (("when", ("faster", "possible")), ("otherwise", ("host", "raise"))):
            if (value := getattr(self, name)) not in choices:
                raise ArgumentError(f"{name}: expected one of {choices}, got {value!r}")
        free = OPTIONS.keys() - {"is_causal", "scale", "layout"}  # a host's call decides about these
        if unknown := self.options.keys() - free:
            raise ArgumentError(f"options: expected some of {', '.join(sorted(free))}, got "
                                f"{', '.join(sorted(unknown))}")
        checked = Options(**self.options)  # ArgumentError for a value that is none
        # Python's scalars, which have hashes, and a mapping that nothing that the caller does to its own changes
        object.__setattr__(self, "options", _Frozen((name, getattr(checked, name)) for name in self.options))


_policy = Policy()
_lock = threading.Lock()

routes: dict[tuple[Any, ...], Route | None] = {}
"""Those of the policy of this process by kind of call: the shapes of q and k, whether it has a mask and may be causal,
and k's dimension of keys. A policy of all possible calls has none."""

_routes_of: dict[str, dict[tuple[Any, ...], Route | None]] = {"faster": routes, "possible": {}}


@contextmanager
def use(policy: Policy) -> Iterator[Policy]:
    """The policy of all threads of this process while the context is entered; afterwards that of before. Compiled code
    keeps a guard on it: another policy compiles anew.

    Raises:
        ArgumentError: `policy` is none.
    """
    global _policy, routes
    if not isinstance(policy, Policy):
        raise ArgumentError(f"policy: expected a Policy, got {policy!r}; write Policy(when={policy!r})")
    before = _policy
    with _lock:
        _policy, routes = policy, _routes_of[policy.when]
    try:
        yield policy
    finally:
        with _lock:
            _policy, routes = before, _routes_of[before.when]


def current() -> Policy:
    """The policy of this process."""
    return _policy


# --- the report -------------------------------------------------------------------------------------------------------


class _Tally:
    """How often a line of the report was counted. Threads add without a lock: a step of itertools.count is atomic. A
    lock would take as long as all else that the policy does with a small call."""

    def __init__(self) -> None:
        self.add = itertools.count().__next__
        self._reads = 0

    def read(self) -> int:
        """To be called under _lock."""
        self._reads += 1
        return self.add() - self._reads + 1


_tallies: dict[str, _Tally] = {}


def report() -> dict[str, int]:
    """How many calls sage_aot served, under ``"sage_aot"``, and by its reason how many it did not, since the start of
    the process or :func:`reset_report`. Calls of compiled code are not counted: it runs no Python."""
    with _lock:
        counts = {line: tally.read() for line, tally in _tallies.items()}
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


def reset_report() -> None:
    """Count from zero again; each reason is logged once more."""
    with _lock:
        _tallies.clear()
        for known in _routes_of.values():  # they count in the tallies of before
            known.clear()


def count(line: str) -> None:
    """Count a call in the report; log a reason the first time."""
    if torch.compiler.is_compiling():
        return
    (_tallies.get(line) or _new_tally(line)).add()


def _new_tally(line: str) -> _Tally:
    with _lock:
        if line not in _tallies:
            if line != SERVED:
                _log.info("not served by sage_aot: %s", line)
            _tallies[line] = _Tally()
        return _tallies[line]


# --- calls ------------------------------------------------------------------------------------------------------------


class Call(NamedTuple):
    """An attention call of a host."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None = None
    """What broadcasts to [batch, heads, queries, keys]: bool, True = attend, or numbers to add to the scores."""
    is_causal: bool = False
    scale: float | None = None
    dropout: float = 0.0
    layout: str = "HND"  # of q, k, v and the output, as sage_aot.attn has it
    grouped: bool = False  # whether k and v may have fewer heads than q
    bottom_right: bool = False  # where the causal mask is aligned; else top-left
    beyond: str | None = None
    """What else the host asks for, and sage_aot does not compute."""

    def sizes(self) -> tuple[int, int, int, int, int]:
        """Batch, q heads, kv heads, queries, keys."""
        heads, rows = (1, 2) if self.layout == "HND" else (2, 1)
        return self.q.size(0), self.q.size(heads), self.k.size(heads), self.q.size(rows), self.k.size(rows)


HOST, FLASH, FLASH_GROUPED = range(3)
"""How the host computes a call: as it does; by torch's FlashAttention-2; by that where k and v have fewer heads than q,
which the call must allow."""


class Route(NamedTuple):
    """What becomes of a call that is the host's by its shape, whatever else it asks for."""

    counted: Callable[[], Any]  # to be called for each call
    by: int


_MOST_ROUTES = 4096


def route(q: torch.Tensor, k: torch.Tensor, has_mask: bool, is_causal: bool, rows: int = -2) -> Route | None:
    """The route of a call, remembered; None where more than its shape decides. Adapters ask before they make a
    :class:`Call`, which takes longer than a small call of SDPA allows.

    Args:
        is_causal: the call may have a causal mask.
        rows: k's dimension of keys, -2 or 1.
    """
    if torch.compiler.is_dynamo_compiling():
        return None
    try:
        kind = q.shape, k.shape, has_mask, is_causal, rows
        return routes[kind] if kind in routes else _learn(q, k, kind)
    except (RuntimeError, TypeError):  # a nested tensor has no shape, lengths that are symbols have no hash
        return None


def _learn(q: torch.Tensor, k: torch.Tensor, kind: tuple[Any, ...]) -> Route | None:
    if _policy.when != "faster" or not q.is_cuda or not type(q) is type(k) is torch.Tensor:
        return None
    device = q.get_device()
    agreed = all(chosen(other).thresholds == chosen(device).thresholds for other in range(torch.cuda.device_count()))
    by = _way(device, *kind) if agreed else None  # `kind` has no device: to ask a tensor for it takes too long
    tally = None if by is None else _tallies.get(SLOWER) or _new_tally(SLOWER)
    made = None if by is None or tally is None else Route(tally.add, by)
    with _lock:
        if len(routes) >= _MOST_ROUTES:
            routes.clear()
        if _policy.when == "faster" and tally in (None, _tallies.get(SLOWER)):  # neither has changed meanwhile
            routes[kind] = made
    return made


def _way(device: int, q: torch.Size, k: torch.Size, has_mask: bool, is_causal: bool, rows: int) -> int | None:
    if len(q) != 4 or len(k) != 4 or 0 in q or 0 in k:
        return None
    heads, keys = (1, 2) if rows == -2 else (2, 1)
    sizes = q[0], q[heads], k[heads], q[keys], k[keys], q[3]
    for masked in (False, True) if is_causal else (False,):
        threshold = threshold_of(device, kind_of(masked, has_mask), kernel_headdim(q[3]))
        if is_faster(threshold, Work.of(*sizes, masked)):
            return None
    fits = q[0] == k[0] and q[3] == k[3] and q[heads] % k[heads] == 0 and q[3] % 8 == 0  # torch pads other head dims
    if rows != -2 or has_mask or is_causal or not fits or not prefers_flash(
            chosen(device).thresholds, q[0], q[heads], q[keys], k[keys], q[3]):
        return HOST
    return FLASH if q[heads] == k[heads] else FLASH_GROUPED


def is_small(q: torch.Tensor, k: torch.Tensor, has_mask: bool, is_causal: bool, rows: int = -2) -> bool:
    """Whether the policy leaves a call to the host by its :func:`route`; counts it if so."""
    known = route(q, k, has_mask, is_causal, rows)
    if known is None:
        return False
    known.counted()
    return True


def attend(call: Call, host: Callable[[], Any], return_lse: bool = False, policy: Policy | None = None,
           form: Callable[[Any], Any] | None = None) -> Any:
    """The call's output, by sage_aot or by the host's own attention.

    Args:
        host: makes the host's own call.
        return_lse: sage_aot's result is a pair of the output and the log-sum-exp.
        policy: None means that of the process.
        form: makes of sage_aot's result one like the host's.

    Raises UnsupportedError where the policy says so, and what :func:`sage_aot.attn` raises.
    """
    policy = _policy if policy is None else policy
    if not _fused_attention_is_allowed():
        count(EXACT)
        return by_host(host)
    if policy.when == "faster" and (reason := better_elsewhere(call)):
        count(reason)
        return by_host(host)
    if reason := refusal(call):
        count(reason)
        if policy.otherwise == "raise":
            raise UnsupportedError(f"expected a call that sage_aot computes, got: {reason}; let the host compute it "
                                   f"with sage_aot.integrations.Policy(otherwise='host')")
        return by_host(host)
    result = serve(call, return_lse, policy.options)
    count(SERVED)
    if observer is not None and not torch.compiler.is_compiling():
        observer(call, result, lambda: by_host(host))
    return result if form is None else form(result)


def _fused_attention_is_allowed() -> bool:
    """Whether ``torch.nn.attention.sdpa_kernel`` allows some backend whose arithmetic is not that of SDPBackend.MATH.
    Compiled code keeps the answer that its trace found, as torch's own attention does in compiled code."""
    allowed = torch._C
    return bool(allowed._get_flash_sdp_enabled() or allowed._get_mem_efficient_sdp_enabled()
                or allowed._get_cudnn_sdp_enabled())


_fused_attention_is_allowed._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as for_schema's

observer: Callable[[Call, Any, Callable[[], Any]], None] | None = None
"""What is told of every call that :func:`attend` served: the call, sage_aot's result, and the host's own attention."""


class _Hosts(threading.local):
    """Whether this thread runs a host's own attention, whose calls of scaled_dot_product_attention are torch's."""

    busy = False


_hosts = _Hosts()


def by_host(host: Callable[[], Any]) -> Any:
    """The host's own attention. Where torch's function is replaced too, it must not get the call a second time. In
    compiled code it may: a trace cannot follow what belongs to a thread."""
    if torch.compiler.is_compiling():
        return host()
    before, _hosts.busy = _hosts.busy, True
    try:
        return host()
    finally:
        _hosts.busy = before


def is_hosts_own() -> bool:
    """Whether a call of torch's attention comes from within :func:`by_host`."""
    return not torch.compiler.is_compiling() and _hosts.busy


def serve_anyway(call: Call, otherwise: str, return_lse: bool = False, **options: Any) -> Any:
    """The call's output by sage_aot, whatever is faster; with `return_lse` what sage_aot.attn returns then. `options`:
    beside those of the process's policy. UnsupportedError where sage_aot does not compute the call; `otherwise`: what
    to do then."""
    call = call._replace(q=_received(call.q), k=_received(call.k), v=_received(call.v))
    no_rows = call.q.dim() == call.k.dim() == 4 and 0 in call.sizes()[3:]
    if no_rows:  # a share of a ring without keys, of which any mask hides as much: zeros and -inf
        call = call._replace(is_causal=False, mask=None)
    if reason := refusal(call, no_rows):
        raise refused(reason, f"expected a call that sage_aot computes, got: {reason}; {otherwise}")
    result = serve(call, return_lse, {**_policy.options, **options})
    count(SERVED)
    return result


def refused(reason: str, message: str) -> UnsupportedError:
    """An error, whose reason is counted: hosts such as ComfyUI catch it, and compute the call themselves."""
    count(reason)
    return UnsupportedError(message)


def serve_with_lse(call: Call, otherwise: str) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`serve_anyway` with the log-sum-exp, for hosts whose own attention returns none."""
    out, lse = serve_anyway(call, otherwise, return_lse=True)
    return out, lse


def _received(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, where a ring holds torch's AsyncCollectiveTensor, which stands for one that another process
    sends. Known by its method: builds of torch without torch.distributed do not have the class."""
    wait = getattr(tensor, "trigger_wait", None)
    return wait() if wait is not None else tensor


def better_elsewhere(call: Call) -> str | None:
    """Why a policy of faster calls leaves one to the host, whether or not sage_aot computes it; None where it does not.
    """
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


def refusal(call: Call, no_rows: bool = False) -> str | None:
    """Why sage_aot does not compute a call; None where it does. `no_rows`: it may have no queries or keys."""
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
    return _refusal_of_types(call) or _refusal_of_shapes(call, no_rows) or _refusal_of_masks(call)


def _takes_scale(scale: object) -> bool:
    """A tensor on a GPU is the host's: to read it would synchronize."""
    valid, is_here = OPTIONS["scale"].valid, not isinstance(scale, torch.Tensor) or scale.is_cpu
    return valid(scale) or is_here and valid(scalar_of(scale))


def _refusal_of_types(call: Call) -> str | None:
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


def _refusal_of_shapes(call: Call, no_rows: bool) -> str | None:
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


def _refusal_of_masks(call: Call) -> str | None:
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


def serve(call: Call, return_lse: bool, options: Mapping[str, Any]) -> Any:
    """The call by sage_aot, which :func:`refusal` has allowed, with these options of sage_aot.attn. The rows of the
    output hold all heads where those of q do."""
    turned = call.layout == "HND" and call.q.stride(1) < call.q.stride(2)  # rows of all heads, as a projection makes q
    if turned:
        call = call._replace(q=call.q.transpose(1, 2), k=call.k.transpose(1, 2), v=call.v.transpose(1, 2), layout="NHD")
    q, k, v = call.q, call.k, call.v
    batch, heads, _, queries, keys = call.sizes()
    is_causal = call.is_causal
    if is_causal and queries != keys and not call.bottom_right:  # no query sees the keys behind the last query's
        rows = 2 if call.layout == "HND" else 1
        k, v = k.narrow(rows, 0, queries), v.narrow(rows, 0, queries)
    key_mask = None if call.mask is None else key_mask_of(call.mask, batch, heads, queries, keys)
    scale, channels = call.scale, v.size(3)
    if channels != q.size(3):  # zeros change neither scores nor the channels that are there
        width = max(channels, q.size(3))
        scale = q.size(3) ** -0.5 if scale is None else scale
        q, k, v = (F.pad(x, (0, width - x.size(3))) for x in (q, k, v))
    if queries == 1:  # it sees all keys; without a mask, heads share the reads of k and v
        is_causal = False
    result = attn(q, k, v, key_mask=key_mask, is_causal=is_causal, scale=scale, layout=call.layout,
                  **{**options, "return_lse": return_lse})
    out, lse = result if return_lse else (result, None)
    if channels != q.size(3):
        out = out[..., :channels].contiguous()
    if turned:
        out = out.transpose(1, 2)
    return (out, lse) if return_lse else out


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
