"""``sage-aot verify`` finds every kind of damage to an installation, and wrong kernels.

The emulation on the CPU runs instead of a GPU's kernels. Tests that must fail make the emulation wrong.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import re
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from records import manifest_of, record_of

from sage_aot._backends.emulation.backend import EmulationBackend
from sage_aot._backends.loader import Library
from sage_aot._call.backends import default_library
from sage_aot._cli import main as cli
from sage_aot._kernels.manifest import FILE_NAME
from sage_aot._kernels.spec import AttnSpec
from sage_aot._launch.choose import Gpu
from sage_aot._tools import verify as verifying
from sage_aot.errors import LaunchError, UnsupportedError

ATTN = AttnSpec("sm80", 64, "int8", "f16", "f32", "exp2", "causal", "vraw", "qraw")


def write_folder(folder, *archs, **changes):
    """Write a folder with one attention kernel an arch, and its companions."""
    folder.mkdir(exist_ok=True)
    records = []
    for arch in archs:
        attn = dataclasses.replace(ATTN, arch=arch)
        for spec in (attn, *map(attn.companion, ("pack", "quant", "merge"))):
            image = spec.name.encode()
            records.append(record_of(spec, sha256=hashlib.sha256(image).hexdigest()))
            (folder / records[-1].file).write_bytes(image)
    manifest = manifest_of(records, **changes)
    (folder / FILE_NAME).write_bytes(manifest.to_text().encode())
    return manifest


@pytest.fixture
def folder(tmp_path, monkeypatch):
    write_folder(tmp_path / "kernels", "sm80", "sm89")
    monkeypatch.setenv("SAGE_AOT_KERNELS", str(tmp_path / "kernels"))
    return tmp_path / "kernels"


def verify(capsys, *arguments):
    """Exit code and what was printed."""
    sys_argv, sys.argv = sys.argv, ["sage-aot", "verify", *arguments]
    try:
        code = cli.main()
    finally:
        sys.argv = sys_argv
    return code, capsys.readouterr().out


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_folder_as_it_was_built(folder, capsys):
    code, text = verify(capsys, "--files")
    assert code == 0
    assert f"kernels  ok     {folder}: the manifest's seal holds, 8 files as in it\n" in text
    assert text.endswith("verified: the files are right; no kernel was run, as asked\n")


def test_what_this_tree_holds(capsys):
    assert verify(capsys, "--files")[0] == 0


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


CUBIN = f"{ATTN.name}.cubin"

DAMAGE = {
    "a bit": (lambda folder: flip(folder / CUBIN), f"the cubin of {ATTN.name} is damaged"),
    "truncated": (lambda folder: (folder / CUBIN).write_bytes((folder / CUBIN).read_bytes()[:-1]), "is damaged"),
    "deleted": (lambda folder: (folder / CUBIN).unlink(), f"the cubin of {ATTN.name} is missing"),
    "two kernels swapped": (lambda folder: swap(folder / CUBIN, folder / CUBIN.replace("sm80", "sm89")), "is damaged"),
    "edited manifest": (lambda folder: edit(folder / FILE_NAME, '"threads": 128.0', '"threads": 256.0'),
                        "it was edited or damaged"),
    "edited sha256": (lambda folder: edit(folder / FILE_NAME, hashlib.sha256(ATTN.name.encode()).hexdigest(), "0" * 64),
                      "it was edited or damaged"),
    "no manifest": (lambda folder: (folder / FILE_NAME).unlink(), "manifest.json is missing"),
    "another version's manifest": (lambda folder: write_folder(folder, "sm80", "sm89", version="0.0.9"),
                                   "holds kernels of another sage_aot"),
    "another version's kernel as well": (lambda folder: (folder / "sage_attn_sm70.cubin").write_bytes(b"old"),
                                        "sage_attn_sm70.cubin is not in the manifest: it is left of another version"),
    "a manifest of fewer kernels": (lambda folder: write_folder(folder, "sm80"), "is not in the manifest"),
}


def swap(a, b):
    one, other = a.read_bytes(), b.read_bytes()
    a.write_bytes(other), b.write_bytes(one)


def edit(path, old, new):
    data = path.read_bytes()
    assert old.encode() in data
    path.write_bytes(data.replace(old.encode(), new.encode(), 1))


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("arguments", [(), ("--files",)], ids=str)
def test_damage_is_found(folder, capsys, damage, arguments):
    work, message = DAMAGE[damage]
    work(folder)
    code, text = verify(capsys, *arguments)
    assert code == 1
    assert "FAILED" in text and message in text and re.search(r"FAILED: \d+ problems?\n$", text)


# --- the wheel's RECORD -----------------------------------------------------------------------------------------------


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Makes a site-packages folder with this package as a wheel installs it; returns the package's folder."""
    site = tmp_path / "site"
    package = site / "sage_aot"
    package.mkdir(parents=True)
    info = site / "sage_aot-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.4\nName: sage-aot\nVersion: 0.1.0\n")
    lines = []
    for name in ("__init__.py", "errors.py", "kernels/manifest.json"):
        path = package / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"# {name}\n")
        digest = base64.urlsafe_b64encode(hashlib.sha256(path.read_bytes()).digest()).rstrip(b"=").decode()
        lines.append(f"sage_aot/{name},sha256={digest},{path.stat().st_size}\n")
    (info / "RECORD").write_text("".join(lines) + "sage_aot-0.1.0.dist-info/RECORD,,\n")
    monkeypatch.syspath_prepend(str(site))
    return package


