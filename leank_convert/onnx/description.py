"""leank_onnx.json: what a program must know to run the graph, whatever its language."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from leank_convert.onnx.folder import FORMAT_VERSION, TensorDescription
from leank_convert.onnx.graph import cache_shapes
from leank_convert.onnx.quantize import OPERATOR, SCHEMES
from leank_convert.onnx.subject import PrunedModel


def describe(
    pruned: PrunedModel,
    *,
    opset: int,
    files: Mapping[str, str],
    weights: str | None = None,
    difference: float | None = None,
) -> dict[str, Any]:
    """Describe a graph.

    Args:
        pruned: The model it was made of.
        opset: Its version of the ONNX operators.
        files: SHA-256 by file name.
        weights: A key of `quantize.SCHEMES`, or None for the model's own type.
        difference: Of quantized weights, what `check.measure_quantized` returned.
    """
    scheme = None if weights is None else SCHEMES[weights]
    config = pruned.model.config
    num_layers, kv_heads, head_dim = pruned.channel_masks.shape
    inputs = describe_inputs(pruned, pruned.dtype)
    outputs = describe_outputs(pruned, pruned.dtype, config.vocab_size)
    return {
        "format_version": FORMAT_VERSION,
        "opset": opset,
        "dtype": pruned.dtype,
        "weights": weights or pruned.dtype,
        "quantization": None
        if scheme is None
        else {
            "operator": OPERATOR,
            "bits": scheme.bits,
            "block_size": scheme.block_size,
            "difference": difference,
        },
        "model": {
            "name": pruned.name,
            "model_type": config.model_type,
            "num_hidden_layers": num_layers,
            "num_attention_heads": config.num_attention_heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "vocab_size": config.vocab_size,
            "max_position_embeddings": config.max_position_embeddings,
        },
        "bos_token_id": next(iter(_token_ids(pruned, "bos_token_id")), None),
        "eos_token_ids": _token_ids(pruned, "eos_token_id"),
        "sink_size": pruned.sink_size,
        "recent_size": pruned.recent_size,
        "flush_size": pruned.flush_size,
        "widths": pruned.widths,
        "buckets": [_buckets(layer) for layer in pruned.buckets],
        "channel_order": pruned.channel_order.tolist(),
        "head_permutation": pruned.head_permutation,
        "inputs": [tensor.model_dump(exclude_unset=True) for tensor in inputs],
        "outputs": [tensor.model_dump(exclude_unset=True) for tensor in outputs],
        "files": dict(sorted(files.items())),
    }


def _token_ids(pruned: PrunedModel, key: str) -> list[int]:
    """Of the generation config, which often names more tokens than the config."""
    for config in (pruned.model.generation_config, pruned.model.config):
        value = getattr(config, key, None)
        if value is not None:
            return [value] if isinstance(value, int) else list(value)
    return []


def _buckets(layer: list[tuple[int, int]]) -> list[dict[str, Any]]:
    described, first = [], 0
    for width, count in layer:
        described.append({"width": width, "heads": [first, first + count]})
        first += count
    return described


def describe_inputs(pruned: PrunedModel, dtype: str) -> list[TensorDescription]:
    """Describe a graph's inputs.

    Args:
        pruned: Masks and window sizes; its model is not looked at.
        dtype: Of the cache.
    """
    integers: tuple[tuple[str, list[int | str]], ...] = (
        ("input_ids", ["batch", "new_tokens"]),
        ("past_lengths", ["batch"]),
        ("pruned_lengths", ["batch"]),
        ("logits_index", ["batch", "logits"]),
    )
    described = [TensorDescription(name=name, dtype="int64", shape=shape) for name, shape in integers]
    for name, shape in cache_shapes(pruned, "batch", "window_slots", "pruned_slots").items():
        _, layer, region, *width, part = name.split(".")
        described.append(
            TensorDescription(
                name=name,
                dtype=dtype,
                shape=shape,
                layer=int(layer),
                region=region,
                width=int(width[0]) if width else None,
                part=part,
            )
        )
    return described


def describe_outputs(pruned: PrunedModel, dtype: str, vocab_size: int) -> list[TensorDescription]:
    """Describe a graph's outputs.

    Args:
        pruned: Masks; its model is not looked at.
        dtype: Of logits and cache.
        vocab_size: Length of a row of logits.
    """
    num_layers, heads, head_dim = pruned.channel_masks.shape
    described = [TensorDescription(name="logits", dtype=dtype, shape=["batch", "logits", vocab_size])]
    shapes: dict[str, list[int | str]] = {
        "key": ["batch", heads, "new_tokens", head_dim],
        "value": ["batch", heads, head_dim, "new_tokens"],
    }
    for layer in range(num_layers):
        for part, shape in shapes.items():
            name = f"present.{layer}.{part}"
            described.append(TensorDescription(name=name, dtype=dtype, shape=shape, layer=layer, part=part))
    return described
