"""Reference cache in plain torch for KIVI, Quest, SnapKV and int4, alone or on LeanK's channels.

It decodes in a LeanK model, whose attention function leaves attention to whatever a cache's `update` gives.
Keys and values of every token lie whole in memory, whatever a method would free: a method says by masks what
is read, by writing what is rounded, and in numbers what would be held. Which tokens are whole is worked out
by the row counters of a LeanK cache. Padding is left out: a row's token 0 is its first real one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from leank_convert._runtime.constants_leank import centre
from leank_convert.evaluate.comparison import UsedBytes
from leank_convert.evaluate.prefill import Prefill
from leank_convert.windows import Windows

_GROWTH = 64  # tokens that room is made for at a time


@dataclass
class Prompts:
    """What one layer knows of a batch of prompts."""

    index: int  # the layer's place in the model
    keys: Tensor  # after RoPE, without padding: a row's token i at column i, then anything [B, H_kv, N, D]
    values: Tensor  # likewise
    lengths: list[int]  # tokens of each row
    queries: Tensor  # the prompts' last queries, the last one at the end [B, H, W, D]; W may be 0
    softmax_scale: float  # the model's factor on the logits
    channel_mask: Tensor  # channels that are kept of tokens which are not whole, bool [H_kv, D]
    rows: Any  # the LeanK cache's counters, shared by all layers
    key_mean: Tensor | None = None  # what came off these keys, and comes off those to come [H_kv, 1, D]


class ComparedLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """One layer; this class prunes channels as LeanK does, and does nothing else.

    Its keys and values are those of all tokens [B, H_kv, N, D], N at least the longest of its rows'
    `lengths`; `widths` [H_kv] are kept channels.
    """

    def __init__(self, prompts: Prompts) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.index, self.lengths = prompts.index, prompts.lengths
        self.keys: Tensor = prompts.keys
        self.values: Tensor = prompts.values
        self.channel_mask = prompts.channel_mask
        self.widths = prompts.channel_mask.sum(-1)
        self.dtype, self.device, self.is_initialized = self.keys.dtype, self.keys.device, True
        self._rows, self._num_columns = prompts.rows, prompts.rows.num_columns
        self._key_mean, self._scale = prompts.key_mean, prompts.softmax_scale
        self._prunes = not bool(prompts.channel_mask.all())
        self._read: Tensor | None = None  # what the last step read [B, H_kv, N]

    def held(self, seen: Tensor) -> Tensor:
        """Which of the row's tokens [B, 1, N] each head has in memory, bool [B, H_kv or 1, N]."""
        return seen

    def chosen(self, query: Tensor, seen: Tensor, whole: Tensor) -> Tensor:
        """Which tokens are read for each query, bool [B, H_kv or 1, G or 1, N].

        Queries are scaled, float32 [B, H_kv, G, D]; `seen` are the row's tokens, bool [B, 1, 1, N], `whole`
        those among them that keep every channel.
        """
        return self.held(seen[:, 0])[:, :, None]

    def enter(self, query: Tensor) -> Tensor:
        """Bring queries [B, H_kv, G, D] to where keys are."""
        return query

    def leave(self, out: Tensor) -> Tensor:
        """Bring outputs [B, H_kv, G, D] back from where values are."""
        return out

    def settle(self) -> None:
        """Do what follows a step's attention."""

    def bits(self) -> tuple[Tensor | int, Tensor | int, Tensor | int, Tensor | int]:
        """Bits of a number of K's kept and dropped channels, of V where K is kept and where it is not.

        Each is one for all, of each token [B, 1, N] or of each head [H_kv, 1].
        """
        size = 8 * self.keys.element_size()
        return size, size, size, size

    def extra_bits(self) -> int:
        """Bits held, and read in every step, beside K and V."""
        return 0

    def used(self) -> UsedBytes:
        """Count this layer's bytes after a decode step."""
        assert self._read is not None
        seen, whole = (tokens[:, 0] for tokens in self._regions())
        extra = self.extra_bits()
        held, read = (
            round(float(self._bits_of(tokens, whole) + extra)) // 8
            for tokens in (self.held(seen) & seen, self._read)
        )
        return UsedBytes(held, read)

    def update(  # type: ignore[override]
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[ComparedLayer, ComparedLayer]:
        """Append one token a row [B, H_kv, 1, D]; whoever attends calls `attend` on what is returned."""
        self.append(centre(key_states, self._key_mean), value_states)
        return self, self

    def append(self, key_states: Tensor, value_states: Tensor) -> None:
        """Append one token a row [B, H_kv, 1, D], whose key is centred."""
        self._rows.step(self._num_columns, key_states.shape[0], 1, None, key_states.device)
        self._num_columns += 1
        places = torch.tensor(self.lengths, device=self.keys.device)
        self.lengths = [length + 1 for length in self.lengths]
        if max(self.lengths) > self.keys.shape[2]:
            self.keys, self.values = (functional.pad(t, (0, 0, 0, _GROWTH)) for t in (self.keys, self.values))
        rows = torch.arange(len(self.lengths), device=self.keys.device)
        self.keys[rows, :, places], self.values[rows, :, places] = key_states[:, :, 0], value_states[:, :, 0]

    def attend(self, module: object, query: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, None]:
        """Attend with the token that was appended [B, H, 1, D]; returns [B, 1, H, D] and no weights."""
        batch_size, num_heads, _, head_dim = query.shape
        keys, values = self.keys.float(), self.values.float()
        grouped = self.enter(query.float().view(batch_size, keys.shape[1], -1, head_dim)) * self._scale
        seen, whole = self._regions()
        kept = self.channel_mask[:, None]
        scores = (grouped * kept) @ keys.mT
        if self._prunes:
            scores = scores + ((grouped * ~kept) @ keys.mT).masked_fill(~whole, 0)
        read = self.chosen(grouped, seen, whole) & seen & (whole | (self.widths > 0)[:, None, None])
        self._read = read.any(2)
        out = self.leave(scores.masked_fill(~read, float("-inf")).softmax(-1) @ values)
        self.settle()
        return out.view(batch_size, 1, num_heads, head_dim).to(query.dtype), None

    def get_seq_length(self) -> int:
        """Return the columns seen, padding included."""
        return int(self._num_columns)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return that no key is to be masked: the layer knows what its rows hold."""
        return 0, 0

    def _regions(self) -> tuple[Tensor, Tensor]:
        """Tokens of each row, and those among them that are whole, bool [B, 1, 1, N]."""
        places = torch.arange(self.keys.shape[2], device=self.keys.device)
        lengths, pruned = (t[:, None] for t in (self._rows.lengths, self._rows.pruned_lengths))
        sink_size = self._rows.windows.sink_size
        seen = places < lengths
        whole = seen & ((places < sink_size) | (places >= sink_size + pruned))
        return seen[:, None, None], whole[:, None, None]

    def _bits_of(self, tokens: Tensor, whole: Tensor) -> Tensor:
        """Bits of K and V of some tokens [B, H_kv or 1, N], of which some are whole [B, 1, N]."""
        kept_key, dropped_key, kept_value, window_value = self.bits()
        head_dim, widths = self.keys.shape[3], self.widths[:, None]
        keys = widths * kept_key + (head_dim - widths) * dropped_key * whole
        values = head_dim * ((widths > 0) * kept_value + (widths == 0) * window_value * whole)
        return (tokens * (keys + values)).sum(dtype=torch.float64)


class ComparedCache(Cache):
    """A cache of such layers, one for every layer of a LeanK model."""

    # A LeanK model takes what has this for a LeanK cache.
    prefill_length = None

    def takes_step(self, num_columns: int) -> bool:
        """Return that no step goes the way of captured ones."""
        return False

    def used(self) -> UsedBytes:
        """Count bytes after a decode step."""
        parts = [layer.used() for layer in self.layers if isinstance(layer, ComparedLayer)]
        return UsedBytes(sum(part.held for part in parts), sum(part.read for part in parts))


@dataclass
class Compared:
    """A method that decodes from a `ComparedCache`."""

    name: str  # what its column is called
    make_layer: Callable[[Prompts], ComparedLayer]  # makes a layer of what it knows of the prompts
    # Channels that are kept of tokens which are not whole, in the checkpoint's head order, bool [L, H_kv, D].
    channel_masks: Tensor
    windows: Windows | None = None  # tokens that stay whole, None for the checkpoint's
    query_window: int = 0  # how many of the prompt's last queries the method looks at
    key_mean: Tensor | None = None  # what comes off keys, in the same order [L, H_kv, D]

    def start(self, prefill: Prefill) -> tuple[Any, Cache]:
        """The LeanK model, and a cache of the prompts' keys and values."""
        rows = prefill.fork(self.windows).rows
        mask = prefill.attention_mask
        lengths = mask.sum(1).tolist()
        # A row's real columns first; a copy in any case, as methods write.
        order = (torch.arange(mask.shape[1], device=mask.device) - mask.sum(1, keepdim=True)) % mask.shape[1]
        layers: list[Any] = []
        for index, (keys, values) in enumerate(prefill.keys_and_values):
            aligned = [
                states.gather(2, order[:, None, :, None].expand_as(states)) for states in (keys, values)
            ]
            mean = None if self.key_mean is None else self.key_mean[index][:, None].to(keys.device).float()
            window = self.query_window
            prompts = Prompts(
                index=index,
                keys=centre(aligned[0], mean),
                values=aligned[1],
                lengths=lengths,
                queries=prefill.queries[index][:, :, -window:] if window else keys[:, :, :0],
                softmax_scale=prefill.model.get_decoder().layers[index].self_attn.scaling,
                channel_mask=self.channel_masks[index].to(keys.device),
                rows=rows,
                key_mean=mean,
            )
            layers.append(self.make_layer(prompts))
        return prefill.model, ComparedCache(layers=layers)
