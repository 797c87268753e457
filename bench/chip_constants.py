"""Every constant of the model of bench/chips.py, with its source: chips, pipes, latencies."""

from __future__ import annotations

from dataclasses import dataclass

SCHEDULERS = 4
"""Schedulers of an SM, each with its own pipes. Source: NVIDIA's whitepapers on GA102, AD102, H100, RTX Blackwell."""

# --- chips ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chip:
    """Figures of a chip that the model takes."""

    target: str  # machine code that it runs
    sms: int
    mhz: int  # the data sheet's boost clock
    macs: dict[str, float]  # multiply-adds of an SM's tensor cores a clock, by instruction and type of the sums
    tensor_latency: float  # clocks until its sums can be read, beyond half of those for which it holds the pipe


MMA_SHARE = 0.62
"""Share of the tensor cores' peak on H100 that mma.sync reaches. Source: Luo et al., "Dissecting the NVIDIA Hopper
Architecture through Microbenchmarking", arXiv 2501.12084, which gives 62.9 % on average."""

# Latencies of m16n8k16 on RTX 30: 24 clocks with f16 sums, which hold the pipe for 16; 33 with f32 sums, which hold it
# for 32. Source: Sun et al., "Dissecting Tensor Cores via Microbenchmarks", arXiv 2206.02874. The others but H100 are
# taken to have the same. H100: 33. Source: Luo et al.
CHIPS = {
    # Whitepaper "NVIDIA Ampere GA102 GPU architecture", appendix A: 284 TOPS of INT8, 71 TFLOPS of f16 with f32 sums.
    "RTX 3090": Chip("sm_86", 82, 1695, {"IMMA": 1024, "HMMA.F32": 256, "HMMA.F16": 512}, 16),
    # The same, table of the RTX A6000: 309.7 TOPS of INT8, 154.8 TFLOPS of f16 with f32 sums.
    "RTX A6000": Chip("sm_86", 84, 1800, {"IMMA": 1024, "HMMA.F32": 512, "HMMA.F16": 512}, 16),
    # Whitepaper "NVIDIA Ada GPU architecture", appendix A: 660.6 TOPS of INT8 and of FP8 with f16 sums, 330.3 with f32.
    "RTX 4090": Chip("sm_89", 128, 2520, {"IMMA": 1024, "QMMA.F32": 512, "QMMA.F16": 1024, "HMMA.F32": 256,
                                          "HMMA.F16": 512}, 16),
    # Data sheet of the L40S: 733 TOPS of INT8, 733 TFLOPS of FP8, 362 of f16, all with f32 sums.
    "L40S": Chip("sm_89", 142, 2520, {"IMMA": 1024, "QMMA.F32": 1024, "QMMA.F16": 1024, "HMMA.F32": 512,
                                      "HMMA.F16": 512}, 16),
    # Whitepaper "NVIDIA RTX Blackwell GPU architecture", appendix A: 838 TOPS of INT8, 838 TFLOPS of FP8 with f16 sums,
    # 419 with f32, 1676 of FP4. Block-scaled FP8: docs/decisions.md cites 993 TFLOPS, measured at a higher clock.
    "RTX 5090": Chip("sm_120", 170, 2407, {"IMMA": 1024, "QMMA.F32": 512, "QMMA.F16": 1024, "QMMA.SF.F32": 1024,
                                           "OMMA.SF.F32": 2048, "HMMA.F32": 256, "HMMA.F16": 512}, 16),
    # Data sheets of H100 SXM and H200 SXM: 1979 TOPS of INT8, 989 TFLOPS of f16 at 1830 MHz; here mma.sync's share. The
    # clock is the highest; where a run is below it, EFFICIENCY has the difference.
    "H200": Chip("sm_90", 132, 1980, {"IMMA": 4096 * MMA_SHARE, "HMMA.F32": 2048 * MMA_SHARE,
                                      "HMMA.F16": 2048 * MMA_SHARE}, 30),
}


@dataclass(frozen=True)
class Pipe:
    """A pipe of a scheduler, or of the whole SM."""

    clocks: float  # that an instruction of a warp holds it
    latency: float  # until its result can be read
    names: frozenset[str]  # of the instructions that it takes


def _pipe(clocks: float, latency: float, names: str) -> Pipe:
    return Pipe(clocks, latency, frozenset(names.split()))


# Clocks: 32 threads over the results a clock and SM / 4. Source: CUDA C++ programming guide, "Arithmetic Instructions",
# of 8.6, 8.9, 9.0 and 12.0. Latencies: Abdelkhalik et al., "Demystifying the Nvidia Ampere Architecture through
# Microbenchmarking and Instruction-level Analysis", arXiv 2208.11174, and Luo et al. (above).
PIPES = {
    "fma": _pipe(1, 4, "FFMA FADD FMUL FSWZADD FFMA2 FADD2 FMUL2"),
    "imad": _pipe(2, 4, "IMAD HADD2 HFMA2 HMUL2 HMNMX2"),
    "alu": _pipe(2, 4.5, "IADD IADD3 LOP3 SHF SEL FSEL FMNMX FMNMX3 IMNMX VIMNMX VIMNMX3 VIADD VIADDMNMX ISETP FSETP "
                 "LEA PRMT MOV PLOP3 P2R R2P CS2R IABS BMSK SGXT I2FP I2IP FCHK VABSDIFF"),
    # The guide has no row for packed conversions. 4: e4m3 on an H200, by measurements of this project.
    "convert": _pipe(4, 6, "F2FP F2IP"),
    "MUFU": _pipe(8, 22, "MUFU I2F F2I F2F FRND POPC FLO BREV"),  # 16 results a clock and SM
    "uniform": _pipe(2, 10, "VOTE VOTEU R2UR S2UR S2R LDC"),  # and names that begin with U
}
SHARED = {"LDSM": 34.0, "LDS": 30.0, "LDL": 34.0, "LDG": 400.0, "SHFL": 24.0, "STS": 0.0, "STL": 0.0, "STG": 0.0,
          "LDGSTS": 0.0}
"""Instructions of the memory pipe that an SM's schedulers share, and their latencies (of LDG an estimate). It moves 128
bytes a clock. Source: CUDA C++ programming guide, "Shared Memory"; latencies as above."""

CONTROL = frozenset(("BRA", "BSSY", "BSYNC", "BAR", "NOP", "DEPBAR", "LDGDEPBAR", "WARPSYNC", "CALL", "EXIT"))
"""Instructions that hold no pipe."""

COPY_LATENCY, BARRIER_LATENCY = 700.0, 20.0
"""Clocks until an asynchronous copy has arrived from L2 or memory, and between the last arrival at a barrier and the
next instruction. Estimates: no source measures them under load."""

OUTSIDE, MASKED, EFFICIENCY = 12000.0, 6000.0, 0.90
"""The three fitted constants, of 18 kernels rebuilt for Hopper at three lengths each on an H200: clocks that a tile of
queries costs outside the main loop, clocks that the tiles on the diagonal cost it beyond other tiles, and the share of
the modelled rate that is reached, by what the model leaves out. Other chips are taken to have the same."""
