"""What cuda-bindings does with what it is told, on a driver that remembers it: a program for tests, in a process of its
own, where libcuda.so.1 is fake_driver.c. It prints what it saw as JSON.

    LD_LIBRARY_PATH=FOLDER_OF_LIBCUDA python tests/unit/on_fake_driver.py
"""

from __future__ import annotations

import ctypes
import json
import struct
import sys
import threading

from sage_aot._driver import BindingsDriver, Function, default_driver

PARAMS = struct.pack("<QiifQ", 2**63 + 5, -1, 0, 1.5, 7)
"""Zero bytes too, which end no struct."""

IMAGE = b"image of a kernel"

fake = ctypes.CDLL("libcuda.so.1")


def number(name: str) -> ctypes.c_int:
    return ctypes.c_int.in_dll(fake, name)


def last_launch() -> str:
    return bytes((ctypes.c_char * 1024).in_dll(fake, "fake_launch")).split(b"\0")[0].decode()


def raised(work: object) -> str:
    try:
        work()
    except RuntimeError as error:
        return str(error)
    return "nothing"


def in_a_thread(work: object) -> object:
    results = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    return results[0]


def launched(launch: Function, *arguments: object) -> str:
    launch(*arguments)
    return last_launch()


def within(driver: BindingsDriver, device: int, work: object) -> object:
    """`work()` on a thread whose current context is that of a device, as torch leaves it."""
    api = driver._api
    api.cuCtxPushCurrent(driver._context(device))
    try:
        return work()
    finally:
        api.cuCtxPopCurrent()


def main() -> None:
    number("fake_params_bytes").value = len(PARAMS)
    driver = default_driver()
    first = driver.load(0, IMAGE, "first", 128, 50000)
    second = driver.load(1, IMAGE, "second", 256, 0)
    seen = {
        "driver": [driver.name, driver.version, driver.cuda],
        "zero behind the image": number("fake_images_end_in_zero").value,
        "bound": within(driver, 0, lambda: launched(first, 77, 0xDEAD, PARAMS)),
        "params": bytes((ctypes.c_char * len(PARAMS)).in_dll(fake, "fake_params")) == PARAMS,
        "unbound": in_a_thread(lambda: launched(first, 78, 0, PARAMS)),
        "bound to another": within(driver, 0, lambda: launched(second, 2**31 - 1, 2**63, PARAMS)),
        "contexts left": [fake.fake_depth(), in_a_thread(lambda: (first(1, 0, PARAMS), fake.fake_depth())[1])],
        "contexts retained": fake.fake_retained(),
        "bad image": raised(lambda: driver.load(0, b"imago", "first", 128, 0)),
        "bad entry": raised(lambda: driver.load(0, IMAGE, "nothing", 128, 0)),
        "no such device": raised(lambda: driver.load(2, IMAGE, "first", 128, 0)),
        "contexts left by errors": fake.fake_depth(),
    }
    number("fake_status").value = 700
    seen["bad launch"] = raised(lambda: within(driver, 0, lambda: first(1, 0, PARAMS)))
    seen["bad launch, unbound"] = raised(lambda: first(1, 0, PARAMS))
    json.dump(seen, sys.stdout)


if __name__ == "__main__":
    main()
