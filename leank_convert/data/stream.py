"""Sample prefetching in background threads."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice

from leank_convert.data.sample import TrainingSample
from leank_convert.data.source import SampleSource

# A step of a small model takes a thirtieth of a second on a GPU, and drawing its sample as long or longer.
_MOST_THREADS = 4


class SampleStream(Iterator[TrainingSample]):
    """Samples in the order of their indices, drawn in threads, the next `ahead` while one is used.

    A context manager: leaving it waits for no more than the draws under way. Indices may be without end. A
    sample that cannot be drawn raises where it would have come.
    """

    def __init__(self, source: SampleSource, indices: Iterable[int], ahead: int = 2 * _MOST_THREADS) -> None:
        # Nine tenths of a draw are the tokenizer's, which works outside Python's lock.
        threads = max(1, min(_MOST_THREADS, (os.cpu_count() or 1) // 2))
        self._pool = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="samples")
        self._source, self._indices, self._ahead = source, iter(indices), ahead
        self._waiting = deque[Future[TrainingSample]]()

    def __enter__(self) -> SampleStream:
        self._draw(self._ahead)
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def __next__(self) -> TrainingSample:
        """Return the next sample.

        Raises:
            LeanKError: If it cannot be drawn.
        """
        self._draw(self._ahead + 1)
        if not self._waiting:
            raise StopIteration
        return self._waiting.popleft().result()

    def peek(self) -> TrainingSample | None:
        """Return the sample that comes next, None unless it is drawn already."""
        first = self._waiting[0] if self._waiting else None
        return first.result() if first and first.done() and not first.exception() else None

    def _draw(self, count: int) -> None:
        for index in islice(self._indices, count - len(self._waiting)):
            self._waiting.append(self._pool.submit(self._source.draw, index))
