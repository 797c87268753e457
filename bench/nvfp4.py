"""SageAttention3 as published compared with the kernels' own NVFP4, in emulation, on inputs that tell them apart.

    python bench/nvfp4.py [--markdown FILE]

`published` follows "SageAttention3" (arXiv:2505.11594), sections 3.1 to 3.3, and the recipe of its authors' kernels:
scales of groups straight from the largest magnitude, no scale above them; P divided by its group's scale before that is
rounded; sums of P before rounding; K and Q less their means, and the mean's product with K, in the inputs' type.
Tensors are [batch, heads, seq, headdim].
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from sage_aot._backends.emulation import nvfp4
from sage_aot._backends.emulation.backend import EmulationBackend
from sage_aot._call.backends import default_library, handing
from sage_aot._problem.mask import Mask
from sage_aot._tools import reference
from sage_aot._tools.reference import Accuracy

ARCH = "sm120"
ROWS = 128
"""Queries that share a mean."""

LOG2_LARGEST = math.log2(nvfp4.LIMIT)

Draw = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Callable[..., torch.Tensor]], None]


def _sharp(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, normal: Callable[..., torch.Tensor]) -> None:
    q *= 2
    k *= 2


def _means(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, normal: Callable[..., torch.Tensor]) -> None:
    for x, size in ((q, 3), (k, 6), (v, 1)):
        x += size * normal(1, x.shape[1], 1, x.shape[3])


def _small_k(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, normal: Callable[..., torch.Tensor]) -> None:
    q *= 200
    k *= 0.005


def _sink(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, normal: Callable[..., torch.Tensor], nats: float) -> None:
    """The first key has a part of its own too: without one its NVFP4 is exact, or far off, by its scale alone."""
    reference.make_sink(nats, normal, q, k, v)
    k[:, :, 0] += 0.5 * normal(*k[:, :, 0].shape)


CLASSES: dict[str, Draw] = {"normal": lambda *_: None, "sharp": _sharp, "channel means": _means, "small K": _small_k,
                            "sink": partial(_sink, nats=6.0), "strong sink": partial(_sink, nats=8.0)}
"""Input classes: what is done to N(0, 1). "sharp": Q and K twice that. "channel means": an offset per head and channel,
3·N(0, 1) in Q, 6 in K, 1 in V. "small K": K times 0.005, Q times 200. "sink", "strong sink": the first key's score lies
6, or 8, above the mean of the others, so that it has a fifteenth, or a third, of the weight."""


def inputs(kind: str, headdim: int, *, queries: int = 1024, heads: int = 2, kv_heads: int = 2,
           seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v in bf16; 1,024 keys, with a sink 4,096 of them."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    keys = 4096 if "sink" in kind else 1024
    tensors = [normal(1, *shape, headdim) for shape in ((heads, queries), (kv_heads, keys), (kv_heads, keys))]
    CLASSES[kind](*tensors, normal)
    q, k, v = (x.bfloat16() for x in tensors)
    return q, k, v


def to_six(x: torch.Tensor) -> torch.Tensor:
    """Groups of neighbours rounded to NVFP4 and back, as published: the largest magnitude becomes 6."""
    groups = x.unflatten(-1, (-1, nvfp4.GROUP))
    scale = nvfp4.to_e4m3(groups.abs().amax(-1, keepdim=True) / nvfp4.E2M1_LIMIT)
    return (nvfp4.to_e2m1((groups / scale).nan_to_num(0.0)) * scale).flatten(-2)


def published(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool = False,
              two_level: bool = True) -> torch.Tensor:
    """SageAttention3's attention. `two_level`: whether P is scaled to the whole range of NVFP4 before groups are."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    k = k - k.float().mean(2, keepdim=True).to(k.dtype)
    means = torch.stack([part.float().mean(2) for part in q.split(ROWS, 2)], 2).to(q.dtype)
    of_rows = means.repeat_interleave(ROWS, 2)[:, :, : q.shape[2]]
    delta_s = (means @ k.transpose(2, 3)).repeat_interleave(ROWS, 2)[:, :, : q.shape[2]]
    scores = to_six((q - of_rows).float()) @ to_six(k.float()).transpose(2, 3) + delta_s.float()
    scores *= q.shape[-1] ** -0.5 * math.log2(math.e)
    rows, keys = (torch.arange(x.shape[2], device=q.device) for x in (q, k))
    visible = Mask(is_causal=is_causal).visible_keys(rows, len(rows), len(keys))
    scores.masked_fill_(~visible.contains(keys), -math.inf)
    top = LOG2_LARGEST if two_level else 0.0
    p = (scores - scores.amax(-1, keepdim=True) + top).exp2()
    order = nvfp4.columns_of_keys(k.shape[2])
    groups = p[..., order].unflatten(-1, (-1, nvfp4.GROUP))
    scale = groups.amax(-1, keepdim=True) / nvfp4.E2M1_LIMIT
    rounded = torch.empty_like(p)
    rounded[..., order] = (nvfp4.to_e2m1((groups / scale).nan_to_num(0.0)) * nvfp4.to_e4m3(scale)).flatten(-2)
    of_v = torch.empty_like(v, dtype=torch.float32)
    of_v[:, :, order] = to_six(v.float()[:, :, order].transpose(-1, -2)).transpose(-1, -2)
    return rounded @ of_v / p.sum(-1, keepdim=True)


def kernels(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool = False,
            **options: object) -> torch.Tensor:
    """Output of our kernels of sm120, emulated, with ``qk="nvfp4"`` or other options."""
    import sage_aot

    with handing(EmulationBackend(default_library().manifest, ARCH)):
        return sage_aot.attn(q.float(), k.float(), v.float(), is_causal=is_causal, **{"qk": "nvfp4", **options})


def fp8(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool = False) -> torch.Tensor:
    """The default of sm120: INT8 Q and K, FP8 P and V."""
    return kernels(q, k, v, is_causal=is_causal, qk="int8")


def accuracy(method: Callable[..., torch.Tensor], kind: str, headdim: int, *, is_causal: bool = False,
             **shape: int) -> Accuracy:
    """Accuracy of a method against float64 on a class of inputs."""
    q, k, v = inputs(kind, headdim, **shape)
    return reference.measure(method(q, k, v, is_causal=is_causal),
                             reference.attention(q, k, v, is_causal=is_causal)[0])


ROWS_OF_TABLE: dict[str, Callable[..., torch.Tensor]] = {
    "as published": published,
    "as published, P in one level": partial(published, two_level=False),
    "**kernels**": kernels,
    "kernels, V smoothed": partial(kernels, smooth_v=True),
    "kernels, rotated": partial(kernels, rotate=True),
    "default of sm120: INT8 and FP8": fp8,
}


def table(headdim: int) -> str:
    """The table of docs/accuracy.md: cosine and relative L1 error in percent."""
    lines = ["| head dim " + f"{headdim} | " + " | ".join(CLASSES) + " |", "|---" * (1 + len(CLASSES)) + "|"]
    for name, method in ROWS_OF_TABLE.items():
        found = [accuracy(method, kind, headdim) for kind in CLASSES]
        lines.append(f"| {name} | " + " | ".join(f"{x.cosine:.5f} / {100 * x.relative_l1:.2f}" for x in found) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the tables here")
    args = parser.parse_args()
    text = "\n".join(table(headdim) for headdim in (64, 128))
    print(text)
    if args.markdown:
        args.markdown.write_text(text)


if __name__ == "__main__":
    main()
