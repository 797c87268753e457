"""torch's scaled_dot_product_attention in sage_aot's hands, and back again."""

from __future__ import annotations

import inspect
import threading
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from exact import served_calls
from torch.nn.functional import scaled_dot_product_attention as captured

from sage_aot._backends import cuda
from sage_aot._tools import explain as explaining
from sage_aot.errors import UnsupportedError
from sage_aot.integrations import Policy, _policy, report, use
from sage_aot.integrations import torch as integration
from sage_aot.integrations._policy import SLOWER
from sage_aot.integrations.torch import _Flash, register_flash, replace_sdpa, sdpa


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


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}, {"attn_mask": MASK}], ids=str)
def test_small_calls_are_torchs(qkv, options):
    with use(Policy()):
        assert torch.equal(sdpa(*qkv, **options), captured(*qkv, **options))
        k, v = (x[:, :2] for x in qkv[1:])
        assert torch.equal(sdpa(qkv[0], k, v, enable_gqa=True), captured(qkv[0], k, v, enable_gqa=True))
        assert sdpa(*qkv, dropout_p=1.0).eq(0).all()
    assert report() == {SLOWER: 3}


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


def gpu_here(monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU")
    monkeypatch.setattr(explaining, "sm_count", lambda device: 132)
    for module in (cuda, explaining):
        monkeypatch.setattr(module, "default_driver", lambda: SimpleNamespace(cuda=13000))


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_a_gpu_with_kernels_is_no_error(monkeypatch, capability):
    gpu_here(monkeypatch, capability)
    with replace_sdpa(), replace_sdpa.globally():
        pass


def test_the_gpu_at_hand_is_asked(monkeypatch):
    gpu_here(monkeypatch, (7, 5))
    with pytest.raises(UnsupportedError, match="no kernels for .* compute capability 7.5"):
        _policy.check_gpu()
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    _policy.check_gpu()  # a trace cannot ask


def few_queries(*, keys=2048, headdim=64, v_headdim=64, kv_heads=4, dtype=torch.bfloat16, grad=False):
    q, k, v = (torch.ones(1, heads, rows, channels, dtype=dtype) for heads, rows, channels in (
        (4, 16, headdim), (kv_heads, keys, headdim), (kv_heads, keys, v_headdim)))
    return q.requires_grad_(grad), k, v


@pytest.mark.parametrize(("tensors", "options", "torch_says", "by_flash"), [
    ({}, {}, {}, True), ({"kv_heads": 2}, {"enable_gqa": True}, {}, True),
    ({"headdim": 32, "v_headdim": 32}, {}, {}, True), ({"kv_heads": 2}, {}, {}, False), ({"keys": 2047}, {}, {}, False),
    ({"headdim": 60, "v_headdim": 60}, {}, {}, False), ({"v_headdim": 32}, {}, {}, False),
    ({"grad": True}, {}, {}, False), ({"dtype": torch.float32}, {}, {}, False), ({}, {"is_causal": True}, {}, False),
    ({}, {"attn_mask": torch.ones(1, 1, 1, 2048).bool()}, {}, False), ({}, {"dropout_p": 0.5}, {}, False),
    ({}, {}, {"is_cuda": False}, False), ({}, {}, {"flash_sdp_enabled": False}, False),
    ({}, {}, {"is_autocast_enabled": True}, False)], ids=str)
def test_few_queries_run_by_flash(monkeypatch, tensors, options, torch_says, by_flash):
    """What a GPU would do, where torch would choose cuDNN: both ways are stand-ins here."""
    says = {"is_cuda": True, "flash_sdp_enabled": True, "is_autocast_enabled": False, **torch_says}
    monkeypatch.setattr(torch.Tensor, "is_cuda", says["is_cuda"])
    monkeypatch.setattr(torch.backends.cuda, "flash_sdp_enabled", lambda: says["flash_sdp_enabled"])
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: says["is_autocast_enabled"])
    ran = []
    monkeypatch.setattr(integration, "_TORCHS", lambda *args, **options: ran.append("torch's choice"))
    operator = SimpleNamespace(default=lambda *args, scale: ran.append(f"flash, {scale}") or (None,))
    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_flash_attention", operator)
    with use(Policy()):
        sdpa(*few_queries(**tensors), scale=0.3, **options)
    assert ran == ["flash, 0.3" if by_flash else "torch's choice"]


# --- torch's flash attention ------------------------------------------------------------------------------------------


class FlashOfTheCpu(_Flash):
    """The operator that torch sends CPU tensors to. It takes a mask, and returns the output and log-sum-exp alone."""

    OPERATOR, KEY = "_scaled_dot_product_flash_attention_for_cpu", "CPU"

    @staticmethod
    def _outputs(query, key, out, lse):
        return out, lse


@pytest.fixture
def flash(monkeypatch):
    """What torch activates and restores, for the CPU's operator."""
    monkeypatch.setattr("sage_aot.integrations.torch._Flash", FlashOfTheCpu)
    register_flash("sage_aot of the cpu")
    torch.nn.attention.activate_flash_attention_impl("sage_aot of the cpu")
    yield
    if torch.nn.attention.current_flash_attention_impl():
        torch.nn.attention.restore_flash_attention_impl()


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}, {"attn_mask": MASK}], ids=str)
def test_torchs_flash_attention_is_served(exact, flash, qkv, options):
    out = captured(*qkv, **options)
    served = served_calls()
    torch.nn.attention.restore_flash_attention_impl()
    torch.testing.assert_close(out, captured(*qkv, **options), rtol=0, atol=1e-5)
    assert served == served_calls() == ("attn_mask" not in options), "torch makes numbers of its mask"


def test_the_log_sum_exp_of_torchs_flash_attention(exact, flash, qkv):
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    (out, lse), = [operator(*qkv, 0.0, True, scale=0.3)]
    torch.nn.attention.restore_flash_attention_impl()
    expected = operator(*qkv, 0.0, True, scale=0.3)
    torch.testing.assert_close((out, lse), expected, rtol=0, atol=1e-5)


def test_training_with_torchs_flash_attention_is_torchs(flash, qkv):
    q, k, v = (x.clone().requires_grad_() for x in qkv)
    captured(q, k, v).square().sum().backward()
    found = [x.grad for x in (q, k, v)]
    torch.nn.attention.restore_flash_attention_impl()
    q, k, v = (x.clone().requires_grad_() for x in qkv)
    captured(q, k, v).square().sum().backward()
    assert all(torch.equal(one, x.grad) for one, x in zip(found, (q, k, v)))
    assert report() == {"gradients": 1}


def test_all_outputs_of_the_operator(qkv):
    """Number, dtypes and sizes as torch's own."""
    q, k, v = qkv
    meta = torch.ops.aten._scaled_dot_product_flash_attention(*(x.to("meta") for x in qkv))
    ours = _Flash._outputs(q, k, torch.empty_like(q), torch.empty(q.shape[:3]))
    expected, found = ([(x.shape, x.dtype) if isinstance(x, torch.Tensor) else x for x in outputs]
                       for outputs in (meta, ours))
    assert found == expected


def test_a_torch_without_the_registration(monkeypatch):
    monkeypatch.delattr(torch.nn.attention, "register_flash_attention_impl")
    with pytest.raises(UnsupportedError, match="register_flash: expected torch.nn.* without; use replace_sdpa"):
        register_flash()
