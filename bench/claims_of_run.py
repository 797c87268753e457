"""The claims that one run of bench/performance.sh bears, from its logs into bench/claims.yaml.

    python bench/claims_of_run.py bench/results/FOLDER            says which claims differ from the logs
    python bench/claims_of_run.py bench/results/FOLDER --write    writes values and rows of these claims

A claim keeps its name, its words, its unit, its columns and the labels of its rows; what is written is its figures, and
the file that has them. `python bench/claims.py --write` then takes them to the pages.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from codegen.files import write_if_changed

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "bench/claims.yaml"
SIZES = {"1K": "1024", "4K": "4096", "16K": "16384"}
MASKS = "full", "causal"

Row = dict[str, str]
Cells = list[list[str]]


# --- logs -------------------------------------------------------------------------------------------------------------


class Run(NamedTuple):
    """A folder with the logs of a run."""

    folder: Path

    def text(self, part: str) -> str:
        return (self.folder / f"{part}.log").read_text(encoding="utf-8")

    def rows(self, part: str, **having: str) -> list[Row]:
        """The rows of a part's table whose columns hold what is asked for, such as headdim="64"."""
        return [row for row in table_of(self.text(part)) if all(row[name] == value for name, value in having.items())]

    def row(self, part: str, **having: str) -> Row:
        """The one row that holds what is asked for."""
        found = self.rows(part, **having)
        if len(found) != 1:
            raise SystemExit(f"{part}.log: expected one row with {having}, got {len(found)}")
        return found[0]


@cache
def table_of(text: str) -> list[Row]:
    """The rows of a log's table, by column. Of columns of one name the later ones have a number behind it."""
    lines = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    head, _, *body = [[cell.strip() for cell in line] for line in lines]
    names = [name if name not in head[:i] else f"{name} {head[:i].count(name) + 1}" for i, name in enumerate(head)]
    return [dict(zip(names, cells)) for cells in body]


# --- figures ----------------------------------------------------------------------------------------------------------


def number(text: str) -> str:
    """A figure as pages have it: thousands apart, and no fraction from there on."""
    value = float(text)
    return f"{value:,.0f}" if abs(value) >= 1000 else text


def spread(values: Sequence[str]) -> str:
    """The least and the largest of some figures, in words; one where they are equal."""
    ordered = sorted(values, key=float)
    return number(ordered[0]) if float(ordered[0]) == float(ordered[-1]) else (
        f"{number(ordered[0])} to {number(ordered[-1])}")


def ratio(dividend: str, divisor: str, digits: int = 2) -> str:
    return f"{float(dividend) / float(divisor):.{digits}f}"


def percent(text: str, digits: int) -> str:
    return f"{100 * float(text):.{digits}f}"


# --- tables of claims -------------------------------------------------------------------------------------------------


def shapes(headdims: Sequence[str], *, wide_first: bool = False) -> list[tuple[str, str]]:
    """Head dims and masks in the order of a claim's rows."""
    return [(headdim, mask) for headdim in sorted(headdims, key=int, reverse=wide_first) for mask in MASKS]


def speeds(run: Run) -> Cells:
    return [[run.row("graph", row=row, headdim=headdim, mask=mask, N=size)["× cuDNN"]
             for row in ("sm90 kernel", "sm90 call") for size in SIZES.values()]
            for headdim, mask in shapes(("64", "128", "256"))]


def tops(run: Run) -> Cells:
    rows = "sm90 kernel", "sm90 call", "sdpa_cudnn_bf16", "sdpa_flash_bf16"
    return [[number(run.row("graph", row=row, headdim=headdim, mask=mask, N=SIZES["16K"])["TOPS"]) for row in rows]
            for headdim, mask in shapes(("64", "128", "256"))]


def short_parts(run: Run) -> Cells:
    rows = "sm90 kernel", "sm90 quantize", "sm90 call", "sdpa_cudnn_bf16"
    return [[run.row("graph", row=row, headdim=headdim, mask=mask, N=SIZES["1K"])["µs"] for row in rows]
            for headdim, mask in shapes(("64", "128", "256"))]


