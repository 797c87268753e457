"""The facts and the struct layout that a compiled kernel carries: the tables of templates/include/sage/kernel_info.cuh,
read from a cubin, from the text of PTX, or from any other ELF file of the same source."""

from __future__ import annotations

import io
import re
import struct
from typing import Any, NamedTuple

from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile

from codegen.errors import BuildError
from sage_aot._kernels.manifest import Struct

_FACT, _FIELD = struct.Struct("<24sd"), struct.Struct("<24sii")
_FACTS, _FIELDS = "sage_facts", "sage_fields"
_PTX_TABLE = re.compile(rf"\.b8 ({_FACTS}|{_FIELDS})\[(\d+)\] = \{{([\d, ]*)\}}")
_BYTES = {"Q": 8, "T": 32, "D": 12, "i": 4, "f": 4}
"""Bytes of a field, by the character of its type."""

_REMEDY = "fields_of() must name all fields in order, and an i32 `unused` what a compiler would leave as a gap"


class KernelInfo(NamedTuple):
    """The facts of a kernel, and its struct."""

    facts: dict[str, float]
    params: str  # name of the struct that the kernel takes by value
    layout: Struct


def of_elf(image: bytes) -> KernelInfo:
    """Read the tables of a cubin or a shared library; BuildError where it has none."""
    try:
        elf = ELFFile(io.BytesIO(image))
        symbols: Any = elf.get_section_by_name(".symtab")  # pyelftools has types for some of what it returns
        tables = {symbol.name: _bytes_of(elf, symbol) for symbol in (symbols.iter_symbols() if symbols else ())
                  if symbol.name in (_FACTS, _FIELDS)}
    except ELFError as error:
        raise BuildError(f"expected an ELF file, got another: {error}") from error
    return _read(tables)


def of_ptx(text: str) -> KernelInfo:
    """Read the tables of PTX, which leaves out zeros at the end of a table; BuildError where it has none."""
    return _read({name: bytes(map(int, values.split(","))).ljust(int(size), b"\0")
                  for name, size, values in _PTX_TABLE.findall(text)})


def _bytes_of(elf: ELFFile, symbol: Any) -> bytes:
    entry = symbol.entry
    section = elf.get_section(entry.st_shndx)
    begin = entry.st_value - section["sh_addr"]
    return bytes(section.data()[begin:begin + entry.st_size])


def _read(tables: dict[str, bytes]) -> KernelInfo:
    missing = {_FACTS, _FIELDS} - tables.keys()
    if missing:
        raise BuildError(f"expected the tables {_FACTS} and {_FIELDS}, got a kernel without "
                         f"{' and '.join(sorted(missing))}: end its template with SAGE_KERNEL_INFO")
    facts = {_text(name): value for name, value in _FACT.iter_unpack(tables[_FACTS])}
    (name, _, size), *rows = ((_text(name), chr(code), offset) for name, code, offset in
                              _FIELD.iter_unpack(tables[_FIELDS]))
    layout = Struct(size, {field: (code, offset) for field, code, offset in rows})
    _check_complete(name, layout)
    return KernelInfo(facts, name, layout)


def _check_complete(name: str, layout: Struct) -> None:
    """BuildError unless the fields fill the struct: a field that fields_of() leaves out would be sent as zeros."""
    end = 0
    for field, (code, offset) in layout.fields.items():
        if offset != end:
            raise BuildError(f"expected {field} of {name} at byte {end}, right behind the field before it, got "
                             f"{offset}: {_REMEDY}")
        end += _BYTES[code]
    if end != layout.size:
        raise BuildError(f"expected the fields of {name} to fill its {layout.size} bytes, got {end}: {_REMEDY}")


def _text(name: bytes) -> str:
    return name.rstrip(b"\0").decode()
