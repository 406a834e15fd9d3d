"""Methods beside LeanK that choose a model's channels: what they measure, how they score, what they keep."""
