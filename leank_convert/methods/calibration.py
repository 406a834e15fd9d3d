"""Calibration data for methods without training, loaded on first use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from leank_convert.architectures import ModelFacts
from leank_convert.data import SampleSource
from leank_convert.methods.statistics import AttentionStatistics, measure_attention
from leank_convert.progress import progress_bar
from leank_convert.recipe import Recipe
from leank_convert.train.key_mean import KeyStatistics, count_contexts, measure_keys
from leank_convert.train.model import LoadedModel, ModelFiles, load_model
from leank_convert.train.value_basis import ValueBasis, measure_values
from leank_convert.windows import Windows


@dataclass(frozen=True)
class Calibration:
    """A model and the prompts of a recipe, the first of what training would take."""

    files: ModelFiles  # the model before it is loaded
    recipe: Recipe  # which prompts
    device: torch.device  # where the model goes
    progress: bool = False  # whether to draw progress bars

    @property
    def facts(self) -> ModelFacts:
        """The model's architecture; does not load it."""
        return self.files.facts

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of the scores: [L, H_kv, D]."""
        return self.facts.mask_shape

    @cached_property
    def loaded(self) -> LoadedModel:
        """The model, dense and frozen, with its tokenizer."""
        return load_model(self.files, self.recipe, self.device)

    @cached_property
    def keys(self) -> KeyStatistics | None:
        """Statistics of keys on its first contexts, whose mean they are centred by; None if they are not."""
        if not self.recipe.key_mean:
            return None
        num_contexts = count_contexts(self.recipe)
        return measure_keys(self.loaded, self._samples, num_contexts, progress=self.progress)

    @cached_property
    def values(self) -> ValueBasis | None:
        """The basis of V; None where V is left as it is."""
        if not self.recipe.value_pruning_ratio:
            return None
        windows = Windows(self.recipe.windows.sink_size, self.recipe.windows.recent_size)
        return measure_values(self.loaded, self._samples, windows, progress=self.progress)

    def prompts(self) -> Iterator[Tensor]:
        """Token ids [N] of each prompt: context and question, through the model's chat template."""
        samples = self._samples
        num_prompts = self.recipe.method_row.num_prompts
        total = self.recipe.calibration_prompts if num_prompts is None else num_prompts
        with progress_bar(self.progress, "measuring prompts", total) as advance:
            for place in range(total):
                yield samples.draw(place).prompt_ids()
                advance()

    def statistics(self) -> AttentionStatistics:
        """Statistics of queries and keys after RoPE, centred or not, the mean over all prompts."""
        mean = None if self.keys is None else self.keys.mean
        measured = [measure_attention(self.loaded.model, ids, mean) for ids in self.prompts()]
        # Each prompt weighs the same, whatever its length.
        return AttentionStatistics(*(torch.stack(found).mean(0) for found in zip(*measured, strict=True)))

    @cached_property
    def _samples(self) -> SampleSource:
        samples = SampleSource(self.loaded.tokenizer, self.recipe.data, self.recipe.seed)
        samples.check()
        return samples
