"""Two processes share the tokens or the heads of one model (context parallelism of diffusers), or the tokens of one
call (the rings of torch and yunchang), over gloo."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("diffusers", minversion="0.36")
pytest.importorskip("yunchang")

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def test_two_processes_compute_what_one_does():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = HERE, ROOT, ROOT / "ci" / "sageattention"
    environment = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                   "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, path))}
    ranks = [subprocess.Popen([sys.executable, HERE / "one_rank.py"], env={**environment, "RANK": str(rank)},
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for rank in range(2)]
    try:
        printed = [rank.communicate(timeout=240) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], printed[0][1][-2000:] + printed[1][1][-2000:]
    results = [json.loads(line) for line in printed[0][0].splitlines()]
    assert all(result["exact"] < 1e-5 for result in results), results
    of_models = {result["way"]: result for result in results if "way" in result}
    # two layers, each with attention to itself, in two steps where a ring shares tokens, and to the text
    assert {way: result["report"]["sage_aot"] for way, result in of_models.items()} == {
        "ring": 6, "ring, any length": 6, "ulysses": 4, "ulysses, any length": 4}
    assert all(0 < result["kernels"] < 0.05 for result in of_models.values()), results
    of_rings = {(result["ring"], result["is_causal"]): result["report"] for result in results if "ring" in result}
    assert of_rings == {(ring, is_causal): {"sage_aot": 1 if is_causal else 2}  # rank 0 sees its own tokens alone
                        for ring in ("torch", "yunchang", "yunchang by sageattention") for is_causal in (False, True)}
