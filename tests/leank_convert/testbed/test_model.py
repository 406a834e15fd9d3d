"""The model that ships: its files, its tokenizer, and that it answers from the middle of its context."""

import itertools
import json
import random

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from leank_convert.testbed import MODEL_DIR
from leank_convert.testbed.tasks import ASSISTANT, BEGIN, END, TASKS, USER, build_sample

HELD_OUT_LENGTHS = (256, 512, 1024, 2048)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32).eval()


def test_weights_are_small_and_bfloat16():
    path = MODEL_DIR / "model.safetensors"
    assert path.stat().st_size <= 8 * 1024 * 1024
    with safe_open(path, framework="pt") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}  # noqa: SIM118


def test_written_figures_are_complete_and_as_claimed():
    record = json.loads((MODEL_DIR / "training.json").read_text())
    cells = {(cell["task"], cell["tokens"], cell["two_word_names"]) for cell in record["held_out"]}
    assert cells == set(itertools.product(TASKS, HELD_OUT_LENGTHS, (False, True)))
    assert min(cell["exact_match"] for cell in record["held_out"]) >= 0.98
    assert record["curve"][-1]["step"] == record["plan"]["steps"]


@pytest.mark.parametrize("task", TASKS)
def test_generate_answers_held_out_prompts(model, testbed_tokenizer, task):
    right, options = 0, {"return_tensors": "pt", "return_dict": False}
    rng = random.Random(f"test/{task}")
    for sample in (build_sample(task, rng, tokens) for tokens in HELD_OUT_LENGTHS):
        chat = [{"role": "user", "content": sample.prompt}]
        ids = testbed_tokenizer.apply_chat_template(chat, add_generation_prompt=True, **options)
        output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=32, do_sample=False)
        answer = testbed_tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
        right += answer == sample.answer
    assert right == 4


@pytest.mark.parametrize("task", TASKS)
def test_text_survives_the_round_trip(testbed_tokenizer, task):
    sample = build_sample(task, random.Random(0), 512)
    for text in (sample.prompt, sample.answer):
        ids = testbed_tokenizer(text, add_special_tokens=False).input_ids
        assert len(ids) == len(text.split())
        assert testbed_tokenizer.decode(ids) == text


def test_template_writes_a_question_and_its_answer(testbed_tokenizer):
    question = {"role": "user", "content": "goze 17 42 ; find goze"}
    answer = {"role": "assistant", "content": "goze 17 42"}
    asked = testbed_tokenizer.apply_chat_template([question], tokenize=False, add_generation_prompt=True)
    told = testbed_tokenizer.apply_chat_template([question, answer], tokenize=False)
    assert asked == "<|begin|><|user|> goze 17 42 ; find goze <|end|><|assistant|>"
    assert told == f"{asked} goze 17 42 <|end|>"
    ids = testbed_tokenizer.apply_chat_template([question], add_generation_prompt=True, return_dict=False)
    words = [BEGIN, USER, "goze", "17", "42", ";", "find", "goze", END, ASSISTANT]
    assert testbed_tokenizer.convert_ids_to_tokens(ids) == words
