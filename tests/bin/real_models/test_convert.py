"""From a GGUF to a folder: the model's own weights, config and tokenizer; what is no such file is refused."""

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


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"tokenizer.ggml.pre": "llama-bpe"}, "`tokenizer.ggml.pre` is 'llama-bpe', not 'smollm' or 'qwen2'"),
        ({"tokenizer.ggml.model": "llama"}, "`tokenizer.ggml.model` is 'llama', not 'gpt2'"),
        ({"tokenizer.ggml.add_bos_token": True}, "`tokenizer.ggml.add_bos_token` is True"),
        ({"tokenizer.ggml.add_eos_token": True}, "`tokenizer.ggml.add_eos_token` is True"),
        ({"tokenizer.chat_template": None}, "no `tokenizer.chat_template`"),
        ({"llama.block_count": None}, "no `llama.block_count`"),
        ({"llama.block_count": "two"}, "`llama.block_count` is 'two'"),
        ({"llama.rope.scaling.type": "yarn"}, "`llama.rope.scaling.type` is 'yarn'"),
        ({"llama.attention.sliding_window": 64}, "`llama.attention.sliding_window` is 64"),
        ({"llama.attention.head_count": 3}, "describes no LlamaForCausalLM"),
        ({"llama.rope.dimension_count": 8}, "tensor `blk.0.attn_q.weight` is [64, 64], the model needs [32"),
        ({"llama.block_count": 3}, "no tensor for `model.layers.2."),
        ({"llama.block_count": 1}, "tensor `blk.1."),
        ({"llama.vocab_size": 100}, "263 tokens, 263 kinds of tokens and a vocabulary of 100"),
        ({"tokenizer.ggml.token_type": [6] * len(TOKENS)}, "6 in `tokenizer.ggml.token_type`"),
        ({"tokenizer.ggml.merges": ["no such"]}, "make no tokenizer"),
        ({"tokenizer.ggml.eos_token_id": 1000}, "special tokens"),
        ({"general.architecture": "mamba"}, "`general.architecture` is 'mamba', not 'llama' or 'qwen2'"),
    ],
)  # fmt: skip
def test_a_file_that_says_something_else_is_refused(folder, path, keys, named):
    refused(write_gguf(path, "llama", keys), folder, named)


@pytest.mark.parametrize(
    ("architecture", "weights", "named"),
    [
        ("llama", {"rope_freqs.weight": torch.ones(8)}, "tensor `rope_freqs.weight`"),
        ("llama", {"blk.0.attn_q.bias": torch.ones(64)}, "tensor `blk.0.attn_q.bias`"),
        ("llama", {"nameless": torch.ones(8)}, "tensor `nameless`"),
        ("llama", {"output_norm.weight": None}, "no tensor for `model.norm.weight`"),
        ("qwen2", {"blk.1.attn_k.bias": None}, "no tensor for `model.layers.1.self_attn.k_proj.bias`"),
        ("qwen2", {"output.weight": torch.rand(265, 64)}, "`output.weight` is another matrix than"),
    ],
)  # fmt: skip
def test_other_tensors_than_the_models_are_refused(folder, path, architecture, weights, named):
    refused(write_gguf(path, architecture, weights=weights), folder, named)


def test_a_token_that_shall_end_answers_has_to_be_there(folder, path):
    refused(write_gguf(path, "llama"), folder, "no token `<|eot|>`", ["<|eot|>"])


@pytest.mark.parametrize("length", [0, 3, 200, 20_000, -100])
def test_a_torn_file_is_refused(folder, path, length):
    write_gguf(path, "llama")
    path.write_bytes(path.read_bytes()[:length])
    refused(path, folder, "is damaged or no GGUF")


def refused(path, folder, named, also_ends=()):
    with pytest.raises(LeanKError) as caught:
        convert(path, folder, MODEL_ID, also_ends)
    assert str(path) in str(caught.value)
    assert named in str(caught.value)
    assert caught.value.hint
    assert not any(folder.iterdir())
