"""A prepared call of CUDA tensors: the structs that reach the driver, also under threads and after a refused launch.

The driver is a stand-in that reads the structs at each launch, as a real driver does; the tensors are on the CPU.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections import namedtuple
from contextlib import contextmanager, nullcontext

import pytest
import torch

from sage_aot._backends.base import BackwardTensors, with_vectors
from sage_aot._backends.cuda import backend as backend_module
from sage_aot._backends.cuda import call as call_module
from sage_aot._backends.cuda.backend import CudaBackend
from sage_aot._backends.cuda.call import CudaCall
from sage_aot._backends.cuda.training import CudaTraining
from sage_aot._backends.loader import KERNEL_FOLDER, Library
from sage_aot._call.backends import default_library
from sage_aot._call.pipeline import plan_of
from sage_aot._launch import plan as planning
from sage_aot._launch.backward import plan_backward
from sage_aot._launch.structs import SOURCES, Packer
from sage_aot._problem.check import check
from sage_aot._problem.given import Given, MaxSeqlens, Stored
from sage_aot._problem.options import Options
from sage_aot._problem.sequences import Sequences
from sage_aot.errors import LaunchError

Seen = namedtuple("Seen", "entry blocks struct stream context")
STREAM = 0xABC0
SIZES = {name: layout.size for name, layout in default_library().manifest.structs.items()}
STRUCT_BYTES = {entry: SIZES[record.params] for record in default_library().manifest.kernels.values()
                for entry in record.spec.entries}


class Driver:
    """Records launches by thread. Contexts are numbers from 1 on, one a device. `before_launch` is called at each
    launch before the struct is read."""

    name, version, cuda = "stand-in", "1", 99990

    def __init__(self):
        self.seen, self.contexts = {}, {}
        self.before_launch = lambda entry: None

    def load(self, device, image, entry, threads, shared_bytes, programmatic):
        return Function(self, entry)

    def context(self, device):
        return 1 + device

    def current(self):
        return self.contexts.get(threading.get_ident(), 0)

    @contextmanager
    def entered(self, context):
        me, before = threading.get_ident(), self.current()
        self.contexts[me] = context
        try:
            yield
        finally:
            self.contexts[me] = before

    def launches(self):
        """The launches of this thread since it last called this."""
        return self.seen.pop(threading.get_ident(), [])


class Function:
    def __init__(self, driver, entry):
        self.driver, self.entry = driver, entry

    def bind(self, blocks, pointers):
        pointer = ctypes.c_void_p.from_address(pointers)

        def launch(stream):
            self.driver.before_launch(self.entry)
            struct = ctypes.string_at(pointer.value, STRUCT_BYTES[self.entry])
            self.driver.seen.setdefault(threading.get_ident(), []).append(
                Seen(self.entry, blocks, struct, stream, self.driver.current()))

        return launch


@pytest.fixture(autouse=True)
def without_a_gpu(monkeypatch):
    """Replaces the functions of torch that need a device."""
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for module in (backend_module, call_module):
        monkeypatch.setattr(module, "sm_count", lambda device: 132)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: STREAM + device, raising=False)


@pytest.fixture
def driver():
    return Driver()


def given_to(tensors, key_mask=None, sequences=None):
    return Given("dense", *tensors, key_mask) if sequences is None else sequences.given(*tensors)


def prepare(driver, tensors, options=Options(), arch="sm89", device=0, key_mask=None,  # noqa: B008 - frozen
            sequences=None):
    given = given_to(tensors, key_mask, sequences)
    library = Library(KERNEL_FOLDER, driver)
    layout = plan_of(CudaBackend(library, arch), check(given, options), device)
    return CudaCall(layout, given, torch.empty_like(given.q), library, device)


def draw(q_shape=(2, 4, 130, 64), kv_shape=(2, 2, 200, 64), offset=(0, 0, 0)):
    """q, k and v that begin `offset` elements behind a multiple of 16 bytes."""
    return [torch.zeros(shape).new_zeros(torch.Size(shape).numel() + by, dtype=torch.bfloat16)[by:].view(shape)
            for shape, by in zip((q_shape, kv_shape, kv_shape), offset)]


def expected_of(call, addresses, at_16_bytes=(True, True, True), stream=STREAM, context=1):
    """The launches of a call, with structs by Packer.pack() and Packed.at() alone."""
    structs = default_library().manifest.structs
    named = dict(zip(SOURCES, addresses))
    return [Seen(launch.entry, launch.blocks, Packer(structs[launch.record.params]).pack(launch.params).at(named),
                 stream, context) for launch in call.launches(at_16_bytes, named["lse"] != 0)]


def run(call, tensors, with_lse=True, key_mask=None, sequences=None):
    """Make a call with a new output and workspace; return the addresses of its tensors."""
    given = given_to(tensors, key_mask, sequences)
    out, lse = torch.empty_like(given.q), torch.empty(given.q.shape[:3]) if with_lse else None
    workspace = torch.empty(call.plan.workspace_bytes, dtype=torch.uint8)
    call.run(given, out, lse, workspace)
    return addresses_in_order(given, out, lse, workspace)


def addresses_in_order(given, out, lse, workspace):
    """Addresses of a call's tensors, in the order of SOURCES."""
    named = {**given.named, "out": out, "lse": lse, "workspace": workspace}
    return [0 if named.get(name) is None else named[name].data_ptr() for name in SOURCES]


