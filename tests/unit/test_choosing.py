"""Selections of blocks of keys and calls that make them, on emulated kernels: what the caller is promised."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(1, str(Path(__file__).parents[1] / "gpu"))

from selection_checks import CASES, Selection, check, drawn, failures, of_headdim

import sage_aot
from sage_aot import ArgumentError, Sparse
from sage_aot._call import selection
from sage_aot._problem.options import OPTIONS
from sage_aot._tools import reference
from sage_aot.sparse import near_and_first, pool_blocks, radial_bands, select_blocks, sliding_tiles, tile_order

KEEP = Sparse(keep=0.4, block_size=64)


def qkv(queries=300, keys=460, heads=4, kv_heads=2, headdim=64, dtype=torch.float32, layout="HND", seed=0):
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(2, own, rows, headdim, generator=generator).to(dtype)
            for own, rows in ((heads, queries), (kv_heads, keys), (kv_heads, keys))]
    return [x.transpose(1, 2).contiguous() for x in made] if layout == "NHD" else made


def of_constant_blocks(size=128, **sizes):
    """q, and k and v whose blocks have one row each, repeated."""
    q, k, v = qkv(**sizes)
    k, v = (x[:, :, ::size].repeat_interleave(size, 2)[:, :, : x.shape[2]] for x in (k, v))
    return q, k, v


# --- the choice -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("headdim", "name"), [(headdim, name) for headdim in (64, 128, 256) for name in CASES
                                               if headdim == 64 or name in ("keep", "causal tau", "floats")])
def test_a_selection_keeps_its_promises(headdim, name):
    assert check(of_headdim(CASES[name], headdim))[1] == []


@pytest.mark.parametrize("seed", range(40))
def test_a_drawn_selection_keeps_its_promises(seed):
    assert check(drawn(seed))[1] == [], drawn(seed)


@pytest.mark.parametrize(("seen", "expected"), [
    ({(5, 0): True, (5, 1): True, (5, 2): True, (5, 3): True}, "another number of blocks than asked for"),
    ({(0, 7): True}, "a block that lies behind all of the queries is seen"),
    ({"best": False, "worst": True}, "a block is seen instead of a better one"),
], ids=["more", "future", "worse"])
def test_the_oracle_finds_what_is_wrong(seen, expected):
    case = Selection(is_causal=True, queries=450, kv_heads=1, near=0, first=0)
    q, k = case.tensors()
    mask = select_blocks(q, k, **case.arguments).blocks
    assert failures(case, q, k, mask) == []
    scores = q[0, 0, 384:448].float().mean(0) @ torch.stack([block.float().mean(0) for block in k[0, 0].split(64)]).T
    places = {"best": (6, scores[:7].argmax().item()), "worst": (6, scores[:7].argmin().item())}
    for place, value in seen.items():
        mask[0, 0][places.get(place, place)] = value
    assert expected in failures(case, q, k, mask)


@pytest.mark.parametrize("by", ["keep", "mass", "tau"])
def test_a_number_for_each_head_is_that_heads_own(by):
    q, k, _ = qkv()
    amounts = [0.2, 0.5, 0.9, 0.4]
    together = select_blocks(q, k, **{by: amounts}, block_size=64).blocks
    assert torch.equal(together, select_blocks(q, k, **{by: torch.tensor(amounts)}, block_size=64).blocks)
    for head, amount in enumerate(amounts):
        assert torch.equal(together[:, head], select_blocks(q, k, **{by: amount}, block_size=64).blocks[:, head])


def test_layouts_and_what_was_pooled_before_choose_alike():
    q, k, v = qkv(layout="NHD")
    expected = select_blocks(q.transpose(1, 2), k.transpose(1, 2), keep=0.4, block_size=64).blocks
    assert torch.equal(select_blocks(q, k, keep=0.4, block_size=64, layout="NHD").blocks, expected)
    pooled = pool_blocks(k, 64, centre=True, layout="NHD")
    assert torch.equal(select_blocks(q, pooled, keep=0.4, block_size=64, layout="NHD").blocks, expected)
    kv = sage_aot.quantize_kv(k, v, layout="NHD", pool=64)
    assert torch.equal(select_blocks(q, kv, keep=0.4, block_size=64, layout="NHD").blocks, expected)


def test_means_are_means():
    _, k, _ = qkv(keys=300)
    pooled = pool_blocks(k, 128, centre=True, means=True)
    expected = torch.stack([k[:, :, rows].double().mean(2) for rows in (slice(0, 128), slice(128, 256),
                                                                        slice(256, 300))], 2)
    assert (pooled.means - expected).abs().max() < 1e-6
    assert pool_blocks(k, 128).means is None
    assert repr(pooled) == "PooledBlocks([2, 2, 300, 64] torch.float32 on cpu, blocks of 128)"


@pytest.mark.parametrize(("arguments", "message"), [
    ({}, "keep, mass, tau: expected one of them, got none"),
    ({"keep": 0.5, "tau": 1.0}, "expected one of them, got keep, tau"),
    ({"keep": 0}, "keep: expected a share, above 0 and at most 1, got 0"),
    ({"mass": 1.5}, "mass: expected a share, above 0 and at most 1, got 1.5"),
    ({"tau": math.inf}, "tau: expected a finite number, got inf"),
    ({"keep": "half"}, "keep: expected a number or one for each of 4 q heads, got 4|keep: expected a share"),
    ({"keep": True}, "keep: expected a share, above 0 and at most 1, got True"),
    ({"keep": [0.5, 0.5]}, "keep: expected a number or one for each of 4 q heads, got 2"),
    ({"keep": torch.full((4,), 0.5).double()}, r"keep: expected float32 \[4\] on cpu, got \(4,\) torch.float64"),
    ({"keep": 0.5, "block_size": 100}, "block_size: expected multiples of 64"),
    ({"keep": 0.5, "first": -1}, "first: expected a number of blocks, 0 or more, got -1"),
    ({"keep": 0.5, "near": 1.5}, "near: expected a number of blocks, 0 or more, got 1.5"),
    ({"keep": 0.5, "least_alike": 2}, "least_alike: expected a number from 0 to 1, got 2"),
    ({"keep": 0.5, "dense_keys": (1, 2, 3)}, r"dense_keys: expected how many first ones, or \(first, last\)"),
    ({"keep": 0.5, "dense_queries": -1}, r"dense_queries: expected how many first ones, or \(first, last\), got -1"),
    ({"keep": 0.5, "is_causal": 2}, "is_causal: expected True or False, got 2"),
    ({"keep": 0.5, "scale": "1"}, "scale: expected None or a finite number, got '1'"),
    ({"keep": 0.5, "layout": "NDH"}, "layout: expected one of 'HND', 'NHD', got 'NDH'"),
])
def test_a_wrong_argument_is_told(arguments, message):
    q, k, _ = qkv()
    with pytest.raises(ArgumentError, match=message):
        select_blocks(q, k, **arguments)


@pytest.mark.parametrize(("change", "message"), [
    (lambda q, k: (q[0], k), r"q: expected \[batch, heads, seq, headdim\]"),
    (lambda q, k: (q, k[0]), r"k: expected \[batch, heads, seq, headdim\]"),
    (lambda q, k: (q.double(), k), "q: expected .* float16, bfloat16 or float32, got .* torch.float64"),
    (lambda q, k: (q, k[:1]), "k: expected the batch, head dim and device of q"),
    (lambda q, k: (q[:, :3], k), "heads of which those of q are a multiple"),
    (lambda q, k: (q.mT.contiguous().mT, k), "q: expected a contiguous last dimension"),
    (lambda q, k: (q, "k"), "k: expected a torch.Tensor, got str"),
    (lambda q, k: (q, pool_blocks(k, 128)), "block_size: expected the 128 keys of a block that k was pooled with"),
    (lambda q, k: (q, sage_aot.quantize_kv(k, k)), r"make it by quantize_kv\(k, v, pool=...\)"),
])
def test_wrong_tensors_are_told(change, message):
    q, k, _ = qkv()
    with pytest.raises(ArgumentError, match=message):
        select_blocks(*change(q, k), keep=0.5, block_size=64)


def test_more_blocks_than_the_kernel_scores_are_told():
    q, k = torch.empty(1, 1, 64, 64), torch.empty(1, 1, 1, 64).expand(1, 1, 8193 * 64, 64)
    with pytest.raises(sage_aot.UnsupportedError, match="among 8193 blocks of keys: expected at most 8192; choose "
                                                        "among larger blocks"):
        select_blocks(q, k, keep=0.5, block_size=64)


# --- calls ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tail", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_wrong_option_of_a_call_that_chooses_is_told_as_of_any_call(name, tail):
    q, k, v = qkv()
    wrong, sparse = {name: OPTIONS[name].refused}, Sparse(keep=0.4, block_size=64, tail=tail)
    with pytest.raises(ArgumentError) as expected:
        sage_aot.attn(q, k, v, **wrong)
    with pytest.raises(ArgumentError) as found:
        sage_aot.attn(q, k, v, sparse=sparse, **wrong)
    assert str(found.value) == str(expected.value) == sage_aot.supports(q, k, v, sparse=sparse, **wrong)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3, "smooth_v": True}, {"layout": "NHD"},
                                     {"return_lse": True, "is_causal": True}], ids=str)
def test_a_call_that_chooses_is_the_call_with_the_blocks_that_it_chose(options):
    q, k, v = qkv(layout=options.get("layout", "HND"))
    chosen = {name: options[name] for name in ("is_causal", "scale", "layout") if name in options}
    blocks = KEEP.select(q, k, **chosen)
    found, expected = (sage_aot.attn(q, k, v, **how, **options) for how in ({"sparse": KEEP}, {"block_mask": blocks}))
    found, expected = (x if isinstance(x, tuple) else (x,) for x in (found, expected))
    assert all(torch.equal(one, other) for one, other in zip(found, expected))


def test_a_call_that_chooses_writes_to_out_and_takes_sinks_a_key_mask_and_quantized_keys():
    q, k, v = qkv()
    out = torch.full_like(q, math.nan)
    assert sage_aot.attn(q, k, v, sparse=KEEP, out=out) is out
    assert torch.equal(out, sage_aot.attn(q, k, v, sparse=KEEP))
    masks = {"sinks": torch.randn(4), "key_mask": torch.arange(460).expand(2, -1) < 400}
    of_shown = torch.cat([k[:, :, :400], k[:, :, 399:400].expand(-1, -1, 60, -1)], 2)
    assert torch.equal(sage_aot.attn(q, k, v, sparse=KEEP, **masks),
                       sage_aot.attn(q, k, v, block_mask=KEEP.select(q, of_shown), **masks))
    kv = sage_aot.quantize_kv(k, v, pool=64)
    assert torch.equal(sage_aot.attn(q, kv, sparse=KEEP), sage_aot.attn(q, k, v, sparse=KEEP))


@pytest.mark.parametrize("options", [{}, {"smooth_v": True}, {"smooth_q": True, "p": "exp2"}], ids=str)
@pytest.mark.parametrize(("layout", "is_causal"), [("HND", False), ("NHD", True)])
@pytest.mark.parametrize("arch", ["sm80", "sm89", "sm90"])
def test_a_tail_of_quantized_keys_is_that_of_the_tensors(arch, layout, is_causal, options, monkeypatch):
    monkeypatch.setenv("SAGE_AOT_EMULATE", arch)
    q, k, v = qkv(layout=layout)
    own = {"sparse": Sparse(keep=0.25, tail=True, block_size=64), "layout": layout, "is_causal": is_causal,
           "return_lse": True}
    kv = sage_aot.quantize_kv(k, v, layout=layout, pool=64, tail=True, **options)
    found, expected = sage_aot.attn(q, kv, **own), sage_aot.attn(q, k, v, **own, **options)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    assert sage_aot.supports(q, kv, **own) is None
    without = sage_aot.quantize_kv(k, v, layout=layout, pool=64, **options)
    blocks = 2 * 2 * 8 * 64  # batch, kv heads, blocks of keys, channels
    assert kv.nbytes - without.nbytes >= (4 + 4 + 1) * blocks  # means of keys and of values, and these in 8 bits
    in_flight: list[int] = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: in_flight.append(tensor.nbytes))
    kv.record_stream(None)
    assert sum(in_flight) == kv.nbytes


@pytest.mark.parametrize("sizes", [{}, {"queries": 512, "keys": 512}, {"queries": 90, "keys": 200}], ids=str)
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"layout": "NHD"}, {"scale": 0.3},
                                     {"sinks": torch.linspace(-1, 4, 4)}], ids=str)
def test_the_tail_is_exact_where_blocks_are_constant(options, sizes):
    q, k, v = of_constant_blocks(**sizes)
    options = dict(options)
    if options.get("layout") == "NHD":
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    sparse = Sparse(keep=0.2, tail=True, first=0)
    out, lse = sage_aot.attn(q, k, v, sparse=sparse, return_lse=True, **options)
    exact, exact_lse = sage_aot.attn(q, k, v, return_lse=True, **options)
    assert reference.measure(out, exact).relative_l1 < 0.035
    finite = exact_lse.isfinite()
    assert torch.equal(finite, lse.isfinite())
    assert (lse - exact_lse)[finite].abs().max() < 0.06
    written = torch.full_like(q, math.nan)
    assert sage_aot.attn(q, k, v, sparse=sparse, out=written, **options) is written
    assert torch.equal(written, out)


def test_why_a_tail_cannot_be_written_is_told_by_torch():
    q, k, v = qkv()
    with torch.inference_mode():
        out = torch.empty_like(q)
    with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
        sage_aot.attn(q, k, v, sparse=Sparse(keep=0.25, tail=True, block_size=64), out=out)


def test_a_tail_may_be_written_to_q():
    q, k, v = qkv()
    sparse = Sparse(keep=0.25, tail=True, block_size=64)
    expected = sage_aot.attn(q, k, v, sparse=sparse)
    assert torch.equal(sage_aot.attn(q, k, v, sparse=sparse, out=q), expected)


@pytest.mark.parametrize("tail", [False, True])
def test_autocast_decides_the_dtype(tail):
    q, k, v = qkv()
    sparse = Sparse(keep=0.4, tail=tail, block_size=64)
    with torch.autocast("cpu", torch.bfloat16):
        out = sage_aot.attn(q, k, v, sparse=sparse)
    assert out.dtype == torch.bfloat16
    assert reference.measure(out, sage_aot.attn(q, k, v, sparse=sparse)).relative_l1 < 0.04


@pytest.mark.parametrize("tail", [False, True])
@pytest.mark.parametrize(("arguments", "message"), [
    ({"return_lse": "no"}, "return_lse: expected True or False, got"),
    ({"return_lse": None}, "return_lse: expected True or False, got"),
    ({"return_lse": torch.zeros(2)}, "return_lse: expected True or False, got"),
    ({"out": torch.zeros(1)}, "out: expected shape, dtype and device of q"),
    ({"out": "no"}, "out: expected "),
    ({"out": torch.zeros(2, 4, 300, 64, requires_grad=True)}, "out requires grad"),
    ({"out": torch.zeros(2, 4, 300, 64, requires_grad=True) * 1}, "out requires grad")])
def test_where_to_write_and_what_to_return_are_checked_as_of_any_call(tail, arguments, message):
    q, k, v = qkv()
    with pytest.raises(ArgumentError) as of_any:
        sage_aot.attn(q, k, v, **arguments)
    with pytest.raises(ArgumentError, match=message) as found:
        sage_aot.attn(q, k, v, sparse=Sparse(keep=0.5, tail=tail), **arguments)
    assert str(found.value) == str(of_any.value)


@pytest.mark.parametrize("mapped", ["q", "k", "v", "kv", "qv", "qkv"])
@pytest.mark.parametrize("keys", [256, 300])
@pytest.mark.parametrize("tail", [False, True])
def test_calls_that_vmap_maps(tail, keys, mapped):
    """Rows of fewer queries than a block has are calls of their own, in which a sum may have another order."""
    given = [torch.stack([one, other]) for one, other in zip(qkv(keys, keys), qkv(keys, keys, seed=1))]
    sparse, dims = Sparse(keep=0.5, tail=tail), [0 if name in mapped else None for name in "qkv"]
    tensors = [x if dim == 0 else x[0] for x, dim in zip(given, dims)]
    found = torch.vmap(lambda *own: sage_aot.attn(*own, sparse=sparse), in_dims=tuple(dims))(*tensors)
    for i in range(2):
        alone = sage_aot.attn(*(x[i] if dim == 0 else x for x, dim in zip(tensors, dims)), sparse=sparse)
        torch.testing.assert_close(found[i], alone, rtol=0, atol=1e-6)


@pytest.mark.parametrize("tail", [False, True])
def test_what_is_written_within_a_transformation(tail):
    q, k, v = qkv()
    sparse = Sparse(keep=0.5, tail=tail)
    with pytest.raises(ArgumentError, match="out: expected a tensor that vmap maps"):
        torch.vmap(lambda x: sage_aot.attn(x, k, v, sparse=sparse, out=q))(torch.stack([q, q]))
    with pytest.raises(ArgumentError, match="out is differentiated by forward AD or torch.func"):
        torch.func.grad(lambda x: sage_aot.attn(q, k, v, sparse=sparse, out=x * 1).sum())(q)
    stacked = torch.zeros(2, *q.shape)
    torch.vmap(lambda x, out: sage_aot.attn(x, k, v, sparse=sparse, out=out))(torch.stack([q, q]), stacked)
    assert torch.equal(stacked[1], sage_aot.attn(q, k, v, sparse=sparse))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_a_choice_does_not_depend_on_the_default_dtype(dtype, default_dtype):
    q, k, _ = qkv(640, 640)
    expected = [select_blocks(q, k, keep=keep, block_size=64, near=0, first=0).blocks for keep in (0.1, 0.3, 0.7)]
    default_dtype(dtype)
    for keep, blocks in zip((0.1, 0.3, 0.7), expected):
        assert torch.equal(select_blocks(q, k, keep=keep, block_size=64, near=0, first=0).blocks, blocks)


def test_a_call_without_heads_chooses_nothing():
    q = torch.randn(1, 0, 70, 16)
    assert sage_aot.attn(q, q, q, sparse=KEEP).shape == q.shape


def test_a_tail_of_no_quantized_keys_is_zeros():
    q, k, v = qkv()
    kv = sage_aot.quantize_kv(k[:, :, :0], v[:, :, :0], pool=64, tail=True)
    out, lse = sage_aot.attn(q, kv, sparse=Sparse(keep=0.5, tail=True, block_size=64), return_lse=True)
    assert out.shape == q.shape and not out.any() and (lse == -math.inf).all()


def test_a_tail_of_no_entries_is_empty():
    q, k, v = (x[:0] for x in qkv())
    assert sage_aot.attn(q, k, v, sparse=Sparse(keep=0.4, tail=True)).shape == q.shape


def test_a_tail_weighs_less_wrong_than_none():
    q, k, v = qkv(1024, 1024)
    k = k + 2 * torch.randn(2, 2, 8, 64).repeat_interleave(128, 2)
    exact = sage_aot.attn(q, k, v)
    errors = [reference.measure(sage_aot.attn(q, k, v, sparse=Sparse(keep=0.25, tail=tail)), exact).relative_l1
              for tail in (False, True)]
    assert errors[1] < 0.7 * errors[0]


@pytest.mark.parametrize(("arguments", "message"), [
    ({"sparse": 0.5}, "sparse: expected a sage_aot.Sparse or None, got float"),
    ({"sparse": KEEP, "block_mask": sage_aot.block_mask(torch.ones(3, 4, dtype=torch.bool))},
     "block_mask: expected None with sparse"),
    ({"sparse": Sparse(keep=0.5, tail=True), "key_mask": torch.ones(2, 460, dtype=torch.bool)},
     "key_mask: expected None where the tail of blocks counts"),
    ({"sparse": Sparse(keep=0.5, tail=True), "window": (5, 5)}, "window: expected None where the tail"),
    ({"sparse": Sparse(keep=0.5, tail=True, near=0), "is_causal": True}, "near: expected 1 or more where the tail"),
])
def test_a_wrong_call_is_told_and_so_says_supports(arguments, message):
    q, k, v = qkv()
    with pytest.raises(ArgumentError, match=message):
        sage_aot.attn(q, k, v, **arguments)
    assert message in sage_aot.supports(q, k, v, **arguments)


@pytest.mark.parametrize("tail", [False, True])
def test_what_is_no_tensor_is_told(tail):
    q, k, v = qkv()
    sparse = Sparse(keep=0.5, tail=tail)
    for wrong, name in (((None, k, v), "q"), ((q, 5, v), "k"), ((q, k, None), "v")):
        with pytest.raises(ArgumentError, match=f"{name}: expected a "):
            sage_aot.attn(*wrong, sparse=sparse)


def test_supports_answers_for_calls_that_choose():
    q, k, v = qkv()
    assert sage_aot.supports(q, k, v, sparse=KEEP) is None
    assert "no kernel" in sage_aot.supports(q, k, v, sparse=KEEP, qk="int4")
    assert "in a call of attn_varlen" in sage_aot.supports(
        q[0], k[0], v[0], sparse=KEEP, cu_seqlens_q=torch.tensor([0, 1]), cu_seqlens_k=torch.tensor([0, 1]),
        max_seqlen_q=1, max_seqlen_k=1)
    assert "one for each of 4 q heads, got 1" in sage_aot.supports(q, k, v, sparse=Sparse(keep=(0.5,)))
    assert "got one without" in sage_aot.supports(q, sage_aot.quantize_kv(k, v), sparse=KEEP)
    kv = sage_aot.quantize_kv(k, v, pool=64)
    assert sage_aot.supports(q, kv, sparse=KEEP) is None
    with pytest.raises(ArgumentError, match=r"got one without; make it by quantize_kv\(k, v, pool=..., tail=True\)"):
        sage_aot.attn(q, kv, sparse=Sparse(keep=0.5, tail=True, block_size=64))
    kv, tail = sage_aot.quantize_kv(k, v, pool=64, tail=True), Sparse(keep=0.5, tail=True)
    message = "block_size: expected the 64 keys of a block that k was pooled with, got 128"
    assert message in sage_aot.supports(q, kv, sparse=tail)
    with pytest.raises(ArgumentError, match=message):
        sage_aot.attn(q, kv, sparse=tail)
    with pytest.raises(ArgumentError, match="v: expected None with a QuantizedKV"):
        sage_aot.attn(q, kv, v, sparse=Sparse(keep=0.5, tail=True, block_size=64))


@pytest.mark.parametrize(("fields", "message"), [
    ({}, "Sparse: expected one of keep, mass and tau, got none"),
    ({"keep": 0.5, "mass": 0.5}, "got keep, mass"), ({"keep": 2}, "keep: expected a share"),
    ({"keep": []}, "keep: expected a number, or one for each q head"), ({"keep": 0.5, "tail": 1}, "tail: expected"),
    ({"keep": 0.5, "block_size": 32}, "block_size"),
    ({"keep": 0.5, "block_size": 2**40}, "block_size: expected at most 1048576 queries and keys in a block, got 10995"),
    ({"keep": 0.5, "block_size": (64, 2**20 + 64)}, "block_size: expected at most 1048576"),
    ({"keep": 0.5, "near": -1}, "near"),
    ({"keep": torch.tensor([0.5])}, r"keep: expected a number, or one for each q head, got a tensor; pass its tolist"),
])
def test_a_wrong_setting_is_told_when_it_is_made(fields, message):
    with pytest.raises(ArgumentError, match=message):
        Sparse(**fields)


def test_settings_keep_pythons_numbers():
    share = torch.tensor(0.5)
    made = Sparse(keep=share, near=np.int64(2), dense_keys=(np.int32(3), torch.tensor(4)), least_alike=np.float32(0.5))
    share.fill_(5.0)
    assert made == Sparse(keep=0.5, near=2, dense_keys=(3, 4), least_alike=0.5) and hash(made) == hash(made)
    kinds = [type(x) for x in (made.keep, made.least_alike, made.near, *made.dense_keys)]
    assert kinds == [float, float, int, int, int]


def test_settings_are_values():
    assert Sparse(keep=[0.5, 0.25]) == Sparse(keep=(0.5, 0.25))
    assert hash(Sparse(keep=[0.5], dense_keys=[1, 2])) == hash(Sparse(keep=(0.5,), dense_keys=(1, 2)))


def test_a_derivative_is_refused():
    q, k, v = qkv()
    with pytest.raises(ArgumentError, match="no backward|gradient|derivative"):
        sage_aot.attn(q.requires_grad_(), k, v, sparse=KEEP)
    assert not select_blocks(q, k, keep=0.5).blocks.requires_grad


# --- tracers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tail", [False, True])
def test_one_graph_for_a_call_that_chooses(tail, monkeypatch):
    """Plain numbers are not asked for their types, which dynamo of torch 2.11 cannot look up."""
    monkeypatch.setattr(selection, "scalar_of", None)
    q, k, v = qkv(256, 256)
    sparse = Sparse(keep=0.4, tail=tail)
    compiled = torch.compile(lambda *tensors: sage_aot.attn(*tensors, sparse=sparse), backend="eager", fullgraph=True)
    assert torch.equal(compiled(q, k, v), sage_aot.attn(q, k, v, sparse=sparse))
    compiled = torch.compile(lambda q, k, v: sage_aot.attn(q, sage_aot.quantize_kv(k, v, pool=128, tail=tail),
                                                           sparse=sparse), backend="eager", fullgraph=True)
    assert torch.equal(compiled(q, k, v), sage_aot.attn(q, k, v, sparse=sparse))


def test_one_graph_for_settings_that_change():
    class Layer(torch.nn.Module):
        sparse = Sparse(keep=0.4)

        def forward(self, q, k, v):
            return sage_aot.attn(q, k, v, sparse=self.sparse)

    layer, (q, k, v) = Layer(), qkv(256, 256)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    for keep in (0.4, 0.7, 1.0):
        layer.sparse = Sparse(keep=keep)
        assert torch.equal(compiled(q, k, v), sage_aot.attn(q, k, v, sparse=layer.sparse))


def test_numbers_for_each_head_leave_nothing_of_a_tracer_behind():
    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return sage_aot.attn(q, k, v, sparse=Sparse(keep=(0.31, 0.32, 0.33, 0.34)))

    q, k, v = qkv(256, 256)
    expected = Model()(q, k, v)
    exported = torch.export.export(Model(), (q, k, v), strict=False)
    assert type(Model()(q, k, v)) is torch.Tensor
    assert torch.equal(Model()(q, k, v), expected) and torch.equal(exported.module()(q, k, v), expected)


@pytest.mark.parametrize("amounts", [torch.ones(4, dtype=torch.int64), torch.ones(3), torch.ones(4).double()])
def test_the_operator_itself_checks_what_a_kernel_reads_by_its_address(amounts):
    q, k, _ = qkv()
    pooled = [pool_blocks(x, 64)._data for x in (q, k)]
    with pytest.raises(ArgumentError, match=r"amounts: expected float32 \[4\] on cpu"):
        torch.ops.sage_aot.choose_blocks(*pooled, amounts, [], list(q.shape), list(k.shape), 64, 64, "keep", 0.0, False,
                                         0.1, 1, 1, 0.0, [0, 0], [0, 0])


def test_meta_tensors_have_masks_of_their_shape():
    q, k, _ = qkv()
    meta = select_blocks(q.to("meta"), k.to("meta"), keep=0.5).blocks
    assert meta.is_meta and meta.shape == select_blocks(q, k, keep=0.5).blocks.shape


def test_the_operators_pass_torchs_own_checks():
    q, k, _ = qkv()
    alone = "test_schema", "test_autograd_registration", "test_faketensor"  # what lies between its parts is nobody's
    torch.library.opcheck(torch.ops.sage_aot.pool_blocks.default, (k, 64, True, True), test_utils=alone)
    pooled = [pool_blocks(x, 64)._data for x in (q, k)]
    torch.library.opcheck(torch.ops.sage_aot.choose_blocks.default, (
        *pooled, None, [], list(q.shape), list(k.shape), 64, 64, "keep", 0.5, False, 0.1, 1, 1, 0.0, [0, 0], [0, 0]))


def test_no_queries_or_no_keys_choose_nothing():
    q, k, v = qkv()
    assert select_blocks(q[:, :, :0], k, keep=0.5).blocks.shape == (2, 4, 0, 8)
    assert sage_aot.attn(q, k[:, :, :0], v[:, :, :0], sparse=KEEP).eq(0).all()


# --- patterns ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("queries", "keys", "near", "first"), [(500, 500, 1, 1), (200, 700, 2, 0), (700, 200, 1, 1)])
def test_near_and_first_are_seen(queries, keys, near, first):
    seen = near_and_first(queries, keys, near=near, first=first, block_size=64).blocks[0, 0]
    for row in range(len(seen)):
        own = {(query + keys - queries) // 64 for query in range(64 * row, min(64 * row + 64, queries))}
        own = {place for place in own if place >= 0}
        expected = [column < first or any(abs(column - place) < near for place in own)
                    for column in range(-(-keys // 64))]
        assert seen[row].tolist() == expected, row


def test_tiles_are_neighbours_and_come_back():
    order, inverse = tile_order((4, 8, 16), (2, 4, 8))
    places = torch.arange(4 * 8 * 16).view(4, 8, 16)
    assert torch.equal(order[:64], places[:2, :4, :8].reshape(-1))
    assert torch.equal(order[64:128], places[:2, :4, 8:].reshape(-1))
    assert torch.equal(order[inverse], torch.arange(4 * 8 * 16))


@pytest.mark.parametrize(("tiles", "window"), [((3, 5, 4), (1, 3, 3)), ((2, 4, 6), (3, 2, 5)), ((1, 7, 1), (1, 4, 1))])
def test_windows_of_tiles_slide_and_stop_at_edges(tiles, window):
    size, tile = [count * edge for count, edge in zip(tiles, (1, 8, 8))], (1, 8, 8)
    seen = sliding_tiles(size, tile, window).blocks[0, 0]
    places = torch.cartesian_prod(*map(torch.arange, tiles)).view(-1, 3)
    for row, own in enumerate(places):
        columns = {tuple(place.tolist()) for place in places[seen[row]]}
        for axis, (count, width) in enumerate(zip(tiles, window)):
            of_axis = {place[axis] for place in columns}
            assert len(of_axis) == min(count, width) and own[axis].item() in of_axis
            assert max(of_axis) - min(of_axis) == len(of_axis) - 1
        assert len(columns) == math.prod(min(count, width) for count, width in zip(tiles, window))


@pytest.mark.parametrize(("frames", "tokens", "width", "first"), [(6, 100, 1.0, True), (3, 300, 0.5, False),
                                                                  (20, 30, 1.0, False)])
def test_bands_narrow_with_the_distance_of_frames(frames, tokens, width, first):
    seen = radial_bands(frames, tokens, width=width, first=first, block_size=64).blocks[0, 0]
    token = torch.arange(frames * tokens)
    frame, place = token // tokens, token % tokens
    distance = (frame[:, None] - frame).abs().clamp(min=1)
    band = width * tokens / 2.0 ** distance.double().log2().floor()
    exact = (distance == 1) | ((place[:, None] - place).abs() < band) | ((frame == 0) & first)
    blocks = -(-len(token) // 64)
    padded = torch.nn.functional.pad(exact, (0, blocks * 64 - len(token), 0, blocks * 64 - len(token)))
    assert torch.equal(seen, padded.view(blocks, 64, blocks, 64).any(3).any(1))


@pytest.mark.parametrize(("call", "message"), [
    (lambda: tile_order((4, 8, 16), (3, 4, 8)), r"tile: expected \(frames, height, width\) that divide"),
    (lambda: sliding_tiles((4, 8, 16), (2, 4, 8), (1, 3)), "window: expected"),
    (lambda: sliding_tiles((4, 8, 16), (2, 4, 8), 3), "window: expected .frames, height, width.*, got 3"),
    (lambda: sliding_tiles(4, (2, 4, 8), (1, 3, 3)), "size: expected .frames, height, width.*, got 4"),
    (lambda: radial_bands(4, 100, first="x"), "first: expected True or False, got 'x'"),
    (lambda: sliding_tiles((4, 8, 16), (1, 4, 8), (1, 3, 3)), r"tile: .* multiple of 64, got \(1, 4, 8\), 32"),
    (lambda: near_and_first(100, 100, near=0), "near: expected a positive integer, got 0"),
    (lambda: near_and_first(100, 100, near=1, first="a"), "first: expected a number of blocks"),
    (lambda: radial_bands(4, 100, width=math.nan), "width: expected a number above 0, got nan"),
    (lambda: pool_blocks(qkv()[1], (64, 128)), r"block_rows: .* a multiple of 64 .*, got \(64, 128\)"),
    (lambda: sage_aot.quantize_kv(*qkv()[1:], pool=100), "pool: expected the rows or keys .* 64 .*, got 100"),
    (lambda: sage_aot.quantize_kv(*qkv()[1:], tail=True), "tail: expected False without pool, got True"),
    (lambda: sage_aot.quantize_kv(*qkv()[1:], pool=64, tail=1), "tail: expected True or False, got 1"),
    (lambda: sage_aot.quantize_kv(*qkv()[1:], pool=64, key_mask=torch.ones(1, 1, dtype=torch.bool)),
     "pool: expected None with a key_mask"),
    (lambda: radial_bands(0, 100), "frames: expected a positive integer, got 0"),
])
def test_wrong_patterns_are_told(call, message):
    with pytest.raises(ArgumentError, match=message):
        call()
