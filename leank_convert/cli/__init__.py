"""The command line: reads options, calls the toolkit, prints. Imports torch only inside a command.

Text for people goes to stderr, results to stdout; `--json` makes stdout one JSON document.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import click

from leank_convert.cli.analyze import analyze
from leank_convert.cli.checkpoints import adapter, verify, warmup
from leank_convert.cli.evaluate import evaluate, evaluate_text
from leank_convert.cli.export import export, export_onnx
from leank_convert.cli.refusals import check_arguments, print_error, restate, restate_usage
from leank_convert.cli.show import inspect, masks, recipes
from leank_convert.cli.train import train


class Terminated(KeyboardInterrupt):
    """SIGTERM, by which schedulers end what they run."""


class Command(click.Command):
    """Turns errors, the toolkit's and click's, into `error:` and `hint:` lines and an exit code."""

    def main(self, *args: Any, **options: Any) -> Any:
        """Run the command line, and exit."""
        try:
            code = super().main(*args, **{**options, "standalone_mode": False})
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
            code = error.exit_code
        except click.ClickException as error:
            print_error(refusal := restate_usage(error))
            code = refusal.exit_code
        except (click.Abort, KeyboardInterrupt) as error:
            code = _interrupted(error)
        sys.exit(code)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read arguments that are text and not empty."""
        check_arguments(args)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; with `--debug` errors keep their tracebacks."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise  # click's own: the reader of stdout has gone
        except (Exception, KeyboardInterrupt) as error:
            if ctx.params.get("debug"):
                raise
            if isinstance(error, KeyboardInterrupt):
                ctx.exit(_interrupted(error))
            refusal = restate(error)
            if refusal is None:
                raise
            print_error(refusal)
            ctx.exit(refusal.exit_code)


class Group(Command, click.Group):
    """Says on a terminal, too, that a command loads something, where it has not ended after a second."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command."""
        with _announced(), _terminable():
            return super().invoke(ctx)


@contextmanager
def _announced() -> Iterator[None]:
    timer = threading.Timer(1, click.echo, ["loading torch, transformers and the files"], {"err": True})
    timer.daemon = True
    if sys.stderr.isatty():
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM end a command as Ctrl-C does, which takes away what is half written."""

    def end(number: int, frame: FrameType | None) -> None:
        raise Terminated

    before = signal.getsignal(signal.SIGTERM)
    if before is not signal.SIG_DFL or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupted(error: BaseException) -> int:
    is_terminated = isinstance(error, Terminated)
    click.echo("error: ended by SIGTERM" if is_terminated else "error: interrupted", err=True)
    return 128 + (signal.SIGTERM if is_terminated else signal.SIGINT)


@click.group("leank-convert", cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="leank-convert")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
def main(debug: bool) -> None:
    """Learn which channels of an LLM's K cache it needs; write a checkpoint that keeps only those."""
    configure_logging(debug)


def configure_logging(debug: bool) -> None:
    """Log warnings and the toolkit's notes to stderr; with `debug` everything."""
    logging.basicConfig(
        format="%(levelname)s: %(message)s",
        level=logging.DEBUG if debug else logging.WARNING,
        stream=sys.stderr,
    )
    logging.addLevelName(logging.WARNING, "warning")
    logging.addLevelName(logging.INFO, "note")
    logging.getLogger("leank_convert").setLevel(logging.DEBUG if debug else logging.INFO)


for _command in (
    train, export, export_onnx, adapter, verify, inspect, evaluate, evaluate_text, analyze, recipes, masks,
    warmup,
):  # fmt: skip
    main.add_command(_command)
