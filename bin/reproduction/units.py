"""Units of work: independent pieces, each of which leaves a result of its own, and processes that do them.

Any number of processes work off the same units in one folder. Each claims one at a time by a lock that dies
with it, so what a killed process had begun is simply done by another, or in the next run.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from leank_convert.files import read_json, write_atomically
from leank_convert.folders import BusyError, locked

_TIMES = "times.jsonl"
_WAIT_SECONDS = 0.5  # until a look at what others have finished meanwhile


@dataclass(frozen=True)
class Unit:
    """One piece of work."""

    name: str  # unlike all others'; its result need not lie there
    is_done: Callable[[], bool]  # whether its result is there, whole; asked where all that it needs is done
    make: Callable[[], None]  # leaves the result; goes on from what a killed one left
    needs: tuple[str, ...] = ()  # names of units that have to be done before


def read_result(path: Path) -> dict[str, Any]:
    """What `keep_result` has left in a file; nothing before that."""
    return read_json(path) if path.exists() else {}


def keep_result(path: Path, result: Mapping[str, Any]) -> None:
    """Write a file, which is whole or not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(result).encode())


def work_off(
    units: Sequence[Unit],
    out: Path,
    note: Callable[[str], None],
    deadline: float = math.inf,
) -> None:
    """Do units until all are done, by this process or by others.

    Those come first that are first in the list, as far as their needs allow. `out` keeps locks, and in
    `times.jsonl` how long each unit took. `note` takes a line for each that this process begins or has done;
    none is begun after the deadline, as `time.time` counts.
    """
    done: set[str] = set()
    while waiting := find_waiting(units, done):
        if time.time() > deadline:
            return
        for unit in waiting:
            if done.issuperset(unit.needs) and _claim(unit, out, note):
                break
        else:
            time.sleep(_WAIT_SECONDS)


def find_waiting(units: Sequence[Unit], done: set[str]) -> list[Unit]:
    """Units that are left; adds the others to `done`."""
    for unit in units:
        if unit.name not in done and done.issuperset(unit.needs) and unit.is_done():
            done.add(unit.name)
    return [unit for unit in units if unit.name not in done]


def _claim(unit: Unit, out: Path, note: Callable[[str], None]) -> bool:
    """Do a unit unless another process is at it; whether it is done now."""
    lock = out / "locks" / unit.name.replace("/", "-")
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(lock, f"`{unit.name}` is being done by another process"))
        except BusyError:
            return False
        if unit.is_done():  # by another process, after this one had looked
            return True
        note(unit.name)
        began = time.monotonic()
        unit.make()
        torch.cuda.empty_cache()  # another worker on this GPU may need it
        seconds = round(time.monotonic() - began, 1)
        with (out / _TIMES).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"unit": unit.name, "seconds": seconds}) + "\n")
        note(f"{unit.name}: {seconds:.1f} s")
    return True


def run_workers(arguments: Sequence[str], num_workers: int) -> None:
    """Run the command in processes of its own, each with one GPU to itself or shared, until all have ended.

    How they end says nothing: what they leave undone is for the caller to do, or to fail at.
    """

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    seen = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    gpus, workers = seen.split(","), []
    before = signal.signal(signal.SIGTERM, end)  # unwinds this process, as Ctrl-C does
    try:
        for number in range(num_workers):
            command = [sys.executable, "-m", "bin.reproduction", *arguments, "--worker", str(number)]
            environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpus[number % len(gpus)]}
            workers.append(subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL))
        for worker in workers:
            worker.wait()
    finally:
        for worker in workers:
            worker.terminate()
            worker.wait()
        signal.signal(signal.SIGTERM, before)
