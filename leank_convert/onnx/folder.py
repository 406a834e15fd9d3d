"""An ONNX folder read back: its description, key by key, and whether what it says of heads fits together."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from leank_convert.checkpoint_io import ONNX_DESCRIPTION_NAME
from leank_convert.errors import LeanKError
from leank_convert.files import read_json

FORMAT_VERSION = 1

_Size = Annotated[int, Field(ge=0)]
_Count = Annotated[int, Field(ge=1)]


class _Part(BaseModel):
    # Later releases of one format version may add keys.
    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")


class ModelDescription(_Part):
    """The model's name and sizes."""

    name: str
    model_type: str
    num_hidden_layers: _Count
    num_attention_heads: _Count
    num_key_value_heads: _Count
    head_dim: _Count
    vocab_size: _Count
    max_position_embeddings: _Count


class Bucket(_Part):
    """The heads of one width in a layer: `heads` is the first, and the one behind the last."""

    width: _Size
    heads: Annotated[list[int], Field(min_length=2, max_length=2)]


class TensorDescription(_Part):
    """An input or output; sizes that vary are names. What only the cache's tensors have is None elsewhere."""

    name: str
    dtype: str
    shape: list[int | str]
    layer: int | None = None
    region: str | None = None
    width: int | None = None
    part: str | None = None


class Quantization(_Part):
    """How weights of 8 or 4 bits are stored; `difference`: how much of their norm logits differ by."""

    operator: str
    bits: int
    block_size: int
    difference: float | None


class FolderDescription(_Part):
    """The content of `leank_onnx.json`."""

    opset: int
    dtype: Literal["float32", "float16"]
    weights: Literal["float32", "float16", "int8", "int4"]
    quantization: Quantization | None
    model: ModelDescription
    bos_token_id: int | None
    eos_token_ids: list[int]
    sink_size: _Size
    recent_size: _Size
    flush_size: _Count
    widths: list[list[int]]
    buckets: list[list[Bucket]]
    channel_order: list[list[list[int]]]
    head_permutation: list[list[int]] | None
    inputs: list[TensorDescription]
    outputs: list[TensorDescription]
    files: dict[str, str]

    @property
    def pruning_ratio(self) -> float:
        """Fraction of channels removed, over the whole model."""
        kept, heads = sum(map(sum, self.widths)), sum(map(len, self.widths))
        return 1 - kept / (heads * self.model.head_dim)


def read_description(folder: Path) -> FolderDescription:
    """Read a folder's description, and check that every key is there and of its type.

    Raises:
        LeanKError: If it cannot be read, is of another format version, or keys are missing or make no sense.
    """
    path = folder / ONNX_DESCRIPTION_NAME
    content = read_json(path)
    version = content.get("format_version")
    if version != FORMAT_VERSION:
        raise LeanKError(
            f"`{path}`: `format_version` is `{version}`; this release reads {FORMAT_VERSION}",
            hint="export the model again, or use the release of leank-convert that wrote it",
        )
    try:
        return FolderDescription.model_validate(content)
    except ValidationError as error:
        items = error.errors(include_url=False)
    places = [(".".join(map(str, item["loc"])), item) for item in items]
    if missing := [f"`{place}`" for place, item in places if item["type"] == "missing"]:
        raise LeanKError(f"`{path}` lacks {', '.join(missing)}", hint="export the model again")
    place, item = places[0]
    raise LeanKError(
        f"`{path}`: `{place}` is `{item['input']!r}`: {item['msg'][0].lower() + item['msg'][1:]}",
        hint="export the model again",
    )


def check_heads(description: FolderDescription) -> None:
    """Check that widths, buckets, lanes and the heads' order fit one another and the model's sizes.

    Raises:
        LeanKError: If they do not.
    """
    model = description.model
    heads, channels = range(model.num_key_value_heads), range(model.head_dim)
    tables: dict[str, list[Any] | None] = {
        "widths": description.widths,
        "buckets": description.buckets,
        "channel_order": description.channel_order,
        "head_permutation": description.head_permutation,
    }
    for key, rows in tables.items():
        if rows is not None and len(rows) != model.num_hidden_layers:
            raise LeanKError(f"`{key}` has {len(rows)} layers, the model {model.num_hidden_layers}")
    for layer, row in enumerate(description.widths):
        if len(row) != len(heads) or row != sorted(row) or not 0 <= row[0] <= row[-1] <= len(channels):
            raise LeanKError(
                f"`widths[{layer}]` is {row}: not {len(heads)} numbers ascending within 0 and {len(channels)}"
            )
        expected = [
            Bucket(width=width, heads=[row.index(width), row.index(width) + row.count(width)])
            for width in sorted(set(row))
        ]
        if description.buckets[layer] != expected:
            found = [bucket.model_dump() for bucket in description.buckets[layer]]
            raise LeanKError(f"`buckets[{layer}]` is {found}; the widths are {row}")
        _check_lanes(description, layer)
        if description.head_permutation is not None:
            _check_permutation(description.head_permutation[layer], row, layer)


def _check_lanes(description: FolderDescription, layer: int) -> None:
    orders, row = description.channel_order[layer], description.widths[layer]
    if len(orders) != len(row):
        raise LeanKError(f"`channel_order[{layer}]` has {len(orders)} heads, the model {len(row)}")
    for head, (order, width) in enumerate(zip(orders, row, strict=True)):
        if sorted(order) != list(range(description.model.head_dim)):
            raise LeanKError(
                f"`channel_order[{layer}][{head}]` is {order}, no order of the {description.model.head_dim} "
                "channels"
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
