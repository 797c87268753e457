"""Reports by other people of other attention: each tried as its smallest input on our public calls.

A test names its thread. Right values are float64's, or follow from the report.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import sage_aot
from sage_aot._tools import reference
from sage_aot.integrations import Policy, use
from sage_aot.integrations.torch import sdpa

pytestmark = pytest.mark.kernels("sm89")

CLOSE = 0.06
"""Relative L1 error of 8 bits on N(0, 1): 0.038 in the mean (docs/accuracy.md)."""


def draw(*shape, dtype=torch.bfloat16, count=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(*shape, generator=generator).to(dtype) for _ in range(count))


def error(out, q, k, v, **call):
    expected, _ = reference.attention(q, k, v, **call)
    return reference.measure(out, expected).relative_l1


@pytest.mark.parametrize("entry", [sage_aot.attn, sdpa])
def test_tensors_that_were_permuted(entry):
    """pytorch/pytorch#181133, torch-spyre/torch-spyre#4331, ROCm/pytorch#3230: wrong values for q, k and v from
    permute(0, 2, 1, 3), with many batch entries of few tokens."""
    q, k, v = (x.permute(0, 2, 1, 3) for x in draw(84, 3, 3, 64))
    with use(Policy(when="possible", otherwise="raise")):
        out = entry(q, k, v)
        assert torch.equal(out, entry(q.contiguous(), k.contiguous(), v.contiguous()))
    assert error(out, q, k, v) < CLOSE


def test_gradients_of_the_output_that_are_not_contiguous():
    """Dao-AILab/flash-attention#355: a wrong backward pass for one KV head where the gradient of the output was a
    transposed view, or expanded."""
    q, = draw(2, 8, 4, 64, count=1)
    k, v = draw(2, 1, 4, 64, count=2, seed=1)
    views = {"transposed": draw(2, 4, 8, 64, count=1, seed=2)[0].transpose(1, 2),
             "expanded": torch.ones((), dtype=q.dtype).expand_as(q),
             "last dimension first": draw(64, 2, 8, 4, count=1, seed=3)[0].permute(1, 2, 3, 0)}
    for name, grad in views.items():
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        found = torch.autograd.grad(sage_aot.train_attn(*leaves), leaves, grad)
        expected = reference.gradients(q, k, v, grad)[1:]
        of_copy = torch.autograd.grad(sage_aot.train_attn(*leaves), leaves, grad.contiguous())
        assert all(torch.equal(*pair) for pair in zip(found, of_copy)), name
        assert all(reference.relative_l2(*pair) < 0.08 for pair in zip(found[2:], expected[2:])), name


@pytest.mark.parametrize("is_causal", [False, True])
def test_sequences_without_queries_that_have_keys(is_causal):
    """Dao-AILab/flash-attention#1713, #2562: some sequences have keys and no queries, at either end too."""
    lengths = [(0, 100), (150, 100), (0, 30), (37, 70), (0, 5)]
    begins_q, begins_k = (torch.tensor([0, *n]).cumsum(0, dtype=torch.int32) for n in zip(*lengths))
    q, = draw(187, 4, 64, count=1)
    k, v = draw(305, 2, 64, count=2, seed=1)
    out, lse = sage_aot.attn_varlen(q, k, v, begins_q, begins_k, 150, 100, is_causal=is_causal, return_lse=True)
    assert out.shape == q.shape and lse.shape == (4, 187)
    for b, (queries, keys) in enumerate(lengths):
        rows, columns = (slice(int(x[b]), int(x[b]) + n) for x, n in ((begins_q, queries), (begins_k, keys)))
        if queries:
            one = [x.transpose(0, 1)[None] for x in (q[rows], k[columns], v[columns])]
            assert torch.equal(out[rows].transpose(0, 1)[None], sage_aot.attn(*one, is_causal=is_causal, p="exp2"))


