"""Reading and answering tokens with a graph exported by leank-convert; travels with `leank_onnx.py`.

`run_graph` runs it on new tokens and a cache; a `Session` reads and answers rows of tokens by such steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

if __package__:  # that of a program which has these files
    from .leank_onnx_cache import Array, Cache, LeanKOnnxError, LeanKOnnxMemoryError, Present, require
else:
    from leank_onnx_cache import Array, Cache, LeanKOnnxError, LeanKOnnxMemoryError, Present, require  # type: ignore

DEFAULT_PROMPT_CHUNK = 256

TokenIds = Sequence[int]
Rows = Sequence[str] | Sequence[TokenIds]
Streamer = Callable[[int, int], object]


def load_graph(path: Path, threads: int | None = None, settings: Mapping[str, str] | None = None) -> Any:
    """Load a graph into a session of onnxruntime on the CPU.

    Args:
        path: Its file.
        threads: As for `LeanKOnnx`.
        settings: Further ones of the session.

    Raises:
        LeanKOnnxError: If onnxruntime cannot load it.
    """
    import onnxruntime  # here, since a description can be read without it

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # what fails is raised
    if threads is not None:
        valid = isinstance(threads, int) and 1 <= threads <= 1024
        require(valid, f"threads is {threads!r}: pass a whole number from 1 to 1024, or None")
        options.intra_op_num_threads = threads
    for name, value in (settings or {}).items():
        options.add_session_config_entry(name, value)
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's errors share no class of their own
        raise LeanKOnnxError(
            f"onnxruntime {onnxruntime.__version__} cannot load `{path}`: {error}"
        ) from error


def run_graph(
    graph: Any,
    cache: Mapping[str, Array],
    input_ids: Array,
    past_lengths: Array,
    pruned_lengths: Array,
    logits_index: Array,
    gives_back_memory: bool = False,
) -> tuple[Array, Present]:
    """Run a graph on new tokens `[B, Q]` and `Cache.tensors`, which it reads where they lie.

    Returns:
        Logits `[B, K, V]`, and the new tokens' keys and values.

    Raises:
        LeanKOnnxError: If onnxruntime fails; LeanKOnnxMemoryError where memory runs out.
    """
    import onnxruntime

    options = onnxruntime.RunOptions()
    options.log_severity_level = 4  # what fails is raised
    if gives_back_memory:  # what the run takes beyond inputs and outputs, to the system
        options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    integers = {
        "input_ids": input_ids,
        "past_lengths": past_lengths,
        "pruned_lengths": pruned_lengths,
        "logits_index": logits_index,
    }
    try:
        logits, *present = graph.run(None, {**integers, **cache}, options)
    except Exception as error:  # onnxruntime's errors share no class of their own
        if "Failed to allocate memory" in str(error) or "bad_alloc" in str(error):
            batch, num_new = input_ids.shape
            raise LeanKOnnxMemoryError(
                f"too little memory for {num_new} new tokens of {batch} rows at a time: pass a smaller "
                "prompt_chunk, or fewer rows"
            ) from error
        raise LeanKOnnxError(f"onnxruntime cannot run the graph: {error}") from error
    return logits, list(zip(present[::2], present[1::2], strict=True))


class Session:
    """Rows of tokens that the model has read, and their cache; turns are appended to it.

    Attributes:
        model: The `LeanKOnnx` that they are rows of.
        cache: The cache, None before the prompts are read.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.cache: Cache | None = None
        # By row the last token of its answer and where it belongs: unread for as long as the row ends there.
        self._endings: dict[int, tuple[int, int]] = {}

    @property
    def lengths(self) -> Array:
        """Tokens per row `[B]`, none before the prompts are read."""
        return np.zeros(0, np.int64) if self.cache is None else self.cache.lengths.copy()

    @property
    def pruned_lengths(self) -> Array:
        """How many of them are pruned `[B]`."""
        return np.zeros(0, np.int64) if self.cache is None else self.cache.pruned_lengths.copy()

    @property
    def cache_bytes(self) -> int:
        """Bytes of the cache, room to grow included."""
        return 0 if self.cache is None else sum(array.nbytes for array in self.cache.tensors().values())

    def feed(
        self, rows: Rows, *, prompt_chunk: int = DEFAULT_PROMPT_CHUNK, all_logits: bool = False
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
        valid = isinstance(prompt_chunk, (int, np.integer)) and prompt_chunk >= 1
        require(valid, f"prompt_chunk is {prompt_chunk!r}: pass a whole number, 1 or more")
        return self._feed(self._rows_to_read(rows), prompt_chunk, all_logits)

    def generate(
        self,
        rows: Rows,
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
        is_count = isinstance(max_new_tokens, (int, np.integer)) and max_new_tokens >= 1
        require(is_count, f"max_new_tokens is {max_new_tokens!r}: pass 1, 2 or more")
        pick = _picker(do_sample, temperature, top_p, seed)
        logits = self.feed(rows, prompt_chunk=prompt_chunk)
        ended = self.model.description.eos_token_ids
        answers: list[list[int]] = [[] for _ in logits]
        running = [row for row, values in enumerate(logits) if len(values)]
        while running:
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
            if running:
                tokens = [answer[-1:] if row in running else [] for row, answer in enumerate(answers)]
                logits = self._feed(tokens, 1, False)
        return answers

    def _rows_to_read(self, rows: Rows) -> list[list[int]]:
        """Put the tokens that ended the last answers before the given ones; raise where rows cannot be."""
        given: list[list[int]] = self.model.token_rows(rows, add_special_tokens=self.cache is None)
        if self.cache is None:
            require(len(given) > 0, "prompts is empty: pass one prompt or more")
            for number, row in enumerate(given):
                require(len(row) > 0, f"prompts[{number}] is empty: a prompt has one token or more")
            return given
        require(
            len(given) == len(self.lengths),
            f"the turn has {len(given)} rows, the session {len(self.lengths)}: pass one row for each, [] "
            "where there is nothing to read",
        )
        require(any(given), "every row of the turn is empty: pass one token or more")
        for number, (position, ending) in self._endings.items():
            if given[number] and position == self.lengths[number]:
                given[number].insert(0, ending)
        return given

    def _feed(self, rows: Sequence[TokenIds], chunk: int, all_logits: bool) -> list[Array]:
        d, is_prompt = self.model.description, self.cache is None
        cache = Cache(d, len(rows), 1) if self.cache is None else self.cache
        num_new = np.array([len(row) for row in rows])
        longest = int(num_new.max())
        parts: list[list[Array]] = [[np.zeros((0, d.vocab_size), d.dtype)] for _ in rows]
        for start in range(0, longest, chunk):
            counts = np.clip(num_new - start, 0, chunk)
            ids = np.zeros((len(rows), int(counts.max())), np.int64)
            for row, count in enumerate(counts):
                ids[row, :count] = rows[row][start : start + count]
            wanted = np.maximum(counts - 1, 0)[:, None]
            if all_logits:
                wanted = np.tile(np.arange(ids.shape[1]), (len(rows), 1))
            if is_prompt:
                num_left = longest - start - ids.shape[1]
                # A long prompt's attention takes many times the memory that decoding needs.
                logits, present = self._run(cache, ids, wanted, gives_back_memory=not num_left)
                cache.write_prompt(present, counts, num_left)
            else:
                logits = self._append(cache, ids, counts, wanted)
            for row in np.flatnonzero(counts).tolist():
                if all_logits:
                    parts[row].append(logits[row, : counts[row]])
                else:
                    parts[row] = [logits[row]]
        if is_prompt:
            # Half a prompt is no cache that could be decoded on: where reading is interrupted, stay empty.
            cache.split()
            self.cache = cache
        return [np.concatenate(part) for part in parts]

    def _append(self, cache: Cache, ids: Array, counts: Array, wanted: Array) -> Array:
        """Read the first `counts[b]` of each row's tokens, one as decoding does, several as a turn."""
        pruned_lengths = cache.pruned_lengths.copy()
        cache.make_room(counts == 1)
        try:
            logits, present = self._run(cache, ids, wanted)
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
        self, cache: Cache, ids: Array, wanted: Array, gives_back_memory: bool = False
    ) -> tuple[Array, Present]:
        """Return logits and the new tokens' keys and values."""
        lengths = cache.lengths, cache.pruned_lengths
        return run_graph(self.model.graph, cache.tensors(), ids, *lengths, wanted, gives_back_memory)


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
    is_heat, is_share = (isinstance(given, (int, float, np.number)) and given > 0 for given in (heat, share))
    require(is_heat, f"temperature is {heat!r}: pass more than 0, or do_sample=False for the likeliest token")
    require(is_share and share <= 1, f"top_p is {share!r}: pass more than 0 and at most 1")
    is_seed = seed is None or (isinstance(seed, (int, np.integer)) and seed >= 0)
    require(is_seed, f"seed is {seed!r}: pass a whole number, 0 or more, or None")
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
