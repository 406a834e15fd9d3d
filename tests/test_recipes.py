"""Every recipe that ships is valid, and says what it is for, how to run it and what to expect."""

from pathlib import Path

import pytest
import yaml

from leank_convert.recipe_file import list_recipes, load_recipe, packaged_recipe

FOLDER = Path(__file__).parent.parent / "recipes"
RECIPES = sorted(FOLDER.rglob("*.yaml"))
# Of the paper's models: tokens in K of the shortest and the longest sample.
LENGTHS = {
    "llama-3.1-8b-instruct": (16, 96),
    "qwen2.5-7b-instruct": (4, 32),
    "qwen2.5-7b-instruct-yarn": (64, 96),
}
PAPER = [path for path in RECIPES if path.stem in LENGTHS]
SHARED = "llama-3.1-8b-instruct-8-questions"
RUN = ("quickstart", "smollm2-135m-instruct", "qwen2.5-coder-1.5b-instruct")
DERIVED = [path for path in RECIPES if path.stem not in (*LENGTHS, SHARED, *RUN)]
# Positions in K and head_dim as in the models' config.json.
SHAPES = {
    "llama-3.1-70b-instruct": (128, 128),
    "llama-3.2-1b-instruct": (128, 64),
    "llama-3.2-3b-instruct": (128, 128),
    "mistral-7b-instruct-v0.3": (32, 128),
    "mistral-nemo-instruct-2407": (1000, 128),
    "qwen3-4b": (40, 128),
    "qwen3-8b": (40, 128),
    "qwen3-32b": (40, 128),
    "qwen3-30b-a3b": (40, 128),
    "phi-4": (16, 128),
    "smollm3-3b": (64, 128),
    "glm-4.5-air": (128, 128),
    "gpt-oss-20b": (128, 64),
    "qwen3-next-80b-a3b-instruct": (256, 256),
}


NOT_RUN = "this recipe has not been run on the real weights here"


def words_of(recipe):
    return " ".join(recipe.text.replace("#", "").split())


def by_name(paths):
    return pytest.mark.parametrize("path", paths, ids=lambda path: path.stem)


def test_all_recipes_are_packaged():
    assert sorted(path.stem for path in RECIPES) == [recipe.name for recipe in list_recipes()]


@by_name(RECIPES)
def test_recipe_is_valid(path):
    recipe = load_recipe(path)
    assert recipe == load_recipe(path.stem)
    assert recipe.text == path.read_text(encoding="utf-8")


@by_name(RECIPES)
def test_recipe_names_what_differs_from_the_defaults_and_nothing_else(path):
    changed = load_recipe(path).model_dump(mode="json", exclude_defaults=True)
    sections = {key: value for key, value in changed.items() if value != {}}
    sections["model"] = {key: value for key, value in sections["model"].items() if value != {}}
    assert yaml.safe_load(path.read_text(encoding="utf-8")) == sections


@by_name(RECIPES)
def test_recipe_opens_with_purpose_command_and_expectation(path):
    opening = path.read_text(encoding="utf-8").partition("\n\n")[0]
    assert all(line.startswith("#") for line in opening.splitlines())
    assert opening.splitlines()[0].endswith(".")  # `recipes --json` gives it as the summary
    model = load_recipe(path).model.id
    assert f"#   leank-convert train {model} --recipe {path.stem} -o out/" in opening
    assert "# Expect: " in opening


@by_name(PAPER)
def test_recipe_of_the_paper_has_the_papers_settings_and_says_whose_figures_it_tells(path):
    recipe = load_recipe(path)
    assert f"figures are the paper's own: {NOT_RUN}" in words_of(recipe)
    assert (recipe.windows.sink_size, recipe.windows.recent_size) == (128, 1024)
    assert (recipe.pruning_ratio, recipe.width_multiple, recipe.rounding) == (0.7, 32, "nearest")
    assert (recipe.stage1.steps, recipe.stage2.steps, recipe.stage1.l1_weight) == (2000, 200, 0.06)
    assert recipe.stage2.learning_rate == recipe.stage1.learning_rate / 2
    assert recipe.stage1.learning_rate == (0.02 if path.stem.startswith("llama") else 0.04)
    lengths = tuple(1024 * length for length in LENGTHS[path.stem])
    assert (recipe.data.min_length, recipe.data.max_length) == lengths


@by_name(DERIVED)
def test_a_derived_recipe_follows_the_rule_it_states_and_promises_nothing(path):
    recipe, (positions, head_dim) = load_recipe(path), SHAPES[path.stem]
    assert "derived from the paper's settings" in words_of(recipe) and NOT_RUN in words_of(recipe)
    like = load_recipe("qwen2.5-7b-instruct" if path.stem.startswith("qwen") else "llama-3.1-8b-instruct")
    assert (recipe.windows, recipe.pruning_ratio, recipe.rounding) == (
        like.windows, like.pruning_ratio, like.rounding
    )  # fmt: skip
    assert (recipe.stage1, recipe.stage2) == (like.stage1, like.stage2)
    assert recipe.width_multiple == head_dim // 4
    lengths = (
        (16, 96) if positions >= 128 else (4, 32) if positions >= 32 else (positions // 8, positions - 1)
    )
    assert (recipe.data.min_length, recipe.data.max_length) == tuple(1024 * length for length in lengths)
    assert packaged_recipe(recipe.model.id) == path.stem


def test_eight_questions_on_a_context_take_an_eighth_of_the_papers_steps():
    recipe, like = load_recipe(SHARED), load_recipe("llama-3.1-8b-instruct")
    assert NOT_RUN in words_of(recipe)
    assert recipe.data.questions_per_context == 8
    assert (8 * recipe.stage1.steps, 8 * recipe.stage2.steps) == (like.stage1.steps, like.stage2.steps)
    same = {
        "data": recipe.data.model_copy(update={"questions_per_context": 1}),
        "stage1": recipe.stage1.model_copy(update={"steps": like.stage1.steps}),
        "stage2": recipe.stage2.model_copy(update={"steps": like.stage2.steps}),
    }
    assert recipe.model_copy(update=same).model_dump() == like.model_dump()
    assert packaged_recipe(recipe.model.id) == "llama-3.1-8b-instruct"


def test_yarn_is_switched_on_where_contexts_exceed_qwens_positions():
    rope = load_recipe("qwen2.5-7b-instruct-yarn").model.config_overrides["rope_parameters"]
    assert rope == {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert load_recipe("qwen2.5-7b-instruct").model.config_overrides == {}
