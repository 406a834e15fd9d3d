"""A batch's prefill: each row is what it would be alone, whatever the others' lengths."""

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from leank_convert.evaluate.prefill import decode_token, pad_left, prefill_stock, run_prefill

CPU = torch.device("cpu")
WINDOW = 8


@pytest.fixture
def model(evaluated):
    return evaluated.model


def prompts(*lengths):
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(5, 300, (length,), generator=generator) for length in lengths]


@pytest.fixture
def masks(model, monkeypatch):
    """What attention is given as its mask, in this model and in a stock one."""
    seen = []

    def recording(attend):
        def record(module, query, key, value, attention_mask, **kwargs):
            seen.append(attention_mask)
            return attend(module, query, key, value, attention_mask, **kwargs)

        return record

    for name in (model.config._attn_implementation, "sdpa"):
        attend = ALL_ATTENTION_FUNCTIONS[name]
        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, name, recording(attend))
    return seen


@pytest.mark.parametrize("lengths", [(30, 30), (30, 17, 1)])
def test_no_mask_of_all_pairs_of_tokens_is_ever_made(model, masks, lengths):
    run_prefill(model, *pad_left(prompts(*lengths), CPU))
    assert masks and all(mask is None for mask in masks)


def test_a_row_is_what_it_is_alone_and_a_fork_decodes_it_so(model):
    rows = prompts(30, 17, 17, 1)
    together = run_prefill(model, *pad_left(rows, CPU), query_window=WINDOW)
    assert together.cache.get_seq_length() == 30
    logits = decode(model, together)
    for index, row in enumerate(rows):
        alone = run_prefill(model, *pad_left([row], CPU), query_window=WINDOW)
        assert together.next_token[index] == alone.next_token[0]
        for layer, other in zip(together.keys_and_values, alone.keys_and_values, strict=True):
            for states, expected in zip(layer, other, strict=True):
                torch.testing.assert_close(states[index, :, 30 - len(row) :], expected[0])
        for states, expected in zip(together.queries, alone.queries, strict=True):
            torch.testing.assert_close(states[index, :, -min(len(row), WINDOW) :], expected[0])
        torch.testing.assert_close(logits[index], decode(model, alone)[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sliding_window", [None, 12])
def test_a_stock_models_row_is_what_it_is_alone(sliding_window, source_model):
    folder, rows = source_model("mistral", vocab_size=320, sliding_window=sliding_window), prompts(30, 17, 1)
    stock = AutoModelForCausalLM.from_pretrained(folder).eval()
    together = stock_logits(stock, *pad_left(rows, CPU))
    for index, row in enumerate(rows):
        alone = stock_logits(stock, *pad_left([row], CPU))
        torch.testing.assert_close(together[index], alone[0], rtol=1e-4, atol=1e-4)


def stock_logits(model, input_ids, attention_mask):
    """The logits of the step after the prompts [B, vocabulary], the greedy tokens among them."""
    token, cache = prefill_stock(model, input_ids, attention_mask)
    return decode_token(model, cache, token, attention_mask)[0]


def decode(model, prefill):
    """The logits of three steps on a fork [B, 3, vocabulary]."""
    cache, attention_mask, steps = prefill.fork(), prefill.attention_mask, []
    for token in (prefill.next_token, prefill.next_token + 1, prefill.next_token):
        logits, attention_mask = decode_token(model, cache, token, attention_mask)
        steps.append(logits)
    return torch.stack(steps, dim=1)
