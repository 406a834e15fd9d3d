"""Resolve an evaluation: where its prompts come from, and what answers. Refuses what can be seen by that.

Importing this module does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from leank_convert.checkpoint_io import RATIO_PREFIX, TRAINING_FOLDER, read_leank_config
from leank_convert.errors import LeanKError, cut
from leank_convert.evaluate.names import WINDOW, check_names
from leank_convert.fields import Fields
from leank_convert.files import user_path
from leank_convert.folders import check_folder
from leank_convert.recipe import DataSection, Recipe
from leank_convert.recipe_file import RUN_RECIPE_NAME, find_recipe, require_recipe

if TYPE_CHECKING:
    import torch

SETTINGS_NAME, ANSWERS_NAME = "settings.json", "answers.jsonl"
RESULT_NAMES = JSON_NAME, CSV_NAME, PLOT_NAME = "results.json", "results.csv", "results.png"

HELD_OUT, RULER, LONGBENCH, GSM_INFINITE = "held-out", "ruler", "longbench", "gsm-infinite"
MEASURES = {
    HELD_OUT: "exact match", RULER: "RULER", LONGBENCH: "LongBench", GSM_INFINITE: "GSM-Infinite"
}  # fmt: skip
"""What a score is, by the source of the prompts."""
_PUBLISHED = (LONGBENCH, GSM_INFINITE)  # whose files the user brings
_SEED = 1_000_000  # far from what training draws by


@dataclass(frozen=True)
class EvaluationRequest:
    """An evaluation as it is asked for; the attributes are `evaluate_checkpoint`'s parameters."""

    checkpoint: Path
    mask: str | Path | None = None
    recipe: Recipe | str | Path | None = None
    overrides: Sequence[str] = ()
    tasks: Sequence[str] = ()
    lengths: Sequence[int] = ()
    haystack: str | None = None
    questions: str | Path | None = None
    data: str | Path | None = None
    num_samples: int = 200
    seed: int | None = None
    also: Sequence[str] | None = None
    against: str | None = None
    out: Path | None = None
    device: str | torch.device | None = None
    batch_size: int = 8
    trust: bool = False
    progress: bool = False


@dataclass(frozen=True)
class Evaluation:
    """An evaluation that has been resolved; no model is loaded yet."""

    request: EvaluationRequest
    source: str  # where prompts come from, a key of `MEASURES`
    section: DataSection | None  # of the recipe whose held-out samples are asked, None with another source
    seed: int  # of the prompts
    also: Sequence[str]  # names of what else answers


def resolve_evaluation(request: EvaluationRequest) -> Evaluation:
    """Resolve an evaluation, and refuse what can be refused before a model is loaded.

    Raises:
        LeanKError: If arguments contradict each other, the checkpoint is none, there is no such recipe, or
            `out` holds files that no evaluation wrote.
    """
    asked = Fields(vars(request), "evaluation")
    for name, least in (("num_samples", 1), ("batch_size", 1), ("seed", 0)):
        if getattr(request, name) is not None:
            asked.whole_number(name, least, 2**63 - 1)
    for name, kind in (("overrides", str), ("tasks", str), ("lengths", int), ("also", str)):
        value = getattr(request, name)
        fits = isinstance(value, Sequence) and not isinstance(value, str)
        if value is not None and not (fits and all(type(entry) is kind for entry in value)):
            raise asked.refused(name, f"not a list of {'texts' if kind is str else 'whole numbers'}")
    published = next((task for task in request.tasks if task in _PUBLISHED), None)
    source = published or (RULER if request.tasks else HELD_OUT)
    for message, hint in _contradictions(request, source):
        raise LeanKError(message, hint=hint)
    check_names(request.also or ())
    if request.out is not None:
        out = check_folder(request.out)
        for name in (ANSWERS_NAME, *RESULT_NAMES):
            if (out / name).exists() and not (out / SETTINGS_NAME).exists():  # results would replace it
                raise LeanKError(
                    f"`{out / name}` was not written by `evaluate`: `{out}` has no `{SETTINGS_NAME}`",
                    hint="name another folder with `--out`",
                )
    if request.mask is None:
        read_leank_config(request.checkpoint)  # what is no checkpoint is refused as such
    also = request.also
    if also is None:
        also = (WINDOW,) if source == HELD_OUT else ()
    section, seed = None, _SEED if request.seed is None else request.seed
    if source == HELD_OUT:
        recipe = _choose_recipe(request)
        section = recipe.data
        if seed in (recipe.seed, recipe.validation_seed):
            raise LeanKError(
                f"`--seed` {seed} would draw the samples that the recipe's training or validation draws",
                hint="name another, or leave it out",
            )
    return Evaluation(request, source, section, seed, also)


