"""Names every line of more than 120 columns in the tracked sources and documents: python ci/columns.py

ruff and clang-format keep code within its columns, but not all comments, and no documents. Of documents, tables and
blocks of commands may be wider, and any line with an address. Logs of measurements and planted bugs stay as they are.
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

COLUMNS = 120
ROOT = Path(__file__).resolve().parent.parent
SUFFIXES = ("py", "cuh", "cu", "jinja", "md")
AS_THEY_ARE = ("bench/results/", "tests/sim/faults/")


def wide_lines(name: str, text: str) -> Iterator[str]:
    """The wide lines of a file, each as ``name:line: how wide``."""
    in_block = False
    for number, line in enumerate(text.splitlines(), 1):
        if name.endswith(".md") and line.lstrip().startswith("```"):
            in_block = not in_block
        may_be_wide = name.endswith(".md") and (in_block or line.startswith("|")) or "://" in line
        if len(line) > COLUMNS and not may_be_wide:
            yield f"{name}:{number}: expected at most {COLUMNS} columns, got {len(line)}"


def main() -> int:
    tracked = subprocess.run(["git", "ls-files", "-z", *(f"*.{suffix}" for suffix in SUFFIXES)], cwd=ROOT, check=True,
                             stdout=subprocess.PIPE, encoding="utf-8").stdout.split("\0")
    names = [name for name in tracked if name and not name.startswith(AS_THEY_ARE) and (ROOT / name).exists()]
    wide = [line for name in names for line in wide_lines(name, (ROOT / name).read_text(encoding="utf-8"))]
    print(*wide, sep="\n", end="\n" if wide else "", file=sys.stderr)
    return 1 if wide else 0


if __name__ == "__main__":
    sys.exit(main())
