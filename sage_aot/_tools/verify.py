"""``sage-aot verify``: whether the installed files are those that were built, and compute right on the GPUs here.

The files come first: the installed wheel is compared with its RECORD, the manifest with its own sha256 (its seal), and
every kernel with the sha256 in the manifest. Then every GPU loads all files that it can take, and runs each attention
kernel among them on random inputs. The memory that the kernels write is filled with NaN before. The outputs are
compared with the emulation's, within the bounds of compare.py.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.metadata
import itertools
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from sage_aot._backends.cuda.backend import CudaBackend
from sage_aot._backends.cuda.call import CudaCall
from sage_aot._backends.cuda.device import gpu_here
from sage_aot._backends.drivers import default_driver
from sage_aot._backends.emulation.backend import elements_of, packed_entries, sequence_entries
from sage_aot._backends.emulation.quantize import quantize
from sage_aot._backends.loader import Library
from sage_aot._call.backends import default_library
from sage_aot._call.pipeline import Prepared, plan_of, prepare, quantizer_of
from sage_aot._kernels.drivers import cuda_text, too_old
from sage_aot._kernels.manifest import FILE_NAME, AttnRecord, KernelRecord, Manifest
from sage_aot._launch.choose import Gpu, unsupported
from sage_aot._problem.given import Given, Stored
from sage_aot._problem.options import Options
from sage_aot._problem.sequences import Sequences
from sage_aot._problem.tensors import MASK_BLOCK
from sage_aot._tools import reference
from sage_aot._tools.compare import Measure, against_emulation, same
from sage_aot.errors import CubinError, SageAotError, UnsupportedError

if TYPE_CHECKING:
    from importlib.abc import Traversable

VERIFIED, FAILED, NOT_RUN = 0, 1, 3
"""Exit codes; 2 is that of a wrong command line."""

class Shape(NamedTuple):
    """A call of a self-test."""

    batch: int
    q_heads: int
    kv_heads: int
    queries: int
    keys: int
    fewer: int  # channels fewer than the kernel's
    dtype: torch.dtype
    has_key_mask: bool = False
    lengths: tuple[tuple[int, ...], tuple[int, ...]] | None = None  # of sequences: queries, and keys, of each
    is_stored: bool = False  # k and v are quantized before
    has_sinks: bool = False
    has_masks: bool = False  # of elements and of blocks


SHAPES = (Shape(1, 4, 2, 150, 333, 0, torch.bfloat16), Shape(2, 2, 1, 129, 65, 7, torch.float16),
          Shape(1, 2, 1, 70, 130, 3, torch.float32), Shape(1, 2, 1, 20, 2500, 1, torch.bfloat16),
          Shape(2, 2, 1, 20, 200, 0, torch.bfloat16, is_stored=True),
          Shape(2, 2, 1, 70, 300, 0, torch.bfloat16, has_key_mask=True),
          Shape(1, 2, 1, 221, 310, 0, torch.float16, lengths=((150, 1, 0, 70), (40, 200, 70, 0))))
"""Shapes with ragged tiles, grouped heads, rows that are not aligned, keys that several blocks share, k and v that are
quantized before, and sequences without queries or without keys. With a causal mask, queries of the second and the last
call see no key."""

SPARSE_SHAPES = (Shape(2, 2, 1, 150, 300, 0, torch.bfloat16, has_sinks=True, has_masks=True),
                 Shape(1, 2, 1, 20, 2500, 1, torch.bfloat16, has_sinks=True))
"""Further calls, of kernels of sparse masks; of the second, splits share the keys, and the sinks."""


@dataclass(frozen=True)
class Outcome:
    """The result of one self-test: the worst error in units of its bound, and what failed, or None."""

    worst: float
    failure: str | None


def main(*, files_only: bool = False, seed: int | None = None) -> int:
    """Check, print a table and a verdict, and return the exit code.

    VERIFIED: nothing is wrong (with `files_only`, nothing with the files). FAILED: something is wrong. NOT_RUN: the
    files are right, but no GPU ran a kernel. `seed`: of the random inputs; None draws one.
    """
    library = default_library()
    problems = _check_files(library)
    if files_only:
        return _verdict(problems, "the files are right; no kernel was run, as asked")
    ran = 0
    if not _unreadable(library):
        seed = random.SystemRandom().getrandbits(32) if seed is None else seed
        for device in range(torch.cuda.device_count()):
            tested, failed = _check_device(library, device, seed)
            ran += tested
            problems += failed
    if ran:
        return _verdict(problems, f"the files are right, {ran} self-tests passed")
    return _verdict(problems, "the files are right, but NOTHING WAS RUN: no GPU here runs these kernels (`sage-aot "
                    "info` says why)", NOT_RUN)


def _verdict(problems: list[str], passed: str, code: int = VERIFIED) -> int:
    if problems:
        print(f"FAILED: {len(problems)} problem{'s' if len(problems) > 1 else ''}")
        return FAILED
    print(f"{'verified' if code == VERIFIED else 'not verified'}: {passed}")
    return code


# --- files ------------------------------------------------------------------------------------------------------------


def _check_files(library: Library) -> list[str]:
    package = Path(__file__).parents[1]
    recorded = recorded_files(package)
    damaged = list(record_problems(recorded))
    _row("wheel", f"{len(recorded)} files as in its RECORD" if recorded else
         "not installed from one, so there is no RECORD to compare with", damaged)
    wrong = list(kernel_problems(library))
    count = 0 if wrong else len(library.manifest.kernels)
    _row("kernels", f"{library.folder}: the manifest's seal holds, {count} files as in it", wrong)
    return damaged + wrong


def _row(what: str, passed: str, problems: list[str]) -> None:
    lines = [f"FAILED {problem}" for problem in problems] or [f"ok     {passed}"]
    for i, line in enumerate(lines):
        print(f"{'' if i else what:8} {line}")


def recorded_files(package: Path) -> dict[Traversable, str]:
    """The files of the wheel that this package was installed from, with their hashes in its RECORD; none for a source
    tree. The RECORD is read here, since importlib.metadata leaves out missing files from Python 3.12 on.
    """
    for found in importlib.metadata.distributions(name="sage-aot"):
        rows = csv.reader((found.read_text("RECORD") or "").splitlines())
        files = {cast("Traversable", found.locate_file(name)): digest for name, digest, _ in rows
                 if digest and name.startswith(f"{package.name}/")}
        if any(Path(str(path)).parent.resolve() == package.resolve() for path in files):
            return files
    return {}


def record_problems(files: Mapping[Traversable, str]) -> Iterator[str]:
    """Files of a wheel that are missing or differ from its RECORD, a sentence each."""
    for path, digest in files.items():
        mode, expected = digest.split("=", 1)
        if not path.is_file():
            yield f"{path} is missing; reinstall sage-aot"
            continue
        found = base64.urlsafe_b64encode(hashlib.new(mode, path.read_bytes()).digest()).rstrip(b"=").decode()
        if found != expected:
            yield f"{path} has {mode} {found}, the wheel's RECORD says {expected}: it was changed; reinstall sage-aot"


def kernel_problems(library: Library) -> Iterator[str]:
    """Problems of a kernel folder, a sentence each: a manifest that cannot be read, files that are missing or
    differ from the manifest, files that are not in it."""
    problem = _unreadable(library)
    if problem:
        yield problem
        return
    for record in library.manifest.kernels.values():
        try:
            library.read(record)
        except CubinError as error:
            yield str(error)
    known = {FILE_NAME, *(record.file for record in library.manifest.kernels.values())}
    for path in sorted(library.folder.iterdir(), key=lambda path: path.name):
        if path.name not in known:
            yield f"{path} is not in the manifest: it is left of another version; remove it, or reinstall sage-aot"


def _unreadable(library: Library) -> str | None:
    """The reason why a folder's manifest cannot be read, or None."""
    try:
        library.manifest  # noqa: B018 - read when it is first asked for
    except CubinError as error:
        return str(error)
    return None


