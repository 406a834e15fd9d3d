"""Published baselines beside LeanK: KIVI, Quest, SnapKV and rotated int4, alone or on LeanK's kept channels.

`leank-convert evaluate --also` finds them here in a checkout, by `VARIANTS`, and `bin/reproduction` compares
them. They are plain PyTorch: they show what is lost, and are neither small nor fast.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from bin.baselines import int4, kivi, quest, snapkv
from bin.baselines.compared_cache import Compared, ComparedLayer, Prompts
from leank_convert.errors import LeanKError
from leank_convert.evaluate.loading import EvaluatedModel
from leank_convert.evaluate.names import BASELINES, ROUNDED
from leank_convert.evaluate.variants import Variant, rounded_variant
from leank_convert.windows import Windows


class Method(NamedTuple):
    """A published baseline."""

    layers: Mapping[str, Callable[[Prompts], ComparedLayer]]  # what makes one, by the setting's name
    on_leank: Mapping[str, Callable[[Prompts], ComparedLayer]] = MappingProxyType({})  # there alone
    recent_size: int = 0  # tokens that stay whole beside the decoded one, where it has all channels
    query_window: int = 0  # how many of the prompt's last queries it looks at


METHODS = {
    "int4+hadamard": Method({"int4+hadamard": int4.HadamardLayer}),
    "kivi": Method(
        {"kivi": kivi.KiviLayer},
        {"kivi+window": partial(kivi.KiviLayer, in_window=True)},
        kivi.RESIDUAL_LENGTH,
    ),
    "quest": Method(
        {
            f"quest-{size}{suffix}": partial(quest.QuestLayer, page_size=size, per_kv_head=bool(suffix))
            for size in (16, 64)
            for suffix in ("", "-kv")
        }
    ),
    "snapkv": Method(
        {
            f"snapkv-{snapkv.CAPACITY}": partial(snapkv.SnapKVLayer, capacity=snapkv.CAPACITY),
            f"snapkv-{snapkv.PAPER_SHARE:.0%}": partial(snapkv.SnapKVLayer, capacity=snapkv.PAPER_SHARE),
        },
        query_window=snapkv.QUERY_WINDOW,
    ),
}


def make_variants(name: str, channel_masks: Tensor, key_mean: Tensor | None) -> list[Variant]:
    """Make a method's variants, one for every setting that is reported; `leank+` is on LeanK's kept channels.

    The name is one of `ROUNDED` or `BASELINES`; masks are in the checkpoint's head order, bool [L, H_kv, D],
    as is the mean that comes off LeanK's keys. Methods alone are as they were published, with all channels.
    """
    if name in ROUNDED:
        return [rounded_variant(name, channel_masks, key_mean)]
    method = name.removeprefix("leank+")
    layers, on_leank, recent_size, query_window = METHODS[method]
    if name != method:
        return [
            Compared(f"leank+{label}", make_layer, channel_masks, None, query_window, key_mean)
            for label, make_layer in {**layers, **on_leank}.items()
        ]
    windows = Windows(sink_size=0, recent_size=recent_size, flush_size=1)
    return [
        Compared(label, make_layer, torch.ones_like(channel_masks), windows, query_window)
        for label, make_layer in layers.items()
    ]


def _compare(name: str, evaluated: EvaluatedModel) -> list[Variant]:
    if "layers" in evaluated.leank:
        raise LeanKError(
            f"`{name}` is not known of a model with layers that are not pruned, as this one has",
            hint="take a variant that the package has, such as window, think, fp8 or int4",
        )
    return make_variants(name, evaluated.channel_masks, evaluated.key_mean)


VARIANTS = {name: partial(_compare, name) for name in BASELINES}
"""What `--also` takes of these."""
