"""leank_onnx.json as leank_onnx.py reads it: shapes, window sizes and buckets; and the errors it tells."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

FORMAT_VERSION = 1
DESCRIPTION_FILE = "leank_onnx.json"
MODEL_FILE = "model.onnx"
_DTYPES: dict[str, type[np.floating[Any]]] = {"float32": np.float32, "float16": np.float16}

Array = np.ndarray[Any, np.dtype[Any]]


class LeanKOnnxError(ValueError):
    """What the caller can put right: names the file or argument, its value and the remedy."""


class LeanKOnnxMemoryError(LeanKOnnxError, MemoryError):
    """Memory does not suffice for so many tokens or rows at a time; fewer may fit."""


def require(condition: bool, message: str) -> None:
    """Raise LeanKOnnxError with the message unless the condition holds."""
    if not condition:
        raise LeanKOnnxError(message)


@dataclass(frozen=True)
class Bucket:
    """The heads of one width in a layer: heads `first` to `stop`, `stop` not among them."""

    width: int
    first: int
    stop: int


@dataclass(frozen=True)
class Description:
    """What `leank_onnx.json` says that decoding needs.

    Attributes:
        dtype: Element type of the cache and the logits.
        vocab_size: Length of a row of logits.
        num_heads: Key/value heads of every layer.
        head_dim: Channels of a head.
        sink_size, recent_size, flush_size: Window sizes.
        buckets: Per layer, its heads by width, contiguous.
        eos_token_ids: Tokens that end an answer.
        max_position_embeddings: Positions that the model's config names.
        files: SHA-256 of every file by its name.
    """

    dtype: type[np.floating[Any]]
    vocab_size: int
    num_heads: int
    head_dim: int
    sink_size: int
    recent_size: int
    flush_size: int
    buckets: tuple[tuple[Bucket, ...], ...]
    eos_token_ids: frozenset[int]
    max_position_embeddings: int
    files: Mapping[str, str]

    @property
    def ring_size(self) -> int:
        """Slots of the window behind the sink, while decoding."""
        return self.recent_size + self.flush_size

    @property
    def num_slots(self) -> int:
        """Slots of the window, while decoding."""
        return self.sink_size + self.ring_size

    @classmethod
    def read(cls, folder: Path) -> Description:
        """Read it and look whether every file that it lists is there.

        Raises:
            LeanKOnnxError: If the folder is no export, is of another format, or lacks a file.
        """
        path = folder / DESCRIPTION_FILE
        if not path.is_file():
            raise LeanKOnnxError(
                f"`{path}` does not exist: pass a folder that `leank-convert export --format onnx` wrote"
            )
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise LeanKOnnxError(f"`{path}` is no JSON: {error}; export the model again") from None
        require(isinstance(content, dict), f"`{path}` is no JSON object; export the model again")
        version = content.get("format_version")
        if version != FORMAT_VERSION:
            raise LeanKOnnxError(
                f"`{path}`: format_version is {version!r}, this leank_onnx.py reads {FORMAT_VERSION}: use "
                "the leank_onnx.py that lies beside it, or export the model again"
            )
        try:
            description = cls._parse(content)
        except KeyError as error:
            raise LeanKOnnxError(f"`{path}` lacks `{error.args[0]}`; export the model again") from None
        except (TypeError, AttributeError) as error:
            raise LeanKOnnxError(f"`{path}` is damaged: {error}; export the model again") from None
        for name in description.files:
            # Whoever does without a tokenizer or a README may leave it out.
            if name.startswith(MODEL_FILE) and not (folder / name).is_file():
                raise LeanKOnnxError(
                    f"`{folder / name}` is missing: copy it from where the model was exported, it belongs to "
                    f"`{DESCRIPTION_FILE}`"
                )
        return description

    @classmethod
    def _parse(cls, content: Mapping[str, Any]) -> Description:
        model = content["model"]
        require(
            content["dtype"] in _DTYPES,
            f"`{DESCRIPTION_FILE}`: dtype `{content['dtype']}` has no numpy type; use {sorted(_DTYPES)}",
        )
        description = cls(
            dtype=_DTYPES[content["dtype"]],
            vocab_size=model["vocab_size"],
            num_heads=model["num_key_value_heads"],
            head_dim=model["head_dim"],
            sink_size=content["sink_size"],
            recent_size=content["recent_size"],
            flush_size=content["flush_size"],
            buckets=tuple(
                tuple(Bucket(bucket["width"], *bucket["heads"]) for bucket in layer)
                for layer in content["buckets"]
            ),
            eos_token_ids=frozenset(content["eos_token_ids"]),
            max_position_embeddings=model["max_position_embeddings"],
            files=dict(content["files"].items()),
        )
        sizes: list[tuple[str, Any, int]] = [
            (f"model.{key}", model[key], 1)
            for key in ("vocab_size", "num_key_value_heads", "head_dim", "max_position_embeddings")
        ]
        sizes += [("sink_size", content["sink_size"], 0), ("recent_size", content["recent_size"], 0)]
        sizes += [("flush_size", content["flush_size"], 1)]
        sizes += [("an entry of eos_token_ids", token, 0) for token in description.eos_token_ids]
        sizes += [
            (f"a width of layer {layer}", bucket.width, 0)
            for layer, buckets in enumerate(description.buckets)
            for bucket in buckets
        ]
        for name, size, least in sizes:
            require(
                type(size) is int and size >= least,
                f"`{DESCRIPTION_FILE}`: {name} is {size!r}, not {least} or more; export the model again",
            )
        for layer, buckets in enumerate(description.buckets):
            require(
                [0, *(bucket.stop for bucket in buckets)]
                == [*(bucket.first for bucket in buckets), description.num_heads],
                f"`{DESCRIPTION_FILE}`: the buckets of layer {layer} do not hold each of its "
                f"{description.num_heads} heads once, in order; export the model again",
            )
        return description
