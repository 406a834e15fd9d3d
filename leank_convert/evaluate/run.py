"""Run an evaluation: load, draw or read prompts, let every variant answer them, compare."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

from leank_convert.device import choose_device
from leank_convert.errors import LeanKError
from leank_convert.evaluate.answer_log import AnswerLog, writing_to
from leank_convert.evaluate.answering import (
    AGAINST,
    Answer,
    answer_against,
    answer_prompts,
    fill_caches,
    find_opponent,
)
from leank_convert.evaluate.benchmarks.gsm_infinite import draw_gsm_infinite
from leank_convert.evaluate.benchmarks.longbench import draw_longbench
from leank_convert.evaluate.comparison import CacheBytes, Comparison, UsedBytes, used_bytes, write_results
from leank_convert.evaluate.loading import EvaluatedModel, check_length, load_evaluated, warn_of_positions
from leank_convert.evaluate.names import PRUNED
from leank_convert.evaluate.prompt import Prompt, held_out_prompts
from leank_convert.evaluate.request import GSM_INFINITE, LONGBENCH, MEASURES, Evaluation, EvaluationRequest
from leank_convert.evaluate.ruler import draw_prompts
from leank_convert.evaluate.variants import Dense, Masked, Variant, find_variants
from leank_convert.files import sha256_of
from leank_convert.folders import LOCK_NAME, locked
from leank_convert.hub import resolve_model
from leank_convert.mask import resolve_mask
from leank_convert.progress import progress_bar

_logger = logging.getLogger("leank_convert")

# What a model answers with: weights, config and code, the tokens that end a turn; of an ONNX folder likewise.
_DIGESTED = (
    "config.json", "generation_config.json", "*.py", "*.safetensors", "*.bin", "leank_onnx.json", "*.onnx*"
)  # fmt: skip


def run_evaluation(evaluation: Evaluation) -> Comparison:
    """Answer prompts that have no answer yet, and compare all; raises as `evaluate_checkpoint`."""
    request = evaluation.request
    checkpoint, out = request.checkpoint, request.out
    device = choose_device(request.device)
    evaluated = load_evaluated(
        checkpoint, device, mask=request.mask, recipe=request.recipe, trust=request.trust
    )
    leank, tokenizer = evaluated.leank, evaluated.tokenizer
    prompts = _draw(evaluation, evaluated)
    num_whole = _check_lengths(prompts, evaluated, checkpoint)
    # Before hours of answers, not after.
    against = request.against
    opponent = None if against is None else find_opponent(against, tokenizer, trust=request.trust)
    variants: list[Variant] = [Masked(PRUNED), *find_variants(evaluation.also, evaluated)]
    if opponent is None:
        variants.insert(0, Dense(evaluated.dense))
    names = [variant.name for variant in variants]
    # Of two that ask the same prompts, each would miss what the other has answered.
    with nullcontext() if out is None else locked(out / LOCK_NAME, f"another evaluation writes to `{out}`"):
        log = AnswerLog(out, {} if out is None else _identify(request, opponent) | evaluated.windows.sizes)
        longest = max(prompts, key=lambda prompt: len(prompt.input_ids))
        cache, used = _measure(evaluated, longest, variants)
        num_answers = len(prompts) * (len(names) + (opponent is not None))
        with progress_bar(request.progress, "answers", num_answers) as advance:

            def keep(batches: Iterator[list[Answer]], num_found: int) -> None:
                advance(num_found)
                for answers in batches:
                    log.add(answers)
                    advance(len(answers))

            missing = log.missing(prompts, names)
            found = (len(prompts) - len(missing)) * len(names)
            keep(answer_prompts(evaluated, missing, variants, batch_size=request.batch_size), found)
            if opponent is not None:
                del evaluated, variants  # one model's weights at a time
                missing = log.missing(prompts, [AGAINST])
                answers = answer_against(
                    opponent, tokenizer, missing, device, request.batch_size, trust=request.trust
                )
                keep(answers if missing else iter(()), len(prompts) - len(missing))
                names.insert(0, AGAINST)
        result = Comparison(
            checkpoint=str(checkpoint),
            baseline=names[0],
            variants=tuple(names),
            measure=MEASURES[evaluation.source],
            seed=None if evaluation.request.data is not None else evaluation.seed,
            pruning_ratio_asked=leank["pruning_ratio_asked"],
            pruning_ratio=leank["pruning_ratio"],
            num_whole=num_whole,
            outcomes=tuple(log.outcome(prompt, names) for prompt in prompts),
            cache=cache,
            used=used,
        )
        if out is not None:
            with writing_to(out):
                write_results(result, out)
        return result


def _draw(evaluation: Evaluation, evaluated: EvaluatedModel) -> list[Prompt]:
    """Draw or read the prompts, and refuse lengths that may not fit into memory, if it can be before that."""
    asked, tokenizer = evaluation.request, evaluated.tokenizer
    num_samples, section, folder = asked.num_samples, evaluation.section, Path(asked.data or "")
    if section is not None:
        check_length(evaluated, section.max_length, "`data.max_length`")
        return held_out_prompts(tokenizer, section, num_samples=num_samples, seed=evaluation.seed)
    if evaluation.source == GSM_INFINITE:
        prompts = draw_gsm_infinite(tokenizer, folder, num_samples)
        check_length(evaluated, max(len(prompt.input_ids) for prompt in prompts), "a prompt's length")
        return prompts
    length = max(asked.lengths, default=evaluated.model.config.max_position_embeddings)
    check_length(evaluated, length, "`--length`")
    if evaluation.source == LONGBENCH:
        return draw_longbench(tokenizer, folder, num_samples, length)
    questions = None if asked.questions is None else Path(asked.questions)
    seed, haystack = evaluation.seed, asked.haystack
    return draw_prompts(tokenizer, asked.tasks, asked.lengths, num_samples, seed, haystack, questions)


def _measure(
    evaluated: EvaluatedModel, prompt: Prompt, variants: Sequence[Variant]
) -> tuple[CacheBytes, dict[str, UsedBytes]]:
    """Bytes of one prompt and its first answer token, pruned beside dense, and as each variant has them."""
    used = {}
    for name, cache in fill_caches(evaluated, prompt, variants):
        used[name] = used_bytes(cache)
        if name == PRUNED:
            memory, count = cache.memory(), len(prompt.input_ids) + 1
            keys, values = memory.keys.used, memory.values.used
            pruned = CacheBytes(count, memory.dense_keys, keys, memory.dense_values, values)
    return pruned, used


def _identify(request: EvaluationRequest, opponent: Path | None) -> dict[str, str | None]:
    """Digests of what an evaluation's answers are of."""
    checkpoint, mask = request.checkpoint, request.mask

    def digest(folder: Path) -> str:
        return sha256_of(*(path for pattern in _DIGESTED for path in sorted(folder.glob(pattern))))[:16]

    if mask is None:
        asked = {"checkpoint": digest(checkpoint)}
    else:
        asked = {"model": digest(resolve_model(str(checkpoint))), "mask": sha256_of(resolve_mask(mask))[:16]}
    return {**asked, "against": None if opponent is None else digest(opponent)}


def _check_lengths(prompts: Sequence[Prompt], evaluated: EvaluatedModel, checkpoint: Path) -> int:
    """How many prompts are so short that nothing of them or an answer is pruned; refuses where all are."""
    windows = evaluated.windows
    whole_size = windows.sink_size + windows.recent_size
    sizes = [(len(prompt.input_ids), len(prompt.input_ids) + prompt.max_new_tokens) for prompt in prompts]
    # Nothing attends to an answer's last token.
    num_whole: int = sum(read <= whole_size and ends - 1 <= windows.total for read, ends in sizes)
    if num_whole == len(prompts):
        raise LeanKError(
            f"nothing of any prompt would be pruned: the longest has {max(sizes)[0]} tokens, `{checkpoint}` "
            f"keeps the first {windows.sink_size} and the last {windows.recent_size} whole",
            hint="take longer prompts, or export with a smaller `--recent-size` or `--sink-size`",
        )
    if num_whole:
        _logger.warning(
            "%d of %d prompts have at most %d tokens, and nothing of them and their answers is pruned",
            num_whole,
            len(prompts),
            whole_size,
        )
    warn_of_positions(evaluated, max(ends for _, ends in sizes))
    return num_whole
