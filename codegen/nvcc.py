"""The compiler of second resort: nvcc from the PATH, to tell a bug of the kernel from one of NVRTC, or to debug.

Its cubins are not for wheels: 13.x ones need driver 580, and the result depends on the host compiler's headers.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from codegen.compiler import Compiled, main
from codegen.errors import BuildError
from codegen.targets import is_ptx_target

FLAGS: tuple[str, ...] = ("-std=c++17", "--expt-relaxed-constexpr", "-Xptxas=-v")
"""-default-device exists in NVRTC only; for constexpr functions, which is where it matters, this is its equal."""


@cache
def version() -> str:
    """``"nvcc 13.0.88"``; BuildError where there is none."""
    if shutil.which("nvcc") is None:
        raise BuildError("expected nvcc on the PATH, got none: install a CUDA toolkit or use --toolchain nvrtc")
    text = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    return f"nvcc {re.findall(r'V([0-9.]+)', text)[0]}"


def compile_kernel(source: Path, target: str, include: Path) -> Compiled:
    """Compile one source; BuildError with the compiler's log where it does not compile."""
    version()
    with TemporaryDirectory() as folder:
        out = Path(folder, "out")
        form = "-ptx" if is_ptx_target(target) else "-cubin"
        command = ["nvcc", form, f"-arch={target}", f"-I{include}", *FLAGS, str(source), "-o", str(out)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        if done.returncode != 0:
            raise BuildError(f"nvcc exited with {done.returncode}\n{done.stdout}")
        return Compiled(out.read_bytes(), done.stdout, is_ptx_target(target))


if __name__ == "__main__":
    sys.exit(main(compile_kernel, version))
