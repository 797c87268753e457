"""Workspace, grids and structs of a call, without a device."""

from __future__ import annotations

import dataclasses
import math
import struct

import pytest

from sage_aot._manifest import KernelRecord
from sage_aot._params import offsets
from sage_aot._plan import ALIGNMENT, MAX_CHUNKS, TensorArgument, chunk_rows_of, launches, plan
from sage_aot._problem import Problem
from sage_aot._select import Kernels
from sage_aot._spec import KernelSpec, Tile
from sage_aot.errors import UnsupportedError

TILE = Tile(128, 64, 32, 2, 2)
PROBLEM = Problem(batch=2, num_q_heads=6, num_kv_heads=3, seqlen_q=130, seqlen_kv=200, headdim=80, dtype="bf16",
                  is_causal=False, softmax_scale=0.5, smooth_k=True)
Q = TensorArgument(2**40, 1, 2, 3)


def kernels(pv: str = "e4m3") -> Kernels:
    attn = KernelSpec("attn", "sm89", 128, 8, pv, "full", "vraw")
    return Kernels(*(KernelRecord(attn.companion(kind), "", "", "", TILE, threads, 0, 0, 0)
                     for kind, threads in (("stats", 256), ("quant", 256), ("attn", 128))))


def field(launch, struct_name, name, code="i"):
    return struct.unpack_from("<" + code, launch.params, offsets(struct_name)[name])[0]


def run(problem=PROBLEM, **arguments):
    tensors = {"q": Q, "k": Q, "v": Q, "out": Q, "lse": 0, **arguments}
    return launches(plan(problem, kernels()), 2**30, **tensors)


def test_grids_cover_every_tile():
    stats, quant, attn = run()
    q_tiles, kv_tiles, chunks = 2, 4, 4
    assert stats.blocks == 2 * 3 * 2 * chunks
    assert quant.blocks == 2 * 6 * q_tiles + 2 * (2 * 3 * kv_tiles // 2)
    assert attn.blocks == 2 * 6 * q_tiles


def test_k_needs_no_statistics_where_it_is_not_smoothed():
    stats, quant, _ = run(dataclasses.replace(PROBLEM, smooth_k=False))
    assert stats.blocks == 2 * 3 * 4
    assert field(stats, "StatsParams", "smooth_k") == field(quant, "QuantParams", "smooth_k") == 0


def test_structs_hold_the_problem():
    stats, quant, attn = run(lse=2**41)
    assert field(stats, "StatsParams", "seqlen_kv") == 200
    assert field(quant, "QuantParams", "seqlen_q") == 130
    assert field(quant, "QuantParams", "softmax_scale_log2", "f") == pytest.approx(0.5 / math.log(2))
    assert field(attn, "AttnParams", "headdim") == 80
    assert field(attn, "AttnParams", "lse", "Q") == 2**41
    assert [struct.unpack_from("<Qqqq", quant.params, offsets("QuantParams")["q"])] == [(2**40, 1, 2, 3)]


@pytest.mark.parametrize("pv", ["f16", "e4m3"])
def test_buffers_are_aligned_disjoint_and_large_enough(pv):
    layout = plan(PROBLEM, kernels(pv))
    q_rows, keys = 2 * 6 * 2 * 128, 2 * 3 * 4 * 64
    least = {"k_sum": 6 * 4 * 128 * 4, "v_absmax": 6 * 4 * 128 * 4, "q_hat": q_rows * 128,
             "k_hat": keys * 128 + 2 * 3 * 4 * 128, "v_hat": keys * 128 * (2 if pv == "f16" else 1),
             "q_scale": q_rows // 4 * 4, "v_scale": 6 * 128 * 4, "row_bias": q_rows * 4}
    assert set(layout.offsets) == set(least)
    ends = [*sorted(layout.offsets.values())[1:], layout.workspace_bytes]
    for name, (start, end) in zip(sorted(layout.offsets, key=layout.offsets.get), zip(sorted(layout.offsets.values()), ends)):
        assert start % ALIGNMENT == 0
        assert least[name] <= end - start < least[name] + ALIGNMENT


@pytest.mark.parametrize(("tensor", "headdim", "aligned"), [
    (TensorArgument(2**40, 1024, 512, 128), 128, True),
    (TensorArgument(2**40 + 8, 1024, 512, 128), 128, False),
    (TensorArgument(2**40, 1024, 512, 132), 128, False),
    (TensorArgument(2**40, 1024, 516, 128), 128, False),
    (TensorArgument(2**40, 1024, 512, 128), 100, False),
    (TensorArgument(2**40, 1024, 512, 128), 72, True),
])
def test_vector_loads_need_aligned_rows(tensor, headdim, aligned):
    assert tensor.aligned(headdim) is aligned
    quant = run(dataclasses.replace(PROBLEM, headdim=headdim), q=tensor, k=TensorArgument(0, 8, 8, 8),
                v=TensorArgument(0, 8, 8, 8))[1]
    assert field(quant, "QuantParams", "aligned") == aligned


@pytest.mark.parametrize("seqlen", [1, 63, 64, 65, 1024, 1025, 16384, 118800, 2**20 + 1])
def test_chunks_cover_the_sequence(seqlen):
    rows = chunk_rows_of(seqlen)
    chunks = math.ceil(seqlen / rows)
    assert rows % 64 == 0 and chunks <= MAX_CHUNKS and (chunks - 1) * rows < seqlen <= chunks * rows


def test_a_grid_beyond_the_limit_is_refused():
    with pytest.raises(UnsupportedError, match="blocks, a launch takes 2147483647; split the batch"):
        run(dataclasses.replace(PROBLEM, batch=2**30))
