"""The frozen model that is trained on, with its tokenizer and its facts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from leank_convert.architectures import ModelFacts, read_model_facts
from leank_convert.checkpoint_io import CONFIG_NAME, Checkpoint, open_checkpoint
from leank_convert.config_class import build_config, refused_by_transformers
from leank_convert.config_overrides import apply_config_overrides
from leank_convert.errors import LeanKError, first_line, out_of_memory
from leank_convert.files import digest_files
from leank_convert.hub import resolve_model
from leank_convert.recipe import ModelSection, Recipe
from leank_convert.text_part import load_from, warn_of_images
from leank_convert.tokenizer import load_tokenizer
from leank_convert.train.attention import ATTENTION_NAME
from leank_convert.train.fusion import fuse_layers
from leank_convert.train.graphs import is_bound_by_host
from leank_convert.train.passes import BLOCK_SIZE, check_layers
from leank_convert.unpack import unpack_weights
from leank_convert.value_weights import check_measurable


@dataclass(frozen=True)
class ModelFiles:
    """A model before its weights are loaded."""

    name: str  # what the user called it
    checkpoint: Checkpoint  # its files, with their headers
    facts: ModelFacts  # its architecture, overrides applied
    config: Mapping[str, Any]  # its config.json, overrides applied


@dataclass(frozen=True)
class LoadedModel(ModelFiles):
    """A model made ready for training."""

    model: PreTrainedModel  # frozen, in eval mode, with training's attention
    tokenizer: PreTrainedTokenizerBase  # its tokenizer
    weights_digest: str  # tells its weights from others of the same shapes
    offload_context: bool  # whether contexts' keys and values wait in host memory


def find_model(model: str | Path, recipe: Recipe) -> ModelFiles:
    """Find a model, a local folder, a hub id, or `testbed`, and download it if need be.

    Raises:
        LeanKError: If it cannot be found or read, its family is not supported, or the recipe's lengths exceed
            its positions.
    """
    files = open_model(model, recipe.model)
    positions = files.facts.max_position_embeddings
    if recipe.data.max_length > positions:
        raise LeanKError(
            f"`data.max_length` {recipe.data.max_length} exceeds the {positions} positions of model "
            f"`{files.name}` (`max_position_embeddings`)",
            hint="lower it, or extend the model through `model.config_overrides` (`max_position_embeddings` "
            "and `rope_parameters`)",
        )
    return files


def find_trainable(model: str | Path, recipe: Recipe) -> ModelFiles:
    """Find a model, as `find_model`, and refuse one whose layers or V are such that no mask can be made."""
    files = find_model(model, recipe)
    if recipe.trains or recipe.held_out_samples or recipe.key_mean or recipe.value_pruning_ratio:
        check_layers(files.facts, files.name)
    if recipe.value_pruning_ratio:
        check_measurable(files.checkpoint, files.facts)
    return files


def open_model(model: str | Path, section: ModelSection) -> ModelFiles:
    """Find a model, as `find_model` does, whatever its recipe's lengths are; raises as `find_model`."""
    checkpoint = open_checkpoint(resolve_model(model))
    warn_of_images(checkpoint.folder)
    config = apply_config_overrides(checkpoint.config, section.config_overrides)
    facts = read_model_facts(config, origin=str(checkpoint.folder / CONFIG_NAME))
    return ModelFiles(str(model), checkpoint, facts, config)


