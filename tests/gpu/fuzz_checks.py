"""One call of the fuzzer and all that is expected of it.

The call is the public one. Its results are held against what the caller was promised: attention of each head in
float64, from the caller's own tensors, within documented bounds (fuzz_oracle.py). On a GPU it runs the kernels of any
arch whose folder holds cubins for it, into poisoned memory, and what they left is held against the emulation of what
they were handed (fuzz_kernels.py). On the CPU the call is the emulation. Every check yields its error in units of its
bound, element by element.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import fuzz_oracle as oracle
import torch
from fuzz_cases import (
    TORCH_DTYPES,
    Case,
    Masks,
    make_key_mask,
    make_masks,
    make_sequences,
    make_sinks,
    make_sparse,
    make_tensors,
    spoil,
)
from fuzz_kernels import against_emulated, divides_alike
from fuzz_oracle import Arithmetic
from fuzz_spy import Handed, Spy, on_cpu
from selection_checks import Selection, ends_of, failures, is_decided, sizes_of
from training_checks import Trained, against_emulated_training, make_grad_out, train

import sage_aot
from sage_aot._backends.base import Backend
from sage_aot._backends.cuda.backend import CudaBackend
from sage_aot._backends.cuda.device import arch_of
from sage_aot._backends.emulation.backend import EmulationBackend
from sage_aot._backends.loader import Library
from sage_aot._call.backends import handing
from sage_aot._call.kv import OF_CALL
from sage_aot._kernels.axes import least_headdim
from sage_aot._kernels.manifest import Manifest
from sage_aot._kernels.spec import BACKWARD
from sage_aot._launch.choose import built_archs
from sage_aot._problem.options import OPTIONS
from sage_aot._problem.problem import heads_first
from sage_aot._problem.sequences import Sequences
from sage_aot._tools.compare import Measure, close, same
from sage_aot.integrations import Policy, report, reset_report, use
from sage_aot.integrations.torch import sdpa, torchs

INDEPENDENT = {"normal", "outlier", "biased_v", "huge", "wide_v", "tiny", "unequal"}
"""Kinds whose elements are independent, but for what channels have in common."""

LINEAR_P = {"sm89", "sm120"}
"""Archs with a linear P, in addition to sm90."""

F16_PV = {"sm80", "sm86", "sm87", "sm100", "ptx80"}
"""The archs whose P and V are f16: those without FP8 in mma.sync (docs/accuracy.md)."""

SERVED = "sage_aot"
"""The line of the integrations' report that counts the calls that sage_aot served."""


FINITE = "what is not finite"
"""The check that is named first where several fail."""


@dataclass(frozen=True)
class Verdict:
    """Outcome of one call."""

    variant: str  # what computed it: the name of a kernel, or what the call did instead of running one
    worst: dict[str, float]  # per check, in units of its bound
    failure: tuple[str, str] | None  # the check that failed first, and what differed


