"""Train a small language model with the 8-bit trainable attention and with torch's bf16 attention, and compare.

    python bench/train.py all --out DIR                 # every run of both attentions, a queue over the GPUs here
    python bench/train.py summary DIR                   # its table
    python bench/train.py pretrain --attention sage --seed 1 --out DIR
    python bench/train.py finetune --attention sage --seed 1 --out DIR --weights DIR/pretrain-bf16-seed0.pt

The model reads bytes: 19 M parameters, 6 layers of width 512, rotary positions, causal; even layers have 8 heads of 64
channels, odd layers 4 heads of 128. It has no QK-norm unless --qk-norm asks for it. The text (`--text`) is every .py
and .rst that installed packages brought (`packages`), or the source code of this Python's standard library (`stdlib`),
equal files once: half A for `pretrain`, from random weights; half B for `finetune`, which starts from the weights
that one bf16 run of `pretrain` left; 3 % of it is held out. Runs of one seed have the same initial weights and the same
batches, whatever the attention. All losses are bits per byte. `--tiny` is for machines without a GPU.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import platform
import queue
import site
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean, median, stdev

import torch
import torch.nn.functional as F
from torch import nn

import common

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Causal attention of q, k and v, each [batch, heads, seq, headdim]."""

MODES = ("pretrain", "finetune")
ATTENTIONS = ("bf16", "sage")
TEXTS = ("packages", "stdlib")
BYTES = 256
HELD_OUT = 0.03
"""Share of the text that no run trains on."""

BETAS, WEIGHT_DECAY, CLIP = (0.9, 0.95), 0.1, 1.0
FINAL_RATE = 0.1
"""Learning rate of the last step, as a multiple of the highest."""


@dataclass(frozen=True)
class Config:
    """All that decides a run's figures, apart from the text and the machine."""

    mode: str = "pretrain"
    attention: str = "bf16"
    text: str = "packages"
    seed: int = 0
    steps: int = 1500
    batch: int = 16
    context: int = 2048
    layers: int = 6
    width: int = 512
    qk_norm: bool = False
    rate: float = 1e-3
    warmup: int = 100
    log_every: int = 25
    eval_every: int = 250
    eval_windows: int = 448
    compile: bool = False

    @property
    def name(self) -> str:
        return f"{self.mode}-{self.attention}-seed{self.seed}"

    @property
    def model(self) -> tuple[int, int, bool]:
        return self.layers, self.width, self.qk_norm


TINY = {"steps": 40, "batch": 4, "context": 128, "layers": 2, "width": 128, "warmup": 5, "log_every": 5,
        "eval_every": 20, "eval_windows": 16}
DEFAULTS = {
    ("pretrain", False): Config(),
    ("finetune", False): Config(mode="finetune", steps=500, rate=2e-4, warmup=25, log_every=10, eval_every=100),
    ("pretrain", True): Config(**TINY),
    ("finetune", True): Config(**{**TINY, "mode": "finetune", "steps": 20, "rate": 2e-4}),
}
"""Default configurations by mode and whether --tiny is given."""


# --- command line -----------------------------------------------------------------------------------------------------


