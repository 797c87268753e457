"""The tables of docs/simulator.md, from the lists that the tests run.

    PYTHONPATH=. python tests/sim/tables.py    # brings them up to date
"""

from __future__ import annotations

from collections.abc import Iterator

from drawn import HARMLESS, OPERATIONS
from hopper_faults import FAULTS
from mutations import MUTATIONS
from simbuild import ROOT

DOCUMENT = ROOT / "docs" / "simulator.md"


def _mutation_rows() -> Iterator[str]:
    yield "| planted bug | place | operation | kernel, less `sage_attn_` | caught by |"
    yield "|---|---|---|---|---|"
    for mutation in MUTATIONS:
        operation = type(mutation.bug.operation).__name__
        yield f"| {mutation.name} | `{mutation.bug.place}` | {operation} | `{mutation.variant}` | {mutation.caught} |"


def _operation_rows() -> Iterator[str]:
    yield "| operation | |"
    yield "|---|---|"
    for operation in sorted({type(mutation.bug.operation) for mutation in MUTATIONS} | set(OPERATIONS),
                            key=lambda kind: kind.__name__):
        yield f"| {operation.__name__} | {operation.__doc__} |"


def _harmless_rows() -> Iterator[str]:
    yield "| bug that is not drawn | place | why it does no harm |"
    yield "|---|---|---|"
    for (place, operation), reason in HARMLESS.items():
        yield f"| {type(operation).__name__} `{operation.what}` | `{place}` | {reason} |"


def _fault_rows() -> Iterator[str]:
    yield "| planted bug | reported as |"
    yield "|---|---|"
    for fault in FAULTS:
        yield f"| {fault.name} | {', or '.join(fault.kinds)} |"


def with_tables(text: str) -> str:
    """The document with its tables as they should be; each stands between two comments that name it."""
    for name, rows in (("operations", _operation_rows()), ("mutations", _mutation_rows()),
                       ("harmless", _harmless_rows()), ("hopper", _fault_rows())):
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        before, rest = text.split(begin)
        text = before + begin + "\n".join(rows) + "\n" + rest[rest.index(end):]
    return text


if __name__ == "__main__":
    DOCUMENT.write_text(with_tables(DOCUMENT.read_text()))
