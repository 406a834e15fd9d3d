"""Model to trace: stock code on a checkpoint's weights, and its kept channels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from leank_convert._runtime.windows_leank import Windows
from leank_convert.architectures import ModelFacts
from leank_convert.checkpoint_io import CONFIG_NAME, open_checkpoint, read_leank_config, read_leank_facts
from leank_convert.config_class import build_config
from leank_convert.errors import LeanKError
from leank_convert.families import Architecture
from leank_convert.leank_block import VALUE_BASIS_KEY, read_block
from leank_convert.mask import load_own_mask
from leank_convert.mask_tensor import in_checkpoint_order
from leank_convert.onnx.leank_onnx_cache import Bucket
from leank_convert.text_part import load_from

# Their angles depend on how long the sequence has become, which a traced graph does not know.
_ROPE_TYPES_BY_LENGTH = ("dynamic", "longrope")
# onnxruntime's CPU has no kernels for bfloat16.
DTYPES = {"float32": torch.float32, "float16": torch.float16}


@dataclass(frozen=True)
class PrunedModel:
    """A dense model, and how its cache is pruned."""

    # A stock causal LM of one of `DTYPES`, in eval mode, on the CPU, in the checkpoint's head order.
    model: Any
    channel_masks: Tensor  # kept channels, bool [L, H_kv, D]; widths ascend within a layer
    windows: Windows
    name: str = "model"  # for the description
    # [layer][new] = old over KV heads, None where heads are in the model's own order.
    head_permutation: list[list[int]] | None = None
    key_mean: Tensor | None = None  # what comes off every key before it is cached, float32 [L, H_kv, D]
    value_widths: Sequence[Sequence[int]] | None = None  # kept channels of V [L][H_kv], the first ones

    @property
    def dtype(self) -> str:
        """The key in `DTYPES` of weights and cache."""
        return str(self.model.dtype).removeprefix("torch.")

    @property
    def widths(self) -> list[list[int]]:
        """Kept channels [L][H_kv]."""
        widths: list[list[int]] = self.channel_masks.sum(-1).tolist()
        return widths

    @property
    def buckets(self) -> list[list[Bucket]]:
        """Per layer its runs of heads that keep as much of K and of V, widths of K ascending."""
        whole: list[list[None]] = [[None] * len(row) for row in self.widths]
        layers = []
        for kept in zip(self.widths, self.value_widths or whole, strict=True):
            heads = list(zip(*kept, strict=True))
            starts = [head for head, own in enumerate(heads) if head == 0 or own != heads[head - 1]]
            runs = pairwise([*starts, len(heads)])
            layers.append([Bucket(heads[a][0], slice(a, b), heads[a][1]) for a, b in runs])
        return layers

    @property
    def channel_order(self) -> Tensor:
        """The channel that each lane of a cached key holds: kept ones first, both ascending. [L, H_kv, D]."""
        return (~self.channel_masks).to(torch.int8).argsort(dim=-1, stable=True)


def load_pruned(checkpoint: Path, dtype: str = "float32") -> PrunedModel:
    """Load a converted checkpoint as its stock class, in a dtype of `DTYPES`.

    Raises:
        LeanKError: If it is no LeanK checkpoint, is damaged, or its rope cannot be written as a graph.
    """
    config, leank = read_leank_config(checkpoint)
    facts = read_leank_facts(config, checkpoint)
    check_traceable(facts, checkpoint)
    if leank.get("kv_dtype") is not None:
        raise LeanKError(
            f"`{checkpoint}` keeps its cache in {leank['kv_dtype']}; a graph's has the dtype of its weights",
            hint="make the graph of the model itself, with the checkpoint's mask by `--mask`, windows as "
            "`inspect` shows them by `--sink-size`, `--recent-size` and `--flush-size`",
        )
    if VALUE_BASIS_KEY in leank:
        raise LeanKError(
            f"`{checkpoint}` rotates V into a basis as it is cached, which graphs do not",
            hint="make the graph of the model itself, with a mask of K alone by `--mask`",
        )
    open_checkpoint(checkpoint)  # names a damaged shard better than loading does
    settings = read_block(leank, facts, origin=str(checkpoint / CONFIG_NAME))
    mean = load_own_mask(checkpoint, leank).key_mean
    model = load_stock(checkpoint, config, facts.architecture, dtype)
    return PrunedModel(
        model,
        settings.channel_masks,
        settings.windows,
        name=checkpoint.resolve().name,
        head_permutation=leank["head_permutation"],
        key_mean=None if mean is None else in_checkpoint_order(mean.float(), leank["head_permutation"]),
        value_widths=settings.value_widths,
    )


def load_stock(folder: Path, config: Mapping[str, Any], architecture: Architecture, dtype: str) -> Any:
    """Load a model or checkpoint as its stock class; raises as `refuse_quantized` and `build_config`."""
    refuse_quantized(config, folder)
    built = build_config(config, architecture, origin=str(folder / CONFIG_NAME))
    stock: Any = getattr(transformers, architecture.causal_lm_class)
    return load_from(stock, folder, config=built, dtype=DTYPES[dtype]).eval()


def refuse_quantized(config: Mapping[str, Any], origin: object) -> None:
    """Refuse, by a LeanKError, a config.json that tells of quantized weights."""
    if config.get("quantization_config") is not None:
        raise LeanKError(
            f"`{origin}`: its weights are quantized (`quantization_config`); a graph is made of plain ones",
            hint="make it of the model that it was quantized from; `--weights int8` quantizes a graph's",
        )


def check_traceable(facts: ModelFacts, origin: object) -> None:
    """Refuse what depends on more than a graph knows: on which tokens there are, or on how many.

    Raises:
        LeanKError: If the model has a mixture of experts, layers without full attention, or a rope whose
            angles depend on the length.
    """
    if facts.architecture.experts:
        raise LeanKError(
            f"`{origin}`: a `{facts.model_type}` layer is a mixture of experts, each of which runs on other "
            "tokens in every step; a graph runs everything",
            hint="export it for PyTorch",
        )
    if facts.is_mixed:
        raise LeanKError(
            f"`{origin}`: only {len(facts.layers)} of {facts.num_hidden_layers} layers have full attention; "
            "a graph's host keeps no window for others",
            hint="export it for PyTorch",
        )
    kind = facts.rope_parameters["rope_type"]
    if kind in _ROPE_TYPES_BY_LENGTH:
        raise LeanKError(
            f"`{origin}`: `rope_type` is `{kind}`, whose angles depend on the length of the sequence; "
            "a graph has one set of angles",
            hint="export it for PyTorch, or with a fixed rope such as `yarn` or `llama3`",
        )
