"""Next-token distributions on a text of the user's, dense beside pruned, token by token.

A forward pass over a text is prefill, which is dense whatever is pruned: it would find no difference at all.
So only the first tokens are prefilled; every later one, the text's own and not the model's, is fed by itself,
as a decode step on each cache.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import Cache

from leank_convert.errors import LeanKError, first_line
from leank_convert.evaluate.prefill import run_prefill
from leank_convert.evaluate.subject import EvaluatedModel, warn_of_positions
from leank_convert.evaluate.variants import Dense, Variant
from leank_convert.progress import progress_bar

NUM_BINS = 8


@dataclass(frozen=True)
class VariantLogits:
    """What one variant predicts after every fed token, beside the dense model.

    Attributes:
        name: The variant's.
        num_whole: Fed tokens, the first ones, at which nothing of the cache was pruned yet.
        divergence: KL(dense || variant) of the next token, in nats, one per fed token.
        agrees: Whether the most likely next token is the dense model's.
        nll: Negative log-likelihood of the text's next token, in nats.
    """

    name: str
    num_whole: int
    divergence: tuple[float, ...]
    agrees: tuple[bool, ...]
    nll: tuple[float, ...]


@dataclass(frozen=True)
class LogitMeans:
    """Means over some fed tokens, those at `first` to `last` of the text, counted from 0.

    Attributes:
        first: The first of them.
        last: The last of them.
        divergence: Of KL(dense || variant), in nats.
        agreement: Share whose most likely next token is the dense model's.
        dense_nll: Of the dense model's negative log-likelihood, in nats.
        nll: Of the variant's.
    """

    first: int
    last: int
    divergence: float
    agreement: float
    dense_nll: float
    nll: float

    @property
    def n(self) -> int:
        """How many."""
        return self.last - self.first + 1


@dataclass(frozen=True)
class TextComparison:
    """Predictions on one text, of which all tokens between the prefix and the last one were fed.

    Attributes:
        checkpoint: What was evaluated.
        num_tokens: Tokens of the text.
        prefix_tokens: How many of them were prefilled.
        dense_nll: The dense model's negative log-likelihood of the text's next token, one per fed token.
        variants: What was compared with it.
    """

    checkpoint: str
    num_tokens: int
    prefix_tokens: int
    dense_nll: tuple[float, ...]
    variants: tuple[VariantLogits, ...]

    def mean(self, variant: VariantLogits) -> LogitMeans:
        """Over all fed tokens."""
        return self._mean(variant, 0, len(self.dense_nll))

    def by_position(self, variant: VariantLogits, num_bins: int = NUM_BINS) -> list[LogitMeans]:
        """Over stretches of the text of equal length, to one token."""
        n = len(self.dense_nll)
        edges = [n * place // min(num_bins, n) for place in range(min(num_bins, n) + 1)]
        return [self._mean(variant, start, end) for start, end in itertools.pairwise(edges)]

    def _mean(self, variant: VariantLogits, start: int, end: int) -> LogitMeans:
        def mean(values: Sequence[float]) -> float:
            return sum(values[start:end]) / (end - start)

        return LogitMeans(
            first=self.prefix_tokens + start,
            last=self.prefix_tokens + end - 1,
            divergence=mean(variant.divergence),
            agreement=mean(variant.agrees),
            dense_nll=mean(self.dense_nll),
            nll=mean(variant.nll),
        )

    def to_dict(self) -> dict[str, Any]:
        """The comparison as JSON-ready data; logarithms are natural, positions count from 0."""
        return {
            "checkpoint": self.checkpoint,
            "num_tokens": self.num_tokens,
            "prefix_tokens": self.prefix_tokens,
            "dense_nll": list(self.dense_nll),
            "variants": {
                variant.name: {
                    "mean": _to_dict(self.mean(variant)),
                    "by_position": [_to_dict(means) for means in self.by_position(variant)],
                    "num_whole": variant.num_whole,
                    "kl": list(variant.divergence),
                    "agrees": list(variant.agrees),
                    "nll": list(variant.nll),
                }
                for variant in self.variants
            },
        }


def evaluate_text(
    evaluated: EvaluatedModel,
    text: str,
    variants: Sequence[Variant],
    *,
    prefix_tokens: int,
    max_tokens: int | None = None,
    checkpoint: str = "",
    progress: bool = False,
) -> TextComparison:
    """Compare the predictions of variants with the dense model's on a text.

    Args:
        evaluated: Its model runs the prefix, its dense model is what variants are compared with.
        text: As the checkpoint's tokenizer takes it, with the special tokens it adds.
        variants: What decodes beside the dense model.
        prefix_tokens: The first tokens, which are prefilled.
        max_tokens: Where the text is cut; None for all of it.
        checkpoint: What results call it.
        progress: Whether to draw a progress bar to stderr.

    Returns:
        The comparison.

    Raises:
        LeanKError: If the text is so short that nothing is fed, or nothing would be pruned; if memory does
            not suffice.
    """
    input_ids = evaluated.tokenizer(text, return_tensors="pt", verbose=False).input_ids[0, :max_tokens]
    num_tokens = len(input_ids)
    if not 1 <= prefix_tokens <= num_tokens - 2:
        raise LeanKError(
            f"the text has {num_tokens} tokens and `--prefix-tokens` is {prefix_tokens}: at least one is "
            "prefilled, one fed and one predicted",
            hint="lower `--prefix-tokens`" if num_tokens > 2 else "give a longer text",
        )
    warn_of_positions(evaluated, num_tokens)
    steps = []
    try:
        with torch.no_grad():
            prefix = input_ids[None, :prefix_tokens].to(evaluated.model.device)
            window = max((variant.query_window for variant in variants), default=0)
            prefill = run_prefill(evaluated.model, prefix, torch.ones_like(prefix), query_window=window)
            started = [variant.start(prefill) for variant in (Dense(evaluated.dense), *variants)]
            del prefill
            whole = [
                _count_whole(cache, variant, prefix_tokens, num_tokens)
                for (_, cache), variant in zip(started[1:], variants, strict=True)
            ]
            with progress_bar(progress, "tokens", num_tokens - 1 - prefix_tokens) as advance:
                for step in _feed(started, input_ids.to(evaluated.model.device), prefix_tokens):
                    steps.append(step)
                    advance(1)
    except torch.OutOfMemoryError as error:
        raise LeanKError(
            f"memory does not suffice for {num_tokens} tokens in {len(variants) + 1} caches: "
            f"{first_line(error)}",
            hint="take a shorter text, or fewer variants at a time",
            exit_code=1,
        ) from error
    divergence, agrees, nll = (torch.stack(values, dim=1).tolist() for values in zip(*steps, strict=True))
    return TextComparison(
        checkpoint=checkpoint,
        num_tokens=num_tokens,
        prefix_tokens=prefix_tokens,
        dense_nll=tuple(nll[0]),
        variants=tuple(
            VariantLogits(
                variant.name, whole[row], *(tuple(rows[row + 1]) for rows in (divergence, agrees, nll))
            )
            for row, variant in enumerate(variants)
        ),
    )


def render_text_comparison(result: TextComparison) -> str:
    """Render a comparison for a person: a line a variant, then one for each stretch of the text."""
    overall = result.mean(result.variants[0])
    lines = [
        f"{overall.n} decode steps: tokens {overall.first} to {overall.last} of the text's "
        f"{result.num_tokens}, each fed on a cache of all before it",
        f"(the first {result.prefix_tokens} prefilled, which is dense)",
        "",
    ]
    width = max(len("tokens"), *(len(variant.name) for variant in result.variants))
    for variant in result.variants:
        lines.append(
            f"{variant.name:<{width + 14}}{'n':>6}{'KL (nats)':>12}{'same token':>12}{'NLL dense':>11}"
            f"{'NLL':>9}{'difference':>12}"
        )
        rows = [(f"tokens {m.first}-{m.last}", m) for m in result.by_position(variant)]
        for label, means in (*rows, ("all", result.mean(variant))):
            lines.append(
                f"{label:<{width + 14}}{means.n:>6}{means.divergence:>12.3g}{means.agreement:>12.2%}"
                f"{means.dense_nll:>11.4f}{means.nll:>9.4f}{means.nll - means.dense_nll:>+12.4f}"
            )
        if variant.num_whole:
            lines.append(f"at the first {variant.num_whole} of them nothing was pruned yet")
        lines.append("")
    lines.append("means; KL(dense || variant); NLL of the text's own next token, in nats")
    return "\n".join(lines) + "\n"


def _to_dict(means: LogitMeans) -> dict[str, float]:
    return {
        "first": means.first,
        "last": means.last,
        "n": means.n,
        "kl": means.divergence,
        "greedy_agreement": means.agreement,
        "dense_nll": means.dense_nll,
        "nll": means.nll,
    }


def _feed(
    started: Sequence[tuple[Any, Cache]], input_ids: Tensor, prefix_tokens: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Feed a text [N] from a place on to every cache in turn, the dense one first.

    Yields:
        Of each token, for every cache: the divergence from the first, whether the most likely next token is
        the first's, the negative log-likelihood of the text's next token; each [caches].
    """
    places = torch.arange(len(input_ids), device=input_ids.device)
    for place in range(prefix_tokens, len(input_ids) - 1):
        here = slice(place, place + 1)
        log_probs = torch.stack(
            [
                model(
                    input_ids=input_ids[None, here], position_ids=places[None, here], past_key_values=cache
                ).logits[0, -1].float().log_softmax(-1)
                for model, cache in started
            ]
        )  # fmt: skip
        dense = log_probs[:1].expand_as(log_probs)
        divergence = functional.kl_div(log_probs, dense, reduction="none", log_target=True).sum(-1)
        best = log_probs.argmax(-1)
        # A divergence of next to nothing may be rounded to below nothing.
        yield divergence.clamp(min=0), best == best[0], -log_probs[:, input_ids[place + 1]]


def _count_whole(cache: Any, variant: Variant, prefix_tokens: int, num_tokens: int) -> int:
    """How many of the fed tokens, the first ones, see a cache of which nothing is pruned.

    Raises:
        LeanKError: If all of them do.
    """
    rows = cache.rows
    kept = rows.sink_size + rows.recent_size
    if prefix_tokens > kept:
        return 0
    num_fed = num_tokens - 1 - prefix_tokens
    num_whole: int = min(kept + rows.flush_size - prefix_tokens, num_fed)
    if num_whole == num_fed:
        raise LeanKError(
            f"`{variant.name}` would prune nothing of the text: it has {num_tokens} tokens, of which "
            f"{rows.sink_size} at the start and {rows.recent_size} at the end stay whole",
            hint="give a longer text, or export with a smaller `--recent-size`",
        )
    return num_whole
