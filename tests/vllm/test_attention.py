"""Attention over pages scattered in a pool agrees with softmax over each query's own keys, written out."""

import itertools

import pytest
import torch

from leank_convert._runtime.fp8_leank import FP8, as_bytes, quantise
from leank_convert._runtime.pruned_attention_leank import decode_attention
from leank_convert.vllm.attention import append_by_slot, attend_densely, gather_tokens, view_tables
from leank_convert.vllm.rows import Rows
from tests.vllm.stores import make_store

HEAD_DIM, GROUPS, SINK, SCALE = 16, 2, 3, 0.3
LENGTHS = (70, 5, 33)
PAGES = PAGE, WINDOW_PAGE = 16, 32


def write_rows(store, layout, keys, values):
    """Write the rows' tokens `[3, n, H_kv, D]`, each row's first ones."""
    for row, length in enumerate(LENGTHS):
        token = torch.arange(length)
        slots = [
            table[row, token // size] * size + token % size
            for table, size in ((store.page_table, PAGE), (store.window_table, WINDOW_PAGE))
        ]
        append_by_slot(keys[row, :length], values[row, :length], store, layout, *slots)


def draw_tokens(num_heads):
    """Keys and values of the rows, and a mean of keys `[1, H_kv, D]`, larger than they are."""
    generator = torch.Generator().manual_seed(1)
    keys, values = (torch.randn(3, max(LENGTHS), num_heads, HEAD_DIM, generator=generator) for _ in range(2))
    return keys, values, 4 * torch.randn(1, num_heads, HEAD_DIM, generator=generator)


NARROW = (0, 5, 16)
VALUES = {
    "values": (NARROW, (0, 12, 8)),
    "values alone": ((16, 16, 16), (8, 0, 16)),
    "fp8 values": (NARROW, (0, 8, 16)),
}


@pytest.fixture(params=[(0, 5, 16), (4, 8, 8), (16, 16, 16), "fp8", *VALUES], ids=str)
def case(request):
    """Pages in which three rows have been written token by token; what they hold of them."""
    is_fp8, param = "fp8" in request.param, request.param
    widths, values = VALUES.get(param, (NARROW if is_fp8 else param, None))
    layout, mask, store = make_store(widths, HEAD_DIM, PAGES, is_fp8=is_fp8, value_widths=values)
    keys, values, _ = draw_tokens(len(mask))
    write_rows(store, layout, keys, values)
    if is_fp8:
        keys, values = (
            quantise(states, scale).float() * scale
            for states, scale in ((keys, store.key_scale), (values, store.value_scale))
        )
    return layout, mask, store, keys, values


def written_out(query, keys, values, mask, seen, pruned, value_widths=None):
    """One query `[H_kv * G, D]` over keys `[n, H_kv, D]`."""
    token = torch.arange(int(seen))
    whole = (token < SINK) | (token >= SINK + pruned)
    query = query.unflatten(0, (len(mask), GROUPS))
    output = torch.zeros_like(query)
    for head in range(len(mask)):
        channels = whole[:, None] | mask[head]
        scores = SCALE * query[head] @ (keys[:seen, head] * channels).T
        if not mask[head].any():
            scores = scores.masked_fill(~whole, -torch.inf)
        kept = HEAD_DIM if value_widths is None else value_widths[head]
        held = whole[:, None] | (torch.arange(HEAD_DIM) < kept)
        output[head] = scores.softmax(-1) @ (values[:seen, head] * held)
    return output.flatten(0, 1)


@pytest.mark.parametrize(("num_columns", "at_once"), [(1, 3), (3, 3), (3, 2), (1, 0)])
def test_every_column_sees_what_its_numbers_say(case, num_columns, at_once):
    layout, mask, store, keys, values = case
    query = torch.randn(3, len(mask) * GROUPS, num_columns, HEAD_DIM)
    column = torch.arange(num_columns)
    seen = (torch.tensor(LENGTHS)[:, None] - (num_columns - 1) + column).to(torch.int32)
    pruned = torch.stack([column * 4 + 20, column * 0, column * 8]).to(torch.int32)
    views = Rows(seen, pruned).views(store, SINK, max(LENGTHS), at_once * max(LENGTHS))
    options = {"layout": layout, "softmax_scale": SCALE}
    output = torch.cat([decode_attention(query[part], store, view, **options) for part, view in views])
    # Tokens of 5 pages are listed for each row.
    assert max(view.kept.count for _, view in views) == 5 * max(at_once, 1)
    for row, number in itertools.product(range(3), range(num_columns)):
        given = query[row, :, number], keys[row], values[row], mask
        expected = written_out(*given, seen[row, number], pruned[row, number], layout.value_widths)
        torch.testing.assert_close(output[row, :, number], expected)


def test_pages_that_were_given_back_are_not_read(case):
    layout, _, store, _, _ = case
    seen, pruned = torch.tensor([[70]], dtype=torch.int32), torch.tensor([[61]], dtype=torch.int32)
    one = store._replace(page_table=store.page_table[:1], window_table=store.window_table[:1])
    query = torch.randn(1, len(layout.widths) * GROUPS, 1, HEAD_DIM)
    options = {"layout": layout, "softmax_scale": SCALE}
    view = view_tables(one, seen, pruned, SINK, 70)
    before = decode_attention(query, one, view, **options)
    for pool in (store.window_keys, store.window_values):
        as_bytes(pool)[store.window_table[0, 1]] = 100  # tokens 32 … 63 are pruned
    torch.testing.assert_close(decode_attention(query, one, view, **options), before)


@pytest.mark.parametrize("num_queries", [70, 9])
def test_a_prompt_attends_densely_to_what_both_groups_hold(case, num_queries):
    layout, mask, store, keys, values = case
    gathered = gather_tokens(store, layout, 0, 70, torch.float32)
    torch.testing.assert_close(gathered[0], keys[0])
    torch.testing.assert_close(gathered[1], values[0])
    query = torch.randn(num_queries, len(mask) * GROUPS, HEAD_DIM)
    output = attend_densely(query, *gathered, SCALE)
    for number in range(num_queries):
        expected = written_out(query[number], keys[0], values[0], mask, 71 - num_queries + number, 0)
        torch.testing.assert_close(output[number], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8], ids=str)
