"""A kernel of the Hugging Face hub in the hosts that load one by its name: transformers and diffusers, in processes
without a network. LOCAL_KERNELS says where the repository is, as a user may."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from exact import attention
from hub_build import KERNELS, build
from hub_package import flash_attn

import sage_aot
from sage_aot.errors import UnsupportedError
from sage_aot.integrations import report


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    return build(tmp_path_factory.mktemp("hub"))


def run(program: str, built: Path, repo: str, **environment: str) -> list[str]:
    """The words that a program prints where a repository of the hub is this kernel."""
    pytest.importorskip(KERNELS)
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("SAGE_AOT", "PYTHONPATH"))}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=built,
                          env={**variables, "HF_HUB_OFFLINE": "1", "LOCAL_KERNELS": f"{repo}={built}", **environment})
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


SERVED = """
import sys, kernels
loaded, = kernels.get_loaded_kernels()
print(loaded.metadata.id, sys.modules[loaded.metadata.id + ".integrations._report"].report()["sage_aot"])
"""

TRANSFORMERS = f"""
import torch, transformers.utils
from transformers.utils import import_utils
# transformers asks for a newer `kernels` than there may be here, and calls it in no other way.
transformers.utils.is_kernels_available = import_utils.is_kernels_available = lambda *versions: True
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
config = LlamaConfig(vocab_size=64, hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
                     num_key_value_heads=1, head_dim=64)
model = LlamaForCausalLM(config).eval().bfloat16()
tokens = torch.randint(64, (2, 70))
mask = torch.ones_like(tokens)
mask[0, :11] = 0  # padding, which transformers takes out of the sequences

def outputs():
    with torch.no_grad():
        return [model(tokens).logits, model(tokens, attention_mask=mask).logits[mask.bool()],
                model.generate(tokens, attention_mask=mask, max_new_tokens=3, do_sample=False, output_logits=True,
                               return_dict_in_generate=True).logits[0]]

expected = outputs()
model.set_attn_implementation("an-organisation/sage-aot", allow_all_kernels=True)
for out, reference in zip(outputs(), expected):
    print(torch.cosine_similarity(out.double().flatten(), reference.double().flatten(), 0).item(), end=" ")
{SERVED}
model.train()
try:
    model(tokens)
except Exception as error:
    print(type(error).__name__)
"""


def test_transformers_loads_it_as_its_attention(built):
    pytest.importorskip("transformers", minversion="5.0")
    *cosines, kernel, served, refused = run(TRANSFORMERS, built, "an-organisation/sage-aot")
    assert len(cosines) == 3 and min(map(float, cosines)) > 0.999
    assert kernel.startswith("_sage_aot_cpu_")
    assert int(served) == 2 * (1 + 1 + 3), "a call for each layer of two passes and of three generated tokens"
    assert refused == "UnsupportedError"


DIFFUSERS = f"""
import torch
from diffusers.models.attention_dispatch import attention_backend, dispatch_attention_fn
torch.manual_seed(0)
q, k, v = torch.randn(3, 2, 70, 2, 64, dtype=torch.bfloat16)
call = dict(query=q, key=k, value=v, is_causal=True)
with attention_backend("sage_hub"):
    out = dispatch_attention_fn(**call, backend="sage_hub")
    again, lse = dispatch_attention_fn(**call, backend="sage_hub", attention_kwargs={{"return_lse": True}})
