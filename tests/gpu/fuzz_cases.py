"""Cases of the fuzzer: how they are drawn and made smaller, and the tensors that a case stands for.

A case is one line of JSON and everything else follows from it, its own seed included, so that any call can be made
again. What varies from case to case is a field of :class:`Case` with its values, how often each is drawn, and first of
them the simplest, to which a failing case is reduced. The options of the call are fields that follow from their table,
sage_aot/_problem/options.py: a new entry there is drawn, reduced, and refused where it is wrong, without a line here.
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, make_dataclass
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch.nn.attention.flex_attention import create_block_mask

import sage_aot
from sage_aot._kernels.axes import MAX_HEADDIM
from sage_aot._kernels.spec import MOST_TRAINED
from sage_aot._problem.options import OPTIONS, Options
from sage_aot._problem.problem import DTYPES, heads_first
from sage_aot._problem.sequences import Sequences
from sage_aot._tools import reference

TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


OPTION_WEIGHTS = {
    # Logits stay below 1e7, where f32 has units of one: what lies beyond is a matter of a score's last bits.
    "scale": (10, 1, 2, 1, 2, 1),
    "qk": (3, 2, 3, 2),
    "smooth_q": (2, 1, 2),
    "smooth_k": (3, 1),
    "smooth_v": (3, 2),
    "clip": (3, 1),
    "pv_accum": (8, 1, 3),
    "p": (3, 1, 1),
    "window": (24, 3, 1, 1, 2, 2, 2, 1),
}
"""Weights by which the samples of an option are drawn, where they are not drawn alike."""


def _varied(weights: dict[object, int], *, late: bool = False) -> object:
    """A field with these values, drawn with these weights. `late`: by :func:`draw_call`, after all others, so that
    :func:`draw_case` draws what it drew before there was the field."""
    return field(default=next(iter(weights)), metadata={"weights": weights, "late": late})


def _size() -> object:
    return field(default=1, metadata={"size": True})


@dataclass(frozen=True)
class _Sizes:
    arch: str  # whose kernels run
    seed: int = 0  # of the values, and of the place of a planted value
    batch: int = _size()
    kv_heads: int = _size()
    group: int = _size()  # query heads a kv head
    seqlen_q: int = _size()
    seqlen_kv: int = _size()
    headdim: int = _size()


def _weights(name: str) -> dict[object, int]:
    return dict(zip_longest(OPTIONS[name].samples, OPTION_WEIGHTS.get(name, ()), fillvalue=1))


_LATE_OPTIONS = ("window",)
_SizesAndOptions: Any = make_dataclass("_SizesAndOptions", [
    (name, object, _varied(_weights(name), late=name in _LATE_OPTIONS)) for name in OPTIONS], bases=(_Sizes,),
    frozen=True)


@dataclass(frozen=True)
class Case(_SizesAndOptions):
    """One call. Every field but the arch has the value of the simplest call as its default."""

    return_lse: bool = _varied({True: 1, False: 1})  # no P is linear with a log-sum-exp
    dtype: str = _varied({"bf16": 2, "f16": 2, "f32": 1})
    kind: str = _varied({"normal": 6, "outlier": 5, "constant": 1, "biased_v": 2, "zeros": 1, "huge": 2, "wide_v": 2,
                         "tiny": 1, "sink": 2, "falling": 1, "low": 1, "heavy_k": 2, "heavy_v": 1, "sparse_v": 1,
                         "vast_v": 1, "unequal": 1, "alike_v": 1,
                         "spike": 0, "stepped_v": 0, "vast_scores": 0})  # 0: for tests/sim
    planted: str = _varied({"none": 24, "q:nan": 1, "k:nan": 1, "v:nan": 1, "q:inf": 1, "k:inf": 1, "v:inf": 1})
    mask_kind: str = _varied({"none": 8, "random": 2, "left": 1, "right": 1, "few": 1, "one": 1, "nothing": 1,
                              "all": 1})
    lengths: str = _varied({"one": 9, "mixed": 2, "cut": 1})  # not one: of sequences, by attn_varlen
    strides: str = _varied({"contiguous": 4, "transposed": 2, "fused": 3, "misaligned": 2, "padded": 1,
                            "sliced": 2, "expanded_heads": 1, "expanded_batch": 1})
    out: str = _varied({"made": 2, "given": 1, "misaligned": 1})
    stream: str = _varied({"default": 3, "side": 1})
    stored: bool = _varied({False: 4, True: 1})  # also with k and v quantized before; not of sequences
    read_quantized: bool = _varied({False: 2, True: 1})  # compare the quantizers' outputs bit for bit
    splits: int | None = _varied({None: 5, 1: 1, 2: 1, 3: 1, 7: 1})  # of the keys; None: as the call has it
    wrong: str = _varied({"nothing": 300, "dimensions": 1, "dtype": 1, "keys": 1, "out": 1, "grad": 1, "key_mask": 1,
                          **dict.fromkeys(OPTIONS, 1)})  # an option: a value that it refuses
    entry: str = _varied({"attn": 8, "sdpa": 2, "train_attn": 2}, late=True)  # attn: attn_varlen too, by `lengths`
    scores: float | None = _varied({None: 16, **dict.fromkeys((1e-6, 1e-2, 1.0, 1e2, 1e3, 1e4, 1e6, 1e7, 1e8, 3e8, 1e9,
                                                               1e10), 1)}, late=True)  # the largest |score|
    values: str = _varied({"drawn": 10, "ones": 1, "largest": 0}, late=True)  # of v; largest: that its dtype holds
    one_key: bool = _varied({False: 20, True: 1}, late=True)  # one key in all, or by the key mask
    sinks: str = _varied({"none": 10, "drawn": 2, "high": 1, "low": 1, "strided": 1}, late=True)
    elements: str = _varied({"none": 14, "random": 1, "documents": 1, "heads": 1, "rows": 1, "keys": 1, "all": 1,
                             "turns": 1, "head keys": 1}, late=True)  # of an attn_mask
    blocks: str = _varied({"none": 14, "64": 1, "128": 1, "192": 1, "heads": 1, "all": 1, "nothing": 1, "flex": 1},
                          late=True)  # of a block_mask: the queries and keys of a block
    sparse: str = _varied({"none": 24, "keep": 1, "mass": 1, "tau": 1, "tail": 1}, late=True)  # what a Sparse goes by
    gradients: str = _varied({"together": 2, "apart": 1}, late=True)  # apart: a call for q's, one for k's and v's
    side_by_side: int | None = _varied({None: 2, 0: 1, 1: 1, 3: 1}, late=True)  # KV heads by turns where one kernel
    # finds all gradients, 0: two kernels find them; None: as the call has it

    @property
    def q_heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def trained(self) -> bool:
        """True where the call is train_attn's, with a backward pass."""
        return self.entry == "train_attn"

    @property
    def by_sdpa(self) -> bool:
        return self.entry == "sdpa"

    @property
    def constant(self) -> float:
        """Value of all of v, where v is not drawn."""
        return 1.0 if self.values == "ones" else torch.finfo(TORCH_DTYPES[self.dtype]).max

    @property
    def has_sequences(self) -> bool:
        return self.lengths != "one" and self.wrong == "nothing" and not self.is_empty

    @property
    def is_sparse(self) -> bool:
        """True where the call has a window, sinks, or masks that differ by query."""
        return self.window is not None or self.sinks != "none" or self.is_listed

    @property
    def is_listed(self) -> bool:
        return not self.has_sequences and (self.elements, self.blocks, self.sparse) != ("none",) * 3

    @property
    def is_empty(self) -> bool:
        """True where there are no queries, or no keys for them."""
        return 0 in (self.batch, self.kv_heads, self.group, self.seqlen_q, self.seqlen_kv)

    @property
    def options(self) -> Options:
        return Options(**{name: getattr(self, name) for name in OPTIONS})

    @property
    def arguments(self) -> dict[str, object]:
        """Keyword arguments of the call, less `key_mask` and `out`."""
        return {name: getattr(self, name) for name in (*OPTIONS, "return_lse")}

    def to_json(self) -> str:
        """The fields that differ from the simplest call, in one line."""
        plain = Case(self.arch)
        return json.dumps({name: value for name, value in dataclasses.asdict(self).items()
                           if name == "arch" or value != getattr(plain, name)})

    @classmethod
    def from_json(cls, text: str) -> Case:
        return cls(**fields_of_json(text))


