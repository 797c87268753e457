"""Tuning: shares that inputs are built to need, errors and densities that the test measures itself, models, files."""

from __future__ import annotations

import json
import math
import os
import re
import weakref

import pytest
import torch

import sage_aot
from sage_aot import ArgumentError, Sparse
from sage_aot._tools import tune as tuning
from sage_aot._tools.tune import KEEPS, Search
from sage_aot.integrations import Policy, _policy, _rules, _serve, _tune, use
from sage_aot.integrations._rules import HostCall
from sage_aot.integrations.torch import sdpa
from sage_aot.sparse import Tuned, TunedLayer, TunedModel, load_tuned, save_tuned, tune

SHARES = 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0
BY_SCORES = Sparse(keep=1.0, block_size=64, first=0, near=0)


def needing(*counts, queries=200, blocks=16, seed=0):
    """q, k and v of which a head's queries weigh so many of the blocks of keys alike, and the others next to nothing:
    with n of them hidden, n / count of the output's terms are missing."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.ones(1, len(counts), queries, 64)
    v = torch.randn(1, len(counts), 64 * blocks, 64, generator=generator)
    k = torch.full((1, len(counts), blocks, 64, 64), -0.7)
    for head, count in enumerate(counts):
        k[0, head, torch.randperm(blocks, generator=generator)[:count]] = 0.7
    return q, k.flatten(2, 3), v


def falling(queries=512, keys=1024, heads=4, kv_heads=2, seed=0):
    """Tensors whose blocks of keys matter less and less, faster in later heads."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(1, heads, queries, 64, generator=generator) * 0.3 + 1
    k, v = torch.randn(2, 1, kv_heads, keys, 64, generator=generator)
    k = 0.5 * k - torch.arange(keys)[:, None] / keys * torch.arange(1, kv_heads + 1)[:, None, None]
    return q, k, v


def error_of(out, dense, head):
    """Relative L1 error of a head, in float64, of tensors heads first."""
    return ((out - dense)[:, head].double().abs().sum() / dense[:, head].double().abs().sum()).item()


# --- tensors ----------------------------------------------------------------------------------------------------------


def test_each_head_gets_the_share_that_it_needs():
    tuned = tune(needing(1, 2, 3, 4, 8, 16), sparse=BY_SCORES, keeps=SHARES)
    assert tuned.sparse == Sparse(keep=(1 / 16, 1 / 8, 1 / 4, 1 / 4, 1 / 2, 1.0), block_size=64, first=0, near=0)
    assert tuned.density == tuned.sparse.keep and len(tuned.error) == 6
    assert tuned.error[-1] == 0 and max(tuned.error) <= 0.05


def test_of_several_samples_the_worst_counts():
    samples = [needing(1, 8, 2), needing(4, 1, 2, seed=1), needing(2, 2, 2, queries=70, seed=2)]
    tuned = tune(samples, sparse=BY_SCORES, keeps=SHARES)
    assert tuned.sparse.keep == (1 / 4, 1 / 2, 1 / 8)
    for head in range(3):
        errors = [error_of(sage_aot.attn(*sample, sparse=tuned.sparse), sage_aot.attn(*sample), head)
                  for sample in samples]
        assert tuned.error[head] == pytest.approx(max(errors), rel=1e-5)


@pytest.mark.parametrize("mask", [{"key_mask": (torch.arange(300) < 100)[None]},
                                  {"attn_mask": (torch.arange(300) < 100)[None, None, None]}], ids=["keys", "elements"])
def test_densities_are_of_the_blocks_that_a_call_with_a_mask_of_keys_chooses(mask):
    """Hidden keys are large here, and unlike each other: by their own values all of their blocks were seen."""
    q, k, v = torch.randn(3, 1, 2, 300, 64, generator=torch.Generator().manual_seed(0)) + 2.0
    k[:, :, 100:] = 50 * torch.randn(1, 2, 200, 64, generator=torch.Generator().manual_seed(1))
    sparse = Sparse(keep=0.2, block_size=64, first=0, near=0, least_alike=0.5)
    tuned = tune((q, k, v), error=1e9, sparse=sparse, keeps=(0.2,), **mask)
    shown = torch.cat([k[:, :, :100], k[:, :, 99:100].expand(-1, -1, 200, -1)], 2)
    assert tuned.density == pytest.approx((sparse.select(q, shown).blocks.float().mean().item(),) * 2)
    assert tuned.density[0] < sparse.select(q, k).blocks.float().mean().item()


