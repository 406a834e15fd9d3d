import functools
import itertools
import os
import subprocess
import sys
import tracemalloc

import pytest
import yaml
from pydantic import ValidationError

from leank_convert.errors import LeanKError, RecipeError
from leank_convert.methods import METHODS, Method
from leank_convert.recipe import Recipe, known_keys
from leank_convert.recipe_file import list_recipes, load_recipe


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


def test_unknown_key_is_named_with_a_suggestion(write):
    error = problems_of(write("stage1: {step: 5}"))
    assert str(error) == "recipe `x.yaml`: unknown key `stage1.step`"
    assert error.hint == "did you mean `stage1.steps`?"
    assert error.exit_code == 2


@pytest.mark.parametrize(
    ("key", "suggestion"),
    [
        ("windows.sink", "windows.sink_size"),
        ("learning_rate", "stage1.learning_rate"),
        ("pruning_rato", "pruning_ratio"),
        ("stage_1", "stage1"),
        ("data.max_lenght", "data.max_length"),
    ],
)
def test_suggestion_looks_beside_the_key_and_then_everywhere(write, key, suggestion):
    *sections, leaf = key.split(".")
    text = f"{leaf}: 1" if not sections else f"{sections[0]}: {{{leaf}: 1}}"
    assert problems_of(write(text)).hint == f"did you mean `{suggestion}`?"


def test_key_like_nothing_gets_no_suggestion(write):
    assert problems_of(write("zzz: 1")).hint is None


def test_every_problem_is_told_at_once(write):
    path = write("stage1: {step: 5, learning_rate: fast}\npruning_ratio: 1.0\nrounding: up\n")
    error = problems_of(path, ["seed=-1", "nonsense"])
    text = str(error)
    assert len(error.problems) == 6
    for part in (
        "unknown key `stage1.step` (did you mean `stage1.steps`?)",
        "`stage1.learning_rate` is 'fast'",
        "`pruning_ratio` is 1.0: input should be less than 1",
        "`rounding` is 'up': input should be 'nearest' or 'budget'",
        "`seed` is -1: input should be greater than or equal to 0 (from `--set seed=-1`)",
        "`--set nonsense` is not of the form `key=value`",
    ):
        assert part in text


def test_what_does_not_go_together_and_what_is_missing_is_told_with_the_rest(write, monkeypatch):
    text = (
        "seed: one\nmask: m.npy\nmethod: duo-attention\nmax_width: 8\ntrackers: [wandb, wandb]\n"
        "heads: {pattern: absent}\nwindows: {sinks: 3, recent_size: 40000}\n"
        "data: {tasks: [multi_value, variable_tracking], haystack: {source: absent.txt}}"
    )
    monkeypatch.setitem(sys.modules, "wandb", None)
    error = problems_of(write(text), training=True)
    beginnings = (
        "unknown key `windows.sinks` (did you mean `windows.sink_size`?)",
        "`seed` is 'one': input should be a valid integer",
        "`data`: task `variable_tracking` exists only in",
        "`max_width` 8 does not go with `method: duo-attention`",
        "`trackers` ['wandb', 'wandb'] names a tracker twice",
        "`mask` is 'm.npy': nothing is to be trained (use `leank-convert export`",
        "`trackers` names `wandb`, which is not installed",
        "`data.haystack.source` is 'absent.txt', and there is no such file",
        "`heads.pattern` is 'absent', and there is no `full_attention_heads.tsv` and no `config.json` in it",
    )
    # Nothing is told of `windows`: what its wrong key stands for is not known.
    assert len(error.problems) == len(beginnings)
    for problem, beginning in zip(sorted(error.problems), sorted(beginnings), strict=True):
        assert problem.startswith(beginning)


@pytest.mark.parametrize("text", ["", "\n", "# a note alone\n", "{}", "---\n"])
def test_recipe_without_a_key_is_refused(write, text):
    """A file that was cut short must not pass for the defaults, whatever is changed on the command line."""
    for error in (problems_of(write(text)), problems_of(write(text), ["seed=1"], flags={"seed": 1})):
        assert str(error) == "recipe `x.yaml`: the file holds no key"
        assert error.hint


