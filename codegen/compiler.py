"""What the two compile commands share: arguments, the log's meaning, and outputs that appear complete or not at all.

ninja runs a command once per kernel. It writes OUT.cubin and, beside it, OUT.json: a :class:`Report` of what the
compiler made of the kernel, from its log and from the cubin's machine code.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from codegen._shared import MainLoop
from codegen.census import Code, main_loop, tensor_opcodes
from codegen.errors import BuildError
from codegen.files import write_atomic
from codegen.nvdisasm import disassemble

_ENTRY = re.compile(r"Compiling entry function '(\w+)'")
_REGISTERS = re.compile(r"Used (\d+) registers")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_WARNING = re.compile(r"\bwarning( #|\s*:)")  # not the remark on how to suppress them


@dataclass(frozen=True)
class Report:
    """What the compiler made of one kernel."""

    compiler: str  # name and full version
    registers: int  # of a thread
    spill_bytes: int  # stores and loads, of the kernel and of functions it calls
    stack_bytes: int  # the largest frame
    opcodes: dict[str, int]  # tensor-core instructions
    main_loop: MainLoop | None  # None for a kernel without such instructions in a loop

    @classmethod
    def of(cls, compiler: str, kernel: str, log: str, functions: tuple[Code, ...]) -> Report:
        """Read the log of ptxas -v and the code; BuildError for warnings and for anything but this one kernel."""
        if _WARNING.search(log):
            raise BuildError("expected no warnings")  # NVRTC has no option for it
        entries = _ENTRY.findall(log)
        if entries != [kernel]:
            raise BuildError(f"expected one __global__ function, named {kernel} as its file, got {entries}")
        frames = [tuple(map(int, frame)) for frame in _STACK.findall(log)]
        return cls(compiler, int(_REGISTERS.findall(log)[0]), sum(stores + loads for _, stores, loads in frames),
                   max(stack for stack, _, _ in frames), tensor_opcodes(functions), main_loop(functions))

    @classmethod
    def read(cls, cubin: Path) -> Report:
        """The report beside a cubin."""
        values = json.loads(cubin.with_suffix(".json").read_text())
        loop = values["main_loop"]
        return cls(**{**values, "main_loop": MainLoop(**loop) if loop else None})


@dataclass(frozen=True)
class Compiled:
    """What a compiler returns."""

    cubin: bytes
    log: str


def main(compile_cubin: Callable[[Path, str, Path], Compiled], version: Callable[[], str]) -> int:
    """The command line around one compiler."""
    parser = argparse.ArgumentParser(description="Compile one kernel to a cubin and a report beside it.")
    parser.add_argument("source", type=Path)
    parser.add_argument("--target", required=True, metavar="sm_80")
    parser.add_argument("--include", required=True, type=Path, metavar="DIR")
    parser.add_argument("-o", dest="out", required=True, type=Path, metavar="OUT.cubin")
    args = parser.parse_args()
    outputs = (args.out, args.out.with_suffix(".json"))
    for path in outputs:
        path.unlink(missing_ok=True)  # a failure must not leave the last success behind
    log = ""
    try:
        compiled = compile_cubin(args.source, args.target, args.include)
        log = compiled.log
        report = Report.of(version(), args.source.stem, log, disassemble(compiled.cubin))
    except (BuildError, OSError) as error:
        print(f"{log}{args.source}: {error}", file=sys.stderr)
        return 1
    for path, data in zip(outputs, (compiled.cubin, json.dumps(asdict(report)).encode())):
        write_atomic(path, data)
    return 0
