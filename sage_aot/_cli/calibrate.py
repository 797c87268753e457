"""``sage-aot calibrate``: where sage_aot is faster than torch's attention on this GPU.

It compares calls with every backend of scaled_dot_product_attention, by the GPU's time and by that of queued calls,
fits the policy's thresholds to them, and writes these to the user's configuration folder. Where torch's own choice of a
backend is not its FlashAttention-2, it also measures for which small calls that is faster.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from math import inf
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch.nn.attention import SDPBackend

from sage_aot._cli import bench
from sage_aot._cli.bench import Effort, Row, Shape, Way
from sage_aot._cli.files import check_file
from sage_aot._kernels.axes import HEADDIMS
from sage_aot.errors import UnsupportedError
from sage_aot.integrations import Policy, use
from sage_aot.integrations._calibration import Machine, choose, writable_folder, write
from sage_aot.integrations._gain import (
    AXES,
    KINDS,
    NEVER,
    Corner,
    Threshold,
    Thresholds,
    Work,
    is_faster,
    kernel_headdim,
)
from sage_aot.integrations._rules import check_gpu
from sage_aot.integrations.torch import by_flash

EFFORT = Effort(rounds=4, calls=40, round_us=2.5e3, warm_up_s=0.02, hopeless=1.5)

SECONDS, SECONDS_OF_CALLS = 100.0, 70.0
"""Seconds until measuring ends, and until its first part ends, which compares sage_aot with torch. What was not
measured by then is left out."""

LONGEST_US = 30e3
"""Calls that are expected to take longer are left out: shorter ones have told."""

CLEAR, CLEAR_TIMES = 1.25, 2
"""Longer calls are left out where so many in turn had this gain: there is no doubt about them."""

ENOUGH = 1.03
"""FlashAttention-2 is chosen from this gain on."""

MOST_ELEMENTS = 2 ** 28
"""Most elements of k and of v at a corner, all heads counted; corners with more are left out."""


# --- calls ------------------------------------------------------------------------------------------------------------


class Sample(NamedTuple):
    """A call that was measured, by the clock that is worse for sage_aot."""

    work: Work
    theirs: float  # µs of torch's fastest backend
    ours: float

    @classmethod
    def of(cls, row: Row) -> Sample:
        times = zip(row.best(), row.ways["attn"])
        return cls(work_of(row.shape), *min(times, key=lambda pair: pair[0] / pair[1]))

    @property
    def gain(self) -> float:
        """The speed as a multiple of torch's."""
        return self.theirs / self.ours


def work_of(shape: Shape) -> Work:
    return Work.of(*shape[1:7], shape.kind == "causal", shape.window)


def work_of_torch(shape: Shape) -> Work:
    """A window is a mask to torch, which computes all pairs."""
    return work_of(shape._replace(kind="full") if shape.kind == "window" else shape)


def series() -> Iterator[list[Shape]]:
    """The calls to measure: in each series they differ by length alone, and become longer."""
    lengths = 512, 1024, 1536, 2048, 3072, 4096, 6144, 8192
    for headdim, kind in product(HEADDIMS, KINDS):
        for heads in ((1, 24, 24), (4, 32, 8)):  # batch, those of q, those of k and v
            few = lengths if kind in ("full", "causal") else lengths[:2] + lengths[3:6:2]
            yield [Shape("", *heads, n, n, headdim, kind) for n in few]
        if (headdim, kind) == (64, "padded"):  # many short texts, whose masks cost the host the same
            yield [Shape("", 32, 12, 12, n, n, headdim, kind) for n in (256, 512, 1024)]
        if kind == "full":  # chunks of a prompt; cross-attention
            yield [Shape("", 1, 32, 8, 512, keys, headdim) for keys in (2048, 8192, 32768)]
            for keys in (256, 512, 1024):
                yield [Shape("", 1, 24, 24, queries, keys, headdim) for queries in (4096, 16384)]


def samples(measure: Callable[[Shape], Row | None], is_over: Callable[[], bool],
            step: Callable[[str], None]) -> Iterator[Row]:
    """Measure the series side by side, the shortest calls of all of them first, so that the longest are left out where
    time is over."""
    waiting = [iter(shapes) for shapes in series()]
    clear, rate = dict.fromkeys(range(len(waiting)), 0), 0.0  # operations a µs of the fastest call so far
    while waiting:
        for place, shapes in list(enumerate(waiting)):
            if (shape := next(shapes, None)) is None:
                clear.pop(place, None)
                continue
            step(f"{shape}")
            operations = work_of_torch(shape).operations
            if is_over() or clear[place] >= CLEAR_TIMES or rate and operations > LONGEST_US * rate:
                continue
            if (row := measure(shape)) is None:
                continue
            rate = max(rate, operations / row.best().gpu)
            clear[place] = clear[place] + 1 if Sample.of(row).gain >= CLEAR else 0
            yield row
        if not clear:
            return


