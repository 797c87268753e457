"""torch's scaled_dot_product_attention in sage_aot's hands, and back again."""

from __future__ import annotations

import inspect
import random
import threading
import warnings
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from exact import id_of, served_calls
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import CausalBias, causal_lower_right
from torch.nn.functional import scaled_dot_product_attention as captured

from sage_aot._backends.cuda import device as cuda_device
from sage_aot._tools import explain as explaining
from sage_aot._tools.reference import measure
from sage_aot.errors import ArgumentError, UnsupportedError
from sage_aot.integrations import Policy, _policy, _routes, _rules, audit, report, use
from sage_aot.integrations import torch as integration
from sage_aot.integrations._report import EXACT, SERVED, SLOWER
from sage_aot.integrations._rules import HostCall
from sage_aot.integrations._serve import attend
from sage_aot.integrations.torch import _Flash, _training, register_flash, replace_sdpa, sdpa, torchs


@pytest.fixture
def qkv():
    return torch.randn(3, 2, 4, 40, 64, generator=torch.Generator().manual_seed(0)).unbind()


def test_the_signature_is_torchs():
    parameters = list(inspect.signature(sdpa).parameters.values())
    assert [(p.name, p.default) for p in parameters[3:]] == [
        ("attn_mask", None), ("dropout_p", 0.0), ("is_causal", False), ("scale", None), ("enable_gqa", False)]
    assert f"({', '.join(p.name for p in parameters[:3])}, attn_mask=None, dropout_p=0.0," in captured.__doc__
    replacing = inspect.signature(integration._from_python, follow_wrapped=False)
    assert list(replacing.parameters.values()) == parameters


MASK = torch.arange(40) < torch.tensor([25, 40])[:, None, None, None]


@pytest.mark.parametrize("is_causal", [False, True])
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_lengths_that_depend_on_values_compile(qkv, is_causal):
    def work(q, k, v, taken):
        found = taken.nonzero()[:, 0]
        return sdpa(q[:, :, found], k[:, :, found], v[:, :, found], is_causal=is_causal)

    compiled = torch.compile(work, backend="aot_eager", fullgraph=True)
    for n in (40, 30, 2):
        taken = torch.arange(40) < n
        assert torch.equal(compiled(*qkv, taken), work(*qkv, taken))
    assert served_calls()


@pytest.mark.parametrize("options", [
    {}, {"is_causal": True}, {"scale": 0.3}, {"attn_mask": MASK}, {"attn_mask": torch.randn(40, 40)},
    {"attn_mask": MASK & torch.ones(40, 40).tril().bool()}, {"is_causal": True, "scale": 2.0}], ids=id_of)
def test_it_is_torchs_attention(exact, qkv, options):
    torch.testing.assert_close(sdpa(*qkv, **options), captured(*qkv, **options), rtol=0, atol=1e-5)
    mask = options.get("attn_mask")
    assert served_calls() == (mask is None or mask.dtype == torch.bool)


def bools(*shape):
    """A mask that shows each query a key."""
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.6
    mask[..., :1] = True
    return mask


MASKS_OF_QUERIES = {
    "[queries, keys]": bools(30, 40), "[batch, 1, queries, keys]": bools(2, 1, 30, 40),
    "[1, heads, queries, keys]": bools(1, 4, 30, 40), "[batch, heads, queries, keys]": bools(2, 4, 30, 40),
    "[heads, queries, keys]": bools(4, 30, 40), "[batch, heads, 1, keys]": bools(2, 4, 1, 40),
    "[queries, 1]": torch.ones(30, 1, dtype=torch.bool), "columns first": bools(2, 1, 40, 30).mT | bools(30, 40),
    "every second key": bools(2, 1, 30, 80)[..., ::2], "expanded": bools(2, 1, 30, 40).expand(2, 4, 30, 40),
}


@pytest.mark.parametrize("name", MASKS_OF_QUERIES)
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_masks_of_queries(exact, qkv, name, kv_heads):
    q, k, v = qkv[0][:, :, :30], *(x[:, :kv_heads] for x in qkv[1:])
    options = {"attn_mask": MASKS_OF_QUERIES[name], "enable_gqa": kv_heads == 2, "scale": 0.3}
    torch.testing.assert_close(sdpa(q, k, v, **options), captured(q, k, v, **options), rtol=0, atol=1e-5)
    assert report() == {"sage_aot": 1}


