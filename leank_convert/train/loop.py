"""The training loop: all phases of a run, resumable between any two steps, on one process or several."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from torch import Tensor

from leank_convert.checkpoint_io import CONFIG_NAME
from leank_convert.data import SampleSource, SampleStream
from leank_convert.errors import LeanKError
from leank_convert.files import write_atomically
from leank_convert.mask import ChannelMask, load_mask, save_mask
from leank_convert.recipe import Recipe
from leank_convert.recipe_problems import check_training
from leank_convert.report.mask_report import REPORT_NAME, write_report
from leank_convert.train.interruption import Interruption
from leank_convert.train.log import LOG_NAME, TrainingLog, read_log
from leank_convert.train.model import find_trainable, load_model
from leank_convert.train.ranks import Ranks
from leank_convert.train.run import Run
from leank_convert.train.state import (
    TrainingDirectory,
    TrainingState,
    fingerprint_run,
    load_state,
    save_state,
)

_logger = logging.getLogger("leank_convert")


def train(
    model: str | Path,
    recipe: Recipe,
    directory: TrainingDirectory,
    ranks: Ranks,
    saved: TrainingState | None,
    *,
    progress: bool = True,
) -> Run:
    """Do all steps of a recipe that trains, or all that are left of a `saved` state; return the run, done.

    Log, events and state go to the directory, by the first rank. Errors are those of
    `methods.make.train_masks`.
    """

    def set_up() -> tuple[Run, SampleSource]:
        files = find_trainable(model, recipe)
        loaded = load_model(files, recipe, ranks.device)
        samples = SampleSource(loaded.tokenizer, recipe.data, recipe.seed)
        samples.check()
        run = Run(recipe, loaded, ranks, fingerprint_run(recipe, loaded, samples))
        if saved is not None:
            run.restore(saved, directory.state)
        return run, samples

    run, samples = ranks.on_all(set_up)
    own = run.masks() if run.is_done else {}
    ranks.on_first(lambda: _refuse_foreign_masks(recipe, directory, own))
    run.measure(samples, progress=progress)
    _run_steps(run, samples, directory, progress)
    return run


def check_run(recipe: Recipe, num_ranks: int) -> None:
    """Refuse, by a LeanKError, what can be refused of a run without the model and a folder."""
    check_training(recipe)
    if num_ranks == 1:
        return
    if not recipe.trains:
        raise LeanKError(
            f"`method: {recipe.method}` trains nothing that {num_ranks} processes could share",
            hint="start one process; `--set model.device_map=auto` spreads a large model over all GPUs",
        )
    if recipe.batch_size % num_ranks:
        raise LeanKError(
            f"`batch_size` {recipe.batch_size} cannot be shared evenly by {num_ranks} processes",
            hint=f"`--set batch_size={num_ranks}`, or a multiple; of contexts that a step has more, "
            "fewer steps are needed",
        )
    if recipe.model.device_map is not None:
        raise LeanKError(
            f"`model.device_map: {recipe.model.device_map}` spreads one model over all GPUs, and "
            f"{num_ranks} processes were started, each with a model of its own",
            hint="start one process, or leave `model.device_map` out",
        )


def prepare(
    recipe: Recipe, directory: TrainingDirectory, num_ranks: int, *, resume: bool
) -> TrainingState | None:
    """Find the state to go on from, None for a fresh start; as `check_run`, and what a folder forbids.

    Raises:
        LeanKError: Also if the folder holds a run that is not to be resumed, a method without a state is, or
            there is a mask of another origin.
    """
    check_run(recipe, num_ranks)
    directory.check_usable(recipe, resume=resume)
    if directory.state.exists():
        return load_state(directory.state)
    _refuse_foreign_masks(recipe, directory, {})
    if resume:
        _logger.warning("no run in `%s`; starting one", directory.out)
    return None


def _refuse_foreign_masks(
    recipe: Recipe, directory: TrainingDirectory, own: Mapping[float, ChannelMask]
) -> None:
    """Refuse to write masks where there are others than a run's `own`, by ratio, once it is done."""
    for ratio, result in directory.results(recipe).items():
        if own and (result.out / CONFIG_NAME).exists():  # beside a checkpoint none is written
            continue
        if result.mask.exists() and not (own and own[ratio].stores_alike(load_mask(result.mask))):
            raise LeanKError(
                f"`{result.mask}` exists and is not of a run in `{directory.out}`: training would replace it",
                hint="train into another folder, or move the mask away",
            )


