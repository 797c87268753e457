#!/usr/bin/env bash
# Runs the README's test command in a fresh environment. Between the install and the tests of that command, this script
# lints, and builds and checks every kernel. During the tests it checks that both wheels equal the sdist's wheels from
# another folder, are right in every file, and work without the source tree, and that the conda package builds and
# works. Prints the minutes of each part.
set -euo pipefail
cd "$(dirname "$0")/.."
export CI=true  # no test is left out for want of a kernel
unset SAGE_AOT_KERNELS SAGE_AOT_EMULATE SAGE_AOT_ARCHS
rm -rf .venv-test dist build/hub
command=$(grep -m 1 -- '-m pytest$' README.md)
echo "+ ci/lint.sh, .venv-test/bin/python -m codegen check, after: $command"

minutes=()
row() {  # NAME SECONDS
  awk -v name="$1" -v seconds="$2" 'BEGIN { printf "| %s | %.1f |", name, seconds / 60 }'
}

part() {  # NAME COMMAND...; a function must say by && where it stops: bash ignores -e in it
  local begin=$SECONDS status=0
  "${@:2}" || status=$?
  minutes+=("$(row "$1" $((SECONDS - begin)))")
  return "$status"
}

# Runs during the tests of the source tree, which leave a processor idle at times.
check_wheel() {
  # A kernel of each kind as a cubin of each ABI, and as PTX; a release compiles all of them again (ci/kernels.sh).
  .venv-test/bin/python ci/reproduce.py dist --only 'sage_attn_sm90_d64_*_causal_vsmooth_qsmooth' \
    --only 'sage_attn_sm100_d64_*_causal_vsmooth_qsmooth' --only 'sage_attn_ptx80_d64_*_causal_vsmooth_qsmooth'
  .venv-test/bin/python ci/wheels.py check dist/*.whl
  .venv-test/bin/python ci/hub.py build dist/*.whl build/hub --version 1 --repo ORG/sage-aot
  .venv-test/bin/python ci/test_wheel.py dist/sage_aot-*.whl --second dist/sage_aot_sageattention-*.whl --borrow \
    --tests tests/unit/test_loader.py tests/unit/test_manifest.py tests/unit/test_select.py
  # The conda package of the sdist, with the fewest kernels of an arch.
  .venv-test/bin/pip install -q -c ci/constraints.txt py-rattler-build py-rattler wheel
  .venv-test/bin/python ci/conda_recipe.py try dist/sage_aot-*.tar.gz build/conda --archs sm100
}

lint() {
  .venv-test/bin/pip install -q -c ci/constraints.txt ruff mypy clang-format types-PyYAML &&
    PYTHON=.venv-test/bin/python bash ci/lint.sh
}

check_kernels() {
  .venv-test/bin/python -m codegen build && .venv-test/bin/python -m codegen check
}

finish() {
  if [ -n "$wheel" ]; then kill "$wheel" 2> /dev/null || true; fi
  cat "$log"
  rm -f "$log"
  printf '%s\n' "| part | minutes |" "|---|--:|" "${minutes[@]}" "$(row together $SECONDS)"
}

log=$(mktemp) wheel=
trap finish EXIT
part "environment and kernels" eval "${command% && *}"
part "lint" lint
part "check of the kernels" check_kernels
check_wheel > "$log" 2>&1 &
wheel=$!
status=0
part "tests, and the wheel at the same time" eval "${command##* && }" || status=$?
part "the wheel, after the tests" wait "$wheel" || status=$?
exit "$status"
