"""Held-out check of a new mask: a few samples answered dense and pruned.

What is judged is how many of the answers' tokens are the most likely ones, each given the right tokens
before it: a model too small to write a long code without a slip, or one that begins in prose, still shows by
them what it reads in the context. Training's passes tell it without a checkpoint: the first answer token by
the prompt's last hidden state, which is dense in deployment too, and the others by those of the answer
tokens. An answer whose tokens are all right is what greedy decoding gives.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from leank_convert.data import Question, SampleSource, TrainingSample
from leank_convert.errors import LeanKError, out_of_memory
from leank_convert.held_out import HeldOut, TokenShares
from leank_convert.mask import ChannelMask
from leank_convert.progress import progress_bar
from leank_convert.recipe import Recipe
from leank_convert.train.graphs import is_bound_by_host
from leank_convert.train.interruption import Interruption
from leank_convert.train.log import StepRecord
from leank_convert.train.model import LoadedModel
from leank_convert.train.packing import PackedSample, pack_sample, padded_sizes
from leank_convert.train.passes import (
    Student,
    run_answer_pass,
    run_context_pass,
    run_question_pass,
)
from leank_convert.train.ranks import Ranks
from leank_convert.train.scaling import distillation_loss
from leank_convert.train.split_attention import StoredContext
from leank_convert.windows import Windows

# Added to the recipe's seed: with its default of 0, the samples are those that `evaluate` begins with.
_SEED_OFFSET = 1_000_000
_ROWS_AT_ONCE = 64  # of logits

# The smallest share of right tokens at which the dense model can be said to read answers in the context. By
# their form alone it knows commas, spaces and hyphens, with usual tokenizers up to a third of the tokens, and
# guesses a tenth of the digits.
_CAPABLE = 0.5
# What is lost has to be more than this share of the tokens, and more than chance. Tokens on one context go
# wrong together, so whole contexts are compared: if each were as likely to gain as to lose as many, the sum
# would stay below this multiple of its deviation in 39 of 40 cases (McNemar's test, for clusters). Fewer than
# four contexts never suffice.
_LOST_SHARE, _Z = 0.02, 1.96
# A difference of hidden states, relative to their size, that rounding alone makes.
_NO_DIFFERENCE = 1e-8
_JUMP = 100.0


@dataclass(frozen=True)
class Compared:
    """One sample, answered by the dense model and by students.

    Attributes:
        owners: Whose answer a token belongs to, int64 [R].
        dense: Which answer tokens the dense model predicts right, bool [R].
        pruned: The same of each student.
        distillation: Of each student, as training measures it.
        magnitude: The mean square of the dense hidden states.
    """

    owners: Tensor
    dense: Tensor
    pruned: tuple[Tensor, ...]
    distillation: tuple[float, ...]
    magnitude: float


@torch.no_grad()
def compare_answers(
    model: PreTrainedModel,
    sample: TrainingSample,
    students: Sequence[Student],
    *,
    key_mean: Tensor | None = None,
    offload: bool = False,
    longest: int | None = None,
) -> Compared:
    """Answer a sample by a dense model and by students, all on one stored context.

    Args:
        model: A causal language model loaded with `attention.ATTENTION_NAME`.
        sample: Context and questions.
        students: What else the answers are computed with.
        key_mean: What comes off all keys [L, H_kv, D]; None for nothing.
        offload: Keep the context's keys and values in host memory.
        longest: Pad the sample as training does, its context to no more than this: what CUDA's libraries plan
            for a size serves several then. None for no padding.
    """
    sample = _part_from_prefix(sample)
    packed = pack_sample(sample, None if longest is None else padded_sizes(sample, longest))
    stored = StoredContext(packed.sizes.context, offload, key_mean=key_mean)
    context = run_context_pass(model, packed.context_ids, stored)
    hidden_states = run_question_pass(model, context, packed)
    teacher = hidden_states[packed.sizes.questions :]
    ends = [end - 1 for end in accumulate(question.answer_start for question in sample.questions)]
    prompts = hidden_states[ends]
    pruned, distillation = [], []
    for student in students:
        found = run_answer_pass(model, context, packed, student)
        pruned.append(_find_right(model, prompts, found, packed))
        distillation.append(distillation_loss(teacher, found, packed.answer_owners).item())
    owners = packed.answer_owners
    return Compared(
        owners=owners[owners >= 0],
        dense=_find_right(model, prompts, teacher, packed),
        pruned=tuple(pruned),
        distillation=tuple(distillation),
        magnitude=distillation_loss(teacher, torch.zeros_like(teacher), packed.answer_owners).item(),
    )


def _part_from_prefix(sample: TrainingSample) -> TrainingSample:
    """Make the prompts' last tokens the questions': of the prefix no hidden states are kept."""
    if all(question.answer_start for question in sample.questions):
        return sample
    prefix, last = sample.prefix_ids[:-1], sample.prefix_ids[-1:]
    questions = tuple(
        Question(torch.cat([last, question.input_ids]), question.answer_start + 1)
        for question in sample.questions
    )
    return TrainingSample(sample.task, prefix, questions)


def _find_right(model: PreTrainedModel, prompts: Tensor, answers: Tensor, packed: PackedSample) -> Tensor:
    """Which answer tokens are the most likely ones, bool [R without padding], on the CPU.

    Args:
        model: Gives the logits.
        prompts: Hidden states of the prompts' last tokens [Q, hidden_size].
        answers: Those of the answer tokens and their padding [R, hidden_size].
        packed: What these are.
    """
    owners = packed.answer_owners
    owners = owners[owners >= 0]  # padding comes last
    begins = torch.cat([owners.new_ones(1, dtype=torch.bool), owners[1:] != owners[:-1]])
    before = answers[: len(owners)].roll(1, 0)
    before[begins.to(before.device)] = prompts
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    predicted = torch.cat([head(rows).argmax(-1).cpu() for rows in torch.split(before, _ROWS_AT_ONCE)])
    return predicted == packed.input_ids[packed.sizes.questions :][: len(owners)]


def check_held_out(
    loaded: LoadedModel,
    recipe: Recipe,
    masks: Mapping[float, ChannelMask],
    ranks: Ranks,
    records: Sequence[StepRecord],
    *,
    progress: bool,
) -> dict[float, HeldOut]:
    """Answer held-out samples of a recipe's data by its finished masks; nothing where it asks for none.

    Args:
        loaded: The model.
        recipe: Its data, with another seed, and how many samples.
        masks: By asked ratio.
        ranks: The processes that share the samples.
        records: Every step of the masks' training, if there was any.
        progress: Whether to show progress on stderr.

    Raises:
        LeanKError: If a sample cannot be drawn, hidden states are not finite or memory does not suffice, on
            any rank; on Ctrl-C and SIGTERM.
    """
    num_contexts = recipe.held_out_samples
    if not num_contexts:
        return {}
    source = SampleSource(loaded.tokenizer, recipe.data, recipe.seed + _SEED_OFFSET)
    windows = Windows(recipe.windows.sink_size, recipe.windows.recent_size)
    students, key_mean = [], None
    for mask in masks.values():
        kept = mask.channel_mask.to(ranks.device)
        students.append(Student(windows, kept.float(), kept.any(-1)))
        if mask.key_mean is not None:  # all masks of a recipe have the same
            key_mean = mask.key_mean.to(ranks.device, torch.float32)
    # Answer tokens and answers, those that the dense model gets right, its hidden states' magnitude; of each
    # student the tokens and answers it gets right, the squares of what contexts lost in tokens, and the loss.
    sums = [0.0] * (5 + 4 * len(students))
    with ExitStack() as stack:
        bar = progress_bar(progress and ranks.is_first, "held-out samples", num_contexts, stays=True)
        advance = stack.enter_context(bar)
        ending = stack.enter_context(Interruption())
        for start in range(0, num_contexts, ranks.num_ranks):
            failure = None
            try:
                if ending.reason:
                    raise LeanKError(
                        f"{ending.reason} ended the check of held-out samples",
                        hint="the same command and `--resume` goes on with it" if recipe.trains else None,
                        exit_code=ending.exit_code,
                    )
                if start + ranks.rank < num_contexts:
                    found = _measure(loaded, recipe, source.draw(start + ranks.rank), students, key_mean)
                    sums = [total + value for total, value in zip(sums, found, strict=True)]
            except LeanKError as error:
                failure = error
            ranks.check(failure)
            advance(min(ranks.num_ranks, num_contexts - start), figures=_render_figures(sums))
    num_tokens, num_answers, dense_tokens, dense, magnitude, *rest = ranks.totals(sums)
    checked = {}
    for place, (ratio, mask) in enumerate(masks.items()):
        pruned_tokens, pruned, squares, loss = rest[4 * place : 4 * place + 4]
        tokens = TokenShares(int(num_tokens), dense_tokens / num_tokens, pruned_tokens / num_tokens)
        warnings = [
            _judge_dense(tokens),
            _judge_lost(recipe, tokens, squares),
            _judge_difference(recipe, mask, loss, magnitude),
            _judge_jump(records, ratio),
        ]
        checked[ratio] = HeldOut(
            tasks=recipe.data.tasks,
            min_length=recipe.data.min_length,
            max_length=recipe.data.max_length,
            seed=source.seed,
            num_contexts=num_contexts,
            num_answers=int(num_answers),
            dense=dense / num_answers,
            pruned=pruned / num_answers,
            # Of several ranks, the last digits depend on the order of the sum.
            distillation=float(f"{loss / num_contexts:.6g}"),
            warnings=tuple(warning for warning in warnings if warning),
            tokens=tokens,
        )
    return checked


def _measure(
    loaded: LoadedModel,
    recipe: Recipe,
    sample: TrainingSample,
    students: Sequence[Student],
    key_mean: Tensor | None,
) -> list[float]:
    """A sample's share of the sums."""
    with out_of_memory(
        f"a held-out sample of {sample.num_tokens} tokens",
        "lower `data.max_length`, or leave the check out by `--set held_out_samples=0`",
    ):
        bound = is_bound_by_host(loaded.model, recipe.data.max_length)
        found = compare_answers(
            loaded.model,
            sample,
            students,
            key_mean=key_mean,
            offload=recipe.offload_context,
            longest=recipe.data.max_length if bound else None,
        )
    if not all(map(math.isfinite, (found.magnitude, *found.distillation))):
        raise LeanKError(
            f"hidden states of a held-out sample of {sample.num_tokens} tokens are not finite",
            hint="float16 overflows where bfloat16 and float32 do not: see `model.dtype`",
            exit_code=1,
        )
    num_answers, dense = int(found.owners.max()) + 1, int(found.dense.sum())
    sums: list[float] = [
        len(found.owners),
        num_answers,
        dense,
        num_answers - _count_flawed(found.owners, found.dense),
        found.magnitude,
    ]
    for right, loss in zip(found.pruned, found.distillation, strict=True):
        pruned = int(right.sum())
        sums += [pruned, num_answers - _count_flawed(found.owners, right), (dense - pruned) ** 2, loss]
    return sums


