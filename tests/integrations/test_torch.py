"""torch's scaled_dot_product_attention in sage_aot's hands, and back again."""

from __future__ import annotations

import inspect
import threading

import pytest
import torch
import torch.nn.functional as F
from exact import served_calls
from torch.nn.functional import scaled_dot_product_attention as captured

from sage_aot.errors import UnsupportedError
from sage_aot.integrations import Policy, _policy, report, use
from sage_aot.integrations.torch import replace_sdpa, sdpa


@pytest.fixture
def qkv():
    return torch.randn(3, 2, 4, 40, 64, generator=torch.Generator().manual_seed(0)).unbind()


def test_the_signature_is_torchs():
    parameters = list(inspect.signature(sdpa).parameters.values())
    assert [(p.name, p.default) for p in parameters[3:]] == [
        ("attn_mask", None), ("dropout_p", 0.0), ("is_causal", False), ("scale", None), ("enable_gqa", False)]
    assert f"({', '.join(p.name for p in parameters[:3])}, attn_mask=None, dropout_p=0.0," in captured.__doc__


MASK = torch.arange(40) < torch.tensor([25, 40])[:, None, None, None]


@pytest.mark.parametrize("options", [
    {}, {"is_causal": True}, {"scale": 0.3}, {"attn_mask": MASK}, {"attn_mask": torch.randn(40, 40)},
    {"attn_mask": MASK & torch.ones(40, 40).tril().bool()}, {"is_causal": True, "scale": 2.0}], ids=str)
def test_it_is_torchs_attention(exact, qkv, options):
    torch.testing.assert_close(sdpa(*qkv, **options), captured(*qkv, **options), rtol=0, atol=1e-5)
    mask = options.get("attn_mask")
    assert served_calls() == (mask is None or mask is MASK)


@pytest.mark.parametrize(("queries", "keys"), [(30, 40), (40, 30), (1, 40)])
def test_a_causal_mask_is_aligned_top_left(exact, queries, keys):
    q, k, v = torch.randn(2, 4, queries, 64), *torch.randn(2, 2, 4, keys, 64)
    torch.testing.assert_close(sdpa(q, k, v, is_causal=True), captured(q, k, v, is_causal=True), rtol=0, atol=1e-5)


def test_grouped_heads_with_torchs_option_alone(exact, qkv):
    q, k, v = qkv[0], qkv[1][:, :2], qkv[2][:, :2]
    torch.testing.assert_close(sdpa(q, k, v, enable_gqa=True), captured(q, k, v, enable_gqa=True), rtol=0, atol=1e-5)
    assert served_calls() == 1
    with use(Policy()):
        assert torch.equal(sdpa(q, k, v, enable_gqa=True), captured(q, k, v, enable_gqa=True))
    with pytest.raises(RuntimeError, match="must match the size of tensor"):
        sdpa(q, k, v)


def test_by_the_emulation(qkv):
    error = sdpa(*qkv, is_causal=True) - captured(*qkv, is_causal=True)
    assert 0 < error.norm() / captured(*qkv, is_causal=True).norm() < 0.05


def test_in_a_context(qkv):
    with replace_sdpa():
        out = F.scaled_dot_product_attention(*qkv)
        again = captured(*qkv)
        assert served_calls() == 2
    assert torch.equal(out, sdpa(*qkv)) and torch.equal(again, out)
    assert torch.equal(F.scaled_dot_product_attention(*qkv), captured(*qkv)) and not torch.equal(out, captured(*qkv))


def test_contexts_in_contexts_and_after_an_error(qkv):
    with pytest.raises(KeyError), replace_sdpa(), replace_sdpa():
        F.scaled_dot_product_attention(*qkv)
        raise KeyError
    assert served_calls() == 1
    F.scaled_dot_product_attention(*qkv)
    assert served_calls() == 1


def test_as_a_decorator(qkv):
    @replace_sdpa()
    def work(*qkv, is_causal):
        """What it says."""
        return F.scaled_dot_product_attention(*qkv, is_causal=is_causal)

    assert work.__doc__ == "What it says."
    assert torch.equal(work(*qkv, is_causal=True), work(*qkv, is_causal=True)) and served_calls() == 2
    F.scaled_dot_product_attention(*qkv)
    assert served_calls() == 2


def in_a_thread(work):
    found = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


def test_a_context_holds_for_its_thread(qkv):
    with replace_sdpa():
        in_a_thread(lambda: F.scaled_dot_product_attention(*qkv))
        assert served_calls() == 0


def test_globally(qkv):
    with replace_sdpa.globally():
        assert F.scaled_dot_product_attention is sdpa
        in_a_thread(lambda: F.scaled_dot_product_attention(*qkv))
        captured(*qkv)
        assert served_calls() == 1
        F.scaled_dot_product_attention(*qkv, dropout_p=0.5)  # torch's own, without end
    assert F.scaled_dot_product_attention is captured and report() == {"sage_aot": 1, "dropout": 1}


def test_both_at_once(qkv):
    with replace_sdpa.globally(), replace_sdpa():
        captured(*qkv)
        F.scaled_dot_product_attention(*qkv)
    assert report() == {"sage_aot": 2}


def test_a_function_of_torch_that_calls_it_is_reached_globally_alone(qkv):
    layer = torch.nn.MultiheadAttention(64, 4, batch_first=True)
    x = qkv[0].flatten(0, 1)
    with replace_sdpa():
        layer(x, x, x, need_weights=False)
    assert report() == {}
    with replace_sdpa.globally():
        out, _ = layer(x, x, x, need_weights=False)
        with torch.no_grad():
            layer(x, x, x, need_weights=False)
    assert out.requires_grad and report() == {"gradients": 1, "sage_aot": 1}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled(qkv, backend):
    expected = sdpa(*qkv, MASK)
    assert torch.equal(torch.compile(sdpa, backend=backend, fullgraph=True)(*qkv, MASK), expected)

    def layer(q, k, v):
        return F.scaled_dot_product_attention(q.sin(), k, v).cos()

    inside = torch.compile(layer, backend=backend, fullgraph=True)
    with replace_sdpa():
        found, alone = inside(*qkv), layer(*qkv)
    assert torch.equal(found, alone)
    assert not torch.equal(inside(*qkv), found), "the compiled code outlives the context"
    assert served_calls() == 2, "compiled code counts nothing"
    whole = torch.compile(replace_sdpa()(layer), backend=backend)
    assert torch.equal(whole(*qkv), found)


def test_compiled_code_obeys_the_policy(qkv):
    compiled = torch.compile(sdpa, backend="eager", fullgraph=True)
    assert torch.equal(compiled(*qkv), sdpa(*qkv))
    with use(Policy()):
        assert torch.equal(compiled(*qkv), captured(*qkv))
    assert torch.equal(compiled(*qkv), sdpa(*qkv))


@pytest.mark.parametrize("switched_on", [replace_sdpa().__enter__, replace_sdpa.globally().__enter__])
def test_a_gpu_without_kernels_is_an_error_at_once(monkeypatch, switched_on):
    def check():
        raise UnsupportedError("no kernel for this GPU")

    monkeypatch.setattr("sage_aot.integrations.torch.check_gpu", check)
    with pytest.raises(UnsupportedError, match="no kernel for this GPU"):
        switched_on()
    assert F.scaled_dot_product_attention is captured


def test_the_gpu_at_hand_is_asked(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(_policy, "explain", lambda: type("Explained", (), {"error": "GPU 7.5: too old"}))
    with pytest.raises(UnsupportedError, match="too old"):
        _policy.check_gpu()
