"""A sample's loss by three forward passes: context, questions with answers, the answers again, pruned."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from leank_convert.data import Question, TrainingSample
from leank_convert.train.attention import AnswerPass, ContextIsStored, ContextPass, QuestionPass
from leank_convert.train.fusion import uncompiled
from leank_convert.train.scaling import distillation_loss
from leank_convert.train.split_attention import StoredContext, plan_regions
from leank_convert.windows import Windows

# What a layer holds beside keys and values, some 100 KB a token in an 8B model, stays small, and PyTorch is
# as fast in blocks of this size as in one piece.
BLOCK_SIZE = 16384


@dataclass(frozen=True)
class PackedQuestions:
    """The tokens that follow a context, all questions and then all answers, as one row; on the CPU.

    A pass takes them to its device without waiting for it: while the context runs there, what follows is
    already being launched.

    Attributes:
        input_ids: [T].
        positions: Counted within context, question and answer [T].
        owners: Which question each token belongs to [T].
        num_questions: Tokens of questions; R = T - num_questions are answers.
        num_context: P.
    """

    input_ids: Tensor
    positions: Tensor
    owners: Tensor
    num_questions: int
    num_context: int

    @property
    def answer_owners(self) -> Tensor:
        """Which question each answer token belongs to [R]."""
        return self.owners[self.num_questions :]


@dataclass(frozen=True)
class Student:
    """What the answers are computed with.

    Attributes:
        windows: Sink and recent window.
        scaling_factors: Stage 1's factors, or stage 2's zeros and ones [L, H_kv, D].
        sees_middle: Bool [L, H_kv], False for heads without channels; None if every head sees the middle.
        gates: What a head keeps of the middle [L, H_kv], where gates are learned.
    """

    windows: Windows
    scaling_factors: Tensor
    sees_middle: Tensor | None = None
    gates: Tensor | None = None


def distil(
    model: PreTrainedModel, sample: TrainingSample, student: Student, *, offload: bool = False
) -> Tensor:
    """Loss of a sample: the mean over its questions of the paper's, without the penalty.

    The context is run once, dense; every question sees it and its own tokens alone.

    Args:
        model: A causal language model loaded with `attention.ATTENTION_NAME`, frozen.
        sample: Context and questions.
        student: What the answers are computed with.
        offload: Keep the context's keys and values in host memory.

    Returns:
        A scalar, where the scaling factors are.
    """
    packed = pack_questions(sample.questions, len(sample.prefix_ids))
    context = run_context_pass(model, sample.prefix_ids, offload=offload)
    teacher = run_question_pass(model, context, packed)[packed.num_questions :]
    hidden_states = run_answer_pass(model, context, packed, student)
    loss = distillation_loss(teacher, hidden_states, packed.answer_owners)
    # Of a model that is spread over devices, the last layer lies elsewhere.
    return loss.to(student.scaling_factors.device)


def pack_questions(questions: Sequence[Question], num_context: int) -> PackedQuestions:
    """Lay the questions on one context, and their answers, side by side.

    Args:
        questions: One or more.
        num_context: P, tokens of the context.
    """
    ids, positions, owners = [], [], []
    for is_answer in (False, True):
        for owner, question in enumerate(questions):
            start, stop = (
                (question.answer_start, len(question.input_ids)) if is_answer else (0, question.answer_start)
            )
            ids.append(question.input_ids[start:stop])
            positions.append(torch.arange(num_context + start, num_context + stop))
            owners.append(torch.full((stop - start,), owner))
    return PackedQuestions(
        input_ids=torch.cat(ids),
        positions=torch.cat(positions),
        owners=torch.cat(owners),
        num_questions=sum(question.answer_start for question in questions),
        num_context=num_context,
    )


@torch.no_grad()
def run_context_pass(model: PreTrainedModel, input_ids: Tensor, *, offload: bool = False) -> StoredContext:
    """Run the dense model over a context and keep every layer's keys and values.

    Context queries are dense in training as in deployment, so what is kept does not depend on the scaling
    factors and serves every question. No hidden state is kept and the language-modelling head is not run.

    Args:
        model: A causal language model loaded with `attention.ATTENTION_NAME`.
        input_ids: The context [P].
        offload: Keep keys and values in host memory.
    """
    context = StoredContext(len(input_ids), offload)
    positions = torch.arange(len(input_ids))
    size = context.num_tokens if _rotates_by_length(model) else BLOCK_SIZE
    for start in range(0, context.num_tokens, size):
        block = slice(start, start + size)
        context.num_seen = start
        with suppress(ContextIsStored):
            _run(model, input_ids[block], positions[block], ContextPass(context))
    return context


@torch.no_grad()
def run_question_pass(model: PreTrainedModel, context: StoredContext, packed: PackedQuestions) -> Tensor:
    """Run the dense model over questions and answers; the context takes the questions' keys and values.

    Args:
        model: The same model.
        context: The stored context.
        packed: What is asked on it.

    Returns:
        Final-norm hidden states of all these tokens [T, hidden_size]; those of answers are the teacher.
    """
    regions = plan_regions(
        packed.num_context, packed.positions, packed.owners, len(packed.input_ids), None, _device(model)
    )
    questions = QuestionPass(context, regions, packed.num_questions)
    with uncompiled():
        return _run(model, packed.input_ids, packed.positions, questions)


def run_answer_pass(
    model: PreTrainedModel, context: StoredContext, packed: PackedQuestions, student: Student
) -> Tensor:
    """Run the answers alone against what is stored, with gradient.

    Args:
        model: The same model.
        context: The stored context and questions.
        packed: What is asked on it.
        student: What the answers are computed with.

    Returns:
        The student: final-norm hidden states of the answer tokens [R, hidden_size].
    """
    num_answers = len(packed.answer_owners)
    regions = plan_regions(
        packed.num_context, packed.positions, packed.owners, num_answers, student.windows, _device(model)
    )
    answers = AnswerPass(context, regions, student.scaling_factors, student.sees_middle, student.gates)
    with uncompiled():
        return _run(model, packed.input_ids[-num_answers:], packed.positions[-num_answers:], answers)


def _rotates_by_length(model: PreTrainedModel) -> bool:
    """Whether a token's rotary embedding depends on how many tokens run: then a block is not the whole's."""
    rope_type = model.config.rope_parameters["rope_type"]
    return "dynamic" in rope_type or rope_type == "longrope"


def _device(model: PreTrainedModel) -> torch.device:
    """Where the model takes its tokens: where its layers are spread, that of the first."""
    return next(model.parameters()).device


def _run(
    model: PreTrainedModel,
    input_ids: Tensor,
    positions: Tensor,
    leank_pass: ContextPass | QuestionPass | AnswerPass,
) -> Tensor:
    """Final-norm hidden states [N, hidden_size] of tokens at some positions, both [N]."""
    ids, position_ids = (t[None].to(_device(model), non_blocking=True) for t in (input_ids, positions))
    output = model.base_model(
        input_ids=ids, position_ids=position_ids, use_cache=False, leank_pass=leank_pass
    )
    hidden_states: Tensor = output.last_hidden_state[0]
    return hidden_states
