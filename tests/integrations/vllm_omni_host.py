"""Runs vLLM-Omni's own selection of a diffusion attention backend and the calls of what it selects, and prints what
came of it as JSON.

    export PYTHONPATH=.:ci/sageattention:tests/integrations:$VLLM_OMNI_PATH
    python tests/integrations/vllm_omni_host.py SAGE_ATTN

The argument is what a user gives as ``--diffusion-attention-backend``. A stand-in takes the place of vLLM, of which the
selection uses the logger and a look-up of names. test_hosts.py says what is right.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import pkgutil
import sys
from collections import namedtuple
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import host_program
import torch

ROOT = str(Path(importlib.util.find_spec("vllm_omni").origin).parents[1])
Capability = namedtuple("Capability", "major minor")

host_program.stand_in("vllm.logger", init_logger=logging.getLogger)
host_program.stand_in("vllm.utils.import_utils", resolve_obj_by_qualname=pkgutil.resolve_name)
host_program.stand_in("vllm.platforms", Platform=type("Platform", (), {}))
host_program.stand_in("vllm.platforms.cuda", CudaPlatformBase=type("CudaPlatformBase", (), {}))
host_program.bare(ROOT, "vllm_omni", "vllm_omni.diffusion", "vllm_omni.diffusion.attention")

from vllm_omni import platforms  # noqa: E402
from vllm_omni.platforms.cuda.platform import CudaOmniPlatform  # noqa: E402

platforms._current_omni_platform = CudaOmniPlatform()  # before the backends are imported, which ask

from vllm_omni.diffusion.attention import selector  # noqa: E402
from vllm_omni.diffusion.attention.backends.abstract import AttentionMetadata  # noqa: E402
from vllm_omni.diffusion.attention.backends.ring.ring_selector import (  # noqa: E402
    AttnType,
    select_flash_attn_impl,
)


def selected(name: str, capability: tuple[int, int]) -> Any:
    """The backend that vLLM-Omni selects for a name on a GPU."""
    CudaOmniPlatform.get_device_capability = classmethod(lambda cls: Capability(*capability))
    CudaOmniPlatform.get_device_name = classmethod(lambda cls: "a GPU")
    selector._cached_get_backend_cls.cache_clear()
    config = SimpleNamespace(resolve_with_source=lambda role, role_category: (SimpleNamespace(backend=name), "default"))
    backend, _ = selector.get_attn_backend_for_role("self", 64, config)
    return backend


def calls(backend: Any) -> dict[str, host_program.Outcome]:
    """Calls with grouped heads, a causal mask and a scale, a large head dim, and, where taken, a mask of keys."""
    def layer(qkv: list[torch.Tensor], scale: float, causal: bool = False) -> Any:
        return backend.get_impl_cls()(qkv[0].size(2), qkv[0].size(3), scale, causal=causal, num_kv_heads=qkv[1].size(2))

    qkv, wide = host_program.draw(), host_program.draw(headdim=256)
    mask = torch.arange(64) < torch.tensor([20, 64])[:, None]
    found = {
        "grouped heads": host_program.outcome(partial(layer(qkv, 0.125).forward, *qkv),
                                              host_program.expected(qkv)[0]),
        "causal, scale": host_program.outcome(partial(layer(qkv, 0.3, causal=True).forward, *qkv),
                                              host_program.expected(qkv, scale=0.3, is_causal=True)[0]),
        "head dim 256": host_program.outcome(partial(layer(wide, 0.0625).forward, *wide),
                                             host_program.expected(wide)[0])}
    if backend.supports_attention_mask():
        found["a mask of keys"] = host_program.outcome(
            partial(layer(qkv, 0.125).forward, *qkv, AttentionMetadata(attn_mask=mask)),
            host_program.expected(qkv, key_mask=mask)[0])
    return found


def ring_steps() -> dict[str, host_program.Outcome]:
    """Steps that vLLM-Omni's ring calls for each of its names for SageAttention, with the arguments that it passes."""
    qkv = host_program.draw()
    of_ring = {"dropout_p": 0.0, "softmax_scale": 0.3, "causal": True, "window_size": (-1, -1), "softcap": 0.0,
               "alibi_slopes": None, "return_softmax": False}
    wanted, lse = host_program.expected(qkv, scale=0.3, is_causal=True)
    found = {}
    for kind in AttnType:
        if kind.value.startswith("sage"):
            step = partial(select_flash_attn_impl(kind, "fwd-only"), *qkv, **of_ring)
            found[kind.value] = host_program.outcome(lambda step=step: step()[0], wanted)
            found[f"{kind.value}: log-sum-exp"] = host_program.outcome(lambda step=step: step()[1], lse)
    return found


def main(name: str) -> None:
    backend = selected(name, (8, 9))
    print(json.dumps({"chosen": f"{backend.__module__}.{backend.__name__}", "calls": calls(backend),
                      "ring": ring_steps(), "on a B200": host_program.refusal(lambda: selected(name, (10, 0)))}))


if __name__ == "__main__":
    main(sys.argv[1])
