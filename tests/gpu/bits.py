"""A digest of the output of every attention kernel that runs here, on fixed inputs, a line a call.

    PYTHONPATH=. python tests/gpu/bits.py --kernels sage_aot/kernels build/retarget_sm_90 > bits.txt

Where the kernels of two source trees compute the same bits, `diff` of the two outputs is empty. This file also runs in
trees from before the runtime was divided by concept: make such a tree the working directory, and name it in PYTHONPATH.
It prints kernels' names as they are spelt now. `--device cpu` runs the emulation of the same kernels.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

try:
    from sage_aot._backends.cuda.backend import CudaBackend
    from sage_aot._backends.cuda.device import gpu_here
    from sage_aot._backends.emulation.backend import EmulationBackend
    from sage_aot._backends.loader import KERNEL_FOLDER, Library
    from sage_aot._call.pipeline import prepare
    from sage_aot._problem.given import Given
    from sage_aot._problem.options import Options
    from sage_aot._tools.verify import takes

    def run(library: Library, spec: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
            lse: torch.Tensor | None, **options: Any) -> None:
        backend = CudaBackend(library, spec.arch) if q.is_cuda else EmulationBackend(library.manifest, spec.arch)
        given = Given("dense", q, k, v)
        prepare(backend, given, Options.of_axes(spec.values, **options), out).run(given, out, lse)

    def records_of(library: Library) -> list[Any]:
        return list(library.manifest.every_attention())

except ImportError:  # a tree from before the runtime was divided by concept
    from sage_aot._cuda import gpu_here
    from sage_aot._loader import KERNEL_FOLDER, Library
    from sage_aot._plan import plan
    from sage_aot._select import kernels_of
    from sage_aot._verify import takes

    from sage_aot import _cuda, _emulate
    from sage_aot._problem import check, heads_first

    def run(library: Library, spec: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
            lse: torch.Tensor | None, layout: str = "HND", **options: Any) -> None:
        problem = check(q, k, v, is_causal=spec.mask == "causal", qk_bits=spec.qk, smooth_q=spec.q == "qsmooth",
                        smooth_v=spec.v == "vsmooth", pv_accum=spec.pv_accum, layout=layout, **options)
        kernels = kernels_of(spec.arch, problem, library.manifest)
        views = [heads_first(tensor, layout) for tensor in (q, k, v, out)]
        if q.is_cuda:
            _cuda.attention(plan(problem, kernels), library, *views, lse)
        else:
            _emulate.attention(problem, kernels, *views, lse)

    def records_of(library: Library) -> list[Any]:
        return [record for record in library.manifest.kernels.values() if record.spec.kind == "attn"]


class Shape(NamedTuple):
    """The inputs of one call of every kernel."""

    name: str
    batch: int
    q_heads: int
    kv_heads: int
    queries: int
    keys: int
    fewer: int = 0  # channels less than the kernel's
    dtype: torch.dtype = torch.bfloat16
    odd: bool = False  # rows, the output's too, at addresses that are not multiples of 16 bytes
    planted: bool = False  # some values are not finite
    options: dict[str, Any] = {}


SHAPES = (
    Shape("ragged", 1, 2, 2, 150, 333),
    Shape("grouped", 2, 8, 2, 200, 300, dtype=torch.float16),
    Shape("more_queries", 1, 2, 1, 333, 70),
    Shape("more_keys", 1, 4, 4, 70, 1029),
    Shape("one_query", 3, 4, 1, 1, 517),
    Shape("whole_tiles", 1, 2, 2, 256, 512),
    Shape("nhd", 2, 4, 2, 140, 260, options={"layout": "NHD"}),
    Shape("misaligned", 1, 4, 2, 130, 200, odd=True),
    Shape("misaligned_nhd", 2, 2, 1, 70, 130, fewer=7, odd=True, dtype=torch.float16, options={"layout": "NHD"}),
    Shape("narrow", 1, 2, 2, 150, 200, fewer=24),
    Shape("not_finite", 1, 4, 2, 200, 300, planted=True),
    Shape("raw_k_and_scale", 1, 2, 2, 150, 200, options={"smooth_k": False, "scale": 0.21}),
    Shape("many_tiles", 1, 40, 8, 700, 700),  # more query tiles than any GPU has SMs
    Shape("long", 1, 2, 1, 300, 5000),  # many KV tiles
)


def draw(shape: Shape, headdim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v in the layout of the call, on the CPU; every channel has an offset."""
    generator = torch.Generator().manual_seed(2411)
    tensors = []
    for heads, rows, offset in ((shape.q_heads, shape.queries, 1.0), (shape.kv_heads, shape.keys, 4.0),
                                (shape.kv_heads, shape.keys, 2.0)):
        tensor = torch.randn(shape.batch, heads, rows, headdim - shape.fewer, generator=generator)
        tensors.append(tensor + offset * torch.randn(1, heads, 1, headdim - shape.fewer, generator=generator))
    q, k, v = tensors
    if shape.planted:
        q[0, 0, 139, 5], k[0, 1, 187, 7], v[0, 0, 131, 9] = torch.nan, torch.inf, -torch.inf
    if shape.options.get("layout") == "NHD":
        q, k, v = (tensor.transpose(1, 2).contiguous() for tensor in (q, k, v))
    q, k, v = (tensor.to(shape.dtype) for tensor in (q, k, v))
    return q, k, v


def at_odd_addresses(tensor: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(tensor, (1, 2))[..., 1:-2]


def digest_of(library: Library, spec: Any, shape: Shape, device: str) -> str:
    q, k, v = (tensor.to(device) for tensor in draw(shape, spec.headdim))
    out = torch.full_like(q, 7.0)
    if shape.odd:
        q, k, v, out = map(at_odd_addresses, (q, k, v, out))
    lse = None  # with one no P is linear
    if getattr(spec, "p", "exp2") == "exp2":
        lse = torch.full((shape.batch, shape.q_heads, shape.queries), 7.0, device=device)
    run(library, spec, q, k, v, out, lse, **shape.options)
    digest = hashlib.sha256()
    for tensor in (out,) if lse is None else (out, lse):
        tensor = tensor.masked_fill(tensor.isnan(), torch.nan)  # of one payload
        digest.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def spelt(name: str) -> str:
    """A kernel's name as it is spelt now."""
    return name.replace("_qk8_", "_qkint8_").replace("_qk4_", "_qkint4_")


def lines(folder: Path, only: str, device: str) -> Iterator[str]:
    """A line per shape and per variant of a folder that runs here."""
    library = Library(folder)
    records = records_of(library)
    if device != "cpu":
        taken = {record.file for record in takes(gpu_here(torch.cuda.current_device()), library.manifest)}
        records = [record for record in records if record.file in taken]
    by_name = {spelt(record.spec.name): record.spec for record in records}
    for name in sorted(fnmatch.filter(by_name, only)):
        for shape in SHAPES:
            yield f"{name} {shape.name} {digest_of(library, by_name[name], shape, device)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", type=Path, nargs="+", default=[KERNEL_FOLDER], metavar="FOLDER",
                        help="built kernels (default: those of the package); of each, all that this GPU can load")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="of the variants (default: all)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="(default: %(default)s)")
    arguments = parser.parse_args()
    for folder in arguments.kernels:
        for line in lines(folder, arguments.only, arguments.device):
            print(line, flush=True)


if __name__ == "__main__":
    main()
