"""What a figure depends on beside the code: the machine, the versions, how fast its memory can be read."""

from __future__ import annotations

import gc
import importlib.metadata
import platform
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from leank_convert.benchmark.timing import time_calls
from leank_convert.device import choose_device
from leank_convert.errors import LeanKError, first_line

_PACKAGES = ("torch", "transformers", "tilelang", "triton", "flashinfer-python", "leank-convert")
_READ_BYTES = {"cuda": 1 << 32, "cpu": 1 << 24}
_ROW = 16384
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def require_cuda(device: str | None) -> None:
    """Refuse to measure on the CPU by default.

    Raises:
        LeanKError: If no device is named and there is no CUDA device.
    """
    if device is None and not torch.cuda.is_available():
        raise LeanKError(
            "there is no CUDA device to measure on",
            hint="run it on a machine with a GPU; `--device cpu` runs the command at toy sizes, as a test",
        )


def choose_benchmark_device(device: str | None) -> torch.device:
    """The device to measure on: CUDA, unless the CPU is asked for by name.

    Raises:
        LeanKError: If there is no CUDA device and none was named, or the named one cannot be used.
    """
    require_cuda(device)
    chosen = choose_device(device or "cuda")
    if chosen.type not in _READ_BYTES:
        raise LeanKError(f"benchmarks run on `cuda` and, as a test, on `cpu`, not on `{chosen.type}`")
    if chosen.type == "cuda":
        chosen = torch.device(
            "cuda", chosen.index if chosen.index is not None else torch.cuda.current_device()
        )
        torch.cuda.set_device(chosen)
    return chosen


def choose_dtype(name: str) -> torch.dtype:
    """The dtype of an option's value."""
    return _DTYPES[name]


def describe_environment(device: torch.device) -> dict[str, Any]:
    """Name the machine, the driver, the packages and the commit that a figure belongs to."""
    facts: dict[str, Any] = {
        "device": platform.processor() or platform.machine(),
        "device_type": device.type,
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _PACKAGES},
        "commit": _commit(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "device": properties.name,
            "multiprocessors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "l2_bytes": properties.L2_cache_size,
            "driver": _driver(device),
            "cuda": torch.version.cuda,
        }
    return facts


def measure_read_bandwidth(device: torch.device, *, rounds: int) -> dict[str, float]:
    """Read one large buffer of random numbers in several ways; count the bytes read.

    Reductions write next to nothing, so this is what a kernel that only reads can hope for, where a copy
    would pay for its writes.

    Args:
        device: Where.
        rounds: Measurements of each way.

    Returns:
        GB/s (1e9 bytes) of each way; the largest is what figures are shares of.
    """
    numbers = torch.randn(_READ_BYTES[device.type] // 2, dtype=torch.bfloat16, device=device)
    pairs = numbers.view(torch.int32)
    matrix = numbers.view(-1, _ROW)
    vector = torch.randn(_ROW, dtype=numbers.dtype, device=device)
    ways = {
        "maximum of all bfloat16": numbers.amax,
        "maximum of each row, bfloat16": lambda: matrix.amax(1),
        "maximum of all int32": pairs.amax,
        "maximum of all int64": numbers.view(torch.int64).amax,
        "maximum of each row, int32": lambda: pairs.view(-1, _ROW // 2).amax(1),
        "sum of each row, bfloat16": lambda: matrix.sum(1),
        "matrix times vector, bfloat16": lambda: matrix @ vector,
    }
    num_bytes = numbers.numel() * numbers.element_size()
    return {
        name: num_bytes / time_calls([way], device, rounds=rounds).milliseconds / 1e6
        for name, way in ways.items()
    }


def measure_host_read_bandwidth(num_bytes: int, threads: int, *, rounds: int) -> dict[str, float]:
    """Read a buffer of the host's memory in several ways; count the bytes read.

    Args:
        num_bytes: How large it is: more than the caches hold, unless that is asked for.
        threads: Of torch.
        rounds: Measurements of each way.

    Returns:
        GB/s (1e9 bytes) of each way.
    """
    numbers = torch.randn(num_bytes // 8 * 2)
    ways: dict[str, Callable[[], object]] = {
        "sum of all float32": numbers.sum,
        "maximum of all float32": numbers.amax,
        "maximum of all int64": numbers.view(torch.int64).amax,
    }
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return {
            name: numbers.nbytes / time_calls([way], torch.device("cpu"), rounds=rounds).milliseconds / 1e6
            for name, way in ways.items()
        }
    finally:
        torch.set_num_threads(before)


@contextmanager
def memory_told() -> Iterator[None]:
    """Turn running out of memory into one sentence.

    Raises:
        LeanKError: If what runs inside does not fit.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise LeanKError(
            f"this does not fit on the device: {first_line(error)}",
            hint="take a smaller batch, or fewer tokens",
            exit_code=1,
        ) from error


def release_memory(device: torch.device) -> None:
    """Give freed memory back to the device, so that the next subject finds what the last one found."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The checkout's commit, `+` behind it where tracked files differ; None outside a checkout."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    commit = _output(["git", "-C", str(root), "rev-parse", "--short=12", "HEAD"])
    changed = _output(["git", "-C", str(root), "status", "--porcelain", "--untracked-files=no"])
    return commit and commit + ("+" if changed else "")


def _driver(device: torch.device) -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", f"--id={device.index}"]
    return _output(query)


def _output(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
