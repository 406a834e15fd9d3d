"""leank_onnx.json: what a program must know to run the graph, written, and checked against the mask file.

`leank_onnx_cache.py` reads it, and takes on trust whatever decoding does not depend on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, NonNegativeFloat, NonNegativeInt, PositiveInt

from leank_convert.errors import LeanKError, cut
from leank_convert.fields import validated
from leank_convert.head_layout import plan_head_layout
from leank_convert.mask import ChannelMask
from leank_convert.mask_tensor import in_checkpoint_order
from leank_convert.onnx.graph import cache_shapes
from leank_convert.onnx.leank_onnx_cache import FORMAT_VERSION, Bucket, Description, LeanKOnnxError
from leank_convert.onnx.pruned_model import PrunedModel
from leank_convert.onnx.quantize import OPERATOR, SCHEMES
from leank_convert.windows import Windows

# Keys by which a host finds the cache among the tensors, and what it keeps of V; where one is too much, it
# finds what is none.
_PLACE = ("layer", "region", "width", "part", "value_width")


class _DescribedModel(BaseModel, strict=True, allow_inf_nan=False):
    name: str
    model_type: str
    num_attention_heads: PositiveInt
    max_position_embeddings: PositiveInt


class _Quantization(BaseModel, strict=True, allow_inf_nan=False):
    operator: Literal["MatMulNBits"]
    bits: int
    block_size: int
    difference: NonNegativeFloat | None


class _Described(BaseModel, strict=True, allow_inf_nan=False):
    """Keys that neither the mask nor the graph gives; a later release may have added others."""

    opset: int
    weights: str
    quantization: _Quantization | None
    model: _DescribedModel
    bos_token_id: NonNegativeInt | None


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
        return Description(folder)


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
        difference: Of quantized weights, what `check.check_graph` returned.
    """
    config = pruned.model.config
    num_layers, kv_heads, head_dim = pruned.channel_masks.shape
    quantization = None
    if weights is not None:
        scheme = SCHEMES[weights]
        quantization = {"operator": OPERATOR, "bits": scheme.bits, "block_size": scheme.block_size}
        quantization["difference"] = difference
    return {
        "format_version": FORMAT_VERSION,
        "opset": opset,
        "dtype": pruned.dtype,
        "weights": weights or pruned.dtype,
        "quantization": quantization,
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
        **describe_cache(pruned, pruned.dtype, config.vocab_size),
        "files": dict(sorted(files.items())),
    }


def _token_ids(pruned: PrunedModel, key: str) -> list[int]:
    """Of the generation config, which often names more tokens than the config; those of the vocabulary."""
    for config in (pruned.model.generation_config, pruned.model.config):
        value = getattr(config, key, None)
        if value is not None:
            tokens = [value] if isinstance(value, int) else list(value)
            return [token for token in tokens if 0 <= token < pruned.model.config.vocab_size]
    return []


def describe_cache(pruned: PrunedModel, dtype: str, vocab_size: int) -> dict[str, Any]:
    """Describe heads, lanes, inputs and outputs; of `pruned` masks, head order and windows are looked at."""
    num_layers, heads, head_dim = pruned.channel_masks.shape
    integers: dict[str, list[int | str]] = {
        "input_ids": ["batch", "new_tokens"],
        "past_lengths": ["batch"],
        "pruned_lengths": ["batch"],
        "logits_index": ["batch", "logits"],
    }
    inputs: list[dict[str, Any]] = [
        {"name": name, "dtype": "int64", "shape": shape} for name, shape in integers.items()
    ]
    for name, shape in cache_shapes(pruned, "batch", "window_slots", "pruned_slots").items():
        _, layer, region, *width, part = name.split(".")
        place = {"layer": int(layer), "region": region, "width": int(width[0]) if width else None}
        inputs.append({"name": name, "dtype": dtype, "shape": shape, **place, "part": part})
    outputs: list[dict[str, Any]] = [
        {"name": "logits", "dtype": dtype, "shape": ["batch", "logits", vocab_size]}
    ]
    shapes = [("key", ["batch", heads, "new_tokens", head_dim])]
    shapes.append(("value", ["batch", heads, head_dim, "new_tokens"]))
    outputs += [
        {"name": f"present.{layer}.{part}", "dtype": dtype, "shape": shape, "layer": layer, "part": part}
        for layer in range(num_layers)
        for part, shape in shapes
    ]
    return {
        "widths": pruned.widths,
        **({} if pruned.value_widths is None else {"value_widths": list(map(list, pruned.value_widths))}),
        "buckets": [[_describe_bucket(bucket) for bucket in layer] for layer in pruned.buckets],
        "channel_order": pruned.channel_order.tolist(),
        "head_permutation": pruned.head_permutation,
        "inputs": inputs,
        "outputs": outputs,
    }


def _describe_bucket(bucket: Bucket) -> dict[str, Any]:
    described: dict[str, Any] = {"width": bucket.width, "heads": [bucket.heads.start, bucket.heads.stop]}
    return described if bucket.value_width is None else {**described, "value_width": bucket.value_width}


def check_description(description: Description, mask: ChannelMask) -> None:
    """Check that a description is of the graph that is made with a mask, and that it lacks nothing.

    Raises:
        LeanKError: If a key is missing or has a value of another type, or windows make no sense, or shapes,
            heads, lanes, inputs or outputs are not those that the mask gives.
    """
    content = description.content
    bos = validated(_Described, content).bos_token_id
    if bos is not None and bos >= description.vocab_size:
        raise LeanKError(f"`bos_token_id` is {cut(bos)}, not of the vocabulary")
    sizes = description.sink_size, description.recent_size, description.flush_size
    Windows(*sizes)
    permutation = plan_head_layout(mask.widths).head_permutation
    channel_masks = in_checkpoint_order(mask.channel_mask, permutation)
    kept = mask.value_widths
    pruned = PrunedModel(
        None,
        channel_masks,
        *sizes,
        head_permutation=[list(order) for order in permutation],
        value_widths=None if kept is None else in_checkpoint_order(kept, permutation).tolist(),
    )
    expected = {"value_widths": None, **describe_cache(pruned, content["dtype"], description.vocab_size)}
    model = ("num_hidden_layers", "num_key_value_heads", "head_dim")
    expected["model"] = {**content["model"], **dict(zip(model, channel_masks.shape, strict=True))}
    for key, value in expected.items():
        check_equal(content.get(key), value, key, "the mask gives")


def check_equal(found: Any, expected: Any, place: str, source: str) -> None:
    """Compare two JSON values. Keys that a later release may have added say nothing.

    Args:
        found: The value.
        expected: What it has to be.
        place: Where it stands.
        source: What tells so, with a verb.

    Raises:
        LeanKError: If they differ; it names the first place where they do.
    """
    if isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            check_equal(one, other, f"{place}.{number}", source)
    elif isinstance(found, dict) and isinstance(expected, dict):
        for key in (*expected, *(key for key in _PLACE if key in found and key not in expected)):
            check_equal(found.get(key), expected.get(key), f"{place}.{key}", source)
    elif type(found) is not type(expected) or found != expected:
        raise LeanKError(f"`{place}` is {cut(found)}; {source} {cut(expected)}")
