"""Evaluation: what a checkpoint loses against its own dense model, on one prefill."""

from leank_convert.evaluate.comparison import Comparison, render_comparison
from leank_convert.evaluate.session import evaluate_checkpoint

__all__ = ["Comparison", "evaluate_checkpoint", "render_comparison"]
