"""Generate text with a model exported by leank-convert; needs numpy, onnxruntime and tokenizers alone.

    python leank_onnx.py FOLDER "Why is the sky blue?"

    model = LeanKOnnx("FOLDER", threads=2)
    answers = model.generate(["Why is the sky blue?"], max_new_tokens=64)
    print(model.decode(answers[0]))

One file, to be copied into any program. From the bottom up: `Description` reads leank_onnx.json, `Cache`
holds keys and values in arrays that onnxruntime reads where they lie, `Graph` runs one step of the model, a
`Session` reads and answers rows of tokens, `LeanKOnnx` is the model with its tokenizer and chat template, and
`main` the command.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import math
import operator
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from tokenizers import Tokenizer

FORMAT_VERSION = 1
DESCRIPTION_FILE = "leank_onnx.json"
MODEL_FILE = "model.onnx"
DEFAULT_PROMPT_CHUNK = 256

_DTYPES: dict[str, type[np.floating[Any]]] = {"float32": np.float32, "float16": np.float16}
_ONNX_TYPES = {"float32": "tensor(float)", "float16": "tensor(float16)", "int64": "tensor(int64)"}
_CAPACITY_STEP = 64
_MAX_PROMPT = 1 << 24  # characters of standard input, more than any context has room for

Array = np.ndarray[Any, np.dtype[Any]]
# Per layer, of the new tokens: K [B, H_kv, Q, D] and V [B, H_kv, D, Q].
Present = Sequence[tuple[Array, Array]]
TokenIds = Sequence[int]
Streamer = Callable[[int, int], object]

__all__ = [
    "Cache",
    "Description",
    "Graph",
    "LeanKOnnx",
    "LeanKOnnxError",
    "LeanKOnnxMemoryError",
    "Session",
]


class LeanKOnnxError(ValueError):
    """What the caller can put right: names the file or argument, its value and the remedy."""


class LeanKOnnxMemoryError(LeanKOnnxError, MemoryError):
    """Memory does not suffice for so many tokens or rows at a time; fewer may fit."""


def require(condition: bool, message: str) -> None:
    """Raise LeanKOnnxError with the message unless the condition holds."""
    if not condition:
        raise LeanKOnnxError(message)


@dataclass(frozen=True)
class Bucket:
    """The heads of one width in a layer: heads `first` to `stop`, `stop` not among them."""

    width: int
    first: int
    stop: int


@dataclass(frozen=True)
class _Value:
    """What a value of the description must be: in words, and as a test."""

    text: str
    fits: Callable[[Any], bool]


def _whole(least: int, most: float = math.inf) -> _Value:
    # `True` is no size, though Python counts it among the numbers.
    text = f"a whole number from {least} " + ("up" if most == math.inf else f"to {most}")
    return _Value(text, lambda value: type(value) is int and least <= value <= most)


def _one_of(*names: str) -> _Value:
    return _Value(f"one of {', '.join(names)}", lambda value: value in names)


_TEXT = _Value("a text", lambda value: isinstance(value, str))
_SIZE, _COUNT = _whole(0), _whole(1)
_MAX_WINDOW_SIZE = 1 << 24
_PAIR = _Value(
    "a first head and the one behind the last",
    lambda value: isinstance(value, list) and [type(item) for item in value] == [int, int],
)
_NUMBER_OR_NONE = _Value("a number or null", lambda value: value is None or type(value) in (int, float))
_DIGESTS = _Value(
    "an object of file names and digests",
    lambda value: isinstance(value, dict) and all(isinstance(item, str) for item in value.values()),
)
_TENSOR = {
    "name": _TEXT,
    "dtype": _TEXT,
    "shape": [_Value("a size or its name", lambda value: type(value) in (int, str))],
}
# Every key that a description has; later releases of one format version may add others. A list holds values
# of one kind, a tuple is that kind or null.
_KEYS: dict[str, Any] = {
    "opset": _COUNT,
    "dtype": _one_of(*_DTYPES),
    "weights": _one_of("float32", "float16", "int8", "int4"),
    "quantization": (
        {"operator": _TEXT, "bits": _COUNT, "block_size": _COUNT, "difference": _NUMBER_OR_NONE},
    ),
    "model": {
        "name": _TEXT,
        "model_type": _TEXT,
        "num_hidden_layers": _COUNT,
        "num_attention_heads": _COUNT,
        "num_key_value_heads": _COUNT,
        "head_dim": _COUNT,
        "vocab_size": _COUNT,
        "max_position_embeddings": _COUNT,
    },
    # Some models' configs say -1 for none.
    "bos_token_id": (_Value("a whole number or null", lambda value: type(value) is int),),
    "eos_token_ids": [_SIZE],
    "sink_size": _whole(0, _MAX_WINDOW_SIZE),
    "recent_size": _whole(0, _MAX_WINDOW_SIZE),
    "flush_size": _whole(1, _MAX_WINDOW_SIZE),
    "widths": [[_SIZE]],
    "buckets": [[{"width": _SIZE, "heads": _PAIR}]],
    "channel_order": [[[_SIZE]]],
    "head_permutation": ([[_SIZE]],),
    "inputs": [_TENSOR],
    "outputs": [_TENSOR],
    "files": _DIGESTS,
}


def _find_faults(value: Any, expected: Any, place: str = "") -> Iterator[tuple[str, str | None]]:
    """Yield each place in the description that is not as expected, and how; None where a key is missing."""
    if isinstance(expected, tuple):
        if value is not None:
            yield from _find_faults(value, expected[0], place)
    elif isinstance(expected, _Value):
        if not expected.fits(value):
            yield place, f"is {value!r:.60}, not {expected.text}"
    elif not isinstance(value, type(expected)):
        yield place, f"is {value!r:.60}, not {'a list' if isinstance(expected, list) else 'an object'}"
    elif isinstance(expected, list):
        for index, item in enumerate(value):
            yield from _find_faults(item, expected[0], f"{place}.{index}")
    else:
        for key, part in expected.items():
            inner = f"{place}.{key}".lstrip(".")
            if key in value:
                yield from _find_faults(value[key], part, inner)
            else:
                yield inner, None


@dataclass(frozen=True)
class Description:
    """What `leank_onnx.json` says.

    Attributes:
        dtype: Element type of the cache and the logits.
        vocab_size: Length of a row of logits.
        num_heads: Key/value heads of every layer.
        head_dim: Channels of a head.
        sink_size, recent_size, flush_size: Window sizes.
        buckets: Per layer, its heads by width, contiguous.
        eos_token_ids: Tokens that end an answer.
        max_position_embeddings: Positions that the model's config names.
        files: SHA-256 of every file by its name.
        content: All of it, checked: also what decoding has no use for.
    """

    dtype: type[np.floating[Any]]
    vocab_size: int
    num_heads: int
    head_dim: int
    sink_size: int
    recent_size: int
    flush_size: int
    buckets: tuple[tuple[Bucket, ...], ...]
    eos_token_ids: frozenset[int]
    max_position_embeddings: int
    files: Mapping[str, str]
    content: Mapping[str, Any]

    @property
    def ring_size(self) -> int:
        """Slots of the window behind the sink, while decoding."""
        return self.recent_size + self.flush_size

    @property
    def num_slots(self) -> int:
        """Most slots of the window, while decoding."""
        return self.sink_size + self.ring_size

    @classmethod
    def read(cls, folder: Path) -> Description:
        """Read a folder's description and look whether the graph's files are there.

        Raises:
            LeanKOnnxError: If the folder is no export, is of another format, or lacks a file.
        """
        description = cls.parse(folder / DESCRIPTION_FILE)
        for name in description.files:
            # Whoever does without a tokenizer or a README may leave it out.
            if name.startswith(MODEL_FILE) and not (folder / name).is_file():
                raise LeanKOnnxError(
                    f"`{folder / name}` is missing: copy it from where the model was exported, it belongs to "
                    f"`{DESCRIPTION_FILE}`"
                )
        return description

    @classmethod
    def parse(cls, path: Path) -> Description:
        """Read a description by itself.

        Raises:
            LeanKOnnxError: If it cannot be read, is of another format, or keys are missing or make no sense.
        """
        if not path.is_file():
            raise LeanKOnnxError(
                f"`{path}` does not exist: pass a folder that `leank-convert export --format onnx` wrote"
            )
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise LeanKOnnxError(f"`{path}` is no JSON: {error}; export the model again") from None
        require(isinstance(content, dict), f"`{path}` is no JSON object; export the model again")
        version = content.get("format_version")
        if version != FORMAT_VERSION:
            raise LeanKOnnxError(
                f"`{path}`: format_version is {version!r}, this leank_onnx.py reads {FORMAT_VERSION}: use "
                "the leank_onnx.py that lies beside it, or export the model again"
            )
        faults = list(_find_faults(content, _KEYS))
        if missing := [f"`{place}`" for place, fault in faults if fault is None]:
            raise LeanKOnnxError(f"`{path}` lacks {', '.join(missing)}; export the model again")
        for place, fault in faults:
            raise LeanKOnnxError(f"`{path}`: `{place}` {fault}; export the model again")
        model = content["model"]
        num_heads = model["num_key_value_heads"]
        buckets = tuple(
            tuple(Bucket(bucket["width"], *bucket["heads"]) for bucket in layer)
            for layer in content["buckets"]
        )
        for layer, row in enumerate(buckets):
            require(
                [0, *(bucket.stop for bucket in row)] == [*(bucket.first for bucket in row), num_heads],
                f"`{path}`: `buckets.{layer}` does not hold each of {num_heads} heads once, in order; export "
                "the model again",
            )
        return cls(
            dtype=_DTYPES[content["dtype"]],
            vocab_size=model["vocab_size"],
            num_heads=num_heads,
            head_dim=model["head_dim"],
            sink_size=content["sink_size"],
            recent_size=content["recent_size"],
            flush_size=content["flush_size"],
            buckets=buckets,
            eos_token_ids=frozenset(content["eos_token_ids"]),
            max_position_embeddings=model["max_position_embeddings"],
            files=content["files"],
            content=content,
        )


class Cache:
    """Keys and values of rows of tokens, in arrays that onnxruntime reads where they lie.

    Per row, without padding:

        tokens 0 ... n-1 :  [ sink: min(n, sink_size) ][ pruned: p ][ recent: the rest ]

    A window holds sink and recent tokens with all channels, token t in slot t while t < sink_size, else in
    slot sink_size + (t - sink_size) mod (recent_size + flush_size). Slots that no token has reached are made
    as tokens come. The pruned arrays hold each bucket's kept channels, token sink_size + j in column j. While
    prompts are read, windows hold all of them and nothing is pruned; `split` parts them.

    Attributes:
        lengths: Tokens per row `[B]`.
        pruned_lengths: How many of them are pruned `[B]`.
        moves: How often arrays were replaced: an address taken before is void.
    """

    def __init__(self, description: Description, batch: int, num_slots: int, num_columns: int = 1) -> None:
        """Make room for `num_slots` tokens a row in the windows, and for pruned ones."""
        self.lengths, self.pruned_lengths = np.zeros(batch, np.int64), np.zeros(batch, np.int64)
        self.moves = 0
        self._description = description
        # Per layer [B, H_kv, slots, D] and [B, H_kv, D, slots].
        self._windows = [self._new_window(num_slots) for _ in description.buckets]
        # By layer and width [B, heads, capacity, width] and [B, heads, D, capacity]; never without a column,
        # since a graph's input must not be empty.
        self._pruned = {
            (layer, bucket.width): self._new_pruned(bucket, num_columns)
            for layer, bucket in self._seen_buckets()
        }

    def tensors(self) -> dict[str, Array]:
        """Return the arrays by the names of the graph's inputs."""
        regions = {f"{layer}.window": window for layer, window in enumerate(self._windows)}
        regions |= {f"{layer}.pruned.{width}": store for (layer, width), store in self._pruned.items()}
        return {
            f"past_key_values.{region}.{part}": array
            for region, arrays in regions.items()
            for part, array in zip(("key", "value"), arrays, strict=True)
        }

    def write_prompt(self, present: Present, counts: Array, num_left: int) -> None:
        """Write a chunk of all prompts.

        Args:
            present: K and V of the chunk.
            counts: How many of its tokens belong to each row `[B]`: all, until a row's prompt ends.
            num_left: Tokens of the longest prompt after this chunk.
        """
        start = int(self.lengths.max())
        stop = start + present[0][0].shape[2]
        if stop > self._windows[0][0].shape[2]:
            # Twice what is there, since every slot costs time, empty or not.
            self._grow_windows(min(2 * stop, stop + num_left))
        # A row that has ended is padded: what its padding leaves lies behind its length, where nothing looks.
        for (keys, values), (new_keys, new_values) in zip(self._windows, present, strict=True):
            keys[:, :, start:stop] = new_keys
            values[..., start:stop] = new_values
        self.lengths += counts

    def split(self) -> None:
        """Part the prompts, which lie whole in the windows, into sink, pruned and recent tokens."""
        d = self._description
        self.moves += 1
        self.pruned_lengths = np.maximum(self.lengths - d.sink_size - d.recent_size, 0)
        capacity = _capacity(int(self.pruned_lengths.max()))
        for layer, buckets in enumerate(d.buckets):
            keys, values = self._windows[layer]
            window_keys, window_values = self._new_window(self._slots_for(int(self.lengths.max())))
            for bucket in buckets:
                if bucket.width:
                    self._pruned[layer, bucket.width] = self._new_pruned(bucket, capacity)
            for row, (length, pruned) in enumerate(zip(self.lengths, self.pruned_lengths, strict=True)):
                sink = min(int(length), d.sink_size)
                tokens = np.concatenate([np.arange(sink), np.arange(d.sink_size + pruned, length)])
                slots = self._slots_of(tokens)
                window_keys[row][:, slots] = keys[row][:, tokens]
                window_values[row][..., slots] = values[row][..., tokens]
                self._write_pruned(layer, row, 0, keys[row], values[row], np.arange(sink, sink + pruned))
            # The prompt's own memory is let go of layer by layer.
            self._windows[layer] = (window_keys, window_values)

    def make_room(self, rows: Array) -> None:
        """Flush where a row of `rows` [B], bool, has no slot for one more token; make slots not there yet."""
        d = self._description
        num_tokens = int(self.lengths.max(initial=0, where=rows)) + 1
        # The last layer's: where memory ran out half-way, the next attempt does the rest.
        if min(num_tokens, d.num_slots) > self._windows[-1][0].shape[2]:
            self._grow_windows(self._slots_for(num_tokens))
        in_recent = self.lengths - d.sink_size - self.pruned_lengths
        full = np.flatnonzero(rows & (in_recent >= d.ring_size))
        if not full.size:
            return
        self._grow_pruned(int(self.pruned_lengths[full].max()) + d.flush_size)
        for row in full.tolist():
            start = int(self.pruned_lengths[row])
            slots = self._slots_of(d.sink_size + start + np.arange(d.flush_size))
            for layer, (keys, values) in enumerate(self._windows):
                self._write_pruned(layer, row, start, keys[row], values[row], slots)
        self.pruned_lengths[full] += d.flush_size

    def append(self, present: Present, position: int, rows: Array) -> None:
        """Write the token at `position` of `rows` [B], bool, which have room for it."""
        chosen = np.flatnonzero(rows)
        slots = self._slots_of(self.lengths[chosen])
        for (keys, values), (new_keys, new_values) in zip(self._windows, present, strict=True):
            keys[chosen, :, slots] = new_keys[chosen, :, position]
            values[chosen, :, :, slots] = new_values[chosen, :, :, position]
        self.lengths[chosen] += 1

    def _write_pruned(
        self, layer: int, row: int, start: int, keys: Array, values: Array, slots: Array
    ) -> None:
        """Copy the tokens in `slots` of a row's window `[H_kv, S, D]`, `[H_kv, D, S]` to `start` onwards."""
        stop = start + len(slots)
        for bucket in self._description.buckets[layer]:
            if bucket.width:
                heads = slice(bucket.first, bucket.stop)
                pruned_keys, pruned_values = self._pruned[layer, bucket.width]
                pruned_keys[row, :, start:stop] = keys[heads, :, : bucket.width][:, slots]
                pruned_values[row, :, :, start:stop] = values[heads][..., slots]

    def _grow_windows(self, num_slots: int) -> None:
        self.moves += 1
        for layer, (old_keys, old_values) in enumerate(self._windows):
            if num_slots > old_keys.shape[2]:
                keys, values = self._new_window(num_slots)
                keys[:, :, : old_keys.shape[2]] = old_keys
                values[..., : old_values.shape[3]] = old_values
                self._windows[layer] = (keys, values)

    def _grow_pruned(self, num_tokens: int) -> None:
        """Allocate anew where there is no room for `num_tokens` pruned ones."""
        # Looked at one by one: where memory ran out half-way, the next attempt does the rest.
        for layer, bucket in self._seen_buckets():
            old_keys, old_values = self._pruned[layer, bucket.width]
            if num_tokens <= old_keys.shape[2]:
                continue
            self.moves += 1
            keys, values = self._new_pruned(bucket, _capacity(num_tokens))
            keys[:, :, : old_keys.shape[2]] = old_keys
            values[..., : old_values.shape[3]] = old_values
            self._pruned[layer, bucket.width] = (keys, values)

    def _slots_of(self, tokens: Array) -> Array:
        d = self._description
        return np.where(tokens < d.sink_size, tokens, d.sink_size + (tokens - d.sink_size) % d.ring_size)

    def _slots_for(self, num_tokens: int) -> int:
        """Slots to allocate while decoding rows of up to `num_tokens` tokens."""
        return min(self._description.num_slots, _capacity(num_tokens))

    def _seen_buckets(self) -> Iterator[tuple[int, Bucket]]:
        """Layer and bucket of all heads that see pruned tokens."""
        for layer, buckets in enumerate(self._description.buckets):
            yield from ((layer, bucket) for bucket in buckets if bucket.width)

    def _new_window(self, num_slots: int) -> tuple[Array, Array]:
        d, batch = self._description, len(self.lengths)
        num_slots += num_slots == d.sink_size  # the graph divides by the difference, whatever its sign
        return (
            np.zeros((batch, d.num_heads, num_slots, d.head_dim), d.dtype),
            np.zeros((batch, d.num_heads, d.head_dim, num_slots), d.dtype),
        )

    def _new_pruned(self, bucket: Bucket, capacity: int) -> tuple[Array, Array]:
        d, batch, heads = self._description, len(self.lengths), bucket.stop - bucket.first
        return (
            np.zeros((batch, heads, capacity, bucket.width), d.dtype),
            np.zeros((batch, heads, d.head_dim, capacity), d.dtype),
        )


