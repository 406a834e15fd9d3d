"""Trains in forked children, each of which something happens to; a script, so that torch is imported once.

Reads jobs from standard input, and writes for each of its ranks the exit code and what was printed, as JSON.
"""

import json
import os
import pathlib
import signal
import socket
import sys
import traceback
from itertools import count

import torch
from transformers.utils import logging as transformers_logging

from leank_convert.errors import LeanKError
from leank_convert.methods import make
from leank_convert.recipe import Recipe
from leank_convert.train import graphs, loop, run


def main():
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    json.dump([run_job(job) for job in json.load(sys.stdin)], sys.stdout)


def run_job(job):
    num_ranks = job.get("ranks", 1)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(num_ranks):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read)
            os.dup2(write, 1)
            os.dup2(write, 2)
            if num_ranks > 1:
                told = {"WORLD_SIZE": num_ranks, "RANK": rank, "LOCAL_RANK": rank}
                told |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
                os.environ |= {name: str(value) for name, value in told.items()}
            code = run_child(job, rank)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        os.close(write)
        children.append((pid, read))
    ended = []
    for pid, read in children:
        with os.fdopen(read) as file:
            printed = file.read()
        ended.append((os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), printed))
    return ended


def run_child(job, rank):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a parent in the background has it ignored
    sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1)
    if rank == job.get("rank", 0):
        happen(job)
    try:
        given = {"recipe": Recipe(**job["recipe"]), "resume": job.get("resume", False)}
        out = pathlib.Path(job["out"])
        masks = make.train_masks(job["model"], out, **given, device="cpu", progress=False)
        sys.stdout.write(f"masks {len(masks)}\n")
    except LeanKError as error:
        sys.stdout.write(f"told: {error.message}\nhint: {error.hint}\n")
        return error.exit_code
    except SystemExit as ended:
        return ended.code
    except BaseException:
        traceback.print_exc()
        return 99
    return 0


def happen(job):
    """Arrange for the job's event, in the step or at the call that it names."""
    event, at = job.get("event"), job.get("at")
    advance = run.Run.advance

    def at_step(action):
        def wrapper(self, samples):
            if self.step == at:
                action()
            return advance(self, samples)

        run.Run.advance = wrapper

    def exhaust(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    def send_signals():
        for _ in range(job.get("times", 1)):
            os.kill(os.getpid(), job["signal"])

    if event == "signal":
        at_step(send_signals)
    elif event == "memory":
        at_step(lambda: setattr(graphs, "distil", exhaust))
    elif event is not None:
        owner, name = {
            "step": (run.Run, "advance"),
            "optimizer": (torch.optim.Adam, "step"),
            "fsync": (os, "fsync"),
            "rename": (pathlib.Path, "replace"),
            "mask": (loop, "save_mask"),
        }[event]
        setattr(owner, name, dying(getattr(owner, name), at))


def dying(function, at):
    calls = count(1)

    def wrapper(*args, **kwargs):
        if next(calls) == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)

    return wrapper


if __name__ == "__main__":
    main()