@dataclass(frozen=True)
class Inputs:
    """Inputs of a case's caller, on a device."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    key_mask: torch.Tensor | None
    sinks: torch.Tensor | None
    masks: Masks | None
    sequences: Sequences | None
    sparse: sage_aot.Sparse | None

    @classmethod
    def of(cls, case: Case, device: str) -> Inputs:
        return cls(*make_tensors(case, device), make_key_mask(case, device), make_sinks(case, device),
                   make_masks(case, device), make_sequences(case, device), make_sparse(case))

    def on_cpu(self) -> Inputs:
        """Copies on the CPU, but of a block mask, which no check reads."""
        masks = None if self.masks is None else self.masks._replace(**{
            name: on_cpu(getattr(self.masks, name)) for name in ("attn_mask", "seen")})
        return Inputs(*map(on_cpu, self.tensors), on_cpu(self.key_mask), on_cpu(self.sinks), masks,
                      on_cpu(self.sequences), self.sparse)

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.q, self.k, self.v

    @property
    def of_queries(self) -> dict[str, Any]:
        """Arguments of the call in addition to q, k, v and a key mask."""
        masks = {} if self.masks is None else {"attn_mask": self.masks.attn_mask, "block_mask": self.masks.block_mask}
        return {"sinks": self.sinks, **masks, **({} if self.sparse is None else {"sparse": self.sparse})}


class Subject:
    """Subject of the calls: kernels per arch, on one device."""

    def __init__(self, device: str, folders: list[Path]) -> None:
        self.device = device
        self.libraries = _libraries(device, folders)
        self.side = None if device == "cpu" else torch.cuda.Stream()
        self.built = {arch: _built(arch, library.manifest) for arch, library in self.libraries.items()}

    def backend(self, case: Case) -> Backend:
        """Backend that runs the call of a case."""
        library = self.libraries[case.arch]
        if self.device == "cpu":
            return EmulationBackend(library.manifest, case.arch, case.splits or 1)
        return Spy(CudaBackend(library, case.arch, case.splits, case.side_by_side))

    def examine(self, case: Case, backend: Backend | None = None) -> Verdict:
        """Make the call, on another backend where one is given, and hold it against everything; whatever is raised is
        a failure too."""
        try:
            backend = backend or self.backend(case)
            with self._stream(case), torch.no_grad(), handing(backend):
                variant, measures = self._measure(case, backend)
                worst = _worst(measures)
        except Exception as error:  # noqa: BLE001 - none is expected here, so one of any type is a finding
            return Verdict("raised", {}, ("raised", f"{type(error).__name__}: {error}"))
        failed = [measure for measure in measures if not worst[measure.name] <= 1 and not (measure.excess <= 1).all()]
        failed.sort(key=lambda measure: measure.name != FINITE)  # bounds say nothing of what is not finite
        return Verdict(variant, worst, (failed[0].name, failed[0].describe()) if failed else None)

    def is_alive(self) -> bool:
        """True where the device still works; an illegal access ends that for the life of the process."""
        try:
            if self.device != "cpu":
                torch.cuda.synchronize()
            return True
        except RuntimeError:
            return False

    def _measure(self, case: Case, backend: Backend) -> tuple[str, list[Measure]]:
        inputs = Inputs.of(case, self.device)
        expected_error = self._expected_error(case)
        if expected_error and not case.by_sdpa:
            return _refused(case, inputs, expected_error)
        before = [tensor.clone() for tensor in inputs.tensors]
        mask_before = None if inputs.key_mask is None else inputs.key_mask.clone()
        of_entry = _trained if case.trained else _by_sdpa if case.by_sdpa else _attended
        variant, measures = of_entry(case, backend, inputs)
        measures += [same(f"input {name}", *(t.view(torch.int16) for t in pair))
                     for name, *pair in zip("qkv", inputs.tensors, before)]
        if mask_before is not None:
            measures.append(same("input key_mask", inputs.key_mask, mask_before))
        return variant, measures

    def _expected_error(self, case: Case) -> type | None:
        """Error that the call raises: of a bad argument ArgumentError, and UnsupportedError where the folder says that
        it has no kernel for these options."""
        if case.wrong != "nothing":
            return sage_aot.ArgumentError
        return None if _has_kernels(case, self.libraries[case.arch].manifest) else sage_aot.UnsupportedError

    @contextmanager
    def _stream(self, case: Case) -> Iterator[None]:
        """A side stream is late: what does not wait for it reads its inputs before they are written."""
        if self.device == "cpu" or case.stream == "default":
            yield
            return
        with torch.cuda.stream(self.side):
            torch.cuda._sleep(200_000)
            yield


def _has_kernels(case: Case, manifest: Manifest) -> bool:
    """True where a folder's list of kernels has one for the options of a case, and for the backward pass of a trained
    one."""
    headdim, wanted = least_headdim(case.headdim), case.options.resolved.axes
    if case.sinks != "none" or case.is_listed:
        wanted = wanted | {"mask": "sparse"}
    found = [record.spec for record in manifest.attention(case.arch)
             if record.spec.headdim == headdim and wanted.items() <= record.spec.values.items()]
    if case.trained:
        found = [spec for spec in found if spec.trains
                 and all(spec.companion(kind).name in manifest.kernels for kind in BACKWARD)]
    return bool(found)


def arithmetic_of(case: Case) -> Arithmetic:
    """The documented roundings of a case's call: its options, "auto" as attn's docstring says, and its arch."""
    qk = "int8" if case.qk == "auto" else case.qk
    auto = {"smooth_q": qk != "int8", "rotate": qk == "int4"}
    smooth_q, rotate = (auto[name] if getattr(case, name) == "auto" else getattr(case, name) for name in auto)
    pv = "nvfp4" if qk == "nvfp4" else "f16" if case.arch in F16_PV else "e4m3"
    shared = case.values != "drawn" or case.one_key  # one value for all: nothing averages
    has_line = case.headdim <= 128 if case.arch == "sm90" else (
        case.arch in LINEAR_P and qk == "int8" and not smooth_q and not case.smooth_v
        and (case.arch, case.pv_accum) != ("sm120", "two_level_f32"))
    has_lse = case.return_lse or case.sparse == "tail"
    linear_p = has_line and case.p != "exp2" and not has_lse and not case.trained
    return Arithmetic(qk, pv, rotate, case.clip, smooth_q, case.smooth_k, case.smooth_v, linear_p=linear_p,
                      half_sums=case.pv_accum == "two_level_f16",
                      independent=case.kind in INDEPENDENT and not shared,
                      rare_values=(case.kind in ("sparse_v", "heavy_v") or _hides_by_copies(case)
                                   or case.kind == "alike_v" and not case.smooth_v),
                      balanced=qk == "int8" and case.smooth_k and not rotate and not case.trained,
                      of_merged=torch.finfo(TORCH_DTYPES[case.dtype]).eps / 2 if case.sparse == "tail" else 0.0)


def _hides_by_copies(case: Case) -> bool:
    """True where most keys are hidden, and copies of the few others: next to a mask that differs by query."""
    by_query = case.blocks != "none" or case.elements != "none" or case.sparse != "none"
    return by_query and case.mask_kind in ("left", "right", "few", "one")


# --- attn, attn_varlen, and attn with a QuantizedKV -------------------------------------------------------------------


@dataclass(frozen=True)
class Made:
    """Result of a call, and the memory that the output is a part of."""

    out: torch.Tensor  # as the caller has it
    lse: torch.Tensor | None
    guard: torch.Tensor | None  # a channel more before each row, two behind it


def _attended(case: Case, backend: Backend, inputs: Inputs) -> tuple[str, list[Measure]]:
    made = _call(case, inputs)
    spy = backend if isinstance(backend, Spy) else None
    ran = spy is not None and spy.handed is not None
    measures = _against_emulated(case, spy) if ran else []
    if made.guard is not None:
        edges = torch.cat([made.guard[..., :1], made.guard[..., -2:]], -1)
        measures.append(same("memory around out", edges.isnan(), torch.ones_like(edges, dtype=torch.bool)))
    if case.stored and inputs.sequences is None:
        measures += _compare_stored(case, inputs, made, spy.handed if ran else None)
    if inputs.sequences is not None:
        measures += _contract_of_sequences(case, inputs.on_cpu(), made)
    else:
        measures += _contract_of_batch(case, inputs, made)
    return (spy.handed.plan.kernels.attn.name if ran else "empty" if case.is_empty else _entry(case)), measures


def _against_emulated(case: Case, spy: Spy) -> list[Measure]:
    spy.bring_to_cpu()
    return against_emulated(spy, read_quantized=case.read_quantized)


def _entry(case: Case) -> str:
    return "attn_varlen" if case.has_sequences else case.entry


def _call(case: Case, inputs: Inputs) -> Made:
    out, guard = _make_out(case, inputs.q)
    call = {**dict(zip("qkv", inputs.tensors)), "key_mask": inputs.key_mask, **inputs.of_queries,
            **case.arguments, "out": out}
    refusal = _supports(call, inputs.sequences)
    if refusal is not None:
        raise AssertionError(f"supports() refuses a call that is taken: {refusal}")
    returned = _public_call(call, inputs.sequences)
    written, lse = returned if case.return_lse else (returned, None)
    if out is not None and written is not out:
        raise AssertionError("the call did not return the tensor given as out")
    return Made(written, lse, guard)


def _public_call(arguments: dict[str, Any], sequences: Sequences | None) -> Any:
    return _asked(sage_aot.attn if sequences is None else sage_aot.attn_varlen, arguments, sequences)


def _supports(arguments: dict[str, Any], sequences: Sequences | None) -> str | None:
    return _asked(sage_aot.supports, arguments, sequences)


def _asked(function: Callable[..., Any], arguments: dict[str, Any], sequences: Sequences | None) -> Any:
    """attn_varlen has no layout and no key mask."""
    if sequences is None:
        return function(**arguments)
    own = {name: value for name, value in arguments.items() if name not in ("layout", "key_mask")}
    return function(**own, **sequences._asdict())


def _is_of_keys(attn_mask: torch.Tensor) -> bool:
    return all(size == 1 for size in attn_mask.shape[-3:-1])


def _key_mask_of(case: Case, inputs: Inputs) -> torch.Tensor | None:
    """The key mask of a call: as documented, a mask of elements that is alike for all queries and heads is one."""
    attn_mask, key_mask = inputs.of_queries.get("attn_mask"), inputs.key_mask
    if attn_mask is None or not _is_of_keys(attn_mask):
        return key_mask
    of_keys = attn_mask[(None,) * (4 - attn_mask.dim())][:, 0, 0].expand(inputs.q.shape[0], case.seqlen_kv)
    return of_keys if key_mask is None else of_keys & key_mask


def _compare_stored(case: Case, inputs: Inputs, direct: Made, handed: Handed | None) -> list[Measure]:
    """Compare the call with one whose k and v were quantized before: both have the same bits, but where q decides about
    channels of k."""
    own: dict[str, Any] = {name: case.arguments[name] for name in (*OF_CALL, "return_lse")}
    others = {name: value for name, value in case.arguments.items() if name not in own}
    own |= inputs.of_queries
    k, v, attn_mask = inputs.k, inputs.v, own.get("attn_mask")
    key_mask = _key_mask_of(case, inputs)
    if attn_mask is not None:
        attn_mask = own["attn_mask"] = None if _is_of_keys(attn_mask) else attn_mask[(None,) * (4 - attn_mask.dim())]
    if key_mask is not None and (attn_mask, own.get("block_mask"), inputs.sparse) != (None,) * 3:
        k, v = (of_shown_keys(x, key_mask, case.layout) for x in (k, v))  # which the direct call does itself
        of_keys = key_mask[:, None, None]
        own["attn_mask"] = of_keys if attn_mask is None else attn_mask & of_keys
        key_mask = None
    pool = None if inputs.sparse is None else sizes_of(inputs.sparse.block_size)[1]
    kv = sage_aot.quantize_kv(k, v, key_mask=key_mask, layout=case.layout, pool=pool, tail=case.sparse == "tail",
                              **others)
    if (refusal := sage_aot.supports(inputs.q, kv, **own)) is not None:
        raise AssertionError(f"supports() refuses a call that is taken: {refusal}")
    returned = sage_aot.attn(inputs.q, kv, **own)
    out, lse = returned if case.return_lse else (returned, None)
    if handed is not None and not divides_alike(handed):
        return _contract_of_batch(case, inputs, Made(out, lse, None))
    measures = [same("output, quantized k and v", out, direct.out)]
    return measures + ([] if lse is None else [same("lse, quantized k and v", lse, direct.lse)])


def _refused(case: Case, inputs: Inputs, expected: type) -> tuple[str, list[Measure]]:
    """The call raises this error, and supports() says its message; of train_attn nothing says so before."""
    call = {**dict(zip("qkv", inputs.tensors)), **inputs.of_queries, **case.arguments}
    call = spoil(case, call) if case.wrong != "nothing" else call
    try:
        with torch.enable_grad():
            if case.trained:
                train(case, inputs.tensors, make_grad_out(case, inputs.q), inputs.key_mask, inputs.sequences)
            else:
                _public_call(call, inputs.sequences)
    except expected as error:
        with torch.enable_grad():
            said = str(error) if case.trained else _supports(call, inputs.sequences)
        if said != str(error):
            raise AssertionError(f"supports() says {said!r}, the call raised: {error}") from error
        return expected.__name__, []
    raise AssertionError(f"the call raised no {expected.__name__}")


def _libraries(device: str, folders: list[Path]) -> dict[str, Library]:
    """Per arch the first folder whose kernels of it run on this device; on the CPU all do."""
    found: dict[str, Library] = {}
    for library in map(Library, folders):
        for arch in _archs_here(device, library):
            found.setdefault(arch, library)
    if not found:
        raise SystemExit(f"no kernels for this device in {', '.join(map(str, folders))}; `python -m codegen build` "
                         f"makes those of every arch, with --retarget for this GPU")
    return found


def _archs_here(device: str, library: Library) -> list[str]:
    if device == "cpu":
        return built_archs(library.manifest)
    if library.manifest.retarget:
        chip = "sm_{}{}".format(*torch.cuda.get_device_capability())
        return built_archs(library.manifest) if library.manifest.retarget == chip else []
    try:
        return [arch_of(library, torch.cuda.current_device())]
    except sage_aot.UnsupportedError:
        return []


def _built(arch: str, manifest: Manifest) -> dict[str, set]:
    """The values that an arch has kernels for, of the options by which it may have none."""
    specs = [record.spec for record in manifest.attention(arch)]
    found = {name: {spec.values[option.axis] for spec in specs} for name, option in OPTIONS.items()
             if option.axis and option.default == "auto"}
    return {name: {value for value, of_axis in OPTIONS[name].values.items() if of_axis in axis}
            for name, axis in found.items()}


def _make_out(case: Case, q: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The tensor to write to, and the memory that it is a part of; NaN all over."""
    if case.out == "made":
        return None, None
    if case.out == "given":
        return torch.full_like(q, math.nan, memory_format=torch.contiguous_format), None
    wide = q.new_full((*q.shape[:-1], q.shape[-1] + 3), math.nan)
    return wide[..., 1:-2], wide


