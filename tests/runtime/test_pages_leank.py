"""How many pages rows get, and what moves with them: growth, other rows, rows of several caches."""

import pytest
import torch

from leank_convert._runtime.configuration_leank import CACHE
from runtime.pages_leank import PageTables, spread_pages
from tests.runtime.tiny_inputs import WIDTHS, row


@pytest.mark.parametrize("sizes", [(128, 1088), (0, 33), (3, 2**24)], ids=str)
@pytest.mark.parametrize(
    "lengths",
    [[1], [64], [32768], [4096, *[100] * 15], [0, 1, 63, 64, 65, 5000], [*range(1, 2000, 7)]],
    ids=lambda lengths: f"{len(lengths)} to {max(lengths)}",
)
def test_pages_hold_an_eighth_more_at_most_and_one_a_row(lengths, sizes):
    runs = spread_pages(lengths, *sizes)
    tables = PageTables(runs, *sizes)
    assert tables.fits(lengths)
    assert sum(runs) * 64 <= 9 / 8 * sum(lengths) + 64 * len(lengths)
    # All go on equally long: none is full while another has a page to spare.
    spare = [run * 64 - length for run, length in zip(runs, lengths, strict=True)]
    assert max(spare) - min(spare) < 64 or min(lengths) == 0


def test_growth_takes_few_steps():
    run, growths = 0, 0
    for length in range(1, 100_000):
        if length > run * 64:
            (run,), growths = spread_pages([length], 128, 1088), growths + 1
    assert growths < 100


def test_beams_of_equal_rows_are_reordered_where_they_are(model_pair):
    pair = model_pair(WIDTHS)
    with torch.no_grad():
        cache = pair.leank(torch.stack([row(70, 0), row(70, 1), row(70, 2)]))[CACHE]
    pools = [layer.store.kept_keys for layer in cache.layers]
    expected = [pool.view(3, -1, *pool.shape[1:])[[2, 0, 0]] for pool in pools]
    addresses = cache.addresses()
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    assert cache.addresses() == addresses
    for pool, content in zip(pools, expected, strict=True):
        assert torch.equal(pool.view_as(content), content)
