"""Calls that every variant is simulated with."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import simulator
from fuzz_cases import Case
from fuzz_checks import Verdict
from outcomes import Outcomes
from simbuild import PROJECT, Build, matrix
from simulated import Simulated

from codegen.matrix import PlannedKernel
from codegen.render import Renderer
from sage_aot._kernels.spec import AttnSpec, is_ptx
from sage_aot._problem.options import Options

SEEDS = (1, 2)
"""Seeds of the order of threads and blocks."""

_MATRIX = matrix()

KERNELS = {kernel.spec: kernel for kernel in _MATRIX.kernels if isinstance(kernel.spec, AttnSpec)}

SPECS = tuple(sorted(KERNELS, key=lambda spec: (list(_MATRIX.archs).index(spec.arch), spec.name)))
"""Every attention kernel of the matrix, in the order of archs."""

_INDEX = {spec: index for index, spec in enumerate(sorted(SPECS, key=lambda spec: (
    spec.mask == "sparse", spec.p == "linear", spec.p == "linear" and spec.arch != "sm90", spec.headdim == 256)))}
"""Index that selects a kernel's extreme case. Head dim 256 comes late: an arch has a power of two of variants of head
dims 64 and 128, and of 256. Kernels of a linear P come later, sm90's first; last those of sparse masks, which have no
such case."""


_NAMED = {spec.name: spec for spec in SPECS}


def variant(name: str) -> AttnSpec:
    """The attention kernel `sage_attn_NAME`."""
    return _NAMED[f"sage_attn_{name}"]


def source_of(spec: AttnSpec) -> str:
    """Source that is compiled for a kernel, whatever its arch: without comments and without the kernel's own name."""
    return _source_of(KERNELS[spec])


@functools.cache
def _source_of(kernel: PlannedKernel) -> str:
    text = _RENDERER.render(kernel).replace(kernel.spec.name, "")
    return "\n".join(line for line in text.splitlines() if not line.startswith("//"))


_RENDERER = Renderer(PROJECT.templates)


def may_be_simulated(spec: AttnSpec) -> bool:
    """False for a kernel of sparse masks that smooths one of Q and V alone: it has no code that others lack."""
    return spec.mask != "sparse" or spec.v.removeprefix("v") == spec.q.removeprefix("q")


def _simulated() -> tuple[AttnSpec, ...]:
    """Specs to simulate: of kernels with one source the first; of sparse masks those that smooth everything or nothing.
    Chips that add no source have their own accumulators all the same: of them those that smooth everything under a
    causal mask. PTX is for no chip of its own."""
    found = {spec for spec in {source_of(spec): spec for spec in reversed(SPECS)}.values() if may_be_simulated(spec)}
    archs = {spec.arch for spec in found}
    found |= {spec for spec in SPECS if spec.arch not in archs and not is_ptx(spec.arch)
              and (spec.mask, spec.v, spec.q) == ("causal", "vsmooth", "qsmooth")}
    return tuple(spec for spec in SPECS if spec in found)


SIMULATED = _simulated()
"""The kernels that are simulated: every source, and some of every chip."""


def quantization_of(spec: AttnSpec) -> Hashable:
    """Facts that decide how a kernel's calls quantize: the quantizer's source, but for a wait in front of everything,
    and the means that it subtracts."""
    quantizer, = (kernel for kernel in _MATRIX.kernels
                  if kernel.spec.kind == "quant" and kernel.spec.name in KERNELS[spec].companions)
    return _source_of(quantizer).replace("kProgrammatic = true", "kProgrammatic = false"), spec.v, spec.q


def epilogue_of(spec: AttnSpec) -> Hashable:
    """Facts that decide how a kernel finishes and stores its rows: the parameters of attn/epilogue.cuh."""
    tile = KERNELS[spec].tile
    return KERNELS[spec].family, spec.headdim, tile.block_m, tile.warp_m, spec.mask, spec.v


