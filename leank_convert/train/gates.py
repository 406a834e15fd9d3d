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
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from leank_convert.architectures import ModelFacts
from leank_convert.checkpoint_io import CONFIG_NAME
from leank_convert.errors import LeanKError, first_line
from leank_convert.files import parse_json, write_atomically
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
    folder = Path(str(recipe.heads.pattern))
    gates = _read_gates(folder / GATES_NAME)
    expected = facts.mask_shape[:2]
    if gates.shape != expected:
        raise LeanKError(
            f"`{folder / GATES_NAME}` has gates of shape {list(gates.shape)}; the model needs "
            f"{list(expected)} (layers, KV heads)",
            hint="a pattern fits only the model it was made for; set `heads.pattern` to null to learn one",
        )
    learned, windows = _read_config(folder / CONFIG_NAME), recipe.windows
    for key, size in learned.items():
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


def _read_gates(path: Path) -> np.ndarray[Any, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        if not text.strip():
            raise ValueError("it is empty")
        gates = np.loadtxt(text.splitlines(), dtype=float, comments=None, delimiter="\t", ndmin=2)
        if not np.isfinite(gates).all():
            raise ValueError("a gate is not finite")
    except (OSError, ValueError) as error:
        # Of lines of unequal length, numpy goes on to name an argument of its own.
        told = error if isinstance(error, OSError) else first_line(error).partition(";")[0]
        raise _unreadable(path, told, "a line per layer, a number per KV head, separated by tabs") from error
    return gates


def _read_config(path: Path) -> dict[str, int]:
    try:
        config = parse_json(path.read_bytes())
        sizes = {key: config[key] for key in ("sink_size", "recent_size")}
        for key, size in sizes.items():
            if not isinstance(size, int) or isinstance(size, bool) or size < 0:
                raise ValueError(f"`{key}` is `{size}`, no number of tokens")
    except (OSError, ValueError, TypeError, KeyError) as error:
        missing = f"there is no key {error}" if isinstance(error, KeyError) else error
        raise _unreadable(path, missing, "a JSON object with `sink_size` and `recent_size`") from error
    return sizes


def _unreadable(path: Path, error: Exception | str, expected: str) -> LeanKError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else error
    told = first_line(reason) if isinstance(reason, Exception) else reason
    return LeanKError(
        f"`{path}` of `heads.pattern` cannot be read: {told}",
        hint=f"a folder of DuoAttention's `attn_patterns/` is needed; this file of it holds {expected}",
    )
