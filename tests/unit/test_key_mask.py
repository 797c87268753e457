"""key_mask: a call on the keys that the mask leaves, as a call on tensors of these keys alone."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch

import sage_aot
from sage_aot._backends.emulation.backend import EmulationBackend
from sage_aot._call.backends import default_library, handing

ARCHS = ("sm80", "sm89", "sm90")


@pytest.fixture(params=ARCHS)
def arch(request, monkeypatch):
    monkeypatch.setenv("SAGE_AOT_EMULATE", request.param)
    return request.param


def draw(queries=70, keys=150, heads=4, kv_heads=2, headdim=64, batch=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, heads, queries, headdim, generator=generator)
    k, v = torch.randn(2, batch, kv_heads, keys, headdim, generator=generator)
    k += torch.randn(1, kv_heads, 1, headdim, generator=generator) * 3
    v += torch.randn(1, kv_heads, 1, headdim, generator=generator)
    return [x.bfloat16() for x in (q, k, v)], torch.rand(batch, keys, generator=generator) < 0.6


@pytest.mark.parametrize("options", [{}, {"smooth_q": True, "smooth_v": True}, {"rotate": True, "layout": "NHD"}])
def test_full_attention_is_a_call_on_the_keys_that_are_left(arch, options):
    (q, k, v), mask = draw()
    nhd = options.get("layout") == "NHD"
    given = [x.transpose(1, 2) if nhd else x for x in (q, k, v)]
    out, lse = sage_aot.attn(*given, key_mask=mask, return_lse=True, **options)
    for b in range(len(q)):
        own = [x[b:b + 1] for x in (q, k[:, :, mask[b]], v[:, :, mask[b]])]
        expected, expected_lse = sage_aot.attn(*(x.transpose(1, 2) if nhd else x for x in own), return_lse=True,
                                               **options)
        assert torch.equal(out[b:b + 1], expected) and torch.equal(lse[b:b + 1], expected_lse)


def exact(q, k, v, mask, is_causal):
    seen = mask[:, None, None, :].expand(-1, 1, q.shape[2], -1)
    if is_causal:
        seen = seen & torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
    k, v = (x.double().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q.double() @ k.mT / q.shape[-1] ** 0.5).masked_fill(~seen, -torch.inf)
    return scores.softmax(-1).nan_to_num() @ v, scores.logsumexp(-1)


@pytest.mark.parametrize("queries", [20, 150, 260])
@pytest.mark.parametrize("pad", ["left", "right", "random"])
def test_a_causal_query_sees_what_both_masks_leave(arch, pad, queries):
    (q, k, v), mask = draw(queries)
    if pad != "random":
        lengths = torch.tensor([[150], [17], [101]])
        mask = torch.arange(150) < lengths if pad == "right" else torch.arange(150) >= 150 - lengths
    out, lse = sage_aot.attn(q, k, v, key_mask=mask, is_causal=True, return_lse=True)
    expected, expected_lse = exact(q, k, v, mask, True)
    assert (out - expected).abs().mean() / expected.abs().mean() < 0.05
    assert torch.equal(lse.isinf(), expected_lse.isinf())
    assert (lse - expected_lse)[~lse.isinf()].abs().max() < 0.05
    assert not out[lse.isinf()].any()


def test_causal_is_bit_equal_to_the_call_on_a_prefix(arch):
    """Keys behind the mask of a right-padded prompt, queries of its last rows."""
    (q, k, v), _ = draw(queries=150, batch=1)
    mask = torch.arange(150)[None] < 128
    out = sage_aot.attn(q, k, v, key_mask=mask, is_causal=True)
    assert torch.equal(out[:, :, :128], sage_aot.attn(q[:, :, :128], k[:, :, :128], v[:, :, :128], is_causal=True))


@pytest.mark.parametrize("is_causal", [False, True])
def test_one_key_no_key_and_all_keys(arch, is_causal):
    (q, k, v), _ = draw(queries=150)
    mask = torch.zeros(3, 150, dtype=torch.bool)
    mask[1], mask[2, 9] = True, True
    out, lse = sage_aot.attn(q, k, v, key_mask=mask, is_causal=is_causal, return_lse=True)
    assert not out[0].any() and (lse[0] == -torch.inf).all()
    unmasked, unmasked_lse = sage_aot.attn(q, k, v, is_causal=is_causal, return_lse=True)
    assert torch.equal(out[1], unmasked[1]) and torch.equal(lse[1], unmasked_lse[1])
    value = v[2, :, 9].repeat_interleave(2, 0)[:, None].float()
    first = 9 if is_causal else 0
    assert not out[2, :, :first].any() and (lse[2, :, :first] == -torch.inf).all()
    assert ((out[2, :, first:] - value).abs() <= 0.04 * value.abs() + 1e-3).all()


@pytest.mark.parametrize("is_causal", [False, True])
def test_nothing_depends_on_keys_that_are_masked(arch, is_causal):
    (q, k, v), mask = draw()
    out = sage_aot.attn(q, k, v, key_mask=mask, is_causal=is_causal)
    gone = ~mask[:, None, :, None]
    for junk in (torch.nan, torch.inf, 1e30):
        k, v = k.masked_fill(gone, junk), v.masked_fill(gone, -junk)
        assert torch.equal(sage_aot.attn(q, k, v, key_mask=mask, is_causal=is_causal), out)


def test_keys_that_are_not_finite_spoil_the_rows_that_see_them(arch):
    (q, k, v), mask = draw(queries=150)
    k[0, 0, 40], mask[0, 40] = torch.nan, True
    out = sage_aot.attn(q, k, v, key_mask=mask, is_causal=True)
    spoilt = out.isnan().all(-1)
    assert spoilt[0, :2, 40:].all() and int(spoilt.sum()) == 2 * 110 and int(out.isnan().any(-1).sum()) == 2 * 110


def test_any_strides_of_the_mask():
    (q, k, v), mask = draw()
    expected = sage_aot.attn(q, k, v, key_mask=mask)
    wide = torch.zeros(3, 450, dtype=torch.bool)
    wide[:, ::3] = mask
    assert torch.equal(sage_aot.attn(q, k, v, key_mask=wide[:, ::3]), expected)
    assert torch.equal(sage_aot.attn(q, k, v, key_mask=mask.T.contiguous().T), expected)
    same = mask[:1].expand(3, -1)
    assert torch.equal(sage_aot.attn(q, k, v, key_mask=same), sage_aot.attn(q, k, v, key_mask=same.clone()))


def test_into_a_tensor_and_under_autocast():
    (q, k, v), mask = draw()
    expected, expected_lse = sage_aot.attn(q, k, v, key_mask=mask, return_lse=True)
    out = torch.full_like(q, torch.nan)
    assert sage_aot.attn(q, k, v, key_mask=mask, p="exp2", out=out) is out and torch.equal(out, expected)
    assert torch.equal(sage_aot.attn(q, k, v, key_mask=mask, out=out, return_lse=True)[1], expected_lse)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(sage_aot.attn(q.float(), k.float(), v.float(), key_mask=mask, p="exp2"), expected)


REFUSED = {
    "list": (lambda m: m.tolist(), "key_mask: expected a torch.Tensor or None, got list; make one with"),
    "dtype": (lambda m: m.long(), r"key_mask: expected torch.bool, .*got torch.int64; pass key_mask.bool\(\)"),
    "additive": (lambda m: m.bfloat16().log(), "key_mask: expected torch.bool, .*key_mask == 0 for zeros and -inf"),
    "keys": (lambda m: m[:, 1:], r"key_mask: expected shape \[batch, keys\], \(3, 150\), got \(3, 149\)"),
    "dimensions": (lambda m: m[:, None, None], r"got \(3, 1, 1, 150\); .* 1, 1, keys\] pass key_mask\[:, 0, 0\]"),
    "batch": (lambda m: m[:1], r"\(3, 150\), got \(1, 150\); .* all entries share pass key_mask.expand\(batch, -1\)"),
    "device": (lambda m: m.to("meta"), r"the device of q, cpu, got meta; pass key_mask.to\(q.device\)"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_wrong_mask_is_refused(what):
    (q, k, v), mask = draw()
    edit, message = REFUSED[what]
    with pytest.raises(sage_aot.ArgumentError, match=message) as raised:
        sage_aot.attn(q, k, v, key_mask=edit(mask))
    if what != "device":
        assert sage_aot.supports(q, k, v, key_mask=edit(mask)) == str(raised.value)


@pytest.mark.parametrize(("batch", "keys", "message"), [
    (2**11, 2**20 - 2, None),
    (2**11, 2**20 - 1, r"expected batch \* \(keys \+ 1\) below 2147483648, got 2048 \* 1048576; split the batch"),
    (1, 2**31 - 2, None),
    (1, 2**31 - 1, r"got 1 \* 2147483648; pass k and v of the keys that it leaves, and no mask"),
])
def test_a_mask_of_too_many_keys_is_refused(batch, keys, message):
    one = torch.zeros(1, 1, 1, 8, dtype=torch.bfloat16)
    kv, mask = one.expand(batch, 1, keys, 8), torch.ones(1, 1, dtype=torch.bool).expand(batch, keys)
    given = one.expand(batch, 1, 1, 8), kv, kv
    found = sage_aot.supports(*given, key_mask=mask)
    assert found is None if message is None else re.search(message, found)
    assert sage_aot.supports(*given) is None
    if message:
        with pytest.raises(sage_aot.ArgumentError, match=message):
            sage_aot.explain(*given, key_mask=mask)


def test_explain_takes_a_mask_with_tensors_only():
    with pytest.raises(sage_aot.ArgumentError, match="key_mask: expected None without q, k and v, got Tensor"):
        sage_aot.explain(capability=(9, 0), headdim=64, key_mask=torch.ones(1, 1, dtype=torch.bool))


def test_a_masked_call_is_of_another_kind():
    (q, k, v), mask = draw()
    for given in (None, mask, None, ~mask):
        out = sage_aot.attn(q, k, v, key_mask=given)
        expected, _ = exact(q, k, v, torch.ones_like(mask) if given is None else given, False)
        assert (out - expected).abs().mean() / expected.abs().mean() < 0.05
    assert sage_aot.supports(q, k, v) is sage_aot.supports(q, k, v, key_mask=mask) is None


def test_explain_names_the_kernel_that_packs():
    (q, k, v), mask = draw()
    plain, masked = (sage_aot.explain(q, k, v, key_mask=given).kernels.records for given in (None, mask))
    assert [record.name for record in masked] == ["sage_pack_sm89", *(record.name for record in plain)]


def test_a_graph_holds_a_masked_call():
    (q, k, v), mask = draw()
    compiled = torch.compile(lambda *given: sage_aot.attn(*given[:3], key_mask=given[3]), backend="eager",
                             fullgraph=True)
    assert torch.equal(compiled(q, k, v, mask), sage_aot.attn(q, k, v, key_mask=mask))


def test_kernels_whose_structs_lack_an_optional_tensor_refuse_it():
    """Kernels of an older folder would ignore the tensor."""
    manifest = default_library().manifest
    pack = manifest.structs["PackParams"]
    older = dataclasses.replace(manifest, structs={
        **manifest.structs, "PackParams": pack._replace(fields={name: field for name, field in pack.fields.items()
                                                                if name != "key_mask"})})
    q, k, v = torch.randn(3, 1, 2, 40, 64)
    key_mask = torch.ones(1, 40, dtype=torch.bool)
    with handing(EmulationBackend(older)):
        assert sage_aot.supports(q, k, v) is None
        with pytest.raises(sage_aot.UnsupportedError, match="no kernel for sm89 takes key_mask; leave it out"):
            sage_aot.attn(q, k, v, key_mask=key_mask)
