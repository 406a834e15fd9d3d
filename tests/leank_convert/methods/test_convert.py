"""Masks without training, and with stage 1 alone: what is chosen, what is left behind, what is refused."""

import pytest
import torch
import yaml

from leank_convert.data import SampleSource
from leank_convert.errors import LeanKError
from leank_convert.export import export_checkpoint
from leank_convert.mask import load_mask
from leank_convert.methods import convert, make_masks
from leank_convert.methods.statistics import measure_attention
from leank_convert.recipe import Recipe
from leank_convert.train import TrainingDirectory, train_masks
from leank_convert.train.dry_run import plan_training
from leank_convert.train.ranks import Ranks
from leank_convert.train.selection import select_channels
from leank_convert.train.subject import load_subject
from leank_convert.verify import verify_checkpoint

UNTRAINED = ["static-norm", "double-sparsity", "random", "high-frequency-ratio"]


@pytest.fixture
def make(short_recipe, retriever_folder, tmp_path):
    """Makes the masks of a method: `make("random", seed=3)` gives the only one."""

    def run(method, out="out", **changes):
        recipe = short_recipe(method=method, calibration_prompts=3, **changes)
        masks = make_masks(recipe, tmp_path / out, progress=False, model_override=str(retriever_folder))
        return masks if len(masks) > 1 else masks[tmp_path / out]

    return run


@pytest.fixture
def measured(short_recipe, retriever_folder):
    """Statistics of the recipe's first three prompts."""
    recipe = short_recipe()
    subject = load_subject(recipe, torch.device("cpu"), str(retriever_folder))
    samples = SampleSource(subject.tokenizer, recipe.data, recipe.seed)
    return [measure_attention(subject.model, samples.draw(place).prompt_ids()) for place in range(3)]


def keep_best(scores, width):
    """Every head's best channels, one head at a time."""
    mask = torch.zeros(scores.shape, dtype=torch.bool)
    for layer in range(scores.shape[0]):
        for head in range(scores.shape[1]):
            mask[layer, head, scores[layer, head].topk(width).indices] = True
    return mask


@pytest.mark.parametrize(
    ("method", "statistic"), [("static-norm", "channel_norms"), ("double-sparsity", "product_magnitudes")]
)
def test_measuring_methods_keep_the_best_channels_of_the_mean_over_prompts(make, measured, method, statistic):
    scores = sum(getattr(one, statistic) for one in measured) / 3
    assert torch.equal(make(method, pruning_ratio=0.5).channel_mask, keep_best(scores, 8))
    over_all = select_channels(scores, pruning_ratio=0.5, width_multiple=4)
    assert torch.equal(make(method, "global", pruning_ratio=0.5, budget="global").channel_mask, over_all)
    assert not torch.equal(over_all, keep_best(scores, 8))


@pytest.mark.parametrize(("ratio", "num_whole"), [(0.25, 3), (0.5, 2), (0.7, 1)])
def test_high_frequency_ratio_empties_the_heads_of_the_highest_ratio_by_one_prompt(
    make, measured, ratio, num_whole
):
    mask = make("high-frequency-ratio", pruning_ratio=ratio)
    lowest = measured[0].high_frequency_ratio.flatten().argsort()[:num_whole].tolist()
    widths = [width for layer in mask.widths for width in layer]
    assert widths == [16 if head in lowest else 0 for head in range(4)]
    assert mask.provenance.width_multiple == 16


def test_random_depends_on_the_seed_and_loads_no_model(make, monkeypatch):
    monkeypatch.setattr(convert, "load_subject", lambda *_: pytest.fail("the model was loaded"))
    first, same, other = (make("random", str(place), seed=seed) for place, seed in enumerate([3, 3, 4]))
    assert torch.equal(first.channel_mask, same.channel_mask)
    assert not torch.equal(first.channel_mask, other.channel_mask)
    assert first.widths == other.widths == ((4, 4), (4, 4))


@pytest.mark.parametrize("budget", ["uniform", "global"])
def test_magnitude_alpha_is_leank_without_stage_2(make, short_recipe, retriever_folder, tmp_path, budget):
    stage1_only = short_recipe(stage2={"steps": 0}, budget=budget)
    out = tmp_path / "leank"
    model = str(retriever_folder)
    expected = train_masks(stage1_only, out, progress=False, model_override=model)[out]
    found = make("magnitude-alpha", budget=budget)
    assert torch.equal(found.channel_mask, expected.channel_mask)
    assert torch.equal(found.scaling_factors, expected.scaling_factors)
    assert (found.provenance.method, expected.provenance.method) == ("magnitude-alpha", "leank")
    assert TrainingDirectory(tmp_path / "out").state.exists()
    assert (len({width for layer in found.widths for width in layer}) == 1) == (budget == "uniform")


