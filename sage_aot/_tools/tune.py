"""Tuning: for each head the least share of blocks at which attention that chooses its blocks stays close to attention
that does not.

The error of a head is the relative L1 of its output, Σ |sparse − dense| / Σ |dense| in float32, both with the same
quantization: it is what the blocks cost that are left out, in addition to what quantization costs. Shares are tried for
all heads in one call, each head at its own.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sage_aot._call.api import attn
from sage_aot._call.masks import keys_of_choice
from sage_aot._call.sparse import Sparse
from sage_aot._problem.options import LAYOUTS
from sage_aot._problem.problem import heads_first
from sage_aot._problem.tensors import MASK_BLOCK
from sage_aot.errors import ArgumentError

KEEPS = (1 / 16, 1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2, 3 / 4, 1.0)
"""Shares that are tried."""

_FORMAT = 1  # of the files of save_tuned


class Tuned(NamedTuple):
    """Result for the heads of a layer."""

    sparse: Sparse  # whose `keep` has a share for each q head
    density: tuple[float, ...]  # of each head: the part of its blocks that it sees, of those that a causal mask leaves
    error: tuple[float, ...]  # of each head: relative L1 against attention of all blocks, the worst of the samples

    @property
    def mean_density(self) -> float:
        return sum(self.density) / len(self.density)

    @property
    def worst_error(self) -> float:
        return float(torch.tensor(self.error, dtype=torch.float64).amax())  # which hands a NaN on


class TunedLayer(NamedTuple):
    """A row of the report about a model."""

    layer: str  # the name of its module
    heads: int
    density: float  # mean of the heads
    error: float  # of the worst head


@dataclass(frozen=True)
class TunedModel:
    """Results for the layers of a model, by the names of their modules. ``str()`` gives a Markdown table."""

    layers: dict[str, Tuned]

    @property
    def sparse(self) -> dict[str, Sparse]:
        """Choice that each layer is to run with."""
        return {name: tuned.sparse for name, tuned in self.layers.items()}

    @property
    def report(self) -> list[TunedLayer]:
        return [TunedLayer(name, len(tuned.error), tuned.mean_density, tuned.worst_error)
                for name, tuned in self.layers.items()]

    def __str__(self) -> str:
        lines = ["| layer | heads | density, % | relative L1, % |", "|---|---:|---:|---:|"]
        lines += [f"| {row.layer} | {row.heads} | {100 * row.density:.1f} | {100 * row.error:.2f} |"
                  for row in self.report]
        return "\n".join(lines)


# --- tensors ----------------------------------------------------------------------------------------------------------


def tune_tensors(target: Any, *, error: float, sparse: Sparse, keeps: Sequence[float], **call: Any) -> Tuned:
    """:func:`sage_aot.sparse.tune` of tensors. `call`: of :func:`sage_aot.attn`."""
    search = Search.of(error, sparse, keeps)
    _check_call(call)
    call = {**search.options, **call}
    layout, masks = call.get("layout", "HND"), (call.get("key_mask"), call.get("attn_mask"))
    probes = [Probe(_of_attn((q, k, v), call), q, keys_of_choice(q, k, layout, *masks), call.get("is_causal", False),
                    call.get("scale"), layout) for q, k, v in _samples(target)]
    heads = {probe.heads for probe in probes}
    if len(heads) != 1:
        raise ArgumentError(f"tune: expected samples with one number of q heads, got {sorted(heads)}; tune each layer "
                            f"on its own")
    found = Measured(search.made(search.least(heads.pop(), lambda made: worst(probe.errors(made) for probe in probes))))
    for probe in probes:
        found.add(probe)
    return found.tuned()


def _samples(target: Any) -> list[tuple[torch.Tensor, ...]]:
    samples = [target] if _is_sample(target) else target
    if not isinstance(samples, (list, tuple)) or not samples or not all(map(_is_sample, samples)):
        raise ArgumentError(f"tune: expected (q, k, v), or a list of these, got {type(target).__name__}; of a model "
                            f"pass run, too, a function that runs it")
    if any(tensor.numel() == 0 for sample in samples for tensor in sample):
        raise ArgumentError("tune: expected q, k and v with elements, got an empty tensor")
    return list(samples)


def _is_sample(sample: Any) -> bool:
    return (isinstance(sample, (list, tuple)) and len(sample) == 3
            and all(isinstance(tensor, torch.Tensor) for tensor in sample))


def _check_call(call: Mapping[str, Any]) -> None:
    own = call.keys() & {"block_mask", "return_lse", "out"}
    if own:
        raise ArgumentError(f"{min(own)}: expected none, since tune makes calls of its own, got one; leave it out")
    if (layout := call.get("layout", "HND")) not in LAYOUTS:
        raise ArgumentError(f"layout: expected one of {LAYOUTS}, got {layout!r}")


def _of_attn(sample: tuple[torch.Tensor, ...], call: Mapping[str, Any]) -> Callable[[Sparse], torch.Tensor]:
    return lambda sparse: attn(*sample, sparse=sparse, **call)


# --- a call that is tuned ---------------------------------------------------------------------------------------------


class Probe:
    """A call of attention, made with all blocks, and then with choices of them.

    Args:
        attend: makes the call with a choice.
        q, k: by which the call chooses, in its layout.
        is_causal, scale, layout: of the call.
    """

    def __init__(self, attend: Callable[[Sparse], torch.Tensor], q: torch.Tensor, k: torch.Tensor,
                 is_causal: bool, scale: float | None, layout: str) -> None:
        self._attend, self._q, self._k = attend, q, k
        self._is_causal, self._scale, self._layout = is_causal, scale, layout
        # All blocks as a choice: without one the call drops the keys that a key mask hides, and the others have other
        # scales.
        self._dense = heads_first(attend(Sparse(keep=1.0)), layout)
        self.heads: int = self._dense.shape[1]

    def errors(self, sparse: Sparse) -> torch.Tensor:
        """The error of each head, float32 [heads] on the CPU. One head at a time: what is in float32 is small."""
        out = heads_first(self._attend(sparse), self._layout)
        sums = torch.stack([torch.stack([(out[:, head].float() - dense.float()).abs().sum(), dense.float().abs().sum()])
                            for head, dense in enumerate(self._dense.unbind(1))]).cpu()
        return torch.where(sums[:, 0] == 0, 0.0, sums[:, 0] / sums[:, 1])  # a head of zeros that stays one has no error

    def blocks(self, sparse: Sparse) -> torch.Tensor:
        """Blocks of 64 by 64 that each head sees, and those that it sees without a choice: [2, heads]."""
        queries, keys = (heads_first(x, self._layout).shape[2] for x in (self._q, self._k))
        chosen = sparse.select(self._q, self._k, is_causal=self._is_causal, scale=self._scale, layout=self._layout)
        seen = chosen.blocks[:, :, : -(-queries // MASK_BLOCK), : -(-keys // MASK_BLOCK)]
        dense = _blocks_in_sight(queries, keys, self._is_causal).to(seen.device).expand_as(seen)
        return torch.stack([(seen & dense).sum((0, 2, 3)), dense.sum((0, 2, 3))]).cpu()


def _blocks_in_sight(queries: int, keys: int, is_causal: bool) -> torch.Tensor:
    """The blocks of 64 by 64 of which a query sees a key: bool [query blocks, key blocks]."""
    first_key, first_query = (torch.arange(0, length, MASK_BLOCK) for length in (keys, queries))
    last_query = first_query + MASK_BLOCK - 1
    behind = first_key > last_query[:, None] + keys - queries
    return ~(behind & is_causal)


def worst(errors: Iterable[torch.Tensor]) -> torch.Tensor:
    """The worst error of each head; NaN where a call has one."""
    return torch.stack(list(errors)).amax(0)


class Measured:
    """Errors and blocks of a layer's calls with one choice."""

    def __init__(self, sparse: Sparse) -> None:
        self._sparse = sparse
        self._errors: list[torch.Tensor] = []
        self._blocks: list[torch.Tensor] = []

    def take(self, sparse: Sparse) -> None:
        """Go on with a choice of larger shares. The calls before count at theirs."""
        self._sparse = sparse

    def add(self, probe: Probe) -> None:
        self._errors.append(probe.errors(self._sparse))
        self._blocks.append(probe.blocks(self._sparse))

    def tuned(self) -> Tuned:
        seen, dense = torch.stack(self._blocks).sum(0).double()
        return Tuned(self._sparse, tuple((seen / dense).tolist()), tuple(worst(self._errors).tolist()))