def sustained(run: Run) -> Cells:
    found = []
    for headdim, mask in shapes(("64", "128")):
        for size in ("4K", "16K"):
            kernel, call = (run.row("sustained", row=f"sm90 {what}", headdim=headdim, mask=mask, N=SIZES[size])
                            for what in ("kernel", "call"))
            clock, power = re.findall(r"[\d.]+", call["clock, power"])
            found.append([kernel["× cuDNN"], call["× cuDNN"], number(clock), f"{float(power):.0f}"])
    return found


def linear_alone(run: Run) -> Cells:
    return [[f"{float(linear(run, 'normal', headdim, mask, size)['linear ×']):.2f}" for size in SIZES]
            for headdim, mask in shapes(("64", "128"))]


def linear(run: Run, inputs: str, headdim: str, mask: str, size: str) -> Row:
    return run.row("linear_p", inputs=inputs, headdim=headdim, mask=mask, N=SIZES[size], **{"P·V": "auto"})


def linear_far(run: Run) -> str:
    values = [f"{float(row['linear ×']):.2f}" for row in run.rows("linear_p", inputs="far")]
    return spread(values)


def of_peers(run: Run, rows: Sequence[str], sizes: Sequence[str], figure: Callable[[Row], str]) -> Cells:
    """A figure of the rows of peers.log, by shape and library; empty where a library has no such mask."""
    found = []
    for headdim, mask in shapes(("64", "128"), wide_first=True):
        for size in sizes:
            cells = [run.rows("peers", row=row, headdim=headdim, mask=mask, N=size) for row in rows]
            found.append([figure(cell[0]) if cell else "" for cell in cells])
    return found


def speed(row: Row) -> str:
    """The multiple of cuDNN's speed, by GPU time but for SageAttention2, which no CUDA graph captures."""
    found = row["× cuDNN" if row["row"].startswith("sage2") else "× cuDNN 2"]
    if found == "–":
        raise SystemExit(f"peers.log: expected a GPU time of {row['row']}, got none; say so in docs/performance.md")
    return found


CALLS = "sm90 call", "sage2_sm90 call", "comfy_int8 call", "fa3_bf16", "sdpa_flash_bf16"
KERNELS = "sm90 kernel", "sage2_sm90 kernel", "fa3_fp8 kernel", "cudnn_fp8 kernel"
ERRORS = "sm90 kernel", "sage2_sm90 kernel", "fa3_fp8 kernel", "cudnn_fp8 kernel", "comfy_int8 call", "fa3_bf16"


def models(run: Run) -> Cells:
    return [[row["attn, × gpu"], row["policy, × gpu"], row["policy, × queued"]] for row in run.rows("use")]


def encoders(run: Run) -> str:
    dense = [row["attn, × gpu"] for row in run.rows("use")
             if re.match(r"encoder: (MiniLM|ViT|BERT)", row["call"]) and "padded" not in row["shape"]]
    return spread(dense)


def queued_least(run: Run) -> str:
    return sorted((row["policy, × queued"] for row in run.rows("use") if "MiniLM" not in row["call"]), key=float)[0]


def blocks(run: Run) -> Cells:
    rows = run.rows("hosts")
    return [[row["×"] for row in rows[i: i + 3]] for i in range(0, len(rows), 3)]


def key_masks(run: Run) -> Cells:
    found = []
    for headdim in ("128", "64"):
        for size in SIZES.values():
            here = {"headdim": headdim, "keys": size}
            calls = [run.row("masks", row="call, no mask", **here),
                     *(run.row("masks", row="call", seen=seen, **here) for seen in ("100%", "75%", "50%", "25%"))]
            torchs = [rounded(row["µs"]) for row in run.rows("masks", row="sdpa", **here)]
            found.append([*(number(row["µs"]) for row in calls), spread(torchs)])
    return found


