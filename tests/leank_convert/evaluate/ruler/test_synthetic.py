"""What the tasks hide and ask: needles, chains of names, words to count."""

import itertools
import re
from collections import Counter

import pytest

from leank_convert.evaluate.ruler import RULER_TASKS
from leank_convert.evaluate.ruler.synthetic import NOISE
from leank_convert.evaluate.ruler.words import ADJECTIVES, NOUNS, VERBS
from tests.leank_convert.evaluate.ruler.conftest import split

NEEDLE = re.compile(r"secret (number|code) for (\S+) is (\S+)\.")
# Keys in the text, values of each and keys asked for, as in RULER's synthetic.yaml.
NEEDLE_COUNTS = {
    "niah_single_3": (1, 1, 1),
    "niah_multikey_1": (4, 1, 1),
    "niah_multivalue": (1, 4, 1),
    "niah_multiquery": (4, 1, 4),
}


@pytest.mark.parametrize("task", [task for task in RULER_TASKS if task != "qa"])
def test_neither_instruction_nor_prefix_gives_the_answer_away(plain_tokenizer, task, draw):
    for prompt in draw(plain_tokenizer, task, num_samples=4):
        message, begin = split(plain_tokenizer, prompt)
        before, *_, question = message.split("\n\n")
        for reference in prompt.references:
            assert reference.lower() not in f"{before} {question} {begin}".lower()


@pytest.mark.parametrize(("task", "counts"), NEEDLE_COUNTS.items())
def test_needles_hide_as_many_values_of_as_many_keys(plain_tokenizer, task, counts, draw):
    num_keys, num_values, num_queries = counts
    for prompt in draw(plain_tokenizer, task, num_samples=3):
        message, begin = split(plain_tokenizer, prompt)
        found = NEEDLE.findall(message)
        asked = re.search(r"state for ([^?]+)\?", message).group(1).replace(", and ", ", ").split(", ")
        assert len(found) == num_keys * num_values
        assert len({key for _, key, _ in found}) == num_keys
        assert len(asked) == num_queries
        expected = [value for key in asked for _, other, value in found if other == key]
        assert sorted(prompt.references) == sorted(expected)
        for reference in prompt.references:
            assert message.count(reference) == 1
        for key in asked:
            assert re.search(rf"for .*\b{key}\b", begin)


@pytest.mark.parametrize("task", ["niah_multikey_2", "niah_multikey_3"])
def test_among_needles_one_alone_has_the_key_and_the_value(plain_tokenizer, task, draw):
    for prompt in draw(plain_tokenizer, task, num_samples=3):
        message, _ = split(plain_tokenizer, prompt)
        found = NEEDLE.findall(message)
        asked = re.search(r"state for (\S+)\?", message).group(1)
        assert len(found) > 10
        assert [value for _, key, value in found if key == asked] == list(prompt.references)
        assert [key for _, key, value in found if value in prompt.references] == [asked]
        kind = r"\d{7}" if task == "niah_multikey_2" else r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
        assert re.fullmatch(kind, prompt.references[0])


def test_needles_lie_at_every_depth(plain_tokenizer, draw):
    places = []
    for prompt in draw(plain_tokenizer, "niah_single_1", num_samples=30):
        lines = split(plain_tokenizer, prompt)[0].split("\n\n")[1].split("\n")
        assert lines.count(NOISE) == len(lines) - 1
        (place,) = (index for index, line in enumerate(lines) if line != NOISE)
        places.append(place / (len(lines) - 1))
    assert min(places) < 0.1
    assert max(places) > 0.9


def resolve(text):
    """What every name holds, line by line."""
    held = {}
    for name, value in re.findall(r"^SET (\w+) = (\w+)$", text, re.M):
        held[name] = held.get(value, value)
    return held


def test_tracked_names_are_all_that_hold_the_number(plain_tokenizer, draw):
    for prompt in draw(plain_tokenizer, "vt", num_samples=3):
        message, begin = split(plain_tokenizer, prompt)
        example, text = re.split(r"^Answer: .*$", message, flags=re.M)
        number = re.search(r"hold the number (\d+) at the end of the text\?$", text).group(1)
        held = resolve(text)
        assert {name for name, value in held.items() if value == number} == set(prompt.references)
        assert len(prompt.references) == 5
        assert number in begin
        # The example is solved rightly and has nothing of the question.
        (solved,) = re.findall(r"^Answer: .* (\d+) at the end of the text: (.*)$", message, re.M)
        assert resolve(example) == dict.fromkeys(solved[1].split(), solved[0])
        assert not set(resolve(example)) & set(held)
        assert solved[0] != number


@pytest.mark.parametrize(
    ("length", "common", "rare", "example"), [(2500, 6, 1, (20, 3, 1)), (9000, 30, 3, (40, 10, 3))]
)
def test_common_words_come_up_as_often_as_in_ruler(plain_tokenizer, length, common, rare, example, draw):
    for prompt in draw(plain_tokenizer, "cwe", length):
        message, _ = split(plain_tokenizer, prompt)
        shown, asked = (
            Counter(re.findall(r"\d+\. (\S+)", part))
            for part in re.split(r"^Answer: .*$", message, flags=re.M)
        )
        counts = [common] * 10 + [rare] * (len(asked) - 10)
        assert [count for _, count in asked.most_common()] == counts
        assert {word for word, _ in asked.most_common(10)} == set(prompt.references)
        assert len(asked) > 20
        num_words, often, seldom = example
        assert [count for _, count in shown.most_common()] == [often] * 10 + [seldom] * (num_words - 10)
        assert not set(shown) & set(asked)
        (solved,) = re.findall(r"^Answer: .* are: (.*)$", message, re.M)
        assert set(re.findall(r"[a-z]+", solved)) == {word for word, _ in shown.most_common(10)}


def test_frequent_words_follow_the_dots(plain_tokenizer, draw):
    for length in (600, 3000):
        for prompt in draw(plain_tokenizer, "fwe", length, num_samples=4):
            message, _ = split(plain_tokenizer, prompt)
            counts = Counter(message.split("\n\n")[1].split())
            (dots, most), *rest = counts.most_common()
            assert dots == "..."
            assert {word for word, _ in rest[:3]} == set(prompt.references)
            assert rest[2][1] > max((count for _, count in rest[3:]), default=0)
            # Frequencies fall with the square of the rank, rounded down.
            total = most * 1.645
            assert abs(rest[2][1] - total / 1.645 / 16) < 2


def test_no_word_is_part_of_another():
    """A reference is looked for anywhere in the answer."""
    words = ADJECTIVES + NOUNS + VERBS
    assert len(set(words)) == len(words)
    assert not [pair for pair in itertools.permutations(words, 2) if pair[0] in pair[1]]


def test_words_never_run_out(plain_tokenizer, draw):
    (prompt,) = draw(plain_tokenizer, "cwe", 30_000, num_samples=1)
    message, _ = split(plain_tokenizer, prompt)
    asked = Counter(re.findall(r"\d+\. (\S+)", re.split(r"^Answer: .*$", message, flags=re.M)[1]))
    assert len(asked) > len(ADJECTIVES + NOUNS + VERBS)
    assert Counter(asked.values()) == {30: 10, 3: len(asked) - 10}
    for reference in prompt.references:
        assert [word for word in asked if reference in word] == [reference]
