"""A kernel of the Hugging Face hub, by ci/hub.py of this tree's wheels: its files, its check, and its import by the
package `kernels` in processes of their own."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import hub
import pytest
import torch
import wheels
from hub_build import KERNELS, PACKAGE, REPO, VERSION, build, wheels_of
from wheels import Wheel, WheelError

import sage_aot
from sage_aot._tools import reference

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.kernels("sm89")


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A kernel that is right."""
    return build(tmp_path_factory.mktemp("built"))


@pytest.fixture
def copy(built, tmp_path) -> Path:
    """A copy of it, to change."""
    return Path(shutil.copytree(built, tmp_path / "copy", ignore=shutil.ignore_patterns("__pycache__")))


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*")
            if path.is_file() and path.parent.name != "__pycache__"}


def metadata_of(built: Path, backend: str) -> dict:
    return json.loads((built / "build" / f"torch-{backend}" / "metadata.json").read_text())


# --- what is built ----------------------------------------------------------------------------------------------------


def test_the_same_wheels_of_another_platform_and_folder_give_the_same_bytes(built, tmp_path):
    assert files_of(build(tmp_path / "another", platform="win_amd64")) == files_of(built)


def test_a_variant_holds_the_wheels_files(built, tmp_path):
    """Python is the wheel's but for its imports; all else is equal byte for byte."""
    wheel = Wheel(wheels_of(tmp_path)[0])
    expected = {name.removeprefix("sage_aot/"): data for name, data in wheel.files.items()
                if name.startswith("sage_aot/") and name != "sage_aot/py.typed"}
    cuda, cpu = (files_of(built / "build" / f"torch-{backend}") for backend in hub.BACKENDS)
    own = {"__init__.py", "_backends/distribution.py", "flash_attn.py", "sageattention.py", "LICENSE", "metadata.json"}
    left_out = {name for name in expected if name.startswith(hub._LEFT_OUT)} - own
    assert cuda.keys() == expected.keys() - left_out | own
    assert cpu.keys() == {name for name in cuda if not name.endswith((".cubin", ".ptx"))}
    assert {"_cli/main.py", "_backends/cupy_driver.py", "integrations/diffusers.py"} <= left_out
    for name in cuda.keys() - own:
        if not name.endswith(".py"):
            assert cuda[name] == expected[name]
        elif cuda[name] != expected[name]:
            found, lines = (data[name].decode().splitlines() for data in (cuda, expected))
            assert len(found) == len(lines)
            assert all(was.lstrip().startswith("from sage_aot.") and made.lstrip().startswith("from .")
                       for made, was in zip(found, lines) if made != was)
    assert cuda["LICENSE"] == (ROOT / "LICENSE").read_bytes()


def test_metadata_says_what_kernels_reads(built):
    ids = set()
    for backend, suffix in (("cuda", {"archs": ["8.9"]}), ("cpu", {})):
        found = metadata_of(built, backend)
        ids.add(found["id"])
        assert re.fullmatch(rf"_sage_aot_{backend}_[0-9a-f]{{12}}", found["id"])
        assert (found["name"], found["version"], found["license"]) == ("sage-aot", VERSION, "Apache-2.0")
        assert (found["backend"], found["python-depends"]) == ({"type": backend, **suffix}, [])
    assert len(ids) == 2
    card = (built / "build" / "CARD.md").read_text("utf-8")
    assert f'get_kernel("{REPO}", version={VERSION}, ' in card and "license: apache-2.0" in card and "{" not in card


def test_another_file_makes_another_id(built, tmp_path):
    """Two builds never share a namespace of operators."""
    first, second = wheels_of(tmp_path / "dist")
    changed = changed_wheel(first, "sage_aot/errors.py", lambda text: text + "\n")
    hub.build([changed, second], tmp_path / "hub", VERSION, REPO, narrowed=True)
    for backend in hub.BACKENDS:
        assert metadata_of(tmp_path / "hub", backend)["id"] != metadata_of(built, backend)["id"]


