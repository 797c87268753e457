"""Parts of the bench programs: arguments, kernels of an arch, torch's SDPA, the check of an output, tables, files."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from sage_aot._backends.cuda.device import arch_of
from sage_aot._backends.drivers import default_driver
from sage_aot._backends.loader import Library
from sage_aot._call.backends import default_library
from sage_aot._launch import choose
from sage_aot._launch.choose import Kernels, built_archs, wanted_values
from sage_aot._problem.problem import Problem
from sage_aot._tools import reference
from sage_aot._tools.reference import MIN_COSINE
from sage_aot.errors import ArgumentError, SageAotError, UnsupportedError

SDPA = {"sdpa_flash_bf16": SDPBackend.FLASH_ATTENTION, "sdpa_cudnn_bf16": SDPBackend.CUDNN_ATTENTION}
"""torch's own attention, by row name."""


# --- command line -----------------------------------------------------------------------------------------------------


def words(text: str) -> list[str]:
    """``"sm80,sm89"`` → ``["sm80", "sm89"]``."""
    return [word.strip() for word in text.split(",")]


def integers(text: str) -> list[int]:
    """``"64,128"`` → ``[64, 128]``."""
    return [int(word) for word in text.split(",")]


def masks(text: str) -> list[str]:
    """``"full,causal"`` → ``["full", "causal"]``; argparse reports any other word."""
    names = words(text)
    if not set(names) <= {"full", "causal"}:
        raise argparse.ArgumentTypeError(f"expected full, causal or both with a comma between, got {text!r}")
    return names


def add_shape_arguments(parser: argparse.ArgumentParser, *, seqlen: str, batch: int, heads: int) -> None:
    """The options of programs for both masks, with this program's defaults."""
    add_size_arguments(parser, headdim="64,128", seqlen=seqlen, batch=batch, heads=heads)
    parser.add_argument("--mask", type=masks, default="full,causal", help="(default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything here")


def add_size_arguments(parser: argparse.ArgumentParser, *, headdim: str, seqlen: str, batch: int, heads: int) -> None:
    """The sizes of inputs with as many keys as queries, and the kernels, with this program's defaults."""
    parser.add_argument("--headdim", type=integers, default=headdim, help="channels of a head (default: %(default)s)")
    parser.add_argument("--seqlen", type=integers, default=seqlen, help="queries and keys (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=batch, help="(default: %(default)s)")
    parser.add_argument("--heads", type=int, default=heads, help="of q, k and v (default: %(default)s)")
    parser.add_argument("--kernels", metavar="FOLDER", help="built kernels (default: those of the package); `python -m "
                        "codegen build --retarget sm_90` makes a folder that runs other archs' kernels on an H200")


def run(main: Callable[[], int]) -> None:
    """Exit with what `main` returns; errors of sage_aot become one line."""
    try:
        sys.exit(main())
    except SageAotError as error:
        sys.exit(f"{Path(sys.argv[0]).name}: {error}")


def require_cuda() -> None:
    if not torch.cuda.is_available():
        raise UnsupportedError(f"expected a CUDA GPU, torch {torch.__version__} finds none; use a machine with a GPU "
                               f"and a CUDA build of torch (`accuracy.py kernels` also takes --device cpu)")


# --- kernels ----------------------------------------------------------------------------------------------------------


def use_kernels(folder: str | None) -> Library:
    """The kernels of a folder; None: the package's. Sets SAGE_AOT_KERNELS, for the processes that this one starts."""
    if folder is not None:
        os.environ["SAGE_AOT_KERNELS"] = folder
    return default_library()


def default_archs(library: Library) -> list[str]:
    """All archs where every kernel runs (on the CPU, or built for one chip); else the arch that this GPU runs."""
    if library.manifest.retarget or not torch.cuda.is_available():
        return built_archs(library.manifest)
    return [arch_of(library, torch.cuda.current_device())]


def kernels_of(arch: str, problem: Problem, library: Library) -> Kernels:
    """The kernels of this arch for a problem, whatever the GPU. The driver refuses kernels that the GPU cannot run."""
    check_arch(arch, library)
    return choose.kernels_of(arch, wanted_values(problem), library.manifest)


def check_arch(arch: str, library: Library) -> None:
    """ArgumentError unless the folder has an arch's kernels, in machine code."""
    if arch not in built_archs(library.manifest):
        raise ArgumentError(f"--arch: expected some of {', '.join(built_archs(library.manifest))}, which is what "
                            f"{library.folder} holds, got {arch!r}")


def sdpa(row: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool) -> torch.Tensor:
    """torch's attention by the backend of a row's name; RuntimeError where the backend does not take the inputs."""
    with sdpa_kernel(SDPA[row]):
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=q.shape[1] != k.shape[1])


def poisoned(like: torch.Tensor) -> torch.Tensor:
    """An output filled with NaN, so that elements that no kernel writes are wrong."""
    return torch.full_like(like, float("nan"))


def check_output(row: str, out: torch.Tensor, expected: torch.Tensor) -> float:
    """The lowest cosine over the batch; leaves the program with exit code 1 where it shows a broken kernel."""
    cosines = [reference.measure(ours, theirs).cosine for ours, theirs in zip(out, expected)]
    wrong = [cosine for cosine in cosines if not cosine >= MIN_COSINE]  # NaN is wrong, too
    if wrong:
        sys.exit(f"{row}: wrong output for {tuple(out.shape)}: expected a cosine of at least {MIN_COSINE}, got "
                 f"{wrong[0]}; nothing was timed with it")
    return min(cosines)


# --- output -----------------------------------------------------------------------------------------------------------


def header(library: Library) -> dict[str, str]:
    """The conditions of the figures: date, GPU, versions, kernels, commit."""
    lines = {"date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")}
    if torch.cuda.is_available():
        lines["GPU"] = torch.cuda.get_device_name()
        lines["driver"] = nvidia_smi("driver_version")
        lines["SM clock"] = f"{nvidia_smi('clocks.sm')} now, {nvidia_smi('clocks.max.sm')} at most"
        lines["loader"] = f"{default_driver().name} {default_driver().version}"
    lines["torch"] = f"{torch.__version__} (CUDA {torch.version.cuda})"
    lines["kernels"] = f"{', '.join(built_archs(library.manifest))}, {library.manifest.compiler}"
    if library.manifest.retarget:
        lines["kernels"] += f", all built for {library.manifest.retarget}"
    lines["commit"] = output_of("git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD")
    return lines


def nvidia_smi(field: str) -> str:
    """One property of the current device as nvidia-smi prints it, such as ``"1980 MHz"``, or ``"unknown"``."""
    uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
    return output_of("nvidia-smi", f"--id=GPU-{uuid}", f"--query-gpu={field}", "--format=csv,noheader")


def output_of(*command: str) -> str:
    """Output of a command, or ``"unknown"`` where the command is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def print_header(lines: dict[str, str]) -> None:
    for name, value in lines.items():
        print(f"- {name}: {value}")
    print(flush=True)


def table_head(columns: Sequence[str], texts: int = 1) -> str:
    """First two lines of a Markdown table; the first `texts` columns are text, the others are numbers."""
    return f"| {' | '.join(columns)} |\n|{'---|' * texts + '---:|' * (len(columns) - texts)}"


def table_row(cells: Sequence[object]) -> str:
    """A line of a Markdown table; None is a dash."""
    return f"| {' | '.join('–' if cell is None else str(cell) for cell in cells)} |"


def write_json(path: Path | None, values: dict[str, object]) -> None:
    if path is not None:
        path.write_text(json.dumps(values, indent=1, ensure_ascii=False) + "\n")
