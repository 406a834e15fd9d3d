"""The checkpoint and the prefill of `tests/leank_convert/evaluate`, and steps behind it."""

import pytest
import torch

from leank_convert.evaluate.prefill import decode_token
from tests.leank_convert.evaluate.conftest import evaluated, export_retriever, prefill

__all__ = ["decode", "evaluated", "export_retriever", "masks", "prefill"]

EVERY_CHANNEL = torch.ones(2, 2, 16, dtype=torch.bool)


@pytest.fixture
def masks(evaluated):
    """Those of the checkpoint, and a head that keeps nothing."""
    masks = evaluated.channel_masks.clone()
    masks[0, 0] = False
    return masks


def decode(prefill, variant, num_steps):
    """The logits of steps on the same random tokens, and the cache."""
    generator = torch.Generator().manual_seed(6)
    model, cache = variant.start(prefill)
    attention_mask, steps = prefill.attention_mask, []
    for _ in range(num_steps):
        token = torch.randint(5, 300, (len(attention_mask), 1), generator=generator)
        logits, attention_mask = decode_token(model, cache, token, attention_mask)
        steps.append(logits)
    return torch.stack(steps) if steps else None, cache
