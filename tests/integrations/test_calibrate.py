"""``sage-aot calibrate``: thresholds of a GPU whose times are known, their files, and who reads them."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sage_aot._cli import bench, calibrate
from sage_aot._cli import main as cli
from sage_aot._cli.bench import USES, Effort, Row, Shape, Times, Way
from sage_aot._cli.calibrate import Progress, Sample, changes, corners, fit, series, steps
from sage_aot._kernels.axes import HEADDIMS
from sage_aot.errors import CalibrationWarning, UnsupportedError
from sage_aot.integrations import Policy, _calibration, _policy, report, use
from sage_aot.integrations import torch as integration
from sage_aot.integrations._calibration import Machine, Refused, chosen, folder, read, write
from sage_aot.integrations._gain import (
    KINDS,
    NEVER,
    Corner,
    Threshold,
    Work,
    built_in,
    is_faster,
    kernel_headdim,
    prefers_flash,
)
from sage_aot.integrations._report import SLOWER

FORMER, _ = built_in((9, 0))
H100 = Machine("NVIDIA H100 80GB HBM3", "580.159.04", "2.11.0+cu130", "0.1.0")


# --- a GPU whose times are known --------------------------------------------------------------------------------------


class Model:
    """A GPU on which a call of torch takes a launch and its multiplications at a rate; one of sage_aot longer launches,
    some time for each element and another rate. torch computes a window by a mask, with all pairs. Written from sizes
    alone."""

    def __init__(self, torchs=600e6, ours=950e6, element=1.3e-6, launch=8.0, noise=0.0):  # operations, µs
        self.torchs, self.ours, self.element, self.launch, self.noise = torchs, ours, element, launch, noise
        self.random = random.Random(0)

    def gain(self, shape):
        pairs = shape.batch * shape.heads * shape.queries * shape.keys
        operations = 4 * pairs * shape.headdim * (0.5 if shape.kind == "causal" else 1)
        visible = operations
        if shape.kind == "window":  # a quarter of the keys and the query's own, fewer at the beginning
            most = shape.keys // 4 + 1
            visible = 4 * shape.batch * shape.heads * shape.headdim * sum(
                min(key + 1, most) for key in range(shape.keys))
        elements = shape.batch * shape.headdim * (shape.heads * shape.queries + 2 * shape.kv_heads * shape.keys)
        theirs = self.launch + operations / self.torchs
        return theirs, 3 * self.launch + elements * self.element + visible / self.ours

    def __call__(self, shape):
        theirs, ours = (took * self.random.uniform(1, 1 + self.noise) for took in self.gain(shape))
        return Row(shape, True, {"sdpa": Times(theirs, theirs + 2), "cudnn": Times(theirs, theirs + 1),
                                 "flash": Times(1.5 * theirs, 1.5 * theirs), "attn": Times(ours, ours + 1)})


def calibrated(model, flash=lambda corner: False, seconds=0.0, former=FORMER):
    """`seconds` a measurement takes."""
    now, told = [0.0], []

    def measure(work):
        def timed(what):
            now[0] += seconds
            return work(what)
        return timed

    made = calibrate.calibrate(former, measure(model), measure(flash), lambda: now[0], told.append)
    assert len(told) == steps(), "the bar reaches its end"
    return made, now[0]


def others():
    """Shapes that are in no series."""
    for headdim, kind in itertools.product((64, 80, 128, 256), KINDS):
        for batch, heads, kv_heads in ((1, 16, 16), (2, 32, 32), (1, 64, 8), (4, 12, 12)):
            for n in (300, 700, 1300, 1900, 2600, 3500, 5000, 7000, 12000, 30000):
                yield Shape("", batch, heads, kv_heads, n, n, headdim, kind)
    yield from (shape for shape in USES if shape.kind != "padded")


@pytest.mark.parametrize("model", [
    Model(), Model(noise=0.01), Model(torchs=300e6, ours=500e6), Model(element=4e-6), Model(torchs=60e6, ours=110e6),
    Model(torchs=900e6, ours=950e6)], ids=["H200", "noise", "FlashAttention-2", "slow memory", "slow", "little gain"])
def test_what_is_served_is_faster_and_what_gains_is_served(model):
    made, _ = calibrated(model)
    served = missed = 0
    for shape in others():
        threshold = made.thresholds.calls[shape.kind, kernel_headdim(shape.headdim)]
        work = Work.of(*shape[1:7], shape.kind == "causal", shape.window)
        theirs, ours = model.gain(shape)
        if is_faster(threshold, work):
            served += 1
            assert theirs / ours >= 0.97, f"{shape} is slower: {theirs / ours}"
        elif theirs / ours >= 1.12:
            missed += 1
    most = max(model.gain(shape)[0] / model.gain(shape)[1] for shape in others())
    assert (served > 40 or most < 1.05) and missed <= 0.1 * served, (served, missed)


def test_a_gpu_on_which_sage_aot_is_never_faster():
    made, _ = calibrated(Model(torchs=1600e6, ours=400e6))
    assert set(made.thresholds.calls.values()) == {NEVER} and len(made.rows) > 50


def test_both_clocks_count():
    """A call that gains on the GPU and loses in a queue is a loss."""
    row = Row(Shape("", 1, 1, 1, 64, 64, 64), True, {
        "sdpa": Times(20, 22), "flash": Times(25, 18), "attn": Times(10, 20)})
    assert Sample.of(row).gain == 18 / 20
    assert Sample.of(row).work == (4 * 64 ** 3, 3 * 64 ** 2)


def test_fitted_thresholds_are_those_of_the_times():
    """10 ms of torch for 1e12 operations, 6 of ours, 2 µs for 1e6 elements, 50 µs for a call."""
    works = [Work(operations * 10 ** 9, elements * 10 ** 6) for operations in (1, 5, 25, 125, 625)
             for elements in (1, 4, 16, 64)]
    found = fit([Sample(work, work.operations / 1e8, work.operations / 1e12 * 6e3 + work.elements * 2e-6 + 50)
                 for work in works])
    assert found.per_element == pytest.approx(2e-6 / 4e-9) and found.at_least == pytest.approx(50 / 4e-9, rel=0.1)


def test_fitted_thresholds_serve_no_call_that_was_slower():
    random_ = random.Random(1)
    for _ in range(300):
        measured = [Sample(Work(random_.randrange(10 ** 9, 10 ** 12), random_.randrange(10 ** 5, 10 ** 8)),
                           10 * random_.uniform(0.5, 2), 10) for _ in range(random_.randrange(1, 20))]
        threshold = fit(measured)
        assert all(one.gain >= 1 for one in measured if is_faster(threshold, one.work))
        assert threshold.per_element >= 0 and threshold.at_least >= 0
    assert fit([Sample(Work(10 ** 9, 10 ** 6), 9, 10), Sample(Work(10 ** 10, 10 ** 6), 90, 100)]) == NEVER


def test_no_call_below_the_least_that_gained_is_served():
    threshold = fit([Sample(Work(10 ** 10, 10 ** 6), 20, 10), Sample(Work(10 ** 11, 10 ** 6), 200, 100)])
    assert is_faster(threshold, Work(10 ** 10, 10 ** 6)) and not is_faster(threshold, Work(10 ** 8, 10 ** 6))


def test_the_log_of_an_h200_gives_thresholds_as_good_as_those_built_in():
    log = Path(__file__).parents[2] / "bench/results/h200-2026-11-25-crossover/crossover.json"
    found = {}
    for row in json.loads(log.read_text())["rows"]:
        torchs = [row[name] for name in ("sdpa", "cudnn", "flash", "efficient") if row[name]]
        pairs = [(min(way[clock] for way in torchs), row["ours"][clock]) for clock in ("gpu", "wall")]
        work = Work.of(*(row[name] for name in ("batch", "heads", "kv_heads", "queries", "keys", "headdim")),
                       row["kind"] == "causal")
        sample = Sample(work, *min(pairs, key=lambda pair: pair[0] / pair[1]))
        found.setdefault((row["kind"], row["headdim"]), []).append(sample)
    served = [one for samples in found.values() for threshold in [fit(samples)] for one in samples
              if is_faster(threshold, one.work)]
    assert len(served) >= 53 and min(one.gain for one in served) >= 1


# --- what is measured -------------------------------------------------------------------------------------------------


def test_every_kind_of_call_is_measured_on_both_sides_of_its_crossover():
    made, _ = calibrated(Model())
    assert made.thresholds.calls.keys() == FORMER.calls.keys()
    for kind, headdim in itertools.product(KINDS, HEADDIMS):
        gains = [Sample.of(row).gain for row in made.rows if (row.shape.kind, row.shape.headdim) == (kind, headdim)]
        assert min(gains) < 1 < max(gains)


def test_longer_calls_are_left_out_where_shorter_ones_have_told():
    measured = [row.shape for row in calibrated(Model(ours=6000e6, element=0))[0].rows]
    assert len(measured) < sum(map(len, series()))
    slow = calibrated(Model(torchs=5e6, ours=1e6))[0].rows
    assert max(row.ways["sdpa"].gpu for row in slow) < 1.1 * calibrate.LONGEST_US


def test_time_that_is_over_ends_measuring_in_both_parts():
    made, took = calibrated(Model(), seconds=0.8)
    assert calibrate.SECONDS_OF_CALLS <= len(made.rows) * 0.8 <= calibrate.SECONDS_OF_CALLS + 2
    assert calibrate.SECONDS <= took <= calibrate.SECONDS + 2 < 120
    assert made.left > 0 and len(made.corners) + made.left == len(corners())
    lengths = [max(shape.queries, shape.keys) for shape in (row.shape for row in made.rows)]
    assert sum(lengths[:20]) < sum(lengths[-20:]), "the shortest calls come first"


def test_what_was_not_measured_stays_as_before():
    made, _ = calibrated(Model(), seconds=1e6)
    unknown = [key for key in FORMER.calls if key != (made.rows[0].shape.kind, made.rows[0].shape.headdim)]
    assert len(made.rows) == 1 and all(made.thresholds.calls[key] == FORMER.calls[key] for key in unknown)
    assert made.thresholds.flash == FORMER.flash & set(corners()) and made.left == len(corners())


def test_a_gpu_without_memory_leaves_shapes_out():
    model = Model()
    made, _ = calibrated(lambda shape: model(shape) if shape.batch == 1 else None)
    assert {row.shape.batch for row in made.rows} == {1} and NEVER not in made.thresholds.calls.values()


def test_flash_is_chosen_at_the_corners_where_it_was_faster():
    made, _ = calibrated(Model(), flash=lambda corner: corner.headdim == 32 and corner.queries == 128)
    minilm = next(shape for shape in USES if "MiniLM" in shape.name)
    assert prefers_flash(made.thresholds, minilm.batch, minilm.heads, minilm.queries, minilm.keys, minilm.headdim)
    assert not prefers_flash(made.thresholds, minilm.batch, minilm.heads, minilm.queries, minilm.keys, 64)
    assert {corner.headdim for corner in made.thresholds.flash} == {32}, "those built in count no more"


@pytest.fixture
def stand_ins(monkeypatch):
    """torch's choice and its FlashAttention-2 on a GPU; the times of both ways."""
    says = SimpleNamespace(choice=3, takes_it=True, times={"sdpa": Times(10, 10), "by_flash": Times(9, 9)})
    monkeypatch.setattr(torch, "randn", lambda *shape, **options: torch.empty(shape, device="meta"))
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *qkv: says.choice)
    monkeypatch.setattr(calibrate, "by_flash", lambda q, k, v, scale: q if says.takes_it else None)
    monkeypatch.setattr(bench, "timed", lambda ways, effort: {name: says.times[name] for name in ways})
    return says


