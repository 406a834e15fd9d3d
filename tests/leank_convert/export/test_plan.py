"""What config.json says of linear layers and of experts, against the tensors of the model."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from leank_convert.architectures import read_model_facts
from leank_convert.checkpoint_io import DIGESTS_NAME, open_checkpoint
from leank_convert.config_overrides import apply_config_overrides
from leank_convert.digests import write_digests
from leank_convert.errors import LeanKError
from leank_convert.export import check_exportable, export_checkpoint
from leank_convert.families import ARCHITECTURES, evaluate_size, find_size_keys
from leank_convert.files import read_json
from leank_convert.mask import all_channels_mask
from leank_convert.verify import verify_checkpoint
from tests.tiny_families import FAMILIES, OPTIONS

LINEAR = [row for row in FAMILIES if row.values[0].other_tensors]
EXPERTS = [row for row in FAMILIES if row.values[0].experts]
SIZES = {"num_hidden_layers": 4, "tie_word_embeddings": False}


@pytest.fixture
def tiny(source_model):
    """Write a random model of four layers, of any family."""

    def build(family, **config):
        options = {"head_dim": 4, **SIZES, **OPTIONS.get(family, {}), **config}
        return source_model(family, shards=False, **options)

    return build


@pytest.fixture
def found(tmp_path, edit_json, refused):
    """What `verify` says of a checkpoint with an edited config.json, once an export refused such a source."""

    def run(source, message, **changes):
        facts = read_model_facts(read_json(source / "config.json"), origin="config.json")
        mask, out = all_channels_mask(facts), tmp_path / "out"
        if not out.exists():
            export_checkpoint(source, mask, out)
        for folder in (source, out):
            (folder / "before.json").write_bytes((folder / "config.json").read_bytes())
            edit_json(folder / "config.json", **changes)
        refused(source, mask, tmp_path / "again", message)
        with pytest.raises(LeanKError, match=re.escape(message)):
            check_exportable(source, tmp_path / "again")
        (out / DIGESTS_NAME).unlink()
        write_digests(out, {})
        details = [check.detail for check in verify_checkpoint(out).checks if not check.ok]
        for folder in (source, out):
            (folder / "before.json").rename(folder / "config.json")
        assert len(details) == 1
        return details[0]

    return run


@pytest.mark.parametrize("row", LINEAR)
@pytest.mark.parametrize(
    ("key", "value", "tensor", "sizes"),
    [
        ("linear_num_value_heads", 8, "A_log", "has shape [4]; config.json asks for [8]"),
        ("linear_value_head_dim", 16, "norm.weight", "has shape [8]; config.json asks for [16]"),
        ("linear_conv_kernel_dim", 8, "conv1d.weight", "[64, 1, 4]; config.json asks for [64, 1, 8]"),
        ("linear_num_key_heads", 4, "conv1d.weight", "[64, 1, 4]; config.json asks for [96, 1, 4]"),
        ("linear_key_head_dim", 16, "conv1d.weight", "[64, 1, 4]; config.json asks for [96, 1, 4]"),
    ],
)
def test_sizes_of_linear_layers_are_those_of_their_tensors(row, key, value, tensor, sizes, tiny, found):
    source = tiny(row.model_type)
    tensor = f"tensor `model.layers.0.linear_attn.{tensor}` "
    said = found(source, tensor, **{key: value})
    assert tensor in said and sizes in said and f"`{key}`: {value}" in said
    assert f"`{key}` is -1, not a whole number" in found(source, f"`{key}` is -1", **{key: -1})


def stock_tensors(row, **config):
    """Shapes of the tensors that transformers' class has in memory."""
    with torch.device("meta"):
        model = getattr(transformers, row.causal_lm_class)(
            getattr(transformers, row.config_class).from_dict(copy.deepcopy(config))
        )
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def a_config(row, **changes):
    return {
        "model_type": row.model_type,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 64,
        "intermediate_size": 24,
        **SIZES,
        **OPTIONS.get(row.model_type, {}),
        **changes,
    }


@pytest.mark.parametrize("row", LINEAR)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 6,
            "linear_key_head_dim": 10,
            "linear_value_head_dim": 14,
            "linear_conv_kernel_dim": 5,
        },
        dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim"), ...),
    ],
    ids=["small", "odd", "defaults"],
)
def test_tensors_of_linear_layers_are_transformers(row, changes):
    config = {key: value for key, value in a_config(row, **changes).items() if value is not ...}
    facts = read_model_facts(config, origin="config.json")
    prefix = row.layer_prefix.format(layer=0)
    expected = {
        f"{prefix}.{name}": tuple(evaluate_size(size, facts.other_sizes) for size in sizes)
        for name, sizes in row.other_tensors.items()
    }
    stock = stock_tensors(row, **config)
    assert expected == {name: shape for name, shape in stock.items() if f"{prefix}.linear_attn" in name}


