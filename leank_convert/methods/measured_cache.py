"""Calibration of a cache: a model's mean of keys, basis of V and scales for FP8, on its recipe's own data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from leank_convert.data import SampleSource
from leank_convert.device import choose_device
from leank_convert.kv_scales import KVScales
from leank_convert.mask import ChannelMask
from leank_convert.recipe import Recipe
from leank_convert.tokenizer import load_tokenizer
from leank_convert.train.choice import choose_recipe
from leank_convert.train.key_mean import KeyStatistics, measure_keys
from leank_convert.train.model import load_model, open_model
from leank_convert.train.passes import check_layers
from leank_convert.train.selection import text_without_paths
from leank_convert.train.value_basis import ValueBasis, measure_values
from leank_convert.windows import Windows

# Of the recipe's own lengths: slow rotary pairs turn by as much as a context is long.
NUM_CONTEXTS = 4


@dataclass(frozen=True)
class MeasuredCache:
    """Keys and values of a model on its recipe's data, and what a cache is stored by.

    Attributes:
        statistics: What was measured of keys, and of V as it is stored; None if that was not asked for.
        values: The basis of V that was measured, None if none was.
        recipe: On whose data it was measured.
    """

    statistics: KeyStatistics | None
    values: ValueBasis | None
    recipe: Recipe

    def centre(self, mask: ChannelMask) -> ChannelMask:
        """The mask with a mean of keys: its own if it has one, else the measured one.

        What held-out samples said of a mask without one holds no longer: removed channels counted as zero.
        """
        if mask.key_mean is not None:
            return mask
        assert self.statistics is not None
        known = mask.noting(key_mean_tokens=self.statistics.num_tokens, held_out=None, evaluation=None)
        known = known.noting_recipe("The mean of keys was measured", text_without_paths(self.recipe))
        return replace(known, key_mean=self.statistics.mean)

    def prune_values(self, mask: ChannelMask, pruning_ratio: float) -> ChannelMask:
        """The mask, which has provenance, with V pruned by the measured basis.

        What an evaluation said of a mask that leaves V as it is holds no longer.
        """
        assert self.values is not None
        known = mask.noting(held_out=None, evaluation=None)
        known = known.noting_recipe("The basis of V was measured", text_without_paths(self.recipe))
        return self.values.prune(known, pruning_ratio)

    def scales(self, mask: ChannelMask) -> KVScales:
        """Scales for FP8 of values, and of keys less the mask's mean."""
        found = self.statistics
        assert found is not None
        largest = found.largest_key(mask.key_mean)
        return KVScales.of_largest(
            largest,
            found.largest_value,
            num_tokens=found.num_tokens,
            tasks=tuple(self.recipe.data.tasks),
            seed=self.recipe.seed,
        )


def measure_cache(
    model: str | Path,
    recipe: Recipe | str | Path | None = None,
    *,
    out: str | Path | None = None,
    device: str | torch.device | None = None,
    keys: bool = True,
    value_basis: Tensor | None = None,
    value_windows: Windows | None = None,
) -> MeasuredCache:
    """Measure what the cache of a model is stored by, on the first contexts of its recipe's data.

    Args:
        model: A local folder, a hub id, or `testbed`.
        recipe: A recipe, or its name or file; None for that of the training run in `out`, else the model's
            packaged one, else one that is derived from its shape.
        out: A folder that may hold a training run.
        device: Default: CUDA if there is any, else the CPU.
        keys: Whether to measure keys, and V as it is stored.
        value_basis: The basis of V that is folded into the weights [L, H_kv, D, D]; None for none.
        value_windows: Measure one for these windows first; None to leave it.

    Raises:
        LeanKError: If the model or the recipe cannot be read, memory does not suffice, or a number is not
            finite.
    """
    chosen = choose_recipe(recipe, model, run=out, device=device)
    files = open_model(model, chosen.model)
    check_layers(files.facts, files.name)
    tokenizer = load_tokenizer(files.checkpoint.folder, files.name)
    samples = SampleSource(tokenizer, chosen.data, chosen.seed)
    samples.check()  # before weights are loaded
    loaded = load_model(files, chosen, choose_device(device))
    values = None
    if value_windows is not None:
        values = measure_values(loaded, samples, value_windows)
        value_basis = values.directions
    statistics = None
    if keys:
        statistics = measure_keys(loaded, samples, NUM_CONTEXTS, value_basis=value_basis)
    return MeasuredCache(statistics, values, chosen)
