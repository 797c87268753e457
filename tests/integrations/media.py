"""Images, videos, sounds and series for models of transformers, as their processors make them: forms of an input by the
names of the arguments of a model's forward. The sizes are those of the model's configuration."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

Model = Any
Inputs = dict[str, Any]

GRID = torch.tensor([[1, 4, 4], [1, 2, 4]])
"""Two images in patches: frames, rows and columns."""


def takes(model: Model, *names: str) -> bool:
    return set(names) <= set(inspect.signature(model.forward).parameters)


def found(config: Any, *names: str) -> Iterator[Any]:
    """The values of these names, of a configuration first, and then of its parts."""
    yield from (value for name in names if (value := getattr(config, name, None)) is not None)
    for part in config.sub_configs:
        if getattr(config, part, None) is not None:
            yield from found(getattr(config, part), *names)


def number(config: Any, default: int, *names: str) -> int:
    """The first of these values that is a number, or the first of a list of numbers."""
    numbers = (value[0] if isinstance(value, (list, tuple)) and value else value for value in found(config, *names))
    return next((value for value in numbers if isinstance(value, int) and value > 0), default)


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2))


def tokens(length: int) -> torch.Tensor:
    return torch.randint(3, 60, (2, length), generator=torch.Generator().manual_seed(1))


class _Vision:
    """The sizes of a model's images."""

    def __init__(self, model: Model):
        config = getattr(model.config, "vision_config", None) or model.config
        self.channels = number(config, 3, "num_channels", "in_channels", "in_chans")
        self.patch = number(config, 8, "patch_size")
        self.frames = number(config, 1, "temporal_patch_size", "tubelet_size", "patch_temporal")
        self.merge = number(model.config, 1, "spatial_merge_size", "merge_size", "downsample_factor")
        size = next(found(config, "image_size", "img_size", "input_size"), 32)
        self.height, self.width = (size, size) if isinstance(size, int) else size
        self.pixels = self.channels * self.frames * self.patch ** 2


def images(model: Model) -> Iterator[Inputs]:
    """Whole images, or videos of a few frames."""
    of = _Vision(model)
    frames = number(model.config, 4, "num_frames", "frames_per_clip")
    yield {"pixel_values": noise(2, of.channels, of.height, of.width)}
    for name in "pixel_values", "pixel_values_videos":
        yield {name: noise(2, frames, of.channels, of.height, of.width)}


def patches(model: Model) -> Iterator[Inputs]:
    """Two images of different sizes: their patches in a row, or a row of a batch for each, the second with padding."""
    of, sizes = _Vision(model), GRID.prod(-1).tolist()
    known = {"grid_thw": GRID, "image_grid_thw": GRID, "target_sizes": GRID[:, 1:],
             "merge_sizes": torch.full((2,), of.merge)}
    if grids := {name: grid for name, grid in known.items() if takes(model, name)}:
        count = sum(sizes)
        shapes = ((count, of.pixels), (count, of.channels, of.patch, of.patch),
                  (count, of.channels, of.frames, of.patch, of.patch), (1, of.channels, of.patch, count * of.patch))
        yield from ({name: noise(*shape), **grids} for name in ("hidden_states", "pixel_values") for shape in shapes)
    rows = noise(2, max(sizes), of.pixels)
    mask = (torch.arange(max(sizes)) < torch.tensor(sizes)[:, None]).long()
    places = torch.cartesian_prod(torch.arange(4), torch.arange(4)).expand(2, -1, -1)
    text = {"input_ids": tokens(24)} if takes(model, "input_ids") else {}
    yield {"pixel_values": rows, "pixel_attention_mask": mask, "spatial_shapes": GRID[:, 1:], **text}
    yield {"pixel_values": rows, "pixel_position_ids": places}
    yield {"flattened_patches": torch.cat([places + 1, rows], -1), "attention_mask": mask}


