"""Channel masks in a checkpoint's config.json, in its own head order."""

from __future__ import annotations

from collections.abc import Mapping
from string import hexdigits
from typing import Any

import numpy as np
import torch
from torch import Tensor

from leank_convert.architectures import ModelFacts
from leank_convert.checkpoint_io import CONFIG_NAME, Checkpoint
from leank_convert.errors import LeanKError, cut
from leank_convert.leank_block import check_block


def encode_masks(channel_masks: Tensor) -> list[str]:
    """Write masks bool [L, H_kv, D] as hex digits, a string per layer; a byte's highest bit comes first."""
    packed = np.packbits(channel_masks.cpu().numpy(), axis=-1)
    return [layer.tobytes().hex() for layer in packed]


def read_channel_masks(checkpoint: Checkpoint, facts: ModelFacts, leank: Mapping[str, Any]) -> Tensor:
    """Read the masks of a checkpoint.

    Args:
        checkpoint: The checkpoint.
        facts: Of the model that it was made from.
        leank: The `leank` block of its config.json.

    Returns:
        Bool [L, H_kv, D].

    Raises:
        LeanKError: If the block makes no sense, or they are missing, damaged or of other widths than it says.
    """
    origin = checkpoint.folder / CONFIG_NAME
    check_block(leank, facts, origin=str(origin))
    masks = _decode(leank["channel_masks"], facts, str(origin))
    for layer, (row, widths) in enumerate(zip(masks.sum(-1).tolist(), leank["widths"], strict=True)):
        if row != widths:
            raise LeanKError(
                f"`{origin}`: `leank.channel_masks` of layer {layer} keeps {row} channels, `leank.widths` "
                f"says {cut(widths)}",
                hint="copy or export the checkpoint again",
            )
    return masks


def _decode(value: object, facts: ModelFacts, origin: str) -> Tensor:
    num_layers, heads = len(facts.layers), facts.num_key_value_heads
    digits = 2 * heads * -(-facts.head_dim // 8)
    if not isinstance(value, list) or len(value) != num_layers:
        raise LeanKError(f"`{origin}`: `leank.channel_masks` is no list of {num_layers} strings, one a layer")
    for layer, text in enumerate(value):
        if not isinstance(text, str) or len(text) != digits or not set(text) <= set(hexdigits):
            raise LeanKError(
                f"`{origin}`: `leank.channel_masks[{layer}]` is {cut(text)}, not {digits} hex digits",
                hint="copy or export the checkpoint again",
            )
    packed = np.frombuffer(bytes.fromhex("".join(value)), dtype=np.uint8).reshape(num_layers, heads, -1)
    bits = np.unpackbits(packed, axis=-1).astype(bool)
    if bits[..., facts.head_dim :].any():
        raise LeanKError(
            f"`{origin}`: `leank.channel_masks` keeps channels beyond the {facts.head_dim} of a head",
            hint="copy or export the checkpoint again",
        )
    return torch.from_numpy(bits[..., : facts.head_dim].copy())
