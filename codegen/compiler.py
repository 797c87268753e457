"""Code that the two compile commands share: arguments, reading the log, and outputs that are complete or absent.

ninja runs a compile command once per kernel. The command writes OUT.cubin, or OUT.ptx where the target is PTX, and
OUT.json beside it: a :class:`Report` of what the compiler made of the kernel, read from the log and from the cubin's
machine code, or from the PTX.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from codegen.census import (
    exponentials_before_arrival,
    main_loop,
    promotion_under_products,
    ptx_opcodes,
    tensor_opcodes,
)
from codegen.errors import BuildError
from codegen.files import write_atomic
from codegen.kernel_info import KernelInfo, of_elf, of_ptx
from codegen.nvdisasm import disassemble
from sage_aot._kernels.manifest import MachineCode, MainLoop, Struct

_Key = TypeVar("_Key", int, str)

_ENTRY = re.compile(r"Compiling entry function '(\w+)'")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_WARNING = re.compile(r"\bwarning( #|\s*:)")  # does not match the remark on how to suppress warnings
_LOSS = re.compile(r"\(C75\d\d\).*")  # ptxas only remarks that it serialized a wgmma or ignored a setmaxnreg
_PTX_ENTRY = re.compile(r"^\.visible \.entry (\w+)\(", re.MULTILINE)
_PTX_VERSION = re.compile(r"^\.version (\d+\.\d+)$", re.MULTILINE)

_ABI_BYTE = 8  # offset of the ABI version in a cubin's ELF header
_FIRST_DRIVER_OF_ABI = {7: 525, 8: 570}
_FIRST_DRIVER_OF_PTX = {"8.7": 570, "8.8": 575, "9.0": 580}
"""The first driver of an ABI, and of a version of PTX. Within a major version of CUDA, an older driver loads the cubins
of a newer compiler if it knows the chip and the ABI. It reads PTX up to its own version only.
Source: CUDA compatibility guide, "Minor Version Compatibility"; PTX ISA, "Release Notes"."""


@dataclass(frozen=True)
class Report:
    """Findings of a compilation of one kernel."""

    compiler: str  # name and full version
    machine: MachineCode | None  # most registers of any entry point, spills of all together; None for PTX
    first_driver: int  # first branch of the driver that reads this ABI or this version of PTX
    opcodes: dict[str, int]  # tensor-core instructions
    main_loop: MainLoop | None  # None for PTX and for a kernel without such instructions in a loop
    exponentials_before_arrival: int  # codegen/census.py; 0 for PTX and for kernels whose consumers do not ping-pong
    promotion_under_products: int  # its multiply-adds, codegen/census.py; 0 for kernels without asynchronous products
    info: KernelInfo  # what the kernel says of itself

    @classmethod
    def of(cls, compiler: str, entries: tuple[str, ...], compiled: Compiled) -> Report:
        """Read the log and the code; BuildError for warnings and for anything but these entry points."""
        if _WARNING.search(compiled.log):
            raise BuildError("expected no warnings")  # NVRTC has no option that makes warnings errors
        if loss := _LOSS.search(compiled.log):
            raise BuildError(f"expected Hopper's instructions as they are written, got {loss[0]}")
        return (cls._of_ptx if compiled.is_ptx else cls._of_cubin)(compiler, entries, compiled)

    @classmethod
    def _of_cubin(cls, compiler: str, entries: tuple[str, ...], compiled: Compiled) -> Report:
        """From the log of ptxas -v and the machine code."""
        _check_entries(_ENTRY.findall(compiled.log), entries)
        functions, abi = disassemble(compiled.code), compiled.code[_ABI_BYTE]
        machine = MachineCode(registers=max(map(int, _REGISTERS.findall(compiled.log))), elf_abi=abi,
                              spill_bytes=sum(map(int, sum(_SPILLS.findall(compiled.log), ()))))
        return cls(compiler, machine, _known(_FIRST_DRIVER_OF_ABI, abi, "ABI"), tensor_opcodes(functions),
                   main_loop(functions), exponentials_before_arrival(functions), promotion_under_products(functions),
                   of_elf(compiled.code))

    @classmethod
    def _of_ptx(cls, compiler: str, entries: tuple[str, ...], compiled: Compiled) -> Report:
        text = compiled.code.decode()
        _check_entries(_PTX_ENTRY.findall(text), entries)
        version, = _PTX_VERSION.findall(text)
        return cls(compiler, None, _known(_FIRST_DRIVER_OF_PTX, version, "version of PTX"), ptx_opcodes(text), None,
                   0, 0, of_ptx(text))

    @classmethod
    def read(cls, compiled: Path) -> Report:
        """The report beside a compiled kernel."""
        values = json.loads(compiled.with_suffix(".json").read_text())
        machine, loop, (facts, params, (size, fields)) = (values[name] for name in ("machine", "main_loop", "info"))
        layout = Struct(size, {name: (code, offset) for name, (code, offset) in fields.items()})
        return cls(**{**values, "machine": machine and MachineCode(*machine), "main_loop": loop and MainLoop(*loop),
                      "info": KernelInfo(facts, params, layout)})


REPORT_LAYOUT = " ".join((*Report.__dataclass_fields__, *MachineCode._fields, *MainLoop._fields, *Struct._fields,
                          *KernelInfo._fields))
"""Fields of a report, in the order in which it is written."""


@dataclass(frozen=True)
class Compiled:
    """The output of a compiler."""

    code: bytes  # a cubin or the text of PTX
    log: str
    is_ptx: bool = False


def _check_entries(found: list[str], expected: tuple[str, ...]) -> None:
    if sorted(found) != sorted(expected):
        raise BuildError(f"expected the __global__ functions {', '.join(expected)}, got {', '.join(found) or 'none'}")


def _known(first_drivers: dict[_Key, int], found: _Key, what: str) -> int:
    """The first driver that reads what a compiler wrote. BuildError for an ABI or version that the table lacks: no
    driver can be promised for it."""
    if found not in first_drivers:
        raise BuildError(f"expected the {what} {' or '.join(map(str, first_drivers))}, got {found}: look up which "
                         f"driver brought it and add it to {Path(__file__).name}")
    return first_drivers[found]


def main(compile_kernel: Callable[[Path, str, Path], Compiled], version: Callable[[], str]) -> int:
    """The command line around one compiler."""
    parser = argparse.ArgumentParser(description="Compile one kernel to a cubin or PTX, and a report beside it.")
    parser.add_argument("source", type=Path)
    parser.add_argument("--target", required=True, metavar="sm_80")
    parser.add_argument("--entry", action="append", default=[], metavar="NAME",
                        help="one of the entry points; without any: one with the source's name")
    parser.add_argument("--include", required=True, type=Path, metavar="DIR")
    parser.add_argument("-o", dest="out", required=True, type=Path, metavar="OUT")
    args = parser.parse_args()
    outputs = (args.out, args.out.with_suffix(".json"))
    for path in outputs:
        path.unlink(missing_ok=True)  # a failure must not leave the outputs of an earlier success
    log = ""
    try:
        compiled = compile_kernel(args.source, args.target, args.include)
        log = compiled.log
        report = Report.of(version(), tuple(args.entry) or (args.source.stem,), compiled)
    except (BuildError, OSError) as error:
        print(f"{log}{args.source}: {error}", file=sys.stderr)
        return 1
    for path, data in zip(outputs, (compiled.code, json.dumps(vars(report)).encode())):
        write_atomic(path, data)
    return 0
