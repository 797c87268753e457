"""Runs LightX2V's own registry of attention and the calls of what it finds there, and prints what came of it as JSON.

    export PYTHONPATH=.:ci/sageattention:tests/integrations:$LIGHTX2V_PATH
    python tests/integrations/lightx2v_host.py sage_attn2 8.9

The arguments: what a configuration of LightX2V gives as ``self_attn_1_type``, and the compute capability of the GPU
that is there. test_hosts.py says what is right.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import host_program
import torch

ROOT = str(Path(importlib.util.find_spec("lightx2v").origin).parents[1])


def rows(out: torch.Tensor) -> torch.Tensor:
    """An output as LightX2V has it: ``[batch * seq, heads * headdim]``."""
    return out.flatten(0, 1).flatten(1)


def calls(module: Any) -> dict[str, host_program.Outcome]:
    """Calls of a batch, of one sequence and a text's keys; with a causal mask and a scale; and of a step of a ring."""
    qkv, text = host_program.draw(), host_program.draw(keys=20, batch=1)
    (out, lse), (of_text, _) = host_program.expected(qkv), host_program.expected(text)
    lengths = {"max_seqlen_q": 64, "max_seqlen_kv": 20}
    return {
        "batch": host_program.outcome(partial(module.apply, *qkv), rows(out)),
        "text": host_program.outcome(partial(module.apply, *(x[0] for x in text), **lengths), rows(of_text)),
        "causal": host_program.outcome(partial(module.apply, *qkv, causal=True),
                                       rows(host_program.expected(qkv, is_causal=True)[0])),
        "scale": host_program.outcome(partial(module.apply, *qkv, softmax_scale=0.3),
                                      rows(host_program.expected(qkv, scale=0.3)[0])),
        "ring: output": host_program.outcome(lambda: module.apply_with_lse(*qkv)[0], rows(out)),
        "ring: log-sum-exp": host_program.outcome(lambda: module.apply_with_lse(*qkv)[1],
                                                  lse.transpose(1, 2).flatten(0, 1))}


def main(name: str, capability: str) -> None:
    major, minor = map(int, capability.split("."))
    with host_program.gpu((major, minor)):
        import lightx2v_platform.set_ai_device  # noqa: F401 - as lightx2v/__init__.py does before all else

        host_program.bare(ROOT, "lightx2v", "lightx2v.common", "lightx2v.common.ops", "lightx2v.utils")
        import lightx2v.common.ops.attn as host
        from lightx2v.utils.registry_factory import ATTN_WEIGHT_REGISTER

    function = host.sage_attn.sageattn
    print(json.dumps({"imported": f"{function.__module__}.{function.__name__}",
                      "calls": calls(ATTN_WEIGHT_REGISTER[name]())}))


if __name__ == "__main__":
    main(*sys.argv[1:])
