"""The paper's experiments: every method at every ratio and LeanK's parts, on the shipped model or SmolLM2."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from bin.reproduction.plan import (
    DENSE,
    EVERY_CHANNEL,
    FLOOR,
    GATES,
    MAIN,
    MAIN_RATIO,
    NO_SAMPLES,
    VALIDATION,
    Cell,
    Entry,
    Part,
    Plan,
    Round,
    Row,
    Run,
    Table,
    TextPlan,
    by_name,
    singles,
)
from leank_convert.evaluate.ruler.synthetic import NEEDLE_TASKS
from leank_convert.methods import METHODS
from leank_convert.recipe import Recipe
from leank_convert.recipe_file import load_recipe

UNALIGNED = "leank (any width)"
"""The curve that meets the baselines on their terms: few channels in whole multiples are few heads."""
# Apart from each other and from the seeds of training, which are small.
_VALIDATION_SEED, _TEST_SEED, _RULER_SEED, _COMPARED_SEED = 2_000_000, 3_000_000, 5_000_000, 6_000_000
# Baselines are not held to a width multiple that they do not need: of 64 channels each, a uniform budget of
# 30% would be cut from 19 to 16.
_ANY_WIDTH = "width_multiple=1"
_STAGE1_ALONE, _MULTIPLE_1 = "magnitude-alpha", "multiple-1"
_COMBINED = "duo-attention+leank"
_PER_HEAD_BUDGET = "per-head-budget-dynamic"
_HEAD_METHODS = tuple(m.name for m in METHODS.values() if m.whole_heads or m.has_gates)
_STATIC_METHODS = tuple(m.name for m in METHODS.values() if m.score and not m.whole_heads)
_UNTRAINED = ("static-norm", "double-sparsity")  # of these the best stands beside LeanK on a real model
_SHOWN = (MAIN_RATIO, 0.9)  # of the ablations; at the second differences are large
# Variants of `evaluate --also` whose scores stand beside their caches' bytes, alone and on LeanK's channels.
_ALONE = (
    "fp8", "int4", "int4+hadamard", "kivi", "quest-16", "quest-16-kv", "quest-64", "quest-64-kv",
    "snapkv-2048", "snapkv-56%",
)  # fmt: skip
_PRODUCTS = (
    "leank+fp8", "leank+int4", "leank+int4+hadamard", "leank+kivi", "leank+kivi+window", "leank+quest-16",
    "leank+quest-16-kv", "leank+quest-64", "leank+quest-64-kv",
)  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """How much is done."""

    model: str = "the shipped model"  # in the title
    recipe: str = "quickstart"  # name or file of the recipe that every run changes
    overrides: tuple[str, ...] = ()  # changes to it that all runs share
    # Of the comparison, ascending, 0.7 and 0.9 among them.
    ratios: tuple[float, ...] = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)  # fmt: skip
    num_seeds: int = 5  # runs of the main setting
    l1_weights: tuple[float, ...] = (0.0, 0.04, 0.06, 0.1, 1.0)  # of the sweep, beside the main setting's
    width_multiples: tuple[int, ...] = (8, 32)  # beside the main setting's
    # Tasks of runs that train on fewer than the main setting does.
    task_choices: tuple[str, ...] = ("retrieval", "multi_value", "retrieval, multi_value")
    short_lengths: tuple[int, ...] = (1024,)  # the longest context of runs that are then asked longer ones
    # Of the test prompts of a real model: RULER's tasks with the most tokens of an answer. None: those of the
    # recipe, for the shipped model, which knows no language.
    ruler: tuple[tuple[str, int], ...] = ()
    lengths: tuple[int, ...] = (256, 512, 1024, 2048)  # of the test prompts, in tokens
    num_prompts: int = 200  # test prompts of each task and length
    num_validation: int = 48  # prompts of each task and length that settings are chosen on
    validation_lengths: tuple[int, ...] = ()  # of these prompts; none: all lengths
    batch_tokens: int = 2**20

    def shrink(self) -> Sizes:
        """As few masks as each table can do with."""
        return replace(
            self,
            ratios=_SHOWN,
            l1_weights=(),
            num_seeds=1,
            width_multiples=(),
            task_choices=self.task_choices[:1],
            short_lengths=self.short_lengths[:1],
        )


ON_GPU = Sizes()
ON_CPU = Sizes(num_seeds=2, l1_weights=(0.0, 0.06, 1.0), num_prompts=24, num_validation=8, batch_tokens=2**14)
SMOLLM2 = Sizes(
    model="SmolLM2-135M-Instruct",
    recipe="smollm2-135m-instruct",
    overrides=GATES,
    ratios=(0.5, 0.6, 0.7, 0.8, 0.9),
    num_seeds=2,
    l1_weights=(0.06, 0.2, 0.4),
    width_multiples=(32,),
    task_choices=("retrieval", "multi_value"),
    short_lengths=(2048, 4096),
    # The dense model copies no code of 24 hexadecimal digits, as the recipe's own task asks for. A number
    # takes 8 tokens, and it ends only some of its answers.
    ruler=(("niah_single_2", 24), ("niah_multikey_1", 24), ("niah_multivalue", 64)),
    lengths=(1024, 2048, 4096, 7680),
    num_prompts=64,
    validation_lengths=(1024, 4096),
)
_TEXT = TextPlan((4096,), num_fed=256, num_texts=16, answer_tokens=512, num_answers=24)


def make_paper_plan(sizes: Sizes, packaged: bool = False) -> Plan:
    """Lay out all experiments; the main masks may be the package's."""
    recipe = load_recipe(sizes.recipe, sizes.overrides)
    tables = _Tables(sizes, recipe)
    compared = tables.compare_methods()
    tables.add_ablations(compared)
    rows = tuple(dict.fromkeys(row for table in tables.tables for _, row in table.rows))
    open_rows = singles(dict.fromkeys(entry for row in rows if len(row) > 1 for entry in row))
    validation = _list_cells(sizes, recipe, sizes.validation_lengths or sizes.lengths)
    test = _list_cells(sizes, recipe, sizes.lengths)
    chosen = Round(sizes.num_validation, ((DENSE,), *open_rows))
    shown = Round(sizes.num_prompts, ((DENSE,), *rows))
    plan = Plan(
        title=f"The LeanK paper's experiments on {sizes.model}",
        recipe=sizes.recipe,
        overrides=sizes.overrides,
        runs=tables.runs,
        parts=(
            Part(VALIDATION, _VALIDATION_SEED, validation, (chosen,)),
            Part("test", _TEST_SEED, test, (shown,)),
        ),
        tables=tuple(tables.tables),
        batch_tokens=sizes.batch_tokens,
        pairs=tuple((compared["static-norm", ratio], compared["think", ratio]) for ratio in _SHOWN),
        packaged=(MAIN,) if packaged else (),
    )
    return _add_real(plan, sizes, compared, recipe) if sizes.ruler else plan


