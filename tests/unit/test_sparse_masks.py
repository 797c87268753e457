"""Windows, sinks, boolean masks and masks of blocks: against float64, and against calls that say the same otherwise."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

import sage_aot
from sage_aot._call.masks import shown_alone

ARCHS = ("sm80", "sm89", "sm90")
QUERIES, KEYS = 300, 410


@pytest.fixture(params=ARCHS)
def arch(request, monkeypatch):
    monkeypatch.setenv("SAGE_AOT_EMULATE", request.param)
    return request.param


def draw(queries=QUERIES, keys=KEYS, heads=4, kv_heads=2, headdim=64, batch=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, heads, queries, headdim, generator=generator)
    k, v = torch.randn(2, batch, kv_heads, keys, headdim, generator=generator)
    return q, k, v


def exact(q, k, v, seen, sinks=None):
    k, v = (x.double().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q.double() @ k.mT / q.shape[-1] ** 0.5).masked_fill(~seen, -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(*scores.shape[:3], 1)], -1)
    weights = scores.softmax(-1).nan_to_num()[..., : k.shape[2]]
    return weights @ v, scores.logsumexp(-1)


def check(found, expected):
    (out, lse), (right, right_lse) = found, expected
    assert (out - right).abs().sum() <= 0.05 * right.abs().sum()
    assert (out[right.abs().sum(-1) == 0] == 0).all()
    assert torch.equal(lse.isinf(), right_lse.isinf())
    assert (lse - right_lse).nan_to_num(0.0, 0.0, 0.0).abs().max() < 0.1


def at():
    return torch.arange(QUERIES)[:, None] + KEYS - QUERIES, torch.arange(KEYS)


def blocks_of(share=0.5, rows=5, columns=7, seed=1, *batch_and_heads):
    return torch.rand(*batch_and_heads, rows, columns, generator=torch.Generator().manual_seed(seed)) < share


def elements(blocks, size):
    return blocks.repeat_interleave(size, -2).repeat_interleave(size, -1)[..., :QUERIES, :KEYS]


# --- windows ----------------------------------------------------------------------------------------------------------

WINDOWS = [(47, 20), (0, 0), (-1, 30), (100, -1), (200, 0), (1, 1), (500, 500)]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_a_window(arch, window, is_causal):
    q, k, v = draw()
    i, j = at()
    left, right = window
    seen = (j >= i - left if left >= 0 else j >= 0) & (j <= i + right if right >= 0 else j >= 0)
    seen = seen & (j <= i) if is_causal else seen
    check(sage_aot.attn(q, k, v, window=window, is_causal=is_causal, return_lse=True), exact(q, k, v, seen))


@pytest.mark.parametrize("queries", [1, 70, 600])
def test_a_window_of_other_lengths(arch, queries):
    q, k, v = draw(queries, 130)
    i, j = torch.arange(queries)[:, None] + 130 - queries, torch.arange(130)
    check(sage_aot.attn(q, k, v, window=(40, 3), return_lse=True),
          exact(q, k, v, (j >= i - 40) & (j <= i + 3)))


def test_windows_that_hide_nothing_more_are_the_dense_call(arch):
    q, k, v = draw()
    full, causal = sage_aot.attn(q, k, v), sage_aot.attn(q, k, v, is_causal=True)
    for same in ({"window": (-1, -1)}, {"window": None}, {"window": [-1, -1]}):
        assert torch.equal(sage_aot.attn(q, k, v, **same), full)
    for same in ({"window": (-1, 0)}, {"window": (-1, 5), "is_causal": True}, {"window": (-1, -1), "is_causal": True}):
        assert torch.equal(sage_aot.attn(q, k, v, **same), causal)


def test_a_window_of_sequences_is_that_of_each(arch):
    q, k, v = draw(batch=1)
    lengths_q, lengths_k = (100, 1, 199), (150, 60, 200)
    begins = [torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32) for lengths in (lengths_q,
                                                                                                     lengths_k)]
    rows = [x[0].transpose(0, 1).contiguous() for x in (q, k, v)]
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    out = sage_aot.attn_varlen(*rows, *begins, 199, 200, window=(50, 0), sinks=sinks)
    for b in range(3):
        of_q, of_k = (slice(begin[b], begin[b + 1]) for begin in begins)
        own = [x[rows][None].transpose(1, 2) for x, rows in zip(rows, (of_q, of_k, of_k))]
        expected = sage_aot.attn(*own, window=(50, 0), sinks=sinks)
        assert torch.equal(out[of_q], expected[0].transpose(0, 1))


@pytest.mark.parametrize("window", [(-2, 0), (1,), (1, 2, 3), (1.5, 2), ("1", 2), 5, "all", (2**31, 0), (True, 2)],
                         ids=str)
def test_windows_that_are_none(window):
    q, k, v = draw(20, 20)
    expected = "window: expected None, or (left, right): two integers"
    with pytest.raises(sage_aot.ArgumentError, match=re.escape(expected)):
        sage_aot.attn(q, k, v, window=window)


def test_a_window_of_floats_after_one_of_equal_ints():
    q, k, v = draw(20, 20)
    sage_aot.attn(q, k, v, window=(3, 0))
    with pytest.raises(sage_aot.ArgumentError, match="window: expected None, or"):
        sage_aot.attn(q, k, v, window=(3.0, 0))


def test_no_backward_pass_with_a_window():
    q, k, v = (x.bfloat16() for x in draw(20, 20))
    with pytest.raises(sage_aot.ArgumentError, match="window: expected None to train with"):
        torch.ops.sage_aot.train_attn(q, k, v, None, False, None, "HND", "auto", None, True, False, None, True, "auto",
                                      "auto", [3, 0])


# --- sinks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"window": (60, 0)}, {"smooth_v": True}], ids=str)
def test_sinks(arch, options):
    q, k, v = draw()
    sinks = torch.tensor([0.0, 5.0, -3.0, 80.0])
    i, j = at()
    seen = torch.ones(QUERIES, KEYS, dtype=torch.bool)
    if options.get("is_causal"):
        seen = j <= i
    if "window" in options:
        seen = (j <= i) & (j >= i - 60)
    check(sage_aot.attn(q, k, v, sinks=sinks, return_lse=True, **options), exact(q, k, v, seen, sinks))


def test_a_sink_is_the_log_sum_exp_of_a_row_that_sees_no_key(arch):
    q, k, v = draw(100, 30)
    sinks = torch.tensor([0.0, 5.0, -3.0, 80.0])
    out, lse = sage_aot.attn(q, k, v, sinks=sinks, is_causal=True, return_lse=True)
    assert (out[:, :, :70] == 0).all() and torch.allclose(lse[:, :, :70], sinks[:, None].expand(2, -1, 70))
    nothing = sage_aot.attn(q, k[:, :, :0], v[:, :, :0], sinks=sinks, return_lse=True)
    assert (nothing[0] == 0).all() and torch.equal(nothing[1], sinks[:, None].expand(2, -1, 100))


def test_one_query_of_grouped_heads_has_the_sink_of_its_head(arch):
    q, k, v = draw(1)
    sinks = torch.tensor([0.0, 5.0, -3.0, 80.0])
    check(sage_aot.attn(q, k, v, sinks=sinks, return_lse=True),
          exact(q, k, v, torch.ones(1, KEYS, dtype=torch.bool), sinks))


@pytest.mark.parametrize(("sinks", "says"), [
    (torch.zeros(3), "sinks: expected shape [q heads], (4,), got (3,)"),
    (torch.zeros(4).bfloat16(), "sinks: expected torch.float32"),
    ([0.0] * 4, "sinks: expected a torch.Tensor or None, got list")], ids=["shape", "dtype", "list"])
def test_sinks_that_are_none(sinks, says):
    with pytest.raises(sage_aot.ArgumentError, match=re.escape(says)):
        sage_aot.attn(*draw(20, 20), sinks=sinks)


# --- boolean masks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(QUERIES, KEYS), (2, 1, QUERIES, KEYS), (1, 4, QUERIES, KEYS), (2, 4, QUERIES, KEYS),
                                   (4, QUERIES, KEYS), (QUERIES, 1)], ids=str)
def test_a_boolean_mask_of_any_shape_that_broadcasts(arch, shape):
    q, k, v = draw()
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(3)) < 0.4
    check(sage_aot.attn(q, k, v, attn_mask=mask, return_lse=True),
          exact(q, k, v, mask.expand(2, 4, QUERIES, KEYS)))


def test_a_mask_of_keys_alone_is_a_key_mask(arch):
    q, k, v = draw()
    keys = torch.rand(2, KEYS, generator=torch.Generator().manual_seed(3)) < 0.4
    assert torch.equal(sage_aot.attn(q, k, v, attn_mask=keys[:, None, None]), sage_aot.attn(q, k, v, key_mask=keys))


def test_documents_and_every_other_mask_at_once(arch):
    q, k, v = draw()
    i, j = at()
    documents = torch.arange(QUERIES)[:, None] // 100 == j // 130
    keys = torch.rand(2, KEYS, generator=torch.Generator().manual_seed(3)) < 0.8
    blocks, sinks = blocks_of(0.7), torch.tensor([0.0, 2.0, -3.0, 9.0])
    found = sage_aot.attn(q, k, v, attn_mask=documents, key_mask=keys, block_mask=sage_aot.block_mask(blocks, 64),
                          window=(200, 100), sinks=sinks, return_lse=True)
    seen = documents & elements(blocks, 64) & (j >= i - 200) & (j <= i + 100) & keys[:, None, None]
    check(found, exact(q, k, v, seen.expand(2, 4, QUERIES, KEYS), sinks))


def test_what_is_not_finite_spoils_only_the_rows_that_see_it(arch):
    q, k, v = draw()
    k[0, 0, 200], v[1, 1, 77, 5] = math.nan, math.inf
    documents = torch.arange(QUERIES)[:, None] // 100 == torch.arange(KEYS) // 100
    out = sage_aot.attn(q, k, v, attn_mask=documents)
    assert out[0, :2, 200:].isnan().all() and out[1, 2:, :100, 5].isnan().all()
    assert out.isnan().sum() == 2 * 100 * 64 + 2 * 100


HIDING = {"attn_mask": {"attn_mask": at()[1] <= at()[0]},
          "block_mask": {"block_mask": sage_aot.block_mask(blocks_of(0.7), 64)},
          "sparse": {"sparse": sage_aot.Sparse(keep=0.5, block_size=64)}}


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize(("differing", "spelling"), [
    *((differing, "key_mask") for differing in HIDING), ("block_mask", "attn_mask"), ("sparse", "attn_mask")])
def test_nothing_depends_on_what_keys_hold_that_a_key_mask_hides(arch, differing, spelling, layout):
    """A call with such a mask keeps hidden keys: a huge one would take the bits of the others."""
    q, k, v = draw()
    keys = torch.rand(2, KEYS, generator=torch.Generator().manual_seed(3)) < 0.8
    found, mask = [], {"key_mask": keys} if spelling == "key_mask" else {"attn_mask": keys[:, None, None]}
    for value in (0.0, 1e4, 1e30, math.nan):
        tensors = [q, *(x.masked_fill(~keys[:, None, :, None], value) for x in (k, v))]
        if layout == "NHD":
            tensors = [x.transpose(1, 2) for x in tensors]
        before = [x.clone() for x in tensors]
        found.append(sage_aot.attn(*tensors, **mask, layout=layout, **HIDING[differing]))
        assert all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(tensors, before))
    assert all(torch.equal(out, found[0]) for out in found) and found[0].any()


@pytest.mark.parametrize("differing", ["attn_mask", "sparse"])
def test_a_key_mask_of_no_keys_goes_with_other_masks(differing):
    q, k, v = draw(70, 0)
    other = {"attn_mask": torch.ones(70, 0, dtype=torch.bool)} if differing == "attn_mask" else HIDING["sparse"]
    assert not sage_aot.attn(q, k, v, key_mask=torch.ones(2, 0, dtype=torch.bool), **other).any()


@pytest.mark.parametrize(("key_mask", "says"), [
    (torch.ones(2, KEYS), "key_mask: expected torch.bool"), (torch.ones(2, 7, dtype=torch.bool), "key_mask: expected"),
    ([True], "key_mask: expected")], ids=["dtype", "keys", "list"])
@pytest.mark.parametrize("differing", HIDING)
def test_key_masks_that_are_none_are_refused_with_other_masks_too(key_mask, says, differing):
    with pytest.raises(sage_aot.ArgumentError, match=re.escape(says)):
        sage_aot.attn(*draw(), key_mask=key_mask, **HIDING[differing])


def test_a_mask_without_dimensions_holds_for_every_score():
    q, k, v = draw(70, 80)
    assert torch.equal(sage_aot.attn(q, k, v, attn_mask=torch.tensor(True)), sage_aot.attn(q, k, v))
    assert not sage_aot.attn(q, k, v, attn_mask=torch.tensor(False)).any()


def test_four_bits_have_no_kernels_for_sparse_masks():
    said = sage_aot.supports(*draw(), qk="int4", sinks=torch.zeros(4))
    assert said and "a window, sinks, attn_mask or block_mask, qk='int4'" in said and "window=(" not in said


def test_explain_takes_the_masks_of_a_call(monkeypatch):
    monkeypatch.setenv("SAGE_AOT_EMULATE", "sm90")
    q, k, v = draw()
    of_queries = {"attn_mask": torch.ones(QUERIES, KEYS, dtype=torch.bool)}
    for masks in (of_queries, {"block_mask": sage_aot.block_mask(blocks_of(0.5, 3, 4))}):
        assert [record.spec.kind for record in sage_aot.explain(q, k, v, **masks).kernels.records].count("lists") == 1
    told = sage_aot.explain(q, k, v, attn_mask=torch.ones(2, 1, 1, KEYS, dtype=torch.bool))
    assert (told.kernels.attn.spec.mask, [record.spec.kind for record in told.kernels.records][0]) == ("full", "pack")


def test_a_bias_is_refused():
    q, k, v = draw(20, 20)
    expected = r"attn_mask: expected torch\.bool.*an additive bias has no kernel"
    with pytest.raises(sage_aot.ArgumentError, match=expected):
        sage_aot.attn(q, k, v, attn_mask=torch.zeros(20, 20))
    with pytest.raises(sage_aot.ArgumentError, match="attn_mask: expected a shape that broadcasts to"):
        sage_aot.attn(q, k, v, attn_mask=torch.ones(19, 20, dtype=torch.bool))


def test_quantized_k_and_v_take_masks_too(arch):
    q, k, v = draw()
    mask = torch.rand(2, 1, QUERIES, KEYS) < 0.5
    kv = sage_aot.quantize_kv(k, v)
    own = {"attn_mask": mask, "window": (200, 50), "sinks": torch.tensor([0.0, 2.0, -3.0, 9.0])}
    assert torch.equal(sage_aot.attn(q, kv, **own), sage_aot.attn(q, k, v, **own))
    masked = sage_aot.quantize_kv(k, v, key_mask=torch.ones(2, KEYS, dtype=torch.bool))
    with pytest.raises(sage_aot.ArgumentError, match="attn_mask: expected None with a QuantizedKV that has a key mask"):
        sage_aot.attn(q, masked, attn_mask=mask)


# --- masks of blocks --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [64, 128, 192])
@pytest.mark.parametrize("heads", [(), (1, 4), (2, 1), (2, 4)], ids=str)
def test_blocks(arch, size, heads):
    q, k, v = draw()
    blocks = blocks_of(0.5, -(-QUERIES // size), -(-KEYS // size), 1, *heads)
    check(sage_aot.attn(q, k, v, block_mask=sage_aot.block_mask(blocks, size), return_lse=True),
          exact(q, k, v, elements(blocks, size).expand(2, 4, QUERIES, KEYS)))


def test_a_list_of_all_blocks_has_the_bits_of_the_dense_call(arch):
    q, k, v = draw()
    every = sage_aot.block_mask(torch.ones(3, 4, dtype=torch.bool))
    assert torch.equal(sage_aot.attn(q, k, v, block_mask=every), sage_aot.attn(q, k, v))


def test_blocks_are_read_once_for_any_number_of_calls(arch):
    q, k, v = draw()
    blocks = blocks_of(0.5, 3, 4)
    mask = sage_aot.block_mask(blocks)
    first = sage_aot.attn(q, k, v, block_mask=mask)
    blocks[:] = False
    assert torch.equal(sage_aot.attn(q, k, v, block_mask=mask), first)


def test_a_block_mask_of_torch(arch):
    q, k, v = draw()

    def near_or_first(batch, head, query, key):
        return ((query - key).abs() <= 70) | (key < 5)

    made = create_block_mask(near_or_first, None, None, QUERIES, KEYS, device="cpu")
    seen = near_or_first(None, None, torch.arange(QUERIES)[:, None], torch.arange(KEYS))
    check(sage_aot.attn(q, k, v, block_mask=sage_aot.block_mask(made), return_lse=True),
          exact(q, k, v, seen.expand(2, 4, QUERIES, KEYS)))


def test_full_blocks_of_a_torch_block_mask_are_seen_whole(arch):
    """Full are, of four blocks, those off the diagonal, also the one behind it, which the mask_mod would hide."""
    ones, own, other = torch.ones(1, 1, 2, dtype=torch.int32), [[[[0, 1], [1, 0]]]], [[[[1, 0], [0, 1]]]]
    mask = BlockMask.from_kv_blocks(ones, torch.tensor(own, dtype=torch.int32), ones,
                                    torch.tensor(other, dtype=torch.int32), BLOCK_SIZE=128,
                                    mask_mod=lambda batch, head, query, key: query >= key)
    q, k, v = draw(256, 256)
    seen = torch.ones(256, 256, dtype=torch.bool)
    seen[:128, :128] = seen[128:, 128:] = torch.ones(128, 128, dtype=torch.bool).tril()
    check(sage_aot.attn(q, k, v, block_mask=sage_aot.block_mask(mask), return_lse=True),
          exact(q, k, v, seen.expand(2, 4, 256, 256)))


def test_a_block_mask_moves_to_another_device():
    made = create_block_mask(lambda batch, head, query, key: query >= key, None, None, 256, 256, device="cpu")
    for mask in (sage_aot.block_mask(blocks_of()), sage_aot.block_mask(made)):
        moved = mask.to("meta")
        assert (moved.device.type, moved.block_size) == ("meta", mask.block_size)
        assert (moved.elements is None) == (mask.elements is None)


@pytest.mark.parametrize(("make", "says"), [
    (lambda: sage_aot.block_mask(torch.ones(2, 2)), "mask: expected torch.bool, True where blocks are seen"),
    (lambda: sage_aot.block_mask(torch.ones(2, dtype=torch.bool)), "mask: expected [batch, q heads, query blocks"),
    (lambda: sage_aot.attn(*draw(), block_mask=sage_aot.block_mask(create_block_mask(
        lambda batch, head, query, key: query >= key, None, None, 384, 500, device="cpu"))),
     "block_mask: expected one of 300 queries and 410 keys, got one of 384 and 500"),
    (lambda: sage_aot.block_mask(torch.ones(2, 2, dtype=torch.bool), 100), "block_size: expected multiples of 64"),
    (lambda: sage_aot.block_mask([[True]]), "mask: expected a bool tensor of blocks or a torch BlockMask, got list"),
    (lambda: sage_aot.block_mask(sage_aot.block_mask(torch.ones(2, 2, dtype=torch.bool))),
     "got a sage_aot.BlockMask; pass it to attn as it is"),
    (lambda: sage_aot.attn(*draw(), block_mask=sage_aot.block_mask(torch.ones(2, 4, dtype=torch.bool))),
     "block_mask: expected blocks of (128, 128) for 300 queries and 410 keys, got 2 x 4 of them"),
    (lambda: sage_aot.attn(*draw(), block_mask=torch.ones(3, 4, dtype=torch.bool)),
     "block_mask: expected a sage_aot.BlockMask, got Tensor")],
    ids=["dtype", "dimensions", "torch's lengths", "size", "list", "ours", "lengths", "tensor"])
def test_blocks_that_are_none(make, says):
    with pytest.raises(sage_aot.ArgumentError, match=re.escape(says)):
        make()


def test_sequences_take_no_masks_of_queries():
    q, k, v = (x[0].transpose(0, 1) for x in draw(batch=1))
    begins = torch.tensor([0, 300], dtype=torch.int32), torch.tensor([0, 410], dtype=torch.int32)
    said = sage_aot.supports(q, k, v, cu_seqlens_q=begins[0], cu_seqlens_k=begins[1], max_seqlen_q=300,
                             max_seqlen_k=410, attn_mask=torch.ones(300, 410, dtype=torch.bool))
    assert said and said.startswith("attn_mask: expected None in a call of attn_varlen")
    said = sage_aot.supports(q, k, v, cu_seqlens_q=begins[0], cu_seqlens_k=begins[1], max_seqlen_q=300,
                             max_seqlen_k=410, block_mask=sage_aot.block_mask(blocks_of()))
    assert said and said.endswith("call attn for each sequence")


# --- torch ------------------------------------------------------------------------------------------------------------


def test_compiled_calls_have_the_bits_of_eager_ones():
    q, k, v = draw()
    mask, sinks = torch.rand(2, 1, QUERIES, KEYS) < 0.5, torch.tensor([0.0, 2.0, -3.0, 9.0])
    blocks = sage_aot.block_mask(blocks_of(0.5, 3, 4))

    def call(q, k, v):
        return sage_aot.attn(q, k, v, attn_mask=mask, block_mask=blocks, sinks=sinks, window=(200, 50))

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(q, k, v), call(q, k, v))


def test_a_compiled_window_may_follow_from_sizes():
    q, k, v = draw()

    def call(q, k, v, left):
        return sage_aot.attn(q, k, v, window=(left, k.shape[2] // 4))

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=True)
    for left in (5, 9, 60):
        assert torch.equal(compiled(q, k, v, left), call(q, k, v, left))


def test_mapped_sinks_are_those_of_each_entry():
    q, k, v = (x.expand(3, *x.shape) for x in draw(40, 60))
    sinks = torch.randn(3, 4)

    def call(q, k, v, sinks):
        return sage_aot.attn(q, k, v, sinks=sinks)

    mapped = torch.vmap(call)(q, k, v, sinks)
    assert all(torch.equal(mapped[b], call(q[b], k[b], v[b], sinks[b])) for b in range(3))


def test_masks_of_no_batch_entry():
    q, k, v = torch.randn(3, 0, 2, 3, 64)
    kv = sage_aot.quantize_kv(k, v)
    mask = torch.ones(3, 6, dtype=torch.bool)[:, ::2].expand(0, 2, 3, 3)
    assert sage_aot.supports(q, kv, attn_mask=mask) is None
    assert sage_aot.attn(q, kv, attn_mask=mask).shape == q.shape


@pytest.mark.parametrize("key_mask", [torch.ones(2, KEYS), torch.ones(2, KEYS + 1, dtype=torch.bool)],
                         ids=["f32", "keys"])
def test_another_key_mask_with_a_mask_of_keys_is_refused(key_mask):
    q, k, v = draw()
    with pytest.raises(sage_aot.ArgumentError, match="key_mask: expected"):
        sage_aot.attn(q, k, v, key_mask=key_mask, attn_mask=torch.ones(1, 1, 1, KEYS, dtype=torch.bool))


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("headdim, first", [(64, 0), (64, 1), (64, 4), (40, 0), (20, 0), (3, 0)])
def test_keys_that_stand_in_for_hidden_ones(layout, dtype, headdim, first):
    """Rows of whole words of 16 and of 8 bytes, and others, at even and odd addresses; in both orders of dimensions."""
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(2, 3, 50, headdim + first, generator=generator).to(dtype)
    k = wide[..., first:]
    v = k.transpose(1, 2).contiguous().transpose(1, 2) * 2
    shown = torch.rand(2, 50, generator=generator) < 0.6
    shown[1, :7] = False
    got = shown_alone(*(x if layout == "HND" else x.transpose(1, 2) for x in (k, v)), shown, layout)
    for x, found in zip((k, v), got if layout == "HND" else [y.transpose(1, 2) for y in got]):
        for batch, row in enumerate(shown.tolist()):
            before = row.index(True)
            for key, is_shown in enumerate(row):
                before = key if is_shown else before
                assert torch.equal(found[batch, :, key], x[batch, :, before])
