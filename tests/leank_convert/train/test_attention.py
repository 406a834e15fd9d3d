"""The answer pass against re-statements that use no block, no folding and no stored context."""

import itertools

import pytest
import torch
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from leank_convert.train import passes
from leank_convert.train.attention import ATTENTION_NAME, AnswerPass, StoredContext, Windows, answer_attention
from leank_convert.train.objective import distillation_loss
from leank_convert.train.passes import run_answer_pass, run_dense_pass


def region_masks(num_context, num_tokens, windows):
    """[A, S] of answer queries and all keys: which keys are seen, and which of them keep every channel."""
    p = torch.arange(num_context, num_tokens)[:, None]
    j = torch.arange(num_tokens)[None]
    return j <= p, (j < windows.sink_size) | (j >= p - windows.recent_size)


def naive_attention(query, key, value, scaling_factors, sees_middle, windows, scaling):
    """Keys are scaled, not queries, and repeated to all heads; every tensor is [.., A, S] whole."""
    groups = query.shape[1] // key.shape[1]
    num_answer, num_tokens = query.shape[2], key.shape[2]
    seen, full = region_masks(num_tokens - num_answer, num_tokens, windows)
    key, value, factors = (
        t.repeat_interleave(groups, dim=-3) for t in (key, value, scaling_factors[:, None])
    )
    full_logits = scaling * query @ key.mT
    middle_logits = scaling * query @ (key * factors).mT
    if sees_middle is not None:
        hidden = ~sees_middle.repeat_interleave(groups)
        middle_logits = middle_logits.masked_fill(hidden[:, None, None], float("-inf"))
    logits = torch.where(full, full_logits, middle_logits).masked_fill(~seen, float("-inf"))
    return (logits.softmax(-1) @ value).transpose(1, 2)


def draw(num_context, num_answer, *, batch=1, kv_heads=2, groups=3, head_dim=8, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(heads, length):
        return torch.randn(batch, heads, length, head_dim, dtype=dtype, generator=generator)

    total = num_context + num_answer
    factors = torch.rand(kv_heads, head_dim, dtype=dtype, generator=generator)
    return normal(kv_heads * groups, num_answer), normal(kv_heads, total), normal(kv_heads, total), factors


def run(query, key, value, factors, sees_middle, windows, scaling=0.3):
    split = key.shape[2] - query.shape[2]
    return answer_attention(
        query,
        key[:, :, split:],
        value[:, :, split:],
        key[:, :, :split],
        value[:, :, :split],
        factors,
        sees_middle,
        windows,
        scaling,
    )


SIZES = list(itertools.product((0, 1, 5, 40), (0, 1, 7, 40)))


@pytest.mark.parametrize(("sink_size", "recent_size"), SIZES)
@pytest.mark.parametrize(("num_context", "num_answer"), [(1, 1), (30, 1), (23, 11), (3, 20), (12, 12)])
def test_equals_naive_attention_whatever_the_regions(num_context, num_answer, sink_size, recent_size):
    windows = Windows(sink_size, recent_size)
    tensors = draw(num_context, num_answer, batch=2)
    sees_middle = torch.tensor([False, True])
    for sees in (None, sees_middle):
        expected = naive_attention(*tensors, sees, windows, 0.3)
        torch.testing.assert_close(run(*tensors, sees, windows), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("kv_heads", [1, 3])
def test_equals_naive_attention_for_any_head_counts(groups, kv_heads):
    tensors = draw(33, 6, groups=groups, kv_heads=kv_heads)
    windows = Windows(4, 9)
    expected = naive_attention(*tensors, None, windows, 0.3)
    torch.testing.assert_close(run(*tensors, None, windows), expected, rtol=1e-12, atol=1e-12)


def test_zero_factors_leave_logits_of_zero_but_a_head_without_channels_sees_no_middle():
    query, key, value, factors = draw(30, 2)
    windows = Windows(2, 3)
    zeros = torch.zeros_like(factors)
    changed = value.clone()
    changed[:, :, 10] += 1  # a token of the middle
    nobody = torch.tensor([False, False])
    assert not torch.equal(
        run(query, key, value, zeros, None, windows), run(query, key, changed, zeros, None, windows)
    )
    blind = run(query, key, value, zeros, nobody, windows)
    assert torch.equal(blind, run(query, key, changed, zeros, nobody, windows))
    assert torch.isfinite(blind).all()


def test_gradients_equal_those_of_naive_attention():
    query, key, value, factors = draw(25, 9)
    windows = Windows(3, 5)
    sees_middle = torch.tensor([True, False])
    for sees in (None, sees_middle):
        gradients = []
        for function in (run, naive_attention):
            leaves = [t.clone().requires_grad_() for t in (query, key, value, factors)]
            function(*leaves, sees, windows, 0.3).square().sum().backward()
            gradients.append([leaf.grad for leaf in leaves])
        torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-10, atol=1e-12)
    # The head that does not see the middle gives its factors no gradient.
    assert torch.equal(gradients[0][3][1], torch.zeros(8, dtype=torch.float64))
    assert (gradients[0][3][0] != 0).all()


def test_gradient_of_the_factors_equals_finite_differences():
    query, key, value, factors = draw(14, 3, head_dim=4)
    factors.requires_grad_()
    assert torch.autograd.gradcheck(lambda a: run(query, key, value, a, None, Windows(2, 4)), (factors,))
    assert torch.autograd.gradcheck(
        lambda a: naive_attention(query, key, value, a, None, Windows(2, 4), 0.3), (factors,)
    )


def test_low_precision_inputs_are_attended_in_float32():
    query, key, value, factors = (t.float() for t in draw(200, 4, head_dim=64))
    low = [t.bfloat16() for t in (query, key, value)]
    windows = Windows(4, 16)
    exact = naive_attention(*(t.float() for t in low), factors, None, windows, 0.125)
    result = run(*low, factors, None, windows, 0.125)
    assert result.dtype == torch.bfloat16
    # Nothing is rounded but the result.
    torch.testing.assert_close(result, exact.bfloat16(), rtol=2**-7, atol=1e-6)


FAMILIES = {
    "llama": (LlamaConfig, {"attention_bias": True}),
    "mistral": (MistralConfig, {"sliding_window": None}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {}),
}


def build(family, dtype=torch.float32):
    """A random model with `head_dim` unlike hidden_size / heads, and attention that is far from uniform."""
    config_class, options = FAMILIES[family]
    config = config_class(
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=90,
        max_position_embeddings=512,
        **options,
    )
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME, dtype=dtype)
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(parameter, std=0.25)
    return model.eval().requires_grad_(False)


