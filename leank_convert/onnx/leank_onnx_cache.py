"""The cache that leank_onnx.py keeps: arrays that onnxruntime reads where they lie, and what moves in them.

Per row, without padding:

    tokens 0 ... n-1 :  [ sink: min(n, sink_size) ][ pruned: p ][ recent: the rest ]

`window` holds sink and recent tokens with all channels, token t in slot t while t < sink_size, else in slot
sink_size + (t - sink_size) mod (recent_size + flush_size). `pruned` holds each bucket's kept channels, token
sink_size + j in column j. While a prompt is read, `window` holds all of it and nothing is pruned.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING or __package__:
    from .leank_onnx_description import Array, Bucket, Description
else:  # beside the graph
    from leank_onnx_description import Array, Bucket, Description

_CAPACITY_STEP = 64

# Per layer, of the new tokens: K [B, H_kv, Q, D] and V [B, H_kv, D, Q].
Present = Sequence[tuple[Array, Array]]


class Cache:
    """Keys and values of rows of tokens: of whole prompts at first, then split into window and pruned tokens.

    Attributes:
        lengths: Tokens per row `[B]`.
        pruned_lengths: How many of them are pruned `[B]`.
        moves: How often arrays were replaced: an address taken before is void.
    """

    def __init__(self, description: Description, batch: int, num_slots: int) -> None:
        """Make room for prompts that are read whole.

        Args:
            description: Shapes and window sizes.
            batch: Rows.
            num_slots: Slots of the window, more than sink_size.
        """
        self.lengths, self.pruned_lengths = np.zeros(batch, np.int64), np.zeros(batch, np.int64)
        self.moves = 0
        self._description = description
        # Per layer [B, H_kv, slots, D] and [B, H_kv, D, slots].
        self._windows = [self._new_window(num_slots) for _ in description.buckets]
        # By layer and width [B, heads, capacity, width] and [B, heads, D, capacity]; never without a column,
        # since a graph's input must not be empty.
        self._pruned = {
            (layer, bucket.width): self._new_pruned(bucket, 1) for layer, bucket in self._seen_buckets()
        }

    def tensors(self) -> dict[str, Array]:
        """Return the arrays by the names of the graph's inputs."""
        regions = {f"{layer}.window": window for layer, window in enumerate(self._windows)}
        regions |= {f"{layer}.pruned.{width}": store for (layer, width), store in self._pruned.items()}
        return {
            f"past_key_values.{region}.{part}": array
            for region, arrays in regions.items()
            for part, array in zip(("key", "value"), arrays, strict=True)
        }

    def write_prompt(self, present: Present, counts: Array, num_left: int) -> None:
        """Write a chunk of all prompts.

        Args:
            present: K and V of the chunk.
            counts: How many of its tokens belong to each row `[B]`: all, until a row's prompt ends.
            num_left: Tokens of the longest prompt that are still to come.
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
        self.moves += 1
        self.pruned_lengths = np.maximum(self.lengths - d.sink_size - d.recent_size, 0)
        capacity = _capacity(int(self.pruned_lengths.max()))
        for layer, buckets in enumerate(d.buckets):
            keys, values = self._windows[layer]
            window_keys, window_values = self._new_window(d.num_slots)
            for bucket in buckets:
                if bucket.width:
                    self._pruned[layer, bucket.width] = self._new_pruned(bucket, capacity)
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
        """Flush where a row of `rows` [B], bool, has no slot for one more token."""
        d = self._description
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
            if bucket.width:
                heads = slice(bucket.first, bucket.stop)
                pruned_keys, pruned_values = self._pruned[layer, bucket.width]
                pruned_keys[row, :, start:stop] = keys[heads, :, : bucket.width][:, slots]
                pruned_values[row, :, :, start:stop] = values[heads][..., slots]

    def _grow_windows(self, num_slots: int) -> None:
        self.moves += 1
        for layer, (old_keys, old_values) in enumerate(self._windows):
            keys, values = self._new_window(num_slots)
            keys[:, :, : old_keys.shape[2]] = old_keys
            values[..., : old_values.shape[3]] = old_values
            self._windows[layer] = (keys, values)

    def _grow_pruned(self, num_tokens: int) -> None:
        """Allocate anew where there is no room for `num_tokens` pruned ones."""
        # Looked at one by one: where memory ran out half-way, the next attempt does the rest.
        for layer, bucket in self._seen_buckets():
            old_keys, old_values = self._pruned[layer, bucket.width]
            if num_tokens <= old_keys.shape[2]:
                continue
            self.moves += 1
            keys, values = self._new_pruned(bucket, _capacity(num_tokens))
            keys[:, :, : old_keys.shape[2]] = old_keys
            values[..., : old_values.shape[3]] = old_values
            self._pruned[layer, bucket.width] = (keys, values)

    def _slots_of(self, tokens: Array) -> Array:
        d = self._description
        return np.where(tokens < d.sink_size, tokens, d.sink_size + (tokens - d.sink_size) % d.ring_size)

    def _seen_buckets(self) -> Iterator[tuple[int, Bucket]]:
        """Layer and bucket of all heads that see pruned tokens."""
        for layer, buckets in enumerate(self._description.buckets):
            yield from ((layer, bucket) for bucket in buckets if bucket.width)

    def _new_window(self, num_slots: int) -> tuple[Array, Array]:
        d, batch = self._description, len(self.lengths)
        return (
            np.zeros((batch, d.num_heads, num_slots, d.head_dim), d.dtype),
            np.zeros((batch, d.num_heads, d.head_dim, num_slots), d.dtype),
        )

    def _new_pruned(self, bucket: Bucket, capacity: int) -> tuple[Array, Array]:
        d, batch, heads = self._description, len(self.lengths), bucket.stop - bucket.first
        return (
            np.zeros((batch, heads, capacity, bucket.width), d.dtype),
            np.zeros((batch, heads, d.head_dim, capacity), d.dtype),
        )


def _capacity(num_tokens: int) -> int:
    """Columns to allocate for pruned tokens: a sixteenth more, so that copying per token stays constant."""
    return max(-(-(num_tokens + num_tokens // 16) // _CAPACITY_STEP), 1) * _CAPACITY_STEP
