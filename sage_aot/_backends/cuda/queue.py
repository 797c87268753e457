"""Launches that are bound to their structs once, and made any number of times."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import NamedTuple

from sage_aot._backends.cuda.device import context_of, entered
from sage_aot._backends.drivers import Driver, Function, Launcher
from sage_aot._backends.loader import Library
from sage_aot._kernels.manifest import KernelRecord
from sage_aot._launch.plan import Launch
from sage_aot._launch.structs import NO_SOURCE, SOURCES, WORD, Packed, Packer
from sage_aot.errors import LaunchError


def queue_of(library: Library, device: int, wanted: Sequence[Launch]) -> Queue:
    """Load the kernels of some launches and bind them to a queue."""
    with entered(device):
        bound = [Bound(launch.record, library.load(launch.record, launch.entry, device), launch.blocks,
                       packers_of(library)[launch.record.params].pack(launch.params)) for launch in wanted]
        return Queue(bound, library.driver, device, context_of(library.driver, device))


@cache
def packers_of(library: Library) -> dict[str, Packer]:
    """A packer per struct that kernels take, by the name of the struct."""
    return {name: Packer(layout) for name, layout in library.manifest.structs.items()}


class Bound(NamedTuple):
    record: KernelRecord
    function: Function
    blocks: int
    packed: Packed


class Queue:
    """Launches whose structs wait for the addresses of a call. Safe under threads."""

    def __init__(self, bound: list[Bound], driver: Driver, device: int, context: int) -> None:
        self._bound, self._driver, self._device, self._context = bound, driver, device, context
        self._template = array("Q", b"".join([launch.packed.data for launch in bound]))
        sources = b"".join([launch.packed.sources for launch in bound])
        # Per source the words of the structs that hold its address, and the offset that each adds.
        self._words_of: list[list[tuple[int, int]]] = [[] for _ in range(NO_SOURCE + 1)]
        for i, (source, offset) in enumerate(zip(sources, self._template)):
            self._words_of[source].append((i, offset))
        self._free: list[_Structs] = []  # grows to the most threads that were here at once; pop, append are atomic

    def __call__(self, stream: int, *addresses: int) -> None:
        """Queue the launches, in order, on a raw stream handle. `addresses`: of the call's tensors, the first ones in
        the order of SOURCES, always as many. LaunchError, with the kernel's name, where the driver refuses a launch."""
        try:
            with self._driver.entered(self._context):
                self.launch(stream, *addresses)
        except LaunchError:
            raise
        except Exception as error:  # raised by entering the context
            raise LaunchError(f"the driver does not enter the context of device {self._device}: {error}") from error

    def launch(self, stream: int, *addresses: int) -> None:
        """Queue the launches where their context is already the current one."""
        try:
            structs = self._free.pop()
        except IndexError:
            structs = _Structs(self._template, self._bound)
        held, words = structs.addresses, structs.words
        for source, address in enumerate(addresses):
            if address != held[source]:  # often it is not: the allocator hands out the same workspace again
                held[source] = address
                for i, offset in self._words_of[source]:
                    words[i] = address + offset
        launcher = None
        try:
            for launcher in structs.launchers:
                launcher(stream)
        except Exception as error:  # cupy's errors have no common base: name the kernel, whatever the error
            refused = self._bound[structs.launchers.index(launcher)] if launcher else self._bound[0]
            raise LaunchError(f"the driver does not launch {refused.record.name} on device {self._device}: "
                              f"{error}") from error
        self._free.append(structs)  # not reached after an error, which drops these structs


class _Structs:
    """The structs of a call's launches, and the launchers that read them. Used by one thread at a time."""

    __slots__ = ("addresses", "launchers", "pointers", "words")

    def __init__(self, template: array[int], bound: list[Bound]) -> None:
        self.addresses = [0] * len(SOURCES)  # those that the words hold
        self.words = template[:]
        begin, _ = self.words.buffer_info()
        sizes = [len(launch.packed.data) for launch in bound]
        self.pointers = array("Q", accumulate(sizes[:-1], initial=begin))  # one to each struct
        first, _ = self.pointers.buffer_info()
        self.launchers: list[Launcher] = [launch.function.bind(launch.blocks, first + WORD * i)
                                          for i, launch in enumerate(bound)]
