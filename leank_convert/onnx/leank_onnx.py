"""Generate text with a model exported by leank-convert; needs numpy, onnxruntime and tokenizers alone.

    python leank_onnx.py FOLDER "Why is the sky blue?"

    model = LeanKOnnx("FOLDER", threads=2)
    answers = model.generate(["Why is the sky blue?"], max_new_tokens=64)
    print(model.decode(answers[0]))

The graph returns K and V of the new tokens alone. This file keeps them in arrays that onnxruntime reads where
they lie, and moves tokens between them as decoding goes on. Per row, without padding:

    tokens 0 ... n-1 :  [ sink: min(n, sink_size) ][ pruned: p ][ recent: the rest ]

`window` holds sink and recent tokens with all channels, token t in slot t while t < sink_size, else in slot
sink_size + (t - sink_size) mod (recent_size + flush_size). `pruned` holds each bucket's kept channels, token
sink_size + j in column j. While a prompt is read, `window` holds all of it and nothing is pruned.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from tokenizers import Tokenizer

FORMAT_VERSION = 1
DESCRIPTION_FILE = "leank_onnx.json"
MODEL_FILE = "model.onnx"
DEFAULT_PROMPT_CHUNK = 256
_DTYPES: dict[str, type[np.floating[Any]]] = {"float32": np.float32, "float16": np.float16}
_CAPACITY_STEP = 64

Array = np.ndarray[Any, np.dtype[Any]]
TokenIds = Sequence[int]
Streamer = Callable[[int, int], object]


class LeanKOnnxError(ValueError):
    """What the caller can put right: names the file or argument, its value and the remedy."""


@dataclass(frozen=True)
class Bucket:
    """The heads of one width in a layer: heads `first` to `stop`, `stop` not among them."""

    width: int
    first: int
    stop: int


@dataclass(frozen=True)
class Description:
    """What `leank_onnx.json` says that decoding needs.

    Attributes:
        dtype: Element type of the cache and the logits.
        vocab_size: Length of a row of logits.
        num_heads: Key/value heads of every layer.
        head_dim: Channels of a head.
        sink_size, recent_size, flush_size: Window sizes.
        buckets: Per layer, its heads by width, contiguous.
        eos_token_ids: Tokens that end an answer.
        files: Size and digest of every file, as the description lists them.
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
    files: Mapping[str, str]

    @property
    def ring_size(self) -> int:
        """Slots of the window behind the sink, while decoding."""
        return self.recent_size + self.flush_size

    @property
    def num_slots(self) -> int:
        """Slots of the window, while decoding."""
        return self.sink_size + self.ring_size

    @classmethod
    def read(cls, folder: Path) -> Description:
        """Read it and look whether every file that it lists is there.

        Raises:
            LeanKOnnxError: If the folder is no export, is of another format, or lacks a file.
        """
        path = folder / DESCRIPTION_FILE
        if not path.is_file():
            raise LeanKOnnxError(
                f"`{path}` does not exist: pass a folder that `leank-convert export --format onnx` wrote"
            )
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise LeanKOnnxError(f"`{path}` is no JSON: {error}; export the model again") from None
        version = content.get("format_version")
        if version != FORMAT_VERSION:
            raise LeanKOnnxError(
                f"`{path}`: format_version is {version!r}, this leank_onnx.py reads {FORMAT_VERSION}: use "
                "the leank_onnx.py that lies beside it, or export the model again"
            )
        try:
            description = cls._parse(content)
        except KeyError as error:
            raise LeanKOnnxError(f"`{path}` lacks `{error.args[0]}`; export the model again") from None
        for name in description.files:
            # Whoever does without a tokenizer or a README may leave it out.
            if name.startswith(MODEL_FILE) and not (folder / name).is_file():
                raise LeanKOnnxError(
                    f"`{folder / name}` is missing: copy it from where the model was exported, it belongs to "
                    f"`{DESCRIPTION_FILE}`"
                )
        return description

    @classmethod
    def _parse(cls, content: Mapping[str, Any]) -> Description:
        model = content["model"]
        _require(
            content["dtype"] in _DTYPES,
            f"`{DESCRIPTION_FILE}`: dtype `{content['dtype']}` has no numpy type; use {sorted(_DTYPES)}",
        )
        return cls(
            dtype=_DTYPES[content["dtype"]],
            vocab_size=model["vocab_size"],
            num_heads=model["num_key_value_heads"],
            head_dim=model["head_dim"],
            sink_size=content["sink_size"],
            recent_size=content["recent_size"],
            flush_size=content["flush_size"],
            buckets=tuple(
                tuple(Bucket(bucket["width"], *bucket["heads"]) for bucket in layer)
                for layer in content["buckets"]
            ),
            eos_token_ids=frozenset(content["eos_token_ids"]),
            files=content["files"],
        )


