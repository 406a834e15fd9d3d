"""What a run refuses before it begins, and what it leaves alone."""

import json

import pytest
import torch

from leank_convert.errors import LeanKError
from leank_convert.train import model, passes


def test_data_longer_than_the_models_positions_is_refused(train_one, short_recipe, tmp_path):
    recipe = short_recipe(data={"wording": "testbed", "min_length": 200, "max_length": 513})
    with pytest.raises(LeanKError, match=r"`data.max_length` 513 exceeds the 512 positions") as caught:
        train_one(recipe, tmp_path / "out")
    assert "config_overrides" in caught.value.hint
    assert not (tmp_path / "out").exists()


def test_length_without_room_for_a_task_is_refused_before_anything_is_written(
    train_one, short_recipe, tmp_path
):
    recipe = short_recipe(data={"wording": "testbed", "min_length": 64, "max_length": 500})
    with pytest.raises(LeanKError, match="no sample of 64 tokens"):
        train_one(recipe, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_unsupported_family_is_refused(train_one, short_recipe, retriever_folder, tmp_path):
    for path in retriever_folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "gpt2"}))
    with pytest.raises(LeanKError, match="unknown architecture"):
        train_one(short_recipe(), tmp_path / "out", model=tmp_path)


def test_model_with_a_tensor_missing_is_refused(train_one, short_recipe, retriever_folder, tmp_path):
    from safetensors.torch import load_file, save_file

    for path in retriever_folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(LeanKError, match=r"`model.layers.1.self_attn.k_proj.weight`"):
        train_one(short_recipe(), tmp_path / "out", model=tmp_path)


def test_model_without_tokenizer_is_refused(train_one, short_recipe, retriever_folder, tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((retriever_folder / name).read_bytes())
    with pytest.raises(LeanKError, match=r"the tokenizer of `.*` cannot be loaded"):
        train_one(short_recipe(), tmp_path / "out", model=tmp_path)


def test_multiple_wider_than_a_head_is_refused_before_anything_is_written(train_one, short_recipe, tmp_path):
    with pytest.raises(LeanKError, match="`width_multiple` 32 exceeds"):
        train_one(
            short_recipe(width_multiple=32),
            tmp_path / "out",
        )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ({"use_cache": "yes"}, "Validation error for field 'use_cache': .*expected bool"),
        ({"id2label": []}, "'list' object has no attribute 'items'"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_config_that_transformers_refuses_is_told_with_the_overrides(
    train_one, overrides, reason, short_recipe, tmp_path
):
    recipe = short_recipe(model={"config_overrides": overrides})
    with pytest.raises(
        LeanKError, match=f"^`config.json with config_overrides` is refused by .*{reason}"
    ) as caught:
        train_one(recipe, tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert "`model.config_overrides`" in str(caught.value.hint)
    assert not (tmp_path / "out").exists()


def test_config_of_other_weights_is_refused(train_one, short_recipe, retriever_folder, tmp_path):
    for path in retriever_folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 64}))
    with pytest.raises(LeanKError, match=r"`model.layers.0.mlp.down_proj.weight` is \[32, 48\] .* \[32, 6"):
        train_one(short_recipe(), tmp_path / "out", model=tmp_path)


def test_weights_that_cannot_be_read_are_refused(
    train_one, short_recipe, retriever_folder, tmp_path, monkeypatch
):
    """The shard is cut between the check of its header and its reading."""
    folder = tmp_path / "cut"
    folder.mkdir()
    for path in retriever_folder.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    original = model.open_checkpoint

    def cut_after(path):
        opened = original(path)
        shard = folder / "model.safetensors"
        shard.write_bytes(shard.read_bytes()[:-100])
        return opened

    monkeypatch.setattr(model, "open_checkpoint", cut_after)
    with pytest.raises(LeanKError, match=r"the weights of model `.*cut` cannot be read: ."):
        train_one(short_recipe(), tmp_path / "out", model=folder)


def test_device_that_cannot_be_used_is_refused(train_one, short_recipe, tmp_path):
    with pytest.raises(LeanKError, match="device `foo` cannot be used"):
        train_one(
            short_recipe(),
            tmp_path / "out",
            device="foo",
        )
    assert not (tmp_path / "out").exists()


def test_recipe_with_a_mask_is_refused(train_one, short_recipe, tmp_path):
    with pytest.raises(LeanKError, match=r"`mask` is 'a.pth': nothing is to be trained") as caught:
        train_one(
            short_recipe(mask="a.pth"),
            tmp_path / "out",
        )
    assert "leank-convert export" in caught.value.hint
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("resume", [False, True])
def test_mask_of_another_origin_is_not_replaced(train_one, resume, short_recipe, tmp_path):
    path = tmp_path / "channel_mask.safetensors"
    path.write_bytes(b"somebody's")
    with pytest.raises(LeanKError, match=r"channel_mask.safetensors` exists and is not of a run") as caught:
        train_one(short_recipe(), tmp_path, resume=resume)
    assert "another folder" in caught.value.hint
    assert [path.name for path in tmp_path.iterdir()] == ["channel_mask.safetensors"]
    assert path.read_bytes() == b"somebody's"


def test_mask_laid_beside_an_unfinished_run_is_not_replaced(train_one, short_recipe, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(
            passes, "distillation_loss", lambda teacher, student, owners: student.sum() * float("nan")
        )
        with pytest.raises(LeanKError, match="step 1: the loss is nan"):
            train_one(short_recipe(), tmp_path)
    path = tmp_path / "channel_mask.safetensors"
    path.write_bytes(b"somebody's")
    with pytest.raises(LeanKError, match="exists and is not of a run"):
        train_one(short_recipe(), tmp_path, resume=True)
    assert path.read_bytes() == b"somebody's"


def test_weights_that_memory_does_not_hold_are_told_with_what_to_change(
    train_one, short_recipe, tmp_path, monkeypatch
):
    def exhaust(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")

    monkeypatch.setattr(model, "_load_weights", exhaust)
    with pytest.raises(LeanKError, match=r"for the weights of model `.*`: CUDA out of memory") as caught:
        train_one(short_recipe(), tmp_path / "out")
    assert "model.device_map=auto" in caught.value.hint
    assert not (tmp_path / "out").exists()
