"""Training samples: a long context, a question on it, and the answer, for any model with a chat template.

Two tasks, as in the paper (section "Training stage 1"), in wording of our own: `retrieval`, where every
line of the context gives a key and its value and one is asked, and `multi_value`, where values of several
keys are strewn over running text and all values of one are asked. Keys and values are random and every
step's sample is a fresh one, a function of the recipe's seed and the step alone, so a resumed run sees what
an uninterrupted one sees. The shipped model has a small language of its own (`wording: testbed`, see
`testbed.tasks`).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from leank_convert.errors import LeanKError
from leank_convert.haystack import FIRST_NAMES, LAST_NAMES, draw_sentence
from leank_convert.recipe import DataSection

_VALUES_PER_KEY = 4
_NUM_OTHER_NAMES = 3
# The shortest form of a task's sample differs a little from draw to draw. `check` asks all of this many to
# fit, and `draw` tries as often, so that what passes the check does not fail in the middle of a run.
_NUM_DRAWS = 64


class _NoRoomError(LeanKError):
    """A sample is longer than its budget, even in its shortest form."""

    def __init__(self, message: str, hint: str, excess: int) -> None:
        super().__init__(message, hint)
        self.excess = excess


@dataclass(frozen=True)
class TrainingSample:
    """One sample, tokenised.

    The end-of-turn token is not part of it: it is what the answer's last token predicts, and generation
    never feeds it, so no query of it is to be trained.

    Attributes:
        task: The task it was drawn from.
        input_ids: Prompt and answer, int64 [N].
        answer_start: Place of the first answer token; all before it is the prompt through the chat template.
    """

    task: str
    input_ids: Tensor
    answer_start: int

    def __len__(self) -> int:
        return len(self.input_ids)


@dataclass(frozen=True)
class SampleSource:
    """Draws the sample of any step.

    Args:
        tokenizer: The model's own, with a chat template.
        data: The recipe's section.
        seed: The recipe's seed.
    """

    tokenizer: PreTrainedTokenizerBase
    data: DataSection
    seed: int

    def draw(self, step: int) -> TrainingSample:
        """Draw a step's sample: tasks in turn, lengths uniform over the recipe's range.

        Args:
            step: Counted from 0 over both stages.

        Returns:
            A sample of at most the drawn length, and close to it.

        Raises:
            LeanKError: If the tokenizer has no chat template, or a length leaves no room for the task.
        """
        rng = random.Random(f"{self.seed}/{step}")
        task = self.data.tasks[step % len(self.data.tasks)]
        budget = rng.randint(self.data.min_length, self.data.max_length)
        for _ in range(_NUM_DRAWS - 1):
            try:
                return self._draw(task, rng, budget)
            except _NoRoomError:
                continue
        return self._draw(task, rng, budget)

    def check(self) -> None:
        """Draw every task at the shortest length, so that a recipe without room is refused before it runs.

        Raises:
            LeanKError: As `draw`; tells the length that leaves room.
        """
        worst = None
        for task in self.data.tasks:
            rng = random.Random(self.seed)
            for _ in range(_NUM_DRAWS):
                try:
                    self._check_shortest(task, rng, self.data.min_length)
                except _NoRoomError as error:
                    worst = error if worst is None or error.excess > worst.excess else worst
        if worst is not None:
            raise worst

    def _draw(self, task: str, rng: random.Random, budget: int) -> TrainingSample:
        if self.data.wording == "testbed":
            return self._draw_testbed(task, rng, budget)
        draft = _draft(task, rng)
        return _fit(lambda num_lines: self._tokenise(task, *draft.render(num_lines)), budget)

    def _check_shortest(self, task: str, rng: random.Random, budget: int) -> None:
        if self.data.wording == "testbed":
            self._draw_testbed(task, rng, budget)
        else:
            _check_room(self._tokenise(task, *_draft(task, rng).render(0)), budget)

    def _draw_testbed(self, task: str, rng: random.Random, budget: int) -> TrainingSample:
        from leank_convert.testbed.tasks import build_sample

        try:
            drawn = build_sample(task, rng, budget)
        except ValueError as error:
            raise LeanKError(
                f"no sample of {budget} tokens: {error}", hint="raise `data.min_length`"
            ) from None
        sample = self._tokenise(task, drawn.prompt, drawn.answer)
        if len(sample) > budget:
            raise _NoRoomError(
                f"a testbed sample asked for in {budget} tokens has {len(sample)} by this model's tokenizer",
                hint="`wording: testbed` is for the shipped model; take `wording: general`",
                excess=len(sample) - budget,
            )
        return sample

    def _tokenise(self, task: str, prompt: str, answer: str) -> TrainingSample:
        """Prompt and answer are tokenised apart, so no token can straddle the border between them."""
        if self.tokenizer.chat_template is None:
            raise LeanKError(
                f"the tokenizer of `{self.tokenizer.name_or_path}` has no chat template",
                hint="train on an instruct model, or put a `chat_template.jinja` beside its tokenizer",
            )
        # The template writes the special tokens itself: a second BOS is never added.
        prompt_ids = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
        )
        answer_ids = self.tokenizer(answer, add_special_tokens=False)["input_ids"]
        if not answer_ids:
            raise LeanKError(
                f"the tokenizer of `{self.tokenizer.name_or_path}` makes no token of the answer `{answer}`",
                hint="there is nothing to train on without answer tokens: check the tokenizer's files",
            )
        return TrainingSample(
            task=task,
            input_ids=torch.tensor([*prompt_ids, *answer_ids]),
            answer_start=len(prompt_ids),
        )


def _fit(render: Callable[[int], TrainingSample], budget: int) -> TrainingSample:
    """Find the number of context lines whose sample fills the budget to within about one line.

    Tokens grow almost linearly with lines, so interpolation needs a few renderings where counting up would
    need one per line.
    """
    fits, best = 0, render(0)
    _check_room(best, budget)
    exceeds, exceeding = None, best
    guess = 16
    # Far more than it takes, and an end even for a tokenizer whose token count does not grow with the text.
    for _ in range(32):
        sample = render(guess)
        low, low_length = fits, len(best)
        if len(sample) <= budget:
            fits, best = guess, sample
        else:
            exceeds, exceeding = guess, sample
        if exceeds is None:
            per_line = max(1.0, (len(best) - low_length) / (fits - low))
        else:
            per_line = (len(exceeding) - len(best)) / (exceeds - fits)
        if budget - len(best) < per_line or exceeds == fits + 1:
            break
        guess = fits + max(1, int((budget - len(best)) / per_line))
        if exceeds is not None:
            guess = min(guess, exceeds - 1)
    return best


def _check_room(shortest: TrainingSample, budget: int) -> None:
    if len(shortest) > budget:
        raise _NoRoomError(
            f"a sample of {budget} tokens leaves no room for `{shortest.task}`: its shortest has "
            f"{len(shortest)}",
            hint=f"raise `data.min_length` to {len(shortest)} or more; most samples should be far longer",
            excess=len(shortest) - budget,
        )


def _draft(task: str, rng: random.Random) -> _RetrievalDraft | _MultiValueDraft:
    return _RetrievalDraft(rng) if task == "retrieval" else _MultiValueDraft(rng)


class _RetrievalDraft:
    """Lines of lockers and codes; one locker is asked for."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = random.Random(rng.getrandbits(64))
        self._key, self._value = self._draw_pair()
        self._place = self._rng.random()
        self._others: list[str] = []

    def _draw_pair(self) -> tuple[str, str]:
        digits = f"{self._rng.getrandbits(144):036x}"
        key = "-".join(digits[i : i + 4] for i in (0, 4, 8))
        return key, "-".join(digits[i : i + 6] for i in (12, 18, 24, 30))

    def render(self, num_lines: int) -> tuple[str, str]:
        """Prompt and answer with this many lines beside the asked one."""
        while len(self._others) < num_lines:
            self._others.append(self._line(*self._draw_pair()))
        lines = self._others[:num_lines]
        lines.insert(int(self._place * (num_lines + 1)), self._line(self._key, self._value))
        prompt = (
            "Here is the register of a storage hall. Each line names a locker and the code that opens it.\n\n"
            + "\n".join(lines)
            + f"\n\nWhich code opens locker {self._key}? Answer with the code alone."
        )
        return prompt, self._value

    @staticmethod
    def _line(key: str, value: str) -> str:
        return f"Locker {key} opens with code {value}."


