"""The shipped model's tokenizer: one token a word, and the template that the model was trained on."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from leank_convert.testbed import MODEL_DIR
from leank_convert.testbed.tasks import ASSISTANT, BEGIN, END, TASKS, USER, VOCABULARY, build_sample
from leank_convert.testbed.tokenizer import build_tokenizer, save_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()


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


def test_shipped_tokenizer_is_a_fresh_build(tokenizer, tmp_path: Path):
    shipped = AutoTokenizer.from_pretrained(MODEL_DIR)
    assert shipped.get_vocab() == tokenizer.get_vocab()
    assert shipped.chat_template == tokenizer.chat_template
    assert shipped.special_tokens_map == tokenizer.special_tokens_map
    assert shipped.padding_side == tokenizer.padding_side
    assert shipped.model_max_length == tokenizer.model_max_length
    save_tokenizer(tmp_path)
    built, committed = (
        json.loads((folder / "tokenizer.json").read_text()) for folder in (tmp_path, MODEL_DIR)
    )
    for part in ("model", "pre_tokenizer", "added_tokens"):
        assert committed[part] == built[part]
    assert (MODEL_DIR / "chat_template.jinja").read_text() == (tmp_path / "chat_template.jinja").read_text()
