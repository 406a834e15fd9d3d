"""Loading a checkpoint and its dense counterpart for evaluation."""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import init_empty_weights
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from leank_convert._runtime.configuration_leank import read_settings
from leank_convert._runtime.fp8_leank import SCALE_NAMES
from leank_convert.architectures import read_model_facts
from leank_convert.checkpoint_io import (
    CONFIG_NAME,
    open_checkpoint,
    read_config,
    read_leank_config,
    read_leank_facts,
)
from leank_convert.errors import LeanKError, LeanKMemoryError, first_line, out_of_memory
from leank_convert.export.packaged import identify_model
from leank_convert.families import Architecture
from leank_convert.hub import resolve_model
from leank_convert.kv_scales import check_scale_tensors
from leank_convert.leank_block import read_block
from leank_convert.prune import MaskSource, apply_mask, find_mask
from leank_convert.recipe import Recipe
from leank_convert.recipe_file import find_recipe
from leank_convert.text_part import find_whole, load_from
from leank_convert.tokenizer import load_tokenizer
from leank_convert.trust import check_code, check_config
from leank_convert.unpack import unpack_weights
from leank_convert.value_weights import check_values_belong
from leank_convert.windows import Windows

_logger = logging.getLogger("leank_convert")
_MOST_TIMES = 8


@dataclass(frozen=True)
class EvaluatedModel:
    """A checkpoint, and the dense model that it is without its cache."""

    model: Any  # the LeanK model
    dense: Any  # the stock class on the same weights
    tokenizer: Any  # the checkpoint's
    leank: dict[str, Any]  # the `leank` block of its config.json
    channel_masks: Tensor  # kept channels, bool [L, H_kv, D], in the checkpoint's head order
    windows: Windows  # the checkpoint's own

    @property
    def key_mean(self) -> Tensor | None:
        """Mean that comes off keys [L, H_kv, D], in the checkpoint's head order; None where nothing does."""
        means = self.model.key_means
        return None if means is None else torch.cat(means)


def load_evaluated(
    checkpoint: Path,
    device: torch.device,
    *,
    mask: MaskSource = None,
    recipe: Recipe | str | Path | None = None,
    trust: bool = False,
) -> EvaluatedModel:
    """Load a checkpoint, and its dense twin on the same memory; `trust` runs whatever code it holds.

    With `mask`, `checkpoint` is a model, which is pruned in memory. A mask that does not say its windows gets
    those of the recipe, or else of the model's packaged one, as `export` does it.

    Raises:
        LeanKError: If it is no LeanK checkpoint, holds other code than a release's, a shard of it is damaged,
            it has no tokenizer, or the mask is not made for it.
    """
    if mask is None:
        check_code(checkpoint, trust=trust)
        folder, (config, leank) = checkpoint, read_leank_config(checkpoint)
        facts = read_leank_facts(config, folder)
        opened = open_checkpoint(folder)  # names a damaged shard better than loading does
        read_block(leank, facts, origin=str(folder / CONFIG_NAME))
        check_scale_tensors(opened, facts, leank)
        tokenizer = load_tokenizer(folder, trust=trust)
    else:
        folder = resolve_model(str(checkpoint))
        check_config(folder)
        config = read_config(folder)
        if "leank" in config:
            raise LeanKError(
                f"`{checkpoint}` is a checkpoint, which has its mask already",
                hint="leave the mask out, or name the original model",
            )
        facts = read_model_facts(config, origin=str(folder / CONFIG_NAME))
        found, origin = find_mask(mask, str(checkpoint))  # refused before weights are loaded
        if found.value_basis is not None and found.provenance is not None:
            origins = {"mask_origin": origin, "model_origin": str(checkpoint)}
            name, opened = identify_model(checkpoint), open_checkpoint(folder)
            check_values_belong(found.provenance, opened, facts, name=name, **origins)
        known = None if found.provenance else find_recipe(recipe, checkpoint)
        tokenizer = load_tokenizer(folder, checkpoint)
    model = load_model(folder, device, trust_remote_code=mask is None)
    dense = _as_stock(model, facts.architecture)
    if mask is not None:
        stated = {} if known is None else known.windows.model_dump(exclude_unset=True)
        apply_mask(model, mask, **stated)
    settings = read_settings(model.config)
    windows = Windows(**vars(settings.windows))
    return EvaluatedModel(model, dense, tokenizer, model.config.leank, settings.channel_masks, windows)


