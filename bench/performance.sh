#!/usr/bin/env bash
# All that docs/performance.md has of one GPU, in one run of one commit.
#
#     bench/performance.sh FOLDER [PART …]     # from the root of the repository; all parts by default
#
# Each part leaves PART.log in FOLDER, PART.json where the program writes one, and PART.clocks.csv: the SM clock, power
# and temperature of every half second. FOLDER/commit names the commit. A part that fails is named at the end, and the
# others run. $PYTHON: python3 by default.
set -euo pipefail
out=$(mkdir -p "$1" && cd "$1" && pwd)
shift
[ $# -gt 0 ] || set -- dense graph sustained linear_p use masks masks_causal varlen varlen_causal few inputs hosts \
  latency backward accuracy sparse peers
python=${PYTHON:-python3}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
git describe --always --dirty > "$out/commit" || echo unknown > "$out/commit"
clocks= failed=
trap '[ -z "$clocks" ] || kill "$clocks" 2> /dev/null || true' EXIT

measure() {  # PART COMMAND...
  echo "== $1"
  nvidia-smi --query-gpu=timestamp,clocks.sm,power.draw,temperature.gpu --format=csv -lms 500 > "$out/$1.clocks.csv" &
  clocks=$!
  "$python" "${@:2}" | tee "$out/$1.log" || failed="$failed $1"
  kill "$clocks" 2> /dev/null || true
}

for part in "$@"; do
  case $part in
    dense) measure dense bench/speed.py --headdim 64,128,256 --json "$out/dense.json" ;;
    linear_p) measure linear_p bench/linear_p.py ;;
    graph) measure graph bench/speed.py --headdim 64,128,256 --seqlen 1024,4096,16384 --graph \
      --json "$out/graph.json" ;;
    sustained) measure sustained bench/speed.py --headdim 64,128 --seqlen 4096,16384 --sustained 2 \
      --json "$out/sustained.json" ;;
    use) measure use -m sage_aot bench --json "$out/use.json" --png "$out/use.png" ;;
    masks) measure masks bench/masks.py ;;
    masks_causal) measure masks_causal bench/masks.py --causal --pad left ;;
    varlen) measure varlen bench/varlen.py ;;
    varlen_causal) measure varlen_causal bench/varlen.py --causal ;;
    sparse) measure sparse bench/sparse.py --headdim 64,128 --rounds 7 ;;
    few) measure few bench/quantized_kv.py ;;
    inputs) measure inputs bench/inputs.py ;;
    hosts) measure hosts bench/hosts.py ;;
    latency) measure latency bench/latency.py --json "$out/latency.json" ;;
    backward) measure backward bench/backward.py --json "$out/backward.json" ;;
    accuracy) measure accuracy bench/accuracy.py kernels --headdim 64,128,256 --json "$out/accuracy.json" ;;
    peers) measure peers bench/peers.py --graph --json "$out/peers.json" ;;
    *) echo "expected a part of the list in $0, got $part" >&2; exit 2 ;;
  esac
done
if [ -n "$failed" ]; then
  echo "expected every part to end well, got failures of$failed" >&2
  exit 1
fi
