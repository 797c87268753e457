"""Calls of CPU tensors, which run the kernels' arithmetic in torch."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from typing import NamedTuple, cast

import torch

from sage_aot._backends.base import BackwardCall, BackwardTensors, Call, ChooseCall, PoolCall, clear_output
from sage_aot._backends.emulation.arithmetic import within
from sage_aot._backends.emulation.attention import attend
from sage_aot._backends.emulation.backward import Saved, gradients, saved_of
from sage_aot._backends.emulation.quantize import Quantized, quantize
from sage_aot._backends.emulation.selection import choose, pool, views_of
from sage_aot._kernels.manifest import Manifest
from sage_aot._kernels.spec import PoolSpec
from sage_aot._launch.backward import backward_kernels, multiplies_halves
from sage_aot._launch.choose import Kernels
from sage_aot._launch.plan import Plan
from sage_aot._launch.selection import choose_launch, selection_record
from sage_aot._problem.given import Given
from sage_aot._problem.problem import Part, Problem, heads_first
from sage_aot._problem.selection import Choosing, Pooling
from sage_aot._problem.tensors import MASK_BLOCK
from sage_aot.errors import UnsupportedError


class EmulationBackend:
    """The emulation of a folder's kernels."""

    def __init__(self, manifest: Manifest, arch: str | None = None, splits: int = 1) -> None:
        """`arch`: whose kernels are emulated; None for those that the environment names, or the default. `splits`: so
        many blocks share the keys of every query tile."""
        self._manifest, self._arch, self._splits = manifest, arch, splits

    @property
    def manifest(self) -> Manifest:
        return self._manifest

    def arch(self, device: int) -> str:
        """Arch that is emulated, whatever the device."""
        return self._arch or emulated_arch(self._manifest)

    def splits(self, problem: Problem, kernels: Kernels, device: int) -> int:
        """Number of splits, whatever the problem."""
        return self._splits

    def bind(self, plan: Plan, given: Given, out: torch.Tensor | None) -> Call:
        has_sequences = plan.problem.tokens and plan.problem.part == "all"
        return partial(_attend_sequences if has_sequences else _CALLS[plan.problem.part], plan)

    def kept_bytes(self, plan: Plan) -> int:
        """Room for what a call keeps as it came, q, k and v in f32, and for the key mask: the emulation quantizes them
        in every call."""
        problem = plan.problem
        of_q, of_k = (4 * math.prod(shape) for shape in _shapes(problem))
        if problem.part in ("kv", "q"):
            return 2 * of_k + (problem.batch * problem.seqlen_kv if problem.has_key_mask else 0)
        return of_q + of_k if problem.part == "train" else 0

    def bind_backward(self, plan: Plan, tensors: BackwardTensors) -> BackwardCall:
        halves = multiplies_halves(backward_kernels(plan, self.manifest))

        def call(tensors: BackwardTensors, lse: torch.Tensor, kept: torch.Tensor) -> None:
            q, k = _kept(kept, *_shapes(plan.problem))
            given = tensors.given.having(q=q, k=k)
            found = gradients_of(plan, halves, given, tensors.out, lse, tensors.grad_out)
            for result, gradient in zip(tensors.gradients, found):
                if result is not None:
                    result.copy_(gradient)

        return call

    def bind_pool(self, pooling: Pooling, x: torch.Tensor, wants_means: bool) -> PoolCall:
        record = selection_record(PoolSpec(self.arch(-1), pooling.channels).name, self._manifest)

        def call(x: torch.Tensor, pooled: torch.Tensor, means: torch.Tensor | None) -> None:
            found, of_rows = pool(pooling, record, x)
            for to, part in zip(views_of(pooling, pooled), found):
                to.copy_(part)
            if means is not None:
                means.copy_(of_rows)

        return call

    def bind_choice(self, choosing: Choosing, device: int) -> ChooseCall:
        choose_launch(choosing, self.arch(device), self._manifest)  # raises as on a GPU

        def call(q_pooled: torch.Tensor, k_pooled: torch.Tensor, amounts: torch.Tensor | None,
                 selected: torch.Tensor) -> None:
            selected.copy_(choose(choosing, views_of(choosing.q, q_pooled), views_of(choosing.k, k_pooled), amounts))

        return call


