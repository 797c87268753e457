"""The calls of the driver that BindingsDriver makes through cuda-bindings, or LibraryDriver through ctypes: a program
that test_driver.py runs in a process of its own, where libcuda.so.1 is fake_driver.c, which records calls. The program
prints the recorded calls as JSON.

    LD_LIBRARY_PATH=FOLDER_OF_LIBCUDA python tests/unit/on_fake_driver.py
"""

from __future__ import annotations

import ctypes
import json
import struct
import sys
import threading
from types import SimpleNamespace
from typing import Any

from sage_aot._backends.cuda.queue import Bound, Queue
from sage_aot._backends.drivers import Driver, Function, default_driver
from sage_aot._launch.structs import NO_SOURCE, SOURCES, Packed
from sage_aot.errors import LaunchError

PARAMS = struct.pack("<QiifI", 2**63 + 5, -1, 0, 1.5, 7)
"""A struct with zero bytes, which must not end it."""

IMAGE = b"image of a kernel"
ADDRESSES = {**dict.fromkeys(SOURCES, 0), "q": 0x1000, "k": 0x2000, "v": 0x3000, "out": 0x4000, "workspace": 2**63}

fake = ctypes.CDLL("libcuda.so.1")


class Struct:
    """A struct and one pointer to it, to which a function is bound."""

    def __init__(self, data: bytes) -> None:
        self.data = ctypes.create_string_buffer(data, len(data))
        self.pointer = ctypes.c_void_p(ctypes.addressof(self.data))
        self.pointers = ctypes.addressof(self.pointer)


def number(name: str) -> ctypes.c_int:
    return ctypes.c_int.in_dll(fake, name)


def launches() -> list[str]:
    """All launches since the last call of this function, in words."""
    words = (ctypes.c_char * 256 * 64).in_dll(fake, "fake_words")
    found = [bytes(words[i]).split(b"\0")[0].decode() for i in range(number("fake_launches").value)]
    number("fake_launches").value = 0
    return found


def params(launch: int) -> bytes:
    """The struct of a launch. Call this before launches(), which forgets the launches."""
    return bytes((ctypes.c_char * 512 * 64).in_dll(fake, "fake_params")[launch])[:number("fake_params_bytes").value]


def raised(work: object) -> str:
    try:
        work()
    except (RuntimeError, LaunchError) as error:
        return str(error)
    return "nothing"


def in_a_thread(work: object) -> object:
    results = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    return results[0]


def within(driver: Driver, device: int, work: object) -> object:
    """`work()` on a thread whose current context is a device's, as torch leaves it. Returns its result, whether the
    context is still current, and how many contexts are on the stack."""
    with driver.entered(driver.context(device)):
        return [work(), driver.current() == driver.context(device), fake.fake_depth()]


def of_launchers(driver: Driver, first: Function, second: Function) -> dict[str, object]:
    """The calls of the driver by bound functions."""
    held = Struct(PARAMS)
    launch, other = first.bind(77, held.pointers), second.bind(2**31 - 1, held.pointers)
    within(driver, 0, lambda: launch(0xDEAD))
    seen = {"params": params(0) == PARAMS, "first": launches()}
    held.data.raw = changed = PARAMS[::-1]
    within(driver, 0, lambda: launch(0xDEAD))
    seen |= {"params, read in each launch": params(0) == changed, "second": launches()}
    within(driver, 0, lambda: [launch(stream) for stream in (0, 5, 5, 2**63, 0)])
    seen["streams"] = [words.split()[-1] for words in launches()]
    within(driver, 1, lambda: other(2**63))
    return {**seen, "of the other device": launches(), "unbound": raised(lambda: launch(0)),
            "bound to another": within(driver, 1, lambda: raised(lambda: launch(0)))}


def of_programmatic_launches(cuda: int) -> list[str]:
    """Three launches of a kernel that may start early, on a driver for this CUDA."""
    number("fake_version").value = cuda
    driver, held = type(default_driver())(), Struct(PARAMS)
    launch = driver.load(0, IMAGE, "early", 32, 0, programmatic=True).bind(5, held.pointers)
    within(driver, 0, lambda: [launch(stream) for stream in (0, 7, 7)])
    return [words.rpartition("stream ")[2] for words in launches()]


def of_queues(driver: Driver, first: Function, again: Function) -> dict[str, Any]:
    """The calls of the driver by a queue of two launches, on threads with a context and without."""
    packed = [Packed(struct.pack("<QQQ", 16, i, 32),
                     bytes([SOURCES.index("workspace"), NO_SOURCE, SOURCES.index(source)]))
              for i, source in enumerate(("q", "lse"))]
    bound = [Bound(SimpleNamespace(name="first"), first, 77, packed[0]),
             Bound(SimpleNamespace(name="again"), again, 5, packed[1])]
    queue = Queue(bound, driver, 0, driver.context(0))

    def call(stream: int = 0xDEAD) -> None:
        queue(stream, *ADDRESSES.values())

    seen: dict[str, Any] = {"on its thread": [within(driver, 0, call)[1:], launches()]}
    call()
    seen["structs"] = [params(i) == each.at(ADDRESSES) for i, each in enumerate(packed)]
    launches()
    seen["without a context"] = [in_a_thread(lambda: (call(), driver.current(), fake.fake_depth())[1:]), launches()]
    seen["in another's"] = [in_a_thread(lambda: within(driver, 1, call)[1:]), launches()]
    (ctypes.c_char * 256).in_dll(fake, "fake_refused").value = b"again"
    number("fake_status").value = 700
    seen["refused"] = [within(driver, 0, lambda: raised(call)), launches()]
    seen["refused, without a context"] = [in_a_thread(lambda: (raised(call), driver.current(), fake.fake_depth()))]
    launches()
    number("fake_status").value = 0
    call()
    seen["the next call"] = [[params(i) == each.at(ADDRESSES) for i, each in enumerate(packed)], launches()]
    return seen


def main() -> None:
    number("fake_params_bytes").value = len(PARAMS)
    driver = default_driver()
    first = driver.load(0, IMAGE, "first", 128, 50000)
    again = driver.load(0, IMAGE, "again", 32, 0)
    second = driver.load(1, IMAGE, "second", 256, 0)
    json.dump({
        "driver": [driver.name, driver.version, driver.cuda],
        "zero behind the image": number("fake_images_end_in_zero").value,
        "launchers": of_launchers(driver, first, second),
        "queues": of_queues(driver, first, again),
        "contexts retained": fake.fake_retained(),
        "bad image": raised(lambda: driver.load(0, b"imago", "first", 128, 0)),
        "bad entry": raised(lambda: driver.load(0, IMAGE, "nothing", 128, 0)),
        "no such device": raised(lambda: driver.load(2, IMAGE, "first", 128, 0)),
        "programmatic launches": {cuda: of_programmatic_launches(cuda) for cuda in (12020, 12030)},
        "contexts left": fake.fake_depth(),
    }, sys.stdout)


if __name__ == "__main__":
    main()
