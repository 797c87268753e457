"""Functions on wheels that the scripts of this folder share: reading them, checking them, writing one with another tag.

    python ci/wheels.py check dist/*.whl [--narrowed]      every file, the manifest, the size; equal payloads
    python ci/wheels.py retag dist/X.whl PLATFORM FOLDER   the same wheel for another platform
    python ci/wheels.py release dist v0.1.0 release        a folder for upload: a wheel per platform, the wheel that
                                                           owns the package sageattention, and the sdist; their
                                                           checksums, in release/SHA256SUMS

This script imports the standard library alone: the code that checks a wheel is independent of the code that made it.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import re
import sys
import zipfile
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

MOST_BYTES = 33_000_000  # of a wheel
PLATFORMS = ("manylinux_2_17_x86_64", "manylinux_2_17_aarch64", "win_amd64")
"""Platforms where torch has CUDA. A wheel for any of them holds the same files."""

LONGEST_NAME = 105
"""Longest name of a file in a wheel, folders included: what the 259 characters of a path on Windows leave behind the
longest usual folder of packages, that of Python from Microsoft's store for a user whose name has 20 letters."""

_REFUSED_BY_WINDOWS = re.compile(r"""[<>:"|?*\\\x00-\x1f]                        # signs
                                     | [. ]$                                   # ends
                                     | ^(con|prn|aux|nul|com\d|lpt\d)(\.|$)    # devices, whatever the extension
                                 """, re.VERBOSE | re.IGNORECASE)
"""Matches a part of a path that Windows does not take. Source: "Naming Files, Paths, and Namespaces", Microsoft."""

_KERNELS = "sage_aot/kernels/"
_TYPED = "sage_aot/py.typed"


class WheelError(Exception):
    """Errors of a wheel, a sentence a line."""


class AnyWheel(ABC):
    """One wheel of either distribution, read whole."""

    distribution = ""
    """Name of the distribution, as it stands in the file's name."""

    def __init__(self, path: Path) -> None:
        match = re.fullmatch(rf"({self.distribution}-[0-9][\w.]*)-py3-none-(\w+)\.whl", path.name)
        if match is None:
            raise WheelError(f"{path}: expected a wheel {self.distribution}-VERSION-py3-none-PLATFORM.whl")
        self.path, self.project, self.platform = path, match[1], match[2]
        with zipfile.ZipFile(path) as archive:
            self.entries = archive.infolist()
            self.files = {entry.filename: archive.read(entry) for entry in self.entries}

    @property
    def info(self) -> str:
        """The folder of the metadata."""
        return f"{self.project}.dist-info/"

    @property
    def version(self) -> str:
        return self.project.partition("-")[2]

    def payload(self) -> dict[str, str]:
        """The sha256 of every file by its name, without the files that name the platform."""
        return {name: hashlib.sha256(data).hexdigest() for name, data in sorted(self.files.items())
                if name not in (f"{self.info}WHEEL", f"{self.info}RECORD")}

    def digest(self) -> str:
        """The sha256 of the payload."""
        return hashlib.sha256(json.dumps(self.payload()).encode()).hexdigest()

    def summary(self) -> str:
        return f"{self.path.name}: {self.path.stat().st_size} bytes, {self._content()}; payload sha256 {self.digest()}"

    def problems(self, narrowed: bool) -> list[str]:
        """Everything that is wrong with the wheel, as sentences; `narrowed`: the wheel may lack kernels."""
        return [f"{self.path.name}: {problem}" for problem in (
            *self._metadata_problems(), *self._record_problems(), *self._name_problems(),
            *self._content_problems(narrowed))]

    @abstractmethod
    def _content(self) -> str: ...

    @abstractmethod
    def _metadata_problems(self) -> list[str]: ...

    @abstractmethod
    def _content_problems(self, narrowed: bool) -> list[str]: ...

    def _record_problems(self) -> list[str]:
        """Files that RECORD does not name as they are: every file with its hash, RECORD itself without one."""
        expected, found = _record(self.files, self.info), self.files[f"{self.info}RECORD"].decode()
        return [f"expected RECORD to name {name!r} as it is" for name in sorted(
            set(expected.splitlines()) ^ set(found.splitlines()))]

    def _name_problems(self) -> list[str]:
        """Files that Windows would not unpack, or over each other: the wheels of all platforms hold the same files."""
        alike: dict[str, list[str]] = {}
        for name in self.files:
            alike.setdefault(name.casefold(), []).append(name)
        return [*(f"expected a name that Windows takes, got {name!r}" for name in self.files
                  if any(_REFUSED_BY_WINDOWS.search(part) for part in name.split("/"))),
                *(f"expected a name of at most {LONGEST_NAME} characters, got {len(name)} in {name}"
                  for name in self.files if len(name) > LONGEST_NAME),
                *(f"expected names that differ by more than case, got {' and '.join(names)}"
                  for names in alike.values() if len(names) > 1)]

    def _lacking(self, file: str, *lines: str) -> list[str]:
        """The lines that a file of the metadata lacks."""
        found = self.files[f"{self.info}{file}"].decode().splitlines()
        return [f"expected {line!r} in {file}, got {found}" for line in lines if line not in found]


