"""Bits per byte of language models over the density of their attention, on texts of 16,384 bytes.

    python bench/long_text.py --json long_text.json
    python bench/long_text.py --json long_text.json --model lm --weights long_text.pt
    python bench/long_text.py --model lm --no-training
    python bench/long_text.py --quick                   # on the CPU, emulated

A model that reads bytes (bench/train.py's, with more layers) is trained with torch's bf16 attention for so many
seconds: on short contexts, then on those of 16,384 bytes. Its text is every .py, .rst, .txt and .md file of the
standard library and of the packages installed here, each once; one file in thirty is held out. It then reads the first
16,384 bytes of held-out files that have as many, with its attention replaced in all layers: exact, ours dense, and ours
with the blocks of each method (bench/selections.py), those on the diagonal and --before blocks before them always among
them: the first queries of a block would not see the bytes before it. The knob of a method is
one number for all layers and heads, set on a text of its own; the densities are those of the texts that count.
`above`: bits per byte above exact attention on the same texts, and the standard error of that mean; `late`: of the
second half of each text alone, whose bytes have the long contexts. A model is trained for a time, so that its bits
differ from run to run; differences are within one.

--model reads a folder like lm too. Its context is short, 2,048 bytes: blocks are of 64 there.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import math
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

import common
import sage_aot
from sage_aot._call.pooling import DEFAULT_BLOCK
from selections import Method, View, density, methods, reached
from train import Attend, Config, Model, initial_model, loss_of, make_optimizer, on_device, rate_at, rotations, windows

COLUMNS = ("model", "method", "wanted", "density", "bits per byte", "above", "±", "late, above")
SUFFIXES = (".py", ".rst", ".txt", ".md")
FILE_BYTES = (256, 2**20)  # least and most of a file
HELD_OUT = 30  # one file in so many
RATE_STEPS = 1000
"""Steps of the learning rate, over the time of a training."""
SHORT, SHORT_BLOCK = 4096, 64  # blocks of models whose contexts are shorter
READ_AT_ONCE = 2**14  # bytes
QUICK: dict[str, Any] = {"contexts": [128, 512], "batches": [4, 1], "seconds": [4, 2], "megabytes": 8, "windows": 2,
                         "model_windows": 2, "layers": 2, "width": 128, "densities": [0.5]}


class Subject(NamedTuple):
    """A model and its texts."""

    name: str
    read: Callable[[torch.Tensor, Attend], torch.Tensor]  # logits of bytes
    texts: torch.Tensor  # uint8 [windows, context + 1]; the last one serves to set knobs alone

    @property
    def context(self) -> int:
        return self.texts.shape[1] - 1


def main() -> int:
    arguments = parse()
    library = common.use_kernels(arguments.kernels)
    lines = common.header(library)
    common.print_header(lines)
    values: dict[str, Any] = {"header": lines, "models": []}
    subjects = []
    if arguments.training:
        subject, values["training"] = trained(arguments)
        subjects.append(subject)
    if arguments.model is not None:
        subjects.append(loaded(arguments.model, arguments.model_windows, arguments.device))
    print("\n" + common.table_head(COLUMNS, texts=2))
    for subject in subjects:
        block = SHORT_BLOCK if subject.context < SHORT else DEFAULT_BLOCK
        rows = compare(subject, arguments.densities, block, arguments.before * block)
        values["models"].append({"name": subject.name, "context": subject.context, "windows": len(subject.texts) - 1,
                                 "block": block, "before": arguments.before, "rows": rows})
        common.write_json(arguments.json, values)
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_training_arguments(parser)
    parser.add_argument("--windows", type=int, default=16, help="texts to read (default: %(default)s)")
    parser.add_argument("--densities", type=lambda text: [float(word) for word in common.words(text)],
                        default="0.5,0.25,0.125,0.0625", help="(default: %(default)s)")
    parser.add_argument("--before", type=int, default=1, metavar="BLOCKS",
                        help="blocks before its own that every query sees (default: %(default)s)")
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="also a trained model: byte_lm.py and its weights")
    parser.add_argument("--model-windows", type=int, default=40, help="texts that it reads (default: %(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu",
                        help="(default: %(default)s)")
    parser.add_argument("--kernels", metavar="FOLDER", help="built kernels (default: those of the package)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything here")
    parser.add_argument("--quick", action="store_true", help="a small model, 512 bytes, a density")
    arguments = parser.parse_args()
    if arguments.quick:
        vars(arguments).update(QUICK)
    return arguments


def add_training_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--training", action=argparse.BooleanOptionalAction, default=True,
                        help="train a model (default: yes)")
    parser.add_argument("--contexts", type=common.integers, default="2048,16384",
                        help="bytes, of the phases of training (default: %(default)s)")
    parser.add_argument("--batches", type=common.integers, default="32,4", help="of each (default: %(default)s)")
    parser.add_argument("--seconds", type=common.integers, default="120,60", help="of each (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=8, help="(default: %(default)s)")
    parser.add_argument("--width", type=int, default=512, help="(default: %(default)s)")
    parser.add_argument("--rate", type=float, default=1e-3, help="highest learning rate (default: %(default)s)")
    parser.add_argument("--megabytes", type=int, default=300, help="of text, at most (default: %(default)s)")
    parser.add_argument("--weights", type=Path, metavar="FILE", help="the model trained before, or where to leave it")


# --- text -------------------------------------------------------------------------------------------------------------


def read_files(megabytes: int) -> dict[str, bytes]:
    """The text of the files of the standard library and of installed packages by path, each text once."""
    roots = {Path(sysconfig.get_paths()[name]) for name in ("stdlib", "purelib", "platlib")}
    paths = {path for root in roots | {Path(torch.__file__).parents[1]} for path in root.rglob("*")
             if path.suffix in SUFFIXES and path.is_file()}
    found: dict[bytes, tuple[str, bytes]] = {}
    left = megabytes * 10**6
    for path in sorted(paths, key=lambda path: digest(str(path))):
        text = path.read_bytes()
        key = hashlib.sha256(text).digest()
        if key not in found and FILE_BYTES[0] <= len(text) <= min(FILE_BYTES[1], left):
            found[key] = str(path), text
            left -= len(text)
    return dict(sorted(found.values()))


def digest(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


def split(files: dict[str, bytes]) -> tuple[bytes, list[bytes]]:
    """Split files: text to train on, neighbours in a folder side by side; files held out, in an order of their own."""
    held_out = sorted((path for path in files if digest(path) % HELD_OUT == 0), key=digest)
    return b"".join(text for path, text in files.items() if digest(path) % HELD_OUT), [files[path] for path in held_out]


def long_texts(files: list[bytes], context: int, count: int, device: str) -> torch.Tensor:
    """The first context + 1 bytes of `count` files that have as many."""
    found = [text[: context + 1] for text in files if len(text) > context][:count]
    if len(found) < count:
        sys.exit(f"--windows: expected {count} files of more than {context} bytes among those held out, got "
                 f"{len(found)}; install more packages, or ask for fewer")
    return torch.stack([on_device(text, torch.device(device)) for text in found])


# --- models -----------------------------------------------------------------------------------------------------------


def trained(arguments: argparse.Namespace) -> tuple[Subject, dict[str, Any]]:
    """The model of this program, trained or from --weights, and the account of its training."""
    text, held_out = split(read_files(arguments.megabytes))
    context = arguments.contexts[-1]
    texts = long_texts(held_out, context, arguments.windows + 1, arguments.device)
    config = Config(context=context, layers=arguments.layers, width=arguments.width, rate=arguments.rate,
                    steps=RATE_STEPS, warmup=RATE_STEPS // 25)
    model = initial_model(config).to(arguments.device)
    account = {"bytes": len(text), "sha256": hashlib.sha256(text).hexdigest(),
               "parameters": sum(weight.numel() for weight in model.parameters())}
    if arguments.weights is not None and arguments.weights.exists():
        saved = torch.load(arguments.weights, weights_only=True)
        model.load_state_dict(saved["weights"])
        account = saved["account"]
    else:
        account["phases"] = train(model, config, on_device(text, torch.device(arguments.device)), arguments)
        if arguments.weights is not None:
            torch.save({"weights": model.state_dict(), "account": account}, arguments.weights)

    def read(tokens: torch.Tensor, attend: Attend) -> torch.Tensor:
        with torch.autocast(tokens.device.type, torch.bfloat16):
            return model(tokens, attend)

    return Subject(f"trained on {context:,} bytes", read, texts), account


def train(model: Model, config: Config, text: torch.Tensor, arguments: argparse.Namespace) -> list[dict[str, float]]:
    """All phases, each for its seconds; returns what each read and its last bits per byte."""
    optimizer, generator = make_optimizer(model, config), torch.Generator().manual_seed(config.seed)
    total, spent, phases = sum(arguments.seconds), 0.0, []
    for context, batch, seconds in zip(arguments.contexts, arguments.batches, arguments.seconds):
        set_context(model, context)
        begin, steps, bits = time.perf_counter(), 0, 0.0
        while (passed := time.perf_counter() - begin) < seconds:
            for group in optimizer.param_groups:
                group["lr"] = rate_at(int((spent + passed) / total * RATE_STEPS), config)
            starts = torch.randint(len(text) - context, (batch,), generator=generator).to(text.device)
            loss = loss_of(model, exact, *windows(text, starts, context))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            steps, now = steps + 1, loss.item() / math.log(2)  # waits for the GPU, whose time counts
            bits = now if steps == 1 else 0.95 * bits + 0.05 * now
            if steps % 100 == 0:
                print(f"context {context}, step {steps}, {passed:.0f} s: {bits:.4f} bits per byte", flush=True)
        spent += seconds
        phases.append({"context": context, "steps": steps, "bytes": steps * batch * context, "bits": bits})
        print(f"context {context}: {steps} steps, {phases[-1]['bytes'] / 1e6:.0f} MB, {bits:.4f} bits per byte")
    set_context(model, config.context)
    return phases


def set_context(model: Model, context: int) -> None:
    """Let the model read so many bytes: the tables of its rotary positions have a fixed length."""
    for layer in model.layers:
        device = layer.qkv.weight.device
        layer.cos, layer.sin = (table.to(device) for table in rotations(context, layer.headdim))


def loaded(folder: Path, count: int, device: str) -> Subject:
    """The model of a folder like lm."""
    spec = importlib.util.spec_from_file_location("byte_lm", folder / "byte_lm.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model, text = module.load(device)
    starts = torch.arange(count + 1, device=text.device) * module.CONTEXT
    texts = text[starts[:, None] + torch.arange(module.CONTEXT + 1, device=text.device)]
    return Subject(f"{folder.name}, {module.CONTEXT:,} bytes", model, texts)


# --- reading ----------------------------------------------------------------------------------------------------------


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return sage_aot.attn(q, k, v, is_causal=True)


@dataclass
class SparseAttend:
    """Causal attention by a method."""

    method: Method
    knob: float
    before: int
    densities: list[float] = field(default_factory=list)  # of its calls

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with torch.autocast(q.device.type, enabled=False):  # products of scores stay float32
            return self.attend(q, k, v)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        view = View(q, k, is_causal=True, before=self.before)
        blocks = self.method.select(view, self.knob)
        self.densities.append(density(blocks, view))
        return self.method.attend(q, k, v, blocks, is_causal=True)


@torch.inference_mode()
def compare(subject: Subject, densities: list[float], block: int, before: int) -> list[dict[str, Any]]:
    """The rows of a model: exact, dense, and each method at each density. `before`: keys that all methods see."""
    views, rows, of_exact = recorded(subject, before), [], bits(subject, exact)

    def row(method: str, group: str, tail: bool, wanted: float, found: float, by_text: torch.Tensor) -> None:
        above, late = (by_text - of_exact).unbind(1)
        rows.append({"method": method, "group": group, "tail": tail, "wanted": wanted, "density": found,
                     "bits": by_text[:, 0].mean().item(), "above": above.mean().item(),
                     "above_error": above.std().item() / len(above) ** 0.5, "late_above": late.mean().item()})
        print(common.table_row(cells(subject, rows[-1])), flush=True)

    row("exact, bf16", "dense", False, 1.0, 1.0, of_exact)
    row("ours, dense", "dense", False, 1.0, 1.0, bits(subject, dense))
    for method in methods(block).values():
        for wanted, knob in reached(method, views, densities) if method.causal else []:
            attend = SparseAttend(method, knob, before)
            by_text = bits(subject, attend)
            row(method.name, method.group, method.tail, wanted, mean(attend.densities), by_text)
    return rows


def recorded(subject: Subject, before: int) -> list[View]:
    """Views of the layers' attention on the text that sets knobs."""
    views: list[View] = []

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        views.append(View(q, k, is_causal=True, before=before))
        return exact(q, k, v)

    subject.read(subject.texts[-1:, :-1].long(), attend)
    return views


def bits(subject: Subject, attend: Attend) -> torch.Tensor:
    """Bits per byte [texts, 2]: of each text, and of its second half."""
    found = []
    for texts in subject.texts[:-1].long().split(max(1, READ_AT_ONCE // subject.context)):
        logits = subject.read(texts[:, :-1], attend).float()
        losses = F.cross_entropy(logits.mT, texts[:, 1:], reduction="none") / math.log(2)
        found.append(torch.stack((losses.mean(1), losses[:, subject.context // 2:].mean(1)), 1))
    return torch.cat(found).double().cpu()


def cells(subject: Subject, row: dict[str, Any]) -> list[object]:
    return [subject.name, row["method"], f"{row['wanted']:g}", f"{row['density']:.4f}", f"{row['bits']:.4f}",
            f"{row['above']:+.4f}", f"{row['above_error']:.4f}", f"{row['late_above']:+.4f}"]


if __name__ == "__main__":
    common.run(main)
