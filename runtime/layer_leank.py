"""`LeanKLayer`: one layer of the cache, first the whole prompt, then pages of kept channels."""

from __future__ import annotations

from dataclasses import replace

import torch
from transformers.cache_utils import CacheLayerMixin

from .attention_leank import AttentionHandle
from .constants_leank import Constants, choose_constants
from .decode_kernels_leank import DecodeKernels
from .find_kernels_leank import find_kernels
from .kernel_key_leank import MAX_DRAFT
from .layout_leank import ChunkLayout, order_channels
from .memory_leank import CacheMemory, count_whole
from .parts_leank import load_part
from .pruned_attention_leank import decode_attention
from .rows_leank import RowState, check_rows
from .step_leank import Append, Step
from .store_leank import ChunkStore
from .turns_leank import attend_turn


class LeanKLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """The cache of one layer: whole input until it is split, a `ChunkStore` after."""

    is_compileable = False
    is_croppable = True
    is_sliding = False
    supports_early_init = False

    def __init__(
        self,
        layer_idx: int,
        channel_mask: torch.Tensor,
        layout: ChunkLayout,
        rows: RowState,
        kv_dtype: str = "auto",
        model_constants: Constants = Constants(),  # noqa: B008 - it cannot be changed
        value_basis: torch.Tensor | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.layer_idx = layer_idx
        self.rows = rows  # shared by all layers
        self.kv_dtype = kv_dtype
        self.model_constants = model_constants  # what a rounded cache lacks of them, every row's prompt gives
        self.value_basis = value_basis  # what V is rotated into as it is stored `[H_kv, D, D]`; or None
        self.model_mask = channel_mask[None]  # channels that the model keeps `[1, H_kv, D]`, bool, on the CPU
        self.model_layout = layout
        self.reset()

    def reset(self) -> None:
        """Drop all tokens and go back to the model's own channel mask."""
        self.is_initialized = False
        self.num_columns = 0  # seen, padding included
        self.channel_mask = self.model_mask  # channels that this cache keeps `[1 or B, H_kv, D]`
        self.layout = self.model_layout
        # Whole K and V, each `[B, H_kv, S, D]`, until they are split; the store from then on.
        self.pending: tuple[torch.Tensor, torch.Tensor] | None = None
        self.store: ChunkStore | None = None
        self.kernels: DecodeKernels | None = None  # what serves decode steps; None is plain torch

    def set_channel_mask(self, channel_mask: torch.Tensor, *, prune_values: bool = True) -> None:
        """Replace the kept channels, for this cache only, before its prompt is split.

        The hook for methods that choose channels per prompt: with `prune="deferred"` run the prompt but for
        its last token, look at `pending`, set a mask in every layer, then call `generate` with the whole
        prompt and this cache. The mask is `[H_kv, D]`, or `[B, H_kv, D]`: rows may differ in which channels a
        head keeps, not in how many. With `prune_values` V that the model prunes stays pruned; of heads that
        the model keeps no channel of, V is whole. A mask that does not fit, or comes too late, raises a
        ValueError.
        """
        if self.store is not None:
            raise ValueError(
                f"layer {self.layer_idx}: the prompt is pruned already, its channels are chosen; build the "
                'cache with `prune="deferred"` and set the mask before decoding begins'
            )
        heads_and_channels = (len(self.layout.widths), self.layout.head_dim)
        mask = channel_mask[None] if channel_mask.ndim == 2 else channel_mask
        batch_size = self.pending[0].shape[0] if self.pending is not None else None
        if mask.dtype != torch.bool or mask.ndim != 3 or tuple(mask.shape[1:]) != heads_and_channels:
            raise ValueError(
                f"layer {self.layer_idx}: channel mask is {channel_mask.dtype} {list(channel_mask.shape)}, "
                f"not bool [{heads_and_channels[0]}, {heads_and_channels[1]}] or one such mask per row"
            )
        if batch_size is not None and mask.shape[0] not in (1, batch_size):
            raise ValueError(
                f"layer {self.layer_idx}: {mask.shape[0]} channel masks for {batch_size} rows; give one, or "
                "one per row"
            )
        widths = mask.sum(-1)
        if bool((widths != widths[0]).any()):
            raise ValueError(
                f"layer {self.layer_idx}: rows keep different numbers of channels, {widths.tolist()}; a head "
                "must have one width in every row"
            )
        self.channel_mask = mask
        kept, values = tuple(widths[0].tolist()), self.model_layout.value_widths
        if values is not None:
            head_dim, model_widths = self.layout.head_dim, self.model_layout.widths
            values = tuple(
                (width if own and prune_values else head_dim) if new else 0
                for width, own, new in zip(values, model_widths, kept, strict=True)
            )
        self.layout = replace(self.model_layout, widths=kept, value_widths=values)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Raise a ValueError if the first keys and values do not fit the channel mask."""
        batch_size, num_heads, _, head_dim = key_states.shape
        expected = (len(self.layout.widths), self.layout.head_dim)
        if (num_heads, head_dim) != expected or value_states.shape[-1] != head_dim:
            raise ValueError(
                f"layer {self.layer_idx}: keys have {num_heads} heads of {head_dim}, values of "
                f"{value_states.shape[-1]}, the channel mask has {expected[0]} heads of {expected[1]}; "
                "tensor parallelism is not supported"
            )
        if self.channel_mask.shape[0] not in (1, batch_size):
            raise ValueError(
                f"layer {self.layer_idx}: {self.channel_mask.shape[0]} channel masks for {batch_size} rows"
            )
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(  # type: ignore[override]
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[AttentionHandle, AttentionHandle]:
        """Take new keys and values `[B, H_kv, Q, D]`; return a handle in place of all of them, twice.

        The tokens enter the cache when the attention function calls `handle.attend`.
        """
        check_rows(key_states.shape[0], self.batch_size)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        handle = AttentionHandle(self, self.num_columns, key_states, value_states)
        return handle, handle

    def extend_pending(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep prompt input whole `[B, H_kv, Q, D]` and return all of it, for dense attention.

        What is kept is cut from the autograd graph: gradients reach the input of one forward pass alone.
        """
        if self.pending is not None:
            key = torch.cat([self.pending[0], key], dim=2)
            value = torch.cat([self.pending[1], value], dim=2)
        self.pending = (key.detach(), value.detach())
        return key, value

    def split(self, step: Step) -> None:
        """Turn the pending prompt into sink, pruned and recent."""
        assert self.pending is not None and step.split is not None
        (keys, values), self.pending = self.pending, None
        if self.value_basis is not None:
            self.value_basis = self.value_basis.to(keys.device)
            values = load_part("model_constants").rotate(values, self.value_basis)
        # A model's mask is in the CPU's memory: worked out there, and sent without waiting for the device.
        index = self.layout.chunk_index(order_channels(self.channel_mask))
        index = index.to(keys.device, non_blocking=keys.is_cuda)
        constants = choose_constants(keys, values, step.split.real, self.kv_dtype, self.model_constants)
        tables = step.split.tables
        self.store = ChunkStore(self.layout, index, tables, keys.dtype, constants, self.kv_dtype)
        self.store.write_prompt(keys, values, step.split)

    def decode(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        step: Step,
        softmax_scale: float,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Append new tokens `[B, H_kv, d, D]`, and attend with their queries `[B, H, d, D]`; sinks `[H]`."""
        store, append = self.store, step.append
        assert store is not None and append is not None
        store.move_to(append.tables)
        # Autocast may have made them of two dtypes.
        own = key.to(store.dtype), value.to(store.dtype)
        key, value = (states.detach() for states in own)
        kernels = self.kernels_for(query, sinks)
        if append.columns is None:
            self.kernels = kernels
        if kernels is not None:
            kernels.append(key, value, store.tensors, append.seen, append.valid)
            return self._attend(query, append, softmax_scale, sinks, kernels)
        if append.valid is not None:
            padding = ~append.valid[:, None, :, None]
            key, value = key.masked_fill(padding, 0), value.masked_fill(padding, 0)
        if append.columns is None:
            store.append(key, value, append)
            return self._attend(query, append, softmax_scale, sinks, None)
        # Several tokens attend before they are stored: among more than a draft's some are pruned at once.
        new = own if store.kv_dtype == "auto" else (key, value)  # rounding has no gradient
        as_stored = store.tensors.rounded(*new, self.layout)
        kernels = self.kernels_for(query[:, :, :1], sinks)
        with torch.autocast(query.device.type, enabled=False):  # as in every attention of a pruned cache
            out = attend_turn(query, *as_stored, store, append, softmax_scale, sinks, kernels)
        store.append(key, value, append)
        return out

    def attend(self, query: torch.Tensor, append: Append, softmax_scale: float) -> torch.Tensor:
        """Attend to what is stored, with at most `MAX_DRAFT` columns `[B, H, d, D]` that are stored, too."""
        assert self.store is not None
        self.store.move_to(append.tables)  # pages may have been reserved, or this layer filled, since then
        return self._attend(query, append, softmax_scale, None, self.kernels_for(query))

    def kernels_for(self, query: torch.Tensor, sinks: torch.Tensor | None = None) -> DecodeKernels | None:
        """Return the kernels for a query `[B, H, d, D]`, compiled if they never were; None is plain torch."""
        assert self.store is not None
        num_columns, cache_dtype = query.shape[2], self.store.tensors.kept_keys.dtype
        wants_gradients = torch.is_grad_enabled() and query.requires_grad
        if wants_gradients or num_columns > MAX_DRAFT or query.dtype != self.store.dtype:
            return None
        return find_kernels(
            query.device,
            query.dtype,
            head_dim=self.layout.head_dim,
            num_groups=query.shape[1] // len(self.layout.widths),
            chunk_size=self.layout.chunk_size,
            max_chunks=self.layout.max_chunks,
            num_columns=num_columns,
            cache_dtype=None if cache_dtype == self.store.dtype else cache_dtype,
            has_sinks=sinks is not None,
            value_chunk=self.layout.value_chunk,
        )

    def _attend(
        self,
        query: torch.Tensor,
        append: Append,
        softmax_scale: float,
        sinks: torch.Tensor | None,
        kernels: DecodeKernels | None,
    ) -> torch.Tensor:
        """Attend by these kernels, in plain torch without any."""
        assert self.store is not None
        if kernels is None:
            with torch.autocast(query.device.type, enabled=False):  # scores and softmax are fp32's
                return decode_attention(
                    query,
                    self.store.tensors,
                    append.view,
                    layout=self.layout,
                    softmax_scale=softmax_scale,
                    sinks=sinks,
                )
        return kernels.attend(
            query.detach().contiguous(),
            self.store.tensors,
            append.seen,
            append.pruned,
            append.plan(kernels.plan),
            sink_size=append.sink_size,
            softmax_scale=softmax_scale,
            sinks=sinks,
        )

    def make_room(self) -> None:
        """Make what is stored writable, with the pages that the rows have now, where the prompt is split."""
        if self.store is not None and self.rows.tables is not None:
            self.store.move_to(self.rows.tables)

    @property
    def batch_size(self) -> int | None:
        """Rows, None while the layer is empty."""
        if self.store is not None:
            return len(self.store.tables.runs)
        return self.pending[0].shape[0] if self.pending is not None else None

    def memory(self) -> CacheMemory:
        """Count this layer's bytes. Waits for the device."""
        if self.pending is not None:
            return count_whole("pending", *self.pending)
        if self.store is not None and self.rows.lengths is not None and self.rows.pruned_lengths is not None:
            tokens = int(self.rows.lengths.sum())
            return self.store.memory(tokens, tokens - int(self.rows.pruned_lengths.sum()))
        return CacheMemory()

    def get_seq_length(self) -> int:
        """Return the columns seen, padding included."""
        return self.num_columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many keys SDPA will see, and their offset: none of them while decoding."""
        if self.rows.num_prefill_columns(query_length):
            return self.num_columns + query_length, 0
        return 0, 0

    def get_max_length(self) -> int:
        """Return -1: the layer grows as needed."""
        return -1

    get_max_cache_shape = get_max_length  # as older releases of transformers call it

    def select(self, rows: torch.Tensor) -> None:
        """Keep the given rows, in that order, repeats allowed."""
        if self.channel_mask.shape[0] > 1:
            self.channel_mask = self.channel_mask.index_select(0, rows.to(self.channel_mask.device))
        if self.pending is not None:
            keys, values = self.pending
            rows = rows.to(keys.device)
            self.pending = (keys.index_select(0, rows), values.index_select(0, rows))
        if self.store is not None:
            assert self.rows.tables is not None
            self.store.select(rows, self.rows.tables)

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last `-tokens_to_remove` columns; `LeanKCache.crop` checks that they are still whole."""
        self.num_columns += tokens_to_remove
        if self.pending is not None:
            keys, values = self.pending
            self.pending = (keys[:, :, : self.num_columns], values[:, :, : self.num_columns])
