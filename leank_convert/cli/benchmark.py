"""The `benchmark` commands: options, and one call each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from leank_convert.benchmark.geometries import GEOMETRIES
from leank_convert.cli.benchmark_onnx import onnx
from leank_convert.cli.benchmark_options import finish, read_layers, sizes

_Command = TypeVar("_Command", bound=Callable[..., Any])
_TOY = "tiny"


def _shape_options(command: _Command) -> _Command:
    for option in (
        click.option(
            "--dtype",
            type=click.Choice(["bfloat16", "float16", "float32"]),
            default="bfloat16",
            show_default=True,
            help="Of weights, keys and values.",
        ),
        click.option("--device", help="Default: cuda. `cpu` runs toy sizes, as a test of the command."),
        click.option(
            "--geometry",
            type=click.Choice(list(GEOMETRIES)),
            help="Model shape. Default: the mask's if there is one, else Llama's.",
        ),
    ):
        command = option(command)
    return command


def _subject_options(command: _Command) -> _Command:
    for option in (
        _shape_options,
        click.option("--recipe", metavar="NAME|FILE", help="Take mask, windows and shape from a recipe."),
        click.option("--mask", metavar="FILE|ID", help="Mask to run with. Default: a synthetic one."),
    ):
        command = option(command)
    return command


@click.group()
def benchmark() -> None:
    """Measure speed and memory beside dense peers in the same process.

    Tables go to stderr; the last line of stdout is one JSON document. Results are checked before they are
    timed: what is wrong gets no figure, and the command exits 1.
    """


@benchmark.command()
@_subject_options
@click.option(
    "--case",
    "cases",
    callback=sizes("batch", "tokens"),
    multiple=True,
    metavar="BATCHxTOKENS",
    help="Such as 64x32k; repeatable. Default: 64x32k.",
)
@click.option("--layers", default="all", callback=read_layers, metavar="all|0,10", help="Layers of the mask.")
@click.option(
    "--peers",
    metavar="NAME,…",
    help="Among leank-all-channels, sdpa-cudnn, sdpa-flash, sdpa, flex, flashinfer; or none. "
    "Default: those that can run here.",
)
@click.option(
    "--rounds", type=click.IntRange(1), help="Measurements of each figure. Default: 21, on the CPU 3."
)
def kernel(
    mask: str | None,
    recipe: str | None,
    geometry: str | None,
    device: str | None,
    dtype: str,
    cases: tuple[tuple[int, int], ...],
    layers: list[int] | None,
    peers: str | None,
    rounds: int | None,
) -> None:
    """Decode attention of a mask's layers against dense decode attention of others."""
    from leank_convert.benchmark.environment import choose_benchmark_device, choose_dtype
    from leank_convert.benchmark.kernel import benchmark_kernel
    from leank_convert.benchmark.peers import choose_peers
    from leank_convert.benchmark.subject import choose_subject

    chosen = choose_benchmark_device(device)
    toy = chosen.type == "cpu"
    document = benchmark_kernel(
        choose_subject(mask, recipe, _geometry_or_toy(mask, recipe, geometry, toy=toy)),
        cases or ([(2, 64)] if toy else [(64, 32768)]),
        device=chosen,
        dtype=choose_dtype(dtype),
        layers=layers,
        peers=choose_peers(peers, chosen),
        rounds=rounds or (3 if toy else 21),
    )
    finish(document)


@benchmark.command()
@_subject_options
@click.option(
    "--case",
    "cases",
    callback=sizes("batch", "prompt", "new"),
    multiple=True,
    metavar="BATCHxPROMPTxNEW",
    help="Repeatable. Default: 64x4kx128.",
)
@click.option(
    "--peers",
    default="dense-dynamic,dense-static",
    show_default=True,
    metavar="NAME,…",
    help="The dense model's caches; or none.",
)
@click.option(
    "--rounds", type=click.IntRange(1), default=3, show_default=True, help="Timed calls of each side."
)
@click.option(
    "--static-limit",
    type=click.FloatRange(1),
    default=180,
    show_default=True,
    help="Seconds after which compiling dense-static is given up.",
)
def generate(
    mask: str | None,
    recipe: str | None,
    geometry: str | None,
    device: str | None,
    dtype: str,
    cases: tuple[tuple[int, int, int], ...],
    peers: str,
    rounds: int,
    static_limit: float,
) -> None:
    """A decode step and whole `generate` calls against the dense model on the same random weights."""
    from leank_convert.benchmark.environment import choose_benchmark_device, choose_dtype
    from leank_convert.benchmark.generate import PEERS, benchmark_generate
    from leank_convert.benchmark.peers import check_peers
    from leank_convert.benchmark.subject import choose_subject

    chosen = choose_benchmark_device(device)
    toy = chosen.type == "cpu"
    document = benchmark_generate(
        choose_subject(mask, recipe, _geometry_or_toy(mask, recipe, geometry, toy=toy)),
        cases or ([(2, 40, 12)] if toy else [(64, 4096, 128)]),
        device=chosen,
        dtype=choose_dtype(dtype),
        peers=check_peers(peers, PEERS),
        rounds=rounds,
        static_limit=static_limit,
    )
    finish(document)


