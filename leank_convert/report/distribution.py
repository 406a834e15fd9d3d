"""Distribution of a mask's channels over RoPE pairs, layers and heads, and what that saves."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from leank_convert.head_layout import BytesPerToken, count_cache_bytes
from leank_convert.mask import ChannelMask

# Pairs at each side that a pair is compared with: few, since what is kept rises steeply with the index.
_NEIGHBOURS = 3
# Of normally distributed differences, one in 500 million would be that far out.
_OUTLIER_SCORE = 6.0
OUTLIER_RULE = (
    f"A pair is an outlier where its kept share less the median of its {_NEIGHBOURS} neighbours at each side "
    f"lies more than {_OUTLIER_SCORE:g} robust standard deviations (1.4826 times the median absolute "
    "deviation, over all pairs) from the median of these differences."
)


@dataclass(frozen=True)
class OutlierPair:
    """A RoPE pair of which far more or less is kept than of its neighbours."""

    pair: int  # its index i: in most families channels i and i + D/2
    kept: float  # share of its channels that is kept, over all heads
    neighbours: float  # the median share of its neighbours
    score: float  # how far out it is, in robust standard deviations


@dataclass(frozen=True)
class MaskAnalysis:
    """The distribution of a mask's channels; heads in the model's own order, shares in [0, 1]."""

    model: str | None  # what the mask was made for, None if that is not known
    head_dim: int  # D
    element_bytes: int  # bytes of one number in the cache
    kept: float  # share of all channels
    kept_by_pair: tuple[float, ...]  # of each RoPE pair's two channels in all heads [R/2]
    neighbours_by_pair: tuple[float, ...]  # the median of each pair's neighbours [R/2]
    outliers: tuple[OutlierPair, ...]  # pairs that `OUTLIER_RULE` names, the farthest first
    kept_by_layer: tuple[float, ...]  # [L]
    widths: tuple[tuple[int, ...], ...]  # kept channels of each head [L][H_kv]
    cache: BytesPerToken  # bytes of one token
    num_heads: int  # KV heads of all layers together
    heads_per_width: dict[int, int]  # how many heads have each width that occurs, the narrowest first
    empty_by_layer: tuple[int, ...]  # heads of width 0 in each layer [L]
    empty_by_quarter: tuple[int, ...]  # those of each quarter of the layers, shallow ones first; rounded
    empty_heads: int  # heads of width 0
    empty_share: float  # those among all

    def to_dict(self) -> dict[str, Any]:
        """The analysis as JSON-ready data."""
        fields = ("model", "head_dim", "element_bytes", "kept", "empty_heads", "empty_share")
        rows = ("kept_by_pair", "kept_by_layer", "empty_by_layer", "empty_by_quarter")
        return {
            **{name: getattr(self, name) for name in fields},
            **{name: list(getattr(self, name)) for name in rows},
            "num_hidden_layers": len(self.widths),
            "num_key_value_heads": len(self.widths[0]),
            "outlier_rule": OUTLIER_RULE,
            "outlier_pairs": [asdict(outlier) for outlier in self.outliers],
            "widths": [list(layer) for layer in self.widths],
            "heads_per_width": {str(width): heads for width, heads in self.heads_per_width.items()},
            "bytes_per_token": {**asdict(self.cache), "saved": self.cache.saved},
        }


def analyze_mask(mask: ChannelMask, element_bytes: int = 2, kv_dtype: str | None = None) -> MaskAnalysis:
    """Find out how a mask's channels are distributed, and what that saves; as `count_cache_bytes`."""
    kept, rotated = mask.channel_mask.double(), mask.rotated_channels.double()
    by_pair = rotated.mean((0, 1)).view(2, -1).mean(0).tolist()
    neighbours = [_neighbours_median(by_pair, pair) for pair in range(len(by_pair))]
    empty_by_layer = tuple(layer.count(0) for layer in mask.widths)
    borders = [(quarter * len(empty_by_layer) + 2) // 4 for quarter in range(5)]
    num_heads = kept.shape[0] * kept.shape[1]
    return MaskAnalysis(
        model=mask.provenance.model if mask.provenance else None,
        head_dim=kept.shape[-1],
        element_bytes=element_bytes,
        kept=kept.mean().item(),
        kept_by_pair=tuple(by_pair),
        neighbours_by_pair=tuple(neighbours),
        outliers=_find_outliers(by_pair, neighbours, smallest_step=1 / (2 * num_heads)),
        kept_by_layer=tuple(kept.mean((1, 2)).tolist()),
        widths=mask.widths,
        cache=count_cache_bytes(mask.widths, kept.shape[-1], element_bytes, kv_dtype, mask.stored_values),
        num_heads=num_heads,
        heads_per_width=dict(sorted(Counter(width for layer in mask.widths for width in layer).items())),
        empty_by_layer=empty_by_layer,
        empty_by_quarter=tuple(sum(empty_by_layer[a:b]) for a, b in itertools.pairwise(borders)),
        empty_heads=sum(empty_by_layer),
        empty_share=sum(empty_by_layer) / num_heads,
    )


def _neighbours_median(by_pair: Sequence[float], pair: int) -> float:
    around = [*by_pair[max(0, pair - _NEIGHBOURS) : pair], *by_pair[pair + 1 : pair + 1 + _NEIGHBOURS]]
    return float(np.median(around)) if around else by_pair[pair]


def _find_outliers(
    by_pair: Sequence[float], neighbours: Sequence[float], smallest_step: float
) -> tuple[OutlierPair, ...]:
    if not by_pair:
        return ()
    differences = np.subtract(by_pair, neighbours)
    differences -= np.median(differences)
    # Never under the step that one channel of one head makes: most differences of an even mask are 0.
    spread = max(1.4826 * float(np.median(np.abs(differences))), smallest_step)
    scores = differences / spread
    order = sorted(range(len(scores)), key=lambda pair: -abs(scores[pair]))
    return tuple(
        OutlierPair(pair, by_pair[pair], neighbours[pair], float(scores[pair]))
        for pair in order
        if abs(scores[pair]) > _OUTLIER_SCORE
    )
