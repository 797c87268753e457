#!/usr/bin/env bash
# Runs ruff, mypy, clang-format and ci/columns.py with the Python that $PYTHON names, or python3. Installs nothing: the
# environment of that Python must hold these tools, and what mypy reads the types of: torch, numpy, the extra `codegen`,
# pytest, filelock and tree-sitter.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
"$python" -m ruff check .
"$python" -m mypy
"$python" -m mypy --platform win32 --cache-dir .mypy_cache/win32  # calls that Windows lacks, such as os.fork
"$python" -m mypy --config-file tests/mypy.ini
find templates/include tests/sim \( -name '*.cuh' -o -name '*.cu' -o -name '*.cpp' -o -name '*.h' \) -print0 |
  xargs -0 "$python" -c 'from clang_format import clang_format; clang_format()' --dry-run -Werror
"$python" ci/columns.py
