"""A whole short run: what it leaves behind, and what it refuses."""

import csv
import gc
import json
import re
import weakref
from dataclasses import replace

import accelerate
import pytest
import torch
import yaml

from leank_convert.data import SampleSource
from leank_convert.errors import LeanKError
from leank_convert.mask import load_mask
from leank_convert.recipe import Recipe
from leank_convert.recipe_file import load_recipe
from leank_convert.testbed.tokenizer import build_tokenizer
from leank_convert.train import TrainingDirectory, loop, run, step, train_masks
from leank_convert.train.selection import select_channels
from leank_convert.train.state import load_state
from leank_convert.train.subject import load_subject

SHORT_DATA = {"wording": "testbed", "min_length": 240, "max_length": 300}


def train_one(recipe, out, **options):
    """The only mask of a run."""
    options = {"progress": False, **options}
    return train_masks(recipe, out, **options)[out]


def test_run_leaves_a_mask_a_log_events_a_report_and_the_resolved_recipe(
    short_recipe, retriever_folder, tmp_path
):
    recipe = short_recipe()
    mask = train_one(recipe, tmp_path, model_override=str(retriever_folder))
    folder = tmp_path / "leank"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["channel_mask.safetensors", "leank"]
    assert "<html" in (folder / "report.html").read_text()
    assert Recipe(**yaml.safe_load((folder / "recipe.yaml").read_text())).model_dump() == recipe.model_dump()
    assert [path.name for path in (folder / "state").iterdir()] == ["training_state.safetensors"]
    saved = load_mask(tmp_path / "channel_mask.safetensors")
    assert torch.equal(saved.channel_mask, mask.channel_mask)
    assert torch.equal(saved.scaling_factors, mask.scaling_factors)


def test_mask_is_the_selection_from_the_final_factors_with_provenance(
    tmp_path, retriever_folder, monkeypatch
):
    text = (
        "# a note\nmodel: {id: retriever}\nwidth_multiple: 4\npruning_ratio: 0.6\n"
        "windows: {sink_size: 4, recent_size: 16, flush_size: 2}\nseed: 5\n"
        "data: {wording: testbed, min_length: 200, max_length: 220}\nstage1: {steps: 3}\nstage2: {steps: 2}\n"
    )
    (tmp_path / "r.yaml").write_text(text)
    monkeypatch.chdir(retriever_folder.parent)
    mask = train_one(load_recipe(tmp_path / "r.yaml"), tmp_path / "out")
    expected = select_channels(mask.scaling_factors, pruning_ratio=0.6, width_multiple=4)
    assert torch.equal(mask.channel_mask, expected)
    known = mask.provenance
    assert (known.model, known.method, known.recipe, known.seed) == ("retriever", "leank", text, 5)
    assert (known.pruning_ratio_asked, known.width_multiple) == (0.6, 4)
    assert (known.sink_size, known.recent_size, known.flush_size) == (4, 16, 2)
    assert (known.num_hidden_layers, known.num_attention_heads, known.num_key_value_heads) == (2, 4, 2)


def read_log(out):
    with (out / "leank" / "log.csv").open() as file:
        return list(csv.DictReader(file))


def test_log_has_a_row_per_step_of_both_stages(short_recipe, retriever_folder, tmp_path):
    recipe = short_recipe()
    train_one(recipe, tmp_path, model_override=str(retriever_folder))
    rows = read_log(tmp_path)
    assert [int(row["step"]) for row in rows] == list(range(1, 14))
    assert [row["stage"] for row in rows] == ["1"] * 7 + ["2"] * 6
    assert [row["task"] for row in rows[:3]] == ["retrieval", "multi_value", "retrieval"]
    assert all(150 <= int(row["num_tokens"]) <= 280 for row in rows)
    # A fresh sample at every step, in stage 2 too.
    samples = SampleSource(build_tokenizer(), recipe.data, recipe.seed)
    assert [int(row["num_tokens"]) for row in rows] == [samples.draw(step).num_tokens for step in range(13)]
    assert all(float(row["distillation"]) >= 0 for row in rows)
    assert {row["pruning_ratio"] for row in rows[:7]} == {""}
    assert all(0.6 < float(row["pruning_ratio"]) < 0.8 for row in rows[7:])
    assert float(rows[0]["mean_factor"]) == 1
    assert float(rows[0]["distillation"]) < 1e-10
    # Half of stage 1's rate, and each stage with its own ramp.
    assert float(rows[3]["learning_rate"]) == pytest.approx(0.1)
    assert float(rows[-1]["learning_rate"]) == pytest.approx(0.05 / 1.2)


