"""The policy of a process: which calls its hosts hand to sage_aot, and what becomes of the others."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sage_aot._problem.options import OPTIONS, Options
from sage_aot.errors import ArgumentError

if TYPE_CHECKING:
    from sage_aot.integrations._routes import Route


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
    """Calls that hosts hand to sage_aot, and the fate of other calls. Hashable; equal policies have equal hashes.

    Args:
        when: ``"faster"``: the calls that are expected to be at least as fast as torch's attention, on CUDA tensors.
            ``"possible"``: every call that sage_aot computes, CPU tensors by the emulation too.
        otherwise: what becomes of a call that `when` would hand to sage_aot, and that sage_aot does not compute (a mask
            of numbers, dropout, training). ``"host"``: the host's own attention. ``"raise"``: UnsupportedError.
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
        free = OPTIONS.keys() - {"is_causal", "window", "scale", "layout"}  # a host's call decides about these
        if unknown := self.options.keys() - free:
            raise ArgumentError(f"options: expected some of {', '.join(sorted(free))}, got "
                                f"{', '.join(sorted(map(str, unknown)))}")
        checked = Options(**self.options)  # ArgumentError for a value that is none
        # Python's scalars, which have hashes, and a mapping that nothing that the caller does to its own changes
        object.__setattr__(self, "options", _Frozen((name, getattr(checked, name)) for name in self.options))


_policy = Policy()
_lock = threading.Lock()

learned: dict[tuple[Any, ...], Route | None] = {}
"""Routes of policies of faster calls, by kind of call; _routes.py learns them."""

routes = learned
"""Routes of the policy of this process; none where that serves all possible calls."""


class _Entry:
    """A policy that holds, until it is left, while no later one does; with its routes."""

    def __init__(self, policy: Policy) -> None:
        self.held = policy, learned if policy.when == "faster" else {}


_entered = [_Entry(_policy)]
"""Entries in the order of entering: the policy of a process, then those of :func:`use`."""


@contextmanager
def use(policy: Policy) -> Iterator[Policy]:
    """Make this the policy of all threads of this process while the context is entered. Contexts may be left in any
    order: of those that are not left yet the last one entered holds, and behind all of them the policy of before.
    Compiled code keeps a guard on it: another policy compiles anew.

    Raises:
        ArgumentError: `policy` is none.
    """
    global _policy, routes
    if not isinstance(policy, Policy):
        raise ArgumentError(f"policy: expected a Policy, got {policy!r}; write Policy(when={policy!r})")
    entry = _Entry(policy)
    with _lock:
        _entered.append(entry)
        _policy, routes = entry.held
    try:
        yield policy
    finally:
        with _lock:
            _entered.remove(entry)
            _policy, routes = _entered[-1].held


def current() -> Policy:
    """The policy of this process."""
    return _policy