@pytest.mark.parametrize("mask", [{"key_mask": (torch.arange(300) < 100)[None]},
                                  {"attn_mask": (torch.arange(300) < 100)[None, None, None]}], ids=["keys", "elements"])
def test_all_blocks_have_no_error_under_a_mask_of_keys(mask):
    """A call without a choice drops hidden keys, and the others get other scales."""
    q, k, v = torch.randn(3, 1, 2, 300, 64, generator=torch.Generator().manual_seed(0))
    tuned = tune((q, k, v), error=0.02, sparse=Sparse(keep=1.0, block_size=64), keeps=(1.0,), **mask)
    assert tuned.error == (0.0, 0.0)


@pytest.mark.parametrize("tail", [False, True])
@pytest.mark.parametrize("call", [{}, {"is_causal": True}, {"layout": "NHD", "scale": 0.1},
                                  {"is_causal": True, "layout": "NHD", "smooth_v": True}], ids=str)
def test_the_share_before_is_above_the_bound(call, tail):
    tensors, template = falling(), Sparse(keep=0.5, block_size=64, tail=tail)
    given = tensors if call.get("layout") != "NHD" else tuple(x.transpose(1, 2) for x in tensors)
    bound, of_test = 0.1, {**call, "layout": "HND", **({"p": "exp2"} if tail else {})}  # as a tail has them
    tuned = tune(given, error=bound, sparse=template, **call)
    dense = sage_aot.attn(*tensors, **of_test)
    assert len(set(tuned.sparse.keep)) > 1, "the test needs heads that differ"
    for head, share in enumerate(tuned.sparse.keep):
        found, before = (error_of(sage_aot.attn(*tensors, sparse=Sparse(keep=keep, block_size=64, tail=tail),
                                                **of_test), dense, head)
                         for keep in (share, KEEPS[max(KEEPS.index(share) - 1, 0)]))
        assert found <= bound and (before > bound or share == KEEPS[0])
        assert tuned.error[head] == pytest.approx(found, rel=1e-4)


@pytest.mark.parametrize("tail", [False, True])
def test_heads_to_which_the_choice_makes_no_difference_need_the_least(tail):
    q, k, v = falling(heads=3, kv_heads=3)
    if tail:
        k[:, 1] = k[:, 1, :1]  # the means of the tail are then its keys
    else:
        v[:, 1] = v[:, 1, :1]
    q[:, 2], v[:, 2] = 0, 0  # an output of zeros
    tuned = tune((q, k, v), error=0.06, sparse=Sparse(keep=1.0, block_size=64, tail=tail))
    assert tuned.sparse.keep[0] > tuned.sparse.keep[1] == tuned.sparse.keep[2] == KEEPS[0]
    assert tuned.error[1] <= 0.06 and tuned.error[2] == 0


def test_a_head_that_nothing_serves_gets_all_blocks_and_its_error(monkeypatch):
    """The call with all blocks differs here from any choice."""
    attn = tuning.attn
    monkeypatch.setattr(tuning, "attn", lambda *tensors, sparse, **call: attn(*tensors, sparse=sparse, **call) * (
        1.5 if sparse == Sparse(keep=1.0) else 1))
    tuned = tune(needing(1, 4), sparse=BY_SCORES, keeps=(1 / 4, 1 / 2))
    assert tuned.sparse.keep == (1.0, 1.0) and tuned.error == pytest.approx((1 / 3, 1 / 3), rel=1e-3)


@pytest.mark.parametrize(("queries", "keys", "block_size", "is_causal"), [
    (512, 512, 64, True), (300, 700, (128, 64), True), (512, 1024, 128, False), (200, 700, (64, 192), True),
    (600, 600, (256, 64), True)])
