"""RULER's question answering: the documents that a question is on, among others of the user's file."""

from __future__ import annotations

import random
from collections.abc import Iterator

from leank_convert.errors import LeanKError
from leank_convert.evaluate.ruler.draft import Draft, Filler
from leank_convert.evaluate.ruler.question_file import AskedQuestion, QuestionFile

_MAX_NEW_TOKENS = 32
_INSTRUCTION = (
    "Read the documents and answer the question with the answer alone, in as few words as it takes."
)


def choose_question(file: QuestionFile, seed: int, index: int) -> AskedQuestion:
    """The question of an index, the same at every length.

    Raises:
        LeanKError: If the file has not as many.
    """
    if index >= len(file.questions):
        raise LeanKError(
            f"question file `{file.path}` has {len(file.questions)} questions, fewer than the samples "
            "of `qa` that were asked for",
            hint=f"ask for {len(file.questions)} samples or fewer, or leave `qa` out",
        )
    order = random.Random(f"{seed}/qa").sample(range(len(file.questions)), len(file.questions))
    return file.questions[order[index]]


def draft_question(asked: AskedQuestion, rng: random.Random, file: QuestionFile) -> Draft:
    """Draw the documents that fill the prompt, and the order of all.

    Raises:
        LeanKError: If the file has no other document.
    """
    filler = Filler(_go_on(asked, random.Random(rng.getrandbits(64)), file))
    order = rng.getrandbits(64)

    def render(num_documents: int) -> str:
        documents = [*asked.documents, *filler.first(num_documents)]
        random.Random(order).shuffle(documents)
        listed = "\n\n".join(f"[Document {place}]\n{text}" for place, text in enumerate(documents, start=1))
        return f"{_INSTRUCTION}\n\n{listed}\n\n{_INSTRUCTION}\n\nQuestion: {asked.question}"

    return Draft(render, "Answer:", asked.answers, _MAX_NEW_TOKENS, "any")


def _go_on(asked: AskedQuestion, rng: random.Random, file: QuestionFile) -> Iterator[str]:
    """Related documents first, then the file's others, and all of them again where that is not enough."""
    near = {*asked.documents, *asked.related}
    far = [text for text in file.documents if text not in near]
    others = [*rng.sample(asked.related, len(asked.related)), *rng.sample(far, len(far))]
    if not others:
        raise LeanKError(
            f"question file `{file.path}` has no document beside those of `{asked.question}`",
            hint="add records on other documents: they fill the prompt",
        )
    while True:
        yield from others
