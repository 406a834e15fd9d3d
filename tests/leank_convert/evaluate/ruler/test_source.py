import copy
import re

import pytest

from leank_convert.errors import LeanKError
from leank_convert.evaluate.ruler import RULER_TASKS, draw_prompts
from leank_convert.recipe import HaystackSection

SHORT = HaystackSection()


def same(one, other):
    return {**vars(one), "input_ids": one.input_ids.tolist()} == {
        **vars(other),
        "input_ids": other.input_ids.tolist(),
    }


def test_a_prompt_depends_on_nothing_else_that_is_asked_for(plain_tokenizer, question_file, draw):
    together = draw_prompts(plain_tokenizer, RULER_TASKS, [2000, 2500], 3, 7, SHORT, question_file)
    assert [(prompt.task, prompt.length, prompt.index) for prompt in together] == [
        (task, length, index) for task in RULER_TASKS for length in (2000, 2500) for index in range(3)
    ]
    for prompt in together[1::3]:
        alone = draw(plain_tokenizer, prompt.task, prompt.length, num_samples=2, seed=7)[1]
        assert same(alone, prompt)


@pytest.mark.parametrize("task", RULER_TASKS)
def test_prompts_of_other_seeds_lengths_and_indices_differ(plain_tokenizer, task, draw):
    first = draw(plain_tokenizer, task, 3000, seed=1) + draw(plain_tokenizer, task, 3000, seed=2)
    first += draw(plain_tokenizer, task, 3100, seed=1)
    assert len({tuple(prompt.input_ids.tolist()) for prompt in first}) == 6
    if task != "qa":
        assert len({prompt.references for prompt in first}) == 6


def test_a_question_is_the_same_at_every_length(plain_tokenizer, draw):
    short, long = (draw(plain_tokenizer, "qa", length, num_samples=5) for length in (1000, 3000))
    assert [prompt.references for prompt in short] == [prompt.references for prompt in long]


@pytest.mark.parametrize("task", RULER_TASKS)
def test_the_beginning_of_the_answer_follows_the_chat_template(tokenizer, task, draw):
    (prompt,) = draw(tokenizer, task, num_samples=1)
    conversation = [{"role": "user", "content": "?"}]
    rendered = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
    head = rendered.split("?")[0]
    text = tokenizer.decode(prompt.input_ids)
    assert re.sub(r"\s", "", text).startswith(re.sub(r"\s", "", head))
    begin = text.rpartition("assistant")[2]
    assert re.match(r"\s*(The secret|Answer:)", begin)
    assert not begin[-1].isspace()
    ids = prompt.input_ids.tolist()
    bos = tokenizer.convert_tokens_to_ids("<s>")
    assert ids.count(bos) == rendered.count("<s>")


def test_essays_are_the_users_text_in_its_order(plain_tokenizer, tmp_path, draw):
    path = tmp_path / "story.txt"
    path.write_text(" ".join(f"Chapter {n} is long." for n in range(1000)))
    (prompt,) = draw(plain_tokenizer, "niah_multiquery", num_samples=1, source=str(path))
    chapters = [int(n) for n in re.findall(r"Chapter (\d+) is", plain_tokenizer.decode(prompt.input_ids))]
    assert len(chapters) > 50
    assert chapters == [(chapters[0] + offset) % 1000 for offset in range(len(chapters))]


@pytest.mark.parametrize("task", RULER_TASKS)
def test_a_length_without_room_is_refused_with_one_that_has_it(plain_tokenizer, task, draw):
    with pytest.raises(LeanKError, match=rf"150 tokens leave no room for `{task}`, which takes") as caught:
        draw(plain_tokenizer, task, 150, num_samples=6)
    enough = int(re.search(r"lengths of (\d+) tokens", caught.value.hint).group(1))
    # At another length other samples are drawn.
    assert len(draw(plain_tokenizer, task, enough + 20, num_samples=6)) == 6


@pytest.mark.parametrize("task", RULER_TASKS)
def test_without_a_chat_template_a_prompt_is_plain_text_with_the_tokenizers_own_bos(tokenizer, task, draw):
    bare = copy.deepcopy(tokenizer)
    bare.chat_template = None
    (prompt,) = draw(bare, task, num_samples=1)
    (chat,) = draw(tokenizer, task, num_samples=1)
    assert prompt.references == chat.references
    assert prompt.length - 200 < len(prompt.input_ids) + prompt.max_new_tokens <= prompt.length
    ids, bos = prompt.input_ids.tolist(), bare.convert_tokens_to_ids("<s>")
    adds_bos = bare("x")["input_ids"][0] == bos
    assert ids.count(bos) == int(adds_bos)
    text = bare.decode(ids, skip_special_tokens=True)
    assert "<|turn|>" not in text
    begin = text.rpartition("\n")[2]
    assert re.match(r"\s*(The secret|Answer:)", begin)


def test_a_tokenizer_that_cannot_write_the_answer_is_refused(testbed_tokenizer):
    with pytest.raises(LeanKError, match=r"cannot write an answer of `niah_single_1`: `\d{7}` becomes"):
        draw_prompts(testbed_tokenizer, ["niah_single_1"], [2000], 1, 0, SHORT)


def test_an_unknown_task_is_refused_with_those_there_are(plain_tokenizer):
    with pytest.raises(LeanKError, match="`niah_single_9`: no task of RULER") as caught:
        draw_prompts(plain_tokenizer, ["vt", "niah_single_9"], [2000], 1, 0, SHORT)
    assert "niah_single_3" in caught.value.hint


def test_questions_without_a_file_are_refused(plain_tokenizer):
    with pytest.raises(LeanKError, match="task `qa` needs a file of questions"):
        draw_prompts(plain_tokenizer, ["qa"], [2000], 1, 0, SHORT)


def test_files_that_no_task_reads_are_refused(plain_tokenizer, question_file):
    with pytest.raises(LeanKError, match=r"towers\.jsonl` is read by none of the tasks `vt`, `cwe`"):
        draw_prompts(plain_tokenizer, ["vt", "cwe"], [2000], 1, 0, SHORT, question_file)
    with pytest.raises(LeanKError, match=r"haystack `a\.txt` is read by none of the tasks `fwe`"):
        draw_prompts(plain_tokenizer, ["fwe"], [2000], 1, 0, HaystackSection(source="a.txt"))


def test_more_samples_than_questions_are_refused(plain_tokenizer, draw):
    with pytest.raises(LeanKError, match="has 12 questions, fewer than the samples") as caught:
        draw(plain_tokenizer, "qa", num_samples=13)
    assert "12 samples or fewer" in caught.value.hint
