"""Results for people and for machines: tables to stderr, one JSON document as the last line of stdout."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

FORMAT_VERSION = 1
_WIDTH = 100
MISSING = "-"


def build_document(
    name: str, environment: Mapping[str, Any], subject: Mapping[str, Any], **results: Any
) -> dict[str, Any]:
    """Put a command's results together; `command` is what was typed."""
    return {
        "benchmark": name,
        "format_version": FORMAT_VERSION,
        "command": ["leank-convert", *sys.argv[1:]],
        "environment": dict(environment),
        "subject": dict(subject),
        **results,
    }


def render_json(document: Mapping[str, Any]) -> str:
    """The document on one line."""
    return json.dumps(document, allow_nan=False)


class Report:
    """Writes for people.

    Args:
        quiet: Whether to write nothing, as all processes but one do.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        # A log gets tables of one width, whatever terminal it was written from.
        width = None if sys.stderr.isatty() else _WIDTH
        self._console = Console(stderr=True, highlight=False, width=width, quiet=quiet)

    def header(
        self, environment: Mapping[str, Any], subject: Mapping[str, Any], *, for_cpu: bool = False
    ) -> None:
        """Say what is measured on what; `for_cpu` if the CPU is what figures are for."""
        versions = ", ".join(
            f"{name} {version}" for name, version in environment["versions"].items() if version
        )
        driver = f", driver {environment['driver']}" if environment.get("driver") else ""
        commit = f", commit {environment['commit']}" if environment["commit"] else ""
        self.line(f"{environment['device']}{driver}{commit}")
        self.line(versions)
        if environment["device_type"] == "cpu" and not for_cpu:
            self.line("on the CPU: a test of this command, its figures say nothing of speed")
        self.line(
            f"{subject['geometry']}: {subject['num_hidden_layers']} layers, {subject['num_attention_heads']} "
            f"query heads, {subject['num_key_value_heads']} KV heads of {subject['head_dim']} channels"
        )
        if "mask" in subject:
            self.line(
                f"mask {subject['mask']}: {subject['pruning_ratio']:.1%} of K channels pruned; sink "
                f"{subject['sink_size']}, recent {subject['recent_size']}, flush {subject['flush_size']}"
            )

    def line(self, text: str) -> None:
        """Write one line."""
        self._console.print(text, markup=False, soft_wrap=True)

    def table(
        self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str] = ()
    ) -> None:
        """Write a table, and notes below it; columns without a heading are text, the others figures."""
        self._console.print(title, style="bold", markup=False, soft_wrap=True)
        table = Table()
        for column in columns:
            table.add_column(column, justify="right" if column else "left", overflow="fold")
        for row in rows:
            table.add_row(*row)
        self._console.print(table)
        for note in notes:
            self._console.print(f"  {note}", markup=False, soft_wrap=True)


def number(value: float | None, digits: int = 2) -> str:
    """A figure, or a dash where there is none."""
    return MISSING if value is None else f"{value:,.{digits}f}"


def share(value: float | None) -> str:
    """A fraction in percent, or a dash where there is none."""
    return MISSING if value is None else f"{value:.1%}"


def ratio(value: float | None) -> str:
    """How many times as fast or as many, or a dash where it is unknown."""
    return MISSING if value is None else f"{value:.2f}x"
