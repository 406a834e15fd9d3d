"""`bin/benchmark serve`: vLLM's own benchmark of its server, a LeanK checkpoint beside its peers.

All have random weights of one shape and as many bytes for the cache. A server is started for each side, one
after the other, and `vllm bench serve` asks it: all at once, then a given number of requests at a time. Where
a side fails the end of its server's log is shown, and the others are measured. An interrupt ends the command
with the tables of what was measured.
"""

from __future__ import annotations

import importlib.util
import io
import json
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bin.benchmarks.decode_attention import read_peers
from bin.benchmarks.random_models import Setup, write_folder
from bin.benchmarks.server import LINES_OF_LOG, QUIET, read_log, read_metric, start_server
from bin.benchmarks.tables import RATIO, Column, Report
from leank_convert.errors import LeanKError, first_line

OURS, ALL_CHANNELS, DENSE = "leank", "all-channels", "dense"
PEERS = (ALL_CHANNELS, DENSE)
_Bench = Callable[[list[str]], dict[str, Any]]
# How vLLM's log names the attention that it took, by itself or as it was told.
_ATTENTION = re.compile(r"Using (?:AttentionBackendEnum\.)?(\w+)(?: attention)? backend")
_IMPORTS = (
    "import vllm.entrypoints.openai.api_server, vllm.v1.engine.core, leank_convert.vllm.models, tilelang"
)
_COLUMNS = {
    "at once": Column("most_running", "{:,.0f}"),
    "tokens/s": Column("output_tokens_per_second", "{:,.0f}"),
    "TTFT ms": Column("first_token_milliseconds"),
    "ITL ms": Column("token_milliseconds"),
    "TPOT ms": Column("mean_milliseconds"),
}
_NOTES = (
    "at once: most requests that ran at a time, caches having the same memory",
    "TTFT: time to first token; ITL: from token to token; medians of `vllm bench serve`",
    "TPOT: mean time of an answer's tokens behind the first, steps that read a prompt as well among them",
)


@dataclass(frozen=True)
class Load:
    """What is asked of a server: prompt and answer tokens, requests in all, and how many at a time."""

    prompt: int
    new: int
    requests: int
    concurrency: int | None = None

    def describe(self) -> str:
        """As a table is headed."""
        asked = f"{self.concurrency} at a time" if self.concurrency else "all at once"
        return f"prompt {self.prompt}, {self.new} new tokens, {self.requests} requests, {asked}"


def benchmark_serve(
    setup: Setup,
    *,
    cases: Sequence[tuple[int, ...]],
    requests: int,
    concurrency: Sequence[int],
    memory: float,
    options: str,
    dense_options: str,
    peers: str,
) -> dict[str, Any]:
    """Measure and print a table for each case of prompt and new tokens.

    Of a case without requests of its own so many `requests` are sent at once, and then twice as many as each
    `concurrency`, so many at a time. All sides' caches take `memory` GB. `options` are vLLM's, of all sides.
    """
    if importlib.util.find_spec("vllm") is None:
        raise LeanKError("vLLM is not installed", hint="pip install 'leank-convert[vllm]'")
    named = read_peers(peers, PEERS)
    report = Report(setup.device, setup.describe())
    loads: list[Load] = []
    for prompt, new, *own in cases:
        loads.append(Load(prompt, new, own[0] if own else requests))
        loads += [Load(prompt, new, 2 * count, count) for count in (() if own else concurrency)]
    length, memory_bytes = max(load.prompt + load.new for load in loads), round(memory * 1e9)
    shared = [
        f"--dtype={setup.dtype_name}",
        f"--kv-cache-memory-bytes={memory_bytes}",
        f"--max-model-len={length + 16}",  # tokens that a tokenizer may add
        "--load-format=dummy",
        "--no-enable-prefix-caching",
        *([f"--kv-cache-dtype={setup.kv_dtype}"] if setup.kv_dtype else []),
        *shlex.split(options),
    ]
    stem = setup.geometry.facts.architecture.causal_lm_class
    stock = ["--hf-overrides", json.dumps({"architectures": [stem]}), *shlex.split(dense_options)]
    cache = setup.kv_dtype or setup.dtype_name
    described = {
        OURS: f"{OURS}: our plugin with the mask, cache in {cache}",
        ALL_CHANNELS: f"{ALL_CHANNELS}: our plugin with nothing pruned, cache in {cache}",
        DENSE: f"{DENSE}: vLLM's own {stem} and attention, cache in {cache}",
    }
    # Else the first server's start would be the only one that waits for the disk.
    subprocess.run([sys.executable, "-c", _IMPORTS], env={**os.environ, **QUIET}, capture_output=True)
    sides: dict[str, Any] = {}
    for name in (names := (OURS, *named)):
        side = sides[name] = {"options": [*shared, *(stock if name == DENSE else [])], "runs": []}
        with TemporaryDirectory() as temporary:
            folder, log = Path(temporary, "model"), Path(temporary, "server.log")
            folder.mkdir()
            write_folder(setup.keeping_all() if name == ALL_CHANNELS else setup, folder)
            try:
                _measure_side(report, name, side, loads, folder, log)
            except (LeanKError, OSError, ValueError, KeyboardInterrupt) as error:
                failed = not isinstance(error, KeyboardInterrupt)
                for line in read_log(log)[-LINES_OF_LOG:] if failed else ():
                    report.line(f"  {line}")
                if not any(each["runs"] for each in sides.values()) and (name == names[-1] or not failed):
                    raise
                side["error"] = getattr(error, "message", str(error)) if failed else "interrupted"
                hint = getattr(error, "hint", None)
                report.line(f"{name}: {side['error']}" + (f"; {hint}" if hint else ""))
                if not failed:
                    break
    for index, load in enumerate(loads):
        ran = {name: side["runs"][index] for name, side in sides.items() if side["runs"][index:]}
        _print_load(report, load, ran, [described[name] for name in ran])
    ok = not any("error" in side for side in sides.values())
    return report.document("serve", ok=ok, memory_bytes=memory_bytes, sides=sides)


