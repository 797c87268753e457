"""Q, K and V as the transformers of video models have them: projections of smooth fields, with rotary positions.

    python bench/fields.py                              # how the heads differ: softmax mass in the best blocks
    python bench/fields.py --size 20,32,48 --heads 12 --order cubes --device cuda
    python bench/fields.py --quick

Made, not taken from a model: waves of random directions and phases, equal in power per octave, over (frames, height,
width); each head projects them to q, k and v, with white noise as detail. The kinds of heads are those that papers
draw: near in place and time, of one frame, of one place over time, by content, diffuse, with a sink in the first frame.
What a head sees of positions comes from offsets of its channels and the rotation of channels over frames, rows and
columns, split as Wan's is; some channels of k have offsets that all keys share. All that is random is drawn on the CPU,
so that a seed gives the same tensors on every device.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

import common
from sage_aot.sparse import tile_order
from selections import block_masses

Size = tuple[int, int, int]
"""Frames, height and width, in tokens or in tiles."""

WAVES, DETAIL, THETA = 192, 0.4, 10000.0
STILLNESS = 1.5  # the waves are so many times longer over frames than over rows and columns
CUBE: Size = (4, 4, 4)
SHARES = (0.125, 0.25, 0.5)
COLUMNS = ("head", "kind", "keys, effective", *(f"mass in {share:.1%}" for share in SHARES))


class Kind(NamedTuple):
    """Scores of heads of a kind, in nats, which decide what the heads look at."""

    frames: float  # highest score of tokens of the same frame, from positions
    rows: float
    columns: float
    content: float  # standard deviation of the scores from content
    wavelength: float  # of the finest waves of its content, in tokens
    first_frame: float = 0.0  # score of the first frame's tokens above the others


KINDS = {"local": Kind(8.0, 9.0, 9.0, 1.0, 6.0), "spatial": Kind(14.0, 2.0, 2.0, 1.5, 8.0),
         "temporal": Kind(0.0, 12.0, 12.0, 1.0, 8.0), "content": Kind(1.0, 1.0, 1.0, 3.0, 5.0),
         "diffuse": Kind(1.0, 1.0, 1.0, 0.7, 12.0), "sink": Kind(3.0, 3.0, 3.0, 1.2, 8.0, 3.5)}
"""Kinds of heads; the heads take them in turn."""


@dataclass(frozen=True)
class Fields:
    """Tensors in raster order: frame by frame, row by row."""

    size: Size
    kinds: list[str]  # of each head
    q: torch.Tensor  # bf16 [1, heads, tokens, headdim], as k and v
    k: torch.Tensor
    v: torch.Tensor


def main() -> int:
    arguments = parse()
    made = make_fields(arguments.size, arguments.heads, arguments.headdim, arguments.seed, arguments.device)
    order, _ = order_of(arguments.order, made.size, arguments.device)
    print(common.table_head(COLUMNS, texts=2))
    q, k = made.q[:, :, order], made.k[:, :, order]
    for head, (kind, row) in enumerate(zip(made.kinds, concentration(q, k, arguments.block_size))):
        print(common.table_row([head, kind, *row]))
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_field_arguments(parser)
    parser.add_argument("--order", choices=("raster", "cubes"), default="raster", help="(default: %(default)s)")
    parser.add_argument("--block-size", type=int, default=128, help="keys and queries (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="8 x 16 x 16 tokens, headdim 64")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.size, arguments.headdim = (8, 16, 16), 64
    return arguments


def add_field_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", type=size, default="24,32,40",
                        help="frames, height and width in tokens (default: %(default)s)")
    parser.add_argument("--heads", type=int, default=len(KINDS), help="(default: %(default)s)")
    parser.add_argument("--headdim", type=int, default=128, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu",
                        help="(default: %(default)s)")


def size(text: str) -> Size:
    """``"24,32,40"`` → ``(24, 32, 40)``."""
    frames, height, width = common.integers(text)
    return frames, height, width


def concentration(q: torch.Tensor, k: torch.Tensor, block: int) -> list[list[str]]:
    """Exponential of the mean entropy of each head, and the mass in the best shares of the blocks."""
    masses, entropy = block_masses(q, k, (block, block)), entropies(q, k)
    best = masses.sort(-1, descending=True).values.cumsum(-1).mean(2)[0]
    count = masses.shape[3]
    return [[f"{math.exp(entropy[head]):.0f}", *(f"{best[head, max(1, round(share * count)) - 1]:.1%}"
                                                for share in SHARES)] for head in range(q.shape[1])]


def entropies(q: torch.Tensor, k: torch.Tensor, rows: int = 256) -> list[float]:
    """Mean entropy of the softmax of rows spread over each head, in nats."""
    drawn = torch.linspace(0, q.shape[2] - 1, rows, device=q.device).long()
    found = []
    for of_q, of_k in zip(q[0, :, drawn], k[0]):
        logs = (of_q.float() @ of_k.float().T / q.shape[3] ** 0.5).log_softmax(-1)
        found.append(-(logs.exp() * logs).sum(-1).mean().item())
    return found


# --- tensors ----------------------------------------------------------------------------------------------------------


def make_fields(size: Size, heads: int, headdim: int, seed: int = 0, device: torch.device | str = "cpu") -> Fields:
    """The tensors of one layer."""
    places = torch.cartesian_prod(*(torch.arange(edge, dtype=torch.float32) for edge in size)).to(device)
    kinds = [list(KINDS)[head % len(KINDS)] for head in range(heads)]
    made = [make_head(KINDS[kind], places, size, headdim, 1000 * seed + head) for head, kind in enumerate(kinds)]
    q, k, v = (torch.stack(part)[None].bfloat16() for part in zip(*made))
    return Fields(size, kinds, q, k, v)


def make_head(kind: Kind, places: torch.Tensor, size: Size, headdim: int, seed: int) -> tuple[torch.Tensor, ...]:
    """q, k and v of one head, float32 [tokens, headdim]."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(places.device)

    axes, frequencies = rotary(headdim, places.device)
    content = waves(places, size, kind.wavelength, generator)
    shared = normal(WAVES, headdim)
    q, k = (content @ (0.8 * shared + 0.6 * normal(WAVES, headdim)) / WAVES**0.5 + DETAIL * normal(len(places), headdim)
            for _ in range(2))
    q, k = of_deviation(kind.content, q, k)
    offset = position_offset(kind, axes, normal)
    slow = (frequencies * torch.tensor(size, device=places.device)[axes] < 0.5).repeat_interleave(2)
    k_offset = offset + 2.0 * normal(headdim) * slow
    q, k = (rotate(x, places, axes, frequencies) for x in (q + offset, k + k_offset))
    direction = normal(headdim)
    direction *= math.sqrt(kind.first_frame * headdim**0.5) / direction.norm()
    q, k = q + direction, k + direction * (places[:, :1] == 0)
    v = content @ normal(WAVES, headdim) / WAVES**0.5 + DETAIL * normal(len(places), headdim) + 0.5 * normal(headdim)
    return q, k, v


