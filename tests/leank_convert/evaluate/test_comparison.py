import math

import pytest

from leank_convert.evaluate.comparison import (
    CacheBytes,
    Comparison,
    Outcome,
    paired_difference_interval,
    render_comparison,
    score_pairs,
)


def outcomes(both, lost, gained, neither, task="retrieval"):
    kinds = (
        [(True, True)] * both + [(True, False)] * lost + [(False, True)] * gained + [(False, False)] * neither
    )
    return [Outcome(task, 100, dense, pruned, window=False) for dense, pruned in kinds]


def test_scores_count_pairs():
    score = score_pairs(outcomes(both=90, lost=4, gained=1, neither=5))
    assert (score.n, score.dense, score.pruned) == (100, 0.94, 0.91)
    assert (score.lost, score.gained) == (4, 1)
    assert score.difference == pytest.approx(-0.03)
    assert score.interval[0] < -0.03 < score.interval[1]


def test_no_outcomes_are_refused():
    with pytest.raises(ValueError, match="no outcomes"):
        score_pairs([])


def test_interval_by_hand():
    # Cells with half a pair added: 4.5 lost, 1.5 gained, of 102.
    difference = -3 / 102
    half = 1.959964 * math.sqrt((6 / 102 - difference**2) / 102)
    assert paired_difference_interval(100, lost=4, gained=1) == pytest.approx(
        (difference - half, difference + half), abs=1e-6
    )


@pytest.mark.parametrize("n", [1, 10, 1000])
def test_interval_without_discordant_pairs_has_a_width_that_shrinks_with_n(n):
    low, high = paired_difference_interval(n, lost=0, gained=0)
    wider = paired_difference_interval(max(1, n // 2), lost=0, gained=0)
    assert low < 0 < high
    assert high - low <= wider[1] - wider[0]


def test_interval_stays_within_possible_differences():
    low, high = paired_difference_interval(1, lost=1, gained=0)
    assert -1 <= low < high <= 1


def test_swapping_sides_mirrors_the_interval():
    low, high = paired_difference_interval(50, lost=7, gained=2)
    assert paired_difference_interval(50, lost=2, gained=7) == pytest.approx((-high, -low))


def test_render_names_every_task_and_both_ratios():
    result = Comparison(
        checkpoint="out",
        seed=1,
        pruning_ratio_asked=0.7,
        pruning_ratio=0.703125,
        num_whole=0,
        outcomes=tuple(outcomes(3, 1, 0, 0) + outcomes(4, 0, 0, 0, task="multi_value")),
        cache=CacheBytes(2048, 1000, 320, 1000, 900),
    )
    text = render_comparison(result)
    for expected in (
        "retrieval",
        "multi_value",
        "all tasks",
        "asked 70.0%",
        "reached 70.3%",
        "68.0%",
        "10.0%",
    ):
        assert expected in text
    facts = result.to_dict()
    assert facts["exact_match"]["total"]["n"] == 8
    assert facts["exact_match"]["retrieval"]["lost"] == 1
    assert facts["cache_bytes"]["key_pruned"] == 320
