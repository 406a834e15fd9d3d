"""The pruned length as a function of position is what the runtime gets by appending token after token."""

import pytest
import torch

from leank_convert._runtime.windows_leank import Windows
from leank_convert.vllm.rule import pruned_tokens, pruned_tokens_of

SIZES = [(0, 0, 1), (4, 8, 1), (4, 8, 3), (16, 64, 16), (5, 0, 7)]


def by_appending(prompt, seen, sizes):
    sink, recent, flush = sizes.sizes.values()
    held, pruned = min(max(prompt - sink, 0), recent), max(prompt - sink - recent, 0)
    for _ in range(max(prompt, sink), seen):
        if held == recent + flush:
            held, pruned = held - flush, pruned + flush
        held += 1
    return pruned


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("prompt", [1, 3, 12, 13, 40, 100])
def test_queries_behind_the_prompt_see_what_the_runtime_has_pruned(prompt, sizes):
    sizes = Windows(*sizes)
    seen = torch.arange(prompt + 1, prompt + 80, dtype=torch.int32)[None]
    expected = [by_appending(prompt, length, sizes) for length in seen[0].tolist()]
    pruned = pruned_tokens(seen, torch.tensor([prompt], dtype=torch.int32), sizes)
    assert pruned.dtype == torch.int32 and pruned[0].tolist() == expected
    assert [pruned_tokens_of(length, prompt, sizes) for length in seen[0].tolist()] == expected


def test_queries_of_the_prompt_see_every_token_whole():
    sizes = Windows(4, 8, 3)
    seen = torch.arange(0, 101, dtype=torch.int32)[None]
    assert not pruned_tokens(seen, torch.tensor([100], dtype=torch.int32), sizes).any()
    assert {pruned_tokens_of(length, 100, sizes) for length in range(101)} == {0}
