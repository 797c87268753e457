"""One call of the fuzzer and all that is expected of it.

The call is the public one. On a GPU it runs the kernels of any arch whose folder holds cubins for it, into poisoned
memory, and is held against the emulation, within bounds that only rounding explains (sage_aot/_tools/compare.py), and
against float64, within what the quantization of these very inputs can do (:func:`_quantization_error`). On the CPU,
where the call is the emulation, float64 remains. Every check yields its error in units of its bound, element by
element.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from fuzz_cases import Case, make_key_mask, make_sequences, make_tensors, spoil
from layout import Result, read_back
from training_checks import measure_training

import sage_aot
from sage_aot._backends.base import Backend, BackwardCall, BackwardTensors, Call, Tensors, TrainingCall
from sage_aot._backends.cuda import CudaBackend, arch_of
from sage_aot._backends.emulation.backend import EmulationBackend, packed_entries, sequence_entries
from sage_aot._backends.emulation.quantize import Quantized, quantize
from sage_aot._backends.loader import Library
from sage_aot._call import pipeline
from sage_aot._call.kv import OF_CALL
from sage_aot._kernels.axes import least_headdim
from sage_aot._kernels.manifest import Manifest
from sage_aot._launch.choose import Kernels, built_archs
from sage_aot._launch.plan import LOG2_E, Plan
from sage_aot._problem.check import Problem, Sequences, check, heads_first
from sage_aot._problem.mask import Mask, VisibleKeys
from sage_aot._problem.options import OPTIONS
from sage_aot._tools import reference
from sage_aot._tools.compare import Measure, against_emulation, close, rounding_of_merge, same

INDEPENDENT = {"normal", "outlier", "biased_v", "huge", "wide_v", "tiny"}
"""Kinds whose channels are independent, so that the roundings of Q and K add up as a random walk: six times its
standard deviation in place of the worst case."""

SMALLEST = 1e-34
"""Values of V below this may count as zeros."""


@dataclass(frozen=True)
class Verdict:
    """What became of one call."""

    variant: str  # name of the attention kernel, or what the call did instead of running one
    worst: dict[str, float]  # per check, in units of its bound
    failure: tuple[str, str] | None  # the check that failed first, and what differed


class Subject:
    """What is called: kernels per arch, on one device."""

    def __init__(self, device: str, folders: list[Path]) -> None:
        self.device = device
        self.libraries = _libraries(device, folders)
        self.side = None if device == "cpu" else torch.cuda.Stream()
        self.built = {arch: _built(arch, library.manifest) for arch, library in self.libraries.items()}

    def backend(self, case: Case) -> Backend:
        """What runs the call of a case."""
        library = self.libraries[case.arch]
        if self.device == "cpu":
            return EmulationBackend(library.manifest, case.arch, case.splits or 1)
        return Spy(CudaBackend(library, case.arch, case.splits))

    def examine(self, case: Case, backend: Backend | None = None) -> Verdict:
        """Make the call, on another backend where one is given, and hold it against everything; whatever is raised is
        a failure too."""
        try:
            with self._stream(case), torch.no_grad():
                variant, measures = self._measure(case, backend or self.backend(case))
                worst = _worst(measures)
        except Exception as error:  # noqa: BLE001 - none is expected here, so one of any type is a finding
            return Verdict("raised", {}, ("raised", f"{type(error).__name__}: {error}"))
        failed = [measure for measure in measures if not worst[measure.name] <= 1 and not (measure.excess <= 1).all()]
        return Verdict(variant, worst, (failed[0].name, failed[0].describe()) if failed else None)

    def is_alive(self) -> bool:
        """Whether the device still works; an illegal access ends that for the life of the process."""
        try:
            if self.device != "cpu":
                torch.cuda.synchronize()
            return True
        except RuntimeError:
            return False

    def _measure(self, case: Case, backend: Backend) -> tuple[str, list[Measure]]:
        tensors = make_tensors(case, self.device)
        expected_error = self._expected_error(case)
        if expected_error:
            return _refused(case, backend, tensors, make_sequences(case, self.device), expected_error)
        if case.trained:
            variant, measures, _ = measure_training(case, backend, tensors)
            return variant, measures
        key_mask = make_key_mask(case, self.device)
        before, mask_before = [tensor.clone() for tensor in tensors], None if key_mask is None else key_mask.clone()
        sequences = make_sequences(case, self.device)
        call = _call(case, backend, tensors, key_mask, sequences)
        measures = [same(f"input {name}", *(t.view(torch.int16) for t in pair))
                    for name, *pair in zip("qkv", tensors, before)]
        if key_mask is not None:
            measures.append(same("input key_mask", key_mask, mask_before))
        if call.guard is not None:
            edges = torch.cat([call.guard[..., :1], call.guard[..., -2:]], -1)
            measures.append(same("memory around out", edges.isnan(), torch.ones_like(edges, dtype=torch.bool)))
        if case.stored and sequences is None:
            measures += _compare_stored(case, backend, tensors, key_mask, call)
        if case.is_empty:
            return "empty", measures + _empty(call)
        if (sequences is None and case.seqlen_q == 1 and case.group > 1
                and not (case.is_causal or case.options.resolved.smooth_q)):
            case, tensors, call = _by_group(case, tensors, call)
        plan = plan_of(case, backend, tensors, key_mask, sequences)
        if sequences:
            return plan.kernels.attn.name, measures + _compare_sequences(case, call, plan, *tensors, sequences)
        views = [heads_first(tensor, case.layout) for tensor in tensors]
        return plan.kernels.attn.name, measures + _compare(case, call, plan, *views, key_mask)

    def _expected_error(self, case: Case) -> type | None:
        if case.wrong != "nothing":
            return sage_aot.ArgumentError
        manifest, wanted = self.libraries[case.arch].manifest, case.options.resolved.axes
        headdim = least_headdim(case.headdim)
        exists = any(record.spec.headdim == headdim and wanted.items() <= record.spec.values.items()
                     for record in manifest.attention(case.arch))
        return None if exists else sage_aot.UnsupportedError

    @contextmanager
    def _stream(self, case: Case) -> Iterator[None]:
        """A side stream is late: what does not wait for it reads its inputs before they are written."""
        if self.device == "cpu" or case.stream == "default":
            yield
            return
        with torch.cuda.stream(self.side):
            torch.cuda._sleep(200_000)
            yield


# --- the call ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Made:
    """What a call left behind."""

    out: torch.Tensor  # [batch, q heads, queries, headdim]
    lse: torch.Tensor | None
    guard: torch.Tensor | None  # what `out` is a part of: a channel more before each row, two behind it
    result: Result | None  # of the kernels, where some ran


class Spy:
    """A backend before one that launches: poisons all that a call writes, and keeps what it leaves."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.result: Result | None = None
        self.error: Exception | None = None  # that the launches raised
        self.gradients: tuple[torch.Tensor, ...] = ()  # of a trained call

    @property
    def manifest(self) -> Manifest:
        return self._backend.manifest

    def arch(self, device: int) -> str:
        return self._backend.arch(device)

    def splits(self, problem: Problem, kernels: Kernels, device: int) -> int:
        return self._backend.splits(problem, kernels, device)

    def bind(self, plan: Plan, tensors: Tensors) -> Call:
        call = self._backend.bind(plan, tensors)

        def watched(q: torch.Tensor | None, k: torch.Tensor | None, v: torch.Tensor | None, out: torch.Tensor | None,
                    lse: torch.Tensor | None, key_mask: torch.Tensor | None, sequences: Sequences | None,
                    kv: torch.Tensor | None) -> None:
            for written in (out, lse):
                if written is not None:
                    written.fill_(math.nan)
            if kv is not None and plan.problem.part != "q":
                kv.fill_(0xFF)
            device = next(tensor.device for tensor in (q, k) if tensor is not None)
            workspace = torch.full((call.plan.workspace_bytes,), 0xFF, dtype=torch.uint8, device=device)  # NaNs
            try:
                call.run(q, k, v, out, lse, workspace, key_mask, sequences, kv)
            except Exception as error:
                self.error = error
                raise
            if out is not None:
                self.result = Result(out, lse, workspace, call.plan)

        return watched

    def kv_bytes(self, plan: Plan) -> int:
        return self._backend.kv_bytes(plan)

    def saved_bytes(self, plan: Plan) -> int:
        return self._backend.saved_bytes(plan)

    def bind_training(self, plan: Plan, tensors: Tensors) -> TrainingCall:
        call = self._backend.bind_training(plan, tensors)

        def watched(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
                    saved: torch.Tensor) -> None:
            workspace = torch.full((call.plan.workspace_bytes,), 0xFF, dtype=torch.uint8, device=saved.device)
            for written in (out, lse):
                written.fill_(math.nan)
            saved.fill_(0xFF)
            try:
                call.run(q, k, v, out, lse, saved, workspace)
            except Exception as error:
                self.error = error
                raise
            self.result = Result(out, lse, workspace, call.plan)

        return watched

    def bind_backward(self, plan: Plan, tensors: BackwardTensors) -> BackwardCall:
        call = self._backend.bind_backward(plan, tensors)

        def watched(tensors: BackwardTensors, lse: torch.Tensor, saved: torch.Tensor) -> None:
            for written in (tensors.grad_q, tensors.grad_k, tensors.grad_v):
                written.fill_(math.nan)
            workspace = torch.full((call.plan.workspace_bytes,), 0xFF, dtype=torch.uint8, device=saved.device)
            try:
                call.run(tensors, lse, saved, workspace)
            except Exception as error:
                self.error = error
                raise
            self.gradients = tensors[3:]

        return watched