# --- the search -------------------------------------------------------------------------------------------------------


class Search(NamedTuple):
    """A search for the least of ascending shares, the last of them 1, at which a head's error stays within a bound.

    The error falls as the share rises, but for roundings. Whatever it does: it was measured to lie within the bound at
    the share that is found, unless that is 1, and above it at the share before. Shares that a later call raises were
    measured in that call.
    """

    error: float
    sparse: Sparse
    keeps: tuple[float, ...]

    @property
    def options(self) -> dict[str, Any]:
        """Options of the calls compared: a tail's are computed with exponentials, and so are those of all blocks."""
        return {"p": "exp2"} if self.sparse.tail else {}

    @classmethod
    def of(cls, error: Any, sparse: Any, keeps: Any) -> Search:
        if not _is_number(error) or not error > 0:
            raise ArgumentError(f"error: expected a number above 0, such as 0.05, got {error!r}")
        if not isinstance(sparse, Sparse) or sparse.keep is None:
            raise ArgumentError(f"sparse: expected a sage_aot.Sparse with keep, in whose place the shares are tried, "
                                f"got {sparse!r}; pass sage_aot.Sparse(keep=1.0, ...)")
        if not isinstance(keeps, (list, tuple)) or not keeps or not all(_is_number(x) and 0 < x <= 1 for x in keeps):
            raise ArgumentError(f"keeps: expected shares, above 0 and at most 1, got {keeps!r}")
        return cls(float(error), sparse, tuple(sorted({*map(float, keeps), 1.0})))

    def made(self, places: Sequence[int]) -> Sparse:
        """The choice with a share for each head, by their places among the shares."""
        return replace(self.sparse, keep=tuple(self.keeps[place] for place in places))

    def least(self, heads: int, errors: Callable[[Sparse], torch.Tensor]) -> list[int]:
        """The places of the least shares. `errors`: of each head, with a choice."""
        return self._between([-1] * heads, [len(self.keeps) - 1] * heads, errors)

    def raised(self, places: list[int], errors: Callable[[Sparse], torch.Tensor]) -> list[int]:
        """The places of the least shares from these on, which another call found."""
        holds = self.holds(places, errors)
        low = [place - 1 if held else place for place, held in zip(places, holds)]
        high = [place if held else len(self.keeps) - 1 for place, held in zip(places, holds)]
        return self._between(low, high, errors)

    def _between(self, low: list[int], high: list[int], errors: Callable[[Sparse], torch.Tensor]) -> list[int]:
        """Bisection, all heads at once: above the places `low`, and up to those of `high`, whose last one nobody has to
        measure."""
        low, high = list(low), list(high)
        while open_ := [head for head in range(len(high)) if low[head] + 1 < high[head]]:
            tried = list(high)
            for head in open_:
                tried[head] = (low[head] + high[head]) // 2
            holds = self.holds(tried, errors)
            for head in open_:
                (high if holds[head] else low)[head] = tried[head]
        return high

    def holds(self, places: Sequence[int], errors: Callable[[Sparse], torch.Tensor]) -> list[bool]:
        """True for each head whose error stays within the bound at this share."""
        holds: list[bool] = (errors(self.made(places)) <= self.error).tolist()
        return holds


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


