"""Which calls sage_aot serves, each rule once, and what becomes of the others."""

from __future__ import annotations

import itertools
import json
import logging
import math
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from exact import served_calls
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

import sage_aot
from sage_aot.errors import ArgumentError, UnsupportedError
from sage_aot.integrations import Policy, _policy, report, reset_report, use
from sage_aot.integrations._gain import (
    CAUSAL,
    FULL,
    LEAST_CAUSAL,
    LEAST_FULL,
    LEAST_MASKED,
    MASKED,
    is_faster,
    prefers_flash,
)
from sage_aot.integrations._policy import SLOWER, Call, attend, is_small, key_mask_of, refusal


def tensors(q=(2, 4, 30, 64), kv=(2, 4, 40, 64), dtype=torch.bfloat16, v_headdim=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = q, kv, (*kv[:-1], v_headdim or kv[-1])
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def call(*, q=(2, 4, 30, 64), kv=(2, 4, 40, 64), dtype=torch.bfloat16, v_headdim=None, **more):
    return Call(*tensors(q, kv, dtype, v_headdim), **more)


def mask(*shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.5


NESTED = torch.nested.nested_tensor([torch.ones(2, 3, 64), torch.ones(2, 5, 64)], layout=torch.jagged)

REFUSED = {
    "an argument of the host's": call(beyond="an argument of the host's"),
    "dropout": call(dropout=0.1),
    "gradients": Call(tensors()[0].requires_grad_(), *tensors()[1:]),
    "a scale that sage_aot does not take": call(scale=torch.tensor(0.3, requires_grad=True)),
    "dtype float64": call(dtype=torch.float64),
    "dtypes that differ": Call(tensors()[0].float(), *tensors()[1:]),
    "devices that differ": Call(tensors()[0], *(x.to("meta") for x in tensors()[1:])),
    "tensors that are nested, sparse or of a subclass": Call(NESTED, NESTED, NESTED),
    "tensors of other than 4 dimensions": call(q=(4, 30, 64), kv=(4, 40, 64)),
    "empty tensors": call(kv=(2, 4, 0, 64)),
    "shapes that are broadcast": call(kv=(1, 4, 40, 64)),
    "heads that are broadcast": call(kv=(2, 1, 40, 64)),
    "head dims above 256": call(q=(1, 1, 3, 257), kv=(1, 1, 3, 257)),
    "channels that are not contiguous": Call(*(x.transpose(2, 3) for x in tensors((1, 1, 64, 32), (1, 1, 64, 32)))),
    "a mask beside is_causal": call(q=(2, 4, 40, 64), is_causal=True, mask=mask(2, 1, 1, 40)),
    "is_causal with more queries than keys": call(q=(2, 4, 50, 64), is_causal=True),
    "a mask of numbers": call(mask=torch.zeros(2, 1, 1, 40)),
    "a mask that differs by query or head": call(mask=mask(2, 1, 30, 40)),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_sage_aot_does_not_compute_is_the_hosts(reason):
    host = object()
    assert attend(REFUSED[reason], lambda: host) is host
    assert report() == {reason: 1}


@pytest.mark.parametrize("reason", REFUSED)
def test_or_an_error_where_the_policy_says_so(reason):
    with use(Policy("possible", "raise")), pytest.raises(UnsupportedError, match=f"got: {reason}; let the host"):
        attend(REFUSED[reason], lambda: pytest.fail("the host was called"))


def test_a_subclass_is_the_hosts():
    class Own(torch.Tensor):
        pass

    q, k, v = tensors()
    for described in (Call(q.as_subclass(Own), k, v), Call(q, k.as_subclass(Own), v), Call(q, k, v.as_subclass(Own)),
                      Call(q.to_sparse(), k, v)):
        assert refusal(described) == "tensors that are nested, sparse or of a subclass"
    assert refusal(Call(torch.nn.Parameter(q, requires_grad=False), k, v)) is None


def test_gradients_matter_where_they_are_recorded():
    with torch.no_grad():
        assert refusal(REFUSED["gradients"]) is None


def float64(q, k, v, seen=None, scale=None):
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = q.double() @ k.transpose(2, 3) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if seen is not None:
        scores = scores.masked_fill(~seen, -torch.inf)
    return scores.softmax(-1).nan_to_num(0.0) @ v


def below(queries, keys, offset=0):
    return torch.ones(queries, keys, dtype=torch.bool).tril(offset)


SERVED = {
    "plain": (call(), None),
    "scale": (call(scale=0.3), None),
    "f16": (call(dtype=torch.float16), None),
    "f32": (call(dtype=torch.float32), None),
    "grouped heads": (call(kv=(2, 2, 40, 64), grouped=True), None),
    "head dim 256": (call(q=(1, 2, 30, 256), kv=(1, 2, 40, 256)), None),
    "fewer channels of v": (call(v_headdim=16), None),
    "more channels of v": (call(v_headdim=80, scale=0.3), None),
    "more channels of v, default scale": (call(v_headdim=80), None),
    "causal": (call(q=(2, 4, 40, 64), is_causal=True), below(40, 40)),
    "causal, fewer queries": (call(is_causal=True), below(30, 40)),
    "causal, fewer queries, bottom right": (call(is_causal=True, bottom_right=True), below(30, 40, 10)),
    "causal, more queries, bottom right": (call(q=(2, 4, 50, 64), is_causal=True, bottom_right=True),
                                           below(50, 40, -10)),
    "causal, one query": (call(q=(2, 4, 1, 64), is_causal=True), below(1, 40)),
    "causal, one query, bottom right": (call(q=(2, 4, 1, 64), is_causal=True, bottom_right=True), None),
    "mask of keys": (call(mask=mask(2, 1, 1, 40)), mask(2, 1, 1, 40)),
    "mask of keys for the batch": (call(mask=mask(1, 40)), mask(1, 40)),
    "mask of keys, expanded": (call(mask=mask(2, 1, 1, 40).expand(2, 4, 30, 40)), mask(2, 1, 1, 40)),
    "mask of keys beside causal, bottom right": (call(is_causal=True, bottom_right=True, mask=mask(2, 1, 1, 40)),
                                                 mask(2, 1, 1, 40) & below(30, 40, 10)),
    "mask of one query": (call(q=(2, 4, 1, 64), mask=mask(2, 1, 1, 40)), mask(2, 1, 1, 40)),
}


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("name", SERVED)
def test_what_is_served_is_the_same_attention(exact, name, layout):
    described, seen = SERVED[name]
    expected = float64(*described[:3], seen, described.scale)
    if layout == "NHD":
        described = described._replace(layout=layout, **{x: getattr(described, x).transpose(1, 2) for x in "qkv"})
        expected = expected.transpose(1, 2)
    before = [x.clone() for x in described[:3]]
    out = attend(described, lambda: pytest.fail("the host was called"))
    assert served_calls() == 1 and out.dtype == described.q.dtype
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-2 if out.dtype != torch.float32 else 1e-5)
    assert all(map(torch.equal, before, described[:3]))


@pytest.mark.parametrize("name", ["fewer channels of v", "mask of keys", "causal, fewer queries"])
def test_with_the_log_sum_exp(exact, name):
    described, seen = SERVED[name]
    out, lse = attend(described, lambda: pytest.fail("the host was called"), return_lse=True)
    scores = described.q.double() @ described.k.double().transpose(2, 3) / 8
    expected = (scores if seen is None else scores.masked_fill(~seen, -torch.inf)).logsumexp(-1)
    torch.testing.assert_close(lse.double(), expected, rtol=0, atol=1e-5)
    assert out.shape == (*described.q.shape[:3], described.v.shape[3])


@pytest.mark.kernels("sm89")  # for its options
def test_the_kernels_arithmetic_is_that_of_attn():
    described = call(is_causal=True, bottom_right=True, mask=mask(2, 1, 1, 40))
    with use(Policy("possible", options={"smooth_v": True, "qk": "int4"})):
        out = attend(described, lambda: pytest.fail("the host was called"))
    expected = sage_aot.attn(*described[:3], key_mask=mask(2, 1, 1, 40)[:, 0, 0], is_causal=True, smooth_v=True,
                             qk="int4")
    assert torch.equal(out, expected)


def test_one_query_has_no_causal_mask(monkeypatch):
    """With a causal mask the q heads of a KV head could not share the reads of k and v."""
    asked = []
    monkeypatch.setattr(_policy, "attn", lambda *args, **options: asked.append(options["is_causal"]))
    for queries in (1, 2):
        attend(call(q=(2, 4, queries, 64), is_causal=True, bottom_right=True), lambda: pytest.fail("the host ran"))
    assert asked == [False, True]


@pytest.mark.parametrize(("shape", "found"), [
    ((40,), True), ((1, 40), True), ((30, 1), False), ((30, 40), False), ((1, 1, 1, 40), True), ((2, 1, 1, 1), True),
    ((2, 1, 1, 40), True), ((2, 4, 1, 40), False), ((2, 1, 30, 40), False), ((3, 1, 1, 40), False),
    ((2, 1, 1, 41), False), ((1, 2, 1, 1, 40), False)])
def test_masks_of_keys_are_known_by_shape(shape, found):
    given = mask(*shape)
    result = key_mask_of(given, 2, 4, 30, 40)
    assert (result is not None) == found
    if found:
        assert torch.equal(result[:, None, None].expand(2, 4, 30, 40), given.expand(2, 4, 30, 40))
        assert result.untyped_storage().data_ptr() == given.untyped_storage().data_ptr()


@pytest.mark.parametrize("v_headdim", [64, 32])
def test_the_output_lies_in_memory_as_q_does(v_headdim):
    q, k, v = tensors(v_headdim=v_headdim)
    expected, expected_lse = attend(Call(q, k, v), lambda: None, return_lse=True)
    rows = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    out, lse = attend(Call(*rows), lambda: None, return_lse=True)
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
    assert expected.is_contiguous()
    assert v_headdim < 64 and out.is_contiguous() or out.transpose(1, 2).is_contiguous()
    causal = attend(Call(*rows, is_causal=True), lambda: None)
    assert torch.equal(causal, attend(Call(q, k, v, is_causal=True), lambda: None)), "rows are cut, not heads"


# --- where it is faster -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "is_causal", "has_mask", "expected"), [
    # batch, q heads, kv heads, queries, keys, headdim: as measured on an H200
    ((1, 40, 40, 32760, 32760, 128), False, False, True),  # a video
    ((2, 24, 24, 4608, 4608, 128), False, False, True),  # an image
    ((1, 32, 8, 8192, 8192, 128), True, False, True),  # a prompt
    ((1, 24, 24, 2048, 2048, 128), False, False, False), ((1, 32, 8, 2048, 2048, 128), False, False, True),
    ((1, 24, 24, 4096, 4096, 64), False, False, True), ((1, 24, 24, 2048, 2048, 64), False, False, False),
    ((1, 24, 24, 4096, 4096, 64), True, False, False), ((1, 32, 8, 4096, 4096, 64), True, False, True),
    ((1, 24, 24, 4096, 4096, 256), False, False, True), ((1, 24, 24, 2048, 2048, 256), False, False, False),
    ((1, 32, 8, 1, 32768, 128), False, False, False),  # decoding
    ((1, 24, 24, 16384, 512, 128), False, False, False),  # cross-attention, of any length
    ((1, 40, 40, 75600, 512, 128), False, False, False),
    ((1, 12, 12, 512, 512, 64), False, False, False),  # an encoder
    ((8, 32, 8, 512, 512, 128), False, True, True), ((2, 24, 24, 512, 512, 128), False, True, False),
    ((8, 32, 8, 512, 512, 128), False, False, False),
])
def test_shapes_are_served_where_sage_aot_was_faster(shape, is_causal, has_mask, expected):
    assert is_faster(*shape, is_causal, has_mask) is expected


