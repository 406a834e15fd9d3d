"""What a run will take, worked out before it: steps, tokens, memory of a GPU, and time by a measured pace."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from leank_convert.architectures import ModelFacts
from leank_convert.recipe import Recipe
from leank_convert.train.schedule import Schedule

_GB = 1e9
# `data.max_length` is proposed in multiples of this.
_LENGTH_STEP = 1024


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes that training holds on each GPU at the longest context.

    Attributes:
        weights: The model's, or the GPU's share of them.
        context: Stored keys and values, or the GPU's share; of one layer where they wait in host memory.
        host_context: Stored keys and values in host memory.
        working: Room for what a layer computes.
        is_measured: Whether `working` was, and not estimated.
        capacity: The GPU's bytes; None on the CPU, which is not judged.
    """

    weights: int
    context: int
    host_context: int
    working: int
    is_measured: bool
    capacity: int | None

    @property
    def total(self) -> int:
        """All that has to lie on the GPU."""
        return self.weights + self.context + self.working

    @property
    def fits(self) -> bool | None:
        """Whether it does; None where that is not judged."""
        return None if self.capacity is None else self.total <= self.capacity


@dataclass(frozen=True)
class Pace:
    """Seconds of one context, as measured: a prefill takes `linear`·P + `quadratic`·P² for P tokens.

    Attributes:
        prefills: Tokens and seconds of the prefills that were timed.
        linear: Seconds a token.
        quadratic: Seconds a squared token.
        answers: Seconds of all passes over questions and answers, whatever the context.
    """

    prefills: tuple[tuple[int, float], ...]
    linear: float
    quadratic: float
    answers: float

    def mean_prefill(self, shortest: int, longest: int) -> float:
        """Mean seconds of a prefill whose length is uniform over a range."""
        mean = (shortest + longest) / 2
        mean_square = (shortest**2 + shortest * longest + longest**2) / 3
        return self.linear * mean + self.quadratic * mean_square

    def mean_context(self, shortest: int, longest: int) -> float:
        """Mean seconds of a context with its questions."""
        return self.mean_prefill(shortest, longest) + self.answers


