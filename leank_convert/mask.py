"""The mask: which channels of each KV head's cached key are kept, and where that knowledge comes from.

A mask is learned by training or imported. It names heads in the ORIGINAL order of the model; the order within
a checkpoint is `head_layout`'s.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from leank_convert.architectures import ModelFacts
from leank_convert.errors import LeanKError, cut, shorten
from leank_convert.families import ARCHITECTURES
from leank_convert.fields import Fields
from leank_convert.files import parse_json, write_atomically
from leank_convert.held_out import HeldOut
from leank_convert.hub import download_file, hide_local_paths, is_hub_id
from leank_convert.mask_metadata import check_provenance, read_held_out
from leank_convert.mask_tensor import (
    check_file,
    load_array,
    load_key_mean,
    load_pickle,
    load_stored,
    to_bool,
)
from leank_convert.masks import find_by_model, find_by_name
from leank_convert.safetensors_file import encode_header, read_header

MASK_FORMAT = "leank-mask"
MASK_FORMAT_VERSION = 1
MASK_FILE_NAME = "channel_mask.safetensors"

_PICKLE_SUFFIXES = (".pth", ".pt")
_SUFFIXES = (".safetensors", ".npy", *_PICKLE_SUFFIXES)


def package_versions() -> dict[str, str]:
    """The versions that a learned mask depends on."""
    versions = {}
    for name in ("leank-convert", "torch", "transformers"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            # A source tree on the path, without an installation.
            versions[name] = "not installed"
    return versions


@dataclass(frozen=True)
class MaskProvenance:
    """Where a mask comes from and which model it fits; the header metadata of a mask file.

    Attributes:
        model: Hub id, or the name of a local folder.
        model_type: The family.
        num_hidden_layers: All layers.
        num_attention_heads: H.
        num_key_value_heads: H_kv.
        head_dim: D.
        rope_parameters: The rope under which the mask holds, as `read_rope_parameters` gives it.
        method: How the mask was made, such as `leank`, or `imported`.
        sink_size: First tokens that keep every channel.
        recent_size: Last tokens that keep every channel.
        flush_size: Tokens pruned at once.
        pruning_ratio_asked: Fraction of channels to remove, None for an imported mask.
        width_multiple: What training rounded widths to, None for an imported mask.
        recipe: The training recipe, verbatim but for local paths.
        seed: The training run's seed.
        versions: Package versions at the time.
        held_out: How held-out samples were answered when it was made, None if that was not tried.
        made_by: Who made it, if that was not a run of leank-convert of its user's own.
        source: Where it was published, under what copyright and licence.
        layers: Numbers of the layers that the mask is of, L of them; None if it is of all.
        evaluation: How it was evaluated beyond `held_out`, and by whom.
        key_mean_tokens: How many tokens the mean of keys was measured on; None without one, or if not known.
    """

    model: str
    model_type: str
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_parameters: Mapping[str, Any]
    method: str
    sink_size: int
    recent_size: int
    flush_size: int
    pruning_ratio_asked: float | None = None
    width_multiple: int | None = None
    recipe: str | None = None
    seed: int | None = None
    versions: Mapping[str, str] = field(default_factory=package_versions)
    held_out: HeldOut | None = None
    made_by: str | None = None
    source: str | None = None
    evaluation: str | None = None
    layers: Sequence[int] | None = None
    key_mean_tokens: int | None = None

    @classmethod
    def for_model(cls, model: str, facts: ModelFacts, **rest: Any) -> MaskProvenance:
        """Fill the model's fields from its name, as `model_name` gives it, and its facts."""
        return cls(
            model=model,
            model_type=facts.model_type,
            num_hidden_layers=facts.num_hidden_layers,
            num_attention_heads=facts.num_attention_heads,
            num_key_value_heads=facts.num_key_value_heads,
            head_dim=facts.head_dim,
            rope_parameters=facts.rope_parameters,
            layers=list(facts.layers) if facts.is_mixed else None,
            **rest,
        )

    @property
    def maker(self) -> str:
        """Who made it, in a few words."""
        return self.made_by or f"leank-convert ({self.method})"

    @property
    def evaluated(self) -> str:
        """How it was evaluated, in a few words."""
        if self.evaluation is not None or self.held_out is None:
            return self.evaluation or "not yet"
        return self.held_out.shares


