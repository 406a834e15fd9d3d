"""Description and cache of a graph exported by leank-convert; travels with `leank_onnx.py`.

`Description` reads leank_onnx.json, and `Cache` holds keys and values in arrays that onnxruntime reads where
they lie. Hosts in other languages do the same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

FORMAT_VERSION = 1
DESCRIPTION_FILE = "leank_onnx.json"
MODEL_FILE = "model.onnx"

_DTYPES: dict[str, type[np.floating[Any]]] = {"float32": np.float32, "float16": np.float16}
_CAPACITY_STEP = 64

Array = np.ndarray[Any, np.dtype[Any]]
Pair = tuple[Array, Array]  # of keys and values
# Per layer, of the new tokens: K [B, H_kv, Q, D] and V [B, H_kv, D, Q].
Present = Sequence[Pair]


class LeanKOnnxError(ValueError):
    """What the caller can put right: names the file or argument, its value and the remedy."""


class LeanKOnnxMemoryError(LeanKOnnxError, MemoryError):
    """Memory does not suffice for so many tokens or rows at a time; fewer may fit."""


def require(condition: bool, message: str) -> None:
    """Raise LeanKOnnxError with the message unless the condition holds."""
    if not condition:
        raise LeanKOnnxError(message)


def read_object(path: Path, remedy: str) -> dict[str, Any]:
    """Read a JSON object; raise LeanKOnnxError with the remedy if the file holds none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise LeanKOnnxError(f"`{path}` is no JSON: {error}; {remedy}") from None
    require(isinstance(content, dict), f"`{path}` is no JSON object; {remedy}")
    return dict(content)