@pytest.mark.parametrize(("change", "expected"), [
    ({}, True), ({"choice": 1}, False), ({"takes_it": False}, False),
    ({"times": {"sdpa": Times(10, 10), "by_flash": Times(9.9, 5)}}, False),
    ({"times": {"sdpa": Times(10, 10), "by_flash": Times(5, 10.1)}}, False)], ids=str)
def test_flash_must_gain_by_both_clocks_and_not_be_torchs_choice(stand_ins, change, expected):
    vars(stand_ins).update(change)
    assert calibrate.measure_flash(Corner(32, 8, 16, 128)) is expected


def test_a_call_is_checked_and_all_backends_are_timed(monkeypatch):
    checked, timed = [], []
    ways = {name: Way(lambda name=name: name) for name in ("sdpa", "cudnn", "flash", "efficient", "attn", "policy")}
    monkeypatch.setattr(bench, "ways_of", lambda shape: dict(ways))
    monkeypatch.setattr(bench, "check_output", lambda what, out, expected: checked.append(what))
    monkeypatch.setattr(bench, "timed", lambda ways, effort: timed.append({
        name: way.work() for name, way in ways.items()}) or {})
    for shapes in series():
        for shape in shapes:
            assert calibrate.measure_call(shape).shape == shape
    served = {name: name for name in ("sdpa", "cudnn", "flash", "efficient")} | {"attn": "policy"}
    assert all(made == served for made in timed), "with the Python of a policy"
    assert len(checked) >= len(KINDS) * len(HEADDIMS)
    monkeypatch.setattr(bench, "ways_of", lambda shape: (_ for _ in ()).throw(torch.cuda.OutOfMemoryError()))
    assert calibrate.measure_call(shape) is None


