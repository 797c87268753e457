"""Program counters → source lines, from the line tables of DWARF."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

from elftools.elf.elffile import ELFFile


def line_of(library: Path, pc: int) -> str:
    """The source line, ``file:line``, that an instruction of a shared library comes from."""
    for begin, end, place in _rows(library):
        if begin <= pc < end:
            return place
    return f"{library.name}+0x{pc:x}"


@functools.cache
def _rows(library: Path) -> list[tuple[int, int, str]]:
    """First and last address of each stretch of code, and its place."""
    rows = []
    with library.open("rb") as file:
        dwarf = ELFFile(file).get_dwarf_info()
        for unit in dwarf.iter_CUs():
            program = dwarf.line_program_for_CU(unit)
            inside = unit.get_top_DIE().attributes["DW_AT_comp_dir"].value.decode()  # "."
            folder = os.path.join(library.parent, inside)
            states = [entry.state for entry in program.get_entries() if entry.state is not None]
            line = 0
            for state, following in zip(states, states[1:]):
                line = state.line or line  # compilers say 0 where they merged lines
                if not state.end_sequence:
                    file_name = _file(program.header, state.file, folder)
                    rows.append((state.address, following.address, f"{file_name}:{line}"))
    return rows


def _file(header: Any, index: int, folder: str) -> str:
    """The file of an index of a line program; DWARF 5 counts files and folders from 0, those before from 1."""
    first = 0 if header.version >= 5 else 1
    entry = header.file_entry[index - first]
    folders = [name.decode() for name in header.include_directory]
    inside = folders if first == 0 else ["", *folders]
    return os.path.normpath(os.path.join(folder, inside[entry.dir_index], entry.name.decode()))