def main() -> int:
    args = parser().parse_args()
    if args.command == "summary":
        print(summary(load_runs(args.folder)))
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    if args.command == "all":
        return run_all(args)
    config = config_of(args)
    common.write_json(args.out / f"{config.name}.json", train(config, args.weights))
    return 0


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = result.add_subparsers(dest="command", required=True)
    for mode in MODES:
        one = commands.add_parser(mode, help=f"one run, written to DIR/{mode}-ATTENTION-seedSEED.json")
        one.add_argument("--attention", choices=ATTENTIONS, default="sage", help="(default: %(default)s)")
        one.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
        one.add_argument("--steps", type=int, help=f"(default: {DEFAULTS[mode, False].steps})")
        one.add_argument("--rate", type=float, help=f"highest learning rate (default: {DEFAULTS[mode, False].rate})")
        one.add_argument("--weights", type=Path, metavar="FILE", required=mode == "finetune",
                         help="write the trained weights here" if mode == "pretrain" else "start from these weights")
        add_common_arguments(one)
    every = commands.add_parser("all", help="runs of both modes; those whose file is in DIR already are not repeated")
    every.add_argument("--seeds", type=common.integers, default="0,1,2", help="(default: %(default)s)")
    every.add_argument("--attentions", type=common.words, default=",".join(ATTENTIONS), help="(default: %(default)s)")
    for mode in MODES:
        every.add_argument(f"--{mode}-steps", type=int, help=f"(default: {DEFAULTS[mode, False].steps})")
    every.add_argument("--weights", type=Path, metavar="FILE", help="where the bf16 run of `pretrain` leaves weights "
                       "for `finetune`, 76 MB (default: DIR/pretrain-bf16-seedSEED.pt of the first seed)")
    add_common_arguments(every)
    table = commands.add_parser("summary", help="the table of all runs of a folder")
    table.add_argument("folder", type=Path, metavar="DIR")
    return result


def add_common_arguments(to: argparse.ArgumentParser) -> None:
    to.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the JSON files")
    to.add_argument("--text", choices=TEXTS, help=f"(default: {Config.text})")
    to.add_argument("--batch", type=int, help=f"sequences a step (default: {Config.batch})")
    to.add_argument("--eval-every", type=int, metavar="STEPS", help="(default: {} pretrain, {} finetune)".format(
        *(DEFAULTS[mode, False].eval_every for mode in MODES)))
    to.add_argument("--qk-norm", action=argparse.BooleanOptionalAction, default=False,
                    help="normalize rows of q and k before attention (default: no)")
    to.add_argument("--compile", action="store_true", help="torch.compile the model")
    to.add_argument("--tiny", action="store_true", help="2 layers of width 128, 128 tokens, few steps")


def config_of(args: argparse.Namespace) -> Config:
    """The mode's defaults, and over them what the command line gives."""
    default = DEFAULTS[args.command, args.tiny]
    given = {name: getattr(args, name) for name in ("attention", "text", "seed", "steps", "rate", "batch",
                                                    "eval_every", "qk_norm", "compile")}
    return replace(default, **{name: value for name, value in given.items() if value is not None})


# --- text -------------------------------------------------------------------------------------------------------------


def sources(text: str) -> list[Path]:
    """The files of a text. Those of the standard library are with its tests, which are most of it: without them a run
    would read each byte eight times."""
    paths = sysconfig.get_paths()
    if text == "stdlib":
        root = Path(paths["stdlib"])
        return [path for path in root.rglob("*.py")
                if not {"site-packages", "dist-packages"} & set(path.relative_to(root).parts)]
    folders = {Path(folder).resolve() for folder in (paths["purelib"], paths["platlib"], *site.getsitepackages())}
    found = {path for folder in folders for kind in ("*.py", "*.rst") for path in folder.rglob(kind)}
    return [path for path in found if path.is_file()]  # a folder's name may end so, and a link lead nowhere


def split_text(text: str) -> dict[str, bytes]:
    """Half A, half B and the part held out: whole files, each content once, in the order of their hashes."""
    contents = {hashlib.sha256(file).digest(): file for file in (path.read_bytes() for path in sources(text))}
    files = [contents[key] for key in sorted(contents)]
    total = sum(map(len, files))
    ends = {"pretrain": (1 - HELD_OUT) / 2 * total, "finetune": (1 - HELD_OUT) * total, "held out": total}
    parts: dict[str, list[bytes]] = {name: [] for name in ends}
    so_far = 0
    for file in files:
        so_far += len(file)
        parts[next(name for name, end in ends.items() if so_far <= end)].append(file)
    return {name: b"".join(part) for name, part in parts.items()}


def describe_text(parts: dict[str, bytes]) -> dict[str, object]:
    """Bytes of each part, and a hash that tells texts of different Pythons apart."""
    return {"bytes": {name: len(part) for name, part in parts.items()},
            "sha256": hashlib.sha256(b"".join(parts.values())).hexdigest()}


