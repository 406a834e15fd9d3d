"""Units are done once each, in an order that their needs allow, whoever is killed."""

import json
import multiprocessing
import os
import signal
import time
from functools import partial

from bin.reproduction import units
from bin.reproduction.units import Unit, work_off

SPAWN = multiprocessing.get_context("spawn")
NAMES = ("a", "b", "c", "d")


def _make(out, name, seconds):
    with (out / "began").open("a") as file:
        file.write(f"{name} {os.getpid()}\n")
    time.sleep(seconds)
    (out / name).touch()


def _list(out, seconds=0.0):
    """Four units, the last of which needs the first two."""
    return [
        Unit(name, (out / name).exists, partial(_make, out, name, seconds), ("a", "b") if name == "d" else ())
        for name in NAMES
    ]


def _work(out, seconds):
    work_off(_list(out, seconds), out, lambda _: None)


def _begun(out):
    path = out / "began"
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def _wait_for(condition):
    for _ in range(1000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it never came")


def test_a_unit_waits_for_what_it_needs_and_is_done_once(tmp_path):
    work_off(_list(tmp_path)[::-1], tmp_path, lambda _: None)
    assert [name for name, _ in _begun(tmp_path)] == ["c", "b", "a", "d"]
    work_off(_list(tmp_path), tmp_path, lambda _: None)
    assert len(_begun(tmp_path)) == 4
    assert len((tmp_path / "times.jsonl").read_text().splitlines()) == 4
    assert not (tmp_path / "locks").exists()


def test_what_a_killed_process_had_begun_is_done_by_another(tmp_path, monkeypatch):
    monkeypatch.setattr(units, "_WAIT_SECONDS", 0.01)
    worker = SPAWN.Process(target=_work, args=(tmp_path, 600.0))
    worker.start()
    _wait_for(lambda: _begun(tmp_path))
    # All but what the other is at, and what waits for it.
    other = SPAWN.Process(target=_work, args=(tmp_path, 0.0))
    other.start()
    _wait_for(lambda: (tmp_path / "c").exists())
    assert not (tmp_path / "a").exists()
    os.kill(worker.pid, signal.SIGKILL)
    worker.join()
    other.join(60)
    assert other.exitcode == 0
    assert [name for name, _ in _begun(tmp_path)] == ["a", "b", "c", "a", "d"]
    noted = [json.loads(line)["unit"] for line in (tmp_path / "times.jsonl").read_text().splitlines()]
    assert noted == ["b", "c", "a", "d"]
