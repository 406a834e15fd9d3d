"""Checks of a graph's answers: a decode step, its regions, a prompt against its source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from leank_convert.architectures import ModelFacts, read_model_facts
from leank_convert.checkpoint_io import open_checkpoint, read_leank_facts
from leank_convert.config_overrides import apply_config_overrides
from leank_convert.errors import LeanKError, cut
from leank_convert.hub import resolve_model
from leank_convert.mask import ChannelMask
from leank_convert.onnx.check import distance, largest_difference
from leank_convert.onnx.description import host_errors
from leank_convert.onnx.graph import trial_sizes
from leank_convert.onnx.leank_onnx import Array, Cache, Description, LeanKOnnx, new_integers
from leank_convert.onnx.pruned_model import load_stock
from leank_convert.verify.checks import Checks

# Of the largest number, on a real prompt: other weights or channels are off by about as much as that.
_TOLERANCES = {"float32": 1e-4, "float16": 5e-2}
# In the first layer, of the norm: 4 bits are off by about a tenth, another model by more than 1.
_QUANTIZED_TOLERANCE = 0.5
# How often what was measured at the export, of other tokens. Another model is off by more than 1 of the norm.
_QUANTIZED_EXCESS = 3
# Of the prompt, and of what is read of it at first: the rest attends to a cache.
_PROMPT_SIZE, _PROMPT_CHUNK = 16, 12


@dataclass(frozen=True)
class Source:
    """The model that a graph is compared with.

    Attributes:
        folder: Where it lies.
        config: Its config.json.
        facts: Its facts.
        is_checkpoint: Whether it is a converted checkpoint, whose heads are in the graph's order.
    """

    folder: Path
    config: Mapping[str, Any]
    facts: ModelFacts
    is_checkpoint: bool


def open_source(source: str | Path) -> Source:
    """Find a model or a converted checkpoint, and check that it is complete.

    Raises:
        LeanKError: If it is not.
    """
    folder = resolve_model(source)
    config = open_checkpoint(folder).config
    if "leank" in config:
        return Source(folder, config, read_leank_facts(config, folder), True)
    return Source(folder, config, read_model_facts(config, origin=str(source)), False)


def run_step(model: LeanKOnnx) -> str:
    """Decode one token on a full window, or much of one, some tokens pruned, over random keys and values.

    Raises:
        LeanKError: If onnxruntime fails, or an output is not finite.
    """
    d = model.description
    num_slots, past, pruned = trial_sizes(d.sink_size, d.recent_size, d.flush_size)
    cache = Cache(d, 1, num_slots, 5)
    generator = np.random.default_rng(0)
    for values in cache.tensors().values():
        values[:] = generator.standard_normal(values.shape, np.float32)
    logits = _decode(model, cache, past, pruned)
    return f"a decode step behind {past} tokens gives logits {list(logits.shape)}"


def _decode(model: LeanKOnnx, cache: Cache, past: int, pruned: int) -> Array:
    """Logits of token 0 behind `past` tokens, `pruned` of them pruned."""
    integers = new_integers(1, 1, 1)
    integers["past_lengths"][:], integers["pruned_lengths"][:] = past, pruned
    with host_errors():
        outputs = model.graph.run({**integers, **cache.tensors()})
    for name, values in outputs.items():
        if not np.isfinite(values).all():
            raise LeanKError(f"`{model.graph.path}`: `{name}` holds numbers that are not finite")
    return outputs["logits"]


def check_regions(model: LeanKOnnx) -> str:
    """Look whether the graph has the sink that is described, and counts pruned tokens from it.

    With a full sink, and the token behind it pruned, a value must matter in the sink's last slot and in the
    first column of the pruned region, and must not matter in the slots after them.

    Raises:
        LeanKError: If it is otherwise, or onnxruntime fails.
    """
    d = model.description
    sink = d.sink_size
    _, _, num_pruned = trial_sizes(d.sink_size, d.recent_size, d.flush_size)
    if not num_pruned:
        return f"not tried: a sink of {sink} tokens is too long for it"

    def answer(region: str, slot: int) -> Array:
        cache = Cache(d, 1, sink + 2, 2)
        for name, values in cache.tensors().items():
            if f".{region}." in name and name.endswith(".value"):
                values[..., slot] = 10  # K is 0, so that every token has some weight
        return _decode(model, cache, sink + 1, 1)

    has_pruned = any(bucket.width for layer in d.buckets for bucket in layer)
    probes = [("window", sink - 1, True)] * (sink > 0) + [("window", sink, False)]
    probes += [("pruned", 0, True), ("pruned", 1, False)] * has_pruned
    without = answer("no", 0)
    for region, slot, counts in probes:
        if np.array_equal(answer(region, slot), without) == counts:
            raise LeanKError(
                f"`{model.graph.path}`: behind a sink of {sink} and 1 pruned token, slot {slot} of the "
                f"{region} region {'does not count' if counts else 'counts'}: the graph has another "
                "`sink_size`"
            )
    return f"a sink of {sink} tokens, then the pruned ones"


def compare_with_source(model: LeanKOnnx, source: Source, mask: ChannelMask | None, checks: Checks) -> None:
    """Let a graph and the stock class of its source read the same prompt, and compare what they make of it.

    Args:
        model: The graph.
        source: The model.
        mask: What it was exported with, of which rope parameters and the mean of keys are taken; None if that
            cannot be read.
        checks: Takes the findings: keys and values of every layer, then logits.
    """
    description = model.description
    if not checks.holds("source: sizes", lambda: _check_sizes(description, source)):
        return
    tokens = np.random.default_rng(0).integers(description.vocab_size, size=_PROMPT_SIZE)
    answer = checks.value("source: prompt", lambda: _read_prompt(model, tokens))
    if answer is None:
        return
    cache, logits = answer
    known = mask.provenance if mask else None
    rope = known.rope_parameters if known else None
    key_mean = mask.key_mean if mask else None
    stock = _load(source, rope, description.content["dtype"])
    with torch.no_grad():
        expected = stock(torch.from_numpy(tokens)[None], use_cache=True)
    cached = [(layer.keys, layer.values) for layer in expected.past_key_values.layers]
    checks.holds(
        "source: keys and values", lambda: _check_cache(cache, cached, source, description, key_mean)
    )
    checks.holds("source: logits", lambda: _check_logits(logits, expected.logits[0], description))


def _check_sizes(description: Description, source: Source) -> str:
    described = description.content["model"]
    expected = {
        "model_type": source.facts.model_type,
        "num_hidden_layers": source.facts.num_hidden_layers,
        "num_attention_heads": source.facts.num_attention_heads,
        "num_key_value_heads": source.facts.num_key_value_heads,
        "head_dim": source.facts.head_dim,
        "vocab_size": source.config.get("vocab_size", description.vocab_size),
    }
    for key, value in expected.items():
        if described[key] != value:
            raise LeanKError(f"`model.{key}` is {cut(described[key])}; `{source.folder}` has {cut(value)}")
    return f"{described['model_type']}, {described['num_hidden_layers']} layers"


def _read_prompt(model: LeanKOnnx, tokens: Array) -> tuple[tuple[Cache, Tensor], str]:
    """The cache of a prompt, whole in its windows, and the logits of every token [S, V]."""
    with host_errors():
        cache, (logits,) = model.start().read_prompts([tokens.tolist()], _PROMPT_CHUNK, all_logits=True)
    return (cache, torch.from_numpy(logits)), f"{len(tokens)} tokens, {_PROMPT_CHUNK} of them at first"


def _load(source: Source, rope: Mapping[str, Any] | None, dtype: str) -> Any:
    """The source as its stock class, under the rope that the graph was made with."""
    config = source.config
    if not source.is_checkpoint and rope is not None and dict(rope) != source.facts.rope_parameters:
        config = apply_config_overrides(config, {"rope_parameters": dict(rope)})
    return load_stock(source.folder, config, source.facts.architecture, dtype)


def _check_cache(
    cache: Cache,
    cached: list[tuple[Tensor, Tensor]],
    source: Source,
    description: Description,
    key_mean: Tensor | None,
) -> str:
    """Compare windows with K and V [B, H_kv, S, D] of every layer, put in the order of the graph's lanes.

    What came off keys, [L, H_kv, D] in the original head order, is added again.
    """
    tensors, content = cache.tensors(), description.content
    permutations = None if source.is_checkpoint else content["head_permutation"]
    largest = 0.0
    quantized = content["quantization"] is not None
    # What is quantized in one layer changes the next: the first alone shows which weights they are.
    for layer, (keys, values) in enumerate(cached[:1] if quantized else cached):
        heads = slice(None) if permutations is None else permutations[layer]
        lanes = torch.tensor(content["channel_order"][layer])[None, :, None]
        expected = {
            "key": keys[:, heads].take_along_dim(lanes, -1),
            "value": values[:, heads].transpose(2, 3),
        }
        for part, right in expected.items():
            window = torch.from_numpy(tensors[f"past_key_values.{layer}.window.{part}"])
            found = window.narrow(2 if part == "key" else 3, 0, keys.shape[2]).double()
            if part == "key" and key_mean is not None:
                order = content["head_permutation"]
                mean = key_mean[layer] if order is None else key_mean[layer][order[layer]]
                found = found + mean[:, None].double().take_along_dim(lanes[0], -1)
            if quantized:
                difference, limit = distance(found, right.double()), _QUANTIZED_TOLERANCE
            else:
                difference = largest_difference(found, right.double())
                limit = _TOLERANCES[content["dtype"]]
            if not difference < limit:
                raise LeanKError(
                    f"layer {layer}: {part}s differ from the source's by {difference:.1e} of the "
                    f"{'norm' if quantized else 'largest'}: other weights, another order of heads or channels"
                )
            largest = max(largest, difference)
    which = "the first layer's" if quantized else "every layer's"
    return f"{which} are the source's within {largest:.1e}"


def _check_logits(logits: Tensor, expected: Tensor, description: Description) -> str:
    """Compare logits [S, V]."""
    found, right = logits.double(), expected.double()
    same = f"{float((found.argmax(-1) == right.argmax(-1)).double().mean()):.0%} of next tokens are the same"
    content = description.content
    if content["quantization"] is not None:
        difference, at_export = distance(found, right), content["quantization"]["difference"]
        before = "" if at_export is None else f" ({at_export:.1e} of other tokens, at the export)"
        detail = (
            f"weights of {content['weights']} change them by {difference:.1e} of their norm{before}; {same}"
        )
        if not difference < (1.0 if at_export is None else _QUANTIZED_EXCESS * at_export):
            raise LeanKError(f"{detail}: other weights than the source's")
        return detail
    difference = largest_difference(found, right)
    detail = f"they differ from the source's by {difference:.1e} of the largest; {same}"
    if not difference < _TOLERANCES[content["dtype"]]:
        raise LeanKError(detail)
    return detail
