"""Calls of which only those launches are simulated again whose kernels changed.

A call is Python, and what its launches write. Python whose sources are the same hands the same bytes to the same
kernels as the last time, and judges them alike, as long as its launches have written the same bytes so far. So a call
is made again up to the last launch of a kernel that changed. If each launch wrote what it wrote the last time, all that
follows is as it was, the verdict too. The first launch that wrote something else makes the call an ordinary one, which
is simulated and judged to its end.

What a launch writes follows from its kernel and from what the launches before it in its call wrote. Calls with
different planted bugs share it as far as their kernels hold none of those.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from launches import WRITABLE, WRITTEN, Buffer


class AsBefore(BaseException):
    """Ends a call whose launches wrote what they wrote the last time. No Exception: nothing that the call goes through
    may take it for a fault."""


class Step(NamedTuple):
    """A launch of a call."""

    kernel: str
    code: str  # digest of the kernel's library, and the planted bug that is switched on in it
    wrote: str  # digest of what it left in memory; "" where it did not come to its end


@dataclass
class Course:
    """The launches of a call in turn."""

    code_of: Callable[[str], str]  # by kernel
    before: Sequence[Step] = ()  # those of the last time
    repeated: int | None = None
    """Launches to make again, where the verdict of the last time holds if they write what they wrote then."""
    steps: list[Step] = field(default_factory=list)

    def begin(self, kernel: str) -> None:
        """Note a launch that is about to run."""
        self.steps.append(Step(kernel, self.code_of(kernel), ""))

    def end(self, buffers: Iterable[Buffer]) -> None:
        """Note what it wrote; AsBefore where that decides that the rest is known."""
        self.steps[-1] = self.steps[-1]._replace(wrote=_digest(buffers))
        if len(self.steps) == self.repeated and self.is_as_before:
            raise AsBefore

    @property
    def is_as_before(self) -> bool:
        """True where the launches that had to be made again wrote what they wrote the last time."""
        again = self.before[:self.repeated]
        return self.repeated is not None and [*map(_outcome, self.steps)] == [*map(_outcome, again)]

    def whole(self) -> list[Step]:
        """All launches of the call, by the kernels of today."""
        if self.is_as_before:
            return [step._replace(code=self.code_of(step.kernel)) for step in self.before]
        return self.steps


def _outcome(step: Step) -> tuple[str, str]:
    return step.kernel, step.wrote


def _digest(buffers: Iterable[Buffer]) -> str:
    """A digest of all memory that a launch may write."""
    digest = hashlib.sha256()
    for buffer in buffers:
        if (buffer.state & WRITABLE).any():
            digest.update(f"{buffer.name} {buffer.state.size}\n".encode())
            digest.update(buffer.state.tobytes())
            digest.update(np.where(buffer.state & WRITTEN, buffer.memory(), 0).tobytes())
    return digest.hexdigest()


@dataclass
class Writings:
    """Digests of what launches of this process wrote, by all that it follows from."""

    known: dict[str, str] = field(default_factory=dict)

    def learn(self, call: str, steps: Sequence[Step]) -> None:
        """Note the launches of a call. `call`: its key, without a planted bug."""
        for i, step in enumerate(steps):
            if step.wrote:
                self.known[_key(call, steps, i, step.code)] = step.wrote

    def to_repeat(self, call: str, steps: Sequence[Step], code_of: Callable[[str], str]) -> int:
        """The number of launches to make again: up to the last one of which nobody knows what its kernel writes now."""
        unknown = [i for i, step in enumerate(steps) if (code := code_of(step.kernel)) != step.code
                   and not (step.wrote and self.known.get(_key(call, steps, i, code)) == step.wrote)]
        return unknown[-1] + 1 if unknown else 0


def _key(call: str, steps: Sequence[Step], index: int, code: str) -> str:
    decides = call, *(step.wrote for step in steps[:index]), steps[index].kernel, code
    return hashlib.sha256("\n".join(decides).encode()).hexdigest()
