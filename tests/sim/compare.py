"""The simulator compared with a GPU: the same instructions, kernels and calls, bit for bit.

    PYTHONPATH=.:tests/gpu python tests/sim/compare.py --markdown compare.md

For a machine with a GPU of compute capability 9.0, nvcc, and a host compiler: the simulator runs there as well, as
sm_90. ex2.approx is the one instruction of the main loops whose bits the ISA leaves open: it is measured on the GPU in
full, and the simulator computes with what was measured. lg2.approx, once a row, stays the nearest number: the
log-sum-exp may differ by what its row says.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cupy
import numpy as np
import simbuild
import test_hopper
import test_meanings
import torch
from layout import Result, read_back
from simbuild import Build, Source
from simulator import SimulatorBackend, set_exp2
from variants import SPECS, run

from sage_aot._call.pipeline import prepare
from sage_aot._kernels.spec import AttnSpec
from sage_aot._problem.given import Given
from sage_aot._problem.options import Options
from sage_aot._tools import reference

HERE = Path(__file__).parent
MANTISSAS = 2**23
PRODUCTS = 2000
"""Warp-wide products of each kind and class of operands."""

VARIANTS = ("*_d128_*_full_vraw_qraw", "*_d64_*_causal_vsmooth_qsmooth", "sage_attn_sm8[09]_d64_*_full_vsmooth_qraw")
"""Patterns of the variants compared by default: of every family, both head dims, masks, widths and accumulators."""


@dataclass(frozen=True)
class Row:
    """One comparison: how many values there were, and how many differ."""

    what: str
    values: int
    differing: int
    largest: str = "0"  # difference

    @staticmethod
    def of_bits(what: str, gpu: np.ndarray, simulated: np.ndarray) -> Row:
        """u32 that hold f32; any two NaNs are equal."""
        x, y = gpu.view(np.float32), simulated.view(np.float32)
        differing = (gpu != simulated) & ~(np.isnan(x) & np.isnan(y))
        steps = np.abs(gpu[differing].view(np.int32).astype(np.int64) - simulated[differing].view(np.int32))
        largest = f"{steps.max()} units of the last place" if len(steps) else "0"
        return Row(what, gpu.size, int(differing.sum()), largest)

    @staticmethod
    def of_tensors(what: str, gpu: torch.Tensor, simulated: torch.Tensor) -> Row:
        gpu, simulated = gpu.double(), simulated.double()
        differing = (gpu != simulated) & ~(gpu.isnan() & simulated.isnan())
        largest = (gpu - simulated)[differing].abs().max().item() if differing.any() else 0
        return Row(what, gpu.numel(), int(differing.sum()), f"{largest:.3g}")

    def __str__(self) -> str:
        return f"| {self.what} | {self.values} | {self.differing} | {self.largest} |"


class Gpu:
    """Kernels of one source file, compiled by nvcc for this GPU."""

    def __init__(self, source: Path, target: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            cubin = Path(folder) / "kernels.cubin"
            subprocess.run(["nvcc", "-cubin", f"-arch={target}", "-std=c++17", "-diag-suppress", "20012",
                            f"-I{simbuild.PROJECT.include}", str(source), "-o", str(cubin)], check=True)
            self._module = cupy.cuda.function.Module()
            self._module.load(cubin.read_bytes())

    def launch(self, name: str, params: bytes, blocks: int, threads: int, shared_bytes: int) -> None:
        from cupy_backends.cuda.api import driver

        function = self._module.get_function(name)
        driver.funcSetAttribute(function.ptr, 8, shared_bytes)  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        function((blocks, 1, 1), (threads, 1, 1), (np.frombuffer(params, f"V{len(params)}"),), shared_bytes)
        cupy.cuda.runtime.deviceSynchronize()

    def probe(self, name: str, which: int, operands: np.ndarray, results: int, blocks: int) -> np.ndarray:
        """Results that a kernel of probes.cu makes of its operands."""
        given, out = cupy.asarray(operands.view(np.uint32)), cupy.zeros(results, cupy.uint32)
        self.launch(name, struct.pack("<QQii", given.data.ptr, out.data.ptr, which, results), blocks, 32, 4096)
        return out.get()


# --- instructions -----------------------------------------------------------------------------------------------------


def compare_scalars(gpu: Gpu, build: Build) -> Iterator[Row]:
    a, b, c = (test_meanings.patterns(100_000, seed) for seed in range(3))
    operands = np.stack([a, b, c], -1)
    for which, name in enumerate(test_meanings.SCALARS):
        blocks = -(-len(a) // 32)
        simulated = test_meanings.launch(build, "scalars", which, operands, len(a), blocks, arch=90)
        found = gpu.probe("scalars", which, operands, len(a), blocks)
        if name.endswith("x2") or name in ("prmt", "popcount"):  # no f32
            yield Row(name, found.size, int((found != simulated).sum()))
        else:
            yield Row.of_bits(name, found, simulated)


def compare_products(gpu: Gpu, build: Build) -> Iterator[Row]:
    rng = np.random.default_rng(0)
    for which, name in enumerate(test_meanings.PRODUCTS):
        for kind in ("alike", "of all sizes"):
            operands = _operands(rng, name, wide=kind == "of all sizes")
            simulated = test_meanings.launch(build, "products", which, operands, PRODUCTS * 128, PRODUCTS, arch=90)
            found = gpu.probe("products", which, operands, PRODUCTS * 128, PRODUCTS)
            words = 2 if name == "e4m3_f16" else 4  # of D; the others are C's
            found, simulated = (x.reshape(-1, 4)[:, :words] for x in (found, simulated))
            yield Row(f"mma {name}, operands {kind}", found.size, int((found != simulated).sum()))


def _operands(rng: np.random.Generator, name: str, wide: bool) -> np.ndarray:
    """[products][32 lanes][A, B, C] words."""
    words = rng.integers(0, 2**32, (PRODUCTS, 32, 10), np.uint32)
    if name == "f16":
        sizes = 2.0 ** rng.integers(-8, 9, (PRODUCTS, 32, 12)) if wide else 1.0
        words[..., :6] = (rng.standard_normal((PRODUCTS, 32, 12)) * sizes).astype(np.float16).view(np.uint32)
    elif name.startswith("e4m3"):
        codes = rng.integers(0, 256, (PRODUCTS, 32, 24)).astype(np.uint8)
        if not wide:
            codes = codes & 0x87 | rng.integers(5, 9, codes.shape).astype(np.uint8) << 3
        codes[codes & 0x7F == 0x7F] = 0x30  # no NaN
        words[..., :6] = codes.view(np.uint32)
    if name in ("f16", "e4m3_f32", "e4m3_f16"):
        sizes = 2.0 ** rng.integers(-12, 12, (PRODUCTS, 32, 4)) if wide else 4.0
        c = rng.standard_normal((PRODUCTS, 32, 4)) * sizes
        if name == "e4m3_f16":
            words[..., 6:8] = c.astype(np.float16).view(np.uint32)
        else:
            words[..., 6:] = c.astype(np.float32).view(np.uint32)
    return words


def compare_pipeline(gpu: Gpu, build: Build) -> Iterator[Row]:
    """Hopper's own instructions."""
    problem = test_hopper.Problem.draw(8, 7, seed=3)
    test_hopper.run(build, "pipeline", problem, seed=0)
    a, b, v = (cupy.asarray(x.view(torch.int8).numpy()) for x in (problem.a, *problem.packed()))
    scores, out = (_zeros_like(x) for x in (problem.scores, problem.out))
    params = test_hopper.params(*(x.data.ptr for x in (a, b, v, scores, out)), len(problem.b))
    gpu.launch("pipeline", params, len(problem.a), test_hopper.THREADS, test_hopper.SHARED_BYTES)
    yield Row.of_tensors("wgmma s8, A from both places", torch.from_numpy(scores.get()), problem.scores)
    yield Row.of_bits("wgmma e4m3, two-level", out.get().view(np.uint32), problem.out.numpy().view(np.uint32))


