"""Names of what `--also` lets answer, and lookup of the published baselines that only a checkout has.

Importing this module imports no library.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from leank_convert.errors import LeanKError

DENSE, PRUNED, WINDOW, THINK, PER_HEAD_BUDGET = (
    "dense", "pruned", "window", "think", "per-head-budget-dynamic"
)  # fmt: skip
ROUNDED = ("fp8", "leank+fp8", "int4", "leank+int4")
BASELINES = ("int4+hadamard", "leank+int4+hadamard", "kivi", "leank+kivi", "quest", "leank+quest", "snapkv")
"""They lie in `bin/baselines`."""
ALSO = (WINDOW, THINK, PER_HEAD_BUDGET, *ROUNDED, *BASELINES)
_CHECKOUT = Path(__file__).resolve().parents[2]
_PACKAGE = "bin.baselines"


def check_names(names: Iterable[str]) -> None:
    """Refuse, by a LeanKError, names of nothing, and baselines where there is no checkout that has them."""
    for name in names:
        if name not in ALSO:
            raise LeanKError(f"`{name}`: no variant to compare with", hint=f"take one of {', '.join(ALSO)}")
        if name in BASELINES and not _CHECKOUT.joinpath(*_PACKAGE.split(".")).is_dir():
            raise LeanKError(
                f"`{name}` is a published baseline, and only a checkout of leank-convert has those",
                hint="clone the repository, run `bin/setup`, and take the `leank-convert` of its `.venv`",
            )


def load_baselines(names: Iterable[str]) -> Mapping[str, Callable[..., Any]]:
    """Load the factories of all baselines by name if one of them is asked for; nothing otherwise."""
    if not set(names) & set(BASELINES):
        return {}
    if str(_CHECKOUT) not in sys.path:  # an editable install maps `leank_convert` alone
        sys.path.append(str(_CHECKOUT))
    found: Mapping[str, Callable[..., Any]] = import_module(_PACKAGE).VARIANTS
    return found
