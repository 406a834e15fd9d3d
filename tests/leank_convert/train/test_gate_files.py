"""Gates of heads in DuoAttention's files: read, written, refused."""

import json
import logging

import pytest
import torch

from leank_convert.architectures import read_model_facts
from leank_convert.errors import LeanKError
from leank_convert.recipe import Recipe
from leank_convert.train.gates import load_pattern, save_pattern

# As numpy writes it: two layers of three heads, one number below 0 and one above 1.
GATES = (
    "-9.584426879882812500e-05\t5.585937500000000000e-01\t1.000000000000000000e+00\n"
    "1.015625000000000000e+00\t0.000000000000000000e+00\t7.343750000000000000e-01\n"
)
CONFIG = {"model_name": "models/M", "lr": 0.02, "sink_size": 128, "recent_size": 256}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "full_attention_heads.tsv").write_text(GATES)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


@pytest.fixture
def load(folder):
    """Reads the folder's gates for a model of so many layers and KV heads."""

    def run(layers=2, heads=3, **changes):
        recipe = Recipe(method="duo-attention", heads={"pattern": str(folder)}, **changes)
        config = {
            "model_type": "llama",
            "num_hidden_layers": layers,
            "num_attention_heads": 12,
            "num_key_value_heads": heads,
            "hidden_size": 96,
            "vocab_size": 10,
        }
        facts = read_model_facts(config, origin="tiny")
        return load_pattern(recipe, facts)

    return run


def test_gates_are_read_by_layer_and_head_and_clamped(load):
    gates = load()
    assert gates.dtype == torch.float32
    assert gates[..., 0].tolist() == [[0.0, 0.55859375, 1.0], [1.0, 0.0, 0.734375]]


def test_a_saved_pattern_reads_back_with_the_same_bits(load, folder):
    gates = torch.rand(4, 2, 1)
    save_pattern(gates, Recipe().windows, folder)
    assert torch.equal(load(4, 2), gates)
    assert json.loads((folder / "config.json").read_text()) == {"sink_size": 128, "recent_size": 1024}


def test_a_single_layer_or_head_keeps_its_shape(load, folder):
    (folder / "full_attention_heads.tsv").write_text("0.5\t1.0\n")
    assert load(1, 2).shape == (1, 2, 1)
    (folder / "full_attention_heads.tsv").write_text("0.5\n1.0\n")
    assert load(2, 1).shape == (2, 1, 1)


def test_another_models_pattern_is_refused(load):
    with pytest.raises(LeanKError, match=r"full_attention_heads.tsv` has gates of shape \[2, 3\].*\[3, 2\]"):
        load(3, 2)


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("full_attention_heads.tsv", None, "No such file"),
        ("full_attention_heads.tsv", " \n", "it is empty"),
        ("full_attention_heads.tsv", "0.5\t1\t1\n0.5\n", "columns"),
        ("full_attention_heads.tsv", "0.5\t1\t1\n0\t0\t0\n# of M\n", "from 3 to 1 at row 3$"),
        ("full_attention_heads.tsv", "0.5\tnan\t1\n0\t0\t0\n", "a gate is not finite"),
        ("config.json", None, "No such file"),
        ("config.json", "{", "line 1"),
        ("config.json", "[]", "indices"),
        ("config.json", '{"sink_size": 4}', "there is no key 'recent_size'"),
        ("config.json", '{"sink_size": -4, "recent_size": 1}', "`sink_size` is `-4`"),
        ("config.json", '{"sink_size": 4, "recent_size": true}', "`recent_size` is `True`"),
    ],
)
def test_files_of_another_form_are_refused_by_name(load, folder, name, text, reason):
    (folder / name).unlink()
    if text is not None:
        (folder / name).write_text(text)
    with pytest.raises(LeanKError, match=rf"{name}` of `heads.pattern` cannot be read: .*{reason}") as caught:
        load()
    assert "attn_patterns" in caught.value.hint


@pytest.mark.parametrize(("recent_size", "warns"), [(256, False), (255, True)])
def test_smaller_windows_than_a_pattern_was_learned_with_are_told(load, caplog, recent_size, warns):
    with caplog.at_level(logging.WARNING, logger="leank_convert"):
        load(windows={"sink_size": 128, "recent_size": recent_size})
    assert ("`windows.recent_size` is 255" in caplog.text) == warns
    assert bool(caplog.records) == warns