@pytest.mark.parametrize("name", MASKS_OF_QUERIES)
def test_masks_of_queries_by_the_emulation(qkv, name):
    q, k, v, mask = qkv[0][:, :, :30], *qkv[1:], MASKS_OF_QUERIES[name]
    expected = captured(q, k, v, mask)
    with replace_sdpa():
        error = F.scaled_dot_product_attention(q, k, v, mask) - expected
    assert 0 < error.norm() / expected.norm() < 0.05 and served_calls() == 1


@pytest.mark.parametrize("shape", [(40, 30), (3, 1, 30, 40), (2, 3, 30, 40), (2, 1, 30, 39), (1, 2, 1, 30, 40)])
def test_a_mask_of_another_shape_is_torchs_error(qkv, shape):
    with pytest.raises(RuntimeError):
        captured(qkv[0][:, :, :30], *qkv[1:], bools(*shape))
    with pytest.raises(RuntimeError):
        sdpa(qkv[0][:, :, :30], *qkv[1:], bools(*shape))
    assert report() == {"a mask of another shape": 1}


def test_rows_that_see_no_key_are_zeros(exact, qkv):
    """torch gives zeros or NaN, as its backends do."""
    mask = bools(40, 40)
    mask[7] = False
    out = sdpa(*qkv, mask)
    assert out[:, :, 7].eq(0).all()
    seen = torch.arange(40) != 7
    torch.testing.assert_close(out[:, :, seen], captured(*qkv, mask)[:, :, seen], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["[queries, keys]", "[1, heads, queries, keys]", "columns first"])
def test_a_compiled_call_with_a_mask_of_queries(qkv, name):
    q, k, v, mask = qkv[0][:, :, :30], *qkv[1:], MASKS_OF_QUERIES[name]
    names = []

    def seen(graph, inputs):
        names.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    compiled = torch.compile(sdpa, backend=seen, fullgraph=True)
    assert torch.equal(compiled(q, k, v, mask), sdpa(q, k, v, mask))
    assert sum("sage_aot" in name for name in names) == 1 and not any("scaled_dot" in name for name in names)


