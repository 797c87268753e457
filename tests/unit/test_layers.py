"""Who may import whom, and what a plain import brings along."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import sage_aot

ROOT = Path(__file__).parents[2]
HEADERS = ROOT / "templates/include/sage"
LAYERS = ("types.cuh", "params.cuh", "ptx", "tile", "attn", "quant")
MAY_INCLUDE = {
    "types.cuh": (),
    "params.cuh": ("types.cuh",),
    "ptx": ("types.cuh",),
    "tile": ("types.cuh", "ptx"),
    "attn": ("types.cuh", "params.cuh", "ptx", "tile"),
    "quant": ("types.cuh", "params.cuh", "ptx", "tile"),
}


def layer_of(include: str) -> str:
    return include.split("/")[0]


@pytest.mark.parametrize("header", sorted(HEADERS.rglob("*.cuh")), ids=lambda path: str(path.relative_to(HEADERS)))
def test_headers_include_only_lower_layers(header):
    own = layer_of(str(header.relative_to(HEADERS)))
    assert own in LAYERS
    for include in re.findall(r'#include [<"](.*?)[>"]', header.read_text()):
        assert include.startswith("sage/"), f"{include}: no header of a toolkit or a standard library"
        layer = layer_of(include.removeprefix("sage/"))
        assert layer == own or layer in MAY_INCLUDE[own], f"{own} must not include {layer}"


def test_ptx_stands_only_in_its_layer():
    others = [path for path in HEADERS.rglob("*.cuh") if path.parent.name != "ptx"]
    others += (ROOT / "templates").glob("*.jinja")
    assert not [path for path in others if re.search(r"\basm\b|__shfl|__any_sync|__cvta", path.read_text())]


def imports_of(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_only_the_driver_module_imports_what_loads_kernels():
    users = {path.name for path in (ROOT / "sage_aot").rglob("*.py")
             if any(re.match(r"cupy|cuda\b", name) for name in imports_of(path))}
    assert users == {"_driver.py"}


def test_codegen_uses_nothing_of_the_runtime_but_its_standard_library_modules():
    shared = ("sage_aot._spec", "sage_aot._manifest", "sage_aot._params", "sage_aot._version")
    for path in (ROOT / "codegen").glob("*.py"):
        for name in imports_of(path):
            assert not name.startswith(("torch", "cupy", "numpy")), f"{path.name} imports {name}"
            assert not name.startswith("sage_aot") or name.startswith(shared), f"{path.name} imports {name}"


@pytest.mark.parametrize("module", ["_spec", "_manifest", "_params", "_version"])
def test_what_codegen_shares_needs_the_standard_library_alone(module):
    for name in imports_of(ROOT / f"sage_aot/{module}.py"):
        top = name.split(".")[0]
        assert top in sys.stdlib_module_names or name.startswith(("sage_aot._spec", "__future__"))


def test_import_needs_no_cupy_and_no_compiler():
    unwanted = ("cupy", "jinja2", "yaml", "ninja", "transformers", "matplotlib")
    program = f"import sys, sage_aot; print(*[name for name in {unwanted} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert found.stdout.split() == []


def test_exports():
    assert sorted(sage_aot.__all__) == sage_aot.__all__
    public = {name for name in vars(sage_aot) if not name.startswith("_")}
    assert public - {"errors"} == set(sage_aot.__all__) - {"__version__"}
    assert all(issubclass(error, sage_aot.SageAotError) for error in (
        sage_aot.ArgumentError, sage_aot.UnsupportedError, sage_aot.CubinError, sage_aot.LaunchError))
    assert issubclass(sage_aot.ArgumentError, ValueError)
