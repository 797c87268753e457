"""Sparse calls of a model: those of some layers, in some steps of a sampler.

An adapter makes :class:`Sparsely` of what its caller asks for. What it says of layers holds for a model; steps are
counted while it runs. :func:`sage_aot.integrations._rules.blocks_of` says which calls of such a layer are sparse.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from sage_aot._call.kv import QuantizedKV
from sage_aot._call.masks import BlockMask
from sage_aot._call.pooling import PooledBlocks
from sage_aot._call.selection import ends_of
from sage_aot._call.sparse import Sparse
from sage_aot._problem.options import integer_of
from sage_aot._problem.tensors import MASK_BLOCK
from sage_aot.errors import ArgumentError

Ends = int | tuple[int, int]
"""Number of first ones, or (first, last)."""


@dataclass(frozen=True)
class Sparsely:
    """Request of a caller for a model's layers.

    Args:
        sparse: of all layers; or a mapping from the names of attention modules to what each of them gets, where modules
            that it has not stay dense.
        dense_layers: so many first layers that stay dense, or (first, last).
        text_tokens: of a sequence that holds text in addition to what is generated, so many first tokens, or (first,
            last): as keys and as queries they stay dense.

    Raises:
        ArgumentError: an argument is not of this form.
    """

    sparse: Sparse | Mapping[str, Sparse]
    dense_layers: Ends = 0
    text_tokens: Ends = 0

    def __post_init__(self) -> None:
        found = self.sparse.values() if isinstance(self.sparse, Mapping) else [self.sparse]
        if wrong := [one for one in found if not isinstance(one, Sparse)]:
            raise ArgumentError(f"sparse: expected a sage_aot.Sparse, or a mapping from names of attention modules to "
                                f"such, got {wrong[0]!r}")
        for name in ("dense_layers", "text_tokens"):
            object.__setattr__(self, name, ends_of(name, getattr(self, name)))

    def check_names(self, names: Iterable[str]) -> None:
        """ArgumentError where a mapping names a module that is not among these."""
        if isinstance(self.sparse, Mapping) and (unknown := sorted(self.sparse.keys() - set(names))):
            raise ArgumentError(f"sparse: expected names of attention modules as model.named_modules() has them, got "
                                f"{', '.join(map(repr, unknown))}; take those of this model")

    def of_layers(self, names: Sequence[str]) -> dict[str, Sparse]:
        """Choices of the attention modules of a model that are not dense, by their names, without the text. `names`: of
        those that may be sparse, in the order of the model."""
        layers = list(dict.fromkeys(map(_layer_of, names)))
        first, last = ends_of("dense_layers", self.dense_layers)
        dense = {*layers[:first], *layers[max(0, len(layers) - last):]}
        found = {name: self.sparse.get(name) if isinstance(self.sparse, Mapping) else self.sparse for name in names}
        return {name: sparse for name, sparse in found.items()
                if sparse is not None and _layer_of(name) not in dense}

    def with_text(self, sparse: Sparse) -> Sparse:
        """Return the choice with the text's tokens dense, too."""
        text = ends_of("text_tokens", self.text_tokens)
        if text == (0, 0):
            return sparse
        ends: dict[str, Any] = {name: tuple(map(max, ends_of(name, getattr(sparse, name)), text))
                                for name in ("dense_keys", "dense_queries")}
        return replace(sparse, **ends)


@dataclass(frozen=True)
class SharedSparse(Sparse):
    """Choice of blocks for a sequence that processes split: each process's part holds some text and some image, so that
    the text lies in several places. Its blocks are dense in addition to what the choice counts."""

    text: tuple[tuple[int, int], ...] = ()
    """(begin, end) of the text's tokens, which stay dense as keys and as queries."""

    @classmethod
    def of(cls, sparse: Sparse, text: tuple[tuple[int, int], ...]) -> SharedSparse:
        settings: dict[str, Any] = {each.name: getattr(sparse, each.name) for each in fields(Sparse)}
        return cls(**settings, text=text)

    def select(self, q: torch.Tensor, k: torch.Tensor | PooledBlocks | QuantizedKV, *, is_causal: bool = False,
               scale: float | None = None, layout: str = "HND") -> BlockMask:
        return with_dense(super().select(q, k, is_causal=is_causal, scale=scale, layout=layout), self.text, self.text)


