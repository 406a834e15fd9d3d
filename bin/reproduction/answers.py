"""Answers of a plan's entries: all of them answer the same prompts, from one prefill a batch.

Every answer is written down when its batch is done, and asked for once. An entry's answers go by the digest
of its mask: where a mask was made anew, it is measured anew.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from bin.reproduction.plan import Entry, Sizes
from leank_convert.evaluate.answer_log import AnswerLog
from leank_convert.evaluate.answering import answer_prompts
from leank_convert.evaluate.evaluated import EvaluatedModel
from leank_convert.evaluate.prompt import held_out_prompts
from leank_convert.evaluate.variants import THINK_WINDOWS, Dense, Masked, ThinK, Variant, in_checkpoint_order
from leank_convert.mask import ChannelMask
from leank_convert.progress import progress_bar
from leank_convert.recipe import DataSection

_DENSE = "dense"
Masks = Mapping[str, Mapping[float, ChannelMask]]
"""By run and pruning ratio."""


class Scores(NamedTuple):
    """One entry's scores on the prompts of one part, in an order that all entries share."""

    cells: tuple[tuple[str, int], ...]  # task and length of each prompt
    values: tuple[float, ...]  # from 0 to 1, of each prompt

    @property
    def mean(self) -> float:
        """Over all prompts; every task and length has as many."""
        return sum(self.values) / len(self.values)

    def where(self, tasks: Collection[str] | None = None, lengths: Collection[int] | None = None) -> Scores:
        """The prompts of some tasks and lengths alone; None is all."""
        chosen = [
            (cell, value)
            for cell, value in zip(self.cells, self.values, strict=True)
            if (tasks is None or cell[0] in tasks) and (lengths is None or cell[1] in lengths)
        ]
        return Scores(tuple(cell for cell, _ in chosen), tuple(value for _, value in chosen))


class Answers:
    """Prompts of one part, and who has answered them.

    Args:
        evaluated: The model, all of whose channels its own mask keeps.
        masks: Of all entries.
        data: The tasks; lengths are `sizes.lengths`.
        sizes: Names lengths and batch size.
        num_prompts: Of each task and length.
        seed: Of the prompts.
        folder: Where answers are kept.
    """

    def __init__(
        self,
        evaluated: EvaluatedModel,
        masks: Masks,
        data: DataSection,
        sizes: Sizes,
        *,
        num_prompts: int,
        seed: int,
        folder: Path,
    ) -> None:
        self._evaluated = evaluated
        self._masks = masks
        self._batch_size = sizes.batch_size
        self._prompts = []
        for length in sizes.lengths:
            for task in data.tasks:
                # Independent of the other tasks and lengths, so that more of them change nothing.
                cell = data.model_copy(update={"tasks": (task,), "min_length": length, "max_length": length})
                self._prompts += held_out_prompts(
                    evaluated.tokenizer, cell, num_samples=num_prompts, seed=seed + length
                )
        self._log = AnswerLog(
            folder,
            {
                "data": data.model_dump(mode="json", exclude={"tasks", "min_length", "max_length"}),
                "seed": seed,
                "windows": {key: evaluated.leank[key] for key in ("sink_size", "recent_size", "flush_size")},
                "dtype": str(evaluated.model.dtype),
            },
        )

    def ask(self, entries: Iterable[Entry], label: str) -> None:
        """Let the dense model and all entries answer what they have not answered yet."""
        variants: list[Variant] = [
            Dense(self._evaluated.dense, _DENSE),
            *map(self._variant, dict.fromkeys(entries)),
        ]
        size = self._batch_size
        prompts = self._log.missing(self._prompts, [variant.name for variant in variants])
        batches = [prompts[start : start + size] for start in range(0, len(prompts), size)]
        with progress_bar(True, label, len(prompts)) as advance:
            for batch in batches:
                # Where a plan has grown, its new entries answer alone.
                waiting = [variant for variant in variants if self._log.missing(batch, [variant.name])]
                for answers in answer_prompts(self._evaluated, batch, waiting, batch_size=size):
                    self._log.add(answers)
                advance(len(batch))

    def scores(self, entry: Entry | None) -> Scores:
        """What an entry was found to score; None is the dense model."""
        name = _DENSE if entry is None else self._label(entry)
        cells = tuple((prompt.task, prompt.length) for prompt in self._prompts)
        return Scores(cells, tuple(self._log.outcome(p, [name]).scores[name] for p in self._prompts))

    def _label(self, entry: Entry) -> str:
        if entry.run is None:
            return entry.name
        content = self._mask(entry).to(torch.uint8).cpu().numpy().tobytes()
        return f"{entry.name} @ {hashlib.sha256(content).hexdigest()[:8]}"

    def _mask(self, entry: Entry) -> Tensor:
        assert entry.run is not None
        return self._masks[entry.run][entry.ratio].channel_mask

    def _variant(self, entry: Entry) -> Variant:
        windows = THINK_WINDOWS if entry.own_windows else None
        if entry.run is None:
            return ThinK(entry.ratio, windows, name=self._label(entry))
        mask = in_checkpoint_order(self._mask(entry), self._evaluated.leank["head_permutation"])
        if entry.dynamic:
            return ThinK(mask.sum(-1), windows, name=self._label(entry))
        return Masked(self._label(entry), mask)
