"""Training samples: a long context, questions on it, and their answers, for any model with a chat template.

A sample is a function of the recipe's seed and its index alone, so a resumed run sees what an uninterrupted
one sees, and ranks agree on who takes which.
"""

from leank_convert.data.sample import Question, TrainingSample
from leank_convert.data.source import SampleSource
from leank_convert.data.stream import SampleStream

__all__ = ["Question", "SampleSource", "SampleStream", "TrainingSample"]
