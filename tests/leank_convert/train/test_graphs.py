"""Steps launched as CUDA graphs against the same steps run as they are written."""

import pytest
import torch

from leank_convert.methods.make import train_masks
from leank_convert.recipe_file import load_recipe
from leank_convert.train import graphs
from leank_convert.train.log import read_log

_SETTINGS = """
model: {id: testbed, dtype: float32}
windows: {sink_size: 16, recent_size: 64, flush_size: 16}
width_multiple: 16
pruning_ratio: [0.5, 0.7]
held_out_samples: 0
data: {wording: testbed, min_length: 300, max_length: 900, questions_per_context: 3}
stage1: {steps: 24, learning_rate: 0.05}
stage2: {steps: 12, learning_rate: 0.02, validation_contexts: 2}
"""


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("model", "method"),
    [
        ("testbed", "leank"),
        ("testbed", "duo-attention"),
        ("testbed", "duo-attention+leank"),
        ("mixed", "leank"),
    ],
)
def test_captured_steps_learn_what_steps_as_written_learn(
    model, method, speaking_folder, tmp_path, monkeypatch
):
    if model == "mixed":  # half of its layers have a window
        kinds = ["sliding_attention", "full_attention"] * 2
        model = speaking_folder("qwen3", layer_types=kinds, use_sliding_window=True, sliding_window=30)
    (tmp_path / "recipe.yaml").write_text(_SETTINGS)
    recipe = load_recipe(tmp_path / "recipe.yaml", [f"method={method}", "heads.steps=24"])
    launches, launch = [], graphs._Graph.launch
    monkeypatch.setattr(graphs._Graph, "launch", lambda *given: launches.append(1) or launch(*given))
    masks, logs = [], []
    for folder in ("captured", "context as written", "written"):
        if folder != "captured":
            monkeypatch.setattr(graphs, "is_bound_by_host", lambda *_: False)
        if folder == "written":
            monkeypatch.setattr(graphs, "rotates_by_length", lambda *_: True)
        launches.clear()
        masks.append(train_masks(model, tmp_path / folder, recipe=recipe, device="cuda", progress=False))
        logs.append(read_log(tmp_path / folder / "leank" / "log.jsonl"))
        assert (len(launches) > 10) == (folder != "written")
    *ours, written = logs
    for log, made in zip(ours, masks, strict=False):
        # The first steps differ by rounding alone; what follows from them may drift.
        for step, own in list(zip(log, written, strict=True))[:12]:
            assert step.distillation == pytest.approx(own.distillation, rel=2e-3, abs=1e-9), step.step
            assert step.mean_factor == pytest.approx(own.mean_factor, rel=1e-3)
        for mask, own in zip(made.values(), masks[-1].values(), strict=True):
            assert (mask.channel_mask == own.channel_mask).float().mean() > 0.9


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["leank", "duo-attention"])
def test_a_run_on_a_gpu_repeats_bit_by_bit(method, tmp_path):
    (tmp_path / "recipe.yaml").write_text(_SETTINGS)
    settings = [f"method={method}", "heads.steps=24", "model.dtype=bfloat16"]
    recipe = load_recipe(tmp_path / "recipe.yaml", settings)
    folders = [tmp_path / name for name in "ab"]
    one, other = (train_masks("testbed", folder, recipe=recipe, device="cuda") for folder in folders)
    for mask, again in zip(one.values(), other.values(), strict=True):
        assert torch.equal(mask.channel_mask, again.channel_mask)
    losses = [[step.distillation for step in read_log(folder / "leank" / "log.jsonl")] for folder in folders]
    assert losses[0] == losses[1]
