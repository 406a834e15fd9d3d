"""Pruned V on real models, beside K by the package's masks: answers and text, and what fewer bits cost.

The basis of V is measured on the recipe's tasks and on Python's documentation, as an export does it: of the
texts, the documentation is what it has seen. The dense model is the folded one.
"""

from __future__ import annotations

from bin.reproduction.centred_plan import HEADS, RULER_SEED, TEXT, RulerSizes
from bin.reproduction.plan import (
    DENSE,
    MAIN,
    SHORT,
    Cell,
    Entry,
    Pace,
    Part,
    Plan,
    Round,
    Run,
    Table,
    TextPlan,
    by_name,
    singles,
)

QWEN = RulerSizes()
SMOLLM2 = RulerSizes(
    recipe="smollm2-135m-instruct",
    lengths=(1024, 2048, 4096, 7680),
    text=TEXT._replace(lengths=(1600, 4000)),
    batch_tokens=2**18,
)
QUICK = RulerSizes(
    recipe=SMOLLM2.recipe,
    overrides=SHORT,
    gate_overrides=("heads.steps=2",),
    tasks=("niah_single_2",),
    lengths=(448,),
    rounds=(1, 2),
    text=TextPlan((300,), num_fed=4, num_texts=2),
    batch_tokens=1024,
)


def make_values_plan(sizes: RulerSizes, packaged: bool = True) -> Plan:
    """Lay out all that answers and what it is asked; masks of K are the package's."""

    def prune(keys: float, values: float, **changes: str) -> Entry:
        rounded = f" x {changes['kv_dtype']}" if changes else ""
        name = f"K {keys:.0%}, V {values:.0%}{rounded}"
        return Entry(name, ratio=keys, run=MAIN, values=values, **changes)  # type: ignore[arg-type]

    main = [prune(0.7, 0.5), prune(0.7, 0.5, kv_dtype="fp8"), prune(0.8, 0.6)]
    further = [prune(0.7, 0.6), prune(0.7, 0.7), prune(0.8, 0.5), prune(0.0, 0.25), prune(0.0, 0.5)]
    cells = tuple(
        Cell(task, length) for length in sorted(sizes.lengths, reverse=True) for task in sizes.tasks
    )
    heads = Entry(HEADS, ratio=0.7, run=HEADS)
    first, *later = sizes.rounds
    rounds = (
        Round(first, singles([DENSE, *main, heads])),
        *(Round(count, singles([DENSE, *main])) for count in later),
    )
    return Plan(
        title=f"Pruned V by {sizes.recipe}",
        recipe=sizes.recipe,
        overrides=sizes.overrides,
        runs={MAIN: Run((), (0.7, 0.8)), HEADS: sizes.train_gates()},
        parts=(Part("ruler", RULER_SEED, cells, rounds, 0.2),),
        tables=(Table("RULER's tasks", "ruler", by_name([*main, heads])),),
        batch_tokens=sizes.batch_tokens,
        pace=Pace(mask=20, prefill=0.007, answer=0.05, slow=0.3, text=1.5),
        text=sizes.text._replace(rows=singles([*main, *further, heads])),
        has_basis=True,
        has_scales=True,
        packaged=(MAIN,),
    )
