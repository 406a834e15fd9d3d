"""A whole short run: what it leaves behind and refuses, also of a model that is half linear attention."""

import shutil
from itertools import count

import pytest
import torch
import yaml
from transformers import Cache

from leank_convert.data import SampleSource
from leank_convert.mask import save_mask
from leank_convert.methods import calibration
from leank_convert.methods.make import train_mask
from leank_convert.recipe import Recipe
from leank_convert.train import key_mean, model, passes, selection
from leank_convert.train.graphs import Gradients, is_bound_by_host
from leank_convert.train.model import count_bytes, find_model
from leank_convert.train.selection import select_channels
from leank_convert.train.state import TrainingDirectory, load_state
from tests.checks import edit_json, edit_tensors, refusal, short_recipe
from tests.leank_convert.train.conftest import fail_at, logged_steps
from tests.tiny_families import TRAINS_LINEAR


def test_run_leaves_a_mask_a_log_a_report_and_the_resolved_recipe(finished):
    assert sorted(path.name for path in finished.iterdir()) == ["channel_mask.safetensors", "leank"]
    folder = finished / "leank"
    left = ["log.jsonl", "recipe.yaml", "report.html", "state"]
    assert sorted(path.name for path in folder.iterdir()) == left
    assert "<html" in (folder / "report.html").read_text()
    resolved = Recipe(**yaml.safe_load((folder / "recipe.yaml").read_text()))
    assert resolved.model_dump() == short_recipe().model_dump()
    assert [path.name for path in (folder / "state").iterdir()] == ["training_state.pt"]


def test_mask_is_the_selection_from_the_final_factors_with_provenance(
    train_one, tmp_path, retriever_folder, monkeypatch
):
    text = (
        "# a note\nmodel: {id: retriever}\nwidth_multiple: 4\npruning_ratio: 0.6\n"
        "windows: {sink_size: 4, recent_size: 16, flush_size: 2}\nseed: 5\n"
        "data: {wording: testbed, min_length: 200, max_length: 220}\nstage1: {steps: 3}\nstage2: {steps: 2}\n"
        "trackers: []\n"
    )
    (tmp_path / "r.yaml").write_text(text)
    monkeypatch.chdir(retriever_folder.parent)
    mask = train_one(tmp_path / "r.yaml", tmp_path / "out", model="retriever")
    expected = select_channels(mask.scaling_factors, pruning_ratio=0.6, width_multiple=4)
    assert torch.equal(mask.channel_mask, expected)
    known = mask.provenance
    assert (known.model, known.method, known.recipe, known.seed) == ("retriever", "leank", text, 5)
    assert (known.pruning_ratio_asked, known.width_multiple) == (0.6, 4)
    assert (known.sink_size, known.recent_size, known.flush_size) == (4, 16, 2)
    assert (known.num_hidden_layers, known.num_attention_heads, known.num_key_value_heads) == (2, 4, 2)


def test_log_has_a_row_per_step_of_both_stages(finished, testbed_tokenizer):
    recipe, rows = short_recipe(), logged_steps(finished)
    assert [row["step"] for row in rows] == list(range(1, 14))
    assert [row["stage"] for row in rows] == [1] * 7 + [2] * 6
    assert [row["task"] for row in rows[:3]] == ["retrieval", "multi_value", "retrieval"]
    # A fresh sample at every step, in stage 2 too.
    samples = SampleSource(testbed_tokenizer, recipe.data, recipe.seed)
    assert [row["num_tokens"] for row in rows] == [samples.draw(step).num_tokens for step in range(13)]
    assert all(row["distillation"] >= 0 for row in rows)
    assert {row["pruning_ratio"] for row in rows[:7]} == {None}
    assert all(0.6 < row["pruning_ratio"] < 0.8 for row in rows[7:])
    assert rows[0]["mean_factor"] == 1
    assert rows[0]["distillation"] < 1e-10
    # Half of stage 1's rate, and each stage with its own ramp.
    assert rows[3]["learning_rate"] == pytest.approx(0.1)
    assert rows[-1]["learning_rate"] == pytest.approx(0.05 / 1.2)


def test_factors_stay_between_zero_and_one_and_the_penalty_presses_them_down(train_one, tmp_path):
    recipe = short_recipe(stage1={"steps": 20, "learning_rate": 0.3, "l1_weight": 5.0})
    factors = train_one(recipe, tmp_path).scaling_factors
    assert factors.min() == 0
    assert factors.max() <= 1
    assert logged_steps(tmp_path)[19]["mean_factor"] < 0.5


