"""GSM-Infinite's rows become prompts, by subset, number of operations and length."""

import pytest

from leank_convert.evaluate.benchmarks.gsm_infinite import draw_gsm_infinite
from leank_convert.evaluate.prompt import score

ROW = {
    "problem": "The number of adult owl in Pine Ridge equals 2. ",
    "question": "How many adult owl does Pine Ridge have?",
    "solution": "Define adult owl in Pine Ridge as w; so w = 2. Answer: 2.",
    "op": 2,
    "id": 7,
    "template": "crazy_zootopia",
    "mode": "normalforward",
    "length": "8k",
    "d": 2,
}
MESSAGES = [
    {"role": "system", "content": "You count."},
    {"role": "user", "content": "Problem: there are owls."},
    {"role": "user", "content": "Question: how many?"},
]
SYMBOLIC = {
    "problem": "assign V1 = 3. assign V2 = V1 + 1.",
    "question": "Which variables are 4?",
    "solution": "V2",
    "op": 1,
    "n": 1,
    "length": 8000,
    "id": 0,
    "d": 1,
    "answer_q": "4",
    "answer_list": ["V2"],
    "messages": [{"role": "user", "content": "<context>\nassign V2 = 4.\n</context>\n\nWhich are 4?"}],
}


def test_rows_are_counted_by_subset_operations_and_length(byte_level_tokenizer, write_records):
    rows = [ROW | {"messages": MESSAGES, "length": length} for length in ("zero_context", "8k", "8k", "8k")]
    write_records("medium/data/ops_2-00000-of-00001.parquet", rows)
    write_records("hard/data/ops_3-00000-of-00001.parquet", [ROW | {"d": 3, "op": 3}])
    folder = write_records("symbolic/data/ops_1-00000-of-00001.parquet", [SYMBOLIC])
    prompts = draw_gsm_infinite(byte_level_tokenizer, folder, num_samples=2)
    assert {(prompt.task, prompt.length, prompt.index) for prompt in prompts} == {
        ("medium 2 operations", 0, 0),
        ("medium 2 operations", 8000, 0),
        ("medium 2 operations", 8000, 1),
        ("hard 3 operations", 8000, 0),
        ("symbolic 1 operations", 8000, 0),
    }


def test_the_published_messages_are_asked_as_one(byte_level_tokenizer, write_records):
    folder = write_records("ops_2.parquet", [ROW | {"messages": MESSAGES}])
    (prompt,) = draw_gsm_infinite(byte_level_tokenizer, folder, 5)
    text = byte_level_tokenizer.decode(prompt.input_ids)
    assert "You count.\n\nProblem: there are owls.\n\nQuestion: how many?" in text
    assert prompt.max_new_tokens == 4096
    assert score("They are two owls. Answer: 2.", prompt) == 1
    assert score("Answer: 3.", prompt) == 0


def test_a_row_without_messages_is_asked_all_the_same(byte_level_tokenizer, write_records):
    (prompt,) = draw_gsm_infinite(byte_level_tokenizer, write_records("igsm_op2.jsonl", [ROW]), 5)
    text = byte_level_tokenizer.decode(prompt.input_ids)
    assert f"{ROW['problem'].strip()}\n\nQuestion: {ROW['question']}" in text
    assert "`Answer: `" in text
    assert "= 2. Answer" not in text  # the solution


def test_variables_are_right_if_they_are_all_and_no_others(byte_level_tokenizer, write_records):
    (prompt,) = draw_gsm_infinite(byte_level_tokenizer, write_records("ops_1.parquet", [SYMBOLIC]), 5)
    assert score("V1 = 3, so V2 = 4.\nThe variable is V2.", prompt) == 1
    assert score("They are V1 and V2.", prompt) == 0


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({k: v for k, v in ROW.items() if k != "op"}, "record 1 has no `op`"),
        (SYMBOLIC | {"answer_list": [1, 2]}, "`answer_list` is [1, 2], not a list of texts"),
        (ROW | {"messages": 5}, "`messages` is 5"),
        (ROW | {"solution": "It is 2."}, "`solution` ends in no `Answer: `: 'It is 2.'"),
        (ROW | {"d": 4}, "`d` is 4"),
        (ROW | {"length": "long"}, "`length` is 'long'"),
    ],
)
def test_a_row_of_another_form_is_refused(refused, write_records, row, named):
    refused(draw_gsm_infinite, write_records("rows.jsonl", [row]), named)


def test_a_folder_without_rows_or_with_a_torn_file_is_refused(refused, write_records, tmp_path):
    refused(draw_gsm_infinite, tmp_path / "missing", "does not exist")
    refused(draw_gsm_infinite, tmp_path, "holds no row of GSM-Infinite")
    folder = write_records("ops_2.parquet", [ROW] * 50)
    path = folder / "ops_2.parquet"
    path.write_bytes(path.read_bytes()[:-20])
    refused(draw_gsm_infinite, folder, f"`{path}` cannot be read")