# --- the parts of a call ----------------------------------------------------------------------------------------------


def _call_all(plan: Plan, given: Given, out: torch.Tensor | None, lse: torch.Tensor | None) -> None:
    q, k, v = _heads_first(plan, given.q, given.k, given.v)
    _attend(plan, given.having(q=q, k=k, v=v), out, lse)


def _call_train(plan: Plan, given: Given, out: torch.Tensor | None, lse: torch.Tensor | None) -> None:
    clear_output(plan.problem, out, lse)
    (_attend_sequences if plan.problem.tokens else _call_all)(plan, given, out, lse)
    q, k = cast(torch.Tensor, given.q), cast(torch.Tensor, given.k)
    _keep(given.kept, q.float(), k.float())


def _call_kv(plan: Plan, given: Given, out: torch.Tensor | None, lse: torch.Tensor | None) -> None:
    k, v = _heads_first(plan, given.k, given.v)
    _keep(given.kept, k.float(), v.float(), *([] if given.key_mask is None else [given.key_mask]))


def _call_q(plan: Plan, given: Given, out: torch.Tensor | None, lse: torch.Tensor | None) -> None:
    problem, kept = plan.problem, cast(torch.Tensor, given.kept)
    _, shape = _shapes(problem)
    k, v = _kept(kept, shape, shape)
    size = k.nbytes + v.nbytes
    key_mask = kept[size:].view(torch.bool).view(problem.batch, problem.seqlen_kv) if problem.has_key_mask else None
    q, = _heads_first(plan, given.q)
    _attend(plan, given.having(q=q, k=k, v=v, key_mask=key_mask), out, lse)


_CALLS: Mapping[Part, Callable[[Plan, Given, torch.Tensor | None, torch.Tensor | None], None]] = {
    "all": _call_all, "train": _call_train, "kv": _call_kv, "q": _call_q}


def _heads_first(plan: Plan, *tensors: torch.Tensor | None) -> list[torch.Tensor]:
    return [heads_first(cast(torch.Tensor, tensor), plan.problem.options.layout) for tensor in tensors]


def _shapes(problem: Problem) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of q, and of k and v: heads first, or in the layout of a call that is trained."""
    of_q, of_k = (problem.num_q_heads, problem.q_rows), (problem.num_kv_heads, problem.kv_rows)
    if problem.part == "train" and problem.options.layout != "HND" or problem.tokens:
        of_q, of_k = of_q[::-1], of_k[::-1]
    batch = () if problem.tokens else (problem.batch,)
    return (*batch, *of_q, problem.headdim), (*batch, *of_k, problem.headdim)


def _keep(kept: torch.Tensor | None, *parts: torch.Tensor) -> None:
    """Write tensors to `kept`, one behind the other."""
    cast(torch.Tensor, kept).copy_(torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in parts]))


def _kept(kept: torch.Tensor, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    """The first tensors that :func:`_keep` wrote, f32 of these shapes."""
    ends = [*accumulate(4 * math.prod(shape) for shape in shapes)]
    return [kept[begin:end].view(torch.float32).view(shape) for begin, end, shape in zip([0, *ends], ends, shapes)]


def _attend(plan: Plan, given: Given, out: torch.Tensor | None, lse: torch.Tensor | None) -> None:
    """q, k and v are [batch, heads, seq, headdim], the output has the call's layout."""
    problem, kernels = plan.problem, plan.kernels
    q, k, v = (cast(torch.Tensor, tensor) for tensor in (given.q, given.k, given.v))
    attended = partial(attend, with_lse=lse is not None, sinks=given.sinks, elements=elements_of(problem, given))
    if not problem.packs_keys:
        result, result_lse = attended(plan, quantized_of(problem, kernels, q, k, v))
    else:
        key_mask = cast(torch.Tensor, given.key_mask)
        parts = [attended(replace(plan, problem=entry.problem), entry.quantize(kernels), entry.key_ranks)
                 for entry in packed_entries(problem, q, k, v, key_mask)]
        result, result_lse = map(torch.cat, zip(*parts))
    out, = _heads_first(plan, out)
    out.copy_(within(result[:, :, : problem.seqlen_q, : problem.headdim], out.dtype))
    if lse is not None:
        lse.copy_(result_lse[:, :, : problem.seqlen_q])