# --- structs ----------------------------------------------------------------------------------------------------------


@pytest.mark.kernels("sm80", "sm90")
@pytest.mark.parametrize("with_lse", [True, False])
@pytest.mark.parametrize(("arch", "options"), [
    ("sm89", Options()), ("sm80", Options(qk="int4", is_causal=True)), ("sm90", Options(smooth_v=True, smooth_k=False)),
    ("sm89", Options(smooth_q=True, scale=-0.3)), ("sm89", Options(pv_accum="two_level_f16"))], ids=str)
def test_structs_reach_the_driver_as_they_are_packed(driver, arch, options, with_lse):
    tensors = draw()
    call = prepare(driver, tensors, options, arch)
    for has_lse in (with_lse, with_lse, not with_lse):
        tensors = draw()  # at other addresses, the same strides
        addresses = run(call, tensors, has_lse)
        assert driver.launches() == expected_of(call, addresses)


@pytest.mark.kernels("sm80", "sm90")
@pytest.mark.parametrize("arch", ["sm80", "sm90"])  # 64 and 128 keys a tile
def test_a_trained_forward_pass_saves_k_without_v(driver, arch):
    backend, (q, k, v) = CudaBackend(Library(KERNEL_FOLDER, driver), arch), draw()
    plan = plan_of(backend, check(Given("train", q, k, v), Options()), 0)
    out, lse = torch.empty_like(q), torch.empty(q.shape[:3])
    saved = torch.zeros(backend.kept_bytes(plan), dtype=torch.uint8)
    workspace = torch.randint(256, (plan.workspace_bytes,), dtype=torch.uint8)  # as the kernels might leave it
    given = Given("train", q, k, v, kept=saved)
    forward = CudaCall(plan, given, out, backend.library, 0)
    CudaTraining(forward, plan_backward(plan, backend.manifest).saved).run(given, out, lse, workspace)
    assert driver.launches() == expected_of(forward, addresses_in_order(given, out, lse, workspace))

    begin, size, k_bytes = plan.offsets["kv_hat"], plan.sizes["kv_hat"], plan.kernels.attn.tile.block_n * 64
    tiles = workspace[begin: begin + size].view(2 * 2 * plan.kv_tiles, -1)
    expected = torch.cat([tiles[:, :k_bytes], tiles[:, -128:]], 1).flatten()
    assert torch.equal(saved[-expected.numel():], expected)
    assert not saved[:-expected.numel()].any()  # kernels write Q̂ there


def backward_tensors(grad_out, out, v, *gradients):
    return BackwardTensors(grad_out, Given("train", out, v, v), *gradients)