def count_bytes(files: ModelFiles, recipe: Recipe, device: torch.device) -> dict[str, Any]:
    """Count what each GPU has to hold in training, by the model's headers, and what it can, in bytes.

    `weights`; `context`, the longest context's keys and values; `working`, a layer's computation, as
    estimated; `total` of these; `capacity`, and whether it `fits`, both None on a device that is no GPU and
    not judged.
    """
    facts = files.facts
    tensors = [tensor for header in files.checkpoint.shards.values() for tensor in header.tensors.values()]
    largest = max(tensors, key=lambda tensor: tensor.num_bytes)
    stored_bytes = largest.num_bytes // math.prod(largest.shape)
    dtype = facts.dtype if recipe.model.dtype == "auto" else recipe.model.dtype
    element_bytes = stored_bytes if dtype is None else getattr(torch, dtype).itemsize
    weights = files.checkpoint.num_data_bytes // stored_bytes * element_bytes
    quantization = files.config.get("quantization_config")
    if isinstance(quantization, dict) and quantization.get("quant_method") == "compressed-tensors":
        unpacked = _build_without_weights(files)
        weights = sum(parameter.numel() for parameter in unpacked.parameters()) * element_bytes
    per_token = 2 * facts.num_cached_layers * facts.num_key_value_heads * facts.head_dim * element_bytes
    context = per_token * recipe.data.max_length
    # The MLP's gate, its activation and the product with up, beside the residual and its norm.
    mlp = int(files.config.get("intermediate_size") or 4 * facts.hidden_size)
    working = min(BLOCK_SIZE, recipe.data.max_length) * (3 * mlp + 2 * facts.hidden_size) * element_bytes
    spread = recipe.model.device_map == "auto" and device.type == "cuda"
    num_gpus = torch.cuda.device_count() if spread else 1
    capacity = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    weights = -(-weights // num_gpus)
    context = context // facts.num_cached_layers if recipe.offload_context else -(-context // num_gpus)
    total = weights + context + working
    return {
        "weights": weights,
        "context": context,
        "working": working,
        "capacity": capacity,
        "total": total,
        "fits": None if capacity is None else total <= capacity,
    }


def load_model(files: ModelFiles, recipe: Recipe, device: torch.device) -> LoadedModel:
    """Load a model that was found to a device, unless the recipe spreads it over GPUs.

    Raises:
        LeanKError: If weights or tokenizer cannot be loaded, or memory does not suffice.
    """
    folder = files.checkpoint.folder
    with out_of_memory(
        f"the weights of model `{files.name}`",
        "spread them over all GPUs of one process by `--set model.device_map=auto`; `leank-convert "
        "train --dry-run` says what a run needs",
    ):
        model = _load_weights(files, recipe, device)
    return LoadedModel(
        **vars(files),
        model=model,
        tokenizer=load_tokenizer(folder, files.name),
        weights_digest=digest_files(folder / shard for shard in files.checkpoint.shards),
        offload_context=recipe.offload_context,
    )


def _build_without_weights(files: ModelFiles) -> Any:
    origin = str(files.checkpoint.folder / CONFIG_NAME)
    built = build_config(files.config, files.facts.architecture, origin=origin)
    with refused_by_transformers(origin), torch.device("meta"):
        return AutoModelForCausalLM.from_config(built, trust_remote_code=False)  # type: ignore[no-untyped-call]


def _load_weights(files: ModelFiles, recipe: Recipe, device: torch.device) -> PreTrainedModel:
    name = files.name
    built = _build_without_weights(files).config  # what fails here is the config's fault alone
    try:
        loaded: Any = load_from(
            AutoModelForCausalLM,
            files.checkpoint.folder,
            config=built,
            trust_remote_code=False,
            dtype=recipe.model.dtype,
            device_map=recipe.model.device_map,
            attn_implementation=ATTENTION_NAME,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    except ImportError as error:  # of what reads quantized weights
        raise LeanKError(f"model `{name}` cannot be loaded: {first_line(error)}") from error
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
    quantizer: Any = getattr(model, "hf_quantizer", None)
    stays = quantizer is not None and not getattr(quantizer.quantization_config, "dequantize", False)
    if recipe.trains and stays and not quantizer.is_trainable:
        raise LeanKError(
            f"model `{name}`: kernels of its quantized weights give no gradients",
            hint="train a mask of the plain model, and `export` this one by it",
        )
    model.eval().requires_grad_(False)  # type: ignore[no-untyped-call]
    alone = recipe.model.device_map is None
    if alone:
        model.to(device)  # type: ignore[arg-type]
    unpack_weights(model, rounds_inputs=False)
    if alone:
        # A short run would be over before it had paid for itself.
        worth = recipe.data.max_length >= BLOCK_SIZE and not is_bound_by_host(model, recipe.data.max_length)
        if device.type == "cuda" and worth:
            fuse_layers(model)
    return model