@pytest.mark.parametrize("arch", ["sm80", "sm89", "sm90"])
@pytest.mark.kernels("sm80", "sm89", "sm90")
def test_keys_with_large_offsets_give_no_black_images(monkeypatch, arch):
    """Comfy-Org/ComfyUI#9773, #9184, thu-ml/SageAttention#273: NaN and black images with Qwen-Image, whose keys have
    channels far from zero, in f16 near the end of its range."""
    monkeypatch.setenv("SAGE_AOT_EMULATE", arch)
    q, k, v = draw(1, 2, 333, 128, dtype=torch.float16)
    k = k + torch.where(torch.arange(128) % 9 == 4, 600.0, 0.0).half()  # beyond what q·k in f16 could hold
    q = q + torch.where(torch.arange(128) % 9 == 4, 60.0, 0.0).half()
    out, lse = sage_aot.attn(q, k, v, return_lse=True)
    assert out.isfinite().all() and lse.isfinite().all()
    assert error(out, q, k, v) < 0.3  # 8 bits of q: a 60 leaves a step of half to all other channels


def test_query_heads_read_the_kv_head_of_their_group():
    """onnx/onnx#7274, fkodom/grouped-query-attention-pytorch#5: KV heads were tiled, 0 1 0 1, not repeated, 0 0 1 1."""
    q, k = draw(1, 4, 1, 64)[0], draw(1, 2, 40, 64, count=1, seed=1)[0]
    v = torch.tensor([1.0, 2.0], dtype=q.dtype)[None, :, None, None].expand(1, 2, 40, 64).contiguous()
    expected = torch.tensor([1.0, 1.0, 2.0, 2.0])
    for queries in (1, 70):
        rows = q.expand(1, 4, queries, 64)
        begins = torch.tensor([0, queries], dtype=torch.int32), torch.tensor([0, 40], dtype=torch.int32)
        with use(Policy(when="possible", otherwise="raise")):
            made = {"attn": sage_aot.attn(rows, k, v), "quantize_kv": sage_aot.attn(rows, sage_aot.quantize_kv(k, v)),
                    "NHD": sage_aot.attn(*(x.transpose(1, 2) for x in (rows, k, v)), layout="NHD").transpose(1, 2),
                    "varlen": sage_aot.attn_varlen(*(x[0].transpose(0, 1) for x in (rows, k, v)), *begins, queries, 40
                                                   ).transpose(0, 1)[None],
                    "train_attn": sage_aot.train_attn(rows, k, v), "sdpa": sdpa(rows, k, v, enable_gqa=True)}
        for name, out in made.items():
            assert out.shape == rows.shape
            assert (out.float().mean((0, 2, 3)) - expected).abs().max() < 0.15, (name, queries)


def test_causal_masks_where_keys_outnumber_queries():
    """ml-explore/mlx#2836, Dao-AILab/flash-attention#402: bottom-right as FlashAttention for attn, top-left as torch's
    SDPA for sdpa. The last query of attn sees all keys, the first of sdpa sees one."""
    q, k, v = draw(1, 1, 2, 64)[0], *draw(1, 1, 5, 64, count=2, seed=1)
    out = sage_aot.attn(q, k, v, is_causal=True)
    for row, keys in ((0, 4), (1, 5)):
        assert error(out[:, :, row: row + 1], q[:, :, row: row + 1], k[:, :, :keys], v[:, :, :keys]) < 0.1
    with use(Policy(when="possible", otherwise="raise")):
        out = sdpa(q, k, v, is_causal=True)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v, is_causal=True), rtol=0.1, atol=0.1)
    torch.testing.assert_close(out[:, :, 0], v[:, :, 0], rtol=0.07, atol=0)


def test_rows_from_which_two_masks_together_hide_all_keys():
    """tracel-ai/burn#4697, iree-org/iree#24178: NaN where a causal mask and a mask of bools leave a row no key, though
    each alone leaves some."""
    q, k, v = draw(2, 2, 6, 64)
    key_mask = torch.tensor([[False, False, True, True, True, True], [True] * 6])
    out, lse = sage_aot.attn(q, k, v, key_mask=key_mask, is_causal=True, return_lse=True)
    assert (out[0, :, :2] == 0).all() and (lse[0, :, :2] == -torch.inf).all()
    assert out.isfinite().all() and lse[0, :, 2:].isfinite().all() and lse[1].isfinite().all()
    torch.testing.assert_close(out[0, :, 2], v[0, :, 2], rtol=0.07, atol=0)


