"""The training loop: two stages, one optimizer step per sample, resumable between any two."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from leank_convert.checkpoint_io import CONFIG_NAME, model_name, write_atomically
from leank_convert.data import SampleSource, TrainingSample
from leank_convert.device import choose_device
from leank_convert.errors import LeanKError
from leank_convert.mask import MASK_FILE_NAME, ChannelMask, MaskProvenance, save_mask
from leank_convert.recipe import Recipe
from leank_convert.train.attention import AnswerPass, Windows
from leank_convert.train.interruption import Interruption
from leank_convert.train.journal import Journal, StepRecord, check_trackers
from leank_convert.train.objective import distillation_loss, l1_penalty, learning_rate_factor
from leank_convert.train.passes import run_answer_pass, run_dense_pass
from leank_convert.train.plots import plot_kept_channels, plot_scaling_factors
from leank_convert.train.scaling import initial_scaling_factors, straight_through
from leank_convert.train.selection import select_channels
from leank_convert.train.state import (
    STATE_FILE_NAME,
    TrainingState,
    check_same_run,
    fingerprint_run,
    load_state,
    save_state,
)
from leank_convert.train.subject import Subject, load_subject

METHOD = "leank"

_logger = logging.getLogger("leank_convert")


@dataclass(frozen=True)
class TrainingDirectory:
    """Where a run under `out/` keeps its files.

    Args:
        out: The output folder, which later becomes the checkpoint.
    """

    out: Path

    @property
    def folder(self) -> Path:
        """Log, events, plots, recipe, state."""
        return self.out / "leank"

    @property
    def recipe(self) -> Path:
        """The resolved recipe."""
        return self.folder / "recipe.yaml"

    @property
    def state(self) -> Path:
        """The resumable state."""
        return self.folder / "state" / STATE_FILE_NAME

    @property
    def mask(self) -> Path:
        """The result."""
        return self.out / MASK_FILE_NAME


def train_mask(
    recipe: Recipe,
    out: Path,
    *,
    resume: bool = False,
    device: str | torch.device | None = None,
    progress: bool = True,
    model_override: str | None = None,
) -> ChannelMask:
    """Learn a model's channel mask (both stages of the paper) and write it to `out/channel_mask.safetensors`.

    The run's log, TensorBoard events, plots and resumable state go to `out/leank/`.

    Args:
        recipe: What to train.
        out: The output folder; created if need be.
        resume: Go on from the state in `out/leank/`, with a warning from the beginning if none was saved
            yet. A finished run just gives its mask again.
        device: Default: CUDA if there is any, else the CPU.
        progress: Whether to draw a progress bar to stderr.
        model_override: A model to train on instead of the recipe's: local folder or hub id.

    Returns:
        The mask, with its scaling factors and provenance. It is not written beside a checkpoint, whose
        `config.json` holds the digest of the one there: that is for an export to replace.

    Raises:
        LeanKError: If the recipe names a mask, `out/leank/` exists and `resume` is not given, `out` holds a
            mask of another origin, the saved state belongs to another recipe, model or data, the model
            cannot be trained on, the device cannot be used, or the loss is not finite. Also when Ctrl-C or
            SIGTERM ends the run, after the step under way and with its state saved (exit code 130 or 143).
    """
    directory = TrainingDirectory(Path(out))
    saved = _find_state(recipe, directory, resume)
    check_trackers(recipe.trackers)
    chosen = choose_device(device)
    subject = load_subject(recipe, chosen, model_override)
    samples = SampleSource(subject.tokenizer, recipe.data, recipe.seed)
    samples.check()
    run = _Run(recipe, subject, samples, chosen)
    if saved is not None:
        run.restore(saved, directory.state)
    if run.step < run.num_steps:
        _refuse_foreign_mask(directory)
    directory.state.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(directory.recipe, recipe.to_yaml().encode())
    save_state(run.state(), directory.state)
    log = Journal(directory.folder, recipe, num_steps=run.num_steps, start=run.step, progress=progress)
    with log as journal, Interruption() as ending:
        while run.step < run.num_steps and not ending.reason:
            try:
                journal.write(run.advance())
            except LeanKError:
                journal.sync()
                save_state(run.state(), directory.state)
                raise
            if run.step % recipe.save_every == 0 or run.step in (recipe.stage1.steps, run.num_steps):
                journal.sync()
                save_state(run.state(), directory.state)
        if ending.reason:
            journal.sync()
            save_state(run.state(), directory.state)
    if ending.reason:
        raise LeanKError(
            f"{ending.reason} ended the run; its state is saved in `{directory.folder}` at step {run.step} "
            f"of {run.num_steps}",
            hint="go on with it by the same command and `--resume`",
            exit_code=ending.exit_code,
        )
    mask = run.result()
    if not (directory.out / CONFIG_NAME).exists():
        save_mask(mask, directory.mask)
    plot_scaling_factors(mask, directory.folder / "scaling_factors.png")
    plot_kept_channels(mask, directory.folder / "kept_channels.png")
    return mask


def _find_state(recipe: Recipe, directory: TrainingDirectory, resume: bool) -> TrainingState | None:
    """The state to go on from, None for a fresh start; refuses what can be refused without the model."""
    if recipe.mask is not None:
        raise LeanKError(
            f"the recipe has `mask: {recipe.mask}`: nothing is to be trained",
            hint="use `leank-convert export`, or remove the key",
        )
    if directory.folder.exists() and not resume:
        raise LeanKError(
            f"`{directory.folder}` already holds a training run",
            hint="go on with it by `--resume`, or train into another folder",
        )
    if directory.state.exists():
        return load_state(directory.state)
    _refuse_foreign_mask(directory)
    if resume:
        _logger.warning("no run in `%s`; starting one", directory.out)
    return None


def _refuse_foreign_mask(directory: TrainingDirectory) -> None:
    """A run writes its mask when it is done: one that is there before is of another origin."""
    if directory.mask.exists():
        raise LeanKError(
            f"`{directory.mask}` exists and is not of a run in `{directory.out}`: training would replace it",
            hint="train into another folder, or move the mask away",
        )


class _Run:
    """The moving part: scaling factors, optimizer, step."""

    def __init__(self, recipe: Recipe, subject: Subject, samples: SampleSource, device: torch.device) -> None:
        self.recipe = recipe
        self.subject = subject
        self.samples = samples
        self.device = device
        self.num_steps = recipe.stage1.steps + recipe.stage2.steps
        self.step = 0
        self.windows = Windows(recipe.windows.sink_size, recipe.windows.recent_size)
        self.factors = initial_scaling_factors(subject.facts, device)
        self.optimizer = self._new_optimizer()
        self.channel_mask = self._select()
        self.fingerprint = fingerprint_run(recipe, subject, samples)

    def _new_optimizer(self) -> torch.optim.Adam:
        return torch.optim.Adam([self.factors], weight_decay=0.0)

    def _select(self) -> Tensor:
        return select_channels(
            self.factors,
            pruning_ratio=self.recipe.pruning_ratio,
            width_multiple=self.recipe.width_multiple,
            rounding=self.recipe.rounding,
        )

    def state(self) -> TrainingState:
        """What has to be kept to go on from here."""
        moments: Mapping[str, Tensor] = self.optimizer.state.get(self.factors, {})
        return TrainingState(self.step, self.factors, moments, self.fingerprint)

    def restore(self, state: TrainingState, path: Path) -> None:
        """Go on from a saved state.

        Raises:
            LeanKError: If it belongs to another run.
        """
        check_same_run(state.fingerprint, self.fingerprint, path)
        self.step = state.step
        with torch.no_grad():
            self.factors.copy_(state.scaling_factors)
        if state.optimizer:
            # Adam wants its step count on the CPU and its moments beside the parameter.
            self.optimizer.state[self.factors] = {
                name: value if name == "step" else value.to(self.device)
                for name, value in state.optimizer.items()
            }
        self.channel_mask = self._select()

    def advance(self) -> StepRecord:
        """Do one step.

        Raises:
            LeanKError: If the loss or its gradient is not finite; the factors are then those before the step.
        """
        began = time.perf_counter()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        in_stage1 = self.step < self.recipe.stage1.steps
        section = self.recipe.stage1 if in_stage1 else self.recipe.stage2
        step_of_stage = self.step if in_stage1 else self.step - self.recipe.stage1.steps
        if step_of_stage == 0:
            self.optimizer = self._new_optimizer()
            self.channel_mask = self._select()
        learning_rate = section.learning_rate * learning_rate_factor(step_of_stage, section.steps)
        self.optimizer.param_groups[0]["lr"] = learning_rate

        sample = self.samples.draw(self.step)
        self.optimizer.zero_grad()
        distillation = self._distillation(sample, in_stage1)
        penalty = l1_penalty(self.factors)
        l1_weight = self.recipe.stage1.l1_weight if in_stage1 else 0.0
        (distillation + l1_weight * penalty).backward()  # type: ignore[no-untyped-call]
        mean_factor = penalty.item()
        self._check_finite(distillation, sample)
        self.optimizer.step()
        with torch.no_grad():
            self.factors.clamp_(0.0, 1.0)
        self.step += 1

        before = self.channel_mask
        if not in_stage1:
            self.channel_mask = self._select()
        sees, saw = self.channel_mask.any(-1), before.any(-1)
        return StepRecord(
            step=self.step,
            stage=1 if in_stage1 else 2,
            pruning_ratio_asked=None if in_stage1 else self.recipe.pruning_ratios[0],
            task=sample.task,
            num_tokens=len(sample),
            num_answer_tokens=len(sample) - sample.answer_start,
            learning_rate=learning_rate,
            distillation=distillation.item(),
            mean_factor=mean_factor,
            pruning_ratio=None if in_stage1 else 1 - self.channel_mask.float().mean().item(),
            empty_heads=None if in_stage1 else int((~sees).sum()),
            heads_leaving=_name_heads(saw & ~sees),
            heads_entering=_name_heads(sees & ~saw),
            seconds=time.perf_counter() - began,
            gpu_bytes=torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None,
        )

    def _distillation(self, sample: TrainingSample, in_stage1: bool) -> Tensor:
        model = self.subject.model
        input_ids = sample.input_ids[None].to(self.device)
        dense = run_dense_pass(model, input_ids, sample.answer_start)
        if in_stage1:
            answer_pass = AnswerPass(dense.context, self.windows, self.factors)
        else:
            kept = straight_through(self.factors, self.channel_mask)
            answer_pass = AnswerPass(dense.context, self.windows, kept, self.channel_mask.any(-1))
        return distillation_loss(dense.hidden_states, run_answer_pass(model, input_ids, answer_pass))

    def _check_finite(self, distillation: Tensor, sample: TrainingSample) -> None:
        gradient = self.factors.grad
        if gradient is not None and bool(torch.isfinite(distillation) & torch.isfinite(gradient).all()):
            return
        raise LeanKError(
            f"step {self.step + 1}: the loss is {distillation.item()} and not finite, or its gradient is not "
            f"(task `{sample.task}`, {len(sample)} tokens); the state before this step is saved",
            hint="float16 overflows where bfloat16 and float32 do not: see `model.dtype`; else lower "
            "`learning_rate`",
            exit_code=1,
        )

    def result(self) -> ChannelMask:
        """The mask that the factors end with."""
        windows = self.recipe.windows
        return ChannelMask(
            channel_mask=self._select().cpu(),
            scaling_factors=self.factors.detach().cpu(),
            provenance=MaskProvenance.for_model(
                model_name(self.subject.name),
                self.subject.facts,
                method=METHOD,
                sink_size=windows.sink_size,
                recent_size=windows.recent_size,
                flush_size=windows.flush_size,
                pruning_ratio_asked=self.recipe.pruning_ratio,
                width_multiple=self.recipe.width_multiple,
                recipe=self.recipe.text,
                seed=self.recipe.seed,
            ),
        )


def _name_heads(chosen: Tensor) -> str:
    return " ".join(f"{layer}.{head}" for layer, head in chosen.nonzero().tolist())