@pytest.mark.parametrize("kind", ["padded", "masked", "window"])
def test_small_calls_with_a_mask_are_torchs_where_no_kind_of_mask_is_faster(monkeypatch, qkv, kind):
    """A mask of the shape of others may be of any kind: one look-up decides for all."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    for module in (_routes, _rules):
        monkeypatch.setattr(module, "threshold_of", lambda device, of, headdim: (0, 0 if of == kind else 1e15))
    asked = []
    monkeypatch.setattr(integration, "attend", lambda call, host: asked.append(call) or host())
    with use(Policy()):
        sdpa(*qkv, MASK)
        sdpa(*qkv, bools(40, 40))
    assert len(asked) == 2 and report() == {}


@pytest.mark.parametrize(("queries", "keys"), [(30, 40), (40, 30), (1, 40)])
def test_a_causal_mask_is_aligned_top_left(exact, queries, keys):
    q, k, v = torch.randn(2, 4, queries, 64), *torch.randn(2, 2, 4, keys, 64)
    torch.testing.assert_close(sdpa(q, k, v, is_causal=True), captured(q, k, v, is_causal=True), rtol=0, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}, {"attn_mask": MASK}], ids=str)
def test_small_calls_are_torchs(monkeypatch, qkv, options):
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    with use(Policy()):
        assert torch.equal(sdpa(*qkv, **options), captured(*qkv, **options))
        k, v = (x[:, :2] for x in qkv[1:])
        assert torch.equal(sdpa(qkv[0], k, v, enable_gqa=True), captured(qkv[0], k, v, enable_gqa=True))
        assert sdpa(*qkv, dropout_p=1.0).eq(0).all()
    assert report() == {SLOWER: 3}


def drawn(dice):
    """q, k, v in any of some layouts, which torch may refuse, and options of the call."""
    batch, heads, queries = dice.choice([1, 2, 3]), dice.choice([1, 2, 4, 6]), dice.choice([0, 1, 2, 7, 30])
    keys, headdim = dice.choice([0, 1, 5, 30, 33]), dice.choice([1, 8, 40, 64, 300])
    kv_heads, v_headdim = dice.choice([heads, heads, 1, 2, 3]), dice.choice([headdim, headdim, 16, 80])
    kv_batch = dice.choice([batch, batch, batch, 1])
    kv = kv_batch, kv_heads, keys
    shapes = (batch, heads, queries, headdim), (*kv, headdim), (*kv, v_headdim)
    layouts = (lambda x: x, lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
               lambda x: torch.cat([x, x], -1)[..., :x.size(-1)], lambda x: x.mT.contiguous().mT)
    tensors = [dice.choice(layouts)(torch.randn(shape)) for shape in shapes]
    if dice.random() < 0.1:
        tensors = [x[0] for x in tensors]
    masks = [(queries, keys), (batch, 1, 1, keys), (1, 1, 1, keys), (batch, 1, queries, keys), (1, heads, 1, keys),
             (batch, 1, 1, 1), (queries, 1), (batch, 1, queries, 1), (keys, queries)]
    mask = torch.rand(dice.choice(masks)) < 0.7
    options = {"is_causal": True, "scale": dice.choice([0.1, 1]), "enable_gqa": True,
               "attn_mask": dice.choice([mask, mask, mask, mask.float()])}
    return tensors, {name: value for name, value in options.items() if dice.random() < 0.35}


def result(attention, tensors, options):
    """The output; None where it raises."""
    try:
        return attention(*tensors, **options)
    except (RuntimeError, ValueError, IndexError):
        return None


def test_random_calls_are_torchs(exact):
    seed = random.randrange(2**32)
    dice = random.Random(seed)
    torch.manual_seed(seed)
    for number in range(1500):
        tensors, options = drawn(dice)
        call = f"call {number} of seed {seed}: {[(x.shape, x.stride()) for x in tensors]}, {options}"
        found, expected = (result(attention, tensors, options) for attention in (sdpa, captured))
        assert (found is None) == (expected is None), call
        if found is not None:
            torch.testing.assert_close(found, expected, rtol=0, atol=2e-5, equal_nan=True, msg=call)
    assert served_calls() > 50


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
    of_bias = CausalBias.__dict__["__torch_function__"]
    with replace_sdpa.globally():
        assert F.scaled_dot_product_attention is not captured
        in_a_thread(lambda: F.scaled_dot_product_attention(*qkv))
        captured(*qkv)
        assert served_calls() == 1
        F.scaled_dot_product_attention(*qkv, dropout_p=0.5)  # torch's own, without end
    assert F.scaled_dot_product_attention is captured and report() == {"sage_aot": 1, "dropout": 1}
    assert CausalBias.__dict__["__torch_function__"] is of_bias


def test_contexts_of_threads_may_be_left_in_any_order(qkv):
    """Contexts overlap where two threads of a server each have a request."""
    of_bias = CausalBias.__dict__["__torch_function__"]
    one, other, third = (replace_sdpa.globally() for _ in range(3))
    for context in (one, other, third):
        context.__enter__()
    one.__exit__(None, None, None)
    F.scaled_dot_product_attention(*qkv)
    third.__exit__(None, None, None)
    captured(*qkv, causal_lower_right(40, 40))
    F.scaled_dot_product_attention(*qkv)
    assert served_calls() == 3
    other.__exit__(None, None, None)
    assert F.scaled_dot_product_attention is captured
    assert CausalBias.__dict__["__torch_function__"] is of_bias


def test_what_another_library_puts_there_meanwhile_stays():
    def others(*args, **options):
        return captured(*args, **options)

    one, other = replace_sdpa.globally(), replace_sdpa.globally()
    one.__enter__()
    F.scaled_dot_product_attention = others
    try:
        other.__enter__()
        one.__exit__(None, None, None)
        other.__exit__(None, None, None)
        assert F.scaled_dot_product_attention is others
    finally:
        F.scaled_dot_product_attention = captured


def test_both_at_once(qkv):
    with replace_sdpa.globally(), replace_sdpa():
        captured(*qkv)
        F.scaled_dot_product_attention(*qkv)
    assert report() == {"sage_aot": 2}


@pytest.mark.parametrize("replaced", [replace_sdpa, replace_sdpa.globally])
def test_the_hosts_own_attention_is_torchs(qkv, replaced):
    """A host's fallback calls torch's function, which is replaced: the call is decided about once."""
    def host():
        return F.scaled_dot_product_attention(*qkv)

    expected = torchs(*qkv)
    with replaced():
        assert torch.equal(attend(HostCall(*qkv, dropout=0.5), host), expected)
        assert report() == {"dropout": 1}
        with audit() as calls:
            attend(HostCall(*qkv), host)
        assert len(calls) == 1 and calls[0].accuracy == measure(attend(HostCall(*qkv), host), expected)
        with pytest.raises(KeyError):
            attend(HostCall(*qkv, dropout=0.5), lambda: {}["missing"])
        F.scaled_dot_product_attention(*qkv)
    assert report() == {"dropout": 2, "sage_aot": 3}


@pytest.mark.parametrize("replaced", [replace_sdpa, replace_sdpa.globally])
def test_hosts_within_hosts(qkv, replaced):
    def host():
        attend(HostCall(*qkv, dropout=0.5), lambda: None)
        return F.scaled_dot_product_attention(*qkv)

    with replaced():
        attend(HostCall(*qkv, dropout=0.5), host)
    assert report() == {"dropout": 2}


def test_other_threads_are_served_while_a_host_computes(qkv):
    with replace_sdpa.globally():
        attend(HostCall(*qkv, dropout=0.5), lambda: in_a_thread(lambda: F.scaled_dot_product_attention(*qkv)))
    assert report() == {"dropout": 1, "sage_aot": 1}


@pytest.mark.parametrize("replaced", [replace_sdpa, replace_sdpa.globally, nullcontext])
def test_masks_of_subclasses_compute_themselves(exact, qkv, replaced):
    q, k, v = qkv[0][:, :, :30], *qkv[1:]
    bias = causal_lower_right(30, 40)
    expected = captured(q, k, v, bias, scale=0.3)
    with replaced():
        out = F.scaled_dot_product_attention(q, k, v, bias, scale=0.3)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(sdpa(q, k, v, bias, scale=0.3), expected, rtol=0, atol=1e-5)
    assert report()["a mask of a subclass"] == (1 if replaced is nullcontext else 2)
    with replaced():
        torch.testing.assert_close(captured(q, k, v, bias, scale=0.3), expected, rtol=0, atol=1e-5)
        by_host = attend(HostCall(q, k, v, dropout=0.5),
                         lambda: F.scaled_dot_product_attention(q, k, v, bias, scale=0.3))
        torch.testing.assert_close(by_host, expected, rtol=0, atol=1e-5)


def test_a_decorator_has_parentheses():
    with pytest.raises(ArgumentError, match="replace_sdpa: expected no argument, got .*; .* write @replace_sdpa"):
        @replace_sdpa
        def work():
            pass


@pytest.mark.parametrize("work", ["def work(): yield", "async def work(): pass", "async def work(): yield"])
def test_functions_that_run_later_are_refused(work):
    exec(work, made := {})
    with pytest.raises(ArgumentError, match="replace_sdpa: .*got <function work at .*>, which runs later; enter"):
        replace_sdpa()(made["work"])


def test_torch_before_grouped_heads(monkeypatch, qkv):
    """torch 2.4 has no enable_gqa."""
    def of_torch_24(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None):
        return query + (scale or 0)

    monkeypatch.setattr(integration, "_TORCHS", of_torch_24)
    assert torch.equal(sdpa(*qkv, dropout_p=0.5), qkv[0])
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    with use(Policy()):
        assert torch.equal(sdpa(*qkv, scale=2.0), qkv[0] + 2)
        assert torch.equal(sdpa(*few_queries()), few_queries()[0])


@pytest.mark.parametrize("when", ["faster", "possible"])
def test_exported_for_any_length(when):
    """torch.export traces with tensors of a subclass: the call is torch's, whatever the policy."""
    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return sdpa(q, k, v, scale=0.3)

    length = torch.export.Dim("length", min=2, max=2**20)
    with use(Policy(when)):
        exported = torch.export.export(Model(), tuple(torch.randn(3, 1, 2, 50, 64)), dynamic_shapes=({2: length},) * 3)
    q, k, v = torch.randn(3, 1, 2, 9000, 64)
    torch.testing.assert_close(exported.module()(q, k, v), captured(q, k, v, scale=0.3), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("replaced", "strict", "served"), [
    (False, False, False), (False, True, True), (True, False, False), (True, True, False)])
