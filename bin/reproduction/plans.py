"""What `bin/reproduce --model NAME` does; and what with `--quick`.

Laid out here are centred keys on Qwen2.5-Coder, and V pruned beside K, in answers and on text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from bin.reproduction.fetch_texts import LEARNED_ON
from bin.reproduction.paper_plan import ON_CPU, ON_GPU, SMOLLM2, make_paper_plan
from bin.reproduction.plan import (
    DENSE,
    FLOOR,
    GATES,
    MAIN,
    NO_SAMPLES,
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

_FEW = (
    "windows.sink_size=16", "windows.recent_size=64", "windows.flush_size=8", "data.min_length=448",
    "data.max_length=512", "data.questions_per_context=1", "stage1.steps=2", "stage2.steps=1",
    "stage2.validation_contexts=0", "heads.steps=2", "calibration_prompts=1", "held_out_samples=0",
)  # fmt: skip
_FEW_TOKENS, _ANSWER = 480, 10  # of a prompt, and of its answer: more than are flushed at a time
_RULER_SEED, _OTHERS_SEED = 7_000_000, 8_000_000
_TASKS = (
    "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2", "niah_multivalue",
    "niah_multiquery", "vt", "fwe",
)  # fmt: skip
_LENGTHS = (4096, 8192, 16384, 32768)
_COUNTS = (32, 64, 100)  # prompts of a cell that are answered after each round
_CODER = "qwen2.5-coder-1.5b-instruct"
_RATIOS = (0.5, 0.6, 0.7, 0.8)
_WIDE_LAMBDA, _WIDE = 0.2, "larger-lambda"
_HEADS = "duo-attention"
_TRAIN_GATES = Run((f"method={_HEADS}", *GATES, NO_SAMPLES), (0.7,))
_TEXT = TextPlan((4000, 12000), num_fed=128, num_texts=6)


def make_plan(name: str, *, quick: bool, on_gpu: bool, packaged: bool = False, values: bool = False) -> Plan:
    """The plan of that name, of LeanK's own masks or of `packaged` ones; of pruned V where asked for."""
    if values:
        plan = make_values_plan(name)
    elif name == "qwen2.5-coder":
        plan = make_centred_plan(packaged)
    else:
        sizes = SMOLLM2 if name == "smollm2" else ON_GPU if on_gpu else ON_CPU
        plan = make_paper_plan(sizes.shrink() if quick else sizes, packaged)
    return _shrink(plan) if quick else plan


def _shrink(plan: Plan) -> Plan:
    """A few steps and prompts of everything, a few hundred tokens long."""
    text = plan.text and plan.text._replace(
        lengths=(300,),
        num_fed=4,
        num_texts=2,
        answer_tokens=8,
        num_answers=2,
        learned_on=0.0,
    )
    return replace(
        plan,
        overrides=(*plan.overrides, *_FEW),
        # What a run changes itself goes before.
        runs={name: run._replace(overrides=(*run.overrides, *_FEW)) for name, run in plan.runs.items()},
        parts=tuple(_shrink_part(plan, part) for part in plan.parts),
        batch_tokens=1024,
        text=text,
    )


def _shrink_part(plan: Plan, part: Part) -> Part:
    """The first and the last task; a prompt in the first of its rounds, and one more in each further."""
    cells = [
        cell._replace(length=_FEW_TOKENS, most_tokens=_ANSWER) for cell in (part.cells[0], part.cells[-1])
    ]
    known = {each.num_prompts for other in plan.parts if other.name == part.name for each in other.rounds}
    counts = {count: place for place, count in enumerate(sorted(known), start=1)}
    rounds = tuple(each._replace(num_prompts=counts[each.num_prompts]) for each in part.rounds)
    return part._replace(cells=tuple(dict.fromkeys(cells)), rounds=rounds, floor=-1.0)


