"""Small calls of every attention variant, for compute-sanitizer to watch.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 python tests/gpu/sanitize.py

Run it with the tools racecheck and initcheck, too. Archs named after the file limit the run to their variants, and
`trained` to calls with a backward pass. Without torch's caching allocator, an access beyond a tensor is an access
beyond its allocation, and memory starts uninitialized. After calls of train_attn, initcheck reports 12 words in torch's
copy of each line of scales: the forward pass writes the first 32 of its 128 bytes. It also reports the sums that bwdsum
reads: it does not see what bulk copies write."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
from fuzz_oracle import visible_keys
from variants import SPARSE, SPECS, run

import sage_aot
from sage_aot._backends.cuda.backend import CudaBackend
from sage_aot._call.backends import default_library, handing
from sage_aot._families import FAMILIES
from sage_aot._kernels.spec import AttnSpec
from sage_aot._problem.given import Given
from sage_aot._problem.options import Options
from sage_aot._problem.sequences import Sequences
from sage_aot._tools import reference
from sage_aot._tools.verify import run_stored


class Call(NamedTuple):
    """One small call."""

    kind: str  # of the inputs
    dtype: torch.dtype
    q_shape: tuple[int, int, int]  # batch, heads, rows
    kv_shape: tuple[int, int, int]
    fewer: int = 0  # channels fewer than the kernel's
    has_nans: bool = False  # in keys of the first head and in values of the second
    has_key_mask: bool = False  # which leaves the last of three batch entries no key
    lengths: tuple[tuple[int, ...], tuple[int, ...]] | None = None  # of sequences: queries, and keys, of each
    is_stored: bool = False  # k and v are quantized before
    splits: int = 1  # blocks that share the keys of a query tile
    is_trained: bool = False  # with a backward pass
    mask: str = ""  # "elements", with sinks, or "blocks"


CALLS = [
    Call("outlier", torch.bfloat16, (1, 2, 150), (1, 1, 200)),  # grouped heads, more keys than queries, ragged
    Call("normal", torch.float16, (1, 2, 70), (1, 2, 70), fewer=7),  # rows that are not aligned to 16 bytes
    Call("normal", torch.float32, (1, 2, 70), (1, 2, 90), fewer=3),  # read and stored by elements
    Call("normal", torch.bfloat16, (1, 2, 150), (1, 2, 200), has_nans=True),  # rows read again, shared atomics
    Call("normal", torch.bfloat16, (3, 2, 150), (3, 1, 300), has_key_mask=True),
    Call("normal", torch.bfloat16, (1, 2, 150), (1, 1, 200), is_stored=True),
    Call("normal", torch.bfloat16, (1, 2, 350), (1, 1, 330), lengths=((200, 0, 1, 149), (70, 130, 130, 0))),
    Call("normal", torch.bfloat16, (1, 2, 150), (1, 2, 200), has_nans=True, splits=3),
    Call("normal", torch.float16, (1, 2, 350), (1, 1, 330), fewer=7, lengths=((200, 0, 1, 149), (70, 130, 130, 0)),
         splits=2),
]

TRAINED_CALLS = [
    Call("outlier", torch.bfloat16, (1, 2, 150), (1, 1, 200), is_trained=True),
    Call("normal", torch.float16, (1, 2, 130), (1, 2, 70), fewer=7, is_trained=True),
    Call("normal", torch.bfloat16, (1, 2, 130), (1, 2, 70), fewer=24, is_trained=True),
]
"""Three more calls for kernels that have a backward pass."""

MASKED_CALLS = [
    Call("normal", torch.bfloat16, (2, 2, 150), (2, 1, 300), mask="elements"),
    Call("normal", torch.float16, (1, 2, 330), (1, 2, 300), fewer=7, mask="blocks"),
]
"""Two more calls for kernels with a sparse mask, whose other calls have a window."""

SCHEDULER_CALL = Call("normal", torch.bfloat16, (1, 150, 150), (1, 150, 700))
"""One more call for kernels of persistent blocks: more query tiles than any GPU has SMs, and more KV tiles than the
pipeline has stages."""


def main() -> None:
    archs, trained = [arch for arch in sys.argv[1:] if arch != "trained"], "trained" in sys.argv
    specs = [spec for spec in SPECS + SPARSE if (spec.arch in archs or not archs) and (spec.trains or not trained)]
    count = 0
    for spec in specs:
        for call in calls_of(spec):
            if trained and not call.is_trained:
                continue
            count += 1
            headdim = spec.headdim - call.fewer
            q, k, v = reference.inputs(call.kind, (*call.q_shape, headdim), (*call.kv_shape, headdim), call.dtype,
                                        torch.Generator("cuda").manual_seed(4))
            if call.has_nans:
                k[0, 0, [70, 131, 132], 5] = v[0, 1, [3, 131], 9] = torch.nan
            key_mask = sequences = None
            if call.has_key_mask:
                key_mask = torch.arange(k.shape[2], device="cuda") >= torch.tensor([[0], [170], [300]], device="cuda")
            if call.lengths:
                q, k, v = (x[0].transpose(0, 1).contiguous() for x in (q, k, v))
                sequences = Sequences.of_lengths(*call.lengths).to("cuda")
            if call.is_stored:
                backend = CudaBackend(default_library(), spec.arch)
                out, _ = run_stored(backend, Options.of_axes(spec.values), Given("dense", q, k, v))
                assert out.isfinite().all(), spec.name
                continue
            if call.mask:
                run_masked(spec, call.mask, q, k, v)
                continue
            if call.is_trained:
                train(spec, q, k, v)
                continue
            result = run(spec, q, k, v, key_mask=key_mask, sequences=sequences, poison=False, splits=call.splits)
            torch.cuda.synchronize()
            expected = torch.zeros_like(result.out, dtype=torch.bool)
            if call.has_nans:
                expected = _spoilt(spec, result.out)
            assert torch.equal(~result.out.isfinite(), expected), spec.name
    print(f"{count} calls of {len(specs)} variants")


def calls_of(spec: AttnSpec) -> list[Call]:
    family = default_library().manifest.kernels[spec.name].family
    return [*CALLS, *(TRAINED_CALLS if spec.trains else []), *(MASKED_CALLS if spec.mask == "sparse" else []),
            *([SCHEDULER_CALL] if FAMILIES[family].persistent else [])]


def run_masked(spec: AttnSpec, mask: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """The public call of a kernel with drawn masks."""
    generator = torch.Generator("cuda").manual_seed(5)
    batch, heads, queries, keys = *q.shape[:3], k.shape[2]

    def drawn(*shape: int) -> torch.Tensor:
        return torch.rand(shape, device="cuda", generator=generator) < 0.5

    own: dict[str, Any] = {"block_mask": sage_aot.block_mask(drawn(1, heads, -(-queries // 64), -(-keys // 64)), 64)}
    if mask == "elements":
        own = {"attn_mask": drawn(batch, heads, queries, keys), "sinks": torch.zeros(heads, device="cuda")}
    options = Options.of_axes(spec.values)
    kept = {name: getattr(options, name) for name in ("qk", "smooth_q", "smooth_v", "pv_accum", "p")}
    with handing(CudaBackend(default_library(), spec.arch)):
        assert sage_aot.attn(q, k, v, **own, **kept).isfinite().all(), spec.name


def train(spec: AttnSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """The public call of the kernels of this arch, forward and backward."""
    leaves = [x.requires_grad_() for x in (q, k, v)]
    for side_by_side in (0, 2):  # by two kernels, and by one where the arch has it
        with handing(CudaBackend(default_library(), spec.arch, side_by_side=side_by_side)):
            out = sage_aot.train_attn(*leaves, is_causal=spec.mask == "causal")
            found = torch.autograd.grad(out, leaves, torch.ones_like(out))
        assert all(gradient.isfinite().all() for gradient in found), spec.name


def _spoilt(spec: AttnSpec, out: torch.Tensor) -> torch.Tensor:
    """A mask of the elements of `out` that must be NaN: of the first head rows that see a key which is, of the second
    channel 9 of those that see such a value."""
    options = Options.of_axes(spec.values)
    seen = visible_keys(150, 200, is_causal=options.is_causal, window=options.window, device=out.device)[0, 0]
    spoilt = torch.zeros_like(out, dtype=torch.bool)
    spoilt[0, 0] = seen[:, [70, 131, 132]].any(1)[:, None]
    spoilt[0, 1, :, 9] = seen[:, [3, 131]].any(1)
    return spoilt


if __name__ == "__main__":
    main()
