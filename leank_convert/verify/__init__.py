"""`leank-convert verify`: a checkpoint or an ONNX folder, against itself and against its source."""

from __future__ import annotations

from pathlib import Path

from leank_convert.checkpoint_io import is_onnx_folder
from leank_convert.files import user_path
from leank_convert.verify.checkpoint import verify_weights
from leank_convert.verify.checks import Check, Report

__all__ = ["Check", "Report", "verify_checkpoint"]


def verify_checkpoint(folder: str | Path, source: str | Path | None = None) -> Report:
    """Check a checkpoint or an ONNX folder against itself, and against the model it was made from.

    Of a checkpoint digests, headers, shapes and masks are checked, and with a source weights, config and
    tokenizer. A graph is run by onnxruntime, and with a source reads the same prompt as its stock class.

    Args:
        folder: What `leank-convert export` or `train` wrote.
        source: The model it was made from, a folder or a hub id; of a graph, also a checkpoint of that model.

    Returns:
        The report; failed checks are in it, not raised.

    Raises:
        LeanKError: If `folder` is neither, `source` is no complete model, or ONNX's packages are missing.
    """
    folder = user_path(folder)
    if not is_onnx_folder(folder):
        return verify_weights(folder, source)
    # Imports transformers, for which a checkpoint's checks have no use.
    from leank_convert.verify.onnx_folder import verify_onnx

    return verify_onnx(folder, source)