class LeanKOnnx:
    """An exported model.

    Attributes:
        description: Its shapes, windows and buckets.
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
        options = onnxruntime.SessionOptions()
        if threads is not None:
            _require(threads >= 1, f"threads is {threads}: pass 1 or more, or None")
            options.intra_op_num_threads = threads
        path = self.folder / MODEL_FILE
        try:
            self.session = onnxruntime.InferenceSession(
                str(path), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # onnxruntime's errors share no class of their own
            raise LeanKOnnxError(
                f"onnxruntime {onnxruntime.__version__} cannot load `{path}`: {error}"
            ) from error
        self._check_inputs()
        tokenizer_file = self.folder / "tokenizer.json"
        self.tokenizer: Tokenizer | None = None
        if tokenizer_file.is_file():
            self.tokenizer = Tokenizer.from_file(str(tokenizer_file))
            self.tokenizer.no_padding()
            self.tokenizer.no_truncation()

    def _check_inputs(self) -> None:
        """Compare the graph's cache with the one that the description lets one expect."""
        session = self.start()
        session._allocate(1, self.description.sink_size + 1)
        expected = {name: array.shape for name, array in session._tensors().items()}
        inputs = {tensor.name: tensor.shape for tensor in self.session.get_inputs()}
        cache = {name: shape for name, shape in inputs.items() if name.startswith("past_key_values.")}
        wrong = sorted(expected.keys() ^ cache.keys()) or [
            name
            for name, shape in cache.items()
            # Sizes that may vary are names.
            if any(isinstance(a, int) and a != b for a, b in zip(shape, expected[name], strict=True))
        ]
        if wrong:
            raise LeanKOnnxError(
                f"`{self.folder / MODEL_FILE}` is not the graph that `{DESCRIPTION_FILE}` describes: input "
                f"`{wrong[0]}` differs; export the model again"
            )

    def check_files(self) -> None:
        """Compare every file with the digest that the description has of it; reads all weights.

        Raises:
            LeanKOnnxError: If one differs.
        """
        for name, expected in self.description.files.items():
            digest = hashlib.sha256()
            with (self.folder / name).open("rb") as file:
                while block := file.read(1 << 20):
                    digest.update(block)
            if digest.hexdigest() != expected:
                raise LeanKOnnxError(
                    f"`{self.folder / name}` differs from what was exported: sha256 {digest.hexdigest()}, "
                    f"not {expected}; copy it again"
                )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the tokens of a text."""
        return list(self._tokenizer().encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: TokenIds, skip_special_tokens: bool = True) -> str:
        """Return the text of tokens."""
        return str(self._tokenizer().decode(list(ids), skip_special_tokens=skip_special_tokens))

    @property
    def chat_template(self) -> str | None:
        """The model's chat template, None where it has none."""
        file = self.folder / "chat_template.jinja"
        if file.is_file():
            return file.read_text(encoding="utf-8")
        template = self._tokenizer_config().get("chat_template")
        if isinstance(template, list):
            # Several by name, as older files hold them.
            template = {entry["name"]: entry["template"] for entry in template}.get("default")
        return template if isinstance(template, str) else None

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return the tokens of a conversation that the model is to answer; needs jinja2.

        Args:
            messages: `{"role": "user", "content": "..."}` and so on.

        Raises:
            LeanKOnnxError: If the model has no chat template or jinja2 is not installed.
        """
        template = self.chat_template
        if template is None:
            raise LeanKOnnxError(f"`{self.folder}` has no chat template: pass plain text, or tokens")
        try:
            from jinja2.exceptions import TemplateError
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError:
            raise LeanKOnnxError(
                "a chat template needs jinja2, which is not installed: `pip install jinja2`, or pass plain "
                "text (--plain), or tokens"
            ) from None

        def refuse(message: str) -> None:
            raise LeanKOnnxError(f"the chat template says: {message}")

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
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
                messages=list(messages), add_generation_prompt=True, **special
            )
        except TemplateError as error:
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

    def token_rows(self, prompts: Sequence[str] | Sequence[TokenIds]) -> list[list[int]]:
        """Return the tokens of texts; tokens stay as they are.

        Raises:
            LeanKOnnxError: If it is no list, or a token is none of the vocabulary.
        """
        _require(not isinstance(prompts, str), "prompts is a string: pass a list of them")
        rows = [
            self.encode(prompt) if isinstance(prompt, str) else [int(token) for token in prompt]
            for prompt in prompts
        ]
        size = self.description.vocab_size
        for index, row in enumerate(rows):
            for token in row:
                _require(
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
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        return content


class _Pass:
    """A forward pass of one shape whose inputs and outputs are bound: run again, it binds nothing.

    Attributes:
        present: Per layer, K `[B, H_kv, Q, D]` and V `[B, H_kv, D, Q]` of the tokens of the last run.
    """

    def __init__(
        self, model: LeanKOnnx, cache: Mapping[str, Array], batch: int, num_new: int, num_logits: int
    ) -> None:
        d = model.description
        self.shape = (batch, num_new, num_logits)
        self._session = model.session
        self._integers = {
            "input_ids": np.zeros((batch, num_new), np.int64),
            "past_lengths": np.zeros(batch, np.int64),
            "pruned_lengths": np.zeros(batch, np.int64),
            "logits_index": np.zeros((batch, num_logits), np.int64),
        }
        self._logits = np.zeros((batch, num_logits, d.vocab_size), d.dtype)
        self.present = [
            (
                np.zeros((batch, d.num_heads, num_new, d.head_dim), d.dtype),
                np.zeros((batch, d.num_heads, d.head_dim, num_new), d.dtype),
            )
            for _ in d.buckets
        ]
        # The binding holds addresses alone: these keep the arrays.
        self._inputs = {**self._integers, **cache}
        outputs = {"logits": self._logits}
        for layer, (keys, values) in enumerate(self.present):
            outputs |= {f"present.{layer}.key": keys, f"present.{layer}.value": values}
        self._binding = model.session.io_binding()
        for name, array in self._inputs.items():
            self._binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        for name, array in outputs.items():
            self._binding.bind_output(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)

    def run(self, *, is_last_of_prompt: bool = False, **integers: Array) -> Array:
        """Return logits `[B, K, V]`, valid until the next run."""
        for name, values in integers.items():
            self._integers[name][:] = values
        options = onnxruntime.RunOptions()
        if is_last_of_prompt:
            # A long prompt's attention takes many times the memory that decoding needs: give it back.
            options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
        self._session.run_with_iobinding(self._binding, options)
        return self._logits


class Session:
    """Rows of tokens that the model has read, and their cache; turns are appended to it.

    Attributes:
        lengths: Tokens per row `[B]`.
        pruned_lengths: How many of them are pruned `[B]`.
    """

    def __init__(self, model: LeanKOnnx) -> None:
        self.model = model
        self.lengths = np.zeros(0, np.int64)
        self.pruned_lengths = np.zeros(0, np.int64)
        # Per layer [B, H_kv, slots, D] and [B, H_kv, D, slots].
        self._windows: list[tuple[Array, Array]] = []
        # By layer and width [B, heads, capacity, width] and [B, heads, D, capacity].
        self._pruned: dict[tuple[int, int], tuple[Array, Array]] = {}
        self._pass: _Pass | None = None
        self._unread: list[list[int]] = []

    @property
    def cache_bytes(self) -> int:
        """Bytes of the cache, room to grow included."""
        return sum(array.nbytes for array in self._tensors().values())

    def feed(
        self,
        rows: Sequence[str] | Sequence[TokenIds],
        *,
        prompt_chunk: int = DEFAULT_PROMPT_CHUNK,
        all_logits: bool = False,
    ) -> list[Array]:
        """Read tokens: the prompts at first, later turns after that; with one token per row, decode.

        However a prompt is cut, its tokens attend to all before them. Those of a later turn attend to one
        another, within a chunk, and to the cache as it is. The last token of an answer is read before a turn.

        Args:
            rows: Texts or tokens, one row for each one of the session; none may be empty at first.
            prompt_chunk: Tokens per row that are read at a time: more need more memory.
            all_logits: Return logits after every token, else after each row's last one alone.

        Returns:
            Per row, logits `[tokens, V]`.

        Raises:
            LeanKOnnxError: If the rows cannot be.
        """
        _require(prompt_chunk >= 1, f"prompt_chunk is {prompt_chunk}: pass 1 or more")
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
        _require(max_new_tokens >= 1, f"max_new_tokens is {max_new_tokens}: pass 1 or more")
        pick = _picker(do_sample, temperature, top_p, seed)
        logits = self.feed(rows, prompt_chunk=prompt_chunk)
        answers: list[list[int]] = [[] for _ in logits]
        running = [row for row, values in enumerate(logits) if len(values)]
        while True:
            for row in running:
                answers[row].append(pick(logits[row][-1]))
            # Known before the streamer is: one that raises ends the answer, and the session can go on.
            self._unread = [answer[-1:] for answer in answers]
            if streamer is not None:
                for row in running:
                    streamer(row, answers[row][-1])
            ended = self.model.description.eos_token_ids
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
        given = self.model.token_rows(rows)
        if not self._windows:
            _require(len(given) > 0, "prompts is empty: pass one prompt or more")
            for index, row in enumerate(given):
                _require(len(row) > 0, f"prompts[{index}] is empty: a prompt has one token or more")
            return given
        _require(
            len(given) == len(self.lengths),
            f"the turn has {len(given)} rows, the session {len(self.lengths)}: pass one row for each, [] "
            "where there is nothing to read",
        )
        _require(any(given), "every row of the turn is empty: pass one token or more")
        if self._unread:
            given = [before + row if row else row for before, row in zip(self._unread, given, strict=True)]
            self._unread = [[] if row else before for before, row in zip(self._unread, given, strict=True)]
        return given

    def _feed(self, rows: Sequence[TokenIds], chunk: int, all_logits: bool) -> list[Array]:
        if self._windows:
            return self._read(rows, chunk, all_logits, self._append)
        try:
            self._allocate(len(rows), self.model.description.sink_size + 1)
            logits = self._read(rows, chunk, all_logits, self._read_prompt)
            self._split()
        except BaseException:
            # Half a prompt is no cache that could be decoded on: be empty again.
            self._windows, self._pruned, self._pass = [], {}, None
            self.lengths = self.pruned_lengths = np.zeros(0, np.int64)
            raise
        return logits

    def _read(
        self,
        rows: Sequence[TokenIds],
        chunk: int,
        all_logits: bool,
        read_chunk: Callable[[Array, Array, Array, int], Array],
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
            logits = read_chunk(ids, counts, index, longest - start - ids.shape[1])
            for row in np.flatnonzero(counts).tolist():
                if all_logits:
                    parts[row].append(logits[row, : counts[row]].copy())
                else:
                    parts[row] = [logits[row].copy()]
        return [np.concatenate(part) for part in parts]

    def _allocate(self, batch: int, num_slots: int) -> None:
        """Make room for prompts that are read whole; a graph's input is never empty, hence one column."""
        self.lengths, self.pruned_lengths = np.zeros(batch, np.int64), np.zeros(batch, np.int64)
        self._windows = [self._new_window(batch, num_slots) for _ in self.model.description.buckets]
        for layer, bucket in self._seen_buckets():
            self._pruned[layer, bucket.width] = self._new_pruned(batch, bucket, 1)

    def _read_prompt(self, ids: Array, counts: Array, index: Array, num_left: int) -> Array:
        """Read a chunk of all prompts; the longest one goes on for `num_left` tokens."""
        # A row that has ended is padded: what its padding leaves lies behind its length, where nothing looks.
        logits = self._run(ids, index, is_last_of_prompt=not num_left)
        assert self._pass is not None
        present = self._pass.present
        start = int(self.lengths.max())
        stop = start + ids.shape[1]
        if stop > self._windows[0][0].shape[2]:
            # Twice what is there, since every slot costs time, empty or not.
            self._grow_windows(min(2 * stop, stop + num_left))
        for (keys, values), (new_keys, new_values) in zip(self._windows, present, strict=True):
            keys[:, :, start:stop] = new_keys
            values[..., start:stop] = new_values
        self.lengths += counts
        return logits

    def _append(self, ids: Array, counts: Array, index: Array, _: int) -> Array:
        """Read the first `counts[b]` of each row's tokens, one as decoding does, several as a turn."""
        self._make_room(counts == 1)
        logits = self._run(ids, index)
        assert self._pass is not None
        present = self._pass.present
        for position in range(ids.shape[1]):
            here = counts > position
            self._make_room(here & (counts != 1))
            rows = np.flatnonzero(here)
            slots = self._slots_of(self.lengths[rows])
            for (keys, values), (new_keys, new_values) in zip(self._windows, present, strict=True):
                keys[rows, :, slots] = new_keys[rows, :, position]
                values[rows, :, :, slots] = new_values[rows, :, :, position]
            self.lengths[rows] += 1
        return logits

    def _run(self, ids: Array, index: Array, is_last_of_prompt: bool = False) -> Array:
        shape = (*ids.shape, index.shape[1])
        if self._pass is None or self._pass.shape != shape:
            self._pass = _Pass(self.model, self._tensors(), *shape)
        return self._pass.run(
            input_ids=ids,
            past_lengths=self.lengths,
            pruned_lengths=self.pruned_lengths,
            logits_index=index,
            is_last_of_prompt=is_last_of_prompt,
        )

    def _split(self) -> None:
        """Part the prompts, which lie whole in the windows, into sink, pruned and recent tokens."""
        d = self.model.description
        self._pass = None
        self.pruned_lengths = np.maximum(self.lengths - d.sink_size - d.recent_size, 0)
        capacity = _capacity(int(self.pruned_lengths.max()))
        batch = len(self.lengths)
        for layer, buckets in enumerate(d.buckets):
            keys, values = self._windows[layer]
            window_keys, window_values = self._new_window(batch, d.num_slots)
            for bucket in buckets:
                if bucket.width:
                    self._pruned[layer, bucket.width] = self._new_pruned(batch, bucket, capacity)
            for row, (length, pruned) in enumerate(zip(self.lengths, self.pruned_lengths, strict=True)):
                sink = min(int(length), d.sink_size)
                tokens = np.concatenate([np.arange(sink), np.arange(d.sink_size + pruned, length)])
                slots = self._slots_of(tokens)
                window_keys[row][:, slots] = keys[row][:, tokens]
                window_values[row][..., slots] = values[row][..., tokens]
                self._write_pruned(layer, row, 0, keys[row], values[row], np.arange(sink, sink + pruned))
            # The prompt's own memory is let go of layer by layer.
            self._windows[layer] = (window_keys, window_values)

    def _make_room(self, rows: Array) -> None:
        """Flush where a row of `rows` [B], bool, has no slot for one more token."""
        d = self.model.description
        in_recent = self.lengths - d.sink_size - self.pruned_lengths
        full = np.flatnonzero(rows & (in_recent >= d.ring_size))
        if not full.size:
            return
        self._grow(int(self.pruned_lengths[full].max()) + d.flush_size)
        for row in full.tolist():
            start = int(self.pruned_lengths[row])
            slots = self._slots_of(d.sink_size + start + np.arange(d.flush_size))
            for layer, (keys, values) in enumerate(self._windows):
                self._write_pruned(layer, row, start, keys[row], values[row], slots)
        self.pruned_lengths[full] += d.flush_size

    def _write_pruned(
        self, layer: int, row: int, start: int, keys: Array, values: Array, slots: Array
    ) -> None:
        """Copy the tokens in `slots` of a row's window `[H_kv, S, D]`, `[H_kv, D, S]` to `start` onwards."""
        stop = start + len(slots)
        for bucket in self.model.description.buckets[layer]:
            if bucket.width:
                heads = slice(bucket.first, bucket.stop)
                pruned_keys, pruned_values = self._pruned[layer, bucket.width]
                pruned_keys[row, :, start:stop] = keys[heads, :, : bucket.width][:, slots]
                pruned_values[row, :, :, start:stop] = values[heads][..., slots]

    def _grow_windows(self, num_slots: int) -> None:
        self._pass = None
        for layer, (old_keys, old_values) in enumerate(self._windows):
            keys, values = self._new_window(len(self.lengths), num_slots)
            keys[:, :, : old_keys.shape[2]] = old_keys
            values[..., : old_values.shape[3]] = old_values
            self._windows[layer] = (keys, values)

    def _grow(self, num_tokens: int) -> None:
        """Allocate anew where there is no room for `num_tokens` pruned ones."""
        stores = self._pruned
        if not stores or num_tokens <= next(iter(stores.values()))[0].shape[2]:
            return
        self._pass = None
        for layer, bucket in self._seen_buckets():
            old_keys, old_values = stores[layer, bucket.width]
            keys, values = self._new_pruned(len(self.lengths), bucket, _capacity(num_tokens))
            keys[:, :, : old_keys.shape[2]] = old_keys
            values[..., : old_values.shape[3]] = old_values
            stores[layer, bucket.width] = (keys, values)

    def _slots_of(self, tokens: Array) -> Array:
        d = self.model.description
        return np.where(tokens < d.sink_size, tokens, d.sink_size + (tokens - d.sink_size) % d.ring_size)

    def _seen_buckets(self) -> Iterator[tuple[int, Bucket]]:
        """Layer and bucket of all heads that see pruned tokens."""
        for layer, buckets in enumerate(self.model.description.buckets):
            yield from ((layer, bucket) for bucket in buckets if bucket.width)

    def _new_window(self, batch: int, num_slots: int) -> tuple[Array, Array]:
        d = self.model.description
        return (
            np.zeros((batch, d.num_heads, num_slots, d.head_dim), d.dtype),
            np.zeros((batch, d.num_heads, d.head_dim, num_slots), d.dtype),
        )

    def _new_pruned(self, batch: int, bucket: Bucket, capacity: int) -> tuple[Array, Array]:
        d, heads = self.model.description, bucket.stop - bucket.first
        return (
            np.zeros((batch, heads, capacity, bucket.width), d.dtype),
            np.zeros((batch, heads, d.head_dim, capacity), d.dtype),
        )

    def _tensors(self) -> dict[str, Array]:
        """The cache by the names of the graph's inputs."""
        regions = {f"{layer}.window": window for layer, window in enumerate(self._windows)}
        regions |= {f"{layer}.pruned.{width}": store for (layer, width), store in self._pruned.items()}
        return {
            f"past_key_values.{region}.{part}": array
            for region, arrays in regions.items()
            for part, array in zip(("key", "value"), arrays, strict=True)
        }


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise LeanKOnnxError(message)


