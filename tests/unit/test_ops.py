"""The torch operators: schemas, tracing, compilation, autocast, grad. On CPU tensors, which the emulation answers."""

from __future__ import annotations

import math

import pytest
import torch
import torch._dynamo.testing
from torch._subclasses.fake_tensor import FakeTensorMode

import sage_aot
from sage_aot._call import ops
from sage_aot._problem.options import Options, for_schema
from sage_aot._problem.tensors import taken_by
from sage_aot._tools import reference
from sage_aot.errors import ArgumentError

# Compiling warns of torch's own deprecations, which are not this package's.
pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning"),
              pytest.mark.filterwarnings("ignore::FutureWarning")]

NO_TENSORS = (None,) * len(taken_by("dense"))
NO_MORE = NO_TENSORS[1:]
"""Optional tensors of an operator, all of them or those behind the key mask."""

BOTTOM_RIGHT = {"is_causal": True, "scale": 0.1, "qk": "int8", "smooth_k": False}


def draw(q_shape=(2, 4, 33, 64), kv_shape=(2, 2, 47, 64), dtype=torch.bfloat16, seed=0):
    return reference.inputs("normal", q_shape, kv_shape, dtype, torch.Generator().manual_seed(seed))


def options(**changes):
    """Options as an operator takes them."""
    return for_schema(*vars(Options(**changes)).values())


def nhd(*tensors):
    return [tensor.transpose(1, 2).contiguous() for tensor in tensors]


