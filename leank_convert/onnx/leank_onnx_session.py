"""Reading and answering: what a session of leank_onnx.py does with the graph, its cache and the logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import onnxruntime

if TYPE_CHECKING or __package__:
    from .leank_onnx_cache import Cache, Present
    from .leank_onnx_description import Array, Description, LeanKOnnxMemoryError, require
else:  # beside the graph
    from leank_onnx_cache import Cache, Present
    from leank_onnx_description import Array, Description, LeanKOnnxMemoryError, require

if TYPE_CHECKING:
    from .leank_onnx import LeanKOnnx

DEFAULT_PROMPT_CHUNK = 256

TokenIds = Sequence[int]
Streamer = Callable[[int, int], object]


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


class _Pass:
    """A forward pass of one shape whose inputs and outputs are bound: run again, it binds nothing.

    Attributes:
        present: Keys and values of the tokens of the last run.
    """

    def __init__(self, model: LeanKOnnx, cache: Cache, num_new: int, num_logits: int) -> None:
        d, batch = model.description, len(cache.lengths)
        self._bound = (batch, num_new, num_logits, cache.moves)
        self._session = model.session
        self._integers = new_integers(batch, num_new, num_logits)
        # The binding holds addresses alone. The cache keeps its own arrays, and `fits` says whether they are
        # still these.
        outputs = new_outputs(d, batch, num_new, num_logits)
        self._logits = outputs["logits"]
        self.present: Present = [
            (outputs[f"present.{layer}.key"], outputs[f"present.{layer}.value"])
            for layer in range(len(d.buckets))
        ]
        self._binding = model.session.io_binding()
        for name, array in {**self._integers, **cache.tensors()}.items():
            self._binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        for name, array in outputs.items():
            self._binding.bind_output(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)

    def fits(self, cache: Cache, num_new: int, num_logits: int) -> bool:
        """Whether the shapes are these and the cache lies where it lay."""
        return self._bound == (len(cache.lengths), num_new, num_logits, cache.moves)

    def run(self, *, is_last_of_prompt: bool = False, **integers: Array) -> Array:
        """Return logits `[B, K, V]`, valid until the next run.

        Raises:
            LeanKOnnxMemoryError: If memory does not suffice.
        """
        for name, values in integers.items():
            self._integers[name][:] = values
        options = onnxruntime.RunOptions()
        options.log_severity_level = 4  # what fails is raised
        if is_last_of_prompt:
            # A long prompt's attention takes many times the memory that decoding needs: give it back.
            options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
        try:
            self._session.run_with_iobinding(self._binding, options)
        except RuntimeError as error:
            # By its words alone is it known from others.
            if "Failed to allocate memory" not in str(error) and "bad_alloc" not in str(error):
                raise
            raise LeanKOnnxMemoryError(
                f"too little memory for {self._bound[1]} new tokens of {self._bound[0]} rows at a time: "
                "pass a smaller prompt_chunk, or fewer rows"
            ) from error
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

    def _feed(self, rows: Sequence[TokenIds], chunk: int, all_logits: bool) -> list[Array]:
        if self._cache is not None:
            return self._read(self._cache, rows, chunk, all_logits)
        cache = Cache(self.model.description, len(rows), self.model.description.sink_size + 1)
        # Half a prompt is no cache that could be decoded on: where reading is interrupted, stay empty.
        try:
            logits = self._read(cache, rows, chunk, all_logits, is_prompt=True)
        finally:
            self._pass = None
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