@pytest.mark.kernels("sm80", "sm90")
def test_structs_of_a_backward_pass_reach_the_driver(driver):
    backend, (q, k, v) = CudaBackend(Library(KERNEL_FOLDER, driver), "sm90"), draw()
    plan = plan_of(backend, check(Given("train", q, k, v), Options()), 0)
    saved, lse = torch.empty(backend.kept_bytes(plan), dtype=torch.uint8), torch.empty(q.shape[:3])

    def made(grad_out):
        """A backward pass with this gradient: its structs as expected of readable tensors, and as seen."""
        tensors = backward_tensors(grad_out, torch.empty_like(q), v, *map(torch.empty_like, (q, k, v)))
        workspace = torch.empty(call.plan.workspace_bytes, dtype=torch.uint8)
        call.run(tensors, lse, saved, workspace)
        named = {name: x.data_ptr() for name, x in tensors.named.items()}
        named |= {"lse": lse.data_ptr(), "kept": saved.data_ptr(), "workspace": workspace.data_ptr()}
        structs = default_library().manifest.structs
        expected = [Packer(structs[launch.record.params]).pack(launch.params).at(named)
                    for launch in call.launches(tensors.readable())]
        return expected, [seen.struct for seen in driver.launches()]

    call = backend.bind_backward(plan, backward_tensors(q, q, v, q, k, v))
    transposed = torch.zeros(2, 130, 4, 64, dtype=torch.bfloat16)
    for _ in range(2):
        expected, seen = made(transposed.clone().transpose(1, 2))
        assert seen == expected
    misaligned = torch.zeros(transposed.numel() + 1, dtype=torch.bfloat16)[1:].view(transposed.shape).transpose(1, 2)
    expected, seen = made(misaligned)
    assert [x[:8] for x in seen] != [x[:8] for x in expected]  # grad_out, the first field: the address of a copy
    assert int.from_bytes(seen[0][:8], "little") % 16 == 0
    assert [x[8:] for x in seen] == [x[8:] for x in expected]  # its strides are those of the copy


@pytest.mark.kernels("sm80")
@pytest.mark.parametrize("packed", ["nothing", "keys", "sequences"])
def test_rows_that_no_launch_writes_are_cleared(driver, packed):
    """The gradients of hidden keys, and all results of rows of no sequence: no launch runs here."""
    backend, (q, k, v) = CudaBackend(Library(KERNEL_FOLDER, driver), "sm80"), draw()
    given = Given("train", q, k, v, key_mask=torch.ones(2, 200, dtype=torch.bool) if packed == "keys" else None)
    if packed == "sequences":
        q, k, v = (x[0].transpose(0, 1).contiguous() for x in (q, k, v))
        begins = torch.tensor([0, 100, 120], dtype=torch.int32)
        given = Given("train_varlen", q, k, v, cu_seqlens_q=begins, cu_seqlens_k=begins, details=MaxSeqlens(100, 100))
    results = out, *gradients = [torch.full_like(x, torch.nan) for x in (q, q, k, v)]
    tensors = BackwardTensors(q, given.having(q=out, k=v), *gradients)
    plan = plan_of(backend, check(given, Options()), 0)
    lse = torch.full(plan.problem.lse_shape, torch.nan)
    kept, workspace = (torch.empty(size, dtype=torch.uint8)
                       for size in (backend.kept_bytes(plan), plan.workspace_bytes))
    forward = CudaTraining(CudaCall(plan, given, out, backend.library, 0), plan_backward(plan, backend.manifest).saved)
    forward.run(given._replace(kept=kept), out, lse, workspace)
    backward = backend.bind_backward(plan, tensors)
    backward.run(tensors, lse, kept, kept.new_empty(backward.plan.workspace_bytes))
    cleared = {"nothing": [False] * 4, "keys": [False, False, True, True], "sequences": [True] * 4}[packed]
    assert [bool((x == 0).all()) for x in results] == cleared
    assert all(x.isnan().all() for x, is_cleared in zip(results, cleared) if not is_cleared)
    assert (lse == -torch.inf).all() if packed == "sequences" else lse.isnan().all()
    assert all(seen.entry.endswith("_packed") == (packed != "nothing") for seen in driver.launches()[-3:])


