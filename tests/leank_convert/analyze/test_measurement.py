"""What is measured on a model: prompts, correlations, ratios."""

import pytest
import torch
from matplotlib.figure import Figure

from leank_convert.analyze.measurement import choose_lengths, draw_prompts, measure_model
from leank_convert.mask import ChannelMask
from leank_convert.methods.statistics import measure_attention
from leank_convert.recipe import DataSection
from leank_convert.recipe_file import load_recipe
from leank_convert.report.figures import draw_ratio_by_width
from leank_convert.train.model import find_model, load_model

DATA = DataSection(
    tasks=("retrieval", "multi_value", "retrieval"),
    wording="testbed",
    min_length=160,
    max_length=220,
    questions_per_context=2,
)


@pytest.fixture(scope="module")
def subject():
    """The shipped model."""
    recipe = load_recipe("quickstart")
    return load_model(find_model("testbed", recipe), recipe, torch.device("cpu"))


@pytest.fixture(scope="module")
def prompts(subject):
    return draw_prompts(subject.tokenizer, DATA, num_samples=2, seed=3)


@pytest.mark.parametrize(
    ("shortest", "longest", "lengths"),
    [
        (256, 2048, (256, 512, 1024, 2048)),
        (300, 300, (300,)),
        (10, 11, (10, 11)),
    ],
)
def test_lengths_grow_by_one_factor_from_shortest_to_longest(shortest, longest, lengths):
    assert choose_lengths(DataSection(min_length=shortest, max_length=longest)) == lengths


def test_every_task_is_drawn_as_often_at_every_length(prompts):
    drawn = [(prompt.length, prompt.task) for prompt in prompts]
    expected = [(n, task) for n in choose_lengths(DATA) for task in ("retrieval", "multi_value")]
    assert drawn == [case for case in expected for _ in range(2)]
    for prompt in prompts:
        assert 0.7 * prompt.length < len(prompt.input_ids) < prompt.length
    assert len({tuple(prompt.input_ids.tolist()) for prompt in prompts}) == len(prompts)


def test_tasks_are_compared_over_all_lengths_and_lengths_over_all_tasks(subject, prompts):
    mask = torch.ones(4, 4, 64, dtype=torch.bool)
    mask[0, 1] = mask[2, 3] = False
    found = measure_model(subject.model, ChannelMask(mask), prompts)
    norms, ratios = {}, []
    for prompt in prompts:
        statistics = measure_attention(subject.model, prompt.input_ids)
        norms.setdefault(prompt.task, []).append(statistics.channel_norms)
        norms.setdefault(prompt.length, []).append(statistics.channel_norms)
        ratios.append(statistics.high_frequency_ratio)
    means = {key: sum(values) / len(values) for key, values in norms.items()}
    for keys, table in ((found.tasks, found.between_tasks), (found.lengths, found.between_lengths)):
        for row, one in enumerate(keys):
            for column, other in enumerate(keys):
                pair = torch.stack([means[one].flatten(), means[other].flatten()]).double()
                assert table[row][column] == pytest.approx(torch.corrcoef(pair)[0, 1].item(), abs=1e-5)
    assert found.num_samples == 2
    ratio = sum(ratios) / len(ratios)
    torch.testing.assert_close(found.high_frequency_ratio, ratio)
    assert found.ratio_of_empty == pytest.approx((ratio[0, 1] + ratio[2, 3]).item() / 2, rel=1e-5)
    others = ratio.sum() - ratio[0, 1] - ratio[2, 3]
    assert found.ratio_of_others == pytest.approx(others.item() / 14, rel=1e-5)


def test_a_layer_without_rotation_has_no_ratio_and_counts_in_no_mean(subject, prompts, monkeypatch):
    mask = ChannelMask(torch.ones(4, 4, 64, dtype=torch.bool))
    whole = measure_model(subject.model, mask, prompts[:1])
    monkeypatch.setattr(subject.model.model.layers[3].self_attn, "use_rope", False, raising=False)
    found = measure_model(subject.model, mask, prompts[:1])
    assert found.high_frequency_ratio[3].isnan().all()
    assert found.ratio_of_others == pytest.approx(whole.high_frequency_ratio[:3].mean().item(), rel=1e-6)
    ratios = found.to_dict()["high_frequency_ratio"]
    assert ratios == [*whole.to_dict()["high_frequency_ratio"][:3], None]
    axes = Figure().subplots()
    draw_ratio_by_width(axes, found.high_frequency_ratio, mask.channel_mask.sum(-1))
    assert axes.lines[0].get_xdata()[0] == pytest.approx(found.ratio_of_others)


def test_of_a_mask_with_a_mean_keys_are_measured_as_they_are_cached(subject, prompts):
    channels = torch.ones(4, 4, 64, dtype=torch.bool)
    mean = (5 * torch.randn(4, 4, 64, generator=torch.Generator().manual_seed(0))).half()
    plain, zero, centred = (
        measure_model(subject.model, ChannelMask(channels, key_mean=one), prompts[:1])
        for one in (None, torch.zeros_like(mean), mean)
    )
    assert plain.high_frequency_ratio.equal(zero.high_frequency_ratio)
    expected = measure_attention(subject.model, prompts[0].input_ids, mean).high_frequency_ratio
    assert centred.high_frequency_ratio.equal(expected)
    assert (centred.high_frequency_ratio - plain.high_frequency_ratio).abs().max() > 0.1
    assert (plain.centred, centred.centred) == (False, True)
    assert centred.to_dict()["key_mean"] is True


@pytest.mark.parametrize("kept", [False, True], ids=["no channels", "all channels"])
def test_a_mean_over_no_heads_is_left_out(subject, prompts, kept):
    found = measure_model(subject.model, ChannelMask(torch.full((4, 4, 64), kept)), prompts[:1])
    assert (found.ratio_of_empty is None, found.ratio_of_others is None) == (kept, not kept)
    assert found.between_tasks == ((pytest.approx(1),),)
