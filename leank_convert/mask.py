"""`ChannelMask`: the kept channels of each KV head's cached key, and their provenance.

A mask is learned by training or imported. It names heads in the ORIGINAL order of the model; the order within
a checkpoint is `head_layout`'s.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from leank_convert.architectures import MAX_CHANNELS, MAX_LAYERS, SHAPE_KEYS, ModelFacts
from leank_convert.errors import LeanKError, cut, shorten
from leank_convert.families import ARCHITECTURES
from leank_convert.files import user_path, write_atomically
from leank_convert.held_out import HeldOut
from leank_convert.hub import download_file, hide_local_paths, is_hub_id
from leank_convert.mask_metadata import decode, encode, encode_value
from leank_convert.mask_tensor import check_file, load_array, load_pickle, load_stored, to_bool
from leank_convert.masks import find_by_model, find_by_name
from leank_convert.rope import check_rope_parameters
from leank_convert.safetensors_file import encode_header, read_header
from leank_convert.windows import Windows

MASK_FORMAT = "leank-mask"
MASK_FORMAT_VERSION = 1
MASK_FILE_NAME = "channel_mask.safetensors"

_PICKLE_SUFFIXES = (".pth", ".pt")
_SUFFIXES = (".safetensors", ".npy", *_PICKLE_SUFFIXES)

_Name = Annotated[str, Field(max_length=1000)]
_Size = Annotated[int, Field(ge=1, le=MAX_CHANNELS)]


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

    model: _Name
    model_type: _Name
    num_hidden_layers: Annotated[int, Field(ge=1, le=MAX_LAYERS)]
    num_attention_heads: _Size
    num_key_value_heads: _Size
    head_dim: _Size
    rope_parameters: Mapping[str, Any]
    method: _Name
    sink_size: int
    recent_size: int
    flush_size: int
    pruning_ratio_asked: Annotated[float, Field(ge=0, le=1)] | None = None
    width_multiple: _Size | None = None
    recipe: str | None = None
    seed: Annotated[int, Field(ge=0, le=2**64)] | None = None
    versions: Mapping[_Name, _Name] = field(default_factory=package_versions)
    held_out: HeldOut | None = None
    made_by: _Name | None = None
    source: _Name | None = None
    evaluation: _Name | None = None
    layers: Sequence[Annotated[int, Field(ge=0, lt=MAX_LAYERS)]] | None = None
    key_mean_tokens: Annotated[int, Field(ge=1, le=2**40)] | None = None

    @classmethod
    def for_model(cls, model: str, facts: ModelFacts, **rest: Any) -> MaskProvenance:
        """Fill the model's fields from its name, as `model_name` gives it, and its facts."""
        return cls(
            model=model,
            model_type=facts.model_type,
            rope_parameters=facts.rope_parameters,
            **{key: getattr(facts, key) for key in SHAPE_KEYS},
            layers=list(facts.layers) if facts.is_mixed else None,
            **rest,
        )

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, str]) -> MaskProvenance:
        """Read the header metadata of a mask file, which may come from others.

        Raises:
            LeanKError: If an entry is missing, or is not of the type or within the bounds that it has to be.
        """
        known = decode(cls, metadata)
        Windows(known.sink_size, known.recent_size, known.flush_size)
        check_rope_parameters(known.rope_parameters, head_dim=known.head_dim, origin="rope_parameters")
        if known.num_attention_heads % known.num_key_value_heads:
            raise LeanKError(
                f"header metadata `num_attention_heads` is {known.num_attention_heads}, not a multiple of "
                f"{known.num_key_value_heads} KV heads"
            )
        layers = known.numbers_of_layers
        if sorted(set(layers)) != layers or layers[-1:] >= [known.num_hidden_layers]:
            raise LeanKError(
                f"header metadata `layers` is {cut(layers)}, not the ascending numbers of some of "
                f"{known.num_hidden_layers} layers"
            )
        return known

    def to_metadata(self) -> dict[str, str]:
        """The header metadata of a mask file, as `from_metadata` reads it; the recipe without local paths."""
        return encode(self if self.recipe is None else replace(self, recipe=hide_local_paths(self.recipe)))

    @property
    def numbers_of_layers(self) -> list[int]:
        """The layers that the mask is of."""
        return list(range(self.num_hidden_layers) if self.layers is None else self.layers)

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
        mask = self.channel_mask
        if mask.dtype != torch.bool or mask.ndim != 3 or mask.numel() == 0:
            raise LeanKError(
                f"a channel mask is a bool tensor [layers, KV heads, head_dim], got {_describe(mask)}"
            )
        _check_numbers("scaling_factors", self.scaling_factors, torch.float32, mask)
        _check_numbers("key_mean", self.key_mean, torch.float16, mask)

    def __repr__(self) -> str:
        """Say shape, ratio and origin; tensors are no use in a line."""
        shape = " x ".join(map(str, self.channel_mask.shape))
        known = self.provenance
        origin = "imported" if known is None else f"{known.method}, {known.model}"
        return f"ChannelMask([{shape}], {self.pruning_ratio:.1%} removed, {origin})"

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
    if known.numbers_of_layers != list(facts.layers):
        raise LeanKError(
            f"mask `{mask_origin}` is of layers {known.numbers_of_layers}; those of model `{model_origin}` "
            f"with full attention are {list(facts.layers)}",
            hint="a mask fits only the model it was made for",
        )
    if dict(known.rope_parameters) != facts.rope_parameters:
        own, asked = (
            shorten(encode_value(rope), 200) for rope in (known.rope_parameters, facts.rope_parameters)
        )
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
    if mask.provenance is not None:
        known = mask.provenance
        metadata |= (
            known if mask.key_mean is not None else replace(known, key_mean_tokens=None)
        ).to_metadata()
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
    path, name = user_path(mask), str(mask)
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
    path = user_path(path)
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
    factors, mean = (
        load_stored(header, name) if name in header.tensors else None
        for name in ("scaling_factors", "key_mean")
    )
    try:
        known = MaskProvenance.from_metadata(header.metadata) if "model" in header.metadata else None
        loaded = ChannelMask(mask, factors, known, mean)
    except LeanKError as error:
        raise LeanKError(f"mask `{path}`: {error.message}", hint=error.hint) from error
    if mean is not None and known is None:
        raise _without_rope(path)
    if known is None:
        return loaded
    told = [len(known.numbers_of_layers), known.num_key_value_heads, known.head_dim]
    if told != list(mask.shape):
        raise LeanKError(
            f"mask `{path}` has shape {list(mask.shape)}, and its header metadata says {told} (layers, "
            "`num_key_value_heads`, `head_dim`)"
        )
    if mean is None and known.key_mean_tokens is not None:
        raise LeanKError(
            f"mask `{path}` has no tensor `key_mean`, and its header metadata says by `key_mean_tokens` that "
            "one was measured"
        )
    return loaded


def _without_rope(path: Path) -> LeanKError:
    return LeanKError(
        f"mask `{path}` has a tensor `key_mean` and no provenance: a mean of keys holds under one rope "
        "alone, which is not named",
    )


def _check_numbers(name: str, tensor: Tensor | None, dtype: torch.dtype, mask: Tensor) -> None:
    """Check the dtype, shape and values of what goes with a mask."""
    if tensor is None:
        return
    if tensor.dtype != dtype or tensor.shape != mask.shape:
        needed = f"{str(dtype).removeprefix('torch.')} {list(mask.shape)}"
        raise LeanKError(f"`{name}` is {_describe(tensor)}, not {needed} as its mask")
    wrong = (~tensor.isfinite()).nonzero()
    if len(wrong):
        position = wrong[0].tolist()
        value = tensor[tuple(position)].item()
        raise LeanKError(f"`{name}` holds {value} at {position}, no finite number")


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
