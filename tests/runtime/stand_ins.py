"""What stands in for a GPU: graphs that record operations, and the kernels' interface in plain torch."""

from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from runtime.capture_leank import GraphMemory
from runtime.fp8_leank import as_bytes, quantise


class Recorder(TorchDispatchMode):
    """Runs operations, writes them down, and remembers what memory held before it was overwritten."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Any] = []
        self.before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self.made: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default):
            raise RuntimeError("the host asked for a value during a capture")
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                storage = value.untyped_storage()
                if storage.data_ptr() not in self.made:
                    self.before.setdefault(storage.data_ptr(), (storage, storage.clone()))
        out = func(*args, **kwargs)
        used = {
            value.untyped_storage().data_ptr()
            for value in tree_flatten((args, kwargs))[0]
            if isinstance(value, torch.Tensor)
        }
        # Views and what was written in place need no copy of their own at a replay.
        results = [
            (index, value)
            for index, value in enumerate(tree_flatten(out)[0])
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

    def __init__(self, device: torch.device, memory: GraphMemory) -> None:
        self._recorder = Recorder()

    @staticmethod
    def is_capturing() -> bool:
        return False

    @staticmethod
    def stream_of(device: torch.device) -> int:
        return 0

    def capture(self, function: Any) -> Any:
        try:
            with self._recorder:
                output = function()
                if self.failures:
                    raise self.failures.pop()
        finally:
            for storage, content in self._recorder.before.values():
                storage.copy_(content)
        return output

    def replay(self) -> None:
        for func, args, kwargs, results in self._recorder.operations:
            new = tree_flatten(func(*args, **kwargs))[0]
            for index, old in results:
                old.copy_(new[index])


class PlainKernels:
    """The kernels' interface in plain torch: lengths and pages are read from tensors alone."""

    def __init__(self, head_dim: int, num_groups: int, **_: int) -> None:
        self.head_dim, self.num_groups = head_dim, num_groups

    def plan(self, seen, pruned, sink_size):
        return seen + pruned

    def append(self, keys, values, store, seen, valid):
        valid = seen > 0 if valid is None else valid & (seen > 0)
        rows = torch.arange(len(seen), device=seen.device)
        index = store.chunk_index.long().expand(len(seen), -1, -1)
        num_kept = store.kept_keys.shape[1]
        in_store, size = self.in_store(store), store.values.shape[3]
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

    def in_store(self, store):
        """Which of V's channels, of all heads, every token has in the store `[H_kv * D]`."""
        place = torch.arange(self.head_dim, device=store.head_table.device)
        return (place < store.head_table[:-1, 8, None] * store.values.shape[3]).flatten()

    def rope_append(self, projected, cos, sin, norms, store, seen, valid):
        heads = projected.view(*seen.shape, -1, self.head_dim).transpose(1, 2)
        num_kv_heads = len(store.head_table) - 1
        query, key, value = heads.split([heads.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads], 1)
        if norms is not None:
            query, key = (
                self.add_norm(x, None, w, norms[2])[1] for x, w in ((query, norms[0]), (key, norms[1]))
            )
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

    def silu_mul(self, gate_up):
        gate, up = gate_up.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up

    attends_turns = False

    def copy_rows(self, first, new_keys, new_values):
        heads = first.layout.value_heads
        rows = (replace(first, row=first.row + row).dense(new_keys.dtype) for row in range(len(new_keys)))
        return [
            torch.cat([torch.stack(held)[:, :, heads], new[:, heads].transpose(1, 2)], 1)
            for held, new in zip(zip(*rows, strict=True), (new_keys, new_values), strict=True)
        ]

    def product(self, states, weight, bias=None):
        return torch.nn.functional.linear(states, weight, bias)

    def attend(self, query, store, seen, pruned, plan, *, sink_size, softmax_scale, sinks=None):
        seen = plan - pruned  # a plan of another step shows
        fallen = torch.zeros(query.shape[:3])  # what a sink's logit falls by, as all others do
        if store.key_mean is not None:
            fallen = (query * store.key_mean.repeat_interleave(self.num_groups, 1)[:, :, None]).sum(-1)
        if store.key_scale is not None:
            query = query * store.key_scale.repeat_interleave(self.num_groups, 1)[:, :, None]
        num_channels = (len(store.head_table) - 1) * self.head_dim

        def spread(pool, table, lanes):
            """All that tables name of a pool, where its channels are `[B, H, tokens, D]`; zeros elsewhere."""
            pages = table.clamp(0, len(pool) - 1).long()
            taken = as_bytes(pool)[pages].view(pool.dtype).to(query.dtype)
            taken = taken.transpose(2, 3).flatten(1, 2).flatten(2)
            lanes = torch.where(lanes < 0, num_channels, lanes).flatten(1)[:, None].expand_as(taken)
            states = taken.new_zeros(*taken.shape[:2], num_channels + 1).scatter(2, lanes, taken)
            heads = states[..., :num_channels].unflatten(2, (-1, self.head_dim)).transpose(1, 2)
            return heads.repeat_interleave(self.num_groups, 1)

        num_kept, index = store.kept_keys.shape[1], store.chunk_index.long().expand(len(seen), -1, -1)
        in_store = self.in_store(store)
        of_store, of_window = (part.nonzero().T.expand(len(seen), -1) for part in (in_store, ~in_store))
        keys = spread(store.kept_keys, store.page_table, index[:, :num_kept])
        values = spread(store.values, store.page_table, of_store)
        dropped = spread(store.window_keys, store.window_table, index[:, num_kept:])
        window = spread(store.window_values, store.window_table, of_window)
        tokens = torch.arange(keys.shape[2])
        visible = tokens < seen[:, None, :, None]  # [B, 1, d, tokens]
        whole = visible & ((tokens < sink_size) | (tokens >= sink_size + pruned[:, None, :, None]))
        see_pruned = (store.head_table[:-1, 1] > 0).repeat_interleave(self.num_groups)[:, None, None]
        scores = softmax_scale * (query @ keys.mT + torch.where(whole, query @ dropped.mT, 0))
        scores = scores.masked_fill(~torch.where(see_pruned, visible, whole), -torch.inf)
        if sinks is not None:  # one more logit, without a value
            own = sinks[:, None] - softmax_scale * fallen
            scores = torch.cat([scores, own[..., None]], -1)
        weights = scores.softmax(-1)[..., : len(tokens)]
        output = weights @ values + torch.where(whole, weights, 0) @ window
        if store.value_scale is not None:
            output = output * store.value_scale.repeat_interleave(self.num_groups, 1)[:, :, None]
        return output