def _count_flawed(owners: Tensor, right: Tensor) -> int:
    """How many answers have a token that is not right."""
    return int((torch.bincount(owners[~right]) > 0).sum())


def _render_figures(sums: Sequence[float]) -> str:
    tokens = max(1.0, sums[0])
    pruned = " ".join(f"{right / tokens:.1%}" for right in sums[5::4])
    return f"answer tokens: dense {sums[2] / tokens:.1%}  pruned {pruned}"


def _judge_dense(tokens: TokenShares) -> str:
    if tokens.dense >= _CAPABLE:
        return ""
    return (
        f"the dense model itself predicts {tokens.dense:.1%} of {tokens.count} tokens of held-out answers "
        "right: it cannot do these tasks at these lengths, and the mask learned little from them; take "
        "shorter contexts (`data.max_length`) or other tasks (`data.tasks`)"
    )


def _judge_lost(recipe: Recipe, tokens: TokenShares, squares: float) -> str:
    share = tokens.dense - tokens.pruned
    if share <= max(_LOST_SHARE, _Z * math.sqrt(squares) / tokens.count):
        return ""
    if "stage2" in recipe.trains and not recipe.stage2.validation_contexts:
        remedy = "have the best of stage 2's masks chosen (`stage2.validation_contexts`: 8)"
    elif recipe.trains:
        remedy = f"give `{'stage1' if 'stage1' in recipe.trains else 'heads'}` more steps"
    else:
        remedy = "take a method that trains"
    return (
        f"the dense model predicts {tokens.dense:.1%} of {tokens.count} tokens of held-out answers right and "
        f"the pruned one {tokens.pruned:.1%}: lower `pruning_ratio`, or {remedy}"
    )


