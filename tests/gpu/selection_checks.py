"""Selections of blocks, and what the caller is promised of each: from the caller's tensors, in float64.

The cases are short enough to emulate and to simulate; a GPU runs longer ones in addition.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from random import Random
from typing import Any

import torch

import sage_aot


@dataclass(frozen=True)
class Selection:
    """A call of select_blocks. `alike`: the first blocks of q and k have rows in common."""

    seed: int = 0
    batch: int = 1
    kv_heads: int = 2
    group: int = 1
    queries: int = 333
    keys: int = 450
    headdim: int = 64
    dtype: torch.dtype = torch.bfloat16
    layout: str = "HND"
    block_size: Any = 64
    choose: Any = ("keep", 0.4)
    first: int = 1
    near: int = 1
    least_alike: float = 0.0
    dense_keys: Any = 0
    dense_queries: Any = 0
    is_causal: bool = False
    scale: float | None = None
    alike: float = 0.0
    odd: bool = False  # rows that begin at no multiple of 16 bytes
    tied: bool = False  # the first blocks of keys hold the same keys
    independent: bool = True  # elements of k, so that the mean of a sample is near that of all
    planted: str = ""  # "k:nan", "q:inf"; "q:huge": a block of unlike rows, whose squares f32 does not hold

    def tensors(self, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
        """q and k in the layout; k has an offset in each channel, which no choice may depend on."""
        generator = torch.Generator().manual_seed(self.seed)

        def made(heads: int, rows: int) -> torch.Tensor:
            x = torch.randn(self.batch, heads, rows, self.headdim, generator=generator)
            walk = torch.randn(self.batch, heads, rows // 32 + 1, self.headdim, generator=generator)
            return x + 0.5 * walk.repeat_interleave(32, 2)[:, :, :rows]

        q, k = made(self.kv_heads * self.group, self.queries), made(self.kv_heads, self.keys)
        for x in (q, k):
            x[:, :, :64] += self.alike * torch.randn(self.headdim, generator=generator)
        if self.tied and self.keys >= 256:
            k[:, :, :256] = k[:, :, :64].repeat(1, 1, 4, 1)
        k = k + 4 * torch.randn(self.headdim, generator=generator)
        if self.planted == "q:huge":
            q[:, :, 64:128] *= 1e25 * (-1.0) ** torch.arange(64)[:, None]
        q, k = (_in_layout(x.to(self.dtype), self.layout, self.odd).to(device) for x in (q, k))
        if self.planted in ("k:nan", "q:inf"):
            name, value = self.planted.split(":")
            rows = {"q": q, "k": k}[name].view(self.batch, -1)
            rows[-1, rows.shape[1] // 2] = float(value)
        return q, k

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of select_blocks in addition to q and k."""
        by, amount = self.choose
        names = ("block_size", "first", "near", "least_alike", "dense_keys", "dense_queries", "is_causal", "scale",
                 "layout")
        return {by: amount, **{name: getattr(self, name) for name in names}}


def _in_layout(x: torch.Tensor, layout: str, odd: bool) -> torch.Tensor:
    x = x.transpose(1, 2).contiguous() if layout == "NHD" else x
    if odd:
        x = torch.nn.functional.pad(x, (1, 2))[..., 1:-2]
    return x