# --- the integrations' sdpa -------------------------------------------------------------------------------------------


def _by_sdpa(case: Case, backend: Backend, inputs: Inputs) -> tuple[str, list[Measure]]:
    """A call of torch's signature, under a policy that hands over all that sage_aot computes: served wherever
    docs/integrations.md does not say otherwise, and else torch's own result."""
    q, k, v = inputs.tensors
    mask = None if inputs.key_mask is None else inputs.key_mask[:, None, None]
    call = {"attn_mask": mask, "is_causal": case.is_causal, "scale": case.scale}
    if case.group > 1:
        call["enable_gqa"] = True
    options = {name: value for name, value in case.arguments.items() if name in OPTIONS and name not in OF_CALL}
    served = not (case.is_empty or case.is_causal and (mask is not None or case.seqlen_q > case.seqlen_kv))
    reset_report()
    try:
        with use(Policy(when="possible", options=options)):
            out = sdpa(q, k, v, **call)
    except (sage_aot.UnsupportedError, RuntimeError) as error:
        return _sdpa_raised(error, case, backend, served, lambda: torchs(q, k, v, **call))
    if (report().get(SERVED, 0) == 1) != served:
        raise AssertionError(f"expected a call that is {'' if served else 'not '}served, report() says {report()}")
    if not served:
        return "torch", [_torchs_own(out, torchs(q, k, v, **call))]
    ran = isinstance(backend, Spy) and backend.handed is not None
    measures = _against_emulated(case, backend) if ran else []
    measures += _contract(case, *map(on_cpu, (q, k, v, inputs.key_mask, out)), None, top_left=True)
    return backend.handed.plan.kernels.attn.name if ran else "sdpa", measures  # type: ignore[attr-defined]


