"""Builds the kernels whenever a wheel, editable or not, is built; hatchling loads this file by its path.

The build runs as a command, so hatchling's process does not import codegen's modules, and after a failure the user sees
what ``python -m codegen`` prints. No wheel is made without its kernels.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from typing import Any

from hatchling.builders.config import BuilderConfig
from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_TAGS = {
    "linux-x86_64": "manylinux_2_17_x86_64", "linux-aarch64": "manylinux_2_17_aarch64", "win-amd64": "win_amd64",
}
"""Per platform of this Python, the platform tag of its wheels. Wheels hold no host code, so they run on the oldest
glibc that a manylinux tag names."""


class KernelBuildHook(BuildHookInterface[BuilderConfig]):
    """``SAGE_AOT_ARCHS=sm89,sm90`` builds kernels for these archs alone. ``SAGE_AOT_PREBUILT=1`` packs kernels that
    were built before, after comparing them with this source tree. pyproject.toml names the kernels' folder."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        command = [sys.executable, "-m", "codegen", *_request()]
        status = subprocess.run(command, cwd=self.root, check=False).returncode
        if status != 0:
            sys.exit(f"no wheel without its kernels: {' '.join(command[1:])} exited with {status}, its output is above")
        if version == "standard":
            platform = sysconfig.get_platform()
            build_data["tag"] = f"py3-none-{_TAGS.get(platform, platform.replace('-', '_').replace('.', '_'))}"
            build_data["pure_python"] = False

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Compress the wheel again, 2 % smaller: hatchling has no option for zlib's best."""
        if version == "standard":
            with zipfile.ZipFile(artifact_path) as archive:
                files = [(entry, archive.read(entry)) for entry in archive.infolist()]
            partial = f"{artifact_path}.tmp"
            with zipfile.ZipFile(partial, "w") as archive:
                for entry, data in files:  # with its time and mode
                    archive.writestr(entry, data, zipfile.ZIP_DEFLATED, compresslevel=9)
            os.replace(partial, artifact_path)


def _request() -> list[str]:
    archs = os.environ.get("SAGE_AOT_ARCHS")
    if os.environ.get("SAGE_AOT_PREBUILT") == "1":
        if archs:
            sys.exit(f"expected SAGE_AOT_PREBUILT or SAGE_AOT_ARCHS, got both: {archs!r} cannot narrow what is built")
        return ["verify"]
    return ["build", *(["--arch", archs] if archs else [])]
