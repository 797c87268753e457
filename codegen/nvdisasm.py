"""The disassembler nvdisasm, from PyPI: cubins → their instructions, with the targets of branches.

nvdisasm takes longer to start than to read a kernel. It is therefore given the bare code of many cubins, one behind the
other; where a function begins, the cubin says. nvdisasm's JSON output separates predicates, opcodes and branches.
"""

from __future__ import annotations

import io
import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile

from codegen.errors import INSTALL, BuildError

_DISTRIBUTION = "nvidia-cuda-nvdisasm"
_EXECUTABLES = ("nvdisasm", "nvdisasm.exe")
_INSTRUCTION_BYTES = 16  # of every chip since sm_70
_JUMPS = ("BRA", "CALL", "JMP")  # CALL, a jump that reaches farther than BRA unless it goes to a subroutine
_OTHERS_WITH_ADDRESS = ("BSSY", "RET")  # where threads meet again; the entry point
_ENDS = ("EXIT", "RET", "BRX", "JMX", "KILL")


@dataclass(frozen=True)
class Instruction:
    """One machine instruction, and where a thread goes from there."""

    address: int
    opcode: str  # with its modifiers: "HMMA.16816.F32"
    target: int | None = None  # address to which the instruction may jump
    falls_through: bool = True  # whether a thread may go on to the next instruction
    operands: tuple[str, ...] = ()  # as nvdisasm writes them: "R22", "[R36+0x2c00]"; no addresses of code
    predicate: str = ""  # "@!P0"

    @property
    def name(self) -> str:
        """The opcode without its modifiers."""
        return self.opcode.split(".")[0]


Code = tuple[Instruction, ...]
"""The instructions of one function or block."""


@dataclass(frozen=True)
class Section:
    """The machine code of one entry point."""

    code: bytes
    subroutines: frozenset[int] = frozenset()  # addresses at which those begin that stand behind the entry point


def version() -> str:
    """Name and version, ``"nvdisasm 13.5.37"``; BuildError where another major version or none is installed."""
    try:
        installed = distribution(_DISTRIBUTION).version
    except PackageNotFoundError:
        installed = "none"
    if not installed.startswith("13."):  # the first major version with JSON; a later one may change its form
        raise BuildError(f"expected nvdisasm 13, got {installed}: {INSTALL}")
    return f"nvdisasm {installed}"


def disassemble(cubins: Sequence[bytes], target: str) -> list[tuple[Code, ...]]:
    """The instructions of each function of each cubin, all of one target such as ``"sm_90a"``; BuildError for what is
    no cubin, and for what nvdisasm does not read."""
    by_cubin = [sections_of(cubin) for cubin in cubins]
    sections = [section for of_one in by_cubin for section in of_one]
    codes = iter(read_json(_run(b"".join(section.code for section in sections), target), sections))
    return [tuple(next(codes) for _ in of_one) for of_one in by_cubin]


def sections_of(cubin: bytes) -> list[Section]:
    """The machine code of a cubin, by entry points; BuildError for what is no cubin."""
    try:
        elf = ELFFile(io.BytesIO(cubin))
        symbols: Any = elf.get_section_by_name(".symtab")  # pyelftools has types for some of what it returns
        functions = [symbol.entry for symbol in (symbols.iter_symbols() if symbols else ())
                     if symbol.entry.st_info.type == "STT_FUNC"]
        return [Section(section.data(), frozenset(entry.st_value for entry in functions
                                                  if entry.st_shndx == index and entry.st_value))
                for index, section in enumerate(elf.iter_sections()) if section.name.startswith(".text.")]
    except ELFError as error:
        raise BuildError(f"expected a cubin, got another file: {error}") from error


def read_json(text: str, sections: Sequence[Section]) -> list[Code]:
    """The instructions of sections that nvdisasm was given as one; BuildError for another form of its JSON."""
    try:
        _, (whole,) = json.loads(text)
        values, result, begin = whole["sass-instructions"], [], 0
        for section in sections:
            end = begin + len(section.code) // _INSTRUCTION_BYTES
            result.append(tuple(_instruction(i, begin, of_one, section.subroutines)
                                for i, of_one in enumerate(values[begin:end])))
            begin = end
        if begin != len(values):
            raise ValueError(f"{len(values)} instructions of {begin}")
        return result
    except (KeyError, TypeError, ValueError) as error:
        raise BuildError(f"expected the JSON of nvdisasm 13, got another form of it ({error!r}): {INSTALL}") from error


def _instruction(index: int, begin: int, values: dict[str, Any], subroutines: frozenset[int]) -> Instruction:
    """One instruction of a section, which begins at an instruction of those that nvdisasm read. An address of code is
    the last operand. A jump is conditional where it has a predicate or further operands."""
    opcode, operands = values["opcode"], values.get("operands", "").split(",")
    name, predicate, address = opcode.split(".")[0], values.get("predicate", ""), index * _INSTRUCTION_BYTES
    if name in (*_JUMPS, *_OTHERS_WITH_ADDRESS):
        target = int(operands.pop(), 16) - begin * _INSTRUCTION_BYTES
        if name in _JUMPS and target not in subroutines:
            return Instruction(address, opcode, target, bool(operands or predicate), tuple(operands), predicate)
    return Instruction(address, opcode, None, bool(predicate) or name not in _ENDS, tuple(operands), predicate)


def _run(code: bytes, target: str) -> str:
    with TemporaryDirectory() as folder:
        path = Path(folder, "code")
        path.write_bytes(code)
        # -ndf: no dataflow analysis. It takes time, and resolves indirect branches, which are not followed here.
        command = [str(_executable()), "-json", "-ndf", "-b", target.replace("sm_", "SM"), str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BuildError(f"expected code of {target} that nvdisasm reads, got exit status {done.returncode}: "
                         f"{done.stderr.strip()}")
    return done.stdout


def _executable() -> Path:
    version()
    for file in distribution(_DISTRIBUTION).files or ():
        if file.name in _EXECUTABLES:
            return Path(file.locate())
    raise BuildError(f"expected {_DISTRIBUTION} to hold one of {', '.join(_EXECUTABLES)}, got neither: {INSTALL}")
