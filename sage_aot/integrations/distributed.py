"""Attention of one step of a ring, for libraries that share the tokens of a sequence among processes.

    yunchang    LongContextAttention(ring_impl_type="basic", attn_type=None, attn_processor=ring_forward)
    torch       _templated_ring_attention(group, 2, ring_op, q, k, v, is_causal=True)

A step is served also where sage_aot is slower: the steps are merged by their log-sum-exps, and a ring has one
implementation for all. What sage_aot does not compute raises UnsupportedError. diffusers has context parallelism of its
own (:mod:`sage_aot.integrations.diffusers`).

A sparse ring chooses its blocks once for all of its steps: :func:`ring_blocks`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from sage_aot._call.masks import BlockMask
from sage_aot._call.pooling import PooledBlocks, pool_blocks, pooled_of
from sage_aot._call.selection import Amounts, amounts_of, choose_among, ends_of, is_finite
from sage_aot._call.sparse import Sparse
from sage_aot._problem.arguments import block_sizes_of
from sage_aot._problem.problem import heads_first
from sage_aot._problem.selection import Choice
from sage_aot._problem.tensors import MASK_BLOCK
from sage_aot.errors import ArgumentError, UnsupportedError
from sage_aot.integrations._report import refused
from sage_aot.integrations._rules import NO_WINDOW, HostCall, check_neutral, window_of
from sage_aot.integrations._serve import serve_with_lse

_OTHERWISE = "choose the library's own attention for the ring"


def ring_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float = 0.0,
                 softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
                 softcap: float = 0.0, alibi_slopes: torch.Tensor | None = None,
                 return_softmax: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """A forward with the arguments of FlashAttention, as yunchang calls it.

    Args:
        q, k, v: ``[batch, seq, heads, headdim]``; k and v may have fewer heads.
        dropout_p, window_size, softcap, alibi_slopes, return_softmax: their defaults, which change nothing. A window
            counts from places in the whole sequence, which a step of a ring is not told.
        softmax_scale: None means ``1 / sqrt(headdim)``.
        causal: aligned bottom-right.

    Returns:
        The output, like q, and the log-sum-exp, float32, natural log, ``[batch, heads, seq]``.

    Raises:
        UnsupportedError: another value of an argument that has to be its default, or tensors that sage_aot does not
            take.
    """
    check_neutral({"softcap": softcap, "alibi_slopes": alibi_slopes, "return_softmax": return_softmax}, _OTHERWISE)
    if window_of(window_size) is not None:
        raise refused("the argument window_size", f"window_size: expected {NO_WINDOW}, got {window_size!r}, which "
                                                  f"counts from places in the whole sequence; {_OTHERWISE}")
    call = HostCall(q, k, v, None, causal, softmax_scale, dropout_p, "NHD", grouped=True, bottom_right=True)
    return serve_with_lse(call, _OTHERWISE)


def ring_op(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, is_causal: bool = False,
            dropout_p: float = 0.0, scale: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The `op` of torch's ring template.

    Args:
        query, key, value: ``[batch, heads, seq, headdim]``; key and value may have fewer heads.
        is_causal: aligned top-left.
        dropout_p: 0.
        scale: None means ``1 / sqrt(headdim)``.

    Returns:
        The output, like query, and the log-sum-exp, float32, natural log, ``[batch, heads, seq]``.

    Raises:
        UnsupportedError: tensors that sage_aot does not take.
    """
    call = HostCall(query, key, value, None, is_causal, scale, dropout_p, grouped=True)
    return serve_with_lse(call, _OTHERWISE)


# --- sparse rings -----------------------------------------------------------------------------------------------------


