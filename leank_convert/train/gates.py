"""Gates of heads as DuoAttention keeps them (Xiao et al., arXiv 2410.10819): a folder of two files.

`full_attention_heads.tsv` has a line per layer and in it a number per KV head, separated by tabs: how much
the head needs more than sink and recent window. `config.json` says how the gates were learned; of it only
`sink_size` and `recent_size` are read, and written.

Gates are learned here by the paper's loss, penalty, rate and clamp, with three differences. The context is
dense, as it is in deployment: gates act on answer tokens alone. The full attention in a head's mixture is the
student's own, as the paper writes it; DuoAttention's code takes the teacher's. And of equal gates that of
the lower layer and head ranks first, where that code draws lots.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from leank_convert.architectures import ModelFacts
from leank_convert.checkpoint_io import CONFIG_NAME
from leank_convert.errors import LeanKError, first_line
from leank_convert.fields import Fields
from leank_convert.files import read_json, user_path, write_atomically
from leank_convert.recipe import Recipe, WindowsSection

GATES_NAME = "full_attention_heads.tsv"

_logger = logging.getLogger("leank_convert")


def load_pattern(recipe: Recipe, facts: ModelFacts) -> Tensor:
    """Read the gates that a recipe names, float32 [L, H_kv, 1]; warn if they are of larger windows.

    DuoAttention clamps gates to [0, 1] where it uses them, so its files may hold numbers a little outside;
    here they are clamped already.

    Raises:
        LeanKError: If a file is not there, is not of that format, or does not fit the model.
    """
    folder, windows = user_path(str(recipe.heads.pattern)), recipe.windows
    path = folder / GATES_NAME
    try:
        text = path.read_text(encoding="utf-8")
        if not text.strip():
            raise ValueError("it is empty")
        gates = np.loadtxt(text.splitlines(), dtype=float, comments=None, delimiter="\t", ndmin=2)
        if not np.isfinite(gates).all():
            raise ValueError("a gate is not finite")
    except (OSError, ValueError) as error:
        # Of lines of unequal length, numpy goes on to name an argument of its own.
        told = error.strerror if isinstance(error, OSError) else first_line(error).partition(";")[0]
        raise _unreadable(path, told, "a line per layer, a number per KV head, separated by tabs") from error
    expected = facts.mask_shape[:2]
    if gates.shape != expected:
        raise LeanKError(
            f"`{path}` has gates of shape {list(gates.shape)}; the model needs {list(expected)} (layers, KV "
            "heads)",
            hint="a pattern fits only the model it was made for; set `heads.pattern` to null to learn one",
        )
    path = folder / CONFIG_NAME
    try:
        learned = Fields(read_json(path), CONFIG_NAME)
        sizes = {key: learned.whole_number(key, 0, sys.maxsize) for key in ("sink_size", "recent_size")}
    except LeanKError as error:
        told = "a JSON object with `sink_size` and `recent_size`"
        raise _unreadable(path, error.message, told) from error
    for key, size in sizes.items():
        if size > getattr(windows, key):
            _logger.warning(
                "`%s` was learned with `%s` %d, and `windows.%s` is %d: its heads see less than they did",
                folder,
                key,
                size,
                key,
                getattr(windows, key),
            )
    return torch.from_numpy(gates).clamp(0.0, 1.0).float()[..., None]


def save_pattern(gates: Tensor, windows: WindowsSection, folder: Path) -> None:
    """Write gates [L, H_kv, 1] for this or another toolkit to read."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["\t".join(map(str, layer)) for layer in gates[..., 0].tolist()]
    write_atomically(folder / GATES_NAME, "".join(f"{line}\n" for line in lines).encode())
    sizes = windows.model_dump(include={"sink_size", "recent_size"})
    write_atomically(folder / CONFIG_NAME, f"{json.dumps(sizes)}\n".encode())


def _unreadable(path: Path, told: str | None, expected: str) -> LeanKError:
    return LeanKError(
        f"`{path}` of `heads.pattern` cannot be read: {told}",
        hint=f"a folder of DuoAttention's `attn_patterns/` is needed; this file of it holds {expected}",
    )
