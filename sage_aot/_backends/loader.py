"""A kernel folder and its kernels on devices.

An entry point is loaded once per device and kept for the life of the process. Loading reads the kernel's file and
compares its sha256 with the manifest's.
"""

from __future__ import annotations

import hashlib
import threading
import zlib
from functools import cache, cached_property
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING
from zipfile import BadZipFile

from sage_aot._backends.distribution import INSTALL_AGAIN
from sage_aot._backends.drivers import Driver, Function, default_driver
from sage_aot._kernels.drivers import too_old
from sage_aot._kernels.manifest import FILE_NAME, KernelRecord, Manifest
from sage_aot._launch.structs import layout_problems, vocabulary
from sage_aot._package import PACKAGE
from sage_aot._version import __version__
from sage_aot.errors import CubinError, LaunchError, UnsupportedError

if TYPE_CHECKING:
    from importlib.abc import Traversable

KERNEL_FOLDER: Traversable = resources.files(PACKAGE) / "kernels"
"""Folder of the kernels that the package ships; within a zip file where the package is imported from one."""


class Library:
    """The kernels of one folder, loaded through one driver. Safe under threads."""

    def __init__(self, folder: Traversable, driver: Driver | None = None) -> None:
        """`driver`: None for :func:`default_driver`."""
        self.folder = folder
        self._driver = driver
        self._functions: dict[tuple[int, str], Function] = {}  # by device and entry point
        self._lock = threading.Lock()

    @property
    def driver(self) -> Driver:
        """The driver that loads the kernels; UnsupportedError where no loader works here."""
        return self._driver or default_driver()

    @cached_property
    def manifest(self) -> Manifest:
        """The folder's manifest; CubinError where it is missing or of another version."""
        try:
            manifest = Manifest.read(self.folder)
        except OSError as error:
            raise CubinError(f"no kernels: {self.folder / FILE_NAME} is missing; {INSTALL_AGAIN}") from error
        except ValueError as error:
            raise CubinError(f"{error}; {INSTALL_AGAIN}") from error
        built, expected = (manifest.version, manifest.vocabulary), (__version__, vocabulary())
        if built != expected:
            raise CubinError(f"{self.folder} holds kernels of another sage_aot: expected version and fields "
                             f"{expected}, got {built}; {INSTALL_AGAIN}")
        problems = layout_problems(manifest.structs)
        if problems:
            raise CubinError(f"{self.folder} holds kernels of another sage_aot: {problems[0]}; {INSTALL_AGAIN}")
        if not manifest.attention_archs:
            raise CubinError(f"{self.folder} holds no attention kernel; {INSTALL_AGAIN}")
        return manifest

    def read(self, record: KernelRecord) -> bytes:
        """The bytes of a kernel's file; CubinError where it is missing or its sha256 is not the manifest's."""
        path = self.folder / record.file
        try:
            image = path.read_bytes()
        except OSError as error:
            raise CubinError(f"the cubin of {record.name} is missing: {path}; {INSTALL_AGAIN}") from error
        except (BadZipFile, zlib.error) as error:
            raise CubinError(f"the cubin of {record.name} is damaged: {path}: {error}; {INSTALL_AGAIN}") from error
        found = hashlib.sha256(image).hexdigest()
        if found != record.sha256:
            raise CubinError(f"the cubin of {record.name} is damaged: {path} has sha256 {found}, the manifest "
                             f"says {record.sha256}; {INSTALL_AGAIN}")
        return image

    def load(self, record: KernelRecord, entry: str, device: int) -> Function:
        """Load an entry point of a kernel on a device, which must be torch's current one; a second time is a look-up.

        UnsupportedError where the driver is too old, CubinError where the file is damaged, LaunchError where the driver
        refuses it.
        """
        driver, key = self.driver, (device, entry)
        with self._lock:
            if key not in self._functions:
                self._functions[key] = self._loaded(driver, record, entry, device)
            return self._functions[key]

    def _loaded(self, driver: Driver, record: KernelRecord, entry: str, device: int) -> Function:
        reason = too_old(driver.cuda, record.least_driver)
        if reason:
            raise UnsupportedError(f"the driver of device {device} is too old for {record.name}: {reason}; update it")
        image = self.read(record)
        try:
            return driver.load(device, image, entry, record.fact("threads"), record.fact("shared_bytes"),
                               record.programmatic_launch)
        except Exception as error:  # cupy's errors have no common base: name the kernel, whatever the error
            raise LaunchError(f"the driver does not load {entry} (built for {record.target}) on device "
                              f"{device}: {error}") from error


@cache
def shipped_library() -> Library:
    """The kernels that the package ships; one object for the whole process."""
    return Library(KERNEL_FOLDER)


@cache
def library_in(folder: str) -> Library:
    """The kernels of a folder; one object for the whole process."""
    return Library(Path(folder))