def plan_of(case: Case, backend: Backend, tensors: tuple[torch.Tensor, ...],
            key_mask: torch.Tensor | None = None, sequences: Sequences | None = None) -> Plan:
    return pipeline.plan_of(backend, check(*tensors, case.options, key_mask, sequences), tensors[0].get_device())


def _call(case: Case, backend: Backend, tensors: tuple[torch.Tensor, ...], key_mask: torch.Tensor | None,
          sequences: Sequences | None) -> Made:
    out, guard = _make_out(case, tensors[0])
    with pipeline.handing(backend):
        returned = _public_call({**dict(zip("qkv", tensors)), "key_mask": key_mask, **case.arguments, "out": out},
                                sequences)
    written, lse = returned if case.return_lse else (returned, None)
    if out is not None and written is not out:
        raise AssertionError("the call did not return the tensor given as out")
    result = backend.result if isinstance(backend, Spy) else None
    return Made(written if sequences else heads_first(written, case.layout), lse, guard, result)


def _compare_stored(case: Case, backend: Backend, tensors: tuple[torch.Tensor, ...], key_mask: torch.Tensor | None,
                    direct: Made) -> list[Measure]:
    """The same call with k and v quantized before has the same bits."""
    own = {name: case.arguments[name] for name in (*OF_CALL, "return_lse")}
    others = {name: value for name, value in case.arguments.items() if name not in own}
    q, k, v = tensors
    with pipeline.handing(backend):
        kv = sage_aot.quantize_kv(k, v, key_mask=key_mask, layout=case.layout, **others)
        returned = sage_aot.attn(q, kv, **own)
    if isinstance(backend, Spy):
        backend.result = direct.result
    out, lse = returned if case.return_lse else (returned, None)
    measures = [same("output, quantized k and v", heads_first(out, case.layout), direct.out)]
    return measures + ([] if lse is None else [same("lse, quantized k and v", lse, direct.lse)])


