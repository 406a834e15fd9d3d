"""Interruption by Ctrl-C or SIGTERM: a run ends between two steps, where its state can be saved."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

from leank_convert.errors import LeanKError

_SIGNALS = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}


class Interruption:
    """Notes the first of the signals that ask a process to end; a context manager.

    The same signal a second time does what it did before: someone who cannot wait for the end of a step need
    not. (Not another one: a launcher of several processes answers Ctrl-C, which they all get, by SIGTERM.)
    Outside the main thread, where Python allows no signal handler, nothing is ever noted.
    """

    def __init__(self) -> None:
        self.received: int | None = None  # the first of the signals
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                # None: handled by what is not Python, which Python cannot put back.
                if signal.getsignal(number) not in (None, signal.SIG_IGN):
                    self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        while self._previous:
            signal.signal(*self._previous.popitem())

    def error(self, ended: str, *, resumes: bool = True) -> LeanKError | None:
        """Say what asked for the end of what is `ended`; None as long as nothing did.

        The exit code is what a shell reports for a process that this signal ended: 130 or 143.
        """
        if self.received is None:
            return None
        hint = "go on with it by `--resume`" if resumes else None
        return LeanKError(
            f"{_SIGNALS[signal.Signals(self.received)]} ended {ended}", hint, 128 + self.received
        )

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or number
        signal.signal(number, self._previous.pop(signal.Signals(number)))
