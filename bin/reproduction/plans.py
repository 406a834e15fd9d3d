"""The table of plans: what `bin/reproduce --model NAME` does, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from bin.reproduction.paper_plan import ON_CPU, ON_GPU, SMOLLM2, make_paper_plan
from bin.reproduction.plan import Plan
from bin.reproduction.real_plans import (
    CENTRED,
    QUICK_CENTRED,
    QUICK_VALUES,
    VALUES,
    make_centred_plan,
    make_values_plan,
)


class Choice(NamedTuple):
    """A plan at its sizes."""

    make: Callable[[Any, bool], Plan]
    full: Any
    quick: Any
    on_cpu: Any = None  # where there is no GPU; None for the full ones


PLANS = {
    "testbed": Choice(make_paper_plan, ON_GPU, ON_GPU.shrink(), ON_CPU),
    "smollm2": Choice(make_paper_plan, SMOLLM2, SMOLLM2.shrink()),
    "qwen2.5-coder": Choice(make_centred_plan, CENTRED, QUICK_CENTRED),
}

VALUE_PLANS = {
    name: Choice(make_values_plan, sizes, replace(QUICK_VALUES, recipe=sizes.recipe))
    for name, sizes in VALUES.items()
}


def make_plan(name: str, *, quick: bool, on_gpu: bool, packaged: bool = False, values: bool = False) -> Plan:
    """The plan of that name, of LeanK's own masks or of `packaged` ones; of pruned V where asked for."""
    choice = (VALUE_PLANS if values else PLANS)[name]
    full = choice.full if on_gpu else choice.on_cpu or choice.full
    return choice.make(choice.quick if quick else full, packaged)
