"""Warnings when more factors or gates are equal and best than are kept."""

import pytest
import torch

from leank_convert.mask import ChannelMask
from leank_convert.train.loop import write_result
from leank_convert.train.scaling import count_largest
from leank_convert.train.state import TrainingDirectory


@pytest.fixture
def write(tmp_path, short_recipe):
    def run(factors, kept, gates=None, **changes):
        channel_mask = torch.zeros(2, 2, 16, dtype=torch.bool)
        channel_mask.view(-1)[:kept] = True
        mask = ChannelMask(channel_mask, factors)
        write_result(mask, TrainingDirectory(tmp_path), short_recipe(**changes), tmp_path, gates)

    return run


@pytest.mark.parametrize(("kept", "warned"), [(16, True), (20, False), (24, False)])
def test_more_equal_best_factors_than_channels_to_keep_are_told(write, caplog, kept, warned):
    factors = torch.full((2, 2, 16), 0.5)
    factors.view(-1)[:20] = 1.0
    assert count_largest(factors) == 20
    write(factors, kept)
    told = f"20 channels ended with the largest factor and the mask keeps {kept}" in caplog.text
    assert told == warned
    assert ("stage1.l1_weight" in caplog.text) == warned


@pytest.mark.parametrize(
    ("method", "gates", "told"),
    [
        ("duo-attention", [1.0, 1.0, 1.0, 0.2], "3 heads ended with the largest gate and the mask keeps 2"),
        ("duo-attention", [0.0, 0.0, 0.0, 0.0], "`heads.l1_weight` below 0.05 tells them apart"),
        ("duo-attention", [1.0, 1.0, 0.3, 0.2], None),
        ("duo-attention+leank", [1.0, 1.0, 1.0, 0.2], "`heads.l1_weight` above 0.05 tells them apart"),
    ],
)
def test_more_equal_best_gates_than_heads_to_keep_are_told(write, caplog, method, gates, told):
    write(None, 32, torch.tensor(gates).view(2, 2, 1), method=method)
    assert told in caplog.text if told else caplog.text == ""


def test_imported_gates_are_not_blamed_on_a_weight(write, caplog):
    write(None, 32, torch.ones(2, 2, 1), method="duo-attention", heads={"pattern": "folder"})
    assert caplog.text == ""


def test_a_mask_without_a_channel_is_told_as_one(write, caplog):
    write(torch.zeros(2, 2, 16), 0)
    assert "no head keeps a channel" in caplog.text
    assert "tells them apart" not in caplog.text
