"""The structs that kernels take by value, filled in by name.

A class here has the name and the fields of a struct of templates/include/sage/params.cuh, which documents them. Where
each field lies and how large the struct is, the manifest says, as the kernels' compiler laid it out. An address names
the tensor that it belongs to, so that a struct is packed once and only its addresses change from call to call.
"""

from __future__ import annotations

import struct
from operator import itemgetter
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


class StatsParams(NamedTuple):
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


class QuantParams(NamedTuple):
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


class DeltaParams(NamedTuple):
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


class AttnParams(NamedTuple):
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

_FORMATS = {"Q": "Q", "T": "Qqqq", "i": "i", "f": "f"}
"""Per type how the module struct spells it."""


class Packed(NamedTuple):
    """A struct whose addresses hold offsets only, and the words to which an address is still to be added."""

    data: bytes
    sources: list[tuple[int, str]]  # the byte offset of each such word, and what its address lies in

    def at(self, addresses: dict[str, int]) -> bytes:
        """The struct for tensors that lie at these addresses, by their names in SOURCES."""
        data = bytearray(self.data)
        for offset, source in self.sources:
            word = int.from_bytes(data[offset:offset + WORD], "little") + addresses[source]
            data[offset:offset + WORD] = word.to_bytes(WORD, "little")
        return bytes(data)


class Packer:
    """Fills in one struct as the kernels' compiler laid it out."""

    def __init__(self, params: type[Params], layout: Struct) -> None:
        """ValueError where the fields do not fill the struct; :func:`layout_problems` says what differs."""
        codes = expected_fields(params)
        in_order = sorted((offset, name) for name, (_, offset) in layout.fields.items())
        self._struct = struct.Struct("<" + "".join(_FORMATS[codes[name]] for _, name in in_order))
        if self._struct.size != layout.size:
            raise ValueError(f"{params.__name__}: expected {layout.size} bytes of fields, got {self._struct.size}")
        self._in_order = itemgetter(*(params._fields.index(name) for _, name in in_order))
        # Per kind of value its places in that order, with byte offsets; tensors, which become four values, last first.
        places = [(i, offset, codes[name]) for i, (offset, name) in enumerate(in_order)]
        self._addresses = [(i, offset) for i, offset, code in places if code == "Q"]
        self._tensors = [(i, offset) for i, offset, code in reversed(places) if code == "T"]

    def pack(self, params: Params) -> Packed:
        """Put every field where the kernels' compiler has it."""
        values, sources = list(self._in_order(params)), []
        for i, offset in self._addresses:
            source, values[i] = values[i]
            if source:
                sources.append((offset, source))
        for i, offset in self._tensors:
            (source, begin), *strides = values[i]
            values[i:i + 1] = begin, *strides
            sources.append((offset, source))
        return Packed(self._struct.pack(*values), sources)


def packers_of(structs: dict[str, Struct]) -> dict[type[Params], Packer]:
    """A packer for every struct of a kernel folder, by what it fills in."""
    return {PARAMS[name]: Packer(PARAMS[name], layout) for name, layout in structs.items()}


def expected_fields(params: type[Params]) -> dict[str, str]:
    """The fields that a class fills in, with the characters of their types."""
    names = {name: getattr(kind, "__forward_arg__", kind) for name, kind in params.__annotations__.items()}
    return {name: _CODES[str(kind)] for name, kind in names.items()}


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
