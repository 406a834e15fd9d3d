"""Window sizes: which tokens of a sequence keep every channel."""

from __future__ import annotations

from dataclasses import dataclass

from leank_convert.errors import LeanKError, cut

PRUNE_MODES = ("eager", "deferred")
MAX_WINDOW = 2**24  # more tokens than any context has


@dataclass(frozen=True)
class Windows:
    """How a checkpoint prunes while it decodes.

    Attributes:
        sink_size: First tokens that keep every channel.
        recent_size: Last tokens that keep every channel.
        flush_size: Tokens that leave the recent window at once; training has no use for it.
        prune: `eager` prunes after every forward of several tokens, `deferred` when decoding begins.

    Raises:
        LeanKError: If a size or the mode makes no sense.
    """

    sink_size: int = 128
    recent_size: int = 1024
    flush_size: int = 32
    prune: str = "eager"

    @property
    def sizes(self) -> dict[str, int]:
        """The three sizes by name."""
        return {"sink_size": self.sink_size, "recent_size": self.recent_size, "flush_size": self.flush_size}

    def __post_init__(self) -> None:
        for name, least in (("sink_size", 0), ("recent_size", 0), ("flush_size", 1)):
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= MAX_WINDOW:
                raise LeanKError(
                    f"`{name}` is {cut(value)}, not a whole number of tokens from {least} to {MAX_WINDOW}"
                )
        if self.prune not in PRUNE_MODES:
            raise LeanKError(f"`prune` is {cut(self.prune)}, not one of `eager`, `deferred`")