def _capacity(num_tokens: int) -> int:
    """Columns to allocate for pruned tokens: a sixteenth more, so that copying per token stays constant."""
    return max(-(-(num_tokens + num_tokens // 16) // _CAPACITY_STEP), 1) * _CAPACITY_STEP


def _picker(
    do_sample: bool, temperature: float | None, top_p: float | None, seed: int | None
) -> Callable[[Array], int]:
    """Return a function from logits `[V]` to the next token."""
    if not do_sample:
        for name, value in (("temperature", temperature), ("top_p", top_p), ("seed", seed)):
            _require(
                value is None,
                f"{name} is {value}, but nothing is drawn: pass do_sample=True (--sample), or drop {name}",
            )
        return lambda logits: int(logits.argmax())
    heat = 1.0 if temperature is None else temperature
    share = 1.0 if top_p is None else top_p
    _require(heat > 0, f"temperature is {heat}: pass more than 0, or do_sample=False for the likeliest token")
    _require(0 < share <= 1, f"top_p is {share}: pass more than 0 and at most 1")
    random = np.random.default_rng(seed)

    def draw(logits: Array) -> int:
        scaled = logits.astype(np.float64) / heat
        order = np.argsort(-scaled, kind="stable")
        weights = np.exp(scaled[order] - scaled[order[0]])
        before = np.cumsum(weights) - weights
        # The token with which the share is reached belongs to it, as in transformers.
        weights = weights[before < share * weights.sum()] if share < 1 else weights
        return int(order[random.choice(len(weights), p=weights / weights.sum())])

    return draw


def main(arguments: Sequence[str] | None = None) -> int:
    """Answer one prompt on the command line, as it is made, and return the exit code."""
    parser = argparse.ArgumentParser(description="Answer a prompt with a model that leank-convert exported.")
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
    try:
        model = LeanKOnnx(given.folder, given.threads)
        if given.check:
            model.check_files()
        prompt = sys.stdin.read() if given.prompt == "-" else given.prompt
        if given.plain or model.chat_template is None:
            ids = model.encode(prompt)
        else:
            ids = model.encode_chat([{"role": "user", "content": prompt}])
        answer: list[int] = []
        shown = ""

        def show(_: int, token: int) -> None:
            nonlocal shown
            answer.append(token)
            text = model.decode(answer)
            # Half of a character decodes to U+FFFD: wait for the other half.
            if not text.endswith("\ufffd"):
                sys.stdout.write(text[len(shown) :])
                sys.stdout.flush()
                shown = text

        model.generate(
            [ids],
            max_new_tokens=given.max_new_tokens,
            do_sample=given.sample,
            temperature=given.temperature,
            top_p=given.top_p,
            seed=given.seed,
            prompt_chunk=given.prompt_chunk,
            streamer=show,
        )
    except LeanKOnnxError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stdout.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
