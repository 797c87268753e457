"""Comparison of what kernels left behind with the emulation of what they were handed.

The tensors are those that the public call gave its backend (fuzz_spy.py), whatever it made of the caller's: that this
was right is for fuzz_oracle.py to say. Bounds are of roundings alone (sage_aot/_tools/compare.py); quantized tensors
agree bit for bit.
"""

from __future__ import annotations

import dataclasses

import torch
from fuzz_spy import Handed, Spy
from layout import read_back

from sage_aot._backends.emulation.backend import elements_of, packed_entries, quantized_of, sequence_entries
from sage_aot._backends.emulation.quantize import Quantized, statistics_of_k
from sage_aot._launch.plan import Plan
from sage_aot._problem.mask import Mask, VisibleKeys
from sage_aot._problem.problem import heads_first
from sage_aot._tools.compare import Measure, against_emulation, same


def against_emulated(spy: Spy, *, read_quantized: bool) -> list[Measure]:
    """Every check of all launches of a call. `read_quantized`: compare the quantized tensors too."""
    assert spy.attended
    measures = []
    for handed, result in spy.attended:
        found = read_back(result) if read_quantized else None
        measures += (_of_sequences if handed.plan.problem.tokens else _of_batch)(handed, found)
    return measures


def _of_batch(handed: Handed, found: dict[str, torch.Tensor] | None) -> list[Measure]:
    """Compare batch entry by batch entry where there is a key mask, on the keys that the mask leaves."""
    plan, problem = handed.plan, handed.plan.problem
    q, k, v, out = (heads_first(x, problem.options.layout) for x in (*handed.given.tensors[:3], handed.out))
    visible = Mask.of(problem.options).visible_keys(torch.arange(problem.seqlen_q, device=q.device),
                                                    problem.seqlen_q, problem.seqlen_kv)
    if not problem.packs_keys:
        quantized = quantized_of(problem, plan.kernels, q, k, v)
        return _of_entry(plan, quantized, visible, k.shape[2], None, found, out, handed.lse, handed.given.sinks,
                         elements_of(problem, handed.given))
    measures = []
    for b, entry in enumerate(packed_entries(problem, q, k, v, handed.given.key_mask)):
        own = slice(b, b + 1)
        if not entry.key_ranks[-1]:
            continue  # what becomes of nothing is the oracle's to say
        quantized = entry.quantize(plan.kernels)
        of_entry = dataclasses.replace(plan, problem=entry.problem)
        measures += _of_entry(of_entry, quantized, visible.packed(entry.key_ranks), entry.k.shape[2], entry.key_ranks,
                              found and _found_of_entry(found, own, quantized), out[own],
                              None if handed.lse is None else handed.lse[own], handed.given.sinks)
    return measures


def _found_of_entry(found: dict[str, torch.Tensor], own: slice, quantized: Quantized) -> dict[str, torch.Tensor]:
    """Tensors that the kernels left of one batch entry, without the room for keys that the mask takes away."""
    room = {name: getattr(quantized, name).shape[2]
            for name in ("k", "v", "k_scale", "v_factor", "k_spoilt", "v_spoilt")}
    return {name: x[own][:, :, : room.get(name)] for name, x in found.items()}


def _of_sequences(handed: Handed, found: dict[str, torch.Tensor] | None) -> list[Measure]:
    """Sequence by sequence."""
    plan, given = handed.plan, handed.given
    begins_q, begins_k = given.cu_seqlens_q.tolist(), given.cu_seqlens_k.tolist()
    measures = []
    for b, own in enumerate(sequence_entries(plan.problem, given)):
        queries, keys = own.problem.seqlen_q, own.problem.seqlen_kv
        if 0 in (queries, keys):
            continue
        visible = Mask.of(own.problem.options).visible_keys(torch.arange(queries, device=own.q.device), queries, keys)
        quantized = quantized_of(own.problem, plan.kernels, own.q, own.k, own.v)
        of_own = found and _found_of_sequence(found, plan, b, begins_q[b], begins_k[b], quantized)
        measures += _of_entry(dataclasses.replace(plan, problem=own.problem), quantized, visible, keys, None, of_own,
                              handed.out[own.rows].transpose(0, 1)[None],
                              None if handed.lse is None else handed.lse[:, own.rows][None], given.sinks)
    return measures


