"""An ONNX folder of a tiny model, and what `verify` finds when it has been spoiled."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from safetensors.torch import load_file, save_file

from leank_convert.verify import verify_checkpoint


@dataclass
class OnnxFolder:
    """An exported folder, and ways to spoil it."""

    path: Path

    def failed(self, source: Path | None = None) -> dict[str, str]:
        report = verify_checkpoint(self.path, source)
        assert report.ok == all(check.ok for check in report.checks)
        return {check.name: check.detail for check in report.checks if not check.ok}

    def made(self, source: Path | None = None) -> list[str]:
        return [check.name for check in verify_checkpoint(self.path, source).checks]

    def describe(self, place: str, edit: Callable[[Any], object] | None) -> None:
        """Change what stands at a place, keys and numbers between dots; without `edit` remove the key."""
        content = holder = json.loads((self.path / "leank_onnx.json").read_text())
        *way, last = [int(part) if part.isdigit() else part for part in place.split(".")]
        for part in way:
            holder = holder[part]
        if edit is None:
            del holder[last]
        else:
            holder[last] = edit(holder.get(last) if isinstance(holder, dict) else holder[last])
        (self.path / "leank_onnx.json").write_text(json.dumps(content))

    def bless(self) -> None:
        """Bring the digests up to date, so that what lies behind them is looked at alone."""

        def digests(files: dict[str, str]) -> dict[str, str]:
            return {name: hashlib.sha256((self.path / name).read_bytes()).hexdigest() for name in files}

        self.describe("files", digests)

    def rewrite(self, edit: Callable[[Any], object]) -> None:
        """Change the graph, its weights left where they are."""
        model = onnx.load(self.path / "model.onnx", load_external_data=False)
        edit(model)
        (self.path / "model.onnx").write_bytes(model.SerializeToString())
        self.bless()


@pytest.fixture(scope="session")
def exported(retriever_onnx: Path) -> OnnxFolder:
    """Not to be changed."""
    return OnnxFolder(retriever_onnx)


@pytest.fixture
def folder(exported: OnnxFolder, tmp_path: Path) -> OnnxFolder:
    """A copy, to be spoiled."""
    return OnnxFolder(Path(shutil.copytree(exported.path, tmp_path / "out")))


@pytest.fixture
def changed_source(retriever_folder: Path, tmp_path: Path) -> Callable[..., Path]:
    """Build the source with one tensor changed."""

    def build(name: str, edit: Callable[[torch.Tensor], torch.Tensor]) -> Path:
        copy = Path(shutil.copytree(retriever_folder, tmp_path / "source"))
        tensors = load_file(copy / "model.safetensors")
        tensors[name] = edit(tensors[name]).contiguous()
        save_file(tensors, copy / "model.safetensors", {"format": "pt"})
        return copy

    return build
