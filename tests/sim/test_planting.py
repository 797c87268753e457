"""Parts of bugs: code found by its words, operations on it, and switches between several of them."""

from __future__ import annotations

import shutil

import operations
import pytest
import schemata
import simbuild
from bugs import SWITCHED
from headers import by_words, places_in, words
from operations import Behind, Drop, OffByOne, Operation, Put
from schemata import Bug
from simbuild import PROJECT, Project
from variants_on_cpu import variant

from codegen.compilation import headers_of
from codegen.render import render_all, source_path

HEADER = """
template <class T>
struct Loop {
  static constexpr int kEnd = 4;
  __device__ __forceinline__ void run(int (&x)[4][4], bool first) const {
    // begin
    if (first) clear();  // all of it
#pragma unroll
    for (int i = 0; i < kEnd; ++i) x[i][i + 1] += i / 2 *
        weight(first ? 1 : 2);
    const int end = kEnd + 1;
    const Pair pair(first, kEnd + 2);
    const int both[2] = {end, end};
    wait(phase ^ 1);
    wait(phase ^ 1);
    arrive(end);
  }
  __device__ void inner(bool first) const {
    if (first) {  // why
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        int own[kEnd - 1];
        step(i,
             own);
      }
    }
  }
  static constexpr int half() { return kEnd / 2; }
};
"""


@pytest.fixture
def sources(tmp_path, monkeypatch) -> Project:
    """A tree with one header, which stands for the project's."""
    project = Project(tmp_path, tmp_path / "build")
    (project.include / "sage").mkdir(parents=True)
    (project.include / "sage" / "loop.cuh").write_text(HEADER)
    shutil.copy(PROJECT.matrix, tmp_path)
    monkeypatch.setattr(schemata, "PROJECT", project)
    monkeypatch.setattr(schemata, "ROOT", tmp_path)
    return project


def bug(operation: Operation, place: str = "Loop::run") -> Bug:
    return Bug("loop.cuh", place, operation)


def planted(project: Project) -> str:
    return (project.include / "sage" / "loop.cuh").read_text()


@pytest.mark.parametrize(("operation", "what", "code"), [
    ("Drop", "if (first) clear();", ";"),
    ("Always", "if (first) clear();", "clear();"),
    ("Left", "i / 2 * weight(first ? 1 : 2)", "i / 2"),
    ("Right", "i/2", "2"),
    ("OffByOne", "i < kEnd", "i <= kEnd"),
    ("Opposite", "i < kEnd", "i > kEnd"),
    ("Sign", "kEnd + 1", "kEnd - 1"),
    ("Remainder", "i / 2", "i % 2"),
    ("First", "first ? 1 : 2", "1"),
    ("Second", "first ? 1 : 2", "2"),
    ("Swap", "first ? 1 : 2", "first ? 2 : 1"),
    ("Indices", "x[i][i + 1]", "x[i + 1][i]"),
    ("Before", "arrive(end);", "{ arrive(end); }"),
])
def test_operation(sources, operation, what, code):
    _, edit = bug(getattr(operations, operation)(what)).edits()[0]
    assert words(edit.code) == words(code)


def test_the_other_phase(sources):
    _, edit = bug(operations.Phase("phase ^ 1", which=2)).edits()[0]
    assert edit.code == "phase"
    assert edit.node.start_byte > HEADER.index("phase ^ 1") + 10


@pytest.mark.parametrize(("change", "message"), [
    (Drop("arrive(first);"), "found 0 times"),
    (Drop("wait(phase ^ 1);"), "found 2 times"),
    (Drop("wait(phase ^ 1);", which=3), "found 2 times"),
    (OffByOne("kEnd + 1"), "does not apply"),
    (Drop("first ? 1 : 2"), "does not apply"),
    (operations.Swap("{end, end}"), "does not apply"),
])
def test_code_that_is_not_there_once_is_refused(sources, change, message):
    with pytest.raises(ValueError, match=message):
        bug(change).edits()


def test_a_statement_is_not_moved_in_front(sources):
    with pytest.raises(ValueError, match="does not stand behind it"):
        bug(Behind("arrive(end);", later="if (first) clear();")).edits()