def load_model(folder: Path, device: torch.device, *, trust_remote_code: bool, spreads: bool = False) -> Any:
    """Load a causal language model to decode with, on one device or, if it `spreads`, on all GPUs.

    Raises:
        LeanKError: If transformers, or the checkpoint's own code, refuses it, or lacks a library for it; or
            if memory does not suffice.
    """
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
        if spreads:
            options["device_map"] = "auto"
        if find_whole(folder) is not None:
            config = read_config(folder)
            options["config"] = CONFIG_MAPPING[config["model_type"]].from_dict(config)
        with out_of_memory(f"the weights of `{folder}`", "take another `--device`"):
            model: Any = load_from(AutoModelForCausalLM, folder, **options)
            if not spreads:
                model.to(device)
    except LeanKMemoryError:
        raise
    except ImportError as error:  # of what reads quantized weights
        raise LeanKError(f"`{folder}` cannot be loaded: {first_line(error)}") from error
    except Exception as error:  # by what it is that is damaged; of a config.json of as many kinds as keys
        said = isinstance(error, OSError | RuntimeError | TypeError | ValueError)
        what = "cannot be loaded" if said else "is refused by transformers"
        raise LeanKError(
            f"`{folder}` {what}: {first_line(error)}",
            hint=f"`leank-convert verify {folder}` lists what is wrong" if trust_remote_code else None,
        ) from error
    unpack_weights(model, rounds_inputs=True)
    return model.eval()


def check_length(evaluated: EvaluatedModel, asked: int, what: str) -> None:
    """Refuse, by a LeanKError, prompts of many times the length that a model was made for."""
    limit = evaluated.model.config.max_position_embeddings
    if asked > _MOST_TIMES * limit:
        raise LeanKError(
            f"{what} {asked} is more than {_MOST_TIMES} times the {limit} positions of the model "
            "(`max_position_embeddings`)",
            hint="ask for shorter prompts",
        )


def warn_of_positions(evaluated: EvaluatedModel, num_tokens: int) -> None:
    """Warn where a sequence of so many tokens is longer than the model was made for."""
    limit = evaluated.model.config.max_position_embeddings
    if num_tokens > limit:
        _logger.warning(
            "up to %d tokens, and the model has %d positions (`max_position_embeddings`): beyond them the "
            "dense model itself may answer nonsense",
            num_tokens,
            limit,
        )


def _as_stock(model: Any, architecture: Architecture) -> Any:
    """The stock model on the same weights: what the checkpoint is when it is loaded by its stock class."""
    config_class = getattr(transformers, architecture.config_class)
    values = {**model.config.to_dict(), "model_type": architecture.model_type}
    values["attn_implementation"] = "eager" if architecture.sinks else "sdpa"
    with init_empty_weights():
        dense = getattr(transformers, architecture.causal_lm_class)(config_class.from_dict(values))
    shared: tuple[str, ...] = ()
    if getattr(model, "hf_quantizer", None) is not None:  # modules of other classes, or other tensors
        parts = [name for name, part in dense.named_modules() if part._parameters and not part._modules]
        for name in parts:
            dense.set_submodule(name, model.get_submodule(name))
        shared = tuple(f"{name}." for name in parts)
    # The very parameters, which decoding may lay elsewhere. Scales of an FP8 cache are tensors, too.
    tensors = model.state_dict(keep_vars=True)
    own = tuple(f".{name}" for name in SCALE_NAMES)
    weights = {
        key: value for key, value in tensors.items() if not key.endswith(own) and not key.startswith(shared)
    }
    dense.load_state_dict(weights, strict=not shared, assign=True)
    # Its own is made of the config, which often names fewer of the tokens that end a turn.
    dense.generation_config = copy.deepcopy(model.generation_config)
    return dense.to(model.device).eval()
