"""`verify` of an ONNX folder: every file, key and weight that is not what was exported is found and named."""

import json
import shutil

import pytest
import torch
from click.testing import CliRunner

from leank_convert.cli import main
from leank_convert.mask import ChannelMask, load_mask, save_mask
from leank_convert.verify import verify_checkpoint

WEIGHTS = "model.onnx.data"


def test_missing_keys_are_all_named(folder):
    def edit(content):
        del content["eos_token_ids"], content["model"]["head_dim"], content["inputs"][2]["shape"]

    folder.describe(edit)
    (detail,) = folder.failed().values()
    assert "lacks `model.head_dim`, `eos_token_ids`, `inputs.2.shape`" in detail
    assert folder.made() == ["description"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format_version": 2}, "format_version is 2, this leank_onnx.py reads 1"),
        ({"flush_size": 0}, "`flush_size` is 0, not a whole number from 1 to"),
        ({"widths": [[0, None], [4, 4]]}, "`widths.0.1` is None"),
        ({"buckets": [[{"width": 7, "heads": [1, 2]}]]}, "`buckets.0` does not hold each of 2 heads once"),
        ({"files": {"model.onnx": "0"}}, "`files` does not name `channel_mask.safetensors`"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_description_with_nonsense_in_it_is_found(changes, message, folder):
    folder.describe(lambda content: content.update(changes))
    details = folder.failed()
    assert message in details["description"]
    assert folder.made() == ["description"]


@pytest.mark.parametrize("content", ["[]", "{", None])
def test_a_description_that_cannot_be_read_is_found(content, folder):
    path = folder.path / "leank_onnx.json"
    if content is None:
        path.unlink()
    else:
        path.write_text(content)
    details = folder.failed()
    assert details.keys() == {"description"}
    assert str(path) in details["description"]


def swap(rows, layer=0):
    return [row[::-1] if index == layer else row for index, row in enumerate(rows)]


@pytest.mark.parametrize(
    ("key", "edit", "message"),
    [
        ("widths", swap, "`widths[0]` is [7, 0]: not 2 numbers ascending within 0 and 16"),
        ("widths", lambda rows: [rows[0], [4, 17]], "`widths[1]` is [4, 17]"),
        ("widths", lambda rows: rows[:1], "`widths` has 1 layers, the model 2"),
        ("widths", lambda rows: [[0, 8], rows[1]], "the widths are [0, 8]"),
        ("channel_order", lambda orders: [orders[0], orders[1][:1]], "`channel_order[1]` has 1 heads"),
        (
            "channel_order",
            lambda orders: [orders[0], [[0] * 16, orders[1][1]]],
            "no order of the 16 channels",
        ),
        ("channel_order", lambda orders: [orders[0], swap(orders[1])], "`channel_order[1][0]` is"),
        ("head_permutation", lambda rows: [[1, 1], rows[1]], "`head_permutation[0]` is [1, 1], no perm"),
        ("head_permutation", lambda rows: swap(rows, 1), "[1, 0], not stable within a bucket"),
    ],
)
def test_heads_that_contradict_one_another_are_found(key, edit, message, folder):
    folder.describe(lambda content: content.update({key: edit(content[key])}))
    details = folder.failed()
    assert details.keys() == {"heads"}
    assert message in details["heads"]
    # The files are looked at all the same, what needs the heads is not.
    assert {"digests", "external data", "graph"} <= set(folder.made())
    assert not {"mask file", "tensors", "onnxruntime"} & set(folder.made())


def test_other_channels_than_the_masks_are_found(folder, retriever_folder):
    other = load_mask(folder.path / "channel_mask.safetensors").channel_mask.flip(-1)
    kept = [sorted((~mask).nonzero().flatten().tolist()) for mask in other[1]]
    order = [mask.nonzero().flatten().tolist() + rest for mask, rest in zip(other[1], kept, strict=True)]
    folder.describe(lambda content: content["channel_order"].__setitem__(1, order))
    details = folder.failed(retriever_folder)
    assert details.keys() == {"mask file", "source: keys and values"}
    assert "layer 1 keeps other channels than `channel_order`" in details["mask file"]
    assert "layer 1: keys differ from the source's" in details["source: keys and values"]


def test_a_mask_file_of_another_model_is_found(folder):
    save_mask(ChannelMask(torch.ones(3, 2, 16, dtype=torch.bool)), folder.path / "channel_mask.safetensors")
    folder.bless()
    assert "has shape [3, 2, 16]; the graph has [2, 2, 16]" in folder.failed()["mask file"]


def test_changed_and_missing_files_are_found_and_an_edited_readme_is_none(folder):
    (folder.path / "README.md").write_text("mine")
    (folder.path / "leank_onnx.py").write_text("import os\n")
    (folder.path / "tokenizer.json").unlink()
    details = folder.failed()
    assert details.keys() == {"digest of leank_onnx.py", "digest of tokenizer.json"}
    assert "was changed: its SHA-256" in details["digest of leank_onnx.py"]
    assert "is missing" in details["digest of tokenizer.json"]


def test_a_digest_cannot_point_outside(folder):
    name = "../secret"
    (folder.path.parent / "secret").touch()
    folder.describe(lambda content: content["files"].update({name: "0"}))
    assert "is missing" in folder.failed()[f"digest of {name}"]


def test_weights_cut_short_are_told_with_the_tensor_that_lacks(folder):
    content = (folder.path / WEIGHTS).read_bytes()
    (folder.path / WEIGHTS).write_bytes(content[: len(content) // 2])
    details = folder.failed()
    assert details.keys() == {f"digest of {WEIGHTS}", "external data"}
    assert f"is truncated: it has {len(content) // 2} bytes, and tensor `" in details["external data"]


def test_weights_that_are_missing_or_not_listed_are_found(folder):
    (folder.path / WEIGHTS).unlink()
    assert f"`{folder.path / WEIGHTS}` is missing: `" in folder.failed()["external data"]
    folder.describe(lambda content: content["files"].pop(WEIGHTS))
    assert f"`files` does not name `{WEIGHTS}`" in folder.failed()["external data"]


def test_weights_that_lie_nowhere_are_found(folder):
    def edit(model):
        (entry, *_) = (tensor for tensor in model.graph.initializer if tensor.external_data)
        next(item for item in entry.external_data if item.key == "offset").value = "-1"

    folder.rewrite(edit)
    assert "lies is nonsense: External data offset must be non-neg" in folder.failed()["external data"]


def test_a_graph_that_is_cut_short_or_missing_is_found(folder):
    content = (folder.path / "model.onnx").read_bytes()
    (folder.path / "model.onnx").write_bytes(content[: len(content) // 2])
    details = folder.failed()
    assert details.keys() == {"digest of model.onnx", "external data"}
    assert "is truncated or no ONNX graph" in details["external data"]
    (folder.path / "model.onnx").unlink()
    assert "No such file" in folder.failed()["external data"]


def test_a_graph_that_breaks_the_rules_is_found(folder):
    folder.rewrite(lambda model: model.graph.node.pop(0))
    details = folder.failed()
    assert details.keys() == {"graph"}
    assert "`model.onnx` breaks the rules of ONNX" in details["graph"]


def test_another_opset_than_the_graphs_is_found(folder):
    folder.describe(lambda content: content.update(opset=22))
    assert "`model.onnx` has opset 23; `leank_onnx.json`: 22" in folder.failed()["graph"]


@pytest.mark.parametrize(
    ("part", "edit", "message"),
    [
        (
            "inputs",
            lambda tensor: tensor.update(dtype="float16"),
            "the widths give `past_key_values.0",
        ),
        ("inputs", lambda tensor: tensor.update(width=8), "width 8, part key); the widths give"),
        ("inputs", lambda tensor: tensor.update(shape=["batch", 1, "pruned_slots", 8]), "'pruned_slots', 8]"),
        ("outputs", lambda tensor: tensor.update(name="present.9.key"), "number 3 is `present.9.key`"),
        # A host may take what has a region for the cache.
        (
            "outputs",
            lambda tensor: tensor.update(region="window"),
            "region window); the widths give `present",
        ),
    ],
    ids=["dtype", "width", "shape", "name", "region"],
)
def test_a_tensor_described_otherwise_than_the_heads_are_is_found(part, edit, message, folder):
    # Tensor 6 of the inputs is the pruned key of the bucket of width 7.
    folder.describe(lambda content: edit(content[part][6 if part == "inputs" else 3]))
    details = folder.failed()
    assert details.keys() == {"tensors"}
    assert message in details["tensors"]


def test_a_tensor_that_is_not_described_is_found(folder):
    folder.describe(lambda content: content["outputs"].pop())
    assert "there are 4; the widths give 5" in folder.failed()["tensors"]


def test_a_graph_whose_tensors_are_not_those_described_is_found(folder):
    def edit(model):
        model.graph.input[0].type.tensor_type.shape.dim[1].dim_param = "tokens"

    folder.rewrite(edit)
    details = folder.failed()
    assert "number 0 is `input_ids` (int64 ['batch', 'tokens'])" in details["tensors"]
    assert "the description says `input_ids` (int64 ['batch', 'new_tokens'])" in details["tensors"]


def test_a_checkpoint_that_also_has_a_graph_is_verified_as_a_checkpoint(retriever_half, tmp_path):
    checkpoint = shutil.copytree(retriever_half / "checkpoint", tmp_path / "checkpoint")
    (checkpoint / "model.onnx").touch()
    assert "header metadata" in [check.name for check in verify_checkpoint(checkpoint).checks]


def test_the_command_reports_line_by_line_and_its_exit_code_tells(folder, retriever_folder):
    result = CliRunner().invoke(
        main, ["verify", str(folder.path), "--source", str(retriever_folder), "--json"]
    )
    assert result.exit_code == 0
    assert json.loads(result.stdout)["ok"] is True
    (folder.path / "leank_onnx.py").write_text("raise SystemExit\n")
    result = CliRunner().invoke(main, ["verify", str(folder.path)])
    assert result.exit_code == 1
    assert "FAIL  digest of leank_onnx.py" in result.stdout
    assert "ok    onnxruntime: a decode step behind 12 tokens" in result.stdout
