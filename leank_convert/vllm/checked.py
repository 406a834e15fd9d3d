"""Kernels beside those of decoding: made, and held to plain torch, before they serve."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import torch

logger = logging.getLogger(__name__)

_Made = TypeVar("_Made")


DISAGREEMENT = "they disagree with plain torch"


def make_checked(make: Callable[[], _Made], find_fault: Callable[[_Made], str], told: str) -> _Made | None:
    """Make kernels beside decode kernels; None if that fails or they have a fault, and a warning tells."""
    try:
        made = make()
        reason = find_fault(made)
        if not reason:
            return made
    except torch.OutOfMemoryError:
        raise  # it says nothing about the kernels, and may pass
    except Exception as exception:  # whatever a compiler or driver may raise
        reason = f"{type(exception).__name__}: {str(exception).strip()[-300:]}"
    logger.warning("%s: %s", told, reason)
    return None
