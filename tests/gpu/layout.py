"""The tensors of one run of the kernels, and a reader of the quantizers' tiles, independent of the kernels' code: it
brings them into logical order by the comments of tile/layout.cuh."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sage_aot._launch.plan import Plan

BITS = {"int8": 8, "int4": 4, "nvfp4": 4}
"""Bits of an element of the quantized Q and K."""

BITS_OF_V = {"f16": 16, "e4m3": 8, "nvfp4": 4}


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

    scales = spec.headdim // 16 if spec.qk == "nvfp4" else 0  # bytes of a row, behind all rows
    row_bytes = spec.headdim * BITS[spec.qk] // 8
    k_bytes = tile.block_n * (row_bytes + scales)
    v_bytes = tile.block_n * (spec.headdim * BITS_OF_V[spec.pv] // 8 + scales)
    q = buffer("q_hat", *q_heads, layout.q_tiles, tile.block_m * (row_bytes + scales))
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
        "q": _read_rows(q, tile.block_m, spec.qk, row_bytes).flatten(2, 3),
        "k": _read_rows(k, tile.block_n, spec.qk, row_bytes).flatten(2, 3),
        "v": v_hat,
        "q_scale": q_scale[..., rows % quant.fact("row_groups")].flatten(2),
        "k_scale": k_scale.abs()[..., keys % 8 // 2].flatten(2),
        "v_scale": buffer("v_scale", *of_channels, dtype=torch.float32),
        "k_mean": buffer("k_mean", *of_channels, dtype=torch.float32),
        "k_factor": buffer("k_factor", *of_channels, dtype=torch.float32),
        "q_unit": buffer("q_unit", *of_channels[:2], 1, dtype=torch.float32),
        "v_mean": buffer("v_mean", *of_channels, dtype=torch.float32),
        "v_factor": v_factor[..., 0].abs(),
        "k_spoilt": k_spoilt.flatten(2),
        "v_spoilt": (v_hat == 0) & v_hat.signbit() & channels.repeat_interleave(tile.block_n, 2),
        "row_bias": buffer("row_bias", *q_heads, layout.q_tiles * tile.block_m, dtype=torch.float32),
    }


def _read_rows(tiles: torch.Tensor, rows: int, qk: str, row_bytes: int) -> torch.Tensor:
    """Rows of tiles of Q or K: [..., rows, headdim]."""
    elements, scales = tiles[..., : rows * row_bytes], tiles[..., rows * row_bytes:]
    elements = _rows(elements, rows, row_bytes)
    if qk != "nvfp4":
        return _integers(elements, qk)
    return _e2m1(elements) * _e4m3(scales).unflatten(-1, (rows, -1)).repeat_interleave(16, -1)


def _e2m1(data: torch.Tensor) -> torch.Tensor:
    """Values of bytes that hold two e2m1 each, the first in the lower half; minus zero stays."""
    halves = torch.stack([data & 15, data >> 4], -1).flatten(-2).long()
    numbers = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    return torch.cat([numbers, -numbers])[halves]


def _e4m3(data: torch.Tensor) -> torch.Tensor:
    return data.contiguous().view(torch.float8_e4m3fn).float()


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
    row_bytes = block_n * BITS_OF_V[spec.pv] // 8
    rows = _rows(v[..., : spec.headdim * row_bytes], spec.headdim, row_bytes)
    if spec.pv == "e4m3":
        columns = _e4m3(rows)  # [..., headdim, block_n]
    else:  # scales [block_n / 64][headdim][4]
        scales = _e4m3(v[..., spec.headdim * row_bytes:]).unflatten(-1, (block_n // 64, spec.headdim, 4))
        columns = _e2m1(rows) * scales.transpose(-3, -2).flatten(-2).repeat_interleave(16, -1)
    by_key = torch.empty_like(columns)
    by_key[..., _key_of_column(block_n, 8 if spec.pv == "nvfp4" else 4)] = columns
    return by_key.transpose(3, 4).flatten(2, 3)


def _key_of_column(block_n: int, run: int) -> torch.Tensor:
    """The key of each column of the P operand: in each 4 · `run` columns, column run · t + e holds key 8·(e div 2) + 2t
    + e mod 2."""
    column = torch.arange(block_n)
    first, t, e = column // (4 * run) * (4 * run), column // run % 4, column % run
    return first + 8 * (e // 2) + 2 * t + e % 2


def _rows(tiles: torch.Tensor, rows: int, row_bytes: int) -> torch.Tensor:
    """[..., rows * row_bytes] swizzled bytes, in panels of at most 128 bytes a row, to [..., rows, row_bytes]."""
    pitch = min(128, row_bytes)
    panels = tiles.reshape(*tiles.shape[:-1], row_bytes // pitch, rows, pitch // 16, 16)
    row, chunk = torch.arange(rows)[:, None], torch.arange(pitch // 16)
    xor = row // (128 // pitch) % (pitch // 16)
    return panels[..., row, chunk ^ xor, :].flatten(-2).transpose(-3, -2).flatten(-2)