def test_a_mean_comes_off_keys_and_nothing_else_before_they_are_written(dtype):
    layout, _, pages = make_store((0, 5, 16), HEAD_DIM, PAGES, is_fp8=dtype == FP8)
    keys, values, mean = draw_tokens(3)
    if dtype == torch.bfloat16:
        pages = pages.map_memory(lambda pool: pool.to(dtype))
        keys, values = keys.to(dtype), values.to(dtype)
    held = []
    for key_mean, given in ((mean, keys), (None, (keys.float() - mean).to(keys.dtype))):
        store = pages.map_memory(torch.clone)._replace(key_mean=key_mean)
        write_rows(store, layout, given, values)
        held.append([as_bytes(pool)[1:] for pool in store[:4]])
    torch.testing.assert_close(*held, rtol=0, atol=0)


def test_padding_changes_nothing_that_is_seen(case):
    layout, _, store, keys, _ = case
    before = [as_bytes(pool)[1:].clone() for pool in store[:4]]
    nowhere, nothing = torch.tensor([-1, -1]), torch.full_like(keys[0, :2], torch.nan)
    append_by_slot(nothing, nothing, store, layout, nowhere, nowhere)
    torch.testing.assert_close([as_bytes(pool)[1:] for pool in store[:4]], before, equal_nan=True)
    # Page 0 is read in place of pages that nothing sees, and 0 times no number would be none.
    assert all(pool[0, :, 0].float().isfinite().all() for pool in store[:4])


def test_what_is_no_number_does_not_outlive_its_request(case):
    layout, _, store, keys, _ = case
    one = store._replace(page_table=store.page_table[1:2], window_table=store.window_table[1:2])
    seen, pruned = torch.tensor([[5]], dtype=torch.int32), torch.tensor([[1]], dtype=torch.int32)
    query = torch.randn(1, len(layout.widths) * GROUPS, 1, HEAD_DIM)
    view, options = view_tables(one, seen, pruned, SINK, 5), {"layout": layout, "softmax_scale": SCALE}
    before = decode_attention(query, one, view, **options)
    behind = [
        table[0, 0] * size + torch.tensor([6, 7])
        for table, size in ((one.page_table, PAGE), (one.window_table, WINDOW_PAGE))
    ]
    nothing = torch.tensor([torch.nan, torch.inf])[:, None, None].expand_as(keys[0, :2])
    append_by_slot(nothing, nothing, store, layout, *behind)
    torch.testing.assert_close(decode_attention(query, one, view, **options), before, rtol=0, atol=0)
