"""Builds the kernels whenever a wheel, editable or not, is built; hatchling loads this file by its path.

The build runs as a command: hatchling's process stays free of codegen's modules, and what a user sees of a failure is
what ``python -m codegen build`` prints. No wheel is made without its kernels.
"""

from __future__ import annotations

import os
import subprocess
import sys

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class KernelBuildHook(BuildHookInterface):
    """``SAGE_AOT_ARCHS=sm89,sm90`` narrows what is built; pyproject.toml says where the wheel takes it from."""

    def initialize(self, version: str, build_data: dict) -> None:
        command = [sys.executable, "-m", "codegen", "build"]
        archs = os.environ.get("SAGE_AOT_ARCHS")
        if archs:
            command += ["--arch", archs]
        status = subprocess.run(command, cwd=self.root, check=False).returncode
        if status != 0:
            raise RuntimeError(f"expected kernels to package, {' '.join(command)} exited with {status}")
