"""Accuracy against attention in float64: of the kernels, or of the methods in the tables of the SageAttention2 paper.

    python bench/accuracy.py kernels --arch sm80,sm89 --kernels build/retarget_sm_90 --json accuracy.json
    python bench/accuracy.py tables --markdown tables.md --json tables.json --plot tables.svg

`kernels` compares the kernels on a GPU with torch's flash attention in bf16. With --emulate it runs their emulation
too, with --device cpu the emulation alone. The exit code is 1 where an output is so far off that its kernel must be
broken.

`tables` runs emulations of the kernels' method and of its alternatives (bench/emulator.py), on the CPU, or on a GPU
with --device cuda. The inputs are the input classes; the activations of the demo's model (`python -m sage_aot demo`)
where its packages are installed; and those of other models (--activations). The kernel folder gives only the tiles.
Inputs are seeded."""

from __future__ import annotations

import argparse
import itertools
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType

import torch

import accuracy_tables
import common
from sage_aot._backends.cuda.backend import CudaBackend
from sage_aot._backends.emulation.backend import EmulationBackend
from sage_aot._backends.loader import Library
from sage_aot._call import pipeline
from sage_aot._problem.given import Given
from sage_aot._problem.options import Options
from sage_aot._tools import reference
from sage_aot._tools.reference import Accuracy
from sage_aot.errors import UnsupportedError

FLASH = "sdpa_flash_bf16"
COLUMNS = ("row", "inputs", "headdim", "mask", "keys", "cosine", "relative L1", "relative L2", "RMSE")


@dataclass(frozen=True)
class Case:
    """One set of inputs."""

    inputs: str  # class of sage_aot._tools.reference.inputs
    headdim: int
    mask: str
    seqlen: int  # keys; as many queries, or those of --queries


@dataclass(frozen=True)
class Row:
    """The accuracy of one implementation on a case."""

    row: str
    case: Case
    accuracy: Accuracy
    relative_l2: float

    def cells(self) -> list[object]:
        values = self.accuracy
        return [self.row, *asdict(self.case).values(), f"{values.cosine:.6f}", f"{values.relative_l1:.4f}",
                f"{self.relative_l2:.4f}", f"{values.rmse:.2e}"]

    def to_json(self) -> dict[str, object]:
        return {"row": self.row, **asdict(self.case), **asdict(self.accuracy), "relative_l2": self.relative_l2}


def main() -> int:
    arguments = parse()
    if arguments.device == "cuda":
        common.require_cuda()
    library = common.use_kernels(arguments.kernels)
    return arguments.command(arguments, library)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add_kernels_arguments(commands.add_parser("kernels", help="the kernels compared with torch's flash attention"))
    add_tables_arguments(commands.add_parser("tables", help="the tables of the paper, by emulation"))
    return parser.parse_args()


def header(arguments: argparse.Namespace, library: Library) -> dict[str, str]:
    return common.header(library) | {
        "inputs": f"batch {arguments.batch}, {arguments.heads} heads, bf16, seed {arguments.seed}, {arguments.device}"}


# --- kernels ----------------------------------------------------------------------------------------------------------


def add_kernels_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_shape_arguments(parser, seqlen="4096", batch=2, heads=8)
    parser.add_argument("--inputs", type=classes, default=",".join(reference.INPUT_CLASSES), metavar="CLASSES",
                        help=f"of {', '.join(reference.ALL_CLASSES)} (default: %(default)s)")
    parser.add_argument("--queries", type=int, metavar="COUNT", help="of every case (default: as many as keys)")
    parser.add_argument("--arch", type=common.words,
                        help="whose kernels (default: every arch of the folder that can run here)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="(default: %(default)s)")
    parser.add_argument("--emulate", action="store_true", help="on cuda: also emulate on the CPU, which is slow")
    parser.add_argument("--seed", type=int, default=0, help="of the inputs (default: %(default)s)")
    parser.set_defaults(command=measure_kernels)


def measure_kernels(arguments: argparse.Namespace, library: Library) -> int:
    archs = arguments.arch or common.default_archs(library)
    lines = header(arguments, library)
    common.print_header(lines)
    print(common.table_head(COLUMNS))
    rows = []
    for case in cases(arguments):
        for row in measure(case, archs, library, arguments):
            print(common.table_row(row.cells()), flush=True)
            rows.append(row)
    common.write_json(arguments.json, {"header": lines, "rows": [row.to_json() for row in rows]})
    return 0 if all(row.accuracy.cosine >= common.MIN_COSINE for row in rows) else 1


def cases(arguments: argparse.Namespace) -> list[Case]:
    return [Case(*values) for values in itertools.product(arguments.inputs, arguments.headdim, arguments.mask,
                                                          arguments.seqlen)]


def classes(text: str) -> list[str]:
    """``"normal,sink15"`` → ``["normal", "sink15"]``; argparse reports a word that is not a class."""
    names, known = common.words(text), reference.ALL_CLASSES
    if not set(names) <= set(known):
        raise argparse.ArgumentTypeError(f"expected some of {', '.join(known)}, got {text!r}")
    return names


def measure(case: Case, archs: list[str], library: Library, arguments: argparse.Namespace) -> list[Row]:
    """Every implementation on one case: torch's flash attention first, then each arch."""
    generator = torch.Generator().manual_seed(arguments.seed)  # on the CPU, so that both devices see the same numbers
    q_shape, kv_shape = ((arguments.batch, arguments.heads, seqlen, case.headdim)
                         for seqlen in (case.seqlen if arguments.queries is None else arguments.queries, case.seqlen))
    host = reference.inputs(case.inputs, q_shape, kv_shape, torch.bfloat16, generator)
    qkv = [tensor.to(arguments.device) for tensor in host]
    is_causal = case.mask == "causal"
    exact, _ = reference.attention(*qkv, is_causal=is_causal)
    outputs = {FLASH: common.sdpa(FLASH, *qkv, is_causal)}
    for arch in archs:
        if arguments.device == "cuda":
            outputs[f"{arch} kernel"] = attention(arch, library, qkv, is_causal)
        if arguments.device == "cpu" or arguments.emulate:
            outputs[f"{arch} emulation"] = attention(arch, library, host, is_causal)
    outputs = {row: out.to(exact.device) for row, out in outputs.items()}
    return [Row(row, case, reference.measure(out, exact), reference.relative_l2(out, exact))
            for row, out in outputs.items()]


def attention(arch: str, library: Library, qkv: list[torch.Tensor], is_causal: bool) -> torch.Tensor:
    """``[batch, heads, seq, headdim]`` from the kernels of one arch, or from their emulation for CPU tensors."""
    common.check_arch(arch, library)
    out = common.poisoned(qkv[0])
    backend = CudaBackend(library, arch) if out.is_cuda else EmulationBackend(library.manifest, arch)
    given = Given("dense", *qkv)
    pipeline.prepare(backend, given, Options(is_causal=is_causal), out).run(given, out, None)
    return out


# --- tables -----------------------------------------------------------------------------------------------------------


def add_tables_arguments(parser: argparse.ArgumentParser) -> None:
    names = [table.name for table in accuracy_tables.tables()]
    common.add_shape_arguments(parser, seqlen="2048", batch=1, heads=4)
    parser.set_defaults(mask="full")
    parser.add_argument("--only", type=table_names, default=",".join(names), metavar="TABLES",
                        help="which tables, with commas between (default: %(default)s)")
    parser.add_argument("--long-seqlen", type=common.integers, default="2048,8192,32768",
                        help="keys, for the tables of accumulators (default: %(default)s)")
    parser.add_argument("--activations", type=named_file, action="append", default=[], metavar="NAME=FILE",
                        help="also on what the function activations() of this Python file yields: (q, k, v) per layer "
                        "of a causal model; can be given several times")
    parser.add_argument("--windows", type=int, default=0, metavar="COUNT",
                        help="let those models whose file has bits_per_byte(attend, windows, device) read so many "
                        "windows of their text with each attention, too (default: %(default)s)")
    parser.add_argument("--no-demo", action="store_true", help="not on the model of `python -m sage_aot demo`")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cpu", help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the inputs (default: %(default)s)")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the tables here")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them here: SVG or PNG; needs matplotlib")
    parser.set_defaults(command=measure_tables)


