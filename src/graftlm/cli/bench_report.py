"""What `graft bench` has measured, as a table, as JSON and as a picture."""

from __future__ import annotations

import dataclasses
import json
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from graftlm.errors import ConfigurationError

if TYPE_CHECKING:
    from graftlm.workload import Measurement


def print_table(measured: Measurement) -> None:
    """A column for each batch size."""
    from rich.console import Console
    from rich.table import Table

    from graftlm.workload import FIGURES

    table = Table("", box=None, pad_edge=False)
    for each in measured.workloads:
        size = each.workload.num_requests
        table.add_column(f"{size} request{'' if size == 1 else 's'}", justify="right")
    for figure in FIGURES:
        values = [getattr(each.medians, figure.name) for each in measured.workloads]
        table.add_row(figure.label, *("" if value is None else figure.show(value) for value in values))
    console = Console()
    console.print(f"{measured.model}, {_conditions(measured)}", highlight=False, soft_wrap=True)
    console.print(
        f"limits measured between the runs: {measured.limits.bytes_per_second / 1e9:.1f} GB/s, "
        f"{measured.limits.flops / 1e9:.0f} GFLOP/s",
        highlight=False,
        soft_wrap=True,
    )
    console.print(table)


def write_json(measured: Measurement, path: Path) -> None:
    """The measurement with the figures of every run, all in seconds, bytes and tokens.

    Raises:
        ConfigurationError: the file cannot be written.
    """
    try:
        path.write_text(json.dumps(dataclasses.asdict(measured), indent=2) + "\n", encoding="utf-8")
    except OSError as cause:
        raise ConfigurationError("the figures cannot be written", got=f"{path}: {cause.strerror}") from cause


def check_can_plot(path: Path) -> None:
    """Raises ConfigurationError: there is nothing to draw with, or the ending is no picture's."""
    if find_spec("matplotlib") is None:
        raise ConfigurationError(
            "a picture needs matplotlib, which is not installed", do="pip install 'graftlm[train]', or leave --plot out"
        )
    from matplotlib.backend_bases import FigureCanvasBase

    kinds = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in kinds:
        raise ConfigurationError(
            "this is no kind of picture that can be drawn",
            got=path,
            allowed="an ending among " + ", ".join(f".{kind}" for kind in sorted(kinds)),
        )


def write_plot(measured: Measurement, path: Path) -> None:
    """Tokens per second against the batch size.

    Raises:
        ConfigurationError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    sizes = [each.workload.num_requests for each in measured.workloads]
    for name, label in (
        ("output_tokens_per_second", "output tokens, prompts' time included"),
        ("decode_tokens_per_second", "output tokens, decode steps alone"),
        ("prompt_tokens_per_second", "prompt tokens"),
    ):
        points = [
            (size, value)
            for size, each in zip(sizes, measured.workloads, strict=True)
            if (value := getattr(each.medians, name)) is not None
        ]
        if points:
            axes.plot(*zip(*points, strict=True), label=label, marker="o")
    axes.set(title=f"{measured.model}\n{_conditions(measured)}", xlabel="requests", ylabel="tokens per second")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path, dpi=120)
    except OSError as cause:
        raise ConfigurationError("the picture cannot be written", got=f"{path}: {cause.strerror}") from cause


def _conditions(measured: Measurement) -> str:
    from rich.filesize import decimal

    workload = measured.workloads[0].workload
    num_adapters = len(workload.adapters)
    weights = "" if measured.weight_bytes is None else f", {decimal(measured.weight_bytes)} of matrices"
    adapters = f"{num_adapters or 'no'} adapter{'' if num_adapters == 1 else 's'}"
    return (
        f"{workload.prompt_tokens} + {workload.output_tokens} tokens, {adapters}, {measured.dtype}{weights}, "
        f"kernels {measured.kernels}, medians of {len(measured.workloads[0].runs)}"
    )