# --- GPUs -------------------------------------------------------------------------------------------------------------


def _check_device(library: Library, device: int, seed: int) -> tuple[int, list[str]]:
    """Load and run the files that a GPU can take. Returns how many self-tests ran, and what failed."""
    gpu = gpu_here(device)
    print(f"cuda:{device}   {gpu}")
    records = takes(gpu, library.manifest)
    if not records:
        print(f"         {unsupported(gpu, library.manifest)}")
        return 0, []
    try:
        driver = default_driver()
    except UnsupportedError as error:
        _row("", "", [str(error)])
        return 0, [str(error)]
    with torch.cuda.device(device):
        loaded, problems = _load(library, records, device)
        _row("", f"{driver.name} {driver.version} (driver for CUDA {cuda_text(driver.cuda)}) loads all {len(records)} "
             f"files that this GPU can take", problems)
        print(f"         seed {seed}; errors in units of their bound")
        tests = [record for record in loaded if isinstance(record, AttnRecord)]
        for record in tests:
            outcome = self_test(library, record, f"cuda:{device}", seed)
            print(f"         {'FAILED' if outcome.failure else 'ok':6} {record.name}  "
                  f"{outcome.failure or f'{outcome.worst:.2f}'}")
            if outcome.failure:
                problems.append(f"{record.name}: {outcome.failure}")
    return len(tests), problems


