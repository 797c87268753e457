"""Builds the wheels twice and compares the bytes: once from this tree, once from its sdist, unpacked in another folder.

    python ci/reproduce.py dist [--only 'sage_attn_sm90_d64_*']

leaves the wheel of sage-aot, that of sage-aot-sageattention (ci/sageattention) and the sdist in dist/. Build the
kernels of this tree first (python -m codegen build). The other folder compiles all kernels again, and takes none that
were kept (codegen/cache.py). With `--only` it compiles the kernels of that name and their companions alone, which
saves time; its wheel is then packed from the kernels of this tree. This Python's environment must have the extra
`codegen`."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from wheels import Wheel, WheelError, check

ROOT = Path(__file__).resolve().parent.parent
SECOND = Path("ci", "sageattention")
"""Folder of sage-aot-sageattention in a source tree."""

_HOOK = ("import importlib, sys; backend = importlib.import_module(sys.argv[1]); "
         "getattr(backend, sys.argv[2])(sys.argv[3])")


def make(what: str, tree: Path, out: Path, backend: str = "codegen.backend", **environment: str) -> Path:
    """Call a hook of a build backend in a source tree; return the path of the file that the hook makes."""
    out.mkdir(parents=True, exist_ok=True)
    before = set(out.iterdir())
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SAGE_AOT", "PYTHONPATH"))}
    subprocess.run([sys.executable, "-c", _HOOK, backend, what, str(out.resolve())], cwd=tree, check=True,
                   env={**inherited, **environment})
    made = set(out.iterdir()) - before
    if len(made) != 1:
        raise WheelError(f"expected one new file in {out}, got {sorted(path.name for path in made)}: empty the folder")
    return made.pop()


def make_second(tree: Path, out: Path) -> Path:
    """The wheel of sage-aot-sageattention, from a source tree."""
    return make("build_wheel", tree / SECOND, out, backend="hatchling.build")


def unpacked(sdist: Path, folder: Path) -> Path:
    """The source tree of an sdist, in a folder."""
    with tarfile.open(sdist) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # since Python 3.10.12 and 3.11.4
        archive.extractall(folder)
    return folder / sdist.name.removesuffix(".tar.gz")


def rebuilt(tree: Path, wheel: Path, second: Path, only: list[str], folder: Path) -> int:
    """Compile the kernels of an sdist's tree, all or those that patterns name, and pack both wheels there. Return how
    many kernels were compiled. WheelError where one differs from the kernel in `wheel`, or a packed wheel from `wheel`
    or `second`."""
    expected, found = Wheel(wheel).kernels(), compiled(tree, only, folder / "kernels")
    differing = [name for name, data in found.items() if expected[name] != data]
    if differing:
        raise WheelError(f"expected the bytes of {wheel}, got others compiled anew: {', '.join(differing)}")
    kernels = tree / "sage_aot" / "kernels"
    shutil.rmtree(kernels, ignore_errors=True)
    shutil.copytree(ROOT / "sage_aot" / "kernels" if only else folder / "kernels", kernels)
    anew = folder / "anew"
    for first, again in ((wheel, make("build_wheel", tree, anew, SAGE_AOT_PREBUILT="1")),
                         (second, make_second(tree, anew))):
        check([first, again])
        if first.read_bytes() != again.read_bytes():
            raise WheelError(f"expected the bytes of {first}, got others from the sdist: {again.name}")
    return len(found)


def compiled(tree: Path, only: list[str], out: Path) -> dict[str, bytes]:
    """Compile kernels in a source tree into a folder; return the bytes of the cubins and PTX by file name."""
    patterns = [argument for pattern in only for argument in ("--only", pattern)]
    subprocess.run([sys.executable, "-m", "codegen", "build", "--out", str(out), *patterns], cwd=tree, check=True,
                   env={**os.environ, "SAGE_AOT_CACHE": ""})  # else the bytes would be those that are compared
    return {path.name: path.read_bytes() for path in out.iterdir() if path.name != "manifest.json"}


def main() -> int:
    parser = argparse.ArgumentParser(description="Build the wheels twice, in two folders, and compare the bytes.")
    parser.add_argument("out", type=Path, help="a folder for the wheels and the sdist; older ones in it are removed")
    parser.add_argument("--only", action="append", default=[], metavar="PATTERN",
                        help="compile only kernels of such names again, and their companions")
    args = parser.parse_args()
    for old in (*args.out.glob("sage_aot*.whl"), *args.out.glob("sage_aot-*.tar.gz")):
        old.unlink()
    try:
        wheel = make("build_wheel", ROOT, args.out, SAGE_AOT_PREBUILT="1")
        second = make_second(ROOT, args.out)
        sdist = make("build_sdist", ROOT, args.out)
        with tempfile.TemporaryDirectory() as folder:
            count = rebuilt(unpacked(sdist, Path(folder)), wheel, second, args.only, Path(folder))
    except (WheelError, subprocess.CalledProcessError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{wheel} and {second.name}: byte for byte the wheels of {sdist}, of which {count} kernels were compiled "
          f"anew in another folder; payload sha256 {Wheel(wheel).digest()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
