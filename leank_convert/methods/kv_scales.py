"""Calibration of an FP8 cache: the largest keys and values of a model on its recipe's own data."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from leank_convert.architectures import ModelFacts
from leank_convert.checkpoint_io import TRAINING_FOLDER
from leank_convert.data import SampleSource
from leank_convert.device import choose_device
from leank_convert.errors import LeanKError, out_of_memory
from leank_convert.hub import known_name
from leank_convert.kv_scales import KVScales
from leank_convert.methods.statistics import attention_of
from leank_convert.recipe import Recipe
from leank_convert.recipe_file import RUN_RECIPE_NAME, load_recipe, packaged_recipe
from leank_convert.train.derive import derive_recipe
from leank_convert.train.fusion import uncompiled
from leank_convert.train.model import load_model, open_model

# Of prompts so long at most, so that they are several whatever the recipe's lengths are.
NUM_TOKENS, MAX_TOKENS = 4096, 1024


def measure_kv_scales(
    model: str | Path,
    recipe: Recipe | str | Path | None = None,
    *,
    out: str | Path | None = None,
    device: str | torch.device | None = None,
) -> KVScales:
    """Measure the scales that an FP8 cache of a model needs, on the first prompts of its recipe's data.

    Args:
        model: A local folder, a hub id, or `testbed`.
        recipe: A recipe, or its name or file; None for that of the training run in `out`, else the model's
            packaged one, else one that is derived from its shape.
        out: A folder that may hold a training run.
        device: Default: CUDA if there is any, else the CPU.

    Raises:
        LeanKError: If the model or the recipe cannot be read, memory does not suffice, or a number is not
            finite.
    """
    chosen = _choose_recipe(model, recipe, out, device)
    files = open_model(model, chosen.model)
    with out_of_memory(
        f"a prompt of {MAX_TOKENS} tokens in model `{files.name}`",
        "take another `device`, or spread the weights over all GPUs by `--set model.device_map=auto`",
    ):
        loaded = load_model(files, chosen, choose_device(device))
        samples = SampleSource(loaded.tokenizer, chosen.data, chosen.seed)
        samples.check()
        shape = files.facts.mask_shape
        largest = [torch.zeros(shape), torch.zeros(shape)]
        num_tokens = place = 0
        while num_tokens < NUM_TOKENS:
            prompt = samples.draw(place).prompt_ids()[: min(MAX_TOKENS, NUM_TOKENS - num_tokens)]
            found = _largest(loaded.model, prompt, files.facts)
            largest = [torch.maximum(*pair) for pair in zip(largest, found, strict=True)]
            num_tokens, place = num_tokens + len(prompt), place + 1
    for name, states in zip(("keys", "values"), largest, strict=True):
        if not bool(states.isfinite().all()):
            raise LeanKError(
                f"{name} of model `{files.name}` are not finite on its recipe's data, so they have no scale",
                hint="float16 overflows where bfloat16 and float32 do not: see `model.dtype`",
            )
    return KVScales.of_largest(
        *largest, num_tokens=num_tokens, tasks=tuple(chosen.data.tasks), seed=chosen.seed
    )


def _choose_recipe(
    model: str | Path,
    recipe: Recipe | str | Path | None,
    out: str | Path | None,
    device: str | torch.device | None,
) -> Recipe:
    if isinstance(recipe, Recipe):
        return recipe
    trained = None if out is None else Path(out) / TRAINING_FOLDER / RUN_RECIPE_NAME
    if recipe is None and trained is not None and trained.exists():
        recipe = trained
    if recipe is None:
        known = known_name(model)
        recipe = None if known is None else packaged_recipe(known)
    return derive_recipe(model, (), device=device) if recipe is None else load_recipe(recipe)


@torch.no_grad()
def _largest(model: PreTrainedModel, input_ids: Tensor, facts: ModelFacts) -> list[Tensor]:
    """The largest absolute keys and values of a prompt [N], each [L, H_kv, D] on the CPU."""
    cache = DynamicCache(config=model.config)  # linear layers keep a state of their own in it
    device = next(model.parameters()).device
    # transformers has no sinks in its SDPA.
    with attention_of(model, "eager" if facts.architecture.sinks else "sdpa"), uncompiled():
        model.base_model(input_ids=input_ids[None].to(device), past_key_values=cache, use_cache=True)
    return [
        torch.stack([getattr(cache.layers[i], name)[0].abs().amax(1).float().cpu() for i in facts.layers])
        for name in ("keys", "values")
    ]
