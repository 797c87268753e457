"""Cubins from a kernel folder onto devices, and launches.

A cubin is read and its sha256 compared with the manifest's when it is loaded, once per device; the loaded function is
kept for the life of the process.
"""

from __future__ import annotations

import hashlib
import os
import threading
from functools import cached_property, lru_cache
from pathlib import Path

from sage_aot._driver import Function, default_driver, too_old
from sage_aot._manifest import FILE_NAME, KernelRecord, Manifest
from sage_aot._params import layout_digest
from sage_aot._plan import Launch
from sage_aot._version import __version__
from sage_aot.errors import CubinError, LaunchError, UnsupportedError

KERNEL_FOLDER = Path(__file__).parent / "kernels"
"""Where a build puts the cubins that the package ships."""

_REBUILD = "reinstall sage-aot, or in a source tree run `python -m codegen build`"


class Library:
    """The kernels of one folder. Safe under threads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._functions: dict[tuple[int, str], Function] = {}  # by device and file
        self._lock = threading.Lock()

    @cached_property
    def manifest(self) -> Manifest:
        """The folder's manifest; CubinError where it is missing or of another version."""
        try:
            manifest = Manifest.read(self.folder)
        except OSError as error:
            raise CubinError(f"no kernels: {self.folder / FILE_NAME} is missing; {_REBUILD}") from error
        except ValueError as error:
            raise CubinError(f"{error}; {_REBUILD}") from error
        built, expected = (manifest.version, manifest.structs), (__version__, layout_digest())
        if built != expected:
            raise CubinError(f"{self.folder} holds kernels of another sage_aot: expected version and structs "
                             f"{expected}, got {built}; {_REBUILD}")
        if not any(record.spec.kind == "attn" for record in manifest.kernels.values()):
            raise CubinError(f"{self.folder} holds no attention kernel; {_REBUILD}")
        return manifest

    def read(self, record: KernelRecord) -> bytes:
        """A cubin's bytes; CubinError where they are not those that the manifest names."""
        path = self.folder / record.file
        try:
            cubin = path.read_bytes()
        except OSError as error:
            raise CubinError(f"the cubin of {record.spec.name} is missing: {path}; {_REBUILD}") from error
        found = hashlib.sha256(cubin).hexdigest()
        if found != record.sha256:
            raise CubinError(f"the cubin of {record.spec.name} is damaged: {path} has sha256 {found}, the manifest "
                             f"says {record.sha256}; {_REBUILD}")
        return cubin

    def launch(self, launch: Launch, device: int, stream: int) -> None:
        """Queue one launch on a raw stream handle of a device, which must be the current one."""
        record = launch.record
        function = self._functions.get((device, record.file)) or self.load(record, device)
        try:
            function(launch.blocks, stream, launch.params)
        except Exception as error:  # those of cupy have no common base: whatever it is, name the kernel
            raise LaunchError(f"the driver does not launch {record.spec.name} on device {device}: {error}") from error

    def load(self, record: KernelRecord, device: int) -> Function:
        """A kernel on a device, which must be the current one; loaded at most once."""
        driver = default_driver()
        with self._lock:
            key = (device, record.file)
            if key in self._functions:
                return self._functions[key]
            reason = too_old(driver.cuda, record.least_driver)
            if reason:
                raise UnsupportedError(f"the driver of device {device} is too old for {record.spec.name}: {reason}; "
                                       f"update it")
            image = self.read(record)
            try:
                function = driver.load(device, image, record.spec.name, record.threads, record.shared_bytes)
            except Exception as error:  # those of cupy have no common base: whatever it is, name the kernel
                raise LaunchError(f"the driver does not load {record.spec.name} (built for {record.target}) on device "
                                  f"{device}: {error}") from error
            self._functions[key] = function
            return function


def default_library() -> Library:
    """The kernels that the package ships, or those of the folder that SAGE_AOT_KERNELS names."""
    return _library(os.environ.get("SAGE_AOT_KERNELS") or str(KERNEL_FOLDER))


@lru_cache(maxsize=None)
def _library(folder: str) -> Library:
    return Library(Path(folder))