def _sdpa_raised(error: Exception, case: Case, backend: Backend, served: bool,
                 host: Callable[[], Any]) -> tuple[str, list[Measure]]:
    """Right where no kernel has the policy's options, or where the call goes to torch, which raises too."""
    if served:
        if isinstance(error, sage_aot.UnsupportedError) and not _has_kernels(case, backend.manifest):
            return "UnsupportedError", []
        raise error
    try:
        host()
    except RuntimeError:
        return "torch raises", []
    raise error


def _torchs_own(got: torch.Tensor | None, expected: torch.Tensor | None) -> Measure:
    if got is None or expected is None:  # which torch returns of empty tensors on some GPUs
        return same("output, torch's", *(torch.tensor([made is None]) for made in (got, expected)))
    bound = 1e-5 + 2 * torch.finfo(got.dtype).eps * expected.double().abs()
    measure = close("output, torch's", got.double(), expected.double(), bound)
    return measure.without(got.isnan() & expected.isnan())


# --- train_attn -------------------------------------------------------------------------------------------------------


def _trained(case: Case, backend: Backend, inputs: Inputs) -> tuple[str, list[Measure]]:
    grad_out = make_grad_out(case, inputs.q)
    made = train(case, inputs.tensors, grad_out, inputs.key_mask, inputs.sequences)
    spy = backend if isinstance(backend, Spy) and backend.result is not None else None
    inputs, grad_out, made = inputs.on_cpu(), on_cpu(grad_out), on_cpu(made)
    measures = []
    if spy is not None:
        spy.bring_to_cpu()
        measures = against_emulated_training(spy, made, grad_out)
    if inputs.sequences is None:
        views = [heads_first(tensor, case.layout) for tensor in (*inputs.tensors, grad_out, *made)]
        measures += _contract_of_trained(case, *views, key_mask=inputs.key_mask)
    else:
        measures += _contract_of_trained_sequences(case, inputs, grad_out, made)
    return (_entry(case) if spy is None else spy.result.plan.kernels.attn.name), measures


