"""FP8 scales of a checkpoint: choice, tensor names, description, checks.

They are tensors beside each layer's weights, float32 [H_kv, D], in the checkpoint's own head order: powers of
two by which cached keys, after rotary embedding, and values are divided before they are rounded to e4m3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from leank_convert._runtime.configuration_leank import KV_DTYPES
from leank_convert._runtime.fp8_leank import EXPONENTS, SCALE_NAMES, key_scale_of, scale_of
from leank_convert.architectures import ModelFacts
from leank_convert.checkpoint_io import Checkpoint
from leank_convert.errors import LeanKError
from leank_convert.families import attention_tensor
from leank_convert.files import open_file
from leank_convert.mask_tensor import in_checkpoint_order

# A model that was cast before it was saved has them in halves, which hold the same numbers.
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_HINT = "copy or export the checkpoint again"


@dataclass(frozen=True)
class KVScales:
    """Scales of a model, and what they were measured on."""

    keys: Tensor  # float32 [L, H_kv, D], in the model's own head order; one for all channels of a head
    values: Tensor  # float32 [L, H_kv, D]
    num_tokens: int  # how many were measured
    tasks: Sequence[str]  # the recipe's, whose data they are of
    seed: int  # the recipe's

    @classmethod
    def of_largest(cls, keys: Tensor, values: Tensor, **measured: Any) -> KVScales:
        """Choose scales by the largest numbers of channels, each [L, H_kv, D]."""
        return cls(key_scale_of(keys), scale_of(values), **measured)

    def tensors(
        self, facts: ModelFacts, head_permutation: Sequence[Sequence[int]]
    ) -> list[dict[str, Tensor]]:
        """A checkpoint's tensors, layer by layer, their heads in its order."""
        ordered = (in_checkpoint_order(scales, head_permutation) for scales in (self.keys, self.values))
        return [
            dict(zip(names, of_layer, strict=True))
            for names, *of_layer in zip(name_scale_tensors(facts), *ordered, strict=True)
        ]

    def describe(self) -> dict[str, Any]:
        """What the `leank` block says of them."""
        return {"num_tokens": self.num_tokens, "tasks": list(self.tasks), "seed": self.seed}


def describe_cache(kv_dtype: str | None, scales: KVScales | None) -> dict[str, Any]:
    """Keys of a `leank` block about a cache of a dtype, none of one as it comes; LeanKError if not known."""
    if kv_dtype is None and scales is None:
        return {}
    if kv_dtype not in (rounded := KV_DTYPES[1:]):
        raise LeanKError(f"`kv_dtype` is {kv_dtype!r}, not one of {', '.join(rounded)}")
    if kv_dtype != "fp8" and scales is not None:
        raise LeanKError(f"`kv_scales` are for `kv_dtype` `fp8`, not `{kv_dtype}`")
    return {"kv_dtype": kv_dtype, "kv_scales": None if scales is None else scales.describe()}


def name_scale_tensors(facts: ModelFacts) -> list[tuple[str, ...]]:
    """The tensors of each layer that hold its scales, those of keys first."""
    return [tuple(attention_tensor(layer, name) for name in SCALE_NAMES) for layer in facts.layers]


def check_scale_tensors(checkpoint: Checkpoint, facts: ModelFacts, leank: Mapping[str, Any]) -> str:
    """Check that a checkpoint's scales are there, or are not, as its config.json says; tell what was found.

    Raises:
        LeanKError: If one is missing, of another dtype or shape, or no power of two that every dtype has, or
            if keys' channels of a head do not share one.
    """
    names = [name for layer in name_scale_tensors(facts) for name in layer]
    if leank.get("kv_scales") is None:
        for name in names:
            if checkpoint.find(name) is not None:
                raise LeanKError(f"tensor `{name}` is there, and config.json has no `leank.kv_scales`")
        return "none, every prompt gives its own" if leank.get("kv_dtype") == "fp8" else "none, none needed"
    shape = facts.num_key_value_heads, facts.head_dim
    for key_name, value_name in name_scale_tensors(facts):
        keys = _read_tensor(checkpoint, key_name, shape)
        _read_tensor(checkpoint, value_name, shape)
        if not bool((keys == keys[:, :1]).all()):
            raise LeanKError(
                f"`{checkpoint.folder}`: tensor `{key_name}` has a head whose channels have different scales",
                hint=_HINT,
            )
    return f"{len(names)} tensors, of {leank['kv_scales']['num_tokens']} tokens"


def _read_tensor(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> Tensor:
    """Scales that are powers of two; raises where they are none."""
    shard = checkpoint.shard_of(name)
    if shard is None:
        raise LeanKError(f"`{checkpoint.folder}`: tensor `{name}` is missing", hint=_HINT)
    header = checkpoint.shards[shard]
    info = header.tensors[name]
    dtype = _DTYPES.get(info.dtype)
    if dtype is None or info.shape != shape:
        raise LeanKError(
            f"`{header.path}`: tensor `{name}` is {info.dtype} {list(info.shape)}, not F32 {list(shape)}",
            hint=_HINT,
        )
    with open_file(header.path) as file:
        file.seek(header.data_start + info.start)
        values = torch.frombuffer(bytearray(file.read(info.num_bytes)), dtype=dtype).float()
    fractions, exponents = torch.frexp(values)
    low, high = EXPONENTS
    wrong = values[(fractions != 0.5) | (exponents <= low) | (exponents > high + 1)]
    if len(wrong):
        raise LeanKError(
            f"`{header.path}`: tensor `{name}` holds {float(wrong[0])}, which is no power of two from "
            f"2^{low} to 2^{high}",
            hint=_HINT,
        )
    return values.view(shape)