expected = dispatch_attention_fn(**call, backend="native")
near = [torch.cosine_similarity(x.double().flatten(), expected.double().flatten(), 0).item() for x in (out, again)]
print(*near, *lse.shape)
{SERVED}
"""


def test_diffusers_loads_it_as_its_backend_sage_hub(built):
    pytest.importorskip("diffusers", minversion="0.36")
    cosine, with_lse, *shape, kernel, served = run(DIFFUSERS, built, "SageAttention/sage-attention",
                                                DIFFUSERS_TRUST_REMOTE_KERNELS="true")
    assert float(cosine) > 0.998 and float(with_lse) > 0.998 and shape == ["2", "2", "70"]
    assert kernel.startswith("_sage_aot_cpu_") and served == "2"


# --- the functions that transformers calls ----------------------------------------------------------------------------


def draw(queries: int = 40, keys: int = 60) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = (2, queries, 4, 64), (2, keys, 2, 64), (2, keys, 2, 64)
    return [torch.randn(shape, dtype=torch.bfloat16) for shape in shapes]


def exactly(q, k, v, **options):
    """Attention of these layouts without quantization."""
    out, lse = attention(*(x.transpose(1, 2) for x in (q, k, v)), return_lse=True, **options)
    return out.transpose(1, 2), lse


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_flash_attn_func_is_attention_aligned_bottom_right(exact, causal, scale):
    q, k, v = draw()
    expected, expected_lse = exactly(q, k, v, is_causal=causal, scale=scale)
    out = flash_attn.flash_attn_func(q, k, v, softmax_scale=scale, causal=causal)
    assert torch.equal(out, expected)
    again, lse, nothing = flash_attn.flash_attn_func(q, k, v, 0.0, scale, causal, return_attn_probs=True)
    assert torch.equal(again, expected) and torch.equal(lse, expected_lse) and nothing is None
    assert report()["sage_aot"] == 2


def test_flash_attn_varlen_func_is_attention_of_each_sequence():
    q, k, v = (x.flatten(0, 1) for x in draw())
    begins_q, begins_k = (torch.tensor([0, first, 2 * rows], dtype=torch.int32) for first, rows in ((15, 40), (50, 60)))
    out = flash_attn.flash_attn_varlen_func(q, k, v, begins_q, begins_k, 65, 70, causal=True, deterministic=True)
    for (of_q, until_q), (of_k, until_k) in zip(((0, 15), (15, 80)), ((0, 50), (50, 120))):
        one = (q[None, of_q:until_q], k[None, of_k:until_k], v[None, of_k:until_k])
        assert torch.equal(out[None, of_q:until_q], flash_attn.flash_attn_func(*one, causal=True))


def test_windows_are_handed_on():
    """transformers so calls a sliding layer: a causal mask, and as many keys behind a query as in front of it."""
    q, k, v = draw(queries=60)
    out = flash_attn.flash_attn_func(q, k, v, causal=True, window_size=(9, 9))
    assert torch.equal(out, sage_aot.attn(q, k, v, is_causal=True, window=(9, 0), layout="NHD"))
    assert not torch.equal(out, flash_attn.flash_attn_func(q, k, v, causal=True))
    begins = torch.tensor([0, 40], dtype=torch.int32)
    packed = flash_attn.flash_attn_varlen_func(*(x[0, :40] for x in (q, k, v)), begins, begins, 40, 40, causal=True,
                                               window_size=(9, 9))
    alone = flash_attn.flash_attn_func(*(x[:1, :40] for x in (q, k, v)), causal=True, window_size=(9, 9))
    assert torch.equal(packed[None], alone)


@pytest.mark.parametrize("argument", [{"softcap": 30.0}, {"alibi_slopes": torch.ones(4)}, {"s_aux": torch.ones(4)},
                                      {"dropout_p": 0.1}])
def test_what_the_kernels_do_not_compute_is_refused(argument):
    q, k, v = draw()
    begins = torch.tensor([0, 40], dtype=torch.int32)
    packed = (*(x[0, :40] for x in (q, k, v)), begins, begins, 40, 40)
    for function, given in ((flash_attn.flash_attn_func, (q, k, v)), (flash_attn.flash_attn_varlen_func, packed)):
        with pytest.raises(UnsupportedError, match="expected"):
            function(*given, **argument)


def test_transformers_finds_every_argument_that_it_may_drop():
    """transformers drops without a word the arguments that a signature lacks, windows and sinks among them."""
    utils = pytest.importorskip("transformers.modeling_flash_attention_utils")
    supported = utils._lazy_define_process_function(flash_attn.flash_attn_varlen_func).keywords["supports_mapping"]
    asked = ("dropout_p", "window_size", "softcap", "s_aux", "deterministic", "max_seqlen_q", "max_seqlen_k")
    assert [name for name in asked if not supported[name]] == []
    names = [*inspect.signature(flash_attn.flash_attn_func).parameters]
    assert names[:11] == ["q", "k", "v", "dropout_p", "softmax_scale", "causal", "window_size", "softcap",
                          "alibi_slopes", "deterministic", "return_attn_probs"]  # FlashAttention-2's, in its order