def test_tensorboard_reads_the_events(short_recipe, retriever_folder, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train_one(short_recipe(), tmp_path, model_override=str(retriever_folder))
    events = EventAccumulator(str(tmp_path / "leank" / "tensorboard")).Reload()
    assert [e.step for e in events.Scalars("stage1/distillation")] == list(range(1, 8))
    assert [e.step for e in events.Scalars("stage2/pruning_ratio")] == list(range(8, 14))


def test_heads_that_leave_and_enter_are_logged(short_recipe, retriever_folder, tmp_path, monkeypatch):
    """Head 0.1 is made to lose its channels in stage 2's second step and to have them back in the third."""
    calls = 0

    def scripted(factors, **_):
        nonlocal calls
        calls += 1
        mask = torch.ones(factors.shape, dtype=torch.bool)
        # Calls: set-up, stage 2's beginning, then one after each step.
        if calls == 4:
            mask[0, 1] = False
        return mask

    monkeypatch.setattr(run, "select_channels", scripted)
    train_one(short_recipe(stage1={"steps": 0}), tmp_path, model_override=str(retriever_folder))
    rows = read_log(tmp_path)
    assert [row["heads_leaving"] for row in rows] == ["", "0.1", "", "", "", ""]
    assert [row["heads_entering"] for row in rows] == ["", "", "0.1", "", "", ""]
    assert [row["empty_heads"] for row in rows] == ["0", "1", "0", "0", "0", "0"]


def test_factors_stay_between_zero_and_one_and_the_penalty_presses_them_down(
    short_recipe, retriever_folder, tmp_path
):
    recipe = short_recipe(stage1={"steps": 20, "learning_rate": 0.3, "l1_weight": 5.0})
    mask = train_one(recipe, tmp_path, model_override=str(retriever_folder))
    factors = mask.scaling_factors
    assert factors.min() == 0
    assert factors.max() <= 1
    assert float(read_log(tmp_path)[19]["mean_factor"]) < 0.5


def test_stage_two_is_clamped_too(short_recipe, retriever_folder, tmp_path):
    recipe = short_recipe(
        stage1={"steps": 3, "learning_rate": 0.1}, stage2={"steps": 6, "learning_rate": 0.9}
    )
    mask = train_one(recipe, tmp_path, model_override=str(retriever_folder))
    assert mask.scaling_factors.min() == 0
    assert mask.scaling_factors.max() == 1


def test_stage_two_moves_pruned_channels_but_nothing_moves_heads_without_any(
    short_recipe, retriever_folder, tmp_path, monkeypatch
):
    """Straight through for heads that see the middle; neither gradient nor penalty for those that do not."""
    kept = torch.zeros(2, 2, 16, dtype=torch.bool)
    kept[0, 0, :4] = kept[1, 1, 8:] = True
    monkeypatch.setattr(run, "select_channels", lambda factors, **_: kept)
    before, after = (
        train_one(
            short_recipe(
                stage1={"steps": 7, "learning_rate": 0.03}, stage2={"steps": steps, "learning_rate": 0.01}
            ),
            tmp_path / str(steps),
            model_override=str(retriever_folder),
        ).scaling_factors
        for steps in (0, 4)
    )
    moved = before != after
    assert moved[0, 0, 4:].float().mean() > 0.5
    assert moved[1, 1, :8].float().mean() > 0.5
    assert not moved[0, 1].any()
    assert not moved[1, 0].any()


def test_budget_rounding_never_ends_below_the_asked_ratio(short_recipe, retriever_folder, tmp_path):
    recipe = short_recipe(rounding="budget", pruning_ratio=0.55)
    mask = train_one(recipe, tmp_path, model_override=str(retriever_folder))
    assert mask.pruning_ratio == 1 - 28 / 64  # 28.8 of 64 channels, in fours


def test_loss_that_is_not_finite_stops_the_run_and_keeps_the_state(
    short_recipe, retriever_folder, tmp_path, monkeypatch
):
    steps = 0
    original = step.distillation_loss

    def failing(*given):
        nonlocal steps
        steps += 1
        return original(*given) * (float("nan") if steps == 5 else 1.0)

    recipe = short_recipe()
    with monkeypatch.context() as patched:
        patched.setattr(step, "distillation_loss", failing)
        with pytest.raises(LeanKError, match=r"step 5: the loss is nan and not finite") as caught:
            train_one(recipe, tmp_path / "a", model_override=str(retriever_folder))
    assert caught.value.exit_code == 1
    state = load_state(TrainingDirectory(tmp_path / "a").state)
    assert state.step == 4
    assert torch.isfinite(state.scaling_factors).all()
    assert len(read_log(tmp_path / "a")) == 4
    train_one(recipe, tmp_path / "a", resume=True, model_override=str(retriever_folder))
    train_one(recipe, tmp_path / "b", model_override=str(retriever_folder))
    assert (tmp_path / "a/channel_mask.safetensors").read_bytes() == (
        tmp_path / "b/channel_mask.safetensors"
    ).read_bytes()


def test_data_longer_than_the_models_positions_is_refused(short_recipe, retriever_folder, tmp_path):
    recipe = short_recipe(data={"wording": "testbed", "min_length": 200, "max_length": 513})
    with pytest.raises(LeanKError, match=r"`data.max_length` 513 exceeds the 512 positions") as caught:
        train_one(recipe, tmp_path / "out", model_override=str(retriever_folder))
    assert "config_overrides" in caught.value.hint
    assert not (tmp_path / "out").exists()


def test_length_without_room_for_a_task_is_refused_before_anything_is_written(
    short_recipe, retriever_folder, tmp_path
):
    recipe = short_recipe(data={"wording": "testbed", "min_length": 64, "max_length": 500})
    with pytest.raises(LeanKError, match="no sample of 64 tokens"):
        train_one(recipe, tmp_path / "out", model_override=str(retriever_folder))
    assert not (tmp_path / "out").exists()


def test_config_overrides_apply_to_the_model_and_the_provenance(short_recipe, retriever_folder, tmp_path):
    overrides = {
        "max_position_embeddings": 1024,
        "rope_parameters": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 512},
    }
    plain = train_one(short_recipe(), tmp_path / "a", model_override=str(retriever_folder))
    recipe = short_recipe(model={"config_overrides": overrides})
    yarn = train_one(recipe, tmp_path / "b", model_override=str(retriever_folder))
    assert yarn.provenance.rope_parameters["rope_type"] == "yarn"
    assert yarn.provenance.rope_parameters["factor"] == 2.0
    assert plain.provenance.rope_parameters["rope_type"] == "default"
    assert not torch.equal(plain.scaling_factors, yarn.scaling_factors)


