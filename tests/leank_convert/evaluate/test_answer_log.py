"""Answers on the disk: a killed evaluation goes on, other ones are refused; and too little memory for any."""

import dataclasses
import json
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from leank_convert.checkpoint_io import ONNX_DESCRIPTION_NAME
from leank_convert.evaluate.answer_log import AnswerLog
from leank_convert.evaluate.answering import Answer, answer_against
from leank_convert.evaluate.prompt import Prompt
from leank_convert.evaluate.request import ANSWERS_NAME
from leank_convert.onnx.leank_onnx_cache import LeanKOnnxMemoryError
from tests.checks import refusal

SETTINGS = {"checkpoint": "abc", "against": None}


def answer(index, variant="dense", text="ünï 1\n2"):
    return Answer("retrieval", 64, index, prompt(index).digest, 60, variant, text, 1.0)


def prompt(index):
    return Prompt("retrieval", 64, index, torch.arange(60) + index, ("ünï 1\n2",), "exact", 4)


def test_answers_are_found_again_and_scored_by_todays_rules(tmp_path):
    log = AnswerLog(tmp_path / "new" / "out", SETTINGS)
    log.add([answer(0), answer(0, "pruned", "wrong")])
    again = AnswerLog(tmp_path / "new" / "out", SETTINGS)
    assert [p.index for p in again.missing([prompt(0), prompt(1)], ["dense", "pruned"])] == [1]
    assert [p.index for p in again.missing([prompt(0)], ["dense", "pruned", "window"])] == [0]
    assert dict(again.outcome(prompt(0), ["dense", "pruned"]).scores) == {"dense": 1.0, "pruned": 0.0}


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    AnswerLog(None, SETTINGS).add([answer(0)])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("cut", [1, 20])
def test_a_line_that_was_cut_off_is_asked_again(tmp_path, cut):
    AnswerLog(tmp_path, SETTINGS).add([answer(0), answer(1)])
    path = tmp_path / ANSWERS_NAME
    path.write_bytes(path.read_bytes()[:-cut])
    log = AnswerLog(tmp_path, SETTINGS)
    assert [p.index for p in log.missing([prompt(0), prompt(1)], ["dense"])] == [1]
    log.add([answer(1)])
    assert AnswerLog(tmp_path, SETTINGS).missing([prompt(0), prompt(1)], ["dense"]) == []


@pytest.mark.parametrize(
    "changes",
    [
        *({"score": score} for score in (..., 2, 99, None, "1", [1], float("nan"))),
        {"text": 5},
        {"index": True},
        {"prompt": ["x"]},
        {"more": 1},
    ],
    ids=str,
)
def test_a_line_that_is_no_answer_is_named(tmp_path, changes):
    AnswerLog(tmp_path, SETTINGS).add([answer(0), answer(1)])
    path = tmp_path / ANSWERS_NAME
    first, second = path.read_text().splitlines()
    record = {key: value for key, value in {**json.loads(second), **changes}.items() if value is not ...}
    for line in (json.dumps(record), "[" * 100_000):
        path.write_text(f"{first}\n{line}\n")
        with refusal(r"answers.jsonl`, line 2: not an answer with task, length"):
            AnswerLog(tmp_path, SETTINGS)


def test_a_full_disk_is_named_with_a_remedy_and_answers_so_far_are_kept(tmp_path):
    log = AnswerLog(tmp_path, SETTINGS)
    log.add([answer(0)])
    path = tmp_path / ANSWERS_NAME
    kept = path.rename(tmp_path / "kept")
    path.symlink_to("/dev/full")
    with refusal(
        rf"^`{path}` cannot be written: No space left", "make room", "run the command again", exit_code=1
    ):
        log.add([answer(1)])
    kept.rename(path)
    again = AnswerLog(tmp_path, SETTINGS)
    assert [p.index for p in again.missing([prompt(0), prompt(1)], ["dense"])] == [1]


def test_answers_of_other_settings_are_refused_and_kept(tmp_path):
    AnswerLog(tmp_path, SETTINGS).add([answer(0)])
    with refusal(r'another evaluation: `against` was null, is "x"'):
        AnswerLog(tmp_path, {**SETTINGS, "against": "x"})
    assert AnswerLog(tmp_path, SETTINGS).missing([prompt(0)], ["dense"]) == []


def test_a_prompt_that_was_drawn_anew_is_asked_again(tmp_path):
    log = AnswerLog(tmp_path, SETTINGS)
    log.add([answer(0)])
    changed = [
        dataclasses.replace(prompt(0), input_ids=torch.arange(61)),
        dataclasses.replace(prompt(0), references=("other",)),
        dataclasses.replace(prompt(0), max_new_tokens=5),
    ]
    assert log.missing([prompt(0), *changed], ["dense"]) == changed


@pytest.mark.parametrize(
    ("batch_size", "told", "hint"),
    [
        (4, "3 prompts of up to 30", "lower `--batch-size`"),
        (1, "1 prompts of up to 10", "take shorter prompts"),
    ],
)
def test_a_graph_that_runs_out_of_memory_is_told_with_what_to_lower(
    batch_size, told, hint, tmp_path, monkeypatch
):
    generate = Mock(side_effect=LeanKOnnxMemoryError("too little"))
    graph = SimpleNamespace(generate=generate, description=SimpleNamespace(eos_token_ids={2}))
    monkeypatch.setattr("leank_convert.onnx.leank_onnx.LeanKOnnx", lambda folder, threads: graph)
    (tmp_path / ONNX_DESCRIPTION_NAME).touch()
    prompts = [Prompt("task", 64, i, torch.arange(n), ("7",), "exact", 8) for i, n in enumerate((20, 10, 30))]
    with refusal(f"memory does not suffice for {told} tokens: too little", hint, exit_code=1):
        list(answer_against(tmp_path, None, prompts, torch.device("cpu"), batch_size))
