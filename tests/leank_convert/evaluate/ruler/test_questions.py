"""Files of questions, and prompts of them."""

import json
import random
import re
from collections import Counter

import pytest

from leank_convert.errors import LeanKError
from leank_convert.evaluate.ruler.questions import (
    Question,
    collect_documents,
    draft_question,
    read_questions,
)
from tests.checks import refusal
from tests.leank_convert.evaluate.ruler.conftest import split

RECORD = {"question": "One?", "answers": ["1"], "documents": ["One."]}


@pytest.fixture
def write(tmp_path):
    def dump(name, content):
        path = tmp_path / name
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return dump


@pytest.mark.parametrize("lines", [False, True])
def test_records_are_read_in_order(write, records, lines):
    path = write("a.jsonl", "\n".join(map(json.dumps, records))) if lines else write("a.json", records)
    assert read_questions(path, re.compile("(?!)")) == [
        Question(record["question"], tuple(record["answers"]), tuple(record["documents"]))
        for record in records
    ]


@pytest.mark.parametrize("indent", [None, 1])
def test_squads_questions_that_have_answers_are_read_with_their_paragraphs(write, indent):
    asked = {"question": "What?", "id": "7", "answers": [{"text": "down", "answer_start": 9}] * 2}
    impossible = {"question": "Does it?", "answers": [], "is_impossible": True}
    article = ("Rivers run down.", "Iron rusts.")
    pairs = zip(article, (asked, impossible), strict=True)
    paragraphs = [{"context": text, "qas": [question]} for text, question in pairs]
    content = {"version": "v2.0", "data": [{"title": "x", "paragraphs": paragraphs}]}
    path = write("squad.json", json.dumps(content, indent=indent))
    assert read_questions(path, re.compile("(?!)")) == [Question("What?", ("down",), article[:1], article)]


def test_what_a_tokenizer_takes_for_control_tokens_is_left_out(write):
    rows = [RECORD, {**RECORD, "question": "Two</s>?"}, {**RECORD, "documents": ["Three <s>."]}]
    assert [asked.text for asked in read_questions(write("a.json", rows), re.compile("</?s>"))] == ["One?"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", json.dumps(RECORD) + "\n{]", r"a\.jsonl` cannot be read: JSON parse error"),
        ("a.csv", "q,a", r"a\.csv` has the suffix `\.csv`"),
        ("a.json", [], r"a\.json` has no question with an answer"),
        ("a.json", {"version": "v2.0"}, r"a\.json` cannot be read: no 'data'"),
        ("a.json", [RECORD, {"question": "q"}], r"a\.json`: record 2 has no `answers`"),
        ("a.json", [{**RECORD, "answers": [" "]}], r"record 1: `answers` is `\[' '\]`"),
        (
            "a.json",
            {"data": [{"paragraphs": []}, {"paragraphs": [{"qas": [{"answers": [{"text": "a"}]}]}]}]},
            "record 2 has no `context`",
        ),
    ],
)
def test_a_file_that_cannot_be_used_is_named_with_what_is_wrong(write, name, content, message):
    with refusal(message):
        read_questions(write(name, content), re.compile("(?!)"))


def test_a_question_stands_with_its_documents_among_others(plain_tokenizer, records, draw):
    asked = []
    for prompt in draw(plain_tokenizer, "qa", 700, num_samples=8):
        message, _ = split(plain_tokenizer, prompt)
        question = re.search(r"Question: (.*)$", message).group(1)
        (record,) = (record for record in records if record["question"] == question)
        assert prompt.references == tuple(record["answers"])
        documents = re.findall(r"^\[Document (\d+)\]\n(.*)$", message, re.M)
        assert [int(number) for number, _ in documents] == list(range(1, len(documents) + 1))
        texts = [text for _, text in documents]
        assert texts.count(record["documents"][0]) == 1
        assert len(set(texts)) == len(texts) > 4
        asked.append(question)
    assert len(set(asked)) == 8


def test_documents_come_again_where_the_file_has_too_few(plain_tokenizer, records, draw):
    (prompt,) = draw(plain_tokenizer, "qa", 3000, num_samples=1)
    counts = Counter(re.findall(r"^\[Document \d+\]\n(.*)$", split(plain_tokenizer, prompt)[0], re.M))
    assert set(counts) == {record["documents"][0] for record in records}
    (own,) = (text for text in counts if prompt.references[1] in text)
    assert counts.pop(own) == 1
    assert max(counts.values()) > 1


def test_the_rest_of_an_article_fills_a_prompt_before_other_documents(tmp_path):
    first, second = ("A1", "A2", "A3"), ("B1", "B2")
    asked = [Question("a?", ("1",), first[:1], first), Question("b?", ("2",), second[:1], second)]
    documents = collect_documents(asked)
    assert documents == [*first, *second]
    for index in range(2):
        draft = draft_question(asked, documents, tmp_path, 0, index, random.Random(index))
        own = first if "a?" in draft.render(0) else second
        shown = re.findall(r"^[AB]\d$", draft.render(len(own) - 1), re.M)
        assert sorted(shown) == sorted(own)
        assert set(re.findall(r"^[AB]\d$", draft.render(4), re.M)) == set(documents)


def test_a_file_that_is_too_small_is_refused(plain_tokenizer, draw, tmp_path):
    with refusal("has 12 questions, fewer than the samples", "12 samples or fewer"):
        draw(plain_tokenizer, "qa", num_samples=13)
    asked = [Question("a?", ("1",), ("A1",))]  # nothing to fill a prompt with
    with pytest.raises(LeanKError, match=r"no document besides those of `a\?`"):
        draft_question(asked, collect_documents(asked), tmp_path, 0, 0, random.Random(0))
