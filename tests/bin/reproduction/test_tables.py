"""What the report says follows from the answers that are there, and from nothing else."""

import json

from bin.reproduction.experiment import Experiment
from bin.reproduction.plan import VALIDATION, Entry
from bin.reproduction.plans import make_plan
from bin.reproduction.texts import compare_answers

CENTRED = make_plan("qwen2.5-coder", quick=False, on_gpu=True)
SMOLLM2 = make_plan("smollm2", quick=False, on_gpu=True)


def keep(out, cells):
    """Leave scores as an earlier run has left them."""
    for name, scores in cells.items():
        path = out / name / "scores.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(scores))


def rows(report, title):
    """Cells of a table's rows, by their first ones."""
    lines = report[report.index(f"## {title}") :].split("\n\n")[1].splitlines()
    header, _, *found = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    return header, {row[0]: row for row in found}


def test_tables_pair_answers_and_leave_out_what_the_dense_model_cannot_do(tmp_path):
    cells = {
        "vt-4096": {"dense": [1.0, 1.0, 0.0], "leank 70%": [1.0, 0.0, 0.0], "int4": [1.0]},
        "vt-8192": {"dense": [1.0, 0.5, 1.0], "leank 70%": [1.0, 1.0, 1.0]},
        "fwe-8192": {"dense": [0.0, 0.0, 0.5], "leank 70%": [1.0, 1.0, 1.0]},
    }
    keep(tmp_path / "ruler", cells)
    text = {"fp8": {"kl": 0.01234, "agreement": 0.5, "nll": 1.0, "dense_nll": 1.0}}
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "documentation-4000.json").write_text(json.dumps(text))
    # In no time, nothing is begun: what an earlier run has left is told.
    report = Experiment(tmp_path, CENTRED, "testbed", device="cpu", minutes=0).run().read_text()
    assert "| documentation, 4000 | fp8 | 0.0123 | 50.0% |" in report
    header, found = rows(report, "RULER's tasks")
    assert header == ["", "asked", "n", "score", "dense there", "against dense", "4096", "8192", "vt"]
    assert found["dense"][1:] == ["", "6", "75.0", "", "", "66.7", "83.3", "75.0"]
    # On the one prompt that int4 was asked: dense's own row is of others, too.
    shown = {name: line[header.index("dense there")] for name, line in found.items()}
    assert {name: mean for name, mean in shown.items() if mean} == {"int4": "100.0"}
    assert "best on prompts of another seed" not in report  # each row has one setting
    assert found["leank 70%"][header.index("n")] == "6"
    assert found["leank 70%"][header.index("score")] == "66.7"
    assert found["leank 70%"][header.index("against dense")].startswith("-8.3 [")
    assert found["leank 70%"][header.index("8192")].startswith("100.0; +16.7 [")
    assert found["int4"][header.index("n")] == "1"
    assert found["int4"][header.index("against dense")].startswith("+0.0 [")
    assert rows(report, "Left out of ruler")[1]["fwe"] == ["fwe", "8,192", "16.7"]


def test_rounds_ask_more_of_every_cell_that_the_dense_model_can_answer(tmp_path):
    units = {unit.name: unit for unit in Experiment(tmp_path, CENTRED, "model", device="cpu").list_units()}
    first, second, third = (units[f"ruler/vt-4096-7x{count}"] for count in (32, 64, 100))
    assert "masks/leank" in first.needs and first.name in second.needs and second.name in third.needs
    names = [row[0].name for row in CENTRED.parts[0].rounds[0].rows]
    scores = dict.fromkeys(names, [1.0] * 64)
    keep(tmp_path / "ruler", {"vt-4096": {**scores, "int4": [1.0] * 16}, "fwe-4096": {"dense": [0.0] * 8}})
    assert not first.is_done()  # as int4 has to answer, too
    assert units["ruler/fwe-4096-7x100"].is_done()
    keep(tmp_path / "ruler", {"vt-16384": {**scores, "int4": [1.0] * 16, "leank 70% x int4": [1.0] * 16}})
    assert units["ruler/vt-16384-7x64"].is_done()  # int4 answers 16 prompts of this length
    assert not units["ruler/vt-16384-7x100"].is_done()


def test_the_setting_that_is_best_on_validation_prompts_is_shown(tmp_path):
    experiment = Experiment(tmp_path, SMOLLM2, "model", device="cpu")
    row = first, second = Entry("a", setting="one"), Entry("b", setting="two")
    assert experiment.choose(row) is None
    cell = experiment.parts[VALIDATION].part.cells[0].name
    keep(tmp_path / VALIDATION, {cell: {"dense": [1.0], "a": [0.8], "b": [0.9]}})
    assert experiment.choose(row) == second
    keep(tmp_path / "equal" / VALIDATION, {cell: {"dense": [1.0], "a": [0.9], "b": [0.9]}})
    assert Experiment(tmp_path / "equal", SMOLLM2, "model", device="cpu").choose(row) == first


def test_bytes_stand_beside_the_score_on_prompts_that_all_answered(tmp_path):
    right = {"dense": [1.0, 1.0, 0.0, 1.0], "leank, 0.7": [1.0, 1.0, 1.0, 0.0]}
    keep(tmp_path / "compared", {"niah_single_2-4096": {**right, "kivi": [0.0, 0.0, 0.0, 1.0]}})
    held = {"dense": 8000, "leank, 0.7": 4800, "kivi": 1600}
    counted = {entry.name: held.get(entry.name, 100) for entry in SMOLLM2.weighed}
    found = {name: {"held": count, "read": count} for name, count in counted.items()}
    (tmp_path / "bytes.json").write_text(json.dumps({**found, "tokens": 8}))
    report = Experiment(tmp_path, SMOLLM2, "testbed", device="cpu", minutes=0).run().read_text()
    _, found = rows(report, "Bytes of a cache of 8 tokens")
    assert found["dense"][:5] == ["dense", "1,000", "100.0%", "100.0%", "75.0"]
    assert found["leank, 0.7"][:5] == ["leank, 0.7", "600", "60.0%", "60.0%", "75.0"]
    assert found["kivi"][1:5] == ["200", "20.0%", "20.0%", "25.0"]
    assert found["kivi"][5].startswith("-50.0 [")


def test_answers_are_compared_token_by_token():
    dense = {"answers": [[1, 2, 3, 4], [5, 6]], "log_likelihood": [-1.0, -2.0]}
    pruned = {"answers": [[1, 2, 9, 4], [5, 6]], "log_likelihood": [-1.5, -2.0]}
    assert compare_answers(pruned, dense) == {
        "identical": 0.5,
        "first_difference": 2.0,
        "equal_tokens": 5 / 6,
        "tokens": 3.0,
        "log_likelihood": -1.75,
    }
    longer = {"answers": [[1, 2, 3, 4, 5], [5, 6]], "log_likelihood": [-1.0, -2.0]}
    assert compare_answers(longer, dense)["equal_tokens"] == 6 / 7
