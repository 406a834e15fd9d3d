"""From a GGUF to a folder: the model's own weights, config and tokenizer."""

import json
import unicodedata

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Tokenizer

from bin.real_models.convert import convert
from leank_convert.errors import LeanKError
from leank_convert.tokenizer import load_tokenizer
from tests.bin.real_models.tiny_gguf import CONTROL, MERGES, TOKENS, make_model, write_gguf

MODEL_ID = "maker/tiny"


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    return folder


@pytest.fixture
def path(tmp_path):
    return tmp_path / "tiny.gguf"


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_the_folder_holds_the_model_of_the_file(folder, path, architecture):
    convert(write_gguf(path, architecture), folder, MODEL_ID)
    model, found = make_model(architecture), AutoModelForCausalLM.from_pretrained(folder)
    assert type(found) is type(model)
    expected, weights = model.state_dict(), found.state_dict()
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight, expected[name].to(torch.bfloat16)), name
    config, source = found.config.to_dict(), model.config.to_dict()
    for key in source.keys() - {"_name_or_path", "architectures", "transformers_version", "dtype"}:
        assert config[key] == source[key], key
    assert found.generation_config.eos_token_id == 2
    assert f'"_name_or_path": "{MODEL_ID}"' in (folder / "config.json").read_text()


def test_smollm_splits_every_digit_and_then_as_gpt2(folder, path):
    convert(write_gguf(path, "llama"), folder, MODEL_ID)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.tokenize("hello  12<|im_end|>") == ["hel", "l", "o", "ĠĠ", "1", "2", "<|im_end|>"]
    for text in ("hello  12 ÿ é 中", "\n\n x"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.model_max_length == 512
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token) == (
        "<|im_start|>", "<|im_end|>", "<|im_end|>", "<|endoftext|>"
    )  # fmt: skip
    message = [{"role": "user", "content": "hello"}]
    assert tokenizer.apply_chat_template(message, tokenize=False) == "hello<|im_end|>"


def test_qwen2_splits_and_normalizes_as_transformers_does(folder, path):
    convert(write_gguf(path, "qwen2"), folder, MODEL_ID)
    # In the file: transformers replaces it by its own when it loads this class.
    stages = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = {token: index for index, token in enumerate(TOKENS)}
    peer = Qwen2Tokenizer(vocabulary, [tuple(pair.split()) for pair in MERGES])
    for stage, expected in json.loads(peer.backend_tokenizer.to_str()).items():
        if stage in ("normalizer", "pre_tokenizer", "decoder"):
            assert stages[stage] == expected
    tokenizer = load_tokenizer(folder)
    assert isinstance(tokenizer, Qwen2Tokenizer)
    texts = (
        "def f(x):\n\treturn x**2  # don't",
        "hello  12 ÿ e\u0301 中",
        "\r\n\n x ",
        "a\u00a0\u2003 😀!?\n",
    )
    for text in texts:
        tokens = tokenizer(text)["input_ids"]
        assert tokens == peer(text)["input_ids"]
        assert tokenizer.decode(tokens) == unicodedata.normalize("NFC", text)


def test_qwen2_knows_special_tokens_and_leaves_unused_ones_out(folder, path):
    convert(write_gguf(path, "qwen2"), folder, MODEL_ID, also_ends=["<|endoftext|>"])
    tokenizer = load_tokenizer(folder)
    for index, token in enumerate(CONTROL):
        assert tokenizer(token)["input_ids"] == [index]
    assert tokenizer.decode(tokenizer("h<|im_end|>")["input_ids"], skip_special_tokens=True) == "h"
    ids = tokenizer("<tool_call>h")["input_ids"]
    assert ids[0] == len(TOKENS)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<tool_call>h"
    assert len(tokenizer) == len(TOKENS) + 1
    assert len(tokenizer.tokenize("[PAD0]")) == 6
    assert tokenizer.special_tokens_map == {
        "bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"
    }  # fmt: skip
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 0, "eos_token_id": [2, 0], "pad_token_id": 0}


def test_what_is_no_gguf_is_told(folder, path):
    path.write_bytes(b"GGUF")
    with pytest.raises(LeanKError, match=f"cannot read `{path}`"):
        convert(path, folder, MODEL_ID)
    assert not any(folder.iterdir())
