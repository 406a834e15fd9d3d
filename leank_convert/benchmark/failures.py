"""Peers may fail in any way: one line says why, and what their compilers print stays off the table."""

from __future__ import annotations

import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from leank_convert.errors import first_line

_STDERR = 2


def tell_reason(error: Exception) -> str:
    """Why something failed, in one line.

    A compiler's message begins with a place, goes on with source and then names the error.
    """
    reason = first_line(error)
    if not reason.endswith(":"):
        return reason
    named = [
        line.strip() for line in str(error).splitlines()[1:] if re.match(r"\s*\w*(Error|Exception)\b", line)
    ]
    return f"{reason} {named[-1]}" if named else reason


@contextmanager
def silenced() -> Iterator[None]:
    """Drop warnings and whatever is written to stderr, by subprocesses too; `--debug` lets all through."""
    if logging.getLogger().isEnabledFor(logging.DEBUG):
        yield
        return
    sys.stderr.flush()
    kept, nowhere = os.dup(_STDERR), os.open(os.devnull, os.O_WRONLY)
    # Not `sys.stderr` itself: a log handler made meanwhile would keep what stood there.
    os.dup2(nowhere, _STDERR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, _STDERR)
        os.close(kept)
        os.close(nowhere)
