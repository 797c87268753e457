"""sage_aot behind torch's attention on CUDA tensors: what the policy serves, eager, in graphs and compiled."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import sage_aot
from sage_aot._cli import bench, calibrate
from sage_aot._tools import reference
from sage_aot.integrations import Policy, _calibration, audit, report, reset_report, use
from sage_aot.integrations._report import SERVED, SLOWER
from sage_aot.integrations.distributed import ring_forward
from sage_aot.integrations.torch import register_flash, replace_sdpa, sdpa

# Compiling warns of torch's own deprecations and advice, which are not this package's.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

LARGE = (1, 24, 4608, 128)
"""A call that is faster than torch's."""


@pytest.fixture(autouse=True)
def built_in_thresholds(monkeypatch):
    """Thresholds that are built in, whatever was measured on this machine."""
    monkeypatch.setenv("SAGE_AOT_CALIBRATION", "0")
    monkeypatch.setattr(_calibration, "_chosen", {})
    reset_report()


def draw(*shape, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(3, *shape, device="cuda", dtype=dtype, generator=generator).unbind()


def close(out, expected):
    return reference.measure(out, expected).cosine > 0.999


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.1}], ids=str)
def test_large_calls_are_served(options):
    q, k, v = draw(*LARGE)
    assert close(sdpa(q, k, v, **options), F.scaled_dot_product_attention(q, k, v, **options))
    assert report() == {SERVED: 1}


def test_padding_is_served_and_small_calls_are_torchs():
    q, k, v = draw(4, 16, 1024, 64)
    mask = torch.arange(1024, device="cuda") < torch.tensor([700, 1024, 3, 1000], device="cuda")[:, None, None, None]
    assert close(sdpa(q, k, v, mask), F.scaled_dot_product_attention(q, k, v, mask))
    small = [x[:1, :2] for x in (q, k, v)]
    assert torch.equal(sdpa(*small), F.scaled_dot_product_attention(*small))
    assert report() == {SERVED: 1, SLOWER: 1}


def test_the_output_lies_as_q_does():
    rows = draw(2, 4096, 16, 64)
    out = sdpa(*(x.transpose(1, 2) for x in rows))
    assert report() == {SERVED: 1} and out.transpose(1, 2).is_contiguous()
    assert torch.equal(out, sage_aot.attn(*rows, layout="NHD").transpose(1, 2))


@pytest.mark.inductor
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled(mode):
    q, k, v = draw(*LARGE)

    @replace_sdpa()
    def model(q, k, v):
        return F.scaled_dot_product_attention(q * 2, k, v, is_causal=True) + 1

    torch.compiler.reset()
    work = torch.compile(model, fullgraph=True, mode=mode)
    for _ in range(3):
        out = work(q, k, v).clone()
    assert torch.equal(out, sage_aot.attn(q * 2, k, v, is_causal=True) + 1)


