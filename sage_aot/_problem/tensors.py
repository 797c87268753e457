"""The table of optional tensors: everything that such an argument of the call is, in one entry.

From an entry of :data:`TENSORS` follow the check of the tensor, the operators' schemas that it stands in, the field of
the kernels' structs that has its address and strides, and its row in docs/options.md. An optional tensor is an entry
here, a field of :class:`sage_aot._problem.given.Given`, and a parameter of the public calls that take it. It travels
within a Given from there to the backends. Code generation reads the table too, without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from sage_aot.errors import ArgumentError

Kind = Literal["dense", "varlen", "kv", "stored", "train", "train_varlen"]
"""Kind of a call, by the public function: attn, attn_varlen, quantize_kv, attn with a QuantizedKV, train_attn,
train_attn_varlen."""

FUNCTIONS: Mapping[Kind, str] = {
    "dense": "attn", "varlen": "attn_varlen", "kv": "quantize_kv", "stored": "attn with a QuantizedKV",
    "train": "train_attn", "train_varlen": "train_attn_varlen"}
"""Per kind the public function."""

_MOST_RANKS = 2**31  # what key_rank_index() in problem/seqlen.cuh can count


class TensorArgument(NamedTuple):
    """One optional tensor of the call."""

    dtype: str  # of torch, by name
    shape: tuple[str, ...]  # per dimension its name in SIZES
    meaning: str  # what an element says
    other_dtype: str  # what to do about a tensor of another dtype
    other_shape: str  # likewise of another shape
    calls: tuple[Kind, ...]  # that take the tensor
    refused: Mapping[Kind, str]  # by call that does not take it: what to do about it
    help: str  # one sentence for docs/options.md; the docstring of attn() says more
    limit: Callable[[Any], tuple[Any, str]] = lambda problem: (False, "")  # sizes that are too large, and what to do
    axes: Mapping[str, str] = {}  # values of the axes of the kernels that take the tensor
    joins_softmax: bool = False  # weighed against scores, which then need what smoothing K took off (row_bias)


MASK_BLOCK = 64
"""Queries and keys of an element of a mask of blocks: kMaskBlock of problem/sparse_mask.cuh."""

SIZES: Mapping[str, Callable[[Any], int]] = {
    "batch": lambda problem: problem.batch, "q heads": lambda problem: problem.num_q_heads,
    "queries": lambda problem: problem.q_rows, "keys": lambda problem: problem.kv_rows,
    "query blocks": lambda problem: -(-problem.q_rows // MASK_BLOCK),
    "key blocks": lambda problem: -(-problem.kv_rows // MASK_BLOCK)}
"""Per dimension of an optional tensor its size in a :class:`sage_aot._problem.problem.Problem`."""


def _key_mask_limit(problem: Any) -> tuple[Any, str]:
    batch, keys = problem.batch, problem.kv_rows
    remedy = "split the batch" if batch > 1 else "pass k and v of the keys that it leaves, and no mask"
    return (batch * (keys + 1) >= _MOST_RANKS,
            f"expected batch * (keys + 1) below {_MOST_RANKS}, got {batch} * {keys + 1}; {remedy}")


def _not_trained(remedy: str) -> dict[Kind, str]:
    return {"train": remedy, "train_varlen": remedy}


TENSORS: dict[str, TensorArgument] = {
    "key_mask": TensorArgument(
        dtype="bool", shape=("batch", "keys"), meaning="True where a key may be seen",
        other_dtype="pass key_mask.bool() for ones and zeros, key_mask == 0 for zeros and -inf",
        other_shape="of a mask that all entries share pass key_mask.expand(batch, -1), of one [batch, 1, 1, keys] pass "
                    "key_mask[:, 0, 0]; pass one that differs by query or head as attn_mask",
        calls=("dense", "kv", "train"),
        refused={**dict.fromkeys(("varlen", "train_varlen"),
                                 "leave the keys that it masks out of k and v, and out of cu_seqlens_k"),
                 "stored": "pass it to quantize_kv"},
        help="keys that may be seen, for all queries and heads alike; the call drops all others before it quantizes, "
             "or with `sparse`, a `block_mask` or an `attn_mask` that differs by query or head replaces them by copies "
             "of visible keys",
        limit=_key_mask_limit),
    "sinks": TensorArgument(
        dtype="float32", shape=("q heads",), meaning="a logit in addition to the scores of each row of the head",
        other_dtype="pass sinks.float()", other_shape="pass one logit for each q head, sinks.flatten()",
        calls=("dense", "varlen", "stored"),
        refused={"kv": "pass it to attn",
                 **_not_trained("there is no backward pass with sinks; call the host's attention")},
        help="joins the softmax of each row of its q head, without a value: the weights of the keys sum to less than "
             "one",
        axes={"mask": "sparse"}, joins_softmax=True),
    "attn_mask": TensorArgument(
        dtype="bool", shape=("batch", "q heads", "queries", "keys"), meaning="True where the query sees the key",
        other_dtype="pass attn_mask.bool() for ones and zeros, attn_mask == 0 for zeros and -inf; an additive bias has "
                    "no kernel: call the host's attention",
        other_shape="pass one that broadcasts to it",
        calls=("dense", "stored"),
        refused={"varlen": "leave it out: sequences do not see each other", "kv": "pass it to attn",
                 **_not_trained("there is no backward pass with such masks; call the host's attention")},
        help="the keys that a query sees, as in torch's SDPA: any shape that broadcasts; tiles that no query sees are "
             "not read",
        axes={"mask": "sparse"}),
    "block_mask": TensorArgument(
        dtype="bool", shape=("batch", "q heads", "query blocks", "key blocks"),
        meaning="True where the 64 queries see the 64 keys",
        other_dtype="make it by sage_aot.block_mask", other_shape="make it by sage_aot.block_mask",
        calls=("dense", "stored"),
        refused={"varlen": "call attn for each sequence", "kv": "pass it to attn",
                 **_not_trained("there is no backward pass with such masks; call the host's attention")},
        help="the blocks of keys that a block of queries sees, by `sage_aot.block_mask`; all others are not read",
        axes={"mask": "sparse"}),
}
"""Every optional tensor by name, in the order of the operators' schemas."""