def test_a_backend_without_hope_has_one_round(monkeypatch):
    times = {"sdpa": Times(10, 10), "cudnn": Times(10, 10), "flash": Times(14, 16), "efficient": Times(16, 16),
             "attn": Times(99, 99)}
    ran = []
    monkeypatch.setattr(bench, "_Timer", lambda way, effort: SimpleNamespace(measure=lambda: ran.append(way) or
                                                                             times[way]))
    effort = Effort(rounds=3, calls=1, round_us=1, warm_up_s=0, hopeless=1.5)
    assert bench.timed({name: name for name in times}, effort) == times
    assert {name: ran.count(name) for name in times} == {"sdpa": 3, "cudnn": 3, "flash": 3, "efficient": 1, "attn": 3}


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A machine with an H100 as device 0, and a configuration folder."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *device: H100.gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(Machine, "here", classmethod(lambda kind, device: H100))
    monkeypatch.setattr(_calibration, "_chosen", {})
    monkeypatch.setenv("SAGE_AOT_CALIBRATION", str(tmp_path))
    return tmp_path


MEASURED = FORMER._replace(calls={**FORMER.calls, ("full", 64): Threshold(1234.5, 6e9), ("padded", 256): NEVER},
                           flash=frozenset({Corner(32, 768, 128, 128)}))


