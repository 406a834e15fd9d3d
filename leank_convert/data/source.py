"""Source of samples: the task, the length and the filling text of the sample of any index.

Three tasks in wording of our own. Two are the paper's (section "Training stage 1"): `retrieval`, where every
line of the context gives a key and its value and one is asked, and `multi_value`, where values of several
keys are strewn over running text and all values of one are asked. `passkey` is DuoAttention's. Keys and
values are random and every sample is a fresh one. The shipped model has a small language of its own
(`wording: testbed`, see `testbed.tasks`).
"""

from __future__ import annotations

import hashlib
import random
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pydoc_data.topics import topics

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from leank_convert.data.drafts import draw_draft, fit
from leank_convert.data.haystack import Haystack, control_tokens, open_haystack
from leank_convert.data.sample import (
    Question,
    TrainingSample,
    encode_answer,
    encode_prompts,
    join_questions,
    render_prompts,
)
from leank_convert.errors import LeanKError
from leank_convert.recipe import DataSection

# The shortest form of a task's sample differs a little from draw to draw. `check` asks all of this many to
# fit, and `draw` tries as often, so that what passes the check does not fail in the middle of a run.
_NUM_DRAWS = 64
# In the same way, `check` wants a document with enough questions among fewer than `draw` goes through.
_NUM_CHECKED_DOCUMENTS, _NUM_DOCUMENTS = 32, 1000
_CONTINUATION = 256  # tokens of a text that is gone on with, or a quarter of it
_LEAST_TEXT = 8  # tokens of a text, of whose last quarter all but the first are an answer
_LETTERS_OF_TOKEN = 8  # more than any tokenizer's have on average
# As many characters as the longest sample has, or nearly, and no more than a second takes.
_MAX_LONG_WORDS = 2**18


class _NoRoomError(LeanKError):
    """A sample is longer than its budget, even in its shortest form."""

    def __init__(self, message: str, hint: str, excess: int) -> None:
        super().__init__(message, hint)
        self.excess = excess


