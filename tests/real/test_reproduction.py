"""The paper's experiments on the real model, a few of everything: all of it runs and is reported."""

import json

import pytest

from bin.reproduction.experiment import reproduce
from bin.reproduction.plan import QUICK_SMOLLM2
from bin.reproduction.texts import DOCUMENTATION

pytestmark = pytest.mark.real


def test_every_chapter_of_the_report_is_filled(smollm2, tmp_path):
    page = reproduce(tmp_path, QUICK_SMOLLM2, model=str(smollm2), device="cpu")
    results = json.loads((tmp_path / "results.json").read_text())
    real, sizes = results["real"], QUICK_SMOLLM2.real
    assert results["environment"]["model"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    asked = {(row["task"], row["length"], len(row["scores"])) for row in real["ruler"]}
    assert asked == {
        (task, length, count)
        for task in sizes.ruler_tasks
        for length in sizes.ruler_lengths
        for count in (sizes.num_main, sizes.num_others)
    }
    beside = {(row["task"], row["length"], len(row["scores"])) for row in real["compared"]}
    assert beside == {("niah_single_2", length, sizes.num_compared) for length in sizes.compared_lengths}
    assert {row["text"] for row in real["predictions"]} == {DOCUMENTATION}
    dense = next(row for row in real["answers"] if row["entry"] is None)
    assert (dense["identical"], dense["equal_tokens"]) == (1.0, 1.0)
    names = ["dense" if row["entry"] is None else row["entry"]["method"] for row in real["bytes"]]
    answered = {"dense" if row["entry"] is None else row["entry"]["method"] for row in real["compared"]}
    assert set(names) == answered == {"dense", "leank", *sizes.alone, *sizes.products}
    held = {name: row["held"] for name, row in zip(names, real["bytes"], strict=True)}
    assert held["leank+kivi+window"] < held["leank+kivi"] < held["kivi"] < held["fp8"] < held["dense"]
    assert held["leank+int4"] < held["int4"] < held["fp8"]
    assert page.read_text().count("<svg ") == 4
