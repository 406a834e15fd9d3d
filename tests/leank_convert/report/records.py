"""Steps of a training run."""

from leank_convert.train.log import StepRecord


def make_records(ratios=(0.7,), steps=(20, 6), gpu_bytes=2_500_000_000):
    """Stage 1, then stage 2 for each ratio, whose loss tells which it is of; the first loss is rounding."""
    stages = [(1, None)] * steps[0] + [(2, ratio) for ratio in ratios for _ in range(steps[1])]
    return [
        StepRecord(
            step=step,
            stage=stage,
            pruning_ratio_asked=ratio,
            task="retrieval",
            num_tokens=1000,
            num_answer_tokens=10,
            learning_rate=0.01,
            distillation=1e-13 if step == 1 else (ratio or 1) / step,
            mean_factor=1 / step,
            pruning_ratio=None if ratio is None else ratio + 0.01,
            empty_heads=None if ratio is None else 2,
            heads_leaving="",
            heads_entering="",
            seconds=1.5,
            gpu_bytes=gpu_bytes,
        )
        for step, (stage, ratio) in enumerate(stages, 1)
    ]