@pytest.mark.kernels("ptx80")  # without which 8.7 runs no cubins of 8.0, whatever `kernels` takes for granted
def test_the_capabilities_are_those_that_the_kernels_run_on():
    """Capabilities are as `kernels.get_kernel` compares them with the GPU's."""
    assert hub._capabilities({"kernels": [{"spec": "sage_attn_a", "target": target} for target in (
        "sm_120f", "sm_90a", "sm_80", "compute_80", "sm_80")]}) == ["8.0", "8.0+PTX", "9.0a", "12.0f"]
    archs = pytest.importorskip(KERNELS)
    named = hub._capabilities(json.loads((PACKAGE / "kernels" / "manifest.json").read_text()))
    for capability in [(7, 5), (8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1)]:
        runs = sage_aot.explain(capability=capability, headdim=128).error is None
        assert archs._supports_cuda_capability(named, capability) == runs, capability


def test_the_kernel_has_all_names_of_the_package():
    import hub_package

    assert sorted(hub_package.__all__) == hub_package.__all__
    assert set(sage_aot.__all__) < set(hub_package.__all__)
    assert all(hasattr(hub_package, name) for name in hub_package.__all__)


# --- what is refused --------------------------------------------------------------------------------------------------


def changed_wheel(path: Path, name: str, edit) -> Path:
    """The wheel with an edited file."""
    whole = wheels.opened(path)
    files = {**whole.files, name: edit(whole.files[name].decode()).encode()}
    files[f"{whole.info}RECORD"] = wheels._record(files, whole.info).encode()
    with zipfile.ZipFile(path, "w") as archive:
        for file, data in files.items():
            archive.writestr(file, data)
    return path


def test_a_module_that_imports_what_is_left_out_is_named(tmp_path):
    first, second = wheels_of(tmp_path)
    for line, name in (("from sage_aot._cli.main import main", "sage_aot._cli.main"),
                       ("import sage_aot.errors", "sage_aot.errors"), ("from sage_aot import attn", "sage_aot")):
        changed = changed_wheel(first, "sage_aot/_tools/info.py", lambda text, line=line: f"{line}\n")
        with pytest.raises(WheelError, match=rf"^_tools/info.py, line 1: .*, got an import of {name}; import from "):
            hub.build([changed, second], tmp_path / "hub", VERSION, REPO, narrowed=True)
    assert not (tmp_path / "hub").exists()


def test_wheels_that_are_not_both_there_or_not_right_are_refused(built, tmp_path):
    first, second = wheels_of(tmp_path)
    for alone in (first, second):
        with pytest.raises(WheelError, match=f"expected a wheel of sage-aot and one of .*, got {alone.name}"):
            hub.build([alone], tmp_path / "hub", VERSION, REPO, narrowed=True)
    with pytest.raises(WheelError, match="expected every kernel of the matrix"):
        hub.build([first, second], tmp_path / "hub", VERSION, REPO)
    with pytest.raises(WheelError, match=r"expected a folder without a build, got .*hub.build: delete it"):
        hub.build([first, second], built, VERSION, REPO, narrowed=True)
    assert not (tmp_path / "hub").exists()


def edit_text(path: Path, old: str, new: str) -> None:
    text = path.read_text("utf-8")
    assert text.count(old) == 1
    path.write_text(text.replace(old, new), "utf-8")


def append(path: Path, text: str) -> None:
    path.write_text(path.read_text("utf-8") + text, "utf-8")


def first_cubin(variant: Path) -> Path:
    return min((variant / "kernels").glob("*.cubin"))