def _contract_of_trained(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad_out: torch.Tensor,
                         out: torch.Tensor, *gradients: torch.Tensor,
                         key_mask: torch.Tensor | None = None) -> list[Measure]:
    """Measure what train_attn's docstring promises, of tensors heads first."""
    measures = _contract(case, q, k, v, key_mask, out, None)
    if 0 in (q.shape[2], k.shape[2]):
        return measures + [same("gradients of nothing", x, torch.zeros_like(x)) for x in gradients]
    if key_mask is not None:
        measures += [same("gradients of hidden keys", hidden, torch.zeros_like(hidden))
                     for hidden in (x.transpose(1, 2)[~key_mask] for x in gradients[1:])]
    return measures + _contract_of_gradients(case, q, k, v, grad_out, out, *gradients, key_mask=key_mask)


def _contract_of_trained_sequences(case: Case, inputs: Inputs, grad_out: torch.Tensor, made: Trained) -> list[Measure]:
    """Each sequence is a call by itself; other rows are zeros, and have gradients of zeros."""
    of_q, of_k = ([False] * len(x) for x in (inputs.q, inputs.k))
    measures = []
    for rows, columns in _rows_of_sequences(inputs.sequences):
        of_q[rows], of_k[columns] = ([True] * (x.stop - x.start) for x in (rows, columns))
        tensors = inputs.q, inputs.k, inputs.v, grad_out, *made
        own = rows, columns, columns, rows, rows, rows, columns, columns
        measures += _contract_of_trained(case, *(x[part].transpose(0, 1)[None] for x, part in zip(tensors, own)))
    for x, used in zip(made, (of_q, of_q, of_k, of_k)):
        others = x[~torch.tensor(used, device=x.device)]
        measures.append(same("rows of no sequence", others, torch.zeros_like(others)))
    return measures