def on_device(text: bytes, device: torch.device) -> torch.Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)


def windows(text: torch.Tensor, starts: torch.Tensor, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets [windows, context]: the bytes from each start on, and those one further."""
    rows = text[starts[:, None] + torch.arange(context + 1, device=text.device)].long()
    return rows[:, :-1], rows[:, 1:]


def draw_starts(config: Config, length: int, device: torch.device) -> torch.Tensor:
    """Draw the start of each sequence of each step, [steps, batch]: by the seed alone, the same on every device."""
    generator = torch.Generator().manual_seed(config.seed)
    return torch.randint(length - config.context, (config.steps, config.batch), generator=generator).to(device)


# --- model ------------------------------------------------------------------------------------------------------------


def attention_of(name: str) -> Attend:
    if name == "bf16":
        return partial(F.scaled_dot_product_attention, is_causal=True)
    import sage_aot  # here, because a bf16 run needs no more of the package than bench/common.py does

    return partial(sage_aot.train_attn, is_causal=True)


def rotations(context: int, headdim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [context, headdim] that rotate channel i together with channel i + headdim/2."""
    frequencies = 10000.0 ** (-torch.arange(0, headdim, 2) / headdim)
    angles = torch.outer(torch.arange(context), frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


class Layer(nn.Module):
    def __init__(self, index: int, config: Config) -> None:
        super().__init__()
        width = config.width
        self.headdim = 64 if index % 2 == 0 else 128
        self.before_attention, self.before_mlp = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        self.q_norm, self.k_norm = (nn.RMSNorm(self.headdim) if config.qk_norm else nn.Identity() for _ in range(2))
        for name, table in zip(("cos", "sin"), rotations(config.context, self.headdim)):
            self.register_buffer(name, table, persistent=False)

    def forward(self, x: torch.Tensor, attend: Attend) -> torch.Tensor:
        split = self.qkv(self.before_attention(x)).unflatten(-1, (3, -1, self.headdim))
        q, k, v = split.permute(2, 0, 3, 1, 4)
        q, k = (self.rotate(norm(x.float())).to(v.dtype) for norm, x in ((self.q_norm, q), (self.k_norm, k)))
        x = x + self.out(attend(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.before_mlp(x))))

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        """Rotary positions; rows [seq, headdim] of f32."""
        first, second = x.chunk(2, -1)
        return x * self.cos + torch.cat((-second, first), -1) * self.sin


class Model(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, config.width)
        self.layers = nn.ModuleList(Layer(i, config) for i in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, BYTES, bias=False)

    def forward(self, tokens: torch.Tensor, attend: Attend) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, attend)
        return self.head(self.norm(x))


def initial_model(config: Config) -> Model:
    """Weights N(0, 0.02²), less in layers that add to the residual stream; drawn on the CPU, so everywhere the same."""
    model = Model(config)
    generator = torch.Generator().manual_seed(config.seed)
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            size = 0.02 / math.sqrt(2 * config.layers) if name.endswith(("out.weight", "down.weight")) else 0.02
            nn.init.normal_(weight, std=size, generator=generator)
        elif name.endswith("bias"):
            nn.init.zeros_(weight)
    return model


# --- a run ------------------------------------------------------------------------------------------------------------


