"""Prompts of every task: filled up to their length, drawn by the seed alone, answerable by the tokenizer."""

import copy
import re

import pytest

from leank_convert.evaluate.prompt import score
from leank_convert.evaluate.ruler import RULER_TASKS, draw_prompts
from tests.checks import refusal

MAX_NEW_TOKENS = {"vt": 30, "cwe": 120, "fwe": 50, "qa": 32}


def digests(prompts):
    return [(prompt.task, prompt.length, prompt.index, prompt.digest) for prompt in prompts]


def test_a_prompt_depends_on_its_seed_task_length_and_index_alone(plain_tokenizer, question_file, draw):
    together = draw_prompts(plain_tokenizer, ["ruler"], [2500, 2000], 2, 7, None, question_file)
    assert [key[:3] for key in digests(together)] == [
        (task, length, index) for task in RULER_TASKS for length in (2000, 2500) for index in range(2)
    ]
    for prompt in together[1::2]:
        alone = draw(plain_tokenizer, prompt.task, prompt.length, seed=7)
        assert digests(alone)[1] == digests([prompt])[0]
    other = draw_prompts(plain_tokenizer, ["ruler"], [2000], 2, 8, None, question_file)
    assert len({prompt.digest for prompt in together + other}) == len(together + other)


def test_a_question_is_the_same_at_every_length(plain_tokenizer, draw):
    short, long = (draw(plain_tokenizer, "qa", length, num_samples=5) for length in (1000, 3000))
    assert [prompt.references for prompt in short] == [prompt.references for prompt in long]


def test_prompt_and_room_for_the_answer_fill_the_length(tokenizer, draw):
    chat = [{"role": "user", "content": "?"}]
    head = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False).split("?")[0]
    for task in RULER_TASKS:
        (prompt,) = draw(tokenizer, task, num_samples=1)
        assert prompt.max_new_tokens == MAX_NEW_TOKENS.get(task, 128)
        assert 0.95 * prompt.length <= len(prompt.input_ids) + prompt.max_new_tokens <= prompt.length
        text = tokenizer.decode(prompt.input_ids)
        assert re.sub(r"\s", "", text).startswith(re.sub(r"\s", "", head))
        # The answer has begun, after the chat template.
        assert re.match(r"\s*(The secret.*\S|Answer:(.*\S)?)$", text.rpartition("assistant")[2])
        written = tokenizer.decode(tokenizer(f" {', '.join(prompt.references)}")["input_ids"])
        assert score(written, prompt) == 1
        assert score("", prompt) == 0


def test_without_a_chat_template_a_prompt_is_plain_text_with_the_tokenizers_own_bos(tokenizer, draw):
    bare = copy.deepcopy(tokenizer)
    bare.chat_template = None
    bos = bare.convert_tokens_to_ids("<s>")
    for task in ("niah_single_1", "vt"):
        (prompt,) = draw(bare, task, num_samples=1)
        assert prompt.references == draw(tokenizer, task, num_samples=1)[0].references
        ids = prompt.input_ids.tolist()
        assert ids.count(bos) == int(bare("x")["input_ids"][0] == bos)
        text = bare.decode(ids, skip_special_tokens=True)
        assert "<|turn|>" not in text
        assert re.match(r"\s*(The secret|Answer:)", text.rpartition("\n")[2])


def test_essays_are_the_users_text_in_its_order(plain_tokenizer, tmp_path, draw):
    path = tmp_path / "story.txt"
    path.write_text(" ".join(f"Chapter {n} is long." for n in range(1000)))
    (prompt,) = draw(plain_tokenizer, "niah_multiquery", num_samples=1, haystack=str(path))
    chapters = [int(n) for n in re.findall(r"Chapter (\d+) is", plain_tokenizer.decode(prompt.input_ids))]
    assert len(chapters) > 50
    assert chapters == [(chapters[0] + offset) % 1000 for offset in range(len(chapters))]


@pytest.mark.parametrize("task", ["niah_multiquery", "cwe"])
def test_a_length_without_room_is_refused_with_one_that_has_it(plain_tokenizer, task, draw):
    with refusal(rf"150 tokens leave no room for `{task}`, which takes") as caught:
        draw(plain_tokenizer, task, 150, num_samples=6)
    enough = int(re.search(r"ask for (\d+) tokens", caught.value.hint).group(1))
    # At another length other samples are drawn.
    assert len(draw(plain_tokenizer, task, enough + 20, num_samples=6)) == 6


@pytest.mark.parametrize(
    ("tasks", "haystack", "asks", "message"),
    [
        (["vt", "niah_single_9"], None, False, "`niah_single_9`: no task of RULER"),
        (["qa"], None, False, "task `qa` needs a file of questions"),
        (["vt", "cwe"], None, True, r"towers\.jsonl` is read by none of the tasks `vt`, `cwe`"),
        (["fwe"], "a.txt", False, r"haystack `a\.txt` is read by none of the tasks `fwe`"),
    ],
)
def test_tasks_files_and_tokenizers_that_do_not_go_together_are_refused(
    plain_tokenizer, testbed_tokenizer, question_file, tasks, haystack, asks, message
):
    with refusal(r"cannot write an answer of `niah_single_1`: `\d{7}` becomes"):
        draw_prompts(testbed_tokenizer, ["niah_single_1"], [2000], 1, 0)
    with refusal(message):
        draw_prompts(plain_tokenizer, tasks, [2000], 1, 0, haystack, question_file if asks else None)
