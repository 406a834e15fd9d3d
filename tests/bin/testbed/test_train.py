"""How the shipped model is trained and measured: what batches hold, when they grow, what is right."""

import itertools
import json
import random
from dataclasses import asdict

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bin.testbed import held_out, train
from bin.testbed.held_out import exact_match
from bin.testbed.train import LENGTHS, Curriculum, TrainingPlan, training_sequence
from leank_convert.testbed import MODEL_DIR
from leank_convert.testbed.tasks import ASSISTANT, BEGIN, END, IDS, TASKS, USER, VOCABULARY, build_sample

PLAN = TrainingPlan(steps=1000, tokens_per_step=2048)


def lengths_drawn(curriculum, count):
    return {request.length for request in itertools.islice(curriculum, count)}


def see_losses(curriculum, loss, count):
    for _ in range(count):
        curriculum.observe(LENGTHS[curriculum.stage], loss)


@pytest.mark.parametrize("two_word_names", [False, True], ids=["one_word", "two_words"])
@pytest.mark.parametrize("length", LENGTHS)
def test_answered_positions_are_the_answers(length, two_word_names):
    for seed in range(4):
        ids, answered = training_sequence(random.Random(seed), length, 0.3, two_word_names)
        assert len(ids) == length
        words = [VOCABULARY[i] for i in ids]
        assert words[:2] == [BEGIN, USER]
        expected, inside = [], False
        for position, word in enumerate(words):
            if inside:
                expected.append(position)
            inside = word == ASSISTANT or (inside and word != END)
        assert answered == expected
        assert answered


def test_lengths_grow_after_enough_low_losses_at_the_present_one_and_bring_two_word_names():
    curriculum = Curriculum(PLAN)
    see_losses(curriculum, 0.01, 99)
    assert lengths_drawn(curriculum, 50) == {64}
    see_losses(curriculum, 0.01, 1)
    assert lengths_drawn(curriculum, 200) == {64, 128}
    for _ in range(200):
        curriculum.observe(64, 0.01)  # of batches that were on their way
    assert curriculum.stage == 1
    see_losses(curriculum, 0.5, 100)
    see_losses(curriculum, 0.01, 80)
    assert curriculum.stage == 1
    see_losses(curriculum, 0.01, 20)
    assert LENGTHS[curriculum.stage] == 256
    assert {request.two_word_share for request in itertools.islice(curriculum, 20)} == {0.0}
    see_losses(curriculum, 0.0, 100)
    assert {request.two_word_share for request in itertools.islice(curriculum, 20)} == {0.5}
    see_losses(curriculum, 0.0, 5000)
    assert lengths_drawn(curriculum, 500) == set(LENGTHS)


@pytest.mark.parametrize("layers", ["full", "sliding,full"])
def test_a_short_run_writes_a_model_folder(layers, tmp_path, monkeypatch):
    monkeypatch.setattr(train.os, "cpu_count", lambda: 1)
    monkeypatch.setattr(train, "_HELD_OUT_COUNT", 1)
    monkeypatch.setattr(held_out, "HELD_OUT_LENGTHS", (256,))
    count = len(layers.split(","))
    shape = {"num_hidden_layers": count, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    short = {"steps": 20, "tokens_per_step": 256, "learning_rate": 2e-2, "warmup_steps": 1}
    plan = TrainingPlan(**shape, **short, layers=layers, hidden_size=64)
    train.train_testbed(plan, tmp_path)
    record = json.loads((tmp_path / "training.json").read_text())
    assert record["plan"] == asdict(plan)
    assert [point["step"] for point in record["curve"]] == [20]
    assert record["curve"][0]["loss"] < 6.5, "no better than ln(vocabulary) = 6.7"
    assert len(record["held_out"]) == 6
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.dtype == torch.bfloat16
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.get_vocab() == IDS and tokenizer.eos_token_id == model.config.eos_token_id
    kinds = getattr(model.config, "layer_types", ["full_attention"])
    assert kinds == plan.layer_types


def test_exact_match_is_what_generate_gets_right():
    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():  # spoilt, so that some answers are wrong
        for parameter in model.parameters():
            parameter += 0.48 * parameter.std() * torch.randn(parameter.shape, generator=generator)
    right = dict.fromkeys(TASKS, 0)
    for task in TASKS:
        rng = random.Random(f"held-out/5/{task}/200/True")
        for _ in range(5):
            sample = build_sample(task, rng, 200, two_word_names=True)
            chat = [{"role": "user", "content": sample.prompt}]
            options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
            prompt = tokenizer.apply_chat_template(chat, **options)
            output = model.generate(**prompt, max_new_tokens=24, do_sample=False)
            right[task] += (
                tokenizer.decode(output[0, prompt["input_ids"].shape[1] :]) == f"{sample.answer} <|end|>"
            )
        measured = exact_match(model, task, 200, two_word_names=True, count=5, seed=5)
        assert measured == right[task] / 5
    assert 1 < sum(right.values()) < 14
