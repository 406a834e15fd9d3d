"""A decode step of an ONNX graph over a cache of random keys and values, bound in place.

Dense keys and values are made once; each side's buffers are filled from them, so that both sides and the
exact result see the same cache.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from leank_convert.benchmark.accuracy import pruned_length
from leank_convert.benchmark.subject import Subject
from leank_convert.windows import Windows

# Sharper than a model's of random weights, so that attention is far from uniform.
_KEY_SCALE = 2.0
TOKEN = 5


class FilledCache:
    """Keys and values of all channels, per layer `[1, H_kv, N, D]`, heads in the checkpoint's order.

    Args:
        subject: The mask and the shape.
        num_tokens: N, the tokens that are cached when the step begins.
        seed: Of the random numbers.
    """

    def __init__(self, subject: Subject, num_tokens: int, seed: int) -> None:
        facts = subject.geometry.facts
        generator = torch.Generator().manual_seed(seed)
        shape = (1, facts.num_key_value_heads, num_tokens, facts.head_dim)
        layers = range(facts.num_hidden_layers)
        self.subject, self.num_tokens = subject, num_tokens
        self.keys = [torch.randn(shape, generator=generator) * _KEY_SCALE for _ in layers]
        self.values = [torch.randn(shape, generator=generator) for _ in layers]
        # The step's own token included, as the flush comes before it.
        self.num_pruned = pruned_length(num_tokens + 1, subject.windows)

    def slot(self, side: str) -> int:
        """Where the step's token goes in the window of `dense` or `leank`."""
        return self.num_tokens if side == "dense" else slot_of(self.num_tokens, self.subject.windows)

    def dense_buffers(self) -> dict[str, Tensor]:
        """The dense graph's inputs: one window with room for the step's token, and larger than the sink."""
        buffers: dict[str, Tensor] = {}
        slots = max(self.num_tokens, self.subject.windows.sink_size) + 1
        for layer, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            room = keys.new_zeros(*keys.shape[:2], slots - self.num_tokens, keys.shape[3])
            window = (torch.cat([states, room], 2) for states in (keys, values))
            buffers |= _named(f"past_key_values.{layer}.window", *window)
        return buffers

    def leank_buffers(self) -> dict[str, Tensor]:
        """The pruned graph's inputs: sink and recent slots, and each bucket's kept channels."""
        buffers: dict[str, Tensor] = {}
        windows = self.subject.windows
        stop = windows.sink_size + self.num_pruned
        tokens = torch.cat(
            [
                torch.arange(min(windows.sink_size, self.num_tokens)),
                torch.arange(min(stop, self.num_tokens), self.num_tokens),
            ]
        )
        slots = torch.tensor([slot_of(token, windows) for token in tokens.tolist()], dtype=torch.long)
        num_slots = windows.sink_size + windows.recent_size + windows.flush_size
        for layer, mask in enumerate(self.subject.channel_masks):
            keys, values = self.keys[layer], self.values[layer]
            order = (~mask).to(torch.int8).argsort(dim=-1, stable=True)
            lanes = order[None, :, None].expand(1, -1, keys.shape[2], -1)
            ordered = keys.gather(3, lanes)
            whole = [
                states.new_zeros(*states.shape[:2], num_slots, states.shape[3]) for states in (keys, values)
            ]
            for window, states in zip(whole, (ordered, values), strict=True):
                window[:, :, slots] = states[:, :, tokens]
            buffers |= _named(f"past_key_values.{layer}.window", *whole)
            widths = mask.sum(-1)
            for width in sorted(set(widths.tolist()) - {0}):
                heads = (widths == width).nonzero()[:, 0]
                # A slot even where nothing is pruned yet: it is hidden.
                part = slice(windows.sink_size, max(stop, windows.sink_size + 1))
                pruned = (_padded(states[:, heads][:, :, part]) for states in (ordered[..., :width], values))
                buffers |= _named(f"past_key_values.{layer}.pruned.{width}", *pruned)
        return buffers


class BoundStep:
    """One decode step of a graph, run again and again on the same cache.

    A run is what a step of the model is: the graph, and the new token's keys and values put into the cache.

    Args:
        path: The graph.
        threads: Of onnxruntime.
    """

    def __init__(self, path: Path, threads: int) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        # Both sides take turns: none may wait busily while the other one runs.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        self._session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self._binding: Any = None

    def bind(self, buffers: dict[str, Tensor], *, past: int, pruned: int, slot: int) -> None:
        """Take a cache of `past` tokens, `pruned` of them pruned; the new one goes to window slot `slot`."""
        from onnxruntime import OrtValue

        lengths = {"input_ids": [[TOKEN]], "past_lengths": [past], "pruned_lengths": [pruned]}
        inputs = {
            name: np.array(value, np.int64) for name, value in (lengths | {"logits_index": [[0]]}).items()
        }
        inputs |= {name: buffer.numpy() for name, buffer in buffers.items()}
        binding = self._session.io_binding()
        # The binding points into these.
        self._kept: list[Any] = [OrtValue.ortvalue_from_numpy(array) for array in inputs.values()]
        for name, value in zip(inputs, self._kept, strict=True):
            binding.bind_ortvalue_input(name, value)
        self._written = []
        for output in self._session.get_outputs():
            shape = [size if isinstance(size, int) else 1 for size in output.shape]
            array = np.full(shape, np.nan, np.float32)
            self._kept.append(array)
            binding.bind_output(output.name, "cpu", 0, np.float32, array.shape, array.ctypes.data)
            _, _, rest = output.name.partition("present.")
            if rest:
                layer, _, part = rest.partition(".")
                window = inputs[f"past_key_values.{layer}.window.{part}"]
                place = window[:, :, slot : slot + 1] if part == "key" else window[..., slot : slot + 1]
                self._written.append((place, array))
            else:
                self._logits = array
        self._binding = binding

    def run(self) -> None:
        """Run one step."""
        self._session.run_with_iobinding(self._binding)
        for place, array in self._written:
            place[...] = array

    def logits(self) -> Tensor:
        """A fresh run's logits `[vocabulary]`; what is not written is NaN."""
        self._logits[...] = np.nan
        self.run()
        return torch.from_numpy(self._logits.copy()).flatten()

    def release(self) -> None:
        """Let go of the cache."""
        self._binding, self._kept, self._written = None, [], []


def slot_of(token: int, windows: Windows) -> int:
    """The window slot of a token while decoding."""
    if token < windows.sink_size:
        return token
    return windows.sink_size + (token - windows.sink_size) % (windows.recent_size + windows.flush_size)


def _named(prefix: str, keys: Tensor, values: Tensor) -> dict[str, Tensor]:
    """Keys as they are, values `[1, n, D, tokens]`."""
    return {f"{prefix}.key": keys.contiguous(), f"{prefix}.value": values.transpose(2, 3).contiguous()}


def _padded(states: Tensor) -> Tensor:
    """At least one token, zero if there is none."""
    return states if states.shape[2] else states.new_zeros(*states.shape[:2], 1, states.shape[3])
