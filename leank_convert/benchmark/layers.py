"""One layer of a pruned cache, filled with given keys and values: what decode attention is measured on.

The only place that knows how the runtime's cache is driven without a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from leank_convert.benchmark.subject import Runtime, Subject


@dataclass(frozen=True)
class AttentionBytes:
    """Bytes that one decode step of one layer has to read, every one of them once.

    Attributes:
        kept_keys: Kept chunks of all tokens, padded lanes included.
        kept_values: V of heads that see pruned tokens, all tokens.
        window_keys: Dropped chunks of sink and recent tokens.
        window_values: V of heads of width 0, sink and recent tokens.
    """

    kept_keys: int
    kept_values: int
    window_keys: int
    window_values: int

    @property
    def total(self) -> int:
        """All of them."""
        return sum(asdict(self).values())


def count_attention_bytes(
    widths: Sequence[int],
    head_dim: int,
    chunk_size: int,
    lengths: Sequence[int],
    pruned_lengths: Sequence[int],
    element_bytes: int,
) -> AttentionBytes:
    """Count what decode attention reads.

    Args:
        widths: Kept channels per KV head.
        head_dim: D.
        chunk_size: Channels of a chunk, E.
        lengths: Tokens per row.
        pruned_lengths: Pruned ones among them.
        element_bytes: Bytes of one number.
    """
    tokens, whole = sum(lengths), sum(lengths) - sum(pruned_lengths)
    kept = sum(-(-width // chunk_size) for width in widths) * chunk_size
    dropped = sum(-(-(head_dim - width) // chunk_size) for width in widths) * chunk_size
    num_seeing = sum(width > 0 for width in widths)
    return AttentionBytes(
        kept_keys=tokens * kept * element_bytes,
        kept_values=tokens * num_seeing * head_dim * element_bytes,
        window_keys=whole * dropped * element_bytes,
        window_values=whole * (len(widths) - num_seeing) * head_dim * element_bytes,
    )


class FilledLayer:
    """One layer after a prompt of all tokens but the last, and after that one was decoded.

    Attributes:
        bytes: What a decode step reads of it.
    """

    def __init__(
        self, runtime: Runtime, subject: Subject, layer: int, query: Tensor, keys: Tensor, values: Tensor
    ) -> None:
        """Fill the layer.

        Args:
            runtime: The runtime of the subject's checkpoint.
            subject: The mask.
            layer: Which layer of it.
            query: `[B, H, 1, D]`, of the last token.
            keys: Of all tokens `[B, H_kv, S, D]`.
            values: `[B, H_kv, S, D]`.
        """
        masks = [mask.to(keys.device) for mask in subject.channel_masks]
        cache = runtime.build_cache(masks)
        self._query = query
        self._softmax_scale = query.shape[-1] ** -0.5
        self._layer = cache.layers[layer]
        batch_size, _, num_tokens, _ = keys.shape
        prompt = num_tokens - 1
        first = keys[:, :, :prompt], values[:, :, :prompt]
        last = keys[:, :, prompt:], values[:, :, prompt:]
        split = cache.rows.step(0, batch_size, prompt, None, keys.device)
        self._layer.lazy_initialization(*first)
        self._layer.extend_pending(*first)
        self._layer.num_columns = prompt
        self._layer.split(split)
        step = cache.rows.step(prompt, batch_size, 1, None, keys.device)
        self._layer.decode(query, *last, step, self._softmax_scale)
        self._append = step.append
        layout = self._layer.layout
        self.bytes = count_attention_bytes(
            layout.widths,
            layout.head_dim,
            layout.chunk_size,
            self._append.lengths.tolist(),
            self._append.pruned_lengths.tolist(),
            keys.element_size(),
        )

    @property
    def memory(self) -> Any:
        """What it holds by region, as the runtime counts it."""
        return self._layer.memory()

    def attend(self) -> Tensor:
        """Decode attention of the last token over all of them `[B, H, 1, D]`; changes nothing."""
        out: Tensor = self._layer.attend(self._query, self._append, self._softmax_scale)
        return out
