"""Draw the runs of bench/train.py: loss over steps by attention, and the difference of the pairs of one seed.

    python bench/plot_training.py DIR --out docs/training.png
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

Curve = dict[int, float]
"""Bits per byte by step."""

STYLES = {"bf16": ("#9aa0a8", 1.8, "torch SDPA, bf16"), "sage": ("#d1495b", 0.7, "sage_aot.train_attn, 8 bits")}
"""Color, line width and label by attention, in the order in which they are drawn: the lines below are wider, or those
above would hide them."""

TITLES = {"pretrain": "pretraining, from random weights", "finetune": "finetuning, from one bf16 checkpoint"}
HIDDEN = 0.08
"""Share of the steps at the start whose losses may lie above the panel, so that the rest can be told apart."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR", help="written by bench/train.py --out")
    parser.add_argument("--out", type=Path, default=Path("docs/training.png"), metavar="PNG",
                        help="picture to write (default: %(default)s)")
    arguments = parser.parse_args()
    runs = [json.loads(path.read_text()) for path in sorted(arguments.folder.glob("*-seed*.json"))]
    if not runs:
        parser.error(f"{arguments.folder} holds no file such as pretrain-sage-seed0.json")
    draw(runs).savefig(arguments.out)
    print(f"wrote {arguments.out}")


def draw(runs: list[dict]) -> Figure:
    """A column per mode: losses above, differences below."""
    modes = [mode for mode in TITLES if any(run["config"]["mode"] == mode for run in runs)]
    figure = Figure(figsize=(5.2 * len(modes), 5.4), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(2, len(modes), squeeze=False, sharex="col", height_ratios=(2, 1))
    for column, mode in enumerate(modes):
        of_mode = [run for run in runs if run["config"]["mode"] == mode]
        draw_losses(grid[0][column], TITLES[mode], of_mode)
        draw_differences(grid[1][column], of_mode)
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    header, size = runs[0]["header"], f"{runs[0]['parameters'] / 1e6:.1f} M parameters"
    figure.suptitle(f"{size}, {runs[0]['config']['context']} tokens, a line per seed, {header.get('GPU', 'CPU')}, "
                    f"torch {header['torch']}", fontsize=9)
    return figure


def draw_losses(axes: Any, title: str, runs: list[dict]) -> None:
    """A line per run, and a dot for each evaluation on the text held out."""
    shown = []
    for attention, (color, width, label) in STYLES.items():
        mine = [run for run in runs if run["config"]["attention"] == attention]
        for i, run in enumerate(mine):
            trained, held_out = curve_of(run), held_out_of(run)
            axes.plot(*zip(*trained.items()), color=color, linewidth=width, label=None if i else f"{label}, training")
            axes.plot(*zip(*held_out.items()), color=color, marker="o", markersize=2 + 2 * width, linestyle="",
                      label=None if i else f"{label}, held out")
            shown += [bits for part in (trained, held_out) for step, bits in part.items()
                      if step > HIDDEN * run["config"]["steps"]]
    margin = 0.05 * (max(shown) - min(shown))
    axes.set(title=title, ylabel="bits per byte", ylim=(min(shown) - margin, max(shown) + margin))
    finish(axes)


def draw_differences(axes: Any, runs: list[dict]) -> None:
    """Training loss of sage less that of bf16 on the same batches, a thin line per seed."""
    by_seed: dict[int, dict[str, Curve]] = defaultdict(dict)
    for run in runs:
        by_seed[run["config"]["seed"]][run["config"]["attention"]] = curve_of(run)
    for pair in by_seed.values():
        if len(pair) == len(STYLES):
            steps = sorted(pair["sage"].keys() & pair["bf16"].keys())
            axes.plot(steps, [pair["sage"][step] - pair["bf16"][step] for step in steps], color=STYLES["sage"][0],
                      linewidth=STYLES["sage"][1])
    axes.axhline(0.0, color=STYLES["bf16"][0], linewidth=STYLES["bf16"][1], zorder=1)
    axes.set(xlabel="step", ylabel="sage − bf16")
    finish(axes)


def curve_of(run: dict) -> Curve:
    return {point["step"]: point["bits"] for point in run["curve"]}


def held_out_of(run: dict) -> Curve:
    """Bits of the held-out text by step, with the attention that the run was trained with."""
    return {entry["step"]: entry["bits"] for entry in run["evals"] if entry["attention"] == run["config"]["attention"]}


def finish(axes: Any) -> None:
    axes.grid(axis="y", color="#e6e6e6")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    main()
