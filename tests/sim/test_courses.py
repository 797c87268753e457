"""A call is made again as far as the launches of kernels that changed, and on to its end where they write anything else
than the last time."""

from __future__ import annotations

from collections.abc import Callable

import fuzz_checks
import launches
import numpy as np
import outcomes
import pytest
import simulator
from courses import AsBefore, Course, Step, Writings
from fuzz_cases import Case
from fuzz_checks import Verdict
from launches import INSIDE, WRITABLE, WRITTEN, Buffer
from outcomes import Outcomes
from run_case import case_of
from simbuild import Build
from simulated import Simulated
from variants_on_cpu import variant

from codegen.cache import Cache

NAME = "sm80_d64_qkint8_pvf16_accf32_causal_vsmooth_qsmooth"
TRAINED = "sm80_d64_qkint8_pvf16_accf32_causal_vraw_qraw"
SEED = 1
CALL = ["quant", "quant", "delta", "attn"]
"""Kinds of the kernels of a call's launches."""


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("SAGE_AOT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(launches, "BYTES_A_SECOND", 0)  # every launch runs, however long it takes


@pytest.fixture
def ran(monkeypatch) -> list[str]:
    """Kinds of the kernels that the engine ran."""
    kinds = []
    launch = simulator._Engine.launch
    monkeypatch.setattr(simulator._Engine, "launch",
                        lambda self, path, *rest: kinds.append(path.stem.split("_")[1]) or launch(self, path, *rest))
    return kinds


@pytest.fixture
def judged(monkeypatch) -> list[Case]:
    """Cases that were held against the emulation."""
    cases = []
    against = fuzz_checks._against_emulated
    monkeypatch.setattr(fuzz_checks, "_against_emulated", lambda case, spy: cases.append(case) or against(case, spy))
    return cases


@pytest.fixture
def change(monkeypatch) -> Callable[[str], None]:
    """Changes the libraries of a kind's kernels, or what is taken for them, once more each time."""
    digest_of, changes = launches.digest_of, []
    monkeypatch.setattr(outcomes, "digest_of", lambda path: digest_of(path) + str(changes.count(
        path.stem.split("_")[1])))
    return changes.append


def case(name: str = NAME, **values: object) -> Case:
    return case_of(variant(name), {"seqlen_q": 70, "seqlen_kv": 90, **values})


def checked(built: Build, of: Case | None = None, sources: str = "sources", planted: int = 0, seed: int = SEED,
            worker: Outcomes | None = None, name: str = NAME) -> tuple[Verdict, str]:
    """Verdict that a session finds of a call, and keeps."""
    worker = worker or Outcomes(sources)
    found = worker.check(Simulated(built), variant(name), of or case(), seed, planted)
    Cache.of_environment().keep({key: [entry] for key, entry in worker.take()[0].items()})
    return found


@pytest.mark.parametrize("name", [NAME])
@pytest.mark.parametrize(("kind", "again"), [
    ("quant", ["quant", "quant"]), ("delta", ["quant", "quant", "delta"]), ("attn", CALL), ("merge", [])])
def test_what_changed_is_simulated_and_nothing_judged(built, ran, judged, change, name, kind, again):
    found = checked(built)
    assert (ran, len(judged), found[0].failure) == (CALL, 1, None)
    for _ in range(2):
        ran.clear()
        change(kind)
        assert checked(built) == found
        assert (ran, len(judged)) == (again, 1)
    ran.clear()
    assert checked(built) == found and ran == []  # since the last change


@pytest.mark.parametrize("name", [NAME])
@pytest.mark.parametrize(("kind", "buffer", "bit", "check"), [
    ("quant", "kv_hat", 0, "bits of k"), ("delta", "delta_s", 0, "bits of delta_s"),
    ("attn", "out", 6, "output, emulation")])
def test_what_writes_another_bit_is_judged(built, ran, judged, change, monkeypatch, name, kind, buffer, bit, check):
    """A bit of the first byte that a launch wrote, of a kernel that changed with it."""
    checked(built)
    ran.clear()
    change(kind)
    run = simulator.Simulator.launch_kernel

    def spoiled(self: simulator.Simulator, kernel: str, *rest: object) -> None:
        run(self, kernel, *rest)
        if kernel.split("_")[1] == kind:
            for own in self._buffers:
                if own.name == buffer and (own.state & WRITTEN).any():
                    own.memory()[np.flatnonzero(own.state & WRITTEN)[0]] ^= 1 << bit

    monkeypatch.setattr(simulator.Simulator, "launch_kernel", spoiled)
    verdict, _ = checked(built)
    assert verdict.failure and not verdict.worst[check] <= 1 and (ran, len(judged)) == (CALL, 2)


@pytest.mark.parametrize("name", [NAME])
@pytest.mark.parametrize("other", [{"of": case(seed=3)}, {"sources": "others"}, {"planted": 1}, {"seed": SEED + 1},
                                   {"worker": Outcomes("sources", repeat=True)}])
def test_of_another_call_all_is_simulated(built, ran, name, other):
    checked(built)
    ran.clear()
    checked(built, **other)
    assert ran == CALL


@pytest.mark.parametrize("name", [NAME])
def test_another_fact_of_a_kernel_is_another_call(built, ran, monkeypatch, name):
    checked(built)
    ran.clear()
    monkeypatch.setattr(outcomes, "_facts", lambda build, spec: ["other facts"])
    checked(built)
    assert ran == CALL


@pytest.mark.parametrize("name", [NAME])
def test_a_fault_is_found_again_where_its_kernel_changed(built, ran, change, monkeypatch, name):
    """Memory of the output that is taken away: attention writes to nobody's."""
    know = simulator.Simulator.know
    monkeypatch.setattr(simulator.Simulator, "know", lambda self, *buffers: know(
        self, *(buffer for buffer in buffers if buffer.name != "out")))
    found = [checked(built)]
    for kind, again in (("quant", CALL[:2]), ("attn", CALL)):
        ran.clear()
        change(kind)
        found.append(checked(built))
        assert ran == again
    assert [verdict.failure[0] for verdict, _ in found] == ["access outside an allocation"] * 3


@pytest.mark.parametrize("name", [TRAINED])
def test_a_trained_call_ends_within_its_backward_pass(built, ran, change, name):
    call = {"of": case(TRAINED, entry="train_attn", read_quantized=False), "name": TRAINED}
    found, whole = checked(built, **call), [*ran]
    ran.clear()
    change("bwdprep")
    assert found[0].failure is None and checked(built, **call) == found
    assert ran == whole[:whole.index("bwdprep") + 1] != whole


@pytest.mark.parametrize("name", [NAME])
def test_bugs_share_the_launches_of_kernels_that_hold_none(built, ran, change, monkeypatch, name):
    """Bug 1 is one of attention's, 2 of the quantizer's."""
    monkeypatch.setattr(Build, "switches", lambda self, kernel: {"attn": {1}, "quant": {2}}.get(
        kernel.split("_")[1], set()))
    for planted in (0, 1, 2):
        checked(built, planted=planted)
    change("quant")
    worker = Outcomes("sources")
    for planted, again in ((0, CALL[:2]), (1, []), (2, CALL[:2])):
        ran.clear()
        checked(built, planted=planted, worker=worker)
        assert ran == again


# --- a course by itself -----------------------------------------------------------------------------------------------

BEFORE = [Step("first", "old", "a"), Step("second", "old", "b"), Step("third", "old", "")]


def buffer(values: bytes, states: bytes) -> Buffer:
    memory = np.frombuffer(bytearray(values), np.uint8)
    kept.append(memory)
    return Buffer("a name", memory.ctypes.data, np.frombuffer(bytearray(states), np.uint8))


kept: list[np.ndarray] = []
"""Memory of buffers."""


def wrote(*buffers: Buffer) -> str:
    course = Course(str)
    course.begin("a kernel")
    course.end(buffers)
    return course.steps[0].wrote


def test_a_digest_is_of_all_that_may_be_written():
    own, done = INSIDE | WRITABLE, INSIDE | WRITABLE | WRITTEN
    found = [wrote(buffer(values, bytes(states))) for values, states in (
        (b"abc", (own, done, done)), (b"abd", (own, done, done)), (b"abc", (done, done, done)),
        (b"abc", (own, own, done)), (b"abcd", (own, done, done, own)), (b"ab\0", (own, done, done)),
        (b"ab\0", (own, done, own)))]
    assert len({*found}) == len(found)
    assert wrote(buffer(b"xbc", bytes((own, done, done)))) == found[0]  # nothing wrote the first byte
    assert wrote(buffer(b"abc", bytes((own, done, done))), buffer(b"input", bytes([INSIDE | WRITTEN] * 5))) == found[0]


@pytest.mark.parametrize(("known", "now", "expected"), [
    ((), "old old old", 0), ((), "new old old", 1), ((), "new old new", 3), (("a",), "new old old", 0),
    (("x",), "new old old", 1), (("a", "b"), "new new old", 0), (("x", "b"), "new new old", 2),
    (("a", "b", ""), "new new new", 3)])
def test_the_last_launch_of_which_nothing_is_known_decides(known, now, expected):
    """`known`: what another call's launches wrote, by kernels that changed."""
    writings, codes = Writings(), dict(zip(("first", "second", "third"), now.split()))
    writings.learn("call", [step._replace(code="new", wrote=written) for step, written in zip(BEFORE, known)])
    assert writings.to_repeat("call", BEFORE, codes.get) == expected
    assert writings.to_repeat("another call", BEFORE, codes.get) == max(
        (i + 1 for i, code in enumerate(codes.values()) if code == "new"), default=0)


def test_another_kernel_in_the_place_of_one_is_no_repetition():
    step = Step("first", "old", wrote())
    for kernel, ends in (("first", True), ("second", False)):
        course = Course(str, [step, step], repeated=1)
        course.begin(kernel)
        if ends:
            pytest.raises(AsBefore, course.end, [])
        else:
            course.end([])
        assert course.is_as_before is ends
