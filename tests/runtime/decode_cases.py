"""Decode steps on random data that no cache comes to hold: any pages and lengths, NaN where no token lies."""

import functools
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch

from runtime.constants_leank import Constants
from runtime.fp8_leank import as_bytes, quantise
from runtime.kernel_key_leank import TILE
from runtime.layout_leank import ChunkLayout, cut_layers, order_channels
from runtime.reference_leank import attend_naively
from runtime.stored_leank import StoreTensors
from runtime.turns_leank import attend_turn
from tests.runtime.stand_ins import PlainKernels


@dataclass(frozen=True)
class DecodeCase:
    """One decode step on random data: a cache that lacks every row's new tokens, and these tokens."""

    layout: ChunkLayout  # how channels are cut into chunks
    sink_size: int  # tokens at the front that are never pruned
    query: torch.Tensor  # `[B, H, d, D]`
    keys: torch.Tensor  # new tokens `[B, H_kv, d, D]`, NaN at padding
    values: torch.Tensor  # `[B, H_kv, d, D]`
    valid: torch.Tensor | None  # columns that are no padding `[B, d]`, bool; None if all are
    store: StoreTensors  # K and V on shuffled pages, NaN where no token lies
    seen: torch.Tensor  # tokens that a column sees, itself among them `[B, d]`, int32
    pruned: torch.Tensor  # pruned ones among them `[B, d]`, int32
    sinks: torch.Tensor | None = None  # logits of attention sinks `[H]`

    def appended(self):
        """Return the store with the new tokens in it, by plain indexing."""
        store = self.store.map_memory(torch.clone)
        head_dim, num_groups = self.layout.head_dim, self.query.shape[1] // self.keys.shape[1]
        plain = PlainKernels(head_dim, num_groups, self.layout.chunk_size)
        plain.append(self.keys, self.values, store, self.seen, self.valid)
        return store

    def of_one_checkpoint(self):
        """Return the case with one set of scales for all rows, as a checkpoint's are."""
        scales = {name: getattr(self.store, name)[:1] for name in ("key_scale", "value_scale")}
        return replace(self, store=self.store._replace(**scales))

    def is_appended_by(self, kernels):
        """Whether the new tokens end up where they belong, FP8 to the byte, and nothing else changes."""
        store = self.store.map_memory(torch.clone)
        kernels.append(self.keys, self.values, store, self.seen, self.valid)
        pairs = zip(store[:8], self.appended()[:8], strict=True)
        return all(torch.equal(*(as_bytes(part).nan_to_num(9e9) for part in pair)) for pair in pairs)

    def expected(self, softmax_scale):
        """Return what the naive reference gives after the append, fp64 `[B, H, d, D]`."""
        given = self.query, self.appended(), self.seen, self.pruned
        options = {"sink_size": self.sink_size, "softmax_scale": softmax_scale, "sinks": self.sinks}
        return attend_naively(*given, layout=self.layout, **options)

    def check(self, ours, softmax_scale, rows=slice(None)):
        """Hold attention to the rule in float64: at most twice the error that torch makes in its dtype."""
        error = (ours.double() - self.expected(softmax_scale)).abs()
        if self.valid is not None:
            error = error.masked_fill(~self.valid[:, None, :, None], 0)
        assert ours.dtype == self.query.dtype
        found, bound = error[rows].max(), 2 * torchs_error(ours.dtype, self.layout.head_dim, softmax_scale)
        assert found <= bound, f"{found:.2e}, twice torch's is {bound:.2e}"


@functools.cache
def torchs_error(dtype, head_dim, softmax_scale):
    """The error of dense SDPA in a dtype, over rows as short and as long as those of the tests."""
    generator = torch.Generator().manual_seed(0)
    errors = []
    for length in (2, 33, 65, 500):
        states = [torch.randn(5, 8, n, head_dim, generator=generator) for n in (64, length, length)]
        ours, exact = (
            torch.nn.functional.scaled_dot_product_attention(
                *(part.to(dtype).to(kind) for part in states), scale=softmax_scale
            )
            for kind in (dtype, torch.float64)
        )
        errors.append(float((ours.double() - exact).abs().max()))
    return max(errors)


