"""Figures, by the numbers that they show."""

from dataclasses import replace

import pytest
import torch
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from leank_convert.mask import ChannelMask
from leank_convert.report import figures
from leank_convert.report.distribution import analyze_mask
from leank_convert.report.figures import BLUE, ORANGE
from tests.leank_convert.report.records import make_records


def drawn(draw, *shown):
    """What a function of `figures` draws into empty axes."""
    axes = Figure().subplots()
    draw(axes, *shown)
    return axes


def heights(axes):
    return [bar.get_height() for bar in axes.patches]


def cells(axes):
    return axes.images[-1].get_array().tolist()


def test_heat_maps_show_channels_and_widths_of_every_head():
    mask = torch.rand(3, 2, 8, generator=torch.Generator().manual_seed(0)) < 0.5
    axes = drawn(figures.draw_channel_mask, mask)
    assert cells(axes) == mask.view(6, 8).tolist()
    assert [label.get_text() for label in axes.get_yticklabels()] == ["0", "1", "2"]
    assert list(axes.get_yticks()) == [0.5, 2.5, 4.5]
    widths = mask.sum(-1)
    axes = drawn(figures.draw_by_head, widths, "Kept", "kept channels", 8, "d")
    assert cells(axes) == widths.tolist()
    assert [text.get_text() for text in axes.texts] == [str(width) for width in widths.flatten().tolist()]


def test_pairs_join_the_two_channels_that_turn_together():
    mask = torch.zeros(2, 2, 4, dtype=torch.bool)
    mask[0, 0, 1] = mask[0, 0, 3] = mask[1, 1, 0] = True
    assert heights(drawn(figures.draw_kept_by_pair, analyze_mask(ChannelMask(mask)))) == [12.5, 25]
    assert cells(drawn(figures.draw_layers_by_pair, ChannelMask(mask))) == [[0, 50], [25, 0]]


def test_outliers_stand_out_among_the_bars():
    kept = torch.rand(4, 4, 32, generator=torch.Generator().manual_seed(0)) < 0.25
    kept[..., [5, 21]] = True
    mask = ChannelMask(kept)
    axes = drawn(figures.draw_kept_by_pair, analyze_mask(mask))
    colours = [to_hex(bar.get_facecolor()) for bar in axes.patches]
    assert colours == [ORANGE if pair == 5 else BLUE for pair in range(16)]
    assert [text.get_text() for text in axes.texts] == ["pair 5: 100%"]


@pytest.mark.parametrize(
    ("head_dim", "widths", "counts", "label"),
    [
        (64, [0, 16, 16, 48], [1, 2, 0, 1, 0], "kept channels of 64"),
        (128, [0, 1, 3, 4, 128], [3, 1, *[0] * 30, 1], "kept channels of 128, in bins of 4"),
    ],
)
def test_histogram_counts_the_heads_of_each_width(head_dim, widths, counts, label):
    mask = torch.arange(head_dim) < torch.tensor(widths)[:, None]
    axes = drawn(figures.draw_width_histogram, mask[None])
    assert heights(axes) == counts
    assert axes.get_xlabel() == label


def test_bars_of_bytes_are_what_is_kept_and_what_is_saved():
    mask = torch.zeros(2, 2, 8, dtype=torch.bool)
    mask[0, 0, :3] = True
    analysis = analyze_mask(ChannelMask(mask))
    axes = drawn(figures.draw_cache, analysis)
    cache = analysis.cache
    kept, saved = ([bar.get_width() * 1024 for bar in bars] for bars in axes.containers)
    assert kept == [cache.key_pruned, cache.value_pruned, cache.key_pruned + cache.value_pruned]
    whole = [a + b for a, b in zip(kept, saved, strict=True)]
    assert whole == [cache.key_dense, cache.value_dense, 2 * cache.key_dense]


def test_loss_is_drawn_on_a_log_scale_that_the_first_steps_rounding_does_not_stretch():
    records = make_records(ratios=(1.0,), steps=(300, 100))
    axes = drawn(figures.draw_distillation, records)
    assert axes.get_yscale() == "log"
    each, first, second = axes.lines[:3]
    assert list(each.get_ydata()) == [record.distillation for record in records]
    assert (len(first.get_ydata()), len(second.get_ydata())) == (300, 100)
    assert first.get_ydata()[100] == pytest.approx(1 / 101)  # of a falling curve the median is its middle
    assert axes.get_ylim()[0] > 1e-3
    assert axes.lines[3].get_xdata()[0] == 300.5
    assert axes.texts[0].get_text() == "stage 2"
    without = [replace(record, distillation=0.0) for record in records]
    assert drawn(figures.draw_distillation, without).get_yscale() == "linear"


@pytest.mark.parametrize("ratio", [0.71, 0.0])
def test_pruning_shows_the_mean_factor_and_the_ratio_asked_and_reached(ratio):
    made = make_records(steps=(6, 2))
    records = [replace(one, pruning_ratio=ratio if one.stage == 2 else None) for one in made]
    axes = drawn(figures.draw_pruning, records)
    mean, reached, asked = axes.lines[:3]
    assert list(mean.get_ydata()) == [record.mean_factor for record in records]
    assert (list(reached.get_xdata()), list(reached.get_ydata())) == ([7, 8], [ratio] * 2)
    assert set(asked.get_ydata()) == {0.7}
    assert len(axes.get_legend().get_texts()) == 3