def rounded(text: str) -> str:
    return f"{float(text):.0f}"


def half_of_the_keys(run: Run) -> tuple[str, str]:
    here = {"headdim": "128", "keys": SIZES["4K"]}
    return (run.row("masks", row="call", seen="50%", **here)["µs"], run.row("masks", row="call, no mask", **here)["µs"])


def masked_16k(run: Run) -> str:
    values = [row["× sdpa"] for row in run.rows("masks", row="call", keys=SIZES["16K"])]
    return spread([f"{float(value):.3g}" for value in values])


def sequences(run: Run) -> Cells:
    kinds = ("1", "16384"), ("64", "16384"), ("64", "65536")
    return [[run.row("varlen", row="call", headdim=headdim, tokens=tokens, sequences=count)["× flash"]
             for headdim in ("64", "128")] for count, tokens in kinds]


def sparse(run: Run) -> Cells:
    masks = ("blocks 1", "blocks 0.5", "blocks 0.25", "blocks 0.125", "documents of 2,000", "one key in 1,000 hidden",
             "window of 4096, causal")
    return [[run.row("sparse", mask=mask, headdim=headdim, N=size)["speedup"]
             for headdim in ("64", "128") for size in ("16384", "32768")] for mask in masks]


FEW = (("16×32/8", "1", "8192"), ("8×32/8", "1", "8192"), ("4×32/8", "1", "8192"), ("1×32/8", "1", "8192"),
       ("1×32/8", "1", "32768"), ("1×32/8", "16", "8192"), ("1×32/8", "128", "8192"), ("1×32/8", "512", "8192"),
       ("2×24", "4096", "512"))


def few(run: Run, row: str, heads: str, queries: str, keys: str) -> Row:
    return run.row("few", row=row, queries=queries, keys=keys, **{"batch × heads": heads})


def few_queries(run: Run) -> Cells:
    return [[few(run, row, *shape)["× sdpa"] for row in ("call", "call, kv")] for shape in FEW]


def inputs(run: Run) -> Cells:
    kinds = "bf16, unaligned", "f32", "f32, unaligned", "bf16, rotate", "bf16, return_lse"
    return [[run.row("inputs", inputs=kind, headdim=headdim, N=size)["× call, bf16"]
             for headdim in ("64", "128", "256") for size in (SIZES["1K"], SIZES["4K"])] for kind in kinds]


HOST = "scaled_dot_product_attention", "attn", "attn, out=", "attn, return_lse", "attn, smooth_q (three launches)"


def host(run: Run) -> Cells:
    found = []
    for name in HOST:
        times = re.findall(rf"^- {re.escape(name)}: ([\d.]+) \([\d.]+\), ([\d.]+) x SDPA$", run.text("latency"),
                           re.MULTILINE)
        found.append([spread([of_call for of_call, _ in times]), spread([of_sdpa for _, of_sdpa in times])])
    return found


def host_ratio(run: Run) -> str:
    return spread([end for _, ratios in host(run)[1:] for end in ratios.split(" to ")])


def least_times(run: Run, title: str, digits: int) -> str:
    """The least times of the sections of latency.log with a title, by loader."""
    found = re.findall(rf"^{title}[^\n]*:\n- minimum: ([\d.]+)$", run.text("latency"), re.MULTILINE)
    return spread([f"{float(value):.{digits}f}" for value in found])


LENGTHS = "2048", "4096", "8192", "16384"
STEPS = "train_attn", "sdpa_flash_bf16", "sdpa_cudnn_bf16"


def step_ms(run: Run, row: str, headdim: str, mask: str, size: str) -> str:
    return run.row("backward", row=row, headdim=headdim, mask=mask, N=size)["ms"]


def training_ms(run: Run) -> Cells:
    return [[f"{float(step_ms(run, row, headdim, mask, size)):.2f}" for size in LENGTHS]
            for headdim, mask in shapes(("64", "128")) for row in STEPS]


