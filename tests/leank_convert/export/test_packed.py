"""Sources whose weights are packed: what is written is what an export makes of the weights they stand for."""

from shutil import copytree

import pytest
import torch
from safetensors.torch import load_file, save_file

from leank_convert.files import read_json
from leank_convert.recipe_file import load_recipe
from leank_convert.train.model import load_model as load_training_model
from leank_convert.train.model import open_model
from tests.checks import export_both, failed
from tests.packed_weights import FORMATS, GROUP

WEIGHTS = "model.safetensors"
ATTENTION = "model.layers.1.self_attn"
LIBRARY = "compressed-tensors by the library"
HALF_HEADS = {"num_key_value_heads": 8, "head_dim": GROUP // 2}  # a group of inputs is for two


@pytest.fixture
def packed(source_model, edit_json):
    """Write a model with packed projections, and one of the plain weights that they stand for."""

    def build(name, **sizes):
        if name.endswith("by the library"):
            pytest.importorskip("compressed_tensors")
        layout = FORMATS[name]()
        sizes = {"hidden_size": 512, "head_dim": 32, "intermediate_size": 64, "mlp_bias": False, **sizes}
        folder = source_model(shards=False, **sizes)
        plain = copytree(folder, folder.with_name("plain"))
        tensors, exact = {}, {}
        for key, weight in load_file(folder / WEIGHTS).items():
            if not key.endswith("_proj.weight"):
                tensors[key] = exact[key] = weight
                continue
            written = layout.write(weight)
            exact[key] = layout.read(written).contiguous()
            assert (exact[key] - weight).abs().max() < 0.4, "another layout than that of the reader"
            tensors.update((key.removesuffix("weight") + name, part) for name, part in written.items())
        save_file(tensors, folder / WEIGHTS, {"format": "pt"})
        save_file(exact, plain / WEIGHTS, {"format": "pt"})
        edit_json(folder / "config.json", quantization_config=layout.config)
        return layout, folder, plain

    return build


def parts_of(module, tensors):
    names = (name for name in tensors if name.startswith(f"{module}."))
    return {name.removeprefix(f"{module}."): tensors[name] for name in names}


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_written_stands_for_the_permuted_weights(name, packed, fitting_mask, tmp_path):
    by_activation = name.endswith("in the order of activations")
    layout, source, plain = packed(name, **HALF_HEADS if by_activation else {})
    out, expected = export_both(source, plain, fitting_mask, tmp_path)
    assert failed(out, source) == {}
    assert read_json(out / "config.json")["quantization_config"] == layout.config
    written, before = load_file(out / WEIGHTS), load_file(source / WEIGHTS)
    for key, tensor in load_file(expected / WEIGHTS).items():
        module = key.removesuffix(".weight")
        parts = parts_of(module, written)
        assert (layout.read(parts) if len(parts) > 1 else written[key]).equal(tensor), key
    # Each tensor that moved is missed where it has not.
    columns = parts_of(f"{ATTENTION}.o_proj", before)
    moved = [key for key, part in columns.items() if not part.equal(written[f"{ATTENTION}.o_proj.{key}"])]
    assert moved
    for key in (f"{ATTENTION}.o_proj.{key}" for key in moved):
        save_file({**written, key: before[key]}, out / WEIGHTS, {"format": "pt"})
        told = "".join(failed(out, source).values())
        assert f"tensor `{key}` is not the permutation of its source" in told


def test_packed_weights_are_measured_as_the_weights_they_stand_for(packed, testbed_tokenizer):
    _, source, plain = packed(LIBRARY)
    recipe = load_recipe("quickstart", ["model.dtype=float32"])
    testbed_tokenizer.save_pretrained(source)
    model = load_training_model(open_model(source, recipe.model), recipe, torch.device("cpu")).model
    found = model.state_dict()
    for key, tensor in load_file(plain / WEIGHTS).items():
        assert found[key].equal(tensor), key


REFUSED = {
    "groups of two heads": (
        "GPTQ",
        HALF_HEADS,
        {},
        "heads have 16 columns each: numbers are for parts of two heads",
    ),
    "blocks of two heads": (
        "NF4",
        {"hidden_size": 256},
        {},
        "[2] for a weight [128, 256], of which heads have 32 rows each",
    ),
    "AWQ's layout of another kernel": (
        "AWQ",
        {},
        {"q_proj.qweight": lambda tensor: tensor.T},
        "512], which is not known here",
    ),
    "tiles": ("LLM.int8", {}, {"q_proj.weight_format": lambda tensor: tensor + 1}, "stores it in tiles"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_permuted_exactly_is_refused(case, packed, fitting_mask, tmp_path, refused):
    name, sizes, changes, message = case
    _, source, plain = packed(name, **sizes)
    tensors = load_file(source / WEIGHTS)
    for part, change in changes.items():
        for key in [key for key in tensors if key.endswith(part)]:
            tensor = tensors.pop(key)
            if change is not None:
                tensors[key] = change(tensor).contiguous()
    save_file(tensors, source / WEIGHTS, {"format": "pt"})
    refused(source, fitting_mask(plain), tmp_path / "out", message)