def test_a_recipe_of_one_key_is_the_defaults_beside_it(write):
    assert load_recipe(write("seed: 0")).model_dump() == Recipe().model_dump()


def test_flags_go_last_and_are_told_and_recorded_as_flags(write):
    path = write("windows: {flush_size: 2}")
    recipe = load_recipe(path, ["windows.flush_size=4"], flags={"windows.flush_size": 16, "seed": 3})
    assert (recipe.windows.flush_size, recipe.seed) == (16, 3)
    assert recipe.text.splitlines()[1:] == ["# --set windows.flush_size=4", "# --flush-size 16", "# --seed 3"]
    error = problems_of(path, ["windows.flush_size=4"], flags={"windows.flush_size": 0})
    assert str(error).endswith("greater than or equal to 1 (from `--flush-size`)")


def test_an_error_names_the_change_that_made_the_judged_value(write):
    error = problems_of(write("seed: 1"), ["seed=2", "seed=-3"])
    assert str(error).endswith("(from `--set seed=-3`)")


def test_an_error_in_a_list_names_its_item_alone_and_the_change_that_brought_it(write):
    error = problems_of(write("seed: 1"), ["pruning_ratio=[true]"])
    assert len(error.problems) == 1
    assert "`pruning_ratio.0` is True: a number is needed" in str(error)
    assert str(error).endswith("(from `--set pruning_ratio=[true]`)")


def test_a_mapping_where_one_value_or_a_list_is_asked_for_is_refused(write):
    error = problems_of(write("pruning_ratio: {x: 0.5}"))
    assert str(error) == "recipe `x.yaml`: `pruning_ratio` is {'x': 0.5}: input should be a valid number"


@pytest.mark.parametrize(
    ("value", "problem"), [("retrieval", "is 'retrieval', not a list"), ("[]", "is `[]`, an empty list")]
)
def test_what_is_not_a_list_of_one_or_more_is_refused_in_yamls_words(write, value, problem):
    error = problems_of(write("seed: 1"), [f"data.tasks={value}"])
    assert str(error) == f"recipe `x.yaml`: `data.tasks` {problem} (from `--set data.tasks={value}`)"


def test_an_override_of_several_lines_is_recorded_as_comments(write):
    path = write("seed: 1")
    recipe = load_recipe(path, ["data.tasks=\n- passkey\n- retrieval"])
    assert recipe.data.tasks == ("passkey", "retrieval")
    assert yaml.safe_load(recipe.text) == {"seed": 1}


def test_a_tracker_named_twice_is_refused(write):
    error = problems_of(write("trackers: [wandb, tensorboard, wandb]"))
    assert "names a tracker twice" in str(error)


def test_haystack_keys_that_nothing_reads_are_refused(write):
    error = problems_of(write("data: {haystack: {column: body, split: test}}"))
    assert str(error) == (
        "recipe `x.yaml`: `data.haystack`: `column`, `split` without a `source`: nothing is read"
    )
    assert load_recipe(write("data: {haystack: {column: text, split: train}}")).data.haystack.source is None


def test_defaults_yield_to_the_file_and_the_file_to_overrides_and_the_last_override_wins(write):
    path = write("stage1: {steps: 7}\nwidth_multiple: 16\n")
    recipe = load_recipe(path, ["stage1.steps=8", "stage1.steps=9", "windows.sink_size=4"])
    assert recipe.stage1.steps == 9
    assert recipe.width_multiple == 16
    assert recipe.windows.sink_size == 4
    assert recipe.windows.recent_size == Recipe().windows.recent_size


