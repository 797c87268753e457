"""Launches that were simulated before are not simulated again.

What a launch writes follows from its kernel, the engine, its params, the order of its threads and the bytes of its
buffers. Most changes of the package's Python change no launch: what was written is kept in codegen.cache by a hash of
all that. Launches of a kernel in which a planted bug is switched on, and those on which the simulator reports, are not
kept.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import hostcc
import numpy as np

from codegen.cache import Cache

INSIDE, WRITTEN, WRITABLE = 1, 2, 4
"""Bits of a byte's state, engine/global_memory.h."""

ALIGNMENT = 64
"""Bytes. Kernels depend on an address only modulo this: no access needs a larger alignment."""

BYTES_A_SECOND = 2 * 2**20
"""Bytes that may be kept for a second of simulating: quantizers write much in little time."""


_FORMAT = "launches-1"
"""Format of what is kept; to be counted up where _written() and _write() change."""


@dataclass(frozen=True)
class Buffer:
    """Memory that launches may touch, and the state of each byte."""

    name: str
    address: int
    state: np.ndarray  # u8
    base: str = ""  # the tensor or the workspace that the buffer is a part of

    def memory(self) -> np.ndarray:
        """The bytes as they are now, as a view."""
        return np.ctypeslib.as_array((ctypes.c_uint8 * self.state.size).from_address(self.address))


@dataclass
class Launches:
    """The launches of a process."""

    kept: bool = False
    """True where they are taken from the cache and kept there; else each is simulated."""

    def run(self, simulate: Callable[[], None], key: Callable[[], str], buffers: Sequence[Buffer]) -> None:
        """Simulate a launch, or write what it wrote before. `key`: of key_of()."""
        if not self.kept:
            simulate()
            return
        of_launch, cache = key(), Cache.of_environment()
        if written := cache.read(of_launch):
            _write(written, buffers)
            return
        before, begin = [(buffer.memory().copy(), buffer.state.copy()) for buffer in buffers], time.thread_time()
        simulate()
        seconds, written = time.thread_time() - begin, _written(before, buffers)
        if sum(map(len, written)) <= seconds * BYTES_A_SECOND:
            with suppress(OSError):  # the folder may be for reading only
                cache.add(of_launch, written)


def _written(before: Iterable[tuple[np.ndarray, np.ndarray]], buffers: Iterable[Buffer]) -> list[bytes]:
    """Bits that say which bytes of a buffer were written, and these bytes, buffer by buffer. `before`: the bytes and
    their states in front of the launch."""
    found = []
    for (memory, state), buffer in zip(before, buffers):
        changed = (buffer.memory() != memory) | (buffer.state != state)
        found += [np.packbits(changed).tobytes(), buffer.memory()[changed].tobytes()]
    return found


def _write(written: Sequence[bytes], buffers: Iterable[Buffer]) -> None:
    for buffer, bits, values in zip(buffers, written[::2], written[1::2]):
        changed = np.unpackbits(np.frombuffer(bits, np.uint8), count=buffer.state.size).view(bool)
        buffer.memory()[changed] = np.frombuffer(values, np.uint8)
        buffer.state[changed] |= WRITTEN


def key_of(launch: Iterable[object], libraries: Iterable[Path], addresses: dict[str, int],
           buffers: Iterable[Buffer]) -> str:
    """A sha256 of a launch: of its settings, with its params at `anywhere(addresses)`, of the kernel's library and the
    engine's, of the host compiler and this processor, and of all that kernels can see of the buffers."""
    made_by = _FORMAT, hostcc.identity(), *map(repr, launch), *map(digest_of, libraries)
    digest = hashlib.sha256("\n".join(made_by).encode())
    for buffer in buffers:
        offsets = {name: address - buffer.address for name, address in addresses.items()}
        inside = {name: offset for name, offset in offsets.items() if 0 <= offset < buffer.state.size}
        place = buffer.base, offsets[buffer.base], inside, buffer.address % ALIGNMENT
        digest.update(f"\n{place} {buffer.state.size}\n".encode())
        digest.update(buffer.state.tobytes())
        digest.update(np.where(buffer.state & WRITTEN, buffer.memory(), 0).tobytes())
    return digest.hexdigest()


def anywhere(addresses: dict[str, int]) -> dict[str, int]:
    """Addresses that are the same wherever the tensors lie; 0 stays 0."""
    return {name: address and (i + 1) << 40 | address % ALIGNMENT
            for i, (name, address) in enumerate(addresses.items())}


@functools.cache
def digest_of(library: Path) -> str:
    """A digest of a library, of which a process loads one version."""
    return hashlib.sha256(library.read_bytes()).hexdigest()
