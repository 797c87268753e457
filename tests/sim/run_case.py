"""One call on the simulator: any kernel of the matrix, any case of the fuzzer of tests/gpu.

    PYTHONPATH=. python tests/sim/run_case.py sm89_d64_qkint8_pve4m3_acc2f32_full_vraw_qraw '{"seqlen_kv": 65}'

A call that fails on a GPU so runs on a CPU, with every access checked: the fuzzer prints the kernel and the case of
each failure. The exit code is 1 where the simulator reports a fault, a result is out of its bounds, or two orders of
threads write different bytes.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parent.parent / "gpu"))

import simbuild
from fuzz_cases import Case
from simulated import Simulated
from variants_on_cpu import SEEDS, failure_of, variant

from sage_aot._kernels.spec import AttnSpec
from sage_aot._problem.options import Options


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernel", help="an attention kernel, with or without sage_attn_")
    parser.add_argument("case", nargs="?", default="{}", metavar="JSON",
                        help="fields of Case (tests/gpu/fuzz_cases.py); the others follow from the kernel")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS, help="of the order of threads and blocks")
    args = parser.parse_args()
    spec = variant(args.kernel.removeprefix("sage_attn_"))
    case, subject = case_of(spec, json.loads(args.case)), Simulated(simbuild.build_matrix([spec]))
    simbuild.build_engine()
    results = [subject.check(case, seed) for seed in args.seeds]
    for seed, (verdict, _) in zip(args.seeds, results):
        check, detail = verdict.failure or ("passed", "")
        print(f"seed {seed}: {check}\n{detail}".strip())
    failure = failure_of(results)
    print(f"{spec.name}: {failure[0] if failure else 'passed'}")
    return 1 if failure else 0


def case_of(spec: AttnSpec, values: dict[str, object]) -> Case:
    """A case of a kernel's axes, with other values where some are given."""
    return Case(**{"arch": spec.arch, "seed": 1, "headdim": spec.headdim, "read_quantized": True,
                   **vars(Options.of_axes(spec.values)), **values})


if __name__ == "__main__":
    sys.exit(main())
