import itertools
import threading
import time

import pytest

from leank_convert.data import SampleStream
from leank_convert.errors import LeanKError


class Numbers:
    """A source whose samples are their own indices; tells which were drawn, and may fail."""

    def __init__(self, fails_at=None):
        self.fails_at = fails_at
        self.drawn = []
        self.news = threading.Condition()

    def draw(self, index):
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
    with SampleStream(Numbers(), indices) as stream:
        assert list(stream) == indices


@pytest.mark.parametrize("ahead", [1, 2, 5])
def test_the_next_samples_are_drawn_while_one_is_used(ahead):
    source = Numbers()
    with SampleStream(source, itertools.count(), ahead=ahead) as stream:
        assert next(stream) == 0
        assert source.wait_for(ahead)
    assert sorted(source.drawn) == list(range(ahead + 1))


def test_the_sample_that_comes_next_is_shown_once_it_is_drawn():
    source = Numbers(fails_at=1)
    with SampleStream(source, range(2)) as stream:
        # One thread draws in order, and others may end later.
        assert source.wait_for(0)
        while (first := stream.peek()) is None:
            time.sleep(0.001)
        assert first == next(stream) == 0
        assert source.wait_for(1) and stream.peek() is None
        with pytest.raises(LeanKError):
            next(stream)
        assert stream.peek() is None


def test_a_failing_draw_is_told_where_its_sample_would_have_come():
    with SampleStream(Numbers(fails_at=2), range(5)) as stream:
        assert [next(stream), next(stream)] == [0, 1]
        with pytest.raises(LeanKError, match="sample 2 cannot be drawn"):
            next(stream)
