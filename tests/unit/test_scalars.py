"""Numbers and flags as NumPy, arrays and tensors have them: taken as Python's, everywhere, or refused by name."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import sage_aot
from sage_aot._problem.options import OPTIONS, Options, for_schema
from sage_aot.errors import ArgumentError

Q, K, V = torch.randn(3, 1, 2, 40, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
BEGINS = torch.tensor([0, 30, 40], dtype=torch.int32)


def packed(x: torch.Tensor) -> torch.Tensor:
    return x.squeeze(0).transpose(0, 1).contiguous()


NUMBERS = {
    "np.float32": np.float32, "np.float16": np.float16, "np.float64": np.float64, "0-d array": np.array,
    "0-d tensor": torch.tensor, "0-d tensor, f64": lambda value: torch.tensor(value, dtype=torch.float64),
}
INTEGERS = {
    "np.int64": np.int64, "np.int32": np.int32, "np.uint8": np.uint8, "0-d array": np.array, "tensor": torch.tensor,
    "0-d tensor, i32": lambda value: torch.tensor(value, dtype=torch.int32),
    "tensor of one element": lambda value: torch.tensor([value]),
}
FLAGS = {"np.bool_": np.bool_, "0-d array": np.array, "0-d tensor": torch.tensor}

CALLS = {
    "attn": lambda **options: sage_aot.attn(Q, K, V, **options),
    "attn, one query": lambda **options: sage_aot.attn(Q[:, :, :1], K[:, :1], V[:, :1], **options),
    "attn, kv": lambda **options: sage_aot.attn(Q, sage_aot.quantize_kv(K, V), **options),
    "attn_varlen": lambda **options: sage_aot.attn_varlen(packed(Q), packed(K), packed(V), BEGINS, BEGINS, 30, 30,
                                                          **options),
    "train_attn": lambda **options: sage_aot.train_attn(Q, K, V, **options),
}
QUANTIZED = {**CALLS, "attn, kv": lambda **options: sage_aot.attn(Q, sage_aot.quantize_kv(K, V, **options))}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("number", NUMBERS)
def test_numbers(number, call):
    assert torch.equal(CALLS[call](scale=NUMBERS[number](0.25)), CALLS[call](scale=0.25))


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("flag", FLAGS)
def test_flags_of_the_call(flag, call):
    full, causal = CALLS[call](), CALLS[call](is_causal=True)
    assert torch.equal(CALLS[call](is_causal=FLAGS[flag](True)), causal)
    assert torch.equal(CALLS[call](is_causal=FLAGS[flag](False)), full)


@pytest.mark.parametrize("name", ["smooth_q", "smooth_k", "smooth_v", "rotate", "clip"])
@pytest.mark.parametrize("call", [name for name in QUANTIZED if name != "train_attn"])
@pytest.mark.parametrize("flag", FLAGS)
def test_flags_of_quantization(flag, call, name):
    for value in (True, False):
        found = QUANTIZED[call](**{name: FLAGS[flag](value)})
        assert torch.equal(found, QUANTIZED[call](**{name: value}))


WORDS = {"qk": "int8", "layout": "HND", "smooth_q": "auto", "p": "auto"}


@pytest.mark.parametrize(("call", "name", "value"), [
    (call, name, value) for call in QUANTIZED for name, value in WORDS.items()
    if call != "train_attn" and (call, name) != ("attn_varlen", "layout")])  # sequences have no layout
def test_words(call, name, value):
    assert torch.equal(QUANTIZED[call](**{name: np.str_(value)}), QUANTIZED[call](**{name: value}))
    assert sage_aot.supports(Q, K, V, **{name: np.str_(value)}) is None
    assert type(getattr(Options(**{name: np.str_(value)}), name)) is str


@pytest.mark.parametrize("flag", FLAGS)
def test_flags_in_addition_to_options(flag):
    out, lse = sage_aot.attn(Q, K, V, return_lse=FLAGS[flag](True))
    assert lse.shape == (1, 2, 40)
    assert torch.equal(sage_aot.attn(Q, K, V, p="exp2", return_lse=FLAGS[flag](False)), out)


@pytest.mark.parametrize("integer", INTEGERS)
def test_lengths(integer):
    q, k, v = map(packed, (Q, K, V))
    of = INTEGERS[integer]
    expected = sage_aot.attn_varlen(q, k, v, BEGINS, BEGINS, 30, 30)
    assert torch.equal(sage_aot.attn_varlen(q, k, v, BEGINS, BEGINS, of(30), of(30)), expected)
    more = {"cu_seqlens_q": BEGINS, "cu_seqlens_k": BEGINS, "max_seqlen_q": of(30), "max_seqlen_k": of(30)}
    assert sage_aot.supports(q, k, v, **more) is None
    assert sage_aot.explain(q, k, v, **more).problem.seqlen_q == 30


def test_lengths_as_flash_attention_computes_them():
    q, k, v = map(packed, (Q, K, V))
    longest = BEGINS.diff().max()
    assert torch.equal(sage_aot.attn_varlen(q, k, v, BEGINS, BEGINS, longest, longest),
                       sage_aot.attn_varlen(q, k, v, BEGINS, BEGINS, 30, 30))


@pytest.mark.parametrize("integer", [name for name in INTEGERS if name != "np.uint8"])
def test_integers_of_explain(integer):
    of = INTEGERS[integer]
    found = sage_aot.explain(capability=(of(8), of(9)), headdim=of(128), driver=of(570))
    assert str(found) == str(sage_aot.explain(capability=(8, 9), headdim=128, driver=570))
    for wrong in (np.float64(128), np.bool_(True), True, torch.tensor([1, 2])):
        with pytest.raises(ArgumentError, match="headdim: expected an integer"):
            sage_aot.explain(headdim=wrong)


def test_an_array_is_read_in_every_call():
    scale, causal = np.array(0.25), torch.tensor(False)
    for value, flag in ((0.25, False), (0.75, False), (0.75, True)):
        scale[...], causal[...] = value, flag
        assert torch.equal(sage_aot.attn(Q, K, V, is_causal=causal), sage_aot.attn(Q, K, V, is_causal=flag))
        assert torch.equal(sage_aot.attn(Q, K, V, scale=scale, is_causal=causal),
                           sage_aot.attn(Q, K, V, scale=value, is_causal=flag))


def test_operators_get_pythons_scalars():
    given = for_schema(*vars(Options()).values())
    assert given == ()
    values = {**vars(Options()), "scale": torch.tensor(0.5), "smooth_v": np.bool_(True)}
    given = for_schema(*values.values())
    assert [*map(type, given)].count(float) == 1 and given[list(OPTIONS).index("smooth_v")] is True
    assert Options(scale=np.float32(0.5), smooth_v=np.True_) == Options(scale=0.5, smooth_v=True)


@pytest.mark.parametrize(("name", "value"), [
    ("scale", np.float32("nan")), ("scale", np.float32("inf")), ("scale", np.array([0.5])), ("scale", torch.ones(2)),
    ("scale", np.complex64(1)), ("scale", np.bool_(True)), ("scale", torch.tensor(True)),
    ("scale", torch.tensor(0.5, requires_grad=True)), ("scale", torch.tensor(0.5, device="meta")),
    ("is_causal", torch.tensor(True, device="meta")), ("is_causal", np.int64(1)), ("is_causal", np.array([True])),
    ("is_causal", torch.tensor(1)), ("smooth_q", np.int64(1)), ("layout", np.array(3)),
], ids=repr)
def test_what_is_refused(name, value):
    with pytest.raises(ArgumentError, match=f"^{name}: expected .*, got "):
        sage_aot.attn(Q, K, V, **{name: value})
    assert sage_aot.supports(Q, K, V, **{name: value}).startswith(f"{name}: expected ")


@pytest.mark.parametrize("value", [np.int64(1), np.array([True]), torch.tensor(1), None, "yes"], ids=repr)
def test_return_lse_refuses_what_is_no_flag(value):
    with pytest.raises(ArgumentError, match="return_lse: expected True or False, got "):
        sage_aot.attn(Q, K, V, return_lse=value)
