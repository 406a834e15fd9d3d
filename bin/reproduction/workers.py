"""Workers: processes that work off the same units, spread over the GPUs there are."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence

import torch


def count_gpus() -> int:
    """How many GPUs torch may use."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def run_workers(arguments: Sequence[str], num_workers: int) -> None:
    """Run the command in processes of its own, each with one GPU to itself or shared, until all have ended.

    How they end says nothing: what they leave undone is for the caller to do, or to fail at.
    """

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    named = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count_gpus())))
    gpus, workers = named.split(","), []
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
