import re

import pytest
from tokenizers import Regex, normalizers

from leank_convert.data import SampleSource
from leank_convert.errors import LeanKError
from leank_convert.recipe import DataSection
from tests.checks import refusal, section


def same(sample, other):
    return sample.prompt_ids().equal(other.prompt_ids()) and sample.answer_ids().equal(other.answer_ids())


def test_lengths_spread_over_the_whole_range(plain_tokenizer):
    source = SampleSource(plain_tokenizer, section(min_length=700, max_length=2100), seed=0)
    lengths = [source.draw(step).num_tokens for step in range(40)]
    assert min(lengths) < 900
    assert max(lengths) > 1900


def test_sample_is_a_function_of_seed_and_step(plain_tokenizer):
    first, second = (SampleSource(plain_tokenizer, section(), seed=7) for _ in range(2))
    ahead = second.draw(5)  # drawing out of order changes nothing
    for step in range(6):
        sample = first.draw(step)
        assert same(sample, second.draw(step))
    assert same(sample, ahead)
    assert not same(sample, SampleSource(plain_tokenizer, section(), seed=8).draw(5))


@pytest.mark.parametrize("wording", ["general", "testbed"])
def test_what_passes_the_check_can_be_drawn_at_every_step(wording, testbed_tokenizer):
    """The shortest form of a sample differs from draw to draw; a run must not meet one that does not fit."""
    passing = []
    for length in range(150, 212, 8):
        data = section(tasks=["multi_value"], wording=wording, min_length=length, max_length=length)
        source = SampleSource(testbed_tokenizer, data, seed=0)
        try:
            source.check()
        except LeanKError:
            continue
        passing.append(length)
        assert all(source.draw(step).num_tokens <= length for step in range(60))
    assert 0 < len(passing) < 8


def test_a_draw_that_does_not_fit_is_drawn_again(testbed_tokenizer):
    """At a length that some drafts exceed, which `check` refuses, every step still has its sample."""
    data = section(tasks=["multi_value"], min_length=160, max_length=160)
    source = SampleSource(testbed_tokenizer, data, seed=0)
    with pytest.raises(LeanKError) as caught:
        source.check()
    samples = [source.draw(step) for step in range(40)]
    assert max(sample.num_tokens for sample in samples) <= 160
    assert same(samples[3], source.draw(3))
    # The hint is good for a second try.
    enough = int(re.search(r"`data.min_length` to (\d+)", caught.value.hint).group(1))
    data = section(tasks=["multi_value"], min_length=enough, max_length=enough)
    SampleSource(testbed_tokenizer, data, seed=0).check()


def test_an_answer_without_tokens_and_testbed_wording_of_another_tokenizer_are_refused(plain_tokenizer):
    data = DataSection(tasks=["retrieval"], wording="testbed", min_length=256, max_length=256)
    with refusal("a testbed sample asked for in 256 tokens has"):
        SampleSource(plain_tokenizer, data, seed=0).draw(0)
    plain_tokenizer.backend_tokenizer.normalizer = normalizers.Replace(Regex(r"^[0-9a-f-]+$"), "")
    with refusal(r"makes no token of the answer `[0-9a-f]{6}-"):
        SampleSource(plain_tokenizer, section(tasks=["retrieval"]), seed=0).check()


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "fails: "),
        ("{% for", "fails: "),
        ({"tool_use": "{{ messages }}"}, "fails: "),
        ("<|turn|>user\nHello.</s><|turn|>assistant\n", "leaves out "),
        ("{% for m in messages[1:] %}{{ m['content'] }}{% endfor %}<|turn|>assistant\n", "leaves out "),
        ("{{ messages[-1]['content'][:2000] }}<|turn|>assistant\n", "leaves out "),
        # The shortest samples, which `check` draws, pass whole.
        ("{{ messages[-1]['content'][:9000] }}<|turn|>assistant\n", "leaves out "),
    ],
    ids=str,
)
def test_a_chat_template_that_fails_or_leaves_out_what_is_asked_is_refused(
    plain_tokenizer, template, message
):
    plain_tokenizer.name_or_path = "a/b"
    plain_tokenizer.chat_template = template
    with refusal(rf"\Athe chat template of `a/b` {message}.{{9,301}}\n", "chat_template.jinja"):
        SampleSource(plain_tokenizer, section(), seed=0).check()


@pytest.mark.parametrize(
    "content", ["m['content'] | trim", "m['content'].split() | join(' ')", "m['content'] | tojson"]
)
def test_a_chat_template_may_write_white_space_in_its_own_way(plain_tokenizer, content):
    plain_tokenizer.chat_template = "{% for m in messages[-1:] %}<s>{{ " + content + " }}</s>{% endfor %}"
    source = SampleSource(plain_tokenizer, section(), seed=0)
    source.check()
    assert "Which code opens" in plain_tokenizer.decode(source.draw(0).prompt_ids())


@pytest.mark.parametrize("task", ["retrieval", "multi_value", "variable_tracking"])
def test_testbed_wording_is_the_shipped_models_language(task, testbed_tokenizer):
    data = DataSection(tasks=[task], wording="testbed", min_length=256, max_length=2048)
    source = SampleSource(testbed_tokenizer, data, seed=0)
    for step in range(5):
        sample = source.draw(step)
        assert sample.task == task
        assert 200 <= sample.num_tokens <= 2048
        assert testbed_tokenizer.unk_token_id not in sample.prompt_ids().tolist()
        prompt, answer = map(testbed_tokenizer.decode, (sample.prompt_ids(), sample.answer_ids()))
        assert prompt.endswith("<|assistant|>")
        assert len(answer.split()) == sample.num_answer_tokens >= 3
