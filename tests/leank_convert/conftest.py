"""Small model folders as a hub would hold them, written by transformers itself."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from leank_convert.architectures import read_model_facts
from leank_convert.errors import LeanKError
from leank_convert.export import export_checkpoint
from leank_convert.mask import ChannelMask
from leank_convert.recipe import Recipe
from leank_convert.testbed.tasks import VOCABULARY
from leank_convert.testbed.tokenizer import save_tokenizer

FAMILIES = {
    "llama": {"attention_bias": True, "mlp_bias": True, "head_dim": 12},
    "mistral": {"sliding_window": None, "tie_word_embeddings": True},
    "qwen2": {},
    "qwen3": {"head_dim": 6},
}


@pytest.fixture
def source_model(tmp_path: Path) -> Callable[..., Path]:
    """Write a random model of one family: 3 layers, 8 query heads, 4 KV heads, hidden size 32."""

    def build(family: str = "llama", *, dtype: str = "float32", shards: bool = True, **config: Any) -> Path:
        torch.manual_seed(5)
        options = {**FAMILIES[family], **config}
        configuration = AutoConfig.for_model(
            family,
            **{
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 3,
                "num_attention_heads": 8,
                "num_key_value_heads": 4,
                "vocab_size": 64,
                "max_position_embeddings": 512,
                "bos_token_id": 1,
                "eos_token_id": 2,
                **options,
            },
        )
        model = AutoModelForCausalLM.from_config(configuration, dtype=getattr(torch, dtype))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0, 0.3)
        folder = tmp_path / f"{family}-model"
        model.save_pretrained(folder, max_shard_size="20KB" if shards else "1GB")
        (folder / "tokenizer.json").write_text("{}")
        (folder / "tokenizer_config.json").write_text('{"added": 1}')
        (folder / "chat_template.jinja").write_text("{{ messages }}")
        return folder

    return build


@pytest.fixture
def ragged_mask() -> Callable[..., torch.Tensor]:
    """Bool [layers, heads, head_dim] with widths that differ, an empty and a full head in every layer."""

    def build(layers: int = 3, heads: int = 4, head_dim: int = 12, seed: int = 0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        mask = torch.zeros(layers, heads, head_dim, dtype=torch.bool)
        for layer in range(layers):
            widths = [head_dim, 0, *(torch.randint(1, head_dim, (heads - 2,), generator=generator).tolist())]
            order = torch.randperm(heads, generator=generator).tolist()
            for head, width in zip(order, widths, strict=True):
                mask[layer, head, torch.randperm(head_dim, generator=generator)[:width]] = True
        return mask

    return build


@pytest.fixture
def fitting_mask(ragged_mask: Callable[..., torch.Tensor]) -> Callable[[Path], ChannelMask]:
    """A ragged mask of the shape that a model folder needs."""

    def build(folder: Path) -> ChannelMask:
        facts = read_model_facts(json.loads((folder / "config.json").read_text()), origin="config.json")
        return ChannelMask(ragged_mask(facts.num_hidden_layers, facts.num_key_value_heads, facts.head_dim))

    return build


@pytest.fixture
def snapshot() -> Callable[[Path], dict[str, str] | None]:
    """Digests of all files of a folder by relative path; None where there is no folder."""

    def digest(folder: Path) -> dict[str, str] | None:
        if not folder.exists():
            return None
        files = (path for path in folder.rglob("*") if path.is_file())
        return {
            str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files
        }

    return digest


@pytest.fixture
def refused(snapshot: Callable[[Path], dict[str, str] | None]) -> Callable[..., LeanKError]:
    """Run an export that must fail as the user's mistake and leave its target as it was."""

    def run(source: Path, mask: ChannelMask, out: Path, message: str, **options: Any) -> LeanKError:
        before = snapshot(out)
        with pytest.raises(LeanKError, match=re.escape(message)) as caught:
            export_checkpoint(source, mask, out, **options)
        assert snapshot(out) == before
        assert not out.with_name(out.name + ".partial").exists()
        assert caught.value.exit_code == 2
        return caught.value

    return run


@pytest.fixture
def edit_json() -> Callable[..., None]:
    """Replace keys of a JSON file; a value of `...` removes the key."""

    def edit(path: Path, **changes: Any) -> None:
        value = json.loads(path.read_text())
        value.update(changes)
        path.write_text(json.dumps({key: item for key, item in value.items() if item is not ...}))

    return edit


@pytest.fixture(scope="session")
def retriever_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
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
def short_recipe() -> Callable[..., Recipe]:
    """Builds a recipe of a few steps; keyword arguments replace top-level keys."""

    def build(**changes: Any) -> Recipe:
        values: dict[str, Any] = {
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
