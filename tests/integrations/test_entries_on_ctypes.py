"""Hosts reach sage_aot whatever loads its kernels: nothing that they call names a loader, and each of their ways in
runs where neither cupy nor cuda-bindings is there. tests/gpu/test_loaders.py compares bits on a GPU."""

from __future__ import annotations

import json
import re

import host_entries
import programs
import pytest

pytest.importorskip("diffusers", minversion="0.36")
pytest.importorskip("transformers", minversion="5.0")


@pytest.fixture(scope="module")
def seen(fake_driver):
    """Output of entries_on_ctypes.py."""
    return json.loads(programs.run("entries_on_ctypes.py", LD_LIBRARY_PATH=str(fake_driver), SAGE_AOT_LOADER=""))


def test_neither_package_is_there(seen):
    assert seen["loader"] == "ctypes"


@pytest.mark.parametrize("entry", host_entries.ENTRIES)
def test_entries_are_emulated_without_the_packages(seen, entry):
    assert seen["emulated"][entry] == host_entries.bits(host_entries.served(entry, "cpu"))


@pytest.mark.parametrize("entry", host_entries.ENTRIES)
def test_entries_launch_through_ctypes(seen, entry):
    """Each attention call launches the quantizers, then the attention kernel."""
    kernels = [launch.split()[0] for launch in seen["launched"][entry]]
    of_attention = [name for name in kernels if name.startswith(f"sage_attn_{seen['arch']}_d64_")]
    assert len(of_attention) == host_entries.ENTRIES[entry][1]
    assert kernels[0].startswith("sage_q") and kernels[-1] == of_attention[-1]
    assert all(" on 0: grid " in launch and "stream 0xabc0" in launch for launch in seen["launched"][entry])


LOADERS = re.compile(r"cupy|cuda[-_.]bindings|SAGE_AOT_LOADER|_backends|library_driver|libcuda|nvcuda")


def test_no_code_of_the_entries_names_a_loader():
    sources = [path for folder in ("ci/sageattention", "examples/comfyui", "sage_aot/integrations")
               for path in (programs.ROOT / folder).rglob("*.py")]
    assert len(sources) > 15
    assert [path for path in sources if LOADERS.search(path.read_text("utf-8"))] == []
