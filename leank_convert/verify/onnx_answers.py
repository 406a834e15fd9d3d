"""Run a graph by onnxruntime: decode steps, and a short prompt beside the stock class of its source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor

from leank_convert.architectures import ModelFacts, apply_config_overrides, read_model_facts
from leank_convert.checkpoint_io import open_checkpoint, read_leank_facts
from leank_convert.errors import LeanKError, first_line
from leank_convert.hub import resolve_model
from leank_convert.onnx.folder import FolderDescription
from leank_convert.onnx.subject import DTYPES, load_pruned
from leank_convert.verify.report import Checks

# Of the largest number. Other weights or channels are off by about as much as that; rounding is far below.
_TOLERANCES = {"float32": 1e-4, "float16": 5e-2}
# In the first layer, of the norm: 4 bits are off by about a tenth, another model by more than 1.
_QUANTIZED_TOLERANCE = 0.5
# How often what was measured at the export, of other tokens. Another model is off by more than 1 of the norm.
_QUANTIZED_EXCESS = 3
_PROMPT_CHUNKS = (12, 4)

Arrays = dict[str, NDArray[Any]]


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


class GraphSession:
    """A graph loaded by onnxruntime.

    Args:
        path: The graph.
        description: What its folder says of it.

    Raises:
        LeanKError: If onnxruntime cannot load it.
    """

    def __init__(self, path: Path, description: FolderDescription) -> None:
        import onnxruntime

        self.path = path
        self.description = description
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4  # what fails is told by the check
        try:
            self._session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime's errors have no class in common
            raise LeanKError(f"onnxruntime cannot load `{path}`: {first_line(error)}") from error

    def empty_cache(self, window_slots: int, pruned_slots: int) -> Arrays:
        """The cache of one row, zeros."""
        sizes: dict[int | str, int] = {"batch": 1, "window_slots": window_slots, "pruned_slots": pruned_slots}
        return {
            tensor.name: np.zeros([sizes.get(size) or int(size) for size in tensor.shape], tensor.dtype)
            for tensor in self.description.inputs
            if tensor.region is not None
        }

    def run(self, tokens: NDArray[np.int64], past: int, pruned: int, cache: Arrays) -> Arrays:
        """All outputs for one row of new tokens [Q], with logits of each.

        Raises:
            LeanKError: If onnxruntime fails, or an output holds what is no number.
        """
        inputs = {
            "input_ids": tokens[None],
            "past_lengths": np.array([past]),
            "pruned_lengths": np.array([pruned]),
            "logits_index": np.arange(len(tokens))[None],
        }
        names = [tensor.name for tensor in self.description.outputs]
        try:
            outputs = dict(zip(names, self._session.run(names, {**inputs, **cache}), strict=True))
        except Exception as error:  # onnxruntime's errors have no class in common
            raise LeanKError(f"onnxruntime cannot run `{self.path}`: {first_line(error)}") from error
        for name, values in outputs.items():
            if not np.isfinite(values).all():
                raise LeanKError(f"`{self.path}`: `{name}` holds numbers that are not finite")
        return outputs


def run_step(session: GraphSession) -> str:
    """Decode one token on a full window, some tokens pruned, over random keys and values.

    Raises:
        LeanKError: If onnxruntime fails, or an output is not finite.
    """
    description = session.description
    seen = description.sink_size + description.recent_size
    cache = session.empty_cache(seen + description.flush_size, 5)
    generator = np.random.default_rng(0)
    for values in cache.values():
        values[:] = generator.standard_normal(values.shape, np.float32)
    logits = session.run(np.zeros(1, np.int64), seen + 3, 3, cache)["logits"]
    return f"a decode step behind {seen + 3} tokens gives logits {list(logits.shape)}"


def check_regions(session: GraphSession) -> str:
    """Look whether the graph has the sink that is described, and counts pruned tokens from it.

    With a full sink, and the token behind it pruned, a value must matter in the sink's last slot and in the
    first column of the pruned region, and must not matter in the slots after them.

    Raises:
        LeanKError: If it is otherwise, or onnxruntime fails.
    """
    description = session.description
    sink, ring = description.sink_size, description.recent_size + description.flush_size
    token = np.zeros(1, np.int64)

    def answer(region: str, slot: int) -> NDArray[Any]:
        cache = session.empty_cache(sink + ring, 2)
        for name in cache:
            if f".{region}." in name and name.endswith(".value"):
                cache[name][..., slot] = 10  # K is 0, so that every token has some weight
        return session.run(token, sink + 1, 1, cache)["logits"]

    has_pruned = any(map(any, description.widths))
    probes = [("window", sink - 1, True)] * (sink > 0) + [("window", sink, False)]
    probes += [("pruned", 0, True), ("pruned", 1, False)] * has_pruned
    without = answer("no", 0)
    for region, slot, counts in probes:
        if np.array_equal(answer(region, slot), without) == counts:
            raise LeanKError(
                f"`{session.path}`: behind a sink of {sink} and 1 pruned token, slot {slot} of the {region} "
                f"region {'does not count' if counts else 'counts'}: the graph has another `sink_size`"
            )
    return f"a sink of {sink} tokens, then the pruned ones"


def compare_with_source(
    session: GraphSession, source: Source, rope: Mapping[str, Any] | None, checks: Checks
) -> None:
    """Let a graph and the stock class of its source read the same prompt, and compare what they make of it.

    Args:
        session: The graph.
        source: The model.
        rope: The rope parameters that it was exported with, None for its own.
        checks: Takes the findings: keys and values of every layer, then logits.
    """
    description = session.description
    if not checks.holds("source: sizes", lambda: _check_sizes(description, source)):
        return
    generator = np.random.default_rng(0)
    tokens = generator.integers(description.model.vocab_size, size=sum(_PROMPT_CHUNKS))
    answer = checks.value("source: prompt", lambda: _read_in_chunks(session, tokens))
    if answer is None:
        return
    model = _load(source, rope, description.dtype)
    with torch.no_grad():
        expected = model(torch.from_numpy(tokens)[None], use_cache=True)
    cached = [(layer.keys, layer.values) for layer in expected.past_key_values.layers]
    checks.holds("source: keys and values", lambda: _check_cache(answer, cached, source, description))
    checks.holds("source: logits", lambda: _check_logits(answer["logits"], expected.logits, description))


def _check_sizes(description: FolderDescription, source: Source) -> str:
    told = description.model
    expected = {
        "model_type": source.facts.model_type,
        "num_hidden_layers": source.facts.num_hidden_layers,
        "num_attention_heads": source.facts.num_attention_heads,
        "num_key_value_heads": source.facts.num_key_value_heads,
        "head_dim": source.facts.head_dim,
        "vocab_size": source.config.get("vocab_size", told.vocab_size),
    }
    for key, value in expected.items():
        if getattr(told, key) != value:
            raise LeanKError(f"`model.{key}` is `{getattr(told, key)}`; `{source.folder}` has `{value}`")
    return f"{told.model_type}, {told.num_hidden_layers} layers"


def _load(source: Source, rope: Mapping[str, Any] | None, dtype: str) -> Any:
    """The source as its stock class, under the rope that the graph was made with."""
    if source.is_checkpoint:
        return load_pruned(source.folder, dtype).model
    config: Mapping[str, Any] = source.config
    if rope is not None and dict(rope) != source.facts.rope_parameters:
        config = apply_config_overrides(config, {"rope_parameters": dict(rope)})
    architecture = source.facts.architecture
    stock = getattr(transformers, architecture.causal_lm_class).from_pretrained(
        source.folder,
        config=getattr(transformers, architecture.config_class).from_dict(dict(config)),
        dtype=DTYPES[dtype],
    )
    return stock.eval()


def _read_in_chunks(session: GraphSession, tokens: NDArray[np.int64]) -> tuple[Arrays, str]:
    """All outputs for a prompt, read as a host does: later chunks attend to the cache of those before."""
    cache = session.empty_cache(max(len(tokens), session.description.sink_size + 1), 1)
    outputs: list[Arrays] = []
    past = 0
    for size in _PROMPT_CHUNKS:
        found = session.run(tokens[past : past + size], past, 0, cache)
        for layer in range(len(session.description.widths)):
            window = f"past_key_values.{layer}.window"
            cache[f"{window}.key"][:, :, past : past + size] = found[f"present.{layer}.key"]
            cache[f"{window}.value"][..., past : past + size] = found[f"present.{layer}.value"]
        outputs.append(found)
        past += size
    joined = {
        name: np.concatenate([found[name] for found in outputs], 3 if name.endswith(".value") else -2)
        for name in outputs[0]
    }
    return joined, f"{len(tokens)} tokens in {len(_PROMPT_CHUNKS)} chunks"


def _check_cache(
    answer: Arrays, cached: list[tuple[Tensor, Tensor]], source: Source, description: FolderDescription
) -> str:
    """Compare K [B, H_kv, S, D], its channels reordered, and V [B, H_kv, D, S] layer by layer."""
    largest = 0.0
    quantized = description.quantization is not None
    # What is quantized in one layer changes the next: the first alone tells whose weights they are.
    for layer, (keys, values) in enumerate(cached[:1] if quantized else cached):
        permuted = description.head_permutation is not None and not source.is_checkpoint
        heads: Any = description.head_permutation[layer] if permuted else slice(None)  # type: ignore[index]
        lanes = torch.tensor(description.channel_order[layer])[None, :, None]
        expected = {
            "key": keys[:, heads].take_along_dim(lanes, -1),
            "value": values[:, heads].transpose(2, 3),
        }
        for part, right in expected.items():
            found = torch.from_numpy(answer[f"present.{layer}.{part}"]).double()
            right = right.double()
            if quantized:
                difference, limit = float((found - right).norm() / right.norm()), _QUANTIZED_TOLERANCE
            else:
                difference = float((found - right).abs().max() / right.abs().max())
                limit = _TOLERANCES[description.dtype]
            if not difference < limit:
                raise LeanKError(
                    f"layer {layer}: {part}s differ from the source's by {difference:.1e} of the "
                    f"{'norm' if quantized else 'largest'}: other weights, another order of heads or channels"
                )
            largest = max(largest, difference)
    which = "the first layer's" if quantized else "every layer's"
    return f"{which} are the source's within {largest:.1e}"


def _check_logits(logits: NDArray[Any], expected: Tensor, description: FolderDescription) -> str:
    found, right = torch.from_numpy(logits).double(), expected.double()
    same = f"{float((found.argmax(-1) == right.argmax(-1)).double().mean()):.0%} of next tokens are the same"
    if description.quantization is not None:
        difference = float((found - right).norm() / right.norm())
        told = description.quantization.difference
        before = "" if told is None else f" ({told:.1e} of other tokens, at the export)"
        detail = (
            f"weights of {description.weights} change them by {difference:.1e} of their norm{before}; {same}"
        )
        if not difference < (1.0 if told is None else _QUANTIZED_EXCESS * told):
            raise LeanKError(f"{detail}: other weights than the source's")
        return detail
    difference = float((found - right).abs().max() / right.abs().max())
    detail = f"they differ from the source's by {difference:.1e} of the largest; {same}"
    if not difference < _TOLERANCES[description.dtype]:
        raise LeanKError(detail)
    return detail
