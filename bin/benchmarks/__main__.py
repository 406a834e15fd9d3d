"""The commands of `bin/benchmark`: options, and one call each."""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from bin.benchmarks.geometries import GEOMETRIES, TOY
from leank_convert.cli import Group, configure_logging
from leank_convert.cli.options import MAX_COUNT, MAX_TOKENS, FiniteRange
from leank_convert.errors import out_of_memory, shorten

if TYPE_CHECKING:
    from bin.benchmarks.random_models import Setup

_Run = Callable[..., Any]

_MASK = click.option("--mask", metavar="FILE|ID|NAME", help="Mask to run with. Default: a synthetic one.")
_GEOMETRY = click.option(
    "--geometry",
    type=click.Choice(list(GEOMETRIES)),
    help=f"Model shape. Default: the mask's if there is one, else Llama's; `{TOY}` tests the command.",
)
_DEVICE = click.option("--device", help="Default: cuda. `cpu` runs toy sizes, as a test of the command.")
_DTYPE = click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float16", "float32"]),
    default="bfloat16",
    show_default=True,
    help="Of weights, keys and values.",
)
_KV_DTYPE = click.option("--kv-dtype", type=click.Choice(["fp8"]), help="Of our caches. Default: as --dtype.")


# Batches and lengths at which a decode step is bound by weights, by the cache, or by both.
_GENERATED = [(batch, tokens * 1024, 128) for batch, tokens in ((64, 4), (8, 32), (4, 64), (1, 32), (1, 128))]
# What stands where an option is left out: on a GPU, and on the CPU as a test of the command.
_DEFAULTS: dict[str, dict[str, tuple[Any, Any]]] = {
    "kernel": {"cases": ([(64, 32768)], [(2, 64)]), "rounds": (21, 3)},
    "generate": {"cases": (_GENERATED, [(2, 40, 12)]), "rounds": (3, 3)},
    "memory": {
        "allocated": ((32768, 128), (200, 12)),
        "prefill": ((4, 32768), (2, 64)),
        "largest": ([(4096, 1024), (32768, 128)], [(48, 8)]),
        "limit": (None, 0.002),  # the toy model and some rows
    },
    "serve": {
        "cases": ([(8192, 512)], [(96, 8)]),
        "requests": (256, 6),
        "concurrency": ([1, 8, 32, 64], [2]),
        "memory": (40.0, 0.02),
    },
    "train": {
        "length": ((65536,), (96,)),
        "questions": (8, 3),
        "question_size": ((24, 40), (4, 6)),
        "rounds": (3, 1),
    },
}


def case_options(*, masked: bool = True, stored: bool = False) -> Callable[[_Run], _Run]:
    """Add the options of what is measured and where, and give a command what they choose as `setup`.

    The document that the command returns is printed; where a check failed, it exits 1. `masked` adds
    `--mask`, `stored` `--kv-dtype`.
    """

    def decorate(run: _Run) -> _Run:
        @functools.wraps(run)
        def command(
            geometry: str | None,
            device: str | None,
            dtype: str,
            mask: str | None = None,
            kv_dtype: str | None = None,
            **options: Any,
        ) -> None:
            if kv_dtype is not None and dtype == "float32":
                # Checks against torch's own error would take numbers that are rounded apart for wrong ones.
                raise click.UsageError("--kv-dtype goes with --dtype bfloat16 or float16")
            from bin.benchmarks.measuring import choose_benchmark_device
            from bin.benchmarks.random_models import choose_setup

            chosen = choose_benchmark_device(device)
            if chosen.type == "cpu" and not mask:
                # There, a real model's shape has to be asked for.
                geometry = geometry or TOY
            setup = choose_setup(mask, geometry, chosen, dtype, kv_dtype)
            for name, values in _DEFAULTS[run.__name__].items():
                options[name] = options[name] or values[setup.is_toy]
            _finish(run(setup, **options))

        decorated: _Run = command
        offered = (_DTYPE, *((_KV_DTYPE,) if stored else ()), _DEVICE, _GEOMETRY)
        for option in (*offered, *((_MASK,) if masked else ())):
            decorated = option(decorated)
        return decorated

    return decorate