class Wheel(AnyWheel):
    """A wheel of sage-aot."""

    distribution = "sage_aot"

    def kernels(self) -> dict[str, bytes]:
        """The bytes of the cubins and PTX by file name."""
        return {name.removeprefix(_KERNELS): data for name, data in self.files.items()
                if name.startswith(_KERNELS) and not name.endswith("manifest.json")}

    def manifest(self) -> dict[str, Any]:
        values: dict[str, Any] = json.loads(self.files[f"{_KERNELS}manifest.json"])
        return values

    def _content(self) -> str:
        return f"{len(self.manifest()['kernels'])} kernels for {', '.join(self.manifest()['archs'])}"

    def _metadata_problems(self) -> list[str]:
        size = self.path.stat().st_size
        problems = [] if size < MOST_BYTES else [f"expected less than {MOST_BYTES} bytes, got {size}"]
        if self.platform not in PLATFORMS:
            problems.append(f"expected a platform of {', '.join(PLATFORMS)}, got {self.platform}")
        return problems + self._lacking("WHEEL", "Root-Is-Purelib: false", f"Tag: py3-none-{self.platform}")

    def _content_problems(self, narrowed: bool) -> list[str]:
        manifest = self.manifest()
        hashes = {record["file"]: record["sha256"] for record in manifest["kernels"]}
        found = {name: hashlib.sha256(data).hexdigest() for name, data in self.kernels().items()}
        problems = [f"{name}: expected the file with sha256 {hashes.get(name)}, got {found.get(name)}"
                    for name in sorted(hashes.keys() | found.keys()) if hashes.get(name) != found.get(name)]
        if _TYPED not in self.files:
            problems.append(f"expected {_TYPED}, without which type checkers ignore the annotations, got none")
        if not any(record["spec"].startswith("sage_attn_") for record in manifest["kernels"]):
            problems.append("expected attention kernels, got none")
        if manifest["retarget"] is not None:
            problems.append(f"expected kernels for their own chips, got all for {manifest['retarget']}")
        if not manifest["complete"] and not narrowed:
            problems.append(f"expected every kernel of the matrix, got those of {', '.join(manifest['archs'])} alone")
        return problems


class SageattentionWheel(AnyWheel):
    """The wheel of ci/sageattention, which owns the package sageattention: pure Python, for every platform."""

    distribution = "sage_aot_sageattention"

    def _content(self) -> str:
        return f"the package sageattention over sage-aot {self.version}"

    def _metadata_problems(self) -> list[str]:
        return [*self._lacking("WHEEL", "Root-Is-Purelib: true", "Tag: py3-none-any"),
                *self._lacking("METADATA", "Name: sage-aot-sageattention", f"Version: {self.version}",
                               f"Requires-Dist: sage-aot=={self.version}")]

    def _content_problems(self, narrowed: bool) -> list[str]:
        expected = {f"sageattention/{name}" for name in ("__init__.py", "core.py", "py.typed", "sm90_compile.py")}
        expected |= {f"{self.info}{name}" for name in ("METADATA", "RECORD", "WHEEL", "extra_metadata/LICENSE")}
        return [f"expected the files {', '.join(sorted(expected))}, got {', '.join(sorted(self.files))}"
                ] if expected != self.files.keys() else []


def opened(path: Path) -> AnyWheel:
    return (SageattentionWheel if path.name.startswith(f"{SageattentionWheel.distribution}-") else Wheel)(path)


def check(paths: list[Path], narrowed: bool = False) -> None:
    """WheelError unless every wheel is right, all are of one version, and those of sage-aot hold the same files."""
    wheels = [opened(path) for path in paths]
    problems = [problem for wheel in wheels for problem in wheel.problems(narrowed)]
    if len({wheel.version for wheel in wheels}) > 1:
        problems.append(f"expected wheels of one version, got {', '.join(wheel.path.name for wheel in wheels)}")
    of_platforms = [wheel for wheel in wheels if isinstance(wheel, Wheel)]
    for other in of_platforms[1:]:
        first = of_platforms[0]
        differing = sorted(name for name, _ in first.payload().items() ^ other.payload().items())
        problems += [f"{name}: expected the same in {first.path.name} and {other.path.name}"
                     for name in dict.fromkeys(differing)]
    if problems:
        raise WheelError("\n".join(problems))