def _by_group(case: Case, tensors: tuple[torch.Tensor, ...], call: Made) -> tuple[Case, tuple[torch.Tensor, ...], Made]:
    """A call of one query a head as the kernels see it: the q heads of each KV head as rows of one head."""
    q, k, v = (heads_first(tensor, case.layout) for tensor in tensors)
    rows = case.batch, case.kv_heads, case.group
    case = dataclasses.replace(case, group=1, seqlen_q=case.group, layout="HND")
    made = dataclasses.replace(call, out=call.out.reshape(*rows, -1),
                               lse=None if call.lse is None else call.lse.reshape(rows))
    return case, (q.reshape(*rows, -1), k, v), made


def _public_call(arguments: dict[str, Any], sequences: Sequences | None) -> Any:
    """attn, or attn_varlen, which has no layout and no key mask."""
    if sequences is None:
        return sage_aot.attn(**arguments)
    own = {name: value for name, value in arguments.items() if name not in ("layout", "key_mask")}
    return sage_aot.attn_varlen(**own, **sequences._asdict())


def _refused(case: Case, backend: Backend, tensors: tuple[torch.Tensor, ...], sequences: Sequences | None,
             expected: type) -> tuple[str, list[Measure]]:
    call = {**dict(zip("qkv", tensors)), **case.arguments}
    try:
        with pipeline.handing(backend), torch.enable_grad():
            _public_call(spoil(case, call) if case.wrong != "nothing" else call, sequences)
    except expected:
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


