"""The masks that ship with the package: a file each, named by its model and the percent that was asked to go.

A mask is added by putting its file here: `smollm2-135m-instruct-70.safetensors` holds a mask of a model whose
hub id ends in `SmolLM2-135M-Instruct`, and names that id itself; `smollm2-135m-instruct-70-v50.safetensors`
prunes 50% of V, too. Importing this module does not import torch.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from leank_convert.errors import LeanKError, shorten
from leank_convert.safetensors_file import read_header

FOLDER = Path(__file__).parent
DEFAULT_RATIO = 0.7  # of several masks of a model, the paper's
_NAME = re.compile(r"(?P<model>.+)-(?P<keys>[\d.]+)(-v(?P<values>[\d.]+))?")


def list_masks() -> list[Path]:
    """The files, by name."""
    return sorted(FOLDER.glob("*.safetensors"))


def is_packaged(path: Path) -> bool:
    """Whether a mask's file is one of these."""
    return path.parent == FOLDER


def find_by_name(name: str, pruning_ratio: float | None = None) -> Path:
    """Find a mask by its file's name, or one of K alone by that without the percent.

    Args:
        name: Such as `smollm2-135m-instruct-70`, or `smollm2-135m-instruct`.
        pruning_ratio: Which one of several; None for the only one, else for `DEFAULT_RATIO`.

    Raises:
        LeanKError: If there is none of that name or ratio.
    """
    of_keys = [path for path in list_masks() if value_percent(path) is None]
    files = [path for path in list_masks() if name.lower() == path.stem]
    files = files or [path for path in of_keys if name.lower() == model_part(path)]
    if not files:
        names = {each for path in list_masks() for each in (path.stem, model_part(path))}
        close = difflib.get_close_matches(name.lower(), sorted(names), n=3)
        listed = ", ".join(f"`{each}`" for each in close or (path.stem for path in list_masks()))
        raise LeanKError(
            f"mask `{shorten(name)}` is neither a file or folder, nor a hub id, nor a packaged mask",
            hint=f"did you mean {listed}?" if close else f"packaged masks: {listed}",
        )
    return _pick(files, pruning_ratio, f"`{shorten(name)}`")


def find_by_model(
    model: str, pruning_ratio: float | None = None, value_pruning_ratio: float | None = None
) -> Path | None:
    """Find the mask of a model by the model's hub id; None if there is none of any ratio, or not of both.

    Args:
        model: Hub id, or `testbed`.
        pruning_ratio: As for `find_by_name`.
        value_pruning_ratio: Of V; None for a mask of K alone.

    Raises:
        LeanKError: If there is none of that ratio, or a file is damaged.
    """
    part, values = model.rpartition("/")[2].lower(), f"{100 * (value_pruning_ratio or 0):g}"
    named = [p for p in list_masks() if model_part(p) == part and (value_percent(p) or "0") == values]
    files = [path for path in named if read_header(path).metadata.get("model") == model]
    if value_pruning_ratio:
        asked = f"{100 * (DEFAULT_RATIO if pruning_ratio is None else pruning_ratio):g}"
        return next((path for path in files if percent(path) == asked), None)
    return _pick(files, pruning_ratio, f"`{model}`") if files else None


def percent(path: Path) -> str:
    """The percent of K in a file's name."""
    return _part(path, "keys") or ""


def value_percent(path: Path) -> str | None:
    """The percent of V behind it; None of a mask of K alone."""
    return _part(path, "values")


def model_part(path: Path) -> str:
    """What is before both: the model's name in small letters."""
    return _part(path, "model") or ""


def _part(path: Path, name: str) -> str | None:
    found = _NAME.fullmatch(path.stem)
    return found and found[name]


def _pick(files: list[Path], pruning_ratio: float | None, what: str) -> Path:
    """One of a model's masks: only one that was made for the ratio itself."""
    if pruning_ratio is None and len(files) == 1:
        return files[0]
    asked = f"{100 * (DEFAULT_RATIO if pruning_ratio is None else pruning_ratio):g}"
    for path in files:
        if percent(path) == asked:
            return path
    ratios = ", ".join(f"{float(each) / 100:g}" for each in sorted(map(percent, files), key=float))
    raise LeanKError(
        f"no packaged mask of {what} was made for a pruning ratio of {float(asked) / 100:g}; "
        f"there {'are masks' if len(files) > 1 else 'is one'} for {ratios}",
        hint="name one of these by `--pruning-ratio`, or learn a mask with `leank-convert train`",
    )
