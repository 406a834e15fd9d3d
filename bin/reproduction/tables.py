"""The report: what was found by now, as plain tables in Markdown.

Differences are paired, over the same prompts; what has no answers yet is left out.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from bin.reproduction.answers import Answers, Scores, subtract, take
from bin.reproduction.experiment import Experiment
from bin.reproduction.plan import DENSE, DENSE_NAME, EVERY_CHANNEL, MAIN, Entry, Table
from bin.reproduction.texts import KINDS, compare_answers
from leank_convert.evaluate.comparison import Difference
from leank_convert.evaluate.variants import kept_channels
from leank_convert.files import read_json
from leank_convert.train.scaling import count_largest

_Z_95 = 1.96
_NOTE = (
    "Scores are in percent. Brackets hold 95% intervals of paired differences over the same prompts, in "
    "points, over prompts, not over the seed of training. Cells (a task at a length) that the dense model "
    "cannot answer are left out. K and V removed are shares of the pruned region. Of a method with several "
    "settings the one that is best on prompts of another seed is shown."
)


def render(experiment: Experiment) -> str:
    """The whole report of an experiment."""
    plan = experiment.plan
    blocks = [f"# {plan.title}", "\n".join(f"- {line}" for line in experiment.describe()), _NOTE]
    blocks += [_score_table(experiment, table) for table in plan.tables]
    blocks += [_pair_table(experiment), _choice_table(experiment), _byte_table(experiment)]
    blocks += [_text_table(experiment), *_answer_tables(experiment)]
    blocks += [_weak_table(answers) for answers in experiment.parts.values()]
    return "\n\n".join(filter(None, blocks)) + "\n"


def render_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A headed table without the columns that are empty throughout; nothing where there are no rows."""
    if not rows:
        return ""
    filled = [place for place in range(len(header)) if any(row[place] for row in rows)]
    lines = [header, ["---"] * len(header), *rows]
    drawn = "\n".join(f"| {' | '.join(line[place] for place in filled)} |" for line in lines)
    return f"## {title}\n\n{drawn}"


def describe_difference(difference: Difference | None) -> str:
    """A difference with its interval, in points."""
    if difference is None:
        return ""
    # Adding 0 makes -0.0, which is rounded from a little below, a zero.
    mean, low, high = (round(100 * value, 1) + 0.0 for value in (difference.mean, *difference.interval))
    return f"{mean:+.1f} [{low:+.1f}, {high:+.1f}]"


def _score_table(experiment: Experiment, table: Table) -> str:
    answers = experiment.parts[table.part]
    dense = answers.scores(DENSE_NAME)
    lengths = list(dict.fromkeys(cell.length for cell in dense))
    tasks = list(dict.fromkeys(cell.task for cell in dense))
    groups = [[cell for cell in dense if cell.length == length] for length in lengths]
    groups += [[cell for cell in dense if cell.task == task] for task in tasks]
    own = {row[0].ratio: row[0] for _, row in table.rows if _is_plain(row[0])}
    lines = []
    for label, row in (("dense", (DENSE,)), *table.rows):
        choice = experiment.choose(row)
        scores = answers.scores(choice[0].name) if choice is not None else {}
        if choice is None or not scores:
            continue
        entry, leank = choice[0], own.get(row[0].ratio)
        parts = [
            f"{_mean(scores, cells)}; {describe_difference(subtract(scores, dense, cells))}".removesuffix(
                "; "
            )
            if entry is not DENSE
            else _mean(scores, cells)
            for cells in groups
        ]
        lines.append(
            (
                label,
                f"{entry.ratio:.0%}" if entry.ratio != EVERY_CHANNEL else "",
                *_removed(experiment, entry),
                f"{len(take(scores)):,}",
                _mean(scores, None),
                describe_difference(subtract(scores, dense)) if entry is not DENSE else "",
                describe_difference(subtract(answers.scores(leank.name), scores))
                if leank is not None and leank != entry
                else "",
                *parts,
            )
        )
    shares = ("asked", "K removed", "V removed", "factors at 1, of kept")
    header = ("", *shares, "n", "score", "against dense", "LeanK against it", *map(str, lengths), *tasks)
    return render_table(table.title, header, lines)


def _is_plain(entry: Entry) -> bool:
    """Whether it is LeanK's main mask and nothing else."""
    return entry == Entry(entry.name, ratio=entry.ratio, run=MAIN) and entry.ratio != EVERY_CHANNEL


def _mean(scores: Scores, cells: Any) -> str:
    found = take(scores, cells)
    return f"{100 * statistics.fmean(found):.1f}" if found else ""


def _removed(experiment: Experiment, entry: Entry) -> tuple[str, str, str]:
    """Shares of K and V that the pruned region lacks; of learned masks, factors at 1, of kept.

    Where the first are more, which of them are kept is left to their order.
    """
    masks = experiment.bench.masks
    if entry.kind not in ("mask", "think") or entry.ratio == EVERY_CHANNEL:
        return "", "", ""
    runs = [entry.run] if entry.run else [run for run in masks if masks.are_made(run)][:1]
    if not runs or not masks.are_made(runs[0]):
        return "", "", ""
    if entry.run is None:
        head_dim = next(iter(masks[runs[0]].values())).channel_mask.shape[-1]
        return f"{1 - kept_channels(head_dim, entry.ratio) / head_dim:.1%}", "0.0%", ""
    mask = experiment.bench.mask(entry)
    kept, tied = mask.channel_mask, ""
    if mask.scaling_factors is not None and entry.kind == "mask":
        tied = f"{count_largest(mask.scaling_factors)} of {int(kept.sum())}"
    return f"{1 - kept.double().mean():.1%}", f"{1 - kept.any(-1).double().mean():.1%}", tied


