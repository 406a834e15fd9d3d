"""leank_onnx.json: what a program must know to run the graph. `leank_onnx_cache.py` reads it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from leank_convert.errors import LeanKError
from leank_convert.onnx.graph import STEP_INPUTS, cache_shapes
from leank_convert.onnx.leank_onnx_cache import FORMAT_VERSION, Bucket, Description, LeanKOnnxError, digest_of
from leank_convert.onnx.libraries import OPSET
from leank_convert.onnx.pruned_model import PrunedModel
from leank_convert.onnx.quantize import OPERATOR, SCHEMES


@contextmanager
def host_errors() -> Iterator[None]:
    """Raise what the host finds wrong as the toolkit raises errors: a LeanKError in place of its own."""
    try:
        yield
    except LeanKOnnxError as error:
        raise LeanKError(str(error)) from error


def read_description(folder: Path) -> Description:
    """Read an ONNX folder's description by the host's reader, and no other file; raises LeanKError."""
    with host_errors():
        return Description(folder)


def describe(
    pruned: PrunedModel,
    *,
    files: Mapping[str, str],
    weights: str | None = None,
    difference: float | None = None,
) -> dict[str, Any]:
    """Describe the graph of a model; `difference` of quantized weights is what `check_graph` returned."""
    config, dtype = pruned.model.config, pruned.dtype
    num_layers, kv_heads, head_dim = pruned.channel_masks.shape
    inputs: list[dict[str, Any]] = [
        {"name": name, "dtype": "int64", "shape": shape} for name, shape in STEP_INPUTS.items()
    ]
    for name, shape in cache_shapes(pruned, "batch", "window_slots", "pruned_slots").items():
        _, layer, region, *width, part = name.split(".")
        place = {"layer": int(layer), "region": region, "width": int(width[0]) if width else None}
        inputs.append({"name": name, "dtype": dtype, "shape": shape, **place, "part": part})
    logits = {"name": "logits", "dtype": dtype, "shape": ["batch", "logits", config.vocab_size]}
    new = (
        ("key", ["batch", kv_heads, "new_tokens", head_dim]),
        ("value", ["batch", kv_heads, head_dim, "new_tokens"]),
    )
    present = [
        {"name": f"present.{layer}.{part}", "dtype": dtype, "shape": shape, "layer": layer, "part": part}
        for layer in range(num_layers)
        for part, shape in new
    ]
    quantization = None
    if weights is not None:
        quantization = {"operator": OPERATOR, **vars(SCHEMES[weights]), "difference": difference}
    description = {
        "format_version": FORMAT_VERSION,
        "opset": OPSET,
        "dtype": dtype,
        "weights": weights or dtype,
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
        **pruned.windows.sizes,
        "widths": pruned.widths,
        **({} if pruned.value_widths is None else {"value_widths": list(map(list, pruned.value_widths))}),
        "buckets": [[_describe_bucket(bucket) for bucket in layer] for layer in pruned.buckets],
        "channel_order": pruned.channel_order.tolist(),
        "head_permutation": pruned.head_permutation,
        "inputs": inputs,
        "outputs": [logits, *present],
        "files": dict(sorted(files.items())),
    }
    return {**description, "sha256": digest_of(description)}


def _token_ids(pruned: PrunedModel, key: str) -> list[int]:
    """Of the generation config, which often names more tokens than the config; those of the vocabulary."""
    for config in (pruned.model.generation_config, pruned.model.config):
        value = getattr(config, key, None)
        if value is not None:
            tokens = [value] if isinstance(value, int) else list(value)
            return [token for token in tokens if 0 <= token < pruned.model.config.vocab_size]
    return []


def _describe_bucket(bucket: Bucket) -> dict[str, Any]:
    described: dict[str, Any] = {"width": bucket.width, "heads": [bucket.heads.start, bucket.heads.stop]}
    return described if bucket.value_width is None else {**described, "value_width": bucket.value_width}
