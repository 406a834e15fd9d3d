"""What an evaluation writes: the same figures as JSON, CSV and a plot."""

import csv
import json

from PIL import Image

from leank_convert.evaluate.comparison import CacheBytes, Comparison, Outcome
from leank_convert.evaluate.results import write_results


def test_all_three_files_hold_every_cell(tmp_path):
    outcomes = [
        Outcome(task, length, length, {"dense": 1.0, "pruned": pruned})
        for length in (512, 1024)
        for task, pruned in (("vt", 0.5), ("cwe", 0.25))
    ]
    result = Comparison(
        "out",
        "dense",
        ("dense", "pruned"),
        "score",
        1,
        0.7,
        0.7,
        0,
        tuple(outcomes),
        CacheBytes(9, 1, 1, 1, 1),
    )
    paths = write_results(result, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(path.name for path in paths)
    assert json.loads((tmp_path / "results.json").read_text()) == json.loads(json.dumps(result.to_dict()))
    rows = list(csv.DictReader((tmp_path / "results.csv").read_text().splitlines()))
    assert [(row["length"], row["task"], row["variant"], float(row["score"])) for row in rows] == [
        ("512", "vt", "dense", 1.0),
        ("512", "vt", "pruned", 0.5),
        ("512", "cwe", "dense", 1.0),
        ("512", "cwe", "pruned", 0.25),
        ("1024", "vt", "dense", 1.0),
        ("1024", "vt", "pruned", 0.5),
        ("1024", "cwe", "dense", 1.0),
        ("1024", "cwe", "pruned", 0.25),
    ]
    assert [row["difference"] for row in rows[:2]] == ["", "-0.5"]
    with Image.open(tmp_path / "results.png") as image:
        assert image.width > 600
        assert len(image.convert("RGB").getcolors(1 << 20)) > 10  # bars and text, not a blank sheet
