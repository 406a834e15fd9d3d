"""Layers that are not pruned, in a cache that is used in other ways than by one prompt and its answer."""

from __future__ import annotations

import pytest
import torch

from runtime.cache_leank import LeanKCache

WINDOW = 7
LENGTHS = [20, 4]


@pytest.fixture
def model(model_pair, some_masks):
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    sliding = {"layer_types": kinds, "sliding_window": WINDOW, "use_sliding_window": True}
    return model_pair(some_masks([[0, 3, 16], [4, 8, 8]]), "Qwen3", **sliding).leank


def ids(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 64, (1, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def prefilled(model, length, seed=0):
    return model(ids(length, seed), past_key_values=model.build_cache()).past_key_values


@torch.no_grad()
def decoded(model, cache, tokens, positions, **masks):
    return model(tokens, position_ids=positions, past_key_values=cache, **masks).logits


def test_rows_of_other_lengths_need_no_mask_to_be_seen_as_they_are_alone(model):
    alone = [
        decoded(model, prefilled(model, length, row), ids(3, 9), torch.arange(3)[None] + length)
        for row, length in enumerate(LENGTHS)
    ]
    cache = LeanKCache.concatenate([prefilled(model, length, row) for row, length in enumerate(LENGTHS)])
    positions = torch.tensor(LENGTHS)[:, None]
    steps = [decoded(model, cache, ids(3, 9)[:, [i]].expand(2, 1), positions + i) for i in range(3)]
    torch.testing.assert_close(torch.cat(steps, 1), torch.cat(alone))


@pytest.mark.parametrize("length", [WINDOW - 2, WINDOW + 5])
@pytest.mark.parametrize("drop", [LeanKCache.reset, lambda cache: cache.crop(-cache.get_seq_length())])
def test_a_cache_that_was_emptied_is_as_new(length, drop, model):
    # transformers' layers keep zeros in the place of what they drop: in older releases, and where they hold a
    # state, of as many rows as it had.
    cache = model.build_cache("deferred")
    with torch.no_grad():
        model(ids(length).expand(2, -1), past_key_values=cache)
    drop(cache)
    positions = torch.arange(12)[None]
    expected = decoded(model, model.build_cache("deferred"), ids(12, 1), positions)
    assert torch.equal(decoded(model, cache, ids(12, 1), positions), expected)
    assert cache.memory().other_keys.used == 2 * 3 * (WINDOW - 1) * 16 * 4


def test_a_state_that_was_emptied_takes_another_number_of_rows(model_pair, some_masks):
    sizes = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
    experts = {
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 8,
    }
    kinds = {"layer_types": ["linear_attention", "full_attention"], "linear_value_head_dim": 8}
    model = model_pair(some_masks([[0, 3, 16]]), "Qwen3Next", **sizes, **experts, **kinds).leank
    cache, positions, tokens = model.build_cache(), torch.arange(12)[None], ids(12, 1).expand(2, -1)
    decoded(model, cache, ids(12), positions)
    cache.reset()
    expected = decoded(model, model.build_cache(), tokens, positions)
    assert torch.equal(decoded(model, cache, tokens, positions), expected)
