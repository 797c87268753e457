"""Runs the own selection of attention of SGLang's diffusion part and the calls of what it selects, and prints what came
of it as JSON.

    export PYTHONPATH=.:ci/sageattention:tests/integrations:$SGLANG_PATH
    python tests/integrations/sglang_host.py sage_attn 8.9

The arguments: what a user gives as ``--attention-backend``, and the compute capability of the GPU that is there. A
stand-in takes the place of SGLang's command line, which it reads the name from. test_hosts.py says what is right.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import host_program
import torch

ROOT = str(Path(importlib.util.find_spec("sglang").origin).parents[1])
RUNTIME = "sglang.multimodal_gen.runtime"

os.environ["SGLANG_DIFFUSION_PLATFORM_OVERRIDE"] = "cuda"  # else SGLang asks for a GPU here


class ServerArgs(SimpleNamespace):
    """Part of SGLang's ServerArgs that the selection asks."""

    def is_arg_explicitly_set(self, name: str) -> bool:
        return True


def selected(name: str, headdim: int) -> Any:
    """The backend that SGLang selects for its arguments."""
    server_args: Any = ModuleType(f"{RUNTIME}.server_args")
    server_args.ServerArgs = ServerArgs
    server_args.get_global_server_args = lambda: ServerArgs(attention_backend=name)
    sys.modules[server_args.__name__] = server_args
    from sglang.multimodal_gen.runtime.layers.attention.selector import get_attn_backend

    return get_attn_backend(headdim, torch.bfloat16)


def calls(backend: Any) -> dict[str, host_program.Outcome]:
    """Calls with grouped heads, a causal mask and a scale; a step of a ring; packed sequences, with padding behind."""
    def layer(scale: float = 0.125, **more: Any) -> Any:
        return backend.get_impl_cls()(4, 64, causal=more.pop("causal", False), softmax_scale=scale, **more)

    qkv, packed = host_program.draw(), [x[0] for x in host_program.draw(queries=90, keys=90, batch=1)]
    parts = [host_program.expected([x[None, a:b] for x in packed])[0][0] for a, b in ((0, 20), (20, 90))]
    out, lse = host_program.expected(qkv)
    bounds = {"cu_seqlens": torch.tensor([0, 20, 90], dtype=torch.int32)}
    ring = partial(layer().forward, *qkv, None, return_softmax_lse=True)
    return {
        "grouped heads": host_program.outcome(partial(layer().forward, *qkv, None), out),
        "causal, scale": host_program.outcome(partial(layer(0.3, causal=True).forward, *qkv, None),
                                              host_program.expected(qkv, scale=0.3, is_causal=True)[0]),
        "ring: output": host_program.outcome(lambda: ring()[0], out),
        "ring: log-sum-exp": host_program.outcome(lambda: ring()[1], lse),
        "packed": host_program.outcome(partial(layer().forward_varlen, *packed, max_seqlen=70, **bounds),
                                       torch.cat(parts)),
        "padded": host_program.outcome(
            partial(layer(packed_trailing_padding=True).forward_varlen, *packed, max_seqlen=20, **bounds),
            torch.cat([parts[0], torch.zeros_like(parts[1])]))}


def main(name: str, capability: str) -> None:
    importlib.import_module(f"{RUNTIME}.layers")
    host_program.bare(ROOT, f"{RUNTIME}.layers.attention")
    major, minor = map(int, capability.split("."))
    with host_program.gpu((major, minor)):
        backend = selected(name, 64)
        wide = host_program.refusal(lambda: selected(name, 256))
    print(json.dumps({"chosen": f"{backend.__module__.removeprefix(RUNTIME + '.')}.{backend.__name__}",
                      "calls": calls(backend) if "sage" in backend.__module__ else {}, "head dim 256": wide}))


if __name__ == "__main__":
    main(*sys.argv[1:])
