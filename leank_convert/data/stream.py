"""Sample prefetching in background threads."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice

from leank_convert.data.sample import TrainingSample
from leank_convert.data.source import SampleSource

# A step of a small model takes a thirtieth of a second on a GPU, and drawing its sample as long or longer.
_MOST_THREADS = 4


@contextmanager
def stream_samples(
    source: SampleSource, indices: Iterable[int], ahead: int = 2 * _MOST_THREADS
) -> Iterator[Iterator[TrainingSample]]:
    """Samples in the order of their indices, of which the next few are drawn while one is used.

    A sample that cannot be drawn raises where it would have come; leaving waits for no more than the draws
    under way. Indices may be without end; so many draws go ahead of the sample in use.
    """
    left, waiting = iter(indices), deque[Future[TrainingSample]]()
    # Nine tenths of a draw are the tokenizer's, which works outside Python's lock.
    threads = max(1, min(_MOST_THREADS, (os.cpu_count() or 1) // 2))
    pool = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="samples")

    def draw_ahead(count: int) -> None:
        waiting.extend(pool.submit(source.draw, index) for index in islice(left, count - len(waiting)))

    def take() -> Iterator[TrainingSample]:
        while True:
            draw_ahead(ahead + 1)
            if not waiting:
                return
            yield waiting.popleft().result()

    try:
        draw_ahead(ahead)
        yield take()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