def fit(measured: Sequence[Sample]) -> Threshold:
    """The threshold of calls of which these were measured. It serves none of them in which sage_aot was slower.

    A call saves a · operations − b · elements − c µs. Least squares give a, b and c, none of them negative, in parts of
    the call's time. What is saved is nothing at the threshold. Its second number then goes to where it serves no loss,
    and not far below the least call that gained.
    """
    unknowns = np.array([(sample.work.operations, -sample.work.elements, -1.0) for sample in measured])
    ours = np.array([sample.ours for sample in measured])
    scale = np.abs(unknowns / ours[:, None]).max(0)
    saved, _ = nnls(unknowns / ours[:, None] / scale, np.array([sample.gain for sample in measured]) - 1)
    a, b, c = saved / scale
    if a == 0:
        return NEVER
    per_element = float(b / a)
    above = [(sample.work.operations - per_element * sample.work.elements, sample.gain >= 1) for sample in measured]
    floor = max((height for height, is_gain in above if not is_gain), default=0.0)
    served = [height for height, is_gain in above if is_gain and height > max(floor, 0)]
    if not served:
        return NEVER
    least = min(served)
    return Threshold(per_element, min(max(float(c / a), 1.001 * floor, least / 2), least))


def nnls(matrix: Any, values: Any) -> tuple[Any, float]:
    """Least squares whose unknowns are not negative, and the square of the error: the best of the few sets of unknowns
    that are not 0."""
    best = np.zeros(matrix.shape[1]), float(np.square(values).sum())
    for taken in product((False, True), repeat=matrix.shape[1]):
        if any(taken):
            found = np.zeros(matrix.shape[1])
            found[list(taken)] = np.linalg.lstsq(matrix[:, list(taken)], values, rcond=None)[0]
            error = float(np.square(matrix @ found - values).sum())
            if (found >= 0).all() and error < best[1]:
                best = found, error
    return best


# --- torch's backends -------------------------------------------------------------------------------------------------


def corners() -> list[Corner]:
    return [corner for corner in map(Corner._make, product(*AXES))
            if corner.headdim * corner.heads * corner.keys <= MOST_ELEMENTS]


# --- calibration ------------------------------------------------------------------------------------------------------


class Measured(NamedTuple):
    """Findings of a calibration."""

    thresholds: Thresholds
    rows: list[Row]
    corners: dict[Corner, bool]
    left: int  # corners left out since time was over


def calibrate(former: Thresholds, measure: Callable[[Shape], Row | None], is_flash_faster: Callable[[Corner], bool],
              clock: Callable[[], float], step: Callable[[str], None]) -> Measured:
    """Thresholds from measurements. What they could not tell is taken from `former`.

    Args:
        measure: the times of a call; None where this GPU cannot compute it.
        step: told of each measurement before it, whether or not it is left out.
    """
    began = clock()
    rows = list(samples(measure, lambda: clock() - began > SECONDS_OF_CALLS, step))
    found: dict[tuple[str, int], list[Sample]] = {}
    for row in rows:
        found.setdefault((row.shape.kind, kernel_headdim(row.shape.headdim)), []).append(Sample.of(row))
    calls = {key: fit(found[key]) if key in found else former.calls[key] for key in product(KINDS, HEADDIMS)}
    told: dict[Corner, bool] = {}
    for corner in corners():
        step(f"FlashAttention-2, {','.join(map(str, corner))}")
        if clock() - began <= SECONDS:
            told[corner] = is_flash_faster(corner)
    flash = frozenset(corner for corner in corners() if told.get(corner, corner in former.flash))
    return Measured(Thresholds(calls, flash), rows, told, len(corners()) - len(told))


def steps() -> int:
    """The number of calls of `step`."""
    return sum(map(len, series())) + len(corners())


# --- measuring --------------------------------------------------------------------------------------------------------


def measure_call(shape: Shape) -> Row | None:
    """sage_aot, with the Python of a policy that serves the call, and every backend of torch's; None where the GPU has
    too little memory."""
    try:
        ways = bench.ways_of(shape)
        ways["attn"] = ways.pop("policy")
        if shape.queries * shape.keys <= 512 ** 2:  # one of each kind
            bench.check_output(f"attn of {shape}", ways["attn"].work(), ways["sdpa"].work())
        return Row(shape, True, bench.timed(ways, EFFORT))
    except torch.cuda.OutOfMemoryError:
        return None