class _MultiValueDraft:
    """Running text that mentions, here and there, a parcel for somebody; all parcels of one are asked for."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = random.Random(rng.getrandbits(64))
        names = [
            f"{first} {last}"
            for first, last in zip(
                self._rng.sample(FIRST_NAMES, 1 + _NUM_OTHER_NAMES),
                self._rng.sample(LAST_NAMES, 1 + _NUM_OTHER_NAMES),
                strict=True,
            )
        ]
        counts = [_VALUES_PER_KEY, *(self._rng.randint(1, _VALUES_PER_KEY) for _ in names[1:])]
        parcels = iter(self._rng.sample(range(10**6, 10**7), sum(counts)))
        facts = [
            (self._rng.random(), name, next(parcels))
            for name, count in zip(names, counts, strict=True)
            for _ in range(count)
        ]
        self._facts = sorted(facts)
        self._asked = names[0]
        self._sentences: list[str] = []

    def render(self, num_lines: int) -> tuple[str, str]:
        """Prompt and answer with this many sentences beside those that mention parcels."""
        while len(self._sentences) < num_lines:
            self._sentences.append(draw_sentence(self._rng))
        sentences = self._sentences[:num_lines]
        for offset, (place, name, parcel) in enumerate(self._facts):
            mention = f"That day the courier left parcel {parcel} for {name}."
            sentences.insert(int(place * (num_lines + 1)) + offset, mention)
        prompt = (
            "Read the following chronicle of a small town with care.\n\n"
            + " ".join(sentences)
            + f"\n\nWhich parcels did the courier leave for {self._asked}? Give the numbers of all of them "
            "in the order of the text, separated by commas, and nothing else."
        )
        answer = ", ".join(str(parcel) for _, name, parcel in self._facts if name == self._asked)
        return prompt, answer
