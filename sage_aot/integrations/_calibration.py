"""The thresholds that hold on a GPU: those that ``sage-aot calibrate`` measured there, else the built-in ones.

A file holds the thresholds of one GPU with one driver, sage_aot and torch: any of them moves the crossovers. Files lie
in the user's configuration folder, or where SAGE_AOT_CALIBRATION says; ``SAGE_AOT_CALIBRATION=0`` reads none. A process
reads a GPU's file once, at the first call that asks.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import re
import sys
import tempfile
import warnings
from math import inf, isfinite
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sage_aot._kernels.axes import HEADDIMS
from sage_aot._kernels.drivers import driver_library
from sage_aot._version import __version__
from sage_aot.errors import CalibrationWarning, UnsupportedError
from sage_aot.integrations._gain import AXES, KINDS, Corner, Threshold, Thresholds, built_in

VARIABLE = "SAGE_AOT_CALIBRATION"
_FORMAT = 2  # of the kinds that KINDS has
_DIGITS = 12
"""Digits of the sha256 in the name of a file."""


# --- the thresholds of a device ---------------------------------------------------------------------------------------


class Chosen(NamedTuple):
    """The thresholds that hold on a device."""

    thresholds: Thresholds
    source: str  # where they come from, in words
    refused: str | None = None  # why a file was not taken


_chosen: dict[int, Chosen] = {}


def chosen(device: int) -> Chosen:
    """The thresholds of a CUDA device, read once. CalibrationWarning where there is a file, and it is not taken."""
    if device not in _chosen:
        made = _chosen[device] = choose(device)
        if made.refused is not None:
            warnings.warn(f"{made.refused}; until then the policy takes the built-in thresholds. {VARIABLE}=0 silences "
                          f"this", CalibrationWarning, stacklevel=2)
    return _chosen[device]


def choose(device: int) -> Chosen:
    """Look the thresholds of a CUDA device up anew, without a warning."""
    thresholds, source = built_in(torch.cuda.get_device_capability(device))
    home = folder()
    if home is None:
        return Chosen(thresholds, source)
    gpu = torch.cuda.get_device_name(device)
    digest = "[0-9a-f]" * _DIGITS  # and no other name of a GPU that begins alike
    if not (found := sorted(home.glob(f"{_slug(gpu)}-{digest}.json"))):
        return Chosen(thresholds, source)
    machine = Machine.here(device)
    path = home / machine.file
    try:
        if path not in found:
            raise Refused(f"{found[-1]} holds thresholds of this GPU with another driver, torch or sage_aot than "
                          f"{machine}")
        return Chosen(read(path, machine), f"measured by sage-aot calibrate, {path}")
    except Refused as error:
        return Chosen(thresholds, source, f"{error}; run `sage-aot calibrate`")


def threshold_of(device: int, kind: str, headdim: int) -> tuple[float, float]:
    """The threshold of calls of a kind and a kernel's head dim on a CUDA device."""
    return chosen(device).thresholds.calls[kind, headdim]


threshold_of._dynamo_marked_constant = True  # type: ignore[attr-defined]  # it follows from no tensor


# --- whose they are ---------------------------------------------------------------------------------------------------


class Machine(NamedTuple):
    """The machine that thresholds hold for."""

    gpu: str
    driver: str
    torch: str
    sage_aot: str

    @classmethod
    def here(cls, device: int) -> Machine:
        return cls(torch.cuda.get_device_name(device), driver_version(), str(torch.__version__), __version__)

    @property
    def file(self) -> str:
        """The name of its file."""
        return f"{_slug(self.gpu)}-{hashlib.sha256(json.dumps(self).encode()).hexdigest()[:_DIGITS]}.json"

    def __str__(self) -> str:
        return f"{self.gpu}, driver {self.driver}, torch {self.torch}, sage_aot {self.sage_aot}"


