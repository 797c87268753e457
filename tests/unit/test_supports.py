"""sage_aot.supports answers what sage_aot.attn would say, and runs nothing."""

from __future__ import annotations

import inspect
import re

import pytest
import torch

import sage_aot
from sage_aot._backends.emulation.backend import EmulationBackend
from sage_aot._backends.loader import KERNEL_FOLDER, library_in
from sage_aot._call import refusal as module
from sage_aot._call.pipeline import handing


def qkv(dtype=torch.bfloat16, headdim=64):
    return torch.randn(3, 1, 2, 40, headdim).to(dtype)


def with_last_stride(x):
    return x.transpose(2, 3).contiguous().transpose(2, 3)


REFUSED = {
    "no tensor": lambda q, k, v: ((1, k, v), {}),
    "a nested tensor": lambda q, k, v: ((q, torch.nested.nested_tensor([k[0]], layout=torch.jagged), v), {}),
    "dtype": lambda q, k, v: ((q.float(), k.float(), v.float()), {}),
    "dtypes": lambda q, k, v: ((q, k.half(), v), {}),
    "head dim": lambda q, k, v: (torch.randn(3, 1, 2, 40, 129).half(), {}),
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
    "grad of out": lambda q, k, v: ((q, k, v), {"out": torch.empty_like(q).requires_grad_()}),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_refusal_is_the_message_of_the_call(what):
    tensors, options = REFUSED[what](*qkv())
    answers = [sage_aot.supports(*tensors, **options) for _ in range(2)]
    assert answers[0] == answers[1] is not None
    if what == "a nested tensor":  # torch's dispatcher refuses it first
        assert re.match("k: expected a dense tensor, got a nested one; pad", answers[0])
        return
    with pytest.raises(sage_aot.SageAotError) as raised:
        sage_aot.attn(*tensors, **options)
    assert answers[0] == str(raised.value)


def test_a_sparse_tensor_is_refused():
    q, k, v = qkv()
    assert sage_aot.supports(q.to_sparse(), k, v) == (
        "q: expected a dense tensor, got layout torch.sparse_coo; pass q.to_dense()")


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
    assert "got torch.float32" in sage_aot.supports(q, k, v)
    with torch.autocast("cpu", dtype):
        assert sage_aot.supports(q, k, v) is None
        assert "got torch.float64" in sage_aot.supports(q.double(), k.double(), v.double())
        assert "out: expected" in sage_aot.supports(q, k, v, out=torch.empty_like(q))
        assert sage_aot.attn(q, k, v).dtype == dtype
    assert "got torch.float32" in sage_aot.supports(q, k, v)


def test_nothing_is_bound_and_no_value_is_read():
    class Unbound(EmulationBackend):
        def bind(self, plan, tensors):
            raise AssertionError("bound")

    q, k, v = qkv()
    poisoned = torch.full_like(q, torch.nan)
    with handing(Unbound(library_in(str(KERNEL_FOLDER)).manifest)):
        assert sage_aot.supports(q, k, v) is None
        assert sage_aot.supports(poisoned, poisoned, poisoned) is None


def test_answers_are_bounded(monkeypatch):
    monkeypatch.setattr(module, "_answers", {})
    monkeypatch.setattr(module, "MOST_PREPARED", 3)
    q, k, v = qkv()
    for rows in range(1, 8):
        assert sage_aot.supports(q[:, :, :rows], k, v) is None
    assert len(module._answers) == 3


def test_it_takes_what_attn_takes():
    parameters = inspect.signature(sage_aot.supports).parameters
    assert list(parameters.values()) == list(inspect.signature(sage_aot.attn).parameters.values())
    with pytest.raises(TypeError, match="smooth_w"):
        sage_aot.supports(*qkv(), smooth_w=True)
