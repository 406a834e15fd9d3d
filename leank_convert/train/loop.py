"""The training loop: all phases of a run, resumable between any two steps, on one process or several."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from pathlib import Path

import torch

from leank_convert.data import SampleSource, SampleStream
from leank_convert.errors import LeanKError, first_line
from leank_convert.files import write_atomically
from leank_convert.mask import ChannelMask
from leank_convert.recipe import Recipe
from leank_convert.train.directory import TrainingDirectory
from leank_convert.train.head_pattern import save_pattern
from leank_convert.train.interruption import Interruption
from leank_convert.train.journal import LOG_NAME, Journal, check_trackers
from leank_convert.train.ranks import Ranks, join_ranks
from leank_convert.train.results import refuse_foreign_masks, refuse_given_mask, write_result
from leank_convert.train.run import Run
from leank_convert.train.state import TrainingState, fingerprint_run, load_state, save_state
from leank_convert.train.subject import load_subject

_logger = logging.getLogger("leank_convert")


def train_masks(
    recipe: Recipe,
    out: Path,
    *,
    resume: bool = False,
    device: str | torch.device | None = None,
    progress: bool = True,
    model_override: str | None = None,
) -> dict[Path, ChannelMask]:
    """Learn a model's masks (both stages of the paper, or gates) and write each beside its future checkpoint.

    A recipe of one pruning ratio leaves `out/channel_mask.safetensors`; one of several leaves
    `out/ratio-0.5/channel_mask.safetensors` and its like, from one stage 1. The run's log, events and
    resumable state go to `out/leank/`, and gates of heads, if the method has them, to `out/leank/heads/` in
    DuoAttention's format; a report goes to the folder `leank/` beside each mask. Started by
    `torchrun` or `accelerate launch`, all processes share the samples of a step, and the first of them
    writes.

    Args:
        recipe: What to train.
        out: The output folder; created if need be.
        resume: Go on from the state in `out/leank/`, with a warning from the beginning if none was saved
            yet. A finished run just gives its masks again.
        device: Default: CUDA if there is any, else the CPU.
        progress: Whether to draw a progress bar to stderr.
        model_override: A model to train on instead of the recipe's: local folder or hub id.

    Returns:
        By folder, the masks with their scaling factors and provenance; nothing on processes but the first.
        A mask is not written beside a checkpoint, whose `config.json` holds the digest of the one there: that
        is for an export to replace.

    Raises:
        LeanKError: If the recipe names a mask or trains nothing, `out/leank/` exists and `resume` is not
            given, a folder holds a mask of another origin, the saved state belongs to another recipe, model
            or data, the model cannot be trained on, the device cannot be used, memory does not suffice, or
            the loss is not finite. Also when Ctrl-C or SIGTERM ends the run, after the step under way and
            with its state saved (exit code 130 or 143). Processes but the first exit where that one raises.
    """
    directory = TrainingDirectory(Path(out))
    with join_ranks(device) as ranks:
        ranks.on_first(lambda: check_run(recipe, ranks))
        saved = ranks.on_first(lambda: _find_state(recipe, directory, resume))
        run, samples = ranks.on_all(lambda: _set_up(recipe, ranks, saved, directory, model_override))
        if not run.is_done:
            ranks.on_first(lambda: refuse_foreign_masks(recipe, directory))
        _train(run, samples, directory, progress)
        if not ranks.is_first:
            return {}
    masks, gates = run.masks(), run.gates
    if gates is not None:
        save_pattern(gates, recipe.windows, directory.pattern)
    return {
        result.out: write_result(masks[ratio], result, recipe, directory.folder / LOG_NAME, gates)
        for ratio, result in directory.results(recipe).items()
    }


def _set_up(
    recipe: Recipe,
    ranks: Ranks,
    saved: TrainingState | None,
    directory: TrainingDirectory,
    model_override: str | None,
) -> tuple[Run, SampleSource]:
    check_trackers(recipe.trackers)
    try:
        subject = load_subject(recipe, ranks.device, model_override)
    except torch.OutOfMemoryError as error:
        raise LeanKError(
            f"memory does not suffice for the weights of model `{model_override or recipe.model.id}`: "
            f"{first_line(error)}",
            hint="spread them over all GPUs of one process by `--set model.device_map=auto`; `--dry-run` "
            "tells what a run needs",
            exit_code=1,
        ) from error
    samples = SampleSource(subject.tokenizer, recipe.data, recipe.seed)
    samples.check()
    run = Run(recipe, subject, ranks, fingerprint_run(recipe, subject, samples))
    if saved is not None:
        run.restore(saved, directory.state)
    return run, samples


def _train(run: Run, samples: SampleSource, directory: TrainingDirectory, progress: bool) -> None:
    """Do all steps that are left; the first rank keeps log and state."""
    ranks, num_steps = run.ranks, run.schedule.num_steps
    journal = None
    with ExitStack() as stack:
        if ranks.is_first:
            directory.state.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(directory.recipe, run.recipe.to_yaml().encode())
            save_state(run.state(), directory.state)
            journal = stack.enter_context(
                Journal(directory.folder, run.recipe, num_steps=num_steps, start=run.step, progress=progress)
            )

        def save() -> None:
            if journal is not None:
                journal.sync()
                save_state(run.state(), directory.state)

        stream = stack.enter_context(SampleStream(samples, run.sample_indices()))
        ending = stack.enter_context(Interruption())
        while not run.is_done and not ranks.any(bool(ending.reason)):
            try:
                record = run.advance(stream)
            except LeanKError:
                save()
                raise
            if journal is not None:
                journal.write(record)
            if run.step % run.recipe.save_every == 0 or run.schedule.ends_phase(run.step):
                save()
        if not run.is_done:
            save()
            ended = LeanKError(
                f"{ending.reason} ended the run; its state is saved in `{directory.folder}` at step "
                f"{run.step} of {num_steps}",
                hint="go on with it by the same command and `--resume`",
                exit_code=ending.exit_code,
            )
            ranks.check(ended if ending.reason else None)


def check_run(recipe: Recipe, ranks: Ranks) -> None:
    """Refuse what can be refused without the model and a folder.

    Raises:
        LeanKError: If the recipe brings its mask or trains nothing, or cannot be shared by so many processes.
    """
    refuse_given_mask(recipe)
    if not recipe.is_trained:
        raise LeanKError(
            f"`method: {recipe.method}` trains nothing: there are no steps to run or to plan",
            hint="`leank-convert train` without `--dry-run` makes its mask",
        )
    if recipe.batch_size % ranks.num_ranks:
        raise LeanKError(
            f"`batch_size` {recipe.batch_size} cannot be shared evenly by {ranks.num_ranks} processes",
            hint=f"`--set batch_size={ranks.num_ranks}`, or a multiple; of contexts that a step has more, "
            "fewer steps are needed",
        )
    if ranks.num_ranks > 1 and recipe.model.device_map is not None:
        raise LeanKError(
            f"`model.device_map: {recipe.model.device_map}` spreads one model over all GPUs, and "
            f"{ranks.num_ranks} processes were started, each with a model of its own",
            hint="start one process, or leave `model.device_map` out",
        )


def _find_state(recipe: Recipe, directory: TrainingDirectory, resume: bool) -> TrainingState | None:
    """The state to go on from, None for a fresh start; refuses what can be refused without the model."""
    directory.check_usable(recipe, resume=resume)
    if directory.state.exists():
        return load_state(directory.state)
    refuse_foreign_masks(recipe, directory)
    if resume:
        _logger.warning("no run in `%s`; starting one", directory.out)
    return None
