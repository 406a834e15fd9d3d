"""Write a graph, its weights and its description."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from leank_convert.checkpoint_io import write_atomically
from leank_convert.errors import LeanKError
from leank_convert.export.config_json import encode_json
from leank_convert.export.runtime_files import sha256_of
from leank_convert.onnx.description import DESCRIPTION_NAME, describe
from leank_convert.onnx.graph import trace
from leank_convert.onnx.subject import PrunedModel, load_pruned

MODEL_NAME = "model.onnx"
WEIGHTS_NAME = "model.onnx.data"
DEFAULT_OPSET = 23
OPSETS = range(18, 26)

_LIBRARIES = ("onnx", "onnxruntime", "onnxscript")


def check_available(opset: int = DEFAULT_OPSET) -> None:
    """Check that a graph of this opset can be written here.

    Raises:
        LeanKError: If a library is missing, or the opset is not one of `OPSETS`.
    """
    if opset not in OPSETS:
        raise LeanKError(
            f"`--opset` is {opset}; graphs are written for {OPSETS[0]} to {OPSETS[-1]}",
            hint=f"leave it out: {DEFAULT_OPSET} is what the runner is tested with",
        )
    missing = [name for name in _LIBRARIES if importlib.util.find_spec(name) is None]
    if missing:
        raise LeanKError(
            f"ONNX graphs need {', '.join(f'`{name}`' for name in missing)}, which cannot be imported",
            hint="pip install 'leank-convert[onnx]'",
        )


def export_graph(pruned: PrunedModel | Path, folder: Path, *, opset: int = DEFAULT_OPSET) -> None:
    """Write `model.onnx`, `model.onnx.data` and `leank_onnx.json` into a folder.

    Where no slot of the pruned region may be needed, as in a dense model of the same exporter, replace
    `channel_masks` by zeros and `recent_size` by the capacity.

    Args:
        pruned: A converted checkpoint's folder, or a model in memory with its masks.
        folder: An existing folder.
        opset: The graph's version of the ONNX operators.

    Raises:
        LeanKError: If a library is missing, the opset is not supported, or the checkpoint cannot be read.
    """
    check_available(opset)
    if isinstance(pruned, Path):
        pruned = load_pruned(pruned)
    program = trace(pruned, opset=opset)
    for node in program.model.graph.all_nodes():
        node.metadata_props.clear()  # where in whose source it was traced
    program.save(folder / MODEL_NAME, external_data=True)
    files = {name: sha256_of(folder / name) for name in (MODEL_NAME, WEIGHTS_NAME)}
    description = describe(pruned, opset=opset, files=files)
    write_atomically(folder / DESCRIPTION_NAME, encode_json(description))
