"""Differences of Windows, as far as Linux shows them: text in the machine's code page, `\r\n` at the ends of lines,
output in an encoding that lacks signs. Paths of a wheel are ci/wheels.py's, calls of Windows' API mypy's (ci/lint.sh),
the driver's library test_driver.py's."""

from __future__ import annotations

import ast
import builtins
import hashlib
import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import wheels
from records import manifest_of, record_of

import sage_aot
from sage_aot._backends.loader import Library
from sage_aot._kernels.manifest import FILE_NAME
from sage_aot._kernels.spec import AttnSpec
from sage_aot._tools.verify import kernel_problems
from sage_aot.integrations import _calibration
from sage_aot.integrations._gain import built_in

PACKAGE = Path(sage_aot.__file__).parent
SOURCES = sorted([*PACKAGE.rglob("*.py"), *Path(wheels.__file__).parent.glob("*.py")])
PARSED = {path: ast.parse(path.read_bytes()) for path in SOURCES}


# --- text in files ----------------------------------------------------------------------------------------------------

TEXT = {"open": 1, "fdopen": 1, "read_text": 0, "write_text": 1, "NamedTemporaryFile": 0, "TemporaryFile": 0}
"""Calls that take text, and where the mode, or the encoding of read_text and write_text, stands among arguments."""

BINARY = {"NamedTemporaryFile", "TemporaryFile"}
"""Functions that open binary files where no mode is named."""