def settings_of(spec: AttnSpec) -> Hashable:
    """Facts that decide which masks and values these cases have (MASKED, FLOATS), in each family."""
    return KERNELS[spec].family, spec.mask, spec.v, spec.q


def softmax_of(spec: AttnSpec) -> Hashable:
    """Facts that decide how a kernel's references move, and what its P and sums of P are."""
    return KERNELS[spec].family, spec.qk, spec.pv, spec.pv_accum, spec.p, spec.q, spec.headdim == 256


def _first_of_each(*parts: Callable[[AttnSpec], Hashable]) -> frozenset[AttnSpec]:
    found: dict[Hashable, AttnSpec] = {}
    for spec in sorted(SIMULATED, key=lambda spec: (spec.qk != "int8", spec.mask != "full")):
        for part in parts:
            found.setdefault((part, part(spec)), spec)
    return frozenset(found.values())


FIRST_OF_EACH = _first_of_each(quantization_of, epilogue_of, settings_of)
"""The first kernel with each quantization, with each epilogue and with each of the settings; INT8 and full ones come
first."""

FIRST_OF_EACH_SOFTMAX = _first_of_each(softmax_of)

OF_QUANTIZATION_AND_EPILOGUE = {"odd", "floats", "masked", "vast", "heavy", "heavy, few keys", "alike"}
"""Cases that tell how rows are read and stored, and little of what comes between: FIRST_OF_EACH alone has them."""


OF_EXPONENTIALS = {"floats", "narrow"}
"""Cases that tell of a kernel with a linear P no more than of the one with exponentials."""

OF_SPARSE_MASKS = {"plain", "masked", "sequences", "split", "falling", "sinks", "whole", "blocks", "elements", "spoilt",
                   "turns", "head keys", "far"}
"""The cases of a kernel with a sparse mask: what other cases tell, they tell of the same kernel with another mask."""

EXTREMES = (
    {"kind": "huge"},  # references rise by far from tile to tile
    {"kind": "biased_v", "scale": 0.0, "seqlen_kv": 14 * 64},  # sums of a tile as large as they can be
    {"kind": "spike"},  # scales of 4 bits are too large to fold
    {"kind": "tiny", "scale": 1e-6},  # products of scales underflow
    {"kind": "wide_v", "seqlen_kv": 40},  # fewer keys than a sample has
    {"kind": "zeros"},
    {"planted": "q:nan", "seed": 22},  # where causal, in a row that sees no key
    {"planted": "k:inf", "kv_heads": 2, "seed": 5},  # in one head's last tile; the other must hear nothing
    {"planted": "v:nan", "seed": 25},  # in a key that is not the first that a thread quantizes
)
"""Values at the ends of their ranges, one a variant, alternately: an odd number of them, so that each meets every value
of the axes."""


MASKED: dict[tuple[str, str, str], dict[str, Any]] = {
    ("full", "vraw", "qraw"): {"mask_kind": "few", "seqlen_kv": 5000, "batch": 2, "strides": "sliced"},  # two rounds
    ("full", "vraw", "qsmooth"): {"mask_kind": "one", "group": 2},
    ("full", "vsmooth", "qraw"): {"mask_kind": "random", "group": 2, "layout": "NHD", "strides": "misaligned"},
    ("full", "vsmooth", "qsmooth"): {"mask_kind": "random", "planted": "v:inf"},
    ("causal", "vraw", "qraw"): {"mask_kind": "nothing"},
    ("causal", "vraw", "qsmooth"): {"mask_kind": "right", "planted": "k:nan"},
    ("causal", "vsmooth", "qraw"): {"mask_kind": "left", "group": 2},
    ("causal", "vsmooth", "qsmooth"): {"mask_kind": "right", "layout": "NHD", "strides": "misaligned"},
    ("sparse", "vraw", "qraw"): {"mask_kind": "random", "group": 2, "planted": "k:nan"},
    ("sparse", "vsmooth", "qsmooth"): {"mask_kind": "left"},
}
"""Fields of the case with a key mask, by the kernel's mask, V and Q."""


