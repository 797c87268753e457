"""``python -m codegen``: list, render, build, verify, check, census."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from codegen.budget import judge
from codegen.check import golden_problems, update_goldens, variable_problems
from codegen.compilation import TOOLCHAINS, Compilation
from codegen.errors import BuildError, UsageError
from codegen.instructions import instructions_problems, table, update_instructions
from codegen.matrix import Matrix, PlannedKernel, read_matrix
from codegen.ninja import compile_all
from codegen.package import check_out, package_problems, write_package
from codegen.project import ROOT, Project
from codegen.render import render_all
from codegen.selection import Selection
from codegen.targets import chip_of
from sage_aot._kernels.spec import AttnSpec, target_of

Command = Callable[[argparse.Namespace, Matrix, Project], None]


def main(argv: list[str] | None = None, root: Path = ROOT) -> int:
    """Run a command and return its exit code: 0; 1 where build or check failed; 2 where request or matrix is wrong."""
    args = _parser().parse_args(argv)
    project = Project(root, (args.build_dir or root / "build").resolve())
    try:
        matrix = read_matrix(project.matrix, project.templates)
        args.command(args, matrix, project)
    except (UsageError, BuildError) as error:
        print(error, file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    return 0


def _list(args: argparse.Namespace, matrix: Matrix, project: Project) -> None:
    missing = dict(matrix.missing)
    names = _selection(args).names([*(kernel.spec.name for kernel in matrix.kernels), *missing])
    shown = [kernel for kernel in matrix.kernels if kernel.spec.name in names]
    absent = sorted(names & missing.keys())
    print(f"{len(shown)} kernels")
    for kernel in shown:
        print(f"  {kernel.spec.name}: {_sizes(kernel)}, {kernel.how.template}")
    print(f"{len(absent)} combinations without a kernel")
    for why in sorted({missing[name] for name in absent}):
        alike = [name for name in absent if missing[name] == why]
        print(f"  {len(alike)}: {why}", *alike, sep="\n    ")


def _sizes(kernel: PlannedKernel) -> str:
    """A kernel's sizes in the matrix, as text."""
    if not isinstance(kernel.spec, AttnSpec):
        return f"{kernel.how.threads} threads"
    tile = kernel.tile
    of_v = f", {tile.v_stages} of V" if tile.v_stages else ""
    return f"{tile.block_m}x{tile.block_n}, warp_m {tile.warp_m}, {tile.stages} stages{of_v}, {tile.min_blocks} blocks"


def _render(args: argparse.Namespace, matrix: Matrix, project: Project) -> None:
    render_all(_selection(args).kernels(matrix), matrix, project)


def _build(args: argparse.Namespace, matrix: Matrix, project: Project) -> None:
    compilation = Compilation(project, args.toolchain, args.retarget)
    out = _out(args, compilation)
    kernels = _taken(args, matrix, compilation)
    _compile(args, kernels, matrix, compilation)
    reports = {kernel: compilation.report(kernel) for kernel in kernels}
    verdict = judge(reports, matrix, compilation)
    _print(verdict.remarks)
    if verdict.failures:
        raise BuildError("\n".join(verdict.failures))
    manifest = write_package(reports, matrix, compilation, out)
    print(f"{len(manifest.kernels)} kernels by {manifest.compiler} in {out}")


def _verify(args: argparse.Namespace, matrix: Matrix, project: Project) -> None:
    folder = (args.folder or project.package).resolve()
    render_all(matrix.kernels, matrix, project)
    problems = package_problems(matrix, Compilation(project), folder)
    if problems:
        raise BuildError("\n".join(problems))
    print(f"{len(matrix.kernels)} kernels in {folder} are those of this source tree")


def _check(args: argparse.Namespace, matrix: Matrix, project: Project) -> None:
    kernels = _selection(args).kernels(matrix)
    problems = variable_problems(matrix, project)
    if not problems:  # otherwise nothing renders
        if args.update:
            update_goldens(matrix, project)
        compilation = Compilation(project, args.toolchain)
        problems = golden_problems(matrix, project)
        _compile(args, kernels, matrix, compilation)
        reports = {kernel: compilation.report(kernel) for kernel in kernels}
        verdict = judge(reports, matrix, compilation)
        _print(verdict.remarks)
        problems += verdict.failures
        if compilation.shippable:
            if args.update:
                update_instructions(reports, matrix, project)
            problems += instructions_problems(reports, matrix, project)
    if problems:
        raise BuildError("\n".join(problems))
    print(f"{len(kernels)} kernels checked")


def _print(lines: list[str]) -> None:
    for line in lines:
        print(line)