@pytest.mark.parametrize("headdim", [80, 96, 112])
def test_a_prompt_in_chunks_at_head_dims_that_are_no_power_of_two(headdim):
    """vllm-project/vllm#4127: chunked prefill failed at phi-2's head dim of 80. Each chunk of queries sees the keys up
    to its own end; together they are the whole prompt's attention."""
    q, k, v = draw(1, 4, 100, headdim)[0], *draw(1, 2, 100, headdim, count=2, seed=1)
    chunks = [sage_aot.attn(q[:, :, begin:end], k[:, :, :end], v[:, :, :end], is_causal=True)
              for begin, end in ((0, 33), (33, 34), (34, 80), (80, 100))]
    out, (expected, _) = torch.cat(chunks, 2), reference.attention(q, k, v, is_causal=True)
    assert reference.measure(out, expected).relative_l1 < CLOSE
    assert ((out - expected).norm(dim=-1) < 0.2 * expected.norm(dim=-1)).all()  # rows of few keys too


def test_strides_of_dimensions_of_size_one():
    """pytorch/pytorch#116333: contiguous() leaves strides of dimensions of size one as they are, and attention refused
    the last one's. Here it has no meaning."""
    q, k, v = (x.as_strided((1, 1, 7, 1), (3, 5, 1, 2)) for x in draw(1, 1, 7, 1))
    out = sage_aot.attn(q, k, v)
    assert sage_aot.supports(q, k, v) is None
    assert torch.equal(out, sage_aot.attn(*(x.clone(memory_format=torch.contiguous_format) for x in (q, k, v))))
    assert error(out, q, k, v) < CLOSE


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_in_a_batch_of_one(side):
    """huggingface/transformers#46773: a padding mask was skipped where the batch has one entry. Padding may hold
    anything."""
    q, k, v = draw(1, 2, 50, 64)
    kept = slice(13, 50) if side == "left" else slice(0, 37)
    key_mask = torch.zeros(1, 50, dtype=torch.bool)
    key_mask[:, kept] = True
    padded_k, padded_v = (x.masked_fill(~key_mask[:, None, :, None], torch.nan) for x in (k, v))
    out = sage_aot.attn(q, padded_k, padded_v, key_mask=key_mask)
    assert torch.equal(out, sage_aot.attn(q, k[:, :, kept], v[:, :, kept]))
    with use(Policy(when="possible", otherwise="raise")):
        assert torch.equal(out, sdpa(q, padded_k, padded_v, attn_mask=key_mask[:, None, None]))


@pytest.mark.parametrize("hidden", [False, True])
def test_shares_of_the_keys_merge_by_their_log_sum_exp(hidden):
    """pytorch/pytorch#134650: the log-sum-exp of a row that sees no key was 0, so that a share without keys took part
    in a merge. It is −inf, with an output of zeros."""
    q, k, v = draw(1, 2, 30, 64, dtype=torch.float32)
    masks = torch.arange(30)[None] < 12, (torch.arange(30)[None] >= 12) & (not hidden)
    shares = [sage_aot.attn(q, k, v, key_mask=mask, return_lse=True) for mask in masks]
    outs, lses = (torch.stack(x) for x in zip(*shares))
    assert not hidden or (lses[1] == -torch.inf).all() and (outs[1] == 0).all()
    merged = (torch.softmax(lses, 0)[..., None] * outs).sum(0)
    keys = 12 if hidden else 30
    assert error(merged, q, k[:, :, :keys], v[:, :, :keys]) < CLOSE


def test_masks_that_are_expanded():
    """pytorch/pytorch#112577: garbage for a mask that was expanded over heads and queries. A view with one row for all
    is a key mask; its copy, whose rows may differ as far as its strides tell, is a mask of queries."""
    q, k, v = draw(2, 3, 20, 64, dtype=torch.float32)
    rows = torch.arange(20)[None, None, None] < torch.tensor([7, 20])[:, None, None, None]
    expanded = rows.expand(2, 3, 20, 20)
    with use(Policy(when="possible")):
        served, copied = sdpa(q, k, v, attn_mask=expanded), sdpa(q, k, v, attn_mask=expanded.contiguous())
    exact = F.scaled_dot_product_attention(q, k, v, attn_mask=expanded)
    for found in (served, copied):
        assert reference.measure(found, exact).relative_l1 < CLOSE and not torch.equal(found, exact)
