"""Wheels and sdists of a small project, by the project's own backend: their contents, that two builds are equal, and
that no wheel is made without its kernels."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import columns
import pytest
import test_wheel
import wheels
from reproduce import make_second
from wheels import SageattentionWheel, Wheel, WheelError

import sage_aot
from codegen.project import ROOT, Project
from sage_aot._kernels.manifest import Manifest

TAGS = {"linux-x86_64": "manylinux_2_17_x86_64", "linux-aarch64": "manylinux_2_17_aarch64", "win-amd64": "win_amd64"}
TAG = f"py3-none-{TAGS[sysconfig.get_platform()]}"
CALL = "import sys; from codegen import backend; print(backend.{}({!r}, {!r}))"


class Tree:
    """A source tree: this project's Python, the small project's matrix and templates."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def build(self, what: str, settings: dict | None = None, **environment: str) -> tuple[Path | None, str]:
        """The file that a hook makes, and what was printed; None where it fails."""
        out = self.root / "dist"
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        inherited = {name: value for name, value in os.environ.items()
                     if not name.startswith(("SAGE_AOT", "PYTHONPATH"))}
        done = subprocess.run([sys.executable, "-c", CALL.format(what, str(out), settings)], cwd=self.root, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
                              env={**inherited, **environment})
        made = list(out.iterdir())
        assert bool(made) == (done.returncode == 0), done.stdout
        return (made[0] if made else None), done.stdout


@pytest.fixture
def tree(tmp_path: Path, project: Project, small: None) -> Callable[[str], Tree]:
    """Make a tree in a folder."""

    def make(name: str) -> Tree:
        root = tmp_path / name
        root.mkdir(parents=True)
        for file in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / file, root)
        for folder, source in (("codegen", ROOT), ("sage_aot", ROOT), ("templates", project.root)):
            shutil.copytree(source / folder, root / folder, ignore=shutil.ignore_patterns("kernels", "__pycache__"))
        shutil.copy(project.matrix, root)
        return Tree(root)

    return make


def manifest_in(wheel: Path, folder: Path) -> Manifest:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return Manifest.read(folder / "sage_aot" / "kernels")


def test_two_wheels_of_two_folders_and_of_the_sdist_are_equal_byte_for_byte(tree, tmp_path):
    first = tree("first")
    wheel, said = first.build("build_wheel")
    assert wheel is not None, said
    data = wheel.read_bytes()
    assert wheel.name.endswith(f"-{TAG}.whl")
    other, _ = tree("another/deeper folder").build("build_wheel")
    assert (other.name, other.read_bytes()) == (wheel.name, data)
    sdist, _ = first.build("build_sdist")
    with tarfile.open(sdist) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # as in ci/reproduce.py
        archive.extractall(tmp_path / "sdist")
    unpacked = next((tmp_path / "sdist").iterdir())
    assert not (unpacked / "sage_aot" / "kernels").exists()
    third, _ = Tree(unpacked).build("build_wheel")
    assert third.read_bytes() == data


def test_what_is_in_a_wheel(tree, tmp_path):
    root = tree("a").root
    wheel, _ = Tree(root).build("build_wheel")
    manifest = manifest_in(wheel, tmp_path / "unpacked")
    assert manifest.complete and len(manifest.kernels) == 8
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        assert {name for name in names if name.startswith("sage_aot/kernels/")} == {
            "sage_aot/kernels/manifest.json", *(f"sage_aot/kernels/{r.file}" for r in manifest.kernels.values())}
        assert not [name for name in names if name.startswith(("codegen", "templates", "tests", "build"))]
        info = next(name for name in names if name.endswith(".dist-info/WHEEL"))
        assert archive.read(info).decode().splitlines()[2:4] == ["Root-Is-Purelib: false", f"Tag: {TAG}"]
        assert not [name for name in names if str(tmp_path).encode() in archive.read(name)]


def deflated(data: bytes, level: int) -> int:
    compressor = zlib.compressobj(level, zlib.DEFLATED, -zlib.MAX_WBITS)
    return len(compressor.compress(data) + compressor.flush())


