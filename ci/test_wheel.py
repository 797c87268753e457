"""Installs a wheel into a fresh environment, away from the source tree, and runs the tests that need no source tree.

    python ci/test_wheel.py dist/X.whl                      torch and pytest as ci/constraints.txt has them
    python ci/test_wheel.py dist/X.whl torch==2.4.1         another torch
    python ci/test_wheel.py dist/X.whl --borrow             this Python's torch, pytest and pytest-xdist: no network
    python ci/test_wheel.py dist/X.whl --borrow --gpu       on a machine with a GPU, its tests too
    python ci/test_wheel.py dist/X.whl --second dist/Y.whl  with the wheel of sage-aot-sageattention, and tests of it

The PATH holds the new environment's Python and no compiler, so tests of torch's inductor, which needs one, are left
out. GPU tests of kernels that only a source tree could build for this GPU are skipped. `--tests` names the test files
to run."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OF_THE_SECOND = [f"tests/integrations/test_sageattention.py::test_{name}" for name in (
    "signatures_are_those_of_sageattention", "the_kernels_arithmetic_is_that_of_attn",
    "packed_sequences_by_the_kernels", "names_that_hosts_look_for")]
"""Calls of each function as installed, for seconds are dear; the whole file runs on the source tree."""


def python_of(folder: Path) -> Path:
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def environment(wheels: list[Path], requirements: list[str], borrow: bool, folder: Path) -> Path:
    """Make a virtual environment with the wheels and what their tests need; return the path of its Python."""
    venv.create(folder, symlinks=os.name != "nt")
    python = python_of(folder)
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q"]  # the new one has no pip
    if borrow:  # by a .pth file: its folders come after the environment's own packages, so the wheel is found first
        subprocess.run([*pip, "--no-index", "--no-deps", *map(str, wheels)], check=True)
        site = subprocess.run([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], check=True,
                              capture_output=True, text=True).stdout.strip()
        Path(site, "borrowed.pth").write_text("".join(f"{path}\n" for path in package_folders()),
                                               "locale")  # as Python up to 3.12 reads it
    else:
        limits = [] if requirements else ["-c", str(ROOT / "ci" / "constraints.txt")]
        subprocess.run([*pip, *limits, *map(str, wheels), "pytest>=8", "pytest-xdist>=3.6",
                        *requirements], check=True)
    return python


def package_folders() -> list[Path]:
    """The folders where this Python finds packages (its environment, the user's folder, PYTHONPATH) without the source
    tree, which an editable install adds. Folders of Python's own library are among them and do no harm: the new
    environment has them already."""
    folders = [Path(path).resolve() for path in sys.path if Path(path).is_dir()]
    return [folder for folder in folders if folder not in (ROOT, ROOT / "ci")]


def run(python: Path, folder: Path, gpu: bool, tests: list[str], packages: list[str]) -> None:
    """Run the package's own check, and its tests, from a folder that holds only the tests and what they need.
    `packages`: those that must be the environment's."""
    for name in ("tests", "ci"):  # without the source of the second wheel
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "sageattention"))
    shutil.copy(ROOT / "pyproject.toml", folder)  # pytest's settings
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("SAGE_AOT", "PYTHONPATH"))}
    variables["PATH"] = str(python.parent)
    where = (f"import {', '.join(packages)}, sys\n"
             f"for package in ({', '.join(packages)},):\n"
             f"    package.__file__.startswith(sys.prefix) or sys.exit(package.__file__)")
    call = ("import sage_aot, torch; q = torch.randn(1, 2, 100, 64).half(); "
            "print(sage_aot.attn(q, q, q, is_causal=True).shape)")
    for command in (["-c", where], ["-c", call], ["-m", "sage_aot", "info"],
                    ["-m", "sage_aot", "verify", *([] if gpu else ["--files"])],
                    ["-m", "pytest", "-q", "-rs", "-m", "not inductor", *tests, *(["tests/gpu"] if gpu else [])]):
        subprocess.run([str(python), *command], cwd=folder, env=variables, check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Test a wheel in a fresh environment, without the source tree.")
    parser.add_argument("wheel", type=Path)
    parser.add_argument("requirements", nargs="*", metavar="torch==2.4.1")
    parser.add_argument("--second", type=Path, metavar="WHEEL", help="the wheel of sage-aot-sageattention")
    parser.add_argument("--borrow", action="store_true", help="use the packages of this Python")
    parser.add_argument("--tests", nargs="+", default=["tests/unit"], metavar="FILE")
    parser.add_argument("--gpu", action="store_true", help="run the tests that need a GPU too")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        try:
            wheels, tests, packages = [args.wheel.resolve()], args.tests, ["sage_aot"]
            if args.second:
                wheels.append(args.second.resolve())
                tests = [*tests, *OF_THE_SECOND]
                packages.append("sageattention")
            python = environment(wheels, args.requirements, args.borrow, Path(folder, "env"))
            Path(folder, "away").mkdir()
            run(python, Path(folder, "away"), args.gpu, tests, packages)
        except subprocess.CalledProcessError as error:
            print(f"{args.wheel}: {' '.join(map(str, error.cmd))} exited with {error.returncode}", file=sys.stderr)
            return 1
    print(f"{args.wheel}: passed away from the source tree")
    return 0


if __name__ == "__main__":
    sys.exit(main())
