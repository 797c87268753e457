"""A kernel of the Hugging Face hub, made of the wheels: the folder that `kernels.get_kernel` loads, and its check.

    python ci/hub.py build dist/*.whl hub --version 1 --repo ORG/sage-aot   writes hub/build, then checks it
    python ci/hub.py check hub                                              every file, digest and import

The layout is that of a "torch-noarch" kernel, as version 0.17 of the package `kernels` reads it. A variant for CUDA and
one for the CPU hold the modules of the wheel and of ci/hub_package, their imports made relative; the kernels, or the
manifest alone; and metadata.json. The same wheels give the same bytes. This script imports the standard library alone.
"""

from __future__ import annotations

import argparse
import ast
import base64
import hashlib
import json
import re
import sys
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from wheels import SageattentionWheel, Wheel, WheelError, opened
from wheels import check as check_wheels

NAME = "sage-aot"
"""Name of the kernel, whatever organisation publishes it."""

BACKENDS = ("cuda", "cpu")
"""A variant each."""

_METADATA = "metadata.json"
_MANIFEST = "kernels/manifest.json"
_SUFFIXES = (".py", ".cubin", ".ptx", "/manifest.json", "LICENSE", _METADATA)
_UNIQUE = 12
"""Hex digits of a sha256 that make an id unique."""

_OWN = {"hub_package": "__init__.py", "hub_package.flash_attn": "flash_attn.py",
        "sage_aot._backends.distribution": "_backends/distribution.py"}
"""Modules of ci/hub_package: the name under which sources import each, and its place in a variant."""

_LEFT_OUT = (
    "__init__.py",  # ci/hub_package has one
    "__main__.py", "_cli/", "_tools/verify.py",  # commands
    "_backends/cupy_driver.py", "_backends/bindings_driver.py",  # import more than torch
    "integrations/comfyui.py", "integrations/diffusers.py", "integrations/distributed.py",  # of hosts that take a wheel
    "integrations/transformers.py",
)
"""Modules of the wheel's package that a variant does not have."""


# --- building ---------------------------------------------------------------------------------------------------------


class Module(NamedTuple):
    """A module of a variant."""

    place: PurePosixPath  # within the variant
    source: str


def build(paths: list[Path], folder: Path, version: int, repo: str, narrowed: bool = False) -> None:
    """Write FOLDER/build from the wheels: one of sage-aot or several that hold the same, and that of
    sage-aot-sageattention. WheelError where they are not right."""
    wheel, second = _opened(paths, narrowed)
    if (folder / "build").exists():
        raise WheelError(f"expected a folder without a build, got {folder / 'build'}: delete it")
    license_name = _license(wheel)
    common = {
        **{str(module.place): module.source.encode() for module in _with_relative_imports(_modules(wheel, second))},
        _MANIFEST: wheel.files[f"sage_aot/{_MANIFEST}"],
        "LICENSE": wheel.files[f"{wheel.info}licenses/LICENSE"],
    }
    kernels = {f"kernels/{name}": data for name, data in wheel.kernels().items()}
    for backend, files in (("cuda", {**common, **kernels}), ("cpu", common)):
        _write(folder / "build" / f"torch-{backend}",
               {**files, _METADATA: _metadata(backend, files, version, license_name)})
    card = _own("CARD.md").format(license=license_name.lower(), release=wheel.version, repo=repo, version=version,
                                  capabilities=", ".join(_capabilities(wheel.manifest())))
    _write(folder / "build", {"CARD.md": card.encode()})


def _opened(paths: list[Path], narrowed: bool) -> tuple[Wheel, SageattentionWheel]:
    check_wheels(paths, narrowed)
    wheels = [opened(path) for path in paths]
    first = next((wheel for wheel in wheels if isinstance(wheel, Wheel)), None)
    second = next((wheel for wheel in wheels if isinstance(wheel, SageattentionWheel)), None)
    if first is None or second is None:
        raise WheelError(f"expected a wheel of sage-aot and one of sage-aot-sageattention, got "
                         f"{', '.join(path.name for path in paths)}")
    return first, second


def _license(wheel: Wheel) -> str:
    match = re.search(r"^License-Expression: (\S+)$", wheel.files[f"{wheel.info}METADATA"].decode(), re.MULTILINE)
    if match is None:
        raise WheelError(f"{wheel.path.name}: expected License-Expression in METADATA, got none")
    return match[1]


def _modules(wheel: Wheel, second: SageattentionWheel) -> dict[str, Module]:
    """Every module of a variant, with its source as it is, by the name under which sources import it."""
    modules = {}
    for name, data in wheel.files.items():
        place = name.removeprefix("sage_aot/")
        if name.startswith("sage_aot/") and name.endswith(".py") and not place.startswith(_LEFT_OUT):
            modules[_dotted(PurePosixPath(name))] = Module(PurePosixPath(place), data.decode())
    core = second.files["sageattention/core.py"].decode()
    own = {name: Module(PurePosixPath(place), _own(PurePosixPath(place).name)) for name, place in _OWN.items()}
    return {**modules, **own, "sageattention.core": Module(PurePosixPath("sageattention.py"), core)}


