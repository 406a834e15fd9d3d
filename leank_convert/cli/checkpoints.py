"""The commands on a checkpoint that was written: `verify`, `adapter` and `warmup`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from leank_convert.cli.export import quiet_transformers
from leank_convert.cli.options import UserPath, checkpoint_argument, json_option, out_option, trust_option
from leank_convert.tables import listing


@click.command(short_help="Check a checkpoint or an ONNX folder.")
@click.argument("folder", type=UserPath())
@click.option(
    "--source",
    metavar="MODEL",
    help="The model it was made from: compares weights, config and tokenizer; for an ONNX folder, what both "
    "make of a prompt.",
)
@json_option
def verify(folder: Path, source: str | None, as_json: bool) -> None:
    """Check a checkpoint or an ONNX folder: digests, shapes, masks, the graph. Exits 1 if any fails.

    Nothing of a checkpoint is run; a graph is, by onnxruntime. With --source all that a checkpoint takes over
    from the model, and the answers of a graph, are compared with the model's.
    """
    if source is not None:
        quiet_transformers()
    from leank_convert.verify import verify_checkpoint

    report = verify_checkpoint(folder, source)
    rows = [("ok" if check.ok else "FAIL", f"{check.name}: {check.detail}") for check in report.checks]
    click.echo(json.dumps(report.to_dict()) if as_json else "\n".join(listing(rows)))
    if not report.ok:
        sys.exit(1)


@click.command(short_help="Convert a LoRA of the original for a checkpoint.")
@click.argument("lora")
@click.option("--checkpoint", required=True, metavar="OUT", help="The checkpoint that it is to be loaded on.")
@click.option(
    "--trained-on-checkpoint",
    is_flag=True,
    help="LORA was trained on the checkpoint itself: only mark it as fitting.",
)
@out_option
def adapter(lora: str, checkpoint: str, out: Path, trained_on_checkpoint: bool) -> None:
    """Convert LORA, an adapter of the original model, for a checkpoint made from it.

    There KV heads are in another order. The result is loaded by PEFT or `model.load_adapter`, and then does
    what LORA does to the original. LORA is a folder or a hub id. DoRA, biases and modules that were trained
    whole are converted, too.
    """
    quiet_transformers()
    from leank_convert.export.adapter import convert_adapter

    click.echo(convert_adapter(lora, checkpoint, out, trained_on_checkpoint=trained_on_checkpoint))


@click.command(short_help="Compile and check a checkpoint's kernels for this GPU.")
@checkpoint_argument
@click.option("--device", help="CUDA device to compile for. Default: the current one.")
@trust_option
@json_option
def warmup(checkpoint: Path, device: str | None, trust: bool, as_json: bool) -> None:
    """Compile and check CHECKPOINT's kernels for this machine's GPU, into TILELANG_CACHE_DIR."""
    from leank_convert.warmup import render_warm_up, warm_up

    facts = warm_up(checkpoint, device, trust=trust)
    click.echo(json.dumps(facts) if as_json else render_warm_up(facts))