def test_what_was_written_is_read(gpu):
    path = write(MEASURED, H100)
    assert path.parent == gpu and path.name.startswith("NVIDIA-H100-80GB-HBM3-") and path.suffix == ".json"
    assert read(path, H100) == MEASURED
    assert json.loads(path.read_text())["machine"]["driver"] == "580.159.04"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert chosen(0) == (MEASURED, f"measured by sage-aot calibrate, {path}", None)
    assert list(gpu.iterdir()) == [path], "nothing else is left"


def test_each_machine_has_a_file(gpu):
    paths = {write(MEASURED, machine) for machine in (
        H100, H100._replace(driver="570.1"), H100._replace(torch="2.12.0"), H100._replace(sage_aot="0.2"),
        H100._replace(gpu="NVIDIA H200"))}
    assert len(paths) == 5


def test_without_a_file_the_thresholds_are_those_built_in(gpu):
    assert chosen(0) == (*built_in((9, 0)), None)


@pytest.mark.parametrize("value", ["0"])
def test_files_can_be_switched_off(gpu, monkeypatch, value):
    write(MEASURED, H100)
    monkeypatch.setenv("SAGE_AOT_CALIBRATION", value)
    assert chosen(0) == (*built_in((9, 0)), None)
    with pytest.raises(UnsupportedError, match="got none: SAGE_AOT_CALIBRATION is 0"):
        write(MEASURED, H100)


