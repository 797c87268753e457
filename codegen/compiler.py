"""Code that the two compile commands share: arguments, reading the log, and outputs that are complete or absent.

ninja runs a compile command once for several kernels of a target, since Python, the compiler's library and the
disassembler take about a second to start. The command writes NAME.cubin for each kernel, or NAME.ptx where the target
is PTX, and NAME.json next to it: a :class:`Report` of what the compiler made of the kernel, read from the log and from
the cubin's machine code, or from the PTX.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from codegen.nvdisasm import Code, disassemble
from codegen.targets import compiled_suffix, is_ptx_target
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
    def of(cls, compiler: str, compiled: Compiled, functions: tuple[Code, ...]) -> Report:
        """Read what a compiler made of a kernel, and the instructions of its functions where that is a cubin."""
        return cls._of_ptx(compiler, compiled) if compiled.is_ptx else cls._of_cubin(compiler, compiled, functions)

    @classmethod
    def _of_cubin(cls, compiler: str, compiled: Compiled, functions: tuple[Code, ...]) -> Report:
        """Make the report of a cubin from the log of ptxas -v and the machine code."""
        abi = compiled.code[_ABI_BYTE]
        machine = MachineCode(registers=max(map(int, _REGISTERS.findall(compiled.log))), elf_abi=abi,
                              spill_bytes=sum(map(int, sum(_SPILLS.findall(compiled.log), ()))))
        return cls(compiler, machine, _known(_FIRST_DRIVER_OF_ABI, abi, "ABI"), tensor_opcodes(functions),
                   main_loop(functions), exponentials_before_arrival(functions), promotion_under_products(functions),
                   of_elf(compiled.code))

    @classmethod
    def _of_ptx(cls, compiler: str, compiled: Compiled) -> Report:
        text = compiled.code.decode()
        version, = _PTX_VERSION.findall(text)
        return cls(compiler, None, _known(_FIRST_DRIVER_OF_PTX, version, "version of PTX"), ptx_opcodes(text), None,
                   0, 0, of_ptx(text))

    @classmethod
    def read(cls, compiled: Path) -> Report:
        """The report next to a compiled kernel."""
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

    def check(self, entries: tuple[str, ...]) -> None:
        """BuildError for warnings and for anything but these entry points."""
        if _WARNING.search(self.log):
            raise BuildError(f"expected no warnings, got\n{self.log}")  # NVRTC cannot make warnings errors
        if loss := _LOSS.search(self.log):
            raise BuildError(f"expected Hopper's instructions as they are written, got {loss[0]}")
        found = _PTX_ENTRY.findall(self.code.decode()) if self.is_ptx else _ENTRY.findall(self.log)
        if sorted(found) != sorted(entries):
            raise BuildError(f"expected the __global__ functions {', '.join(entries)}, got "
                             f"{', '.join(found) or 'none'}")


def _known(first_drivers: dict[_Key, int], found: _Key, what: str) -> int:
    """The first driver that reads what a compiler wrote. BuildError for an ABI or version that the table lacks: no
    driver can be promised for it."""
    if found not in first_drivers:
        raise BuildError(f"expected the {what} {' or '.join(map(str, first_drivers))}, got {found}: look up which "
                         f"driver brought it and add it to {Path(__file__).name}")
    return first_drivers[found]


@dataclass(frozen=True)
class _Kernel:
    """A kernel that a command compiles."""

    source: Path
    entries: tuple[str, ...]
    out: Path  # its cubin or PTX

    @property
    def report(self) -> Path:
        return self.out.with_suffix(".json")


def main(compile_kernel: Callable[[Path, str, Path], Compiled], version: Callable[[], str]) -> int:
    """The command line around one compiler."""
    parser = argparse.ArgumentParser(description="Compile kernels to cubins or PTX, with a report next to each.")
    parser.add_argument("--target", required=True, metavar="sm_80", help="of all these kernels")
    parser.add_argument("--kernel", action="append", required=True, nargs="+", metavar=("SOURCE", "ENTRY"),
                        help="a source, and its entry points; without any: one with the source's name")
    parser.add_argument("--include", required=True, type=Path, metavar="DIR")
    parser.add_argument("-o", dest="folder", required=True, type=Path, metavar="DIR", help="of the outputs")
    args = parser.parse_args()
    kernels = [_Kernel(source, tuple(entries) or (source.stem,),
                       args.folder / f"{source.stem}{compiled_suffix(args.target)}")
               for source, *entries in ((Path(first), *others) for first, *others in args.kernel)]
    for kernel in kernels:  # a failure must not leave the outputs of an earlier success
        kernel.out.unlink(missing_ok=True)
        kernel.report.unlink(missing_ok=True)
    try:
        compiler = version()
        compiled = [_compiled(kernel, compile_kernel, args.target, args.include) for kernel in kernels]
        functions = _functions_of(compiled, args.target)
        reports = [_report(*of_one, compiler) for of_one in zip(kernels, compiled, functions)]
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    for kernel, found, report in zip(kernels, compiled, reports):
        write_atomic(kernel.out, found.code)
        write_atomic(kernel.report, json.dumps(vars(report)).encode())
    return 0


def _compiled(kernel: _Kernel, compile_kernel: Callable[[Path, str, Path], Compiled], target: str,
              include: Path) -> Compiled:
    with _naming(kernel):
        found = compile_kernel(kernel.source, target, include)
        found.check(kernel.entries)
        return found


def _functions_of(compiled: list[Compiled], target: str) -> list[tuple[Code, ...]]:
    """Functions of each cubin; none of PTX."""
    if is_ptx_target(target):
        return [()] * len(compiled)
    return disassemble([found.code for found in compiled], target)


def _report(kernel: _Kernel, compiled: Compiled, functions: tuple[Code, ...], compiler: str) -> Report:
    with _naming(kernel):
        return Report.of(compiler, compiled, functions)


@contextmanager
def _naming(kernel: _Kernel) -> Iterator[None]:
    """Errors name the kernel: a command compiles several."""
    try:
        yield
    except (BuildError, OSError) as error:
        raise BuildError(f"{kernel.source}: {error}") from error
