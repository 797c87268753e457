"""Functions that the programs share that run the code of xDiT, vLLM-Omni, LightX2V and SGLang on a CPU (xdit_host.py
and so on): ways to import a part of a host without the rest, and what came of an attention call."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest import mock

import exact
import torch

from sage_aot.integrations import Policy, _serve, report, reset_report, use

Outcome = dict[str, Any]


# --- a part of a host -------------------------------------------------------------------------------------------------


def bare(root: str, *names: str) -> None:
    """Packages below a folder of which an import runs no ``__init__.py``, for what those import is not needed."""
    for name in names:
        module = ModuleType(name)
        module.__path__ = [f"{root}/{name.replace('.', '/')}"]
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)


def stand_in(name: str, **holds: Any) -> None:
    """A module of a package that is not installed: what it holds, and a mock under any other name."""
    _MOCKS.packages.add(name.partition(".")[0])
    if _MOCKS not in sys.meta_path:
        sys.meta_path.append(_MOCKS)
    vars(importlib.import_module(name)).update(holds)


class _Mocked(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return mock.MagicMock(name=f"{self.__name__}.{name}")


class _Mocks:
    """Finds every module of some packages, and makes one of mocks."""

    def __init__(self) -> None:
        self.packages: set[str] = set()

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in self.packages else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Mocked(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


_MOCKS = _Mocks()


def gpu(capability: tuple[int, int]) -> AbstractContextManager[Any]:
    """A GPU of a compute capability, for hosts that ask torch before they import what runs on one."""
    device = mock.Mock(gcnArchName="")
    return mock.patch.multiple(
        torch.cuda, is_available=lambda: True, current_device=lambda: 0, get_device_name=lambda *at: "a GPU",
        get_device_capability=lambda *at: capability, get_device_properties=lambda *at: device)


# --- its calls --------------------------------------------------------------------------------------------------------


def draw(heads: int = 4, kv_heads: int = 2, queries: int = 64, keys: int = 64, headdim: int = 64,
         batch: int = 2) -> list[torch.Tensor]:
    """q, k and v, ``[batch, seq, heads, headdim]``."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(batch, rows, count, headdim, generator=generator)
            for rows, count in ((queries, heads), (keys, kv_heads), (keys, kv_heads))]


def expected(qkv: Sequence[torch.Tensor], **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Output, like q, and log-sum-exp, ``[batch, heads, queries]``, computed in float64; options are those of
    sage_aot.attn."""
    out, lse = exact.attention(*(x.double() for x in qkv), layout="NHD", return_lse=True, **options)
    return out, lse


def outcome(call: Callable[[], torch.Tensor], wanted: torch.Tensor) -> Outcome:
    """A host's attention call against its result: the largest difference with exact attention in the place of the
    kernels, the relative error with the kernels' arithmetic, and what the report counts of one call."""
    with use(Policy("possible")), torch.no_grad():
        with mock.patch.object(_serve, "attn", exact.attention):
            reset_report()
            out = call()
            counted = report()
        found = call()
    assert out.shape == found.shape == wanted.shape, (out.shape, found.shape, wanted.shape)
    return {"exact": (out - wanted).abs().max().item(), "kernels": ((found - wanted).norm() / wanted.norm()).item(),
            "report": counted}


def refusal(call: Callable[[], object]) -> str:
    """The message of the error that a call raises."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - hosts raise what they like
        return f"{type(error).__name__}: {error}"
    return "none"
