"""The structs that kernels take by value, filled in by name.

The headers params.cuh of the templates document the fields. :mod:`sage_aot._launch.plan` passes a launch's values by
name, options of the call among them; each field of a struct takes the value of its name. The manifest has the offset
and type of each field and the size of each struct, as the kernels' compiler laid them out. An address here is a
tensor's name and an offset. A struct is therefore packed once; each call adds only the addresses of its tensors.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from operator import itemgetter
from typing import Any, NamedTuple

from sage_aot._families import FAMILIES
from sage_aot._kernels.axes import AXES
from sage_aot._kernels.manifest import Struct
from sage_aot._kernels.spec import KINDS
from sage_aot._kernels.tile import Tile
from sage_aot._problem.options import OPTIONS
from sage_aot._problem.tensors import OPERANDS, TENSORS

SOURCES = ("q", "k", "v", "out", "lse", "workspace", *OPERANDS[3:], "grad_out", "grad_q", "grad_k", "grad_v",
           "x", "pooled", "x_mean", "q_pooled", "k_pooled", "amounts", "selected")
"""Tensors of a call in which an address may lie: first those of every call, then those of a backward pass alone, last
those of a selection of blocks. The address of a tensor that a call does not have is zero."""

NO_SOURCE = len(SOURCES)

_INDEX = {source: index for index, source in enumerate((*SOURCES, ""))}

DTYPE_CODES = {"f16": 0, "bf16": 1, "f32": 2}
WORD = 8  # bytes of an address

Params = Mapping[str, Any]
"""Values of a launch by the names of the structs' fields: addresses, tensors, numbers, and options."""


Address = tuple[str, int]
"""One of SOURCES, and an offset from its beginning in bytes. A plain tuple is fast: a call of a new kind makes dozens.
"""


