"""Two processes share the tokens or the heads of one model (context parallelism of diffusers), or the tokens of one
call (the rings of torch and yunchang), over gloo."""

from __future__ import annotations

import json

import programs
import pytest

pytest.importorskip("diffusers", minversion="0.36")
pytest.importorskip("yunchang")


def test_two_processes_compute_what_one_does():
    results = [json.loads(line) for line in programs.run_two("one_rank.py").splitlines()]
    assert all(result["exact"] < 1e-5 for result in results), results
    of_models = {result["way"]: result for result in results if "way" in result}
    # two layers, each with attention to itself, in two steps where a ring shares tokens, and to the text
    assert {way: result["report"]["sage_aot"] for way, result in of_models.items()} == {
        "ring": 6, "ring, any length": 6, "ulysses": 4, "ulysses, any length": 4}
    assert all(0 < result["kernels"] < 0.05 for result in of_models.values()), results
    of_sparse = {result["sparse"]: result for result in results if "sparse" in result}
    assert {way: result["report"] for way, result in of_sparse.items()} == {
        f"{way}{text}": {"sage_aot": calls, "sage_aot, sparse": calls} for text in ("", ", text") for way, calls in (
            ("ring", 2), ("ring, any length", 2), ("ulysses", 1), ("ulysses, any length", 1))}
    assert all(result["seen"] < 0.8 for result in of_sparse.values()), results
    assert {result["tokens"] for result in results if "text of" in result} == {76, 151, 152}  # a ring: of a share
    texts = [(result["text of"], result["shared by"]) for result in results if "text of" in result]
    assert sorted(texts) == sorted((name, way) for name in ("flux", "qwen image") for way in of_models)
    assert all(0 < result["kernels"] < 0.06 for result in of_sparse.values()), results
    assert 0.25 < next(result["kept"] for result in results if "masks" in result) < 0.6
    of_rings = {(result["ring"], result["is_causal"]): result["report"] for result in results if "ring" in result}
    assert of_rings == {(ring, is_causal): {"sage_aot": 1 if is_causal else 2}  # rank 0 sees its own tokens alone
                        for ring in ("torch", "yunchang", "yunchang by sageattention") for is_causal in (False, True)}
