"""Masks without training, and with stage 1 alone: what is chosen, what is left behind, what is refused."""

import pytest
import torch
import yaml

from leank_convert.export import export_checkpoint
from leank_convert.mask import load_mask
from leank_convert.methods import METHODS, Method, calibration
from leank_convert.methods.make import train_masks
from leank_convert.methods.statistics import measure_attention
from leank_convert.recipe import Recipe
from leank_convert.report import mask_report
from leank_convert.train import loop
from leank_convert.train.selection import select_channels
from leank_convert.train.state import TrainingDirectory
from tests.checks import failed, refusal, short_recipe


@pytest.fixture
def make_one(retriever_folder, tmp_path, without_report):
    """Makes the masks of a method: `make_one("random", seed=3)` gives the only one."""

    def run(method, out="out", **changes):
        recipe = short_recipe(method=method, calibration_prompts=3, **changes)
        masks = train_masks(retriever_folder, tmp_path / out, recipe=recipe, progress=False)
        return masks if len(masks) > 1 else masks[tmp_path / out]

    return run


@pytest.fixture
def measure(load):
    """Statistics of the recipe's first three prompts, of keys less a mean: `measure(key_mean)`."""
    loaded, samples = load()
    prompts = [samples.draw(place).prompt_ids() for place in range(3)]
    return lambda key_mean: [measure_attention(loaded.model, prompt, key_mean) for prompt in prompts]


def keep_best(scores, width):
    """Every head's best channels."""
    return torch.zeros(scores.shape, dtype=torch.bool).scatter(-1, scores.topk(width).indices, True)


@pytest.mark.parametrize(
    ("method", "statistic"), [("static-norm", "channel_norms"), ("double-sparsity", "product_magnitudes")]
)
@pytest.mark.parametrize("is_centred", [False, True])
def test_measuring_methods_keep_the_best_channels_of_the_mean_over_prompts(
    make_one, measure, method, statistic, is_centred
):
    uniform = make_one(method, pruning_ratio=0.5, key_mean=is_centred)
    assert (uniform.key_mean is not None) == is_centred
    scores = sum(getattr(one, statistic) for one in measure(uniform.key_mean)) / 3
    assert torch.equal(uniform.channel_mask, keep_best(scores, 8))
    over_all = select_channels(scores, pruning_ratio=0.5, width_multiple=4)
    found = make_one(method, "global", pruning_ratio=0.5, budget="global", key_mean=is_centred)
    assert torch.equal(found.channel_mask, over_all)
    # Of these keys, centred, the whole model's best happen to be every head's.
    assert torch.equal(over_all, keep_best(scores, 8)) == is_centred


@pytest.mark.parametrize(("ratio", "num_whole"), [(0.25, 3), (0.7, 1)])
def test_high_frequency_ratio_empties_the_heads_of_the_highest_ratio_by_one_prompt(
    make_one, measure, ratio, num_whole
):
    mask = make_one("high-frequency-ratio", pruning_ratio=ratio)
    lowest = measure(mask.key_mean)[0].high_frequency_ratio.flatten().argsort()[:num_whole].tolist()
    widths = [width for layer in mask.widths for width in layer]
    assert widths == [16 if head in lowest else 0 for head in range(4)]
    assert mask.provenance.width_multiple == 16


def test_random_depends_on_the_seed_and_loads_no_model_where_nothing_is_measured(make_one, monkeypatch):
    monkeypatch.setattr(calibration, "load_model", lambda *_: pytest.fail("the model was loaded"))
    first, same, other = (
        make_one("random", str(place), seed=seed, held_out_samples=0, key_mean=False)
        for place, seed in enumerate([3, 3, 4])
    )
    assert torch.equal(first.channel_mask, same.channel_mask)
    assert not torch.equal(first.channel_mask, other.channel_mask)
    assert first.widths == other.widths == ((4, 4), (4, 4))


