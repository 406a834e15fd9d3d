"""Training: learn which channels of the K cache a model needs. The mask file is all that comes out of it."""

from leank_convert.train.loop import TrainingDirectory, train_mask

__all__ = ["TrainingDirectory", "train_mask"]