CASES = {
    "keep": Selection(group=2),
    "causal": Selection(seed=1, group=2, choose=("keep", (0.2, 0.4, 0.9, 1.0)), is_causal=True, near=2, layout="NHD"),
    "mass": Selection(seed=2, batch=2, choose=("mass", 0.7), first=0),
    "tau": Selection(seed=3, choose=("tau", 0.3), near=0, dtype=torch.float16),
    "causal tau": Selection(seed=4, choose=("tau", (-0.5, 1.0)), is_causal=True, queries=450, keys=200),
    "causal mass": Selection(seed=5, choose=("mass", 0.5), is_causal=True, keys=700, near=0, first=0),
    "ends": Selection(seed=6, choose=("keep", 0.2), first=0, near=0, dense_keys=(70, 3), dense_queries=(70, 1)),
    "alike": Selection(seed=7, choose=("keep", 0.2), least_alike=0.25, alike=2.0, first=0, near=0),
    "sizes": Selection(seed=8, block_size=(128, 192), keys=900, choose=("keep", 0.3)),
    "floats": Selection(seed=9, dtype=torch.float32, headdim=61, choose=("keep", 0.5), first=2),
    "odd": Selection(seed=10, headdim=50, odd=True, choose=("mass", 0.6), group=3, kv_heads=1),
    "spoilt": Selection(seed=11, planted="k:nan"),
    "infinite": Selection(seed=12, planted="q:inf", choose=("mass", 0.6)),
    "negative": Selection(seed=13, scale=-0.2, choose=("keep", 0.3), first=0),
    "few": Selection(seed=14, queries=5, keys=7),
    "equal": Selection(seed=15, scale=0.0, choose=("keep", 0.5), first=0, near=0),
    "ties": Selection(seed=20, tied=True, choose=("keep", 0.4), first=0, near=0),
    "groups": Selection(seed=16, queries=20 * 64 + 1, keys=300, kv_heads=1),
    "large": Selection(seed=18, scale=30.0, choose=("mass", 0.9), near=0),
    "huge": Selection(seed=19, dtype=torch.float32, planted="q:huge", choose=("keep", 0.2), least_alike=0.04, first=0),
    "all of the mass": Selection(seed=17, choose=("mass", 1.0), first=0, near=0),
    "whole vectors": Selection(seed=21, queries=130, keys=128 * 64, kv_heads=1, choose=("mass", 0.5)),
}


def drawn(seed: int, longest: int = 900) -> Selection:
    """A case of everything that a seed draws; lengths up to `longest`."""
    random = Random(seed)
    heads, group = random.randint(1, 3), random.randint(1, 3)
    by = random.choice(("keep", "mass", "tau"))

    def amount() -> float:
        return random.uniform(-1.5, 2.0) if by == "tau" else random.choice((random.uniform(0.01, 1.0), 1.0))

    return Selection(
        seed=seed, batch=random.randint(1, 2), kv_heads=heads, group=group, queries=random.randint(1, longest),
        keys=random.randint(1, longest), headdim=random.choice((64, 128, 256, random.randint(1, 256))),
        dtype=random.choice((torch.float16, torch.bfloat16, torch.float32)), layout=random.choice(("HND", "NHD")),
        block_size=random.choice((64, 128, (64, 128), (128, 64), (192, 64), (64, 320))),
        choose=(by, tuple(amount() for _ in range(heads * group)) if random.random() < 0.3 else amount()),
        first=random.randint(0, 3), near=random.randint(0, 3), dense_keys=(random.choice((0, 1, 70)), 0),
        dense_queries=random.choice((0, (1, 0), (0, 65))), is_causal=random.random() < 0.4,
        scale=random.choice((None, 0.5, -0.1)), odd=random.random() < 0.2, tied=random.random() < 0.1)


def sizes_of(block_size: int | tuple[int, int]) -> tuple[int, int]:
    """The queries and the keys of a block."""
    return block_size if isinstance(block_size, tuple) else (block_size, block_size)


def ends_of(dense: int | tuple[int, int]) -> tuple[int, int]:
    """The numbers of first and of last ones."""
    return dense if isinstance(dense, tuple) else (dense, 0)


