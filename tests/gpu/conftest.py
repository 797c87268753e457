"""Hooks of the tests of this folder: the head of their report, with the variants left out, and freed memory."""

from __future__ import annotations

from collections.abc import Iterator

import gpu_of_worker  # noqa: F401 - variants starts CUDA
import pytest
import torch
from variants import LEFT_OUT

MOST_KEPT = 1 << 30
"""Bytes that a process keeps of what its tests have freed. More would leave too little for fifteen others."""


@pytest.fixture(autouse=True)
def freed_memory() -> Iterator[None]:
    """Give the GPU's memory back behind a test that took much of it."""
    yield
    if torch.cuda.memory_reserved() > MOST_KEPT:
        torch.cuda.empty_cache()


def pytest_report_header() -> str | None:
    if not LEFT_OUT:
        return None
    return (f"without a source tree to build them for this GPU, or without their instructions here, left out: kernels "
            f"of {', '.join(LEFT_OUT)}")
