"""Published baselines beside LeanK: KIVI, Quest, SnapKV and rotated int4, alone or on LeanK's kept channels.

`leank-convert evaluate --also` finds them here in a checkout, by `VARIANTS`, and `bin/reproduction` compares
them. They are plain PyTorch: they show what is lost, and are neither small nor fast.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from bin.baselines import kivi, snapkv
from bin.baselines.compared_cache import Compared, ComparedLayer, Prompts
from bin.baselines.int4 import Int4Layer
from bin.baselines.kivi import KiviLayer
from bin.baselines.quest import QuestLayer
from bin.baselines.snapkv import SnapKVLayer
from leank_convert.baselines import NAMES
from leank_convert.errors import LeanKError
from leank_convert.evaluate.evaluated import EvaluatedModel
from leank_convert.evaluate.variants import Variant, rounded_variant
from leank_convert.windows import Windows

COMPARED = ("fp8", "int4", "int4+hadamard", "kivi", "quest", "snapkv")


def make_variants(
    name: str, channel_masks: Tensor, *, alone: bool, key_mean: Tensor | None = None
) -> list[Variant]:
    """Make a method's variants, one for every setting that is reported, alone or on LeanK's kept channels.

    Args:
        name: One of `COMPARED`.
        channel_masks: LeanK's, in the checkpoint's head order, bool [L, H_kv, D].
        alone: Whether the method has all channels instead.
        key_mean: What comes off LeanK's keys, in the same order [L, H_kv, D]; other methods alone are as they
            were published.
    """
    if name in ("fp8", "int4"):
        return [rounded_variant(name, channel_masks, alone=alone, key_mean=key_mean)]
    prefix = "" if alone else "leank+"
    masks = torch.ones_like(channel_masks) if alone else channel_masks
    key_mean = None if alone else key_mean
    # Alone, nothing is whole but the token that is decoded; KIVI leaves the last ones as they are.
    recent_size = kivi.RESIDUAL_LENGTH if name == "kivi" else 0
    windows = Windows(sink_size=0, recent_size=recent_size, flush_size=1) if alone else None
    layers: dict[str, Callable[[Prompts], ComparedLayer]]
    if name == "int4+hadamard":
        layers = {name: partial(Int4Layer, rotated=True)}
    elif name == "kivi":
        layers = {"kivi": KiviLayer} | ({} if alone else {"kivi+window": partial(KiviLayer, in_window=True)})
    elif name == "quest":
        layers = {
            f"quest-{page_size}{'-kv' if per_kv_head else ''}": partial(
                QuestLayer, page_size=page_size, per_kv_head=per_kv_head
            )
            for page_size in (16, 64)
            for per_kv_head in (False, True)
        }
    else:
        layers = {
            f"snapkv-{snapkv.CAPACITY}": partial(SnapKVLayer, capacity=snapkv.CAPACITY),
            f"snapkv-{snapkv.PAPER_SHARE:.0%}": partial(SnapKVLayer, capacity=snapkv.PAPER_SHARE),
        }
    query_window = snapkv.QUERY_WINDOW if name == "snapkv" else 0
    return [
        Compared(f"{prefix}{label}", make_layer, masks, windows, query_window, key_mean)
        for label, make_layer in layers.items()
    ]


def _compare(name: str) -> Callable[[EvaluatedModel], list[Variant]]:
    method = name.removeprefix("leank+")

    def find(evaluated: EvaluatedModel) -> list[Variant]:
        if "layers" in evaluated.leank:
            raise LeanKError(
                f"`{name}` is not known of a model with layers that are not pruned, as this one has",
                hint="take a variant that the package has, such as window, think, fp8 or int4",
            )
        return make_variants(
            method,
            evaluated.channel_masks,
            alone=name == method,
            key_mean=evaluated.key_mean,
        )

    return find


VARIANTS = {name: _compare(name) for name in NAMES}
"""What `--also` takes of these."""
