"""The bench: the model under test and its masks, as one process holds them, each loaded when first needed."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from bin.baselines import COMPARED, make_variants
from bin.reproduction.plan import Entry, Run, Sizes
from leank_convert.architectures import read_model_facts
from leank_convert.checkpoint_io import read_config
from leank_convert.errors import LeanKError
from leank_convert.evaluate.evaluated import EvaluatedModel, load_evaluated
from leank_convert.evaluate.variants import (
    THINK_WINDOWS,
    Dense,
    Masked,
    ThinK,
    Variant,
    in_checkpoint_order,
)
from leank_convert.export import export_checkpoint
from leank_convert.hub import resolve_model
from leank_convert.mask import ChannelMask, all_channels_mask, load_mask
from leank_convert.methods.make import train_masks
from leank_convert.recipe import Recipe
from leank_convert.recipe_file import load_recipe
from leank_convert.train.state import TrainingDirectory

_DENSE = "dense"


class Masks(Mapping[str, Mapping[float, ChannelMask]]):
    """Masks by run and pruning ratio, in a folder each; read once.

    Args:
        runs: What is made.
        sizes: The recipe that runs change.
        model: What they are made for.
        folder: Where they lie.
        device: Where they are made.
    """

    def __init__(
        self, runs: Mapping[str, Run], sizes: Sizes, model: str, folder: Path, device: torch.device
    ) -> None:
        self._runs, self._sizes, self._model, self._folder, self._device = runs, sizes, model, folder, device
        self._recipes: dict[str, Recipe] = {}
        self._read: dict[str, dict[float, ChannelMask]] = {}

    def __getitem__(self, name: str) -> Mapping[float, ChannelMask]:
        if name not in self._read:
            self._read[name] = {
                ratio: load_mask(result.mask) for ratio, result in self._results(name).items()
            }
        return self._read[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._runs)

    def __len__(self) -> int:
        return len(self._runs)

    def are_made(self, name: str) -> bool:
        """Whether a run has left all its masks.

        Raises:
            LeanKError: If they are of another recipe.
        """
        results = self._results(name)
        # Where a kill came between the two, nothing says what the mask was made by.
        if not all(result.mask.exists() and result.recipe.exists() for result in results.values()):
            return False
        for result in results.values():
            self._check_recipe(name, result.recipe)
        return True

    def make(self, name: str) -> None:
        """Make a run's masks, or go on with making them.

        Raises:
            LeanKError: As `train_masks`; also if the folder holds a run of another recipe.
        """
        recipe, directory = self._recipe(name), TrainingDirectory(self._folder / name)
        if not recipe.trains:
            # Killed while it wrote its masks. It has no state to go on from, and takes seconds.
            shutil.rmtree(directory.out, ignore_errors=True)
        resume = directory.folder.exists()
        if resume:
            self._check_recipe(name, directory.recipe)
        train_masks(self._model, directory.out, recipe=recipe, resume=resume, device=self._device)

    def _recipe(self, name: str) -> Recipe:
        if name not in self._recipes:
            run = self._runs[name]
            ratios = f"pruning_ratio=[{', '.join(map(str, run.ratios))}]"
            # No trackers: a run's log says enough of it.
            overrides = [*self._sizes.overrides, *run.overrides, ratios, "trackers=[]"]
            self._recipes[name] = load_recipe(self._sizes.recipe, overrides)
        return self._recipes[name]

    def _results(self, name: str) -> dict[float, TrainingDirectory]:
        return TrainingDirectory(self._folder / name).results(self._recipe(name))

    def _check_recipe(self, name: str, kept: Path) -> None:
        if kept.exists() and kept.read_text() != self._recipe(name).to_yaml():
            raise LeanKError(
                f"`{self._folder / name}` was made by another recipe (`{kept}`)",
                hint="remove this folder, or name another output folder",
            )


class Bench:
    """A model with all of its channels, which any mask can be tried on.

    Args:
        recipe: The main setting.
        model: A folder, a hub id, or `testbed`.
        masks: Of all entries.
        device: Where it is measured.
    """

    def __init__(self, recipe: Recipe, model: str, masks: Masks, device: torch.device) -> None:
        self.recipe = recipe
        self.model = model
        self.masks = masks
        self.device = device

    @cached_property
    def evaluated(self) -> EvaluatedModel:
        """The model, exported with all of its channels and loaded as a user would."""
        config = read_config(resolve_model(self.model))
        mask = all_channels_mask(read_model_facts(config, origin=self.model))
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = Path(folder, "checkpoint")
            export_checkpoint(self.model, mask, checkpoint, **self.recipe.windows.model_dump())
            return load_evaluated(checkpoint, self.device)

    def variant(self, entry: Entry | None) -> Variant:
        """What answers as an entry does; None is the dense model."""
        name = self.label(entry)
        if entry is None:
            return Dense(self.evaluated.dense, name)
        if entry.compared:
            return self._compared(entry, name)
        windows = THINK_WINDOWS if entry.own_windows else None
        if entry.run is None:
            return ThinK(entry.ratio, windows, name=name)
        mask = self._ordered_mask(entry)
        if entry.dynamic:
            return ThinK(mask.sum(-1), windows, name=name)
        key_mean = self._ordered_mean(entry)
        return Masked(name, mask, constants=None if key_mean is None else {"key_mean": key_mean})

    def label(self, entry: Entry | None) -> str:
        """An entry's name with its mask's digest."""
        if entry is None:
            return _DENSE
        if entry.run is None:
            return entry.name
        mask = self._mask(entry)
        content = mask.channel_mask.to(torch.uint8).cpu().numpy().tobytes()
        if mask.key_mean is not None:
            content += mask.key_mean.cpu().numpy().tobytes()
        return f"{entry.name} @ {hashlib.sha256(content).hexdigest()[:8]}"

    def _compared(self, entry: Entry, name: str) -> Variant:
        alone = entry.run is None
        mask = self.evaluated.channel_masks if alone else self._ordered_mask(entry)
        mean = None if alone else self._ordered_mean(entry)
        found = (
            variant
            for method in COMPARED
            for variant in make_variants(method, mask, alone=alone, key_mean=mean)
        )
        variant = next(variant for variant in found if variant.name == entry.method)
        variant.name = name
        return variant

    def _ordered_mask(self, entry: Entry) -> Tensor:
        return in_checkpoint_order(self._mask(entry).channel_mask, self.evaluated.leank["head_permutation"])

    def _ordered_mean(self, entry: Entry) -> Tensor | None:
        mean = self._mask(entry).key_mean
        return None if mean is None else in_checkpoint_order(mean, self.evaluated.leank["head_permutation"])

    def _mask(self, entry: Entry) -> ChannelMask:
        assert entry.run is not None
        return self.masks[entry.run][entry.ratio]
