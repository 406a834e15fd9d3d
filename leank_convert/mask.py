"""`ChannelMask`: the kept channels of each KV head's cached key, and directions of V, and their provenance.

A mask is learned by training or imported. It names heads in the ORIGINAL order of the model; the order within
a checkpoint is `head_layout`'s.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import indent
from typing import Any

import torch
from torch import Tensor

from leank_convert.architectures import ModelFacts
from leank_convert.errors import LeanKError, cut, shorten
from leank_convert.families import ARCHITECTURES
from leank_convert.files import sha256_of, user_path, write_atomically
from leank_convert.head_layout import choose_value_multiple, list_value_widths
from leank_convert.hub import download_file, is_hub_id
from leank_convert.leank_block import KEY_MEAN_KEY, VALUE_WIDTHS_KEY
from leank_convert.mask_provenance import MaskProvenance, encode_value
from leank_convert.mask_tensor import check_file, load_array, load_pickle, load_stored, to_bool
from leank_convert.masks import find_by_model, find_by_name
from leank_convert.safetensors_file import encode_header, read_header

MASK_FORMAT = "leank-mask"
MASK_FORMAT_VERSION = 1
MASK_FILE_NAME = "channel_mask.safetensors"

# The widest first, so that all stay aligned.
_STORED_DTYPES = {"scaling_factors": "F32", "value_basis": "F32", "value_widths": "I32"}
_STORED_DTYPES |= {"key_mean": "F16", "channel_mask": "BOOL"}
# By how much products of a basis' directions may differ from 0 and 1.
ORTHONORMAL = 1e-5
_PICKLE_SUFFIXES = (".pth", ".pt")
_SUFFIXES = (".safetensors", ".npy", *_PICKLE_SUFFIXES)


@dataclass(frozen=True, eq=False)
class ChannelMask:
    """The channels that are kept.

    Attributes:
        channel_mask: Bool [L, H_kv, D], ORIGINAL head order, True where kept.
        scaling_factors: Float32 [L, H_kv, D], as training ended with them, or None.
        provenance: None for an imported mask.
        key_mean: Float16 [L, H_kv, D]: what comes off every cached key before it is stored, the mean of keys
            after RoPE, so that a channel that is removed counts as its mean; None for nothing.
        value_basis: Float32 [L, H_kv, D, D]: an orthonormal basis of V, a direction per column, those that
            weigh most in attention's output first; None where V is not pruned.
        value_widths: Int32 [L, H_kv]: how many directions, the first ones, are kept of a pruned token's V;
            there with `value_basis`, and only with it.
    """

    channel_mask: Tensor
    scaling_factors: Tensor | None = None
    provenance: MaskProvenance | None = None
    key_mean: Tensor | None = None
    value_basis: Tensor | None = None
    value_widths: Tensor | None = None

    def __post_init__(self) -> None:
        mask = self.channel_mask
        if mask.dtype != torch.bool or mask.ndim != 3 or mask.numel() == 0:
            raise LeanKError(
                f"a channel mask is a bool tensor [layers, KV heads, head_dim], got {_describe(mask)}"
            )
        _check_numbers("scaling_factors", self.scaling_factors, torch.float32, mask)
        _check_numbers("key_mean", self.key_mean, torch.float16, mask)
        if (self.value_basis is None) != (self.value_widths is None):
            missing = "value_basis" if self.value_basis is None else "value_widths"
            raise LeanKError(f"`{missing}` is missing: V is pruned by `value_basis` and `value_widths`")
        if self.value_basis is not None and self.value_widths is not None:
            _check_value_basis(self.value_basis, mask)
            _check_value_widths(self.value_widths, mask)

    def __repr__(self) -> str:
        shape = " x ".join(map(str, self.channel_mask.shape))
        known = self.provenance
        origin = "imported" if known is None else f"{known.method}, {known.model}"
        values = "" if self.value_widths is None else f", {self.value_pruning_ratio:.1%} of V"
        return f"ChannelMask([{shape}], {self.pruning_ratio:.1%} removed{values}, {origin})"

    def noting(self, **known: Any) -> ChannelMask:
        """The mask with more, or other, provenance; none where it has none."""
        if self.provenance is None:
            return self
        return replace(self, provenance=replace(self.provenance, **known))

    def noting_recipe(self, what: str, recipe: str) -> ChannelMask:
        """The mask that says, in comments, by what recipe something was found beside it; as `noting`."""
        beside = indent(f"{what} beside this mask, by\n{recipe}", "# ")
        own = "" if self.provenance is None else self.provenance.recipe or ""
        return self.noting(recipe=f"{own}\n{beside}".lstrip())

    @property
    def widths(self) -> tuple[tuple[int, ...], ...]:
        """Kept channels `[layer][head]`, original head order."""
        return tuple(tuple(layer) for layer in self.channel_mask.sum(-1).tolist())

    @property
    def pruning_ratio(self) -> float:
        """Fraction of channels removed, over the whole model."""
        return 1 - int(self.channel_mask.sum()) / self.channel_mask.numel()

    @property
    def stored_values(self) -> tuple[tuple[int, ...], ...] | None:
        """Kept directions of V `[layer][head]`, original head order; None where V is not pruned."""
        return None if self.value_widths is None else tuple(map(tuple, self.value_widths.tolist()))

    @property
    def value_pruning_ratio(self) -> float:
        """Fraction of V's channels that pruned tokens lose, heads that keep no K channel among them."""
        kept = list_value_widths(self.widths, self.channel_mask.shape[-1], self.stored_values)
        return 1 - sum(kept) / self.channel_mask.numel()

    def stores_alike(self, other: ChannelMask) -> bool:
        """Whether a cache stores the same by both: channels of keys less a mean, directions of V."""
        return self.holds(other) and other.holds(self)

    def holds(self, other: ChannelMask) -> bool:
        """Whether it stores as the other does, but for a mean of keys or a pruned V that the other lacks."""
        names = ("channel_mask", "key_mean", "value_basis", "value_widths")
        pairs = ((getattr(self, name), getattr(other, name)) for name in names)
        return all(theirs is None or (own is not None and own.equal(theirs)) for own, theirs in pairs)

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
    return ChannelMask(torch.ones(facts.mask_shape, dtype=torch.bool))


