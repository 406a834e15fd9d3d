"""Next-token KL divergence on a user's text, every variant against dense.

A forward pass over a text is prefill, which is dense whatever is pruned: it would find no difference at all.
So only the first tokens are prefilled; every later one, the text's own and not the model's, is fed by itself,
as a decode step on each cache. Texts of one length can be fed together (`compare_rows`).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import Cache

from leank_convert._runtime.configuration_leank import CACHE
from leank_convert.device import choose_device
from leank_convert.errors import LeanKError, NotFiniteError, out_of_memory
from leank_convert.evaluate.loading import EvaluatedModel, load_evaluated, warn_of_positions
from leank_convert.evaluate.names import PRUNED, check_names
from leank_convert.evaluate.prefill import run_prefill
from leank_convert.evaluate.variants import Dense, Masked, Variant, find_variants
from leank_convert.files import open_file, user_path, write_atomically
from leank_convert.folders import check_folder
from leank_convert.progress import progress_bar
from leank_convert.report.figures import INK
from leank_convert.report.page import figure_png
from leank_convert.tables import paragraph, table
from leank_convert.windows import Windows

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

JSON_NAME, FIGURE_NAME = "text.json", "text.png"
NUM_TOKENS = 2000  # fed unless more are asked for: minutes, where a book would take days
NUM_BINS = 8
_MAX_BYTES = 4 << 20  # a million tokens
_FLOOR = 1e-7  # of a divergence, in nats: below, float32 is noise


@dataclass(frozen=True)
class VariantLogits:
    """What one variant predicts after every fed token, against the dense model."""

    name: str
    num_whole: int  # fed tokens, the first ones, at which nothing of the cache was pruned yet
    divergence: tuple[float, ...]  # KL(dense || variant) of the next token, in nats, one per fed token
    agrees: tuple[bool, ...]  # whether the most likely next token is the dense model's
    nll: tuple[float, ...]  # negative log-likelihood of the text's next token, in nats


@dataclass(frozen=True)
class LogitMeans:
    """Means over some fed tokens, those at `first` to `last` of the text, counted from 0."""

    first: int
    last: int
    n: int
    kl: float  # KL(dense || variant), in nats
    greedy_agreement: float  # share whose most likely next token is the dense model's
    dense_nll: float  # the dense model's negative log-likelihood, in nats
    nll: float  # the variant's


@dataclass(frozen=True)
class TextComparison:
    """Predictions on one text, whose tokens after the prefix were fed, as many as were asked for."""

    checkpoint: str
    num_tokens: int  # tokens of the text
    prefix_tokens: int  # how many of them were prefilled
    # The dense model's negative log-likelihood of the text's next token, one per fed token.
    dense_nll: tuple[float, ...]
    variants: tuple[VariantLogits, ...]  # what was compared with it

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
            n=end - start,
            kl=mean(variant.divergence),
            greedy_agreement=mean(variant.agrees),
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
                    "mean": asdict(self.mean(variant)),
                    "by_position": [asdict(means) for means in self.by_position(variant)],
                    "num_whole": variant.num_whole,
                    "kl": list(variant.divergence),
                    "agrees": list(variant.agrees),
                    "nll": list(variant.nll),
                }
                for variant in self.variants
            },
        }


def evaluate_text(
    checkpoint: str | Path,
    text_file: str | Path,
    *,
    prefix_tokens: int,
    num_tokens: int = NUM_TOKENS,
    mask: str | Path | None = None,
    also: Sequence[str] = (),
    out: str | Path | None = None,
    device: str | torch.device | None = None,
    trust: bool = False,
    progress: bool = False,
) -> TextComparison:
    """Compare a checkpoint's predictions on a text with those of its own weights in the stock class.

    The text is plain, in UTF-8. Its first `prefix_tokens` are prefilled, and `num_tokens` after them fed at
    most, a decode step each. `out` is where the numbers are left as JSON, and a figure; other arguments are
    those of `evaluate_checkpoint`.

    LeanKError if `checkpoint` is no LeanK checkpoint or holds other code than a release's, `out` has an
    earlier result, or as `compare_rows`.
    """
    check_names(also)
    if out is not None:
        out = check_folder(user_path(out))
        if found := next((path for name in (JSON_NAME, FIGURE_NAME) if (path := out / name).exists()), None):
            raise LeanKError(
                f"`{found}` is the result of an earlier run",
                hint="name another folder with `--out`, or remove that file",
            )
    text = _read_text(user_path(text_file))
    evaluated = load_evaluated(user_path(checkpoint), choose_device(device), mask=mask, trust=trust)
    variants: list[Variant] = [Masked(PRUNED), *find_variants(also, evaluated)]
    result = compare_text(
        evaluated,
        text,
        variants,
        prefix_tokens=prefix_tokens,
        num_tokens=num_tokens,
        checkpoint=str(checkpoint),
        progress=progress,
    )
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        write_atomically(out / JSON_NAME, json.dumps(result.to_dict()).encode())
        write_atomically(out / FIGURE_NAME, figure_png(lambda: draw_text_comparison(result)))
    return result


def _read_text(path: Path) -> str:
    with open_file(path) as file:
        content = file.read(_MAX_BYTES + 1)
    if len(content) > _MAX_BYTES:
        raise LeanKError(
            f"`{path}` is larger than {_MAX_BYTES >> 20} MB, and a token is a decode step",
            hint="give a part of it",
        )
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise LeanKError(f"`{path}`: {error}", hint="`--text` takes plain text in UTF-8") from error


def compare_text(
    evaluated: EvaluatedModel,
    text: str,
    variants: Sequence[Variant],
    *,
    prefix_tokens: int,
    num_tokens: int = NUM_TOKENS,
    checkpoint: str = "",
    progress: bool = False,
) -> TextComparison:
    """Compare predictions of variants with the dense model's, as `evaluate_text`; as `compare_rows`."""
    input_ids = evaluated.tokenizer(text, return_tensors="pt", verbose=False).input_ids.long()
    taken = input_ids[:, : prefix_tokens + num_tokens + 1]  # the last of them is only predicted
    (found,) = compare_rows(evaluated, taken, variants, prefix_tokens=prefix_tokens, progress=progress)
    return replace(found, checkpoint=checkpoint, num_tokens=input_ids.shape[1])