def make_case(
    channel_mask,
    rows,
    *,
    chunk_size,
    num_groups,
    sink_size,
    dtype,
    device,
    seed=0,
    num_columns=1,
    valid=None,
    page_sizes=(TILE, TILE),
    cache_dtype=None,
    has_sinks=False,
    value_widths=None,
):
    """Make a decode step on random data, with a mean of keys and with scales of every row's own.

    A row of `rows` is tokens, new ones counted, and pruned ones among them: one number for all columns, or
    that of the first and that of the last. `value_widths` are as in `ChunkLayout`.
    """
    num_heads, head_dim = channel_mask.shape
    batch_size, device = len(rows), torch.device(device)
    widths = tuple(int(width) for width in channel_mask.sum(-1))
    (layout,) = cut_layers([widths], value_widths and [value_widths], head_dim)
    layout = replace(layout, chunk_size=chunk_size)
    generator = torch.Generator(device).manual_seed(seed)

    def random(*shape):
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    def random_scale():
        if cache_dtype is None:
            return None
        size = (batch_size, num_heads, head_dim)
        return torch.randint(-8, -5, size, generator=generator, device=device).float().exp2()

    real = torch.ones(batch_size, num_columns, dtype=torch.bool) if valid is None else valid.cpu()
    lengths = torch.tensor([row[0] for row in rows])
    stored = (lengths - real.sum(1)).clamp(min=0)[:, None]
    seen = (lengths[:, None] - real.sum(1, keepdim=True) + real.cumsum(1)).clamp(min=0)
    first, last = (torch.tensor([row[place] for row in rows])[:, None] for place in (1, -1))
    pruned = first + (last - first) * torch.arange(num_columns) // max(num_columns - 1, 1)
    index = layout.chunk_index(order_channels(channel_mask.to(device))[None])
    num_kept = layout.num_kept_chunks
    memory: list[torch.Tensor] = []
    tables: list[torch.Tensor] = []
    for page_size, in_window in zip(page_sizes, (False, True), strict=True):
        num_entries = -(-max(int(lengths.max()), 1) // page_size)
        token = torch.arange(num_entries * page_size)
        used = (token < lengths[:, None]).expand(batch_size, -1)
        if in_window:
            used = used & ((token < sink_size) | (token >= sink_size + first))
        is_page = used.view(batch_size, num_entries, page_size).any(2)
        num_pages = int(is_page.sum()) + 2
        # Entries without a token name a page that holds none.
        table = torch.full((batch_size, num_entries), num_pages - 1, dtype=torch.int32)
        order = torch.randperm(num_pages - 1, generator=torch.Generator().manual_seed(seed))
        table[is_page] = order[: num_pages - 2].to(torch.int32)
        free = torch.ones(num_pages, page_size, dtype=torch.bool)
        holds = (used & (token < stored)).view(batch_size, num_entries, page_size)
        free[table[is_page].long()] = ~holds[is_page]
        values = layout.dropped_value_index if in_window else layout.kept_value_index
        chunks = index[0, num_kept:] if in_window else index[0, :num_kept]
        keys = random(num_pages, len(chunks), page_size, chunk_size)
        keys.masked_fill_((chunks < 0)[None, :, None, :], 0)
        for pool in (keys, random(num_pages, len(values), page_size, layout.value_chunk)):
            pool.masked_fill_(free.to(device)[:, None, :, None], torch.nan)
            memory.append(pool if cache_dtype is None else quantise(pool, torch.tensor(2.0**-6)))
        tables.append(table.to(device))
    table = torch.tensor(layout.head_table, dtype=torch.int32, device=device)
    padding = ~real.to(device)[:, None, :, None]
    key_mean = random(batch_size, num_heads, head_dim).float()
    constants = Constants(key_mean, random_scale(), random_scale())
    # As a projection of both gives them, token by token.
    projected = random(batch_size, num_columns, 2 * num_heads, head_dim).transpose(1, 2)
    projected[:, :num_heads] += key_mean.to(dtype)[:, :, None]
    new_keys, new_values = projected.masked_fill(padding, torch.nan).chunk(2, dim=1)
    return DecodeCase(
        layout=layout,
        sink_size=sink_size,
        query=random(batch_size, num_heads * num_groups, num_columns, head_dim),
        keys=new_keys,
        values=new_values,
        valid=valid,
        store=StoreTensors._make([*memory, index, table, *tables, *constants, None]),
        seen=seen.to(device, torch.int32),
        pruned=pruned.to(device, torch.int32),
        sinks=random(num_heads * num_groups) if has_sinks else None,
    )


def run_turn(kernels, case, softmax_scale):
    """Attend to stored tokens, and to new ones that are not stored yet; None is plain torch."""
    spans = torch.stack([case.seen[:, -1] - case.seen.shape[1], case.pruned[:, 0]], 1).tolist()
    store: Any = SimpleNamespace(tensors=case.store, layout=case.layout)
    columns = SimpleNamespace(spans=spans)
    append: Any = SimpleNamespace(valid=case.valid, sink_size=case.sink_size, columns=columns)
    new = case.store.rounded(case.keys, case.values, case.layout)
    return attend_turn(case.query, *new, store, append, softmax_scale, case.sinks, kernels)


def run_case(kernels, case, softmax_scale):
    """Append and attend by kernel; return the output `[B, H, d, D]`. The case's store is left as it is."""
    store, sink_size = case.store.map_memory(torch.clone), case.sink_size
    plan = kernels.plan(case.seen, case.pruned, sink_size)
    kernels.append(case.keys, case.values, store, case.seen, case.valid)
    out = case.query.new_empty(case.query.shape)
    given = case.query, store, case.seen, case.pruned, plan
    options = {"sink_size": sink_size, "softmax_scale": softmax_scale, "sinks": case.sinks}
    assert out is kernels.attend(*given, **options, out=out)
    return out