def _capacity(num_tokens: int) -> int:
    """Columns or slots to allocate for tokens: a sixteenth more, so that copying per token stays constant."""
    return max(-(-(num_tokens + num_tokens // 16) // _CAPACITY_STEP), 1) * _CAPACITY_STEP


def new_integers(batch: int, num_new: int, num_logits: int) -> dict[str, Array]:
    """Make the graph's inputs that are not the cache."""
    return {
        "input_ids": np.zeros((batch, num_new), np.int64),
        "past_lengths": np.zeros(batch, np.int64),
        "pruned_lengths": np.zeros(batch, np.int64),
        "logits_index": np.zeros((batch, num_logits), np.int64),
    }


def new_outputs(description: Description, batch: int, num_new: int, num_logits: int) -> dict[str, Array]:
    """Make arrays for the graph's outputs."""
    d = description
    outputs = {"logits": np.zeros((batch, num_logits, d.vocab_size), d.dtype)}
    for layer in range(len(d.buckets)):
        outputs[f"present.{layer}.key"] = np.zeros((batch, d.num_heads, num_new, d.head_dim), d.dtype)
        outputs[f"present.{layer}.value"] = np.zeros((batch, d.num_heads, d.head_dim, num_new), d.dtype)
    return outputs


class Graph:
    """A graph in onnxruntime, on the CPU: one step of the model as a function of new tokens and their cache.

    Attributes:
        path: Its file.
        tensors: Type and shape of every input and output by its name; sizes that vary are names.
    """

    def __init__(
        self, path: Path, threads: int | None = None, settings: Mapping[str, str] | None = None
    ) -> None:
        """Load a graph; as for `LeanKOnnx`, with further `settings` of onnxruntime's session."""
        import onnxruntime  # here, since a description can be read without it

        self.path = path
        self._onnxruntime = onnxruntime
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4  # what fails is raised
        if threads is not None:
            require(1 <= threads <= 1024, f"threads is {threads}: pass 1 to 1024, or None")
            options.intra_op_num_threads = threads
        for name, value in (settings or {}).items():
            options.add_session_config_entry(name, value)
        try:
            self._session = onnxruntime.InferenceSession(
                str(path), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # onnxruntime's errors share no class of their own
            raise LeanKOnnxError(
                f"onnxruntime {onnxruntime.__version__} cannot load `{path}`: {error}"
            ) from error
        self._inputs = [tensor.name for tensor in self._session.get_inputs()]
        self._outputs = [tensor.name for tensor in self._session.get_outputs()]
        described = (*self._session.get_inputs(), *self._session.get_outputs())
        self.tensors: dict[str, tuple[str, list[int | str]]] = {
            tensor.name: (tensor.type, tensor.shape) for tensor in described
        }

    def run(self, inputs: Mapping[str, Array] | Sequence[Array]) -> dict[str, Array]:
        """Return all outputs for inputs by their names, or in the graph's order.

        Raises:
            LeanKOnnxError: If onnxruntime fails.
        """
        if not isinstance(inputs, Mapping):
            inputs = dict(zip(self._inputs, inputs, strict=True))
        try:
            return dict(zip(self._outputs, self._session.run(self._outputs, dict(inputs)), strict=True))
        except Exception as error:  # onnxruntime's errors share no class of their own
            raise LeanKOnnxError(f"onnxruntime cannot run `{self.path}`: {error}") from error

    def bind(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> Callable[..., None]:
        """Bind arrays where they lie, and return a function that runs the graph on what they hold by then.

        It holds addresses alone: whoever binds arrays must keep them. With `gives_back_memory` it returns
        what the run took beyond them to the system. It raises LeanKOnnxMemoryError where memory runs out.
        """
        binding = self._session.io_binding()
        for name, array in inputs.items():
            binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        for name, array in outputs.items():
            binding.bind_output(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        batch, num_new = inputs["input_ids"].shape

        def run(*, gives_back_memory: bool = False) -> None:
            options = self._onnxruntime.RunOptions()
            options.log_severity_level = 4  # what fails is raised
            if gives_back_memory:
                options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
            try:
                self._session.run_with_iobinding(binding, options)
            except Exception as error:  # onnxruntime's errors share no class of their own
                if "Failed to allocate memory" in str(error) or "bad_alloc" in str(error):
                    raise LeanKOnnxMemoryError(
                        f"too little memory for {num_new} new tokens of {batch} rows at a time: pass a "
                        "smaller prompt_chunk, or fewer rows"
                    ) from error
                raise LeanKOnnxError(f"onnxruntime cannot run `{self.path}`: {error}") from error

        return run


class _Pass:
    """A forward pass of one shape whose inputs and outputs are bound: run again, it binds nothing.

    Attributes:
        present: Keys and values of the tokens of the last run.
    """

    def __init__(self, model: LeanKOnnx, cache: Cache, num_new: int, num_logits: int) -> None:
        d, batch = model.description, len(cache.lengths)
        self._bound = (batch, num_new, num_logits, cache.moves)
        self._integers = new_integers(batch, num_new, num_logits)
        outputs = new_outputs(d, batch, num_new, num_logits)
        self._logits = outputs["logits"]
        self.present: Present = [
            (outputs[f"present.{layer}.key"], outputs[f"present.{layer}.value"])
            for layer in range(len(d.buckets))
        ]
        # The cache keeps its own arrays, and `fits` says whether they are still these.
        self._run = model.graph.bind({**self._integers, **cache.tensors()}, outputs)

    def fits(self, cache: Cache, num_new: int, num_logits: int) -> bool:
        """Whether the shapes are these and the cache lies where it lay."""
        return self._bound == (len(cache.lengths), num_new, num_logits, cache.moves)

    def run(self, *, is_last_of_prompt: bool = False, **integers: Array) -> Array:
        """Return logits `[B, K, V]`, valid until the next run."""
        for name, values in integers.items():
            self._integers[name][:] = values
        # A long prompt's attention takes many times the memory that decoding needs.
        self._run(gives_back_memory=is_last_of_prompt)
        return self._logits


class Session:
    """Rows of tokens that the model has read, and their cache; turns are appended to it."""

    def __init__(self, model: LeanKOnnx) -> None:
        self.model = model
        self._cache: Cache | None = None
        self._pass: _Pass | None = None
        # By row the last token of its answer and where it belongs: unread for as long as the row ends there.
        self._endings: dict[int, tuple[int, int]] = {}

    @property
    def lengths(self) -> Array:
        """Tokens per row `[B]`, none before the prompts are read."""
        return np.zeros(0, np.int64) if self._cache is None else self._cache.lengths

    @property
    def pruned_lengths(self) -> Array:
        """How many of them are pruned `[B]`."""
        return np.zeros(0, np.int64) if self._cache is None else self._cache.pruned_lengths

    @property
    def cache_bytes(self) -> int:
        """Bytes of the cache, room to grow included."""
        return 0 if self._cache is None else sum(array.nbytes for array in self._cache.tensors().values())

    def feed(
        self,
        rows: Sequence[str] | Sequence[TokenIds],
        *,
        prompt_chunk: int = DEFAULT_PROMPT_CHUNK,
        all_logits: bool = False,
    ) -> list[Array]:
        """Read tokens: the prompts at first, later turns after that; with one token per row, decode.

        However a prompt is cut, its tokens attend to all before them. Those of a later turn attend to one
        another, within a chunk, and to the cache as it is. The last token of an answer is read before a turn,
        whose text gets no special tokens. Of prompts that are interrupted nothing is kept, of a turn what
        `lengths` says.

        Args:
            rows: Texts or tokens, one row for each one of the session; none may be empty at first.
            prompt_chunk: Tokens per row that are read at a time: more need more memory.
            all_logits: Return logits after every token, else after each row's last one alone.

        Returns:
            Per row, logits `[tokens, V]`.

        Raises:
            LeanKOnnxError: If the rows cannot be.
        """
        require(prompt_chunk >= 1, f"prompt_chunk is {prompt_chunk}: pass 1 or more")
        return self._feed(self._rows_to_read(rows), prompt_chunk, all_logits)

    def generate(
        self,
        rows: Sequence[str] | Sequence[TokenIds],
        *,
        max_new_tokens: int = 128,
        do_sample: bool = False,
        temperature: float | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        prompt_chunk: int = DEFAULT_PROMPT_CHUNK,
        streamer: Streamer | None = None,
    ) -> list[list[int]]:
        """Read rows as `feed` does and answer them until each has ended or has `max_new_tokens`.

        Args:
            rows: Texts or tokens.
            max_new_tokens: Tokens that an answer may have.
            do_sample: Draw tokens; else take the likeliest.
            temperature: Divides logits before drawing; 1 if None.
            top_p: Draw from the likeliest tokens that together have this probability; 1 if None.
            seed: Of what is drawn; None for a new one each time.
            prompt_chunk: As for `feed`.
            streamer: Called with row and token as soon as there is one.

        Returns:
            New tokens per row, the one that ended the answer included.

        Raises:
            LeanKOnnxError: If an argument cannot be.
        """
        require(max_new_tokens >= 1, f"max_new_tokens is {max_new_tokens}: pass 1 or more")
        pick = _picker(do_sample, temperature, top_p, seed)
        logits = self.feed(rows, prompt_chunk=prompt_chunk)
        ended = self.model.description.eos_token_ids
        answers: list[list[int]] = [[] for _ in logits]
        running = [row for row, values in enumerate(logits) if len(values)]
        while True:
            for row in running:
                answers[row].append(pick(logits[row][-1]))
                # Before the streamer is told, which may raise to end the answer: the session can go on.
                self._endings[row] = (int(self.lengths[row]), answers[row][-1])
            if streamer is not None:
                for row in running:
                    streamer(row, answers[row][-1])
            running = [
                row for row in running if answers[row][-1] not in ended and len(answers[row]) < max_new_tokens
            ]
            if not running:
                return answers
            tokens: list[list[int]] = [[] for _ in answers]
            for row in running:
                tokens[row] = answers[row][-1:]
            logits = self._feed(tokens, 1, False)

    def _rows_to_read(self, rows: Sequence[str] | Sequence[TokenIds]) -> list[list[int]]:
        """Put the tokens that ended the last answers before the given ones; raise where rows cannot be."""
        given = self.model.token_rows(rows, add_special_tokens=self._cache is None)
        if self._cache is None:
            require(len(given) > 0, "prompts is empty: pass one prompt or more")
            for index, row in enumerate(given):
                require(len(row) > 0, f"prompts[{index}] is empty: a prompt has one token or more")
            return given
        require(
            len(given) == len(self.lengths),
            f"the turn has {len(given)} rows, the session {len(self.lengths)}: pass one row for each, [] "
            "where there is nothing to read",
        )
        require(any(given), "every row of the turn is empty: pass one token or more")
        for index, tokens in enumerate(given):
            position, ending = self._endings.get(index, (-1, 0))
            if tokens and position == self.lengths[index]:
                given[index] = [ending, *tokens]
        return given

    def read_prompts(
        self, rows: Sequence[TokenIds], prompt_chunk: int, all_logits: bool = False
    ) -> tuple[Cache, list[Array]]:
        """Read prompts into a cache of their own, not split yet: token t lies in slot t of the windows.

        The session stays as it is; arguments are as for `feed`.

        Returns:
            The cache, and per row logits `[tokens, V]`.
        """
        cache = Cache(self.model.description, len(rows), 1)
        try:
            return cache, self._read(cache, rows, prompt_chunk, all_logits, is_prompt=True)
        finally:
            self._pass = None

    def _feed(self, rows: Sequence[TokenIds], chunk: int, all_logits: bool) -> list[Array]:
        if self._cache is not None:
            return self._read(self._cache, rows, chunk, all_logits)
        # Half a prompt is no cache that could be decoded on: where reading is interrupted, stay empty.
        cache, logits = self.read_prompts(rows, chunk, all_logits)
        cache.split()
        self._cache = cache
        return logits

    def _read(
        self, cache: Cache, rows: Sequence[TokenIds], chunk: int, all_logits: bool, is_prompt: bool = False
    ) -> list[Array]:
        num_new = np.array([len(row) for row in rows])
        d = self.model.description
        longest = int(num_new.max())
        parts: list[list[Array]] = [[np.zeros((0, d.vocab_size), d.dtype)] for _ in rows]
        for start in range(0, longest, chunk):
            counts = np.clip(num_new - start, 0, chunk)
            ids = np.zeros((len(rows), int(counts.max())), np.int64)
            for row, count in enumerate(counts):
                ids[row, :count] = rows[row][start : start + count]
            index = np.maximum(counts - 1, 0)[:, None]
            if all_logits:
                index = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
            if is_prompt:
                num_left = longest - start - ids.shape[1]
                logits, present = self._run(cache, ids, index, is_last_of_prompt=not num_left)
                cache.write_prompt(present, counts, num_left)
            else:
                logits = self._append(cache, ids, counts, index)
            for row in np.flatnonzero(counts).tolist():
                if all_logits:
                    parts[row].append(logits[row, : counts[row]].copy())
                else:
                    parts[row] = [logits[row].copy()]
        return [np.concatenate(part) for part in parts]

    def _append(self, cache: Cache, ids: Array, counts: Array, index: Array) -> Array:
        """Read the first `counts[b]` of each row's tokens, one as decoding does, several as a turn."""
        pruned_lengths = cache.pruned_lengths.copy()
        cache.make_room(counts == 1)
        try:
            logits, present = self._run(cache, ids, index)
        except BaseException:
            # What was flushed is still in the window: the session is as it was.
            cache.pruned_lengths[:] = pruned_lengths
            raise
        for position in range(ids.shape[1]):
            here = counts > position
            cache.make_room(here & (counts != 1))
            cache.append(present, position, here)
        return logits

    def _run(
        self, cache: Cache, ids: Array, index: Array, is_last_of_prompt: bool = False
    ) -> tuple[Array, Present]:
        """Return logits and the new tokens' keys and values, both valid until the next run."""
        shape = (ids.shape[1], index.shape[1])
        if self._pass is None or not self._pass.fits(cache, *shape):
            self._pass = None
            self._pass = _Pass(self.model, cache, *shape)
        logits = self._pass.run(
            input_ids=ids,
            past_lengths=cache.lengths,
            pruned_lengths=cache.pruned_lengths,
            logits_index=index,
            is_last_of_prompt=is_last_of_prompt,
        )
        return logits, self._pass.present


def _picker(
    do_sample: bool, temperature: float | None, top_p: float | None, seed: int | None
) -> Callable[[Array], int]:
    """Return a function from logits `[V]` to the next token."""
    if not do_sample:
        for name, value in (("temperature", temperature), ("top_p", top_p), ("seed", seed)):
            require(
                value is None,
                f"{name} is {value}, but nothing is drawn: pass do_sample=True (--sample), or drop {name}",
            )
        return lambda logits: int(logits.argmax())
    heat = 1.0 if temperature is None else temperature
    share = 1.0 if top_p is None else top_p
    require(heat > 0, f"temperature is {heat}: pass more than 0, or do_sample=False for the likeliest token")
    require(0 < share <= 1, f"top_p is {share}: pass more than 0 and at most 1")
    require(seed is None or seed >= 0, f"seed is {seed}: pass 0 or more, or None")
    random = np.random.default_rng(seed)

    def draw(logits: Array) -> int:
        order = np.argsort(-logits, kind="stable")
        below = logits[order].astype(np.float64) - logits[order[0]]
        # At a temperature close to 0 all but the likeliest are infinitely far below it.
        with np.errstate(over="ignore"):
            weights = np.exp(below / heat)
        before = np.cumsum(weights) - weights
        # The token with which the share is reached belongs to it, as in transformers.
        weights = weights[before < share * weights.sum()] if share < 1 else weights
        return int(order[random.choice(len(weights), p=weights / weights.sum())])

    return draw


class LeanKOnnx:
    """An exported model.

    Attributes:
        description: Its shapes, windows and buckets.
        graph: Its graph, loaded.
        tokenizer: Its tokenizer; None where the folder has no tokenizer.json.
    """

    def __init__(self, folder: str | Path, threads: int | None = None) -> None:
        """Load a folder that `leank-convert export --format onnx` wrote.

        Args:
            folder: The folder.
            threads: Threads that share a product of matrices; None for onnxruntime's choice.

        Raises:
            LeanKOnnxError: If a file is missing or does not fit the others.
        """
        self.folder = Path(folder)
        self.description = Description.read(self.folder)
        self.graph = Graph(self.folder / MODEL_FILE, threads)
        self._check_graph()
        self.tokenizer = self._load_tokenizer()

    def _check_graph(self) -> None:
        """Compare the graph's inputs and outputs with those that the description lets one expect."""
        d = self.description
        expected = new_integers(1, 1, 1) | Cache(d, 1, 1).tensors() | new_outputs(d, 1, 1, 1)
        found = self.graph.tensors
        wrong = sorted(expected.keys() ^ found.keys()) or [
            name
            for name, array in expected.items()
            if found[name][0] != _ONNX_TYPES[array.dtype.name]
            or len(found[name][1]) != array.ndim
            # Sizes that may vary are names.
            or any(isinstance(a, int) and a != b for a, b in zip(found[name][1], array.shape, strict=True))
        ]
        if wrong:
            raise LeanKOnnxError(
                f"`{self.folder / MODEL_FILE}` is not the graph that `{DESCRIPTION_FILE}` describes: "
                f"`{wrong[0]}` differs; export the model again"
            )

    def _load_tokenizer(self) -> Tokenizer | None:
        path = self.folder / "tokenizer.json"
        if not path.is_file():
            return None
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers' errors have no class of their own
            raise LeanKOnnxError(f"`{path}` cannot be read: {error}; copy it again") from None
        tokenizer.no_padding()
        tokenizer.no_truncation()
        return tokenizer

    def check_files(self) -> None:
        """Compare every file with the digest that the description has of it; reads all weights.

        Raises:
            LeanKOnnxError: If one differs or is missing.
        """
        for name, expected in self.description.files.items():
            digest = hashlib.sha256()
            require((self.folder / name).is_file(), f"`{self.folder / name}` is missing: copy it again")
            with (self.folder / name).open("rb") as file:
                while block := file.read(1 << 20):
                    digest.update(block)
            if digest.hexdigest() != expected:
                raise LeanKOnnxError(
                    f"`{self.folder / name}` differs from what was exported: sha256 {digest.hexdigest()}, "
                    f"not {expected}; copy it again"
                )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the tokens of a text.

        Raises:
            LeanKOnnxError: If the model has no tokenizer, or the text holds bytes that are no characters.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise LeanKOnnxError(
                f"the text is not UTF-8: {text[error.start : error.end]!a} at character {error.start}"
            ) from None
        return list(self._tokenizer().encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: TokenIds, skip_special_tokens: bool = True) -> str:
        """Return the text of tokens."""
        return str(self._tokenizer().decode(list(ids), skip_special_tokens=skip_special_tokens))

    @property
    def chat_template(self) -> str | None:
        """The model's chat template, None where it has none."""
        file = self.folder / "chat_template.jinja"
        if file.is_file():
            try:
                return file.read_text(encoding="utf-8")
            except ValueError as error:
                raise LeanKOnnxError(f"`{file}` is no text: {error}; copy it again") from None
        template = self._tokenizer_config().get("chat_template")
        if isinstance(template, list):
            # Several by name, as older files hold them.
            named = (entry for entry in template if isinstance(entry, dict))
            template = next((e.get("template") for e in named if e.get("name") == "default"), None)
        return template if isinstance(template, str) else None

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return the tokens of a conversation that the model is to answer; needs jinja2.

        Args:
            messages: A list of `{"role": "user", "content": "..."}` and so on.

        Raises:
            LeanKOnnxError: If the model has no chat template, it fails, or jinja2 is not installed.
        """
        require(not isinstance(messages, str), "messages is a string: pass a list of role and content")
        template = self.chat_template
        if template is None:
            raise LeanKOnnxError(f"`{self.folder}` has no chat template: pass plain text, or tokens")
        try:
            from jinja2 import nodes
            from jinja2.ext import Extension, loopcontrols
            from jinja2.parser import Parser
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError:
            raise LeanKOnnxError(
                "a chat template needs jinja2, which is not installed: `pip install jinja2`, or pass plain "
                "text (--plain), or tokens"
            ) from None

        def refuse(message: str) -> None:
            raise LeanKOnnxError(f"the chat template says: {message}")

        class Generation(Extension):
            # Marks for training what the model says; in a prompt its content stands by itself.
            tags = {"generation"}  # noqa: RUF012, as its base declares it

            def parse(self, parser: Parser) -> nodes.Node:
                line = next(parser.stream).lineno
                return nodes.Scope(parser.parse_statements(("name:endgeneration",), True), lineno=line)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
        )
        environment.filters["tojson"] = lambda value, **options: json.dumps(
            value, ensure_ascii=False, **options
        )
        environment.globals.update(
            raise_exception=refuse, strftime_now=lambda form: datetime.now().astimezone().strftime(form)
        )
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        config = self._tokenizer_config()
        tokens = {name: config[name] for name in names if config.get(name) is not None}
        # Older files write a token with its properties.
        special = {
            name: token["content"] if isinstance(token, dict) else token for name, token in tokens.items()
        }
        try:
            text = environment.from_string(template).render(
                messages=list(messages), tools=None, documents=None, add_generation_prompt=True, **special
            )
        except LeanKOnnxError:
            raise
        except Exception as error:  # a template may do what any program may
            raise LeanKOnnxError(f"the chat template of `{self.folder}` failed: {error}") from None
        return self.encode(text, add_special_tokens=False)

    def start(self) -> Session:
        """Return an empty session."""
        return Session(self)

    def generate(self, prompts: Sequence[str] | Sequence[TokenIds], **options: Any) -> list[list[int]]:
        """Answer prompts of any lengths at once and return the new tokens of each.

        Args:
            prompts: Texts or tokens.
            options: As for `Session.generate`.

        Raises:
            LeanKOnnxError: If an argument cannot be.
        """
        return self.start().generate(prompts, **options)

    def token_rows(
        self, prompts: Sequence[str] | Sequence[TokenIds], add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Return the tokens of texts; tokens stay as they are.

        Raises:
            LeanKOnnxError: If it is no list, or a token is none of the vocabulary.
        """
        require(not isinstance(prompts, str), "prompts is a string: pass a list of them")
        rows: list[list[int]] = []
        given: Sequence[str | TokenIds] = prompts
        for index, prompt in enumerate(given):
            if isinstance(prompt, str):
                rows.append(self.encode(prompt, add_special_tokens))
                continue
            try:
                rows.append([operator.index(token) for token in prompt])
            except TypeError:
                raise LeanKOnnxError(
                    f"prompts[{index}] is {prompt!r:.60}: pass a text, or a list of whole numbers"
                ) from None
        size = self.description.vocab_size
        for index, row in enumerate(rows):
            for token in row:
                require(
                    0 <= token < size,
                    f"prompts[{index}] has token {token}: the vocabulary is 0 to {size - 1}",
                )
        return rows

    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise LeanKOnnxError(f"`{self.folder}` has no tokenizer.json: pass tokens instead of text")
        return self.tokenizer

    def _tokenizer_config(self) -> dict[str, Any]:
        file = self.folder / "tokenizer_config.json"
        try:
            content = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        except (ValueError, RecursionError) as error:
            raise LeanKOnnxError(f"`{file}` is no JSON: {error}; copy it again") from None
        require(isinstance(content, dict), f"`{file}` is no JSON object; copy it again")
        return dict(content)


class _Parser(argparse.ArgumentParser):
    """Tells what is wrong in one line, as everything else is told."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message:.300}\nhint: see `{self.prog} --help`\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Answer one prompt on the command line, as it is made, and return the exit code."""
    parser = _Parser(description="Answer a prompt with a model that leank-convert exported.")
    parser.add_argument("folder", help="what `leank-convert export --format onnx` wrote")
    parser.add_argument("prompt", help="text of the user; - reads standard input")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--sample", action="store_true", help="draw tokens instead of taking the likeliest")
    parser.add_argument("--temperature", type=float, help="with --sample")
    parser.add_argument("--top-p", type=float, help="with --sample")
    parser.add_argument("--seed", type=int, help="with --sample")
    parser.add_argument("--threads", type=int)
    parser.add_argument(
        "--prompt-chunk", type=int, default=DEFAULT_PROMPT_CHUNK, help="tokens read at a time"
    )
    parser.add_argument("--plain", action="store_true", help="pass the prompt without the chat template")
    parser.add_argument("--check", action="store_true", help="compare the files with their digests first")
    given = parser.parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A model may say what the terminal's encoding has no bytes for.
        sys.stdout.reconfigure(errors="replace")
    try:
        model = LeanKOnnx(given.folder, given.threads)
        if given.check:
            model.check_files()
        prompt = _read_standard_input() if given.prompt == "-" else given.prompt
        if given.plain or model.chat_template is None:
            ids = model.encode(prompt)
        else:
            ids = model.encode_chat([{"role": "user", "content": prompt}])
        known = model.description.max_position_embeddings
        require(
            given.max_new_tokens <= known,
            f"max_new_tokens is {given.max_new_tokens}: the model's max_position_embeddings is {known}, pass "
            "no more",
        )
        most = len(ids) + given.max_new_tokens
        if most > known:
            sys.stderr.write(
                f"note: prompt and answer may have {most} tokens, the model's max_position_embeddings is "
                f"{known}: what lies beyond may make no sense\n"
            )
        answer: list[int] = []
        shown = ""

        def show(text: str) -> None:
            nonlocal shown
            sys.stdout.write(text[len(shown) :])
            sys.stdout.flush()
            shown = text

        def show_token(_: int, token: int) -> None:
            answer.append(token)
            text = model.decode(answer)
            # Half of a character decodes to U+FFFD: wait for the other half.
            if not text.endswith("\ufffd"):
                show(text)

        model.generate(
            [ids],
            max_new_tokens=given.max_new_tokens,
            do_sample=given.sample,
            temperature=given.temperature,
            top_p=given.top_p,
            seed=given.seed,
            prompt_chunk=given.prompt_chunk,
            streamer=show_token,
        )
        show(model.decode(answer))  # with a half character, where the answer ends in one
        sys.stdout.write("\n")
        sys.stdout.flush()
    except (LeanKOnnxError, MemoryError) as error:
        sys.stderr.write(f"error: {str(error) or 'memory does not suffice'}\n")
        return 2
    except KeyboardInterrupt:
        sys.stdout.write("\n")
        return 130
    except BrokenPipeError:
        # Whoever reads has enough. What is still buffered must not fail when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # as the signal would
    return 0


def _read_standard_input() -> str:
    require(sys.stdin is not None, "standard input is closed: pass the prompt as an argument")
    try:
        text = sys.stdin.read(_MAX_PROMPT + 1)
    except UnicodeDecodeError as error:
        raise LeanKOnnxError(f"standard input is no text: {error}") from None
    require(len(text) <= _MAX_PROMPT, f"standard input has more than {_MAX_PROMPT} characters: pass fewer")
    return text


if __name__ == "__main__":
    sys.exit(main())