def compare_rows(
    evaluated: EvaluatedModel,
    input_ids: Tensor,
    variants: Sequence[Variant],
    *,
    prefix_tokens: int,
    progress: bool = False,
) -> list[TextComparison]:
    """Feed texts [B, N] together, and compare the predictions of variants with the dense model's, by text.

    The first `prefix_tokens` are prefilled, and the last token is only predicted.

    Raises:
        LeanKError: If the texts are so short that nothing is fed, or nothing would be pruned; if memory does
            not suffice.
    """
    num_rows, num_tokens = input_ids.shape
    if not 1 <= prefix_tokens <= num_tokens - 2:
        raise LeanKError(
            f"the text has {num_tokens} tokens and `--prefix-tokens` is {prefix_tokens}: at least one is "
            "prefilled, one fed and one predicted",
            hint="lower `--prefix-tokens`" if num_tokens > 2 else "give a longer text",
        )
    whole = [_count_whole(variant, evaluated.windows, prefix_tokens, num_tokens) for variant in variants]
    warn_of_positions(evaluated, num_tokens)
    input_ids = input_ids.to(evaluated.model.device)
    steps = []
    with (
        torch.no_grad(),
        out_of_memory(
            f"{num_rows} x {num_tokens} tokens in {len(variants) + 1} caches",
            hint="take shorter texts, or fewer of them or of the variants at a time",
        ),
        progress_bar(progress, "tokens", num_tokens - 1 - prefix_tokens) as advance,
    ):
        prefix = input_ids[:, :prefix_tokens]
        window = max((variant.query_window for variant in variants), default=0)
        prefill = run_prefill(evaluated.model, prefix, torch.ones_like(prefix), query_window=window)
        compared: list[Variant] = [Dense(evaluated.dense), *variants]
        started = [variant.start(prefill) for variant in compared]
        del prefill
        for step in _feed(started, input_ids, prefix_tokens):
            steps.append(step)
            advance(1)
    # Of each cache, the dense one first, and each row by fed token.
    figures = [torch.stack(values, dim=-1).tolist() for values in zip(*steps, strict=True)]
    return [
        TextComparison(
            checkpoint="",
            num_tokens=num_tokens,
            prefix_tokens=prefix_tokens,
            dense_nll=tuple(figures[-1][0][row]),
            variants=tuple(
                VariantLogits(variant.name, whole[place - 1], *(tuple(each[place][row]) for each in figures))
                for place, variant in enumerate(variants, start=1)
            ),
        )
        for row in range(num_rows)
    ]


def render_text_comparison(result: TextComparison) -> str:
    """Render a comparison for a person: a line a variant, then one for each stretch of the text."""
    overall = result.mean(result.variants[0])
    after = result.num_tokens - result.prefix_tokens - 1
    more = "" if overall.n == after else "; `--num-tokens` sets how many"
    lines = paragraph(
        f"{overall.n} of {after} tokens measured: tokens {overall.first} to {overall.last} of the text's "
        f"{result.num_tokens}, each a decode step on a cache of all before it (the first "
        f"{result.prefix_tokens} prefilled, which is dense){more}"
    )
    for variant in result.variants:
        lines += ["", variant.name]
        rows = [("tokens", "n", "KL (nats)", "same token", "NLL dense", "NLL", "difference")]
        parts = [(f"{m.first} to {m.last}", m) for m in result.by_position(variant)]
        for label, means in (*parts, ("all", result.mean(variant))):
            shown = f"{means.kl:.3g}", f"{means.greedy_agreement:.2%}", f"{means.dense_nll:.4f}"
            nll = f"{means.nll:.4f}", f"{means.nll - means.dense_nll:+.4f}"
            rows.append((label, str(means.n), *shown, *nll))
        lines += table(rows)
        if variant.num_whole:
            lines.append(f"at the first {variant.num_whole} of them nothing was pruned yet")
    lines += ["", "means; KL(dense || variant); NLL of the text's own next token, in nats"]
    return "\n".join(lines) + "\n"


