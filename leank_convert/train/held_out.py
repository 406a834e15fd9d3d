"""Held-out check of a new mask: a few samples answered dense and pruned.

What is judged is how many of the answers' tokens are the most likely ones, each given the right tokens
before it: a model too small to write a long code without a slip, or one that begins in prose, still shows by
them what it reads in the context. Training's passes tell it without a checkpoint: the first answer token by
the prompt's last hidden state, which is dense in deployment too, and the others by those of the answer
tokens. An answer whose tokens are all right is what greedy decoding gives.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from leank_convert.data import Question, SampleSource, TrainingSample
from leank_convert.errors import NotFiniteError, out_of_memory
from leank_convert.held_out import HeldOut, TokenShares
from leank_convert.mask import ChannelMask
from leank_convert.progress import progress_bar
from leank_convert.recipe import Recipe
from leank_convert.train.graphs import is_bound_by_host
from leank_convert.train.interruption import Interruption
from leank_convert.train.log import StepRecord
from leank_convert.train.model import LoadedModel
from leank_convert.train.packing import PackedSample, pack_sample, padded_sizes
from leank_convert.train.passes import follow_context, run_context_pass
from leank_convert.train.ranks import Ranks
from leank_convert.train.scaling import distillation_loss
from leank_convert.train.split_attention import StoredContext, Student
from leank_convert.windows import Windows

# Added to the recipe's seed: with its default of 0, the samples are those that `evaluate` begins with.
_SEED_OFFSET = 1_000_000
_ROWS_AT_ONCE = 64  # of logits
# What is counted of a sample: a row of the tokens and answers there are, one of the dense model, one of each
# student. Columns are the tokens and answers that are right, the loss (of the dense model the magnitude of
# its hidden states), and the square of what the context lost in tokens.
_NUM_COLUMNS = 4

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
    """One sample, answered by the dense model and by students."""

    owners: Tensor  # whose answer a token belongs to, int64 [R]
    dense: Tensor  # which answer tokens the dense model predicts right, bool [R]
    pruned: tuple[Tensor, ...]  # the same of each student
    distillation: tuple[float, ...]  # of each student, as training measures it
    magnitude: float  # the mean square of the dense hidden states


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

    The model is loaded with `attention.ATTENTION_NAME`; students are what else the answers are computed with.
    The mean of keys [L, H_kv, D], if one is given, comes off all keys, and `offload` keeps the context's keys
    and values in host memory. With `longest`, the sample is padded as training does, its context to no more
    than this: what CUDA's libraries plan for a size serves several then.
    """
    sample = _part_from_prefix(sample)
    packed = pack_sample(sample, None if longest is None else padded_sizes(sample, longest))
    stored = StoredContext(packed.sizes.context, offload, key_mean=key_mean)
    context = run_context_pass(model, packed.context_ids, stored)
    hidden_states = follow_context(model, context, packed)
    teacher = hidden_states[packed.sizes.questions :]
    ends = [end - 1 for end in accumulate(question.answer_start for question in sample.questions)]
    prompts = hidden_states[ends]
    pruned, distillation = [], []
    for student in students:
        found = follow_context(model, context, packed, student)
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

    By hidden states of the prompts' last tokens [Q, hidden_size], and of the answers [R, hidden_size].
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

    Masks are by asked ratio; `records` are all steps of their training, if there was any.

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
        students.append(Student(windows, kept.float(), kept.any(-1), **values_left(mask, ranks.device)))
        if mask.key_mean is not None:  # all masks of a recipe have the same
            key_mean = mask.key_mean.to(ranks.device, torch.float32)
    sums = torch.zeros(2 + len(students), _NUM_COLUMNS, dtype=torch.float64)
    bar = progress_bar(progress and ranks.is_first, "held-out samples", num_contexts, stays=True)
    with bar as advance, Interruption() as ending:

        def measure(place: int) -> None:
            sums.add_(_measure(loaded, recipe, source.draw(place), students, key_mean))
            if ended := ending.error("the check of held-out samples", resumes=bool(recipe.trains)):
                raise ended

        def show(count: int) -> None:
            num_tokens, *right = sums[:, 0].tolist()
            dense_share, *shares = (f"{each / max(1.0, num_tokens):.1%}" for each in right)
            advance(count, figures=f"answer tokens: dense {dense_share}  pruned {' '.join(shares)}")

        ranks.share(num_contexts, measure, show)
    counts, dense, *found = ranks.combine(sums).tolist()
    checked = {}
    for (ratio, mask), pruned in zip(masks.items(), found, strict=True):
        tokens = TokenShares(int(counts[0]), dense[0] / counts[0], pruned[0] / counts[0])
        judged = _judge(recipe, mask, tokens, squares=pruned[3], loss=pruned[2], magnitude=dense[2])
        checked[ratio] = HeldOut(
            tasks=recipe.data.tasks,
            min_length=recipe.data.min_length,
            max_length=recipe.data.max_length,
            seed=source.seed,
            num_contexts=num_contexts,
            num_answers=int(counts[1]),
            dense=dense[1] / counts[1],
            pruned=pruned[1] / counts[1],
            # Of several ranks, the last digits depend on the order of the sum.
            distillation=float(f"{pruned[2] / num_contexts:.6g}"),
            warnings=(*judged, *_judge_ends(records, ratio)),
            tokens=tokens,
        )
    return checked