def train(config: Config, weights: Path | None) -> dict[str, object]:
    """Train, printing as it goes; returns what the JSON file holds."""
    begin = time.perf_counter()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    parts = split_text(config.text)
    text = describe_text(parts)
    header = common.header(common.use_kernels(None)) | {"python": platform.python_version()}
    common.print_header({"run": config.name} | header | {"config": str(asdict(config)), "text": str(text)})

    model = initial_model(config)
    if config.mode == "finetune":
        load_weights(model, weights, config, text)
    model.to(device)
    forward = torch.compile(model) if config.compile else model
    held_out = on_device(parts["held out"], device)
    evals: list[dict[str, object]] = []

    def evaluate(step: int, attention: str) -> None:
        bits = bits_per_byte(forward, attention_of(attention), held_out, config)
        evals.append({"step": step, "attention": attention, "bits": bits})
        print(f"step {step}: held out {bits:.5f} bits per byte with {attention} attention", flush=True)

    text_on_device = on_device(parts[config.mode], device)
    curve = optimize(forward, config, text_on_device, partial(evaluate, attention=config.attention))
    if config.attention != "bf16":
        evaluate(config.steps, "bf16")
    if config.mode == "pretrain" and weights is not None:
        torch.save({"config": asdict(config), "text": text, "weights": model.state_dict()}, weights)
    return {"config": asdict(config), "header": header, "text": text,
            "parameters": sum(weight.numel() for weight in model.parameters()),
            "tokens_per_step": config.batch * config.context,
            "ms_per_step": median(point["ms"] for point in curve),
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None,
            "seconds": time.perf_counter() - begin, "curve": curve, "evals": evals}


def load_weights(model: Model, path: Path, config: Config, text: dict[str, object]) -> None:
    """The weights of a bf16 run of `pretrain` of this model on half A of this text; anything else ends the program."""
    saved = torch.load(path, weights_only=True)
    theirs = Config(**saved["config"])
    if (theirs.attention, theirs.model, saved["text"]) != ("bf16", config.model, text):
        sys.exit(f"{path}: expected weights of a bf16 run with layers, width and QK-norm {config.model} on this "
                 f"text, {text}, got those of {theirs} on {saved['text']}; run pretrain again")
    model.load_state_dict(saved["weights"])


def optimize(model: nn.Module, config: Config, text: torch.Tensor,
             evaluate: Callable[[int], None]) -> list[dict[str, float]]:
    """All steps; returns averages over intervals of `log_every` steps. Only their ends wait for the GPU."""
    attend = attention_of(config.attention)
    starts = draw_starts(config, len(text), text.device)
    optimizer = make_optimizer(model, config)
    curve: list[dict[str, float]] = []
    evaluate(0)
    sums, begun, since = torch.zeros(2, device=text.device), 0, time.perf_counter()
    for step in range(config.steps):
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, config)
        loss = loss_of(model, attend, *windows(text, starts[step], config.context))
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        sums += torch.stack((loss.detach() / math.log(2), norm))
        done = step + 1
        if done % config.log_every == 0 or done == config.steps:
            bits, gradient = (sums / (done - begun)).tolist()
            ms = 1000 * (time.perf_counter() - since) / (done - begun)
            curve.append({"step": done, "bits": bits, "gradient_norm": gradient, "ms": ms})
            print(f"step {done}: {bits:.5f} bits per byte, gradient {gradient:.3f}, {ms:.1f} ms a step", flush=True)
            sums, begun, since = torch.zeros_like(sums), done, time.perf_counter()
        if done % config.eval_every == 0 or done == config.steps:
            paused = time.perf_counter()
            evaluate(done)
            since += time.perf_counter() - paused
    return curve


def make_optimizer(model: nn.Module, config: Config) -> torch.optim.AdamW:
    """AdamW; biases and the weights of norms do not decay."""
    matrices, others = ([weight for weight in model.parameters() if (weight.dim() == 2) is is_matrix]
                        for is_matrix in (True, False))
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.rate, betas=BETAS, fused=True)


def rate_at(step: int, config: Config) -> float:
    """Linear warm-up, then half a cosine down to FINAL_RATE."""
    if step < config.warmup:
        return config.rate * (step + 1) / config.warmup
    progress = (step - config.warmup) / max(1, config.steps - config.warmup)
    return config.rate * (FINAL_RATE + (1 - FINAL_RATE) * (1 + math.cos(math.pi * progress)) / 2)


