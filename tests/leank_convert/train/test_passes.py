"""The three passes on whole models against one pass over whole sequences."""

import pytest
import torch
from transformers import AttentionInterface

from leank_convert.architectures import read_model_facts
from leank_convert.families import ARCHITECTURES
from leank_convert.train import passes
from leank_convert.train.attention import ATTENTION_NAME
from leank_convert.train.graphs import Gradients
from leank_convert.train.packing import pack_sample, padded_sizes
from leank_convert.train.passes import distil, follow_context, run_context_pass
from leank_convert.train.split_attention import StoredContext, Student
from leank_convert.windows import Windows
from tests.leank_convert.train.conftest import draw_sample
from tests.tiny_families import TRAINS_LINEAR, three_layers, tiny_model

FAMILIES = ["llama", "qwen3", "gpt_oss", "gemma3_text", "qwen3_next"]
LAYERS, KV_HEADS, HEAD_DIM = 3, 2, 16
EVERY_HEAD = torch.ones(LAYERS, KV_HEADS, dtype=torch.bool)
# Question and answer tokens.
ONE, SEVERAL = [(0, 12)], [(5, 4), (0, 7), (9, 1)]


def is_linear(family):
    return "linear_attention" in ARCHITECTURES[family].other_layers


def close(family, rtol=1e-9, atol=1e-9, coarse=1e-4):
    """Tolerances in float64, and where layers are linear: these compute in float32 whatever the dtype."""
    return {"rtol": 1e-3, "atol": coarse} if is_linear(family) else {"rtol": rtol, "atol": atol}


def build(family, dtype=torch.float32, **changes):
    """A random model with `head_dim` unlike hidden_size / heads, and attention that is far from uniform."""
    if is_linear(family) and not TRAINS_LINEAR:
        pytest.skip("this release of transformers is too old to train on linear attention")
    heads = {"num_attention_heads": 6, "attn_implementation": ATTENTION_NAME, "dtype": dtype}
    sizes = {"hidden_size": 48, "vocab_size": 90, **heads, **three_layers(family)}
    if "layer_types" in sizes:
        sizes["layer_types"] = sizes["layer_types"][:-1]  # the last one has full attention
    model = tiny_model(family, **{**sizes, **changes})
    if ARCHITECTURES[family].experts:  # torch has no fused product of experts in float64
        model.set_experts_implementation("eager")
    return model


def run_passes(model, sample, windows, factors, sees=EVERY_HEAD, gates=None, *, key_mean=None, offload=False):
    packed = pack_sample(sample)
    room = StoredContext(len(sample.prefix_ids), offload, key_mean=key_mean)
    context = run_context_pass(model, sample.prefix_ids, room)
    teacher = follow_context(model, context, packed)[packed.sizes.questions :]
    return teacher, follow_context(model, context, packed, Student(windows, factors, sees, gates))


def whole_sequence_attention(module, query, key, value, attention_mask, scaling=None, plan=None, **kwargs):
    """Dense rows for the prompt, pruned rows for the answer, in one pass over one question's sequence."""
    factors, sees_middle, split, windows, gates, key_mean = plan
    groups, length, window = query.shape[1] // key.shape[1], query.shape[2], kwargs.get("sliding_window")
    kinds = getattr(module.config, "layer_types", ["full_attention"] * LAYERS)
    layer = kinds[: module.layer_idx].count("full_attention")
    if window is not None:
        factors, sees_middle, gates, layer = torch.ones_like(factors[:1]), EVERY_HEAD, None, 0
    keys, values = (t.repeat_interleave(groups, dim=1) for t in (key, value))
    # Nothing is centred here: what a factor takes of a channel, its mean fills up.
    shares = factors[layer][:, None].to(key.dtype)
    scaled = key * shares
    if key_mean is not None:
        scaled = scaled + (1 - shares) * key_mean[layer][:, None].to(key.dtype)
    dense = scaling * query @ keys.mT
    pruned = scaling * query @ scaled.repeat_interleave(groups, dim=1).mT
    hidden = ~sees_middle[layer].repeat_interleave(groups)
    pruned = pruned.masked_fill(hidden[:, None, None], float("-inf"))
    p, j = torch.arange(length)[:, None], torch.arange(length)[None]
    full = (p < split) | (j < windows.sink_size) | (j >= p - windows.recent_size)
    hidden = (j > p) | (j <= p - (window or length))
    logits = torch.where(full, dense, pruned).masked_fill(hidden, float("-inf"))
    if kwargs.get("s_aux") is not None:  # takes its share, and adds nothing
        sinks = kwargs["s_aux"].view(1, -1, 1, 1).expand(-1, -1, length, -1)
        logits, values = torch.cat([logits, sinks], -1), torch.nn.functional.pad(values, (0, 0, 0, 1))
        full = torch.nn.functional.pad(full, (0, 1), value=True)
    output = logits.softmax(-1) @ values
    if gates is not None:
        gate = gates[layer].repeat_interleave(groups)[:, None, None]
        output = gate * output + (1 - gate) * (logits.masked_fill(~full, float("-inf")).softmax(-1) @ values)
    return output.transpose(1, 2), None