def draw_ids(num_tokens, batch=1):
    return torch.randint(0, 90, (batch, num_tokens), generator=torch.Generator().manual_seed(2))


def whole_sequence_attention(module, query, key, value, attention_mask, scaling=None, plan=None, **kwargs):
    """Dense rows for the context, pruned rows for the answer, in one pass over the whole sequence."""
    factors, sees_middle, split, windows = plan
    groups = query.shape[1] // key.shape[1]
    logits = scaling * query @ key.repeat_interleave(groups, dim=1).mT
    length = query.shape[2]
    causal = torch.ones(length, length).tril().bool()
    dense = logits[:, :, :split].masked_fill(~causal[:split], float("-inf")).softmax(-1)
    dense = (dense @ value.repeat_interleave(groups, dim=1)).transpose(1, 2)
    layer = module.layer_idx
    sees = None if sees_middle is None else sees_middle[layer]
    pruned = naive_attention(query[:, :, split:], key, value, factors[layer], sees, windows, scaling)
    return torch.cat([dense, pruned], dim=1), None


AttentionInterface.register("whole_sequence", whole_sequence_attention)


@pytest.mark.parametrize("family", FAMILIES)
def test_two_passes_equal_one_pass_over_the_whole_sequence(family):
    model = build(family, torch.float64)
    input_ids, split, windows = draw_ids(60, batch=2), 48, Windows(5, 8)
    generator = torch.Generator().manual_seed(3)
    factors = torch.rand(3, 2, 16, dtype=torch.float64, generator=generator)
    kept = (factors > 0.6).double()
    kept[1, 0] = 0
    for values, sees in ((factors, None), (kept, kept.bool().any(-1))):
        dense = run_dense_pass(model, input_ids, split)
        student = run_answer_pass(model, input_ids, AnswerPass(dense.context, windows, values, sees))
        model.config._attn_implementation = "whole_sequence"
        whole = model.base_model(input_ids, use_cache=False, plan=(values, sees, split, windows))
        model.config._attn_implementation = ATTENTION_NAME
        torch.testing.assert_close(student, whole.last_hidden_state[:, split:], rtol=1e-9, atol=1e-9)
        assert (student - dense.hidden_states).abs().max() > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_with_factors_of_one_the_student_is_the_teacher_and_the_teacher_the_stock_model(family):
    model = build(family)
    input_ids, split = draw_ids(70), 60
    dense = run_dense_pass(model, input_ids, split)
    ones = torch.ones(3, 2, 16)
    student = run_answer_pass(model, input_ids, AnswerPass(dense.context, Windows(4, 6), ones))
    assert distillation_loss(dense.hidden_states, student) < 1e-10
    model.config._attn_implementation = "sdpa"
    stock = model.base_model(input_ids, use_cache=False).last_hidden_state[:, split:]
    torch.testing.assert_close(dense.hidden_states, stock, rtol=1e-4, atol=1e-4)


