"""What is made and measured: masks to train, ways to prune, tables to fill. Data alone; nothing runs here.

A way to prune that has several settings (budget, windows) enters a table as the one of them that did best on
validation prompts: no baseline is shown below its best.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from leank_convert.recipe import Recipe

_MAIN = "leank"
UNALIGNED = "leank (any width)"
"""The curve that meets the baselines on their terms: few channels in whole multiples are few heads."""

# Baselines are not held to a width multiple that they do not need: of 64 channels each, a uniform budget of
# 30% would be cut from 19 to 16.
_ANY_WIDTH = "width_multiple=1"
TASK_CHOICES: dict[str, tuple[str, ...]] = {
    "retrieval alone": ("retrieval",),
    "multi_value alone": ("multi_value",),
    "retrieval and multi_value": ("retrieval", "multi_value"),
}
"""By label, the tasks of runs that train on fewer than the main setting does."""
_COMBINED = "duo-attention+leank"
_HEAD_METHODS = ("high-frequency-ratio", "duo-attention", _COMBINED)
_STATIC_METHODS = ("static-norm", "double-sparsity", "random")


@dataclass(frozen=True)
class Sizes:
    """How much is done.

    Attributes:
        recipe: Name or file of the recipe that every run changes.
        overrides: Changes to it that all runs share.
        ratios: Pruning ratios of the comparison, ascending.
        main_ratio: The one that all tables show.
        hard_ratio: Another, where differences are large.
        head_ratio: Where methods that prune whole heads are compared with one another.
        combined_ratio: Where LeanK on top of DuoAttention is compared with DuoAttention at `head_ratio`.
        num_seeds: Runs of the main setting.
        l1_weights: Of the sweep, the main setting's left out.
        width_multiples: Beside the main setting's.
        short_length: The longest context of the run that is then asked longer ones.
        lengths: Of the test prompts, in tokens.
        num_prompts: Test prompts of each task and length.
        num_validation: Prompts of each task and length that settings are chosen on.
        batch_size: Prompts answered together.
    """

    recipe: str = "quickstart"
    overrides: tuple[str, ...] = ()
    ratios: tuple[float, ...] = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
    main_ratio: float = 0.7
    hard_ratio: float = 0.9
    head_ratio: float = 0.5
    combined_ratio: float = 0.8
    num_seeds: int = 5
    l1_weights: tuple[float, ...] = (0.0, 0.04, 0.06, 0.1, 1.0)
    width_multiples: tuple[int, ...] = (8, 32)
    short_length: int = 1024
    lengths: tuple[int, ...] = (256, 512, 1024, 2048)
    num_prompts: int = 200
    num_validation: int = 48
    batch_size: int = 300


ON_GPU = Sizes()
ON_CPU = Sizes(
    num_seeds=2,
    l1_weights=(0.0, 0.06, 1.0),
    num_prompts=24,
    num_validation=8,
    batch_size=12,
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
    short_length=300,
    lengths=(256, 384),
    num_prompts=2,
    num_validation=1,
    batch_size=2,
)  # fmt: skip


@dataclass(frozen=True)
class MaskRun:
    """One call of `make_masks`.

    Attributes:
        name: Its folder.
        overrides: Changes to the recipe, as `--set` takes them.
        ratios: The pruning ratios whose masks it leaves.
    """

    name: str
    overrides: tuple[str, ...]
    ratios: tuple[float, ...]


@dataclass(frozen=True)
class Entry:
    """One way to prune at one ratio.

    Attributes:
        method: Its name in the comparison; of an ablation, its run's.
        ratio: The pruning ratio that was asked for.
        setting: Which of the method's settings; "" where there is one.
        run: Whose mask is taken, or whose widths; None where every head keeps as many channels.
        dynamic: Whether ThinK's rule chooses channels for every prompt, in place of the mask.
        own_windows: Whether ThinK's own window sizes replace the recipe's.
    """

    method: str
    ratio: float
    setting: str = ""
    run: str | None = None
    dynamic: bool = False
    own_windows: bool = False

    @property
    def name(self) -> str:
        """The entry in one word, unlike all others'."""
        return ", ".join(filter(None, (self.method, self.setting, f"{self.ratio:g}")))


