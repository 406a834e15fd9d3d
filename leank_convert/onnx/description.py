"""leank_onnx.json: what a program must know to run the graph. Written here, read by `leank_onnx.py`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from leank_convert.checkpoint_io import ONNX_DESCRIPTION_NAME
from leank_convert.errors import LeanKError
from leank_convert.onnx.graph import cache_shapes
from leank_convert.onnx.leank_onnx import FORMAT_VERSION, Description, LeanKOnnxError
from leank_convert.onnx.pruned_model import PrunedModel
from leank_convert.onnx.quantize import OPERATOR, SCHEMES


@contextmanager
def host_errors() -> Iterator[None]:
    """Raise what the host finds wrong as the toolkit raises errors.

    Raises:
        LeanKError: In place of the host's own error.
    """
    try:
        yield
    except LeanKOnnxError as error:
        raise LeanKError(str(error)) from error


def read_description(folder: Path) -> Description:
    """Read an ONNX folder's description by the host's reader; no other file is looked at.

    Raises:
        LeanKError: If it cannot be read, is of another format version, or keys are missing or make no sense.
    """
    with host_errors():
        return Description.parse(folder / ONNX_DESCRIPTION_NAME)


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
        "inputs": describe_inputs(pruned, pruned.dtype),
        "outputs": describe_outputs(pruned, pruned.dtype, config.vocab_size),
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


def describe_inputs(pruned: PrunedModel, dtype: str) -> list[dict[str, Any]]:
    """Describe a graph's inputs, its cache of `dtype`; of `pruned` masks and window sizes are looked at."""
    integers: dict[str, list[int | str]] = {
        "input_ids": ["batch", "new_tokens"],
        "past_lengths": ["batch"],
        "pruned_lengths": ["batch"],
        "logits_index": ["batch", "logits"],
    }
    described: list[dict[str, Any]] = [
        {"name": name, "dtype": "int64", "shape": shape} for name, shape in integers.items()
    ]
    for name, shape in cache_shapes(pruned, "batch", "window_slots", "pruned_slots").items():
        _, layer, region, *width, part = name.split(".")
        place = {
            "layer": int(layer),
            "region": region,
            "width": int(width[0]) if width else None,
            "part": part,
        }
        described.append({"name": name, "dtype": dtype, "shape": shape, **place})
    return described


def describe_outputs(pruned: PrunedModel, dtype: str, vocab_size: int) -> list[dict[str, Any]]:
    """Describe a graph's outputs, logits and new keys and values of `dtype`; only masks are looked at."""
    num_layers, heads, head_dim = pruned.channel_masks.shape
    described: list[dict[str, Any]] = [
        {"name": "logits", "dtype": dtype, "shape": ["batch", "logits", vocab_size]}
    ]
    shapes: dict[str, list[int | str]] = {
        "key": ["batch", heads, "new_tokens", head_dim],
        "value": ["batch", heads, head_dim, "new_tokens"],
    }
    for layer in range(num_layers):
        for part, shape in shapes.items():
            name = f"present.{layer}.{part}"
            described.append({"name": name, "dtype": dtype, "shape": shape, "layer": layer, "part": part})
    return described


def pruning_ratio_of(description: Description) -> float:
    """The fraction of channels removed, over the whole model."""
    widths = description.content["widths"]
    return 1 - sum(map(sum, widths)) / (sum(map(len, widths)) * description.head_dim)


def check_heads(description: Description) -> None:
    """Check that widths, buckets, lanes and the heads' order fit one another and the model's sizes.

    Raises:
        LeanKError: If they do not.
    """
    content = description.content
    num_layers = content["model"]["num_hidden_layers"]
    for key in ("widths", "buckets", "channel_order", "head_permutation"):
        if content[key] is not None and len(content[key]) != num_layers:
            raise LeanKError(f"`{key}` has {len(content[key])} layers, the model {num_layers}")
    for layer, row in enumerate(content["widths"]):
        if len(row) != description.num_heads or row != sorted(row) or row[-1] > description.head_dim:
            raise LeanKError(
                f"`widths[{layer}]` is {row}: not {description.num_heads} numbers ascending within 0 and "
                f"{description.head_dim}"
            )
        counts = [(width, row.count(width)) for width in sorted(set(row))]
        if content["buckets"][layer] != _buckets(counts):
            raise LeanKError(f"`buckets[{layer}]` is {content['buckets'][layer]}; the widths are {row}")
        _check_lanes(content["channel_order"][layer], row, layer, description.head_dim)
        if content["head_permutation"] is not None:
            _check_permutation(content["head_permutation"][layer], row, layer)


def _check_lanes(orders: list[list[int]], row: list[int], layer: int, head_dim: int) -> None:
    if len(orders) != len(row):
        raise LeanKError(f"`channel_order[{layer}]` has {len(orders)} heads, the model {len(row)}")
    for head, (order, width) in enumerate(zip(orders, row, strict=True)):
        if sorted(order) != list(range(head_dim)):
            raise LeanKError(
                f"`channel_order[{layer}][{head}]` is {order}, no order of the {head_dim} channels"
            )
        for part in (order[:width], order[width:]):
            if part != sorted(part):
                raise LeanKError(
                    f"`channel_order[{layer}][{head}]` is {order}: neither the {width} kept channels nor the "
                    f"dropped ones may descend, as {part} does"
                )


def _check_permutation(permutation: list[int], row: list[int], layer: int) -> None:
    if sorted(permutation) != list(range(len(row))):
        raise LeanKError(f"`head_permutation[{layer}]` is {permutation}, no permutation of {len(row)} heads")
    # Stable: heads of one width keep the order they had.
    if any(a == b and i > j for (a, i), (b, j) in pairwise(zip(row, permutation, strict=True))):
        raise LeanKError(f"`head_permutation[{layer}]` is {permutation}, not stable within a bucket")