def _found_of_sequence(found: dict[str, torch.Tensor], plan: Plan, b: int, q_begin: int, k_begin: int,
                       quantized: Quantized) -> dict[str, torch.Tensor]:
    """Tensors that the kernels left of one sequence: its slots of the tiles, and its channels."""
    tile = plan.kernels.attn.tile
    q_tile, kv_tile = q_begin // tile.block_m + b, k_begin // tile.block_n + b
    first = {**dict.fromkeys(("q", "q_scale", "row_bias"), q_tile * tile.block_m),
             **dict.fromkeys(("q_mean", "delta_s"), q_tile), "v_factor": kv_tile,
             **dict.fromkeys(("k", "v", "k_scale", "k_spoilt", "v_spoilt"), kv_tile * tile.block_n)}
    slots = {name: x[:, :, first[name]: first[name] + getattr(quantized, name).shape[2]]
             for name, x in found.items() if name in first}
    return {**{name: x[b: b + 1] for name, x in found.items() if name not in first}, **slots}


def _of_entry(plan: Plan, quantized: Quantized, visible: VisibleKeys, keys: int, key_ranks: torch.Tensor | None,
              found: dict[str, torch.Tensor] | None, out: torch.Tensor, lse: torch.Tensor | None,
              sinks: torch.Tensor | None, elements: torch.Tensor | None = None) -> list[Measure]:
    """`visible`: what the queries see of the `keys` that were quantized. `found`: what the kernels left of these, if it
    is compared. `out` and `lse`: [1 or batch, q heads, queries, ...]."""
    measures = against_emulation(plan, quantized, out, lse, key_ranks, sinks, elements)
    return measures if found is None else measures + _bits(plan, found, quantized, visible, keys, lse is not None)


def divides_alike(handed: Handed) -> bool:
    """True where quantize_kv, which does not know q, divides the same channels of k as the call does."""
    problem = handed.plan.problem
    q, k, v = (heads_first(x, problem.options.layout) for x in handed.given.tensors[:3])
    entries = [(problem, q, k)]
    if problem.packs_keys:
        entries = [(dataclasses.replace(entry.problem, seqlen_kv=entry.k.shape[2]), entry.q, entry.k)
                   for entry in packed_entries(problem, q, k, v, handed.given.key_mask) if entry.key_ranks[-1]]
    of_call, of_kv = ([statistics_of_k(dataclasses.replace(own, part=part), handed.plan.kernels, q, k)[1]
                       for own, q, k in entries] for part in ("all", "kv"))
    return all(map(torch.equal, of_call, of_kv))


# The quantized tensors -----------------------------------------------------------------------------------------------


def _bits(plan: Plan, found: dict[str, torch.Tensor], quantized: Quantized, visible: VisibleKeys,
          keys: int, has_lse: bool) -> list[Measure]:
    names = ["q", "k", "v", "q_scale", "k_scale", "v_scale", "k_mean", "k_factor", "q_unit", "v_mean", "v_factor",
             "k_spoilt", "v_spoilt"]
    names += ["row_bias"] if has_lse else []  # else it tells only what is finite
    names += ["q_mean"] if "q_mean" in found else []
    expected = {name: getattr(quantized, name).cpu() for name in names}
    measures = [same(f"bits of {name}", found[name], x) for name, x in expected.items()]
    if "delta_s" in found:
        measures.append(_bits_of_delta_s(plan, found["delta_s"], quantized.delta_s.cpu(), visible, keys))
    return measures


def _bits_of_delta_s(plan: Plan, got: torch.Tensor, expected: torch.Tensor, visible: VisibleKeys,
                     keys: int) -> Measure:
    """Compare delta_s of the keys that a tile's last row sees: the kernel leaves out blocks that no row sees, and
    nobody reads them."""
    block_m, queries = plan.kernels.attn.tile.block_m, visible.begin.shape[0]
    last_row = (torch.arange(1, got.shape[2] + 1) * block_m).clamp(max=queries) - 1
    seen = VisibleKeys(*(x.cpu()[last_row] for x in visible)).contains(torch.arange(keys))
    return same("bits of delta_s", got[..., :keys], expected[..., :keys]).without(~seen)
