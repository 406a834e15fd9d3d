"""Libraries that ONNX export needs, and the operator sets they know."""

from __future__ import annotations

import importlib.util

from leank_convert.errors import LeanKError

DEFAULT_OPSET = 23
OPSETS = range(18, 26)

_LIBRARIES = ("onnx", "onnx_ir", "onnxruntime", "onnxscript")


def check_available(opset: int = DEFAULT_OPSET) -> None:
    """Check that a graph of this opset can be written here.

    Raises:
        LeanKError: If a library is missing or too old, or the opset is not one of `OPSETS`.
    """
    if opset not in OPSETS:
        raise LeanKError(
            f"opset {opset} is not supported; graphs are written for {OPSETS[0]} to {OPSETS[-1]}",
            hint=f"leave `--opset` out: {DEFAULT_OPSET} is what the runner is tested with",
        )
    missing = [name for name in _LIBRARIES if importlib.util.find_spec(name) is None]
    if missing:
        raise LeanKError(
            f"ONNX graphs need {', '.join(f'`{name}`' for name in missing)}, which cannot be imported",
            hint="pip install 'leank-convert[onnx]'",
        )
    import onnx
    import onnxruntime

    if onnx.defs.onnx_opset_version() < opset:
        old = onnx
    elif _release(onnxruntime.__version__) < _release(first_onnxruntime(opset)):
        old = onnxruntime
    else:
        return
    raise LeanKError(
        f"opset {opset} needs a later `{old.__name__}` than {old.__version__}",
        hint=f"pip install --upgrade {old.__name__}, or pass a lower `--opset`",
    )


def first_onnxruntime(opset: int) -> str:
    """The first release of onnxruntime that loads graphs of an opset."""
    return "1.24" if opset > 23 else "1.23" if opset == 23 else "1.22"


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])
