import random

import pytest

from leank_convert.head_layout import plan_head_layout


@pytest.mark.parametrize(
    ("widths", "permutation"),
    [
        ([32, 0, 64, 32], (1, 0, 3, 2)),
        ([5, 5, 5], (0, 1, 2)),
        ([0, 0, 0, 0], (0, 1, 2, 3)),
        ([3, 2, 1], (2, 1, 0)),
        ([7], (0,)),
        ([1, 0, 1, 0, 1, 0], (1, 3, 5, 0, 2, 4)),
    ],
)
def test_heads_are_sorted_by_width_and_stable_within_a_bucket(widths, permutation):
    layout = plan_head_layout([widths])
    assert layout.head_permutation == (permutation,)
    assert layout.widths == (tuple(sorted(widths)),)


def test_layers_are_planned_by_themselves():
    rng = random.Random(0)
    widths = [[rng.choice((0, 32, 64, 96)) for _ in range(8)] for _ in range(12)]
    layout = plan_head_layout(widths)
    for layer, (row, permutation) in enumerate(zip(layout.widths, layout.head_permutation, strict=True)):
        assert sorted(permutation) == list(range(8))
        assert [widths[layer][old] for old in permutation] == list(row) == sorted(widths[layer])
        buckets = [[old for old in permutation if widths[layer][old] == width] for width in set(row)]
        assert all(bucket == sorted(bucket) for bucket in buckets)
