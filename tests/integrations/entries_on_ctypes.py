"""Calls every entry of host_entries.py where cupy and cuda-bindings cannot be imported: first on the CPU emulation,
then through ctypes on a driver's library that runs nothing. Prints what came of it as JSON; test_entries_on_ctypes.py
runs it in a process of its own, and says what is right.

    export PYTHONPATH=.:ci/sageattention:tests/integrations LD_LIBRARY_PATH=FOLDER_OF_LIBCUDA
    python tests/integrations/entries_on_ctypes.py

The library is tests/unit/fake_driver.c. Tensors stay on the CPU: sage_aot is told that they are on device 0.
"""

from __future__ import annotations

import sys

sys.modules.update(dict.fromkeys(("cupy", "cupy_backends", "cuda", "cuda.bindings")))  # an import of them fails

import ctypes  # noqa: E402
import json  # noqa: E402
from contextlib import nullcontext  # noqa: E402
from typing import Any  # noqa: E402

import host_entries  # noqa: E402
import torch  # noqa: E402

from sage_aot._backends.cuda import backend, call  # noqa: E402
from sage_aot._backends.loader import Library  # noqa: E402
from sage_aot._call.backends import default_library, handing  # noqa: E402

ARCH, STREAM = "sm89", 0xABC0


def pretend_a_gpu() -> None:
    """Replaces what of torch needs a device, and the kernels' files by an image that the library takes."""
    torch.cuda.device = lambda device: nullcontext()
    torch.cuda.current_device = lambda: 0
    torch._C._cuda_getCurrentRawStream = lambda device: STREAM + device
    torch.Tensor.get_device = lambda tensor: 0
    backend.sm_count = call.sm_count = lambda device: 132
    Library.read = lambda library, record: b"image of a kernel"


def launches_of(entry: str, fake: Any) -> list[str]:
    """All launches of an entry, in words."""
    words = (ctypes.c_char * 256 * 64).in_dll(fake, "fake_words")
    number = ctypes.c_int.in_dll(fake, "fake_launches")
    number.value = 0
    host_entries.served(entry, "cpu")
    return [bytes(words[i]).split(b"\0")[0].decode() for i in range(number.value)]


def main() -> None:
    emulated = {entry: host_entries.bits(host_entries.served(entry, "cpu")) for entry in host_entries.ENTRIES}
    pretend_a_gpu()
    library = Library(default_library().folder)
    with handing(backend.CudaBackend(library, ARCH)):
        fake = ctypes.CDLL("libcuda.so.1")
        launched = {entry: launches_of(entry, fake) for entry in host_entries.ENTRIES}
    print(json.dumps({"loader": library.driver.name, "arch": ARCH, "emulated": emulated, "launched": launched}))


if __name__ == "__main__":
    main()