def values_left(mask: ChannelMask, device: torch.device) -> dict[str, Tensor]:
    """What a mask leaves of a pruned token's V, as a student has it."""
    if mask.value_basis is None or mask.value_widths is None:
        return {}
    kept = torch.arange(mask.value_basis.shape[-1]) < mask.value_widths[..., None]
    return {"value_basis": mask.value_basis.to(device), "value_factors": kept.to(device, torch.float32)}


def _measure(
    loaded: LoadedModel,
    recipe: Recipe,
    sample: TrainingSample,
    students: Sequence[Student],
    key_mean: Tensor | None,
) -> Tensor:
    """A sample's share of the sums, float64 [2 + students, 4]."""
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
    losses = [found.magnitude, *found.distillation]
    if not all(map(math.isfinite, losses)):
        raise NotFiniteError(
            f"hidden states of a held-out sample of {sample.num_tokens} tokens are not finite"
        )
    num_answers, dense = int(found.owners.max()) + 1, int(found.dense.sum())
    rows: list[list[float]] = [[len(found.owners), num_answers, 0, 0]]
    for right, loss in zip((found.dense, *found.pruned), losses, strict=True):
        flawed = int((torch.bincount(found.owners[~right]) > 0).sum())
        rows.append([right.sum().item(), num_answers - flawed, loss, (dense - right.sum().item()) ** 2])
    return torch.tensor(rows, dtype=torch.float64)


def _judge(
    recipe: Recipe, mask: ChannelMask, tokens: TokenShares, squares: float, loss: float, magnitude: float
) -> Iterator[str]:
    """What is far off in the answers, and what to change."""
    if tokens.dense < _CAPABLE:
        yield (
            f"the dense model itself predicts {tokens.dense:.1%} of {tokens.count} tokens of held-out "
            "answers right: it cannot do these tasks at these lengths, and the mask learned little from "
            "them; take shorter contexts (`data.max_length`) or other tasks (`data.tasks`)"
        )
    if tokens.dense - tokens.pruned > max(_LOST_SHARE, _Z * math.sqrt(squares) / tokens.count):
        if "stage2" in recipe.trains and not recipe.stage2.validation_contexts:
            remedy = "have the best of stage 2's masks chosen (`stage2.validation_contexts`: 8)"
        elif recipe.trains:
            section = recipe.trains[0].replace("gates", "heads")
            remedy = f"give `{section}` more steps"
        else:
            remedy = "take a method that trains"
        yield (
            f"the dense model predicts {tokens.dense:.1%} of {tokens.count} tokens of held-out answers right "
            f"and the pruned one {tokens.pruned:.1%}: lower `pruning_ratio`, or {remedy}"
        )
    is_pruned = mask.pruning_ratio or mask.value_pruning_ratio
    if is_pruned and not loss > _NO_DIFFERENCE * magnitude:
        windows, mean = recipe.windows, loss / recipe.held_out_samples
        yield (
            f"pruning changes nothing in held-out answers (distillation {mean:.0e}): what is pruned does "
            "not reach them; see the chat template, and that most samples are longer than the "
            f"{windows.sink_size + windows.recent_size} tokens of sink and recent window (`data.min_length`)"
        )


def _judge_ends(records: Sequence[StepRecord], ratio: float) -> Iterator[str]:
    """Compare how stages 1 and 2 ended, each by its last fifth."""
    ends = []
    for stage in (1, 2):
        losses = [
            record.distillation
            for record in records
            if record.stage == stage and record.pruning_ratio_asked in (None, ratio)
        ]
        ends += [median(losses[-max(1, len(losses) // 5) :])] if losses else []
    if len(ends) == 2 and ends[1] > _JUMP * ends[0]:
        yield (
            f"stage 2 ended with a loss of {ends[1]:.1e}, and stage 1 with {ends[0]:.1e}: the mask does far "
            "worse than its scaling factors; lower `pruning_ratio` or `stage2.learning_rate`, or give both "
            "stages more steps"
        )
