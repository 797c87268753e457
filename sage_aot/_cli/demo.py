"""``sage-aot demo``: attention on the activations of a pretrained transformer, measured against float64.

The demo runs on the GPU where kernels for it exist, else by emulation. Without the packages of the extra ``demo`` it
measures outlier tensors instead, and says so. demo_inputs.py has the activations, _tools/reference.py exact attention
and error measures.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch

from sage_aot._backends.cuda.device import arch_of
from sage_aot._backends.emulation.backend import emulated_arch
from sage_aot._call.api import attn
from sage_aot._call.backends import default_library
from sage_aot._cli.demo_inputs import EXTRA, QKV, Workload, workload_on
from sage_aot._cli.files import check_picture
from sage_aot._tools import reference
from sage_aot._tools.explain import explain
from sage_aot._tools.reference import MIN_COSINE, Accuracy
from sage_aot._version import __version__
from sage_aot.errors import UnsupportedError

VARIANTS: dict[str, dict[str, Any]] = {
    "full": {"is_causal": False, "smooth_k": True},
    "full, K not smoothed": {"is_causal": False, "smooth_k": False},
    "causal": {"is_causal": True, "smooth_k": True},
}
"""Variants in which every layer is measured, as arguments of :func:`sage_aot.attn`."""

SHOWN = "full"
"""The variant whose outputs the picture shows."""


def main(png: str) -> int:
    """Measure, print, and draw to the file `png`. Returns the exit code: 1 where a cosine is below MIN_COSINE.

    Raises:
        ArgumentError: there is no folder for `png`, or matplotlib writes no such format.
    """
    check_picture("demo", png)
    device, backend = _backend()
    print(f"sage_aot {__version__}, {backend}")
    with torch.inference_mode():
        workload = workload_on(device)
        print(f"inputs: {workload.text}")
        for name in _kernel_names(workload.layers["0"][0]):
            print(f"{'kernel' if device.type == 'cuda' else 'emulated kernel'}: {name}")
        layers = [_measure(name, inputs) for name, inputs in workload.layers.items()]
    print(_report(workload, layers))
    broken = _broken(workload, layers)
    if broken:
        print(f"sage_aot demo: {broken}", file=sys.stderr)
        return 1
    _draw(png, backend, workload, layers)
    return 0


# --- where it runs ----------------------------------------------------------------------------------------------------


def _backend() -> tuple[torch.device, str]:
    """Device of the tensors, and a text that names where the kernels run."""
    library = default_library()
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
        try:
            arch_of(library, device.index)
            return device, f"on {torch.cuda.get_device_name(device)}"
        except UnsupportedError as error:
            print(f"the GPU stays idle: {error}")
    return torch.device("cpu"), f"CPU emulation of the {emulated_arch(library.manifest)} kernels"


def _kernel_names(inputs: QKV) -> list[str]:
    """Names of the attention kernels that the variants run on these inputs."""
    chosen = (explain(*inputs, **flags).kernels for flags in VARIANTS.values())
    return list(dict.fromkeys(kernels.attn.spec.name for kernels in chosen if kernels is not None))


# --- how close it comes -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layer:
    """One row of the report."""

    name: str
    accuracies: dict[str, Accuracy]  # by variant
    ours: torch.Tensor  # every output of the variant SHOWN, flat, float64 on the CPU
    exact: torch.Tensor  # likewise, by exact attention


def _measure(name: str, inputs: list[QKV]) -> Layer:
    """Every variant on the inputs of one layer, all texts taken together."""
    accuracies, sides = {}, {}
    for variant, flags in VARIANTS.items():
        ours = _flat(attn(*qkv, **flags) for qkv in inputs)
        exact = _flat(reference.attention(*qkv, is_causal=flags["is_causal"])[0] for qkv in inputs)
        accuracies[variant], sides[variant] = reference.measure(ours, exact), (ours, exact)
    return Layer(name, accuracies, *sides[SHOWN])


def _flat(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.double().flatten().cpu() for tensor in tensors])


def _broken(workload: Workload, layers: list[Layer]) -> str | None:
    """A sentence that says what is wrong, or None. Variants without smoothed K may have any error, and do not count."""
    found = {f"{workload.row} {layer.name}, {variant}": result.cosine for layer in layers
             for variant, result in layer.accuracies.items() if VARIANTS[variant]["smooth_k"]}
    found |= {f"embedding of text {i}": cosine for i, cosine in enumerate(workload.embedding_cosines)}
    wrong = [f"{what} {cosine:.6f}" for what, cosine in found.items() if not cosine >= MIN_COSINE]
    if not wrong:
        return None
    return (f"the results are wrong: expected a cosine of at least {MIN_COSINE} with exact attention, got "
            f"{'; '.join(wrong)}. Rebuild the kernels with `python -m codegen build`; if that does not help, report "
            f"this output with that of `python -m sage_aot info`")


# --- what it shows ----------------------------------------------------------------------------------------------------


def _report(workload: Workload, layers: list[Layer]) -> str:
    """The tables, in plain text."""
    lines = ["", "error against float64 attention on the same bf16 inputs", ""]
    lines.append("       " + "".join(f" | {variant:^27}" for variant in VARIANTS))
    lines.append(f"{workload.row:<7}" + f" | {'cosine':>8} {'rel. L1':>8} {'RMSE':>9}" * len(VARIANTS))
    lines.append("-" * 7 + ("-+-" + "-" * 27) * len(VARIANTS))
    for layer in layers:
        cells = (f" | {a.cosine:8.6f} {a.relative_l1:8.4f} {a.rmse:9.2e}" for a in layer.accuracies.values())
        lines.append(f"{layer.name:>5}  " + "".join(cells))
    cosines = workload.embedding_cosines
    if cosines:
        lines += ["", "cosine between the model's embeddings of a text, float32 attention against sage_aot.attn:",
                  "  " + " ".join(f"{cosine:.6f}" for cosine in cosines),
                  f"  min {min(cosines):.6f}, mean {fmean(cosines):.6f}"]
    return "\n".join(lines)


def _draw(png: str, backend: str, workload: Workload, layers: list[Layer]) -> None:
    """Draw the error per layer, and every output against the exact one."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        print(f"no picture: {error}; {EXTRA}")
        return
    figure = Figure(figsize=(11, 4.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"sage_aot {__version__}, {backend}\n{workload.text}", fontsize=9)
    errors, outputs = figure.subplots(1, 2)
    _draw_errors(errors, layers, workload.row)
    _draw_outputs(outputs, layers)
    figure.savefig(png)
    print(f"\nwrote {png}")


def _draw_errors(axes: Any, layers: list[Layer], row: str) -> None:
    """Bars: relative L1 per layer or draw, K smoothed and not."""
    width = 0.38
    for offset, variant, color, label in ((-width / 2, "full, K not smoothed", "#c9ccd3", "K not smoothed"),
                                          (width / 2, "full", "#2a6fbb", "K smoothed (default)")):
        heights = [100 * layer.accuracies[variant].relative_l1 for layer in layers]
        bars = axes.bar([i + offset for i in range(len(layers))], heights, width, color=color, label=label)
        axes.bar_label(bars, fmt="%.1f", padding=2, fontsize=8, color="#444444")
    axes.set_xticks(range(len(layers)), [layer.name for layer in layers])
    axes.set(xlabel=row, ylabel="relative L1 error (%)", title="Error against float64 attention")
    axes.margins(y=0.2)
    axes.legend(frameon=False, loc="upper left", ncols=2)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_outputs(axes: Any, layers: list[Layer]) -> None:
    """Two-dimensional histogram of every output of every layer against the exact one."""
    from matplotlib.colors import LogNorm

    ours, exact = torch.cat([layer.ours for layer in layers]), torch.cat([layer.exact for layer in layers])
    limit = max(ours.abs().max().item(), exact.abs().max().item())
    *_, image = axes.hist2d(exact.numpy(), ours.numpy(), bins=160, range=[[-limit, limit]] * 2, norm=LogNorm(),
                            cmap="viridis", rasterized=True)
    axes.figure.colorbar(image, ax=axes, label="outputs per cell", shrink=0.9)
    axes.axline((0, 0), slope=1, color="#d1495b", linewidth=0.6)
    axes.set(xlabel="float64 attention", ylabel="sage_aot.attn", aspect="equal",
             title=f"All {ours.numel():,} outputs, cosine {reference.measure(ours, exact).cosine:.5f}")
