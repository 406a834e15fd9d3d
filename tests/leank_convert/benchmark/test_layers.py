"""What decode attention has to read, by hand and as the cache counts it; what its result is held to."""

import pytest
import torch

from leank_convert.benchmark.accuracy import attend_exactly, pruned_length
from leank_convert.benchmark.layers import AttentionBytes, FilledLayer, count_attention_bytes
from leank_convert.benchmark.subject import choose_subject, load_runtime
from leank_convert.windows import Windows

WINDOWS = Windows(sink_size=4, recent_size=16, flush_size=4)


@pytest.fixture
def subject():
    return choose_subject(None, None, "tiny")


@pytest.fixture
def inputs():
    torch.manual_seed(0)
    return torch.randn(3, 8, 1, 64), torch.randn(3, 4, 90, 64), torch.randn(3, 4, 90, 64)


def test_bytes_by_hand():
    # Heads of 0, 32 and 40 of 64 channels in chunks of 32; rows of 10 and 20 tokens, 2 and 8 of them pruned.
    counted = count_attention_bytes((0, 32, 40), 64, 32, [10, 20], [2, 8], element_bytes=2)
    assert counted == AttentionBytes(
        kept_keys=30 * (1 + 2) * 32 * 2,
        kept_values=30 * 2 * 64 * 2,
        window_keys=20 * (2 + 1 + 1) * 32 * 2,
        window_values=20 * 1 * 64 * 2,
    )
    assert counted.total == 30 * 96 * 2 + 30 * 128 * 2 + 20 * 128 * 2 + 20 * 64 * 2


def test_nothing_but_kept_channels_of_pruned_tokens_is_saved():
    whole = count_attention_bytes((0, 32, 64, 64), 64, 32, [50], [0], element_bytes=2)
    assert whole.total == 2 * 50 * 4 * 64 * 2
    pruned = count_attention_bytes((0, 32, 64, 64), 64, 32, [50], [30], element_bytes=2)
    assert whole.total - pruned.total == 30 * (64 + 64 + 32) * 2


def test_bytes_of_a_layer_are_those_that_the_cache_counts_as_used(subject, inputs, tmp_path):
    runtime = load_runtime(subject, tmp_path, torch.float32)
    for layer in range(2):
        filled = FilledLayer(runtime, subject, layer, *inputs)
        memory = filled.memory
        # Widths are whole chunks here, so that no lane is padding.
        assert filled.bytes == AttentionBytes(
            memory.kept_keys.used,
            memory.kept_values.used,
            memory.window_keys.used,
            memory.window_values.used,
        )


def test_attending_again_changes_nothing(subject, inputs, tmp_path):
    filled = FilledLayer(load_runtime(subject, tmp_path, torch.float32), subject, 0, *inputs)
    first = filled.attend()
    assert torch.equal(filled.attend(), first)


@pytest.mark.parametrize("num_tokens", [1, 4, 5, 20, 24, 25, 26, 29, 100])
def test_pruned_length_is_that_of_tokens_moved_one_by_one(num_tokens):
    recent = max(min(num_tokens - 1 - WINDOWS.sink_size, WINDOWS.recent_size), 0)
    pruned = max(num_tokens - 1 - WINDOWS.sink_size - recent, 0)
    if num_tokens > WINDOWS.sink_size and recent == WINDOWS.recent_size + WINDOWS.flush_size:
        pruned += WINDOWS.flush_size
    assert pruned_length(num_tokens, WINDOWS) == pruned


def test_pruned_length_flushes_at_once_where_flush_size_is_all_there_is_beside_the_token():
    assert pruned_length(30, Windows(sink_size=4, recent_size=0, flush_size=1)) == 25


def test_exact_attention_is_that_of_its_definition(inputs):
    query, keys, values = (tensor.double() for tensor in inputs)
    mask = torch.rand(4, 64) < 0.3
    mask[1] = False
    sink, pruned = 4, 60
    truth = attend_exactly(*inputs, mask, sink, pruned)
    assert truth.rows.tolist() == [0, 1, 2]
    for row in range(3):
        for head in range(8):
            kv_head = head // 2
            logits = []
            for token in range(90):
                key = keys[row, kv_head, token]
                if sink <= token < sink + pruned:
                    key = key * mask[kv_head]
                hidden = sink <= token < sink + pruned and not mask[kv_head].any()
                logits.append(float("-inf") if hidden else float(query[row, head, 0] @ key) / 8)
            expected = torch.tensor(logits, dtype=torch.double).softmax(0) @ values[row, kv_head]
            torch.testing.assert_close(truth.output[row, head, 0], expected)
    assert 0 < truth.torch_error < 1e-5
    assert not truth.check(torch.full_like(inputs[0], float("nan"))).ok


def test_the_first_and_last_row_are_among_those_checked():
    torch.manual_seed(0)
    query, keys = torch.randn(40, 2, 1, 8), torch.randn(40, 1, 3, 8)
    rows = attend_exactly(query, keys, keys, torch.ones(1, 8, dtype=torch.bool), 0, 0).rows.tolist()
    assert rows[0] == 0
    assert rows[-1] == 39
    assert len(set(rows)) == 16