def test_densities_are_of_the_blocks_that_a_causal_mask_leaves(queries, keys, block_size, is_causal):
    q, k, v = falling(queries, keys)
    template = Sparse(keep=1.0, block_size=block_size)
    tuned = tune((q, k, v), error=0.3, sparse=template, is_causal=is_causal)
    shown = tuned.sparse.select(q, k, is_causal=is_causal).blocks[0]
    i, j = torch.arange(queries)[:, None] + keys - queries, torch.arange(keys)
    sight = (j <= i) if is_causal else torch.ones(queries, keys, dtype=torch.bool)
    in_sight = torch.stack([torch.stack([part.any() for part in rows.split(64, 1)]) for rows in sight.split(64)])
    rows, columns = in_sight.shape
    for head, density in enumerate(tuned.density):
        seen = (shown[head, :rows, :columns] & in_sight).sum() / in_sight.sum()
        assert density == pytest.approx(seen.item())
    assert min(tuned.density) < 1


@pytest.mark.parametrize(("arguments", "message"), [
    ({"error": 0}, "error: expected a number above 0, such as 0.05, got 0"),
    ({"error": math.nan}, "error: expected a number above 0"), ({"error": "1"}, "error: expected a number"),
    ({"keeps": ()}, "keeps: expected shares, above 0 and at most 1, got ()"),
    ({"keeps": (0.5, 1.5)}, "keeps: expected shares"), ({"keeps": 0.5}, "keeps: expected shares"),
    ({"sparse": Sparse(mass=0.9)}, "sparse: expected a sage_aot.Sparse with keep"),
    ({"sparse": 0.5}, "sparse: expected a sage_aot.Sparse with keep, in whose place the shares are tried, got 0.5"),
    ({"layout": "BHSD"}, "layout: expected one of"), ({"block_mask": None}, "block_mask: expected none, since tune"),
    ({"return_lse": True}, "return_lse: expected none"), ({"target": ()}, "expected (q, k, v), or a list of these"),
    ({"target": torch.zeros(3, 1, 1, 64, 64)}, "expected (q, k, v), or a list of these, got Tensor"),
    ({"target": torch.nn.Identity()}, "got Identity; of a model pass run, too"),
    ({"target": [(1, 2, 3)]}, "expected (q, k, v), or a list of these"),
    ({"target": [needing(1), needing(1, 2)]}, "expected samples with one number of q heads, got [1, 2]")], ids=str)
def test_what_is_refused(arguments, message):
    with pytest.raises(ArgumentError, match=re.escape(message)):
        tune(**{"target": needing(1), "sparse": BY_SCORES, **arguments})


# --- the search -------------------------------------------------------------------------------------------------------


def tabled(table, calls=None):
    """The errors of heads from a table [heads, shares], by the shares that are tried."""
    def errors(sparse):
        if calls is not None:
            calls.append(sparse.keep)
        return torch.tensor([row[KEEPS.index(share)] for row, share in zip(table, sparse.keep)])

    return errors


def drawn(heads=40, seed=0):
    return torch.rand(heads, len(KEEPS), generator=torch.Generator().manual_seed(seed))


def search(error=0.5):
    return Search.of(error, Sparse(keep=1.0), KEEPS)


def test_the_search_finds_the_first_share_in_few_calls():
    table, calls = [[0.1] * 8, [0.9] * 8, *drawn().sort(1, descending=True).values.tolist()], []
    found = search().least(42, tabled(table, calls))
    assert found == [next((i for i, value in enumerate(row) if value <= 0.5), len(KEEPS) - 1) for row in table]
    assert len(calls) == 3 and set(found) == set(range(len(KEEPS)))


def test_where_errors_rise_too_the_share_before_is_above_the_bound():
    table = drawn().tolist()
    for row, place in zip(table, search().least(40, tabled(table))):
        assert row[place] <= 0.5 or place == len(KEEPS) - 1
        assert place == 0 or row[place - 1] > 0.5


def test_another_call_raises_shares_alone():
    first, second = (drawn(seed=seed).sort(1, descending=True).values.tolist() for seed in (0, 1))
    calls, found = [], search().least(40, tabled(first))
    raised = search().raised(found, tabled(second, calls))
    assert raised == [max(pair) for pair in zip(found, search().least(40, tabled(second)))] != found
    assert len(calls) <= 4
    assert search().raised(found, tabled(first, calls[:0])) == found


def test_an_error_that_is_no_number_is_above_the_bound():
    assert search().least(1, lambda sparse: torch.tensor([math.nan])) == [len(KEEPS) - 1]
    assert math.isnan(Tuned(BY_SCORES, (1.0, 1.0), (0.5, math.nan)).worst_error)


