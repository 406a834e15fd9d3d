"""The checkpoint and the prefill of `tests/leank_convert/evaluate`."""

from tests.leank_convert.evaluate.conftest import evaluated, prefill

__all__ = ["evaluated", "prefill"]
