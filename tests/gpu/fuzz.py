"""Random calls of everything public, against float64 and the emulation: a differential fuzzer.

    python tests/gpu/fuzz.py --calls 50000 --workers 8 --log fuzz.log            # kernels of a GPU
    python tests/gpu/fuzz.py --calls 5000 --device cpu --longest 200 --log fuzz.log  # the emulation
    python tests/gpu/fuzz.py --calls 20000 --kernels sage_aot/kernels build/retarget_sm_90 --workers 8
    python tests/gpu/fuzz.py --calls 2000 --fixed '{"entry": "train_attn"}'
    python tests/gpu/fuzz.py --case '{"arch": "sm89", "seed": 1, "seqlen_kv": 65}'

attn, attn_varlen, quantize_kv, select_blocks, train_attn and the integrations' sdpa are called; supports is asked
with each call. Call number i of a seed is the same however many workers share the run; runs of other seeds (`--seed`)
make other calls. fuzz_cases.py says what is drawn, fuzz_oracle.py what the caller is promised, fuzz_checks.py how both
are compared, and fuzz_kernels.py what kernels must have in common with their emulation. A call that fails is reduced to
a simplest one that fails the same check, and printed with the command that makes it again; the exit code is then 1.
SAGE_AOT_KERNELS names another folder than the package's. `--device cpu` makes the calls on CPU tensors, against float64
alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
import os
import queue
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from fuzz_cases import WEIGHTS, Case, complete, draw_call, fields_of_json, shrink
from fuzz_checks import Subject, Verdict

import sage_aot
from sage_aot._call.backends import default_library

ROOT = Path(__file__).parents[2]

REPORT_SECONDS = 5.0
"""Seconds between two lines of progress."""

MOST_SHRUNK = 3
"""Failures that a worker reduces; the others are printed as they were drawn."""


@dataclass
class Tally:
    """Record of a run, or of a part of one."""

    calls: int = 0
    variants: Counter[str] = field(default_factory=Counter)
    values: Counter[tuple[str, str]] = field(default_factory=Counter)  # of options
    worst: dict[str, tuple[float, str]] = field(default_factory=dict)  # per check, and the case
    failures: list[str] = field(default_factory=list)

    def add(self, case: Case, verdict: Verdict) -> None:
        self.calls += 1
        self.variants[verdict.variant] += 1
        self.values.update((name, repr(getattr(case, name))) for name in WEIGHTS)
        for check, excess in verdict.worst.items():
            self._keep_worst(check, (excess, case.to_json()))

    def merge(self, other: Tally) -> None:
        self.calls += other.calls
        self.variants.update(other.variants)
        self.values.update(other.values)
        self.failures += other.failures
        for check, found in other.worst.items():
            self._keep_worst(check, found)

    def _keep_worst(self, check: str, found: tuple[float, str]) -> None:
        if check not in self.worst or not found[0] <= self.worst[check][0]:
            self.worst[check] = found

    def lines(self) -> Iterator[str]:
        """The summary."""
        yield "calls per variant:"
        yield from (f"  {count:7} {name}" for name, count in sorted(self.variants.items()))
        yield "calls per value of an option:"
        for name in WEIGHTS:
            found = {value: count for (option, value), count in sorted(self.values.items()) if option == name}
            yield f"  {name}: " + ", ".join(f"{value} {count}" for value, count in found.items())
        yield "worst, in units of the bound:"
        for check, (excess, case) in sorted(self.worst.items()):
            yield f"  {excess:9.3g} {check}" + (f": {case}" if excess else "")


# --- one worker -------------------------------------------------------------------------------------------------------


def fuzz(subject: Subject, args: argparse.Namespace, indices: Iterable[int]) -> Iterator[Tally]:
    """Make these calls; a tally now and then, of what came since the one before."""
    tally, began, shrunk = Tally(), time.monotonic(), 0
    for index in indices:
        case = draw_call(args.seed, index, subject.built, args.longest)
        case = complete(dataclasses.replace(case, **args.fixed)) if args.fixed else case
        verdict = subject.examine(case)
        tally.add(case, verdict)
        if verdict.failure:
            print(f"failed {verdict.failure[0]}, before it is reduced: {case.to_json()}", file=sys.stderr, flush=True)
            tally.failures.append(report(subject, case, verdict, reduce=shrunk < MOST_SHRUNK))
            shrunk += 1
            if not subject.is_alive():  # after an illegal access every later call fails, whatever it is
                yield tally
                raise SystemExit("the device is lost to this process")
        if time.monotonic() - began > REPORT_SECONDS / 2:
            yield tally
            tally, began = Tally(), time.monotonic()
    yield tally


def report(subject: Subject, case: Case, verdict: Verdict, *, reduce: bool) -> str:
    """A failure with what differed and how to make it again; reduced where asked for and the device still works."""
    drawn, check = case, verdict.failure[0]

    def fails(candidate: Case) -> bool:
        failure = subject.examine(candidate).failure
        return failure is not None and failure[0] == check

    if reduce and subject.is_alive():
        if not fails(case):
            return f"FAILED {check} once, then passed: {verdict.failure[1]}\n  case: {case.to_json()}"
        case = shrink(case, fails)
        verdict = subject.examine(case)
    again = f"python tests/gpu/fuzz.py --device {subject.device} --case {shlex.quote(case.to_json())}"
    difference = verdict.failure[1] if verdict.failure else "passes now"
    drawn_as = f"\n  drawn as: {drawn.to_json()}" if case != drawn else ""
    return f"FAILED {check}\n  kernel: {verdict.variant}\n  {difference}\n  again: {again}{drawn_as}"


def _work(args: argparse.Namespace, worker: int, tallies: multiprocessing.Queue) -> None:
    """A process: every `workers`-th call, on the GPU of its number modulo their count."""
    torch.set_num_threads(1)
    if args.device == "cuda":
        torch.cuda.set_device(worker % torch.cuda.device_count())
    subject = Subject(args.device, args.kernels)
    for tally in fuzz(subject, args, range(worker, args.calls, args.workers)):
        tallies.put(tally)


# --- the whole run ----------------------------------------------------------------------------------------------------


def run(args: argparse.Namespace) -> Iterator[Tally]:
    """The tallies of all workers; ends when all have."""
    if args.workers == 1:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # calls are small: several threads wait for each other
        try:
            yield from fuzz(Subject(args.device, args.kernels), args, range(args.calls))
        finally:
            torch.set_num_threads(threads)
        return
    context = multiprocessing.get_context("spawn")
    tallies = context.Queue()
    workers = [context.Process(target=_work, args=(args, worker, tallies)) for worker in range(args.workers)]
    for worker in workers:
        worker.start()
    while True:
        alive = any(worker.is_alive() for worker in workers)  # asked first: what it put before is in the queue
        try:
            yield tallies.get(timeout=0.5)
        except queue.Empty:
            if not alive:
                break
    for number, worker in enumerate(workers):
        if worker.exitcode:
            yield Tally(failures=[f"FAILED worker {number} ended with exit code {worker.exitcode}"])


def summarize(args: argparse.Namespace, say: Callable[[str], None]) -> int:
    """Run all calls; 1 where one failed or was not made."""
    began = said = time.monotonic()
    total = Tally()
    for tally in run(args):
        total.merge(tally)
        for failure in tally.failures:
            say(failure)
        if time.monotonic() - said > REPORT_SECONDS:
            said = time.monotonic()
            say(f"{said - began:6.0f} s  {total.calls} of {args.calls} calls, {len(total.failures)} failures")
    for line in total.lines():
        say(line)
    say(f"{total.calls} of {args.calls} calls in {time.monotonic() - began:.0f} s, {len(total.failures)} failures")
    return 1 if total.failures or total.calls < args.calls else 0


def replay(args: argparse.Namespace, say: Callable[[str], None]) -> int:
    """One call; 1 where it fails."""
    verdict = Subject(args.device, args.kernels).examine(args.case)
    say(f"{verdict.variant}: {args.case.to_json()}")
    for check, excess in verdict.worst.items():
        say(f"  {excess:9.3g} of the bound: {check}")
    say("FAILED {}\n  {}".format(*verdict.failure) if verdict.failure else "passed")
    return 1 if verdict.failure else 0


def main(argv: list[str] | None = None) -> int:
    args = _arguments(argv)
    with open(args.log or os.devnull, "w") as log:
        def say(line: str) -> None:
            for file in (sys.stdout, log):
                print(line, file=file, flush=True)

        device = "CPU" if args.device == "cpu" else torch.cuda.get_device_name()
        say(f"sage_aot {sage_aot.__version__}, torch {torch.__version__}, {device}, seed {args.seed}, lengths up to "
            f"{args.longest}, {args.workers} workers")
        return replay(args, say) if args.case else summarize(args, say)


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=1000, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the run (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=1, help="processes (default: %(default)s)")
    parser.add_argument("--longest", type=int, default=4500, help="queries or keys of a call (default: %(default)s)")
    parser.add_argument("--kernels", type=Path, nargs="+", default=[], metavar="FOLDER",
                        help="built kernels; an arch is taken from the first folder that has it for this GPU (default: "
                        "those of the package and build/retarget_*)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="(default: %(default)s)")
    parser.add_argument("--fixed", type=fields_of_json, default={}, metavar="JSON",
                        help="""fields that every case has, such as '{"arch": "sm89", "kind": "normal"}'""")
    parser.add_argument("--case", type=Case.from_json, metavar="JSON", help="make this one call")
    parser.add_argument("--log", type=Path, help="file for what is printed")
    args = parser.parse_args(argv)
    if not args.kernels:
        args.kernels = [default_library().folder]
        args.kernels += [] if args.device == "cpu" else sorted((ROOT / "build").glob("retarget_*"))
    return args


if __name__ == "__main__":
    sys.exit(main())