def takes(gpu: Gpu, manifest: Manifest) -> list[KernelRecord]:
    """Records of all files that a GPU can load, whether a call would choose them or not."""
    return [record for record in manifest.kernels.values()
            if record.serves(gpu.capability) and not (gpu.cuda and too_old(gpu.cuda, record.least_driver))]


def _load(library: Library, records: list[KernelRecord], device: int) -> tuple[list[KernelRecord], list[str]]:
    loaded, problems = [], []
    for record in records:
        try:
            for entry in record.spec.entries:
                library.load(record, entry, device)
            loaded.append(record)
        except SageAotError as error:
            problems.append(str(error))
    return loaded, problems


def self_test(library: Library, record: AttnRecord, device: str, seed: int) -> Outcome:
    """Run an attention kernel with its companions on the inputs of SHAPES, and compare it with the emulation."""
    worst = 0.0
    try:
        shapes = SHAPES + (SPARSE_SHAPES if record.spec.mask == "sparse" else ())
        for shape, with_lse in itertools.product(shapes, _log_sum_exps(record)):
            for measure in _measures(library, record, device, seed, shape, with_lse):
                largest = measure.excess.max().item() if measure.excess.numel() else 0.0
                if not largest <= 1:
                    return Outcome(largest, f"{measure.name} {measure.describe()}")
                worst = max(worst, largest)
    except (SageAotError, RuntimeError) as error:  # torch raises RuntimeError where a kernel failed on the device
        return Outcome(float("inf"), str(error).splitlines()[0])
    return Outcome(worst, None)


def _log_sum_exps(record: AttnRecord) -> tuple[bool, ...]:
    """True for calls of a self-test that ask for the log-sum-exp. Both values where P is linear: it is so only in calls
    that do not ask."""
    return (True, False) if record.spec.p == "linear" else (True,)


