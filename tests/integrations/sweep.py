"""Models of transformers by sage_aot, with exact attention instead of the kernels, compared with their eager attention.

    PYTHONPATH=. python tests/integrations/sweep.py                   # every type of models: half an hour
    PYTHONPATH=. python tests/integrations/sweep.py llama bloom       # some
    PYTHONPATH=. python tests/integrations/sweep.py --log all.jsonl --write    # and the tables of docs/integrations.md
    PYTHONPATH=. python tests/integrations/sweep.py --from all.jsonl --write   # those of an earlier sweep

A type is swept as a model that is enabled, and as one that is made by ``attn_implementation="sage_aot"``. Each of its
:data:`MODES` either has the values of eager attention, or the model is refused with an UnsupportedError.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import gc
import inspect
import json
import re
import signal
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch
import transformers
from exact import attention
from media import MEDIA, Inputs, forms
from tiny import LENGTH, config_of_class, small_config, small_model, types

from sage_aot.errors import UnsupportedError
from sage_aot.integrations import Policy, _serve, report, reset_report, use
from sage_aot.integrations import transformers as integration

BOUND = 1e-3
"""Bound of the relative error. Eager attention in float32 leaves some 1e-6."""

DOCUMENT = Path(__file__).parents[2] / "docs" / "integrations.md"

Outputs = list[torch.Tensor]
Model = Any


# --- what a model is asked --------------------------------------------------------------------------------------------


def ids(length: int = LENGTH, batch: int = 2) -> torch.Tensor:
    return torch.randint(3, 60, (batch, length), generator=torch.Generator().manual_seed(1))


def padding(side: str) -> torch.Tensor:
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    if side == "left":
        mask[0, :5] = 0
    if side == "right":
        mask[1, -4:] = 0
    return mask


class _Lacks(Exception):
    """A model has nothing that a mode is about; the mode then is not run, and the log says why."""


def outputs(made: Any, mask: torch.Tensor | None = None) -> Outputs:
    """The tensors of a model's output, of tokens that are there. Weights of attention are not among them: of all
    implementations eager attention alone returns them."""
    values = made if isinstance(made, tuple) else [made]
    if hasattr(made, "items"):
        values = [value for name, value in made.items() if not name.endswith("attentions")]
    found = [value for value in values if isinstance(value, torch.Tensor) and value.is_floating_point()]
    if mask is not None:
        found = [value[mask.bool()] for value in found if value.shape[:2] == mask.shape]
    if not found:
        raise _Lacks("no output that is a tensor")
    return found


def plain(model: Model) -> Outputs:
    return outputs(model(**text(model)))


def text(model: Model, **more: Any) -> dict[str, Any]:
    decoder = {"decoder_input_ids": ids().flip(1)} if model.config.is_encoder_decoder else {}
    return {"input_ids": ids(), **decoder, **more}


def padded(side: str) -> Callable[[Model], Outputs]:
    def run(model: Model) -> Outputs:
        made = model(**text(model, attention_mask=padding(side)))
        return outputs(made, None if model.config.is_encoder_decoder or side == "no" else padding(side))
    return run


def padded_decoder(model: Model) -> Outputs:
    """Padding on the right of what a decoder gets, with padding of the encoder's."""
    if not model.config.is_encoder_decoder:
        raise _Lacks("no encoder and decoder")
    mask = padding("right")
    return outputs(model(**text(model, attention_mask=padding("left"), decoder_attention_mask=mask)), mask)


def masked_in_four_dimensions(model: Model) -> Outputs:
    """A mask of the caller's own: causal, and key 2 hidden."""
    causal = decodes(model)
    seen = torch.ones(LENGTH, LENGTH).tril().bool() if causal else torch.ones(LENGTH, LENGTH).bool()
    seen[3:, 2] = False
    mask = torch.zeros(2, 1, LENGTH, LENGTH).masked_fill(~seen, torch.finfo(torch.float32).min)
    return outputs(model(**text(model, attention_mask=mask)))