def _add_real(plan: Plan, sizes: Sizes, compared: Mapping[tuple[str, float], Row], recipe: Recipe) -> Plan:
    """What only a model of natural language can be asked."""
    curve = tuple(compared[MAIN, ratio][0] for ratio in sizes.ratios)
    main = compared[MAIN, MAIN_RATIO][0]
    untrained = tuple(entry for name in _UNTRAINED for entry in compared[name, MAIN_RATIO])
    think = compared["think", MAIN_RATIO]
    others = (*singles(curve), untrained, think)
    labelled = (*by_name(curve), ("best untrained channels", untrained), ("think", think))
    beside = (
        *(Entry(name, "beside") for name in _ALONE),
        *(Entry(name, "beside", MAIN_RATIO, MAIN) for name in _PRODUCTS),
    )
    weighed = (*curve, *beside)
    # The dense model alone, then all others too, then it and the main mask.
    rounds = Round(16, ((DENSE,),)), Round(64, ((DENSE,), *others)), Round(200, singles([DENSE, main]))
    tasks = (*NEEDLE_TASKS, "vt", "cwe", "fwe")
    ruled = tuple(Cell(task, length) for length in sizes.lengths for task in tasks)
    compared_on = _list_cells(sizes, recipe, (4096, 7680))
    asked = Round(64, singles([DENSE, *weighed]))
    return replace(
        plan,
        parts=(
            *plan.parts,
            Part("ruler", _RULER_SEED, ruled, rounds, FLOOR),
            Part("compared", _COMPARED_SEED, compared_on, (asked,)),
        ),
        tables=(Table("RULER's tasks", "ruler", labelled), *plan.tables),
        text=_TEXT._replace(rows=(*others, *singles(beside)), answering=((DENSE,), *others)),
        weighed=(DENSE, *weighed),
        weighed_on="compared",
    )


