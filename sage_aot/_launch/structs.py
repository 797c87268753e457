"""The structs that kernels take by value, filled in by name.

A class here has the name and the fields of a struct of templates/include/sage/params.cuh, which documents them. Where
each field lies and how large the struct is, the manifest says, as the kernels' compiler laid it out. An address names
the tensor that it belongs to, so that a struct is packed once and only its addresses change from call to call.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, fields
from typing import NamedTuple

from sage_aot._kernels.manifest import Struct

SOURCES = ("q", "k", "v", "out", "lse", "workspace")
"""What an address may lie in: tensors of a call. The log-sum-exp's address is zero where it is not wanted."""

DTYPE_CODES = {"f16": 0, "bf16": 1}
WORD = 8  # bytes of an address


class Address(NamedTuple):
    """So many bytes behind the beginning of one of SOURCES."""

    source: str
    offset: int = 0


class Tensor(NamedTuple):
    """A [batch, heads, seq, headdim] tensor: where it begins, and its strides in elements."""

    data: Address
    batch: int
    head: int
    row: int


NULL = Address("")
"""The address zero."""


@dataclass(frozen=True)
class StatsParams:
    """Of the statistics kernel, for its first launch or for its second."""

    k: Tensor
    v: Tensor
    k_stats: Address
    v_stats: Address
    k_mean: Address
    v_mean: Address
    v_amax: Address
    v_finite: Address
    k_finite: Address
    taken: Address
    num_kv_heads: int
    seqlen_kv: int
    headdim: int
    chunk_rows: int
    num_chunks: int
    dtype: int
    aligned: bool
    smooth_k: bool
    smooth_v: bool
    merge: bool


@dataclass(frozen=True)
class QuantParams:
    """Of the quantizer."""

    q: Tensor
    k: Tensor
    v: Tensor
    k_mean: Address
    v_mean: Address
    v_amax: Address
    v_finite: Address
    q_hat: Address
    kv_hat: Address
    q_scale: Address
    q_mean: Address
    v_scale: Address
    k_finite: Address
    row_bias: Address
    batch: int
    num_q_heads: int
    num_kv_heads: int
    seqlen_q: int
    seqlen_kv: int
    headdim: int
    q_tiles: int
    kv_tiles: int
    softmax_scale_log2: float
    dtype: int
    aligned: bool
    smooth_q: bool
    smooth_v: bool
    v_limit: float


@dataclass(frozen=True)
class DeltaParams:
    """Of the kernel for what smoothing Q takes off the scores."""

    k: Tensor
    q_mean: Address
    k_mean: Address
    delta_s: Address
    first_head: int
    num_heads: int
    num_q_heads: int
    num_kv_heads: int
    seqlen_q: int
    seqlen_kv: int
    headdim: int
    q_tiles: int
    columns: int
    dtype: int
    aligned: bool
    block_m: int
    block_n: int
    is_causal: bool


@dataclass(frozen=True)
class AttnParams:
    """Of attention kernels of every family."""

    q_hat: Address
    kv_hat: Address
    q_scale: Address
    v_scale: Address
    v_mean: Address
    k_finite: Address
    v_finite: Address
    row_bias: Address
    delta_s: Address
    out: Tensor
    lse: Address
    taken: Address
    first_head: int
    num_q_heads: int
    num_kv_heads: int
    seqlen_q: int
    seqlen_kv: int
    headdim: int
    q_tiles: int
    kv_tiles: int
    dtype: int
    num_heads: int


Params = StatsParams | QuantParams | DeltaParams | AttnParams
PARAMS: dict[str, type[Params]] = {cls.__name__: cls for cls in (StatsParams, QuantParams, DeltaParams, AttnParams)}

_CODES = {"Address": "Q", "Tensor": "T", "int": "i", "bool": "i", "float": "f"}
"""Per annotation the character that kernel_info.cuh has for the type."""


class Packed(NamedTuple):
    """A struct whose addresses hold offsets only, and the words to which an address is still to be added."""

    data: bytes
    sources: dict[int, str]  # by the byte offset of the word

    def at(self, addresses: dict[str, int]) -> bytes:
        """The struct for tensors that lie at these addresses, by their names in SOURCES."""
        data = bytearray(self.data)
        for offset, source in self.sources.items():
            word = int.from_bytes(data[offset:offset + WORD], "little") + addresses[source]
            data[offset:offset + WORD] = word.to_bytes(WORD, "little")
        return bytes(data)


def pack(params: Params, layout: Struct) -> Packed:
    """Put every field where the kernels' compiler has it."""
    data, sources = bytearray(layout.size), {}
    for name, code in expected_fields(type(params)).items():
        value, offset = getattr(params, name), layout.fields[name][1]
        if code == "T":
            struct.pack_into("<Qqqq", data, offset, value.data.offset, value.batch, value.head, value.row)
            sources[offset] = value.data.source
        elif code == "Q":
            struct.pack_into("<Q", data, offset, value.offset)
            if value.source:
                sources[offset] = value.source
        else:
            struct.pack_into(f"<{code}", data, offset, value)
    return Packed(bytes(data), sources)


def expected_fields(params: type[Params]) -> dict[str, str]:
    """The fields that a class fills in, with the characters of their types."""
    return {field.name: _CODES[str(field.type)] for field in fields(params)}


def layout_problems(structs: dict[str, Struct]) -> list[str]:
    """How the structs of a kernel folder differ from the classes here, a sentence each."""
    problems = []
    for name, layout in structs.items():
        found = {field: code for field, (code, _) in layout.fields.items()}
        expected = expected_fields(PARAMS[name]) if name in PARAMS else None
        if expected is None:
            problems.append(f"expected a struct of {', '.join(PARAMS)}, got {name}")
        elif found != expected:
            wrong = sorted(field for field in {**found, **expected} if found.get(field) != expected.get(field))
            problems.append(f"expected the fields of sage_aot._launch.structs.{name}, got others: {', '.join(wrong)}")
    return problems