def test_dense_pass_stores_the_context_alone_and_leaves_no_graph():
    model = build("llama")
    dense = run_dense_pass(model, draw_ids(30), 24)
    assert dense.hidden_states.shape == (1, 6, 48)
    assert not dense.hidden_states.requires_grad
    assert sorted(dense.context.keys) == [0, 1, 2]
    for stored in (*dense.context.keys.values(), *dense.context.values.values()):
        assert stored.shape == (1, 2, 24, 16)
        assert not stored.requires_grad


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("split", [41, 48, 49, 56])
def test_a_context_in_blocks_gives_what_it_gives_at_once(family, split, monkeypatch):
    model = build(family, torch.float64)
    input_ids = draw_ids(60, batch=2)
    whole = run_dense_pass(model, input_ids, split)
    monkeypatch.setattr(passes, "LONG", 40)
    monkeypatch.setattr(passes, "BLOCK_SIZE", 8)
    blocks = run_dense_pass(model, input_ids, split)
    torch.testing.assert_close(blocks.hidden_states, whole.hidden_states, rtol=1e-9, atol=1e-9)
    for layer in range(3):
        for name in ("keys", "values"):
            stored, expected = getattr(blocks.context, name)[layer], getattr(whole.context, name)[layer]
            torch.testing.assert_close(stored, expected, rtol=1e-9, atol=1e-9)


def test_gradient_reaches_every_layers_factors_and_no_weight():
    model = build("qwen3")
    input_ids = draw_ids(50)
    dense = run_dense_pass(model, input_ids, 40)
    factors = torch.full((3, 2, 16), 0.8, requires_grad=True)
    student = run_answer_pass(model, input_ids, AnswerPass(dense.context, Windows(4, 6), factors))
    distillation_loss(dense.hidden_states, student).backward()
    assert (factors.grad != 0).all()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_key_at_the_recent_windows_edge_keeps_every_channel():
    """p and the `recent_size` tokens before it: the runtime's ring at flush_size 1."""
    query, key, value, _ = draw(20, 1)
    nothing, nobody = torch.zeros(2, 8, dtype=torch.float64), torch.tensor([False, False])
    base = run(query, key, value, nothing, nobody, Windows(2, 5))
    for j in range(21):
        changed = value.clone()
        changed[:, :, j] += 1
        differs = not torch.equal(run(query, key, changed, nothing, nobody, Windows(2, 5)), base)
        assert differs == (j < 2 or j >= 20 - 5), j


def test_attention_without_a_pass_says_what_is_missing():
    model = build("llama")
    with pytest.raises(TypeError, match="needs `leank_pass`"):
        model.base_model(draw_ids(5), use_cache=False)


def test_every_layer_stores_into_the_context_it_was_given():
    model = build("llama")
    first, second = StoredContext(10), StoredContext(12)
    with torch.no_grad():
        model.base_model(draw_ids(20), use_cache=False, leank_pass=first)
        model.base_model(draw_ids(20), use_cache=False, leank_pass=second)
    torch.testing.assert_close(first.keys[2], second.keys[2][:, :, :10], rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
def test_blocks_on_a_device_are_as_exact_as_one_pass():
    model = build("llama").cuda()
    input_ids = draw_ids(300).cuda()
    exact = run_dense_pass(model, input_ids, 280).hidden_states
    model.bfloat16()
    whole = run_dense_pass(model, input_ids, 280).hidden_states
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passes, "LONG", 64)
        patch.setattr(passes, "BLOCK_SIZE", 64)
        blocks = run_dense_pass(model, input_ids, 280).hidden_states
    error, own_error = ((hidden.float() - exact).abs().max() for hidden in (blocks, whole))
    assert error <= 2 * own_error
