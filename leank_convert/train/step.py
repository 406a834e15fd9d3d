"""One sample's share of a training step: its loss, with the graph to the scaling factors or gates."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedModel

from leank_convert.data import TrainingSample
from leank_convert.train.objective import distillation_loss
from leank_convert.train.passes import pack_questions, run_answer_pass, run_context_pass, run_question_pass
from leank_convert.windows import Windows


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
    teacher = run_question_pass(model, context, packed)
    hidden_states = run_answer_pass(
        model,
        context,
        packed,
        student.windows,
        student.scaling_factors,
        student.sees_middle,
        student.gates,
    )
    loss = distillation_loss(teacher, hidden_states, packed.answer_owners)
    # Of a model that is spread over devices, the last layer lies elsewhere.
    return loss.to(student.scaling_factors.device)
