"""Plans of real models: centred keys on Qwen2.5-Coder, and V pruned beside K, in answers and on text."""

from __future__ import annotations

from dataclasses import dataclass

from bin.reproduction.fetch_texts import LEARNED_ON
from bin.reproduction.plan import (
    DENSE,
    GATES,
    MAIN,
    SHORT,
    Cell,
    Entry,
    Part,
    Plan,
    Round,
    Run,
    Table,
    TextPlan,
    by_name,
    singles,
)

_RULER_SEED, _OTHERS_SEED = 7_000_000, 8_000_000
_FLOOR = 0.2  # of the dense model's score in a cell that counts, as of SmolLM2
_NO_SAMPLES = "held_out_samples=0"
_ROUNDS_BEFORE_OTHERS = 1
_WIDE_LAMBDA, _WIDE = 0.2, "larger-lambda"
_HEADS = "duo-attention"
_TEXT = TextPlan((4000, 12000), num_fed=128, num_texts=6)
_VALUES_TEXT = _TEXT._replace(learned_on=LEARNED_ON)


@dataclass(frozen=True)
class RulerSizes:
    """How much a real model is asked, of RULER's tasks and of text, and what its masks are made by."""

    recipe: str = "qwen2.5-coder-1.5b-instruct"
    overrides: tuple[str, ...] = ()
    gate_overrides: tuple[str, ...] = ()  # of the run that trains gates of heads
    tasks: tuple[str, ...] = (
        "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2", "niah_multivalue",
        "niah_multiquery", "vt", "fwe",
    )  # fmt: skip
    lengths: tuple[int, ...] = (4096, 8192, 16384, 32768)
    rounds: tuple[int, ...] = (32, 64, 100)  # prompts of a cell that are answered by then
    text: TextPlan = _TEXT
    batch_tokens: int = 2**17

    def train_gates(self) -> Run:
        """A run of DuoAttention."""
        return Run((f"method={_HEADS}", *GATES, *self.gate_overrides, _NO_SAMPLES), (0.7,))


@dataclass(frozen=True)
class CentredSizes(RulerSizes):
    """How much is done."""

    ratios: tuple[float, ...] = (0.5, 0.6, 0.7, 0.8)
    wide_ratios: tuple[float, ...] = (0.7, 0.8, 0.9)  # of the larger lambda
    # Of the prompts of a round, by caches in int4, which no kernels read: by length, whole batches.
    most_int4: tuple[tuple[int, int], ...] = ((4096, 32), (8192, 32), (16384, 16), (32768, 8))
    other_tasks: tuple[str, ...] = ("niah_single_2", "niah_multikey_1", "niah_multivalue")
    other_lengths: tuple[int, ...] = (8192, 16384)
    num_others: int = 32


CENTRED = CentredSizes(text=_TEXT._replace(answer_tokens=512, num_answers=24), batch_tokens=2**18)
QUICK_CENTRED = CentredSizes(
    overrides=(
        *SHORT, "stage1.steps=2", "stage2.steps=1", "stage2.validation_contexts=0", "calibration_prompts=1",
        "held_out_samples=1",
    ),
    gate_overrides=("heads.steps=2",),
    ratios=(0.7, 0.8),
    wide_ratios=(0.9,),
    tasks=("niah_single_2", "fwe"),
    lengths=(448,),
    rounds=(1, 2),
    other_tasks=("niah_single_2",),
    other_lengths=(448,),
    num_others=1,
    text=TextPlan((300,), num_fed=4, num_texts=2, answer_tokens=8, num_answers=2),
    batch_tokens=1024,
)  # fmt: skip
VALUES = {
    "qwen2.5-coder": RulerSizes(text=_VALUES_TEXT),
    "smollm2": RulerSizes(
        recipe="smollm2-135m-instruct",
        lengths=(1024, 2048, 4096, 7680),
        text=_VALUES_TEXT._replace(lengths=(1600, 4000)),
        batch_tokens=2**18,
    ),
}
QUICK_VALUES = RulerSizes(
    overrides=SHORT,
    gate_overrides=("heads.steps=2",),
    tasks=("niah_single_2",),
    lengths=(448,),
    rounds=(1, 2),
    text=TextPlan((300,), num_fed=4, num_texts=2),
    batch_tokens=1024,
)


