"""Paired scores with their interval; the same figures as a table, JSON, CSV and a plot."""

import csv
import json
import math
import re
from dataclasses import replace

import pytest
from PIL import Image

from leank_convert.evaluate.comparison import (
    CacheBytes,
    Comparison,
    Outcome,
    UsedBytes,
    compare,
    paired_difference_interval,
    render_comparison,
    score_pairs,
    write_results,
)


def outcomes(both, lost, gained, neither, task="retrieval", length=2048):
    kinds = [(1.0, 1.0)] * both + [(1.0, 0.0)] * lost + [(0.0, 1.0)] * gained + [(0.0, 0.0)] * neither
    return [
        Outcome(task, length, 100, {"dense": dense, "pruned": pruned, "window": 0.0})
        for dense, pruned in kinds
    ]


def comparison(*parts, **changes):
    values = {
        "checkpoint": "out",
        "baseline": "dense",
        "variants": ("dense", "pruned", "window"),
        "measure": "exact match",
        "seed": 1,
        "pruning_ratio_asked": 0.7,
        "pruning_ratio": 0.703125,
        "num_whole": 0,
        "outcomes": tuple(outcome for part in parts for outcome in part),
        "cache": CacheBytes(2048, 1000, 320, 1000, 900),
    }
    return Comparison(**{**values, **changes})


def test_scores_count_pairs():
    score = score_pairs(outcomes(both=90, lost=4, gained=1, neither=5), "dense")
    pruned = score.differences["pruned"]
    assert (score.n, score.means["dense"], score.means["pruned"]) == (100, 0.94, 0.91)
    assert (pruned.lost, pruned.gained) == (4, 1)
    assert pruned.mean == pytest.approx(-0.03)
    assert pruned.interval[0] < -0.03 < pruned.interval[1]
    assert set(score.differences) == {"pruned", "window"}
    with pytest.raises(ValueError, match="no outcomes"):
        score_pairs([], "dense")


def test_interval_is_as_by_hand_and_stays_within_possible_differences():
    # Cells with half a pair added: 4.5 lost, 1.5 gained, of 102.
    difference = -3 / 102
    half = 1.959964 * math.sqrt((6 / 102 - difference**2) / 102)
    assert paired_difference_interval([-1] * 4 + [1] + [0] * 95) == pytest.approx(
        (difference - half, difference + half), abs=1e-6
    )
    low, high = paired_difference_interval([-1.0])
    assert -1 <= low < high <= 1


def test_parts_of_a_score_count_as_parts():
    halves = compare([-0.5, -0.5, 0.0, 0.0])
    whole = compare([-1.0, 0.0, 0.0, 0.0])
    assert halves.mean == whole.mean == -0.25
    assert halves.lost == 2
    assert halves.interval[1] - halves.interval[0] < whole.interval[1] - whole.interval[0]


def test_render_names_every_task_and_both_ratios():
    result = comparison(outcomes(3, 1, 0, 0), outcomes(4, 0, 0, 0, task="multi_value"))
    text = render_comparison(result)
    parts = ("retrieval", "multi_value", "all prompts", "asked 70.0%", "reached 70.3%", "68.0%", "10.0%")
    assert all(part in text for part in parts)
    assert "2048 tokens\n" not in text  # one length needs no heading
    assert not any(line.endswith(" ") for line in text.splitlines())
    facts = result.to_dict()
    assert facts["total"]["n"] == 8
    assert facts["scores"][0]["differences"]["pruned"]["lost"] == 1
    assert facts["cache_bytes"]["key_pruned"] == 320


def test_several_lengths_are_told_apart_and_added_up():
    result = comparison(outcomes(3, 1, 0, 0, length=4096), outcomes(4, 0, 0, 0, length=512))
    text = render_comparison(result)
    assert text.index("512 tokens") < text.index("4096 tokens")
    filler = render_comparison(replace(result, measure="GSM-Infinite"))
    assert "512 tokens of filler\n" in filler and "filler" not in text
    assert result.lengths == [512, 4096]
    assert result.at(4096).means["pruned"] == 0.75
    assert result.total.means["pruned"] == 7 / 8
    assert [(row["length"], row["n"]) for row in result.to_dict()["scores"]] == [(512, 4), (4096, 4)]


def test_every_variants_bytes_stand_beside_its_score():
    used = {"dense": UsedBytes(2000, 2000), "pruned": UsedBytes(1220, 1220), "quest-16": UsedBytes(2120, 600)}
    used["leank+int4+hadamard"] = UsedBytes(700, 700)
    parts = [Outcome("retrieval", 64, 9, dict(zip(used, (1.0, 0.5, 0.25, 0.75), strict=True)))]
    result = comparison(parts, variants=tuple(used), cache=CacheBytes(20, 1000, 320, 1000, 900), used=used)
    text = render_comparison(result)
    assert max(map(len, text.splitlines())) <= 80
    assert re.search(r"\nexact match +leank\+int4\+hadamard\nretrieval +75.00%\n", text)  # below the rest
    lines = [line.split() for line in text.splitlines()]
    assert ["quest-16", "25.00%", "106", "106.0%", "30.0%"] in lines
    assert result.to_dict()["used_bytes"]["quest-16"] == {"held": 2120, "read": 600}


def test_all_three_files_hold_every_cell(tmp_path):
    cells = [(n, task, score) for n in (512, 1024) for task, score in (("vt", 0.5), ("cwe", 0.25))]
    parts = [Outcome(task, n, n, {"dense": 1.0, "pruned": score}) for n, task, score in cells]
    result = comparison(parts, variants=("dense", "pruned"))
    write_results(result, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"results.json", "results.csv", "results.png"}
    assert json.loads((tmp_path / "results.json").read_text()) == json.loads(json.dumps(result.to_dict()))
    rows = list(csv.DictReader((tmp_path / "results.csv").read_text().splitlines()))
    assert [(int(row["length"]), row["task"], row["variant"], float(row["score"])) for row in rows] == [
        (length, task, *scored)
        for length, task, pruned in cells
        for scored in (("dense", 1.0), ("pruned", pruned))
    ]
    assert [(row["n"], row["difference"]) for row in rows[:2]] == [("1", ""), ("1", "-0.5")]
    assert [row["difference"] for row in result.to_rows()[:2]] == [None, -0.5]
    assert "Outcome" not in repr(result)
    with Image.open(tmp_path / "results.png") as image:
        assert len(image.convert("RGB").getcolors(1 << 20)) > 10  # bars and text, not a blank sheet