@dataclass
class _Tables:
    """Runs, and tables of their masks, as they are laid out."""

    sizes: Sizes
    recipe: Recipe
    runs: dict[str, Run] = field(default_factory=dict)
    tables: list[Table] = field(default_factory=list)

    def add_run(
        self, name: str, *overrides: str, method: str = MAIN, ratios: Sequence[float] | None = None
    ) -> str:
        """Note masks that are needed, at the two shown ratios if no other are given; returns `name`."""
        assert name not in self.runs, name
        asked = tuple(ratios or _SHOWN)
        self.runs[name] = Run((NO_SAMPLES, f"method={method}", *overrides), asked)
        return name

    def compare_methods(self) -> dict[tuple[str, float], Row]:
        """Add every method at every ratio; returns its rows."""
        recipe, ratios = self.recipe, self.sizes.ratios
        self.runs[MAIN] = Run((), ratios)
        num_steps = f"stage1.steps={recipe.stage1.steps + recipe.stage2.steps}"
        # The run of each of a method's settings.
        taken = {
            MAIN: {"": MAIN},
            UNALIGNED: {"": self.add_run(_MULTIPLE_1, _ANY_WIDTH, ratios=ratios)},
            _STAGE1_ALONE: {"": self.add_run(_STAGE1_ALONE, num_steps, method=_STAGE1_ALONE, ratios=ratios)},
        }
        for method in _STATIC_METHODS:
            taken[method] = {
                f"{budget} budget": self.add_run(
                    f"{method}-{budget}", f"budget={budget}", _ANY_WIDTH, method=method, ratios=ratios
                )
                for budget in ("uniform", "global")
            }
        for method in _HEAD_METHODS:
            # The combined method removes this share of heads before it looks at channels.
            above = [ratio for ratio in ratios if method != _COMBINED or ratio >= recipe.heads.pruning_ratio]
            taken[method] = {"": self.add_run(method, method=method, ratios=above)}
        rows: dict[tuple[str, float], Row] = {
            (label, ratio): tuple(_take(run, ratio, setting) for setting, run in settings.items())
            for label, settings in taken.items()
            for ratio in ratios
            if all(ratio in self.runs[run].ratios for run in settings.values())
        }
        windows = (("the recipe's windows", False), ("ThinK's windows", True))
        for method, widths in (("think", None), (_PER_HEAD_BUDGET, MAIN)):
            for ratio in ratios:
                rows[method, ratio] = tuple(
                    Entry(f"{method}, {setting}, {ratio:g}", "think", ratio, widths, setting, own)
                    for setting, own in windows
                )
        self._add("Pruning ratio against accuracy", ((label, row) for (label, _), row in rows.items()))
        return rows

    def add_ablations(self, compared: Mapping[tuple[str, float], Row]) -> None:
        """Add LeanK's parts and settings, one changed at a time, at the two shown ratios."""
        sizes, seed = self.sizes, self.recipe.seed
        runs = {
            "the recipe": MAIN,
            "stage 1 alone, as many steps": _STAGE1_ALONE,
            "every head alike": self.add_run("uniform-budget", "budget=uniform", _ANY_WIDTH),
            "any width": _MULTIPLE_1,
        }
        sweeps: tuple[tuple[str, str, Iterable[object]], ...] = (
            ("lambda {}", "stage1.l1_weight={}", sizes.l1_weights),
            ("widths of {}", "width_multiple={}", sizes.width_multiples),
            ("trained on {}", "data.tasks=[{}]", sizes.task_choices),
            ("contexts of at most {} tokens", "data.max_length={}", sizes.short_lengths),
            ("seed {}", "seed={}", range(seed + 1, seed + sizes.num_seeds)),
        )
        for label, override, values in sweeps:
            for value in values:
                runs[label.format(value)] = self.add_run(label.format(value), override.format(value))
        rows: list[tuple[str, Row]] = []
        for ratio in _SHOWN:
            rows += [(label, (_take(run, ratio),)) for label, run in runs.items()]
            rows.append(("the recipe's widths, channels of each prompt", compared[_PER_HEAD_BUDGET, ratio]))
        self._add("Parts and settings, one changed at a time", rows)

    def _add(self, title: str, rows: Iterable[tuple[str, Row]]) -> None:
        self.tables.append(Table(title, "test", tuple(rows)))


def _take(run: str, ratio: float, setting: str = "") -> Entry:
    assert ratio != EVERY_CHANNEL
    return Entry(f"{run}, {ratio:g}", ratio=ratio, run=run, setting=setting)


def _list_cells(sizes: Sizes, recipe: Recipe, lengths: Sequence[int]) -> tuple[Cell, ...]:
    """Tasks at lengths that settings are chosen on, or the tables are filled by."""
    tasks = sizes.ruler or [(task, None) for task in recipe.data.tasks]
    return tuple(Cell(task, length, most) for length in lengths for task, most in tasks)
