"""Exported tiny models, and the PyTorch runtime's models of the same weights."""

from __future__ import annotations

import copy
import functools
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from leank_convert.leank_block import encode_masks
from leank_convert.onnx import PrunedModel, export_graph, leank_onnx
from runtime import configuration_leank, modeling_leank

VOCAB = 64
WORDS = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{number}" for number in range(VOCAB - 4))]
# Widths per layer and head, window sizes. Between them: heads of width 0 and D, odd widths, a layer that
# keeps nothing, a model that does, no sink, no recent tokens, flushes of one and longer than recent.
CASES: dict[str, tuple[list[list[int]], tuple[int, int, int]]] = {
    "Llama": ([[0, 5, 5, 16], [0, 0, 8, 8]], (3, 6, 4)),
    "Qwen2": ([[1, 16, 16, 16], [0, 0, 0, 0]], (0, 6, 4)),
    "Qwen3": ([[0, 8, 8, 8], [0, 3, 7, 16]], (3, 0, 2)),
    "Mistral": ([[0, 0]], (0, 0, 1)),
}


@dataclass
class Exported:
    """A folder with an exported model, and the runtime's model, in float32."""

    folder: Path
    leank: Any

    def load(self) -> leank_onnx.LeanKOnnx:
        return leank_onnx.LeanKOnnx(self.folder, threads=1)


def _masks(widths: Sequence[Sequence[int]], head_dim: int = 16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    masks = torch.zeros(len(widths), len(widths[0]), head_dim, dtype=torch.bool)
    for layer, row in enumerate(widths):
        for head, width in enumerate(row):
            masks[layer, head, torch.randperm(head_dim, generator=generator)[:width]] = True
    return masks


def _build(family: str, windows: tuple[int, int, int]) -> tuple[Any, Any, torch.Tensor]:
    """The stock model and the runtime's, of the same weights, and the masks."""
    widths, _ = CASES[family]
    sink, recent, flush = windows
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
        "channel_masks": encode_masks(masks),
        "head_permutation": [list(range(kv_heads))] * num_layers,
        "sink_size": sink,
        "recent_size": recent,
        "flush_size": flush,
        "prune": "deferred",
    }
    leank_config = getattr(configuration_leank, f"LeanK{family}Config")(**sizes, leank=block)
    leank = getattr(modeling_leank, f"LeanK{family}ForCausalLM")(leank_config).eval()
    leank.load_state_dict(dense.state_dict())
    if family == "Qwen2":  # of which keys have biases, the one family that centres them here
        key_mean = torch.randn(masks.shape, generator=torch.Generator().manual_seed(1)) * 3
        leank.key_means = list(key_mean[:, None].unbind())
    return dense, leank, masks


def _write(folder: Path, model: Any, leank: Any, masks: torch.Tensor, sizes: tuple[int, int, int]) -> None:
    folder.mkdir()
    key_mean = None if leank.key_means is None else torch.cat(leank.key_means)
    export_graph(PrunedModel(model, masks, *sizes, key_mean=key_mean), folder)
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    for file in Path(leank_onnx.__file__).parent.glob("leank_onnx*.py"):
        shutil.copy(file, folder)


@pytest.fixture(scope="session")
def exported(once_per_run: Callable[..., Path]) -> Callable[..., Exported]:
    """Export a family of `CASES`, with its windows or others, once in a run."""

    @functools.cache
    def get(
        family: str = "Llama", dtype: str = "float32", windows: tuple[int, int, int] | None = None
    ) -> Exported:
        sizes = windows or CASES[family][1]
        dense, leank, masks = _build(family, sizes)
        dense.to(getattr(torch, dtype))
        name = "-".join([family, dtype, *map(str, windows or ())])
        folder = once_per_run(name, lambda path: _write(path, dense, leank, masks, sizes))
        return Exported(folder, leank)

    return get


@pytest.fixture
def copied(exported: Callable[..., Exported], tmp_path: Path) -> Path:
    """A copy of an exported folder, to be spoiled."""
    return Path(shutil.copytree(exported().folder, tmp_path / "copy"))


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
                ids, attention_mask=padded, position_ids=positions, cache=self.cache, use_cache=True
            ).logits
        return [values[real.bool()] for values, real in zip(logits, new_mask, strict=True)]


class Reference:
    """The runtime's model read beside a graph: in float64, and in the graph's type for torch's own error.

    Args:
        leank: The model in float32.
        dtype: The graph's.
    """

    def __init__(self, leank: Any, dtype: torch.dtype = torch.float32) -> None:
        self.exact = RuntimeSession(copy.deepcopy(leank).double())
        self.torchs = RuntimeSession(copy.deepcopy(leank).to(dtype))
        self.squares = np.zeros(2)

    def read(self, rows: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Read a turn; the exact logits."""
        exact = self.exact.feed(rows)
        for row, right in zip(self.torchs.feed(rows), exact, strict=True):
            self.squares[1] += float((row.double() - right).square().sum())
        return exact

    def hold(self, ours: Sequence[np.ndarray], rows: Sequence[Sequence[int]]) -> None:
        """Read a turn that the graph has read, and take its logits into account: all, or the last alone."""
        self.compare(ours, self.read(rows))

    def compare(self, ours: Sequence[np.ndarray], exact: Sequence[torch.Tensor]) -> None:
        for row, right in zip(ours, exact, strict=True):
            assert row.shape == tuple(right.shape)
            self.squares[0] += float(np.square(row - right.numpy()).sum())

    def settle(self) -> None:
        """The graph's error over all turns is within twice torch's."""
        ours, torchs = np.sqrt(self.squares)
        assert torchs > 0
        assert ours <= 2 * torchs


@pytest.fixture
def reference() -> type[Reference]:
    return Reference