def test_recipe_without_a_model_is_refused(short_recipe, tmp_path):
    with pytest.raises(LeanKError, match="names no model"):
        train_one(short_recipe(), tmp_path / "out")


def test_unsupported_family_is_refused(short_recipe, retriever_folder, tmp_path):
    for path in retriever_folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "gpt2"}))
    with pytest.raises(LeanKError, match="unknown architecture"):
        train_one(short_recipe(), tmp_path / "out", model_override=str(tmp_path))


def test_model_with_a_tensor_missing_is_refused(short_recipe, retriever_folder, tmp_path):
    from safetensors.torch import load_file, save_file

    for path in retriever_folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(LeanKError, match=r"`model.layers.1.self_attn.k_proj.weight`"):
        train_one(short_recipe(), tmp_path / "out", model_override=str(tmp_path))


def test_model_without_tokenizer_is_refused(short_recipe, retriever_folder, tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((retriever_folder / name).read_bytes())
    with pytest.raises(LeanKError, match="tokenizer of model"):
        train_one(short_recipe(), tmp_path / "out", model_override=str(tmp_path))


def test_multiple_wider_than_a_head_is_refused_before_anything_is_written(
    short_recipe, retriever_folder, tmp_path
):
    with pytest.raises(LeanKError, match="`width_multiple` 32 exceeds"):
        train_one(
            short_recipe(width_multiple=32),
            tmp_path / "out",
            model_override=str(retriever_folder),
        )
    assert not (tmp_path / "out").exists()


def test_bfloat16_weights_train_with_float32_factors(short_recipe, retriever_folder, tmp_path):
    recipe = short_recipe(model={"dtype": "bfloat16"})
    mask = train_one(recipe, tmp_path, model_override=str(retriever_folder))
    assert mask.scaling_factors.dtype == torch.float32
    assert (mask.scaling_factors != mask.scaling_factors.bfloat16()).any()


def test_progress_goes_to_stderr_alone(short_recipe, retriever_folder, tmp_path, capfd):
    train_one(short_recipe(), tmp_path, progress=True, model_override=str(retriever_folder))
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "13/13" in captured.err
    assert "pruned" in captured.err


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ({"rms_norm_eps": "foo"}, "Validation error for field 'rms_norm_eps': .*expected float"),
        ({"hidden_act": "nope"}, "unknown value or missing key: 'nope'"),
        ({"rope_parameters": {"rope_type": "nope"}}, "unknown value or missing key: 'nope'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, ".*factor"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": "x"}}, ".*'str'"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_config_that_transformers_refuses_is_told_with_the_overrides(
    overrides, reason, short_recipe, retriever_folder, tmp_path
):
    recipe = short_recipe(model={"config_overrides": overrides})
    with pytest.raises(LeanKError, match=f"^the config of model `.*` is refused: {reason}") as caught:
        train_one(recipe, tmp_path / "out", model_override=str(retriever_folder))
    assert "\n" not in str(caught.value)
    assert caught.value.hint == f"see `model.config_overrides` (`{next(iter(overrides))}`)"
    assert not (tmp_path / "out").exists()


