"""Two models of random weights, each as a pruned and as a dense ONNX graph of the same exporter.

One is a whole model of a few hundred MB, the other the same attention in a model of next to no other weights:
its step is what attention takes. The dense graph is that of a mask without a pruned region, all tokens in one
window.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from leank_convert.benchmark.geometries import Geometry
from leank_convert.benchmark.models import stock_config
from leank_convert.benchmark.subject import Subject
from leank_convert.errors import LeanKError
from leank_convert.head_layout import plan_head_layout
from leank_convert.mask import ChannelMask

MODELS = ("attention", "step")
SIDES = ("dense", "leank")
# At most these, so that a toy stays one. The step's make 373 MB of four of Llama's layers.
_SIZES = {
    "attention": {"hidden_size": 32, "intermediate_size": 32, "vocab_size": 64},
    "step": {"hidden_size": 1024, "intermediate_size": 2816, "vocab_size": 8192},
}
_LAYERS = 4


def choose_layers(subject: Subject, layers: Sequence[int] | None) -> list[int]:
    """The layers to measure: those asked for, else one of each quarter of the depth.

    Of all such choices the one whose pruned region takes the share that is closest to the whole mask's.

    Raises:
        LeanKError: If there is no such layer.
    """
    num_layers = subject.geometry.facts.num_hidden_layers
    if layers is not None:
        wrong = [layer for layer in layers if not 0 <= layer < num_layers]
        if wrong:
            raise LeanKError(f"there is no layer {wrong[0]}: `{subject.geometry.name}` has {num_layers}")
        return list(layers)
    taken = [pruned_numbers(subject.mask.channel_mask[layer]) for layer in range(num_layers)]
    mean = sum(taken) / num_layers
    parts = min(_LAYERS, num_layers)
    bounds = [num_layers * part // parts for part in range(parts + 1)]
    choices = itertools.product(*(range(a, b) for a, b in itertools.pairwise(bounds)))
    return list(min(choices, key=lambda choice: abs(sum(taken[layer] for layer in choice) / parts - mean)))


def pruned_numbers(masks: Tensor) -> int:
    """Numbers that a pruned token takes in heads of masks `[..., D]`: kept channels, and V unless none is."""
    widths = masks.sum(-1)
    return int((widths + masks.shape[-1] * (widths > 0)).sum())


def count_whole_mask(subject: Subject, lengths: Sequence[int]) -> dict[str, Any]:
    """The share of dense bytes that the whole mask's cache takes, the window counted, and where it leads."""
    facts, windows = subject.geometry.facts, subject.windows
    heads = facts.num_hidden_layers * facts.num_key_value_heads
    pruned = pruned_numbers(subject.mask.channel_mask)
    dense = heads * 2 * facts.head_dim
    slots = windows.sink_size + windows.recent_size + windows.flush_size
    kept_whole = windows.sink_size + windows.recent_size

    def count(tokens: int) -> float:
        return (dense * slots + pruned * max(tokens - kept_whole, 0)) / (dense * tokens)

    percent = 100 * pruned // dense + 1
    # Solved for the tokens at which `count` is that percentage.
    reached = -(-100 * (dense * slots - pruned * kept_whole) // (percent * dense - 100 * pruned))
    return {
        "cache_share": {str(tokens): count(tokens) for tokens in lengths},
        "limit": pruned / dense,
        "next_percent": percent / 100,
        "reached_from_tokens": max(reached, kept_whole),
    }


def take_layers(subject: Subject, layers: Sequence[int]) -> Subject:
    """The same mask and shape with some of the layers."""
    config = {**subject.geometry.config, "num_hidden_layers": len(layers)}
    mask = ChannelMask(subject.mask.channel_mask[list(layers)], provenance=None)
    return replace(subject, mask=mask, geometry=replace(subject.geometry, config=config))


def build_stock(geometry: Geometry, name: str, seed: int) -> Any:
    """The stock class with random weights in float32; `name` is one of `MODELS`."""
    import transformers

    sizes = {key: min(value, geometry.config[key]) for key, value in _SIZES[name].items()}
    config = {**geometry.config, "head_dim": geometry.facts.head_dim, **sizes}
    # Queries of about unit size, so that attention is far from uniform and an error would be seen.
    scale = sizes["hidden_size"] ** -0.5
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            stock_config(replace(geometry, config=config), initializer_range=scale), dtype=torch.float32
        )
    return model.eval().requires_grad_(False)


def weight_bytes(model: Any, weights: str | None = None) -> int:
    """Bytes of the weights that a step of one token reads: all but the embedding's other rows.

    Quantized `weights`, a key of `SCHEMES`, count as they are stored; the output's are stored for themselves.
    """
    if weights is not None:
        from leank_convert.onnx.quantize import linear_bytes, quantized_bytes

        return weight_bytes(model) - linear_bytes(model) + quantized_bytes(model, weights)
    total = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    embedding = model.get_input_embeddings().weight
    if model.get_output_embeddings().weight is embedding:
        return int(total)
    return int(total - embedding.numel() * embedding.element_size())


def export_side(model: Any, subject: Subject, side: str, folder: Path, weights: str | None) -> Path:
    """Write a model's graph; `side` is one of `SIDES`, `weights` a key of `SCHEMES` or None for float32."""
    from leank_convert.onnx import export_graph
    from leank_convert.onnx.leank_onnx import MODEL_FILE
    from leank_convert.onnx.pruned_model import PrunedModel

    masks = torch.stack(subject.channel_masks)
    windows = subject.windows
    pruned = PrunedModel(
        model,
        torch.zeros_like(masks) if side == "dense" else masks,
        windows.sink_size,
        windows.recent_size,
        windows.flush_size,
    )
    folder.mkdir()
    export_graph(pruned, folder, weights=weights)
    return folder / MODEL_FILE


def widths_of(subject: Subject) -> list[list[int]]:
    """Kept channels [L][H_kv], ascending within a layer."""
    return [list(row) for row in plan_head_layout(subject.mask.widths).widths]