@dataclass(frozen=True)
class SampleSource:
    """Draws the sample of any index: by the model's own tokenizer, a recipe's data section and its seed."""

    tokenizer: PreTrainedTokenizerBase
    data: DataSection
    seed: int

    def draw(self, index: int) -> TrainingSample:
        """Draw a sample by its index, from 0 over all stages: tasks in turn, lengths uniform in their range.

        Its longest prompt and answer have at most the drawn length, and come close to it. An index ~i, below
        0, asks for text i to go on with, or where there is none for sample i.

        Raises:
            LeanKError: If the tokenizer has no chat template, a length leaves no room for the task, or the
                haystack cannot be read.
        """
        if index < 0:
            index = ~index
            if self.has_text:
                return self._draw_continuation(index)
        rng = random.Random(f"{self.seed}/{index}")
        task = self.data.tasks[index % len(self.data.tasks)]
        budget = rng.randint(self.data.min_length, self.data.max_length)
        for _ in range(_NUM_DRAWS - 1):
            with suppress(_NoRoomError):
                return self._draw(task, rng, budget)
        return self._draw(task, rng, budget)

    @property
    def has_text(self) -> bool:
        """Whether text can be drawn: the toy reads none but what a recipe names."""
        return self.data.wording != "testbed" or self.data.haystack.source is not None

    @cached_property
    def text(self) -> str:
        """The text that the recipe names, else the documentation of Python that comes with it."""
        return self.haystack.text or "\n\n".join(topics[name] for name in sorted(topics))

    def draw_text(self, index: int) -> Tensor:
        """Draw text alone, as it is, from a random place: ids [N], as many as of a sample.

        Raises:
            LeanKError: If it cannot be read, or next to no token comes of it.
        """
        rng, text = random.Random(f"{self.seed}/text/{index}"), self.text
        length = rng.randint(self.data.min_length, self.data.max_length)
        size = _LETTERS_OF_TOKEN * length
        place = rng.randrange(len(text))
        piece = (text * (1 + (place + size) // len(text)))[place:][:size]
        # Cut here: a length given to the tokenizer is its state, and holds for what other threads encode.
        ids = self.tokenizer(piece, verbose=False)["input_ids"][:length]
        if len(ids) < _LEAST_TEXT:
            named = self.data.haystack.source or "the documentation of Python"
            raise LeanKError(
                f"{size:,} letters of haystack `{named}` make too few tokens: {len(ids)}",
                hint="name text that the model's tokenizer was made for by `data.haystack.source`",
            )
        return torch.tensor(ids)

    def _draw_continuation(self, index: int) -> TrainingSample:
        """A text whose last tokens stand for the answer to those before."""
        ids = self.draw_text(index)
        border = len(ids) - min(_CONTINUATION, len(ids) // 4)
        return TrainingSample("text", ids[:border], (Question(ids[border:], 1),))

    def check(self) -> None:
        """Draw every task at the shortest length, and named text: what cannot be drawn is refused at once.

        Raises:
            LeanKError: As `draw`; names the length that leaves room. Also for a chat template that cuts long
                messages short.
        """
        worst = None
        for task in self.data.tasks:
            rng = random.Random(self.seed)
            for _ in range(_NUM_DRAWS):
                try:
                    self._draw(task, rng, self.data.min_length, shortest=True)
                except _NoRoomError as error:
                    worst = error if worst is None or error.excess > worst.excess else worst
        if worst is not None:
            raise worst
        if self.data.haystack.source is not None:
            self.draw_text(0)  # no task may read it
        render_prompts(self.tokenizer, ["word " * min(self.data.max_length, _MAX_LONG_WORDS)])

    def fingerprint(self) -> str:
        """Digest of what samples are made of: the first stands for tokenizer, template and generator."""
        sample = self.draw(0)
        rows = [sample.prefix_ids, *(question.input_ids for question in sample.questions)]
        starts = [question.answer_start for question in sample.questions]
        content = f"{self.haystack.digest} {starts} {[row.tolist() for row in rows]}"
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    @cached_property
    def haystack(self) -> Haystack:
        """Running text for the tasks that need it, read once; LeanKError if it cannot be read."""
        return open_haystack(self.data.haystack, control_tokens(self.tokenizer))

    def _draw(self, task: str, rng: random.Random, budget: int, *, shortest: bool = False) -> TrainingSample:
        """Draw a sample as long as the budget allows, or in its shortest form."""
        if self.data.wording == "testbed":
            return self._draw_testbed(
                task, rng, budget, _NUM_CHECKED_DOCUMENTS if shortest else _NUM_DOCUMENTS
            )
        draft = draw_draft(task, rng, self.data.questions_per_context, self.haystack)
        answers = [encode_answer(self.tokenizer, answer) for answer in draft.answers]
        prompts = encode_prompts(self.tokenizer, draft.prompts(0))
        sample = join_questions(task, prompts, answers)
        if sample.num_positions > budget:
            asked = len(sample.questions)
            raise _NoRoomError(
                f"a sample of {budget} tokens leaves no room for `{task}`: its shortest has "
                f"{sample.num_positions}" + (f" with facts for {asked} questions" if asked > 1 else ""),
                hint=f"raise `data.min_length` to {sample.num_positions} or more; most samples should be far "
                "longer",
                excess=sample.num_positions - budget,
            )
        if shortest:
            return sample

        # The longest question decides how much text fits; the others are tokenised for that text alone.
        lengths = [len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True)]
        longest = lengths.index(max(lengths))

        def render(num_lines: int) -> list[int]:
            return encode_prompts(self.tokenizer, [draft.prompts(num_lines)[longest]])[0]

        room = budget - len(answers[longest])
        while True:
            num_lines, prompt = fit(render, prompts[longest], room)
            others = draft.prompts(num_lines)
            del others[longest]
            written = encode_prompts(self.tokenizer, others)
            written.insert(longest, prompt)
            sample = join_questions(task, written, answers)
            if sample.num_positions <= budget:
                return sample
            # At the border to the document another question may merge into more tokens than it did before.
            room -= sample.num_positions - budget

    def _draw_testbed(self, task: str, rng: random.Random, budget: int, max_documents: int) -> TrainingSample:
        from leank_convert.testbed.tasks import build_samples

        try:
            drawn = build_samples(
                task, rng, budget, self.data.questions_per_context, max_documents=max_documents
            )
        except ValueError as error:
            raise LeanKError(
                f"no sample of {budget} tokens: {error}",
                hint="raise `data.min_length`, or lower `data.questions_per_context` where it is above 1",
            ) from None
        prompts = encode_prompts(self.tokenizer, [sample.prompt for sample in drawn])
        answers = [encode_answer(self.tokenizer, sample.answer) for sample in drawn]
        sample = join_questions(task, prompts, answers)
        if sample.num_positions > budget:
            raise _NoRoomError(
                f"a testbed sample asked for in {budget} tokens has {sample.num_positions} by this model's "
                "tokenizer",
                hint="`wording: testbed` is for the shipped model; take `wording: general`",
                excess=sample.num_positions - budget,
            )
        return sample