SEQUENCES: dict[tuple[str, str], dict[str, Any]] = {
    ("full", "vraw"): {"seed": 1, "kv_heads": 2},  # the first sequence is empty, the last has queries and no keys
    ("full", "vsmooth"): {"seed": 39, "strides": "misaligned", "out": "misaligned", "lengths": "cut"},
    ("causal", "vraw"): {"seed": 11, "group": 2, "planted": "v:inf"},
    ("causal", "vsmooth"): {"seed": 14, "strides": "fused", "planted": "k:nan"},
    ("sparse", "vraw"): {"seed": 11, "sinks": "strided"},
    ("sparse", "vsmooth"): {"seed": 14, "planted": "v:inf"},
}
"""Fields of the case with sequences, by the kernel's mask and V."""


FLOATS: dict[tuple[str, str], tuple[int, dict[str, Any]]] = {
    ("full", "vraw"): (0, {}),
    ("full", "vsmooth"): (0, {"strides": "misaligned", "out": "misaligned", "planted": "k:nan"}),
    ("causal", "vraw"): (12, {"smooth_k": False, "planted": "v:inf"}),
    ("causal", "vsmooth"): (3, {"strides": "padded", "planted": "q:nan"}),
    ("sparse", "vraw"): (0, {}),
    ("sparse", "vsmooth"): (0, {}),
}
"""Channels by which the case of f32 is narrower than the kernel, and its fields, by the kernel's mask and V."""


SPLITS: dict[tuple[str, str, str], dict[str, Any]] = {
    ("full", "vraw", "qraw"): {"splits": 2, "lengths": "mixed", "seed": 1, "batch": 4, "kv_heads": 2},
    ("full", "vraw", "qsmooth"): {"splits": 2, "mask_kind": "random", "group": 2},
    ("full", "vsmooth", "qraw"): {"splits": 34, "layout": "NHD", "out": "misaligned"},  # more than the lanes of a warp
    ("full", "vsmooth", "qsmooth"): {"splits": 2, "batch": 2, "dtype": "f32", "strides": "misaligned",
                                     "planted": "v:inf"},
    ("causal", "vraw", "qraw"): {"splits": 3, "group": 2, "planted": "k:nan", "return_lse": True},
    ("causal", "vraw", "qsmooth"): {"splits": 3, "mask_kind": "right"},
    ("causal", "vsmooth", "qraw"): {"splits": 2, "planted": "q:nan", "kv_heads": 2, "strides": "misaligned"},
    ("causal", "vsmooth", "qsmooth"): {"splits": 3, "lengths": "mixed", "seed": 14, "batch": 4},
    ("sparse", "vraw", "qraw"): {"splits": 3, "window": (300, 20), "sinks": "drawn"},
    ("sparse", "vsmooth", "qsmooth"): {"splits": 2, "window": (-1, 30), "sinks": "drawn"},
}
"""Fields of the case whose keys are split, by the kernel's mask, V and Q."""


TRAINED: dict[str, dict[str, Any]] = {
    "full": {"kv_heads": 2, "group": 1, "layout": "NHD", "strides": "misaligned", "scale": -0.1},
    "causal": {"group": 2, "strides": "fused"},  # rows that see no key, one of them with an infinite dO
}
"""Fields of the second trained case, by the kernel's mask."""


TRAINED_PACKED: dict[str, dict[str, dict[str, Any]]] = {
    "full": {"trained masked": {"mask_kind": "random", "seed": 6, "strides": "sliced"},
             "trained sequences": {"seed": 1, "kv_heads": 2, "group": 1, "strides": "misaligned"}},
    "causal": {"trained masked": {"mask_kind": "random", "seed": 6, "layout": "NHD", "planted": "v:nan"},
               "trained sequences": {"seed": 11, "lengths": "cut", "strides": "fused"}},
}
"""Fields of the trained cases of packed keys, and of packed sequences, by the kernel's mask."""


