"""The build backend: hatchling's, with a config setting, which hatchling itself would ignore.

    pip install . -C archs=sm89,sm90

narrows what is built, as the environment's SAGE_AOT_ARCHS does. :mod:`codegen.hatch_hook` builds the kernels.
"""

from __future__ import annotations

import os
import sys

import hatchling.build

Settings = dict[str, str | list[str]]
"""What a frontend hands on of its command line: one that is given twice is a list."""

_VARIABLES = {"archs": "SAGE_AOT_ARCHS"}
"""Config settings, and the variables of the environment that the hook reads."""


def __getattr__(name: str) -> object:
    """The hooks that take no settings are hatchling's. Which ones it has depends on the frontend."""
    return getattr(hatchling.build, name)


def build_wheel(wheel_directory: str, config_settings: Settings | None = None,
                metadata_directory: str | None = None) -> str:
    """PEP 517; a wheel with the kernels that the settings ask for."""
    _apply(config_settings or {})
    return hatchling.build.build_wheel(wheel_directory)


def build_editable(wheel_directory: str, config_settings: Settings | None = None,
                   metadata_directory: str | None = None) -> str:
    """PEP 660; the kernels go into the source tree."""
    _apply(config_settings or {})
    return hatchling.build.build_editable(wheel_directory)


def _apply(settings: Settings) -> None:
    """Hand the settings on to the hook. A backend's process makes one wheel, so they stay in the environment."""
    for name, value in settings.items():
        if name not in _VARIABLES:
            sys.exit(f"expected a config setting of {', '.join(_VARIABLES)}, got {name!r}")
        os.environ[_VARIABLES[name]] = ",".join(value) if isinstance(value, list) else str(value)
