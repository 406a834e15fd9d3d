"""Exported tiny models, and the PyTorch runtime's models of the same weights."""

import copy
import functools
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from leank_convert.evaluate.prefill import pad_left, positions_of
from leank_convert.files import sha256_of
from leank_convert.onnx import PrunedModel, export_graph, leank_onnx
from leank_convert.onnx.leank_onnx_cache import digest_of
from leank_convert.windows import Windows
from tests.runtime.conftest import build_pair
from tests.runtime.tiny_inputs import feed
from tests.tiny_families import random_mask, word_tokenizer

WINDOW_SIZES = ("sink_size", "recent_size", "flush_size")
# Widths per layer and head, window sizes. Between them: heads of width 0 and D, odd widths, a layer that
# keeps nothing, a model that does, no sink, no recent tokens, flushes of one and longer than recent. Tracing
# takes seconds for a layer, and for every width in it half a second: one case has a second layer.
CASES = {
    "Llama": ([[0, 5, 5, 16], [0, 0, 0, 0]], (3, 6, 4)),
    "Qwen2": ([[0, 1, 16, 16]], (0, 6, 4)),
    "Qwen3": ([[0, 3, 7, 16]], (3, 0, 2)),
    "Mistral": ([[0, 0]], (0, 0, 1)),
    "Llama, one layer": ([[0, 5]], (3, 6, 4)),
    "Llama, V pruned": ([[5, 8, 8, 8]], (3, 6, 4)),
    "Olmo2": ([[0, 5]], (3, 6, 4)),
}
# Of V: a head that sees pruned tokens and keeps nothing of it, and some of one width that lie apart.
VALUE_WIDTHS = {"Llama, V pruned": [[0, 16, 4, 16]]}


@dataclass
class Exported:
    """A folder with an exported model, and the runtime's model, in float32."""

    folder: Path
    leank: Any

    def load(self):
        return leank_onnx.LeanKOnnx(self.folder, threads=1)


def build(case, windows):
    """The stock model and the runtime's, of the same weights, and the masks."""
    family, masks = case.split(",")[0], random_mask(CASES[case][0])
    pair = build_pair(masks, family, 2, *windows, "deferred")
    for name, parameter in pair.dense.named_parameters():
        if name.endswith("bias"):  # zero in a new model
            parameter.data.normal_(0, 0.3)
    pair.leank.load_state_dict(pair.dense.state_dict())
    if case in VALUE_WIDTHS:
        pair.leank.config.leank = {**pair.leank.config.leank, "value_widths": VALUE_WIDTHS[case]}
    if family == "Qwen2":  # of which keys have biases, the one family that centres them here
        key_mean = torch.randn(masks.shape, generator=torch.Generator().manual_seed(1)) * 3
        pair.leank.key_means = list(key_mean[:, None].unbind())
    return pair.dense, pair.leank, masks


def write(folder, dense, leank, masks, windows):
    folder.mkdir()
    key_mean = None if leank.key_means is None else torch.cat(leank.key_means)
    values = leank.config.leank.get("value_widths")
    export_graph(PrunedModel(dense, masks, Windows(*windows), key_mean=key_mean, value_widths=values), folder)
    word_tokenizer().save(str(folder / "tokenizer.json"))
    for file in Path(leank_onnx.__file__).parent.glob("leank_onnx*.py"):
        shutil.copy(file, folder)


def change_description(folder: Path, **values: object) -> None:
    """Replace keys, of `model` those that are given."""
    path = folder / "leank_onnx.json"
    content = json.loads(path.read_text())
    content |= values | {"model": content["model"] | values.pop("model", {})}
    path.write_text(json.dumps({**content, "sha256": digest_of(content)}))


def bless(folder: Path) -> None:
    """Bring the digests that a description has up to date, so that what lies behind them is looked at."""
    names = json.loads((folder / "leank_onnx.json").read_text())["files"]
    change_description(folder, files={name: sha256_of(folder / name) for name in names})


@pytest.fixture(scope="session")
def exported(once_per_run, tmp_path_factory):
    """Export a family of `CASES`, with its windows or others, once in a run."""

    @functools.cache
    def get(family="Llama", dtype="float32", windows=None):
        sizes = windows or CASES[family][1]
        dense, leank, masks = build(family, sizes)
        dense.to(getattr(torch, dtype))
        # A graph, which takes long to trace, knows of the sizes that of the sink.
        name = f"{family}-{dtype}-{sizes[0]}"
        folder = once_per_run(name, lambda path: write(path, dense, leank, masks, sizes))
        if windows is not None:
            folder = shutil.copytree(folder, tmp_path_factory.mktemp("windows") / "copy")
            change_description(folder, **dict(zip(WINDOW_SIZES, windows, strict=True)))
        return Exported(folder, leank)

    return get


@pytest.fixture
def copied(exported, tmp_path):
    """A copy of an exported folder, to be spoiled."""
    return shutil.copytree(exported().folder, tmp_path / "copy")


class RuntimeSession:
    """What the PyTorch runtime makes of the same turns: left-padded rows, `prune="deferred"`."""

    def __init__(self, leank):
        self.leank = leank
        self.cache = leank.build_cache("deferred")
        self.mask = None

    def feed(self, rows):
        """Logits of every token of every row, [tokens, V] per row."""
        ids, new_mask = pad_left([torch.tensor(row, dtype=torch.long) for row in rows], torch.device("cpu"))
        if self.mask is None:
            self.cache.prefill_length = ids.shape[1]
        self.mask = new_mask if self.mask is None else torch.cat([self.mask, new_mask], 1)
        positions = positions_of(self.mask)[:, -ids.shape[1] :]
        padded = None if bool(self.mask.all()) else self.mask
        logits = feed(self.leank, ids, self.cache, attention_mask=padded, position_ids=positions).logits
        return [values[real.bool()] for values, real in zip(logits, new_mask, strict=True)]


class Reference:
    """The runtime's model read beside a graph: in float64, and in the graph's type for torch's own error."""

    def __init__(self, leank, dtype=torch.float32):
        self.exact = RuntimeSession(copy.deepcopy(leank).double())
        self.torchs = RuntimeSession(copy.deepcopy(leank).to(dtype))
        self.squares = np.zeros(2)

    def hold(self, ours, rows):
        """Read a turn that the graph has read, and take the graph's logits into account."""
        for graphs, torchs, right in zip(ours, self.torchs.feed(rows), self.exact.feed(rows), strict=True):
            assert graphs.shape == tuple(right.shape)
            self.squares[0] += float(np.square(graphs - right.numpy()).sum())
            self.squares[1] += float((torchs.double() - right).square().sum())

    def settle(self):
        """The graph's error over all turns is within twice torch's."""
        ours, torchs = np.sqrt(self.squares)
        assert torchs > 0
        assert ours <= 2 * torchs