def _judge_difference(recipe: Recipe, mask: ChannelMask, loss: float, magnitude: float) -> str:
    if loss > _NO_DIFFERENCE * magnitude or mask.channel_mask.all():
        return ""
    windows, mean = recipe.windows, loss / recipe.held_out_samples
    return (
        f"pruning changes nothing in held-out answers (distillation {mean:.0e}): what is pruned does "
        "not reach them; see the chat template, and that most samples are longer than the "
        f"{windows.sink_size + windows.recent_size} tokens of sink and recent window (`data.min_length`)"
    )


def _judge_jump(records: Sequence[StepRecord], ratio: float) -> str:
    """Compare how stages 1 and 2 ended, each by its last fifth."""
    ends = []
    for stage in (1, 2):
        losses = [
            record.distillation
            for record in records
            if record.stage == stage and record.pruning_ratio_asked in (None, ratio)
        ]
        if not losses:
            return ""
        ends.append(median(losses[-max(1, len(losses) // 5) :]))
    if ends[1] <= _JUMP * ends[0]:
        return ""
    return (
        f"stage 2 ended with a loss of {ends[1]:.1e}, and stage 1 with {ends[0]:.1e}: the mask does far "
        "worse than its scaling factors; lower `pruning_ratio` or `stage2.learning_rate`, or give both "
        "stages more steps"
    )
