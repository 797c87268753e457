"""``sage-aot bench``: attention calls as models make them, by sage_aot and by torch, on this GPU.

Of each shape it takes the fastest of the backends of scaled_dot_product_attention, :func:`sage_aot.attn`, and
``sage_aot.integrations.torch.sdpa``, which leaves a call to torch where its policy expects it to be faster there.
Inputs are bf16, N(0, 1); every output is checked before it is timed. Quantization and all else that a call does counts.
Repeats of a call find its inputs in the L2 cache where they fit.
"""

from __future__ import annotations

import json
import random
import re
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from math import inf
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from sage_aot._call.api import attn
from sage_aot._cli.files import check_file, check_picture
from sage_aot._tools.reference import MIN_COSINE, measure
from sage_aot._version import __version__
from sage_aot.errors import ArgumentError, UnsupportedError
from sage_aot.integrations import Policy, report, reset_report, use
from sage_aot.integrations._calibration import chosen
from sage_aot.integrations._gain import KINDS
from sage_aot.integrations._report import SERVED
from sage_aot.integrations._rules import HostCall, check_gpu, key_mask_of
from sage_aot.integrations._serve import attend
from sage_aot.integrations.torch import sdpa

BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION,
            "efficient": SDPBackend.EFFICIENT_ATTENTION}
"""torch's own implementations; ``"sdpa"`` is the one that torch chooses."""

PADDING = 256
"""Keys that every second batch entry of a padded call does not have, or a quarter of its keys where that is less."""

SHOWN = 0.75
"""The part of the pairs that a mask of queries shows, drawn one by one: it hides no tile, so that none is saved."""


class Effort(NamedTuple):
    """The amount that is measured of each way."""

    rounds: int  # of which the shortest counts; the ways take turns, so that they meet the same clocks
    calls: int  # of one round at most: so many that the launch of the first does not count
    round_us: float  # time that a round may take; a call that is longer than this is measured alone
    warm_up_s: float  # the clock needs some tens of milliseconds of work to settle
    hopeless: float = inf  # a backend of torch that takes so many times as long as the fastest way has one round


THOROUGH = Effort(rounds=7, calls=200, round_us=15e3, warm_up_s=0.2)


# --- shapes -----------------------------------------------------------------------------------------------------------