def _census(args: argparse.Namespace, matrix: Matrix, project: Project) -> None:
    compilation = Compilation(project, args.toolchain, args.retarget)
    kernels = _taken(args, matrix, compilation)
    _compile(args, kernels, matrix, compilation)
    print(table({kernel: compilation.report(kernel) for kernel in kernels}), end="")


def _taken(args: argparse.Namespace, matrix: Matrix, compilation: Compilation) -> tuple[PlannedKernel, ...]:
    """The kernels that a command asks for, less those whose instructions the chip of --retarget lacks, which it prints,
    and less their companions."""
    kernels = _selection(args).kernels(matrix)
    kept = [kernel for kernel in kernels if compilation.takes(kernel)]
    left_out = [kernel for kernel in kernels if not compilation.takes(kernel)]
    for kernel in left_out:
        print(f"not for {args.retarget}, which lacks instructions of {target_of(kernel.spec.arch)}{kernel.suffix}: "
              f"{kernel.spec.name}")
    orphans = _companions_of(left_out) - _companions_of(kept)
    return tuple(kernel for kernel in kept if kernel.spec.name not in orphans)


def _companions_of(kernels: list[PlannedKernel]) -> set[str]:
    return {name for kernel in kernels for name in kernel.companions}


def _compile(args: argparse.Namespace, kernels: tuple[PlannedKernel, ...], matrix: Matrix,
             compilation: Compilation) -> None:
    render_all(kernels, matrix, compilation.project)
    compile_all(kernels, compilation, args.jobs)


def _out(args: argparse.Namespace, compilation: Compilation) -> Path:
    """The folder for the kernels. UsageError for a folder inside sage_aot where the kernels are not for wheels."""
    project = compilation.project
    out = (args.out or _default_out(compilation)).resolve()
    shipped = project.package.parent.resolve()
    if not compilation.shippable and out.is_relative_to(shipped):
        why = f"for {args.retarget} alone are for tests" if args.retarget else "by nvcc are for debugging"
        raise UsageError(f"expected a folder outside {shipped}, as kernels {why}, got {out}")
    if out != project.package.resolve():
        check_out(out)
    return out


def _default_out(compilation: Compilation) -> Path:
    if compilation.shippable:
        return compilation.project.package
    prefix = "" if compilation.toolchain == "nvrtc" else f"{compilation.toolchain}_"
    suffix = f"retarget_{compilation.retarget}" if compilation.retarget else "kernels"
    return compilation.project.build / (prefix + suffix)


def _selection(args: argparse.Namespace) -> Selection:
    return Selection(tuple(args.arch), tuple(args.only))


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--arch", type=_names, action="extend", default=[], metavar="sm80,sm90",
                        help="only kernels for these; may be given several times")
    common.add_argument("--only", action="append", default=[], metavar="PATTERN",
                        help="only kernels with such a name, for example '*_d64_*', and those that feed them")
    common.add_argument("--build-dir", type=Path, metavar="DIR", help="of intermediate files; default: build/")
    compiling = argparse.ArgumentParser(add_help=False)
    compiling.add_argument("--jobs", type=_positive, metavar="N", help="compilers that run at once")
    compiling.add_argument("--toolchain", choices=TOOLCHAINS, default="nvrtc",
                           help="nvcc is for debugging: spills do not count, kernels go to build/nvcc_kernels")

    parser = argparse.ArgumentParser(prog="python -m codegen", description="Kernels from build_matrix.yaml.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Command, text: str, *parents: argparse.ArgumentParser) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text, parents=[common, *parents])
        added.set_defaults(command=run)
        return added

    command("list", _list, "print the kernels, and why every other combination is missing")
    command("render", _render, "write the CUDA sources to build/gen")
    build = command("build", _build, "compile the kernels into sage_aot/kernels", compiling)
    census = command("census", _census, "print what each attention kernel's main loop executes", compiling)
    for added in (build, census):
        added.add_argument("--retarget", type=_chip, metavar="sm_90",
                           help="compile all of them for this chip, named without a suffix, for tests")
    build.add_argument("--out", type=Path, metavar="DIR", help="a folder other than sage_aot/kernels")
    verify = command("verify", _verify, "compare a kernel folder with what this tree makes, without compiling")
    verify.add_argument("folder", nargs="?", type=Path, metavar="DIR", help="a folder other than sage_aot/kernels")
    check = command("check", _check, "compare templates, goldens, machine code and docs with what they should be",
                    compiling)
    check.add_argument("--update", action="store_true", help="rewrite the goldens and docs/instructions.md")
    return parser


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))  # "" gives ("",), no arch: () would ask for every arch


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a positive number, got {text!r}")
    return int(text)


def _chip(text: str) -> str:
    try:
        return chip_of(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