def check_mask_fits(mask: ChannelMask, facts: ModelFacts, *, mask_origin: str, model_origin: str) -> None:
    """Check that a mask belongs to a model, whose facts have overrides of its config applied.

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
            f"mask `{mask_origin}` is of layers {shorten(str(known.numbers_of_layers), 200)}; those of model "
            f"`{model_origin}` with full attention are {list(facts.layers)}",
            hint="a mask fits only the model it was made for",
        )
    if dict(known.rope_parameters) != facts.rope_parameters:
        ropes = known.rope_parameters, facts.rope_parameters
        own, asked = (shorten(encode_value(rope), 200) for rope in ropes)
        holding = "" if mask.key_mean is None else ", under which alone its mean of keys holds"
        raise LeanKError(
            f"mask `{mask_origin}` was made under rope parameters `{own}`{holding}; "
            f"model `{model_origin}` has `{asked}`",
            hint="export with the recipe of its training (`--recipe FILE`), or train a mask for these; "
            f"`leank-convert inspect {mask_origin}` shows a trained mask's recipe",
        )


def check_of_keys(mask: ChannelMask, origin: str) -> None:
    """Refuse, by a LeanKError, a mask that prunes V already: it has one basis, which is not cut anew."""
    if mask.value_basis is not None:
        raise LeanKError(
            f"mask `{origin}` prunes V already, {mask.value_pruning_ratio:.1%} of it",
            hint="name the mask of K alone that it was made beside, or leave the ratio of V out",
        )


def save_mask(mask: ChannelMask, path: str | os.PathLike[str]) -> None:
    """Write a mask file: safetensors, the provenance in its header metadata.

    The file appears whole or not at all; equal masks give equal bytes.

    Raises:
        LeanKError: If the file cannot be written, or holds a mean of keys and does not say of which rope, or
            a basis of V and not of which weights.
    """
    path = Path(path)
    _check_origin(mask, path)
    metadata = {"format": MASK_FORMAT, "format_version": str(MASK_FORMAT_VERSION)}
    metadata["pruning_ratio"] = json.dumps(mask.pruning_ratio)
    if mask.provenance is not None:
        known = mask.provenance
        if mask.key_mean is None:
            known = replace(known, key_mean_tokens=None)
        if mask.value_basis is None:
            known = replace(known, value_pruning_ratio_asked=None, value_tokens=None, value_weights=None)
        metadata |= known.to_metadata()
    data = {
        name: tensor.detach().cpu().contiguous().numpy().tobytes()
        for name in _STORED_DTYPES
        if (tensor := getattr(mask, name)) is not None
    }
    entries = (
        (name, _STORED_DTYPES[name], tuple(getattr(mask, name).shape), len(content))
        for name, content in data.items()
    )
    try:
        write_atomically(path, (encode_header(entries, metadata), *data.values()))
    except OSError as error:
        raise LeanKError(f"cannot write mask `{path}`: {error.strerror}") from error


def resolve_mask(mask: str | os.PathLike[str], pruning_ratio: float | None = None) -> Path:
    """Turn a mask's file, folder, hub id or packaged name, or its model's hub id, into a file.

    A folder, a training run or checkpoint, and a repository hold `channel_mask.safetensors`. Where a name
    stands for several, `pruning_ratio` picks one.

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
        hint="a mask is a `.safetensors`, `.pth`, `.pt` or `.npy` file; a checkpoint goes by its folder",
    )