def record_problems(package):
    return list(verifying.record_problems(verifying.recorded_files(package)))


def test_a_wheels_files_are_compared_with_its_record(installed):
    assert len(verifying.recorded_files(installed)) == 3 and record_problems(installed) == []
    (installed / "errors.py").write_text("# edited\n")
    (installed / "__init__.py").unlink()
    missing, changed = record_problems(installed)
    assert missing == f"{installed / '__init__.py'} is missing; reinstall sage-aot"
    path, said = changed.split(" has sha256 ")
    assert path == str(installed / "errors.py") and re.match(r"\S+, the wheel's RECORD says \S+: it was changed", said)


def test_a_manifest_that_was_edited_and_sealed_anew_is_not_the_wheels(installed):
    write_folder(installed / "kernels", "sm80")
    assert [problem.split()[0] for problem in record_problems(installed)] == [str(installed / "kernels/manifest.json")]


def test_another_copy_of_the_package_is_not_the_wheels(installed, tmp_path):
    copy = shutil.copytree(installed, tmp_path / "tree" / "sage_aot")
    assert not verifying.recorded_files(copy)


# --- GPUs -------------------------------------------------------------------------------------------------------------


class Emulated:
    """Replaces CudaBackend: the calls that it prepares run `run` on the CPU."""

    def __init__(self, library, arch, run):
        self.manifest, self._arch, self._run = library.manifest, arch, run

    def arch(self, device):
        return self._arch

    def splits(self, problem, kernels, device):
        return 3 if problem.seqlen_kv > 2000 else 1

    def bind(self, plan, given, out):
        return SimpleNamespace(plan=plan, run=lambda *arguments: self._run(plan, self.manifest, *arguments))

    def kept_bytes(self, plan):
        return EmulationBackend(self.manifest).kept_bytes(plan)


@pytest.fixture
def gpu(monkeypatch):
    """A GPU that runs the emulation; `run` is what it runs."""
    found = SimpleNamespace(gpus=[Gpu((8, 9), 13000, "NVIDIA L4")], run=emulate,
                            loads=lambda record, entry: None)
    driver = SimpleNamespace(name="cupy", version="14.2.0", cuda=13000)
    on_device = verifying.self_test
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(found.gpus))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(verifying, "self_test", lambda library, record, device, seed: (
        on_device(library, record, "cpu", seed)))
    monkeypatch.setattr(verifying, "gpu_here", lambda device: found.gpus[device])
    monkeypatch.setattr(verifying, "default_driver", lambda: driver)
    monkeypatch.setattr(verifying, "CudaBackend", lambda library, arch: Emulated(
        library, arch, lambda *arguments: found.run(*arguments)))
    monkeypatch.setattr(Library, "load", lambda library, record, entry, device: found.loads(record, entry))
    return found


