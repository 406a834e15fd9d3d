"""Questions on documents, from the user's file: SQuAD's and HotpotQA's forms, and a plain one of records."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, Field, StringConstraints, ValidationError

from leank_convert.errors import LeanKError

_Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]
_FORMS = (
    "a question file is .json in SQuAD's or HotpotQA's form, or .jsonl with `question`, `answers` and "
    "`documents` in each line, the last two lists"
)


class _Record(BaseModel):
    question: _Text
    answers: list[_Text] = Field(min_length=1)
    documents: list[_Text] = Field(min_length=1)


class _SquadAnswer(BaseModel):
    text: _Text


class _SquadQuestion(BaseModel):
    question: _Text
    answers: list[_SquadAnswer] = []
    is_impossible: bool = False


class _SquadParagraph(BaseModel):
    context: _Text
    qas: list[_SquadQuestion]


class _SquadArticle(BaseModel):
    paragraphs: list[_SquadParagraph]


class _Squad(BaseModel):
    data: list[_SquadArticle]


class _HotpotRecord(BaseModel):
    question: _Text
    answer: _Text
    context: list[tuple[_Text, list[str]]] = Field(min_length=1)


_Model = TypeVar("_Model", bound=BaseModel)


@dataclass(frozen=True)
class AskedQuestion:
    """A question, and where its answer is.

    Attributes:
        question: As it is asked.
        answers: Each is right.
        documents: Those that a prompt must hold.
        related: Those that fill it first, such as the rest of an article.
    """

    question: str
    answers: tuple[str, ...]
    documents: tuple[str, ...]
    related: tuple[str, ...] = ()


@dataclass(frozen=True)
class QuestionFile:
    """What a file holds.

    Attributes:
        path: The file.
        questions: One or more, in the order of the file.
        documents: All of the file, each once.
        digest: Of the file's content.
    """

    path: Path
    questions: tuple[AskedQuestion, ...]
    documents: tuple[str, ...]
    digest: str


def read_question_file(path: Path, control_tokens: Collection[str]) -> QuestionFile:
    """Read questions and documents.

    Args:
        path: Ends in .json or .jsonl.
        control_tokens: What a tokenizer takes for control tokens wherever it stands: no question or document
            with one of them is used.

    Raises:
        LeanKError: If the file is missing, is of no known form, or has no question with an answer; names the
            line or key.
    """
    if path.suffix not in (".json", ".jsonl"):
        raise LeanKError(f"question file `{path}` has the suffix `{path.suffix}`", hint=_FORMS)
    try:
        content = path.read_bytes()
        text = content.decode("utf-8-sig")
    except OSError as error:
        raise LeanKError(
            f"question file `{path}` cannot be read: {error.strerror}",
            hint=f"it is looked up from `{Path.cwd()}`",
        ) from None
    except UnicodeDecodeError as error:
        raise LeanKError(
            f"question file `{path}` is not UTF-8: {error.reason} at byte {error.start}",
            hint="convert it, as with `iconv -t utf-8`",
        ) from None
    read = _read_lines(text, path) if path.suffix == ".jsonl" else _read_json(text, path)
    control = re.compile("|".join(map(re.escape, control_tokens)) or r"(?!)")
    documents = tuple(text for text in dict.fromkeys(read.documents) if not control.search(text))
    usable = set(documents)
    questions = tuple(
        replace(asked, related=tuple(text for text in asked.related if text in usable))
        for asked in read.questions
        if usable.issuperset(asked.documents) and not control.search(asked.question)
    )
    if not questions:
        raise LeanKError(f"question file `{path}` has no question with an answer", hint=_FORMS)
    return QuestionFile(path, questions, documents, hashlib.sha256(content).hexdigest())


@dataclass(frozen=True)
class _Content:
    questions: list[AskedQuestion]
    documents: list[str]


def _read_lines(text: str, path: Path) -> _Content:
    questions = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            record = _check(_Record, _parse(line, f"{path}:{number}"), f"{path}:{number}")
            questions.append(AskedQuestion(record.question, tuple(record.answers), tuple(record.documents)))
    return _Content(questions, [text for asked in questions for text in asked.documents])


def _read_json(text: str, path: Path) -> _Content:
    content = _parse(text, str(path))
    if isinstance(content, dict):
        return _read_squad(_check(_Squad, content, str(path)))
    if isinstance(content, list):
        questions = [
            _of_hotpot(_check(_HotpotRecord, record, f"{path}: record {index}"))
            for index, record in enumerate(content)
        ]
        return _Content(questions, [text for asked in questions for text in asked.documents])
    raise LeanKError(
        f"question file `{path}` holds a {type(content).__name__}, no list and no object", hint=_FORMS
    )


def _read_squad(squad: _Squad) -> _Content:
    read = _Content([], [])
    for article in squad.data:
        contexts = [paragraph.context for paragraph in article.paragraphs]
        read.documents.extend(contexts)
        for paragraph in article.paragraphs:
            related = tuple(context for context in contexts if context != paragraph.context)
            for asked in paragraph.qas:
                answers = tuple(dict.fromkeys(answer.text for answer in asked.answers))
                if answers and not asked.is_impossible:
                    read.questions.append(
                        AskedQuestion(asked.question, answers, (paragraph.context,), related)
                    )
    return read


def _of_hotpot(record: _HotpotRecord) -> AskedQuestion:
    documents = tuple(f"{title}\n{''.join(sentences)}" for title, sentences in record.context)
    return AskedQuestion(record.question, (record.answer,), documents)


def _parse(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise LeanKError(
            f"question file `{place}` is not JSON: {error.msg} at line {error.lineno}, column {error.colno}",
            hint=_FORMS,
        ) from None
    except (ValueError, RecursionError) as error:  # nested too deep, or a number of too many digits
        raise LeanKError(f"question file `{place}` cannot be read: {error}", hint=_FORMS) from None


def _check(model: type[_Model], content: Any, place: str) -> _Model:
    try:
        return model.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        named = f", `{key}`" if key else ""
        raise LeanKError(f"question file `{place}`{named}: {first['msg']}", hint=_FORMS) from None
