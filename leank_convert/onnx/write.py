"""Write a graph: its weights, its description, and the folder that runs without PyTorch."""

from __future__ import annotations

import dataclasses
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from leank_convert.checkpoint_io import COMPANION_PATTERNS, ONNX_DESCRIPTION_NAME, read_leank_config
from leank_convert.export import check_exportable, export_checkpoint, refuse_overlap, refuse_to_lose_mask
from leank_convert.export.config_json import encode_json
from leank_convert.export.publish import MARKER_NAME, staged_folder
from leank_convert.files import sha256_of, write_atomically
from leank_convert.hub import model_name, resolve_model
from leank_convert.mask import MASK_FILE_NAME, ChannelMask, load_mask
from leank_convert.onnx.check import check_graph, make_trials, measure_quantized
from leank_convert.onnx.description import describe
from leank_convert.onnx.libraries import DEFAULT_OPSET, check_available
from leank_convert.onnx.quantize import check_quantizer, quantize_weights
from leank_convert.onnx.readme import build_readme
from leank_convert.onnx.subject import PrunedModel, load_pruned
from leank_convert.onnx.trace import write_graph

MODEL_NAME = "model.onnx"
RUNNER_NAME = "leank_onnx.py"

_README_NAME = "README.md"
_HOST_FILES = "leank_onnx*"  # what runs the graph

_logger = logging.getLogger("leank_convert")


def export_onnx(
    model: str | Path,
    mask: ChannelMask | None,
    out: Path,
    *,
    opset: int = DEFAULT_OPSET,
    dtype: str = "float32",
    weights: str | None = None,
    sink_size: int | None = None,
    recent_size: int | None = None,
    flush_size: int | None = None,
    config_overrides: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    mask_origin: str | Path = "mask",
) -> Path:
    """Write a folder that decodes with a pruned cache by onnxruntime: graph, description, runner, tokenizer.

    The weights are in memory once. The graph is checked against PyTorch before they are quantized, and once
    more afterwards.

    Args:
        model: A local folder or a hub id; without a mask, a converted checkpoint's folder.
        mask: Which channels are kept, in the model's own head order; None for a converted checkpoint.
        out: The folder to write. A training run that lies there is kept.
        opset: The graph's version of the ONNX operators.
        dtype: Of weights and cache: `float32` or `float16`.
        weights: `int8` or `int4`; None leaves them in `dtype`. The embedding and the cache stay in it.
        sink_size: First tokens that keep every channel; by default the mask's, else 128.
        recent_size: Last tokens that keep every channel; by default the mask's, else 1024.
        flush_size: Tokens that leave the recent window at once; by default the mask's, else 32.
        config_overrides: Keys of config.json to replace, such as `rope_parameters`.
        overwrite: Whether to replace a checkpoint or a graph in `out`.
        mask_origin: The mask's file, for messages.

    Returns:
        `out`.

    Raises:
        LeanKError: If a library is missing, or anything about the source, the mask, the opset or the target
            is wrong; `out` is then as before.
    """
    check_available(opset)
    check_quantizer(weights)
    checkpoint = resolve_model(model)
    if mask is None:
        read_leank_config(checkpoint)
        refuse_overlap(checkpoint, out)
        refuse_to_lose_mask(out, load_mask(checkpoint / MASK_FILE_NAME), overwrite=overwrite)
    else:
        check_exportable(model, out, config_overrides=config_overrides, overwrite=overwrite)
        refuse_to_lose_mask(out, mask, overwrite=overwrite)
    with staged_folder(out, overwrite=overwrite) as partial:
        temporary = partial / "checkpoint"
        if mask is not None:
            checkpoint = export_checkpoint(
                model,
                mask,
                temporary,
                sink_size=sink_size,
                recent_size=recent_size,
                flush_size=flush_size,
                prune="deferred",
                config_overrides=config_overrides,
                mask_origin=mask_origin,
            )
        pruned = dataclasses.replace(load_pruned(checkpoint, dtype), name=model_name(model))
        write_graph(pruned, partial / MODEL_NAME, opset=opset)
        trials = make_trials(pruned, weights)
        pruned.model.to("meta")  # its weights are in the file: from here on they need not be in memory, too
        check_graph(trials, partial / MODEL_NAME)
        difference = None
        if weights is not None:
            quantize_weights(partial / MODEL_NAME, weights)
            difference = measure_quantized(trials, partial / MODEL_NAME, weights)
        _copy_companions(checkpoint, partial)
        write_atomically(partial / MASK_FILE_NAME, (checkpoint / MASK_FILE_NAME).read_bytes())
        for host in sorted(Path(__file__).parent.glob(_HOST_FILES)):
            write_atomically(partial / host.name, host.read_bytes())
        if temporary.exists():
            shutil.rmtree(temporary)
        _describe_folder(pruned, partial, opset, weights, difference)
        readme = build_readme(pruned, opset=opset, weights=weights, difference=difference)
        write_atomically(partial / _README_NAME, readme.encode())
    return out


def export_graph(
    pruned: PrunedModel | Path, folder: Path, *, opset: int = DEFAULT_OPSET, weights: str | None = None
) -> None:
    """Write `model.onnx`, `model.onnx.data` and `leank_onnx.json` into a folder, without running the graph.

    For the dense model of the same exporter, replace `channel_masks` by zeros and `recent_size` by the
    capacity: nothing is pruned then.

    Args:
        pruned: A converted checkpoint's folder, or a model in memory with its masks.
        folder: An existing folder.
        opset: The graph's version of the ONNX operators.
        weights: `int8` or `int4`; None leaves them as they are.

    Raises:
        LeanKError: If a library is missing, the opset or the weights are not supported, or the checkpoint
            cannot be read.
    """
    check_available(opset)
    check_quantizer(weights)
    if isinstance(pruned, Path):
        pruned = load_pruned(pruned)
    write_graph(pruned, folder / MODEL_NAME, opset=opset)
    if weights is not None:
        quantize_weights(folder / MODEL_NAME, weights)
    _describe_folder(pruned, folder, opset, weights)


def _describe_folder(
    pruned: PrunedModel, folder: Path, opset: int, weights: str | None, difference: float | None = None
) -> None:
    """Write the description, with the digest of every file that is there. A README may be edited."""
    others = (_README_NAME, ONNX_DESCRIPTION_NAME, MARKER_NAME)
    present = sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in others)
    files = {path.relative_to(folder).as_posix(): sha256_of(path) for path in present}
    description = describe(pruned, opset=opset, files=files, weights=weights, difference=difference)
    write_atomically(folder / ONNX_DESCRIPTION_NAME, encode_json(description))


def _copy_companions(checkpoint: Path, folder: Path) -> None:
    """Copy the tokenizer and its kin as the checkpoint has them."""
    found = {path for pattern in COMPANION_PATTERNS for path in checkpoint.glob(pattern) if path.is_file()}
    for path in sorted(found):
        copy = folder / path.relative_to(checkpoint)
        copy.parent.mkdir(exist_ok=True)
        write_atomically(copy, path.read_bytes())
    if not (folder / "tokenizer.json").exists():
        _logger.warning(
            "`%s` has no `tokenizer.json`; `%s` will take tokens alone, no text", checkpoint, RUNNER_NAME
        )