def training_steps(run: Run) -> Cells:
    return [[run.row("backward", row="train_attn", headdim=headdim, mask=mask, N=size)["× flash"] for size in LENGTHS]
            for headdim, mask in shapes(("64", "128"))]


def training_over_cudnn(headdim: str, choose: Callable[[list[tuple[str, str]]], tuple[str, str]]) -> Callable[
        [Run], tuple[str, str]]:
    """cuDNN's and train_attn's time of the step from 4K on that `choose` takes."""
    def found(run: Run) -> tuple[str, str]:
        return choose([(step_ms(run, "sdpa_cudnn_bf16", headdim, mask, size),
                        step_ms(run, "train_attn", headdim, mask, size)) for mask in MASKS for size in LENGTHS[1:]])
    return found


def by_speed(times: tuple[str, str]) -> float:
    return float(times[0]) / float(times[1])


def least(steps: list[tuple[str, str]]) -> tuple[str, str]:
    return min(steps, key=by_speed)


def most(steps: list[tuple[str, str]]) -> tuple[str, str]:
    return max(steps, key=by_speed)


class Source(NamedTuple):
    """Origin of a claim. `find` returns its value, its rows, or a dividend and a divisor."""

    part: str
    find: Callable[[Run], str | Cells | tuple[str, str]]


def error(inputs: str, row: str, digits: int) -> Source:
    return Source("accuracy", lambda run: percent(run.row(
        "accuracy", row=row, inputs=inputs, headdim="128", mask="full")["relative L1"], digits))


def queued_over_flash(run: Run) -> tuple[str, str]:
    here = {"headdim": "128", "mask": "full", "N": SIZES["16K"]}
    return run.row("dense", row="sdpa_flash_bf16", **here)["µs"], run.row("dense", row="sm90 call", **here)["µs"]


CLAIMS: dict[str, Source] = {
    "linear-error": error("normal", "sm90 kernel", 1),
    "linear-error-outlier": error("outlier", "sm90 kernel", 2),
    "error-bf16": error("normal", "sdpa_flash_bf16", 1),
    "linear-alone": Source("linear_p", linear_alone),
    "linear-far": Source("linear_p", linear_far),
    "h200": Source("graph", speeds),
    "h200-tops": Source("graph", tops),
    "h200-queued": Source("dense", lambda run: run.row("dense", row="sm90 call", headdim="128", mask="full",
                                                       N=SIZES["16K"])["× cuDNN"]),
    "queued-over-flash": Source("dense", queued_over_flash),
    "sustained": Source("sustained", sustained),
    "short": Source("graph", lambda run: spread([row["× cuDNN"] for row in run.rows(
        "graph", row="sm90 call", N=SIZES["1K"])])),
    "short-parts": Source("graph", short_parts),
    "rivals-calls": Source("peers", lambda run: of_peers(run, CALLS, [*SIZES.values()], speed)),
    "rivals": Source("peers", lambda run: of_peers(run, KERNELS, [*SIZES.values()], speed)),
    "rivals-error": Source("peers", lambda run: of_peers(run, ERRORS, [SIZES["4K"]], lambda row: row["rel. L1"])),
    "models": Source("use", models),
    "one-query": Source("use", lambda run: spread([row["attn, × gpu"] for row in run.rows("use") if re.fullmatch(
        r"decode: Llama 3 8B, \d+ × 8192", row["call"])])),
    "encoders": Source("use", encoders),
    "queued-least": Source("use", queued_least),
    "blocks": Source("hosts", blocks),
    "key-masks": Source("masks", key_masks),
    "half-of-the-keys": Source("masks", half_of_the_keys),
    "masked-16k": Source("masks", masked_16k),
    "sequences": Source("varlen", sequences),
    "sequences-causal": Source("varlen_causal", lambda run: spread([row["× flash"] for row in run.rows(
        "varlen_causal", row="call")])),
    "sparse-attention": Source("sparse", sparse),
    "few-queries": Source("few", few_queries),
    "one-query-kv": Source("few", lambda run: spread([few(run, "call, kv", *shape)["× sdpa"] for shape in FEW[:4]])),
    "few-cudnn": Source("few", lambda run: rounded(few(run, "sdpa", *FEW[5])["µs"])),
    "few-flash": Source("use", lambda run: rounded(run.row("use", call="decode: Llama 3 8B, 16 drafts")["torch, µs"])),
    "inputs": Source("inputs", inputs),
    "f32-sdpa": Source("inputs", lambda run: spread([f"{float(row['× sdpa']):.1f}" for row in run.rows("inputs")
                                                     if row["inputs"].startswith("f32")])),
    "host": Source("latency", host),
    "host-ratio": Source("latency", host_ratio),
    "new-kind-us": Source("latency", lambda run: least_times(run, "calls of a kind not seen before, µs", 0)),
    "training-ms": Source("backward", training_ms),
    "training-steps": Source("backward", training_steps),
    "training-cudnn-least": Source("backward", training_over_cudnn("128", least)),
    "training-cudnn-most": Source("backward", training_over_cudnn("128", most)),
    "training-cudnn-64-least": Source("backward", training_over_cudnn("64", least)),
    "training-cudnn-64-most": Source("backward", training_over_cudnn("64", most)),
}
"""The claims of a run. Those of clocks, power, a first call and an import are written by hand."""


