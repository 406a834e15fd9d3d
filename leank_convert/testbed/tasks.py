"""The three tasks of the shipped model, as text in its own small language.

A document is a shuffled list of facts, each closed by `;`. A fact is a name followed by what it stands
for: a value of two numbers (`goze 17 42 ;`) or another name (`deme goze ;`). The question names the task and
a name; the answer repeats the name, so that every value is retrieved by a decode step and none by the
prefill:

    retrieval           every name has one value            `find goze`   ->  `goze 17 42`
    multi_value         a name may have up to four values   `list goze`   ->  `goze 17 42 ; goze 03 99`
    variable_tracking   names stand for names, then a value `trace deme`  ->  `deme goze 17 42`

Values are listed in the order of the document. A name is one word or, where `two_word_names` asks for it,
two.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

TASKS = ("retrieval", "multi_value", "variable_tracking")
MIN_TOKENS = 160
"""The shortest prompt and answer with room for facts outside the windows."""
MAX_TOKENS = 3072
"""The longest sequence the shipped model is trained on; its figures are for prompts of up to 2048 tokens."""

QUESTION_WORDS = {"retrieval": "find", "multi_value": "list", "variable_tracking": "trace"}

PAD, BEGIN, USER, ASSISTANT, END, UNKNOWN = SPECIAL_TOKENS = (
    "<|pad|>",
    "<|begin|>",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
    "<|unknown|>",
)
_SYLLABLES = tuple(a + b for a, b in itertools.product("bdfgklmnprstvz", "aeiou"))
_WORDS = tuple(a + b for a, b in itertools.product(_SYLLABLES, _SYLLABLES))[3::7]
FIRST_WORDS, NAMES = _WORDS[:64], _WORDS[64:]
NUMBERS = tuple(f"{n:02d}" for n in range(100))
VOCABULARY = (*SPECIAL_TOKENS, ";", *QUESTION_WORDS.values(), *NUMBERS, *FIRST_WORDS, *NAMES)
IDS = {word: index for index, word in enumerate(VOCABULARY)}

# Asked facts stay this many tokens away from the document's start and end, so that neither the sink nor the
# recent window of the shipped recipe (16 and 64 tokens) holds them while the answer is decoded.
_MARGIN_START, _MARGIN_END = 20, 64
# <|begin|> <|user|> … <|end|> <|assistant|> … <|end|>, the question word and the asked name of two words.
_TEMPLATE_TOKENS = 8
_MAX_VALUES, _MAX_HOPS = 4, 4
# With names of two words: name and value; as many of those, with `;` between; a chain's names and its value.
_LONGEST_ANSWER = {"retrieval": 4, "multi_value": 5 * _MAX_VALUES - 1, "variable_tracking": 2 * _MAX_HOPS + 2}

Words = tuple[str, ...]


@dataclass(frozen=True)
class Question:
    """One question on a document: its words, the answer's words and the lines that hold the answer."""

    words: Words
    answer: Words
    lines: tuple[int, ...]


@dataclass(frozen=True)
class Document:
    """Facts in reading order, and every question that can be asked of them."""

    lines: tuple[Words, ...]
    questions: tuple[Question, ...]


@dataclass(frozen=True)
class Sample:
    """One prompt (a user message) and its only right answer."""

    task: str
    prompt: str
    answer: str


