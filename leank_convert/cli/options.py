"""Options that several commands take."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args

import click

from leank_convert.evaluate.names import ALSO
from leank_convert.files import user_path
from leank_convert.methods import METHODS, Budget
from leank_convert.windows import MAX_WINDOW

_Command = TypeVar("_Command", bound=Callable[..., Any])

# Beyond them a number is a slip of the pen, which would take all memory, or for ever.
MAX_TOKENS = MAX_WINDOW
MAX_COUNT = 10_000  # of prompts, questions, measurements
SEED = click.IntRange(0, 2**63 - 1)


class UserPath(click.Path):
    """A path; what shells leave of `~`, as in `--out=~/out`, is expanded."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Read a path."""
        return user_path(str(super().convert(value, param, ctx)))


class FiniteRange(click.FloatRange):
    """A range that NaN and infinity lie outside of."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Read a number, or fail."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number", param, ctx)
        return number


out_option = click.option(
    "-o", "--out", type=UserPath(file_okay=False), required=True, help="Folder to write."
)
checkpoint_argument = click.argument("checkpoint", type=UserPath())
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document to stdout.")
evaluated_mask_option = click.option(
    "--mask",
    metavar="MASK",
    help="CHECKPOINT is a model, which is pruned by this mask in memory; nothing is exported.",
)
recipe_option = click.option(
    "--recipe", "recipe_name", metavar="NAME|FILE", help="Packaged recipe or YAML file. Default: the model's."
)
set_option = click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change a key of the recipe; repeatable."
)
device_option = click.option("--device", help="Device to run on. Default: cuda if there is one, else cpu.")
trust_option = click.option(
    "--trust", is_flag=True, help="Run the checkpoint's Python files even where no release wrote them."
)
overwrite_option = click.option(
    "--overwrite", is_flag=True, help="Replace a checkpoint that lies in --out; files of your own there stay."
)


def results_option(text: str) -> Callable[[_Command], _Command]:
    """`--out`, a folder that may be left out."""
    return click.option("-o", "--out", type=UserPath(file_okay=False), help=text)


def also_option(default: str = "") -> Callable[[_Command], _Command]:
    """`--also`; `default` says what is meant without it."""
    return click.option(
        "--also",
        type=click.Choice(ALSO),
        metavar="NAME",
        multiple=True,
        help="Answer in other ways, too: from the window alone; by ThinK, which chooses channels for every "
        "prompt; with the checkpoint's widths and ThinK's choice; by FP8 or int4 (4 bits), alone or on the "
        "kept channels. In a checkout of leank-convert alone: by rotated int4, KIVI (2 bits), Quest (chosen "
        f"pages) or SnapKV (chosen tokens). Names: {', '.join(ALSO)}. {default}".rstrip(),
    )


def _together(*options: Callable[[_Command], _Command]) -> Callable[[_Command], _Command]:
    """Options that go together, in the order in which help names them."""

    def add(command: _Command) -> _Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


# The recipe checks what they may be.
method_options = _together(
    click.option(
        "--method",
        metavar="NAME",
        help="What chooses channels. Default: the recipe's, else leank. "
        + " ".join(f"{method.name} {method.summary}." for method in METHODS.values()),
    ),
    click.option(
        "--budget",
        metavar="|".join(get_args(Budget)),
        help="Every head keeps as many channels, or the whole model's best are kept. Default: uniform for "
        + ", ".join(method.name for method in METHODS.values() if method.budget == "uniform")
        + ", else global.",
    ),
)
window_options = _together(
    *(
        click.option(f"--{name}", type=click.IntRange(smallest, MAX_WINDOW), help=text)
        for name, smallest, text in (
            ("sink-size", 0, "First tokens that keep every channel."),
            ("recent-size", 0, "Last tokens that keep every channel."),
            ("flush-size", 1, "Tokens that leave the recent window at once."),
        )
    )
)
# Of an export: its mask, and what gives it its windows.
mask_options = _together(
    click.option(
        "--mask",
        "mask_path",
        metavar="MASK",
        help="Mask: .safetensors, .npy, .pth, a checkpoint, a hub id, or a packaged one's name "
        "(`leank-convert masks`).",
    ),
    click.option(
        "--pruning-ratio",
        type=FiniteRange(0, 1, max_open=True),
        help="Which of several packaged masks. Default: the only one, else that for 0.7.",
    ),
    click.option(
        "--all-channels", is_flag=True, help="Keep every channel: the dense model in a LeanK cache."
    ),
    recipe_option,
    set_option,
    window_options,
)
kv_dtype_option = click.option(
    "--kv-dtype",
    type=click.Choice(["fp8", "int4"]),
    help="Store keys and values in eight bits, by scales that are measured on the recipe's data, or in four. "
    "Keys are centred, and a few answers tried. Default: as they come.",
)
value_ratio_option = click.option(
    "--value-pruning-ratio",
    type=FiniteRange(0, 1, max_open=True),
    help="Share of V's channels that pruned tokens lose, in a basis that is measured on the recipe's data "
    "(`export`: or that a packaged mask of both ratios has). Default: as recipe or mask say, else none.",
)
text_model_option = click.option(
    "--no-text-model",
    is_flag=True,
    help="Refuse a MODEL that also reads images; else its text model is converted.",
)
hub_options = _together(
    click.option(
        "--push-to-hub", "repo_id", metavar="OWNER/NAME", help="Upload the checkpoint when it is written."
    ),
    click.option("--private", is_flag=True, help="Make a private hub repository."),
    click.option(
        "--base-model",
        metavar="OWNER/NAME",
        help="What MODEL is called on the hub, for the model card. Default: what is known of it.",
    ),
)


def check_beside(other: str, is_there: bool, given: Mapping[str, object]) -> None:
    """Refuse options, by the names that they are given by, which mean nothing without another."""
    for name, value in given.items():
        if not is_there and value not in (None, ()) and value is not False:
            raise click.UsageError(f"{name} goes with {other}")


def print_result(result: Any, render: Callable[[Any], str], out: Path | None, *, as_json: bool) -> None:
    """Print a result to stdout, and to stderr the folder where its files are, if there is one."""
    if out is not None:
        click.echo(out, err=True)
    click.echo(json.dumps(result.to_dict()) if as_json else render(result), nl=as_json)