def quantized_of(problem: Problem, kernels: Kernels, q: torch.Tensor, k: torch.Tensor,
                 v: torch.Tensor) -> Quantized:
    """The quantized tensors of a call. Of one that is trained the backward pass recomputes P from scores without a
    row_bias."""
    quantized = quantize(problem, kernels, q, k, v)
    return replace(quantized, row_bias=0.0 * quantized.row_bias) if problem.part == "train" else quantized


def elements_of(problem: Problem, given: Given) -> torch.Tensor | None:
    """[batch, q heads, queries, keys] bool: what the masks of a call leave whose KV tiles are listed; None of
    others."""
    if not problem.is_listed:
        return None
    seen = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=given.like.device)
    if given.attn_mask is not None:
        seen = seen & given.attn_mask
    if given.key_mask is not None:
        seen = seen & given.key_mask[:, None, None]
    if given.block_mask is not None:
        rows, columns = (torch.arange(size, device=seen.device) // MASK_BLOCK for size in (problem.seqlen_q,
                                                                                          problem.seqlen_kv))
        seen = seen & given.block_mask[:, :, rows][..., columns]
    return seen.expand(problem.batch, problem.num_q_heads, problem.seqlen_q, problem.seqlen_kv)


class SequenceEntry(NamedTuple):
    """One sequence of a call."""

    problem: Problem  # of the sequence as a batch of one
    q: torch.Tensor  # [1, heads, seq, headdim], as k and v; its queries and keys may be none
    k: torch.Tensor
    v: torch.Tensor
    rows: slice  # of the call's queries
    keys: slice  # of the call's keys


def sequence_entries(problem: Problem, given: Given) -> Iterator[SequenceEntry]:
    """The sequences of a call, each of the lengths that the kernels see."""
    q, k, v, *cu_seqlens = (cast(torch.Tensor, tensor) for tensor in (given.q, given.k, given.v, given.cu_seqlens_q,
                                                                      given.cu_seqlens_k))
    ends = (pairwise(begins.tolist()) for begins in cu_seqlens)
    for (q_begin, q_end), (k_begin, k_end) in zip(*ends):
        queries, keys = min(q_end - q_begin, problem.seqlen_q), min(k_end - k_begin, problem.seqlen_kv)
        rows, columns = slice(q_begin, q_begin + queries), slice(k_begin, k_begin + keys)
        own = replace(problem, batch=1, seqlen_q=queries, seqlen_kv=keys, tokens=None)
        yield SequenceEntry(own, _entry(q[rows]), _entry(k[columns]), _entry(v[columns]), rows, columns)


def _entry(of_sequence: torch.Tensor) -> torch.Tensor:
    """[rows, heads, headdim] as [1, heads, rows, headdim]."""
    return of_sequence.transpose(0, 1)[None]


def _attend_sequences(plan: Plan, given: Given, out: torch.Tensor | None, lse: torch.Tensor | None) -> None:
    out = cast(torch.Tensor, out)
    for own in sequence_entries(plan.problem, given):
        if own.problem.seqlen_q == 0:
            continue
        if own.problem.seqlen_kv == 0:
            out[own.rows] = 0.0
            if lse is not None:
                lse[:, own.rows] = float("-inf") if given.sinks is None else given.sinks[:, None]
            continue
        quantized = quantized_of(own.problem, plan.kernels, own.q, own.k, own.v)
        result, result_lse = attend(replace(plan, problem=own.problem), quantized, with_lse=lse is not None,
                                    sinks=given.sinks)
        of_rows = result[0, :, : own.problem.seqlen_q, : own.problem.headdim].transpose(0, 1)
        out[own.rows] = within(of_rows, out.dtype).to(out.dtype)
        if lse is not None:
            lse[:, own.rows] = result_lse[0, :, : own.problem.seqlen_q]


