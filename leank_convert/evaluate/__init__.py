"""Evaluation: what a checkpoint loses against its own dense model, decoding from one prefill."""

from leank_convert.evaluate.session import evaluate_checkpoint
from leank_convert.evaluate.text import evaluate_text

__all__ = ["evaluate_checkpoint", "evaluate_text"]
