"""The shipped model's tokenizer: one token a word, and the template that the model was trained on."""

from __future__ import annotations

import random

import pytest

from leank_convert.testbed.tasks import ASSISTANT, BEGIN, END, TASKS, USER, VOCABULARY, build_sample


@pytest.fixture
def tokenizer(testbed_tokenizer):
    return testbed_tokenizer


def test_ids_are_places_in_the_vocabulary(tokenizer):
    assert tokenizer.convert_ids_to_tokens(range(len(tokenizer))) == list(VOCABULARY)
    assert [tokenizer(word, add_special_tokens=False).input_ids for word in VOCABULARY] == [
        [index] for index in range(len(VOCABULARY))
    ]


@pytest.mark.parametrize("task", TASKS)
def test_text_survives_the_round_trip(tokenizer, task):
    sample = build_sample(task, random.Random(0), 512)
    for text in (sample.prompt, sample.answer):
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert len(ids) == len(text.split())
        assert tokenizer.decode(ids) == text


def test_unknown_words_are_one_token(tokenizer):
    assert tokenizer("find Paris", add_special_tokens=False).input_ids[1] == tokenizer.unk_token_id


def test_template_writes_a_question_and_its_answer(tokenizer):
    question = {"role": "user", "content": "goze 17 42 ; find goze"}
    answer = {"role": "assistant", "content": "goze 17 42"}
    asked = tokenizer.apply_chat_template([question], tokenize=False, add_generation_prompt=True)
    told = tokenizer.apply_chat_template([question, answer], tokenize=False)
    assert asked == "<|begin|><|user|> goze 17 42 ; find goze <|end|><|assistant|>"
    assert told == f"{asked} goze 17 42 <|end|>"
    ids = tokenizer.apply_chat_template([question], add_generation_prompt=True, return_dict=False)
    words = [BEGIN, USER, "goze", "17", "42", ";", "find", "goze", END, ASSISTANT]
    assert tokenizer.convert_ids_to_tokens(ids) == words


def test_special_tokens_are_left_out_of_answers(tokenizer):
    ids = tokenizer("goze 17 42 <|end|> <|pad|>", add_special_tokens=False).input_ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "goze 17 42"


def test_batches_are_padded_on_the_left(tokenizer):
    batch = tokenizer(["goze", "goze 17 42"], padding=True, add_special_tokens=False)
    assert batch.attention_mask == [[0, 0, 1], [1, 1, 1]]
    assert batch.input_ids[0][:2] == [tokenizer.pad_token_id] * 2