def cases_of(spec: AttnSpec) -> dict[str, Case]:
    """The calls that a kernel makes: all, or all but OF_QUANTIZATION_AND_EPILOGUE where others of FIRST_OF_EACH make
    those."""
    left_out = set() if spec in FIRST_OF_EACH else OF_QUANTIZATION_AND_EPILOGUE
    if spec.p == "linear":
        left_out = left_out | OF_EXPONENTIALS
    found = {name: case for name, case in _every_case(spec).items() if name not in left_out}
    if spec.mask == "sparse":
        found = {name: case for name, case in found.items() if name in OF_SPARSE_MASKS}
    return found


def _every_case(spec: AttnSpec) -> dict[str, Case]:
    """Ragged calls, of bf16 and of f16 alternately.

    plain: grouped heads, contiguous, several KV tiles.
    odd: as unlike as can be. Several heads and batches, K not smoothed, rows of no whole vectors, of which some see
        nothing where causal, read at odd addresses and stored at odd and even ones, rotated where that is not the
        default, never clipped.
    extreme: one query head a KV head, whole rows stored at odd addresses, extreme values; where causal on Hopper query
        tiles that see no key at all, one of them after another tile.
    factors: KV tiles with factors of their own, a negative softmax scale; whole rows rotated at 8 bits too, or where
        causal K not smoothed.
    vast: a key whose values end a dtype's range.
    alike, where V is smoothed: f32 values of one key in all others but two, which the sample misses.
    masked: a key mask, MASKED; where V is smoothed and Q is not, also with K and V quantized before.
    sequences: of several lengths in one tensor, SEQUENCES; with the log-sum-exp where P is linear, too.
    floats: f32, also with K and V quantized before, FLOATS.
    split: keys that several blocks share, some with a key mask or in sequences, SPLITS.
    trained, where the kernel is: the gradients of grouped heads, of several tiles.
    trained oddly: values that are not finite, and rows of no whole vectors, which are copied, or of fewer vectors than
        the kernel's, read where they lie, TRAINED.
    trained masked, trained sequences: packed keys and sequences, several tiles of each, TRAINED_PACKED; trained on no
        keys: one batch entry has a mask that hides all.
    trained unequal, of head dim 64 and a full mask: large q and small k; trained vast, also of sequences: scores beyond
        2^100 of some queries and keys, whole KV tiles.
    falling, for P of few bits: scores behind which references fall, once by far or from tile to tile.
    sinks, whole, blocks, elements, spoilt, turns, of sparse masks: _masks_of_queries().
    large, trained large, of the first kernel with each softmax: scores beyond all bits of a reference's fraction.

    On Hopper also
    trained cases, apart: the gradient of q by itself, and those of k and v; else the kernels that find all of them run.
    Of the first, more KV tiles than bwdq has stages, and more tiles of queries than bwdkv has.
    narrow: rows of whole vectors, but of fewer channels than the kernel's.
    even: queries that see whole KV tiles, an even number of them.
    heads, where Q is smoothed: heads of more query tiles than there are blocks, in launches of their own.
    heavy, at 8 bits: some channels of K far larger than most; also with K and V quantized before.
    pairs, where all keys are seen: two pairs of KV tiles, each with one factor.
    far, where P is linear: scores that an f32 does not hold as bits of a linear P, the less so in later tiles.
    """
    tile, on_hopper = KERNELS[spec].tile, KERNELS[spec].family == "wgmma"
    dtype = "f16" if (spec.mask, spec.v) == ("full", "vsmooth") else "bf16"
    plain = Case(spec.arch, seed=1, dtype=dtype, group=2, seqlen_q=150, seqlen_kv=_plain_keys(spec),
                 headdim=spec.headdim, read_quantized=True, return_lse=spec.p != "linear",
                 **vars(Options.of_axes(spec.values)))
    odd = replace(plain, seed=2, dtype="bf16" if spec.q == "qsmooth" else "f16", batch=2, kv_heads=2, seqlen_q=100,
                  group=1 if spec.headdim == 256 else 2,  # half of the time
                  seqlen_kv=70, headdim=spec.headdim - 3, layout="NHD", kind="outlier", strides="misaligned",
                  out="given", smooth_k=False, rotate=spec.qk == "int8", clip=False)
    blind_rows = tile.block_m if on_hopper and spec.mask == "causal" else 0
    values = {"seqlen_kv": 90, **EXTREMES[_INDEX[spec] % len(EXTREMES)]}
    if blind_rows:
        values["seqlen_kv"] = 90
    if values.get("planted") == "v:nan" and spec.pv == "e4m3":
        values["planted"] = "v:inf"
    extreme = replace(plain, batch=2 if blind_rows else 1, group=1, seqlen_q=blind_rows + 100, out="misaligned",
                      **values)
    found = {"plain": plain, "odd": odd, "extreme": extreme}
    few = replace(plain, group=1, seqlen_q=70)
    found["factors"] = replace(few, scale=-0.1, **({"rotate": True} if spec.mask == "full" else {"smooth_k": False}),
                               seqlen_kv=3 * tile.block_n + 42, kind="heavy_v" if spec.v == "vraw" else "sparse_v")
    found["vast"] = replace(few, dtype="bf16", seqlen_kv=3 * tile.block_n + 42, kind="vast_v")
    if spec.v == "vsmooth":
        found["alike"] = replace(few, dtype="f32", kind="alike_v", seqlen_kv=256)
    if spec.qk == "int8":
        found["heavy"] = replace(plain, kind="heavy_k", group=2, kv_heads=4, stored=True,
                                 seqlen_kv=tile.block_n + 42, headdim=spec.headdim - 8)
        found["heavy, few keys"] = replace(found["heavy"], seqlen_q=40, seqlen_kv=15, stored=False)
    found["masked"] = replace(plain, **{"seed": 6, "batch": 3, "group": 1,
                                        "seqlen_q": 40 if spec.mask == "full" else tile.block_m + 20,
                                        "seqlen_kv": 2 * tile.block_n + 100,
                                        "stored": (spec.v, spec.q) == ("vsmooth", "qraw"),
                                        **MASKED[spec.mask, spec.v, spec.q]})
    found["sequences"] = replace(plain, return_lse=True, **{"batch": 4, "group": 1, "seqlen_q": tile.block_m + 20,
                                           "seqlen_kv": 2 * tile.block_n + 50, "lengths": "mixed",
                                           **SEQUENCES[spec.mask, spec.v]})
    fewer_channels, others = FLOATS[spec.mask, spec.v]
    found["floats"] = replace(few, **{"seed": 3, "dtype": "f32", "seqlen_q": 41, "seqlen_kv": 70,
                                      "headdim": spec.headdim - fewer_channels, "stored": True, **others})
    splits = SPLITS[spec.mask, spec.v, spec.q]
    found["split"] = replace(plain, **{"seed": 8, "group": 1,
                                       "seqlen_kv": max(4, splits["splits"] - 1) * tile.block_n + 42,
                                       "headdim": spec.headdim - (3 if spec.v == "vsmooth" else 0),
                                       "seqlen_q": 40 if spec.mask == "full" else tile.block_m + 20,
                                       **splits})
    if spec.trains and spec.pv_accum != "two_level_f16":
        found["trained"] = replace(plain, group=2, seqlen_kv=170, read_quantized=False, entry="train_attn")
        found["trained oddly"] = replace(plain, read_quantized=False, entry="train_attn", **{
            "seed": 9, "dtype": "f16", "batch": 2, "seqlen_q": 100, "seqlen_kv": 70, "planted": "v:inf",
            "headdim": spec.headdim - (24 if spec.mask == "causal" else 3), **TRAINED[spec.mask]})
        packed = replace(found["trained"], batch=2, seqlen_q=100, seqlen_kv=230)
        packed = {"trained masked": packed, "trained sequences": replace(packed, batch=4, lengths="mixed")}
        found |= {name: replace(packed[name], **others) for name, others in TRAINED_PACKED[spec.mask].items()}
        if spec.headdim == 64 and spec.mask == "full":
            found["trained on no keys"] = replace(found["trained masked"], mask_kind="nothing", seqlen_q=40)
            vast = replace(found["trained"], seqlen_q=70, seqlen_kv=256, dtype="bf16", kind="vast_scores")
            found["trained vast"] = vast
            found["trained vast sequences"] = replace(vast, batch=4, lengths="mixed")
            found["trained unequal"] = replace(vast, group=1, seqlen_kv=70, kind="unequal")
            # Of one channel, in which two keys alone are no zeros.
            found["trained on zeros"] = replace(found["trained"], seed=5, group=1, seqlen_q=70, seqlen_kv=142,
                                                headdim=1, kind="sink", scale=0.001)
    if spec.pv != "f16":
        # Tiles of 128 keys fall alike then.
        scale = 0.5 * spec.headdim**-0.5 if spec.pv == "nvfp4" and tile.block_n == 128 else None
        found["falling"] = replace(few, seqlen_kv=5 * tile.block_n + 42,
                                   **{"kind": "falling", "scale": scale} if spec.v == "vsmooth" else {"kind": "sink"})
    if spec in FIRST_OF_EACH_SOFTMAX:
        found["large"] = replace(few, seqlen_q=40, seqlen_kv=2 * tile.block_n + 20, scores=1e10)
        if "trained" in found:
            found["trained large"] = replace(found["trained"], group=1, seqlen_q=70, seqlen_kv=70, scores=1e8)
    if spec.mask == "sparse":
        found |= _masks_of_queries(spec, plain)
    if spec.p == "linear":
        found["far"] = replace(few, seqlen_kv=3 * tile.block_n, scale=14 * spec.headdim**-0.5)
    if not on_hopper:
        return found
    found |= {f"{name}, apart": replace(case, gradients="apart") for name, case in found.items() if case.trained}
    if "trained" in found:
        found["trained, apart"] = replace(found["trained, apart"], seqlen_q=270, seqlen_kv=340)
    found["narrow"] = replace(plain, seqlen_q=70, seqlen_kv=130, headdim=spec.headdim - 24)
    found["even"] = replace(plain, seqlen_q=1 if spec.mask == "causal" else 70, seqlen_kv=2 * tile.block_n)
    if spec.q == "qsmooth":
        found["heads"] = replace(plain, seqlen_q=4 * tile.block_m + 6, seqlen_kv=40)
    if spec.mask == "full":
        found["pairs"] = replace(few, seqlen_kv=5 * tile.block_n + 42, kind="stepped_v")
    return found


