"""attn_varlen: each sequence as a call of attn by itself."""

from __future__ import annotations

import pytest
import torch

import sage_aot
from sage_aot._call import ops
from sage_aot._problem.options import Options, for_schema
from sage_aot._problem.tensors import taken_by

ARCHS = ("sm80", "sm89", "sm90")
QUERIES, KEYS = (70, 0, 1, 150, 33, 5), (130, 40, 0, 64, 200, 1)


@pytest.fixture(params=ARCHS)
def arch(request, monkeypatch):
    monkeypatch.setenv("SAGE_AOT_EMULATE", request.param)
    return request.param


def begins(lengths):
    return torch.nn.functional.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int()


def draw(queries=QUERIES, keys=KEYS, heads=4, kv_heads=2, headdim=64, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(sum(queries), heads, headdim, generator=generator)
    k, v = torch.randn(2, sum(keys), kv_heads, headdim, generator=generator)
    k += 3 * torch.randn(1, kv_heads, headdim, generator=generator)
    lengths = begins(queries), begins(keys), max(queries), max(keys)
    return [x.to(dtype) for x in (q, k, v)], lengths


def one_by_one(q, k, v, queries=QUERIES, keys=KEYS, **options):
    """The calls of attn on each sequence by itself: output and log-sum-exp."""
    parts = zip(*(x.split(lengths) for x, lengths in ((q, queries), (k, keys), (v, keys))))
    made = [sage_aot.attn(*(x[None] for x in own), layout="NHD", return_lse=True, **options) for own in parts]
    return torch.cat([out[0] for out, _ in made]), torch.cat([lse[0] for _, lse in made], -1)


def one_by_one_without_lse(q, k, v, **options):
    """Outputs of the sequences one by one, of calls without a log-sum-exp, whose P may be linear."""
    parts = zip(*(x.split(lengths) for x, lengths in ((q, QUERIES), (k, KEYS), (v, KEYS))))
    return torch.cat([sage_aot.attn(*(x[None] for x in own), layout="NHD", **options)[0] for own in parts])


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"smooth_q": True, "smooth_v": True, "is_causal": True},
                                     {"rotate": True, "smooth_k": False, "scale": 0.2}], ids=str)
def test_each_sequence_is_a_call_of_attn(arch, options):
    qkv, lengths = draw()
    out, lse = sage_aot.attn_varlen(*qkv, *lengths, return_lse=True, **options)
    expected, expected_lse = one_by_one(*qkv, **options)
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
    assert torch.equal(sage_aot.attn_varlen(*qkv, *lengths, **options), one_by_one_without_lse(*qkv, **options))


def test_sequences_without_queries_or_keys():
    (q, k, v), (begins_q, begins_k, *_) = draw()
    out, lse = sage_aot.attn_varlen(q, k, v, begins_q, begins_k, 150, 200, return_lse=True)
    assert not out[70].any() and (lse[:, 70] == -torch.inf).all()  # of the third sequence, which has no keys
    assert out.isfinite().all() and lse.isfinite().sum() == 4 * (sum(QUERIES) - 1)
    nothing = begins((0, 0))
    for given in ((q[:0], k, v, nothing, begins((30, 489 - 54))), (q, k[:0], v[:0], begins((59, 200)), nothing)):
        made, made_lse = sage_aot.attn_varlen(*given, 0, 0, return_lse=True)
        assert made.shape == given[0].shape and not made.any() and (made_lse == -torch.inf).all()


def test_a_sequence_longer_than_the_longest_said_is_cut():
    (q, k, v), (begins_q, begins_k, *_) = draw()
    out = torch.full_like(q, 7.0)
    sage_aot.attn_varlen(q, k, v, begins_q, begins_k, 70, 64, out=out)
    assert (out[141:221] == 7.0).all() and out[71:141].ne(7.0).any()
    expected = sage_aot.attn(q[None, :70], k[None, :64], v[None, :64], layout="NHD")[0]
    assert torch.equal(out[:70], expected)


