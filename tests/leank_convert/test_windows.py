import re

import pytest

from leank_convert.errors import LeanKError
from leank_convert.windows import Windows


@pytest.mark.parametrize("key", ["sink_size", "recent_size", "flush_size"])
@pytest.mark.parametrize("value", [-1, True, 1.0, "8", 10**30])
def test_a_size_that_is_no_number_of_tokens_is_refused(key, value):
    with pytest.raises(LeanKError, match=re.escape(f"`{key}` is ")) as caught:
        Windows(**{key: value})
    assert len(str(caught.value)) < 200


def test_sizes_up_to_any_context_are_taken():
    assert Windows(2**24, 2**24, 2**24).flush_size == 2**24
    with pytest.raises(LeanKError, match="`flush_size` is 0"):
        Windows(flush_size=0)
    with pytest.raises(LeanKError, match=r"`prune` is \[\], not one of `eager`"):
        Windows(prune=[])
