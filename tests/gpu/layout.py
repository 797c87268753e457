"""The tensors of one run of the kernels, and a reader of the quantizers' tiles, independent of the kernels' code: it
brings them into logical order by the comments of tile/layout.cuh."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sage_aot._launch.plan import Plan

BITS = {"int8": 8, "int4": 4}
"""Bits of an element of the quantized Q and K."""


@dataclass(frozen=True)
class Result:
    out: torch.Tensor  # layout of q
    lse: torch.Tensor  # [batch, q heads, queries]
    workspace: torch.Tensor  # the quantized tensors
    plan: Plan


def read_back(result: Result) -> dict[str, torch.Tensor]:
    """The quantized q, k and v as [batch, heads, rows, headdim] f32, their scales, and everything else that attention
    reads, on the CPU. Of sequences the tiles are in slots, in a batch of one."""
    layout = result.plan
    problem, spec, tile = layout.problem, layout.kernels.attn.spec, layout.kernels.attn.tile
    quant = layout.kernels["quant"]
    q_heads, kv_heads = (problem.runs, problem.num_q_heads), (problem.runs, problem.num_kv_heads)
    of_channels = problem.batch, problem.num_kv_heads, spec.headdim
    data = result.workspace.cpu()

    def buffer(name: str, *shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        count = torch.Size(shape).numel() * dtype.itemsize
        return data[layout.offsets[name]: layout.offsets[name] + count].clone().view(dtype).view(shape)

    row_bytes = spec.headdim * BITS[spec.qk] // 8
    k_bytes, v_bytes = tile.block_n * row_bytes, tile.block_n * spec.headdim * (2 if spec.pv == "f16" else 1)
    q = buffer("q_hat", *q_heads, layout.q_tiles, tile.block_m * row_bytes)
    kv = buffer("kv_hat", *kv_heads, layout.kv_tiles, quant.fact("kv_tile_bytes"))
    k, v = kv[..., :k_bytes], kv[..., k_bytes: k_bytes + v_bytes]
    line = kv[..., k_bytes + v_bytes:].contiguous()
    words, k_groups = line[..., :64].contiguous(), quant.fact("key_groups")  # 64 bytes hold a KvLine
    k_scale, v_factor = words.view(torch.float32)[..., : 2 * k_groups].unflatten(-1, (-1, 2)).unbind(-1)
    marks = _bits(words.view(torch.int32)[..., 2 * k_groups: 2 * k_groups + 5])
    k_spoilt = marks[..., : tile.block_n] & (k_scale[..., :1] < 0)
    channels = marks[..., 128:].repeat_interleave(8, -1)[..., : spec.headdim] & (v_factor[..., :1] < 0)
    q_scale = buffer("q_scale", *q_heads, layout.q_tiles * tile.block_m // tile.warp_m, quant.fact("row_groups"),
                     dtype=torch.float32)
    keys, rows = torch.arange(tile.block_n), torch.arange(tile.warp_m)
    v_hat = _read_v(v, result)
    smoothed = {}
    if problem.options.smooth_q:
        smoothed["q_mean"] = buffer("q_mean", *q_heads, layout.q_tiles, spec.headdim, dtype=torch.float32)
        if layout.heads_at_once == problem.runs * problem.num_q_heads:  # else only the last launch's heads are left
            smoothed["delta_s"] = buffer("delta_s", *q_heads, layout.q_tiles, layout.columns,
                                         dtype=torch.float32)
    return smoothed | {
        "q": _integers(_rows(q, tile.block_m, row_bytes), spec.qk).flatten(2, 3),
        "k": _integers(_rows(k, tile.block_n, row_bytes), spec.qk).flatten(2, 3),
        "v": v_hat,
        "q_scale": q_scale[..., rows % quant.fact("row_groups")].flatten(2),
        "k_scale": k_scale.abs()[..., keys % 8 // 2].flatten(2),
        "v_scale": buffer("v_scale", *of_channels, dtype=torch.float32),
        "k_mean": buffer("k_mean", *of_channels, dtype=torch.float32),
        "v_mean": buffer("v_mean", *of_channels, dtype=torch.float32),
        "v_factor": v_factor[..., 0].abs(),
        "k_spoilt": k_spoilt.flatten(2),
        "v_spoilt": (v_hat == 0) & v_hat.signbit() & channels.repeat_interleave(tile.block_n, 2),
        "row_bias": buffer("row_bias", *q_heads, layout.q_tiles * tile.block_m, dtype=torch.float32),
    }


def _integers(data: torch.Tensor, qk: str) -> torch.Tensor:
    """Values of bytes that hold one s8 each, or two s4 each, the first in the lower half."""
    if qk == "int8":
        return data.view(torch.int8).float()
    halves = torch.stack([data & 15, data >> 4], -1).flatten(-2).float()
    return torch.where(halves < 8, halves, halves - 16)


def _bits(words: torch.Tensor) -> torch.Tensor:
    """[..., words] i32 to [..., 32 * words] bool, the lowest bit first."""
    return (words[..., None] >> torch.arange(32) & 1).bool().flatten(-2)


def _read_v(v: torch.Tensor, result: Result) -> torch.Tensor:
    spec, block_n = result.plan.kernels.attn.spec, result.plan.kernels.attn.tile.block_n
    if spec.pv == "f16":
        return _rows(v, block_n, 2 * spec.headdim).view(torch.float16).float().flatten(2, 3)
    columns = _rows(v, spec.headdim, block_n).view(torch.float8_e4m3fn).float()  # [..., headdim, block_n]
    by_key = torch.empty_like(columns)
    by_key[..., _key_of_column(block_n)] = columns
    return by_key.transpose(3, 4).flatten(2, 3)


def _key_of_column(block_n: int) -> torch.Tensor:
    """The key of each column of the P operand: in each 16 columns, column 4t + e holds key 8·(e div 2) + 2t + e mod
    2."""
    column = torch.arange(block_n)
    half, t, e = column // 16 % 2, column // 4 % 4, column % 4
    return column // 32 * 32 + half * 16 + 8 * (e // 2) + 2 * t + e % 2


def _rows(tiles: torch.Tensor, rows: int, row_bytes: int) -> torch.Tensor:
    """[..., rows * row_bytes] swizzled bytes, in panels of at most 128 bytes a row, to [..., rows, row_bytes]."""
    pitch = min(128, row_bytes)
    panels = tiles.reshape(*tiles.shape[:-1], row_bytes // pitch, rows, pitch // 16, 16)
    row, chunk = torch.arange(rows)[:, None], torch.arange(pitch // 16)
    xor = row // (128 // pitch) % (pitch // 16)
    return panels[..., row, chunk ^ xor, :].flatten(-2).transpose(-3, -2).flatten(-2)
