#!/usr/bin/env bash
# The second job of a release, on each platform: packs sage_aot/kernels, as the first job left them, into the platform's
# wheel in wheelhouse/ and tests it on every Python that pyproject.toml names.
set -euo pipefail
cd "$(dirname "$0")/.."
python -m pip install -q cibuildwheel==4.3.3
python -m cibuildwheel --output-dir wheelhouse .
python ci/wheels.py check wheelhouse/*.whl
