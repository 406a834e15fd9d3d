"""Runs of several contexts, devices and ratios, and of more than memory holds."""

import gc
import weakref
from dataclasses import replace

import accelerate
import pytest
import torch
import yaml

from leank_convert.data import SampleSource
from leank_convert.mask import load_mask
from leank_convert.methods.make import train_masks
from leank_convert.recipe import Recipe
from leank_convert.train import loop, passes, run
from leank_convert.train.model import load_model
from leank_convert.train.state import TrainingDirectory, load_state
from tests.checks import refusal, short_recipe
from tests.leank_convert.train.conftest import fail_at, logged_steps

SHORT_DATA = {"wording": "testbed", "min_length": 240, "max_length": 300}


def test_memory_that_does_not_suffice_is_told_with_the_sample_and_what_to_change(train_one, tmp_path):
    recipe = short_recipe(data={**SHORT_DATA, "questions_per_context": 2})
    failure = fail_at(passes, "follow_context", 9, torch.OutOfMemoryError("CUDA out of memory.\nmore"))
    told = r"memory does not suffice for step 5, task `ret.*\d{3} tokens of context, 2 questions: CUDA out of"
    remedies = "data.max_length", "data.questions_per_context", "offload_context=true"
    with refusal(told, *remedies, exit_code=1), failure:
        train_one(recipe, tmp_path / "a")
    train_one(recipe, tmp_path / "a", resume=True)
    train_one(recipe, tmp_path / "b")
    one, other = (load_state(TrainingDirectory(tmp_path / name).state) for name in "ab")
    assert torch.equal(one.scaling_factors, other.scaling_factors)


def test_a_step_of_several_contexts_averages_their_gradients(train_one, tmp_path):
    """After one step, Adam's `exp_avg` is a tenth of the gradient."""
    one_step = {"steps": 1, "learning_rate": 0.1, "l1_weight": 0.0}

    def gradient(seed_of_sample, batch_size):
        out = tmp_path / f"{seed_of_sample}-{batch_size}"
        # The mean of keys would be another one for every first sample.
        options = {"stage1": one_step, "stage2": {"steps": 0}, "key_mean": False}
        recipe = short_recipe(batch_size=batch_size, **options)
        with pytest.MonkeyPatch.context() as patched:
            draw = SampleSource.draw
            patched.setattr(SampleSource, "draw", lambda self, index: draw(self, index + seed_of_sample))
            # Factors below one, so that the student differs from the teacher.
            patched.setattr(run, "ones", lambda *_: torch.full((2, 2, 16), 0.5, requires_grad=True))
            train_one(recipe, out)
        return load_state(TrainingDirectory(out).state).optimizer["exp_avg"]

    torch.testing.assert_close(gradient(0, 3), sum(gradient(index, 1) for index in range(3)) / 3)


def test_a_context_is_gone_before_the_next_one_is_run(train_one, tmp_path, monkeypatch):
    """At once: nothing waits for the garbage collector."""
    original, contexts = passes.run_context_pass, []

    def watching(*given, **options):
        assert not [context for context in contexts if context() is not None]
        context = original(*given, **options)
        contexts.append(weakref.ref(context))
        return context

    monkeypatch.setattr(passes, "run_context_pass", watching)
    gc.disable()
    try:
        train_one(short_recipe(batch_size=2), tmp_path)
    finally:
        gc.enable()
    assert len(contexts) == 26


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_layers_on_two_devices_train_the_same_mask(train_one, tmp_path, monkeypatch):
    recipe = short_recipe(batch_size=2)

    def load_spread(files, _, device):
        loaded = load_model(files, recipe, device)
        places = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.layers.0": 0}
        places |= {"model.layers.1": 1, "model.norm": 1, "lm_head": 1}
        return replace(loaded, model=accelerate.dispatch_model(loaded.model, device_map=places))

    spread = short_recipe(batch_size=2, model={"device_map": "auto"})  # which captures no graphs
    for name, given in (("a", recipe), ("b", spread)):
        train_one(given, tmp_path / name, device="cuda")
        monkeypatch.setattr(loop, "load_model", load_spread)
    one, other = (load_state(TrainingDirectory(tmp_path / name).state) for name in "ab")
    torch.testing.assert_close(one.scaling_factors, other.scaling_factors, rtol=1e-3, atol=1e-4)


def test_where_a_run_keeps_things_changes_no_bit_of_its_mask(train_one, finished_mask, tmp_path):
    mask = train_one(short_recipe(offload_context=True, model={"device_map": "auto"}), tmp_path, device="cpu")
    for name in ("channel_mask", "scaling_factors", "key_mean"):
        assert torch.equal(getattr(mask, name), getattr(finished_mask, name))


def test_several_ratios_share_stage_one_and_are_what_each_would_be_alone(
    train_one, retriever_folder, tmp_path
):
    ratios = [0.5, 0.75]
    recipe = short_recipe(pruning_ratio=ratios)
    masks = train_masks(retriever_folder, tmp_path / "all", recipe=recipe, progress=False)
    assert list(masks) == [tmp_path / "all" / "ratio-0.5", tmp_path / "all" / "ratio-0.75"]
    rows = logged_steps(tmp_path / "all")
    assert [row["pruning_ratio_asked"] for row in rows] == [None] * 7 + [0.5] * 6 + [0.75] * 6
    for ratio, (folder, mask) in zip(ratios, masks.items(), strict=True):
        alone = train_one(short_recipe(pruning_ratio=ratio), tmp_path / f"{ratio}")
        assert torch.equal(mask.scaling_factors, alone.scaling_factors)
        assert torch.equal(mask.channel_mask, alone.channel_mask)
        assert mask.provenance.pruning_ratio_asked == ratio
        assert torch.equal(load_mask(folder / "channel_mask.safetensors").channel_mask, mask.channel_mask)
        written = yaml.safe_load((folder / "leank" / "recipe.yaml").read_text())
        assert Recipe(**written).pruning_ratios == (0.5, 0.75)
    assert not (tmp_path / "all" / "channel_mask.safetensors").exists()


def test_questions_per_context_are_counted_in_the_log(train_one, tmp_path, testbed_tokenizer):
    recipe = short_recipe(data={**SHORT_DATA, "questions_per_context": 3}, batch_size=2)
    train_one(recipe, tmp_path)
    samples = SampleSource(testbed_tokenizer, recipe.data, recipe.seed)
    for number, row in enumerate(logged_steps(tmp_path)):
        drawn = [samples.draw(2 * number + place) for place in range(2)]
        assert row["task"] == "retrieval+multi_value"
        assert row["num_tokens"] == sum(sample.num_tokens for sample in drawn)
        assert row["num_answer_tokens"] == sum(sample.num_answer_tokens for sample in drawn)
