"""The shipped model's tasks, read back from the prompt's text by a parser of their own."""

import hashlib
import random
import re

import pytest

from leank_convert.testbed.tasks import MIN_TOKENS, TASKS, build_document, build_sample, build_samples

SINK_SIZE, RECENT_SIZE = 16, 64
LENGTHS = (MIN_TOKENS, 161, 513, 2048)
VALUE = re.compile(r"\d\d \d\d")

every_task = pytest.mark.parametrize("task", TASKS)
every_name = pytest.mark.parametrize("two_word_names", [False, True], ids=["one_word", "two_words"])


class Parsed:
    """A prompt as its reader sees it: facts (name, what it stands for), their places, and the question."""

    def __init__(self, prompt, name_words):
        *lines, question = prompt.split(" ; ")
        self.word, self.asked = question.split(" ", 1)
        self.facts: list[tuple[str, str]] = []
        self.spans: list[tuple[int, int]] = []
        position = 2  # <|begin|> <|user|>
        for line in lines:
            words = line.split()
            self.facts.append((" ".join(words[:name_words]), " ".join(words[name_words:])))
            self.spans.append((position, position + len(words) + 1))
            position += len(words) + 1
        self.prompt_tokens = position + len(question.split()) + 2  # <|end|> <|assistant|>

    def answer(self):
        """The right answer and the facts that it needs."""
        if self.word == "trace":
            told, needed, name = self.asked, [], self.asked
            while not needed or not VALUE.fullmatch(name):
                (index,) = [i for i, (left, _) in enumerate(self.facts) if left == name]
                name = self.facts[index][1]
                needed.append(index)
                told += " " + name
            return told, needed
        needed = [i for i, (left, _) in enumerate(self.facts) if left == self.asked]
        return " ; ".join(f"{self.asked} {self.facts[i][1]}" for i in needed), needed


def draw(task, tokens, two_word_names, count):
    rng = random.Random(f"{task} {tokens}")
    samples = [build_sample(task, rng, tokens, two_word_names=two_word_names) for _ in range(count)]
    return [(sample, Parsed(sample.prompt, 1 + two_word_names)) for sample in samples]


@every_task
@every_name
@pytest.mark.parametrize("tokens", LENGTHS)
def test_answer_is_in_the_middle_of_a_prompt_of_the_asked_length(task, two_word_names, tokens):
    for sample, parsed in draw(task, tokens, two_word_names, 12):
        answer, needed = parsed.answer()
        assert sample.task == task
        assert sample.answer == answer
        fewest = {"find": 1, "list": 2, "trace": 2}[parsed.word]
        assert fewest <= len(needed) <= (1 if task == "retrieval" else 4)
        used = parsed.prompt_tokens + len(sample.answer.split()) + 1
        assert tokens - 45 <= used <= tokens
        for fact in needed:
            start, end = parsed.spans[fact]
            assert start >= SINK_SIZE
            assert end <= parsed.prompt_tokens - RECENT_SIZE


def test_unknown_task_is_named_with_the_known_ones():
    with pytest.raises(
        ValueError, match=r"unknown task `sorting`; one of retrieval, multi_value, variable_tracking"
    ):
        build_sample("sorting", random.Random(0), 512)
    with pytest.raises(ValueError, match="unknown task `sorting`"):
        build_document("sorting", random.Random(0), 512)


@every_task
@pytest.mark.parametrize("tokens", [0, MIN_TOKENS - 1])
def test_length_without_room_is_refused(task, tokens):
    with pytest.raises(ValueError, match=f"{tokens} tokens are too few for a prompt; at least {MIN_TOKENS}"):
        build_sample(task, random.Random(0), tokens)


def test_samples_are_still_those_that_the_shipped_figures_were_measured_on():
    """The figures of the shipped model rest on what these states draw."""
    digests = {}
    for task in TASKS:
        rng = random.Random(f"{task}/300")
        drawn = [build_sample(task, rng, 300) for _ in range(40)]
        text = repr([(sample.prompt, sample.answer) for sample in drawn])
        digests[task] = hashlib.sha256(text.encode()).hexdigest()[:8]
    assert digests == {"retrieval": "8fa8e889", "multi_value": "792a179a", "variable_tracking": "0568d37e"}


@every_task
@every_name
@pytest.mark.parametrize("tokens", [400, 1000])
def test_several_questions_are_different_ones_of_one_document(task, two_word_names, tokens):
    rng = random.Random(f"{task} {tokens}")
    for _ in range(8):
        samples = build_samples(task, rng, tokens, 3, two_word_names=two_word_names)
        parsed = [Parsed(sample.prompt, 1 + two_word_names) for sample in samples]
        assert len({tuple(each.facts) for each in parsed}) == 1
        assert len({each.asked for each in parsed}) == 3
        for sample, each in zip(samples, parsed, strict=True):
            answer, needed = each.answer()
            assert sample.answer == answer
            assert each.prompt_tokens + len(answer.split()) + 1 <= tokens
            for fact in needed:
                start, end = each.spans[fact]
                assert start >= SINK_SIZE
                assert end <= each.prompt_tokens - RECENT_SIZE


@every_task
def test_more_questions_than_any_document_has_are_refused(task):
    with pytest.raises(
        ValueError, match=r"`\w+` in 170 tokens can be asked 30 questions: of 20, the best had"
    ):
        build_samples(task, random.Random(0), 170, 30, max_documents=20)