def digest_of(description: Mapping[str, Any]) -> str:
    """SHA-256 of a description's values but `sha256` itself, in whatever order they stand."""
    values = {key: value for key, value in description.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


class Bucket(NamedTuple):
    """Heads of a layer that keep as much of a pruned token: first lanes of K and first channels of V."""

    width: int  # kept channels of K
    heads: slice  # one behind the other
    value_width: int | None = None  # kept channels of V; None for all, in a model whose V is not pruned

    @property
    def name(self) -> str:
        """What tells it from the layer's others; of pruned V, several may have one width."""
        return f"{self.width}" if self.value_width is None else f"{self.width}.{self.heads.start}"

    def shapes(self, batch: Any, num_columns: Any, head_dim: int) -> tuple[list[Any], list[Any]]:
        """Shapes of its pruned K and V; sizes may be numbers or names."""
        count, rows = self.heads.stop - self.heads.start, self.value_width
        rows = head_dim if rows is None else rows
        return [batch, count, num_columns, self.width], [batch, count, rows, num_columns]


class Description:
    """What decoding needs of `leank_onnx.json`, as it was written: its own digest tells."""

    def __init__(self, folder: Path) -> None:
        """Read the description in a folder, and no other file; raise LeanKOnnxError if it cannot be read."""
        self._folder, path = folder, folder / DESCRIPTION_FILE
        require(
            path.is_file(), f"`{path}` does not exist: pass a folder that `leank-convert export-onnx` wrote"
        )
        self.content: Mapping[str, Any] = read_object(path, "export the model again")
        content, version = self.content, self.content.get("format_version")
        require(
            version == FORMAT_VERSION,
            f"`{path}`: format_version is {version!r:.60}, this program reads {FORMAT_VERSION}: use the "
            "leank_onnx.py that lies beside it, or export the model again",
        )
        require(
            content.get("sha256") == digest_of(content),
            f"`{path}` was changed: its `sha256` is not that of its other values; copy it again, or "
            "export the model again",
        )
        try:
            model = content["model"]
            self.dtype = _DTYPES[content["dtype"]]  # of the cache and the logits
            self.vocab_size = _integer(model["vocab_size"])
            self.num_heads = _integer(model["num_key_value_heads"])  # of every layer
            self.head_dim = _integer(model["head_dim"])
            self.max_position_embeddings = _integer(model["max_position_embeddings"])
            self.sink_size = _integer(content["sink_size"])
            self.recent_size = _integer(content["recent_size"])
            self.flush_size = _integer(content["flush_size"])
            # Per layer, those aside whose heads see no pruned token.
            self.buckets = [
                [
                    Bucket(_integer(bucket["width"]), slice(*bucket["heads"]), bucket.get("value_width"))
                    for bucket in layer
                    if bucket["width"]
                ]
                for layer in content["buckets"]
            ]
            self.eos_token_ids = frozenset(map(_integer, content["eos_token_ids"]))
            self.files: dict[str, str] = dict(content["files"])  # SHA-256 by name
        except (LookupError, TypeError, ValueError, AttributeError) as error:  # sealed, but not by an export
            raise LeanKOnnxError(
                f"`{path}` lacks a value, or has one of no use ({type(error).__name__}: {error!s:.60}); "
                "export the model again"
            ) from None

    @property
    def ring_size(self) -> int:
        """Slots of the window behind the sink, while decoding."""
        return self.recent_size + self.flush_size

    @property
    def num_slots(self) -> int:
        """Most slots of the window, while decoding."""
        return self.sink_size + self.ring_size

    def check_graph(self) -> None:
        """Look whether the graph and its weights are there, and whether it is the graph that is described."""
        for name in self.files:
            # Whoever does without a tokenizer or a README may leave it out.
            require(
                not name.startswith(MODEL_FILE) or (self._folder / name).is_file(),
                f"`{self._folder / name}` is missing: copy it again, it belongs to `{DESCRIPTION_FILE}`",
            )
        self.check_file(MODEL_FILE)  # small: weights lie in a file of their own

    def check_file(self, name: str) -> None:
        """Compare a file with its digest, and raise LeanKOnnxError if it differs or is missing."""
        path, digest = self._folder / name, hashlib.sha256()
        require(path.is_file(), f"`{path}` is missing: copy it again")
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
        found, expected = digest.hexdigest(), self.files.get(name)
        require(
            found == expected,
            f"`{path}` differs from what was exported: sha256 {found}, not {expected}; copy it again",
        )


def _integer(value: object) -> int:
    """A whole number that is none below 0, or TypeError."""
    if type(value) is not int or value < 0:
        raise TypeError(f"{value!r:.60} is no size")
    return value


class Cache:
    """Keys and values of rows of tokens, in arrays that onnxruntime reads where they lie.

    Per row, without padding:

        tokens 0 ... n-1 :  [ sink: min(n, sink_size) ][ pruned: p ][ recent: the rest ]

    A window holds sink and recent tokens with all channels, token t in slot t while t < sink_size, else in
    slot sink_size + (t - sink_size) mod (recent_size + flush_size). Slots that no token has reached are made
    as tokens come. The pruned arrays hold each bucket's kept channels, token sink_size + j in column j: of K
    the first `width` lanes, of V all, or the first `value_width` where V is pruned. While prompts are read,
    windows hold all of them and nothing is pruned; `split` parts them.

    Attributes:
        lengths: Tokens per row `[B]`.
        pruned_lengths: How many of them are pruned `[B]`.
    """

    def __init__(self, description: Description, batch: int, num_slots: int, num_columns: int = 1) -> None:
        """Make room for `num_slots` tokens a row in the windows, and for pruned ones."""
        self.lengths, self.pruned_lengths = np.zeros(batch, np.int64), np.zeros(batch, np.int64)
        self._description = description
        # Per layer [B, H_kv, slots, D] and [B, H_kv, D, slots].
        self._windows = [self._new_window(num_slots) for _ in description.buckets]
        # By layer and bucket [B, heads, capacity, width] and [B, heads, D or value_width, capacity]; never
        # without a column, since a graph's input must not be empty.
        self._pruned = {
            (layer, bucket.name): self._new(bucket, num_columns) for layer, bucket in self._buckets()
        }

    def tensors(self) -> dict[str, Array]:
        """Return the arrays by the names of the graph's inputs; V of a bucket that keeps none is no input."""
        regions = {f"{layer}.window": window for layer, window in enumerate(self._windows)}
        regions |= {f"{layer}.pruned.{name}": store for (layer, name), store in self._pruned.items()}
        return {
            f"past_key_values.{region}.{part}": array
            for region, arrays in regions.items()
            for part, array in zip(("key", "value"), arrays, strict=True)
            if array.size
        }

    def write_prompt(self, present: Present, counts: Array, num_left: int) -> None:
        """Write a chunk of all prompts.

        Args:
            present: K and V of the chunk.
            counts: How many of its tokens belong to each row `[B]`: all, until a row's prompt ends.
            num_left: Tokens of the longest prompt after this chunk.
        """
        start = int(self.lengths.max())
        stop = start + present[0][0].shape[2]
        if stop > self._windows[0][0].shape[2]:
            # Twice what is there, since every slot costs time, empty or not.
            self._grow_windows(min(2 * stop, stop + num_left))
        # A row that has ended is padded: what its padding leaves lies behind its length, where nothing looks.
        for (keys, values), (new_keys, new_values) in zip(self._windows, present, strict=True):
            keys[:, :, start:stop] = new_keys
            values[..., start:stop] = new_values
        self.lengths += counts

    def split(self) -> None:
        """Part the prompts, which lie whole in the windows, into sink, pruned and recent tokens."""
        d = self._description
        self.pruned_lengths = np.maximum(self.lengths - d.sink_size - d.recent_size, 0)
        capacity = _capacity(int(self.pruned_lengths.max()))
        for layer, (keys, values) in enumerate(self._windows):
            window_keys, window_values = self._new_window(self._slots_for(int(self.lengths.max())))
            for bucket in d.buckets[layer]:
                self._pruned[layer, bucket.name] = self._new(bucket, capacity)
            for row, (length, pruned) in enumerate(zip(self.lengths, self.pruned_lengths, strict=True)):
                sink = min(int(length), d.sink_size)
                tokens = np.concatenate([np.arange(sink), np.arange(d.sink_size + pruned, length)])
                slots = self._slots_of(tokens)
                window_keys[row][:, slots] = keys[row][:, tokens]
                window_values[row][..., slots] = values[row][..., tokens]
                self._write_pruned(layer, row, 0, keys[row], values[row], np.arange(sink, sink + pruned))
            # The prompt's own memory is let go of layer by layer.
            self._windows[layer] = (window_keys, window_values)

    def make_room(self, rows: Array) -> None:
        """Flush where a row of `rows` [B], bool, has no slot for one more token; make slots not there yet."""
        d = self._description
        num_tokens = int(self.lengths.max(initial=0, where=rows)) + 1
        # The last layer's: where memory ran out half-way, the next attempt does the rest.
        if min(num_tokens, d.num_slots) > self._windows[-1][0].shape[2]:
            self._grow_windows(self._slots_for(num_tokens))
        in_recent = self.lengths - d.sink_size - self.pruned_lengths
        full = np.flatnonzero(rows & (in_recent >= d.ring_size))
        if not full.size:
            return
        self._grow_pruned(int(self.pruned_lengths[full].max()) + d.flush_size)
        for row in full.tolist():
            start = int(self.pruned_lengths[row])
            slots = self._slots_of(d.sink_size + start + np.arange(d.flush_size))
            for layer, (keys, values) in enumerate(self._windows):
                self._write_pruned(layer, row, start, keys[row], values[row], slots)
        self.pruned_lengths[full] += d.flush_size

    def append(self, present: Present, position: int, rows: Array) -> None:
        """Write the token at `position` of `rows` [B], bool, which have room for it."""
        chosen = np.flatnonzero(rows)
        slots = self._slots_of(self.lengths[chosen])
        for (keys, values), (new_keys, new_values) in zip(self._windows, present, strict=True):
            keys[chosen, :, slots] = new_keys[chosen, :, position]
            values[chosen, :, :, slots] = new_values[chosen, :, :, position]
        self.lengths[chosen] += 1

    def _write_pruned(
        self, layer: int, row: int, start: int, keys: Array, values: Array, slots: Array
    ) -> None:
        """Copy the tokens in `slots` of a row's window `[H_kv, S, D]`, `[H_kv, D, S]` to `start` onwards."""
        stop = start + len(slots)
        for bucket in self._description.buckets[layer]:
            pruned_keys, pruned_values = self._pruned[layer, bucket.name]
            pruned_keys[row, :, start:stop] = keys[bucket.heads, :, : bucket.width][:, slots]
            pruned_values[row, :, :, start:stop] = values[bucket.heads, : bucket.value_width][..., slots]

    def _grow_windows(self, num_slots: int) -> None:
        for layer, old in enumerate(self._windows):
            if num_slots > old[0].shape[2]:
                self._windows[layer] = _copied(old, self._new_window(num_slots))

    def _grow_pruned(self, num_tokens: int) -> None:
        """Allocate anew where there is no room for `num_tokens` pruned ones."""
        # Looked at one by one: where memory ran out half-way, the next attempt does the rest.
        for layer, bucket in self._buckets():
            old = self._pruned[layer, bucket.name]
            if num_tokens > old[0].shape[2]:
                self._pruned[layer, bucket.name] = _copied(old, self._new(bucket, _capacity(num_tokens)))

    def _slots_of(self, tokens: Array) -> Array:
        d = self._description
        return np.where(tokens < d.sink_size, tokens, d.sink_size + (tokens - d.sink_size) % d.ring_size)

    def _slots_for(self, num_tokens: int) -> int:
        """Slots to allocate while decoding rows of up to `num_tokens` tokens."""
        return min(self._description.num_slots, _capacity(num_tokens))

    def _buckets(self) -> Iterator[tuple[int, Bucket]]:
        """Layer by layer all buckets."""
        for layer, buckets in enumerate(self._description.buckets):
            yield from ((layer, bucket) for bucket in buckets)

    def _new_window(self, num_slots: int) -> Pair:
        d = self._description
        # The graph divides by the difference of slots and sink, whatever its sign.
        return self._new(Bucket(d.head_dim, slice(0, d.num_heads)), num_slots + (num_slots == d.sink_size))

    def _new(self, bucket: Bucket, size: int) -> Pair:
        d = self._description
        keys, values = bucket.shapes(len(self.lengths), size, d.head_dim)
        return np.zeros(keys, d.dtype), np.zeros(values, d.dtype)


def _copied(old: Pair, new: Pair) -> Pair:
    """Copy keys and values into larger arrays."""
    (old_keys, old_values), (keys, values) = old, new
    keys[:, :, : old_keys.shape[2]] = old_keys
    values[..., : old_values.shape[3]] = old_values
    return new


def _capacity(num_tokens: int) -> int:
    """Columns or slots to allocate for tokens: a sixteenth more, so that copying per token stays constant."""
    return max(-(-(num_tokens + num_tokens // 16) // _CAPACITY_STEP), 1) * _CAPACITY_STEP
