"""Error and time of sparse attention over density, on fields as video has them: our selections and published ones.

    python bench/sparse_error.py --json sparse_error.json
    python bench/sparse_error.py --size 20,32,48 --tile 4,8,8 --heads 24 --rounds 7
    python bench/sparse_error.py --quick                # on the CPU, emulated

Inputs are those of bench/fields.py, their tokens in raster order, cube by cube of 64 or, for sliding tiles, tile by
tile. The knob of each method (bench/selections.py) is set so that it shows the wanted density of all heads together,
which is measured again. `tiles` is the share of the kernel's tiles of 128 x 128 that are visited, `mass` that of the
true softmax mass that is seen. Errors are means over the heads, against attention in float64; the JSON has those of
each kind of head. All methods run our 8-bit attention, so that none has less error than the dense call.

Times are medians over rounds in which the dense call and the row's take turns. Ours are whole calls, selection and
quantization included. Those of the published methods and of the bounds are of our attention with their selection, tail
included, without the selection: what is timed then is not their kernel, and what plain torch takes for it says
nothing. The kernel's tiles have 128 keys and queries: blocks of 64 cost what the tiles that they touch cost. The time
to reorder tokens is in none.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.nn.functional as F

import common
import sage_aot
from fields import Fields, add_field_arguments, make_fields, order_of, size
from linear_p import measure
from sage_aot._tools import reference
from selections import BLOCK, METHODS, Method, View, density, reached, tile_density

COLUMNS = ("method", "order", "wanted", "density", "tiles", "mass", "relative L1", "cosine", "µs", "× dense")
QUICK: dict[str, Any] = {"size": (4, 8, 16), "tile": (4, 4, 8), "headdim": 64, "heads": 6, "densities": [0.25]}
LAUNCHES = 2  # of a way in a round


def main() -> int:
    arguments = parse()
    library = common.use_kernels(arguments.kernels)
    made = make_fields(arguments.size, arguments.heads, arguments.headdim, arguments.seed, arguments.device)
    tokens = " × ".join(map(str, made.size))
    lines = common.header(library) | {
        "inputs": f"fields of {tokens} tokens, {arguments.heads} heads of {arguments.headdim}, bf16, "
                  f"seed {arguments.seed}, {arguments.device}; medians of {arguments.rounds} rounds"}
    common.print_header(lines)
    print(common.table_head(COLUMNS, texts=2))
    rows, begin = [], time.perf_counter()
    with torch.inference_mode():
        for row in all_rows(arguments, made):
            print(common.table_row(cells(row)), flush=True)
            rows.append(row)
    print(f"\n{time.perf_counter() - begin:.0f} s")
    common.write_json(arguments.json, {"header": lines, "size": made.size, "kinds": made.kinds, "rows": rows})
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_field_arguments(parser)
    parser.set_defaults(heads=12)
    parser.add_argument("--tile", type=size, default="6,8,8", help="of sliding tiles (default: %(default)s)")
    parser.add_argument("--densities", type=lambda text: [float(word) for word in common.words(text)],
                        default="0.5,0.25,0.125,0.0625", help="(default: %(default)s)")
    parser.add_argument("--methods", type=lambda text: text.split("; "), default=list(METHODS),
                        metavar="NAMES", help="with '; ' between them (default: all)")
    parser.add_argument("--rounds", type=int, default=5, help="of each row (default: %(default)s)")
    parser.add_argument("--kernels", metavar="FOLDER", help="built kernels (default: those of the package)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything here")
    parser.add_argument("--quick", action="store_true", help="512 tokens, one density")
    arguments = parser.parse_args()
    if arguments.quick:
        vars(arguments).update(QUICK)
    return arguments


def all_rows(arguments: argparse.Namespace, made: Fields) -> Iterator[dict[str, object]]:
    """Torch's attention and our dense call, then each order's methods."""
    raster = (made.q, made.k, made.v)
    exact, _ = reference.attention(*raster)
    yield from dense_rows(arguments, raster, exact, made.kinds)
    for order in ("raster", "cubes", "tiles"):
        chosen = [METHODS[name] for name in arguments.methods if order in METHODS[name].orders]
        if not chosen:
            continue
        places, _ = order_of(order, made.size, made.q.device, arguments.tile)
        *qkv, expected = (x[:, :, places] for x in (*raster, exact))
        view = View(qkv[0], qkv[1], size=made.size, tile=arguments.tile)
        for method in chosen:
            for wanted, knob in reached(method, [view], arguments.densities):
                yield {"order": order, "wanted": wanted} | method_row(method, knob, view, qkv, expected, made.kinds,
                                                                      arguments.rounds)


def dense_rows(arguments: argparse.Namespace, qkv: Any, exact: torch.Tensor,
               kinds: list[str]) -> Iterator[dict[str, object]]:
    ways: dict[str, Callable[[], torch.Tensor]] = {
        "SDPA, bf16": lambda: F.scaled_dot_product_attention(*qkv), "ours, dense": lambda: sage_aot.attn(*qkv)}
    times = timed(ways, arguments.rounds)
    for name, way in ways.items():
        shown = dict.fromkeys(("wanted", "density", "tiles", "mass"), 1.0)
        yield {"method": name, "group": "dense", "tail": False, "order": "raster", **shown,
               **errors(way(), exact, kinds), "us": times.get(name), "dense_us": times.get("ours, dense")}


def method_row(method: Method, knob: float, view: View, qkv: Any, exact: torch.Tensor, kinds: list[str],
               rounds: int) -> dict[str, object]:
    blocks = method.select(view, knob)

    def own() -> torch.Tensor:
        if method.sparse is None:
            return method.attend(*qkv, blocks)
        return sage_aot.attn(*qkv, sparse=method.sparse(knob))

    times = timed({"dense": lambda: sage_aot.attn(*qkv), "own": own}, rounds)
    masses = view.masses((BLOCK, BLOCK))
    seen = blocks.blocks[..., : masses.shape[2], : masses.shape[3]]
    shown = {"density": density(blocks, view), "tiles": tile_density(blocks),
             "mass": (masses * seen).sum(3).mean().item()}
    return {"method": method.name, "group": method.group, "tail": method.tail, "knob": knob, **shown,
            **errors(own(), exact, kinds), "us": times.get("own"), "dense_us": times.get("dense")}


def errors(out: torch.Tensor, exact: torch.Tensor, kinds: list[str]) -> dict[str, object]:
    """Means over the heads, of all and of each kind."""
    found = [reference.measure(out[:, head], exact[:, head]) for head in range(out.shape[1])]
    of_kind = {kind: {"relative_l1": mean(one.relative_l1 for one, its in zip(found, kinds) if its == kind),
                      "cosine": mean(one.cosine for one, its in zip(found, kinds) if its == kind)}
               for kind in dict.fromkeys(kinds)}
    return {"relative_l1": mean(one.relative_l1 for one in found), "cosine": mean(one.cosine for one in found),
            "of_kind": of_kind}


def timed(ways: dict[str, Callable[[], torch.Tensor]], rounds: int) -> dict[str, float]:
    """Median µs of each way; nothing without a GPU."""
    return measure(dict(ways), rounds, LAUNCHES) if torch.cuda.is_available() else {}


def cells(row: dict[str, Any]) -> list[object]:
    us, dense = row["us"], row["dense_us"]
    shares = [f"{row[name]:.4f}" for name in ("wanted", "density", "tiles", "mass")]
    return [row["method"], row["order"], *shares, f"{row['relative_l1']:.4f}", f"{row['cosine']:.5f}",
            None if us is None else f"{us:.0f}", None if us is None else f"{dense / us:.2f}"]


if __name__ == "__main__":
    common.run(main)
