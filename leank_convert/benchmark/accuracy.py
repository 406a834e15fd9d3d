"""What every timed result is held to: attention and logits in higher precision, and torch's own error.

Written from the definition, on dense keys and values, so it shares no code with the runtime:

    a pruned token's key counts in its kept channels alone; a head of width 0 does not see it at all
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from leank_convert.windows import Windows

# An implementation may be this many times as far from the exact result as torch is in the same dtype.
TOLERANCE = 2.0
_EXACT = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float64}
_MAX_CHECKED_ROWS = 16


@dataclass(frozen=True)
class Check:
    """How far a result is from the exact one, ‖result - exact‖ / ‖exact‖.

    Attributes:
        error: Of what is checked.
        torch_error: Of torch's own dense code in the same dtype.
    """

    error: float
    torch_error: float

    @property
    def ok(self) -> bool:
        """Whether it is as close as torch, within a factor of two; NaN never is."""
        return self.error <= TOLERANCE * self.torch_error

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; a NaN becomes null."""
        values = {key: value if math.isfinite(value) else None for key, value in asdict(self).items()}
        return {**values, "tolerance": TOLERANCE, "ok": self.ok}


def exact_dtype(dtype: torch.dtype) -> torch.dtype:
    """The precision that results in `dtype` are held to."""
    return _EXACT[dtype]


def relative_error(result: Tensor, exact: Tensor) -> float:
    """‖result - exact‖ / ‖exact‖ in the precision of `exact`."""
    return float((result.to(exact) - exact).norm() / exact.norm())


def pruned_length(num_tokens: int, windows: Windows) -> int:
    """Pruned tokens of a row that was prefilled with all but the last of `num_tokens` and then took that."""
    pruned = max(num_tokens - 1 - windows.sink_size - windows.recent_size, 0)
    overflow = num_tokens - windows.sink_size - pruned - windows.recent_size - windows.flush_size
    return pruned + -(-max(overflow, 0) // windows.flush_size) * windows.flush_size


@dataclass(frozen=True)
class AttentionTruth:
    """Exact attention of some rows.

    Attributes:
        rows: Which rows were worked out.
        output: `[rows, H, 1, D]`, in higher precision.
        torch_error: How far torch's own attention in the inputs' dtype is from it.
    """

    rows: Tensor
    output: Tensor
    torch_error: float

    def check(self, result: Tensor) -> Check:
        """Compare a result for all rows `[B, H, 1, D]`."""
        return Check(relative_error(result[self.rows], self.output), self.torch_error)


def attend_exactly(
    query: Tensor, keys: Tensor, values: Tensor, channel_mask: Tensor, sink_size: int, pruned: int
) -> AttentionTruth:
    """Work out attention over a pruned cache from dense keys and values.

    Args:
        query: `[B, H, 1, D]`.
        keys: All channels of all tokens `[B, H_kv, S, D]`.
        values: `[B, H_kv, S, D]`.
        channel_mask: Kept channels `[H_kv, D]`.
        sink_size: First tokens that keep every channel.
        pruned: How many tokens after them are pruned.
    """
    batch_size = query.shape[0]
    count = min(batch_size, _MAX_CHECKED_ROWS)
    # First and last row are always among them.
    rows = torch.linspace(0, batch_size - 1, count).round().long().to(query.device)
    exact, own = [], []
    for row in rows.tolist():
        q, k, v = (tensor[row : row + 1] for tensor in (query, keys, values))
        own.append(attend_row(q, k, v, channel_mask, sink_size, pruned))
        q, k, v = (tensor.to(_EXACT[query.dtype]) for tensor in (q, k, v))
        with sdpa_kernel(SDPBackend.MATH):
            exact.append(attend_row(q, k, v, channel_mask, sink_size, pruned))
    output = torch.cat(exact)
    return AttentionTruth(rows, output, relative_error(torch.cat(own), output))


def attend_row(
    query: Tensor, keys: Tensor, values: Tensor, channel_mask: Tensor, sink_size: int, pruned: int
) -> Tensor:
    """Attention of one row, heads that see pruned tokens and heads that do not apart."""
    queries = query.view(1, keys.shape[1], -1, 1, query.shape[-1])  # [1, H_kv, G, 1, D]
    out = torch.empty_like(queries)
    stop = sink_size + pruned
    seeing = channel_mask.any(-1)
    heads = seeing.nonzero()[:, 0]
    if len(heads):
        cut = keys[:, heads]
        cut[:, :, sink_size:stop] *= channel_mask[heads][None, :, None]
        out[:, heads] = _attend(queries[:, heads], cut, values[:, heads])
    heads = (~seeing).nonzero()[:, 0]
    if len(heads):
        window = (
            torch.cat([states[:, heads, :sink_size], states[:, heads, stop:]], dim=2)
            for states in (keys, values)
        )
        out[:, heads] = _attend(queries[:, heads], *window)
    return out.flatten(1, 2)


def _attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Torch's attention of `[1, heads, G, 1, D]` queries; a head's G queries are its rows."""
    return functional.scaled_dot_product_attention(queries.squeeze(3), keys, values).unsqueeze(3)
