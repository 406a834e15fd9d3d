"""From a GGUF to a folder: the model's own weights, config and tokenizer; what is no such file is refused."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from bin.smollm2.convert import convert
from leank_convert.errors import LeanKError
from leank_convert.tokenizer import load_tokenizer

MODEL_ID = "maker/tiny"


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    return folder


def test_the_folder_holds_the_model_of_the_file(folder, model, write_gguf):
    convert(write_gguf(), folder, MODEL_ID)
    found = AutoModelForCausalLM.from_pretrained(folder)
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


def test_the_folder_holds_the_tokenizer_of_the_file(folder, write_gguf):
    convert(write_gguf(), folder, MODEL_ID)
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


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"tokenizer.ggml.pre": "llama-bpe"}, "`tokenizer.ggml.pre` is 'llama-bpe', not 'smollm'"),
        ({"tokenizer.ggml.add_bos_token": True}, "`tokenizer.ggml.add_bos_token` is True"),
        ({"tokenizer.chat_template": None}, "no `tokenizer.chat_template`"),
        ({"llama.block_count": None}, "no `llama.block_count`"),
        ({"llama.block_count": "two"}, "`llama.block_count` is 'two'"),
        ({"llama.rope.scaling.type": "yarn"}, "`llama.rope.scaling.type` is 'yarn'"),
        ({"llama.attention.head_count": 3}, "describes no Llama model"),
        ({"llama.rope.dimension_count": 8}, "tensor `blk.0.attn_q.weight` is [64, 64], the model needs [32"),
        ({"llama.block_count": 3}, "no tensor for `model.layers.2."),
        ({"llama.block_count": 1}, "tensor `blk.1."),
        ({"llama.vocab_size": 100}, "263 tokens, 263 kinds of tokens and a vocabulary of 100"),
        ({"tokenizer.ggml.merges": ["no such"]}, "make no tokenizer"),
        ({"tokenizer.ggml.eos_token_id": 1000}, "special tokens"),
    ],
)  # fmt: skip
def test_a_file_that_says_something_else_is_refused(folder, write_gguf, keys, named):
    refused(write_gguf(keys), folder, named)


def test_another_architecture_is_refused(folder, write_gguf):
    named = "`general.architecture` is 'qwen2', not 'llama'"
    refused(write_gguf(architecture="qwen2"), folder, named)


def test_tensors_that_are_none_of_the_models_are_refused(folder, write_gguf):
    refused(write_gguf(weights={"rope_freqs.weight": torch.ones(8)}), folder, "tensor `rope_freqs.weight`")
    refused(write_gguf(weights={"output_norm.weight": None}), folder, "no tensor for `model.norm.weight`")


@pytest.mark.parametrize("length", [0, 3, 200, 20_000, -100])
def test_a_torn_file_is_refused(folder, write_gguf, length):
    path = write_gguf()
    path.write_bytes(path.read_bytes()[:length])
    refused(path, folder, "is damaged or no GGUF")


def refused(path, folder, named):
    with pytest.raises(LeanKError) as caught:
        convert(path, folder, MODEL_ID)
    assert str(path) in str(caught.value)
    assert named in str(caught.value)
    assert caught.value.hint
    assert not any(folder.iterdir())
