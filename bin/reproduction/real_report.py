"""Chapters of a real model's report: RULER's tasks, natural text, answers at length, staticity, RoPE pairs.

No verdict is written by hand: each is computed from paired differences over the same prompts.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from bin.reproduction.document import Chapter, Grid
from bin.reproduction.findings import Findings, Verdict, describe_difference
from bin.reproduction.paper import paper_grids
from bin.reproduction.plan import Entry
from bin.reproduction.real import RealResults
from bin.reproduction.texts import KINDS
from leank_convert.analyze.distribution import OUTLIER_RULE, analyze_mask
from leank_convert.evaluate.comparison import Difference
from leank_convert.report.figures import draw_correlation, draw_outlier_pairs
from leank_convert.report.page import new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MODEL_NAME = "SmolLM2-135M-Instruct"
_MOST_LOST, _MOST_LOST_AT_WORST = 0.01, 0.025  # of RULER's score: the mean, and its interval's lower end
_Z_95 = 1.96


class ToyConclusion(NamedTuple):
    """What the shipped toy's figures said, and whether a verdict on a real model says so, too."""

    claim: str  # a verdict's, less its ratio
    ratio: float
    said: str
    stands: tuple[str, ...]  # answers by which it does


# From docs/results.md.
_TOY = (
    ToyConclusion("LeanK at {} is within 1 point of dense", 0.7, "yes", ("yes",)),
    ToyConclusion("learned > static > dynamic channels at {}", 0.7, "yes", ("yes",)),
    ToyConclusion("learned > static > dynamic channels at {}", 0.9, "yes", ("yes",)),
    ToyConclusion("stage 2 is worth its steps at {}", 0.7, "it gains nothing", ("no", "not told apart")),
    ToyConclusion("stage 2 is worth its steps at {}", 0.9, "it gains nothing", ("no", "not told apart")),
    ToyConclusion("learned channels gain from a budget per head at {}", 0.7, "no", ("no", "not told apart")),
    ToyConclusion("learned channels gain from a budget per head at {}", 0.9, "yes", ("yes",)),
    ToyConclusion("learned channels beat dynamic ones of the same budget at {}", 0.9, "yes", ("yes",)),
    ToyConclusion("any lambda from 0.04 to 0.1 does at {}", 0.9, "no: they need 0.3", ("no",)),
)


def list_chapters(findings: Findings, real: RealResults) -> list[Chapter]:
    """All chapters; they stand before those of the tables."""
    answer = _judge_ruler(real)
    by_claim = {verdict.claim: verdict for verdict in findings.verdicts}
    return [
        Chapter(
            "toy",
            "What becomes of the toy's conclusions",
            "The shipped model, of 3.6M parameters, looks up values in a list. Verdicts are those below.",
            [
                Grid(
                    "Conclusions", ("claim", "the toy", "here", "figures here", ""), list(_list_toy(by_claim))
                )
            ],
        ),
        Chapter(
            "ruler",
            "RULER's tasks",
            f"{answer.claim}: **{answer.answer}**. {answer.detail}. Tasks at lengths where the dense model "
            f"scores {real.sizes.floor:.0%} or less on {real.sizes.num_floor} other prompts are left out. A "
            "length holds prompt and answer; intervals are 95% ones of paired differences, in points.",
            [_length_grid(real), _cell_grid(real), _weak_grid(real)],
        ),
        Chapter(
            "bytes",
            "Accuracy and bytes, beside other methods",
            f"Bytes of K and V are those of one prompt's cache at {real.num_tokens:,} tokens, all counted: "
            "the window, offsets and steps, numbers not rounded yet. `read`: by one decode step; Quest saves "
            f"nothing else. RULER's score is the mean of {_list_cells(real)}; KL is the mean over all "
            f"natural text. Products are on LeanK's mask of {real.main.ratio:.0%}.",
            [*paper_grids("bytes"), _byte_grid(real)],
        ),
        Chapter(
            "predictions",
            "Next tokens of natural text",
            f"After {real.sizes.text_tokens} tokens of text, which are prefilled, {real.sizes.num_fed} more "
            f"are fed by decode steps, in {real.sizes.num_texts} pieces of each kind. KL(dense || pruned) "
            "and negative log-likelihoods of the text's own next token are in nats a token; brackets hold "
            f"95% intervals over the pieces.{_describe_skipped(real)}",
            [_prediction_grid(kind, real) for kind in real.fed],
        ),
        Chapter(
            "answers",
            f"Answers of up to {real.sizes.answer_tokens} tokens",
            f"Greedy answers to {real.sizes.num_answers} prompts of each kind of text, which ask to retell "
            f"{real.sizes.text_tokens} tokens of it. Log-likelihoods are the dense model's of each answer, "
            "in nats a token; the first difference is the median of tokens that an answer shares with the "
            "dense model's before it.",
            [_answer_grid(kind, real) for kind in real.answers],
        ),
        Chapter(
            "staticity",
            "Are the same channels large everywhere?",
            "",
            [_staticity_grid(real)],
            lambda: _draw_staticity(real),
            "Pearson correlation of the channels' norm ratios over all layers and heads: a channel's part in "
            "the products of the last queries with all keys. Near 1, one mask can serve all.",
        ),
        Chapter(
            "pairs",
            "Which rotary pairs are kept",
            "",
            [_pair_grid(real)],
            lambda: _draw(3.8, [lambda axes: draw_outlier_pairs(axes, real.mask, analyze_mask(real.mask))]),
            "A pair is two channels that RoPE turns together, at a frequency that falls with i. "
            + OUTLIER_RULE,
        ),
    ]


