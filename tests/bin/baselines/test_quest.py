"""Quest: the pages that are read are those of a slow re-statement, and all of them are everything."""

import pytest
import torch

from bin.baselines import quest
from bin.baselines.compared_cache import Compared, ComparedLayer
from bin.baselines.quest import QuestLayer
from leank_convert.windows import Windows
from tests.bin.baselines.conftest import EVERY_CHANNEL, decode

LENGTHS = (60, 41, 7)
BUDGET, PAGE = 16, 4
NO_WINDOW = Windows(sink_size=0, recent_size=0, flush_size=1)


@pytest.fixture(autouse=True)
def choose_in_all_layers(monkeypatch):
    monkeypatch.setattr(quest, "DENSE_LAYERS", 0)


def step(prefill, make_layer, masks=EVERY_CHANNEL, windows=None):
    return decode(prefill, Compared("compared", make_layer, masks, windows), 1)


def make(per_kv_head=False, token_budget=BUDGET):
    return lambda prompts: QuestLayer(prompts, PAGE, per_kv_head, token_budget)


def read_slowly(layer, row, head, queries, whole):
    """Tokens that these queries of one KV head read together."""
    length = LENGTHS[row] + 1
    kept = [channel for channel in range(16) if layer.channel_mask[head, channel]]
    last = (length - 1) // PAGE
    scores = {}
    for page in range(last):
        tokens = range(page * PAGE, (page + 1) * PAGE)
        if all(token in whole for token in tokens):
            continue
        scores[page] = 0.0
        for query in queries:
            for channel in kept:
                values = [float(layer.keys[row, head, token, channel]) for token in tokens]
                scores[page] += max(float(query[channel]) * v for v in (min(values), max(values)))
    best = sorted(scores, key=scores.__getitem__, reverse=True)[: BUDGET // PAGE - 1]
    paged = {token for page in (*best, last) for token in range(page * PAGE, (page + 1) * PAGE)}
    return {token for token in paged | whole if token < length}


@pytest.mark.parametrize("per_kv_head", [False, True])
@pytest.mark.parametrize("with_leank", [False, True])
def test_the_best_pages_the_last_one_and_the_window_are_read(evaluated, prefill, with_leank, per_kv_head):
    masks = evaluated.channel_masks if with_leank else EVERY_CHANNEL
    _, cache = step(prefill, make(per_kv_head), masks, None if with_leank else NO_WINDOW)
    layer = cache.layers[1]
    queries = torch.randn(3, 2, 2, 16, generator=torch.Generator().manual_seed(2))
    places = torch.arange(layer.keys.shape[2])
    wholes = []
    for length in LENGTHS:
        # A fresh token on windows of 2 and 6, or of none.
        wholes.append({t for t in range(length + 1) if t < 2 or t >= length - 6} if with_leank else {length})
    seen = torch.stack([places <= length for length in LENGTHS])[:, None, None]
    whole = torch.stack([sum(places == token for token in tokens) > 0 for tokens in wholes])[:, None, None]
    read = layer.chosen(queries, seen, whole) & seen
    for row, tokens in enumerate(wholes):
        for head in range(2):
            groups = [[0, 1]] if per_kv_head else [[0], [1]]
            for place, group in enumerate(groups):
                expected = read_slowly(layer, row, head, queries[row, head, group], tokens)
                assert set(read[row, head, place].nonzero().flatten().tolist()) == expected


def test_only_reads_are_saved_and_what_pages_are_chosen_by_counts(evaluated, prefill):
    _, plain = step(prefill, ComparedLayer, evaluated.channel_masks)
    _, cache = step(prefill, make(), evaluated.channel_masks)
    num_pages = sum(length // PAGE + 1 for length in LENGTHS)
    extremes = 2 * num_pages * int(evaluated.channel_masks.sum()) * 4
    assert cache.used().held == plain.used().held + extremes
    assert cache.used().read < plain.used().read


@pytest.mark.parametrize("per_kv_head", [False, True])
def test_a_budget_for_every_page_is_no_quest_at_all(evaluated, prefill, per_kv_head):
    masks = evaluated.channel_masks
    expected, _ = step(prefill, ComparedLayer, masks)
    assert torch.equal(step(prefill, make(per_kv_head, 1024), masks)[0], expected)
    assert not torch.equal(step(prefill, make(per_kv_head), masks)[0], expected)


def test_the_first_two_layers_read_everything(evaluated, prefill, monkeypatch):
    monkeypatch.setattr(quest, "DENSE_LAYERS", 2)
    expected, _ = step(prefill, ComparedLayer, evaluated.channel_masks)
    assert torch.equal(step(prefill, make(), evaluated.channel_masks)[0], expected)
