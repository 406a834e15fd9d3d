"""A text's predictions: what a pruned cache changes of them, token by token, and what could not show it."""

import math
import random

import pytest
import torch

from leank_convert._runtime.configuration_leank import CACHE
from leank_convert.evaluate.prefill import prefill_stock
from leank_convert.evaluate.text import (
    compare_rows,
    compare_text,
    draw_text_comparison,
    render_text_comparison,
)
from leank_convert.evaluate.variants import Masked, ThinK
from leank_convert.testbed.tasks import NUMBERS
from leank_convert.windows import Windows
from tests.checks import refusal

SHAPE = 2, 2, 16
NO_CHANNEL = Masked("no channels", torch.zeros(SHAPE, dtype=torch.bool))
NUM_TOKENS, PREFIX = 60, 24
TEXT = " ".join(random.Random(5).choices(NUMBERS, k=NUM_TOKENS))
FLOAT32 = 1e-5  # what sums of another order may differ by, in nats


def compare(evaluated, *variants, **options):
    return compare_text(evaluated, TEXT, variants, **{"prefix_tokens": PREFIX, **options})


def test_all_channels_change_nothing_and_none_diverge_at_every_token(evaluated):
    every = Masked("all channels", torch.ones(SHAPE, dtype=torch.bool))
    result = compare(evaluated, every, NO_CHANNEL)
    same, other = result.variants
    assert max(same.divergence) < FLOAT32
    assert all(same.agrees)
    assert same.nll == pytest.approx(result.dense_nll, abs=FLOAT32)
    assert min(other.divergence) > 100 * FLOAT32
    assert not all(other.agrees)


def test_numbers_that_are_not_finite_are_told_of(evaluated, monkeypatch):
    head, size = evaluated.dense.lm_head, evaluated.dense.config.vocab_size
    monkeypatch.setattr(head, "forward", lambda states: torch.full((*states.shape[:2], size), math.nan))
    with refusal("logits behind 25 tokens of the text are NaN", exit_code=1):
        compare(evaluated, NO_CHANNEL)
    with refusal("logits of the model are NaN", exit_code=1):
        prefill_stock(evaluated.dense, torch.ones(1, 9).long(), torch.ones(1, 9).long())
    monkeypatch.setattr(evaluated.model.lm_head, "forward", head.forward)
    with refusal("logits of the model are NaN", exit_code=1):
        compare(evaluated, NO_CHANNEL)


def test_tokens_that_may_not_follow_add_nothing_to_a_divergence(evaluated, monkeypatch):
    expected = compare(evaluated, NO_CHANNEL).variants[0].divergence
    never = torch.arange(evaluated.dense.config.vocab_size) < 2  # nothing of the text

    def without(forward):
        return lambda states: forward(states).masked_fill(never, -math.inf)

    for head in (evaluated.dense.lm_head, evaluated.model.lm_head):
        monkeypatch.setattr(head, "forward", without(head.forward))
    found = compare(evaluated, NO_CHANNEL).variants[0].divergence
    assert found == pytest.approx(expected, abs=0.1 * max(expected))


def test_figures_are_those_of_the_text_fed_by_hand(evaluated):
    result = compare(evaluated, Masked("pruned"))
    (found,) = result.variants
    ids = evaluated.tokenizer(TEXT, return_tensors="pt").input_ids[0]
    with torch.no_grad():
        # Of one pass over the whole text [tokens, vocabulary].
        dense = evaluated.dense(input_ids=ids[None]).logits[0].double().log_softmax(-1)
        cache = evaluated.model(input_ids=ids[None, :PREFIX])[CACHE]
        for place in range(PREFIX, NUM_TOKENS - 1):
            logits = evaluated.model(input_ids=ids[None, place : place + 1], cache=cache).logits
            pruned = logits[0, -1].double().log_softmax(-1)
            expected = sum(
                math.exp(p) * (p - q) for p, q in zip(dense[place].tolist(), pruned.tolist(), strict=True)
            )
            target, row = ids[place + 1], place - PREFIX
            assert found.divergence[row] == pytest.approx(expected, abs=FLOAT32)
            assert found.agrees[row] == bool(pruned.argmax() == dense[place].argmax())
            assert found.nll[row] == pytest.approx(-float(pruned[target]), abs=10 * FLOAT32)
            assert result.dense_nll[row] == pytest.approx(-float(dense[place, target]), abs=10 * FLOAT32)
    assert len(found.divergence) == NUM_TOKENS - 1 - PREFIX