def compare_warpgroup_products(gpu: Gpu, build: Build) -> Iterator[Row]:
    """Every wrapper of wgmma, on rows of every swizzle."""
    for which in range(test_hopper.Product.COUNT):
        product = test_hopper.Product.draw(which)
        test_hopper.run_product(build, product)
        a, b = (cupy.asarray(x.view(torch.int8).numpy()) for x in (product.a, product.b))
        d = _zeros_like(product.d)
        params = test_hopper.product_params(a.data.ptr, b.data.ptr, d.data.ptr, which)
        gpu.launch("warpgroup_products", params, 1, test_hopper.Product.THREADS, test_hopper.Product.SHARED_BYTES)
        yield Row.of_tensors(f"wgmma {product.name}", torch.from_numpy(d.get()), product.d)


def _zeros_like(tensor: torch.Tensor) -> cupy.ndarray:
    return cupy.zeros(tuple(tensor.shape), cupy.dtype(str(tensor.dtype).removeprefix("torch.")))


# --- ex2.approx -------------------------------------------------------------------------------------------------------


def measure_exp2(gpu: Gpu) -> tuple[np.ndarray, np.ndarray]:
    """The bits of 2^x for all x in [1, 2), and of 2^-x."""
    x = np.arange(0x3F800000, 0x40000000, dtype=np.uint32)
    return _exp2(gpu, x), _exp2(gpu, x | 0x80000000)


