"""The commands of `bin/benchmark`: their options; what they measure is `benchmark_NAME` of a module."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from bin.benchmarks.geometries import GEOMETRIES, TOY
from leank_convert.cli import Group, configure_logging
from leank_convert.cli.options import MAX_COUNT, MAX_TOKENS, FiniteRange
from leank_convert.errors import out_of_memory, shorten

_Option = Callable[[Callable[..., Any]], Callable[..., Any]]

_MASK = click.option("--mask", metavar="FILE|ID|NAME", help="Mask to run with. Default: a synthetic one.")
_GEOMETRY = click.option(
    "--geometry",
    type=click.Choice(list(GEOMETRIES)),
    help=f"Model shape. Default: the mask's if there is one, else Llama's; `{TOY}` tests the command.",
)
_DEVICE = click.option("--device", help="Default: cuda. `cpu` runs toy sizes, as a test of the command.")
_DTYPES = click.Choice(["bfloat16", "float16", "float32"])
_DTYPE = click.option(
    "--dtype",
    type=_DTYPES,
    default="bfloat16",
    show_default=True,
    help="Of weights, keys and values.",
)
_KV_DTYPE = click.option("--kv-dtype", type=click.Choice(["fp8"]), help="Of our caches. Default: as --dtype.")
_VALUES = click.option(
    "--values",
    type=FiniteRange(0, 1),
    metavar="PART",
    help="Of V that heads keep of pruned tokens, such as 0.5. Default: what the mask says, else all.",
)
_SHARED = (_MASK, _GEOMETRY, _DEVICE, _KV_DTYPE, _DTYPE)
_COUNT = click.IntRange(1, MAX_COUNT)
_GIGABYTES = FiniteRange(0, 1e6, min_open=True)


def _sizes(flags: str, names: str, text: str, *, many: bool = False, further: str | None = None) -> _Option:
    """An option of whole numbers between `x`, named as in `batch x tokens`, and perhaps a `further` one.

    `k` is 1024.
    """

    def read(given: str) -> Any:
        try:
            parts = [(part.removesuffix("k"), part.endswith("k")) for part in given.lower().split("x")]
            numbers = tuple(int(number) * (1024 if is_kilo else 1) for number, is_kilo in parts)
        except ValueError:
            numbers = ()
        count = len(names.split(" x "))
        if len(numbers) not in (count, count + (further is not None)) or min(numbers) < 1:
            example = "x".join(("64", "32k", "128")[:count])
            raise click.BadParameter(f"`{shorten(given)}` is not {names}, such as {example}")
        if max(numbers) > MAX_TOKENS:
            raise click.BadParameter(f"`{shorten(given)}` is more than any machine holds")
        return numbers if count > 1 else numbers[0]

    def callback(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
        return [read(given) for given in value] if many else value and read(value)

    metavar = "x".join(name.upper() for name in names.split(" x "))
    metavar += f"[x{further.upper()}]" if further else ""
    return click.option(*flags.split(), callback=callback, multiple=many, metavar=metavar, help=text)


def _rounds(default: str) -> _Option:
    return click.option("--rounds", type=_COUNT, help=f"Measurements of each figure. Default: {default}.")


def _peers(text: str, default: str | None = None) -> _Option:
    return click.option("--peers", metavar="NAME,…", default=default, show_default=True, help=text)


def _of_vllm(flag: str, text: str) -> _Option:
    return click.option(flag, default="", metavar="TEXT", help=text)


@click.group("benchmark", cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--debug", is_flag=True, help="Show tracebacks, and what peers write.")
def benchmark(debug: bool) -> None:
    """Measure speed and memory beside dense peers in the same process.

    Tables go to stderr; the last line of stdout is one JSON document. Results are checked before they are
    timed, but for `serve` and `answers`: what is wrong gets no figure, and the command exits 1.
    """
    configure_logging(debug)


def _add(
    name: str,
    text: str,
    *options: _Option,
    shared: tuple[_Option, ...] = _SHARED,
    **defaults: tuple[Any, Any],
) -> None:
    """Add a command, which calls `benchmark_NAME` of module NAME with a setup, and prints what that returns.

    `defaults` stand where options are left out: usually, and at toy sizes, as a test of the command. Where a
    check failed, it exits 1.
    """

    def run(
        mask: str | None = None,
        geometry: str | None = None,
        kv_dtype: str | None = None,
        values: float | None = None,
        **chosen: Any,
    ) -> None:
        if kv_dtype is not None and chosen["dtype"] == "float32":
            # Checks against torch's own error would take numbers that are rounded apart for wrong ones.
            raise click.UsageError("--kv-dtype goes with --dtype bfloat16 or float16")
        from bin.benchmarks.measuring import choose_benchmark_device
        from bin.benchmarks.random_models import TOO_LARGE, choose_setup

        where = {}
        if _DEVICE in shared:
            device = choose_benchmark_device(chosen.pop("device"))
            where = {"device": device, "dtype": chosen.pop("dtype"), "kv_dtype": kv_dtype}
            if device.type == "cpu" and not mask:  # there, a real model's shape has to be asked for
                geometry = geometry or TOY
        setup = choose_setup(mask, geometry, values=values, **where)
        is_toy = setup.is_toy if where else geometry == TOY
        for option, usual in defaults.items():
            chosen[option] = chosen[option] or usual[is_toy]
        measure = getattr(import_module(f"bin.benchmarks.{name}"), f"benchmark_{name}")
        with out_of_memory(*TOO_LARGE):
            document = measure(setup, **chosen)
        click.echo(json.dumps(document, allow_nan=False))
        if not document["ok"]:
            sys.exit(1)

    command: Callable[..., Any] = run
    for option in reversed((*shared, *options)):
        command = option(command)
    benchmark.command(name, help=text)(command)


_add(
    "kernel",
    "Decode attention of a mask's layers against dense decode attention of others.",
    _sizes(
        "--case cases",
        "batch x tokens",
        "Such as 64x32k, or 4x32kx512 if the last 512 are new; repeatable. Default: 64x32k.",
        many=True,
        further="new",
    ),
    _peers(
        "Among leank-own-dtype (with --kv-dtype: ours, its cache in --dtype), leank-all-channels, "
        "sdpa-cudnn, sdpa-flash, sdpa; or none. Default: those that can run here."
    ),
    _VALUES,
    _rounds("21, on the CPU 3"),
    cases=([(64, 32768)], [(2, 64)]),
    rounds=(21, 3),
)
_add(
    "generate",
    "A decode step and whole `generate` calls against dense peers on the same random weights.",
    _sizes(
        "--case cases",
        "batch x prompt x new",
        "Repeatable. Default: 64x4kx128, 8x32kx128, 4x64kx128, 1x32kx128, 1x128kx128.",
        many=True,
    ),
    _peers(
        "Among own-dtype (with --kv-dtype: ours, its cache in --dtype), all-channels (ours, nothing pruned), "
        "dense-graph-cudnn, dense-graph-flash, dense-dynamic (the dense model, its step as a graph, or as it "
        "comes); or none. Default: all."
    ),
    click.option(
        "--drafts",
        type=click.IntRange(1, 31),
        metavar="N",
        help="Also time our step with so many drafted tokens to verify, 1 to 31.",
    ),
    _VALUES,
    _rounds("3"),
    # Batches and lengths at which a decode step is bound by weights, by the cache, or by both.
    cases=(
        [(64, 4096, 128), (8, 32768, 128), (4, 65536, 128), (1, 32768, 128), (1, 131072, 128)],
        [(2, 40, 12)],
    ),
    rounds=(3, 3),
)
_add(
    "memory",
    "Bytes of the cache, peak memory of a prefill, and the largest batch, against the dense model.",
    _sizes(
        "--largest",
        "prompt x new",
        "Find the largest batch of this; repeatable. Default: 4kx1k and 32kx128.",
        many=True,
    ),
    click.option("--limit", type=_GIGABYTES, help="GB for weights and cache. Default: all there is."),
    largest=([(4096, 1024), (32768, 128)], [(48, 8)]),
    limit=(None, 0.002),  # the toy model and some rows
)
_add(
    "serve",
    "Requests at once, output tokens a second and latencies of vLLM's server, beside peers.",
    _sizes(
        "--case cases",
        "prompt x new",
        "Such as 8kx512, or 32kx128x16 for one run of 16 requests sent at once; repeatable. Default: 8kx512.",
        many=True,
        further="requests",
    ),
    click.option("--requests", type=_COUNT, help="Sent all at once. Default: 256."),
    click.option(
        "--concurrency",
        type=_COUNT,
        multiple=True,
        help="Requests at a time in a further run; repeatable. Default: 1, 8, 32 and 64.",
    ),
    _VALUES,
    click.option("--memory", type=_GIGABYTES, help="GB of the cache, of every side. Default: 40."),
    _of_vllm("--options", "Further options of `vllm serve`, of all sides."),
    _of_vllm("--dense-options", "The same of the dense side alone."),
    _peers("Our stack with nothing pruned; vLLM's dense model; or none.", "all-channels,dense"),
    cases=([(8192, 512)], [(96, 8)]),
    requests=(256, 6),
    concurrency=([1, 8, 32, 64], [2]),
    memory=(40.0, 0.02),
)


@benchmark.command("answers")
@click.argument("checkpoint", type=click.Path(path_type=Path))
@_DEVICE
@click.option(
    "--dtype", type=_DTYPES, help="Of all servers. Default: the checkpoint's; float32 rounds least."
)
@_of_vllm("--options", "Of `vllm serve`, of the server that is compared.")
@click.option(
    "--hand-over",
    is_flag=True,
    help="Let a second server answer from its pages, on a second GPU where there is one.",
)
@click.option("--prompts", type=_COUNT, default=20, show_default=True)
@click.option(
    "--longest",
    type=click.IntRange(4, MAX_TOKENS),  # the shortest has a quarter of it
    default=15872,
    show_default=True,
    help="Tokens of the longest prompt.",
)
@click.option(
    "--new", type=click.IntRange(2, MAX_TOKENS), default=64, show_default=True, help="Tokens of each answer."
)
@click.option("--memory", type=_GIGABYTES, default=3, show_default=True, help="GB of the cache.")
@_peers("vLLM's dense model; or none.", "dense")
def answers(checkpoint: Path, **chosen: Any) -> None:
    """Answers of vLLM's server to prompts of a real tokenizer, beside those of a plain one on one GPU."""
    from bin.benchmarks.answers import benchmark_answers

    click.echo(json.dumps(benchmark_answers(checkpoint, **chosen), allow_nan=False))


_add(
    "train",
    "A training step, with one and with several questions, against its own prefill; and its peak memory.",
    _sizes("--length", "tokens", "Context, question and answer of the timed step. Default: 64k."),
    shared=(_GEOMETRY, _DEVICE, _DTYPE),
    length=(65536, 96),
)
_add(
    "onnx",
    "A decode step on onnxruntime against the same exporter's dense graph, on the CPU.",
    _sizes("--length lengths", "tokens", "Cached tokens; repeatable. Default: 4k, 8k, 16k, 32k.", many=True),
    click.option(
        "--weights",
        type=click.Choice(["float32", "int8", "int4"]),
        default="float32",
        show_default=True,
        help="Of both graphs; the caches stay float32.",
    ),
    click.option(
        "--threads",
        type=click.IntRange(1, 256),
        help="Of onnxruntime. Default: 2, or as many cores as there are.",
    ),
    shared=(_MASK, _GEOMETRY),
    lengths=([4096, 8192, 16384, 32768], [3, 96]),
    threads=(min(2, os.cpu_count() or 1),) * 2,
)


if __name__ == "__main__":
    benchmark(prog_name="bin/benchmark")
