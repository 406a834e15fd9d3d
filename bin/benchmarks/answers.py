"""`bin/benchmark answers`: greedy answers of vLLM's server, beside those of a plain one on one GPU.

What answers is a server with options, such as those of tensor parallelism, or two servers, of which one reads
prompts and hands them over to the other. Prompts are Python's own library. A checkpoint is asked, and then
vLLM's dense model on the same weights, whose answers part by rounding, too.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import statistics
import sysconfig
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch

from bin.benchmarks.decode_attention import read_peers
from bin.benchmarks.measuring import choose_benchmark_device
from bin.benchmarks.server import LINES_OF_LOG, Server, read_log, read_metric, start_server
from bin.benchmarks.tables import Column, Report
from leank_convert.architectures import read_model_facts
from leank_convert.checkpoint_io import CONFIG_NAME, read_config
from leank_convert.errors import LeanKError, first_line
from leank_convert.tokenizer import load_tokenizer

_COLUMNS = {
    "first tokens": Column("equal_first_tokens", "{:.0f}"),
    "one by one": Column("equal_one_by_one", "{:.0f}"),
    "all at once": Column("equal_at_once", "{:.0f}"),
    "TTFT ms": Column("first_token_milliseconds"),
    "plain": Column("plain_first_token_milliseconds"),
    "ITL ms": Column("token_milliseconds"),
    "plain ITL": Column("plain_token_milliseconds"),
    "moved GB": Column("moved_bytes", "{:,.3f}", 1e9),
    "move ms": Column("move_milliseconds"),
    "pieces": Column("pieces", "{:,.0f}"),
}
_NOTES = (
    "first tokens, one by one: answers that begin, or are, as the plain server's, asked one after the other",
    "TTFT: time to first token; ITL: from token to token; medians, asked one after the other; plain: so of "
    "the plain server",
    "moved: all prompts' pages, once; ms and pieces of a prompt, in the mean",
)
_READS = {"do_remote_decode": True, "do_remote_prefill": False}


class _Answer(NamedTuple):
    tokens: list[int]
    times: list[float]  # seconds from the request to each token
    pages: Any  # which of them another server may fetch


def benchmark_answers(
    checkpoint: Path,
    *,
    device: str | None,
    dtype: str | None,
    options: str,
    hand_over: bool,
    prompts: int,
    longest: int,
    new: int,
    memory: float,
    peers: str,
) -> dict[str, Any]:
    """Ask so many `prompts`, of a quarter of `longest` tokens to all of them, for `new` tokens each.

    `options` are vLLM's, of the server that is compared, or of both that hand over. The cache of each takes
    `memory` GB. `dtype` is that of weights and activations, of all; None for the checkpoint's.
    """
    for package in ("vllm", *(["nixl"] if hand_over else [])):
        if importlib.util.find_spec(package) is None:
            raise LeanKError(f"{package} is not installed", hint="pip install 'leank-convert[vllm]' nixl")
    from openai import OpenAIError  # which comes with vLLM

    chosen, named = choose_benchmark_device(device), read_peers(peers, ["dense"])
    config = read_config(checkpoint)
    if "leank" not in config:
        raise LeanKError(
            f"`{checkpoint}` is no checkpoint", hint="`leank-convert export` makes one of a model"
        )
    stock = {**config, "model_type": str(config.get("model_type")).removeprefix("leank_")}
    facts = read_model_facts(stock, origin=str(checkpoint / CONFIG_NAME))
    report = Report(chosen, {**vars(facts), "geometry": checkpoint.name})
    shared = [
        f"--kv-cache-memory-bytes={round(memory * 1e9)}",
        f"--max-model-len={longest + new}",
        "--no-enable-prefix-caching",
        "--gpu-memory-utilization=0.4",  # has to be free at the start, so two servers fit one GPU
        *([f"--dtype={dtype}"] if dtype else []),
    ]
    dense = ["--hf-overrides", json.dumps({"architectures": [facts.architecture.causal_lm_class]})]
    lengths = [longest // 4 + (longest - longest // 4) * (n + 1) // prompts for n in range(prompts)]
    asked = _draw_prompts(checkpoint, lengths)
    title = f"answers to prompts of {lengths[0]:,} to {longest:,} tokens, {new} new ones"
    sides = {}
    for name in ("leank", *named):
        given = [*shared, *(dense if name == "dense" else [])]
        with TemporaryDirectory() as folder:
            start = partial(_start, checkpoint, Path(folder), is_cpu=chosen.type == "cpu")
            compare = _hand_over if hand_over else _compare
            try:
                sides[name] = compare(start, given, asked, new, shlex.split(options))
            except OpenAIError as error:
                for log in sorted(Path(folder).glob("*.log")):
                    report.line("\n  ".join((log.name, *read_log(log)[-LINES_OF_LOG:])))
                raise LeanKError(f"{name}: {first_line(error)}", exit_code=1) from error
        report.table(title, _COLUMNS, sides.items(), _NOTES)  # again with each side, lest one is lost
    return report.document("answers", ok=True, lengths=lengths, new=new, sides=sides)


def _draw_prompts(checkpoint: Path, lengths: Sequence[int]) -> list[list[int]]:
    """Token ids of Python's library, one stretch after the other."""
    tokenizer, ids = load_tokenizer(checkpoint), []
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        ids += tokenizer(file.read_text(encoding="utf-8"), verbose=False)["input_ids"]
        if len(ids) >= sum(lengths):
            break
    else:
        raise LeanKError(
            f"Python's library has {len(ids):,} tokens, and prompts take {sum(lengths):,}",
            hint="lower `--prompts` or `--longest`",
        )
    ends = [*accumulate(lengths)]
    return [ids[end - length : end] for length, end in zip(lengths, ends, strict=True)]


