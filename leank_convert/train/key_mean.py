"""Statistics of keys and values on a recipe's contexts, above all the mean that keys are centred by.

They are of keys after RoPE and key norms, as they are cached, and of the layers that are pruned. Letters as
in `attention`; L layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from leank_convert.data import SampleSource
from leank_convert.errors import LeanKError, out_of_memory
from leank_convert.progress import progress_bar
from leank_convert.recipe import Recipe
from leank_convert.train.model import LoadedModel
from leank_convert.train.passes import run_context_pass
from leank_convert.train.ranks import Ranks
from leank_convert.train.schedule import Schedule
from leank_convert.train.split_attention import StoredContext

# A mean over thousands of tokens changes little with more of them.
_MOST_CONTEXTS = 8
# Of the contexts that a run trains on, so that measuring takes no time that counts.
_CONTEXT_SHARE = 100


@dataclass(frozen=True)
class KeyStatistics:
    """What was measured, on the CPU.

    Attributes:
        mean: Of keys, over tokens, as a mask file holds it: float16 [L, H_kv, D].
        lowest: The least key of each channel, float32 [L, H_kv, D].
        highest: The greatest.
        largest_value: The largest absolute value of each channel of V, float32 [L, H_kv, D].
        num_tokens: How many tokens were measured.
        num_contexts: Of how many contexts.
    """

    mean: Tensor
    lowest: Tensor
    highest: Tensor
    largest_value: Tensor
    num_tokens: int
    num_contexts: int

    @property
    def largest_key(self) -> Tensor:
        """The largest absolute key of each channel, less its mean, float32 [L, H_kv, D]."""
        mean = self.mean.float()
        return torch.maximum(self.highest - mean, mean - self.lowest)


def count_contexts(recipe: Recipe) -> int:
    """How many contexts the mean of keys is measured on: of a training run about a hundredth at most."""
    if not recipe.trains:
        return _MOST_CONTEXTS
    num_contexts = Schedule(recipe).num_steps * recipe.batch_size
    return min(max(num_contexts // _CONTEXT_SHARE, 1), _MOST_CONTEXTS)


def measure_keys(
    loaded: LoadedModel,
    samples: SampleSource,
    num_contexts: int,
    *,
    ranks: Ranks | None = None,
    offload: bool = False,
    progress: bool = False,
) -> KeyStatistics:
    """Measure keys and values of the first contexts that a recipe trains on, by dense passes.

    Args:
        loaded: The model.
        samples: The recipe's data.
        num_contexts: How many contexts, from the first.
        ranks: The processes that share them, all of which get the same bits; None for this one alone.
        offload: Keep a context's keys and values in host memory.
        progress: Whether to draw a progress bar to stderr.

    Raises:
        LeanKError: If a sample cannot be drawn, memory does not suffice, or keys or values are not finite, on
            any rank.
    """
    ranks = ranks or Ranks(loaded.model.device)
    sums = _Sums(loaded.facts.mask_shape)
    failure = None
    with progress_bar(progress and ranks.is_first, "measuring keys", num_contexts) as advance:
        for start in range(0, num_contexts, ranks.num_ranks):
            try:
                if failure is None and start + ranks.rank < num_contexts:
                    _measure(loaded, samples, start + ranks.rank, sums, offload)
            except LeanKError as error:
                failure = error
            advance(min(ranks.num_ranks, num_contexts - start))
    ranks.check(failure)
    sums.add_up(ranks)
    mean = (sums.keys / sums.num_tokens).to(torch.float16)
    if not bool(mean.isfinite().all()):
        ranks.check(
            LeanKError(
                f"the mean of keys of model `{loaded.name}` is beyond float16's numbers, which masks hold",
                hint="`--set key_mean=false` leaves keys as they are",
            )
        )
    highest, lowered, largest_value = sums.extremes
    return KeyStatistics(mean, -lowered, highest, largest_value, sums.num_tokens, num_contexts)


class _Sums:
    """What adds up over contexts, on the CPU.

    Attributes:
        keys: Sums of keys, float64 [L, H_kv, D].
        extremes: The greatest of keys, of negated keys and of absolute values, float32 [3, L, H_kv, D].
        num_tokens: Tokens of the contexts.
    """

    def __init__(self, shape: tuple[int, int, int]) -> None:
        self.keys = torch.zeros(shape, dtype=torch.float64)
        self.extremes = torch.full((3, *shape), float("-inf"))
        self.num_tokens = 0

    def add(self, place: int, keys: Tensor, values: Tensor) -> None:
        """Add one layer's of a context, both [H_kv, N, D]."""
        compute = torch.promote_types(keys.dtype, torch.float32)
        # In single precision, whose error is a thousandth of float16's. However keys were stored, they are
        # laid out alike here: the order of a sum, and so its last bits, follows from that.
        self.keys[place] += keys.contiguous().sum(1, dtype=compute).cpu().double()
        lowest, highest = keys.aminmax(dim=1)
        found = torch.stack([highest, -lowest, values.abs().amax(1)]).float().cpu()
        self.extremes[:, place] = torch.maximum(self.extremes[:, place], found)

    def add_up(self, ranks: Ranks) -> None:
        """Replace all by those of all ranks together."""
        if ranks.num_ranks == 1:
            return
        keys, extremes = self.keys.to(ranks.device), self.extremes.to(ranks.device)
        ranks.add_up(keys)
        ranks.take_largest(extremes)
        self.keys, self.extremes = keys.cpu(), extremes.cpu()
        (num_tokens,) = ranks.totals([self.num_tokens])
        self.num_tokens = int(num_tokens)


def _measure(loaded: LoadedModel, samples: SampleSource, index: int, sums: _Sums, offload: bool) -> None:
    input_ids = samples.draw(index).prefix_ids
    with out_of_memory(
        f"a context of {len(input_ids)} tokens in model `{loaded.name}`",
        "lower `data.max_length`, or leave keys as they are by `--set key_mean=false`",
    ):
        context = run_context_pass(loaded.model, input_ids, StoredContext(len(input_ids), offload))
        for place, layer in enumerate(loaded.facts.layers):
            keys, values = context.load(layer)
            sums.add(place, keys[0], values[0])
    if not bool(sums.extremes.isfinite().all()):
        raise LeanKError(
            f"keys or values of model `{loaded.name}` are not finite on a context of {len(input_ids)} tokens",
            hint="float16 overflows where bfloat16 and float32 do not: see `model.dtype`",
            exit_code=1,
        )
    sums.num_tokens += len(input_ids)
