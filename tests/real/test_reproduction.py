"""Plans of real models, a few of everything, on SmolLM2: all of it runs and is reported."""

import json
from dataclasses import replace

import pytest
import torch

from bin.reproduction.experiment import Experiment
from bin.reproduction.plans import make_plan

pytestmark = pytest.mark.real


@pytest.mark.usefixtures("without_report")  # of thirty masks: the commands' own tests draw them
# The longest is first, not beside the second longest: of two workers each begins with two tests.
@pytest.mark.parametrize(
    ("name", "values"), [("smollm2", False), ("smollm2", True), ("qwen2.5-coder", False)]
)
def test_every_table_of_the_report_is_filled(smollm2, tmp_path, name, values):
    plan = make_plan(name, quick=True, on_gpu=False, values=values)
    plan = replace(plan, overrides=(*plan.overrides, "model.dtype=auto"))  # the recipe's is for GPUs
    report = Experiment(tmp_path, plan, str(smollm2), device="cpu").run().read_text()
    assert "model: " in report and "| documentation, 300 | " in report
    for part in plan.parts:
        for num_prompts, rows in part.rounds:
            for cell in part.cells:
                scores = json.loads((tmp_path / part.name / cell.name / "scores.json").read_text())
                if scores["dense"] and sum(scores["dense"]) > part.floor * len(scores["dense"]):
                    settings = [[len(scores.get(entry.name, ())) for entry in row] for row in rows]
                    assert all(max(counts) >= num_prompts for counts in settings)
    for table in plan.tables:
        assert f"## {table.title}\n" in report
    if plan.weighed:
        found = json.loads((tmp_path / "bytes.json").read_text())
        held = {entry: kept["held"] for entry, kept in found.items() if entry != "tokens"}
        size = getattr(torch, json.loads((smollm2 / "config.json").read_text())["dtype"]).itemsize
        assert held["leank+kivi+window"] < held["leank+kivi"] < held["kivi"] < held["dense"] / 2
        assert held["leank+int4"] < held["int4"] < held["fp8"] == held["dense"] / size
        answers = json.loads((tmp_path / "text" / "documentation-answers.json").read_text())
        assert "| dense | " in report[report.index("## Answers of up to") :]
        assert len(answers["dense"]["answers"]) == 2
