"""The report: what was found by now, as plain tables in Markdown.

Differences are paired, over the same prompts; what has no answers yet is left out.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from statistics import fmean, stdev

from bin.reproduction.answers import Answers, Scores, subtract, take
from bin.reproduction.experiment import Experiment
from bin.reproduction.plan import DENSE, DENSE_NAME, EVERY_CHANNEL, MAIN, Cell, Entry, Table
from bin.reproduction.texts import compare_answers
from bin.reproduction.units import read_result
from leank_convert.evaluate.comparison import Difference
from leank_convert.evaluate.variants import kept_channels

_Z_95 = 1.96
_NOTE = (
    "Scores are in percent. Brackets hold 95% intervals of paired differences over the same prompts, in "
    "points, over prompts, not over the seed of training. Cells (a task at a length) that the dense model "
    "cannot answer are left out. K and V removed are shares of the pruned region."
)
_NOTE_OF_CHOICES = " Of several settings the one that is best on prompts of another seed is shown."
_Line = Mapping[str, str]  # a table's row: cells by column


def render(experiment: Experiment) -> str:
    """The whole report of an experiment."""
    plan = experiment.plan
    has_choices = any(len(row) > 1 for table in plan.tables for _, row in table.rows)
    note = _NOTE + _NOTE_OF_CHOICES * has_choices
    blocks = [f"# {plan.title}", "\n".join(f"- {line}" for line in experiment.describe()), note]
    blocks += [render_table(table.title, _score_lines(experiment, table)) for table in plan.tables]
    blocks += [
        render_table("Further differences", _pair_lines(experiment)),
        _byte_table(experiment),
        _text_table(experiment),
        *_answer_tables(experiment),
    ]
    blocks += [_weak_table(answers) for answers in experiment.parts.values()]
    return "\n\n".join(filter(None, blocks)) + "\n"


def render_table(title: str, lines: Iterable[_Line]) -> str:
    """A headed table without the columns that are empty throughout; nothing where there are no lines."""
    lines = list(lines)
    every = dict.fromkeys(column for line in lines for column in line)
    columns = [column for column in every if any(line.get(column) for line in lines)]
    drawn = [columns, ["---"] * len(columns), *([line.get(c, "") for c in columns] for line in lines)]
    return f"## {title}\n\n" + "\n".join(f"| {' | '.join(cells)} |" for cells in drawn) if lines else ""


def describe_difference(difference: Difference | None) -> str:
    """A difference with its interval, in points."""
    if difference is None:
        return ""
    # Adding 0 makes -0.0, which is rounded from a little below, a zero.
    mean, low, high = (round(100 * value, 1) + 0.0 for value in (difference.mean, *difference.interval))
    return f"{mean:+.1f} [{low:+.1f}, {high:+.1f}]"


def _score_lines(experiment: Experiment, table: Table) -> Iterator[_Line]:
    answers = experiment.parts[table.part]
    dense = answers.scores(DENSE_NAME)
    groups = {str(length): [cell for cell in dense if cell.length == length] for _, length, _ in dense}
    groups |= {task: [cell for cell in dense if cell.task == task] for task, _, _ in dense}
    own = {row[0].ratio: row[0] for _, row in table.rows if _is_plain(row[0])}
    for label, row in (("dense", (DENSE,)), *table.rows):
        entry, leank = experiment.choose(row), own.get(row[0].ratio)
        if entry is None or not (scores := answers.scores(entry.name)):
            continue
        others = {} if entry is DENSE else dense  # what it is compared with
        leanks = {} if leank in (None, entry) else answers.scores(leank.name)
        # Of one that was asked less, what dense scores there: its own mean is that of other prompts.
        fewer = {cell: dense[cell][: len(found)] for cell, found in scores.items() if cell in others}
        is_shown = len(take(fewer)) not in (0, len(take(dense)))
        yield {
            "": label,
            "setting": entry.setting,
            "asked": f"{entry.ratio:.0%}" if entry.ratio != EVERY_CHANNEL else "",
            **_removed(experiment, entry),
            "n": f"{len(take(scores)):,}",
            "score": _mean(take(scores)),
            "dense there": _mean(take(fewer)) if is_shown else "",
            "against dense": describe_difference(subtract(scores, others)),
            "LeanK against it": describe_difference(subtract(leanks, scores)),
            **{name: _describe(scores, others, cells) for name, cells in groups.items()},
        }


def _describe(scores: Scores, others: Scores, cells: Collection[Cell]) -> str:
    """The mean in some cells, and the difference to others if there are any."""
    here = {cell: found for cell, found in scores.items() if cell in cells}
    parts = _mean(take(here)), describe_difference(subtract(here, others))
    return "; ".join(filter(None, parts))


def _is_plain(entry: Entry) -> bool:
    """Whether it is LeanK's main mask and nothing else."""
    return entry == Entry(entry.name, ratio=entry.ratio, run=MAIN) and entry.ratio != EVERY_CHANNEL