def _contract_of_gradients(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad_out: torch.Tensor,
                           out: torch.Tensor, *gradients: torch.Tensor,
                           key_mask: torch.Tensor | None) -> list[Measure]:
    visible = oracle.visible_keys(q.shape[2], k.shape[2], is_causal=case.is_causal, key_mask=key_mask, device=q.device)
    arithmetic = arithmetic_of(case)
    right = oracle.gradients(q, k, v, out, grad_out, scale=case.scale, visible=visible, arithmetic=arithmetic,
                             key_mask=key_mask)
    found = dict(zip("qkv", gradients))
    held = found["q"].isfinite().all(-1) & right.lost
    measures = [same("gradients of what is not finite", held, torch.zeros_like(held))]
    largest = torch.finfo(q.dtype).max
    for name, got in found.items():
        expected, bound = right.expected[name], right.bound[name]
        beyond = expected.abs() + bound >= largest  # may round to infinity
        measure = close(f"grad_{name}, float64", got.double(), expected, bound)
        measures.append(measure.without(right.tainted[name][..., None] | beyond))
    if _is_of_the_table(case, arithmetic):
        bounds = oracle.TRAINED_L2[arithmetic.pv]
        measures += [_relative_l2(f"grad_{name}, docs/training.md", found[name].double(), right.expected[name], most)
                     for name, most in zip("qkv", bounds)]
    return measures


def _is_of_the_table(case: Case, arithmetic: Arithmetic) -> bool:
    """True where the figures of docs/training.md are of such a call."""
    of_its_size = case.kind == "normal" or case.kind == "unequal" and case.dtype == "bf16"  # f16 has no small gradients
    plain = of_its_size and case.scores is None and case.scale is None and case.planted == "none"
    plain = plain and case.mask_kind == "none" and not case.has_sequences
    return (plain and arithmetic.independent and case.headdim >= 32 and case.strides != "expanded_heads"
            and min(case.seqlen_q, case.seqlen_kv) >= oracle.TRAINED_ROWS and case.seqlen_kv >= case.seqlen_q)


def _relative_l2(name: str, got: torch.Tensor, expected: torch.Tensor, most: float) -> Measure:
    """Measure the relative L2 error of each head."""
    error, size = (got - expected).flatten(2).norm(dim=-1), expected.flatten(2).norm(dim=-1)
    return close(name, error, torch.zeros_like(error), most * size)


# --- the contract -----------------------------------------------------------------------------------------------------


