"""Device of a run, and whether this process is the one that writes."""

from __future__ import annotations

import os

import torch

from leank_convert.errors import LeanKError, first_line


def choose_device(device: str | torch.device | None) -> torch.device:
    """Find out whether a device can be used before anything is loaded onto it; None is CUDA if there is any.

    Raises:
        LeanKError: If torch does not know the device, or cannot compute on it here.
    """
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
        # Naming a device proves nothing. What a value cannot be read back from, as `meta`, is no use either.
        torch.zeros(1, device=chosen).item()
    except (RuntimeError, AssertionError, ImportError) as error:
        raise LeanKError(
            f"device `{device}` cannot be used: {first_line(error)}",
            hint="`cpu` always can, `cuda` and `cuda:0` where there is a GPU and torch is built for it",
        ) from error
    return chosen


def is_first_process() -> bool:
    """Whether this is the only process of a run, or the first of those that a launcher started."""
    return os.environ.get("RANK", "0") == "0"