@benchmark.command()
@_subject_options
@click.option(
    "--allocated",
    callback=sizes("prompt", "new"),
    metavar="PROMPTxNEW",
    help="Row whose cache is counted. Default: 32kx128.",
)
@click.option(
    "--prefill",
    callback=sizes("batch", "prompt"),
    metavar="BATCHxPROMPT",
    help="Prefill whose peak is measured. Default: 4x32k.",
)
@click.option(
    "--largest",
    callback=sizes("prompt", "new"),
    multiple=True,
    metavar="PROMPTxNEW",
    help="Find the largest batch of this; repeatable. Default: 4kx1k and 32kx128.",
)
@click.option(
    "--skip",
    type=click.Choice(["allocated", "prefill", "largest"]),
    multiple=True,
    help="Leave a part out; repeatable.",
)
@click.option(
    "--limit",
    type=click.FloatRange(0, min_open=True),
    help="GB for weights and cache. Default: all there is.",
)
def memory(
    mask: str | None,
    recipe: str | None,
    geometry: str | None,
    device: str | None,
    dtype: str,
    allocated: tuple[int, int] | None,
    prefill: tuple[int, int] | None,
    largest: tuple[tuple[int, int], ...],
    skip: tuple[str, ...],
    limit: float | None,
) -> None:
    """Bytes of the cache, peak memory of a prefill, and the largest batch, against the dense model."""
    from leank_convert.benchmark.environment import choose_benchmark_device, choose_dtype
    from leank_convert.benchmark.memory import benchmark_memory
    from leank_convert.benchmark.subject import choose_subject

    chosen = choose_benchmark_device(device)
    toy = chosen.type == "cpu"
    if toy and limit is None:
        limit = 0.002  # the toy model and some rows
    document = benchmark_memory(
        choose_subject(mask, recipe, _geometry_or_toy(mask, recipe, geometry, toy=toy)),
        device=chosen,
        dtype=choose_dtype(dtype),
        allocated=None if "allocated" in skip else allocated or ((200, 12) if toy else (32768, 128)),
        prefill=None if "prefill" in skip else prefill or ((2, 64) if toy else (4, 32768)),
        batches=[] if "largest" in skip else largest or ([(48, 8)] if toy else [(4096, 1024), (32768, 128)]),
        limit=None if limit is None else round(limit * 1e9),
    )
    finish(document)


@benchmark.command()
@_shape_options
@click.option(
    "--length",
    callback=sizes("tokens"),
    metavar="TOKENS",
    help="Context, question and answer of the step that is timed. Default: 64k.",
)
@click.option(
    "--questions", type=click.IntRange(1), help="Questions on one context, beside a single one. Default: 8."
)
@click.option(
    "--question-size",
    callback=sizes("question", "answer"),
    metavar="QUESTIONxANSWER",
    help="Tokens of each. Default: 24x40.",
)
@click.option(
    "--peer-length",
    "peer_lengths",
    callback=sizes("tokens"),
    multiple=True,
    metavar="TOKENS",
    help="Where full sequences run beside ours, halved until they fit; repeatable. Default: 16k and 64k.",
)
@click.option(
    "--memory-length",
    callback=sizes("tokens"),
    metavar="TOKENS",
    help="Where peak memory is read. Default: 96k.",
)
@click.option(
    "--schedule-range",
    callback=sizes("shortest", "longest"),
    metavar="SHORTESTxLONGEST",
    help="Lengths of the schedule's samples. Default: 16kx96k.",
)
@click.option(
    "--schedule-steps", type=click.IntRange(1), help="Steps of the schedule that are run. Default: 30."
)
@click.option(
    "--rounds", type=click.IntRange(1), help="Measurements of each figure. Default: 3, on the CPU 1."
)
@click.option(
    "--skip",
    type=click.Choice(["step", "peer", "memory", "schedule"]),
    multiple=True,
    help="Leave a part out; repeatable.",
)
def train(
    geometry: str | None,
    device: str | None,
    dtype: str,
    length: tuple[int, ...] | None,
    questions: int | None,
    question_size: tuple[int, int] | None,
    peer_lengths: tuple[tuple[int, ...], ...],
    memory_length: tuple[int, ...] | None,
    schedule_range: tuple[int, int] | None,
    schedule_steps: int | None,
    rounds: int | None,
    skip: tuple[str, ...],
) -> None:
    """A training step against its own prefill and full sequences, its memory, and the whole schedule.

    Started by torchrun: samples a second of all processes against those of one, at --length, and no more.
    """
    from leank_convert.benchmark.environment import choose_dtype
    from leank_convert.benchmark.geometries import find_geometry
    from leank_convert.benchmark.training import benchmark_training
    from leank_convert.benchmark.training_sizes import QuestionSize, choose_sizes

    toy = device is not None and device.split(":")[0] == "cpu"
    given = {
        "length": length and length[0],
        "num_questions": questions,
        "question": question_size and QuestionSize(*question_size),
        "peer_lengths": tuple(tokens for (tokens,) in peer_lengths) or None,
        "memory_length": memory_length and memory_length[0],
        "lengths": schedule_range,
        "schedule_steps": schedule_steps,
        "rounds": rounds,
    }
    document = benchmark_training(
        find_geometry(_geometry_or_toy(None, None, geometry, toy=toy), None),
        choose_sizes(given, skip, toy=toy),
        device=device,
        dtype=choose_dtype(dtype),
    )
    if document is not None:
        finish(document)


benchmark.add_command(onnx)


def _geometry_or_toy(mask: str | None, recipe: str | None, geometry: str | None, *, toy: bool) -> str | None:
    """On the CPU a real model's shape has to be asked for."""
    return _TOY if toy and not (mask or recipe or geometry) else geometry