def _pair_table(experiment: Experiment) -> str:
    lines = []
    for rows in experiment.plan.pairs:
        choices = [experiment.choose(row) for row in rows]
        first, second = (experiment.parts["test"].scores(c[0].name) if c else {} for c in choices)
        if first and second:
            names = (choice[0].name for choice in choices if choice)
            lines.append((*names, describe_difference(subtract(first, second))))
    return render_table("Further differences", ("", "less", "difference"), lines)


def _choice_table(experiment: Experiment) -> str:
    rows = dict.fromkeys(row for table in experiment.plan.tables for _, row in table.rows if len(row) > 1)
    lines = []
    for row in rows:
        if choice := experiment.choose(row):
            entry, means = choice
            scores = ", ".join(f"{setting}: {100 * mean:.1f}" for setting, mean in means.items())
            lines.append((entry.name, entry.setting, scores))
    return render_table("Settings, chosen on other prompts", ("", "best", "scores there"), lines)


def _byte_table(experiment: Experiment) -> str:
    plan = experiment.plan
    if not plan.weighed or not experiment.bytes_file.exists():
        return ""
    kept, answers = read_json(experiment.bytes_file), experiment.parts[plan.weighed_on]
    dense, num_tokens = kept[DENSE_NAME], kept["tokens"]
    fed, lines = _read_texts(experiment), []
    for entry in sorted(plan.weighed, key=lambda entry: -kept[entry.name]["held"]):
        used, scores = kept[entry.name], answers.scores(entry.name)
        kl = [found[entry.name]["kl"] for found in fed.values() if entry.name in found]
        change = None if entry is DENSE else subtract(scores, answers.scores(DENSE_NAME))
        lines.append(
            (
                entry.name,
                f"{used['held'] / num_tokens:,.0f}",
                f"{used['held'] / dense['held']:.1%}",
                f"{used['read'] / dense['read']:.1%}",
                _mean(scores, None),
                describe_difference(change),
                f"{statistics.fmean(kl):.4f}" if kl else "",
            )
        )
    cells = ", ".join(cell.name for cell in answers.cells)
    title = f"Bytes of a cache of {num_tokens:,} tokens, all counted, beside scores on {cells} and KL on text"
    header = ("", "bytes a token", "of dense", "read by a step", "score", "against dense", "KL")
    return render_table(title, header, lines)


def _read_texts(experiment: Experiment) -> dict[str, dict[str, Any]]:
    lengths = experiment.plan.text.lengths if experiment.plan.text else ()
    found = {f"{texts.kind}, {length}": texts.fed(length) for texts in experiment.texts for length in lengths}
    return {where: results for where, results in found.items() if results}


def _text_table(experiment: Experiment) -> str:
    text = experiment.plan.text
    if text is None:
        return ""
    lines = [
        (
            where,
            name,
            f"{row['kl']:.4f}",
            f"{row['agreement']:.1%}",
            f"{row['dense_nll']:.3f}",
            f"{row['nll']:.3f}",
            _with_interval(row.get("nll_changes", ())),
        )
        for where, found in _read_texts(experiment).items()
        for name, row in found.items()
    ]
    missing = [KINDS[kind] for kind in KINDS if kind not in {texts.kind for texts in experiment.texts}]
    skipped = f" (not fetched: {', '.join(missing)})" if missing else ""
    title = (
        f"Natural text, {text.num_fed} tokens fed behind so many, {text.num_texts} texts each, in nats a "
        f"token{skipped}"
    )
    header = ("text behind", "cache", "KL", "agreement", "NLL, dense", "NLL", "change of NLL, over texts")
    return render_table(title, header, lines)


def _with_interval(values: Sequence[float]) -> str:
    if len(values) < 2:
        return ""
    mean = statistics.fmean(values)
    half = _Z_95 * statistics.stdev(values) / math.sqrt(len(values))
    return f"{mean:+.4f} [{mean - half:+.4f}, {mean + half:+.4f}]"


def _answer_tables(experiment: Experiment) -> Iterator[str]:
    text = experiment.plan.text
    header = ("", "tokens", "log-likelihood", "equal answers (%)", "first difference", "equal tokens (%)")
    for texts in experiment.texts:
        answered = texts.answered()
        found = {name: compare_answers(own, answered[DENSE_NAME]) for name, own in answered.items()}
        lines = [
            (
                name,
                f"{each['tokens']:.0f}",
                f"{each['log_likelihood']:.3f}",
                f"{100 * each['identical']:.0f}",
                f"{each['first_difference']:.0f}",
                f"{100 * each['equal_tokens']:.1f}",
            )
            for name, each in found.items()
        ]
        assert text is not None
        yield render_table(
            f"Answers of up to {text.answer_tokens} tokens, {KINDS[texts.kind]}: log-likelihoods are the "
            "dense model's in nats a token, first differences medians",
            header,
            lines,
        )


def _weak_table(answers: Answers) -> str:
    lines = [
        (cell.task, f"{cell.length:,}", f"{100 * score:.1f}") for cell, score in answers.weak_cells().items()
    ]
    return render_table(f"Left out of {answers.folder.name}", ("task", "tokens", "dense"), lines)
