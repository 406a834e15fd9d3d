"""What `benchmark onnx` runs: two models of random weights, their graphs, a filled cache, and exact logits.

One model is a whole one of a few hundred MB, the other the same attention in a model of next to no other
weights: its step is what attention takes. Each has a pruned and a dense graph of the same exporter; the dense
one is that of a mask without a pruned region, all tokens in one window.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from leank_convert.benchmark.attention import attend_row, pruned_length, relative_error
from leank_convert.benchmark.geometries import Geometry
from leank_convert.benchmark.models import Subject, stock_config
from leank_convert.head_layout import count_cache_bytes
from leank_convert.mask import ChannelMask
from leank_convert.onnx.graph import attending
from leank_convert.onnx.quantize import linear_bytes, quantized_bytes, round_weights
from leank_convert.windows import Windows

MODELS = ("attention", "step")
SIDES = ("dense", "leank")
# At most these, so that a toy stays one. The step's make 373 MB of four of Llama's layers.
_SIZES = {
    "attention": {"hidden_size": 32, "intermediate_size": 32, "vocab_size": 64},
    "step": {"hidden_size": 1024, "intermediate_size": 2816, "vocab_size": 8192},
}
_LAYERS = 4
_TOKEN = 5
# Sharper than a model's of random weights, so that attention is far from uniform.
_KEY_SCALE = 2.0
_TOLERANCE = 1e-4
# Activations of 8 bits before attention as sharp as here: up to 0.09 was seen; a wrong cache is above 1.
_QUANTIZED_TOLERANCE = 0.2


def choose_layers(subject: Subject, layers: list[int] | None) -> list[int]:
    """The layers to measure: those asked for, else one of each quarter of the depth.

    Of all such choices the one whose pruned region takes the share that is closest to the whole mask's.

    Raises:
        LeanKError: If there is no such layer.
    """
    found = subject.choose_layers(layers)
    if layers is not None:
        return found
    head_dim = subject.geometry.facts.head_dim
    counted = [count_cache_bytes([widths], head_dim, 1) for widths in subject.mask.widths]
    taken = [layer.key_pruned + layer.value_pruned for layer in counted]
    mean = sum(taken) / len(taken)
    parts = min(_LAYERS, len(taken))
    bounds = [len(taken) * part // parts for part in range(parts + 1)]
    choices = itertools.product(*(range(a, b) for a, b in itertools.pairwise(bounds)))
    return list(min(choices, key=lambda choice: abs(sum(taken[layer] for layer in choice) / parts - mean)))


def take_layers(subject: Subject, layers: Sequence[int]) -> Subject:
    """The same mask and shape with some of the layers."""
    config = {**subject.geometry.config, "num_hidden_layers": len(layers)}
    mask = ChannelMask(subject.mask.channel_mask[list(layers)])
    return replace(subject, mask=mask, geometry=replace(subject.geometry, config=config))


def build_stock(geometry: Geometry, name: str, seed: int = 0) -> Any:
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
    total = sum(weight.nbytes for weight in model.parameters())
    embedding = model.get_input_embeddings().weight
    if model.get_output_embeddings().weight is not embedding:
        total -= embedding.nbytes
    if weights is not None:
        total += quantized_bytes(model, weights) - linear_bytes(model)
    return int(total)


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


class FilledCache:
    """Random keys and values, per layer `[1, H_kv, N, D]`, heads in the checkpoint's order.

    Each side's inputs are filled from them, so that both sides and the exact result see the same cache.

    Args:
        subject: The mask and the shape.
        num_tokens: N, the tokens that are cached when the step begins.
        seed: Of the random numbers.
    """

    def __init__(self, subject: Subject, num_tokens: int, seed: int = 1) -> None:
        facts = subject.geometry.facts
        generator = torch.Generator().manual_seed(seed)
        shape = (1, facts.num_key_value_heads, num_tokens, facts.head_dim)
        layers = range(facts.num_hidden_layers)
        self.subject, self.num_tokens = subject, num_tokens
        self.keys = [torch.randn(shape, generator=generator) * _KEY_SCALE for _ in layers]
        self.values = [torch.randn(shape, generator=generator) for _ in layers]
        # The step's own token included, as the flush comes before it.
        self.num_pruned = pruned_length(num_tokens + 1, subject.windows)

    def pruned(self, side: str) -> int:
        """How many tokens are pruned on one of `SIDES`."""
        return 0 if side == "dense" else self.num_pruned

    def slot(self, side: str) -> int:
        """Where the step's token goes in the window."""
        return self.num_tokens if side == "dense" else window_slot(self.num_tokens, self.subject.windows)

    def buffers(self, side: str) -> dict[str, Tensor]:
        """The graph's inputs: the window, and of the pruned side each bucket's kept channels."""
        buffers: dict[str, Tensor] = {}
        windows = self.subject.windows
        if side == "dense":
            # One window with room for the step's token, and larger than the sink.
            tokens, num_slots = torch.arange(self.num_tokens), max(self.num_tokens, windows.sink_size) + 1
            slots = tokens
        else:
            stop = windows.sink_size + self.num_pruned
            tokens = torch.arange(self.num_tokens)
            tokens = tokens[(tokens < windows.sink_size) | (tokens >= stop)]
            num_slots = windows.sink_size + windows.recent_size + windows.flush_size
            slots = torch.tensor([window_slot(token, windows) for token in tokens.tolist()])
        for layer, mask in enumerate(self.subject.channel_masks):
            keys, values = self.keys[layer], self.values[layer]
            if side == "leank":
                # Kept channels first, as the graph has them.
                lanes = (~mask).to(torch.int8).argsort(dim=-1, stable=True)
                keys = keys.gather(3, lanes[None, :, None].expand_as(keys))
            whole = [keys.new_zeros(*keys.shape[:2], num_slots, keys.shape[3]) for _ in "kv"]
            for window, states in zip(whole, (keys, values), strict=True):
                window[:, :, slots] = states[:, :, tokens]
            buffers |= _named(f"past_key_values.{layer}.window", *whole)
            widths = mask.sum(-1)
            for width in set(widths.tolist()) - {0} if side == "leank" else ():
                heads = widths == width
                part = [states[:, heads, windows.sink_size : stop] for states in (keys[..., :width], values)]
                if not self.num_pruned:
                    # A slot even where nothing is pruned yet: it is hidden.
                    part = [states.new_zeros(*states.shape[:2], 1, states.shape[3]) for states in part]
                buffers |= _named(f"past_key_values.{layer}.pruned.{width}", *part)
        return buffers


