"""`LeanKCache`: the pruned KV cache as transformers' models, `generate` and tools see it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache

from .configuration_leank import check_kv_dtype, read_settings
from .constants_leank import Constants
from .graph_leank import DecodeGraph
from .kernel_key_leank import MAX_DRAFT
from .layer_leank import LeanKLayer
from .layout_leank import choose_chunk_size
from .memory_leank import CacheMemory, sum_memory
from .other_layers_leank import (
    OtherLayers,
    build_other_layers,
    check_croppable,
    concatenate_other_layers,
    other_memory,
)
from .rows_leank import RowState
from .windows_leank import check_prune, check_size


class LeanKCache(Cache):
    """A cache that keeps, of every token between sink and recent, only the channels a head needs.

    `model.generate` and the model's forward build one by themselves; build one with `model.build_cache()` to
    choose `prune`, to keep it over several calls, or to set channel masks.

    Args:
        config: The model's config, with its `leank` block.
        prune: `eager` prunes after every forward pass of several tokens, one layer at a time, so the full
            cache of a long prompt never exists for all layers. `deferred` keeps the input whole until
            decoding begins, so a prompt in chunks gives what it gives in one piece. Default: the config's.
        use_graphs: Whether decode steps on a CUDA device may be captured and replayed as one graph.
        kv_dtype: `fp8` stores keys and values in eight bits, `int4` in four, `auto` as they come. Default:
            the config's.
        constants: The model's, layer by layer: the mean of its keys, its scales for FP8. What a rounded cache
            lacks of them, every row's prompt gives.

    Raises:
        ValueError: If something is not known, or `constants` lack a mean of keys that the config speaks of.

    Attributes:
        rows: Lengths of the rows, shared by all layers.
        graph: The captured decode step, and how often it served.
        pruned_layers: The layers that are pruned; `layers` are all.
        other_layers: The others, transformers' own.
    """

    layers: list[Any]

    def __init__(
        self,
        config: PreTrainedConfig,
        prune: str | None = None,
        use_graphs: bool = True,
        kv_dtype: str | None = None,
        constants: Sequence[Constants] | None = None,
    ) -> None:
        settings = read_settings(config)
        mode = settings.windows.prune if prune is None else check_prune(prune, "`prune`")
        self.rows = RowState(**settings.windows.sizes, prune=mode)
        self.graph = DecodeGraph(use_graphs)
        chunk_size = choose_chunk_size(settings.widths, settings.head_dim)
        kv_dtype = settings.kv_dtype if kv_dtype is None else check_kv_dtype(kv_dtype, "`kv_dtype`")
        given = [Constants()] * len(settings.widths) if constants is None else constants
        if settings.has_key_mean and any(own.key_mean is None for own in given):
            raise ValueError(
                "config.json: `leank.key_mean` says that keys have a mean, and the cache was given none; "
                "build it by `model.build_cache()`"
            )
        self._empty_others = build_other_layers(config, settings.layers)
        self._set_layers(
            [
                LeanKLayer(layer_idx, mask, widths, chunk_size, self.rows, kv_dtype, own)
                for layer_idx, mask, widths, own in zip(
                    settings.layers, settings.channel_masks, settings.widths, given, strict=True
                )
            ],
            copy.deepcopy(self._empty_others),
        )

    def _set_layers(self, pruned: list[LeanKLayer], others: OtherLayers) -> None:
        """Hold these layers."""
        self.pruned_layers, self.other_layers = pruned, others
        by_number = {layer.layer_idx: layer for layer in pruned} | others.by_number
        Cache.__init__(self, layers=[by_number[number] for number in range(len(by_number))])

    @property
    def prune(self) -> str:
        """`eager` or `deferred`."""
        return self.rows.prune

    @prune.setter
    def prune(self, value: str) -> None:
        if check_prune(value, "`prune`") != self.rows.prune and self.get_seq_length():
            raise ValueError(
                f"the cache prunes `{self.rows.prune}` and holds tokens already, it cannot change to "
                f"`{value}`; choose before the first token, or start from a new cache"
            )
        self.rows.prune = value

    @property
    def kv_dtype(self) -> str:
        """`auto`, `fp8` or `int4`; may be set while the cache holds nothing but pending input."""
        return self.pruned_layers[0].kv_dtype

    @kv_dtype.setter
    def kv_dtype(self, value: str) -> None:
        if check_kv_dtype(value, "`kv_dtype`") != self.kv_dtype and self.rows.is_split:
            raise ValueError(
                f"the cache stores `{self.kv_dtype}` and holds tokens already, it cannot change to "
                f"`{value}`; choose before the first token, or start from a new cache"
            )
        for layer in self.pruned_layers:
            layer.kv_dtype = value

    @property
    def use_graphs(self) -> bool:
        """Whether decode steps may be captured and replayed; may be set at any time."""
        return self.graph.enabled

    @use_graphs.setter
    def use_graphs(self, value: bool) -> None:
        self.graph.enabled = value

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

    def is_made_of(self, channel_masks: Sequence[torch.Tensor]) -> bool:
        """Return whether these, each `[H_kv, D]`, are the model's masks that it was built with."""
        own = [layer.model_mask[0] for layer in self.pruned_layers]
        return len(own) == len(channel_masks) and all(map(torch.equal, own, channel_masks))

    def reserve(self, num_columns: int) -> None:
        """Allocate for so many columns, prompt, padding and tokens to come together, so that nothing grows.

        At once where the prompt is split, else when it is. Without it memory grows by a sixteenth at a time.

        Raises:
            ValueError: If it is no number of columns that any context has.
            torch.OutOfMemoryError: If memory does not suffice; what was reserved before stays.
        """
        check_size("num_columns", num_columns)
        rows = self.rows
        before = rows.num_reserved, rows.tables
        rows.num_reserved = num_columns
        try:
            rows.reserve()
            for layer in self.pruned_layers:
                layer.make_room()
        except BaseException:
            rows.num_reserved, rows.tables = before
            raise

    def takes_step(self, num_columns: int) -> bool:
        """Return whether so many columns are a decode step: one or a draft's, on a prompt that is split."""
        if num_columns > MAX_DRAFT or not self.rows.is_split:
            return False
        why_eager = self.other_layers.why_eager(num_columns)
        if why_eager is not None:
            self.graph.why_eager = why_eager
        return why_eager is None

    def known_mask(self, num_columns: int) -> torch.Tensor | None:
        """Return what is known of padding `[B, columns]`, so many new ones included, if a layer needs a mask.

        None where there is no padding, or all layers are pruned: these know their rows' padding.
        """
        if not self.other_layers:
            return None
        return self.rows.extended_padding(None, self.get_seq_length() + num_columns)

    def prepare_step(self, num_columns: int, attention_mask: torch.Tensor | None = None) -> None:
        """Make what a decode step writes writable, and room for it.

        Args:
            num_columns: Columns of the step.
            attention_mask: Real columns `[B, columns]`, these among them; None if all are.
        """
        self.other_layers.prepare_step(attention_mask)
        self.rows.counters()
        self.rows.make_room(num_columns)
        for layer in self.pruned_layers:
            layer.make_room()

    def advance(self, num_columns: int) -> None:
        """Count columns that a replayed decode step has added; its tensors were advanced on the device.

        A negative number takes back what was counted of columns that were none.
        """
        self.rows.advance(num_columns)
        self.other_layers.advance(num_columns)
        for layer in self.pruned_layers:
            layer.num_columns += num_columns

    def addresses(self) -> tuple[int, ...]:
        """Return numbers of which one changes whenever a tensor of the cache becomes another one."""
        return (
            self.rows.addresses,
            *self.other_layers.addresses(),
            *(layer.store.addresses if layer.store else 0 for layer in self.pruned_layers),
        )

    @classmethod
    def concatenate(cls, caches: Sequence[LeanKCache], num_reserved: int = 0) -> LeanKCache:
        """Make one cache of several, to decode together what was run one prompt at a time.

        Layer by layer, so that no more than one layer is held twice. A cache of fewer columns than
        others counts as padded on the left: pass `position_ids`, and if an attention mask then one that has
        this padding.

        Args:
            caches: Caches of one model, whose prompts are all split, or all pending (`deferred`); they are
                empty afterwards.
            num_reserved: Columns to allocate for, see `reserve`; 0 for what is there.

        Returns:
            A cache with the rows of all, in order.

        Raises:
            ValueError: If they do not go together, or `num_reserved` is no number of columns.
        """
        check_size("num_reserved", num_reserved)
        caches = list(caches)
        _check_joinable(caches)
        first = caches[0]
        batch_sizes = [cache._batch_size() or 0 for cache in caches]
        lengths = first.rows.lengths
        device = first.pruned_layers[0].device if lengths is None else lengths.device
        rows = RowState.concatenate([cache.rows for cache in caches], batch_sizes, device, num_reserved)
        joined = cls.__new__(cls)
        joined.rows, joined.graph = rows, DecodeGraph(first.use_graphs)
        joined._empty_others = first._empty_others
        joined._set_layers(
            [
                LeanKLayer.concatenate(parts, rows)
                for parts in zip(*(cache.pruned_layers for cache in caches), strict=True)
            ],
            OtherLayers(
                {
                    number: concatenate_other_layers([cache.layers[number] for cache in caches])
                    for number in first.other_layers.by_number
                }
            ),
        )
        for cache in caches:
            cache.reset()
        return joined

    def fork(
        self, sink_size: int | None = None, recent_size: int | None = None, flush_size: int | None = None
    ) -> LeanKCache:
        """Return another cache that goes on from the same pending input; this one stays as it is.

        One prefill with `prune="deferred"` serves any number of forks, each with windows and channel masks
        (`LeanKLayer.set_channel_mask`) of its own. Keys and values are shared, not copied.

        Args:
            sink_size: Tokens at the start of a row that stay whole; None for this cache's, as below.
            recent_size: Latest tokens that stay whole.
            flush_size: Tokens pruned at a time while decoding.

        Raises:
            ValueError: If the prompt is split already, or a size is too small or too large.
        """
        if self.rows.is_split:
            raise ValueError(
                "a cache whose prompt is pruned already cannot be forked; build it with "
                '`prune="deferred"` and fork it before decoding begins, or use `copy.deepcopy`'
            )
        sizes = {"sink_size": sink_size, "recent_size": recent_size, "flush_size": flush_size}
        for name, value in sizes.items():
            if value is not None:
                check_size(name, value)
        shared = [
            tensor
            for layer in self.pruned_layers
            for tensor in (
                layer.model_mask,
                layer.channel_mask,
                *(layer.pending or ()),
                *(constant for constant in layer.model_constants if constant is not None),
            )
        ]
        forked = copy.deepcopy(self, {id(tensor): tensor for tensor in shared})
        for name, value in sizes.items():
            if value is not None:
                setattr(forked.rows, name, value)
        return forked

    def fill_layer(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put a whole prompt into one layer without a model, and split it at once, whatever `prune` says.

        Layers filled one after the other before anything is decoded take prompts of one shape.

        Args:
            layer_idx: An empty layer.
            keys: Keys after rotary embedding, without padding `[B, H_kv, S, D]`.
            values: `[B, H_kv, S, D]`.

        Raises:
            ValueError: If the layer holds tokens, or keys and values do not fit it.
        """
        layer: LeanKLayer = self.layers[layer_idx]
        batch_size, _, num_columns, _ = keys.shape
        if layer.num_columns:
            raise ValueError(
                f"layer {layer_idx} holds {layer.num_columns} columns, only an empty one is filled"
            )
        layer.lazy_initialization(keys, values)
        step = self.rows.step(0, batch_size, num_columns, None, keys.device, split_now=True)
        if step.split is None or step.num_columns != num_columns or self.rows.batch_size != batch_size:
            raise ValueError(
                f"layer {layer_idx} is given {batch_size} rows of {num_columns} columns, another layer holds "
                f"{self.rows.batch_size} of {step.num_columns}; reset the cache to fill it with other prompts"
            )
        layer.extend_pending(keys, values)
        layer.num_columns = num_columns
        layer.split(step)

    def decode_layer(
        self,
        layer_idx: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        softmax_scale: float | None = None,
    ) -> torch.Tensor:
        """Append one token to one pruned layer without a model, and attend with it, attention sinks left out.

        Args:
            layer_idx: A layer that is split, see `fill_layer`.
            query: `[B, H, 1, D]`.
            key: `[B, H_kv, 1, D]`.
            value: `[B, H_kv, 1, D]`.
            softmax_scale: Factor on the logits; 1/√D if None.

        Returns:
            `[B, H, 1, D]`.

        Raises:
            ValueError: If the layer is not split, or there is more than one token.
        """
        layer: LeanKLayer = self.layers[layer_idx]
        if layer.store is None or query.shape[2] != 1:
            state = "holds no pruned prompt" if layer.store is None else "is given one token at a time"
            raise ValueError(
                f"layer {layer_idx} {state}, here {query.shape[2]} tokens are to be decoded; fill it with "
                "`fill_layer`, or run a model on this cache"
            )
        step = self.rows.step(layer.num_columns, query.shape[0], 1, None, query.device)
        layer.num_columns += 1
        return layer.decode(query, key, value, step, _scale_of(query, softmax_scale))

    def attend_layer(
        self, layer_idx: int, query: torch.Tensor, softmax_scale: float | None = None
    ) -> torch.Tensor:
        """Attend with the last token of one pruned layer again, attention sinks left out; changes nothing.

        Args:
            layer_idx: A layer that is split.
            query: `[B, H, 1, D]`.
            softmax_scale: Factor on the logits; 1/√D if None.

        Returns:
            `[B, H, 1, D]`.
        """
        append = self.rows.attended(query.device)
        layer: LeanKLayer = self.layers[layer_idx]
        return layer.attend(query, append, _scale_of(query, softmax_scale))

    def memory(self) -> CacheMemory:
        """Count bytes used and allocated, by region. Waits for the device."""
        pruned = [layer.memory() for layer in self.pruned_layers]
        return sum_memory([*pruned, *map(other_memory, self.other_layers)])

    def crop(self, tokens_to_remove: int) -> None:
        """Drop tokens at the end, as far as they still have all channels.

        Args:
            tokens_to_remove: Minus the number of columns to drop. A positive number is a length to crop to,
                as transformers before 5.17 asks for it.

        Raises:
            ValueError: If more is dropped than there is, or a token that has been pruned already.
        """
        # Some releases of transformers count in a 0-dim tensor.
        tokens_to_remove = int(tokens_to_remove)
        length = self.get_seq_length()
        count = max(length - tokens_to_remove, 0) if tokens_to_remove > 0 else -tokens_to_remove
        if count == 0:
            return
        if count > length:
            raise ValueError(f"crop of {count} tokens from a cache that holds {length}")
        if count < length:
            check_croppable(self.other_layers)
        self.rows.crop(count)
        if count == length:
            self.reset()
            return
        for layer in self.layers:
            layer.crop(-count)

    def reset(self) -> None:
        """Drop all tokens, and channel masks that were set; `prune` stays."""
        self.graph.forget()
        self.rows.reset()
        for layer in self.pruned_layers:
            layer.reset()
        if self.other_layers:  # those of transformers, emptied, may still want rows as many as they had
            self._set_layers(self.pruned_layers, copy.deepcopy(self._empty_others))

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Reorder the rows for beam search."""
        self._select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times."""
        batch_size = self._batch_size()
        if batch_size is not None:
            self._select(torch.arange(batch_size).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the given rows."""
        batch_size = self._batch_size()
        if batch_size is not None:
            self._select(torch.arange(batch_size)[indices.cpu()])

    def _select(self, rows: torch.Tensor) -> None:
        self.other_layers.select(rows)
        rows = self.rows.select(rows)
        for layer in self.pruned_layers:
            layer.select(rows)

    def _batch_size(self) -> int | None:
        return self.pruned_layers[0].batch_size


def _scale_of(query: torch.Tensor, softmax_scale: float | None) -> float:
    return float(query.shape[-1]) ** -0.5 if softmax_scale is None else softmax_scale


def _check_joinable(caches: Sequence[LeanKCache]) -> None:
    """Check that caches can become one.

    Raises:
        ValueError: If they cannot; none of them has changed.
    """
    if not caches:
        raise ValueError("there is no cache to concatenate")
    if len({id(cache) for cache in caches}) < len(caches):
        raise ValueError("a cache is given twice, its rows can be moved only once; pass a copy of it")
    masks = [layer.model_mask[0] for layer in caches[0].pruned_layers]
    expected = _place_of(caches[0])
    for index, cache in enumerate(caches):
        if not cache.get_seq_length():
            raise ValueError(f"cache {index} is empty; concatenate caches that hold a prompt")
        if cache.rows.is_split != caches[0].rows.is_split:
            state = "is pruned" if cache.rows.is_split else "holds input that is not pruned yet"
            other = "is" if caches[0].rows.is_split else "is not"
            raise ValueError(f"cache {index} {state}, cache 0 {other}; concatenate caches of one kind")
        if not cache.is_made_of(masks):
            raise ValueError(f"cache {index} is of a model that keeps other channels than that of cache 0")
        place = _place_of(cache)
        if place != expected:
            differing = next(name for name in place if place[name] != expected[name])
            raise ValueError(
                f"cache {index} has {differing} {place[differing]}, cache 0 has {expected[differing]}"
            )


def _place_of(cache: LeanKCache) -> dict[str, object]:
    """Return what caches must have in common apart from their model's masks."""
    rows = cache.rows
    return {
        "window sizes": (rows.sink_size, rows.recent_size, rows.flush_size),
        "widths": [layer.layout.widths for layer in cache.pruned_layers],
        "chunk sizes": [layer.layout.chunk_size for layer in cache.pruned_layers],
        "dtypes": [layer.dtype for layer in cache.pruned_layers],
        "kv_dtype": cache.kv_dtype,
        "devices": [layer.device for layer in cache.pruned_layers],
    }
