"""The recipe of the conda package, ci/conda/recipe.yaml: filled in for an sdist, and tried.

    python ci/conda_recipe.py fill dist/X.tar.gz GITHUB_NAME FOLDER    as conda-forge takes it, with its script
    python ci/conda_recipe.py try dist/X.tar.gz FOLDER --archs sm89    the package, and its tests, with no channel

`try` needs py-rattler-build, py-rattler and wheel. They build, solve and test against a channel that this script makes
of this Python and its packages, which must be those that the recipe names. Linux only."""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import platform
import re
import shutil
import sys
import tempfile
from importlib.metadata import distribution, version
from pathlib import Path
from typing import Any

import yaml
from test_wheel import package_folders
from wheels import WheelError

CONDA = Path(__file__).resolve().parent / "conda"

DISTRIBUTIONS = {"pytorch": "torch", "cuda-nvrtc": "nvidia-cuda-nvrtc-cu12", "cuda-nvdisasm": "nvidia-cuda-nvdisasm"}
"""Names on PyPI of conda's packages, where they differ."""

FILES = {"cuda-nvrtc": ("lib", r"libnvrtc.*\.so\..*"), "cuda-nvdisasm": ("bin", "nvdisasm"), "ninja": ("bin", "ninja")}
"""Per package whose files the build names, their folder and names; Python imports the others."""


def filled(sdist: Path, maintainer: str) -> str:
    """The recipe for an sdist, without the comments; WheelError where the file is no sdist of sage-aot."""
    match = re.fullmatch(r"sage_aot-([0-9][\w.]*)\.tar\.gz", sdist.name)
    if match is None:
        raise WheelError(f"expected an sdist sage_aot-VERSION.tar.gz, got {sdist}")
    text = (CONDA / "recipe.yaml").read_text("utf-8")
    text = "".join(line for line in text.splitlines(keepends=True) if not line.startswith("#"))
    for name, value in (("VERSION", match[1]), ("SHA256", hashlib.sha256(sdist.read_bytes()).hexdigest()),
                        ("MAINTAINER", maintainer)):
        text = text.replace(name, value)
    return text


def fill(sdist: Path, maintainer: str, out: Path) -> None:
    """Write the recipe for an sdist, and its script, to a folder."""
    text = filled(sdist, maintainer)
    out.mkdir(parents=True, exist_ok=True)
    (out / "recipe.yaml").write_text(text, "utf-8", newline="\n")
    shutil.copy(CONDA / "build.sh", out)


def tried(sdist: Path, out: Path, archs: str) -> list[str]:
    """Build the package of an sdist into a folder, with the kernels of some archs, and run its tests. Return what was
    printed, and the package's path. WheelError where a test fails."""
    import rattler_build

    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        path = folder / "recipe" / "recipe.yaml"  # the package keeps a copy of that folder
        fill(sdist, "nobody", path.parent)
        recipe = yaml.safe_load(path.read_text("utf-8"))
        channel = borrowed(recipe["requirements"], folder / "channel")
        localize(recipe, sdist, folder, archs)
        path.write_text(yaml.safe_dump(recipe, sort_keys=False), "utf-8")
        rendered, = rattler_build.Stage0Recipe.from_file(path).render()
        built = rendered.run_build(output_dir=out, channels=[channel])
        results = rattler_build.Package.from_file(built.packages[0]).run_tests(channel=[channel])
    lines = [*built.log, *(results[-1].output if results else [])]
    if not results or not all(result.success for result in results):
        raise WheelError("\n".join([*lines, f"expected the tests of {built.packages[0]} to pass, got the above"]))
    return [*lines, str(built.packages[0])]