def release(folder: Path, tag: str, out: Path) -> Path:
    """Write the checksums of a folder for upload, as sha256sum reads them, to SHA256SUMS in `out`; return its path.
    WheelError unless the folder holds exactly the sdist and the wheels of a tag, and the wheels are right."""
    version = tag.removeprefix("v")
    expected = {f"sage_aot-{version}.tar.gz", f"sage_aot_sageattention-{version}-py3-none-any.whl",
                *(f"sage_aot-{version}-py3-none-{platform}.whl" for platform in PLATFORMS)}
    found = {path.name for path in folder.iterdir()}
    if found != expected or not tag.startswith("v"):
        raise WheelError(f"expected {', '.join(sorted(expected))} in {folder} for the tag {tag}, got "
                         f"{', '.join(sorted(found)) or 'nothing'}")
    check(sorted(folder.glob("*.whl")))
    out.mkdir(parents=True, exist_ok=True)
    sums = out / "SHA256SUMS"
    sums.write_bytes(b"".join(f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n".encode()
                              for name in sorted(found)))
    return sums


def retag(path: Path, platform: str, folder: Path) -> Path:
    """Write a wheel as one for another platform, in one step; the same input gives the same bytes."""
    wheel = Wheel(path)
    if platform not in PLATFORMS:
        raise WheelError(f"expected a platform of {', '.join(PLATFORMS)}, got {platform}")
    name = f"{wheel.info}WHEEL"
    lines = wheel.files[name].decode().splitlines()
    lines = [line for line in lines if not line.startswith("Tag: ")] + [f"Tag: py3-none-{platform}"]
    files = {**wheel.files, name: ("\n".join(lines) + "\n").encode()}
    files[f"{wheel.info}RECORD"] = _record(files, wheel.info, list(wheel.files)).encode()
    folder.mkdir(parents=True, exist_ok=True)
    out = folder / f"{wheel.project}-py3-none-{platform}.whl"
    partial = out.with_suffix(".tmp")
    with zipfile.ZipFile(partial, "w") as archive:
        for entry in wheel.entries:  # with its time and mode
            archive.writestr(entry, files[entry.filename], zipfile.ZIP_DEFLATED, compresslevel=9)
    partial.replace(out)
    return out


def _record(files: dict[str, bytes], info: str, order: list[str] | None = None) -> str:
    """RECORD for these files. Source: "Recording installed projects", packaging.python.org."""
    rows = []
    for name in order or files:
        digest = base64.urlsafe_b64encode(hashlib.sha256(files[name]).digest()).decode().rstrip("=")
        rows.append(f"{name},," if name == f"{info}RECORD" else f"{name},sha256={digest},{len(files[name])}")
    return "\n".join(rows) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description="Check wheels of sage_aot, or write one with another tag.")
    commands = parser.add_subparsers(required=True, dest="command")
    checking = commands.add_parser("check")
    checking.add_argument("wheels", nargs="+", type=Path)
    checking.add_argument("--narrowed", action="store_true", help="they may lack kernels of the matrix")
    retagging = commands.add_parser("retag")
    retagging.add_argument("wheel", type=Path)
    retagging.add_argument("platform", choices=(*PLATFORMS, "same"), help="'same': its own, as a check and a copy")
    retagging.add_argument("folder", type=Path)
    releasing = commands.add_parser("release")
    releasing.add_argument("folder", type=Path)
    releasing.add_argument("tag", metavar="v0.1.0")
    releasing.add_argument("out", type=Path, help="the folder for SHA256SUMS")
    args = parser.parse_args()
    try:
        if args.command == "check":
            check(args.wheels, args.narrowed)
            for wheel in map(opened, args.wheels):
                print(wheel.summary())
        elif args.command == "release":
            sums = release(args.folder, args.tag, args.out)
            print(f"{args.folder}: ready for {args.tag}, with the checksums in {sums}")
        else:
            check([args.wheel], narrowed=True)
            platform = Wheel(args.wheel).platform if args.platform == "same" else args.platform
            print(retag(args.wheel, platform, args.folder))
    except (WheelError, OSError, KeyError, zipfile.BadZipFile) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