def test_files_are_as_small_as_zlib_makes_them(wheel, tmp_path):
    other = wheels.retag(wheel, "win_amd64", tmp_path)
    for path in (wheel, other):
        with zipfile.ZipFile(path) as archive:
            files = [(entry.compress_size, archive.read(entry)) for entry in archive.infolist()]
        assert all(size == deflated(data, 9) for size, data in files)
        assert any(size < deflated(data, zlib.Z_DEFAULT_COMPRESSION) for size, data in files)


@pytest.mark.parametrize("how", [{"settings": {"archs": "sm86"}}, {"settings": {"archs": ["sm86"]}},
                                 {"SAGE_AOT_ARCHS": "sm86"}])
def test_a_narrowed_wheel_says_so(tree, tmp_path, how):
    wheel, _ = tree("a").build("build_wheel", **how)
    manifest = manifest_in(wheel, tmp_path / "unpacked")
    assert (manifest.complete, set(manifest.archs), len(manifest.kernels)) == (False, {"sm86"}, 4)


@pytest.mark.parametrize(("how", "message"), [
    ({"SAGE_AOT_ARCHS": "sm75"}, "expected an arch of sm80, sm86, got 'sm75'"),
    ({"SAGE_AOT_ARCHS": ","}, "expected an arch of sm80, sm86, got ''"),
    ({"settings": {"arch": "sm86"}}, "expected a config setting of archs, got 'arch'"),
    ({"SAGE_AOT_ARCHS": "sm86", "SAGE_AOT_PREBUILT": "1"}, "expected SAGE_AOT_PREBUILT or SAGE_AOT_ARCHS, got both"),
    ({"SAGE_AOT_PREBUILT": "1"}, "expected the kernels of this source tree in"),
])
@pytest.mark.parametrize("hook", ["build_wheel", "build_editable"])
def test_what_cannot_be_built_is_one_message_and_no_wheel(tree, how, message, hook):
    wheel, said = tree("a").build(hook, **how)
    assert wheel is None
    assert message in said and "Traceback" not in said
    assert len(said.splitlines()) <= 2, said


def test_kernels_that_do_not_compile_leave_no_wheel(tree):
    made = tree("a")
    template = made.root / "templates" / "attn_mma.cu.jinja"
    template.write_text(template.read_text().replace("kValue", "wrong"))
    wheel, said = made.build("build_wheel")
    assert wheel is None
    assert 'identifier "wrong" is undefined' in said and "no wheel without its kernels" in said


def test_prebuilt_kernels_are_packed_where_they_are_those_of_the_tree(tree, tmp_path):
    """Platforms so pack kernels that one platform has built: no compiler runs."""
    first, second = tree("first"), tree("second")
    wheel, _ = first.build("build_wheel")
    data = wheel.read_bytes()
    kernels = second.root / "sage_aot" / "kernels"
    shutil.copytree(first.root / "sage_aot" / "kernels", kernels)
    packed, said = second.build("build_wheel", SAGE_AOT_PREBUILT="1")
    assert packed.read_bytes() == data
    assert "are those of this source tree" in said and not (second.root / "build" / "nvrtc").exists()
    victim = min(kernels.glob("*.cubin"))
    victim.write_bytes(victim.read_bytes()[:-1])
    packed, said = second.build("build_wheel", SAGE_AOT_PREBUILT="1")
    assert packed is None and f"{victim.stem}: expected sha256" in said


def test_the_extras_name_the_build_systems_tools():
    """An environment for development builds the same wheels as an isolated one."""
    if sys.version_info < (3, 11):
        pytest.skip("tomllib came with 3.11")
    import tomllib

    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert set(settings["build-system"]["requires"]) == set(settings["project"]["optional-dependencies"]["codegen"])


# --- ci/wheels.py -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> dict[str, bytes]:
    """The files of a wheel of the small project's whole matrix, by name; filled by the fixture `wheel`."""
    return {}


@pytest.fixture
def wheel(built, tree) -> Path:
    """A wheel that is right."""
    made = tree("whole")
    dist = made.root / "right"
    if not built:
        path, _ = made.build("build_wheel")
        built[path.name] = path.read_bytes()
    dist.mkdir()
    for name, data in built.items():
        (dist / name).write_bytes(data)
    return next(dist.iterdir())


