"""The arguments of the operators of each kind of call, and the :class:`Given` that their arguments make."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from sage_aot._problem.given import Given, MaxSeqlens, Stored
from sage_aot._problem.tensors import TENSORS, Kind, schema, taken_by

_TENSORS = "Tensor q, Tensor k, Tensor v, "


class Signature(NamedTuple):
    """The arguments of a kind's operators in front of the output and the options."""

    schema: str
    read: Callable[[tuple[Any, ...]], Given]  # from the operators' arguments

    @property
    def arity(self) -> int:
        return self.schema.count(", ")

    @property
    def behind_qkv(self) -> str:
        """The schema of what stands behind q, k and v, tensors first."""
        return self.schema.removeprefix(_TENSORS)


def _dense(kind: Kind) -> Signature:
    taken = taken_by(kind)
    missing = (None,) * (len(Given._fields) - 4 - len(taken))
    assert taken == tuple(TENSORS)[: len(taken)], "of Given, q, k, v and the optional tensors stand in this order"

    def read(arguments: tuple[Any, ...]) -> Given:
        return tuple.__new__(Given, (kind, *arguments, *missing))  # faster than Given(), on the way of every call

    return Signature(_TENSORS + schema(kind), read)


def _varlen(kind: Kind) -> Signature:
    names = taken_by(kind)

    def read(arguments: tuple[Any, ...]) -> Given:
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *optional = arguments
        return Given(kind, q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
                     details=MaxSeqlens(max_seqlen_q, max_seqlen_k), **dict(zip(names, optional)))

    return Signature(_TENSORS + "Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, "
                     + schema(kind), read)


def _kv() -> Signature:
    names = taken_by("kv")

    def read(arguments: tuple[Any, ...]) -> Given:
        k, v, *optional = arguments
        return Given("kv", None, k, v, **dict(zip(names, optional)))

    return Signature("Tensor k, Tensor v, " + schema("kv"), read)


def _stored() -> Signature:
    names = taken_by("stored")

    def read(arguments: tuple[Any, ...]) -> Given:
        q, kept, k, shape, dtype, has_key_mask, quantizer, *optional = arguments
        return Given("stored", q, k, kept=kept, details=Stored(tuple(shape), dtype, has_key_mask, quantizer),
                     **dict(zip(names, optional)))

    return Signature("Tensor q, Tensor kv, Tensor? k, SymInt[] shape, ScalarType dtype, bool has_key_mask, "
                     "str quantizer, " + schema("stored"), read)


SIGNATURES: dict[Kind, Signature] = {
    "dense": _dense("dense"), "varlen": _varlen("varlen"), "kv": _kv(), "stored": _stored(), "train": _dense("train"),
    "train_varlen": _varlen("train_varlen")}
