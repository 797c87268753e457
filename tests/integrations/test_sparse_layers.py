"""Sparse calls of a host: by their shapes and masks, by a model's layers, and by a sampler's steps."""

from __future__ import annotations

import pytest
import torch
from blocks import BLOCK, clear
from exact import attention

from sage_aot import Sparse, attn, block_mask, quantize_kv
from sage_aot.errors import ArgumentError, UnsupportedError
from sage_aot.integrations import Policy, _serve, audit, report
from sage_aot.integrations._rules import HostCall, blocks_of
from sage_aot.integrations._serve import attend
from sage_aot.integrations._sparse import SharedSparse, Sparsely, Steps, spans_of_text, text_of_shares, with_dense

SPARSE = Sparse(keep=0.25)
Q, K, V = clear()


def never():
    raise AssertionError("the host's attention")


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("sparse", [SPARSE, Sparse(keep=(0.25, 0.5), dense_keys=(130, 10), dense_queries=(0, 200))])
@pytest.mark.parametrize("last", [BLOCK, 50])
def test_a_sparse_call_sees_the_blocks_that_it_chooses(last, sparse, layout):
    q, k, v = clear(layout=layout, last=last)
    found = attend(HostCall(q, k, v, layout=layout, blocks=sparse), never)
    expected, dense = (attention(q, k, v, layout=layout, sparse=each) for each in (sparse, None))
    assert (found - expected).norm() / expected.norm() < 0.06 < 0.3 < (dense - expected).norm() / expected.norm()
    assert report() == {"sage_aot": 1, "sage_aot, sparse": 1}


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_mask_of_keys_stays_with_the_choice(exact, is_causal):
    """HunyuanVideo so masks the tokens that its text was filled up with, behind the video."""
    mask = (torch.arange(Q.shape[2]) < Q.shape[2] - 60)[None, None, None]
    sparse = Sparse(keep=0.25, dense_keys=(0, 128))
    call = HostCall(Q, K, V, None if is_causal else mask, is_causal, blocks=sparse)
    found = attend(call, never)
    torch.testing.assert_close(found, attention(Q, K, V, attn_mask=call.mask, is_causal=is_causal, sparse=sparse))
    assert report() == {"sage_aot": 1, "sage_aot, sparse": 1}


def fewer(tensor, tokens):
    return tensor[:, :, :tokens]


MANY = Q.shape[2]
PADDING = torch.ones(1, 1, 1, MANY, dtype=torch.bool)


@pytest.mark.parametrize(("call", "is_sparse"), [
    (HostCall(Q, K, V), True),
    (HostCall(*(fewer(x, MANY - BLOCK + 1) for x in (Q, K, V))), True),
    (HostCall(*(fewer(x, MANY - BLOCK) for x in (Q, K, V))), False),
    (HostCall(fewer(Q, MANY - 1), K, V), False),
    (HostCall(Q, K, V, is_causal=True), True),
    (HostCall(Q, K, V, window=(64, 64)), False),
    (HostCall(Q, K, V, window=(MANY, MANY)), True),
    (HostCall(Q, K, V, PADDING), True),
    (HostCall(Q, K, V, torch.ones(MANY, MANY, dtype=torch.bool)), False),
], ids=["long", "16 blocks, the last short", "15 blocks", "another sequence", "causal", "window",
        "window that hides none", "mask of keys", "mask of queries"])
def test_long_calls_of_tokens_to_themselves_are_sparse(call, is_sparse):
    call = call._replace(blocks=SPARSE)
    assert (blocks_of(call) is SPARSE) == is_sparse
    assert blocks_of(call._replace(blocks=Sparse(keep=0.25, block_size=256))) is None, "8 blocks"


def test_the_tail_of_blocks_takes_no_mask():
    tail = Sparse(keep=0.25, tail=True)
    assert blocks_of(HostCall(Q, K, V, blocks=tail)) is tail
    assert blocks_of(HostCall(Q, K, V, PADDING, blocks=tail)) is None


