"""Runs programs of this folder in processes of their own: one, or two that torch.distributed joins."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def environment(paths: Iterable[str] = (), **more: str) -> dict[str, str]:
    """Environment of this process, with a PYTHONPATH of sage_aot, package sageattention, this folder and `paths`."""
    found = (ROOT, ROOT / "ci/sageattention", HERE, *paths, os.environ.get("PYTHONPATH"))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(str(path) for path in found if path), **more}


def run(program: str, *arguments: str, paths: Iterable[str] = (), **more: str) -> str:
    """Output of a program; an AssertionError has the end of what the program says where it fails."""
    done = subprocess.run([sys.executable, HERE / program, *arguments], capture_output=True, text=True, cwd=ROOT,
                          env=environment(paths, **more))
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def run_two(program: str, *arguments: str, paths: Iterable[str] = ()) -> str:
    """Output of rank 0 of two processes; an AssertionError as in :func:`run`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    joined = environment(paths, WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
    ranks = [subprocess.Popen([sys.executable, HERE / program, *arguments], env={**joined, "RANK": str(rank)}, cwd=ROOT,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for rank in range(2)]
    try:
        said = [rank.communicate(timeout=600) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    codes = [rank.returncode for rank in ranks]
    assert codes == [0, 0], f"exit codes {codes}\n{said[0][1][-2000:]}\n{said[1][1][-2000:]}"
    return said[0][0]
