#!/usr/bin/env bash
# What the policy's thresholds are worth on this GPU: built-in ones, then those of `sage-aot calibrate`.
#
#     bench/gain.sh FOLDER [PART …]     # from the root of the repository; all parts take about 9 minutes on an H100
#
# Parts: calibrate (2 minutes), measured (bench with its thresholds, 3), host (bench/policy.py, 1), built_in (3). Thresholds
# go to FOLDER/calibration, and nothing of the user's configuration is read. $PYTHON: python3 by default.
set -euo pipefail
out=$(mkdir -p "$1" && cd "$1" && pwd)
shift
python=${PYTHON:-python3}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
export SAGE_AOT_CALIBRATION=$out/calibration
for part in "${@:-calibrate measured host built_in}"; do
  for one in $part; do
    echo "== $one"
    case $one in
      calibrate) time "$python" -m sage_aot calibrate --json "$out/calibrate.json" | tee "$out/calibrate.log"
                 "$python" -m sage_aot info | tee "$out/info.log" ;;
      measured) "$python" -m sage_aot bench --json "$out/measured.json" --png "$out/measured.png" |
                  tee "$out/measured.log" ;;
      host) "$python" bench/policy.py --json "$out/host.json" | tee "$out/host.log" ;;
      built_in) SAGE_AOT_CALIBRATION=0 "$python" -m sage_aot bench --json "$out/built_in.json" \
                  --png "$out/built_in.png" | tee "$out/built_in.log" ;;
      *) echo "expected some of calibrate, measured, host and built_in, got $one" >&2; exit 2 ;;
    esac
  done
done
