"""Compiled files, kept by a hash of all that they are made from, in a folder that outlives a checkout.

The environment variable SAGE_AOT_CACHE names the folder; by default it is `sage_aot` in the user's cache folder. An
empty value keeps nothing. Any number of processes may share a folder: an entry is written in one step, and read whole
or not at all. The entries that were not used for the longest time make room for new ones.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from codegen.files import write_atomic, write_if_changed

VARIABLE = "SAGE_AOT_CACHE"
LIMIT = 2 * 2**30
"""Bytes that the entries may take together; those of one source tree take some 450 MB."""

_FORMAT = "entries-1"
"""The subfolder that holds nothing but entries; its number is that of their format."""

_DIGEST_BYTES = hashlib.sha256().digest_size


def default_folder() -> Path:
    """The folder where SAGE_AOT_CACHE is not set."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sage_aot"


@dataclass(frozen=True)
class Cache:
    """A folder of entries, each named by its key; None: there are no entries, and none are kept."""

    folder: Path | None
    limit: int = LIMIT  # bytes

    @classmethod
    def of_environment(cls) -> Cache:
        """The cache that SAGE_AOT_CACHE names."""
        name = os.environ.get(VARIABLE)
        return cls(default_folder() if name is None else Path(name).resolve() if name else None)

    def restore(self, key: str, files: Sequence[Path]) -> bool:
        """Make files hold what was kept of them under a key; False where :meth:`read` finds nothing."""
        blobs = self.read(key)
        if blobs is None or len(blobs) != len(files):
            return False
        for file, blob in zip(files, blobs):
            write_if_changed(file, blob)
        return True

    def read(self, key: str) -> list[bytes] | None:
        """The files that were kept under a key, a sha256 in hex; None where there are none, or where the entry is
        damaged or of another key."""
        path = self._path(key)
        try:
            blobs = _unpacked(key, path.read_bytes()) if path else None
        except OSError:
            return None
        if path and blobs is not None:
            _mark_used(path)
        return blobs

    def keep(self, entries: Mapping[str, Sequence[bytes]]) -> None:
        """Keep the contents of files under their keys, and make room for them. Where the folder takes none, say so and
        go on: nothing depends on it."""
        try:
            for key, blobs in entries.items():
                self.add(key, blobs)
            if entries:
                self._trim()
        except OSError as error:
            print(f"expected to keep compiled files in {self.folder}, got {error}: set {VARIABLE} to another folder, "
                  "or to nothing", file=sys.stderr)

    def add(self, key: str, blobs: Sequence[bytes]) -> None:
        """Keep the contents of files under a key; the next :meth:`keep` makes room. OSError where the folder takes
        none."""
        if path := self._path(key):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, _packed(key, blobs))

    def _path(self, key: str) -> Path | None:
        return self.folder and self.folder / _FORMAT / key[:2] / key

    def _trim(self) -> None:
        """Remove entries, the least recently used first, until the others fit the limit. Another process may remove
        some meanwhile."""
        found = []
        for path in (self.folder / _FORMAT).glob("*/*") if self.folder else ():
            try:
                status = path.stat()
            except FileNotFoundError:
                continue
            found.append((status.st_mtime_ns, status.st_size, path))
        excess = sum(size for _, size, _ in found) - self.limit
        for _, size, path in sorted(found):
            if excess <= 0:
                break
            path.unlink(missing_ok=True)
            excess -= size


def _packed(key: str, blobs: Sequence[bytes]) -> bytes:
    """An entry: the sha256 of its key and its body, then the body: the sizes of the files and the files, compressed."""
    body = zlib.compress(json.dumps([len(blob) for blob in blobs]).encode() + b"\n" + b"".join(blobs), 1)
    return _digest(key, body) + body


def _unpacked(key: str, entry: bytes) -> list[bytes] | None:
    """The files of an entry; None where the entry is not what was written under this key."""
    digest, body = entry[:_DIGEST_BYTES], entry[_DIGEST_BYTES:]
    if digest != _digest(key, body):
        return None
    sizes, _, rest = zlib.decompress(body).partition(b"\n")
    blobs = []
    for size in json.loads(sizes):
        blobs.append(rest[:size])
        rest = rest[size:]
    return blobs


def _digest(key: str, body: bytes) -> bytes:
    return hashlib.sha256(key.encode() + body).digest()


def _mark_used(path: Path) -> None:
    with suppress(OSError):  # the folder may be for reading only, or another process removed the entry
        os.utime(path)
