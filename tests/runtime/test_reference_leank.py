"""Decode attention and turns on a store filled by hand, against attention written out per row and head."""

from __future__ import annotations

import math

import pytest
import torch

from runtime.layout_leank import ChunkLayout, StoreTensors, choose_chunk_size, order_channels
from runtime.reference_leank import decode_attention
from runtime.turns_leank import attend_turn

SINK = 3
PAGE, WINDOW_PAGE = 16, 8


def paged(size, tokens, *states):
    """Put each row's `tokens` of states `[B, rows, S, n]` into shuffled pages: pools, table.

    What no token is put into is 1e4, and a page without tokens has an entry that no pool has.
    """
    batch, count = len(tokens), max(max(row, default=0) for row in tokens) // size + 1
    order = torch.randperm(batch * count, generator=torch.Generator().manual_seed(1)).view(batch, count)
    pools = [torch.full((batch * count, s.shape[1], size, s.shape[3]), 1e4, dtype=s.dtype) for s in states]
    table = torch.full((batch, count), 10**6, dtype=torch.int32)
    for row, own in enumerate(tokens):
        for token in own:
            page = table[row, token // size] = order[row, token // size]
            for pool, source in zip(pools, states, strict=True):
                pool[page, :, token % size] = source[row, :, token]
    return pools, table


class Case:
    """Random K and V of some rows, in the cache's layout and as plain tensors."""

    def __init__(
        self,
        widths,
        lengths,
        pruned,
        num_queries=1,
        groups=2,
        head_dim=64,
        dtype=torch.float32,
        seed=0,
        per_row=False,
    ):
        generator = torch.Generator().manual_seed(seed)
        batch, heads = len(lengths), len(widths)
        self.capacity = max(max(lengths), 1) + 9
        self.layout = ChunkLayout(tuple(widths), head_dim, choose_chunk_size([widths], head_dim))
        self.masks = torch.zeros(batch, heads, head_dim, dtype=torch.bool)
        for row in range(batch):
            for head, width in enumerate(widths):
                source = self.masks[0, head] if row and not per_row else None
                kept = torch.randperm(head_dim, generator=generator)[:width] if source is None else source
                self.masks[row, head, kept] = True
        self.lengths, self.pruned = lengths, pruned

        def random(*shape):
            return torch.randn(*shape, generator=generator).to(dtype)

        self.query = random(batch, heads * groups, num_queries, head_dim)
        self.keys, self.values = (random(batch, heads, self.capacity, head_dim) for _ in range(2))
        self.new_keys, self.new_values = (random(batch, heads, num_queries, head_dim) for _ in range(2))
        chunk_index = self.layout.chunk_index(order_channels(self.masks if per_row else self.masks[:1]))
        flat = self.keys.transpose(1, 2).flatten(2)  # [B, S, H_kv * D]
        index = chunk_index.expand(batch, -1, -1)
        size = self.layout.chunk_size
        chunks = torch.zeros(batch, index.shape[1], self.capacity, size, dtype=dtype)
        for row in range(batch):
            for chunk in range(index.shape[1]):
                for lane in range(size):
                    channel = int(index[row, chunk, lane])
                    if channel >= 0:
                        chunks[row, chunk, :, lane] = flat[row, :, channel]
        num_kept = self.layout.num_kept_chunks
        value_heads, window_heads = list(self.layout.value_heads), list(self.layout.window_heads)
        whole = [
            [t for t in range(n) if t < SINK or t >= SINK + p] for n, p in zip(lengths, pruned, strict=True)
        ]
        kept_pool, page_table = paged(
            PAGE, [range(length) for length in lengths], chunks[:, :num_kept], self.values[:, value_heads]
        )
        window_pool, window_table = paged(
            WINDOW_PAGE, whole, chunks[:, num_kept:], self.values[:, window_heads]
        )
        self.store = StoreTensors(
            *kept_pool,
            *window_pool,
            chunk_index,
            torch.tensor(self.layout.head_table),
            page_table,
            window_table,
        )

    def ours(self, new=False, new_valid=None, max_length=None, kernels=None):
        if new:
            return attend_turn(
                self.query,
                self.new_keys,
                self.new_values,
                new_valid,
                self.store,
                list(zip(self.lengths, self.pruned, strict=True)),
                layout=self.layout,
                sink_size=SINK,
                softmax_scale=0.3,
                kernels=kernels,
            )
        return decode_attention(
            self.query,
            self.store,
            torch.tensor(self.lengths, dtype=torch.int32)[:, None],
            torch.tensor(self.pruned, dtype=torch.int32)[:, None],
            layout=self.layout,
            sink_size=SINK,
            max_length=max_length or max(max(self.lengths), 1),
            softmax_scale=0.3,
        )

    def expected(self, new=False, new_valid=None, dtype=torch.float64):
        batch, heads, num_queries, head_dim = self.query.shape
        groups = heads // self.keys.shape[1]
        out = torch.zeros(batch, heads, num_queries, head_dim, dtype=dtype)
        for row in range(batch):
            length, pruned = self.lengths[row], range(SINK, SINK + self.pruned[row])
            for head in range(heads):
                kv = head // groups
                mask = self.masks[row, kv]
                for i in range(num_queries):
                    q = self.query[row, head, i].to(dtype)
                    logits, vs = [], []
                    for token in range(length):
                        k = self.keys[row, kv, token].to(dtype)
                        if token in pruned and not mask.any():
                            continue
                        logits.append(float((q * mask if token in pruned else q) @ k) * 0.3)
                        vs.append(self.values[row, kv, token].to(dtype))
                    for j in range(i + 1 if new else 0):
                        if new_valid is None or new_valid[row, j]:
                            logits.append(float(q @ self.new_keys[row, kv, j].to(dtype)) * 0.3)
                            vs.append(self.new_values[row, kv, j].to(dtype))
                    if logits:
                        out[row, head, i] = torch.tensor(logits, dtype=dtype).softmax(0) @ torch.stack(vs)
        return out


def torchs_error(dtype):
    """The error of dense SDPA in a dtype, over rows as long as those here."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(10, 6, n, 64, generator=generator).to(dtype) for n in (4, 65, 65))
    ours, exact = (
        torch.nn.functional.scaled_dot_product_attention(
            *(t.to(kind) for t in (query, key, value)), scale=0.3
        )
        for kind in (dtype, torch.float64)
    )
    return float((ours.double() - exact).abs().max())


def check(ours, exact):
    """Hold attention to float64: at most twice the error that torch makes in that dtype."""
    error, limit = float((ours.double() - exact).abs().max()), 2 * torchs_error(ours.dtype)
    assert error <= limit, f"{error:.2e}, twice torch's is {limit:.2e}"


WIDTHS = [(0, 16, 64), (0, 0), (64, 64), (5, 21, 63), (16, 0, 16), (32, 32)]
ROWS = [([40], [29]), ([1, 2, 3, 4, 41, 9, 16, 63, 64, 65], [0, 0, 0, 0, 28, 0, 3, 51, 49, 50])]


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@pytest.mark.parametrize("rows", ROWS, ids=str)
@pytest.mark.parametrize("new", [False, True], ids=["stored", "with new tokens"])
def test_it_is_attention_over_the_three_regions(widths, rows, new):
    case = Case(widths, *rows, num_queries=4 if new else 1)
    check(case.ours(new), case.expected(new))


@pytest.mark.parametrize("groups", [1, 3, 16])
def test_any_number_of_query_heads_shares_a_key_head(groups):
    case = Case((0, 16, 64), [40, 12], [29, 1], groups=groups, num_queries=2)
    check(case.ours(True), case.expected(True))


def test_every_row_may_keep_its_own_channels():
    case = Case((0, 16, 40), [40, 33, 17], [29, 20, 4], per_row=True)
    assert not torch.equal(case.masks[0], case.masks[1])
    check(case.ours(), case.expected())


def test_padding_among_new_tokens_is_not_seen():
    case = Case((0, 16, 64), [40, 12], [29, 1], num_queries=5)
    valid = torch.tensor([[True] * 5, [True, False, True, False, True]])
    case.new_keys[1, :, ~valid[1]] = case.new_values[1, :, ~valid[1]] = math.nan
    ours, expected = case.ours(True, valid), case.expected(True, valid)
    for row in range(2):
        check(ours[row][:, valid[row]], expected[row][:, valid[row]])
        assert not ours[row][:, ~valid[row]].any()


def test_a_loose_bound_on_lengths_changes_nothing():
    case = Case((0, 16, 64), [40, 12], [29, 1])
    check(case.ours(max_length=case.capacity), case.expected())


def test_every_column_may_see_its_own_part():
    lengths, pruned = [[39, 40, 43], [11, 11, 12]], [[22, 24, 24], [0, 0, 5]]
    case = Case((0, 16, 64), [43, 12], [22, 0], num_queries=3)
    seen, counts = (torch.tensor(numbers, dtype=torch.int32) for numbers in (lengths, pruned))
    settings = {"layout": case.layout, "sink_size": SINK, "max_length": 43, "softmax_scale": 0.3}
    ours = decode_attention(case.query, case.store, seen, counts, **settings)
    for column in range(3):
        case.lengths, case.pruned = ([row[column] for row in part] for part in (lengths, pruned))
        check(ours[:, :, column], case.expected()[:, :, column])


def test_an_empty_row_and_a_nan_query_stay_in_their_row():
    case = Case((0, 16, 64), [40, 0, 12], [29, 0, 1])
    case.query[1] = math.nan
    check(case.ours()[[0, 2]], case.expected()[[0, 2]])
    case = Case((0, 16, 64), [40, 0, 12], [29, 0, 1])
    assert case.ours().isfinite().all()


def test_a_turn_takes_no_notice_of_torchs_default_device():
    case = Case((0, 16, 64), [40, 12], [29, 1], num_queries=4)
    with torch.device("meta"):
        ours = case.ours(True)
    check(ours, case.expected(True))


def test_no_kernel_is_launched_for_a_row_that_holds_nothing():
    # No GPU takes a launch of no blocks. Without tokens a case is right without copies.
    case = Case((0, 16, 64), [0, 0], [0, 0], num_queries=4)
    check(case.ours(True, kernels=object()), case.expected(True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("new", [False, True], ids=["stored", "with new tokens"])
def test_half_precision_errs_no_more_than_twice_what_torch_does(dtype, new):
    case = Case((64, 64), [40, 23], [29, 11], num_queries=3 if new else 1, dtype=dtype)
    ours = case.ours(new)
    assert ours.dtype == dtype
    check(ours, case.expected(new))
