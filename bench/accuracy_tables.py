"""The tables of the SageAttention2 paper on our inputs: the methods they compare, the inputs, and their averages.

A table varies one setting and holds all others at the kernels' own. Its figures are errors of bench/emulator.py against
attention in float64: average and worst over the cases of a source of inputs, as the paper gives them over the layers of
a model.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from statistics import fmean
from types import ModuleType

import torch

import common
import emulator
from emulator import Method
from sage_aot._backends.loader import Library
from sage_aot._cli import demo_inputs
from sage_aot._tools import reference
from sage_aot._tools.reference import Accuracy
from sage_aot.errors import ArgumentError

QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""q, k and v, each [batch, heads, seq, headdim], f16 or bf16."""

V_BIAS = 8.0
"""Offset that is added to every channel of V, about as large as in video models. Source: SageAttention2, appendix
A.3."""

CLIP = 0.8
"""One clip for all groups, as in earlier kernels; today's search a clip for each group. 0.8 was the best of 1, 0.95,
0.9, ... 0.7 on N(0, 1) at head dim 64."""

LONG_QUERIES = 256
"""Queries of a case with many keys."""

DEMO = "demo model"
COLUMNS = ("inputs", "method", "cosine", "relative L1", "RMSE", "worst cosine", "worst relative L1", "worst RMSE")


# --- what is varied ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Table:
    """One table: methods that differ in one setting, by the words for their values of it."""

    name: str
    title: str
    methods: dict[str, Method]
    v_bias: float = 0.0  # added to V
    long: bool = False  # True: measured on the cases of few queries and many keys alone; False: on all others


DEFAULT = {8: Method(bits=8, smoothing="k"), 4: Method(bits=4, smoothing="qk")}
"""Default methods by bits: the paper's. At 8 bits sage_aot.attn on sm89 does the same."""

WORDS = {8: "8 bits", 4: "4 bits not clipped"}
"""Words for DEFAULT in titles, by bits."""


def tables() -> list[Table]:
    per_bits = [table(bits) for table in (granularity, smoothing, pv_types) for bits in (4, 8)]
    per_bias = [table(v_bias) for table in (smooth_v, accumulators) for v_bias in (0.0, V_BIAS)]
    return [*per_bits, pv_types_biased(), *per_bias, bits_and_pv()]


def exact_pv(method: Method) -> Method:
    """The method with P and V in f16, which leaves the error of Q·K."""
    return replace(method, pv="f16", accumulator="f32")


OURS = {8: DEFAULT[8], 4: replace(DEFAULT[4], granularity="kernel", clip=None, rotate=True)}
"""Methods of sage_aot.attn by bits: its quantization of Q and K by default, with statistics of the whole sequence."""

AS_SHIPPED = [method for default in OURS.values() for method in (exact_pv(default), default)]
"""OURS with P and V in f16, and in E4M3 (sm89)."""


def granularity(bits: int) -> Table:
    base = exact_pv(DEFAULT[bits])
    methods = {f"per {name}": replace(base, granularity=name) for name in emulator.GROUPS if name != "kernel"}
    return Table(f"granularity-{bits}", f"Granularity of the scales of Q and K, {WORDS[bits]}, P and V in f16", methods)


def smoothing(bits: int) -> Table:
    base = exact_pv(replace(DEFAULT[bits], smoothing=""))
    methods = {
        "none": base, "HadmdAttn": replace(base, transform="hadamard"),
        "SmoothAttn": replace(base, transform="smooth_attn"),
        "smooth K": replace(base, smoothing="k"), "smooth Q": replace(base, smoothing="q"),
        "smooth Q+K": replace(base, smoothing="qk"),
        "smooth Q+K, rotated": replace(base, smoothing="qk", transform="hadamard"),
    }
    if bits == 4:
        methods |= {f"{name}, clipped": replace(methods[name], clip=CLIP)
                    for name in ("smooth Q+K", "smooth Q+K, rotated")}
    return Table(f"smoothing-{bits}", f"Smoothing of Q and K, {bits} bits per thread, P and V in f16", methods)