def change(path, **new):
    """Another value, and a seal that fits."""
    held = {**json.loads(path.read_text()), **new}
    held.pop("sha256")
    path.write_text(json.dumps({**held, "sha256": _calibration._seal(held)}))


def with_calls(path, value, headdim="64"):
    calls = json.loads(path.read_text())["calls"]
    calls["full"][headdim] = value
    return {"calls": calls}


DAMAGES = {
    "empty": (lambda path: path.write_bytes(b""), "is damaged: JSONDecodeError"),
    "cut": (lambda path: path.write_bytes(path.read_bytes()[:-100]), "is damaged: JSONDecodeError"),
    "a list": (lambda path: path.write_text("[]"), "is damaged: TypeError"),
    "nested too deeply": (lambda path: path.write_text("[" * 100000), "is damaged: RecursionError"),
    "no object": (lambda path: path.write_text("3"), "is damaged: AttributeError"),
    "no text": (lambda path: path.write_bytes(b"\xff\xfe\x00"), "is damaged: UnicodeDecodeError"),
    "no seal": (lambda path: path.write_text("{}"), "is damaged: KeyError"),
    "edited": (lambda path: path.write_text(path.read_text().replace("1234.5", "1234.6")), "damaged or was edited"),
    "another format": (lambda path: change(path, format=1), "has format 1, expected 2"),
    "another machine": (lambda path: change(path, machine=H100._replace(driver="570.1")._asdict()),
                        "is of another machine: expected NVIDIA H100.*580.159.04.*, got .*driver 570.1"),
    "no machine": (lambda path: change(path, machine={"gpu": "?"}), "is damaged: TypeError"),
    "a missing kind": (lambda path: change(path, calls={}), "is damaged: KeyError"),
    **{f"a threshold of {value}"[:40]: (
        lambda path, value=value: change(path, **with_calls(path, value)), "is damaged: ")
       for value in ([-1, 1], [1, -1], [float("nan"), 1], [float("inf"), 1], ["1", 1], [True, 1], [1], None, [1, 2, 3],
                     [10**400, 1])},
    "a corner off the grid": (lambda path: change(path, flash=[[33, 8, 16, 128]]), "expected a corner of the grid"),
    "a short corner": (lambda path: change(path, flash=[[32, 8]]), "is damaged: ValueError"),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), "cannot be read: Is a directory"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_files_that_are_refused(gpu, damage):
    path = write(MEASURED, H100)
    work, message = DAMAGES[damage]
    work(path)
    with pytest.raises(Refused, match=message):
        read(path, H100)
    whole = (f"{path}.*{message}.*; run `sage-aot calibrate`; until then the policy takes the built-in thresholds. "
             "SAGE_AOT_CALIBRATION=0 silences this")
    with pytest.warns(CalibrationWarning, match=whole) as told:
        assert chosen(0)[:2] == built_in((9, 0))
        chosen(0)
    assert len(told) == 1


def test_a_flipped_bit_is_found_wherever_it_is(gpu):
    path = write(MEASURED, H100)
    whole = path.read_bytes()
    for place in range(0, len(whole), 7):
        for bit in (0, 3, 5):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1:])
            with contextlib.suppress(Refused):
                assert read(path, H100) == MEASURED, "white space alone may differ"


@pytest.mark.parametrize("now", [{"driver": "590.1"}, {"torch": "2.12.0"}, {"sage_aot": "0.2.0"}])
def test_thresholds_of_another_driver_or_version_are_not_taken(gpu, monkeypatch, now):
    path = write(MEASURED, H100)
    monkeypatch.setattr(Machine, "here", classmethod(lambda kind, device: H100._replace(**now)))
    message = f"{path.name} holds .* another driver, torch or sage_aot than .*{next(iter(now.values()))}"
    with pytest.warns(CalibrationWarning, match=message):
        assert chosen(0)[:2] == built_in((9, 0))