def _feed(
    started: Sequence[tuple[Any, Cache]], input_ids: Tensor, prefix_tokens: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Feed texts [B, N] from a place on to every cache in turn, the dense one first.

    Of each place come, for every cache, the divergence from the first, whether the most likely next token is
    the first's, and the negative log-likelihood of the text's next token; each [caches, B].
    """
    num_rows, num_tokens = input_ids.shape
    places = torch.arange(num_tokens, device=input_ids.device).expand(num_rows, -1)
    for place in range(prefix_tokens, num_tokens - 1):
        here = slice(place, place + 1)
        log_probs = torch.stack(
            [
                model(input_ids=input_ids[:, here], position_ids=places[:, here], **{CACHE: cache})
                .logits[:, -1]
                .float()
                .log_softmax(-1)
                for model, cache in started
            ]
        )
        if bool(log_probs.isnan().any()):
            raise NotFiniteError(f"logits behind {place + 1} tokens of the text are NaN")
        dense = log_probs[:1].expand_as(log_probs)
        divergence = functional.kl_div(log_probs, dense, reduction="none", log_target=True)
        divergence = divergence.masked_fill(dense.isneginf(), 0).sum(-1)  # tokens that may not follow
        best = log_probs.argmax(-1)
        target = input_ids[None, :, place + 1, None].expand(len(started), -1, -1)
        # A divergence of next to nothing may be rounded to below nothing.
        yield divergence.clamp(min=0), best == best[:1], -log_probs.gather(-1, target)[..., 0]


def _count_whole(variant: Variant, windows: Windows, prefix_tokens: int, num_tokens: int) -> int:
    """How many of the fed tokens, the first ones, see nothing of a cache pruned; LeanKError if all do."""
    windows = variant.windows or windows
    kept = windows.sink_size + windows.recent_size
    if prefix_tokens > kept:
        return 0
    num_fed = num_tokens - 1 - prefix_tokens
    num_whole = min(kept + windows.flush_size - prefix_tokens, num_fed)
    if num_whole == num_fed:
        raise LeanKError(
            f"`{variant.name}` would prune nothing of {num_tokens} tokens of the text, of which "
            f"{windows.sink_size} at the start and {windows.recent_size} at the end stay whole",
            hint="take a larger `--prefix-tokens`, more tokens (`--num-tokens`, a longer text), or a "
            "checkpoint of a smaller `--recent-size` or `--sink-size`",
        )
    return num_whole


def draw_text_comparison(result: TextComparison) -> Figure:
    """Divergence, agreement and likelihood along the text."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 7.0), layout="constrained")
    divergence, agreement, likelihood = figure.subplots(3, 1, sharex=True)
    places = range(result.prefix_tokens, result.prefix_tokens + len(result.dense_nll))
    for place, variant in enumerate(result.variants):
        values = [max(value, _FLOOR) for value in variant.divergence]
        divergence.scatter(places, values, s=5, alpha=0.35, linewidths=0, color=f"C{place}")
    _draw_means(divergence, result, lambda means: max(means.kl, _FLOOR))
    divergence.set(
        title="KL(dense || variant) of the next token: each, and means", ylabel="nats", yscale="log"
    )
    _draw_means(agreement, result, lambda means: 100 * means.greedy_agreement)
    agreement.set(title="Most likely next token is the dense model's", ylabel="fed tokens (%)")
    agreement.set_ylim(top=101)
    likelihood.axhline(0, color=INK, linewidth=0.8)
    _draw_means(likelihood, result, lambda means: means.nll - means.dense_nll)
    likelihood.set(
        title="Negative log-likelihood of the text, less the dense model's",
        ylabel="nats",
        xlabel=f"token of the text (the first {result.prefix_tokens} are prefilled)",
    )
    names = [variant.name for variant in result.variants]
    figure.legend(divergence.get_lines(), names, loc="outside upper right", ncols=4)
    return figure


def _draw_means(axes: Axes, result: TextComparison, value: Callable[[LogitMeans], float]) -> None:
    for place, variant in enumerate(result.variants):
        bins = result.by_position(variant)
        middles = [(means.first + means.last) / 2 for means in bins]
        axes.plot(middles, [value(m) for m in bins], marker="o", markersize=3.5, color=f"C{place}")
    axes.grid(axis="y")