def waves(places: torch.Tensor, size: Size, finest: float, generator: torch.Generator) -> torch.Tensor:
    """[tokens, WAVES] of variance one: waves whose lengths are even per octave, from the edges down to `finest`."""
    longest = max(size[1:])
    length = finest * (longest / finest) ** torch.rand(WAVES, generator=generator)
    direction = torch.nn.functional.normalize(torch.randn(3, WAVES, generator=generator), dim=0)
    direction[0] /= STILLNESS
    phase = torch.rand(WAVES, generator=generator)
    turns = places @ (direction / length).to(places.device) + phase.to(places.device)
    return math.sqrt(2.0) * (2 * math.pi * turns).cos()


def of_deviation(nats: float, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k scaled alike, so that scores differ by `nats`."""
    some_q, some_k = (x[:: max(1, len(x) // 1024)] for x in (q, k))
    factor = math.sqrt(nats * q.shape[1] ** 0.5 / (some_q @ some_k.T).std().item())
    return q * factor, k * factor


def position_offset(kind: Kind, axes: torch.Tensor, normal: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Channels that q and k share before they are rotated: their product falls with the distance along an axis."""
    nats = torch.tensor([kind.frames, kind.rows, kind.columns], device=axes.device)
    pairs = torch.bincount(axes, minlength=3)
    length = (nats * math.sqrt(2 * len(axes)) / pairs).sqrt()[axes]
    return (torch.nn.functional.normalize(normal(len(axes), 2), dim=1) * length[:, None]).flatten()


def rotary(headdim: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The axis and the frequency of each pair of channels: a third for rows and for columns each, the rest frames."""
    third = headdim // 6
    counts = (headdim // 2 - 2 * third, third, third)
    axes = torch.arange(3).repeat_interleave(torch.tensor(counts))
    frequencies = torch.cat([THETA ** (-torch.arange(count) / count) for count in counts])
    return axes.to(device), frequencies.to(device)


def rotate(x: torch.Tensor, places: torch.Tensor, axes: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    angles = places[:, axes] * frequencies
    turned = torch.view_as_complex(x.unflatten(1, (-1, 2)).contiguous()) * torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(turned).flatten(1)


def order_of(name: str, size: Size, device: torch.device | str, tile: Size = CUBE) -> tuple[torch.Tensor, torch.Tensor]:
    """The order of the tokens by name, ``"raster"``, ``"cubes"`` or ``"tiles"`` of `tile`, and its inverse."""
    if name == "raster":
        every = torch.arange(math.prod(size), device=device)
        return every, every
    return tile_order(size, CUBE if name == "cubes" else tile, device=device)


if __name__ == "__main__":
    common.run(main)
