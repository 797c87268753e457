"""The rules that a compiled kernel must keep before a wheel may hold it. They limit its spills, its registers and its
shared memory, and require the structs that the runtime fills in, and tensor-core instructions for both products.

The rules hold on a kernel's own chip, for which its row of the matrix was chosen, and not on a chip to which the kernel
is retargeted.
"""

from __future__ import annotations

from typing import NamedTuple

from codegen.compilation import Compilation
from codegen.compiler import Report
from codegen.matrix import Matrix, PlannedKernel
from sage_aot._families import FAMILIES
from sage_aot._kernels.manifest import MachineCode, Struct
from sage_aot._kernels.spec import AttnSpec, is_ptx
from sage_aot._launch.structs import layout_problems

Reports = dict[PlannedKernel, Report]

_REGISTERS_OF_SM = 65536
_REGISTER_UNIT = 8  # granularity of a thread's registers
_REGISTERS_OF_THREAD = 255

_EXPONENTIALS_BEFORE_ARRIVAL = 4
"""Most exponentials allowed there. The rescale factors alpha of a thread's two rows take fewer; P of a tile takes
64."""

_PRODUCTS = {
    "qkint8": (("IMMA", "IGMMA"), "S8.S8"),
    "qkint4": (("IMMA",), "S4.S4"),
    "qknvfp4": (("OMMA",), "SF.16864.F32.E2M1.E2M1.UE4M3.4X"),
    "pvnvfp4": (("OMMA",), "SF.16864.F32.E2M1.E2M1.UE4M3.4X"),
    "pvf16": (("HMMA", "HGMMA"), ""),  # the opcode does not name f16
    "pve4m3": (("QMMA", "QGMMA"), "E4M3.E4M3"),
    "pve4m3_accf32": (("QMMA",), "SF.16832.F32.E4M3.E4M3"),  # block-scaled
}
"""Per product, as kernels' names spell it: the instructions that may compute it, and a part of their modifiers."""

_BACKWARD_PRODUCTS: dict[str, dict[str, tuple[str, ...]]] = {
    "mma": {
        "bwdkv": ("IMMA.16832.S8.S8", "IMMA.16832.U8.S8", "HMMA.16816.F32.BF16", "HMMA.16816.F32"),
        "bwdq": ("IMMA.16832.S8.S8", "HMMA.16816.F32.BF16", "HMMA.16816.F32"),
    },
    "wgmma": {
        "bwdkv": ("IGMMA.64x64x32.S8.S8", "HGMMA.64x64x16.F32.BF16", "HGMMA.64x64x16.F32"),
        "bwdq": ("IGMMA.64x64x32.S8.S8", "HGMMA.64x64x16.F32.BF16", "HGMMA.64x64x16.F32"),
        "bwdqkv": ("IGMMA.64x64x32.S8.S8", "HGMMA.64x64x16.F32.BF16", "HGMMA.64x64x16.F32"),
    },
}
"""The instructions that the products of the backward kernels take, by family and kind: those in 16 bits in bf16 and in
f16."""

_PTX_PRODUCTS = {
    "qkint8": (("mma",), "s32.s8.s8.s32"),
    "qkint4": (("mma",), "s32.s4.s4.s32"),
    "pvf16": (("mma",), "f32.f16.f16.f32"),
    "pve4m3": (("mma",), "e4m3.e4m3"),
}
"""Instructions of PTX that the products take, by kind."""


class Verdict(NamedTuple):
    """The rules that kernels break, a sentence each."""

    failures: list[str]  # no kernel folder may have these
    remarks: list[str]  # these would be failures in a folder that a wheel could ship


def judge(reports: Reports, matrix: Matrix, compilation: Compilation) -> Verdict:
    """All rules that compiled kernels break.

    For kernels that a wheel may hold, every broken rule is a failure. For kernels by nvcc, which are for debugging,
    broken rules are remarks. Retargeted kernels are not judged by the rules of a chip. Structs that the runtime does
    not fill in are failures for all."""
    poor = [f"{kernel.spec.name}: {problem} (row {kernel.row})" for kernel, report in reports.items()
            for problem in _problems(kernel, report, matrix)]
    structs = _struct_problems(reports)
    if compilation.shippable:
        return Verdict(structs + poor, [])
    return Verdict(structs, [] if compilation.retarget else poor)


