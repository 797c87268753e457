"""``import sage_aot`` registers the operators, whichever of it and torch is imported first."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import sage_aot

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(sage_aot.__file__).parents[1])}


def run(program, *arguments):
    done = subprocess.run([sys.executable, "-c", program, *map(str, arguments)], capture_output=True, text=True,
                          check=False, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


class Module(torch.nn.Module):
    def forward(self, q, k, v):
        return sage_aot.attn(q, k, v, is_causal=True)


class Script(torch.nn.Module):
    def forward(self, q, k, v):
        return torch.ops.sage_aot.attn(q, k, v, None, None, None, None)


def draw():
    return tuple(torch.randn(3, 1, 2, 40, 64, generator=torch.Generator().manual_seed(0)))


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_saved_programs_load_after_a_bare_import(tmp_path):
    torch.export.save(torch.export.export(Module(), draw()), tmp_path / "exported.pt2")
    torch.jit.save(torch.jit.trace(Script(), draw()), tmp_path / "traced.pt")
    program = """
import sys
import sage_aot
import torch
q, k, v = torch.randn(3, 1, 2, 40, 64, generator=torch.Generator().manual_seed(0))
print(torch.export.load(sys.argv[1]).module()(q, k, v).double().sum().item())
print(torch.jit.load(sys.argv[2])(q, k, v).double().sum().item())
"""
    sums = [str(found.double().sum().item()) for found in (Module()(*draw()), Script()(*draw()))]
    assert run(program, tmp_path / "exported.pt2", tmp_path / "traced.pt") == sums


OPERATORS = "print(torch.ops.sage_aot.attn, torch.ops.sage_aot.train_attn, torch.ops.sage_aot.attn_varlen)"


@pytest.mark.parametrize("imports", [
    "import sage_aot, torch", "import torch, sage_aot", "from sage_aot import attn; import torch",
    "import sage_aot.integrations.torch, torch", "from sage_aot.errors import ArgumentError; import torch",
    "import sage_aot, importlib.util; importlib.util.find_spec('torch'); import torch",
    "import sage_aot._problem.check, sage_aot; sage_aot.attn; import torch",
    "import sage_aot._call.kv, sage_aot; sage_aot.info; import torch",
    "import threading, sage_aot; t = threading.Thread(target=lambda: __import__('torch')); t.start(); t.join(); "
    "import torch"])
def test_in_any_order(imports):
    assert run(f"{imports}\n{OPERATORS}") == ["sage_aot.attn", "sage_aot.train_attn", "sage_aot.attn_varlen"]


def test_a_module_that_is_imported_first_is_whole():
    """The module's import of torch does not import the module again, half of it missing."""
    for module in ("_problem.check", "_problem.derivatives", "_call.ops", "_call.api", "_call.train",
                   "_backends.emulation.backend", "_tools.explain"):
        run(f"import sage_aot.{module}")


def test_torch_is_as_if_nothing_had_waited_for_it():
    program = """
import sage_aot, sys
waiting = len(sys.meta_path)
import torch, inspect
print(type(torch.__loader__).__name__, torch.__spec__.loader is torch.__loader__, len(inspect.getsource(torch)) > 0)
print(any(getattr(finder, "_name", None) == "torch" for finder in sys.meta_path))
"""
    assert run(program) == ["SourceFileLoader", "True", "True", "False"]


def test_several_wait_for_one_module(tmp_path):
    """Builds for the Hugging Face hub wait so in one process with the package."""
    program = """
import sys
from sage_aot._imports import when_imported
for name in "first", "second":
    when_imported("this_is_a_module", lambda name=name: print(name))
sys.path.insert(0, sys.argv[1])
import this_is_a_module
print(type(this_is_a_module.__loader__).__name__, this_is_a_module.__spec__.loader is this_is_a_module.__loader__)
print(any(getattr(finder, "_name", None) == "this_is_a_module" for finder in sys.meta_path))
"""
    (tmp_path / "this_is_a_module.py").write_text("")
    assert run(program, tmp_path) == ["first", "second", "SourceFileLoader", "True", "False"]


def test_without_torch():
    program = """
import sys
sys.path = [path for path in sys.path if "site-packages" not in path]
import sage_aot
for i in range(2):
    try:
        import torch
    except ModuleNotFoundError as error:
        print(error.name)
print(sage_aot.__version__, len(dir(sage_aot)) > 10)
"""
    assert run(program) == ["torch", "torch", sage_aot.__version__, "True"]
