"""The launches of a selection of blocks. Pure, as :mod:`sage_aot._launch.plan` is."""

from __future__ import annotations

from sage_aot._kernels.manifest import KernelRecord, Manifest
from sage_aot._kernels.spec import ChooseSpec, PoolSpec
from sage_aot._launch.plan import LOG2_E, Argument, Launch, launch_of, lay_out, rows_of
from sage_aot._launch.structs import DTYPE_CODES, NULL, FastDivmod
from sage_aot._problem.selection import CHOOSE_BY, Choosing, Pooling
from sage_aot.errors import UnsupportedError


def pooled_offsets(pooling: Pooling) -> tuple[dict[str, int], int]:
    """Offsets of the parts of what is pooled, by the fields of PoolParams, and the end of the last, in bytes."""
    return lay_out(pooling.sizes())


def pool_launch(pooling: Pooling, arch: str, manifest: Manifest, x: Argument, wants_means: bool) -> Launch:
    """The launch that pools a tensor. UnsupportedError where the folder lacks its kernel."""
    record = selection_record(PoolSpec(arch, pooling.channels).name, manifest)
    offsets, _ = pooled_offsets(pooling)
    known = {
        "x": x.tensor, **{name: ("pooled", offset) for name, offset in offsets.items()},
        "x_mean": ("x_mean", 0) if wants_means else NULL, "x_heads": FastDivmod.of(pooling.heads),
        "blocks": FastDivmod.of(pooling.blocks), "block_rows": pooling.block_rows, "seqlen": pooling.seqlen,
        "headdim": pooling.headdim, "dtype": DTYPE_CODES[pooling.dtype], "centre": pooling.centre, "unused": 0,
    }
    return launch_of(record, pooling.batch * pooling.heads * pooling.blocks, known,
                     rows_of(pooling.headdim, pooling.dtype, x))


def choose_launch(choosing: Choosing, arch: str, manifest: Manifest) -> Launch:
    """The launch that chooses blocks. UnsupportedError where the folder lacks its kernel, or a row of scores does not
    fit into its shared memory."""
    record = selection_record(ChooseSpec(arch, choosing.q.channels).name, manifest)
    q, k, choice = choosing.q, choosing.k, choosing.choice
    pitch = -(-k.blocks // record.fact("pitch")) * record.fact("pitch")
    if pitch > record.fact("floats"):
        raise UnsupportedError(f"a selection among {k.blocks} blocks of keys: expected at most "
                               f"{record.fact('floats')}; choose among larger blocks")
    group_rows = min(record.fact("most_rows"), record.fact("floats") // pitch)
    groups = -(-q.blocks // group_rows)
    of_q, of_k = pooled_offsets(q)[0], pooled_offsets(k)[0]
    keeps_unlike = choice.least_alike > 0
    known = {
        "q_hat": ("q_pooled", of_q["x_hat"]), "q_scale": ("q_pooled", of_q["x_scale"]),
        "q_alike": ("q_pooled", of_q["x_alike"]) if keeps_unlike else NULL,
        "k_hat": ("k_pooled", of_k["x_hat"]), "k_scale": ("k_pooled", of_k["x_scale"]),
        "k_alike": ("k_pooled", of_k["x_alike"]) if keeps_unlike else NULL,
        "amounts": ("amounts", 0) if choosing.per_head else NULL, "selected": ("selected", 0),
        "num_q_heads": FastDivmod.of(q.heads), "num_kv_heads": FastDivmod.of(k.heads),
        "q_heads_per_kv_head": FastDivmod.of(q.heads // k.heads), "groups": FastDivmod.of(groups),
        "q_block_count": q.blocks, "k_blocks": k.blocks, "seqlen_q": q.seqlen, "seqlen_kv": k.seqlen,
        "block_q": q.block_rows, "block_k": k.block_rows, "group_rows": group_rows, "pitch": pitch,
        "choose_by": CHOOSE_BY.index(choice.by), "amount": choice.amount,
        "softmax_scale_log2": choice.scale * LOG2_E, "least_alike": choice.least_alike,
        "choose_causal": choice.is_causal, "first_kept": choice.first, "near_kept": choice.near,
        "dense_first_keys": choice.dense_keys[0], "dense_last_keys": choice.dense_keys[1],
        "dense_first_queries": choice.dense_queries[0], "dense_last_queries": choice.dense_queries[1],
        "unused": 0,
    }
    return launch_of(record, q.batch * q.heads * groups, known)


def selection_record(name: str, manifest: Manifest) -> KernelRecord:
    """A kernel of a selection; UnsupportedError where the folder lacks it."""
    record = manifest.kernels.get(name)
    if record is None:
        raise UnsupportedError(f"no selection of blocks: the folder of kernels lacks {name}; install a wheel that has "
                               f"it, or make the mask yourself with sage_aot.block_mask")
    return record
