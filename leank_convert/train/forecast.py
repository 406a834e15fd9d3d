"""Forecast of a training run: steps, tokens, memory, and time by one measured context; nothing is written."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from leank_convert.architectures import ModelFacts
from leank_convert.data import SampleSource, TrainingSample
from leank_convert.device import choose_device
from leank_convert.errors import LeanKMemoryError, out_of_memory
from leank_convert.recipe import Recipe
from leank_convert.safetensors_file import DTYPE_BITS
from leank_convert.train.log import check_trackers
from leank_convert.train.loop import check_run
from leank_convert.train.model import LoadedModel, ModelFiles, find_model, load_model
from leank_convert.train.passes import BLOCK_SIZE, Student, check_layers
from leank_convert.train.ranks import Ranks
from leank_convert.train.run import Run
from leank_convert.train.scaling import initial_scaling_factors
from leank_convert.train.schedule import Schedule
from leank_convert.windows import Windows

# A context that takes less is timed several times.
_SHORT_SECONDS = 0.5
_SHORT_ROUNDS = 5


@dataclass(frozen=True)
class Forecast:
    """A run before it begins.

    Attributes:
        model: What the user called it.
        facts: Its shape.
        recipe: What will be trained.
        processes: How many share a step's contexts.
        device: The GPU's name, or the device's.
        weights: Bytes of the model on each GPU.
        context: Bytes of the longest context's keys and values on each GPU.
        working: Bytes that a layer's computation takes, as estimated.
        capacity: A GPU's bytes; None on the CPU, which is not judged.
        tokens: Of a context of mean length, with all questions and answers.
        seconds_per_context: Of a context of that length, as measured; None where it was not.
        why_unmeasured: Why not.
    """

    model: str
    facts: ModelFacts
    recipe: Recipe
    processes: int
    device: str
    weights: int
    context: int
    working: int
    capacity: int | None
    tokens: float
    seconds_per_context: float | None = None
    why_unmeasured: str | None = None

    @property
    def total(self) -> int:
        """Bytes that have to lie on each GPU."""
        return self.weights + self.context + self.working

    @property
    def fits(self) -> bool | None:
        """Whether they do; None where that is not judged."""
        return None if self.capacity is None else self.total <= self.capacity

    @property
    def seconds(self) -> float | None:
        """Time of all steps, by the process that has most contexts of each; linear in their lengths."""
        if self.seconds_per_context is None:
            return None
        schedule, contexts = Schedule(self.recipe), self.recipe.stage2.validation_contexts
        num_contexts = schedule.num_steps * -(-self.recipe.batch_size // self.processes)
        num_contexts += schedule.num_comparisons * -(-contexts // self.processes)
        return num_contexts * self.seconds_per_context

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        schedule, recipe, facts = Schedule(self.recipe), self.recipe, self.facts
        heads = len(facts.layers) * facts.num_key_value_heads
        contexts = schedule.num_steps * recipe.batch_size
        return {
            "model": self.model,
            "phases": [
                {name: getattr(phase, name) for name in ("stage", "pruning_ratio", "steps")}
                for phase in schedule.phases
            ],
            "steps": schedule.num_steps,
            "batch_size": recipe.batch_size,
            "processes": self.processes,
            "contexts": contexts,
            "questions": contexts * recipe.data.questions_per_context,
            "tokens_per_step": self.tokens * recipe.batch_size,
            "tokens": self.tokens * contexts,
            "scaling_factors": heads * facts.head_dim if "stage1" in recipe.trains else 0,
            "gates": heads if "gates" in recipe.trains else 0,
            "device": self.device,
            "memory": {
                name: getattr(self, name)
                for name in ("weights", "context", "working", "capacity", "total", "fits")
            },
            "seconds_per_context": self.seconds_per_context,
            "why_unmeasured": self.why_unmeasured,
            "seconds": self.seconds,
        }

    def render(self) -> str:
        """Lines for a person."""
        return "".join(f"{heading:<11}{text}\n" for heading, text in self._lines())

    def _lines(self) -> Iterator[tuple[str, str]]:
        facts, data, found = self.facts, self.recipe.data, self.to_dict()
        shape = f"{facts.num_hidden_layers} layers, {facts.num_key_value_heads} KV heads"
        yield "model", f"{self.model}: {shape} of {facts.head_dim} channels"
        counts = {"gates of heads": found["gates"], "scaling factors": found["scaling_factors"]}
        learned = ", ".join(f"{count:,} {name}" for name, count in counts.items() if count)
        yield "trained", f"{learned}; the weights stay as they are"
        phases = [
            f"{phase.steps:,} of {phase.name}"
            + ("" if phase.pruning_ratio is None else f" at {100 * phase.pruning_ratio:g}%")
            for phase in Schedule(self.recipe).phases
        ]
        yield "steps", f"{found['steps']:,}: {', '.join(phases) or 'nothing is trained'}"
        lengths = f"{data.min_length:,} to {data.max_length:,} tokens, answer included"
        yield "contexts", f"{self.recipe.batch_size} a step, {found['contexts']:,} in all; {lengths}"
        asked = f"{data.questions_per_context} a context, {found['questions']:,} in all"
        yield "questions", f"{asked}; tasks in turn: {', '.join(data.tasks)}"
        yield "tokens", f"{found['tokens_per_step']:,.0f} a step on average, {found['tokens']:,.0f} in all"
        stored = "one layer" if self.recipe.offload_context else f"{data.max_length:,} tokens"
        yield (
            "memory",
            f"weights {_gigabytes(self.weights)} + K/V of {stored} {_gigabytes(self.context)} + "
            f"working room {_gigabytes(self.working)} = {_gigabytes(self.total)}",
        )
        if self.capacity is None:
            yield "", f"not judged: `{self.device}` is no GPU"
        elif self.fits:
            yield "", f"fits: {self.device} has {_gigabytes(self.capacity)}"
        else:
            yield "", f"DOES NOT FIT: {self.device} has {_gigabytes(self.capacity)}; {self._remedy()}"
        if self.seconds is None:
            yield "time", f"not estimated: {self.why_unmeasured}"
        else:
            shared = "" if self.processes == 1 else f" with {self.processes} processes"
            pace = f"{self.seconds_per_context:.2f} s a context of {self.tokens:,.0f} tokens"
            yield "time", f"{describe_seconds(self.seconds)}{shared}, at {pace}, as measured here"

    def _remedy(self) -> str:
        """What to change first."""
        room = (self.capacity or 0) - self.weights - self.working
        if not self.recipe.offload_context and room >= self.context / self.facts.num_cached_layers:
            return "`--set offload_context=true` keeps K/V in host memory"
        if self.recipe.model.device_map is None:
            return "`--set model.device_map=auto` spreads weights and K/V over all GPUs"
        return "lower `data.max_length`, or take more GPUs"


def forecast(model: str | Path, recipe: Recipe, *, device: str | torch.device | None = None) -> Forecast:
    """Forecast a run, and measure one step of it if the model fits.

    Args:
        model: As for training.
        recipe: What would be trained.
        device: As for training.

    Raises:
        LeanKError: As training would before its first step.
    """
    chosen = choose_device(device)
    ranks = Ranks(chosen, num_ranks=int(os.environ.get("WORLD_SIZE", "1")))
    check_run(recipe, ranks)
    check_trackers(recipe.trackers)
    files = find_model(model, recipe)
    check_layers(files.facts, files.name)
    found = Forecast(
        model=files.name,
        facts=files.facts,
        recipe=recipe,
        processes=ranks.num_ranks,
        device=torch.cuda.get_device_name(chosen) if chosen.type == "cuda" else str(chosen),
        **count_bytes(files, recipe, chosen),
        tokens=(recipe.data.min_length + recipe.data.max_length) / 2,
    )
    if found.capacity is not None and found.weights + found.working > found.capacity:
        return replace(found, why_unmeasured="the weights do not fit, so nothing was measured")
    try:
        loaded = load_model(files, recipe, chosen)
        run = Run(recipe, loaded, ranks, {})  # refuses what no channels can be selected by
        samples = _draw_mean_samples(loaded, recipe)
        found = replace(found, tokens=sum(sample.num_tokens for sample in samples) / len(samples))
        with out_of_memory("a step", "see above"):
            return replace(found, seconds_per_context=_time_context(run, samples[0], chosen))
    except LeanKMemoryError as error:
        return replace(found, why_unmeasured=str(error))


def count_bytes(files: ModelFiles, recipe: Recipe, device: torch.device) -> dict[str, Any]:
    """What a GPU has to hold, by the model's headers, and what it can: the fields of a `Forecast`."""
    facts = files.facts
    tensors = [tensor for header in files.checkpoint.shards.values() for tensor in header.tensors.values()]
    stored_bytes = DTYPE_BITS[max(tensors, key=lambda tensor: tensor.num_bytes).dtype] // 8
    dtype = facts.dtype if recipe.model.dtype == "auto" else recipe.model.dtype
    element_bytes = stored_bytes if dtype is None else getattr(torch, dtype).itemsize
    weights = files.checkpoint.num_data_bytes // stored_bytes * element_bytes
    per_token = 2 * facts.num_cached_layers * facts.num_key_value_heads * facts.head_dim * element_bytes
    context = per_token * recipe.data.max_length
    # The MLP's gate, its activation and the product with up, beside the residual and its norm.
    mlp = int(files.config.get("intermediate_size") or 4 * facts.hidden_size)
    working = min(BLOCK_SIZE, recipe.data.max_length) * (3 * mlp + 2 * facts.hidden_size) * element_bytes
    spread = recipe.model.device_map == "auto" and device.type == "cuda"
    num_gpus = torch.cuda.device_count() if spread else 1
    return {
        "weights": -(-weights // num_gpus),
        "context": context // facts.num_cached_layers if recipe.offload_context else -(-context // num_gpus),
        "working": working,
        "capacity": torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None,
    }


def _draw_mean_samples(loaded: LoadedModel, recipe: Recipe) -> list[TrainingSample]:
    """A sample of every task, of the mean length of the recipe's."""
    length = (recipe.data.min_length + recipe.data.max_length) // 2
    data = recipe.data.model_copy(update={"min_length": length, "max_length": length})
    source = SampleSource(loaded.tokenizer, data, recipe.seed)
    source.check()
    return [source.draw(index) for index in range(len(data.tasks))]


def _time_context(run: Run, sample: TrainingSample, device: torch.device) -> float:
    """Wall-clock seconds of a sample's loss and gradient, after what warms up."""
    gradients = run.gradients
    windows = Windows(run.recipe.windows.sink_size, run.recipe.windows.recent_size)
    factors = initial_scaling_factors(run.loaded.facts, device)

    def measure() -> float:
        began = time.perf_counter()
        gradients.add(sample, Student(windows, factors), 1.0).item()  # waits for the device
        for index in range(torch.cuda.device_count()):
            torch.cuda.synchronize(index)
        return time.perf_counter() - began

    for _ in range(2 if gradients.captures else 1):
        measure()
    seconds = [measure()]
    while seconds[0] < _SHORT_SECONDS and len(seconds) < _SHORT_ROUNDS:
        seconds.append(measure())
    return median(seconds)


def describe_seconds(seconds: float) -> str:
    """A time as `1 h 24 min`, `18 min` or `4.2 s`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min"


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e8 else f"{count / 1e6:,.1f} MB"