@pytest.mark.kernels("sm80")
@pytest.mark.parametrize(("asked", "kinds"), [
    ("q", ["bwdprep", "bwdq"]), ("kv", ["bwdprep", "bwdkv"]), ("qkv", ["bwdprep", "bwdkv", "bwdq"])])
def test_gradients_that_nobody_asks_for_are_not_computed(driver, asked, kinds):
    backend, (q, k, v) = CudaBackend(Library(KERNEL_FOLDER, driver), "sm80"), draw()
    plan = plan_of(backend, check(Given("train", q, k, v), Options()), 0)
    saved, lse = torch.empty(backend.kept_bytes(plan), dtype=torch.uint8), torch.empty(q.shape[:3])
    every = backward_tensors(q, torch.empty_like(q), v, *map(torch.empty_like, (q, k, v)))
    tensors = every._replace(**{f"grad_{name}": None for name in "qkv" if name not in asked})
    call = backend.bind_backward(plan, tensors)
    workspace = torch.empty(call.plan.workspace_bytes, dtype=torch.uint8)
    call.run(tensors, lse, saved, workspace)
    assert [launch.record.spec.kind for launch in call.launches(tensors)] == kinds
    seen = {kind: launch.struct for kind, launch in zip(kinds, driver.launches())}
    call.run(every, lse, saved, workspace)
    of_all = {kind: launch.struct for kind, launch in zip(("bwdprep", "bwdkv", "bwdq"), driver.launches())}
    fields = default_library().manifest.structs[call.plan.kernels["bwdprep"].params].fields
    nobodys = {fields[f"grad_{name}"][1] for name in "qkv" if name not in asked}
    for kind in kinds:  # what is asked for has the struct of all gradients, less the others' addresses
        for field in range(0, len(seen[kind]), 8):
            own, other = (struct[field:field + 8] for struct in (seen[kind], of_all[kind]))
            assert own == other or any(begin <= field < begin + 32 for begin in nobodys), (kind, field)
            assert field not in nobodys or own == bytes(8)


@pytest.mark.parametrize(("make", "is_copy"), [
    (lambda: torch.randn(2, 3, 5, 64).bfloat16(), False),
    (lambda: torch.randn(2, 5, 3, 64).bfloat16().transpose(1, 2), False),
    (lambda: torch.randn(2, 3, 5, 128).bfloat16()[..., 8:72], False),
    (lambda: torch.randn(2, 3, 5, 128).bfloat16()[..., 1:65], True),
    (lambda: torch.randn(2, 3, 5, 65).bfloat16()[..., :64], True),
    (lambda: torch.randn(2, 3, 64, 5).bfloat16().transpose(2, 3), True),
    (lambda: torch.randn(1).bfloat16().expand(2, 3, 5, 64), True),
    (lambda: torch.randn(2, 5, 61, 3).bfloat16().permute(0, 3, 1, 2), True),
    (lambda: torch.randn(2, 3, 5, 61).bfloat16(), True), (lambda: torch.randn(2, 3, 5, 1).bfloat16(), True)])
