"""The disassembler nvdisasm, from PyPI: a cubin → its instructions, with the targets of branches.

This module reads nvdisasm's JSON output, which separates predicates, opcodes and branches, and resolves addresses.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from codegen.errors import INSTALL, BuildError

_DISTRIBUTION = "nvidia-cuda-nvdisasm"
_EXECUTABLES = ("nvdisasm", "nvdisasm.exe")
_INSTRUCTION_BYTES = 16  # of every chip since sm_70
_JUMPS = ("BRA", "CALL", "JMP")  # CALL, a jump that reaches farther than BRA unless marked as a subroutine call
_ENDS = ("EXIT", "RET", "BRX", "JMX", "KILL")


@dataclass(frozen=True)
class Instruction:
    """One machine instruction, and where a thread goes from there."""

    address: int
    opcode: str  # with its modifiers: "HMMA.16816.F32"
    target: int | None = None  # address to which the instruction may jump
    falls_through: bool = True  # whether a thread may go on to the next instruction
    operands: tuple[str, ...] = ()  # as nvdisasm writes them: "R22", "[R36+0x2c00]"
    predicate: str = ""  # "@!P0"

    @property
    def name(self) -> str:
        """The opcode without its modifiers."""
        return self.opcode.split(".")[0]


def version() -> str:
    """Name and version, ``"nvdisasm 13.5.37"``; BuildError where another major version or none is installed."""
    try:
        installed = distribution(_DISTRIBUTION).version
    except PackageNotFoundError:
        installed = "none"
    if not installed.startswith("13."):  # the first major version with JSON; a later one may change its form
        raise BuildError(f"expected nvdisasm 13, got {installed}: {INSTALL}")
    return f"nvdisasm {installed}"


def disassemble(cubin: bytes) -> tuple[tuple[Instruction, ...], ...]:
    """The instructions of each function of a cubin; BuildError where nvdisasm reads no cubin."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        # -ndf: no dataflow analysis. It takes time, and resolves indirect branches, which are not followed here.
        command = [str(_executable()), "-json", "-ndf", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BuildError(f"expected a cubin that nvdisasm reads, got exit status {done.returncode}: "
                         f"{done.stderr.strip()}")
    return read_json(done.stdout)


def read_json(text: str) -> tuple[tuple[Instruction, ...], ...]:
    """The instructions of each function in nvdisasm's JSON; BuildError for another form of it."""
    try:
        _, functions = json.loads(text)
        return tuple(tuple(_instruction(function["start"] + _INSTRUCTION_BYTES * i, values)
                           for i, values in enumerate(function["sass-instructions"])) for function in functions)
    except (KeyError, TypeError, ValueError) as error:
        raise BuildError(f"expected the JSON of nvdisasm 13, got another form of it ({error!r}): {INSTALL}") from error


def _instruction(address: int, values: dict[str, Any]) -> Instruction:
    """One instruction from its JSON. A jump's address is its last operand. A jump is conditional where it has a
    predicate or further operands."""
    opcode = values["opcode"]
    name = opcode.split(".")[0]
    operands, predicate = tuple(values.get("operands", "").split(",")), values.get("predicate", "")
    *conditions, last = operands
    conditional = bool(conditions) or bool(predicate)
    if name in _JUMPS and "subroutine-call" not in values.get("other-attributes", ()):
        return Instruction(address, opcode, int(last, 16), conditional, operands, predicate)
    return Instruction(address, opcode, None, bool(predicate) or name not in _ENDS, operands, predicate)


def _executable() -> Path:
    version()
    for file in distribution(_DISTRIBUTION).files or ():
        if file.name in _EXECUTABLES:
            return Path(file.locate())
    raise BuildError(f"expected {_DISTRIBUTION} to hold one of {', '.join(_EXECUTABLES)}, got neither: {INSTALL}")