class Shape(NamedTuple):
    """One call."""

    name: str
    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    headdim: int
    kind: str = "full"
    """Full or causal; padded: every second entry of the batch has fewer keys; masked: any mask of bools; window: a
    query sees its own key and a quarter of all in front of it."""

    def __str__(self) -> str:
        heads = f"{self.heads}/{self.kv_heads}" if self.kv_heads != self.heads else f"{self.heads}"
        rows = f"{self.queries}/{self.keys}" if self.keys != self.queries else f"{self.queries}"
        return f"{self.batch},{heads},{rows},{self.headdim}" + (f",{self.kind}" if self.kind != "full" else "")

    @property
    def window(self) -> tuple[int, int] | None:
        return (self.keys // 4, 0) if self.kind == "window" else None

    @classmethod
    def of(cls, text: str) -> Shape:
        """``"1,32/8,512/8192,128"`` → 1 entry, 32 heads of q and 8 of k and v, 512 queries, 8192 keys, headdim 128.

        Raises:
            ArgumentError: the text is no shape, or attention has none like it.
        """
        number = r"([1-9]\d*)"
        pair = rf"{number}(?:/{number})?"
        if (found := re.fullmatch(rf"{number},{pair},{pair},{number}(?:,({'|'.join(KINDS)}))?", text)) is None:
            raise ArgumentError(f"--shape: expected batch,heads[/kv heads],queries[/keys],headdim[,kind], the kind one "
                                f"of {', '.join(KINDS)}, such as 1,32/8,512/8192,128, got {text!r}")
        batch, heads, kv_heads, queries, keys, headdim, kind = found.groups()
        shape = cls(text, int(batch), int(heads), int(kv_heads or heads), int(queries), int(keys or queries),
                    int(headdim), kind or "full")
        if shape.heads % shape.kv_heads:
            raise ArgumentError(f"--shape: expected heads that are a multiple of kv heads, got {text!r}")
        if shape.kind == "causal" and shape.queries != shape.keys:
            raise ArgumentError(f"--shape: expected as many keys as queries of a causal call, got {text!r}: torch and "
                                f"sage_aot align its mask at different corners")
        if shape.kind == "window" and shape.queries > shape.keys:
            raise ArgumentError(f"--shape: expected at least as many keys as queries of a call with a window, got "
                                f"{text!r}: the first queries would see none")
        return shape


USES = (
    Shape("image: SDXL 1024²", 2, 10, 10, 4096, 4096, 64),
    Shape("image: SDXL 1024², inner", 2, 20, 20, 1024, 1024, 64),
    Shape("image: SD3.5 large 1024²", 2, 38, 38, 4429, 4429, 64),
    Shape("image: Flux 512²", 1, 24, 24, 1536, 1536, 128),
    Shape("image: Flux 1024²", 1, 24, 24, 4608, 4608, 128),
    Shape("image: Qwen-Image, 2 prompts", 2, 24, 24, 5120, 5120, 128, "padded"),
    Shape("video: CogVideoX 2B", 2, 30, 30, 17776, 17776, 64),
    Shape("video: HunyuanVideo 480p", 1, 24, 24, 33536, 33536, 128, "padded"),
    Shape("video: Wan 1.3B 480p", 1, 12, 12, 32760, 32760, 128),
    Shape("video: Wan 14B 480p", 1, 40, 40, 32760, 32760, 128),
    Shape("video: Wan 14B 720p", 1, 40, 40, 75600, 75600, 128),
    *(Shape(f"prompt: Llama 3 8B, {n}", 1, 32, 8, n, n, 128, "causal") for n in (2048, 8192, 32768)),
    *(Shape(f"chunk: Llama 3 8B, 512 of {n}", 1, 32, 8, 512, n, 128) for n in (8192, 32768)),
    *(Shape(f"decode: Llama 3 8B, {n} × 8192", n, 32, 8, 1, 8192, 128) for n in (1, 16)),
    Shape("decode: Llama 3 8B, 16 drafts", 1, 32, 8, 16, 8192, 128),
    Shape("cross: SDXL 1024²", 2, 10, 10, 4096, 77, 64),
    Shape("cross: Wan 14B 480p", 1, 40, 40, 32760, 512, 128),
    Shape("cross: Wan 14B 720p", 1, 40, 40, 75600, 512, 128),
    Shape("encoder: MiniLM, 128", 64, 12, 12, 128, 128, 32),
    Shape("encoder: ViT, 197", 32, 12, 12, 197, 197, 64),
    Shape("encoder: BERT, 512", 32, 12, 12, 512, 512, 64),
    Shape("encoder: BERT, 512, padded", 32, 12, 12, 512, 512, 64, "padded"),
    Shape("encoder: Whisper, 1500", 8, 20, 20, 1500, 1500, 64),
)
"""Calls of models in use: batch, heads, kv heads, queries, keys, headdim."""


# --- measuring --------------------------------------------------------------------------------------------------------


class Times(NamedTuple):
    """Microseconds of a call."""

    gpu: float  # the GPU's time alone, by replaying a CUDA graph
    wall: float  # of a call among calls that are queued back to back; the host's time where that is longer


@dataclass(frozen=True)
class Row:
    """A shape, and the times of each way to compute it that takes it: sdpa, those of BACKENDS, attn and policy."""

    shape: Shape
    served: bool  # whether the policy gives the call to sage_aot
    ways: dict[str, Times]

    def best(self) -> Times:
        """The fastest of torch's backends."""
        torchs = [times for way, times in self.ways.items() if way not in ("attn", "policy")]
        return Times(min(times.gpu for times in torchs), min(times.wall for times in torchs))

    def ratio(self, way: str) -> Times:
        """The speed as a multiple of that of torch's fastest backend."""
        best, times = self.best(), self.ways[way]
        return Times(best.gpu / times.gpu, best.wall / times.wall)

    def to_json(self) -> dict[str, object]:
        return {**self.shape._asdict(), "served": self.served,
                "ways": {way: times._asdict() for way, times in self.ways.items()}}

    def cells(self) -> list[str]:
        best, call, policy = self.best(), self.ratio("attn"), self.ratio("policy")
        fastest = min((way for way in self.ways if way in BACKENDS), key=lambda way: self.ways[way].gpu, default="sdpa")
        return [self.shape.name, str(self.shape), f"{best.gpu:.1f}", fastest, f"{self.ways['attn'].gpu:.1f}",
                f"{call.gpu:.2f}", "sage_aot" if self.served else "torch", f"{policy.gpu:.2f}", f"{policy.wall:.2f}"]


COLUMNS = ("call", "shape", "torch, µs", "backend", "attn, µs", "attn, × gpu", "served by", "policy, × gpu",
           "policy, × queued")


class Way(NamedTuple):
    """A way to compute a shape."""

    work: Callable[[], torch.Tensor]
    backend: SDPBackend | None = None  # of torch's, to choose around the work; choosing takes no part of its time

    def chosen(self) -> AbstractContextManager[None]:
        return nullcontext() if self.backend is None else sdpa_kernel(self.backend)


def measured(shape: Shape) -> Row:
    """Every way to compute a shape, checked and timed.

    Raises:
        UnsupportedError: no kernel for this GPU or shape, or an output is wrong.
    """
    ways = ways_of(shape)
    expected = ways["sdpa"].work()
    for way in ("attn", "policy"):
        check_output(f"{way} of {shape}", ways[way].work(), expected)
    reset_report()
    ways["policy"].work()
    return Row(shape, SERVED in report(), timed(ways))


def ways_of(shape: Shape) -> dict[str, Way]:
    """The ways to compute a shape, by name; without those of torch's backends that do not take it."""
    q, k, v = (torch.randn(shape.batch, heads, rows, shape.headdim, device="cuda", dtype=torch.bfloat16)
               for heads, rows in ((shape.heads, shape.queries), *[(shape.kv_heads, shape.keys)] * 2))
    is_causal, grouped = shape.kind == "causal", shape.heads != shape.kv_heads
    mask = mask_of(shape, "cuda")
    ours = HostCall(q, k, v, None if shape.kind == "window" else mask, is_causal, grouped=grouped,
                    bottom_right=shape.kind == "window", window=shape.window)

    def torchs() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal, enable_gqa=grouped)

    ways = {"sdpa": Way(torchs), **{name: Way(torchs, backend) for name, backend in BACKENDS.items()}}
    ways = {name: way for name, way in ways.items() if _takes_it(way)}
    key_mask = key_mask_of(ours)
    ways["attn"] = Way(lambda: attn(q, k, v, key_mask=key_mask, is_causal=is_causal, window=shape.window,
                                    attn_mask=mask if shape.kind == "masked" else None))
    ways["policy"] = Way(lambda: attend(ours, torchs)) if shape.kind == "window" else Way(
        lambda: sdpa(q, k, v, mask, is_causal=is_causal, enable_gqa=grouped))  # which has no window
    return ways