def changed(wheel: Path, edit: Callable[[dict[str, bytes]], None], sealed: bool = True) -> Path:
    """Another wheel of that name with edited files, and with a RECORD that fits them if `sealed`."""
    whole = wheels.opened(wheel)
    files = dict(whole.files)
    edit(files)
    if sealed:
        files[f"{whole.info}RECORD"] = wheels._record(files, whole.info).encode()
    out = wheel.parent.parent / "changed" / wheel.name
    out.parent.mkdir(exist_ok=True)
    with zipfile.ZipFile(out, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return out


def one(files: dict[str, bytes], part: str) -> str:
    return next(name for name in files if part in name)


def flip(files: dict[str, bytes], part: str) -> None:
    name = one(files, part)
    files[name] = bytes([files[name][0] ^ 1]) + files[name][1:]


def replace(files: dict[str, bytes], part: str, old: str, new: str) -> None:
    name = one(files, part)
    assert old.encode() in files[name]
    files[name] = files[name].replace(old.encode(), new.encode())


def test_a_wheel_that_is_right_passes(wheel, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["wheels.py", "check", str(wheel)])
    assert wheels.main() == 0
    assert f"8 kernels for sm80, sm86; payload sha256 {Wheel(wheel).digest()}" in capsys.readouterr().out


@pytest.mark.parametrize(("edit", "message"), [
    (lambda files: flip(files, "sage_attn_sm80"),
     "sage_attn_sm80_d64_qkint8_pvf16_accf32_full_vraw_qraw.cubin: expected"),
    (lambda files: files.pop(one(files, "sage_quant_sm86")),
     "sage_quant_sm86_d64_qkint8_pvf16.cubin: expected the file with"),
    (lambda files: files.update({"sage_aot/kernels/more.cubin": b""}), "more.cubin: expected the file with sha256"),
    (lambda files: files.pop("sage_aot/py.typed"), "expected sage_aot/py.typed, without which type checkers"),
    (lambda files: replace(files, "WHEEL", "Purelib: false", "Purelib: true"), "expected 'Root-Is-Purelib: false'"),
    (lambda files: replace(files, "WHEEL", "manylinux_2_17", "linux"), "expected 'Tag: py3-none-"),
    (lambda files: replace(files, "manifest.json", '"complete": true', '"complete": false'), "expected every kernel"),
    (lambda files: replace(files, "manifest.json", '"retarget": null', '"retarget": "sm_90"'), "for their own chips"),
    (lambda files: replace(files, "manifest.json", '"sage_attn_', '"sage_quant_'), "expected attention kernels, got"),
    (lambda files: files.update({"sage_aot/noise": os.urandom(wheels.MOST_BYTES)}),
     f"expected less than {wheels.MOST_BYTES} bytes"),
    *((lambda files, name=name: files.update({f"sage_aot/{name}": b""}),
       f"expected a name that Windows takes, got {f'sage_aot/{name}'!r}") for name in (
        "a:b", "what?.py", 'a"b', "a|b", "a/NUL", "aux.py", "com1/a", "Lpt9.x.y", "dot.", "blank /a", "a\x01")),
    (lambda files: files.update({"sage_aot/Errors.py": b""}),
     "expected names that differ by more than case, got sage_aot/errors.py and sage_aot/Errors.py"),
    (lambda files: files.update({f"sage_aot/{'a' * 97}": b""}),
     "expected a name of at most 105 characters, got 106 in"),
])
def test_what_is_wrong_with_a_wheel_is_found(wheel, edit, message):
    with pytest.raises(WheelError, match=re.escape(message)):
        wheels.check([changed(wheel, edit)])


def test_a_record_that_does_not_fit_is_found(wheel):
    with pytest.raises(WheelError, match="expected RECORD to name 'sage_aot/_kernels/spec.py"):
        wheels.check([changed(wheel, lambda files: flip(files, "_kernels/spec.py"), sealed=False)])


def test_wheels_of_platforms_hold_the_same(wheel, tmp_path):
    windows = wheels.retag(wheel, "win_amd64", tmp_path / "retagged")
    assert windows.name == wheel.name.replace(TAG, "py3-none-win_amd64")
    wheels.check([wheel, windows])
    assert Wheel(windows).payload() == Wheel(wheel).payload()
    own = wheels.retag(windows, TAG.removeprefix("py3-none-"), tmp_path / "back")
    assert Wheel(own).files == Wheel(wheel).files
    other = changed(windows, lambda files: flip(files, "_kernels/spec.py"))
    with pytest.raises(WheelError, match=r"_kernels/spec.py: expected the same in .*x86_64.whl and .*win_amd64.whl"):
        wheels.check([wheel, other])
    with pytest.raises(WheelError, match="expected a platform of manylinux_2_17_x86_64, .*, got any"):
        wheels.retag(wheel, "any", tmp_path)


def test_a_release_is_a_wheel_for_every_platform_the_second_wheel_and_the_sdist(wheel, second, tmp_path):
    folder, out = tmp_path / "dist", tmp_path / "release"
    for platform in wheels.PLATFORMS:
        wheels.retag(wheel, platform, folder)
    version = Wheel(wheel).version
    expected = r"expected .*sage_aot-.*\.tar\.gz.* in .*dist for the tag v.*, got sage_"
    (folder / f"sage_aot-{version}.tar.gz").write_bytes(b"")
    with pytest.raises(WheelError, match=expected):
        wheels.release(folder, f"v{version}", out)
    shutil.copy(second, folder)
    wheels.release(folder, f"v{version}", out)
    (folder / f"sage_aot-{version}.tar.gz").unlink()
    with pytest.raises(WheelError, match=expected):
        wheels.release(folder, f"v{version}", out)
    (folder / f"sage_aot-{version}.tar.gz").write_bytes(b"")
    for tag in ("v9.9.9", version):
        with pytest.raises(WheelError, match=f"for the tag {tag}"):
            wheels.release(folder, tag, out)
    victim = folder / wheel.name
    shutil.copy(changed(victim, lambda files: flip(files, "sage_attn_sm80")), victim)
    with pytest.raises(WheelError, match="cubin: expected the file with sha256"):
        wheels.release(folder, f"v{version}", out)


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="sha256sum, with which users check, is of Linux")
def test_sha256sum_reads_the_checksums_of_a_release(wheel, second, tmp_path, monkeypatch, capsys):
    folder, version = tmp_path / "dist", Wheel(wheel).version
    for platform in wheels.PLATFORMS:
        wheels.retag(wheel, platform, folder)
    shutil.copy(second, folder)
    (folder / f"sage_aot-{version}.tar.gz").write_bytes(b"an sdist")
    monkeypatch.setattr(sys, "argv", ["wheels.py", "release", str(folder), f"v{version}", str(tmp_path / "release")])
    assert wheels.main() == 0 and "SHA256SUMS" in capsys.readouterr().out

    def checked() -> tuple[int, list[str]]:
        done = subprocess.run(["sha256sum", "-c", "--strict", tmp_path / "release" / "SHA256SUMS"], cwd=folder,
                              text=True, capture_output=True, check=False)
        return done.returncode, sorted(done.stdout.splitlines())

    names = sorted(path.name for path in folder.iterdir())
    assert len(names) == len(wheels.PLATFORMS) + 2
    assert checked() == (0, [f"{name}: OK" for name in names])
    (folder / names[0]).write_bytes(b"another")
    assert checked() == (1, [f"{names[0]}: FAILED", *(f"{name}: OK" for name in names[1:])])