# --- checks -----------------------------------------------------------------------------------------------------------


def _compare(case: Case, call: Made, plan: Plan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
             key_mask: torch.Tensor | None) -> list[Measure]:
    """A call with a key mask is compared batch entry by batch entry, on the keys that the mask leaves."""
    found = read_back(call.result) if call.result is not None and case.read_quantized else None
    visible = Mask.of(case).visible_keys(torch.arange(case.seqlen_q, device=q.device), case.seqlen_q, case.seqlen_kv)
    if key_mask is None:
        quantized = quantize(plan.problem, plan.kernels, q, k, v)
        return _compare_visible(case, call, plan, quantized, visible, None, found, q, k, v)
    measures = []
    for b, entry in enumerate(packed_entries(plan.problem, q, k, v, key_mask)):
        own = slice(b, b + 1)
        of_entry = dataclasses.replace(call, out=call.out[own], lse=None if call.lse is None else call.lse[own])
        if not entry.key_ranks[-1]:
            measures += _empty(of_entry)
            continue
        quantized = entry.quantize(plan.kernels)
        measures += _compare_visible(
            dataclasses.replace(case, batch=1, seqlen_kv=entry.k.shape[2]), of_entry,
            dataclasses.replace(plan, problem=entry.problem), quantized, visible.packed(entry.key_ranks),
            entry.key_ranks, found and _of_entry(found, own, quantized), entry.q, entry.k, entry.v)
    return measures


def _of_entry(found: dict[str, torch.Tensor], own: slice, quantized: Quantized) -> dict[str, torch.Tensor]:
    """What the kernels left of one batch entry, without the room for keys that the mask takes away."""
    room = {name: getattr(quantized, name).shape[2]
            for name in ("k", "v", "k_scale", "v_factor", "k_spoilt", "v_spoilt")}
    return {name: x[own][:, :, : room.get(name)] for name, x in found.items()}


def _compare_sequences(case: Case, call: Made, plan: Plan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                       sequences: Sequences) -> list[Measure]:
    """Sequence by sequence."""
    found = read_back(call.result) if call.result is not None and case.read_quantized else None
    begins_q, begins_k = (x.tolist() for x in sequences[:2])
    measures = []
    for b, own in enumerate(sequence_entries(plan.problem, q, k, v, sequences)):
        queries, keys = own.problem.seqlen_q, own.problem.seqlen_kv
        of_entry = dataclasses.replace(call, out=call.out[own.rows].transpose(0, 1)[None],
                                       lse=None if call.lse is None else call.lse[:, own.rows][None])
        if 0 in (queries, keys):
            measures += _empty(of_entry)
            continue
        visible = Mask.of(case).visible_keys(torch.arange(queries, device=q.device), queries, keys)
        quantized = quantize(own.problem, plan.kernels, own.q, own.k, own.v)
        of_case = dataclasses.replace(case, batch=1, seqlen_q=queries, seqlen_kv=keys)
        measures += _compare_visible(
            of_case, of_entry, dataclasses.replace(plan, problem=own.problem), quantized, visible, None,
            found and _of_sequence(found, plan, b, begins_q[b], begins_k[b], quantized), own.q, own.k, own.v)
    return measures


