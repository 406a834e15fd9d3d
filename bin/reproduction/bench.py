"""The bench: the model under test, its masks and what answers by them, as one process holds them.

Each is loaded when first needed.
"""

from __future__ import annotations

import io
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bin.baselines import make_variants
from bin.baselines.int4 import assign_chunks
from bin.baselines.int4 import quantise as round_to_int4
from bin.reproduction.plan import EVERY_CHANNEL, MAIN, MAIN_RATIO, MAIN_VALUES, Entry, Plan
from leank_convert._runtime.constants_leank import centre
from leank_convert._runtime.fp8_leank import reread, scale_of
from leank_convert._runtime.layout_leank import cut_layers
from leank_convert.architectures import read_model_facts
from leank_convert.checkpoint_io import read_config
from leank_convert.errors import LeanKError
from leank_convert.evaluate.loading import EvaluatedModel, load_evaluated
from leank_convert.evaluate.names import BASELINES, ROUNDED
from leank_convert.evaluate.prefill import Prefill
from leank_convert.evaluate.variants import THINK_WINDOWS, Dense, Masked, ThinK, Variant
from leank_convert.files import write_atomically
from leank_convert.hub import resolve_model
from leank_convert.mask import ChannelMask, all_channels_mask, load_mask
from leank_convert.mask_provenance import MaskProvenance
from leank_convert.masks import find_by_model
from leank_convert.methods.make import train_masks
from leank_convert.methods.measured_cache import measure_cache
from leank_convert.recipe import Recipe
from leank_convert.recipe_file import load_recipe
from leank_convert.train.state import TrainingDirectory
from leank_convert.train.value_basis import ValueBasis
from leank_convert.windows import Windows


class Masks:
    """Masks of a plan's runs for a model, by run and pruning ratio, in a folder each; read once."""

    def __init__(self, plan: Plan, model: str, folder: Path, device: torch.device) -> None:
        self._plan, self._model, self._folder, self._device = plan, model, folder, device
        self._recipes = {name: self._load_recipe(name) for name in plan.runs}
        self._read: dict[str, dict[float, ChannelMask]] = {}
        named = self._recipes[MAIN].model.id or model
        self.packaged = {
            name: {ratio: _find_packaged(named, ratio) for ratio in plan.runs[name].ratios}
            for name in plan.packaged
        }

    def __getitem__(self, name: str) -> Mapping[float, ChannelMask]:
        if name not in self._read:
            files = self.packaged.get(name)
            files = files or {ratio: result.mask for ratio, result in self._results(name).items()}
            self._read[name] = {ratio: load_mask(file) for ratio, file in files.items()}
        return self._read[name]

    def are_made(self, name: str) -> bool:
        """Whether a run has left all its masks; LeanKError if they are of another recipe."""
        if name in self.packaged:
            return True
        results = self._results(name).values()
        for result in results:
            self._check_recipe(name, result.recipe)
        # Where a kill came between the two, nothing says what the mask was made by.
        return all(result.mask.exists() and result.recipe.exists() for result in results)

    def make(self, name: str) -> None:
        """Make a run's masks, or go on with making them; LeanKError if they are of another recipe, too."""
        recipe, directory = self._recipes[name], TrainingDirectory(self._folder / name)
        if not recipe.trains:
            # Killed while it wrote its masks. It has no state to go on from, and takes seconds.
            shutil.rmtree(directory.out, ignore_errors=True)
        resume = directory.folder.exists()
        if resume:
            self._check_recipe(name, directory.recipe)
        train_masks(self._model, directory.out, recipe=recipe, resume=resume, device=self._device)

    def _load_recipe(self, name: str) -> Recipe:
        run = self._plan.runs[name]
        # No trackers: a run's log says enough of it.
        others = f"pruning_ratio={list(run.ratios)}", "trackers=[]"
        return load_recipe(self._plan.recipe, [*self._plan.overrides, *run.overrides, *others])

    def _results(self, name: str) -> dict[float, TrainingDirectory]:
        return TrainingDirectory(self._folder / name).results(self._recipes[name])

    def _check_recipe(self, name: str, kept: Path) -> None:
        if kept.exists() and kept.read_text() != self._recipes[name].to_yaml():
            raise LeanKError(
                f"`{self._folder / name}` was made by another recipe (`{kept}`)",
                hint="remove this folder, or name another output folder",
            )


