"""Requests of a step become rows of columns for the kernels, and prompts; how many tokens are pruned."""

from itertools import accumulate

import pytest
import torch

from leank_convert._runtime.kernel_key_leank import MAX_DRAFT
from leank_convert._runtime.windows_leank import Windows
from leank_convert.vllm.rows import Prompt, cut_requests, place_requests, uniform_rows
from leank_convert.vllm.rule import pruned_tokens, pruned_tokens_of

SIZES = Windows(4, 8, 3)


def cut(starts, lengths, prompts, *, more=0, **options):
    """Cut a step, of which the host may know more tokens than there are."""
    on_device = (torch.tensor(numbers, dtype=torch.int32) for numbers in (lengths, prompts))
    known = [length + more for length in lengths]
    options = {"most_columns": MAX_DRAFT, "num_columns": 1, "most_keys": 1000, **options}
    return place_requests(*cut_requests(starts, known, prompts, **options), *on_device, SIZES)


def columns_of(groups):
    """Token of the input, request, tokens seen and pruned ones, of each real column."""
    columns = []
    for rows in groups:
        requests = rows.requests[:, None].expand_as(rows.tokens)
        parts = (rows.tokens, requests, rows.seen, rows.pruned)
        real = torch.arange(rows.seen.numel()) if rows.real is None else rows.real
        columns += zip(*(part.flatten()[real].tolist() for part in parts), strict=True)
        assert rows.places.tolist() == [column[0] for column in columns[-len(real) :]]
    return sorted(columns)


def parts_of(runs):
    """The prompts of every run, after a look at what says where they are."""
    for run in runs:
        for starts, sizes in (
            (run.starts, [part.stop - part.first for part in run.parts]),
            (run.key_starts, [part.num_tokens for part in run.parts]),
        ):
            assert starts.diff().tolist() == sizes and starts[0] == 0 and starts.dtype == torch.int32
        assert run.requests.tolist() == [part.request for part in run.parts]
    return [list(run.parts) for run in runs]


def test_requests_that_are_alike_are_rows_in_order():
    rows = uniform_rows(torch.tensor([40, 9, 0]), torch.tensor([20, 9, 0]), 3, SIZES)
    assert rows.seen.tolist() == [[38, 39, 40], [7, 8, 9], [0, 0, 0]]
    expected = [[pruned_tokens_of(seen, 20, SIZES) for seen in (38, 39, 40)], [0, 0, 0], [0, 0, 0]]
    assert rows.pruned.tolist() == expected and expected[0][0] > 0


def test_a_long_prompt_attends_densely_and_short_inputs_are_rows():
    # A decoding request with a draft, the second part of a prompt, and a prompt of few tokens.
    groups, runs = cut([0, 2, 102, 105], [60, 150, 3], [50, 170, 3], num_columns=2)
    assert parts_of(runs) == [[Prompt(request=1, first=2, stop=102, num_tokens=150)]]
    pruned = [pruned_tokens_of(seen, 50, SIZES) for seen in (59, 60)]
    decoding = [(0, 0, 59, pruned[0]), (1, 0, 60, pruned[1])]
    assert columns_of(groups) == [*decoding, (102, 2, 1, 0), (103, 2, 2, 0), (104, 2, 3, 0)]


def test_rows_longer_than_a_decode_step_widen_no_others():
    groups, _ = cut([0, 1, 4, 5, 25], [60, 9, 70, 20], [50, 9, 60, 20])
    assert [(rows.is_wide, rows.seen.shape) for rows in groups] == [(False, (2, 1)), (True, (2, 20))]
    assert [rows.requests.tolist() for rows in groups] == [[0, 2], [1, 3]]
    assert [column[:2] for column in columns_of(groups)] == [
        (token, request)
        for request, of in ((0, [0]), (1, [1, 2, 3]), (2, [4]), (3, range(5, 25)))
        for token in of
    ]


def test_of_a_request_that_decodes_the_device_knows_the_length():
    """The host may count drafts that are not accepted yet."""
    starts, lengths, prompts = [0, 3, 6], [60, 45], [50, 40]
    assert columns_of(cut(starts, lengths, prompts, more=2, num_columns=3)[0]) == columns_of(
        cut(starts, lengths, prompts, num_columns=3)[0]
    )