def _contradictions(request: EvaluationRequest, source: str) -> Iterator[tuple[str, str]]:
    """What contradicts itself in a request, each with its remedy; names are those of the options."""
    tasks, lengths = request.tasks, request.lengths
    if tasks and (request.recipe is not None or request.overrides):
        yield (
            "`--recipe` and `--set` choose a recipe's data, and `--task` asks something else",
            "leave one of them out",
        )
    if isinstance(request.recipe, Recipe) and request.overrides:
        yield (
            "a recipe that has been read is not changed by `overrides`",
            "read it with them, or leave them out",
        )
    section = next((entry for entry in request.overrides if not entry.startswith("data")), None)
    if section is not None:
        yield (
            f"`--set` {cut(section)} has no effect: of a recipe held-out samples take `data` alone",
            "leave it out; windows and ratios are those of the checkpoint or of `--mask`",
        )
    if request.data is not None and (source not in _PUBLISHED or len(set(tasks)) > 1):
        listed = ", ".join(f"`{task}`" for task in tasks) or "no task"
        yield (
            f"published files and {listed} do not go together",
            "`--data` goes with `--task longbench` or `--task gsm-infinite`, each alone",
        )
    if source != RULER and (request.haystack is not None or request.questions is not None):
        yield (
            "`--haystack` and `--questions` go with `--task` and the names of RULER's tasks",
            "leave them out",
        )
    if source in (HELD_OUT, RULER) and bool(tasks) != bool(lengths):
        yield "`--task` and `--length` go together", "add the other, or leave it out"
    if source not in _PUBLISHED:
        return
    if request.data is None:
        yield f"task `{source}` needs the benchmark's published files", "name their folder by `--data`"
    if request.seed is not None:
        yield "`--seed` has no effect with `--data`: every task's first prompts are asked", "leave it out"
    if source == GSM_INFINITE and lengths:
        yield (
            f"task `{source}` takes no length: its problems have those of their files",
            "bring the files of the lengths that you want",
        )
    if len(set(lengths)) > 1:
        yield f"task `{source}` takes one length, not {list(lengths)}", "evaluate for each"


def _find_run(request: EvaluationRequest) -> Path:
    """The folder of the training run that made the checkpoint or the mask, if there was one."""
    made = request.checkpoint if request.mask is None else user_path(request.mask)
    folder = (made if made.is_dir() else made.parent).resolve()
    folders = [folder, folder.parent] if folder.name.startswith(RATIO_PREFIX) else [folder]
    runs = (each for each in folders if (each / TRAINING_FOLDER / RUN_RECIPE_NAME).exists())
    return next(runs, request.checkpoint) if made.exists() else request.checkpoint


def _choose_recipe(request: EvaluationRequest) -> Recipe:
    """The recipe that is asked for, else the training run's, else that of the mask's model."""
    checkpoint, overrides = request.checkpoint, request.overrides
    found = find_recipe(request.recipe, None, run=_find_run(request), overrides=overrides)
    if found is not None:
        return found
    from leank_convert.mask import MASK_FILE_NAME, load_mask, resolve_mask  # imports torch

    mask_file = checkpoint / MASK_FILE_NAME if request.mask is None else resolve_mask(request.mask)
    provenance = load_mask(mask_file).provenance if mask_file.exists() else None
    unmade = None if request.mask is None else checkpoint
    model = provenance.model if provenance else unmade
    return require_recipe(None, model, run=checkpoint, overrides=overrides)
