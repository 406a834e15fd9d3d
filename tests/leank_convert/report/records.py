"""Steps of a training run."""

from dataclasses import replace

from leank_convert.train.log import StepRecord


def record(step, stage=1, **changes):
    """A step of stage 1 or 2; keyword arguments replace what it has."""
    values = {
        "step": step,
        "stage": stage,
        "pruning_ratio_asked": None if stage == 1 else 0.7,
        "task": "retrieval",
        "num_tokens": 1000,
        "num_answer_tokens": 10,
        "learning_rate": 0.01,
        "distillation": step / 100,
        "mean_factor": 0.5,
        "pruning_ratio": None if stage == 1 else 0.703125,
        "empty_heads": None if stage == 1 else 3,
        "heads_leaving": "",
        "heads_entering": "" if stage == 1 else "0.1 3.2",
        "seconds": 0.5,
        "gpu_bytes": None,
    }
    return StepRecord(**{**values, **changes})


def make_records(ratios=(0.7,), steps=(20, 6)):
    """Stage 1, then stage 2 for each ratio, whose loss tells which it is of; the first loss is rounding."""
    made = [
        record(step, mean_factor=1 / step, distillation=1 / step if step > 1 else 1e-13)
        for step in range(1, steps[0] + 1)
    ]
    for ratio in ratios:
        for step in range(len(made) + 1, len(made) + 1 + steps[1]):
            asked = {"pruning_ratio_asked": ratio, "pruning_ratio": ratio + 0.01}
            made.append(record(step, 2, mean_factor=1 / step, distillation=ratio / step, **asked))
    return [replace(each, seconds=1.5, gpu_bytes=2_500_000_000) for each in made]
