"""A basis of V by what each direction weighs in attention's output, and how many directions heads keep.

What pruned tokens add to a query's output is o = sum of a_j v_j over them, a the dense softmax weights. A
projection of V is linear and passes through that sum, so the directions to keep are those in which o is
large: eigenvectors of its second moments, over contexts, their last queries and a KV head's query heads.
Letters as in `attention`; L pruned layers, G = H / H_kv.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

import torch
from torch import Tensor

from leank_convert.data import SampleSource
from leank_convert.errors import LeanKError, NotFiniteError, out_of_memory
from leank_convert.head_layout import choose_value_multiple
from leank_convert.mask import ChannelMask
from leank_convert.progress import progress_bar
from leank_convert.train.model import LoadedModel
from leank_convert.train.passes import run_context_pass
from leank_convert.train.ranks import Ranks
from leank_convert.train.selection import fill_budget
from leank_convert.train.split_attention import Pair, StoredContext
from leank_convert.value_weights import digest_values
from leank_convert.windows import Windows

# Of tasks and of text by turns: a basis of other kinds than are read costs several times as much.
NUM_CONTEXTS = 8
_NUM_QUERIES = 512
_TIE = 1e-6  # what a direction's energy counts beside its factor
_QUERIES_AT_ONCE = 128  # their weights are the largest thing there is


@dataclass(frozen=True)
class ValueBasis:
    """What was measured, on the CPU."""

    # Float32 [L, H_kv, D, D]: an orthonormal basis of V, a direction per column, those of the largest energy
    # first.
    directions: Tensor
    energies: Tensor  # float64 [L, H_kv, D]: the sum of squares of the output in each direction
    num_tokens: int  # how many tokens were measured
    weights: str  # what `digest_values` says of the model

    def prune(self, mask: ChannelMask, pruning_ratio: float, factors: Tensor | None = None) -> ChannelMask:
        """A mask with provenance that prunes V, too, a fraction of all channels of V of pruned tokens.

        Directions are ranked by their part of their layer's energy, or by learned factors [L, H_kv, D].
        """
        assert mask.provenance is not None
        layers = self.energies.sum((1, 2)).clamp(min=torch.finfo(self.energies.dtype).tiny)
        scores, directions = self.energies / layers[:, None, None], self.directions
        if factors is not None:  # many end alike
            scores = factors.cpu().double() + _TIE * scores
            order = scores.argsort(dim=-1, descending=True, stable=True)
            scores = scores.gather(-1, order)
            directions = directions.gather(-1, order[..., None, :].expand_as(directions))
        widths = choose_value_widths(scores, mask.channel_mask.any(-1), pruning_ratio)
        known = {"value_pruning_ratio_asked": pruning_ratio, "value_tokens": self.num_tokens}
        pruned = replace(mask, value_basis=directions, value_widths=widths)
        return pruned.noting(**known, value_weights=self.weights)


def choose_value_widths(scores: Tensor, sees_pruned: Tensor, pruning_ratio: float) -> Tensor:
    """Choose how many directions of V every head keeps, int32 [L, H_kv], by rank over the whole model.

    Runs of `choose_value_multiple` directions are ranked by the sum of their scores [L, H_kv, D], which fall
    within a head, and the best are kept until a further one would lower the removed fraction below the asked
    one. Heads that keep no channels of K, False in `sees_pruned` [L, H_kv], keep no V.
    """
    multiple = choose_value_multiple(scores.shape[-1])
    # str: 0.7 means seven tenths, not the double just below them.
    kept_fraction = 1 - Fraction(str(pruning_ratio))
    ranked = scores.masked_fill(~sees_pruned[..., None], -1.0)
    widths = fill_budget(ranked, kept_fraction, multiple, scores.shape[-1] // multiple)
    return widths.masked_fill(~sees_pruned, 0).int()


def measure_values(
    loaded: LoadedModel,
    samples: SampleSource,
    windows: Windows,
    *,
    ranks: Ranks | None = None,
    progress: bool = False,
) -> ValueBasis:
    """Measure a basis of V by dense passes over the first prompts of a recipe's tasks, and over plain text.

    Ranks share the contexts, and all get the same bits.

    Raises:
        LeanKError: If V cannot be pruned, a context cannot be drawn, memory does not suffice, no token is
            pruned, or outputs are not finite, on any rank.
    """
    ranks = ranks or Ranks(loaded.model.device)
    weights = ranks.on_all(lambda: digest_values(loaded.checkpoint, loaded.facts))
    sums = torch.zeros(*loaded.facts.mask_shape, loaded.facts.head_dim, dtype=torch.float64)
    num_tokens = 0

    def measure(place: int) -> None:
        nonlocal num_tokens
        # A prompt of the tasks, in turn, or at every other place text, where there is some.
        if place % 2 and samples.has_text:
            input_ids = samples.draw_text(place)
        else:
            input_ids = samples.draw(place // 2 if samples.has_text else place).prompt_ids()
        _add_moments(sums, loaded, input_ids, windows)
        num_tokens += len(input_ids)

    with progress_bar(progress and ranks.is_first, "measuring values", NUM_CONTEXTS) as advance:
        ranks.share(NUM_CONTEXTS, measure, advance)
    total = ranks.combine(sums)
    if not total.any():
        ranks.check(
            LeanKError(
                f"no context has tokens between sink and recent window, {windows.sink_size} and "
                f"{windows.recent_size} tokens, so nothing tells which directions of V matter",
                hint="raise `data.min_length`, or lower `windows.recent_size`",
            )
        )
    energies, directions = torch.linalg.eigh(total)  # the largest last
    return ValueBasis(
        directions.flip(-1).float().contiguous(),
        energies.flip(-1).clamp(min=0),
        int(ranks.totals([num_tokens])[0]),
        weights,
    )


def _add_moments(sums: Tensor, loaded: LoadedModel, input_ids: Tensor, windows: Windows) -> None:
    """Run a context [N] and add o oT of its last queries to sums, float64 [L, H_kv, D, D] on the CPU."""

    def observe(place: int, query: Tensor, stored: Pair, scaling: float, sinks: Tensor | None) -> None:
        num_heads, num_keys = stored[0].shape[1:3]
        first = max(len(input_ids) - _NUM_QUERIES, num_keys - query.shape[2])
        if first >= num_keys:  # of a block that is followed by more queries than are measured
            return
        queries = query[0, :, first - num_keys :].reshape(num_heads, -1, num_keys - first, query.shape[-1])
        logits = None if sinks is None else sinks.view(num_heads, -1)
        for head, (key, value) in enumerate(zip(*(kept[0] for kept in stored), strict=True)):
            of_head = None if logits is None else logits[head]
            for output in _pruned_outputs(queries[head], key, value, scaling, of_head, windows):
                sums[place, head] += (output.mT @ output).cpu()

    with out_of_memory(
        f"a context of {len(input_ids)} tokens in model `{loaded.name}`",
        "lower `data.max_length`, or leave V as it is: a `value_pruning_ratio` of 0",
    ):
        room = StoredContext(len(input_ids), loaded.offload_context)
        run_context_pass(loaded.model, input_ids, room, observe)
    if not bool(sums.isfinite().all()):
        raise NotFiniteError(
            f"attention's outputs in model `{loaded.name}` are not finite on a context of {len(input_ids)} "
            "tokens"
        )


def _pruned_outputs(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, sinks: Tensor | None, windows: Windows
) -> Iterator[Tensor]:
    """What pruned tokens add to the outputs of the last N of S tokens, some at a time: float64 [G·n, D].

    Queries are [G, N, D], keys and values [S, D], logits of sinks [G].
    """
    compute = torch.promote_types(query.dtype, torch.float32)
    num_queries, num_keys = query.shape[1], key.shape[0]
    key, value = key.to(compute), value.to(compute)
    j = torch.arange(num_keys, device=key.device)
    for start in range(0, num_queries, _QUERIES_AT_ONCE):
        block = query[:, start : start + _QUERIES_AT_ONCE].to(compute)
        position = j[num_keys - num_queries + start :][: block.shape[1], None]
        pruned = (j >= windows.sink_size) & (j < position - windows.recent_size)
        scores = (block * scaling @ key.mT).masked_fill_(j > position, float("-inf"))
        lse = scores.logsumexp(-1)
        if sinks is not None:
            lse = torch.logaddexp(lse, sinks.to(compute)[:, None])
        weights = scores.sub_(lse[..., None]).exp_().mul_(pruned)
        yield (weights @ value).flatten(0, 1).double()