def test_options_without_such_kernels_are_refused(monkeypatch):
    monkeypatch.setattr(_serve, "attn", lambda q, *_, **more: q)
    call, policy = HostCall(Q, K, V, blocks=SPARSE), Policy("possible", "raise", {"qk": "int4"})
    with pytest.raises(UnsupportedError, match="got: a choice of blocks, for which there is no kernel with the"):
        attend(call, never, policy=policy)
    attend(call._replace(q=fewer(Q, 10)), never, policy=policy)


def test_an_audit_has_the_error_of_the_choice():
    with audit() as calls:
        attend(HostCall(Q, K, V, blocks=SPARSE), lambda: attention(Q, K, V))
    assert calls[0].accuracy.relative_l1 > 0.3


def test_what_an_option_says_goes_in_front(monkeypatch):
    """A call has such an option where a model that is sparse already is tuned."""
    asked = []
    monkeypatch.setattr(_serve, "attn", lambda q, *_, **more: asked.append(more["sparse"]) or q)
    _serve.serve(HostCall(Q, K, V, blocks=SPARSE), False, {"sparse": Sparse(tau=1.0)})
    assert asked == [Sparse(tau=1.0)]


# --- layers -----------------------------------------------------------------------------------------------------------

NAMES = ["transformer_blocks.0.attn", "transformer_blocks.0.attn2", "transformer_blocks.1.attn", "single.0.attn",
         "single.1.attn"]


@pytest.mark.parametrize(("dense_layers", "left"), [
    (0, [0, 1, 2, 3, 4]), (1, [2, 3, 4]), ((1, 1), [2, 3]), ((0, 2), [0, 1, 2]), ((2, 3), []), (9, []), ((0, 9), [])])
def test_layers_are_counted_by_blocks(dense_layers, left):
    found = Sparsely(SPARSE, dense_layers).of_layers(NAMES)
    assert found == {NAMES[index]: SPARSE for index in left} and list(found) == [NAMES[index] for index in left]


def test_settings_by_name():
    by_name = {NAMES[0]: SPARSE, NAMES[3]: Sparse(tau=0.5), NAMES[4]: SPARSE}
    sparsely = Sparsely(by_name, (0, 1))
    sparsely.check_names(NAMES)
    assert sparsely.of_layers(NAMES) == {NAMES[0]: SPARSE, NAMES[3]: Sparse(tau=0.5)}
    with pytest.raises(ArgumentError, match=r"sparse: expected names of attention modules .*, got 'single\.1\.attn'"):
        sparsely.check_names(NAMES[:4])


def test_text_is_dense_in_addition_to_what_is_dense_already():
    made = Sparsely(Sparse(keep=0.5, dense_keys=300, dense_queries=(0, 7)), text_tokens=(77, 20)).with_text(
        Sparse(keep=0.5, dense_keys=300, dense_queries=(0, 7)))
    assert made == Sparse(keep=0.5, dense_keys=(300, 20), dense_queries=(77, 20))


@pytest.mark.parametrize("text", [(0, 0), (5, 0), (0, 3), (7, 2), (20, 9)])
@pytest.mark.parametrize("shares", [1, 2, 3])
def test_the_text_of_shares(text, shares):
    """Text lies where torch puts it that splits what is text, and what is not, of 20 tokens."""
    first = min(text[0], 20)
    last = min(text[1], 20 - first)
    parts = [torch.full((count,), is_text).tensor_split(shares)
             for count, is_text in ((first, True), (20 - first - last, False), (last, True))]
    whole = torch.cat([part[index] for index in range(shares) for part in parts])
    found = text_of_shares(text, 20, shares)
    assert [tokens for tokens, *_ in found] == [sum(map(len, each)) for each in zip(*parts)]
    spans = spans_of_text(found)
    tokens = torch.arange(20)
    assert torch.equal(sum(((begin <= tokens) & (tokens < end) for begin, end in spans), torch.zeros(20).bool()), whole)
    assert all(begin < end for begin, end in spans)


