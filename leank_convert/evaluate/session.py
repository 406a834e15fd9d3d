"""Run an evaluation: prompts, answers of every variant, comparison."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

import torch

from leank_convert.checkpoint_io import read_leank_config
from leank_convert.device import choose_device
from leank_convert.errors import LeanKError
from leank_convert.evaluate.answer_log import ANSWERS_NAME, SETTINGS_NAME, AnswerLog
from leank_convert.evaluate.answering import (
    AGAINST,
    Answer,
    answer_against,
    answer_prompts,
    find_opponent,
    measure_bytes,
    out_of_memory_for,
)
from leank_convert.evaluate.benchmarks import (
    GSM_INFINITE,
    LONGBENCH,
    draw_gsm_infinite,
    draw_longbench,
)
from leank_convert.evaluate.comparison import RESULT_NAMES, CacheBytes, Comparison, write_results
from leank_convert.evaluate.evaluated import EvaluatedModel, check_length, load_evaluated, warn_of_positions
from leank_convert.evaluate.prefill import decode_token, pad_left, run_prefill
from leank_convert.evaluate.prompt import HELD_OUT_MEASURE, Prompt, held_out_prompts
from leank_convert.evaluate.ruler import RULER_MEASURE, draw_prompts
from leank_convert.evaluate.variants import PRUNED, WINDOW, Dense, Masked, Variant, find_variants
from leank_convert.files import sha256_of
from leank_convert.folders import LOCK_NAME, check_folder, locked
from leank_convert.mask import MASK_FILE_NAME, load_mask
from leank_convert.progress import progress_bar
from leank_convert.recipe import Recipe
from leank_convert.recipe_choice import require_recipe

_logger = logging.getLogger("leank_convert")

_MEASURES = {LONGBENCH: "LongBench", GSM_INFINITE: "GSM-Infinite"}

# What a model answers with: its weights, its config, the tokens that end a turn; of an ONNX folder likewise.
_DIGESTED = ("config.json", "generation_config.json", "*.safetensors", "*.bin", "leank_onnx.json", "*.onnx*")


def evaluate_checkpoint(
    checkpoint: str | Path,
    *,
    recipe: Recipe | str | Path | None = None,
    overrides: Sequence[str] = (),
    tasks: Sequence[str] = (),
    lengths: Sequence[int] = (),
    haystack: str | None = None,
    questions: str | Path | None = None,
    data: str | Path | None = None,
    num_samples: int = 200,
    seed: int = 1_000_000,
    also: Sequence[str] | None = None,
    against: str | None = None,
    out: str | Path | None = None,
    device: str | torch.device | None = None,
    batch_size: int = 8,
    trust: bool = False,
    progress: bool = False,
) -> Comparison:
    """Compare a checkpoint's pruned answers with those of its own weights in the stock class.

    Args:
        checkpoint: A folder that `export` wrote.
        recipe: Held-out samples of its data are asked: a recipe, its name or file; None for that of the
            training run beside the checkpoint, or else of its model.
        overrides: Changes to a recipe that is read from a file, `key=value`.
        tasks: RULER's tasks by name instead of a recipe's data, of which `ruler` is all; or `longbench` or
            `gsm-infinite` alone, with `data`.
        lengths: With RULER's tasks: tokens of a prompt and its answer. With `longbench` at most one; none
            for the model's positions.
        haystack: With `tasks`: running text, a .txt, .json or .jsonl file or a dataset's hub id; None for
            built-in sentences.
        questions: With the task `qa`: a .json or .jsonl file of records with `question`, `answers` and
            `documents`, or SQuAD's .json.
        data: With `longbench` or `gsm-infinite`: the folder of the published files.
        num_samples: Prompts; with `tasks`, of each task at each length.
        seed: Of the prompts; with `data` there is nothing to draw.
        also: What else answers: `window` (no pruned key at all), `think` (ThinK's choice of channels per
            prompt), `per-head-budget-dynamic` (the mask's widths with ThinK's choice), `fp8`, `int4`, or
            on the kept channels `leank+fp8`, `leank+int4`; in a checkout also published baselines, in all
            settings that are reported: `int4+hadamard`, `kivi`, `quest`, each also with `leank+` before
            it, and `snapkv`. None for `window`, and for nothing with `tasks`.
        against: What to compare with instead: a model, another checkpoint or an ONNX folder; hub id or path.
        out: Where every answer is kept as it comes, and the results; an evaluation that finds some answers
            there asks only the rest.
        device: Default: CUDA if there is any, else the CPU.
        batch_size: Prompts decoded together, padded on the left.
        trust: Whether a checkpoint's Python files may run even where they are no release's.
        progress: Whether to draw a progress bar to stderr.

    Raises:
        LeanKError: If `checkpoint` is no LeanK checkpoint or holds other code than a release's, there is no
            such recipe or task, prompts cannot be drawn for its tokenizer, all of them are too short for
            anything to be pruned, `against` has another tokenizer, `out` holds answers of another
            evaluation, or memory does not suffice.
    """
    published = _find_benchmark(tasks, lengths, data)
    if published is None and (bool(tasks) != bool(lengths) or (not tasks and (haystack or questions))):
        raise LeanKError("RULER's `tasks` and `lengths` go together, `haystack` and `questions` with them")
    if published is not None and (haystack or questions):
        raise LeanKError(f"`{published}` takes neither `haystack` nor `questions`")
    for name, value in (("num_samples", num_samples), ("batch_size", batch_size)):
        if value < 1:
            raise LeanKError(f"`{name}` is {value}, and at least 1 is needed")
    checkpoint, out = Path(checkpoint), None if out is None else Path(out)
    if out is not None:
        check_folder(out)
        _refuse_foreign_results(out)
    chosen_device = choose_device(device)
    section = None if tasks else _choose_recipe(checkpoint, recipe, overrides).data
    evaluated = load_evaluated(checkpoint, chosen_device, trust=trust)
    leank, tokenizer = evaluated.leank, evaluated.tokenizer
    if section is not None:
        measure = HELD_OUT_MEASURE
        check_length(evaluated, section.max_length, "`data.max_length`")
        prompts = held_out_prompts(tokenizer, section, num_samples=num_samples, seed=seed)
    elif published is not None and data is not None:
        measure = _MEASURES[published]
        prompts = _read_published(evaluated, published, Path(data), lengths, num_samples)
    else:
        measure = RULER_MEASURE
        check_length(evaluated, max(lengths), "`--length`")
        file = None if questions is None else Path(questions)
        prompts = draw_prompts(tokenizer, tasks, lengths, num_samples, seed, haystack, file)
    num_whole = _check_lengths(prompts, evaluated, checkpoint)
    # Before hours of answers, not after.
    opponent = None if against is None else find_opponent(against, tokenizer, trust=trust)
    if also is None:
        also = () if tasks else (WINDOW,)
    variants: list[Variant] = [Masked(PRUNED), *find_variants(also, evaluated)]
    if against is None:
        variants.insert(0, Dense(evaluated.dense))
    names = [variant.name for variant in variants]
    # Of two that ask the same prompts, each would miss what the other has answered.
    with nullcontext() if out is None else locked(out / LOCK_NAME, f"another evaluation writes to `{out}`"):
        log = AnswerLog(out, {} if out is None else _identify(checkpoint, opponent))
        longest = max(prompts, key=lambda prompt: len(prompt.input_ids))
        cache, used = _measure_cache(evaluated, longest), measure_bytes(evaluated, longest, variants)
        num_answers = len(prompts) * (len(names) + (against is not None))
        with progress_bar(progress, "answers", num_answers) as advance:

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
                answers = answer_against(opponent, tokenizer, missing, chosen_device, batch_size, trust=trust)
                keep(answers if missing else iter(()), len(prompts) - len(missing))
                names.insert(0, AGAINST)
        result = Comparison(
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
            used=used,
        )
        if out is not None:
            write_results(result, out)
        return result


def _find_benchmark(tasks: Sequence[str], lengths: Sequence[int], data: str | Path | None) -> str | None:
    """The benchmark among the tasks whose files the user brings, None for RULER's.

    Raises:
        LeanKError: If it is not the only one, comes without its files or with a length that it cannot have.
    """
    found = next((task for task in tasks if task in _MEASURES), None)
    if found is None and data is None:
        return None
    if found is None or len(set(tasks)) > 1:
        listed = ", ".join(f"`{task}`" for task in tasks) or "no task"
        raise LeanKError(
            f"published files and {listed} do not go together",
            hint="`--data` goes with `--task longbench` or `--task gsm-infinite`, each alone",
        )
    if data is None:
        raise LeanKError(
            f"task `{found}` needs the benchmark's published files", hint="name their folder by `--data`"
        )
    if found == GSM_INFINITE and lengths:
        raise LeanKError(
            f"task `{found}` takes no length: its problems have those of their files",
            hint="bring the files of the lengths that you want",
        )
    if len(set(lengths)) > 1:
        raise LeanKError(f"task `{found}` takes one length, not {list(lengths)}", hint="evaluate for each")
    return found


def _read_published(
    evaluated: EvaluatedModel, name: str, folder: Path, lengths: Sequence[int], num_samples: int
) -> list[Prompt]:
    if name == LONGBENCH:
        length = max(lengths, default=evaluated.model.config.max_position_embeddings)
        check_length(evaluated, length, "`--length`")
        return draw_longbench(evaluated.tokenizer, folder, num_samples, length)
    prompts = draw_gsm_infinite(evaluated.tokenizer, folder, num_samples)
    check_length(evaluated, max(len(prompt.input_ids) for prompt in prompts), "a prompt's length")
    return prompts


def _choose_recipe(checkpoint: Path, recipe: Recipe | str | Path | None, overrides: Sequence[str]) -> Recipe:
    if isinstance(recipe, Recipe):
        return recipe
    read_leank_config(checkpoint)  # what is no checkpoint is refused as such
    mask_file = checkpoint / MASK_FILE_NAME
    provenance = load_mask(mask_file).provenance if recipe is None and mask_file.exists() else None
    model = provenance.model if provenance else None
    return require_recipe(recipe, model, run=checkpoint, overrides=overrides)


def _refuse_foreign_results(out: Path) -> None:
    """Refuse a folder where results would replace files that no evaluation wrote."""
    if not (out / SETTINGS_NAME).exists():
        for name in (ANSWERS_NAME, *RESULT_NAMES):
            if (out / name).exists():
                raise LeanKError(
                    f"`{out / name}` was not written by `evaluate`: `{out}` has no `{SETTINGS_NAME}`",
                    hint="name another folder with --out",
                )


def _identify(checkpoint: Path, opponent: Path | None) -> dict[str, str | None]:
    """Digests of what an evaluation's answers are of."""

    def digest(folder: Path) -> str:
        return sha256_of(*(path for pattern in _DIGESTED for path in sorted(folder.glob(pattern))))[:16]

    return {"checkpoint": digest(checkpoint), "against": None if opponent is None else digest(opponent)}