def ring_blocks(q: torch.Tensor, k: torch.Tensor, sparse: Sparse, group: Any = None, *,
                lengths: Sequence[int] | None = None, scale: float | None = None,
                layout: str = "HND") -> list[BlockMask]:
    """Choose the blocks of keys that this process's queries see, among those of all processes of a ring.

    The means of the keys' blocks, which are small, go to all processes, and each chooses whole rows of the mask. The
    ring then merges its steps exactly: a query that sees no key of a share gives zeros, and minus infinity as its
    log-sum-exp. Blocks do not cross from one share to the next: the last of each share may have fewer keys.

        shares = ring_blocks(q, k, sparse, group)                                   # before the first step
        out, lse = sage_aot.attn(q, k, v, block_mask=shares[rank], return_lse=True)     # a step, of that rank's k and v

    Args:
        q, k: this process's share of the tokens, as :func:`sage_aot.attn` takes them; the ranks of the group have the
            shares in their order. Every process of the group must call this.
        sparse: without `tail` and `least_alike`, and with as many queries in a block as keys. The blocks of a query's
            own place are always seen, so that the first step of a ring gives each query a log-sum-exp. To `mass` the
            last block of a share weighs as much as one that is full.
        group: of torch.distributed; None: all processes.
        lengths: the tokens of each rank's share; None: all have as many as this one.
        scale, layout: as :func:`sage_aot.attn`.

    Returns:
        For each rank the mask of this process's queries and that rank's keys.

    Raises:
        ArgumentError: `lengths` are not those of q and k, or another argument is not as described.
        UnsupportedError: `sparse` is not as described.
    """
    if not isinstance(sparse, Sparse):
        raise ArgumentError(f"sparse: expected a sage_aot.Sparse, got {type(sparse).__name__}; pass "
                            f"sage_aot.Sparse(keep=...)")
    if not (lengths is None or isinstance(lengths, Sequence)):
        raise ArgumentError(f"lengths: expected None or the tokens of each rank, got {lengths!r}; pass a list of "
                            f"integers")
    if scale is not None and not is_finite(scale):
        raise ArgumentError(f"scale: expected None or a finite number, got {scale!r}")
    block_q, block_k = block_sizes_of(sparse.block_size)
    if sparse.tail or sparse.least_alike > 0 or block_q != block_k:
        raise UnsupportedError(f"sparse: expected no tail, no least_alike, and as many queries as keys in a block of a "
                               f"ring, got {sparse}; change these, or use Ulysses")
    of_q, of_k = (pooled_of(name, x, block_k, False, True, layout) for name, x in (("q", q), ("k", k)))
    lengths = [of_k.shape[2]] * dist.get_world_size(group) if lengths is None else list(lengths)
    own = lengths[dist.get_rank(group)] if len(lengths) == dist.get_world_size(group) else None
    if own is None or {own, of_q.shape[2]} != {of_k.shape[2]}:
        raise ArgumentError(f"lengths: expected the tokens of each of {dist.get_world_size(group)} ranks, this one's "
                            f"as many as its queries and keys, {of_q.shape[2]} and {of_k.shape[2]}, got {lengths}")
    counts = [-(-length // block_k) for length in lengths]
    whole_q, whole_k = _queries_in_place(of_q, counts, group), _all_keys(of_k, counts, group)
    chosen = choose_among(whole_q, whole_k, *_choice_of(sparse, lengths, block_k, heads_first(q, layout), scale)).blocks
    per_rank = [count * (block_k // MASK_BLOCK) for count in counts]
    own_rows = torch.split(chosen, per_rank, 2)[dist.get_rank(group)]
    return [BlockMask((block_q, block_k), share, None) for share in torch.split(own_rows, per_rank, 3)]


def _queries_in_place(own: PooledBlocks, counts: list[int], group: Any) -> PooledBlocks:
    """The means of this rank's queries at their places in the sequence, among zeros."""
    means, rank = _means_of(own), dist.get_rank(group)
    begin = sum(counts[:rank])
    return _with_means(F.pad(means, (0, 0, begin, sum(counts) - begin - counts[rank])), own)


def _all_keys(own: PooledBlocks, counts: list[int], group: Any) -> PooledBlocks:
    """The means of the keys of all ranks, less that of all, as a k is centred: the choice does not change."""
    means = _means_of(own)
    padded = F.pad(means, (0, 0, 0, max(counts) - means.shape[2])).contiguous()
    received = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(received, padded, group=group)
    whole = torch.cat([share[:, :, :count] for share, count in zip(received, counts)], 2)
    return _with_means(whole - whole.mean(2, keepdim=True), own)


def _means_of(pooled: PooledBlocks) -> torch.Tensor:
    assert pooled.means is not None
    return pooled.means


def _with_means(means: torch.Tensor, like: PooledBlocks) -> PooledBlocks:
    """Blocks with these means, [batch, heads, blocks, headdim]: what is pooled of a tensor with a head for each block,
    whose rows are all its mean, lies in memory as if the blocks were those of fewer heads."""
    batch, heads, blocks, headdim = means.shape
    pooled = pool_blocks(means.flatten(1, 2)[:, :, None].expand(-1, -1, MASK_BLOCK, -1), MASK_BLOCK)
    return PooledBlocks((batch, heads, blocks * like.block_rows, headdim), like.block_rows, like.dtype, None,
                        pooled._data)


def _choice_of(sparse: Sparse, lengths: Sequence[int], block: int, q: torch.Tensor,
               scale: float | None) -> tuple[Choice, Amounts]:
    """Parameters that the blocks are chosen by, where each share is filled up to whole blocks; and the amounts."""
    amounts = amounts_of(q, sparse.keep, sparse.mass, sparse.tau)
    whole = sum(-(-length // block) * block for length in lengths)
    ends = {}
    for name in ("dense_keys", "dense_queries"):
        first, last = ends_of(name, getattr(sparse, name))
        ends[name] = _place(first, lengths, block), whole - _place(sum(lengths) - last, lengths, block)
    return Choice(amounts.by, amounts.one, False, q.shape[3] ** -0.5 if scale is None else scale, sparse.first,
                  max(sparse.near, 1), 0.0, ends["dense_keys"], ends["dense_queries"]), amounts


def _place(token: int, lengths: Sequence[int], block: int) -> int:
    """The place of a token of the sequence, where each share is filled up to whole blocks."""
    place = 0
    for length in lengths:
        if token < length:
            break
        place, token = place + -(-length // block) * block, token - length
    return place + token
