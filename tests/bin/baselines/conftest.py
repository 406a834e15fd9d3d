"""The checkpoint and the prefill of `tests/leank_convert/evaluate`, and steps behind it."""

import pytest
import torch

from tests.leank_convert.evaluate.conftest import evaluated, export_retriever, feed_steps, prefill

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
    generator, shape = torch.Generator().manual_seed(6), (len(prefill.attention_mask), 1)
    tokens = [torch.randint(5, 300, shape, generator=generator) for _ in range(num_steps)]
    model, cache = variant.start(prefill)
    return feed_steps(model, cache, prefill.attention_mask, tokens), cache
