"""``sage-aot audit``: the error of each attention call of a language model, and what it does to the model's output.
With ``--sparse``: the least density of blocks that each of its layers needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from sage_aot._backends.emulation.backend import emulated_arch
from sage_aot._call.backends import default_library
from sage_aot._call.sparse import Sparse
from sage_aot._cli.files import check_file
from sage_aot._tools.reference import measure
from sage_aot._tools.tune import KEEPS, TunedModel, save_tuned
from sage_aot.errors import ArgumentError, UnsupportedError
from sage_aot.integrations import Policy, audit, report, reset_report, use
from sage_aot.integrations import transformers as integration
from sage_aot.integrations._audit import Audited
from sage_aot.integrations._tune import tune_model

import transformers  # isort: skip  # behind the adapter, which says what to install where it is missing


def main(name: str, text: str | None, tokens: int) -> int:
    """Run a model on the text of a file, or on random tokens, with sdpa and with sage_aot; print the errors. `name`: a
    folder, or a name on the Hugging Face Hub. Returns 1 where sage_aot served no call.

    Raises:
        ArgumentError: there is no such model or text, the model does not read one text, or no tokens are left of it.
        UnsupportedError: no transformers, or sage_aot has no kernel for the GPU at hand, or does not serve the model.
    """
    model, ids = _model_and_tokens(transformers.AutoModel, name, text, tokens)
    with torch.inference_mode():
        expected = model(input_ids=ids).last_hidden_state
        integration.enable(model)
        reset_report()
        with use(Policy(when="possible")), audit() as calls:
            out = model(input_ids=ids).last_hidden_state
    print(table(calls))
    whole = measure(out, expected)
    print(f"\nlast hidden states: cosine {whole.cosine:.6f}, relative L1 {100 * whole.relative_l1:.2f} %")
    print(f"calls: {report()}")
    return 0 if calls else 1


BLOCK = 64
"""Queries and keys of a block in :func:`main_of_sparse`: texts are short, and have few larger ones."""


def main_of_sparse(name: str, text: str | None, tokens: int, error: float, file: str | None) -> int:
    """Find the least density at which the heads of a causal language model keep an error, on the text of a file, or on
    random tokens; print the density and the error of each layer, and write the shares to `file`. Returns 0.

    Raises:
        ArgumentError: as :func:`main` says, or sage_aot served no call, or there is no folder for `file`.
        UnsupportedError: as :func:`main` says, or transformers knows the model as no causal language model.
    """
    if file is not None:
        check_file("audit", file)
    model, ids = _model_and_tokens(transformers.AutoModelForCausalLM, name, text, tokens)
    integration.enable(model)
    reset_report()
    tuned = tune_model(model, run=lambda model: model.base_model(input_ids=ids), error=error,
                       sparse=Sparse(keep=1.0, block_size=BLOCK), keeps=KEEPS)
    print(f"blocks of {BLOCK} by {BLOCK}, relative L1 of a head at most {100 * error:g} %\n\n{tuned}\n\n"
          f"{summary(tuned)}")
    if file is not None:
        save_tuned(tuned.sparse, file)
        print(f"wrote {file}, which sage_aot.sparse.load_tuned reads")
    return 0


def _model_and_tokens(kind: Any, name: str, text: str | None, tokens: int) -> tuple[Any, torch.Tensor]:
    """A model, by one of transformers' classes that choose, and what it is to read, both where they are to run. Prints
    what they are."""
    if tokens < 1:
        raise ArgumentError(f"--tokens: expected at least 1, got {tokens}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        model = kind.from_pretrained(name, dtype=torch.bfloat16, attn_implementation="sdpa")
    except OSError as error:
        raise ArgumentError(f"audit: expected a model that can be read, got {error}") from error
    except ValueError as error:
        raise UnsupportedError(f"audit: expected a model that transformers runs with sdpa, got {name}: {error}; there "
                               f"is nothing to compare with") from error
    _check_reads_text(model)
    tokens = min(tokens, _positions(model, tokens))
    ids = _random_tokens(model.config, tokens) if text is None else _tokens(name, text, tokens)
    model, ids = model.to(device).eval(), ids.to(device)
    print(f"{type(model).__name__} {name}, {ids.shape[1]} tokens, bf16, {_place(device)}\n")
    return model, ids


def _positions(model: Any, tokens: int) -> int:
    """The most tokens that the model reads; those of RoBERTa begin behind the padding."""
    config = model.config.get_text_config()
    behind = (config.pad_token_id or 0) + 1 if "roberta" in config.model_type else 0
    return int(getattr(config, "max_position_embeddings", tokens + behind)) - behind


def _place(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"CPU: emulation of the {emulated_arch(default_library().manifest)} kernels"


def _check_reads_text(model: Any) -> None:
    if model.main_input_name != "input_ids" or model.config.is_encoder_decoder or hasattr(model.config, "text_config"):
        raise ArgumentError(f"audit: expected a model that reads one text, got {type(model).__name__}; use "
                            f"sage_aot.integrations.audit() in a program for others")


def _tokens(name: str, text: str, tokens: int) -> torch.Tensor:
    try:
        read = Path(text).read_text("utf-8")
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ArgumentError(f"audit: expected a text and a tokenizer that can be read, got {error}") from error
    ids: torch.Tensor = tokenizer(read, return_tensors="pt")["input_ids"]
    if ids.shape[1] == 0:
        raise ArgumentError(f"--text: expected a file with text, got {text} without any")
    return ids[:, :tokens]


def _random_tokens(config: Any, tokens: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(config.get_text_config().vocab_size, (1, tokens), generator=generator)


def table(calls: list[Audited]) -> str:
    """The errors, against the host's own attention on the same inputs, as a Markdown table."""
    lines = ["| call | q: batch, seq, heads, headdim | k | mask | cosine | relative L1, % | RMSE |",
             "|---:|---|---|---|---:|---:|---:|"]
    for number, call in enumerate(calls):
        mask = " and ".join([*(["causal"] if call.is_causal else []), *(["keys"] if call.has_mask else [])]) or "full"
        shapes = ("×".join(map(str, shape)) for shape in (call.q, call.k))
        lines.append(f"| {number} | {' | '.join(shapes)} | {mask} | {call.accuracy.cosine:.6f} | "
                     f"{100 * call.accuracy.relative_l1:.2f} | {call.accuracy.rmse:.2e} |")
    return "\n".join(lines)


def summary(tuned: TunedModel) -> str:
    """The density and the error of all layers, each of which counts alike."""
    density = sum(row.density for row in tuned.report) / len(tuned.report)
    return (f"all layers: density {100 * density:.1f} %, relative L1 of a head at most "
            f"{100 * max(row.error for row in tuned.report):.2f} %")