def _mean(scores: Sequence[float]) -> str:
    return f"{100 * fmean(scores):.1f}" if scores else ""


def _removed(experiment: Experiment, entry: Entry) -> dict[str, str]:
    """Shares of K and V that the pruned region lacks."""
    masks = experiment.bench.masks
    runs = [entry.run] if entry.run else [run for run in experiment.plan.runs if masks.are_made(run)][:1]
    is_shown = entry.kind in ("mask", "think") and entry.ratio != EVERY_CHANNEL
    if not is_shown or not runs or not masks.are_made(runs[0]):
        keys, values = "", ""
    elif entry.run is None:
        head_dim = next(iter(masks[runs[0]].values())).channel_mask.shape[-1]
        keys, values = f"{1 - kept_channels(head_dim, entry.ratio) / head_dim:.1%}", "0.0%"
    else:
        mask = experiment.bench.mask(entry)
        keys, values = f"{mask.pruning_ratio:.1%}", f"{mask.value_pruning_ratio:.1%}"
    return {"K removed": keys, "V removed": values}


def _pair_lines(experiment: Experiment) -> Iterator[_Line]:
    for rows in experiment.plan.pairs:
        names = [entry.name for row in rows if (entry := experiment.choose(row))]
        found = [scores for name in names if (scores := experiment.parts["test"].scores(name))]
        if len(found) == 2:
            yield {"": names[0], "less": names[1], "difference": describe_difference(subtract(*found))}


def _byte_table(experiment: Experiment) -> str:
    plan, kept = experiment.plan, read_result(experiment.bytes_file)
    if not kept:
        return ""
    answers = experiment.parts[plan.weighed_on]
    dense, num_tokens = kept[DENSE_NAME], kept["tokens"]
    lines = []
    weighed = [entry for entry in plan.weighed if entry.name in kept]
    for entry in sorted(weighed, key=lambda entry: -kept[entry.name]["held"]):
        used, scores = kept[entry.name], answers.scores(entry.name)
        change = None if entry is DENSE else subtract(scores, answers.scores(DENSE_NAME))
        lines.append(
            {
                "": entry.name,
                "bytes a token": f"{used['held'] / num_tokens:,.0f}",
                "of dense": f"{used['held'] / dense['held']:.1%}",
                "read by a step": f"{used['read'] / dense['read']:.1%}",
                "score": _mean(take(scores)),
                "against dense": describe_difference(change),
            }
        )
    cells = ", ".join(cell.name for cell in answers.part.cells)
    title = f"Bytes of a cache of {num_tokens:,} tokens, all counted, beside scores on {cells}"
    return render_table(title, lines)


def _text_table(experiment: Experiment) -> str:
    text = experiment.plan.text
    if text is None:
        return ""
    lines = (
        {
            "text behind": f"{texts.kind}, {length}",
            "cache": name,
            "KL": f"{row['kl']:.4f}",
            "agreement": f"{row['agreement']:.1%}",
            "NLL, dense": f"{row['dense_nll']:.3f}",
            "NLL": f"{row['nll']:.3f}",
            "change of NLL, over texts": _with_interval(row.get("nll_changes", ())),
        }
        for texts in experiment.texts
        for length in text.lengths
        for name, row in read_result(texts.path(length)).items()
    )
    title = f"Natural text, {text.num_fed} tokens fed behind so many, {text.num_texts} texts each, in nats"
    return render_table(f"{title} a token", lines)


def _with_interval(values: Sequence[float]) -> str:
    if len(values) < 2:
        return ""
    # Texts are few: Student's t, within 1% of it from six on.
    z, freedom = _Z_95, len(values) - 1
    t = z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    mean, half = fmean(values), t * stdev(values) / math.sqrt(len(values))
    return f"{mean:+.4f} [{mean - half:+.4f}, {mean + half:+.4f}]"


def _answer_tables(experiment: Experiment) -> Iterator[str]:
    for texts in experiment.texts:
        answered = read_result(texts.path("answers"))
        found = {name: compare_answers(own, answered[DENSE_NAME]) for name, own in answered.items()}
        lines = (
            {
                "": name,
                "tokens": f"{each['tokens']:.0f}",
                "log-likelihood": f"{each['log_likelihood']:.3f}",
                "equal answers (%)": f"{100 * each['identical']:.0f}",
                "first difference": f"{each['first_difference']:.0f}",
                "equal tokens (%)": f"{100 * each['equal_tokens']:.1f}",
            }
            for name, each in found.items()
        )
        title = f"Answers of up to {texts.plan.answer_tokens} tokens, {texts.kind}: log-likelihoods are"
        yield render_table(f"{title} the dense model's in nats a token, first differences medians", lines)


def _weak_table(answers: Answers) -> str:
    weak = answers.weak_cells().items()
    lines = ({"task": c.task, "tokens": f"{c.length:,}", "dense": f"{100 * s:.1f}"} for c, s in weak)
    return render_table(f"Left out of {answers.folder.name}", lines)