@pytest.mark.parametrize("budget", ["uniform", "global"])
def test_magnitude_alpha_is_leank_without_stage_2(make_one, tmp_path, budget):
    expected = make_one("leank", "leank", stage2={"steps": 0}, budget=budget)
    found = make_one("magnitude-alpha", budget=budget)
    assert torch.equal(found.channel_mask, expected.channel_mask)
    assert torch.equal(found.scaling_factors, expected.scaling_factors)
    assert (found.provenance.method, expected.provenance.method) == ("magnitude-alpha", "leank")
    assert TrainingDirectory(tmp_path / "out").state.exists()
    assert (len({width for layer in found.widths for width in layer}) == 1) == (budget == "uniform")


@pytest.mark.parametrize("method", ["random", "high-frequency-ratio"])
def test_mask_recipe_and_report_are_left_and_a_checkpoint_of_them_verifies(
    make_one, retriever_folder, tmp_path, method, monkeypatch
):
    monkeypatch.setattr(loop, "write_report", mask_report.write_report)
    out = tmp_path / "out"
    mask = make_one(method, seed=2)
    assert sorted(path.name for path in out.iterdir()) == ["channel_mask.safetensors", "leank"]
    assert sorted(path.name for path in (out / "leank").iterdir()) == ["recipe.yaml", "report.html"]
    saved = load_mask(out / "channel_mask.safetensors")
    assert torch.equal(saved.channel_mask, mask.channel_mask)
    assert (saved.provenance.method, saved.provenance.seed) == (method, 2)
    assert saved.provenance.pruning_ratio_asked == 0.7
    assert Recipe(**yaml.safe_load((out / "leank" / "recipe.yaml").read_text())).method == method
    assert f"<dt>made by</dt><dd>{method}</dd>" in (out / "leank" / "report.html").read_text()
    export_checkpoint(str(retriever_folder), mask, out)
    assert failed(out, retriever_folder) == {}
    assert (out / "leank" / "recipe.yaml").exists()


def test_what_cannot_be_is_refused_before_the_model_is_loaded(make_one, tmp_path, monkeypatch):
    monkeypatch.setattr(calibration, "load_model", lambda *_: pytest.fail("the model was loaded"))
    with refusal(r"`mask` is 'a.pth': nothing is to be trained"):
        make_one("static-norm", mask="a.pth")
    with refusal(r"`width_multiple` 32 exceeds the model's `head_dim` 16"):
        make_one("static-norm", width_multiple=32)
    with refusal("`width_multiple` 8 rounds to none", "`budget: global`"):
        make_one("static-norm", width_multiple=8, pruning_ratio=0.9)
    assert not (tmp_path / "out").exists()


def test_masks_that_are_there_are_not_replaced(make_one):
    make_one("random")
    with refusal("already holds a training run", "choose another folder"):
        make_one("random")
    make_one("random", "several", pruning_ratio=(0.25, 0.5))
    with refusal(r"ratio-0.25.*exists"):
        make_one("random", "several", pruning_ratio=(0.25, 0.5))


def toy_score(calibration):
    """The first channels are the best."""
    return torch.arange(16, 0, -1.0).expand(calibration.shape)


def test_a_method_is_a_function_and_a_row(make_one, monkeypatch):
    row = Method("toy", "keeps the first channels", score=f"{__name__}:toy_score", budget="uniform")
    monkeypatch.setitem(METHODS, row.name, row)
    mask = make_one("toy", pruning_ratio=0.5)
    assert torch.equal(mask.channel_mask, (torch.arange(16) < 8).expand(2, 2, 16))
    assert mask.provenance.method == "toy"


def test_scores_of_another_shape_are_refused(make_one, monkeypatch):
    monkeypatch.setitem(METHODS, "flat", Method("flat", "forgets the heads", score=f"{__name__}:toy_score"))
    monkeypatch.setattr(f"{__name__}.toy_score", lambda calibration: torch.ones(2, 16))
    with refusal(r"`method: flat` gives scores of shape \[2, 16\].*\[2, 2, 16\]"):
        make_one("flat")