def test_numbers_that_yaml_reads_as_strings_are_numbers(write):
    # PyYAML wants a dot in a number with an exponent.
    assert yaml.safe_load("2e-2") == "2e-2"
    assert load_recipe(write("stage1: {learning_rate: 2e-2}")).stage1.learning_rate == 0.02
    assert load_recipe(write("seed: 0"), ["stage1.learning_rate=4e-2"]).stage1.learning_rate == 0.04


@pytest.mark.parametrize("value", ["yes", "true", ".nan", ".inf", "-1", "[3]", "null", "''"])
def test_what_is_not_a_positive_number_is_refused(write, value):
    assert "`stage2.learning_rate` is" in str(problems_of(write(f"stage2: {{learning_rate: {value}}}")))


@pytest.mark.parametrize("value", ["yes", "2.5", "-1", ".inf", "0"])
def test_what_is_not_a_positive_count_is_refused(write, value):
    assert "`save_every` is" in str(problems_of(write(f"save_every: {value}")))


def test_key_given_twice_is_refused_with_its_line(write):
    error = problems_of(write("seed: 1\nstage1:\n  steps: 1\n  steps: 2\n"))
    assert str(error) == "recipe `x.yaml`: line 4, column 3: key `steps` is given twice"


def test_broken_yaml_names_its_line(write):
    assert "recipe `x.yaml`: line 2" in str(problems_of(write("seed: 1\nstage1: [")))


def test_file_that_is_not_a_mapping_is_refused(write):
    assert "holds a list, not a mapping" in str(problems_of(write("- 1\n- 2\n")))


def test_section_that_is_not_a_mapping_is_refused(write):
    assert str(problems_of(write("stage1: 5"))) == "recipe `x.yaml`: `stage1` is 5, not a mapping of keys"


def test_override_of_a_section_below_a_scalar_is_judged_as_a_whole(write):
    assert load_recipe(write("stage1: 5"), ["stage1.steps=3"]).stage1.steps == 3
    error = problems_of(write("seed: 0"), ["stage1.steps.more=3"])
    assert "`stage1.steps` is" in str(error)
    assert "(from `--set stage1.steps.more=3`)" in str(error)


@pytest.mark.parametrize("override", ["seed", "=1", "model.config_overrides.=1", "..=1"])
def test_an_override_names_a_key(write, override):
    assert str(problems_of(write("seed: 0"), [override])).endswith("is not of the form `key=value`")


def test_override_value_is_yaml(write):
    overrides = ["data.tasks=[multi_value]", "model.config_overrides.rope_parameters={factor: 4.0}", "mask="]
    recipe = load_recipe(write("mask: a.pth"), overrides)
    assert recipe.data.tasks == ("multi_value",)
    assert recipe.model.config_overrides == {"rope_parameters": {"factor": 4.0}}
    assert recipe.mask is None
    assert "the value is not YAML" in str(problems_of(write("seed: 0"), ["seed=[1"]))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "data: {min_length: 5000, max_length: 4999}",
            "`data`: `min_length` 5000 is above `max_length` 4999",
        ),
        ("data: {tasks: [variable_tracking]}", "exists only in `wording: testbed`"),
        ("data: {min_length: 9, max_length: 1152}", "`data.max_length` 1152 leaves nothing to prune between"),
        ("data: {tasks: []}", "`data.tasks` is `[]`"),
    ],
)
def test_values_that_contradict_one_another_are_refused(write, text, message):
    assert message in str(problems_of(write(text)))


def test_missing_recipe_suggests_a_packaged_one():
    with pytest.raises(LeanKError, match="recipe `quickstrat` is neither a file nor") as caught:
        load_recipe("quickstrat")
    assert caught.value.hint == "did you mean `quickstart`?"
    with pytest.raises(LeanKError) as caught:
        load_recipe("./elsewhere/zzz.yaml")
    assert "quickstart" in caught.value.hint


