"""Several questions on one context, read back from the prompts' text by parsers of their own."""

import re

import pytest

from leank_convert.data import SampleSource, source
from leank_convert.data.sample import encode_prompts, join_questions
from tests.checks import refusal, section

EIGHT = {"questions_per_context": 8}
ASKED = {
    "retrieval": r"Which code opens locker (\S+)\?",
    "multi_value": r"Which parcels did the courier leave for ([A-Z]\w+ [A-Z]\w+)\?",
    "passkey": r"What did telegram number (\d+) read\?",
}
every_task = pytest.mark.parametrize("task", ASKED)


def answer_in(document, task, asked):
    """What a reader finds in the document."""
    if task == "retrieval":
        return re.search(rf"^Locker {asked} opens with code (\S+)\.$", document, re.M).group(1)
    if task == "multi_value":
        return ", ".join(re.findall(rf"the courier left parcel (\d+) for {asked}\.", document))
    return re.search(rf"Telegram number {asked} read: ([a-z ]+)\.", document).group(1)


@every_task
@pytest.mark.parametrize("num_questions", [1, 5])
def test_prefix_and_question_are_the_tokens_of_a_prompt_and_answer_of_their_own(
    tokenizer, task, num_questions, monkeypatch
):
    messages = {}  # every user message that was tokenised, by what it became

    def recording(tokenizer, prompts):
        encoded = encode_prompts(tokenizer, prompts)
        messages.update(zip(map(tuple, encoded), prompts, strict=True))
        return encoded

    monkeypatch.setattr(source, "encode_prompts", recording)
    data = section(tasks=[task], questions_per_context=num_questions)
    for index in range(2):
        sample = SampleSource(tokenizer, data, seed=3).draw(index)
        assert len(sample.questions) == num_questions
        documents, everything_asked = set(), []
        for place, question in enumerate(sample.questions):
            prompt_ids = sample.prompt_ids(place).tolist()
            message = messages[tuple(prompt_ids)]
            alone = tokenizer.apply_chat_template(
                [{"role": "user", "content": message}], add_generation_prompt=True, return_dict=False
            )
            assert alone == prompt_ids
            # No other question is in the prompt, and the document says the same whatever is asked.
            (asked,) = re.findall(ASKED[task], message)
            document, _, _ = message.rpartition("\n\n")
            everything_asked.append(asked)
            documents.add(document)
            answer_ids = tokenizer(answer_in(document, task, asked), add_special_tokens=False)["input_ids"]
            assert sample.answer_ids(place).tolist() == answer_ids
            assert [*sample.prefix_ids.tolist(), *question.input_ids.tolist()] == alone + answer_ids
        assert len(documents) == 1
        assert len(set(everything_asked)) == num_questions


@every_task
def test_prefix_is_all_that_the_prompts_share(tokenizer, task):
    sample = SampleSource(tokenizer, section(tasks=[task], questions_per_context=4), seed=0).draw(0)
    ends = [sample.prompt_ids(place)[len(sample.prefix_ids) :].tolist() for place in range(4)]
    assert len({tuple(end[:1]) for end in ends}) > 1
    assert len(sample.prefix_ids) > 0.9 * sample.num_positions


@every_task
def test_the_longest_prompt_with_its_answer_fills_the_budget_to_within_a_line(tokenizer, task):
    line = "Locker 0a1b-2c3d-4e5f opens with code 012345-6789ab-cdef01-234567. It was noon." * 2
    longest_line = len(tokenizer(line)["input_ids"])
    for length, num_questions in [(2500, 6), (3001, 1), (9999, 2)]:
        lengths = {"min_length": length, "max_length": length}
        data = section(tasks=[task], **lengths, questions_per_context=num_questions)
        sample = SampleSource(tokenizer, data, seed=3).draw(length)
        places = range(num_questions)
        taken = [len(sample.prompt_ids(place)) + len(sample.answer_ids(place)) for place in places]
        assert length - longest_line < max(taken) == sample.num_positions <= length
        assert sample.num_tokens == sum(taken) - (num_questions - 1) * len(sample.prefix_ids)
        assert sample.num_answer_tokens == sum(len(sample.answer_ids(place)) for place in places)


