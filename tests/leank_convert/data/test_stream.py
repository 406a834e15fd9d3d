import contextlib
import itertools
import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from leank_convert.data import SampleSource, stream_samples
from leank_convert.errors import LeanKError


class Numbers:
    """A source whose samples are their own indices; tells which were drawn, and may be held up or fail."""

    def __init__(self, fails_at=None, waits_from=math.inf):
        self.fails_at = fails_at
        self.waits_from = waits_from
        self.drawn = []
        self.waiting = threading.Semaphore(0)
        self.go_on = threading.Event()
        self.news = threading.Condition()

    def draw(self, index):
        if index >= self.waits_from:
            self.waiting.release()
            assert self.go_on.wait(60)
        with self.news:
            self.drawn.append(index)
            self.news.notify_all()
        if index == self.fails_at:
            raise LeanKError(f"sample {index} cannot be drawn")
        return index

    def wait_for(self, index):
        with self.news:
            return self.news.wait_for(lambda: index in self.drawn, 60)


@pytest.fixture(autouse=True, params=[1, 4])
def num_threads(request, monkeypatch):
    """How many draw at once; in the end none of them is left."""
    monkeypatch.setattr("os.cpu_count", lambda: 2 * request.param)
    before = set(threading.enumerate())
    yield request.param
    assert set(threading.enumerate()) <= before


def test_samples_come_in_the_order_of_their_indices():
    indices = [4, 1, 1, 7, 0, 3]
    with stream_samples(Numbers(), indices) as stream:
        assert list(stream) == indices


def test_samples_are_those_of_the_source(plain_tokenizer, section):
    source = SampleSource(plain_tokenizer, section(questions_per_context=2), seed=0)
    with stream_samples(source, range(3)) as stream:
        drawn = list(stream)
    for index, sample in enumerate(drawn):
        alone = source.draw(index)
        assert sample.prefix_ids.equal(alone.prefix_ids)
        assert sample.questions[1].input_ids.equal(alone.questions[1].input_ids)


@pytest.mark.parametrize("ahead", [1, 2, 5])
def test_the_next_samples_are_drawn_while_one_is_used(ahead):
    source = Numbers()
    with stream_samples(source, itertools.count(), ahead=ahead) as stream:
        assert next(stream) == 0
        assert source.wait_for(ahead)
    assert sorted(source.drawn) == list(range(ahead + 1))


def test_a_failing_draw_is_told_where_its_sample_would_have_come():
    with stream_samples(Numbers(fails_at=2), range(5)) as stream:
        assert [next(stream), next(stream)] == [0, 1]
        with pytest.raises(LeanKError, match="sample 2 cannot be drawn"):
            next(stream)


def test_a_failing_draw_of_a_sample_that_is_never_used_is_not_told():
    source = Numbers(fails_at=1)
    with stream_samples(source, range(5)) as stream:
        assert next(stream) == 0
        assert source.wait_for(1)


@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_leaving_early_waits_for_the_draws_under_way_and_starts_no_other(error, num_threads, monkeypatch):
    source = Numbers(waits_from=1)
    original = ThreadPoolExecutor.shutdown

    def shutdown(executor, **options):
        original(executor, **{**options, "wait": False})
        source.go_on.set()
        original(executor, **options)

    monkeypatch.setattr(ThreadPoolExecutor, "shutdown", shutdown)
    with (
        contextlib.nullcontext() if error is None else pytest.raises(error),
        stream_samples(source, itertools.count()) as stream,
    ):
        assert next(stream) == 0
        assert all(source.waiting.acquire(timeout=60) for _ in range(num_threads))
        if error is not None:
            raise error
    assert sorted(source.drawn) == list(range(1 + num_threads))