def localize(recipe: dict[str, Any], sdist: Path, folder: Path, archs: str) -> None:
    """Change a recipe to what is here: the sdist, this Python's version, ninja's module; and narrow it to archs, of
    which kernels that were compiled before are taken."""
    import ninja

    syntax = folder / "ninja_source" / "ninja-upstream" / "misc"
    syntax.mkdir(parents=True)
    shutil.copy(Path(ninja.__file__).with_name("ninja_syntax.py"), syntax)
    ours, of_ninja = recipe["source"]
    ours["url"] = sdist.resolve().as_uri()
    recipe["source"][1] = {"path": str(syntax.parents[1]), "target_directory": of_ninja["target_directory"]}
    recipe["context"]["python_min"] = ".".join(platform.python_version_tuple()[:2])
    kept = os.environ.get("SAGE_AOT_CACHE", str(Path.home() / ".cache" / "sage_aot"))
    recipe["build"]["script"]["env"] = {"SAGE_AOT_CACHE": kept, "SAGE_AOT_ARCHS": archs}


def borrowed(requirements: dict[str, list[str]], folder: Path) -> str:
    """Make a channel of stand-ins for what a recipe requires; return its address.

    Python is that of a virtual environment, which finds the packages where they are. Of the others, compilers and other
    programs are links to the installed ones, and the rest have nothing but their name and version.
    """
    import rattler_build
    from rattler.index import index_fs

    subdir = rattler_build.RenderConfig().target_platform

    def stand_in(name: str, number: str, files: Path, *depends: str) -> None:
        rattler_build.assemble_package(name, number, subdir, "0", folder / subdir, files_dir=files, depends=depends,
                                       detect_prefix=False)

    (folder / subdir).mkdir(parents=True)
    stand_in("python", platform.python_version(), _python(folder / "python"))
    required = {spec.split()[0] for kind in ("build", "host", "run") for spec in requirements[kind]}
    for name in sorted(required - {"python"}):
        installed = DISTRIBUTIONS.get(name, name)
        stand_in(name, version(installed).partition("+")[0], _links(name, installed, folder / name),
                 *(["python"] if name not in FILES else []))
    asyncio.run(index_fs(folder))
    return folder.as_uri()


def _python(folder: Path) -> Path:
    """The files of a virtual environment of this Python, which has this Python's packages on its path."""
    interpreter, (major, minor, _) = Path(sys.executable).resolve(), platform.python_version_tuple()
    site = folder / "lib" / f"python{major}.{minor}" / "site-packages"
    for path in (folder / "bin", site):
        path.mkdir(parents=True)
    for name in ("python", f"python{major}.{minor}"):  # the second stands in the first line of commands
        (folder / "bin" / name).symlink_to(interpreter)
    (folder / "pyvenv.cfg").write_text(f"home = {interpreter.parent}\ninclude-system-site-packages = false\n", "utf-8")
    (site / "borrowed.pth").write_text("".join(f"{path}\n" for path in package_folders()), "locale")
    return folder


def _links(name: str, installed: str, folder: Path) -> Path:
    """Links to the files of a distribution that FILES names for a package, or a file that says that there are none."""
    where, pattern = FILES.get(name, ("share", ""))
    (folder / where).mkdir(parents=True)
    for file in distribution(installed).files or ():
        if name in FILES and re.fullmatch(pattern, file.name):
            (folder / where / file.name).symlink_to(Path(file.locate()).resolve())
    if name not in FILES:
        (folder / where / f"{name}.txt").write_text("a stand-in\n", "utf-8")
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description="Fill in the recipe of the conda package, or try it.")
    commands = parser.add_subparsers(required=True, dest="command")
    filling = commands.add_parser("fill")
    filling.add_argument("sdist", type=Path)
    filling.add_argument("maintainer", help="who answers for the package: a name on GitHub")
    filling.add_argument("out", type=Path, help="the folder for the recipe and its script")
    trying = commands.add_parser("try")
    trying.add_argument("sdist", type=Path)
    trying.add_argument("out", type=Path, help="the folder for the package")
    trying.add_argument("--archs", required=True, help="the archs whose kernels are built, such as sm89")
    args = parser.parse_args()
    try:
        if args.command == "fill":
            fill(args.sdist, args.maintainer, args.out)
            print(f"{args.out}: ready")
        else:
            print("\n".join(tried(args.sdist, args.out, args.archs)))
    except WheelError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