AttentionInterface.register("whole_sequence", whole_sequence_attention)


def run_whole(model, sample, windows, factors, sees=EVERY_HEAD, gates=None, key_mean=None):
    """Every question as a sequence of its own: hidden states of the answers, as the passes pack them."""
    model.config._attn_implementation = "whole_sequence"
    found = []
    for question in sample.questions:
        ids = torch.cat([sample.prefix_ids, question.input_ids])[None]
        split = len(sample.prefix_ids) + question.answer_start
        output = model.base_model(ids, use_cache=False, plan=(factors, sees, split, windows, gates, key_mean))
        found.append(output.last_hidden_state[0, split:])
    model.config._attn_implementation = ATTENTION_NAME
    return torch.cat(found)


def draw_key_mean(is_centred=True):
    """A mean as large as keys are; it need not be theirs."""
    shape, generator = (LAYERS, KV_HEADS, HEAD_DIM), torch.Generator().manual_seed(7)
    return 3 * torch.randn(shape, generator=generator) if is_centred else None


@pytest.mark.parametrize(("questions", "is_centred"), [(ONE, True), (SEVERAL, True), ([(0, 1)], False)])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_passes_equal_one_pass_over_each_whole_sequence(family, questions, is_centred):
    model = build(family, torch.float64)
    sample, windows = draw_sample(48, questions), Windows(5, 8)
    factors = torch.rand(LAYERS, KV_HEADS, HEAD_DIM, dtype=torch.float64)
    kept = (factors > 0.6).double()
    kept[1, 0] = 0
    mean = draw_key_mean(is_centred)
    for values, sees in ((factors, EVERY_HEAD), (kept, kept.bool().any(-1))):
        teacher, student = run_passes(model, sample, windows, values, sees, key_mean=mean)
        expected = run_whole(model, sample, windows, values, sees, key_mean=mean)
        torch.testing.assert_close(student, expected, **close(family))
        dense = run_whole(model, sample, Windows(0, 1000), values)
        torch.testing.assert_close(teacher, dense, **close(family))
        assert (student - teacher).abs().max() > 1e-3


@pytest.mark.parametrize("is_centred", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_equals_that_of_the_whole_sequences(family, is_centred):
    model = build(family, torch.float64)
    sample, windows = draw_sample(40, SEVERAL), Windows(4, 6)
    factors = torch.rand(LAYERS, KV_HEADS, HEAD_DIM, dtype=torch.float64).requires_grad_()
    mean = draw_key_mean(is_centred)
    distil(model, pack_sample(sample), Student(windows, factors, EVERY_HEAD), key_mean=mean).backward()
    found, factors.grad = factors.grad, None
    # Each question weighs the same, however long its answer.
    whole = run_whole(model, sample, windows, factors, key_mean=mean)
    dense = run_whole(model, sample, Windows(0, 1000), factors.detach())
    lengths = [after for _, after in SEVERAL]
    parts = (whole - dense).float().square().mean(-1).split(lengths)
    (sum(part.mean() for part in parts) / len(parts)).backward()
    torch.testing.assert_close(found, factors.grad, **close(family, rtol=1e-5, coarse=1e-6))
    assert (found != 0).all()
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_gate_mixes_a_head_that_sees_everything_with_one_that_sees_no_middle(family):
    model = build(family, torch.float64)
    sample, windows = draw_sample(40, SEVERAL), Windows(4, 6)
    ones = torch.ones(LAYERS, KV_HEADS, HEAD_DIM, dtype=torch.float64)
    gates = torch.rand(LAYERS, KV_HEADS, dtype=torch.float64).requires_grad_()
    teacher, student = run_passes(model, sample, windows, ones, gates=gates)
    whole = run_whole(model, sample, windows, ones, gates=gates)
    torch.testing.assert_close(student, whole, **close(family))
    (student - teacher).square().mean().backward()
    found, gates.grad = gates.grad, None
    (whole - teacher).square().mean().backward()
    torch.testing.assert_close(found, gates.grad, **close(family, rtol=1e-5, atol=1e-12, coarse=1e-6))
    assert (found != 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gates_of_zero_and_one_are_heads_without_and_with_all_channels(dtype):
    model, sample, windows = build("llama", dtype), draw_sample(40, SEVERAL), Windows(4, 6)
    ones = torch.ones(LAYERS, KV_HEADS, HEAD_DIM)
    sees = torch.tensor([[True, False], [False, True], [True, True]])
    _, gated = run_passes(model, sample, windows, ones, gates=sees.float())
    _, deployed = run_passes(model, sample, windows, sees[..., None] * ones, sees)
    assert torch.equal(gated, deployed)


@pytest.mark.parametrize("family", FAMILIES)
def test_with_factors_of_one_the_student_is_the_teacher_and_the_teacher_the_stock_model(family):
    model = build(family)
    sample = draw_sample(60, ONE)
    ones = torch.ones(LAYERS, KV_HEADS, HEAD_DIM)
    assert distil(model, pack_sample(sample), Student(Windows(4, 6), ones, EVERY_HEAD)) < 1e-10
    teacher, _ = run_passes(model, sample, Windows(4, 6), ones)
    model.config._attn_implementation = "eager"
    ids = torch.cat([sample.prefix_ids, sample.questions[0].input_ids])[None]
    stock = model.base_model(ids, use_cache=False).last_hidden_state[0, 60:]
    torch.testing.assert_close(teacher, stock, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("num_context", "offload"), [(41, False), (49, True)])
def test_a_context_in_blocks_gives_what_it_gives_at_once(family, num_context, offload, monkeypatch):
    model, mean = build(family, torch.float64), draw_key_mean()
    sample, windows = draw_sample(num_context, SEVERAL), Windows(5, 8)
    factors = torch.rand(LAYERS, KV_HEADS, HEAD_DIM, dtype=torch.float64)
    whole = run_passes(model, sample, windows, factors, key_mean=mean)
    monkeypatch.setattr(passes, "BLOCK_SIZE", 8)
    blocks = run_passes(model, sample, windows, factors, key_mean=mean, offload=offload)
    torch.testing.assert_close(blocks, whole, **close(family))


GROWING = {
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0] * 8,
        "long_factor": [3.0] * 8,
        "original_max_position_embeddings": 24,
        "factor": 4.0,
    },
}


