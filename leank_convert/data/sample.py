"""A training sample, and how prompts and answers become one through a model's chat template."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from leank_convert.errors import LeanKError, cut, first_line

# Some templates write the date. Today's would make a resumed run see other samples than yesterday's, so what
# transformers offers them as the clock is replaced by one that stands still.
_STOPPED = {
    "%d": "26",
    "%m": "07",
    "%b": "Jul",
    "%B": "July",
    "%Y": "2024",
    "%y": "24",
    "%A": "Friday",
    "%a": "Fri",
    "%H": "12",
    "%M": "00",
    "%S": "00",
}
_CLOCK = (
    "{% macro strftime_now(format) %}{{ format"
    + "".join(f"|replace('{directive}', '{value}')" for directive, value in _STOPPED.items())
    + " }}{% endmacro %}{{ '' }}"  # a block would take a line break that the template begins with
)


@dataclass(frozen=True)
class Question:
    """One question on a sample's context, with its answer."""

    input_ids: Tensor  # what follows the shared prefix, int64 [N]: the rest of the prompt, then the answer
    answer_start: int  # place of the first answer token in it; 0 where the whole prompt is the prefix


@dataclass(frozen=True)
class TrainingSample:
    """One context with independent questions, tokenised.

    The prefix and a question's tokens are together exactly what the tokenizer makes of a prompt that holds
    this question alone, and of its answer. The end-of-turn token is not part of it: it is what the answer's
    last token predicts, and generation never feeds it, so no query of it is to be trained.
    """

    task: str  # the task it was drawn from
    prefix_ids: Tensor  # what all prompts begin with, int64 [P], P >= 1; of one question, its whole prompt
    questions: tuple[Question, ...]  # one or more, each blind to the others

    @property
    def num_tokens(self) -> int:
        """Tokens that a model runs: the prefix once, and what follows it of every question."""
        return len(self.prefix_ids) + sum(len(question.input_ids) for question in self.questions)

    @property
    def num_positions(self) -> int:
        """Positions that a model needs: the longest single prompt with its answer."""
        return len(self.prefix_ids) + max(len(question.input_ids) for question in self.questions)

    @property
    def num_answer_tokens(self) -> int:
        """Answer tokens of all questions."""
        return sum(len(question.input_ids) - question.answer_start for question in self.questions)

    def prompt_ids(self, index: int = 0) -> Tensor:
        """The whole prompt of one question, int64 [prompt]."""
        question = self.questions[index]
        return torch.cat([self.prefix_ids, question.input_ids[: question.answer_start]])

    def answer_ids(self, index: int = 0) -> Tensor:
        """The answer of one question, int64 [answer]."""
        question = self.questions[index]
        return question.input_ids[question.answer_start :]


def encode_prompts(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str]) -> list[list[int]]:
    """Tokenise user messages through the chat template, one by one; raises as `render_prompts`."""
    if not prompts:
        return []
    # The template writes the special tokens itself: a second BOS is never added. Several prompts in one call
    # are tokenised in parallel by a fast tokenizer.
    rows: list[list[int]] = tokenizer(render_prompts(tokenizer, prompts), add_special_tokens=False)[
        "input_ids"
    ]
    return rows


def encode_messages(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[str], *, chat: bool = True, ending: str = ""
) -> list[list[int]]:
    """Tokenise user messages through the chat template, else, without one, as text with an `ending`."""
    if not messages or (chat and getattr(tokenizer, "chat_template", None) is not None):
        return encode_prompts(tokenizer, messages)
    rows: list[list[int]] = tokenizer([message + ending for message in messages])["input_ids"]
    return rows


def render_prompts(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str]) -> list[str]:
    """Write user messages, one or more, as the chat template does, each as a conversation of its own.

    Raises:
        LeanKError: If the tokenizer has no chat template, it fails, or it leaves out a part of a message.
    """
    name = tokenizer.name_or_path
    if getattr(tokenizer, "chat_template", None) is None:
        raise LeanKError(
            f"the tokenizer of `{name}` has no chat template",
            hint="take an instruct model, or put a `chat_template.jinja` beside its tokenizer",
        )
    try:
        template = tokenizer.get_chat_template()
        rendered: Any = tokenizer.apply_chat_template(
            [[{"role": "user", "content": prompt}] for prompt in prompts],
            chat_template=_CLOCK + template if "strftime_now" in template else template,
            add_generation_prompt=True,
            tokenize=False,
            enable_thinking=False,  # the answer follows at once, which a template may have to be told
        )
    except Exception as error:  # a template may do what any program may
        raise LeanKError(
            f"the chat template of `{name}` fails: {first_line(error)}",
            hint="it is given one user message: see `chat_template.jinja` beside the model's tokenizer",
        ) from error
    texts: list[str] = rendered
    for text, prompt in zip(texts, prompts, strict=True):
        missing = _find_missing(prompt, text)
        if missing:
            raise LeanKError(
                f"the chat template of `{name}` leaves out a part of the user message: {cut(missing)} is not "
                "in the prompt that it writes",
                hint="the model would not see what it is asked: see `chat_template.jinja` beside the model's "
                "tokenizer",
            )
    return texts


def _find_missing(prompt: str, text: str) -> str:
    """What of a prompt is not in a text: all from the first word on that is not there in its turn."""
    if prompt.strip() in text:
        return ""
    place, read = 0, 0
    for word in re.finditer(r"\S+", prompt):  # a template may write white space in another way
        place = text.find(word[0], place)
        if place < 0:
            return prompt[read:].strip()
        place += len(word[0])
        read = word.end()
    return ""


def encode_answer(tokenizer: PreTrainedTokenizerBase, answer: str) -> list[int]:
    """Tokenise an answer apart from its prompt: no token straddles both; LeanKError if it has none."""
    answer_ids: list[int] = tokenizer(answer, add_special_tokens=False)["input_ids"]
    if not answer_ids:
        raise LeanKError(
            f"the tokenizer of `{tokenizer.name_or_path}` makes no token of the answer `{answer}`",
            hint="there is nothing to train on without answer tokens: check the tokenizer's files",
        )
    return answer_ids


def join_questions(task: str, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> TrainingSample:
    """Make one sample of prompts that begin alike; LeanKError if they do not even share their first token."""
    # What the first and the last in order share, all between them share as well.
    pairs = zip(min(prompts), max(prompts), strict=False)
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    if shared == 0:
        raise LeanKError(
            "the prompts of two questions on one context differ from their first token on",
            hint="this tokenizer cannot share a context: set `data.questions_per_context` to 1",
        )
    questions = tuple(
        Question(torch.tensor([*prompt[shared:], *answer]), answer_start=len(prompt) - shared)
        for prompt, answer in zip(prompts, answers, strict=True)
    )
    return TrainingSample(task, torch.tensor(prompts[0][:shared]), questions)