@dataclass(frozen=True, eq=False)
class ChannelMask:
    """The channels that are kept.

    Attributes:
        channel_mask: Bool [L, H_kv, D], ORIGINAL head order, True where kept.
        scaling_factors: Float32 [L, H_kv, D], as training ended with them, or None.
        provenance: None for an imported mask.
        key_mean: Float16 [L, H_kv, D]: what comes off every cached key before it is stored, the mean of keys
            after RoPE, so that a channel that is removed counts as its mean; None for nothing.
    """

    channel_mask: Tensor
    scaling_factors: Tensor | None = None
    provenance: MaskProvenance | None = None
    key_mean: Tensor | None = None

    def __post_init__(self) -> None:
        mask, factors, mean = self.channel_mask, self.scaling_factors, self.key_mean
        if mask.dtype != torch.bool or mask.ndim != 3 or mask.numel() == 0:
            raise LeanKError(
                f"a channel mask is a bool tensor [layers, KV heads, head_dim], got {_describe(mask)}"
            )
        if factors is not None and (factors.dtype != torch.float32 or factors.shape != mask.shape):
            raise LeanKError(
                f"scaling factors are a float32 tensor of the mask's shape {list(mask.shape)}, "
                f"got {_describe(factors)}"
            )
        if mean is None:
            return
        if mean.dtype != torch.float16 or mean.shape != mask.shape or not mean.isfinite().all():
            raise LeanKError(
                f"a mean of keys is a tensor of finite float16 of the mask's shape {list(mask.shape)}, got "
                f"{_describe(mean)}"
            )

    @property
    def widths(self) -> tuple[tuple[int, ...], ...]:
        """Kept channels `[layer][head]`, original head order."""
        return tuple(tuple(layer) for layer in self.channel_mask.sum(-1).tolist())

    @property
    def pruning_ratio(self) -> float:
        """Fraction of channels removed, over the whole model."""
        return 1 - int(self.channel_mask.sum()) / self.channel_mask.numel()

    def stores_alike(self, other: ChannelMask) -> bool:
        """Whether a cache stores the same by both: the same channels, of keys less the same mean."""
        if not self.channel_mask.equal(other.channel_mask):
            return False
        if self.key_mean is None or other.key_mean is None:
            return self.key_mean is other.key_mean
        return self.key_mean.equal(other.key_mean)

    def holds(self, other: ChannelMask) -> bool:
        """Whether it stores as the other does, but for a mean of keys that the other lacks."""
        return self.stores_alike(
            other if other.key_mean is not None else replace(other, key_mean=self.key_mean)
        )

    @property
    def rotated_channels(self) -> Tensor:
        """The mask of the R channels that RoPE turns, i and i + R/2 as one pair in every family [L, H_kv, R].

        Where the mask does not say which model it is of, heads count as rotated whole, as most are.
        """
        known = self.provenance
        partial = known.rope_parameters.get("partial_rotary_factor", 1) if known else 1
        family = ARCHITECTURES.get(known.model_type) if known else None
        rotated = self.channel_mask[..., : int(self.channel_mask.shape[-1] * partial) // 2 * 2]
        if family is None or not family.interleaved_pairs:
            return rotated
        return torch.cat([rotated[..., ::2], rotated[..., 1::2]], dim=-1)


def all_channels_mask(facts: ModelFacts) -> ChannelMask:
    """The mask that keeps every channel."""
    shape = facts.mask_shape
    return ChannelMask(torch.ones(shape, dtype=torch.bool))


def check_mask_fits(mask: ChannelMask, facts: ModelFacts, *, mask_origin: str, model_origin: str) -> None:
    """Check that a mask belongs to a model.

    Args:
        mask: The mask.
        facts: The model's facts, overrides of its config applied.
        mask_origin: The mask's file, for messages.
        model_origin: The model, for messages.

    Raises:
        LeanKError: If its shape is another, or it was trained for another family or other rope parameters.
    """
    expected = facts.mask_shape
    if mask.channel_mask.shape != expected:
        raise LeanKError(
            f"mask `{mask_origin}` has shape {list(mask.channel_mask.shape)}; model `{model_origin}` needs "
            f"{list(expected)} (layers with full attention, KV heads, head_dim)",
            hint="a mask fits only the model it was made for",
        )
    known = mask.provenance
    if known is None:
        return
    for key in ("model_type", "num_attention_heads"):
        if getattr(known, key) != getattr(facts, key):
            raise LeanKError(
                f"mask `{mask_origin}` was made for a model with `{key}` "
                f"{shorten(str(getattr(known, key)))}; model `{model_origin}` has {getattr(facts, key)}",
                hint="a mask fits only the model it was made for",
            )
    layers = list(known.layers or range(known.num_hidden_layers))
    if layers != list(facts.layers):
        raise LeanKError(
            f"mask `{mask_origin}` is of layers {layers}; those of model `{model_origin}` with full "
            f"attention are {list(facts.layers)}",
            hint="a mask fits only the model it was made for",
        )
    if dict(known.rope_parameters) != facts.rope_parameters:
        own, asked = (shorten(_compact(rope), 200) for rope in (known.rope_parameters, facts.rope_parameters))
        holding = "" if mask.key_mean is None else ", under which alone its mean of keys holds"
        raise LeanKError(
            f"mask `{mask_origin}` was made under rope parameters `{own}`{holding}; "
            f"model `{model_origin}` has `{asked}`",
            hint="export with the recipe of its training (`--recipe FILE`), or train a mask for these; "
            f"`leank-convert inspect {mask_origin}` shows a trained mask's recipe",
        )


def save_mask(mask: ChannelMask, path: str | os.PathLike[str]) -> None:
    """Write a mask file: safetensors, the provenance in its header metadata.

    The file appears whole or not at all; equal masks give equal bytes.

    Raises:
        LeanKError: If the file cannot be written, or holds a mean of keys and does not say of which rope.
    """
    path = Path(path)
    if mask.key_mean is not None and mask.provenance is None:
        raise _without_rope(path)
    metadata = {"format": MASK_FORMAT, "format_version": str(MASK_FORMAT_VERSION)}
    metadata["pruning_ratio"] = json.dumps(mask.pruning_ratio)
    known = mask.provenance
    if known is not None:
        if known.recipe is not None:
            known = replace(known, recipe=hide_local_paths(known.recipe))
        for entry in fields(known):
            value = getattr(known, entry.name)
            if value is not None and (entry.name != "key_mean_tokens" or mask.key_mean is not None):
                metadata[entry.name] = value if isinstance(value, str) else _compact(value)
    # The widest first, so that all stay aligned.
    named = (
        ("scaling_factors", "F32", mask.scaling_factors),
        ("key_mean", "F16", mask.key_mean),
        ("channel_mask", "BOOL", mask.channel_mask),
    )
    parts = [(name, dtype, tensor) for name, dtype, tensor in named if tensor is not None]
    data = [tensor.detach().cpu().contiguous().numpy().tobytes() for _, _, tensor in parts]
    header = encode_header(
        (
            (name, dtype, tuple(tensor.shape), len(content))
            for (name, dtype, tensor), content in zip(parts, data, strict=True)
        ),
        metadata,
    )
    try:
        write_atomically(path, (header, *data))
    except OSError as error:
        raise LeanKError(f"cannot write mask `{path}`: {error.strerror}") from error


def resolve_mask(mask: str | os.PathLike[str], pruning_ratio: float | None = None) -> Path:
    """Turn what a user calls a mask into a file.

    Args:
        mask: A file, a folder that holds `channel_mask.safetensors` (a training run, a checkpoint), the hub
            id of a repository that holds one, or a packaged mask by its name or its model's hub id.
        pruning_ratio: Which one, where that name stands for several.

    Raises:
        LeanKError: If the hub does not give it, or there is no packaged mask of that name and ratio.
    """
    path, name = Path(mask).expanduser(), str(mask)
    if path.is_dir():
        return path / MASK_FILE_NAME
    if path.exists() or path.suffix in _SUFFIXES:
        return path
    if is_hub_id(name):
        return find_by_model(name, pruning_ratio) or download_file(name, MASK_FILE_NAME)
    return path if os.sep in name else find_by_name(name, pruning_ratio)


def load_mask(path: str | os.PathLike[str]) -> ChannelMask:
    """Read a mask file of ours, or import a 0/1 or bool tensor.

    Args:
        path: `.safetensors` (ours, or any file of one tensor), `.pth` or `.pt` (a pickle of one plain tensor)
            or `.npy`. Any number of channels per head, from none to all, may be kept.

    Raises:
        LeanKError: If the file cannot be read, holds something else, or a value is neither 0 nor 1.
    """
    path = Path(path)
    check_file(path)
    if path.suffix == ".safetensors":
        return _load_safetensors(path)
    if path.suffix in _PICKLE_SUFFIXES:
        return ChannelMask(to_bool(load_pickle(path), path))
    if path.suffix == ".npy":
        return ChannelMask(to_bool(load_array(path), path))
    raise LeanKError(
        f"mask `{path}`: unknown file type {cut(path.suffix)}",
        hint="a mask is a `.safetensors`, `.pth`, `.pt` or `.npy` file",
    )


def _load_safetensors(path: Path) -> ChannelMask:
    header = read_header(path)
    if header.metadata.get("format") != MASK_FORMAT:
        if len(header.tensors) != 1:
            names = ", ".join(f"`{name}`" for name in sorted(header.tensors)[:2])
            raise LeanKError(f"mask `{path}` holds {len(header.tensors)} tensors ({names}), not one")
        return ChannelMask(to_bool(load_stored(header, next(iter(header.tensors))), path))
    version = header.metadata.get("format_version")
    if version != str(MASK_FORMAT_VERSION):
        raise LeanKError(
            f"mask `{path}` has format version {cut(version)}; this release reads {MASK_FORMAT_VERSION}",
            hint="update leank-convert",
        )
    if "channel_mask" not in header.tensors:
        raise LeanKError(f"mask `{path}` has no tensor `channel_mask`")
    mask = to_bool(load_stored(header, "channel_mask"), path)
    factors = None
    if "scaling_factors" in header.tensors:
        factors = load_stored(header, "scaling_factors")
        if factors.dtype != torch.float32 or factors.shape != mask.shape or not factors.isfinite().all():
            raise LeanKError(
                f"mask `{path}`: `scaling_factors` {_describe(factors)} are not finite float32 of the mask's "
                f"shape {list(mask.shape)}"
            )
    known = None
    if "model" in header.metadata:
        known = _read_provenance(header.metadata, mask.shape, path)
    mean = load_key_mean(header, mask.shape) if "key_mean" in header.tensors else None
    if mean is not None and known is None:
        raise _without_rope(path)
    if mean is None and known is not None and known.key_mean_tokens is not None:
        raise LeanKError(
            f"mask `{path}` has no tensor `key_mean`, and its header metadata says by `key_mean_tokens` that "
            "one was measured"
        )
    return ChannelMask(mask, factors, known, mean)


def _read_provenance(metadata: Mapping[str, str], shape: Sequence[int], path: Path) -> MaskProvenance:
    values: dict[str, Any] = {}
    for entry in fields(MaskProvenance):
        text = metadata.get(entry.name)
        if text is None:
            if entry.default is MISSING and entry.default_factory is MISSING:
                raise LeanKError(f"mask `{path}`: its header metadata has no `{entry.name}`")
            continue
        try:
            values[entry.name] = text if str(entry.type).startswith("str") else parse_json(text.encode())
        except ValueError as error:
            raise LeanKError(
                f"mask `{path}`: header metadata `{entry.name}` is {cut(text)}, no JSON"
            ) from error
    try:
        check_provenance(Fields(values, "header metadata"), shape)
    except LeanKError as error:
        raise LeanKError(f"mask `{path}`: {error}") from error
    if "held_out" in values:
        values["held_out"] = read_held_out(values["held_out"], path)
    return MaskProvenance(**values)


def _without_rope(path: Path) -> LeanKError:
    return LeanKError(
        f"mask `{path}` has a tensor `key_mean` and no provenance: a mean of keys holds under one rope "
        "alone, which is not named",
    )


def _compact(value: object) -> str:
    if isinstance(value, HeldOut):
        value = asdict(value)
    return json.dumps(dict(value) if isinstance(value, Mapping) else value, sort_keys=True)


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
