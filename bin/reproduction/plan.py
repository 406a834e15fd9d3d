"""Plan of the experiments: masks to make, ways to prune, tables to fill. Data alone; nothing runs here.

A way to prune that has several settings (budget, windows) enters a table as the one of them that did best on
validation prompts: no baseline is shown below its best.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from leank_convert.evaluate.ruler.synthetic import NEEDLE_TASKS
from leank_convert.methods import METHODS
from leank_convert.recipe import Recipe

MAIN = "leank"
UNALIGNED = "leank (any width)"
"""The curve that meets the baselines on their terms: few channels in whole multiples are few heads."""
# Baselines are not held to a width multiple that they do not need: of 64 channels each, a uniform budget of
# 30% would be cut from 19 to 16.
_ANY_WIDTH = "width_multiple=1"
_STAGE1_ALONE = "magnitude-alpha"
_COMBINED = "duo-attention+leank"
_HEAD_METHODS = tuple(m.name for m in METHODS.values() if m.whole_heads or m.has_gates)
_STATIC_METHODS = tuple(m.name for m in METHODS.values() if m.score and not m.whole_heads)


@dataclass(frozen=True)
class RealSizes:
    """What a real model is asked besides, and how much of it."""

    # Variants of `evaluate --also` whose scores stand beside their caches' bytes.
    alone: tuple[str, ...] = (
        "fp8", "int4", "int4+hadamard", "kivi", "quest-16", "quest-16-kv", "quest-64", "quest-64-kv",
        "snapkv-2048", "snapkv-56%",
    )  # fmt: skip
    products: tuple[str, ...] = (
        "leank+fp8", "leank+int4", "leank+int4+hadamard", "leank+kivi", "leank+kivi+window", "leank+quest-16",
        "leank+quest-16-kv", "leank+quest-64", "leank+quest-64-kv",
    )  # fmt: skip
    compared_lengths: tuple[int, ...] = (4096, 7680)  # of the test prompts' tasks, on which they are compared
    num_compared: int = 64  # prompts of each task and length

    ruler_tasks: tuple[str, ...] = (*NEEDLE_TASKS, "vt", "cwe", "fwe")
    ruler_lengths: tuple[int, ...] = (1024, 2048, 4096, 7680)  # tokens of a prompt and its answer
    floor: float = 0.2  # a task at a length is left out where the dense model scores no more
    num_floor: int = 16  # prompts that this is found out on, of a seed of their own
    num_main: int = 200  # prompts of a cell that the dense model and the main mask answer
    num_others: int = 64  # the first ones, which all other entries answer too
    text_tokens: int = 4096  # of a text, before those that are fed
    num_fed: int = 256  # tokens that are fed, each a decode step
    num_texts: int = 16  # texts of each kind
    answer_tokens: int = 512  # of an answer to a prompt of about `text_tokens`
    num_answers: int = 24  # prompts of each kind of text
    num_measured: int = 2  # prompts of each task and length that staticity is measured on


@dataclass(frozen=True)
class Sizes:
    """How much is done."""

    recipe: str = "quickstart"  # name or file of the recipe that every run changes
    overrides: tuple[str, ...] = ()  # changes to it that all runs share
    side_overrides: tuple[str, ...] = ()  # changes that all runs but the main one share
    ratios: tuple[float, ...] = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)  # pruning ratios of the comparison, ascending
    main_ratio: float = 0.7  # the one that all tables show
    hard_ratio: float = 0.9  # another, where differences are large
    head_ratio: float = 0.5  # where methods that prune whole heads are compared with one another
    combined_ratio: float = 0.8  # of LeanK on top of DuoAttention, compared with DuoAttention at `head_ratio`
    num_seeds: int = 5  # runs of the main setting
    l1_weights: tuple[float, ...] = (0.0, 0.04, 0.06, 0.1, 1.0)  # of the sweep, beside the main setting's
    width_multiples: tuple[int, ...] = (8, 32)  # beside the main setting's
    # Tasks of runs that train on fewer than the main setting does.
    task_choices: tuple[tuple[str, ...], ...] = (
        ("retrieval",), ("multi_value",), ("retrieval", "multi_value"),
    )  # fmt: skip
    short_lengths: tuple[int, ...] = (1024,)  # the longest context of runs that are then asked longer ones
    # Of the test prompts: RULER's tasks with the most tokens of an answer; none: the recipe's own.
    ruler: tuple[tuple[str, int], ...] = ()
    lengths: tuple[int, ...] = (256, 512, 1024, 2048)  # of the test prompts, in tokens
    num_prompts: int = 200  # test prompts of each task and length
    num_validation: int = 48  # prompts of each task and length that settings are chosen on
    validation_lengths: tuple[int, ...] = ()  # of these prompts; none: all lengths
    batch_tokens: int = 2**20  # tokens of prompts that are answered together
    real: RealSizes | None = None  # None for the shipped model, which knows no language

    @property
    def measure(self) -> str:
        """What a score is."""
        return "RULER score" if self.ruler else "exact match"


ON_GPU = Sizes()
ON_CPU = Sizes(
    num_seeds=2,
    l1_weights=(0.0, 0.06, 1.0),
    num_prompts=24,
    num_validation=8,
    batch_tokens=2**14,
)
QUICK = Sizes(
    overrides=(
        "stage1.steps=4", "stage2.steps=2", "heads.steps=4", "data.max_length=384", "calibration_prompts=2",
    ),
    ratios=(0.7, 0.9),
    head_ratio=0.7,
    combined_ratio=0.9,
    num_seeds=2,
    l1_weights=(0.06,),
    width_multiples=(32,),
    short_lengths=(300,),
    lengths=(256, 384),
    num_prompts=2,
    num_validation=1,
    batch_tokens=1024,
)  # fmt: skip
# Some 60 minutes of work on H200s, two workers each; `times.jsonl` has what each piece took.
SMOLLM2 = Sizes(
    recipe="smollm2-135m-instruct",
    overrides=("heads.steps=600", "heads.learning_rate=0.04", "heads.l1_weight=0.1"),
    side_overrides=("held_out_samples=0",),
    ratios=(0.5, 0.6, 0.7, 0.8, 0.9),
    num_seeds=2,
    l1_weights=(0.06, 0.2, 0.4),
    width_multiples=(32,),
    task_choices=(("retrieval",), ("multi_value",)),
    short_lengths=(2048, 4096),
    # The dense model copies no code of 24 hexadecimal digits, as the recipe's own task asks for. A number
    # takes 8 tokens, and it ends only some of its answers.
    ruler=(("niah_single_2", 24), ("niah_multikey_1", 24), ("niah_multivalue", 64)),
    lengths=(1024, 2048, 4096, 7680),
    num_prompts=64,
    num_validation=48,
    validation_lengths=(1024, 4096),
    real=RealSizes(),
)
QUICK_SMOLLM2 = replace(
    SMOLLM2,
    overrides=(
        "windows.sink_size=16", "windows.recent_size=64", "windows.flush_size=16", "data.min_length=448",
        "data.max_length=512", "data.questions_per_context=1", "stage1.steps=2", "stage2.steps=1",
        "stage2.validation_contexts=1", "heads.steps=2", "calibration_prompts=1", "held_out_samples=1",
    ),
    ratios=(0.7, 0.9),
    head_ratio=0.7,
    combined_ratio=0.9,
    l1_weights=(),
    num_seeds=1,
    width_multiples=(),
    task_choices=(("retrieval",),),
    short_lengths=(480,),
    ruler=(("niah_single_2", 3),),
    lengths=(512,),
    num_prompts=1,
    num_validation=1,
    validation_lengths=(512,),
    batch_tokens=1024,
    real=RealSizes(
        ruler_tasks=("niah_single_2", "fwe"), ruler_lengths=(448,), floor=-1.0, num_floor=1, num_main=2,
        num_others=1, text_tokens=300, num_fed=4, num_texts=2, answer_tokens=8, num_answers=2, num_measured=1,
        compared_lengths=(448, 480), num_compared=1,
    ),
)  # fmt: skip


class Cell(NamedTuple):
    """A task, one of the recipe's own or of RULER's, at a length."""

    task: str
    length: int  # tokens of a prompt, of RULER's tasks with its answer
    most_tokens: int | None = None  # of an answer, where it ends before the task's own limit


class Run(NamedTuple):
    """One training, or one run of a method that trains nothing."""

    overrides: tuple[str, ...]  # changes to the recipe, as `--set` takes them
    ratios: tuple[float, ...]  # the pruning ratios whose masks it leaves


class Entry(NamedTuple):
    """One way to prune at one ratio."""

    method: str  # its name in the comparison; of an ablation, its run's
    ratio: float  # the pruning ratio that was asked for
    setting: str = ""  # which of the method's settings; "" where there is one
    run: str | None = None  # whose mask is taken, or whose widths; None: every head keeps as many channels
    dynamic: bool = False  # whether ThinK's rule chooses channels for every prompt, in place of the mask
    own_windows: bool = False  # whether ThinK's own window sizes replace the recipe's
    compared: bool = False  # whether it is `evaluate`'s variant named `method`, on the run's mask or on none

    @property
    def name(self) -> str:
        """The entry in one word, unlike all others'."""
        return ", ".join(filter(None, (self.method, self.setting, f"{self.ratio:g}")))


