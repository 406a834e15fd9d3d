"""`leank-convert verify`: a checkpoint or an ONNX folder, against itself and against its source."""

from __future__ import annotations

from pathlib import Path

from leank_convert.checkpoint_io import CONFIG_NAME, ONNX_DESCRIPTION_NAME
from leank_convert.verify.checkpoint import verify_checkpoint
from leank_convert.verify.report import Check, VerifyReport

__all__ = ["Check", "VerifyReport", "is_onnx_folder", "verify_artifact", "verify_checkpoint"]


def is_onnx_folder(path: Path) -> bool:
    """Whether a folder was written by `export --format onnx`, if need be without its description."""
    if (path / ONNX_DESCRIPTION_NAME).exists():
        return True
    return (path / "model.onnx").exists() and not (path / CONFIG_NAME).exists()


def verify_artifact(path: str | Path, source: str | Path | None = None) -> VerifyReport:
    """Check a checkpoint or an ONNX folder.

    Args:
        path: Its folder.
        source: The model it was made from, a folder or a hub id.

    Returns:
        The report; failed checks are in it, not raised.

    Raises:
        LeanKError: If `path` is neither, `source` is no complete model, or ONNX's packages are missing.
    """
    if not is_onnx_folder(Path(path)):
        return verify_checkpoint(path, source)
    # Imports transformers, for which a checkpoint's checks have no use.
    from leank_convert.verify.onnx_folder import verify_onnx

    return verify_onnx(path, source)