def _start(
    checkpoint: Path, folder: Path, options: Sequence[str], gpu: int | None, role: str = "", *, is_cpu: bool
) -> AbstractContextManager[Server]:
    """Start a server on one GPU, or on all; that of a `role` moves pages by NIXL."""
    environment = {}
    if gpu is not None and not is_cpu:
        every = ",".join(map(str, range(torch.cuda.device_count())))
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", every).split(",")
        environment["CUDA_VISIBLE_DEVICES"] = visible[gpu % len(visible)]
    nixl = {"kv_connector": "NixlConnector", "kv_role": role}
    if is_cpu:
        options, nixl["kv_buffer_device"] = [*options, "--enforce-eager"], "cpu"
        environment |= {"UCX_TLS": "tcp,self,sm", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    if role:
        options = [*options, "--kv-transfer-config", json.dumps(nixl)]
        # Below the ports that the system gives by chance, so that nobody takes it before the server does; two
        # of this process, as a server waits forever for one that another benchmark has.
        environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(10_000 + 2 * (os.getpid() % 7_500) + (gpu or 0))
    return start_server(checkpoint, options, folder / f"server{gpu}.log", **environment)


def _compare(
    start: Callable[..., Any], shared: list[str], prompts: list[list[int]], new: int, options: list[str]
) -> dict[str, Any]:
    """Ask a plain server, and then one with options, which shares its GPU."""
    with start(shared, 0) as plain, start([*shared, *options], None) as compared:
        ask_plain, ask = _asker(plain, new), _asker(compared, new)
        _ = ask_plain(prompts[-1]), ask(prompts[-1])  # what the longest compiles or allocates at first use
        wanted = [ask_plain(prompt) for prompt in prompts]
        return _hold([ask(prompt) for prompt in prompts], _at_once(ask, prompts), wanted)


def _hand_over(
    start: Callable[..., Any], shared: list[str], prompts: list[list[int]], new: int, options: list[str]
) -> dict[str, Any]:
    """Ask a server by itself, and then another that answers from its pages."""
    with (
        start([*shared, *options], 0, "kv_producer") as first,
        start([*shared, *options], 1, "kv_consumer") as second,
    ):
        read, answer = _asker(first, new), _asker(second, new)

        def ask(prompt: list[int]) -> _Answer:
            began, pages = time.perf_counter(), read(prompt, kv_transfer_params=_READS).pages
            return answer(prompt, began, kv_transfer_params=pages)

        _shake_hands(ask, prompts[-1])
        wanted = [read(prompt) for prompt in prompts]
        before = _read_moved(second.url)
        one_by_one = [ask(prompt) for prompt in prompts]
        answer(prompts[0][:1])  # the server tells of a transfer with the step after it
        moved = {name: value - before[name] for name, value in _read_moved(second.url).items()}
        found = _hold(one_by_one, _at_once(ask, prompts), wanted)
    return {
        **found,
        "moved_bytes": moved["bytes_transferred"],
        "move_milliseconds": 1e3 * moved["xfer_time_seconds"] / len(prompts),
        "pieces": moved["num_descriptors"] / len(prompts),
    }


def _shake_hands(ask: Callable[[list[int]], _Answer], prompt: list[int]) -> None:
    """Ask for the first time, again if that fails: vLLM gives the other server five seconds to answer."""
    from openai import APIError

    for _ in range(4):
        with suppress(APIError):
            ask(prompt)
            return
    ask(prompt)


def _read_moved(url: str) -> dict[str, float]:
    names = ("bytes_transferred", "xfer_time_seconds", "num_descriptors")
    lines = {name: read_metric(url, f"vllm:nixl_{name}_sum") for name in names}
    return {name: sum(float(line.split()[-1]) for line in found) for name, found in lines.items()}


def _asker(server: Server, new: int) -> Callable[..., _Answer]:
    """What asks a server, once it answers, for so many tokens: of pages that another is to read, for one."""
    from openai import OpenAI

    client = OpenAI(base_url=f"{server.wait()}/v1", api_key="none", timeout=600, max_retries=0)
    (model,) = (model.id for model in client.models.list())

    def ask(prompt: list[int], began: float | None = None, **extra: Any) -> _Answer:
        is_read = extra.get("kv_transfer_params") == _READS
        # Among what is extra the client does not look at each token: 0.2 s of 16K.
        asked = {"prompt": prompt, "ignore_eos": True, "return_token_ids": True, **extra}
        began, pages = began or time.perf_counter(), None
        tokens: list[int] = []
        times: list[float] = []
        events: Any = client.completions.create(
            model=model,
            prompt="",
            max_tokens=1 if is_read else new,
            temperature=0,
            stream=not is_read,
            extra_body=asked,
        )
        for event in [events] if is_read else events:
            pages = (event.model_extra or {}).get("kv_transfer_params")
            for choice in event.choices:
                found = (choice.model_extra or {}).get("token_ids") or []
                tokens += found
                times += [time.perf_counter() - began] * len(found)
        return _Answer(tokens, times, pages)

    return ask


def _at_once(ask: Callable[[list[int]], _Answer], prompts: list[list[int]]) -> list[_Answer]:
    with ThreadPoolExecutor(len(prompts)) as pool:
        return [*pool.map(ask, prompts)]


def _hold(one_by_one: list[_Answer], at_once: list[_Answer], wanted: list[_Answer]) -> dict[str, Any]:
    """Count the answers that are equal to those wanted, and take medians of times."""

    def equal(found: list[_Answer], tokens: int | None = None) -> int:
        return sum(a.tokens[:tokens] == b.tokens[:tokens] for a, b in zip(found, wanted, strict=True))

    def medians(side: str, answers: list[_Answer]) -> dict[str, float]:
        steps = [after - before for answer in answers for before, after in pairwise(answer.times)]
        return {
            f"{side}first_token_milliseconds": 1e3 * statistics.median(answer.times[0] for answer in answers),
            f"{side}token_milliseconds": 1e3 * statistics.median(steps),
        }

    return {
        "equal_first_tokens": equal(one_by_one, 1),
        "equal_one_by_one": equal(one_by_one),
        "equal_at_once": equal(at_once),
        **medians("", one_by_one),
        **medians("plain_", wanted),
    }
