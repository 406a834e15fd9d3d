"""What `bin/reproduce --model NAME` does, by name; and what it does with `--quick`."""

from __future__ import annotations

from dataclasses import replace

from bin.reproduction.paper_plan import ON_CPU, ON_GPU, SMOLLM2, make_paper_plan
from bin.reproduction.plan import Part, Plan
from bin.reproduction.real_plans import make_centred_plan, make_values_plan

NAMES = ("testbed", "smollm2", "qwen2.5-coder")
_FEW = (
    "windows.sink_size=16", "windows.recent_size=64", "windows.flush_size=16", "data.min_length=448",
    "data.max_length=512", "data.questions_per_context=1", "stage1.steps=2", "stage2.steps=1",
    "stage2.validation_contexts=0", "heads.steps=2", "calibration_prompts=1", "held_out_samples=0",
)  # fmt: skip
_FEW_TOKENS, _ANSWER = 480, 20  # of a prompt, and of its answer: more than are flushed at a time


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
        answer_tokens=min(plan.text.answer_tokens, 8),
        num_answers=min(plan.text.num_answers, 2),
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