def _of_sequence(found: dict[str, torch.Tensor], plan: Plan, b: int, q_begin: int, k_begin: int,
                 quantized: Quantized) -> dict[str, torch.Tensor]:
    """What the kernels left of one sequence: its slots of the tiles, and its channels."""
    tile = plan.kernels.attn.tile
    q_tile, kv_tile = q_begin // tile.block_m + b, k_begin // tile.block_n + b
    first = {**dict.fromkeys(("q", "q_scale", "row_bias"), q_tile * tile.block_m),
             **dict.fromkeys(("q_mean", "delta_s"), q_tile), "v_factor": kv_tile,
             **dict.fromkeys(("k", "v", "k_scale", "k_spoilt", "v_spoilt"), kv_tile * tile.block_n)}
    slots = {name: x[:, :, first[name]: first[name] + getattr(quantized, name).shape[2]]
             for name, x in found.items() if name in first}
    return {**{name: x[b: b + 1] for name, x in found.items() if name not in first}, **slots}


def _compare_visible(case: Case, call: Made, plan: Plan, quantized: Quantized, visible: VisibleKeys,
                     key_ranks: torch.Tensor | None, found: dict[str, torch.Tensor] | None, q: torch.Tensor,
                     k: torch.Tensor, v: torch.Tensor) -> list[Measure]:
    """`visible`: what the queries see of the keys of k. `found`: what the kernels left of these, if it is compared."""
    spoilt = _spoilt(case, visible, q, k, v)
    measures = [_finite(call, spoilt)]
    if call.result is not None:
        measures += against_emulation(plan, quantized, call.out, call.lse, key_ranks)
    if found is not None:
        measures += _bits(case, plan, found, quantized, visible)
    return measures + _against_float64(case, call, plan, quantized, visible, spoilt, q, k, v)


def _worst(measures: list[Measure]) -> dict[str, float]:
    """Per check its largest excess. The one place where a call waits for the device."""
    largest = [m.excess.max().double() if m.excess.numel() else torch.zeros((), dtype=torch.float64) for m in measures]
    there = [x for x in largest if x.device.type != "cpu"]
    values = iter(torch.stack(there).tolist() if there else [])
    worst: dict[str, float] = {}
    for m, x in zip(measures, largest):  # not max(): a NaN must stay
        value = x.item() if x.device.type == "cpu" else next(values)
        old = worst.get(m.name, -1.0)
        worst[m.name] = value if math.isnan(value) or value > old else old
    return worst


def _empty(call: Made) -> list[Measure]:
    measures = [same("output of nothing", call.out, torch.zeros_like(call.out))]
    if call.lse is not None:
        measures.append(same("lse of nothing", call.lse, torch.full_like(call.lse, -math.inf)))
    return measures


# What is not finite ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spoilt:
    """What a value that is not finite spoils, and nothing else: a query its row, if that sees a key, a key the rows
    that see it, a value its channel of the rows that see it."""

    rows: torch.Tensor  # [batch, q heads, queries]
    elements: torch.Tensor  # [batch, q heads, queries, headdim]; those of `rows` too