def test_the_worst_error_is_not_rounded(default_dtype):
    default_dtype(torch.float16)
    assert Tuned(BY_SCORES, (1.0, 1.0), (0.1, 0.3)).worst_error == 0.3


# --- models -----------------------------------------------------------------------------------------------------------


class Layer(torch.nn.Module):
    """Attention on tensors of its own: those of a step."""

    def __init__(self, *steps, is_causal=False):
        super().__init__()
        self.steps, self.is_causal = steps, is_causal

    def forward(self, step):
        q, k, v = self.steps[step]
        return sdpa(q, k, v, is_causal=self.is_causal)


class Model(torch.nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, step=0):
        for layer in self.layers:
            layer(step)


def steps(model):
    model(0)
    model(1)


def few(*counts, seed=0):
    """A call of tokens to themselves, with few blocks: little to emulate."""
    return needing(*counts, queries=256, blocks=4, seed=seed)


def tuned_of(model, run=steps):
    return tune(model, run=run, sparse=BY_SCORES, keeps=(1 / 4, 1 / 2, 1.0))


@pytest.fixture
def model(monkeypatch):
    monkeypatch.setattr(_rules, "LEAST_BLOCKS", 4)
    return Model(Layer(few(1, 4, 2), few(2, 1, 1, seed=1)), torch.nn.Sequential(Layer(*[few(2, 4, 1)] * 2)))


def test_each_layer_of_a_model_gets_its_shares(model):
    tuned = tuned_of(model)
    assert {name: sparse.keep for name, sparse in tuned.sparse.items()} == {
        "layers.0": (1 / 2, 1.0, 1 / 2), "layers.1.0": (1 / 2, 1.0, 1 / 4)}
    assert tuned.report == [TunedLayer(name, len(layer.error), sum(layer.density) / len(layer.density),
                                       max(layer.error)) for name, layer in tuned.layers.items()]
    assert tuned.report[1].density == pytest.approx((1 / 2 + 1 + 1 / 4) / 3) and 0 < tuned.report[0].error <= 0.05
    assert str(tuned).splitlines()[3] == f"| layers.1.0 | 3 | 58.3 | {100 * tuned.report[1].error:.2f} |"


def test_a_layer_has_the_worst_error_of_its_calls(model):
    tuned = tuned_of(model).layers["layers.0"]
    for head in range(3):
        errors = [error_of(sage_aot.attn(*sample, sparse=tuned.sparse), sage_aot.attn(*sample), head)
                  for sample in model.layers[0].steps]
        assert tuned.error[head] == pytest.approx(max(errors), rel=1e-5)


@pytest.mark.parametrize("options", [{}, {"smooth_v": True}], ids=str)
def test_calls_are_tuned_as_they_are_served(model, options):
    q, k, v = falling(256, 256, kv_heads=4)
    template = Sparse(keep=1.0, block_size=64)
    with use(Policy(options=options)):
        found = tune(Model(Layer((q, k, v), is_causal=True)), run=lambda model: model(), error=0.3, sparse=template)
    expected = tune((q, k, v), error=0.3, sparse=template, is_causal=True, **options)
    assert found.layers == {"layers.0": expected} and 0 < expected.mean_density < 1


def test_calls_that_would_not_be_sparse_are_not_tuned(model):
    """Calls to other tokens, short ones and those with masks stay dense."""
    q, k, v = few(4, 4)

    class Others(torch.nn.Module):
        def forward(self, step):
            sdpa(q[:, :, :200], k, v)
            sdpa(q[:, :, :192], k[:, :, :192], v[:, :, :192])
            sdpa(q, k, v, torch.ones(256, 256, dtype=torch.bool).tril(5))
            return sdpa(q[:, :, :1], k, v)

    other = Model(Others(), *model.layers)
    assert list(tuned_of(other).sparse) == ["layers.1", "layers.2.0"]
    with pytest.raises(ArgumentError, match="may be sparse.*got Model and these calls: .*'sage_aot': .*on more tokens"):
        tuned_of(Model(Others()))


def test_a_model_that_is_sparse_already_is_refused(model):
    class AlreadySparse(torch.nn.Module):
        def forward(self, step):
            return _serve.attend(HostCall(*few(1), blocks=Sparse(keep=0.5, block_size=64)), None)

    with pytest.raises(ArgumentError, match="computes all blocks, got one with Sparse.keep=0.5.* in layers.0; switch"):
        tuned_of(Model(AlreadySparse()))