def table_names(text: str) -> list[str]:
    """``"bits,pv-4"`` → ``["bits", "pv-4"]``; argparse reports a word that is not a table."""
    names, known = common.words(text), [table.name for table in accuracy_tables.tables()]
    if not set(names) <= set(known):
        raise argparse.ArgumentTypeError(f"expected some of {', '.join(known)}, got {text!r}")
    return names


def named_file(text: str) -> tuple[str, Path]:
    """``"language model=lm.py"`` → ``("language model", Path("lm.py"))``."""
    name, equals, file = text.partition("=")
    if not (name and equals and file):
        raise argparse.ArgumentTypeError(f"expected NAME=FILE, got {text!r}")
    return name, Path(file)


def measure_tables(arguments: argparse.Namespace, library: Library) -> int:
    plot = import_plot() if arguments.plot else None  # fails before the measurements, which take long
    chosen = [table for table in accuracy_tables.tables() if table.name in arguments.only]
    lines, device = header(arguments, library), torch.device(arguments.device)
    models = {name: accuracy_tables.load_model(name, file) for name, file in arguments.activations}
    with torch.inference_mode():
        cases = table_cases(arguments, models)
        results = accuracy_tables.measure(chosen, cases, library, device,
                                          lambda done: print(done, file=sys.stderr, flush=True))
        traits = {case: accuracy_tables.traits(case, library, device) for case in cases if not case.long}
        read = {name: accuracy_tables.bits_per_byte(model, arguments.windows, library, device)
                for name, model in models.items() if arguments.windows and hasattr(model, "bits_per_byte")}
    values = {"header": lines, "tables": [{"name": table.name, "title": table.title, "rows": [
        result.to_json() for result in results[table.name]]} for table in chosen], "traits": [
        {"source": case.source, "case": case.name, **asdict(found)} for case, found in traits.items()],
        "bits_per_byte": read}
    text = accuracy_tables.document(values)
    print(text)
    common.write_json(arguments.json, values)
    if arguments.markdown:
        arguments.markdown.write_text(text)
    if plot:
        plot.draw(values).savefig(arguments.plot)
    return 0


def import_plot() -> ModuleType:
    try:
        import plot_accuracy
    except ImportError as error:
        raise UnsupportedError(f"--plot: expected matplotlib, but {error}; pip install matplotlib") from error
    return plot_accuracy


def table_cases(arguments: argparse.Namespace, models: dict[str, ModuleType]) -> list[accuracy_tables.Case]:
    """The cases, in order: input classes, demo model, other models, many keys."""
    kinds, headdims = reference.INPUT_CLASSES, arguments.headdim
    found = accuracy_tables.class_cases(kinds, headdims, arguments.mask, arguments.seqlen, arguments.batch,
                                        arguments.heads, arguments.seed)
    if not arguments.no_demo:
        try:
            found += accuracy_tables.demo_cases()
        except UnsupportedError as error:
            print(f"without the demo model: {error}", file=sys.stderr)
    for name, model in models.items():
        found += accuracy_tables.model_cases(name, model)
    return found + accuracy_tables.long_cases(kinds, headdims, arguments.long_seqlen, arguments.heads, arguments.seed)


if __name__ == "__main__":
    common.run(main)