def test_config_of_other_weights_is_refused(short_recipe, retriever_folder, tmp_path):
    for path in retriever_folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 64}))
    with pytest.raises(LeanKError, match=r"`model.layers.0.mlp.down_proj.weight` is \[32, 48\] .* \[32, 6"):
        train_one(short_recipe(), tmp_path / "out", model_override=str(tmp_path))


def test_weights_that_cannot_be_read_are_refused(short_recipe, retriever_folder, tmp_path, monkeypatch):
    """The shard is cut between the check of its header and its reading."""
    from leank_convert.train import subject

    folder = tmp_path / "cut"
    folder.mkdir()
    for path in retriever_folder.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    original = subject.open_checkpoint

    def cut_after(path):
        opened = original(path)
        shard = folder / "model.safetensors"
        shard.write_bytes(shard.read_bytes()[:-100])
        return opened

    monkeypatch.setattr(subject, "open_checkpoint", cut_after)
    with pytest.raises(LeanKError, match=r"the weights of model `.*cut` cannot be read: ."):
        train_one(short_recipe(), tmp_path / "out", model_override=str(folder))


def test_device_that_cannot_be_used_is_refused(short_recipe, retriever_folder, tmp_path):
    with pytest.raises(LeanKError, match="device `foo` cannot be used"):
        train_one(
            short_recipe(),
            tmp_path / "out",
            device="foo",
            model_override=str(retriever_folder),
        )
    assert not (tmp_path / "out").exists()


def test_recipe_with_a_mask_is_refused(short_recipe, retriever_folder, tmp_path):
    with pytest.raises(LeanKError, match=r"has `mask: a.pth`: nothing is to be trained") as caught:
        train_one(
            short_recipe(mask="a.pth"),
            tmp_path / "out",
            model_override=str(retriever_folder),
        )
    assert "leank-convert export" in caught.value.hint
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("resume", [False, True])
def test_mask_of_another_origin_is_not_replaced(resume, short_recipe, retriever_folder, tmp_path):
    path = tmp_path / "channel_mask.safetensors"
    path.write_bytes(b"somebody's")
    with pytest.raises(LeanKError, match=r"channel_mask.safetensors` exists and is not of a run") as caught:
        train_one(short_recipe(), tmp_path, resume=resume, model_override=str(retriever_folder))
    assert "another folder" in caught.value.hint
    assert [path.name for path in tmp_path.iterdir()] == ["channel_mask.safetensors"]
    assert path.read_bytes() == b"somebody's"


def test_mask_laid_beside_an_unfinished_run_is_not_replaced(
    short_recipe, retriever_folder, tmp_path, monkeypatch
):
    model = str(retriever_folder)
    with monkeypatch.context() as patched:
        patched.setattr(step, "distillation_loss", lambda *_: torch.tensor(float("nan"), requires_grad=True))
        with pytest.raises(LeanKError, match="step 1: the loss is nan"):
            train_one(short_recipe(), tmp_path, model_override=model)
    path = tmp_path / "channel_mask.safetensors"
    path.write_bytes(b"somebody's")
    with pytest.raises(LeanKError, match="exists and is not of a run"):
        train_one(short_recipe(), tmp_path, resume=True, model_override=model)
    assert path.read_bytes() == b"somebody's"


