"""The learning rate of each update."""

from __future__ import annotations

import math

from graftlm.training.job import TrainingJob

WARMUP_FRACTION = 0.03


def learning_rate(job: TrainingJob, step: int, num_steps: int) -> float:
    """Of update `step`, counted from 0, of `num_steps`.

    Semantics: lr * (step + 1) / warm-up while step < warm-up; then, with p = (step - warm-up) / (num_steps - warm-up),
    lr * (1 + cos(pi p)) / 2 (cosine), lr * (1 - p) (linear), or lr.
    """
    warmup = _warmup(job, num_steps)
    if step < warmup:
        return job.lr * (step + 1) / warmup
    progress = (step - warmup) / max(1, num_steps - warmup)
    if job.schedule == "cosine":
        return job.lr * (1 + math.cos(math.pi * progress)) / 2
    return job.lr * (1 - progress) if job.schedule == "linear" else job.lr


def _warmup(job: TrainingJob, num_steps: int) -> int:
    if job.warmup_steps is not None:
        return job.warmup_steps
    return 0 if job.schedule == "constant" else math.ceil(num_steps * WARMUP_FRACTION)