def _own(file: str) -> str:
    return (Path(__file__).with_name("hub_package") / file).read_text("utf-8")


def _dotted(place: PurePosixPath) -> str:
    return ".".join(place.with_suffix("").parts).removesuffix("__init__").removesuffix(".")


def _with_relative_imports(modules: Mapping[str, Module]) -> Iterator[Module]:
    """The modules, each import of one of them made relative. WheelError where one imports what is left out."""
    own = {name.split(".")[0] for name in modules}
    for importer in modules.values():
        lines = importer.source.split("\n")
        for node in _imports(importer.source):
            for name in filter(lambda name: name.split(".")[0] in own, _imported(node)):
                if isinstance(node, ast.Import) or name not in modules:
                    raise WheelError(f"{importer.place}, line {node.lineno}: expected `from X import Y` of a module "
                                     f"that the build has, got an import of {name}; import from another module, or "
                                     f"change _LEFT_OUT in ci/hub.py")
                relative = _relative(modules[name].place, importer.place)
                lines[node.lineno - 1] = lines[node.lineno - 1].replace(f"from {name} ", f"from {relative} ", 1)
        yield importer._replace(source="\n".join(lines))


def _imports(source: str | bytes) -> list[ast.Import | ast.ImportFrom]:
    return [node for node in ast.walk(ast.parse(source)) if isinstance(node, (ast.Import, ast.ImportFrom))]


