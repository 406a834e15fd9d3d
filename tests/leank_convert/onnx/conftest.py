"""Exported tiny models beside the PyTorch runtime's models of the same weights."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from leank_convert.onnx import PrunedModel, export_graph, leank_onnx
from runtime import configuration_leank, modeling_leank

VOCAB = 64
WORDS = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{number}" for number in range(VOCAB - 4))]
# Family, widths per layer and head, window sizes. Between them: heads of width 0 and D, odd widths, a layer
# that keeps nothing, a model that does, no sink, no recent tokens, flushes of one and longer than recent.
CASES: dict[str, tuple[str, list[list[int]], tuple[int, int, int]]] = {
    "llama": ("Llama", [[0, 5, 5, 16], [0, 0, 8, 8]], (3, 6, 4)),
    "mistral": ("Mistral", [[1, 16, 16, 16], [0, 0, 0, 0]], (0, 6, 4)),
    "qwen2": ("Qwen2", [[5, 5, 8, 16], [2, 2, 2, 2]], (3, 0, 2)),
    "qwen3": ("Qwen3", [[0, 8, 8, 8], [0, 3, 7, 16]], (2, 3, 9)),
    "no channels": ("Llama", [[0, 0]], (0, 0, 1)),
    "all channels": ("Llama", [[16, 16]], (3, 6, 4)),
}


@dataclass
class Exported:
    """A folder with an exported model, and the runtime's model, in float32."""

    folder: Path
    leank: Any

    def load(self) -> leank_onnx.LeanKOnnx:
        return leank_onnx.LeanKOnnx(self.folder, threads=1)


def copy_runner(folder: Path) -> None:
    """Put the runner's files into a folder, as an export does."""
    for path in Path(leank_onnx.__file__).parent.glob("leank_onnx*.py"):
        shutil.copyfile(path, folder / path.name)


def _masks(widths: Sequence[Sequence[int]], head_dim: int = 16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    masks = torch.zeros(len(widths), len(widths[0]), head_dim, dtype=torch.bool)
    for layer, row in enumerate(widths):
        for head, width in enumerate(row):
            masks[layer, head, torch.randperm(head_dim, generator=generator)[:width]] = True
    return masks


def _export(case: str, dtype: str, folder: Path) -> Exported:
    family, widths, (sink, recent, flush) = CASES[case]
    masks = _masks(widths)
    num_layers, kv_heads, head_dim = masks.shape
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": kv_heads * 2 * head_dim if family == "Qwen2" else kv_heads * 2 * 8,
        "intermediate_size": 40,
        "num_hidden_layers": num_layers,
        "num_attention_heads": kv_heads * 2,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        # Large weights make attention sharp, so that a wrong logit shows.
        "initializer_range": 0.3,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if family == "Mistral":
        sizes["sliding_window"] = None
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**sizes)
    dense = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in dense.named_parameters():
            if name.endswith("bias"):  # zero in a new model
                parameter.normal_(0, 0.3)
    block = {
        "format_version": 1,
        "widths": widths,
        "head_permutation": [list(range(kv_heads))] * num_layers,
        "sink_size": sink,
        "recent_size": recent,
        "flush_size": flush,
        "prune": "deferred",
    }
    leank_config = getattr(configuration_leank, f"LeanK{family}Config")(**sizes, leank=block)
    leank = getattr(modeling_leank, f"LeanK{family}ForCausalLM")(leank_config).eval()
    state = {f"model.layers.{i}.self_attn.channel_mask": mask for i, mask in enumerate(masks)}
    leank.load_state_dict(dense.state_dict() | state)
    dense.to(getattr(torch, dtype))
    export_graph(PrunedModel(dense, masks, sink, recent, flush), folder)

    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    copy_runner(folder)
    return Exported(folder, leank)


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Exported]:
    """Export a case of `CASES`, once in a run."""
    made: dict[tuple[str, str], Exported] = {}

    def get(case: str, dtype: str = "float32") -> Exported:
        if (case, dtype) not in made:
            made[case, dtype] = _export(case, dtype, tmp_path_factory.mktemp("onnx"))
        return made[case, dtype]

    return get


@pytest.fixture
def copied(exported: Callable[..., Exported], tmp_path: Path) -> Path:
    """A copy of an exported folder, to be spoiled."""
    return Path(shutil.copytree(exported("llama").folder, tmp_path / "copy"))


class RuntimeSession:
    """What the PyTorch runtime makes of the same turns: left-padded rows, `prune="deferred"`."""

    def __init__(self, leank: Any) -> None:
        self.leank = leank
        self.cache = leank.build_cache("deferred")
        self.mask: torch.Tensor | None = None

    def feed(self, rows: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Logits of every token of every row, [tokens, V] per row."""
        width = max(len(row) for row in rows)
        ids = torch.zeros(len(rows), width, dtype=torch.long)
        new_mask = torch.zeros_like(ids)
        for index, row in enumerate(rows):
            if row:
                ids[index, -len(row) :] = torch.tensor(row)
                new_mask[index, -len(row) :] = 1
        if self.mask is None:
            self.cache.prefill_length = width
            self.mask = new_mask
        else:
            self.mask = torch.cat([self.mask, new_mask], 1)
        positions = (self.mask.cumsum(1) - 1).clamp(min=0)[:, -width:]
        padded = None if bool(self.mask.all()) else self.mask
        with torch.no_grad():
            logits = self.leank(
                ids, attention_mask=padded, position_ids=positions, past_key_values=self.cache, use_cache=True
            ).logits
        return [values[real.bool()] for values, real in zip(logits, new_mask, strict=True)]


@pytest.fixture
def runtime_session() -> Callable[[Any], RuntimeSession]:
    return RuntimeSession
