"""Draw the rows of bench/speed.py: TOPS over sequence length, a panel per head dim and mask.

    python bench/plot.py speed.json other.json --out speed.png

Where two files hold the same row of the same shape, the later file's row is drawn.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

Panel = tuple[int, str]
"""Head dim and mask."""

SDPA_STYLES = {
    "sdpa_flash_bf16": {"color": "#9aa0a8", "linestyle": "--", "label": "SDPA flash, bf16"},
    "sdpa_cudnn_bf16": {"color": "#4d525a", "linestyle": "--", "label": "SDPA cuDNN, bf16"},
}
ARCH_COLORS = ("#2a6fbb", "#d1495b", "#2f9e6e", "#e0912f", "#7b5ea7")
"""Colors of the archs, in the order in which the archs come. Lines of `call` are solid, of `kernel` dotted."""


def main() -> None:
    arguments = parse()
    files = [json.loads(path.read_text()) for path in arguments.files]
    draw(panels(row for file in files for row in file["rows"]), files[-1]["header"]).savefig(arguments.out)
    print(f"wrote {arguments.out}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="JSON", help="written by bench/speed.py --json")
    parser.add_argument("--out", type=Path, required=True, metavar="PNG", help="picture to write")
    return parser.parse_args()


def panels(rows: Iterable[dict]) -> dict[Panel, dict[str, dict[int, float]]]:
    """TOPS by panel, row name and sequence length; rows without TOPS, the quantizers', are left out."""
    result: dict[Panel, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        if row["tops"] is not None:
            result[row["headdim"], row["mask"]][row["row"]][row["seqlen"]] = row["tops"]
    return result


def styles(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Line style by row name; SDPA first, then the archs in order."""
    ours = sorted(set(names) - SDPA_STYLES.keys())
    archs = list(dict.fromkeys(name.split()[0] for name in ours))
    colors = {arch: ARCH_COLORS[i % len(ARCH_COLORS)] for i, arch in enumerate(archs)}
    lines = {"call": "-", "kernel": ":"}
    return SDPA_STYLES | {name: {"color": colors[name.split()[0]], "linestyle": lines[name.split()[1]],
                                 "label": f"sage_aot {name}"} for name in ours}


def draw(by_panel: dict[Panel, dict[str, dict[int, float]]], header: dict[str, str]) -> Figure:
    headdims, masks = ([*dict.fromkeys(part)] for part in zip(*sorted(by_panel, key=lambda p: (p[0], p[1] != "full"))))
    style = styles(name for lines in by_panel.values() for name in lines)
    figure = Figure(figsize=(5.2 * len(masks), 3.6 * len(headdims) + 0.9), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(headdims), len(masks), squeeze=False, sharey="row")
    for i, headdim in enumerate(headdims):
        for j, mask in enumerate(masks):
            draw_panel(grid[i][j], f"head dim {headdim}, {mask}", by_panel.get((headdim, mask), {}), style)
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    figure.suptitle(f"Attention on {header['GPU']}, {header['inputs']}, torch {header['torch']}", fontsize=10)
    return figure


def draw_panel(axes: Any, title: str, lines: dict[str, dict[int, float]], style: dict[str, dict[str, str]]) -> None:
    """One line per row name, in the order of `style`."""
    seqlens = sorted({seqlen for points in lines.values() for seqlen in points})
    for name in (name for name in style if name in lines):
        points = sorted(lines[name].items())
        axes.plot(*zip(*points), marker="o", markersize=4, linewidth=1.8, **style[name])
    axes.set_xscale("log", base=2)
    axes.set_xticks(seqlens, [f"{seqlen // 1024}k" if seqlen % 1024 == 0 else str(seqlen) for seqlen in seqlens])
    axes.minorticks_off()
    axes.set(xlabel="sequence length (tokens)", ylabel="TOPS", title=title, ylim=(0, None))
    axes.grid(axis="y", color="#e6e6e6")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    main()