def test_runs_that_differ_are_refused(model):
    runs = []
    for calls, message in [([0, 1], "none of layers.0 the second time; let it run the model anew"), ([1, 0], None)]:
        runs[:] = calls

        def run(model, step=0):
            for layer in list(model.layers)[runs.pop(0):]:
                layer(0)

        if message is None:  # what was not there the first time has no share
            assert list(tuned_of(model, run).sparse) == ["layers.1.0"]
        else:
            with pytest.raises(ArgumentError, match=message):
                tuned_of(model, run)


def test_the_policys_options_hold_while_a_model_is_tuned(model, monkeypatch):
    served = []
    serve = _serve.serve
    monkeypatch.setattr(_serve, "serve", lambda call, lse, options: served.append(dict(options)) or serve(
        call, lse, options))
    with use(Policy(options={"smooth_v": True})) as policy:
        tuned_of(model)
        assert _policy.current() is policy
    assert len(served) > 8 and all(options == {"smooth_v": True} for options in served)


def test_no_call_outlives_its_turn(model, monkeypatch):
    alive = weakref.WeakSet()

    class Watched(_tune.Probe):
        def __init__(self, *arguments):
            assert not alive
            super().__init__(*arguments)
            alive.add(self)

    monkeypatch.setattr(_tune, "Probe", Watched)
    tuned_of(model)
    assert not alive


def test_calls_outside_of_the_model_are_not_tuned(model):
    def run(model):
        sdpa(*few(4, 4))
        steps(model)
        sdpa(*few(4, 4))

    assert tuned_of(model, run).sparse == tuned_of(model).sparse


def test_a_layer_that_fails_leaves_no_trace(model):
    def failing(model):
        with pytest.raises(IndexError):
            model(7)
        sdpa(*few(4, 4))  # no module is inside it
        steps(model)

    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    assert tuned_of(model, failing).sparse == tuned_of(model).sparse
    observer, policy = _serve.observer, _policy.current()
    with pytest.raises(IndexError):
        tuned_of(model, lambda model: model(7))
    assert (_serve.observer, _policy.current()) == (observer, policy)
    assert [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()] == hooks


def test_a_model_runs_without_gradients(model):
    for q, _, _ in model.layers[0].steps:
        q.requires_grad_()
    assert set(tuned_of(model).sparse) == {"layers.0", "layers.1.0"}


def test_models_that_are_refused(model):
    for target, run, message in [
            (needing(1), steps, "expected a torch.nn.Module, and a function run that runs it, got tuple and function"),
            (model, 5, "got Model and int; of a pipeline pass its model"),
            (model, lambda model: None, "expected a model with calls that sage_aot serves .*got Model and these calls"),
            (Model(Layer(few(1, 2), few(1, 2, 3))), steps,
             "expected calls of 2 q heads in layers.0.*got 3")]:
        with pytest.raises(ArgumentError, match=message):
            tuned_of(target, run)
    with pytest.raises(ArgumentError, match="is_causal: expected none with run"):
        tune(model, run=steps, is_causal=True)


# --- files ------------------------------------------------------------------------------------------------------------

LAYERS = {
    "blocks.0.attn": Sparse(keep=(0.25, 1.0), block_size=(128, 64), first=0, near=2, least_alike=0.5,
                            dense_keys=(77, 5), dense_queries=3, tail=True),
    "b": Sparse(mass=0.9), "": Sparse(tau=(-1.5, 2.0)), 'a "name"\n of ünïcode': Sparse(keep=1.0, block_size=192)}


def test_what_is_saved_is_loaded(tmp_path):
    path = tmp_path / "tuned.json"
    for layers in ({}, LAYERS, {"b": LAYERS["b"]}):  # over the file of before
        save_tuned(layers, path)
        assert load_tuned(str(path)) == layers and list(tmp_path.iterdir()) == [path]
    assert json.loads(path.read_text("utf-8")) == {"format": 1, "layers": {"b": {"mass": 0.9}}}
    tuned = TunedModel({"b": Tuned(LAYERS["b"], (0.5,), (0.1,))})
    save_tuned(tuned.sparse, path)
    assert load_tuned(path) == tuned.sparse


