"""Training: learn which channels of the K cache a model needs. The mask file is all that comes out of it."""

from leank_convert.train.directory import TrainingDirectory
from leank_convert.train.loop import train_masks

__all__ = ["TrainingDirectory", "train_masks"]
