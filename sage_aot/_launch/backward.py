"""The layout and the launches of a backward pass. Pure, as :mod:`sage_aot._launch.plan` is.

A forward pass of the part "train" writes the quantized Q to what is saved, and which keys a mask leaves; K̂ is copied
there, :class:`SavedParts`.
Up to three launches follow. The first writes what the others read in addition to that and the caller's tensors. Then
one computes the gradients of K and V, and one that of Q, each where somebody asks for its gradients. Where all
gradients are asked for and one kernel is faster, two launches take the place of these: that kernel, and one that rounds
the sums of the gradient of Q.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from sage_aot._kernels.manifest import KernelRecord, Manifest
from sage_aot._kernels.spec import BACKWARD, BACKWARD_TOGETHER
from sage_aot._launch.plan import Launch, Plan, kv_blocks_of, launch_of, lay_out, q_blocks_of
from sage_aot._launch.structs import NULL, FastDivmod, Tensor
from sage_aot.errors import UnsupportedError


class SavedParts(NamedTuple):
    """The parts of what a forward pass saves, in bytes: Q̂ and its scales where the plan's kept_offsets say, then
    K̂."""

    k_begin: int
    kv_tiles: int
    k_tile_bytes: int  # of each tile K̂, at its beginning
    line_bytes: int  # and its line, at its end

    @property
    def total(self) -> int:
        return self.k_begin + self.kv_tiles * (self.k_tile_bytes + self.line_bytes)


@dataclass(frozen=True)
class BackwardPlan:
    """Sizes that follow from a forward pass and the backward kernels; sizes and offsets in bytes."""

    forward: Plan
    kernels: dict[str, KernelRecord]  # by kind
    saved: SavedParts
    q_side_tiles: int  # tiles of the backward kernels in those of the forward pass, of a head
    kv_side_tiles: int  # likewise of K and V
    parts_of_kv_tile: int  # tiles of the backward kernels in a KV tile of the forward pass, a power of two
    offsets: dict[str, int]  # from the workspace's beginning, per buffer
    sizes: dict[str, int]  # per buffer
    workspace_bytes: int
    side_by_side: int  # KV heads whose blocks begin in turn, where one kernel finds all gradients; else 0


class BackwardArguments(NamedTuple):
    """The tensors of a backward pass; None: a gradient that nobody asked for. Of the first three, rows begin at
    multiples of 16 bytes and hold whole vectors of 16 bytes."""

    grad_out: Tensor
    out: Tensor
    v: Tensor
    grad_q: Tensor | None
    grad_k: Tensor | None
    grad_v: Tensor | None


_NOBODYS = Tensor(NULL, 0, 0, 0)
"""A gradient that nobody asked for, which no launch writes."""


def backward_kernels(forward: Plan, manifest: Manifest) -> dict[str, KernelRecord]:
    """The backward kernels of a forward pass, by kind. UnsupportedError where the folder lacks one."""
    spec = forward.kernels.attn.spec
    wanted = {kind: spec.companion(kind).name for kind in BACKWARD if spec.trains}
    missing = [name for name in wanted.values() if name not in manifest.kernels]
    if missing or not wanted:
        lacking = ", ".join(missing) or "kernels for these options"
        raise UnsupportedError(f"no backward pass for {spec.name}: the folder of kernels lacks {lacking}; install a "
                               f"wheel that has them, or train with "
                               f"torch.nn.functional.scaled_dot_product_attention")
    together = {kind: spec.companion(kind).name for kind in BACKWARD_TOGETHER}
    if all(name in manifest.kernels for name in together.values()):
        wanted |= together
    return {kind: manifest.kernels[name] for kind, name in wanted.items()}


def multiplies_halves(kernels: dict[str, KernelRecord]) -> bool:
    """True where backward kernels, given by kind, multiply P and dS in 16 bits; else they do as integers of 8."""
    return bool(kernels["bwdkv"].fact("halves"))


def plan_backward(forward: Plan, manifest: Manifest, side_by_side: int = 0) -> BackwardPlan:
    """Lay out the workspace of a backward pass. `side_by_side`: of :func:`heads_side_by_side`."""
    problem, kernels = forward.problem, backward_kernels(forward, manifest)
    prepare, tile = kernels["bwdprep"], forward.kernels.attn.tile
    rows = prepare.fact("tile_rows")
    q_side, kv_side = forward.q_tiles * tile.block_m // rows, forward.kv_tiles * tile.block_n // rows
    sizes = {"q_side": problem.runs * problem.num_q_heads * q_side * prepare.fact("q_side_bytes"),
             "kv_side": problem.runs * problem.num_kv_heads * kv_side * prepare.fact("kv_side_bytes")}
    if side_by_side:
        q_tiles = problem.runs * problem.num_q_heads * q_side
        sizes |= {"q_sums": q_tiles * kernels["bwdsum"].fact("q_sum_bytes"), "q_counts": 4 * q_tiles}
    offsets, workspace_bytes = lay_out(sizes)
    return BackwardPlan(forward, kernels, saved_parts(forward, prepare), q_side, kv_side, tile.block_n // rows,
                        offsets, sizes, workspace_bytes, side_by_side)


def saved_parts(forward: Plan, prepare: KernelRecord) -> SavedParts:
    """The parts that are saved of a forward pass. `prepare`: the kernel that reads it."""
    tiles = forward.problem.runs * forward.problem.num_kv_heads * forward.kv_tiles
    return SavedParts(forward.kept_bytes, tiles, prepare.fact("k_tile_bytes"), prepare.fact("k_line_bytes"))


def backward_launches(plan: BackwardPlan, tensors: BackwardArguments) -> list[Launch]:
    """The launches of a backward pass, in order."""
    problem = plan.forward.problem
    q_heads, kv_heads = problem.runs * problem.num_q_heads, problem.runs * problem.num_kv_heads
    known = {**_known(plan, tensors), "q_side_blocks": q_heads * plan.q_side_tiles}
    kv_blocks = known["kv_blocks_of_head"].divisor
    blocks = {"bwdprep": known["q_side_blocks"] + kv_heads * plan.kv_side_tiles}
    if plan.side_by_side and None not in (tensors.grad_q, tensors.grad_k):
        rounds = -(-kv_heads // plan.side_by_side)  # in the last one, blocks of heads that do not exist end at once
        blocks |= {"bwdqkv": rounds * plan.side_by_side * kv_blocks, "bwdsum": known["q_side_blocks"]}
    else:
        blocks |= {"bwdkv": kv_heads * kv_blocks} if tensors.grad_k is not None else {}
        blocks |= {"bwdq": q_heads * known["q_blocks"].divisor} if tensors.grad_q is not None else {}
    return [launch_of(plan.kernels[kind], count, known, problem.dtype, problem.is_packed)
            for kind, count in blocks.items()]


def _known(plan: BackwardPlan, tensors: BackwardArguments) -> dict[str, Any]:
    """The values that all launches share, by the names of the struct's fields."""
    problem, saved = plan.forward.problem, plan.saved
    return {
        **dict.fromkeys(("key_rank", "key_index", "q_sums", "q_counts"), NULL),
        **{name: tensor or _NOBODYS for name, tensor in tensors._asdict().items()},
        **{name: ("workspace", offset) for name, offset in plan.offsets.items()},
        **{name: ("kept", offset) for name, offset in plan.forward.kept_offsets.items()},
        **{name: (name, 0) if problem.tokens else NULL for name in ("cu_seqlens_q", "cu_seqlens_k")},
        "k_hat": ("kept", saved.k_begin), "lse": ("lse", 0), "batch": problem.batch,
        "num_q_heads": FastDivmod.of(problem.num_q_heads),
        "num_kv_heads": FastDivmod.of(problem.num_kv_heads),
        "q_heads_per_kv_head": FastDivmod.of(problem.num_q_heads // problem.num_kv_heads),
        "seqlen_q": problem.seqlen_q, "seqlen_kv": problem.seqlen_kv, "q_rows": problem.q_rows,
        "headdim": problem.headdim, "block_m": plan.forward.kernels.attn.tile.block_m,
        "q_side_tiles": FastDivmod.of(plan.q_side_tiles), "kv_side_tiles": FastDivmod.of(plan.kv_side_tiles),
        "log2_parts_of_kv_tile": plan.parts_of_kv_tile.bit_length() - 1,
        "q_blocks": FastDivmod.of(q_blocks_of(problem, plan.kernels["bwdq"].fact("block_rows"))),
        "kv_blocks_of_head": FastDivmod.of(_kv_blocks_of_head(plan.forward, plan.kernels)),
        "heads_side_by_side": FastDivmod.of(max(plan.side_by_side, 1)),
        "kv_heads": problem.runs * problem.num_kv_heads, "unused": 0,
        "softmax_scale": problem.softmax_scale, "is_causal": problem.options.is_causal,
    }


def _kv_blocks_of_head(forward: Plan, kernels: dict[str, KernelRecord]) -> int:
    return kv_blocks_of(forward.problem, kernels["bwdkv"].fact("block_rows"))


_ROUNDS_SIDE_BY_SIDE = {False: 2, True: 4}
"""Blocks side by side, in blocks that the GPU runs at a time: without a causal mask and with one."""

_LEAST_ROUNDS = {64: 6, 128: 16}
"""Least blocks of a call for which one kernel is faster than two, in blocks that the GPU runs at a time, by head
dim."""

_MOST_CAUSAL_BLOCKS = {64: math.inf, 128: 64}
"""Most blocks of a head for which one kernel is faster than two under a causal mask, by head dim."""


def heads_side_by_side(forward: Plan, manifest: Manifest, wants_all: bool, sm_count: int,
                       asked: int | None = None) -> int:
    """The KV heads whose blocks begin in turn on a GPU of `sm_count` SMs, or 0: dQ is found by a kernel of its own.

    A block adds to a tile of dQ microseconds behind the block before it, and blocks of a head that begin closer to each
    other wait. A block begins when another one ends: with many heads side by side, blocks of one head begin far enough
    apart. Calls of few blocks wait nevertheless, and two kernels are faster, except those with a causal mask and no
    groups, which are bound by their longest blocks. All numbers are measured (docs/decisions.md), for batch entries of
    one length.

    `wants_all`: whether all gradients are asked for. `asked`: so many side by side where one kernel can find all
    gradients.
    """
    kernels, problem = backward_kernels(forward, manifest), forward.problem
    heads, all_blocks = problem.runs * problem.num_kv_heads, _kv_blocks_of_head(forward, kernels)
    blocks = -(-problem.seqlen_kv // kernels["bwdkv"].fact("block_rows"))  # of the longest sequence
    headdim, is_causal = forward.kernels.attn.spec.headdim, problem.options.is_causal
    if not wants_all or problem.is_empty or not kernels.keys() >= {*BACKWARD_TOGETHER}:
        return 0
    if asked is not None:
        return asked
    has_many = heads * all_blocks >= _LEAST_ROUNDS[headdim] * sm_count
    has_groups = problem.num_q_heads != problem.num_kv_heads
    sooner = blocks <= _MOST_CAUSAL_BLOCKS[headdim] and (has_many or not has_groups) if is_causal else has_many
    return max(1, min(_ROUNDS_SIDE_BY_SIDE[is_causal] * sm_count // blocks, heads)) if sooner else 0
