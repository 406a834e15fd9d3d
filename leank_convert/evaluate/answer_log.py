"""Answer log of an evaluation, one JSON line each, from which a killed evaluation resumes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from leank_convert.errors import LeanKError, shorten
from leank_convert.evaluate.answering import Answer
from leank_convert.evaluate.comparison import Outcome
from leank_convert.evaluate.prompt import Prompt, score
from leank_convert.evaluate.request import ANSWERS_NAME, SETTINGS_NAME
from leank_convert.files import read_json, write_atomically

_ANSWER = TypeAdapter(Answer)


@contextmanager
def writing_to(file: Path) -> Iterator[None]:
    """Say in a LeanKError what a full disk leaves of an evaluation, and of `file` where no other is named."""
    try:
        yield
    except OSError as error:
        raise LeanKError(
            f"`{error.filename or file}` cannot be written: {error.strerror}",
            hint="make room where the disk is full, and run the command again: what is answered stays so",
            exit_code=1,
        ) from error


class AnswerLog:
    """Answers by prompt and variant, in memory and, with a folder, one line each in `answers.jsonl`.

    Every answer carries its prompt's digest, so prompts may be added, left out or drawn anew from one run to
    the next. `settings` are what answers depend on besides, JSON-ready; LeanKError if the folder holds those
    of others, or a file in it cannot be read or written.
    """

    def __init__(self, folder: Path | None, settings: Mapping[str, Any]) -> None:
        self._answers: dict[tuple[str, str], Answer] = {}  # by a prompt's digest and a variant's name
        self._path = None
        if folder is None:
            return
        kept = folder / SETTINGS_NAME
        if kept.exists():
            _check_same(read_json(kept), settings, folder)
        self._path = folder / ANSWERS_NAME
        if self._path.exists():
            self._read(self._path)
        with writing_to(kept):
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(kept, json.dumps(settings, indent=2).encode())

    def add(self, answers: Iterable[Answer]) -> None:
        """Keep a batch's answers, in the file before this returns; LeanKError if they cannot be written."""
        answers = list(answers)
        if self._path is not None:
            with writing_to(self._path), self._path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(asdict(answer)) + "\n" for answer in answers)
        self._answers.update({(answer.prompt, answer.variant): answer for answer in answers})

    def missing(self, prompts: Sequence[Prompt], variants: Sequence[str]) -> list[Prompt]:
        """The prompts that not all of these variants have answered."""
        return [p for p in prompts if any((p.digest, name) not in self._answers for name in variants)]

    def outcome(self, prompt: Prompt, variants: Sequence[str]) -> Outcome:
        """The scores of these variants, all of which have answered the prompt, by this release's rules."""
        scores = {name: score(self._answers[prompt.digest, name].text, prompt) for name in variants}
        return Outcome(prompt.task, prompt.length, len(prompt.input_ids), scores)

    def _read(self, path: Path) -> None:
        *lines, rest = path.read_bytes().split(b"\n")
        for number, line in enumerate(lines, start=1):
            try:
                answer = _ANSWER.validate_json(line)
            except ValueError:
                names = ", ".join(field.name for field in fields(Answer))
                raise LeanKError(
                    f"`{path}`, line {number}: not an answer with {names}",
                    hint="remove the line, and the prompt is asked again",
                ) from None
            self._answers[answer.prompt, answer.variant] = answer
        if rest:  # the run was killed while it wrote the last line
            with writing_to(path):
                write_atomically(path, b"".join(line + b"\n" for line in lines))


def _check_same(kept: Mapping[str, Any], settings: Mapping[str, Any], folder: Path) -> None:
    settings = json.loads(json.dumps(settings))  # as JSON gives them back
    for key in [*settings, *kept]:
        if kept.get(key) != settings.get(key):
            raise LeanKError(
                f"`{folder}` holds answers of another evaluation: `{shorten(key)}` was "
                f"{shorten(json.dumps(kept.get(key)))}, is {shorten(json.dumps(settings.get(key)))}",
                hint="name another folder with `--out`, or remove this one",
            )