def mask_of(shape: Shape, device: str) -> torch.Tensor | None:
    """The mask by which torch computes a shape; None where it needs none."""
    if shape.kind == "padded":
        key_mask = torch.ones(shape.batch, shape.keys, dtype=torch.bool, device=device)
        key_mask[::2, shape.keys - min(PADDING, shape.keys // 4):] = False
        return key_mask[:, None, None, :]
    if shape.kind == "masked":
        return torch.rand(shape.batch, 1, shape.queries, shape.keys, device=device) < SHOWN
    if shape.window is None:
        return None
    own, (left, right) = shape.keys - shape.queries, shape.window  # the first query's key
    whole = torch.ones(1, 1, shape.queries, shape.keys, dtype=torch.bool, device=device)
    return whole.tril(own + right).triu(own - left)


def _takes_it(way: Way) -> bool:
    """True where a backend of torch computes it; torch says why not in warnings."""
    with way.chosen(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            way.work()
        except torch.cuda.OutOfMemoryError:
            raise
        except RuntimeError:
            return False
    return True


def check_output(what: str, out: torch.Tensor, expected: torch.Tensor) -> None:
    heads = zip(out.flatten(0, 1), expected.flatten(0, 1))  # one at a time, in float64, takes little memory
    cosine = min(measure(ours, theirs).cosine for ours, theirs in heads)
    if not cosine >= MIN_COSINE:  # NaN is wrong, too
        raise UnsupportedError(f"{what}: expected a cosine of at least {MIN_COSINE} with torch's attention, got "
                               f"{cosine}; nothing was timed. Run `sage-aot verify`, and report what it prints")


def timed(ways: dict[str, Way], effort: Effort = THOROUGH) -> dict[str, Times]:
    """The times of all ways, measured in turns, in another order each round: none always follows the one that heats
    the GPU most."""
    timers = {name: _Timer(way, effort) for name, way in ways.items()}
    least = {name: Times(inf, inf) for name in ways}
    order = random.Random(0)
    for _ in range(effort.rounds):
        for name in order.sample(list(timers), len(timers)):
            least[name] = Times(*map(min, least[name], timers[name].measure()))
        fastest = Times(*map(min, zip(*least.values())))
        for name in BACKENDS.keys() & timers.keys():
            if all(took > effort.hopeless * best for took, best in zip(least[name], fastest)):
                del timers[name]
    return least


class _Timer:
    """Measures a way, which it has warmed up."""

    def __init__(self, way: Way, effort: Effort) -> None:
        self._way = way
        deadline = time.perf_counter() + effort.warm_up_s
        took = inf
        with way.chosen():
            while time.perf_counter() < deadline or took == inf:
                took = min(took, _microseconds(way.work))
        self._calls = max(1, min(effort.calls, int(effort.round_us / took)))
        self._graph = torch.cuda.CUDAGraph()
        with way.chosen(), torch.cuda.graph(self._graph):
            self._queue()

    def measure(self) -> Times:
        with self._way.chosen():
            return Times(self._gpu() / self._calls, _microseconds(self._queue) / self._calls)

    def _gpu(self) -> float:
        """A replay behind another, so that its launch does not count."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        self._graph.replay()
        begin.record()
        self._graph.replay()
        end.record()
        end.synchronize()
        return 1e3 * float(begin.elapsed_time(end))

    def _queue(self) -> None:
        for _ in range(self._calls):
            self._way.work()


def _microseconds(work: Callable[[], object]) -> float:
    """Time of work from an idle GPU to an idle GPU."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return 1e6 * (time.perf_counter() - began)


# --- the command ------------------------------------------------------------------------------------------------------


def main(shapes: list[str], png: str, file: str | None) -> int:
    """Measure, print a table, draw to `png`, and write all times to `file`. Without `shapes`, those of USES."""
    wanted = [Shape.of(text) for text in shapes] or USES
    if not torch.cuda.is_available():
        raise UnsupportedError(f"bench: expected a CUDA GPU, torch {torch.__version__} finds none; run it on a machine "
                               f"with a GPU and a CUDA build of torch")
    check_gpu()
    check_picture("bench", png)
    if file is not None:
        check_file("bench", file)
    if find_spec("matplotlib") is None:
        print("no picture will be written: pip install matplotlib\n")
    header = {"GPU": torch.cuda.get_device_name(), "sage_aot": __version__,
              "torch": f"{torch.__version__} (CUDA {torch.version.cuda})",
              "thresholds": chosen(torch.cuda.current_device()).source,
              "inputs": "bf16, N(0, 1), in the L2 cache where they fit"}
    print("\n".join(f"- {name}: {value}" for name, value in header.items()))
    print(f"\n| {' | '.join(COLUMNS)} |\n|---|---|---:|---|---:|---:|---|---:|---:|", flush=True)
    rows = []
    with torch.inference_mode(), use(Policy()):
        for shape in wanted:
            try:
                rows.append(measured(shape))
            except torch.cuda.OutOfMemoryError:
                print(f"| {shape.name} | {shape} | more memory than this GPU has |", flush=True)
                continue
            print(f"| {' | '.join(rows[-1].cells())} |", flush=True)
    if file is not None:
        Path(file).write_text(json.dumps({"header": header, "rows": [row.to_json() for row in rows]}, indent=1,
                                         ensure_ascii=False) + "\n", "utf-8")
    draw(png, rows, header["GPU"])
    return 0


def draw(png: str, rows: list[Row], gpu: str) -> None:
    """Bars: how many times as fast as the fastest of torch's backends, of a call and with the policy."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        print(f"\nno picture: {error}")
        return
    figure = Figure(figsize=(8, 1.5 + 0.3 * len(rows)), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    places = range(len(rows))
    axes.barh([place - 0.2 for place in places], [row.ratio("attn").gpu for row in rows], 0.38, color="#c9ccd3",
              label="sage_aot.attn")
    bars = axes.barh([place + 0.2 for place in places], [row.ratio("policy").gpu for row in rows], 0.38,
                     color="#2a6fbb", label="integrations.torch.sdpa: sage_aot or torch, as the policy decides")
    axes.bar_label(bars, fmt="%.2f", padding=2, fontsize=7, color="#444444")
    axes.axvline(1, color="#444444", linewidth=0.8)
    axes.set_yticks(places, [row.shape.name for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set(xlabel="speed, as a multiple of the fastest backend of scaled_dot_product_attention",
             title=f"Attention calls in bf16, quantization included, {gpu}")
    figure.legend(frameon=False, fontsize=8, loc="outside lower center", ncols=2)
    axes.margins(y=0.01)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(png)
    print(f"\nwrote {png}")