LISTED = ("attn_mask", "block_mask")
"""Optional tensors of a call whose KV tiles are listed: a kernel of its own reads them, and the call's key mask."""

OPERANDS = ("q", "k", "v", *TENSORS, "cu_seqlens_q", "cu_seqlens_k", "kept")
"""Names of all tensors that a call is given, in the order of the fields of :class:`sage_aot._problem.given.Given`."""


def taken_by(kind: Kind) -> tuple[str, ...]:
    """Names of the optional tensors that calls of a kind take."""
    return tuple(name for name, argument in TENSORS.items() if kind in argument.calls)


def schema(kind: Kind) -> str:
    """The optional tensors in the schema of a kind's operators."""
    return "".join(f"Tensor? {name}, " for name in taken_by(kind))


def check_taken(kind: Kind, **optional: object) -> None:
    """Raise ArgumentError for an optional tensor that calls of a kind do not take."""
    for name, tensor in optional.items():
        if tensor is not None and kind not in TENSORS[name].calls:
            raise ArgumentError(f"{name}: expected None in a call of {FUNCTIONS[kind]}, got a tensor; "
                                f"{TENSORS[name].refused[kind]}")


def _marked(function: str) -> str:
    """One of FUNCTIONS in Markdown, its names as code."""
    return " ".join(word if word in ("with", "a") else f"`{word}`" for word in function.split())


def markdown_table() -> str:
    """The table of optional tensors in docs/options.md."""
    rows = [f"| `{name}` | `[{', '.join(argument.shape)}]` {argument.dtype}: {argument.meaning} | "
            f"{', '.join(_marked(FUNCTIONS[kind]) for kind in argument.calls)} | {argument.help} |"
            for name, argument in TENSORS.items()]
    return "\n".join(["| tensor | shape, type | calls | meaning |", "|---|---|---|---|", *rows]) + "\n"

