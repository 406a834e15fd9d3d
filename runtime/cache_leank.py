"""`LeanKCache`: the pruned KV cache as transformers' models, `generate` and tools see it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache

from .configuration_leank import KV_DTYPES, LeanKSettings, read_settings
from .constants_leank import Constants
from .graph_leank import DecodeGraph
from .kernel_key_leank import MAX_DRAFT
from .layer_leank import LeanKLayer
from .layout_leank import cut_layers
from .memory_leank import CacheMemory
from .parts_leank import load_part
from .rows_leank import UNFINISHED, RowState, check_rows
from .windows_leank import check_choice, check_size


class LeanKCache(Cache):
    """A cache that keeps, of every token between sink and recent, only the channels a head needs.

    `model.generate` and the model's forward build one by themselves; build one with `model.build_cache()` to
    choose `prune`, to keep it over several calls, or to set channel masks. A config without a valid `leank`
    block raises a ValueError, and so do `constants` that lack a mean of keys the config speaks of.

    Attributes:
        rows: Lengths of the rows, shared by all layers.
        graph: The captured decode step, and how often it served; `graph.enabled` turns it on and off.
        pruned_layers: The layers that are pruned; `layers` are all.
        other_layers: The others by number, transformers' own, which a `MixedCache` has.
        step_mask: What a model takes as a prepared step's mask; None where all layers are pruned.
    """

    layers: list[Any]
    step_mask: Any = None

    def __init__(
        self,
        config: PreTrainedConfig,
        prune: str | None = None,
        use_graphs: bool = True,
        kv_dtype: str | None = None,
        constants: Sequence[Constants] | None = None,
        value_bases: Sequence[torch.Tensor] | None = None,
    ) -> None:
        settings = read_settings(config)
        self.rows = RowState(settings.windows if prune is None else replace(settings.windows, prune=prune))
        self.graph = DecodeGraph(use_graphs)
        layouts = cut_layers(settings.widths, settings.value_widths, settings.head_dim)
        stored = settings.kv_dtype if kv_dtype is None else check_choice(kv_dtype, KV_DTYPES, "`kv_dtype`")
        given = [Constants()] * len(settings.widths) if constants is None else constants
        lacks_mean = settings.has_key_mean and any(own.key_mean is None for own in given)
        if lacks_mean or (settings.has_value_basis and value_bases is None):
            raise ValueError(
                f"config.json: `leank.{'key_mean' if lacks_mean else 'value_basis'}` says that the model has "
                "one, and the cache was given none; build it by `model.build_cache()`"
            )
        bases = [None] * len(given) if value_bases is None else value_bases
        self.set_layers(
            [
                LeanKLayer(layer_idx, mask, layout, self.rows, stored, own, basis)
                for layer_idx, mask, layout, own, basis in zip(
                    settings.layers, settings.channel_masks, layouts, given, bases, strict=True
                )
            ],
            {},
        )

    def set_layers(self, pruned: Sequence[LeanKLayer], others: Mapping[int, Any]) -> None:
        """Hold these layers, the others by number."""
        self.pruned_layers, self.other_layers = pruned, others
        by_number = {layer.layer_idx: layer for layer in pruned} | {**others}
        Cache.__init__(self, layers=[by_number[number] for number in sorted(by_number)])

    @property
    def prune(self) -> str:
        """`eager` or `deferred`."""
        return self.rows.windows.prune

    @prune.setter
    def prune(self, value: str) -> None:
        windows = replace(self.rows.windows, prune=value)
        if windows != self.rows.windows and self.get_seq_length():
            raise _too_late(f"prunes `{self.prune}`", value)
        self.rows.windows = windows

    @property
    def kv_dtype(self) -> str:
        """`auto`, `fp8` or `int4`; may be set while the cache holds nothing but pending input."""
        return self.pruned_layers[0].kv_dtype

    @kv_dtype.setter
    def kv_dtype(self, value: str) -> None:
        if check_choice(value, KV_DTYPES, "`kv_dtype`") != self.kv_dtype and self.rows.is_split:
            raise _too_late(f"stores `{self.kv_dtype}`", value)
        for layer in self.pruned_layers:
            layer.kv_dtype = value

    @property
    def prefill_length(self) -> int | None:
        """Columns of the prompt, padding included; None if unknown.

        `generate` sets it. With it a `deferred` cache knows that a chunk of one token still belongs to the
        prompt (without it, one token on pending input begins decoding), and both modes that columns beyond it
        in the first forward pass, such as drafted tokens, are decoded against the pruned cache.
        """
        return self.rows.prefill_length

    @prefill_length.setter
    def prefill_length(self, value: int | None) -> None:
        if value is not None and value < 1:
            raise ValueError(f"`prefill_length` is {value}, a prompt has at least one token")
        self.rows.prefill_length = value

    def is_made_for(self, settings: LeanKSettings, is_centred: bool) -> bool:
        """Return whether it was built for a model of these channels of K and V, its keys centred or not."""
        layers, masks = self.pruned_layers, settings.channel_masks
        layouts = cut_layers(settings.widths, settings.value_widths, settings.head_dim)
        return (
            [layer.model_layout for layer in layers] == list(layouts)
            and all(torch.equal(own.model_mask[0], mask) for own, mask in zip(layers, masks, strict=True))
            and all((own.model_constants.key_mean is not None) == is_centred for own in layers)
        )

    def reserve(self, num_columns: int) -> None:
        """Allocate for so many columns, prompt, padding and tokens to come together, so that nothing grows.

        At once where the prompt is split, else when it is. Without it memory grows by a sixteenth at a time.
        Where memory does not suffice, what was reserved before stays.
        """
        check_size("num_columns", num_columns)
        rows = self.rows
        before = rows.num_reserved, rows.tables
        rows.num_reserved = num_columns
        try:
            if rows.tables is not None:
                rows.make_room(max(num_columns - rows.num_columns, 0))
            for layer in self.pruned_layers:
                layer.make_room()
        except BaseException:
            rows.num_reserved, rows.tables = before
            raise

    def takes_step(self, num_columns: int) -> bool:
        """Return whether so many columns are a decode step: one or a draft's, on a prompt that is split."""
        return num_columns <= MAX_DRAFT and self.rows.is_split

    def known_mask(self, num_columns: int) -> torch.Tensor | None:
        """Return which columns are real `[B, columns]`, so many new ones included, None without padding.

        Pruned layers know it by themselves once the prompt is split, others never do.
        """
        if self.rows.is_split and not self.other_layers:
            return None
        return self.rows.extended_padding(None, self.get_seq_length() + num_columns)

    def take_mask(self, attention_mask: torch.Tensor | None, num_columns: int) -> torch.Tensor | None:
        """Return the mask of a pass of so many columns, all before them included; the known one for None.

        Where a turn begins, tokens that it hides from then on are taken back. Raises a ValueError as
        `RowState.hidden_by` and `RowState.hide`, and for another number of rows than the cache's.
        """
        rows = self.rows
        begins, rows.begins_turn = rows.begins_turn, False
        told = attention_mask
        if told is None and begins:  # transformers leaves a mask out that shows everything
            padding = rows.extended_padding(None, rows.num_columns)
            told = None if padding is None else torch.ones_like(padding)
        if told is not None and rows.lengths is not None:
            check_rows(len(told), len(rows.lengths))
            if begins or num_columns > MAX_DRAFT:
                hidden = rows.hidden_by(told[:, : rows.num_columns])
                if hidden is not None:
                    self._check_forgets("a mask of earlier tokens")
                    rows.hide(hidden)
        return self.known_mask(num_columns) if attention_mask is None else attention_mask

    def _check_forgets(self, what: str) -> None:
        """Raise a ValueError, which says what asks for it, if a layer cannot be made to forget a token."""

    def prepare_step(self, num_columns: int, attention_mask: torch.Tensor | None = None) -> None:
        """Make writable what a decode step writes, and make room for it; pruned layers need no mask.

        Raises a RuntimeError if an earlier pass failed in between: a replayed step would not notice.
        """
        if any(layer.num_columns != self.rows.num_columns for layer in self.pruned_layers):
            raise RuntimeError(UNFINISHED)
        self.rows.counters()
        self.rows.make_room(num_columns)
        for layer in self.pruned_layers:
            layer.make_room()

    def settle(self) -> None:
        """Put back where it lay what a step has replaced; pruned layers replace nothing."""

    def advance(self, num_columns: int) -> None:
        """Count columns that a replayed decode step has added; if negative, take back such as were none."""
        self.rows.advance(num_columns)
        for layer in self.pruned_layers:
            layer.num_columns += num_columns

    def addresses(self) -> tuple[object, ...]:
        """Return objects of which one is another whenever a tensor of the cache becomes another one."""
        return (
            self.rows.addresses,
            *(layer.store.addresses if layer.store else 0 for layer in self.pruned_layers),
        )

    def memory(self) -> CacheMemory:
        """Count bytes used and allocated, by region. Waits for the device."""
        return sum((layer.memory() for layer in self.pruned_layers), CacheMemory())

    def crop(self, tokens_to_remove: int) -> None:
        """Drop tokens at the end, as far as they still have all channels, else raise a ValueError.

        `tokens_to_remove` is minus the number of columns. A positive number is a length to crop to, as
        transformers before 5.17 asks for it.
        """
        # Some releases of transformers count in a 0-dim tensor.
        tokens_to_remove = int(tokens_to_remove)
        length = self.get_seq_length()
        count = max(length - tokens_to_remove, 0) if tokens_to_remove > 0 else -tokens_to_remove
        if count == 0:
            for layer in self.layers:  # so that those which record what a crop may want back forget it
                if getattr(layer, "record_past", False):
                    layer.crop(0)
            return
        if count > length:
            raise ValueError(f"crop of {count} tokens from a cache that holds {length}")
        if count == length:
            self.reset()
            return
        self._check_croppable()
        self.rows.crop(count)
        for layer in self.layers:
            layer.crop(-count)

    def _check_croppable(self) -> None:
        """Raise a ValueError if layers that are not pruned cannot drop columns."""

    def reset(self) -> None:
        """Drop all tokens, and channel masks that were set; `prune` stays."""
        self.graph.forget()
        self.rows.reset()
        for layer in self.pruned_layers:
            layer.reset()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Keep the given rows, in that order, repeats allowed."""
        rows = self.rows.select(beam_idx)
        for layer in self.pruned_layers:
            layer.select(rows)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times."""
        if (batch_size := self.pruned_layers[0].batch_size) is not None:
            self.reorder_cache(torch.arange(batch_size).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the given rows."""
        if (batch_size := self.pruned_layers[0].batch_size) is not None:
            self.reorder_cache(torch.arange(batch_size)[indices.cpu()])


def _too_late(state: str, value: str) -> ValueError:
    return ValueError(
        f"the cache {state} and holds tokens already, it cannot change to `{value}`; choose before the first "
        "token, or start from a new cache"
    )


def cache_class(config: PreTrainedConfig) -> type[LeanKCache]:
    """Return the class of caches of a model: `MixedCache` where not all of its layers are pruned."""
    if len(read_settings(config).layers) == int(config.num_hidden_layers):
        return LeanKCache
    mixed: type[LeanKCache] = load_part("mixed_cache").MixedCache
    return mixed