def packed(model: Model) -> Outputs:
    """Two sequences in a row, told apart by their positions."""
    needs_causal(model)
    half = torch.arange(LENGTH // 2)
    return outputs(model(**text(model, position_ids=torch.cat([half, half]).expand(2, -1), use_cache=False)))


def few_logits(model: Model, cache: Any = None) -> Outputs:
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise _Lacks("no logits_to_keep")
    return [tensor for count in (1, 3) for tensor in outputs(model(**text(
        model, logits_to_keep=count, past_key_values=None if cache is None else cache(model))))]


def few_logits_with_padding(model: Model) -> Outputs:
    needs_causal(model)
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise _Lacks("no logits_to_keep")
    return outputs(model(**text(model, logits_to_keep=3, attention_mask=padding("left"))))


def static_cache(model: Model) -> Any:
    return transformers.StaticCache(model.config.get_text_config(decoder=True), max_cache_len=2 * LENGTH)


def few_logits_of_a_static_cache(model: Model) -> Outputs:
    needs_causal(model)
    return few_logits(model, static_cache)


def decoding(side: str, static: bool = False) -> Callable[[Model], Outputs]:
    """A prompt in two chunks, then a step of one token, one of three, and one."""
    def run(model: Model) -> Outputs:
        needs_causal(model)
        cache = static_cache(model) if static else transformers.DynamicCache(config=model.config.get_text_config())
        tokens, mask, found = ids(), padding(side), []
        for begin, end in ((0, 10), (10, 19), (19, 20), (20, 23), (23, 24)):
            made = model(input_ids=tokens[:, begin:end], past_key_values=cache, use_cache=True,
                         attention_mask=None if side == "no" else mask[:, :end])
            found += outputs(made, mask[:, begin:end])
        return found
    return run


def generating(**options: Any) -> Callable[[Model], Outputs]:
    def run(model: Model) -> Outputs:
        if not model.can_generate() or not hasattr(model, "generate"):
            raise _Lacks("no generate")
        batch = options.get("batch", 2)
        more = {key: value for key, value in options.items() if key not in ("batch", "assisted", "side")}
        if options.get("assisted"):
            more["assistant_model"] = model
        made = model.generate(ids(batch=batch), attention_mask=padding(options.get("side", "no"))[:batch],
                              max_new_tokens=5, min_new_tokens=5, do_sample=False, output_logits=True,
                              return_dict_in_generate=True, disable_compile=True, **more)
        return [made.sequences.float(), *made.logits]
    return run


def medium(of: Callable[[Model], Iterable[Inputs]]) -> Callable[[Model], Outputs]:
    """The first form of images, sounds or the like which a model takes."""
    def run(model: Model) -> Outputs:
        refusals: list[Exception] = []
        for form in forms(model, of):
            try:
                return outputs(model(**form))
            except _Late:
                raise
            except Exception as error:
                refusals.append(error)
        raise refusals[0] if refusals else _Lacks("no such argument")
    return run


def decodes(model: Model) -> bool:
    name = type(model).__name__
    return model.can_generate() and not model.config.is_encoder_decoder and (
        "CausalLM" in name or "LMHead" in name or "ConditionalGeneration" in name or "Decoder" in name)


def needs_causal(model: Model) -> None:
    if not decodes(model):
        raise _Lacks("no causal language model")


MODES: dict[str, Callable[[Model], Outputs]] = {
    "plain": plain,
    "a mask of ones": padded("no"),
    "padded left": padded("left"),
    "padded right": padded("right"),
    "padded decoder": padded_decoder,
    "a mask of four dimensions": masked_in_four_dimensions,
    "packed": packed,
    "logits_to_keep": few_logits,
    "logits_to_keep, padded": few_logits_with_padding,
    "logits_to_keep, static cache": few_logits_of_a_static_cache,
    "chunks and steps": decoding("no"),
    "chunks and steps, padded": decoding("left"),
    "chunks and steps, static cache": decoding("no", static=True),
    "chunks and steps, static cache, padded": decoding("left", static=True),
    "generate": generating(),
    "generate, padded": generating(side="left"),
    "generate, static cache": generating(cache_implementation="static", side="left"),
    "generate, assisted": generating(assisted=True, batch=1),
    "generate, prompt lookup": generating(prompt_lookup_num_tokens=3, batch=1),
    "generate, beams": generating(num_beams=2),
    **{name: medium(of) for name, of in MEDIA.items()},
}
OF_TEXT = [mode for mode in MODES if mode not in MEDIA]


# --- what it says -----------------------------------------------------------------------------------------------------


MAKING, ROUNDING = "making it", "rounding alone changes its values"


class Result(NamedTuple):
    type: str
    model: str  # the name of its class
    way: str  # "enabled" or "by name"
    mode: str  # of MODES, "all", or MAKING
    verdict: str  # "right", "refused", "wrong", "error", "not run", "as sdpa"
    reason: str = ""
    served: int = 0  # calls


@contextlib.contextmanager
def exact_attention() -> Iterator[None]:
    """Every call that sage_aot computes is served, by exact attention."""
    kernels, _serve.attn = _serve.attn, attention
    try:
        with use(Policy(when="possible")), warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            yield
    finally:
        _serve.attn = kernels


def sweep(name: str, class_name: str, modes: list[str] | None = None, **config: Any) -> list[Result]:
    """A type of models in all modes that its eager attention runs: with all its sizes small, or else with its layers
    alone. A class that runs in neither way may be refused all the same."""
    integration.register()
    first: list[Result] = []
    for sizes in (True, False):
        found = _sweep(name, class_name, modes or list(MODES), sizes, config)
        if any(result.verdict != "not run" for result in found):
            return found
        first = first or found
    refused = _refused(name, class_name)
    return refused if len(refused) == len(WAYS) else refused + first


def _sweep(name: str, class_name: str, modes: list[str], sizes: bool, config: dict[str, Any]) -> list[Result]:
    try:
        kind = getattr(transformers, class_name)
        torch.manual_seed(0)
        model = small_model(kind, config_of_class(kind, small_config(name, sizes, **config)))
    except _Late:
        raise
    except Exception as error:
        return [Result(name, class_name, "eager", MAKING, "not run", _said(error))]
    results, ours = [], {}
    for way in WAYS:
        try:
            ours[way] = WAYS[way](copy.deepcopy(model))
        except Exception as error:
            verdict = "refused" if isinstance(error, UnsupportedError) else "error"
            results.append(Result(name, class_name, way, "all", verdict, _said(error)))
    if not ours:
        return results
    expected, skipped = _eager(model, modes)
    if not expected:
        of_model = "; ".join(dict.fromkeys(why for why in skipped.values() if not why.startswith("_Lacks")))
        return [Result(name, class_name, "eager", "all", "not run", of_model)]
    compared = [_compared(name, class_name, way, mode, of_way, values)
                for way, of_way in ours.items() for mode, values in expected.items()]
    wrong = {result.mode for result in compared if result.verdict == "wrong"}
    if wrong and all(_moved_by_rounding(model, mode, expected[mode]) > BOUND for mode in wrong):
        return [Result(name, class_name, "eager", "all", "not run", ROUNDING)]
    return [*results, *(Result(name, class_name, "eager", mode, "not run", why) for mode, why in skipped.items()),
            *compared]


def _refused(name: str, class_name: str) -> list[Result]:
    """Results for a class none of whose models runs here: what the integration says."""
    results = []
    for way in WAYS:
        try:
            integration._check_model(getattr(transformers, class_name), is_made=way == "enabled")
        except UnsupportedError as error:
            results.append(Result(name, class_name, way, "all", "refused", _said(error)))
        except AttributeError:  # transformers does not export the class
            return []
    return results


def _eager(model: Model, modes: list[str]) -> tuple[dict[str, Outputs], dict[str, str]]:
    """Outputs of a model by eager attention, mode by mode, and why it does not run in the others."""
    expected, skipped = {}, {}
    for mode in modes:
        try:
            values = _asked(model, mode)
            if not all(value.isfinite().all() for value in values):
                raise ArithmeticError("eager attention gives values that are not finite")
            expected[mode] = values
        except _Late:
            raise
        except Exception as error:
            skipped[mode] = _said(error)
    return expected, skipped


def _by_name(model: Model) -> Model:
    config = copy.deepcopy(model.config)
    config._attn_implementation = "sage_aot"
    torch.manual_seed(0)
    made = type(model)(config).eval()
    made.load_state_dict(model.state_dict())
    if hasattr(model, "generation_config"):
        made.generation_config = copy.deepcopy(model.generation_config)
    return made


def _enabled(model: Model) -> Model:
    integration.enable(model)
    return model


def _moved_by_rounding(model: Model, mode: str, expected: Outputs) -> float:
    """The relative error of eager attention by weights whose last bits differ."""
    moved, generator = copy.deepcopy(model), torch.Generator().manual_seed(0)
    for weight in moved.parameters():
        if weight.is_floating_point():
            weight.mul_(1 + 2.0**-22 * torch.randn(weight.shape, generator=generator))
    return distance(_asked(moved, mode), expected)


WAYS: dict[str, Callable[[Model], Model]] = {"by name": _by_name, "enabled": _enabled}


def _compared(name: str, class_name: str, way: str, mode: str, ours: Model, expected: Outputs) -> Result:
    reset_report()
    try:
        found = _asked(ours, mode)
    except _Late:
        raise
    except Exception as error:
        return Result(name, class_name, way, mode, "error", _said(error))
    served, error = report().get("sage_aot", 0), distance(found, expected)
    if error <= BOUND:
        return Result(name, class_name, way, mode, "right", served=served)
    ours.set_attn_implementation("sdpa")  # is it transformers' own difference between sdpa and eager?
    try:
        of_sdpa = _asked(ours, mode)
        same = distance(found, of_sdpa) <= BOUND
    except Exception:
        same = False
    finally:
        ours.set_attn_implementation("sage_aot")
    return Result(name, class_name, way, mode, "as sdpa" if same else "wrong", f"relative error {error:.2g}", served)


def _asked(model: Model, mode: str) -> Outputs:
    torch.manual_seed(0)  # some models draw numbers
    return MODES[mode](model)


def distance(found: Outputs, expected: Outputs) -> float:
    if len(found) != len(expected) or any(x.shape != y.shape for x, y in zip(found, expected)):
        return float("inf")
    return max(float((x.double() - y.double()).norm() / y.double().norm().clamp(min=1e-30))
               for x, y in zip(found, expected))


def _said(error: BaseException) -> str:
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]