def make_centred_plan(sizes: CentredSizes, packaged: bool = False) -> Plan:
    """Lay out centred keys and keys as they are, of a model whose keys have large constant parts.

    Masks of 50 to 80% come from one training, that of 90% from one with a larger lambda; they may be the
    package's.
    """
    wide_ratios = sizes.wide_ratios
    if packaged:  # which has one mask a ratio, and the main run has it already
        wide_ratios = tuple(ratio for ratio in wide_ratios if ratio not in sizes.ratios)
    runs = {MAIN: Run((), sizes.ratios), _WIDE: Run((f"stage1.l1_weight={_WIDE_LAMBDA}",), wide_ratios)}
    for method in ("static-norm", "double-sparsity"):
        for centred in ("true", "false"):
            settings = (f"method={method}", "width_multiple=1", f"key_mean={centred}", _NO_SAMPLES)
            runs[f"{method}-{centred}"] = Run(settings, (0.7,))
    runs[_HEADS] = sizes.train_gates()

    def take(name: str, ratio: float = 0.7, run: str = MAIN, **changes: str) -> Entry:
        return Entry(name, ratio=ratio, run=run, **changes)  # type: ignore[arg-type]

    def keep(name: str, kv_dtype: str, **changes: str) -> Entry:
        return Entry(name, run=MAIN, kv_dtype=kv_dtype, **changes)  # type: ignore[arg-type]

    curve = [take(f"leank {ratio:.0%}", ratio) for ratio in sizes.ratios]
    wide = [take(f"leank {ratio:.0%}, lambda {_WIDE_LAMBDA}", ratio, _WIDE) for ratio in wide_ratios]
    rounded = [
        keep("fp8", "fp8"),
        take("leank 70% x fp8", kv_dtype="fp8"),
        keep("int4", "int4"),
        take("leank 70% x int4", kv_dtype="int4"),
    ]
    masked = [
        *curve,
        *wide,
        *rounded,
        keep("fp8, prompt's mean", "fp8", mean="prompt"),
        take("leank 70%, not centred", mean="none"),
        keep("fp8, not centred", "fp8", mean="none"),
        take("leank 70% x fp8, not centred", kv_dtype="fp8", mean="none"),
        keep("int4, not centred", "int4", mean="none"),
    ]
    untrained = [
        take(f"{method}{suffix}", run=f"{method}-{centred}", mean=mean)
        for method in ("static-norm", "double-sparsity")
        for centred, suffix, mean in (("true", ", centred", "model"), ("false", "", "none"))
    ]
    every = [
        DENSE,
        *masked,
        Entry("think", "think", 0.7),
        *untrained,
        take(_HEADS, run=_HEADS),
        *(Entry(name, "beside") for name in ("kivi", "quest-16", "snapkv-2048")),
    ]
    alone = []
    for kv_dtype in ("fp8", "int4"):
        for suffix, mean in (("", "model"), (", not centred", "none")):
            named = f"{kv_dtype}, K alone{suffix}"
            alone += [
                keep(named, kv_dtype, rounded="K", mean=mean),
                take(f"leank 70% x {named}", kv_dtype=kv_dtype, rounded="K", mean=mean),
            ]
        alone.append(keep(f"{kv_dtype}, V alone", kv_dtype, rounded="V"))
    main = [DENSE, *(entry for entry in curve if entry.ratio in (0.7, 0.8)), *rounded]
    cells = tuple(Cell(task, length) for length in sizes.lengths for task in sizes.tasks)
    others = tuple(Cell(task, length) for length in sizes.other_lengths for task in sizes.other_tasks)
    rounds = tuple(Round(count, singles(main)) for count in sizes.rounds)
    ruler = Part("ruler", _RULER_SEED, cells, rounds[:_ROUNDS_BEFORE_OTHERS], _FLOOR)
    return Plan(
        title="Centred keys on Qwen2.5-Coder-1.5B-Instruct",
        recipe=sizes.recipe,
        overrides=sizes.overrides,
        runs=runs,
        parts=(
            ruler,
            Part("others", _OTHERS_SEED, others, (Round(sizes.num_others, singles(every)),), _FLOOR),
            ruler._replace(rounds=rounds[_ROUNDS_BEFORE_OTHERS:]),
        ),
        tables=(
            Table("RULER's tasks", "ruler", by_name(main[1:])),
            Table("Needles, by all caches", "others", by_name(every[1:])),
        ),
        batch_tokens=sizes.batch_tokens,
        text=sizes.text._replace(rows=singles([*masked, *untrained, *alone]), answering=singles(main)),
        has_scales=True,
        packaged=(MAIN, _WIDE) if packaged else (),
        most_int4=dict(sizes.most_int4),
    )


def make_values_plan(sizes: RulerSizes, packaged: bool = True) -> Plan:
    """Lay out pruned V, and what fewer bits cost, beside K by the package's masks.

    The package has masks with V pruned for some ratios, whose directions were learned. For others the basis
    of V is measured, and cut by its energies, as an export does it. Both have seen the beginning of each
    text, and are measured on what comes after.
    """

    def prune(keys: float, values: float, **changes: str) -> Entry:
        rounded = f" x {changes['kv_dtype']}" if changes else ""
        name = f"K {keys:.0%}, V {values:.0%}{rounded}"
        return Entry(name, ratio=keys, run=MAIN, values=values, **changes)  # type: ignore[arg-type]

    main = [prune(0.7, 0.5), prune(0.7, 0.5, kv_dtype="fp8"), prune(0.8, 0.6)]
    further = [prune(0.7, 0.6), prune(0.7, 0.7), prune(0.8, 0.5), prune(0.0, 0.25), prune(0.0, 0.5)]
    cells = tuple(
        Cell(task, length) for length in sorted(sizes.lengths, reverse=True) for task in sizes.tasks
    )
    heads = Entry(_HEADS, ratio=0.7, run=_HEADS)
    first, *later = sizes.rounds
    rounds = (
        Round(first, singles([DENSE, *main, heads])),
        *(Round(count, singles([DENSE, *main])) for count in later),
    )
    return Plan(
        title=f"Pruned V by {sizes.recipe}",
        recipe=sizes.recipe,
        overrides=sizes.overrides,
        runs={MAIN: Run((), (0.7, 0.8)), _HEADS: sizes.train_gates()},
        parts=(Part("ruler", _RULER_SEED, cells, rounds, _FLOOR),),
        tables=(Table("RULER's tasks", "ruler", by_name([*main, heads])),),
        batch_tokens=sizes.batch_tokens,
        text=sizes.text._replace(rows=singles([*main, *further, heads])),
        has_basis=True,
        has_scales=True,
        packaged=(MAIN,),
    )