def test_mask_of_a_checkpoint_is_left_to_the_export(short_recipe, retriever_folder, tmp_path):
    """config.json holds the mask's digest; a resumed run returns what it would have written."""
    recipe = short_recipe()
    model = str(retriever_folder)
    first = train_one(recipe, tmp_path, model_override=model)
    (tmp_path / "config.json").write_text("{}")
    path = tmp_path / "channel_mask.safetensors"
    path.write_bytes(b"with other provenance")
    again = train_one(recipe, tmp_path, resume=True, model_override=model)
    assert path.read_bytes() == b"with other provenance"
    assert torch.equal(again.channel_mask, first.channel_mask)
    (tmp_path / "config.json").unlink()
    train_one(recipe, tmp_path, resume=True, model_override=model)
    assert torch.equal(load_mask(path).channel_mask, first.channel_mask)


def test_memory_that_does_not_suffice_is_told_with_the_sample_and_what_to_change(
    short_recipe, retriever_folder, tmp_path, monkeypatch
):
    original, calls = step.run_question_pass, 0

    def failing(*given):
        nonlocal calls
        calls += 1
        if calls == 5:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")
        return original(*given)

    recipe = short_recipe(data={**SHORT_DATA, "questions_per_context": 2})
    model = str(retriever_folder)
    with monkeypatch.context() as patched:
        patched.setattr(step, "run_question_pass", failing)
        with pytest.raises(
            LeanKError, match=r"step 5: memory does not suffice for task `retrieval`"
        ) as caught:
            train_one(recipe, tmp_path / "a", model_override=model)
    assert re.search(r"\d{3} tokens of context, 2 questions: CUDA out of memory", str(caught.value))
    for key in ("data.max_length", "data.questions_per_context", "offload_context=true"):
        assert key in caught.value.hint
    train_one(recipe, tmp_path / "a", resume=True, model_override=model)
    train_one(recipe, tmp_path / "b", model_override=model)
    one, other = (load_state(TrainingDirectory(tmp_path / name).state) for name in "ab")
    assert torch.equal(one.scaling_factors, other.scaling_factors)


def test_a_step_of_several_contexts_averages_their_gradients(short_recipe, retriever_folder, tmp_path):
    """After one step, Adam's `exp_avg` is a tenth of the gradient."""
    model = str(retriever_folder)
    one_step = {"steps": 1, "learning_rate": 0.1, "l1_weight": 0.0}

    def gradient(seed_of_sample, batch_size):
        out = tmp_path / f"{seed_of_sample}-{batch_size}"
        recipe = short_recipe(stage1=one_step, stage2={"steps": 0}, batch_size=batch_size)
        with pytest.MonkeyPatch.context() as patched:
            draw = SampleSource.draw
            patched.setattr(SampleSource, "draw", lambda self, index: draw(self, index + seed_of_sample))
            # Factors below one, so that the student differs from the teacher.
            patched.setattr(
                run, "initial_scaling_factors", lambda *_: torch.full((2, 2, 16), 0.5, requires_grad=True)
            )
            train_one(recipe, out, model_override=model)
        return load_state(TrainingDirectory(out).state).optimizer["exp_avg"]

    together = gradient(0, 3)
    torch.testing.assert_close(together, sum(gradient(index, 1) for index in range(3)) / 3)


def test_a_context_is_gone_before_the_next_one_is_run(short_recipe, retriever_folder, tmp_path, monkeypatch):
    """At once: nothing waits for the garbage collector."""
    original, contexts = step.run_context_pass, []

    def watching(*given, **options):
        assert not [context for context in contexts if context() is not None]
        context = original(*given, **options)
        contexts.append(weakref.ref(context))
        return context

    monkeypatch.setattr(step, "run_context_pass", watching)
    gc.disable()
    try:
        train_one(short_recipe(batch_size=2), tmp_path, model_override=str(retriever_folder))
    finally:
        gc.enable()
    assert len(contexts) == 26


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_layers_on_two_devices_train_the_same_mask(short_recipe, retriever_folder, tmp_path, monkeypatch):
    def load_spread(*given):
        subject = load_subject(*given)
        places = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.layers.0": 0}
        places |= {"model.layers.1": 1, "model.norm": 1, "lm_head": 1}
        return replace(subject, model=accelerate.dispatch_model(subject.model, device_map=places))

    recipe, model = short_recipe(batch_size=2), str(retriever_folder)
    for name in ("a", "b"):
        train_one(recipe, tmp_path / name, device="cuda", model_override=model)
        monkeypatch.setattr(loop, "load_subject", load_spread)
    one, other = (load_state(TrainingDirectory(tmp_path / name).state) for name in "ab")
    torch.testing.assert_close(one.scaling_factors, other.scaling_factors, rtol=1e-3, atol=1e-4)


