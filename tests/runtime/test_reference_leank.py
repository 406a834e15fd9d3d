"""Decode attention and turns in plain torch, against the naive reference."""

import math
from dataclasses import replace

import pytest
import torch

from leank_convert.vllm.attention import view_tables
from runtime.layout_leank import cut_layers
from runtime.pruned_attention_leank import decode_attention
from tests.runtime.decode_cases import make_case, run_turn
from tests.tiny_families import random_mask

D, SINK, SCALE = 64, 3, 0.3
WIDTHS = [(0, 16, 64), (0, 0), (64, 64), (5, 21, 63), (16, 0, 16), (32, 32)]
# Channels of K that heads keep, and of V.
VALUES = [((0, 16, 64), (0, 32, 64)), ((64, 64), (32, 0)), ((5, 21, 63), (8, 16, 24)), ((16, 16), (0, 0))]
# Tokens of rows, and pruned ones among them.
ROWS = [(1, 0), (2, 0), (3, 0), (4, 0), (41, 28), (9, 0), (16, 3), (63, 51), (64, 49), (65, 50)]


def case_of(widths, rows, *, columns=1, groups=2, dtype=torch.float32, **change):
    """Rows of so many stored tokens, pruned ones among them, in pages; what no token is put into is 1e4."""
    case = make_case(
        random_mask([widths], D)[0], [(stored + columns, *pruned) for stored, *pruned in rows],
        chunk_size=cut_layers([widths], None, D)[0].chunk_size, num_groups=groups, sink_size=SINK,
        dtype=dtype, device=torch.device("cpu"), num_columns=columns, page_sizes=(16, 8), **change,
    )  # fmt: skip
    return replace(case, store=case.store.map_memory(lambda pool: pool.nan_to_num(1e4)))


def in_store(case, loose=0):
    """Attention once the new tokens are stored."""
    store = case.appended()
    view = view_tables(store, case.seen, case.pruned, SINK, int(case.seen.max()) + loose)
    return decode_attention(case.query, store, view, layout=case.layout, softmax_scale=SCALE)


def in_turn(case, kernels=None):
    return run_turn(kernels, case, SCALE)


@pytest.mark.parametrize(
    ("widths", "value_widths"), [*((widths, None) for widths in WIDTHS), *VALUES], ids=str
)
@pytest.mark.parametrize("attend", [in_store, in_turn])
def test_it_is_attention_over_the_three_regions(widths, value_widths, attend):
    for columns in (1, 4):
        case = case_of(widths, ROWS, columns=columns, value_widths=value_widths)
        case.check(attend(case), SCALE)


def test_a_loose_bound_on_lengths_and_torchs_default_device_change_nothing():
    case = case_of((0, 16, 64), [(40, 29), (12, 1)], columns=4)
    case.check(in_store(case, loose=9), SCALE)
    with torch.device("meta"):
        ours = in_turn(case)
    case.check(ours, SCALE)


def test_every_column_may_see_its_own_part():
    for value_widths in (None, (0, 32, 64)):
        case = case_of((0, 16, 64), [(37, 22, 24), (9, 0, 5)], columns=3, value_widths=value_widths)
        assert len(case.pruned.unique()) > 3
        case.check(in_store(case), SCALE)


def test_an_empty_row_and_a_nan_query_stay_in_their_row():
    case = case_of((0, 16, 64), [(40, 29), (-1, 0), (12, 1)])
    assert in_store(case).isfinite().all()
    broken = case.query.clone()
    broken[1] = math.nan
    case.check(in_store(replace(case, query=broken)), SCALE, rows=[0, 2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("attend", [in_store, in_turn])
def test_half_precision_errs_no_more_than_twice_what_torch_does(attend, dtype):
    case = case_of((64, 64), [(40, 29), (23, 11)], columns=3, dtype=dtype)
    case.check(attend(case), SCALE)