def _exp2(gpu: Gpu, bits: np.ndarray) -> np.ndarray:
    operands = np.zeros((len(bits), 3), np.uint32)
    operands[:, 0] = bits
    return gpu.probe("scalars", test_meanings.SCALARS.index("ex2"), operands, len(bits), -(-len(bits) // 32))


def compare_exp2(gpu: Gpu, build: Build) -> Iterator[Row]:
    """Compare ex2 with the measured tables: f32 of every size."""
    rng = np.random.default_rng(1)
    bits = (rng.integers(0, 2, 200_000) << 31 | rng.integers(127 - 30, 127 + 9, 200_000) << 23
            | rng.integers(0, MANTISSAS, 200_000)).astype(np.uint32)
    yield Row.of_bits("ex2, as measured", _exp2(gpu, bits), test_meanings.scalar(build, "ex2", bits))


# --- attention --------------------------------------------------------------------------------------------------------


def compare_variant(build: Build, spec: AttnSpec, seed: int) -> Iterator[Row]:
    """A ragged call with grouped heads: all that quantization leaves, the output and the log-sum-exp."""
    q, k, v = reference.inputs("outlier", (1, 2, 210, spec.headdim), (1, 1, 333, spec.headdim), torch.bfloat16,
                                torch.Generator().manual_seed(seed))
    on_gpu = run(spec, *(tensor.cuda() for tensor in (q, k, v)))
    simulated = _simulate(build, spec, q, k, v)
    found, expected = read_back(on_gpu), read_back(simulated)
    quantized = [Row.of_tensors(name, found[name], expected[name]) for name in found if name != "delta_s"]
    yield Row(f"`{spec.name}`: quantized tensors", sum(row.values for row in quantized),
              sum(row.differing for row in quantized))
    yield Row.of_tensors(f"`{spec.name}`: output", on_gpu.out.cpu(), simulated.out)
    yield Row.of_tensors(f"`{spec.name}`: log-sum-exp", on_gpu.lse.cpu(), simulated.lse)


def _simulate(build: Build, spec: AttnSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Result:
    backend = SimulatorBackend(build, spec.arch, chip=90)
    given = Given("dense", q, k, v)
    call: Any = prepare(backend, given, Options.of_axes(spec.values)).run
    out, lse = torch.full_like(q, torch.nan), torch.full(q.shape[:3], torch.nan)
    workspace = torch.full((call.plan.workspace_bytes,), 0xFF, dtype=torch.uint8)
    call.run(given, out, lse, workspace)
    return Result(out, lse, workspace, call.plan)


# --- the whole --------------------------------------------------------------------------------------------------------


def rows(args: argparse.Namespace) -> Iterator[Row]:
    folder = simbuild.PROJECT.build
    names = ("scalars", "products")
    probes = simbuild.build([Source(name, test_meanings.PROBES) for name in names], folder / "probes")
    gpu = Gpu(test_meanings.PROBES, "sm_90")
    yield from compare_scalars(gpu, probes)
    yield from compare_products(gpu, probes)
    hopper = simbuild.build(test_hopper.SOURCES, folder / "hopper")
    pipeline, products = (Gpu(source.path, "sm_90a") for source in test_hopper.SOURCES)
    yield from compare_pipeline(pipeline, hopper)
    yield from compare_warpgroup_products(products, hopper)
    set_exp2(*measure_exp2(gpu))
    yield from compare_exp2(gpu, probes)
    specs = [spec for spec in SPECS if any(fnmatch.fnmatch(spec.name, pattern) for pattern in args.variants)]
    build = simbuild.build_matrix(specs)
    for spec in specs:
        yield from compare_variant(build, spec, args.seed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", default=VARIANTS, metavar="PATTERN", help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the inputs (default: %(default)s)")
    parser.add_argument("--markdown", type=Path, help="file for what is printed")
    args = parser.parse_args()
    with open(args.markdown or os.devnull, "w") as file:
        def say(line: str) -> None:
            for stream in (sys.stdout, file):
                print(line, file=stream, flush=True)

        say(f"{torch.cuda.get_device_name()}, {Path(simbuild.compiler()[0]).name}, seed {args.seed}\n")
        say("| compared | values | differing | by at most |\n|---|---:|---:|---:|")
        for row in rows(args):
            say(str(row))
    return 0


if __name__ == "__main__":
    sys.exit(main())
