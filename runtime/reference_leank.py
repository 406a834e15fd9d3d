"""The naive reference: dense keys, a mask and a softmax, in fp64, for one query column after the other.

Kernels are held to it before they serve, and so is plain torch's decode attention by the tests. Of the store
it looks at no entry of a table and no memory but those of the tokens that a column sees.
"""

from __future__ import annotations

import torch

from .layout_leank import ChunkLayout
from .parts_leank import load_part
from .stored_leank import StoredRow, StoreTensors


def attend_naively(
    query: torch.Tensor,
    store: StoreTensors,
    seen: torch.Tensor,
    pruned: torch.Tensor,
    *,
    layout: ChunkLayout,
    sink_size: int,
    softmax_scale: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend with queries `[B, H, Q, D]` to sink, pruned and recent tokens, in fp64.

    Of its row a column sees `seen` stored tokens, `pruned` ones among them, each `[B, Q]`; where it sees
    none, it gets zeros. Logits of the heads' attention sinks are `[H]`.
    """
    query = query.double()
    num_groups = query.shape[1] // len(layout.widths)
    beside = None
    if sinks is not None:
        beside = load_part("sinks").sinks_beside(query, sinks, store.key_mean, softmax_scale)
        beside = beside.expand(query.shape[:3])
    narrow = torch.tensor([not width for width in layout.widths], device=query.device)
    output = torch.zeros_like(query)
    for row, of_row in enumerate(torch.stack([seen, pruned], -1).tolist()):
        for column, (length, num_pruned) in enumerate(of_row):
            if not length:
                continue
            held = StoredRow(store, layout, row, length, num_pruned, sink_size)
            keys, values = (
                states.transpose(0, 1).repeat_interleave(num_groups, 0) for states in held.dense(query.dtype)
            )
            is_pruned = torch.ones(length, dtype=torch.bool, device=query.device)
            is_pruned[held.whole] = False
            hidden = (narrow[:, None] & is_pruned).repeat_interleave(num_groups, 0)
            scores = (keys @ query[row, :, column, :, None])[..., 0] * softmax_scale
            scores = scores.masked_fill(hidden, -torch.inf)  # heads of width 0 do not see pruned tokens
            if beside is not None:
                scores = torch.cat([scores, beside[row, :, column, None]], -1)
            weights = scores.softmax(-1)[:, :length]
            output[row, :, column] = (weights[:, None] @ values)[:, 0].nan_to_num(0)
    return output