def of_the_code_page(call: ast.Call) -> bool:
    """True where a call reads or writes text in the encoding of the machine."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    named = {keyword.arg: keyword.value for keyword in call.keywords}
    if name not in TEXT or "encoding" in named or ast.unparse(call.func) == "tarfile.open":
        return False
    place = TEXT[name] - (name == "open" and isinstance(call.func, ast.Attribute))  # path.open has no path before it
    behind = call.args[place] if len(call.args) > place else named.get("mode")
    if name in ("read_text", "write_text"):
        return behind is None
    return name not in BINARY if behind is None else "b" not in ast.literal_eval(behind)


@pytest.mark.parametrize(("code", "found"), [
    ("open(x)", True), ("open(x, 'w')", True), ("open(x, 'rb')", False), ("open(x, encoding='utf-8')", False),
    ("p.open()", True), ("p.open('rb')", False), ("p.open(mode='w')", True), ("p.read_text()", True),
    ("p.read_text('utf-8')", False), ("p.write_text(x)", True), ("p.write_text(x, 'utf-8')", False),
    ("NamedTemporaryFile()", False), ("tempfile.NamedTemporaryFile('w')", True)])
def test_calls_that_read_in_the_code_page_are_told(code, found):
    assert of_the_code_page(ast.parse(code).body[0].value) == found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_text_is_read_and_written_in_a_named_encoding(path):
    found = [ast.unparse(node) for node in ast.walk(PARSED[path])
             if isinstance(node, ast.Call) and of_the_code_page(node)]
    assert not found, "expected an encoding: Windows takes the machine's code page"


@pytest.fixture
def files_of_windows(monkeypatch):
    r"""Text is cp1252 where no encoding is named, `\r\n` is written for `\n`, and os.rename replaces nothing."""
    opened = io.open

    def windows(file, mode="r", buffering=-1, encoding=None, errors=None, newline=None, **others):
        if "b" not in mode:
            encoding = "cp1252" if encoding in (None, "locale") else encoding
            newline = "\r\n" if newline is None and not mode.startswith("r") else newline
        return opened(file, mode, buffering, encoding, errors, newline, **others)

    def rename(source, target):
        if os.path.exists(target):
            raise FileExistsError(target)
        os.replace(source, target)

    for module in (io, builtins):
        monkeypatch.setattr(module, "open", windows)
    monkeypatch.setattr(os, "rename", rename)


def test_the_stand_in_does_as_windows(files_of_windows, tmp_path):
    path = tmp_path / "a"
    path.write_text("²\n")
    assert path.read_bytes() == b"\xb2\r\n" and path.read_text() == "²\n"
    with pytest.raises(FileExistsError):
        (tmp_path / "b").touch() or path.rename(tmp_path / "b")


def test_a_kernel_folder_is_read_byte_by_byte(files_of_windows, tmp_path):
    image = b"lines\r\nof\na cubin\x1a\x00, with Windows' end of a text\r"
    record = record_of(AttnSpec("sm80", 64, "int8", "f16", "f32", "exp2", "full", "vraw", "qraw"), file="a.cubin",
                       sha256=hashlib.sha256(image).hexdigest())
    (tmp_path / record.file).write_bytes(image)
    (tmp_path / FILE_NAME).write_bytes(manifest_of([record]).to_text().encode())
    library = Library(tmp_path)
    assert list(kernel_problems(library)) == [] and library.read(record) == image
    (tmp_path / FILE_NAME).write_bytes(library.manifest.to_text().replace("\n", "\r\n").encode())  # an editor there
    assert ["is not a manifest" in problem for problem in kernel_problems(Library(tmp_path))] == [True]


@pytest.mark.parametrize("path", sorted(Path(__file__).parent.glob("*.py")), ids=lambda path: path.name)
def test_tests_write_manifests_byte_by_byte(path):
    """The seal of one that was written as text does not hold on Windows, where tests of a wheel run, too."""
    written = [ast.unparse(node) for node in ast.walk(ast.parse(path.read_bytes()))
               if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "write_text"]
    assert [call for call in written if re.search("FILE_NAME|manifest|sealed_text", call)] == []


def test_thresholds_are_read_as_they_were_written(files_of_windows, tmp_path, monkeypatch):
    monkeypatch.setenv(_calibration.VARIABLE, str(tmp_path))
    thresholds, _ = built_in((9, 0))
    machine = _calibration.Machine("NVIDIA GeForce RTX™ 4090", "560.94", "2.13.0", sage_aot.__version__)
    for _ in range(2):  # the second time over the first's file
        path = _calibration.write(thresholds, machine)
    assert _calibration.read(path, machine) == thresholds and list(tmp_path.iterdir()) == [path]


# --- output -----------------------------------------------------------------------------------------------------------


def printed_strings(tree: ast.AST) -> Iterator[str]:
    """Strings of a module that may be printed: no docstrings, and no `help`, which is for pages."""
    unprinted = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "help":
            unprinted |= set(map(id, ast.walk(node)))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in unprinted:
            yield node.value


@pytest.mark.parametrize("path", [path for path in SOURCES if PACKAGE in path.parents and path.parent.name != "_cli"],
                         ids=lambda path: f"{path.parent.name}/{path.name}")
def test_messages_are_ascii(path):
    """Users print messages, with print(sage_aot.supports(...)) and from their own handlers of errors, to output that
    may have any code page. `sage-aot` itself prints `?` for a sign that the output lacks."""
    assert [text for text in printed_strings(PARSED[path]) if not text.isascii()] == []


CALL = "import torch, sage_aot; q = torch.randn(1, 2, 9, 64); "


@pytest.mark.parametrize("arguments", [
    ["-m", "sage_aot", "info"], ["-m", "sage_aot", "verify", "--files"], ["-m", "sage_aot", "bench", "--help"],
    ["-c", "import sage_aot; print(sage_aot.explain(capability=(8, 9), headdim=128))"],
    ["-c", CALL + "print(sage_aot.explain(q, q, q))"],
    ["-c", CALL + "print(sage_aot.supports(q, q, q, scale=float('inf')))"],
    ["-c", CALL + "print(sage_aot.supports(q, q, q, key_mask=torch.zeros(1, 9)))"]], ids=lambda a: " ".join(a)[-40:])
def test_programs_print_where_the_output_has_few_signs(arguments):
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "PYTHONPATH": str(PACKAGE.parent)}
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, check=False)
    assert b"Traceback" not in done.stderr, done.stderr.decode()
    assert done.stdout.isascii() and len(done.stdout) > 40