# --- the wheel of ci/sageattention ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def second(tmp_path_factory) -> Path:
    """The wheel that owns the package sageattention, from this tree."""
    return make_second(ROOT, tmp_path_factory.mktemp("second") / "dist")


def test_the_second_wheel_holds_the_package_and_needs_sage_aot_of_its_version(second, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["wheels.py", "check", str(second)])
    assert wheels.main() == 0
    assert f"{second.name}: {second.stat().st_size} bytes, the package sageattention" in capsys.readouterr().out
    made = SageattentionWheel(second)
    assert made.version == sage_aot.__version__ and second.name == f"{made.project}-py3-none-any.whl"
    source = ROOT / "ci" / "sageattention" / "sageattention"
    for path in source.glob("*.py"):
        assert made.files[f"sageattention/{path.name}"] == path.read_bytes()
    assert made.files[f"{made.info}extra_metadata/LICENSE"] == (ROOT / "LICENSE").read_bytes()
    metadata = made.files[f"{made.info}METADATA"].decode().splitlines()
    required = [line for line in metadata if line.startswith("Requires-Dist")]
    assert required == [f"Requires-Dist: sage-aot=={sage_aot.__version__}"]


def test_the_second_wheel_of_another_folder_is_equal_byte_for_byte(second, tmp_path):
    """Files are as the sdist of sage-aot has them: the folder, the version and the licence."""
    for name in ("ci/sageattention", "sage_aot/_version.py", "LICENSE"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    again = make_second(tmp_path, tmp_path / "dist")
    assert (again.name, again.read_bytes()) == (second.name, second.read_bytes())
    (tmp_path / "sage_aot" / "_version.py").write_text('__version__ = "9.8.7"\n')
    other = SageattentionWheel(make_second(tmp_path, tmp_path / "other"))
    assert other.version == "9.8.7" and other.problems(narrowed=False) == []
    with pytest.raises(WheelError, match=r"expected wheels of one version, got sage_aot_.*, sage_aot_.*-9\.8\.7"):
        wheels.check([second, other.path])


@pytest.mark.parametrize(("edit", "message"), [
    (lambda files: files.pop("sageattention/sm90_compile.py"), "expected the files sage_aot_"),
    (lambda files: files.pop("sageattention/py.typed"), "expected the files sage_aot_"),
    (lambda files: files.update({"sageattention/quant.py": b""}), "expected the files sage_aot_"),
    (lambda files: replace(files, "WHEEL", "Purelib: true", "Purelib: false"), "expected 'Root-Is-Purelib: true'"),
    (lambda files: replace(files, "WHEEL", "none-any", "none-win_amd64"), "expected 'Tag: py3-none-any' in WHEEL"),
    (lambda files: replace(files, "METADATA", "sage-aot==", "sage-aot>="), "expected 'Requires-Dist: sage-aot=="),
    (lambda files: replace(files, "METADATA", "Version: 0", "Version: 7"), "expected 'Version: 0"),
    (lambda files: replace(files, "METADATA", "Name: sage-aot-sageattention", "Name: sageattention"),
     "expected 'Name: sage-aot-sageattention' in METADATA"),
])
def test_what_is_wrong_with_a_second_wheel_is_found(second, edit, message):
    with pytest.raises(WheelError, match=re.escape(message)):
        wheels.check([changed(second, edit)])


def test_a_second_wheels_record_is_compared(second):
    with pytest.raises(WheelError, match="expected RECORD to name 'sageattention/core.py"):
        wheels.check([changed(second, lambda files: flip(files, "core.py"), sealed=False)])


# --- ci/test_wheel.py -------------------------------------------------------------------------------------------------


def test_a_borrowing_environment_sees_all_packages_and_not_the_tree(tmp_path, monkeypatch):
    """Packages may be the environment's, the user's or PYTHONPATH's. The tree is on the path of an editable install."""
    theirs = [tmp_path / "dist-packages", tmp_path / "carried"]
    for folder in theirs:
        folder.mkdir()
    path = [ROOT / "ci", theirs[0], tmp_path / "python311.zip", ROOT, theirs[1]]
    monkeypatch.setattr(sys, "path", [str(folder) for folder in path])
    assert test_wheel.package_folders() == theirs


# --- ci/columns.py ----------------------------------------------------------------------------------------------------


def test_wide_lines_are_named_but_for_tables_commands_and_addresses():
    line = "x" * 121
    document = f"{line}\n| {line}\n```sh\n{line}\n```\nhttps://{line}\n{line[1:]}\n{line}\n"
    assert [found.split(": ")[0] for found in columns.wide_lines("a.md", document)] == ["a.md:1", "a.md:8"]
    assert list(columns.wide_lines("a.cuh", f"| {line}")) == ["a.cuh:1: expected at most 120 columns, got 123"]