def test_which_exported_calls_are_served(replaced, strict, served):
    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return F.scaled_dot_product_attention(q, k, v) if replaced else sdpa(q, k, v)

    with use(Policy("possible")), replace_sdpa():
        program = torch.export.export(Model(), tuple(torch.randn(3, 1, 2, 50, 64)), strict=strict)
    targets = {node.target for node in program.graph.nodes}
    assert (torch.ops.sage_aot.attn.default in targets) == served
    assert (torch.ops.aten.scaled_dot_product_attention.default in targets) != served


def test_a_traced_call_has_no_number_of_the_trace(exact, qkv):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch.jit, and of branches by shapes
        traced = torch.jit.trace(lambda *args: sdpa(*args), qkv)
    torch.testing.assert_close(traced(*qkv), captured(*qkv), rtol=0, atol=1e-5)


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


MATH, FLASH, EFFICIENT = SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION


@pytest.mark.parametrize(("backends", "ours"), [
    (MATH, False), ([MATH], False), (FLASH, True), ([MATH, EFFICIENT], True), (SDPBackend.CUDNN_ATTENTION, True)],
    ids=str)
@pytest.mark.parametrize("otherwise", ["host", "raise"])
def test_torchs_exact_attention_is_torchs(qkv, backends, ours, otherwise):
    with sdpa_kernel(MATH):
        exact = captured(*qkv)
    with use(Policy("possible", otherwise)), replace_sdpa():
        with sdpa_kernel(backends):
            found = F.scaled_dot_product_attention(*qkv)
        assert torch.equal(found, exact) != ours
        assert report() == ({SERVED: 1} if ours else {EXACT: 1})
        F.scaled_dot_product_attention(*qkv)
    assert served_calls() == 1 + ours, "the context is over"


