"""Every loader that is installed here gives the same bits, whatever thread and device a call is made on. All other GPU
tests run with the loader that SAGE_AOT_LOADER names, or the first that works."""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Callable
from typing import Any

import host_entries
import pytest
import torch
from variants import own_specs

import sage_aot
from sage_aot._backends.cuda.backend import CudaBackend
from sage_aot._backends.distribution import DRIVERS
from sage_aot._backends.drivers import Driver
from sage_aot._backends.loader import Library
from sage_aot._call import pipeline
from sage_aot._call.backends import backend_of, default_library, handing
from sage_aot._kernels.manifest import FILE_NAME
from sage_aot._problem.given import Given
from sage_aot._problem.options import Options
from sage_aot._tools import reference
from sage_aot.errors import ArgumentError, CubinError, LaunchError, UnsupportedError

pytestmark = pytest.mark.gpu

OWN = own_specs()
DEVICES = torch.cuda.device_count()


def usable() -> dict[str, Driver]:
    """The loaders that work here, by name."""
    found = {}
    for name, driver in DRIVERS.items() if OWN else ():
        with contextlib.suppress(UnsupportedError):
            found[name] = driver()
    return found


USABLE = usable()
each_loader = pytest.mark.parametrize("loader", USABLE)
several_devices = pytest.mark.skipif(DEVICES < 2, reason="needs two GPUs")


@pytest.fixture
def library(loader) -> Library:
    """The package's kernels, loaded anew through one loader."""
    return Library(default_library().folder, USABLE[loader])


@pytest.fixture
def handed(library):
    """All calls of the process go through `library`."""
    with handing(CudaBackend(library)):
        yield library


def draw(device: str = "cuda:0") -> list[torch.Tensor]:
    """q, k and v, the same on every device."""
    qkv = reference.inputs("outlier", (2, 4, 150, 64), (2, 2, 333, 64), torch.bfloat16,
                           torch.Generator().manual_seed(27))
    return [tensor.to(device) for tensor in qkv]


