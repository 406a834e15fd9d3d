"""`MixedCache`: the cache of a model of which some layers are not pruned and keep transformers' own cache.

What those layers hold is bounded already, by a window or as a state. Here is what a `LeanKCache` needs of
them beyond what their classes do by themselves.

A decode step can be captured as a graph once windows are full: what such a layer holds then keeps its shape.
The layer's own `update` runs as ever; what it puts in the place of its tensors is then copied into them.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedConfig

from .cache_leank import LeanKCache
from .layer_leank import LeanKLayer
from .memory_leank import CacheMemory, count_whole
from .rows_leank import is_writable

_STATES = ("keys", "values", "conv_states", "recurrent_states")


class MixedCache(LeanKCache):
    """A `LeanKCache` beside whose pruned layers are others, of transformers' own classes."""

    def __init__(self, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        pruned = {layer.layer_idx for layer in self.pruned_layers}
        layers = DynamicCache(config=config).layers
        self._empty_others = {index: layer for index, layer in enumerate(layers) if index not in pruned}
        self.set_layers(self.pruned_layers, copy.deepcopy(self._empty_others))

    def set_layers(self, pruned: Sequence[LeanKLayer], others: Mapping[int, Any]) -> None:
        """Hold these layers, the others by number."""
        super().set_layers(pruned, others)
        # What stays where it is for captured steps: what layers hold, and which of the last tokens a step's
        # column sees [B, 1, 1, window].
        self._own: list[torch.Tensor | None] = []
        self._seen: torch.Tensor | None = None

    @property
    def _window(self) -> int:
        """Tokens that a layer with a window attends to, 0 without such layers; all have the same."""
        return max((getattr(layer, "sliding_window", 0) for layer in self.other_layers.values()), default=0)

    def takes_step(self, num_columns: int) -> bool:
        """Return whether so many columns are a decode step, which the other layers have to allow."""
        if not super().takes_step(num_columns):
            return False
        why_eager = self._why_eager(num_columns)
        if why_eager is not None:
            self.graph.why_eager = why_eager
        return why_eager is None

    def _why_eager(self, num_columns: int) -> str | None:
        """Return why a decode step of so many columns runs as any other input does; None if it need not."""
        if num_columns > 1:
            return "several columns beside layers that are not pruned"
        if torch.is_grad_enabled():
            return "gradients are enabled"
        for layer in self.other_layers.values():
            if getattr(layer, "record_past", False):
                return "layers that are not pruned keep what a crop would want back"
            window = getattr(layer, "sliding_window", None)
            if window is not None and (layer.keys is None or layer.keys.shape[2] != window - 1):
                return f"a window of {window} tokens, in layers that are not pruned, is not full"
        return None

    def prepare_step(self, num_columns: int, attention_mask: torch.Tensor | None = None) -> None:
        """Make what layers hold, and which columns are real, lie where captured steps find it."""
        self.settle()
        if self._window:
            keys = next(
                layer.keys for layer in self.other_layers.values() if hasattr(layer, "sliding_window")
            )
            shape = (len(keys), 1, 1, self._window)
            if self._seen is None or self._seen.shape != shape or self._seen.device != keys.device:
                with torch.inference_mode(False):
                    self._seen = torch.ones(shape, dtype=torch.bool, device=keys.device)
            self._seen[:, 0, 0] = True if attention_mask is None else attention_mask[:, -self._window :]
        super().prepare_step(num_columns)

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

    def addresses(self) -> tuple[object, ...]:
        """Return objects of which one is another whenever a tensor of the cache becomes another one."""
        seen = () if self._seen is None else (self._seen.data_ptr(),)
        return (*super().addresses(), *seen, *(holder[key].data_ptr() for holder, key in self._places()))

    def advance(self, num_columns: int) -> None:
        """Count columns that a replayed step has added."""
        super().advance(num_columns)
        for layer in self.other_layers.values():
            if hasattr(layer, "sliding_window"):
                layer.cumulative_length += num_columns

    def memory(self) -> CacheMemory:
        """Count bytes used and allocated, by region. Waits for the device."""
        # Of such a layer keys and values count; a state is neither.
        held = ((getattr(layer, name, None) for name in _STATES[:2]) for layer in self.other_layers.values())
        return sum((count_whole("other", *states) for states in held), super().memory())

    def reset(self) -> None:
        """Drop all tokens, and channel masks that were set; `prune` stays."""
        super().reset()
        # transformers' layers, emptied, may still want rows as many as they had.
        self.set_layers(self.pruned_layers, copy.deepcopy(self._empty_others))

    def _check_forgets(self, what: str) -> None:
        if not all(hasattr(layer, "sliding_window") for layer in self.other_layers.values()):
            raise ValueError(
                f"{what} of a cache with layers of linear attention, whose state cannot forget a token; run "
                "the prompt again"
            )

    def _check_croppable(self) -> None:
        self._check_forgets("crop")
        for layer in self.other_layers.values():
            window = layer.sliding_window
            if layer.get_seq_length() >= window and not getattr(layer, "record_past", False):
                raise ValueError(
                    f"crop of a cache whose layers with a window of {window} tokens keep no tokens before "
                    "it; crop before so many are in it, or run the prompt again"
                )

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Keep the given rows, in that order, repeats allowed."""
        for layer in self.other_layers.values():
            layer.reorder_cache(beam_idx)
        super().reorder_cache(beam_idx)

    def _places(self) -> list[tuple[dict[Any, Any], Any]]:
        """Return every dictionary that holds a tensor of a layer, and its key there."""
        places = []
        for layer in self.other_layers.values():
            for name in _STATES:
                held = vars(layer).get(name)
                # In newer releases of transformers a layer may have several states of a kind.
                holder, keys = (held, [*held]) if isinstance(held, dict) else (vars(layer), [name])
                places += [(holder, key) for key in keys if isinstance(holder.get(key), torch.Tensor)]
        return places


def _kind(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device