def _judge_ruler(real: RealResults) -> Verdict:
    difference = _subtract(real, real.main)
    low, _ = difference.interval
    is_close = difference.mean >= -_MOST_LOST and low >= -_MOST_LOST_AT_WORST
    count = len(real.ruler[real.main].values)
    return Verdict(
        f"LeanK at {real.main.ratio:.0%} loses at most {100 * _MOST_LOST:g} point, at worst "
        f"{100 * _MOST_LOST_AT_WORST:g}",
        "yes" if is_close else "no",
        f"{describe_difference(difference)} points over {count:,} paired answers, of which "
        f"{difference.lost} are worse and {difference.gained} better",
    )


def _list_toy(by_claim: dict[str, Verdict]) -> Iterator[tuple[str, ...]]:
    for conclusion in _TOY:
        claim = conclusion.claim.format(f"{conclusion.ratio:.0%}")
        if claim in by_claim:
            here = by_claim[claim]
            stands = "open" if here.answer == "not told apart" else "falls"
            yield (
                claim,
                conclusion.said,
                here.answer,
                here.detail,
                "stands" if here.answer in conclusion.stands else stands,
            )


def _subtract(real: RealResults, entry: Entry, **where: Any) -> Difference:
    """An entry against the dense model, on some of the prompts, as `Scores.where` takes them."""
    scores, dense = (each.where(**where) for each in real.paired(entry))
    return scores.minus(dense)


def _length_grid(real: RealResults) -> Grid:
    lengths = list(dict.fromkeys(cell.length for cell in real.strong))
    parts: list[dict[str, Any]] = [{}, *({"lengths": [length]} for length in lengths)]
    rows = []
    for entry, scores in real.ruler.items():
        cells = [f"{100 * scores.where(**part).mean:.1f}" for part in parts]
        if entry is not None:
            changes = [describe_difference(_subtract(real, entry, **part)) for part in parts]
            cells = [f"{cell}; {change}" for cell, change in zip(cells, changes, strict=True)]
        rows.append((_name(entry), f"{len(scores.values):,}", *cells))
    header = ("", "n", "all", *(f"{length:,} tokens" for length in lengths))
    return Grid("Means in percent; against the dense model on the same prompts", header, rows)


def _cell_grid(real: RealResults) -> Grid:
    scores, dense = real.ruler[real.main], real.ruler[None]
    rows = []
    for cell in real.strong:
        here: dict[str, Any] = {"tasks": [cell.task], "lengths": [cell.length]}
        rows.append(
            (
                cell.task,
                f"{cell.length:,}",
                str(len(scores.where(**here).values)),
                f"{100 * dense.where(**here).mean:.1f}",
                f"{100 * scores.where(**here).mean:.1f}",
                describe_difference(_subtract(real, real.main, **here)),
            )
        )
    header = ("task", "tokens", "n", "dense", _name(real.main), "difference")
    return Grid("Each task at each length", header, rows)


def _byte_grid(real: RealResults) -> Grid:
    dense, answered = real.used[None], real.compared[None]
    rows = []
    for entry, used in sorted(real.used.items(), key=lambda item: -item[1].held):
        scores, change, kl = real.compared[entry], "", ""
        if entry is not None:
            change = describe_difference(scores.minus(answered))
            kls = [value for means in real.fed.values() for value in means[entry]["kl"]]
            kl = f"{statistics.fmean(kls):.4f}"
        rows.append(
            (
                _name(entry),
                f"{used.held / real.num_tokens:,.0f}",
                f"{used.held / dense.held:.1%}",
                f"{used.read / dense.read:.1%}",
                f"{100 * scores.mean:.1f}",
                change,
                kl,
            )
        )
    header = ("", "bytes a token", "of dense", "read", "RULER (%)", "against dense", "KL")
    return Grid(f"Ours, over {len(answered.values):,} prompts", header, rows)


