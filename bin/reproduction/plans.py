"""The table of plans: what `bin/reproduce --model NAME` does, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from bin.reproduction.centred_plan import CENTRED, QUICK_CENTRED, make_centred_plan
from bin.reproduction.paper_plan import ON_CPU, ON_GPU, QUICK, QUICK_SMOLLM2, SMOLLM2, make_paper_plan
from bin.reproduction.plan import Plan
from bin.reproduction.values_plan import QUICK as QUICK_VALUES
from bin.reproduction.values_plan import QWEN, make_values_plan
from bin.reproduction.values_plan import SMOLLM2 as SMOLLM2_VALUES


class Choice(NamedTuple):
    """A plan at its sizes."""

    make: Callable[[Any, bool], Plan]
    on_gpu: Any
    on_cpu: Any
    quick: Any


PLANS = {
    "testbed": Choice(make_paper_plan, ON_GPU, ON_CPU, QUICK),
    "smollm2": Choice(make_paper_plan, SMOLLM2, SMOLLM2, QUICK_SMOLLM2),
    "qwen2.5-coder": Choice(make_centred_plan, CENTRED, CENTRED, QUICK_CENTRED),
}

VALUE_PLANS = {
    "smollm2": Choice(make_values_plan, SMOLLM2_VALUES, SMOLLM2_VALUES, QUICK_VALUES),
    "qwen2.5-coder": Choice(make_values_plan, QWEN, QWEN, replace(QUICK_VALUES, recipe=QWEN.recipe)),
}


def make_plan(name: str, *, quick: bool, on_gpu: bool, packaged: bool = False, values: bool = False) -> Plan:
    """The plan of that name, of LeanK's own masks or of `packaged` ones; of pruned V where asked for."""
    choice = (VALUE_PLANS if values else PLANS)[name]
    return choice.make(choice.quick if quick else choice.on_gpu if on_gpu else choice.on_cpu, packaged)