def _keep(file: Path, content: Mapping[str, Any]) -> None:
    buffer = io.BytesIO()
    torch.save(dict(content), buffer)
    write_atomically(file, buffer.getvalue())


def _find_packaged(model: str, ratio: float) -> Path:
    if (found := find_by_model(model, ratio)) is None:
        raise LeanKError(
            f"the package has no mask of `{model}`", hint="leave `--packaged` out to train masks"
        )
    return found


class Bench:
    """A model with all of its channels, which any mask can be tried on.

    `model` is a folder, a hub id, or `testbed`; None for the recipe's. A basis of V is measured on `text`, a
    file, beside the recipe's tasks; None for Python's documentation.
    """

    def __init__(
        self, plan: Plan, model: str | None, out: Path, device: torch.device, text: Path | None = None
    ) -> None:
        self.plan, self.recipe = plan, load_recipe(plan.recipe, plan.overrides)
        named = model or self.recipe.model.id
        if named is None:
            raise LeanKError("the recipe names no model", hint="add `model.id` to it")
        self.model, self.device = named, device
        self.masks = Masks(plan, named, out / "masks", device)
        on_text = [] if text is None else [f"data.haystack.source={text}"]
        self._basis_recipe = load_recipe(plan.recipe, [*plan.overrides, *on_text])
        self.scales_file, self.basis_file = out / "constants.pt", out / "basis.pt"

    @cached_property
    def evaluated(self) -> EvaluatedModel:
        """The model, in memory, with all of its channels; heads stay in order."""
        folder = resolve_model(self.model)
        facts = read_model_facts(read_config(folder), origin=self.model)
        sizes = self.recipe.windows.model_dump()
        known = MaskProvenance.for_model(self.model, facts, method="all channels", **sizes)
        mask = replace(all_channels_mask(facts), provenance=known)
        return load_evaluated(folder, self.device, mask=mask)

    @cached_property
    def basis(self) -> ValueBasis:
        """The basis of V that `measure_basis` left."""
        return ValueBasis(**torch.load(self.basis_file))

    def mask(self, entry: Entry) -> ChannelMask:
        """The mask of an entry's run, at the main ratio where the entry keeps all channels.

        It prunes V where the entry says so: the package's, or by what each direction of V weighs.
        """
        assert entry.run is not None
        mask = self.masks[entry.run][entry.ratio or MAIN_RATIO]
        if entry.values is None:
            return mask
        named = self.recipe.model.id or self.model
        is_packaged = entry.run in self.masks.packaged and entry.ratio != EVERY_CHANNEL
        if is_packaged and (path := find_by_model(named, entry.ratio, entry.values)):
            return load_mask(path)
        if entry.ratio == EVERY_CHANNEL:
            mask = replace(mask, channel_mask=torch.ones_like(mask.channel_mask))
        return self.basis.prune(mask, entry.values)

    def measure_basis(self) -> None:
        """Measure a basis of V, as an export does, and keep it."""
        windows = Windows(**self.recipe.windows.model_dump())
        measured = measure_cache(
            self.model, self._basis_recipe, device=self.device, keys=False, value_windows=windows
        )
        assert measured.values is not None
        _keep(self.basis_file, vars(measured.values))

    def measure_scales(self) -> None:
        """Measure scales for FP8 of the main run's centred keys, as an export does, and keep them."""
        values = MAIN_VALUES if self.plan.has_basis else None
        mask = self.mask(Entry(MAIN, ratio=MAIN_RATIO, run=MAIN, values=values))
        measured = measure_cache(self.model, self.recipe, device=self.device, value_basis=mask.value_basis)
        scales = measured.scales(mask)
        _keep(self.scales_file, {"key_scale": scales.keys, "value_scale": scales.values})

    def variant(self, entry: Entry) -> Variant:
        """What answers as an entry does."""
        if entry.kind == "dense":
            return Dense(self.evaluated.dense, entry.name)
        mask = self.evaluated.channel_masks if entry.run is None else self.mask(entry).channel_mask
        if entry.kind == "think":
            budget = entry.ratio if entry.run is None else mask.sum(-1)
            return ThinK(budget, THINK_WINDOWS if entry.own_windows else None, name=entry.name)
        if entry.kind == "beside":
            mean = None if entry.run is None else self.mask(entry).key_mean
            made = (make_variants(name, mask, mean) for name in (*ROUNDED, *BASELINES))
            return next(variant for found in made for variant in found if variant.name == entry.name)
        kept = torch.ones_like(mask) if entry.ratio == EVERY_CHANNEL else mask
        mean = torch.zeros(mask.shape) if entry.mean == "none" else self.mask(entry).key_mean
        if entry.rounded:
            assert mean is not None and entry.kv_dtype is not None
            constants = {"key_mean": mean}
            return RoundedPrompt(
                entry.name, kept, constants=constants, rounded_to=entry.kv_dtype, keys=entry.rounded == "K"
            )
        constants = {} if entry.mean == "prompt" or mean is None else {"key_mean": mean}
        if constants and entry.kv_dtype == "fp8" and entry.mean == "model":
            constants |= torch.load(self.scales_file)
        pruned = None if entry.values is None else self.mask(entry)
        return PrunedValues(
            entry.name, kept, kv_dtype=entry.kv_dtype, constants=constants or None, pruned_values=pruned
        )