LOG = Path(__file__).parents[2] / "bench/results/h200-2026-11-25-crossover/crossover.json"


def test_what_is_served_was_at_least_as_fast_in_the_log():
    served = missed = 0
    for row in json.loads(LOG.read_text())["rows"]:
        torchs = [row[name] for name in ("sdpa", "cudnn", "flash", "efficient") if row[name]]
        gain = min(min(way[clock] for way in torchs) / row["ours"][clock] for clock in ("gpu", "wall"))
        sizes = (row[name] for name in ("batch", "heads", "kv_heads", "queries", "keys", "headdim"))
        if is_faster(*sizes, row["kind"] == "causal", row["kind"] == "padded"):
            assert gain >= 1, row
            served += 1
        else:
            missed += gain > 1
    assert (served, missed) == (53, 6)


def test_flash_was_faster_in_the_log_where_it_is_preferred():
    rows = [row for row in json.loads(LOG.read_text())["rows"] if row["kind"] == "full" and prefers_flash(
        *(row[name] for name in ("batch", "heads", "queries", "keys")))]
    ratios = [row["sdpa"][clock] / row["flash"][clock] for row in rows for clock in ("gpu", "wall")]
    assert len(rows) == 30 and 1.04 < min(ratios) and 4.4 < max(ratios) < 4.5


