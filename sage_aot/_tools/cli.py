"""``sage-aot info | verify | demo``, or ``python -m sage_aot`` for ``sage-aot``."""

from __future__ import annotations

import argparse
import sys

from sage_aot._tools import verify
from sage_aot._tools.info import info
from sage_aot.errors import SageAotError


def main() -> int:
    parser = argparse.ArgumentParser(prog="sage-aot", description="Quantized attention from precompiled kernels.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="versions, devices, the kernel each would run, what is missing")
    _add_verify(commands)
    of_demo = commands.add_parser("demo", help="attention on a pretrained transformer's activations, beside float64")
    of_demo.add_argument("--png", default="sage_aot_demo.png", metavar="FILE",
                         help="picture to write (default: %(default)s)")
    arguments = parser.parse_args()
    try:
        if arguments.command == "info":
            print(info())
            return 0
        if arguments.command == "verify":
            return verify.main(files_only=arguments.files, seed=arguments.seed)
        from sage_aot._tools import demo  # needs the extra `demo`

        return demo.main(arguments.png)
    except SageAotError as error:
        print(f"sage_aot: {error}", file=sys.stderr)
        return 1


def _add_verify(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    of_verify = commands.add_parser(
        "verify", help="check every file, load and run every kernel that the GPUs here can take",
        description=f"Exit code {verify.VERIFIED} where nothing is wrong, {verify.FAILED} where something is, "
                    f"{verify.NOT_RUN} where the files are right but there is no GPU to run a kernel on.")
    of_verify.add_argument("--files", action="store_true", help="check files only; needs no GPU")
    of_verify.add_argument("--seed", type=int, help="of the random inputs (default: a new one, which is printed)")

