"""Choices of blocks of keys, computed apart from the product, and q, k and v of which every choice is clear."""

from __future__ import annotations

import math

import torch

BLOCK = 128


def clear(blocks=16, heads=2, headdim=64, layout="HND", last=BLOCK):
    """q, k and v of so many blocks, the last of which has `last` rows, and whose means have products that are 1/4 or
    more apart."""
    generator = torch.Generator().manual_seed(0)
    place = torch.arange(blocks)
    products = torch.stack([(5 * place[:, None] + 7 * place + 3 * head) % blocks for head in range(heads)]) / 4
    of_q = torch.nn.functional.pad(products, (0, headdim - blocks))
    of_k = torch.eye(blocks, headdim).expand(heads, -1, -1) * headdim ** 0.5
    made = []
    for means in (of_q, of_k):
        spread = torch.randn(heads, blocks, BLOCK, headdim, generator=generator) / 2
        spread[:, -1, last:] = 0
        spread -= spread.sum(2, keepdim=True) / torch.tensor([BLOCK] * (blocks - 1) + [last])[:, None, None]
        made.append((means[:, :, None] + spread).flatten(1, 2)[None, :, : (blocks - 1) * BLOCK + last])
    made.append(torch.randn(made[0].shape, generator=generator))
    return [x.transpose(1, 2).contiguous() if layout == "NHD" else x for x in made]


def chosen_by(sparse, q, k):
    """The mask [batch, heads, queries, keys] of q and k, [batch, heads, tokens, headdim], as many tokens: by a share,
    with blocks of one size."""
    assert sparse.keep is not None and sparse.block_size == BLOCK and not sparse.tail and q.shape == k.shape
    tokens = q.shape[2]
    of_q, of_k = (torch.stack([part.mean(2) for part in x.double().split(BLOCK, 2)], 2) for x in (q, k))
    scores = of_q @ of_k.transpose(2, 3)
    column, row = torch.arange(scores.shape[3]), torch.arange(scores.shape[2])[:, None]
    keys, queries = (ends if isinstance(ends, tuple) else (ends, 0) for ends in (sparse.dense_keys,
                                                                                 sparse.dense_queries))
    kept = (column < sparse.first) | ((row - column).abs() < sparse.near)
    kept = kept | (column * BLOCK < keys[0]) | (((column + 1) * BLOCK).clamp(max=tokens) > tokens - keys[1])
    kept = kept | (row * BLOCK < queries[0]) | (((row + 1) * BLOCK).clamp(max=tokens) > tokens - queries[1])
    shares = torch.tensor(sparse.keep).expand(scores.shape[1])
    seen = torch.zeros_like(scores, dtype=torch.bool)
    order = scores.masked_fill(kept, math.inf).argsort(-1, descending=True)
    for head, share in enumerate(shares.tolist()):
        best = order[:, head, :, : math.ceil(round(share * len(column), 6))]
        seen[:, head] = torch.zeros_like(seen[:, head]).scatter(-1, best, True) | kept
    return seen.repeat_interleave(BLOCK, 2).repeat_interleave(BLOCK, 3)[:, :, :tokens, :tokens]


def with_dense_blocks(mask, is_dense):
    """A mask [batch, heads, queries, keys] of as many tokens, in which blocks that have one of these tokens, bool
    [tokens], are seen, and see all."""
    blocks = torch.stack([part.any() for part in is_dense.split(BLOCK)])
    tokens = blocks.repeat_interleave(BLOCK)[: len(is_dense)]
    return mask | tokens | tokens[:, None]