@dataclass(frozen=True)
class RunPlan:
    """A run before it begins.

    Attributes:
        model: What the user called it.
        facts: Its shape.
        recipe: What will be trained.
        num_processes: Processes that share a step's contexts.
        extra_tokens: Mean tokens of a context's further questions and answers, beyond its first.
        memory: Of each GPU.
        device: The GPU's name, or the device's.
        pace: As measured; None where it was not.
        why_unmeasured: Why not.
    """

    model: str
    facts: ModelFacts
    recipe: Recipe
    num_processes: int
    extra_tokens: float
    memory: MemoryNeed
    device: str
    pace: Pace | None
    why_unmeasured: str | None = None

    @property
    def num_steps(self) -> int:
        """Optimizer steps of all stages."""
        return Schedule(self.recipe).num_steps

    @property
    def num_contexts(self) -> int:
        """Contexts of all steps."""
        return self.num_steps * self.recipe.batch_size

    @property
    def num_questions(self) -> int:
        """Questions on all contexts."""
        return self.num_contexts * self.recipe.data.questions_per_context

    @property
    def num_factors(self) -> int:
        """Scaling factors: L·H_kv·D, or none where whole heads are chosen."""
        facts = self.facts
        per_head = 0 if self.recipe.keeps_whole_heads else facts.head_dim
        return facts.num_hidden_layers * facts.num_key_value_heads * per_head

    @property
    def num_gates(self) -> int:
        """Gates that are learned: L·H_kv or none."""
        return self.facts.num_hidden_layers * self.facts.num_key_value_heads * self.recipe.learns_gates

    @property
    def tokens_per_step(self) -> float:
        """Mean tokens that the model runs in a step, all processes together."""
        data = self.recipe.data
        return self.recipe.batch_size * ((data.min_length + data.max_length) / 2 + self.extra_tokens)

    @property
    def seconds(self) -> float | None:
        """Time of all steps, by the process that has most contexts of each; None if no pace was measured."""
        if self.pace is None:
            return None
        data = self.recipe.data
        per_process = -(-self.recipe.batch_size // self.num_processes)
        return self.num_steps * per_process * self.pace.mean_context(data.min_length, data.max_length)

    def remedies(self) -> list[str]:
        """What to change so that it fits, where it does not."""
        memory, facts = self.memory, self.facts
        if memory.fits is not False or memory.capacity is None:
            return []
        found = []
        room = memory.capacity - memory.weights - memory.working
        if not self.recipe.offload_context and room >= memory.context / facts.num_hidden_layers:
            found.append("`--set offload_context=true` keeps K/V in host memory")
        data = self.recipe.data
        length = int(room / memory.context * data.max_length) // _LENGTH_STEP * _LENGTH_STEP
        if not self.recipe.offload_context and length >= max(data.min_length, _LENGTH_STEP):
            found.append(f"`--set data.max_length={length}` fits")
        if self.recipe.model.device_map is None:
            found.append("`--set model.device_map=auto` spreads weights and K/V over all GPUs")
        else:
            found.append("more GPUs, or larger ones")
        return found

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        memory, pace = self.memory, self.pace
        return {
            "model": self.model,
            "phases": [
                {"stage": phase.stage, "pruning_ratio": phase.pruning_ratio, "steps": phase.steps}
                for phase in Schedule(self.recipe).phases
            ],
            "steps": self.num_steps,
            "batch_size": self.recipe.batch_size,
            "processes": self.num_processes,
            "contexts": self.num_contexts,
            "min_length": self.recipe.data.min_length,
            "max_length": self.recipe.data.max_length,
            "questions_per_context": self.recipe.data.questions_per_context,
            "questions": self.num_questions,
            "tokens_per_step": self.tokens_per_step,
            "tokens": self.tokens_per_step * self.num_steps,
            "scaling_factors": self.num_factors,
            "gates": self.num_gates,
            "device": self.device,
            "memory": {**asdict(memory), "total": memory.total, "fits": memory.fits},
            "remedies": self.remedies(),
            "pace": None if pace is None else asdict(pace),
            "why_unmeasured": self.why_unmeasured,
            "seconds": self.seconds,
        }

    def render(self) -> str:
        """Lines for a person."""
        return "".join(f"{heading:<11}{text}\n" for heading, text in self._lines())

    def _lines(self) -> Iterator[tuple[str, str]]:
        facts, recipe, data, memory = self.facts, self.recipe, self.recipe.data, self.memory
        yield (
            "model",
            f"{self.model}: {facts.num_hidden_layers} layers, {facts.num_key_value_heads} KV heads of "
            f"{facts.head_dim} channels",
        )
        learned = [f"{self.num_gates:,} gates of heads"] if recipe.learns_gates else []
        if not recipe.keeps_whole_heads:
            learned.append(f"{self.num_factors:,} scaling factors")
        yield "trained", f"{', '.join(learned)}; the weights stay as they are"
        phases = [
            f"{phase.steps:,} of {phase.name}"
            + ("" if phase.pruning_ratio is None else f" at {100 * phase.pruning_ratio:g}%")
            for phase in Schedule(recipe).phases
        ]
        yield "steps", f"{self.num_steps:,}: " + (", ".join(phases) or "nothing is trained")
        lengths = f"{data.min_length:,} to {data.max_length:,} tokens, uniform"
        yield (
            "contexts",
            f"{recipe.batch_size} a step, {self.num_contexts:,} in all; {lengths}, answer included",
        )
        tasks = ", ".join(data.tasks)
        yield (
            "questions",
            f"{data.questions_per_context} a context, {self.num_questions:,} in all; tasks in turn: {tasks}",
        )
        total = self.tokens_per_step * self.num_steps
        in_all = f"{total / 1e6:,.1f} million" if total >= 1e6 else f"{total:,.0f}"
        yield "tokens", f"{self.tokens_per_step:,.0f} a step on average, {in_all} in all"
        how = "measured" if memory.is_measured else "estimated"
        stored = "K/V of one layer" if recipe.offload_context else f"K/V of {data.max_length:,} tokens"
        yield (
            "memory",
            ("" if memory.capacity is None else "per GPU: ")
            + f"weights {_gigabytes(memory.weights)} + {stored} {_gigabytes(memory.context)} + "
            f"working room {_gigabytes(memory.working)} ({how}) = {_gigabytes(memory.total)}",
        )
        if memory.host_context:
            yield "", f"host: K/V of {data.max_length:,} tokens {_gigabytes(memory.host_context)}"
        yield from (("", line) for line in self._verdict())
        yield from (("time" if place == 0 else "", line) for place, line in enumerate(self._time()))

    def _verdict(self) -> Iterator[str]:
        memory = self.memory
        if memory.capacity is None:
            yield f"not judged: `{self.device}` is no GPU"
        elif memory.fits:
            yield f"fits: {self.device} has {_gigabytes(memory.capacity)}"
        else:
            yield f"DOES NOT FIT: {self.device} has {_gigabytes(memory.capacity)}; what helps:"
            yield from (f"  {remedy}" for remedy in self.remedies())

    def _time(self) -> Iterator[str]:
        if self.pace is None or self.seconds is None:
            yield f"not estimated: {self.why_unmeasured}"
            return
        data = self.recipe.data
        shared = "" if self.num_processes == 1 else f" with {self.num_processes} processes"
        yield f"{describe_seconds(self.seconds)}{shared}, by this device's measured pace"
        timed = ", ".join(f"{seconds:.2f} s at {tokens:,} tokens" for tokens, seconds in self.pace.prefills)
        yield f"prefill {timed}"
        yield (
            f"on average {self.pace.mean_prefill(data.min_length, data.max_length):.2f} s, and "
            f"{self.pace.answers:.2f} s for questions and answers"
        )


def fit_pace(prefills: Sequence[tuple[int, float]], answers: float) -> Pace:
    """Fit linear and quadratic time through one or two timed prefills; neither part is ever negative.

    Args:
        prefills: Tokens and seconds, shortest first.
        answers: Seconds of the passes over questions and answers.
    """
    (first, first_seconds), (last, last_seconds) = prefills[0], prefills[-1]
    linear, quadratic = last_seconds / last, 0.0
    if last > first:
        quadratic = (last_seconds / last - first_seconds / first) / (last - first)
        linear = first_seconds / first - quadratic * first
    if quadratic < 0:
        linear, quadratic = last_seconds / last, 0.0
    elif linear < 0:
        linear, quadratic = 0.0, last_seconds / last**2
    return Pace(tuple(prefills), linear, quadratic, answers)


def need_memory(
    facts: ModelFacts,
    config: Mapping[str, Any],
    recipe: Recipe,
    *,
    weight_bytes: int,
    element_bytes: int,
    block_size: int,
    num_gpus: int = 1,
    capacity: int | None = None,
    measured_working: int | None = None,
) -> MemoryNeed:
    """Work out what a GPU has to hold.

    Args:
        facts: The model's shape.
        config: Its config.json, for the width of its MLP.
        recipe: Longest context, and where it waits.
        weight_bytes: Of the whole model in the dtype it is trained in.
        element_bytes: Of one number of that dtype.
        block_size: Tokens of a context that run at a time.
        num_gpus: GPUs that share layers evenly; 1 where each process has the whole model.
        capacity: A GPU's bytes.
        measured_working: Room that a step was seen to take beside weights and K/V; None to estimate it.
    """
    numbers = 2 * facts.num_hidden_layers * facts.num_key_value_heads * facts.head_dim
    stored = numbers * element_bytes * recipe.data.max_length
    working = measured_working
    if working is None:
        # The MLP's gate, its activation and the product with up, beside the residual and its norm.
        per_token = 3 * int(config.get("intermediate_size") or 4 * facts.hidden_size) + 2 * facts.hidden_size
        working = min(block_size, recipe.data.max_length) * per_token * element_bytes
    offload = recipe.offload_context
    return MemoryNeed(
        weights=-(-weight_bytes // num_gpus),
        context=stored // facts.num_hidden_layers if offload else -(-stored // num_gpus),
        host_context=stored if offload else 0,
        working=working,
        is_measured=measured_working is not None,
        capacity=capacity,
    )


def describe_seconds(seconds: float) -> str:
    """A time as `1 h 24 min`, `18 min` or `4.2 s`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min"


def _gigabytes(count: int) -> str:
    return f"{count / _GB:,.1f} GB" if count >= _GB / 10 else f"{count / 1e6:,.1f} MB"