@pytest.mark.parametrize(("shape", "expected"), [
    ((1, 32, 16, 2048), True), ((1, 32, 16, 2047), False), ((1, 33, 16, 2048), False), ((2, 16, 2, 2048), True),
    ((1, 32, 1, 8192), False), ((1, 32, 128, 8192), True), ((1, 32, 128, 8191), False), ((1, 32, 129, 9000), False)])
def test_few_queries_prefer_flash(shape, expected):
    assert prefers_flash(*shape) is expected


def test_thresholds_hold_for_head_dims_up_to_their_own():
    def least(headdim, is_causal=False, has_mask=False):
        return next(n for n in range(256, 20000, 16) if is_faster(1, 24, 24, n, n, headdim, is_causal, has_mask))

    assert FULL.keys() == CAUSAL.keys() == {64, 128, 256}
    assert least(65) > least(128) and least(40) > least(64) and least(129) > least(256)
    assert least(128, has_mask=True) < least(128) and MASKED.at_least > 0
    # the operations of a causal mask: half of the square, and what lies left of it
    assert is_faster(1, 24, 24, 1024, 20000, 64, True, False) and not is_faster(1, 24, 24, 1024, 1024, 64, True, False)


def test_calls_on_the_cpu_and_slower_calls_are_the_hosts(monkeypatch):
    with use(Policy(otherwise="raise")):  # no error: sage_aot could compute them
        assert attend(call(), lambda: 1) == 1
        monkeypatch.setattr(torch.Tensor, "is_cuda", True)
        assert attend(call(), lambda: 2) == 2
    assert report() == {"tensors on the CPU": 1, SLOWER: 1}