def _measure_side(
    report: Report, name: str, side: dict[str, Any], loads: Sequence[Load], folder: Path, log: Path
) -> None:
    """Start a server and add to `side` what was measured, load by load."""
    bench = _load_bench()
    began = time.monotonic()
    with start_server(folder, side["options"], log) as server:
        url = server.wait()
        seconds = time.monotonic() - began
        side["blocks"] = _read_size(url)
        named = _ATTENTION.findall(log.read_text(errors="replace"))
        side["attention"] = named[-1] if named else "its only attention"
        report.line(f"{name}: {side['blocks']:,} blocks, {side['attention']}, started in {seconds:.0f} s")
        for load in loads:
            run = _measure(load, url, folder, bench)
            side["runs"].append(run)
            first, each = run["first_token_milliseconds"], run["token_milliseconds"]
            told = f"{run['output_tokens_per_second']:,.0f} tokens/s, the first after {first:,.0f} ms"
            report.line(f"{name}, {load.describe()}: {told}, then {each:,.2f} ms each")


def _read_size(url: str) -> int:
    """Blocks of the cache."""
    (line,) = read_metric(url, "vllm:cache_config_info{")[:1]
    return int(line.partition('num_gpu_blocks="')[2].partition('"')[0])


def _measure(load: Load, url: str, folder: Path, bench: _Bench) -> dict[str, Any]:
    """Run vLLM's benchmark once; a request before it compiles what is compiled at first use."""
    arguments = [
        f"--base-url={url}",
        f"--model={folder}",
        "--dataset-name=random",
        f"--random-input-len={load.prompt}",
        f"--random-output-len={load.new}",
        f"--num-prompts={load.requests}",
        "--num-warmups=1",
        "--ignore-eos",
        "--disable-tqdm",
        *([f"--max-concurrency={load.concurrency}"] if load.concurrency else []),
    ]
    try:
        with _most_running(url) as most:
            said = bench(arguments)
    except Exception as error:
        raise LeanKError(f"`vllm bench serve` failed: {first_line(error)}", exit_code=1) from error
    if said["completed"] != load.requests:
        raise LeanKError(
            f"{load.requests - said['completed']} of {load.requests} requests were not answered",
            hint="less may fit: lower the case's tokens, or raise `--memory`",
            exit_code=1,
        )
    return {
        **asdict(load),
        "most_running": max(most),
        "seconds": said["duration"],
        "output_tokens_per_second": said["output_throughput"],
        "first_token_milliseconds": said["median_ttft_ms"],
        "token_milliseconds": said["median_itl_ms"],
        "mean_milliseconds": said["mean_tpot_ms"],
    }


def _load_bench() -> _Bench:
    """`vllm bench serve` as a call: its command is not in vLLM's build for CPUs, and starts slowly.

    vLLM's files have been read then, so that no server waits for a disk to bring them.
    """
    os.environ.update(QUIET)
    with redirect_stdout(io.StringIO()):  # also what the log goes to from here on
        from vllm.benchmarks.serve import add_cli_args, main
        from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    add_cli_args(parser)

    def bench(arguments: list[str]) -> dict[str, Any]:
        with redirect_stdout(io.StringIO()):
            found: dict[str, Any] = main(parser.parse_args(arguments))
        return found

    return bench


@contextmanager
def _most_running(url: str) -> Iterator[list[int]]:
    """Look twice a second how many requests run."""
    seen, ended = [0], threading.Event()

    def look() -> None:
        while not ended.wait(0.5):
            with suppress(OSError):
                lines = read_metric(url, "vllm:num_requests_running{")
                seen.append(sum(int(float(line.split()[-1])) for line in lines))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        ended.set()
        thread.join()


def _print_load(
    report: Report, load: Load, runs: dict[str, dict[str, Any]], described: Sequence[str]
) -> None:
    report.table(f"serve, {load.describe()}", _COLUMNS, runs.items(), [*_NOTES, *described])
    ours = runs.pop(OURS, None)
    if ours and runs:
        others = [(f"better than {name}", _compare(ours, run)) for name, run in runs.items()]
        columns = {title: Column(column.key, RATIO) for title, column in _COLUMNS.items()}
        report.table("leank, how many times as much or as fast", columns, others)


def _compare(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, float | None]:
    """How many times as many, or as fast, ours is in each column."""
    pairs = {
        key: (theirs[key], ours[key]) if key.endswith("milliseconds") else (ours[key], theirs[key])
        for key, *_ in _COLUMNS.values()
    }
    return {key: over / under if under else None for key, (over, under) in pairs.items()}
