"""sage_aot.train_attn with a key mask, and train_attn_varlen, on CPU tensors: packed keys, and packed sequences."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

import sage_aot
import sage_aot._call.train as train_module
from sage_aot._backends.emulation.backend import EmulationBackend
from sage_aot._call import pipeline
from sage_aot._call.backends import default_library
from sage_aot._launch.backward import BackwardArguments, backward_launches, plan_backward
from sage_aot._launch.plan import Strides
from sage_aot._launch.structs import Tensor
from sage_aot._problem.check import check
from sage_aot._problem.given import Given, MaxSeqlens
from sage_aot._problem.options import Options, for_schema
from sage_aot._tools import reference
from sage_aot.errors import ArgumentError

pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning"),
              pytest.mark.filterwarnings("ignore::FutureWarning")]

CAUSAL = [False, True]
BATCH, HEADS, KV_HEADS = 3, 4, 2
LENGTHS = (70, 90), (0, 40), (33, 0), (1, 1), (130, 50), (66, 200)
"""Queries and keys of each sequence: none of either, fewer keys than queries, several tiles."""

BEHIND = 11
"""Rows behind the last sequence."""


@pytest.fixture
def poisoned(monkeypatch):
    """Tensors that a call makes hold NaN until they are written."""
    monkeypatch.setattr(train_module.torch, "empty_like", _filled(torch.empty_like))


def _filled(make):
    def filled(*arguments, **options):
        made = make(*arguments, **options)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    return filled


def random(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def draw_batch(queries=90, keys=170, headdim=64):
    """q, k, v and a gradient of the output, and a mask: of some keys, of all, of none."""
    shapes = [(BATCH, heads, rows, headdim)
              for heads, rows in ((HEADS, queries), (KV_HEADS, keys), (KV_HEADS, keys), (HEADS, queries))]
    mask = torch.rand(BATCH, keys, generator=torch.Generator().manual_seed(5)) < 0.6
    mask[1], mask[2] = True, False
    return [random(*shape, seed=i) for i, shape in enumerate(shapes)], mask


def draw_sequences(lengths=LENGTHS, headdim=64):
    """Tensors [tokens, heads, headdim] likewise, and what attn_varlen takes in addition to them."""
    queries, keys = (sum(x) + BEHIND for x in zip(*lengths))
    shapes = [(rows, heads, headdim)
              for heads, rows in ((HEADS, queries), (KV_HEADS, keys), (KV_HEADS, keys), (HEADS, queries))]
    begins = [torch.tensor([0, *x]).cumsum(0, dtype=torch.int32) for x in zip(*lengths)]
    longest = [max(x) for x in zip(*lengths)]
    return [random(*shape, seed=i) for i, shape in enumerate(shapes)], (*begins, *longest)


def trained(call, q, k, v, grad, *packing, **options):
    """The output and the gradients."""
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out = call(*leaves, *packing, **options)
    return out.detach(), *torch.autograd.grad(out, leaves, grad)


def exact(q, k, v, grad, seen):
    """The output and the gradients in float64, where `seen` [.., queries, keys] says which keys a query sees."""
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    of_heads = [x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in leaves[1:]]
    scores = (leaves[0] @ of_heads[0].mT * q.shape[-1]**-0.5).masked_fill(~seen, -torch.inf)
    weights = scores.softmax(-1).where(seen.any(-1, keepdim=True), 0.0)  # of a row that sees nothing
    out = weights @ of_heads[1]
    return out.detach(), *torch.autograd.grad(out, leaves, grad.double())


def seen_keys(queries, keys, is_causal, mask=None):
    i, j = torch.arange(queries)[:, None], torch.arange(keys)
    seen = j <= i + keys - queries if is_causal else torch.ones(queries, keys, dtype=torch.bool)
    return seen if mask is None else seen & mask[:, None, None]


# --- a key mask -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("headdim", [64, 100])
@pytest.mark.parametrize("is_causal", CAUSAL)
def test_masked_gradients_are_close_to_those_of_float64(poisoned, is_causal, headdim):
    tensors, mask = draw_batch(headdim=headdim)
    found = trained(sage_aot.train_attn, *tensors, key_mask=mask, is_causal=is_causal)
    expected = exact(*tensors, seen_keys(90, 170, is_causal, mask))
    for got, right in zip(found, expected):
        for entry in range(2):
            assert reference.relative_l2(got[entry], right[entry]) < 0.06
        assert (got[2] == 0).all()  # of no keys
    for gradient in found[2:]:
        assert (gradient.transpose(1, 2)[~mask] == 0).all()


def test_the_masked_output_is_that_of_attn():
    (q, k, v, grad), mask = draw_batch()
    for is_causal in CAUSAL:
        out = trained(sage_aot.train_attn, q, k, v, grad, key_mask=mask, is_causal=is_causal)[0]
        assert torch.equal(out, sage_aot.attn(q, k, v, key_mask=mask, is_causal=is_causal, p="exp2"))


def test_a_mask_is_a_call_without_the_hidden_keys():
    (q, k, v, grad), mask = draw_batch()
    found = trained(sage_aot.train_attn, q, k, v, grad, key_mask=mask)
    for entry in range(2):
        left, own = mask[entry], slice(entry, entry + 1)
        alone = trained(sage_aot.train_attn, q[own], k[own][:, :, left], v[own][:, :, left], grad[own])
        parts = found[0][own], found[1][own], found[2][own][:, :, left], found[3][own][:, :, left]
        assert all(map(torch.equal, parts, alone))


@pytest.mark.parametrize("is_causal", CAUSAL)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e30])
def test_nothing_depends_on_hidden_keys(poisoned, value, is_causal):
    (q, k, v, grad), mask = draw_batch()
    expected = trained(sage_aot.train_attn, q, k, v, grad, key_mask=mask, is_causal=is_causal)
    k, v = (x.clone().transpose(1, 2) for x in (k, v))
    k[~mask] = v[~mask] = value
    found = trained(sage_aot.train_attn, q, k.transpose(1, 2), v.transpose(1, 2), grad, key_mask=mask,
                    is_causal=is_causal)
    assert all(map(torch.equal, found, expected))


def test_masked_layouts_give_the_same_bits():
    tensors, mask = draw_batch()
    rows_first = [x.transpose(1, 2).contiguous() for x in tensors]
    found = trained(sage_aot.train_attn, *rows_first, key_mask=mask.t().contiguous().t(), layout="NHD")
    expected = trained(sage_aot.train_attn, *tensors, key_mask=mask)
    assert all(torch.equal(a.transpose(1, 2), b) for a, b in zip(found, expected))


# --- sequences --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("headdim", [64, 100])
@pytest.mark.parametrize("is_causal", CAUSAL)
def test_each_sequence_is_a_call_by_itself(poisoned, is_causal, headdim):
    tensors, packing = draw_sequences(headdim=headdim)
    found = trained(sage_aot.train_attn_varlen, *tensors, *packing, is_causal=is_causal)
    for (q, q_end), (k, k_end) in zip(*(pairwise(x.tolist()) for x in packing[:2])):
        rows, keys = slice(q, q_end), slice(k, k_end)
        own = [x[part].transpose(0, 1)[None] for x, part in zip(tensors, (rows, keys, keys, rows))]
        alone = trained(sage_aot.train_attn, *own, is_causal=is_causal)
        for got, right, part in zip(found, alone, (rows, rows, keys, keys)):
            assert torch.equal(got[part].transpose(0, 1)[None], right)
    assert all((x[-BEHIND:] == 0).all() for x in found)


@pytest.mark.parametrize("is_causal", CAUSAL)
def test_gradients_of_sequences_are_close_to_those_of_float64(is_causal):
    tensors, packing = draw_sequences(((100, 120), (140, 70)))
    found = trained(sage_aot.train_attn_varlen, *tensors, *packing, is_causal=is_causal)
    for (q, q_end), (k, k_end) in zip(*(pairwise(x.tolist()) for x in packing[:2])):
        rows, keys = slice(q, q_end), slice(k, k_end)
        own = [x[part].transpose(0, 1)[None] for x, part in zip(tensors, (rows, keys, keys, rows))]
        expected = exact(*own, seen_keys(q_end - q, k_end - k, is_causal))
        for got, right, part in zip(found, expected, (rows, rows, keys, keys)):
            assert reference.relative_l2(got[part].transpose(0, 1)[None], right) < 0.06


def test_a_sequence_is_cut_where_it_is_longer_than_the_longest(poisoned):
    tensors, (begins_q, begins_k, *_) = draw_sequences(((70, 90),))
    found = trained(sage_aot.train_attn_varlen, *tensors, begins_q, begins_k, 40, 60, is_causal=True)
    own = [x[:rows].transpose(0, 1)[None] for x, rows in zip(tensors, (40, 60, 60, 40))]
    alone = trained(sage_aot.train_attn, *own, is_causal=True)
    for got, right, rows in zip(found, alone, (40, 40, 60, 60)):
        assert torch.equal(got[:rows].transpose(0, 1)[None], right) and (got[rows:] == 0).all()


@pytest.mark.parametrize("longest", [(0, 90), (70, 0)])
def test_sequences_of_nothing(poisoned, longest):
    tensors, (begins_q, begins_k, *_) = draw_sequences(((70, 90),))
    assert all((x == 0).all() for x in trained(sage_aot.train_attn_varlen, *tensors, begins_q, begins_k, *longest))


# --- the operators ----------------------------------------------------------------------------------------------------


def options(**changes):
    return for_schema(*vars(Options(**changes)).values())


def test_opcheck_of_a_mask():
    (q, k, v, grad), mask = draw_batch(40, 70)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    torch.library.opcheck(torch.ops.sage_aot.train_attn.default, (*leaves, mask, *options()))
    with torch.no_grad():
        made = torch.ops.sage_aot.train_attn(*leaves, mask)
    torch.library.opcheck(torch.ops.sage_aot.train_attn_backward.default, (grad, v.detach(), *made, mask))


def test_opcheck_of_sequences():
    (q, k, v, grad), packing = draw_sequences(((30, 40), (20, 10)))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    torch.library.opcheck(torch.ops.sage_aot.train_attn_varlen.default, (*leaves, *packing, *options(is_causal=True)))
    with torch.no_grad():
        made = torch.ops.sage_aot.train_attn_varlen(*leaves, *packing)
    torch.library.opcheck(torch.ops.sage_aot.train_attn_varlen_backward.default, (grad, v.detach(), *made, *packing))


def packed_calls():
    """Both public calls with their tensors, and what they take in addition to these."""
    (q, k, v, grad), mask = draw_batch(40, 70)
    sequences, packing = draw_sequences(((30, 40), (20, 10)))
    return {"mask": ((q, k, v, grad), lambda q, k, v: sage_aot.train_attn(q, k, v, key_mask=mask, is_causal=True)),
            "sequences": (sequences, lambda q, k, v: sage_aot.train_attn_varlen(q, k, v, *packing, is_causal=True))}


@pytest.mark.parametrize("name", ["mask", "sequences"])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_compiled_equals_eager(backend, name):
    torch.compiler.reset()
    tensors, call = packed_calls()[name]
    found = trained(torch.compile(call, backend=backend, fullgraph=True), *tensors)
    assert all(map(torch.equal, found, trained(call, *tensors)))
    torch.compiler.reset()


@pytest.mark.parametrize("name", ["mask", "sequences"])
def test_activation_checkpointing(name):
    from torch.utils.checkpoint import checkpoint

    tensors, call = packed_calls()[name]
    found = trained(lambda *leaves: checkpoint(call, *leaves, use_reentrant=False), *tensors)
    assert all(map(torch.equal, found, trained(call, *tensors)))


@pytest.mark.parametrize("name", ["mask", "sequences"])
def test_autocast(name):
    tensors, call = packed_calls()[name]
    leaves = [x.float().requires_grad_() for x in tensors[:3]]
    with torch.autocast("cpu", torch.bfloat16):
        out = call(*leaves)
    assert out.dtype == torch.bfloat16
    assert all(x.dtype == torch.float32 for x in torch.autograd.grad(out, leaves, tensors[3]))


def test_meta_tensors():
    (q, k, v, grad), packing = draw_sequences()
    on_meta = [x.to("meta") for x in (q, k, v, grad)]
    begins = [x.to("meta") for x in packing[:2]]
    assert [x.shape for x in trained(sage_aot.train_attn_varlen, *on_meta, *begins, *packing[2:])] == [
        x.shape for x in (q, q, k, v)]


def test_a_map_over_masks():
    tensors, mask = draw_batch(40, 70)
    masks = torch.stack([mask, ~mask])

    def both(q, k, v, mask):
        return trained_operators(q, k, v, mask, tensors[3])

    found = torch.vmap(both, (None, None, None, 0))(*tensors[:3], masks)
    for entry in range(2):
        expected = both(*tensors[:3], masks[entry])
        assert all(torch.equal(got[entry], right) for got, right in zip(found, expected))


def trained_operators(q, k, v, mask, grad):
    out, lse, saved = torch.ops.sage_aot.train_attn(q, k, v, mask)
    return out, *torch.ops.sage_aot.train_attn_backward(grad, v, out, lse, saved, mask)


@pytest.mark.parametrize(("name", "asked"), [("mask", "q"), ("mask", "k"), ("sequences", "q"), ("sequences", "v")])
def test_gradients_that_are_asked_for_alone(poisoned, name, asked):
    tensors, call = packed_calls()[name]
    leaves = [x.detach().requires_grad_(of in asked) for of, x in zip("qkv", tensors)]
    index = "qkv".index(asked)
    found, = torch.autograd.grad(call(*leaves), leaves[index], tensors[3])
    assert torch.equal(found, trained(call, *tensors)[1 + index])


# --- launches ---------------------------------------------------------------------------------------------------------


@pytest.mark.kernels("sm80")
@pytest.mark.parametrize("name", ["plain", "mask", "sequences"])
def test_packed_calls_have_entry_points_of_their_own(name):
    if name == "sequences":
        (q, k, v, _), (begins_q, begins_k, *longest) = draw_sequences()
        given = Given("train_varlen", q, k, v, cu_seqlens_q=begins_q, cu_seqlens_k=begins_k,
                      details=MaxSeqlens(*longest))
    else:
        (q, k, v, _), mask = draw_batch()
        given = Given("train", q, k, v, mask if name == "mask" else None)
    backend = EmulationBackend(default_library().manifest, "sm80")
    plan = plan_backward(pipeline.plan_of(backend, check(given, Options()), -1), backend.manifest)
    tensor = Tensor(("v", 0), *Strides(0, 64, 64))
    for launch in backward_launches(plan, BackwardArguments(*[tensor] * 6)):
        assert launch.entry == launch.record.spec.entry("bf16", packed=name != "plain")


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("change", "message"), [
    ({"key_mask": torch.ones(BATCH, 70)}, r"key_mask: expected torch\.bool, True where a key may be seen, got torch"),
    ({"key_mask": torch.ones(BATCH, 71, dtype=torch.bool)}, r"key_mask: expected shape \[batch, keys\], \(3, 70\), "),
    ({"key_mask": [True]}, "key_mask: expected a torch.Tensor or None, got list"),
    ({"window": (3, 0)}, r"window: expected None to train with, got \(3, 0\)"),
    ({"sinks": torch.zeros(HEADS)}, "sinks: expected None in a call of train_attn, got a tensor; there is no backward"),
    ({"attn_mask": torch.ones(1, dtype=torch.bool)}, "attn_mask: expected None in a call of train_attn, got a tensor"),
    ({"block_mask": torch.ones(1, dtype=torch.bool)}, "block_mask: expected None in a call of train_attn"),
    ({"dropout_p": 0.1}, "dropout_p: expected 0.0, got 0.1; there is no dropout"),
    ({"dropout_p": torch.zeros(2)}, r"dropout_p: expected 0.0, got tensor\(\[0., 0.\]\); there is no dropout")])
def test_what_has_no_backward_pass_is_refused(change, message):
    (q, k, v, _), _ = draw_batch(40, 70)
    with pytest.raises(ArgumentError, match=message):
        sage_aot.train_attn(q, k, v, **change)


def test_what_was_quantized_before_is_refused():
    (q, k, v, _), _ = draw_batch(40, 70)
    with pytest.raises(ArgumentError, match="k: expected a tensor, got a QuantizedKV, .*; pass the k and v that it"):
        sage_aot.train_attn(q, sage_aot.quantize_kv(k, v), None)


def test_padding_in_front_reaches_no_gradient():
    """Queries of padding see no key. Their dO, whatever its size, has no part in the gradients of others."""
    (q, k, v, grad), mask = draw_batch(90, 90)
    mask[:] = torch.arange(90) >= 35
    leaves = [x.requires_grad_() for x in (q, k, v)]
    found = []
    for size in (1.0, 1e4):
        grad[:, :, :35] *= size
        out = sage_aot.train_attn(*leaves, key_mask=mask, is_causal=True)
        found.append(torch.autograd.grad(out, leaves, grad))
    for first, second in zip(*found):
        assert torch.equal(first, second)


def test_what_asks_for_nothing_is_taken():
    (q, k, v, _), mask = draw_batch(40, 70)
    sage_aot.train_attn(q, k, v, dropout_p=None)
    found = sage_aot.train_attn(q, k, v, key_mask=mask, window=None, sinks=None, attn_mask=None, dropout_p=0.0)
    assert torch.equal(found, sage_aot.train_attn(q, k, v, key_mask=mask))


@pytest.mark.parametrize(("change", "error", "message"), [
    ({"key_mask": torch.ones(1)}, ArgumentError, "key_mask: expected None in a call of train_attn_varlen, got a"),
    ({"window": (3, 0)}, ArgumentError, "window: expected None to train with"),
    ({"layout": "NHD"}, TypeError, r"train_attn_varlen\(\) got an unexpected keyword argument 'layout'"),
    ({"qk": "int4"}, TypeError, r"train_attn_varlen\(\) got an unexpected keyword argument 'qk'")])
def test_what_sequences_do_not_take(change, error, message):
    (q, k, v, _), packing = draw_sequences()
    with pytest.raises(error, match=message):
        sage_aot.train_attn_varlen(q, k, v, *packing, **change)


def test_sequences_are_checked():
    (q, k, v, _), (begins_q, begins_k, *longest) = draw_sequences()
    with pytest.raises(ArgumentError, match="cu_seqlens_k: expected a contiguous torch.int32 tensor"):
        sage_aot.train_attn_varlen(q, k, v, begins_q, begins_k.long(), *longest)
    with pytest.raises(ArgumentError, match="expected three dimensions"):
        sage_aot.train_attn_varlen(q[None], k, v, begins_q, begins_k, *longest)
    with pytest.raises(ArgumentError, match="expected torch.float16 or torch.bfloat16 to train with"):
        sage_aot.train_attn_varlen(q.float(), k.float(), v.float(), begins_q, begins_k, *longest)


def test_a_log_sum_exp_of_other_tensors_is_refused():
    (q, k, v, grad), packing = draw_sequences()
    out, lse, saved = torch.ops.sage_aot.train_attn_varlen(q, k, v, *packing)
    with pytest.raises(ArgumentError, match=r"lse: expected what the forward pass.*call sage_aot\.train_attn_varlen"):
        torch.ops.sage_aot.train_attn_varlen_backward(grad, v, out, lse[:, 1:].contiguous(), saved, *packing)