@pytest.mark.parametrize(("change", "message"), [
    (lambda cuda, cpu: append(cuda / "errors.py", "#"), "torch-cuda: errors.py: expected a file with the digest"),
    (lambda cuda, cpu: append(cuda / "errors.py", "#"), "errors.py: expected the same in both variants"),
    (lambda cuda, cpu: (cpu / "errors.py").unlink(), "torch-cpu: errors.py: expected a file with the digest"),
    (lambda cuda, cpu: (cpu / "errors.py").unlink(),
     "expected an import of torch, of the standard library, or by a relative name of a module that is there, got ..er"),
    (lambda cuda, cpu: append(cuda / "errors.py", "import numpy.linalg\n"), "got numpy.linalg"),
    (lambda cuda, cpu: append(cuda / "errors.py", "from sage_aot.errors import A\n"), "got sage_aot.errors"),
    (lambda cuda, cpu: append(cuda / "_tools/info.py", "def f():\n    from ... import a\n"), "there, got ..."),
    (lambda cuda, cpu: first_cubin(cuda).write_bytes(b"no kernel"), ".cubin: expected the kernel with sha256"),
    (lambda cuda, cpu: first_cubin(cuda).unlink(), ".cubin: expected the kernel with sha256"),
    (lambda cuda, cpu: shutil.copy(first_cubin(cuda), cpu / "kernels"), "expected the kernel with sha256 None, got"),
    (lambda cuda, cpu: (cuda / "more.so").write_bytes(b""), "torch-cuda: more.so: expected a file that ends in one of"),
    (lambda cuda, cpu: edit_text(cpu / "metadata.json", "_sage_aot_cpu_", "_sage_aot_cpu_0"),
     "torch-cpu: metadata.json: expected id '_sage_aot_cpu_"),
    (lambda cuda, cpu: edit_text(cuda / "metadata.json", '"8.9"', '"9.0"'),
     "torch-cuda: metadata.json: expected backend {'type': 'cuda', 'archs': ['8.9']}, got {"),
    (lambda cuda, cpu: edit_text(cpu / "metadata.json", f'"version": {VERSION}', '"version": 1'),
     f"metadata.json: expected one version, got {VERSION} and 1"),
    (lambda cuda, cpu: shutil.rmtree(cpu), "expected CARD.md, torch-cpu, torch-cuda in"),
    (lambda cuda, cpu: (cpu.parent / "torch213-cpu").mkdir(), "got CARD.md, torch-cpu, torch-cuda, torch213-cpu"),
])
def test_what_is_wrong_with_a_kernel_is_found(copy, change, message):
    change(*(copy / "build" / f"torch-{backend}" for backend in hub.BACKENDS))
    with pytest.raises(WheelError, match=re.escape(message)):
        hub.check(copy)


def test_a_copy_of_a_kernel_is_right(copy):
    hub.check(copy)


def test_what_python_compiled_when_it_was_imported_is_no_part_of_a_kernel(copy):
    compiled = copy / "build" / "torch-cpu" / "__pycache__" / "errors.cpython-311.pyc"
    compiled.parent.mkdir()
    compiled.write_bytes(b"compiled")
    hub.check(copy)


def test_the_commands_print_the_variants_or_what_is_wrong(copy, tmp_path, monkeypatch, capsys):
    def run(*arguments: object) -> int:
        monkeypatch.setattr(sys, "argv", ["hub.py", *map(str, arguments)])
        return hub.main()

    assert run("build", *wheels_of(tmp_path / "dist"), tmp_path / "hub", "--version", VERSION, "--repo", REPO,
               "--narrowed") == 0
    said = capsys.readouterr().out
    assert all(metadata_of(copy, backend)["id"] in said for backend in hub.BACKENDS)
    assert run("check", copy) == 0
    assert capsys.readouterr().out.count("_sage_aot_") == 2
    append(copy / "build" / "torch-cpu" / "errors.py", "#")
    assert run("check", copy) == 1
    assert "torch-cpu: errors.py: expected a file with the digest" in capsys.readouterr().err
    assert run("check", tmp_path / "nothing") == 1


# --- what the package `kernels` imports -------------------------------------------------------------------------------

DRAW = """
import sys, torch
torch.manual_seed(0)
q, k, v = torch.randn(3, 2, 2, 70, 64, dtype=torch.bfloat16)
"""

LOAD = f"""{DRAW}
from pathlib import Path
from kernels import get_local_kernel
kernel = get_local_kernel(Path(sys.argv[1]))
"""


def run(built: Path, program: str, *arguments: object, **environment: str) -> list[str]:
    """The lines that a program prints in a process without a network, where the hub is asked for nothing."""
    pytest.importorskip(KERNELS)
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("SAGE_AOT", "PYTHONPATH"))}
    variables |= {"HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1", **environment}
    done = subprocess.run([sys.executable, "-c", program, str(built), *map(str, arguments)], capture_output=True,
                          text=True, check=False, env=variables, cwd=built)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