@pytest.mark.parametrize(("q", "k", "rows"), [((3, 4, 8, 64), (3, 2, 5, 64), -2), ((3, 8, 4, 64), (3, 5, 2, 64), 1)])
@pytest.mark.parametrize(("has_mask", "is_causal", "bound"), [
    (True, False, "LEAST_MASKED"), (True, True, "LEAST_MASKED"), (False, True, "LEAST_CAUSAL"),
    (False, False, "LEAST_FULL")])
def test_small_calls_are_left_to_the_host_at_once(monkeypatch, q, k, rows, has_mask, is_causal, bound):
    q, k = torch.empty(q), torch.empty(k)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    operations = 4 * 3 * 4 * 8 * 5 * 64  # for each pair of a query and a key and each channel
    for least, small in ((operations, False), (operations + 1, True)):
        monkeypatch.setattr(_policy, bound, least)
        with use(Policy()):
            assert is_small(q, k, has_mask, is_causal, rows) is small
        assert not is_small(q, k, has_mask, is_causal, rows), "the policy serves whatever is possible"
    assert report() == {SLOWER: 1}
    with use(Policy()):
        assert not is_small(NESTED, NESTED, has_mask, is_causal)
        monkeypatch.setattr(torch.Tensor, "is_cuda", False)
        assert not is_small(q, k, has_mask, is_causal, rows), "its reason is the device"