def test_torchs_exact_attention_in_compiled_code(qkv):
    """Both ways to ask for it: around what is compiled, and inside it, where what follows is served again."""
    def both(q, k, v):
        with sdpa_kernel(MATH):
            out = sdpa(q, k, v)
        return out, sdpa(q, k, v)

    with sdpa_kernel(MATH):
        exact = captured(*qkv)
        assert torch.equal(torch.compile(sdpa, backend="eager", fullgraph=True)(*qkv), exact)
    torch.compiler.reset()
    found, after = torch.compile(both, backend="eager", fullgraph=True)(*qkv)
    assert torch.equal(found, exact) and torch.equal(after, sdpa(*qkv)) and not torch.equal(after, exact)


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
    for module in (cuda_device, explaining):
        monkeypatch.setattr(module, "default_driver", lambda: SimpleNamespace(cuda=13000))


@pytest.mark.kernels("sm80", "sm90")
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_a_gpu_with_kernels_is_no_error(monkeypatch, capability):
    gpu_here(monkeypatch, capability)
    with replace_sdpa(), replace_sdpa.globally():
        pass


def test_the_gpu_at_hand_is_asked(monkeypatch):
    gpu_here(monkeypatch, (7, 5))
    with pytest.raises(UnsupportedError, match="no kernels for .* compute capability 7.5"):
        _rules.check_gpu()
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    _rules.check_gpu()  # a trace cannot ask


@pytest.mark.parametrize(("options", "expected"), [
    ({}, (False, False)), ({"is_causal": True}, (False, True)), ({"attn_mask": MASK}, (True, False))], ids=str)
def test_what_small_means_depends_on_the_mask(monkeypatch, qkv, options, expected):
    asked = []
    monkeypatch.setattr(integration, "route", lambda q, k, *mask: asked.append(mask))
    sdpa(*qkv, **options)
    assert asked == [expected]


def few_queries(*, keys=2048, headdim=64, v_headdim=64, kv_heads=4, dtype=torch.bfloat16, grad=False):
    q, k, v = (torch.ones(1, heads, rows, channels, dtype=dtype) for heads, rows, channels in (
        (4, 16, headdim), (kv_heads, keys, headdim), (kv_heads, keys, v_headdim)))
    return q.requires_grad_(grad), k, v


@pytest.mark.parametrize(("tensors", "options", "torch_says", "flashed"), [
    ({}, {}, {}, True), ({"kv_heads": 2}, {"enable_gqa": True}, {}, True),
    ({"headdim": 32, "v_headdim": 32}, {}, {}, True), ({"kv_heads": 2}, {}, {}, False), ({"keys": 2047}, {}, {}, False),
    ({"headdim": 60, "v_headdim": 60}, {}, {}, False), ({"grad": True}, {}, {}, False),
    ({"dtype": torch.float32}, {}, {}, False), ({}, {"is_causal": True}, {}, False),
    ({}, {"attn_mask": torch.ones(1, 1, 1, 2048).bool()}, {}, False), ({}, {"dropout_p": 0.5}, {}, False),
    ({}, {}, {"is_cuda": False}, False), ({}, {}, {"takes_it": False}, False),
    ({}, {}, {"is_autocast_enabled": True}, False), ({}, {}, {"enabled": False}, False),
    ({}, {}, {"is_transformed": True}, False)], ids=str)
