"""Workers: processes that work off the same units, spread over the GPUs there are."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from leank_convert.errors import LeanKError


def count_gpus() -> int:
    """How many GPUs torch may use."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def run_workers(work: Callable[..., None], arguments: tuple[Any, ...], num_workers: int) -> None:
    """Run a function in processes of its own, each with one GPU to itself or shared, until all have ended.

    How they end says nothing: what they leave undone is for the caller to do, or to fail at.

    Args:
        work: A function of a module, as it is sent by name; takes `arguments` and its worker's number.
        arguments: Sent as pickle sends them.
        num_workers: How many.
    """
    spawn = multiprocessing.get_context("spawn")
    workers = [
        spawn.Process(target=_run, args=(work, arguments, number), daemon=True)
        for number in range(num_workers)
    ]
    with tempfile.TemporaryDirectory() as scratch, _ended_by_signal():
        try:
            for number, worker in enumerate(workers):
                # A checkpoint's code is copied there when it is loaded, by each worker for itself.
                with _environment({**_choose_gpu(number), "HF_MODULES_CACHE": f"{scratch}/{number}"}):
                    worker.start()
            for worker in workers:
                worker.join()
        finally:
            for worker in workers:
                if worker.is_alive():
                    worker.terminate()
                    worker.join()


def _run(work: Callable[..., None], arguments: tuple[Any, ...], number: int) -> None:
    try:
        work(*arguments, number)
    except LeanKError as error:
        print(f"worker {number}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


def _choose_gpu(number: int) -> dict[str, str]:
    """The environment by which a worker sees one GPU; the same as here where there is none."""
    num_gpus = count_gpus()
    if not num_gpus:
        return {}
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = named.split(",") if named else [str(gpu) for gpu in range(num_gpus)]
    return {"CUDA_VISIBLE_DEVICES": names[number % num_gpus]}


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables that a process inherits which is started within the block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _ended_by_signal() -> Iterator[None]:
    """Let SIGTERM unwind this process, as Ctrl-C does, so that it takes its workers along."""

    def end(number: int, frame: object) -> None:
        raise LeanKError("SIGTERM ended the run", exit_code=128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
