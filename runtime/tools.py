"""Caches without `generate`: fork and concatenate them, for evaluations.

No checkpoint carries this file; it works on a cache of any checkpoint's code.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import pad

from .fp8_leank import as_bytes
from .pages_leank import page_sources
from .store_leank import ChunkStore, take_pages
from .stored_leank import POOLS
from .windows_leank import check_size

if TYPE_CHECKING:
    from .cache_leank import LeanKCache
    from .layer_leank import LeanKLayer
    from .rows_leank import RowState


def fork(
    cache: LeanKCache,
    sink_size: int | None = None,
    recent_size: int | None = None,
    flush_size: int | None = None,
) -> LeanKCache:
    """Return another cache that goes on from the same pending input; the first stays as it is.

    One prefill with `prune="deferred"` serves any number of forks, each with windows (by default the cache's)
    and channel masks (`LeanKLayer.set_channel_mask`) of its own. Keys and values are shared, not copied.
    Raises a ValueError if the prompt is split already, or a size is too small or too large.
    """
    if cache.rows.is_split:
        raise ValueError(
            "a cache whose prompt is pruned already cannot be forked; build it with "
            '`prune="deferred"` and fork it before decoding begins, or use `copy.deepcopy`'
        )
    sizes: dict[str, Any] = {"sink_size": sink_size, "recent_size": recent_size, "flush_size": flush_size}
    given = {name: value for name, value in sizes.items() if value is not None}
    windows = replace(cache.rows.windows, **given)
    shared = [
        tensor
        for layer in cache.pruned_layers
        for tensor in (
            layer.model_mask,
            layer.channel_mask,
            *(layer.pending or ()),
            *(own for own in (*layer.model_constants, layer.value_basis) if own is not None),
        )
    ]
    forked = copy.deepcopy(cache, {id(tensor): tensor for tensor in shared})
    forked.rows.windows = windows
    return forked


def concatenate(caches: Sequence[LeanKCache], num_reserved: int = 0) -> LeanKCache:
    """Make one cache of several, to decode together what was run one prompt at a time.

    Layer by layer, so that no more than one layer is held twice. A cache of fewer columns than others counts
    as padded on the left: pass `position_ids`, and if an attention mask then one that has this padding. All
    prompts are split, or all pending (`deferred`), and the caches are empty afterwards. Caches that do not go
    together raise a ValueError.
    """
    check_size("num_reserved", num_reserved)
    caches = list(caches)
    _check_joinable(caches)
    first = caches[0]
    joined = copy.copy(first)
    joined.rows, joined.graph = _join_rows(caches, num_reserved), type(first.graph)(first.graph.enabled)
    places = zip(*(cache.pruned_layers for cache in caches), strict=True)
    others = {number: [cache.layers[number] for cache in caches] for number in first.other_layers}
    joined.set_layers(
        [_join_layers(layers, joined.rows) for layers in places],
        {number: _join_other_layers(layers) for number, layers in others.items()},
    )
    for cache in caches:
        cache.reset()
    return joined


def _check_joinable(caches: Sequence[LeanKCache]) -> None:
    """Raise a ValueError if caches cannot become one; none of them has changed."""
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
        own = [layer.model_mask[0] for layer in cache.pruned_layers]
        if len(own) != len(masks) or not all(map(torch.equal, own, masks)):
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
    held = [
        layer.store.tensors.constants if layer.store else layer.model_constants
        for layer in cache.pruned_layers
    ]
    return {
        "window sizes": tuple(rows.windows.sizes.values()),
        "widths": [layer.layout.widths for layer in cache.pruned_layers],
        "widths of V": [layer.layout.value_widths for layer in cache.pruned_layers],
        "chunk sizes": [(layer.layout.chunk_size, layer.layout.value_chunk) for layer in cache.pruned_layers],
        "dtypes": [layer.dtype for layer in cache.pruned_layers],
        "kv_dtype": cache.kv_dtype,
        "rotated V": [layer.value_basis is not None for layer in cache.pruned_layers],
        "constants": [[name for name, own in each._asdict().items() if own is not None] for each in held],
        "devices": [layer.device for layer in cache.pruned_layers],
    }


def _join_rows(caches: Sequence[LeanKCache], num_reserved: int) -> RowState:
    """Return the rows of several caches in order; fewer columns than others become left padding."""
    parts = [cache.rows for cache in caches]
    sizes = [cache.pruned_layers[0].batch_size or 0 for cache in caches]
    first = parts[0]
    joined = type(first)(first.windows)
    joined.is_pending, joined.num_reserved = first.is_pending, num_reserved
    joined.num_columns = max(part.num_columns for part in parts)
    device = caches[0].pruned_layers[0].device
    if first.lengths is not None:
        device = first.lengths.device
        counters = [part.counters() for part in parts]
        joined.lengths = torch.cat([lengths.to(device) for lengths, _ in counters])
        joined.pruned_lengths = torch.cat([pruned.to(device) for _, pruned in counters])
        joined.bounds = [length for part in parts for length in part.bounds]
        joined.tables = joined.lay_out(joined.bounds, max(num_reserved - joined.num_columns, 0))
    if any(part.padding is not None or part.num_columns != joined.num_columns for part in parts):
        paddings = []
        for part, size in zip(parts, sizes, strict=True):
            padding = part.extended_padding(None, part.num_columns)
            if padding is None:
                padding = torch.ones(size, part.num_columns, dtype=torch.bool)
            paddings.append(pad(padding.to(device), (joined.num_columns - part.num_columns, 0)))
        joined.padding = torch.cat(paddings)
    return joined


def _join_layers(layers: Sequence[LeanKLayer], rows: RowState) -> LeanKLayer:
    """Return a layer with the rows of several of one place, in order; those are emptied."""
    first = layers[0]
    joined = copy.copy(first)
    joined.rows, joined.num_columns, joined.kernels = rows, rows.num_columns, None
    sizes = [layer.batch_size or 0 for layer in layers]
    joined.channel_mask = _join_own([layer.channel_mask.cpu() for layer in layers], sizes)
    pending = [layer.pending for layer in layers if layer.pending is not None]
    if pending:
        keys, values = (_cat_left_padded(parts, rows.num_columns) for parts in zip(*pending, strict=True))
        joined.pending = keys, values
    else:
        stores = [layer.store for layer in layers if layer.store is not None]
        joined.store = _join_stores(stores, rows, sizes)
    for layer in layers:
        layer.pending = layer.store = None
    return joined


def _join_stores(stores: Sequence[ChunkStore], rows: RowState, sizes: Sequence[int]) -> ChunkStore:
    """Return a store with the rows of several of one layout, window size, dtype and device, in order."""
    first, tables = stores[0], rows.tables
    assert tables is not None
    index = _join_own([store.tensors.chunk_index for store in stores], sizes)
    held: Any = zip(*(store.tensors.constants for store in stores), strict=True)
    joint = (None if parts[0] is None else _join_own(parts, sizes) for parts in held)
    constants = type(first.tensors.constants)(*joint)
    joined = type(first)(first.layout, index, tables, first.dtype, constants, first.kv_dtype)
    row, pages = 0, [0, 0]
    for store, size in zip(stores, sizes, strict=True):
        for place, names in enumerate(POOLS):
            source = page_sources(tables.pool_runs[place][row : row + size], store.tables.pool_runs[place])
            span = slice(pages[place], pages[place] + len(source))
            for name in names:
                taken = take_pages(getattr(store.tensors, name), source)
                as_bytes(getattr(joined.tensors, name))[span] = as_bytes(taken)
            pages[place] = span.stop
        row += size
    return joined


def _join_other_layers(parts: Sequence[Any]) -> Any:
    """Return a layer that is not pruned with the rows of several; a window is padded on the left."""
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
        setattr(joined, name, _cat_left_padded([getattr(part, name) for part in parts], longest))
    return joined


def _join_own(parts: Sequence[torch.Tensor], sizes: Sequence[int]) -> torch.Tensor:
    """Join `[1 or B, m, n]` of so many rows each; what all rows have in common stays one for all."""
    if all(len(part) == 1 and torch.equal(part, parts[0]) for part in parts):
        return parts[0]
    return torch.cat([part.expand(size, -1, -1) for part, size in zip(parts, sizes, strict=True)])


def _cat_left_padded(parts: Sequence[torch.Tensor], num_columns: int) -> torch.Tensor:
    """Join `[B, H, S, D]` by rows, with zeros before each that has fewer than `num_columns` columns."""
    return torch.cat([pad(part, (0, 0, num_columns - part.shape[2], 0)) for part in parts])