def _imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    """The modules that a statement imports by absolute names."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module] if node.module and not node.level else []


def _relative(wanted: PurePosixPath, importer: PurePosixPath) -> str:
    """The relative name of a module for another one: ``.._call.api``."""
    package, parts = importer.parent.parts, tuple(filter(None, _dotted(wanted).split(".")))
    shared = next((i for i, (one, other) in enumerate(zip(package, parts)) if one != other),
                  min(len(package), len(parts)))
    return "." * (len(package) - shared + 1) + ".".join(parts[shared:])


def _metadata(backend: str, files: Mapping[str, bytes], version: int, license_name: str) -> bytes:
    """metadata.json of a variant with these other files. The id, of which torch makes the operators' namespace, follows
    from them. Source: "Kernel requirements" in the documentation of huggingface/kernels."""
    digests = {name: base64.b64encode(hashlib.sha256(files[name]).digest()).decode() for name in sorted(files)}
    unique = hashlib.sha256(json.dumps(digests).encode()).hexdigest()[:_UNIQUE]
    values = {
        "name": NAME,
        "id": f"_{NAME.replace('-', '_')}_{backend}_{unique}",
        "version": version,
        "license": license_name,
        "python-depends": [],
        "kernel-depends": [],
        "backend": {"type": backend,
                    **({"archs": _capabilities(json.loads(files[_MANIFEST]))} if backend == "cuda" else {})},
        "digest": {"algorithm": "sha256", "files": digests},
    }
    return (json.dumps(values, indent=2) + "\n").encode()


def _capabilities(manifest: Mapping[str, Any]) -> list[str]:
    """The compute capabilities that the attention kernels were built for, as `kernels` writes them: 8.0 of sm_80, 9.0a
    of sm_90a, 8.0+PTX of compute_80."""
    found = set()
    for target in {record["target"] for record in manifest["kernels"] if record["spec"].startswith("sage_attn_")}:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", target)
        if match is None:
            raise WheelError(f"expected a target such as sm_89, got {target!r}")
        kind, major, minor, suffix = match.groups()
        found.add((int(major), int(minor), f"{suffix}{'+PTX' if kind == 'compute' else ''}"))
    return [f"{major}.{minor}{rest}" for major, minor, rest in sorted(found)]


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


# --- checking ---------------------------------------------------------------------------------------------------------


def check(folder: Path) -> None:
    """WheelError unless FOLDER/build holds both variants, and both are right."""
    expected = {"CARD.md", *(f"torch-{backend}" for backend in BACKENDS)}
    found = {path.name for path in (folder / "build").iterdir()}
    if found != expected:
        raise WheelError(f"expected {', '.join(sorted(expected))} in {folder / 'build'}, got "
                         f"{', '.join(sorted(found)) or 'nothing'}")
    variants = {backend: _read(folder / "build" / f"torch-{backend}") for backend in BACKENDS}
    problems = [f"torch-{backend}: {problem}" for backend, files in variants.items()
                for problem in (*_metadata_problems(backend, files), *_kernel_problems(backend, files),
                                *_file_problems(files), *_import_problems(files))]
    cuda, cpu = ({name: data for name, data in files.items() if name.endswith(".py") or name == _MANIFEST}
                 for files in variants.values())
    problems += [f"{name}: expected the same in both variants" for name in sorted(cuda.keys() | cpu.keys())
                 if cuda.get(name) != cpu.get(name)]
    versions = [json.loads(files[_METADATA])["version"] for files in variants.values()]
    if len(set(versions)) > 1:
        problems.append(f"{_METADATA}: expected one version, got {' and '.join(map(str, versions))}")
    if problems:
        raise WheelError("\n".join(problems))


def _read(variant: Path) -> dict[str, bytes]:
    """The files of a variant, less what Python compiled when it was imported."""
    return {path.relative_to(variant).as_posix(): path.read_bytes() for path in sorted(variant.rglob("*"))
            if path.is_file() and path.parent.name != "__pycache__"}


def _metadata_problems(backend: str, files: Mapping[str, bytes]) -> list[str]:
    """metadata.json where it is not what the other files, its own version and its licence make it."""
    values = json.loads(files[_METADATA])
    others = {name: data for name, data in files.items() if name != _METADATA}
    expected = json.loads(_metadata(backend, others, values["version"], values["license"]))
    problems = [f"{_METADATA}: expected {name} {expected.get(name)!r}, got {values.get(name)!r}"
                for name in sorted((expected.keys() | values.keys()) - {"digest"})
                if expected.get(name) != values.get(name)]
    digests, found = expected["digest"]["files"], values["digest"]["files"]
    return problems + [f"{name}: expected a file with the digest {found.get(name)}, got {digests.get(name)}"
                       for name in sorted(digests.keys() | found.keys()) if digests.get(name) != found.get(name)]


def _kernel_problems(backend: str, files: Mapping[str, bytes]) -> list[str]:
    """Kernels that differ from those of the manifest; for the CPU there are none."""
    records = json.loads(files[_MANIFEST])["kernels"] if backend == "cuda" else []
    hashes = {f"kernels/{record['file']}": record["sha256"] for record in records}
    found = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()
             if name.startswith("kernels/") and name != _MANIFEST}
    return [f"{name}: expected the kernel with sha256 {hashes.get(name)}, got {found.get(name)}"
            for name in sorted(hashes.keys() | found.keys()) if hashes.get(name) != found.get(name)]


def _file_problems(files: Mapping[str, bytes]) -> list[str]:
    return [f"{name}: expected a file that ends in one of {', '.join(_SUFFIXES)}" for name in files
            if not f"/{name}".endswith(_SUFFIXES)]


def _import_problems(files: Mapping[str, bytes]) -> list[str]:
    """Imports of anything but torch, the standard library, and by a relative name a module of the variant."""
    places = {PurePosixPath(name) for name in files if name.endswith(".py")}
    modules = {_dotted(place) for place in places}
    problems = []
    for place in sorted(places):
        for node in _imports(files[str(place)]):
            wrong = [name for name in _imported(node) if name.split(".")[0] not in ("torch", *sys.stdlib_module_names)]
            if isinstance(node, ast.ImportFrom) and node.level and _named(place, node) not in modules:
                wrong = ["." * node.level + (node.module or "")]
            problems += [f"{place}, line {node.lineno}: expected an import of torch, of the standard library, or by a "
                         f"relative name of a module that is there, got {name}" for name in wrong]
    return problems


def _named(importer: PurePosixPath, node: ast.ImportFrom) -> str | None:
    """The module of a relative import, as _dotted() has it; None where it is outside of the variant."""
    package = importer.parent.parts
    if node.level > len(package) + 1:
        return None
    return ".".join([*package[:len(package) - node.level + 1], *filter(None, [node.module])])


def summary(folder: Path) -> str:
    """A line for each variant."""
    lines = []
    for backend in BACKENDS:
        files = _read(folder / "build" / f"torch-{backend}")
        lines.append(f"{folder / 'build' / f'torch-{backend}'}: {len(files)} files, {sum(map(len, files.values()))} "
                     f"bytes, {json.loads(files[_METADATA])['id']}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="Make a kernel of the Hugging Face hub of wheels, or check one.")
    commands = parser.add_subparsers(required=True, dest="command")
    building = commands.add_parser("build")
    building.add_argument("wheels", nargs="+", type=Path, metavar="dist/X.whl")
    building.add_argument("folder", type=Path)
    building.add_argument("--version", type=int, required=True, help="the kernel's major version: its branch is vN")
    building.add_argument("--repo", required=True, metavar=f"ORG/{NAME}", help="where it is published, for the card")
    building.add_argument("--narrowed", action="store_true", help="the wheel may lack kernels of the matrix")
    checking = commands.add_parser("check")
    checking.add_argument("folder", type=Path)
    args = parser.parse_args()
    try:
        if args.command == "build":
            build(args.wheels, args.folder, args.version, args.repo, args.narrowed)
        check(args.folder)
        print(summary(args.folder))
    except (WheelError, OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