def fields_of_json(text: str) -> dict[str, Any]:
    """Fields of a case by name. JSON has no tuples: its lists are windows."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in json.loads(text).items()}


WEIGHTS = {f.name: f.metadata["weights"] for f in dataclasses.fields(Case) if "weights" in f.metadata}
"""Per field that is drawn its values, the simplest first, and their weights."""

LATE = [f.name for f in dataclasses.fields(Case) if f.metadata.get("late")]
"""Fields that :func:`draw_call` alone draws."""

SIZES = [f.name for f in dataclasses.fields(Case) if "size" in f.metadata]


# --- drawing cases ----------------------------------------------------------------------------------------------------

EDGES = (1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257)
HEADDIMS = (1, 2, 7, 8, 16, 31, 32, 33, 40, 63, 65, 72, 80, 96, 100, 127, 129, 136, 160, 192, 200, 224, 255)
MOST_SCORES = 2**23
"""Scores of a case, over all heads; a single head may have more."""


def draw_case(seed: int, index: int, built: dict[str, dict[str, set]], longest: int) -> Case:
    """Case `index` of a run; the same whoever draws it. `built`: per arch that can be called, the values of options
    that it has kernels for."""
    rng = random.Random(f"{seed}/{index}")
    chosen = {name: _draw(rng, name) for name in WEIGHTS if name not in LATE}
    rng.random()  # in the place of a field that there was, so that seeds draw what they drew
    arch = rng.choice(sorted(built))
    for option, values in built[arch].items():
        if chosen[option] not in ("auto", *values) and rng.random() < 0.98:
            chosen[option] = "auto"  # that the kernel is missing need not be seen often
    seed, sizes = rng.randrange(2**31), _draw_sizes(rng, longest)
    if chosen["qk"] == "nvfp4" and rng.random() < 0.98:  # kernels of which have no other values
        chosen |= {"smooth_q": "auto", "pv_accum": "auto"}
        sizes["headdim"] = min(sizes["headdim"], 128)
    if chosen["p"] == "linear" and rng.random() < 0.98:
        if arch == "sm90":
            sizes["headdim"] = min(sizes["headdim"], 128)
        else:
            chosen |= {"qk": "auto", "smooth_q": "auto", "smooth_v": False}
        if arch == "sm120":
            chosen["pv_accum"] = "auto"
    return Case(arch, seed, **sizes, **chosen)


def _draw(rng: random.Random, name: str) -> object:
    weights = WEIGHTS[name]
    return rng.choices(list(weights), list(weights.values()))[0]


def draw_call(seed: int, index: int, built: dict[str, dict[str, set]], longest: int) -> Case:
    """Call `index` of a run: the case of :func:`draw_case` with everything that is drawn late."""
    rng = random.Random(f"{seed}/{index}/late")
    case = dataclasses.replace(draw_case(seed, index, built, longest), **{name: _draw(rng, name) for name in LATE})
    if case.sparse != "none" and not case.is_empty and rng.random() < 0.8:  # else most calls have one block or two
        case = dataclasses.replace(case, seqlen_kv=min(longest, max(case.seqlen_kv, rng.randint(350, 1000))))
    return complete(case)


def complete(case: Case) -> Case:
    """The case with what follows from its fields: one key where it has one, and what its entry point takes."""
    if case.trained and case.kind == "low":  # of keys that are all alike the gradient of q is nothing but rounding
        case = dataclasses.replace(case, entry="attn")
    if case.sparse != "none" and case.entry == "attn":
        case = as_choosing(case)
    if case.one_key and (case.has_sequences or case.trained or (case.entry, case.sparse) == ("attn", "tail")):
        case = dataclasses.replace(case, seqlen_kv=1)
    elif case.one_key:
        case = dataclasses.replace(case, mask_kind="one")
    if case.trained:
        return as_trained(case)
    if case.by_sdpa:
        return as_sdpa(case)
    if case.is_sparse and case.qk in ("int4", "nvfp4"):  # which have no such kernels
        case = dataclasses.replace(case, qk="auto")
    return case


def as_choosing(case: Case) -> Case:
    """Case with the same inputs in a call of attn that chooses its blocks. A call whose tail counts takes no other
    masks. No k is planted there: in its means a value that is not finite counts as the mean of a sample, which the
    oracle does not know."""
    case = dataclasses.replace(case, lengths="one", blocks="none")
    if case.sparse != "tail":
        return case
    return dataclasses.replace(case, mask_kind="none", elements="none", window=None,
                               planted="none" if case.planted.startswith("k") else case.planted)


def as_sdpa(case: Case) -> Case:
    """Case with the same inputs in a call of the integrations' sdpa, which has q, k and v, a mask, is_causal, scale and
    enable_gqa; all other options are the policy's. No rows at odd addresses with a mask under is_causal, which goes
    to torch: its kernels fault there (CUDA error: misaligned address), and the process loses its GPU."""
    faults = case.strides == "misaligned" and case.is_causal and case.mask_kind != "none"
    return dataclasses.replace(case, entry="sdpa", layout="HND", lengths="one", wrong="nothing", return_lse=False,
                               out="made", stored=False, strides="contiguous" if faults else case.strides, window=None,
                               sinks="none", elements="none", blocks="none", sparse="none")


def as_trained(case: Case) -> Case:
    """Case with the same inputs in a call of train_attn; other fields have the values of the simplest call."""
    sizes = {name: max(1, getattr(case, name)) for name in ("batch", "kv_heads", "group", "seqlen_q", "seqlen_kv")}
    others = {name: getattr(case, name) for name in ("arch", "seed", "is_causal", "scale", "layout", "kind", "planted",
                                                     "strides", "stream", "scores", "values", "one_key", "mask_kind",
                                                     "lengths", "gradients")}
    return Case(**sizes, **others, headdim=min(case.headdim, MOST_TRAINED), entry="train_attn",
                dtype=case.dtype if case.dtype != "f32" else "bf16")


def _draw_sizes(rng: random.Random, longest: int) -> dict[str, int]:
    seqlen_kv = _draw_length(rng, longest)
    seqlen_q = seqlen_kv if rng.random() < 0.4 else _draw_length(rng, longest)
    heads = {"batch": rng.choices((1, 2, 3, 0), (100, 60, 20, 1))[0], "kv_heads": rng.choices((1, 2, 3), (4, 3, 1))[0],
             "group": rng.choices((1, 2, 3, 8), (5, 2, 1, 1))[0]}
    for name in heads:
        if math.prod(heads.values()) * seqlen_q * seqlen_kv > MOST_SCORES:
            heads[name] = 1
    return {**heads, "seqlen_q": seqlen_q, "seqlen_kv": seqlen_kv, "headdim": _draw_headdim(rng)}


def _draw_length(rng: random.Random, longest: int) -> int:
    drawn = rng.choices((rng.choice(EDGES), rng.randint(1, 300), rng.randint(1, 1200), rng.randint(1200, 4500), 0),
                        (45, 38, 14, 1.5, 1.5))[0]
    return drawn if drawn <= longest else rng.randint(1, longest)


def _draw_headdim(rng: random.Random) -> int:
    return rng.choices((64, 128, 256, rng.choice(HEADDIMS), rng.randint(1, MAX_HEADDIM)), (22, 22, 18, 25, 13))[0]


# --- making a case smaller --------------------------------------------------------------------------------------------


def shrink(case: Case, fails: Callable[[Case], bool], tries: int = 500) -> Case:
    """A simplest case that still fails: none of its :func:`reductions` does, as far as `tries` calls can tell."""
    left = tries
    while True:
        for candidate in reductions(case):
            if left == 0:
                return case
            left -= 1
            if fails(candidate):
                case = candidate
                break
        else:
            return case


def reductions(case: Case) -> Iterator[Case]:
    """Cases that are simpler in one field, the largest steps first."""
    for name, weights in WEIGHTS.items():
        simplest = next(iter(weights))
        if getattr(case, name) != simplest:
            yield dataclasses.replace(case, **{name: simplest})
    for name in SIZES:
        for smaller in _smaller(getattr(case, name)):
            yield dataclasses.replace(case, **{name: smaller})


def _smaller(size: int) -> list[int]:
    """Sizes to try instead of one; by whole tiles too, for what fails at a remainder."""
    return [n for n in dict.fromkeys((1, size // 2, size - 128, size - 64, size - 1)) if 1 <= n < size]


# --- tensors ----------------------------------------------------------------------------------------------------------


def make_tensors(case: Case, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v of a case, in its layout and strides; of sequences [tokens, heads, headdim]."""
    generator = torch.Generator(device).manual_seed(case.seed)
    base = case.kind if case.kind in reference.INPUT_CLASSES else "normal"
    q_shape = (case.batch, case.q_heads, case.seqlen_q, case.headdim)
    kv_shape = (case.batch, case.kv_heads, case.seqlen_kv, case.headdim)
    tensors = reference.inputs(base, q_shape, kv_shape, TORCH_DTYPES[case.dtype], generator)
    if not case.is_empty:
        _CHANGES[case.kind](case, *tensors)
        if case.scores is not None:
            _scale_scores(case, *tensors)
        if case.values != "drawn":
            tensors[2].fill_(case.constant)
        _plant(case, dict(zip("qkv", tensors)))
    if not case.has_sequences:
        return _arrange(case, *tensors)
    lengths_q, lengths_k = lengths_of(case)
    in_a_row = (_one_after_another(x, lengths) for x, lengths in zip(tensors, (lengths_q, lengths_k, lengths_k)))
    return tuple(x[0] for x in _arrange(dataclasses.replace(case, layout="NHD"), *in_a_row))