@pytest.fixture
def fresh():
    """No compiled code of another test."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture(params=["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def compiled(request, fresh):
    """torch.compile with each backend, without graph breaks."""
    return lambda work, **more: torch.compile(work, backend=request.param, fullgraph=True, **more)


# --- the operators ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("changes", [{}, {"layout": "NHD"}, BOTTOM_RIGHT], ids=str)
@pytest.mark.parametrize("op", [*ops.attn], ids=str)
def test_opcheck(op, changes, masked):
    q, k, v = draw()
    key_mask = torch.arange(k.shape[2]).expand(2, -1) % 3 > 0 if masked else None
    if changes.get("layout") == "NHD":
        q, k, v = nhd(q, k, v)
    written = (torch.empty_like(q),) if "out" in str(op) else ()
    torch.library.opcheck(op, (q, k, v, key_mask, *NO_MORE, *written, *options(**changes)))


@pytest.mark.parametrize("op", [ops.attn.plain, ops.attn.lse], ids=str)
def test_opcheck_of_strided_tensors(op):
    fused = torch.stack([t.transpose(1, 2) for t in draw((2, 4, 33, 64), (2, 4, 33, 64))], 2)
    parts = fused.unbind(2)  # NHD, no two rows adjacent
    assert not parts[0].is_contiguous()
    torch.library.opcheck(op, (*parts, *NO_TENSORS, *options(layout="NHD")))


@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_fake_outputs_are_like_the_real_ones(layout):
    q, k, v = draw()
    q, k, v = (t.transpose(1, 2) for t in (q, k, v)) if layout == "NHD" else (q, k, v)
    real = sage_aot.attn(q, k, v, layout=layout), *sage_aot.attn(q, k, v, layout=layout, return_lse=True)
    assert all(tensor.is_contiguous() for tensor in real) and real[2].shape == (2, 4, 33)
    with FakeTensorMode() as mode:
        q, k, v = (mode.from_tensor(t) for t in (q, k, v))
        fake = sage_aot.attn(q, k, v, layout=layout), *sage_aot.attn(q, k, v, layout=layout, return_lse=True)
    for found, expected in zip(fake, real):
        assert (found.shape, found.stride(), found.dtype, found.device) == (
            expected.shape, expected.stride(), expected.dtype, expected.device)


@pytest.mark.parametrize("changes", [{"is_causal": True}, {"scale": 0.3}, {"smooth_k": False},
                                     {"pv_accum": "two_level_f16"}], ids=str)
def test_options_reach_the_operator(changes):
    q, k, v = draw()
    expected = ops.attn.plain(q, k, v, *NO_TENSORS, *options(**changes))
    assert not torch.equal(expected, ops.attn.plain(q, k, v, *NO_TENSORS, *options()))
    assert torch.equal(sage_aot.attn(q, k, v, **changes), expected)


def test_operators_raise_the_errors_of_the_call():
    q, k, v = draw()
    with pytest.raises(ArgumentError, match="q, k and v must have one head dim"):
        ops.attn.plain(q[..., :32], k, v, *NO_TENSORS, *options())
    with pytest.raises(ArgumentError, match="qk: expected 'auto', 'int8', 'int4' or 'nvfp4', got 'int5'"):
        ops.attn.plain(q, k, v, *NO_TENSORS, False, None, "HND", "int5")
    with pytest.raises(ArgumentError, match="q: expected torch.float16, .* or torch.float32, got torch.float64"):
        ops.attn.plain(q.double(), k, v, *NO_TENSORS, *options())


@pytest.mark.parametrize(("changes", "message"), [
    ({"scale": torch.tensor(0.5, requires_grad=True)},
     r"scale: expected .*, of a tensor that is differentiated pass scale.item\(\), got tensor"),
    ({"out": 3}, "out: expected a tensor like q, got int"),
    ({"q": None}, "q: expected a torch.Tensor, got NoneType"),
])
def test_the_call_refuses_what_the_schemas_would_convert_or_not_name(changes, message):
    arguments = {**dict(zip("qkv", draw())), **changes}
    with pytest.raises(ArgumentError, match=message):
        sage_aot.attn(**arguments)


# --- torch.compile ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", [{}, {"layout": "NHD", "is_causal": True}, BOTTOM_RIGHT, {"qk": "int8", "scale": 1}],
                         ids=str)
def test_compiled_equals_eager(compiled, call):
    q, k, v = draw()
    if call.get("layout") == "NHD":
        q, k, v = nhd(q, k, v)
    work = compiled(lambda q, k, v: sage_aot.attn(q, k, v, return_lse=True, **call))
    expected = sage_aot.attn(q, k, v, return_lse=True, **call)
    assert all(torch.equal(found, right) for found, right in zip(work(q, k, v), expected))


def test_compiled_between_other_operators(compiled):
    q, k, v = draw((1, 2, 20, 64), (1, 2, 20, 64))

    def work(q, k, v):
        return sage_aot.attn(q * 2, k.transpose(1, 2).contiguous().transpose(1, 2), v + 1).transpose(1, 2).flatten(2)

    assert torch.equal(compiled(work)(q, k, v), work(q, k, v))


def test_compiled_with_dynamic_shapes(compiled):
    graphs = torch._dynamo.testing.CompileCounter()  # counts graphs of the eager backend
    for work in (compiled(lambda *qkv: sage_aot.attn(*qkv, return_lse=True), dynamic=True),
                 torch.compile(lambda *qkv: sage_aot.attn(*qkv, return_lse=True), backend=graphs, fullgraph=True,
                               dynamic=True)):
        # Sizes that are equal by chance would be taken as one.
        for batch, queries, keys in ((3, 33, 47), (5, 70, 47), (3, 6, 129)):
            q, k, v = draw((batch, 4, queries, 64), (batch, 2, keys, 64), seed=queries)
            expected = sage_aot.attn(q, k, v, return_lse=True)
            assert all(torch.equal(found, right) for found, right in zip(work(q, k, v), expected))
    assert graphs.frame_count == 1


def test_marked_dimensions_stay_dynamic(fresh):
    q, k, v = draw()
    for tensor in (q, k, v):
        for dim in (0, 2):
            torch._dynamo.mark_dynamic(tensor, dim)  # raises where a check pins the size
    found = torch.compile(sage_aot.attn, backend="aot_eager", fullgraph=True)(q, k, v)
    assert torch.equal(found, sage_aot.attn(q, k, v))


@pytest.mark.parametrize("return_lse", [False, True])
def test_out_inside_compiled_code_is_written(compiled, return_lse):
    q, k, v = draw()
    expected, expected_lse = sage_aot.attn(q, k, v, p="exp2", return_lse=True)

    def work(q, k, v, out):
        result = sage_aot.attn(q, k, v, out=out, p="exp2", return_lse=return_lse)
        return (result[1] if return_lse else expected_lse), out + 1

    out = torch.full_like(q, math.nan)
    lse, after = compiled(work)(q, k, v, out)
    assert torch.equal(out, expected) and torch.equal(after, expected + 1) and torch.equal(lse, expected_lse)


def test_out_is_an_input_in_compiled_code(compiled):
    q, k, v = draw()
    expected = sage_aot.attn(q, k, v)
    compiled(lambda q, k, v: sage_aot.attn(q, k, v, out=q))(q, k, v)
    assert torch.equal(q, expected)


def test_compiled_code_raises_for_bad_arguments(compiled):
    q, k, v = draw()
    with pytest.raises(Exception, match="one head dim, got 32 for q and 64"):
        compiled(lambda *qkv: sage_aot.attn(*qkv))(q[..., :32].contiguous(), k, v)


# --- out, grad, inference mode, autocast ------------------------------------------------------------------------------


@pytest.mark.parametrize("index", [0, 1, 2])
def test_out_may_be_an_input(index):
    tensors = draw((1, 2, 20, 64), (1, 2, 20, 64))
    expected = sage_aot.attn(*tensors)
    assert sage_aot.attn(*tensors, out=tensors[index]) is tensors[index]
    assert torch.equal(tensors[index], expected)


@pytest.mark.parametrize("return_lse", [False, True])
def test_writing_out_is_noticed_by_autograd(return_lse):
    q, k, v = draw()
    weight = torch.ones_like(q, requires_grad=True)
    out = torch.ones_like(q)
    product = weight * out
    sage_aot.attn(q, k, v, out=out, return_lse=return_lse)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_grad_is_refused(name):
    tensors = {**dict(zip("qkv", draw())), "out": torch.empty(2, 4, 33, 64, dtype=torch.bfloat16)}
    tensors[name].requires_grad_()
    with pytest.raises(ArgumentError, match=f"{name} requires grad, and attn has no backward pass"):
        sage_aot.attn(**tensors)
    with torch.no_grad():
        assert not sage_aot.attn(*(tensors[n] for n in "qkv")).requires_grad


@pytest.mark.parametrize("computed", [False, True])
def test_grad_is_refused_in_compiled_code(compiled, computed):
    q, k, v = draw()
    k.requires_grad_()

    def call(q, k, v):
        return sage_aot.attn(q, k * 2 if computed else k, v)

    with pytest.raises(Exception, match="k requires grad, and attn has no backward pass"):
        compiled(call)(q, k, v)
    with torch.no_grad():
        assert torch.equal(compiled(call)(q, k, v), call(q, k, v))


def test_grad_flows_around_a_compiled_call(compiled):
    q, k, v = draw()
    weight = torch.full((64,), 2.0, requires_grad=True)
    compiled(lambda q, k, v: sage_aot.attn(q, k, v).float() * weight)(q, k, v).sum().backward()
    assert torch.allclose(weight.grad, sage_aot.attn(q, k, v).float().sum((0, 1, 2)), rtol=1e-4)


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("give_out", [False, True])
def test_inference_mode(compiled, give_out, return_lse):
    expected = sage_aot.attn(*draw(), return_lse=return_lse)
    with torch.inference_mode():
        q, k, v = draw()
        for call in (sage_aot.attn, compiled(lambda *qkv, **more: sage_aot.attn(*qkv, **more))):
            found = call(q, k, v, return_lse=return_lse, out=torch.empty_like(q) if give_out else None)
            pairs = zip(found, expected) if return_lse else [(found, expected)]
            assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("source", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("target", [torch.float16, torch.bfloat16], ids=str)
def test_autocast_casts_as_sdpa_does(source, target):
    tensors = draw(dtype=source)
    expected = sage_aot.attn(*(t.to(target) for t in tensors), scale=1, return_lse=True)
    with torch.autocast("cpu", dtype=target):
        found = sage_aot.attn(*tensors, scale=1, return_lse=True)
        q = tensors[0]
        assert found[0].dtype == torch.nn.functional.scaled_dot_product_attention(q, q, q).dtype
        into = sage_aot.attn(*tensors, scale=1, p="exp2", out=torch.empty_like(expected[0]))
        assert torch.equal(into, expected[0])
    assert all(torch.equal(one, other) for one, other in zip(found, expected))


def test_autocast_leaves_the_emulation_in_f32():
    q, k, v = draw()
    expected = sage_aot.attn(q, k, v)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(sage_aot.attn(q, k, v), expected)


@pytest.mark.parametrize("autocast", [False, True])
def test_float64_is_refused(autocast):
    q, k, v = draw(dtype=torch.float64)
    with (torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast),
          pytest.raises(ArgumentError, match="got torch.float64")):
        sage_aot.attn(q, k, v)


def test_autocast_in_compiled_code(compiled):
    tensors = draw(dtype=torch.float32)
    expected = sage_aot.attn(*(t.bfloat16() for t in tensors))
    work = compiled(lambda *qkv: sage_aot.attn(*qkv))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(work(*tensors), expected)

    def inside(q, k, v):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return sage_aot.attn(q, k, v)

    assert torch.equal(compiled(inside)(*tensors), expected)
