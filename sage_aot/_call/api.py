"""The public calls: :func:`attn`, and :func:`supports`, which says whether attn would take a call."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch

from sage_aot._call.forms import (
    attend,
    call_of_attn,
    call_of_attn_varlen,
    given_to,
    options_of,
    with_shown_keys,
)
from sage_aot._call.kv import QuantizedKV
from sage_aot._call.masks import BlockMask
from sage_aot._call.refusal import refusal
from sage_aot._call.sparse import Sparse, attend_sparse, no_choice_of_sequences, with_stand_in
from sage_aot._problem.options import Asked
from sage_aot.errors import SageAotError


@overload
def attn(q: torch.Tensor, k: torch.Tensor | QuantizedKV, v: torch.Tensor | None = ..., *,
         key_mask: torch.Tensor | None = ..., sinks: torch.Tensor | None = ..., attn_mask: torch.Tensor | None = ...,
         block_mask: BlockMask | None = ..., sparse: Sparse | None = ..., is_causal: bool = ...,
         scale: float | None = ..., layout: str = ..., qk: str = ..., smooth_q: bool | str = ...,
         smooth_k: bool = ..., smooth_v: bool = ...,
         rotate: bool | str = ..., clip: bool = ..., pv_accum: str = ..., p: str = ...,
         window: tuple[int, int] | None = ..., return_lse: Literal[False] = ...,
         out: torch.Tensor | None = ...) -> torch.Tensor: ...


@overload
def attn(q: torch.Tensor, k: torch.Tensor | QuantizedKV, v: torch.Tensor | None = ..., *,
         key_mask: torch.Tensor | None = ..., sinks: torch.Tensor | None = ..., attn_mask: torch.Tensor | None = ...,
         block_mask: BlockMask | None = ..., sparse: Sparse | None = ..., is_causal: bool = ...,
         scale: float | None = ..., layout: str = ..., qk: str = ..., smooth_q: bool | str = ...,
         smooth_k: bool = ..., smooth_v: bool = ...,
         rotate: bool | str = ..., clip: bool = ..., pv_accum: str = ..., p: str = ...,
         window: tuple[int, int] | None = ..., return_lse: Literal[True],
         out: torch.Tensor | None = ...) -> tuple[torch.Tensor, torch.Tensor]: ...


def attn(q: torch.Tensor, k: torch.Tensor | QuantizedKV, v: torch.Tensor | None = None, *,
         key_mask: torch.Tensor | None = None, sinks: torch.Tensor | None = None, attn_mask: torch.Tensor | None = None,
         block_mask: BlockMask | None = None, sparse: Sparse | None = None, is_causal: bool = False,
         scale: float | None = None, layout: str = "HND", qk: str = "auto", smooth_q: bool | str = "auto",
         smooth_k: bool = True, smooth_v: bool = False,
         rotate: bool | str = "auto", clip: bool = True, pv_accum: str = "auto", p: str = "auto",
         window: tuple[int, int] | None = None, return_lse: bool = False,
         out: torch.Tensor | None = None) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention with 8- or 4-bit Q and K and FP8, f16 or NVFP4 P and V: softmax(q·kᵀ·scale)·v, inference only.

    CUDA tensors run precompiled kernels on torch's current stream; nothing synchronizes and no input changes. CPU
    tensors run an emulation in torch: the arithmetic of the sm89 kernels, or of the arch that the environment variable
    SAGE_AOT_EMULATE names. Meta tensors give meta tensors. The operator ``torch.ops.sage_aot.attn``, which ``import
    sage_aot`` registers, is taken by torch.compile, CUDA graphs, autocast, torch.vmap and FlopCounterMode.
    Decoding one query? Pass ``is_causal=False``: the result is the same, and k and v are read once a kv head, not once
    a q head (where q is not smoothed).

    Where the queries of a call are too few to fill the GPU, several blocks share the keys of a query. The shapes
    and the GPU's number of SMs decide how many blocks. Their number changes the last bits of the result. Equal calls on
    one GPU give equal bits. With `attn_mask` or `block_mask` one block has them all.

    Args:
        q: ``[batch, q heads, queries, headdim]`` for layout ``"HND"``, ``[batch, queries, q heads, headdim]`` for
            ``"NHD"``; float16, bfloat16 or float32. Any strides with a contiguous last dimension; headdim from 1 to
            256.
        k, v: likewise with ``kv heads`` and ``keys``; same dtype and device as q. q heads must be a multiple of kv
            heads: q head h reads kv head ``h // (q heads // kv heads)``. k may be a
            :class:`sage_aot.QuantizedKV`, whose options hold: then leave out v and key_mask, and pass only `sinks`,
            `attn_mask`, `block_mask`, `is_causal`, `window`, `scale` and `layout` (of q and the output).
        key_mask: bool ``[batch, keys]``, True where a key may be seen, for all queries and heads alike; any strides.
            None: every key may be seen. The call drops all other keys before it quantizes, so that a mask saves their
            work, and nothing depends on what they hold. The output is that of a call on the keys that are left. With
            `sparse`, a `block_mask`, or an `attn_mask` that differs by query or head, it drops none. It then copies k
            and v, and gives each hidden key the values of the last visible key before it, or of the first visible key.
        sinks: float32 ``[q heads]``: a logit that joins the softmax of each row of its q head, without a value, so that
            the weights of the keys sum to less than one. The log-sum-exp has it too. A row that sees no key gives
            zeros, and the sink as its log-sum-exp. None: no sinks.
        attn_mask: bool, any shape that broadcasts to ``[batch, q heads, queries, keys]``: True where the query sees the
            key, as in torch's SDPA. A query sees what all masks leave. KV tiles of which a tile of queries sees nothing
            are not read. One that is alike for all queries and heads is a `key_mask`. A key that any other one hides
            from every query still affects means and scales. A float mask (a bias on scores) is refused.
        block_mask: of :func:`sage_aot.block_mask`: which blocks of keys a block of queries sees, likewise.
        sparse: a :class:`sage_aot.Sparse`: the call chooses such blocks itself, by the means of blocks of q and k.
            None: every block that the masks leave is computed.
        is_causal: query i sees the keys ``j <= i + keys - queries``: the mask is aligned bottom-right, as in
            FlashAttention. (torch's SDPA aligns top-left, which differs where keys and queries are not equally many.)
            With `key_mask`, keys and queries count as they came, and a query sees what both masks leave.
        scale: factor on q·kᵀ before the softmax; None means ``1 / sqrt(headdim)``. Numbers and flags may be scalars of
            NumPy, or arrays or tensors without dimensions; one on a GPU makes the call wait for it. In compiled code a
            scale that is computed from sizes compiles anew for each value, as in torch's own attention: multiply q.
        layout: ``"HND"`` or ``"NHD"``, of q, k, v and the output.
        qk: type of the quantized q and k: ``"int8"``, ``"int4"`` (before sm90 only, and visibly worse for some models),
            ``"nvfp4"`` (sm120 and head dims up to 128 only, the type of p and v too: SageAttention3; four to
            seventeen times the error of the default), or ``"auto"``, which is int8.
        smooth_q: subtract the mean of each tile of q before quantizing, and add its product with k to the scores;
            ``"auto"`` does so for int4 and nvfp4. The workspace grows by 4 bytes per key, head and tile of q (64 to 256
            queries), up to 256 MiB, or one head's share where that is more.
        smooth_k: subtract the mean of k over a sample of 64 keys before quantizing. The exact result does not change;
            the quantization error falls where channels of k have offsets. For int8 without `rotate`, channels of k that
            are far larger than most are also divided by powers of two, and those of q multiplied, unless q has them,
            too: the error falls where k has such channels. Switch it off only to compare.
        smooth_v: subtract the mean of v over a sample of 64 keys before quantizing, and add it to the output. It pays
            with FP8 P·V where channels of v have offsets. With f16 P·V it gains nothing: f16 holds such a v as it is.
        rotate: multiply q and k by the Hadamard matrix before quantizing; the exact result does not change. A channel
            of q or k whose values are much larger than the others' then no longer sets the scale of its row. (Where a
            channel is large by an offset, smoothing takes the offset off.) ``"auto"`` does so for int4. For int8,
            quantization takes 1.5 to 1.8 times as long, and `smooth_k` alone does nearly as well where k has the
            channels.
        clip: int4 only: choose for each scale group (a row of q, 16 keys) the clip, of six, with the least squared
            error.
        pv_accum: how P·V adds up over the keys. ``"auto"``: the best of the GPU's kernels, ``"f32"`` where P and V are
            f16, and for FP8 on sm120 (block-scaled products, whose accumulators keep f32); ``"two_level_f32"`` for FP8
            elsewhere (each tile of keys in accumulators of its own, then in f32).
            ``"two_level_f16"`` (sm89): the first level's accumulators are f16, with which GeForce cards multiply at
            twice the rate; P and V are scaled to narrower ranges.
        p: how P follows from a score. ``"exp2"``: by an exponential. ``"linear"`` (FP8 P of INT8 scores; sm90 up to
            head dim 128, sm89, and sm120 with f32 sums, these two where neither q nor v is smoothed): by a line between
            the powers of two. A P is then off by at most 7.3 %, but for a factor that a row's P have in common; an
            exponential that is rounded to FP8 by at most 6.3 %. These kernels take exponentials too: in calls that
            return the log-sum-exp, and on sm90, where q is not smoothed, for tiles of queries whose scores may lie
            beyond ±65 in log2 units. ``"auto"``: ``"linear"`` where the GPU has such a kernel.
        window: ``(left, right)``: query i is at the key ``i + keys - queries``, and sees at most `left` keys in front
            of that key, that key, and at most `right` keys behind it; −1 is no bound. As in FlashAttention. With
            `is_causal`, `right` is 0. KV tiles that no query of a tile sees are not read. None: no window. There are no
            kernels of 4 bits with a window, `sinks`, `attn_mask` or `block_mask`.
        return_lse: also return the log-sum-exp of each row of q·kᵀ·scale.
        out: tensor to write the output to, of q's shape, dtype and device; None makes one.

    Returns:
        The output, like q in shape and dtype. With `return_lse`, a pair of the output and the log-sum-exp: float32,
        natural log, ``[batch, q heads, queries]`` in both layouts. A query that sees no key gives an output of zeros
        and a log-sum-exp of −inf. NaN or infinity in a query makes its row NaN. In a key it makes the rows NaN that see
        the key; in v, its channel of the rows that see its key. All other values stay as they are: finite inputs give
        finite outputs, and the error of a row does not grow with its own scores up to 1e30 (docs/math.md, "Softmax").
        Single values of v of more than some 1e19 times the others count as less (docs/accuracy.md, "One value far above
        all others").

    Raises:
        ArgumentError: an argument is not as described; the message says what came. Also where a derivative is asked
            for, by autograd, forward AD or torch.func. (The operator itself, as a program has it that torch.export
            saved, sees autograd alone: by forward AD and torch.func its derivatives are zeros.)
        UnsupportedError: no kernel fits this GPU, its driver and these options (:func:`sage_aot.explain` tells why), or
            neither cupy, cuda-bindings nor ctypes can load one.
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
    asked = Asked(is_causal, scale, layout, qk, smooth_q, smooth_k, smooth_v, rotate, clip, pv_accum, p, window)
    if sparse is not None:
        optional = {"key_mask": key_mask, "sinks": sinks, "attn_mask": attn_mask, "block_mask": block_mask}
        return attend_sparse(q, k, v, asked, sparse, optional, out, return_lse)
    call = call_of_attn(q, k, v, asked, key_mask=key_mask, sinks=sinks, attn_mask=attn_mask, block_mask=block_mask)
    if attn_mask is not None or block_mask is not None:
        call = with_shown_keys(call)
    return attend(call, out, return_lse)


def supports(q: torch.Tensor, k: torch.Tensor | QuantizedKV, v: torch.Tensor | None = None, *,
             key_mask: torch.Tensor | None = None, sinks: torch.Tensor | None = None,
             attn_mask: torch.Tensor | None = None, block_mask: BlockMask | None = None, sparse: Sparse | None = None,
             is_causal: bool = False, scale: float | None = None, layout: str = "HND", qk: str = "auto",
             smooth_q: bool | str = "auto",
             smooth_k: bool = True, smooth_v: bool = False, rotate: bool | str = "auto", clip: bool = True,
             pv_accum: str = "auto", p: str = "auto", window: tuple[int, int] | None = None, return_lse: bool = False,
             out: torch.Tensor | None = None, cu_seqlens_q: torch.Tensor | None = None,
             cu_seqlens_k: torch.Tensor | None = None, max_seqlen_q: int | None = None,
             max_seqlen_k: int | None = None) -> str | None:
    """The reason why :func:`sage_aot.attn` would refuse this call here, or None where it would take it; with
    `cu_seqlens_q` and the three arguments behind it, the same of :func:`sage_aot.attn_varlen`.

    The answer is that of the checks and of the choice of kernels. It launches nothing, loads no kernel, and reads no
    value of a tensor, so a damaged file or a refusal by the driver shows in the call alone. The answer for a kind of
    call (shapes, strides, dtypes, devices, options, autocast) is remembered: asked again, it takes a few microseconds.
    Ask outside of compiled code: inside, torch.compile breaks the graph at an answer that is not remembered yet (under
    ``fullgraph=True`` it raises), and compiles anew for each new shape.

    Args:
        q, k, v, key_mask, ...: as :func:`sage_aot.attn` takes them, of any type and value.
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k: likewise as :func:`sage_aot.attn_varlen`, which has no
            `layout` and no masks of keys, queries or blocks; all of them or none.

    Returns:
        None, or the message of the error that the call would raise. A sparse or nested tensor, or one that wraps others
        (a DTensor), which torch's dispatcher refuses before attn sees it, gets a message of its own.

    Raises:
        TypeError: a keyword that neither call has.

    Warns:
        PtxWarning: as :func:`sage_aot.attn`.

    >>> import torch, sage_aot
    >>> q, k, v = torch.randn(3, 1, 2, 100, 64)
    >>> sage_aot.supports(q, k.bfloat16(), v)
    'q, k and v must have one dtype, got torch.float32 for q and torch.bfloat16 for k; pass k.to(q.dtype)'
    >>> sage_aot.supports(q, k, v) is None
    True
    """
    asked = Asked(is_causal, scale, layout, qk, smooth_q, smooth_k, smooth_v, rotate, clip, pv_accum, p, window)
    optional: dict[str, Any] = {"key_mask": key_mask, "sinks": sinks, "attn_mask": attn_mask, "block_mask": block_mask}
    try:
        if all(value is None for value in (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)):
            if sparse is not None:
                optional = with_stand_in(q, k, asked, sparse, optional)
            call = call_of_attn(q, k, v, asked, **optional)
        elif sparse is not None:
            raise no_choice_of_sequences()
        else:
            call = call_of_attn_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, asked,
                                       **optional)
        _, (first, *_), asked = call
        return refusal(given_to(call), out, options_of(first, asked, out, return_lse))
    except SageAotError as error:
        return str(error)