@pytest.mark.parametrize("other", ["NVIDIA H100 PCIe", f"{H100.gpu} Ti", f"{H100.gpu} beef"])
def test_another_gpus_file_is_no_matter(gpu, other):
    write(MEASURED, H100._replace(gpu=other))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert chosen(0).refused is None and chosen(0).thresholds == FORMER


def test_writing_is_whole_or_not_at_all(gpu, monkeypatch):
    path = write(MEASURED, H100)
    before = path.read_bytes()
    monkeypatch.setattr(os, "replace", lambda *paths: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(UnsupportedError, match=f"got {gpu}: No space left on device; set SAGE_AOT_CALIBRATION"):
        write(FORMER, H100)
    assert path.read_bytes() == before and list(gpu.iterdir()) == [path]


def test_a_folder_that_cannot_be_made(gpu, monkeypatch):
    (gpu / "file").write_text("")
    monkeypatch.setenv("SAGE_AOT_CALIBRATION", str(gpu / "file" / "folder"))
    with pytest.raises(UnsupportedError, match="expected a folder that can be written, got .*file/folder: Not a dir"):
        write(MEASURED, H100)
    assert chosen(0)[:2] == built_in((9, 0))


@pytest.mark.parametrize(("platform", "variables", "expected"), [
    ("linux", {"XDG_CONFIG_HOME": "/xdg"}, "/xdg/sage_aot/calibration"),
    ("linux", {}, "/somewhere/.config/sage_aot/calibration"),
    ("linux", {"XDG_CONFIG_HOME": "relative"}, "/somewhere/.config/sage_aot/calibration"),
    ("linux", {"SAGE_AOT_CALIBRATION": "/here", "XDG_CONFIG_HOME": "/xdg"}, "/here"),
    ("linux", {"SAGE_AOT_CALIBRATION": ""}, "/somewhere/.config/sage_aot/calibration"),
    ("linux", {"SAGE_AOT_CALIBRATION": "0"}, None), ("win32", {"APPDATA": "/appdata"}, "/appdata/sage_aot/calibration"),
    ("win32", {}, None)])
def test_the_folder(monkeypatch, platform, variables, expected):
    for name in ("XDG_CONFIG_HOME", "APPDATA", "SAGE_AOT_CALIBRATION"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/somewhere", **variables}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "platform", platform)
    assert folder() == (None if expected is None else Path(expected))


def test_the_driver_has_a_version(monkeypatch):
    def nvml(answer, start=0):
        def version(text, length):
            text.value = b"580.159.04"
            return answer
        return SimpleNamespace(nvmlInit_v2=lambda: start, nvmlSystemGetDriverVersion=version, nvmlShutdown=lambda: 0)

    monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: 13000, raising=False)
    for library, expected in ((nvml(0), "580.159.04"), (nvml(9), "for CUDA 13000"), (nvml(0, 9), "for CUDA 13000")):
        monkeypatch.setattr(_calibration, "driver_library", lambda name, library=library: library)
        assert _calibration.driver_version() == expected
    monkeypatch.setattr(_calibration, "driver_library", lambda name: (_ for _ in ()).throw(OSError("no such file")))
    assert _calibration.driver_version() == "for CUDA 13000"


# --- the command and the policy ---------------------------------------------------------------------------------------


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["sage-aot", *arguments])
    return cli.main()


