"""Window sizes: the runtime's, with the toolkit's errors."""

from __future__ import annotations

from leank_convert._runtime.windows_leank import MAX_SIZE
from leank_convert._runtime.windows_leank import Windows as RuntimeWindows
from leank_convert.errors import LeanKError

MAX_WINDOW: int = MAX_SIZE


class Windows(RuntimeWindows):  # type: ignore[misc]
    """The runtime's `Windows`; LeanKError if a size or the mode makes no sense."""

    sink_size: int  # first tokens that keep every channel
    recent_size: int  # last tokens that keep every channel
    flush_size: int  # tokens that leave the recent window at once; training has no use for it
    prune: str  # `eager` prunes after every forward of several tokens, `deferred` when decoding begins

    def __post_init__(self) -> None:
        try:
            super().__post_init__()
        except ValueError as error:
            raise LeanKError(str(error)) from None


def derive_windows(positions: int) -> Windows:
    """Return window sizes for a model without a recipe: the paper's, and smaller where positions are few."""
    recent = 1024 if positions >= 32768 else positions // 32
    return Windows(min(128, positions // 128), recent, max(1, min(32, recent // 4)))
