"""The call that shows a planted bug, and the check that fails there first.

    PYTHONPATH=.:tests/gpu python tests/sim/catching.py    # looks for all of them, and writes shown.json

A bug's calls are made case by case, in the order of variants_on_cpu.cases_of, until one fails. shown.json names that
case where it is not the first; it is tried before the others. Where it no longer shows the bug, all are made in their
order.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import simbuild
from bugs import IN_TURN, SWITCHED
from drawn import BACKWARD_ALONE, drawn, variants_of
from filelock import FileLock
from mutations import Mutation
from outcomes import Outcomes
from schemata import Bug, plant, plant_switched
from simbuild import PROJECT, Build, Project
from simulated import Simulated
from stamp import sources_key
from variants_on_cpu import SEEDS, cases_of, first_failure, in_orders, seeds_of, variant
from workers import Workers

SHOWN = Path(__file__).parent / "shown.json"


class Shown(NamedTuple):
    """The call that shows a bug."""

    variant: str  # an attention kernel, less "sage_attn_"
    case: str  # the name of one of its cases
    check: str  # the check that fails first


def caught_by(base: Build, outcomes: Outcomes, mutation: Mutation) -> Shown | None:
    """The call that shows a named bug, of those that every kernel must pass. `base`: kernels without it."""
    return _of_named(base, outcomes, mutation).shown(_shown_before().get(mutation.name), mutation.caught)


def caught_by_any(base: Build, outcomes: Outcomes, bug: Bug) -> Shown | None:
    """The call that shows a drawn bug, with the threads in one order alone."""
    return _of_drawn(base, outcomes, bug).shown(_shown_before().get(str(bug)))


def failure_without_bugs(base: Build, outcomes: Outcomes, name: str) -> tuple[str, str] | None:
    """Failure of a variant's kernels that were compiled with switches, all of them off: in every case, or a failure of
    its own would pass for a bug that was caught."""
    subject, spec = _switched(base, name), variant(name)
    failures = (first_failure(subject, outcomes, spec, [(case, SEEDS[0])]) for case in cases_of(spec).values())
    return next(filter(None, failures), None)


@dataclass(frozen=True)
class Search:
    """The search for a call that shows a bug."""

    base: Build
    outcomes: Outcomes
    bug: Bug
    variants: tuple[str, ...]
    seeds: tuple[int, ...]  # of the order of threads

    def shown(self, before: tuple[str, str] | None, check: str | None = None) -> Shown | None:
        """The call that showed the bug before (a variant and a case), where it fails again by `check`, or by any check
        where that is None; else the first call that shows it."""
        again = self._made(*before) if before and before in self.calls() else None
        return again if again and check in (None, again.check) else self.first()

    def first(self) -> Shown | None:
        """The first call of all that shows the bug."""
        return next(filter(None, (self._made(*call) for call in self.calls())), None)

    def calls(self) -> list[tuple[str, str]]:
        """Variants and cases that may show the bug. A bug of the backward pass shows in trained calls alone; others
        show without a backward pass."""
        of_backward = self.bug.header.startswith("bwd/") or self.bug.place in BACKWARD_ALONE
        return [(name, case) for name in self.variants for case, call in cases_of(variant(name)).items()
                if call.trained == of_backward]

    def _made(self, name: str, case: str) -> Shown | None:
        spec = variant(name)
        calls = [*in_orders(cases_of(spec)[case], self.seeds)]
        failure = first_failure(self._kernels(name), self.outcomes, spec, calls, self._number(name))
        return Shown(name, case, failure[0]) if failure else None

    def _kernels(self, name: str) -> Simulated:
        if self.bug.can_be_switched:
            return _switched(self.base, name)
        folder = PROJECT.build / "planted" / hashlib.sha256(repr(self.bug).encode()).hexdigest()[:16]
        return _planted(self.base, name, folder, lambda: plant(self.bug, folder))

    def _number(self, name: str) -> int:
        return SWITCHED[name].index(self.bug) + 1 if self.bug.can_be_switched else 0


def _of_named(base: Build, outcomes: Outcomes, mutation: Mutation) -> Search:
    return Search(base, outcomes, mutation.bug, (mutation.variant,), seeds_of(variant(mutation.variant)))


def _of_drawn(base: Build, outcomes: Outcomes, bug: Bug) -> Search:
    return Search(base, outcomes, bug, variants_of(bug), SEEDS[:1])


@cache
def _switched(base: Build, name: str) -> Simulated:
    folder = PROJECT.build / "switched" / name
    return _planted(base, name, folder, lambda: plant_switched(SWITCHED[name], folder))


def _planted(base: Build, name: str, folder: Path, plant_in_it: Callable[[], Project]) -> Simulated:
    """Plant by one process at a time: a second copy would change the headers that the first process compiles."""
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "one_process"):
        return Simulated(simbuild.build_matrix([variant(name)], plant_in_it(), base))


# --- shown.json -------------------------------------------------------------------------------------------------------


@cache
def _shown_before() -> dict[str, tuple[str, str]]:
    """Variants and cases by a bug's name."""
    return {name: tuple(call) for name, call in json.loads(SHOWN.read_text()).items()}


def _searched(base: Build, outcomes: Outcomes, subject: Mutation | Bug) -> tuple[Shown | None, bool]:
    """The first call that shows a bug, and whether it is the first of all."""
    of = _of_named if isinstance(subject, Mutation) else _of_drawn
    search = of(base, outcomes, subject)
    shown = search.first()
    return shown, bool(shown) and shown[:2] == search.calls()[0]


def main() -> None:
    """Write shown.json."""
    subjects = {**{mutation.name: mutation for mutation in IN_TURN}, **{str(bug): bug for bug in drawn()}}
    workers = Workers(sorted({variant(name) for name in SWITCHED}, key=lambda spec: spec.name), Outcomes(sources_key()))
    futures = {name: workers.submit(_searched, subject=subject) for name, subject in subjects.items()}
    calls = {}
    for name, future in futures.items():
        shown, is_first = future.result().result
        print(f"{name}: {shown}", flush=True)
        if shown and not is_first:
            calls[name] = shown[:2]
    workers.close()
    lines = (f"  {json.dumps(name)}: {json.dumps(calls[name])}" for name in sorted(calls))
    SHOWN.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
