"""A training run between two steps: scaling factors or gates, optimizer, and the step itself."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from leank_convert.data import SampleSource, SampleStream, TrainingSample
from leank_convert.errors import LeanKError, out_of_memory
from leank_convert.mask import ChannelMask
from leank_convert.recipe import Recipe
from leank_convert.train.gates import load_pattern
from leank_convert.train.graphs import Gradients
from leank_convert.train.key_mean import count_contexts, measure_keys
from leank_convert.train.log import StepRecord, name_heads
from leank_convert.train.model import LoadedModel
from leank_convert.train.ranks import Ranks
from leank_convert.train.scaling import l1_penalty, ones, straight_through
from leank_convert.train.schedule import Phase, Schedule
from leank_convert.train.selection import load_fitting, note_origin, select_channels, select_for
from leank_convert.train.split_attention import Student
from leank_convert.train.state import TrainingState, check_same_run
from leank_convert.train.value_basis import ValueBasis, measure_values
from leank_convert.windows import Windows

_logger = logging.getLogger("leank_convert")


class Run:
    """A run between two steps, on one of the processes that share a step's samples."""

    def __init__(
        self, recipe: Recipe, loaded: LoadedModel, ranks: Ranks, fingerprint: dict[str, str]
    ) -> None:
        self.recipe = recipe
        self.loaded = loaded
        self.ranks = ranks
        self.schedule = Schedule(recipe)
        self.windows = Windows(recipe.windows.sink_size, recipe.windows.recent_size)
        every_gate = ones((*loaded.facts.mask_shape[:2], 1), ranks.device)
        # Heads whose channels are pruned, bool [L, H_kv, 1]: all of them, unless gates choose some.
        self._retrieval_heads = every_gate.bool()
        # What V is learned beside, where K is not.
        self._given = None if recipe.mask is None else load_fitting(recipe.mask, loaded)
        self._state = TrainingState(fingerprint, ones(loaded.facts.mask_shape, ranks.device))
        # Refuses a recipe that no channels can be selected by, before a step is run.
        for ratio in recipe.pruning_ratios:
            self._channel_mask = self._select(self._factors, ratio)
        if recipe.method_row.has_gates and self._given is None:
            self._choose_retrieval_heads(every_gate)  # how many heads are left does not depend on which
            if "gates" in recipe.trains:
                self._state.scaling_factors = every_gate
            else:
                self._take_gates(load_pattern(recipe, loaded.facts))
        self._optimizer = self._new_optimizer()
        self.gradients = Gradients(
            loaded.model,
            loaded.facts,
            recipe.data.max_length,
            spread=recipe.model.device_map is not None,
            offload=recipe.offload_context,
        )
        if self._given is not None and self._given.key_mean is not None:
            assert self._given.provenance is not None
            self._take_key_mean(self._given.key_mean, self._given.provenance.key_mean_tokens)

    @property
    def step(self) -> int:
        """Steps done."""
        return self._state.step

    @property
    def is_done(self) -> bool:
        """Whether no step is left."""
        return self.step >= self.schedule.num_steps

    @property
    def state(self) -> TrainingState:
        """What has to be kept to go on from here."""
        return replace(self._state, optimizer=dict(self._optimizer.state.get(self._factors, {})))

    @property
    def gates(self) -> Tensor | None:
        """Of the heads [L, H_kv, 1], on the CPU, of a run that is done; None where the method has none."""
        return None if self._state.gates is None else self._state.gates.cpu()

    def measure(self, samples: SampleSource, *, progress: bool) -> None:
        """Measure the mean of keys and the basis of V, each if it is asked for and not known yet.

        Raises as `measure_keys` and `measure_values`.
        """
        recipe, state = self.recipe, self._state
        if recipe.key_mean and state.key_mean is None and self._given is None:
            number = count_contexts(recipe)
            keys = measure_keys(self.loaded, samples, number, ranks=self.ranks, progress=progress)
            self._take_key_mean(keys.mean, keys.num_tokens)
            if self.ranks.is_first:
                _logger.info("keys are centred: their mean was measured on %d tokens", keys.num_tokens)
        if recipe.value_pruning_ratio and state.values is None:
            basis = measure_values(self.loaded, samples, self.windows, ranks=self.ranks, progress=progress)
            state.values = dict(vars(basis))

    def restore(self, state: TrainingState, path: Path) -> None:
        """Go on from a saved state; LeanKError if it is another run's, or has other gates."""
        check_same_run(state.fingerprint, self._state.fingerprint, path)
        imported, device = self._state.gates, self.ranks.device
        if state.gates is not None:
            if imported is not None and not torch.equal(imported, state.gates):
                raise LeanKError(
                    f"`heads.pattern` `{self.recipe.heads.pattern}` holds other gates than `{path}` was "
                    "begun with",
                    hint="resume with the pattern that the run began with, or train into another folder",
                )
            self._take_gates(state.gates)
        if state.key_mean is not None:
            self._take_key_mean(state.key_mean, state.key_mean_tokens)
        self._state = replace(
            state,
            scaling_factors=state.scaling_factors.detach().to(device).requires_grad_(),
            stage1_factors=None if state.stage1_factors is None else state.stage1_factors.to(device),
            finished=[factors.to(device) for factors in state.finished],
            finished_values=[factors.to(device) for factors in state.finished_values],
            best=None if state.best is None else (state.best[0], state.best[1].to(device)),
        )
        self._optimizer = self._new_optimizer()
        if state.optimizer:
            groups = self._optimizer.state_dict()["param_groups"]
            self._optimizer.load_state_dict({"state": {0: state.optimizer}, "param_groups": groups})
        if not self.is_done:
            self._channel_mask = self._channels_of(self.schedule.phase(self.step))

    def sample_indices(self) -> Iterator[int]:
        """Which samples this rank takes from here on, in order."""
        return self.schedule.sample_indices(self.step, self.ranks.rank, self.ranks.num_ranks)

    def advance(self, samples: SampleStream) -> StepRecord:
        """Do one step with this rank's samples, as `sample_indices` names them.

        Raises:
            LeanKError: If a loss or its gradient is not finite, or memory does not suffice, on any rank; the
                factors are then those before the step.
        """
        began = time.perf_counter()
        device = self.ranks.device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        phase = self.schedule.phase(self.step)
        if self.step == phase.start:
            self._begin(phase)
        learning_rate = phase.learning_rate(self.step)
        self._optimizer.param_groups[0]["lr"] = learning_rate
        self._optimizer.zero_grad()
        tasks, sums, gradients = self.ranks.on_all(lambda: self._accumulate(samples, phase))
        distillation, num_tokens, num_answers = self.ranks.totals(sums)
        # Added up in the order of samples, so that however many ranks there are, the bits are the same.
        self._factors.grad = self.ranks.in_turn(gradients).sum(0)
        penalty = l1_penalty(self._factors)
        (phase.l1_weight * penalty).backward()  # type: ignore[no-untyped-call]
        mean_factor = penalty.item()
        self._optimizer.step()
        with torch.no_grad():
            self._factors.clamp_(0.0, 1.0)
        self._state.step += 1

        before, after, validation = self._channel_mask, None, None
        if phase.stage == 2:
            after = self._channel_mask = self._channels_of(phase)
            if phase.ends_tenth(self.step):
                validation = self._compare(phase)
        if self.step == phase.stop:
            self._end(phase)
        sees, saw = self._channel_mask.any(-1), before.any(-1)
        return StepRecord(
            step=self.step,
            stage=phase.stage,
            pruning_ratio_asked=phase.pruning_ratio,
            task="+".join(dict.fromkeys(tasks)),
            num_tokens=int(num_tokens),
            num_answer_tokens=int(num_answers),
            learning_rate=learning_rate,
            distillation=distillation,
            mean_factor=mean_factor,
            pruning_ratio=None if after is None else 1 - after.float().mean().item(),
            empty_heads=None if after is None else int((~sees).sum()),
            heads_leaving=name_heads(saw & ~sees, self.loaded.facts.layers),
            heads_entering=name_heads(sees & ~saw, self.loaded.facts.layers),
            seconds=time.perf_counter() - began,
            gpu_bytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
            validation=validation,
        )

    def masks(self) -> dict[float, ChannelMask]:
        """The mask of every asked ratio, of a run that is done."""
        state = self._state
        values = None if state.values is None else ValueBasis(**state.values)
        ratios = self.recipe.pruning_ratios
        of_values: Sequence[Tensor | None] = state.finished_values or [None] * len(ratios)
        found = {}
        for ratio, learned, of_value in zip(ratios, self._learned, of_values, strict=True):
            factors = None if self.recipe.method_row.whole_heads else learned.cpu()
            chosen = self._select(learned, ratio).cpu()
            mask = self._given or ChannelMask(chosen, factors, key_mean=state.key_mean)
            mask = note_origin(mask, self.recipe, ratio, self.loaded, state.key_mean_tokens)
            if values is not None:
                mask = values.prune(mask, self.recipe.value_pruning_ratio, of_value)
            found[ratio] = mask
        return found

    @property
    def _factors(self) -> Tensor:
        return self._state.scaling_factors

    @property
    def _learned(self) -> list[Tensor]:
        """What channels of K are chosen by, for each asked ratio, once that is learned."""
        state = self._state
        unfinished = self._factors.detach() if state.stage1_factors is None else state.stage1_factors
        return state.finished or [unfinished] * len(self.recipe.pruning_ratios)

    def _channels_of(self, phase: Phase) -> Tensor:
        """The mask that a phase's steps are done with; before stage 2 none matters."""
        if phase.pruning_ratio is None:
            return self._channel_mask
        learned = self._factors
        if phase.stage == 3:
            learned = self._learned[self.recipe.pruning_ratios.index(phase.pruning_ratio)]
        return self._select(learned, phase.pruning_ratio)

    def _new_optimizer(self) -> torch.optim.Adam:
        return torch.optim.Adam([self._factors], weight_decay=0.0)

    def _select(self, learned: Tensor, pruning_ratio: float) -> Tensor:
        """The mask of scaling factors [L, H_kv, D], or of gates [L, H_kv, 1]: whole heads; a given one."""
        if self._given is not None:
            return self._given.channel_mask.to(learned.device)
        head_dim = self.loaded.facts.head_dim
        # Streaming heads come last, after factors of retrieval heads that are 0, too.
        scores = learned.detach().expand(-1, -1, head_dim).masked_fill(~self._retrieval_heads, -1.0)
        return select_for(self.recipe, scores, pruning_ratio) & self._retrieval_heads

    def _take_key_mean(self, key_mean: Tensor, num_tokens: int | None) -> None:
        self._state.key_mean, self._state.key_mean_tokens = key_mean, num_tokens
        self.gradients.key_mean = key_mean.to(self.loaded.model.device, torch.float32)

    def _take_gates(self, gates: Tensor) -> None:
        """Go on with gates that are known: to channels, if the method prunes those of the heads left."""
        self._state.gates = gates
        if self.recipe.method_row.whole_heads:
            return
        self._retrieval_heads = self._choose_retrieval_heads(gates).to(self.ranks.device)
        factors = ones(self.loaded.facts.mask_shape, self.ranks.device).detach()
        # At 0 neither loss nor penalty has a gradient, so streaming heads' factors stay there.
        self._state.scaling_factors = (factors * self._retrieval_heads).requires_grad_()
        self._optimizer = self._new_optimizer()

    def _choose_retrieval_heads(self, gates: Tensor) -> Tensor:
        """The heads whose channels are then pruned, bool [L, H_kv, 1]; all if the method ends with heads."""
        share = 0.0 if self.recipe.method_row.whole_heads else self.recipe.heads.pruning_ratio
        chosen = select_channels(gates, pruning_ratio=share, width_multiple=1, rounding=self.recipe.rounding)
        if not chosen.any():
            raise LeanKError(
                f"`heads.pruning_ratio` {share:g} leaves none of {gates.numel()} heads to choose channels of",
                hint="lower it",
            )
        return chosen

    def _begin(self, phase: Phase) -> None:
        state = self._state
        if phase.stage > 1 and state.stage1_factors is None:  # without a step of stage 1
            state.stage1_factors = self._factors.detach().clone()
        if phase.stage == 3:
            state.scaling_factors = ones(self.loaded.facts.mask_shape, self.ranks.device)
        elif state.stage1_factors is not None:
            with torch.no_grad():
                self._factors.copy_(state.stage1_factors)
        self._optimizer = self._new_optimizer()
        self._channel_mask = self._channels_of(phase)
        if phase.stage == 2:
            self._compare(phase)

    def _compare(self, phase: Phase) -> float | None:
        if not self.recipe.stage2.validation_contexts:
            return None
        loss = self._validate(self._student(phase))
        if math.isnan(loss):  # float16 overflowed: worse than any
            loss = math.inf
        if self._state.best is None or loss < self._state.best[0]:
            self._state.best = loss, self._factors.detach().clone()
        return loss

    @cached_property
    def _value_basis(self) -> Tensor:
        assert self._state.values is not None  # it is measured before the first step
        directions: Tensor = self._state.values["directions"]
        return directions.to(self.loaded.model.device)

    def _validate(self, student: Student) -> float:
        """The mean loss of a student on contexts of another seed, shared by the ranks.

        Near a high ratio one channel block more or less may decide whether a model still retrieves, and stage
        2 goes from one mask to another with every step: the last of them is as good as chance made it.
        """

        def add_up() -> float:
            with out_of_memory("a validation context", "lower `data.max_length`"):
                return sum(self.gradients.loss(sample, student).item() for sample in self._validation)

        (total,) = self.ranks.totals([self.ranks.on_all(add_up)])
        return total / self.recipe.stage2.validation_contexts

    @cached_property
    def _validation(self) -> list[TrainingSample]:
        count = self.recipe.stage2.validation_contexts
        source = SampleSource(self.loaded.tokenizer, self.recipe.data, self.recipe.validation_seed)
        return [source.draw(index) for index in range(self.ranks.rank, count, self.ranks.num_ranks)]

    def _end(self, phase: Phase) -> None:
        state, learned = self._state, self._factors.detach().clone()
        if phase.stage == 0:
            self._take_gates(learned)
        elif phase.pruning_ratio is None:
            state.stage1_factors = learned
        elif phase.stage == 3:
            state.finished_values = [*state.finished_values, learned]
        else:
            state.finished = [*state.finished, learned if state.best is None else state.best[1]]
            state.best = None

    def _accumulate(
        self, samples: SampleStream, phase: Phase
    ) -> tuple[list[str], tuple[float, float, float], Tensor]:
        """The tasks of this rank's samples, its share of the sums, each one's gradient [N, L, H_kv, D].

        The sums are the loss, the tokens and the answer tokens of the step.

        Raises:
            LeanKError: If a sample cannot be drawn, memory does not suffice, or a number is not finite.
        """
        batch_size = self.recipe.batch_size
        tasks, gradients, loss, num_tokens, num_answers = [], [], 0.0, 0, 0
        # Contexts of a comparison would take the place of one that has run ahead.
        may_compare = self.recipe.stage2.validation_contexts and phase.ends_tenth(self.step + 1)
        for _ in range(self.ranks.rank, batch_size, self.ranks.num_ranks):
            sample = next(samples)
            tasks.append(sample.task)
            num_tokens += sample.num_tokens
            num_answers += sample.num_answer_tokens
            with out_of_memory(f"step {self.step + 1}, {_describe(sample)}", self._memory_hint(sample)):
                share = self.gradients.add(sample, self._student(phase), 1 / batch_size)
            if not may_compare and (coming := samples.peek()) is not None:
                self.gradients.run_ahead(coming)
            gradients.append(self._take_gradient(share, sample))
            loss += share.item() / batch_size
        return tasks, (loss, num_tokens, num_answers), torch.stack(gradients)

    def _student(self, phase: Phase) -> Student:
        heads = self._retrieval_heads[..., 0]
        if phase.stage == 0:
            whole = self._factors.new_ones(self.loaded.facts.mask_shape)
            return Student(self.windows, whole, heads, gates=self._factors[..., 0])
        if phase.pruning_ratio is None:
            return Student(self.windows, self._factors, heads)
        sees = self._channel_mask.any(-1)
        if phase.stage == 3:
            kept = self._channel_mask.to(self._factors.dtype)
            return Student(
                self.windows, kept, sees, value_basis=self._value_basis, value_factors=self._factors
            )
        return Student(self.windows, straight_through(self._factors, self._channel_mask), sees)

    def _take_gradient(self, loss: Tensor, sample: TrainingSample) -> Tensor:
        gradient, self._factors.grad = self._factors.grad, None
        if gradient is not None and bool(torch.isfinite(loss) & torch.isfinite(gradient).all()):
            return gradient
        raise LeanKError(
            f"step {self.step + 1}: the loss is {loss.item()} and not finite, or its gradient is not "
            f"({_describe(sample)})",
            hint="train anew in another folder: float16 overflows where bfloat16 and float32 do not, see "
            "`model.dtype`; else lower `learning_rate`",
            exit_code=1,
        )

    def _memory_hint(self, sample: TrainingSample) -> str:
        ways = []  # that the saved state may go on in
        if not self.recipe.offload_context:
            ways.append("`--set offload_context=true`, which keeps the context in host memory")
        if self.recipe.model.device_map is None and torch.cuda.device_count() > 1:
            ways.append("`--set model.device_map=auto`, which spreads the model over all GPUs")
        lower = "`data.max_length`" + " or `data.questions_per_context`" * (len(sample.questions) > 1)
        go_on = f"go on from before this step by `--resume` and {', or '.join(ways)}; or " if ways else ""
        return f"{go_on}train in another folder with a lower {lower}"


def _describe(sample: TrainingSample) -> str:
    asked = "1 question" if len(sample.questions) == 1 else f"{len(sample.questions)} questions"
    return f"task `{sample.task}`, {len(sample.prefix_ids)} tokens of context, {asked}"
