"""What a step of rows tells the layers: without asking the device, and only once."""

import pytest
import torch

from runtime.rows_leank import RowState


def test_a_decode_step_without_padding_asks_nothing_of_the_device():
    """Meta tensors have no data: whatever reads a value raises."""
    rows = RowState(3, 6, 4, "eager")
    meta = torch.device("meta")
    rows.step(0, 2, 30, None, meta)
    for start in range(30, 50):
        step = rows.step(start, 2, 1, None, meta)
        assert step.append is not None and step.append.bounds == [start + 1] * 2


def test_a_padded_decode_step_asks_nothing_of_the_device():
    rows, meta = RowState(3, 6, 4, "eager"), torch.device("meta")
    mask = torch.ones(2, 30, dtype=torch.bool)
    mask[1, :11] = False
    rows.step(0, 2, 30, mask, torch.device("cpu"))
    assert rows.max_length == 30
    rows.lengths, rows.pruned_lengths = rows.lengths.to("meta"), rows.pruned_lengths.to("meta")
    for start in range(30, 50):
        rows.step(start, 2, 1, torch.ones(2, start + 1, dtype=torch.bool, device="meta"), meta)
    assert rows.max_length == 50


def test_the_first_layers_step_is_reused_and_a_gap_is_noticed():
    rows = RowState(3, 6, 4, "eager")
    cpu = torch.device("cpu")
    first = rows.step(0, 1, 5, None, cpu)
    assert rows.step(0, 1, 5, None, cpu) is first
    rows.step(5, 1, 1, None, cpu)
    with pytest.raises(RuntimeError, match="earlier forward pass did not reach every layer"):
        rows.step(3, 1, 1, None, cpu)


def test_padding_of_replayed_drafts_takes_no_pages():
    rows, cpu = RowState(3, 6, 4, "eager"), torch.device("cpu")
    rows.step(0, 2, 10, torch.ones(2, 10, dtype=torch.bool), cpu)
    for _ in range(20):
        rows.make_room(32)
        rows.next_valid = torch.arange(32) < torch.tensor([[32], [1]])
        rows.step(rows.num_columns, 2, 32, None, cpu)
        rows.next_valid = None
        rows.padding = torch.ones(2, rows.num_columns)
    assert rows.lengths.tolist() == [650, 30] and rows.tables.fits([650, 30])
    assert rows.tables.runs[1] <= 3


def test_a_step_moves_to_another_device_once():
    rows = RowState(3, 6, 4, "eager")
    rows.step(0, 1, 5, None, torch.device("cpu"))
    step = rows.step(5, 1, 1, None, torch.device("cpu"))
    moved = step.to(torch.device("meta"))
    assert {part.device.type for part in (moved.append.seen, *moved.append.places)} == {"meta"}
    assert moved.append.tables is step.append.tables
    assert step.to(torch.device("meta")) is moved and step.to(torch.device("cpu")) is step
