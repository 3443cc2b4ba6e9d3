"""The losses of a job as a picture."""

from __future__ import annotations

import json
from pathlib import Path

from graftlm.training.output import METRICS_NAME

PLOT_NAME = "loss.png"


def plot_losses(folder: Path, title: str) -> Path | None:
    """Draw what a job's metrics say of its loss and, if it was measured, of the loss on what is held out.

    Returns: the picture beside them; None if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    lines = [json.loads(line) for line in (folder / METRICS_NAME).read_text(encoding="utf-8").splitlines()]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for key, label in (("loss", "loss"), ("eval_loss", "held out")):
        points = [(line["step"], line[key]) for line in lines if key in line]
        if points:
            axes.plot(*zip(*points, strict=True), label=label, marker="." if key == "eval_loss" else "")
    axes.set(title=title, xlabel="step", ylabel="loss")
    axes.grid(alpha=0.3)
    axes.legend()
    path = folder / PLOT_NAME
    figure.savefig(path, dpi=120)
    return path
