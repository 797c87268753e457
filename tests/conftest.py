"""Which tests run where: those marked `gpu` need a GPU that kernels are built for, and are never left out silently."""

from __future__ import annotations

import os

import pytest
import torch

from sage_aot._backends.cuda import arch_of
from sage_aot._backends.drivers import default_driver
from sage_aot._call.pipeline import default_library
from sage_aot.errors import SageAotError

# The simulator's processes keep all processors busy: threads of one operator would wait for each other at every turn.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the programs that tests start


def no_gpu() -> str | None:
    """Why no kernel can run here, or None."""
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    try:
        arch_of(default_library(), torch.cuda.current_device())
    except SageAotError as error:
        return str(error)
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where no kernel can run, leave the GPU tests out and count them; asked for by name, fail."""
    reason = no_gpu()
    if reason is None:
        return
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu and config.option.markexpr == "gpu":
        raise pytest.UsageError(f"`-m gpu` was asked for, but {reason}")
    items[:] = [item for item in items if item not in set(gpu)]
    config.hook.pytest_deselected(items=gpu)


def pytest_report_header() -> str:
    reason = no_gpu()
    if reason:
        return f"gpu tests are deselected: {reason}"
    return f"gpu tests run on {torch.cuda.get_device_name()}, kernels are launched through {default_driver().name}"