def test_stage_two_moves_pruned_channels_but_nothing_moves_heads_without_any(
    train_one, tmp_path, monkeypatch
):
    """Straight through for heads that see the middle; neither gradient nor penalty for those that do not."""
    kept = torch.zeros(2, 2, 16, dtype=torch.bool)
    kept[0, 0, :4] = kept[1, 1, 8:] = True
    monkeypatch.setattr(selection, "select_channels", lambda factors, **_: kept)
    factors, stage1 = [], {"steps": 7, "learning_rate": 0.03}
    for steps in (0, 4):
        recipe = short_recipe(stage1=stage1, stage2={"steps": steps, "learning_rate": 0.01})
        factors.append(train_one(recipe, tmp_path / str(steps)).scaling_factors)
    moved = factors[0] != factors[1]
    assert moved[0, 0, 4:].float().mean() > 0.5
    assert moved[1, 1, :8].float().mean() > 0.5
    assert not moved[0, 1].any()
    assert not moved[1, 0].any()


def test_loss_that_is_not_finite_stops_the_run_and_keeps_the_state(
    train_one, finished_mask, tmp_path, monkeypatch
):
    original, steps = passes.distillation_loss, count(1)

    def failing(*given):
        return original(*given) * (float("nan") if next(steps) == 5 else 1.0)

    recipe = short_recipe()
    with monkeypatch.context() as patched:
        patched.setattr(passes, "distillation_loss", failing)
        with refusal("step 5: the loss is nan and not finite", exit_code=1):
            train_one(recipe, tmp_path)
    state = load_state(TrainingDirectory(tmp_path).state)
    assert state.step == 4
    assert torch.isfinite(state.scaling_factors).all()
    assert len(logged_steps(tmp_path)) == 4
    resumed = train_one(recipe, tmp_path, resume=True)
    assert torch.equal(resumed.scaling_factors, finished_mask.scaling_factors)


def test_bfloat16_weights_train_with_float32_factors(train_one, tmp_path):
    factors = train_one(short_recipe(model={"dtype": "bfloat16"}), tmp_path).scaling_factors
    assert factors.dtype == torch.float32
    assert (factors != factors.bfloat16()).any()


def test_mask_of_a_checkpoint_is_left_to_the_export(train_one, finished, finished_mask, tmp_path):
    """config.json holds the mask's digest; a resumed run returns what it would have written."""
    recipe, out = short_recipe(), shutil.copytree(finished, tmp_path / "out")
    (out / "config.json").write_text("{}")
    with refusal("holds a model, beside which no mask is written"):
        train_one(recipe, out, resume=True)
    (out / "config.json").write_text('{"leank": {}}')
    path = out / "channel_mask.safetensors"
    save_mask(finished_mask.noting(evaluation="of an export"), path)
    before = path.read_bytes()
    again = train_one(recipe, out, resume=True)
    assert path.read_bytes() == before
    assert torch.equal(again.channel_mask, finished_mask.channel_mask)
    (out / "config.json").unlink()
    train_one(recipe, out, resume=True)
    assert path.read_bytes() == (finished / path.name).read_bytes()


@pytest.fixture
def linear_folder(speaking_folder):
    return speaking_folder("qwen3_5_text")


@pytest.mark.skipif(not TRAINS_LINEAR, reason="this release of transformers is too old")
def test_a_run_learns_validates_and_answers_held_out_samples(linear_folder, tmp_path):
    base = short_recipe()
    recipe = short_recipe(
        data={**base.data.model_dump(), "questions_per_context": 2},
        stage2={**base.stage2.model_dump(), "validation_contexts": 2},
    )
    mask = train_mask(linear_folder, tmp_path / "out", recipe=recipe, device="cpu", progress=False)
    assert mask.channel_mask.shape == (2, 2, 16) and mask.provenance.layers == [1, 3]
    assert mask.scaling_factors.std() > 0.01
    steps = logged_steps(tmp_path / "out")
    assert len(steps) == 7 + 6 and steps[-1]["distillation"] > 0
    assert mask.provenance.held_out.distillation > 0


def test_padding_would_go_into_a_state_so_nothing_is_captured(linear_folder, load, monkeypatch):
    recipe, (loaded, _) = short_recipe(), load(linear_folder)
    monkeypatch.setattr(type(loaded.model), "device", torch.device("cuda"))
    assert not is_bound_by_host(loaded.model, recipe.data.max_length)
    assert not Gradients(loaded.model, loaded.facts, recipe.data.max_length).captures


def test_the_context_of_a_forecast_is_that_of_layers_with_full_attention(linear_folder):
    recipe = short_recipe()
    found = count_bytes(find_model(linear_folder, recipe), recipe, torch.device("cpu"))
    assert found["context"] == 2 * 2 * 2 * 16 * 280 * 4


