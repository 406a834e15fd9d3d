"""The report of a mask: one page of whatever is known of it."""

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from functools import partial
from html.parser import HTMLParser

import matplotlib
import pytest
import torch

from leank_convert.mask import ChannelMask
from leank_convert.recipe import Recipe
from leank_convert.report.figures import STYLE
from leank_convert.report.mask_report import write_report
from leank_convert.train.log import TrainingLog, read_log
from tests.checks import llama_facts, provenance_for
from tests.leank_convert.report.records import make_records

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
    values = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    kept = torch.zeros(shape, dtype=torch.bool)
    for head in range(shape[0] * shape[1]):
        width = shape[2] // 4 * (head % 3)
        kept.view(-1, shape[2])[head, values.view(-1, shape[2])[head].topk(width).indices] = True
    told = {"pruning_ratio_asked": asked, "width_multiple": shape[2] // 4, "seed": 3}
    told |= {"recipe": "seed: 3 # <b>&\n", "versions": {"torch": "2.0"}}
    windows = {"sink_size": 16, "recent_size": 64, "flush_size": 8}
    provenance = provenance_for(llama_facts(*shape[:2]), "Llama <3>", **windows, **told)
    provenance = replace(provenance, head_dim=shape[2]) if known else None
    return ChannelMask(kept, values if factors else None, provenance)


def write_page(folder, mask, records=()):
    """The report of a mask and of its training, by the log of it."""
    recipe = Recipe(trackers=())
    with TrainingLog(folder, recipe, num_steps=len(records), start=0, progress=False) as journal:
        for record in records:
            journal.write(record)
    log = read_log(folder / "log.jsonl") if records else []
    write_report(mask, log, folder / "report.html")
    return (folder / "report.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def full_page(tmp_path_factory):
    """The page of a mask of which everything is known."""
    return write_page(tmp_path_factory.mktemp("report"), make_mask(), make_records())


@pytest.fixture
def write(tmp_path):
    """Writes the report of a mask, and of records if there are any, and gives back its text."""
    return partial(write_page, tmp_path)


def facts_of(page):
    """The list at the top, as a mapping."""
    start = page.texts.index("shape")
    stop = page.texts.index("RoPE pairs")
    cells = page.texts[start:stop]
    return dict(zip(cells[::2], cells[1::2], strict=True))


def test_page_needs_nothing_beside_it_and_its_figures_take_its_colour(full_page):
    page = Page(full_page)
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in full_page
    assert re.search(r"44rem\) \{\s+dl \{ grid.*: 1fr.*\s+figure \{ overflow-x: auto;", full_page)
    assert "script" not in page.tags
    assert all(link.startswith(("#", "data:image/png;base64,")) for link in page.links)
    assert re.findall(r"url\((?!#)|@import", full_page) == []
    assert len(page.ids) == len(set(page.ids))
    referred = set(re.findall(r"url\(#([^)]+)\)", full_page))
    assert referred | {link[1:] for link in page.links if link[0] == "#"} <= set(page.ids)
    figures = re.findall(r"<svg.*?</svg>", full_page, re.DOTALL)
    assert len(figures) == 6
    for figure in figures:
        assert ElementTree.fromstring(figure).get("aria-label")
        assert "currentColor" in figure
        assert STYLE["text.color"] not in figure
        assert "#000000" not in figure  # what was left to matplotlib's default


def test_top_of_the_page_tells_the_facts(full_page):
    page = Page(full_page)
    assert page.texts[1] == "LeanK mask of Llama <3>"
    assert facts_of(page) == {
        "shape": "4 layers, 4 KV heads, head_dim 64",
        "K channels": "23.4% kept, 76.6% removed (asked: 70.0%)",
        "heads of width 0": "6 of 16 (37.5%); by quarter of the layers, shallow first: 2, 1, 1, 2",
        "heads per width": "0: 6, 16: 5, 32: 5",
        "outlier pairs": "none",
        "saved per token": "K 76.6%, V 37.5%, together 57.0%: 4,096 bytes become 1,760 in the pruned region, "
        "at 2 bytes a number",
        "windows": "sink 16, recent 64, flush 8",
        "widths": "multiples of 16",
        "steps": "20 + 6 (stages 1 and 2)",
        "tokens": "26,000, 260 of them answers",
        "time in steps": "0:00:39",
        "peak GPU memory": "2.5 GB",
        "made by": "leank",
        "seed": "3",
        "versions": "torch 2.0",
        "next step": "`leank-convert evaluate OUT` compares answers with dense ones; of a mask alone, first "
        "`leank-convert export Llama <3> -o OUT`",
    }
    assert page.texts[-1] == "seed: 3 # <b>&"  # the recipe


def test_an_imported_mask_is_shown_without_what_is_not_known(write):
    page = Page(write(make_mask(known=False, factors=False)))
    assert page.texts[1] == "LeanK mask"
    assert list(facts_of(page))[-1] == "saved per token"
    assert page.tags.count("svg") == 5
    assert "Training" not in page.texts
    assert "Scaling factors" not in page.texts
    assert "Kept channels (blue)" in page.texts


def test_of_several_ratios_the_masks_own_stage_two_is_shown(write):
    page = Page(write(make_mask((1, 1, 2), asked=0.5), make_records(ratios=(0.7, 0.5))))
    assert facts_of(page)["steps"] == "20 + 6 (stages 1 and 2)"


def test_equal_input_gives_equal_pages_whatever_the_users_style(write, full_page):
    with matplotlib.rc_context({"font.size": 20, "svg.fonttype": "path", "axes.facecolor": "red"}):
        assert write(make_mask(), make_records()) == full_page


def test_an_odd_shape_and_a_single_step_are_drawn(write):
    assert Page(write(make_mask((80, 2, 33)), make_records(steps=(1, 0)))).tags.count("svg") == 6
