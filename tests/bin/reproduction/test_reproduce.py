"""The whole of it on a tiny model: every section is there, nothing is done twice, a kill costs little."""

import dataclasses
import html
import json
import re
import shutil

import pytest

from bin.reproduction import answers as answers_module
from bin.reproduction import bench
from bin.reproduction.experiment import reproduce
from bin.reproduction.plan import Sizes, make_plan
from leank_convert.errors import LeanKError
from leank_convert.recipe_file import load_recipe
from leank_convert.train import loop


@pytest.fixture(scope="module")
def sizes(retriever_folder):
    return Sizes(
        overrides=(
            f"model.id={retriever_folder}",
            "windows.sink_size=4",
            "windows.recent_size=16",
            "windows.flush_size=4",
            "width_multiple=4",
            "data.min_length=200",
            "data.max_length=240",
            "stage1.steps=2",
            "stage2.steps=1",
            "heads.steps=2",
            "calibration_prompts=1",
        ),
        ratios=(0.5, 0.9),
        main_ratio=0.5,
        hard_ratio=0.9,
        head_ratio=0.5,
        combined_ratio=0.9,
        num_seeds=2,
        l1_weights=(0.3,),
        width_multiples=(8,),
        short_lengths=(220,),
        lengths=(200, 240),
        num_prompts=1,
        num_validation=1,
        batch_tokens=480,
    )


@pytest.fixture(scope="module")
def done(sizes, tmp_path_factory):
    """A finished folder, not to be changed."""
    out = tmp_path_factory.mktemp("reproduce") / "out"
    with pytest.MonkeyPatch.context() as patch:
        # A mask's own report is another command's, and takes longer than its training here.
        patch.setattr(loop, "write_report", lambda *_: None)
        reproduce(out, sizes, device="cpu")
    return out


@pytest.fixture
def copied(done, tmp_path):
    return shutil.copytree(done, tmp_path / "out")


def test_the_report_has_every_section_and_needs_nothing_beside_it(done, sizes):
    plan = make_plan(sizes, load_recipe(sizes.recipe, sizes.overrides))
    page, markdown = (done / "report.html").read_text(), (done / "report.md").read_text()
    for table in plan.tables.values():
        assert html.escape(table.title) in page
        assert f"## {table.title}\n" in markdown
    for label, _ in plan.tables["comparison"].rows:
        assert f"<td>{label}</td>" in page
        assert f"\n| {label} | " in markdown
    assert page.count("<svg ") == 2
    assert not re.search(r'(src|href)="(?!#)', page)
    assert "The paper&#x27;s (8B and 7B models on RULER" in page


def test_the_numbers_hold_every_entry_on_every_task_and_length(done, sizes):
    numbers = json.loads((done / "results.json").read_text())
    plan = make_plan(sizes, load_recipe(sizes.recipe, sizes.overrides))
    assert {name: len(rows) for name, rows in numbers["tables"].items()} == {
        name: len(table.rows) for name, table in plan.tables.items()
    }
    assert numbers["verdicts"]
    tasks = ("retrieval", "multi_value", "variable_tracking")
    cells = [(task, length) for length in sizes.lengths for task in tasks]
    for row in (numbers["dense"], *numbers["tables"]["comparison"]):
        assert [(cell["task"], cell["length"]) for cell in row["cells"]] == cells
        assert row["n"] == sizes.num_prompts * len(cells)


def test_a_second_time_nothing_is_made_and_nothing_is_asked(copied, sizes, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("made again")

    monkeypatch.setattr(bench, "train_masks", refuse)
    monkeypatch.setattr(answers_module, "answer_prompts", refuse)
    before = (copied / "results.json").read_text()
    (copied / "report.html").unlink()
    assert reproduce(copied, sizes, device="cpu") == copied / "report.html"
    assert (copied / "results.json").read_text() == before


def test_killed_while_answering_only_the_rest_is_asked(copied, sizes):
    cell = copied / "test" / "multi_value-240"
    answers = cell / "answers.jsonl"
    whole = answers.read_bytes()
    answers.write_bytes(whole[: len(whole) // 2])
    (cell / "scores.json").unlink()
    before = json.loads((copied / "results.json").read_text())
    reproduce(copied, sizes, device="cpu")
    assert json.loads((copied / "results.json").read_text()) == before
    assert len(answers.read_bytes().splitlines()) == len(whole.splitlines())
    assert answers.read_bytes().startswith(whole[: whole.rindex(b"\n", 0, len(whole) // 2) + 1])


def test_killed_while_masks_are_made_only_the_missing_ones_are(copied, sizes, monkeypatch):
    shutil.rmtree(copied / "masks" / "random-uniform" / "ratio-0.9")
    (copied / "masks" / "up-to-220" / "ratio-0.5" / "channel_mask.safetensors").unlink()
    (copied / "masks" / "static-norm-uniform" / "ratio-0.9" / "leank" / "recipe.yaml").unlink()
    made = []
    original = bench.train_masks

    def note(model, folder, **options):
        made.append(folder.name)
        return original(model, folder, **options)

    monkeypatch.setattr(bench, "train_masks", note)
    monkeypatch.setattr(loop, "write_report", lambda *_: None)
    before = json.loads((copied / "results.json").read_text())
    reproduce(copied, sizes, device="cpu")
    assert made == ["static-norm-uniform", "random-uniform", "up-to-220"]
    assert json.loads((copied / "results.json").read_text()) == before


def test_masks_of_another_recipe_are_refused(copied, sizes):
    changed = dataclasses.replace(sizes, overrides=(*sizes.overrides, "stage1.steps=3"))
    with pytest.raises(LeanKError, match="was made by another recipe"):
        reproduce(copied, changed, device="cpu")


def test_more_prompts_are_asked_beside_those_that_were(copied, sizes):
    answers = copied / "test" / "retrieval-200" / "answers.jsonl"
    before = answers.read_bytes()
    reproduce(copied, dataclasses.replace(sizes, num_prompts=2), device="cpu")
    assert answers.read_bytes().startswith(before)
    assert len(answers.read_bytes().splitlines()) == 2 * len(before.splitlines())


def test_two_workers_share_the_work_and_find_the_same(copied, sizes):
    before = json.loads((copied / "results.json").read_text())
    undone = ["masks/random-uniform", "test/retrieval-200", "test/retrieval-240", "validation/retrieval-200"]
    for unit in undone:
        shutil.rmtree(copied / unit)
    times = copied / "times.jsonl"
    times.unlink()
    reproduce(copied, sizes, device="cpu", num_workers=2)
    assert json.loads((copied / "results.json").read_text()) == before
    assert sorted(json.loads(line)["unit"] for line in times.read_text().splitlines()) == undone