def _contract(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, key_mask: torch.Tensor | None,
              out: torch.Tensor, lse: torch.Tensor | None, *, sinks: torch.Tensor | None = None,
              elements: torch.Tensor | None = None, top_left: bool = False, tail: int = 0) -> list[Measure]:
    """Measure what attn's docstring promises, of tensors heads first. `tail`: keys of a block; the keys that `elements`
    leave out count by the mean of their block. 0: no tail."""
    if case.is_empty or 0 in (q.shape[2], k.shape[2]):
        return _nothing(out, lse, sinks)
    visible = oracle.visible_keys(q.shape[2], k.shape[2], is_causal=case.is_causal, top_left=top_left,
                                  window=case.window, elements=None if tail else elements, key_mask=key_mask,
                                  device=q.device)
    # Heads of which attn promises finite outputs alone.
    vast = (v.abs() == torch.finfo(v.dtype).max).flatten(2).any(-1) & (case.values == "drawn")
    counts = None
    if tail:
        k, v, visible, counts = oracle.Tail.of(k, v, visible, elements, tail)
    arithmetic = arithmetic_of(case)
    right = oracle.expect(q, k, v, scale=case.scale, visible=visible, arithmetic=arithmetic,
                          key_mask=None if case.is_listed else key_mask, sinks=sinks, counts=counts)
    got = out.double()
    wrong_holes = torch.where(right.spoilt, ~out.isnan(), ~out.isfinite())
    measures = [Measure(FINITE, torch.where(wrong_holes, math.inf, 0.0), out, right.spoilt)]
    unbounded = right.spoilt | vast.repeat_interleave(case.group, 1)[..., None, None]
    measures.append(close("output, float64", got, right.out, right.bound).without(unbounded))
    error = torch.where(unbounded, 0.0, (got - right.out) / right.units).norm(dim=-1)
    measures.append(close("rows, float64", error, torch.zeros_like(error), right.row_bound))
    if lse is not None:
        measures.append(close("lse, float64", lse.double(), right.lse, right.lse_bound).without(right.spoilt_rows))
    if case.values != "drawn" and sinks is None and not case.planted.startswith("v"):  # which also plants a zero
        measures.append(_of_a_constant(case, arithmetic, out, right))
    if sinks is None and not tail and _has_large_scores(case, q):  # HUGE is of no tail
        measures.append(_of_large_scores(arithmetic, got, right))
    return measures


def _contract_of_batch(case: Case, inputs: Inputs, made: Made) -> list[Measure]:
    """The contract of a call of attn, whose blocks may be of its own choice."""
    chosen = None if inputs.sparse is None or case.is_empty else on_cpu(_chosen(case, inputs))
    inputs = inputs.on_cpu()
    q, k, v, out = (heads_first(x, case.layout) for x in (*inputs.tensors, on_cpu(made.out)))
    elements, tail = None if inputs.masks is None else inputs.masks.seen, 0
    if chosen is not None:
        elements = elements & chosen
        tail = sizes_of(inputs.sparse.block_size)[1] if inputs.sparse.tail else 0
    return _contract(case, q, k, v, inputs.key_mask, out, on_cpu(made.lse), sinks=inputs.sinks, elements=elements,
                     tail=tail)


def of_shown_keys(x: torch.Tensor, key_mask: torch.Tensor | None, layout: str) -> torch.Tensor:
    """k or v with, for hidden keys, what the last shown key in front of them holds, or the first shown key."""
    if key_mask is None:
        return x
    made = heads_first(x, layout).clone()
    for entry, seen in zip(made, key_mask):
        shown = seen.nonzero()[:, 0]
        if len(shown):
            before = torch.searchsorted(shown, torch.arange(len(seen), device=x.device), right=True) - 1
            entry.copy_(entry[:, shown[before.clamp(min=0)]])
    return heads_first(made, layout)


def _chosen(case: Case, inputs: Inputs) -> torch.Tensor:
    """[batch, q heads, queries, keys] bool: the keys of the blocks that the call chooses, as documented."""
    sparse, k = inputs.sparse, of_shown_keys(inputs.k, _key_mask_of(case, inputs), case.layout)
    blocks = sparse.select(inputs.q, k, is_causal=case.is_causal, scale=case.scale, layout=case.layout).blocks
    dense_keys = ends_of(sparse.dense_keys)
    if sparse.tail and case.seqlen_kv % sizes_of(sparse.block_size)[1]:
        dense_keys = dense_keys[0], max(1, dense_keys[1])
    by, amount = next((by, getattr(sparse, by)) for by in ("keep", "mass", "tau") if getattr(sparse, by) is not None)
    asked = Selection(batch=case.batch, kv_heads=case.kv_heads, group=case.group, queries=case.seqlen_q,
                      keys=case.seqlen_kv, headdim=case.headdim, layout=case.layout, block_size=sparse.block_size,
                      choose=(by, amount), first=sparse.first, near=sparse.near, least_alike=sparse.least_alike,
                      dense_keys=dense_keys, dense_queries=sparse.dense_queries, is_causal=case.is_causal,
                      scale=case.scale, independent=case.kind in INDEPENDENT)
    is_finite = not case.planted.startswith(("q", "k"))
    if is_finite and is_decided(asked, *(heads_first(x, case.layout) for x in (inputs.q, k))):
        broken = failures(asked, inputs.q, k, blocks)
        if broken:
            raise AssertionError(f"the choice of blocks by {sparse}: {broken[0]}")
    seen = blocks.repeat_interleave(64, 2).repeat_interleave(64, 3)
    return seen[:, :, : case.seqlen_q, : case.seqlen_kv]