# --- the table --------------------------------------------------------------------------------------------------------


class _Late(Exception):
    """A model that takes too long."""


def _late(*_: Any) -> None:
    raise _Late("180 s were not enough")


def sweep_all(names: list[str], log: TextIO | None = None) -> list[Result]:
    signal.signal(signal.SIGALRM, _late)
    torch.set_num_threads(1)  # more only wait for each other
    results: list[Result] = []
    with exact_attention():
        for name, class_name in types():
            if names and name not in names:
                continue
            signal.alarm(180)
            try:
                found = sweep(name, class_name)
            except _Late as error:
                found = [Result(name, class_name, "eager", "all", "not run", _said(error))]
            finally:
                signal.alarm(0)
            for result in found:
                if log is not None:
                    log.write(json.dumps(result) + "\n")
                    log.flush()
                if result.verdict not in ("right", "refused", "not run"):
                    print(*result, sep=" | ", flush=True)
            results += found
            gc.collect()
    return results


def _rows(rows: dict[str, Any], *titles: str) -> str:
    made = [" | ".join(str(cell) for cell in (name, *(cells if isinstance(cells, tuple) else (cells,))))
            for name, cells in rows.items()]
    return "\n".join(f"| {row} |" for row in (" | ".join(titles), " | ".join("---" for _ in titles), *made)) + "\n"


