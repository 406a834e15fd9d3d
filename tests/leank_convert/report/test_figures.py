"""Figures, by the numbers that they show."""

from dataclasses import replace

import pytest
import torch
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from leank_convert.analyze.distribution import analyze_mask
from leank_convert.mask import ChannelMask
from leank_convert.report import figures
from leank_convert.report.figures import BLUE, ORANGE
from tests.leank_convert.report.records import make_records


@pytest.fixture
def axes():
    return Figure().subplots()


def heights(axes):
    return [bar.get_height() for bar in axes.patches]


def cells(axes):
    return axes.images[-1].get_array().tolist()


def test_heat_maps_show_channels_and_widths_of_every_head(axes):
    mask = torch.rand(3, 2, 8, generator=torch.Generator().manual_seed(0)) < 0.5
    figures.draw_channel_mask(axes, mask)
    assert cells(axes) == mask.view(6, 8).tolist()
    assert [label.get_text() for label in axes.get_yticklabels()] == ["0", "1", "2"]
    assert list(axes.get_yticks()) == [0.5, 2.5, 4.5]
    other = Figure().subplots()
    figures.draw_kept_by_head(other, mask)
    widths = mask.sum(-1)
    assert cells(other) == widths.tolist()
    assert [text.get_text() for text in other.texts] == [str(width) for width in widths.flatten().tolist()]


def test_bars_by_layer_have_the_first_layer_on_top(axes):
    mask = torch.tensor([[[1, 1], [0, 1]], [[0, 0], [0, 0]]], dtype=torch.bool)
    figures.draw_kept_by_layer(axes, mask)
    assert [bar.get_width() for bar in axes.patches] == [75, 0]
    bottom, top = axes.get_ylim()
    assert bottom > top
    other = Figure().subplots()
    figures.draw_empty_by_layer(other, analyze_mask(ChannelMask(mask)))
    assert [bar.get_width() for bar in other.patches] == [0, 2]


def test_pairs_join_the_two_channels_that_turn_together(axes):
    mask = torch.zeros(2, 2, 4, dtype=torch.bool)
    mask[0, 0, 1] = mask[0, 0, 3] = mask[1, 1, 0] = True
    figures.draw_kept_by_pair(axes, ChannelMask(mask))
    assert heights(axes) == [12.5, 25]
    figures.draw_layers_by_pair(axes, ChannelMask(mask))
    assert cells(axes) == [[0, 50], [25, 0]]


def test_outliers_stand_out_among_the_bars(axes):
    kept = torch.rand(4, 4, 32, generator=torch.Generator().manual_seed(0)) < 0.25
    kept[..., [5, 21]] = True
    mask = ChannelMask(kept)
    figures.draw_outlier_pairs(axes, mask, analyze_mask(mask))
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
def test_histogram_counts_the_heads_of_each_width(axes, head_dim, widths, counts, label):
    figures.draw_width_histogram(axes, (torch.arange(head_dim) < torch.tensor(widths)[:, None])[None])
    assert heights(axes) == counts
    assert axes.get_xlabel() == label


def test_bars_of_bytes_are_what_is_kept_and_what_is_saved(axes):
    mask = torch.zeros(2, 2, 8, dtype=torch.bool)
    mask[0, 0, :3] = True
    analysis = analyze_mask(ChannelMask(mask))
    figures.draw_cache(axes, analysis)
    cache = analysis.cache
    kept, saved = ([bar.get_width() * 1024 for bar in bars] for bars in axes.containers)
    assert kept == [cache.key_pruned, cache.value_pruned, cache.key_pruned + cache.value_pruned]
    whole = [a + b for a, b in zip(kept, saved, strict=True)]
    assert whole == [cache.key_dense, cache.value_dense, 2 * cache.key_dense]


def test_correlations_are_written_into_their_cells(axes):
    figures.draw_correlation(axes, [[1, 0.25], [0.25, 1]], ["one", "other"], "Between tasks")
    assert [text.get_text() for text in axes.texts] == ["1.000", "0.250", "0.250", "1.000"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["one", "other"]


def test_ratios_are_drawn_by_head_and_against_width(axes):
    ratios = torch.tensor([[0.25, 0.5], [0.75, 1.5]])
    figures.draw_ratio_by_head(axes, ratios)
    assert cells(axes) == ratios.tolist()
    assert axes.images[0].get_clim() == (0, 1.5)
    other = Figure().subplots()
    figures.draw_ratio_by_width(other, ratios, torch.tensor([[0, 16], [0, 32]]))
    empty, kept = (points.get_offsets().tolist() for points in other.collections)
    assert empty == [[0.25, 0], [0.75, 0]]
    assert kept == [[0.5, 16], [1.5, 32]]
    assert [line.get_xdata()[0] for line in other.lines] == [0.5, 1.0]


def test_loss_is_drawn_on_a_log_scale_that_the_first_steps_rounding_does_not_stretch(axes):
    records = make_records(ratios=(1.0,), steps=(300, 100))
    figures.draw_distillation(axes, records)
    assert axes.get_yscale() == "log"
    each, first, second = axes.lines[:3]
    assert list(each.get_ydata()) == [record.distillation for record in records]
    assert (len(first.get_ydata()), len(second.get_ydata())) == (300, 100)
    assert first.get_ydata()[100] == pytest.approx(1 / 101)  # of a falling curve the median is its middle
    assert axes.get_ylim()[0] > 1e-3
    assert axes.lines[3].get_xdata()[0] == 300.5
    assert axes.texts[0].get_text() == "stage 2"
    other = Figure().subplots()
    figures.draw_distillation(other, [replace(record, distillation=0.0) for record in records])
    assert other.get_yscale() == "linear"


@pytest.mark.parametrize("ratio", [0.71, 0.0])
def test_pruning_shows_the_mean_factor_and_the_ratio_asked_and_reached(axes, ratio):
    made = make_records(steps=(6, 2))
    records = [replace(one, pruning_ratio=ratio if one.stage == 2 else None) for one in made]
    figures.draw_pruning(axes, records)
    mean, reached, asked = axes.lines[:3]
    assert list(mean.get_ydata()) == [record.mean_factor for record in records]
    assert (list(reached.get_xdata()), list(reached.get_ydata())) == ([7, 8], [ratio] * 2)
    assert set(asked.get_ydata()) == {0.7}
    assert len(axes.get_legend().get_texts()) == 3


@pytest.mark.parametrize("ground", ["#ffffff", "#14171c"], ids=["white", "the dark page"])
def test_text_stands_out(ground):
    def luminance(colour):
        parts = [int(to_hex(colour)[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    lighter, darker = sorted([luminance(ground), luminance(figures.STYLE["text.color"])], reverse=True)
    assert (lighter + 0.05) / (darker + 0.05) > 3
