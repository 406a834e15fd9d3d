"""A step's requests become rows of columns for the kernels, and prompts."""

import torch

from leank_convert._runtime.kernel_key_leank import MAX_DRAFT
from leank_convert._runtime.windows_leank import Windows
from leank_convert.vllm.rows import Prompt, cut_rows, uniform_rows
from leank_convert.vllm.rule import pruned_tokens_of

SIZES = Windows(4, 8, 3)
CPU = torch.device("cpu")


def columns_of(rows):
    """Token of the input, request, tokens seen and pruned ones, of each real column."""
    real = rows.valid
    requests = rows.requests[:, None].expand_as(real)
    return sorted(
        zip(*(part[real].tolist() for part in (rows.tokens, requests, rows.seen, rows.pruned)), strict=True)
    )


def test_requests_that_are_alike_are_rows_in_order():
    rows = uniform_rows(torch.tensor([40, 9, 0]), torch.tensor([20, 9, 0]), 3, SIZES)
    assert rows.seen.tolist() == [[38, 39, 40], [7, 8, 9], [0, 0, 0]]
    expected = [[pruned_tokens_of(seen, 20, SIZES) for seen in (38, 39, 40)], [0, 0, 0], [0, 0, 0]]
    assert rows.pruned.tolist() == expected and expected[0][0] > 0


def test_a_long_prompt_attends_densely_and_short_inputs_are_rows():
    # A decoding request with a draft, the second part of a prompt, and a prompt of few tokens.
    starts, lengths, prompts = [0, 2, 102, 105], [60, 150, 3], [50, 170, 3]
    rows, parts = cut_rows(starts, lengths, prompts, SIZES, MAX_DRAFT, CPU)
    assert parts == [Prompt(request=1, first=2, stop=102, num_tokens=150)]
    pruned = [pruned_tokens_of(seen, 50, SIZES) for seen in (59, 60)]
    decoding = [(0, 0, 59, pruned[0]), (1, 0, 60, pruned[1])]
    assert columns_of(rows) == [*decoding, (102, 2, 1, 0), (103, 2, 2, 0), (104, 2, 3, 0)]


def test_an_answer_that_is_computed_again_is_cut_from_its_prompt():
    (starts, length, prompt) = [0, 200], 300, 150  # tokens 100 … 299, of which 150 … are the answer's
    rows, parts = cut_rows(starts, [length], [prompt], SIZES, MAX_DRAFT, CPU)
    assert parts == [Prompt(request=0, first=0, stop=50, num_tokens=150)]
    assert rows.seen.shape == (-(-150 // MAX_DRAFT), MAX_DRAFT)
    assert columns_of(rows) == [
        (token, 0, 101 + token, pruned_tokens_of(101 + token, prompt, SIZES)) for token in range(50, 200)
    ]
    # What a kernel may do with padding needs columns that never see less than the one before.
    assert (rows.seen.diff() >= 0).all() and (rows.pruned.diff() >= 0).all()
    assert cut_rows([0, 100], [100], [150], SIZES, MAX_DRAFT, CPU)[0] is None


def test_where_pages_round_a_short_prompt_attends_to_itself_too():
    # Whole prompts of 3 tokens and of one, and the last 3 tokens of a prompt whose others lie in pages.
    starts, lengths, prompts = [0, 3, 4, 7], [3, 1, 90], [3, 1, 90]
    rows, parts = cut_rows(starts, lengths, prompts, SIZES, 1, CPU)
    assert parts == [Prompt(request=0, first=0, stop=3, num_tokens=3)]
    assert columns_of(rows) == [(3, 1, 1, 0), *((4 + place, 2, 88 + place, 0) for place in range(3))]
