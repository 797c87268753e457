"""``sage-aot info | verify | demo | bench | calibrate | audit``, or ``python -m sage_aot`` for ``sage-aot``."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Iterator

import torch

from sage_aot._tools import verify
from sage_aot._tools.info import info
from sage_aot.errors import ArgumentError, SageAotError
from sage_aot.integrations._calibration import VARIABLE, choose


def main() -> int:
    _print_whatever_the_encoding()
    parser = argparse.ArgumentParser(prog="sage-aot", description="Quantized attention from precompiled kernels.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="versions, devices, the kernel each would run, what is missing")
    _add_verify(commands)
    of_demo = commands.add_parser(
        "demo", help="attention on a pretrained transformer's activations, compared with float64")
    of_demo.add_argument("--png", default="sage_aot_demo.png", metavar="FILE",
                         help="picture to write (default: %(default)s)")
    _add_bench(commands)
    _add_calibrate(commands)
    _add_audit(commands)
    arguments = parser.parse_args()
    try:
        if arguments.command == "info":
            print("\n".join([info(), *_thresholds()]))
            return 0
        if arguments.command == "verify":
            return verify.main(files_only=arguments.files, seed=arguments.seed)
        if arguments.command == "bench":
            from sage_aot._cli import bench

            return bench.main(arguments.shape, arguments.png, arguments.json)
        if arguments.command == "calibrate":
            from sage_aot._cli import calibrate

            return calibrate.main(arguments.json)
        if arguments.command == "audit":
            return _audit(arguments)
        from sage_aot._cli import demo

        return demo.main(arguments.png)
    except SageAotError as error:
        print(f"sage_aot: {error}", file=sys.stderr)
        return 1


def _audit(arguments: argparse.Namespace) -> int:
    from sage_aot._cli import audit

    read = arguments.model, arguments.text, arguments.tokens
    if arguments.sparse:
        return audit.main_of_sparse(*read, 0.05 if arguments.error is None else arguments.error, arguments.save)
    for option in ("error", "save"):
        if getattr(arguments, option) is not None:
            raise ArgumentError(f"--{option}: expected it only with --sparse, got {getattr(arguments, option)}; add "
                                f"--sparse")
    return audit.main(*read)


def _print_whatever_the_encoding() -> None:
    """Print `?` for what the encoding of the output lacks. Windows gives files and pipes the machine's code page, and
    few code pages have all of the tables' signs, such as × and ²."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _thresholds() -> Iterator[str]:
    """The thresholds that the policy of the integrations takes on each GPU, in words."""
    for device in range(torch.cuda.device_count()):
        chosen = choose(device)
        yield f"cuda:{device}: thresholds of the policy: {chosen.source}"
        if chosen.refused is not None:
            yield f"  not taken: {chosen.refused}"


def _add_verify(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    of_verify = commands.add_parser(
        "verify", help="check every file, load and run every kernel that the GPUs here can take",
        description=f"Exit code {verify.VERIFIED} where nothing is wrong, {verify.FAILED} where something is, "
                    f"{verify.NOT_RUN} where the files are right but there is no GPU to run a kernel on.")
    of_verify.add_argument("--files", action="store_true", help="check files only; needs no GPU")
    of_verify.add_argument("--seed", type=int, help="seed of the random inputs (default: a new one, which is printed)")


def _add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    of_bench = commands.add_parser(
        "bench", help="speed of attention calls compared with torch's, on this GPU",
        description="Times of attention calls as models make them, bf16: torch's fastest backend, sage_aot.attn, and "
                    "the policy, which is sage_aot.integrations.torch.sdpa and leaves calls to torch that are faster "
                    "there. 'x gpu' is the speed as a multiple of torch's by the GPU's time, 'x queued' that by the "
                    "time of calls that are queued, in which the host counts.")
    of_bench.add_argument("--shape", action="append", default=[], metavar="B,H[/HKV],Q[/K],D[,MASK]",
                          help="a call of batch, heads, queries, keys, headdim and mask, such as "
                               "1,32/8,8192,128,causal; may be given again (default: calls of models in use). Without "
                               "HKV all heads, without K as many keys as queries. causal takes as many keys as "
                               "queries. padded: every second batch entry lacks its last 256 keys, or a quarter of "
                               "them if that is less")
    of_bench.add_argument("--png", default="sage_aot_bench.png", metavar="FILE",
                          help="picture to write, with matplotlib (default: %(default)s)")
    of_bench.add_argument("--json", metavar="FILE", help="also write all times here")


def _add_calibrate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    of_calibrate = commands.add_parser(
        "calibrate", help="measure on this GPU which calls sage_aot computes faster than torch",
        description=f"Measures attention calls by sage_aot and by every backend of torch's, in less than two minutes, "
                    f"and writes the policy's thresholds for this GPU, driver, torch and sage_aot to the user's "
                    f"configuration folder; {VARIABLE} names another, {VARIABLE}=0 none. Processes that start later "
                    f"take them. Let nothing else run on the GPU meanwhile.")
    of_calibrate.add_argument("--json", metavar="FILE", help="also write all times here")


def _add_audit(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    of_audit = commands.add_parser(
        "audit", help="error of each attention call of a language model",
        description="Runs a model of transformers in bf16 with torch's attention and with sage_aot, on the GPU if "
                    "there is one. Prints the error of each attention call that sage_aot computes, whether or not it "
                    "is faster, against torch's on the same inputs, and that of the model's output. Exit code 1 where "
                    "sage_aot computes none. With --sparse it finds, for each head of a causal language model, the "
                    "least share of blocks of keys with which its output stays close to that of all blocks, and prints "
                    "the density and the error of each layer.")
    of_audit.add_argument("model", help="a folder, or a name on the Hugging Face Hub")
    of_audit.add_argument("--text", metavar="FILE", help="text to read (default: random tokens)")
    of_audit.add_argument("--tokens", type=int, default=2048,
                          help="tokens at most; no more than the model has positions (default: %(default)s)")
    of_audit.add_argument("--sparse", action="store_true",
                          help="find the least density of blocks of 64 by 64, in texts of 16 blocks or more")
    of_audit.add_argument("--error", type=float, metavar="BOUND",
                          help="with --sparse: relative L1 of a head against all blocks, at most (default: 0.05)")
    of_audit.add_argument("--save", metavar="FILE",
                          help="with --sparse: also write the shares here, for sage_aot.sparse.load_tuned")
