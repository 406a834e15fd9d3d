"""A batch's prefill: each row is what it would be alone, whatever the others' lengths."""

from unittest.mock import Mock

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from leank_convert.evaluate.prefill import pad_left, prefill_stock, run_prefill
from tests.leank_convert.evaluate.conftest import feed_steps

CPU = torch.device("cpu")
WINDOW = 8


@pytest.fixture
def model(evaluated):
    return evaluated.model


def prompts(*lengths):
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(5, 300, (length,), generator=generator) for length in lengths]


@pytest.mark.parametrize("lengths", [(30, 30), (30, 17, 1)])
def test_no_mask_of_all_pairs_of_tokens_is_ever_made(model, lengths, monkeypatch):
    attends = []
    for name in (model.config._attn_implementation, "sdpa"):  # this model's, and a stock one's
        attends.append(Mock(wraps=ALL_ATTENTION_FUNCTIONS[name]))
        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, name, attends[-1])
    run_prefill(model, *pad_left(prompts(*lengths), CPU))
    masks = [call.args[4] for attend in attends for call in attend.call_args_list]
    assert masks and all(mask is None for mask in masks)


def test_a_row_is_what_it_is_alone(model):
    rows = prompts(30, 17, 17, 1)
    together = run_prefill(model, *pad_left(rows, CPU), query_window=WINDOW)
    assert together.cache.get_seq_length() == 30
    for index, row in enumerate(rows):
        alone = run_prefill(model, *pad_left([row], CPU), query_window=WINDOW)
        assert together.next_token[index] == alone.next_token[0]
        for layer, other in zip(together.keys_and_values, alone.keys_and_values, strict=True):
            for states, expected in zip(layer, other, strict=True):
                torch.testing.assert_close(states[index, :, 30 - len(row) :], expected[0])
        for states, expected in zip(together.queries, alone.queries, strict=True):
            torch.testing.assert_close(states[index, :, -min(len(row), WINDOW) :], expected[0])


def assert_rows_are_as_alone(decode, rows):
    """Of rows [N], padded or alone, decode the logits of steps [steps, B, vocabulary]."""
    together = decode(*pad_left(rows, CPU))
    for index, row in enumerate(rows):
        alone = decode(*pad_left([row], CPU))
        torch.testing.assert_close(together[:, index], alone[:, 0], rtol=1e-4, atol=1e-4)


def test_a_fork_decodes_every_row_as_it_would_alone(model):
    def decode(input_ids, attention_mask):
        prefill = run_prefill(model, input_ids, attention_mask)
        tokens = (prefill.next_token, prefill.next_token + 1, prefill.next_token)
        return feed_steps(model, prefill.fork(), attention_mask, tokens)

    assert_rows_are_as_alone(decode, prompts(30, 17, 17, 1))


@pytest.mark.parametrize("sliding_window", [None, 12])
def test_a_stock_models_row_is_what_it_is_alone(sliding_window, source_model):
    folder = source_model("mistral", vocab_size=320, sliding_window=sliding_window)
    stock = AutoModelForCausalLM.from_pretrained(folder).eval()

    def decode(input_ids, attention_mask):
        token, cache = prefill_stock(stock, input_ids, attention_mask)
        return feed_steps(stock, cache, attention_mask, [token])

    assert_rows_are_as_alone(decode, prompts(30, 17, 1))