def with_dense(mask: BlockMask, queries: Sequence[tuple[int, int]], keys: Sequence[tuple[int, int]]) -> BlockMask:
    """Let these queries see every block, and every query see the blocks of these keys. Both are spans, (begin, end)."""
    seen = mask.blocks.clone()
    block_q, block_k = mask.block_size
    for begin, end in queries:
        seen[:, :, _of_blocks(begin, end, block_q)] = True
    for begin, end in keys:
        seen[:, :, :, _of_blocks(begin, end, block_k)] = True
    return replace(mask, blocks=seen)


def _of_blocks(begin: int, end: int, block: int) -> slice:
    """Slice of a mask's entries of 64 that covers every block with a token in [begin, end)."""
    entries = block // MASK_BLOCK
    return slice(begin // block * entries, -(-end // block) * entries)


def text_of_shares(text: tuple[int, int], tokens: int, shares: int) -> list[tuple[int, int, int]]:
    """Numbers of each share of a sequence: its tokens, and how many first and last ones of them are text.

    The first text, the last text and what lies between them are each split among the shares, as evenly as
    torch.tensor_split does.
    """
    first = min(text[0], tokens)
    last = min(text[1], tokens - first)
    parts = ([count // shares + (index < count % shares) for index in range(shares)]
             for count in (first, tokens - first - last, last))
    return [(of_first + between + of_last, of_first, of_last) for of_first, between, of_last in zip(*parts)]


def spans_of_text(shares: Sequence[tuple[int, int, int]]) -> tuple[tuple[int, int], ...]:
    """(begin, end) of the text of such shares, which follow each other."""
    spans, begin = [], 0
    for tokens, first, last in shares:
        spans += [(begin, begin + first), (begin + tokens - last, begin + tokens)]
        begin += tokens
    return tuple((begin, end) for begin, end in spans if begin < end)


def _layer_of(name: str) -> str:
    """The layer of an attention module: its name up to the last number, as in "blocks.3" of "blocks.3.attn1"."""
    found = re.match(r"(?:.*\.)?\d+(?=\.|$)", name)
    return name if found is None else found[0]


class Steps:
    """Tells which steps of a sampler are dense, by the noise level that each hands to its model.

    A step may call a model several times, with one level. Levels go up or down from step to step, as the first two say;
    where they turn, another run begins. Models that share the steps of a run share this.

    Args:
        dense: (first, last) steps that are dense.
        steps: of a run; needed for the last ones.

    Raises:
        ArgumentError: an argument is not of this form.
    """

    def __init__(self, dense: Ends, steps: int | None = None) -> None:
        self.first, self.last = ends_of("dense_steps", dense)
        number = None if steps is None else integer_of(steps)
        if (steps is not None or self.last) and (number is None or number < 1):
            raise ArgumentError(f"steps: expected the number of steps of a run, which the last ones of dense_steps are "
                                f"counted by, got {steps!r}; pass num_inference_steps")
        self.sparse_until = None if number is None else number - self.last
        self.step, self._level, self._direction = -1, 0.0, 0

    def is_dense(self, level: float) -> bool:
        """True where the step of this noise level is dense. To be asked in the order of the steps."""
        change = (level > self._level) - (level < self._level)
        if self.step < 0 or change * self._direction < 0:
            self.step, self._direction = 0, 0
        elif change:
            self.step, self._direction = self.step + 1, change
        self._level = level
        return self.step < self.first or self.sparse_until is not None and self.step >= self.sparse_until
