"""Values in messages."""

import pytest

from leank_convert.errors import cut


def _nested(depth):
    outer = []
    inner = outer
    for _ in range(depth):
        inner.append([])
        inner = inner[0]
    return outer


def _laughs():
    value = "ha"
    for _ in range(60):
        value = [value] * 9
    return value


_LARGE = {
    "number": 10**5000,
    "text": "a" * 10**6,
    "deep": _nested(10**5),
    "wide": _laughs(),
}


@pytest.mark.parametrize("value", _LARGE.values(), ids=_LARGE)
def test_a_value_in_a_message_is_short_whatever_it_is(value):
    assert len(cut(value)) <= 121


def test_text_and_numbers_can_be_told_apart():
    assert (cut("1"), cut(1), cut(True), cut([1, None])) == ("'1'", "1", "True", "[1, None]")