@dataclass(frozen=True)
class Row:
    """A line of a table, or a point of a curve.

    Attributes:
        label: What it is called.
        candidates: What is shown: of several, the one that is best on validation prompts.
    """

    label: str
    candidates: tuple[Entry, ...]


@dataclass(frozen=True)
class Table:
    """Rows that are compared with one another.

    Attributes:
        name: One word.
        title: A heading.
        rows: Of ablations at the main ratio and, below, at the hard one.
    """

    name: str
    title: str
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Curve:
    """A method over the pruning ratios.

    Attributes:
        method: Its name.
        points: By the ratio that was asked for.
    """

    method: str
    points: dict[float, Row]


@dataclass(frozen=True)
class Plan:
    """Everything that is made and measured.

    Attributes:
        sizes: How much of it.
        curves: The comparison over the ratios.
        tables: What is compared beside that.
        runs: Masks, in the order they are made.
    """

    sizes: Sizes
    curves: tuple[Curve, ...]
    tables: tuple[Table, ...]
    runs: tuple[MaskRun, ...]

    def rows(self) -> list[Row]:
        """All points and rows."""
        points = [row for curve in self.curves for row in curve.points.values()]
        return points + [row for table in self.tables for row in table.rows]


def make_plan(sizes: Sizes, recipe: Recipe) -> Plan:
    """Lay out all experiments.

    Args:
        sizes: How much is done.
        recipe: The main setting.
    """
    planner = _Planner(sizes, recipe)
    curves = planner.plan_curves()
    return Plan(sizes, tuple(curves), planner.plan_tables(curves), tuple(planner.runs))