def test_prompts_side_by_side_are_one_run_if_all_of_them_are_fresh_or_none():
    queries = [1, 40, 50, 60, 70, 80, 90, 100]
    lengths = [30, 40, 50, 160, 170, 180, 90, 100]  # three have a hundred earlier tokens
    starts = [0, *accumulate(queries)]

    def requests(runs):
        return [[part.request for part in parts] for parts in parts_of(runs)]

    groups, runs = cut(starts, lengths, [20, *lengths[1:]])
    assert requests(runs) == [[1, 2], [3, 4, 5], [6, 7]] and [len(rows.seen) for rows in groups] == [1]
    first, chunks, last = runs
    assert (first.tokens, first.longest, first.longest_keys, first.num_keys) == (slice(1, 91), 50, 50, 90)
    found = (chunks.tokens, chunks.longest, chunks.longest_keys, chunks.num_keys)
    assert found == (slice(91, 301), 80, 180, 510)
    assert last.tokens == slice(301, 491)
    # No more tokens are put together at once than there is room for, and a prompt alone always fits.
    assert requests(cut(starts, lengths, lengths, most_keys=340)[1]) == [[1, 2], [3, 4], [5], [6, 7]]
    # An answer that is computed again lies between its prompt and the next.
    assert requests(cut([0, 100, 200], [100, 100], [60, 100])[1]) == [[0], [1]]


def test_an_answer_that_is_computed_again_is_cut_from_its_prompt():
    (starts, length, prompt) = [0, 200], 300, 150  # tokens 100 … 299, of which 150 … are the answer's
    groups, runs = cut(starts, [length], [prompt])
    assert parts_of(runs) == [[Prompt(request=0, first=0, stop=50, num_tokens=150)]]
    (rows,) = groups
    assert rows.seen.shape == (-(-150 // MAX_DRAFT), MAX_DRAFT)
    assert columns_of(groups) == [
        (token, 0, 101 + token, pruned_tokens_of(101 + token, prompt, SIZES)) for token in range(50, 200)
    ]
    # What a kernel may do with padding needs columns that never see less than the one before.
    assert (rows.seen.diff() >= 0).all() and (rows.pruned.diff() >= 0).all()
    assert cut([0, 100], [100], [150])[0] == []


def test_where_pages_round_a_short_prompt_attends_to_itself_too():
    # Whole prompts of 3 tokens and of one, and the last 3 tokens of a prompt whose others lie in pages.
    groups, runs = cut([0, 3, 4, 7], [3, 1, 90], [3, 1, 90], most_columns=1)
    assert parts_of(runs) == [[Prompt(request=0, first=0, stop=3, num_tokens=3)]]
    assert columns_of(groups) == [(3, 1, 1, 0), *((4 + place, 2, 88 + place, 0) for place in range(3))]


def by_appending(prompt, seen, sizes):
    sink, recent, flush = sizes.sizes.values()
    held, pruned = min(max(prompt - sink, 0), recent), max(prompt - sink - recent, 0)
    for _ in range(max(prompt, sink), seen):
        if held == recent + flush:
            held, pruned = held - flush, pruned + flush
        held += 1
    return pruned


@pytest.mark.parametrize("sizes", [(0, 0, 1), (4, 8, 1), (4, 8, 3), (16, 64, 16), (5, 0, 7)], ids=str)
@pytest.mark.parametrize("prompt", [1, 3, 12, 13, 40, 100])
def test_queries_behind_the_prompt_see_what_the_runtime_has_pruned(prompt, sizes):
    sizes = Windows(*sizes)
    seen = torch.arange(prompt + 1, prompt + 80, dtype=torch.int32)[None]
    expected = [by_appending(prompt, length, sizes) for length in seen[0].tolist()]
    pruned = pruned_tokens(seen, torch.tensor([prompt], dtype=torch.int32), sizes)
    assert pruned.dtype == torch.int32 and pruned[0].tolist() == expected
    assert [pruned_tokens_of(length, prompt, sizes) for length in seen[0].tolist()] == expected


def test_queries_of_the_prompt_see_every_token_whole():
    seen = torch.arange(0, 101, dtype=torch.int32)[None]
    assert not pruned_tokens(seen, torch.tensor([100], dtype=torch.int32), SIZES).any()
    assert {pruned_tokens_of(length, 100, SIZES) for length in range(101)} == {0}
