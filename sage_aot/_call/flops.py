"""Formulas of the operators for torch.utils.flop_counter: their products of matrices, as of torch's own attention.

A multiplication with its addition counts as two. As torch does, every pair of a query and a key counts, whatever a
causal mask or a key mask leaves. Quantization has no such products and counts nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from sage_aot._call.ops import OPERATORS
from sage_aot._problem.problem import heads_first

FORWARD, BACKWARD, OF_Q, OF_KV = 2, 2, 1, 2
"""Products: Q·Kᵀ and P·V; the backward pass computes Q·Kᵀ again and dO·Vᵀ, then dS·K where the gradient of q is asked
for, and Pᵀ·dO and dSᵀ·Q where those of k and v are."""

Arguments = Mapping[str, Any]
"""The arguments of an operator by name."""


def register_formulas() -> None:
    """Tell torch.utils.flop_counter, which is imported by now."""
    from torch.utils.flop_counter import register_flop_formula

    forms = "", "_lse", "_out", "_lse_out"
    formulas: dict[str, Callable[[Arguments], int]] = {
        "train_attn": _of_attention, "train_attn_backward": _of_backward, "train_attn_varlen": _of_sequences,
        "train_attn_varlen_backward": _of_backward_of_sequences,
        **dict.fromkeys(("quantize_kv", "pool_blocks", "choose_blocks"), lambda given: 0)}
    of_forms = {"attn": _of_attention, "attn_kv": _of_stored, "attn_varlen": _of_sequences}
    formulas |= {f"{name}{form}": formula for name, formula in of_forms.items() for form in forms}
    for name, formula in formulas.items():
        operator = getattr(OPERATORS, name)
        register_flop_formula(operator, get_raw=True)(_by_name(operator, formula))


def _by_name(operator: Any, formula: Callable[[Arguments], int]) -> Callable[..., int]:
    """The formula as torch calls it: with the arguments as the operator got them, and its output."""
    arguments = operator.default._schema.arguments

    def count(*args: Any, out_val: Any = None, **options: Any) -> int:
        names = (argument.name for argument in arguments)
        return formula({"layout": "HND", **dict(zip(names, args)), **options})

    return count


def _of_attention(given: Arguments) -> int:
    return _of_dense(given["q"], _rows(given["k"], given["layout"]), given["layout"], FORWARD)


def _of_stored(given: Arguments) -> int:
    _, _, keys, _ = given["shape"]
    return _of_dense(given["q"], keys, given["layout"], FORWARD)


def _of_backward(given: Arguments) -> int:
    return _of_dense(given["grad_out"], _rows(given["v"], given["layout"]), given["layout"], _products(given))


def _products(given: Arguments) -> int:
    """Products of a backward pass."""
    of_q, of_kv = bool(given.get("of_q", True)), bool(given.get("of_kv", True))
    return BACKWARD * (of_q or of_kv) + OF_Q * of_q + OF_KV * of_kv


def _of_dense(q: torch.Tensor, keys: int, layout: str, products: int) -> int:
    batch, heads, queries, headdim = heads_first(q, layout).shape
    return products * 2 * batch * heads * queries * keys * headdim


def _of_sequences(given: Arguments) -> int:
    return _of_packed(given, given["q"], FORWARD)


def _of_backward_of_sequences(given: Arguments) -> int:
    return _of_packed(given, given["grad_out"], _products(given))


def _of_packed(given: Arguments, q: torch.Tensor, products: int) -> int:
    _, heads, headdim = q.shape
    lengths = zip(_lengths(given["cu_seqlens_q"], given["max_seqlen_q"]),
                  _lengths(given["cu_seqlens_k"], given["max_seqlen_k"]))
    return products * 2 * heads * headdim * sum(queries * keys for queries, keys in lengths)


def _rows(tensor: torch.Tensor, layout: str) -> int:
    return heads_first(tensor, layout).shape[2]


def _lengths(cu_seqlens: torch.Tensor, longest: int) -> list[int]:
    """The lengths of the sequences as far as the call sees them; where their tensor has no values, the longest of all,
    as torch counts."""
    if type(cu_seqlens) is not torch.Tensor or cu_seqlens.is_meta:
        return [longest] * (cu_seqlens.shape[0] - 1)
    return [min(length, longest) for length in cu_seqlens.diff().tolist()]