def _reason(result: Result) -> str:
    """Reason, one of a few, why a model was refused or not run."""
    for pattern, reason in _REASONS.items():
        if re.search(pattern, result.reason):
            return reason
    return "its default configuration, made small, is refused" if result.mode == MAKING else "needs other inputs"


_REASONS = {
    "does not run with sdpa attention": "transformers does not run it with `sdpa` attention",
    "does not call the implementation": "its attention does not look up the implementation by its name",
    "another path for sdpa": "takes another path for `sdpa` than for other names",
    "attention shares its configurations": "layers keep a configuration that cannot be switched",
    "among classes of its own": "looks for its attention among classes of its own",
    "ImportError|ModuleNotFoundError": "needs a library that was not installed",
    "million parameters": "does not shrink",
    "module transformers has no attribute": "transformers does not export its class",
    ROUNDING: "the last bits of its weights change its values by more than 1e-3",
    "not finite": "its eager attention gives values that are not finite",
    "inference_session": "takes a session of a video",
    "shared_kv_states": "takes keys and values of another model",
    "_forward_unimplemented": "has no forward of its own",
    "_Late": "takes too long",
}


def tables(results: list[Result]) -> str:
    """Tables of what the sweep found, as docs/integrations.md has them."""
    by_model: dict[str, list[Result]] = collections.defaultdict(list)
    for result in results:
        by_model[result.model].append(result)
    verdicts, reasons = collections.defaultdict(set), collections.defaultdict(set)
    for model, of_model in by_model.items():
        for way in ("by name", "enabled"):
            found = {result.verdict for result in of_model if result.way in (way, "eager")}
            whole = [result for result in of_model if result.mode in ("all", MAKING) and result.way in (way, "eager")]
            worst = next((verdict for verdict in ("wrong", "error", "as sdpa", "refused", "right") if verdict in found),
                         "not run")
            verdicts[worst, way].add(model)
            for result in whole:
                reasons[result.verdict, way, _reason(result)].add(result.type)
    counts = {_VERDICTS[verdict]: tuple(len(verdicts[verdict, way]) for way in ("enabled", "by name"))
              for verdict in _VERDICTS}
    modes = {mode: tuple(sum(result.mode == mode and result.verdict == "right" and result.way == way
                             for result in results) for way in ("enabled", "by name")) for mode in MODES}
    lists = {}
    for verdict, title in (("refused", "refused"), ("not run", "not run")):
        for (of, way, reason), names in sorted(reasons.items(), key=lambda item: -len(item[1])):
            if of == verdict and (way == "by name" or names != reasons.get((of, "by name", reason))):
                both = all(names == reasons.get((of, each, reason)) for each in WAYS)
                alone = "" if both or of == "not run" else " by name" if way == "by name" else " when enabled"
                lists[f"{title}{alone}: {reason}"] = ", ".join(
                    f"`{name}`" for name in sorted(names))
    return "\n".join([
        f"With transformers {transformers.__version__}, models of {len({result.type for result in results})} types:\n",
        _rows(counts, "models", "enabled", "loaded by the name"),
        _rows(modes, "mode", "right, enabled", "right, loaded by the name"),
        _rows(lists, "", "types")])


