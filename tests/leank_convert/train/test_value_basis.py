"""The basis of V that a run ends with: what is measured, what is chosen by it, where it ends up."""

import re

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from leank_convert.errors import LeanKError
from leank_convert.mask import ChannelMask, load_mask
from leank_convert.recipe import Recipe
from leank_convert.train import graphs, value_basis
from leank_convert.train.choice import choose_recipe
from leank_convert.train.held_out import compare_answers
from leank_convert.train.key_mean import measure_keys
from leank_convert.train.log import LOG_NAME, read_log
from leank_convert.train.schedule import Schedule
from leank_convert.train.split_attention import Student
from leank_convert.train.state import TrainingDirectory, fingerprint_run, load_state
from leank_convert.train.value_basis import ValueBasis, choose_value_widths, measure_values
from leank_convert.windows import Windows
from tests.checks import provenance_for, refusal, short_recipe
from tests.leank_convert.train.conftest import fail_at, stock_attention, stock_cache

WINDOWS = Windows(4, 16)


def naive_moments(loaded, contexts, num_queries):
    """Sums of o oT, one query and one query head after the other, from transformers' own weights."""
    layers, heads, head_dim = loaded.facts.mask_shape
    groups = loaded.facts.num_key_value_groups
    sums = torch.zeros(layers, heads, head_dim, head_dim, dtype=torch.float64)
    for ids in contexts:
        cache = DynamicCache(config=loaded.model.config)
        with torch.no_grad(), stock_attention(loaded.model):
            found = loaded.model.base_model(ids[None], cache=cache, output_attentions=True)
        for place, layer in enumerate(loaded.facts.layers):
            values = cache.layers[layer].values[0].double()
            for head, weights in enumerate(found.attentions[layer][0].double()):
                for position in range(len(ids) - num_queries, len(ids)):
                    stop = max(position - WINDOWS.recent_size, WINDOWS.sink_size)
                    seen = slice(WINDOWS.sink_size, stop)
                    output = weights[position, seen] @ values[head // groups, seen]
                    sums[place, head // groups] += torch.outer(output, output)
    return sums


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
@pytest.mark.parametrize("offload", [False, True])
def test_directions_are_those_of_what_pruned_tokens_add_to_outputs(
    load, speaking_folder, family, offload, monkeypatch
):
    monkeypatch.setattr(value_basis, "_NUM_QUERIES", 21)
    monkeypatch.setattr(value_basis, "_QUERIES_AT_ONCE", 8)
    monkeypatch.setattr(value_basis, "NUM_CONTEXTS", 2)
    monkeypatch.setattr("leank_convert.train.passes.BLOCK_SIZE", 90)  # the last block is of fewer
    models = [] if family == "llama" else [speaking_folder(family)]
    loaded, samples = load(*models, offload_context=offload)
    found = measure_values(loaded, samples, WINDOWS)
    contexts = [samples.draw(place).prompt_ids() for place in range(2)]
    expected = naive_moments(loaded, contexts, 21)
    basis = found.directions.double()
    rotated = basis.mT @ expected @ basis
    scale = float(expected.abs().max())
    torch.testing.assert_close(rotated, torch.diag_embed(found.energies), rtol=0, atol=1e-5 * scale)
    identity = torch.eye(basis.shape[-1], dtype=torch.float64).expand_as(basis)
    torch.testing.assert_close(basis.mT @ basis, identity, rtol=0, atol=1e-6)
    assert bool((found.energies.diff(dim=-1) <= 0).all())
    assert found.num_tokens == sum(map(len, contexts))


def test_every_other_context_is_text_of_the_recipe_or_else_of_python(load, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("The harbour master keeps a book of all ships. " * 200)
    data, drawn, digests = short_recipe().data.model_dump(), [], []
    for changes in ({}, {"wording": "general"}, {"haystack": {"source": str(text)}}):
        recipe = short_recipe(data={**data, **changes}, value_pruning_ratio=0.5)
        loaded, samples = load(**recipe.model_dump(include={"data", "value_pruning_ratio"}))
        ids = samples.draw_text(1)
        # Another release of Python has another documentation: a run does not go on with it.
        digests.append(fingerprint_run(recipe, loaded, samples).get("data: text"))
        assert 200 <= len(ids) <= 280 and torch.equal(ids, samples.draw_text(1))
        # Other threads encode by the same tokenizer, and would be cut by a length that is set in it.
        assert loaded.tokenizer.backend_tokenizer.truncation is None
        parts = [samples.draw(place).prompt_ids() for place in range(4 if changes else 8)]  # all tasks
        parts += [samples.draw_text(place) for place in (1, 3, 5, 7) if changes]
        assert measure_values(loaded, samples, WINDOWS).num_tokens == sum(map(len, parts))
        drawn.append(ids)
    assert not torch.equal(drawn[1], drawn[2])
    assert digests[0] is None and digests[1] != digests[2]


def test_directions_are_chosen_by_rank_over_the_model():
    energies = torch.tensor(
        [
            [[4.0, 3.0, 2.0, 1.0], [8.0, 1.0, 0.5, 0.5]],  # of 20
            [[60.0, 10.0, 5.0, 5.0], [10.0, 10.0, 0.0, 0.0]],  # of 100; its second head keeps no K
        ],
        dtype=torch.float64,
    )
    sees = torch.tensor([[True, True], [True, False]])
    shares = energies / energies.sum((1, 2))[:, None, None]
    for ratio, widths in (
        (0.0, [[4, 4], [4, 0]]),
        (0.25, [[4, 4], [4, 0]]),  # what heads without K remove already
        (0.5, [[4, 2], [2, 0]]),  # of equal parts the first in the order of layers, heads and directions
        (0.69, [[2, 1], [1, 0]]),
        (0.9, [[0, 0], [1, 0]]),
    ):
        assert choose_value_widths(shares, sees, ratio).tolist() == widths
    nothing = choose_value_widths(torch.zeros(1, 2, 64, dtype=torch.float64), torch.ones(1, 2).bool(), 0.5)
    assert nothing.tolist() == [[64, 0]]


def test_what_cannot_be_measured_is_refused(load):
    loaded, samples = load()
    with refusal("no context has tokens between sink and recent window, 4 and 4000"):
        measure_values(loaded, samples, Windows(4, 4000))
    with torch.no_grad():
        loaded.model.model.layers[1].self_attn.v_proj.weight[3] = float("inf")
    with refusal(r"outputs in model `.*` are not finite on a context of", exit_code=1):
        measure_values(loaded, samples, WINDOWS)


def test_v_of_a_model_with_gates_is_measured_too(speaking_folder, train_one, tmp_path):
    recipe = short_recipe(value_pruning_ratio=0.5, method="static-norm")
    mask = train_one(recipe, tmp_path, model=speaking_folder("qwen3_5_text"))
    assert mask.value_basis is not None and 0.3 < mask.value_pruning_ratio <= 0.6


def test_directions_may_be_chosen_by_what_was_learned_of_them(load):
    """Energies tell those of one factor apart; the basis has a head's best directions first."""
    loaded, samples = load(value_pruning_ratio=0.5)
    found, head_dim = measure_values(loaded, samples, WINDOWS), loaded.facts.head_dim
    factors = torch.zeros(loaded.facts.mask_shape)
    factors[..., 1::2] = 1.0  # every second, and of one head all
    factors[0, 0] = 0.9
    every = torch.ones(loaded.facts.mask_shape, dtype=torch.bool)
    pruned = found.prune(ChannelMask(every, provenance=provenance_for(loaded.facts)), 0.5, factors)
    order = [*range(1, head_dim, 2), *range(0, head_dim, 2)]
    basis = found.directions[..., order]
    basis[0, 0] = found.directions[0, 0]
    assert torch.equal(pruned.value_basis, basis)
    widths = torch.full(factors.shape[:2], head_dim // 2)
    assert torch.equal(pruned.value_widths[1:], widths[1:].int())


def test_gates_of_v_are_learned_on_every_task_and_on_text_whatever_other_ratios_are_asked_for():
    found = []
    for ratios in (0.7, (0.5, 0.7)):
        schedule = Schedule(Recipe(pruning_ratio=ratios, value_pruning_ratio=0.5, batch_size=2))
        last = schedule.phases[-1]
        assert (last.stage, last.pruning_ratio) == (3, 0.7)
        found.append([*schedule.sample_indices(last.start)])
    assert found[0] == found[1] and len(found[0]) == 480
    texts, tasks = [~index for index in found[0] if index < 0], [index for index in found[0] if index >= 0]
    assert texts == tasks == [*range(tasks[0], tasks[0] + 240)]


def test_a_run_learns_directions_and_the_same_ones_after_a_kill(train_one, tmp_path):
    steps = short_recipe().stage1.steps + short_recipe().stage2.steps
    recipe = short_recipe(value_pruning_ratio=0.5, values={"steps": 4, "l1_weight": 1.0}, save_every=3)
    whole = train_one(recipe, tmp_path / "whole")
    records = read_log(TrainingDirectory(tmp_path / "whole").folder / LOG_NAME)
    assert [record.stage for record in records[steps:]] == [3] * 4
    assert records[-1].mean_factor < records[steps].mean_factor == 1
    state = load_state(TrainingDirectory(tmp_path / "whole").state)
    (factors,), (channels,) = state.finished_values, state.finished
    assert torch.equal(whole.scaling_factors, channels) and float(factors.std()) > 0
    assert whole.stores_alike(ValueBasis(**state.values).prune(whole, 0.5, factors))
    with fail_at(graphs, "distil", steps + 2, KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
        train_one(recipe, tmp_path / "killed")
    assert train_one(recipe, tmp_path / "killed", resume=True).stores_alike(whole)


@pytest.mark.parametrize("source", ["ours", "foreign"])
def test_v_is_learned_beside_a_mask_whose_channels_stay(source, train_one, tmp_path):
    """By the mask's own ratio, windows and mean of keys, whatever the recipe says of them."""
    given = train_one(short_recipe(pruning_ratio=0.5, key_mean=source == "ours"), tmp_path / "given")
    path = tmp_path / "given" / "channel_mask.safetensors"
    if source == "foreign":
        given = ChannelMask(given.channel_mask)
        np.save(path := tmp_path / "mask.npy", given.channel_mask.numpy())
    changes = {"value_pruning_ratio": 0.6, "values": {"steps": 4, "l1_weight": 1.0}, "save_every": 3}
    windows = {"sink_size": 5, "recent_size": 24, "flush_size": 8}
    # What K's method would ask for does not matter.
    changes |= {"method": "duo-attention+leank", "heads": {"pruning_ratio": 0.6}, "pruning_ratio": 0.7}
    recipe = short_recipe(mask=str(path), windows=windows, **changes)
    with fail_at(graphs, "distil", 2, KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
        train_one(recipe, tmp_path / "out")
    found = train_one(recipe, tmp_path / "out", resume=True)
    assert [record.stage for record in read_log(tmp_path / "out" / "leank" / LOG_NAME)] == [3] * 4
    assert torch.equal(found.channel_mask, given.channel_mask) and found.value_pruning_ratio >= 0.6
    assert (found.key_mean is None) == (source == "foreign")
    assert found.key_mean is None or torch.equal(found.key_mean, given.key_mean)
    known = found.provenance
    assert "# V's directions were learned beside this mask" in known.recipe
    own = given.provenance
    sizes = windows if own is None else {name: getattr(own, name) for name in windows}
    assert {name: getattr(known, name) for name in windows} == sizes
    assert known.method == ("imported" if own is None else "leank")
    asked = (known.pruning_ratio_asked, known.width_multiple, known.seed)
    assert asked == ((None,) * 3 if own is None else (0.5, own.width_multiple, own.seed))
    again = choose_recipe(None, "a/b", run=tmp_path / "out", training=True)
    assert again.pruning_ratio == pytest.approx(given.pruning_ratio if own is None else 0.5, abs=1e-3)
    np.save(tmp_path / "other.npy", ~given.channel_mask.numpy())
    other = recipe.model_copy(update={"mask": str(tmp_path / "other.npy")})
    with pytest.raises(LeanKError, match="was saved by another run:\n  mask was"):
        train_one(other, tmp_path / "out", resume=True)


BESIDE = "is given beside mask 'testbed-70', whose"


@pytest.mark.parametrize(
    "overrides, message, hint",
    [
        (["value_pruning_ratio=0"], "nothing is to be trained", "set `value_pruning_ratio`"),
        (["values.steps=0"], "nothing is to be trained", "set `values.steps`"),
        (["pruning_ratio=0.9"], f"`pruning_ratio` {BESIDE} own is 0.7", "leave"),
        (["windows.sink_size=4"], f"`windows.sink_size` {BESIDE} own is 16", ""),
        *(
            ([f"{key}={value}"], f"`{key}` {BESIDE} channels of K stay", "leave")
            for key, value in (("key_mean", "false"), ("method", "random"), ("stage1.steps", 9))
        ),
    ],
)
def test_what_does_not_go_with_a_mask_is_refused(overrides, message, hint):
    asked = ["mask=testbed-70", "value_pruning_ratio=0.5", *overrides]
    with refusal(re.escape(message), hint):
        choose_recipe("quickstart", "testbed", overrides=asked, training=True)


def test_windows_of_a_mask_have_to_go_with_the_recipes_lengths():
    windows = {"sink_size": 1, "recent_size": 2, "flush_size": 1}
    data = {"wording": "testbed", "tasks": ["retrieval"], "min_length": 70, "max_length": 80}
    recipe = Recipe(mask="testbed-70", value_pruning_ratio=0.5, windows=windows, data=data)
    with refusal(r"with mask testbed-70`: `data\.max_length` 80 leaves nothing"):
        choose_recipe(recipe, "testbed", training=True)


def test_a_run_without_gates_of_v_chooses_by_energy_and_measures_it_once(train_one, load, tmp_path):
    recipe = short_recipe(value_pruning_ratio=0.5, values={"steps": 0})
    whole = train_one(recipe, tmp_path / "whole")
    expected = measure_values(*load(), WINDOWS)
    saved = load_mask(TrainingDirectory(tmp_path / "whole").mask)
    known = saved.provenance
    assert all(torch.equal(saved.value_basis, basis) for basis in (expected.directions, whole.value_basis))
    assert known.value_pruning_ratio_asked == 0.5 and known.value_weights == expected.weights
    assert known.value_tokens == expected.num_tokens and saved.value_pruning_ratio >= 0.5
    assert saved.stores_alike(expected.prune(saved, 0.5))
    with fail_at(value_basis, "_add_moments", 1, AssertionError):  # it is not measured twice
        assert train_one(recipe, tmp_path / "whole", resume=True).stores_alike(whole)
    path = str(TrainingDirectory(tmp_path / "whole").mask)  # nor learned again
    with refusal(f"prunes V already, {whole.value_pruning_ratio:.1%} of it"):
        train_one(short_recipe(mask=path, value_pruning_ratio=0.5), tmp_path / "out")


def test_held_out_answers_lose_what_the_cache_loses(load):
    loaded, samples = load()
    sample = samples.draw(0)
    found = measure_values(loaded, samples, WINDOWS)
    layers, heads, head_dim = loaded.facts.mask_shape
    every = torch.ones(layers, heads, head_dim)

    def lost(factors):
        of_values = {"value_basis": found.directions, "value_factors": factors}
        student = Student(WINDOWS, every, every.any(-1), **of_values)
        return compare_answers(loaded.model, sample, [student]).distillation[0]

    half = torch.where(torch.arange(head_dim) < 8, every, 0.0)
    assert lost(every) < 1e-9 < 1e-3 * lost(half) < 1e-3 * lost(torch.zeros_like(every))


def test_scales_are_of_values_as_they_are_stored(load):
    loaded, samples = load()
    basis = measure_values(loaded, samples, WINDOWS).directions
    _, values = stock_cache(loaded, samples.draw(0).prefix_ids)
    found = measure_keys(loaded, samples, 1, value_basis=basis).largest_value
    torch.testing.assert_close(found, (values @ basis).abs().amax(2), rtol=1e-4, atol=1e-5)