def images_and_text(model: Model) -> Iterator[Inputs]:
    """An image in each row of text, where the image's tokens stand for it: as many as its patches, merged or not, or as
    the queries that read it."""
    of = _Vision(model)
    side = of.height // of.patch
    token = number(model.config, 0, "image_token_id", "image_token_index")
    longest = number(model.config.get_text_config(), 128, "max_position_embeddings")
    if takes(model, "image_grid_thw"):
        counts = [(GRID.prod(-1) // of.merge ** 2).tolist()]
        pixels = [{"pixel_values": noise(int(GRID.prod(-1).sum()), of.pixels), "image_grid_thw": GRID}]
    else:
        queries = [*found(model.config, "num_query_tokens", "image_seq_length", "mm_tokens_per_image",
                            "latent_query_num")]
        counts = [[count] * 2 for count in dict.fromkeys((side ** 2, side ** 2 // of.merge ** 2, *queries))]
        whole = noise(2, of.channels, of.height, of.width)
        pixels = [{"pixel_values": image} for image in (
            whole, whole[:, None], whole[:, None].expand(-1, number(model.config, 4, "num_frames"), -1, -1, -1))]
    for (first, second), image in itertools.product(counts, pixels):
        text = tokens(min(longest, max(24, max(first, second) + 8)))
        seen = torch.zeros_like(text)
        seen[0, 1:1 + first] = seen[1, 1:1 + second] = 1
        more = {"mm_token_type_ids": seen, "image_embeds_position_mask": seen.bool(), "qformer_input_ids": tokens(6),
                "image_sizes": torch.tensor([[of.height, of.width]] * 2),
                "bbox": torch.tensor([0.1, 0.2, 0.5, 0.9]).expand(*text.shape, 4),
                "image_attention_mask": torch.ones(*text.shape, 1, dtype=torch.long)}
        yield {"input_ids": text.masked_fill(seen.bool(), token) if token else text, **image,
               "attention_mask": torch.ones_like(text), **{name: more[name] for name in more if takes(model, name)}}


def sounds(model: Model) -> Iterator[Inputs]:
    """Samples of a wave."""
    waves = torch.randn(2, 4000, generator=torch.Generator().manual_seed(3))
    yield {"input_values": waves}
    yield {"input_values": waves[:, None]}
    yield {"input_values": waves[:, None, :3840]}
    yield {"input_values": waves[:, :3840]}
    yield {"input_values": waves[:, None], "input_ids": tokens(24)}


def spectra(model: Model) -> Iterator[Inputs]:
    """Frames of a sound's spectrum, of as many frames and frequencies as the configuration tells, in either order."""
    config = model.config
    bins = dict.fromkeys([*found(config, "num_mel_bins", "feature_size", "n_mels", "feature_projection_input_dim",
                                 "input_feat_size", "input_dim", "input_size"),
                          *(4 * number for number in found(config, "num_mel_bins")), 80, 128])
    frames = dict.fromkeys([*(2 * number for number in found(config, "max_source_positions")),
                            *found(config, "max_length"), 64, 200])
    for length, channels, swapped in itertools.product(frames, bins, (False, True)):
        features = torch.randn(2, length, channels, generator=torch.Generator().manual_seed(3))
        mask = torch.ones(2, length, dtype=torch.bool)
        for name, of_mask in (("input_features", "input_features_mask"), ("audio_mel", "audio_mel_mask"),
                              ("input_values", "")):
            text = {"input_ids": tokens(length // 8)} if takes(model, "input_ids") else {}
            yield {name: features.mT if swapped else features, **text,
                   **({of_mask: mask} if takes(model, of_mask) else {})}


def series(model: Model) -> Iterator[Inputs]:
    """Values over time."""
    length = number(model.config, 32, "context_length")
    past = noise(2, length, number(model.config, 1, "num_input_channels"))
    yield {"past_values": past}
    yield {"past_values": past[..., 0]}
    yield {"past_values": past[..., 0], "past_values_padding": torch.zeros(2, length, dtype=torch.long),
           "freq": torch.zeros(2, 1, dtype=torch.long)}


MEDIA: dict[str, Callable[[Model], Iterable[Inputs]]] = {
    "images": images, "images in patches": patches, "images and text": images_and_text, "sounds": sounds,
    "spectra": spectra, "series": series}


def forms(model: Model, of: Callable[[Model], Iterable[Inputs]]) -> Iterator[Inputs]:
    """The forms of an input whose arguments a model's forward has; with a text for its decoder, if it has one."""
    decoder = {"decoder_input_ids": tokens(24)} if model.config.is_encoder_decoder else {}
    more = {name: value for name, value in decoder.items() if takes(model, name)}
    yield from ({**form, **more} for form in of(model) if takes(model, *form))