def _measures(library: Library, record: AttnRecord, device: str, seed: int, shape: Shape,
              with_lse: bool) -> Iterator[Measure]:
    headdim, generator = record.spec.headdim - shape.fewer, torch.Generator().manual_seed(seed)
    q, k, v = reference.inputs("outlier", (shape.batch, shape.q_heads, shape.queries, headdim),
                                (shape.batch, shape.kv_heads, shape.keys, headdim), shape.dtype, generator)
    given = Given("dense", q, k, v)
    if shape.has_key_mask:
        given = given._replace(key_mask=torch.rand(shape.batch, shape.keys, generator=generator) < 0.7)
    if shape.has_sinks:
        given = given._replace(sinks=torch.randn(shape.q_heads, generator=generator, dtype=torch.float32))
    if shape.has_masks:
        of_call = shape.batch, shape.q_heads
        given = given._replace(
            attn_mask=torch.rand(*of_call, shape.queries, shape.keys, generator=generator) < 0.7,
            block_mask=torch.rand(*of_call, -(-shape.queries // MASK_BLOCK), -(-shape.keys // MASK_BLOCK),
                                  generator=generator) < 0.7)
    if shape.lengths:
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        given = Sequences.of_lengths(*shape.lengths).given(q, k, v)
    backend = CudaBackend(library, record.spec.arch)
    options = Options.of_axes(record.spec.values)  # these ask for just this kernel
    on_device = given.having(**{name: tensor.to(device) for name, tensor in given.named.items()})
    call = prepare(backend, on_device, options)
    problem, plan = call.problem, cast(CudaCall, call.run).plan
    out, lse = run_stored(backend, options, on_device, with_lse) if shape.is_stored else _run(call, on_device, with_lse)
    if given.key_mask is not None:
        for b, entry in enumerate(packed_entries(problem, q, k, v, given.key_mask)):
            yield from against_emulation(replace(plan, problem=entry.problem), entry.quantize(plan.kernels),
                                         out[b:b + 1], None if lse is None else lse[b:b + 1], entry.key_ranks)
    elif shape.lengths:
        for own in sequence_entries(problem, given):
            of_entry = out[own.rows].transpose(0, 1)[None], None if lse is None else lse[None, :, own.rows]
            if own.problem.is_empty:
                yield from (same(name, got, torch.full_like(got, value)) for name, got, value in zip(
                    ("zeros without keys", "log-sum-exp without keys"), of_entry, (0.0, -torch.inf))
                    if got is not None)
            else:
                yield from against_emulation(replace(plan, problem=own.problem),
                                             quantize(own.problem, plan.kernels, own.q, own.k, own.v), *of_entry)
    else:
        yield from against_emulation(plan, quantize(problem, plan.kernels, q, k, v), out, lse, sinks=given.sinks,
                                     elements=elements_of(problem, given))


def _run(call: Prepared[Any], given: Given, with_lse: bool = True) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Output and log-sum-exp, where it is asked for, on the CPU. Memory that the kernels write is filled with NaN
    before."""
    q = given.like
    out = torch.full_like(q, torch.nan, memory_format=torch.contiguous_format)
    lse = call.empty_lse(q).fill_(torch.nan) if with_lse else None
    _make(call, given, out, lse)
    return out.cpu(), None if lse is None else lse.cpu()


def _make(call: Prepared[Any], given: Given, out: torch.Tensor | None, lse: torch.Tensor | None) -> None:
    """Make a prepared call on a workspace of NaN."""
    run = cast(CudaCall, call.run)
    run.run(given, out, lse, torch.full((run.plan.workspace_bytes,), 0xFF, dtype=torch.uint8,
                                        device=given.like.device))


def run_stored(backend: CudaBackend, options: Options, given: Given,
               with_lse: bool = True) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute :func:`_run` by two calls, the first of which quantizes k and v."""
    k = given.k
    assert k is not None
    quantizing = prepare(backend, Given("kv", None, k, given.v), options)
    kept = torch.full((quantizing.kept_bytes,), 0xFF, dtype=torch.uint8, device=k.device)
    _make(quantizing, Given("kv", None, k, given.v, kept=kept), None, None)
    quantizer = quantizer_of(plan_of(backend, quantizing.problem, k.get_device()).kernels)
    attending = Given("stored", given.q, k if options.resolved.smooth_q else None, kept=kept,
                      details=Stored(tuple(k.shape), k.dtype, False, quantizer))
    return _run(prepare(backend, attending, options), attending, with_lse)
