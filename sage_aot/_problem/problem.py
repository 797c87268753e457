"""The work of one call, apart from its tensors: :class:`Problem`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from sage_aot._problem.options import Options
from sage_aot._problem.tensors import LISTED

DTYPES = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32"}

Part = Literal["all", "kv", "q", "train"]
"""Part of attention that a call computes: all; the quantized k and v alone; the attention of q to k and v quantized
before; or all, of which the call keeps the quantized tensors for a backward pass."""


@dataclass(frozen=True)
class Problem:
    """The work of one call, apart from the tensors themselves."""

    batch: int  # batch entries, or sequences
    num_q_heads: int
    num_kv_heads: int
    seqlen_q: int  # of sequences the most
    seqlen_kv: int  # likewise
    headdim: int  # of the tensors; kernels pad it to one of theirs
    dtype: str  # "f16", "bf16" or "f32", of q, k, v and the output
    softmax_scale: float
    options: Options  # resolved: "auto" is left only where the chosen kernels decide
    optional: tuple[str, ...] = ()  # names of the table TENSORS: the optional tensors of the call, or of quantize_kv
    tokens: tuple[int, int] | None = None  # of q, and of k and v: rows of all sequences; None: batch entries
    part: Part = "all"
    masks: tuple[int, int] = (1, 1)  # of a call whose KV tiles are listed: batch entries and q heads of different masks

    @property
    def runs(self) -> int:
        """Runs of tiles for each head: one of each batch entry, or one of all sequences."""
        return 1 if self.tokens else self.batch

    @property
    def q_rows(self) -> int:
        """Rows of q in a batch entry; of sequences all tokens."""
        return self.tokens[0] if self.tokens else self.seqlen_q

    @property
    def kv_rows(self) -> int:
        return self.tokens[1] if self.tokens else self.seqlen_kv

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """The shape of the log-sum-exp: [batch, q heads, queries], or [q heads, tokens]."""
        heads_and_rows = self.num_q_heads, self.q_rows
        return heads_and_rows if self.tokens else (self.batch, *heads_and_rows)

    @property
    def has_key_mask(self) -> bool:
        return "key_mask" in self.optional

    @property
    def is_listed(self) -> bool:
        """True where lists say which KV tiles are seen."""
        return any(name in self.optional for name in LISTED)

    @property
    def packs_keys(self) -> bool:
        """True where the call leaves the keys out that its key mask hides, before it quantizes."""
        return self.has_key_mask and not self.is_listed

    @property
    def is_packed(self) -> bool:
        """True where batch entries differ in length: sequences packed into one tensor, or keys that a mask leaves."""
        return self.tokens is not None or self.packs_keys

    @property
    def is_empty(self) -> bool:
        """True where there are no queries, or no keys for them to see."""
        return any(is_known(size == 0) for size in (self.batch, self.num_q_heads, self.num_kv_heads, self.q_rows,
                                                    self.kv_rows, self.seqlen_q, self.seqlen_kv))


# --- sizes, which a tracer may not know -------------------------------------------------------------------------------


def is_known(condition: Any) -> bool:
    """True where a condition on sizes holds; a tracer puts a guard on it. False where a tracer cannot know it, because
    the sizes depend on values of tensors: the check is then that of the operator when it runs. Not for code that dynamo
    traces, to which a condition is a bool."""
    if type(condition) is bool:
        return condition
    from torch.fx.experimental import symbolic_shapes  # takes a quarter of a second, and tracers have it already

    before_2_7 = "definitely_true"
    ask = getattr(symbolic_shapes, "guard_or_false", None) or getattr(symbolic_shapes, before_2_7)
    known: bool = ask(condition)
    return known


def is_static(condition: Any) -> bool:
    """True where a condition on sizes holds, to a tracer for all sizes that its graph is for: it puts no guard."""
    if type(condition) is bool and not torch.compiler.is_dynamo_compiling():
        return condition
    if isinstance(condition, torch.Tensor):  # sizes are tensors within torch.jit.trace, whose graph is for these sizes
        return bool(condition)
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)


def holds(condition: Any) -> bool:
    """True where :func:`is_known`, for code that dynamo traces, and torch.jit.trace."""
    if not torch.compiler.is_dynamo_compiling():
        return bool(condition) if isinstance(condition, torch.Tensor) else is_known(condition)
    from torch.fx.experimental import symbolic_shapes

    if not hasattr(symbolic_shapes, "guard_or_false"):  # dynamo before torch 2.7 has guards alone
        return bool(condition)
    return symbolic_shapes.guard_or_false(condition)


def differ(one: Sequence[int], other: Sequence[int]) -> bool:
    """True where two shapes are known to differ."""
    return len(one) != len(other) or any(is_known(a != b) for a, b in zip(one, other))


def heads_first(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """View a tensor as [batch, heads, seq, headdim], in the same memory."""
    return tensor if layout == "HND" else tensor.transpose(1, 2)