def measure_flash(corner: Corner) -> bool:
    """True where FlashAttention-2, called as the policy calls it, is clearly faster than torch's own choice."""
    try:
        q, k, v = (torch.randn(1, corner.heads, rows, corner.headdim, device="cuda", dtype=torch.bfloat16)
                   for rows in (corner.queries, corner.keys, corner.keys))
        if torch._fused_sdp_choice(q, k, v) == SDPBackend.FLASH_ATTENTION.value or by_flash(q, k, v, None) is None:
            return False
        times = bench.timed({"sdpa": Way(lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v)),
                             "by_flash": Way(lambda: cast(torch.Tensor, by_flash(q, k, v, None)))}, EFFORT)
    except torch.cuda.OutOfMemoryError:
        return False
    return times["sdpa"].gpu >= ENOUGH * times["by_flash"].gpu and times["sdpa"].wall >= times["by_flash"].wall


# --- the command ------------------------------------------------------------------------------------------------------


class Progress:
    """A bar on a terminal; elsewhere a line for each tenth."""

    WIDTH = 40

    def __init__(self, total: int) -> None:
        self._total, self._done = total, 0

    def step(self, what: str) -> None:
        part = self._done / self._total
        if sys.stderr.isatty():
            bar = "#" * round(part * self.WIDTH)
            print(f"\r[{bar:<{self.WIDTH}}] {part:4.0%}  {what:<40.40}", end="", file=sys.stderr, flush=True)
        elif int(10 * part) > int(10 * (self._done - 1) / self._total) or self._done == 0:
            print(f"{part:4.0%}  {what}", file=sys.stderr, flush=True)
        self._done += 1

    def end(self) -> None:
        if sys.stderr.isatty():
            print(f"\r{'':<{self.WIDTH + 50}}\r", end="", file=sys.stderr, flush=True)


def main(file: str | None) -> int:
    """Measure, write the thresholds, say what changed, and write all times to `file`."""
    if not torch.cuda.is_available():
        raise UnsupportedError(f"calibrate: expected a CUDA GPU, torch {torch.__version__} finds none; run it on a "
                               f"machine with a GPU and a CUDA build of torch")
    check_gpu()
    writable_folder()
    if file is not None:
        check_file("calibrate", file)
    device = torch.cuda.current_device()
    former, machine = choose(device), Machine.here(device)
    print(f"- GPU: {machine}\n- thresholds of before: {former.source}")
    if former.refused is not None:
        print(f"- not taken: {former.refused}")
    progress = Progress(steps())
    began = time.monotonic()
    with torch.inference_mode(), use(Policy(when="possible")):
        made = calibrate(former.thresholds, measure_call, measure_flash, time.monotonic, progress.step)
    progress.end()
    path = write(made.thresholds, machine)
    print(f"- measured: {len(made.rows)} calls, {len(made.corners)} of {len(made.corners) + made.left} shapes of "
          f"FlashAttention-2, in {time.monotonic() - began:.0f} s\n")
    print("\n".join(changes(former.thresholds, made.thresholds)))
    print(f"\nwrote {path}")
    if file is not None:
        Path(file).write_text(json.dumps({"machine": machine._asdict(), "rows": [row.to_json() for row in made.rows],
                                          "flash": [[*corner, faster] for corner, faster in made.corners.items()]},
                                         indent=1) + "\n", "utf-8")
    return 0


def changes(former: Thresholds, now: Thresholds) -> Iterable[str]:
    """A table: from how many tokens on calls of one batch entry of 24 heads are sage_aot's."""
    yield "| self-attention, 24 heads | head dim | before, from tokens | now, from tokens |\n|---|---:|---:|---:|"
    for kind, headdim in product(KINDS, HEADDIMS):
        before, after = (_tokens(thresholds.calls[kind, headdim], kind, headdim) for thresholds in (former, now))
        yield f"| {kind} | {headdim} | {before} | {after}{'' if before == after else ' *'} |"
    more, fewer = now.flash - former.flash, former.flash - now.flash
    yield (f"\nFlashAttention-2 in the place of torch's own choice: at {len(now.flash)} corners of the grid, "
           f"{len(more)} of them new; {len(fewer)} of before are gone")


def _tokens(threshold: Threshold, kind: str, headdim: int, most: int = 1 << 20) -> str:
    """The least length that a threshold serves; it serves all longer ones."""
    def serves(n: int) -> bool:
        return is_faster(threshold, work_of(Shape("", 1, 24, 24, n, n, headdim, kind)))

    if threshold.at_least == inf or not serves(most):
        return "never"
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if serves(middle) else (middle, high)
    return f"{high:,}"
