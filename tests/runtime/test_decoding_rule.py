"""Every way of feeding a LeanK model gives what the slow restatement of the decoding rule gives."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch

from tests.runtime.tiny_inputs import row
from tests.tiny_families import FAMILIES, OPTIONS

WIDTHS = {
    "mixed widths": [[0, 3, 16], [4, 8, 8]],
    "one bucket": [[8, 8, 8], [8, 8, 8]],
    "all width 0": [[0, 0, 0], [0, 0, 0]],
    "width 0 beside all kept": [[0, 16, 16], [16, 16, 16]],
    "odd widths": [[1, 5, 15], [2, 7, 9]],
    "unsorted buckets": [[8, 0, 8], [0, 5, 0]],
}
SIZES = {
    "usual": (3, 6, 4),
    "no sink": (0, 6, 4),
    "no recent": (3, 0, 2),
    "flush 1": (2, 5, 1),
    "nothing but flush 1": (0, 0, 1),
    "flush longer than recent": (2, 3, 9),
}


@pytest.fixture
def follows_the_rule(model_pair, some_masks, slow_logits, fed_logits, assert_close):
    """Feeds rows `per_row[b][t]` tokens in pass t, and holds each to the rule by itself; gives the cache."""

    def check(per_row, widths="mixed widths", sizes="usual", side="left", pair=None, **options):
        sink, recent, flush = SIZES[sizes]
        if pair is None:
            pair = model_pair(some_masks(WIDTHS[widths]), sink=sink, recent=recent, flush=flush, **options)
        rows = [row(sum(turns), seed) for seed, turns in enumerate(per_row)]
        ours, cache = fed_logits(pair.leank, rows, list(zip(*per_row, strict=True)), side)
        for logits, ids, turns in zip(ours, rows, per_row, strict=True):
            assert_close(pair.leank, logits, slow_logits(pair, ids, [n for n in turns if n]))
        return cache

    return check


@pytest.mark.parametrize(
    ("widths", "sizes"),
    [(widths, "usual") for widths in WIDTHS]
    + [("mixed widths", sizes) for sizes in SIZES if sizes != "usual"]
    + [("all width 0", "nothing but flush 1"), ("odd widths", "flush longer than recent")],
)
def test_token_by_token_decoding_follows_the_rule(widths, sizes, follows_the_rule):
    assert follows_the_rule([[31] + [1] * 30], widths, sizes).get_seq_length() == 61


def test_prompts_around_the_window_size_follow_the_rule(model_pair, some_masks, follows_the_rule):
    pair = model_pair(some_masks(WIDTHS["mixed widths"]))
    for prompt in (1, 2, 3, 4, 9, 10, 13, 14):
        follows_the_rule([[prompt] + [1] * 25], pair=pair)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("turns", [[1, 1, 1, 30, 2, 1], [12, 2, 2, 2, 2, 2, 1, 2, 3, 20]], ids=str)
def test_several_tokens_at_once_follow_the_rule(sizes, turns, follows_the_rule):
    follows_the_rule([turns], sizes=sizes)


PADDED = {
    # The second turn pads in the middle; one row gets one token there, one gets none, one starts late.
    "padded": [
        [30, 9, 1, 1, 4, 1],
        [11, 1, 1, 1, 1, 1],
        [1, 6, 1, 1, 3, 1],
        [23, 0, 1, 0, 2, 1],
        [0, 1, 1, 1, 5, 1],
    ],
    "padding for two turns": [[20, 5, 4, 1, 1], [0, 0, 22, 1, 1], [0, 18, 0, 1, 1]],
    "starts with one token": [[5, 1, 1, 1], [0, 1, 1, 1]],
}


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    ("rows", "sizes"),
    [
        *(("padded", sizes) for sizes in SIZES),
        ("padding for two turns", "usual"),
        ("starts with one token", "nothing but flush 1"),
    ],
)
def test_padded_rows_follow_the_rule_each_by_itself(side, rows, sizes, follows_the_rule):
    follows_the_rule(PADDED[rows], sizes=sizes, side=side)


@pytest.mark.parametrize("chunks", [[9, 9, 9], [26, 1], [1, 26], [13, 14]], ids=str)
@pytest.mark.parametrize("padded", [False, True], ids=["one row", "padded rows"])
def test_deferred_chunks_equal_one_prefill(
    chunks, padded, model_pair, some_masks, slow_logits, fed_logits, assert_close
):
    pair = model_pair(some_masks(WIDTHS["mixed widths"]), prune="deferred")
    cache = pair.leank.build_cache()
    cache.prefill_length = 27
    rows = [row(47, 0), row(30, 1)] if padded else [row(47)]
    skipped = 17  # the second row's prompt is the last ten columns
    turns = []
    for start, stop in zip([0, *accumulate(chunks)], accumulate(chunks), strict=False):
        turns.append([stop - start, max(stop - max(start, skipped), 0)][: len(rows)])
    turns += [[1] * len(rows)] * 20
    ours, _ = fed_logits(pair.leank, rows, turns, cache=cache)
    for logits, ids, prompt in zip(ours, rows, [27, 10], strict=False):
        assert_close(pair.leank, logits, slow_logits(pair, ids, [prompt] + [1] * 20))


def test_deferred_input_after_decoding_is_appended_token_by_token(
    model_pair, some_masks, slow_logits, fed_logits, assert_close
):
    pair = model_pair(some_masks(WIDTHS["mixed widths"]), prune="deferred")
    turns = [12, 15, 1, 1, 9, 1]
    ids = row(sum(turns))
    (ours,), cache = fed_logits(pair.leank, [ids], [[n] for n in turns])
    assert_close(pair.leank, ours, slow_logits(pair, ids, [27, 1, 1, 9, 1]))
    assert not cache.rows.is_pending


def test_tokens_beyond_the_prompt_in_the_first_pass_are_decoded(
    model_pair, some_masks, slow_logits, fed_logits, assert_close
):
    for prune in ("eager", "deferred"):
        pair = model_pair(some_masks(WIDTHS["mixed widths"]), prune=prune)
        cache = pair.leank.build_cache()
        cache.prefill_length = 21
        ids = row(40)
        (ours,), _ = fed_logits(pair.leank, [ids], [[26], [1], [1], [12]], cache=cache)
        assert_close(pair.leank, ours, slow_logits(pair, ids, [21, 5, 1, 1, 12]))


@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_family_follows_the_rule(architecture, model_pair, some_masks, follows_the_rule):
    options = OPTIONS.get(architecture.model_type, {})
    pair = model_pair(some_masks(WIDTHS["mixed widths"]), architecture.stem, 3, **options)
    follows_the_rule([[29, *[1] * 12, 9]], pair=pair)


def test_every_query_head_may_have_a_key_head_of_its_own(follows_the_rule):
    follows_the_rule([[29, *[1] * 12, 9]], groups=1)


def test_the_restatement_notices_pruned_channels(model_pair, some_masks, slow_logits, assert_close):
    pair = model_pair(some_masks(WIDTHS["mixed widths"]))
    ids = row(61)
    turns = [31] + [1] * 30
    pruned = slow_logits(pair, ids, turns)
    dense = slow_logits(pair, ids, turns, masks=torch.ones_like(pair.masks))
    assert_close(pair.leank, pruned[:31], dense[:31])
    assert (pruned[31:] - dense[31:]).abs().max() > 0.1 * dense.abs().max()
