"""Evaluation: what a checkpoint loses against its own dense model, decoding from one prefill.

Loading, prompts, variants, answers, comparison: `run.py` takes these steps in turn. Importing this package
imports no library.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from leank_convert.evaluate.comparison import Comparison
    from leank_convert.recipe import Recipe

__all__ = ["evaluate_checkpoint"]


def evaluate_checkpoint(
    checkpoint: str | Path,
    *,
    mask: str | Path | None = None,
    recipe: Recipe | str | Path | None = None,
    overrides: Sequence[str] = (),
    tasks: Sequence[str] = (),
    lengths: Sequence[int] = (),
    haystack: str | None = None,
    questions: str | Path | None = None,
    data: str | Path | None = None,
    num_samples: int = 200,
    seed: int | None = None,
    also: Sequence[str] | None = None,
    against: str | None = None,
    out: str | Path | None = None,
    device: str | torch.device | None = None,
    batch_size: int = 8,
    trust: bool = False,
    progress: bool = False,
) -> Comparison:
    """Compare a checkpoint's pruned answers with those of its own weights in the stock class.

    Args:
        checkpoint: A folder that `export` wrote; with `mask`, a model: a folder, a hub id, or `testbed`.
        mask: What to prune the model by, in memory: a mask's file, the folder of a training run, a hub id,
            or the name of a packaged mask. Nothing is written.
        recipe: Held-out samples of its data are asked: a recipe, its name or file; None for that of the
            training run that made the checkpoint or the mask, or else of its model.
        overrides: Changes to a recipe that is read from a file, `key=value`.
        tasks: RULER's tasks by name instead of a recipe's data, of which `ruler` is all; or `longbench` or
            `gsm-infinite` alone, with `data`.
        lengths: With RULER's tasks: tokens of a prompt and its answer. With `longbench` at most one; none
            for the model's positions.
        haystack: With RULER's tasks: running text, a .txt, .json or .jsonl file or a dataset's hub id; None
            for built-in sentences.
        questions: With the task `qa`: a .json or .jsonl file of records with `question`, `answers` and
            `documents`, or SQuAD's .json.
        data: With `longbench` or `gsm-infinite`: the folder of the published files.
        num_samples: Prompts; with `tasks`, of each task at each length.
        seed: Of the prompts; None for 1000000. With `data` there is nothing to draw.
        also: What else answers: `window` (no pruned key at all), `think` (ThinK's choice of channels per
            prompt), `per-head-budget-dynamic` (the mask's widths with ThinK's choice), `fp8`, `int4`, or
            on the kept channels `leank+fp8`, `leank+int4`; in a checkout also published baselines, in all
            settings that are reported: `int4+hadamard`, `kivi`, `quest`, each also with `leank+` before
            it, and `snapkv`. None for `window`, and for nothing with `tasks`.
        against: What to compare with instead: a model, another checkpoint or an ONNX folder; hub id or path.
        out: Where every answer is kept as it comes, and the results; an evaluation that finds some answers
            there asks only the rest.
        device: Default: CUDA if there is any, else the CPU.
        batch_size: Prompts decoded together, padded on the left.
        trust: Whether a checkpoint's Python files may run even where they are no release's.
        progress: Whether to draw a progress bar to stderr.

    Raises:
        LeanKError: If `checkpoint` is no LeanK checkpoint or holds other code than a release's, the mask is
            not made for the model, there is no such recipe or task, arguments contradict each other, prompts
            cannot be drawn for its tokenizer, all of them are too short for anything to be pruned, `against`
            has another tokenizer, `out` holds answers of another evaluation, or memory does not suffice.
    """
    asked = locals()  # the attributes of a request are these parameters
    from leank_convert.evaluate.request import EvaluationRequest, resolve_evaluation
    from leank_convert.files import user_path

    paths = {"checkpoint": checkpoint, "out": out, "questions": questions, "data": data}
    asked |= {name: None if path is None else user_path(path) for name, path in paths.items()}
    evaluation = resolve_evaluation(EvaluationRequest(**asked))
    from leank_convert.evaluate.run import run_evaluation  # imports torch

    return run_evaluation(evaluation)
