"""Layers that are not pruned, in a cache that is used in other ways than by one prompt and its answer."""

import pytest
import torch

from leank_convert._runtime.configuration_leank import CACHE
from runtime.tools import concatenate
from tests.runtime.tiny_inputs import WIDTHS, feed, feed_both, ids, padded
from tests.tiny_families import FAMILIES, OPTIONS

WINDOW = 7
LENGTHS = [20, 4]
KINDS = ["sliding_attention", "full_attention"] * 2
SLIDING = {"layer_types": KINDS, "sliding_window": WINDOW, "use_sliding_window": True}


@pytest.fixture
def model(model_pair):
    return model_pair(WIDTHS, "Qwen3", **SLIDING).leank


def prefilled(model, length, seed=0):
    return feed(model, ids(1, length, seed), model.build_cache())[CACHE]


def test_rows_of_other_lengths_need_no_mask_to_be_seen_as_they_are_alone(model):
    tokens, positions = ids(1, 3, 9), torch.tensor(LENGTHS)[:, None]
    caches = [[prefilled(model, length, row) for row, length in enumerate(LENGTHS)] for _ in range(2)]
    alone, joined = [feed(model, tokens, cache).logits for cache in caches[0]], concatenate(caches[1])
    steps = [
        feed(model, tokens[:, [i]].expand(2, 1), joined, position_ids=positions + i).logits for i in range(3)
    ]
    torch.testing.assert_close(torch.cat(steps, 1), torch.cat(alone))


@pytest.mark.parametrize("length", [WINDOW - 2, WINDOW + 5])
@pytest.mark.parametrize(
    "drop", [lambda cache: cache.reset(), lambda cache: cache.crop(-cache.get_seq_length())]
)
def test_a_cache_that_was_emptied_is_as_new(length, drop, model):
    # transformers' layers keep zeros in the place of what they drop: in older releases, and where they hold a
    # state, of as many rows as it had.
    cache = model.build_cache("deferred")
    feed(model, ids(1, length).expand(2, -1), cache)
    drop(cache)
    expected = feed(model, ids(1, 12, 1), model.build_cache("deferred")).logits
    assert torch.equal(feed(model, ids(1, 12, 1), cache).logits, expected)
    assert cache.memory().other_keys.used == 2 * 3 * (WINDOW - 1) * 16 * 4


def test_drafts_that_are_all_taken_leave_no_past_that_a_crop_might_want(model):
    cache = prefilled(model, 24)
    if not hasattr(cache, "activate_past_recording"):
        pytest.skip("this transformers drops what windows passed over, and crops by keeping copies")
    cache.activate_past_recording()
    for turn in range(3):
        feed(model, ids(1, 4, turn), cache)
        cache.crop(0)
    assert [layer.keys.shape[2] for layer in cache.other_layers.values()] == [WINDOW - 1] * 2


def test_it_drafts_for_a_model_of_its_kind_and_windows_record_for_a_draft_alone(model, model_pair):
    main = model_pair(WIDTHS, "Qwen3", seed=5, **SLIDING).leank  # which takes few drafts
    prompt, options = ids(1, 24), {"do_sample": False, "max_new_tokens": 8, "pad_token_id": 0}
    expected, cache = main.generate(prompt, **options), main.build_cache()
    assert torch.equal(main.generate(prompt, assistant_model=model, cache=cache, **options), expected)
    assert not any(getattr(layer, "record_past", False) for layer in cache.other_layers.values())


def test_a_state_that_was_emptied_takes_another_number_of_rows(model_pair):
    options = {**OPTIONS["qwen3_next"], "layer_types": ["linear_attention", "full_attention"]}
    model = model_pair([[0, 3, 16]], "Qwen3Next", **options).leank
    cache, tokens = prefilled(model, 12), ids(1, 12, 1).expand(2, -1)
    cache.reset()
    assert torch.equal(feed(model, tokens, cache).logits, feed(model, tokens).logits)


@pytest.mark.parametrize("padding", [None, 12])
@pytest.mark.parametrize("architecture", [row for row in FAMILIES if row.values[0].other_layers])
def test_steps_are_captured_once_windows_are_full(architecture, padding, graphs, model_pair):
    options = dict(OPTIONS.get(architecture.model_type, SLIDING))
    model = model_pair(WIDTHS, architecture.stem, **options).leank
    if architecture.experts:
        model.config._experts_implementation = "grouped_mm"  # others ask the device for lengths
    turns, mask = [4, *[1] * 20, 3, *[1] * 5], None
    if padding is not None:
        turns[0], mask = 14, padded(sum(turns) + 10, padding)
    cache, _ = feed_both(model, turns, mask)
    assert cache.graph.num_captures == 1 and cache.graph.why_eager is None
    slides = "sliding_attention" in model.config.layer_types
    assert cache.graph.num_replays == (22 if slides and padding is None else 24)


def test_beams_move_rows_within_a_captured_step(graphs, model):
    settings = {"do_sample": False, "num_beams": 3, "min_new_tokens": 16, "max_new_tokens": 16}
    settings |= {"pad_token_id": 0, "attention_mask": torch.ones(1, 20)}
    caches = model.build_cache(), model.build_cache(use_graphs=False)
    ours, eager = (model.generate(ids(1, 20), cache=cache, **settings) for cache in caches)
    assert torch.equal(ours, eager)
    assert caches[0].graph.num_captures == 1 and caches[0].graph.num_replays >= 12


def test_why_a_step_is_not_captured(graphs, model):
    cache = prefilled(model, WINDOW - 3)
    reasons = []
    for count in (1, 1, 1, 2):
        feed(model, ids(1, count), cache)
        reasons.append(cache.graph.why_eager)
    model(ids(1, 1), cache=cache)
    assert [*reasons, cache.graph.why_eager] == [
        *["a window of 7 tokens, in layers that are not pruned, is not full"] * 2,
        "the first step of its kind",
        "several columns beside layers that are not pruned",
        "gradients are enabled",
    ]


def test_a_step_lets_go_of_the_prompt(model):
    cache = prefilled(model, 20)
    feed(model, ids(1, 1), cache)
    for layer in cache.other_layers.values():
        assert layer.keys.untyped_storage().nbytes() == layer.keys.nbytes
