"""Masks of both formats; what the shards of format 1 may hold in their place."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from leank_convert.checkpoint_io import open_checkpoint, read_leank_config, read_leank_facts
from leank_convert.checkpoint_masks import read_channel_masks
from leank_convert.errors import LeanKError
from leank_convert.export import export_checkpoint
from leank_convert.inspection import inspect_artifact, render_inspection
from leank_convert.mask import ChannelMask
from leank_convert.onnx.pruned_model import load_pruned
from leank_convert.verify import verify_checkpoint

TENSOR = "model.layers.1.self_attn.channel_mask"


@pytest.fixture
def checkpoint(
    source_model: Callable[..., Path], fitting_mask: Callable[[Path], ChannelMask], tmp_path: Path
) -> Path:
    source = source_model(shards=False)
    return export_checkpoint(source, fitting_mask(source), tmp_path / "out")


def read_masks(folder: Path) -> torch.Tensor:
    config, leank = read_leank_config(folder)
    return read_channel_masks(open_checkpoint(folder), read_leank_facts(config, folder), leank)


def test_both_formats_say_the_same(
    checkpoint: Path, as_format_1: Callable[[Path], Path], source_model: Callable[..., Path]
) -> None:
    expected = read_masks(checkpoint)
    as_format_1(checkpoint)
    assert read_masks(checkpoint).equal(expected)
    assert load_pruned(checkpoint).channel_masks.equal(expected)
    facts = inspect_artifact(checkpoint)
    assert facts["format_version"] == 1
    assert "\nformat            1\n" in render_inspection(facts)
    report = verify_checkpoint(checkpoint, source_model(shards=False))
    assert report.ok, [check for check in report.checks if not check.ok]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda mask: mask.to(torch.uint8), f"tensor `{TENSOR}` is U8 [4, 12], not BOOL [4, 12]"),
        (lambda mask: mask[:, 1:].contiguous(), "is BOOL [4, 11], not BOOL [4, 12]"),
        (lambda mask: mask.flip(0), "the tensor of layer 1 keeps [12,"),
        (lambda mask: (mask.to(torch.uint8) * 3).view(torch.bool), "holds bytes that are neither 0 nor 1"),
        (lambda _: None, f"tensor `{TENSOR}` is missing"),
    ],
)
def test_tensors_that_are_no_masks_are_refused(
    edit: Callable[[torch.Tensor], torch.Tensor | None],
    message: str,
    checkpoint: Path,
    as_format_1: Callable[[Path], Path],
) -> None:
    file = as_format_1(checkpoint) / "model.safetensors"
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    tensors = load_file(file)
    changed = edit(tensors.pop(TENSOR))
    save_file({**tensors, **({} if changed is None else {TENSOR: changed})}, file, metadata)
    with pytest.raises(LeanKError) as caught:
        read_masks(checkpoint)
    assert message in str(caught.value)
    report = verify_checkpoint(checkpoint)
    assert [check.name for check in report.checks if not check.ok] == ["channel masks"]