class PackedEntry(NamedTuple):
    """One batch entry of a call with a key mask: the keys that the mask leaves, one where it leaves none."""

    problem: Problem  # of the entry, as it came
    q: torch.Tensor  # [1, heads, seq, headdim], as k and v
    k: torch.Tensor
    v: torch.Tensor
    key_ranks: torch.Tensor  # [keys + 1]: how many of the caller's first keys are left
    keys: torch.Tensor  # which of the caller's keys these are

    def quantize(self, kernels: Kernels) -> Quantized:
        return quantized_of(replace(self.problem, seqlen_kv=self.k.shape[2]), kernels, self.q, self.k, self.v)


def packed_entries(problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                   key_mask: torch.Tensor) -> Iterator[PackedEntry]:
    """The batch entries of a call with a key mask."""
    for entry, mask in enumerate(key_mask):
        left = mask.nonzero()[:, 0] if mask.any() else torch.zeros(1, dtype=torch.int64, device=mask.device)
        ranks = torch.nn.functional.pad(mask.cumsum(0), (1, 0))
        own = slice(entry, entry + 1)
        yield PackedEntry(replace(problem, batch=1), q[own], k[own][:, :, left], v[own][:, :, left], ranks, left)


# --- the backward pass ------------------------------------------------------------------------------------------------


def gradients_of(plan: Plan, halves: bool, given: Given, out: torch.Tensor, lse: torch.Tensor,
                 grad_out: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The gradients of q, k and v, f32, in the layout of the call; zeros where nothing reaches them."""
    problem = plan.problem
    q, k, v = (cast(torch.Tensor, tensor) for tensor in (given.q, given.k, given.v))
    if problem.tokens:
        of = tuple(torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v))
        for own in sequence_entries(problem, given):
            if own.problem.is_empty:
                continue
            quantized = quantized_of(own.problem, plan.kernels, own.q, own.k, own.v)
            saved = saved_of(quantized, own.v, _entry(out[own.rows]), lse[None, :, own.rows])
            found = _gradients(problem, halves, saved, _entry(grad_out[own.rows]))
            for gradient, rows, part in zip(of, (own.rows, own.keys, own.keys), found):
                gradient[rows] = part[0].transpose(0, 1)
        return of
    layout = problem.options.layout
    q, k, v, out, grad_out = (heads_first(tensor, layout) for tensor in (q, k, v, out, grad_out))
    if not problem.packs_keys:
        found = _gradients(problem, halves, saved_of(quantized_of(problem, plan.kernels, q, k, v), v, out, lse),
                           grad_out)
        return tuple(heads_first(gradient, layout) for gradient in found)
    of = tuple(torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v))
    for b, entry in enumerate(packed_entries(problem, q, k, v, cast(torch.Tensor, given.key_mask))):
        saved = saved_of(entry.quantize(plan.kernels), entry.v, out[b: b + 1], lse[b: b + 1])
        found = _gradients(problem, halves, saved, grad_out[b: b + 1], entry.key_ranks)
        of[0][b] = found[0][0]
        if entry.key_ranks[-1] > 0:
            of[1][b][:, entry.keys], of[2][b][:, entry.keys] = found[1][0], found[2][0]
    return tuple(heads_first(gradient, layout) for gradient in of)


def _gradients(problem: Problem, halves: bool, saved: Saved, grad_out: torch.Tensor,
               key_ranks: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return gradients(saved, grad_out, problem.softmax_scale, problem.options.is_causal, key_ranks=key_ranks,
                     halves=halves)


def emulated_arch(manifest: Manifest) -> str:
    """The arch whose kernels CPU tensors emulate: ``SAGE_AOT_EMULATE`` where set, else sm89, else the newest built."""
    archs = manifest.attention_archs
    asked = os.environ.get("SAGE_AOT_EMULATE")
    if asked and asked not in archs:
        raise UnsupportedError(f"SAGE_AOT_EMULATE: expected one of the archs that are built, {', '.join(archs)}; got "
                               f"{asked!r}")
    return asked or ("sm89" if "sm89" in archs else archs[-1])