def test_strides_an_output_and_autocast():
    (q, k, v), lengths = draw()
    expected, expected_lse = sage_aot.attn_varlen(q, k, v, *lengths, return_lse=True)
    fused = torch.stack([k, v], 1)
    assert torch.equal(sage_aot.attn_varlen(q, fused[:, 0], fused[:, 1], *lengths, p="exp2"), expected)
    by_head = q.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(sage_aot.attn_varlen(by_head, k, v, *lengths, p="exp2"), expected)
    out = torch.full_like(q, torch.nan)
    assert sage_aot.attn_varlen(q, k, v, *lengths, p="exp2", out=out) is out and torch.equal(out, expected)
    assert torch.equal(sage_aot.attn_varlen(q, k, v, *lengths, out=out, return_lse=True)[1], expected_lse)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(sage_aot.attn_varlen(q.float(), k.float(), v.float(), *lengths, p="exp2"), expected)


REFUSED = {
    "dimensions": (lambda q, **_: {"q": q[None]}, r"q: expected three dimensions \[tokens, heads, headdim\], got"),
    "heads": (lambda q, **_: {"q": q[:, :3]}, "the heads of q must be a multiple of those of k and v, got 3 and 2"),
    "long": (lambda cu_seqlens_q, **_: {"cu_seqlens_q": cu_seqlens_q.long()},
             "cu_seqlens_q: expected a contiguous torch.int32"),
    "table": (lambda cu_seqlens_k, **_: {"cu_seqlens_k": cu_seqlens_k[None]},
              r"cu_seqlens_k: .* got \(1, 7\) torch.int32"),
    "list": (lambda **_: {"cu_seqlens_k": [0, 5]}, "cu_seqlens_k: expected a torch.Tensor, got list"),
    "device": (lambda cu_seqlens_k, **_: {"cu_seqlens_k": cu_seqlens_k.to("meta")},
               "cu_seqlens_k: expected the device of q"),
    "sequences": (lambda cu_seqlens_k, **_: {"cu_seqlens_k": cu_seqlens_k[1:]},
                  "must have one length, sequences [+] 1, got 7 and 6"),
    "none": (lambda cu_seqlens_q, cu_seqlens_k, **_: {"cu_seqlens_q": cu_seqlens_q[:0],
                                                      "cu_seqlens_k": cu_seqlens_k[:0]}, "got 0 and 0"),
    "negative": (lambda **_: {"max_seqlen_q": -1},
                 "max_seqlen_q: expected the length of the longest sequence, .* got -1"),
    "too long": (lambda **_: {"max_seqlen_k": 2**31}, "max_seqlen_k: expected .* from 0 to 2.31 - 1, got 2147483648"),
    "strides": (lambda cu_seqlens_k, **_: {"cu_seqlens_k": cu_seqlens_k.repeat_interleave(2)[::2]},
                r"cu_seqlens_k: expected a contiguous .* with strides \(2,\); pass"),
    "batch": (lambda k, **_: {"k": k[None]}, r"k: expected three dimensions .* pass k.flatten\(0, 1\)"),
    "tensor": (lambda **_: {"max_seqlen_k": torch.tensor([9, 9])},
               r"max_seqlen_k: .* a tensor of shape \(2,\) and torch.int64; pass max_seqlen_k.max\(\).int\(\)"),
    "tensor without a value": (lambda **_: {"max_seqlen_k": torch.tensor(9, device="meta")},
                               "max_seqlen_k: .* a tensor that holds no number, .* pass an int"),
    "tensor of floats": (lambda **_: {"max_seqlen_k": torch.tensor(9.0)}, "max_seqlen_k: .* and torch.float32"),
    "tensor with a derivative": (lambda **_: {"max_seqlen_k": torch.tensor(9.0, requires_grad=True)},
                                 "max_seqlen_k: .* and torch.float32"),
    "tensors without a value": (lambda **_: {"max_seqlen_k": torch.tensor([9, 9], device="meta")},
                                r"max_seqlen_k: .* a tensor of shape \(2,\) and torch.int64"),
    "tensor of bools": (lambda **_: {"max_seqlen_k": torch.tensor(True)}, "max_seqlen_k: .* and torch.bool"),
    "float": (lambda **_: {"max_seqlen_k": 9.0}, r"max_seqlen_k: .* got 9.0; pass int\(max_seqlen_k\)"),
    "bool": (lambda **_: {"max_seqlen_q": True}, "max_seqlen_q: .* an integer, got True"),
    "option": (lambda **_: {"qk": "int2"}, "qk: expected"),
}