def register_budget(kernel: PlannedKernel, threads: int) -> int:
    """The most registers a thread with which min_blocks blocks of the kernel fit on an SM."""
    share = _REGISTERS_OF_SM // (kernel.min_blocks * threads)
    return min(share // _REGISTER_UNIT * _REGISTER_UNIT, _REGISTERS_OF_THREAD)


def _problems(kernel: PlannedKernel, report: Report, matrix: Matrix) -> list[str]:
    machine = report.machine  # PTX has neither registers nor spills; the driver decides about them
    threads = int(report.info.facts["threads"])
    if kernel.how.threads not in (None, threads):
        return [f"expected the {kernel.how.threads} threads of the family {kernel.family!r}, got a kernel of {threads}"]
    own = [*_spills(kernel, machine), *_registers(kernel, machine, threads)] if machine else []
    return [*own, *_pingpong(kernel, report), *_promotion(kernel, report), *_shared_memory(kernel, report, matrix),
            *_tensor_cores(kernel, report), *_driver(kernel, report, matrix)]


def _struct_problems(reports: Reports) -> list[str]:
    """Structs whose layout differs between kernels, and fields that the runtime does not fill in."""
    layouts: dict[str, Struct] = {}
    for report in reports.values():
        layouts.setdefault(report.info.params, report.info.layout)
    differing = [f"{kernel.spec.name}: expected {report.info.params} as other kernels have it, got another layout"
                 for kernel, report in reports.items() if report.info.layout != layouts[report.info.params]]
    return layout_problems(layouts) + differing


def _shared_memory(kernel: PlannedKernel, report: Report, matrix: Matrix) -> list[str]:
    limit, found = matrix.shared_bytes[kernel.spec.arch], int(report.info.facts["shared_bytes"])
    if found <= limit:
        return []
    return [f"expected at most the {limit} bytes of shared memory that a block has on {kernel.spec.arch}, got {found}: "
            "fewer stages, or a smaller tile"]


def _driver(kernel: PlannedKernel, report: Report, matrix: Matrix) -> list[str]:
    """Compares the drivers that the matrix promises with those that the compiler's output needs."""
    promised = matrix.archs[kernel.spec.arch].least_driver
    if promised >= report.first_driver:
        return []
    return [f"expected a file for drivers from {promised} on, got one that {report.first_driver} is the first to read: "
            f"raise least_driver of {kernel.spec.arch}, or use the compiler that fits"]


def _spills(kernel: PlannedKernel, machine: MachineCode) -> list[str]:
    if machine.spill_bytes <= kernel.allowed_spill_bytes:
        return []
    return [f"expected at most {kernel.allowed_spill_bytes} bytes of spilt registers, got {machine.spill_bytes}: "
            "lower min_blocks or the tile, or allow_spills with a why"]


def _registers(kernel: PlannedKernel, machine: MachineCode, threads: int) -> list[str]:
    budget = register_budget(kernel, threads)
    if machine.registers <= budget:
        return []
    return [f"expected at most {budget} registers a thread, got {machine.registers}: give the template's "
            "__launch_bounds__ the threads and min_blocks of the row"]


def _pingpong(kernel: PlannedKernel, report: Report) -> list[str]:
    if not isinstance(kernel.spec, AttnSpec) or report.exponentials_before_arrival <= _EXPONENTIALS_BEFORE_ARRIVAL:
        return []
    return [f"expected a consumer's ping-pong arrival in front of its exponentials, got "
            f"{report.exponentials_before_arrival} of them in front of it: make them depend on a load behind the "
            "arrival, as attn/wgmma/mainloop.cuh does"]


def _promotion(kernel: PlannedKernel, report: Report) -> list[str]:
    """Checks that promotion comes before the wait for the scores: of the last slice of the channels, whose 64 rows take
    channels / 2 multiply-adds a thread of 128."""
    if not isinstance(kernel.spec, AttnSpec) or not FAMILIES[kernel.family].promotes_under_products:
        return []
    least = kernel.spec.headdim // 2 // int(report.info.facts["slices"])
    found = report.promotion_under_products
    if found >= least:
        return []
    return [f"expected the promotion in front of the wait for the scores, {least} multiply-adds, got {found} there: "
            "keep them in front by a loop, as attn/wgmma/mainloop.cuh does"]


def _tensor_cores(kernel: PlannedKernel, report: Report) -> list[str]:
    """Checks that a kernel computes its products by tensor-core instructions of their types, an attention kernel in a
    loop.
    """
    missing = _missing(kernel, report)
    found = ", ".join(f"{count} {opcode}" for opcode, count in report.opcodes.items()) or "none"
    return [f"expected {what}, got tensor-core instructions: {found}; look at the kernel's mma functions and target"
            for what in missing]


def _missing(kernel: PlannedKernel, report: Report) -> list[str]:
    """Tensor-core instructions that a kernel should have and does not, in words."""
    spec = kernel.spec
    if not isinstance(spec, AttnSpec):
        wanted = () if is_ptx(spec.arch) else _BACKWARD_PRODUCTS[kernel.family].get(spec.kind, ())
        return [opcode for opcode in wanted if opcode not in report.opcodes]
    spellings = _PTX_PRODUCTS if is_ptx(spec.arch) else _PRODUCTS
    products = {name: spellings[name] for name in _products(spec)}
    missing = [f"instructions for {product}, {_spelt(*spelling)}"
               for product, spelling in products.items() if not _computes(report, *spelling)]
    if not missing and report.main_loop is None and not is_ptx(spec.arch):
        missing = ["a loop with the instructions of both products"]
    return missing


def _products(spec: AttnSpec) -> tuple[str, str]:
    """The products of a kernel: keys of _PRODUCTS."""
    pv = f"pv{spec.pv}"
    return f"qk{spec.qk}", f"{pv}_accf32" if (spec.pv, spec.pv_accum) == ("e4m3", "f32") else pv


def _spelt(names: tuple[str, ...], types: str) -> str:
    return " or ".join(f"{name}.*{types}" for name in names)


def _computes(report: Report, names: tuple[str, ...], types: str) -> bool:
    return any(opcode.split(".")[0] in names and types in opcode for opcode in report.opcodes)
