"""From scaling factors to a mask: the paper's Top_{s%, r} (section "Training stage 2").

Selection is by rank over the whole model, never by a threshold: many factors end at exactly 0, and a
threshold of 0 would keep every one of them. Ties go to the lower layer, then head, then channel.
"""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from typing import Any, Literal

import torch
from torch import Tensor

from leank_convert.errors import LeanKError
from leank_convert.hub import hide_local_paths, model_name
from leank_convert.mask import ChannelMask, check_mask_fits, check_of_keys, load_mask, resolve_mask
from leank_convert.mask_provenance import MaskProvenance
from leank_convert.recipe import Recipe
from leank_convert.train.model import ModelFiles


def select_channels(
    scaling_factors: Tensor,
    *,
    pruning_ratio: float,
    width_multiple: int,
    rounding: Literal["nearest", "budget"] = "nearest",
    max_width: int | None = None,
    budget: Literal["uniform", "global"] = "global",
) -> Tensor:
    """Choose the channels to keep, bool [L, H_kv, D], True where kept.

    Scaling factors [L, H_kv, D], or any other score that is higher for a better channel, rank them. Of all
    channels a fraction of `pruning_ratio`, in [0, 1), is removed, and every head keeps a multiple of
    `width_multiple` channels, from none to the largest one in D and in `max_width`, which is D if None.

    `nearest` is the paper's: the best channels of the whole model are counted per head, and each head's count
    is rounded to the nearest multiple (halves up), so the ratio that is reached lies near the asked one on
    either side. `budget` hands out whole multiples instead, best first by the sum of their factors, and stops
    before the reached ratio would fall below the asked one.

    Under `max_width`, `nearest` cuts the heads above it, so more may be removed than was asked for. `budget`
    gives what they may not keep to the next best multiples of other heads, and ends above the asked ratio
    only when every head is full.

    A `global` budget, the paper's, does so over the whole model. A `uniform` one does the same for each head
    alone, so that all keep the same number of channels: its share of D, rounded to the nearest multiple or
    down to one.

    Raises:
        LeanKError: If a scaling factor is not finite, `width_multiple` exceeds D or `max_width`, or no head
            keeps a channel of a uniform budget.
    """
    head_dim = scaling_factors.shape[-1]
    if width_multiple > head_dim:
        raise LeanKError(
            f"`width_multiple` {width_multiple} exceeds the model's `head_dim` {head_dim}: every head would "
            "lose all of its channels",
            hint=f"choose a divisor of {head_dim}",
        )
    if max_width is not None and max_width < width_multiple:
        raise LeanKError(
            f"`max_width` {max_width} is below `width_multiple` {width_multiple}: every head would lose all "
            "of its channels",
            hint=f"choose a multiple of {width_multiple}, or null for no cap",
        )
    if not bool(torch.isfinite(scaling_factors).all()):
        raise LeanKError("a scaling factor is not finite; no channels can be selected")
    factors = scaling_factors.detach()
    # str: 0.7 means seven tenths, not the double just below them.
    kept_fraction = 1 - Fraction(str(pruning_ratio))
    most = min(head_dim, max_width or head_dim) // width_multiple  # multiples that a head may keep
    # How many channels a head keeps of its own does not depend on which: one head stands for all.
    judged = factors[:1, :1] if budget == "uniform" else factors
    if rounding == "nearest":
        widths = _round_to_nearest(judged, kept_fraction, width_multiple, most)
    else:
        widths = fill_budget(judged, kept_fraction, width_multiple, most)
    if budget == "uniform" and not widths.any():
        raise LeanKError(
            f"`pruning_ratio` {pruning_ratio:g} leaves every head of a uniform budget "
            f"{float(kept_fraction) * head_dim:g} of {head_dim} channels, which `width_multiple` "
            f"{width_multiple} rounds to none",
            hint="lower `width_multiple` or `pruning_ratio`, or choose `budget: global`",
        )
    return _ranks(factors) < widths[..., None]


