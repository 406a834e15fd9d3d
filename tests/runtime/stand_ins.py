"""What stands in for a GPU: graphs that record operations, and the kernels' interface in plain torch."""

import functools
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from runtime.fp8_leank import as_bytes, quantise


@functools.cache
def places_written(func):
    """Which arguments an operation writes to."""
    kinds = [argument.alias_info for argument in func._schema.arguments]
    return [place for place, kind in enumerate(kinds) if kind is not None and kind.is_write]


def flat(value):
    """What an operation takes or gives, lists taken apart."""
    return [leaf for part in value for leaf in flat(part)] if isinstance(value, list | tuple) else [value]


class Recorder(TorchDispatchMode):
    """Runs operations, writes them down, and remembers what memory held before it was overwritten."""

    def __init__(self):
        super().__init__()
        self.operations: list[Any] = []
        self.before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self.made: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default):
            raise RuntimeError("the host asked for a value during a capture")
        for place in places_written(func):
            if place < len(args) and (storage := args[place].untyped_storage()).data_ptr() not in self.made:
                self.before.setdefault(storage.data_ptr(), (storage, storage.clone()))
        out = func(*args, **kwargs)
        used = {
            value.untyped_storage().data_ptr()
            for value in flat([*args, *kwargs.values()])
            if isinstance(value, torch.Tensor)
        }
        # Views and what was written in place need no copy of their own at a replay.
        results = [
            (index, value)
            for index, value in enumerate(flat(out))
            if isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() not in used
        ]
        self.made.update(value.untyped_storage().data_ptr() for _, value in results)
        self.operations.append((func, args, kwargs, results))
        return out


class RecordedGraph:
    """Stands in for `StepGraph` on the CPU and behaves as a CUDA graph does.

    A capture leaves memory as it was, and a replay does the recorded operations on the recorded tensors,
    whatever Python has come to think of the cache since. So a host number that found its way into a step,
    or a tensor that was replaced, shows as a wrong token.
    """

    device_type = "cpu"
    failures: list[BaseException]

    def __init__(self, device, memory):
        self._recorder = Recorder()

    @staticmethod
    def is_capturing():
        return False

    @staticmethod
    def stream_of(device):
        return 0

    def capture(self, function):
        try:
            with self._recorder:
                output = function()
                if self.failures:
                    raise self.failures.pop()
        finally:
            for storage, content in self._recorder.before.values():
                storage.copy_(content)
        return output

    def replay(self):
        for func, args, kwargs, results in self._recorder.operations:
            new = flat(func(*args, **kwargs))
            for index, old in results:
                old.copy_(new[index])


