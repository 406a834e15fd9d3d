import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from leank_convert.recipe import Recipe
from leank_convert.testbed.tasks import VOCABULARY
from leank_convert.testbed.tokenizer import save_tokenizer


@pytest.fixture(autouse=True)
def _one_thread():
    """Bits may depend on the number of threads; subprocesses are told the same number."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def retriever_folder(tmp_path_factory):
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
        vocab_size=len(VOCABULARY),
        max_position_embeddings=512,
    )
    model = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@pytest.fixture
def short_recipe():
    """Builds a recipe of a few steps; keyword arguments replace top-level keys."""

    def build(**changes):
        values = {
            "windows": {"sink_size": 4, "recent_size": 16, "flush_size": 4},
            "width_multiple": 4,
            "data": {
                "tasks": ["retrieval", "multi_value"],
                "wording": "testbed",
                "min_length": 200,
                "max_length": 280,
            },
            "stage1": {"steps": 7, "learning_rate": 0.1, "l1_weight": 0.06},
            "stage2": {"steps": 6, "learning_rate": 0.05},
            "save_every": 3,
        }
        return Recipe(**{**values, **changes})

    return build
