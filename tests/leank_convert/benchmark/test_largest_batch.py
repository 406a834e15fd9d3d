"""The search for the largest batch, with a fake device; and what a trial allocates."""

import pytest
import torch

from leank_convert.benchmark.largest_batch import DenseSide, LeanKSide, Trial, find_largest
from leank_convert.benchmark.models import build_dense
from leank_convert.benchmark.subject import choose_subject, load_runtime

# What a tiny model's dense cache takes: K and V of 2 layers, 4 heads of 64 channels in fp32.
DENSE_ROW = 2 * 2 * 4 * 64 * 4


@pytest.mark.parametrize("guess", [1, 2, 5, 17, 18, 36, 500])
@pytest.mark.parametrize("largest", [0, 1, 2, 17, 18, 19, 100])
def test_the_search_ends_at_the_largest_that_fits(guess, largest):
    asked = []

    def fits(count):
        asked.append(count)
        return count <= largest

    found, tried = find_largest(fits, guess)
    assert found == largest
    assert tried == {count: count <= largest for count in asked}
    assert len(asked) == len(set(asked)), "nothing is tried twice"
    assert min(asked) >= 1
    # What is reported was tried: it fits, and one more does not.
    assert largest == 0 or tried[largest]
    assert not tried[largest + 1]


def test_a_right_guess_takes_two_trials():
    assert find_largest(lambda count: count <= 40, 40)[1] == {40: True, 41: False}


@pytest.fixture(scope="module")
def model_and_dense(tmp_path_factory):
    subject = choose_subject(None, None, "tiny")
    runtime = load_runtime(subject, tmp_path_factory.mktemp("runtime"), torch.float32)
    torch.manual_seed(0)
    model = runtime.build_model(subject.channel_masks, torch.device("cpu"), torch.float32)
    return model, build_dense(model, subject.geometry)


@pytest.mark.parametrize("side", [LeanKSide, DenseSide])
def test_rows_are_joined_and_decode_as_each_alone(side, model_and_dense):
    side = side(model_and_dense[0] if side is LeanKSide else model_and_dense[1])
    torch.manual_seed(1)
    prompts, token = torch.randint(3, 128, (3, 1, 50)), torch.full((3, 1), 7)
    with torch.no_grad():
        rows = [side.prefill(prompt, 60) for prompt in prompts]
        rows.append(side.copy_row(rows[0]))
        alone = [
            side.model(token[:1], past_key_values=side.copy_row(row), use_cache=True).logits for row in rows
        ]
        cache = side.join(rows, 60)
        together = side.model(torch.full((4, 1), 7), past_key_values=cache, use_cache=True).logits
    torch.testing.assert_close(together, torch.cat(alone))
    assert cache.get_seq_length() == 51


def test_a_trial_decodes_to_the_last_token_and_counts_what_is_held(model_and_dense):
    with torch.no_grad():
        trial = Trial(DenseSide(model_and_dense[1]), 40, 20, limit=None)
        assert trial.row_bytes == 60 * DENSE_ROW
        ours = Trial(LeanKSide(model_and_dense[0]), 40, 20, limit=None)
    # Room for 60 tokens is made in steps of 64.
    assert 60 * DENSE_ROW / 2 < ours.row_bytes < 64 * DENSE_ROW


def test_a_limit_is_kept_and_predicted(model_and_dense):
    model, dense = model_and_dense
    weights = sum(weight.numel() * 4 for weight in model.parameters())
    with torch.no_grad():
        trial = Trial(DenseSide(dense), 40, 20, limit=weights + 5 * 60 * DENSE_ROW + 1)
        assert trial.predict() == 5
        assert trial.fits(5)
        assert not trial.fits(6)


def test_out_of_memory_does_not_fit(model_and_dense, monkeypatch):
    with torch.no_grad():
        trial = Trial(LeanKSide(model_and_dense[0]), 40, 20, limit=None)

    def fail(batch_size):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(trial, "_decode", fail)
    assert not trial.fits(1)
