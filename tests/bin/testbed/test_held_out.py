"""The measure of the shipped model's figures."""

import random

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bin.testbed.held_out import exact_match
from leank_convert.testbed import MODEL_DIR
from leank_convert.testbed.tasks import TASKS, build_sample


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