@pytest.fixture
def command(monkeypatch, gpu):
    model = Model(torchs=700e6)
    def measure(shape):
        assert _policy.current().when == "possible" and torch.is_inference_mode_enabled()
        return model(shape)

    for name, value in {"check_gpu": lambda: None, "measure_call": measure,
                        "measure_flash": lambda corner: corner.headdim == 32}.items():
        monkeypatch.setattr(calibrate, name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    yield gpu
    monkeypatch.undo()  # before torch.compiler.reset asks


def test_the_command_writes_what_the_policy_reads(monkeypatch, command, capsys, tmp_path):
    times = tmp_path / "times.json"
    assert run(monkeypatch, "calibrate", "--json", str(times)) == 0
    said, bar = capsys.readouterr()
    path = next(command.glob("NVIDIA*.json"))
    assert f"- GPU: {H100}" in said and "- thresholds of before: built in, measured on an H200" in said
    assert said.rstrip().endswith(f"wrote {path}") and "| full | 128 | 2,771 |" in said
    assert "  0%" in bar and " 90%" in bar and "[" not in bar.split("%")[0]
    held = json.loads(times.read_text())
    assert len(held["flash"]) == len(corners()) and held["machine"] == H100._asdict() and held["rows"]
    assert chosen(0).source == f"measured by sage-aot calibrate, {path}"
    assert chosen(0).thresholds.flash == {corner for corner in corners() if corner.headdim == 32}

    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda self: 0)
    monkeypatch.setattr(torch, "_scaled_dot_product_flash_attention", lambda q, k, v, scale: ("flash",))
    q = torch.empty(8, 96, 128, 32, dtype=torch.bfloat16)
    with use(Policy()), torch.inference_mode():
        assert integration.sdpa(q, q, q) == "flash" and report() == {SLOWER: 1}
    _policy.learned.clear()

    assert run(monkeypatch, "calibrate") == 0
    said = capsys.readouterr().out
    assert f"- thresholds of before: measured by sage-aot calibrate, {path}" in said and " *" not in said


def test_a_file_that_is_not_taken_is_said_and_replaced(monkeypatch, command, capsys):
    path = write(MEASURED, H100)
    path.write_text("{}")
    assert run(monkeypatch, "calibrate") == 0
    assert f"- not taken: {path} is damaged" in capsys.readouterr().out
    assert read(path, H100) == chosen(0).thresholds


@pytest.mark.parametrize(("variables", "arguments", "message"), [
    ({"SAGE_AOT_CALIBRATION": "0"}, [], "calibrate: expected a folder for the thresholds"),
    ({}, ["--json", "/missing/folder/file"], "calibrate: expected a file in a folder that exists")])
def test_what_cannot_be_written_is_said_before_the_work(monkeypatch, command, capsys, variables, arguments, message):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(calibrate, "measure_call", lambda shape: pytest.fail("it was measured"))
    assert run(monkeypatch, "calibrate", *arguments) == 1
    assert message in capsys.readouterr().err


def test_calibration_needs_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run(monkeypatch, "calibrate") == 1
    assert "calibrate: expected a CUDA GPU, torch" in capsys.readouterr().err


def test_info_says_which_thresholds_hold(monkeypatch, gpu, capsys):
    monkeypatch.setattr(cli, "info", lambda: "the rest")
    run(monkeypatch, "info")
    assert capsys.readouterr().out == "the rest\ncuda:0: thresholds of the policy: built in, measured on an H200\n"
    path = write(MEASURED, H100)
    run(monkeypatch, "info")
    assert f"thresholds of the policy: measured by sage-aot calibrate, {path}\n" in capsys.readouterr().out
    path.write_text("{}")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(monkeypatch, "info")
    said = capsys.readouterr().out
    assert "policy: built in, measured on an H200\n  not taken: " in said and "run `sage-aot calibrate`" in said


def test_the_table_of_changes():
    lines = "\n".join(changes(FORMER, MEASURED)).splitlines()
    assert "| full | 128 | 2,771 | 2,771 |" in lines and "| causal | 128 | 2,704 | 2,704 |" in lines
    assert "| padded | 256 | 625 | never * |" in lines
    changed = [line for line in lines if line.endswith("* |")]
    assert len(changed) == 2 and changed[0].startswith("| full | 64 | ")
    assert lines[-1].endswith(f"at 1 corners of the grid, 1 of them new; {len(FORMER.flash)} of before are gone")


@pytest.mark.parametrize("tty", [False, True])
def test_the_bar_reaches_its_end(monkeypatch, capsys, tty):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: tty, raising=False)
    bar = Progress(40)
    for step in range(40):
        bar.step(f"shape {step}")
    bar.end()
    said = capsys.readouterr().err
    if tty:
        assert said.count("\r[") == 40 and "[" + 39 * "#" + " ]  98%  shape 39" in said and said.endswith("\r")
    else:
        assert said.splitlines()[0] == "  0%  shape 0" and len(said.splitlines()) == 10
