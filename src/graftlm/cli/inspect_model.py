"""The part of `graft inspect` that shows a model: how each of its matrices is stored."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from graftlm.models.inspect import ModelReport, StoredMatrix


def show_model(console: Console, model: str, *, every_module: bool) -> None:
    """Print format, bits and bytes of a model's matrices, and the totals.

    Raises:
        CheckpointError: the model cannot be read.
    """
    from graftlm.checkpoint import open_checkpoint
    from graftlm.models.inspect import inspect_checkpoint

    checkpoint = open_checkpoint(model)
    report = inspect_checkpoint(checkpoint)
    checkpoint.close()
    console.print(_matrices(report, every_module=every_module))
    bits = 8 * report.matrix_bytes / report.num_weights
    console.print(
        f"{report.model_type}, {report.quant_method or 'not quantised'}: {report.num_weights:,} weights in "
        f"{report.matrix_bytes:,} bytes, {bits:.2f} bits each; {report.other_bytes:,} bytes of norms, biases and the "
        f"like; the output head is {'the token table' if report.tied_head else 'a matrix of its own'}",
        highlight=False,
    )


def _matrices(report: ModelReport, *, every_module: bool) -> Table:
    from rich import box
    from rich.table import Column, Table

    table = Table(
        Column("module", no_wrap=True),
        Column("count", justify="right"),
        Column("shape"),
        Column("format", no_wrap=True),
        Column("bits", justify="right"),
        Column("bytes", justify="right"),
        box=box.SIMPLE,
        pad_edge=False,
    )
    for (path, _, _), matrices in _group(report, every_module=every_module).items():
        first = matrices[0]
        table.add_row(
            path,
            str(len(matrices)),
            "x".join(map(str, first.shape)),
            first.format,
            f"{first.bits_per_weight:.2f}",
            f"{sum(matrix.num_bytes for matrix in matrices):,}",
        )
    return table


def _group(report: ModelReport, *, every_module: bool) -> dict[tuple[str, tuple[int, int], str], list[StoredMatrix]]:
    """Matrices that differ in nothing but their layer, under a path with * for the layer, in the model's order."""
    groups: dict[tuple[str, tuple[int, int], str], list[StoredMatrix]] = {}
    for matrix in report.matrices:
        parts = matrix.path.split(".")
        path = matrix.path if every_module else ".".join("*" if part.isdigit() else part for part in parts)
        groups.setdefault((path, matrix.shape, matrix.format), []).append(matrix)
    return groups
