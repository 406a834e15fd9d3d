"""The cache of a LeanK model, in the shape that transformers' models and `generate` expect."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin

from .attention_leank import AttentionHandle
from .configuration_leank import check_prune, read_settings
from .layout_leank import ChunkLayout, choose_chunk_size, order_channels
from .memory_leank import CacheMemory, pending_memory, store_memory, sum_memory
from .reference_leank import decode_attention
from .rows_leank import RowState, Step
from .store_leank import ChunkStore


class LeanKLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """The cache of one layer: whole input until it is split, a `ChunkStore` after.

    Attributes:
        rows: Lengths of the rows, shared by all layers.
        num_columns: Columns seen, padding included.
        model_mask: Channels that the model keeps `[1, H_kv, D]`, bool.
        channel_mask: Channels that this cache keeps `[1 or B, H_kv, D]`, bool.
        layout: How they are cut into chunks.
        pending: Whole K and V, each `[B, H_kv, S, D]`, until they are split.
        store: K and V after that.
    """

    is_compileable = False
    is_croppable = True
    is_sliding = False
    supports_early_init = False

    def __init__(
        self,
        layer_idx: int,
        channel_mask: torch.Tensor,
        widths: Sequence[int],
        chunk_size: int,
        rows: RowState,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.layer_idx = layer_idx
        self.rows = rows
        self.model_mask = channel_mask[None]
        self._model_layout = ChunkLayout(tuple(widths), channel_mask.shape[-1], chunk_size)
        self.reset()

    def reset(self) -> None:
        """Drop all tokens and go back to the model's own channel mask."""
        self.is_initialized = False
        self.num_columns = 0
        self.channel_mask = self.model_mask
        self.layout = self._model_layout
        self.pending: tuple[torch.Tensor, torch.Tensor] | None = None
        self.store: ChunkStore | None = None

    def set_channel_mask(self, channel_mask: torch.Tensor) -> None:
        """Replace the kept channels, for this cache only, before its prompt is split.

        The hook for methods that choose channels per prompt: with `prune="deferred"` run the prompt but for
        its last token, look at `pending`, set a mask in every layer, then call `generate` with the whole
        prompt and this cache.

        Args:
            channel_mask: True where a channel is kept `[H_kv, D]`, or per row `[B, H_kv, D]`. Which channels
                a head keeps may differ between rows, how many may not.

        Raises:
            ValueError: If the prompt is split already, or the mask does not fit.
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
        self.layout = ChunkLayout(tuple(widths[0].tolist()), self.layout.head_dim, self.layout.chunk_size)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Check the first keys and values against the channel mask.

        Raises:
            ValueError: If they do not fit.
        """
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
        counted = tuple(self.channel_mask[0].sum(-1).tolist())
        if counted != self.layout.widths:
            raise ValueError(
                f"layer {self.layer_idx}: `self_attn.channel_mask` keeps {list(counted)} channels per head, "
                f"config.json's `leank.widths` says {list(self.layout.widths)}: the tensor is missing from "
                "the checkpoint or belongs to another one; check it with `leank-convert verify`"
            )
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(  # type: ignore[override]
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[AttentionHandle, AttentionHandle]:
        """Take new keys and values `[B, H_kv, Q, D]`; return a handle in place of all of them, twice.

        The tokens enter the cache when the attention function calls `handle.attend`.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        handle = AttentionHandle(self, self.num_columns, key_states, value_states)
        return handle, handle

    def extend_pending(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep prompt input whole `[B, H_kv, Q, D]` and return all of it, for dense attention.

        Stored tensors are cut from the autograd graph: gradients reach the input of one forward pass, not
        the cache.
        """
        if self.pending is None:
            self.pending = (key.detach(), value.detach())
            return key, value
        key = torch.cat([self.pending[0], key], dim=2)
        value = torch.cat([self.pending[1], value], dim=2)
        self.pending = (key.detach(), value.detach())
        return key, value

    def split(self, step: Step) -> None:
        """Turn the pending prompt into sink, pruned and recent."""
        assert self.pending is not None and step.split is not None
        keys, values = self.pending
        order = order_channels(self.channel_mask.to(keys.device))
        self.store = ChunkStore(self.layout, order, self.rows.num_slots, keys, values, step.split)
        self.pending = None

    def decode(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, step: Step, softmax_scale: float
    ) -> torch.Tensor:
        """Append new tokens and attend; one token is appended first, several attend first.

        Args:
            query: `[B, H, d, D]`.
            key: `[B, H_kv, d, D]`.
            value: `[B, H_kv, d, D]`.
            step: Positions and lengths.
            softmax_scale: Factor on the logits.

        Returns:
            `[B, H, d, D]`.
        """
        store, append = self.store, step.append
        assert store is not None and append is not None
        if not store.is_writable:
            store.copy_memory()
        key, value = key.detach(), value.detach()
        if append.valid is not None:
            padding = ~append.valid[:, None, :, None]
            key, value = key.masked_fill(padding, 0), value.masked_fill(padding, 0)
        one_token = query.shape[2] == 1
        if one_token:
            store.append(key, value, append)
        out = decode_attention(
            query,
            store.kept_keys,
            store.values,
            store.window_keys,
            store.window_values,
            store.chunk_index,
            append.lengths,
            append.pruned_lengths,
            layout=self.layout,
            sink_size=self.rows.sink_size,
            max_length=append.max_length,
            softmax_scale=softmax_scale,
            new_keys=None if one_token else key,
            new_values=None if one_token else value,
            new_valid=None if one_token else append.valid,
        )
        if not one_token:
            if out.requires_grad:
                store.copy_memory()  # the backward pass needs what was attended to
            store.append(key, value, append)
        return out

    def memory(self) -> CacheMemory:
        """Count this layer's bytes. Waits for the device."""
        if self.pending is not None:
            return pending_memory(*self.pending)
        if self.store is not None and self.rows.lengths is not None and self.rows.pruned_lengths is not None:
            tokens = int(self.rows.lengths.sum())
            return store_memory(self.store, tokens, tokens - int(self.rows.pruned_lengths.sum()))
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

    def get_max_cache_shape(self) -> int:
        """Return -1; the name that older transformers releases ask for."""
        return -1

    def select(self, rows: torch.Tensor) -> None:
        """Keep the given rows, in that order, repeats allowed."""
        if self.channel_mask.shape[0] > 1:
            self.channel_mask = self.channel_mask.index_select(0, rows.to(self.channel_mask.device))
        if self.pending is not None:
            keys, values = self.pending
            rows = rows.to(keys.device)
            self.pending = (keys.index_select(0, rows), values.index_select(0, rows))
        if self.store is not None:
            self.store.select(rows.to(self.store.kept_keys.device))

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last `-tokens_to_remove` columns; `LeanKCache.crop` checks that they are still whole."""
        self.num_columns += tokens_to_remove
        if self.pending is not None:
            keys, values = self.pending
            self.pending = (keys[:, :, : self.num_columns], values[:, :, : self.num_columns])


class LeanKCache(Cache):
    """A cache that keeps, of every token between sink and recent, only the channels a head needs.

    `model.generate` and the model's forward build one by themselves; build one with `model.build_cache()` to
    choose `prune`, to keep it over several calls, or to set channel masks.

    Args:
        config: The model's config, with its `leank` block.
        channel_masks: Kept channels of every layer, each `[H_kv, D]`, bool, in the checkpoint's head order.
        prune: `eager` prunes after every forward pass of several tokens, one layer at a time, so the full
            cache of a long prompt never exists for all layers. `deferred` keeps the input whole until
            decoding begins, so a prompt in chunks gives what it gives in one piece. Default: the config's.

    Attributes:
        rows: Lengths of the rows, shared by all layers.
    """

    layers: list[LeanKLayer]  # type: ignore[assignment]

    def __init__(
        self, config: PreTrainedConfig, channel_masks: Sequence[torch.Tensor], prune: str | None = None
    ) -> None:
        settings = read_settings(config)
        mode = settings.prune if prune is None else check_prune(prune, "`prune`")
        self.rows = RowState(settings.sink_size, settings.recent_size, settings.flush_size, mode)
        chunk_size = choose_chunk_size(settings.widths, settings.head_dim)
        super().__init__(
            layers=[
                LeanKLayer(layer_idx, mask, widths, chunk_size, self.rows)
                for layer_idx, (mask, widths) in enumerate(zip(channel_masks, settings.widths, strict=True))
            ]
        )

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
    def prefill_length(self) -> int | None:
        """Columns of the prompt, padding included; None if unknown.

        `generate` sets it. It tells a `deferred` cache that a chunk of one token still belongs to the prompt
        (without it, one token on pending input begins decoding), and both modes that columns beyond it in the
        first forward pass, such as drafted tokens, are decoded against the pruned cache.
        """
        return self.rows.prefill_length

    @prefill_length.setter
    def prefill_length(self, value: int | None) -> None:
        if value is not None and value < 1:
            raise ValueError(f"`prefill_length` is {value}, a prompt has at least one token")
        self.rows.prefill_length = value

    def is_made_of(self, channel_masks: Sequence[torch.Tensor]) -> bool:
        """Return whether these are the masks it was built with. Waits for the device if they are copies."""
        own = [layer.model_mask[0] for layer in self.layers]
        return len(own) == len(channel_masks) and all(
            mask.data_ptr() == other.data_ptr() or torch.equal(mask, other.to(mask.device))
            for mask, other in zip(own, channel_masks, strict=True)
        )

    def memory(self) -> CacheMemory:
        """Count bytes used and allocated, by region. Waits for the device."""
        return sum_memory(layer.memory() for layer in self.layers)

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
        self.rows.crop(count)
        for layer in self.layers:
            layer.crop(-count)
        if count == length:
            self.reset()

    def reset(self) -> None:
        """Drop all tokens, and channel masks that were set; `prune` stays."""
        self.rows.reset()
        for layer in self.layers:
            layer.reset()

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
        self.rows.select(rows)
        for layer in self.layers:
            layer.select(rows)

    def _batch_size(self) -> int | None:
        layer = self.layers[0]
        if layer.store is not None:
            return layer.store.kept_keys.shape[0]
        return layer.pending[0].shape[0] if layer.pending is not None else None
