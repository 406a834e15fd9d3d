"""What config.json says of a model, against its tensors."""

import json
import re

import pytest
import torch

from leank_convert.checkpoint_io import open_checkpoint
from leank_convert.export import check_exportable, export_checkpoint
from leank_convert.export.plan import plan_edits
from leank_convert.mask import all_channels_mask
from leank_convert.verify import verify_checkpoint
from tests.checks import bless, edit_json, edit_tensors, facts_of, failed, refusal, refused_export
from tests.tiny_families import FAMILIES, some_families

LINEAR = [row for row in FAMILIES if "linear_attention" in row.values[0].other_layers]
SIZES = {"num_hidden_layers": 4, "tie_word_embeddings": False}


@pytest.fixture
def tiny(source_model):
    """Write a random model of four layers, of any family."""

    def build(family, **config):
        return source_model(family, shards=False, **{**SIZES, **config})

    return build


@pytest.fixture
def found(tmp_path):
    """What `verify` says of a checkpoint with an edited config.json, once an export refused such a source."""

    def run(source, message, **changes):
        facts = facts_of(source)
        mask, out = all_channels_mask(facts), tmp_path / "out"
        if not out.exists():
            export_checkpoint(source, mask, out)
        for folder in (source, out):
            (folder / "before.json").write_bytes((folder / "config.json").read_bytes())
            edit_json(folder / "config.json", **changes)
        refused_export(source, mask, tmp_path / "again", message)
        with refusal(re.escape(message)):
            check_exportable(source, tmp_path / "again")
        bless(out)
        details = list(failed(out).values())
        for folder in (source, out):
            (folder / "before.json").rename(folder / "config.json")
        assert len(details) == 1
        return details[0]

    return run


@pytest.mark.parametrize("row", LINEAR)
def test_sizes_of_linear_layers_are_those_of_their_tensors(row, tiny, found):
    source = tiny(row.model_type)
    sizes = {"linear_num_value_heads": 8, "linear_conv_kernel_dim": 8, "linear_num_key_heads": 4}
    for key, value in sizes.items():
        said = found(source, "tensor `model.layers.0.linear_attn.", **{key: value})
        assert "tensor `model.layers.0.linear_attn." in said and "config.json asks for" in said
    assert "config.json" in found(source, "config.json", linear_num_key_heads=-1)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {"vocab_size": 65}, "has shape [64, 32]; config.json asks for [65, 32]"),
        ("llama", {"hidden_act": "prelu"}, "`hidden_act` is 'prelu'"),
        ("qwen3", {"attention_bias": True}, "tensor `model.layers.0.self_attn.q_proj.bias` is missing"),
        ("qwen3_moe", {"mlp_only_layers": [0, 1]}, "tensor `model.layers.0.mlp.down_proj.weight` is missing"),
        ("qwen3_next", {"linear_num_value_heads": 3}, "`linear_num_value_heads` 3 is not a multiple of"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "tensor `model.layers.0.mlp.down_proj.weight` is missing"),
        ("glm4_moe", {"moe_intermediate_size": 48}, "has shape [32, 24]; config.json asks for [32, 48]"),
        ("hy_v3", {"mlp_layer_types": ["dense"] * 3 + ["sparse"]}, "1.mlp.down_proj.weight` is missing"),
        ("gpt_oss", {"num_local_experts": 5}, "router.weight` has shape [4, 32]; config.json asks for [5, "),
        ("qwen3_next", {"shared_expert_intermediate_size": 40}, "[32, 24]; config.json asks for [32, 40]"),
    ],
)
def test_tensors_are_those_that_the_config_asks_for(family, changes, message, tiny, found):
    assert message in found(tiny(family), message, **changes)


@pytest.mark.parametrize("row", some_families("mixtral", "qwen3_next"))
def test_a_token_takes_no_more_experts_than_there_are(row, tiny, found):
    source = tiny(row.model_type)
    message = "`num_experts_per_tok` 99 is more than the 4 experts of a layer"
    assert message in found(source, message, num_experts_per_tok=99)
    assert "is 0, not a whole number" in found(source, "`num_experts_per_tok` is 0", num_experts_per_tok=0)


def test_sinks_move_though_there_are_as_many_as_channels_of_a_head(tiny):
    """As in the published gpt-oss models; a norm of so many numbers would stay."""
    source = tiny("gpt_oss", head_dim=8)
    facts = facts_of(source)
    edits = plan_edits(open_checkpoint(source), facts, [[3, 1, 2, 0]] * 2)
    assert edits["model.layers.1.self_attn.sinks"].permutation == (3, 1, 2, 0)


def test_tensors_that_no_layer_asks_for_are_let_be(tiny, tmp_path):
    """Layers that predict further tokens stand behind the last one, whatever the config says."""
    source = tiny("qwen3_moe", mlp_only_layers=[0, 1, 2, 3])
    names = (f"model.layers.{layer}.mlp.gate.weight" for layer in (0, 4))  # beside a whole plain MLP; behind
    edit_tensors(source / "model.safetensors", **{name: torch.zeros(4, 32) for name in names})
    out = export_checkpoint(source, None, tmp_path / "out", all_channels=True)
    assert verify_checkpoint(out, source).ok
    assert json.loads((out / "config.json").read_text())["mlp_only_layers"] == [0, 1, 2, 3]
