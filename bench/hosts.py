"""Blocks of real models at their full width, with the attention of their host and with sage_aot.

    python bench/hosts.py
    python bench/hosts.py --only wan,llama

Weights are random, bf16. Blocks of diffusers and transformers are switched as docs/integrations.md says, and run three
ways: eager, as a CUDA graph, and by torch.compile(fullgraph=True). `sdpa` is the host's own attention, for which torch
chooses a backend. `difference` is ‖a − b‖ / ‖b‖ of a block's outputs, a with sage_aot, b with the host's attention. The
reports say what of an eager run sage_aot served.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import diffusers
import torch
import transformers

import common
from sage_aot._tools.reference import relative_l2
from sage_aot.integrations import diffusers as sage_diffusers
from sage_aot.integrations import report, reset_report
from sage_aot.integrations import transformers as sage_transformers

COLUMNS = ("block", "tokens", "run", "sdpa, ms", "sage_aot, ms", "×", "difference")
ROUNDS = 7
WAN_480P, WAN_720P = (21, 60, 104), (21, 90, 160)
"""Latents of 81 frames: 32,760 and 75,600 tokens."""


@dataclass(frozen=True)
class Block:
    """A block of a model, and the arguments that the model gives it."""

    name: str
    tokens: int
    model: torch.nn.Module
    module: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self) -> torch.Tensor:
        out = self.module(*self.args, **self.kwargs)
        return out if isinstance(out, torch.Tensor) else out[-1]  # Flux's double block returns text, then image

    @contextmanager
    def served(self) -> Iterator[None]:
        """The block with sage_aot's attention."""
        if isinstance(self.model, transformers.PreTrainedModel):
            before = sage_transformers.enable(self.model)
            try:
                yield
            finally:
                self.model.set_attn_implementation(before)
        else:
            sage_diffusers.enable(self.model)
            try:
                yield
            finally:
                sage_diffusers.disable(self.model)


def wan(latent: tuple[int, int, int] = WAN_480P, layers: int = 1) -> tuple[torch.nn.Module, dict[str, Any]]:
    """Wan 2.1 14B, shortened, and its inputs: 40 heads of 128 channels, 512 tokens of text."""
    model = made(diffusers.WanTransformer3DModel, num_layers=layers)
    inputs = {"hidden_states": draw(1, 16, *latent), "encoder_hidden_states": draw(1, 512, 4096),
              "timestep": torch.tensor([500.0], device="cuda")}
    return model, inputs


def flux() -> tuple[torch.nn.Module, dict[str, Any]]:
    """Flux.1, one block of each kind, at 1024²: 24 heads of 128 channels, 4,096 tokens and 512 of text."""
    model = made(diffusers.FluxTransformer2DModel, num_layers=1, num_single_layers=1)
    place = torch.arange(64, device="cuda")
    image = torch.stack([torch.zeros(64, 64, device="cuda"), *torch.meshgrid(place, place, indexing="ij")], -1)
    inputs = {"hidden_states": draw(1, 4096, 64), "encoder_hidden_states": draw(1, 512, 4096),
              "pooled_projections": draw(1, 768), "timestep": torch.tensor([0.5], device="cuda"),
              "img_ids": image.reshape(4096, 3), "txt_ids": torch.zeros(512, 3, device="cuda")}
    return model, inputs


