"""Questions on documents, read from the user's file, and RULER's prompts of them."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from leank_convert.data.drafts import first_pieces
from leank_convert.data.records import read_field, read_records
from leank_convert.errors import LeanKError
from leank_convert.evaluate.ruler.synthetic import Draft

_FORM = (
    "a question file is .json or .jsonl: records with `question`, and `answers` and `documents`, which are "
    "lists of text; or SQuAD's .json"
)
_INSTRUCTION = (
    "Read the documents and answer the question with the answer alone, in as few words as it takes."
)


class Question(NamedTuple):
    """A question with its answers and documents."""

    text: str
    answers: tuple[str, ...]  # each is right
    documents: tuple[str, ...]  # those that a prompt must hold
    article: tuple[str, ...] = ()  # SQuAD's paragraphs around it and its own, which fill a prompt first


def read_questions(path: Path, control: re.Pattern[str]) -> list[Question]:
    """Read questions in the order of a .json or .jsonl file of records, or SQuAD's .json.

    None on documents with a tokenizer's control tokens is used, which it takes for those wherever they stand.

    Raises:
        LeanKError: If the file is missing, is of another form, or holds no question with an answer;
            if the package `datasets` is missing.
    """
    if path.suffix not in (".json", ".jsonl"):
        raise LeanKError(f"question file `{path}` has the suffix `{path.suffix}`", hint=_FORM)
    questions = []
    for place, record in list(read_records(path, "question file", field="data")):
        is_squad = "paragraphs" in record
        for question in _read_article(record, place) if is_squad else [_read_plain(record, place)]:
            if not control.search("\n".join((question.text, *question.documents))):
                article = tuple(text for text in question.article if not control.search(text))
                questions.append(question._replace(article=article))
    if not questions:
        raise LeanKError(f"question file `{path}` has no question with an answer", hint=_FORM)
    return questions


def collect_documents(questions: Sequence[Question]) -> list[str]:
    """The documents of a file, each once, in their order."""
    return list(dict.fromkeys(text for asked in questions for text in asked.article or asked.documents))


def draft_question(
    questions: Sequence[Question],
    documents: Sequence[str],
    path: Path,
    seed: int,
    index: int,
    rng: random.Random,
) -> Draft:
    """Draw the question of an index, the same at every length, and the documents around its own.

    As RULER does, those of its article come first, then the file's others.

    Raises:
        LeanKError: If the file has fewer questions, or no document of another one.
    """
    if index >= len(questions):
        raise LeanKError(
            f"question file `{path}` has {len(questions)} questions, fewer than the samples of `qa` that "
            "were asked for",
            hint=f"ask for {len(questions)} samples or fewer, or leave `qa` out",
        )
    asked = questions[random.Random(f"{seed}/qa").sample(range(len(questions)), len(questions))[index]]
    near = [text for text in asked.article if text not in asked.documents]
    far = [text for text in documents if text not in asked.documents and text not in asked.article]
    if not near and not far:
        raise LeanKError(
            f"question file `{path}` has no document besides those of `{asked.text}`",
            hint="add records on other documents: they fill the prompt",
        )
    filler = first_pieces(_repeat_shuffled(near, far, random.Random(rng.getrandbits(64))))
    order = rng.getrandbits(64)

    def render(num_documents: int) -> str:
        shown = [*asked.documents, *filler(num_documents)]
        random.Random(order).shuffle(shown)
        listed = "\n\n".join(f"[Document {place}]\n{text}" for place, text in enumerate(shown, start=1))
        return f"{_INSTRUCTION}\n\n{listed}\n\n{_INSTRUCTION}\n\nQuestion: {asked.text}"

    return Draft(render, "Answer:", asked.answers, 32, "any")


def _read_plain(record: dict[str, Any], place: str) -> Question:
    asked = read_field(record, "question", str, place, _FORM)
    answers, documents = (read_field(record, key, list, place, _FORM) for key in ("answers", "documents"))
    for key, texts in (("question", [asked]), ("answers", answers), ("documents", documents)):
        if not texts or not all(isinstance(text, str) and text.strip() for text in texts):
            raise LeanKError(f"{place}: `{key}` is `{record[key]!r:.80}`", hint=_FORM)
    return Question(asked.strip(), *(tuple(text.strip() for text in texts) for texts in (answers, documents)))


def _read_article(article: dict[str, Any], place: str) -> Iterator[Question]:
    """The questions of an article of SQuAD's file; those without an answer are left out."""
    paragraphs = read_field(article, "paragraphs", list, place, _FORM)
    contexts = tuple(read_field(paragraph, "context", str, place, _FORM).strip() for paragraph in paragraphs)
    for paragraph, context in zip(paragraphs, contexts, strict=True):
        for asked in read_field(paragraph, "qas", list, place, _FORM):
            given = read_field(asked, "answers", list, place, _FORM)
            if answers := [read_field(answer, "text", str, place, _FORM) for answer in given]:
                plain = {**asked, "answers": list(dict.fromkeys(answers)), "documents": [context]}
                yield _read_plain(plain, place)._replace(article=contexts)


def _repeat_shuffled(first: Sequence[str], then: Sequence[str], rng: random.Random) -> Iterator[str]:
    shuffled = [*rng.sample(first, len(first)), *rng.sample(then, len(then))]
    while True:
        yield from shuffled