Rows = dict[tuple[str, float], tuple[Entry, ...]]
"""By label and asked ratio; of several entries, the one that is best on validation prompts is shown."""


class Table(NamedTuple):
    """Rows that are compared with one another."""

    title: str
    rows: Rows


@dataclass(frozen=True)
class Plan:
    """Everything that is made and measured.

    Attributes:
        sizes: How much of it.
        runs: Masks, by the name of their folder, in the order they are made.
        tables: By a name of one word; the first, `comparison`, has all methods at all ratios.
    """

    sizes: Sizes
    runs: dict[str, Run]
    tables: dict[str, Table]

    def add_run(
        self, name: str, *overrides: str, method: str = MAIN, ratios: Sequence[float] | None = None
    ) -> str:
        """Note masks that are needed, at the two shown ratios if no other are given; returns `name`."""
        assert name not in self.runs, name
        sizes = self.sizes
        asked = (sizes.main_ratio, sizes.hard_ratio) if ratios is None else tuple(ratios)
        self.runs[name] = Run((*sizes.side_overrides, f"method={method}", *overrides), asked)
        return name

    def add_ablation(self, name: str, title: str, runs: Mapping[str, str]) -> None:
        """Compare runs, given by their labels, at the two shown ratios."""
        ratios = (self.sizes.main_ratio, self.sizes.hard_ratio)
        rows: Rows = {}
        for ratio in ratios:
            rows |= {(label, ratio): (Entry(run, ratio, run=run),) for label, run in runs.items()}
        self.tables[name] = Table(title, rows)


