"""Benchmarks whose published files the user brings: LongBench (arXiv 2308.14508), GSM-Infinite (2502.05252).

Instructions are in words of our own wherever the files do not hold the prompt. Its structure, the tokens to
generate and the scoring are the benchmark's, but for what `scores.py` names: figures are comparable between
models here and not with published ones.
"""

from leank_convert.evaluate.benchmarks.gsm_infinite import draw_gsm_infinite
from leank_convert.evaluate.benchmarks.longbench import draw_longbench

__all__ = ["draw_gsm_infinite", "draw_longbench"]
