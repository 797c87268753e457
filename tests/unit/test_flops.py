"""FlopCounterMode counts what it counts of torch's own attention."""

from __future__ import annotations

import functools
import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import sage_aot
from sage_aot._call import ops

B, H, G, N, M, D = 2, 4, 2, 33, 47, 64
Q, K, V = (torch.randn(B, heads, rows, D).bfloat16() for heads, rows in ((H, N), (G, M), (G, M)))
PAIRS = B * H * N * M * D
BEGINS_Q, BEGINS_K = (torch.tensor(x, dtype=torch.int32) for x in ([0, 20, 20, 66], [0, 30, 40, 94]))


def counted(work) -> int:
    with FlopCounterMode(display=False) as mode:
        work()
    return mode.get_total_flops()


def nhd(*tensors):
    return [x.transpose(1, 2) for x in tensors]


def packed(x):
    return x.transpose(1, 2).flatten(0, 1)


FORMS = [{}, {"return_lse": True}, {"out": True}, {"return_lse": True, "out": True}]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_attention_counts_as_torchs(form):
    of_torch = flop_registry[torch.ops.aten._scaled_dot_product_flash_attention]  # on the CPU torch counts nothing
    expected = of_torch(Q, K.repeat_interleave(2, 1), V.repeat_interleave(2, 1), 0.0, True, out_val=None)
    assert expected == 4 * PAIRS, "torch's own convention, whatever the mask"

    def count(call, q=Q):
        return counted(lambda: call(**{**form, **({"out": torch.empty_like(q)} if "out" in form else {})}))

    assert count(lambda **form: sage_aot.attn(Q, K, V, **form)) == expected
    assert count(lambda **form: sage_aot.attn(Q, K, V, is_causal=True, scale=0.1, **form)) == expected
    q, k, v = nhd(Q, K, V)
    assert count(lambda **form: sage_aot.attn(q, k, v, layout="NHD", **form), q) == expected
    kv = sage_aot.quantize_kv(K, V)
    assert count(lambda **form: sage_aot.attn(Q, kv, **form)) == expected
    assert count(lambda **form: sage_aot.attn(q, kv, layout="NHD", **form), q) == expected
    one = Q[:, :, :1]  # whose heads share rows
    assert count(lambda **form: sage_aot.attn(one, K, V, **form), one) == expected // N


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_sequences_count_each_by_itself(form):
    q, k, v = map(packed, (Q, K, V))
    more = {**form, "out": torch.empty_like(q)} if "out" in form else form

    def count(*longest):
        return counted(lambda: sage_aot.attn_varlen(q, k, v, BEGINS_Q, BEGINS_K, *longest, **more))

    assert count(46, 54) == 4 * H * D * (20 * 30 + 0 * 10 + 46 * 54)
    assert count(10, 54) == 4 * H * D * (10 * 30 + 10 * 54), "longer ones are cut"


@pytest.mark.parametrize("mode", ["meta", "fake"])
def test_without_values_sequences_count_as_the_longest(mode):
    with FakeTensorMode() if mode == "fake" else torch.device("meta"):
        q, k = torch.empty(66, H, D), torch.empty(94, G, D)
        begins = torch.empty(4, dtype=torch.int32)
        assert counted(lambda: sage_aot.attn_varlen(q, k, k, begins, begins, 46, 54)) == 4 * H * D * 3 * 46 * 54


@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_the_backward_pass_counts_as_torchs(layout):
    q, k, v = (x.clone().requires_grad_() for x in ((Q, K, V) if layout == "HND" else nhd(Q, K, V)))
    out = sage_aot.train_attn(q, k, v, layout=layout)
    assert counted(lambda: sage_aot.train_attn(q, k, v, layout=layout)) == 4 * PAIRS
    assert counted(lambda: out.sum().backward()) == 10 * PAIRS
    with torch.device("meta"):
        meta = [torch.empty(B, H, rows, D, requires_grad=True) for rows in (N, M, M)]
        of_torch = torch.ops.aten._scaled_dot_product_efficient_attention_backward
        formula = flop_registry[of_torch]
        assert formula(meta[0], *meta, out_val=None) == 10 * PAIRS


@pytest.mark.parametrize(("asked", "products"), [("q", 3), ("k", 4), ("v", 4), ("kv", 4), ("qk", 5)])
def test_the_backward_pass_counts_what_is_asked_for(asked, products):
    leaves = [x.clone().requires_grad_(name in asked) for name, x in zip("qkv", (Q, K, V))]
    out = sage_aot.train_attn(*leaves)
    assert counted(lambda: out.sum().backward()) == products * 2 * PAIRS


def test_trained_sequences_count_by_their_lengths():
    q, k, v = (torch.randn(90, 2, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    begins_q, begins_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 50, 60, 90], [0, 30, 30, 80]))
    pairs = 2 * 64 * (50 * 30 + 30 * 50)
    call = functools.partial(sage_aot.train_attn_varlen, q, k, v, begins_q, begins_k, 50, 50)
    assert counted(call) == 2 * 2 * pairs
    out = call()
    assert counted(lambda: out.sum().backward()) == 5 * 2 * pairs


def test_no_gradient_counts_nothing():
    saved = torch.ops.sage_aot.train_attn(Q, K, V, None)
    backward = torch.ops.sage_aot.train_attn_backward
    assert counted(lambda: backward(Q, V, *saved, None, of_q=False, of_kv=False)) == 0


def test_quantization_counts_nothing():
    assert counted(lambda: sage_aot.quantize_kv(K, V, rotate=True)) == 0


def test_every_operator_has_a_formula():
    names = {name.split("::")[1].split(".")[0] for name in torch._C._dispatch_get_all_op_names()
             if name.startswith("sage_aot::")}
    assert len(names) == 19
    assert all(getattr(torch.ops.sage_aot, name) in flop_registry for name in names)
    assert ops.attn.plain._schema.name == "sage_aot::attn"


@pytest.mark.parametrize("order", ["torch.utils.flop_counter, sage_aot", "sage_aot, torch.utils.flop_counter"])
def test_formulas_are_there_whatever_is_imported_first(order):
    program = f"""
import sys
import {order}
import torch
assert torch.ops.sage_aot.attn in torch.utils.flop_counter.flop_registry
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_counter_is_not_imported_for_it():
    program = "import sys, torch, sage_aot; assert 'torch.utils.flop_counter' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