class _Planner:
    """Lays out experiments, and notes the masks that they need."""

    def __init__(self, sizes: Sizes, recipe: Recipe) -> None:
        self.runs = [MaskRun(_MAIN, (), sizes.ratios)]
        self._sizes = sizes
        self._recipe = recipe
        self._shown = (sizes.main_ratio, sizes.hard_ratio)

    def plan_curves(self) -> list[Curve]:
        """Every method over the ratios."""
        num_steps = self._recipe.stage1.steps + self._recipe.stage2.steps
        stage1_alone = self._add("magnitude-alpha", f"stage1.steps={num_steps}", method="magnitude-alpha")
        share = self._recipe.heads.pruning_ratio  # of heads that the combined method removes before channels
        ratios = self._sizes.ratios
        unaligned = self._add("multiple-1", _ANY_WIDTH)
        curves = [
            _group(_MAIN, [Entry(_MAIN, ratio, run=_MAIN) for ratio in ratios]),
            _group(UNALIGNED, [Entry(unaligned, ratio, run=unaligned) for ratio in ratios]),
            _group(
                "magnitude-alpha", [Entry("magnitude-alpha", ratio, run=stage1_alone) for ratio in ratios]
            ),
        ]
        for method in _STATIC_METHODS:
            made = {
                budget: self._add(f"{method}-{budget}", f"budget={budget}", _ANY_WIDTH, method=method)
                for budget in ("uniform", "global")
            }
            entries = [
                Entry(method, ratio, f"{budget} budget", run)
                for ratio in ratios
                for budget, run in made.items()
            ]
            curves.append(_group(method, entries))
        for method in _HEAD_METHODS:
            above = [ratio for ratio in ratios if method != _COMBINED or ratio >= share]
            run = self._add(method, method=method, ratios=above)
            curves.append(_group(method, [Entry(method, ratio, run=run) for ratio in above]))
        for method, widths in (("think", None), ("per-head-budget-dynamic", _MAIN)):
            entries = [
                Entry(method, ratio, setting, widths, dynamic=True, own_windows=own)
                for ratio in ratios
                for setting, own in (("the recipe's windows", False), ("ThinK's windows", True))
            ]
            curves.append(_group(method, entries))
        return curves

    def plan_tables(self, curves: Sequence[Curve]) -> tuple[Table, ...]:
        """The ablations, and what is compared with them."""
        sizes, recipe = self._sizes, self._recipe
        points = {curve.method: curve.points for curve in curves}
        shown = self._shown
        heads, combined = sizes.head_ratio, sizes.combined_ratio

        def add(name: str, *overrides: str) -> str:
            return self._add(name, *overrides, ratios=shown)

        def table(name: str, title: str, runs: Sequence[tuple[str, str]]) -> Table:
            rows = (Row(label, (Entry(run, ratio, run=run),)) for ratio in shown for label, run in runs)
            return Table(name, title, tuple(rows))

        uniform = add("uniform-budget", "budget=uniform", _ANY_WIDTH)
        budget_rows = tuple(
            row
            for ratio in shown
            for row in (
                Row("uniform budget, dynamic channels (ThinK)", points["think"][ratio].candidates),
                Row("uniform budget, learned channels", (Entry(uniform, ratio, run=uniform),)),
                Row("learned budget, dynamic channels", points["per-head-budget-dynamic"][ratio].candidates),
                Row("learned budget, learned channels (LeanK)", points[_MAIN][ratio].candidates),
            )
        )
        weights = {w: add(f"lambda-{w:g}", f"stage1.l1_weight={w}") for w in sizes.l1_weights}
        weights[recipe.stage1.l1_weight] = _MAIN
        multiples = {r: add(f"multiple-{r}", f"width_multiple={r}") for r in sizes.width_multiples}
        multiples |= {1: "multiple-1", recipe.width_multiple: _MAIN}
        tasks = [
            (label, add(f"tasks-{'-'.join(trained)}", f"data.tasks=[{', '.join(trained)}]"))
            for label, trained in TASK_CHOICES.items()
        ]
        tasks.append(("all three", _MAIN))
        short = sizes.short_length
        lengths = [
            (f"contexts up to {short} tokens", add("short", f"data.max_length={short}")),
            (f"contexts up to {recipe.data.max_length} tokens", _MAIN),
        ]
        others = range(recipe.seed + 1, recipe.seed + sizes.num_seeds)
        seeds = [(f"seed {recipe.seed}", _MAIN)]
        seeds += [(f"seed {seed}", add(f"seed-{seed}", f"seed={seed}")) for seed in others]
        return (
            table(
                "stage2",
                "With and without stage 2, at equal steps",
                [("both stages", _MAIN), ("stage 1 alone", "magnitude-alpha")],
            ),
            Table("budget", "Budgets per head, and learned against dynamic channels", budget_rows),
            table(
                "lambda",
                "Lambda, the weight of the L1 penalty in stage 1",
                [(f"{weight:g}", run) for weight, run in sorted(weights.items())],
            ),
            table(
                "multiple",
                "Width multiple, which a head's kept channels are a multiple of",
                [(f"{multiple}", run) for multiple, run in sorted(multiples.items())],
            ),
            table("tasks", "Training tasks", tasks),
            table("length", "Training lengths", lengths),
            table("seeds", "Training seeds", seeds),
            Table(
                "heads",
                "Whole heads, and channels of the rest",
                (
                    Row("high-frequency ratio", points["high-frequency-ratio"][heads].candidates),
                    Row("DuoAttention", points["duo-attention"][heads].candidates),
                    Row("DuoAttention + LeanK", points[_COMBINED][combined].candidates),
                    Row("LeanK", points[_MAIN][combined].candidates),
                ),
            ),
        )

    def _add(
        self, name: str, *overrides: str, method: str = _MAIN, ratios: Sequence[float] | None = None
    ) -> str:
        """Note a mask that is needed."""
        chosen = self._sizes.ratios if ratios is None else ratios
        self.runs.append(MaskRun(name, (f"method={method}", *overrides), tuple(chosen)))
        return name


def _group(method: str, entries: Sequence[Entry]) -> Curve:
    ratios = dict.fromkeys(entry.ratio for entry in entries)
    return Curve(
        method,
        {ratio: Row(method, tuple(e for e in entries if e.ratio == ratio)) for ratio in ratios},
    )