@pytest.mark.parametrize("rope", GROWING)
def test_a_rotary_embedding_that_grows_with_the_length_is_that_of_the_whole_context(rope, monkeypatch):
    def store():
        model = build("llama", rope_parameters={"rope_theta": 1e4, **GROWING[rope]}, **limits)
        return run_context_pass(model, draw_sample(48, ONE).prefix_ids).load(0)

    limits = {"max_position_embeddings": 24 if rope == "dynamic" else 96}
    whole = store()
    monkeypatch.setattr(passes, "BLOCK_SIZE", 16)
    torch.testing.assert_close(store(), whole)


@pytest.mark.parametrize("windows", [Windows(5, 8), Windows(70, 20), Windows(4, 300)])
@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_padding_changes_neither_loss_nor_gradient(family, windows):
    model = build(family, torch.float64)
    sample = draw_sample(65, SEVERAL)
    factors = torch.rand(LAYERS, KV_HEADS, HEAD_DIM, dtype=torch.float64).requires_grad_()
    sees = torch.tensor([[True, True], [False, True], [False, False]])
    sizes = padded_sizes(sample, 1000)
    assert (sizes.context, sizes.questions, sizes.answers, sizes.least_context) == (128, 64, 64, 1)
    for seeing in (EVERY_HEAD, sees):
        padded, whole = (
            (loss, *torch.autograd.grad(loss, factors))
            for loss in (
                distil(model, pack_sample(sample, given), Student(windows, factors, seeing))
                for given in (sizes, None)
            )
        )
        # The loss is a sum in float32, which padding orders otherwise.
        torch.testing.assert_close(padded, whole, rtol=1e-5, atol=1e-9)


def test_samples_of_any_length_take_few_sizes_and_little_padding():
    sizes = {length: padded_sizes(draw_sample(length, SEVERAL), 8999) for length in range(1000, 9000, 7)}
    assert len(set(sizes.values())) <= 16
    for length, size in sizes.items():
        assert size.least_context <= length <= size.context <= 1.25 * length + 128


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "gpt_oss", "gemma3_text"])
@pytest.mark.parametrize("offload", [False, True])
def test_blocks_on_a_device_are_as_exact_as_one_piece(family, offload):
    one = {"num_local_experts": 1, "num_experts_per_tok": 1}  # rounding may choose others
    model = build(family, **(one if family == "gpt_oss" else {}))
    sample, windows = draw_sample(280, SEVERAL), Windows(5, 40)
    factors = torch.rand(LAYERS, KV_HEADS, HEAD_DIM)
    exact = run_passes(model, sample, windows, factors)
    model.cuda().bfloat16()
    whole = run_passes(model, sample, windows, factors.cuda())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passes, "BLOCK_SIZE", 64)
        blocks = run_passes(model, sample, windows, factors.cuda(), offload=offload)
    for ours, own, right in zip(blocks, whole, exact, strict=True):
        error, own_error = ((hidden.cpu().float() - right).abs().max() for hidden in (ours, own))
        assert error <= 2 * own_error


def test_a_gradient_of_weights_in_float16_is_that_of_float32():
    sample, found = draw_sample(40, SEVERAL), []
    for dtype in (torch.float32, torch.float16):
        model = build("llama", dtype)
        facts = read_model_facts(model.config.to_dict(), origin="model")
        factors = torch.linspace(0.97, 1, LAYERS * KV_HEADS * HEAD_DIM).view(LAYERS, KV_HEADS, HEAD_DIM)
        student = Student(Windows(2, 5, 3), factors.requires_grad_(), EVERY_HEAD)
        Gradients(model, facts, 64).add(sample, student, 1e-4)
        found.append(factors.grad)
    exact, ours = (gradient.flatten() for gradient in found)
    assert torch.cosine_similarity(ours, exact, dim=0) > 0.999
    assert float(ours.norm()) == pytest.approx(float(exact.norm()), rel=0.01)
