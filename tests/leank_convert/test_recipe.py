"""Recipes: what is refused, what is read, and what `leank-convert recipes` tells of them."""

import functools
import json
import os
import re
import sys

import pytest
import yaml

from leank_convert.errors import RecipeError
from leank_convert.methods import METHODS, Method
from leank_convert.recipe import Recipe, known_keys
from leank_convert.recipe_file import list_recipes, load_recipe
from leank_convert.recipe_listing import render_keys, render_recipes
from tests.checks import done, refusal


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes `x.yaml` into the current folder."""
    monkeypatch.chdir(tmp_path)

    def write(text):
        (tmp_path / "x.yaml").write_text(text, encoding="utf-8")
        return "x.yaml"

    return write


def problems_of(path, overrides=(), **flags):
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, overrides, **flags)
    return caught.value


# --- what is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        # no recipe
        ("", "the file holds no key"),
        ("- 1\n- 2\n", "the file holds a list, not a mapping of keys"),
        # no YAML, or more than is read
        ("seed: 1\nstage1: [", "line 2, column 10: while parsing a flow node"),
        ("seed: 1\nstage1:\n  steps: 1\n  steps: 2\n", "line 4, column 3: key `steps` is given twice"),
        ("a: &a [x]\nseed: *a", "line 2, column 7: `*a`: aliases are not read here; write the value out"),
        ("seed: 1\nmask: !!python/object/apply:os.system [ls]", "line 2, column 7: could not determine"),
        ("seed: 1\n---\nseed: 2", "line 2, column 1: expected a single document in the stream"),
        ("a: " + "[" * 10**5, "it is nested too deep"),
        ("x: 1\n" * 60_000, "it is larger than 256 KB, which no recipe is"),
        ("seed: 1\nmask: a\0b", "a value cannot be read: unacceptable character #x0000"),
        ("? [a]\n: b", "line 1, column 3: while constructing a mapping, found unhashable key"),
        # values
        ("stage1: 5", "`stage1` is 5: a mapping of keys is needed"),
        ("data: {tasks: retrieval}", "`data.tasks` is 'retrieval': a list is needed"),
        ("pruning_ratio: [true]", "`pruning_ratio.0` is True: a number is needed, not a truth value"),
        ("pruning_ratio: {x: 0.5}", "`pruning_ratio` is {'x': 0.5}: input should be a valid number"),
        ("seed: '" + "x" * 10**5 + "'", "`seed` is 'xxx"),
        ("model: {config_overrides: {a: .nan}}", "`model.config_overrides` is {'a': nan}: config.json"),
        # values that contradict one another
        ("pruning_ratio: [" + "0.5, " * 1000 + "]", "names a ratio twice"),
        ("data: {min_length: 5000, max_length: 4999}", "`data`: `min_length` 5000 is above `max_length`"),
        ("data: {tasks: [variable_tracking]}", "task `variable_tracking` exists only in `wording: testbed`"),
        ("data: {min_length: 9, max_length: 1152}", "`data.max_length` 1152 leaves nothing to prune between"),
        ("data: {haystack: {column: body, split: test}}", "`column`, `split` without a `source`: nothing is"),
        ("{method: duo-attention+leank, budget: uniform}", "`budget: uniform` does not go with `method: duo"),
        ("{method: duo-attention+leank, pruning_ratio: 0.4}", "0.4 is below `heads.pruning_ratio` 0.5"),
        ("{method: high-frequency-ratio, max_width: 64}", "`max_width` 64 does not go with `method: high-f"),
    ],
    ids=lambda value: value[:20],
)  # fmt: skip
def test_what_is_no_recipe_is_refused_in_a_sentence(write, text, problem):
    with refusal(f"^recipe `x.yaml`: .*{re.escape(problem)}"):
        load_recipe(write(text))


@pytest.mark.parametrize(
    ("text", "unknown", "suggestion"),
    [
        ("stage1: {step: 5}", "stage1.step", "stage1.steps"),
        ("learning_rate: 1", "learning_rate", "stage1.learning_rate"),
        ("zzz: 1", "zzz", None),
    ],
)
def test_an_unknown_key_is_named_with_a_suggestion_from_anywhere(write, text, unknown, suggestion):
    error = problems_of(write(text))
    assert error.message == f"recipe `x.yaml`: unknown key `{unknown}`"
    assert error.hint == (f"did you mean `{suggestion}`?" if suggestion else None)


@pytest.mark.parametrize(
    ("text", "overrides", "beginnings"),
    [
        (
            "seed: one\nwindows: {sinks: 3, recent_size: 40000}\n",
            ["save_every=-1", "nonsense", "batch_size=[1"],
            [
                "unknown key `windows.sinks` (did you mean `windows.sink_size`?)",
                "`seed` is 'one': input should be a valid integer",
                "`save_every` is -1: input should be greater than or equal to 1 (from `--set save_every=-1`)",
                "`--set nonsense` is not of the form `key=value`",
                "`--set batch_size=[1`: the value is not YAML: line 1, column 3: while parsing",
            ],
        ),
        (
            "method: duo-attention\nmax_width: 8\ntrackers: [wandb, wandb]\n"
            "data: {tasks: [multi_value, variable_tracking]}",
            [],
            [
                "`data`: task `variable_tracking` exists only in",
                "`max_width` 8 does not go with `method: duo-attention`",
                "`trackers` ['wandb', 'wandb'] names a tracker twice",
            ],
        ),
        (
            "mask: m.npy\nmethod: duo-attention\ntrackers: [wandb]\nheads: {pattern: absent}\n"
            "data: {haystack: {source: absent.txt}}",
            [],
            [
                "`mask` is 'm.npy': nothing is to be trained (use `leank-convert export`",
                "`trackers` names `wandb`, which is not installed",
                "`data.haystack.source` is 'absent.txt', and there is no such file",
                "`heads.pattern` is 'absent', and there is no `full_attention_heads.tsv` and no `config",
            ],
        ),
    ],
    ids=["each-key", "together", "missing"],
)
def test_every_problem_is_told_at_once(write, monkeypatch, text, overrides, beginnings):
    monkeypatch.setitem(sys.modules, "wandb", None)
    error = problems_of(write(text), overrides, training=True)
    assert len(error.problems) == len(beginnings)
    for problem, beginning in zip(sorted(error.problems), sorted(beginnings), strict=True):
        assert problem.startswith(beginning)


def test_of_very_many_problems_the_first_are_told(write):
    error = problems_of(write("".join(f"k{n}: 1\n" for n in range(1000))))
    assert len(error.problems) == 21 and error.problems[-1] == "… and more"


@pytest.mark.parametrize(
    ("overrides", "origin"),
    [
        (["seed=2", "seed=-3"], "seed=-3"),
        (["pruning_ratio=[true]"], "pruning_ratio=[true]"),
        (["stage1.steps.more=3"], "stage1.steps.more=3"),
    ],
)
def test_an_error_names_the_change_that_made_the_judged_value(write, overrides, origin):
    error = problems_of(write("seed: 1"), overrides)
    assert len(error.problems) == 1 and error.message.endswith(f"(from `--set {origin}`)")


NUMBERS = [
    key
    for key in known_keys(Recipe)
    if type(functools.reduce(getattr, key.split("."), Recipe())) in (int, float)
]


@pytest.mark.parametrize("value", ["yes", ".nan", ".inf", "1e400", "-1", "1" + "0" * 4000])
def test_no_key_of_a_number_takes_anything_else_or_one_beyond_all_measure(write, value):
    path = write("trackers: []")
    assert len(NUMBERS) > 20
    for key in NUMBERS:
        assert f"`{key}` is" in str(problems_of(path, [f"{key}={value}"]))


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("quickstrat", "recipe `quickstrat` is neither a file nor", "did you mean `quickstart`?"),
        ("./elsewhere/zzz.yaml", "neither a file", "quickstart"),
        ("x" * 10**6, "x{80}…` is neither a file nor a packaged recipe", ""),
        ("~nobody/r.yaml", "recipe `~nobody/r.yaml` is neither a file nor", ""),
        ({"seed": 1}, "recipe `{'seed': 1}` is neither a file nor", ""),
        (".", "is a folder, a pipe or a device", ""),
        ("pipe", "is a folder, a pipe or a device", ""),
        ("/dev/zero", "is a folder, a pipe or a device", ""),
        ("binary.yaml", "is not UTF-8 text: line 2", ""),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_is_no_file_of_text_is_refused_and_a_packaged_recipe_suggested(
    name, message, hint, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    (tmp_path / "binary.yaml").write_bytes(b"seed: 1\n\xff\xfe\x00")
    with refusal(message, hint):
        load_recipe(name)


# --- what is read ------------------------------------------------------------------------------------------


def test_a_recipe_of_one_key_is_the_defaults_beside_it(write):
    assert load_recipe(write("seed: 0")).model_dump() == Recipe().model_dump()
    assert load_recipe(write("data: {haystack: {column: text, split: train}}")).data.haystack.source is None


def test_defaults_yield_to_the_file_then_to_overrides_then_to_flags_and_the_last_wins(write):
    path = write("stage1: {steps: 7}\nwidth_multiple: 16\nwindows: {flush_size: 2}")
    overrides = ["stage1.steps=8", "stage1.steps=9", "windows.sink_size=4", "windows.flush_size=4"]
    recipe = load_recipe(path, overrides, flags={"windows.flush_size": 16, "seed": 3})
    assert (recipe.stage1.steps, recipe.width_multiple, recipe.seed) == (9, 16, 3)
    assert (recipe.windows.sink_size, recipe.windows.flush_size) == (4, 16)
    assert recipe.windows.recent_size == Recipe().windows.recent_size
    assert recipe.text.splitlines()[-3:] == [
        f"# --set {overrides[-1]}",
        "# --set windows.flush_size=16",
        "# --set seed=3",
    ]
    error = problems_of(path, ["windows.flush_size=4"], flags={"windows.flush_size": 0})
    assert error.message.endswith("greater than or equal to 1 (from `--flush-size`)")


def test_override_value_is_yaml(write):
    overrides = [
        "data.tasks=[multi_value]",
        "model.config_overrides.rope_parameters={factor: 4.0}",
        "mask=",
        "stage1.learning_rate=4e-2",  # a text to PyYAML, which wants a dot in it
        "stage1.steps=3",
        "heads.pattern=2024-13-45",  # no date
        "model.config_overrides.id2label={0: a}",
    ]
    recipe = load_recipe(write("mask: a.pth\nstage1: 5\nmethod: duo-attention"), overrides)
    assert recipe.data.tasks == ("multi_value",)
    assert recipe.model.config_overrides == {"rope_parameters": {"factor": 4.0}, "id2label": {0: "a"}}
    assert recipe.mask is None and recipe.heads.pattern == "2024-13-45"
    assert (recipe.stage1.learning_rate, recipe.stage1.steps) == (0.04, 3)


def test_local_file_goes_before_a_packaged_recipe_of_that_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quickstart").write_text("seed: 77")
    assert load_recipe("quickstart").seed == 77
    assert {packaged.name: packaged.recipe.seed for packaged in list_recipes()}["quickstart"] == 0


def test_text_is_verbatim_with_overrides_as_comments_on_lines_of_their_own(write):
    text = "# why\nseed:   3 # spaced\n"
    assert load_recipe(write(text), ["stage1.steps=4"]).text == text + "# --set stage1.steps=4\n"
    assert load_recipe(write("seed: 3"), ["stage1.steps=4"]).text == "seed: 3\n# --set stage1.steps=4\n"
    recipe = load_recipe(write("seed: 1"), ["data.tasks=\n- passkey\n- retrieval"])
    assert recipe.data.tasks == ("passkey", "retrieval")
    assert yaml.safe_load(recipe.text) == {"seed": 1}


def test_resolved_recipe_reads_back_as_itself(write):
    recipe = load_recipe("qwen2.5-7b-instruct-yarn", ["seed=5", "stage1.learning_rate=2e-2"])
    again = load_recipe(write(recipe.to_yaml()))
    assert again.model_dump() == recipe.model_dump()
    assert again.model.config_overrides["rope_parameters"]["factor"] == 4.0
    assert yaml.safe_load(Recipe(seed=9).text)["seed"] == 9


# --- methods -----------------------------------------------------------------------------------------------


def test_budget_is_the_methods_own_unless_one_is_given():
    for method, budget in {"leank": "global", "random": "uniform", "high-frequency-ratio": "global"}.items():
        recipe = Recipe(method=method)
        assert (recipe.budget, recipe.resolved_budget) == (None, budget)
    assert Recipe(method="random", budget="global").resolved_budget == "global"
    assert Recipe(method="leank", budget="uniform").resolved_budget == "uniform"


def test_a_method_is_a_row_of_the_table_when_the_recipe_is_checked(monkeypatch):
    with pytest.raises(ValueError, match=r"[Ii]nput should be 'leank', .* or 'duo-attention\+leank'"):
        Recipe(method="toy")
    monkeypatch.setitem(METHODS, "toy", Method("toy", "is added by a notebook", score="toy:score"))
    assert Recipe(method="toy").trains == ()
    assert "toy" in Recipe.model_json_schema()["properties"]["method"]["enum"]


def test_magnitude_alpha_has_no_stage_2_whatever_the_recipe_says():
    for stage2 in ({}, None, {"steps": 7, "learning_rate": 0.5}, Recipe().stage2):
        values = {} if stage2 is None else {"stage2": stage2}
        assert Recipe(method="magnitude-alpha", **values).stage2.steps == 0
    recipe = Recipe(method="magnitude-alpha", stage2={"steps": 7, "learning_rate": 0.5})
    assert recipe.stage2.learning_rate == 0.5
    assert "stage2:\n  steps: 0\n" in recipe.to_yaml()


# --- the listing -------------------------------------------------------------------------------------------

NAMES = [recipe.name for recipe in list_recipes()]


def test_listing_has_a_row_per_recipe_with_model_context_and_ratio():
    shown = re.sub(" {2,}", "  ", render_recipes())
    for name in NAMES:
        recipe = load_recipe(name)
        shortest, longest = recipe.data.min_length, recipe.data.max_length
        context = " to ".join(f"{n // 1024}K" if n % 1024 == 0 else str(n) for n in (shortest, longest))
        assert f"{name}  {context}  70%\n  model: {recipe.model.id}\n" in shown


def test_json_listing_has_the_same_facts():
    listed = {recipe["name"]: recipe for recipe in json.loads(done("recipes", "--json"))}
    assert list(listed) == NAMES
    assert "stage1:" in done("recipes", "quickstart")
    assert json.loads(done("recipes", "quickstart", "--json"))["pruning_ratio"] == 0.7
    assert listed["qwen2.5-7b-instruct-yarn"] == {
        "name": "qwen2.5-7b-instruct-yarn",
        "model": "Qwen/Qwen2.5-7B-Instruct",
        "summary": list_recipes()[NAMES.index("qwen2.5-7b-instruct-yarn")].summary,
        "min_length": 65536,
        "max_length": 98304,
        "pruning_ratios": [0.7],
    }


def test_keys_are_a_recipe_of_all_defaults(tmp_path):
    """So the page can be saved, changed and trained by."""
    printed = done("recipes", "--keys")
    path = tmp_path / "mine.yaml"
    path.write_text(printed)
    assert load_recipe(path).model_dump() == Recipe().model_dump()
    assert list(yaml.safe_load(printed)) == list(Recipe.model_fields)


def test_every_key_stands_with_its_description_and_its_choices():
    words = " ".join(render_keys().replace("#", " ").split())
    for key in known_keys(Recipe):
        assert f"{key.rpartition('.')[2]}:" in words
    for field in (*Recipe.model_fields.values(), *type(Recipe().data).model_fields.values()):
        assert (field.description or "") in words
    assert "choices: nearest, budget" in words
    assert "choices: retrieval, multi_value, passkey, variable_tracking" in words
