"""Windows: which tokens of a row keep every channel, and when the others are pruned. Pure Python."""

from __future__ import annotations

import reprlib
from dataclasses import dataclass

PRUNE_MODES = ("eager", "deferred")
MAX_SIZE = 1 << 24
"""Most tokens that sink_size, recent_size, flush_size and what is reserved may be."""


@dataclass(frozen=True)
class Windows:
    """Window sizes, and when to prune; what is no number of tokens, or no mode, raises a ValueError."""

    sink_size: int = 128  # tokens at the start of a row that keep every channel
    recent_size: int = 1024  # latest tokens that keep every channel
    flush_size: int = 32  # tokens that leave the recent window at a time while decoding
    prune: str = "eager"  # prompt tokens: `eager` after every forward, `deferred` when decoding begins

    def __post_init__(self) -> None:
        """Check all four."""
        for name, value in self.sizes.items():
            check_size(name, value)
        check_choice(self.prune, PRUNE_MODES, "`prune`")

    @property
    def sizes(self) -> dict[str, int]:
        """The three sizes by name."""
        return {"sink_size": self.sink_size, "recent_size": self.recent_size, "flush_size": self.flush_size}

    @property
    def total(self) -> int:
        """Most tokens that keep every channel at once."""
        return self.sink_size + self.recent_size + self.flush_size


def check_choice(value: object, choices: tuple[str, ...], origin: str) -> str:
    """Return one of these choices, or raise a ValueError that names where it came from."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(
            f"{origin} is {reprlib.repr(value)}, not one of {', '.join(f'`{choice}`' for choice in choices)}"
        )
    return value


def check_size(name: str, value: object, origin: str = "`") -> None:
    """Raise a ValueError that begins with `origin` and `name` unless `value` can be a number of tokens."""
    least = 1 if name == "flush_size" else 0
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MAX_SIZE:
        raise ValueError(
            f"{origin}{name}` is {reprlib.repr(value)}, not an integer from {least} to {MAX_SIZE}"
        )
