"""Evaluates a checkpoint: prompts, answers of every variant, what they amount to."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from leank_convert.device import choose_device
from leank_convert.errors import LeanKError
from leank_convert.evaluate.answer_log import AnswerLog
from leank_convert.evaluate.answering import Answer, answer_prompts, memory_errors
from leank_convert.evaluate.comparison import CacheBytes, Comparison
from leank_convert.evaluate.opponent import AGAINST, answer_against, find_opponent, identify
from leank_convert.evaluate.prefill import fork, pad_left, positions_of, run_prefill
from leank_convert.evaluate.prompt import Prompt
from leank_convert.evaluate.subject import EvaluatedModel, load_evaluated, warn_of_positions
from leank_convert.evaluate.variants import PRUNED, Dense, Masked, Variant
from leank_convert.progress import progress_bar

_logger = logging.getLogger("leank_convert")


def evaluate_checkpoint(
    checkpoint: Path,
    draw_prompts: Callable[[Any], Sequence[Prompt]],
    *,
    measure: str,
    seed: int,
    others: Callable[[EvaluatedModel], Sequence[Variant]] | None = None,
    against: str | None = None,
    out: Path | None = None,
    device: str | torch.device | None = None,
    batch_size: int = 8,
    progress: bool = False,
) -> Comparison:
    """Compare a checkpoint's pruned answers with those of its own weights in the stock class.

    Args:
        checkpoint: A folder that `export` wrote.
        draw_prompts: Draws the prompts for a tokenizer.
        measure: What a score is.
        seed: Of the prompts; told with the result.
        others: More variants, which decode from the same prefill.
        against: What to compare with instead: a model, another checkpoint or an ONNX folder; hub id or path.
        out: Where every answer is kept as it comes; an evaluation that finds some there asks only the rest.
        device: Default: CUDA if there is any, else the CPU.
        batch_size: Prompts decoded together, padded on the left.
        progress: Whether to draw a progress bar to stderr.

    Returns:
        The comparison.

    Raises:
        LeanKError: If `checkpoint` is no LeanK checkpoint, prompts cannot be drawn for its tokenizer, all of
            them are too short for anything to be pruned, `against` has another tokenizer, `out` holds
            answers of another evaluation, or memory does not suffice.
    """
    chosen = choose_device(device)
    evaluated = load_evaluated(checkpoint, chosen)
    prompts = draw_prompts(evaluated.tokenizer)
    num_whole = _check_lengths(prompts, evaluated, checkpoint)
    # Before hours of answers, not after.
    opponent = None if against is None else find_opponent(against, evaluated.tokenizer)
    variants: list[Variant] = [Masked(PRUNED), *(others(evaluated) if others else ())]
    if against is None:
        variants.insert(0, Dense(evaluated.dense))
    names = [variant.name for variant in variants]
    # Reading all weights takes seconds for every 10 GB.
    compared = {} if out is None else {"checkpoint": checkpoint, "against": opponent}
    log = AnswerLog(out, {key: folder and identify(folder) for key, folder in compared.items()})
    cache = _measure_cache(evaluated, max(prompts, key=lambda prompt: len(prompt.input_ids)))
    leank, tokenizer = evaluated.leank, evaluated.tokenizer
    with progress_bar(progress, "answers", len(prompts) * (len(names) + (against is not None))) as advance:

        def keep(batches: Iterator[list[Answer]], num_found: int) -> None:
            advance(num_found)
            for answers in batches:
                log.add(answers)
                advance(len(answers))

        missing = log.missing(prompts, names)
        found = (len(prompts) - len(missing)) * len(names)
        keep(answer_prompts(evaluated, missing, variants, batch_size=batch_size), found)
        if opponent is not None:
            del evaluated, variants  # one model's weights at a time
            missing = log.missing(prompts, [AGAINST])
            batches = (
                answer_against(opponent, tokenizer, missing, chosen, batch_size) if missing else iter(())
            )
            keep(batches, len(prompts) - len(missing))
            names.insert(0, AGAINST)
    return Comparison(
        checkpoint=str(checkpoint),
        baseline=names[0],
        variants=tuple(names),
        measure=measure,
        seed=seed,
        pruning_ratio_asked=leank["pruning_ratio_asked"],
        pruning_ratio=leank["pruning_ratio"],
        num_whole=num_whole,
        outcomes=tuple(log.outcome(prompt, names) for prompt in prompts),
        cache=cache,
    )


def _check_lengths(prompts: Sequence[Prompt], evaluated: EvaluatedModel, checkpoint: Path) -> int:
    """How many prompts are so short that nothing of them is pruned; refuses where all are."""
    whole_size, leank = evaluated.whole_size, evaluated.leank
    lengths = [len(prompt.input_ids) for prompt in prompts]
    num_whole = sum(length <= whole_size for length in lengths)
    if num_whole == len(prompts):
        raise LeanKError(
            f"nothing of any prompt would be pruned: the longest has {max(lengths)} tokens, "
            f"`{checkpoint}` keeps the first {leank['sink_size']} and the last {leank['recent_size']} whole",
            hint="take longer prompts, or export with a smaller `--recent-size`",
        )
    if num_whole:
        _logger.warning(
            "%d of %d prompts have at most %d tokens, of which nothing is pruned",
            num_whole,
            len(prompts),
            whole_size,
        )
    warn_of_positions(evaluated, max(len(prompt.input_ids) + prompt.max_new_tokens for prompt in prompts))
    return num_whole


@torch.no_grad()
def _measure_cache(evaluated: EvaluatedModel, prompt: Prompt) -> CacheBytes:
    """What the cache of one prompt holds when its first answer token has been fed."""
    with memory_errors([prompt]):
        prefill = run_prefill(evaluated.model, *pad_left([prompt.input_ids], evaluated.model.device))
        cache = fork(prefill.cache)
        attention_mask = torch.cat([prefill.attention_mask, torch.ones_like(prefill.next_token)], dim=1)
        evaluated.model(
            input_ids=prefill.next_token,
            attention_mask=attention_mask,
            position_ids=positions_of(attention_mask)[:, -1:],
            past_key_values=cache,
        )
        memory = cache.memory()
    return CacheBytes(
        num_tokens=attention_mask.shape[1],
        key_dense=memory.dense_keys,
        key_pruned=memory.keys.used,
        value_dense=memory.dense_values,
        value_pruned=memory.values.used,
    )
