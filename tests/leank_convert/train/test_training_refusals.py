"""What a run refuses before it begins, and what it leaves alone."""

import pytest
import torch

from leank_convert.errors import LeanKError
from leank_convert.methods import calibration
from leank_convert.train import key_mean, model
from tests.checks import edit_json, edit_tensors, refusal


def lengths(shortest, longest):
    return {"data": {"wording": "testbed", "min_length": shortest, "max_length": longest}}


@pytest.mark.parametrize(
    ("changes", "options", "message", "remedy"),
    [
        (lengths(200, 513), {}, "`data.max_length` 513 exceeds the 512 positions", "config_overrides"),
        (lengths(64, 500), {}, "no sample of 64 tokens", ""),
        ({"width_multiple": 7}, {}, "`width_multiple` 7 does not divide the model's `head_dim` 16", "as 8"),
        ({}, {"device": "foo"}, "device `foo` cannot be used", ""),
    ],
)
def test_what_does_not_go_is_refused_before_anything_is_written(
    changes, options, message, remedy, train_one, short_recipe, tmp_path
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
    change, message, train_one, short_recipe, copy_of, retriever_folder, tmp_path
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
    with pytest.raises(LeanKError, match=message):
        train_one(short_recipe(), tmp_path / "out", model=copied)


@pytest.mark.parametrize("resume", [False, True])
def test_mask_of_another_origin_is_not_replaced(train_one, resume, short_recipe, tmp_path):
    path = tmp_path / "channel_mask.safetensors"
    path.write_bytes(b"somebody's")
    with refusal(r"channel_mask.safetensors` exists and is not of a run", "another folder"):
        train_one(short_recipe(), tmp_path, resume=resume)
    assert [path.name for path in tmp_path.iterdir()] == ["channel_mask.safetensors"]
    assert path.read_bytes() == b"somebody's"


NORM = {"method": "static-norm"}


@pytest.mark.parametrize(
    ("owner", "name", "changes", "message", "remedy"),
    [
        (model, "_load_weights", {}, "for the weights of model `.*`: CUDA out of", "model.device_map=auto"),
        (key_mean, "run_context_pass", {}, r"for a context of \d+ tokens", "key_mean=false"),
        (
            calibration,
            "measure_attention",
            NORM,
            "for prompts of up to 280 tokens in model",
            "`data.max_length`",
        ),
    ],
    ids=["weights", "context", "prompt"],
)
def test_memory_that_does_not_suffice_is_told_with_what_to_change(
    owner, name, changes, message, remedy, train_one, short_recipe, tmp_path, fail_at
):
    failure = fail_at(owner, name, 1, torch.OutOfMemoryError("CUDA out of memory.\nmore"))
    with refusal(message, remedy, exit_code=1), failure:
        train_one(short_recipe(**changes), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_weights_that_cannot_be_read_are_refused(
    train_one, short_recipe, copy_of, retriever_folder, tmp_path, monkeypatch
):
    """The shard is cut between the check of its header and its reading."""
    original, copied = model.open_checkpoint, copy_of(retriever_folder)

    def cut_after(path):
        opened, shard = original(path), copied / "model.safetensors"
        shard.write_bytes(shard.read_bytes()[:-100])
        return opened

    monkeypatch.setattr(model, "open_checkpoint", cut_after)
    with pytest.raises(LeanKError, match=rf"the weights of model `{copied}` cannot be read: ."):
        train_one(short_recipe(), tmp_path / "out", model=copied)
