"""Policy: which calls sage_aot serves, each rule once, and what becomes of the others."""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import math
import pickle
import random
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
from sage_aot._kernels.axes import HEADDIMS
from sage_aot.errors import ArgumentError, UnsupportedError
from sage_aot.integrations import (
    Policy,
    _calibration,
    _policy,
    _report,
    _routes,
    _rules,
    _serve,
    report,
    reset_report,
    use,
)
from sage_aot.integrations._gain import (
    KINDS,
    NEVER,
    Work,
    built_in,
    is_faster,
    kernel_headdim,
    kind_of,
    pairs_in_window,
    prefers_flash,
)
from sage_aot.integrations._report import SLOWER
from sage_aot.integrations._routes import is_small
from sage_aot.integrations._rules import HostCall, key_mask_of, why_not_computed
from sage_aot.integrations._serve import attend


def tensors(q=(2, 4, 30, 64), kv=(2, 4, 40, 64), dtype=torch.bfloat16, v_headdim=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = q, kv, (*kv[:-1], v_headdim or kv[-1])
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def call(*, q=(2, 4, 30, 64), kv=(2, 4, 40, 64), dtype=torch.bfloat16, v_headdim=None, **more):
    return HostCall(*tensors(q, kv, dtype, v_headdim), **more)


def mask(*shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.5


NESTED = torch.nested.nested_tensor([torch.ones(2, 3, 64), torch.ones(2, 5, 64)], layout=torch.jagged)

REFUSED = {
    "an argument of the host's": call(beyond="an argument of the host's"),
    "dropout": call(dropout=0.1),
    "gradients": HostCall(tensors()[0].requires_grad_(), *tensors()[1:]),
    "a scale that sage_aot does not take": call(scale=torch.tensor(0.3, requires_grad=True)),
    "dtype float64": call(dtype=torch.float64),
    "dtypes that differ": HostCall(tensors()[0].float(), *tensors()[1:]),
    "devices that differ": HostCall(tensors()[0], *(x.to("meta") for x in tensors()[1:])),
    "tensors that are nested, sparse or of a subclass": HostCall(NESTED, NESTED, NESTED),
    "tensors of other than 4 dimensions": call(q=(4, 30, 64), kv=(4, 40, 64)),
    "empty tensors": call(kv=(2, 4, 0, 64)),
    "shapes that are broadcast": call(kv=(1, 4, 40, 64)),
    "heads that are broadcast": call(kv=(2, 1, 40, 64)),
    "head dims above 256": call(q=(1, 1, 3, 257), kv=(1, 1, 3, 257)),
    "channels that are not contiguous": HostCall(*(x.transpose(2, 3) for x in tensors((1, 1, 64, 32), (1, 1, 64, 32)))),
    "a mask with is_causal": call(q=(2, 4, 40, 64), is_causal=True, mask=mask(2, 1, 1, 40)),
    "is_causal with more queries than keys": call(q=(2, 4, 50, 64), is_causal=True),
    "a mask of numbers": call(mask=torch.zeros(2, 1, 1, 40)),
    "a mask of another shape": call(mask=mask(2, 1, 40, 30)),
    "a window that is aligned top-left": call(window=(7, 0)),
    "sinks that are not a number for each head": call(sinks=torch.zeros(2)),
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


def test_the_error_names_the_reason_in_compiled_code_too():
    torch.compiler.reset()
    compiled = torch.compile(lambda *qkv: attend(HostCall(*qkv, dropout=0.1), lambda: qkv[0]), backend="eager",
                             fullgraph=True)
    with use(Policy("possible", "raise")), pytest.raises(Exception, match="got: dropout; let the host compute it"):
        compiled(*tensors())


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_autocast_casts_before_types_matter(layout, compiled):
    """Models with normed q and k have those in float32 with a v in bfloat16."""
    q, k, v = tensors((2, 4, 40, 64), (2, 4, 40, 64))
    expected = sage_aot.attn(q, k, v, layout=layout)

    def run(q, k, v):
        return attend(HostCall(q, k, v, layout=layout), lambda: torch.zeros(()))

    run = torch.compile(run, backend="eager", fullgraph=True) if compiled else run
    with use(Policy("possible", "raise")), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(run(q.float(), k.float(), v), expected)
        assert torch.equal(run(q, k.float(), v.float()), expected)
    with use(Policy("possible")):
        assert run(q.float(), k.float(), v).shape == (), "without autocast the host's"
        with torch.autocast("cpu", torch.bfloat16):
            assert run(q.double(), k, v).shape == (), "autocast leaves float64"


def test_a_subclass_is_the_hosts():
    class Own(torch.Tensor):
        pass

    q, k, v = tensors()
    for described in (HostCall(q.as_subclass(Own), k, v), HostCall(q, k.as_subclass(Own), v),
                      HostCall(q, k, v.as_subclass(Own)), HostCall(q.to_sparse(), k, v)):
        assert why_not_computed(described) == "tensors that are nested, sparse or of a subclass"
    assert why_not_computed(HostCall(torch.nn.Parameter(q, requires_grad=False), k, v)) is None


def test_gradients_matter_where_they_are_recorded():
    with torch.no_grad():
        assert why_not_computed(REFUSED["gradients"]) is None


def float64(q, k, v, seen=None, scale=None):
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = q.double() @ k.transpose(2, 3) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if seen is not None:
        scores = scores.masked_fill(~seen, -torch.inf)
    return scores.softmax(-1).nan_to_num(0.0) @ v


def below(queries, keys, offset=0):
    return torch.ones(queries, keys, dtype=torch.bool).tril(offset)


def between(queries, keys, left, right):
    """Elements that a window shows, aligned bottom-right."""
    behind = torch.arange(keys) - torch.arange(queries)[:, None] - (keys - queries)
    return (-left <= behind) & (behind <= right)


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
    "mask of keys with causal, bottom right": (call(is_causal=True, bottom_right=True, mask=mask(2, 1, 1, 40)),
                                                 mask(2, 1, 1, 40) & below(30, 40, 10)),
    "mask of one query": (call(q=(2, 4, 1, 64), mask=mask(2, 1, 1, 40)), mask(2, 1, 1, 40)),
    "mask of queries": (call(mask=mask(30, 40)), mask(30, 40)),
    "mask of queries, a column": (call(mask=mask(30, 1)), mask(30, 1)),
    "mask of queries for each entry": (call(mask=mask(2, 1, 30, 40)), mask(2, 1, 30, 40)),
    "mask for each head": (call(mask=mask(1, 4, 30, 40)), mask(1, 4, 30, 40)),
    "mask of keys for each head": (call(mask=mask(2, 4, 1, 40)), mask(2, 4, 1, 40)),
    "mask of queries, not contiguous": (call(mask=mask(2, 1, 40, 30).mT), mask(2, 1, 40, 30).mT),
    "mask of queries, grouped heads": (call(kv=(2, 2, 40, 64), grouped=True, mask=mask(4, 30, 40)), mask(4, 30, 40)),
    "mask of queries with causal, bottom right": (
        call(is_causal=True, bottom_right=True, mask=mask(2, 1, 30, 40)), mask(2, 1, 30, 40) & below(30, 40, 10)),
    "window": (call(window=(7, 0), bottom_right=True), between(30, 40, 7, 0)),
    "window, causal": (call(window=(7, 0), is_causal=True, bottom_right=True), between(30, 40, 7, 0)),
    "window to both sides": (call(window=(3, 5), bottom_right=True), between(30, 40, 3, 5)),
    "window without an end": (call(window=(-1, 2), bottom_right=True), between(30, 40, 99, 2)),
    "window of as many queries as keys": (call(q=(2, 4, 40, 64), window=(7, 0)), between(40, 40, 7, 0)),
    "window that hides one pair": (call(window=(38, 29), bottom_right=True), between(30, 40, 38, 29)),
    "window that hides one pair in front": (call(window=(-1, 28), bottom_right=True), between(30, 40, 99, 28)),
    "window that hides nothing": (call(window=(39, 29), bottom_right=True), None),
    "window that hides nothing, causal": (call(window=(39, 0), is_causal=True, bottom_right=True), below(30, 40, 10)),
    "window of one query": (call(q=(2, 4, 1, 64), window=(7, 0), bottom_right=True), between(1, 40, 7, 0)),
    "window with a mask of keys": (call(window=(7, 0), bottom_right=True, mask=mask(2, 1, 1, 40)),
                                     between(30, 40, 7, 0) & mask(2, 1, 1, 40)),
    "window of few queries with a mask": (
        call(q=(2, 4, 3, 64), window=(7, 0), bottom_right=True, mask=mask(3, 40)), between(3, 40, 7, 0) & mask(3, 40)),
    "window of few queries with a column": (
        call(q=(2, 4, 3, 64), window=(7, 0), bottom_right=True, mask=mask(3, 1)), between(3, 40, 7, 0) & mask(3, 1)),
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


@pytest.mark.parametrize("name", ["plain", "grouped heads", "causal", "mask of keys", "mask of queries", "window"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sinks_join_the_softmax(exact, name, dtype):
    described, seen = SERVED[name]
    sinks = torch.tensor([-1.0, 0.5, 2.0, 4.0])
    scores = described.q.double() @ described.k.double().repeat_interleave(4 // described.k.size(1), 1).mT / 8
    scores = scores if seen is None else scores.masked_fill(~seen, -torch.inf)
    weights = torch.cat([scores, sinks.double()[:, None, None].expand(*scores.shape[:3], 1)], -1).softmax(-1)[..., :-1]
    expected = weights @ described.v.double().repeat_interleave(4 // described.v.size(1), 1)
    out = attend(described._replace(sinks=sinks.to(dtype)), lambda: pytest.fail("the host was called"))
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-2)
    assert (out.double() - float64(*described[:3], seen)).abs().max() > 0.1, "without sinks it is another result"


def handed_on(monkeypatch, described):
    """Number of keys and options that sage_aot.attn gets for a call."""
    asked = []
    monkeypatch.setattr(_serve, "attn", lambda q, k, v, **options: asked.append((k.size(2), options)) or q)
    attend(described, lambda: pytest.fail("the host was called"))
    return asked[0]


def test_a_mask_of_keys_is_handed_on_as_one(monkeypatch):
    """A mask of keys saves the work of the keys that it hides; and a window of one query is no window."""
    for shape, is_of_keys in (((2, 1, 1, 40), True), ((40,), True), ((30, 40), False), ((2, 4, 1, 40), False)):
        _, options = handed_on(monkeypatch, call(mask=mask(*shape)))
        assert (options["key_mask"] is None, options["attn_mask"] is None) == (not is_of_keys, is_of_keys)
    keys, options = handed_on(monkeypatch, SERVED["window of one query"][0])
    assert keys == 8 and options["window"] is None and not options["is_causal"]
    keys, options = handed_on(monkeypatch, SERVED["window of few queries with a mask"][0])
    assert keys == 10 and options["window"] == (7, 0) and options["attn_mask"].shape == (3, 10)


NEEDS_SPARSE = {
    "a window": call(window=(7, 0), bottom_right=True), "sinks": call(sinks=torch.zeros(4)),
    "a mask that differs by query or head": call(mask=mask(30, 40))}


@pytest.mark.kernels("sm89")  # for its options
@pytest.mark.parametrize("name", NEEDS_SPARSE)
@pytest.mark.parametrize("compiled", [False, True])
def test_options_without_such_kernels_are_a_reason(name, compiled):
    """Kernels of 4 bits with a window, sinks or a mask of queries do not exist."""
    described = NEEDS_SPARSE[name]
    reason = f"{name}, for which there is no kernel with the policy's options"
    host = torch.zeros(())
    run = torch.compile(attend, backend="eager", fullgraph=True) if compiled else attend
    with use(Policy("possible", options={"qk": "int4"})):
        assert run(described, lambda: host) is host or compiled
        with pytest.raises(UnsupportedError, match=f"got: {reason}; close"):
            _serve.serve_anyway(described, "close")
    with use(Policy("possible", "raise", {"qk": "int4"})):
        with pytest.raises(Exception, match=f"got: {reason}; let the host compute it"):
            run(described, lambda: host)
        assert attend(call(window=(39, 0), is_causal=True, bottom_right=True), lambda: None) is not None
    with use(Policy("possible", "raise", {"smooth_v": True, "rotate": True})):
        assert run(described, lambda: host).shape == described.q.shape


def test_gradients_of_sinks_are_the_hosts():
    described = call(sinks=torch.nn.Parameter(torch.zeros(4)))
    assert why_not_computed(described) == "gradients"
    with torch.no_grad():
        assert why_not_computed(described) is None


def test_masks_of_a_subclass_or_of_another_device_are_the_hosts():
    class Own(torch.Tensor):
        pass

    assert why_not_computed(call(mask=mask(30, 40).as_subclass(Own))) == (
        "tensors that are nested, sparse or of a subclass")
    assert why_not_computed(call(mask=mask(30, 40).to("meta"))) == "devices that differ"
    assert why_not_computed(call(sinks=torch.zeros(4, device="meta"))) == "devices that differ"


def test_rows_that_see_no_key_are_zeros(exact):
    seen = mask(30, 40)
    seen[3] = False
    for described in (call(mask=seen), call(mask=seen, sinks=torch.ones(4))):
        assert attend(described, lambda: None)[:, :, 3].eq(0).all()


def test_one_query_has_no_causal_mask(monkeypatch):
    """Q heads of a KV head could not share the reads of k and v under a causal mask."""
    asked = []
    monkeypatch.setattr(_serve, "attn", lambda *args, **options: asked.append(options["is_causal"]))
    for queries in (1, 2):
        attend(call(q=(2, 4, queries, 64), is_causal=True, bottom_right=True), lambda: pytest.fail("the host ran"))
    assert asked == [False, True]


@pytest.mark.parametrize(("shape", "found"), [
    ((40,), True), ((1, 40), True), ((30, 1), False), ((30, 40), False), ((1, 1, 1, 40), True), ((2, 1, 1, 1), True),
    ((2, 1, 1, 40), True), ((2, 4, 1, 40), False), ((2, 1, 30, 40), False), ((3, 1, 1, 40), False),
    ((2, 1, 1, 41), False), ((1, 2, 1, 1, 40), False)])
def test_masks_of_keys_are_known_by_shape(shape, found):
    given = mask(*shape)
    result = key_mask_of(call(mask=given))
    assert (result is not None) == found
    if found:
        assert torch.equal(result[:, None, None].expand(2, 4, 30, 40), given.expand(2, 4, 30, 40))
        assert result.untyped_storage().data_ptr() == given.untyped_storage().data_ptr()


@pytest.mark.parametrize("v_headdim", [64, 32])
def test_the_output_lies_in_memory_as_q_does(v_headdim):
    q, k, v = tensors(v_headdim=v_headdim)
    expected, expected_lse = attend(HostCall(q, k, v), lambda: None, return_lse=True)
    rows = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    out, lse = attend(HostCall(*rows), lambda: None, return_lse=True)
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
    assert expected.is_contiguous()
    assert v_headdim < 64 and out.is_contiguous() or out.transpose(1, 2).is_contiguous()
    causal = attend(HostCall(*rows, is_causal=True), lambda: None)
    assert torch.equal(causal, attend(HostCall(q, k, v, is_causal=True), lambda: None)), "rows are cut, not heads"


# --- where it is faster -----------------------------------------------------------------------------------------------

H200, _ = built_in((9, 0))


def faster(batch, q_heads, kv_heads, queries, keys, headdim, is_causal, has_mask, thresholds=H200):
    threshold = thresholds.calls[kind_of(is_causal, "padded" if has_mask else None), kernel_headdim(headdim)]
    return is_faster(threshold, Work.of(batch, q_heads, kv_heads, queries, keys, headdim, is_causal))


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
    assert faster(*shape, is_causal, has_mask) is expected


LOG = Path(__file__).parents[2] / "bench/results/h200-2026-11-25-crossover/crossover.json"


def test_what_is_served_was_at_least_as_fast_in_the_log():
    served = missed = 0
    for row in json.loads(LOG.read_text())["rows"]:
        torchs = [row[name] for name in ("sdpa", "cudnn", "flash", "efficient") if row[name]]
        gain = min(min(way[clock] for way in torchs) / row["ours"][clock] for clock in ("gpu", "wall"))
        sizes = (row[name] for name in ("batch", "heads", "kv_heads", "queries", "keys", "headdim"))
        if faster(*sizes, row["kind"] == "causal", row["kind"] == "padded"):
            assert gain >= 1, row
            served += 1
        else:
            missed += gain > 1
    assert (served, missed) == (53, 6)


def test_flash_was_faster_in_the_log_where_it_is_preferred():
    rows = [row for row in json.loads(LOG.read_text())["rows"] if row["kind"] == "full" and prefers_flash(
        H200, *(row[name] for name in ("batch", "heads", "queries", "keys", "headdim")))]
    ratios = [row["sdpa"][clock] / row["flash"][clock] for row in rows for clock in ("gpu", "wall")]
    assert len(rows) == 30 and 1.04 < min(ratios) and 4.4 < max(ratios) < 4.5


@pytest.mark.parametrize(("shape", "expected"), [
    ((1, 32, 16, 2048), True), ((1, 32, 16, 2047), False), ((1, 33, 16, 2048), False), ((2, 16, 2, 2048), True),
    ((1, 32, 1, 8192), False), ((1, 32, 128, 8192), True), ((1, 32, 128, 8191), False), ((1, 32, 129, 9000), False),
    ((1, 1, 16, 2048), True), ((1, 32, 16, 100000), True), ((1, 32, 17, 2048), False), ((1, 32, 17, 8192), True)])
def test_few_queries_prefer_flash(shape, expected):
    for headdim in (16, 64, 96, 256):
        assert prefers_flash(H200, *shape, headdim) is expected
        assert not prefers_flash(built_in((8, 0))[0], *shape, headdim), "torch chooses it itself there"
    assert not prefers_flash(H200, *shape, 257)


def test_flash_is_preferred_where_all_corners_around_a_shape_do():
    around = {(64, heads, 16, keys) for heads in (32, 768) for keys in (128, 512)}
    thresholds = H200._replace(flash=frozenset(around))
    assert prefers_flash(thresholds, 2, 24, 16, 200, 64) and prefers_flash(thresholds, 4, 8, 16, 128, 64)
    for shape in ((2, 24, 16, 513, 64), (2, 24, 17, 200, 64), (1, 31, 16, 200, 64), (2, 24, 16, 200, 65),
                  (2, 24, 16, 200, 32), (2, 24, 16, 127, 64)):
        assert not prefers_flash(thresholds, *shape), shape
    assert prefers_flash(thresholds, 99, 99, 16, 200, 64), "more heads than in the grid are as its last"
    for corner in around:
        assert not prefers_flash(H200._replace(flash=frozenset(around - {corner})), 2, 24, 16, 200, 64)


def test_thresholds_hold_for_head_dims_up_to_their_own():
    def least(headdim, is_causal=False, has_mask=False):
        return next(n for n in range(256, 20000, 16) if faster(1, 24, 24, n, n, headdim, is_causal, has_mask))

    assert least(65) > least(128) and least(40) > least(64) and least(129) > least(256)
    assert least(128, has_mask=True) < least(128)
    # the operations of a causal mask: half of the square, and what lies left of it
    assert faster(1, 24, 24, 1024, 20000, 64, True, False) and not faster(1, 24, 24, 1024, 1024, 64, True, False)


MODELS = {"Wan 14B 720p": (1, 40, 40, 75600, 75600, 128), "Llama 3 8B": (1, 32, 8, 32768, 32768, 128)}


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (12, 0), (12, 1)])
def test_every_chip_with_fast_kernels_has_thresholds(capability):
    thresholds, source = built_in(capability)
    assert thresholds.calls.keys() == {(kind, headdim) for kind in KINDS for headdim in HEADDIMS}
    assert ("measured" in source) == (capability == (9, 0)) and ("estimated" in source) == (capability != (9, 0))
    for shape in MODELS.values():
        assert all(faster(*shape, is_causal, False, thresholds) for is_causal in (False, True))
    for headdim in HEADDIMS:
        assert not faster(1, 32, 8, 1, 8192, headdim, False, False, thresholds), "decoding"
        assert not faster(64, 12, 12, 128, 128, headdim, False, False, thresholds), "an encoder"


REBUILT = Path(__file__).parents[2] / "bench/results/h100-2026-11-26-rebuilt/rebuilt.json"


@pytest.mark.parametrize(("arch", "capability"), [("sm80", (8, 0)), ("sm86", (8, 6)), ("sm80", (8, 9)),
                                                  ("sm80", (12, 0))])
def test_what_is_served_elsewhere_was_faster_with_rebuilt_kernels(arch, capability):
    thresholds, _ = built_in(capability)
    served = 0
    for row in json.loads(REBUILT.read_text()):
        n = row["n"]
        if faster(4, 32, 32, n, n, row["d"], row["causal"], False, thresholds):
            assert row[f"our {arch} call"] > row["flash2"], row
            served += 1
    assert served >= 4


@pytest.mark.parametrize("capability", [(10, 0), (10, 3), (11, 0), (13, 0), (9, 9)])
def test_chips_that_run_amperes_sources_leave_every_call_to_torch(capability):
    thresholds, source = built_in(capability)
    assert set(thresholds.calls.values()) == {NEVER} and "coverage" in source and not thresholds.flash
    assert not any(faster(*shape, False, False, thresholds) for shape in MODELS.values())


@pytest.mark.parametrize("capability", [(10, 0), (10, 3)])
def test_a_b200_computes_all_calls_by_torch(monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setenv("SAGE_AOT_CALIBRATION", "0")
    monkeypatch.delitem(_calibration._chosen, -1)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    q = torch.empty(1, 1, 1, 64).expand(8, 40, 32768, 64)
    with use(Policy()):
        for options in ({}, {"is_causal": True}, {"mask": torch.ones(8, 1, 1, 32768).bool()}):
            assert attend(HostCall(q, q, q, **options), lambda: 1) == 1
            assert is_small(q, q, "mask" in options, "is_causal" in options)
    assert report() == {SLOWER: 6}


def test_calls_on_the_cpu_and_slower_calls_are_the_hosts(monkeypatch):
    with use(Policy(otherwise="raise")):  # no error: sage_aot could compute them
        assert attend(call(), lambda: 1) == 1
        monkeypatch.setattr(torch.Tensor, "is_cuda", True)
        assert attend(call(), lambda: 2) == 2
    assert report() == {"tensors on the CPU": 1, SLOWER: 1}


# --- routes -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def threshold(monkeypatch):
    """Sets the operations from which a call is faster, by kind; all are CUDA tensors."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)

    def set_to(**least):
        reset_report()
        for module in (_routes, _rules):
            monkeypatch.setattr(module, "threshold_of", lambda device, kind, headdim: (0, least[kind]))
    return set_to


@pytest.mark.parametrize(("q", "k", "rows"), [((3, 4, 8, 64), (3, 2, 5, 64), -2), ((3, 8, 4, 64), (3, 5, 2, 64), 1)])
@pytest.mark.parametrize(("has_mask", "is_causal", "kind"), [
    *((True, is_causal, kind) for kind in ("padded", "masked", "window") for is_causal in (False, True)),
    (False, True, "full"), (False, False, "full")])
def test_slower_calls_are_left_to_the_host_at_once(threshold, q, k, rows, has_mask, is_causal, kind):
    q, k = torch.empty(q), torch.empty(k)
    operations = 4 * 3 * 4 * 8 * 5 * 64  # for each pair of a query and a key and each channel
    for least, small in ((operations, False), (operations + 1, True)):
        threshold(**{**dict.fromkeys(KINDS, 1e15), kind: least})
        with use(Policy()):
            assert all(is_small(q, k, has_mask, is_causal, rows) is small for _ in range(3))
        assert report() == ({SLOWER: 3} if small else {})
        assert not is_small(q, k, has_mask, is_causal, rows), "the policy serves whatever is possible"


BASE = (2, 4, 8, 64), (2, 2, 16, 64)


@pytest.mark.parametrize(("q", "k", "mask", "rows"), [
    ((4, 4, 8, 64), (4, 2, 16, 64), (False, False), -2), ((2, 8, 8, 64), (2, 2, 16, 64), (False, False), -2),
    ((2, 4, 8, 64), (2, 1, 16, 64), (False, False), -2), ((2, 4, 16, 64), (2, 2, 16, 64), (False, False), -2),
    ((2, 4, 8, 64), (2, 2, 32, 64), (False, False), -2), ((2, 4, 8, 128), (2, 2, 16, 128), (False, False), -2),
    (*BASE, (True, False), -2), (*BASE, (False, True), -2), (*BASE, (False, False), 1)],
    ids=["batch", "heads", "kv heads", "queries", "keys", "channels", "mask", "causal", "layout"])
def test_a_route_is_of_its_kind_of_call_alone(threshold, monkeypatch, q, k, mask, rows):
    """A call that differs in one thing which decides is decided about anew, whatever was kept before it."""
    threshold(**dict.fromkeys(KINDS, 1e15))
    way, asked = _routes._way, []
    monkeypatch.setattr(_routes, "_way", lambda *kind: asked.append(kind) or way(*kind))
    base, other = (*map(torch.empty, BASE), False, False), (torch.empty(q), torch.empty(k), *mask, rows)
    with use(Policy()):
        for _ in range(2):
            assert is_small(*base) and is_small(*other)
    assert len(asked) == 2


def test_a_causal_call_has_a_route_where_neither_mask_is_faster(threshold):
    """Hosts that may mean no mask ask so."""
    q, k = torch.empty(1, 2, 8, 64), torch.empty(1, 2, 8, 64)
    half = 4 * 2 * 8 * 8 * 64 // 2
    for causal, full, small in ((half, 1e15, False), (half + 1, 1e15, True), (half + 1, 2 * half, False)):
        threshold(causal=causal, full=full)
        with use(Policy()):
            assert is_small(q, k, False, True) is small


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_calls_without_a_route(threshold):
    threshold(full=1e15)
    q, three = torch.empty(1, 2, 8, 64), torch.empty(2, 8, 64)
    strided = torch.nested.nested_tensor([torch.ones(2, 3, 64), torch.ones(2, 5, 64)])
    with use(Policy()):
        for pair in ((NESTED, NESTED), (strided, strided), (three, three), (q[:, :, :0], q), (q, q[:, :, :0])):
            assert not is_small(*pair, False, False)
        assert not is_small(torch.nn.Parameter(q), q, False, False)
        assert is_small(q, q, False, False)
    assert report() == {SLOWER: 1}


def test_routes_end_with_their_policy_and_report(threshold):
    q = torch.empty(1, 2, 8, 64)
    threshold(full=1e15)
    with use(Policy()):
        assert is_small(q, q, False, False) and report() == {SLOWER: 1}
        with use(Policy("possible")):
            assert not is_small(q, q, False, False)
        with use(Policy(otherwise="raise")):
            assert is_small(q, q, False, False) and report() == {SLOWER: 2}
        reset_report()
        assert is_small(q, q, False, False) and report() == {SLOWER: 1}


def test_routes_are_bounded(threshold, monkeypatch):
    threshold(full=1e15)
    monkeypatch.setattr(_routes, "_MOST", 4)
    with use(Policy()):
        for n in range(1, 30):
            q = torch.empty(1, 1, n, 64)
            assert is_small(q, q, False, False) and len(_policy.routes) <= 4
    assert report() == {SLOWER: 29}


def test_gpus_that_differ_have_no_routes(monkeypatch, threshold):
    """A route is looked up without asking for the device."""
    threshold(full=1e15)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    q = torch.empty(1, 2, 8, 64)
    for other, small in ((H200, True), (built_in((8, 0))[0], False)):
        monkeypatch.setattr(_routes, "chosen", lambda device, other=other: _calibration.Chosen(
            other if device == 1 else H200, "a test"))
        _policy.learned.clear()
        with use(Policy()):
            assert is_small(q, q, False, False) is small
            assert attend(HostCall(q, q, q), lambda: "host") == "host"


def test_threads_learn_and_forget_routes_together(threshold):
    threshold(full=1e15)
    q, stop, wrong = torch.empty(1, 2, 8, 64), threading.Event(), []

    def ask():
        while not stop.is_set():
            if not is_small(q, q, False, False):
                wrong.append("a call without its route")

    with use(Policy()):
        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        for _ in range(200):
            reset_report()
        stop.set()
        for thread in threads:
            thread.join()
        reset_report()
        assert not wrong and is_small(q, q, False, False) and report() == {SLOWER: 1}


def test_a_route_whose_report_ended_meanwhile_is_not_kept(threshold, monkeypatch):
    """A route that was kept would count in a tally that nobody reads."""
    threshold(full=1e15)
    q, kind = torch.empty(1, 2, 8, 64), _routes.Route

    def made(*values):
        reset_report()
        return kind(*values)

    monkeypatch.setattr(_routes, "Route", made)
    with use(Policy()):
        assert is_small(q, q, False, False) and report() == {} and not _policy.routes
        monkeypatch.setattr(_routes, "Route", kind)
        assert is_small(q, q, False, False) and report() == {SLOWER: 1}


def test_a_route_that_is_forgotten_while_it_is_looked_up(threshold, monkeypatch):
    """Another thread may clear the routes at any time."""
    class Cleared(dict):
        def __contains__(self, kind):
            return True

    threshold(full=1e15)
    q = torch.empty(1, 2, 8, 64)
    with use(Policy()):
        monkeypatch.setattr(_policy, "routes", Cleared())
        assert is_small(q, q, False, False)


def test_keys_that_no_query_sees_do_not_count_as_work(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(_rules, "is_faster", lambda threshold, work: asked.append((threshold, work)))
    with use(Policy()):
        for described in (call(is_causal=True), call(is_causal=True, bottom_right=True), call(mask=mask(1, 40)),
                          call(mask=mask(30, 40)), call(sinks=torch.zeros(4)), call(window=(39, 29), bottom_right=True),
                          call(q=(2, 4, 3, 64), window=(7, 0), bottom_right=True, mask=mask(1, 40)),
                          call(q=(2, 4, 1, 64), window=(7, 0), bottom_right=True)):
            attend(described, lambda: None)
    assert asked == [(H200.calls["causal", 64], Work.of(2, 4, 4, 30, 30, 64, True)),
                     (H200.calls["causal", 64], Work.of(2, 4, 4, 30, 40, 64, True)),
                     (H200.calls["padded", 64], Work.of(2, 4, 4, 30, 40, 64, False)),
                     (H200.calls["masked", 64], Work.of(2, 4, 4, 30, 40, 64, False)),
                     (H200.calls["masked", 64], Work.of(2, 4, 4, 30, 40, 64, False)),
                     (H200.calls["full", 64], Work.of(2, 4, 4, 30, 40, 64, False)),
                     (H200.calls["window", 64], Work(4 * 2 * 4 * 3 * 8 * 64, 2 * 4 * (3 + 2 * 10) * 64)),
                     (H200.calls["full", 64], Work.of(2, 4, 4, 1, 8, 64, False))]


def test_the_work_of_a_window_is_what_it_shows():
    dice = random.Random(0)
    for _ in range(300):
        queries, keys = dice.randrange(1, 12), dice.randrange(1, 12)
        left, right = dice.randrange(-1, 13), dice.randrange(-1, 13)
        shown = between(queries, keys, left if left >= 0 else 99, right if right >= 0 else 99)
        assert pairs_in_window(queries, keys, left, right) == shown.sum(), (queries, keys, left, right)
        causal = (shown & below(queries, keys, keys - queries)).sum()
        assert Work.of(1, 1, 1, queries, keys, 64, True, (left, right)).operations == 4 * 64 * causal


# --- policies and the report ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("wrong", "message"), [
    ({"when": "always"}, r"when: expected one of \('faster', 'possible'\), got 'always'"),
    ({"otherwise": "sdpa"}, r"otherwise: expected one of \('host', 'raise'\), got 'sdpa'"),
    ({"options": None}, "options: expected a mapping, got NoneType"),
    ({"options": {"layout": "NHD"}}, "options: expected some of clip, .*, got layout"),
    ({"options": {"window": (7, 0)}}, "options: expected some of clip, .*, got window"),
    ({"options": {"qk": "int7"}}, "qk: expected .*int7"),
    ({"options": {"smoothv": True}}, "options: expected some of .*smooth_v.*, got smoothv"),
    ({"options": {1: 2, "smoothv": True}}, "options: expected some of .*smooth_v.*, got 1, smoothv"),
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


def test_a_policy_takes_the_words_of_numpy():
    policy = Policy("possible", options={"qk": np.str_("int8")})
    assert type(policy.options["qk"]) is str
    assert torch.equal(attend(call(), lambda: pytest.fail("the host was called"), policy=policy),
                       sage_aot.attn(*tensors(), qk="int8"))


def test_a_policy_keeps_its_options():
    options = {"smooth_v": True}
    policy = Policy(options=options)
    options["smooth_v"] = "yes"
    assert policy.options == {"smooth_v": True}


def test_policies_have_hashes_by_value():
    made = [Policy("possible", "raise", {"smooth_v": True, "qk": "int4"}) for _ in range(2)]
    assert len({*made, Policy("possible", "raise", {"qk": "int4", "smooth_v": True})}) == 1
    others = {Policy(), Policy("possible"), Policy(otherwise="raise"), Policy(options={"smooth_v": True}),
              Policy(options={"smooth_v": False}), Policy(options={"qk": "int4"})}
    assert len(others) == 6
    of_scalars = [Policy(options={"smooth_v": flag(True)}) for flag in (bool, np.bool_, np.array, torch.tensor)]
    assert len({*of_scalars}) == 1 and all(policy.options["smooth_v"] is True for policy in of_scalars)
    for way in (lambda x: pickle.loads(pickle.dumps(x)), copy.copy, copy.deepcopy, dataclasses.replace):
        assert way(made[0]) == made[0] and hash(way(made[0])) == hash(made[0])
    assert dataclasses.asdict(made[0])["options"] == {"smooth_v": True, "qk": "int4"}
    assert repr(Policy(options={"qk": "int4"})) == "Policy(when='faster', otherwise='host', options={'qk': 'int4'})"


@pytest.mark.parametrize("change", [
    lambda x: x.__setitem__("qk", "int8"), lambda x: x.update(qk="int8"), lambda x: x.clear(), lambda x: x.pop("qk"),
    lambda x: x.popitem(), lambda x: x.setdefault("smooth_v", True), lambda x: x.__delitem__("qk"),
    lambda x: x.__ior__({"qk": "int8"})])
def test_the_options_of_a_policy_stay(change):
    policy = Policy(options={"qk": "int4"})
    with pytest.raises(TypeError, match="the options of a Policy stay as they are; make another with dataclasses"):
        change(policy.options)
    assert policy.options == {"qk": "int4"}
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.when = "possible"


def test_a_policy_is_no_word():
    with pytest.raises(ArgumentError, match="policy: expected a Policy, got 'possible'; write Policy"):
        use("possible").__enter__()


@pytest.mark.parametrize("scale", [np.float32("nan"), True, np.True_, math.nan, 2e6, np.array([0.3]),
                                   torch.tensor(0.3, requires_grad=True), torch.tensor(0.3, device="meta")], ids=repr)
def test_scales_that_torch_may_take(scale):
    assert why_not_computed(call(scale=scale)) == "a scale that sage_aot does not take"
    assert why_not_computed(call(scale=1)) is why_not_computed(call(scale=np.float64(0.3))) is None


@pytest.mark.parametrize("scale", [np.float32(0.25), np.float64(0.25), np.array(0.25), torch.tensor(0.25)], ids=repr)
def test_scales_of_arrays_are_served(scale):
    expected = attend(call(scale=0.25), lambda: pytest.fail("the host ran"))
    assert torch.equal(attend(call(scale=scale, is_causal=np.False_), lambda: pytest.fail("the host ran")), expected)


def test_meta_tensors_are_served():
    described = HostCall(*(x.to("meta") for x in tensors()), is_causal=True, bottom_right=True)
    with use(Policy("possible", "raise")):
        out = attend(described, lambda: pytest.fail("the host ran"))
    assert out.is_meta and out.shape == described.q.shape and out.dtype == described.q.dtype
    with use(Policy()):
        assert attend(described, lambda: "the host's") == "the host's"
    assert report() == {"sage_aot": 1, "tensors on meta": 1}


def test_tensors_of_other_devices_are_the_hosts():
    with FakeTensorMode():  # torch without the device makes no other tensors there
        q = torch.empty(2, 4, 30, 64, device="xpu")
    assert _rules._why_not_by_types(HostCall(q, q, q)) == "tensors on xpu"


def test_a_dropout_that_torch_refuses_is_not_served():
    assert why_not_computed(call(dropout=-1.0)) == "dropout"


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # which torch's forward gradients use
@pytest.mark.parametrize("work", [
    lambda f, x: torch.func.jvp(f, (x,), (x,)), lambda f, x: torch.func.vmap(f)(x[None]),
    lambda f, x: torch.func.grad(lambda x: f(x).sum())(x), lambda f, x: dual(f, x)],
    ids=["jvp", "vmap", "grad", "dual"])
def test_transformations_of_torch_are_the_hosts(work):
    q, k, v = tensors(dtype=torch.float32)
    reason = []
    work(lambda x: reason.append(why_not_computed(HostCall(x, k, v))) or x, q)
    assert reason[0] in ("forward gradients, or a transformation of torch.func", "gradients",
                         "tensors that are nested, sparse or of a subclass")
    assert why_not_computed(HostCall(q, k, v)) is None


def dual(function, x):
    with forward_ad.dual_level():
        return function(forward_ad.make_dual(x, x))


def test_a_call_that_fails_is_not_counted(monkeypatch):
    monkeypatch.setattr(_serve, "attn", lambda *args, **options: {}["missing"])
    for work in (attend, _serve.serve_anyway):
        with pytest.raises(KeyError):
            work(call(), lambda: None)
    assert report() == {}


def test_a_policy_ends_with_its_context():
    before = _policy._policy
    with pytest.raises(KeyError), use(Policy("possible")) as own:
        assert _policy._policy is own
        raise KeyError
    assert _policy._policy is before


def test_policies_may_end_in_any_order():
    """Contexts overlap where two threads of a server each have a request."""
    before, routes = _policy._policy, _policy.routes
    one, other, third = (use(Policy("possible", options={"qk": qk})) for qk in ("int8", "int4", "auto"))
    for context in (one, other, third):
        context.__enter__()
    one.__exit__(None, None, None)
    assert _policy.current().options == {"qk": "auto"}
    third.__exit__(None, None, None)
    assert _policy.current().options == {"qk": "int4"}
    other.__exit__(None, None, None)
    assert _policy._policy is before and _policy.routes is routes


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
    first = _report._begin("a reason")
    first.add()
    assert _report._begin("a reason") is first and report() == {"a reason": 1}


def test_threads_count_together():
    """A thread that is interrupted within a step of counting would lose the steps of others."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=lambda: [_report.count("dropout") for _ in range(20000)]) for _ in range(4)]
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


def test_whether_a_window_has_a_kernel_does_not_depend_on_the_default_dtype(default_dtype):
    default_dtype(torch.float64)
    assert _rules._explained_sparse.__wrapped__(None, 64, ())