def _slug(gpu: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", gpu).strip("-")


def driver_version() -> str:
    """The version of NVIDIA's driver, such as ``"580.159.04"``; where its management library is missing, the CUDA
    version that the driver is for."""
    try:
        library = driver_library("nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1")
        text = ctypes.create_string_buffer(80)
        if library.nvmlInit_v2() == 0:
            try:
                if library.nvmlSystemGetDriverVersion(text, len(text)) == 0:
                    return text.value.decode()
            finally:
                library.nvmlShutdown()
    except (OSError, AttributeError):
        pass
    return f"for CUDA {torch._C._cuda_getDriverVersion()}"  # type: ignore[attr-defined]  # only builds for CUDA have it


def folder() -> Path | None:
    """The folder of the files; None where they are switched off, or the user has no home."""
    named = os.environ.get(VARIABLE)
    if named == "0":
        return None
    if named:
        return Path(named)
    if sys.platform == "win32":
        base = os.environ.get("APPDATA", "")
    else:
        base = os.environ.get("XDG_CONFIG_HOME", "")
        base = base if os.path.isabs(base) else os.path.expanduser("~/.config")  # as the XDG specification says
    return Path(base) / "sage_aot" / "calibration" if os.path.isabs(base) else None


# --- files ------------------------------------------------------------------------------------------------------------


class Refused(Exception):
    """A file is not taken; the message says which, and why."""


def writable_folder() -> Path:
    """The folder of the files, made where it is missing.

    Raises:
        UnsupportedError: there is none, or nothing can be written there.
    """
    if (home := folder()) is None:
        raise UnsupportedError(f"calibrate: expected a folder for the thresholds, got none: {VARIABLE} is 0, or the "
                               f"user has no home; set {VARIABLE} to a folder")
    try:
        home.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=home).close()
    except OSError as error:
        raise _not_written(home, error) from error
    return home


def write(thresholds: Thresholds, machine: Machine) -> Path:
    """Write the file of a machine, whole or not at all, and return its path.

    Raises:
        UnsupportedError: as :func:`writable_folder` says.
    """
    held = {
        "format": _FORMAT, "machine": machine._asdict(),
        "calls": {kind: {str(headdim): _numbers(thresholds.calls[kind, headdim]) for headdim in HEADDIMS}
                  for kind in KINDS},
        "flash": sorted(map(list, thresholds.flash))}
    path = writable_folder() / machine.file
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False, encoding="utf-8") as made:
        name = made.name
        try:
            made.write(json.dumps({**held, "sha256": _seal(held)}, indent=1) + "\n")
            made.close()  # Windows renames no open file
            os.replace(name, path)
        except OSError as error:
            made.close()
            os.unlink(name)
            raise _not_written(path.parent, error) from error
    return path


def _not_written(home: Path, error: OSError) -> UnsupportedError:
    return UnsupportedError(f"calibrate: expected a folder that can be written, got {home}: {error.strerror}; set "
                            f"{VARIABLE} to another")


def _numbers(threshold: Threshold) -> tuple[float, float | None]:
    """JSON has no infinity."""
    return threshold.per_element, None if threshold.at_least == inf else threshold.at_least


def read(path: Path, machine: Machine) -> Thresholds:
    """The thresholds of a file.

    Raises:
        Refused: the file is damaged, or it is another machine's.
    """
    try:
        held = json.loads(path.read_text("utf-8"))
        if held.pop("sha256") != _seal(held):
            raise Refused(f"{path} is damaged or was edited: its contents have another sha256 than it says")
        if held["format"] != _FORMAT:
            raise Refused(f"{path} has format {held['format']}, expected {_FORMAT}")
        if (whose := Machine(**held["machine"])) != machine:
            raise Refused(f"{path} is of another machine: expected {machine}, got {whose}")
        calls = {(kind, headdim): _threshold(*held["calls"][kind][str(headdim)])
                 for kind in KINDS for headdim in HEADDIMS}
        return Thresholds(calls, frozenset(map(_corner, held["flash"])))
    except OSError as error:
        raise Refused(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise Refused(f"{path} is damaged: {type(error).__name__}: {error}") from error


def _seal(held: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(held, sort_keys=True).encode()).hexdigest()


def _threshold(per_element: float, at_least: float | None) -> Threshold:
    for value in (per_element, 0.0 if at_least is None else at_least):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not isfinite(value) or value < 0:
            raise ValueError(f"expected a number from 0 on, got {value!r}")
    return Threshold(per_element, inf if at_least is None else at_least)


def _corner(values: list[int]) -> Corner:
    if not all(value in axis for value, axis in zip(values, AXES, strict=True)):
        raise ValueError(f"expected a corner of the grid, got {values!r}")
    return Corner(*values)
