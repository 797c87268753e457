"""Tuning a model: the shares of blocks that each of its layers needs, found call by call while the model runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from sage_aot._call.masks import keys_of_choice
from sage_aot._call.sparse import Sparse
from sage_aot._tools.tune import Measured, Probe, Search, TunedModel
from sage_aot.errors import ArgumentError
from sage_aot.integrations import _serve
from sage_aot.integrations._policy import current, use
from sage_aot.integrations._report import report
from sage_aot.integrations._rules import LEAST_BLOCKS, HostCall, blocks_of, key_mask_of


def tune_model(model: Any, *, run: Callable[[Any], object], error: float, sparse: Sparse,
               keeps: Sequence[float]) -> TunedModel:
    """:func:`sage_aot.sparse.tune` of a model. `run` is called twice: calls raise the shares of their layers, one after
    the other, and then all calls are measured at the shares that were found, and may raise them again. Each call is
    tuned while it is made, and the model goes on with its output of all blocks: no call's tensors outlive it. Tuned are
    the calls that `sparse` would make sparse: :func:`sage_aot.integrations._rules.blocks_of`."""
    search = Search.of(error, sparse, keeps)
    if not isinstance(model, torch.nn.Module) or not callable(run):
        raise ArgumentError(f"tune: expected a torch.nn.Module, and a function run that runs it, got "
                            f"{type(model).__name__} and {type(run).__name__}; of a pipeline pass its model, and let "
                            f"run call the pipeline")
    places = _least_places(model, run, search)
    if not places:
        raise ArgumentError(f"tune: expected a model with calls that sage_aot serves and that may be sparse, of tokens "
                            f"to themselves and with {LEAST_BLOCKS} blocks of keys or more, got "
                            f"{type(model).__name__} and these calls: {report() or 'none'}; switch it on first, as by "
                            f"sage_aot.integrations.transformers.enable(model), let it run on more tokens, or pass "
                            f"sage_aot.Sparse(keep=1.0, block_size=64)")
    return _measured(model, run, places, search)


def _least_places(model: torch.nn.Module, run: Callable[[Any], object], search: Search) -> dict[str, list[int]]:
    """Places of the shares of each layer's heads, from a first run: a call raises those of the calls before."""
    places: dict[str, list[int]] = {}

    def find(layer: str, probe: Probe) -> None:
        if layer not in places:
            places[layer] = search.least(probe.heads, probe.errors)
        elif len(places[layer]) == probe.heads:
            places[layer] = search.raised(places[layer], probe.errors)
        else:
            raise ArgumentError(f"tune: expected calls of {len(places[layer])} q heads in {layer}, as its first one "
                                f"has, got {probe.heads}; tune q, k and v of its calls on their own")

    with _each_probe(model, search, find):
        run(model)
    return places


def _measured(model: torch.nn.Module, run: Callable[[Any], object], places: dict[str, list[int]],
              search: Search) -> TunedModel:
    """Measure the layers with the choices that were found for them, in a second run. Where its calls are others, they
    may raise shares again."""
    found: dict[str, Measured] = {}

    def measure(layer: str, probe: Probe) -> None:
        if layer not in places:
            return
        of_layer = found.setdefault(layer, Measured(search.made(places[layer])))
        if not all(search.holds(places[layer], probe.errors)):
            places[layer] = search.raised(places[layer], probe.errors)
            of_layer.take(search.made(places[layer]))
        of_layer.add(probe)

    with _each_probe(model, search, measure):
        run(model)
    if missing := places.keys() - found.keys():
        raise ArgumentError(f"run: expected the same calls each time, got none of {min(missing)} the second time; let "
                            f"it run the model anew")
    return TunedModel({layer: found[layer].tuned() for layer in places})


@contextmanager
def _each_probe(model: torch.nn.Module, search: Search, see: Callable[[str, Probe], None]) -> Iterator[None]:
    """Serve all that sage_aot computes of the model's calls while the context is entered, and hand what may be sparse
    to `see` with the name of the module that makes the call. Calls outside of the model are not handed on: those of a
    pipeline's encoder."""
    def observe(call: HostCall, result: Any, host: Callable[[], Any]) -> None:
        if not inside:
            return
        if blocks_of(call) is not None:
            raise ArgumentError(f"tune: expected a model that computes all blocks, got one with {call.blocks} in "
                                f"{inside[-1]}; switch it on without sparse")
        if blocks_of(call._replace(blocks=search.sparse)) is not None:
            see(inside[-1], _probe_of(call, search))

    before = _serve.observer
    with _modules_noted(model) as inside, use(replace(current(), when="possible")), torch.no_grad():
        _serve.observer = observe
        try:
            yield
        finally:
            _serve.observer = before


@contextmanager
def _modules_noted(model: torch.nn.Module) -> Iterator[list[str]]:
    """The names of the modules whose forward runs, the innermost last."""
    inside: list[str] = []
    hooks = []
    for name, module in model.named_modules():
        hooks += [module.register_forward_pre_hook(lambda *_, name=name: inside.append(name)),
                  module.register_forward_hook(lambda *_: (inside.pop(), None)[1], always_call=True)]
    try:
        yield inside
    finally:
        for hook in hooks:
            hook.remove()


def _probe_of(call: HostCall, search: Search) -> Probe:
    options = {**search.options, **current().options}
    k = keys_of_choice(call.q, call.k, call.layout, key_mask_of(call), None)
    return Probe(lambda sparse: _serve.serve(call._replace(blocks=sparse), False, options), call.q, k, call.is_causal,
                 call.scale, call.layout)