def _finish(document: dict[str, Any]) -> None:
    click.echo(json.dumps(document, allow_nan=False))
    if not document["ok"]:
        sys.exit(1)


def _size_option(
    flags: str, names: str, text: str, *, many: bool = False, further: str | None = None
) -> Callable[[_Run], _Run]:
    """An option of whole numbers between `x`, named as in `batch x tokens`, and perhaps a `further` one.

    `k` is 1024.
    """

    def read(given: str) -> tuple[int, ...]:
        try:
            # A number of thousands of digits would take its time.
            parts = [(part.removesuffix("k"), part.endswith("k")) for part in given[:99].lower().split("x")]
            numbers = tuple(int(number) * (1024 if is_kilo else 1) for number, is_kilo in parts)
        except ValueError:
            numbers = ()
        count = len(names.split(" x "))
        if len(numbers) not in (count, count + (further is not None)) or min(numbers) < 1:
            example = "x".join(("64", "32k", "128")[:count])
            raise click.BadParameter(f"`{shorten(given)}` is not {names}, such as {example}")
        if max(numbers) > MAX_TOKENS:
            raise click.BadParameter(f"`{shorten(given)}` is more than any machine holds")
        return numbers

    def callback(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
        return [read(given) for given in value] if many else value and read(value)

    metavar = "x".join(name.upper() for name in names.split(" x "))
    metavar += f"[x{further.upper()}]" if further else ""
    return click.option(*flags.split(), callback=callback, multiple=many, metavar=metavar, help=text)


def _rounds_option(default: str) -> Callable[[_Run], _Run]:
    text = f"Measurements of each figure. Default: {default}."
    return click.option("--rounds", type=click.IntRange(1, MAX_COUNT), help=text)


@click.group("benchmark", cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--debug", is_flag=True, help="Show tracebacks, and what peers write.")
def benchmark(debug: bool) -> None:
    """Measure speed and memory beside dense peers in the same process.

    Tables go to stderr; the last line of stdout is one JSON document. Results are checked before they are
    timed, but for those of `serve`: what is wrong gets no figure, and the command exits 1.
    """
    configure_logging(debug)


@benchmark.command()
@case_options(stored=True)
@_size_option(
    "--case cases",
    "batch x tokens",
    "Such as 64x32k, or 4x32kx512 if the last 512 are new; repeatable. Default: 64x32k.",
    many=True,
    further="new",
)
@click.option(
    "--peers",
    metavar="NAME,…",
    help="Among leank-own-dtype (with --kv-dtype: ours, its cache in --dtype), leank-all-channels, "
    "sdpa-cudnn, sdpa-flash, sdpa; or none. Default: those that can run here.",
)
@_rounds_option("21, on the CPU 3")
def kernel(setup: Setup, **options: Any) -> dict[str, Any]:
    """Decode attention of a mask's layers against dense decode attention of others."""
    from bin.benchmarks.kernel import benchmark_kernel

    return benchmark_kernel(setup, **options)


@benchmark.command()
@case_options(stored=True)
@_size_option(
    "--case cases",
    "batch x prompt x new",
    "Repeatable. Default: 64x4kx128, 8x32kx128, 4x64kx128, 1x32kx128, 1x128kx128.",
    many=True,
)
@click.option(
    "--peers",
    metavar="NAME,…",
    help="Among own-dtype (with --kv-dtype: ours, its cache in --dtype), all-channels (ours, nothing "
    "pruned), dense-graph-cudnn, dense-graph-flash, dense-dynamic (the dense model, its step as a graph, or "
    "as it comes); or none. Default: all.",
)
@click.option(
    "--drafts",
    type=click.IntRange(1, 31),
    metavar="N",
    help="Also time our step with so many drafted tokens to verify, 1 to 31.",
)
@_rounds_option("3")
def generate(setup: Setup, **options: Any) -> dict[str, Any]:
    """A decode step and whole `generate` calls against dense peers on the same random weights."""
    from bin.benchmarks.generate import benchmark_generate

    return benchmark_generate(setup, **options)


@benchmark.command()
@case_options(stored=True)
@_size_option("--allocated", "prompt x new", "Row whose cache is counted. Default: 32kx128.")
@_size_option("--prefill", "batch x prompt", "Prefill whose peak is measured. Default: 4x32k.")
@_size_option(
    "--largest",
    "prompt x new",
    "Find the largest batch of this; repeatable. Default: 4kx1k and 32kx128.",
    many=True,
)
@click.option(
    "--limit",
    type=FiniteRange(0, 1e6, min_open=True),
    help="GB for weights and cache. Default: all there is.",
)
def memory(setup: Setup, limit: float | None, **parts: Any) -> dict[str, Any]:
    """Bytes of the cache, peak memory of a prefill, and the largest batch, against the dense model."""
    from bin.benchmarks.memory import benchmark_memory

    return benchmark_memory(setup, limit=None if limit is None else round(limit * 1e9), **parts)


@benchmark.command()
@case_options(stored=True)
@_size_option(
    "--case cases",
    "prompt x new",
    "Such as 8kx512, or 32kx128x16 for one run of 16 requests sent at once; repeatable. Default: 8kx512.",
    many=True,
    further="requests",
)
@click.option("--requests", type=click.IntRange(1, MAX_COUNT), help="Sent all at once. Default: 256.")
@click.option(
    "--concurrency",
    type=click.IntRange(1, MAX_COUNT),
    multiple=True,
    help="Requests at a time in a further run; repeatable. Default: 1, 8, 32 and 64.",
)
@click.option(
    "--memory",
    type=FiniteRange(0, 1e6, min_open=True),
    help="GB of the cache, of every side. Default: 40.",
)
@click.option("--options", default="", metavar="TEXT", help="Further options of `vllm serve`, of all sides.")
@click.option("--dense-options", default="", metavar="TEXT", help="The same of the dense side alone.")
@click.option(
    "--peers",
    default="all-channels,dense",
    show_default=True,
    metavar="NAME,…",
    help="Our stack with nothing pruned; vLLM's dense model; or none.",
)
def serve(setup: Setup, **options: Any) -> dict[str, Any]:
    """Requests at once, output tokens a second and latencies of vLLM's server, beside peers."""
    from bin.benchmarks.serve import benchmark_serve

    return benchmark_serve(setup, **options)


@benchmark.command()
@case_options(masked=False)
@_size_option("--length", "tokens", "Context, question and answer of the timed step. Default: 64k.")
@click.option(
    "--questions",
    type=click.IntRange(1, 1000),
    help="Questions on one context, beside a single one. Default: 8.",
)
@_size_option("--question-size", "question x answer", "Tokens of each. Default: 24x40.")
@_rounds_option("3, on the CPU 1")
def train(setup: Setup, length: tuple[int], **options: Any) -> dict[str, Any]:
    """A training step, with one and with several questions, against its own prefill; and its peak memory."""
    from bin.benchmarks.training_step import benchmark_train

    return benchmark_train(setup, length=length[0], **options)


@benchmark.command()
@_MASK
@_GEOMETRY
@_size_option("--length", "tokens", "Cached tokens; repeatable. Default: 4k, 8k, 16k and 32k.", many=True)
@click.option(
    "--weights",
    type=click.Choice(["float32", "int8", "int4"]),
    default="float32",
    show_default=True,
    help="Of both graphs; the caches stay float32.",
)
@click.option(
    "--threads",
    type=click.IntRange(1, 256),
    help="Of onnxruntime. Default: 2, or as many cores as there are.",
)
@_rounds_option("21, of a toy 3")
def onnx(
    mask: str | None,
    geometry: str | None,
    length: Any,
    weights: str,
    threads: int | None,
    rounds: int | None,
) -> None:
    """A decode step on onnxruntime against the same exporter's dense graph, on the CPU."""
    from bin.benchmarks.onnx_step import benchmark_onnx
    from bin.benchmarks.random_models import TOO_LARGE, choose_setup

    toy = geometry == TOY
    setup = choose_setup(mask, geometry)
    with out_of_memory(*TOO_LARGE):
        document = benchmark_onnx(
            setup,
            [tokens for (tokens,) in length] or ([3, 96] if toy else [4096, 8192, 16384, 32768]),
            weights=None if weights == "float32" else weights,
            threads=threads or min(2, os.cpu_count() or 1),
            rounds=rounds or (3 if toy else 21),
        )
    _finish(document)


if __name__ == "__main__":
    benchmark(prog_name="bin/benchmark")