def emulate(plan, manifest, given, out, lse, workspace):
    assert all(written is None or written.isnan().all() for written in (out, lse)) and (workspace == 0xFF).all()
    assert workspace.numel() == plan.workspace_bytes
    assert plan.problem.part != "kv" or (given.kept == 0xFF).all()
    EmulationBackend(manifest).bind(plan, given, out)(given, out, lse)


def test_every_kernel_that_a_gpu_takes_is_loaded_and_run(folder, gpu, capsys):
    """Every entry point is loaded, also of kernels of older chips, which a call would not choose."""
    loaded = []
    gpu.loads = lambda record, entry: loaded.append(entry)
    code, text = verify(capsys, "--seed", "5")
    specs = [spec for arch in ("sm80", "sm89") for attn in [dataclasses.replace(ATTN, arch=arch)]
             for spec in (attn, *map(attn.companion, ("pack", "quant", "merge")))]
    assert code == 0 and sorted(loaded) == sorted(entry for spec in specs for entry in spec.entries)
    assert "cuda:0   NVIDIA L4, compute capability 8.9, driver for CUDA 13.0\n" in text
    assert "ok     cupy 14.2.0 (driver for CUDA 13.0) loads all 8 files that this GPU can take\n" in text
    assert "seed 5; " in text
    for arch in ("sm80", "sm89"):
        assert f"ok     {dataclasses.replace(ATTN, arch=arch).name}  0.00\n" in text
    assert text.endswith("verified: the files are right, 2 self-tests passed\n")


def test_a_gpu_runs_what_it_takes_and_no_more(folder, gpu, capsys):
    gpu.gpus = [Gpu((8, 6), 13000, "NVIDIA A40"), Gpu((7, 5), 13000, "NVIDIA T4")]
    code, text = verify(capsys)
    assert code == 0 and "verified: the files are right, 1 self-tests passed" in text
    assert "no kernels for this GPU (NVIDIA T4, " in text