_VERDICTS = {"right": "within 1e-3 of eager attention in every mode that it runs", "refused": "refused by name",
             "as sdpa": "as `sdpa`, which itself differs from eager attention", "wrong": "wrong", "error": "an error",
             "not run": "not run"}
BEGIN, END = "<!-- sweep -->\n", "<!-- end of sweep -->"


def main() -> int:
    parser = argparse.ArgumentParser(description="Models of transformers by sage_aot, and by their eager attention.")
    parser.add_argument("types", nargs="*")
    parser.add_argument("--log", help="a file for all results, a line of JSON each")
    parser.add_argument("--from", dest="logs", nargs="+", default=[], help="such files, instead of a sweep; of a type "
                        "in several files, the last one's results hold")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/integrations.md")
    given = parser.parse_args()
    transformers.logging.set_verbosity_error()
    if given.logs:
        by_type: dict[str, list[Result]] = {}
        for log in given.logs:
            read = [Result(*json.loads(line)) for line in Path(log).read_text().splitlines()]
            by_type.update({name: [result for result in read if result.type == name]
                            for name in dict.fromkeys(result.type for result in read)})
        results = [result for of_type in by_type.values() for result in of_type]
    else:
        with open(given.log, "w") if given.log else contextlib.nullcontext() as log:
            results = sweep_all(given.types, log)
    verdicts = collections.Counter((result.way, result.verdict) for result in results)
    print(*(f"{way}: {verdict} {count}" for (way, verdict), count in sorted(verdicts.items())), sep="\n")
    if given.write:
        text = DOCUMENT.read_text()
        DOCUMENT.write_text(text[:text.index(BEGIN)] + BEGIN + tables(results) + text[text.index(END):])
    return int(any(result.verdict in ("wrong", "error") for result in results))


if __name__ == "__main__":
    sys.exit(main())
