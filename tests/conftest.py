"""What holds for every test: offline, no files outside temporary folders, uninitialised memory is NaN."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path

# Read when huggingface_hub is imported, so they are set before anything imports it.
_HF_HOME = tempfile.mkdtemp(prefix="leank-test-hf-")
atexit.register(shutil.rmtree, _HF_HOME, ignore_errors=True)
os.environ["HF_HOME"] = _HF_HOME
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest  # noqa: E402
import torch  # noqa: E402
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: E402

from leank_convert.testbed import MODEL_DIR  # noqa: E402

POISONED = ("empty", "empty_like", "empty_strided")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def _poison_uninitialised_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill what `torch.empty` and its kin return with NaN, so that reading it shows."""

    def poisoned(allocate):
        def wrapper(*args, **kwargs):
            tensor = allocate(*args, **kwargs)
            if tensor.is_floating_point() and not tensor.is_meta:
                tensor.detach().fill_(float("nan"))
            return tensor

        return wrapper

    for name in POISONED:
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))


@pytest.fixture(scope="session")
def testbed_tokenizer() -> PreTrainedTokenizerFast:
    """The shipped model's, a token a word; not to be changed."""
    tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(MODEL_DIR)
    return tokenizer


@pytest.fixture(scope="session")
def retriever_folder(
    tmp_path_factory: pytest.TempPathFactory, testbed_tokenizer: PreTrainedTokenizerFast
) -> Path:
    """A tiny Llama that speaks the testbed's language, with random weights and attention far from uniform."""
    folder = tmp_path_factory.mktemp("models") / "retriever"
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=len(testbed_tokenizer),
        max_position_embeddings=512,
    )
    model = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    testbed_tokenizer.save_pretrained(folder)
    return folder
