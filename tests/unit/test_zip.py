"""The package within a zip file on sys.path, as zipapps and archives of scripts have it."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

import sage_aot
from sage_aot._call.backends import default_library
from sage_aot._kernels.manifest import FILE_NAME

PACKAGE = Path(sage_aot.__file__).parent


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    """The package with the cubin of one kernel, and metadata as an installed wheel has them."""
    path = tmp_path_factory.mktemp("zip") / "all.zip"
    cubin = next(iter(default_library().manifest.kernels.values())).file
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as made:
        for file in (*PACKAGE.rglob("*.py"), PACKAGE / "kernels" / FILE_NAME, PACKAGE / "kernels" / cubin):
            made.write(file, file.relative_to(PACKAGE.parent))
        info = f"sage_aot-{sage_aot.__version__}.dist-info"
        made.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: sage-aot\nVersion: {sage_aot.__version__}\n")
        made.writestr(f"{info}/RECORD", "sage_aot/__init__.py,sha256=47DEQpj8HBSa-_TImW-5JCeuQeRkm5NMpJWZG3hSuFU,0\n"
                                        "sage_aot/gone.py,sha256=47DEQpj8HBSa-_TImW-5JCeuQeRkm5NMpJWZG3hSuFU,0\n")
    return path


def run(archive, program):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SAGE_AOT_")}
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False,
                          cwd=archive.parent, env={**environment, "PYTHONPATH": str(archive)})


def test_a_call_runs(archive):
    program = """
import torch, sage_aot
q, k, v = torch.randn(3, 1, 2, 40, 64, generator=torch.Generator().manual_seed(0))
print(sage_aot.__file__, sage_aot.attn(q, k, v).double().sum().item(), sage_aot.explain(q, k, v).error)
"""
    done = run(archive, program)
    assert done.returncode == 0, done.stderr
    q, k, v = torch.randn(3, 1, 2, 40, 64, generator=torch.Generator().manual_seed(0))
    assert done.stdout.split() == [f"{archive}/sage_aot/__init__.py", str(sage_aot.attn(q, k, v).double().sum().item()),
                                   "None"]


def test_kernels_are_read(archive):
    program = """
from sage_aot._call.backends import default_library
from sage_aot._backends.loader import KERNEL_FOLDER
from sage_aot.errors import CubinError
library = default_library()
first, second, *_ = library.manifest.kernels.values()
print(len(library.read(first)))
try:
    library.read(second)
except CubinError as error:
    print(error)
"""
    done = run(archive, program)
    assert done.returncode == 0, done.stderr
    length, message = done.stdout.splitlines()
    first, second, *_ = default_library().manifest.kernels.values()
    assert int(length) == len(default_library().read(first))
    assert message.startswith(f"the cubin of {second.name} is missing: {archive}/sage_aot/kernels/{second.file}")


def test_damage_within_the_archive_is_refused(archive, tmp_path):
    program = """
from sage_aot._call.backends import default_library
from sage_aot.errors import CubinError
try:
    library = default_library()
    library.read(next(iter(library.manifest.kernels.values())))
except CubinError as error:
    print(error)
"""
    record = next(iter(default_library().manifest.kernels.values()))
    for name, message in ((record.file, f"the cubin of {record.name} is damaged: "),
                          (FILE_NAME, "is not a manifest of this version of sage_aot")):
        damaged = tmp_path / name / "all.zip"
        damaged.parent.mkdir()
        content = bytearray(archive.read_bytes())
        with zipfile.ZipFile(archive) as read:
            entry = read.getinfo(f"sage_aot/kernels/{name}")
        content[entry.header_offset + 30 + len(entry.filename) + entry.compress_size // 2] ^= 0xFF
        damaged.write_bytes(content)
        done = run(damaged, program)
        assert done.returncode == 0, done.stderr
        assert message in done.stdout


def test_verify_and_info_read_it(archive):
    done = run(archive, "from sage_aot._cli.main import main; import sys; sys.argv[1:] = ['verify', '--files']; main()")
    kernels = default_library().manifest.kernels
    assert done.stdout.count("is missing: ") == len(kernels) - 1, done.stderr
    assert f"{archive}/sage_aot/__init__.py has sha256" in done.stdout, "the RECORD within the archive"
    assert f"{archive}/sage_aot/gone.py is missing; reinstall" in done.stdout
    done = run(archive, "import sage_aot; print(sage_aot.info())")
    assert f"in {archive}/sage_aot/kernels" in done.stdout, done.stderr