def test_no_small_call_is_faster():
    masks = (False, False, LEAST_FULL), (True, False, LEAST_CAUSAL), (False, True, LEAST_MASKED)
    for headdim, (is_causal, has_mask, least) in itertools.product((64, 128, 256), masks):
        for keys in (4096, 64):  # with 64 the causal mask saves half
            queries = next(n for n in range(64, 10**7, 64)
                           if is_faster(1, 24, 2, n, max(n, keys), headdim, is_causal, has_mask))
            assert 4 * 24 * queries * max(queries, keys) * headdim >= least > 1e9


def test_keys_that_no_query_sees_do_not_count_as_work(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(_policy, "is_faster", lambda *args: asked.append(args))
    with use(Policy()):
        for described in (call(is_causal=True), call(is_causal=True, bottom_right=True), call(mask=mask(1, 40))):
            attend(described, lambda: None)
    assert asked == [(2, 4, 4, 30, 30, 64, True, False), (2, 4, 4, 30, 40, 64, True, False),
                     (2, 4, 4, 30, 40, 64, False, True)]


# --- policies and the report ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("wrong", "message"), [
    ({"when": "always"}, r"when: expected one of \('faster', 'possible'\), got 'always'"),
    ({"otherwise": "sdpa"}, r"otherwise: expected one of \('host', 'raise'\), got 'sdpa'"),
    ({"options": None}, "options: expected a mapping, got NoneType"),
    ({"options": {"layout": "NHD"}}, "options: expected some of clip, .*, got layout"),
    ({"options": {"qk": "int7"}}, "qk: expected .*int7"),
    ({"options": {"smoothv": True}}, "options: expected some of .*smooth_v.*, got smoothv"),
])
def test_policies_are_checked(wrong, message):
    with pytest.raises(ArgumentError, match=message):
        Policy(**wrong)


def test_a_call_may_have_a_policy_of_its_own():
    strict = Policy("possible", "raise", {"smooth_v": True})
    with use(Policy(options={"qk": "int4"})):
        out = attend(call(), lambda: pytest.fail("the host was called"), policy=strict)
        assert torch.equal(out, sage_aot.attn(*tensors(), smooth_v=True))
        with pytest.raises(UnsupportedError, match="got: dropout"):
            attend(REFUSED["dropout"], lambda: pytest.fail("the host was called"), policy=strict)
        assert attend(call(), lambda: 1) == 1
    assert attend(call(), lambda: 2, policy=Policy()) == 2


def test_a_policy_keeps_its_options():
    options = {"smooth_v": True}
    policy = Policy(options=options)
    options["smooth_v"] = "yes"
    assert policy.options == {"smooth_v": True}


def test_a_policy_is_no_word():
    with pytest.raises(ArgumentError, match="policy: expected a Policy, got 'possible'; write Policy"):
        use("possible").__enter__()


@pytest.mark.parametrize("scale", [np.float32("nan"), True, np.True_, math.nan, 2e6, np.array([0.3]),
                                   torch.tensor(0.3, requires_grad=True), torch.tensor(0.3, device="meta")], ids=repr)
def test_scales_that_torch_may_take(scale):
    assert refusal(call(scale=scale)) == "a scale that sage_aot does not take"
    assert refusal(call(scale=1)) is refusal(call(scale=np.float64(0.3))) is None


