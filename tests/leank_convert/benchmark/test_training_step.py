"""What `benchmark train` runs: samples, lengths, our step, and full sequences on the same tensors."""

import pytest
import torch

from leank_convert.benchmark.geometries import GEOMETRIES
from leank_convert.benchmark.training_peer import FullSequence, name_backends, prefill, sdpa_backend
from leank_convert.benchmark.training_sizes import QuestionSize, Sizes, choose_sizes
from leank_convert.benchmark.training_step import (
    OptimizerStep,
    build_trainee,
    draw_factors,
    draw_sample,
    stratified_lengths,
)
from leank_convert.train.ranks import Ranks
from leank_convert.train.step import Student, distil
from leank_convert.windows import Windows

TINY = GEOMETRIES["tiny"]
CPU = torch.device("cpu")
WINDOWS = Windows(4, 16)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return build_trainee(TINY, CPU, torch.float32)


def differentiate(loss_of, sample, factors, sees_middle=None):
    leaf = factors.clone().requires_grad_()
    loss = loss_of(sample, Student(WINDOWS, leaf, sees_middle))
    loss.backward()
    return loss.detach(), leaf.grad


@pytest.mark.parametrize("num_questions", [1, 4])
@pytest.mark.parametrize("stage", [1, 2])
def test_our_step_and_full_sequences_agree(model, num_questions, stage):
    double = build_trainee(TINY, CPU, torch.float64)
    sample = draw_sample(double, 70, num_questions, QuestionSize(3, 5), seed=1)
    factors, sees = draw_factors(TINY.facts, CPU), None
    if stage == 2:
        factors = (factors > 0.6).float()
        factors[1, 2] = 0
        sees = factors.bool().any(-1)
    ours = differentiate(lambda *args: distil(double, *args), sample, factors.double(), sees)
    theirs = differentiate(FullSequence(double, TINY).distil, sample, factors.double(), sees)
    # The loss is formed in float32.
    torch.testing.assert_close(ours[0].double(), theirs[0].double(), rtol=1e-5, atol=0)
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-5, atol=1e-5 * theirs[1].abs().max().item())
    assert theirs[0] > 1e-3


def test_full_sequences_share_the_models_weights_and_learn_none_of_them(model):
    peer = FullSequence(model, TINY)
    weights = {weight.data_ptr() for weight in model.parameters()}
    assert {weight.data_ptr() for weight in peer.teacher.parameters()} == weights
    differentiate(
        peer.distil, draw_sample(model, 40, 1, QuestionSize(3, 5), 0), draw_factors(TINY.facts, CPU)
    )
    assert all(weight.grad is None for weight in peer.teacher.parameters())


def test_a_stock_prefill_is_the_stock_models(model):
    peer = FullSequence(model, TINY)
    assert peer.teacher.config._attn_implementation == "sdpa"
    ids = torch.arange(3, 43)[None]
    with sdpa_backend("sdpa-cudnn"):  # only its order of trying; on the CPU that is what it always was
        cache = prefill(peer.teacher, ids)
    assert cache.get_seq_length() == 40
    assert name_backends(CPU) == ("sdpa",)
    assert name_backends(torch.device("cuda")) == ("sdpa", "sdpa-cudnn")


@pytest.mark.parametrize("num_questions", [1, 2, 5])
def test_a_sample_uses_the_positions_asked_for(model, num_questions):
    size = QuestionSize(3, 5)
    sample = draw_sample(model, 60, num_questions, size, seed=0)
    assert len(sample.questions) == num_questions
    assert sample.num_positions == 60
    assert sample.num_answer_tokens == 5 * num_questions
    for index in range(num_questions):
        assert (len(sample.prompt_ids(index)), len(sample.answer_ids(index))) == (55, 5)
    assert sample.num_tokens == 60 + 8 * (num_questions - 1)
    rows = {tuple(question.input_ids.tolist()) for question in sample.questions}
    assert len(rows) == num_questions
    again, other = (draw_sample(model, 60, num_questions, size, seed) for seed in (0, 1))
    assert torch.equal(again.prefix_ids, sample.prefix_ids)
    assert not torch.equal(other.prefix_ids, sample.prefix_ids)


@pytest.mark.parametrize("count", [1, 7, 30])
def test_lengths_are_one_from_each_part_of_the_range(count):
    shortest, longest = 16384, 98304
    lengths = stratified_lengths(shortest, longest, count)
    width = (longest + 1 - shortest) / count
    assert sorted(int((length - shortest) / width) for length in lengths) == list(range(count))
    assert all(shortest <= length <= longest for length in lengths)
    assert lengths == stratified_lengths(shortest, longest, count)
    if count > 1:
        assert lengths != sorted(lengths)
        assert lengths != stratified_lengths(shortest, longest, count, seed=1)


def test_a_step_moves_the_factors_and_keeps_them_between_0_and_1(model):
    step = OptimizerStep(lambda *args: distil(model, *args), TINY.facts, WINDOWS, CPU)
    before = step.factors.detach().clone()
    sample = draw_sample(model, 60, 2, QuestionSize(3, 5), seed=0)
    loss_gradient = differentiate(lambda *args: distil(model, *args), sample, before)[1]
    for _ in range(40):
        step.run(sample)
        if torch.equal(before, step.factors):
            raise AssertionError("nothing moved")
        assert 0 <= step.factors.min() <= step.factors.max() <= 1
    assert step.factors.min() == 0
    first = OptimizerStep(lambda *args: distil(model, *args), TINY.facts, WINDOWS, CPU)
    first.run(sample)
    # Without the penalty's.
    torch.testing.assert_close(first.gradient, loss_gradient)


def test_with_ranks_the_gradient_is_their_mean(model, monkeypatch):
    monkeypatch.setattr(Ranks, "add_up", lambda self, tensor: tensor.mul_(self.num_ranks))
    sample = draw_sample(model, 60, 1, QuestionSize(3, 5), seed=0)
    factors = []
    for ranks in (None, Ranks(CPU, 0, 2)):
        step = OptimizerStep(lambda *args: distil(model, *args), TINY.facts, WINDOWS, CPU, ranks)
        step.run(sample)
        factors.append(step.factors.detach())
    torch.testing.assert_close(factors[0], factors[1])


def test_what_is_not_given_has_defaults_and_a_toys_on_the_cpu():
    given = {"length": None, "num_questions": 5, "rounds": None}
    assert choose_sizes(given, (), toy=False) == Sizes(num_questions=5)
    toy = choose_sizes(given, ["peer"], toy=True)
    assert (toy.length, toy.num_questions, toy.skip) == (96, 5, {"peer"})
    assert toy.counts == [1, 5]
    assert choose_sizes({"num_questions": 1}, (), toy=True).counts == [1]
