"""The whole of it on a tiny model: every table is there, nothing is done twice, a kill costs little."""

import dataclasses
import shutil
from unittest.mock import Mock

import pytest

from bin.reproduction import answers as answers_module
from bin.reproduction import bench
from bin.reproduction.experiment import Experiment
from bin.reproduction.paper_plan import Sizes, make_paper_plan
from leank_convert.errors import LeanKError
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
            "held_out_samples=0",
        ),
        ratios=(0.7, 0.9),
        num_seeds=2,
        l1_weights=(),
        width_multiples=(8,),
        task_choices=("retrieval",),
        short_lengths=(220,),
        lengths=(200, 240),
        num_prompts=1,
        num_validation=1,
        batch_tokens=480,
    )


@pytest.fixture(scope="module")
def plan(sizes):
    return make_paper_plan(sizes)


@pytest.fixture(scope="module")
def done(plan, tmp_path_factory):
    """A finished folder, not to be changed."""
    out = tmp_path_factory.mktemp("reproduce") / "out"
    with pytest.MonkeyPatch.context() as patch:
        # A mask's own report is another command's, and takes longer than its training here.
        patch.setattr(loop, "write_report", lambda *_: None)
        Experiment(out, plan, device="cpu").run()
    return out


@pytest.fixture
def copied(done, tmp_path):
    return shutil.copytree(done, tmp_path / "out")


def test_the_report_has_every_table_and_every_row(done, plan):
    report = (done / "tables.md").read_text()
    tests = {cell.name for cell in plan.parts[1].cells}
    assert {path.name for path in (done / "test").iterdir()} == tests
    for table in plan.tables:
        lines = report[report.index(f"## {table.title}\n") :].split("\n\n")[1].splitlines()
        header, _, *rows = [line.removeprefix("| ").split(" | ") for line in lines]
        assert [row[0] for row in rows] == ["dense", *(label for label, _ in table.rows)]
        assert {row[header.index("n")] for row in rows} == {str(len(tests))}
    assert "## Further differences\n" in report and " | uniform budget | " in report


def test_a_second_time_nothing_is_made_and_nothing_is_asked(copied, plan, monkeypatch):
    refuse = Mock(side_effect=AssertionError("made again"))
    monkeypatch.setattr(bench, "train_masks", refuse)
    monkeypatch.setattr(answers_module, "answer_prompts", refuse)
    before = (copied / "tables.md").read_text()
    (copied / "tables.md").unlink()
    assert Experiment(copied, plan, device="cpu").run() == copied / "tables.md"
    assert (copied / "tables.md").read_text() == before


def test_killed_while_answering_only_the_rest_is_asked(copied, plan):
    cell = copied / "test" / "multi_value-240"
    answers = cell / "answers.jsonl"
    whole = answers.read_bytes()
    answers.write_bytes(whole[: len(whole) // 2])
    (cell / "scores.json").unlink()
    before = (copied / "tables.md").read_text()
    Experiment(copied, plan, device="cpu").run()
    assert (copied / "tables.md").read_text() == before
    assert len(answers.read_bytes().splitlines()) == len(whole.splitlines())
    assert answers.read_bytes().startswith(whole[: whole.rindex(b"\n", 0, len(whole) // 2) + 1])


def test_killed_while_masks_are_made_only_the_missing_ones_are(copied, plan, monkeypatch, without_report):
    shutil.rmtree(copied / "masks" / "random-uniform" / "ratio-0.9")
    (copied / "masks" / "contexts of at most 220 tokens" / "ratio-0.7" / "channel_mask.safetensors").unlink()
    (copied / "masks" / "static-norm-uniform" / "ratio-0.9" / "leank" / "recipe.yaml").unlink()
    train = Mock(wraps=bench.train_masks)
    monkeypatch.setattr(bench, "train_masks", train)
    before = (copied / "tables.md").read_text()
    Experiment(copied, plan, device="cpu").run()
    made = [call.args[1].name for call in train.call_args_list]
    assert made == ["static-norm-uniform", "random-uniform", "contexts of at most 220 tokens"]
    assert (copied / "tables.md").read_text() == before


def test_masks_of_another_recipe_are_refused(copied, sizes):
    changed = dataclasses.replace(sizes, overrides=(*sizes.overrides, "stage1.steps=3"))
    with pytest.raises(LeanKError, match="was made by another recipe"):
        Experiment(copied, make_paper_plan(changed), device="cpu").run()
