"""LongBench's records become prompts: which there are, how they are asked, what is left out of them."""

import sys

import pytest

from leank_convert.evaluate import scores
from leank_convert.evaluate.benchmarks.longbench import draw_longbench
from leank_convert.evaluate.benchmarks.longbench_tasks import TASKS
from leank_convert.evaluate.prompt import score
from tests.checks import refusal

LENGTH = 1500
RECORD = {
    "input": "Who waters the fern?",
    "context": "The gardener waters the fern {daily}.",
    "answers": ["the gardener", "Hans"],
    "length": 7,
    "dataset": "hotpotqa",
    "language": "en",
    "all_classes": None,
    "_id": "0a",
}
SUMMARISED = ("gov_report", "multi_news", "vcsum", "passage_count")


def draw(tokenizer, folder, num_samples=5, length=LENGTH):
    return draw_longbench(tokenizer, folder, num_samples, length)


def test_every_task_is_asked_with_its_context_and_room_for_its_answer(byte_level_tokenizer, write_records):
    for name in reversed(TASKS):
        folder = write_records(f"{name}.jsonl", [RECORD | {"all_classes": ["a", "b"]}] * 2)
    prompts = draw(byte_level_tokenizer, folder)
    assert [(prompt.task, prompt.index) for prompt in prompts] == [(n, i) for n in TASKS for i in (0, 1)]
    for prompt in prompts:
        text = byte_level_tokenizer.decode(prompt.input_ids)
        assert RECORD["context"] in text
        assert (RECORD["input"] in text) == (prompt.task not in (*SUMMARISED, "lcc"))
        assert text.startswith("<|turn|>user") == TASKS[prompt.task].chat
        assert prompt.references == ("the gardener", "Hans")
        assert prompt.max_new_tokens == TASKS[prompt.task].max_new_tokens
        assert 0 <= score("Paragraph 1", prompt) <= 1


def test_a_text_is_cut_by_characters_before_it_is_tokenized(byte_level_tokenizer, write_records, monkeypatch):
    folder = write_records("hotpotqa.jsonl", [RECORD | {"context": "disi 77 49 ; " * 100_000}])
    tokenizer, lengths = type(byte_level_tokenizer), []
    tokenize = tokenizer.__call__

    def count(self, text, *arguments, **options):
        lengths.append(len(text))
        return tokenize(self, text, *arguments, **options)

    monkeypatch.setattr(tokenizer, "__call__", count)
    (prompt,) = draw(byte_level_tokenizer, folder)
    assert len(prompt.input_ids) <= LENGTH
    assert max(lengths) <= 2 * 64 * LENGTH


def test_files_that_are_no_task_are_passed_over_and_as_many_as_asked_are_taken(
    byte_level_tokenizer, write_records
):
    write_records("hotpotqa_e.jsonl", [RECORD])
    folder = write_records("deeper/hotpotqa.jsonl", [RECORD | {"input": f"Who is {n}?"} for n in range(4)])
    prompts = draw(byte_level_tokenizer, folder, num_samples=3)
    assert [prompt.task for prompt in prompts] == ["hotpotqa"] * 3
    assert "Who is 2?" in byte_level_tokenizer.decode(prompts[2].input_ids)


def test_two_files_of_one_task_are_refused(byte_level_tokenizer, write_records):
    write_records("hotpotqa.jsonl", [RECORD])
    folder = write_records("deeper/hotpotqa.jsonl", [RECORD] * 2)
    with refusal("hotpotqa.jsonl` and `.*hotpotqa.jsonl` are of one task", "remove one of them"):
        draw(byte_level_tokenizer, folder)


@pytest.mark.parametrize("name", ["qasper", "triviaqa"])
def test_a_prompt_that_is_too_long_loses_its_middle(byte_level_tokenizer, write_records, name):
    context = " ".join(f"Line {n}." for n in range(2000))
    folder = write_records(f"{name}.jsonl", [RECORD | {"context": context}])
    (prompt,) = draw(byte_level_tokenizer, folder)
    taken = len(prompt.input_ids) + prompt.max_new_tokens
    assert LENGTH - 3 <= taken <= LENGTH
    text = byte_level_tokenizer.decode(prompt.input_ids)
    for kept in ("Line 0.", "Line 1999.", RECORD["input"]):
        assert kept in text
    assert "Line 1000." not in text


@pytest.mark.parametrize(
    ("name", "record", "named"),
    [
        ("hotpotqa", {k: v for k, v in RECORD.items() if k != "context"}, "record 1 has no `context`"),
        ("hotpotqa", RECORD | {"answers": []}, "record 1 has no `answers`"),
        ("hotpotqa", RECORD | {"answers": [5]}, "record 1: `answers` is [5], not a list of texts"),
        ("trec", RECORD | {"all_classes": []}, "record 1 has no `all_classes`"),
    ],
)
def test_a_record_of_another_form_is_refused(refused, write_records, name, record, named):
    folder = write_records(f"{name}.jsonl", [record])
    refused(draw_longbench, folder, f"{name}.jsonl`: {named}", length=LENGTH)


def test_a_folder_without_its_files_a_length_without_room_and_a_missing_package_are_refused(
    refused, write_records, tmp_path, monkeypatch
):
    folder = write_records("others.jsonl", [RECORD])
    for place, message in (
        (tmp_path / "missing", "does not exist"),
        (folder / "others.jsonl", "is a file"),
        (folder, f"`{folder}` holds no record of LongBench"),
    ):
        refused(draw_longbench, place, message, length=LENGTH)
    write_records("gov_report.jsonl", [RECORD])
    refused(draw_longbench, folder, "520 tokens leave no room for `gov_report`", length=520)
    # Of summaries, before anything is answered.
    monkeypatch.setitem(sys.modules, "rouge_score", None)
    scores._rouge_scorer.cache_clear()
    refused(draw_longbench, folder, "package `rouge-score`", length=LENGTH)
    (folder / "gov_report.jsonl").rename(folder / "hotpotqa.jsonl")
    monkeypatch.setitem(sys.modules, "datasets", None)
    refused(draw_longbench, folder, "package `datasets`", length=LENGTH)