def failures(case: Selection, q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor) -> list[str]:
    """Every promise that a mask of 64 x 64 does not keep, a sentence each."""
    sizes = sizes_of(case.block_size)
    rows, columns = (size // 64 for size in sizes)
    if case.layout == "NHD":
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    q, k = (torch.where(x.isfinite(), x, 0.0).double().cpu() for x in (q, k))
    seen = mask[:, :, ::rows, ::columns].cpu()
    if not torch.equal(seen.repeat_interleave(rows, 2).repeat_interleave(columns, 3), mask.cpu()):
        return ["a block is seen in part"]
    scores, slack = _scores(case, q, k, sizes)
    if seen.shape != scores.shape:
        return [f"expected blocks {list(scores.shape)}, got {list(seen.shape)}"]
    visible, kept = _visible(case, sizes), _kept(case, q, k, sizes)
    found = []
    if (seen & ~visible).any():
        found.append("a block that lies behind all of the queries is seen")
    if (kept & visible & ~seen).any():
        found.append("a block is not seen that is to be kept")
    return found + _BY[case.choose[0]](case, scores, slack, seen, visible, kept & visible)


# --- what the caller is promised --------------------------------------------------------------------------------------


def _blocks(length: int, size: int) -> list[slice]:
    return [slice(first, min(first + size, length)) for first in range(0, length, size)]


def _means(x: torch.Tensor, size: int) -> torch.Tensor:
    return torch.stack([x[:, :, block].mean(2) for block in _blocks(x.shape[2], size)], 2)


def _scores(case: Selection, q: torch.Tensor, k: torch.Tensor,
            sizes: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores but for a constant of each row, and what rounding the means to 8 bits may add or take."""
    q_mean, k_mean = _means(q, sizes[0]), _means(k, sizes[1])
    k_mean = (k_mean - k.mean(2, keepdim=True)).repeat_interleave(case.group, 1)
    scale = case.headdim**-0.5 if case.scale is None else case.scale
    of_q, of_k = (x.abs().amax(-1, keepdim=True) / 254 for x in (q_mean, k_mean))
    of_k = of_k + _off_centre(case, k) / 254
    slack = q_mean.norm(dim=-1)[..., None] * of_k.mT + of_q * k_mean.norm(dim=-1)[:, :, None]
    return q_mean @ k_mean.mT * scale, 3 * abs(scale) * slack + 1e-6


def _off_centre(case: Selection, k: torch.Tensor) -> torch.Tensor:
    """Most distance of what is taken off the keys, the mean of a sample of 64, from the mean of all."""
    if case.independent:
        return k.std(2, keepdim=True, correction=0).amax() / 8
    return (k.amax(2) - k.amin(2)).amax() + k.abs().amax()  # nothing is taken off where the mean is not finite


def _visible(case: Selection, sizes: tuple[int, int]) -> torch.Tensor:
    return torch.tensor([[not case.is_causal or key.start <= query.stop - 1 + case.keys - case.queries
                          for key in _blocks(case.keys, sizes[1])] for query in _blocks(case.queries, sizes[0])])


def _kept(case: Selection, q: torch.Tensor, k: torch.Tensor, sizes: tuple[int, int]) -> torch.Tensor:
    (first_k, last_k), (first_q, last_q) = map(ends_of, (case.dense_keys, case.dense_queries))
    queries, keys = _blocks(case.queries, sizes[0]), _blocks(case.keys, sizes[1])
    own = [{row + case.keys - case.queries for row in range(query.start, query.stop)} for query in queries]
    by_place = torch.tensor([[
        column < case.first or key.start < first_k or key.stop > case.keys - last_k
        or query.start < first_q or query.stop > case.queries - last_q
        or any(low in own[row] or any(place in own[row] for place in range(low, low + sizes[1]))
               for low in range(key.start - (case.near - 1) * sizes[1], key.start + case.near * sizes[1], sizes[1])
               if case.near and low >= 0)
        for column, key in enumerate(keys)] for row, query in enumerate(queries)])
    if case.least_alike == 0:
        return by_place
    k = k - k.mean(2, keepdim=True)
    unlike_q, unlike_k = (_alike(x, size) < case.least_alike for x, size in ((q, sizes[0]), (k, sizes[1])))
    return by_place | unlike_q[..., None] | unlike_k.repeat_interleave(case.group, 1)[:, :, None]


def is_decided(case: Selection, q: torch.Tensor, k: torch.Tensor) -> bool:
    """True where no block's likeness is within 0.1 of `least_alike`."""
    if case.least_alike == 0:
        return True
    sizes = sizes_of(case.block_size)
    q, k = (x.double() for x in (q, k))
    return all(((_alike(x, size) - case.least_alike).abs() > 0.1).all()
               for x, size in ((q, sizes[0]), (k - k.mean(2, keepdim=True), sizes[1])))


def _alike(x: torch.Tensor, size: int) -> torch.Tensor:
    """Likeness of the rows of each block; the cases keep away from the bound."""
    return torch.stack([x[:, :, block].mean(2).square().sum(-1) / x[:, :, block].square().sum(-1).mean(2)
                        for block in _blocks(x.shape[2], size)], 2)


def _amount(case: Selection) -> torch.Tensor:
    amount = torch.tensor(case.choose[1], dtype=torch.float64)
    return amount[:, None] if amount.dim() else amount


def _by_keep(case: Selection, scores: torch.Tensor, slack: torch.Tensor, seen: torch.Tensor, visible: torch.Tensor,
             kept: torch.Tensor) -> list[str]:
    wanted = (_amount(case) * visible.sum(-1) - 1e-5).ceil().clamp(min=1).minimum(visible.sum(-1))
    expected = torch.maximum(kept.expand(seen.shape).sum(-1), wanted.expand(seen.shape[:3]))
    found = [] if torch.equal(seen.sum(-1), expected.long()) else ["another number of blocks than asked for"]
    return found + _best(scores, slack, seen, visible, kept)


def _best(scores: torch.Tensor, slack: torch.Tensor, seen: torch.Tensor, visible: torch.Tensor,
          kept: torch.Tensor) -> list[str]:
    """Check that those blocks are seen that have the best scores, of the blocks that are free to be chosen."""
    worst = (scores + slack).masked_fill(~seen | kept, torch.inf).amin(-1)
    missed = (scores - slack).masked_fill(seen | ~visible, -torch.inf).amax(-1)
    return ["a block is seen instead of a better one"] if (missed > worst).any() else []


def _by_mass(case: Selection, scores: torch.Tensor, slack: torch.Tensor, seen: torch.Tensor, visible: torch.Tensor,
             kept: torch.Tensor) -> list[str]:
    size = sizes_of(case.block_size)[1]
    keys = torch.tensor([block.stop - block.start for block in _blocks(case.keys, size)]).double()
    shares = (scores.masked_fill(~visible, -torch.inf) + keys.log()).softmax(-1).nan_to_num(0.0)
    slack_of_row = slack.masked_fill(~visible, 0.0).amax(-1)
    wanted, got = _amount(case).expand(seen.shape[:3]), (shares * seen).sum(-1)
    found = ["less of the mass than asked for"] if (
        (got < wanted - 2 * slack_of_row - 1e-5) & visible.any(-1)).any() else []
    chosen = seen & ~kept
    worst = scores.masked_fill(~chosen, torch.inf).amin(-1, keepdim=True)
    last = chosen & (scores <= worst + 2 * slack)  # equal ones are all chosen, and any of these may be the last
    without = (got - (shares * last).sum(-1)).masked_fill(~chosen.any(-1), 0.0)
    if (without > wanted + 2 * slack_of_row + 1e-5).any():
        found.append("a block more than the mass needs")
    return found + _best(scores, slack, seen, visible, kept)


def _by_tau(case: Selection, scores: torch.Tensor, slack: torch.Tensor, seen: torch.Tensor, visible: torch.Tensor,
            kept: torch.Tensor) -> list[str]:
    count = visible.sum(-1, keepdim=True).clamp(min=1)
    mean = scores.masked_fill(~visible, 0.0).sum(-1, keepdim=True) / count
    deviation = ((scores - mean).masked_fill(~visible, 0.0).square().sum(-1, keepdim=True) / count).sqrt()
    highest = scores.masked_fill(~visible, -torch.inf).amax(-1, keepdim=True)
    bound = (mean + _amount(case)[..., None] * deviation).minimum(highest)
    free = visible & ~kept
    if (free & ~seen & (scores > bound + 3 * slack)).any():
        return ["a block above the bound is not seen"]
    return ["a block below the bound is seen"] if (free & seen & (scores < bound - 3 * slack)).any() else []


_BY = {"keep": _by_keep, "mass": _by_mass, "tau": _by_tau}


def check(case: Selection, device: str = "cpu") -> tuple[sage_aot.BlockMask, list[str]]:
    """Make the call; its mask, and the promises that it does not keep."""
    q, k = case.tensors(device)
    blocks = sage_aot.sparse.select_blocks(q, k, **case.arguments)
    return blocks, failures(case, q, k, blocks.blocks)


def of_headdim(case: Selection, headdim: int) -> Selection:
    """Selection by a kernel of another head dim."""
    return dataclasses.replace(case, headdim=headdim - (64 - case.headdim))
