"""A launch that was simulated before is not simulated again, unless something changed that its results follow from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import launches
import numpy as np
import pytest
import simulator
from fuzz_cases import Case
from launches import INSIDE, WRITABLE, WRITTEN, Buffer, Launches, anywhere, key_of
from run_case import case_of
from simbuild import Build
from simulated import Simulated
from simulator import LAUNCHES
from variants_on_cpu import variant

NAME = "sm80_d64_qkint8_pvf16_accf32_causal_vsmooth_qsmooth"
SEED = 1


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("SAGE_AOT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(LAUNCHES, "kept", True)
    monkeypatch.setattr(launches, "BYTES_A_SECOND", 2**40)  # however long it takes


@pytest.fixture
def simulated(monkeypatch) -> list[str]:
    """Names of the kernels that the engine ran."""
    names = []
    launch = simulator._Engine.launch
    monkeypatch.setattr(simulator._Engine, "launch",
                        lambda self, path, *rest: names.append(path.stem) or launch(self, path, *rest))
    return names


def case(**values: object) -> Case:
    return case_of(variant(NAME), {"seqlen_q": 70, "seqlen_kv": 90, **values})


@pytest.mark.parametrize("name", [NAME])
def test_the_second_call_simulates_nothing(built, simulated, name):
    subject = Simulated(built)
    found = subject.check(case(), SEED)
    kernels = {*simulated}
    assert found[0].failure is None and len(kernels) == 3 and subject.launched == kernels
    simulated.clear()
    subject.launched.clear()
    assert subject.check(case(), SEED) == found
    assert simulated == [] and subject.launched == kernels


@pytest.mark.parametrize("name", [NAME])
@pytest.mark.parametrize(("values", "seed"), [
    ({}, SEED + 1), ({"seed": 3}, SEED), ({"scale": 0.2}, SEED), ({"kv_heads": 2}, SEED)])
def test_another_call_is_simulated(built, simulated, name, values, seed):
    Simulated(built).check(case(), SEED)
    kernels = {*simulated}
    simulated.clear()
    Simulated(built).check(case(**values), seed)
    assert {*simulated} == kernels


@pytest.mark.parametrize("name", [NAME])
def test_another_kernel_is_simulated_alone(built, simulated, monkeypatch, name):
    """The attention kernel changed; the quantizers did not."""
    Simulated(built).check(case(), SEED)
    simulated.clear()
    digest_of = launches.digest_of
    monkeypatch.setattr(launches, "digest_of", lambda path: digest_of(path) + path.stem * ("_attn_" in path.stem))
    Simulated(built).check(case(), SEED)
    assert [kernel.split("_")[1] for kernel in simulated] == ["attn"]


@pytest.mark.parametrize("name", [NAME])
def test_with_measured_exponentials_all_is_simulated(built, simulated, monkeypatch, name):
    monkeypatch.setattr(simulator._engine(), "tables", (np.zeros(1),))
    for _ in range(2):
        Simulated(built).check(case(), SEED)
    assert simulated[:4] * 2 == simulated and len({*simulated}) == 3  # a quantizer's launch and its statistics'


@pytest.mark.parametrize("name", [NAME])
def test_all_is_simulated_where_it_is_asked_for_by_name(built, simulated, monkeypatch, name):
    monkeypatch.setattr(LAUNCHES, "kept", False)
    found = [Simulated(built).check(case(), SEED) for _ in range(2)]
    assert found[0] == found[1] and simulated[:4] * 2 == simulated and len({*simulated}) == 3


@pytest.mark.parametrize("name", [NAME])
def test_what_the_simulator_reports_it_reports_each_time(built, simulated, name):
    """Tensors of too few bytes: the quantizer reads beyond them."""
    know = simulator.Simulator.know

    def shorter(self: simulator.Simulator, *buffers: Buffer) -> None:
        know(self, *(dataclasses.replace(buffer, state=buffer.state[:-2]) if buffer.base == "k" else buffer
                     for buffer in buffers))

    with mock.patch.object(simulator.Simulator, "know", shorter):
        found = [Simulated(built).check(case(), SEED)[0].failure for _ in range(2)]
    assert found[0] == found[1] and found[0][0] == "access outside an allocation"
    assert [*map(simulated.count, {*simulated})] == [3]  # the statistics, which read less, once


@pytest.mark.parametrize("name", [NAME])
def test_bugs_are_planted_each_time(built, simulated, monkeypatch, name):
    """Kernels that do not hold a bug run as they did: all but attention."""
    monkeypatch.setattr(Build, "switches", lambda self, kernel: {1} if "_attn_" in kernel else set())
    Simulated(built).check(case(), SEED)
    for planted, again in ((1, ["attn"]), (2, []), (1, ["attn"])):
        simulated.clear()
        simulator.plant(planted)
        try:
            Simulated(built).check(case(), SEED)
        finally:
            simulator.plant(0)
        assert [kernel.split("_")[1] for kernel in simulated] == again


# --- the key ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Parts:
    """All that a key is made of."""

    launch: tuple[object, ...] = ("kernel", 1)
    libraries: tuple[Path, ...] = ()
    memory: bytes = bytes(range(96))  # of a tensor and its buffer, behind 32 bytes of nobody
    state: tuple[int, ...] = (INSIDE | WRITTEN,) * 40 + (INSIDE | WRITABLE,) * 24
    shift: int = 0  # of the tensor in memory
    offset: int = 0  # of the buffer in the tensor
    other: int = 32  # offset in the buffer of another tensor

    def key(self) -> str:
        memory = np.zeros(1024, np.uint8)
        base = memory.ctypes.data + -memory.ctypes.data % 256 + self.shift
        at = base - memory.ctypes.data + self.offset
        memory[at:at + 96] = np.frombuffer(self.memory, np.uint8)
        buffer = Buffer("a name", base + self.offset, np.array(self.state, np.uint8), "x")
        return key_of(self.launch, self.libraries, {"x": base, "y": base + self.offset + self.other}, [buffer])


@pytest.fixture
def files(tmp_path) -> Iterator[tuple[Path, Path]]:
    paths = tmp_path / "kernel.so", tmp_path / "other.so"
    for path in paths:
        path.write_bytes(path.name.encode())
    yield paths


def test_the_key_is_of_everything_that_kernels_see(files):
    parts = Parts(libraries=files[:1])
    others = [dataclasses.replace(parts, **change) for change in (
        {"launch": ("kernel", 2)}, {"libraries": files[1:]}, {"libraries": files}, {"shift": 16}, {"offset": 16},
        {"other": 40}, {"memory": bytes(39) + bytes(57)}, {"memory": bytes(range(39)) + b"x" + bytes(range(40, 96))},
        {"state": parts.state[:-1]}, {"state": (*parts.state[:-1], INSIDE)})]
    keys = [made.key() for made in (parts, *others)]
    assert len({*keys}) == len(keys)


def test_the_key_has_the_place_of_a_buffer_in_the_workspace():
    """The workspace's own address lies in no buffer."""
    assert Parts(offset=64).key() != Parts(offset=128).key()