def test_what_is_no_file_of_text_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(LeanKError, match="is a folder, a pipe or a device"):
            load_recipe(path)
    (tmp_path / "x.yaml").write_bytes(b"seed: 1\n\xff\xfe\x00")
    with pytest.raises(LeanKError, match="is not UTF-8 text: line 2"):
        load_recipe(tmp_path / "x.yaml")
    with pytest.raises(
        LeanKError, match="x… is neither a file nor a packaged recipe".replace("x…", "x{80}…`")
    ):
        load_recipe("x" * 10**6)


_BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{last}'] * 9)}]\n" for last, name in itertools.pairwise("abcdefgh")
)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (_BOMB, "line 1, column 4: `&a`: anchors are not read here; write the value out"),
        ("seed: *a", "line 1, column 7: `*a`: anchors are not read here; write the value out"),
        ("a: " + "[" * 10**5, "line 1, column 23: it is nested deeper than 20 levels"),
        ("a: " + "{a: " * 10**4, "line 1, column 77: it is nested deeper than 20 levels"),
        ("x: 1\n" * 60_000, "it is larger than 256 KB, which no recipe is"),
        (
            "seed: 1\nmask: !!python/object/apply:os.system [ls]",
            "line 2, column 7: tag `tag:yaml.org,2002",
        ),
        (
            "seed: 1\n---\nseed: 2",
            "line 2, column 1: expected a single document in the stream, but found anoth",
        ),
        ("seed: 1\nmask: a\0b", "line 2: character '\\x00' is not allowed"),
        ("seed: " + "9" * 5000, "line 1, column 7: a number of 5000 digits"),
        ("seed: 0b_", "line 1, column 7: `0b_` is no number"),
        ("1.5: 2", "line 1, column 1: key `1.5` is no text"),
        ("? [a]\n: b", "line 1, column 3: key `['a']` is no text"),
        ('mask: "\\UFFFFFFFF"', "an escape stands for no character"),
        ("? " + "k" * 10**5, f"unknown key `{'k' * 80}…`"),
        (f"seed: {'x' * 10**5}", "`seed` is 'xxx"),
        ("".join(f"k{n}: 1\n" for n in range(1000)), "… and more"),
        ("pruning_ratio: [" + "0.5, " * 1000 + "]", "names a ratio twice"),
    ],
    ids=lambda value: value[:20],
)
def test_no_text_makes_a_recipe_costly_or_its_message_long(write, text, problem):
    """The first of them asks for gigabytes in a third of a kilobyte."""
    tracemalloc.start()
    error = problems_of(write(text))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert problem in str(error)
    assert len(str(error)) < 3000
    assert peak < 100e6


def test_a_date_is_text_and_a_number_may_be_a_key_of_the_models_config(write):
    text = "mask: 2024-13-45\nmodel: {config_overrides: {id2label: {0: a}}}"
    recipe = load_recipe(write(text))
    assert recipe.mask == "2024-13-45"
    assert recipe.model.config_overrides == {"id2label": {0: "a"}}


NUMBERS = [
    key
    for key in known_keys(Recipe)
    if type(functools.reduce(getattr, key.split("."), Recipe())) in (int, float)
]


@pytest.mark.parametrize("value", [".nan", ".inf", "1e400", "-1", "9" * 30, "1" + "0" * 4000])
def test_no_key_takes_a_number_beyond_all_measure(write, value):
    path = write("trackers: []")
    assert len(NUMBERS) > 20
    for key in NUMBERS:
        assert key in str(problems_of(path, [f"{key}={value}"]))


@pytest.mark.parametrize("value", [".nan", ".inf", "[1, .nan]"])
def test_a_change_of_the_config_is_json(write, value):
    error = problems_of(write("seed: 1"), [f"model.config_overrides.rope_theta={value}"])
    assert "config.json could not hold it" in str(error)


def test_local_file_goes_before_a_packaged_recipe_of_that_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quickstart").write_text("seed: 77")
    assert load_recipe("quickstart").seed == 77


def test_text_is_verbatim_with_overrides_as_comments(write):
    text = "# why\nseed:   3 # spaced\n"
    recipe = load_recipe(write(text), ["stage1.steps=4"])
    assert recipe.text == text + "# --set stage1.steps=4\n"