def arguments():
    qkv, lengths = draw()
    return dict(zip(("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), (*qkv, *lengths)))


@pytest.mark.parametrize("what", REFUSED)
def test_a_wrong_argument_is_refused_and_supports_says_so(what):
    edit, message = REFUSED[what]
    given = arguments()
    given |= edit(**given)
    with pytest.raises(sage_aot.ArgumentError, match=message) as raised:
        sage_aot.attn_varlen(**given)
    assert [sage_aot.supports(**given) for _ in range(2)] == [str(raised.value)] * 2


def test_what_the_call_takes_is_not_refused():
    given = arguments()
    assert sage_aot.supports(**given, is_causal=True) is None
    assert "cu_seqlens_k: expected a torch.Tensor, got NoneType" in sage_aot.supports(**{**given, "cu_seqlens_k": None})
    assert "layout: sequences have [tokens, heads, headdim], got 'NHD'" in sage_aot.supports(**given, layout="NHD")
    mask = torch.ones(6, sum(KEYS), dtype=torch.bool)
    refused = "key_mask: expected None in a call of attn_varlen, got a tensor; leave the keys that it masks out of k"
    assert refused in sage_aot.supports(**given, key_mask=mask)


@pytest.mark.kernels("sm90")
def test_explain_takes_the_call():
    given = arguments()
    told = sage_aot.explain(**given, capability=(9, 0), is_causal=True)
    assert f"6 sequences in {sum(QUERIES)} tokens of q and {sum(KEYS)} of k and v" in str(told)
    assert told.kernels.attn.spec.arch == "sm90" and told.problem.tokens == (sum(QUERIES), sum(KEYS))
    assert told.problem.batch == len(QUERIES) and told.kernels.records == sage_aot.explain(
        capability=(9, 0), headdim=64, is_causal=True).kernels.records
    with pytest.raises(sage_aot.ArgumentError, match="cu_seqlens_q: expected None without q, k and v, got Tensor"):
        sage_aot.explain(headdim=64, capability=(9, 0), cu_seqlens_q=given["cu_seqlens_q"])


@pytest.mark.parametrize("op", [*ops.attn_varlen], ids=str)
def test_opcheck(op):
    qkv, lengths = draw()
    written = [torch.empty_like(qkv[0])] if "out" in op._schema.name.split("_") else []
    optional = [None] * len(taken_by("varlen"))
    torch.library.opcheck(op, (*qkv, *lengths, *optional, *written, *for_schema(*vars(Options(layout="NHD")).values())))


def test_a_graph_holds_the_call():
    qkv, lengths = draw()
    compiled = torch.compile(lambda *given: sage_aot.attn_varlen(*given), backend="eager", fullgraph=True)
    assert torch.equal(compiled(*qkv, *lengths), sage_aot.attn_varlen(*qkv, *lengths))


def test_a_graph_serves_any_number_of_sequences():
    graphs = []

    def backend(module, _):
        graphs.append(module)
        return module

    compiled = torch.compile(lambda *given: sage_aot.attn_varlen(*given), backend=backend, fullgraph=True, dynamic=True)
    for count in range(2, 12):
        qkv, lengths = draw((5,) * count, (7,) * count)
        assert torch.equal(compiled(*qkv, *lengths), sage_aot.attn_varlen(*qkv, *lengths))
    assert len(graphs) <= 2
