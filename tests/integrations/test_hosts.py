"""xDiT, vLLM-Omni, LightX2V and SGLang: their own selection of attention finds the package sageattention by its name,
and sage_aot by the changes of docs/hosts; what they select computes attention. Each where an environment variable names
a checkout, or a folder with the wheel's files."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import programs
import pytest

DOCS = programs.ROOT / "docs/hosts"


def needs(variable: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(variable not in os.environ, reason=f"{variable} names no checkout")


# --- the programs -----------------------------------------------------------------------------------------------------


def run(program: str, *arguments: str, paths: list[str]) -> dict[str, Any]:
    return json.loads(programs.run(program, *arguments, paths=paths).splitlines()[-1])


def changed(checkout: str, diff: str, into: Path, *packages: str, strip: int = 1) -> str:
    """A copy of a host's packages with a diff of docs/hosts."""
    for package in packages:
        shutil.copytree(Path(checkout, package), into / package, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    done = subprocess.run(["git", "apply", "--unidiff-zero", f"-p{strip}", DOCS / diff], cwd=into, capture_output=True,
                          text=True, env={**os.environ, "GIT_CEILING_DIRECTORIES": str(into.parent)})
    assert done.returncode == 0, f"{checkout}: expected the version that docs/hosts names, got {done.stderr}"
    return str(into)


def with_entry_point(folder: Path, group: str, value: str) -> str:
    """A folder with a distribution that has an entry point."""
    metadata = folder / "of_a_test-0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: of-a-test\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(f"[{group}]\nsage_aot = {value}\n")
    return str(folder)


def block(page: str, opening: str) -> str:
    """The code of a page of docs/hosts that begins with a line."""
    found, = re.findall(rf"^```python\n({re.escape(opening)}\n.*?)^```$", (DOCS / page).read_text("utf-8"),
                        re.DOTALL | re.MULTILINE)
    return found


def check(calls: dict[str, Any], several: dict[str, int] | None = None) -> None:
    """Each call is exact without quantization, close to float64 with it, and sage_aot's; `several`: those that are more
    than one call of sage_aot."""
    for name, call in calls.items():
        assert call["exact"] < 2e-6, (name, call)
        assert (0 if "log-sum-exp" in name else 1e-4) < call["kernels"] < 0.05, (name, call)
        assert call["report"] == {"sage_aot": (several or {}).get(name, 1)}, (name, call)


# --- xDiT -------------------------------------------------------------------------------------------------------------


@needs("XDIT_PATH")
@pytest.mark.parametrize("backend", ["sage", "sage_aot"])
def test_xdit(backend, tmp_path):
    path = os.environ["XDIT_PATH"]
    if backend == "sage_aot":
        path = changed(path, "xdit.diff", tmp_path, "xfuser")
    found = json.loads(programs.run_two("xdit_host.py", backend, paths=[path]).splitlines()[-1])
    assert found["chosen"] == [backend.upper()]
    padded = found["calls"].pop("padded keys")
    check(found["calls"], {"ring: shared": 2})  # rank 0 sees its own tokens alone, where the mask is causal
    if backend == "sage":
        assert padded["exact"] > 0.5, "xDiT's function for SageAttention drops what says which keys are padding"
    else:
        assert 1e-4 < padded["kernels"] < 0.05 and padded["report"] == {}, "by attn_varlen, which counts nothing"


# --- vLLM-Omni --------------------------------------------------------------------------------------------------------


@needs("VLLM_OMNI_PATH")
def test_vllm_omni_by_the_package_sageattention():
    found = run("vllm_omni_host.py", "SAGE_ATTN", paths=[os.environ["VLLM_OMNI_PATH"]])
    assert found["chosen"] == "vllm_omni.diffusion.attention.backends.sage_attn.SageAttentionBackend"
    assert found["calls"].keys() == {"grouped heads", "causal, scale", "head dim 256"}, "no mask"
    assert len(found["ring"]) == 10
    check(found["calls"] | found["ring"])
    assert found["on a B200"].startswith("ValueError: SAGE_ATTN was explicitly selected but does not provide a kernel")


@needs("VLLM_OMNI_PATH")
def test_vllm_omni_by_name(tmp_path):
    path = changed(os.environ["VLLM_OMNI_PATH"], "vllm-omni.diff", tmp_path, "vllm_omni")
    found = run("vllm_omni_host.py", "SAGE_AOT", paths=[path])
    assert found["chosen"] == "vllm_omni.diffusion.attention.backends.sage_aot.SageAotBackend"
    assert "a mask of keys" in found["calls"]
    check(found["calls"])
    assert found["on a B200"] == "none"


# --- LightX2V ---------------------------------------------------------------------------------------------------------


@needs("LIGHTX2V_PATH")
@pytest.mark.parametrize(("capability", "function"), [
    ("8.9", "sageattn_qk_int8_pv_fp16_triton"), ("12.0", "sageattn_qk_int8_pv_fp16_triton"), ("9.0", "sageattn")])
def test_lightx2v_by_the_package_sageattention(capability, function):
    found = run("lightx2v_host.py", "sage_attn2", capability, paths=[os.environ["LIGHTX2V_PATH"]])
    assert found["imported"] == f"sageattention.core.{function}"
    dropped = [found["calls"].pop(name) for name in ("causal", "scale")]
    check(found["calls"])
    assert all(call["exact"] > 0.5 for call in dropped), "LightX2V's sage_attn2 passes neither on"


@needs("LIGHTX2V_PATH")
@pytest.mark.parametrize("way", ["entry point", "diff"])
def test_lightx2v_by_name(way, tmp_path):
    checkout = os.environ["LIGHTX2V_PATH"]
    if way == "diff":
        paths = [changed(checkout, "lightx2v.diff", tmp_path, "lightx2v", "lightx2v_platform")]
    else:
        module = block("lightx2v.md", '"""SageAttention for LightX2V, by sage_aot."""')
        (tmp_path / "sage_aot_lightx2v.py").write_text(module)
        paths = [checkout, with_entry_point(tmp_path, "lightx2v.platform_plugins", "sage_aot_lightx2v:register")]
    found = run("lightx2v_host.py", "sage_aot", "8.9", paths=paths)
    assert len(found["calls"]) == 6
    check(found["calls"])


# --- SGLang -----------------------------------------------------------------------------------------------------------


@needs("SGLANG_PATH")
@pytest.mark.parametrize("capability", ["8.9", "12.0", pytest.param("9.0", marks=pytest.mark.kernels("sm90"))])
def test_sglang_by_the_package_sageattention(capability):
    found = run("sglang_host.py", "sage_attn", capability, paths=[os.environ["SGLANG_PATH"]])
    assert found["chosen"] == "layers.attention.backends.sage_attn.SageAttentionBackend"
    assert len(found["calls"]) == 6
    check(found["calls"], {"packed": 2})
    assert found["head dim 256"].startswith("ValueError: SageAttention 2 does not support head size 256")


@needs("SGLANG_PATH")
def test_sglang_by_name(tmp_path):
    path = changed(os.environ["SGLANG_PATH"], "sglang.diff", tmp_path, "sglang", strip=2)
    found = run("sglang_host.py", "sage_aot", "8.9", paths=[path])
    assert found["chosen"] == "layers.attention.backends.sage_aot.SageAotBackend"
    assert len(found["calls"]) == 6 and found["head dim 256"] == "none"
    check(found["calls"], {"packed": 2})


@needs("SGLANG_PATH")
def test_sglangs_pipelines_of_diffusers_find_the_backend(tmp_path):
    """SGLang calls an entry point before it sets the backend that the user names."""
    pytest.importorskip("diffusers", minversion="0.36")
    plugin = with_entry_point(tmp_path, "sglang.multimodal_gen.plugins", "sage_aot.integrations.diffusers:register")
    program = ("from sglang.multimodal_gen.runtime.platforms.plugins import apply_plugin_hooks\n"
               "from diffusers.models.attention_dispatch import AttentionBackendName as names\n"
               "before = 'sage_aot' in list(names)\napply_plugin_hooks()\nprint(before, 'sage_aot' in list(names))")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=programs.environment(
        [os.environ["SGLANG_PATH"], plugin], SGLANG_DIFFUSION_PLATFORM_OVERRIDE="cuda"))
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "False True", done.stderr[-3000:]