def _run_steps(run: Run, samples: SampleSource, directory: TrainingDirectory, progress: bool) -> None:
    ranks, num_steps = run.ranks, run.schedule.num_steps
    log = None
    with ExitStack() as stack:
        if ranks.is_first:
            directory.state.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(directory.recipe, run.recipe.to_yaml().encode())
            save_state(run.state, directory.state)
            log = stack.enter_context(
                TrainingLog(
                    directory.folder, run.recipe, num_steps=num_steps, start=run.step, progress=progress
                )
            )

        def save() -> None:
            if log is not None:
                log.sync()
                save_state(run.state, directory.state)

        stream = stack.enter_context(SampleStream(samples, run.sample_indices()))
        ending = stack.enter_context(Interruption())
        while not run.is_done and not ranks.any(ending.received is not None):
            step = run.step
            try:
                record = run.advance(stream)
            except LeanKError:
                # A step that ended in the comparison of its mask is done by half: an earlier state stands.
                if run.step == step:
                    save()
                raise
            if log is not None:
                log.write(record)
            if run.step % run.recipe.save_every == 0 or any(
                phase.stop == run.step for phase in run.schedule.phases
            ):
                save()
        if not run.is_done:
            save()
        saved = f"its state is saved in `{directory.folder}` at step {run.step} of {num_steps}"
        ranks.check(ending.error(f"the run; {saved}"))


def write_result(
    mask: ChannelMask, result: TrainingDirectory, recipe: Recipe, log_folder: Path, gates: Tensor | None
) -> None:
    """Write a mask with its recipe and report: whoever finds the checkpoint alone finds out what made it.

    A mask is not written beside a checkpoint, whose `config.json` holds the digest of the one there: that is
    for an export to replace.

    The log of its training, if it had any, is in `log_folder`; `gates` are of the heads [L, H_kv, 1], if the
    method has them.
    """
    result.folder.mkdir(parents=True, exist_ok=True)
    if not (result.out / CONFIG_NAME).exists():
        save_mask(mask, result.mask)
    write_atomically(result.recipe, recipe.to_yaml().encode())
    _warn_of_ties(mask, recipe, gates)
    write_report(mask, read_log(log_folder / LOG_NAME), result.folder / REPORT_NAME, gates)


def _warn_of_ties(mask: ChannelMask, recipe: Recipe, gates: Tensor | None) -> None:
    kept = int(mask.channel_mask.sum())
    if not kept:
        _logger.warning(
            "no head keeps a channel: only sink and recent window are seen; lower `pruning_ratio`"
        )
        return
    chosen = []
    if gates is not None and "gates" in recipe.trains:
        heads = int(mask.channel_mask.any(-1).sum())
        if not recipe.method_row.whole_heads:
            heads = round((1 - recipe.heads.pruning_ratio) * gates.numel())
        chosen.append((gates, heads, "heads", "gate", "heads", recipe.heads.l1_weight))
    if mask.scaling_factors is not None and "stage1" in recipe.trains:
        weight = recipe.stage1.l1_weight
        chosen.append((mask.scaling_factors, kept, "channels", "factor", "stage1", weight))
    for learned, number, what, name, section, weight in chosen:
        if (tied := int((learned == learned.max()).sum())) > number:
            apart = f"`{section}.l1_weight` {'above' if learned.max() > 0 else 'below'} {weight:g}"
            _logger.warning(
                "%d %s ended with the largest %s and the mask keeps %d: which of them is left to their "
                "order; %s tells them apart",
                tied,
                what,
                name,
                number,
                apart,
            )
