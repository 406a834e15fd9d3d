"""The seam to transformers: handles, masks, and what padding may hold."""

import math
from types import SimpleNamespace

import torch
from torch import nn

from runtime.attention_leank import leank_attention


class Attention(nn.Module):
    """What an attention function asks of its module."""

    config = SimpleNamespace(leank={})
    num_key_value_groups = 2
    is_causal = True
    layer_idx = 0


def states(columns: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value of two rows."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(2, heads, columns, 16, generator=generator) for heads in (6, 3, 3))


def test_what_padding_holds_does_not_matter(model_pair):
    pair = model_pair([[0, 4, 16]], sink=2, recent=3, flush=2)
    mask = torch.ones(2, 18, dtype=torch.bool)
    mask[1, :4] = False
    mask[1, 13:15] = False
    mask[0, 17] = False
    results = []
    for filler in (1.0, math.nan):
        cache = pair.leank.build_cache()
        outputs = []
        for start, stop in ((0, 12), (12, 16), (16, 17), (17, 18)):
            query, key, value = states(stop - start, seed=start)
            padding = ~mask[:, start:stop]
            handle, _ = cache.layers[0].update(key, value)
            if start:  # a prompt's padding runs through SDPA, which needs finite numbers
                key.transpose(1, 2)[padding] = filler
                value.transpose(1, 2)[padding] = filler
                query.transpose(1, 2)[padding] = filler
                seen = mask[:, :stop]
            else:
                seen = mask[:, None, None, :stop] & torch.ones(stop, stop, dtype=torch.bool).tril()
                seen[1, 0, :4, :4] |= torch.eye(4, dtype=torch.bool)
            out, _ = leank_attention(Attention(), query, handle, handle, seen, scaling=0.3)
            outputs.append(out[mask[:, start:stop]])
        store = cache.layers[0].store
        for tensor in (store.kept_keys, store.values, store.window_keys, store.window_values):
            assert tensor.isfinite().all()
        results.append(torch.cat(outputs))
    assert torch.equal(*results)