@pytest.mark.parametrize(("task", "fact"), [("retrieval", "Locker {} "), ("passkey", "Telegram number {} ")])
def test_what_is_asked_is_one_of_many_facts_and_anywhere(plain_tokenizer, task, fact):
    places, asked = [], set()
    samples = SampleSource(plain_tokenizer, section(tasks=[task], min_length=6000, max_length=6000), seed=0)
    for index in range(15):
        prompt = plain_tokenizer.decode(samples.draw(index).prompt_ids())
        asked.add(re.search(ASKED[task], prompt).group(1))
        places.append(prompt.index(fact.format(re.search(ASKED[task], prompt).group(1))) / len(prompt))
        if task == "retrieval":
            assert len(re.findall(r"^Locker \S+ opens", prompt, re.M)) > 10
            continue
        telegrams = re.findall(r"Telegram number (\d+) read: ([a-z ]+)\.", prompt)
        assert sorted(int(number) for number, _ in telegrams) == list(range(1, 11))
        assert all(16 <= len(words.split()) <= 32 for _, words in telegrams)
    assert min(places) < 0.2
    assert max(places) > 0.8
    assert len(asked) > 5


@pytest.mark.parametrize(
    ("values", "message", "hint"),
    [
        ({"tasks": ["multi_value"], "questions_per_context": 398}, "400 names, too few for 398 q", "to 397"),
        (
            {"tasks": ["variable_tracking"], "wording": "testbed", "min_length": 200, **EIGHT},
            "200 tokens can be asked 8 questions",
            "`data.questions_per_context`",
        ),
        *(
            (
                {"tasks": [task], "min_length": 300, "max_length": 300, "questions_per_context": 7},
                f"no room for `{task}`: .* with facts for 7 questions",
                "`data.min_length` to ",
            )
            for task in ("retrieval", "passkey")
        ),
    ],
)
def test_more_questions_than_there_is_room_for_are_refused_with_how_to_ask_them(
    plain_tokenizer, testbed_tokenizer, values, message, hint
):
    tokenizer = testbed_tokenizer if "wording" in values else plain_tokenizer
    with refusal(message, hint) as caught:
        SampleSource(tokenizer, section(**values), seed=0).check()
    if hint.endswith("` to "):
        enough = int(re.search(r"`data.min_length` to (\d+)", caught.value.hint).group(1))
        values |= {"min_length": enough, "max_length": enough}
        SampleSource(tokenizer, section(**values), seed=0).check()


def test_a_prompt_that_begins_another_is_the_prefix_and_those_that_share_no_token_are_refused():
    sample = join_questions("retrieval", [[1, 2, 3], [1, 2]], [[4], [5]])
    assert sample.prefix_ids.tolist() == [1, 2]
    assert [question.answer_start for question in sample.questions] == [1, 0]
    assert sample.prompt_ids(0).tolist() == [1, 2, 3]
    assert sample.answer_ids(1).tolist() == [5]
    with refusal("differ from their first token on"):
        join_questions("retrieval", [[1, 2], [3, 2]], [[4], [5]])


def test_the_days_date_is_not_in_the_prompt(plain_tokenizer):
    """A run that is resumed tomorrow has the same samples."""
    plain_tokenizer.chat_template = (
        "\n{% if strftime_now is defined %}{% set today = strftime_now('%d %b %Y, %H:%M') %}{% endif %}"
        "{{ today }}{% for m in messages %}{{ strftime_now('%Y-%m-%d') }}{{ m['content'] }}{% endfor %}"
    )
    sample = SampleSource(plain_tokenizer, section(), seed=0).draw(0)
    prompt = plain_tokenizer.decode(sample.prompt_ids())
    assert prompt.startswith("\n26 Jul 2024, 12:002024-07-26Here is")


def test_a_model_that_thinks_first_is_told_not_to(plain_tokenizer):
    plain_tokenizer.chat_template += "{% if enable_thinking is false %}(no thoughts){% endif %}"
    sample = SampleSource(plain_tokenizer, section(), seed=0).draw(0)
    assert plain_tokenizer.decode(sample.prompt_ids()).endswith("(no thoughts)")