def test_few_queries_run_by_flash(monkeypatch, tensors, options, torch_says, flashed):
    """A GPU does so where torch would choose cuDNN: both ways are stand-ins here."""
    says = {"is_cuda": True, "takes_it": True, "is_autocast_enabled": False, "enabled": True, "is_transformed": False,
            **torch_says}

    def by_flash(q, k, v, scale):
        if not says["takes_it"]:
            raise RuntimeError("FlashAttention expects something else")
        ran.append(f"flash, {scale}")
        return (None if ran[1:] else q,)

    monkeypatch.setattr(torch.Tensor, "is_cuda", says["is_cuda"])
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *device: says["is_autocast_enabled"])
    monkeypatch.setattr(integration, "_peek", lambda: says["is_transformed"] or None)
    monkeypatch.setattr(torch, "_scaled_dot_product_flash_attention", by_flash)
    ran = []
    monkeypatch.setattr(integration, "_TORCHS", lambda *args, **options: ran.append("torch's choice"))
    before = torch.backends.cuda.flash_sdp_enabled()
    torch.backends.cuda.enable_flash_sdp(says["enabled"])
    try:
        with use(Policy()):
            for _ in range(2):  # the second call finds its route
                sdpa(*few_queries(**tensors), scale=0.3, **options)
                assert ran == ["flash, 0.3" if flashed else "torch's choice"]
                ran.clear()
    finally:
        torch.backends.cuda.enable_flash_sdp(before)
    assert report() == {SLOWER if says["is_cuda"] else "tensors on the CPU": 2}


@pytest.mark.parametrize("options", [{"is_causal": True}, {"scale": 0.3}, {"attn_mask": MASK}, {"enable_gqa": True},
                                     {"scale": 0.3, "enable_gqa": True}], ids=str)
def test_calls_with_a_route_are_torchs_whole(monkeypatch, qkv, options):
    q, k, v = qkv
    k, v = (x[:, :2] for x in (k, v)) if "enable_gqa" in options else (k, v)
    expected = captured(q, k, v, **options)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    with use(Policy()):
        for _ in range(2):
            assert torch.equal(sdpa(q, k, v, **options), expected)
    assert report() == {SLOWER: 2}


@pytest.mark.parametrize(("of_q", "of_k", "options"), [
    ((2, 4, 40, 64), (2, 4, 40, 64), {}), ((1, 8, 40, 64), (1, 4, 40, 64), {}), ((1, 4, 41, 64), (1, 4, 40, 64), {}),
    ((1, 4, 40, 32), (1, 4, 40, 32), {}), ((1, 4, 40, 64), (1, 2, 40, 64), {}), ((1, 4, 40, 64), (1, 4, 41, 64), {}),
    ((1, 4, 40, 64), (1, 4, 40, 64), {"attn_mask": torch.ones(1, 1, 1, 40).bool()}),
    ((1, 4, 40, 64), (1, 4, 40, 64), {"is_causal": True})], ids=str)
@pytest.mark.parametrize("faster", [False, True])
def test_each_kind_of_call_is_asked_about_once(exact, monkeypatch, faster, of_q, of_k, options):
    """The look-up in front of `route` knows what `route` kept, of calls that are served too, and of no other call."""
    asked, threshold = [], (0, 0 if faster else 1e15)
    for module in (_routes, _rules):
        monkeypatch.setattr(module, "threshold_of", lambda device, kind, headdim: threshold)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(integration, "route", lambda *call: asked.append(call) or _routes.route(*call))
    base, other = (torch.ones(1, 4, 40, 64),) * 3, (torch.ones(of_q), torch.ones(of_k), torch.ones(of_k))
    with use(Policy()):
        for _ in range(2):
            sdpa(*base)
            sdpa(*other, enable_gqa=True, **options)
    assert len(asked) == 2 and report() == {SERVED if faster else SLOWER: 4}


@pytest.mark.parametrize("wrong", [{"is_causal": 0}, {"dropout_p": None}, {"scale": "1"}], ids=str)
def test_what_torch_refuses_is_refused_of_calls_with_a_route(monkeypatch, qkv, wrong):
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    with use(Policy()):
        sdpa(*qkv)
        with pytest.raises(TypeError, match=f"argument '{min(wrong)}'.* must be"):
            sdpa(*qkv, **wrong)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_without_a_shape_have_no_route(monkeypatch):
    nested = torch.nested.nested_tensor([torch.ones(2, 3, 64), torch.ones(2, 5, 64)])  # strided: its type is Tensor
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    with use(Policy()):
        assert torch.equal(sdpa(nested, nested, nested).to_padded_tensor(0.0),
                           captured(nested, nested, nested).to_padded_tensor(0.0))
    assert report() == {"tensors that are nested, sparse or of a subclass": 1}


