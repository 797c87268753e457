"""Two small calls of every attention variant, for compute-sanitizer to watch.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 python tests/gpu/sanitize.py

and the same with the tools racecheck and initcheck. Without torch's cache an access beyond a tensor is one beyond its
allocation, and memory starts uninitialized.
"""

from __future__ import annotations

import torch
from variants import SPECS, run

from sage_aot import _reference

CALLS = [
    ("outlier", torch.bfloat16, (1, 2, 150), (1, 1, 200), 0),  # grouped heads, more keys than queries, ragged tiles
    ("normal", torch.float16, (1, 2, 70), (1, 2, 70), 7),  # rows that are not aligned to 16 bytes
]
"""Input class, dtype, [batch, heads, rows] of q and of k and v, channels fewer than the kernel's."""


def main() -> None:
    for spec in SPECS:
        for kind, dtype, q_shape, kv_shape, missing in CALLS:
            headdim = spec.headdim - missing
            q, k, v = _reference.inputs(kind, (*q_shape, headdim), (*kv_shape, headdim), dtype,
                                        torch.Generator("cuda").manual_seed(4))
            result = run(spec, q, k, v, poison=False)
            torch.cuda.synchronize()
            assert result.out.isfinite().all(), spec.name
    print(f"{len(CALLS) * len(SPECS)} calls of {len(SPECS)} variants")


if __name__ == "__main__":
    main()