@dataclass
class RoundedPrompt(Masked):
    """A LeanK cache in the model's dtype, of prompts of which keys or values were rounded before.

    Keys are rounded around the mean among its constants.
    """

    rounded_to: str = "fp8"  # by scales of every prompt's channels, or `int4`
    keys: bool = True  # whether keys are rounded; else values are

    def start(self, prefill: Prefill) -> tuple[Any, Any]:
        """A fork of the prefill's cache with rounded prompts."""
        model, cache = super().start(prefill)
        assert self.channel_masks is not None
        for layer, mask in zip(cache.pruned_layers, self.channel_masks, strict=True):
            keys, values = layer.pending
            chosen = mask.to(keys.device)
            if self.keys:
                mean = layer.model_constants.key_mean[0].to(keys.device)[:, None]
                rounded = self._rounded(centre(keys, mean), chosen)
                keys = (rounded.float() + mean).to(keys.dtype)
            else:
                values = self._rounded(values, torch.ones_like(chosen))
            layer.pending = keys, values
        return model, cache

    def _rounded(self, states: Tensor, mask: Tensor) -> Tensor:
        """What a rounded cache gives back of states [B, H_kv, S, D]."""
        if self.rounded_to == "int4":
            return torch.cat([round_to_int4(row[None], assign_chunks(mask)) for row in states])
        rounded: Tensor = reread(states, scale_of(states.abs().amax(2, keepdim=True)))
        return rounded


@dataclass
class PrunedValues(Masked):
    """A LeanK cache that keeps a part of V, too, where a mask is given of which it keeps that part."""

    pruned_values: ChannelMask | None = None

    def start(self, prefill: Prefill) -> tuple[Any, Any]:
        """A fork of the prefill's cache with these channels."""
        model, cache = super().start(prefill)
        if (own := self.pruned_values) is not None and self.channel_masks is not None:
            assert own.value_widths is not None and own.value_basis is not None
            kept, head_dim = self.channel_masks.sum(-1).tolist(), self.channel_masks.shape[-1]
            layouts = cut_layers(kept, own.value_widths.tolist(), head_dim)
            for layer, layout, basis in zip(cache.pruned_layers, layouts, own.value_basis, strict=True):
                layer.layout, layer.value_basis = layout, basis
        return model, cache