def attn(*qkv: torch.Tensor, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp, on the CPU, of a call that runs every kind of kernel."""
    out, lse = sage_aot.attn(*qkv, smooth_q=True, return_lse=True, **options)
    return out.cpu(), lse.cpu()


@pytest.fixture(scope="module")
def expected() -> tuple[torch.Tensor, torch.Tensor]:
    """The results with the default library and loader."""
    return attn(*draw())


def equal(found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def in_a_thread(work: Callable[[], object]) -> object:
    """Call a function on a thread that has used no GPU yet; return what it returns, or raise what it raises."""
    found: dict[str, object] = {}

    def run() -> None:
        try:
            found["value"] = work()
        except BaseException as error:  # noqa: BLE001 - a thread's errors are lost otherwise
            found["error"] = error

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if "error" in found:
        raise found["error"]
    return found["value"]


# --- one device -------------------------------------------------------------------------------------------------------


@each_loader
def test_a_loader_gives_the_bits_of_the_call(expected, handed):
    assert equal(attn(*draw()), expected)


@each_loader
@pytest.mark.parametrize("captured", [False, True])
def test_calls_behind_one_another_on_a_stream(handed, captured):
    """An attention kernel may start while its quantizers run. It must not read what they have not written yet, nor the
    workspace of the call before. Calls of two inputs alternate, so that each finds the other's data in the
    workspace."""
    inputs = [reference.inputs("normal", (2, 16, 1500, 64), (2, 16, 1500, 64), torch.bfloat16,
                               torch.Generator("cuda").manual_seed(seed)) for seed in (28, 29)]
    wanted = []
    for qkv in inputs:
        wanted.append(sage_aot.attn(*qkv))
        torch.cuda.synchronize()
    out = [torch.empty_like(qkv[0]) for qkv in inputs for _ in range(10)]

    def queue() -> None:
        for number, own in enumerate(out):
            sage_aot.attn(*inputs[number % 2], out=own)

    queue()
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            queue()
        for own in out:
            own.fill_(torch.nan)
        graph.replay()
    assert all(torch.equal(own, wanted[number % 2]) for number, own in enumerate(out))


@each_loader
@pytest.mark.parametrize("made_before", [False, True])
def test_a_thread_that_used_no_gpu_yet(expected, handed, made_before):
    """torch has bound no context to the thread: everything that the thread needs is there already. Where the call was
    made before, only its launches are left."""
    qkv = draw()
    torch.cuda.synchronize()
    if made_before:
        attn(*qkv)
    assert equal(in_a_thread(lambda: attn(*qkv)), expected)
    assert equal(attn(*qkv), expected)


@each_loader
def test_a_thread_whose_first_call_allocates_nothing_before_its_launches(handed):
    """Output and workspace are the caller's, so not even torch's allocator makes a context current before the
    launch."""
    q, k, v = draw()
    given = Given("dense", q, k, v)
    call = pipeline.prepare(backend_of(q), given, Options(smooth_q=True))
    run: Any = call.run
    out, lse = torch.empty_like(q), call.empty_lse(q)
    workspace = q.new_empty(run.plan.workspace_bytes, dtype=torch.uint8)
    run.run(given, out, lse, workspace)
    wanted = out.clone(), lse.clone()
    out.fill_(torch.nan), lse.fill_(torch.nan), workspace.fill_(0xFF)
    torch.cuda.synchronize()
    in_a_thread(lambda: run.run(given, out, lse, workspace))
    torch.cuda.synchronize()
    assert equal((out, lse), wanted)


@each_loader
def test_many_threads_share_a_prepared_call(expected, handed):
    """Each thread must have its own structs: with another thread's structs it would read that thread's tensors."""
    tensors = [draw() for _ in range(4)]
    for _, _, v in tensors[1::2]:
        v.neg_()
    torch.cuda.synchronize()
    found: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in tensors]
    begin = threading.Barrier(len(tensors))

    def work(number: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            begin.wait()
            found[number] += [attn(*tensors[number]) for _ in range(25)]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(tensors))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    out, lse = expected
    wanted = [(out, lse), attn(*tensors[1])]
    assert torch.equal(wanted[1][1], lse) and not torch.equal(wanted[1][0], out)
    for number, results in enumerate(found):
        assert len(results) == 25 and all(equal(result, wanted[number % 2]) for result in results)


@each_loader
def test_grad_is_refused_after_a_call_of_the_same_kind(expected, handed):
    """A prepared call does not depend on requires_grad, so every call must check it."""
    q, k, v = draw()
    assert equal(attn(q, k, v), expected)
    k.requires_grad_()
    with pytest.raises(ArgumentError, match="k requires grad"):
        attn(q, k, v)
    with torch.no_grad():
        assert equal(attn(q, k, v), expected)
    assert equal(attn(q, k.detach(), v), expected)


@each_loader
def test_addresses_of_another_alignment_after_a_call_of_the_same_kind(expected, handed):
    """Strides stay, at addresses that are not multiples of 16 bytes, and back."""
    def moved(elements: int) -> list[torch.Tensor]:
        flat = [torch.empty(tensor.numel() + 8, dtype=tensor.dtype, device="cuda") for tensor in draw()]
        return [memory[elements:elements + tensor.numel()].view(tensor.shape).copy_(tensor)
                for memory, tensor in zip(flat, draw())]

    for elements in (0, 1, 0, 4, 1):
        qkv = moved(elements)
        assert all(tensor.data_ptr() % 16 == 2 * elements for tensor in qkv)
        assert equal(attn(*qkv), expected)


@each_loader
def test_what_the_driver_refuses_has_its_name(library, monkeypatch):
    record = library.manifest.kernels[OWN[0].name]
    monkeypatch.setattr(library, "read", lambda record: b"no cubin, and no PTX")
    with pytest.raises(LaunchError, match=f"does not load {record.name} .*CUDA_ERROR_"):
        library.load(record, record.spec.entries[0], torch.cuda.current_device())


@each_loader
@pytest.mark.filterwarnings("ignore")  # of the hosts
@pytest.mark.parametrize("entry", host_entries.ENTRIES)
def test_entries_of_hosts_give_the_bits_of_the_default_loader(library, entry):
    """The package sageattention, the ComfyUI node, and models of diffusers and transformers, as hosts call them."""
    if entry in ("diffusers", "transformers"):
        pytest.importorskip(entry)
    expected = host_entries.served(entry, "cuda")
    with handing(CudaBackend(library)):
        found = host_entries.served(entry, "cuda")
    assert library._functions, "the calls went through this loader"
    assert torch.isfinite(found).all() and torch.equal(found, expected)


def test_another_kernel_folder_between_calls(expected, monkeypatch, tmp_path):
    """SAGE_AOT_KERNELS is read at every call, also of a kind that was prepared before."""
    qkv, package = draw(), default_library().folder
    assert equal(attn(*qkv), expected)
    copy = tmp_path / "kernels"
    shutil.copytree(package, copy)
    monkeypatch.setenv("SAGE_AOT_KERNELS", str(copy))
    assert equal(attn(*qkv), expected)
    assert default_library().folder == copy
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.setenv("SAGE_AOT_KERNELS", str(empty))
    with pytest.raises(CubinError, match=f"{empty / FILE_NAME} is missing"):
        attn(*qkv)
    monkeypatch.setenv("SAGE_AOT_KERNELS", str(package))
    assert equal(attn(*qkv), expected)


# --- several devices --------------------------------------------------------------------------------------------------


@several_devices
@each_loader
def test_each_device_has_its_own_functions(expected, handed):
    """Calls on tensors of each device, while either device is current. The current device must not change."""
    tensors = [draw(f"cuda:{device}") for device in range(2)]
    for current in (0, 1, 1, 0):
        with torch.cuda.device(current):
            for device in (1 - current, current, 1 - current):
                assert equal(attn(*tensors[device]), expected)
                assert torch.cuda.current_device() == current
    assert torch.cuda.current_device() == 0


@several_devices
@each_loader
@pytest.mark.parametrize("made_before", [False, True])
@pytest.mark.parametrize("current", [None, 0, 1])
def test_a_fresh_thread_on_the_second_device(expected, handed, current, made_before):
    """The thread's current device is none yet, the other device, or that of the tensors."""
    qkv = draw("cuda:1")
    torch.cuda.synchronize(1)
    if made_before:
        attn(*qkv)

    def work() -> tuple[torch.Tensor, torch.Tensor]:
        if current is not None:
            torch.cuda.set_device(current)
        found = attn(*qkv)
        assert torch.cuda.current_device() == (current or 0)
        return found

    assert equal(in_a_thread(work), expected)
    assert torch.cuda.current_device() == 0


@several_devices
@each_loader
def test_a_stream_of_the_device_of_the_tensors_is_honoured(expected, handed):
    """Another device is current, with a stream of its own."""
    qkv = draw("cuda:1")
    attn(*qkv)
    torch.cuda.synchronize(1)
    stream, late = torch.cuda.Stream("cuda:1"), torch.zeros_like(qkv[0])
    torch.cuda.synchronize(1)
    with torch.cuda.stream(stream):  # makes the second device current, too
        torch.cuda._sleep(30_000_000)  # anything on another stream would read `late` before it is written
        late.copy_(qkv[0])
        with torch.cuda.device(0):
            out, _ = sage_aot.attn(late, *qkv[1:], smooth_q=True, return_lse=True)  # as attn() does
    stream.synchronize()
    assert torch.equal(out.cpu(), expected[0])
