"""The second compiler: nvcc from the PATH, to debug, or to tell a bug of a kernel from a bug of NVRTC.

nvcc's cubins are not for wheels: cubins by 13.x need driver 580, and they depend on the host compiler's headers.
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
"""--expt-relaxed-constexpr stands for -default-device, which only NVRTC has: the sources need it for constexpr
functions."""


@cache
def version() -> str:
    """Name and version, ``"nvcc 13.0.88"``; BuildError where no nvcc is on the PATH."""
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
