"""Draw sparse attention: error over time for every method, and bits per byte over density.

    python bench/plot_sparse.py --error sparse_error.json --bits long_text.json --out docs/sparse.png

The files are those of bench/sparse_error.py and bench/long_text.py; either may be left out. A method has a line for
each order of tokens, a point for each density. Lines of ours are solid and are whole calls; those of published methods
are dashed and leave their selection out of the time; bounds are dotted. Open points: methods whose other blocks count
by their means.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

Point = tuple[float, float]

COLORS = {"ours, keep": "#d1495b", "ours, mass": "#e0912f", "ours, tau": "#8c2f7b", "SpargeAttn, cdf": "#2a6fbb",
          "SpargeAttn, cdf, none kept": "#1b3f73", "SpargeAttn, top-k": "#6fa8dc", "Sol-Attn": "#2f9e6e",
          "SubBlock": "#7b5ea7", "VSA": "#17a2b8", "SLA": "#c06bb0",
          "Radial": "#8a6d3b", "Sliding tiles": "#5b7f95", "near + first": "#b0a04a", "random": "#9aa0a8",
          "oracle": "#4d525a"}
"""Colors by the beginning of a method's name; the longest beginning that fits counts."""

DASHES = {"ours": "-", "published": "--", "bound": ":"}
ORDERS = {"raster": "tokens frame by frame, row by row", "cubes": "tokens cube by cube, sliding tiles tile by tile"}
DENSE = "dense"
LEAST_ABOVE = 1e-4  # bits per byte: differences below it are drawn there


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--error", type=Path, metavar="JSON", help="written by bench/sparse_error.py --json")
    parser.add_argument("--bits", type=Path, metavar="JSON", help="written by bench/long_text.py --json")
    parser.add_argument("--out", type=Path, default=Path("docs/sparse.png"), metavar="PNG",
                        help="picture to write (default: %(default)s)")
    arguments = parser.parse_args()
    files = [None if path is None else json.loads(path.read_text()) for path in (arguments.error, arguments.bits)]
    if not any(files):
        parser.error("expected --error, --bits or both")
    draw(*files).savefig(arguments.out)
    print(f"wrote {arguments.out}")


def draw(error: dict | None, bits: dict | None) -> Figure:
    """A panel for each order of tokens, then one for each model."""
    panels: list[Callable[[Any], None]] = []
    if error is not None:
        panels += [lambda axes, order=order: draw_error(axes, error, order) for order in ORDERS]
    for model in bits["models"] if bits is not None else []:
        panels.append(lambda axes, model=model: draw_bits(axes, model))
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(6.2 * columns, 4.6 * rows + 0.9), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    grid = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes, panel in zip(grid, panels):
        panel(axes)
    for axes in grid[len(panels):]:
        axes.remove()
    labels = {label: line for axes in figure.axes for line, label in zip(*axes.get_legend_handles_labels())}
    figure.legend(labels.values(), labels, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    header = (error or bits or {})["header"]
    figure.suptitle(f"Sparse attention over density, {header.get('GPU', 'CPU, emulated')}, torch {header['torch']}; "
                    f"ours with its selection, the published methods' selections not timed", fontsize=9)
    return figure


def draw_error(axes: Any, values: dict, order: str) -> None:
    """Relative L1 error over the time of a call, as a multiple of the dense call's; over density without times."""
    rows = [row for row in values["rows"] if row["order"] in ((order, "tiles") if order == "cubes" else (order,))]
    has_times = values["rows"][0]["us"] is not None
    draw_lines(axes, rows, lambda row: (row["us"] / row["dense_us"] if has_times else row["density"],
                                        row["relative_l1"]))
    floor = next(row["relative_l1"] for row in values["rows"] if row["method"] == "ours, dense")
    axes.axhline(floor, color="#bbbbbb", linewidth=1.0, label="ours, dense")
    axes.set(title=f"fields of {' × '.join(map(str, values['size']))}: {ORDERS[order]}",
             xlabel="time of a call, that of the dense one = 1" if has_times else "density",
             ylabel="relative L1 error, mean of heads")
    finish(axes)


def draw_bits(axes: Any, model: dict) -> None:
    """Bits per byte above exact attention over density."""
    draw_lines(axes, model["rows"], lambda row: (row["density"], max(LEAST_ABOVE, row["above"])))
    floor = next(row["above"] for row in model["rows"] if row["method"] == "ours, dense")
    axes.axhline(max(LEAST_ABOVE, floor), color="#bbbbbb", linewidth=1.0, label="ours, dense")
    axes.set(title=f"language model, {model['name']}, {model['windows']} texts", xlabel="density, causal",
             ylabel="bits per byte above exact attention")
    finish(axes)


def draw_lines(axes: Any, rows: Iterable[dict], place: Callable[[dict], Point]) -> None:
    """A line for each method, in the order of the rows."""
    lines: dict[str, list[Point]] = defaultdict(list)
    kinds = {}
    for row in rows:
        if row["group"] != DENSE:
            lines[row["method"]].append(place(row))
            kinds[row["method"]] = row["group"], row["tail"]
    for method, points in lines.items():
        group, tail = kinds[method]
        axes.plot(*zip(*sorted(points)), DASHES[group], color=color_of(method), label=method, markersize=4.5,
                  marker="s" if "blocks of" in method else "o", markerfacecolor="white" if tail else None,
                  linewidth=1.8 if group == "ours" else 1.2)


def color_of(method: str) -> str:
    return COLORS[max((name for name in COLORS if method.startswith(name)), key=len)]


def finish(axes: Any) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_title(axes.get_title(), fontsize=9)
    axes.grid(axis="y", color="#e6e6e6")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    main()