def llama(tokens: int) -> tuple[torch.nn.Module, dict[str, Any]]:
    """Llama 3 8B, shortened, reading a prompt: 32 heads of 128 channels, 8 of K and V."""
    config = transformers.LlamaConfig(hidden_size=4096, intermediate_size=14336, num_hidden_layers=1, vocab_size=256,
                                      num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=2**17,
                                      rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    return made(transformers.LlamaModel, config), {"input_ids": torch.randint(0, 256, (1, tokens), device="cuda"),
                                                   "use_cache": False}


def made(kind: type, *args: Any, **config: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    with torch.device("cuda"):
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            return kind(*args, **config).eval().requires_grad_(False)
        finally:
            torch.set_default_dtype(default)


def draw(*shape: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(sum(shape))
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator)


def blocks(only: list[str]) -> Iterator[Block]:
    """The blocks one after another, so that one model at a time takes memory."""
    if "wan" in only:
        for latent, tokens in ((WAN_480P, 32760), (WAN_720P, 75600)):
            model, inputs = wan(latent)
            yield recorded("Wan 14B", tokens, model, model.blocks[0], inputs)
    if "flux" in only:
        model, inputs = flux()
        yield recorded("Flux, double", 4608, model, model.transformer_blocks[0], inputs)
        yield recorded("Flux, single", 4608, model, model.single_transformer_blocks[0], inputs)
    if "llama" in only:
        for tokens in (8192, 32768):
            model, inputs = llama(tokens)
            yield recorded("Llama 3 8B", tokens, model, model.layers[0], inputs)


def recorded(name: str, tokens: int, model: torch.nn.Module, module: torch.nn.Module, inputs: dict[str, Any]) -> Block:
    """A block with the arguments that one run of its model gives it."""
    seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    with module.register_forward_pre_hook(lambda _, args, kwargs: seen.append((args, kwargs)), with_kwargs=True):
        model(**inputs)
    return Block(name, tokens, model, module, *seen[0])


# --- the ways to run a block ------------------------------------------------------------------------------------------


def as_graph(block: Block) -> Callable[[], torch.Tensor]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        block.run()  # the first call loads kernels, which a capture cannot
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = block.run()

    def replay() -> torch.Tensor:
        graph.replay()
        return out

    return replay


def compiled(block: Block) -> Callable[[], torch.Tensor]:
    compiled_module = torch.compile(block.module, fullgraph=True)
    run = Block(block.name, block.tokens, block.model, compiled_module, block.args, block.kwargs).run
    run()
    return run


WAYS: dict[str, Callable[[Block], Callable[[], torch.Tensor]]] = {
    "eager": lambda block: block.run, "CUDA graph": as_graph, "compiled": compiled}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=common.words, default="wan,flux,llama", help="(default: %(default)s)")
    arguments = parser.parse_args()
    common.require_cuda()
    versions = {"diffusers": diffusers.__version__, "transformers": transformers.__version__}
    common.print_header(common.header(common.use_kernels(None)) | versions)
    print(common.table_head(COLUMNS, 1))
    reports = []
    with torch.inference_mode():
        for block in blocks(arguments.only):
            for way, prepare in WAYS.items():
                print(common.table_row(row(block, way, prepare)), flush=True)
            with block.served():
                reset_report()
                block.run()
                reports.append(f"{block.name}, {block.tokens} tokens: {report()}")
            del block
            torch.cuda.empty_cache()
    print("\n" + "\n".join(reports))
    return 0


def row(block: Block, way: str, prepare: Callable[[Block], Callable[[], torch.Tensor]]) -> list[object]:
    """Both attentions in turns, so that they meet the same clocks."""
    torch.compiler.reset()
    host = prepare(block)
    expected = host().clone()
    with block.served():
        ours = prepare(block)
        difference = relative_l2(ours(), expected)
    host_ms, our_ms = [], []
    for _ in range(ROUNDS):
        host_ms.append(milliseconds(host))
        with block.served():
            our_ms.append(milliseconds(ours))
    return [block.name, block.tokens, way, f"{median(host_ms):.3f}", f"{median(our_ms):.3f}",
            f"{median(host_ms) / median(our_ms):.2f}", f"{difference:.1e}"]


def milliseconds(work: Callable[[], object], runs: int = 3) -> float:
    """Time of a run, among some that are queued at once, by events of the GPU; the host's time where that is longer."""
    work()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(runs):
        work()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / runs


if __name__ == "__main__":
    common.run(main)