def _list_cells(real: RealResults) -> str:
    """The tasks and lengths that methods beside LeanK are compared on."""
    scores = real.compared[None]
    tasks = ", ".join(f"`{task}`" for task in scores.tasks)
    return f"{tasks} at {' and '.join(f'{length:,}' for length in scores.lengths)} tokens"


def _weak_grid(real: RealResults) -> Grid:
    rows = [
        (cell.task, f"{cell.length:,}", f"{100 * score:.1f}")
        for cell, score in real.floors.items()
        if cell not in real.strong
    ]
    return Grid("Left out", ("task", "tokens", "dense"), rows)


def _describe_skipped(real: RealResults) -> str:
    skipped = [KINDS[kind] for kind in KINDS if kind not in real.fed]
    return f" Skipped, as they were not fetched: {', '.join(skipped)}." if skipped else ""


def _prediction_grid(kind: str, real: RealResults) -> Grid:
    rows = []
    for entry, means in real.fed[kind].items():
        change = [nll - dense for nll, dense in zip(means["nll"], means["dense_nll"], strict=True)]
        rows.append(
            (
                _name(entry),
                _with_interval(means["kl"], "{:.4f}"),
                f"{100 * statistics.fmean(means['agreement']):.1f}",
                f"{statistics.fmean(means['dense_nll']):.3f}",
                f"{statistics.fmean(means['nll']):.3f}",
                _with_interval(change, "{:+.4f}"),
            )
        )
    header = ("", "KL", "same most likely token (%)", "NLL dense", "NLL", "NLL, difference")
    return Grid(KINDS[kind], header, rows)


def _with_interval(values: Sequence[float], form: str) -> str:
    mean = statistics.fmean(values)
    half = _Z_95 * statistics.stdev(values) / math.sqrt(len(values))
    return f"{form.format(mean)} [{form.format(mean - half)}, {form.format(mean + half)}]"


def _answer_grid(kind: str, real: RealResults) -> Grid:
    rows = [
        (
            _name(entry),
            f"{found['tokens']:.0f}",
            f"{found['log_likelihood']:.3f}",
            f"{100 * found['identical']:.0f}",
            f"{found['first_difference']:.0f}",
            f"{100 * found['equal_tokens']:.1f}",
        )
        for entry, found in real.answers[kind].items()
    ]
    header = ("", "tokens", "log-likelihood", "equal answers (%)", "first difference", "equal tokens (%)")
    return Grid(KINDS[kind], header, rows)


def _staticity_grid(real: RealResults) -> Grid:
    measured = real.staticity
    rows = []
    for what, names in (("tasks", measured["tasks"]), ("lengths", measured["lengths"])):
        table = measured[f"correlation_between_{what}"]
        others = [value for row, values in enumerate(table) for value in values[:row]]
        rows.append((what, ", ".join(map(str, names)), f"{min(others):.3f}", f"{max(others):.3f}"))
    return Grid("Correlations between", ("", "of", "least", "greatest"), rows)


def _pair_grid(real: RealResults) -> Grid:
    kept = analyze_mask(real.mask).kept_by_pair
    eighth = max(1, len(kept) // 8)
    rows = [
        (
            f"{first} to {first + len(part) - 1}",
            *(f"{100 * share:.1f}" for share in (min(part), statistics.fmean(part), max(part))),
        )
        for first in range(0, len(kept), eighth)
        if (part := kept[first : first + eighth])
    ]
    return Grid("Kept channels of pairs, in percent", ("pairs", "least", "mean", "greatest"), rows)


def _name(entry: Entry | None) -> str:
    if entry is None:
        return "dense"
    return f"{entry.method}, {entry.ratio:.0%}" if entry.ratio else entry.method


def _draw_staticity(real: RealResults) -> Figure:
    measured = real.staticity
    tasks, lengths = measured["tasks"], [f"{length:,}" for length in measured["lengths"]]
    return _draw(
        0.5 * max(len(tasks), len(lengths)) + 1.2,
        [
            lambda axes: draw_correlation(
                axes, measured["correlation_between_tasks"], tasks, "Between tasks"
            ),
            lambda axes: draw_correlation(
                axes, measured["correlation_between_lengths"], lengths, "Between lengths (tokens)"
            ),
        ],
    )


def _draw(height: float, panels: Iterable[Callable[[Axes], None]]) -> Figure:
    figure, panels = new_figure(height), list(panels)
    row = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, panel in zip(row, panels, strict=True):
        panel(axes)
    return figure