def _check_lengths(prompts: Sequence[Prompt], evaluated: EvaluatedModel, checkpoint: Path) -> int:
    """How many prompts are so short that nothing of them is pruned; refuses where all are."""
    windows = evaluated.windows
    whole_size = windows.sink_size + windows.recent_size
    lengths = [len(prompt.input_ids) for prompt in prompts]
    num_whole = sum(length <= whole_size for length in lengths)
    if num_whole == len(prompts):
        raise LeanKError(
            f"nothing of any prompt would be pruned: the longest has {max(lengths)} tokens, `{checkpoint}` "
            f"keeps the first {windows.sink_size} and the last {windows.recent_size} whole",
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


def _measure_cache(evaluated: EvaluatedModel, prompt: Prompt) -> CacheBytes:
    """What the cache of one prompt holds when its first answer token has been fed."""
    with out_of_memory_for([prompt]):
        prefill = run_prefill(evaluated.model, *pad_left([prompt.input_ids], evaluated.model.device))
        cache = prefill.fork()
        _, attention_mask = decode_token(evaluated.model, cache, prefill.next_token, prefill.attention_mask)
        memory = cache.memory()
    return CacheBytes(
        num_tokens=attention_mask.shape[1],
        key_dense=memory.dense_keys,
        key_pruned=memory.keys.used,
        value_dense=memory.dense_values,
        value_pruned=memory.values.used,
    )