PV_TYPES = {"INT8": "int8", "E5M2": "e5m2", "E4M3": "e4m3", "f16": "f16"}
"""Types of P and V, by the paper's words for them."""


def pv_types(bits: int) -> Table:
    methods = {name: replace(DEFAULT[bits], pv=pv, accumulator="f32") for name, pv in PV_TYPES.items()}
    return Table(f"pv-{bits}", f"Type of P and V, Q and K in {WORDS[bits]}, f32 accumulators", methods)


def pv_types_biased() -> Table:
    plain = pv_types(8)
    smoothed = {f"{name}, V smoothed": replace(plain.methods[name], smooth_v=True) for name in ("INT8", "E4M3")}
    return Table(*_biased(plain.name, plain.title, V_BIAS), plain.methods | smoothed, V_BIAS)


def smooth_v(v_bias: float) -> Table:
    methods = {f"{bits} bits, V {words}": replace(DEFAULT[bits], smooth_v=on)
               for bits in (4, 8) for words, on in (("as it is", False), ("smoothed", True))}
    return Table(*_biased("smooth-v", f"Smoothing of V, E4M3, two-level; {WORDS[4]}", v_bias), methods, v_bias)


def accumulators(v_bias: float) -> Table:
    words = {"f32": "f32 throughout", "two_level": "two-level, 13 bits in a tile",
             "two_level_f16": "two-level, f16 in a tile", "single": "13 bits throughout"}
    methods = {words[name]: replace(DEFAULT[8], accumulator=name) for name in words}
    return Table(*_biased("accumulator", "Accumulator of P·V, E4M3, 8 bits", v_bias), methods, v_bias, long=True)


def bits_and_pv() -> Table:
    methods = {f"{bits} bits, {words}": change(DEFAULT[bits]) for bits in (8, 4)
               for words, change in (("f16", exact_pv), ("E4M3", lambda method: method))}
    methods["4 bits, E4M3, clipped"] = replace(DEFAULT[4], clip=CLIP)
    methods["4 bits, E4M3, ours"] = OURS[4]
    return Table("bits", "8 and 4 bits with all smoothing that is on by default, P and V in f16 or E4M3", methods)


def _biased(name: str, title: str, v_bias: float) -> tuple[str, str]:
    return (f"{name}-biased", f"{title}; V + {v_bias:g}") if v_bias else (name, title)


# --- on what ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Case:
    """Inputs on which a method gets one result."""

    source: str
    name: str
    is_causal: bool
    draws: list[QKV]
    long: bool = False  # few queries of many keys


def class_cases(kinds: Iterable[str], headdims: list[int], masks: list[str], seqlens: list[int], batch: int, heads: int,
                seed: int) -> list[Case]:
    """The classes of sage_aot._tools.reference.inputs, a case per shape and mask."""
    cases = []
    for kind, headdim, mask, seqlen in itertools.product(kinds, headdims, masks, seqlens):
        shape = (batch, heads, seqlen, headdim)
        cases.append(Case(kind, f"head dim {headdim}, {mask}, N = {seqlen}", mask == "causal",
                          [_draw(kind, shape, shape, seed)]))
    return cases


def long_cases(kinds: Iterable[str], headdims: list[int], seqlens: list[int], heads: int, seed: int) -> list[Case]:
    """Cases of few queries and many keys: they show errors that accumulate over keys, in little time. Each number of
    keys is a source of its own."""
    return [Case(f"{kind}, {seqlen} keys", f"head dim {headdim}, {LONG_QUERIES} queries", False,
                 [_draw(kind, (1, heads, LONG_QUERIES, headdim), (1, heads, seqlen, headdim), seed)], long=True)
            for kind, seqlen, headdim in itertools.product(kinds, seqlens, headdims)]


