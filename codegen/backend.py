"""The build backend: hatchling's, and a config setting that hatchling itself would ignore.

    pip install . -C archs=sm89,sm90

builds kernels for these archs alone, as the environment variable SAGE_AOT_ARCHS does. :mod:`codegen.hatch_hook` builds
the kernels.
"""

from __future__ import annotations

import os
import sys

import hatchling.build

Settings = dict[str, str | list[str]]
"""Config settings as a frontend passes them from its command line; the value of a setting given twice is a list."""

_VARIABLES = {"archs": "SAGE_AOT_ARCHS"}
"""Per config setting, the environment variable that hatch_hook reads."""


def __getattr__(name: str) -> object:
    """Hooks that take no settings are hatchling's. hatchling defines some of them for some frontends only."""
    return getattr(hatchling.build, name)


def build_wheel(wheel_directory: str, config_settings: Settings | None = None,
                metadata_directory: str | None = None) -> str:
    """PEP 517: build a wheel with the kernels that the settings ask for; return its file name."""
    _apply(config_settings or {})
    return hatchling.build.build_wheel(wheel_directory)


def build_editable(wheel_directory: str, config_settings: Settings | None = None,
                   metadata_directory: str | None = None) -> str:
    """PEP 660: build an editable wheel, with the kernels in the source tree; return its file name."""
    _apply(config_settings or {})
    return hatchling.build.build_editable(wheel_directory)


def _apply(settings: Settings) -> None:
    """Pass the settings to hatch_hook through the environment. They stay there: a backend's process makes one wheel."""
    for name, value in settings.items():
        if name not in _VARIABLES:
            sys.exit(f"expected a config setting of {', '.join(_VARIABLES)}, got {name!r}")
        os.environ[_VARIABLES[name]] = ",".join(value) if isinstance(value, list) else str(value)
