"""What the check at the end of training counts is what the checkpoint answers, and the dense model."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from leank_convert.data import SampleSource, TrainingSample
from leank_convert.export import export_checkpoint
from leank_convert.mask import ChannelMask
from leank_convert.recipe_file import load_recipe
from leank_convert.testbed import MODEL_DIR
from leank_convert.train.held_out import compare_answers
from leank_convert.train.model import find_model, load_model
from leank_convert.train.split_attention import Student
from leank_convert.windows import Windows

NUM_CONTEXTS = 8


def load(**data):
    """The shipped model as training loads it, and samples of other data for it."""
    recipe = load_recipe("quickstart", ["data.min_length=256", "data.max_length=384"])
    loaded = load_model(find_model("testbed", recipe), recipe, torch.device("cpu"))
    return loaded, SampleSource(loaded.tokenizer, recipe.data.model_copy(update=data), 5)


def random_mask():
    """So poor that some answers go wrong, at their first token, at a later one, or not at all."""
    return torch.rand(4, 4, 64, generator=torch.Generator().manual_seed(0)) < 0.75


def test_it_counts_the_answers_that_generation_gives(tmp_path):
    loaded, source = load(questions_per_context=2)
    samples = [source.draw(index) for index in range(NUM_CONTEXTS)]
    mask = random_mask()
    student = Student(Windows(16, 64), mask.float(), mask.any(-1))
    found = [compare_answers(loaded.model, sample, [student]) for sample in samples]
    for sample, alone in zip(samples, found, strict=True):
        padded = compare_answers(loaded.model, sample, [student], longest=384)
        assert padded.owners.equal(alone.owners) and padded.dense.equal(alone.dense)
        assert padded.pruned[0].equal(alone.pruned[0])
        assert padded.distillation == pytest.approx(alone.distillation, rel=1e-3)
    out = export_checkpoint(
        "testbed", ChannelMask(mask), tmp_path / "out", sink_size=16, recent_size=64, flush_size=1
    )
    for path, answers in ((MODEL_DIR, [c.dense for c in found]), (out, [c.pruned[0] for c in found])):
        model = AutoModelForCausalLM.from_pretrained(
            path, trust_remote_code=True, dtype=torch.float32, attn_implementation="sdpa"
        )
        expected = [generates(model, sample) for sample in samples]
        assert [whole(c, right) for c, right in zip(found, answers, strict=True)] == expected
        right = sum(map(sum, expected))
        assert right == 2 * NUM_CONTEXTS if path == MODEL_DIR else 0 < right < 2 * NUM_CONTEXTS


def whole(found, right):
    """For each question, whether every token of its answer is right."""
    return [right[found.owners == owner].all().item() for owner in found.owners.unique()]


def predicts(model, sample):
    """For each answer token, whether it is the most likely one after the right tokens before it."""
    found = []
    for place in range(len(sample.questions)):
        prompt, answer = sample.prompt_ids(place), sample.answer_ids(place)
        logits = model(torch.cat([prompt, answer])[None]).logits[0, len(prompt) - 1 : -1]
        found += (logits.argmax(-1) == answer).tolist()
    return found


def generates(model, sample):
    """For each question, whether the model writes the answer."""
    found = []
    for place in range(len(sample.questions)):
        prompt, answer = sample.prompt_ids(place)[None], sample.answer_ids(place)
        options = {"max_new_tokens": len(answer), "do_sample": False, "pad_token_id": 0}
        output = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
        found.append(output[0, prompt.shape[1] :].equal(answer))
    return found


def test_a_prompt_that_is_all_prefix_is_answered_as_one_of_several():
    loaded, source = load(questions_per_context=3)
    sample = source.draw(1)
    mask = random_mask()
    students = [
        Student(Windows(16, 64), kept.float(), kept.any(-1)) for kept in (mask, torch.zeros_like(mask))
    ]
    together = compare_answers(loaded.model, sample, students)
    for place, question in enumerate(sample.questions):
        whole = torch.cat([sample.prefix_ids, question.input_ids[: question.answer_start]])
        own = type(question)(sample.answer_ids(place), 0)
        alone = compare_answers(loaded.model, TrainingSample(sample.task, whole, (own,)), students)
        own_tokens = together.owners == place
        assert alone.dense.equal(together.dense[own_tokens])
        for right, all_right in zip(alone.pruned, together.pruned, strict=True):
            assert right.equal(all_right[own_tokens])


def test_each_token_is_judged_given_those_before_it():
    loaded, source = load(tasks=("multi_value",), questions_per_context=2)
    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32, attn_implementation="sdpa")
    sample = source.draw(1)
    first = sample.questions[0]
    ids = first.input_ids.clone()
    ids[first.answer_start + 2] = ids[first.answer_start]  # an answer that the model does not give
    changed = replace(sample, questions=(replace(first, input_ids=ids), sample.questions[1]))
    expected = predicts(model, changed)
    assert expected[0] and not expected[2] and any(expected[3 : len(sample.answer_ids(0))])
    assert compare_answers(loaded.model, changed, []).dense.tolist() == expected
