"""The report: calls that sage_aot served, and calls that it did not, by their reason."""

from __future__ import annotations

import itertools
import logging
import threading

import torch

from sage_aot.errors import UnsupportedError
from sage_aot.integrations._policy import learned

SERVED = "sage_aot"
"""The line of the report that counts the calls that sage_aot served."""

SPARSE = "sage_aot, sparse"
"""The line that counts those of them that chose their blocks of keys, or had a choice."""

SLOWER = "torch's attention is expected to be faster"
"""The line of those that the policy leaves to the host by their shape."""

EXACT = "torch.nn.attention.sdpa_kernel without a fused backend"
"""The line of those around which the caller asks torch for its exact attention, SDPBackend.MATH."""

_log = logging.getLogger("sage_aot.integrations")


class Tally:
    """A counter of one line. Threads add without a lock: a step of itertools.count is atomic. A lock would take as long
    as all else that the policy does with a small call."""

    def __init__(self) -> None:
        self.add = itertools.count().__next__
        self._reads = 0

    def read(self) -> int:
        """The calls so far. To be called under `lock`."""
        self._reads += 1
        return self.add() - self._reads + 1


lock = threading.Lock()
"""Held while a tally begins, is read or is forgotten, and while a route is kept, which counts in a tally."""

_tallies: dict[str, Tally] = {}


def report() -> dict[str, int]:
    """Count the calls that sage_aot served, under ``"sage_aot"``, and by its reason those that it did not, since the
    start of the process or :func:`reset_report`. ``"sage_aot, sparse"`` counts those of the served ones that were
    sparse. Calls of compiled code are not counted: it runs no Python."""
    with lock:
        counts = {line: tally.read() for line, tally in _tallies.items()}
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


def reset_report() -> None:
    """Count from zero again; each reason is logged once more."""
    with lock:
        _tallies.clear()
        learned.clear()  # routes count in the tallies of before


def count(line: str) -> None:
    """Count a call in the report; log a reason the first time."""
    if not torch.compiler.is_compiling():
        tally_of(line).add()


def refused(reason: str, message: str) -> UnsupportedError:
    """An error, whose reason is counted: hosts such as ComfyUI catch it, and compute the call themselves."""
    count(reason)
    return UnsupportedError(message)


def tally_of(line: str) -> Tally:
    """The tally of a line, which may begin with this call."""
    return _tallies.get(line) or _begin(line)


def is_counted(tally: Tally | None) -> bool:
    """True for a tally that the report still reads, or none. To be called under `lock`."""
    return tally is None or tally in _tallies.values()


def _begin(line: str) -> Tally:
    with lock:
        if line not in _tallies:
            if line not in (SERVED, SPARSE):
                _log.info("not served by sage_aot: %s", line)
            _tallies[line] = Tally()
        return _tallies[line]
