"""Config classes of converted models: the family's own config plus a checked `leank` block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from reprlib import repr as cut
from string import hexdigits
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig
from transformers.modeling_outputs import BaseModelOutputWithPast

# Checkpoints of other parts so have other config classes, by which transformers finds a model class again.
from .parts_leank import CARRIED as CARRIED
from .windows_leank import PRUNE_MODES, Windows, check_choice, check_size

FORMAT_VERSION = 1
KV_DTYPES = ("auto", "fp8", "int4")
# What transformers calls a cache, as an argument and in a model's output; before 5.24 `past_key_values`.
CACHE = "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"


@dataclass(frozen=True, eq=False)
class LeanKSettings:
    """The part of the `leank` block that the runtime reads; heads are in the order of the checkpoint."""

    layers: tuple[int, ...]  # numbers of the pruned layers `[L]`; others keep transformers' own cache
    widths: tuple[tuple[int, ...], ...]  # kept channels per pruned layer and KV head `[L][H_kv]`
    channel_masks: torch.Tensor  # which ones `[L, H_kv, D]`, bool, on the CPU
    # Kept channels of V per layer and head, the first ones; None: V is not pruned, but in heads of width 0.
    value_widths: tuple[tuple[int, ...], ...] | None
    windows: Windows  # window sizes, and when to prune
    kv_dtype: str  # what keys and values are stored in: `auto` as they come, `fp8` or `int4`
    has_scales: bool  # whether the checkpoint holds scales for FP8
    has_key_mean: bool  # whether the file of its mask holds the mean of keys
    # Whether V is rotated as it is stored, by a basis in that file; else it is pruned as it comes.
    has_value_basis: bool

    @property
    def has_constants(self) -> bool:
        """Whether a cache of the model takes something from the checkpoint beside channel masks."""
        return self.has_scales or self.has_key_mean or self.has_value_basis

    @property
    def num_key_value_heads(self) -> int:
        """KV heads of every layer."""
        return self.channel_masks.shape[1]

    @property
    def head_dim(self) -> int:
        """Channels of a cached key before pruning."""
        return self.channel_masks.shape[2]


def read_settings(config: PreTrainedConfig) -> LeanKSettings:
    """Check the `leank` block of a config and return what the runtime needs of it.

    Raises a ValueError if the block is absent, of another format version, or does not fit the model.
    """
    block = getattr(config, "leank", None)
    if block is None:
        raise ValueError(
            "config.json has no `leank` block, so this is no converted checkpoint; make one with "
            "`leank-convert export MODEL --mask MASK -o OUT`, or load the dense model with its own class"
        )
    if not isinstance(block, Mapping):
        raise ValueError(f"config.json: `leank` is {type(block).__name__}, not an object")
    version = block.get("format_version")
    if type(version) is not int or version != FORMAT_VERSION:
        raise ValueError(
            f"config.json: `leank.format_version` is {cut(version)}, these runtime files read "
            f"{FORMAT_VERSION}; load the checkpoint with the *_leank.py files that it was exported with"
        )
    sizes = ("sink_size", "recent_size", "flush_size")
    required = ("widths", "channel_masks", "head_permutation", *sizes, "prune")
    missing = [f"`{key}`" for key in required if key not in block]
    if missing:
        raise ValueError(
            f"config.json: the `leank` block lacks {', '.join(missing)}; export the checkpoint again"
        )

    layers = _read_layers(block.get("layers"), config)
    num_layers = len(layers)
    num_heads = int(config.num_key_value_heads)
    stated = getattr(config, "head_dim", None)
    head_dim = int(config.hidden_size) // int(config.num_attention_heads) if stated is None else int(stated)
    most = [[head_dim] * num_heads] * num_layers
    widths = _read_widths(block["widths"], "widths", most, "head_dim")
    channel_masks = _read_channel_masks(block["channel_masks"], widths, head_dim)
    for layer, row in enumerate(
        _int_table(block["head_permutation"], "head_permutation", num_layers, num_heads)
    ):
        if sorted(row) != list(range(num_heads)):
            raise ValueError(
                f"config.json: `leank.head_permutation[{layer}]` is {cut(list(row))}, "
                f"not a permutation of 0…{num_heads - 1}"
            )
    for key in ("key_mean", "value_basis"):
        if block.get(key, True) is not True:
            raise ValueError(f"config.json: `leank.{key}` is {cut(block[key])}, not true")
    if "value_basis" in block and "value_widths" not in block:
        raise ValueError("config.json: `leank.value_basis` is there, and no `leank.value_widths`")
    value_widths = block.get("value_widths")
    if value_widths is not None:
        most = [[head_dim if width else 0 for width in row] for row in widths]
        why = "head_dim, or 0 where a head keeps no channel of K"
        value_widths = _read_widths(value_widths, "value_widths", most, why)
    for key in sizes:
        check_size(key, block[key], "config.json: `leank.")
    prune = check_choice(block["prune"], PRUNE_MODES, "config.json: `leank.prune`")
    return LeanKSettings(
        layers=layers,
        widths=widths,
        channel_masks=channel_masks,
        value_widths=value_widths,
        windows=Windows(**{key: block[key] for key in sizes}, prune=prune),
        kv_dtype=check_choice(block.get("kv_dtype", "auto"), KV_DTYPES, "config.json: `leank.kv_dtype`"),
        has_scales=block.get("kv_scales") is not None,
        has_key_mean="key_mean" in block,
        has_value_basis="value_basis" in block,
    )


def _int_table(value: object, key: str, num_layers: int, num_heads: int) -> tuple[tuple[int, ...], ...]:
    if not isinstance(value, Sequence) or len(value) != num_layers:
        raise ValueError(
            f"config.json: `leank.{key}` is {cut(value)}, not {num_layers} rows, one for each pruned layer"
        )
    for layer, row in enumerate(value):
        if not isinstance(row, Sequence) or len(row) != num_heads or {*map(type, row)} != {int}:
            raise ValueError(
                f"config.json: `leank.{key}[{layer}]` is {cut(row)}, not one integer for each of the "
                f"{num_heads} KV heads"
            )
    return tuple(tuple(row) for row in value)


def _read_widths(
    value: object, key: str, most: Sequence[Sequence[int]], why: str
) -> tuple[tuple[int, ...], ...]:
    """Read how many channels every head keeps, at most so many `[L][H_kv]`."""
    table = _int_table(value, key, len(most), len(most[0]))
    for layer, row in enumerate(table):
        for head, (width, bound) in enumerate(zip(row, most[layer], strict=True)):
            if not 0 <= width <= bound:
                raise ValueError(
                    f"config.json: `leank.{key}[{layer}][{head}]` is {width}, not in 0…{bound} ({why}); "
                    "export the checkpoint again"
                )
    return table


def _read_channel_masks(value: object, widths: Sequence[Sequence[int]], head_dim: int) -> torch.Tensor:
    """Read hex digits, a string per layer: each head's channels, the first in the highest bit of a byte."""
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != len(widths):
        raise ValueError(
            f"config.json: `leank.channel_masks` is not a list of {len(widths)} strings, one for each layer"
        )
    num_heads, num_bytes = len(widths[0]), -(-head_dim // 8)
    digits = 2 * num_heads * num_bytes
    for layer, text in enumerate(value):
        if not isinstance(text, str) or len(text) != digits or not set(text) <= set(hexdigits):
            raise ValueError(
                f"config.json: `leank.channel_masks[{layer}]` is not {digits} hex digits, the masks of "
                f"{num_heads} heads of {head_dim} channels"
            )
    # On the CPU whatever device is the default: transformers builds models on `meta`.
    packed = torch.frombuffer(bytearray.fromhex("".join(value)), dtype=torch.uint8)
    shifts = torch.arange(7, -1, -1, dtype=torch.uint8, device="cpu")
    bits = (packed[:, None] >> shifts & 1).bool().view(len(widths), num_heads, 8 * num_bytes)
    masks = bits[..., :head_dim].contiguous()
    for layer, row in enumerate(masks.sum(-1).tolist()):
        if row != list(widths[layer]):
            raise ValueError(
                f"config.json: `leank.channel_masks[{layer}]` keeps {cut(row)} channels per head, "
                f"`leank.widths` says {cut(list(widths[layer]))}; `leank-convert verify` lists what is wrong"
            )
        if bool(bits[layer, :, head_dim:].any()):
            raise ValueError(
                f"config.json: `leank.channel_masks[{layer}]` keeps channels beyond the {head_dim} of a head"
            )
    return masks


def _read_layers(value: object, config: PreTrainedConfig) -> tuple[int, ...]:
    """Return which layers are pruned: those with full attention, which `value` names where not all are."""
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        kind = "full_attention" if getattr(config, "sliding_window", None) is None else "sliding_attention"
        kinds = [kind] * int(config.num_hidden_layers)
    full = [layer for layer, kind in enumerate(kinds) if kind == "full_attention"]
    if (list(range(len(kinds))) if value is None else value) != full:
        raise ValueError(
            f"config.json: `leank.layers` is {cut(value)}, the layers with full attention are "
            f"{full}; export the checkpoint again"
        )
    return tuple(full)


class LeanKConfigMixin:
    """Adds the checked `leank` block to a family's config; without it a config can be built, but no model."""

    leank: dict[str, Any] | None

    def __post_init__(self, **kwargs: Any) -> None:
        """Let the family's config fill itself in, then check the `leank` block against it."""
        super().__post_init__(**kwargs)  # type: ignore[misc]
        if self.leank is not None:
            assert isinstance(self, PreTrainedConfig)
            read_settings(self)


def __getattr__(name: str) -> type[PreTrainedConfig]:
    """Make `LeanK<X>Config` of transformers' `<X>Config` when it is first asked for."""
    if not (name.startswith("LeanK") and name.endswith("Config")):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return config_class_of(stock_class(name))


def config_class_of(stock: type[PreTrainedConfig]) -> type[PreTrainedConfig]:
    """Return the config class of converted models of a family, by the family's own: one for each."""
    name = f"LeanK{stock.__name__}"
    if name not in globals():
        # `transformers serve` takes the class named in `architectures` from transformers itself and calls its
        # `from_pretrained`. Under that name it finds the auto class, which finds each checkpoint's own class.
        # Set on the module's class: while it serves, transformers looks in another module object than here.
        family = name.removesuffix("Config").removesuffix("Text")
        setattr(type(transformers), f"{family}ForCausalLM", transformers.AutoModelForCausalLM)
        fields = {
            "__module__": __name__,
            "__doc__": f"{stock.__name__} with a `leank` block.",
            "__annotations__": {"leank": dict[str, Any] | None},
            "model_type": f"leank_{stock.model_type}",
            "leank": None,
        }
        globals()[name] = type(name, (LeanKConfigMixin, stock), fields)
    made: type[PreTrainedConfig] = globals()[name]
    return made


def stock_class(name: str) -> Any:
    """Return transformers' class that `LeanK<X>` is made of, `<X>`, or raise an AttributeError."""
    stock = name.removeprefix("LeanK")
    try:
        return getattr(transformers, stock)
    except AttributeError as error:
        raise AttributeError(
            f"transformers {transformers.__version__} has no `{stock}`, which this checkpoint is made for; "
            "install a newer release"
        ) from error
