"""Pipeline of a call: how it is prepared, kept and made again, on backends that the tests hand in."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import sage_aot
from sage_aot._backends.emulation.backend import EmulationBackend
from sage_aot._call import backends, pipeline
from sage_aot._call.backends import default_library, handing
from sage_aot._call.pipeline import MOST_KEPT, plan_of
from sage_aot._launch import plan as planning
from sage_aot._problem.check import check
from sage_aot._problem.given import Given
from sage_aot._problem.options import OPTIONS, Options, for_schema
from sage_aot._tools import reference
from sage_aot.errors import ArgumentError, CubinError, UnsupportedError

# Compiling warns of torch's own deprecations, which are not this package's.
pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning"),
              pytest.mark.filterwarnings("ignore::FutureWarning")]


class Recording(EmulationBackend):
    """The emulation; records the archs that it was asked for, the plans that it bound and the calls that it ran."""

    def __init__(self, arch=None):
        super().__init__(default_library().manifest, arch)
        self.asked, self.bound, self.ran = [], [], []

    def arch(self, device):
        self.asked.append(device)
        return super().arch(device)

    def bind(self, plan, given, out):
        self.bound.append(plan)
        call = super().bind(plan, given, out)

        def run(given, out, lse):
            assert not any(isinstance(tensor, FakeTensor) for tensor in (*given.tensors, out, lse))
            self.ran.append(plan)
            call(given, out, lse)

        return run


class Idle(Recording):
    """Runs nothing."""

    def bind(self, plan, given, out):
        self.bound.append(plan)
        return lambda *arguments: self.ran.append(plan)


@pytest.fixture(autouse=True)
def nothing_prepared(monkeypatch):
    """A cache of the test's own, and an environment that names nothing."""
    for name in ("SAGE_AOT_EMULATE", "SAGE_AOT_KERNELS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pipeline, "_prepared", pipeline.ByKind())


@pytest.fixture
def backend():
    with handing(Recording()) as _:
        yield backends.handed_backend()


def draw(q_shape=(1, 2, 9, 64), kv_shape=(1, 2, 9, 64), dtype=torch.bfloat16, seed=0):
    return reference.inputs("normal", q_shape, kv_shape, dtype, torch.Generator().manual_seed(seed))


def emulated(*tensors, arch="sm89", **options):
    """The output without any cache."""
    backend, out = EmulationBackend(default_library().manifest, arch), torch.empty_like(tensors[0])
    given = Given("dense", *tensors)
    pipeline.prepare(backend, given, Options(**options)).run(given, out, None)
    return out


# --- once a kind of call ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [{}, {"return_lse": True}, {"out": True}, {"out": True, "return_lse": True}], ids=str)
def test_a_second_call_is_not_prepared_again(backend, monkeypatch, more):
    checked = []
    monkeypatch.setattr(pipeline, "check", lambda *arguments: checked.append(1) or check(*arguments))
    for seed in range(3):
        q, k, v = draw(seed=seed)
        given = {**more, "out": torch.empty_like(q)} if "out" in more else more
        found = sage_aot.attn(q, k, v, scale=0.3, p="exp2", **given)
        found = found[0] if isinstance(found, tuple) else found
        assert torch.equal(found, emulated(q, k, v, scale=0.3, p="exp2"))
    assert (len(backend.asked), len(backend.bound), len(backend.ran)) == (1, 1, 3)
    assert checked == [1] * 4  # three of them by emulated()


def test_the_log_sum_exp_is_no_other_call(backend):
    q, k, v = draw()
    out = sage_aot.attn(q, k, v, p="exp2")
    same, lse = sage_aot.attn(q, k, v, p="exp2", return_lse=True)
    assert len(backend.bound) == 1 and torch.equal(out, same) and lse.isfinite().all()


def strided(tensor):
    """Copy a tensor with its rows further apart."""
    return torch.stack([tensor, tensor], 3).select(3, 0)


def other_calls():
    q, k, v = draw()
    yield "strides of q", (strided(q), k, v), {}
    yield "strides of k", (q, strided(k), v), {}
    yield "strides of v", (q, k, strided(v)), {}
    yield "dtype", (q.half(), k.half(), v.half()), {}
    yield "shape of q", (q[:, :, :8], k, v), {}
    yield "shape of k and v", (q, k[:, :, :8], v[:, :, :8]), {}
    yield "out", (q, k, v), {"out": torch.empty_like(q)}
    yield "strides of out", (q, k, v), {"out": strided(torch.empty_like(q))}
    for name, option in OPTIONS.items():
        for value in option.samples[1:]:
            # Of which sm89 has no kernel.
            if (name, value) not in (("pv_accum", "f32"), ("qk", "nvfp4"), ("p", "linear")):
                yield f"{name}={value}", (q, k, v), {name: value}


OTHER = list(other_calls())


@pytest.mark.parametrize(("tensors", "changes"), [other[1:] for other in OTHER], ids=[other[0] for other in OTHER])
def test_what_differs_is_prepared_by_itself(backend, tensors, changes):
    q, k, v = draw()
    expected = sage_aot.attn(q, k, v)
    options = {name: value for name, value in changes.items() if name != "out"}
    for _ in range(2):
        assert torch.equal(sage_aot.attn(*tensors, **changes), emulated(*tensors, **options))
        assert torch.equal(sage_aot.attn(q, k, v), expected)
    assert len(backend.bound) == 2 and len(backend.ran) == 5


def test_calls_of_every_kind_are_told_apart(backend):
    for _ in range(2):
        for _, tensors, changes in OTHER:
            sage_aot.attn(*tensors, **changes)
    assert len(backend.bound) == len(OTHER)


# --- the environment --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("handed", [False, True])
def test_the_arch_that_the_environment_names_is_that_of_the_next_call(monkeypatch, handed):
    tensors = draw()
    expected = {arch: emulated(*tensors, arch=arch) for arch in ("sm80", "sm89")}
    assert not torch.equal(*expected.values())
    with handing(Recording() if handed else None):
        for _ in range(2):
            assert torch.equal(sage_aot.attn(*tensors), expected["sm89"])
            monkeypatch.setenv("SAGE_AOT_EMULATE", "sm80")
            assert torch.equal(sage_aot.attn(*tensors), expected["sm80"])
            monkeypatch.setenv("SAGE_AOT_EMULATE", "sm89")
            assert torch.equal(sage_aot.attn(*tensors), expected["sm89"])
            monkeypatch.delenv("SAGE_AOT_EMULATE")


def test_the_folder_that_the_environment_names_is_that_of_the_next_call(monkeypatch, tmp_path):
    tensors = draw()
    expected = sage_aot.attn(*tensors)
    for _ in range(2):
        monkeypatch.setenv("SAGE_AOT_KERNELS", str(tmp_path))
        with pytest.raises(CubinError, match="no kernels: "):
            sage_aot.attn(*tensors)
        monkeypatch.setenv("SAGE_AOT_KERNELS", "")  # names none
        assert torch.equal(sage_aot.attn(*tensors), expected)
        monkeypatch.delenv("SAGE_AOT_KERNELS")
        assert torch.equal(sage_aot.attn(*tensors), expected)


def test_an_environment_that_keeps_no_dictionary_is_asked_all_the_same(monkeypatch):
    monkeypatch.setenv("SAGE_AOT_EMULATE", "sm80")
    usual = backends._reader()
    assert usual() == backends.environment()
    assert (usual()[0], os.fsdecode(usual()[1])) == (None, "sm80")
    monkeypatch.setattr(os, "environ", dict(os.environ))
    other = backends._reader()
    assert other() == (None, "sm80")
    os.environ["SAGE_AOT_KERNELS"] = "somewhere"
    del os.environ["SAGE_AOT_EMULATE"]
    assert other() == ("somewhere", None)


# --- grad, and what is refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
@pytest.mark.parametrize("prepared_before", [True, False])
def test_grad_is_asked_about_on_every_call(backend, name, prepared_before):
    tensors = dict(zip(("q", "k", "v"), draw()))
    tensors["out"] = torch.empty_like(tensors["q"])
    if prepared_before:
        sage_aot.attn(**tensors)
    tensors[name].requires_grad_()
    for _ in range(2):
        with pytest.raises(ArgumentError, match=f"{name} requires grad, and attn has no backward pass"):
            sage_aot.attn(**tensors)
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                sage_aot.attn(**tensors)
    assert len(backend.bound) == 1 and len(backend.ran) == 4 + prepared_before


def wrong_outs():
    q = draw()[0]
    yield q.half(), "out: expected shape, dtype and device of q"
    yield q[:, :, :8], "out: expected shape, dtype and device of q"
    yield q[:1, :1].expand_as(q), "out: its elements must not share memory"
    yield q.transpose(2, 3).contiguous().transpose(2, 3), "out: expected a contiguous last dimension"


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize(("out", "message"), list(wrong_outs()), ids=lambda value: value if type(value) is str else "")
def test_a_wrong_out_is_refused_whatever_was_prepared(backend, out, message, return_lse):
    q, k, v = draw()
    sage_aot.attn(q, k, v)
    sage_aot.attn(q, k, v, out=torch.empty_like(q))
    before = dict(pipeline._prepared)
    for _ in range(2):
        with pytest.raises(ArgumentError, match=message):
            sage_aot.attn(q, k, v, out=out, return_lse=return_lse)
    assert pipeline._prepared == before and len(backend.ran) == 2


class Refusing(Recording):
    """A backend that raises instead of preparing while it is told to."""

    refusing = True

    def bind(self, plan, given, out):
        if self.refusing:
            raise RuntimeError("not now")
        return super().bind(plan, given, out)


def test_a_refused_call_leaves_nothing_behind():
    q, k, v = draw()
    with handing(Refusing()):
        for error, tensors, options in (
                (ArgumentError, (q[..., :32], k, v), {}), (ArgumentError, (q, k, v[:, :, :3]), {}),
                (ArgumentError, (q.float(), k, v), {}), (UnsupportedError, (q, k, v), {"pv_accum": "f32"}),
                (RuntimeError, (q, k, v), {})):
            for _ in range(2):
                with pytest.raises(error):
                    sage_aot.attn(*tensors, **options)
                assert pipeline._prepared == {}
        backends._handed.refusing = False
        assert torch.equal(sage_aot.attn(q, k, v), emulated(q, k, v))


@pytest.mark.parametrize("shapes", [((1, 2, 0, 64), (1, 2, 5, 64)), ((1, 2, 3, 64), (1, 2, 0, 64))], ids=str)
def test_no_backend_is_asked_to_run_what_has_no_queries_or_keys(backend, shapes):
    for _ in range(2):
        q, k, v = draw(*shapes)
        out, lse = sage_aot.attn(q, k, v, return_lse=True, out=torch.full_like(q, math.nan))
        assert (out == 0).all() and (lse == -math.inf).all()
        with pytest.raises(UnsupportedError):
            sage_aot.attn(q, k, v, pv_accum="f32")
    assert backend.bound == []


# --- how many are kept ------------------------------------------------------------------------------------------------


def test_the_oldest_of_too_many_goes():
    q, k, v = draw()
    with handing(Idle()):
        backend, scales = backends._handed, [1 + i / 1000 for i in range(MOST_KEPT + 40)]
        for scale in scales:
            sage_aot.attn(q, k, v, scale=scale)
            assert len(pipeline._prepared) <= MOST_KEPT
        assert len(pipeline._prepared) == MOST_KEPT and len(backend.bound) == len(scales)
        for scale in scales[40:]:
            sage_aot.attn(q, k, v, scale=scale)
        assert len(backend.bound) == len(scales)
        sage_aot.attn(q, k, v, scale=scales[39])  # is prepared again, for the oldest
        assert len(backend.bound) == len(scales) + 1
        sage_aot.attn(q, k, v, scale=scales[41])
        assert len(backend.bound) == len(scales) + 1
        sage_aot.attn(q, k, v, scale=scales[40])
        assert len(backend.bound) == len(scales) + 2


@pytest.mark.parametrize("most", [MOST_KEPT, 2])
def test_threads_that_prepare_and_call_at_once_get_their_own_results(monkeypatch, most):
    """Another thread may drop at once what one thread has prepared."""
    monkeypatch.setattr(pipeline, "MOST_KEPT", most)
    tensors = draw()
    expected = {scale: emulated(*tensors, scale=scale) for scale in (0.1, 0.2, 0.5, 1.0, 2.0, 3.0)}
    assert len({out.double().sum().item() for out in expected.values()}) == len(expected)
    meet, wrong = threading.Barrier(6, timeout=60), []

    def work(first):
        try:
            meet.wait()
            for i in range(4 * len(expected)):
                scale = list(expected)[(first + i) % len(expected)]
                if not torch.equal(sage_aot.attn(*tensors, scale=scale), expected[scale]):
                    wrong.append(scale)
                if len(pipeline._prepared) > most:
                    wrong.append("too many are kept")
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# --- tracing ----------------------------------------------------------------------------------------------------------


def test_fake_tensors_are_never_prepared(backend):
    real = draw()
    with FakeTensorMode() as mode:
        q, k, v = (mode.from_tensor(tensor) for tensor in real)
        for out in (None, torch.empty_like(q)):
            for return_lse in (False, True):
                sage_aot.attn(q, k, v, out=out, return_lse=return_lse, scale=0.5)
        with pytest.raises(ArgumentError, match="one head dim"):
            sage_aot.attn(q[..., :32], k, v)
    assert (pipeline._prepared, backend.asked, backend.bound) == ({}, [], [])


@pytest.fixture
def fresh():
    """No compiled code of another test."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("dynamic", [None, False, True])
@pytest.mark.parametrize("scales", [(0.5, 0.25, 0.125), (1, 2, 3), (None, 0.5, 2)], ids=str)
def test_compiling_prepares_nothing_and_running_does(backend, fresh, scales, dynamic):
    """The scale may be an argument of the compiled code, which is symbolic from its second value on."""
    before_run = []

    def compiler(graph, inputs):
        before_run.append((len(pipeline._prepared), len(backend.asked), len(backend.ran)))
        return graph

    def work(q, k, v, scale):
        return sage_aot.attn(q, k, v, scale=scale, is_causal=True)

    compiled = torch.compile(work, backend=compiler, fullgraph=True, dynamic=dynamic)
    kinds = set()
    for queries, scale in ((9, scales[0]), (9, scales[0]), (9, scales[1]), (12, scales[1]), (12, scales[2])):
        q, k, v = draw((1, 2, queries, 64), (1, 2, 15, 64), seed=queries)
        prepared = len(kinds), len(backend.ran)
        compilations = len(before_run)
        assert torch.equal(compiled(q, k, v, scale), emulated(q, k, v, scale=scale, is_causal=True))
        kinds.add((queries, scale))
        assert all(found == (prepared[0], *prepared) for found in before_run[compilations:])
    assert len(before_run) >= 1 and len(backend.ran) == 5 and len(backend.bound) == len(kinds)
    for key in pipeline._prepared:
        assert {type(leaf) for leaf in leaves_of(key)} <= {
            int, float, bool, str, bytes, type(None), torch.dtype, torch.device, Recording}


def leaves_of(key):
    """Leaves that a key is made of: of a traced call too no number of the tracer."""
    return [leaf for part in key for leaf in leaves_of(part)] if isinstance(key, tuple) else [key]


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_scale_that_compiled_code_computes(fresh, dynamic):
    compiled = torch.compile(lambda q, k, v: sage_aot.attn(q, k, v, scale=q.shape[2] ** -0.5), backend="aot_eager",
                             fullgraph=True, dynamic=dynamic)
    for queries in (9, 16, 25):
        q, k, v = draw((1, 2, queries, 64), (1, 2, 15, 64))
        assert torch.equal(compiled(q, k, v), emulated(q, k, v, scale=queries ** -0.5))


@pytest.mark.parametrize("scale", [math.nan, 1e7, True, "1"])
def test_a_wrong_scale_is_refused_in_compiled_code(fresh, scale):
    compiled = torch.compile(lambda *qkv: sage_aot.attn(*qkv, scale=scale), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="scale: expected a finite number"):
        compiled(*draw())


# --- which backend ----------------------------------------------------------------------------------------------------


def test_calls_run_on_the_backend_that_is_handed_in_and_then_on_the_one_before():
    tensors = draw()
    outer, inner = Recording("sm80"), Recording("sm90")
    with handing(outer):
        assert torch.equal(sage_aot.attn(*tensors), emulated(*tensors, arch="sm80"))
        with handing(inner):
            assert torch.equal(sage_aot.attn(*tensors), emulated(*tensors, arch="sm90"))
        sage_aot.attn(*tensors)
    assert torch.equal(sage_aot.attn(*tensors), emulated(*tensors))
    assert (len(outer.ran), len(inner.ran), len(outer.bound), len(inner.bound)) == (2, 1, 1, 1)


def test_an_exception_gives_the_backend_back_too():
    outer = Recording()
    with handing(outer):
        with pytest.raises(ZeroDivisionError), handing(Recording()):
            raise ZeroDivisionError
        assert backends._handed is outer
    assert backends._handed is None


def test_nothing_is_kept_of_a_backend_that_was_handed_in():
    tensors = draw()
    sage_aot.attn(*tensors)
    kept = dict(pipeline._prepared)
    with handing(Recording()):
        sage_aot.attn(*tensors)
        assert len(pipeline._prepared) == 2
    assert pipeline._prepared == kept


def test_the_plan_of_a_call_is_that_of_its_arch_with_heads_in_turns(monkeypatch):
    """The emulation uses no workspace, but the plan has its sizes."""
    problem = check(Given("dense", *draw((2, 4, 300, 64), (2, 2, 300, 64))), Options(qk="int4"))
    backend = EmulationBackend(default_library().manifest, "sm80")
    assert plan_of(backend, problem, -1).heads_at_once == 8
    monkeypatch.setattr(planning, "DELTA_BYTES", 1)
    layout = plan_of(backend, problem, -1)
    assert layout.heads_at_once == 1 and layout.kernels.attn.spec.arch == "sm80"


# --- the first call ---------------------------------------------------------------------------------------------------


def in_a_process(program):
    environment = {**os.environ, "PYTHONPATH": str(Path(sage_aot.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_importing_the_package_imports_no_torch():
    program = "import sys, sage_aot; print(*({'torch', 'numpy', 'cupy', 'cuda'} & set(sys.modules)), sage_aot.__file__)"
    assert in_a_process(program) == [sage_aot.__file__]


def test_a_first_call_makes_the_records_of_its_arch_alone():
    program = """
import torch, sage_aot
from sage_aot._call import backends
from sage_aot._call.backends import default_library
sage_aot.attn(*torch.zeros(3, 1, 1, 4, 64, dtype=torch.bfloat16))
made = [name for name, row in default_library().manifest.kernels._rows.items() if not isinstance(row, dict)]
print(*made)
"""
    made = in_a_process(program)
    assert "sage_quant_sm89_d64_qkint8_pve4m3" in made
    assert {name.split("_")[2] for name in made} == {"sm89"}


def test_a_kept_call_needs_no_look_at_its_options(backend, monkeypatch):
    """The options that an operator passes are the key, unchanged."""
    options = for_schema(*vars(Options(scale=0.5)).values())
    call = pipeline.prepared(Given("dense", *draw()), None, options)
    monkeypatch.setattr(Options, "from_schema", None)
    assert pipeline.prepared(Given("dense", *draw(seed=1)), None, options) is call


def test_a_tensor_that_requires_grad_is_refused_before_kernels_are_looked_for():
    """Kernels are lacking, too, but the caller must mend the argument first."""
    q, k, v = (torch.zeros(1, 2, 40, 64, dtype=torch.bfloat16) for _ in range(3))
    with handing(Recording("sm100")):
        with pytest.raises(UnsupportedError, match="no kernel for sm100"):
            sage_aot.attn(q, k, v, qk="int4")
        with pytest.raises(ArgumentError, match="q requires grad"):
            sage_aot.attn(q.requires_grad_(), k, v, qk="int4")