def layer(**held):
    return json.dumps({"format": 1, "layers": {"a": held}})


@pytest.mark.parametrize(("text", "message"), [
    ("", "which is no JSON"), ("[" * 100000, "which is no JSON"),
    ('{"format": 1, "layers": {"a": {"keep": 0.', "which is no JSON"),
    ("[]", "which has no format and layers"), ('{"format": 1}', "which has no format and layers"),
    ('{"format": 1, "layers": []}', "which has no format and layers"),
    ('{"format": 1, "layers": {}, "calls": 2}', "which has no format and layers"),
    ('{"format": 2, "layers": {}}', "expected a file of format 1, got .* of format 2"),
    ('{"format": 1, "layers": {"a": 0.5}}', "layer 'a': expected the fields of a sage_aot.Sparse, got 0.5"),
    (layer(), "layer 'a': Sparse: expected one of keep, mass and tau, got none"),
    (layer(keep=0.5, mass=0.5), "layer 'a': Sparse: expected one of keep, mass and tau, got keep, mass"),
    (layer(keep=0.5, block_size=100), "layer 'a': .*64"),
    *[(layer(**{"keep": 0.5, name: value}), f"layer 'a': ({name}|Sparse): expected .*, got ")
      for name, values in {
          "keep": (0, 1.5, "0.5", True, [], [0.5, 0], [[0.5]], None, math.nan), "mass": (2,), "tau": ("1", math.inf),
          "block_size": (0, 64.0, [64], [64, 64, 64], "64"), "first": (-1, 1.5, [1, 1]), "near": (True,),
          "least_alike": (-0.1, 2), "dense_keys": (-1, [1], [1, 2, 3], 0.5), "dense_queries": ([0, -1],),
          "tail": (1, "yes")}.items() for value in values],
    (layer(keep=0.5, tales=1), "layer 'a': expected fields of sage_aot.Sparse, got tales")])
def test_damaged_and_foreign_files_are_refused(tmp_path, text, message):
    path = tmp_path / "tuned.json"
    path.write_text(text, "utf-8")
    with pytest.raises(ArgumentError, match=message):
        load_tuned(path)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ArgumentError, match="path: expected a file that can be read, got .*missing"):
        load_tuned(tmp_path / "missing")
    (tmp_path / "cubin").write_bytes(b"\x7fELF\x02\x01\xff\xfe")
    with pytest.raises(ArgumentError, match="which is no JSON"):
        load_tuned(tmp_path / "cubin")


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "tuned.json"
    save_tuned(LAYERS, path)
    monkeypatch.setattr(os, "replace", lambda *paths: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(ArgumentError, match="path: expected a file that can be written, got .*: No space left"):
        save_tuned({}, path)
    assert load_tuned(path) == LAYERS and list(tmp_path.iterdir()) == [path]
    with pytest.raises(ArgumentError, match="path: expected a file that can be written"):
        save_tuned({}, tmp_path / "missing" / "tuned.json")


@pytest.mark.parametrize("layers", [[], {"a": 0.5}, {1: Sparse(keep=0.5)}, Tuned(Sparse(keep=0.5), (), ())], ids=str)
def test_what_is_no_layers_is_not_saved(tmp_path, layers):
    with pytest.raises(ArgumentError, match="layers: expected a dict of sage_aot.Sparse by the names of layers"):
        save_tuned(layers, tmp_path / "tuned.json")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("call", [lambda path: load_tuned(path), lambda path: save_tuned({}, path)])
@pytest.mark.parametrize("path", [None, 3])
def test_what_is_no_path_is_told(call, path):
    with pytest.raises(ArgumentError, match=f"path: expected the path of a file, got {path}"):
        call(path)


def test_scalars_of_other_libraries_are_saved(tmp_path):
    save_tuned({"a": Sparse(keep=torch.tensor(0.5), near=torch.tensor(2))}, tmp_path / "tuned")
    assert load_tuned(tmp_path / "tuned") == {"a": Sparse(keep=0.5, near=2)}


def test_nothing_to_tune_is_told():
    with pytest.raises(ArgumentError, match="tune: expected q, k and v with elements, got an empty tensor"):
        tune(tuple(torch.randn(3, 1, 2, 0, 64)))
