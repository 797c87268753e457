"""The call."""

from __future__ import annotations

from typing import Literal, overload

import torch

from sage_aot._call import ops
from sage_aot._problem.check import check_device, check_out, check_return_lse, check_tensors_are
from sage_aot._problem.options import for_schema, for_tracer


@overload
def attn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool = ..., scale: float | None = ...,
         layout: str = ..., qk: str = ..., smooth_q: bool | str = ..., smooth_k: bool = ..., smooth_v: bool = ...,
         rotate: bool | str = ..., clip: bool = ..., pv_accum: str = ..., return_lse: Literal[False] = ...,
         out: torch.Tensor | None = ...) -> torch.Tensor: ...


@overload
def attn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool = ..., scale: float | None = ...,
         layout: str = ..., qk: str = ..., smooth_q: bool | str = ..., smooth_k: bool = ..., smooth_v: bool = ...,
         rotate: bool | str = ..., clip: bool = ..., pv_accum: str = ..., return_lse: Literal[True],
         out: torch.Tensor | None = ...) -> tuple[torch.Tensor, torch.Tensor]: ...


def attn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool = False, scale: float | None = None,
         layout: str = "HND", qk: str = "auto", smooth_q: bool | str = "auto", smooth_k: bool = True,
         smooth_v: bool = False, rotate: bool | str = "auto", clip: bool = True, pv_accum: str = "auto",
         return_lse: bool = False, out: torch.Tensor | None = None) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention with 8- or 4-bit Q and K and FP8 or f16 P and V: softmax(q·kᵀ·scale)·v, inference only.

    CUDA tensors run precompiled kernels on torch's current stream; nothing synchronizes and no input changes. CPU
    tensors run the same arithmetic in torch, that of the sm89 kernels, or of those that the environment variable
    SAGE_AOT_EMULATE names. A registered operator, ``torch.ops.sage_aot.attn`` from the first use of this function on:
    torch.compile, CUDA graphs and autocast take it.

    Args:
        q: ``[batch, q heads, queries, headdim]`` for layout ``"HND"``, ``[batch, queries, q heads, headdim]`` for
            ``"NHD"``; float16 or bfloat16. Any strides with a contiguous last dimension; headdim from 1 to 128.
        k, v: likewise with ``kv heads`` and ``keys``; same dtype and device as q. q heads must be a multiple of kv
            heads: q head h reads kv head ``h // (q heads // kv heads)``.
        is_causal: query i sees the keys ``j <= i + keys - queries``: aligned bottom-right, as FlashAttention does.
            (torch's SDPA aligns top-left, which differs when keys and queries are not equally many.)
        scale: factor on q·kᵀ before the softmax; None means ``1 / sqrt(headdim)``.
        layout: ``"HND"`` or ``"NHD"``, of q, k, v and the output.
        qk: type of the quantized q and k: ``"int8"``, ``"int4"`` (before sm90 only, and visibly worse for some models),
            or ``"auto"``, which is int8.
        smooth_q: subtract the mean of each tile of q before quantizing, and add what that takes off the scores;
            ``"auto"`` does so for int4. Takes a workspace of 4 bytes per 128 queries, key and head, 256 MB at a time
            or one head's.
        smooth_k: subtract the mean of k over a sample of 64 keys before quantizing. The exact result does not change by
            it, the error of the quantized one falls with every channel of k that has an offset. Off only to see that.
        smooth_v: subtract the mean of v over a sample of 64 keys before quantizing and add it to the output; pays with
            FP8 P·V where channels of v have offsets. (f16 V holds a biased bf16 v as it is: there it gains nothing.)
        rotate: multiply q and k by the Hadamard matrix before quantizing; the exact result does not change. A channel
            of q or k with values much larger than the others' (not by an offset, which smoothing takes off) then no
            longer sets the scale of its row. ``"auto"`` does so for int4; for int8 quantization takes 1.5 to 1.8 times
            as long.
        clip: at 4 bits, let the largest values of a row of q, or of 16 keys, be cut off where smaller steps for all
            others lower the squared error; each group takes the best of six steps. Nothing is clipped at 8 bits.
        pv_accum: how P·V adds up over the keys. ``"auto"``: as the GPU's kernels do it best, ``"f32"`` where P and V
            are f16, ``"two_level_f32"`` where they are FP8 (each tile of keys in accumulators of its own, then in f32).
            ``"two_level_f16"`` (sm89): accumulators of the first level in f16, of twice the rate on GeForce cards, P
            and V in narrower ranges for it.
        return_lse: also return the log-sum-exp of each row of q·kᵀ·scale.
        out: tensor like q to write the output to; None makes one.

    Returns:
        The output, like q in shape and dtype; with `return_lse` a pair of it and the log-sum-exp, float32 natural log,
        ``[batch, q heads, queries]`` in both layouts. A query that sees no key gives zeros and −inf. NaN or infinity in
        a query or in a key gives NaN in the rows that see it, in v in its channel of them, and nowhere else.

    Raises:
        ArgumentError: an argument is not as described; the message says what came.
        UnsupportedError: no kernel for this GPU, its driver or these options (:func:`sage_aot.explain` tells why), or
            neither cupy nor cuda-bindings to load one with.
        CubinError: a kernel's file is missing or damaged.
        LaunchError: the driver refused a kernel.

    Warns:
        PtxWarning: once, where the GPU is newer than the kernels and its driver compiles PTX for it;
            SAGE_AOT_PTX_WARNING=0 in the environment silences that.

    Source: SageAttention2 (arXiv:2411.10958), Algorithm 1.

    >>> import torch, sage_aot
    >>> q, k, v = torch.randn(3, 1, 2, 100, 64, dtype=torch.bfloat16)
    >>> sage_aot.attn(q, k, v, is_causal=True).shape
    torch.Size([1, 2, 100, 64])
    """
    # What must hold for the arguments to fit the operators' schemas; the operators check the tensors.
    if not (isinstance(q, torch.Tensor) and isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor)):
        check_tensors_are(q=q, k=k, v=v)  # raises
    if not (q.is_cuda or q.is_cpu):
        check_device(q)  # raises
    flatten = for_tracer if torch.compiler.is_dynamo_compiling() else for_schema
    options = flatten(is_causal, scale, layout, qk, smooth_q, smooth_k, smooth_v, rotate, clip, pv_accum)
    if not isinstance(return_lse, bool):
        check_return_lse(return_lse)  # raises
    if out is None:
        made: torch.Tensor | tuple[torch.Tensor, torch.Tensor] = (ops.attn_lse if return_lse else ops.attn)(
            q, k, v, *options)
        return made
    if not isinstance(out, torch.Tensor):
        check_out(out, q)  # raises
    if return_lse:
        return out, ops.attn_lse_out(q, k, v, out, *options)
    ops.attn_out(q, k, v, out, *options)
    return out
