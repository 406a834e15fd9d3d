"""The frozen model that is trained on, with its tokenizer and its facts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from leank_convert.architectures import ModelFacts, apply_config_overrides, read_model_facts
from leank_convert.checkpoint_io import Checkpoint, open_checkpoint
from leank_convert.errors import LeanKError
from leank_convert.files import digest_files
from leank_convert.hub import resolve_model
from leank_convert.recipe import Recipe
from leank_convert.train.attention import ATTENTION_NAME
from leank_convert.train.fusion import fuse_layers
from leank_convert.train.passes import BLOCK_SIZE


@dataclass(frozen=True)
class Subject:
    """A model made ready for training.

    Attributes:
        name: What the user called it.
        model: Frozen, in eval mode, with training's attention.
        tokenizer: Its tokenizer.
        facts: Its architecture, overrides applied.
        config: Its config.json, overrides applied.
        weights_digest: Tells its weights from others of the same shapes.
    """

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    facts: ModelFacts
    config: Mapping[str, Any]
    weights_digest: str


@dataclass(frozen=True)
class ModelFiles:
    """A model before its weights are loaded.

    Attributes:
        name: What the user called it.
        checkpoint: Its files, with their headers.
        facts: Its architecture, overrides applied.
        config: Its config.json, overrides applied.
    """

    name: str
    checkpoint: Checkpoint
    facts: ModelFacts
    config: Mapping[str, Any]


def find_model(recipe: Recipe, model_override: str | None = None) -> ModelFiles:
    """Find the model of a recipe, and download it if need be.

    Args:
        recipe: Names the model and its config's overrides.
        model_override: A model to take instead of the recipe's.

    Raises:
        LeanKError: If no model is named, it cannot be found or read, its family is not supported, or the
            recipe's lengths exceed its positions.
    """
    name = model_override or recipe.model.id
    if name is None:
        raise LeanKError(
            "the recipe names no model", hint="set `model.id`, or name a model on the command line"
        )
    checkpoint = open_checkpoint(resolve_model(name))
    config = apply_config_overrides(checkpoint.config, recipe.model.config_overrides)
    facts = read_model_facts(config, origin=name)
    _check_positions(config, facts, recipe, name)
    return ModelFiles(name, checkpoint, facts, config)


def load_subject(recipe: Recipe, device: torch.device, model_override: str | None = None) -> Subject:
    """Load the model of a recipe.

    Args:
        recipe: Names the model, its config's overrides and its dtype.
        device: Where the weights go, unless the recipe spreads them.
        model_override: A model to take instead of the recipe's.

    Raises:
        LeanKError: As `find_model`, or if weights or tokenizer cannot be loaded.
    """
    files = find_model(recipe, model_override)
    folder = files.checkpoint.folder
    return Subject(
        name=files.name,
        model=_load_model(folder, files.config, files.facts, recipe, device, files.name),
        tokenizer=_load_tokenizer(folder, files.name),
        facts=files.facts,
        config=files.config,
        weights_digest=digest_files(folder / shard for shard in files.checkpoint.shards),
    )


def _load_model(
    folder: Path,
    config: Mapping[str, Any],
    facts: ModelFacts,
    recipe: Recipe,
    device: torch.device,
    name: str,
) -> PreTrainedModel:
    try:
        built = CONFIG_MAPPING[facts.model_type].from_dict(dict(config))
        # Without weights, so that what fails here is the config's fault alone.
        with torch.device("meta"):
            AutoModelForCausalLM.from_config(built)  # type: ignore[no-untyped-call]
    except Exception as error:  # whatever transformers stumbles upon in a value
        raise _refused_config(error, recipe, name) from error
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=built,
            dtype=recipe.model.dtype,
            device_map=recipe.model.device_map,
            attn_implementation=ATTENTION_NAME,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    except SafetensorError as error:
        raise LeanKError(
            f"the weights of model `{name}` cannot be read: {error}", hint="fetch or copy its files again"
        ) from error
    # transformers only warns of either, and goes on with random values.
    missing = sorted(loaded[1]["missing_keys"])
    if missing:
        raise LeanKError(f"model `{name}`: {len(missing)} tensors are missing, the first is `{missing[0]}`")
    mismatched = sorted(loaded[1]["mismatched_keys"])
    if mismatched:
        tensor, stored, asked = mismatched[0]
        raise LeanKError(
            f"model `{name}`: tensor `{tensor}` is {list(stored)} and its config asks for {list(asked)}",
            hint="its `config.json` belongs to other weights: fetch or copy its files again",
        )
    model: PreTrainedModel = loaded[0]
    model.eval().requires_grad_(False)  # type: ignore[no-untyped-call]
    if recipe.model.device_map is None:
        model.to(device)  # type: ignore[arg-type]
        # A short run would be over before it had paid for itself.
        if device.type == "cuda" and recipe.data.max_length >= BLOCK_SIZE:
            fuse_layers(model)
    return model


def _refused_config(error: Exception, recipe: Recipe, name: str) -> LeanKError:
    reason = " ".join(str(error).split())
    if isinstance(error, KeyError):
        reason = f"unknown value or missing key: {reason}"
    changed = ", ".join(f"`{key}`" for key in recipe.model.config_overrides)
    return LeanKError(
        f"the config of model `{name}` is refused: {reason or type(error).__name__}",
        hint=f"see `model.config_overrides` ({changed})" if changed else "see the model's `config.json`",
    )


def _load_tokenizer(folder: Path, name: str) -> PreTrainedTokenizerBase:
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise LeanKError(
            f"the tokenizer of model `{name}` cannot be loaded: {reason}",
            hint="samples are made with the model's own tokenizer: put its files into the model's folder",
        ) from error
    return tokenizer


def _check_positions(config: Mapping[str, Any], facts: ModelFacts, recipe: Recipe, name: str) -> None:
    limit = config.get(
        "max_position_embeddings", facts.architecture.config_defaults["max_position_embeddings"]
    )
    if not isinstance(limit, int) or recipe.data.max_length <= limit:
        return
    raise LeanKError(
        f"`data.max_length` {recipe.data.max_length} exceeds the {limit} positions of model `{name}` "
        "(`max_position_embeddings`)",
        hint="lower it, or extend the model through `model.config_overrides` (`max_position_embeddings` and "
        "`rope_parameters`)",
    )