def test_line_breaks_and_comments_make_no_difference(sources):
    found = by_words(places_in(bug(Drop("")).path))
    assert "i/2*weight(first?1:2)" in found
    assert len(found["wait(phase^1);"]) == 2
    assert "if(first){for(int i=0;i<4;++i){int own[kEnd-1];step(i,own);}}" in found


@pytest.mark.parametrize(("change", "place", "switched"), [
    (OffByOne("i < kEnd"), "Loop::run", True),
    (Put("kEnd + 1", instead="kEnd"), "Loop::run", True),
    (Put("4", instead="8"), "Loop::kEnd", False),
    (Put("kEnd / 2", instead="kEnd"), "Loop::half", False),
    (Put("kEnd - 1", instead="kEnd"), "Loop::inner", False),
])
def test_what_a_compiler_may_evaluate_has_no_switch(sources, change, place, switched):
    assert bug(change, place).can_be_switched is switched


def test_one_bug_in_a_copy(sources, tmp_path):
    text = planted(schemata.plant(bug(Behind("wait(phase ^ 1);", which=1, later="arrive(end);")), tmp_path / "one"))
    assert text == HEADER.replace("wait(phase ^ 1);", ";", 1).replace("arrive(end);",
                                                                      "{ arrive(end); wait(phase ^ 1); }")


def test_switches_one_inside_the_other(sources, tmp_path):
    bugs = [bug(Drop("for (int i = 0; i < kEnd; ++i) x[i][i + 1] += i / 2 * weight(first ? 1 : 2);")),
            bug(OffByOne("i < kEnd")), bug(operations.First("first ? 1 : 2")), bug(operations.Sign("kEnd + 1")),
            bug(operations.Left("kEnd + 2"))]
    text = words(planted(schemata.plant_switched(bugs, tmp_path / "all")))
    assert words("{ if (sim::planted(1)) { ; } else { "
                 "for (int i = 0; (sim::planted(2) ? (i <= kEnd) : (i < kEnd)); ++i) "
                 "{ if (sim::planted(3)) { x[i][i + 1] += i / 2 * weight(1); } "
                 "else { x[i][i + 1] += i / 2 * weight(first ? 1 : 2); } } } }") in text
    assert [text.count(f"planted({number})") for number in (1, 2, 3, 4, 5)] == [1, 1, 1, 1, 1]
    assert words("const int end = (sim::planted(4) ? (kEnd - 1) : (kEnd + 1));") in text
    assert words("const Pair pair(first, (sim::planted(5) ? (kEnd) : (kEnd + 2)));") in text


def test_a_build_knows_which_kernel_holds_which_bug(tmp_path):
    name = max(SWITCHED, key=lambda name: len({bug.header for bug in SWITCHED[name]}))
    project = schemata.plant_switched(SWITCHED[name], tmp_path)
    kernels = [kernel for kernel in simbuild.matrix().kernels if kernel.spec.name in simbuild.kernels_of(variant(name))]
    render_all(kernels, simbuild.matrix(), project)
    simbuild._link_headers(project.include, project.build / "include")
    for kernel in kernels:
        headers = headers_of(source_path(kernel, project), project.include)
        held = {number for number, bug in enumerate(SWITCHED[name], 1)
                if project.include / "sage" / bug.header in headers}
        assert simbuild.Build(project.build).switches(kernel.spec.name) == held
        if kernel.spec.kind in ("attn", "quant"):
            folders = {SWITCHED[name][number - 1].header.split("/")[0] for number in held}
            assert folders & {"attn", "quant"} == {kernel.spec.kind}


def test_a_second_copy_writes_what_changed_alone(sources, tmp_path):
    first = schemata.plant_switched([bug(OffByOne("i < kEnd"))], tmp_path / "all")
    path = first.include / "sage" / "loop.cuh"
    before = path.stat().st_mtime_ns
    schemata.plant_switched([bug(OffByOne("i < kEnd"))], tmp_path / "all")
    assert path.stat().st_mtime_ns == before
    schemata.plant_switched([bug(Drop("arrive(end);"))], tmp_path / "all")
    assert "planted(1)) { ; }" in planted(first)
