"""Three or four small calls of every attention variant, for compute-sanitizer to watch.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 python tests/gpu/sanitize.py

Run it with the tools racecheck and initcheck, too. Archs named after the file limit the run to their variants. Without
torch's caching allocator, an access beyond a tensor is an access beyond its allocation, and memory starts
uninitialized."""

from __future__ import annotations

import sys

import torch
from variants import SPECS, run

from sage_aot._call.pipeline import default_library
from sage_aot._families import FAMILIES
from sage_aot._kernels.spec import AttnSpec
from sage_aot._tools import reference

CALLS = [
    ("outlier", torch.bfloat16, (1, 2, 150), (1, 1, 200), 0, False),  # grouped heads, more keys than queries, ragged
    ("normal", torch.float16, (1, 2, 70), (1, 2, 70), 7, False),  # rows that are not aligned to 16 bytes
    ("normal", torch.bfloat16, (1, 2, 150), (1, 2, 200), 0, True),  # NaNs: rows read again, atomics on shared memory
    ("normal", torch.bfloat16, (3, 2, 150), (3, 1, 300), 0, False),  # a key mask
]
"""Input class, dtype, [batch, heads, rows] of q and of k and v, channels fewer than the kernel's, and whether there are
NaNs in keys of the first head and in values of the second. Calls of three batch entries have a key mask, which leaves
the last entry no key."""

SCHEDULER_CALL = ("normal", torch.bfloat16, (1, 150, 150), (1, 150, 700), 0, False)
"""One more call for kernels of persistent blocks: more query tiles than any GPU has SMs, and more KV tiles than the
pipeline has stages."""


def main() -> None:
    specs = [spec for spec in SPECS if spec.arch in sys.argv[1:] or not sys.argv[1:]]
    count = 0
    for spec in specs:
        for kind, dtype, q_shape, kv_shape, missing, plant in calls_of(spec):
            count += 1
            headdim = spec.headdim - missing
            q, k, v = reference.inputs(kind, (*q_shape, headdim), (*kv_shape, headdim), dtype,
                                        torch.Generator("cuda").manual_seed(4))
            if plant:
                k[0, 0, [70, 131, 132], 5] = v[0, 1, [3, 131], 9] = torch.nan
            keys = torch.arange(kv_shape[2], device="cuda")
            key_mask = keys >= torch.tensor([[0], [170], [300]], device="cuda") if q_shape[0] == 3 else None
            result = run(spec, q, k, v, key_mask=key_mask, poison=False)
            torch.cuda.synchronize()
            expected = _spoilt(spec, result.out) if plant else torch.zeros_like(result.out, dtype=torch.bool)
            assert torch.equal(~result.out.isfinite(), expected), spec.name
    print(f"{count} calls of {len(specs)} variants")


def calls_of(spec: AttnSpec) -> list[tuple]:
    family = default_library().manifest.kernels[spec.name].family
    return [*CALLS, SCHEDULER_CALL] if FAMILIES[family].persistent else CALLS


def _spoilt(spec: AttnSpec, out: torch.Tensor) -> torch.Tensor:
    """A mask of the elements of `out` that must be NaN: in the first head, rows that see key 70; in the second head,
    all of whose rows see key 3, channel 9."""
    spoilt = torch.zeros_like(out, dtype=torch.bool)
    spoilt[0, 0, 20 if spec.mask == "causal" else 0:] = True  # causal: row i sees the keys up to i + 200 - 150
    spoilt[0, 1, :, 9] = True
    return spoilt


if __name__ == "__main__":
    main()