class FastDivmod(NamedTuple):
    """A divisor, and the factor and the shift by which fast_divmod.cuh divides."""

    divisor: int
    multiplier: int
    shift: int

    @classmethod
    def of(cls, divisor: int) -> FastDivmod:
        """`divisor`: from 1 to 2^31 - 1."""
        shift = (divisor - 1).bit_length()
        return cls(divisor, -(-(1 << 31 + shift) // divisor), shift)


class Tensor(NamedTuple):
    """A [batch, heads, seq, headdim] tensor: where it begins, and its strides in elements."""

    data: Address
    batch: int
    head: int
    row: int


NULL: Address = ("", 0)
"""The address zero."""

_TENSORS = ("q", "k", "v", "out", *TENSORS, "grad_out", "grad_q", "grad_k", "grad_v", "x")
_ADDRESSES = ("cu_seqlens_q", "cu_seqlens_k", "key_rank", "key_index", "q_hat", "kv_hat", "q_scale", "q_mean", "k_mean",
              "k_factor", "q_unit", "v_scale", "v_inv_scale", "v_mean", "row_bias", "tile_counter", "delta_s", "lse",
              "partial_out", "partial_lse", "tile_lists", "tile_counts", "key_bits", "k_hat", "q_side", "kv_side",
              "q_sums", "q_counts", "x_hat", "x_scale", "x_alike", "x_mean", "q_alike", "k_scale", "k_alike",
              "amounts", "selected")
_INTEGERS = ("batch", "seqlen_q", "seqlen_kv", "q_rows", "kv_rows", "headdim", "dtype", "kv_tiles", "block_m",
             "block_n", "columns", "kv_blocks", "kv_heads", "first_head", "num_heads", "split_rows",
             "partial_headdim", "q_side_blocks", "log2_parts_of_kv_tile", "window_left", "window_right",
             "mask_of_batch", "mask_of_head", "block_rows", "seqlen", "centre", "q_block_count", "k_blocks", "block_q",
             "block_k", "group_rows", "pitch", "choose_by", "choose_causal", "first_kept", "near_kept",
             "dense_first_keys", "dense_last_keys", "dense_first_queries", "dense_last_queries", "wants_row_bias",
             "balance", "returns_lse", "unused")
_DIVISORS = ("num_q_heads", "num_kv_heads", "q_heads_per_kv_head", "q_tiles", "blocks_per_kv_head", "key_blocks",
             "tile_blocks", "splits", "row_blocks", "q_side_tiles", "kv_side_tiles", "q_blocks", "kv_blocks_of_head",
             "heads_side_by_side", "mask_heads", "x_heads", "blocks", "groups")
_FLOATS = ("softmax_scale", "softmax_scale_log2", "v_typical", "v_least", "v_limit", "amount", "least_alike")
_OF_SCHEMA = {"bool": "i", "int": "i", "float": "f"}

FILLED: dict[str, str] = {
    **dict.fromkeys(_TENSORS, "T"), **dict.fromkeys(_ADDRESSES, "Q"), **dict.fromkeys(_INTEGERS, "i"),
    **dict.fromkeys(_FLOATS, "f"), **dict.fromkeys(_DIVISORS, "D"),
    **{name: _OF_SCHEMA[option.schema.rstrip("?")] for name, option in OPTIONS.items()
       if option.schema in _OF_SCHEMA or option.resolve and option.schema.rstrip("?") in _OF_SCHEMA},
}
"""Every field that a struct may have, with the character that kernel_info.cuh has for its type. An option is among them
where its values, with "auto" resolved, are numbers."""


def vocabulary() -> str:
    """A hash, in 16 hex digits, of every name that a manifest uses: fields of structs, axes with their values, kinds,
    families and tile sizes. Kernels of another vocabulary may lack an option's field or have a field unknown here."""
    words = sorted(FILLED.items()), AXES, sorted(KINDS), sorted(FAMILIES), Tile._fields
    return hashlib.sha256(repr(words).encode()).hexdigest()[:16]


_FORMATS = {"Q": "Q", "T": "Qqqq", "D": "iIi", "i": "i", "f": "f"}
"""Per type of a field, its format in Python's module struct."""


class Packed(NamedTuple):
    """A struct as bytes, in which each address is still the offset from its source's beginning."""

    data: bytes
    sources: bytes  # per 8-byte word of data: the index in SOURCES whose address is to be added, or NO_SOURCE

    def at(self, addresses: Mapping[str, int]) -> bytes:
        """The struct with the addresses added. `addresses`: of the call's tensors, by their names in SOURCES."""
        added = [*(addresses.get(name, 0) for name in SOURCES), 0]
        words = struct.unpack(f"<{len(self.sources)}Q", self.data)
        return struct.pack(f"<{len(words)}Q", *(word + added[source] for word, source in zip(words, self.sources)))


class Packer:
    """Fills in one struct as the kernels' compiler laid it out."""

    def __init__(self, layout: Struct) -> None:
        """`layout`: must have no :func:`layout_problems`."""
        fields = sorted((offset, name, code) for name, (code, offset) in layout.fields.items())
        self._struct = struct.Struct("<" + "".join(_FORMATS[code] for _, _, code in fields))  # without gaps
        self._values = itemgetter(*(name for _, name, _ in fields))
        self._no_sources = bytes([NO_SOURCE]) * (layout.size // WORD)
        self._addresses = [(i, offset // WORD) for i, (offset, _, code) in enumerate(fields) if code == "Q"]
        # Index in the order of `fields`, and word in the struct, of values that pack() replaces by several: last first,
        # so that the indices before it stay right. A divisor has no address, and no word.
        self._several = [(i, offset // WORD if code == "T" else None) for i, (offset, _, code) in enumerate(fields)
                         if code in "TD"][::-1]

    def pack(self, params: Params) -> Packed:
        """Put every field where the kernels' compiler has it."""
        values, sources = list(self._values(params)), bytearray(self._no_sources)
        for i, word in self._addresses:
            source, values[i] = values[i]
            sources[word] = _INDEX[source]
        for i, word_or_none in self._several:
            several = values[i]
            if word_or_none is not None:
                (source, begin), *strides = several
                sources[word_or_none], several = _INDEX[source], (begin, *strides)
            values[i:i + 1] = several
        return Packed(self._struct.pack(*values), bytes(sources))


def layout_problems(structs: Mapping[str, Struct]) -> list[str]:
    """Fields of a kernel folder's structs that sage_aot does not fill in, a sentence each."""
    problems = []
    for name, layout in structs.items():
        problems += [f"expected fields of {name} that sage_aot fills in, got {field} of type {code!r}"
                     for field, (code, _) in layout.fields.items() if FILLED.get(field) != code]
    return problems