# --- claims.yaml ------------------------------------------------------------------------------------------------------


def filled(source: str, run: Run) -> str:
    """The text of claims.yaml with the figures of a run."""
    for name, claim in CLAIMS.items():
        begin = source.find(f"\n  {name}:\n") + 1
        if begin == 0:
            raise SystemExit(f"{SOURCE.name}: expected a claim {name}, got none")
        following = re.compile(r"^  (?! )", re.MULTILINE).search(source, source.index("\n", begin) + 1)
        end = following.start() if following else len(source)
        source = source[:begin] + block_with(source[begin:end], claim, run) + source[end:]
    return source


def block_with(block: str, claim: Source, run: Run) -> str:
    """A claim's lines with the figures of a run."""
    block = re.sub(r"^    log: .*$", f"    log: {run.folder.name}/{claim.part}.log", block, count=1, flags=re.MULTILINE)
    found = claim.find(run)
    if isinstance(found, str):
        return with_field(block, "value", found)
    if isinstance(found, tuple):
        return with_field(with_field(block, "value", ratio(*found)), "quotient", f"[{', '.join(found)}]")
    line, rows = re.compile(r"^(      .+: )\[.*\]$", re.MULTILINE), iter(found)
    if (labels := len(line.findall(block))) != len(found):
        raise SystemExit(f"{SOURCE.name}: expected {len(found)} rows, as the log has, in\n{block}got {labels}")
    return line.sub(lambda old: old[1] + yaml_list(next(rows)), block)


def with_field(block: str, name: str, value: str) -> str:
    made, count = re.subn(rf"^    {name}: .*$", f"    {name}: {value}", block, flags=re.MULTILINE)
    if count != 1:
        raise SystemExit(f"{SOURCE.name}: expected one {name} in\n{block}")
    return made


def yaml_list(values: Sequence[str]) -> str:
    return f"[{', '.join(value if value and ',' not in value else f'{chr(34)}{value}{chr(34)}' for value in values)}]"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--write", action="store_true", help="write the figures; else name the lines that differ")
    arguments = parser.parse_args(argv)
    before = SOURCE.read_text(encoding="utf-8")
    after = filled(before, Run(arguments.folder))
    if arguments.write:
        write_if_changed(SOURCE, after.encode())
        return 0
    differing = [f"{i}: {old.strip()} -> {new.strip()}" for i, (old, new) in enumerate(
        zip(before.splitlines(), after.splitlines()), 1) if old != new]
    for line in differing:
        print(line)
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
