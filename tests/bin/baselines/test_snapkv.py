"""SnapKV: the tokens that stay are those of a slow re-statement, and what is decoded stays with them."""

import functools
import math

import pytest
import torch

from bin.baselines.compared_cache import Compared
from bin.baselines.snapkv import KERNEL_SIZE, SnapKVLayer
from bin.baselines.snapkv import QUERY_WINDOW as QUERIES
from tests.bin.baselines.conftest import EVERY_CHANNEL, decode

LENGTHS = (90, 61, 35, 20)
HEAD_DIM, GROUPS = 16, 2
# More queries than it looks at, as when another variant in the same batch wants them.
QUERY_WINDOW = QUERIES + 3


def kept_slowly(prefill, layer, row, head, capacity):
    """Tokens of a prompt that one KV head keeps."""
    length = LENGTHS[row]
    if length <= max(capacity, QUERIES):
        return set(range(length))
    keys = prefill.keys_and_values[layer][0][row, head].double()[-length:]
    first = length - QUERIES
    sums = [0.0] * first
    for query_head in range(head * GROUPS, (head + 1) * GROUPS):
        queries = prefill.queries[layer][row, query_head].double()[-QUERIES:]
        for place, query in enumerate(queries, start=first):
            weights = [math.exp(float(query @ keys[t]) / HEAD_DIM**0.5) for t in range(place + 1)]
            for token in range(first):
                sums[token] += weights[token] / sum(weights)
    reach = KERNEL_SIZE // 2
    smooth = [sum(sums[max(t - reach, 0) : t + reach + 1]) for t in range(first)]
    best = sorted(range(first), key=smooth.__getitem__, reverse=True)[: max(capacity - QUERIES, 0)]
    return {*best, *range(first, length)}


@pytest.mark.parametrize("capacity", [40, 0.56])
def test_tokens_that_the_prompts_end_looks_at_stay_and_so_does_what_is_decoded(prefill, capacity):
    num_steps = 3
    make_layer = functools.partial(SnapKVLayer, capacity=capacity)
    variant = Compared("compared", make_layer, EVERY_CHANNEL, query_window=QUERIES)
    _, cache = decode(prefill, variant, num_steps)
    num_held = 0
    for index, layer in enumerate(cache.layers):
        places = torch.arange(layer.keys.shape[2])
        seen = torch.stack([places < length + num_steps for length in LENGTHS])[:, None]
        held = layer.held(seen) & seen
        for row, length in enumerate(LENGTHS):
            room = capacity if isinstance(capacity, int) else int(capacity * length)
            for head in range(2):
                expected = kept_slowly(prefill, index, row, head, room)
                decoded = set(range(length, length + num_steps))
                assert set(held[row, head].nonzero().flatten().tolist()) == expected | decoded
                num_held += len(expected) + num_steps
    assert cache.used().held == cache.used().read == num_held * 2 * HEAD_DIM * 4