@pytest.mark.parametrize("row", EXPERTS)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"mlp_only_layers": None},
        {"mlp_only_layers": [0, 2, 9]},
        {"decoder_sparse_step": 2},
        {"decoder_sparse_step": 3, "mlp_only_layers": [2]},
        {"first_k_dense_replace": 0},
        {"first_k_dense_replace": 3},
        {"mlp_layer_types": ["sparse", "dense", "dense", "sparse"]},
    ],
    ids=str,
)
def test_layers_with_experts_are_transformers(row, changes):
    config = a_config(row, **changes)
    stock = stock_tensors(row, **config)
    expected = {layer for layer in range(4) if f"model.layers.{layer}.mlp.experts.down_proj" in stock}
    assert read_model_facts(config, origin="config.json").expert_layers == expected


def kinds(row):
    """What makes of a layer with experts one with a plain MLP, by each key of a family."""
    known: dict[str, Any] = {
        "mlp_only_layers": [0],
        "decoder_sparse_step": 2,
        "first_k_dense_replace": 3,
        "mlp_layer_types": ["dense"] * 3 + ["sparse"],
    }
    assert row.experts is not None
    return [{key: known[key]} for key in row.experts.plain_keys]


@pytest.mark.parametrize(
    ("row", "changes"),
    [
        pytest.param(row.values[0], changes, marks=row.marks, id=f"{row.id}-{next(iter(changes))}")
        for row in EXPERTS
        for changes in kinds(row.values[0])
    ],
)
def test_a_plain_mlp_is_not_asked_for_where_there_are_experts(row, changes, tiny, found):
    assert row.experts is not None
    ((key, value),) = changes.items()
    layer = 1 if key in ("first_k_dense_replace", "mlp_layer_types") else 0
    source = tiny(row.model_type)
    router = f"tensor `model.layers.{layer}.{row.experts.router}` has shape [4, 32], of a mixture of experts"
    said = found(source, router, **changes)
    assert router in said and f"asks for a plain MLP in layer {layer} (" in said
    assert f"`{key}`: {value}" in said


def test_experts_are_not_asked_for_where_there_is_a_plain_mlp(tiny, found):
    source = tiny("qwen3_moe", mlp_only_layers=[1, 2])
    message = (
        "tensor `model.layers.1.mlp.gate_proj.weight` has shape [48, 32], of a plain MLP; config.json asks "
        "for a mixture of experts in layer 1 (`mlp_only_layers`: [2], `decoder_sparse_step`: 1)"
    )
    assert message in found(source, message, mlp_only_layers=[2])


@pytest.mark.parametrize("row", EXPERTS)
def test_a_token_takes_no_more_experts_than_there_are(row, tiny, found):
    source = tiny(row.model_type)
    message = "`num_experts_per_tok` 99 is more than the 4 experts of a layer"
    assert message in found(source, message, num_experts_per_tok=99)
    assert "is 0, not a whole number" in found(source, "`num_experts_per_tok` is 0", num_experts_per_tok=0)


@pytest.mark.parametrize("row", FAMILIES)
def test_what_tensors_fix_cannot_be_overridden(row):
    sizes = (key for shape in row.other_tensors.values() for size in shape for key in find_size_keys(size))
    for key in {*sizes, *(row.experts.plain_keys if row.experts else ())}:
        with pytest.raises(LeanKError, match=f"`config_overrides.{key}`: the weights fix this key"):
            apply_config_overrides(a_config(row), {key: 4})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("mlp_only_layers", 0),
        ("mlp_only_layers", ["0"]),
        ("mlp_only_layers", [True]),
        ("decoder_sparse_step", 0),
        ("decoder_sparse_step", "2"),
        ("first_k_dense_replace", -1),
        ("mlp_layer_types", ["sparse"]),
        ("mlp_layer_types", ["sparse"] * 3 + ["x"]),
    ],
)
def test_what_says_which_layers_have_experts_makes_sense(key, value):
    family = {"first_k_dense_replace": "glm4_moe", "mlp_layer_types": "hy_v3"}.get(key, "qwen3_moe")
    with pytest.raises(LeanKError, match=rf"^`config.json`: `{key}` is {re.escape(repr(value))}, not "):
        read_model_facts(a_config(ARCHITECTURES[family], **{key: value}), origin="config.json")


def test_tensors_that_no_layer_asks_for_are_let_be(tiny, edit_json, tmp_path):
    """Layers that predict further tokens stand behind the last one, whatever the config says."""
    source = tiny("qwen3_moe", mlp_only_layers=[0, 1, 2, 3])
    file = source / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.4.mlp.gate.weight"] = torch.zeros(4, 32)
    tensors["model.layers.0.mlp.gate.weight"] = torch.zeros(4, 32)  # beside a whole plain MLP
    save_file(tensors, file, {"format": "pt"})
    facts = read_model_facts(open_checkpoint(source).config, origin="config.json")
    out = export_checkpoint(source, all_channels_mask(facts), tmp_path / "out")
    assert verify_checkpoint(out, source).ok
    assert json.loads((out / "config.json").read_text())["mlp_only_layers"] == [0, 1, 2, 3]
