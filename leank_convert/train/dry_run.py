"""A run's plan with its pace measured on the device: the model is loaded, nothing is trained or written."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch

from leank_convert.architectures import ModelFacts
from leank_convert.checkpoint_io import Checkpoint
from leank_convert.data import SampleSource, TrainingSample
from leank_convert.device import choose_device
from leank_convert.errors import first_line
from leank_convert.recipe import Recipe
from leank_convert.safetensors_file import DTYPE_BYTES
from leank_convert.train.journal import check_trackers
from leank_convert.train.loop import check_run
from leank_convert.train.passes import BLOCK_SIZE, run_context_pass
from leank_convert.train.plan import MemoryNeed, Pace, RunPlan, fit_pace, need_memory
from leank_convert.train.ranks import Ranks
from leank_convert.train.run import Run
from leank_convert.train.scaling import initial_scaling_factors
from leank_convert.train.step import Student, distil
from leank_convert.train.subject import Subject, find_model, load_subject
from leank_convert.windows import Windows

# The longest context that is timed, as a multiple of the recipe's shortest: it tells what grows with the
# square, in seconds rather than minutes.
_LONGEST_MULTIPLE = 4
_SHORT_SECONDS = 0.5
_SHORT_ROUNDS = 5


def plan_training(
    recipe: Recipe, *, device: str | torch.device | None = None, model_override: str | None = None
) -> RunPlan:
    """Plan a run and measure its pace, if the model fits.

    Args:
        recipe: What would be trained.
        device: As for training.
        model_override: A model to take instead of the recipe's: local folder or hub id.

    Raises:
        LeanKError: As training would before its first step.
    """
    chosen = choose_device(device)
    ranks = Ranks(chosen, num_ranks=int(os.environ.get("WORLD_SIZE", "1")))
    check_run(recipe, ranks)
    check_trackers(recipe.trackers)
    found = find_model(recipe, model_override)
    element_bytes, weight_bytes = _count_weights(found.checkpoint, found.facts, recipe)
    capacity, num_gpus = None, 1
    if chosen.type == "cuda":
        capacity = torch.cuda.get_device_properties(chosen).total_memory
        num_gpus = torch.cuda.device_count() if recipe.model.device_map == "auto" else 1

    def memory(measured: int | None = None) -> MemoryNeed:
        return need_memory(
            found.facts,
            found.config,
            recipe,
            weight_bytes=weight_bytes,
            element_bytes=element_bytes,
            block_size=BLOCK_SIZE,
            num_gpus=num_gpus,
            capacity=capacity,
            measured_working=measured,
        )

    need, pace, extra_tokens, why = memory(), None, 0.0, None
    if capacity is not None and need.weights + need.working > capacity:
        why = "the weights do not fit, so nothing was measured"
    else:
        try:
            subject = load_subject(recipe, chosen, model_override)
            Run(recipe, subject, ranks, {})  # refuses what no channels can be selected by
            samples = _Samples(subject, recipe)
            extra_tokens = samples.extra_tokens()
            pace, working = _measure(subject, recipe, samples, chosen)
            if working is not None and num_gpus == 1:
                need = memory(working)
        except torch.OutOfMemoryError as error:
            why = f"memory did not suffice to measure it: {first_line(error)}"
    return RunPlan(
        model=found.name,
        facts=found.facts,
        recipe=recipe,
        num_processes=ranks.num_ranks,
        extra_tokens=extra_tokens,
        memory=need,
        device=torch.cuda.get_device_name(chosen) if chosen.type == "cuda" else str(chosen),
        pace=pace,
        why_unmeasured=why,
    )


class _Samples:
    """Samples of a recipe at lengths of our choice."""

    def __init__(self, subject: Subject, recipe: Recipe) -> None:
        self._subject, self._recipe = subject, recipe
        SampleSource(subject.tokenizer, recipe.data, recipe.seed).check()

    def draw(self, length: int, index: int = 0) -> TrainingSample:
        """A sample of one length."""
        data = self._recipe.data.model_copy(update={"min_length": length, "max_length": length})
        return SampleSource(self._subject.tokenizer, data, self._recipe.seed).draw(index)

    def extra_tokens(self) -> float:
        """Mean tokens of all questions but the longest, over the tasks."""
        data = self._recipe.data
        if data.questions_per_context == 1:
            return 0.0
        drawn = [self.draw(data.min_length, index) for index in range(len(data.tasks))]
        return sum(sample.num_tokens - sample.num_positions for sample in drawn) / len(drawn)


def _count_weights(checkpoint: Checkpoint, facts: ModelFacts, recipe: Recipe) -> tuple[int, int]:
    """Bytes of a number, and of all weights, in the dtype that training loads them in."""
    tensors = [tensor for header in checkpoint.shards.values() for tensor in header.tensors.values()]
    largest = max(tensors, key=lambda tensor: tensor.num_bytes)
    named = facts.dtype if recipe.model.dtype == "auto" else recipe.model.dtype
    stored = DTYPE_BYTES.get(largest.dtype, 2)
    element_bytes = stored if named is None else getattr(torch, named).itemsize
    return element_bytes, checkpoint.num_data_bytes // stored * element_bytes


def _measure(
    subject: Subject, recipe: Recipe, samples: _Samples, device: torch.device
) -> tuple[Pace, int | None]:
    """Time prefills of two lengths and one whole loss; also the bytes it took beside weights and K/V."""
    model, offload = subject.model, recipe.offload_context
    shortest = recipe.data.min_length
    longest = min(_LONGEST_MULTIPLE * shortest, recipe.data.max_length)
    windows = Windows(recipe.windows.sink_size, recipe.windows.recent_size)

    def train(sample: TrainingSample) -> None:
        factors = initial_scaling_factors(subject.facts, device)
        distil(model, sample, Student(windows, factors), offload=offload).backward()  # type: ignore[no-untyped-call]

    def prefill(sample: TrainingSample) -> None:
        run_context_pass(model, sample.prefix_ids, offload=offload)

    prefills = []
    for length in sorted({shortest, longest}):
        sample = samples.draw(length)
        if length == shortest:
            train(sample)  # warms up
        prefills.append((len(sample.prefix_ids), _time(partial(prefill, sample))))
    before = 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    seconds = _time(partial(train, sample))
    pace = fit_pace(prefills, max(seconds - prefills[-1][1], 0.0))
    # Of less than one block, working room would be too small.
    if device.type != "cuda" or offload or longest < min(BLOCK_SIZE, recipe.data.max_length):
        return pace, None
    facts, held = subject.facts, len(sample.prefix_ids) * model.dtype.itemsize
    stored = 2 * facts.num_hidden_layers * facts.num_key_value_heads * facts.head_dim * held
    return pace, torch.cuda.max_memory_allocated(device) - before - stored


def _time(call: Callable[[], object]) -> float:
    """Wall-clock seconds of a call, every GPU waited for; of a short one the median of several."""
    seconds: list[float] = []
    while not seconds or (len(seconds) < _SHORT_ROUNDS and seconds[0] < _SHORT_SECONDS):
        _synchronize()
        began = time.perf_counter()
        call()
        _synchronize()
        seconds.append(time.perf_counter() - began)
    return median(seconds)


def _synchronize() -> None:
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            torch.cuda.synchronize(index)