def test_compiled_calls_learn_no_route(monkeypatch, qkv):
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    with use(Policy()):
        compiled = torch.compile(lambda *args: sdpa(*args), backend="eager", fullgraph=True, dynamic=True)
        for length in (40, 30, 20):
            short = [x[:, :, :length] for x in qkv]
            torch.testing.assert_close(compiled(*short), captured(*short))
        assert not _policy.routes and report() == {}


# --- torch's flash attention ------------------------------------------------------------------------------------------


class FlashOfTheCpu(_Flash):
    """The operator that torch sends CPU tensors to. It takes a mask, and returns the output and log-sum-exp alone."""

    OPERATOR, KEY = "_scaled_dot_product_flash_attention_for_cpu", "CPU"

    def _attention(self, keys, query, key, value, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None):
        call = HostCall(query, key, value, attn_mask, is_causal, scale, dropout_p, grouped=True, bottom_right=True,
                    beyond=_training())
        return self._attend(call, lambda: self._torchs.call_boxed(
            keys, query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale))

    def _outputs(self, call, out, lse):
        return super()._outputs(call, out, lse)[:2]


@pytest.fixture
def flash(monkeypatch):
    """Registered implementation that torch activates and restores, for the CPU's operator."""
    monkeypatch.setattr("sage_aot.integrations.torch._Flash", FlashOfTheCpu)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
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
    out, lse = operator(*qkv, 0.0, True, scale=0.3)
    torch.nn.attention.restore_flash_attention_impl()
    torch.testing.assert_close((out, lse), operator(*qkv, 0.0, True, scale=0.3), rtol=0, atol=1e-5)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (1, 2, 0, 3), (2, 0, 1, 3), (0, 1, 2, 3, "part")],
                         ids=str)
def test_the_output_of_the_operator_has_torchs_strides(exact, flash, order):
    """Strides are as compiled code expects them."""
    sizes = [(2, 4, 40, 64)[dim] for dim in order[:4]]
    whole = torch.randn(3, *sizes[:3], 128 if order[4:] else 64)[..., :64]
    q, k, v = (x.permute([order[:4].index(dim) for dim in range(4)]) for x in whole)
    assert q.shape == (2, 4, 40, 64)
    out = captured(q, k, v)
    assert served_calls() == 1 and out.stride() == torch.empty_like(q).stride()
    torch.nn.attention.restore_flash_attention_impl()
    torch.testing.assert_close(out, captured(q, k, v), rtol=0, atol=1e-5)


def gradients(work, qkv):
    q, k, v = (x.clone().requires_grad_() for x in qkv)
    work(q, k, v).square().sum().backward()
    return [x.grad for x in (q, k, v)]


@pytest.mark.parametrize("compiled", [False, True])
def test_training_with_torchs_flash_attention_is_torchs(flash, qkv, compiled):
    def work(q, k, v):
        return captured(q, k, v, scale=0.3)

    found = gradients(torch.compile(work, backend="aot_eager") if compiled else work, qkv)
    assert report() == {"torch.no_grad, in which compiled training runs too" if compiled else "gradients": 1}
    torch.nn.attention.restore_flash_attention_impl()
    assert all(torch.equal(one, other) for one, other in zip(found, gradients(work, qkv)))


def test_small_calls_of_torchs_flash_attention_are_torchs(monkeypatch, flash, qkv):
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    with use(Policy()):
        out, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*qkv, 0.0, True)
    monkeypatch.setattr(torch.Tensor, "is_cuda", False)
    torch.nn.attention.restore_flash_attention_impl()
    assert torch.equal(out, captured(*qkv, is_causal=True)) and report() == {SLOWER: 1}


def test_inference_with_torchs_flash_attention_is_served(exact, flash, qkv):
    captured(*qkv)
    with torch.inference_mode():
        captured(*qkv)
        torch.compile(lambda *args: captured(*args), backend="aot_eager")(*qkv)
    assert report() == {"sage_aot": 3}


