"""Sample prefetching in background threads."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from leank_convert.data.sample import TrainingSample
from leank_convert.data.source import SampleSource

# A step of a small model takes a thirtieth of a second on a GPU, and drawing its sample as long or longer.
_MOST_THREADS = 4


class SampleStream:
    """Samples in the order of their indices, of which the next few are drawn while one is used.

    A context manager: within it, the stream is its own iterator. A sample that cannot be drawn raises where
    it would have come; leaving waits for no more than the draws under way.

    Args:
        source: Draws them.
        indices: Which, in order; may be without end.
        ahead: How many are drawn, or being drawn, beside the one in use.
    """

    def __init__(self, source: SampleSource, indices: Iterable[int], ahead: int = 2 * _MOST_THREADS) -> None:
        self._source = source
        self._indices = iter(indices)
        self._ahead = ahead
        self._waiting: deque[Future[TrainingSample]] = deque()
        # Nine tenths of a draw are the tokenizer's, which works outside Python's lock.
        threads = max(1, min(_MOST_THREADS, (os.cpu_count() or 1) // 2))
        self._threads = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="samples")

    def __enter__(self) -> SampleStream:
        self._draw_ahead(self._ahead)
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)

    def __iter__(self) -> Iterator[TrainingSample]:
        return self

    def __next__(self) -> TrainingSample:
        self._draw_ahead(self._ahead + 1)
        if not self._waiting:
            raise StopIteration
        return self._waiting.popleft().result()

    def _draw_ahead(self, count: int) -> None:
        while len(self._waiting) < count:
            try:
                index = next(self._indices)
            except StopIteration:
                return
            self._waiting.append(self._threads.submit(self._source.draw, index))