def make_plan(sizes: Sizes, recipe: Recipe) -> Plan:
    """Lay out all experiments.

    Args:
        sizes: How much is done.
        recipe: The main setting.
    """
    plan = Plan(sizes, {MAIN: Run((), sizes.ratios)}, {})
    plan.tables["comparison"] = Table("Pruning ratio against accuracy", _compare_methods(plan, recipe))
    _add_ablations(plan, recipe)
    return plan


def _compare_methods(plan: Plan, recipe: Recipe) -> Rows:
    """Every method at every ratio."""
    rows: Rows = {}
    ratios = plan.sizes.ratios
    num_steps = recipe.stage1.steps + recipe.stage2.steps
    plan.add_run(_STAGE1_ALONE, f"stage1.steps={num_steps}", method=_STAGE1_ALONE, ratios=ratios)
    plan.add_run("multiple-1", _ANY_WIDTH, ratios=ratios)
    for label, run in ((MAIN, MAIN), (UNALIGNED, "multiple-1"), (_STAGE1_ALONE, _STAGE1_ALONE)):
        rows |= {(label, ratio): (Entry(run, ratio, run=run),) for ratio in ratios}
    for method in _STATIC_METHODS:
        for budget in ("uniform", "global"):
            run, overrides = f"{method}-{budget}", (f"budget={budget}", _ANY_WIDTH)
            plan.add_run(run, *overrides, method=method, ratios=ratios)
            for ratio in ratios:
                entry = Entry(method, ratio, f"{budget} budget", run)
                rows[method, ratio] = (*rows.get((method, ratio), ()), entry)
    for method in _HEAD_METHODS:
        # The combined method removes this share of heads before it looks at channels.
        above = [ratio for ratio in ratios if method != _COMBINED or ratio >= recipe.heads.pruning_ratio]
        plan.add_run(method, method=method, ratios=above)
        rows |= {(method, ratio): (Entry(method, ratio, run=method),) for ratio in above}
    for method, widths in (("think", None), ("per-head-budget-dynamic", MAIN)):
        for ratio in ratios:
            settings = (("the recipe's windows", False), ("ThinK's windows", True))
            rows[method, ratio] = tuple(
                Entry(method, ratio, setting, widths, dynamic=True, own_windows=own)
                for setting, own in settings
            )
    return rows