def load_own_mask(checkpoint: Path, leank: Mapping[str, Any]) -> ChannelMask:
    """Read a checkpoint's mask.

    Raises a LeanKError as `load_mask`, and if it is another file than the block names, or lacks a tensor that
    the block tells of.
    """
    path, files = checkpoint / MASK_FILE_NAME, leank.get("files")
    mask = load_mask(path)
    tensors = {KEY_MEAN_KEY: mask.key_mean, VALUE_WIDTHS_KEY: mask.value_basis}
    lacks_one = any(tensor is None for key, tensor in tensors.items() if key in leank)
    if lacks_one or not isinstance(files, Mapping) or files.get(MASK_FILE_NAME) != sha256_of(path):
        raise LeanKError(
            f"`{path}` is not the mask that the checkpoint was exported with",
            hint="copy or export the checkpoint again",
        )
    return mask


def _load_safetensors(path: Path) -> ChannelMask:
    header = read_header(path)
    if header.metadata.get("format") != MASK_FORMAT:
        if len(header.tensors) != 1:
            names = ", ".join(f"`{name}`" for name in sorted(header.tensors)[:2])
            raise LeanKError(
                f"mask `{path}` holds {len(header.tensors)} tensors ({names}), not one",
                hint="a checkpoint goes by its folder",
            )
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
    optional = (name for name in _STORED_DTYPES if name != "channel_mask" and name in header.tensors)
    stored = {name: load_stored(header, name) for name in optional}
    try:
        known = MaskProvenance.from_metadata(header.metadata) if "model" in header.metadata else None
        loaded = ChannelMask(mask, provenance=known, **stored)
    except LeanKError as error:
        raise LeanKError(f"mask `{path}`: {error.message}", hint=error.hint) from error
    _check_origin(loaded, path)
    if known is None:
        return loaded
    for name, told_by in (("key_mean", "key_mean_tokens"), ("value_basis", "value_weights")):
        if name not in stored and getattr(known, told_by) is not None:
            raise LeanKError(
                f"mask `{path}` has no tensor `{name}`, and its header metadata says by `{told_by}` that "
                "one was measured"
            )
    return loaded


def _check_origin(mask: ChannelMask, path: Path) -> None:
    """Check that a mask names the rope that its mean of keys holds under, and the model that its V is of."""
    for name, why in (
        ("key_mean", "a mean of keys holds under one rope alone"),
        ("value_basis", "a basis of V is of one model"),
    ):
        if getattr(mask, name) is not None and mask.provenance is None:
            raise LeanKError(
                f"mask `{path}` has a tensor `{name}` and no provenance: {why}, which is not named"
            )


def _check_numbers(name: str, tensor: Tensor | None, dtype: torch.dtype, mask: Tensor) -> None:
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


def _check_value_basis(basis: Tensor, mask: Tensor) -> None:
    head_dim = mask.shape[-1]
    shape = [*mask.shape, head_dim]
    if basis.dtype != torch.float32 or list(basis.shape) != shape:
        raise LeanKError(f"`value_basis` is {_describe(basis)}, not float32 {shape}, directions in columns")
    for layer, heads in enumerate(basis.double()):
        excess = (heads.mT @ heads - torch.eye(head_dim, dtype=torch.float64)).abs().amax((1, 2))
        wrong = (~(excess <= ORTHONORMAL)).nonzero()  # what is not finite, too
        if len(wrong):
            head = int(wrong[0])
            raise LeanKError(
                f"`value_basis[{layer}][{head}]` is not orthonormal: its columns' products are off by "
                f"{float(excess[head]):.1e}, at most {ORTHONORMAL:g} is rounding"
            )


def _check_value_widths(widths: Tensor, mask: Tensor) -> None:
    head_dim = mask.shape[-1]
    multiple = choose_value_multiple(head_dim)
    if widths.dtype != torch.int32 or widths.shape != mask.shape[:2]:
        raise LeanKError(f"`value_widths` is {_describe(widths)}, not int32 {list(mask.shape[:2])}")
    sees = mask.any(-1)
    for layer, row in enumerate(widths.tolist()):
        for head, width in enumerate(row):
            if not 0 <= width <= head_dim or width % multiple:
                raise LeanKError(
                    f"`value_widths[{layer}][{head}]` is {width}, not a multiple of {multiple} from 0 to "
                    f"{head_dim}"
                )
            if width and not sees[layer, head]:
                raise LeanKError(
                    f"`value_widths[{layer}][{head}]` is {width}, and that head keeps no channel of K: it "
                    "sees no pruned token"
                )


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
