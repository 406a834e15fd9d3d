"""The choice among the masks that stage 2 goes through."""

import math

import pytest
import torch

from leank_convert.errors import LeanKError
from leank_convert.methods.make import train_masks
from leank_convert.train import graphs
from leank_convert.train.log import read_log
from leank_convert.train.packing import pack_sample
from leank_convert.train.passes import distil
from leank_convert.train.run import Run
from leank_convert.train.split_attention import Student
from leank_convert.train.state import TrainingDirectory, load_state
from leank_convert.windows import Windows
from tests.checks import short_recipe
from tests.leank_convert.train.conftest import fail_at

CONTEXTS = 3
# So fast that masks get worse as well as better.
RECIPE = short_recipe(
    stage2={"steps": 12, "learning_rate": 0.5, "validation_contexts": CONTEXTS},
    pruning_ratio=(0.5, 0.7),
    held_out_samples=0,
)


def train(folder, out, **options):
    found = train_masks(folder, out, recipe=RECIPE, progress=False, **options)
    return dict(zip(RECIPE.pruning_ratios, found.values(), strict=True))


def test_the_mask_of_the_least_loss_is_taken(retriever_folder, load, tmp_path):
    masks = train(retriever_folder, tmp_path)
    loaded, source = load(seed=RECIPE.seed + 500_000)
    log = read_log(tmp_path / "leank" / "log.jsonl")
    differed = False
    for ratio, mask in masks.items():
        compared = [record.validation for record in log if record.pruning_ratio_asked == ratio]
        assert len(compared) == RECIPE.stage2.steps
        compared = [loss for loss in compared if loss is not None]
        assert len(compared) == 10
        kept = mask.channel_mask
        student = Student(Windows(4, 16), kept.float(), kept.any(-1))
        with torch.no_grad():
            packed = [pack_sample(source.draw(i)) for i in range(CONTEXTS)]
            losses = [distil(loaded.model, one, student, key_mean=mask.key_mean.float()) for one in packed]
        loss = torch.stack(losses).mean().item()
        # Stage 1's own mask is compared before the first step, and not logged.
        assert loss <= min(compared) * (1 + 1e-5)
        differed |= loss < compared[-1] * (1 - 1e-3)
    assert differed, "the last mask was the best one: the test shows nothing"


# The 65th loss lies in the second half of the first stage 2, validation contexts included.
@pytest.mark.parametrize(
    ("owner", "name", "place", "error"),
    [
        (graphs, "distil", 65, torch.OutOfMemoryError("CUDA out of memory.")),
        (Run, "_validate", 12, LeanKError("memory does not suffice for it")),
    ],
    ids=["a step", "the next ratio's comparison"],
)
def test_an_interrupted_run_takes_the_same_masks(owner, name, place, error, retriever_folder, tmp_path):
    whole = train(retriever_folder, tmp_path / "whole")
    failure = fail_at(owner, name, place, error)
    with failure, pytest.raises(LeanKError, match="memory does not suffice for"):
        train(retriever_folder, tmp_path / "interrupted")
    resumed = train(retriever_folder, tmp_path / "interrupted", resume=True)
    for ratio, mask in whole.items():
        assert torch.equal(resumed[ratio].scaling_factors, mask.scaling_factors)


def test_a_loss_that_is_no_number_is_worse_than_any(retriever_folder, tmp_path, monkeypatch):
    losses = iter([1.0] + [math.nan] * 10 + [math.nan, 1.0] + [math.nan] * 9)
    monkeypatch.setattr(Run, "_validate", lambda *_: next(losses))
    masks = train(retriever_folder, tmp_path)
    state = load_state(TrainingDirectory(tmp_path).state)
    assert torch.equal(masks[0.5].scaling_factors, state.stage1_factors)
    assert not torch.equal(masks[0.7].scaling_factors, state.stage1_factors)
    assert not torch.equal(masks[0.7].scaling_factors, state.scaling_factors)
