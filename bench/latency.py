"""What a call costs besides GPU time: the host's part of it, the first call of a process, the import."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median

import torch
import torch.nn.functional as F

import sage_aot

CALLS, WARM_UP_CALLS, PROCESSES = 300, 50, 3

FIRST_CALL = """
import time, torch, sage_aot
from sage_aot._driver import default_driver
default_driver()  # imports it
q, k, v = torch.randn(3, 1, 2, 64, 128, device="cuda").bfloat16()
torch.cuda.synchronize()
begin = time.perf_counter()
sage_aot.attn(q, k, v)
torch.cuda.synchronize()
print(1e3 * (time.perf_counter() - begin))
"""

IMPORT = """
import time, torch
begin = time.perf_counter()
import sage_aot
print(1e3 * (time.perf_counter() - begin))
"""


def host_us() -> dict[str, float]:
    """Median microseconds until a call returns, on batch 1, 2 heads, 64 tokens, for ours and for SDPA."""
    q, k, v = torch.randn(3, 1, 2, 64, 128, device="cuda").bfloat16()
    return {"sage_aot.attn": median_us(lambda: sage_aot.attn(q, k, v)),
            "scaled_dot_product_attention": median_us(lambda: F.scaled_dot_product_attention(q, k, v))}


def median_us(work: Callable[[], object]) -> float:
    """Median over CALLS calls that nothing synchronizes; so few launches never fill the queue of a stream."""
    for _ in range(WARM_UP_CALLS):
        work()
    torch.cuda.synchronize()
    samples = []
    for _ in range(CALLS):
        begin = time.perf_counter_ns()
        work()
        samples.append((time.perf_counter_ns() - begin) / 1e3)
    torch.cuda.synchronize()
    return median(samples)


def first_call_ms() -> dict[str, list[float]]:
    """Milliseconds of the first attn() after imports, and of `import sage_aot` after `import torch`, per process."""
    return {"first sage_aot.attn, with synchronize": in_fresh_processes(FIRST_CALL),
            "import sage_aot after import torch": import_ms()}


def import_ms() -> list[float]:
    """Milliseconds that `import sage_aot` adds to `import torch`, per process."""
    return in_fresh_processes(IMPORT)


def in_fresh_processes(program: str) -> list[float]:
    """The number that a program prints, from PROCESSES runs of it one after another."""
    return [json.loads(subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True,
                                      check=True).stdout) for _ in range(PROCESSES)]


def show(title: str, figures: dict[str, float] | dict[str, list[float]]) -> None:
    print(f"{title}:")
    for name, value in figures.items():
        values = value if isinstance(value, list) else [value]
        print(f"- {name}: {', '.join(f'{v:.1f}' for v in values)}", flush=True)
