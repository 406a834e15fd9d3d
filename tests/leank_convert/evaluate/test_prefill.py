"""A batch's prefill: each row is what it would be alone, whatever the others' lengths."""

import pytest
import torch
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from leank_convert.evaluate.prefill import fork, pad_left, positions_of, run_prefill
from leank_convert.export import export_checkpoint
from leank_convert.mask import ChannelMask

CPU = torch.device("cpu")
WINDOW = 8


@pytest.fixture(scope="module")
def model(retriever_folder, tmp_path_factory):
    torch.manual_seed(3)
    out = tmp_path_factory.mktemp("prefill") / "out"
    mask = ChannelMask(torch.rand(2, 2, 16) < 0.5)
    export_checkpoint(retriever_folder, mask, out, sink_size=2, recent_size=6, flush_size=2)
    return AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True).eval()


def prompts(*lengths):
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(5, 300, (length,), generator=generator) for length in lengths]


@pytest.fixture
def masks(model):
    """What SDPA is given as its mask."""
    seen, name = [], model.config._attn_implementation
    attend = ALL_ATTENTION_FUNCTIONS[name]

    def record(module, query, key, value, attention_mask, **kwargs):
        seen.append(attention_mask)
        return attend(module, query, key, value, attention_mask, **kwargs)

    AttentionInterface.register(name, record)
    yield seen
    AttentionInterface.register(name, attend)


@pytest.mark.parametrize("lengths", [(30, 30), (30,), (30, 17, 1)])
def test_no_mask_of_all_pairs_of_tokens_is_ever_made(model, masks, lengths):
    run_prefill(model, *pad_left(prompts(*lengths), CPU))
    assert masks
    assert all(mask is None for mask in masks)


def test_a_row_is_what_it_is_alone(model):
    rows = prompts(30, 17, 1)
    together = run_prefill(model, *pad_left(rows, CPU), query_window=WINDOW)
    assert together.cache.get_seq_length() == 30
    for index, row in enumerate(rows):
        alone = run_prefill(model, *pad_left([row], CPU), query_window=WINDOW)
        assert together.next_token[index] == alone.next_token[0]
        for layer, other in zip(together.cache.layers, alone.cache.layers, strict=True):
            for states, expected in zip(layer.pending, other.pending, strict=True):
                torch.testing.assert_close(states[index, :, 30 - len(row) :], expected[0])
        for states, expected in zip(together.queries, alone.queries, strict=True):
            torch.testing.assert_close(states[index, :, -min(len(row), WINDOW) :], expected[0])


def test_a_fork_decodes_every_row_as_it_would_alone(model):
    rows = prompts(30, 17, 1)
    logits = decode(model, run_prefill(model, *pad_left(rows, CPU)))
    for index, row in enumerate(rows):
        alone = decode(model, run_prefill(model, *pad_left([row], CPU)))
        torch.testing.assert_close(logits[index], alone[0], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def decode(model, prefill):
    """The logits of three steps on a fork [B, 3, vocabulary]."""
    cache, attention_mask, steps = fork(prefill.cache), prefill.attention_mask, []
    for token in (prefill.next_token, prefill.next_token + 1, prefill.next_token):
        attention_mask = torch.cat([attention_mask, torch.ones_like(token)], dim=1)
        output = model(
            input_ids=token,
            attention_mask=attention_mask,
            position_ids=positions_of(attention_mask)[:, -1:],
            past_key_values=cache,
        )
        steps.append(output.logits[:, -1])
    return torch.stack(steps, dim=1)
