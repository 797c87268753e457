#!/usr/bin/env bash
# The first job of a release: compiles every kernel, checks them, compiles all of them again from the sdist in another
# folder, and leaves sage_aot/kernels for the other jobs, and in dist/ the sdist and the wheel of sage-aot-sageattention,
# which every platform shares. Needs Linux and Python 3.12 or later.
set -euo pipefail
cd "$(dirname "$0")/.."
export SAGE_AOT_CACHE=  # what is released is compiled here
python3 -m venv .venv-kernels
.venv-kernels/bin/pip install -q -c ci/constraints.txt $(.venv-kernels/bin/python ci/extra.py codegen)
.venv-kernels/bin/python -m codegen build
.venv-kernels/bin/python -m codegen check
.venv-kernels/bin/python ci/reproduce.py dist
.venv-kernels/bin/python ci/wheels.py check dist/*.whl
rm dist/sage_aot-*.whl  # each platform packs its own
