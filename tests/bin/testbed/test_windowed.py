"""Attention of the model with mixed layers while it is trained."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import Qwen3Config, Qwen3Model

from bin.testbed.windowed import ATTENTION_NAME


@pytest.mark.parametrize("length", [7, 8, 9, 24, 37])
def test_blocks_see_what_transformers_masks_let_see(length: int):
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        use_sliding_window=True,
        sliding_window=8,
    )
    model = Qwen3Model(config).double()
    blocked = copy.deepcopy(model)
    blocked.set_attn_implementation(ATTENTION_NAME)
    ids = torch.randint(0, 50, (2, length))
    outputs = []
    for each in (model, blocked):
        hidden = each(input_ids=ids, use_cache=False).last_hidden_state
        hidden.pow(3).sum().backward()
        outputs.append(hidden.detach())
    torch.testing.assert_close(outputs[1], outputs[0])
    for expected, got in zip(model.parameters(), blocked.parameters(), strict=True):
        torch.testing.assert_close(got.grad, expected.grad)
