"""A mask's numbers, against counts by hand."""

import json

import pytest
import torch

from leank_convert.mask import ChannelMask, load_mask
from leank_convert.masks import find_by_name
from leank_convert.report.distribution import analyze_mask


def analyze(rows, **options):
    """Of rows of zeros and ones [L][H_kv], one string a head."""
    return analyze_mask(
        ChannelMask(torch.tensor([[[c == "1" for c in head] for head in layer] for layer in rows])), **options
    )


def with_pairs(shares, heads=100):
    """One layer of heads that keep each pair's both channels in a share of the heads."""
    kept = torch.stack([torch.arange(heads) < round(share * heads) for share in shares], dim=-1)
    return ChannelMask(torch.cat([kept, kept], dim=-1)[None])


def test_a_small_mask_is_counted_as_by_hand():
    found = analyze([["1100", "0000"], ["1011", "0001"], ["0000", "0000"]], element_bytes=4)
    assert found.kept == pytest.approx(6 / 24)
    assert found.kept_by_pair == pytest.approx((3 / 12, 3 / 12))  # channels 0 and 2, 1 and 3
    assert found.kept_by_layer == pytest.approx((2 / 8, 4 / 8, 0))
    assert found.widths == ((2, 0), (3, 1), (0, 0))
    assert found.heads_per_width == {0: 3, 1: 1, 2: 1, 3: 1}
    assert (found.empty_heads, found.num_heads, found.empty_by_layer) == (3, 6, (1, 0, 2))
    assert (found.cache.key_pruned, found.cache.key_dense) == (6 * 4, 24 * 4)
    assert (found.cache.value_pruned, found.cache.value_dense) == (12 * 4, 24 * 4)
    assert found.model is None


@pytest.mark.parametrize(
    ("empty", "quarters"),
    [([1, 0, 2, 2, 0, 1, 1, 1], (1, 4, 1, 2)), ([2], (0, 2, 0, 0)), ([1, 1, 1, 1, 1, 1], (2, 1, 2, 1))],
    ids=["8 layers", "1 layer", "6 layers"],
)
def test_quarters_of_the_layers_hold_every_empty_head_once(empty, quarters):
    found = analyze([["00"] * count + ["11"] * (3 - count) for count in empty])
    assert found.empty_by_quarter == quarters
    assert sum(found.empty_by_quarter) == found.empty_heads


def test_score_is_the_distance_from_the_neighbours_in_robust_deviations():
    shares = [0.10, 0.12, 0.15, 0.11, 0.60, 0.14, 0.19, 0.16, 0.21]
    found = analyze_mask(with_pairs(shares))
    neighbours = [0.12, 0.13, 0.115, 0.145, 0.145, 0.16, 0.16, 0.20, 0.16]
    assert found.neighbours_by_pair[4] == pytest.approx(neighbours[4])
    assert found.neighbours_by_pair[0] == pytest.approx(0.12)  # at the border there are those of one side
    differences = torch.tensor(
        [share - n for share, n in zip(found.kept_by_pair, found.neighbours_by_pair, strict=True)]
    )
    ordered = differences.sort().values
    middle = ordered[4]
    spread = 1.4826 * (differences - middle).abs().sort().values[4]
    (outlier,) = found.outliers
    assert (outlier.pair, outlier.kept) == (4, pytest.approx(0.60))
    assert outlier.score == pytest.approx(((0.60 - 0.145 - middle) / spread).item(), rel=1e-5)
    assert outlier.score > 6


def test_a_pair_of_which_far_less_is_kept_is_an_outlier_too_and_a_steep_slope_is_none():
    shares = [0.80, 0.82, 0.85, 0.81, 0.20, 0.84, 0.89, 0.86, 0.91]
    (outlier,) = analyze_mask(with_pairs(shares)).outliers
    assert outlier.pair == 4
    assert outlier.score < -6
    slope = [0.02 * pair + 0.01 * (pair % 3) for pair in range(32)]
    assert analyze_mask(with_pairs(slope)).outliers == ()


def test_one_head_that_differs_from_an_even_mask_is_no_outlier_and_a_whole_pair_is():
    even = torch.ones(4, 4, 16, dtype=torch.bool)
    single = even.clone()
    single[0, 0, 3] = False
    assert analyze_mask(ChannelMask(single)).outliers == ()
    even[:, :, 3] = False
    assert [outlier.pair for outlier in analyze_mask(ChannelMask(even)).outliers] == [3]


@pytest.mark.parametrize("kept", [False, True], ids=["no channels", "all channels"])
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 1, 7)], ids=str)
def test_even_masks_have_no_outliers_and_whole_numbers(shape, kept):
    found = analyze_mask(ChannelMask(torch.full(shape, kept)))
    assert found.kept == float(kept)
    assert set(found.kept_by_pair) <= {float(kept)}
    assert found.outliers == ()
    assert found.cache.saved == float(not kept)
    assert json.loads(json.dumps(found.to_dict()))["empty_share"] == float(not kept)


@pytest.mark.parametrize(
    ("name", "pair", "empty", "heads"),
    [("llama-3.1-8b-instruct-70", 22, 47, 256), ("qwen2.5-7b-instruct-70", 31, 35, 112)],
)
def test_masks_of_the_authors_have_the_outlier_that_the_paper_names_and_no_other(name, pair, empty, heads):
    found = analyze_mask(load_mask(find_by_name(name)))
    assert [outlier.pair for outlier in found.outliers] == [pair]
    (outlier,) = found.outliers
    assert outlier.kept > 1.5 * outlier.neighbours
    assert (found.empty_heads, found.num_heads) == (empty, heads)