ALONE = f"""
import sys
for name in ("sage_aot", "sageattention", "hub_package", "cupy", "cuda"):
    sys.modules[name] = None  # an import of it raises
import socket
def no_network(*arguments):
    raise OSError(f"a connection to {{arguments}}")
socket.socket.connect = socket.getaddrinfo = no_network
{LOAD}
from importlib import import_module
sys.modules["numpy"] = None  # which torch has imported
for file in Path(kernel.__file__).parent.rglob("*.py"):
    import_module(".".join([kernel.__name__, *file.relative_to(Path(kernel.__file__).parent).with_suffix("").parts]))
out, lse = kernel.attn(q, k, v, is_causal=True, return_lse=True)
flash = kernel.flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=True)
sage = kernel.sageattn(q, k, v, is_causal=True)
torch.save([q, k, v, out, lse, flash.transpose(1, 2), sage], sys.argv[2])
print(kernel.__name__)
print(*sorted({{name.split("::")[0] for name in torch._C._dispatch_get_all_op_names() if "sage_aot" in name}}))
print(kernel.info().splitlines()[1])
"""


@pytest.mark.parametrize("backend", hub.BACKENDS)
def test_a_variant_computes_attention_where_nothing_but_torch_can_be_imported(built, tmp_path, backend):
    """Every module of it. The repository's folder is the variant for the CPU where torch has no CUDA."""
    where = built / "build" / "torch-cuda" if backend == "cuda" else built
    name, namespaces, loaders = run(where, ALONE, tmp_path / "out.pt")
    assert name == namespaces == metadata_of(built, backend)["id"]
    assert loaders == "loaders installed: ctypes"
    q, k, v, out, lse, flash, sage = torch.load(tmp_path / "out.pt")
    exact, _ = reference.attention(q, k, v, is_causal=True)
    assert reference.measure(out, exact).cosine > reference.MIN_COSINE
    expected, expected_lse = sage_aot.attn(q, k, v, is_causal=True, return_lse=True)
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
    plain = sage_aot.attn(q, k, v, is_causal=True)
    assert torch.equal(flash, plain) and torch.equal(sage, plain)


DIGESTS = """
import sys
from pathlib import Path
from kernels._rust import Digest, DigestAlgorithm, Metadata
for variant in sorted(Path(sys.argv[1], "build").glob("torch-*")):
    metadata = Metadata.read_from_file(variant / "metadata.json")
    metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))
    print(metadata.id, metadata.name.python_name, metadata.version, metadata.license, metadata.backend.backend_type,
          metadata.backend.archs)
"""


def test_kernels_finds_the_digests_right(built):
    assert run(built, DIGESTS) == [
        f"{metadata_of(built, backend)['id']} sage_aot {VERSION} Apache-2.0 {backend} {archs}"
        for backend, archs in (("cpu", None), ("cuda", ["8.9"]))]


TOGETHER = f"""{LOAD}
import sage_aot
other = get_local_kernel(Path(sys.argv[1], "build", "torch-cuda"))
from torch.utils.flop_counter import FlopCounterMode
modules = kernel, other, sage_aot
outs = [module.attn(q, k, v) for module in modules]
print(*(torch.equal(out, outs[0]) for out in outs[1:]))
for module in modules:
    operators = getattr(torch.ops, module.__name__)
    compiled = torch.compile(lambda *given: module.attn(*given, is_causal=True), backend="aot_eager", fullgraph=True)
    with FlopCounterMode(display=False) as counter:
        module.attn(q, k, v)
    leaf = q.clone().requires_grad_()
    module.train_attn(leaf, k, v).sum().backward()
    print(module.__name__, operators.attn, torch.equal(compiled(q, k, v), module.attn(q, k, v, is_causal=True)),
          torch.equal(torch.vmap(module.attn)(q[None], k[None], v[None])[0], outs[0]), counter.get_total_flops(),
          leaf.grad.isfinite().all().item())
    torch.library.opcheck(operators.attn.default, (q, k, v, *[None] * 4))
try:
    kernel.attn(q, k, v[..., 1:])
except sage_aot.ArgumentError:
    print("an error of another build")
except kernel.ArgumentError:
    print("its own error")
"""


def test_several_builds_and_the_package_are_loaded_at_once(built):
    """Each has its own operators, its own formulas and rules of torch, and its own errors."""
    equal, *lines, error = run(built, TOGETHER, PYTHONPATH=str(PACKAGE.parent))
    names = [metadata_of(built, "cpu")["id"], metadata_of(built, "cuda")["id"], "sage_aot"]
    flops = 2 * 2 * 2 * 2 * 70 * 70 * 64  # multiplications and additions of two products
    assert equal == "True True"
    assert lines == [f"{name} {name}.attn True True {flops} True" for name in names]
    assert error == "its own error"
