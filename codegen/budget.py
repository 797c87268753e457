"""What a compiled kernel must be before a wheel may hold it: no spills, registers for its blocks, tensor cores at work.

Each rule holds on a kernel's own chip, where its row of the matrix was chosen, and not on one it is retargeted to.
"""

from __future__ import annotations

from codegen.compiler import Report
from codegen.matrix import PlannedKernel

_REGISTERS_OF_SM = 65536
_REGISTER_UNIT = 8  # a thread's registers are given out in these
_REGISTERS_OF_THREAD = 255

_PRODUCTS = {
    "qk8": (("IMMA", "IGMMA"), "S8.S8"),
    "qk4": (("IMMA",), "S4.S4"),
    "pvf16": (("HMMA", "HGMMA"), ""),  # f16 is not spelt
    "pve4m3": (("QMMA", "QGMMA"), "E4M3.E4M3"),
}
"""Per product, as kernels' names spell it: the instructions that may compute it, and what their modifiers hold."""


def problems_of(reports: dict[PlannedKernel, Report]) -> list[str]:
    """Everything that kernels lack, a sentence each."""
    return [f"{kernel.spec.name}: {problem} (row {kernel.row})" for kernel, report in reports.items()
            for problem in (*_spills(kernel, report), *_registers(kernel, report), *_tensor_cores(kernel, report))]


def register_budget(kernel: PlannedKernel) -> int:
    """The registers of a thread with which the blocks that the kernel's row promises an SM fit one."""
    blocks = kernel.tile.min_blocks if kernel.spec.kind == "attn" else 1
    share = _REGISTERS_OF_SM // (blocks * kernel.threads)
    return min(share // _REGISTER_UNIT * _REGISTER_UNIT, _REGISTERS_OF_THREAD)


def _spills(kernel: PlannedKernel, report: Report) -> list[str]:
    if report.spill_bytes <= kernel.allowed_spill_bytes:
        return []
    return [f"expected at most {kernel.allowed_spill_bytes} bytes of spilt registers, got {report.spill_bytes}: "
            "lower min_blocks or the tile, or allow_spills with a why"]


def _registers(kernel: PlannedKernel, report: Report) -> list[str]:
    budget = register_budget(kernel)
    if report.registers <= budget:
        return []
    return [f"expected at most {budget} registers a thread, got {report.registers}: give the template's "
            "__launch_bounds__ the threads and min_blocks of the row"]


def _tensor_cores(kernel: PlannedKernel, report: Report) -> list[str]:
    """An attention kernel's products, in the instructions that its axes name and in a loop."""
    if kernel.spec.kind != "attn":
        return []
    products = (f"qk{kernel.spec.qk}", f"pv{kernel.spec.pv}")
    missing = [f"instructions for {product}, {_spelt(product)}"
               for product in products if not _computes(report, product)]
    if not missing and report.main_loop is None:
        missing = ["a loop with the instructions of both products"]
    found = ", ".join(f"{count} {opcode}" for opcode, count in report.opcodes.items()) or "none"
    return [f"expected {what}, got tensor-core instructions: {found}; look at the kernel's mma functions and target"
            for what in missing]


def _spelt(product: str) -> str:
    names, types = _PRODUCTS[product]
    return " or ".join(f"{name}.*{types}" for name in names)


def _computes(report: Report, product: str) -> bool:
    names, types = _PRODUCTS[product]
    return any(opcode.split(".")[0] in names and types in opcode for opcode in report.opcodes)