def _add_ablations(plan: Plan, recipe: Recipe) -> None:
    """LeanK's parts and settings, one changed at a time."""
    sizes, compared = plan.sizes, plan.tables["comparison"].rows
    uniform = plan.add_run("uniform-budget", "budget=uniform", _ANY_WIDTH)
    weights, multiples = {recipe.stage1.l1_weight: MAIN}, {1: "multiple-1", recipe.width_multiple: MAIN}
    for weight in sizes.l1_weights:
        if weight not in weights:
            weights[weight] = plan.add_run(f"lambda-{weight:g}", f"stage1.l1_weight={weight}")
    for multiple in sizes.width_multiples:
        if multiple not in multiples:
            multiples[multiple] = plan.add_run(f"multiple-{multiple}", f"width_multiple={multiple}")
    tasks = {
        label: plan.add_run(f"tasks-{'-'.join(trained)}", f"data.tasks=[{', '.join(trained)}]")
        for label, trained in name_choices(sizes).items()
    }
    lengths = {
        length: plan.add_run(f"up-to-{length}", f"data.max_length={length}") for length in sizes.short_lengths
    }
    lengths[recipe.data.max_length] = MAIN
    others = range(recipe.seed + 1, recipe.seed + sizes.num_seeds)
    seeds = {recipe.seed: MAIN} | {seed: plan.add_run(f"seed-{seed}", f"seed={seed}") for seed in others}

    plan.add_ablation(
        "stage2",
        "With and without stage 2, at equal steps",
        {"both stages": MAIN, "stage 1 alone": _STAGE1_ALONE},
    )
    budgets: Rows = {}
    for ratio in (sizes.main_ratio, sizes.hard_ratio):
        budgets["uniform budget, dynamic channels (ThinK)", ratio] = compared["think", ratio]
        budgets["uniform budget, learned channels", ratio] = (Entry(uniform, ratio, run=uniform),)
        budgets["learned budget, dynamic channels", ratio] = compared["per-head-budget-dynamic", ratio]
        budgets["learned budget, learned channels (LeanK)", ratio] = compared[MAIN, ratio]
    plan.tables["budget"] = Table("Budgets per head, and learned against dynamic channels", budgets)
    plan.add_ablation(
        "lambda",
        "Lambda, the weight of the L1 penalty in stage 1",
        {f"{weight:g}": run for weight, run in sorted(weights.items())},
    )
    plan.add_ablation(
        "multiple",
        "Width multiple, which a head's kept channels are a multiple of",
        {f"{multiple}": run for multiple, run in sorted(multiples.items())},
    )
    plan.add_ablation("tasks", "Training tasks", tasks | {_name_tasks(recipe.data.tasks): MAIN})
    plan.add_ablation(
        "length",
        "Training lengths",
        {f"contexts up to {length} tokens": run for length, run in lengths.items()},
    )
    plan.add_ablation("seeds", "Training seeds", {f"seed {seed}": run for seed, run in seeds.items()})
    heads, both = sizes.head_ratio, sizes.combined_ratio
    plan.tables["heads"] = Table(
        "Whole heads, and channels of the rest",
        {
            ("high-frequency ratio", heads): compared["high-frequency-ratio", heads],
            ("DuoAttention", heads): compared["duo-attention", heads],
            ("DuoAttention + LeanK", both): compared[_COMBINED, both],
            ("LeanK", both): compared[MAIN, both],
        },
    )


def list_cells(sizes: Sizes, recipe: Recipe, lengths: Sequence[int]) -> tuple[Cell, ...]:
    """Tasks at lengths that settings are chosen on, or the tables are filled by."""
    tasks = sizes.ruler or [(task, None) for task in recipe.data.tasks]
    return tuple(Cell(task, length, most) for length in lengths for task, most in tasks)


def name_choices(sizes: Sizes) -> dict[str, tuple[str, ...]]:
    """By label, the tasks of runs that train on fewer than the main setting does."""
    return {f"{_name_tasks(tasks)}{' alone' * (len(tasks) == 1)}": tasks for tasks in sizes.task_choices}


def _name_tasks(tasks: Sequence[str]) -> str:
    return "all three" if len(tasks) == 3 else " and ".join(tasks)
