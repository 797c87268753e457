"""Draw the tables of `bench/accuracy.py tables`: relative L1 error per method and source, average and worst.

    python bench/plot_accuracy.py tables.json --out tables.svg
"""

from __future__ import annotations

import argparse
import json
import textwrap
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, PercentFormatter

from accuracy_tables import Result, Summary, summaries

COLORS = ("#2a6fbb", "#d1495b", "#2f9e6e", "#e0912f", "#7b5ea7", "#4d525a")
"""Colors of a table's sources, in the order in which the sources come."""

PANELS_PER_ROW = 2
LEGEND_COLUMNS = 4
LINE = 84  # characters that fit below a panel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, metavar="JSON", help="written by bench/accuracy.py tables --json")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="SVG or PNG to write")
    arguments = parser.parse_args()
    draw(json.loads(arguments.file.read_text())).savefig(arguments.out)
    print(f"wrote {arguments.out}")


def draw(values: dict) -> Figure:
    """A panel per table of the JSON."""
    rows = -(-len(values["tables"]) // PANELS_PER_ROW)
    figure = Figure(figsize=(7.0 * PANELS_PER_ROW, 3.3 * rows + 0.6), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    grid = list(figure.subplots(rows, PANELS_PER_ROW, squeeze=False).flat)
    for axes, table in zip(grid, values["tables"]):
        draw_table(axes, table["title"], summaries([Result.from_json(row) for row in table["rows"]]))
    for axes in grid[len(values["tables"]):]:
        axes.remove()
    figure.suptitle("Relative L1 error against float64 attention: bars average, lines worst", fontsize=11)
    return figure


def draw_table(axes: Any, title: str, rows: list[Summary]) -> None:
    """A group of bars per method, a bar per source."""
    methods, sources = ([*dict.fromkeys(part)] for part in zip(*((row.method, row.source) for row in rows)))
    width = 0.8 / len(sources)
    for i, source in enumerate(sources):
        mine = [row for row in rows if row.source == source]
        x = [methods.index(row.method) + (i - (len(sources) - 1) / 2) * width for row in mine]
        average, worst = ([getattr(row, kind).relative_l1 for row in mine] for kind in ("average", "worst"))
        axes.bar(x, average, width * 0.92, color=COLORS[i % len(COLORS)], label=source)
        axes.vlines(x, average, worst, color="#555555", linewidth=1.0)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=2))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xticks(range(len(methods)), [textwrap.fill(method, LINE // len(methods)) for method in methods],
                    fontsize=7)
    axes.set_title(title, fontsize=9, pad=30)
    legend = axes.legend(frameon=False, fontsize=7, ncols=LEGEND_COLUMNS, loc="lower center",
                         bbox_to_anchor=(0.5, 0.98))
    legend.set_in_layout(False)  # a legend wider than its panel must not make the panel narrower
    axes.grid(axis="y", color="#e6e6e6")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    main()
