"""The two forward passes of a training step: dense over everything, pruned over the answer alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from leank_convert.train.attention import AnswerPass, StoredContext

# A context up to LONG runs in one piece, where PyTorch is fastest. A longer one runs in blocks of BLOCK_SIZE:
# what a layer holds beside keys and values, some 100 KB a token in an 8B model, stays small.
LONG = 65536
BLOCK_SIZE = 16384


@dataclass(frozen=True)
class DensePass:
    """What one dense forward leaves for teacher and student.

    Attributes:
        context: Keys and values of the context, per layer.
        hidden_states: The teacher: final-norm hidden states of the answer tokens [B, A, hidden_size].
    """

    context: StoredContext
    hidden_states: Tensor


@torch.no_grad()
def run_dense_pass(model: PreTrainedModel, input_ids: Tensor, answer_start: int) -> DensePass:
    """Run the dense model once over context and answer.

    Context queries are dense in training as in deployment, so the context's keys and values do not depend
    on the scaling factors and serve the student as they are. The language-modelling head is not run.
    A long context runs in blocks, which attend to the stored keys and values of those before them.

    Args:
        model: A causal language model loaded with `attention.ATTENTION_NAME`.
        input_ids: Context and answer [B, N], all rows with the same split.
        answer_start: P, the number of context tokens.
    """
    context = StoredContext(answer_start)
    num_tokens = input_ids.shape[1]
    starts = range(0, max(answer_start, 1), BLOCK_SIZE) if answer_start > LONG else range(1)
    for start in starts:
        # The last block has the whole answer, whose keys are not stored.
        stop = num_tokens if start == starts[-1] else start + BLOCK_SIZE
        position_ids = torch.arange(start, stop, device=input_ids.device)[None]
        context.num_seen = start
        output = model.base_model(
            input_ids=input_ids[:, start:stop], position_ids=position_ids, use_cache=False, leank_pass=context
        )
    return DensePass(context, output.last_hidden_state[:, answer_start - num_tokens :].clone())


def run_answer_pass(model: PreTrainedModel, input_ids: Tensor, answer_pass: AnswerPass) -> Tensor:
    """Run the answer tokens alone against the stored context, with gradient.

    Args:
        model: The same model.
        input_ids: Context and answer [B, N].
        answer_pass: The stored context and the scaling factors.

    Returns:
        The student: final-norm hidden states of the answer tokens [B, A, hidden_size].
    """
    start = answer_pass.context.num_tokens
    position_ids = torch.arange(start, input_ids.shape[1], device=input_ids.device)[None]
    output = model.base_model(
        input_ids=input_ids[:, start:], position_ids=position_ids, use_cache=False, leank_pass=answer_pass
    )
    hidden_states: Tensor = output.last_hidden_state
    return hidden_states
