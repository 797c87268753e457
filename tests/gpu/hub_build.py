"""A kernel of the Hugging Face hub from this tree, made by ci/hub.py of wheels that hold some of its kernels."""

from __future__ import annotations

import json
import sys
import zipfile
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import hub
import wheels

import sage_aot
from sage_aot._kernels.manifest import FILE_NAME, sealed_text

ROOT = Path(__file__).parents[2]
PACKAGE = Path(sage_aot.__file__).parent
VERSION, REPO = 7, "an-organisation/sage-aot"
KERNELS = "kernels.archs"
"""A module of the package `kernels`, to ask whether it is installed: tests/sim has a folder of the package's name."""


def of_sm89(kernel: str) -> bool:
    """True where a kernel is one of those that CPU tensors of head dim 64 are emulated by."""
    return "_sm89" in kernel and "_d128" not in kernel and "_d256" not in kernel


def build(folder: Path, keep: Callable[[str], bool] = of_sm89, platform: str = wheels.PLATFORMS[0]) -> Path:
    """Build a kernel in a folder; returns the path that `kernels.get_local_kernel` takes."""
    made = folder / "hub"
    hub.build(wheels_of(folder / "dist", keep, platform), made, VERSION, REPO, narrowed=True)
    return made


def wheels_of(folder: Path, keep: Callable[[str], bool] = of_sm89, platform: str = wheels.PLATFORMS[0]) -> list[Path]:
    """Write both wheels, that of sage-aot with the kernels to keep: as hatchling does, but nothing is compressed."""
    manifest = json.loads((PACKAGE / "kernels" / FILE_NAME).read_text())
    del manifest["sha256"]
    manifest |= {"complete": False, "kernels": [row for row in manifest["kernels"] if keep(row["spec"])]}
    licence = (ROOT / "LICENSE").read_bytes()
    of_package = {f"sage_aot/{path.relative_to(PACKAGE).as_posix()}": path.read_bytes()
                  for path in (*PACKAGE.rglob("*.py"), PACKAGE / "py.typed",
                               *(PACKAGE / "kernels" / row["file"] for row in manifest["kernels"]))}
    first = _wheel(folder, "sage_aot", platform, {**of_package, f"sage_aot/kernels/{FILE_NAME}":
                                                  sealed_text(manifest).encode()}, {"licenses/LICENSE": licence})
    source = ROOT / "ci" / "sageattention" / "sageattention"
    second = _wheel(folder, "sage_aot_sageattention", "any",
                    {f"sageattention/{path.name}": path.read_bytes() for path in source.iterdir() if path.is_file()},
                    {"extra_metadata/LICENSE": licence}, f"Requires-Dist: sage-aot=={sage_aot.__version__}\n")
    return [first, second]


def _wheel(folder: Path, project: str, platform: str, files: dict[str, bytes], of_info: dict[str, bytes],
           more: str = "") -> Path:
    info = f"{project}-{sage_aot.__version__}.dist-info/"
    metadata = (f"Metadata-Version: 2.4\nName: {project.replace('_', '-')}\nVersion: {sage_aot.__version__}\n"
                f"License-Expression: Apache-2.0\n{more}")
    tags = f"Wheel-Version: 1.0\nRoot-Is-Purelib: {str(platform == 'any').lower()}\nTag: py3-none-{platform}\n"
    files = {**files, **{f"{info}{name}": data for name, data in of_info.items()},
             f"{info}METADATA": metadata.encode(), f"{info}WHEEL": tags.encode()}
    files[f"{info}RECORD"] = wheels._record({**files, f"{info}RECORD": b""}, info).encode()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{project}-{sage_aot.__version__}-py3-none-{platform}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


def loaded(variant: Path) -> Any:
    """A variant's module, imported as `kernels` imports it."""
    name = json.loads((variant / "metadata.json").read_text())["id"]
    spec = spec_from_file_location(name, variant / "__init__.py")
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