def test_without_a_gpu_nothing_is_run_and_that_is_said(folder, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    code, text = verify(capsys)
    assert code == 3
    assert text.splitlines()[-1].startswith("not verified: the files are right, but NOTHING WAS RUN: ")


def test_a_gpu_with_a_driver_that_is_too_old_runs_nothing(folder, gpu, capsys):
    gpu.gpus = [Gpu((8, 9), 11080, "NVIDIA L4")]
    code, text = verify(capsys)
    assert code == 3 and "Update the driver, at least to 525" in text


def test_a_gpu_without_a_loader_fails(folder, gpu, capsys, monkeypatch):
    def missing():
        raise UnsupportedError("neither cupy nor cuda-bindings")

    monkeypatch.setattr(verifying, "default_driver", missing)
    code, text = verify(capsys)
    assert code == 1 and "FAILED neither cupy nor cuda-bindings\n" in text


def test_a_file_that_does_not_load_fails_and_the_others_are_tested(folder, gpu, capsys):
    def load(record, entry):
        if record.spec == ATTN:
            raise LaunchError("CUDA_ERROR_INVALID_IMAGE")

    gpu.loads = load
    code, text = verify(capsys)
    assert code == 1 and "FAILED CUDA_ERROR_INVALID_IMAGE\n" in text
    assert f"ok     {dataclasses.replace(ATTN, arch='sm89').name}" in text


def scaled(plan, manifest, given, out, lse, workspace):
    emulate(plan, manifest, given, out, lse, workspace)
    out[..., 3, :] *= 1.05


def unwritten(plan, manifest, given, out, lse, workspace):
    emulate(plan, manifest, given, out, lse, workspace)
    out[:, :, -1] = torch.nan


def wrong_lse(plan, manifest, given, out, lse, workspace):
    emulate(plan, manifest, given, out, lse, workspace)
    lse += 0.01


def not_causal(plan, manifest, given, out, lse, workspace):
    options = dataclasses.replace(plan.problem.options, is_causal=False)
    other = dataclasses.replace(plan, problem=dataclasses.replace(plan.problem, options=options))
    emulate(other, manifest, given, out, lse, workspace)


def raises(*arguments):
    raise RuntimeError("CUDA error: an illegal memory access was encountered\nand advice")


@pytest.mark.parametrize(("wrong", "message"), [
    (scaled, "output, emulation at "), (unwritten, "got nan"), (wrong_lse, "lse, emulation at "),
    (not_causal, "output, emulation at "),
    (raises, "CUDA error: an illegal memory access was encountered\n"),
], ids=lambda value: getattr(value, "__name__", ""))
def test_a_wrong_kernel_fails(folder, gpu, capsys, wrong, message):
    gpu.run = wrong
    code, text = verify(capsys)
    assert code == 1 and text.count(message) == 2  # of both kernels
    assert "FAILED: 2 problems\n" in text


def test_inputs_are_new_in_every_run_and_again_those_of_a_seed(folder, gpu, capsys):
    drawn = []

    def remember(plan, manifest, given, *rest):
        drawn.append(given.q)
        emulate(plan, manifest, given, *rest)

    gpu.run = remember
    seeds = [re.search(r"seed (\d+)", verify(capsys, *arguments)[1])[1] for arguments in ((), (), ("--seed", "9"))]
    assert seeds[0] != seeds[1] and seeds[2] == "9"
    per_run = len(drawn) // 3
    assert not torch.equal(drawn[0], drawn[per_run])
    verify(capsys, "--seed", seeds[0])
    assert torch.equal(drawn[0], drawn[3 * per_run])


def test_every_variant_passes_its_own_emulation(gpu):
    """Shapes and bounds of the self-test fit every variant. The test runs a sample, as each takes half a second."""
    library = default_library()
    for record in library.manifest.every_attention()[::23]:
        assert verifying.self_test(library, record, "cpu", 3) == verifying.Outcome(0.0, None)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_inputs_do_not_depend_on_the_default_dtype(gpu, dtype, default_dtype):
    library = default_library()
    record = next(record for record in library.manifest.every_attention() if record.spec.mask == "sparse")
    default_dtype(dtype)
    assert verifying.self_test(library, record, "cpu", 3) == verifying.Outcome(0.0, None)


@pytest.mark.kernels("sm90")
@pytest.mark.parametrize(("p", "with_lse"), [("exp2", {True}), ("linear", {True, False})])
def test_a_linear_p_is_tested_in_calls_without_a_log_sum_exp(gpu, p, with_lse):
    library, asked = default_library(), set()

    def remember(plan, manifest, given, out, lse, workspace):
        if plan.problem.part != "kv":
            asked.add(lse is not None)
        emulate(plan, manifest, given, out, lse, workspace)

    gpu.run = remember
    record = next(record for record in library.manifest.attention("sm90")
                  if (record.spec.headdim, record.spec.p, record.spec.mask) == (64, p, "causal"))
    assert verifying.self_test(library, record, "cpu", 3).failure is None and asked == with_lse


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_exits_with_the_code(folder):
    command = [sys.executable, "-m", "sage_aot", "verify", "--files"]
    root = Path(__file__).parents[2]
    assert subprocess.run(command, cwd=root, check=False, capture_output=True).returncode == 0
    flip(folder / CUBIN)
    assert subprocess.run(command, cwd=root, check=False, capture_output=True).returncode == 1
    assert subprocess.run([*command, "--what"], cwd=root, check=False, capture_output=True).returncode == 2