def test_rows_of_whole_vectors(make, is_copy):
    """Rows that kernels can read are not copied; of others a copy has zeros behind the last channel."""
    given = make()
    rows = with_vectors(given)
    assert (rows is not given) == is_copy
    assert rows.data_ptr() % 16 == 0
    assert rows.stride(-1) == 1
    assert not any(stride % 8 for stride in rows.stride()[:-1])
    channels = given.shape[-1]
    assert torch.equal(rows[..., :channels], given)
    assert rows.shape == (*given.shape[:-1], -(-channels // 8) * 8)
    assert not rows[..., channels:].any()


@pytest.mark.parametrize("smooth_q", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_structs_of_quantized_k_and_v_reach_the_driver(driver, monkeypatch, smooth_q, masked):
    """The call that quantizes k and v writes what the other reads, and neither gets an address that is not its own."""
    backend, options = CudaBackend(Library(KERNEL_FOLDER, driver), "sm89"), Options(smooth_q=smooth_q)
    q, k, v = draw()
    key_mask = torch.ones(2, 200, dtype=torch.bool) if masked else None
    given = Given("kv", None, k, v, key_mask)
    quantizing = plan_of(backend, check(given, options), 0)
    call = CudaCall(quantizing, given, None, backend.library, 0)
    kept = torch.empty(backend.kept_bytes(quantizing), dtype=torch.uint8)
    workspace = torch.empty(quantizing.workspace_bytes, dtype=torch.uint8)
    given = given._replace(kept=kept)
    call.run(given, None, None, workspace)
    assert len(call.launches()) == 2 + masked
    assert driver.launches() == expected_of(call, addresses_in_order(given, None, None, workspace))

    given = Given("stored", q, k if smooth_q else None, kept=kept,
                  details=Stored(tuple(k.shape), k.dtype, masked, "sm89"))
    attending = plan_of(backend, check(given, options), 0)
    call = CudaCall(attending, given, torch.empty_like(q), backend.library, 0)
    assert backend.kept_bytes(attending) == kept.numel()
    out, workspace = torch.empty_like(q), torch.empty(attending.workspace_bytes, dtype=torch.uint8)
    call.run(given, out, None, workspace)
    addresses = addresses_in_order(given, out, None, workspace)
    assert len(call.launches()) == 2 + smooth_q
    assert driver.launches() == expected_of(call, addresses)

    monkeypatch.setattr(torch._C, "_cuda_cudaCachingAllocator_raw_alloc", lambda *_: workspace.data_ptr(),
                        raising=False)
    monkeypatch.setattr(torch._C, "_cuda_cudaCachingAllocator_raw_delete", lambda _: None, raising=False)
    with driver.entered(1):  # the device's context: the call asks torch's allocator for raw memory
        call(given, out, None)
    assert driver.launches() == expected_of(call, addresses)


@pytest.mark.parametrize("with_lse", [True, False])
def test_a_key_mask_reaches_the_kernel_that_packs(driver, with_lse):
    tensors, masks = draw(), [torch.zeros(2, 600, dtype=torch.bool)[:, ::3] for _ in range(2)]
    call = prepare(driver, tensors, key_mask=masks[0])
    for mask in masks:  # at another address, the same strides
        addresses = run(call, tensors, with_lse, mask)
        seen = driver.launches()
        assert seen == expected_of(call, addresses) and [each.entry for each in seen][0] == "sage_pack_sm89"
        layout = default_library().manifest.structs["PackParams"].fields["key_mask"][1]
        data, batch, _, row = struct.unpack_from("<Qqqq", seen[0].struct, layout)
        assert (data, batch, row) == (mask.data_ptr(), 600, 3)


@pytest.mark.kernels("sm80", "sm90")
@pytest.mark.parametrize("with_lse", [True, False])
@pytest.mark.parametrize(("arch", "splits"), [("sm90", 14), ("sm80", 27)])
def test_what_blocks_leave_of_split_keys_reaches_the_kernel_that_merges(driver, arch, splits, with_lse):
    """Splits are as many as the SMs of the device ask for, or as the backend is told."""
    tensors = draw((1, 4, 20, 64), (1, 4, 1700, 64))
    call = prepare(driver, tensors, arch=arch)
    assert call.plan.splits == splits
    for _ in range(2):
        tensors = draw((1, 4, 20, 64), (1, 4, 1700, 64))
        addresses = run(call, tensors, with_lse)
        seen = driver.launches()
        assert seen == expected_of(call, addresses) and [each.entry for each in seen][-1] == f"sage_merge_{arch}"
        fields = default_library().manifest.structs["MergeParams"].fields
        lse, = struct.unpack_from("<Q", seen[-1].struct, fields["lse"][1])
        assert lse == addresses[SOURCES.index("lse")] and (lse != 0) == with_lse
    backend = CudaBackend(call._library, arch, splits=2)
    assert plan_of(backend, call.plan.problem, 0).splits == 2


@pytest.mark.parametrize("with_lse", [True, False])
def test_sequences_reach_the_kernels(driver, with_lse):
    q, k, v = (tensor[0].transpose(0, 1) for tensor in draw())
    several = [Sequences.of_lengths((100, 30), (50, 150)) for _ in range(2)]
    call = prepare(driver, (q, k, v), sequences=several[0])
    for sequences in several:  # at other addresses
        addresses = run(call, (q, k, v), with_lse, sequences=sequences)
        seen = driver.launches()
        assert seen == expected_of(call, addresses) and [each.entry for each in seen][0].startswith("sage_quant_sm89")
        for launched, name in zip(seen, ("QuantParams", "QuantParams", "AttnParams")):
            fields = default_library().manifest.structs[name].fields
            found = [struct.unpack_from("<Q", launched.struct, fields[field][1])[0]
                     for field in ("cu_seqlens_q", "cu_seqlens_k")]
            assert found == [sequences.cu_seqlens_q.data_ptr(), sequences.cu_seqlens_k.data_ptr()]
        layout = default_library().manifest.structs["QuantParams"].fields["q"][1]
        of_q = struct.unpack_from("<Qqqq", seen[0].struct, layout)
        assert of_q == (q.data_ptr(), 0, q.stride(1), q.stride(0))


@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_structs_have_the_strides_of_the_layout(driver, layout):
    tensors = draw() if layout == "HND" else [tensor.transpose(1, 2).contiguous() for tensor in draw()]
    call = prepare(driver, tensors, Options(layout=layout))
    strides = {"HND": ((4 * 130 * 64, 130 * 64, 64), (2 * 200 * 64, 200 * 64, 64)),
               "NHD": ((4 * 130 * 64, 64, 4 * 64), (2 * 200 * 64, 64, 2 * 64))}[layout]
    _, quant, attn = call.launches()
    found = quant.params["q"], quant.params["k"], attn.params["out"]
    assert [tensor[1:] for tensor in found] == [strides[0], strides[1], strides[0]]
    addresses = run(call, tensors)
    assert driver.launches() == expected_of(call, addresses)


def test_structs_of_heads_in_several_launches(driver, monkeypatch):
    monkeypatch.setattr(planning, "DELTA_BYTES", 1)
    tensors = draw()
    call = prepare(driver, tensors, Options(smooth_q=True))
    addresses = run(call, tensors)
    seen = driver.launches()
    assert call.plan.heads_at_once == 1 and len(seen) == 2 + 2 * 8
    assert seen == expected_of(call, addresses)
    assert seen[0].struct == seen[1].struct  # of the statistics and the quantizer
    assert len({each.struct for each in seen}) == len(seen) - 1  # each other launch has its own heads


@pytest.mark.parametrize("offset", [(1, 0, 0), (0, 4, 0), (0, 0, 7), (1, 1, 1), (8, 8, 8), (0, 8, 1)], ids=str)
def test_unaligned_tensors_are_said_to_be(driver, offset):
    """The alignment counts at each call, whatever the alignment when the call was prepared."""
    call, tensors = prepare(driver, draw()), draw(offset=offset)
    at_16_bytes = tuple(by % 8 == 0 for by in offset)
    for _ in range(2):
        addresses = run(call, tensors)
        assert driver.launches() == expected_of(call, addresses, at_16_bytes)
    statistics, quantizer, _ = call.launches(at_16_bytes)
    rows = "_bf16" if all(at_16_bytes) else "_any"
    assert quantizer.entry.endswith(rows) and statistics.entry.endswith(f"{rows}_statistics")
    aligned = draw()
    addresses = run(call, aligned)
    assert driver.launches() == expected_of(call, addresses)


def test_a_call_is_on_the_device_that_it_was_prepared_for(driver):
    tensors = draw()
    call = prepare(driver, tensors, device=1)
    addresses = run(call, tensors)
    assert driver.launches() == expected_of(call, addresses, stream=STREAM + 1, context=2)


def test_a_call_allocates_the_workspace_of_its_plan(driver):
    q, k, v = draw()
    call, made = prepare(driver, (q, k, v)), []

    class Allocating(torch.Tensor):
        def new_empty(self, *arguments, **options):
            made.append((arguments, options))
            return super().new_empty(*arguments, **options)

    call(Given("dense", q.as_subclass(Allocating), k, v), torch.empty_like(q), None)
    assert made == [((call.plan.workspace_bytes,), {"dtype": torch.uint8})]
    assert len(driver.launches()) == 3


# --- threads ----------------------------------------------------------------------------------------------------------


def together(count, work):
    """`work(i)` on so many threads at once; the first error of any."""
    errors = []

    def guarded(i):
        try:
            work(i)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_threads_that_meet_in_a_queue_send_their_own_addresses(driver):
    """Threads wait for each other in the first launch: all have filled in their structs before any struct is read."""
    call, count = prepare(driver, draw()), 6
    meet = threading.Barrier(count, timeout=60)
    first = call.launches()[0].entry

    def wait(entry):
        if entry == first:
            meet.wait()

    def work(i):
        tensors = draw()
        for _ in range(3):
            addresses = run(call, tensors, with_lse=i % 2 == 0)
            assert driver.launches() == expected_of(call, addresses)

    driver.before_launch = wait
    together(count, work)


def test_threads_prepare_queues_of_other_alignments_at_once(driver):
    call, count = prepare(driver, draw()), 8
    meet = threading.Barrier(count, timeout=60)

    def work(i):
        offset = (i & 1, i >> 1 & 1, i >> 2 & 1)
        tensors = draw(offset=offset)
        meet.wait()
        addresses = run(call, tensors)
        assert driver.launches() == expected_of(call, addresses, tuple(not by for by in offset))

    together(count, work)


def test_structs_are_kept_for_as_many_threads_as_met(driver):
    call = prepare(driver, draw())
    for _ in range(3):
        run(call, draw(), with_lse=False)
    assert len(call._usual._free) == 1


# --- contexts and refusals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [0, 1, 2])
def test_a_thread_gets_its_context_back(driver, before):
    tensors = draw()
    call = prepare(driver, tensors)
    driver.contexts[threading.get_ident()] = before
    addresses = run(call, tensors)
    assert driver.current() == before
    assert driver.launches() == expected_of(call, addresses)


@pytest.mark.parametrize("before", [0, 1, 2])
@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_refused_launch_names_its_kernel_and_the_next_call_works(driver, position, before):
    tensors = draw()
    call = prepare(driver, tensors, Options(smooth_q=True))
    name, left = call.launches()[position].record.name, [position]

    def refuse(entry):
        left[0] -= 1
        if left[0] == -1:
            raise OSError("CUDA_ERROR_LAUNCH_FAILED: bad launch")

    driver.contexts[threading.get_ident()] = before
    driver.before_launch = refuse
    with pytest.raises(LaunchError, match=f"^the driver does not launch {name} on device 0: CUDA_ERROR_L"):
        run(call, tensors)
    assert driver.current() == before
    assert len(driver.launches()) == position
    addresses = run(call, tensors)
    assert driver.launches() == expected_of(call, addresses)


def test_what_the_driver_says_of_a_context_is_a_launch_error(driver, monkeypatch):
    """The driver may refuse a context when a thread enters the call's context, or when the call is prepared."""
    call = prepare(driver, draw())
    driver.contexts[threading.get_ident()] = 7

    def refuse(context):
        raise RuntimeError("CUDA_ERROR_CONTEXT_IS_DESTROYED: gone")

    monkeypatch.setattr(driver, "entered", refuse)
    with pytest.raises(LaunchError, match="^the driver does not enter the context of device 0: CUDA"):
        run(call, draw())
    monkeypatch.setattr(driver, "context", refuse)
    with pytest.raises(LaunchError, match="^the driver has no context for device 0: CUDA_ERROR_CONTEXT_IS_DESTROYED"):
        prepare(driver, draw())