def test_variants_do_not_disturb_one_another(evaluated):
    together = compare(evaluated, Masked("pruned"), ThinK(0.5), NO_CHANNEL)
    alone = compare(evaluated, Masked("pruned"))
    assert together.variants[0].divergence == pytest.approx(alone.variants[0].divergence, abs=FLOAT32)
    assert together.variants[1].divergence != together.variants[2].divergence


def test_means_are_over_the_tokens_they_name(evaluated):
    result = compare(evaluated, Masked("pruned"))
    (found,) = result.variants
    bins = result.by_position(found, 4)
    assert [(means.first, means.last) for means in bins] == [(24, 31), (32, 40), (41, 49), (50, 58)]
    assert bins[1].kl == pytest.approx(sum(found.divergence[8:17]) / 9)
    assert bins[1].nll == pytest.approx(sum(found.nll[8:17]) / 9)
    assert bins[1].greedy_agreement == sum(found.agrees[8:17]) / 9
    total = result.mean(found)
    assert total.n == sum(means.n for means in bins) == len(found.divergence)
    assert total.kl == pytest.approx(sum(m.kl * m.n for m in bins) / total.n)
    few = compare(evaluated, Masked("pruned"), num_tokens=3)
    stretches = few.by_position(few.variants[0])  # as many as there are tokens
    assert [(means.first, means.n) for means in stretches] == [(24, 1), (25, 1), (26, 1)]


def test_tokens_before_anything_is_pruned_are_counted_and_show_nothing(evaluated):
    (found,) = compare(evaluated, NO_CHANNEL, prefix_tokens=5).variants
    # The cache holds 2 + 6 + 2 tokens whole: the one at place 9 is the last that sees all of them.
    assert found.num_whole == 5
    assert max(found.divergence[:5]) < FLOAT32 < 100 * FLOAT32 < found.divergence[5]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"prefix_tokens": 4, "num_tokens": 6}, "`pruned` would prune nothing of 11 tokens of the text"),
        *(
            ({"prefix_tokens": count}, f"has {NUM_TOKENS} tokens and `prefix_tokens` is {count}:")
            for count in (0, NUM_TOKENS - 1)
        ),
    ],
)
def test_a_text_that_leaves_nothing_to_feed_or_to_prune_is_refused(evaluated, options, told):
    with refusal(told):
        compare(evaluated, Masked("pruned"), **options)
    wide = Masked("wide", windows=Windows(sink_size=0, recent_size=100, flush_size=1))
    with refusal("`wide` would prune nothing"):
        compare(evaluated, Masked("pruned"), wide)
    with refusal("the text has 0 tokens", "give a longer text"):
        compare_text(evaluated, "", [Masked("pruned")], prefix_tokens=1)


def test_texts_of_one_length_are_fed_together_as_each_by_itself(evaluated):
    generator = random.Random(6)
    texts = [" ".join(generator.choices(NUMBERS, k=NUM_TOKENS)) for _ in range(3)]
    ids = evaluated.tokenizer(texts, return_tensors="pt").input_ids
    variants = [Masked("pruned"), ThinK(0.5)]
    rows = compare_rows(evaluated, ids, variants, prefix_tokens=PREFIX)
    for row, text in zip(rows, texts, strict=True):
        alone = compare_text(evaluated, text, variants, prefix_tokens=PREFIX)
        assert row.dense_nll == pytest.approx(alone.dense_nll, abs=FLOAT32)
        for own, variant in zip(row.variants, alone.variants, strict=True):
            assert own.divergence == pytest.approx(variant.divergence, abs=FLOAT32)
            assert own.nll == pytest.approx(variant.nll, abs=FLOAT32)
            assert own.agrees == variant.agrees


def test_no_more_tokens_are_fed_than_asked_for_and_the_table_says_so(evaluated):
    result = compare(evaluated, Masked("pruned"), num_tokens=20)
    whole = compare(evaluated, Masked("pruned"))
    assert result.num_tokens == NUM_TOKENS
    assert result.variants[0].divergence == whole.variants[0].divergence[:20]
    text = render_text_comparison(result)
    assert "20 of 35 tokens measured: tokens 24 to 43 of the text's 60" in text
    assert "`--num-tokens` sets how many" in text and "--num-tokens" not in render_text_comparison(whole)
    assert len(draw_text_comparison(result).axes[0].collections[0].get_offsets()) == 20


def test_the_table_says_what_means_are_over(evaluated):
    text = render_text_comparison(compare(evaluated, Masked("pruned"), NO_CHANNEL, prefix_tokens=5))
    assert "54 of 54 tokens measured: tokens 5 to 58 of the text's 60" in text
    assert "the first 5 prefilled" in text
    assert "at the first 5 of them nothing was pruned yet" in text
    assert all(name in text for name in ("pruned", "no channels", "KL (nats)", "NLL"))