def select_for(recipe: Recipe, scores: Tensor, pruning_ratio: float) -> Tensor:
    """Choose the channels of one of a recipe's ratios, by its multiple, rounding, cap and budget.

    Raises:
        LeanKError: As `select_channels`; also if no multiple is a whole head.
    """
    head_dim, unit = scores.shape[-1], recipe.width_unit(scores.shape[-1])
    if unit < head_dim and head_dim % unit:
        raise LeanKError(
            f"`width_multiple` {unit} does not divide the model's `head_dim` {head_dim}: no head could keep "
            "all of its channels",
            hint=f"choose a divisor of {head_dim}, such as {math.gcd(2**12, head_dim) // 2 or 1}",
        )
    return select_channels(
        scores,
        pruning_ratio=pruning_ratio,
        width_multiple=unit,
        max_width=recipe.max_width,
        rounding=recipe.rounding,
        budget=recipe.resolved_budget,
    )


def note_origin(
    mask: ChannelMask, recipe: Recipe, pruning_ratio: float, files: ModelFiles, key_mean_tokens: int | None
) -> ChannelMask:
    """The mask of one of a recipe's ratios, with where it comes from.

    One that the recipe names keeps what it says of that, with by what recipe V was learned beside it.
    """
    provenance = MaskProvenance.for_model(
        model_name(files.name),
        files.facts,
        method=recipe.method,
        **recipe.windows.model_dump(),
        pruning_ratio_asked=pruning_ratio,
        width_multiple=recipe.width_unit(files.facts.head_dim),
        recipe=text_without_paths(recipe),
        seed=recipe.seed,
        key_mean_tokens=key_mean_tokens,
    )
    if recipe.mask is None:
        return replace(mask, provenance=provenance)
    unknown: dict[str, Any] = dict.fromkeys(("recipe", "pruning_ratio_asked", "width_multiple", "seed"))
    known = mask.provenance or replace(provenance, method="imported", **unknown)
    mask = replace(mask, provenance=replace(known, held_out=None, evaluation=None))
    return mask.noting_recipe("V's directions were learned", provenance.recipe or "")


def text_without_paths(recipe: Recipe) -> str:
    """A recipe's text as it is read elsewhere."""
    paths = recipe.model.id, recipe.mask, recipe.data.haystack.source, recipe.heads.pattern
    return hide_local_paths(recipe.text, paths)


def load_fitting(mask: str, files: ModelFiles) -> ChannelMask:
    """Load the mask that a recipe names; raises LeanKError if it is of another model, or prunes V."""
    path = resolve_mask(mask)
    found = load_mask(path)
    check_mask_fits(found, files.facts, mask_origin=str(path), model_origin=files.name)
    check_of_keys(found, str(path))
    return found


def _ranks(factors: Tensor) -> Tensor:
    """Each channel's place within its head, best first, ties to the lower channel: [..., D]."""
    return factors.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)


def _round_to_nearest(factors: Tensor, kept_fraction: Fraction, multiple: int, most: int) -> Tensor:
    """Widths [L, H_kv]: the head's share of the model's best channels, rounded halves up."""
    num_kept = math.floor(kept_fraction * factors.numel() + Fraction(1, 2))
    selected = (_ranks(factors.flatten()) < num_kept).view_as(factors).sum(-1)
    return ((2 * selected + multiple) // (2 * multiple)).clamp(max=most) * multiple


def fill_budget(factors: Tensor, kept_fraction: Fraction, multiple: int, most: int) -> Tensor:
    """Widths [L, H_kv]: as many whole multiples as fit, those of the largest sum of factors first."""
    best_first = torch.sort(factors.double(), dim=-1, descending=True).values
    chunks = best_first[..., : most * multiple].view(*factors.shape[:-1], most, multiple).sum(-1)
    num_chunks = math.floor(kept_fraction * factors.numel()) // multiple
    # Sums fall within a head, so counting a head's chosen chunks chooses its best ones.
    return (_ranks(chunks.flatten()) < num_chunks).view_as(chunks).sum(-1) * multiple