def loss_of(model: nn.Module, attend: Attend, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in nats."""
    with torch.autocast(tokens.device.type, torch.bfloat16):
        logits = model(tokens, attend)
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


@torch.no_grad()
def bits_per_byte(model: nn.Module, attend: Attend, text: torch.Tensor, config: Config) -> float:
    """Mean over windows that are spread evenly over the text, in whole batches, so that compiled code has one shape."""
    count = max(1, min(config.eval_windows, len(text) // config.context) // config.batch) * config.batch
    starts = torch.linspace(0, len(text) - config.context - 1, count, dtype=torch.float64).long().to(text.device)
    losses = [loss_of(model, attend, *windows(text, part, config.context)) for part in starts.split(config.batch)]
    return torch.stack(losses).mean().item() / math.log(2)


# --- all runs ---------------------------------------------------------------------------------------------------------


def run_all(args: argparse.Namespace) -> int:
    """A process per GPU takes run after run; `finetune` waits for the weights of the first run, which starts first."""
    begin = time.perf_counter()
    devices = visible_devices()
    first, *others = commands_of(args)
    print(f"{1 + len(others)} runs on {len(devices)} device(s); logs in {args.out}", flush=True)
    free: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    for device in devices:
        free.put(device)
    with ThreadPoolExecutor(len(devices)) as pool:
        weights = pool.submit(run_one, first, free)
        rest = [pool.submit(lambda command: (command[0] != "finetune" or weights.result()) and run_one(command, free),
                            command) for command in others]
        succeeded = all([weights.result(), *(run.result() for run in rest)])
    print(f"all took {time.perf_counter() - begin:.0f} s\n\n{summary(load_runs(args.out))}")
    return 0 if succeeded else 1


def visible_devices() -> list[str | None]:
    """Values of CUDA_VISIBLE_DEVICES, one for each GPU; without GPUs one None, the CPU."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return (named.split(",") if named else [str(i) for i in range(torch.cuda.device_count())]) or [None]


def commands_of(args: argparse.Namespace) -> list[list[str]]:
    """The arguments of every run; first the one whose weights `finetune` needs, then the other long ones."""
    weights = args.weights or args.out / f"pretrain-bf16-seed{args.seeds[0]}.pt"
    first = ("pretrain", "bf16", args.seeds[0])
    runs = [(mode, attention, seed) for mode in MODES for seed in args.seeds for attention in args.attentions]
    shared = ["--out", str(args.out)] + [f"--{name.replace('_', '-')}" for name in ("qk_norm", "compile", "tiny")
                                         if getattr(args, name)]
    for name in ("text", "batch", "eval_every"):
        if (value := getattr(args, name)) is not None:
            shared += [f"--{name.replace('_', '-')}", str(value)]
    result = []
    for mode, attention, seed in [first] + [run for run in runs if run != first]:
        command = [mode, "--attention", attention, "--seed", str(seed), *shared]
        if (steps := getattr(args, f"{mode}_steps")) is not None:
            command += ["--steps", str(steps)]
        if mode == "finetune" or (mode, attention, seed) == first:
            command += ["--weights", str(weights)]
        result.append(command)
    return result


def run_one(command: list[str], free: queue.SimpleQueue[str | None]) -> bool:
    """Run on a device that is free, unless the file is there already; whether it succeeded."""
    args = parser().parse_args(command)
    config = config_of(args)
    if is_done(config, args):
        print(f"{config.name}: is there already", flush=True)
        return True
    device = free.get()
    environment = os.environ | ({} if device is None else {"CUDA_VISIBLE_DEVICES": device})
    begin, log = time.perf_counter(), args.out / f"{config.name}.log"
    try:
        with log.open("w") as file:
            code = subprocess.run([sys.executable, __file__, *command], env=environment, stdout=file,
                                  stderr=subprocess.STDOUT).returncode
    finally:
        free.put(device)
    lines = log.read_text().splitlines() or [""]
    print(f"{config.name}: exit code {code}, {time.perf_counter() - begin:.0f} s; {lines[-1]}", flush=True)
    return code == 0


def is_done(config: Config, args: argparse.Namespace) -> bool:
    """True where a file of this configuration is there, and the weights that the run was to leave."""
    path = args.out / f"{config.name}.json"
    if config.mode == "pretrain" and args.weights is not None and not args.weights.exists():
        return False
    return path.exists() and json.loads(path.read_text())["config"] == asdict(config)


# --- summary ----------------------------------------------------------------------------------------------------------


def load_runs(folder: Path) -> list[dict]:
    """Load what the runs of a folder wrote; end the program where there are none, or runs that cannot be compared."""
    runs = [json.loads(path.read_text()) for mode in MODES for path in sorted(folder.glob(f"{mode}-*.json"))]
    if not runs:
        sys.exit(f"{folder}: expected files such as {Config().name}.json, found none")
    for mode in MODES:
        conditions = {json.dumps([run["config"] | {"attention": "", "seed": 0}, run["text"]["sha256"]], sort_keys=True)
                      for run in runs if run["config"]["mode"] == mode}
        if len(conditions) > 1:
            sys.exit(f"{folder}: expected {mode} runs of one configuration and text, got\n" + "\n".join(conditions))
    return runs


def final_bits(run: dict) -> dict[str, float]:
    """Bits per byte at the end: held out by attention of the evaluation, and in training over the last intervals."""
    config = run["config"]
    last = {entry["attention"]: entry["bits"] for entry in run["evals"] if entry["step"] == config["steps"]}
    tail = run["curve"][-max(1, len(run["curve"]) // 10):]
    return {"held out, own attention": last[config["attention"]], "held out, bf16 attention": last["bf16"],
            "training, last tenth": mean(point["bits"] for point in tail)}


def summary(runs: list[dict]) -> str:
    """A row per mode, measure and attention, with every seed; then the comparisons, a line each."""
    seeds = sorted({run["config"]["seed"] for run in runs})
    lines = [common.table_head(["mode", "bits per byte", "attention", *(f"seed {seed}" for seed in seeds), "mean",
                                "max − min", "std", "ms a step", "s a run"], 3)]
    verdicts = []
    for mode in MODES:
        of_mode = [run for run in runs if run["config"]["mode"] == mode]
        for measure in final_bits(of_mode[0]) if of_mode else ():
            found = {attention: {run["config"]["seed"]: final_bits(run)[measure] for run in of_mode
                                 if run["config"]["attention"] == attention} for attention in ATTENTIONS}
            lines += [row(mode, measure, attention, [by_seed.get(seed) for seed in seeds],
                          *(median(run[name] for run in of_mode if run["config"]["attention"] == attention)
                            for name in ("ms_per_step", "seconds")))
                      for attention, by_seed in found.items() if by_seed]
            if all(found.values()):
                verdicts.append(f"- {mode}, {measure}: {verdict(found['sage'], found['bf16'])}")
    return "\n".join([*lines, "", *verdicts])


def row(mode: str, measure: str, attention: str, bits: list[float | None], ms: float, seconds: float) -> str:
    known = [value for value in bits if value is not None]
    spread = [mean(known), max(known) - min(known), stdev(known) if len(known) > 1 else None]
    return common.table_row([mode, measure, attention, *formatted(bits), *formatted(spread), f"{ms:.1f}",
                             f"{seconds:.1f}"])


def formatted(values: Iterable[float | None]) -> list[str | None]:
    return [None if value is None else f"{value:.4f}" for value in values]


def verdict(sage: dict[int, float], bf16: dict[int, float]) -> str:
    """Place of the mean of sage among the seeds of bf16, and the difference of each pair of one seed, in words."""
    low, high = min(bf16.values()), max(bf16.values())
    ours = mean(sage.values())
    where = "within" if low <= ours <= high else "below" if ours < low else "NOT within"  # NaN is not within
    pairs = [sage[seed] - bf16[seed] for seed in sorted(sage.keys() & bf16.keys())]
    differences = ", ".join(f"{pair:+.4f}" for pair in pairs) + (f", mean {mean(pairs):+.4f}" if pairs else "")
    return (f"the mean of sage, {ours:.4f}, is {where} the spread of bf16's seeds, {low:.4f} to {high:.4f}; "
            f"sage − bf16 by seed: {differences}")


if __name__ == "__main__":
    common.run(main)
