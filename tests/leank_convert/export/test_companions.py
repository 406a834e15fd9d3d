"""A checkpoint's tokenizer gives the tokens that its source's gives."""

import json
import logging

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoTokenizer

from leank_convert.export import export_checkpoint
from leank_convert.export.companions import copy_companions
from tests.checks import fitting_mask

# Tokenizer classes split it in different ways: digits, an accent of its own, spaces, a contraction.
TEXT = "In 2024 it's  12345 cafe\u0301s,\n\n  and 007!"
COMPANIONS = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"}


def write_tokenizer(folder, **settings):
    """A byte-level BPE that merges digits, words and spaces wherever its pre-tokenizer lets it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(a, b) for a in "0123456789" for b in "0123456789"] + [("Ġ", digit) for digit in "0123456789"]
    merges += [("Ġ", "Ġ"), ("Ċ", "Ċ"), ("'", "s"), ("i", "t"), ("it", "'s"), ("Ġ", "a")]
    tokens = [*alphabet, *(a + b for a, b in merges)]
    vocabulary = {token: number for number, token in enumerate(dict.fromkeys(tokens))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("family", "named", "is_copied"),
    [
        ("llama", "PreTrainedTokenizerFast", True),
        ("mistral", "TokenizersBackend", True),
        ("qwen2", "Qwen2Tokenizer", True),
        ("qwen2", "LlamaTokenizerFast", False),
        ("qwen2", None, False),
    ],
)
def test_the_tokens_are_the_sources_and_its_files_are_copied_where_they_name_the_class(
    family, named, is_copied, source_model, out, caplog
):
    source = source_model(family, max_position_embeddings=2048)
    write_tokenizer(source, odd="  spacing ", **({"tokenizer_class": named} if named else {}))
    export_checkpoint(source, fitting_mask(source), out)
    assert caplog.records == []
    expected = AutoTokenizer.from_pretrained(source)
    config = AutoConfig.from_pretrained(out, trust_remote_code=True)
    # As the model card says, and in other ways.
    for given in ({"config": config}, {"trust_remote_code": True}, {"trust_remote_code": False}):
        found = AutoTokenizer.from_pretrained(out, **given)
        assert type(found) is type(expected)
        assert found(TEXT)["input_ids"] == expected(TEXT)["input_ids"]
    copied = {name for name in COMPANIONS if (out / name).read_bytes() == (source / name).read_bytes()}
    assert copied == (COMPANIONS if is_copied else COMPANIONS - {"tokenizer_config.json"})


def copied(source, target):
    target.mkdir()
    copy_companions(source, target)
    return json.loads((target / "tokenizer_config.json").read_text())


def test_a_tokenizer_that_cannot_be_loaded_is_copied_with_one_warning(source_model, tmp_path, caplog):
    source = source_model("qwen2")  # whose files say nothing
    assert copied(source, tmp_path / "out") == {"added": 1}
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert f"the tokenizer of `{source}` cannot be loaded" in caplog.text


def test_everything_that_is_missing_is_told_at_once(tmp_path, caplog, source):
    write_tokenizer(source, chat_template="{{ messages }}")
    (source / "chat_template.jinja").unlink()
    copied(source, tmp_path / "all")
    assert caplog.records == []
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (source / name).unlink()
    (tmp_path / "none").mkdir()
    copy_companions(source, tmp_path / "none")
    assert [record.getMessage() for record in caplog.records] == [
        f"`{source}` has no tokenizer, no chat template, no `generation_config.json`; nor will the checkpoint"
    ]