def test_all_outputs_of_the_operator(qkv):
    """Number, dtypes and sizes as torch's own."""
    q, k, v = qkv[0][:, :, :30], *qkv[1:]
    meta = torch.ops.aten._scaled_dot_product_flash_attention(*(x.to("meta") for x in (q, k, v)))
    ours = _Flash._outputs(None, HostCall(q, k, v), torch.empty_like(q), torch.empty(q.shape[:3]))
    expected, found = ([(x.shape, x.dtype) if isinstance(x, torch.Tensor) else x for x in outputs]
                       for outputs in (meta, ours))
    assert found == expected


def test_the_operator_of_cuda_takes_the_calls_of_inference(exact, qkv):
    """The operator's kernel is not called here: a stand-in says what it was called with."""
    flash = object.__new__(_Flash)
    flash._torchs = SimpleNamespace(call_boxed=lambda *args, **options: (args, options))
    keys = object()
    asked = (keys, *qkv, 0.0, True, True), {"scale": 0.3}
    assert flash._attention(*asked[0], **asked[1]) == asked
    with torch.no_grad():
        args, options = flash._attention(keys, *qkv)
    assert args[4:] == (0.0, False, False) and options == {"scale": None}
    assert report() == {"a debug mask": 1, "torch.no_grad, in which compiled training runs too": 1}
    out, *_, debug_mask = flash._attention(keys, *qkv, 0.0, True, scale=0.3)
    torch.testing.assert_close(out, captured(*qkv, is_causal=True, scale=0.3), rtol=0, atol=1e-5)
    assert served_calls() == 1 and debug_mask.numel() == 0


def test_a_torch_without_cuda(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(UnsupportedError, match="register_flash: expected a CUDA build of torch, got"):
        register_flash()


def test_a_torch_without_the_registration(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delattr(torch.nn.attention, "register_flash_attention_impl")
    with pytest.raises(UnsupportedError, match="register_flash: expected torch.nn.* without; use replace_sdpa"):
        register_flash()


@pytest.mark.parametrize("shape", [(1, 2, 32), (1, 4, 32)], ids=["heads", "grouped"])
def test_a_compiled_causal_call_takes_every_length(shape):
    """One query, which sees every key, included."""
    torch._dynamo.reset()
    batch, heads, channels = shape

    def causal(q, k, v):
        return sdpa(q, k, v, is_causal=True, enable_gqa=True)

    compiled = torch.compile(causal, backend="aot_eager", fullgraph=True)
    with use(Policy(when="possible", otherwise="raise")), torch.no_grad():
        for length in (70, 33, 1, 50):
            q, (k, v) = torch.randn(batch, heads, length, channels), torch.randn(2, batch, 2, length, channels)
            torch.testing.assert_close(compiled(q, k, v), causal(q, k, v), rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.torch.jit.script.* is deprecated", "ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("derivative", [
    lambda call, x, t: torch.func.grad(lambda y: call(y).square().sum())(x),
    lambda call, x, t: torch.func.vjp(call, x)[1](t)[0],
    lambda call, x, t: torch.func.grad(lambda w: call(x * w).square().sum())(torch.tensor(2.0))],
    ids=["grad", "vjp", "grad of what comes before"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_derivatives_are_those_of_the_hosts_attention(qkv, derivative, compiled):
    torch._dynamo.reset()
    q, k, v = qkv
    tangent = torch.randn_like(q)
    expected = derivative(lambda x: captured(x, k, v), q, tangent)

    def found(x, t):
        return derivative(lambda y: F.scaled_dot_product_attention(y, k, v), x, t)

    with use(Policy(when="possible")), replace_sdpa.globally():
        call = torch.compile(found, backend="aot_eager", fullgraph=True) if compiled else found
        torch.testing.assert_close(call(q, tangent), expected)


@pytest.mark.filterwarnings("ignore:.torch.jit.script.* is deprecated")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_forward_derivatives_are_the_hosts(qkv, compiled):
    """The host has a forward derivative with the backend MATH."""
    torch._dynamo.reset()
    q, k, v = qkv
    tangent = torch.randn_like(q)

    def attention(x):
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return F.scaled_dot_product_attention(x, k, v)

    def jvp(x, t):
        return torch.func.jvp(attention, (x,), (t,))[1]

    expected = jvp(q, tangent)
    with use(Policy(when="possible")), replace_sdpa.globally():
        found = (torch.compile(jvp, backend="aot_eager") if compiled else jvp)(q, tangent)
    torch.testing.assert_close(found, expected)