def _masks_of_queries(spec: AttnSpec, plain: Case) -> dict[str, Case]:
    """sinks: under a causal mask, without a window; queries that see no key.
    whole: two KV tiles, of which every row sees all, one of a pair and one alone.
    blocks: of 64 x 64, drawn for each head; some query tile sees nothing.
    elements: drawn, with a window, a key mask and sinks; values that are not finite. Rows of the mask of one kernel
        are whole vectors.
    spoilt: one whole tile, and a key that is not finite: no bits stand behind those of its last row.
    head keys: one row of the mask for all queries of a head.
    turns: keys in some KV tiles, none in those between, which other rows of the query tile see: scores far below the
        hidden ones, which count for nothing."""
    tile = KERNELS[spec].tile
    keys = 3 * tile.block_n + 42
    of_heads = {"head keys": replace(plain, window=None, elements="head keys", kv_heads=2,
                                     seqlen_q=tile.block_m + 30, seqlen_kv=2 * tile.block_n + 42)}
    return {"sinks": replace(plain, window=None, is_causal=True, sinks="drawn", seqlen_q=200, seqlen_kv=170),
            "whole": replace(plain, window=None, sinks="drawn", seqlen_kv=2 * tile.block_n),
            "blocks": replace(plain, window=None, blocks="heads" if spec.v == "vraw" else "64", batch=2, seqlen_q=200,
                              seqlen_kv=max(keys, 400), planted="k:nan"),
            "elements": replace(plain, elements="random" if spec.v == "vraw" else "documents", batch=2, kv_heads=2,
                                group=1, mask_kind="random", sinks="high", window=(200, 40), planted="v:inf",
                                seqlen_q=100, seqlen_kv=keys if spec.v == "vraw" else keys + 6),
            "spoilt": replace(plain, window=None, elements="random", planted="k:nan", group=1, seqlen_q=tile.block_m,
                              seqlen_kv=tile.block_n),
            "turns": replace(plain, window=None, elements="turns", kind="low", smooth_k=False, group=1, seqlen_q=64,
                             seqlen_kv=1700), **(of_heads if (spec.v, spec.q) == ("vraw", "qraw") else {})}


