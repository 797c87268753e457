"""K and V that are quantized once, on the CPU: the public calls, the operators, and their errors."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import re

import pytest
import torch

import sage_aot
from sage_aot._backends.emulation.backend import EmulationBackend
from sage_aot._call import ops
from sage_aot._call.backends import default_library, handing
from sage_aot._kernels.axes import AXES
from sage_aot._problem.options import OPTIONS
from sage_aot._tools import reference

CHANGES = [{}, {"qk": "int4"}, {"smooth_q": True, "smooth_v": True}, {"rotate": True, "smooth_k": False},
           {"qk": "int4", "clip": False, "smooth_q": False}, {"pv_accum": "two_level_f16"}]


def draw(q_heads=4, kv_heads=2, queries=5, keys=70, layout="HND", dtype=torch.bfloat16, headdim=40):
    generator = torch.Generator().manual_seed(0)
    tensors = (torch.randn(2, heads, rows, headdim, generator=generator, dtype=dtype)
               for heads, rows in ((q_heads, queries), (kv_heads, keys), (kv_heads, keys)))
    return [x if layout == "HND" else x.transpose(1, 2).contiguous() for x in tensors]


def mask_of(has_mask, keys=70):
    return torch.rand(2, keys, generator=torch.Generator().manual_seed(1)) > 0.4 if has_mask else None


# --- results ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("has_mask", [False, True])
@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("options", CHANGES, ids=str)
def test_bits_of_the_direct_call(options, layout, has_mask, is_causal, queries):
    q, k, v = draw(queries=queries, layout=layout)
    of_call = {"layout": layout, "is_causal": is_causal, "scale": 0.3, "return_lse": True}
    options = {"p": "exp2", **options}  # for calls without a log-sum-exp too
    key_mask = mask_of(has_mask)
    out, lse = sage_aot.attn(q, k, v, key_mask=key_mask, **of_call, **options)
    kv = sage_aot.quantize_kv(k, v, key_mask=key_mask, layout=layout, **options)
    for tensor in (k, v, key_mask):
        if tensor is not None:
            tensor.zero_()  # later writes do not reach what was quantized
    given = torch.full_like(q, float("nan"))
    for result, of_rows in (sage_aot.attn(q, kv, **of_call), sage_aot.attn(q, kv, out=given, **of_call)):
        assert torch.equal(result, out) and torch.equal(of_rows, lse)
    assert torch.equal(given, out)
    del of_call["return_lse"]
    assert torch.equal(sage_aot.attn(q, kv, **of_call), out)


def test_the_layouts_of_kv_and_of_q_may_differ():
    q, k, v = draw()
    kv = sage_aot.quantize_kv(k.transpose(1, 2), v.transpose(1, 2), layout="NHD", smooth_q=True)
    assert torch.equal(sage_aot.attn(q, kv), sage_aot.attn(q, k, v, smooth_q=True))


def test_no_keys_and_no_queries():
    q, k, v = draw(keys=0)
    out, lse = sage_aot.attn(q, sage_aot.quantize_kv(k, v), return_lse=True)
    assert not out.any() and (lse == -torch.inf).all()
    q, k, v = draw(queries=0)
    assert sage_aot.attn(q, sage_aot.quantize_kv(k, v)).shape == q.shape


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_other_dtypes(dtype):
    q, k, v = draw(dtype=dtype)
    kv = sage_aot.quantize_kv(k, v)
    assert kv.dtype == dtype
    assert torch.equal(sage_aot.attn(q, kv), sage_aot.attn(q, k, v))


def test_what_it_knows():
    _, k, v = draw()
    kv = sage_aot.quantize_kv(k, v, key_mask=mask_of(True), qk="int4")
    assert (kv.shape, kv.dtype, kv.arch, kv.has_key_mask) == ((2, 2, 70, 40), torch.bfloat16, "sm89", True)
    assert (kv.options.qk, kv.options.smooth_q, kv.options.pv_accum, kv.options.p) == (
        "int4", True, "two_level_f32", "exp2")
    assert kv.quantizer.startswith("sage_quant_sm89_d64_qkint4_pve4m3 (") and kv.device == k.device
    assert kv.nbytes == 2 * 4 * k.numel() + 2 * 70 + k.nbytes  # f32 on the CPU, the mask, a copy for a smoothed q
    assert repr(kv) == f"QuantizedKV([2, 2, 70, 40] torch.bfloat16 on cpu, sm89, {kv.nbytes} bytes, key mask)"
    assert sage_aot.quantize_kv(k, v, qk="int4", smooth_q=False).nbytes == 2 * 4 * k.numel()
    with pytest.raises(AttributeError):
        kv.arch = "sm90"


def test_autocast_casts_q_as_it_cast_k_and_v():
    q, k, v = draw(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        kv = sage_aot.quantize_kv(k, v, smooth_q=True)
        out = sage_aot.attn(q, kv)
        assert torch.equal(out, sage_aot.attn(q, k, v, smooth_q=True))
    assert (kv.dtype, out.dtype) == (torch.bfloat16, torch.bfloat16)
    assert torch.equal(sage_aot.attn(q.bfloat16(), kv), out)


# --- one query a head -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_one_query_takes_the_heads_of_a_group_as_rows(layout):
    q, k, v = draw(q_heads=6, queries=1, layout=layout)
    key_mask = mask_of(True)
    out, lse = sage_aot.attn(q, k, v, layout=layout, key_mask=key_mask, return_lse=True)
    heads_first = [x if layout == "HND" else x.transpose(1, 2) for x in (q, k, v)]
    by_group = heads_first[0].reshape(2, 2, 3, 40)
    expected, expected_lse = sage_aot.attn(by_group, *heads_first[1:], key_mask=key_mask, return_lse=True)
    assert torch.equal(out, expected.reshape(q.shape)) and torch.equal(lse, expected_lse.reshape(2, 6, 1))
    assert out.is_contiguous()
    given = torch.empty(2, *q.shape[1:3], 43, dtype=q.dtype)[..., 1:-2]
    assert sage_aot.attn(q, k, v, layout=layout, key_mask=key_mask, p="exp2", out=given) is given
    assert torch.equal(given, out)


@pytest.mark.parametrize("options", [{}, {"rotate": True}, {"smooth_q": True}, {"qk": "int4"}], ids=str)
def test_one_query_is_as_exact_as_with_a_head_of_its_own(options):
    """Heads are no rows of one where q is smoothed: what is left of a row less its own mean is nothing to round."""
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(1, heads, rows, 128, generator=generator) for heads, rows in ((8, 1), (1, 512), (1, 512)))
    q *= 2
    expected, _ = reference.attention(q, k, v)

    def error(out):
        return reference.measure(out, expected).relative_l1

    own_head = torch.cat([sage_aot.attn(q[:, h:h + 1], k, v, **options) for h in range(8)], 1)
    assert error(sage_aot.attn(q, k, v, **options)) < 1.15 * error(own_head)


@pytest.mark.parametrize("is_causal", [False, True])
def test_one_query_sees_every_key(is_causal):
    """The query sees the last key, too, by whose value alone the output is large."""
    q, k, v = draw(queries=1)
    v[:, :, -1] = 100.0
    expected, _ = reference.attention(q, k, v)
    assert reference.measure(sage_aot.attn(q, k, v, is_causal=is_causal), expected).relative_l1 < 0.06


def test_one_query_of_no_batch_entries():
    q, k, v = (x[:0] for x in draw(queries=1))
    out, lse = sage_aot.attn(q, k, v, return_lse=True)
    assert out.shape == q.shape and lse.shape == (0, 4, 1)


def test_one_query_under_autocast_with_an_output():
    q, k, v = draw(queries=1, dtype=torch.float32)
    out = torch.empty_like(q, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        assert sage_aot.attn(q, k, v, out=out) is out
        assert torch.equal(out, sage_aot.attn(q, k, v))


def test_one_query_with_wrong_tensors_gets_the_errors_of_others():
    q, k, v = draw(queries=1)
    with pytest.raises(sage_aot.ArgumentError, match="out: expected shape"):
        sage_aot.attn(q, k, v, out=q[:, :2].clone())
    with pytest.raises(sage_aot.ArgumentError, match="one batch size, got 2 for q and 1 for k"):
        sage_aot.attn(q, k[:1], v[:1])
    with pytest.raises(sage_aot.ArgumentError, match="four dimensions"):
        sage_aot.attn(q, k[0], v[0])


# --- operators --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("smooth_q", [False, True])
def test_opcheck(smooth_q):
    q, k, v = draw()
    torch.library.opcheck(ops.quantize_kv, (k, v, mask_of(True)), {"smooth_q": smooth_q})
    kv = sage_aot.quantize_kv(k, v, key_mask=mask_of(True), smooth_q=smooth_q)
    arguments = (*kv.arguments(q), None, None, None)  # no sinks and no masks
    for op in (ops.attn_kv.plain, ops.attn_kv.lse):
        torch.library.opcheck(op, arguments, {"smooth_q": smooth_q})
    for op in (ops.attn_kv.out, ops.attn_kv.lse_out):
        torch.library.opcheck(op, (*arguments, torch.empty_like(q)), {"smooth_q": smooth_q})


@pytest.mark.parametrize("queries", [1, 5])
def test_compiled_without_a_graph_break(queries):
    def call(q, k, v, kv):
        return sage_aot.attn(q, kv) + sage_aot.attn(q, sage_aot.quantize_kv(k, v, smooth_q=True))

    q, k, v = draw(queries=queries)
    kv = sage_aot.quantize_kv(k, v)
    assert torch.equal(torch.compile(call, fullgraph=True, backend="aot_eager")(q, k, v, kv), call(q, k, v, kv))


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("change", "message"), [
    (lambda q, k, v, kv: sage_aot.attn(q, kv, v), "v: expected None with a QuantizedKV, got Tensor"),
    (lambda q, k, v, kv: sage_aot.attn(q, kv, key_mask=mask_of(True)), "key_mask: expected None"),
    (lambda q, k, v, kv: sage_aot.attn(q, kv, qk="int4"), "qk: k and v were quantized with 'int8', got 'int4'"),
    (lambda q, k, v, kv: sage_aot.attn(q, kv, p="exp2"), "p: k and v were quantized with 'linear', got 'exp2'"),
    (lambda q, k, v, kv: sage_aot.attn(q, kv, smooth_k=1), "smooth_k: expected True or False, got 1"),
    (lambda q, k, v, kv: sage_aot.attn(q, kv, smooth_k=False), "smooth_k: k and v were quantized with True"),
    (lambda q, k, v, kv: sage_aot.attn(q.half(), kv), "q must have the dtype"),
    (lambda q, k, v, kv: sage_aot.attn(q[:1], kv), "q must have the batch size"),
    (lambda q, k, v, kv: sage_aot.attn(q[..., :8], kv), "q must have the batch size and the head dim"),
    (lambda q, k, v, kv: sage_aot.attn(q[:, :3], kv), "the heads of q must be a multiple .* got 3 and 2"),
    (lambda q, k, v, kv: sage_aot.attn(q[0], kv), "q: expected four dimensions"),
    (lambda q, k, v, kv: sage_aot.attn(q, kv, out=q[:1]), "out: expected shape"),
    (lambda q, k, v, kv: sage_aot.attn(q, k), "v: expected a tensor with k, got None"),
    (lambda q, k, v, kv: sage_aot.quantize_kv(kv, v), "k: expected a torch.Tensor, got a QuantizedKV"),
    (lambda q, k, v, kv: sage_aot.attn_varlen(q[0], kv, None, *[torch.zeros(2, dtype=torch.int32)] * 2, 1, 1),
     "k: expected a tensor with sequences"),
    (lambda q, k, v, kv: sage_aot.attn(q.requires_grad_(), kv), "q requires grad"),
    (lambda q, k, v, kv: sage_aot.quantize_kv(k, v[:, :1]), "k and v must have one shape"),
    (lambda q, k, v, kv: sage_aot.quantize_kv(k, v.half()), "k and v must have one dtype and one device"),
    (lambda q, k, v, kv: sage_aot.quantize_kv(k[0], v[0]), "k: expected four dimensions"),
    (lambda q, k, v, kv: sage_aot.quantize_kv(k.double(), v.double()), "k: expected torch.float16"),
    (lambda q, k, v, kv: sage_aot.quantize_kv(k, None), "v: expected a torch.Tensor"),
    (lambda q, k, v, kv: sage_aot.quantize_kv(k.to("meta"), v), "k and v must have one dtype and one device"),
    (lambda q, k, v, kv: sage_aot.quantize_kv(k, v, qk="int5"), "qk: expected"),
    (lambda q, k, v, kv: sage_aot.quantize_kv(k, v, key_mask=[True]), "key_mask: expected a torch.Tensor"),
    (lambda q, k, v, kv: sage_aot.quantize_kv(k, v, key_mask=mask_of(True, 69)), "key_mask: expected shape"),
    (lambda q, k, v, kv: sage_aot.quantize_kv(k.requires_grad_(), v), "k requires grad"),
    (lambda q, k, v, kv: kv.to("cuda"), "stays on its device, cpu"),
    (lambda q, k, v, kv: pickle.dumps(kv), "cannot be pickled or copied"),
    (lambda q, k, v, kv: copy.deepcopy(kv), "cannot be pickled or copied"),
])
def test_errors(change, message):
    q, k, v = draw()
    kv = sage_aot.quantize_kv(k, v)
    with pytest.raises(sage_aot.ArgumentError, match=message):
        change(q, k, v, kv)


def test_kernels_of_another_arch_do_not_read_it():
    q, k, v = draw()
    kv = sage_aot.quantize_kv(k, v, p="exp2")
    other = EmulationBackend(default_library().manifest, "sm120")
    message = "by the kernel in use, sage_quant_sm120_.*, got sage_quant_sm89_"
    with handing(other), pytest.raises(sage_aot.ArgumentError, match=message):
        sage_aot.attn(q, kv)


@pytest.mark.parametrize("arch", ["sm80", "sm120"])
def test_another_arch_without_kernels_of_these_options_does_not_read_it(arch):
    q, k, v = draw()
    kv = sage_aot.quantize_kv(k, v, p="linear")
    message = f"quantized by a kernel of {arch}, got sage_quant_sm89_.*; quantize k and v again"
    with handing(EmulationBackend(default_library().manifest, arch)):
        with pytest.raises(sage_aot.ArgumentError, match=message):
            sage_aot.attn(q, kv)
        assert re.search(message, sage_aot.supports(q, kv))


def test_kernels_of_one_mask_alone():
    """Kernels are as a user builds them who needs no other mask."""
    manifest = default_library().manifest
    causal = {name: record for name, record in manifest.kernels.items() if "_full_" not in name}
    q, k, v = draw()
    with handing(EmulationBackend(dataclasses.replace(manifest, kernels=causal), "sm89")):
        out = sage_aot.attn(q, sage_aot.quantize_kv(k, v), is_causal=True)
    assert torch.equal(out, sage_aot.attn(q, k, v, is_causal=True))


@pytest.mark.parametrize("change", [
    lambda kv: {"_k": None}, lambda kv: {"_k": kv._k[..., :3]}, lambda kv: {"_data": kv._data[1:]},
    lambda kv: {"_data": kv._data.float()}])
def test_operators_refuse_what_quantize_kv_did_not_return(change):
    q, k, v = draw()
    kv = sage_aot.quantize_kv(k, v, smooth_q=True)
    arguments = (*dataclasses.replace(kv, **change(kv)).arguments(q), None, None, None)
    with pytest.raises(sage_aot.ArgumentError, match="the operators attn_kv take what quantize_kv returned"):
        ops.attn_kv.plain(*arguments, smooth_q=True)


def test_supports():
    q, k, v = draw()
    kv = sage_aot.quantize_kv(k, v)
    assert sage_aot.supports(q, kv) is None
    assert "q must have the dtype" in sage_aot.supports(q.half(), kv)
    assert "v: expected None" in sage_aot.supports(q, kv, v)
    assert "k: expected a tensor with sequences" in sage_aot.supports(
        q[0], kv, cu_seqlens_q=torch.zeros(2, dtype=torch.int32), cu_seqlens_k=torch.zeros(2, dtype=torch.int32),
        max_seqlen_q=1, max_seqlen_k=1)
    assert "out: expected shape" in sage_aot.supports(q, kv, out=q[:1])
    with torch.autocast("cpu", torch.float16):
        assert "q must have the dtype" in sage_aot.supports(q, kv)


@pytest.mark.parametrize("name", OPTIONS)
def test_supports_and_attn_refuse_the_same_options(name):
    q, k, v = draw()
    kv = sage_aot.quantize_kv(k, v)
    for refused in (OPTIONS[name].refused, torch.ones(3), [1]):
        with pytest.raises(sage_aot.ArgumentError) as error:
            sage_aot.attn(q, kv, **{name: refused})
        assert sage_aot.supports(q, kv, **{name: refused}) == str(error.value)
        assert str(error.value).startswith(f"{name}: expected")


@pytest.mark.parametrize(("of_kv", "of_call"), [({}, {"qk": "int8"}), ({"qk": "int4"}, {"smooth_q": True}),
                                                ({"smooth_k": False}, {"smooth_k": False}),
                                                ({}, {"pv_accum": "two_level_f32"}), ({}, {"p": "linear"})],
                         ids=str)
def test_options_that_say_what_auto_said(of_kv, of_call):
    q, k, v = draw()
    kv = sage_aot.quantize_kv(k, v, **of_kv)
    assert torch.equal(sage_aot.attn(q, kv, **of_call), sage_aot.attn(q, kv))


@pytest.mark.kernels("sm90")
@pytest.mark.parametrize(("asked", "headdim", "resolved"), [
    ("auto", 64, AXES["p"][0]), ("auto", 128, AXES["p"][0]), ("auto", 256, "exp2"), ("exp2", 64, "exp2"),
    ("linear", 64, "linear")])
def test_p_is_that_of_the_kernels_in_use_for_all_calls(monkeypatch, asked, headdim, resolved):
    monkeypatch.setenv("SAGE_AOT_EMULATE", "sm90")
    q, k, v = draw(headdim=headdim)
    kv = sage_aot.quantize_kv(k, v, p=asked)
    assert kv.options.p == resolved
    for is_causal in (False, True):
        assert sage_aot.explain(q, kv, is_causal=is_causal).kernels.attn.spec.p == resolved


def test_record_stream_reaches_every_tensor():
    class Recording(torch.Tensor):
        def record_stream(self, stream):
            streams.append(stream)

    streams = []
    _, k, v = draw()
    kv = dataclasses.replace(sage_aot.quantize_kv(k, v), _data=torch.empty(3).as_subclass(Recording),
                             _k=torch.empty(3).as_subclass(Recording))
    kv.record_stream("side")
    assert streams == ["side", "side"]


@pytest.mark.kernels("sm90")
@pytest.mark.parametrize("options", [{}, {"smooth_q": True, "smooth_v": True}], ids=str)
def test_explain(options):
    q, k, v = draw()
    kv = sage_aot.quantize_kv(k, v, key_mask=mask_of(True), **options)
    direct = sage_aot.explain(q, k, v, key_mask=mask_of(True), is_causal=True, **options)
    found = sage_aot.explain(q, kv, is_causal=True)
    assert found.kernels == direct.kernels is not None and found.error is None
    with pytest.raises(sage_aot.ArgumentError, match="q must have the dtype"):
        sage_aot.explain(q.half(), kv)
    with pytest.raises(sage_aot.ArgumentError, match="v: expected None"):
        sage_aot.explain(q, kv, v)
    assert "by the kernel in use, sage_quant_sm90_" in sage_aot.explain(q, kv, capability=(9, 0)).error


def test_every_option_belongs_to_one_of_the_two_calls():
    import inspect

    from sage_aot._call.kv import OF_CALL

    parameters = inspect.signature(sage_aot.quantize_kv).parameters
    assert set(OPTIONS) - set(OF_CALL) == set(parameters) - {"k", "v", "key_mask", "layout", "pool", "tail"}
    assert all(parameters[name].default == OPTIONS[name].default for name in set(OPTIONS) & set(parameters))