# --- files ------------------------------------------------------------------------------------------------------------


def save_tuned(layers: Mapping[str, Sparse], path: str | os.PathLike[str]) -> None:
    """Write what the layers of a model are to run with, such as ``tune(model, run=run).sparse``, as JSON, whole or not
    at all.

    Raises:
        ArgumentError: `layers` is no such mapping, or the file cannot be written.
    """
    if not isinstance(layers, Mapping) or not all(isinstance(name, str) and isinstance(sparse, Sparse)
                                                  for name, sparse in layers.items()):
        raise ArgumentError(f"layers: expected a dict of sage_aot.Sparse by the names of layers, got "
                            f"{type(layers).__name__}; of a result of tune pass its .sparse")
    _check_path(path)
    lines = (f"  {json.dumps(name)}: {json.dumps(_held(sparse))}" for name, sparse in layers.items())
    target, text = Path(path), f'{{\n "format": {_FORMAT},\n "layers": {{\n' + ",\n".join(lines) + "\n }\n}\n"
    try:
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".sage_aot") as folder:
            made = Path(folder) / "tuned"
            made.write_text(text, "utf-8")
            os.replace(made, target)
    except OSError as error:
        raise ArgumentError(f"path: expected a file that can be written, got {target}: {error.strerror}") from error


def load_tuned(path: str | os.PathLike[str]) -> dict[str, Sparse]:
    """Read a file of :func:`save_tuned`: what the layers of a model are to run with, by the names of their modules.

    Raises:
        ArgumentError: the file cannot be read, is damaged, is none of these, or of another version.
    """
    _check_path(path)
    try:
        held = json.loads(Path(path).read_text("utf-8"))
    except OSError as error:
        raise ArgumentError(f"path: expected a file that can be read, got {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"path: expected a file of sage_aot.sparse.save_tuned, got {path}, which is no JSON: "
                            f"{error}; tune the model again") from error
    if not isinstance(held, dict) or held.keys() != {"format", "layers"} or not isinstance(held["layers"], dict):
        raise ArgumentError(f"path: expected a file of sage_aot.sparse.save_tuned, got {path}, which has no format and "
                            f"layers; tune the model again")
    if held["format"] != _FORMAT:
        raise ArgumentError(f"path: expected a file of format {_FORMAT}, got {path} of format {held['format']!r}; tune "
                            f"the model with this sage_aot")
    return {name: _sparse_of(f"{path}, layer {name!r}", layer) for name, layer in held["layers"].items()}


def _check_path(path: object) -> None:
    if not isinstance(path, (str, os.PathLike)):
        raise ArgumentError(f"path: expected the path of a file, got {path!r}")


def _held(sparse: Sparse) -> dict[str, Any]:
    """The fields that are not as they are by default; a Sparse of a file has the rest anyway."""
    return {field.name: value for field, value in zip(fields(sparse), asdict(sparse).values())
            if value != field.default}


def _sparse_of(where: str, held: Any) -> Sparse:
    if not isinstance(held, dict):
        raise ArgumentError(f"{where}: expected the fields of a sage_aot.Sparse, got {held!r}; tune the model again")
    if unknown := held.keys() - {field.name for field in fields(Sparse)}:
        raise ArgumentError(f"{where}: expected fields of sage_aot.Sparse, got {', '.join(sorted(unknown))}; tune the "
                            f"model again")
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in held.items()}
    try:
        return Sparse(**values)
    except ArgumentError as error:
        raise ArgumentError(f"{where}: {error}; tune the model again") from error
