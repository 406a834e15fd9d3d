"""What a step of rows tells the layers, without asking the device; and how many pages rows get."""

import pytest
import torch

from runtime.pages_leank import PageTables, spread_pages
from runtime.rows_leank import RowState
from runtime.windows_leank import Windows


def test_a_decode_step_asks_nothing_of_the_device():
    """Meta tensors have no data: whatever reads a value raises."""
    rows, meta = RowState(Windows(3, 6, 4)), torch.device("meta")
    rows.step(0, 2, 30, None, meta)
    for start in range(30, 50):
        step = rows.step(start, 2, 1, None, meta)
        assert step.append is not None and step.append.bounds == [start + 1] * 2
    rows = RowState(Windows(3, 6, 4))  # with padding
    mask = torch.ones(2, 30, dtype=torch.bool)
    mask[1, :11] = False
    rows.step(0, 2, 30, mask, torch.device("cpu"))
    assert rows.max_length == 30
    rows.lengths, rows.pruned_lengths = rows.lengths.to("meta"), rows.pruned_lengths.to("meta")
    for start in range(30, 50):
        rows.step(start, 2, 1, torch.ones(2, start + 1, dtype=torch.bool, device="meta"), meta)
    assert rows.max_length == 50


def test_padding_of_replayed_drafts_takes_no_pages():
    rows, cpu = RowState(Windows(3, 6, 4)), torch.device("cpu")
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
    rows = RowState(Windows(3, 6, 4))
    rows.step(0, 1, 5, None, torch.device("cpu"))
    step = rows.step(5, 1, 1, None, torch.device("cpu"))
    moved = step.to(torch.device("meta"))
    assert {part.device.type for part in (moved.append.seen, *moved.append.places)} == {"meta"}
    assert moved.append.tables is step.append.tables
    assert step.to(torch.device("meta")) is moved and step.to(torch.device("cpu")) is step


@pytest.mark.parametrize("sizes", [(128, 1088), (0, 33), (3, 2**24)], ids=str)
@pytest.mark.parametrize(
    "lengths",
    [[1], [64], [32768], [4096, *[100] * 15], [0, 1, 63, 64, 65, 5000], [*range(1, 2000, 7)]],
    ids=lambda lengths: f"{len(lengths)} to {max(lengths)}",
)
def test_pages_hold_an_eighth_more_at_most_and_one_a_row(lengths, sizes):
    runs = spread_pages(lengths, *sizes)
    tables = PageTables(runs, *sizes)
    assert tables.fits(lengths)
    assert sum(runs) * 64 <= 9 / 8 * sum(lengths) + 64 * len(lengths)
    # All go on equally long: none is full while another has a page to spare.
    spare = [run * 64 - length for run, length in zip(runs, lengths, strict=True)]
    assert max(spare) - min(spare) < 64 or min(lengths) == 0


def test_growth_takes_few_steps():
    run, growths = 0, 0
    for length in range(1, 100_000):
        if length > run * 64:
            (run,), growths = spread_pages([length], 128, 1088), growths + 1
    assert growths < 100
