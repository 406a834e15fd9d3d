"""The report: one page of whatever is known of a mask, and figures that show its numbers."""

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from html.parser import HTMLParser

import matplotlib.style
import pytest
import torch
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from leank_convert.mask import ChannelMask, MaskProvenance
from leank_convert.recipe import Recipe
from leank_convert.report.figures import (
    STYLE,
    draw_channel_mask,
    draw_distillation,
    draw_kept_by_head,
    draw_kept_by_layer,
    draw_kept_by_pair,
    draw_pruning,
    draw_scaling_factors,
    draw_width_histogram,
)
from leank_convert.report.mask_report import write_report
from leank_convert.train.log import StepRecord, TrainingLog, read_log

VOID = {"meta", "br", "hr", "img", "link", "input"}


class Page(HTMLParser):
    """Notes a page's tags and text, and refuses tags that are not closed where they should be."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.ids, self.links, self.texts = [], [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value)
            elif name in ("src", "href", "xlink:href"):
                self.links.append(value)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if data.strip() and self.open[-1] != "style":
            self.texts.append(" ".join(data.split()))


def make_mask(shape=(4, 4, 64), *, known=True, factors=True, asked=0.7):
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(shape, generator=generator)
    kept = torch.zeros(shape, dtype=torch.bool)
    for head in range(shape[0] * shape[1]):
        width = shape[2] // 4 * (head % 3)
        kept.view(-1, shape[2])[head, values.view(-1, shape[2])[head].topk(width).indices] = True
    provenance = None
    if known:
        provenance = MaskProvenance(
            model="Llama <3>",
            model_type="llama",
            num_hidden_layers=shape[0],
            num_attention_heads=2 * shape[1],
            num_key_value_heads=shape[1],
            head_dim=shape[2],
            rope_parameters={"rope_type": "default"},
            method="leank",
            sink_size=16,
            recent_size=64,
            flush_size=8,
            pruning_ratio_asked=asked,
            width_multiple=shape[2] // 4,
            recipe="seed: 3 # <b>&\n",
            seed=3,
            versions={"torch": "2.0"},
        )
    return ChannelMask(kept, values if factors else None, provenance)


def make_records(ratios=(0.7,), steps=(20, 6), gpu_bytes=2_500_000_000):
    """Stage 1, then stage 2 for each ratio, whose loss tells which it is of; the first loss is rounding."""
    stages = [(1, None)] * steps[0] + [(2, ratio) for ratio in ratios for _ in range(steps[1])]
    return [
        StepRecord(
            step=step,
            stage=stage,
            pruning_ratio_asked=ratio,
            task="retrieval",
            num_tokens=1000,
            num_answer_tokens=10,
            learning_rate=0.01,
            distillation=1e-13 if step == 1 else (ratio or 1) / step,
            mean_factor=1 / step,
            pruning_ratio=None if ratio is None else ratio + 0.01,
            empty_heads=None if ratio is None else 2,
            heads_leaving="",
            heads_entering="",
            seconds=1.5,
            gpu_bytes=gpu_bytes,
        )
        for step, (stage, ratio) in enumerate(stages, 1)
    ]


def write_log(folder, records):
    recipe = Recipe(trackers=())
    with TrainingLog(folder, recipe, num_steps=len(records), start=0, progress=False) as journal:
        for record in records:
            journal.write(record)
    return folder / "log.jsonl"


@pytest.fixture(scope="module")
def full_page(tmp_path_factory):
    """The page of a mask of which everything is known."""
    folder = tmp_path_factory.mktemp("report")
    write_report(make_mask(), read_log(write_log(folder, make_records())), folder / "report.html")
    return (folder / "report.html").read_text(encoding="utf-8")


@pytest.fixture
def write(tmp_path):
    """Writes the report of a mask, and of records if there are any, and gives back its text."""

    def run(mask, records=None):
        log = [] if records is None else read_log(write_log(tmp_path, records))
        write_report(mask, log, tmp_path / "report.html")
        return (tmp_path / "report.html").read_text(encoding="utf-8")

    return run


@pytest.fixture
def axes():
    with matplotlib.style.context(["default", STYLE]):
        yield Figure().subplots()


def facts_of(page):
    """The list at the top, as a mapping."""
    start = page.texts.index("shape")
    stop = page.texts.index("Where channels are kept")
    cells = page.texts[start:stop]
    return dict(zip(cells[::2], cells[1::2], strict=True))


def test_page_is_whole_and_needs_nothing_beside_it(full_page):
    page = Page(full_page)
    assert page.tags.count("svg") == 4
    assert "script" not in page.tags
    assert all(link.startswith(("#", "data:image/png;base64,")) for link in page.links)
    assert "@import" not in full_page
    assert re.findall(r"url\((?!#)", full_page) == []


def test_ids_are_unique_and_every_reference_is_to_one(full_page):
    page = Page(full_page)
    assert len(page.ids) == len(set(page.ids))
    referred = set(re.findall(r"url\(#([^)]+)\)", full_page)) | {
        link[1:] for link in page.links if link[0] == "#"
    }
    assert referred <= set(page.ids)


def test_figures_are_well_formed_and_take_the_pages_colour(full_page):
    for figure in re.findall(r"<svg.*?</svg>", full_page, re.DOTALL):
        root = ElementTree.fromstring(figure)
        assert root.get("aria-label")
        assert "currentColor" in figure
        assert STYLE["text.color"] not in figure
        assert "#000000" not in figure  # what was left to matplotlib's default


def test_top_of_the_page_tells_the_facts(full_page):
    page = Page(full_page)
    assert page.texts[1] == "LeanK mask of Llama <3>"
    facts = facts_of(page)
    assert facts["shape"] == "4 layers, 4 KV heads, head_dim 64"
    assert facts["K channels removed"] == "76.6% (asked: 70.0%)"
    assert facts["heads without any"].startswith("6 of 16")
    assert facts["cache per pruned token"] == "K 23.4%, V 62.5%, together 43.0% of the dense one"
    assert facts["windows"] == "sink 16, recent 64, flush 8"
    assert facts["widths"] == "multiples of 16"
    assert facts["steps"] == "20 + 6 (stages 1 and 2)"
    assert facts["tokens"] == "26,000, 260 of them answers"
    assert facts["time in steps"] == "0:00:39"
    assert facts["peak GPU memory"] == "2.5 GB"
    assert facts["versions"] == "torch 2.0"


def test_recipe_is_shown_as_it_was_written(full_page):
    assert Page(full_page).texts[-1] == "seed: 3 # <b>&"


def test_an_imported_mask_is_shown_without_what_is_not_known(write):
    page = Page(write(make_mask(known=False, factors=False)))
    assert page.texts[1] == "LeanK mask"
    assert list(facts_of(page)) == [
        "shape", "K channels removed", "heads without any", "cache per pruned token"
    ]  # fmt: skip
    assert page.tags.count("svg") == 3
    assert "Training" not in page.texts
    assert "Scaling factors" not in page.texts
    assert "Kept channels (blue)" in page.texts


def test_of_several_ratios_the_masks_own_stage_two_is_shown(write):
    page = Page(write(make_mask((1, 1, 2), asked=0.5), make_records(ratios=(0.7, 0.5))))
    assert facts_of(page)["steps"] == "20 + 6 (stages 1 and 2)"


def test_equal_input_gives_equal_pages_whatever_the_users_style(write, full_page):
    with matplotlib.rc_context({"font.size": 20, "svg.fonttype": "path", "axes.facecolor": "red"}):
        assert write(make_mask(), make_records()) == full_page


@pytest.mark.parametrize("shape", [(1, 1, 2), (80, 2, 33)], ids=str)
def test_every_shape_is_drawn(shape, write):
    page = Page(write(make_mask(shape), make_records(steps=(1, 0))))
    assert page.tags.count("svg") == 4


def heights(axes):
    return [bar.get_height() for bar in axes.patches]


def test_bars_by_layer_are_each_layers_kept_share(axes):
    mask = make_mask((3, 2, 8)).channel_mask
    draw_kept_by_layer(axes, mask)
    assert [bar.get_width() for bar in axes.patches] == pytest.approx(
        (100 * mask.float().mean((1, 2))).tolist()
    )
    bottom, top = axes.get_ylim()
    assert bottom > top  # the first layer is on top


def test_bars_by_pair_join_the_two_channels_that_turn_together(axes):
    mask = torch.zeros(1, 2, 8, dtype=torch.bool)
    mask[0, 0, 1] = mask[0, 0, 5] = mask[0, 1, 7] = True
    draw_kept_by_pair(axes, ChannelMask(mask))
    assert heights(axes) == [0, 50, 0, 25]


def test_cells_by_head_hold_each_heads_width(axes):
    mask = make_mask((3, 2, 8)).channel_mask
    draw_kept_by_head(axes, mask)
    assert axes.images[0].get_array().tolist() == mask.sum(-1).tolist()
    assert [text.get_text() for text in axes.texts] == ["0", "2", "4", "0", "2", "4"]


def test_histogram_counts_the_heads_of_each_width(axes):
    mask = torch.arange(64) < torch.tensor([0, 16, 16, 48])[:, None]
    draw_width_histogram(axes, mask[None])
    assert heights(axes) == [1, 2, 0, 1, 0]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0", "16", "32", "48", "64"]


def test_histogram_of_widths_without_a_common_step_has_bins(axes):
    mask = torch.arange(128) < torch.tensor([0, 1, 3, 4, 128])[:, None]
    draw_width_histogram(axes, mask[None])
    counts = heights(axes)
    assert (counts[0], counts[1], counts[-1], sum(counts)) == (3, 1, 1, 5)
    assert "in bins of 4" in axes.get_xlabel()


def test_heat_maps_have_a_row_per_head_and_a_column_per_channel(axes):
    mask = make_mask((3, 2, 8))
    draw_scaling_factors(axes, mask.scaling_factors)
    draw_channel_mask(axes, mask.channel_mask)
    factors, kept = (image.get_array() for image in axes.images)
    assert factors.tolist() == mask.scaling_factors.view(6, 8).tolist()
    assert kept.tolist() == mask.channel_mask.view(6, 8).tolist()
    assert [label.get_text() for label in axes.get_yticklabels()] == ["0", "1", "2"]
    assert list(axes.get_yticks()) == [0.5, 2.5, 4.5]


def test_loss_is_drawn_on_a_log_scale_that_the_first_steps_rounding_does_not_stretch(axes):
    records = make_records(steps=(200, 50))
    draw_distillation(axes, records)
    assert axes.get_yscale() == "log"
    each, first, second = axes.lines[:3]
    assert list(each.get_ydata()) == [record.distillation for record in records]
    assert (len(first.get_ydata()), len(second.get_ydata())) == (200, 50)
    assert first.get_ydata()[100] == pytest.approx(1 / 101)  # of a falling curve the median is its middle
    assert axes.get_ylim()[0] > 1e-3
    assert axes.lines[3].get_xdata()[0] == 200.5
    assert axes.texts[0].get_text() == "stage 2"


def test_a_loss_of_nothing_but_zeros_is_drawn(axes):
    draw_distillation(axes, [replace(record, distillation=0.0) for record in make_records()])
    assert axes.get_yscale() == "linear"


def test_pruning_shows_the_mean_factor_and_the_ratio_asked_and_reached(axes):
    records = make_records()
    draw_pruning(axes, records)
    mean, reached, asked = axes.lines[:3]
    assert list(mean.get_ydata()) == [record.mean_factor for record in records]
    assert list(reached.get_xdata()) == list(range(21, 27))
    assert set(reached.get_ydata()) == {0.71}
    assert set(asked.get_ydata()) == {0.7}
    assert len(axes.get_legend().get_texts()) == 3


def test_a_reached_ratio_of_zero_is_drawn(axes):
    draw_pruning(axes, [replace(record, pruning_ratio=0.0) for record in make_records(steps=(0, 6))])
    assert [line.get_label() for line in axes.lines][1] == "reached pruning ratio"
    assert list(axes.lines[1].get_ydata()) == [0.0] * 6


def test_text_stands_out_on_white_and_on_the_dark_page():
    def luminance(colour):
        parts = [int(to_hex(colour)[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    for ground in ("#ffffff", "#14171c"):
        lighter, darker = sorted([luminance(ground), luminance(STYLE["text.color"])], reverse=True)
        assert (lighter + 0.05) / (darker + 0.05) > 3