def _draw(kind: str, q_shape: tuple[int, ...], kv_shape: tuple[int, ...], seed: int) -> QKV:
    generator = torch.Generator().manual_seed(seed)  # on the CPU, so that every device sees the same numbers
    return reference.inputs(kind, q_shape, kv_shape, torch.bfloat16, generator)


def demo_cases() -> list[Case]:
    """Every layer of the model of `python -m sage_aot demo`, all texts together; UnsupportedError without it."""
    workload = demo_inputs.transformer_workload(torch.device("cpu"))
    return [Case(DEMO, f"layer {layer}", False, draws) for layer, draws in workload.layers.items()]


def load_model(name: str, file: Path) -> ModuleType:
    """A Python file with `activations()`, which yields (q, k, v) per layer of a causal model."""
    spec = importlib.util.spec_from_file_location("activations", file)
    if spec is None or not file.is_file():
        raise ArgumentError(f"--activations: expected a Python file after {name}=, got {file}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, "activations"):
        raise ArgumentError(f"--activations: expected a function activations() in {file}, which yields (q, k, v) per "
                            f"layer; it has none")
    return module


def model_cases(name: str, model: ModuleType) -> list[Case]:
    return [Case(name, f"layer {i}, head dim {qkv[0].shape[3]}", True, [qkv])
            for i, qkv in enumerate(model.activations())]


# --- what the inputs are like -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Traits:
    """Properties of a case that decide the order of the methods. A step is one unit of the 4-bit integer scores, in
    log2 units."""

    q_offset: float  # share of Q's energy (sum of squares) that the means of its tiles hold: what smoothing Q removes
    k_offset: float  # likewise K's, in its mean over the sequence
    hadamard: float  # step with HadmdAttn over the step without any smoothing
    smooth_attn: float  # likewise
    smooth_k: float
    smooth_q: float
    smooth_qk: float
    rotated: float  # step with smoothing and rotation over the step with smoothing
    per_token: float  # step per token over the step per thread, Q and K smoothed
    int8_loss: float  # share of P's sum that is lost when P is rounded to INT8


TRAITS = ("inputs", "Q in its means", "K in its mean", "HadmdAttn", "SmoothAttn", "smooth K", "smooth Q", "smooth Q+K",
          "rotated", "per token", "P lost in INT8")
TRAITS_TEXT = """### What the inputs are like

The share of the sum of squares of Q and K in the means that smoothing subtracts; the step of the integer scores of a
method over that of the method without it (4 bits; "rotated" and "per token" over smooth Q+K per thread); the share of
P's sum that is lost when P is rounded to INT8. Averages over the cases.
"""


def traits(case: Case, library: Library, device: torch.device) -> Traits:
    """The traits of the last draw of a case; for the demo model that draw is its long text."""
    q, k, v = (x.to(device) for x in case.draws[-1])
    base = Method(bits=4, smoothing="")
    smooth = replace(base, smoothing="qk")

    def ratio(changed: Method, to: Method) -> float:
        return emulator.score_step(changed, library, q, k, v) / emulator.score_step(to, library, q, k, v)

    (_, _, raw), (_, _, less) = (emulator.prepare(method, library, q, k, v) for method in (base, smooth))
    offsets = (1 - (less.q.square().sum() / raw.q.square().sum()).item(),
               1 - (less.k.square().sum() / raw.k.square().sum()).item())
    changes = ({"transform": "hadamard"}, {"transform": "smooth_attn"}, {"smoothing": "k"}, {"smoothing": "q"},
               {"smoothing": "qk"})
    return Traits(*offsets, *(ratio(replace(base, **change), base) for change in changes),
                  ratio(replace(smooth, transform="hadamard"), smooth),
                  ratio(replace(smooth, granularity="token"), smooth), int8_loss(case, library, q, k, v))


def int8_loss(case: Case, library: Library, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> float:
    """The share of P's sum that rounding to INT8 loses. With V all ones, an output is the sum of the rounded P over the
    sum of P; the share is what it lacks to one."""
    ones = torch.ones_like(v)
    out = emulator.attention(pv_types(8).methods["INT8"], library, q, k, ones, is_causal=case.is_causal)
    return 1 - out.mean().item()


def traits_markdown(rows: list[dict]) -> str:
    """The Markdown of traits: title, explanation, and the averages by source. `rows`: as in the JSON."""
    lines = []
    for source in dict.fromkeys(row["source"] for row in rows):
        columns = ([row[field.name] for row in rows if row["source"] == source] for field in fields(Traits))
        lines.append(common.table_row([source, *(f"{fmean(column):.3f}" for column in columns)]))
    return "\n".join([TRAITS_TEXT, common.table_head(TRAITS), *lines, ""])


# --- what a model makes of it -----------------------------------------------------------------------------------------

BITS_PER_BYTE_TEXT = """### Bits per byte of a model, above those with exact attention

"""


def bits_per_byte(model: ModuleType, windows: int, library: Library, device: torch.device) -> dict[str, float]:
    """Bits per byte of the model's own test text: with exact attention, and what each method of the table of bits adds.

    The model's function bits_per_byte(attend, windows, device) takes a causal attention of f16 or bf16 tensors.
    """
    def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return reference.attention(q, k, v, is_causal=True)[0].to(q.dtype)

    def quantized(method: Method) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
        return lambda q, k, v: emulator.attention(method, library, q, k, v, is_causal=True).to(q.dtype)

    methods = bits_and_pv().methods | {
        "4 bits, E4M3, not smoothed": replace(DEFAULT[4], smoothing=""),
        "4 bits, E4M3, rotated and clipped": replace(DEFAULT[4], transform="hadamard", clip=CLIP)}
    base = model.bits_per_byte(exact, windows, device)
    return {"exact": base} | {words: model.bits_per_byte(quantized(method), windows, device) - base
                              for words, method in methods.items()}


def bits_per_byte_markdown(found: dict[str, dict[str, float]]) -> str:
    """The Markdown of bits per byte, a row per model and method. `found`: by the model's name."""
    rows = [common.table_row([name, words, f"{value:.4f}" if words == "exact" else f"{value:+.4f}"])
            for name, values in found.items() for words, value in values.items()]
    return "\n".join([BITS_PER_BYTE_TEXT + common.table_head(("model", "method", "bits per byte"), texts=2), *rows, ""])


# --- results ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """The accuracy of one method on one case."""

    source: str
    case: str
    method: str
    accuracy: Accuracy

    def to_json(self) -> dict[str, object]:
        return {"source": self.source, "case": self.case, "method": self.method, **asdict(self.accuracy)}

    @classmethod
    def from_json(cls, values: dict) -> Result:
        names = ("source", "case", "method")
        return cls(*(values[name] for name in names),
                   Accuracy(**{name: value for name, value in values.items() if name not in names}))


@dataclass(frozen=True)
class Summary:
    """The accuracy of one method over all cases of one source."""

    source: str
    method: str
    average: Accuracy
    worst: Accuracy  # the worst value of each measure; they may be of different cases

    def cells(self) -> list[str]:
        return [self.source, self.method, *_cells(self.average), *_cells(self.worst)]


def measure(chosen: list[Table], cases: Iterable[Case], library: Library, device: torch.device,
            report: Callable[[str], None]) -> dict[str, list[Result]]:
    """Results by table name. `report` is called after every case."""
    results: dict[str, list[Result]] = {table.name: [] for table in chosen}
    for case in cases:
        for v_bias in dict.fromkeys(table.v_bias for table in chosen if table.long == case.long):
            wanted = [table for table in chosen if (table.long, table.v_bias) == (case.long, v_bias)]
            methods = dict.fromkeys(method for table in wanted for method in table.methods.values())
            accuracies = measure_case(case, v_bias, methods, library, device)
            for table in wanted:
                results[table.name] += [Result(case.source, case.name, words, accuracies[method])
                                        for words, method in table.methods.items()]
        report(f"{case.source}: {case.name}")
    return results


def measure_case(case: Case, v_bias: float, methods: Iterable[Method], library: Library,
                 device: torch.device) -> dict[Method, Accuracy]:
    """The accuracy of every method on one case, over all its draws together."""
    draws = [tuple(x.to(device) for x in (q, k, v + v_bias)) for q, k, v in case.draws]
    exact = _flat(reference.attention(*qkv, is_causal=case.is_causal)[0] for qkv in draws)

    def ours(method: Method) -> torch.Tensor:
        return _flat(emulator.attention(method, library, *qkv, is_causal=case.is_causal) for qkv in draws)

    return {method: reference.measure(ours(method), exact) for method in methods}


def summaries(results: list[Result]) -> list[Summary]:
    """Summaries by source, then by method, both in the order of the results."""
    pairs = dict.fromkeys((result.source, result.method) for result in results)
    order = list(dict.fromkeys(source for source, _ in pairs))
    return [_summary(source, method, [r.accuracy for r in results if (r.source, r.method) == (source, method)])
            for source, method in sorted(pairs, key=lambda pair: order.index(pair[0]))]


def _summary(source: str, method: str, values: list[Accuracy]) -> Summary:
    cosines, l1s, rmses = zip(*((value.cosine, value.relative_l1, value.rmse) for value in values))
    return Summary(source, method, Accuracy(fmean(cosines), fmean(l1s), fmean(rmses)),
                   Accuracy(min(cosines), max(l1s), max(rmses)))


DOCUMENT_TEXT = """Each table comes twice: first the relative L1 error in percent, average (worst) over the cases of a
kind of inputs; then every measure. Bold is what sage_aot.attn does by default.
"""


def document(values: dict) -> str:
    """The Markdown of everything in the JSON."""
    by_name = {table.name: table for table in tables()}
    measured = [markdown(by_name[table["name"]], [Result.from_json(row) for row in table["rows"]])
                for table in values["tables"]]
    read = [bits_per_byte_markdown(values["bits_per_byte"])] if values["bits_per_byte"] else []
    header = [f"- {name}: {value}" for name, value in values["header"].items()]
    return "\n".join([*header, "", DOCUMENT_TEXT, *measured, *read, traits_markdown(values["traits"])])


def markdown(table: Table, results: list[Result]) -> str:
    """The Markdown of a table: title, overview and rows."""
    found = summaries(results)
    rows = [common.table_row(summary.cells()) for summary in found]
    head = common.table_head(COLUMNS, texts=2)
    return "\n".join([f"### {table.title}", "", overview(table, found), "", head, *rows, ""])


def overview(table: Table, found: list[Summary]) -> str:
    """A row per method, a column per source: relative L1 in percent, average (worst)."""
    sources = list(dict.fromkeys(summary.source for summary in found))
    cells = {(summary.method, summary.source): f"{_percent(summary.average)} ({_percent(summary.worst)})"
             for summary in found}
    rows = [common.table_row([f"**{words}**" if method in AS_SHIPPED else words,
                              *(cells[words, source] for source in sources)])
            for words, method in table.methods.items()]
    return "\n".join([common.table_head(["relative L1, %", *sources]), *rows])


def _percent(accuracy: Accuracy) -> str:
    """Relative L1: three digits from 0.1 %, then less."""
    percent = 100 * accuracy.relative_l1
    return f"{percent:#.3g}" if accuracy.relative_l1 >= 0.001 else f"{percent:.3f}"


def _cells(accuracy: Accuracy) -> list[str]:
    return [f"{accuracy.cosine:.5f}", f"{accuracy.relative_l1:.4f}", f"{accuracy.rmse:.2e}"]


def _flat(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.double().flatten() for tensor in tensors])
