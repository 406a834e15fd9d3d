"""What `bin/reproduce --model NAME` does, by name."""

from __future__ import annotations

from dataclasses import replace

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

NAMES = ("testbed", "smollm2", "qwen2.5-coder")


def make_plan(name: str, *, quick: bool, on_gpu: bool, packaged: bool = False, values: bool = False) -> Plan:
    """The plan of that name, of LeanK's own masks or of `packaged` ones; of pruned V where asked for."""
    if values:
        full = VALUES[name]
        return make_values_plan(replace(QUICK_VALUES, recipe=full.recipe) if quick else full, packaged)
    if name == "qwen2.5-coder":
        return make_centred_plan(QUICK_CENTRED if quick else CENTRED, packaged)
    sizes = SMOLLM2 if name == "smollm2" else ON_GPU if on_gpu else ON_CPU
    return make_paper_plan(sizes.shrink() if quick else sizes, packaged)
