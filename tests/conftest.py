"""Which tests run where: those marked `gpu` need a CUDA device and are never passed over silently."""

from __future__ import annotations

import pytest
import torch


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without a CUDA device, leave the GPU tests out and say how many; asked for by name, fail."""
    if torch.cuda.is_available():
        return
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu and config.option.markexpr == "gpu":
        raise pytest.UsageError("`-m gpu` was asked for, but torch sees no CUDA device")
    items[:] = [item for item in items if item not in set(gpu)]
    config.hook.pytest_deselected(items=gpu)


def pytest_report_header() -> str:
    if torch.cuda.is_available():
        return f"gpu tests run on {torch.cuda.get_device_name()}"
    return "gpu tests are deselected: torch sees no CUDA device"
