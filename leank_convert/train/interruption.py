"""Interruption by Ctrl-C or SIGTERM: a run ends between two steps, where its state can be saved."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

_SIGNALS = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}


class Interruption:
    """Notes the first of the signals that ask a process to end; a context manager.

    The same signal a second time does what it did before: someone who cannot wait for the end of a step need
    not. (Not another one: a launcher of several processes answers Ctrl-C, which they all get, by SIGTERM.)
    Outside the main thread, where Python allows no signal handler, nothing is ever noted.
    """

    def __init__(self) -> None:
        self._received: int | None = None
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

    @property
    def reason(self) -> str | None:
        """What asked for the end, as a user knows it; None as long as nothing did."""
        return None if self._received is None else _SIGNALS[signal.Signals(self._received)]

    @property
    def exit_code(self) -> int:
        """What a shell reports for a process that this signal ended: 130 or 143."""
        return 128 + (self._received or 0)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received = self._received or number
        signal.signal(number, self._previous.pop(signal.Signals(number)))
