"""Published baselines of `evaluate --also` that only a checkout has, in `bin/baselines`: names and lookup."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from leank_convert.errors import LeanKError

NAMES = ("int4+hadamard", "leank+int4+hadamard", "kivi", "leank+kivi", "quest", "leank+quest", "snapkv")
_CHECKOUT = Path(__file__).resolve().parents[1]
_PACKAGE = "bin.baselines"


def check_baselines(names: Iterable[str]) -> None:
    """Refuse baselines where the package was not installed from a checkout, as `bin/setup` does.

    Raises:
        LeanKError: If there is one.
    """
    asked = [name for name in names if name in NAMES]
    if asked and not _CHECKOUT.joinpath(*_PACKAGE.split(".")).is_dir():
        raise LeanKError(
            f"`{asked[0]}` is a published baseline, and only a checkout of leank-convert has those",
            hint="clone the repository, run `bin/setup`, and take the `leank-convert` of its `.venv`",
        )


def load_baselines(names: Iterable[str]) -> Mapping[str, Callable[..., Any]]:
    """Load the factories of all baselines by name if one of them is asked for; nothing otherwise.

    Raises:
        LeanKError: If there is no checkout.
    """
    asked = set(names) & set(NAMES)
    check_baselines(asked)
    if not asked:
        return {}
    if str(_CHECKOUT) not in sys.path:  # an editable install maps `leank_convert` alone
        sys.path.append(str(_CHECKOUT))
    found: Mapping[str, Callable[..., Any]] = import_module(_PACKAGE).VARIANTS
    return found