@pytest.mark.parametrize("scale", [np.float32(0.25), np.float64(0.25), np.array(0.25), torch.tensor(0.25)], ids=repr)
def test_scales_of_arrays_are_served(scale):
    expected = attend(call(scale=0.25), lambda: pytest.fail("the host ran"))
    assert torch.equal(attend(call(scale=scale, is_causal=np.False_), lambda: pytest.fail("the host ran")), expected)


def test_meta_tensors_are_served():
    described = Call(*(x.to("meta") for x in tensors()), is_causal=True, bottom_right=True)
    with use(Policy("possible", "raise")):
        out = attend(described, lambda: pytest.fail("the host ran"))
    assert out.is_meta and out.shape == described.q.shape and out.dtype == described.q.dtype
    with use(Policy()):
        assert attend(described, lambda: "the host's") == "the host's"
    assert report() == {"sage_aot": 1, "tensors on meta": 1}


def test_tensors_of_other_devices_are_the_hosts():
    with FakeTensorMode():  # torch without the device makes no other tensors there
        q = torch.empty(2, 4, 30, 64, device="xpu")
    assert _policy._refusal_of_types(Call(q, q, q)) == "tensors on xpu"


def test_a_dropout_that_torch_refuses_is_not_served():
    assert refusal(call(dropout=-1.0)) == "dropout"


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # which torch's forward gradients use
@pytest.mark.parametrize("work", [
    lambda f, x: torch.func.jvp(f, (x,), (x,)), lambda f, x: torch.func.vmap(f)(x[None]),
    lambda f, x: torch.func.grad(lambda x: f(x).sum())(x), lambda f, x: dual(f, x)],
    ids=["jvp", "vmap", "grad", "dual"])
def test_transformations_of_torch_are_the_hosts(work):
    q, k, v = tensors(dtype=torch.float32)
    reason = []
    work(lambda x: reason.append(refusal(Call(x, k, v))) or x, q)
    assert reason[0] in ("forward gradients, or a transformation of torch.func", "gradients",
                         "tensors that are nested, sparse or of a subclass")
    assert refusal(Call(q, k, v)) is None


def dual(function, x):
    with forward_ad.dual_level():
        return function(forward_ad.make_dual(x, x))


def test_a_call_that_fails_is_not_counted(monkeypatch):
    monkeypatch.setattr(_policy, "attn", lambda *args, **options: {}["missing"])
    for work in (attend, _policy.serve_anyway):
        with pytest.raises(KeyError):
            work(call(), lambda: None)
    assert report() == {}


def test_a_policy_ends_with_its_context():
    before = _policy._policy
    with pytest.raises(KeyError), use(Policy("possible")) as own:
        assert _policy._policy is own
        raise KeyError
    assert _policy._policy is before


def test_reasons_are_logged_once(caplog):
    caplog.set_level(logging.INFO, "sage_aot.integrations")
    for _ in range(3):
        attend(REFUSED["dropout"], lambda: None)
        attend(call(), lambda: None)
    assert [record.getMessage() for record in caplog.records] == ["not served by sage_aot: dropout"]
    assert report() == {"dropout": 3, "sage_aot": 3}
    reset_report()
    assert report() == {}


def test_a_line_that_two_threads_begin_at_once_has_one_tally():
    first = _policy._new_tally("a reason")
    first.add()
    assert _policy._new_tally("a reason") is first and report() == {"a reason": 1}


def test_threads_count_together():
    """A thread that is interrupted within a step of counting would lose the steps of others."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=lambda: [_policy.count("dropout") for _ in range(20000)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert report() == report() == {"dropout": 80000}, "reading does not count"
    attend(call(), lambda: None)
    attend(REFUSED["dropout"], lambda: None)
    assert list(report().items()) == [("dropout", 80001), ("sage_aot", 1)]