def test_captured():
    q, k, v = draw(*LARGE)
    sdpa(q, k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sdpa(q, k, v)
    for x, fresh in zip((q, k, v), draw(*LARGE, seed=1)):
        x.copy_(fresh)
    out.fill_(float("nan"))
    graph.replay()
    assert torch.equal(out, sage_aot.attn(q, k, v))


@pytest.mark.parametrize("is_causal", [False, True])
def test_torchs_flash_attention(is_causal):
    if not hasattr(torch.nn.attention, "register_flash_attention_impl"):
        pytest.skip("this torch has no registration of flash attention")
    q, k, v = draw(*LARGE)
    register_flash()
    torch.nn.attention.activate_flash_attention_impl("sage_aot")
    try:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
            small = F.scaled_dot_product_attention(q[:, :2, :64], k[:, :2, :64], v[:, :2, :64])
    finally:
        torch.nn.attention.restore_flash_attention_impl()
    assert report() == {SERVED: 1, SLOWER: 1}
    expected, _ = sage_aot.attn(q, k, v, is_causal=is_causal, return_lse=True)  # which torch's operator returns too
    assert torch.equal(out, expected)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        assert torch.equal(small, F.scaled_dot_product_attention(q[:, :2, :64], k[:, :2, :64], v[:, :2, :64]))
    assert report() == {SERVED: 1, SLOWER: 1}, "torch's kernel is back"


@pytest.mark.parametrize("offset", [0, 1, 3, 8])
def test_a_ring_takes_views_of_a_flat_buffer(offset):
    """k and v as diffusers' ring receives them: parts of one buffer, aligned as its elements are."""
    q, k, v = draw(1, 300, 4, 64)
    flat = torch.cat([torch.zeros(offset, device="cuda", dtype=k.dtype), k.flatten(), v.flatten()])
    views = flat[offset:offset + k.numel()].view_as(k), flat[offset + k.numel():].view_as(v)
    for one, other in zip(ring_forward(q, *views), ring_forward(q, k, v)):
        assert torch.equal(one, other)


@pytest.mark.inductor
@pytest.mark.parametrize("options", [{}, {"is_causal": True, "sm_scale": 0.1}], ids=str)
def test_the_package_sageattention(options):
    sageattn = pytest.importorskip("sageattention").sageattn
    q, k, v = draw(2, 8, 500, 64)
    expected = sage_aot.attn(q, k, v, is_causal="is_causal" in options, scale=options.get("sm_scale"))
    assert torch.equal(sageattn(q, k, v, **options), expected)
    torch.compiler.reset()
    assert torch.equal(torch.compile(lambda *qkv: sageattn(*qkv, **options), fullgraph=True)(q, k, v), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sageattn(q, k, v, **options)
    out.fill_(float("nan"))
    graph.replay()
    assert torch.equal(out, expected)


def test_an_audit():
    q, k, v = draw(1, 4, 500, 64)
    with use(Policy("possible")), audit() as calls:
        out = sdpa(q, k, v, is_causal=True)
    expected = reference.measure(out, F.scaled_dot_product_attention(q, k, v, is_causal=True))
    assert [call[:5] for call in calls] == [((1, 4, 500, 64), (1, 4, 500, 64), "HND", True, False)]
    assert calls[0].accuracy == expected and 0.999 < expected.cosine < 1


@pytest.mark.parametrize("kv_heads", [32, 8])
def test_few_queries_run_by_torchs_flash_attention(kv_heads):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("torch chooses its FlashAttention-2 itself on this GPU, or it was not measured there")
    q, k, v = (torch.randn(1, heads, rows, 128, device="cuda").bfloat16()
               for heads, rows in ((32, 16), (kv_heads, 8192), (kv_heads, 8192)))
    grouped = {"enable_gqa": True} if kv_heads < 32 else {}
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        expected = F.scaled_dot_product_attention(q, k, v, scale=0.1, **grouped)
    with torch.no_grad():
        assert torch.equal(sdpa(q, k, v, scale=0.1, **grouped), expected)
        with sdpa_kernel(SDPBackend.MATH):
            assert not torch.equal(sdpa(q, k, v, scale=0.1, **grouped), expected), "the caller's choice"
        with pytest.raises(RuntimeError, match="(?i)size|shape|heads|s_kv"):
            sdpa(q, k, v[:, :, :-1], scale=0.1, **grouped)
    if kv_heads < 32:
        with pytest.raises(RuntimeError):
            sdpa(q, k, v)
    assert (sdpa(q.requires_grad_(), k, v, **grouped).sum().backward() or q.grad).abs().sum() > 0


def test_calibration(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SAGE_AOT_CALIBRATION", str(tmp_path))
    for name, seconds in {"SECONDS_OF_CALLS": 10, "SECONDS": 14}.items():
        monkeypatch.setattr(calibrate, name, seconds)
    assert calibrate.main(str(tmp_path / "times.json")) == 0
    assert _calibration.choose(0).source.startswith("measured by sage-aot calibrate")
    times = json.loads((tmp_path / "times.json").read_text())
    assert len(times["rows"]) > 10 and len(times["flash"]) > 10
    for row in times["rows"]:
        assert all(1 < way["gpu"] < 1e5 and 1 < way["wall"] < 1e5 for way in row["ways"].values())
    assert "wrote" in capsys.readouterr().out and report() == {SERVED: report()[SERVED]}


def test_the_bench(tmp_path, capsys):
    shapes = ["1,4,512,64", "1,8/2,512/1024,128", "2,4,512,64,padded", "1,4,512,64,causal", "2,4,512,64,masked",
              "1,4,512/700,64,window"]
    assert bench.main(shapes, str(tmp_path / "bench.png"), str(tmp_path / "bench.json")) == 0
    rows = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert [row["name"] for row in rows] == shapes and not any(row["served"] for row in rows)
    for row in rows:
        assert {"sdpa", "attn", "policy"} < row["ways"].keys()
        assert all(1 < times["gpu"] < 1e4 and 1 < times["wall"] < 1e4 for times in row["ways"].values())
    assert "| 1,8/2,512/1024,128 |" in capsys.readouterr().out
