"""One of two processes that run xDiT's own selection of attention and its calls, alone, in a ring and by Ulysses.

    export PYTHONPATH=.:ci/sageattention:tests/integrations:$XDIT_PATH
    RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python tests/integrations/xdit_host.py sage

The argument is what a user gives as ``--attention_backend``. Rank 0 prints what came of it as JSON; test_hosts.py says
what is right.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from unittest import mock

import diffusers  # noqa: F401 - before the GPU that is none, as yunchang
import host_program
import torch
import torch.distributed as dist
import yunchang  # noqa: F401

with host_program.gpu((8, 9)), mock.patch.object(torch.version, "cuda", "12.8"):
    import xfuser
    from xfuser.core import distributed as host
    from xfuser.core.distributed import parallel_state, runtime_state
    from xfuser.model_executor.layers import usp

WAYS = {"ring": {"ring_degree": 2, "ulysses_degree": 1}, "ulysses": {"ring_degree": 1, "ulysses_degree": 2}}


def heads_first(*rows: torch.Tensor) -> list[torch.Tensor]:
    return [x.transpose(1, 2) for x in rows]


def chosen(backend: str, degrees: dict[str, int]) -> str:
    """The backend that xDiT takes for its arguments."""
    config, _ = xfuser.xFuserArgs(model="none", attention_backend=backend, **degrees).create_config()
    runtime_state._RUNTIME = runtime_state.RuntimeState(config)
    return host.get_runtime_state().attention_backend.name


def calls(way: str) -> dict[str, host_program.Outcome]:
    rank, found = dist.get_rank(), {}
    qkv = host_program.draw(kv_heads=4)
    for is_causal in (False, True):
        out, _ = host_program.expected(qkv, is_causal=is_causal)
        whole, parts = heads_first(*qkv), [x.chunk(2, dim=2)[rank] for x in heads_first(*qkv)]
        name = f"{way}, causal" if is_causal else way
        found |= {f"{name}: alone": host_program.outcome(
            partial(usp.attention, *whole, is_causal=is_causal), *heads_first(out)),
            f"{name}: shared": host_program.outcome(
                partial(usp.USP, *parts, is_causal=is_causal), heads_first(out)[0].chunk(2, dim=2)[rank])}
    return found


def padded() -> host_program.Outcome:
    """Keys of which a part is padding, as xDiT tells its backends of them."""
    qkv, lengths = host_program.draw(kv_heads=4), torch.tensor([20, 64])
    mask = torch.arange(64) < lengths[:, None]
    out, _ = host_program.expected(qkv, key_mask=mask)
    described = {"indices_k": mask.flatten().nonzero().flatten(), "max_seqlen_k": 64,
                 "cu_seqlens_k": torch.tensor([0, 20, 84], dtype=torch.int32)}
    return host_program.outcome(partial(usp.attention, *heads_first(*qkv), attention_kwargs=described),
                                *heads_first(out))


def main(backend: str) -> None:
    host.init_distributed_environment(int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"]), backend="gloo")
    found, names = {}, set()
    for way, degrees in WAYS.items():
        host.initialize_model_parallel(sequence_parallel_degree=2, backend="gloo", **degrees)
        names.add(chosen(backend, degrees))
        found |= calls(way)
        if way == "ulysses":
            found["padded keys"] = padded()
        parallel_state.destroy_model_parallel()
    if dist.get_rank() == 0:
        print(json.dumps({"chosen": sorted(names), "calls": found}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