def _nothing(out: torch.Tensor, lse: torch.Tensor | None, sinks: torch.Tensor | None) -> list[Measure]:
    measures = [same("output of nothing", out, torch.zeros_like(out))]
    if lse is None:
        return measures
    expected = torch.full_like(lse, -math.inf) if sinks is None else sinks[:, None].expand_as(lse)
    return [*measures, close("lse of nothing", lse, expected, 2.0**-22 * expected.abs())]  # from log2 and back


def _of_a_constant(case: Case, arithmetic: oracle.Arithmetic, out: torch.Tensor, right: oracle.Expected) -> Measure:
    """A mean of one value is that value, in any row that sees a key."""
    bound = arithmetic.of_equal_values + torch.finfo(out.dtype).eps
    expected = (right.lse > -math.inf).double()[..., None].expand_as(out)
    measure = close("a mean of one value", out.double() / case.constant, expected, torch.full_like(expected, bound))
    return measure.without(right.spoilt)


def _has_large_scores(case: Case, q: torch.Tensor) -> bool:
    """True where HUGE bounds a call's mean error: N(0, 1) times a factor, enough rows for a mean."""
    return (case.scores is not None and case.scores >= oracle.LARGE_SCORES and case.kind == "normal"
            and case.values == "drawn" and not case.one_key and case.headdim >= 32 and q.shape[:3].numel() >= 256)


def _of_large_scores(arithmetic: Arithmetic, got: torch.Tensor, right: oracle.Expected) -> Measure:
    error = torch.where(right.spoilt, 0.0, (got - right.out).abs()).sum()[None]
    size = torch.where(right.spoilt, 0.0, right.out.abs()).sum()[None]
    return close("mean of large scores", error, torch.zeros_like(error), oracle.HUGE[arithmetic.qk] * size + 1e-30)


def _contract_of_sequences(case: Case, inputs: Inputs, made: Made) -> list[Measure]:
    """Each sequence is a call by itself; of one that is longer than max_seqlen the first rows are."""
    made = Made(on_cpu(made.out), on_cpu(made.lse), None)
    measures = []
    for rows, columns in _rows_of_sequences(inputs.sequences):
        q, k, v, out = (x.transpose(0, 1)[None] for x in (inputs.q[rows], inputs.k[columns], inputs.v[columns],
                                                          made.out[rows]))
        if q.shape[2]:
            measures += _contract(case, q, k, v, None, out, None if made.lse is None else made.lse[None, :, rows],
                                  sinks=inputs.sinks)
    return measures


def _rows_of_sequences(sequences: Sequences) -> Iterator[tuple[slice, slice]]:
    """The queries and the keys of each sequence, as far as the call sees them."""
    begins_q, begins_k, longest_q, longest_k = *(x.tolist() for x in sequences[:2]), *sequences[2:]
    for (q, q_end), (k, k_end) in zip(pairwise(begins_q), pairwise(begins_k)):
        yield slice(q, min(q_end, q + longest_q)), slice(k, min(k_end, k + longest_k))


def _worst(measures: list[Measure]) -> dict[str, float]:
    """Per check its largest excess."""
    largest = [m.excess.max().double() if m.excess.numel() else torch.zeros((), dtype=torch.float64) for m in measures]
    there = [x for x in largest if x.device.type != "cpu"]
    values = iter(torch.stack(there).tolist() if there else [])
    worst: dict[str, float] = {}
    for m, x in zip(measures, largest):  # not max(): a NaN must stay
        value = x.item() if x.device.type == "cpu" else next(values)
        old = worst.get(m.name, -1.0)
        worst[m.name] = value if math.isnan(value) or value > old else old
    return worst