def _spoilt(case: Case, visible: VisibleKeys, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Spoilt:
    seen = visible.contains(torch.arange(k.shape[2], device=k.device)).float()  # [queries, keys]
    bad_q = ~q.isfinite().all(-1)
    bad_k = ((~k.isfinite().all(-1)).float() @ seen.T > 0).repeat_interleave(case.group, 1)
    bad_v = (seen @ (~v.isfinite()).float() > 0).repeat_interleave(case.group, 1)
    rows = bad_q & seen.any(-1) | bad_k
    return Spoilt(rows, rows[..., None] | bad_v)


def _finite(call: Made, spoilt: Spoilt) -> Measure:
    """NaN is where NaN or an infinity came from."""
    got = call.out.isnan()
    return Measure("what is not finite", torch.where(got == spoilt.elements, 0.0, math.inf), call.out, spoilt.elements)


# The quantized tensors -----------------------------------------------------------------------------------------------


def _bits(case: Case, plan: Plan, found: dict[str, torch.Tensor], quantized: Quantized,
          visible: VisibleKeys) -> list[Measure]:
    names = ["q", "k", "v", "q_scale", "k_scale", "v_scale", "k_mean", "v_mean", "v_factor", "k_spoilt", "v_spoilt"]
    names += ["row_bias"] if case.return_lse else []  # else it tells only what is finite
    names += ["q_mean"] if "q_mean" in found else []
    expected = {name: getattr(quantized, name).cpu() for name in names}
    measures = [same(f"bits of {name}", found[name], x) for name, x in expected.items()]
    if "delta_s" in found:
        measures.append(_bits_of_delta_s(case, plan, found["delta_s"], quantized.delta_s.cpu(), visible))
    return measures


def _bits_of_delta_s(case: Case, plan: Plan, got: torch.Tensor, expected: torch.Tensor,
                     visible: VisibleKeys) -> Measure:
    """Of the keys that a tile's last row sees: the kernel leaves out blocks that no row sees, and nobody reads them."""
    block_m = plan.kernels.attn.tile.block_m
    last_row = (torch.arange(1, got.shape[2] + 1) * block_m).clamp(max=case.seqlen_q) - 1
    seen = VisibleKeys(*(x.cpu()[last_row] for x in visible)).contains(torch.arange(case.seqlen_kv))
    got, expected = (x[..., : case.seqlen_kv] for x in (got, expected))
    return same("bits of delta_s", got, expected).without(~seen)


# Attention in float64 -------------------------------------------------------------------------------------------------


def _against_float64(case: Case, call: Made, plan: Plan, quantized: Quantized, visible: VisibleKeys, spoilt: Spoilt,
                     q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[Measure]:
    """What quantization may do to the output at most: Σ w·|v| moves by what the weights and V move by, relatively."""
    q, k, v = (torch.where(x.isfinite(), x, 0.0).double() for x in (q, k, v))
    rest = (v - quantized.v_mean[:, :, None, : case.headdim]).abs()  # what is quantized of V
    both, lse = reference.attention(torch.cat([q, q]), torch.cat([k, k]), torch.cat([v, rest]),
                                     scale=case.scale, visible=visible)
    expected, weight, lse = both[: case.batch], both[case.batch:], lse[: case.batch]
    moved = math.log(2.0) * _quantization_error(case, plan, quantized, q, k)
    largest = rest.amax(2).repeat_interleave(case.group, 1)[:, :, None]
    info = torch.finfo(call.out.dtype)
    floor = info.eps * expected.abs() + 2.0**-20 * largest + info.smallest_normal * info.eps + SMALLEST
    floor = floor + rounding_of_merge(plan, quantized, expected)
    relative, absolute = _rounding_of_p_and_v(case, plan, quantized, largest)
    factor = (2 * moved).clamp(max=700.0).exp()[..., None]  # still finite in f64
    bound = weight * (factor * relative - 1.0) + factor * absolute
    # A mean of values is no further from another mean, but for how coarsely the factor of a tile lets them be rounded.
    bound = torch.minimum(bound, 2.2 * largest + absolute) + floor
    bound = torch.where((lse == -math.inf)[..., None], 0.0, bound)
    measure = close("output, float64", call.out.double(), expected, bound)
    measures = [measure.without(spoilt.elements)]
    if call.lse is not None:
        measure = close("lse, float64", call.lse.double(), lse, moved + 0.01 + 2.0**-20 * lse.abs())
        measures.append(measure.without(spoilt.rows))
    return measures


def _quantization_error(case: Case, plan: Plan, quantized: Quantized, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """How far quantization may move any score of a row, log2 units, [batch, q heads, queries].

    An element of Q is off by half its scale at most, which a score sees times an element of K, and the other way round;
    at 4 bits, where a clip takes the largest to 0.9⁻⁵ · 7 steps and 7 are left, by up to 4.9 times its scale. NVFP4 is
    off by up to the scale of the row's largest group, whose rounding adds a sixteenth. Rotated rows of fewer channels
    than the kernel's repeat values, and errors with them, in all of its channels.
    """
    headdim = plan.kernels.attn.spec.headdim if plan.problem.options.rotate else case.headdim
    q_hat, q_scale = _real(case, quantized.q, quantized.q_scale, case.seqlen_q)
    k_hat, k_scale = (x.repeat_interleave(case.group, 1)
                      for x in _real(case, quantized.k, quantized.k_scale, case.seqlen_kv))
    order = 2 if case.kind in INDEPENDENT and headdim == case.headdim else 1
    clipped = case.qk == "int4" and case.clip
    worst = 4.9 if clipped else 1.07 if case.qk == "nvfp4" else 0.5
    steps = (12 if worst > 0.5 else 6) / math.sqrt(12) if order == 2 else worst
    edge = worst * headdim ** (1 / order)
    q_size = q_scale * (q_hat.norm(order, -1) + edge)
    k_size = (k_scale * (k_hat.norm(order, -1) + edge)).amax(-1, keepdim=True)
    largest_scale = k_scale.amax(-1, keepdim=True)
    in_f32 = 2.0**-19 * abs(plan.problem.softmax_scale) * LOG2_E * q.norm(dim=-1) * k.norm(dim=-1).amax(
        -1, keepdim=True).repeat_interleave(case.group, 1)
    return steps * (largest_scale * q_size + q_scale * k_size) + in_f32


def _real(case: Case, x: torch.Tensor, scale: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantized rows without the padding, f64; the scale of a row in a group of zeros, which is one, as zero. Of NVFP4
    the scale holds that of the largest group of the row, whose largest element is 6."""
    x, scale = x[:, :, :rows].double(), scale[:, :, :rows].double()
    if case.qk == "nvfp4":
        of_group = x.abs().amax(-1) / 6
        x, scale = x / of_group.clamp(min=2.0**-9)[..., None], scale * of_group
    return x, torch.where((scale == 1.0) & (x == 0).all(-1), 0.0, scale)


def _rounding_of_p_and_v(case: Case, plan: Plan, quantized: Quantized,
                         largest: torch.Tensor) -> tuple[float, torch.Tensor]:
    """By which factor, and by how much besides, rounding P and V moves a sum: half an ulp each, more for subnormals.

    In NVFP4 half an ulp is up to a third. What lies below a 24th of its group's largest element vanishes: of V that, of
    P at most 16 times that, which is two thirds of a group."""
    v_scale = (quantized.v_scale * quantized.v_factor.amax(-1, keepdim=True))[:, :, None, : case.headdim].double()
    v_scale = v_scale.repeat_interleave(case.group, 1)
    if plan.kernels.attn.spec.pv == "f16":
        return (1 + 2.0**-11) ** 2 * (1 + 2.0**-11), 2.0**-31 * case.seqlen_kv * largest + 2.0**-25 * v_scale
    top = 2.0 ** plan.kernels.attn.facts["p_top"]
    if plan.kernels.attn.spec.pv == "nvfp4":
        subnormal = 6 * 2.0**-6 / top * case.seqlen_kv  # scales of P's groups
        return (4 / 3) ** 2 * (1 + 2.0**-3), (2 / 3 + 1 / 20 + subnormal) * largest + 2.0**-8 * v_scale
    return (1 + 2.0**-4) ** 2 * (1 + 2.0**-9), 2.0**-10 / top * case.seqlen_kv * largest + 2.0**-10 * v_scale