def make_centred_plan(packaged: bool = False) -> Plan:
    """Lay out centred keys and keys as they are, of a model whose keys have large constant parts.

    Masks of 50 to 80% come from one training, that of 90% from one with a larger lambda; they may be the
    package's.
    """
    # The package has one mask a ratio, and the main run has it already.
    wide_ratios = (0.9,) if packaged else (0.7, 0.8, 0.9)
    runs = {MAIN: Run((), _RATIOS), _WIDE: Run((f"stage1.l1_weight={_WIDE_LAMBDA}",), wide_ratios)}

    keep, take = partial(Entry, run=MAIN), partial(Entry, run=MAIN, ratio=0.7)
    curve = [take(f"leank {ratio:.0%}", ratio=ratio) for ratio in _RATIOS]
    wide = [
        Entry(f"leank {ratio:.0%}, lambda {_WIDE_LAMBDA}", ratio=ratio, run=_WIDE) for ratio in wide_ratios
    ]
    rounded = [
        keep("fp8", kv_dtype="fp8"),
        take("leank 70% x fp8", kv_dtype="fp8"),
        keep("int4", kv_dtype="int4"),
        take("leank 70% x int4", kv_dtype="int4"),
    ]
    masked = [
        *curve,
        *wide,
        *rounded,
        keep("fp8, prompt's mean", kv_dtype="fp8", mean="prompt"),
        take("leank 70%, not centred", mean="none"),
        keep("fp8, not centred", kv_dtype="fp8", mean="none"),
        take("leank 70% x fp8, not centred", kv_dtype="fp8", mean="none"),
        keep("int4, not centred", kv_dtype="int4", mean="none"),
    ]
    untrained = []
    for method in ("static-norm", "double-sparsity"):
        for centred, suffix, mean in (("true", ", centred", "model"), ("false", "", "none")):
            settings = (f"method={method}", "width_multiple=1", f"key_mean={centred}", NO_SAMPLES)
            runs[run := f"{method}-{centred}"] = Run(settings, (0.7,))
            untrained.append(take(f"{method}{suffix}", run=run, mean=mean))
    runs[_HEADS] = _TRAIN_GATES
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
                keep(named, kv_dtype=kv_dtype, rounded="K", mean=mean),
                take(f"leank 70% x {named}", kv_dtype=kv_dtype, rounded="K", mean=mean),
            ]
        alone.append(keep(f"{kv_dtype}, V alone", kv_dtype=kv_dtype, rounded="V"))
    main = [DENSE, *(entry for entry in curve if entry.ratio in (0.7, 0.8)), *rounded]
    needles = ("niah_single_2", "niah_multikey_1", "niah_multivalue")
    others = tuple(Cell(task, length) for length in (8192, 16384) for task in needles)
    first, *later = (Round(count, singles(main)) for count in _COUNTS)
    ruler = _ask_ruler(_LENGTHS, first)
    return Plan(
        title="Centred keys on Qwen2.5-Coder-1.5B-Instruct",
        recipe=_CODER,
        runs=runs,
        parts=(
            ruler,
            Part("others", _OTHERS_SEED, others, (Round(32, singles(every)),), FLOOR),
            ruler._replace(rounds=tuple(later)),
        ),
        tables=(
            Table("RULER's tasks", "ruler", by_name(main[1:])),
            Table("Needles, by all caches", "others", by_name(every[1:])),
        ),
        batch_tokens=2**18,
        text=_TEXT._replace(
            rows=singles([*masked, *untrained, *alone]),
            answer_tokens=512,
            num_answers=24,
            answering=singles(main),
        ),
        has_scales=True,
        packaged=(MAIN, _WIDE) if packaged else (),
        most_int4={4096: 32, 8192: 32, 16384: 16, 32768: 8},  # whole batches
    )


def make_values_plan(name: str) -> Plan:
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
    heads = Entry(_HEADS, ratio=0.7, run=_HEADS)
    first, *later = _COUNTS
    rounds = [Round(first, singles([DENSE, *main, heads]))]
    rounds += [Round(count, singles([DENSE, *main])) for count in later]
    text = _TEXT._replace(rows=singles([*main, *further, heads]), learned_on=LEARNED_ON)
    recipe, lengths, batch_tokens = _CODER, _LENGTHS, 2**17
    if name == "smollm2":
        recipe, lengths, batch_tokens = "smollm2-135m-instruct", (1024, 2048, 4096, 7680), 2**18
        text = text._replace(lengths=(1600, 4000))
    return Plan(
        title=f"Pruned V by {recipe}",
        recipe=recipe,
        runs={MAIN: Run((), (0.7, 0.8)), _HEADS: _TRAIN_GATES},
        parts=(_ask_ruler(lengths[::-1], *rounds),),
        tables=(Table("RULER's tasks", "ruler", by_name([*main, heads])),),
        batch_tokens=batch_tokens,
        text=text,
        has_basis=True,
        has_scales=True,
        packaged=(MAIN,),
    )


def _ask_ruler(lengths: Sequence[int], *rounds: Round) -> Part:
    """Ask all tasks at these lengths, which are begun with in their order."""
    cells = tuple(Cell(task, length) for length in lengths for task in _TASKS)
    return Part("ruler", _RULER_SEED, cells, rounds, FLOOR)
