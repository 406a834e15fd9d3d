"""Tokenizers are loaded without running a folder's code, without a question, and without a warning."""

import json
import logging

import pytest
import torch
from transformers import AutoTokenizer

from leank_convert.export import export_checkpoint
from leank_convert.recipe_file import load_recipe
from leank_convert.testbed import MODEL_DIR
from leank_convert.tokenizer import load_tokenizer
from leank_convert.train.model import find_model, load_model
from tests.checks import edit_json, fitting_mask, refusal

RECIPE = load_recipe("quickstart", ["data.min_length=256", "data.max_length=384"])


@pytest.fixture(autouse=True)
def _nobody_answers(monkeypatch):
    """transformers asks by `input` whether code may run."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asks on the terminal"))


def plant(folder, marker, **settings):
    """Give a model's folder a config, a model and a tokenizer of its own."""
    (folder / "tokenization_own.py").write_text(f"open({str(marker)!r}, 'w')\nclass Own: ...\n")
    own = dict.fromkeys(("AutoConfig", "AutoModelForCausalLM"), "tokenization_own.Own")
    edit_json(folder / "config.json", auto_map=own)
    tokenizers = {"AutoTokenizer": [None, "tokenization_own.Own"]}
    edit_json(folder / "tokenizer_config.json", **settings, auto_map=tokenizers)


def test_code_of_a_model_never_runs_and_its_own_class_is_used_where_transformers_knows_it(
    retriever_folder, copy_of, tmp_path
):
    folder, marker = copy_of(retriever_folder), tmp_path / "ran"
    expected = load_tokenizer(folder)
    plant(folder, marker)
    loaded = load_model(find_model(folder, RECIPE), RECIPE, torch.device("cpu"))
    assert type(loaded.model).__module__.startswith("transformers.")
    assert loaded.tokenizer.get_vocab() == expected.get_vocab()
    plant(folder, marker, tokenizer_class="OwnTokenizer", model_max_length=7)
    edit_json(folder / "config.json", model_type="own")
    with refusal("the tokenizer of `me/model` is code of its own") as caught:
        load_tokenizer(folder, "me/model")
    assert "trust_remote_code" not in f"{caught.value} {caught.value.hint}"
    assert not marker.exists()


@pytest.mark.parametrize("named", ["AutoModelForCausalLM", "AutoTokenizer", "RagTokenizer", 7])
def test_a_tokenizer_class_that_would_load_more_than_a_tokenizer_asks_nothing(
    named, shipped_checkpoint, copy_of
):
    folder = copy_of(shipped_checkpoint)
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": named}))
    with refusal(r"the tokenizer of `.*` (cannot be loaded|is code of its own)"):
        load_tokenizer(folder)


def test_a_checkpoints_tokenizer_needs_none_of_its_code(shipped_checkpoint, copy_of, caplog):
    folder = copy_of(shipped_checkpoint)
    for path in folder.glob("*.py"):
        path.unlink()
    logging.getLogger("transformers").addHandler(caplog.handler)
    try:
        found = load_tokenizer(folder)
    finally:
        logging.getLogger("transformers").removeHandler(caplog.handler)
    assert caplog.records == []
    expected = AutoTokenizer.from_pretrained(MODEL_DIR, trust_remote_code=False)
    assert type(found) is type(expected)
    assert found("goze 17 42 ; find goze")["input_ids"] == expected("goze 17 42 ; find goze")["input_ids"]


@pytest.mark.filterwarnings("default")
def test_no_code_is_carried_into_a_checkpoint(source_model, tmp_path, caplog):
    source, marker = source_model(max_position_embeddings=2048), tmp_path / "ran"
    plant(source, marker, chat_template="{{ messages }}")
    code = {"tokenizer_own.py", "tokenizer.pkl", "vocab.so", "chat_template.py", "LICENSE.py"}
    data = {"tokenizer.model", "tokenizer.model.v3", "vocab.json", "x.tiktoken", "LICENSE-2.0", "NOTICE.md"}
    for name in code | data:
        (source / name).write_text("{}")
    loading = {
        "_name_or_path": "me/other",
        "attn_implementation": "me/kernel",
        "custom_pipelines": {"x": {"impl": "pipeline.X"}},
        "configuration_files": ["config.5.0.0.json"],
        "transformers_weights": "other.safetensors",
    }
    edit_json(source / "config.json", **loading)
    out = export_checkpoint(source, fitting_mask(source), tmp_path / "out")
    names = {path.name for path in out.iterdir()}
    assert data <= names and not code & names
    assert all(name.endswith("_leank.py") for name in names if name.endswith(".py"))
    written = json.loads((out / "config.json").read_text())
    assert not loading.keys() & written.keys()
    assert written["auto_map"]["AutoConfig"] == "configuration_leank.LeanKLlamaConfig"
    assert "auto_map" not in json.loads((out / "tokenizer_config.json").read_text())
    (told,) = (record.getMessage() for record in caplog.records)
    assert all(repr(name) in told for name in code) and "`auto_map` of `tokenizer_config.json`" in told
    assert not marker.exists()