@pytest.mark.parametrize("method", UNTRAINED)
def test_mask_recipe_and_report_are_left_and_a_checkpoint_of_them_verifies(
    make, retriever_folder, tmp_path, method
):
    out = tmp_path / "out"
    mask = make(method, seed=2)
    assert sorted(path.name for path in out.iterdir()) == ["channel_mask.safetensors", "leank"]
    assert sorted(path.name for path in (out / "leank").iterdir()) == ["recipe.yaml", "report.html"]
    saved = load_mask(out / "channel_mask.safetensors")
    assert torch.equal(saved.channel_mask, mask.channel_mask)
    assert (saved.provenance.method, saved.provenance.seed) == (method, 2)
    assert saved.provenance.pruning_ratio_asked == 0.7
    assert Recipe(**yaml.safe_load((out / "leank" / "recipe.yaml").read_text())).method == method
    assert f"<dt>made by</dt><dd>{method}</dd>" in (out / "leank" / "report.html").read_text()
    export_checkpoint(str(retriever_folder), mask, out)
    report = verify_checkpoint(out, str(retriever_folder))
    assert report.ok, report.checks
    assert (out / "leank" / "recipe.yaml").exists()


@pytest.mark.parametrize("method", UNTRAINED)
def test_every_asked_ratio_gets_its_mask(make, tmp_path, method):
    masks = make(method, pruning_ratio=(0.25, 0.5))
    assert list(masks) == [tmp_path / "out" / "ratio-0.25", tmp_path / "out" / "ratio-0.5"]
    assert [mask.pruning_ratio for mask in masks.values()] == [0.25, 0.5]
    assert [mask.provenance.pruning_ratio_asked for mask in masks.values()] == [0.25, 0.5]
    for folder in masks:
        assert (folder / "leank" / "recipe.yaml").exists()
        assert (folder / "leank" / "report.html").exists()


def test_leank_itself_learns_under_a_uniform_budget_if_asked_to(make):
    mask = make("leank", budget="uniform")
    assert mask.widths == ((4, 4), (4, 4))
    assert mask.provenance.method == "leank"


def test_what_cannot_be_is_refused_before_the_model_is_loaded(make, tmp_path, monkeypatch):
    monkeypatch.setattr(convert, "load_subject", lambda *_: pytest.fail("the model was loaded"))
    with pytest.raises(LeanKError, match=r"has `mask: a.pth`: nothing is to be trained"):
        make("static-norm", mask="a.pth")
    with pytest.raises(LeanKError, match=r"`width_multiple` 32 exceeds the model's `head_dim` 16"):
        make("static-norm", width_multiple=32)
    with pytest.raises(LeanKError, match=r"`width_multiple` 8 rounds to none") as caught:
        make("static-norm", width_multiple=8, pruning_ratio=0.9)
    assert "`budget: global`" in caught.value.hint
    assert not (tmp_path / "out").exists()


def test_masks_that_are_there_are_not_replaced(make):
    make("random")
    with pytest.raises(LeanKError, match="already holds a training run") as caught:
        make("random")
    assert "choose another folder" in caught.value.hint
    make("random", "several", pruning_ratio=(0.25, 0.5))
    with pytest.raises(LeanKError, match=r"ratio-0.25.*exists"):
        make("random", "several", pruning_ratio=(0.25, 0.5))


@pytest.mark.parametrize("method", UNTRAINED)
def test_nothing_is_resumed_planned_or_shared_where_nothing_is_trained(
    short_recipe, retriever_folder, tmp_path, method
):
    recipe, model = short_recipe(method=method), str(retriever_folder)
    with pytest.raises(LeanKError, match=rf"`method: {method}` trains nothing") as caught:
        make_masks(recipe, tmp_path / "out", resume=True, progress=False, model_override=model)
    assert "leave `--resume` out" in caught.value.hint
    with pytest.raises(LeanKError, match=rf"`method: {method}` trains nothing") as caught:
        plan_training(recipe, model_override=model)
    assert "without `--dry-run`" in caught.value.hint
    with pytest.raises(LeanKError, match=rf"`method: {method}` trains nothing"):
        train_masks(recipe, tmp_path / "out", progress=False, model_override=model)
    ranks, directory = Ranks(torch.device("cpu"), 0, 2), TrainingDirectory(tmp_path / "out")
    with pytest.raises(LeanKError, match="nothing that 2 processes could share") as caught:
        convert._check(recipe, ranks, directory, False)
    assert "start one process" in caught.value.hint
    assert not (tmp_path / "out").exists()


def test_memory_that_does_not_suffice_is_told_with_a_remedy(make, tmp_path, monkeypatch):
    def exhaust(*_):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(convert, "measure_attention", exhaust)
    with pytest.raises(LeanKError, match=r"prompts of up to 280 tokens through model .*: CUDA out") as caught:
        make("static-norm")
    assert "`data.max_length`" in caught.value.hint
    assert not (tmp_path / "out").exists()
