"""The call."""

from __future__ import annotations

import os
from functools import lru_cache

import torch

from sage_aot import _cuda, _emulate
from sage_aot._loader import Library, default_library
from sage_aot._manifest import Manifest
from sage_aot._plan import Plan, plan
from sage_aot._problem import Problem, check, check_out, heads_first
from sage_aot._select import built_archs, select
from sage_aot._spec import capability_of
from sage_aot.errors import ArgumentError, UnsupportedError


def attn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool = False, scale: float | None = None,
         layout: str = "HND", qk_bits: int | str = "auto", smooth_k: bool = True, return_lse: bool = False,
         out: torch.Tensor | None = None) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention with 8-bit Q and K and FP8 or f16 P and V: softmax(q·kᵀ·scale)·v, inference only.

    CUDA tensors run precompiled kernels on torch's current stream; nothing synchronizes and no input changes. CPU
    tensors run the same arithmetic in torch (see :func:`emulated_arch`).

    Args:
        q: ``[batch, q heads, queries, headdim]`` for layout ``"HND"``, ``[batch, queries, q heads, headdim]`` for
            ``"NHD"``; float16 or bfloat16. Any strides with a contiguous last dimension; headdim from 1 to 128.
        k, v: likewise with ``kv heads`` and ``keys``; same dtype and device as q. q heads must be a multiple of kv
            heads: q head h reads kv head ``h // (q heads // kv heads)``.
        is_causal: query i sees the keys ``j <= i + keys - queries``: aligned bottom-right, as FlashAttention does.
            (torch's SDPA aligns top-left, which differs when keys and queries are not equally many.)
        scale: factor on q·kᵀ before the softmax; None means ``1 / sqrt(headdim)``.
        layout: ``"HND"`` or ``"NHD"``, of q, k, v and the output.
        qk_bits: bits of the quantized q and k: 8, 4, or ``"auto"``, which is 8.
        smooth_k: subtract the mean of k over the sequence before quantizing. The exact result does not change by it,
            the error of the quantized one falls with every channel of k that has an offset. Off only to see that.
        return_lse: also return the log-sum-exp of each row of q·kᵀ·scale.
        out: tensor like q to write the output to; None makes one.

    Returns:
        The output, like q in shape and dtype; with `return_lse` a pair of it and the log-sum-exp, float32 natural log,
        ``[batch, q heads, queries]`` in both layouts. A query that sees no key gives zeros and −inf.

    Raises:
        ArgumentError: an argument is not as described; the message says what came.
        UnsupportedError: no kernel for this GPU or these options, or cupy is missing.
        CubinError: a kernel's file is missing or damaged.
        LaunchError: the driver refused a kernel.

    Source: SageAttention2 (arXiv:2411.10958), Algorithm 1.

    >>> import torch, sage_aot
    >>> q, k, v = torch.randn(3, 1, 2, 100, 64, dtype=torch.bfloat16)
    >>> sage_aot.attn(q, k, v, is_causal=True).shape
    torch.Size([1, 2, 100, 64])
    """
    problem = check(q, k, v, is_causal=is_causal, scale=scale, layout=layout, smooth_k=smooth_k)
    if not isinstance(return_lse, bool):
        raise ArgumentError(f"return_lse: expected True or False, got {return_lse!r}")
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    else:
        check_out(out, q)
    lse = None
    if return_lse:
        lse = torch.empty(problem.batch, problem.num_q_heads, problem.seqlen_q, dtype=torch.float32, device=q.device)
    _run(problem, qk_bits, *(heads_first(tensor, layout) for tensor in (q, k, v, out)), lse)
    return out if lse is None else (out, lse)


def emulated_arch(manifest: Manifest) -> str:
    """The arch whose kernels CPU tensors emulate: ``SAGE_AOT_EMULATE`` where set, else sm89, else the newest built."""
    archs = built_archs(manifest)
    asked = os.environ.get("SAGE_AOT_EMULATE")
    if asked is not None and asked not in archs:
        raise UnsupportedError(f"SAGE_AOT_EMULATE: expected one of the archs that are built, {', '.join(archs)}; got "
                               f"{asked!r}")
    return asked or ("sm89" if "sm89" in archs else archs[-1])


def _run(problem: Problem, qk_bits: int | str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
         lse: torch.Tensor | None) -> None:
    library = default_library()
    if q.device.type == "cuda":
        capability = _cuda.capability(q.device.index)
    elif q.device.type == "cpu":
        capability = capability_of(emulated_arch(library.manifest))
    else:
        raise ArgumentError(f"q, k and v must be CUDA or CPU tensors, got device {q.device}")
    prepared = _prepare(library, capability, problem, qk_bits)
    if q.numel() == 0 or k.numel() == 0:
        _nothing_to_see(out, lse)
    elif q.device.type == "cuda":
        _cuda.attention(prepared, library, q, k, v, out, lse)
    else:
        _emulate.attention(problem, prepared.kernels, q, k, v, out, lse)


@lru_cache(maxsize=1024)
def _prepare(library: Library, capability: tuple[int, int], problem: Problem, qk_bits: int | str) -> Plan:
    """Kernels and sizes of a problem; a model asks for the same few again and again."""
    return plan(problem, select(capability, problem, qk_bits, library.manifest))


def _nothing_to_see(out: torch.Tensor, lse: torch.Tensor | None) -> None:
    """No queries, or none that sees a key."""
    out.zero_()
    if lse is not None:
        lse.fill_(float("-inf"))