def build_document(
    task: str, rng: random.Random, num_tokens: int, *, two_word_names: bool = False
) -> Document:
    """Draw a document of at most `num_tokens` tokens with all of its questions.

    Raises:
        ValueError: `task` is not one of `TASKS`.
    """
    _check_task(task)
    # A fact takes its name, two more words and `;`. A link takes one word less where names have one word.
    tokens_per_line = 5 if two_word_names else 4
    names = _draw_names(rng, num_tokens // (tokens_per_line - 1) + 1, two_word_names)
    if task == "variable_tracking":
        return _build_chains(rng, names, num_tokens)
    return _build_values(rng, names, num_tokens // tokens_per_line, task)


def build_sample(
    task: str, rng: random.Random, num_tokens: int, *, two_word_names: bool | None = None
) -> Sample:
    """Draw one prompt whose tokens, with the template and the answer, number at most `num_tokens`.

    The asked facts lie away from both ends of the document. `multi_value` asks for at least two values. The
    same state of `rng` gives the same sample; where `two_word_names` is None, that is drawn, too.

    Raises:
        ValueError: `task` is unknown, or `num_tokens` leaves no room for a question.
    """
    return build_samples(task, rng, num_tokens, 1, two_word_names=two_word_names)[0]


def build_samples(
    task: str,
    rng: random.Random,
    num_tokens: int,
    num_questions: int,
    *,
    two_word_names: bool | None = None,
    max_documents: int = 1000,
) -> tuple[Sample, ...]:
    """Draw prompts that ask different questions of one document, each as `build_sample`.

    In search of one with enough questions no more than `max_documents` are drawn.

    Raises:
        ValueError: `task` is unknown, or `num_tokens` leaves no room for as many questions.
    """
    _check_task(task)
    if num_tokens < MIN_TOKENS:
        raise ValueError(f"{num_tokens} tokens are too few for a prompt; at least {MIN_TOKENS} are needed")
    if two_word_names is None:
        two_word_names = rng.random() < 0.5
    budget = num_tokens - _TEMPLATE_TOKENS - _LONGEST_ANSWER[task]
    most = 0
    for _ in range(max_documents):
        document = build_document(task, rng, budget, two_word_names=two_word_names)
        starts = list(itertools.accumulate((len(line) for line in document.lines), initial=0))
        eligible = [
            question
            for question in document.questions
            if (task != "multi_value" or len(question.lines) > 1)
            and starts[min(question.lines)] >= _MARGIN_START
            and starts[max(question.lines) + 1] <= starts[-1] - _MARGIN_END
        ]
        if len(eligible) >= num_questions:
            break
        most = max(most, len(eligible))
    else:
        raise ValueError(
            f"no document of `{task}` in {num_tokens} tokens can be asked {num_questions} questions: of "
            f"{max_documents}, the best had {most}; allow it more tokens"
        )
    text = [*itertools.chain.from_iterable(document.lines)]
    return tuple(
        Sample(task, " ".join([*text, *question.words]), " ".join(question.answer))
        for question in rng.sample(eligible, num_questions)
    )


def _check_task(task: str) -> None:
    if task not in TASKS:
        raise ValueError(f"unknown task `{task}`; one of {', '.join(TASKS)}")


def _draw_names(rng: random.Random, count: int, two_word_names: bool) -> list[Words]:
    """Draw distinct names; two-word names share first and second words, so that neither identifies one."""
    if not two_word_names:
        return [(name,) for name in rng.sample(NAMES, min(count, len(NAMES)))]
    seconds = rng.sample(NAMES, min(len(NAMES), max(8, count // 4)))
    pairs = rng.sample(range(len(FIRST_WORDS) * len(seconds)), count)
    return [(FIRST_WORDS[pair % len(FIRST_WORDS)], seconds[pair // len(FIRST_WORDS)]) for pair in pairs]


def _draw_value(rng: random.Random) -> Words:
    return rng.choice(NUMBERS), rng.choice(NUMBERS)


def _build_values(rng: random.Random, names: Sequence[Words], num_lines: int, task: str) -> Document:
    owners: list[int] = []
    for owner in range(len(names)):
        if len(owners) == num_lines:
            break
        count = 1 if task == "retrieval" else rng.randint(1, _MAX_VALUES)
        owners.extend([owner] * min(count, num_lines - len(owners)))
    rng.shuffle(owners)
    lines: list[Words] = []
    lines_of: dict[int, list[int]] = {}
    for index, owner in enumerate(owners):
        lines.append((*names[owner], *_draw_value(rng), ";"))
        lines_of.setdefault(owner, []).append(index)
    word = QUESTION_WORDS[task]
    questions = [
        Question((word, *names[owner]), tuple(w for i in held for w in lines[i])[:-1], tuple(held))
        for owner, held in lines_of.items()
    ]
    return Document(tuple(lines), tuple(questions))


def _build_chains(rng: random.Random, names: Sequence[Words], num_tokens: int) -> Document:
    """Lay out chains of two to four hops; the question starts at a chain's head."""
    facts: list[Words] = []
    chains: list[list[int]] = []
    used = tokens = 0
    while True:
        hops = rng.randint(2, _MAX_HOPS)
        chain = names[used : used + hops]
        if len(chain) < hops:
            break
        ends = [*chain[1:], _draw_value(rng)]
        drawn: list[Words] = [(*name, *end, ";") for name, end in zip(chain, ends, strict=True)]
        tokens += sum(map(len, drawn))
        if tokens > num_tokens:
            break
        used += hops
        chains.append(list(range(len(facts), len(facts) + hops)))
        facts.extend(drawn)
    order = list(range(len(facts)))
    rng.shuffle(order)
    place = {fact: line for line, fact in enumerate(order)}
    questions = []
    for held in chains:
        head = facts[held[0]][: len(names[0])]
        walked = tuple(w for fact in held for w in facts[fact][len(head) : -1])
        questions.append(
            Question(
                (QUESTION_WORDS["variable_tracking"], *head), head + walked, tuple(place[f] for f in held)
            )
        )
    return Document(tuple(facts[fact] for fact in order), tuple(questions))
