"""Unpruned layers: those without full attention keep transformers' own cache.

What they hold is bounded already, by a window or as a state. Here is what a `LeanKCache` needs of them beyond
what their classes do by themselves.

A decode step can be captured as a graph once windows are full: what such a layer holds then keeps its shape.
The layer's own `update` runs as ever; what it puts in the place of its tensors is then copied into them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedConfig

from .memory_leank import CacheMemory, RegionBytes
from .rows_leank import is_writable

_STATES = ("keys", "values", "conv_states", "recurrent_states")


class OtherLayers:
    """The layers of a cache that are not pruned, and what decode steps want of them.

    Args:
        layers: transformers' cache layers by number.
    """

    def __init__(self, layers: Mapping[int, Any]) -> None:
        self.by_number = dict(layers)
        # What stays where it is for captured steps: what layers hold, and which of the last tokens a step's
        # column sees [B, 1, 1, window].
        self._own: list[torch.Tensor | None] = []
        self._seen: torch.Tensor | None = None

    def __iter__(self) -> Iterator[Any]:
        return iter(self.by_number.values())

    def __len__(self) -> int:
        return len(self.by_number)

    @property
    def _window(self) -> int:
        """Tokens that a layer with a window attends to, 0 without such layers; all have the same."""
        return max((getattr(layer, "sliding_window", 0) for layer in self), default=0)

    def why_eager(self, num_columns: int) -> str | None:
        """Return why a decode step of so many columns runs as any other input does; None if it need not."""
        if not self:
            return None
        if num_columns > 1:
            return "several columns beside layers that are not pruned"
        if torch.is_grad_enabled():
            return "gradients are enabled"
        for layer in self:
            if getattr(layer, "record_past", False):
                return "layers that are not pruned keep what a crop would want back"
            window = getattr(layer, "sliding_window", None)
            if window is not None and (layer.keys is None or layer.keys.shape[2] != window - 1):
                return f"a window of {window} tokens, in layers that are not pruned, is not full"
        return None

    def prepare_step(self, attention_mask: torch.Tensor | None) -> None:
        """Make what layers hold, and which columns are real, lie where captured steps find it.

        Args:
            attention_mask: Real columns `[B, columns]`, the step's among them; None if all are.
        """
        self.settle()
        if not self._window:
            return
        keys = next(layer.keys for layer in self if hasattr(layer, "sliding_window"))
        shape = (len(keys), 1, 1, self._window)
        if self._seen is None or self._seen.shape != shape or self._seen.device != keys.device:
            with torch.inference_mode(False):
                self._seen = torch.ones(shape, dtype=torch.bool, device=keys.device)
        self._seen[:, 0, 0] = True if attention_mask is None else attention_mask[:, -self._window :]

    @property
    def step_mask(self) -> dict[str, torch.Tensor | None] | None:
        """What a model takes as a prepared step's mask: one of its kinds of layers, where it has windows."""
        return {"full_attention": None, "sliding_attention": self._seen} if self._window else None

    def settle(self) -> None:
        """Copy what layers have put in the place of their tensors into these, where shapes are the same."""
        places = self._places()
        if len(self._own) != len(places):
            self._own = [None] * len(places)
        for index, (holder, key) in enumerate(places):
            held, own = holder[key], self._own[index]
            if own is None or _kind(own) != _kind(held) or not is_writable(own):
                # Not `held` itself: a prompt's last tokens are a part of all its tokens.
                own = held.clone(memory_format=torch.contiguous_format)
            elif own is not held:
                own.copy_(held)
            holder[key] = self._own[index] = own

    def addresses(self) -> tuple[int, ...]:
        """Return where a prepared step finds what layers hold."""
        seen = () if self._seen is None else (self._seen.data_ptr(),)
        return (*seen, *(holder[key].data_ptr() for holder, key in self._places()))

    def advance(self, num_columns: int) -> None:
        """Count columns that a replayed step has added."""
        for layer in self:
            if hasattr(layer, "sliding_window"):
                layer.cumulative_length += num_columns

    def select(self, rows: torch.Tensor) -> None:
        """Keep the given rows, in that order, repeats allowed."""
        for layer in self:
            layer.reorder_cache(rows)

    def _places(self) -> list[tuple[dict[Any, Any], Any]]:
        """Return every dictionary that holds a tensor of a layer, and its key there."""
        places = []
        for layer in self:
            for name in _STATES:
                held = vars(layer).get(name)
                # In newer releases of transformers a layer may have several states of a kind.
                holder, keys = (held, [*held]) if isinstance(held, dict) else (vars(layer), [name])
                places += [(holder, key) for key in keys if isinstance(holder.get(key), torch.Tensor)]
        return places


def _kind(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


def build_other_layers(config: PreTrainedConfig, pruned: Sequence[int]) -> OtherLayers:
    """Return transformers' cache layers of a model's layers but the pruned ones."""
    num_layers = int(config.num_hidden_layers)
    if len(pruned) == num_layers:
        return OtherLayers({})
    layers = DynamicCache(config=config).layers
    return OtherLayers({index: layers[index] for index in range(num_layers) if index not in pruned})


def other_memory(layer: Any) -> CacheMemory:
    """Count what such a layer holds of keys and values; a state is neither."""
    keys, values = (
        0 if states is None else states.numel() * states.element_size()
        for states in (getattr(layer, name, None) for name in ("keys", "values"))
    )
    return CacheMemory(
        other_keys=RegionBytes(keys, keys),
        other_values=RegionBytes(values, values),
        dense_keys=keys,
        dense_values=values,
    )


def check_croppable(layers: OtherLayers) -> None:
    """Check that columns can be dropped of such layers.

    Raises:
        ValueError: If a window that they attend within has left tokens behind which would be in it again, or
            they hold a state of all tokens.
    """
    for layer in layers:
        window = getattr(layer, "sliding_window", None)
        if window is None:
            raise ValueError(
                "crop of a cache with layers of linear attention, whose state cannot forget a token; run the "
                "prompt again"
            )
        if layer.get_seq_length() >= window and not getattr(layer, "record_past", False):
            raise ValueError(
                f"crop of a cache whose layers with a window of {window} tokens keep no tokens before it; "
                "crop before so many are in it, or run the prompt again"
            )


def concatenate_other_layers(parts: Sequence[Any]) -> Any:
    """Return a layer with the rows of several, in order; in a window fewer columns become left padding."""
    joined = copy.copy(parts[0])
    if not hasattr(joined, "sliding_window"):
        for name, value in vars(joined).items():
            if isinstance(value, dict):  # several states, or what is known of each
                setattr(joined, name, dict(value))
        for name in ("conv_states", "recurrent_states"):
            states = [getattr(part, name) for part in parts]
            if isinstance(states[0], dict):
                setattr(joined, name, {key: torch.cat([s[key] for s in states]) for key in states[0]})
            else:  # in older releases of transformers
                setattr(joined, name, torch.cat(states))
        return joined
    joined.cumulative_length = max(part.cumulative_length for part in parts)
    longest = max(part.keys.shape[2] for part in parts)
    for name in ("keys", "values"):
        states = [getattr(part, name) for part in parts]
        padded = [torch.nn.functional.pad(s, (0, 0, longest - s.shape[2], 0)) for s in states]
        setattr(joined, name, torch.cat(padded))
    return joined