def lengths_of(case: Case) -> tuple[list[int], list[int]]:
    """Lengths of queries and of keys, by sequence."""
    rng = random.Random(case.seed)
    q, k = ([longest, *(rng.choice((0, 1, longest, rng.randint(0, longest))) for _ in range(case.batch - 1))]
            for longest in (case.seqlen_q, case.seqlen_kv))
    rng.shuffle(q), rng.shuffle(k)
    return q, k


def make_sequences(case: Case, device: str) -> Sequences | None:
    """Sequences that attn_varlen takes in addition to the tensors."""
    if not case.has_sequences:
        return None
    made = Sequences.of_lengths(*lengths_of(case)).to(device)
    if case.lengths == "cut":
        made = made._replace(max_seqlen_q=max(1, case.seqlen_q * 3 // 4), max_seqlen_k=max(1, case.seqlen_kv * 3 // 4))
    return made


def _one_after_another(x: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """The first rows of each batch entry, [1, heads, tokens, headdim]."""
    return torch.cat([entry[:, :length] for entry, length in zip(x, lengths)], 1)[None]


def make_key_mask(case: Case, device: str) -> torch.Tensor | None:
    """The key mask of a case; in calls of sliced tensors it is sliced too, in those of an expanded batch expanded."""
    if case.mask_kind == "none" or case.has_sequences:
        return None
    generator = torch.Generator(device).manual_seed(case.seed)
    lengths = torch.randint(case.seqlen_kv + 1, (case.batch, 1), generator=generator, device=device)
    keys = torch.arange(case.seqlen_kv, device=device)
    masks = {
        "random": lambda: torch.rand(case.batch, case.seqlen_kv, generator=generator, device=device) < 0.6,
        "left": lambda: keys >= lengths,
        "right": lambda: keys < lengths,
        "few": lambda: keys % 113 == lengths % 113,
        "one": lambda: keys == lengths - 1,
        "nothing": lambda: (keys < lengths) & (torch.arange(case.batch, device=device) > 0)[:, None],
        "all": lambda: keys.expand(case.batch, -1) >= 0,
    }
    mask = masks[case.mask_kind]()
    if case.strides == "expanded_batch":
        return mask[:1].expand(case.batch, -1)
    return torch.stack([mask, ~mask], -1)[..., 0] if case.strides == "sliced" else mask


def make_sinks(case: Case, device: str) -> torch.Tensor | None:
    """The sinks of a case: like the scores of N(0, 1), above all of them, or below; strided: of the first kind."""
    if case.sinks == "none":
        return None
    sinks = 2.0 * torch.randn(case.q_heads, generator=torch.Generator(device).manual_seed(case.seed), device=device)
    sinks += {"high": 60.0, "low": -1e4}.get(case.sinks, 0.0)
    return torch.stack([sinks, torch.full_like(sinks, math.nan)], -1)[..., 0] if case.sinks == "strided" else sinks


class Masks(NamedTuple):
    """Masks that differ by query, and what they leave together: [1 or batch, 1 or q heads, queries, keys]."""

    attn_mask: torch.Tensor | None
    block_mask: Any  # a BlockMask
    seen: torch.Tensor


def make_masks(case: Case, device: str) -> Masks | None:
    """The masks of a case in addition to its key mask."""
    if not case.is_listed or case.is_empty:
        return None
    generator = torch.Generator(device).manual_seed(case.seed + 1)

    def drawn(*shape: int, share: float = 0.5) -> torch.Tensor:
        return torch.rand(*shape, generator=generator, device=device) < share

    queries, keys = case.seqlen_q, case.seqlen_kv
    i, j = torch.arange(queries, device=device)[:, None], torch.arange(keys, device=device)
    elements = {"none": lambda: None, "random": lambda: drawn(case.batch, 1, queries, keys),
                "documents": lambda: i // 90 == j // 90,
                "heads": lambda: drawn(1, case.q_heads, queries, keys, share=0.05),
                "rows": lambda: drawn(case.batch, 1, queries, 1), "keys": lambda: drawn(case.batch, 1, 1, keys),
                "head keys": lambda: drawn(case.batch, case.q_heads, 1, keys),
                "all": lambda: torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device),
                # A row sees 50 keys, none of a dozen KV tiles, and 50 more; its neighbours see other keys.
                "turns": lambda: (i - j // 50) % 32 == 0}[case.elements]()
    seen = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device) if elements is None else elements
    size = int(case.blocks) if case.blocks.isdecimal() else 128
    rows, columns = -(-queries // size), -(-keys // size)
    grid = {"heads": lambda: drawn(case.batch, case.q_heads, rows, columns),
            "all": lambda: drawn(rows, columns, share=2.0),
            "nothing": lambda: drawn(1, 1, rows, columns, share=-1.0)}.get(case.blocks,
                                                                          lambda: drawn(1, 1, rows, columns))
    blocks = None
    if case.blocks == "flex":
        blocks = sage_aot.block_mask(create_block_mask(_near_or_first, None, None, queries, keys, device=device))
        seen = seen & ((i - j).abs() <= 70) | seen & (j < 5)
    elif case.blocks != "none":
        of_blocks = grid()
        blocks = sage_aot.block_mask(of_blocks, size)
        seen = seen & of_blocks.repeat_interleave(size, -2).repeat_interleave(size, -1)[..., :queries, :keys]
    return Masks(elements, blocks, seen[(None,) * (4 - seen.dim())])


def make_sparse(case: Case) -> sage_aot.Sparse | None:
    """The choice of blocks of a case; everything that it does not name follows from its seed."""
    if case.sparse == "none" or case.has_sequences:
        return None
    rng = random.Random(case.seed)
    by = rng.choice(("keep", "mass", "tau")) if case.sparse == "tail" else case.sparse

    def amount() -> float:
        return rng.uniform(-1.0, 2.0) if by == "tau" else rng.choice((*(rng.uniform(0.01, 0.9) for _ in range(7)), 1.0))

    per_head = rng.random() < 0.3 and case.q_heads > 0
    amounts = tuple(amount() for _ in range(case.q_heads)) if per_head else amount()
    return sage_aot.Sparse(**{by: amounts}, tail=case.sparse == "tail",
                           block_size=rng.choice((64, 64, 64, (128, 64), (192, 64), 128, (64, 320))),
                           first=rng.choice((0, 0, 1, 2)), near=rng.choice((1, 1, 2) if case.sparse == "tail" else
                                                                           (0, 0, 1, 2)),
                           least_alike=rng.choice((*[0.0] * 7, 0.25)), dense_keys=rng.choice((*[0] * 6, 1, (0, 70))),
                           dense_queries=rng.choice((*[0] * 6, 1, (0, 65))))


def _near_or_first(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return ((query - key).abs() <= 70) | (key < 5)


LARGEST_ELEMENT = {"f16": 6e4, "bf16": 1e15, "f32": 1e15}
"""Largest elements of q and k whose scores are scaled: f16 holds no more, and products of f32 must stay finite."""


def _scale_scores(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Multiply q and k alike, so that the largest |score| of any query and key is that of the case; less where f16 has
    no such values, or the scale is zero."""
    scale = case.headdim**-0.5 if case.scale is None else abs(case.scale)
    of = torch.arange(q.shape[1], device=q.device) // case.group
    largest = max((head.double() @ keys.double().mT).abs().max().item()
                  for head, keys in zip(q.transpose(0, 1), k[:, of].transpose(0, 1))) * scale
    if largest == 0.0:
        return
    factor = math.sqrt(case.scores / largest)
    for x in (q, k):
        x.mul_(min(factor, LARGEST_ELEMENT[case.dtype] / max(x.abs().max().item(), 1e-30)))


def _unchanged(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    pass


def _constant(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    q[..., 0], k[..., 0], v[..., -1] = 2.0, -5.0, 3.0


def _biased_v(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Values of one sign, in one KV tile of 64 keys many times larger: with as many tiles as there are strata in a
    sample, sums of that tile are as large as they can be without a factor."""
    v.abs_().mul_(0.02).add_(0.5)
    v[:, :, 128:192] *= 16.0


def _zeros(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    q[:, 0], k[:, -1], v[..., 0] = 0.0, 0.0, 0.0
    q[:, :, -1], k[:, :, 0] = 0.0, 0.0


def _huge(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    q *= 40.0
    k *= 40.0
    v *= 1000.0


def _wide_v(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Channels of very different sizes, in bf16 and f32 beyond what f16 holds."""
    large, small = (5e3, 1e-3) if case.dtype == "f16" else (1e25, 1e-20)
    v[..., ::2] *= large
    v[..., 1::4] *= small


def _tiny(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    for tensor in (q, k, v):
        tensor *= 1e-6 if case.dtype == "f16" else 1e-20


def _spike(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """One channel that leaves few steps of 4 bits to the others: large scales, and scores that differ by little."""
    q[..., 0] = 30.0
    k[..., ::2, 0], k[..., 1::2, 0] = 30.0, -30.0


def _sink(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """One key has nearly all of a row's weight, and a small value: the first, or for every other eight rows behind the
    first 32 one in the third tile of 64 keys. There references rise; where they do not fall again, e4m3 loses all other
    keys. In a warp of the first rows none rises then."""
    sinks, height = [min(150, k.shape[2] - 1), 0], 13.0 * case.headdim**0.5 / 8
    row = torch.arange(q.shape[2], device=q.device)
    first = torch.where(row < 32, 1, row // 8 % 2)
    q[..., 0], k[..., 0] = 8.0 * (2 * first - 1), 0.0
    k[:, :, sinks, 0] = torch.tensor([-height, height], device=k.device, dtype=k.dtype)
    v += 1.0
    v[:, :, sinks] *= 0.002


def _falling(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Scores that fall from key to key: by some 2^-37 a tile of 64 keys, in all further than references may follow."""
    q[..., 0] = 8.0
    k[..., 0] = torch.arange(k.shape[2], 0, -1, device=k.device) * (0.05 * case.headdim**0.5)


def _low(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Scores of some 2^-60 behind keys of nearly no size, whose own are near one."""
    q[:] = 3.0
    k[:, :, :128] *= 1e-4
    k[:, :, 128:] = -60.0 / (3.0 * math.log2(math.e) * case.headdim**0.5)


def _heavy_k(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Channels of K far larger than most, by the head up to further than they may be divided; channels that an offset
    alone makes large; a third of all somewhat larger. The last query head of each group has some of the channels, too,
    in its first or its last queries."""
    q *= 0.25
    rows = q.shape[2] // 3
    for head in range(k.shape[1]):
        k[:, head, :, head::23] *= 6.0 * 8.0 ** (head % 4)
        last = (head + 1) * case.group - 1
        q[:, last, :rows, head + 23:head + 24] *= 5.0
        q[:, last, 2 * rows:, head + 46:head + 47] *= 5.0
    k[..., 7::31] += 40.0
    k[..., 2 * k.shape[-1] // 3:] *= 4.0


def _heavy_v(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """KV tiles that need factors of their own: one value far larger than all others, and tiles of far smaller ones."""
    v[:, :, v.shape[2] // 2] *= 3000.0
    v[:, :, 3 * v.shape[2] // 4:] *= 2.0**-12


def _vast_v(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """One key of the first head has values at the ends of their dtype's range, in every third channel. Not in training:
    sums of dO times such a V are beyond f32."""
    if case.trained:
        return
    key = 2 * v.shape[2] // 3
    v[:, 0, key, ::3] = torch.finfo(v.dtype).max
    v[:, 0, key, ::6] *= -1.0


def _unequal(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Large q and small k, or the other way round: ordinary scores."""
    factor = (1e3 if case.dtype == "f16" else 1e20) ** (1 if case.seed % 2 else -1)
    q.mul_(factor)
    k.mul_(1.0 / factor)


def _vast_scores(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Scores beyond 2^100 between the last q head of each group and the last key, and none others."""
    q *= 1e8
    q[:, case.group - 1::case.group] *= 1e16
    k[:, :, -1] *= 1e18


def _sparse_v(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Channels of zeros but for few keys, which a sample may miss."""
    v[..., ::2] *= (torch.arange(v.shape[2], device=v.device) % 37 == 5)[:, None]


def _alike_v(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Keys with the values of one, as padding has, but for the first two, which a sample may miss."""
    v[:, :, 2:] = v[:, :, 2:3]


def _stepped_v(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """The third and the fourth KV tile of 128 keys need another factor than those around them."""
    v[:, :, 256:512] *= 2.0**-12


_CHANGES = {"normal": _unchanged, "outlier": _unchanged, "constant": _constant, "biased_v": _biased_v, "zeros": _zeros,
            "huge": _huge, "wide_v": _wide_v, "tiny": _tiny, "spike": _spike,
            "sink": _sink, "falling": _falling, "low": _low, "heavy_k": _heavy_k, "heavy_v": _heavy_v,
            "sparse_v": _sparse_v, "vast_v": _vast_v, "unequal": _unequal, "alike_v": _alike_v,
            "stepped_v": _stepped_v, "vast_scores": _vast_scores}


def _plant(case: Case, tensors: dict[str, torch.Tensor]) -> None:
    """One value that is not finite, somewhere. In V the key before has a minus zero, which is how V̂ marks such values.
    """
    if case.planted == "none":
        return
    name, value = case.planted.split(":")
    rng = random.Random(case.seed)
    batch, head, row, channel = (rng.randrange(size) for size in tensors[name].shape)
    tensors[name][batch, head, row, channel] = float(value)
    if name == "v" and row > 0:
        tensors[name][batch, head, row - 1, channel] = -0.0


def _arrange(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    if case.strides == "expanded_heads":
        k, v = (t[:, :1].expand(t.shape) for t in (k, v))
    elif case.strides == "expanded_batch":
        k, v = (t[:1].expand(t.shape) for t in (k, v))
    elif case.strides == "fused":
        return _fused([heads_first(t, case.layout) for t in (q, k, v)])
    else:
        return tuple(_STRIDES[case.strides](heads_first(t, case.layout)) for t in (q, k, v))
    return heads_first(q, case.layout).contiguous(), *(heads_first(t, case.layout) for t in (k, v))


def _fused(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Parts of one projection: all three where they have one shape, else k and v."""
    q, k, v = tensors
    if q.shape == k.shape:
        return torch.stack([q, k, v], 2).unbind(2)
    return q.contiguous(), *torch.stack([k, v], 2).unbind(2)


def misaligned(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor into rows at odd addresses, with NaN around them."""
    return torch.nn.functional.pad(tensor, (1, 2), value=math.nan)[..., 1:-2]


def _padded(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor into rows of whole vectors, filled up with NaN."""
    return torch.nn.functional.pad(tensor, (0, 8 - tensor.shape[-1] % 8), value=math.nan)[..., : tensor.shape[-1]]


def _sliced(tensor: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(tensor, (8, 8, 3, 2), value=math.nan)[..., 3:-2, 8:-8]


_STRIDES = {
    "contiguous": torch.Tensor.contiguous,
    "transposed": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),  # the memory of the other layout
    "misaligned": misaligned,
    "padded": _padded,
    "sliced": _sliced,
}


# --- bad arguments ----------------------------------------------------------------------------------------------------


def spoil(case: Case, call: dict[str, Any]) -> dict[str, Any]:
    """The call with the bad argument that the case names."""
    q, k, v = call["q"], call["k"], call["v"]
    if case.wrong in OPTIONS:
        return {**call, case.wrong: OPTIONS[case.wrong].refused}
    changes = {
        "dimensions": lambda: {"q": q.unsqueeze(0)},
        "dtype": lambda: {"k": k.double()},
        "keys": lambda: {"v": torch.nn.functional.pad(v, (0, 0, 0, 1))},
        "out": lambda: {"out": torch.empty_like(q, dtype=torch.float64)},
        "grad": lambda: {"q": q.detach().requires_grad_()},
        "key_mask": lambda: {"key_mask": torch.ones(case.batch, case.seqlen_kv, device=q.device)},
    }
    return {**call, **changes[case.wrong]()}
