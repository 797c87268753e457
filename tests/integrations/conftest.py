"""Fixtures for tests of integrations: a policy that serves CPU tensors, and exact attention instead of the kernels."""

from __future__ import annotations

import pytest
import torch
from exact import attention

from sage_aot.integrations import Policy, _calibration, _serve, reset_report, use
from sage_aot.integrations._gain import built_in


@pytest.fixture(autouse=True)
def served():
    """Every call that sage_aot computes is served, and the report is empty before a test."""
    reset_report()
    with use(Policy(when="possible")):
        yield
    torch.compiler.reset()


@pytest.fixture(autouse=True)
def an_h200():
    """CPU tensors that say they are CUDA tensors are those of an H200, with its built-in thresholds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(_calibration._chosen, -1, _calibration.Chosen(*built_in((9, 0))))
        yield


@pytest.fixture
def exact(monkeypatch):
    """sage_aot.attn without quantization: what differs then from a host's attention is no rounding."""
    monkeypatch.setattr(_serve, "attn", attention)