def test_weights_that_memory_does_not_hold_are_told_with_what_to_change(
    short_recipe, retriever_folder, tmp_path, monkeypatch
):
    def exhaust(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")

    monkeypatch.setattr(loop, "load_subject", exhaust)
    with pytest.raises(LeanKError, match=r"for the weights of model `.*`: CUDA out of memory") as caught:
        train_one(short_recipe(), tmp_path / "out", model_override=str(retriever_folder))
    assert "model.device_map=auto" in caught.value.hint
    assert not (tmp_path / "out").exists()


def test_context_in_host_memory_trains_the_same_mask(short_recipe, retriever_folder, tmp_path):
    model = str(retriever_folder)
    first = train_one(short_recipe(), tmp_path / "a", model_override=model)
    second = train_one(short_recipe(offload_context=True), tmp_path / "b", model_override=model)
    assert torch.equal(first.scaling_factors, second.scaling_factors)


def test_model_spread_over_devices_trains_the_same_mask(short_recipe, retriever_folder, tmp_path):
    model = str(retriever_folder)
    first = train_one(short_recipe(), tmp_path / "a", model_override=model)
    spread = short_recipe(model={"device_map": "auto"})
    second = train_one(spread, tmp_path / "b", device="cpu", model_override=model)
    assert torch.equal(first.scaling_factors, second.scaling_factors)


def test_several_ratios_share_stage_one_and_are_what_each_would_be_alone(
    short_recipe, retriever_folder, tmp_path
):
    model, ratios = str(retriever_folder), [0.5, 0.75]
    masks = train_masks(
        short_recipe(pruning_ratio=ratios), tmp_path / "all", progress=False, model_override=model
    )
    assert list(masks) == [tmp_path / "all" / "ratio-0.5", tmp_path / "all" / "ratio-0.75"]
    rows = read_log(tmp_path / "all")
    assert [row["pruning_ratio_asked"] for row in rows] == [""] * 7 + ["0.5"] * 6 + ["0.75"] * 6
    for ratio, (folder, mask) in zip(ratios, masks.items(), strict=True):
        alone = train_one(short_recipe(pruning_ratio=ratio), tmp_path / f"{ratio}", model_override=model)
        assert torch.equal(mask.scaling_factors, alone.scaling_factors)
        assert torch.equal(mask.channel_mask, alone.channel_mask)
        assert mask.provenance.pruning_ratio_asked == ratio
        assert torch.equal(load_mask(folder / "channel_mask.safetensors").channel_mask, mask.channel_mask)
        assert Recipe(**yaml.safe_load((folder / "leank" / "recipe.yaml").read_text())).pruning_ratios == (
            0.5,
            0.75,
        )
    assert not (tmp_path / "all" / "channel_mask.safetensors").exists()


def test_a_step_of_stage_one_is_not_needed_for_several_ratios(short_recipe, retriever_folder, tmp_path):
    recipe = short_recipe(pruning_ratio=[0.5, 0.75], stage1={"steps": 0}, stage2={"steps": 0})
    masks = train_masks(recipe, tmp_path, progress=False, model_override=str(retriever_folder))
    assert [mask.pruning_ratio for mask in masks.values()] == [0.5, 0.75]


def test_cap_on_widths_reaches_the_mask(short_recipe, retriever_folder, tmp_path):
    recipe = short_recipe(max_width=8, pruning_ratio=0.2)
    mask = train_one(recipe, tmp_path, model_override=str(retriever_folder))
    assert mask.channel_mask.sum(-1).max() == 8


def test_questions_per_context_are_counted_in_the_log(short_recipe, retriever_folder, tmp_path):
    recipe = short_recipe(data={**SHORT_DATA, "questions_per_context": 3}, batch_size=2)
    train_one(recipe, tmp_path, model_override=str(retriever_folder))
    samples = SampleSource(build_tokenizer(), recipe.data, recipe.seed)
    for number, row in enumerate(read_log(tmp_path)):
        drawn = [samples.draw(2 * number + place) for place in range(2)]
        assert row["task"] == "retrieval+multi_value"
        assert int(row["num_tokens"]) == sum(sample.num_tokens for sample in drawn)
        assert int(row["num_answer_tokens"]) == sum(sample.num_answer_tokens for sample in drawn)
