import json

import pytest

from leank_convert.errors import LeanKError
from leank_convert.evaluate.ruler import draw_prompts
from leank_convert.evaluate.ruler.question_file import read_question_file
from leank_convert.recipe import HaystackSection


def write(path, content):
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


@pytest.fixture
def squad(tmp_path):
    """Two articles; the last question has no answer."""
    articles = [
        ["Rivers run down.", "Streams are short.", "Lakes are wide."],
        ["Iron rusts."],
    ]
    data = [
        {
            "title": "x",
            "paragraphs": [
                {
                    "context": text,
                    "qas": [
                        {
                            "question": f"What of {text.split()[0]}?",
                            "answers": [{"text": text.split()[2][:-1]}] * 2,
                        }
                    ]
                    if text.count(" ") == 2
                    else [{"question": "Does it?", "answers": [], "is_impossible": True}],
                }
                for text in texts
            ],
        }
        for texts in articles
    ]
    return write(tmp_path / "squad.json", {"version": "v2.0", "data": data})


def test_squads_form_is_read_with_an_articles_other_paragraphs_beside(squad):
    read = read_question_file(squad, ())
    assert [asked.question for asked in read.questions] == [
        "What of Rivers?",
        "What of Streams?",
        "What of Lakes?",
    ]
    assert read.questions[0].answers == ("down",)
    assert read.questions[0].documents == ("Rivers run down.",)
    assert read.questions[0].related == ("Streams are short.", "Lakes are wide.")
    assert read.documents == ("Rivers run down.", "Streams are short.", "Lakes are wide.", "Iron rusts.")


def test_an_articles_other_paragraphs_fill_a_prompt_first(plain_tokenizer, tmp_path):
    def article(name, count):
        contexts = [f"{name} {n} is told of in this paragraph and in no other one." for n in range(count)]
        asked = {"question": f"Which {name}?", "answers": [{"text": f"{name} 0"}]}
        return {
            "paragraphs": [
                {"context": text, "qas": [asked] if n == 0 else []} for n, text in enumerate(contexts)
            ]
        }

    path = write(tmp_path / "a.json", {"data": [article("Otter", 5), article("Heron", 300)]})
    prompts = draw_prompts(plain_tokenizer, ["qa"], [2000], 2, 0, HaystackSection(), path)
    (otter,) = (prompt for prompt in prompts if prompt.references == ("Otter 0",))
    text = plain_tokenizer.decode(otter.input_ids)
    assert all(text.count(f"Otter {n} is") == 1 for n in range(5))
    assert text.count("Heron") > 5


def test_hotpot_qas_form_is_read(tmp_path):
    record = {
        "_id": "a",
        "question": "Which?",
        "answer": "yes",
        "context": [["Oak", ["An oak is a tree.", " It is tall."]], ["Elm", ["So is an elm."]]],
    }
    (asked,) = read_question_file(write(tmp_path / "hotpot.json", [record]), ()).questions
    assert asked.answers == ("yes",)
    assert asked.documents == ("Oak\nAn oak is a tree. It is tall.", "Elm\nSo is an elm.")


def test_plain_records_are_read_line_by_line(question_file, records):
    read = read_question_file(question_file, ())
    assert [asked.question for asked in read.questions] == [record["question"] for record in records]
    assert read.documents == tuple(record["documents"][0] for record in records)


def test_what_a_tokenizer_takes_for_control_tokens_is_left_out(tmp_path):
    rows = [
        {"question": "One?", "answers": ["1"], "documents": ["One."]},
        {"question": "Two</s>?", "answers": ["2"], "documents": ["Two."]},
        {"question": "Three?", "answers": ["3"], "documents": ["Three <s>."]},
    ]
    read = read_question_file(write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, rows))), ["<s>", "</s>"])
    assert [asked.question for asked in read.questions] == ["One?"]
    assert read.documents == ("One.", "Two.")


GOOD = '{"question": "q", "answers": ["a"], "documents": ["d"]}\n'


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.json", None, r"none\.json` cannot be read: No such file"),
        ("a.csv", "q,a", r"a\.csv` has the suffix `\.csv`"),
        ("a.json", "{", r"a\.json` is not JSON: .* at line 1, column 2"),
        ("a.json", "3", r"a\.json` holds a int"),
        ("a.json", "[]", r"a\.json` has no question with an answer"),
        ("a.jsonl", "\n", r"a\.jsonl` has no question with an answer"),
        ("a.jsonl", GOOD + "\n{]\n", r"a\.jsonl:3` is not JSON"),
        (
            "a.jsonl",
            GOOD + '{"question": "q", "documents": ["d"]}',
            r"a\.jsonl:2`, `answers`: Field required",
        ),
        ("a.jsonl", GOOD.replace('"a"', '" "'), r"a\.jsonl:1`, `answers\.0`: String should have at least 1"),
        ("a.jsonl", GOOD.replace('["d"]', '"d"'), r"a\.jsonl:1`, `documents`: Input should be a valid list"),
        ("a.jsonl", "[1]", r"a\.jsonl:1`: Input should be a valid dictionary"),
        ("a.json", '{"data": [{"paragraphs": [{"qas": []}]}]}', r"`data\.0\.paragraphs\.0\.context`: Field"),
        ("a.json", '[{"question": "q", "answer": "a"}]', r"a\.json: record 0`, `context`: Field required"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_with_what_is_wrong(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(LeanKError, match=message) as caught:
        read_question_file(tmp_path / name, ())
    assert caught.value.hint


def test_a_file_in_another_encoding_is_refused(tmp_path):
    (tmp_path / "a.json").write_bytes(b"\xe9")
    with pytest.raises(LeanKError, match=r"a\.json` is not UTF-8: .* at byte 0"):
        read_question_file(tmp_path / "a.json", ())


def test_a_file_with_nothing_to_fill_a_prompt_with_is_refused(plain_tokenizer, tmp_path):
    path = write(tmp_path / "a.jsonl", GOOD)
    with pytest.raises(LeanKError, match=r"a\.jsonl` has no document beside those of `q`") as caught:
        draw_prompts(plain_tokenizer, ["qa"], [1000], 1, 0, HaystackSection(), path)
    assert "other documents" in caught.value.hint
