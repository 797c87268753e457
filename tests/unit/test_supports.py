"""sage_aot.supports answers what sage_aot.attn would say, and runs nothing."""

from __future__ import annotations

import inspect
import re
import shutil

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import sage_aot
from sage_aot._backends.emulation.backend import EmulationBackend
from sage_aot._backends.loader import KERNEL_FOLDER, library_in
from sage_aot._call import backends, pipeline, refusal
from sage_aot._call.backends import handing


@pytest.fixture(autouse=True)
def answers(monkeypatch):
    """Answers of the test's own."""
    kept = pipeline.ByKind()
    monkeypatch.setattr(refusal, "answers", kept)
    return kept


def qkv(dtype=torch.bfloat16, headdim=64):
    return torch.randn(3, 1, 2, 40, headdim).to(dtype)


def with_last_stride(x):
    return x.transpose(2, 3).contiguous().transpose(2, 3)


REFUSED = {
    "no tensor": lambda q, k, v: ((1, k, v), {}),
    "dtype": lambda q, k, v: ((q.double(), k.double(), v.double()), {}),
    "dtypes": lambda q, k, v: ((q, k.half(), v), {}),
    "head dim": lambda q, k, v: (torch.randn(3, 1, 2, 40, 257).half(), {}),
    "dimensions": lambda q, k, v: ((q[0], k, v), {}),
    "keys": lambda q, k, v: ((q, k, v[:, :, 1:]), {}),
    "heads": lambda q, k, v: ((q, k.repeat(1, 3, 1, 1), v.repeat(1, 3, 1, 1)), {}),
    "strides": lambda q, k, v: ((with_last_stride(q), k, v), {}),
    "device": lambda q, k, v: ((q.to("meta"), k, v), {}),
    "an option": lambda q, k, v: ((q, k, v), {"scale": float("nan")}),
    "an option that cannot be hashed": lambda q, k, v: ((q, k, v), {"qk": [4]}),
    "return_lse": lambda q, k, v: ((q, k, v), {"return_lse": 1}),
    "out": lambda q, k, v: ((q, k, v), {"out": q[:, :, 1:]}),
    "out that is no tensor": lambda q, k, v: ((q, k, v), {"out": 7}),
    "grad": lambda q, k, v: ((q, k, v.requires_grad_()), {}),
    "an option before return_lse": lambda q, k, v: ((q, k, v), {"scale": "x", "return_lse": 1}),
    "device before an option": lambda q, k, v: ((q.to("meta"), k, v), {"scale": "x"}),
    "no tensor before an option": lambda q, k, v: ((q, 2, v), {"scale": "x"}),
    "return_lse before out": lambda q, k, v: ((q, k, v), {"return_lse": 1, "out": 7}),
    "grad of out": lambda q, k, v: ((q, k, v), {"out": torch.empty_like(q).requires_grad_()}),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_refusal_is_the_message_of_the_call(what):
    tensors, options = REFUSED[what](*qkv())
    answers = [sage_aot.supports(*tensors, **options) for _ in range(2)]
    assert answers[0] == answers[1] is not None
    with pytest.raises(sage_aot.SageAotError) as raised:
        sage_aot.attn(*tensors, **options)
    assert answers[0] == str(raised.value)


class Wrapping(torch.Tensor):
    """A tensor that wraps another, as a DTensor does."""

    @staticmethod
    def __new__(cls, within):
        made = torch.Tensor._make_wrapper_subclass(cls, within.shape, dtype=within.dtype, strides=within.stride())
        made.within = within  # type: ignore[attr-defined]
        return made

    def __tensor_flatten__(self):
        return ["within"], None

    @classmethod
    def __tensor_unflatten__(cls, tensors, context, size, stride):
        return cls(tensors["within"])

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        return NotImplemented


def nested(x, layout):
    return torch.nested.nested_tensor(list(x), layout=layout)


NOT_DENSE = {
    "sparse": (lambda x: x.to_sparse(), "got layout torch.sparse_coo; pass {}.to_dense()"),
    "of compressed rows": (lambda x: x[0].to_sparse_csr(), "got layout torch.sparse_csr; pass {}.to_dense()"),
    "jagged": (lambda x: nested(x, torch.jagged), "got a nested one; pad it with {}.to_padded_tensor(0.0), or"),
    "nested": (lambda x: nested(x, torch.strided), "got a nested one; pad it with {}.to_padded_tensor(0.0), or"),
    "wrapping": (Wrapping, "got a Wrapping, which wraps others; pass the tensor within"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested", "ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("which", ["q", "k", "v", "out"])
@pytest.mark.parametrize("kind", NOT_DENSE)
def test_what_is_not_dense_is_refused_though_a_dense_call_was_taken(kind, which):
    """torch's dispatcher refuses these before attn sees them."""
    make, message = NOT_DENSE[kind]
    tensors = dict(zip("qkv", qkv(headdim=1)), out=torch.zeros(1, 2, 40, 1, dtype=torch.bfloat16))
    assert sage_aot.supports(**tensors) is None
    tensors[which] = make(tensors[which])
    for _ in range(2):
        assert re.match(f"{which}: expected a (dense|plain) tensor, {re.escape(message.format(which))}",
                        sage_aot.supports(**tensors))
    with pytest.raises((NotImplementedError, RuntimeError, TypeError)):
        sage_aot.attn(**tensors)


@pytest.mark.parametrize("options", [{}, {"is_causal": True, "scale": 0.2, "return_lse": True}, {"smooth_q": True},
                                     {"layout": "NHD", "qk": "int4"}])
def test_what_the_call_takes_is_not_refused(options):
    q, k, v = qkv()
    assert sage_aot.supports(q, k, v, **options) is None
    assert sage_aot.supports(q, k, v, out=torch.empty_like(q), **options) is None
    sage_aot.attn(q, k, v, **options)


def test_tensors_without_rows_are_taken():
    q, k, v = (x[:, :, :0] for x in qkv())
    assert sage_aot.supports(q, k, v) is None


def test_missing_kernels_are_told_and_the_environment_is_read(monkeypatch):
    tensors = qkv()
    assert sage_aot.supports(*tensors, qk="int4") is None
    monkeypatch.setenv("SAGE_AOT_EMULATE", "sm90")
    answer = sage_aot.supports(*tensors, qk="int4")
    with pytest.raises(sage_aot.UnsupportedError) as raised:
        sage_aot.attn(*tensors, qk="int4")
    assert answer == str(raised.value)


def test_a_folder_without_kernels_is_told(monkeypatch, tmp_path):
    monkeypatch.setenv("SAGE_AOT_KERNELS", str(tmp_path))
    assert str(tmp_path) in sage_aot.supports(*qkv())


def test_grad_mode_is_asked_on_every_call():
    q, k, v = qkv()
    q.requires_grad_()
    with torch.no_grad():
        assert sage_aot.supports(q, k, v) is None
    assert "q requires grad" in sage_aot.supports(q, k, v)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_counted(dtype):
    q, k, v = qkv(torch.float32)
    k = k.to(dtype)
    assert "got torch.float32" in sage_aot.supports(q, k, v)
    with torch.autocast("cpu", dtype):
        assert sage_aot.supports(q, k, v) is None
        assert "got torch.float64" in sage_aot.supports(q.double(), k.double(), v.double())
        assert "out: expected" in sage_aot.supports(q, k, v, out=torch.empty_like(q))
        assert sage_aot.attn(q, k, v).dtype == dtype
    assert "got torch.float32" in sage_aot.supports(q, k, v)


class Unbound(EmulationBackend):
    def bind(self, plan, given, out):
        raise AssertionError("bound")


@pytest.fixture
def unbound():
    return Unbound(library_in(str(KERNEL_FOLDER)).manifest)


def test_nothing_is_bound(unbound):
    q, k, v = qkv()
    with handing(unbound):
        assert sage_aot.supports(q, k, v) is None
        with pytest.raises(AssertionError, match="bound"):
            sage_aot.attn(q, k, v)


@pytest.mark.parametrize("autocast", [False, True])
def test_no_value_is_read(autocast):
    """Tensors without memory answer as those with memory do."""
    q, k, v = qkv(torch.float32 if autocast else torch.bfloat16)
    with FakeTensorMode() as mode, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        assert sage_aot.supports(*(mode.from_tensor(x) for x in (q, k, v))) is None
        assert "head dim" in sage_aot.supports(*(mode.from_tensor(x).repeat(1, 1, 1, 5) for x in (q, k, v)))


def test_sizes_that_a_tracer_does_not_know_yet_are_not_remembered(answers):
    def asks(q, k, v):
        assert isinstance(q.shape[2], torch.SymInt)
        said.extend([sage_aot.supports(q, k, v), sage_aot.supports(q.double(), k.double(), v.double())])
        return q

    said = []
    make_fx(asks, tracing_mode="symbolic")(*qkv())
    assert said[0] is None and "torch.float64" in said[1] and answers == {}


def test_an_answer_is_remembered(monkeypatch):
    tensors = qkv()
    answers = [sage_aot.supports(*tensors), sage_aot.supports(*tensors, scale=2.0, qk="int4", pv_accum="f32")]
    assert answers[0] is None and "pv_accum" in answers[1]
    monkeypatch.setattr(refusal, "_asked", None)
    assert [sage_aot.supports(*tensors), sage_aot.supports(*tensors, scale=2.0, qk="int4", pv_accum="f32")] == answers


def test_answers_are_bounded(monkeypatch, answers):
    monkeypatch.setattr(pipeline, "MOST_KEPT", 3)
    q, k, v = qkv()
    for rows in range(1, 8):
        assert sage_aot.supports(q[:, :, :rows], k, v) is None
    assert len(answers) == 3


def test_a_folder_is_asked_again_until_it_has_kernels(monkeypatch, tmp_path):
    monkeypatch.setenv("SAGE_AOT_KERNELS", str(tmp_path))
    tensors = qkv()
    assert str(tmp_path) in sage_aot.supports(*tensors)
    shutil.copy(KERNEL_FOLDER / "manifest.json", tmp_path)
    assert sage_aot.supports(*tensors) is None


def test_an_answer_of_another_backend_is_not_remembered(monkeypatch, unbound, answers):
    """Another thread hands a backend while the choice of kernels runs."""
    taken = refusal.kernels_on

    def hand(backend, problem, device):
        monkeypatch.setattr(backends, "_handed", unbound)
        assert backend is not unbound
        return taken(backend, problem, device)

    monkeypatch.setattr(refusal, "kernels_on", hand)
    assert sage_aot.supports(*qkv()) is None and answers == {}


def test_no_answer_keeps_a_handed_backend_alive(unbound, answers):
    with handing(unbound):
        assert sage_aot.supports(*qkv()) is None and len(answers) == 1
    assert answers == {}


def test_it_takes_what_attn_takes():
    """supports takes what attn_varlen takes, too; sequences are no arguments of attn."""
    parameters, *calls = (inspect.signature(call).parameters for call in (
        sage_aot.supports, sage_aot.attn, sage_aot.attn_varlen))
    of_attn, of_varlen = calls
    assert [parameters[name] for name in of_attn] == list(of_attn.values())
    assert parameters.keys() - of_attn.keys() == of_varlen.keys() - of_attn.keys()
    assert of_attn.keys() - of_varlen.keys() == {"layout", "key_mask", "attn_mask", "block_mask", "sparse"}
    of_tensors = {"k", "v"}  # attn takes a QuantizedKV in their place
    assert all(of_varlen[name] == of_attn[name] for name in of_varlen.keys() & of_attn.keys() - of_tensors)
    with pytest.raises(TypeError, match="smooth_w"):
        sage_aot.supports(*qkv(), smooth_w=True)
