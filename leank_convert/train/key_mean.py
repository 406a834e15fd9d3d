"""Statistics of keys and values on a recipe's contexts, above all the mean that keys are centred by.

They are of keys after RoPE and key norms, as they are cached, and of the layers that are pruned. Letters as
in `attention`; L layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from leank_convert.data import SampleSource
from leank_convert.errors import LeanKError, NotFiniteError, out_of_memory
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
    """What was measured, on the CPU."""

    mean: Tensor  # of keys, over tokens, as a mask file holds it: float16 [L, H_kv, D]
    lowest: Tensor  # the least key of each channel, float32 [L, H_kv, D]
    highest: Tensor  # the greatest
    # The largest absolute value of each channel of V, as it is stored, float32 [L, H_kv, D].
    largest_value: Tensor
    num_tokens: int  # how many tokens were measured

    def largest_key(self, mean: Tensor | None = None) -> Tensor:
        """The largest absolute key of each channel less a mean, float32 [L, H_kv, D]; None for no mean."""
        centre = torch.zeros(()) if mean is None else mean.float()
        return torch.maximum(self.highest - centre, centre - self.lowest)


def count_contexts(recipe: Recipe) -> int:
    """How many contexts the mean of keys is measured on: of a training run about a hundredth at most."""
    if not recipe.trains:
        return _MOST_CONTEXTS
    num_contexts = Schedule(recipe).num_steps_of_data * recipe.batch_size
    return min(max(num_contexts // _CONTEXT_SHARE, 1), _MOST_CONTEXTS)


def measure_keys(
    loaded: LoadedModel,
    samples: SampleSource,
    num_contexts: int,
    *,
    ranks: Ranks | None = None,
    value_basis: Tensor | None = None,
    progress: bool = False,
) -> KeyStatistics:
    """Measure keys and values of the first contexts that a recipe trains on, by dense passes.

    Ranks share the contexts, and all get the same bits. V is measured in the directions [L, H_kv, D, D] of a
    basis that is folded into the weights, if one is given.

    Raises:
        LeanKError: If a sample cannot be drawn, memory does not suffice, or keys or values are not finite, on
            any rank.
    """
    ranks = ranks or Ranks(loaded.model.device)
    shape, num_tokens = loaded.facts.mask_shape, 0
    sums = torch.zeros(shape, dtype=torch.float64)
    extremes = torch.full((3, *shape), float("-inf"))  # of keys, of negated keys, of absolute values

    def measure(number: int) -> None:
        nonlocal num_tokens
        input_ids = samples.draw(number).prefix_ids
        with out_of_memory(
            f"a context of {len(input_ids)} tokens in model `{loaded.name}`",
            "lower `data.max_length`, or leave keys as they are by `--set key_mean=false`",
        ):
            room = StoredContext(len(input_ids), loaded.offload_context)
            context = run_context_pass(loaded.model, input_ids, room)
            for place, layer in enumerate(loaded.facts.layers):
                keys, values = (kept[0] for kept in context.load(layer))
                compute = torch.promote_types(keys.dtype, torch.float32)
                if value_basis is not None:
                    values = values.to(compute) @ value_basis[place].to(values.device, compute)
                # In single precision, whose error is a thousandth of float16's. However keys were stored,
                # they are laid out alike here: the order of a sum, and so its last bits, follows from that.
                sums[place] += keys.contiguous().sum(1, dtype=compute).cpu().double()
                lowest, highest = keys.aminmax(dim=1)
                found = torch.stack([highest, -lowest, values.abs().amax(1)]).float().cpu()
                extremes[:, place] = torch.maximum(extremes[:, place], found)
                if not bool(found.isfinite().all()):
                    raise NotFiniteError(
                        f"keys or values of model `{loaded.name}` are not finite on a context of "
                        f"{len(input_ids)} tokens"
                    )
        num_tokens += len(input_ids)

    with progress_bar(progress and ranks.is_first, "measuring keys", num_contexts) as advance:
        ranks.share(num_contexts, measure, advance)
    num_tokens = int(ranks.totals([num_tokens])[0])
    mean = (ranks.combine(sums) / num_tokens).to(torch.float16)
    if not bool(mean.isfinite().all()):
        ranks.check(
            LeanKError(
                f"the mean of keys of model `{loaded.name}` is beyond float16's numbers, which masks hold",
                hint="`--set key_mean=false` leaves keys as they are",
            )
        )
    highest, lowered, largest_value = ranks.combine(extremes, largest=True)
    return KeyStatistics(mean, -lowered, highest, largest_value, num_tokens)
