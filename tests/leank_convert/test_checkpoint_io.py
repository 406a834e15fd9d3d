import json
import re
from unittest.mock import Mock

import pytest

from leank_convert.checkpoint_io import INDEX_NAME, SINGLE_FILE_NAME, open_checkpoint, read_leank_config
from leank_convert.files import read_json, write_atomically
from leank_convert.hub import resolve_model
from tests.checks import edit_json, refusal


def test_sharded_and_single_file_folders_hold_the_same(source_model):
    sharded = open_checkpoint(source_model("llama"))
    single = open_checkpoint(source_model("qwen2", shards=False))
    assert len(sharded.shards) > 3 and sharded.index is not None
    (single.folder / INDEX_NAME).write_text("{}")  # a single file wins over it, as in transformers
    single = open_checkpoint(single.folder)
    assert list(single.shards) == [SINGLE_FILE_NAME] and single.index is None
    name = "model.layers.1.self_attn.q_proj.weight"
    assert sharded.index["weight_map"][name] == sharded.shard_of(name)
    found = sharded.find(name)
    assert found is not None and found.shape == (96, 32)
    assert sharded.find("model.layers.3.self_attn.q_proj.weight") is None
    assert sharded.num_data_bytes == sharded.index["metadata"]["total_size"]


def refused(folder, message, *hints):
    with refusal(re.escape(message), *hints):
        open_checkpoint(folder)


def test_folders_without_config_or_weights_are_refused(source_model):
    folder = source_model("llama", shards=False)
    (folder / SINGLE_FILE_NAME).unlink()
    refused(folder, f"has neither `{SINGLE_FILE_NAME}` nor `{INDEX_NAME}`")
    (folder / "pytorch_model.bin").touch()
    refused(folder, "holds only pickled weights (`pytorch_model.bin`)", "safetensors")
    (folder / "config.json").write_text("{")
    refused(folder, "is not JSON")
    (folder / "config.json").write_text("[]")
    refused(folder, "holds a `list`")
    (folder / "config.json").unlink()
    refused(folder, "has no `config.json`")
    (folder / "leank_onnx.json").touch()
    refused(folder, "has no `config.json`", "it is an ONNX folder")
    refused(folder / "leank_onnx.json", "is a file, not the folder of a model")


def test_shards_that_contradict_the_index_are_refused(source_model):
    folder = source_model("llama")
    index = read_json(folder / INDEX_NAME)
    weight_map = index["weight_map"]
    name = "model.norm.weight"
    other = next(shard for shard in weight_map.values() if shard != weight_map[name])
    (folder / "copy.safetensors").write_bytes((folder / weight_map[name]).read_bytes())
    assert list(weight_map.values()).count(weight_map[name]) > 1
    for shards, message in (
        ({name: other}, f"has no tensor `{name}`"),
        ({"x": "../x.safetensors"}, "which is not the name of a `.safetensors` file"),
        ({"x" * 10**5: "a.safetensors"}, "is not a valid tensor name"),
        ({name: "copy.safetensors"}, f"is in both `{weight_map[name]}` and `copy.safetensors`"),
    ):
        edit_json(folder / INDEX_NAME, weight_map={**weight_map, **shards})
        refused(folder, message)
    edit_json(folder / INDEX_NAME, weight_map=...)
    refused(folder, "has no `weight_map`")
    edit_json(folder / INDEX_NAME, weight_map=weight_map, metadata=[1])
    refused(folder, "`metadata` is [1], not an object")
    edit_json(folder / INDEX_NAME, metadata=index["metadata"])
    (folder / other).rename(folder / "elsewhere")
    refused(folder, f"shard `{other}` is missing")
    (folder / other).write_bytes((folder / weight_map[name]).read_bytes())
    refused(folder, "has no tensor")


def test_adapters_and_gguf_get_their_hint(source_model, tmp_path):
    folder = source_model("llama", shards=False)
    (folder / "adapter_config.json").touch()
    refused(folder, "transformers would load an adapter on top of the weights", "remove that file")
    (folder / "adapter_config.json").unlink()
    (folder / SINGLE_FILE_NAME).unlink()
    for name, hint in (("x.gguf", "GGUF"), ("adapter_config.json", "merge it into its base model")):
        (folder / name).touch()
        refused(folder, "has neither", hint)
        other = tmp_path / name
        other.mkdir()
        (other / name).touch()
        refused(other, "has no `config.json`", hint)
    with refusal("is a file", "GGUF"):
        resolve_model(folder / "x.gguf")


@pytest.mark.parametrize("step", ["os.fsync", "pathlib.Path.replace"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt("Ctrl-C")])
def test_a_file_that_cannot_be_written_keeps_its_old_content(step, error, tmp_path, monkeypatch):
    write_atomically(tmp_path / "file", (b"o", b"l", b"d"))
    monkeypatch.setattr(step, Mock(side_effect=error))
    with pytest.raises(type(error), match=error.args[-1]) as caught:
        write_atomically(tmp_path / "file", b"new")
    assert isinstance(error, KeyboardInterrupt) or caught.value.filename == str(tmp_path / "file")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"old"]


def test_the_leank_block_of_a_checkpoint_is_read(tmp_path):
    for folder, message in ((tmp_path, r"has no `config\.json`"), (tmp_path / "missing", "` does not exist")):
        with refusal(message):
            read_leank_config(folder)
    config = {"model_type": "leank_llama", "leank": {"widths": []}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_leank_config(tmp_path) == (config, {"widths": []})
    for block in (..., None, []):
        edit_json(tmp_path / "config.json", leank=block)
        with refusal("is not a LeanK checkpoint", "export"):
            read_leank_config(tmp_path)