def test_an_older_transformers_is_refused(linear_folder, tmp_path, monkeypatch):
    monkeypatch.delattr(Cache, "get_recurrent_state", raising=False)
    with refusal(r"layers with linear attention, and transformers 5\.\S+ is too old"):
        train_mask(linear_folder, tmp_path / "out", recipe=short_recipe(), device="cpu", progress=False)
    find_model(linear_folder, short_recipe())  # `analyze --model` runs no questions


NO_HEAD = {"method": "duo-attention+leank", "heads": {"pruning_ratio": 0.9}, "pruning_ratio": 0.95}


def lengths(shortest, longest):
    return {"data": {"wording": "testbed", "min_length": shortest, "max_length": longest}}


@pytest.mark.parametrize(
    ("changes", "options", "message", "remedy"),
    [
        (lengths(200, 513), {}, "`data.max_length` 513 exceeds the 512 positions", "config_overrides"),
        (lengths(64, 500), {}, "no sample of 64 tokens", ""),
        ({"width_multiple": 7}, {}, "`width_multiple` 7 does not divide the model's `head_dim` 16", "as 8"),
        (NO_HEAD, {}, "`heads.pruning_ratio` 0.9 leaves none of 4 heads", ""),
        ({}, {"device": "foo"}, "device `foo` cannot be used", ""),
    ],
)
def test_what_does_not_go_is_refused_before_anything_is_written(
    changes, options, message, remedy, train_one, tmp_path
):
    with refusal(message, remedy):
        train_one(short_recipe(**changes), tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "unknown architecture"),
        ({"pad_token_id": 999}, "config.json` is refused by transformers: Padding_idx must be within"),
        ({"intermediate_size": 64}, r"`model.layers.0.mlp.down_proj.weight` is \[32, 48\] .* \[32, 6"),
        ("a tensor is missing", r"`model.layers.1.self_attn.k_proj.weight`"),
        ("no tokenizer", r"the tokenizer of `.*` cannot be loaded"),
    ],
    ids=str,
)
def test_a_model_that_cannot_be_trained_is_refused(
    change, message, train_one, copy_of, retriever_folder, tmp_path
):
    copied = copy_of(retriever_folder)
    if isinstance(change, dict):
        edit_json(copied / "config.json", **change)
    elif change == "no tokenizer":
        for path in copied.iterdir():
            if path.name not in ("config.json", "model.safetensors"):
                path.unlink()
    else:
        edit_tensors(copied / "model.safetensors", **{"model.layers.1.self_attn.k_proj.weight": None})
    with refusal(message):
        train_one(short_recipe(), tmp_path / "out", model=copied)


@pytest.mark.parametrize("resume", [False, True])
def test_mask_of_another_origin_is_not_replaced(train_one, resume, tmp_path):
    path = tmp_path / "channel_mask.safetensors"
    path.write_bytes(b"somebody's")
    with refusal(r"channel_mask.safetensors` exists and is not of a run", "another folder"):
        train_one(short_recipe(), tmp_path, resume=resume)
    assert [path.name for path in tmp_path.iterdir()] == ["channel_mask.safetensors"]
    assert path.read_bytes() == b"somebody's"


@pytest.mark.parametrize(
    ("owner", "name", "changes", "message", "remedy"),
    [
        (model, "_load_weights", {}, "for the weights of model `.*`: CUDA out of", "model.device_map=auto"),
        (key_mean, "run_context_pass", {}, r"for a context of \d+ tokens", "key_mean=false"),
        (
            calibration,
            "measure_attention",
            {"method": "static-norm"},
            "for prompts of up to 280 tokens in model",
            "`data.max_length`",
        ),
    ],
    ids=["weights", "context", "prompt"],
)
def test_memory_that_does_not_suffice_is_told_with_what_to_change(
    owner, name, changes, message, remedy, train_one, tmp_path
):
    failure = fail_at(owner, name, 1, torch.OutOfMemoryError("CUDA out of memory.\nmore"))
    with refusal(message, remedy, exit_code=1), failure:
        train_one(short_recipe(**changes), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_weights_that_cannot_be_read_are_refused(train_one, copy_of, retriever_folder, tmp_path, monkeypatch):
    """The shard is cut between the check of its header and its reading."""
    original, copied = model.open_checkpoint, copy_of(retriever_folder)

    def cut_after(path):
        opened, shard = original(path), copied / "model.safetensors"
        shard.write_bytes(shard.read_bytes()[:-100])
        return opened

    monkeypatch.setattr(model, "open_checkpoint", cut_after)
    with refusal(rf"the weights of model `{copied}` cannot be read: ."):
        train_one(short_recipe(), tmp_path / "out", model=copied)
