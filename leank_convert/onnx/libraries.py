"""Libraries that ONNX graphs need, and the operator set of those that are written."""

from __future__ import annotations

import importlib.util

from leank_convert.errors import LeanKError

OPSET = 23
FIRST_ONNXRUNTIME = "1.23"
"""The first release that loads graphs of this opset."""

_LIBRARIES = ("onnx", "onnx_ir", "onnxruntime", "onnxscript")


def check_available() -> None:
    """Check that graphs can be written and run here; LeanKError if a library is missing or too old."""
    missing = [name for name in _LIBRARIES if importlib.util.find_spec(name) is None]
    if missing:
        raise LeanKError(
            f"ONNX graphs need {', '.join(f'`{name}`' for name in missing)}, which cannot be imported",
            hint="pip install 'leank-convert[onnx]'",
        )
    import onnxruntime

    found = onnxruntime.__version__
    if [int(part) for part in found.split(".")[:2]] < [int(part) for part in FIRST_ONNXRUNTIME.split(".")]:
        raise LeanKError(
            f"onnxruntime {found} loads no graph of opset {OPSET}",
            hint=f"pip install --upgrade 'onnxruntime>={FIRST_ONNXRUNTIME}'",
        )