def test_text_ending_without_newline_keeps_overrides_on_lines_of_their_own(write):
    recipe = load_recipe(write("seed: 3"), ["stage1.steps=4"])
    assert recipe.text == "seed: 3\n# --set stage1.steps=4\n"


def test_resolved_recipe_reads_back_as_itself(write):
    recipe = load_recipe("qwen2.5-7b-instruct-yarn", ["seed=5", "stage1.learning_rate=2e-2"])
    again = load_recipe(write(recipe.to_yaml()))
    assert again.model_dump() == recipe.model_dump()
    assert again.model.config_overrides["rope_parameters"]["factor"] == 4.0


def test_recipe_made_in_code_has_a_text():
    recipe = Recipe(seed=9)
    assert yaml.safe_load(recipe.text)["seed"] == 9


def test_recipe_cannot_be_changed():
    with pytest.raises(ValidationError):
        Recipe().seed = 3
    with pytest.raises(ValidationError):
        Recipe().stage1.steps = 3


def test_packaged_recipes_are_listed_with_their_first_line():
    listed = {recipe.name: recipe for recipe in list_recipes()}
    assert list(listed) == sorted(listed)
    assert listed["quickstart"].model == "testbed"
    assert listed["quickstart"].summary.startswith("The shipped model's K cache")
    assert not listed["quickstart"].summary.startswith("#")


def test_reading_recipes_does_not_import_torch():
    code = (
        "import sys; from leank_convert.recipe_file import list_recipes, load_recipe; list_recipes();"
        "load_recipe('quickstart'); sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_budget_is_the_methods_own_unless_one_is_given():
    for method, budget in {"leank": "global", "random": "uniform", "high-frequency-ratio": "global"}.items():
        recipe = Recipe(method=method)
        assert recipe.budget is None
        assert recipe.resolved_budget == budget
    assert Recipe(method="random", budget="global").resolved_budget == "global"
    assert Recipe(method="leank", budget="uniform").resolved_budget == "uniform"


def test_a_method_is_a_row_of_the_table_when_the_recipe_is_checked(monkeypatch):
    with pytest.raises(ValueError, match=r"[Ii]nput should be 'leank', .* or 'duo-attention\+leank'"):
        Recipe(method="toy")
    monkeypatch.setitem(METHODS, "toy", Method("toy", "is added by a notebook", score="toy:score"))
    assert Recipe(method="toy").trains == ()
    assert "toy" in Recipe.model_json_schema()["properties"]["method"]["enum"]


def test_gates_are_trained_unless_a_pattern_brings_them():
    heads = {"heads": {"pattern": "folder"}}
    assert Recipe(method="duo-attention").trains == ("gates",)
    assert Recipe(method="duo-attention", **heads).trains == ()
    assert Recipe(method="duo-attention+leank", **heads).trains == ("stage1", "stage2")


def test_magnitude_alpha_has_no_stage_2_whatever_the_recipe_says():
    for stage2 in ({}, None, {"steps": 7, "learning_rate": 0.5}, Recipe().stage2):
        values = {} if stage2 is None else {"stage2": stage2}
        assert Recipe(method="magnitude-alpha", **values).stage2.steps == 0
    recipe = Recipe(method="magnitude-alpha", stage2={"steps": 7, "learning_rate": 0.5})
    assert recipe.stage2.learning_rate == 0.5
    assert "stage2:\n  steps: 0\n" in recipe.to_yaml()


@pytest.mark.parametrize("change", [{"budget": "uniform"}, {"max_width": 64}])
def test_whole_heads_take_neither_a_uniform_budget_nor_a_widest_head(change):
    (key,) = change
    with pytest.raises(
        ValueError, match=rf"`{key}.*`method: high-frequency-ratio`, whose.*all channels or none"
    ):
        Recipe(method="high-frequency-ratio", **change)