def window_slot(token: int, windows: Windows) -> int:
    """The window slot of a token while decoding."""
    if token < windows.sink_size:
        return token
    return windows.sink_size + (token - windows.sink_size) % (windows.recent_size + windows.flush_size)


def _named(prefix: str, keys: Tensor, values: Tensor) -> dict[str, Tensor]:
    """Keys as they are, values `[1, n, D, tokens]`."""
    return {f"{prefix}.key": keys.contiguous(), f"{prefix}.value": values.transpose(2, 3).contiguous()}


class BoundStep:
    """One decode step of a graph, run again and again on the same cache, which it reads where it lies.

    A run is what a step of the model is: the graph, and the new token's keys and values put into the cache.

    Args:
        graph: A `leank_onnx.Graph`.
        cache: Keys and values.
        buffers: The side's inputs made of them.
        side: One of `SIDES`.
    """

    def __init__(self, graph: Any, cache: FilledCache, buffers: Mapping[str, Tensor], side: str) -> None:
        integers = {
            "input_ids": [[_TOKEN]],
            "past_lengths": [cache.num_tokens],
            "pruned_lengths": [cache.pruned(side)],
            "logits_index": [[0]],
        }
        self._inputs = {name: np.array(value, np.int64) for name, value in integers.items()}
        self._inputs |= {name: buffer.numpy() for name, buffer in buffers.items()}
        self._outputs = {
            name: np.zeros([size if isinstance(size, int) else 1 for size in shape], np.float32)
            for name, (_, shape) in graph.tensors.items()
            if name not in self._inputs
        }
        self._run = graph.bind(self._inputs, self._outputs)
        slot = cache.slot(side)
        self._written = []
        for layer in range(len(cache.keys)):
            keys, values = (
                self._inputs[f"past_key_values.{layer}.window.{part}"] for part in ("key", "value")
            )
            self._written += [
                (keys[:, :, slot : slot + 1], self._outputs[f"present.{layer}.key"]),
                (values[..., slot : slot + 1], self._outputs[f"present.{layer}.value"]),
            ]

    def run(self) -> None:
        """Run one step."""
        self._run()
        for place, array in self._written:
            place[...] = array

    def logits(self) -> Tensor:
        """A fresh run's logits `[vocabulary]`; what is not written is NaN."""
        self._outputs["logits"][...] = np.nan
        self.run()
        return torch.from_numpy(self._outputs["logits"].copy()).flatten()


def exact_logits(
    model: Any, cache: FilledCache, weights: str | None = None
) -> Callable[[str, Tensor], dict[str, Any]]:
    """Work out the step that follows a cache, by the stock model in float64 and dense keys by the definition.

    Where the graph's weights are quantized, the stock model has the values that they were rounded to: what is
    left is that onnxruntime rounds activations to 8 bits, too.

    Args:
        model: A stock causal LM.
        cache: What it attends to.
        weights: How the graph's weights are quantized, None if they are not.

    Returns:
        What checks a side's logits: `error`, `torch_error` of float32, `tolerance`, and `pruning_effect`, how
        far exact pruned logits are from exact dense ones.
    """
    own = copy.deepcopy(model)
    if weights is not None:
        round_weights(own, weights)
    double = copy.deepcopy(own).double()
    exact, single = ({side: _logits(one, cache, side) for side in SIDES} for one in (double, own))
    tolerance = _TOLERANCE if weights is None else _QUANTIZED_TOLERANCE

    def check(side: str, logits: Tensor) -> dict[str, Any]:
        error = relative_error(logits, exact[side])
        return {
            "error": error if math.isfinite(error) else None,
            "torch_error": relative_error(single[side], exact[side]),
            "pruning_effect": relative_error(exact[side], exact["dense"]),
            "tolerance": tolerance,
            "ok": error <= tolerance,  # NaN never is
        }

    return check


def _logits(model: Any, cache: FilledCache, side: str) -> Tensor:
    masks, sink_size = cache.subject.channel_masks, cache.subject.windows.sink_size

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, None]:
        layer = module.layer_idx
        keys, values = (
            torch.cat([stored[layer].to(query), new], dim=2)
            for stored, new in ((cache.keys, key), (cache.values, value))
        )
        mask = masks[layer] if side == "leank" else torch.ones_like(masks[layer])
        with sdpa_kernel(SDPBackend.MATH):
            out = attend_row(query, keys, values, mask, sink_size, cache.pruned(side))
        return out.transpose(1, 2), None

    position = torch.tensor([[cache.num_tokens]])
    with attending(model, attend), torch.no_grad():
        output = model(torch.tensor([[_TOKEN]]), position_ids=position, use_cache=False)
    logits: Tensor = output.logits.flatten()
    return logits