def test_the_key_is_of_nothing_else(files):
    parts = Parts(libraries=files[:1])
    assert parts.key() == dataclasses.replace(parts, shift=launches.ALIGNMENT).key()  # elsewhere in memory
    assert parts.key() == dataclasses.replace(parts, memory=parts.memory[:40] + bytes(56)).key()  # nothing wrote it


def test_addresses_keep_their_alignment_and_stay_apart():
    found = anywhere({"q": 2**20 + 48, "k": 2**30 + 48, "sinks": 0})
    assert found == anywhere({"q": 2**33 + 48, "k": 64 + 48, "sinks": 0})
    assert found["q"] % launches.ALIGNMENT == 48 and found["q"] != found["k"] and found["sinks"] == 0


# --- what is kept -----------------------------------------------------------------------------------------------------


def test_results_come_back_byte_by_byte():
    memory = np.arange(64, dtype=np.uint8)
    state = np.full(64, INSIDE | WRITABLE, np.uint8)
    buffer = Buffer("a name", memory.ctypes.data, state)

    def simulate() -> None:
        memory[8:16] = 0xAB
        memory[20] = 20  # the byte that was there
        state[8:16] |= WRITTEN
        state[20] |= WRITTEN

    def run(simulate: Callable[[], None]) -> tuple[bytes, bytes]:
        memory[:], state[:] = np.arange(64), INSIDE | WRITABLE
        Launches(kept=True).run(simulate, lambda: "ab" * 32, [buffer])
        return memory.tobytes(), state.tobytes()

    first = run(simulate)
    assert run(pytest.fail) == first and first[1][20] & WRITTEN


def test_much_that_is_written_in_little_time_is_not_kept(monkeypatch):
    monkeypatch.setattr(launches, "BYTES_A_SECOND", 0)
    memory, times = np.zeros(4096, np.uint8), []
    buffer = Buffer("a name", memory.ctypes.data, np.full(4096, INSIDE | WRITABLE, np.uint8))
    for _ in range(2):
        Launches(kept=True).run(lambda: times.append(1), lambda: "cd" * 32, [buffer])
    assert len(times) == 2
