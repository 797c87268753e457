"""Ways to choose the blocks of keys that blocks of queries see: ours, the published ones from their formulas, bounds.

    python bench/selections.py                          # the table of methods

A :class:`Method` looks at q and k once, `scores`, and picks blocks by one number, its knob; a larger one picks more.
:func:`calibrate` finds the knob of a density, so that methods are compared at densities that are measured, whatever
their own parameters say. Each keeps the blocks that its paper keeps in any case and no others; where a call is causal,
all of them see the blocks on the diagonal, without which a row might see nothing, and as many keys before as the view
asks for.

Sources: SpargeAttn (arXiv:2502.18137), of which the second filter, inside the kernel, is left out; VSA
(arXiv:2505.13389), without its trained coarse branch; SLA (arXiv:2509.24006), without the linear attention that is
trained for the blocks that are not chosen; Sol-Attn (arXiv:2607.24027); SubBlock (sglang#34148); Radial Attention
(arXiv:2506.19852); Sliding Tile Attention (arXiv:2502.04507), whose search of a window for each head is done with the
true masses of the very input; StreamingLLM (arXiv:2309.17453). Nothing is taken from their code.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

import common
import sage_aot
from sage_aot.sparse import near_and_first, radial_bands, sliding_tiles

BLOCK = 64  # of a BlockMask, whatever the blocks were that it was made of
SCORES_AT_ONCE = 2**26  # elements of a float32 score matrix: 256 MB
SAME = 0.1  # densities that differ by less, of themselves, are one
COLUMNS = ("method", "group", "block", "orders", "tail", "causal")
ORDERS = ("raster", "cubes")


@dataclass
class View:
    """Inputs that a method may look at. Tensors are [batch, heads, tokens, headdim]."""

    q: torch.Tensor
    k: torch.Tensor
    is_causal: bool = False
    before: int = 0  # causal: keys before a block of queries that all methods see, in addition to its own
    size: tuple[int, int, int] | None = None  # frames, height and width of the tokens
    tile: tuple[int, int, int] | None = None  # of tokens that lie tile by tile
    _masses: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)

    def masses(self, block: tuple[int, int]) -> torch.Tensor:
        """The true softmax mass of each block: [batch, heads, query blocks, key blocks], kept."""
        if block not in self._masses:
            self._masses[block] = block_masses(self.q, self.k, block, self.is_causal)
        return self._masses[block]

    def visible(self, block: tuple[int, int]) -> torch.Tensor:
        """[query blocks, key blocks]: the blocks of which a query may see a key."""
        begins, ends = self._edges(block)
        return (begins <= ends[:, None]) | (not self.is_causal)

    def diagonal(self, block: tuple[int, int]) -> torch.Tensor:
        """[query blocks, key blocks]: the blocks that every method sees in a causal call; none in another."""
        begins, ends = self._edges(block)
        first = ends[:, None] + 1 - block[0] - self.before
        return self.visible(block) & self.is_causal & (begins + block[1] > first)

    def near(self, block: int) -> int:
        """Number of blocks that `before` keys take, the queries' own block counted."""
        return 1 + -(-self.before // block)

    def _edges(self, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        """The first keys of blocks of keys, the last queries of blocks of queries."""
        tokens = self.q.shape[2]
        ends = torch.arange(block[0], tokens + block[0], block[0], device=self.q.device) - 1
        return torch.arange(0, tokens, block[1], device=self.q.device), ends


@dataclass(frozen=True)
class Method:
    """A way to choose blocks."""

    name: str
    group: str  # "ours", "published" or "bound"
    block: tuple[int, int]  # queries and keys
    scores: Callable[[View, tuple[int, int]], Any]
    pick: Callable[[Any, float], sage_aot.BlockMask]
    orders: tuple[str, ...] = ORDERS  # of the tokens
    causal: bool = True  # there is a causal form
    tail: bool = False
    knobs: tuple[float, float] = (1e-4, 1.0)  # of the lowest and the highest density
    sparse: Callable[[float], sage_aot.Sparse] | None = None  # ours: the same as an argument of attn

    def select(self, view: View, knob: float) -> sage_aot.BlockMask:
        return self.pick(self.scores(view, self.block), knob)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: sage_aot.BlockMask,
               is_causal: bool = False) -> torch.Tensor:
        """Our attention with blocks that were chosen, and with their tail where the method has one."""
        if not self.tail:
            return sage_aot.attn(q, k, v, block_mask=blocks, is_causal=is_causal)
        chosen = Chosen(keep=1.0, block_size=self.block, tail=True, blocks=blocks)
        return sage_aot.attn(q, k, v, sparse=chosen, is_causal=is_causal)


@dataclass(frozen=True, eq=False)
class Chosen(sage_aot.Sparse):
    """A choice that was made before the call."""

    blocks: sage_aot.BlockMask | None = None

    def select(self, q: torch.Tensor, k: Any, **_: Any) -> sage_aot.BlockMask:
        assert self.blocks is not None and isinstance(self.block_size, tuple)
        if k.shape[2] % self.block_size[1] == 0:
            return self.blocks
        seen = self.blocks.blocks.clone()  # a mean of fewer keys would have another weight
        seen[..., -(self.block_size[1] // BLOCK):] = True
        return replace(self.blocks, blocks=seen)


# --- densities --------------------------------------------------------------------------------------------------------


def density(blocks: sage_aot.BlockMask, view: View) -> float:
    """The share of the queries and keys that a mask shows, of those that the call has: blocks of 64 on the diagonal of
    a causal call count half."""
    weight = view.visible((BLOCK, BLOCK)).float()
    if view.is_causal:
        weight = weight - 0.5 * torch.eye(len(weight), device=weight.device)
    seen = blocks.blocks[..., : weight.shape[0], : weight.shape[1]]
    return (seen * weight).sum((2, 3)).mean().item() / weight.sum().item()


def tile_density(blocks: sage_aot.BlockMask, tile: int = 128) -> float:
    """The share of the kernel's tiles that a mask makes it visit, of a call without a causal mask."""
    step = tile // BLOCK
    padded = torch.nn.functional.pad(blocks.blocks, [part for count in reversed(blocks.blocks.shape[2:])
                                                     for part in (0, -count % step)])
    return padded.unflatten(3, (-1, step)).any(4).unflatten(2, (-1, step)).any(3).float().mean().item()


def reached(method: Method, views: list[View], densities: list[float]) -> Iterator[tuple[float, float]]:
    """Densities and their knobs, from the highest on, but for those that give about the density before: a method may
    not go below what it keeps in any case."""
    last = math.inf
    for wanted in sorted(densities, reverse=True):
        knob, found = calibrate(method, views, wanted)
        if found < (1 - SAME) * last:
            yield wanted, knob
        last = found


def calibrate(method: Method, views: list[View], wanted: float, steps: int = 18) -> tuple[float, float]:
    """The knob at which the method shows `wanted` of all views, by bisection, the nearest of those tried; and what it
    shows."""
    scores = [method.scores(view, method.block) for view in views]

    def found(knob: float) -> float:
        return sum(density(method.pick(score, knob), view) for score, view in zip(scores, views)) / len(views)

    low, high = method.knobs
    tried = {knob: found(knob) for knob in (low, high)}
    for _ in range(steps):
        knob = (low + high) / 2
        tried[knob] = found(knob)
        low, high = (knob, high) if tried[knob] < wanted else (low, knob)
        if abs(tried[knob] - wanted) < 0.002 * wanted:
            break
    return min(tried.items(), key=lambda item: abs(item[1] - wanted))


# --- scores of blocks, [batch, heads, query blocks, key blocks] -------------------------------------------------------


@dataclass(frozen=True)
class Scores:
    """The scores of blocks, and what is seen whatever the scores are."""

    values: torch.Tensor  # -inf where no query may see a key
    forced: torch.Tensor
    visible: torch.Tensor
    block: tuple[int, int]

    def mask(self, seen: torch.Tensor) -> sage_aot.BlockMask:
        return sage_aot.block_mask((seen | self.forced) & self.visible, self.block)


def block_means(x: torch.Tensor, rows: int) -> torch.Tensor:
    """float32 [batch, heads, blocks, headdim]: the mean of each block of rows, of which the last may have fewer."""
    padded = torch.nn.functional.pad(x.float(), (0, 0, 0, -x.shape[2] % rows)).unflatten(2, (-1, rows))
    counts = torch.full((padded.shape[2],), rows, device=x.device)
    counts[-1] = x.shape[2] - rows * (len(counts) - 1)
    return padded.sum(3) / counts[:, None]


def centred(k: torch.Tensor) -> torch.Tensor:
    return k.float() - k.float().mean(2, keepdim=True)


def finish(view: View, block: tuple[int, int], values: torch.Tensor, forced: torch.Tensor | None = None) -> Scores:
    visible, diagonal = view.visible(block), view.diagonal(block)
    every = diagonal.expand_as(values) if forced is None else diagonal | forced
    return Scores(values.masked_fill(~visible, -math.inf), every, visible, block)


def by_means(view: View, block: tuple[int, int]) -> Scores:
    """q̄ · k̄ · scale, as VSA, SLA, SpargeAttn and Sol-Attn have it. VSA and SLA take the best of a row's softmax,
    which has the order of the products."""
    q, k = block_means(view.q, block[0]), block_means(centred(view.k), block[1])
    return finish(view, block, q @ k.mT / view.q.shape[3] ** 0.5)


def by_like_means(view: View, block: tuple[int, int], least: float) -> Scores:
    """SpargeAttn: softmax over the means of the blocks that are alike; others are seen, and see, in any case. Alike:
    the mean cosine of the rows, which is the square of the mean row of length one."""
    k = centred(view.k)
    alike_q, alike_k = (block_means(torch.nn.functional.normalize(x.float(), dim=3), rows).square().sum(3) >= least
                        for x, rows in zip((view.q, k), block))
    found = by_means(view, block)
    values = found.values.masked_fill(~alike_k[:, :, None], -math.inf)
    return finish(view, block, values.softmax(-1).nan_to_num(0.0), ~alike_q[..., None] | ~alike_k[:, :, None])


def by_sub_blocks(view: View, block: tuple[int, int], parts: int = 4) -> Scores:
    """SubBlock: the log-sum-exp of the products of the means of `parts` x `parts` parts of a block."""
    q, k = (block_means(x, rows // parts) for x, rows in zip((view.q, view.k), block))
    products = q @ k.mT / view.q.shape[3] ** 0.5
    ragged = [part for count in reversed(products.shape[2:]) for part in (0, -count % parts)]
    padded = torch.nn.functional.pad(products, ragged, value=-math.inf)
    split = padded.unflatten(3, (-1, parts)).unflatten(2, (-1, parts))
    return finish(view, block, split.logsumexp((3, 5)))


def by_chance(view: View, block: tuple[int, int]) -> Scores:
    visible = view.visible(block)
    values = torch.rand(*view.q.shape[:2], *visible.shape, generator=torch.Generator().manual_seed(0))
    return finish(view, block, values.to(visible.device))


def by_mass(view: View, block: tuple[int, int]) -> Scores:
    """The oracle: the true masses, of exact scores."""
    return finish(view, block, view.masses(block))


def block_masses(q: torch.Tensor, k: torch.Tensor, block: tuple[int, int], is_causal: bool = False) -> torch.Tensor:
    """The softmax mass of each block, mean over its queries: [batch, heads, query blocks, key blocks]. Scores are
    float32, some rows of a head at once."""
    rows, columns = block
    tokens, keys = q.shape[2], k.shape[2]
    at_once = max(1, SCORES_AT_ONCE // keys // rows) * rows
    every = torch.arange(keys, device=q.device)
    found = q.new_zeros(*q.shape[:2], -(-tokens // rows), -(-keys // columns), dtype=torch.float32)
    for batch, head in itertools.product(*map(range, q.shape[:2])):
        of_k = k[batch, head].float().T / q.shape[3] ** 0.5
        for first in range(0, tokens, at_once):
            end = min(keys, first + at_once) if is_causal else keys
            scores = q[batch, head, first: first + at_once].float() @ of_k[:, :end]
            if is_causal:
                scores.masked_fill_(every[:end] > every[first: first + len(scores), None], -math.inf)
            weights = torch.nn.functional.pad(scores.softmax(-1), (0, -end % columns)).unflatten(1, (-1, columns))
            means = block_means(weights.sum(2)[None, None], rows)[0, 0]
            found[batch, head, first // rows: first // rows + len(means), : means.shape[1]] = means
    return found


# --- picking blocks by scores -----------------------------------------------------------------------------------------


def best_share(scores: Scores, keep: float) -> sage_aot.BlockMask:
    """Blocks with the best scores, one share for all blocks of queries; one block at least. Forced blocks count."""
    values = scores.values.masked_fill(scores.forced & scores.visible, math.inf)
    counts = (scores.visible.sum(1) * keep).round().long().clamp(min=1)
    ordered = values.sort(-1, descending=True).values
    least = ordered.gather(3, (counts - 1)[:, None].expand(*values.shape[:3], 1))
    return scores.mask(values >= least)


def best_mass(scores: Scores, mass: float) -> sage_aot.BlockMask:
    """Fewest blocks that have the share `mass` of the row's sum: the values are softmax masses."""
    ordered, places = scores.values.clamp(min=0.0).sort(-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    return scores.mask(torch.zeros_like(scores.forced).scatter(3, places, before < mass))


def best_of_all(scores: Scores, keep: float) -> sage_aot.BlockMask:
    """The best blocks of all heads and rows together, and the best of each row."""
    values = scores.values
    count = max(1, round(keep * scores.visible.sum().item() * values[..., 0, 0].numel()))
    least = values.flatten().sort(descending=True).values[count - 1]
    return scores.mask((values >= least) | (values == values.amax(-1, keepdim=True)))


def above_mean(scores: Scores, knob: float) -> sage_aot.BlockMask:
    """Sol-Attn: the blocks above the mean of the row by -knob standard deviations."""
    visible, count = scores.visible, scores.visible.sum(-1, keepdim=True)
    values = scores.values.masked_fill(~visible, 0.0)
    mean = values.sum(-1, keepdim=True) / count
    deviation = ((values - mean).square() * visible).sum(-1, keepdim=True).div(count).sqrt()
    return scores.mask(values > mean - knob * deviation)


# --- masks of places --------------------------------------------------------------------------------------------------


def bands(view: View, width: float) -> sage_aot.BlockMask:
    assert view.size is not None
    frames, height, row = view.size
    return radial_bands(frames, height * row, width=width, device=view.q.device)


def near_blocks(view: View, near: float, block: int) -> sage_aot.BlockMask:
    """The first block and the nearest ones."""
    near = max(view.near(block), round(near))
    return near_and_first(view.q.shape[2], view.k.shape[2], near=near, block_size=block, device=view.q.device)


def best_windows(view: View, wanted: float) -> sage_aot.BlockMask:
    """Sliding tiles: for each head the window with the most mass, of those of about the wanted density."""
    assert view.size is not None and view.tile is not None
    counts = [edge // part for edge, part in zip(view.size, view.tile)]
    windows = list(itertools.product(*(range(1, count + 1) for count in counts)))
    shares = [math.prod(window) / math.prod(counts) for window in windows]
    nearest = min(shares, key=lambda share: abs(share - wanted))
    alike = [window for window, share in zip(windows, shares) if abs(share - nearest) <= 0.1 * wanted]
    masks = torch.cat([sliding_tiles(view.size, view.tile, window, device=view.q.device).blocks for window in alike])
    masses = view.masses((BLOCK, BLOCK))[:, :, None]
    best = (masses * masks[:, 0]).sum((3, 4)).argmax(2)
    return sage_aot.block_mask(masks[:, 0][best], BLOCK)


def itself(view: View, block: tuple[int, int]) -> View:
    return view


# --- the table --------------------------------------------------------------------------------------------------------


def methods(block: int = 128) -> dict[str, Method]:
    """The methods by name. `block`: keys and queries of our blocks and of those of masks of places, and the queries of
    SpargeAttn's; what papers say of 64 stays."""
    made = [ours(by, block, tail) for by in ("keep", "mass", "tau") for tail in (False, True)]
    if block != BLOCK:
        made += [ours("keep", BLOCK, tail, f", blocks of {BLOCK}") for tail in (False, True)]
    return {method.name: method for method in made + published(block) + bounds(block)}


def ours(by: str, block: int, tail: bool, note: str = "") -> Method:
    """Our selection. Its tau falls as the density rises, so that its knob is -tau."""
    def sparse(knob: float, near: int = 1) -> sage_aot.Sparse:
        return sage_aot.Sparse(**{by: -knob if by == "tau" else knob}, block_size=block, near=near, tail=tail)

    def pick(view: View, knob: float) -> sage_aot.BlockMask:
        return sparse(knob, view.near(block)).select(view.q, view.k, is_causal=view.is_causal)

    return Method(f"ours, {by}{note}{', tail' if tail else ''}", "ours", (block, block), itself, pick, tail=tail,
                  sparse=sparse, knobs=(-6.0, 6.0) if by == "tau" else (1e-4, 1.0))


def published(block: int) -> list[Method]:
    make = partial(Method, group="published")
    sparge, small = partial(make, block=(block, BLOCK)), partial(make, block=(BLOCK, BLOCK))
    places = partial(make, scores=itself, orders=("raster",))
    return [sparge("SpargeAttn, cdf", scores=partial(by_like_means, least=0.6), pick=best_mass),
            sparge("SpargeAttn, cdf, none kept", scores=partial(by_like_means, least=-0.1), pick=best_mass),
            sparge("SpargeAttn, top-k", scores=partial(by_like_means, least=-0.1), pick=best_share),
            small("Sol-Attn", scores=by_means, pick=above_mean, tail=True, knobs=(-6.0, 6.0)),
            small("SubBlock", scores=by_sub_blocks, pick=best_share),
            small("VSA", scores=by_means, pick=best_share, orders=("cubes",), causal=False),
            small("SLA", scores=by_means, pick=best_share, orders=("raster",), causal=False),  # in cubes it is VSA
            places("Radial", block=(128, 128), pick=bands, causal=False, knobs=(1e-3, 64.0)),
            make("Sliding tiles", block=(384, 384), scores=itself, pick=best_windows, orders=("tiles",), causal=False),
            places("near + first", block=(block, block), pick=partial(near_blocks, block=block), knobs=(1.0, 256.0))]


def bounds(block: int) -> list[Method]:
    make = partial(Method, group="bound", block=(block, block))
    made = [make("random", scores=by_chance, pick=best_share, orders=("raster",)),
            make("oracle, rows alike", scores=by_mass, pick=best_share),
            make("oracle, all heads", scores=by_mass, pick=best_of_all)]
    if block != BLOCK:
        made.append(replace(made[-1], name=f"oracle, all heads, blocks of {BLOCK}", block=(BLOCK, BLOCK)))
    return made


METHODS = methods()


def main() -> int:
    print(common.table_head(COLUMNS, texts=len(COLUMNS)))
    for method in METHODS.values():
        rows, columns = method.block
        print(common.table_row([method.name, method.group, f"{rows} × {columns}", ", ".join(method.orders),
                                *("yes" if having else "" for having in (method.tail, method.causal))]))
    return 0


if __name__ == "__main__":
    common.run(main)
