#!/usr/bin/env bash
# Runs the README's test command as it stands there, in a fresh environment, then builds and checks every kernel.
set -euo pipefail
cd "$(dirname "$0")/.."
rm -rf .venv-test
command=$(grep -m 1 -- '-m pytest$' README.md)
echo "+ .venv-test/bin/python -m codegen check, after: $command"
eval "${command% && *}"
.venv-test/bin/python -m codegen build
.venv-test/bin/python -m codegen check
eval "${command##* && }"