def _plain_keys(spec: AttnSpec) -> int:
    """Three ragged KV tiles; of a pipeline of stages with barriers two rounds, the last tile begins the third."""
    tile = KERNELS[spec].tile
    return 2 * tile.stages * tile.block_n + 42 if KERNELS[spec].family == "wgmma" else 170


def failure_of(results: Iterable[tuple[Verdict, str]]) -> tuple[str, str] | None:
    """The first check that failed for any seed of a case, and what it found; of the simulator's reports, the kind."""
    digests = set()
    for verdict, digest in results:
        if verdict.failure:
            return verdict.failure
        digests.add(digest)
    return ("seeds differ", "what is written depends on the order of threads") if len(digests) > 1 else None


def check_variant(build: Build, outcomes: Outcomes, spec: AttnSpec, name: str) -> list[tuple[Verdict, str]]:
    """Per seed the verdict of one of its cases, and a digest of all that was written."""
    subject, calls = _subject(build), [*in_orders(cases_of(spec)[name], seeds_of(spec))]
    found = outcomes.of(subject, spec, calls, lambda: [
        (vars(verdict), digest) for verdict, digest in (outcomes.check(subject, spec, *call) for call in calls)])
    return [(Verdict(**values), digest) for values, digest in found]


def first_failure(subject: Simulated, outcomes: Outcomes, spec: AttnSpec, calls: list[tuple[Case, int]],
                  planted: int = 0) -> tuple[str, str] | None:
    """The check that fails first in the orders of a case, and what it found, with this of the bugs that the kernels
    were compiled with (schemata.py)."""
    def simulate() -> tuple[str, str] | None:
        simulator.plant(planted)
        try:
            return failure_of(outcomes.check(subject, spec, *call, planted) for call in calls)
        finally:
            simulator.plant(0)

    return outcomes.of(subject, spec, [planted, *calls], simulate)


def seeds_of(spec: AttnSpec) -> tuple[int, ...]:
    """The orders in which the threads of a kernel's calls run: two for FIRST_OF_EACH, one for others. A race is
    reported in any order; a second one shows results that depend on the order though nothing races."""
    return SEEDS if spec in FIRST_OF_EACH else SEEDS[:1]


def in_orders(case: Case, seeds: tuple[int, ...]) -> Iterator[tuple[Case, int]]:
    """A case with every order of threads; with K and V quantized before, and with keys that are split, in the first
    order alone, to save time."""
    for seed in seeds if case.splits is None else seeds[:1]:
        yield replace(case, stored=case.stored and seed == seeds[0]), seed


@functools.cache
def _subject(build: Build) -> Simulated:
    return Simulated(build)