class PlainKernels:
    """The kernels' interface in plain torch: lengths and pages are read from tensors alone, head by head."""

    def __init__(self, head_dim, num_groups, chunk_size, **_):
        self.head_dim, self.num_groups, self.chunk_size = head_dim, num_groups, chunk_size

    def plan(self, seen, pruned, sink_size):
        return seen + pruned + 1000 * sink_size

    def append(self, keys, values, store, seen, valid):
        valid = seen > 0 if valid is None else valid & (seen > 0)
        rows = torch.arange(len(seen), device=seen.device)
        index = store.chunk_index.long().expand(len(seen), -1, -1)
        num_kept, table = store.kept_keys.shape[1], store.head_table[:-1]
        size, place = self.value_chunk(store), torch.arange(self.head_dim, device=seen.device)
        in_store = (place < table[:, 8, None] * size).flatten()  # V's channels, of all heads
        if store.key_mean is not None:
            keys = (keys - store.key_mean[:, :, None]).to(keys.dtype)
        if store.key_scale is not None:
            keys = as_bytes(quantise(keys, store.key_scale[:, :, None]))
            values = as_bytes(quantise(values, store.value_scale[:, :, None]))
        for column in range(seen.shape[1]):
            token = (seen[:, column].long() - 1).clamp(min=0)
            lanes = keys[:, :, column].flatten(1).gather(1, index.clamp(min=0).flatten(1)).view_as(index)
            lanes = torch.where(index < 0, 0, lanes)
            keep, of_values = valid[:, column, None, None], values[:, :, column].flatten(1)
            for pool, pages, new in (
                (store.kept_keys, store.page_table, lanes[:, :num_kept]),
                (store.window_keys, store.window_table, lanes[:, num_kept:]),
                (store.values, store.page_table, of_values[:, in_store].unflatten(1, (-1, size))),
                (store.window_values, store.window_table, of_values[:, ~in_store].unflatten(1, (-1, size))),
            ):
                pool = as_bytes(pool)
                page, place = pages[rows, token // pool.shape[2]], token % pool.shape[2]
                pool[page, :, place] = torch.where(keep, new, pool[page, :, place])

    def value_chunk(self, store):
        return store.values.shape[3]

    def rope_append(self, projected, cos, sin, norms, store, seen, valid):
        heads = projected.view(*seen.shape, -1, self.head_dim).transpose(1, 2)
        num_kv_heads = len(store.head_table) - 1
        query, key, value = heads.split([heads.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads], 1)
        if norms is not None:
            both = (query, norms[0]), (key, norms[1])
            query, key = (self.add_norm(x, None, w, norms[2])[1] for x, w in both)
        query, key = (
            states * cos[:, None]
            + torch.cat([-states[..., self.head_dim // 2 :], states[..., : self.head_dim // 2]], -1)
            * sin[:, None]
            for states in (query, key)
        )
        self.append(key, value, store, seen, valid)
        return query

    def add_norm(self, hidden, delta, weight, eps):
        summed = hidden if delta is None else hidden + delta
        return summed, weight * summed * torch.rsqrt(summed.pow(2).mean(-1, keepdim=True) + eps)

    def gated_product(self, states, weight, bias=None):
        gate, up = self.product(states, weight, bias).chunk(2, -1)
        return torch.nn.functional.silu(gate) * up

    attends_turns = False

    def copy_rows(self, first, new_keys, new_values):
        rows = [replace(first, row=first.row + row).dense(new_keys.dtype) for row in range(len(new_keys))]
        return [
            torch.cat([torch.stack(held), new.transpose(1, 2)], 1)[:, :, first.layout.value_heads]
            for held, new in zip(zip(*rows, strict=True), (new_keys, new_values), strict=True)
        ]

    def product(self, states, weight, bias=None):
        return torch.nn.functional.linear(states, weight, bias)

    def attend(self, query, store, seen, pruned, plan, *, sink_size, softmax_scale, sinks=None, out=None):
        seen = plan - pruned - 1000 * sink_size  # a plan of another step or sink shows
        batch, num_columns = seen.shape
        fallen = torch.zeros(query.shape[:3])  # what a sink's logit falls by, as all others do
        if store.key_mean is not None:
            fallen = (query * store.key_mean.repeat_interleave(self.num_groups, 1)[:, :, None]).sum(-1)
        if store.key_scale is not None:
            query = query * store.key_scale.repeat_interleave(self.num_groups, 1)[:, :, None]
        index = store.chunk_index.long().expand(batch, -1, -1)
        channels, num_kept = index.clamp(min=0) % self.head_dim, store.kept_keys.shape[1]
        capacity = store.page_table.shape[1] * store.kept_keys.shape[2]

        def tokens_of(pool, table):
            """All that tables name `[B, rows of the pool, tokens, numbers]`; what is not there is NaN."""
            pages = table.clamp(0, len(pool) - 1).long()
            taken = as_bytes(pool)[pages].view(pool.dtype).to(query.dtype)
            return taken.transpose(1, 2).flatten(2, 3)[:, :, :capacity]

        kept, values = (tokens_of(pool, store.page_table) for pool in (store.kept_keys, store.values))
        pools = store.window_keys, store.window_values
        dropped, window = (tokens_of(pool, store.window_table) for pool in pools)
        tokens = torch.arange(capacity)
        visible = tokens < seen[..., None]  # [B, d, tokens]
        whole = visible & ((tokens < sink_size) | (tokens >= sink_size + pruned[..., None]))
        outputs = []
        for head, row in enumerate(store.head_table[:-1].tolist()):
            first, count, value, first_dropped, num_dropped, first_window, _, _, num_values, _ = row
            num_window = self.head_dim // self.value_chunk(store) - num_values
            q = query[:, head * self.num_groups : (head + 1) * self.num_groups]
            parts = []
            for chunks, of in (
                (range(first, first + count), kept),
                (range(num_kept + first_dropped, num_kept + first_dropped + num_dropped), dropped),
            ):
                scores = torch.zeros(batch, self.num_groups, num_columns, capacity)
                for chunk in chunks:
                    lanes = q.gather(3, channels[:, None, None, chunk].expand(*q.shape[:3], self.chunk_size))
                    own = of[:, chunk - (0 if of is kept else num_kept)]
                    scores = scores + lanes @ own[:, None].transpose(2, 3) * softmax_scale
                parts.append(scores)
            scores = parts[0] + torch.where(whole[:, None], parts[1], 0)
            counted = visible if count else whole
            scores = scores.masked_fill(~counted[:, None], -torch.inf)
            if sinks is not None:  # one more logit, without a value
                heads = slice(head * self.num_groups, (head + 1) * self.num_groups)
                own = sinks[heads, None] - softmax_scale * fallen[:, heads]
                scores = torch.cat([scores, own[..., None]], -1)
            weights = scores.softmax(-1)[..., :capacity]
            parts = [weights @ values[:, None, value + chunk] for chunk in range(num_values)]
            weights = torch.where(whole[:, None], weights, 0)
            parts += [weights @ window[:, None, first_window + chunk] for chunk in range(num_window)]
            joined = torch.cat(parts, -1)
            scale = 1 if store.value_scale is None else store.value_scale[:, head, None, None]
            outputs.append(joined * scale)
        attended = torch.cat(outputs, 1)
        return attended if out is None else out.copy_(attended)
