"""Imports: which modules and headers may import which, and which modules a plain import loads."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

import sage_aot

ROOT = Path(__file__).parents[2]
HEADERS = ROOT / "templates/include/sage"
LAYERS = ("types.cuh", "constants.cuh", "kernel_info.cuh", "fast_divmod.cuh", "params.cuh", "ptx", "numerics",
          "tile", "problem", "attn", "quant", "bwd", "select")
MAY_INCLUDE = {
    "types.cuh": (),
    "constants.cuh": ("types.cuh",),
    "kernel_info.cuh": ("types.cuh",),
    "fast_divmod.cuh": ("types.cuh", "kernel_info.cuh"),
    "params.cuh": ("types.cuh", "kernel_info.cuh", "fast_divmod.cuh"),
    "ptx": ("types.cuh",),
    "numerics": ("types.cuh", "ptx"),
    "tile": ("types.cuh", "ptx"),
    "problem": ("types.cuh", "fast_divmod.cuh", "params.cuh", "ptx", "tile"),
    "attn": ("types.cuh", "constants.cuh", "params.cuh", "ptx", "numerics", "tile", "problem"),
    "quant": ("types.cuh", "params.cuh", "ptx", "numerics", "tile", "problem"),
    "bwd": ("types.cuh", "constants.cuh", "params.cuh", "ptx", "numerics", "tile", "problem", "quant"),
    "select": ("types.cuh", "kernel_info.cuh", "params.cuh", "ptx", "numerics", "problem", "quant"),
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


# --- who may import whom ----------------------------------------------------------------------------------------------

PACKAGE = ROOT / "sage_aot"
LEAVES = {"errors", "_imports", "_package", "_version"}
"""Modules that import nothing of the package."""

EMULATION = {"_families.mma.emulation", "_families.wgmma.emulation"}
"""The parts of families that need torch: they belong to the backend that imports them."""

MAY_IMPORT = {
    "_kernels": set(),
    "_families": {"_kernels"},
    "_problem": {"_kernels"},
    "_launch": {"_kernels", "_families", "_problem"},
    "_backends": {"_kernels", "_families", "_problem", "_launch"},
    "_call": {"_kernels", "_families", "_problem", "_launch", "_backends"},
    "_tools": {"_kernels", "_families", "_problem", "_launch", "_backends", "_call"},
    "integrations": {"_kernels", "_problem", "_call", "_tools"},
    "_cli": {"_kernels", "_backends", "_call", "_tools", "integrations"},
}
"""Per package, the packages that it may import. Each may also import itself, and each but the families LEAVES."""

OF_THE_STANDARD_LIBRARY = ("_kernels", "_families", "_problem.options", "_problem.tensors", "_launch.structs",
                           "_version", "errors")
"""Modules that need the standard library alone, and that code generation may therefore share."""

MODULES = sorted(PACKAGE.rglob("*.py"))


def imports_of(path: Path) -> set[str]:
    """The dotted name of every module and name that a file imports, at any place in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def own_imports_of(path: Path) -> set[str]:
    """The imports of modules of sage_aot, without the prefix "sage_aot."."""
    return {name.removeprefix("sage_aot.") for name in imports_of(path) if name.split(".")[0] == "sage_aot"}


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def under(name: str, modules: Iterable[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


@pytest.mark.parametrize("path", [path for path in MODULES if "." in module_of(path) or path.parent != PACKAGE],
                         ids=module_of)
def test_modules_import_only_lower_packages(path):
    module = module_of(path)
    own = module.split(".")[0]
    allowed = {own, *MAY_IMPORT[own], *LEAVES}
    if module in EMULATION:
        allowed = {own, "_kernels", "_problem.mask", "_backends.emulation"}
    elif own == "_families":
        allowed = {own, *MAY_IMPORT[own]}
    wrong = {name for name in own_imports_of(path) if not under(name, allowed)}
    assert not wrong, f"{module} must not import {', '.join(sorted(wrong))}"


def test_every_package_has_its_place():
    assert {path.parent.name for path in PACKAGE.glob("*/__init__.py")} == set(MAY_IMPORT)
    assert {path.stem for path in PACKAGE.glob("*.py")} == {"__init__", "__main__", "sparse", *LEAVES}
    assert set(EMULATION) == {module_of(path) for path in PACKAGE.glob("_families/*/emulation.py")}


@pytest.mark.parametrize("module", sorted(LEAVES))
def test_what_everything_may_import_imports_nothing(module):
    assert own_imports_of(PACKAGE / f"{module}.py") == set()


def test_emulation_of_families_is_found_by_its_backend_alone():
    """The backend finds them by name, so that a family is registered once."""
    users = {module_of(path) for path in MODULES if any(under(name, EMULATION) for name in own_imports_of(path))}
    by_name = {module_of(path) for path in MODULES if re.search(r"_families\.\{\w+\}\.emulation", path.read_text())}
    assert (users, by_name) == (set(), {"_backends.emulation.attention"})


@pytest.mark.parametrize("path", MODULES, ids=module_of)
def test_classes_of_torch_take_parameters_in_annotations_alone(path):
    """The oldest torch has fewer generic classes: to subscript another one there is an error."""
    tree = ast.parse(path.read_bytes())
    annotated = {id(node) for holder in ast.walk(tree) for name in ("annotation", "returns")
                 if isinstance(annotation := getattr(holder, name, None), ast.AST) for node in ast.walk(annotation)}
    assert [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Subscript)
            and id(node) not in annotated and re.match(r"torch\.[\w.]*\.[A-Z]\w*$", ast.unparse(node.value))] == []


def test_only_the_drivers_modules_import_what_loads_kernels():
    """The Hugging Face hub's build leaves both out."""
    users = {module_of(path) for path in MODULES if any(re.match(r"cupy|cuda\b", name) for name in imports_of(path))}
    assert users == {"_backends.cupy_driver", "_backends.bindings_driver"}


def test_codegen_uses_nothing_of_the_runtime_but_its_standard_library_modules():
    shared = tuple(name for name in OF_THE_STANDARD_LIBRARY if name != "errors")  # codegen has its own
    for path in (ROOT / "codegen").glob("*.py"):
        for name in imports_of(path):
            assert not name.startswith(("torch", "cupy", "numpy")), f"{path.name} imports {name}"
        for name in own_imports_of(path):
            assert under(name, shared) and name not in EMULATION, f"{path.name} imports sage_aot.{name}"


@pytest.mark.parametrize("path", [path for path in MODULES if under(module_of(path), OF_THE_STANDARD_LIBRARY)
                                  and module_of(path) not in EMULATION], ids=module_of)
def test_what_codegen_shares_needs_the_standard_library_alone(path):
    for name in imports_of(path):
        top = name.split(".")[0]
        assert top in sys.stdlib_module_names or top == "sage_aot", f"{name} is not of the standard library"
    assert all(under(name, OF_THE_STANDARD_LIBRARY) and name not in EMULATION for name in own_imports_of(path))


def loaded(program: str, names: Iterable[str]) -> list[str]:
    """Modules, of these, that a program loads."""
    found = subprocess.run([sys.executable, "-c", f"import sys\n{program}\nprint(*[n for n in {tuple(names)} "
                                                  "if n in sys.modules])"],
                           capture_output=True, text=True, check=True, cwd=ROOT)
    return found.stdout.split()


def test_the_plain_import_brings_neither_torch_nor_numpy():
    assert loaded("import sage_aot", ("torch", "numpy", "cupy", "cuda")) == []
    assert loaded("from sage_aot import attn", ("torch",)) == ["torch"]


def test_the_call_needs_no_cupy_and_no_compiler():
    unwanted = ("cupy", "jinja2", "yaml", "ninja", "elftools", "transformers", "matplotlib")
    assert loaded("from sage_aot import attn, explain, info", unwanted) == []
    assert loaded("import sage_aot.integrations, sage_aot.integrations.torch", unwanted) == []


def test_exports():
    assert sorted(sage_aot.__all__) == sage_aot.__all__
    assert all(getattr(sage_aot, name) for name in sage_aot.__all__)
    assert set(sage_aot.__all__) <= set(dir(sage_aot))
    public = {name for name in vars(sage_aot) if not name.startswith("_")}
    public -= {"errors", "integrations", "annotations", "import_module", "is_being_imported", "when_imported",
               "TYPE_CHECKING", "sparse"}
    assert public == set(sage_aot.__all__) - {"__version__"}
    with pytest.raises(AttributeError, match="module 'sage_aot' has no attribute 'atn'"):
        sage_aot.atn
    assert all(issubclass(error, sage_aot.SageAotError) for error in (
        sage_aot.ArgumentError, sage_aot.UnsupportedError, sage_aot.CubinError, sage_aot.LaunchError))
    assert issubclass(sage_aot.ArgumentError, ValueError)
