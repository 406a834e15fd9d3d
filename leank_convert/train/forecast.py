"""Forecast of a training run: steps, tokens, memory, and time by one measured context; nothing is written."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.filesize import decimal

from leank_convert.architectures import ModelFacts
from leank_convert.data import SampleSource, TrainingSample
from leank_convert.device import choose_device
from leank_convert.errors import LeanKError, LeanKMemoryError, out_of_memory
from leank_convert.head_layout import BytesPerToken, bytes_of, count_cache_bytes
from leank_convert.methods import STAGES
from leank_convert.recipe import Recipe
from leank_convert.tables import listing
from leank_convert.train.loop import check_run
from leank_convert.train.model import count_bytes, find_trainable, load_model
from leank_convert.train.ranks import Ranks, count_ranks
from leank_convert.train.run import Run
from leank_convert.train.scaling import ones
from leank_convert.train.schedule import Schedule
from leank_convert.train.split_attention import Student
from leank_convert.train.value_basis import NUM_CONTEXTS

# A context that takes less is timed several times.
_SHORT_SECONDS = 0.5
_SHORT_ROUNDS = 5
# No CPU is asked for a context that takes longer, by the speed of its matrix products.
_LONGEST_SECONDS = 20


@dataclass(frozen=True)
class Forecast:
    """A run before it begins."""

    model: str  # what the user called it
    facts: ModelFacts  # its shape
    recipe: Recipe  # what will be trained
    processes: int  # how many share a step's contexts
    device: str  # the GPU's name, or the device's
    memory: Mapping[str, Any]  # bytes on each GPU, as `count_bytes` gives them
    tokens: float  # of a context of mean length, with all questions and answers
    # Of a context of that length, as measured; None where it was not.
    seconds_per_context: float | None = None
    why_unmeasured: str | None = None  # why not
    kv_dtype: str | None = None  # what the cache is stored in, None for the model's own

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; the time of all steps is that of the process that has most contexts of each."""
        schedule, recipe, facts = Schedule(self.recipe), self.recipe, self.facts
        heads = len(facts.layers) * facts.num_key_value_heads
        contexts = schedule.num_steps * recipe.batch_size
        own_contexts = schedule.num_steps * -(-recipe.batch_size // self.processes)
        own_contexts += schedule.num_comparisons * -(-recipe.stage2.validation_contexts // self.processes)
        pace = self.seconds_per_context
        value_contexts = -(-NUM_CONTEXTS // self.processes) if recipe.value_pruning_ratio else 0
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
            "value_gates": heads * facts.head_dim if "values" in recipe.trains else 0,
            "device": self.device,
            "memory": dict(self.memory),
            "bytes_per_token": {str(ratio): vars(self._cache(ratio)) for ratio in recipe.pruning_ratios},
            "seconds_per_context": pace,
            "why_unmeasured": self.why_unmeasured,
            "seconds": None if pace is None else own_contexts * pace,
            "value_seconds": None if pace is None else value_contexts * pace,
        }

    def _cache(self, pruning_ratio: float) -> BytesPerToken:
        """What a pruned token takes, as far as the recipe says: heads that keep no channel of K keep no V."""
        recipe, head_dim = self.recipe, self.facts.head_dim
        unit = recipe.width_unit(head_dim)
        most = (recipe.max_width or head_dim) // unit * unit / head_dim
        heads = [[head_dim] * self.facts.num_key_value_heads] * len(self.facts.layers)
        whole = count_cache_bytes(heads, head_dim, bytes_of(self.facts.dtype), self.kv_dtype)
        keys = min(1 - pruning_ratio, most) * whole.key_pruned
        values = 1 - max(recipe.value_pruning_ratio, recipe.share_of_heads(pruning_ratio))
        return replace(whole, key_pruned=round(keys), value_pruned=round(values * whole.value_pruned))

    def render(self) -> str:
        """Lines for a person."""
        return "".join(f"{line}\n" for line in listing([*self._lines()]))

    def _lines(self) -> Iterator[tuple[str, str]]:
        facts, data, found = self.facts, self.recipe.data, self.to_dict()
        shape = f"{facts.num_hidden_layers} layers, {facts.num_key_value_heads} KV heads"
        yield "model", f"{self.model}: {shape} of {facts.head_dim} channels"
        names = {"gates": "gates of heads", "scaling_factors": "scaling factors", "value_gates": "gates of V"}
        counts = {name: found[key] for key, name in names.items()}
        learned = ", ".join(f"{count:,} {name}" for name, count in counts.items() if count)
        yield "trained", f"{learned}; the weights stay as they are"
        phases = [
            f"{phase.steps:,} of {'gates of V beside K' if phase.stage == 3 else STAGES[phase.stage]}"
            + ("" if phase.pruning_ratio is None else f" at {100 * phase.pruning_ratio:g}%")
            for phase in Schedule(self.recipe).phases
        ]
        yield "steps", f"{found['steps']:,}: {', '.join(phases) or 'nothing is trained'}"
        lengths = f"{data.min_length:,} to {data.max_length:,} tokens, answer included"
        yield "contexts", f"{self.recipe.batch_size} a step, {found['contexts']:,} in all; {lengths}"
        asked = f"{data.questions_per_context} a context, {found['questions']:,} in all"
        yield "questions", f"{asked}; tasks in turn: {', '.join(data.tasks)}"
        yield "tokens", f"{found['tokens_per_step']:,.0f} a step on average, {found['tokens']:,.0f} in all"
        for cache in map(self._cache, self.recipe.pruning_ratios):
            kept = f"K {decimal(cache.key_pruned)} + V {decimal(cache.value_pruned)}"
            less = "less {:.3g} of K and {:.3g} of V".format(*cache.removed)
            # Groups of int4 that are not full take more.
            least = "at least" if self.recipe.rounding == "budget" and self.kv_dtype != "int4" else "about"
            yield "cache", f"a pruned token {less}: {kept}, {least} {cache.saved:.1%} saved"
        stored = "one layer" if self.recipe.offload_context else f"{data.max_length:,} tokens"
        size = {name: decimal(count) for name, count in self.memory.items() if count is not None}
        yield (
            "memory",
            f"weights {size['weights']} + K/V of {stored} {size['context']} + "
            f"working room {size['working']} = {size['total']}",
        )
        if self.memory["fits"] is None:
            yield "", f"not judged: `{self.device}` is no GPU"
        elif self.memory["fits"]:
            yield "", f"fits: {self.device} has {size['capacity']}"
        else:
            yield "", f"DOES NOT FIT: {self.device} has {size['capacity']}; {self._remedy()}"
        if found["seconds"] is None:
            yield "time", f"not estimated: {self.why_unmeasured}"
        else:
            shared = "" if self.processes == 1 else f" with {self.processes} processes"
            pace = f"{self.seconds_per_context:.2f} s a context of {self.tokens:,.0f} tokens"
            yield "time", f"{_render_seconds(found['seconds'])}{shared}, at {pace}, as measured here"
        if found["value_seconds"]:
            yield "", f"before that about {_render_seconds(found['value_seconds'])} to measure the basis of V"

    def _remedy(self) -> str:
        room = self.memory["capacity"] - self.memory["weights"] - self.memory["working"]
        if not self.recipe.offload_context and room >= self.memory["context"] / self.facts.num_cached_layers:
            return "`--set offload_context=true` keeps K/V in host memory"
        if self.recipe.model.device_map is None:
            return "`--set model.device_map=auto` spreads weights and K/V over all GPUs"
        return "lower `data.max_length`, or take more GPUs"


def forecast(model: str | Path, recipe: Recipe, *, device: str | torch.device | None = None) -> Forecast:
    """Forecast a run of a model on a device, and measure one step of it if the model fits.

    Raises:
        LeanKError: As training would before its first step; if the recipe trains nothing.
    """
    chosen = choose_device(device)
    ranks = Ranks(chosen, num_ranks=count_ranks())
    check_run(recipe, ranks.num_ranks)
    if not recipe.trains:
        raise LeanKError(
            f"`method: {recipe.method}` trains nothing: there are no steps to run or to plan",
            hint="`leank-convert train` without `--dry-run` makes its mask",
        )
    files = find_trainable(model, recipe)
    memory = count_bytes(files, recipe, chosen)
    found = Forecast(
        model=files.name,
        facts=files.facts,
        recipe=recipe,
        processes=ranks.num_ranks,
        device=torch.cuda.get_device_name(chosen) if chosen.type == "cuda" else str(chosen),
        memory=memory,
        tokens=(recipe.data.min_length + recipe.data.max_length) / 2,
    )
    if memory["capacity"] is not None and memory["weights"] + memory["working"] > memory["capacity"]:
        return replace(found, why_unmeasured="the weights do not fit, so nothing was measured")
    if chosen.type == "cpu" and _product_seconds(found) > _LONGEST_SECONDS:
        slow = f"a context of {found.tokens:,.0f} tokens takes minutes on this CPU; ask where you will train"
        return replace(found, why_unmeasured=slow)
    try:
        loaded = load_model(files, recipe, chosen)
        run = Run(recipe, loaded, ranks, {})  # refuses what no channels can be selected by
        length = (recipe.data.min_length + recipe.data.max_length) // 2
        data = recipe.data.model_copy(update={"min_length": length, "max_length": length})
        source = SampleSource(loaded.tokenizer, data, recipe.seed)
        source.check()
        samples = [source.draw(index) for index in range(len(data.tasks))]
        found = replace(found, tokens=sum(sample.num_tokens for sample in samples) / len(samples))
        with out_of_memory("a step", "see above"):
            return replace(found, seconds_per_context=_time_context(run, samples[0]))
    except LeanKMemoryError as error:
        return replace(found, why_unmeasured=error.message)


def _product_seconds(found: Forecast) -> float:
    """Seconds of a context's products with the weights on the CPU, by the time of one of their dtype."""
    named = found.recipe.model.dtype
    dtype: torch.dtype = getattr(torch, (found.facts.dtype if named == "auto" else named) or "float32")
    rows, size = 512, 2048
    left, right = torch.ones(rows, size, dtype=dtype), torch.ones(size, size, dtype=dtype)
    for _ in range(2):  # the first warms up
        began = time.perf_counter()
        left @ right
        seconds = time.perf_counter() - began
    num_weights: float = found.memory["weights"] / dtype.itemsize
    return seconds / (rows * size * size) * num_weights * found.tokens


def _time_context(run: Run, sample: TrainingSample) -> float:
    gradients = run.gradients
    factors = ones(run.loaded.facts.mask_shape, run.ranks.device)
    student = Student(run.windows, factors, factors.any(-1))

    def measure() -> float:
        began = time.perf_counter()
        gradients.add(sample, student, 1.0).item()  # waits for the device
        for index in range(torch.cuda.device_count()):
            torch.cuda.synchronize(index)
        return time.perf_counter() - began

    for _ in range(2 if gradients.captures else 1):
        measure()
    seconds = [measure()]
    while seconds[0] < _SHORT_SECONDS and len(seconds) < _SHORT_ROUNDS:
        seconds.append(measure())
    return median(seconds)


def _render_seconds(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min"
