"""What an export takes: arguments before overrides, then the mask's training, then a recipe."""

import logging

import pytest

from leank_convert.export.request import ExportRequest
from leank_convert.export.request import choose as choose_for
from leank_convert.mask import ChannelMask, save_mask
from leank_convert.recipe import Recipe
from tests.checks import fitting_mask, provenance_of, refusal

RECIPE = "windows: {sink_size: 5, recent_size: 7}\nmodel: {config_overrides: {max_position_embeddings: 99}}\n"


def choose(model, mask, out, **options):
    return choose_for(ExportRequest(model, mask, out, **options))


@pytest.fixture
def trained(source):
    """A mask that was trained with windows of 1, 2 and 3 tokens."""
    known = provenance_of(source, sink_size=1, recent_size=2, flush_size=3)
    return ChannelMask(fitting_mask(source).channel_mask, None, known)


@pytest.fixture
def recipe(tmp_path):
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return tmp_path / "recipe.yaml"


@pytest.mark.parametrize(
    ("is_trained", "options", "expected"),
    [
        (True, {}, (1, 2, 3)),
        (False, {}, (5, 7, 32)),
        (True, {"overrides": ["windows.sink_size=6"]}, (6, 2, 3)),
        (True, {"overrides": ["windows.sink_size=6"], "sink_size": 8}, (8, 2, 3)),
        (False, {"recipe": Recipe(windows={"flush_size": 9})}, (128, 1024, 9)),
    ],
)
def test_sizes_are_arguments_then_overrides_then_trainings_then_the_recipes(
    is_trained, options, expected, source, trained, recipe, tmp_path
):
    mask = trained if is_trained else ChannelMask(trained.channel_mask)
    windows = choose(source, mask, tmp_path / "out", **{"recipe": recipe, **options}).windows
    assert (windows.sink_size, windows.recent_size, windows.flush_size) == expected


def test_the_mask_is_the_given_one_the_trained_one_or_the_recipes(source, trained, recipe, tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="leank_convert")
    out, files = tmp_path / "out", [tmp_path / f"{name}.safetensors" for name in ("given", "recipes")]
    for number, path in enumerate(files):
        save_mask(ChannelMask(trained.channel_mask.roll(number, -1)), path)
    overrides = [f"mask={files[1]}"]
    assert choose(source, None, out, recipe=recipe, overrides=overrides).mask_origin == str(files[1])
    out.mkdir()
    save_mask(trained, out / "channel_mask.safetensors")
    kept = choose(source, None, out, recipe=recipe, overrides=overrides)
    assert kept.mask_origin == str(out / "channel_mask.safetensors")
    assert caplog.messages[-1] == f"mask `{kept.mask_origin}`, which prunes {trained.pruning_ratio:.1%}"
    caplog.clear()
    given = choose(source, files[0], out, recipe=recipe, overrides=overrides)
    assert not caplog.messages  # it was named
    assert given.mask.channel_mask.equal(trained.channel_mask)
    assert choose(source, None, out, all_channels=True).mask.pruning_ratio == 0
    with refusal("`mask` and `all_channels` exclude each other"):
        choose(source, trained, out, all_channels=True)
    with refusal("no mask for"):
        choose(source, None, tmp_path / "elsewhere", recipe=recipe)


def test_a_runs_own_recipe_changes_the_config_unless_told_otherwise(source, trained, out):
    (out / "leank").mkdir(parents=True)
    (out / "leank" / "recipe.yaml").write_text(RECIPE)
    assert choose(source, trained, out).config_overrides == {"max_position_embeddings": 99}
    assert choose(source, trained, out, config_overrides={}).config_overrides == {}
