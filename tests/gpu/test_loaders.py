"""Every way to the driver that is installed here gives the same; the rest of the GPU tests run with the one that
SAGE_AOT_LOADER names, or the first."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch
from variants import own_specs

import sage_aot
from sage_aot import _cuda, _loader, _reference
from sage_aot._backends.drivers import DRIVERS, Driver
from sage_aot._backends.loader import Library
from sage_aot._call.pipeline import default_library
from sage_aot._launch.plan import Plan, plan
from sage_aot._problem.check import check
from sage_aot._launch.choose import kernels_of
from sage_aot.errors import LaunchError, UnsupportedError

pytestmark = pytest.mark.gpu

OWN = own_specs()


def usable() -> dict[str, Driver]:
    """Those that work here, by name."""
    found = {}
    for name, driver in DRIVERS.items() if OWN else ():
        with contextlib.suppress(UnsupportedError):
            found[name] = driver()
    return found


USABLE = usable()
each_loader = pytest.mark.parametrize("loader", USABLE)


@pytest.fixture
def library(loader, monkeypatch) -> Library:
    """The package's kernels, loaded anew through one of them."""
    monkeypatch.setattr(_loader, "default_driver", lambda: USABLE[loader])
    return Library(default_library().folder)


def prepare(library: Library, device: str = "cuda") -> tuple[Plan, list[torch.Tensor]]:
    """A plan with its tensors: q, k, v, out, lse, workspace."""
    q, k, v = reference.inputs("outlier", (2, 4, 150, 64), (2, 2, 333, 64), torch.bfloat16,
                                torch.Generator(device).manual_seed(27))
    problem = check(q, k, v, smooth_q=True)
    prepared = plan(problem, kernels_of(OWN[0].arch, problem, library.manifest))
    written = [torch.full_like(q, torch.nan), torch.full(q.shape[:3], torch.nan, device=device),
               torch.full((prepared.workspace_bytes,), 0xFF, dtype=torch.uint8, device=device)]
    torch.cuda.synchronize()
    return prepared, [q, k, v, *written]


@each_loader
def test_a_loader_gives_the_bits_of_the_call(library):
    prepared, tensors = prepare(library)
    _cuda.attention(prepared, library, *tensors)
    out, lse = sage_aot.attn(*tensors[:3], smooth_q=True, return_lse=True)
    assert torch.equal(tensors[3], out) and torch.equal(tensors[4], lse)


@each_loader
@pytest.mark.parametrize("loaded_before", [False, True])
def test_a_thread_that_used_no_gpu_yet(library, loaded_before):
    """torch has bound no context to it: everything it needs is there already."""
    prepared, tensors = prepare(library)
    expected = tensors[3].clone()
    _cuda.attention(prepared, library, *tensors[:3], expected, *tensors[4:])
    fresh = library if loaded_before else Library(library.folder)
    torch.cuda.synchronize()
    raised: list[BaseException] = []

    def work() -> None:
        try:
            _cuda.attention(prepared, fresh, *tensors)
        except BaseException as error:  # noqa: BLE001 - a thread's errors are lost otherwise
            raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert not raised and torch.equal(tensors[3], expected)


@each_loader
def test_what_the_driver_refuses_has_its_name(library, monkeypatch):
    record = next(r for r in library.manifest.kernels.values() if r.spec == OWN[0])
    monkeypatch.setattr(library, "read", lambda record: b"no cubin, and no PTX")
    with pytest.raises(LaunchError, match=f"does not load {record.spec.name} .*CUDA_ERROR_"):
        library.load(record, torch.cuda.current_device())


if torch.cuda.device_count() > 1:
    @each_loader
    def test_each_device_has_its_own_functions(library):
        """And a launch on one leaves the other current."""
        results = []
        for device in ("cuda:0", "cuda:1", "cuda:0"):
            with torch.cuda.device(device):
                prepared, tensors = prepare(library, "cuda:0")
            tensors = [tensor.to(device) for tensor in tensors]
            _cuda.attention(prepared, library, *tensors)
            assert torch.cuda.current_device() == 0
            results.append(tensors[3].cpu())
        assert all(torch.equal(result, results[0]) for result in results)