@pytest.mark.parametrize("is_stored", [False, True])
def test_text_is_dense_where_other_blocks_count_by_their_means(is_stored):
    """The last block, which has fewer keys, is seen as well."""
    q, k, v = clear(last=50)
    sparse = SharedSparse.of(Sparse(keep=0.1, tail=True, first=0), ((130, 140), (700, 701)))
    keys = (quantize_kv(k, v, pool=BLOCK, tail=True),) if is_stored else (k, v)
    blocks = with_dense(Sparse(keep=0.1, tail=True, first=0).select(q, k), sparse.text, sparse.text)
    assert torch.equal(sparse.select(q, k).blocks, blocks.blocks)
    assert blocks.blocks[:, :, [2, 10]].all() and blocks.blocks[..., [2, 10, -1]].all()
    exact = attn(q, k, v)
    error, without = ((attn(q, *keys, sparse=each) - exact)[:, :, 128:256].abs().mean()
                      for each in (sparse, Sparse(keep=0.1, tail=True, first=0)))
    assert error < without / 2


def test_spans_take_the_blocks_that_they_touch():
    mask = block_mask(torch.zeros(1, 1, 4, 3, dtype=torch.bool), (128, 192))
    found = with_dense(mask, [(127, 129)], [(384, 385)])
    expected = torch.zeros(4, 3, dtype=torch.bool)
    expected[:2] = expected[:, 2] = True
    assert torch.equal(found.blocks[0, 0, ::2, ::3], expected)
    assert torch.equal(found.blocks[0, 0], expected.repeat_interleave(2, 0).repeat_interleave(3, 1))
    assert not mask.blocks.any() and found.block_size == (128, 192)
    assert torch.equal(with_dense(mask, [(0, 128)], []).blocks[0, 0, ::2, 0], torch.tensor([True, False, False, False]))


@pytest.mark.parametrize(("wrong", "message"), [
    ({"sparse": 0.3}, "sparse: expected a sage_aot.Sparse, or a mapping .*, got 0.3"),
    ({"sparse": {"a": None}}, "sparse: expected a sage_aot.Sparse, or a mapping .*, got None"),
    ({"dense_layers": -1}, r"dense_layers: expected how many first ones, or \(first, last\), got -1"),
    ({"dense_layers": (1, 2, 3)}, "dense_layers: .*, got "), ({"text_tokens": 1.5}, "text_tokens: .*, got 1.5"),
    ({"text_tokens": (True, 1)}, "text_tokens: .*, got ")])
def test_wrong_arguments(wrong, message):
    with pytest.raises(ArgumentError, match=message):
        Sparsely(**{"sparse": SPARSE, **wrong})


# --- steps ------------------------------------------------------------------------------------------------------------


def counted(levels, *arguments):
    steps = Steps(*arguments)
    return "".join("d" if steps.is_dense(level) else "s" for level in levels)


@pytest.mark.parametrize(("levels", "arguments", "dense"), [
    ([9, 7, 5, 3], (0,), "ssss"), ([9, 7, 5, 3], (2,), "ddss"), ([9, 7, 5, 3], ((1, 1), 4), "dssd"),
    ([9, 9, 7, 7, 5, 5], ((1, 1), 3), "ddssdd"),  # with guidance, two calls a step
    ([9, 7, 5, 9, 7, 5], (1,), "dssdss"), ([9, 7, 9, 7], (1,), "dsds"),  # another run, after the first or in it
    ([0, 1, 2, 0, 1, 2], ((1, 1), 3), "dsddsd"),  # levels that rise
    ([9, 7, 5, 0, 1, 2], (1,), "dsssds"),  # a run that rises after one that falls is known by its second level
    ([9, 7, 5, 3], ((0, 1), 2), "sddd"), ([4, 4], (1,), "dd"), ([], (1,), "")])
def test_steps_are_counted_by_levels(levels, arguments, dense):
    assert counted(levels, *arguments) == dense


@pytest.mark.parametrize(("arguments", "message"), [
    (((0, 1),), "steps: expected the number of steps .*, got None; pass num_inference_steps"),
    ((1, 0), "steps: .*, got 0"), ((1, 2.5), "steps: .*, got 2.5"), ((-1,), "dense_steps: .*, got -1")])
def test_wrong_steps(arguments, message):
    with pytest.raises(ArgumentError, match=message):
        Steps(*arguments)
